//! A cache and a tier behind it over recorded traffic: what is found in both, and what is written for that.
//!
//! Owns: the tier's model, blocks of which the one wanted the longest ago goes, of a request the deepest first; and the rules by which it is
//! given any. What is worth it the real cache says ([`KvCache::worth_storing`]), and what it evicts.

use std::collections::{BTreeMap, HashMap};

use folio_kv::{
    BlockHash, BlockHashes, CacheConfig, CacheEvent, EventBatch, EvictionPolicy, KvCache, TenantId,
};

use super::BlockTrace;
use crate::scenario::root;

/// When a tier is given what it lacks and is worth it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StoreRule {
    /// As a request ends, as the engine does.
    AtEnd,
    /// As it is evicted: whoever takes its block waits until it is read.
    AtEviction,
    /// The same, and what is loaded goes from the tier, so that nothing is in both.
    Moved,
    /// As a request ends, and as it is evicted whatever the tier lacks then.
    Both,
}

impl StoreRule {
    pub const ALL: [StoreRule; 4] =
        [StoreRule::AtEnd, StoreRule::AtEviction, StoreRule::Moved, StoreRule::Both];

    pub const fn name(self) -> &'static str {
        match self {
            StoreRule::AtEnd => "at the end",
            StoreRule::AtEviction => "at eviction",
            StoreRule::Moved => "at eviction, moved",
            StoreRule::Both => "both",
        }
    }
}

/// Blocks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TieredHits {
    pub device: u64,
    pub tier: u64,
    /// Written to the tier, and of those as they were evicted.
    pub written: u64,
    pub demoted: u64,
}

#[derive(Default)]
struct Kept {
    used_at: HashMap<u32, u64>,
    order: BTreeMap<u64, u32>,
    now: u64,
}

impl Kept {
    /// Whether it is new.
    fn put(&mut self, id: u32) -> bool {
        self.now += 1;
        let before = self.used_at.insert(id, self.now);
        before.map(|at| self.order.remove(&at));
        self.order.insert(self.now, id);
        before.is_none()
    }

    fn take(&mut self, id: u32) {
        self.used_at.remove(&id).map(|at| self.order.remove(&at));
    }

    fn cut(&mut self, blocks: usize) {
        while self.used_at.len() > blocks {
            let Some((_, id)) = self.order.pop_first() else { return };
            self.used_at.remove(&id);
        }
    }

    /// Of a prompt from block `from` on, those that are there without a gap.
    fn find(&self, ids: &[u32], from: u32) -> u32 {
        let found = ids[from as usize..].iter().take_while(|id| self.used_at.contains_key(id));
        from + found.count() as u32
    }
}

/// What is found in a cache of `blocks` and a tier of `tier_blocks`, in the model of [`super::hits`].
pub fn tiered(
    trace: &BlockTrace,
    blocks: u32,
    tier_blocks: u32,
    policy: Box<dyn EvictionPolicy>,
    rule: StoreRule,
) -> TieredHits {
    let root = root(TenantId(0));
    let mut cache = KvCache::new(CacheConfig { blocks, block_tokens: 1, bytes_per_block: 1 }, policy);
    let events = 4 * blocks as usize;
    cache.record_events(events);
    let mut batch = EventBatch::with_capacity(events, 1);
    // What the cache may have; and whether it was worth storing when it was wanted last.
    let mut known: HashMap<BlockHash, (u32, bool)> = HashMap::new();
    let (mut tier, mut hits) = (Kept::default(), TieredHits::default());
    let mut copies = Vec::new();
    for ids in &trace.requests {
        let length = ids.len() as u32;
        let hashes = BlockHashes::new(&root, ids, 1);
        let all: Vec<BlockHash> = hashes.iter().copied().collect();
        let mut table = cache.attach(hashes, ids, length, &mut Vec::new());
        let found = table.computed();
        let loaded = tier.find(ids, found);
        hits.tier += u64::from(loaded - found);
        for id in &ids[found as usize..loaded as usize] {
            match rule {
                StoreRule::Moved => tier.take(*id),
                _ => drop(tier.put(*id)),
            }
        }
        let mut worth =
            if rule == StoreRule::AtEnd || rule == StoreRule::Both { tier.find(ids, 0) } else { 0 };
        if cache.grow(&mut table, length, &mut copies).is_ok() {
            cache.commit(&mut table, ids, length).expect("what was grown can be committed");
            worth = cache.worth_storing(&table, worth, length);
        }
        cache.take_events(&mut batch);
        assert!(!batch.begins_anew, "no event was lost");
        for event in batch.events.drain(..) {
            let CacheEvent::Removed { hash, .. } = event else { continue };
            let Some((id, is_worth)) = known.remove(&hash).filter(|_| rule != StoreRule::AtEnd) else {
                continue;
            };
            if (is_worth || rule == StoreRule::Both) && tier.put(id) {
                (hits.written, hits.demoted) = (hits.written + 1, hits.demoted + 1);
            }
        }
        batch.clear();
        known.extend(all.into_iter().zip(ids.iter().zip(0..).map(|(id, at)| (*id, at < worth))));
        if rule == StoreRule::AtEnd || rule == StoreRule::Both {
            hits.written += ids[..worth as usize].iter().rev().filter(|id| tier.put(**id)).count() as u64;
        }
        tier.cut(tier_blocks as usize);
        cache.release(table, ids);
    }
    hits.device = cache.stats().queries.hit_tokens;
    hits
}

#[cfg(test)]
mod tests {
    use folio_kv::{LearnedLifetimes, LruLeafFirst};

    use super::*;

    fn single_shots_beside_one_text(requests: u32) -> BlockTrace {
        let request = |at: u32| match at % 4 {
            0 => (0..8).collect(),
            _ => (100 + 60 * at..160 + 60 * at).collect(),
        };
        BlockTrace { requests: (0..requests).map(request).collect() }
    }

    #[test]
    fn what_the_cache_lost_is_found_in_the_tier_and_nothing_twice() {
        let trace = BlockTrace { requests: vec![vec![0, 1, 2], vec![3, 4, 5], vec![0, 1, 2], vec![0, 1, 6]] };
        let run = |tier, rule| tiered(&trace, 3, tier, Box::new(LruLeafFirst::new()), rule);
        let hits = |tier, written, demoted| TieredHits { device: 2, tier, written, demoted };
        assert_eq!(run(0, StoreRule::AtEnd), hits(0, 12, 0));
        assert_eq!(run(10, StoreRule::AtEnd), hits(3, 7, 0));
        // What is still in the cache at the end is not written; what moved up is written again.
        assert_eq!(run(10, StoreRule::AtEviction), hits(3, 6, 6));
        assert_eq!(run(10, StoreRule::Moved), hits(3, 7, 7));
        assert_eq!(run(10, StoreRule::Both), hits(3, 7, 0));
        // Where nothing is in both, a tier of three is enough.
        assert_eq!((run(3, StoreRule::Moved).tier, run(3, StoreRule::AtEnd).tier), (3, 0));
    }

    #[test]
    fn a_session_that_goes_on_is_worth_storing_and_a_single_shot_is_not() {
        let trace = single_shots_beside_one_text(2000);
        let all = tiered(&trace, 150, 400, Box::new(LruLeafFirst::new()), StoreRule::AtEnd);
        let worth = tiered(&trace, 150, 400, Box::new(LearnedLifetimes::new(0.0)), StoreRule::AtEnd);
        assert!(worth.written * 4 < all.written, "{worth:?}, all: {all:?}");
        assert!(worth.device + worth.tier >= all.device + all.tier, "{worth:?}, all: {all:?}");
        assert!(worth.tier + worth.device > 3500, "{worth:?}");
    }
}
