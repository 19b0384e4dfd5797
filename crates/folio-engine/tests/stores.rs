//! What tiers are given of sequences that end: all of it, in pieces, and never more at a time than they may hold up.

use std::ops::Range;

use folio_engine::plan::{Sampled, StepOutput};
use folio_engine::{Micros, Scheduler, SchedulerConfig, StoreOrder, TransferOrder};
use folio_kv::{CacheConfig, GroupConfig, KvCache, LruLeafFirst};
use folio_sim::scenario::request;

const BLOCK: u32 = 4;
/// What may be held up, in blocks: pieces are of 64.
const HELD_MAX: u32 = 128;

struct Bench {
    scheduler: Scheduler,
    cache: KvCache,
    now: Micros,
}

impl Bench {
    fn new(blocks: u32, more: &[GroupConfig], tiers: &[u32]) -> Self {
        let config = SchedulerConfig {
            max_num_seqs: 8,
            max_num_batched_tokens: 8192,
            max_model_len: 4096,
            watermark_permille: 0,
            headroom_tokens: 0,
            max_store_bytes: HELD_MAX.into(),
            ..SchedulerConfig::default()
        };
        let scheduler = Scheduler::new(config).expect("valid limits").with_tiers(tiers.iter().copied());
        let geometry = CacheConfig { blocks, block_tokens: BLOCK, bytes_per_block: 1 };
        let cache = KvCache::with_groups(geometry, more, Box::new(LruLeafFirst::new()));
        Self { scheduler, cache, now: Micros(0) }
    }

    /// Requests with prompts of so many blocks, of which nothing is alike, begin and end together.
    fn end(&mut self, blocks: &[u32]) {
        for blocks in blocks {
            let id = self.now.0 + 1;
            self.now.0 += 1;
            let prompt: Vec<u32> =
                (0..blocks * BLOCK).map(|at| (at * 7 + id as u32 * 1000) % 50_000).collect();
            self.scheduler.admit([request(id, &prompt, 1).hashed(BLOCK)], [], self.now);
        }
        while self.scheduler.has_work() {
            assert!(self.now.0 < 1_000_000, "no progress");
            self.now.0 += 1000;
            let plan = self.scheduler.plan(&mut self.cache, self.now);
            if plan.sequences.is_empty() {
                continue;
            }
            let samples = plan.sequences.iter().flat_map(|of| &of.samples);
            let samples = samples.map(|_| Sampled::Token { id: 1, logprobs: None }).collect();
            let output = StepOutput { step: plan.step, samples, ..StepOutput::default() };
            self.scheduler.commit(&mut self.cache, Ok(&output), self.now).clear();
        }
        self.scheduler.check(&self.cache).expect("in order");
    }

    fn orders(&mut self) -> Vec<StoreOrder> {
        let orders = self.scheduler.transfers().map(|order| match order {
            TransferOrder::Store(store) => store,
            other => panic!("{other:?}"),
        });
        let orders = orders.collect();
        self.scheduler.check(&self.cache).expect("in order");
        orders
    }

    fn report(&mut self, order: &StoreOrder, kept: u32) {
        assert!(self.scheduler.end_store(&mut self.cache, order.lease, kept, self.now));
    }

    /// What is held by anybody; all that runs is over.
    fn held(&self) -> u32 {
        self.cache.stats().active_blocks
    }

    /// A tier reads and keeps one order after the other. Each as its blocks.
    fn carry(&mut self, mut waiting: Vec<StoreOrder>, held_max: u32) -> Vec<(u64, Range<u32>)> {
        let mut carried = Vec::new();
        loop {
            assert!(self.held() <= held_max, "{} blocks are held", self.held());
            if waiting.is_empty() {
                return carried;
            }
            let order = waiting.remove(0);
            carried.push((order.tier.0.into(), blocks(&order)));
            self.report(&order, order.contents.len() as u32);
            waiting.extend(self.orders());
        }
    }

    fn missed(&self) -> u64 {
        self.scheduler.counters().missed_blocks
    }
}

/// Of the first group.
fn blocks(order: &StoreOrder) -> Range<u32> {
    let all: Vec<u32> = order.contents.iter().filter(|of| of.group == 0).map(|of| of.index).collect();
    let (first, last) = (all[0], all[all.len() - 1]);
    assert!(all.iter().copied().eq(first..last + 1));
    first..last + 1
}

#[test]
fn of_four_long_prompts_that_end_together_all_is_stored() {
    let mut bench = Bench::new(1000, &[], &[1]);
    bench.end(&[120; 4]);
    let first = bench.orders();
    assert_eq!(first.iter().map(blocks).collect::<Vec<_>>(), [0..64, 64..120], "what may be held up");
    let carried = bench.carry(first, HELD_MAX);
    assert_eq!(carried.len(), 8);
    assert_eq!(carried.iter().map(|(_, blocks)| blocks.len()).sum::<usize>(), 480);
    assert_eq!((bench.held(), bench.missed()), (0, 0));
}

#[test]
fn what_is_longer_than_what_may_be_held_up_goes_piece_by_piece() {
    let mut bench = Bench::new(1000, &[], &[1]);
    bench.end(&[600, 20]);
    let mut waiting = bench.orders();
    // Two pieces within the limit; beyond it one at a time, and nobody else's beside it.
    let mut carried: Vec<Range<u32>> = Vec::new();
    while !waiting.is_empty() {
        let order = waiting.remove(0);
        let end = blocks(&order).end;
        assert!(waiting.is_empty() || end == 64, "{waiting:?}");
        assert!(bench.held() <= end.max(HELD_MAX), "only the chain before it is held");
        bench.report(&order, order.contents.len() as u32);
        carried.push(blocks(&order));
        waiting.extend(bench.orders());
    }
    assert_eq!(carried.len(), 11);
    assert_eq!(
        carried[..9].iter().map(|blocks| blocks.start).collect::<Vec<_>>(),
        (0..9).map(|n| 64 * n).collect::<Vec<_>>()
    );
    assert_eq!(carried[9..], [576..600, 0..20]);
    assert_eq!((bench.held(), bench.missed()), (0, 0));
}

/// What waits is nobody's: who needs blocks takes them from its end, and the beginning is stored.
#[test]
fn of_what_is_gone_before_its_turn_the_beginning_is_stored() {
    for chunk in [1, 16] {
        let mut bench = Bench::new(300, &[], &[chunk]);
        bench.end(&[120, 120]);
        let first = bench.orders();
        assert_eq!(first.len(), 2);
        // 60 blocks are free; and of the first what makes no whole chunk is gone before.
        bench.end(&[102]);
        let carried = bench.carry(first, HELD_MAX);
        let stored: Vec<Range<u32>> = carried.into_iter().map(|(_, blocks)| blocks).collect();
        let of_second: u32 = stored[2..stored.len() - 2].iter().map(|blocks| blocks.len() as u32).sum();
        let last = if chunk == 1 { 76..79 } else { 80..81 };
        assert!(last.contains(&of_second), "{stored:?}");
        assert_eq!(bench.missed(), u64::from(120 / chunk * chunk - of_second));
    }
    let mut bench = Bench::new(300, &[], &[1]);
    bench.end(&[120, 120]);
    let first = bench.orders();
    bench.cache.clear(None);
    assert_eq!(bench.carry(first, HELD_MAX), [(0, 0..64), (0, 64..120)]);
    assert_eq!((bench.held(), bench.missed()), (0, 120));
}

#[test]
fn behind_what_a_tier_did_not_keep_it_is_given_nothing() {
    let mut bench = Bench::new(1000, &[], &[1]);
    bench.end(&[600, 40]);
    let first = bench.orders();
    bench.report(&first[0], 63);
    assert_eq!(bench.orders(), []);
    bench.report(&first[1], 0);
    let next = bench.orders();
    assert_eq!(next.iter().map(blocks).collect::<Vec<_>>(), vec![0..40], "whose turn it is then");
    assert_eq!(bench.missed(), 600 - 128);
}

#[test]
fn a_tier_that_does_not_answer_holds_up_no_other() {
    let mut bench = Bench::new(1000, &[], &[1, 1]);
    let (mut stuck, mut stored) = (0, 0);
    for _ in 0..3 {
        bench.end(&[100]);
        let (of_first, of_second): (Vec<_>, Vec<_>) =
            bench.orders().into_iter().partition(|order| order.tier.0 == 0);
        stuck += of_first.iter().map(|order| order.contents.len()).sum::<usize>();
        for order in of_second {
            stored += order.contents.len();
            bench.report(&order, order.contents.len() as u32);
        }
    }
    assert_eq!((stuck, stored), (100, 300));
    assert_eq!(bench.held(), 100);
    // Nor for ever.
    bench.now.0 += 4_000_000;
    bench.cache.advance(bench.now.0);
    assert_eq!(bench.held(), 0);
}

/// More than the cache holds need not wait: it will not be there.
#[test]
fn what_waits_has_an_end() {
    let mut bench = Bench::new(300, &[], &[1]);
    for _ in 0..6 {
        bench.end(&[100]);
    }
    assert_eq!(bench.missed(), 200);
}

/// Of windows what is read at an end belongs to it: no pieces.
#[test]
fn with_windows_what_ends_is_stored_as_a_whole() {
    let mut bench = Bench::new(1000, &[GroupConfig::window(8, 400, BLOCK, 1)], &[1]);
    bench.end(&[200, 100]);
    let first = bench.orders();
    assert_eq!(first.iter().map(blocks).collect::<Vec<_>>(), vec![0..199]);
    assert_eq!(first[0].contents.len(), 201);
    let carried = bench.carry(first, 210);
    // Behind the prompt, whose last row is computed again, and behind the answer.
    assert_eq!(carried, [(0, 0..199), (0, 0..200), (0, 0..99), (0, 0..100)]);
    assert_eq!((bench.held(), bench.missed()), (0, 0));
}
