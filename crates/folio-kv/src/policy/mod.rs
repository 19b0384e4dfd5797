//! Which cached block is given up next.
//!
//! Owns: the order of eviction, and nothing else. Must never: know what a block holds, who references it, or how it is
//! found; the pool tells a policy everything it may use, through hooks.
//!
//! The pool guarantees: `on_insert` comes first for a block and `on_remove` last; between them `on_free` and `on_use`
//! alternate, starting with the block in use (a tail is inserted and freed at once). Hooks of one release come tail first, so a
//! parent is always freed after its children.
//!
//! The policy guarantees: a victim is a block that was freed and not used since, and that has no children. The pool
//! checks both and falls back to any such block, so a faulty policy costs hits and never correctness.
//!
//! What callers said about their content (priority, time to live) is not a policy's business: [`Retaining`] is around every
//! policy, which never hears of it.
//!
//! Bytes for each block of the pool: 9 of [`Retaining`]; of [`LearnedLifetimes`] 12 of state, 12 of links, 24 for each run
//! of blocks that were freed together (a whole chain, mostly) and 90 for each evicted content that is remembered (8 for each
//! block, at most 2^20 in all); of [`LruLeafFirst`] 8. So at 10 million blocks 42 where chains have 64 blocks, and 66 where
//! each was freed alone. `examples/block_cost.rs` measures it.
//!
//! Cost: the hooks of both policies here are O(1) (amortized, for [`LearnedLifetimes`]) and allocate nothing after `resize`.

mod due;
mod ghosts;
mod gittins;
mod leaves;
mod lifetimes;
mod lru;
mod retaining;
mod runs;

pub use lifetimes::{LearnedLifetimes, LearningSettings};
pub use lru::LruLeafFirst;
pub(crate) use retaining::Retaining;

use crate::types::{BlockHash, BlockId, TenantId};

/// What a server evicts by, and with it every test that is not of another policy. `depth_cost`: see [`LearnedLifetimes::new`].
pub fn default_policy(depth_cost: f64) -> Box<dyn EvictionPolicy> {
    Box::new(LearnedLifetimes::new(depth_cost))
}

/// What a policy may know about a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockMeta {
    pub tenant: TenantId,
    /// `None`: the block is the first of its chain.
    pub parent: Option<BlockId>,
    /// Indexed blocks that continue this one. A block with children must not be evicted.
    pub children: u32,
    /// Blocks before it in its chain; times the block size, the context its recomputation needs.
    pub depth: u32,
    /// Lookups that found it since it was inserted.
    pub hits: u32,
    /// What identifies the content wherever and whenever it is computed again. `None` for a tail.
    pub hash: Option<BlockHash>,
}

/// Order of eviction. See the module documentation for what both sides guarantee.
pub trait EvictionPolicy: Send {
    /// The pool has `blocks` blocks, none of them cached. Called once, first.
    fn resize(&mut self, blocks: u32);
    /// Content of a block entered the index.
    fn on_insert(&mut self, _block: BlockId, _meta: &BlockMeta) {}
    /// A lookup found the block, in full or in part.
    fn on_hit(&mut self, _block: BlockId, _meta: &BlockMeta) {}
    /// The last reference to an indexed block is gone: it may be evicted from now on (once it has no children).
    fn on_free(&mut self, block: BlockId, meta: &BlockMeta);
    /// Whether the content of a block, in use by a request whose deepest block is `deepest`, will be wanted often enough, once it is
    /// freed, for a tier to be given it.
    fn is_worth_storing(&self, _block: BlockId, _meta: &BlockMeta, _deepest: BlockId) -> bool {
        true
    }
    /// These blocks will be used in this order: what is kept of them may be brought near.
    fn prefetch(&self, _blocks: &[BlockId]) {}
    /// A freed block is referenced again.
    fn on_use(&mut self, block: BlockId, meta: &BlockMeta);
    /// The last child of an indexed block is gone.
    fn on_leaf(&mut self, _block: BlockId, _meta: &BlockMeta) {}
    /// A freed block left the index: evicted, cleared, or superseded by a longer one.
    fn on_remove(&mut self, block: BlockId, meta: &BlockMeta);
    /// The block to give up; `None`: none is freed. The pool answers with `on_remove`.
    fn victim(&mut self) -> Option<BlockId>;
    /// Blocks that were freed since this one, which is freed, was. `None`: the policy does not count them.
    fn age(&self, _block: BlockId) -> Option<u64> {
        None
    }
}

pub(crate) const NONE: u32 = u32::MAX;
