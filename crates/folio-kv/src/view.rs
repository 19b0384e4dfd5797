//! What the blocks of group 0 hold, for whoever draws the pool.
//!
//! Owns: a look at some blocks by their numbers. Must never: be longer than [`VIEW_MAX`] blocks, or tell a token or a hash: who looks sees whose
//! content a block holds and what it continues, and nothing that leads to it.
//!
//! Cost: O(blocks looked at), two records each.

use crate::cache::KvCache;
use crate::types::{BlockId, TenantId};

/// Blocks of one look.
pub const VIEW_MAX: u32 = 1024;

/// Where a block is in its life.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BlockState {
    Free,
    /// Somebody writes in it; nobody finds it.
    Private,
    /// Its content can be found, and somebody holds it.
    Active,
    /// Its content can be found, and nobody holds it. `age`: blocks that were freed since it was, where the eviction policy counts them.
    Cached {
        age: Option<u64>,
    },
}

/// A node of the prefix tree, as far as it shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ViewedNode {
    /// A number that is the node's as long as it is there, below the number of blocks.
    pub node: u32,
    /// What it continues; `None` where a chain begins.
    pub parent: Option<u32>,
    /// Nodes before it, as far as they can be counted here.
    pub depth: u16,
}

/// A block of group 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockView {
    pub state: BlockState,
    /// Whose it is; of a free one nobody's.
    pub tenant: TenantId,
    /// The content that can be found.
    pub node: Option<ViewedNode>,
}

impl KvCache {
    /// Every `step`-th block of group 0 from `first` on, `count` of them and at most [`VIEW_MAX`], as far as there are some.
    pub fn view(&self, first: u32, step: u32, count: u32) -> Vec<BlockView> {
        let blocks = (first..self.groups[0].pool.len()).step_by(step.max(1) as usize);
        blocks.take(count.min(VIEW_MAX) as usize).map(|block| self.view_of(block)).collect()
    }

    fn view_of(&self, block: u32) -> BlockView {
        let pool = &self.groups[0].pool;
        if pool.is_free(block) {
            return BlockView { state: BlockState::Free, tenant: TenantId(0), node: None };
        }
        let slot = pool.slot(block);
        let node = slot.node().map(|node| {
            let depth = self.nodes.node(node).depth;
            ViewedNode { node, parent: self.nodes.parent_node(node), depth }
        });
        let state = match (&node, slot.refs) {
            (None, _) => BlockState::Private,
            (Some(_), 0) => BlockState::Cached { age: self.policy.age(BlockId(block)) },
            (Some(_), _) => BlockState::Active,
        };
        BlockView { state, tenant: slot.tenant, node }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{BlockHashes, CacheConfig, Identity, Root, default_policy};

    #[test]
    fn blocks_are_told_by_state_with_what_they_continue_and_how_long_ago_they_were_freed() {
        let config = CacheConfig { blocks: 8, block_tokens: 2, bytes_per_block: 1 };
        let mut cache = KvCache::new(config, default_policy(0.0));
        let root = Root::derive(&Identity {
            tenant: TenantId(3),
            tenant_secret: &[1; 32],
            model_digest: &[2; 32],
            layout_digest: &[3; 32],
            extra: &[],
        });
        let table = |cache: &mut KvCache, tokens: &[u32]| {
            let hashes = BlockHashes::new(&root, tokens, 2);
            let mut table = cache.empty_table(hashes);
            cache.grow(&mut table, tokens.len() as u32, &mut Vec::new()).expect("room");
            cache.commit(&mut table, tokens, tokens.len() as u32).expect("in order");
            table
        };
        let first = table(&mut cache, &[1, 2, 3, 4]);
        cache.release(first, &[1, 2, 3, 4]);
        let second = table(&mut cache, &[5, 6, 7]);
        let seen = cache.view(0, 1, 100);
        assert_eq!(seen.len(), 8, "as many as there are");
        let states: Vec<_> = seen.iter().map(|block| block.state).collect();
        let cached = |age| BlockState::Cached { age: Some(age) };
        // The end of a chain is freed first.
        assert_eq!(states[..4], [cached(0), cached(1), BlockState::Active, BlockState::Private]);
        assert_eq!(states[4..], [BlockState::Free; 4]);
        let nodes: Vec<_> = seen[..3].iter().map(|block| block.node.expect("it is found")).collect();
        assert_eq!((nodes[0].parent, nodes[1].parent, nodes[2].parent), (None, Some(nodes[0].node), None));
        assert_eq!((nodes[0].depth, nodes[1].depth, seen[3].node), (0, 1, None));
        assert!(seen[..4].iter().all(|block| block.tenant == TenantId(3)));
        cache.release(second, &[5, 6, 7]);
        assert_eq!(cache.view(1, 3, 2), [1, 4].map(|block| cache.view(block, 1, 1)[0]));
        assert_eq!((cache.view(8, 1, 5), cache.view(0, 0, 1).len()), (Vec::new(), 1));
    }

    #[test]
    fn one_look_is_bounded_however_many_blocks_are_wanted() {
        let config = CacheConfig { blocks: 3000, block_tokens: 2, bytes_per_block: 1 };
        let cache = KvCache::new(config, default_policy(0.0));
        assert_eq!(cache.view(0, 1, u32::MAX).len(), VIEW_MAX as usize);
        assert_eq!(cache.view(2999, u32::MAX, u32::MAX).len(), 1);
    }
}
