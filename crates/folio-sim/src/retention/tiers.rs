//! A cache and a tier behind it over recorded traffic: what is found in both, and what is written for that.
//!
//! Owns: the tier's model, blocks of which the one wanted the longest ago goes, of a request the deepest first. What the tier is given
//! the real cache says ([`KvCache::worth_storing`]).

use std::collections::{BTreeMap, HashMap};

use folio_kv::{BlockHashes, CacheConfig, EvictionPolicy, KvCache, TenantId};

use super::BlockTrace;
use crate::scenario::root;

/// Blocks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TieredHits {
    pub device: u64,
    pub tier: u64,
    /// Written to the tier.
    pub written: u64,
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
) -> TieredHits {
    let root = root(TenantId(0));
    let mut cache = KvCache::new(CacheConfig { blocks, block_tokens: 1, bytes_per_block: 1 }, policy);
    let (mut tier, mut hits) = (Kept::default(), TieredHits::default());
    let mut copies = Vec::new();
    for ids in &trace.requests {
        let length = ids.len() as u32;
        let mut table = cache.attach(BlockHashes::new(&root, ids, 1), ids, length, &mut Vec::new());
        let found = table.computed();
        hits.tier += u64::from(tier.find(ids, found) - found);
        let mut there = tier.find(ids, 0);
        if cache.grow(&mut table, length, &mut copies).is_ok() {
            cache.commit(&mut table, ids, length).expect("what was grown can be committed");
            there = cache.worth_storing(&table, there, length);
        }
        hits.written += ids[..there as usize].iter().rev().filter(|id| tier.put(**id)).count() as u64;
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
        let run = |tier| tiered(&trace, 3, tier, Box::new(LruLeafFirst::new()));
        assert_eq!(run(0), TieredHits { device: 2, tier: 0, written: 12 });
        assert_eq!(run(10), TieredHits { device: 2, tier: 3, written: 7 });
    }

    #[test]
    fn a_session_that_goes_on_is_worth_storing_and_a_single_shot_is_not() {
        let trace = single_shots_beside_one_text(2000);
        let all = tiered(&trace, 150, 400, Box::new(LruLeafFirst::new()));
        let worth = tiered(&trace, 150, 400, Box::new(LearnedLifetimes::new(0.0)));
        assert!(worth.written * 4 < all.written, "{worth:?}, all: {all:?}");
        assert!(worth.device + worth.tier >= all.device + all.tier, "{worth:?}, all: {all:?}");
        assert!(worth.tier + worth.device > 3500, "{worth:?}");
    }
}
