//! What the scheduler asks of a tier: what is loaded instead of computed, what is stored, and when either may begin.

#![expect(clippy::single_range_in_vec_init, reason = "what a tier has is a list of ranges, often of one")]

use std::ops::Range;

use folio_engine::plan::{Sampled, StepOutput};
use folio_engine::request::{FinishReason, RequestId, TierLoad};
use folio_engine::{
    CancelRequest, Event, LoadOrder, Micros, Scheduler, SchedulerConfig, StoreOrder, TransferOrder,
    WaitingFor,
};
use folio_kv::{
    BlockId, BlockMeta, CacheConfig, Content, EvictionPolicy, GroupConfig, KvCache, LruLeafFirst, TierId,
};
use folio_sim::scenario::request;

const BLOCK: u32 = 4;

/// Of each request, so many blocks are worth storing.
struct Worth {
    policy: LruLeafFirst,
    blocks: u32,
}

impl EvictionPolicy for Worth {
    fn resize(&mut self, blocks: u32) {
        self.policy.resize(blocks);
    }

    fn on_hit(&mut self, block: BlockId, meta: &BlockMeta) {
        self.policy.on_hit(block, meta);
    }

    fn on_free(&mut self, block: BlockId, meta: &BlockMeta) {
        self.policy.on_free(block, meta);
    }

    fn on_use(&mut self, block: BlockId, meta: &BlockMeta) {
        self.policy.on_use(block, meta);
    }

    fn on_remove(&mut self, block: BlockId, meta: &BlockMeta) {
        self.policy.on_remove(block, meta);
    }

    fn is_worth_storing(&self, _: BlockId, meta: &BlockMeta, _: BlockId) -> bool {
        meta.depth < self.blocks
    }

    fn victim(&mut self) -> Option<BlockId> {
        self.policy.victim()
    }
}

struct Bench {
    scheduler: Scheduler,
    cache: KvCache,
    now: Micros,
    events: Vec<(RequestId, Event)>,
}

impl Bench {
    fn new(blocks: u32, more: &[GroupConfig]) -> Self {
        Self::limited(blocks, more, u64::MAX)
    }

    fn limited(blocks: u32, more: &[GroupConfig], max_transfer_bytes: u64) -> Self {
        Self::chunked(blocks, more, max_transfer_bytes, &[1])
    }

    /// With tiers that keep so many blocks together.
    fn chunked(blocks: u32, more: &[GroupConfig], max_transfer_bytes: u64, chunks: &[u32]) -> Self {
        Self::worth(u32::MAX, blocks, more, max_transfer_bytes, chunks)
    }

    /// Of each request the first `worth` blocks are worth storing.
    fn worth(worth: u32, blocks: u32, more: &[GroupConfig], max_transfer_bytes: u64, chunks: &[u32]) -> Self {
        let geometry = CacheConfig { blocks, block_tokens: BLOCK, bytes_per_block: 1 };
        let config = SchedulerConfig {
            max_num_seqs: 4,
            max_num_batched_tokens: 64,
            max_model_len: 1024,
            watermark_permille: 0,
            headroom_tokens: 0,
            tier_load_wait_us_max: 20_000,
            max_transfer_bytes,
            ..SchedulerConfig::default()
        };
        let scheduler = Scheduler::new(config).expect("valid limits").with_tiers(chunks.iter().copied());
        let scheduler = scheduler.swapping_to(Some(TierId(0)));
        let cache = KvCache::with_groups(
            geometry,
            more,
            Box::new(Worth { policy: LruLeafFirst::new(), blocks: worth }),
        );
        Self { scheduler, cache, now: Micros(0), events: Vec::new() }
    }

    fn submit(&mut self, id: u64, tokens: u32, stored: &[Range<u32>]) {
        self.submit_to(id, tokens, &[stored]);
    }

    /// `stored`: what each tier has.
    fn submit_to(&mut self, id: u64, tokens: u32, stored: &[&[Range<u32>]]) {
        let prompt: Vec<u32> = (0..tokens).map(|at| at * 7 % 29).collect();
        let (request, hashes) = request(id, &prompt, 2).hashed(BLOCK);
        self.scheduler.admit(
            [(request, hashes.with_stored(stored.iter().map(|of| of.to_vec()).collect()))],
            [],
            self.now,
        );
    }

    /// A whole step; first position and rows of each sequence in it.
    fn step(&mut self) -> Vec<(u64, u32, usize)> {
        self.now.0 += 1000;
        let plan = self.scheduler.plan(&mut self.cache, self.now);
        let rows = plan.sequences.iter().map(|of| (of.id.0, of.first_position, of.tokens.len())).collect();
        if !plan.sequences.is_empty() {
            let samples = plan.sequences.iter().flat_map(|of| &of.samples);
            let samples = samples.map(|_| Sampled::Token { id: 1, logprobs: None }).collect();
            let output = StepOutput { step: plan.step, samples, ..StepOutput::default() };
            self.now.0 += 1000;
            self.events.append(self.scheduler.commit(&mut self.cache, Ok(&output), self.now));
        }
        self.scheduler.check(&self.cache).expect("in order");
        rows
    }

    fn orders(&mut self) -> (Vec<LoadOrder>, Vec<StoreOrder>) {
        let (mut loads, mut stores) = (Vec::new(), Vec::new());
        for order in self.scheduler.transfers() {
            match order {
                TransferOrder::Load(load) => loads.push(load),
                TransferOrder::Store(store) => stores.push(store),
                TransferOrder::Promote { .. } | TransferOrder::Cancel { .. } => {}
            }
        }
        (loads, stores)
    }

    /// They are read and kept.
    fn read(&mut self, stores: Vec<StoreOrder>) {
        for StoreOrder { lease, contents, .. } in stores {
            let kept = contents.len() as u32;
            assert!(self.scheduler.end_store(&mut self.cache, lease, kept, self.now));
        }
    }

    /// They are read, and nothing of them is kept.
    fn give_up(&mut self, stores: &[StoreOrder]) {
        for store in stores {
            self.scheduler.end_store(&mut self.cache, store.lease, 0, self.now);
        }
    }

    /// Steps until something is to be loaded; whatever nobody holds goes from the cache, and nothing of what ends is kept.
    fn run_to_a_load(&mut self) -> Vec<LoadOrder> {
        for _ in 0..500 {
            self.cache.clear(None);
            self.step();
            let (loads, stores) = self.orders();
            self.give_up(&stores);
            if !loads.is_empty() {
                return loads;
            }
        }
        panic!("nothing is loaded");
    }

    fn end(&mut self, load: &LoadOrder, verified: bool) {
        self.scheduler.end_load(&mut self.cache, load.ticket, verified, self.now);
        self.scheduler.check(&self.cache).expect("in order");
    }

    /// As its owner is told at its end.
    fn loads(&self, id: u64) -> Vec<TierLoad> {
        let timing = self.events.iter().find_map(|(of, event)| match event {
            Event::Finished { timing, .. } if of.0 == id => Some(timing),
            _ => None,
        });
        timing.expect("it ended").loads.into_iter().filter(|load| load.to > Micros(0)).collect()
    }

    fn cached(&self, id: u64) -> Option<u32> {
        self.events.iter().find_map(|(of, event)| match event {
            Event::Prompt { cached_tokens, .. } if of.0 == id => Some(*cached_tokens),
            _ => None,
        })
    }
}

#[test]
fn what_a_tier_has_is_loaded_and_the_rest_computed_and_stored() {
    let mut bench = Bench::new(64, &[]);
    bench.submit(1, 42, &[0..8]);
    assert_eq!(bench.step(), [], "all that is left is to be loaded first");
    let (loads, stores) = bench.orders();
    assert_eq!((loads.len(), stores.len()), (1, 0));
    assert_eq!(loads[0].contents.len(), 8);
    assert_eq!(bench.orders().0, [], "asked for once");
    let from = bench.now;
    bench.now.0 += 700;
    bench.end(&loads[0], true);
    let load = TierLoad { tier: TierId(0), from, to: bench.now, verified: true };
    assert_eq!(bench.step(), [(1, 32, 10)]);
    assert_eq!(bench.cached(1), Some(32));
    assert_eq!(bench.step(), [(1, 42, 1)]);
    let (_, stores) = bench.orders();
    // 43 positions were computed: two full blocks more than the tier has.
    assert_eq!((stores.len(), stores[0].contents.len()), (1, 2));
    assert!(bench.cache.end_lease(stores[0].lease));
    let counters = bench.scheduler.counters();
    assert_eq!((counters.loaded_tokens, counters.tier_tokens), (32, [32, 0, 0, 0]));
    assert_eq!(bench.loads(1), [load], "its owner is told when it was");
}

#[test]
fn what_does_not_arrive_is_computed() {
    let mut bench = Bench::new(64, &[]);
    bench.submit(1, 42, &[0..8]);
    bench.step();
    let (loads, _) = bench.orders();
    bench.end(&loads[0], false);
    assert_eq!(bench.step(), [(1, 0, 42)]);
    assert_eq!(bench.cached(1), Some(0));
    // Late: the wait has an end, and the slots are the transfer's until it reports.
    bench.submit(2, 33, &[5..8]);
    bench.submit(3, 60, &[5..14]);
    bench.step();
    let (loads, stores) = bench.orders();
    bench.read(stores);
    assert_eq!(
        loads.len(),
        1,
        "the second has on the device what the tier has before block 14, and loads the rest"
    );
    bench.now.0 += 30_000;
    let rows = bench.step();
    assert!(rows.iter().any(|row| row.0 == 3), "{rows:?}");
    let expired = bench.scheduler.counters().waits_expired[WaitingFor::TierLoad];
    assert_eq!(expired, 1);
    bench.end(&loads[0], true);
    while bench.scheduler.has_work() && bench.now.0 < 10_000_000 {
        bench.step();
        let (_, stores) = bench.orders();
        bench.read(stores);
    }
    let reasons = bench.events.iter().filter_map(|(_, event)| match event {
        Event::Finished { reason, .. } => Some(*reason),
        _ => None,
    });
    assert!(reasons.eq([FinishReason::Length; 3]));
    assert_eq!(bench.cache.stats().active_blocks, 0);
    let verified = |id| bench.loads(id).iter().map(|load| load.verified).collect::<Vec<_>>();
    assert_eq!((verified(1), verified(2).len() + verified(3).len()), (vec![false], 1));
}

#[test]
fn who_asks_for_what_is_being_loaded_waits_for_it() {
    let mut bench = Bench::new(64, &[]);
    bench.submit(1, 42, &[0..10]);
    bench.submit(2, 42, &[0..10]);
    assert_eq!(bench.step(), []);
    let (loads, _) = bench.orders();
    assert_eq!(loads.len(), 1, "once");
    bench.end(&loads[0], true);
    assert_eq!(bench.step().len(), 2);
    assert_eq!((bench.cached(1), bench.cached(2)), (Some(40), Some(40)));
}

#[test]
fn a_long_load_comes_in_pieces_and_what_arrived_of_it_is_kept() {
    let mut bench = Bench::new(300, &[]);
    bench.submit(1, 800, &[0..199]);
    bench.step();
    let (loads, _) = bench.orders();
    assert_eq!(loads.iter().map(|load| load.contents.len()).collect::<Vec<_>>(), [64, 64, 64, 7]);
    bench.end(&loads[0], true);
    bench.end(&loads[2], true);
    bench.end(&loads[1], false);
    bench.end(&loads[3], true);
    assert_eq!(bench.step(), [(1, 256, 64)], "behind the first piece");
}

#[test]
fn more_than_may_be_in_transfer_is_loaded_in_part() {
    let mut bench = Bench::limited(300, &[], 10);
    bench.submit(1, 100, &[0..20]);
    assert_eq!(bench.step(), []);
    let (loads, _) = bench.orders();
    assert_eq!(loads.iter().map(|load| load.contents.len()).collect::<Vec<_>>(), [10]);
    bench.end(&loads[0], true);
    assert!(bench.step().contains(&(1, 40, 60)));
    // Of windows a part is of no use.
    let mut bench = Bench::limited(300, &[GroupConfig::window(8, 64, BLOCK, 1)], 10);
    bench.submit(1, 50, &[0..8]);
    assert_eq!(bench.step(), [(1, 0, 50)]);
}

#[test]
fn of_a_window_what_the_next_row_reads_is_loaded_and_stored() {
    let window = GroupConfig::window(8, 64, BLOCK, 1);
    let mut bench = Bench::new(64, &[window]);
    bench.submit(1, 42, &[0..8]);
    bench.step();
    let (loads, _) = bench.orders();
    let of = |contents: &[Content], group| contents.iter().filter(|of| of.group == group).count();
    assert_eq!((of(&loads[0].contents, 0), of(&loads[0].contents, 1)), (8, 2));
    bench.end(&loads[0], true);
    bench.step();
    bench.step();
    bench.submit(2, 30, &[]);
    bench.step();
    let (_, stores) = bench.orders();
    // Behind the prompt of 42 tokens, which is also where that answer ends, and behind the one of 30, which is cached.
    let blocks: Vec<_> = stores.iter().map(|store| [0, 1].map(|group| of(&store.contents, group))).collect();
    assert_eq!(blocks, [[2, 2], [2, 2], [7, 2]]);
    for store in stores {
        let last = store.contents.iter().rfind(|of| of.group == 0).expect("some");
        let ends = store.contents.iter().any(|of| of.group == 1 && of.hash == last.hash);
        assert!(ends, "by the block it ends with");
    }
}

/// A tier that keeps four blocks together: loads and stores end where they do, whatever they begin with and however much may be loaded.
#[test]
fn what_a_tier_keeps_together_is_loaded_and_stored_whole() {
    let mut bench = Bench::chunked(64, &[], u64::MAX, &[4]);
    bench.submit(1, 42, &[]);
    while bench.step() != [(1, 42, 1)] {}
    let (_, stores) = bench.orders();
    let indices: Vec<u32> = stores[0].contents.iter().map(|content| content.index).collect();
    assert_eq!(indices, (0..8).collect::<Vec<u32>>(), "of ten full blocks");
    bench.read(stores);
    // The device has three blocks, within the first four.
    let mut bench = Bench::chunked(64, &[], u64::MAX, &[4]);
    bench.submit(1, 13, &[]);
    while bench.step() != [(1, 13, 1)] {}
    assert_eq!(bench.orders().1, [], "three blocks are none of its");
    bench.submit(2, 42, &[0..8]);
    assert_eq!(bench.step(), []);
    let (loads, _) = bench.orders();
    let indices: Vec<u32> = loads[0].contents.iter().map(|content| content.index).collect();
    assert_eq!(indices, [3, 4, 5, 6, 7]);
    bench.end(&loads[0], true);
    // Room for six blocks: four of them are loaded.
    let bytes = bench.cache.load_bytes(1);
    let mut bench = Bench::chunked(64, &[], 6 * bytes, &[4]);
    bench.submit(1, 42, &[0..8]);
    bench.step();
    let (loads, _) = bench.orders();
    assert_eq!(loads.iter().map(|load| load.contents.len()).collect::<Vec<_>>(), [4]);
}

/// Of ten blocks that end, how many the first tier is given, and how many were not stored.
fn stored_of_ten(worth: u32, more: &[GroupConfig], chunk: u32, stored: &[Range<u32>]) -> (usize, u64) {
    let mut bench = Bench::worth(worth, 64, more, u64::MAX, &[chunk]);
    bench.submit(1, 42, stored);
    let mut given = 0;
    for _ in 0..6 {
        bench.step();
        let (loads, stores) = bench.orders();
        loads.iter().for_each(|load| bench.end(load, true));
        given += stores.iter().flat_map(|store| &store.contents).filter(|content| content.group == 0).count();
        bench.read(stores);
    }
    (given, bench.scheduler.counters().unstored_blocks)
}

#[test]
fn what_is_not_worth_it_is_not_stored() {
    assert_eq!(stored_of_ten(10, &[], 1, &[]), (10, 0));
    assert_eq!(stored_of_ten(3, &[], 1, &[]), (3, 7));
    assert_eq!(stored_of_ten(0, &[], 1, &[]), (0, 10));
    assert_eq!(stored_of_ten(5, &[], 1, &[0..4]), (1, 5), "the tier has four");
    assert_eq!(stored_of_ten(3, &[], 4, &[]), (4, 4), "of eight in chunks of four");
    // Where a window ends only what is read there can be kept: behind the prompt, and behind the answer, which end in the same block.
    let window = [GroupConfig::window(8, 64, BLOCK, 1)];
    assert_eq!(stored_of_ten(1, &window, 1, &[]), (20, 0), "all of it where any of it is worth it");
    assert_eq!(stored_of_ten(0, &window, 1, &[]), (0, 20));
}

fn indices(contents: &[Content]) -> Range<u32> {
    contents[0].index..contents[contents.len() - 1].index + 1
}

/// The near one has the beginning, the far one more: each part comes from where it is near, and is near from then on.
#[test]
fn tiers_are_loaded_from_one_behind_the_other_and_each_is_given_what_it_lacks() {
    let mut bench = Bench::chunked(64, &[], u64::MAX, &[1, 4]);
    bench.submit_to(1, 50, &[&[0..5], &[0..8]]);
    assert_eq!(bench.step(), []);
    let (loads, _) = bench.orders();
    let loaded: Vec<_> = loads.iter().map(|load| (load.tier.0, indices(&load.contents))).collect();
    assert_eq!(loaded, [(0, 0..5), (1, 5..8)]);
    loads.iter().for_each(|load| bench.end(load, true));
    assert_eq!(bench.step(), [(1, 32, 18)]);
    assert_eq!(bench.step(), [(1, 50, 1)]);
    let (_, stores) = bench.orders();
    let stored: Vec<_> = stores.iter().map(|store| (store.tier.0, indices(&store.contents))).collect();
    assert_eq!(stored, [(0, 5..12), (1, 8..12)], "what was loaded from the far one is promoted");
    bench.read(stores);
    assert_eq!(bench.cache.stats().active_blocks, 0);
}

/// What the near one does not bring is computed, and so is what would have come behind it.
#[test]
fn what_one_tier_does_not_bring_is_computed_whatever_the_others_bring() {
    let mut bench = Bench::chunked(64, &[], u64::MAX, &[1, 4]);
    bench.submit_to(1, 50, &[&[0..5], &[0..8]]);
    bench.step();
    let (loads, _) = bench.orders();
    bench.end(&loads[1], true);
    bench.end(&loads[0], false);
    assert_eq!(bench.step(), [(1, 0, 50)]);
}

#[test]
fn of_two_tiers_the_faster_one_is_asked_and_none_that_is_slower_than_computing() {
    let mut bench = Bench::chunked(200, &[], u64::MAX, &[1, 1]);
    let (near, far) = (TierId(0), TierId(1));
    // 40 tokens take a millisecond: 100 us a block.
    bench.submit(1, 40, &[]);
    while bench.scheduler.has_work() {
        bench.step();
        let (_, stores) = bench.orders();
        bench.read(stores);
    }
    let mut asked = |tokens: u32, near_us: u64, far_us: u64| {
        let id = u64::from(tokens);
        for _ in 0..200 {
            bench.scheduler.loaded(near, true, 1, near_us);
            bench.scheduler.loaded(far, true, 1, far_us);
        }
        bench.cache.clear(None);
        bench.submit_to(id, tokens, &[&[0..9], &[0..9]]);
        bench.step();
        let (loads, _) = bench.orders();
        loads.iter().for_each(|load| bench.end(load, true));
        while bench.scheduler.has_work() {
            bench.step();
            let (_, stores) = bench.orders();
            bench.read(stores);
        }
        loads.iter().map(|load| load.tier).collect::<Vec<_>>()
    };
    assert_eq!(asked(41, 10, 20), [near]);
    assert_eq!(asked(42, 20, 10), [far], "the near one is busy, or old");
    assert_eq!(asked(44, 1_000_000, 10), [far]);
    assert_eq!(asked(45, 1_000_000, 1_000_000), [], "computing is faster");
}

/// A tier that takes `latency_us` for each order and a microsecond for each block. A block is computed in about 100.
struct Slow {
    bench: Bench,
    latency_us: u64,
}

impl Slow {
    /// It is known what computing takes, and nothing of the tier.
    fn new(latency_us: u64) -> Self {
        let mut slow = Self { bench: Bench::new(300, &[]), latency_us };
        slow.loaded(800, 0);
        slow
    }

    /// Blocks of each load for a prompt of so many tokens, of which the tier has `blocks` and the device nothing.
    fn loaded(&mut self, tokens: u32, blocks: u32) -> Vec<usize> {
        let Self { bench, latency_us } = self;
        bench.cache.clear(None);
        bench.submit(u64::from(tokens), tokens, &[0..blocks]);
        let mut loaded = Vec::new();
        while bench.scheduler.has_work() {
            bench.step();
            let (loads, stores) = bench.orders();
            for load in &loads {
                let bytes = load.contents.len() as u64;
                bench.scheduler.loaded(load.tier, true, bytes, *latency_us + bytes);
                bench.end(load, true);
                loaded.push(load.contents.len());
            }
            bench.read(stores);
        }
        loaded
    }

    /// Offers that were taken, and those that were declined.
    fn offers(&self) -> (u64, u64) {
        let counters = self.bench.scheduler.counters();
        (counters.taken_offers[0], counters.declined_offers[0])
    }
}

#[test]
fn of_a_tier_with_a_latency_long_prefixes_are_loaded_and_short_ones_computed() {
    let mut slow = Slow::new(2000);
    assert_eq!(slow.loaded(45, 8), [8], "nothing is known");
    assert!(slow.loaded(46, 8).is_empty(), "2 ms against less than one");
    assert_eq!(slow.loaded(700, 160), [64, 64, 32], "6 ms against 18");
    assert!(slow.loaded(47, 8).is_empty());
    assert_eq!(slow.loaded(701, 160), [64, 64, 32]);
    assert_eq!(slow.offers(), (3, 2));
}

#[test]
fn of_a_tier_without_a_latency_both_are_loaded() {
    let mut slow = Slow::new(0);
    for tokens in [45, 46, 47] {
        assert_eq!(slow.loaded(tokens, 8), [8]);
        assert_eq!(slow.loaded(tokens + 655, 160), [64, 64, 32]);
    }
    assert_eq!(slow.offers(), (6, 0));
}

/// One that generates 60 tokens more and will need blocks of the other; both were computed for a while. The other arrived last.
fn two_that_grow() -> Bench {
    let mut bench = Bench::new(24, &[]);
    for id in [1, 2] {
        let prompt: Vec<u32> = (0..36).map(|at| (at * 7 + id) % 29).collect();
        let (request, hashes) = request(id.into(), &prompt, 60).hashed(BLOCK);
        bench.scheduler.admit([(request, hashes)], [], bench.now);
    }
    while bench.scheduler.counters().preemptions == 0 {
        assert!(bench.now.0 < 1_000_000, "nobody was preempted");
        bench.step();
    }
    bench
}

#[test]
fn what_a_preempted_sequence_gives_up_is_the_tiers_until_it_was_read() {
    let mut bench = two_that_grow();
    let (_, stores) = bench.orders();
    assert_eq!((stores.len(), stores[0].tier), (1, TierId(0)));
    let blocks = indices(&stores[0].contents);
    assert!(blocks.start == 0 && blocks.end >= 10, "{blocks:?}");
    assert_eq!(bench.scheduler.counters().preemptions_swapped, 1);
    assert!(bench.scheduler.is_preempting());
    for _ in 0..3 {
        assert_eq!(bench.step(), [], "who wants the blocks waits, and nobody else is preempted or admitted");
    }
    assert_eq!(bench.scheduler.begin_load(&mut bench.cache, (RequestId(2), 0), 1, bench.now), None);
    assert!(bench.scheduler.end_store(&mut bench.cache, stores[0].lease, blocks.end, bench.now));
    assert_eq!(bench.step().iter().map(|row| row.0).collect::<Vec<_>>(), [1]);
    // It comes back: the cache has nothing, and the tier all of it.
    let loads = bench.run_to_a_load();
    assert_eq!(loads.last().map(|load| indices(&load.contents).end), Some(blocks.end));
    loads.iter().for_each(|load| bench.end(load, true));
    let rows = bench.step();
    assert_eq!((rows[0].0, rows[0].1), (2, blocks.end * BLOCK), "less than a block is computed again");
}

#[test]
fn of_what_was_kept_in_part_the_beginning_is_loaded() {
    let mut bench = two_that_grow();
    let (_, stores) = bench.orders();
    assert!(bench.scheduler.end_store(&mut bench.cache, stores[0].lease, 3, bench.now));
    let loads = bench.run_to_a_load();
    assert_eq!(indices(&loads[0].contents), 0..3);
}

/// Half a second at most, and once that is known not even that.
#[test]
fn nobody_waits_for_a_tier_that_has_died() {
    let mut bench = two_that_grow();
    let (_, stores) = bench.orders();
    assert_eq!(stores.len(), 1);
    bench.now.0 += 400_000;
    assert_eq!(bench.step(), []);
    bench.now.0 += 200_000;
    assert_eq!(bench.step().len(), 1, "it goes on with the blocks");
    assert!(!bench.scheduler.is_preempting());
    assert!(
        !bench.scheduler.end_store(&mut bench.cache, stores[0].lease, 9, bench.now),
        "the lease was lost"
    );
    let kept = bench.scheduler.counters().preemptions_swapped;
    while bench.scheduler.has_work() && bench.now.0 < 10_000_000 {
        bench.step();
        let (_, stores) = bench.orders();
        bench.give_up(&stores);
        bench.scheduler.preempt_all(&mut bench.cache);
    }
    assert_eq!(bench.scheduler.counters().preemptions_swapped, kept, "nothing more is given to it");
    assert_eq!(bench.cache.stats().active_blocks, 0);
}

#[test]
fn what_is_read_of_who_ends_meanwhile_is_nobodys_afterwards() {
    let mut bench = two_that_grow();
    let (_, stores) = bench.orders();
    bench.scheduler.admit([], [CancelRequest { request: RequestId(2), choice: None }], bench.now);
    bench.step();
    assert!(bench.cache.stats().active_blocks > 0, "the tier still reads");
    assert!(bench.scheduler.end_store(&mut bench.cache, stores[0].lease, 9, bench.now));
    while bench.scheduler.has_work() {
        bench.step();
        let (_, stores) = bench.orders();
        bench.give_up(&stores);
    }
    assert_eq!(bench.cache.stats().active_blocks, 0);
}
