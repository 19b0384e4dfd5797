//! Waits for what is outside the steps: a mask, KV of another tier or engine, an adapter. Each holds up its own sequence alone.

use std::num::NonZeroU32;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use folio_engine::plan::ExecutorError;
use folio_engine::request::{Event, Request, RequestId};
use folio_engine::{
    AdapterId, FinishReason, Guide, Micros, Restricted, Rules, RulesRef, Scheduler, SchedulerConfig,
    WaitingFor,
};
use folio_kv::{CacheConfig, KvCache, default_policy};
use folio_sim::Machine;
use folio_sim::rules::HashRules;
use folio_sim::scenario::{request, text};

const OUTSIDE: [WaitingFor; 3] = [WaitingFor::TierLoad, WaitingFor::RemotePrefill, WaitingFor::Adapter];

fn config() -> SchedulerConfig {
    SchedulerConfig {
        max_num_seqs: 8,
        max_num_batched_tokens: 64,
        max_model_len: 1024,
        watermark_permille: 0,
        headroom_tokens: 0,
        tier_load_wait_us_max: 20_000,
        remote_prefill_wait_us_max: 30_000,
        grammar_wait_us_max: 40_000,
        adapter_wait_us_max: 50_000,
        ..SchedulerConfig::default()
    }
}

/// Rules whose masks are all late while the gate is closed.
struct Gated {
    rules: HashRules,
    open: Arc<AtomicBool>,
}

struct Following {
    guide: Arc<dyn Guide>,
    open: Arc<AtomicBool>,
}

impl Rules for Gated {
    fn guide(&self, chosen: &[u32]) -> Arc<dyn Guide> {
        Arc::new(Following { guide: self.rules.guide(chosen), open: self.open.clone() })
    }

    fn name(&self) -> &str {
        "gated"
    }
}

impl Guide for Following {
    fn advance(&self, token: u32) {
        self.guide.advance(token);
    }

    fn restrict(&self, drafts: &[u32], logits: &mut [f32]) -> Result<Restricted, String> {
        match self.is_ready(drafts) {
            true => self.guide.restrict(drafts, logits),
            false => Ok(Restricted::Late),
        }
    }

    fn is_ready(&self, _: &[u32]) -> bool {
        self.open.load(Ordering::SeqCst)
    }
}

/// A request with rules, and their gate.
fn gated(id: u64, prompt: &[u32], max_tokens: u32, open: bool) -> (Request, Arc<AtomicBool>) {
    let open = Arc::new(AtomicBool::new(open));
    let rules = HashRules { seed: id, ..HashRules::default() };
    let mut request = request(id, prompt, max_tokens);
    request.sampling.rules = Some(RulesRef(Arc::new(Gated { rules, open: open.clone() })));
    (request, open)
}

/// First position and rows of a sequence in the last plan.
fn rows(machine: &Machine, id: u64) -> Option<(u32, usize)> {
    let plan = machine.plans().last().expect("a plan");
    let entry = plan.sequences.iter().find(|entry| entry.id.0 == id);
    entry.map(|entry| (entry.first_position, entry.tokens.len()))
}

fn error(machine: &Machine, id: u64) -> String {
    let events = &machine.events[&RequestId(id)];
    let error = events.iter().find_map(|event| match event {
        Event::Finished { error: Some(error), .. } => Some(error.to_string()),
        _ => None,
    });
    error.expect("it ended with an error")
}

#[test]
fn a_late_mask_defers_its_row_and_everybody_else_commits() {
    for (depth, lag) in [(1, 1), (2, 1), (4, 3)] {
        let mut machine = Machine::new(config(), 100, 4).with_pipeline(depth, lag);
        let (slow, open) = gated(1, &text(1, 9), 12, true);
        let other = request(2, &text(2, 9), 30);
        [&slow, &other].into_iter().for_each(|request| machine.submit(request.clone()));
        while machine.tokens(1, 0).len() < 4 {
            machine.step();
        }
        open.store(false, Ordering::SeqCst);
        while machine.scheduler.counters().late_rows == 0 {
            let before = (machine.tokens(1, 0).len(), machine.tokens(2, 0).len());
            machine.step();
            let after = (machine.tokens(1, 0).len(), machine.tokens(2, 0).len());
            if machine.scheduler.counters().late_rows > 0 && depth == 1 {
                assert_eq!(rows(&machine, 1).expect("it had a row").1, 1);
                assert_eq!(after, (before.0, before.1 + 1), "the same step is a token for the other");
            }
        }
        let (said, neighbour) = (machine.tokens(1, 0).len(), machine.tokens(2, 0).len());
        let from = machine.plans().len();
        (0..10).for_each(|_| drop(machine.step().clone()));
        assert!(machine.tokens(2, 0).len() >= neighbour + 10 / lag, "nobody waits for a mask of another's");
        let again = machine.plans()[from..].iter().flat_map(|plan| &plan.sequences);
        assert_eq!(again.filter(|entry| entry.id.0 == 1).count(), 0, "no rows before the mask is there");
        open.store(true, Ordering::SeqCst);
        machine.run();
        assert!(machine.tokens(1, 0).len() > said);
        assert_eq!(machine.scheduler.counters().late_rows, 1, "{depth} {lag}");
        machine.assert_as_alone(&slow);
        machine.assert_as_alone(&other);
        assert_eq!(machine.cache.stats().active_blocks, 0);
    }
}

#[test]
fn of_a_prompt_whose_mask_is_late_the_last_row_alone_is_computed_again() {
    for n in [1, 3] {
        let mut machine = Machine::new(config(), 100, 4);
        let (mut slow, open) = gated(1, &text(1, 9), 6, false);
        (slow.n, slow.prompt_logprobs) = (n, Some(1));
        machine.submit(slow.clone());
        machine.step();
        assert_eq!(rows(&machine, 1), Some((0, 9)));
        machine.step();
        assert_eq!(rows(&machine, 1), None);
        open.store(true, Ordering::SeqCst);
        machine.step();
        assert_eq!(rows(&machine, 1), Some((8, 1)));
        machine.run();
        machine.assert_as_alone(&slow);
        let Some(Event::Prompt { prompt_logprobs, .. }) = machine.events[&RequestId(1)].first() else {
            panic!("the prompt comes first");
        };
        assert_eq!(*prompt_logprobs, machine.alone(&slow).prompt_logprobs);
    }
}

/// Its blocks are anybody's who needs them; then it waits in no queue, and goes on when its mask is there.
#[test]
fn who_waits_for_a_mask_may_lose_its_blocks_and_goes_on_waiting() {
    let mut machine = Machine::new(config(), 100, 4);
    let (slow, open) = gated(1, &text(1, 9), 8, false);
    machine.submit(slow.clone());
    machine.step();
    assert_eq!(machine.scheduler.preempt_all(&mut machine.cache), 1);
    machine.step();
    assert!(machine.scheduler.suspended() == 1 && rows(&machine, 1).is_none());
    open.store(true, Ordering::SeqCst);
    machine.run();
    machine.assert_as_alone(&slow);
    assert_eq!(machine.scheduler.suspended(), 0);
}

/// Back from the tier that kept it, its last row late, and preempted again.
#[test]
fn a_late_row_right_after_a_return_leaves_everything_as_it_came() {
    for windows in [vec![], vec![(40, 20), (64, 100)]] {
        let mut machine = Machine::with_windows(config(), 64, 16, &windows).with_tier(128, 0.0);
        let (slow, open) = gated(1, &text(1, 100), 40, true);
        let other = request(2, &text(2, 50), 100);
        [&slow, &other].into_iter().for_each(|request| machine.submit(request.clone()));
        (0..12).for_each(|_| drop(machine.step().clone()));
        machine.scheduler.preempt_all(&mut machine.cache);
        machine.step();
        machine.cache.clear(None);
        open.store(false, Ordering::SeqCst);
        while machine.scheduler.counters().late_rows == 0 {
            machine.step();
        }
        assert!(rows(&machine, 1).expect("its rows").1 < 16, "less than a block");
        machine.scheduler.preempt_all(&mut machine.cache);
        machine.scheduler.check(&machine.cache).expect("nothing is half published");
        machine.step();
        open.store(true, Ordering::SeqCst);
        machine.run();
        machine.assert_as_alone(&slow);
        machine.assert_as_alone(&other);
        let counters = machine.scheduler.counters();
        assert!(counters.preemptions_swapped >= 2 && counters.loaded_tokens > 0, "{counters:?}");
    }
}

#[test]
fn a_mask_that_never_comes_ends_its_request_by_name() {
    let mut machine = Machine::new(config(), 100, 4);
    let (slow, _open) = gated(1, &text(1, 9), 8, false);
    let other = request(2, &text(2, 9), 100);
    [&slow, &other].into_iter().for_each(|request| machine.submit(request.clone()));
    machine.step();
    let since = machine.now;
    while machine.finished(1).is_empty() {
        machine.step();
    }
    assert!((40_000..43_000).contains(&(machine.now.0 - since.0)), "{:?}", machine.now);
    assert_eq!(machine.finished(1), [(0, FinishReason::Error)]);
    let error = error(&machine, 1);
    assert!(error.contains("'gated'") && error.contains("0.04 s"), "{error}");
    machine.run();
    machine.assert_as_alone(&other);
    assert_eq!(machine.scheduler.counters().waits_expired[WaitingFor::Grammar], 1);
}

/// In the queue and among those that run, until a report.
#[test]
fn who_waits_outside_gets_no_rows_until_the_report_and_others_pass_it() {
    for reason in OUTSIDE {
        for begun in [false, true] {
            let mut machine = Machine::new(SchedulerConfig { max_num_seqs: 2, ..config() }, 100, 4);
            let requests = [1, 2, 3].map(|id| request(id, &text(id as u32, 9), 5));
            let waits = if begun { 1 } else { 3 };
            requests.iter().for_each(|request| machine.submit(request.clone()));
            machine.step();
            machine.scheduler.suspend(RequestId(waits), reason, machine.now);
            machine.scheduler.suspend(RequestId(77), reason, machine.now);
            let said = machine.tokens(waits, 0).len();
            for id in [1, 2, 3].into_iter().filter(|id| *id != waits) {
                while machine.finished(id).is_empty() {
                    machine.step();
                    assert_eq!(rows(&machine, waits), None, "{reason:?}");
                }
            }
            assert_eq!(machine.tokens(waits, 0).len(), said);
            let other = OUTSIDE.into_iter().find(|other| *other != reason).expect("there are three");
            machine.scheduler.resume(RequestId(waits), other, machine.now);
            assert_eq!(machine.scheduler.suspended(), 1, "that is not what it waits for");
            machine.scheduler.resume(RequestId(waits), reason, machine.now);
            machine.scheduler.resume(RequestId(waits), reason, machine.now);
            machine.run();
            requests.iter().for_each(|request| machine.assert_as_alone(request));
            let counters = machine.scheduler.counters();
            assert_eq!((counters.waits[reason], counters.waits_expired[reason]), (1, 0));
        }
    }
}

/// Without a report its deadline ends it: without what can be computed here, with an error where nothing can be.
#[test]
fn a_report_that_never_comes_is_not_waited_for() {
    for (reason, us) in OUTSIDE.into_iter().zip([20_000, 30_000, 50_000]) {
        let mut machine = Machine::new(config(), 100, 4);
        let waits = request(1, &text(1, 9), 5);
        machine.submit(waits.clone());
        machine.step();
        let since = machine.now;
        machine.scheduler.suspend(waits.id, reason, since);
        machine.run();
        assert!((us..us + 10_000).contains(&(machine.now.0 - since.0)), "{reason:?}: {:?}", machine.now);
        match reason {
            WaitingFor::Adapter => assert!(error(&machine, 1).contains("not loaded within 0.05 s")),
            _ => machine.assert_as_alone(&waits),
        }
        assert_eq!(machine.scheduler.counters().waits_expired[reason], 1);
        assert!(machine.scheduler.suspended() == 0 && machine.cache.stats().active_blocks == 0);
    }
}

#[test]
fn a_report_after_the_end_changes_nothing() {
    let mut machine = Machine::new(config(), 100, 4);
    machine.submit(request(1, &text(1, 9), 5));
    machine.step();
    machine.scheduler.suspend(RequestId(1), WaitingFor::RemotePrefill, machine.now);
    machine.cancel(1);
    machine.step();
    assert_eq!(machine.finished(1), [(0, FinishReason::Cancelled)]);
    assert!(machine.scheduler.suspended() == 0 && machine.cache.stats().active_blocks == 0);
    machine.scheduler.resume(RequestId(1), WaitingFor::RemotePrefill, machine.now);
    assert!(!machine.scheduler.has_work());
}

/// Who computes what others want too, and waits for something outside, is waited for by nobody.
#[test]
fn nobody_waits_for_a_prefix_of_somebody_who_waits_outside() {
    let mut machine = Machine::new(SchedulerConfig { max_num_batched_tokens: 8, ..config() }, 100, 4);
    let requests = [1, 2].map(|id| request(id, &text(9, 40), 5));
    requests.iter().for_each(|request| machine.submit(request.clone()));
    machine.step();
    assert_eq!(machine.scheduler.counters().waits[WaitingFor::SharedPrefix], 1);
    machine.scheduler.suspend(RequestId(1), WaitingFor::Adapter, machine.now);
    while machine.finished(2).is_empty() {
        machine.step();
        assert!(machine.finished(1).is_empty(), "the other was faster than the deadline");
    }
    machine.scheduler.resume(RequestId(1), WaitingFor::Adapter, machine.now);
    machine.run();
    requests.iter().for_each(|request| machine.assert_as_alone(request));
}

#[test]
fn an_ended_request_is_kept_by_no_plan() {
    let rules: Arc<dyn Rules> = Arc::new(HashRules::default());
    let mut request = request(1, &text(1, 9), 5);
    request.sampling.rules = Some(RulesRef(rules.clone()));
    let geometry = CacheConfig { blocks: 10, block_tokens: 4, bytes_per_block: 1 };
    let mut cache = KvCache::new(geometry, default_policy(0.01));
    let mut scheduler = Scheduler::new(config()).expect("valid limits");
    scheduler.admit([request.hashed(4)], [], Micros(0));
    assert_eq!(scheduler.plan(&mut cache, Micros(1)).sequences.len(), 1);
    let error = ExecutorError { step: 1, reason: "it fails".into() };
    scheduler.commit(&mut cache, Err(error), Micros(2)).clear();
    assert_eq!(Arc::strong_count(&rules), 1, "rules, parameters and histories end with their request");
}

/// Who names an adapter that no running sequence uses waits for the end of those that do. Others with one pass it, but not for ever; who has none
/// always does.
#[test]
fn an_adapter_needs_a_slot() {
    for bypasses in [8, 2] {
        let config = SchedulerConfig { max_adapters: 1, max_bypasses: bypasses, ..config() };
        let mut machine = Machine::new(config, 200, 4);
        let with = |id: u64, adapter: Option<u32>, max_tokens| Request {
            adapter: adapter.and_then(NonZeroU32::new).map(|id| AdapterId(id).into()),
            ..request(id, &text(id as u32, 9), max_tokens)
        };
        // The weights of each are there in the step behind the one in which they are wanted.
        machine.submit(with(1, Some(7), 16));
        (0..2).for_each(|_| _ = machine.step());
        machine.submit(with(2, Some(8), 3));
        machine.step();
        machine.submit(with(3, Some(7), 5));
        machine.submit(with(4, Some(7), 5));
        machine.step();
        machine.submit(with(5, Some(7), 4));
        machine.submit(with(6, None, 4));
        (0..2).for_each(|_| _ = machine.step());
        assert_eq!((rows(&machine, 2), machine.scheduler.counters().preemptions), (None, 0));
        // Two with an adapter passed it; the third only where more may.
        assert!([3, 4, 6].iter().all(|id| rows(&machine, *id).is_some()));
        assert_eq!(rows(&machine, 5).is_some(), bypasses > 2);
        machine.run();
        assert_eq!((1..7).map(|id| machine.tokens(id, 0).len()).sum::<usize>(), 16 + 3 + 5 + 5 + 4 + 4);
    }
}

/// A better class gets no slot by preempting who uses it: it waits for that one's end.
#[test]
fn nobody_is_preempted_for_the_slot_of_an_adapter() {
    let mut machine = Machine::new(SchedulerConfig { max_adapters: 1, ..config() }, 200, 4);
    let with = |id: u64, class, adapter| Request {
        adapter: NonZeroU32::new(adapter).map(|id| AdapterId(id).into()),
        class,
        ..request(id, &text(id as u32, 9), 8)
    };
    machine.submit(with(1, 0, 7));
    machine.step();
    machine.submit(with(2, -1, 8));
    machine.run();
    assert_eq!((machine.tokens(2, 0).len(), machine.scheduler.counters().preemptions), (8, 0));
}
