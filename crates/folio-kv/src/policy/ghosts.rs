//! What was evicted, remembered by its hash.
//!
//! Owns: a ring of evicted contents and the map that finds one. Must never: grow after it was made, or be relied on: it knows
//! a content by 8 bytes of a keyed hash. Every operation is O(1).
//!
//! A ring and no set-associative table, though that is a fifth of the size: it forgets the blocks of a chain together. Where
//! some of a chain are remembered and others not, requests are classed at random, and on Mooncake's trace at 1,000 blocks a
//! third of what learning gains is lost.

use rustc_hash::FxHashMap;

use crate::types::BlockHash;

/// Never more are remembered than this: about 90 bytes each, places in the map included.
const MOST: usize = 1 << 20;

/// What is known of an evicted content.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ghost {
    name: u64,
    /// When its block was last freed: the low half of the clock.
    pub since: u32,
    /// Uses of the content so far, 255 for more.
    pub uses: u8,
    pub class: u8,
    /// Not wanted again since.
    waiting: bool,
}

impl Ghost {
    pub fn new(hash: &BlockHash, since: u32, uses: u8, class: u8) -> Self {
        Self { name: name(hash), since, uses, class, waiting: true }
    }
}

const _: () = assert!(size_of::<Ghost>() == 16);

fn name(hash: &BlockHash) -> u64 {
    u64::from_le_bytes(std::array::from_fn(|at| hash.0[at]))
}

#[derive(Debug, Default)]
pub(super) struct Ghosts {
    ring: Vec<Ghost>,
    /// Where the next goes once the ring is full.
    next: usize,
    limit: usize,
    /// Those that wait.
    places: FxHashMap<u64, u32>,
}

impl Ghosts {
    /// `per_block`: evicted contents that are remembered for each block of the pool.
    pub fn new(blocks: usize, per_block: u32) -> Self {
        let limit = (per_block as usize * blocks).min(MOST);
        let mut places = FxHashMap::default();
        // Twice the entries: removed ones leave marks, and up to half full the map cleans up in place.
        places.reserve(2 * limit);
        Self { ring: Vec::with_capacity(limit), next: 0, limit, places }
    }

    /// Gives back the oldest if it had to make room and was never wanted again.
    pub fn remember(&mut self, ghost: Ghost) -> Option<Ghost> {
        if self.limit == 0 {
            return None;
        }
        let at = self.next;
        self.next = (at + 1) % self.limit;
        let old = match self.ring.get_mut(at) {
            Some(place) => Some(std::mem::replace(place, ghost)).filter(|old| old.waiting),
            None => {
                self.ring.push(ghost);
                None
            }
        };
        if let Some(old) = &old {
            self.places.remove(&old.name);
        }
        if let Some(twin) = self.places.insert(ghost.name, at as u32) {
            self.ring[twin as usize].waiting = false;
        }
        old
    }

    /// The content is wanted again, and cached from now on.
    pub fn recall(&mut self, hash: &BlockHash) -> Option<Ghost> {
        let ghost = &mut self.ring[self.places.remove(&name(hash))? as usize];
        ghost.waiting = false;
        Some(*ghost)
    }

    pub fn len(&self) -> usize {
        self.ring.len()
    }

    /// Every `step`-th, from `first` on, of those that still wait.
    pub fn sample(&self, first: usize, step: usize) -> impl Iterator<Item = &Ghost> + '_ {
        self.ring.iter().skip(first).step_by(step).filter(|ghost| ghost.waiting)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PER_BLOCK: usize = 8;

    fn ghost(name: u8, since: u32) -> Ghost {
        Ghost::new(&BlockHash([name; 32]), since, 0, 0)
    }

    #[test]
    fn the_ring_forgets_the_oldest_and_says_so_unless_it_was_wanted() {
        let mut ghosts = Ghosts::new(1, PER_BLOCK as u32);
        for name in 0..PER_BLOCK as u8 {
            assert!(ghosts.remember(ghost(name, name.into())).is_none(), "there is room");
        }
        assert_eq!(ghosts.recall(&BlockHash([0; 32])).map(|ghost| ghost.since), Some(0));
        assert!(ghosts.recall(&BlockHash([0; 32])).is_none(), "it is cached now");
        assert!(ghosts.remember(ghost(100, 100)).is_none(), "the oldest was wanted");
        assert_eq!(ghosts.remember(ghost(101, 101)).map(|ghost| ghost.since), Some(1), "the next was not");
        assert!(ghosts.recall(&BlockHash([1; 32])).is_none());
        assert_eq!(ghosts.sample(0, 1).count(), PER_BLOCK);
        assert_eq!((ghosts.len(), ghosts.sample(1, 3).count()), (PER_BLOCK, 3));
    }

    #[test]
    fn evicted_twice_it_counts_once_and_a_pool_of_nothing_remembers_nothing() {
        let mut ghosts = Ghosts::new(2, 8);
        ghosts.remember(ghost(7, 1));
        ghosts.remember(ghost(7, 2));
        assert_eq!(ghosts.sample(0, 1).map(|ghost| ghost.since).collect::<Vec<_>>(), [2]);
        let mut none = Ghosts::new(0, 8);
        assert!(none.remember(ghost(1, 1)).is_none() && none.recall(&BlockHash([1; 32])).is_none());
    }
}
