//! How tenants divide the pool of group 0: a guaranteed share, a ceiling, and what is idle lent to whoever needs it.
//!
//! Owns: the quotas, and for each tenant the order in which its own cached blocks were freed. Must never: touch a block that
//! a sequence holds: what was lent comes back by eviction of cached blocks, and by waiting (the scheduler's part).
//!
//! A tenant *holds* its active and its cached blocks. Without a quota its guarantee is nothing and its ceiling the pool.
//!
//! 1. Nobody holds more than its ceiling: at it, a tenant's own cached blocks are evicted for it, and with none left it waits.
//! 2. A cached block is never evicted for another tenant while its owner holds no more than its guarantee.
//! 3. A tenant that holds less than its guarantee takes from those above theirs before it takes from itself.
//! 4. Otherwise the policy's order decides. Where its choice may not go, the block freed longest ago of the tenant that is
//!    furthest above its guarantee goes.
//!
//! Guarantees add up to no more than the pool, so a tenant below its own always finds a free block, or one that is cached or
//! active beyond a guarantee. A single request can need at most [`KvCache::quota_limit`]: its tenant's ceiling, or what the
//! others' guarantees leave of the pool. Nothing can be pinned in a divided pool. Window groups are not divided; their blocks are charged in bytes (`account`).
//!
//! Cost: the hooks are O(1) and do nothing without quotas. With quotas a victim and [`KvCache::room`] are O(tenants), whatever
//! the number of blocks; pinned blocks at the old end of a list are passed over.

use rustc_hash::FxHashMap;

use crate::cache::KvCache;
use crate::check::Violation;
use crate::policy::NONE;
use crate::stats::TenantStats;
use crate::tree::Parent;
use crate::types::{BlockId, TenantId};

/// Blocks of group 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Quota {
    pub guarantee: u32,
    pub ceiling: u32,
}

/// A division of the pool that cannot be.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum QuotaError {
    #[error("the guarantee of tenant {}, {guarantee} blocks, exceeds its ceiling of {ceiling}", .tenant.0)]
    GuaranteeAboveCeiling { tenant: TenantId, guarantee: u32, ceiling: u32 },
    #[error("the ceiling of tenant {}, {ceiling} blocks, is not within 1 and the pool's {blocks}", .tenant.0)]
    Ceiling { tenant: TenantId, ceiling: u32, blocks: u32 },
    #[error("the guarantees add up to {sum} blocks, the pool has {blocks}")]
    Guarantees { sum: u64, blocks: u32 },
}

/// In `prev`: the block is in no list.
const ABSENT: u32 = NONE - 1;

#[derive(Clone, Copy, Debug)]
struct Ends {
    oldest: u32,
    newest: u32,
}

const EMPTY: Ends = Ends { oldest: NONE, newest: NONE };

/// Quotas, and cached blocks by tenant in the order they were freed: children before parents, because references are
/// dropped tail first.
#[derive(Debug, Default)]
pub(crate) struct Quotas {
    /// Empty: nothing is divided and nothing is listed.
    quotas: FxHashMap<TenantId, Quota>,
    guaranteed: u32,
    lists: FxHashMap<TenantId, Ends>,
    prev: Vec<u32>,
    next: Vec<u32>,
}

impl Quotas {
    fn on(&self) -> bool {
        !self.quotas.is_empty()
    }

    fn guarantee(&self, tenant: TenantId) -> u32 {
        self.quotas.get(&tenant).map_or(0, |quota| quota.guarantee)
    }

    /// A block became cached.
    pub fn freed(&mut self, block: u32, tenant: TenantId) {
        if !self.on() {
            return;
        }
        let ends = self.lists.entry(tenant).or_insert(EMPTY);
        self.prev[block as usize] = ends.newest;
        self.next[block as usize] = NONE;
        match ends.newest {
            NONE => ends.oldest = block,
            newest => self.next[newest as usize] = block,
        }
        ends.newest = block;
    }

    /// A cached block is used again, or its content dropped.
    pub fn taken(&mut self, block: u32, tenant: TenantId) {
        if !self.on() {
            return;
        }
        let (prev, next) = (self.prev[block as usize], self.next[block as usize]);
        let ends = self.lists.entry(tenant).or_insert(EMPTY);
        match prev {
            NONE => ends.oldest = next,
            prev => self.next[prev as usize] = next,
        }
        match next {
            NONE => ends.newest = prev,
            next => self.prev[next as usize] = prev,
        }
        self.prev[block as usize] = ABSENT;
    }

    /// A tenant's cached blocks, freed longest ago first.
    fn cached(&self, tenant: TenantId) -> impl Iterator<Item = u32> + '_ {
        let first = self.lists.get(&tenant).map_or(NONE, |ends| ends.oldest);
        let link = |block: u32| (block != NONE).then_some(block);
        std::iter::successors(link(first), move |block| link(self.next[*block as usize]))
    }
}

impl KvCache {
    /// Divides the pool, before it is used.
    pub fn set_quotas(&mut self, quotas: &[(TenantId, Quota)]) -> Result<(), QuotaError> {
        debug_assert!(self.tenants.is_empty(), "quotas come before the first block is taken");
        let blocks = self.config.blocks;
        for (tenant, Quota { guarantee, ceiling }) in quotas.iter().copied() {
            if ceiling == 0 || ceiling > blocks {
                return Err(QuotaError::Ceiling { tenant, ceiling, blocks });
            }
            if guarantee > ceiling {
                return Err(QuotaError::GuaranteeAboveCeiling { tenant, guarantee, ceiling });
            }
        }
        let sum = quotas.iter().map(|(_, quota)| u64::from(quota.guarantee)).sum::<u64>();
        if sum > u64::from(blocks) {
            return Err(QuotaError::Guarantees { sum, blocks });
        }
        self.quotas = Quotas {
            quotas: quotas.iter().copied().collect(),
            guaranteed: sum as u32,
            lists: FxHashMap::default(),
            prev: vec![ABSENT; blocks as usize],
            next: vec![NONE; blocks as usize],
        };
        Ok(())
    }

    /// Whether the pool is divided at all.
    pub fn has_quotas(&self) -> bool {
        self.quotas.on()
    }

    /// Of a tenant without one: nothing guaranteed, the whole pool as the ceiling.
    pub fn quota(&self, tenant: TenantId) -> Quota {
        let none = Quota { guarantee: 0, ceiling: self.config.blocks };
        self.quotas.quotas.get(&tenant).copied().unwrap_or(none)
    }

    /// Most blocks of group 0 that one request of the tenant may ever need: with nothing running it gets so many, whatever
    /// the others have cached.
    pub fn quota_limit(&self, tenant: TenantId) -> u32 {
        let Quota { guarantee, ceiling } = self.quota(tenant);
        ceiling.min(self.config.blocks - (self.quotas.guaranteed - guarantee))
    }

    /// [`KvCache::quota_limit`] of every tenant with a quota, and of all others.
    pub fn quota_limits(&self) -> (Vec<(TenantId, u32)>, u32) {
        let each = self.quotas.quotas.keys().map(|tenant| (*tenant, self.quota_limit(*tenant)));
        (each.collect(), self.config.blocks - self.quotas.guaranteed)
    }

    /// Active and cached blocks of group 0.
    pub fn held_blocks(&self, tenant: TenantId) -> u32 {
        let counts = self.counts_of(tenant);
        counts.active_blocks + counts.cached_blocks
    }

    fn counts_of(&self, tenant: TenantId) -> TenantStats {
        self.tenants.get(&tenant).copied().unwrap_or_default()
    }

    /// Cached blocks of a tenant that may be evicted at all.
    fn loose(&self, tenant: TenantId) -> u32 {
        self.counts_of(tenant).cached_blocks - self.counts_of(tenant).pinned_idle
    }

    /// Cached blocks of `owner` that may go to another tenant.
    fn yields(&self, owner: TenantId) -> u32 {
        let above = self.held_blocks(owner).saturating_sub(self.quotas.guarantee(owner));
        above.min(self.loose(owner))
    }

    /// Blocks of group 0 that `tenant` can take: what the pool has for it, and what its ceiling leaves. It gets the smaller.
    pub fn room(&self, tenant: TenantId) -> (u32, u32) {
        if !self.quotas.on() {
            let all = self.available()[0];
            return (all, all);
        }
        let own = self.loose(tenant);
        let others = self.tenants.keys().filter(|other| **other != tenant);
        let pool = self.free.len() as u32 + others.map(|other| self.yields(*other)).sum::<u32>() + own;
        (pool, self.quota(tenant).ceiling - self.held_blocks(tenant) + own)
    }

    /// Whether a free block may go to `taker`; at its ceiling it makes room among its own.
    pub(crate) fn may_take_free(&self, taker: TenantId) -> bool {
        !self.quotas.on() || self.held_blocks(taker) < self.quota(taker).ceiling
    }

    /// Whether a cached block of `owner` may be evicted for `taker`.
    pub(crate) fn may_evict(&self, taker: TenantId, owner: TenantId) -> bool {
        if !self.quotas.on() {
            return true;
        }
        let held = self.held_blocks(taker);
        if held >= self.quota(taker).ceiling {
            return owner == taker;
        }
        if owner == taker {
            return held >= self.quotas.guarantee(taker) || self.furthest_above(taker).is_none();
        }
        self.yields(owner) > 0
    }

    /// The other tenant that is furthest above its guarantee and has something to give.
    fn furthest_above(&self, taker: TenantId) -> Option<TenantId> {
        let others = self.tenants.keys().copied().filter(|other| *other != taker && self.yields(*other) > 0);
        others.max_by_key(|other| {
            (self.held_blocks(*other) - self.quotas.guarantee(*other), std::cmp::Reverse(*other))
        })
    }

    /// A block that may be evicted for `taker` where the policy's choice may not.
    pub(crate) fn quota_victim(&self, taker: TenantId) -> Option<u32> {
        let full = self.held_blocks(taker) >= self.quota(taker).ceiling;
        let other = if full { None } else { self.furthest_above(taker) };
        let owners = [other, Some(taker)];
        owners.into_iter().flatten().find_map(|owner| {
            self.quotas
                .cached(owner)
                .find(|block| self.tree.block(*block).children.count == 0 && !self.is_pinned(BlockId(*block)))
        })
    }

    /// The lists hold exactly the cached blocks, each under its tenant, no parent before its child; nobody is above its
    /// ceiling, and what [`KvCache::room`] says is what a count over all blocks says.
    pub(crate) fn check_quotas(&self) -> Result<(), Violation> {
        if !self.quotas.on() {
            return Ok(());
        }
        let mut listed = vec![0u32; self.config.blocks as usize];
        for tenant in self.quotas.lists.keys() {
            let mut at = 0;
            for block in self.quotas.cached(*tenant) {
                at += 1;
                let of = self.tree.block(block);
                let fail = |what| Err(Violation::Index { block: BlockId(block), what });
                if !of.is_cached() || of.tenant != *tenant || listed[block as usize] != 0 {
                    return fail("is listed as a cached block of a tenant, and is none or is listed twice");
                }
                listed[block as usize] = at;
            }
        }
        for (id, block) in self.tree.blocks.iter().enumerate() {
            let fail = |what| Err(Violation::Index { block: BlockId(id as u32), what });
            if block.is_cached() && listed[id] == 0 {
                return fail("is cached and not in the list of its tenant");
            }
            if let Parent::Block(parent) = block.parent
                && block.is_cached()
                && self.tree.block(parent).is_cached()
                && listed[parent as usize] < listed[id]
            {
                return fail("is listed after its parent");
            }
        }
        for tenant in self.tenants.keys() {
            self.check_room(*tenant)?;
        }
        Ok(())
    }

    fn check_room(&self, tenant: TenantId) -> Result<(), Violation> {
        let count_of = |owner: TenantId, cached: bool| {
            let mine = self.tree.blocks.iter().enumerate().filter(|(id, block)| {
                let counts = if cached {
                    block.is_cached() && !self.is_pinned(BlockId(*id as u32))
                } else {
                    block.refs > 0 || block.is_cached()
                };
                counts && block.tenant == owner
            });
            mine.count() as u32
        };
        let Quota { ceiling, .. } = self.quota(tenant);
        let (held, own) = (count_of(tenant, false), count_of(tenant, true));
        if held > ceiling {
            return Err(Violation::Count {
                what: "blocks of a tenant, at most its ceiling,",
                reported: ceiling.into(),
                actual: held.into(),
            });
        }
        let others = self.tenants.keys().filter(|other| **other != tenant).map(|other| {
            let above = count_of(*other, false).saturating_sub(self.quota(*other).guarantee);
            above.min(count_of(*other, true))
        });
        let pool = self.free.len() as u32 + others.sum::<u32>() + own;
        let (reported, actual) = (self.room(tenant), (pool, ceiling - held + own));
        if reported != actual {
            let (reported, actual) = (reported.0.min(reported.1).into(), actual.0.min(actual.1).into());
            return Err(Violation::Count { what: "room of a tenant", reported, actual });
        }
        Ok(())
    }
}
