//! What a modelled device holds: a value in every position of every slot, on the device and in its host's swap space.
//!
//! Owns: the cells. Must never: know whose they are. A handle is shared by the device, which computes steps with it, and by those who
//! read and write beside the steps (`transfers`).

use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use folio_kv::{GroupConfig, Layout};
use folio_model::backend::{BackendError, Batch, BlockSwap};
use folio_model::check::PoolSize;

/// Memory of one cache group.
pub(crate) struct GroupMemory {
    pub config: GroupConfig,
    /// `[blocks * cells of a block]`, 0 where nothing was ever written.
    pub cells: Vec<u64>,
    /// The same of the slots of the swap space.
    swapped: Vec<u64>,
}

/// Cells of a block: one for each position, or for the state behind the last.
pub(crate) fn block_cells(group: &GroupConfig) -> usize {
    if group.layout == Layout::State { 1 } else { group.block_tokens as usize }
}

impl GroupMemory {
    pub fn new(config: GroupConfig) -> Self {
        Self { config, cells: vec![0; config.blocks as usize * block_cells(&config)], swapped: Vec::new() }
    }

    pub fn size(&self) -> PoolSize {
        let (cells, block_tokens) = (block_cells(&self.config), self.config.block_tokens as usize);
        PoolSize { blocks: self.config.blocks as usize, slots: self.swapped.len() / cells, block_tokens }
    }

    pub fn set_swap(&mut self, slots: usize) {
        self.swapped = vec![0; slots * block_cells(&self.config)];
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

    /// Where the two ends of a swap lie.
    fn ends(&self, swap: &BlockSwap) -> Result<[Range<usize>; 2], BackendError> {
        let (block, slot) = (self.range(swap.block), self.range(swap.slot));
        if block.end > self.cells.len() || slot.end > self.swapped.len() {
            return Err(BackendError::Batch(format!("{swap:?} is outside of the pool or its swap space")));
        }
        Ok([block, slot])
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

/// What a step moves before it computes anything, in order.
pub(crate) fn move_blocks(groups: &mut [GroupMemory], batch: &Batch) -> Result<(), BackendError> {
    for swap in &batch.swap_outs {
        let group = &mut groups[swap.group as usize];
        let [block, slot] = group.ends(swap)?;
        group.swapped[slot].copy_from_slice(&group.cells[block]);
    }
    for copy in &batch.copies {
        let group = &mut groups[copy.group as usize];
        let (from, to) = (group.range(copy.from), group.range(copy.to).start);
        group.cells.copy_within(from.start..from.end.min(from.start + copy.tokens as usize), to);
    }
    for swap in &batch.swap_ins {
        let group = &mut groups[swap.group as usize];
        let [block, slot] = group.ends(swap)?;
        group.cells[block].copy_from_slice(&group.swapped[slot]);
    }
    Ok(())
}
