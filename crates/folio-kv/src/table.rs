//! The block table of one sequence: which block of each group holds which positions, and how far they are written.
//!
//! Owns: the lists, and what identifies their content. Must never: change by itself; only [`crate::KvCache`] adds or
//! drops blocks, because every entry is a counted reference.
//!
//! Invariants: `confirmed <= computed <= capacity`; every block whose positions are all `< computed` is published (its
//! node resides in the very block the table holds); blocks beyond `computed` belong to this table alone, and the last of them to
//! transfers that write them. A group's list holds exactly the blocks from those that the next query reads on, and before them holes.
//! In a state group the blocks of rows that may be taken back follow those of the positions before them.

use std::sync::Arc;

use crate::counts::MAX_GROUPS;
use crate::hash::BlockHashes;
use crate::lease::Ticket;
use crate::stats::QueryStats;
use crate::types::{BlockId, GroupConfig, HOLE, Layout, Root};

/// Blocks of one sequence, in position order. Hand it back with [`crate::KvCache::release`]: a table that is merely
/// dropped leaks its references (`KvCache::check` reports that).
#[derive(Debug)]
#[must_use = "a dropped table leaks its blocks: give it to KvCache::release"]
pub struct BlockTable {
    pub(crate) hashes: BlockHashes,
    /// Of each group, `HOLE` where it holds none.
    pub(crate) lists: Lists,
    pub(crate) groups: Arc<[GroupConfig]>,
    /// Positions `< computed` are (or, after this step's copies, will be) in the cache.
    pub(crate) computed: u32,
    /// Some entries are not what they were when that was asked last: any behind so many positions, before them only new holes.
    pub(crate) changed: Option<u32>,
    /// Most rows of a step that may be taken back, the next one's; and the position from which on those under way may be.
    pub(crate) tentative: u32,
    pub(crate) tentative_from: u32,
    /// Steps wrote behind `computed` what will not be confirmed.
    pub(crate) overwritten: bool,
    /// It was forked, or is a fork, and has not been seen alone in a block since.
    pub(crate) may_share: bool,
    /// Positions `< confirmed` are known to be in memory: no copy of theirs is still pending.
    pub(crate) confirmed: u32,
    /// Positions `< written` of optional groups are in the cache, or all that are computed: a drafter may lag behind.
    pub(crate) written: u32,
    /// Nobody computes in optional groups.
    pub(crate) left_out: bool,
    /// Leading blocks of each group that are published, or never will be: all full ones, unless some are being loaded, or not written.
    pub(crate) published: [u32; MAX_GROUPS],
    /// Its last blocks, which transfers write: for each transfer, in order, how many of group 0; without a ticket, one that ended
    /// before one in front of it.
    pub(crate) transfers: Vec<(Option<Ticket>, u32)>,
    /// Blocks that a lookup found in group 0 and could not attach: where a hit would have ended, had the windows been there.
    pub(crate) missed: u32,
    /// What `attach` counted for this table, until a step of it is committed.
    pub(crate) query: QueryStats,
}

/// Slots of each group, in one tier.
pub(crate) type Lists = [Vec<BlockId>; MAX_GROUPS];

impl BlockTable {
    pub(crate) fn new(hashes: BlockHashes, groups: Arc<[GroupConfig]>, lists: Lists) -> Self {
        Self {
            hashes,
            lists,
            groups,
            computed: 0,
            changed: Some(0),
            tentative: 0,
            tentative_from: u32::MAX,
            overwritten: false,
            may_share: false,
            confirmed: 0,
            written: u32::MAX,
            left_out: false,
            published: [0; MAX_GROUPS],
            transfers: Vec::new(),
            missed: 0,
            query: QueryStats::default(),
        }
    }

    /// Blocks of group 0 in position order; block `i` holds positions `i * block_tokens ..`.
    pub fn blocks(&self) -> &[BlockId] {
        &self.lists[0]
    }

    /// Cache groups, at least 1.
    pub fn groups(&self) -> usize {
        self.groups.len()
    }

    /// Blocks of a group in position order. [`crate::HOLE`] stands for a block that it does not hold.
    pub fn group(&self, group: usize) -> &[BlockId] {
        &self.lists[group]
    }

    /// Entry `index` of a group, or one behind its last, is another block now.
    pub(crate) fn set(&mut self, group: usize, index: usize, block: BlockId) {
        self.change(index as u32 * self.block_tokens(group));
        match self.lists[group].get_mut(index) {
            Some(entry) => *entry = block,
            None => self.lists[group].push(block),
        }
    }

    /// Entries from position `from` on are others now.
    pub(crate) fn change(&mut self, from: u32) {
        self.changed = Some(self.changed.map_or(from, |before| before.min(from)));
    }

    /// What changed in the entries of all groups since this was asked last: any of them behind so many positions, and before
    /// those only that some have become holes. `None`: nothing.
    pub fn take_changed(&mut self) -> Option<u32> {
        self.changed.take()
    }

    /// So many rows of the next step may be taken back: drafts, and what waits for its mask. [`crate::KvCache::grow`] gives them
    /// blocks of their own in state groups.
    pub fn set_tentative(&mut self, rows: u32) {
        self.tentative = rows;
    }

    /// A step is planned whose rows from position `from` on may be taken back; it is committed before another is planned with this
    /// table. `None`: none of its rows may be.
    pub fn plan_tentative(&mut self, from: Option<u32>) {
        self.tentative_from = from.unwrap_or(u32::MAX);
    }

    /// Rows behind `computed` were computed, or may be, and will not be confirmed: a state that they overwrote is of no use.
    pub fn set_overwritten(&mut self) {
        self.overwritten = true;
    }

    /// Of optional groups, steps wrote positions `< written` and nothing behind: a drafter need not keep up. Told before the commit that it is
    /// about.
    pub fn set_written(&mut self, written: u32) {
        self.written = written;
    }

    /// Nobody computes in optional groups, so no more blocks of them are taken for it.
    pub fn leave_out(&mut self) {
        self.left_out = true;
    }

    /// Positions of optional groups that are in the cache.
    pub fn written(&self) -> u32 {
        self.written.min(self.computed)
    }

    /// Positions behind which a group goes on: of a drafter's states those that it wrote, however far it lags behind.
    pub(crate) fn goes_on_at(&self, group: usize) -> u32 {
        let config = &self.groups[group];
        if config.optional && config.layout == Layout::State { self.written() } else { self.computed }
    }

    /// Whether it holds every block of an optional group that is read or written next: without holes there, what computes there can go on.
    pub fn is_whole(&self, group: usize) -> bool {
        let held = self.held(group);
        held.first() != Some(&HOLE) && held.last() != Some(&HOLE)
    }

    /// Whether one more block of a group is of use: of an optional group none is behind a hole, or where nobody computes.
    pub(crate) fn goes_on(&self, group: usize) -> bool {
        !self.groups[group].optional || (!self.left_out && self.is_whole(group))
    }

    /// Tokens per block of a group.
    pub fn block_tokens(&self, group: usize) -> u32 {
        self.groups[group].block_tokens
    }

    /// Entries of a group from the first that the next query reads on.
    pub(crate) fn held(&self, group: usize) -> &[BlockId] {
        let blocks = &self.lists[group];
        let first = self.groups[group].first_block(self.goes_on_at(group)) as usize;
        &blocks[first.min(blocks.len())..]
    }

    /// Positions `0 .. computed` need not be computed.
    pub fn computed(&self) -> u32 {
        self.computed
    }

    /// Positions the blocks have room for.
    pub fn capacity(&self) -> u32 {
        self.lists[0].len() as u32 * self.block_tokens(0)
    }

    /// Sets memory aside for `positions`, so that growing so far and committing it allocates nothing.
    pub fn reserve(&mut self, positions: u32) {
        self.hashes.reserve(positions);
        for (list, config) in self.lists.iter_mut().zip(self.groups.iter()) {
            let blocks = positions.div_ceil(config.block_tokens) as usize;
            list.reserve_exact(blocks.saturating_sub(list.len()));
        }
    }

    /// What identifies its content.
    pub fn hashes(&self) -> &BlockHashes {
        &self.hashes
    }

    /// The root that it was attached with: without what is shared where that was of no use.
    pub fn root(&self) -> Root {
        self.hashes.chain_root()
    }

    pub(crate) fn declared_blocks(&self) -> u32 {
        self.hashes.declared_blocks()
    }

    /// The transfers that write blocks of it and have not reported.
    pub fn tickets(&self) -> impl Iterator<Item = Ticket> {
        self.transfers.iter().filter_map(|(ticket, _)| *ticket)
    }

    /// Whether this one does.
    pub fn has_ticket(&self, ticket: Ticket) -> bool {
        self.tickets().any(|own| own == ticket)
    }

    /// Whether any transfer does.
    pub fn has_transfers(&self) -> bool {
        !self.transfers.is_empty()
    }

    /// Where what others began with, too, ends within a block of states, if it is not computed so far: whoever comes third goes on from there
    /// if a step ends there and its state is kept ([`crate::KvCache::keep_branch`]).
    pub fn branch(&self) -> Option<u32> {
        let branch = self.missed * self.block_tokens(0);
        let mut states = self.groups.iter().filter(|group| group.layout == Layout::State && !group.optional);
        let is_within = states.any(|group| !branch.is_multiple_of(group.block_tokens));
        (branch > self.computed && is_within).then_some(branch)
    }

    /// Positions that steps may compute: those behind are written by transfers.
    pub fn computable(&self) -> u32 {
        if self.transfers.is_empty() {
            return u32::MAX;
        }
        let written: u32 = self.transfers.iter().map(|(_, blocks)| blocks).sum();
        self.capacity() - written * self.block_tokens(0)
    }

    /// Positions that are there when `computed` are: behind those come what transfers brought that had to wait for them.
    pub(crate) fn arrived(&self, computed: u32) -> u32 {
        if self.transfers.is_empty() || computed != self.computable() {
            return computed;
        }
        let ended = self.transfers.iter().take_while(|(ticket, _)| ticket.is_none());
        computed + ended.map(|(_, blocks)| blocks).sum::<u32>() * self.block_tokens(0)
    }

    /// Blocks of a group that no transfer writes: all but the last ones.
    pub(crate) fn own_blocks(&self, group: usize) -> u32 {
        (self.lists[group].len() as u32).min(self.computable() / self.block_tokens(group))
    }

    /// Leading blocks of group 0 that are in the index.
    pub fn published_blocks(&self) -> u32 {
        self.published[0]
    }

    /// Blocks that are full, and published between steps.
    pub(crate) fn full_blocks(&self, group: usize) -> u32 {
        let written = if self.groups[group].optional { self.written() } else { self.computed };
        written / self.block_tokens(group)
    }

    /// Index of the block of a group that is written in part, if there is one.
    pub(crate) fn partial_block(&self, group: usize) -> Option<usize> {
        let size = self.block_tokens(group);
        (!self.computed.is_multiple_of(size)).then_some((self.computed / size) as usize)
    }
}
