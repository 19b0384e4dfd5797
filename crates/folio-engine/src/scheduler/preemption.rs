//! Who loses its blocks when somebody needs one and none is left.
//!
//! Owns: the choice of the victim and what happens to it. A victim's full blocks stay in the prefix cache until they are
//! taken, so a resume is mostly a prefix hit. What may not survive there is kept in a tier, if there is one that is memory and that is cheaper
//! than to compute it again (`swap`).
//!
//! The victim is the cheapest of those that the requester may preempt, itself included (who waits and displaces somebody asks for the same
//! order, of those that it outranks: `admission`):
//! - nobody of a better class, and of its own tenant nobody of better priority; what a caller says of its priority counts among its
//!   tenant's sequences alone;
//! - where the pool is divided (`folio_kv::Quota`) it is of the requester's tenant, or of one that holds more than its
//!   guarantee; quotas alone never preempt, only the pool running dry does;
//! - the worst class first, then who is of the requester's tenant and of worse priority;
//! - it must free something in a cache group that lacks blocks, if anybody does;
//! - cost: tokens of blocks nobody else references (what others hold survives and costs nothing to find again), times
//!   1 to 2 by progress (who is nearly done gives its blocks back soon by itself);
//! - among equals the one that arrived last;
//! - of that one's tenant and class the worst priority.
//!
//! A victim with rows under way gets no more of them and is preempted when the last is committed. Until then its blocks count as
//! coming: nobody else is preempted for the same need, and nobody is admitted. So do blocks that a tier is still reading.
//!
//! Livelock freedom: a sequence is preempted at most `max_preemptions` times; after that it is admitted only with every
//! block it may ever need set aside (`room`), nobody may dip into that reserve, and it is no victim. So there are
//! finitely many preemptions, and between two of them every step computes at least one token.

use std::cmp::Reverse;

use folio_kv::{GroupCounts, KvCache};

use super::Scheduler;
use super::room::{GivesWay, Verdict};
use crate::sequence::{Rank, Slot, State, Wait, Waiting};
use crate::stats::WaitingFor;

/// What came of asking for blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Allocation {
    Made,
    /// After a commit: its own, or that of a victim.
    Later,
    /// Nobody can give way, or the requester itself was the cheapest victim.
    Refused,
}

impl Scheduler {
    /// Makes sure `slot` has blocks of its own for `positions` positions, preempting others if it must and may.
    pub(super) fn allocate(&mut self, cache: &mut KvCache, slot: Slot, positions: u32) -> Allocation {
        loop {
            let sequence = &self.sequences[slot];
            let Some(running) = sequence.running() else { return Allocation::Refused };
            if cache.is_grown(&running.table, positions) {
                return Allocation::Made;
            }
            let needed = cache.needed(&running.table, positions);
            // Rows behind its own unfinished ones take only what nobody was promised, itself included.
            let own = (running.begun_steps == 0).then_some(slot);
            let (lacking, gives_way) = match self.fits(cache, sequence.owner(), needed, own) {
                Verdict::Fits if self.grow(cache, slot, positions) => return Allocation::Made,
                Verdict::Fits => return Allocation::Refused,
                Verdict::Lacks(..) if self.abort_prefetches(cache) => continue,
                Verdict::Lacks(..) if own.is_none() => return Allocation::Later,
                Verdict::Lacks(blocks, gives_way) => (blocks.saturating_sub(self.coming(cache)), gives_way),
            };
            if lacking.is_zero() {
                return Allocation::Later;
            }
            let may = |other| self.may_preempt(cache, slot, other, gives_way);
            match self.victim(cache, slot, lacking, may) {
                Some(victim) if victim != slot => self.preempt(cache, victim),
                _ => return Allocation::Refused,
            }
        }
    }

    /// What victims release at their last commit, or tiers when they have read it.
    pub(super) fn coming(&self, cache: &KvCache) -> GroupCounts {
        let mut coming = self.leaving();
        if self.preempting > 0 {
            let victims = self.all_running().filter(|running| running.preempted);
            victims.for_each(|running| coming += cache.exclusive_blocks(&running.table));
        }
        coming
    }

    pub(super) fn grow(&mut self, cache: &mut KvCache, slot: Slot, positions: u32) -> bool {
        let Some(running) = self.sequences[slot].running_mut() else { return false };
        let grown = cache.grow(&mut running.table, positions, &mut self.step.plan.copies).is_ok();
        self.step.copy_owners.resize(self.step.plan.copies.len(), slot);
        self.update_reservation(cache, slot);
        grown
    }

    /// Preempts everybody who may be preempted: what the pool running dry does to one, for all at once. Returns how many. They
    /// resume in rank order, from whatever of theirs is still cached.
    pub fn preempt_all(&mut self, cache: &mut KvCache) -> usize {
        self.recycle();
        let running = self.running.iter().map(|(_, slot)| *slot);
        let victims: Vec<Slot> = running.filter(|slot| self.is_victim(*slot)).collect();
        victims.iter().for_each(|victim| self.preempt(cache, *victim));
        victims.len()
    }

    pub(super) fn is_victim(&self, slot: Slot) -> bool {
        let running = self.sequences[slot].running();
        running.is_some_and(|running| running.reserved.is_none() && !running.preempted)
    }

    /// Whether who runs dry may take another's blocks, or its own.
    fn may_preempt(&self, cache: &KvCache, requester: Slot, other: Slot, gives_way: GivesWay) -> bool {
        let (requester, other) = (&self.sequences[requester], &self.sequences[other]);
        let owner = other.owner();
        let yields = match gives_way {
            GivesWay::Nobody => false,
            GivesWay::Anybody => true,
            _ if owner == requester.owner() => true,
            GivesWay::Tenant => false,
            GivesWay::Borrowers => cache.tenant_stats(owner).active[0] > cache.quota(owner).guarantee,
        };
        yields && !other.outranks(requester)
    }

    /// The cheapest of those that may give way. `lacking`: what the requester is short of, per cache group.
    pub(super) fn victim(
        &self,
        cache: &KvCache,
        requester: Slot,
        lacking: GroupCounts,
        may: impl Fn(Slot) -> bool,
    ) -> Option<Slot> {
        let requester = &self.sequences[requester];
        let candidates = self.running.iter().filter(|(_, slot)| self.is_victim(*slot) && may(*slot));
        let order = |(rank, slot): &(Rank, Slot)| {
            let (exclusive, cost) = self.recompute_cost(cache, *slot);
            let frees = lacking.saturating_sub(exclusive) != lacking;
            let other = &self.sequences[*slot];
            let below = other.tenant == requester.tenant && requester.outranks(other);
            (Reverse(rank.class), !below, !frees, cost, Reverse(rank.arrival), Reverse(rank.id))
        };
        let (class, slot) =
            candidates.clone().min_by_key(|it| order(it)).map(|(rank, slot)| (rank.class, *slot))?;
        // Of that tenant the worst priority goes first; to others it says nothing.
        let tenant = self.sequences[slot].tenant;
        let its =
            candidates.filter(|(rank, slot)| rank.class == class && self.sequences[*slot].tenant == tenant);
        its.min_by_key(|it| {
            let order = order(it);
            (order.2, Reverse(it.0.priority), order)
        })
        .map(|(_, slot)| *slot)
    }

    /// What preempting it frees, and what computing it again would cost, in token units.
    pub(super) fn recompute_cost(&self, cache: &KvCache, slot: Slot) -> (GroupCounts, u64) {
        let sequence = &self.sequences[slot];
        let Some(running) = sequence.running() else { return (GroupCounts::default(), 0) };
        let exclusive = cache.exclusive_blocks(&running.table);
        let tokens =
            u64::from(exclusive[0] * cache.config().block_tokens).min(u64::from(running.table.computed()));
        let progress =
            256 + 256 * u64::from(sequence.generated()) / u64::from(sequence.params.max_tokens.max(1));
        (exclusive, tokens * progress)
    }

    /// Takes all blocks of `victim` and puts it back in the queue, now or at its last commit.
    pub(super) fn preempt(&mut self, cache: &mut KvCache, victim: Slot) {
        if self.sequences[victim].is_under_way() {
            let Some(running) = self.sequences[victim].running_mut() else { return };
            self.step.granted -= std::mem::take(&mut running.granted);
            running.preempted = true;
            self.preempting += 1;
            return;
        }
        self.counters.preemptions += 1;
        self.sequences[victim].timing.preempted(self.now);
        self.headroom.preempted();
        let at_stake = self.swap_out(cache, victim);
        self.back_to_queue(cache, victim, at_stake);
        self.step.preempted = true;
    }

    /// `at_stake`: the positions that it loses.
    pub(super) fn back_to_queue(&mut self, cache: &mut KvCache, slot: Slot, at_stake: (u32, u32)) {
        // What it waits for outside it goes on waiting for.
        let blocks = Wait { reason: WaitingFor::Blocks, since: self.now };
        let wait = self.sequences[slot].suspension().unwrap_or(blocks);
        self.release(cache, slot);
        let sequence = &mut self.sequences[slot];
        if sequence.timing.preemptions > 0 {
            // Older than whoever was not: its stream pauses until it runs again.
            sequence.rank.arrival = 0;
        }
        sequence.state = State::Waiting(Waiting { at_stake, ..Waiting::new(wait.reason, wait.since) });
        self.waiting.insert(sequence, slot, wait.reason);
    }

    /// Releases what `slot` holds. What it is afterwards is the caller's business; until then it waits in no queue.
    pub(super) fn release(&mut self, cache: &mut KvCache, slot: Slot) {
        if !self.sequences[slot].is_running() {
            return;
        }
        let tickets = self.tickets(slot);
        self.prefetches.look = true;
        let sequence = &mut self.sequences[slot];
        let state = State::Waiting(Waiting::new(WaitingFor::Blocks, self.now));
        let State::Running(mut running) = std::mem::replace(&mut sequence.state, state) else { return };
        if running.scheduled > running.table.computed() {
            running.table.set_overwritten();
        }
        sequence.hashes = cache.release(running.table, &sequence.tokens);
        self.shared_prefixes.withdraw(slot, &sequence.hashes, &mut running.announced);
        self.reservations.change(sequence.owner(), running.reserved, None);
        self.waiting.changes(running.suspended.map(|wait| wait.reason), None);
        self.preempting -= u32::from(running.preempted);
        self.step.granted -= running.granted;
        self.stop_running(slot);
        self.table_slots.push(running.table_slot);
        // What its last entry shares with it ends with it.
        let entry = self.step.entries.get_mut(running.table_slot as usize).and_then(Option::as_mut);
        if let Some(entry) = entry {
            entry.samples.clear();
            (entry.id, entry.adapter) = (crate::plan::SequenceId(u64::MAX), None);
        }
        self.step.forget(slot);
        self.cancel(cache, slot, tickets);
    }
}
