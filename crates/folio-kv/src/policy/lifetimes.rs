//! Keeps what is most likely to be wanted soon, by lifetimes learned from the traffic itself.
//!
//! Owns: classes of blocks, ages, what one release tells about a request. Must never: assume a workload: its only constants
//! are the resolution of the counts, how fast they fade, and how sure one must be to depart from the order of last use.
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
//! A block is classed when it is freed, by two things:
//!
//! - its *kind*: how often its content was wanted before: never, once, twice, more;
//! - its request's *step*: how many blocks the request had that nobody had asked for before (none; then by powers of four).
//!   One message of a conversation or one tool result of an agent adds little to a long known beginning and is likely to be
//!   followed by another; a document that is pasted into a chat or a single shot adds a lot and usually is not.
//!
//! Neither depends on what happened to be cached: content is remembered by its hash when it is evicted
//! ([`ghosts`](super::ghosts)), so a use after eviction counts, and a block that is computed a second time is not new.
//!
//! # Who is looked at
//!
//! Per class the deepest block of the group freed longest ago and of the group freed last: a class's value rises with age up
//! to its usual pause and falls after it, so the least is at an end. A block with children is passed over. Of those, the
//! least recently used goes unless another is worth less by more than `DOUBT`: where classes do not differ in truth, the
//! differences between their counts are noise, and following noise costs more than it can bring.
//!
//! # What learning costs
//!
//! The index is made anew after every half pool of freed blocks, from at most `2 * SAMPLE` looks at blocks and ghosts and
//! about 1,000 operations for each of 24 classes: well under a millisecond, whatever the size of the pool.

use super::ghosts::{Ghost, Ghosts};
use super::gittins::Lives;
use super::groups::Groups;
use super::{BlockMeta, EvictionPolicy};
use crate::types::{BlockId, TenantId};

/// Wanted 0, 1, 2 times before, or more often.
const KINDS: usize = 4;
/// Requests with 0, 1..4, 4..16, 16..64, 64..256 new blocks, or more.
const STEPS: usize = 6;
const CLASSES: usize = KINDS * STEPS;
/// Groups looked at from an end before the class is passed over.
const LOOK: usize = 8;
/// The least recently used block goes unless another's value is lower by this share of it.
const DOUBT: f64 = 0.15;
/// The index is made anew whenever this share of the pool was freed, and never more often than every `UPDATE_LEAST` blocks.
const UPDATE_SHARE: u64 = 2;
const UPDATE_LEAST: u64 = 2048;
/// Blocks, and ghosts, looked at by one update.
const SAMPLE: usize = 16_384;

#[derive(Clone, Copy, Debug, Default)]
struct State {
    /// When it was last freed.
    since: u64,
    /// Uses of its content before this insertion.
    before: u32,
    depth: u32,
    /// Blocks up to this one, in its chain, that were new in the request that inserted it; 0 if it was known.
    new: u32,
    class: u8,
    /// No indexed block continues it.
    leaf: bool,
    /// It outlived the request that inserted it, or was evicted and is back.
    known: bool,
}

/// What one release, tail first, has told so far.
#[derive(Clone, Copy, Debug, Default)]
struct Release {
    /// The block that comes next if the release goes on.
    next: Option<BlockId>,
    /// Class of the block freed last.
    class: u8,
    step: u8,
}

/// See the module documentation.
#[derive(Debug)]
pub struct LearnedLifetimes {
    depth_cost: f64,
    groups: Groups,
    states: Vec<State>,
    lives: Lives,
    ghosts: Ghosts,
    /// Blocks freed so far.
    now: u64,
    updated: u64,
    release: Release,
}

/// Class of requests by their number of new blocks.
fn step(new: u32) -> u8 {
    new.checked_ilog2().map_or(0, |octave| 1 + octave / 2).min(STEPS as u32 - 1) as u8
}

impl LearnedLifetimes {
    /// `depth_cost`: what attention over one earlier block adds to the cost of computing a block, as a share of it.
    pub fn new(depth_cost: f64) -> Self {
        Self {
            depth_cost,
            groups: Groups::new(0, CLASSES),
            states: Vec::new(),
            lives: Lives::new(KINDS, STEPS),
            ghosts: Ghosts::default(),
            now: 0,
            updated: 0,
            release: Release::default(),
        }
    }

    /// The block's time unused ends with a use.
    fn wanted(&mut self, block: BlockId) {
        let State { since, class, .. } = self.states[block.0 as usize];
        self.lives.used(class.into(), self.now - since);
        self.groups.remove(block.0);
        self.release.next = None;
    }

    fn update(&mut self) {
        if self.now - self.updated < (self.states.len() as u64 / UPDATE_SHARE).max(UPDATE_LEAST) {
            return;
        }
        self.updated = self.now;
        let (now, groups) = (self.now, &self.groups);
        // Every step-th, a different residue each time, stands for `step` lives.
        let every = |len: usize| len.div_ceil(SAMPLE).max(1);
        let (blocks, ghosts) = (every(self.states.len()), every(self.ghosts.len()));
        let states = self.states.iter().enumerate().skip(now as usize % blocks).step_by(blocks);
        let cached = states
            .filter(|(block, _)| groups.contains(*block as u32))
            .map(|(_, state)| (usize::from(state.class), now - state.since, blocks as f64));
        let evicted = self
            .ghosts
            .sample(now as usize % ghosts, ghosts)
            .map(|ghost| (usize::from(ghost.class), now - ghost.since, ghosts as f64));
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

    /// The leaves at both ends of every class.
    fn candidates(&self) -> impl Iterator<Item = u32> + '_ {
        let ends = |class| {
            [
                self.leaf(self.groups.oldest_first(class), LOOK),
                self.leaf(self.groups.youngest_first(class), 1),
            ]
        };
        (0..CLASSES).flat_map(ends).flatten()
    }
}

impl EvictionPolicy for LearnedLifetimes {
    fn resize(&mut self, blocks: u32) {
        self.groups = Groups::new(blocks, CLASSES);
        self.states = vec![State::default(); blocks as usize];
        self.ghosts = Ghosts::new(blocks as usize);
    }

    fn on_insert(&mut self, block: BlockId, meta: &BlockMeta) {
        let ghost = meta.hash.and_then(|hash| self.ghosts.recall(&hash));
        if let Some(ghost) = ghost {
            self.lives.used(ghost.class.into(), self.now - ghost.since);
        }
        let new = match (ghost, meta.parent.map(|parent| self.states[parent.0 as usize])) {
            (Some(_), _) => 0,
            (None, Some(parent)) if !parent.known => parent.new + 1,
            (None, _) => 1,
        };
        self.states[block.0 as usize] = State {
            before: ghost.map_or(0, |ghost| ghost.uses + 1),
            depth: meta.depth,
            new,
            known: ghost.is_some(),
            ..State::default()
        };
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
        let State { before, known, new, .. } = self.states[block.0 as usize];
        // Freed right after its child, it is of the same release; else it is the deepest block of another.
        let follows = self.release.next == Some(block);
        let step = if follows { self.release.step } else { step(if known { 0 } else { new }) };
        let kind = (before + meta.hits).min(KINDS as u32 - 1) as u8;
        let class = kind * STEPS as u8 + step;
        // In the same class too, it belongs to the child's group, the youngest there.
        let joins = follows && self.release.class == class;
        let state = &mut self.states[block.0 as usize];
        *state = State { since: self.now, class, leaf: meta.children == 0, known: true, ..*state };
        self.groups.push(class.into(), block.0, joins);
        self.release = Release { next: meta.parent, class, step };
    }

    fn on_use(&mut self, block: BlockId, _meta: &BlockMeta) {
        self.wanted(block);
    }

    fn on_leaf(&mut self, block: BlockId, _meta: &BlockMeta) {
        self.states[block.0 as usize].leaf = true;
    }

    fn on_remove(&mut self, block: BlockId, meta: &BlockMeta) {
        self.groups.remove(block.0);
        self.release.next = None;
        let Some(hash) = meta.hash else { return };
        let State { since, before, class, .. } = self.states[block.0 as usize];
        if let Some(lost) = self.ghosts.remember(Ghost::new(hash, since, before + meta.hits, class)) {
            self.lives.lost(lost.class.into(), self.now - lost.since);
        }
    }

    fn victim(&mut self, _taker: TenantId) -> Option<BlockId> {
        let mut least: Option<(f64, u32)> = None;
        let mut oldest: Option<(u64, f64, u32)> = None;
        for block in self.candidates() {
            let (value, since) = (self.value(block), self.states[block as usize].since);
            if least.is_none_or(|(worth, _)| value < worth) {
                least = Some((value, block));
            }
            if oldest.is_none_or(|(before, ..)| since < before) {
                oldest = Some((since, value, block));
            }
        }
        let chosen = match (least, oldest) {
            (Some((worth, least)), Some((_, value, _))) if worth < value * (1.0 - DOUBT) => Some(least),
            (_, oldest) => oldest.map(|(.., block)| block),
        };
        let any = || (0..CLASSES).find_map(|class| self.leaf(self.groups.oldest_first(class), usize::MAX));
        chosen.or_else(any).map(BlockId)
    }

    fn evictable(&self) -> u32 {
        self.groups.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_are_powers_of_four() {
        assert_eq!(
            [0, 1, 3, 4, 15, 16, 63, 64, 255, 256, u32::MAX].map(step),
            [0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5]
        );
    }
}
