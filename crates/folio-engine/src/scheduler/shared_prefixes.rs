//! Prefixes that are being computed right now, so that they are computed once.
//!
//! Owns: block hash -> the running sequence that will publish that block. Must never: decide who waits.
//!
//! Invariants: every entry's producer is running and has not computed that block yet; a block has one producer. A sequence
//! that waits for an entry is woken by its absence: published, or the producer ended or was preempted. A producer never
//! waits for an entry itself (only waiting sequences do), so there are no cycles.
//!
//! Cost: O(blocks of the prompt) once per sequence, one lookup per waiting sequence and step. Hashes start at a
//! tenant's root, so nobody waits for another tenant.

use folio_kv::{BlockHash, BlockHashes};
use rustc_hash::FxHashMap;

use crate::sequence::{Sequence, Slot};

#[derive(Default)]
pub(crate) struct SharedPrefixes {
    producer: FxHashMap<BlockHash, Slot>,
}

impl SharedPrefixes {
    pub fn producer(&self, hash: &BlockHash) -> Option<Slot> {
        self.producer.get(hash).copied()
    }

    /// `slot` is about to publish the full prompt blocks from `from` on.
    pub fn announce(&mut self, slot: Slot, of: &Sequence, from: u32) -> (u32, u32) {
        let to = of.prompt_blocks();
        for hash in (from..to).filter_map(|at| of.hashes.get(at)) {
            self.producer.entry(*hash).or_insert(slot);
        }
        (from.min(to), to)
    }

    /// Blocks before `upto` were published.
    pub fn published(&mut self, slot: Slot, hashes: &BlockHashes, announced: &mut (u32, u32), upto: u32) {
        while announced.0 < upto.min(announced.1) {
            if let Some(hash) = hashes.get(announced.0).filter(|hash| self.producer(hash) == Some(slot)) {
                self.producer.remove(hash);
            }
            announced.0 += 1;
        }
    }

    /// Nothing more of it will be computed.
    pub fn withdraw(&mut self, slot: Slot, of: &BlockHashes, announced: &mut (u32, u32)) {
        self.published(slot, of, announced, announced.1);
    }

    pub fn len(&self) -> usize {
        self.producer.len()
    }
}
