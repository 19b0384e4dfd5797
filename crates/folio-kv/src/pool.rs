//! The life of a block of group 0: free -> active -> cached -> active or free again. The private half of [`KvCache`].
//!
//! Owns: reference counts, the free list, eviction, and every counter that belongs to a block's state. Must never: look
//! at hashes or tables. (Blocks of window groups live in `window`; a block that leaves the index here takes its companions
//! there along.)
//!
//! | state | references | in the index | counted by the policy |
//! |---|---|---|---|
//! | free | 0 | no | no |
//! | active, being written | > 0 | no | no |
//! | active, published | > 0 | yes, full | known, in use |
//! | cached | 0 | yes, full or tail | known, freed |
//!
//! Cost: every function here is O(1); `evict` falls back to a scan only for a faulty policy.

use crate::cache::KvCache;
use crate::stats::TenantStats;
use crate::tree::Content;
use crate::types::{BlockId, TenantId};

impl KvCache {
    /// To change a tenant's counts: what it held until now is on its account first.
    pub(crate) fn tenant(&mut self, tenant: TenantId) -> &mut TenantStats {
        let counts = self.tenants.entry(tenant).or_default();
        counts.ledger.settle(self.now_us, counts.active_blocks, counts.cached_blocks);
        counts
    }

    /// A block to write in, referenced once: never-published blocks first, then what the policy gives up.
    pub(crate) fn take(&mut self, tenant: TenantId) -> Option<BlockId> {
        let free = if self.may_take_free(tenant) { self.free.pop() } else { None };
        let block = match free {
            Some(block) => block,
            None => self.evict(tenant)?,
        };
        let b = self.tree.block_mut(block);
        debug_assert!(b.refs == 0 && b.content == Content::Private, "a block in use was taken");
        b.tenant = tenant;
        b.refs = 1;
        b.filled = 0;
        b.open = true;
        self.stats.allocations += 1;
        self.stats.active_blocks += 1;
        self.tenant(tenant).active_blocks += 1;
        Some(BlockId(block))
    }

    /// Sets how many positions of an active block are written.
    pub(crate) fn set_filled(&mut self, block: BlockId, filled: u32) {
        let b = self.tree.block_mut(block.0);
        debug_assert!(b.refs > 0 && b.content == Content::Private);
        let written = self.stats.active_written_slots + u64::from(filled) - u64::from(b.filled);
        b.filled = filled;
        self.stats.active_written_slots = written;
    }

    pub(crate) fn reference(&mut self, block: BlockId) {
        let b = self.tree.block_mut(block.0);
        b.refs += 1;
        if b.refs > 1 {
            return;
        }
        debug_assert_eq!(b.content, Content::Full, "only full blocks come back from the cache");
        let (tenant, filled) = (b.tenant, b.filled);
        self.stats.cached_blocks -= 1;
        self.stats.active_blocks += 1;
        self.stats.active_written_slots += u64::from(filled);
        let counts = self.tenant(tenant);
        counts.cached_blocks -= 1;
        counts.active_blocks += 1;
        self.policy.on_use(block, &self.tree.meta(block.0));
    }

    pub(crate) fn unreference(&mut self, block: BlockId) {
        let b = self.tree.block_mut(block.0);
        b.refs -= 1;
        if b.refs > 0 {
            return;
        }
        let (tenant, filled, content) = (b.tenant, u64::from(b.filled), b.content);
        if std::mem::take(&mut b.open) {
            self.stats.closed_slots += u64::from(self.config.block_tokens);
            self.stats.closed_written_slots += filled;
        }
        self.stats.active_blocks -= 1;
        self.stats.active_written_slots -= filled;
        self.tenant(tenant).active_blocks -= 1;
        if content == Content::Private {
            self.free.push(block.0);
            return;
        }
        self.stats.cached_blocks += 1;
        self.stats.cached_tails += u32::from(content == Content::Tail);
        self.tenant(tenant).cached_blocks += 1;
        self.policy.on_free(block, &self.tree.meta(block.0));
    }

    pub(crate) fn hit(&mut self, block: BlockId) {
        self.tree.block_mut(block.0).hits += 1;
        self.tree.touch(block.0);
        self.policy.on_hit(block, &self.tree.meta(block.0));
    }

    /// Drops the content of a cached, childless block. The block is in no state until the caller puts it somewhere.
    pub(crate) fn forget(&mut self, block: u32) {
        let meta = self.tree.meta(block);
        let b = self.tree.block(block);
        debug_assert!(b.is_cached() && b.children.count == 0);
        self.stats.cached_blocks -= 1;
        self.stats.cached_tails -= u32::from(b.content == Content::Tail);
        self.tenant(meta.tenant).cached_blocks -= 1;
        self.windows.iter_mut().for_each(|window| window.forget(block));
        let bare_parent = self.tree.remove(block);
        self.policy.on_remove(BlockId(block), &meta);
        if let Some(parent) = bare_parent {
            self.policy.on_leaf(BlockId(parent), &self.tree.meta(parent));
        }
    }

    fn evict(&mut self, taker: TenantId) -> Option<u32> {
        let tree = &self.tree;
        let owner = |id: BlockId| tree.blocks.get(id.0 as usize).map(|block| block.tenant);
        let chosen = self.policy.victim(taker, owner).map(|b| b.0);
        let evictable = |id: u32| {
            let block = self.tree.blocks.get(id as usize);
            block.is_some_and(|b| b.is_cached() && b.children.count == 0)
        };
        let allowed = |&b: &u32| evictable(b) && self.may_evict(taker, self.tree.block(b).tenant);
        let chosen = match chosen.filter(allowed) {
            None if self.has_quotas() => self.quota_victim(taker),
            chosen => chosen,
        };
        let block = chosen.or_else(|| (0..self.config.blocks).find(allowed))?;
        self.stats.evictions += 1;
        let tenant = self.tree.block(block).tenant;
        self.tenant(tenant).evictions += 1;
        self.forget(block);
        Some(block)
    }
}
