//! Belady's MIN: gives up what is wanted again latest. It is an [`EvictionPolicy`] like any other, but for being told the future.
//!
//! Owns: when each content is wanted again. Must never: look at a clock; it counts the uses that it is told of, one for each request
//! that has the content, whether it is found or computed.
//!
//! Ties go to the deepest block. Chains share the next use of their deepest common request, so no parent goes before its child. A block
//! that is never wanted again is the first to go. Each operation is O(log blocks).

use std::collections::{BTreeSet, HashMap, VecDeque};

use folio_kv::{BlockHash, BlockId, BlockMeta, EvictionPolicy};

/// (request that wants it next, blocks before it in its chain)
type Rank = (u32, u32);

const NEVER: u32 = u32::MAX;

/// See the module documentation.
#[derive(Default)]
pub(super) struct Min {
    /// Requests that have a content and have not come yet, in order.
    uses: HashMap<BlockHash, VecDeque<u32>>,
    /// Of each block, while it is freed.
    ranks: Vec<Rank>,
    freed: BTreeSet<(Rank, u32)>,
}

impl Min {
    /// `requests`: the contents that each has, in the order in which they come.
    pub fn new(requests: impl IntoIterator<Item = impl IntoIterator<Item = BlockHash>>) -> Self {
        let mut uses: HashMap<BlockHash, VecDeque<u32>> = HashMap::new();
        for (request, contents) in (0..).zip(requests) {
            contents.into_iter().for_each(|hash| uses.entry(hash).or_default().push_back(request));
        }
        Self { uses, ..Self::default() }
    }

    /// The next request that has it has come.
    fn used(&mut self, hash: Option<BlockHash>) {
        hash.and_then(|hash| self.uses.get_mut(&hash)?.pop_front());
    }
}

impl EvictionPolicy for Min {
    fn resize(&mut self, blocks: u32) {
        self.ranks = vec![(NEVER, 0); blocks as usize];
    }

    fn on_insert(&mut self, _block: BlockId, meta: &BlockMeta) {
        self.used(meta.hash);
    }

    fn on_hit(&mut self, _block: BlockId, meta: &BlockMeta) {
        self.used(meta.hash);
    }

    fn on_free(&mut self, block: BlockId, meta: &BlockMeta) {
        let next = meta.hash.and_then(|hash| self.uses.get(&hash)?.front().copied());
        let rank = (next.unwrap_or(NEVER), meta.depth);
        self.ranks[block.0 as usize] = rank;
        self.freed.insert((rank, block.0));
    }

    fn on_use(&mut self, block: BlockId, meta: &BlockMeta) {
        self.on_remove(block, meta);
    }

    fn on_remove(&mut self, block: BlockId, _meta: &BlockMeta) {
        self.freed.remove(&(self.ranks[block.0 as usize], block.0));
    }

    fn victim(&mut self) -> Option<BlockId> {
        self.freed.last().map(|(_, block)| BlockId(*block))
    }
}
