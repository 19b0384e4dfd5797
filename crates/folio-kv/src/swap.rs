//! Copies of a preempted sequence's blocks in the swap space: which slot holds which block of whom.
//!
//! Owns: the slots of each cache group, and [`Swapped`], what one sequence has there. Must never: be searched. A copy is
//! reached through its [`Swapped`] alone, which its sequence holds; it is in no index, nobody else finds it, and what drops it
//! forgets it.
//!
//! # What a copy holds
//!
//! A table that is given up leaves full blocks in the index, where they may or may not survive. A copy holds what only this
//! table referenced, to the last position known to be in memory, the partly written block included; of a window group the
//! blocks of the next query's window, whoever else holds them. What others share is theirs to keep: if it is gone when the
//! sequence comes back, the copy has no beginning and is of no use.
//!
//! # Coming back
//!
//! [`KvCache::attach_swapped`] attaches what group 0 still has of the beginning, whatever its windows lack, and takes blocks
//! for the rest, to be filled from their slots before the step computes. They are private until the step's `commit`, which
//! publishes them as if the step had computed them: a step that never runs leaves nothing wrong behind.
//!
//! A step's order is: swaps out, copies, swaps in, then writes (see `cache` for the middle). What is swapped out may be given
//! to anybody at once; what is swapped in may be a block that a copy of the same step still has to read.
//!
//! Invariants: a slot is free or in one copy; copies of one step never share slots with those dropped in it, because slots are
//! given back between steps or when a copy never ran.
//!
//! Cost: O(blocks copied). Lists are reused, so that a steady state allocates nothing.

use crate::cache::{KvCache, Lookup};
use crate::check::{Violation, count};
use crate::counts::{GroupCounts, MAX_GROUPS};
use crate::table::BlockTable;
use crate::types::{BlockId, HOLE, Root, TenantId, first_block};

/// Copy block `block` of `group` to slot `slot` of the group's swap space, or back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockSwap {
    pub group: u32,
    pub block: BlockId,
    pub slot: u32,
}

/// What a copy of a table would hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SwapOffer {
    /// Positions of group 0 whose KV it would hold.
    pub from: u32,
    pub to: u32,
    pub slots: GroupCounts,
    pub bytes: u64,
}

/// A copy. Hand it back with [`KvCache::drop_swapped`]: one that is merely dropped leaks its slots
/// ([`KvCache::check_swapped`] reports that).
#[derive(Debug)]
#[must_use = "a dropped copy leaks its slots: give it to KvCache::drop_swapped"]
pub struct Swapped {
    root: Root,
    /// First block of group 0, and positions in all.
    first: u32,
    end: u32,
    /// Of blocks `first ..` of group 0, and of each window group from the window of position `end` on.
    slots: SlotLists,
}

type SlotLists = [Vec<u32>; MAX_GROUPS];

/// The slots there are.
#[derive(Debug, Default)]
pub(crate) struct SwapSpace {
    total: GroupCounts,
    free: SlotLists,
    spare: Vec<SlotLists>,
}

/// Emptied lists kept for the next copies.
const SPARE_LISTS: usize = 256;

impl Swapped {
    pub fn tenant(&self) -> TenantId {
        self.root.tenant
    }

    /// Positions that need not be computed once it is back.
    pub fn positions(&self) -> u32 {
        self.end
    }

    /// Slots of a group.
    pub fn slots(&self, group: usize) -> &[u32] {
        &self.slots[group]
    }
}

impl KvCache {
    /// So many slots in each group, all free; before anything is swapped out.
    pub fn set_swap_space(&mut self, slots: GroupCounts) {
        let free = std::array::from_fn(|group| (0..slots[group]).rev().collect());
        self.swap = SwapSpace { total: slots, free, spare: Vec::new() };
        self.stats.swap_bytes = self.swap_bytes(slots);
    }

    /// Slots of each group.
    pub fn swap_slots(&self) -> GroupCounts {
        self.swap.total
    }

    /// Bytes of so many blocks of each group.
    fn swap_bytes(&self, blocks: GroupCounts) -> u64 {
        let windows = self.windows.iter().enumerate();
        let windows =
            windows.map(|(window, pool)| u64::from(blocks[window + 1]) * pool.config.bytes_per_block);
        u64::from(blocks[0]) * self.config.bytes_per_block + windows.sum::<u64>()
    }

    /// What a copy of `table` would hold. `None`: nothing is its own, there is no room, or what a window needs is gone.
    pub fn swap_offer(&self, table: &BlockTable) -> Option<SwapOffer> {
        let size = self.config.block_tokens;
        let (to, blocks) = (table.confirmed, table.confirmed.div_ceil(size));
        let shared = table.root.shared_blocks();
        let first = table.blocks.len() as u32 - self.exclusive_full(table);
        // What an operator shares is nobody's own and not copied, so a window must have left it.
        let inside = (0..self.windows.len()).any(|window| table.first_block(window, to) < shared);
        if first >= blocks || inside {
            return None;
        }
        let slots = GroupCounts::each(self.groups(), |group| match group.checked_sub(1) {
            None => blocks - first,
            Some(window) => blocks - table.first_block(window, to).min(blocks),
        });
        let held = |window: usize| {
            let needed = table.first_block(window, to) as usize..blocks as usize;
            table.windows[window][needed].iter().all(|block| *block != HOLE)
        };
        let room = (0..self.groups()).all(|group| slots[group] as usize <= self.swap.free[group].len());
        let whole = (0..self.windows.len()).all(held);
        (room && whole).then(|| SwapOffer { from: first * size, to, slots, bytes: self.swap_bytes(slots) })
    }

    /// Takes slots for a copy of `table`, which is given up next. The copying is asked for in `swaps` and belongs into the
    /// next step that runs.
    pub fn swap_out(&mut self, table: &BlockTable, offer: &SwapOffer, swaps: &mut Vec<BlockSwap>) -> Swapped {
        let size = self.config.block_tokens;
        let end = offer.to.div_ceil(size);
        let mut slots = self.swap.spare.pop().unwrap_or_default();
        for (group, slots) in slots.iter_mut().enumerate().take(self.groups()) {
            let from = (end - offer.slots[group]) as usize;
            for block in &table.group(group)[from..end as usize] {
                let slot = self.swap.free[group].pop().expect("the offer counted the free slots");
                slots.push(slot);
                swaps.push(BlockSwap { group: group as u32, block: *block, slot });
            }
        }
        self.stats.swapped_bytes += offer.bytes;
        Swapped { root: table.root, first: offer.from / size, end: offer.to, slots }
    }

    /// Forgets a copy.
    pub fn drop_swapped(&mut self, swapped: Swapped) {
        let Swapped { mut slots, .. } = swapped;
        let counts = GroupCounts::each(self.groups(), |group| slots[group].len() as u32);
        self.stats.swapped_bytes -= self.swap_bytes(counts);
        for (free, slots) in self.swap.free.iter_mut().zip(&mut slots) {
            free.append(slots);
        }
        if self.swap.spare.len() < SPARE_LISTS {
            self.swap.spare.push(slots);
        }
    }

    /// What [`KvCache::attach_swapped`] would find: `full_blocks` in the pool, and as `tail_tokens` the rest, from the copy.
    /// `None`: what it continues is gone. `tokens`: all that the sequence knows.
    pub fn lookup_swapped(&self, tokens: &[u32], swapped: &Swapped) -> Option<Lookup> {
        let size = self.config.block_tokens;
        let mut idle = 0;
        let found = self.follow(tokens, swapped, |block| {
            idle += u32::from(self.tree.block(block).refs == 0);
        });
        let idle_blocks = GroupCounts::each(self.groups(), |group| match group.checked_sub(1) {
            None => idle,
            Some(window) => found.saturating_sub(self.first_swapped(window, swapped)),
        });
        let tail_tokens = swapped.end - found * size;
        let shared_blocks = swapped.root.shared_blocks();
        let lookup = Lookup { full_blocks: found, tail_tokens, idle_blocks, shared_blocks };
        (found >= swapped.first).then_some(lookup)
    }

    /// Bytes to copy when `found` blocks are in the pool.
    pub fn restored_bytes(&self, swapped: &Swapped, found: &Lookup) -> u64 {
        let mut blocks = GroupCounts::each(self.groups(), |group| swapped.slots[group].len() as u32);
        blocks[0] -= found.full_blocks.saturating_sub(swapped.first).min(blocks[0]);
        self.swap_bytes(blocks)
    }

    /// A table with all that was copied: what is in the pool is referenced, for the rest blocks are taken and their filling
    /// is asked for in `swaps`, which belongs into the step being planned. `None`, and nothing changed: what the copy
    /// continues is gone, or there is no room. Counts no query: the sequence was counted when it was first attached.
    ///
    /// The copy stays until the step has run: the caller may have to give the table up before.
    pub fn attach_swapped(
        &mut self,
        tokens: &[u32],
        swapped: &Swapped,
        swaps: &mut Vec<BlockSwap>,
    ) -> Option<BlockTable> {
        let (size, root) = (self.config.block_tokens, swapped.root);
        let blocks = swapped.end.div_ceil(size);
        let found = self.lookup_swapped(tokens, swapped)?;
        let needed = GroupCounts::each(self.groups(), |group| match group.checked_sub(1) {
            None => blocks - found.full_blocks,
            Some(window) => blocks - self.first_swapped(window, swapped),
        });
        if !(needed + GroupCounts::full(found.idle_blocks[0])).fits(self.available_to(root.tenant)) {
            return None;
        }
        let mut table = self.table_of(root);
        self.follow(tokens, swapped, |block| table.blocks.push(BlockId(block)));
        for &block in &table.blocks {
            self.reference(block);
            self.hit(block);
        }
        table.published = found.full_blocks;
        table.restored = true;
        table.computed = swapped.end;
        let filled = |index: u32| size.min(swapped.end - index * size);
        for index in found.full_blocks..blocks {
            let block = self.take(root.tenant).expect("counted as available");
            self.set_filled(block, filled(index));
            table.blocks.push(block);
            let slot = swapped.slots[0][(index - swapped.first) as usize];
            swaps.push(BlockSwap { group: 0, block, slot });
        }
        for (window, pool) in self.windows.iter_mut().enumerate() {
            let first = table.first_block(window, swapped.end).min(blocks);
            table.windows[window].resize(first as usize, HOLE);
            for (index, slot) in (first..blocks).zip(&swapped.slots[window + 1]) {
                let block = pool.take(root.tenant).expect("counted as available");
                pool.set_filled(block, filled(index));
                table.windows[window].push(block);
                swaps.push(BlockSwap { group: window as u32 + 1, block, slot: *slot });
            }
        }
        Some(table)
    }

    /// First block of a window group that the copy holds.
    fn first_swapped(&self, window: usize, swapped: &Swapped) -> u32 {
        let size = self.config.block_tokens;
        let first = first_block(self.windows[window].config.window_tokens, swapped.end, size);
        first.min(swapped.end.div_ceil(size))
    }

    /// Leading full blocks that group 0 still has, whatever their windows lack; `each` is told every one.
    fn follow(&self, tokens: &[u32], swapped: &Swapped, mut each: impl FnMut(u32)) -> u32 {
        let mut found = 0;
        for hash in swapped.root.hashes(&tokens[..swapped.end as usize], self.config.block_tokens) {
            let Some(block) = self.tree.find(&hash) else { break };
            each(block);
            found += 1;
        }
        found
    }

    /// The window blocks of a table that came from a copy become companions of what group 0 had all along.
    pub(crate) fn publish_restored_windows(&mut self, table: &mut BlockTable) {
        let first = (0..self.windows.len()).map(|window| table.first_block(window, table.computed)).min();
        for index in first.unwrap_or(table.published)..table.published {
            if self.publish_windows(table, index as usize) {
                self.supersede_if_complete(table.blocks[index as usize]);
            }
        }
    }

    /// As [`KvCache::supersede`], unless a companion is lacking, as where a copy had none.
    pub(crate) fn supersede_if_complete(&mut self, block: BlockId) {
        if self.windows.iter().all(|window| window.companion(block.0).is_some()) {
            self.supersede(block);
        }
    }

    /// Verifies that every slot is free or in one of `copies`, which must be all there are, and that bytes are counted.
    pub fn check_swapped(&self, copies: &[&Swapped]) -> Result<(), Violation> {
        let mut used = GroupCounts::default();
        for group in 0..self.groups() {
            let mut states = vec![0u64; self.swap.total[group] as usize];
            for slot in copies.iter().flat_map(|copy| &copy.slots[group]) {
                states[*slot as usize] += 1;
                used[group] += 1;
            }
            self.swap.free[group].iter().for_each(|slot| states[*slot as usize] += 1);
            for state in states {
                count("places of a slot of the swap space, free or one copy,", state, 1)?;
            }
        }
        count("bytes in the swap space", self.stats.swapped_bytes, self.swap_bytes(used))?;
        let size = self.config.block_tokens;
        for copy in copies {
            let full = copy.end.div_ceil(size) - copy.first;
            count("slots of a copy in group 0", copy.slots[0].len() as u64, full.into())?;
            for window in 0..self.windows.len() {
                let needed = copy.end.div_ceil(size) - self.first_swapped(window, copy);
                count(
                    "slots of a copy in a window group",
                    copy.slots[window + 1].len() as u64,
                    needed.into(),
                )?;
            }
        }
        Ok(())
    }
}
