//! From a request to a table and back: what of it is cached, and what stays when it ends.
//!
//! Owns: the walk over a chain, what a hit needs in each group, and what a table that is given up leaves behind.
//!
//! # What a query reads, exactly
//!
//! With `computed` positions the next query is at `computed` and reads, in a window group, `computed - W + 1 ..= computed`. A
//! table holds the blocks from that of the first such position on, and holes before. `commit` gives the rest back in the very
//! step in which it is read no more; it stays to be hit until its pool needs it.
//!
//! # A hit
//!
//! `n` blocks of group 0 can be attached if every group that is needed has all blocks that the next query reads: whole ones
//! under the nodes they end with, and where `n` lies within a larger block, the beginning of that under the `n`-th node, which is
//! copied. One pass over the chain finds the longest such `n`: per group the length of the unbroken run is enough.

use crate::cache::KvCache;
use crate::counts::{GroupCounts, MAX_GROUPS};
use crate::hash::BlockHashes;
use crate::nodes::{Parent, RUN};
use crate::policy::NONE;
use crate::table::{BlockTable, Lists, Query};
use crate::types::{BlockCopy, BlockHash, BlockId, HOLE, Layout, TenantId};

/// Children looked at when searching for a shared beginning, newest first.
const CHILDREN_SCANNED: usize = 16;

/// Emptied tables' vectors kept for the next ones, so that a steady state allocates nothing.
const SPARE_TABLES: usize = 1024;

/// What a lookup found.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Lookup {
    /// Leading full blocks that are cached.
    pub full_blocks: u32,
    /// Positions of the following block that can be copied, or of several that can be loaded.
    pub tail_tokens: u32,
    /// Of the blocks that would be attached, those no table and no pin holds: attaching them lowers
    /// [`KvCache::available`] by as much.
    pub idle_blocks: GroupCounts,
    /// Of the full blocks, those that an operator declared: none where the root's shared part was of no use.
    pub declared_blocks: u32,
}

/// The longest beginning of a chain that can be attached.
#[derive(Clone, Copy)]
pub(crate) struct Prefix {
    pub blocks: u32,
    /// Its last node.
    pub last: Option<u32>,
    /// The last node of those that an operator declared.
    last_declared: Option<u32>,
    /// Blocks of group 0 in it that nobody holds.
    idle: u32,
    /// Blocks that group 0 has, at least `blocks`.
    pub chain: u32,
    /// Whether it begins with what an operator declared.
    pub declared: bool,
}

impl KvCache {
    /// Finds the longest usable beginning of at most `blocks` blocks; `each` is told every block of group 0 on the way, in
    /// order, those beyond the result included.
    fn find_prefix(
        &self,
        hashes: &BlockHashes,
        declared: bool,
        blocks: u32,
        mut each: impl FnMut(BlockId),
    ) -> Prefix {
        let mut best = Prefix { blocks: 0, last: None, last_declared: None, idle: 0, chain: 0, declared };
        let shared = hashes.root().declared_blocks();
        let (mut runs, mut idle) = ([0; MAX_GROUPS], 0);
        let mut hashes = hashes.iter(declared).take(blocks as usize);
        let (mut run, mut found) = ([0; RUN], RUN);
        while found == RUN {
            found = self.nodes.find_run(&mut hashes, &mut run);
            for &node in &run[..found] {
                let Some(block) = self.place(0, node) else { return best };
                each(block);
                best.chain += 1;
                if declared && best.chain == shared {
                    best.last_declared = Some(node);
                }
                idle += u32::from(self.slot(0, block).refs == 0);
                if self.covered(&mut runs, node, best.chain) {
                    best = Prefix { blocks: best.chain, last: Some(node), idle, ..best };
                }
            }
        }
        best
    }

    /// The longest beginning: with what is shared where that is there as a whole, since nobody but its owner computes it,
    /// unless the tenant has more of its own.
    fn longest_prefix(&self, hashes: &BlockHashes, blocks: u32) -> Prefix {
        let shared = hashes.root().declared_blocks();
        if shared == 0 {
            return self.find_prefix(hashes, false, blocks, |_| ());
        }
        let (with, own) =
            (self.find_prefix(hashes, true, blocks, |_| ()), self.find_prefix(hashes, false, blocks, |_| ()));
        if with.blocks < shared || own.blocks > with.blocks { own } else { with }
    }

    /// Whether every group has what the next query of a sequence reads that attaches `blocks` blocks, the last of which is
    /// `node`. `runs`: per group, whole blocks without a gap up to the block before; brought up to date.
    fn covered(&self, runs: &mut [u32; MAX_GROUPS], node: u32, blocks: u32) -> bool {
        let computed = blocks * self.config.block_tokens;
        let mut covered = true;
        for (group, run) in self.groups.iter().zip(runs).skip(1) {
            let there = group.places[node as usize] != NONE;
            let (whole, part) = (computed / group.config.block_tokens, computed % group.config.block_tokens);
            if part == 0 {
                *run = if there { *run + 1 } else { 0 };
            }
            let reads = whole.saturating_sub(group.config.first_block(computed));
            covered &= group.config.optional || (reads <= *run && (part == 0 || there));
        }
        covered
    }

    /// Blocks that attaching `prefix` would take out of what is available.
    fn idle_blocks(&self, prefix: &Prefix) -> GroupCounts {
        let (size, computed) = (self.config.block_tokens, prefix.blocks * self.config.block_tokens);
        let mut idle = GroupCounts::full(prefix.idle);
        for (group, of) in self.groups.iter().enumerate().skip(1) {
            if of.config.optional {
                continue;
            }
            let (mut next, ratio) = (prefix.last, of.config.block_tokens / size);
            for index in (of.config.first_block(computed) * ratio..prefix.blocks).rev() {
                let Some(node) = next else { break };
                if (index + 1) % ratio == 0 {
                    let cached =
                        self.place(group, node).is_some_and(|block| self.slot(group, block).refs == 0);
                    idle[group] += u32::from(cached);
                }
                // Where the tenant's own part begins, what is shared is before it, if anything.
                let before = || prefix.last_declared.filter(|last| *last != node);
                next = self.nodes.parent_node(node).or_else(before);
            }
        }
        idle
    }

    /// What the block after the prefix continues.
    fn continued(&self, hashes: &BlockHashes, prefix: &Prefix) -> Parent {
        let root = if prefix.declared { *hashes.root() } else { hashes.root().own() };
        match (root.base(prefix.blocks), prefix.last) {
            (None, Some(last)) => Parent::Node(last),
            (base, _) => Parent::Root(base.unwrap_or(root.hash)),
        }
    }

    /// The node to copy the longest beginning of `rest` from, which is positive, and its length: among the newest children of
    /// `parent` that every group has (ties: the newest).
    fn tail_source(&self, parent: Parent, rest: &[u32], start: u32) -> Option<(u32, u32)> {
        let (mut best, mut length) = (None, 0);
        if rest.is_empty() {
            return None;
        }
        for child in self.nodes.children(parent).take(CHILDREN_SCANNED) {
            let Some(block) = self.place(0, child) else { continue };
            let tokens = self.tokens_of(block);
            let shared = tokens.iter().zip(rest).take_while(|(a, b)| a == b).count();
            if shared > length && self.divides(child, start + shared as u32, start + tokens.len() as u32) {
                (best, length) = (Some(child), shared);
            }
        }
        best.map(|child| (child, length as u32))
    }

    /// Whether every group has the block in which the node ends, at position `end`, and it can be copied up to position `to`.
    fn divides(&self, node: u32, to: u32, end: u32) -> bool {
        self.others().all(|group| {
            let (config, from) = (self.groups[group].config, to.saturating_sub(1));
            let start = from - from % config.block_tokens;
            config.optional
                || self.place(group, node).is_some_and(|_| config.is_divisible(to - start, end - start))
        })
    }

    /// What `attach` would find for all of `tokens`. Changes nothing, not even recency.
    pub fn lookup(&self, hashes: &BlockHashes, tokens: &[u32]) -> Lookup {
        let size = self.config.block_tokens;
        let prefix = self.longest_prefix(hashes, tokens.len() as u32 / size);
        let (parent, start) = (self.continued(hashes, &prefix), prefix.blocks * size);
        let tail = self.tail_source(parent, &tokens[start as usize..], start);
        Lookup {
            full_blocks: prefix.blocks,
            tail_tokens: tail.map_or(0, |(_, length)| length),
            idle_blocks: self.idle_blocks(&prefix),
            declared_blocks: if prefix.declared { hashes.root().declared_blocks() } else { 0 },
        }
    }

    /// Finds the longest cached beginning of `tokens[..max_tokens]` and references it. Callers pass the prompt's length
    /// less one: one row must be left to compute. `hashes`: of all full blocks of `tokens`.
    ///
    /// Full blocks are shared; of each group only those that the next query reads are needed, and referenced. Part of a
    /// following block is reused by copy: one fresh block is taken in each group and a copy for each pushed to `copies` (none
    /// where the fresh block is the very block to copy from). Never fails: with no block available for the tail in some
    /// group, only the full blocks are attached. `table.computed()` says what was attached, exactly.
    ///
    /// Counts one query of `tokens.len()` tokens; see [`KvCache::abandon`].
    pub fn attach(
        &mut self,
        hashes: BlockHashes,
        tokens: &[u32],
        max_tokens: u32,
        copies: &mut Vec<BlockCopy>,
    ) -> BlockTable {
        let size = self.config.block_tokens;
        let wanted = &tokens[..tokens.len().min(max_tokens as usize)];
        let blocks = wanted.len() as u32 / size;
        let declared = hashes.root().declared_blocks() > 0 && self.longest_prefix(&hashes, blocks).declared;
        let mut table = self.table_of(hashes, declared);
        let list = &mut std::mem::take(&mut table.lists[0]);
        let mut prefix = self.find_prefix(&table.hashes, declared, blocks, |block| list.push(block));
        let start = prefix.blocks * size;
        let parent = self.continued(&table.hashes, &prefix);
        let mut source = self.tail_source(parent, &wanted[start as usize..], start);
        if source.is_some() && !self.has_room_for_tail(&table, &prefix, size) {
            source = None;
        }
        let within = self.others().any(|group| !start.is_multiple_of(self.groups[group].config.block_tokens));
        if source.is_none() && within {
            // The hit ends within a larger block, which must be copied.
            source = prefix.last.map(|last| (last, 0));
            if !self.has_room_for_tail(&table, &prefix, 0) {
                (source, prefix) = (None, Prefix { blocks: 0, last: None, ..prefix });
            }
        }
        list.truncate(prefix.blocks as usize);
        table.lists[0] = std::mem::take(list);
        self.hit_all(&table.lists[0]);
        let full = table.capacity();
        (table.computed, table.confirmed, table.published[0]) = (full, full, prefix.blocks);
        self.others().for_each(|group| self.attach_group(&mut table, group));
        table.missed = if prefix.chain > prefix.blocks { prefix.chain } else { 0 };
        let before = copies.len();
        source.into_iter().for_each(|source| self.attach_tail(&mut table, source, copies));
        let missed = (prefix.chain * size).saturating_sub(table.computed);
        table.query = Query {
            queries: 1,
            tokens: tokens.len() as u64,
            hit: u64::from(table.computed),
            tail_hit: u64::from(table.computed - full),
            copies: (copies.len() - before) as u64,
            window_miss: u64::from(missed),
        };
        self.count(table.hashes.root().tenant, table.query);
        table
    }

    /// Whether there is a block for the copied part in each group that has one, beside what is attached.
    fn has_room_for_tail(&self, table: &BlockTable, prefix: &Prefix, tail: u32) -> bool {
        let (idle, start) = (self.idle_blocks(prefix), prefix.blocks * self.config.block_tokens);
        let needed = self.each_group(|group| {
            let config = self.groups[group].config;
            let part = !config.optional && (tail > 0 || start % config.block_tokens > 0);
            idle[group] + u32::from(part)
        });
        needed.fits(self.available_to(table.hashes.root().tenant))
    }

    /// References the whole blocks of a group that the query behind the attached blocks reads.
    fn attach_group(&mut self, table: &mut BlockTable, group: usize) {
        let config = self.groups[group].config;
        let ratio = config.block_tokens / self.config.block_tokens;
        let whole = table.computed / config.block_tokens;
        let first = config.first_block(table.computed).min(whole);
        table.lists[group].resize(first as usize, HOLE);
        for index in first..whole {
            let node = self.node_of(table.lists[0][((index + 1) * ratio - 1) as usize]);
            let place = self.place(group, node);
            debug_assert!(place.is_some() || config.optional, "a prefix is found only with what is read");
            // Behind a hole nothing of an optional group is of use.
            let place = place.filter(|_| index == first || table.lists[group].last() != Some(&HOLE));
            if let Some(block) = place {
                self.reference(group, block);
                self.protect(group, block);
            }
            table.lists[group].push(place.unwrap_or(HOLE));
        }
        table.published[group] = whole;
    }

    /// Copies `tokens` positions of the node `source`, or where there are none, the larger blocks that it ends within.
    fn attach_tail(
        &mut self,
        table: &mut BlockTable,
        (source, tokens): (u32, u32),
        copies: &mut Vec<BlockCopy>,
    ) {
        let (tenant, from) = (table.hashes.root().tenant, table.computed);
        // Taking a target may evict the source; where it lies must be known before.
        let sources: [Option<BlockId>; MAX_GROUPS] =
            std::array::from_fn(
                |group| if group < self.groups.len() { self.place(group, source) } else { None },
            );
        if let Some(block) = sources[0].filter(|_| tokens > 0) {
            self.hit(block);
        }
        self.touch(source);
        table.computed += tokens;
        let mut confirmed = table.computed;
        for (group, source) in sources.into_iter().enumerate().take(self.groups.len()) {
            let config = self.groups[group].config;
            let part = table.computed % config.block_tokens;
            if part == 0 {
                continue;
            }
            let behind_hole = config.optional && table.lists[group].last() == Some(&HOLE);
            let source = source.filter(|_| !behind_hole);
            let taken = source.and_then(|source| Some((source, self.take(group, tenant)?)));
            let Some((source, to)) = taken else {
                if !config.optional {
                    // A quota that was not foreseen: nothing was taken yet.
                    table.computed = from;
                    return;
                }
                table.lists[group].push(HOLE);
                continue;
            };
            self.set_filled(group, to, part);
            table.lists[group].push(to);
            if source != to {
                confirmed = confirmed.min(table.computed - part);
                copies.push(BlockCopy { group: group as u32, from: source, to, tokens: part });
            }
        }
        table.confirmed = confirmed;
        self.slide(table, from);
    }

    /// Releases what is not read any more since `before` positions were computed. What a lookup missed is protected from now on:
    /// it was wanted once.
    pub(crate) fn slide(&mut self, table: &mut BlockTable, before: u32) {
        for group in self.others() {
            let config = self.groups[group].config;
            let (from, to) = (config.first_block(before), config.first_block(table.computed));
            let missed = table.missed * self.config.block_tokens;
            let missed = config.first_block(missed)..missed.div_ceil(config.block_tokens);
            for index in from..to.min(table.lists[group].len() as u32) {
                let block = std::mem::replace(&mut table.lists[group][index as usize], HOLE);
                if block == HOLE {
                    continue;
                }
                table.change(u32::MAX);
                if missed.contains(&index) {
                    self.protect(group, block);
                }
                self.unreference(group, block);
            }
        }
    }

    /// Frees cached tails, among the newest siblings, that say nothing that the full block does not say, if every group has it.
    pub(crate) fn supersede(&mut self, block: BlockId) {
        let node = self.node_of(block);
        if self.others().any(|group| !self.groups[group].config.optional && self.place(group, node).is_none())
        {
            return;
        }
        let parent = self.nodes.parent(node);
        loop {
            let tokens = self.tokens_of(block);
            let tail = self.nodes.children(parent).take(CHILDREN_SCANNED).find_map(|child| {
                let tail =
                    self.place(0, child).filter(|_| child != node && self.nodes.node(child).is_tail)?;
                tokens.starts_with(self.tokens_of(tail)).then_some(tail)
            });
            let Some(tail) = tail else { return };
            self.free_block(tail);
            self.stats.superseded_tails += 1;
        }
    }

    /// Drops a cached block of group 0 without children.
    pub(crate) fn free_block(&mut self, block: BlockId) {
        self.drop_content(block);
        self.groups[0].pool.push(block.0);
    }

    /// A second table with the same content. It shares every written block, those partly written included (the first
    /// of the two to grow gets copies of these); blocks beyond `computed` stay with the original. Fork first, then grow: a
    /// table that was grown before it was forked must be grown again before its step.
    pub fn fork(&mut self, table: &mut BlockTable) -> BlockTable {
        let mut fork = self.table_of(table.hashes.clone(), table.declared);
        (fork.may_share, table.may_share) = (true, true);
        fork.computed = table.computed;
        fork.confirmed = table.confirmed;
        fork.published = table.published;
        for group in 0..self.groups.len() {
            let written = self.groups[group].blocks_of(table.computed) as usize;
            let list = &table.lists[group];
            fork.lists[group].extend_from_slice(&list[..written.min(list.len())]);
            for at in 0..fork.lists[group].len() {
                let block = fork.lists[group][at];
                if block != HOLE {
                    self.reference(group, block);
                }
            }
        }
        fork
    }

    /// Blocks of group 0 that only this table holds, and no pin. O(log blocks): whoever holds or pins a block holds
    /// or pins all before it, so they are the last ones. (What an operator declared is nobody's own: a pin ends before it.)
    pub fn exclusive_full(&self, table: &BlockTable) -> u32 {
        let own = &table.lists[0][table.declared_blocks() as usize..];
        let shared = own.partition_point(|block| self.slot(0, *block).refs > 1);
        (own.len() - shared) as u32
    }

    /// Blocks that only this table holds, and no pin: what releasing it would make available. In groups that are not read as a
    /// whole O(blocks held).
    pub fn exclusive_blocks(&self, table: &BlockTable) -> GroupCounts {
        self.each_group(|group| match group {
            0 => self.exclusive_full(table),
            _ => self.exclusive_in(table, group),
        })
    }

    pub(crate) fn exclusive_in(&self, table: &BlockTable, group: usize) -> u32 {
        let held = table.held(group).iter().filter(|block| **block != HOLE);
        held.filter(|block| self.slot(group, **block).refs == 1).count() as u32
    }

    /// Drops the table's references, tail first, and returns what identifies its content. That stays until its blocks are taken
    /// for something else; a partly written last block stays too, to be copied from. `tokens`: at least the `computed` first.
    pub fn release(&mut self, mut table: BlockTable, tokens: &[u32]) -> BlockHashes {
        self.finish_loads(&mut table);
        self.leave_to_transfers(&mut table);
        let written = self.groups[0].blocks_of(table.computed) as usize;
        while table.lists[0].len() > written {
            self.drop_last(&mut table, 0);
        }
        self.publish_tail(&mut table, tokens);
        for group in self.others().rev() {
            for at in 0..table.held(group).len() {
                let block = table.held(group)[at];
                if block != HOLE {
                    self.protect(group, block);
                }
            }
            // Before group 0: they must never be held without their nodes.
            while !table.lists[group].is_empty() {
                self.drop_last(&mut table, group);
            }
        }
        while !table.lists[0].is_empty() {
            self.drop_last(&mut table, 0);
        }
        if self.spare.len() < SPARE_TABLES {
            self.spare.push(Lists { lists: table.lists, loads: table.loads });
        }
        table.hashes
    }

    fn drop_last(&mut self, table: &mut BlockTable, group: usize) {
        if let Some(block) = table.lists[group].pop().filter(|block| *block != HOLE) {
            self.unreference(group, block);
        }
    }

    /// Indexes the partly written blocks of a table that is about to lose them, if nobody else writes them.
    fn publish_tail(&mut self, table: &mut BlockTable, tokens: &[u32]) {
        let end = table.computed as usize;
        debug_assert!(tokens.len() >= end, "release needs the computed tokens");
        if end == 0
            || table.confirmed < table.computed
            || tokens.len() < end
            || table.published[0] < table.full_blocks(0)
        {
            return;
        }
        let Some(index) = table.partial_block(0) else {
            let last = table.lists[0].len() - 1;
            return self.publish_partial_places(table, last);
        };
        let block = table.lists[0][index];
        if self.slot(0, block).refs > 1 {
            return;
        }
        let start = index * self.config.block_tokens as usize;
        let tokens = &tokens[start..end];
        let parent = self.parent(table, index);
        if let Some((sibling, length)) = self.tail_source(parent, tokens, start as u32)
            && length as usize == tokens.len()
        {
            self.stats.dedups += 1;
            self.nodes.touch(sibling);
            self.refresh(sibling);
            return self.touch(sibling);
        }
        self.set_filled(0, block, tokens.len() as u32);
        let tail = self.nodes.insert(parent, table.hashes.root().tenant, None);
        self.publish_block(block, tail, tokens);
        self.inherit(block, parent);
        self.publish_partial_places(table, index);
        self.supersede(block);
    }

    /// What the other groups have of the table's last block, written in part, is found under it.
    fn publish_partial_places(&mut self, table: &mut BlockTable, last: usize) {
        for group in self.others() {
            let lost = table.overwritten && self.groups[group].config.layout == Layout::State;
            if let Some(index) = table.partial_block(group).filter(|_| !lost)
                && table.lists[group]
                    .get(index)
                    .is_some_and(|block| *block != HOLE && self.slot(group, *block).refs == 1)
            {
                self.publish_place(table, group, index, last as u32);
            }
        }
    }

    /// A tail is kept as what it continues: it would only be in the way of its parent's eviction, or outlived by it.
    fn inherit(&mut self, tail: BlockId, parent: Parent) {
        let Parent::Node(parent) = parent else { return };
        let retention = self.place(0, parent).and_then(|parent| self.policy.retention(parent.0));
        if let Some(retention) = retention {
            self.policy.retain(tail.0, Some(retention), &self.meta(tail));
        }
    }

    /// Tells the policy that a cached node was just used. Its ancestors are in use now, so they stay younger.
    fn refresh(&mut self, node: u32) {
        let Some(block) = self.place(0, node) else { return };
        if self.slot(0, block).refs == 0 {
            let meta = self.meta(block);
            self.policy.on_use(block, &meta);
            self.policy.on_free(block, &meta);
        }
    }

    /// `release` for a table that was attached and then not run (no room, cancelled): takes its query and the blocks
    /// it never used out of the statistics again, so that they reconcile with the requests that were served.
    pub fn abandon(&mut self, table: BlockTable, tokens: &[u32]) -> BlockHashes {
        let query = table.query;
        let counted = self.tenants.entry(table.hashes.root().tenant).or_default();
        counted.stats.take_back(&query);
        self.totals.take_back(&query);
        self.stats.copies -= query.copies;
        if query.queries > 0 || !table.loads.is_empty() {
            for block in &table.lists[0][(table.confirmed / self.config.block_tokens) as usize..] {
                self.groups[0].pool.slot_mut(block.0).open = false;
            }
        }
        self.release(table, tokens)
    }

    /// Counts for the cache and for a tenant.
    pub(crate) fn count(&mut self, tenant: TenantId, query: Query) {
        self.tenants.entry(tenant).or_default().stats.add(&query);
        self.totals.add(&query);
        self.stats.copies += query.copies;
    }

    /// Drops all unreferenced content that is not pinned, of one tenant or of all. O(blocks).
    pub fn clear(&mut self, tenant: Option<TenantId>) {
        for block in 0..self.config.blocks {
            let mut next = Some(BlockId(block));
            while let Some(block) = next.filter(|block| self.is_clearable(*block, tenant)) {
                let node = self.node_of(block);
                next = self.nodes.parent_node(node).and_then(|parent| self.place(0, parent));
                self.free_block(block);
            }
        }
        // What other groups have of blocks that are in use.
        for group in self.others() {
            let cached: Vec<u32> = self.groups[group].cached().collect();
            for block in cached {
                let slot = self.slot(group, BlockId(block));
                let node = slot.node().filter(|_| tenant.is_none_or(|tenant| tenant == slot.tenant));
                node.into_iter().for_each(|node| self.free_place(group, node));
            }
        }
        self.record_cleared(tenant);
    }

    fn is_clearable(&self, block: BlockId, tenant: Option<TenantId>) -> bool {
        let slot = self.slot(0, block);
        let loose = !self.groups[0].pool.is_free(block.0)
            && slot.is_cached()
            && self.nodes.node(self.node_of(block)).children == 0;
        loose && tenant.is_none_or(|tenant| tenant == slot.tenant)
    }

    /// Leading blocks of a chain that are on the device.
    pub(crate) fn cached_run<'a>(&self, hashes: impl Iterator<Item = &'a BlockHash>) -> Vec<BlockId> {
        hashes.map_while(|hash| self.find_block(hash)).collect()
    }
}
