//! Which cached block is given up next.
//!
//! Owns: the order of eviction, and nothing else. Must never: know what a block holds, who references it, or how it is
//! found; the pool tells a policy everything it may use, through hooks.
//!
//! The pool guarantees: `on_insert` comes first for a block and `on_remove` last; between them `on_free` and `on_use`
//! alternate, starting with the block in use (a tail is inserted and freed at once); `victim` is called only while
//! `evictable() > 0`. Hooks of one release come tail first, so a parent is always freed after its children.
//!
//! The policy guarantees: a victim is a block that was freed and not used since, and that has no children. The pool
//! checks both and falls back to any such block, so a faulty policy costs hits and never correctness.
//!
//! Cost: hooks of [`LruLeafFirst`] are O(1) and allocate nothing after `resize`.

use crate::types::{BlockId, TenantId};

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
    /// Positions it holds; fewer than the block size for a tail.
    pub tokens: u32,
    /// Lookups that found it since it was inserted.
    pub hits: u32,
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
    /// A freed block is referenced again.
    fn on_use(&mut self, block: BlockId, meta: &BlockMeta);
    /// The last child of an indexed block is gone.
    fn on_leaf(&mut self, _block: BlockId, _meta: &BlockMeta) {}
    /// A freed block left the index: evicted, cleared, or superseded by a longer one.
    fn on_remove(&mut self, block: BlockId, meta: &BlockMeta);
    /// The block to give up so that `taker` gets room. The pool answers with `on_remove`.
    fn victim(&mut self, taker: TenantId) -> Option<BlockId>;
    /// Blocks that repeated calls of `victim` would give up.
    fn evictable(&self) -> u32;
}

pub(crate) const NONE: u32 = u32::MAX;
/// In `prev`: the block is not in the list.
const ABSENT: u32 = u32::MAX - 1;

/// Least recently used first, and never a parent before its child.
///
/// One intrusive list in order of last use. It is leaf-first by construction: whoever references a block references its
/// ancestors, and references are dropped tail first, so at any time a cached child is nearer the old end than its
/// parent. A hit on a freed block (a tail that is copied from) moves it to the young end; its ancestors are in use at that
/// moment and come back later, so the order holds.
#[derive(Debug)]
pub struct LruLeafFirst {
    prev: Vec<u32>,
    next: Vec<u32>,
    oldest: u32,
    newest: u32,
    len: u32,
}

impl LruLeafFirst {
    pub fn new() -> Self {
        Self { prev: Vec::new(), next: Vec::new(), oldest: NONE, newest: NONE, len: 0 }
    }

    fn push_newest(&mut self, block: u32) {
        self.prev[block as usize] = self.newest;
        self.next[block as usize] = NONE;
        match self.newest {
            NONE => self.oldest = block,
            newest => self.next[newest as usize] = block,
        }
        self.newest = block;
        self.len += 1;
    }

    fn unlink(&mut self, block: u32) {
        let (prev, next) = (self.prev[block as usize], self.next[block as usize]);
        match prev {
            NONE => self.oldest = next,
            prev => self.next[prev as usize] = next,
        }
        match next {
            NONE => self.newest = prev,
            next => self.prev[next as usize] = prev,
        }
        self.prev[block as usize] = ABSENT;
        self.len -= 1;
    }
}

impl Default for LruLeafFirst {
    fn default() -> Self {
        Self::new()
    }
}

impl EvictionPolicy for LruLeafFirst {
    fn resize(&mut self, blocks: u32) {
        self.prev = vec![ABSENT; blocks as usize];
        self.next = vec![NONE; blocks as usize];
    }

    fn on_hit(&mut self, block: BlockId, _meta: &BlockMeta) {
        if self.prev[block.0 as usize] != ABSENT {
            self.unlink(block.0);
            self.push_newest(block.0);
        }
    }

    fn on_free(&mut self, block: BlockId, _meta: &BlockMeta) {
        self.push_newest(block.0);
    }

    fn on_use(&mut self, block: BlockId, _meta: &BlockMeta) {
        self.unlink(block.0);
    }

    fn on_remove(&mut self, block: BlockId, _meta: &BlockMeta) {
        self.unlink(block.0);
    }

    fn victim(&mut self, _taker: TenantId) -> Option<BlockId> {
        (self.oldest != NONE).then_some(BlockId(self.oldest))
    }

    fn evictable(&self) -> u32 {
        self.len
    }
}
