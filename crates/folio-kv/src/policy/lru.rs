//! The plain order of last use.

use super::{BlockMeta, EvictionPolicy};
use crate::list::{Links, List};
use crate::types::BlockId;

/// Least recently used first, and never a parent before its child.
///
/// One list in order of last use. It is leaf-first by construction: whoever references a block references its
/// ancestors, and references are dropped tail first, so at any time a cached child is nearer the old end than its
/// parent. A hit on a freed block (a tail that is copied from) moves it to the young end; its ancestors are in use at that
/// moment and come back later, so the order holds.
#[derive(Debug)]
pub struct LruLeafFirst {
    links: Links,
    list: List,
}

impl LruLeafFirst {
    pub fn new() -> Self {
        Self { links: Links::new(0), list: List::EMPTY }
    }
}

impl Default for LruLeafFirst {
    fn default() -> Self {
        Self::new()
    }
}

impl EvictionPolicy for LruLeafFirst {
    fn resize(&mut self, blocks: u32) {
        self.links = Links::new(blocks);
    }

    fn on_hit(&mut self, block: BlockId, _meta: &BlockMeta) {
        if self.links.contains(block.0) {
            self.links.remove(&mut self.list, block.0);
            self.links.push_youngest(&mut self.list, block.0);
        }
    }

    fn on_free(&mut self, block: BlockId, _meta: &BlockMeta) {
        self.links.push_youngest(&mut self.list, block.0);
    }

    fn on_use(&mut self, block: BlockId, _meta: &BlockMeta) {
        self.links.remove(&mut self.list, block.0);
    }

    fn on_remove(&mut self, block: BlockId, meta: &BlockMeta) {
        self.on_use(block, meta);
    }

    fn victim(&mut self) -> Option<BlockId> {
        self.list.oldest().map(BlockId)
    }
}
