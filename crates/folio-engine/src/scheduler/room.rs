//! The ledger of room: what is set aside for whom, and what is left for anybody else.
//!
//! Owns: the sum of all reservations, by cache group, the slots of adapters, and the limit of bytes in transfer. Must never: look at a
//! sequence that is not asked about.
//!
//! A running sequence with a reservation may still take [`Running::reserved`](crate::sequence::Running) blocks, however others
//! grow. The sum of those is kept as they change: when it grows, and when its step is committed. Nobody else changes it: that somebody shares a
//! window's blocks is counted beside it ([`KvCache::shared_references`]). So asking costs O(1), not a look at everybody (in a divided pool
//! O(tenants with one)).

use folio_kv::{GroupCounts, KvCache, TenantId};

use super::Scheduler;
use crate::request::AdapterId;
use crate::sequence::Slot;

/// What somebody asks for; every part of it must be there.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Resources {
    /// Per cache group. A state is a block of its group.
    pub blocks: GroupCounts,
    /// Slots for weights that no running sequence uses yet.
    pub adapters: u32,
    /// That a transfer from outside is to write.
    pub transfer_bytes: u64,
}

impl From<GroupCounts> for Resources {
    fn from(blocks: GroupCounts) -> Self {
        Self { blocks, ..Self::default() }
    }
}

#[derive(Default)]
pub(super) struct Reservations {
    blocks: GroupCounts,
    /// Whose, and how many.
    owners: Vec<(TenantId, u32)>,
    /// Those in use, and by how many running sequences.
    adapters: Vec<(AdapterId, u32)>,
}

/// Whether it can be had now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    Fits,
    /// So much is lacking. Blocks come from who is preempted or ends, a slot from the end of the last who uses its adapter (nobody is
    /// preempted for it), bytes in transfer from the reports of transfers.
    Lacks(Resources),
}

impl Verdict {
    pub fn fits(self) -> bool {
        self == Verdict::Fits
    }
}

/// One more of a few that are counted, or one less.
fn count<K: PartialEq>(counts: &mut Vec<(K, u32)>, key: K, more: bool) {
    match counts.iter().position(|(other, _)| *other == key) {
        Some(at) if more => counts[at].1 += 1,
        Some(at) if counts[at].1 > 1 => counts[at].1 -= 1,
        Some(at) => drop(counts.swap_remove(at)),
        None => counts.push((key, 1)),
    }
}

impl Reservations {
    pub fn is_empty(&self) -> bool {
        self.owners.is_empty()
    }

    /// All reservations, for `check`.
    pub fn blocks(&self) -> (GroupCounts, u32) {
        (self.blocks, self.owners.iter().map(|(_, count)| count).sum())
    }

    /// A running sequence uses an adapter, or does no more.
    pub fn use_adapter(&mut self, adapter: Option<AdapterId>, begins: bool) {
        adapter.into_iter().for_each(|adapter| count(&mut self.adapters, adapter, begins));
    }

    /// Those in use, for `check`.
    pub fn adapters(&self) -> &[(AdapterId, u32)] {
        &self.adapters
    }

    /// Replaces what one sequence of `owner` had set aside.
    pub fn change(&mut self, owner: TenantId, before: Option<GroupCounts>, after: Option<GroupCounts>) {
        let zero = GroupCounts::default();
        self.blocks = (self.blocks + after.unwrap_or(zero)).saturating_sub(before.unwrap_or(zero));
        if before.is_some() != after.is_some() {
            count(&mut self.owners, owner, after.is_some());
        }
    }
}

impl Scheduler {
    /// Whether `owner` can take what it asks for without breaking a reservation; `own`'s does not count against it.
    pub(super) fn fits(
        &self,
        cache: &KvCache,
        owner: TenantId,
        asked: impl Into<Resources>,
        own: Option<Slot>,
    ) -> Verdict {
        let asked = asked.into();
        let blocks = asked.blocks.saturating_sub(self.unreserved(cache, cache.available_to(owner), own));
        let transfer_bytes = match asked.transfer_bytes {
            0 => 0,
            bytes => (cache.loading_bytes() + bytes).saturating_sub(self.config.max_transfer_bytes),
        };
        let adapters = match asked.adapters {
            0 => 0,
            slots => {
                (self.reservations.adapters.len() as u32 + slots).saturating_sub(self.config.max_adapters)
            }
        };
        let lacking = Resources { blocks, adapters, transfer_bytes };
        if lacking == Resources::default() { Verdict::Fits } else { Verdict::Lacks(lacking) }
    }

    /// The slot that a sequence which does not run would take for its adapter.
    pub(super) fn adapters(&self, slot: Slot) -> u32 {
        let adapter = self.sequences[slot].request.adapter_id();
        let is_used = |adapter| self.reservations.adapters.iter().any(|(used, _)| *used == adapter);
        u32::from(adapter.is_some_and(|adapter| !is_used(adapter)))
    }

    /// Of what is `available` to whoever asks, what may be taken without breaking a reservation.
    pub(super) fn unreserved(
        &self,
        cache: &KvCache,
        available: GroupCounts,
        own: Option<Slot>,
    ) -> GroupCounts {
        let mut spare = available;
        let own = own.map(|slot| &self.sequences[slot]);
        let mine = own.and_then(|sequence| sequence.running()?.reserved);
        if cache.has_quotas() {
            // Whatever anybody takes may be what a reservation of another tenant counts on.
            for (tenant, count) in &self.reservations.owners {
                let also_mine = mine.is_some() && own.is_some_and(|sequence| sequence.owner() == *tenant);
                if *count > u32::from(also_mine) {
                    spare[0] = spare[0].min(cache.available_to(*tenant)[0]);
                }
            }
        }
        if self.reservations.is_empty() {
            return spare;
        }
        let others = self.reservations.blocks.saturating_sub(mine.unwrap_or_default());
        spare.saturating_sub(others + cache.shared_references())
    }

    /// Sets aside, for a running sequence, all that it may ever need.
    pub(super) fn reserve(&mut self, cache: &KvCache, slot: Slot) {
        if let Some(running) = self.sequences[slot].running_mut() {
            running.reserved = Some(GroupCounts::default());
            self.reservations.change(self.sequences[slot].owner(), None, Some(GroupCounts::default()));
        }
        self.update_reservation(cache, slot);
    }

    /// What it may still need has changed.
    pub(super) fn update_reservation(&mut self, cache: &KvCache, slot: Slot) {
        let sequence = &self.sequences[slot];
        let Some(before) = sequence.running().and_then(|running| running.reserved) else { return };
        let (positions, owner) = (sequence.final_positions(), sequence.owner());
        let after = self.missing(cache, slot, positions);
        if let Some(running) = self.sequences[slot].running_mut() {
            running.reserved = Some(after);
        }
        self.reservations.change(owner, Some(before), Some(after));
    }

    /// Blocks a sequence will still take until `positions`; none without a table.
    pub(super) fn missing(&self, cache: &KvCache, slot: Slot, positions: u32) -> GroupCounts {
        let sequence = &self.sequences[slot];
        sequence.running().map_or_else(GroupCounts::default, |running| {
            cache.missing(&running.table, sequence.growth(positions, self.config.max_num_batched_tokens))
        })
    }
}
