//! Who loses its blocks when somebody needs one and none is left.
//!
//! Owns: the choice of the victim and what happens to it. A victim's full blocks stay in the prefix cache until they are
//! taken, so a resume is mostly a prefix hit. What may not survive there is copied to host memory, if that is cheaper than to
//! compute it again (`swap`).
//!
//! The victim is the cheapest of those with the worst priority, the requester included and nobody of better priority:
//! - where the pool is divided (`folio_kv::Quota`) it is of the requester's tenant, or of one that holds more than its
//!   guarantee; quotas alone never preempt, only the pool running dry does;
//! - it must free something in a cache group that lacks blocks, if anybody does;
//! - price: tokens of blocks nobody else references (what others hold survives and costs nothing to find again), times
//!   1 to 2 by progress (who is nearly done gives its blocks back soon by itself);
//! - among equals the one that arrived last.
//!
//! Livelock freedom: a sequence is preempted at most `max_preemptions` times; after that it is admitted only with every
//! block it may ever need set aside (`reserved`), nobody may dip into that reserve, and it is no victim. So there are
//! finitely many preemptions, and between two of them every step computes at least one token.

use std::cmp::Reverse;

use folio_kv::{GroupCounts, KvCache, TenantId};

use super::Scheduler;
use crate::sequence::{Slot, State};
use crate::stats::WaitingFor;

/// What came of asking for room.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Room {
    Made,
    /// Nobody can give way, or the requester itself was the cheapest victim.
    None,
}

impl Scheduler {
    /// Makes sure `slot` has blocks of its own for `positions` positions, preempting others if it must.
    pub(super) fn make_room(&mut self, cache: &mut KvCache, slot: Slot, positions: u32) -> Room {
        loop {
            let sequence = &self.sequences[slot];
            let Some(table) = sequence.table.as_ref() else { return Room::None };
            let needed = cache.needed(table, positions);
            if needed.is_zero() {
                return Room::Made;
            }
            let spare = self.unreserved(cache, cache.available_to(table.root().tenant), Some(slot));
            if needed.fits(spare) {
                return if self.grow(cache, slot, positions) { Room::Made } else { Room::None };
            }
            match self.victim(cache, slot, needed.saturating_sub(spare)) {
                Some(victim) if victim != slot => self.preempt(cache, victim),
                _ => return Room::None,
            }
        }
    }

    pub(super) fn grow(&mut self, cache: &mut KvCache, slot: Slot, positions: u32) -> bool {
        let Some(table) = self.sequences[slot].table.as_mut() else { return false };
        let grown = cache.grow(table, positions, &mut self.plan.copies).is_ok();
        self.scratch.copy_owners.resize(self.plan.copies.len(), slot);
        grown
    }

    /// Blocks that may be taken without breaking a reservation; `for_slot`'s own does not count against it.
    /// `available`: to whoever asks.
    pub(super) fn unreserved(
        &self,
        cache: &KvCache,
        available: GroupCounts,
        for_slot: Option<Slot>,
    ) -> GroupCounts {
        let mut spare = available;
        if cache.has_quotas() {
            // Whatever anybody takes may be what a reservation of another tenant counts on.
            for slot in self.scratch.reserved.iter().filter(|slot| Some(**slot) != for_slot) {
                let theirs = cache.available_to(self.sequences[*slot].root.tenant);
                spare[0] = spare[0].min(theirs[0]);
            }
        }
        let budget = self.config.max_num_batched_tokens;
        for slot in &self.scratch.reserved {
            let sequence = &self.sequences[*slot];
            if Some(*slot) != for_slot {
                let missing = sequence.blocks_missing(cache, sequence.final_positions(), budget);
                spare = spare.saturating_sub(missing);
            }
        }
        spare
    }

    /// Preempts everybody who may be preempted, between two steps: what the pool running dry does to one, for all at once.
    /// Returns how many: none while a step is under way. They resume in rank order, from whatever of theirs is still cached.
    pub fn preempt_all(&mut self, cache: &mut KvCache) -> usize {
        if self.under_way() {
            return 0;
        }
        let victims: Vec<Slot> = self.running.iter().map(|(_, slot)| *slot).collect();
        let victims = victims.into_iter().filter(|slot| !self.sequences[*slot].reserved).collect::<Vec<_>>();
        for victim in &victims {
            self.preempt(cache, *victim);
        }
        victims.len()
    }

    /// `lacking`: what the requester is short of, per cache group.
    fn victim(&self, cache: &KvCache, requester: Slot, lacking: GroupCounts) -> Option<Slot> {
        let priority = self.sequences[requester].rank.priority;
        let mine = self.sequences[requester].root.tenant;
        let (pool, ceiling) = cache.room(mine);
        // A tenant at its ceiling gives way to itself; nobody within its guarantee gives way to another.
        let yields = |owner: TenantId| {
            let borrows = || cache.tenant_stats(owner).active_blocks > cache.quota(owner).guarantee;
            owner == mine || !cache.has_quotas() || (pool <= ceiling && borrows())
        };
        let candidates = self.running.iter().filter(|(rank, slot)| {
            let sequence = &self.sequences[*slot];
            rank.priority >= priority && !sequence.reserved && yields(sequence.root.tenant)
        });
        candidates
            .map(|(rank, slot)| {
                let (exclusive, price) = self.price(cache, *slot);
                let frees = lacking.saturating_sub(exclusive) != lacking;
                ((Reverse(rank.priority), !frees, price, Reverse(rank.arrival), Reverse(rank.id)), *slot)
            })
            .min()
            .map(|(_, slot)| slot)
    }

    /// What preempting it frees, and what computing it again would cost, in token units.
    pub(super) fn price(&self, cache: &KvCache, slot: Slot) -> (GroupCounts, u64) {
        let sequence = &self.sequences[slot];
        let Some(table) = &sequence.table else { return (GroupCounts::default(), 0) };
        let exclusive = cache.exclusive_blocks(table);
        let tokens = u64::from(exclusive[0] * cache.config().block_tokens).min(u64::from(sequence.computed));
        let progress =
            256 + 256 * u64::from(sequence.generated()) / u64::from(sequence.params.max_tokens.max(1));
        (exclusive, tokens * progress)
    }

    /// Takes all blocks of `victim` and puts it back in the queue.
    pub(super) fn preempt(&mut self, cache: &mut KvCache, victim: Slot) {
        self.counters.preemptions += 1;
        self.sequences[victim].timing.preemptions += 1;
        if self.swap_out(cache, victim) {
            self.counters.preemptions_swapped += 1;
        }
        self.back_to_queue(cache, victim);
        self.scratch.preempted = true;
    }

    pub(super) fn back_to_queue(&mut self, cache: &mut KvCache, slot: Slot) {
        self.give_back(cache, slot);
        let now = self.now;
        let sequence = &mut self.sequences[slot];
        sequence.looked_up_step = 0;
        sequence.state = State::Waiting { reason: WaitingFor::Blocks, since: now };
        let (tenant, rank) = (sequence.tenant, sequence.rank);
        self.waiting.insert(tenant, rank, slot);
    }

    /// Releases what `slot` holds. Its state is the caller's business.
    pub(super) fn give_back(&mut self, cache: &mut KvCache, slot: Slot) {
        let sequence = &mut self.sequences[slot];
        let Some(table) = sequence.table.take() else { return };
        if sequence.fresh {
            cache.abandon(table, &sequence.tokens);
        } else {
            cache.release(table, &sequence.tokens);
        }
        self.in_flight.withdraw(slot, sequence);
        if std::mem::take(&mut sequence.reserved) {
            self.scratch.reserved.retain(|reserved| *reserved != slot);
        }
        self.scratch.granted -= std::mem::take(&mut sequence.granted);
        sequence.computed = 0;
        sequence.fresh = false;
        sequence.synced = 0;
        self.stop_running(slot);
        self.drop_copies(slot);
        self.drop_swap_ins(slot);
    }

    /// Forgets the copies into blocks that `slot` just gave up: whoever gets those blocks writes them itself.
    fn drop_copies(&mut self, slot: Slot) {
        let owners = &mut self.scratch.copy_owners;
        if owners.contains(&slot) {
            let mut owner = owners.iter();
            self.plan.copies.retain(|_| owner.next() != Some(&slot));
            owners.retain(|owner| *owner != slot);
        }
    }
}
