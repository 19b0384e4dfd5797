//! How many blocks a sequence will take, for whoever decides whether it may run.
//!
//! Owns: the arithmetic of room, per cache group. Changes nothing.
//!
//! A group that is read as a whole is simple: a block that is taken is kept to the end. A window group releases as it goes, so a sequence needs
//! the smaller of (what it still has to take) and (what fits the window and the largest chunk). Two things make the second
//! term safe to promise to somebody ([`KvCache::missing`]): only blocks that no other table holds count as already had,
//! because a shared block that leaves the window makes nothing available; and whoever comes to share blocks of a holder of
//! such a promise must find room for what the holder loses by it ([`KvCache::shared`], [`KvCache::fork_demand`]).

use crate::attach::Lookup;
use crate::cache::KvCache;
use crate::counts::GroupCounts;
use crate::table::BlockTable;

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
    /// What a sequence that attaches `found` and grows so far takes of what is available, at most at any one time.
    pub fn demand(&self, found: &Lookup, growth: Growth) -> GroupCounts {
        let computed = found.full_blocks * self.config.block_tokens;
        self.required(|group| {
            let of = &self.groups[group];
            let whole = computed / of.config.block_tokens;
            let blocks = of.config.blocks_of(growth.positions, growth.tentative).saturating_sub(whole);
            (blocks + found.idle_blocks[group]).min(of.config.blocks_max(growth.chunk, growth.tentative))
        })
    }

    /// Blocks that attaching `found` would share with tables that hold them already, in groups that are not read as a whole.
    pub fn shared(&self, found: &Lookup) -> GroupCounts {
        let computed = found.full_blocks * self.config.block_tokens;
        self.required(|group| {
            let config = self.groups[group].config;
            match config.first_block(computed) {
                _ if config.layout.reach().is_none() => 0,
                first => (computed / config.block_tokens - first.min(computed / config.block_tokens))
                    .saturating_sub(found.idle_blocks[group]),
            }
        })
    }

    /// What a table that is to grow so far will still take of what is available.
    pub fn missing(&self, table: &BlockTable, growth: Growth) -> GroupCounts {
        self.required(|group| {
            // What a transfer writes it may have to take again.
            let written = table.lists[group].len() as u32 - table.own_blocks(group);
            let missing = self.needed_in(table, group, growth.positions) + written;
            let most = self.groups[group].config.blocks_max(growth.chunk, growth.tentative);
            // Counting is spared where it cannot matter.
            match missing > most.saturating_sub(table.held(group).len() as u32) {
                true => missing.min(most.saturating_sub(self.exclusive_in(table, group))),
                false => missing,
            }
        })
    }

    /// What a fork of `table` that is to grow so far will take, and what the table it is forked from loses in
    /// [`KvCache::missing`] by sharing its blocks.
    pub fn fork_demand(&self, table: &BlockTable, growth: Growth) -> (GroupCounts, GroupCounts) {
        let Growth { positions, chunk, tentative } = growth;
        let is_window = |group: usize| self.groups[group].config.layout.reach().is_some();
        let needed = |group| self.needed_in(table, group, positions) + u32::from(is_window(group));
        let most = |group: usize| self.groups[group].config.blocks_max(chunk, tentative);
        let fork = self.required(|group| needed(group).min(most(group)));
        let loss = self.required(|group| match is_window(group) {
            true => needed(group).min(table.held(group).len() as u32),
            false => 0,
        });
        (fork, loss)
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
