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
//! # Coming back
//!
//! [`KvCache::attach_loading`] attaches what the device still has of the beginning and takes blocks for the rest, to be filled
//! before the step computes. They are private until the step's `commit`, which publishes them as if the step had computed them:
//! a step that never runs leaves nothing wrong behind. The slots are held until then.
//!
//! A step's order is: swaps out, copies, swaps in, then writes (see `cache` for the middle). What is swapped out may be given
//! to anybody at once; what is swapped in may be a block that a copy of the same step still has to read.
//!
//! Invariants: a slot is free or held; what a step reads is not let again before it is committed.
//!
//! Cost: O(blocks copied). Lists are reused, so that a steady state allocates nothing.

use crate::attach::Lookup;
use crate::cache::KvCache;
use crate::check::{Violation, count};
use crate::counts::{GroupCounts, MAX_GROUPS};
use crate::demand::Growth;
use crate::group::Tier;
use crate::hash::BlockHashes;
use crate::nodes::Nodes;
use crate::policy::NONE;
use crate::pool::Pool;
use crate::table::{BlockTable, Query};
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
    /// Positions in all.
    end: u32,
    /// It continues blocks that an operator declared.
    declared: bool,
    /// Of each group the last blocks up to position `end`.
    slots: SlotLists,
}

pub(crate) type SlotLists = [Vec<u32>; MAX_GROUPS];

/// What can be attached when blocks are loaded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Loadable {
    /// What the device has: `full_blocks`, and as `tail_tokens` what is loaded behind it.
    pub lookup: Lookup,
    /// Positions in all.
    pub positions: u32,
    /// To be copied to the device.
    pub bytes: u64,
}

/// Emptied lists kept for the next copies.
const SPARE_LISTS: usize = 256;

impl Swapped {
    pub fn tenant(&self) -> TenantId {
        self.tenant
    }

    /// Positions that need not be computed once it is back.
    pub fn positions(&self) -> u32 {
        self.end
    }

    /// Slots of a group.
    pub fn slots(&self, group: usize) -> &[u32] {
        &self.slots[group]
    }

    /// The slot of block `index` of a group, of `blocks` up to its end.
    fn slot(&self, group: usize, index: u32, blocks: u32) -> Option<u32> {
        let slots = &self.slots[group];
        slots.get((index + slots.len() as u32).checked_sub(blocks)? as usize).copied()
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
    fn bytes_of(&self, blocks: GroupCounts) -> u64 {
        let groups = self.groups.iter().enumerate();
        groups.map(|(at, group)| u64::from(blocks[at]) * group.config.bytes_per_block).sum()
    }

    pub(crate) fn host_place(&self, group: usize, node: u32) -> Option<u32> {
        let places = &self.groups[group].host.places;
        places.get(node as usize).copied().filter(|place| *place != NONE)
    }

    /// What a copy of `table` would hold. `None`: nothing is its own, there is no room, or what a window needs is gone.
    pub fn swap_offer(&self, table: &BlockTable) -> Option<SwapOffer> {
        let to = table.confirmed;
        let (size, shared) = (self.config.block_tokens, table.declared_blocks());
        let first = table.lists[0].len() as u32 - self.exclusive_full(table);
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
    /// next step that runs; [`KvCache::swapped_out`] when it did.
    pub fn swap_out(&mut self, table: &BlockTable, offer: &SwapOffer, swaps: &mut Vec<BlockSwap>) -> Swapped {
        let tenant = table.hashes.root().tenant;
        let mut slots = self.spare_slots.pop().unwrap_or_default();
        for (group, slots) in slots.iter_mut().enumerate().take(self.groups.len()) {
            let config = self.groups[group].config;
            let (end, ratio) =
                (self.groups[group].blocks_of(offer.to), config.block_tokens / self.config.block_tokens);
            for index in end - offer.slots[group]..end {
                let block = table.lists[group][index as usize];
                let whole = (index + 1) * config.block_tokens <= offer.to
                    && (index + 1) * ratio <= table.published[0];
                let node = whole.then(|| self.node_of(table.lists[0][((index + 1) * ratio - 1) as usize]));
                let slot = self.take_host(group, tenant, node).expect("the offer counted the free slots");
                slots.push(slot);
                swaps.push(BlockSwap { group: group as u32, block, slot });
            }
        }
        Swapped { tenant, end: offer.to, declared: table.declared, slots }
    }

    /// A slot that a transfer writes, for a node or for nobody else.
    fn take_host(&mut self, group: usize, tenant: TenantId, node: Option<u32>) -> Option<u32> {
        let node = node.filter(|node| self.host_place(group, *node).is_none());
        let host = &mut self.groups[group].host;
        let slot = host.pool.pop()?;
        let it = host.pool.slot_mut(slot);
        (it.refs, it.tenant, it.open) = (1, tenant, true);
        if let Some(node) = node {
            host.pool.set_node(slot, Some(node));
            host.places[node as usize] = slot;
        }
        Some(slot)
    }

    /// The step that makes the copy was committed: it is there, for everybody who asks for the content.
    pub fn swapped_out(&mut self, swapped: &Swapped) {
        for group in 0..self.groups.len() {
            for slot in &swapped.slots[group] {
                let slot = self.groups[group].host.pool.slot_mut(*slot);
                slot.open = false;
                let node = slot.node().filter(|_| group == 0);
                node.into_iter().for_each(|node| self.record_host(node, true));
            }
        }
    }

    /// Forgets a copy.
    pub fn drop_swapped(&mut self, swapped: Swapped) {
        let Swapped { mut slots, .. } = swapped;
        for (group, slots) in slots.iter_mut().enumerate() {
            slots.drain(..).rev().for_each(|slot| self.unreference_host(group, slot));
        }
        if self.spare_slots.len() < SPARE_LISTS {
            self.spare_slots.push(slots);
        }
    }

    pub(crate) fn unreference_host(&mut self, group: usize, slot: u32) {
        let host = &mut self.groups[group].host;
        let it = host.pool.slot_mut(slot);
        it.refs -= 1;
        if it.refs > 0 {
            return;
        }
        let (node, copied) = (it.node(), !it.open);
        if let Some(node) = node {
            host.pool.set_node(slot, None);
            host.places[node as usize] = NONE;
        }
        host.pool.push(slot);
        if let Some(node) = node.filter(|_| group == 0) {
            // Of a copy that was never made nobody was told.
            if copied {
                self.record_host(node, false);
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
                if group == 0 && !self.groups[0].host.pool.slot(slot).open {
                    self.record_host(node, false);
                }
                let host = &mut self.groups[group].host;
                host.pool.set_node(slot, None);
                host.places[node as usize] = NONE;
            }
        }
    }

    /// Where what block `index` of a group holds before position `end` can be loaded from: the sequence's own copy, or what is
    /// found of its node.
    fn load_source(
        &self,
        group: usize,
        index: u32,
        end: u32,
        node: Option<u32>,
        swapped: Option<&Swapped>,
    ) -> Option<u32> {
        let config = self.groups[group].config;
        let own = swapped.and_then(|swapped| {
            let slot = swapped.slot(group, index, self.groups[group].blocks_of(swapped.end))?;
            let start = index * config.block_tokens;
            let upto = |end: u32| config.block_tokens.min(end - start);
            let (wanted, filled) = (upto(end), upto(swapped.end));
            (wanted <= filled && config.is_divisible(wanted, filled)).then_some(slot)
        });
        let found = || {
            let slot = self.host_place(group, node?)?;
            (!self.groups[group].host.pool.slot(slot).open).then_some(slot)
        };
        own.or_else(found)
    }

    /// What [`KvCache::attach_loading`] would attach of the first `max_tokens`. `None`: nothing is to be loaded, or something that
    /// is read is nowhere. `copy`: the sequence's own.
    pub fn lookup_loading(
        &self,
        hashes: &BlockHashes,
        max_tokens: u32,
        swapped: Option<&Swapped>,
    ) -> Option<Loadable> {
        let size = self.config.block_tokens;
        let declared = swapped.map_or(hashes.root().declared_blocks() > 0, |swapped| swapped.declared);
        let (mut device, mut blocks, mut idle) = (0, 0, 0);
        for hash in hashes.iter(declared).take((max_tokens / size) as usize) {
            let node = self.nodes.find(hash);
            match node.and_then(|node| self.place(0, node)) {
                Some(block) if device == blocks => {
                    device += 1;
                    idle += u32::from(self.slot(0, block).refs == 0);
                }
                _ if self.load_source(0, blocks, (blocks + 1) * size, node, swapped).is_none() => break,
                _ => {}
            }
            blocks += 1;
        }
        if device < hashes.root().declared_blocks() && declared {
            return None;
        }
        // The block that only its own copy has, written in part.
        let tail = swapped.filter(|swapped| {
            swapped.end <= max_tokens && swapped.end / size == blocks && swapped.end % size > 0
        });
        let positions = tail.map_or(blocks * size, |swapped| swapped.end);
        if positions == device * size {
            return None;
        }
        let mut loads = GroupCounts::full(positions.div_ceil(size) - device);
        let mut idle = GroupCounts::full(idle);
        for group in self.others() {
            let config = self.groups[group].config;
            let ratio = config.block_tokens / size;
            let (first, end) = (config.first_block(positions), self.groups[group].blocks_of(positions));
            let read = if config.optional { end..end } else { first.min(end)..end };
            for index in read {
                let whole = (index + 1) * config.block_tokens <= positions;
                let hash = hashes.get(declared, (index + 1) * ratio - 1).filter(|_| whole);
                let node = hash.and_then(|hash| self.nodes.find(hash));
                if node.and_then(|node| self.place(group, node)).is_none() || !whole {
                    self.load_source(group, index, positions, node, swapped)?;
                    loads[group] += 1;
                }
            }
            // All of them are taken, or no longer available.
            idle[group] = (device / ratio).saturating_sub(first);
        }
        let lookup = Lookup {
            full_blocks: device,
            tail_tokens: positions - device * size,
            idle_blocks: idle,
            declared_blocks: if declared { hashes.root().declared_blocks() } else { 0 },
        };
        Some(Loadable { lookup, positions, bytes: self.bytes_of(loads) })
    }

    /// A table with all that [`KvCache::lookup_loading`] found: what is on the device is referenced, for the rest blocks are taken
    /// and their filling is asked for in `swaps`, which belongs into the step being planned. `None`: there is no room, and nothing
    /// changed. Counts no query of a sequence that was counted when it was first attached.
    ///
    /// Its own copy stays until the step has run: the caller may have to give the table up before.
    pub fn attach_loading(
        &mut self,
        hashes: &BlockHashes,
        max_tokens: u32,
        swapped: Option<&Swapped>,
        swaps: &mut Vec<BlockSwap>,
    ) -> Option<BlockTable> {
        let found = self.lookup_loading(hashes, max_tokens, swapped)?;
        let positions = found.positions;
        let tenant = hashes.root().tenant;
        let growth = Growth { positions, chunk: positions, tentative: 0 };
        let needed = self.demand(&found.lookup, growth);
        if !needed.fits(self.available_to(tenant)) {
            return None;
        }
        let declared = swapped.map_or(hashes.root().declared_blocks() > 0, |swapped| swapped.declared);
        let mut table = self.table_of(hashes.clone(), declared);
        // What is there is held first: nothing that is taken may cost it.
        for group in 0..self.groups.len() {
            self.hold_resident(&mut table, group, found, swapped);
        }
        for at in 0..table.loads.len() {
            let BlockSwap { group, block: BlockId(index), .. } = table.loads[at];
            let group = group as usize;
            let size = self.groups[group].config.block_tokens;
            let block = self.take(group, tenant).expect("counted as available");
            self.set_filled(group, block, size.min(positions - index * size));
            table.lists[group][index as usize] = block;
            table.loads[at].block = block;
            table.published[group] = table.published[group].min(index);
        }
        table.computed = positions;
        swaps.extend_from_slice(&table.loads);
        if swapped.is_none() {
            table.query =
                Query { queries: 1, tokens: max_tokens.into(), hit: positions.into(), ..Query::default() };
            self.count(tenant, table.query);
        }
        Some(table)
    }

    /// References what the device has of the blocks of a group that are read, and holds the slots that the rest is loaded from: a
    /// load names the index of its block.
    fn hold_resident(
        &mut self,
        table: &mut BlockTable,
        group: usize,
        found: Loadable,
        swapped: Option<&Swapped>,
    ) {
        let (config, positions) = (self.groups[group].config, found.positions);
        let end = self.groups[group].blocks_of(positions);
        let first = if config.optional { end } else { config.first_block(positions).min(end) };
        table.published[group] = end;
        table.lists[group].resize(end as usize, HOLE);
        for index in first..end {
            let node = self.node_at(table, group, index, positions);
            let resident = node.and_then(|node| self.place(group, node));
            match resident.filter(|_| group > 0 || index < found.lookup.full_blocks) {
                Some(block) => {
                    self.reference(group, block);
                    table.lists[group][index as usize] = block;
                    match group {
                        0 => self.hit(block),
                        _ => self.protect(group, block),
                    }
                }
                None => {
                    let slot = self.load_source(group, index, positions, node, swapped);
                    let slot = slot.expect("a lookup found where everything is loaded from");
                    self.groups[group].host.pool.slot_mut(slot).refs += 1;
                    table.loads.push(BlockSwap { group: group as u32, block: BlockId(index), slot });
                }
            }
        }
    }

    /// The node with which whole block `index` of a group, before position `end`, ends; `None`: it is not known, or not whole.
    fn node_at(&self, table: &BlockTable, group: usize, index: u32, end: u32) -> Option<u32> {
        let config = self.groups[group].config;
        let last = (index + 1) * config.block_tokens / self.config.block_tokens - 1;
        let whole = (index + 1) * config.block_tokens <= end;
        whole.then(|| self.nodes.find(table.hashes.get(table.declared, last)?)).flatten()
    }

    /// What the table was to load is loaded, or never will be.
    pub(crate) fn finish_loads(&mut self, table: &mut BlockTable) {
        for load in table.loads.drain(..) {
            self.unreference_host(load.group as usize, load.slot);
        }
    }

    /// Verifies that every slot off the device is free, or held by exactly `copies`, which must be all there are, and what `tables`
    /// load; and that what it holds is found.
    pub fn check_swapped(&self, swapped: &[&Swapped], tables: &[&BlockTable]) -> Result<(), Violation> {
        for group in 0..self.groups.len() {
            let host = &self.groups[group].host;
            let mut held = vec![0u32; host.pool.len() as usize];
            swapped
                .iter()
                .flat_map(|swapped| &swapped.slots[group])
                .for_each(|slot| held[*slot as usize] += 1);
            let loads = tables.iter().flat_map(|table| &table.loads);
            loads.filter(|load| load.group as usize == group).for_each(|load| held[load.slot as usize] += 1);
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
