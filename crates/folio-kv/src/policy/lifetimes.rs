//! Keeps what is most likely to be wanted soon, by lifetimes learned from the traffic itself.
//!
//! Owns: classes of blocks, ages, the memory of what was evicted. Must never: assume a workload: the only constants are the
//! resolution of the counts and how fast they fade.
//!
//! # The cost model
//!
//! A block's value is its chance to be wanted per unit of time it must be kept for that (see [`gittins`](super::gittins)),
//! times what computing it again would cost. All blocks of a pool take the same bytes. The cost is one block of tokens at
//! its depth: `1 + depth * depth_cost`, where `depth_cost` is the share that attention over one earlier block adds to
//! computing a block; zero makes every hit equal.
//!
//! # Classes
//!
//! By how often content was wanted before: never, once, twice, more. Content is remembered by its hash when it is evicted
//! (*ghosts*, `GHOSTS` per block of the pool), so a use after eviction counts too: without that, only what stayed cached
//! could prove itself.
//!
//! # Who is looked at
//!
//! Per class the deepest block of the group freed longest ago and of the group freed last: a class's value rises with age up
//! to its usual pause and falls after it, so the least is at an end. A block with children is passed over.

use std::collections::hash_map::Entry;

use rustc_hash::FxHashMap;

use super::gittins::Lives;
use super::groups::Groups;
use super::{BlockMeta, EvictionPolicy};
use crate::types::{BlockHash, BlockId, TenantId};

/// Classes of blocks: wanted 0, 1, 2 times before, or more often.
const CLASSES: usize = 4;
/// Evicted contents remembered per block of the pool.
const GHOSTS: usize = 4;
/// But never more than this: 100 bytes each.
const GHOSTS_MOST: usize = 1 << 20;
/// Groups looked at from an end before the class is passed over.
const LOOK: usize = 8;
/// The index is made anew whenever this share of the pool was freed, and never more often than every `UPDATE_LEAST` blocks.
const UPDATE_SHARE: u64 = 2;
const UPDATE_LEAST: u64 = 2048;

#[derive(Clone, Copy, Debug, Default)]
struct State {
    /// When it was last freed.
    since: u64,
    /// Uses of its content before this insertion.
    before: u32,
    depth: u32,
    class: u8,
    /// No indexed block continues it.
    leaf: bool,
}

#[derive(Clone, Copy, Debug)]
struct Ghost {
    hash: BlockHash,
    since: u64,
    uses: u32,
    class: u8,
}

/// See the module documentation.
#[derive(Debug)]
pub struct LearnedLifetimes {
    depth_cost: f64,
    groups: Groups,
    states: Vec<State>,
    lives: Lives<CLASSES>,
    /// Ring of what was evicted; `ghost_of` finds an entry that is still wanted.
    ghosts: Vec<Ghost>,
    next_ghost: usize,
    ghost_of: FxHashMap<BlockHash, u32>,
    /// Blocks freed so far.
    now: u64,
    updated: u64,
    /// Parent and class of the block freed last: freed next, the parent is of the same release.
    last: Option<(BlockId, u8)>,
}

fn ghost_limit(blocks: usize) -> usize {
    (GHOSTS * blocks).min(GHOSTS_MOST)
}

impl LearnedLifetimes {
    /// `depth_cost`: what attention over one earlier block adds to the cost of computing a block, as a share of it.
    pub fn new(depth_cost: f64) -> Self {
        Self {
            depth_cost,
            groups: Groups::new(0, CLASSES),
            states: Vec::new(),
            lives: Lives::new(),
            ghosts: Vec::new(),
            next_ghost: 0,
            ghost_of: FxHashMap::default(),
            now: 0,
            updated: 0,
            last: None,
        }
    }

    fn class(uses: u32) -> u8 {
        uses.min(CLASSES as u32 - 1) as u8
    }

    /// The block's time unused ends with a use.
    fn wanted(&mut self, block: BlockId) {
        let State { since, class, .. } = self.states[block.0 as usize];
        self.lives.used(class.into(), self.now - since);
        self.groups.remove(block.0);
        self.last = None;
    }

    fn remember(&mut self, hash: BlockHash, block: BlockId, hits: u32) {
        let limit = ghost_limit(self.states.len());
        if limit == 0 {
            return;
        }
        let State { since, class, before, .. } = self.states[block.0 as usize];
        let ghost = Ghost { hash, since, uses: before + hits, class };
        let at = self.next_ghost;
        if self.ghosts.len() < limit {
            self.ghosts.push(ghost);
        } else {
            let old = std::mem::replace(&mut self.ghosts[at], ghost);
            if let Entry::Occupied(entry) = self.ghost_of.entry(old.hash)
                && *entry.get() == at as u32
            {
                entry.remove();
                self.lives.lost(old.class.into(), self.now - old.since);
            }
        }
        self.ghost_of.insert(hash, at as u32);
        self.next_ghost = (at + 1) % limit;
    }

    fn update(&mut self) {
        if self.now - self.updated < (self.states.len() as u64 / UPDATE_SHARE).max(UPDATE_LEAST) {
            return;
        }
        self.updated = self.now;
        let (now, states, ghosts) = (self.now, &self.states, &self.ghosts);
        let cached = self.groups.iter().map(|block| {
            let state = &states[block as usize];
            (usize::from(state.class), now - state.since)
        });
        let evicted = self.ghost_of.values().map(|at| {
            let ghost = &ghosts[*at as usize];
            (usize::from(ghost.class), now - ghost.since)
        });
        self.lives.update(cached.chain(evicted));
    }

    /// What is lost with the block.
    fn value(&self, block: u32) -> f64 {
        let state = &self.states[block as usize];
        let cost = 1.0 + self.depth_cost * f64::from(state.depth);
        cost * self.lives.index(state.class.into(), self.now - state.since)
    }

    fn leaf<I: Iterator<Item = u32>>(&self, groups: I, look: usize) -> Option<u32> {
        groups.take(look).find(|block| self.states[*block as usize].leaf)
    }
}

impl EvictionPolicy for LearnedLifetimes {
    fn resize(&mut self, blocks: u32) {
        self.groups = Groups::new(blocks, CLASSES);
        self.states = vec![State::default(); blocks as usize];
        let ghosts = ghost_limit(self.states.len());
        self.ghosts = Vec::with_capacity(ghosts);
        self.ghost_of = FxHashMap::default();
        self.ghost_of.reserve(2 * ghosts);
    }

    fn on_insert(&mut self, block: BlockId, meta: &BlockMeta) {
        let ghost = meta.hash.and_then(|hash| self.ghost_of.remove(&hash)).map(|at| self.ghosts[at as usize]);
        let state = &mut self.states[block.0 as usize];
        *state = State { depth: meta.depth, ..State::default() };
        if let Some(ghost) = ghost {
            state.before = ghost.uses + 1;
            self.lives.used(ghost.class.into(), self.now - ghost.since);
        }
    }

    fn on_hit(&mut self, block: BlockId, meta: &BlockMeta) {
        // In use, it is counted when it is freed; a freed tail stays freed and is copied from.
        if self.groups.contains(block.0) {
            self.wanted(block);
            self.on_free(block, meta);
        }
    }

    fn on_free(&mut self, block: BlockId, meta: &BlockMeta) {
        self.now += 1;
        self.update();
        let class = Self::class(self.states[block.0 as usize].before + meta.hits);
        // Freed right after its child and in the same class, it belongs to the child's group, the youngest there.
        let joins = self.last == Some((block, class));
        let state = &mut self.states[block.0 as usize];
        *state = State { since: self.now, class, leaf: meta.children == 0, ..*state };
        self.groups.push(class.into(), block.0, joins);
        self.last = meta.parent.map(|parent| (parent, class));
    }

    fn on_use(&mut self, block: BlockId, _meta: &BlockMeta) {
        self.wanted(block);
    }

    fn on_leaf(&mut self, block: BlockId, _meta: &BlockMeta) {
        self.states[block.0 as usize].leaf = true;
    }

    fn on_remove(&mut self, block: BlockId, meta: &BlockMeta) {
        self.groups.remove(block.0);
        self.last = None;
        if let Some(hash) = meta.hash {
            self.remember(hash, block, meta.hits);
        }
    }

    fn victim(&mut self, _taker: TenantId) -> Option<BlockId> {
        let ends = (0..CLASSES).flat_map(|class| {
            [
                self.leaf(self.groups.oldest_first(class), LOOK),
                self.leaf(self.groups.youngest_first(class), 1),
            ]
        });
        let least = ends.flatten().min_by(|a, b| self.value(*a).total_cmp(&self.value(*b)));
        let any = || (0..CLASSES).find_map(|class| self.leaf(self.groups.oldest_first(class), usize::MAX));
        least.or_else(any).map(BlockId)
    }

    fn evictable(&self) -> u32 {
        self.groups.len()
    }
}
