//! Figures the cache reports about itself. Plain data; gauges are exact at the call, counters only grow (except that
//! `KvCache::release` takes back what `attach` counted for a table that never ran).

use std::ops::{Add, Deref, Sub};

use crate::cache::KvCache;
use crate::counts::{GroupCounts, MAX_GROUPS};
use crate::group::Group;
use crate::types::TenantId;

/// The whole cache. What is not said to be of all groups is of group 0, whose pool's figures are found here by name, too.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CacheStats {
    /// By cache group; behind group 0, where `block_tokens` is 0 there is none. See [`CacheStats::groups()`].
    pub groups: [GroupStats; MAX_GROUPS],
    /// Of the cached blocks, those that hold a sub-block tail.
    pub cached_tails: u32,
    /// Of the active blocks, those that a pin holds.
    pub pinned_blocks: u32,
    /// Token slots of all allocations whose first use has ended (counter).
    pub closed_slots: u64,
    /// Of `closed_slots`, those that were written (counter).
    pub closed_written_slots: u64,
    pub queries: QueryStats,
    /// Copies handed out, for all groups (counter).
    pub copies: u64,
    /// Blocks released because equal content was already cached (counter).
    pub dedups: u64,
    /// Cached tails dropped because a longer block with the same beginning was indexed (counter).
    pub superseded_tails: u64,
    /// Full blocks added to the index (counter).
    pub published_blocks: u64,
}

impl Deref for CacheStats {
    type Target = GroupStats;
    /// Of group 0.
    fn deref(&self) -> &GroupStats {
        &self.groups[0]
    }
}

/// What `attach` was asked for, and found (counters).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct QueryStats {
    pub count: u64,
    /// Of prompts.
    pub tokens: u64,
    /// Of `tokens`, those attached, tails included.
    pub hit_tokens: u64,
    /// Of `hit_tokens`, those reused by copying part of a block.
    pub tail_hit_tokens: u64,
    /// Prompt tokens that group 0 holds in full blocks and that had to be computed again, because a window group had given
    /// up what a hit there needs.
    pub window_miss_tokens: u64,
    pub copies: u64,
}

impl QueryStats {
    fn zip(&self, other: &Self, of: fn(u64, u64) -> u64) -> Self {
        Self {
            count: of(self.count, other.count),
            tokens: of(self.tokens, other.tokens),
            hit_tokens: of(self.hit_tokens, other.hit_tokens),
            tail_hit_tokens: of(self.tail_hit_tokens, other.tail_hit_tokens),
            window_miss_tokens: of(self.window_miss_tokens, other.window_miss_tokens),
            copies: of(self.copies, other.copies),
        }
    }

    pub(crate) fn add(&mut self, other: &Self) {
        *self = self.zip(other, u64::add);
    }

    pub(crate) fn take_back(&mut self, other: &Self) {
        *self = self.zip(other, u64::sub);
    }
}

/// The pool of one cache group on the device. `free + cached + active == blocks` always.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GroupStats {
    pub blocks: u32,
    pub block_tokens: u32,
    pub bytes_per_block: u64,
    /// Hold nothing: never used, or their content was dropped.
    pub free_blocks: u32,
    /// Hold reusable content that no table references.
    pub cached_blocks: u32,
    /// Held by at least one table or pin.
    pub active_blocks: u32,
    /// Token slots of active blocks that hold a written position.
    pub active_written_slots: u64,
    /// Blocks handed to a table for writing (counter).
    pub allocations: u64,
    /// Cached blocks whose content was dropped to make room in this pool (counter).
    pub evictions: u64,
}

impl GroupStats {
    /// Share of the pool that tables hold, 0..=1.
    pub fn usage(&self) -> f64 {
        if self.blocks == 0 { 0.0 } else { f64::from(self.active_blocks) / f64::from(self.blocks) }
    }
}

impl CacheStats {
    /// Token slots of active blocks.
    pub fn active_slots(&self) -> u64 {
        u64::from(self.active_blocks) * u64::from(self.block_tokens)
    }

    /// Share of the active slots that holds nothing yet; 0 when nothing is active.
    pub fn waste(&self) -> f64 {
        unwritten_share(self.active_written_slots, self.active_slots())
    }

    /// Share of all slots ever allocated, and since given up, that was never written. Each allocation counts once,
    /// when the last table drops the block.
    pub fn lifetime_waste(&self) -> f64 {
        unwritten_share(self.closed_written_slots, self.closed_slots)
    }

    /// Group 0, and the others in the order they were given.
    pub fn groups(&self) -> &[GroupStats] {
        let others = self.groups[1..].iter().take_while(|group| group.block_tokens > 0);
        &self.groups[..=others.count()]
    }

    /// The groups from 1 on.
    pub fn windows(&self) -> &[GroupStats] {
        &self.groups()[1..]
    }

    /// Share of the pool that tables hold, of the group that is fullest, 0..=1: whoever sends requests must see pressure
    /// wherever it is.
    pub fn usage(&self) -> f64 {
        self.groups().iter().map(GroupStats::usage).fold(0.0, f64::max)
    }

    /// Of all groups.
    pub fn active_bytes(&self) -> u64 {
        self.groups().iter().map(|group| u64::from(group.active_blocks) * group.bytes_per_block).sum()
    }

    /// Of all groups.
    pub fn cached_bytes(&self) -> u64 {
        self.groups().iter().map(|group| u64::from(group.cached_blocks) * group.bytes_per_block).sum()
    }
}

fn unwritten_share(written: u64, slots: u64) -> f64 {
    if slots == 0 { 0.0 } else { (slots - written) as f64 / slots as f64 }
}

/// One tenant's part. Summed over all tenants, each figure equals that of [`CacheStats`] or [`GroupStats`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TenantStats {
    /// Blocks of each group.
    pub active: GroupCounts,
    pub cached: GroupCounts,
    pub pinned_blocks: u32,
    pub queries: QueryStats,
    /// Cached blocks of this tenant that were dropped to make room, for whomever (counter).
    pub evictions: u64,
}

impl TenantStats {
    /// Adds the counters of a time before; what is held is of now.
    pub fn carry(&mut self, before: &Self) {
        self.queries.add(&before.queries);
        self.evictions += before.evictions;
    }
}

impl KvCache {
    pub fn stats(&self) -> CacheStats {
        let stats = |group: &Group| GroupStats {
            blocks: group.config.blocks,
            block_tokens: group.config.block_tokens,
            bytes_per_block: group.config.bytes_per_block,
            free_blocks: group.pool.free(),
            ..group.stats
        };
        CacheStats {
            groups: std::array::from_fn(|at| self.groups.get(at).map(stats).unwrap_or_default()),
            copies: self.stats.copies + self.stats.queries.copies,
            ..self.stats
        }
    }

    /// Zeros for a tenant never seen.
    pub fn tenant_stats(&self, tenant: TenantId) -> TenantStats {
        let Some(tenant) = self.tenants.get(&tenant) else { return TenantStats::default() };
        let held = tenant.held;
        TenantStats {
            active: self.each_group(|group| held[group].active),
            cached: self.each_group(|group| held[group].cached),
            ..tenant.stats
        }
    }

    /// Every tenant that holds something or was not forgotten yet, in no particular order.
    pub fn tenants(&self) -> impl Iterator<Item = (TenantId, TenantStats)> + '_ {
        self.tenants.keys().map(|tenant| (*tenant, self.tenant_stats(*tenant)))
    }
}
