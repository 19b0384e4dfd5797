//! The block table of one sequence: which block holds which positions, and how far they are written.
//!
//! Owns: the list. Must never: change by itself; only [`crate::KvCache`] adds, swaps or drops blocks, because every
//! entry is a counted reference.
//!
//! Invariants: `confirmed <= computed <= capacity`; every block whose positions are all `< computed` is published (its
//! index entry is the very block the table holds); blocks beyond `computed` belong to this table alone.

use crate::types::{BlockId, Root};

/// Blocks of one sequence, in position order. Hand it back with [`crate::KvCache::release`]: a table that is merely
/// dropped leaks its references (`KvCache::check` reports that).
#[derive(Debug)]
#[must_use = "a dropped table leaks its blocks: give it to KvCache::release"]
pub struct BlockTable {
    pub(crate) root: Root,
    pub(crate) blocks: Vec<BlockId>,
    pub(crate) block_tokens: u32,
    /// Positions `< computed` are (or, after this step's copies, will be) in the cache.
    pub(crate) computed: u32,
    /// Positions `< confirmed` are known to be in memory: no copy of theirs is still pending.
    pub(crate) confirmed: u32,
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
}

impl BlockTable {
    pub(crate) fn new(root: Root, block_tokens: u32, blocks: Vec<BlockId>) -> Self {
        Self { root, blocks, block_tokens, computed: 0, confirmed: 0, query: Query::default() }
    }

    /// Blocks in position order; block `i` holds positions `i * block_tokens ..`.
    pub fn blocks(&self) -> &[BlockId] {
        &self.blocks
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
    }

    pub fn root(&self) -> &Root {
        &self.root
    }

    pub fn is_empty(&self) -> bool {
        self.blocks.is_empty()
    }

    /// Blocks that are full and published.
    pub(crate) fn full_blocks(&self) -> u32 {
        self.computed / self.block_tokens
    }

    /// Index of the block that is written in part, if there is one.
    pub(crate) fn partial_block(&self) -> Option<usize> {
        (!self.computed.is_multiple_of(self.block_tokens)).then(|| self.full_blocks() as usize)
    }
}
