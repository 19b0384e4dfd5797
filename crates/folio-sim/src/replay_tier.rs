//! A tier behind the cache of a replay: memory that keeps blocks by their hash and takes its time for each.
//!
//! Owns: what is kept (the blocks wanted the longest ago go) and when transfers are done. What is loaded and stored, and whether a load
//! pays, the scheduler says.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::ops::Range;

use folio_engine::{Micros, Scheduler, TransferOrder};
use folio_kv::{BlockHash, BlockHashes, Content, KvCache, TierId};

/// How large and how fast.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TierConfig {
    pub bytes: u64,
    /// Either way.
    pub bytes_per_s: f64,
}

/// See the module documentation.
pub(crate) struct ReplayTier {
    config: TierConfig,
    /// Of a block of each cache group.
    block_bytes: Vec<u64>,
    held: u64,
    /// When each block was wanted last, and in that order.
    kept: HashMap<(u32, BlockHash), u64>,
    order: BTreeMap<u64, (u32, BlockHash)>,
    wanted: u64,
    /// One after another: begun, done, what.
    orders: VecDeque<(Micros, Micros, TransferOrder)>,
}

impl ReplayTier {
    pub const ID: TierId = TierId(0);

    /// `block_bytes`: of a block of each cache group.
    pub fn new(config: TierConfig, block_bytes: Vec<u64>) -> Self {
        let (kept, order) = (HashMap::new(), BTreeMap::new());
        Self { config, block_bytes, held: 0, kept, order, wanted: 0, orders: VecDeque::new() }
    }

    fn bytes(&self, contents: &[Content]) -> u64 {
        contents.iter().map(|content| self.block_bytes[content.group as usize]).sum()
    }

    /// The prompt's blocks that it has, from the first on. One token is always left to compute.
    pub fn find(&self, hashes: &BlockHashes, prompt: &[u32]) -> Vec<Range<u32>> {
        let most = prompt.len().saturating_sub(1) / hashes.block_tokens() as usize;
        let found = hashes.iter().take(most).take_while(|hash| self.kept.contains_key(&(0, **hash)));
        let end = found.count() as u32;
        if end == 0 { Vec::new() } else { vec![Range { start: 0, end }] }
    }

    /// Takes an order behind those before it. Promotions and cancellations change nothing here: transfers are short.
    pub fn order(&mut self, order: TransferOrder, now: Micros) -> bool {
        let bytes = match &order {
            TransferOrder::Load(load) => self.bytes(&load.contents),
            TransferOrder::Store(store) => self.bytes(&store.contents),
            TransferOrder::Promote { .. } | TransferOrder::Cancel { .. } => return true,
        };
        let from = self.orders.back().map_or(now, |(_, done, _)| (*done).max(now));
        let done = Micros(from.0 + (bytes as f64 / self.config.bytes_per_s * 1e6).ceil() as u64);
        self.orders.push_back((from, done, order));
        true
    }

    /// When the first of its orders is done.
    pub fn next_done(&self) -> Option<Micros> {
        self.orders.front().map(|(_, done, _)| *done)
    }

    /// Reports what is done by now.
    pub fn carry(&mut self, scheduler: &mut Scheduler, cache: &mut KvCache, now: Micros) {
        while let Some((from, done, order)) = self.orders.pop_front_if(|(_, done, _)| *done <= now) {
            match order {
                TransferOrder::Load(load) => {
                    let wanted = load.contents.iter().map(|content| (content.group, content.hash));
                    let wanted: Vec<_> = wanted.collect();
                    let verified = wanted.iter().all(|key| self.kept.contains_key(key));
                    if verified {
                        wanted.into_iter().for_each(|key| self.want(key));
                    }
                    let bytes = self.bytes(&load.contents);
                    scheduler.loaded(load.tier, verified, bytes, done.0 - from.0);
                    scheduler.end_load(cache, load.ticket, verified, now);
                }
                TransferOrder::Store(store) => {
                    // The first of a request last: they are wanted by all that begin alike.
                    for content in store.contents.iter().rev() {
                        self.want((content.group, content.hash));
                    }
                    while self.held > self.config.bytes
                        && let Some((_, key)) = self.order.pop_first()
                    {
                        self.kept.remove(&key);
                        self.held -= self.block_bytes[key.0 as usize];
                    }
                    let stored = store.contents.iter();
                    let stored = stored.take_while(|of| self.kept.contains_key(&(of.group, of.hash))).count();
                    scheduler.end_store(cache, store.lease, stored as u32, now);
                }
                TransferOrder::Promote { .. } | TransferOrder::Cancel { .. } => {}
            }
        }
    }

    fn want(&mut self, key: (u32, BlockHash)) {
        self.wanted += 1;
        match self.kept.insert(key, self.wanted) {
            Some(before) => drop(self.order.remove(&before)),
            None => self.held += self.block_bytes[key.0 as usize],
        }
        self.order.insert(self.wanted, key);
    }
}
