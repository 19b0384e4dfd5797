//! Where blocks lie, in memory.
//!
//! A block's entry is 64 bits of its hash and a place of 8 bytes; the whole hash is in the record and checked there. Two blocks with the
//! same 64 bits are not both found: hashes are keyed, so nobody can make them, and chance does not. The table is in parts with a lock
//! each, so that one that grows holds up 1/64 of the questions.
//!
//! Memory: 17 bytes a place of a table, which is at least 7/16 full once it has grown, so at most 39 a block, and 16 in its segment's list.

use std::collections::hash_map::Entry;
use std::sync::{Arc, OnceLock, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use folio_engine::{EventFeed, Medium, TierEvent};
use rustc_hash::FxHashMap;

use crate::types::BlockKey;

/// Later writes have greater ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Place {
    pub segment: u32,
    pub page: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
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
    /// Who is told what is here, under the lock of its part: so events of a block come in their order, and what is told can be found.
    feed: OnceLock<Arc<EventFeed>>,
}

impl Index {
    pub fn new() -> Self {
        Self { parts: std::array::from_fn(|_| RwLock::default()), feed: OnceLock::new() }
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

    /// From now on somebody is told. `false`: somebody else was before.
    pub fn listen(&self, feed: &Arc<EventFeed>) -> bool {
        self.feed.set(feed.clone()).is_ok()
    }

    /// Of two places the later one stays; the other is returned. `event` is what there is to tell where somebody listens and it was not there.
    pub fn insert(
        &self,
        fingerprint: Fingerprint,
        place: Place,
        event: impl FnOnce() -> Option<TierEvent>,
    ) -> Option<Place> {
        match self.write(fingerprint).entry(fingerprint.0) {
            Entry::Occupied(mut known) => {
                let before = *known.get();
                *known.get_mut() = place.max(before);
                Some(place.min(before))
            }
            Entry::Vacant(new) => {
                new.insert(place);
                if let Some(feed) = self.feed.get() {
                    event().into_iter().for_each(|event| feed.push(event));
                }
                None
            }
        }
    }

    /// Whether it was at `from`; then it is at `to`, and nobody is told.
    pub fn replace(&self, fingerprint: Fingerprint, from: Place, to: Place) -> bool {
        let mut part = self.write(fingerprint);
        let known = part.get_mut(&fingerprint.0).filter(|known| **known == from);
        known.map(|known| *known = to).is_some()
    }

    /// Whether it was there.
    pub fn remove(&self, fingerprint: Fingerprint, is_it: impl FnOnce(Place) -> bool) -> bool {
        match self.write(fingerprint).entry(fingerprint.0) {
            Entry::Occupied(entry) if is_it(*entry.get()) => {
                // Of groups above 0 nobody was told, and nobody knows the name.
                if let Some(feed) = self.feed.get() {
                    feed.push(TierEvent::Removed { medium: Medium::Disk, name: fingerprint.0 });
                }
                entry.remove();
                true
            }
            _ => false,
        }
    }

    /// Calls `then` if a block is still at a place; it stays there meanwhile.
    pub fn while_at<T>(&self, fingerprint: Fingerprint, place: Place, then: impl FnOnce() -> T) -> Option<T> {
        let part = self.read(fingerprint);
        (part.get(&fingerprint.0) == Some(&place)).then(then)
    }

    /// All places, the latest segment first, each from its beginning.
    pub fn places(&self) -> Vec<Place> {
        let mut places = Vec::with_capacity(self.len());
        for part in &self.parts {
            places.extend(part.read().unwrap_or_else(PoisonError::into_inner).values());
        }
        places.sort_unstable_by_key(|place: &Place| (std::cmp::Reverse(place.segment), place.page));
        places
    }

    pub fn len(&self) -> usize {
        self.parts.iter().map(|part| part.read().unwrap_or_else(PoisonError::into_inner).len()).sum()
    }
}
