//! The whole truth about a cache, verified in O(blocks + references). For tests and simulators; changes nothing.

use rustc_hash::{FxHashMap, FxHashSet};

use crate::blocks::Tenant;
use crate::cache::KvCache;
use crate::events::EventBatch;
use crate::nodes::Parent;
use crate::policy::NONE;
use crate::table::BlockTable;
use crate::types::{BlockId, HOLE, Layout, TenantId};

pub(crate) fn count(what: &'static str, reported: u64, actual: u64) -> Result<(), String> {
    if reported == actual { Ok(()) } else { Err(format!("{what} is reported as {reported} and is {actual}")) }
}

/// There are `actual`, and no more than `limit` of them can be.
pub(crate) fn at_most(what: &'static str, actual: u32, limit: u32) -> Result<(), String> {
    count(what, actual.min(limit).into(), actual.into())
}

impl KvCache {
    /// Verifies every invariant of the crate; the error says which one does not hold. `tables` must be all tables that exist: reference counts are compared with
    /// them, so a leaked table is found too.
    pub fn check(&self, tables: &[&BlockTable]) -> Result<(), String> {
        for group in 0..self.groups.len() {
            self.check_references(group, tables)?;
            tables.iter().try_for_each(|table| self.check_table(group, table))?;
            self.check_partition(group)?;
            self.check_places(group)?;
        }
        self.check_index()?;
        self.check_retention()?;
        self.check_quotas()?;
        let (counted, bytes) = self.load_byte_counts();
        count("bytes that transfers write", counted, bytes)?;
        self.check_counts()
    }

    /// Where every full block's content resides, as if it were stored now, each after what it continues if that is there, and their tokens: what
    /// a recorder of events holds if it missed none. O(nodes).
    pub fn resident(&self) -> EventBatch {
        let mut nodes: Vec<u32> = Vec::new();
        let mut at = 0;
        // Roots behind declared prefixes come after those.
        for behind in [false, true] {
            let roots = self.nodes.roots().filter(|root| self.nodes.behind(root).is_some() == behind);
            nodes.extend(roots.flat_map(|root| self.nodes.children(Parent::Root(root))));
            while let Some(node) = nodes.get(at) {
                nodes.extend(self.nodes.children(Parent::Node(*node)));
                at += 1;
            }
        }
        let mut all = EventBatch::default();
        nodes.into_iter().for_each(|node| self.tell_node(node, &mut all));
        all
    }

    fn check_references(&self, group: usize, tables: &[&BlockTable]) -> Result<(), String> {
        let pool = &self.groups[group].pool;
        let mut held = vec![0u32; pool.len() as usize];
        for table in tables {
            for (index, &block) in table.lists[group].iter().enumerate().filter(|(_, block)| **block != HOLE)
            {
                let Some(held) = held.get_mut(block.0 as usize) else {
                    return Err(format!("table entry {index}: there is no {block:?} in group {group}"));
                };
                *held += 1;
            }
        }
        self.holds.slots(group).for_each(|block| held[block as usize] += 1);
        for (tenant, hash) in self.prefixes.pinned().filter(|_| group == 0) {
            match self.find_block(hash).filter(|block| self.slot(0, *block).tenant == tenant) {
                Some(block) => held[block.0 as usize] += 1,
                None => count("pinned blocks that are not in the index of their tenant", 0, 1)?,
            }
        }
        let mut shared = 0;
        for (slot, held) in (0..).zip(held) {
            let counted = if pool.is_free(slot) { 0 } else { pool.slot(slot).refs };
            if counted != held {
                let block = BlockId(slot);
                return Err(format!(
                    "{block:?} of group {group} counts {counted} references and is held by {held}"
                ));
            }
            shared += u64::from(held.saturating_sub(1));
        }
        count("references beyond the first", self.groups[group].shared.into(), shared)
    }

    fn check_table(&self, group: usize, table: &BlockTable) -> Result<(), String> {
        let config = self.groups[group].config;
        let (size, ratio) = (config.block_tokens, config.block_tokens / self.config.block_tokens);
        let list = &table.lists[group];
        if group == 0 {
            at_most("positions computed, for which a table has blocks,", table.computed, table.capacity())?;
            at_most("positions confirmed, which are computed,", table.confirmed, table.computed)?;
            at_most("shared blocks, which are published,", table.declared_blocks(), table.published[0])?;
            at_most("full blocks, which are hashed,", table.full_blocks(0), table.hashes.len())?;
        } else {
            let blocks = self.groups[group].blocks_of(table.capacity());
            // But for those of rows that may be taken back, or might have been.
            let more = if config.layout == Layout::State { list.len() as u32 } else { 0 };
            let blocks = blocks.max(more).into();
            count("blocks of a table in a group, as many as its positions need,", list.len() as u64, blocks)?;
        }
        // What is loaded is published by the commit of the step that fills it, and what a drafter caught up with by the next.
        let published = if !config.optional { table.full_blocks(group) } else { table.published[group] };
        count(
            "published blocks of a table",
            table.published[group].min(table.full_blocks(group)).into(),
            published.min(table.full_blocks(group)).into(),
        )?;
        for (index, &id) in list.iter().enumerate() {
            let fail = |what| Err(format!("table entry {index}, {id:?} of group {group}: {what}"));
            let (start, number) = (index as u32 * size, index as u32);
            if number < config.first_block(table.goes_on_at(group)) {
                // What a drafter left behind is released by the next commit.
                if id != HOLE && !config.optional {
                    return fail("is read no more and was not released");
                }
                continue;
            }
            // Of what is loaded only what the query behind it reads is.
            if id == HOLE && (config.optional || number >= table.own_blocks(group)) {
                continue;
            }
            let Some(slot) = self.groups[group].pool.get(id.0) else {
                return fail("is read and not a block of its pool");
            };
            let last = (number + 1) * ratio - 1;
            let holder = table.root().owner(last.min(start.div_ceil(self.config.block_tokens).max(last)));
            if slot.tenant != holder {
                return fail(&format!("is of tenant {:?}, the table of {holder:?}", slot.tenant));
            }
            if number < published {
                self.check_published(group, table, index, id, last)?;
            } else if slot.node().is_some() {
                // A table from a copy holds blocks of other groups that were there before it is published itself; what a drafter caught
                // up with another table published that shares it; a state that is kept where prompts part is its table's until that grows.
                if !config.optional && config.layout != Layout::State {
                    return fail("is not computed in full and yet published");
                }
            } else if start >= table.computed && slot.refs > 1 + u32::from(number >= table.own_blocks(group))
            {
                return fail("is beyond the computed positions and shared");
            } else if u32::from(slot.filled) < table.computed.saturating_sub(start).min(size) {
                return fail("counts fewer written positions than the table has computed");
            }
        }
        Ok(())
    }

    fn check_published(
        &self,
        group: usize,
        table: &BlockTable,
        index: usize,
        block: BlockId,
        last: u32,
    ) -> Result<(), String> {
        let fail = |what| Err(format!("table entry {index}, {block:?} of group {group}: {what}"));
        let Some(node) = self.slot(group, block).node() else { return fail("is computed and not published") };
        if self.nodes.find(table.hashes.get(last).unwrap_or(&crate::BlockHash([0; 32]))) != Some(node) {
            return fail("does not hold the content that its place in the table has");
        }
        if group > 0 || index as u32 >= table.hashes.len() {
            return Ok(());
        }
        if self.nodes.parent(node) != self.parent(table, index) {
            return fail("is not published as the child of the entry before");
        }
        let parent = index.checked_sub(1).and_then(|before| table.hashes.get(before as u32));
        let root = table.root();
        let ranges = table.hashes.ranges();
        let hash = root.chain_at(index as u32, parent.unwrap_or(&root.hash), self.tokens_of(block), ranges);
        if hash != self.nodes.node(node).hash {
            return fail("has a hash that is not the hash of its chain");
        }
        Ok(())
    }

    /// Every block is free, cached or active, and where that is listed.
    fn check_partition(&self, group: usize) -> Result<(), String> {
        let of = &self.groups[group];
        let mut listed = vec![0; of.pool.len() as usize];
        of.cached().for_each(|block| listed[block as usize] += 1);
        let mut free = 0;
        for slot in 0..of.pool.len() {
            let is_free = of.pool.is_free(slot);
            free += u64::from(is_free);
            let it = of.pool.slot(slot);
            let cached = !is_free && it.is_cached();
            let is_listed = if group == 0 { u32::from(cached) } else { listed[slot as usize] };
            let states = u32::from(is_free) + u32::from(it.refs > 0) + is_listed;
            if states != 1 || (is_listed == 1) != cached {
                let block = BlockId(slot);
                return Err(format!("{block:?} of group {group} is in {states} of free, cached and active"));
            }
        }
        count("free blocks", of.pool.free().into(), free)
    }

    /// A node and the block in which it resides name each other, and hold as much; nobody holds a block of groups 1 and up more
    /// often than its node.
    fn check_places(&self, group: usize) -> Result<(), String> {
        let of = &self.groups[group];
        for (slot, it) in of.pool.used() {
            let fail = |what| Err(format!("{:?} of group {group}: {what}", BlockId(slot)));
            let Some(node) = it.node() else { continue };
            if self.place(group, node) != Some(BlockId(slot)) {
                return fail("has a node that does not reside there");
            }
            let first = self.slot(0, self.block_of(node));
            if it.tenant != first.tenant || it.refs > first.refs {
                return fail("is another tenant's than its node, or held more often");
            }
        }
        let places = of.places.iter().filter(|place| **place != NONE).count() as u64;
        let nodes = of.pool.used().filter(|(_, slot)| slot.node().is_some()).count() as u64;
        if group > 0 { count("nodes that reside in a group", places, nodes) } else { Ok(()) }
    }

    fn check_index(&self) -> Result<(), String> {
        let (mut listed, mut nodes) = (0, 0);
        for (id, node) in self.nodes.all() {
            nodes += 1;
            let block = self.block_of(id);
            let slot = self.slot(0, block);
            let fail = |what| Err(format!("{block:?}: {what}"));
            if slot.node() != Some(id) {
                return fail("has another node than the one that resides there");
            }
            if let Some(parent) = self.nodes.parent_node(id) {
                let before = self.nodes.node(parent);
                if before.is_tail()
                    || before.tenant != node.tenant
                    || before.depth.saturating_add(1) != node.depth
                {
                    return fail("continues a tail, another tenant's block, or is at a wrong depth");
                }
                if self.slot(0, self.block_of(parent)).refs < slot.refs {
                    return fail("is held more often than its parent");
                }
            }
            if !node.is_tail() && self.nodes.find(&node.hash) != Some(id) {
                return fail("is not found by its hash");
            }
            let filled = u32::from(slot.filled);
            if node.is_tail() && (slot.refs > 0 || filled == 0 || filled >= self.config.block_tokens) {
                return fail("is a tail and held, or of impossible length");
            }
            if !node.is_tail() && filled != self.config.block_tokens {
                return fail("is published and not full");
            }
            let children = self.check_children(Parent::Node(id))?;
            count("children of a node", node.children.into(), children)?;
            listed += children;
        }
        for root in self.nodes.roots() {
            let children = self.check_children(Parent::Root(root))?;
            count("children of an entry for a root, at least one,", children.max(1), children)?;
            listed += children;
        }
        count("children listed by all parents", listed, nodes)
    }

    /// Every listed child names this parent; returns how many there are.
    fn check_children(&self, parent: Parent) -> Result<u64, String> {
        let mut length = 0;
        for child in self.nodes.children(parent).take(self.nodes.capacity() as usize + 1) {
            if self.nodes.parent(child) != parent {
                let block = self.block_of(child);
                return Err(format!("{block:?}: is listed by a parent it does not have"));
            }
            length += 1;
        }
        Ok(length)
    }

    /// Every block is where the order of eviction says, and pinned blocks are counted once.
    fn check_retention(&self) -> Result<(), String> {
        let pool = &self.groups[0].pool;
        for slot in 0..pool.len() {
            let it = pool.slot(slot);
            let cached = !pool.is_free(slot) && it.is_cached();
            let node = if pool.is_free(slot) { None } else { it.node() };
            let children = node.map_or(0, |node| self.nodes.node(node).children);
            let placed = self.policy.check(slot, cached, children);
            placed.map_err(|what| format!("{:?}: {what}", BlockId(slot)))?;
        }
        let misplaced = self.policy.misplaced(|block| pool.slot(block).tenant);
        count("blocks in the wrong list of the eviction order", 0, misplaced)?;
        let pinned: FxHashSet<_> = self.prefixes.pinned().map(|(_, hash)| *hash).collect();
        count("pinned blocks", self.stats.pinned_blocks.into(), pinned.len() as u64)
    }

    fn check_counts(&self) -> Result<(), String> {
        let mut tenants: FxHashMap<TenantId, Tenant> = FxHashMap::default();
        for (at, group) in self.groups.iter().enumerate() {
            let (mut active, mut cached, mut written, mut tails) = (0u64, 0u64, 0u64, 0u64);
            for (_, slot) in group.pool.used() {
                let held = &mut tenants.entry(slot.tenant).or_default().held[at];
                if slot.refs > 0 {
                    active += 1;
                    written += u64::from(slot.filled);
                    held.active += 1;
                } else {
                    cached += 1;
                    tails += u64::from(slot.node().is_some_and(|node| self.nodes.node(node).is_tail()));
                    held.cached += 1;
                }
            }
            count("active blocks", group.stats.active_blocks.into(), active)?;
            count("cached blocks", group.stats.cached_blocks.into(), cached)?;
            count("written slots", group.stats.active_written_slots, written)?;
            count("blocks", group.pool.len().into(), active + cached + u64::from(group.pool.free()))?;
            if at == 0 {
                count("cached tails", self.stats.cached_tails.into(), tails)?;
            }
        }
        for (id, tenant) in &self.tenants {
            let actual = tenants.remove(id).unwrap_or_default();
            for (held, actual) in tenant.held.iter().zip(&actual.held) {
                count("active blocks of a tenant", held.active.into(), actual.active.into())?;
                count("cached blocks of a tenant", held.cached.into(), actual.cached.into())?;
            }
        }
        count("tenants that hold blocks and are not listed", 0, tenants.len() as u64)?;
        let mut sum = self.retired;
        for tenant in self.tenants.values() {
            sum.carry(&tenant.stats);
            sum.pinned_blocks += tenant.stats.pinned_blocks;
        }
        count("pinned blocks of all tenants", self.stats.pinned_blocks.into(), sum.pinned_blocks.into())?;
        if self.stats.queries != sum.queries {
            return Err(format!("of tenants there are {:?}, of all {:?}", sum.queries, self.stats.queries));
        }
        count("evictions", self.groups[0].stats.evictions, sum.evictions)
    }
}
