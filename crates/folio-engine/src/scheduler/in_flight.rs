//! Prefixes that are being computed right now, so that they are computed once.
//!
//! Owns: block hash -> the running sequence that will publish that block. Must never: decide who waits.
//!
//! Invariants: every entry's owner is running and has not computed that block yet; a block has one owner. A sequence
//! that waits for an entry is woken by its absence: published, or the owner ended or was preempted. An owner never
//! waits for an entry itself (only waiting sequences do), so there are no cycles.
//!
//! Cost: O(blocks of the prompt) once per sequence, one lookup per waiting sequence and step. Hashes start at a
//! tenant's root, so nobody waits for another tenant.

use folio_kv::{BlockHash, BlockTable};
use rustc_hash::FxHashMap;

use crate::sequence::{Sequence, Slot};

#[derive(Default)]
pub(crate) struct InFlight {
    owner: FxHashMap<BlockHash, Slot>,
}

impl InFlight {
    pub fn owner(&self, hash: &BlockHash) -> Option<Slot> {
        self.owner.get(hash).copied()
    }

    /// `sequence` is about to publish the full prompt blocks that are not in the index yet.
    pub fn announce(&mut self, slot: Slot, sequence: &mut Sequence) {
        let from = sequence.table.as_ref().map_or(0, BlockTable::published_blocks);
        // What an operator shares is computed by its owner alone, whoever waits for it.
        let from = from.max(sequence.hashes_shared.unwrap_or(0));
        let to = sequence.hashes.len() as u32;
        sequence.announced = (from.min(to), to);
        for hash in &sequence.hashes[from.min(to) as usize..] {
            self.owner.entry(*hash).or_insert(slot);
        }
    }

    /// Blocks before `sequence.computed` were published.
    pub fn published(&mut self, slot: Slot, sequence: &mut Sequence, block_tokens: u32) {
        let upto = (sequence.computed / block_tokens).min(sequence.announced.1);
        self.withdraw_until(slot, sequence, upto);
    }

    /// `sequence` will compute nothing more.
    pub fn withdraw(&mut self, slot: Slot, sequence: &mut Sequence) {
        self.withdraw_until(slot, sequence, sequence.announced.1);
    }

    fn withdraw_until(&mut self, slot: Slot, sequence: &mut Sequence, upto: u32) {
        while sequence.announced.0 < upto {
            let hash = &sequence.hashes[sequence.announced.0 as usize];
            if self.owner.get(hash) == Some(&slot) {
                self.owner.remove(hash);
            }
            sequence.announced.0 += 1;
        }
    }

    pub fn len(&self) -> usize {
        self.owner.len()
    }
}
