//! The life of a block on the device: free -> active -> cached -> active or free again. The same in every group; what group 0 has
//! beside it is the policy, and that its blocks are what other groups' depend on.
//!
//! Owns: every change of a block's state, and every counter that belongs to it. Must never: look at hashes or tables.
//!
//! Cost: every function here is O(groups); `evict` falls back to a scan only for a faulty policy.

use crate::account::Held;
use crate::cache::KvCache;
use crate::counts::{GroupCounts, MAX_GROUPS};
use crate::nodes::RUN;
use crate::policy::{BlockMeta, NONE};
use crate::pool::BlockSlot;
use crate::stats::TenantStats;
use crate::types::{BlockHash, BlockId, TenantId};

/// What is known of a tenant; of its `stats` only the counters.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Tenant {
    pub held: [Held; MAX_GROUPS],
    pub stats: TenantStats,
}

impl KvCache {
    /// Cache groups, at least 1.
    pub fn groups(&self) -> usize {
        self.groups.len()
    }

    /// Blocks of each group's pool.
    pub fn pools(&self) -> GroupCounts {
        self.each_group(|group| self.groups[group].pool.len())
    }

    pub(crate) fn each_group(&self, count: impl FnMut(usize) -> u32) -> GroupCounts {
        GroupCounts::each(self.groups.len(), count)
    }

    pub(crate) fn slot(&self, group: usize, block: BlockId) -> &BlockSlot {
        self.groups[group].pool.slot(block.0)
    }

    /// The block of group 0 in which a node resides.
    pub(crate) fn block_of(&self, node: u32) -> BlockId {
        BlockId(self.nodes.node(node).block)
    }

    /// The block of any group in which it does.
    pub(crate) fn place(&self, group: usize, node: u32) -> Option<BlockId> {
        let place = match group {
            0 => return Some(self.block_of(node)),
            _ => self.groups[group].places[node as usize],
        };
        (place != NONE).then_some(BlockId(place))
    }

    /// The block of group 0 that holds what has this hash.
    pub(crate) fn find_block(&self, hash: &BlockHash) -> Option<BlockId> {
        self.nodes.find(hash).map(|node| self.block_of(node))
    }

    /// The node of a published block of group 0.
    pub(crate) fn node_of(&self, block: BlockId) -> u32 {
        self.slot(0, block).node().expect("a published block holds a node")
    }

    /// Tokens of an indexed block of group 0.
    pub(crate) fn tokens_of(&self, block: BlockId) -> &[u32] {
        &self.tokens[self.place_of_tokens(block)]
    }

    pub(crate) fn place_of_tokens(&self, block: BlockId) -> std::ops::Range<usize> {
        let start = block.0 as usize * self.config.block_tokens as usize;
        start..start + usize::from(self.slot(0, block).filled)
    }

    /// What the policy may know of an indexed block of group 0.
    pub(crate) fn meta(&self, block: BlockId) -> BlockMeta {
        let node = self.node_of(block);
        let parent = self.nodes.parent_node(node).map(|parent| self.block_of(parent));
        let it = self.nodes.node(node);
        BlockMeta {
            tenant: it.tenant,
            parent,
            children: it.children,
            depth: it.depth.into(),
            hits: it.hits.into(),
            hash: (!it.is_tail()).then_some(it.hash),
        }
    }

    /// To change what a tenant holds: what it held until now is on its account first.
    pub(crate) fn held(&mut self, tenant: TenantId, group: usize) -> &mut Held {
        let held = &mut self.tenants.entry(tenant).or_default().held[group];
        held.settle(self.now_us);
        held
    }

    /// Blocks of `group` that `grow` can get: free ones and those that would be given up for it.
    pub(crate) fn available_in(&self, group: usize) -> u32 {
        self.groups[group].pool.free() + self.groups[group].stats.cached_blocks
    }

    /// A block to write in, referenced once: free ones first, then what is given up.
    pub(crate) fn take(&mut self, group: usize, tenant: TenantId) -> Option<BlockId> {
        let may = group > 0 || self.may_take_free(tenant);
        let block = match if may { self.groups[group].pool.pop() } else { None } {
            Some(block) => block,
            None => self.evict(group, tenant)?,
        };
        let pool = self.groups.get_mut(group)?;
        let slot = pool.pool.slot_mut(block);
        debug_assert!(slot.refs == 0 && slot.node().is_none(), "a block in use was taken");
        (slot.tenant, slot.refs, slot.filled, slot.open, slot.protected) = (tenant, 1, 0, true, false);
        pool.stats.allocations += 1;
        pool.stats.active_blocks += 1;
        self.held(tenant, group).active += 1;
        Some(BlockId(block))
    }

    /// Sets how many positions of an active, private block are written.
    pub(crate) fn set_filled(&mut self, group: usize, block: BlockId, filled: u32) {
        let group = &mut self.groups[group];
        let slot = group.pool.slot_mut(block.0);
        debug_assert!(slot.refs > 0 && slot.node().is_none());
        let before = std::mem::replace(&mut slot.filled, filled as u16);
        group.stats.active_written_slots += u64::from(filled);
        group.stats.active_written_slots -= u64::from(before);
    }

    pub(crate) fn reference(&mut self, group: usize, block: BlockId) {
        let it = &mut self.groups[group];
        let slot = it.pool.slot_mut(block.0);
        slot.refs += 1;
        if slot.refs > 1 {
            it.shared += 1;
            return;
        }
        let (tenant, filled) = (slot.tenant, u64::from(slot.filled));
        it.stats.active_written_slots += filled;
        match group {
            0 => self.policy.on_use(block, &self.meta(block)),
            _ => it.uncache(block.0),
        }
        self.use_cached(group, tenant, 1);
    }

    /// Reads what is kept of blocks of group 0 that are in use or cached, side by side: whoever goes through them then does not wait
    /// for memory once for each.
    pub(crate) fn bring_near(&self, run: &[BlockId]) {
        self.policy.prefetch(run);
        let children = |node| self.nodes.node(node).children;
        let touched = run.iter().map(|block| self.slot(0, *block).node().map_or(0, children));
        std::hint::black_box(touched.fold(0, |all, one| all ^ one));
    }

    /// References published blocks of group 0, a chain, that a lookup found. What is counted for a tenant is counted once for each
    /// run of blocks of the same.
    pub(crate) fn hit_all(&mut self, chain: &[BlockId]) {
        for run in chain.chunks(RUN) {
            self.bring_near(run);
            let (mut used, mut of) = (0, self.slot(0, run[0]).tenant);
            for &block in run {
                let group = &mut self.groups[0];
                let slot = group.pool.slot_mut(block.0);
                slot.refs += 1;
                let (is_first, tenant, filled) = (slot.refs == 1, slot.tenant, slot.filled);
                let mut meta = self.meta(block);
                if is_first {
                    self.groups[0].stats.active_written_slots += u64::from(filled);
                    self.policy.on_use(block, &meta);
                    if tenant != of {
                        self.use_cached(0, std::mem::replace(&mut of, tenant), std::mem::take(&mut used));
                    }
                    used += 1;
                } else {
                    self.groups[0].shared += 1;
                }
                meta.hits = self.count_hit(block).into();
                self.policy.on_hit(block, &meta);
            }
            self.use_cached(0, of, used);
        }
    }

    /// So many cached blocks of a group became active.
    fn use_cached(&mut self, group: usize, tenant: TenantId, blocks: u32) {
        let stats = &mut self.groups[group].stats;
        stats.cached_blocks -= blocks;
        stats.active_blocks += blocks;
        let held = self.held(tenant, group);
        held.cached -= blocks;
        held.active += blocks;
    }

    /// A private block becomes free with its last reference, another cached.
    pub(crate) fn unreference(&mut self, group: usize, block: BlockId) {
        let it = &mut self.groups[group];
        let slot = it.pool.slot_mut(block.0);
        slot.refs -= 1;
        if slot.refs > 0 {
            it.shared -= 1;
            return;
        }
        let (tenant, filled, node) = (slot.tenant, u64::from(slot.filled), slot.node());
        let closed = std::mem::take(&mut slot.open);
        it.stats.active_blocks -= 1;
        it.stats.active_written_slots -= filled;
        if closed && group == 0 {
            self.stats.closed_slots += u64::from(self.config.block_tokens);
            self.stats.closed_written_slots += filled;
        }
        let Some(node) = node else {
            it.pool.push(block.0);
            self.held(tenant, group).active -= 1;
            return;
        };
        it.stats.cached_blocks += 1;
        match group {
            0 => {
                self.stats.cached_tails += u32::from(self.nodes.node(node).is_tail());
                self.policy.on_free(block, &self.meta(block));
            }
            _ => it.cache(block.0),
        }
        let held = self.held(tenant, group);
        held.active -= 1;
        held.cached += 1;
    }

    /// A table ends with the block of group 1 or up, attached it, or computed again what was missed: cached, it goes after
    /// those that a window merely slid over.
    pub(crate) fn protect(&mut self, group: usize, block: BlockId) {
        let slot = self.groups[group].pool.slot_mut(block.0);
        debug_assert!(slot.refs > 0, "a cached block stays in its list");
        slot.protected = true;
    }

    /// A lookup found the block of group 0.
    pub(crate) fn hit(&mut self, block: BlockId) {
        self.count_hit(block);
        self.policy.on_hit(block, &self.meta(block));
    }

    /// Of its node, which is the newest of its siblings from now on. Returns how many there were.
    fn count_hit(&mut self, block: BlockId) -> u8 {
        let node = self.node_of(block);
        self.nodes.touch(node);
        let it = self.nodes.node_mut(node);
        it.hits = it.hits.saturating_add(1);
        it.hits
    }

    /// What other groups hold of the node was used, too.
    pub(crate) fn touch(&mut self, node: u32) {
        for group in 1..self.groups.len() {
            let Some(block) = self.place(group, node) else { continue };
            let group = &mut self.groups[group];
            if group.pool.slot(block.0).is_cached() {
                group.uncache(block.0);
                group.cache(block.0);
            }
        }
    }

    /// A private block of group 0 is that of a node from now on, which was just made for it.
    pub(crate) fn publish_block(&mut self, block: BlockId, node: u32, tokens: &[u32]) {
        self.version += 1;
        let start = block.0 as usize * self.config.block_tokens as usize;
        self.tokens[start..start + tokens.len()].copy_from_slice(tokens);
        self.groups[0].pool.set_node(block.0, Some(node));
        self.policy.on_insert(block, &self.meta(block));
        self.record(node, true);
    }

    /// A private block of group 1 or up becomes the place of a node, which has none there.
    pub(crate) fn publish_in(&mut self, group: usize, block: BlockId, node: u32) {
        self.version += 1;
        let group = &mut self.groups[group];
        debug_assert_eq!(group.places[node as usize], NONE);
        group.places[node as usize] = block.0;
        group.pool.set_node(block.0, Some(node));
    }

    /// A cached block of group 1 or up loses its content. It is in no state until the caller puts it somewhere.
    fn drop_block_of(&mut self, group: usize, block: u32) {
        self.version += 1;
        let it = &mut self.groups[group];
        let slot = *it.pool.slot(block);
        debug_assert!(slot.is_cached());
        it.uncache(block);
        it.pool.set_node(block, None);
        slot.node().into_iter().for_each(|node| it.places[node as usize] = NONE);
        it.stats.cached_blocks -= 1;
        self.held(slot.tenant, group).cached -= 1;
    }

    /// What a group from 1 on holds of the node is free.
    pub(crate) fn free_place(&mut self, group: usize, node: u32) {
        if let Some(block) = self.place(group, node) {
            self.drop_block_of(group, block.0);
            self.groups[group].pool.push(block.0);
        }
    }

    /// Gives up what tables of a group from 1 on merely passed: the cached blocks that would go first.
    pub fn drop_passed(&mut self, group: usize) {
        while let Some(block) = self.groups[group].passed() {
            self.drop_block_of(group, block);
            self.groups[group].pool.push(block);
        }
    }

    /// A cached block of group 0 that nothing continues loses its content, and with it what other groups have
    /// of it. The block is in no state until the caller puts it somewhere.
    pub(crate) fn drop_content(&mut self, block: BlockId) {
        let (node, meta) = (self.node_of(block), self.meta(block));
        debug_assert!(self.slot(0, block).is_cached() && meta.children == 0);
        self.version += 1;
        (1..self.groups.len()).for_each(|group| self.free_place(group, node));
        self.record(node, false);
        self.groups[0].pool.set_node(block.0, None);
        self.groups[0].stats.cached_blocks -= 1;
        self.stats.cached_tails -= u32::from(meta.hash.is_none());
        self.held(meta.tenant, 0).cached -= 1;
        self.policy.on_remove(block, &meta);
        if let Some(parent) = self.nodes.remove(node) {
            let parent = self.block_of(parent);
            self.policy.on_leaf(parent, &self.meta(parent));
        }
    }

    /// Whether a block of group 0 is cached, and nothing continues it.
    pub(crate) fn is_cached_leaf(&self, block: u32) -> bool {
        let pool = &self.groups[0].pool;
        let slot = pool.get(block).filter(|slot| !pool.is_free(block) && slot.is_cached());
        slot.and_then(BlockSlot::node).is_some_and(|node| self.nodes.node(node).children == 0)
    }

    fn evict(&mut self, group: usize, taker: TenantId) -> Option<u32> {
        if group > 0 {
            let oldest = self.groups[group].oldest()?;
            self.groups[group].stats.evictions += 1;
            self.drop_block_of(group, oldest);
            return Some(oldest);
        }
        let pool = &self.groups[0].pool;
        let owner = |block: BlockId| pool.get(block.0).map(|slot| slot.tenant);
        let victim = self.policy.victim(owner).map(|block| block.0);
        let allowed = |block: &u32| {
            self.is_cached_leaf(*block) && self.may_evict(taker, self.slot(0, BlockId(*block)).tenant)
        };
        let victim = match victim.filter(allowed) {
            None if self.has_quotas() => self.quota_victim(taker),
            victim => victim,
        };
        let block = BlockId(victim.or_else(|| (0..self.config.blocks).find(allowed))?);
        self.groups[0].stats.evictions += 1;
        let tenant = self.slot(0, block).tenant;
        self.tenants.entry(tenant).or_default().stats.evictions += 1;
        self.drop_content(block);
        Some(block.0)
    }
}
