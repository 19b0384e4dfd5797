//! What a modelled device holds: a value in every position of every slot.
//!
//! Owns: the cells. Must never: know whose they are. A handle is shared by the device, which computes steps with it, and by those who
//! read and write beside the steps (`transfers`).

use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use folio_kv::{GroupConfig, Layout};
use folio_model::backend::Batch;
use folio_model::check::PoolSize;

/// Memory of one cache group.
pub(crate) struct GroupMemory {
    pub config: GroupConfig,
    /// `[blocks * cells of a block]`, 0 where nothing was ever written.
    pub cells: Vec<u64>,
}

/// Cells of a block: one for each position, or for the state behind the last.
pub(crate) fn block_cells(group: &GroupConfig) -> usize {
    if group.layout == Layout::State { 1 } else { group.block_tokens as usize }
}

impl GroupMemory {
    pub fn new(config: GroupConfig) -> Self {
        Self { config, cells: vec![0; config.blocks as usize * block_cells(&config)] }
    }

    pub fn size(&self) -> PoolSize {
        let GroupConfig { layout, blocks, block_tokens, .. } = self.config;
        let is_state = layout == Layout::State;
        PoolSize { blocks: blocks as usize, block_tokens: block_tokens as usize, is_state }
    }

    fn range(&self, block: u32) -> Range<usize> {
        let cells = block_cells(&self.config);
        block as usize * cells..(block as usize + 1) * cells
    }

    pub fn block(&self, block: u32) -> &[u64] {
        &self.cells[self.range(block)]
    }

    pub fn block_mut(&mut self, block: u32) -> &mut [u64] {
        let range = self.range(block);
        &mut self.cells[range]
    }
}

/// A handle of all groups' memory.
#[derive(Clone, Default)]
pub struct Memory(Arc<Mutex<Vec<GroupMemory>>>);

impl Memory {
    pub(crate) fn groups(&self) -> MutexGuard<'_, Vec<GroupMemory>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What a step copies before it computes anything, in order.
pub(crate) fn copy_blocks(groups: &mut [GroupMemory], batch: &Batch) {
    for copy in &batch.copies {
        let group = &mut groups[copy.group as usize];
        let (from, to) = (group.range(copy.from), group.range(copy.to).start);
        group.cells.copy_within(from.start..from.end.min(from.start + copy.tokens as usize), to);
    }
}
