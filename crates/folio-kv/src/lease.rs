//! What is read and written beside the steps: by a tier, by a peer.
//!
//! Owns: holds. Must never: end a transfer.
//!
//! A *hold* is a reference on blocks, by a number that is never used again. Whoever reads holds what it reads, whoever writes
//! what it writes, so nobody is given such a slot; it ends when the reader or the writer reports its end.
//!
//! | hold | blocks | name | ends |
//! |---|---|---|---|
//! | a reader outside | published blocks | [`Lease`] | when it is done, or at its time |
//! | a transfer outside | blocks that it writes, of a table | [`Ticket`] | with the transfer's report |
//!
//! A reader asks when it is done whether its lease held ([`KvCache::end_lease`]); where it did not, what was copied is thrown away,
//! whatever it looks like.
//!
//! What a ticket writes is nobody's to read, and counts no written positions, until the report of its end ([`KvCache::end_load`]): a
//! time-out ends the waiting of whoever waits, never what the transfer owns. Who gives up a table drops its own references;
//! those of the ticket stay. What arrived in a table is published when it was verified, in the order of positions.
//!
//! Outside the steps nothing is ordered with them by itself. What is published was written by a step that was committed, so a reader
//! may begin at once. A block that a transfer is given may have been another's until a moment ago, and steps that are under way may
//! still copy or write there for nobody: a transfer begins to write when the last step that was planned before its ticket has ended.
//!
//! Cost: O(blocks) to begin and to end, O(log leases) for each that is over time.

use std::collections::BTreeSet;

use rustc_hash::FxHashMap;

use crate::cache::{CommitRefused, KvCache};
use crate::counts::GroupCounts;
use crate::hash::BlockHashes;
use crate::nodes::RUN;
use crate::retention::Retention;
use crate::stats::QueryStats;
use crate::table::{BlockTable, Lists};
use crate::types::{BlockHash, BlockId, HOLE};

/// Names a reader's hold, for ever.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Lease(pub u64);

/// Names a transfer that writes, for ever.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Ticket(pub u64);

/// What a block holds, or is to be filled with, by its hash: that of the block of group 0 with which it ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Content {
    pub group: u32,
    /// Of the sequence's blocks of that group.
    pub index: u32,
    pub block: BlockId,
    pub hash: BlockHash,
}

/// What is kept with contents outside the device: what they follow, and for how long they are wanted.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Lineage {
    /// The block before the first content; `None`: that is the first of a chain, or not of group 0.
    pub parent: Option<BlockHash>,
    /// Of the contents of group 0, which stand first, each behind the one before: `[contents, block_tokens]`.
    pub tokens: Vec<u32>,
    pub block_tokens: u32,
    /// Of the contents from the first on; those behind are kept as whatever nobody said anything of. `None`: its time to live is over.
    pub retentions: Vec<Option<Retention>>,
}

impl Lineage {
    /// Of content `index` of those that it is about: the block before it and its tokens; nothing where it is not of group 0.
    pub fn of(&self, contents: &[Content], index: usize) -> (Option<BlockHash>, &[u32]) {
        let size = self.block_tokens as usize;
        match self.tokens.get(index * size..(index + 1) * size) {
            Some(tokens) if size > 0 => {
                let before = index.checked_sub(1).and_then(|before| contents.get(before));
                (before.map_or(self.parent, |before| Some(before.hash)), tokens)
            }
            _ => (None, &[]),
        }
    }

    /// Of content `index`, where its time to live is not over.
    pub fn retention(&self, index: usize) -> Option<Retention> {
        self.retentions.get(index).copied().unwrap_or(Some(Retention::default()))
    }
}

/// What a hold is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Use {
    Lease { until: u64 },
    Load,
}

#[derive(Debug, Default)]
pub(crate) struct Holds {
    last: u64,
    holds: FxHashMap<u64, (Use, Lists)>,
    /// When each lease ends.
    ends: BTreeSet<(u64, Lease)>,
    /// What transfers that are not reported write of the device.
    load_bytes: u64,
}

impl Holds {
    /// Blocks of a group that are held, once for each hold.
    pub fn slots(&self, group: usize) -> impl Iterator<Item = u32> + '_ {
        self.holds.values().flat_map(move |(_, slots)| &slots[group]).map(|slot| slot.0)
    }
}

impl KvCache {
    /// A reference on each of `slots`.
    pub(crate) fn hold(&mut self, used: Use, slots: Lists) -> Ticket {
        for (group, slots) in slots.iter().enumerate() {
            slots.iter().for_each(|slot| self.reference(group, *slot));
        }
        if used == Use::Load {
            self.holds.load_bytes += self.bytes_of_lists(&slots);
        }
        self.holds.last += 1;
        self.holds.holds.insert(self.holds.last, (used, slots));
        Ticket(self.holds.last)
    }

    /// The references end. What it was for; `None`: it ended before.
    pub(crate) fn end_hold(&mut self, hold: u64) -> Option<Use> {
        let (used, slots) = self.holds.holds.remove(&hold)?;
        if used == Use::Load {
            self.holds.load_bytes -= self.bytes_of_lists(&slots);
        }
        self.drop_slots(slots);
        Some(used)
    }

    /// What is counted of the bytes that transfers write, and what there is.
    pub(crate) fn load_byte_counts(&self) -> (u64, u64) {
        let loads = self.holds.holds.values().filter(|(used, _)| *used == Use::Load);
        (self.holds.load_bytes, loads.map(|(_, slots)| self.bytes_of_lists(slots)).sum())
    }

    /// Bytes of so many blocks of each group.
    fn bytes_of(&self, blocks: GroupCounts) -> u64 {
        let groups = self.groups.iter().enumerate();
        groups.map(|(at, group)| u64::from(blocks[at]) * group.config.bytes_per_block).sum()
    }

    fn bytes_of_lists(&self, lists: &Lists) -> u64 {
        self.bytes_of(self.each_group(|group| lists[group].len() as u32))
    }

    /// Bytes that a transfer of `blocks` blocks writes at most, in all groups that are needed.
    pub fn load_bytes(&self, blocks: u32) -> u64 {
        let positions = blocks * self.config.block_tokens;
        self.bytes_of(self.required(|group| self.groups[group].blocks_of(positions)))
    }

    /// Bytes that transfers still write, of tables that are gone, too.
    pub fn loading_bytes(&self) -> u64 {
        self.holds.load_bytes
    }

    /// Drops a reference on each of `slots`, the last first.
    fn drop_slots(&mut self, slots: Lists) {
        for (group, slots) in slots.iter().enumerate().rev() {
            for run in slots.rchunks(RUN) {
                if group == 0 {
                    self.bring_near(run);
                }
                run.iter().rev().for_each(|slot| self.unreference(group, *slot));
            }
        }
        self.recycle(slots);
    }

    /// Of the published blocks `from..to` of a table whose sequence ends, those that a tier is to be given: up to the last one that is
    /// worth it, for without those before it no block is found. O(blocks).
    pub fn worth_storing(&self, table: &BlockTable, from: u32, to: u32) -> u32 {
        let blocks = &table.lists[0][..table.published[0] as usize];
        let Some(deepest) = blocks.last() else { return from };
        let is_worth = |at: &u32| {
            let block = blocks[*at as usize];
            self.policy.is_worth_storing(block, &self.meta(block), *deepest)
        };
        (from..to.min(blocks.len() as u32)).rev().find(is_worth).map_or(from, |last| last + 1)
    }

    /// Holds for a reader until `until_us` the blocks of a chain up to position `to`, as far as they are cached, and
    /// what the query there reads of the other groups that are needed, as far as that is; and says which they are, of group 0 from
    /// block `from` on.
    pub fn lease(
        &mut self,
        hashes: &BlockHashes,
        (from, to): (u32, u32),
        until_us: u64,
    ) -> (Lease, Vec<Content>) {
        let mut held = self.spare.pop().unwrap_or_default();
        let mut chain = hashes.iter().take((to / self.config.block_tokens) as usize);
        let mut run = [0; RUN];
        loop {
            let found = self.nodes.find_run(&mut chain, &mut run);
            held[0].extend(run[..found].iter().map(|node| self.block_of(*node)));
            if found < RUN {
                break;
            }
        }
        self.lease_blocks(held, hashes, (from, to), until_us)
    }

    /// The same of what a table has published of its chain: nothing of group 0 is looked up.
    pub fn lease_table(
        &mut self,
        table: &BlockTable,
        (from, to): (u32, u32),
        until_us: u64,
    ) -> (Lease, Vec<Content>) {
        let mut held = self.spare.pop().unwrap_or_default();
        let blocks = (to / self.config.block_tokens).min(table.published_blocks());
        held[0].extend_from_slice(&table.lists[0][..blocks as usize]);
        self.lease_blocks(held, &table.hashes, (from, to), until_us)
    }

    /// `held`: of group 0 the first blocks of the chain, of the others nothing yet.
    fn lease_blocks(
        &mut self,
        mut held: Lists,
        hashes: &BlockHashes,
        (from, to): (u32, u32),
        until_us: u64,
    ) -> (Lease, Vec<Content>) {
        let size = self.config.block_tokens;
        let to = to.min(held[0].len() as u32 * size);
        let mut contents = Vec::with_capacity(self.contents_at(from.min(to / size), to / size) as usize);
        let [blocks, others @ ..] = &mut held;
        let told = blocks.iter().zip(hashes.iter()).skip(from as usize);
        contents.extend((from..).zip(told).map(|(index, (block, hash))| Content {
            group: 0,
            index,
            block: *block,
            hash: *hash,
        }));
        let is_it = |of: &Content| self.nodes.node(self.node_of(of.block)).hash == of.hash;
        debug_assert!(contents.iter().all(is_it), "a block of another chain");
        for (group, held) in (1..self.groups.len()).zip(others) {
            let config = self.groups[group].config;
            let whole = if config.optional { 0 } else { to / config.block_tokens };
            for index in config.first_block(to).min(whole)..whole {
                let last = (index + 1) * config.block_tokens / size - 1;
                let node = self.node_of(blocks[last as usize]);
                if let Some(block) = self.place(group, node) {
                    held.push(block);
                    let hash = self.nodes.node(node).hash;
                    contents.push(Content { group: group as u32, index, block, hash });
                }
            }
        }
        let lease = Lease(self.hold(Use::Lease { until: until_us }, held).0);
        self.holds.ends.insert((until_us, lease));
        (lease, contents)
    }

    /// What is to be kept with `contents`, which are leased. O(tokens).
    pub fn lineage(&self, contents: &[Content]) -> Lineage {
        let (size, blocks) =
            (self.config.block_tokens, contents.partition_point(|content| content.group == 0));
        let first = contents[..blocks].first();
        let mut lineage = Lineage {
            parent: first.and_then(|first| self.parent_hash(self.node_of(first.block))),
            tokens: Vec::with_capacity(blocks * size as usize),
            block_tokens: size,
            retentions: Vec::new(),
        };
        for (at, content) in contents.iter().enumerate() {
            let block = match at < blocks {
                true => Some(content.block),
                // Of a state the block with which it ends may be gone.
                false => self.find_block(&content.hash),
            };
            if at < blocks {
                lineage.tokens.extend_from_slice(self.tokens_of(content.block));
            }
            let unsaid = Some(Retention::default());
            let retention = block.map_or(unsaid, |block| self.policy.retention(block.0));
            if retention != unsaid {
                lineage.retentions.resize(at, unsaid);
                lineage.retentions.push(retention);
            }
        }
        lineage
    }

    /// Contents that [`KvCache::lease`] tells of blocks `from..to` of group 0 where nothing is missing.
    pub fn contents_at(&self, from: u32, to: u32) -> u32 {
        let positions = to * self.config.block_tokens;
        let needed = self.groups[1..].iter().map(|group| group.config).filter(|config| !config.optional);
        let others = needed.map(|config| {
            let whole = positions / config.block_tokens;
            whole - config.first_block(positions).min(whole)
        });
        to - from + others.sum::<u32>()
    }

    /// The reader is done. Whether the lease held all the time: only then is what it copied what it asked for.
    pub fn end_lease(&mut self, lease: Lease) -> bool {
        let Some(Use::Lease { until }) = self.end_hold(lease.0) else { return false };
        self.holds.ends.remove(&(until, lease))
    }

    /// Ends leases that are over time.
    pub(crate) fn end_leases(&mut self, now_us: u64) {
        while let Some((_, lease)) = self.holds.ends.first().copied().filter(|(until, _)| *until <= now_us) {
            self.end_lease(lease);
        }
    }

    /// The last position up to `positions` at which blocks of all groups end that are needed.
    pub fn border(&self, positions: u32) -> u32 {
        let needed = self.groups.iter().filter(|group| !group.config.optional);
        let sizes = needed.map(|group| group.config.block_tokens);
        let multiple = |all: u32, size: u32| (all..).step_by(all as usize).find(|of| of % size == 0);
        positions - positions % sizes.fold(1, |all, size| multiple(all, size).unwrap_or(u32::MAX))
    }

    /// Takes the next `blocks` full blocks behind those that a table has, for a transfer to write. With one group the rest of what the
    /// table has may be computed meanwhile ([`BlockTable::computable`]); of groups that keep no more than what the next query reads only
    /// what the query behind the transfer reads is loaded, so with such there must be no rest; optional groups are not loaded. With the ticket
    /// comes what is to be written, as far as the table knows the hashes. `None`, and nothing changed: there is no room, it would begin or end
    /// within a block of some group that is needed, or rows that may be taken back are under way.
    pub fn begin_load(&mut self, table: &mut BlockTable, blocks: u32) -> Option<(Ticket, Vec<Content>)> {
        let (from, to) = (table.capacity(), table.capacity() + blocks * self.config.block_tokens);
        let whole = |positions| self.border(positions) == positions;
        if blocks == 0
            || !whole(from)
            || !whole(to)
            || (table.computed..from).contains(&table.tentative_from)
            || (self.needed_groups() > 1 && table.computable().min(from) > table.computed)
        {
            return None;
        }
        if (0..self.groups.len()).any(|group| self.shared_tail(table, group, to).is_some()) {
            // It would be copied, in a step.
            return None;
        }
        table.plan_tentative(None);
        self.grow(table, to, &mut Vec::new()).ok()?;
        let (mut slots, mut contents) = (self.spare.pop().unwrap_or_default(), Vec::new());
        for (group, slots) in slots.iter_mut().enumerate().take(self.groups.len()) {
            let config = self.groups[group].config;
            let first = from / config.block_tokens;
            let end = match config.optional {
                // What a drafter has ends here, whatever its blocks hold.
                true => table.lists[group].len() as u32,
                false => to / config.block_tokens,
            };
            for index in first..end {
                let block = table.lists[group][index as usize];
                if block != HOLE && (config.optional || index < config.first_block(to)) {
                    self.exchange(table, group, index as usize, HOLE);
                } else if block != HOLE {
                    slots.push(block);
                    let last = (index + 1) * config.block_tokens / self.config.block_tokens - 1;
                    let (group, hash) = (group as u32, table.hashes.get(last));
                    contents.extend(hash.map(|hash| Content { group, index, block, hash: *hash }));
                }
            }
        }
        let ticket = self.hold(Use::Load, slots);
        table.transfers.push((Some(ticket), blocks));
        Some((ticket, contents))
    }

    /// The transfer ended. `table`: the one it was begun for, if it is still there; `tokens`: all that its
    /// sequence knows. Where it was `verified`, what arrived is there, and in a table published as soon as everything before it is;
    /// where not, the table ends before it.
    pub fn end_load(
        &mut self,
        ticket: Ticket,
        table: Option<&mut BlockTable>,
        tokens: &[u32],
        verified: bool,
    ) -> Result<(), CommitRefused> {
        let (Some(_), Some(table)) = (self.end_hold(ticket.0), table) else { return Ok(()) };
        let Some(at) = table.transfers.iter().position(|(own, _)| *own == Some(ticket)) else {
            return Ok(());
        };
        if !verified {
            self.cut(table, at);
            return Ok(());
        }
        table.transfers[at].0 = None;
        let (query, before) = (table.query, table.computed);
        if table.arrived(before) == before {
            return Ok(());
        }
        self.commit(table, tokens, before)?;
        if query.count > 0 {
            // No step of it was committed.
            let loaded = u64::from(table.computed - before);
            self.count(
                table.hashes.root().tenant,
                QueryStats { hit_tokens: loaded, ..QueryStats::default() },
            );
            table.query = QueryStats { hit_tokens: query.hit_tokens + loaded, ..query };
        }
        Ok(())
    }

    /// Nobody waits for what transfers write of a table any more: it ends before that.
    pub fn drop_transfers(&mut self, table: &mut BlockTable) {
        self.cut(table, 0);
    }

    /// The table ends before its `at`-th transfer.
    fn cut(&mut self, table: &mut BlockTable, at: usize) {
        let blocks: u32 = table.transfers.drain(at..).map(|(_, blocks)| blocks).sum();
        let end = table.capacity() - blocks * self.config.block_tokens;
        table.change(end);
        for group in (0..self.groups.len()).rev() {
            self.truncate(table, group, self.groups[group].blocks_of(end));
        }
    }
}
