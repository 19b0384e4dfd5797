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
//! 5. *A copy per group*: a block written in part is copied in every cache group that has one, each with a copy of
//!    its own; 1 to 4 hold in each pool by itself.
//! 6. *A forked table's tail*: the first to write gets a copy, the last writes in place; its write comes after the copy.
//!
//! So every copy must be executed in the step in which it was handed out, unless every table that depends on it is
//! released in that step.

use std::ops::Range;
use std::sync::Arc;

use rustc_hash::FxHashMap;

use crate::account::TENANTS_LEAST;
use crate::blocks::Tenant;
use crate::counts::{GroupCounts, MAX_GROUPS};
use crate::events::Events;
use crate::group::Group;
use crate::hash::BlockHashes;
use crate::lease::Holds;
use crate::nodes::{Kind, Nodes, Parent};
use crate::policy::{EvictionPolicy, NONE, Retaining};
use crate::pool::BlockSlot;
use crate::prefixes::{PinLimits, Prefixes};
use crate::quota::Quotas;
use crate::stats::{CacheStats, QueryStats, TenantStats};
use crate::table::{BlockTable, Lists};
use crate::types::{BlockCopy, BlockId, CacheConfig, GroupConfig, HOLE, Layout, OutOfBlocks, TenantId};

/// Content, the pools it resides in, and the account of both. See the module documentation for what it asks of the executor, and
/// `group` for how groups hang together.
pub struct KvCache {
    pub(crate) config: CacheConfig,
    pub(crate) nodes: Nodes,
    /// Goes up whenever content comes or goes, in any group: what was found before need not be there, or not be all.
    pub(crate) version: u64,
    /// Group 0 first.
    pub(crate) groups: Vec<Group>,
    /// Of the groups, for tables.
    configs: Arc<[GroupConfig]>,
    /// Token ids of every indexed block of group 0 on the device, `[blocks, block_tokens]`.
    pub(crate) tokens: Vec<u32>,
    pub(crate) policy: Retaining,
    pub(crate) prefixes: Prefixes,
    /// Counters; the rest is put together when it is asked for.
    pub(crate) stats: CacheStats,
    pub(crate) tenants: FxHashMap<TenantId, Tenant>,
    /// Counters of tenants that were forgotten, summed.
    pub(crate) retired: TenantStats,
    /// Tenants from which on some are forgotten.
    pub(crate) retire_at: usize,
    pub(crate) quotas: Quotas,
    /// As last told.
    pub(crate) now_us: u64,
    pub(crate) holds: Holds,
    pub(crate) events: Events,
    pub(crate) spare: Vec<Lists>,
}

/// A commit that cannot be; nothing was changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{computed} positions cannot be committed: {before} were computed, there are {tokens} tokens and room for {capacity}"
)]
pub struct CommitRefused {
    pub computed: u32,
    pub before: u32,
    pub tokens: u32,
    pub capacity: u32,
}

impl KvCache {
    /// One group. `config.block_tokens` must be positive.
    pub fn new(config: CacheConfig, policy: Box<dyn EvictionPolicy>) -> Self {
        Self::with_groups(config, &[], policy)
    }

    /// `more` cache groups, at most [`MAX_GROUPS`] in all.
    pub fn with_groups(config: CacheConfig, more: &[GroupConfig], policy: Box<dyn EvictionPolicy>) -> Self {
        assert!(more.len() < MAX_GROUPS, "a model has at most {MAX_GROUPS} cache groups");
        let sizes = more.iter().map(|group| group.block_tokens);
        assert!(
            { sizes }.all(|size| size >= config.block_tokens && size % config.block_tokens == 0),
            "blocks of every group hold a multiple of what those of group 0 hold"
        );
        let configs = std::iter::once(config.first_group()).chain(more.iter().copied());
        let mut groups: Vec<Group> =
            configs.enumerate().map(|(at, config)| Group::new(config, at == 0)).collect();
        groups[1..].iter_mut().for_each(|group| group.places = vec![NONE; config.blocks as usize]);
        Self {
            config,
            nodes: Nodes::new(config.blocks),
            version: 0,
            configs: groups.iter().map(|group| group.config).collect(),
            groups,
            tokens: vec![0; config.blocks as usize * config.block_tokens as usize],
            policy: Retaining::new(policy, config.blocks),
            prefixes: Prefixes::new(PinLimits { pool: config.blocks / 4, tenant: config.blocks / 4 }),
            stats: CacheStats::default(),
            tenants: FxHashMap::default(),
            retired: TenantStats::default(),
            retire_at: TENANTS_LEAST,
            quotas: Quotas::default(),
            now_us: 0,
            holds: Holds::default(),
            events: Events::default(),
            spare: Vec::new(),
        }
    }

    pub fn config(&self) -> &CacheConfig {
        &self.config
    }

    /// Of group `group`.
    pub fn group_config(&self, group: usize) -> &GroupConfig {
        &self.groups[group].config
    }

    /// Groups that everybody needs: all but the optional ones.
    pub fn needed_groups(&self) -> usize {
        self.groups.iter().filter(|group| !group.config.optional).count()
    }

    /// Groups from 1 on.
    pub(crate) fn others(&self) -> std::ops::Range<usize> {
        1..self.groups.len()
    }

    /// Blocks that `grow` can get: free ones and those that would be given up for it. Pinned blocks are not among them.
    pub fn available(&self) -> GroupCounts {
        self.each_group(|group| self.available_in(group))
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
    pub fn empty_table(&mut self, mut hashes: BlockHashes) -> BlockTable {
        hashes.set_declared(false);
        self.table_of(hashes)
    }

    pub(crate) fn table_of(&mut self, hashes: BlockHashes) -> BlockTable {
        debug_assert_eq!(hashes.block_tokens(), self.config.block_tokens);
        BlockTable::new(hashes, self.configs.clone(), self.spare.pop().unwrap_or_default())
    }

    /// Blocks that `grow` to `tokens` positions would take, of optional groups none.
    pub fn needed(&self, table: &BlockTable, tokens: u32) -> GroupCounts {
        // No group's blocks end before those of group 0, but for those that follow them.
        if tokens <= table.capacity() && !table.may_share && table.tentative == 0 {
            return GroupCounts::default();
        }
        self.each_group(|group| self.needed_in(table, group, tokens))
    }

    pub(crate) fn needed_in(&self, table: &BlockTable, group: usize, tokens: u32) -> u32 {
        let of = &self.groups[group];
        if of.config.optional {
            return 0;
        }
        let blocks = of.config.blocks_of(tokens, table.tentative);
        let more = blocks.saturating_sub(table.lists[group].len() as u32);
        more + u32::from(self.shared_tail(table, group, tokens).is_some())
    }

    /// The partly written block of a group, if it is shared, or kept for others, and would be written.
    pub(crate) fn shared_tail(&self, table: &BlockTable, group: usize, tokens: u32) -> Option<usize> {
        let tail = table.partial_block(group).filter(|_| table.may_share && tokens > table.computed)?;
        let block = table.lists[group][tail];
        let is_others = |slot: &BlockSlot| slot.refs > 1 || slot.node().is_some();
        (block != HOLE && is_others(self.slot(group, block))).then_some(tail)
    }

    /// Whether [`KvCache::grow`] would change nothing, in optional groups either.
    pub fn is_grown(&self, table: &BlockTable, tokens: u32) -> bool {
        // Rows that may be taken back need blocks in state groups alone.
        let covers = |group: usize| {
            let blocks = self.groups[group].config.blocks_of(tokens, table.tentative);
            blocks as usize <= table.lists[group].len()
        };
        self.needed(table, tokens).is_zero() && (0..self.groups.len()).all(covers)
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
        if self.is_grown(table, tokens) {
            return Ok(());
        }
        let needed = self.needed(table, tokens);
        let tenant = table.hashes.root().tenant;
        if !needed.fits(self.available_to(tenant)) {
            return Err(OutOfBlocks);
        }
        for group in 0..self.groups.len() {
            if let Some(tail) = self.shared_tail(table, group, tokens) {
                self.replace_tail(table, group, tail, copies).ok_or(OutOfBlocks)?;
            }
            let blocks = self.groups[group].config.blocks_of(tokens, table.tentative) as usize;
            let optional = self.groups[group].config.optional;
            while table.lists[group].len() < blocks {
                let block = if table.goes_on(group) { self.take(group, tenant) } else { None };
                let block = if optional { block.unwrap_or(HOLE) } else { block.ok_or(OutOfBlocks)? };
                table.set(group, table.lists[group].len(), block);
            }
        }
        table.may_share &= tokens <= table.computed;
        Ok(())
    }

    /// Gives a table blocks of its own in optional groups, paged ones and states, that are written together, where one of them has holes:
    /// from [`BlockTable::written`] on, which is where all of them can go on. All or nothing: `false` where there is no room, or what
    /// lacks is another's to write.
    pub fn refill(&mut self, table: &mut BlockTable, groups: Range<usize>) -> bool {
        if groups.clone().all(|group| table.is_whole(group)) {
            return true;
        }
        let (tenant, from) = (table.hashes.root().tenant, self.goes_on_from(table, groups.clone()));
        let lacks = |group: usize| {
            let first = from.div_ceil(self.groups[group].config.block_tokens) as usize;
            let blocks = table.lists[group].iter().skip(first);
            blocks.filter(|block| !self.is_private(group, **block)).count()
        };
        let foreign = from < table.declared_blocks() * self.config.block_tokens;
        if foreign || groups.clone().any(|group| lacks(group) > self.available_in(group) as usize) {
            return false;
        }
        for group in groups {
            let size = self.groups[group].config.block_tokens;
            for index in from.div_ceil(size) as usize..table.lists[group].len() {
                if self.is_private(group, table.lists[group][index]) {
                    continue;
                }
                let Some(block) = self.take(group, tenant) else { return false };
                let start = index as u32 * size;
                self.set_filled(group, block, table.computed.saturating_sub(start).min(size));
                self.exchange(table, group, index, block);
            }
            table.published[group] = table.published[group].min(from / size);
        }
        table.written = table.written.min(from);
        true
    }

    /// Positions that a table has in all of these optional groups: up to the first hole; and none, where a state lacks or is that of more.
    fn goes_on_from(&self, table: &BlockTable, groups: Range<usize>) -> u32 {
        let is_state = |group: &usize| self.groups[*group].config.layout == Layout::State;
        let whole = |group: usize| {
            let blocks = table.lists[group].partition_point(|block| *block != HOLE);
            blocks as u32 * self.groups[group].config.block_tokens
        };
        let written = table.written();
        let from = groups.clone().filter(|group| !is_state(group)).map(whole).fold(written, u32::min);
        let there = |group: usize| table.held(group).first().is_some_and(|block| *block != HOLE);
        let goes_on = groups.filter(is_state).all(|group| from == written && there(group));
        if goes_on { from } else { 0 }
    }

    /// Whether a table alone has a block, and nothing is found there.
    fn is_private(&self, group: usize, block: BlockId) -> bool {
        block != HOLE && self.slot(group, block).refs == 1 && self.slot(group, block).node().is_none()
    }

    /// Entry `index` of a table becomes another block, which is referenced for it, or a hole; what was there is held no more.
    pub(crate) fn exchange(&mut self, table: &mut BlockTable, group: usize, index: usize, block: BlockId) {
        let before = table.lists[group][index];
        table.set(group, index, block);
        if before != HOLE {
            self.unreference(group, before);
        }
    }

    fn replace_tail(
        &mut self,
        table: &mut BlockTable,
        group: usize,
        tail: usize,
        copies: &mut Vec<BlockCopy>,
    ) -> Option<()> {
        let from = table.lists[group][tail];
        let Some(to) = self.take(group, table.hashes.root().tenant) else {
            // An optional group goes on without; behind a hole nothing of it is of use.
            if !self.groups[group].config.optional {
                return None;
            }
            (tail..table.lists[group].len()).for_each(|at| self.exchange(table, group, at, HOLE));
            return Some(());
        };
        let copied = table.computed % self.groups[group].config.block_tokens;
        self.set_filled(group, to, copied);
        self.exchange(table, group, tail, to);
        table.confirmed = table.confirmed.min(table.computed - copied);
        copies.push(BlockCopy { group: group as u32, from, to, tokens: copied });
        self.stats.copies += 1;
        Some(())
    }

    /// Says that positions `< computed` are written, publishes every block that became full, and releases what no query
    /// reads any more. If equal content is already there, the table switches to that block and drops its own. What transfers brought
    /// behind `computed` comes with it. `tokens` are all known tokens of the sequence, at least `computed` of them.
    pub fn commit(
        &mut self,
        table: &mut BlockTable,
        tokens: &[u32],
        computed: u32,
    ) -> Result<(), CommitRefused> {
        let (before, computable) = (table.computed, table.capacity().min(table.computable()));
        let arrived = table.arrived(computed);
        if computed < before || computed > computable || arrived as usize > tokens.len() {
            let tokens = tokens.len() as u32;
            return Err(CommitRefused { computed, before, tokens, capacity: computable });
        }
        let ended = table.transfers.iter().take_while(|(ticket, _)| arrived > computed && ticket.is_none());
        drop(table.transfers.drain(..ended.count()));
        table.confirmed = arrived;
        table.query = QueryStats::default();
        if arrived == before {
            return Ok(());
        }
        self.keep_states(table, computed);
        let computed = arrived;
        table.hashes.extend(&tokens[..computed as usize]);
        self.fill(table, computed);
        let size = self.config.block_tokens;
        let published = table.published[0];
        for index in published..computed / size {
            let start = (index * size) as usize;
            self.publish(table, index as usize, &tokens[start..start + size as usize]);
        }
        table.published[0] = computed / size;
        table.computed = computed;
        let first = self.publish_others(table).min(published);
        for index in first..computed / size {
            self.supersede(table.lists[0][index as usize]);
        }
        self.slide(table, before);
        Ok(())
    }

    /// Rows that might have been taken back, and are not, left states in blocks behind the others: those behind full blocks, and the
    /// last, go where they belong. What was there is overwritten by whoever is next.
    fn keep_states(&mut self, table: &mut BlockTable, computed: u32) {
        let tentative = table.tentative_from;
        for group in self.others().filter(|_| computed > tentative) {
            let config = self.groups[group].config;
            // Of the last draft a drafter has no state.
            let computed = if config.optional { computed.min(table.written) } else { computed };
            let ends = |position: u32| {
                (position + 1).is_multiple_of(config.block_tokens) || position + 1 == computed
            };
            let positions = table.computed.max(tentative)..computed;
            for position in positions.filter(|position| config.layout == Layout::State && ends(*position)) {
                let from = config.blocks_of(tentative, 0) + position - tentative;
                let to = position / config.block_tokens;
                if from != to {
                    self.set_filled(group, table.lists[group][to as usize], 0);
                    table.lists[group].swap(from as usize, to as usize);
                    table.change(to * config.block_tokens);
                }
            }
        }
    }

    /// Keeps the states of a table that is computed exactly as far as what others began with ([`BlockTable::branch`]), where that ends within a
    /// block of theirs: they reside under the node they end with, and [`KvCache::grow`] has the table go on in copies. Elsewhere nothing
    /// happens. Only while nothing behind is written.
    pub fn keep_branch(&mut self, table: &mut BlockTable) {
        let blocks = table.missed as usize;
        if blocks == 0 || table.computed != table.missed * self.config.block_tokens || table.overwritten {
            return;
        }
        let node = self.node_of(table.lists[0][blocks - 1]);
        for group in self.others() {
            let config = self.groups[group].config;
            let is_state = config.layout == Layout::State && !config.optional;
            let Some(index) = table.partial_block(group).filter(|_| is_state) else { continue };
            let block = table.lists[group][index];
            if self.slot(group, block).refs == 1 && self.place(group, node).is_none() {
                self.protect(group, block);
                self.publish_in(group, block, node);
                table.may_share = true;
            }
        }
    }

    fn fill(&mut self, table: &BlockTable, computed: u32) {
        for group in 0..self.groups.len() {
            let size = self.groups[group].config.block_tokens;
            for index in table.computed / size..computed.div_ceil(size) {
                let block = table.lists[group][index as usize];
                if block != HOLE {
                    debug_assert_eq!(self.slot(group, block).refs, 1, "written without grow");
                    self.set_filled(group, block, size.min(computed - index * size));
                }
            }
        }
    }

    fn publish(&mut self, table: &mut BlockTable, index: usize, tokens: &[u32]) {
        debug_assert!(index as u32 >= table.declared_blocks(), "what is shared is its owner's to write");
        let own = table.lists[0][index];
        let hash = *table.hashes.get(index as u32).expect("what is computed is hashed");
        if let Some(duplicate) = self.find_block(&hash) {
            self.reference(0, duplicate);
            self.exchange(table, 0, index, duplicate);
            self.stats.dedups += 1;
            return;
        }
        let parent = self.parent(table, index);
        let node = self.nodes.insert(parent, table.hashes.root().tenant, Some(hash), own.0);
        if let (Parent::Root(root), Some(before)) = (parent, index.checked_sub(1)) {
            let before = self.nodes.node(self.node_of(table.lists[0][before])).hash;
            self.nodes.set_behind(&root, before);
        }
        let first = index as u32 * self.config.block_tokens;
        let placeholder = table.hashes.first_placeholder(first, first + self.config.block_tokens);
        if placeholder.is_some() {
            self.nodes.node_mut(node).kind = Kind::WithPlaceholders;
        }
        self.publish_block(own, node, tokens);
        self.stats.published_blocks += 1;
    }

    /// Blocks of the other groups that are full now become the places of the nodes that they end with, or give way to those
    /// that are there. Returns the first block of group 0 that this may have been about.
    fn publish_others(&mut self, table: &mut BlockTable) -> u32 {
        let size = self.config.block_tokens;
        let mut first = table.published[0];
        for group in self.others() {
            let ratio = self.groups[group].config.block_tokens / size;
            let (from, to) = (table.published[group], table.full_blocks(group));
            for index in from..to {
                self.publish_place(table, group, index as usize, (index + 1) * ratio - 1);
            }
            table.published[group] = to;
            first = first.min(from * ratio);
        }
        first
    }

    /// Block `index` of a group holds the end of the table's block `last` of group 0.
    pub(crate) fn publish_place(&mut self, table: &mut BlockTable, group: usize, index: usize, last: u32) {
        let own = table.lists[group][index];
        if own == HOLE {
            return;
        }
        let node = self.node_of(table.lists[0][last as usize]);
        match self.place(group, node) {
            None => self.publish_in(group, own, node),
            Some(duplicate) if duplicate != own => {
                self.reference(group, duplicate);
                self.exchange(table, group, index, duplicate);
            }
            Some(_) => {}
        }
    }

    /// What block `index` of the table's group 0 continues.
    pub(crate) fn parent(&self, table: &BlockTable, index: usize) -> Parent {
        match table.root().base(index as u32) {
            Some(base) => Parent::Root(base),
            None => Parent::Node(self.node_of(table.lists[0][index - 1])),
        }
    }
}
