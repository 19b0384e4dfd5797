//! How many blocks a sequence will take, for whoever decides whether it may run.
//!
//! Owns: the arithmetic of room, per cache group. Changes nothing.
//!
//! A group that is read as a whole is simple: a block that is taken is kept to the end. A window group releases as it goes, so a sequence needs
//! the smaller of (what it still has to take) and (what fits the window and the largest chunk, less what it holds). The second term may be
//! promised to somebody because every reference counts: a block that several hold makes nothing available for the first who leaves it behind,
//! so beside all promises there must be a block for each reference beyond the first ([`KvCache::shared_references`]). A promise is its
//! holder's own affair then, and who comes to share blocks finds room for that ([`KvCache::demand`], [`KvCache::fork_demand`]).

use crate::cache::KvCache;
use crate::counts::GroupCounts;
use crate::lookup::Lookup;
use crate::table::BlockTable;
use crate::types::HOLE;

/// How far a sequence will grow, and in what steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Growth {
    pub positions: u32,
    /// Most positions that a step computes of it.
    pub chunk: u32,
    /// Most of those that may be taken back.
    pub tentative: u32,
}

impl KvCache {
    /// What a sequence that attaches `found` and grows so far takes of what is available, at most at any one time. `counts_shared`: in groups
    /// whose blocks are left behind one by one also its references on what others hold.
    pub fn demand(&self, found: &Lookup, growth: Growth, counts_shared: bool) -> GroupCounts {
        let computed = found.full_blocks * self.config.block_tokens;
        self.required(|group| {
            let config = self.groups[group].config;
            let whole = computed / config.block_tokens;
            let blocks = config.blocks_of(growth.positions, growth.tentative).saturating_sub(whole);
            let attached = match config.layout.reach() {
                Some(_) if counts_shared => whole - config.first_block(computed).min(whole),
                _ => found.idle_blocks[group],
            };
            (blocks + attached).min(config.blocks_max(growth.chunk, growth.tentative))
        })
    }

    /// What a table that is to grow so far will still take of what is available.
    pub fn missing(&self, table: &BlockTable, growth: Growth) -> GroupCounts {
        self.required(|group| {
            // What a transfer writes it may have to take again.
            let written = table.lists[group].len() as u32 - table.own_blocks(group);
            let missing = self.needed_in(table, group, growth.positions) + written;
            let config = self.groups[group].config;
            let most = config.blocks_max(growth.chunk, growth.tentative);
            // Counting is spared where it cannot matter.
            if missing <= most.saturating_sub(table.held(group).len() as u32) {
                return missing;
            }
            // The copy of a shared tail takes a block before it leaves one.
            let copy = u32::from(self.shared_tail(table, group, growth.positions).is_some());
            let held = table.held(group).iter().filter(|block| **block != HOLE).count() as u32;
            missing.min(most.saturating_sub(held) + copy)
        })
    }

    /// Blocks of a table that transfers write, or that arrived before what is to come before them.
    pub fn written_by_transfers(&self, table: &BlockTable) -> GroupCounts {
        let written = |group| {
            let from = table.own_blocks(group) as usize;
            table.lists[group][from..].iter().filter(|block| **block != HOLE).count() as u32
        };
        self.required(written)
    }

    /// References beyond the first on a block, in groups whose blocks are left behind one by one.
    pub fn shared_references(&self) -> GroupCounts {
        let leaves = |group: &usize| self.groups[*group].config.layout.reach().is_some();
        self.required(|group| if leaves(&group) { self.groups[group].shared } else { 0 })
    }

    /// What a fork of `table` that is to grow so far will take beside copies of blocks that are written in part, its references on what both hold
    /// included.
    pub fn fork_demand(&self, table: &BlockTable, growth: Growth) -> GroupCounts {
        self.required(|group| {
            let (needed, config) =
                (self.needed_in(table, group, growth.positions), self.groups[group].config);
            let held = if config.layout.reach().is_some() { table.held(group).len() as u32 } else { 0 };
            (held + needed).min(config.blocks_max(growth.chunk, growth.tentative).max(held))
        })
    }

    /// Longest sequence that can run at all, alone, when a step computes at most `chunk` positions and one may be taken back.
    pub fn positions_max(&self, chunk: u32) -> u64 {
        let short = |group: &&crate::group::Group| {
            !group.config.optional && group.config.blocks_max(chunk, 1) > group.config.blocks
        };
        let positions = |group: &crate::group::Group| {
            u64::from(group.config.blocks) * u64::from(group.config.block_tokens)
        };
        self.groups.iter().filter(short).map(positions).min().unwrap_or(u64::MAX)
    }

    /// `blocks(group)`, of optional groups none.
    pub(crate) fn required(&self, blocks: impl Fn(usize) -> u32) -> GroupCounts {
        self.each_group(|group| if self.groups[group].config.optional { 0 } else { blocks(group) })
    }
}
