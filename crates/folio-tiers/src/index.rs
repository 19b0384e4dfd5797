//! Where blocks lie, in memory.
//!
//! A block's entry is 64 bits of its hash and a place of 8 bytes; the whole hash is in the record and checked there. Two blocks with the
//! same 64 bits are not both found: hashes are keyed, so nobody can make them, and chance does not. The table is in parts with a lock
//! each, so that one that grows holds up 1/64 of the questions.
//!
//! Memory: 17 bytes a place of a table, which is at least 7/16 full once it has grown, so at most 39 a block, and 8 in its segment's list.

use std::collections::hash_map::Entry;
use std::sync::{PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use rustc_hash::FxHashMap;

use crate::types::BlockKey;

/// Later writes have greater ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Place {
    pub segment: u32,
    pub page: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fingerprint(u64);

impl From<&BlockKey> for Fingerprint {
    fn from(key: &BlockKey) -> Self {
        let word = u64::from_le_bytes(key.hash.0[..8].try_into().expect("eight bytes"));
        Self(word ^ u64::from(key.group).wrapping_mul(0x9e37_79b9_7f4a_7c15))
    }
}

const PARTS: usize = 64;

type Part = FxHashMap<u64, Place>;

pub struct Index {
    parts: [RwLock<Part>; PARTS],
}

impl Index {
    pub fn new() -> Self {
        Self { parts: std::array::from_fn(|_| RwLock::default()) }
    }

    fn part(&self, fingerprint: Fingerprint) -> &RwLock<Part> {
        &self.parts[(fingerprint.0 >> 32) as usize % PARTS]
    }

    fn read(&self, fingerprint: Fingerprint) -> RwLockReadGuard<'_, Part> {
        self.part(fingerprint).read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self, fingerprint: Fingerprint) -> RwLockWriteGuard<'_, Part> {
        self.part(fingerprint).write().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn find(&self, fingerprint: Fingerprint) -> Option<Place> {
        self.read(fingerprint).get(&fingerprint.0).copied()
    }

    /// Of two places the later one stays.
    pub fn insert(&self, fingerprint: Fingerprint, place: Place) {
        let mut part = self.write(fingerprint);
        let known = part.entry(fingerprint.0).or_insert(place);
        *known = place.max(*known);
    }

    /// Whether it was there.
    pub fn remove(&self, fingerprint: Fingerprint, is_it: impl FnOnce(Place) -> bool) -> bool {
        match self.write(fingerprint).entry(fingerprint.0) {
            Entry::Occupied(entry) if is_it(*entry.get()) => {
                entry.remove();
                true
            }
            _ => false,
        }
    }

    pub fn len(&self) -> usize {
        self.parts.iter().map(|part| part.read().unwrap_or_else(PoisonError::into_inner).len()).sum()
    }
}
