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

impl KvCache {
    /// What a sequence of `positions` positions that attaches `found` takes of what is available, at most at any one time,
    /// when no step computes more than `chunk` of its positions.
    pub fn demand(&self, found: &Lookup, positions: u32, chunk: u32) -> GroupCounts {
        let computed = found.full_blocks * self.config.block_tokens;
        self.required(|group| {
            let of = &self.groups[group];
            let whole = computed / of.config.block_tokens;
            let blocks = of.blocks_of(positions).saturating_sub(whole);
            (blocks + found.idle_blocks[group]).min(of.config.blocks_max(chunk))
        })
    }

    /// Blocks that attaching `found` would share with tables that hold them already, in groups that are not read as a whole.
    pub fn shared(&self, found: &Lookup) -> GroupCounts {
        let computed = found.full_blocks * self.config.block_tokens;
        self.required(|group| {
            let config = self.groups[group].config;
            match config.first_block(computed) {
                _ if config.blocks_max(1) == u32::MAX => 0,
                first => (computed / config.block_tokens - first.min(computed / config.block_tokens))
                    .saturating_sub(found.idle_blocks[group]),
            }
        })
    }

    /// What a table that is to grow to `positions`, at most `chunk` in a step, will still take of what is available.
    pub fn missing(&self, table: &BlockTable, positions: u32, chunk: u32) -> GroupCounts {
        self.required(|group| {
            // What a transfer writes it may have to take again.
            let written = table.lists[group].len() as u32 - table.own_blocks(group);
            let missing = self.needed_in(table, group, positions) + written;
            let most = self.groups[group].config.blocks_max(chunk);
            // Counting is spared where it cannot matter.
            match missing > most.saturating_sub(table.held(group).len() as u32) {
                true => missing.min(most.saturating_sub(self.exclusive_in(table, group))),
                false => missing,
            }
        })
    }

    /// What a fork of `table` that is to grow to `positions` will take, and what the table it is forked from loses in
    /// [`KvCache::missing`] by sharing its blocks.
    pub fn fork_demand(&self, table: &BlockTable, positions: u32, chunk: u32) -> (GroupCounts, GroupCounts) {
        let is_window = |group: usize| self.groups[group].config.blocks_max(1) < u32::MAX;
        let needed = |group| self.needed_in(table, group, positions) + u32::from(is_window(group));
        let fork = self.required(|group| needed(group).min(self.groups[group].config.blocks_max(chunk)));
        let loss = self.required(|group| match is_window(group) {
            true => needed(group).min(table.held(group).len() as u32),
            false => 0,
        });
        (fork, loss)
    }

    /// Longest sequence that can run at all, alone, when a step computes at most `chunk` positions.
    pub fn positions_max(&self, chunk: u32) -> u64 {
        let short = |group: &&crate::group::Group| {
            !group.config.optional && group.config.blocks_max(chunk) > group.config.blocks
        };
        let positions = |group: &crate::group::Group| {
            u64::from(group.config.blocks) * u64::from(group.config.block_tokens)
        };
        self.groups.iter().filter(short).map(positions).min().unwrap_or(u64::MAX)
    }

    /// `blocks(group)`, of optional groups none.
    fn required(&self, blocks: impl Fn(usize) -> u32) -> GroupCounts {
        self.each_group(|group| if self.groups[group].config.optional { 0 } else { blocks(group) })
    }
}
