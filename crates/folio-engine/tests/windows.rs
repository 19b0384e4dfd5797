//! What the scheduler does for models whose layers look back a window only. `folio-sim` tests it all at once.

use std::sync::Arc;

use folio_engine::engine::EngineParts;
use folio_engine::handle::Rejected;
use folio_engine::plan::HOLE;
use folio_engine::request::{Event, Request, SamplingParams};
use folio_engine::{ModelExecutor, SchedulerConfig, SystemClock, WaitingFor};
use folio_kv::{CacheConfig, GroupConfig, KvCache, default_policy};
use folio_sim::scenario::{request, text};
use folio_sim::{Machine, SimBackend};

fn config() -> SchedulerConfig {
    SchedulerConfig {
        max_num_seqs: 8,
        max_num_batched_tokens: 32,
        max_prefill_tokens_while_decoding: 16,
        max_model_len: 1024,
        watermark_permille: 0,
        ..SchedulerConfig::default()
    }
}

#[test]
fn a_long_output_holds_its_window_and_the_plan_shows_holes_at_once() {
    // Window 24 and a chunk of 32 touch at most 8 blocks of 8.
    let mut machine = Machine::with_windows(config(), 100, 8, &[(8, 24)]);
    let long = request(1, &text(1, 100), 400);
    machine.submit(long.clone());
    let mut most = 0;
    while machine.scheduler.has_work() || machine.plans().is_empty() {
        let plan = machine.step().clone();
        for sequence in &plan.sequences {
            let [full, window] = &sequence.block_tables[..] else { panic!("one table per group") };
            assert_eq!(full.len(), window.len());
            let holes = window.iter().take_while(|block| **block == HOLE.0).count();
            assert_eq!(holes as u32, (sequence.first_position + 1).saturating_sub(24) / 8);
            assert!(!full.contains(&HOLE.0) && !window[holes..].contains(&HOLE.0));
        }
        most = most.max(machine.cache.stats().windows()[0].active_blocks);
    }
    machine.assert_as_alone(&long);
    assert!(most <= 4, "{most} blocks held between steps");
    assert_eq!(machine.scheduler.counters().preemptions, 0);
}

#[test]
fn who_does_not_fit_the_windows_pool_waits_although_full_attention_has_room() {
    let mut machine = Machine::with_windows(config(), 400, 8, &[(9, 24)]);
    let requests = [request(1, &text(1, 60), 30), request(2, &text(2, 60), 30)];
    requests.iter().for_each(|request| machine.submit(request.clone()));
    machine.run();
    requests.iter().for_each(|request| machine.assert_as_alone(request));
    let counters = machine.scheduler.counters();
    assert!(counters.waits[WaitingFor::Blocks] > 0 && counters.preemptions == 0, "{counters:?}");
}

#[test]
fn when_a_windows_pool_runs_dry_somebody_is_preempted_and_nothing_changes() {
    let eager = SchedulerConfig { max_preemptions: 100, headroom_tokens: 0, ..config() };
    let mut machine = Machine::with_windows(eager, 400, 4, &[(24, 48)]);
    let requests: Vec<_> = (1..=4).map(|id| request(id, &text(id as u32, 10), 100)).collect();
    requests.iter().for_each(|request| machine.submit(request.clone()));
    machine.run();
    requests.iter().for_each(|request| machine.assert_as_alone(request));
    assert!(machine.scheduler.counters().preemptions > 0);
    assert!(machine.cache.stats().windows()[0].evictions > 0);
    assert_eq!(machine.cache.stats().evictions, 0);
}

#[test]
fn a_prefix_is_shared_with_its_last_window_only() {
    let mut machine = Machine::with_windows(config(), 200, 8, &[(20, 24)]);
    let prefix = text(1, 160);
    let with = |id: u64| {
        let mut prompt = prefix.clone();
        prompt.extend(text(10 + id as u32, 8));
        request(id, &prompt, 3)
    };
    for id in 1..=3 {
        machine.submit(with(id));
        machine.run();
        machine.assert_as_alone(&with(id));
    }
    assert_eq!((machine.cached_tokens(1), machine.cached_tokens(2)), (Some(0), Some(160)));
    assert_eq!(machine.cached_tokens(3), Some(160));
    // Of the prefix' 20 blocks the pool never held more than a few at once.
    assert!(machine.cache.stats().windows()[0].cached_blocks <= 20);
}

#[test]
fn choices_share_the_window_and_part() {
    let mut machine = Machine::with_windows(config(), 200, 8, &[(60, 24), (60, 7)]);
    let several = Request {
        n: 4,
        sampling: SamplingParams { temperature: 1.0, seed: 5, ..SamplingParams::greedy(60) },
        ..request(1, &text(1, 45), 60)
    };
    machine.submit(several.clone());
    machine.run();
    machine.assert_as_alone(&several);
    let copies: Vec<u32> =
        machine.plans().iter().flat_map(|plan| &plan.copies).map(|copy| copy.group).collect();
    for group in 0..3 {
        assert_eq!(
            copies.iter().filter(|of| **of == group).count(),
            3,
            "each fork copies one block per group"
        );
    }
}

#[test]
fn what_a_windows_pool_can_never_hold_is_refused_at_once() {
    let engine = |window_blocks: u32| {
        let windows = [GroupConfig::window(64, window_blocks, 8, 1)];
        let backend = SimBackend::new(29, 100, 8, 32, 32).with_groups(&windows);
        folio_engine::start(EngineParts {
            config: config(),
            cache: KvCache::with_groups(
                CacheConfig { blocks: 100, block_tokens: 8, bytes_per_block: 1 },
                &windows,
                default_policy(0.01),
            ),
            executor: Box::new(ModelExecutor::new(Box::new(backend), 29, 32, 32)),
            clock: Arc::new(SystemClock::new()),
            vocab: 29,
            tiers: Vec::new(),
            events: None,
        })
        .expect("starts")
    };
    // A window of 64 and a chunk of 32 touch up to 13 blocks.
    let (short, enough) = (engine(12), engine(13));
    let refused = short.submit(request(1, &text(1, 90), 8), Box::new(|_: Event| false));
    assert!(matches!(refused, Err(Rejected::LargerThanCache { needed_tokens: 97, cache_tokens: 96 })));
    assert!(
        short.submit(request(2, &text(1, 90), 7), Box::new(|_: Event| false)).is_ok(),
        "it fits as a whole"
    );
    assert!(enough.submit(request(1, &text(1, 400), 300), Box::new(|_: Event| false)).is_ok());
    for engine in [short, enough] {
        engine.stop();
        engine.join();
    }
}
