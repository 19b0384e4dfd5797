//! How tenants divide the pool of group 0: a guarantee and a ceiling, and what is idle is borrowed by whoever needs it.
//!
//! Owns: the quotas. Must never: touch a block that a sequence holds: what was borrowed comes back by eviction of cached blocks, and by waiting (the scheduler's part).
//!
//! A tenant *holds* its active and its cached blocks. Without a quota its guarantee is nothing and its ceiling the pool.
//!
//! 1. Nobody holds more than its ceiling: at it, a tenant's own cached blocks are evicted for it, and with none left it waits.
//! 2. A cached block is never evicted for another tenant while its owner holds no more than its guarantee.
//! 3. A tenant that holds less than its guarantee takes from those above theirs before it takes from itself.
//! 4. Otherwise the policy's order decides. Where its choice may not go, the weakest block of the tenant that is furthest above
//!    its guarantee goes (see `policy::retaining`).
//!
//! Guarantees add up to no more than the pool, so a tenant below its own always finds a free block, or one that is cached or
//! active beyond a guarantee. A single request can need at most [`KvCache::quota_limit`]: its tenant's ceiling, or what the
//! others' guarantees leave of the pool. Nothing can be pinned in a divided pool. Window groups are not divided; their blocks are charged in bytes (`account`).
//!
//! Cost: with quotas a victim and [`KvCache::room`] are O(tenants), whatever the number of blocks.

use rustc_hash::FxHashMap;

use crate::account::Held;
use crate::cache::KvCache;
use crate::check::{at_most, count};
use crate::types::TenantId;

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

#[derive(Debug, Default)]
pub(crate) struct Quotas {
    /// Empty: nothing is divided.
    quotas: FxHashMap<TenantId, Quota>,
    guaranteed: u32,
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
        self.quotas = Quotas { quotas: quotas.iter().copied().collect(), guaranteed: sum as u32 };
        Ok(())
    }

    /// Whether the pool is divided at all.
    pub fn has_quotas(&self) -> bool {
        !self.quotas.quotas.is_empty()
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
        let held = self.counts_of(tenant);
        held.active + held.cached
    }

    fn counts_of(&self, tenant: TenantId) -> Held {
        self.tenants.get(&tenant).map(|tenant| tenant.held[0]).unwrap_or_default()
    }

    /// Cached blocks of `owner` that may go to another tenant.
    fn yields(&self, owner: TenantId) -> u32 {
        let above = self.held_blocks(owner).saturating_sub(self.quota(owner).guarantee);
        above.min(self.counts_of(owner).cached)
    }

    /// Blocks of group 0 that `tenant` can take: what the pool has for it, and what its ceiling leaves. It gets the smaller.
    pub fn room(&self, tenant: TenantId) -> (u32, u32) {
        if !self.has_quotas() {
            let all = self.available()[0];
            return (all, all);
        }
        let own = self.counts_of(tenant).cached;
        let others = self.tenants.keys().filter(|other| **other != tenant);
        let pool = self.groups[0].pool.free() + others.map(|other| self.yields(*other)).sum::<u32>() + own;
        (pool, self.quota(tenant).ceiling - self.held_blocks(tenant) + own)
    }

    /// Whether a free block may go to `taker`; at its ceiling it makes room among its own.
    pub(crate) fn may_take_free(&self, taker: TenantId) -> bool {
        !self.has_quotas() || self.held_blocks(taker) < self.quota(taker).ceiling
    }

    /// Whether a cached block of `owner` may be evicted for `taker`.
    pub(crate) fn may_evict(&self, taker: TenantId, owner: TenantId) -> bool {
        if !self.has_quotas() {
            return true;
        }
        let held = self.held_blocks(taker);
        if held >= self.quota(taker).ceiling {
            return owner == taker;
        }
        if owner == taker {
            return held >= self.quota(taker).guarantee || self.furthest_above(taker).is_none();
        }
        self.yields(owner) > 0
    }

    /// The other tenant that is furthest above its guarantee and has something to give.
    fn furthest_above(&self, taker: TenantId) -> Option<TenantId> {
        let others = self.tenants.keys().copied().filter(|other| *other != taker && self.yields(*other) > 0);
        others.max_by_key(|other| {
            (self.held_blocks(*other) - self.quota(*other).guarantee, std::cmp::Reverse(*other))
        })
    }

    /// A block that may be evicted for `taker` where the policy's choice may not.
    pub(crate) fn quota_victim(&self, taker: TenantId) -> Option<u32> {
        let full = self.held_blocks(taker) >= self.quota(taker).ceiling;
        let other = if full { None } else { self.furthest_above(taker) };
        let owners = [other, Some(taker)];
        owners.into_iter().flatten().find_map(|owner| self.policy.weakest(owner))
    }

    /// Nobody is above its ceiling, and what [`KvCache::room`] says is what a count over all blocks says.
    pub(crate) fn check_quotas(&self) -> Result<(), String> {
        if !self.has_quotas() {
            return Ok(());
        }
        self.tenants.keys().try_for_each(|tenant| self.check_room(*tenant))
    }

    fn check_room(&self, tenant: TenantId) -> Result<(), String> {
        let count_of = |owner: TenantId, cached: bool| {
            let used = self.groups[0].pool.used();
            used.filter(|(_, slot)| (!cached || slot.is_cached()) && slot.tenant == owner).count() as u32
        };
        let Quota { ceiling, .. } = self.quota(tenant);
        let (held, own) = (count_of(tenant, false), count_of(tenant, true));
        at_most("blocks of a tenant, at most its ceiling,", held, ceiling)?;
        let others = self.tenants.keys().filter(|other| **other != tenant).map(|other| {
            let above = count_of(*other, false).saturating_sub(self.quota(*other).guarantee);
            above.min(count_of(*other, true))
        });
        let pool = self.groups[0].pool.free() + others.sum::<u32>() + own;
        let room = self.room(tenant);
        count("room of a tenant in the pool", room.0.into(), pool.into())?;
        count("room of a tenant below its ceiling", room.1.into(), (ceiling - held + own).into())
    }
}
