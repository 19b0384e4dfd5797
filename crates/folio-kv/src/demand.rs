//! How many blocks a sequence will take, for whoever decides whether it may run.
//!
//! Owns: the arithmetic of room, per cache group. Changes nothing.
//!
//! Group 0 is simple: a block that is taken is kept to the end. A window group gives back as it goes, so a sequence needs
//! the smaller of (what it still has to take) and (what fits the window and the largest chunk). Two things make the second
//! term safe to promise to somebody ([`KvCache::missing`]): only blocks that no other table holds count as already had,
//! because a shared block that leaves the window makes nothing available; and whoever comes to share blocks of a holder of
//! such a promise must find room for what the holder loses by it ([`KvCache::shared`], [`KvCache::fork_demand`]).

use crate::cache::{KvCache, Lookup};
use crate::counts::GroupCounts;
use crate::table::BlockTable;

impl KvCache {
    /// What a sequence of `positions` positions that attaches `found` takes of what is available, at most at any one time,
    /// when no step computes more than `chunk` of its positions.
    pub fn demand(&self, found: &Lookup, positions: u32, chunk: u32) -> GroupCounts {
        let blocks = positions.div_ceil(self.config.block_tokens).saturating_sub(found.full_blocks);
        self.within_windows(chunk, |group| blocks + found.idle_blocks[group])
    }

    /// Window blocks that attaching `found` would share with tables that hold them already.
    pub fn shared(&self, found: &Lookup) -> GroupCounts {
        let (size, computed) = (self.config.block_tokens, found.full_blocks * self.config.block_tokens);
        GroupCounts::each(self.groups(), |group| match group.checked_sub(1) {
            None => 0,
            Some(window) => {
                let first = self.windows[window].config.first_block(computed, size);
                (found.full_blocks - first).saturating_sub(found.idle_blocks[group])
            }
        })
    }

    /// What a table that is to grow to `positions`, at most `chunk` in a step, will still take of what is available.
    pub fn missing(&self, table: &BlockTable, positions: u32, chunk: u32) -> GroupCounts {
        let mut missing = self.needed(table, positions);
        for (window, pool) in self.windows.iter().enumerate() {
            let most = pool.config.blocks_max(chunk, self.config.block_tokens);
            let missing = &mut missing[window + 1];
            // Counting is spared where it cannot matter.
            if *missing > most.saturating_sub(table.held(window).len() as u32) {
                *missing = (*missing).min(most.saturating_sub(self.exclusive_in_window(table, window)));
            }
        }
        missing
    }

    /// What a fork of `table` that is to grow to `positions` will take, and what the table it is forked from loses in
    /// [`KvCache::missing`] by sharing its blocks.
    pub fn fork_demand(&self, table: &BlockTable, positions: u32, chunk: u32) -> (GroupCounts, GroupCounts) {
        let needed = self.needed(table, positions);
        let fork = self.within_windows(chunk, |group| needed[group] + u32::from(group > 0));
        let loss = GroupCounts::each(self.groups(), |group| match group.checked_sub(1) {
            None => 0,
            Some(window) => (needed[group] + 1).min(table.held(window).len() as u32),
        });
        (fork, loss)
    }

    /// Longest sequence that can run at all, alone, when a step computes at most `chunk` positions.
    pub fn positions_max(&self, chunk: u32) -> u64 {
        let size = self.config.block_tokens;
        let full = u64::from(self.config.blocks) * u64::from(size);
        let short =
            self.windows.iter().filter(|pool| pool.config.blocks_max(chunk, size) > pool.config.blocks);
        short.map(|pool| u64::from(pool.config.blocks) * u64::from(size)).fold(full, u64::min)
    }

    /// `blocks(group)`, in a window group no more than the window and a chunk take.
    fn within_windows(&self, chunk: u32, blocks: impl Fn(usize) -> u32) -> GroupCounts {
        GroupCounts::each(self.groups(), |group| match group.checked_sub(1) {
            None => blocks(group),
            Some(window) => {
                blocks(group).min(self.windows[window].config.blocks_max(chunk, self.config.block_tokens))
            }
        })
    }
}
