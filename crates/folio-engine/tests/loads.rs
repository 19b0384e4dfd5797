//! Blocks of a sequence that a transfer from outside fills: what arrives is not computed, and nothing else depends on it.

use std::num::NonZeroU32;
use std::sync::Arc;

use folio_engine::plan::{Sampled, StepOutput};
use folio_engine::request::{FinishReason, Request, RequestId};
use folio_engine::{
    AdapterId, AdapterReport, CancelRequest, Event, Micros, Scheduler, SchedulerConfig, WaitingFor,
};
use folio_kv::{CacheConfig, DEFAULT_PRIORITY, GroupConfig, KvCache, LruLeafFirst, RetentionRange, Ticket};
use folio_sim::scenario::request;

const BLOCK: u32 = 4;

struct Bench {
    scheduler: Scheduler,
    cache: KvCache,
    now: Micros,
    events: Vec<(RequestId, Event)>,
}

impl Bench {
    fn new(blocks: u32, depth: usize, config: SchedulerConfig) -> Self {
        let geometry = CacheConfig { blocks, block_tokens: BLOCK, bytes_per_block: 1 };
        let config = SchedulerConfig {
            max_num_seqs: 4,
            max_num_batched_tokens: 8,
            max_model_len: 256,
            watermark_permille: 0,
            headroom_tokens: 0,
            tier_load_wait_us_max: 20_000,
            ..config
        };
        let scheduler = Scheduler::new(config).expect("valid limits").with_overlap(depth, 1);
        let cache = KvCache::new(geometry, Box::new(LruLeafFirst::new()));
        Self { scheduler, cache, now: Micros(0), events: Vec::new() }
    }

    fn submit(&mut self, id: u64, tokens: u32, max_tokens: u32) {
        self.submit_as(id, tokens, max_tokens, |_| ());
    }

    fn submit_as(&mut self, id: u64, tokens: u32, max_tokens: u32, change: impl FnOnce(&mut Request)) {
        let prompt: Vec<u32> = (0..tokens).map(|at| at * 7 % 29 + id as u32).collect();
        let mut request = request(id, &prompt, max_tokens);
        change(&mut request);
        self.scheduler.admit([request.hashed(BLOCK)], [], self.now);
    }

    /// Plans a step; first position and rows of a sequence in it.
    fn plan(&mut self, id: u64) -> Option<(u32, usize)> {
        let plan = self.scheduler.plan(&mut self.cache, self.now);
        let entry = plan.sequences.iter().find(|entry| entry.id.0 == id);
        entry.map(|entry| (entry.first_position, entry.tokens.len()))
    }

    fn commit(&mut self, step: u64, samples: usize) {
        self.now.0 += 1000;
        let samples = vec![Sampled::Token { id: 1, logprobs: None }; samples];
        let output = StepOutput { step, samples, ..StepOutput::default() };
        self.events.append(self.scheduler.commit(&mut self.cache, Ok(&output), self.now));
        self.check();
    }

    /// A whole step; what it computed of a sequence.
    fn step(&mut self, id: u64) -> Option<(u32, usize)> {
        let rows = self.plan(id);
        let plan = self.scheduler.planned();
        let (step, samples) = (plan.step, plan.sequences.iter().map(|entry| entry.samples.len()).sum());
        if plan.sequences.is_empty() {
            self.now.0 += 1000
        } else {
            self.commit(step, samples)
        }
        rows
    }

    fn begin(&mut self, id: u64, blocks: u32) -> Option<Ticket> {
        self.begin_of((id, 0), blocks)
    }

    fn begin_of(&mut self, (id, choice): (u64, u32), blocks: u32) -> Option<Ticket> {
        let ticket = self.scheduler.begin_load(&mut self.cache, (RequestId(id), choice), blocks, self.now);
        self.check();
        ticket
    }

    fn end(&mut self, ticket: Ticket, verified: bool) {
        self.scheduler.end_load(&mut self.cache, ticket, verified, self.now);
        self.check();
    }

    fn check(&self) {
        self.scheduler.check(&self.cache).expect("in order");
    }

    fn cached_tokens(&self) -> Option<u32> {
        self.events.iter().find_map(|(_, event)| match event {
            Event::Prompt { cached_tokens, .. } => Some(*cached_tokens),
            _ => None,
        })
    }
}

#[test]
fn what_arrives_is_not_computed_and_counts_as_cached() {
    let mut bench = Bench::new(20, 1, SchedulerConfig::default());
    bench.submit(1, 30, 4);
    assert_eq!(bench.begin(1, 8), None, "the last row must be computed");
    let (first, second) = (bench.begin(1, 3).expect("room"), bench.begin(1, 2).expect("room"));
    assert_eq!(bench.step(1), None, "nothing else is to be computed");
    bench.end(second, true);
    assert_eq!(
        (bench.step(1), bench.scheduler.suspended()),
        (None, 1),
        "what came first waits for what is before it"
    );
    bench.end(first, true);
    assert_eq!(bench.step(1), Some((20, 8)));
    assert_eq!(bench.step(1), Some((28, 2)));
    assert_eq!(bench.cached_tokens(), Some(20));
    let waits = bench.scheduler.counters().waits;
    assert_eq!((waits[WaitingFor::TierLoad], bench.scheduler.suspended()), (1, 0));
}

#[test]
fn what_lies_before_it_is_computed_meanwhile() {
    let mut bench = Bench::new(20, 2, SchedulerConfig::default());
    bench.submit(1, 30, 4);
    assert_eq!(bench.plan(1), Some((0, 8)));
    let ticket = bench.begin(1, 2).expect("its table ends at a border, though a step is under way");
    assert_eq!((bench.plan(1), bench.scheduler.suspended()), (None, 0));
    bench.end(ticket, true);
    assert_eq!(bench.plan(1), None, "what is before it is not there yet");
    bench.commit(1, 0);
    assert_eq!(bench.step(1), Some((16, 8)), "the step's rows, and what was loaded behind them");
}

#[test]
fn what_is_damaged_or_late_is_computed() {
    for late in [false, true] {
        let mut bench = Bench::new(20, 1, SchedulerConfig::default());
        bench.submit(1, 30, 4);
        let (first, second) = (bench.begin(1, 2).expect("room"), bench.begin(1, 2).expect("room"));
        match late {
            true => bench.now.0 += 30_000,
            false => bench.end(first, false),
        }
        let held = bench.cache.stats().active_blocks;
        assert_eq!(held, if late { 4 } else { 2 }, "what nobody waits for stays the transfer's");
        assert_eq!(bench.step(1), Some((0, 8)));
        let expired = bench.scheduler.counters().waits_expired[WaitingFor::TierLoad];
        assert_eq!(expired, u64::from(late));
        bench.end(second, true);
        if late {
            bench.end(first, true);
        }
        assert_eq!(bench.step(1), Some((8, 8)), "what is reported now is of no table");
    }
}

#[test]
fn a_report_behind_the_end_frees_the_blocks() {
    let mut bench = Bench::new(20, 1, SchedulerConfig::default());
    bench.submit(1, 30, 4);
    let ticket = bench.begin(1, 3).expect("room");
    bench.scheduler.admit([], [CancelRequest { request: RequestId(1), choice: None }], bench.now);
    bench.step(1);
    let events = std::mem::take(bench.scheduler.events());
    assert!(matches!(events[..], [(_, Event::Finished { reason: FinishReason::Cancelled, .. })]));
    assert_eq!((bench.cache.stats().active_blocks, bench.cache.stats().free_blocks), (3, 17));
    bench.end(ticket, true);
    assert_eq!((bench.cache.stats().active_blocks, bench.cache.stats().cached_blocks), (0, 0));
}

/// A transfer may be late for ever: what it writes is not what a reservation counts on.
#[test]
fn a_load_takes_nothing_that_was_promised() {
    let mut bench =
        Bench::new(10, 1, SchedulerConfig { guarantee_completion: true, ..SchedulerConfig::default() });
    bench.submit(1, 24, 9);
    assert_eq!(bench.begin(1, 3), None, "8 of 10 blocks are promised to itself");
    let ticket = bench.begin(1, 2).expect("there are two more");
    bench.now.0 += 30_000;
    let mut rows = Vec::new();
    while bench.scheduler.has_work() {
        rows.extend(bench.step(1));
        bench.scheduler.events().clear();
    }
    assert_eq!(rows.first(), Some(&(0, 8)));
    assert_eq!(rows.last(), Some(&(31, 1)), "it got all that it was promised");
    assert_eq!(bench.scheduler.counters().preemptions, 0);
    bench.end(ticket, false);
    assert_eq!(bench.cache.stats().active_blocks, 0);
}

#[test]
fn nothing_is_loaded_while_somebody_is_refused_blocks() {
    let mut bench = Bench::new(12, 1, SchedulerConfig::default());
    bench.submit(1, 20, 8);
    (0..4).for_each(|_| assert!(bench.step(1).is_some()));
    bench.submit(2, 20, 4);
    bench.submit(3, 44, 4);
    bench.step(3);
    assert!(bench.scheduler.contended());
    assert_eq!(bench.begin(2, 1), None, "somebody was refused blocks");
}

/// What a transfer is late with is its own, whoever waited for it: it counts until its report.
#[test]
fn bytes_in_transfer_have_a_limit() {
    let limit = SchedulerConfig { max_transfer_bytes: 5, ..SchedulerConfig::default() };
    let mut bench = Bench::new(40, 1, limit);
    bench.submit(1, 30, 4);
    bench.submit(2, 30, 4);
    assert_eq!(bench.begin(1, 6), None, "more than the limit");
    let ticket = bench.begin(1, 4).expect("a byte a block");
    assert_eq!(bench.begin(2, 2), None, "one is left");
    bench.scheduler.admit([], [CancelRequest { request: RequestId(1), choice: None }], bench.now);
    bench.step(2);
    assert_eq!((bench.cache.loading_bytes(), bench.begin(2, 2)), (4, None), "it still writes");
    bench.end(ticket, true);
    assert!(bench.cache.loading_bytes() == 0 && bench.begin(2, 2).is_some());
}

#[test]
fn each_choice_may_have_loads() {
    let mut bench = Bench::new(40, 1, SchedulerConfig::default());
    bench.submit_as(1, 8, 9, |request| request.n = 2);
    assert_eq!(bench.begin_of((1, 2), 1), None, "there is no such choice");
    assert!(bench.step(1).is_some());
    // Both generate; of what they know nothing is left to load, but for one that lost its blocks.
    (0..5).for_each(|_| assert!(bench.step(1).is_some()));
    assert_eq!(bench.begin_of((1, 1), 1), None, "the next row must be computed");
    assert_eq!(bench.scheduler.preempt_all(&mut bench.cache), 2);
    bench.cache.clear(None);
    let tickets = [0, 1].map(|choice| bench.begin_of((1, choice), 2).expect("it knows 13 tokens"));
    assert_ne!(tickets[0], tickets[1]);
    assert_eq!(bench.scheduler.suspended(), 2);
    tickets.into_iter().for_each(|ticket| bench.end(ticket, true));
    assert!(bench.scheduler.tables().all(|(.., table)| table.computed() == 8));
    while bench.scheduler.has_work() {
        bench.step(1);
        let events = std::mem::take(bench.scheduler.events());
        bench.events.extend(events);
    }
    let ended = bench.events.iter().filter(|(_, event)| matches!(event, Event::Finished { .. }));
    assert_eq!(ended.count(), 2);
}

/// A word from outside does not end the wait for what a transfer writes, which reports by itself.
#[test]
fn nobody_but_its_report_ends_the_wait_for_a_transfer() {
    let mut bench = Bench::new(20, 1, SchedulerConfig::default());
    bench.submit(1, 30, 4);
    let ticket = bench.begin(1, 3).expect("room");
    bench.scheduler.resume(RequestId(1), WaitingFor::TierLoad, bench.now);
    assert_eq!((bench.step(1), bench.scheduler.suspended()), (None, 1));
    assert_eq!(bench.scheduler.counters().waits[WaitingFor::TierLoad], 1, "its deadline is that of one wait");
    bench.end(ticket, true);
    assert_eq!((bench.scheduler.suspended(), bench.step(1)), (0, Some((12, 8))));
}

/// What arrives is kept as the request says, like what is computed.
#[test]
fn what_arrives_is_retained() {
    for retained in [false, true] {
        let mut bench = Bench::new(8, 1, SchedulerConfig::default());
        let priority = if retained { 90 } else { DEFAULT_PRIORITY };
        let range = RetentionRange { tokens: 0..16, priority, ttl_us: None, pin: false };
        bench.submit_as(1, 20, 1, |request| request.retention = vec![range]);
        assert_eq!(bench.step(1), Some((0, 8)));
        let ticket = bench.begin(1, 2).expect("room");
        bench.end(ticket, true);
        assert!(bench.step(1).is_some());
        // Others come and take all the room there is.
        (2..6).for_each(|id| {
            bench.submit(id, 10, 1);
            bench.step(id);
            bench.step(id);
        });
        let prompt: Vec<u32> = (0..20).map(|at| at * 7 % 29 + 1).collect();
        bench.submit_as(6, 20, 1, |request| request.prompt = prompt.into());
        assert_eq!(bench.step(6).is_some_and(|(first, _)| first >= 16), retained);
    }
}

/// A group that nobody depends on is not written.
#[test]
fn bytes_in_transfer_are_those_of_all_groups_that_are_needed() {
    let limit = SchedulerConfig { max_transfer_bytes: 5, ..SchedulerConfig::default() };
    let mut bench = Bench::new(40, 1, limit);
    let geometry = CacheConfig { blocks: 40, block_tokens: BLOCK, bytes_per_block: 1 };
    let window = GroupConfig::window(64, 40, BLOCK, 1);
    let groups = [window, GroupConfig { optional: true, ..window }];
    bench.cache = KvCache::with_groups(geometry, &groups, Box::new(LruLeafFirst::new()));
    bench.submit(1, 30, 4);
    assert_eq!(bench.begin(1, 3), None, "three blocks of two groups");
    assert!(bench.begin(1, 2).is_some());
    assert_eq!(bench.cache.loading_bytes(), 4);
}

/// Who waits for the slot of an adapter lacks no blocks: that holds up no transfer.
#[test]
fn others_are_loaded_while_an_adapter_waits() {
    let config = SchedulerConfig { max_adapters: 1, ..SchedulerConfig::default() };
    let mut bench = Bench::new(40, 1, config);
    let adapter = |name| NonZeroU32::new(name).map(|id| AdapterId(id).into());
    for id in [1, 2].into_iter().filter_map(NonZeroU32::new).map(AdapterId) {
        let report = AdapterReport { id, weights: Ok(Arc::default()) };
        bench.scheduler.adapter_read(&mut bench.cache, report, Micros(0));
    }
    bench.submit_as(1, 10, 9, |request| request.adapter = adapter(1));
    assert!(bench.step(1).is_some());
    bench.submit_as(2, 10, 4, |request| request.adapter = adapter(2));
    bench.submit(3, 30, 4);
    bench.step(1);
    assert!(!bench.scheduler.contended());
    assert_eq!(bench.begin(2, 1), None, "it waits");
    assert!(bench.begin(3, 1).is_some());
}
