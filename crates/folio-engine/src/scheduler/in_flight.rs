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

use folio_kv::BlockHash;
use rustc_hash::FxHashMap;

use crate::sequence::Slot;

#[derive(Default)]
pub(crate) struct InFlight {
    owner: FxHashMap<BlockHash, Slot>,
}

impl InFlight {
    pub fn owner(&self, hash: &BlockHash) -> Option<Slot> {
        self.owner.get(hash).copied()
    }

    /// `slot` is about to publish the full prompt blocks from `from` on.
    pub fn announce(&mut self, slot: Slot, hashes: &[BlockHash], from: u32) -> (u32, u32) {
        let to = hashes.len() as u32;
        for hash in &hashes[from.min(to) as usize..] {
            self.owner.entry(*hash).or_insert(slot);
        }
        (from.min(to), to)
    }

    /// Blocks before `upto` were published.
    pub fn published(&mut self, slot: Slot, hashes: &[BlockHash], announced: &mut (u32, u32), upto: u32) {
        while announced.0 < upto.min(announced.1) {
            let hash = &hashes[announced.0 as usize];
            if self.owner.get(hash) == Some(&slot) {
                self.owner.remove(hash);
            }
            announced.0 += 1;
        }
    }

    /// Nothing more of it will be computed.
    pub fn withdraw(&mut self, slot: Slot, hashes: &[BlockHash], announced: &mut (u32, u32)) {
        self.published(slot, hashes, announced, announced.1);
    }

    pub fn len(&self) -> usize {
        self.owner.len()
    }
}
