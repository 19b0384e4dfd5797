//! From a request to a table and back: what is cached of it is referenced, and what stays when it ends.
//!
//! Owns: references of tables on what was found (`lookup`), and what a table that is given up leaves behind.
//!
//! # What a query reads, exactly
//!
//! With `computed` positions the next query is at `computed` and reads, in a window group, `computed - W + 1 ..= computed`. A
//! table holds the blocks from that of the first such position on, and holes before. `commit` gives the rest back in the very
//! step in which it is read no more; it stays to be hit until its pool needs it.

use crate::cache::KvCache;
use crate::counts::{GroupCounts, MAX_GROUPS};
use crate::hash::BlockHashes;
use crate::lookup::{CHILDREN_SCANNED, Lookup};
use crate::nodes::{Kind, Parent};
use crate::stats::QueryStats;
use crate::table::{BlockTable, Lists};
use crate::types::{BlockCopy, BlockId, HOLE, Layout, TenantId};

/// Emptied lists of blocks kept for the next ones, so that a steady state allocates nothing.
const SPARE_LISTS: usize = 1024;

impl KvCache {
    /// The blocks of group 0 of a prefix, from the last to the first by what each continues, and how many of them nobody holds. Only
    /// where its beginning is an operator's one more is looked up.
    fn collect(&self, hashes: &BlockHashes, prefix: &Lookup, blocks: &mut Vec<BlockId>) -> u32 {
        blocks.resize(prefix.full_blocks as usize, HOLE);
        let (mut node, mut idle) = (prefix.last, 0);
        for (index, place) in blocks.iter_mut().enumerate().rev() {
            node = node.or_else(|| self.nodes.find(hashes.get(index as u32)?));
            let it = node.expect("what was found is there while the version is the same");
            *place = self.block_of(it);
            idle += u32::from(self.slot(0, *place).refs == 0);
            node = self.nodes.parent_node(it);
        }
        idle
    }

    /// [`KvCache::attach_found`] of what a lookup of `tokens[..max_tokens]` finds.
    pub fn attach(
        &mut self,
        hashes: BlockHashes,
        tokens: &[u32],
        max_tokens: u32,
        copies: &mut Vec<BlockCopy>,
    ) -> BlockTable {
        let found = self.lookup(&hashes, &tokens[..tokens.len().min(max_tokens as usize)]);
        self.attach_found(hashes, tokens, &found, copies)
    }

    /// References the longest cached beginning of what was looked up of `tokens`. Callers look up the prompt's length
    /// less one: one row must be left to compute. `hashes`: of all full blocks of `tokens`. The index is not asked again, unless content
    /// came or went since.
    ///
    /// Full blocks are shared; of each group only those that the next query reads are needed, and referenced. Part of a
    /// following block is reused by copy: one fresh block is taken in each group and a copy for each pushed to `copies` (none
    /// where the fresh block is the very block to copy from). Never fails: with no block available for the tail in some group, only the
    /// full blocks are attached. `table.computed()` says what was attached, exactly.
    ///
    /// Counts one query of `tokens.len()` tokens; a table that is given up before anything of it was computed takes it back.
    pub fn attach_found(
        &mut self,
        mut hashes: BlockHashes,
        tokens: &[u32],
        found: &Lookup,
        copies: &mut Vec<BlockCopy>,
    ) -> BlockTable {
        let (tenant, size) = (hashes.root().tenant, self.config.block_tokens);
        let looked_up = &tokens[..found.tokens as usize];
        let mut prefix = match found.version == self.version {
            true => *found,
            false => self.lookup(&hashes, looked_up),
        };
        #[cfg(debug_assertions)]
        self.check_found(&hashes, looked_up, &prefix);
        hashes.set_declared(prefix.is_declared);
        let mut table = self.table_of(hashes);
        let list = &mut std::mem::take(&mut table.lists[0]);
        prefix.idle_blocks = GroupCounts::full(self.collect(&table.hashes, &prefix, list));
        let node = |index: u32| list.get(index as usize).map(|block| self.node_of(*block));
        let [idle, copied] = self.takes(&prefix, node);
        let available = self.available_to(tenant);
        let one = self.each_group(|group| u32::from(!self.groups[group].config.optional));
        let source = prefix.tail.filter(|_| (idle + one).fits(available));
        let ends_within = !copied.is_zero() && !(idle + copied).fits(available);
        if source.is_none() && (ends_within || prefix.needs_tail) {
            // The hit ends within a larger block, or in a tail, which must be copied.
            prefix = Lookup { chain: prefix.chain, ..Lookup::default() };
            table.hashes.set_declared(false);
        }
        list.truncate(prefix.full_blocks as usize);
        table.lists[0] = std::mem::take(list);
        self.hit_all(&table.lists[0]);
        (table.computed, table.confirmed) = (prefix.end, prefix.end);
        table.published[0] = prefix.full_blocks;
        table.missed = if prefix.chain > prefix.full_blocks { prefix.chain } else { 0 };
        let copies_before = copies.len();
        // What is there is held first: nothing that is taken may cost it.
        self.others().for_each(|group| self.attach_group(&mut table, &prefix, group));
        let tail = if source.is_some() { prefix.tail_tokens } else { 0 };
        self.attach_tail(&mut table, source.or(prefix.last), tail, copies);
        self.attach_states(&mut table);
        let missed = (prefix.chain * size).saturating_sub(table.computed);
        table.query = QueryStats {
            count: 1,
            tokens: tokens.len() as u64,
            hit_tokens: u64::from(table.computed),
            tail_hit_tokens: u64::from(table.computed - prefix.end),
            window_miss_tokens: u64::from(missed),
            copies: (copies.len() - copies_before) as u64,
        };
        self.count(tenant, table.query);
        table
    }

    /// References what is there of the whole blocks of a group from 1 on that the query behind a prefix reads.
    fn attach_group(&mut self, table: &mut BlockTable, prefix: &Lookup, group: usize) {
        let (config, reads) = (self.groups[group].config, self.reads(group, prefix));
        let whole = prefix.end / config.block_tokens;
        table.published[group] = whole;
        table.lists[group].resize(reads.start as usize, HOLE);
        for index in reads.clone() {
            let node = |index: u32| table.lists[0].get(index as usize).map(|block| self.node_of(*block));
            let place = self.find_read(prefix, group, index, node);
            let place = place.filter(|_| index == reads.start || table.goes_on(group));
            if let Some(block) = place {
                self.reference(group, block);
                self.protect(group, block);
            } else if index == whole {
                break;
            }
            table.lists[group].push(place.unwrap_or(HOLE));
        }
    }

    /// Copies `tokens` positions of the node `source`, or where there are none, the larger blocks that it ends within.
    fn attach_tail(
        &mut self,
        table: &mut BlockTable,
        source: Option<u32>,
        tokens: u32,
        copies: &mut Vec<BlockCopy>,
    ) {
        let (tenant, from) = (table.hashes.root().tenant, table.computed);
        table.computed += tokens;
        let lacks = |group: usize| {
            let blocks = self.groups.get(group).map_or(0, |of| of.blocks_of(table.computed));
            (table.lists[group].len() as u32) < blocks
        };
        // Taking a target may evict the source; where it lies must be known before.
        let place = |group: usize| source.and_then(|source| self.place(group, source));
        let sources: [Option<Option<BlockId>>; MAX_GROUPS] =
            std::array::from_fn(|group| lacks(group).then(|| place(group)));
        sources[0].flatten().into_iter().for_each(|block| self.hit(block));
        source.into_iter().for_each(|source| self.touch(source));
        let mut confirmed = table.computed;
        for (group, source) in sources.into_iter().enumerate() {
            let Some(source) = source else { continue };
            let config = self.groups[group].config;
            let part = table.computed % config.block_tokens;
            // An optional state may be that of another position.
            let fits = |of: &BlockId| {
                !config.optional || config.is_divisible(part, self.slot(group, *of).filled.into())
            };
            let source = source.filter(|of| table.goes_on(group) && fits(of));
            let taken = source.and_then(|source| Some((source, self.take(group, tenant)?)));
            let Some((source, to)) = taken else {
                // For what is needed there was room, beside all that is held by now.
                assert!(config.optional, "a block that was counted is not to be had");
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

    /// Where a drafter's state at the end is not there, it goes on from the last one that is.
    fn attach_states(&mut self, table: &mut BlockTable) {
        for group in self.others() {
            let config = self.groups[group].config;
            if !config.optional || config.layout != Layout::State || table.is_whole(group) {
                continue;
            }
            let ratio = config.block_tokens / self.config.block_tokens;
            let place = |index: u32| {
                let last = table.lists[0][((index + 1) * ratio - 1) as usize];
                Some((index, self.place(group, self.node_of(last))?))
            };
            let last = (0..table.computed / config.block_tokens).rev().find_map(place);
            if let Some((index, block)) = last {
                self.reference(group, block);
                self.protect(group, block);
                table.lists[group][index as usize] = block;
            }
            table.written = table.written.min(last.map_or(0, |(index, _)| (index + 1) * config.block_tokens));
        }
    }

    /// Releases what is not read any more since `before` positions were computed. What a lookup missed is protected from now on:
    /// it was wanted once.
    pub(crate) fn slide(&mut self, table: &mut BlockTable, before: u32) {
        for group in self.others() {
            let config = self.groups[group].config;
            let to = config.first_block(table.goes_on_at(group));
            let from = match config.optional && config.layout == Layout::State {
                // How far a drafter was is not known any more.
                true => table.lists[group].iter().position(|block| *block != HOLE).unwrap_or(0) as u32,
                false => config.first_block(before),
            };
            let mut missed = table.missed * self.config.block_tokens;
            if config.layout == Layout::State {
                // The last state at or before it: behind it the sequence is another.
                missed -= missed % config.block_tokens;
            }
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
        if self.nodes.node(node).kind == Kind::WithPlaceholders {
            return;
        }
        if self.others().any(|group| !self.groups[group].config.optional && self.place(group, node).is_none())
        {
            return;
        }
        let parent = self.nodes.parent(node);
        loop {
            let tokens = self.tokens_of(block);
            let says_nothing = |child: &u32| {
                let is_tail = *child != node && self.nodes.node(*child).is_tail();
                is_tail && tokens.starts_with(self.tokens_of(self.block_of(*child)))
            };
            let tail = self.nodes.children(parent).take(CHILDREN_SCANNED).find(says_nothing);
            let Some(tail) = tail else { return };
            self.free_block(self.block_of(tail));
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
        let mut fork = self.table_of(table.hashes.clone());
        (fork.may_share, table.may_share) = (true, true);
        fork.computed = table.computed;
        fork.confirmed = table.confirmed;
        fork.written = table.written;
        fork.published = table.published;
        for group in 0..self.groups.len() {
            let written = self.groups[group].blocks_of(table.computed) as usize;
            let list = &table.lists[group];
            fork.lists[group].extend_from_slice(&list[..written.min(list.len())]);
            let config = self.groups[group].config;
            if config.optional && config.layout == Layout::State && table.written() < table.computed {
                // The next rows of a drafter that lags would overwrite what the other goes on from.
                fork.lists[group].fill(HOLE);
            }
            let held = fork.lists[group].iter().filter(|block| **block != HOLE);
            held.for_each(|block| self.reference(group, *block));
        }
        fork
    }

    /// Blocks that only this table holds, and no pin and no transfer: what releasing it would make available. Of group 0 O(log blocks): whoever
    /// holds or pins a block holds or pins all before it, so they are the last ones (what an operator declared is nobody's own: a pin ends
    /// before it). In groups that are not read as a whole O(blocks held).
    pub fn exclusive_blocks(&self, table: &BlockTable) -> GroupCounts {
        let own = &table.lists[0][table.declared_blocks() as usize..table.own_blocks(0) as usize];
        self.each_group(|group| match group {
            0 => (own.len() - own.partition_point(|block| self.slot(0, *block).refs > 1)) as u32,
            _ => {
                let held = table.held(group).iter().filter(|block| **block != HOLE);
                held.filter(|block| self.slot(group, **block).refs == 1).count() as u32
            }
        })
    }

    /// Drops the table's references, tail first, and returns what identifies its content. That stays until its blocks are taken
    /// for something else; a partly written last block stays too, to be copied from. What a transfer writes stays held until it
    /// ends. `tokens`: at least the `computed` first.
    ///
    /// What was attached and then not run (no room, cancelled) is taken out of the statistics again, with the blocks it never used, so
    /// that they reconcile with the requests that were served.
    pub fn release(&mut self, mut table: BlockTable, tokens: &[u32]) -> BlockHashes {
        if table.query.count > 0 {
            let counted = self.tenants.entry(table.hashes.root().tenant).or_default();
            counted.stats.queries.take_back(&table.query);
            self.stats.queries.take_back(&table.query);
            for block in &table.lists[0][(table.confirmed / self.config.block_tokens) as usize..] {
                self.groups[0].pool.slot_mut(block.0).open = false;
            }
        }
        let written = self.groups[0].blocks_of(table.computed);
        self.truncate(&mut table, 0, written);
        self.publish_tail(&mut table, tokens);
        for group in self.others().rev() {
            let held = table.held(group).iter().filter(|block| **block != HOLE);
            held.for_each(|block| self.protect(group, *block));
            // Before group 0: they must never be held without their nodes.
            self.truncate(&mut table, group, 0);
        }
        self.truncate(&mut table, 0, 0);
        self.recycle(table.lists);
        table.hashes
    }

    /// Keeps the memory of lists for the next ones.
    pub(crate) fn recycle(&mut self, mut lists: Lists) {
        if self.spare.len() < SPARE_LISTS {
            lists.iter_mut().for_each(Vec::clear);
            self.spare.push(lists);
        }
    }

    /// Drops the references on a table's last blocks of a group, tail first, until it has so many.
    pub(crate) fn truncate(&mut self, table: &mut BlockTable, group: usize, blocks: u32) {
        while table.lists[group].len() > blocks as usize {
            if let Some(block) = table.lists[group].pop().filter(|block| *block != HOLE) {
                self.unreference(group, block);
            }
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
        let start = index * self.config.block_tokens as usize;
        // A block with placeholders is found by its hash or not at all.
        let placeholder = table.hashes.first_placeholder(start as u32, end as u32);
        if self.slot(0, block).refs > 1 || placeholder.is_some() {
            return;
        }
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
        let tail = self.nodes.insert(parent, table.hashes.root().tenant, None, block.0);
        self.publish_block(block, tail, tokens);
        self.inherit(block, parent);
        self.publish_partial_places(table, index);
        self.supersede(block);
    }

    /// What the other groups have of the table's last block, written in part, is found under it.
    fn publish_partial_places(&mut self, table: &mut BlockTable, last: usize) {
        for group in self.others() {
            let config = self.groups[group].config;
            let lost = (config.optional && table.written < table.computed)
                || (table.overwritten && config.layout == Layout::State);
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
        if let Some(retention) = self.policy.retention(self.block_of(parent).0) {
            self.policy.retain(tail.0, Some(retention), self.now_us, &self.meta(tail));
        }
    }

    /// Tells the policy that a cached node was just used. Its ancestors are in use now, so they stay younger.
    fn refresh(&mut self, node: u32) {
        let block = self.block_of(node);
        if self.slot(0, block).refs == 0 {
            let meta = self.meta(block);
            self.policy.on_use(block, &meta);
            self.policy.on_free(block, &meta);
        }
    }

    /// Counts for the cache and for a tenant.
    pub(crate) fn count(&mut self, tenant: TenantId, query: QueryStats) {
        self.tenants.entry(tenant).or_default().stats.queries.add(&query);
        self.stats.queries.add(&query);
    }

    /// Drops all unreferenced content that is not pinned, of one tenant or of all. O(blocks).
    pub fn clear(&mut self, tenant: Option<TenantId>) {
        for block in 0..self.config.blocks {
            let mut next = Some(BlockId(block));
            while let Some(block) = next.filter(|block| self.is_cached_leaf(block.0)) {
                let (node, owner) = (self.node_of(block), self.slot(0, block).tenant);
                if tenant.is_some_and(|tenant| tenant != owner) {
                    break;
                }
                next = self.nodes.parent_node(node).map(|parent| self.block_of(parent));
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
}
