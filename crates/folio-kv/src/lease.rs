//! What is read and written beside the steps: by a tier, by a peer.
//!
//! Owns: leases, which protect readers, and tickets, which protect what is written to. Must never: end a transfer.
//!
//! A *lease* holds content while somebody outside copies it, until a time at most. Who reads asks when it is done whether the
//! lease held ([`KvCache::end_lease`]); where it did not, what was copied is thrown away, whatever it looks like. A lease's number
//! is never used again, so an old one says nothing of what is there now.
//!
//! A *ticket* is a transfer that writes blocks of a table. They are private, and only the report of the transfer's end
//! ([`KvCache::end_load`]) makes them anything else: a time-out ends the waiting of whoever waits, never what the transfer owns. If
//! the table is given up before, its blocks stay with the ticket and are free when it ends. What arrived is published when it was
//! verified, in the order of positions.
//!
//! Neither is ordered with the steps by itself. What is published was written by a step that was committed, so a reader may begin
//! at once. A block that a transfer is given may have been another's until a moment ago, and steps that are under way may still
//! copy or write there for nobody: a transfer begins to write when the last step that was planned before its ticket has ended.
//! What a preemption asked to be copied out is read only by the next step that is begun, from blocks that are free already. So no ticket is
//! begun while a plan waits with such copies: its transfer would spoil them, or wait for a step that waits for its blocks.
//! Nor may loads begin without end while a sequence is refused blocks: it would never get them.
//!
//! Cost: O(blocks) to begin and to end, O(log leases) for each that is over time.

use std::collections::BTreeSet;

use rustc_hash::FxHashMap;

use crate::cache::{CommitRefused, KvCache};
use crate::table::BlockTable;
use crate::types::{BlockId, HOLE};

/// Names a reader's hold, for ever.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Lease(pub u64);

/// Names a transfer that writes, for ever.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Ticket(pub u64);

#[derive(Debug, Default)]
pub(crate) struct Leases {
    next: u64,
    /// What each lease holds, and until when.
    leases: FxHashMap<Lease, (u64, Vec<(usize, BlockId)>)>,
    ends: BTreeSet<(u64, Lease)>,
    /// Blocks whose table is gone and which a transfer still writes.
    left: FxHashMap<Ticket, Vec<(usize, BlockId)>>,
}

impl Leases {
    fn number(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    /// Blocks on the device that leases and transfers hold, once for each.
    pub fn blocks(&self) -> impl Iterator<Item = (usize, BlockId)> + '_ {
        self.leases.values().flat_map(|(_, blocks)| blocks).chain(self.left.values().flatten()).copied()
    }
}

impl KvCache {
    /// Holds the published blocks of a table for a reader until `until_us`, from its first one on to `blocks` of group 0, and what
    /// the query behind them reads of the other groups.
    pub fn lease(&mut self, table: &BlockTable, blocks: u32, until_us: u64) -> Lease {
        let blocks = blocks.min(table.published[0]);
        let computed = blocks * self.config.block_tokens;
        let mut held = Vec::new();
        for group in 0..self.groups.len() {
            let config = self.groups[group].config;
            let whole = computed / config.block_tokens;
            let read = config.first_block(computed).min(whole)..whole.min(table.published[group]);
            let list = table.lists[group].get(read.start as usize..read.end as usize).unwrap_or_default();
            held.extend(list.iter().filter(|block| **block != HOLE).map(|block| (group, *block)));
        }
        held.iter().for_each(|(group, block)| self.reference(*group, *block));
        let lease = Lease(self.leases.number());
        self.leases.ends.insert((until_us, lease));
        self.leases.leases.insert(lease, (until_us, held));
        lease
    }

    /// The reader is done. Whether the lease held all the time: only then is what it copied what it asked for.
    pub fn end_lease(&mut self, lease: Lease) -> bool {
        let Some((until, held)) = self.leases.leases.remove(&lease) else { return false };
        self.leases.ends.remove(&(until, lease));
        held.into_iter().rev().for_each(|(group, block)| self.unreference(group, block));
        true
    }

    /// Ends leases that are over time.
    pub(crate) fn end_leases(&mut self, now_us: u64) {
        while let Some((_, lease)) = self.leases.ends.first().copied().filter(|(until, _)| *until <= now_us) {
            self.end_lease(lease);
        }
    }

    /// Takes blocks for the next `blocks` full blocks of a table, for a transfer to write. Nothing of them is computed before it
    /// ends. `None`, and nothing changed: there is no room, or it would begin or end within a block of some group.
    pub fn begin_load(&mut self, table: &mut BlockTable, blocks: u32) -> Option<Ticket> {
        let size = self.config.block_tokens;
        let pending: u32 = table.tickets.iter().map(|(_, blocks)| blocks).sum();
        let (from, to) = (table.computed + pending * size, table.computed + (pending + blocks) * size);
        let whole = |positions: u32| {
            self.groups.iter().all(|group| positions.is_multiple_of(group.config.block_tokens))
        };
        if blocks == 0 || table.capacity() != from || !whole(from) || !whole(to) {
            return None;
        }
        table.plan_tentative(None);
        // A whole block has no tail to copy.
        self.grow(table, to, &mut Vec::new()).ok()?;
        let ticket = Ticket(self.leases.number());
        table.tickets.push((ticket, blocks));
        Some(ticket)
    }

    /// The transfer ended. `table`: the one it was begun for, if it is still there; `tokens`: all that its sequence knows.
    /// Where it was `verified`, what arrived is published as soon as everything before it is; where not, the table ends before it.
    pub fn end_load(
        &mut self,
        ticket: Ticket,
        table: Option<&mut BlockTable>,
        tokens: &[u32],
        verified: bool,
    ) -> Result<(), CommitRefused> {
        if let Some(blocks) = self.leases.left.remove(&ticket) {
            blocks.into_iter().rev().for_each(|(group, block)| self.unreference(group, block));
            return Ok(());
        }
        let Some(table) = table else { return Ok(()) };
        let Some(at) = table.tickets.iter().position(|(own, _)| *own == ticket) else { return Ok(()) };
        if !verified {
            let before: u32 = table.tickets[..at].iter().map(|(_, blocks)| blocks).sum();
            let (_, blocks) = table.tickets.remove(at);
            let later = table.tickets.split_off(at);
            let end = table.computed / self.config.block_tokens + before;
            self.leave(table, end + blocks, later);
            self.cut(table, end);
            return Ok(());
        }
        let blocks = table.tickets[at].1;
        match at {
            0 => {
                table.tickets.remove(0);
                let computed = table.computed + blocks * self.config.block_tokens;
                self.commit(table, tokens, computed)
            }
            // It waits for those before it, and ends with them.
            _ => {
                table.tickets.remove(at);
                table.tickets[at - 1].1 += blocks;
                Ok(())
            }
        }
    }

    /// The table is given up: what transfers write stays theirs.
    pub(crate) fn leave_to_transfers(&mut self, table: &mut BlockTable) {
        if !table.tickets.is_empty() {
            let (from, tickets) =
                (table.computed / self.config.block_tokens, std::mem::take(&mut table.tickets));
            self.leave(table, from, tickets);
        }
    }

    /// Leaves the blocks of `tickets`, the last of the table, from block `from` of group 0 on, to their transfers.
    fn leave(&mut self, table: &mut BlockTable, from: u32, tickets: Vec<(Ticket, u32)>) {
        let mut at = from * self.config.block_tokens;
        for (ticket, blocks) in tickets {
            let end = at + blocks * self.config.block_tokens;
            let mut left = Vec::new();
            for (group, list) in table.lists.iter_mut().enumerate().take(self.groups.len()) {
                let size = self.groups[group].config.block_tokens;
                for block in &mut list[(at / size) as usize..(end / size) as usize] {
                    let block = std::mem::replace(block, HOLE);
                    left.extend((block != HOLE).then_some((group, block)));
                }
            }
            self.leases.left.insert(ticket, left);
            at = end;
        }
        self.cut(table, from);
    }

    /// Drops everything from block `from` of group 0 on.
    fn cut(&mut self, table: &mut BlockTable, from: u32) {
        table.change(from * self.config.block_tokens);
        for group in (0..self.groups.len()).rev() {
            let blocks = self.groups[group].blocks_of(from * self.config.block_tokens) as usize;
            while table.lists[group].len() > blocks {
                if let Some(block) = table.lists[group].pop().filter(|block| *block != HOLE) {
                    self.unreference(group, block);
                }
            }
        }
    }
}
