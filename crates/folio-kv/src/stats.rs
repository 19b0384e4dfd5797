//! Figures the cache reports about itself. Plain data; gauges are exact at the call, counters only grow (except that
//! `KvCache::abandon` takes back what its `attach` counted).

use crate::types::CacheConfig;

/// The whole pool. `free + cached + active == blocks` always.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CacheStats {
    pub blocks: u32,
    pub block_tokens: u32,
    pub bytes_per_block: u64,
    /// Hold nothing: never used, or their content was dropped.
    pub free_blocks: u32,
    /// Hold reusable content that no table references.
    pub cached_blocks: u32,
    /// Of `cached_blocks`, those that hold a sub-block tail.
    pub cached_tails: u32,
    /// Referenced by at least one table.
    pub active_blocks: u32,
    /// Cached or active, and never evicted.
    pub pinned_blocks: u32,
    /// Token slots of active blocks that hold a written position.
    pub active_written_slots: u64,
    /// Token slots of all allocations whose first use has ended (counter).
    pub closed_slots: u64,
    /// Of `closed_slots`, those that were written (counter).
    pub closed_written_slots: u64,
    /// Calls of `attach` (counter).
    pub queries: u64,
    /// Prompt tokens asked for (counter).
    pub query_tokens: u64,
    /// Prompt tokens attached, tails included (counter).
    pub hit_tokens: u64,
    /// Of `hit_tokens`, those reused by copying part of a block (counter).
    pub tail_hit_tokens: u64,
    /// Blocks handed to a table for writing (counter).
    pub allocations: u64,
    /// Cached blocks whose content was dropped to make room (counter).
    pub evictions: u64,
    /// Copies handed out (counter).
    pub copies: u64,
    /// Blocks given back because equal content was already cached (counter).
    pub dedups: u64,
    /// Cached tails dropped because a longer block with the same beginning was indexed (counter).
    pub superseded_tails: u64,
    /// Full blocks added to the index (counter).
    pub published_blocks: u64,
}

impl CacheStats {
    pub(crate) fn new(config: &CacheConfig) -> Self {
        Self {
            blocks: config.blocks,
            block_tokens: config.block_tokens,
            bytes_per_block: config.bytes_per_block,
            free_blocks: config.blocks,
            ..Self::default()
        }
    }

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

    pub fn active_bytes(&self) -> u64 {
        u64::from(self.active_blocks) * self.bytes_per_block
    }

    pub fn cached_bytes(&self) -> u64 {
        u64::from(self.cached_blocks) * self.bytes_per_block
    }
}

fn unwritten_share(written: u64, slots: u64) -> f64 {
    if slots == 0 { 0.0 } else { (slots - written) as f64 / slots as f64 }
}

/// One tenant's part. Summed over all tenants, each field equals its namesake in [`CacheStats`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TenantStats {
    pub active_blocks: u32,
    pub cached_blocks: u32,
    pub pinned_blocks: u32,
    pub queries: u64,
    pub query_tokens: u64,
    pub hit_tokens: u64,
    pub tail_hit_tokens: u64,
    /// Cached blocks of this tenant that were dropped to make room, for whomever (counter).
    pub evictions: u64,
}
