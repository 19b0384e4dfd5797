//! Who held how much memory for how long: bytes times microseconds, per tenant, exact.
//!
//! Owns: the integrals. Must never: read a clock: time comes with [`KvCache::advance`], and whatever happens until the next
//! call happens at that moment.
//!
//! Every change of a tenant's block counts goes through `KvCache::held`, which first adds what the old counts held since they
//! were last changed. So the integrals are exact whenever they are looked at, and a change costs two multiplications.
//! A block that several sequences of a tenant share counts once.
//!
//! Tenants come and go: who holds nothing any more is forgotten, and what it was counted is handed to whoever keeps totals
//! ([`KvCache::retire_tenants`]).

use crate::blocks::Tenant;
use crate::cache::KvCache;
use crate::group::Group;
use crate::stats::TenantStats;
use crate::types::TenantId;

/// Tenants there may be before anybody is forgotten.
pub(crate) const TENANTS_LEAST: usize = 64;

/// What a tenant holds now, and has held: integers, so that nothing is lost however long it runs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Holdings {
    /// Blocks that sequences and pins hold.
    pub active_bytes: u64,
    /// Reusable content that nobody holds.
    pub cached_bytes: u64,
    /// Bytes times microseconds until `at_us` (counters).
    pub active_byte_us: u128,
    pub cached_byte_us: u128,
    pub at_us: u64,
}

impl Holdings {
    /// The same at a later time, nothing having changed since.
    pub fn at(self, now_us: u64) -> Self {
        let passed = u128::from(now_us.saturating_sub(self.at_us));
        Self {
            active_byte_us: self.active_byte_us + u128::from(self.active_bytes) * passed,
            cached_byte_us: self.cached_byte_us + u128::from(self.cached_bytes) * passed,
            at_us: self.at_us.max(now_us),
            ..self
        }
    }

    /// Adds the integrals of a time before; what is held is of now.
    pub fn carry(&mut self, before: &Self) {
        self.active_byte_us += before.active_byte_us;
        self.cached_byte_us += before.cached_byte_us;
    }
}

/// Blocks of one pool that a tenant holds, and those times microseconds, up to a moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Held {
    pub active: u32,
    pub cached: u32,
    active_block_us: u128,
    cached_block_us: u128,
    until_us: u64,
}

impl Held {
    /// Adds what was held until `now_us`. To be called before the counts change.
    pub fn settle(&mut self, now_us: u64) {
        let passed = u128::from(now_us.saturating_sub(self.until_us));
        self.active_block_us += u128::from(self.active) * passed;
        self.cached_block_us += u128::from(self.cached) * passed;
        self.until_us = self.until_us.max(now_us);
    }

    /// Adds this pool's part.
    fn add_to(mut self, holdings: &mut Holdings, bytes_per_block: u64) {
        self.settle(holdings.at_us);
        holdings.active_bytes += u64::from(self.active) * bytes_per_block;
        holdings.cached_bytes += u64::from(self.cached) * bytes_per_block;
        holdings.active_byte_us += self.active_block_us * u128::from(bytes_per_block);
        holdings.cached_byte_us += self.cached_block_us * u128::from(bytes_per_block);
    }
}

fn holdings(groups: &[Group], tenant: &Tenant, at_us: u64) -> Holdings {
    let mut holdings = Holdings { at_us, ..Holdings::default() };
    for (group, held) in groups.iter().zip(&tenant.held) {
        held.add_to(&mut holdings, group.config.bytes_per_block);
    }
    holdings
}

impl KvCache {
    /// What `tenant` holds and has held in all groups, at the time last told. Zeros for a tenant never seen, or forgotten.
    pub fn holdings(&self, tenant: TenantId) -> Holdings {
        holdings(&self.groups, &self.tenants.get(&tenant).copied().unwrap_or_default(), self.now_us)
    }

    /// Forgets tenants that hold nothing, and hands over what each was counted since it was last forgotten. Not while a
    /// table that was attached is neither grown nor given up. O(1) amortized: it waits until there are twice as many as it
    /// left the last time.
    pub fn retire_tenants(&mut self, mut hand_over: impl FnMut(TenantId, &TenantStats, &Holdings)) {
        if self.tenants.len() < self.retire_at {
            return;
        }
        let (now, groups, retired) = (self.now_us, &self.groups, &mut self.retired);
        self.tenants.retain(|id, tenant| {
            if tenant.held.iter().any(|held| held.active + held.cached > 0) {
                return true;
            }
            hand_over(*id, &tenant.stats, &holdings(groups, tenant, now));
            retired.carry(&tenant.stats);
            false
        });
        self.retire_at = TENANTS_LEAST.max(2 * self.tenants.len());
    }
}
