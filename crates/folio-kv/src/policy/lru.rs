//! The plain order of last use.

use super::{BlockMeta, EvictionPolicy, NONE};
use crate::types::{BlockId, TenantId};

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
