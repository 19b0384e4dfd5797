//! The block table of one sequence: which block holds which positions, and how far they are written.
//!
//! Owns: the list. Must never: change by itself; only [`crate::KvCache`] adds, swaps or drops blocks, because every
//! entry is a counted reference.
//!
//! Invariants: `confirmed <= computed <= capacity`; every block whose positions are all `< computed` is published (its
//! index entry is the very block the table holds); blocks beyond `computed` belong to this table alone. A window group's
//! list is as long as that of group 0; it holds exactly the blocks from the window of the next query on, and before them
//! holes.

use crate::stats::MAX_WINDOWS;
use crate::types::{BlockId, Root, first_block};

/// Blocks of one sequence, in position order. Hand it back with [`crate::KvCache::release`]: a table that is merely
/// dropped leaks its references (`KvCache::check` reports that).
#[derive(Debug)]
#[must_use = "a dropped table leaks its blocks: give it to KvCache::release"]
pub struct BlockTable {
    pub(crate) root: Root,
    /// Of group 0.
    pub(crate) blocks: Vec<BlockId>,
    /// Of each window group, `HOLE` behind the window; empty where there is no such group.
    pub(crate) windows: [Vec<BlockId>; MAX_WINDOWS],
    /// Length of each window; 0 where there is no such group.
    pub(crate) window_tokens: [u32; MAX_WINDOWS],
    pub(crate) block_tokens: u32,
    /// Positions `< computed` are (or, after this step's copies, will be) in the cache.
    pub(crate) computed: u32,
    /// Positions `< confirmed` are known to be in memory: no copy of theirs is still pending.
    pub(crate) confirmed: u32,
    /// Leading blocks that are in the index: all full ones, unless the table came from a copy and its step has not run.
    pub(crate) published: u32,
    /// It came from a copy and its step has not run.
    pub(crate) restored: bool,
    /// Blocks that a lookup found in group 0 and could not attach: where a hit would have ended, had the windows been there.
    pub(crate) missed: u32,
    /// What `attach` counted for this table, so that `abandon` can take it back.
    pub(crate) query: Query,
}

/// What one `attach` added to the hit statistics.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Query {
    pub queries: u64,
    pub tokens: u64,
    pub hit: u64,
    pub tail_hit: u64,
    pub copies: u64,
    pub window_miss: u64,
}

/// The emptied vectors of a table, kept for the next one.
#[derive(Debug, Default)]
pub(crate) struct Lists {
    pub blocks: Vec<BlockId>,
    pub windows: [Vec<BlockId>; MAX_WINDOWS],
}

impl BlockTable {
    pub(crate) fn new(
        root: Root,
        block_tokens: u32,
        window_tokens: [u32; MAX_WINDOWS],
        lists: Lists,
    ) -> Self {
        let Lists { blocks, windows } = lists;
        Self {
            root,
            blocks,
            windows,
            window_tokens,
            block_tokens,
            computed: 0,
            confirmed: 0,
            published: 0,
            restored: false,
            missed: 0,
            query: Query::default(),
        }
    }

    /// Blocks of group 0 in position order; block `i` holds positions `i * block_tokens ..`.
    pub fn blocks(&self) -> &[BlockId] {
        &self.blocks
    }

    /// Cache groups, at least 1.
    pub fn groups(&self) -> usize {
        1 + self.window_count()
    }

    /// Blocks of a group in position order, as many in each. In a window group [`crate::HOLE`] stands for a block behind
    /// the window.
    pub fn group(&self, group: usize) -> &[BlockId] {
        match group.checked_sub(1) {
            None => &self.blocks,
            Some(window) => &self.windows[window],
        }
    }

    pub(crate) fn window_count(&self) -> usize {
        self.window_tokens.iter().take_while(|tokens| **tokens > 0).count()
    }

    /// First block of a window group that is not behind the window of the query at `computed`.
    pub(crate) fn first_block(&self, window: usize, computed: u32) -> u32 {
        first_block(self.window_tokens[window], computed, self.block_tokens)
    }

    /// Blocks of a window group that the table holds.
    pub(crate) fn held(&self, window: usize) -> &[BlockId] {
        let blocks = &self.windows[window];
        &blocks[(self.first_block(window, self.computed) as usize).min(blocks.len())..]
    }

    /// Positions `0 .. computed` need not be computed.
    pub fn computed(&self) -> u32 {
        self.computed
    }

    /// Positions the blocks have room for.
    pub fn capacity(&self) -> u32 {
        self.blocks.len() as u32 * self.block_tokens
    }

    /// Sets memory aside for the block numbers of `positions`, so that growing so far allocates nothing.
    pub fn reserve(&mut self, positions: u32) {
        let blocks = positions.div_ceil(self.block_tokens) as usize;
        self.blocks.reserve_exact(blocks.saturating_sub(self.blocks.len()));
        for window in 0..self.window_count() {
            let list = &mut self.windows[window];
            list.reserve_exact(blocks.saturating_sub(list.len()));
        }
    }

    pub fn root(&self) -> &Root {
        &self.root
    }

    pub fn is_empty(&self) -> bool {
        self.blocks.is_empty()
    }

    /// Leading blocks that are in the index.
    pub fn published_blocks(&self) -> u32 {
        self.published
    }

    /// Blocks that are full, and published between steps.
    pub(crate) fn full_blocks(&self) -> u32 {
        self.computed / self.block_tokens
    }

    /// Index of the block that is written in part, if there is one.
    pub(crate) fn partial_block(&self) -> Option<usize> {
        (!self.computed.is_multiple_of(self.block_tokens)).then(|| self.full_blocks() as usize)
    }
}
