//! Keeps what is most likely to be wanted soon, by lifetimes learned from the traffic itself.
//!
//! Owns: classes of blocks, ages, what one release tells about a request. Must never: assume a workload: its only constants
//! are the resolution of the counts, how fast they fade, and how sure one must be to depart from the order of last use ([`LearningSettings`]).
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
//! - its request's *growth*: how many blocks the request had that nobody had asked for before (none; then by powers of four).
//!   One message of a conversation or one tool result of an agent adds little to a long known beginning and is likely to be
//!   followed by another; a document that is pasted into a chat or a single shot adds a lot and usually is not.
//!
//! Neither depends on what happened to be cached: content is remembered by its hash when it is evicted
//! ([`ghosts`](super::ghosts)), so a use after eviction counts, and a block that is computed a second time is not new.
//!
//! # Who is looked at
//!
//! Per class the deepest block of the run freed longest ago and of the run freed last: a class's value rises with age up
//! to its usual pause and falls after it, so the least is at an end. A block with children is passed over. Of those, the
//! least recently used goes unless another is worth less by more than [`LearningSettings::doubt`]: where classes do not differ in truth, the
//! differences between their counts are noise, and following noise costs more than it can bring.
//!
//! # What is worth storing
//!
//! Content is written to tiers ([`EvictionPolicy::is_worth_storing`]) unless its class comes back less than once in twenty times
//! ([`LearningSettings::least_return`]), by the lives that ended, with a use or forgotten: a session's end, though it was never hit,
//! and not a single shot. What was said to be kept is written in any case. As long as few blocks were forgotten, nothing is known not
//! to come back: all is written. What was not written and comes back all the same is computed, and counts as any use does, so a class
//! that was given up is found out when its traffic changes.
//!
//! # What learning costs
//!
//! The index is made anew after every half pool of freed blocks, from at most `2 * SAMPLE` looks at blocks and ghosts and
//! about 1,000 operations for each of 24 classes: well under a millisecond, whatever the size of the pool.

use super::ghosts::{Ghost, Ghosts};
use super::gittins::Lives;
use super::runs::Runs;
use super::{BlockMeta, EvictionPolicy};
use crate::types::BlockId;

/// Wanted 0, 1, 2 times before, or more often.
const KINDS: usize = 4;
/// Requests with 0, 1..4, 4..16, 16..64, 64..256 new blocks, or more.
const GROWTHS: usize = 6;
const CLASSES: usize = KINDS * GROWTHS;
/// Runs looked at from an end before the class is passed over.
const LOOK: usize = 8;
/// The index is made anew whenever this share of the pool was freed, and never more often than every `UPDATE_LEAST` blocks.
const UPDATE_SHARE: u64 = 2;
const UPDATE_LEAST: u64 = 2048;
/// Blocks, and ghosts, looked at by one update.
const SAMPLE: usize = 16_384;

/// How the counts are read. The defaults serve all traffic; others are there to be judged (`folio-sim`'s `retention_study`).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LearningSettings {
    /// The least recently used block goes unless another's value is lower by this share of it.
    pub doubt: f64,
    /// Lives at an age from which on a class speaks more for itself than its kind does.
    pub prior: f64,
    /// What old counts keep with every update of the index.
    pub fade: f64,
    /// Evicted contents that are remembered for each block of the pool.
    pub ghosts_per_block: u32,
    /// The chance to be wanted again from which on content is worth to be written to a tier.
    pub least_return: f64,
}

impl Default for LearningSettings {
    fn default() -> Self {
        Self { doubt: 0.15, prior: 32.0, fade: 0.98, ghosts_per_block: 8, least_return: 0.05 }
    }
}

/// 12 bytes a block. What does not fit is counted as the most that does; nothing is decided by such differences.
#[derive(Clone, Copy, Debug, Default)]
struct BlockUse {
    /// When it was last freed: the low half of the clock. An age is a difference modulo 2^32 blocks freed, hundreds of times
    /// what any block of the largest pool stays unused.
    since: u32,
    depth: u16,
    /// Blocks up to this one, in its chain, that were new in the request that inserted it; 0 if it was known.
    new: u16,
    /// Uses of its content before this insertion.
    before: u8,
    class: u8,
    /// No indexed block continues it.
    leaf: bool,
    /// It outlived the request that inserted it, or was evicted and is back.
    known: bool,
}

const _: () = assert!(size_of::<BlockUse>() == 12);

/// What one release, tail first, has told so far.
#[derive(Clone, Copy, Debug, Default)]
struct Release {
    /// The block that comes next if the release goes on.
    next: Option<BlockId>,
    /// Class of the block freed last.
    class: u8,
    growth: u8,
}

/// See the module documentation.
#[derive(Debug)]
pub struct LearnedLifetimes {
    depth_cost: f64,
    settings: LearningSettings,
    runs: Runs,
    states: Vec<BlockUse>,
    lives: Lives,
    ghosts: Ghosts,
    /// Blocks freed so far.
    now: u64,
    updated: u64,
    release: Release,
}

/// Class of requests by their number of new blocks.
fn growth(new: u16) -> u8 {
    new.checked_ilog2().map_or(0, |octave| 1 + octave / 2).min(GROWTHS as u32 - 1) as u8
}

impl LearnedLifetimes {
    /// `depth_cost`: what attention over one earlier block adds to the cost of computing a block, as a share of it.
    pub fn new(depth_cost: f64) -> Self {
        Self::with_settings(depth_cost, LearningSettings::default())
    }

    pub fn with_settings(depth_cost: f64, settings: LearningSettings) -> Self {
        Self {
            depth_cost,
            settings,
            runs: Runs::new(0, CLASSES),
            states: Vec::new(),
            lives: Lives::new(KINDS, GROWTHS, settings.prior, settings.fade),
            ghosts: Ghosts::default(),
            now: 0,
            updated: 0,
            release: Release::default(),
        }
    }

    /// Blocks freed since then.
    fn freed_since(&self, since: u32) -> u64 {
        (self.now as u32).wrapping_sub(since).into()
    }

    /// The block's time unused ends with a use.
    fn wanted(&mut self, block: BlockId) {
        let BlockUse { since, class, .. } = self.states[block.0 as usize];
        self.lives.used(class.into(), self.freed_since(since));
        self.runs.remove(block.0);
        self.release.next = None;
    }

    fn update(&mut self) {
        if self.now - self.updated < (self.states.len() as u64 / UPDATE_SHARE).max(UPDATE_LEAST) {
            return;
        }
        self.updated = self.now;
        let (now, runs) = (self.now, &self.runs);
        let age = |since| u64::from((now as u32).wrapping_sub(since));
        // Every step-th, a different residue each time, stands for `step` lives.
        let every = |len: usize| len.div_ceil(SAMPLE).max(1);
        let (blocks, ghosts) = (every(self.states.len()), every(self.ghosts.len()));
        let states = self.states.iter().enumerate().skip(now as usize % blocks).step_by(blocks);
        let cached = states
            .filter(|(block, _)| runs.contains(*block as u32))
            .map(|(_, state)| (usize::from(state.class), age(state.since), blocks as f64));
        let evicted = self
            .ghosts
            .sample(now as usize % ghosts, ghosts)
            .map(|ghost| (usize::from(ghost.class), age(ghost.since), ghosts as f64));
        self.lives.update(cached.chain(evicted));
    }

    /// Of the request whose deepest block this is.
    fn growth(&self, deepest: BlockId) -> u8 {
        let BlockUse { known, new, .. } = self.states[deepest.0 as usize];
        growth(if known { 0 } else { new })
    }

    /// Of a block that a request of this growth frees.
    fn class(&self, block: BlockId, meta: &BlockMeta, growth: u8) -> u8 {
        let before = self.states[block.0 as usize].before;
        let kind = meta.hits.saturating_add(before.into()).min(KINDS as u32 - 1) as u8;
        kind * GROWTHS as u8 + growth
    }

    /// What is lost with the block.
    fn value(&self, block: u32) -> f64 {
        let state = &self.states[block as usize];
        let cost = 1.0 + self.depth_cost * f64::from(state.depth);
        cost * self.lives.index(state.class.into(), self.freed_since(state.since))
    }

    fn is_leaf(&self, block: &u32) -> bool {
        self.states[*block as usize].leaf
    }

    /// The leaves at both ends of every class.
    fn candidates(&self) -> impl Iterator<Item = u32> + '_ {
        let ends = |class| {
            let oldest = self.runs.oldest_first(class).take(LOOK).find(|block| self.is_leaf(block));
            [oldest, self.runs.youngest(class).filter(|block| self.is_leaf(block))]
        };
        (0..CLASSES).flat_map(ends).flatten()
    }
}

impl EvictionPolicy for LearnedLifetimes {
    fn resize(&mut self, blocks: u32) {
        self.runs = Runs::new(blocks, CLASSES);
        self.states = vec![BlockUse::default(); blocks as usize];
        self.ghosts = Ghosts::new(blocks as usize, self.settings.ghosts_per_block);
    }

    fn on_insert(&mut self, block: BlockId, meta: &BlockMeta) {
        let ghost = meta.hash.and_then(|hash| self.ghosts.recall(&hash));
        if let Some(ghost) = ghost {
            self.lives.used(ghost.class.into(), self.freed_since(ghost.since));
        }
        let new = match (ghost, meta.parent.map(|parent| self.states[parent.0 as usize])) {
            (Some(_), _) => 0,
            (None, Some(parent)) if !parent.known => parent.new.saturating_add(1),
            (None, _) => 1,
        };
        self.states[block.0 as usize] = BlockUse {
            before: ghost.map_or(0, |ghost| ghost.uses.saturating_add(1)),
            depth: u16::try_from(meta.depth).unwrap_or(u16::MAX),
            new,
            known: ghost.is_some(),
            ..BlockUse::default()
        };
    }

    fn on_hit(&mut self, block: BlockId, meta: &BlockMeta) {
        // In use, it is counted when it is freed; a freed tail stays freed and is copied from.
        if self.runs.contains(block.0) {
            self.wanted(block);
            self.on_free(block, meta);
        }
    }

    fn on_free(&mut self, block: BlockId, meta: &BlockMeta) {
        self.now += 1;
        self.update();
        // Freed right after its child, it is of the same release; else it is the deepest block of another.
        let follows = self.release.next == Some(block);
        let growth = if follows { self.release.growth } else { self.growth(block) };
        let class = self.class(block, meta, growth);
        // In the same class too, it belongs to the child's run, the youngest there.
        let joins = follows && self.release.class == class;
        let state = &mut self.states[block.0 as usize];
        *state = BlockUse { since: self.now as u32, class, leaf: meta.children == 0, known: true, ..*state };
        self.runs.push(class.into(), block.0, joins);
        self.release = Release { next: meta.parent, class, growth };
    }

    fn is_worth_storing(&self, block: BlockId, meta: &BlockMeta, deepest: BlockId) -> bool {
        let class = self.class(block, meta, self.growth(deepest));
        self.lives.returns(class.into()) >= self.settings.least_return
    }

    fn prefetch(&self, blocks: &[BlockId]) {
        let touched =
            blocks.iter().map(|block| self.states[block.0 as usize].since ^ self.runs.touch(block.0));
        std::hint::black_box(touched.fold(0, |all, one| all ^ one));
    }

    fn on_use(&mut self, block: BlockId, _meta: &BlockMeta) {
        self.wanted(block);
    }

    fn on_leaf(&mut self, block: BlockId, _meta: &BlockMeta) {
        self.states[block.0 as usize].leaf = true;
    }

    fn on_remove(&mut self, block: BlockId, meta: &BlockMeta) {
        self.runs.remove(block.0);
        self.release.next = None;
        let Some(hash) = meta.hash else { return };
        let BlockUse { since, before, class, .. } = self.states[block.0 as usize];
        let uses = u8::try_from(meta.hits.saturating_add(before.into())).unwrap_or(u8::MAX);
        if let Some(lost) = self.ghosts.remember(Ghost::new(&hash, since, uses, class)) {
            self.lives.lost(lost.class.into(), self.freed_since(lost.since));
        }
    }

    fn victim(&mut self) -> Option<BlockId> {
        let mut least: Option<(f64, u32)> = None;
        let mut oldest: Option<(u64, f64, u32)> = None;
        for block in self.candidates() {
            let (value, age) = (self.value(block), self.freed_since(self.states[block as usize].since));
            if least.is_none_or(|(worth, _)| value < worth) {
                least = Some((value, block));
            }
            if oldest.is_none_or(|(most, ..)| age > most) {
                oldest = Some((age, value, block));
            }
        }
        let victim = match (least, oldest) {
            (Some((worth, least)), Some((_, value, _))) if worth < value * (1.0 - self.settings.doubt) => {
                Some(least)
            }
            (_, oldest) => oldest.map(|(.., block)| block),
        };
        let any =
            || (0..CLASSES).flat_map(|class| self.runs.oldest_first(class)).find(|block| self.is_leaf(block));
        victim.or_else(any).map(BlockId)
    }

    fn age(&self, block: BlockId) -> Option<u64> {
        Some(self.freed_since(self.states[block.0 as usize].since))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::TenantId;

    fn meta(parent: Option<u32>, depth: u32, children: u32, hash: u32) -> BlockMeta {
        let (mut bytes, parent) = ([0; 32], parent.map(BlockId));
        bytes[..4].copy_from_slice(&hash.wrapping_mul(0x9e37_79b9).to_be_bytes());
        let hash = Some(crate::types::BlockHash(bytes));
        BlockMeta { tenant: TenantId(0), parent, children, depth, hits: 0, hash }
    }

    /// Chains of one block come and go. Returns the order in which they went.
    fn churn(policy: &mut LearnedLifetimes, rounds: u32) -> Vec<u32> {
        let mut gone = Vec::new();
        policy.resize(8);
        let mut held = [u32::MAX; 8];
        for round in 0..rounds {
            let block = if round < 8 {
                BlockId(round)
            } else {
                let block = policy.victim().expect("all are freed");
                policy.on_remove(block, &meta(None, 0, 0, held[block.0 as usize]));
                gone.push(held[block.0 as usize]);
                block
            };
            held[block.0 as usize] = round % 11;
            policy.on_insert(block, &meta(None, 0, 0, round % 11));
            policy.on_free(block, &meta(None, 0, 0, round % 11));
        }
        gone
    }

    #[test]
    fn the_clock_may_run_over() {
        let mut early = LearnedLifetimes::new(0.1);
        let mut late = LearnedLifetimes {
            now: u64::from(u32::MAX) - 2500,
            updated: u64::from(u32::MAX) - 2500,
            ..LearnedLifetimes::new(0.1)
        };
        assert_eq!(churn(&mut early, 5000), churn(&mut late, 5000));
        assert!(late.now > u64::from(u32::MAX));
    }

    #[test]
    fn what_is_never_wanted_again_goes_before_an_older_block_of_a_kind_that_is() {
        let mut policy = LearnedLifetimes::new(0.0);
        policy.resize(64);
        // Slot 0: wanted once in 200 blocks. The others: new contents, never again.
        policy.on_insert(BlockId(0), &meta(None, 0, 0, 0));
        let mut hits = 0;
        for round in 1..40_150u32 {
            let favourite = |hits| BlockMeta { hits, ..meta(None, 0, 0, 0) };
            if round % 200 == 1 {
                if round > 1 {
                    policy.on_use(BlockId(0), &favourite(hits));
                    hits += 1;
                }
                policy.on_free(BlockId(0), &favourite(hits));
            }
            let block = BlockId(1 + round % 63);
            if round > 63 {
                policy.on_remove(block, &meta(None, 0, 0, round - 63));
            }
            policy.on_insert(block, &meta(None, 0, 0, round));
            policy.on_free(block, &meta(None, 0, 0, round));
        }
        // The favourite is the oldest of all by now, and its pause nearly over.
        assert_ne!(policy.victim(), Some(BlockId(0)));
    }

    #[test]
    fn growths_are_powers_of_four() {
        assert_eq!(
            [0, 1, 3, 4, 15, 16, 63, 64, 255, 256, u16::MAX].map(growth),
            [0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5]
        );
    }
}
