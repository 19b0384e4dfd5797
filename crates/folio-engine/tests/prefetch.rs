//! Loads that begin while their request waits in the queue: for whom, how many, and when they end.

use std::ops::Range;

use folio_engine::plan::{Sampled, StepOutput};
use folio_engine::request::RequestId;
use folio_engine::{
    CancelRequest, Event, LoadOrder, Micros, PrefetchCounts, Request, Scheduler, SchedulerConfig,
    TransferOrder, WaitingFor,
};
use folio_kv::{CacheConfig, GroupConfig, KvCache, LruLeafFirst, Quota, TenantId, Ticket};
use folio_sim::Machine;
use folio_sim::scenario::{request, root, small, text};

const BLOCK: u32 = 4;
const NOBODY: [u64; 0] = [];

/// One place among those that run, and a first request that keeps it for 200 tokens.
struct Bench {
    scheduler: Scheduler,
    cache: KvCache,
    now: Micros,
    events: Vec<(RequestId, Event)>,
    /// Loads that have not ended.
    open: Vec<Ticket>,
    promoted: Vec<Ticket>,
    cancelled: Vec<Ticket>,
}

impl Bench {
    fn new(blocks: u32, config: SchedulerConfig) -> Self {
        Self::with(blocks, &[], &[], config)
    }

    fn with(
        blocks: u32,
        more: &[GroupConfig],
        quotas: &[(TenantId, Quota)],
        config: SchedulerConfig,
    ) -> Self {
        let geometry = CacheConfig { blocks, block_tokens: BLOCK, bytes_per_block: 1 };
        let config = SchedulerConfig {
            max_num_seqs: 1,
            max_num_batched_tokens: 64,
            max_model_len: 1024,
            watermark_permille: 0,
            headroom_tokens: 0,
            tier_load_wait_us_max: 20_000,
            ..config
        };
        let scheduler = Scheduler::new(config).expect("valid limits").with_tiers([1]);
        let cache = KvCache::with_groups(geometry, more, Box::new(LruLeafFirst::new()));
        let (events, open, promoted, cancelled) = Default::default();
        let mut bench = Self { scheduler, cache, now: Micros(0), events, open, promoted, cancelled };
        bench.cache.set_quotas(quotas).expect("quotas that can be");
        bench.submit(1, 0, 20, 200, 0);
        assert_eq!(bench.step(), [1]);
        bench
    }

    /// `stored`: blocks that the tier has, from the first on.
    fn submit(&mut self, id: u64, tenant: u32, tokens: u32, max_tokens: u32, stored: u32) {
        let prompt: Vec<u32> = (0..tokens).map(|at| (at * 7 + id as u32) % 29).collect();
        let tenant = TenantId(tenant);
        let request = Request { tenant, root: root(tenant), ..request(id, &prompt, max_tokens) };
        let (request, hashes) = request.hashed(BLOCK);
        let stored = if stored > 0 { vec![vec![Range { start: 0, end: stored }]] } else { Vec::new() };
        self.scheduler.admit([(request, hashes.with_stored(stored))], [], self.now);
    }

    fn cancel(&mut self, id: u64) {
        let cancel = CancelRequest { request: RequestId(id), choice: None };
        self.scheduler.admit([], [cancel], self.now);
    }

    /// A whole step of a millisecond; who is in it.
    fn step(&mut self) -> Vec<u64> {
        self.now.0 += 1000;
        let plan = self.scheduler.plan(&mut self.cache, self.now);
        let ids = plan.sequences.iter().map(|of| of.id.0).collect();
        if !plan.sequences.is_empty() {
            let samples = plan.sequences.iter().flat_map(|of| &of.samples);
            let samples = samples.map(|_| Sampled::Token { id: 1, logprobs: None }).collect();
            let output = StepOutput { step: plan.step, samples, ..StepOutput::default() };
            self.scheduler.commit(&mut self.cache, Ok(&output), self.now);
        }
        self.events.append(self.scheduler.events());
        self.scheduler.check(&self.cache).expect("in order");
        ids
    }

    /// Loads that are ordered; what is stored is read at once and not kept.
    fn loads(&mut self) -> Vec<LoadOrder> {
        let mut loads = Vec::new();
        let orders: Vec<TransferOrder> = self.scheduler.transfers().collect();
        for order in orders {
            match order {
                TransferOrder::Load(load) => {
                    self.open.push(load.ticket);
                    loads.push(load);
                }
                TransferOrder::Store(store) => {
                    self.scheduler.end_store(&mut self.cache, store.lease, 0, self.now);
                }
                TransferOrder::Promote { ticket, .. } => self.promoted.push(ticket),
                TransferOrder::Cancel { ticket, .. } => self.cancelled.push(ticket),
            }
        }
        loads
    }

    fn prefetches(&mut self) -> Vec<LoadOrder> {
        self.step();
        let loads = self.loads();
        assert!(loads.iter().all(|load| load.prefetch));
        loads
    }

    fn end(&mut self, load: &LoadOrder, verified: bool) {
        self.open.retain(|open| *open != load.ticket);
        self.scheduler.end_load(&mut self.cache, load.ticket, verified, self.now);
        self.scheduler.check(&self.cache).expect("in order");
    }

    /// The first request ends, and its place is free.
    fn end_first(&mut self) {
        self.cancel(1);
    }

    fn cached(&self, id: u64) -> Option<u32> {
        self.events.iter().find_map(|(of, event)| match event {
            Event::Prompt { cached_tokens, .. } if of.0 == id => Some(*cached_tokens),
            _ => None,
        })
    }

    fn counts(&self) -> PrefetchCounts {
        self.scheduler.counters().prefetches
    }

    fn run(&mut self) {
        self.end_first();
        while self.scheduler.has_work() {
            assert!(self.now.0 < 10_000_000, "no progress:\n{:?}", self.scheduler);
            self.step();
            self.loads();
            for ticket in self.open.drain(..) {
                self.scheduler.end_load(&mut self.cache, ticket, false, self.now);
            }
        }
        assert_eq!(self.cache.stats().active_blocks, 0);
    }
}

fn config() -> SchedulerConfig {
    SchedulerConfig::default()
}

#[test]
fn who_waits_for_a_place_is_loaded_meanwhile_and_found_on_the_device() {
    let mut bench = Bench::new(200, config());
    bench.submit(2, 0, 42, 2, 10);
    let loads = bench.prefetches();
    assert_eq!((loads.len(), loads[0].contents.len()), (1, 10));
    assert_eq!(bench.prefetches(), [], "once");
    bench.end(&loads[0], true);
    assert_eq!(bench.prefetches(), [], "all of it is there");
    bench.end_first();
    assert_eq!(bench.step(), [2], "with no load before it");
    assert_eq!(bench.cached(2), Some(40));
    let counts = PrefetchCounts { begun: 1, completed: 1, tokens: 40, ..PrefetchCounts::default() };
    assert_eq!((bench.counts(), bench.scheduler.counters().loaded_tokens), (counts, 40));
    assert_eq!(bench.scheduler.counters().waits[WaitingFor::TierLoad], 0);
    bench.run();
}

#[test]
fn who_is_admitted_before_everything_arrived_goes_on_with_its_load() {
    let mut bench = Bench::new(200, config());
    bench.submit(2, 0, 42, 2, 10);
    let loads = bench.prefetches();
    bench.end_first();
    assert_eq!(bench.step(), NOBODY);
    assert_eq!(bench.loads(), [], "nothing is loaded twice");
    assert_eq!(bench.promoted, [loads[0].ticket], "it goes behind no other load any more");
    bench.end(&loads[0], true);
    assert_eq!(bench.step(), [2]);
    assert_eq!((bench.cached(2), bench.counts().admitted), (Some(40), 1));
    bench.run();
}

#[test]
fn it_ends_with_its_request() {
    let mut bench = Bench::new(200, config());
    bench.submit(2, 0, 42, 2, 10);
    let active = bench.cache.stats().active_blocks;
    let loads = bench.prefetches();
    assert!(bench.cache.stats().active_blocks >= active + 10, "the blocks are its tenant's");
    bench.cancel(2);
    bench.step();
    assert_eq!(bench.loads(), []);
    assert_eq!((&bench.cancelled[..], bench.counts().aborted), (&[loads[0].ticket][..], 1));
    bench.end(&loads[0], false);
    bench.run();
}

#[test]
fn an_order_that_was_not_given_yet_is_taken_back() {
    let mut bench = Bench::new(200, config());
    bench.submit(2, 0, 42, 2, 10);
    bench.step();
    bench.cancel(2);
    bench.step();
    assert_eq!((bench.loads(), &bench.cancelled[..]), (Vec::new(), &[][..]));
    bench.run();
}

#[test]
fn no_more_requests_and_no_more_bytes_than_allowed_are_loaded() {
    let limits = SchedulerConfig { max_prefetch_requests: 3, ..config() };
    let mut bench = Bench::new(600, limits);
    (2..8).for_each(|id| bench.submit(id, 0, 42, 2, 10));
    let loads = bench.prefetches();
    assert_eq!(loads.len(), 3, "those at the head of the queue");
    loads.iter().for_each(|load| bench.end(load, true));
    assert_eq!(bench.prefetches(), [], "and none behind them while they are there");
    bench.run();
    let limits = SchedulerConfig { max_prefetch_bytes: 14, ..config() };
    let mut bench = Bench::new(600, limits);
    (2..8).for_each(|id| bench.submit(id, 0, 42, 2, 10));
    let loads = bench.prefetches();
    assert_eq!(loads.iter().map(|load| load.contents.len()).collect::<Vec<_>>(), [10, 4]);
    loads.iter().for_each(|load| bench.end(load, true));
    // The second goes on where it ended.
    let loads = bench.prefetches();
    assert_eq!(loads.iter().map(|load| load.contents[0].index).collect::<Vec<_>>(), [4, 0]);
    bench.run();
    let mut bench = Bench::new(600, SchedulerConfig { max_prefetch_requests: 0, ..config() });
    bench.submit(2, 0, 42, 2, 10);
    assert_eq!(bench.prefetches(), []);
    bench.run();
}

#[test]
fn what_those_who_run_and_those_before_it_need_is_left_to_them() {
    // The first takes 5 blocks now, and the second is to take 25.
    let mut bench = Bench::new(40, config());
    bench.submit(2, 0, 100, 2, 0);
    bench.submit(3, 0, 42, 2, 10);
    assert_eq!(bench.prefetches(), []);
    bench.cancel(2);
    assert_eq!(bench.prefetches().len(), 1, "with the second there was no room");
}

#[test]
fn whoever_lacks_blocks_ends_it() {
    let mut bench = Bench::new(40, SchedulerConfig { max_bypasses: 0, ..config() });
    bench.submit(2, 0, 42, 2, 10);
    let loads = bench.prefetches();
    assert_eq!(loads.len(), 1);
    // It comes before the second, and needs more than the load leaves.
    let prompt: Vec<u32> = (0..130).map(|at| at % 29).collect();
    let better = Request { class: -1, ..request(9, &prompt, 2) };
    bench.scheduler.admit([better.hashed(BLOCK)], [], bench.now);
    bench.end_first();
    assert_eq!(bench.step(), NOBODY, "the blocks are the transfer's until it reports");
    bench.loads();
    assert_eq!((&bench.cancelled[..], bench.counts().aborted), (&[loads[0].ticket][..], 1));
    bench.end(&loads[0], false);
    assert_eq!(bench.step(), [3]);
    bench.run();
}

#[test]
fn what_did_not_arrive_or_is_late_is_not_tried_again_before_admission() {
    let mut bench = Bench::new(200, config());
    bench.submit(2, 0, 42, 2, 10);
    bench.submit(3, 0, 42, 2, 10);
    let loads = bench.prefetches();
    bench.end(&loads[0], false);
    bench.now.0 += 30_000;
    assert_eq!(bench.prefetches(), []);
    assert_eq!((&bench.cancelled[..], bench.counts().aborted), (&[loads[1].ticket][..], 2));
    bench.end(&loads[1], false);
    assert_eq!(bench.prefetches(), []);
    bench.run();
}

#[test]
fn tenants_take_turns() {
    let limits = SchedulerConfig { max_prefetch_requests: 4, ..config() };
    let mut bench = Bench::new(600, limits);
    (2..12).for_each(|id| bench.submit(id, 1, 42, 2, 10));
    bench.submit(20, 2, 42, 2, 10);
    let owners: Vec<u32> = bench.prefetches().iter().map(|load| load.root.tenant.0).collect();
    assert!(owners.len() >= 3 && owners.contains(&2), "{owners:?}");
    bench.run();
}

#[test]
fn a_tenants_quota_bounds_what_is_loaded_for_it() {
    let quota = |guarantee, ceiling| Quota { guarantee, ceiling };
    let mut bench = Bench::with(600, &[], &[(TenantId(1), quota(0, 15))], config());
    bench.submit(2, 1, 42, 2, 10);
    bench.submit(3, 1, 42, 2, 10);
    bench.submit(4, 0, 42, 2, 10);
    let owners: Vec<u32> = bench.prefetches().iter().map(|load| load.root.tenant.0).collect();
    assert_eq!(owners.iter().filter(|owner| **owner == 1).count(), 1, "{owners:?}");
    bench.run();
}

#[test]
fn two_that_begin_alike_are_loaded_once() {
    let mut bench = Bench::new(200, config());
    for id in [2, 3] {
        let prompt: Vec<u32> = (0..42).map(|at| at * 7 % 29).collect();
        let (request, hashes) = request(id, &prompt, 2).hashed(BLOCK);
        bench.scheduler.admit([(request, hashes.with_stored(vec![vec![0..10]]))], [], bench.now);
    }
    let loads = bench.prefetches();
    assert_eq!(loads.len(), 1);
    bench.end(&loads[0], true);
    assert_eq!(bench.prefetches(), []);
    bench.end_first();
    bench.run();
    assert_eq!((bench.cached(2), bench.cached(3).map(|cached| cached / BLOCK)), (Some(40), Some(10)));
}

#[test]
fn of_a_window_what_the_next_row_reads_is_loaded() {
    let mut bench = Bench::with(200, &[GroupConfig::window(8, 64, BLOCK, 1)], &[], config());
    bench.submit(2, 0, 42, 2, 8);
    let loads = bench.prefetches();
    let of = |group| loads[0].contents.iter().filter(|content| content.group == group).count();
    assert_eq!((loads.len(), of(0), of(1)), (1, 8, 2));
    bench.end(&loads[0], true);
    bench.end_first();
    assert_eq!(bench.step(), [2]);
    assert_eq!(bench.cached(2), Some(32));
    bench.run();
}

/// In virtual time: a request waits 100 ms for its place, and the tier takes 60 ms to bring what it has. Loaded meanwhile, nobody waits for it.
#[test]
fn what_is_loaded_in_the_queue_is_not_waited_for_behind_it() {
    let seen = |max_prefetch_requests| {
        let config = SchedulerConfig { max_num_seqs: 1, max_prefetch_requests, ..small() };
        let mut machine = Machine::new(config, 200, 16).with_tier(1000, 3000.0);
        let long = request(1, &text(1, 330), 2);
        machine.submit(long.clone());
        machine.run();
        // It is stored in the meantime, and goes from the device.
        (0..100).for_each(|_| drop(machine.step().clone()));
        machine.cache.clear(None);
        let other = request(2, &text(2, 20), 100);
        machine.submit(other.clone());
        machine.step();
        let again = Request { id: RequestId(3), ..long };
        machine.submit_found(again.clone());
        while machine.finished(2).is_empty() {
            machine.step();
        }
        let ended = machine.now;
        while machine.tokens(3, 0).is_empty() {
            machine.step();
        }
        let waited_us = machine.now.0 - ended.0;
        machine.run();
        [&other, &again].iter().for_each(|request| machine.assert_as_alone(request));
        let counters = *machine.scheduler.counters();
        (waited_us, counters.loaded_tokens, counters.waits[WaitingFor::TierLoad], machine.cached_tokens(3))
    };
    let (with, without) = (seen(8), seen(0));
    assert_eq!((with.1, with.3), (without.1, without.3), "the same is loaded");
    assert!(with.3 == Some(320), "{with:?}");
    assert_eq!((with.2, without.2), (0, 1), "{with:?} {without:?}");
    assert!(with.0 <= 2000 && without.0 >= 60_000, "{with:?} {without:?}");
}
