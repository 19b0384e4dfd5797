//! One cache group: its pool on the device, and which block holds which node there.
//!
//! Owns: where nodes reside in this group, and the order in which cached blocks of groups 1 and up are given up. Must never: be
//! searched. Nothing is found here but through a node.
//!
//! # Residency
//!
//! A block that holds `k` times the positions of group 0's resides under the node with which it ends, whole blocks under
//! every `k`-th node of a chain; a partly written one under the node that was the last when its table was given up.
//! On the device no group holds a node that group 0 does not, and nobody holds the former without the latter. A block may leave
//! by itself; the node stays findable and merely lacks it.
//!
//! # The order of giving up in groups 1 and up
//!
//! A window's blocks are worth something together, and only where somebody goes on: at the end of a conversation, at the
//! end of a shared beginning. What a window merely slid over is worth next to nothing, and a long prompt slides over more
//! blocks than the pool has. So cached blocks stand in two lists, each in order of last use (a segmented LRU), and those on *probation* go first.
//! *Protected* is what a table held at its end, what was ever part of a hit, and what a lookup missed when it was computed again.

use crate::list::{Links, List};
use crate::policy::NONE;
use crate::pool::Pool;
use crate::stats::GroupStats;
use crate::types::GroupConfig;

#[derive(Debug)]
pub(crate) struct Group {
    pub config: GroupConfig,
    pub pool: Pool,
    /// Per node its block on the device, or [`NONE`]. Empty in group 0, whose nodes say it themselves.
    pub places: Vec<u32>,
    /// What changes; the rest is put together when it is asked for.
    pub stats: GroupStats,
    /// References beyond the first on each block, summed.
    pub shared: u32,
    /// Of cached blocks. Empty in group 0, where the policy decides.
    links: Links,
    /// Cached blocks on probation, and protected ones.
    lists: [List; 2],
}

impl Group {
    pub fn new(config: GroupConfig, is_first: bool) -> Self {
        assert!(config.blocks < NONE - 1, "block ids are 32 bit with two values reserved");
        assert!((1..=u32::from(u16::MAX)).contains(&config.block_tokens), "a block holds 1 to 65,535 tokens");
        Self {
            config,
            pool: Pool::new(config.blocks),
            places: Vec::new(),
            stats: GroupStats::default(),
            shared: 0,
            links: Links::new(if is_first { 0 } else { config.blocks }),
            lists: [List::EMPTY; 2],
        }
    }

    /// Blocks that hold `positions`, the last perhaps in part.
    pub fn blocks_of(&self, positions: u32) -> u32 {
        self.config.blocks_of(positions, 0)
    }

    /// A block of group 1 or up became cached: it is the youngest.
    pub fn cache(&mut self, block: u32) {
        let list = &mut self.lists[usize::from(self.pool.slot(block).protected)];
        self.links.push_youngest(list, block);
    }

    /// It is not cached any more, or not where it stood.
    pub fn uncache(&mut self, block: u32) {
        let list = &mut self.lists[usize::from(self.pool.slot(block).protected)];
        self.links.remove(list, block);
    }

    /// The cached block that goes first.
    pub fn oldest(&self) -> Option<u32> {
        self.lists.iter().find_map(|list| list.oldest())
    }

    /// The oldest on probation.
    pub fn passed(&self) -> Option<u32> {
        self.lists[0].oldest()
    }

    /// Cached blocks of groups 1 and up in the order they will be given up. For `check`.
    pub fn cached(&self) -> impl Iterator<Item = u32> + '_ {
        self.lists.iter().flat_map(|list| self.links.of(*list))
    }
}
