//! Host memory: copies of a preempted sequence's blocks.
//!
//! Owns: the slots of each cache group off the device, and [`Swapped`], what one sequence holds there.
//!
//! # What a copy holds
//!
//! A table that is given up leaves full blocks in the index, where they may or may not survive. A copy holds what only this
//! table referenced, to the last position known to be in memory, blocks written in part included; of a window group the
//! blocks of the next query's window, whoever else holds them. What others share is theirs to keep: if it is gone when the
//! sequence comes back, the copy has no beginning and is of no use.
//!
//! Whole blocks of it are residency of their nodes: once they are written, whoever asks for the same content finds them, as a
//! hit that must be loaded.
//!
//! # Order
//!
//! A step's order is: swaps out, copies, swaps in, then writes (see `cache` for the middle, `attach` for the way back). What is swapped
//! out may be given to anybody at once; what is swapped in may be a block that a copy of the same step still has to read.
//!
//! Invariants: a slot is free or held, by copies and by holds (`lease`); it has as many positions written as its last ticket brought.
//!
//! Cost: O(blocks copied). Lists are reused, so that a steady state allocates nothing.

use crate::cache::KvCache;
use crate::check::{Violation, count};
use crate::counts::GroupCounts;
use crate::events::Medium;
use crate::group::Tier;
use crate::lease::{Ticket, Use};
use crate::nodes::Nodes;
use crate::policy::NONE;
use crate::pool::{Pool, Slot};
use crate::table::{BlockTable, Lists};
use crate::types::{BlockId, HOLE, TenantId};

/// Copy block `block` of `group` to slot `slot` of the group's host memory, or back.
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
    tenant: TenantId,
    ticket: Ticket,
    /// Positions in all.
    end: u32,
    /// Of each group the last blocks up to position `end`.
    slots: Lists,
}

impl Swapped {
    pub fn tenant(&self) -> TenantId {
        self.tenant
    }

    /// Of the step that makes it, which ends with [`KvCache::end_load`]. Before that only a step that swaps it in may use it.
    pub fn ticket(&self) -> Ticket {
        self.ticket
    }

    /// Positions that need not be computed once it is back.
    pub fn positions(&self) -> u32 {
        self.end
    }

    /// Whether it has a slot of a group.
    pub fn has(&self, group: usize, slot: u32) -> bool {
        self.slots[group].contains(&BlockId(slot))
    }

    /// The slot of block `index` of a group, of `blocks` up to its end.
    pub(crate) fn slot(&self, group: usize, index: u32, blocks: u32) -> Option<u32> {
        let slots = &self.slots[group];
        let slot = slots.get((index + slots.len() as u32).checked_sub(blocks)? as usize)?;
        Some(slot.0)
    }
}

impl KvCache {
    /// So many slots of host memory in each group, all free; before the cache is used.
    pub fn set_swap_space(&mut self, slots: GroupCounts) {
        debug_assert_eq!(self.nodes.len(), 0, "host memory comes before the first block is cached");
        let most = self.config.blocks + slots[0];
        self.nodes = Nodes::new(most);
        for (at, group) in self.groups.iter_mut().enumerate() {
            let places = if at > 0 { vec![NONE; most as usize] } else { Vec::new() };
            group.places = places;
            let host = if slots[at] > 0 { most as usize } else { 0 };
            group.host = Tier { pool: Pool::new(slots[at]), places: vec![NONE; host] };
        }
    }

    /// Slots of each group.
    pub fn swap_slots(&self) -> GroupCounts {
        self.each_group(|group| self.groups[group].host.pool.len())
    }

    /// Whether host memory holds anything.
    pub fn has_swapped(&self) -> bool {
        let host = &self.groups[0].host.pool;
        host.free() < host.len()
    }

    pub(crate) fn host_bytes(&self, slots: impl Fn(&Tier) -> u32) -> u64 {
        let bytes =
            self.groups.iter().map(|group| u64::from(slots(&group.host)) * group.config.bytes_per_block);
        bytes.sum()
    }

    /// Bytes of so many blocks of each group.
    pub(crate) fn bytes_of(&self, blocks: GroupCounts) -> u64 {
        let groups = self.groups.iter().enumerate();
        groups.map(|(at, group)| u64::from(blocks[at]) * group.config.bytes_per_block).sum()
    }

    pub(crate) fn host_place(&self, group: usize, node: u32) -> Option<u32> {
        let places = &self.groups[group].host.places;
        places.get(node as usize).copied().filter(|place| *place != NONE)
    }

    pub(crate) fn host_slot(&self, group: usize, slot: u32) -> &Slot {
        self.groups[group].host.pool.slot(slot)
    }

    /// What a copy of `table` would hold. `None`: nothing is its own, there is no room, or what a window needs is gone.
    pub fn swap_offer(&self, table: &BlockTable) -> Option<SwapOffer> {
        let to = table.confirmed;
        let (size, shared) = (self.config.block_tokens, table.declared_blocks());
        let first = self.first_exclusive(table);
        let from = |group: usize| match group {
            0 => first,
            _ => table.first_block(group, to).min(self.groups[group].blocks_of(to)),
        };
        // What an operator declared is nobody's own and not copied, so a window must have left it.
        let inside = |group: usize| from(group) * self.groups[group].config.block_tokens < shared * size;
        let needed = |group: usize| !self.groups[group].config.optional;
        if first >= self.groups[0].blocks_of(to) || self.others().any(|group| needed(group) && inside(group))
        {
            return None;
        }
        let blocks = |group: usize| self.groups[group].blocks_of(to) - from(group);
        let slots = self.each_group(|group| if needed(group) { blocks(group) } else { 0 });
        let fits = |group: usize| slots[group] <= self.groups[group].host.pool.free();
        let whole = |group: usize| {
            let end = self.groups[group].blocks_of(to);
            let held = &table.lists[group][(end - slots[group]) as usize..end as usize];
            held.iter().all(|block| *block != HOLE)
        };
        let all = (0..self.groups.len()).all(|group| fits(group) && whole(group));
        all.then(|| SwapOffer { from: first * size, to, slots, bytes: self.bytes_of(slots) })
    }

    /// Takes slots for a copy of `table`, which is given up next. The copying is asked for in `swaps` and belongs into the
    /// next step that runs; [`KvCache::end_load`] when it did, or never will.
    pub fn swap_out(&mut self, table: &BlockTable, offer: &SwapOffer, swaps: &mut Vec<BlockSwap>) -> Swapped {
        let tenant = table.hashes.root().tenant;
        let mut taken = [(); 2].map(|()| self.spare.pop().unwrap_or_default());
        for group in 0..self.groups.len() {
            let config = self.groups[group].config;
            let (end, ratio) =
                (self.groups[group].blocks_of(offer.to), config.block_tokens / self.config.block_tokens);
            for index in end - offer.slots[group]..end {
                let block = table.lists[group][index as usize];
                let whole = (index + 1) * config.block_tokens <= offer.to
                    && (index + 1) * ratio <= table.published[0];
                let node = whole.then(|| self.node_of(table.lists[0][((index + 1) * ratio - 1) as usize]));
                let slot = self.take_host(group, tenant, node).expect("the offer counted the free slots");
                taken.iter_mut().for_each(|slots| slots[group].push(BlockId(slot)));
                swaps.push(BlockSwap { group: group as u32, block, slot });
            }
        }
        let [slots, written] = taken;
        let ticket = self.hold(Use::SwapOut { end: offer.to }, written);
        Swapped { tenant, ticket, end: offer.to, slots }
    }

    /// A slot that nobody has written yet, for a node or for nobody else.
    fn take_host(&mut self, group: usize, tenant: TenantId, node: Option<u32>) -> Option<u32> {
        let node = node.filter(|node| self.host_place(group, *node).is_none());
        let host = &mut self.groups[group].host;
        let slot = host.pool.pop()?;
        let it = host.pool.slot_mut(slot);
        (it.refs, it.tenant, it.filled) = (1, tenant, 0);
        if let Some(node) = node {
            host.pool.set_node(slot, Some(node));
            host.places[node as usize] = slot;
            if let Some(block) = self.place(0, node).filter(|_| group == 0) {
                self.copy_tokens(block, slot);
            }
        }
        Some(slot)
    }

    /// What a swap out wrote before position `end` is there, for everybody who asks for the content.
    pub(crate) fn swapped_out(&mut self, end: u32, slots: &Lists) {
        for (group, slots) in slots.iter().enumerate().take(self.groups.len()) {
            let size = self.groups[group].config.block_tokens;
            let first = end.div_ceil(size) - slots.len() as u32;
            for (index, slot) in (first..).zip(slots) {
                let slot = self.groups[group].host.pool.slot_mut(slot.0);
                slot.filled = size.min(end - index * size) as u16;
                let node = slot.node().filter(|_| group == 0 && slot.refs > 1);
                node.into_iter().for_each(|node| self.record(node, Medium::Host, true));
            }
        }
    }

    /// Forgets a copy. What a step may still write stays held until it ends.
    pub fn drop_swapped(&mut self, swapped: Swapped) {
        self.drop_slots(Medium::Host, swapped.slots);
    }

    pub(crate) fn unreference_host(&mut self, group: usize, slot: u32) {
        let host = &mut self.groups[group].host;
        let it = host.pool.slot_mut(slot);
        it.refs -= 1;
        if it.refs > 0 {
            return;
        }
        let (node, written) = (it.node(), it.filled > 0);
        if let Some(node) = node {
            host.pool.set_node(slot, None);
            host.places[node as usize] = NONE;
        }
        host.pool.push(slot);
        if let Some(node) = node.filter(|_| group == 0) {
            // Of a copy that was never made nobody was told.
            if written {
                self.record(node, Medium::Host, false);
            }
            if self.place(0, node).is_none() {
                self.remove_node(node);
            }
        }
    }

    /// The node is forgotten: what holds it here holds nothing that is found.
    pub(crate) fn unplace_host(&mut self, node: u32) {
        for group in 0..self.groups.len() {
            if let Some(slot) = self.host_place(group, node) {
                if group == 0 && self.host_slot(0, slot).filled > 0 {
                    self.record(node, Medium::Host, false);
                }
                let host = &mut self.groups[group].host;
                host.pool.set_node(slot, None);
                host.places[node as usize] = NONE;
            }
        }
    }

    /// What the table was to load is loaded, or never will be.
    pub(crate) fn end_swap_in(&mut self, table: &mut BlockTable) {
        if let Some(ticket) = table.swap_in.take() {
            self.end_hold(ticket.0, false);
        }
    }

    /// Verifies that every slot off the device is free, or held by exactly `swapped`, which must be all there are, and by holds; and
    /// that what it holds is found.
    pub fn check_swapped(&self, swapped: &[&Swapped]) -> Result<(), Violation> {
        for group in 0..self.groups.len() {
            let host = &self.groups[group].host;
            let mut held = vec![0u32; host.pool.len() as usize];
            let copies = swapped.iter().flat_map(|swapped| &swapped.slots[group]).map(|slot| slot.0);
            let all = copies.chain(self.holds.slots(Medium::Host, group));
            all.for_each(|slot| held[slot as usize] += 1);
            for (slot, held) in (0..).zip(held) {
                let free = host.pool.is_free(slot);
                let refs = if free { 0 } else { host.pool.slot(slot).refs };
                count("holders of a slot of host memory", refs.into(), held.into())?;
                count("free slots of host memory that nobody holds", free.into(), (held == 0).into())?;
                let node = if free { None } else { host.pool.slot(slot).node() };
                let place = node.and_then(|node| self.host_place(group, node));
                count(
                    "place of a node in host memory",
                    place.map_or(0, |place| u64::from(place) + 1),
                    node.map_or(0, |_| u64::from(slot) + 1),
                )?;
            }
            let places = host.places.iter().filter(|place| **place != NONE).count() as u64;
            let nodes = host.pool.used().filter(|(_, slot)| slot.node().is_some()).count() as u64;
            count("nodes in host memory", places, nodes)?;
        }
        Ok(())
    }
}
