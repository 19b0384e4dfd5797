//! [`KvCache`]: the operations a scheduler needs, each all-or-nothing.
//!
//! Owns: what the public operations mean. Must never: touch KV bytes, read a clock, or block.
//!
//! # Copies, and why their source may be evicted at once
//!
//! A sub-block tail is reused by copy: `attach` takes a fresh block and asks for the first positions of a cached block to
//! be copied into it. The source stays unreferenced. An allocation later in the same step may therefore evict it, hand it
//! to another sequence, and that sequence will write to it in this very step. This is safe under one rule, which the
//! executor owes:
//!
//! > All copies of a step run first, in the order they were handed out, before anything of that step is written (and
//! > fresh blocks are not cleared in between).
//!
//! 1. *Source evicted and written in the same step*: the write comes after the copy.
//! 2. *Source evicted and made the target of a later copy*: list order; the first copy has already read it.
//! 3. *The only block left is the source itself*: `take` returns it, its positions are already in place, and no copy is
//!    asked for.
//! 4. *The table is given up before the step runs*: its copy may be dropped or run, as the caller likes. Positions whose
//!    copy may not have run are not `confirmed`, and `release` indexes confirmed positions only. If the target went to
//!    somebody else in the meantime, that owner's copy or write comes later and wins.
//! 5. *A copy per group*: a tail is attached or a shared block replaced in every cache group at once, each with a copy of
//!    its own; 1 to 4 hold in each pool by itself.
//! 6. *A forked table's tail*: the first to write gets a copy, the last writes in place; its write comes after the copy.
//!
//! So every copy must be executed in the step in which it was handed out, unless every table that depends on it is
//! released in that step.

use rustc_hash::FxHashMap;

use crate::account::TENANTS_LEAST;
use crate::companions::Copies;
use crate::counts::GroupCounts;
use crate::policy::{EvictionPolicy, Retaining};
use crate::prefixes::{PinLimits, Prefixes};
use crate::quota::Quotas;
use crate::stats::{CacheStats, MAX_WINDOWS, TenantStats, WindowStats};
use crate::swap::SwapSpace;
use crate::table::{BlockTable, Lists, Query};
use crate::tree::{Parent, Tree};
use crate::types::{BlockCopy, BlockHash, BlockId, CacheConfig, OutOfBlocks, Root, TenantId, WindowConfig};
use crate::window::WindowPool;

/// Emptied tables' vectors kept for the next ones, so that a steady state allocates nothing.
const SPARE_TABLES: usize = 1024;

/// Block pools, prefix index and accounting. See the module documentation for what it asks of the executor, and
/// `companions` for what a window group is.
pub struct KvCache {
    pub(crate) config: CacheConfig,
    pub(crate) policy: Retaining,
    pub(crate) prefixes: Prefixes,
    pub(crate) tree: Tree,
    /// Cache groups 1 and up.
    pub(crate) windows: Vec<WindowPool>,
    /// Blocks of group 0 without content; the last is taken first.
    pub(crate) free: Vec<u32>,
    pub(crate) stats: CacheStats,
    pub(crate) tenants: FxHashMap<TenantId, TenantStats>,
    /// Counters of tenants that were forgotten, summed.
    pub(crate) retired: TenantStats,
    /// Tenants from which on some are forgotten.
    pub(crate) retire_at: usize,
    pub(crate) quotas: Quotas,
    /// As last told.
    pub(crate) now_us: u64,
    pub(crate) swap: SwapSpace,
    spare: Vec<Lists>,
}

/// What a lookup found.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Lookup {
    /// Leading full blocks that are cached.
    pub full_blocks: u32,
    /// Positions of the following block that can be copied.
    pub tail_tokens: u32,
    /// Of the blocks that would be attached, those no table and no pin holds: attaching them lowers
    /// [`KvCache::available`] by as much.
    pub idle_blocks: GroupCounts,
    /// Of the full blocks, those that an operator shares: none where the root's shared part was of no use.
    pub shared_blocks: u32,
}

impl KvCache {
    /// Full attention only. `config.block_tokens` must be positive.
    pub fn new(config: CacheConfig, policy: Box<dyn EvictionPolicy>) -> Self {
        Self::with_windows(config, &[], policy)
    }

    /// One more group for each of `windows`, at most [`crate::MAX_WINDOWS`].
    pub fn with_windows(
        config: CacheConfig,
        windows: &[WindowConfig],
        policy: Box<dyn EvictionPolicy>,
    ) -> Self {
        assert!(windows.len() <= MAX_WINDOWS, "a model has at most {MAX_WINDOWS} window groups");
        assert!(config.block_tokens > 0, "a block holds at least one token");
        assert!(config.blocks < crate::policy::NONE - 1, "block ids are 32 bit with two values reserved");
        Self {
            config,
            policy: Retaining::new(policy, config.blocks),
            prefixes: Prefixes::new(PinLimits { pool: config.blocks / 4, tenant: config.blocks / 4 }),
            tree: Tree::new(config.blocks, config.block_tokens),
            windows: windows.iter().map(|window| WindowPool::new(*window, config.blocks)).collect(),
            free: (0..config.blocks).rev().collect(),
            stats: CacheStats::new(&config),
            tenants: FxHashMap::default(),
            retired: TenantStats::default(),
            retire_at: TENANTS_LEAST,
            quotas: Quotas::default(),
            now_us: 0,
            swap: SwapSpace::default(),
            spare: Vec::new(),
        }
    }

    pub fn config(&self) -> &CacheConfig {
        &self.config
    }

    /// Blocks that `grow` can get: free ones and those that would be given up for it. Pinned blocks are not among them.
    pub fn available(&self) -> GroupCounts {
        let evictable = self.policy.evictable().min(self.stats.cached_blocks);
        GroupCounts::each(self.groups(), |group| match group.checked_sub(1) {
            None => self.free.len() as u32 + evictable,
            Some(window) => self.windows[window].available(),
        })
    }

    /// The same for a table of `tenant`: within its quota.
    pub fn available_to(&self, tenant: TenantId) -> GroupCounts {
        let mut available = self.available();
        if self.has_quotas() {
            let (pool, ceiling) = self.room(tenant);
            available[0] = pool.min(ceiling);
        }
        available
    }

    /// A table without blocks, for a sequence that must not use the prefix cache.
    pub fn empty_table(&mut self, root: &Root) -> BlockTable {
        self.table_of(root.own())
    }

    pub(crate) fn table_of(&mut self, root: Root) -> BlockTable {
        let lists = self.spare.pop().unwrap_or_default();
        BlockTable::new(root, self.config.block_tokens, self.window_tokens(), lists)
    }

    /// What `attach` would find for all of `tokens`. Changes nothing, not even recency.
    pub fn lookup(&self, root: &Root, tokens: &[u32]) -> Lookup {
        let root = &self.resolve(root, tokens);
        let prefix = self.find_prefix(root, tokens, |_| ());
        let rest = &tokens[(prefix.blocks * self.config.block_tokens) as usize..];
        Lookup {
            full_blocks: prefix.blocks,
            tail_tokens: self.tail_source(prefix.parent, rest).map_or(0, |(_, length)| length),
            idle_blocks: self.idle_blocks(&prefix),
            shared_blocks: root.shared_blocks(),
        }
    }

    /// Cached tokens (full blocks and sub-block tail) that `attach` with `max_tokens = tokens.len()` would find, given
    /// one available block for the tail.
    pub fn probe(&self, root: &Root, tokens: &[u32]) -> u32 {
        let found = self.lookup(root, tokens);
        found.full_blocks * self.config.block_tokens + found.tail_tokens
    }

    /// Finds the longest cached beginning of `tokens[..max_tokens]` and references it. Callers pass the prompt's length
    /// less one: one row must be left to compute.
    ///
    /// Full blocks are shared; of a window group only those in the last window are needed, and referenced. Part of a
    /// following block is reused by copy: one fresh block is taken in each group and a [`BlockCopy`] for each returned (none
    /// where the fresh block is the very block to copy from). Never fails: with no block available for the tail in some
    /// group, only the full blocks are attached. `table.computed()` says what was attached, exactly.
    ///
    /// Counts one query of `tokens.len()` tokens; see [`KvCache::abandon`].
    pub fn attach(&mut self, root: &Root, tokens: &[u32], max_tokens: u32) -> (BlockTable, Copies) {
        let wanted = &tokens[..tokens.len().min(max_tokens as usize)];
        let root = &self.resolve(root, wanted);
        let mut table = self.table_of(*root);
        let prefix = self.find_prefix(root, wanted, |block| table.blocks.push(BlockId(block)));
        table.blocks.truncate(prefix.blocks as usize);
        for &block in &table.blocks {
            self.reference(block);
            self.hit(block);
        }
        let full = table.capacity();
        table.computed = full;
        table.confirmed = full;
        table.published = prefix.blocks;
        self.attach_windows(&mut table);
        table.missed = if prefix.chain > prefix.blocks { prefix.chain } else { 0 };
        let copies = self.attach_tail(&mut table, prefix.parent, &wanted[full as usize..]);
        table.query = Query {
            queries: 1,
            tokens: tokens.len() as u64,
            hit: u64::from(table.computed),
            tail_hit: u64::from(table.computed - full),
            copies: copies.len() as u64,
            window_miss: u64::from((prefix.chain * self.config.block_tokens).saturating_sub(table.computed)),
        };
        self.count(root.tenant, &table.query);
        (table, copies)
    }

    fn attach_tail(&mut self, table: &mut BlockTable, parent: Parent, rest: &[u32]) -> Copies {
        let mut copies = Copies::default();
        let Some((source, tokens)) = self.tail_source(parent, rest) else { return copies };
        let one_each = GroupCounts::each(self.groups(), |_| 1);
        if !one_each.fits(self.available_to(table.root.tenant)) {
            return copies;
        }
        let source = BlockId(source);
        // Taking the target may evict the source; where the companions are must be known before.
        let companions = self.companions(source);
        self.hit(source);
        self.windows.iter_mut().for_each(|window| window.touch(source.0));
        let Some(target) = self.take(table.root.tenant) else { return copies };
        self.set_filled(target, tokens);
        table.blocks.push(target);
        copies.push(BlockCopy { group: 0, from: source, to: target, tokens });
        self.attach_window_tail(table, &companions, tokens, &mut copies);
        let from = table.computed;
        table.computed += tokens;
        if copies.is_empty() {
            table.confirmed = table.computed;
        }
        self.slide(table, from);
        copies
    }

    /// Blocks that `grow` to `tokens` positions would take.
    pub fn needed(&self, table: &BlockTable, tokens: u32) -> GroupCounts {
        let blocks = tokens.div_ceil(self.config.block_tokens).saturating_sub(table.blocks.len() as u32)
            + u32::from(self.shared_tail(table, tokens).is_some());
        GroupCounts::each(self.groups(), |_| blocks)
    }

    /// The partly written block, if it is shared and would be written. It is shared by the same tables in every group.
    pub(crate) fn shared_tail(&self, table: &BlockTable, tokens: u32) -> Option<usize> {
        let tail = table.partial_block().filter(|_| tokens > table.computed)?;
        (self.tree.block(table.blocks[tail].0).refs > 1).then_some(tail)
    }

    /// Gives the table room for `tokens` positions, and makes every block in which positions `>= table.computed()` will
    /// be written its own: a shared, partly written block is replaced by a copy in every group, pushed to `copies`. All or
    /// nothing.
    pub fn grow(
        &mut self,
        table: &mut BlockTable,
        tokens: u32,
        copies: &mut Vec<BlockCopy>,
    ) -> Result<(), OutOfBlocks> {
        let needed = self.needed(table, tokens);
        let available = self.available_to(table.root.tenant);
        if !needed.fits(available) {
            return Err(OutOfBlocks { needed, available });
        }
        let refused = OutOfBlocks { needed, available };
        if let Some(tail) = self.shared_tail(table, tokens) {
            let from = table.blocks[tail];
            let to = self.take(table.root.tenant).ok_or(refused)?;
            let copied = table.computed % self.config.block_tokens;
            self.set_filled(to, copied);
            self.unreference(from);
            table.blocks[tail] = to;
            table.confirmed = table.confirmed.min(table.computed - copied);
            copies.push(BlockCopy { group: 0, from, to, tokens: copied });
            self.stats.copies += 1;
            self.replace_window_tail(table, tail, copied, copies);
        }
        while table.capacity() < tokens {
            let block = self.take(table.root.tenant).ok_or(refused)?;
            table.blocks.push(block);
        }
        self.grow_windows(table);
        Ok(())
    }

    /// Says that positions `< computed` are written, publishes every block that became full, and gives back what is now
    /// behind a window. If equal content is already indexed, the table switches to that block and drops its own. `tokens`
    /// are all known tokens of the sequence, at least `computed` of them.
    pub fn commit(&mut self, table: &mut BlockTable, tokens: &[u32], computed: u32) {
        debug_assert!(computed >= table.computed, "a sequence never un-computes");
        debug_assert!(computed <= table.capacity() && computed as usize <= tokens.len());
        let computed = computed.min(table.capacity()).min(tokens.len() as u32).max(table.computed);
        let size = self.config.block_tokens;
        table.confirmed = computed;
        table.query = Query::default();
        if computed == table.computed {
            return;
        }
        for index in table.full_blocks()..computed.div_ceil(size) {
            let block = table.blocks[index as usize];
            debug_assert_eq!(self.tree.block(block.0).refs, 1, "written without grow");
            self.set_filled(block, size.min(computed - index * size));
            self.fill_windows(table, index as usize, size.min(computed - index * size));
        }
        if std::mem::take(&mut table.restored) {
            self.publish_restored_windows(table);
        }
        for index in table.published..computed / size {
            let start = (index * size) as usize;
            self.publish(table, index as usize, &tokens[start..start + size as usize]);
        }
        table.published = computed / size;
        let before = std::mem::replace(&mut table.computed, computed);
        self.slide(table, before);
    }

    fn publish(&mut self, table: &mut BlockTable, index: usize, tokens: &[u32]) {
        let (parent, parent_hash) = self.parent(table, index);
        debug_assert!(index as u32 >= table.root.shared_blocks(), "what is shared is its owner's to write");
        let hash = table.root.chain_at(index as u32, &parent_hash, tokens);
        let own = table.blocks[index];
        if let Some(twin) = self.tree.find(&hash) {
            self.reference(BlockId(twin));
            self.unreference(own);
            table.blocks[index] = BlockId(twin);
            self.stats.dedups += 1;
            if self.publish_windows(table, index) {
                // It lacked what made it worth less than its own tails.
                self.supersede_if_complete(BlockId(twin));
            }
            return;
        }
        self.tree.insert(own.0, parent, tokens, Some(hash));
        self.stats.published_blocks += 1;
        self.policy.on_insert(own, &self.tree.meta(own.0));
        self.publish_windows(table, index);
        self.supersede_if_complete(own);
    }

    fn parent(&self, table: &BlockTable, index: usize) -> (Parent, BlockHash) {
        match table.root.base(index as u32) {
            Some(base) => (Parent::Root(base), base),
            None => {
                let parent = table.blocks[index - 1].0;
                (Parent::Block(parent), self.tree.block(parent).hash)
            }
        }
    }

    /// Frees cached tails that say nothing `block`, which has all companions, does not say.
    pub(crate) fn supersede(&mut self, block: BlockId) {
        while let Some(tail) = self.tree.superseded_by(block.0) {
            self.forget(tail);
            self.free.push(tail);
            self.stats.superseded_tails += 1;
        }
    }

    /// A second table with the same content. It shares every written block, the partly written one included (the first
    /// of the two to grow gets a copy of that); blocks beyond `computed` stay with the original. Fork first, then grow: a
    /// table that was grown before it was forked must be grown again before its step.
    pub fn fork(&mut self, table: &BlockTable) -> BlockTable {
        let mut fork = self.table_of(table.root);
        let written = table.computed.div_ceil(self.config.block_tokens) as usize;
        fork.blocks.extend_from_slice(&table.blocks[..written]);
        fork.computed = table.computed;
        fork.confirmed = table.confirmed;
        fork.published = table.published;
        for &block in &fork.blocks {
            self.reference(block);
        }
        self.fork_windows(table, &mut fork);
        fork
    }

    /// Blocks of group 0 that only this table holds, and no pin. O(log blocks): whoever holds or pins a block holds
    /// or pins all before it, so they are the last ones. (What an operator shares is nobody's own: a pin ends before it.)
    pub fn exclusive_full(&self, table: &BlockTable) -> u32 {
        let exclusive = |block: &BlockId| self.tree.block(block.0).refs == 1;
        let own = &table.blocks[table.root.shared_blocks() as usize..];
        let shared = own.partition_point(|block| !exclusive(block));
        debug_assert!(own.iter().enumerate().all(|(at, block)| exclusive(block) == (at >= shared)));
        (own.len() - shared) as u32
    }

    /// Blocks that only this table holds, and no pin: what releasing it would make available. In window groups
    /// O(blocks held).
    pub fn exclusive_blocks(&self, table: &BlockTable) -> GroupCounts {
        GroupCounts::each(self.groups(), |group| match group.checked_sub(1) {
            None => self.exclusive_full(table),
            Some(window) => self.exclusive_in_window(table, window),
        })
    }

    /// Drops the table's references, tail first. Content stays until its block is taken for something else; a partly
    /// written last block stays too, to be copied from. `tokens`: at least the `computed` first tokens.
    pub fn release(&mut self, mut table: BlockTable, tokens: &[u32]) {
        if let Some(tail) = table.partial_block() {
            while table.blocks.len() > tail + 1 {
                self.drop_last(&mut table);
            }
            self.keep_tail(&mut table, tail, tokens);
        }
        self.keep_windows(&table);
        while !table.blocks.is_empty() {
            self.drop_last(&mut table);
        }
        if self.spare.len() < SPARE_TABLES {
            self.spare.push(Lists { blocks: table.blocks, windows: table.windows });
        }
    }

    fn drop_last(&mut self, table: &mut BlockTable) {
        if let Some(block) = table.blocks.pop() {
            // The companion first: it must never be held without its owner.
            self.drop_last_of_windows(table);
            self.unreference(block);
        }
    }

    /// Indexes a partly written block that is about to lose its last reference, unless a sibling holds as much.
    fn keep_tail(&mut self, table: &mut BlockTable, index: usize, tokens: &[u32]) {
        let start = index * self.config.block_tokens as usize;
        let end = table.computed as usize;
        let block = table.blocks[index];
        debug_assert!(tokens.len() >= end, "release needs the computed tokens");
        if self.tree.block(block.0).refs > 1 || table.confirmed < table.computed || tokens.len() < end {
            return;
        }
        let tokens = &tokens[start..end];
        let (parent, _) = self.parent(table, index);
        match self.tail_source(parent, tokens) {
            Some((sibling, length)) if length as usize == tokens.len() => {
                self.stats.dedups += 1;
                self.tree.touch(sibling);
                self.refresh(sibling);
                self.windows.iter_mut().for_each(|window| window.touch(sibling));
            }
            _ => {
                self.set_filled(block, tokens.len() as u32);
                self.tree.insert(block.0, parent, tokens, None);
                self.policy.on_insert(block, &self.tree.meta(block.0));
                self.inherit(block, parent);
                self.publish_windows(table, index);
                self.supersede(block);
            }
        }
    }

    /// A tail is kept as what it continues: it would only be in the way of its parent's eviction, or outlived by it.
    fn inherit(&mut self, tail: BlockId, parent: Parent) {
        let Parent::Block(parent) = parent else { return };
        if let Some(retention) = self.policy.retention(parent) {
            self.policy.retain(tail.0, Some(retention), &self.tree.meta(tail.0));
        }
    }

    /// Tells the policy that a cached block was just used. Its ancestors are in use now, so they stay younger.
    fn refresh(&mut self, block: u32) {
        if self.tree.block(block).refs == 0 {
            let meta = self.tree.meta(block);
            self.policy.on_use(BlockId(block), &meta);
            self.policy.on_free(BlockId(block), &meta);
        }
    }

    /// `release` for a table that was attached and then not run (no room, cancelled): takes its query and the blocks
    /// it never used out of the statistics again, so that they reconcile with the requests that were served.
    pub fn abandon(&mut self, table: BlockTable, tokens: &[u32]) {
        let Query { queries, tokens: asked, hit, tail_hit, copies, window_miss } = table.query;
        self.stats.queries -= queries;
        self.stats.query_tokens -= asked;
        self.stats.hit_tokens -= hit;
        self.stats.tail_hit_tokens -= tail_hit;
        self.stats.copies -= copies;
        self.stats.window_miss_tokens -= window_miss;
        let counts = self.tenant(table.root.tenant);
        counts.queries -= queries;
        counts.query_tokens -= asked;
        counts.hit_tokens -= hit;
        counts.tail_hit_tokens -= tail_hit;
        counts.window_miss_tokens -= window_miss;
        if queries > 0 || table.restored {
            for block in &table.blocks[(table.confirmed / self.config.block_tokens) as usize..] {
                self.tree.block_mut(block.0).open = false;
            }
        }
        self.release(table, tokens);
    }

    fn count(&mut self, tenant: TenantId, query: &Query) {
        self.stats.queries += query.queries;
        self.stats.query_tokens += query.tokens;
        self.stats.hit_tokens += query.hit;
        self.stats.tail_hit_tokens += query.tail_hit;
        self.stats.copies += query.copies;
        self.stats.window_miss_tokens += query.window_miss;
        let counts = self.tenant(tenant);
        counts.queries += query.queries;
        counts.query_tokens += query.tokens;
        counts.hit_tokens += query.hit;
        counts.tail_hit_tokens += query.tail_hit;
        counts.window_miss_tokens += query.window_miss;
    }

    /// Hashes of the full blocks of `tokens`, for whoever wants to recognise a shared prefix before it is cached.
    pub fn block_hashes(&self, root: &Root, tokens: &[u32]) -> Vec<BlockHash> {
        root.hashes(tokens, self.config.block_tokens).collect()
    }

    /// Drops all unreferenced content that is not pinned, of one tenant or of all. O(blocks).
    pub fn clear(&mut self, tenant: Option<TenantId>) {
        for block in 0..self.config.blocks {
            let mut next = Some(block);
            while let Some(block) = next.filter(|&b| self.clearable(b, tenant)) {
                next = match self.tree.block(block).parent {
                    Parent::Block(parent) => Some(parent),
                    Parent::Root(_) => None,
                };
                self.forget(block);
                self.free.push(block);
            }
        }
        // Companions of blocks that are in use, which lie behind every window.
        self.windows.iter_mut().for_each(|window| window.clear(tenant));
    }

    fn clearable(&self, block: u32, tenant: Option<TenantId>) -> bool {
        let b = self.tree.block(block);
        let loose = b.is_cached() && b.children.count == 0;
        loose && tenant.is_none_or(|tenant| tenant == b.tenant)
    }

    pub fn stats(&self) -> CacheStats {
        let mut stats = CacheStats { free_blocks: self.free.len() as u32, ..self.stats };
        for (stats, window) in stats.windows.iter_mut().zip(&self.windows) {
            *stats = WindowStats { free_blocks: window.free.len() as u32, ..window.stats };
        }
        stats
    }

    /// Zeros for a tenant never seen.
    pub fn tenant_stats(&self, tenant: TenantId) -> TenantStats {
        let mut stats = self.tenants.get(&tenant).copied().unwrap_or_default();
        for (window, pool) in self.windows.iter().enumerate() {
            let held = pool.tenants.get(&tenant).copied().unwrap_or_default();
            (stats.active_windows[window], stats.cached_windows[window]) = (held.active, held.cached);
        }
        stats
    }

    /// Every tenant that holds something or was not forgotten yet, in no particular order.
    pub fn tenants(&self) -> impl Iterator<Item = (TenantId, TenantStats)> + '_ {
        self.tenants.keys().map(|tenant| (*tenant, self.tenant_stats(*tenant)))
    }
}
