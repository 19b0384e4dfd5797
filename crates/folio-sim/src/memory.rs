//! What a modelled device holds: a value in every position of every slot, on the device and in its host's swap space.
//!
//! Owns: the cells. Must never: know whose they are. A handle is shared by the device, which computes steps with it, and by those who
//! read and write beside the steps (`transfers`).

use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use folio_kv::GroupConfig;
use folio_model::backend::{BackendError, Batch, BlockSwap};
use folio_model::check::PoolSize;

/// Memory of one cache group.
pub(crate) struct GroupMemory {
    pub block_tokens: usize,
    /// Positions a row reads, itself included.
    pub window: u32,
    /// `[blocks * block_tokens]`, 0 where nothing was ever written.
    pub cells: Vec<u64>,
    /// `[slots * block_tokens]` of the swap space.
    swapped: Vec<u64>,
}

impl GroupMemory {
    pub fn new(blocks: usize, block_tokens: usize, window: u32) -> Self {
        Self { block_tokens, window, cells: vec![0; blocks * block_tokens], swapped: Vec::new() }
    }

    pub fn of(group: &GroupConfig) -> Self {
        let window = group.layout.reach().unwrap_or(u32::MAX);
        Self::new(group.blocks as usize, group.block_tokens as usize, window)
    }

    pub fn size(&self) -> PoolSize {
        let (blocks, slots) = (self.cells.len() / self.block_tokens, self.swapped.len() / self.block_tokens);
        PoolSize { blocks, slots, block_tokens: self.block_tokens }
    }

    pub fn set_swap(&mut self, slots: usize) {
        self.swapped = vec![0; slots * self.block_tokens];
    }

    fn range(&self, block: u32) -> Range<usize> {
        block as usize * self.block_tokens..(block as usize + 1) * self.block_tokens
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
        let (from, to) = (group.range(copy.from).start, group.range(copy.to).start);
        group.cells.copy_within(from..from + copy.tokens as usize, to);
    }
    for swap in &batch.swap_ins {
        let group = &mut groups[swap.group as usize];
        let [block, slot] = group.ends(swap)?;
        group.cells[block].copy_from_slice(&group.swapped[slot]);
    }
    Ok(())
}
