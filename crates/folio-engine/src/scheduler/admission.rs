//! May this sequence get blocks now?
//!
//! Owns: the gate between waiting and running. Must never: keep anybody out for ever.
//!
//! The gate: blocks must be available for all tokens that it and the running sequences know (not just a first chunk) and the
//! next `headroom_tokens` of each, as far as they may generate so many, and a watermark must stay free. How long outputs will be
//! nobody guesses: preemption does the rest (`docs/kv-cache.md` compares). An empty machine admits anything that fits at all.
//! A sequence that was preempted `max_preemptions` times needs all blocks of its longest possible output, and keeps them
//! reserved.
//!
//! Who does not fit is passed by others at most `max_bypasses` times; then nobody behind it is admitted until it is. Other
//! tenants may pass it only as far as fairness allows (`fair`).
//! In a divided pool (`folio_kv::Quota`) a sequence must fit its tenant's ceiling too, and a tenant that would hold more
//! than its guarantee leaves room for the unused guarantees of tenants that wait.
//!
//! Better priority may displace worse: the blocks and the place of the cheapest running sequences of strictly worse
//! priority.
//!
//! With `guarantee_completion` every sequence has such a reservation from the start, choices of one request included. So
//! nobody is ever preempted, and better priority comes first among those that wait but displaces nobody.

use std::cmp::Reverse;

use folio_kv::{GroupCounts, KvCache, TenantId};

use super::Scheduler;
use crate::sequence::{Slot, State};
use crate::stats::WaitingFor;

/// A lookup costs a hash of the whole prompt; one that led to nothing is not repeated for this many steps.
const LOOKUP_STEPS: u64 = 64;

/// Blocks an admission would take, per cache group.
#[derive(Clone, Copy, Debug)]
struct Demand {
    /// For everything known, idle cached blocks included; in a window group, what is held of it at once.
    now: GroupCounts,
    /// For its next tokens, or with a reservation all that it may generate.
    later: GroupCounts,
    /// Must be set aside in full.
    reserve: bool,
}

impl Scheduler {
    /// Whether looking at the waiting queue can lead to anything in this step.
    pub(super) fn admission_possible(&self) -> bool {
        let Some(best) = self.waiting.best_priority() else { return false };
        let room = (self.running.len() as u32) < self.config.max_num_seqs;
        let displaces = !self.config.guarantee_completion
            && self.running.last().is_some_and(|(worst, _)| worst.priority > best);
        !self.scratch.preempted && (room || displaces)
    }

    /// Learns what the cache holds of a waiting sequence, if that is not known or old.
    pub(super) fn look_up(&mut self, cache: &KvCache, slot: Slot) {
        let step = self.step;
        let sequence = &mut self.sequences[slot];
        if sequence.looked_up_step != 0 && step - sequence.looked_up_step < LOOKUP_STEPS {
            return;
        }
        self.look_up_now(cache, slot);
    }

    fn look_up_now(&mut self, cache: &KvCache, slot: Slot) {
        let step = self.step;
        let sequence = &mut self.sequences[slot];
        let attachable = sequence.attachable() as usize;
        sequence.lookup = cache.lookup(&sequence.root, &sequence.tokens[..attachable]);
        sequence.looked_up_step = step;
        self.look_up_copy(cache, slot);
        let sequence = &mut self.sequences[slot];
        let shared = sequence.lookup.shared_blocks;
        if sequence.hashes_shared != Some(shared) {
            let root = if shared > 0 { sequence.root } else { sequence.root.own() };
            sequence.hashes = cache.block_hashes(&root, &sequence.tokens[..sequence.prompt_len as usize]);
            sequence.hashes_shared = Some(shared);
        }
    }

    /// Attaches what is cached and makes the sequence running, or notes what it waits for.
    pub(super) fn try_admit(&mut self, cache: &mut KvCache, slot: Slot) -> bool {
        if self.scratch.preempted {
            return false;
        }
        if self.waits_for_leader(slot) || (!self.admits(cache, slot) && !self.outranks_somebody(slot)) {
            return false;
        }
        if self.sequences[slot].looked_up_step != self.step {
            // What is decided now must be true now: blocks found earlier may be gone.
            self.look_up_now(cache, slot);
            if self.waits_for_leader(slot) {
                return false;
            }
        }
        if !self.admits(cache, slot) && !self.displace(cache, slot) {
            return false;
        }
        self.attach(cache, slot);
        true
    }

    fn outranks_somebody(&self, slot: Slot) -> bool {
        let priority = self.sequences[slot].rank.priority;
        self.running.last().is_some_and(|(worst, _)| worst.priority > priority)
    }

    fn waits_for_leader(&mut self, slot: Slot) -> bool {
        let Some((leader, block)) = self.leader_of(slot) else { return false };
        self.sequences[slot].awaited_block = block;
        self.wait_for(slot, WaitingFor::SharedPrefix { leader });
        true
    }

    /// The running sequence that is computing the next block this one lacks, and the last block they have in common.
    fn leader_of(&self, slot: Slot) -> Option<(crate::plan::SequenceId, u32)> {
        let sequence = &self.sequences[slot];
        if sequence.wants_rows() || sequence.restores {
            return None;
        }
        if let State::Waiting { reason: WaitingFor::SharedPrefix { .. }, since } = sequence.state
            && self.now.0.saturating_sub(since.0) > self.config.shared_prefix_wait_us_max
        {
            return None;
        }
        let missing = sequence.hashes.get(sequence.lookup.full_blocks as usize..)?;
        let owner = self.in_flight.owner(missing.first()?)?;
        let leader = &self.sequences[owner];
        if leader.rank.priority > sequence.rank.priority {
            return None;
        }
        let common =
            missing.iter().take_while(|hash| self.in_flight.owner(hash) == Some(owner)).count() as u32;
        Some((leader.id(), sequence.lookup.full_blocks + common - 1))
    }

    /// It may only run when it can no longer be preempted: because it was so often, or because nobody ever is.
    pub(super) fn must_reserve(&self, slot: Slot) -> bool {
        self.config.guarantee_completion
            || self.sequences[slot].timing.preemptions >= self.config.max_preemptions
    }

    fn demand(&mut self, cache: &KvCache, slot: Slot) -> Demand {
        let sequence = &self.sequences[slot];
        let known = sequence.tokens.len() as u32;
        let chunk = sequence.chunk_max(self.config.max_num_batched_tokens);
        let reserve = self.must_reserve(slot);
        let limit = sequence.final_positions().saturating_sub(known);
        let growth = if reserve { limit } else { limit.min(self.config.headroom_tokens) };
        let now = cache.demand(&sequence.lookup, known, chunk);
        let later = cache.demand(&sequence.lookup, known + growth, chunk).saturating_sub(now);
        // Who shares window blocks with a sequence that has a reservation may cost it that many.
        let reserved = !self.scratch.reserved.is_empty();
        let shared = if reserved { cache.shared(&sequence.lookup) } else { GroupCounts::default() };
        Demand { now: now + shared, later, reserve }
    }

    /// The gate. Notes the reason of a refusal.
    fn admits(&mut self, cache: &KvCache, slot: Slot) -> bool {
        if self.running.len() as u32 >= self.config.max_num_seqs {
            self.wait_for(slot, WaitingFor::Turn);
            return false;
        }
        let demand = self.demand(cache, slot);
        let tenant = self.sequences[slot].root.tenant;
        let mut within = cache.available();
        within[0] = cache.room(tenant).0;
        let spare = self.unreserved(cache, within, None);
        if !self.within_ceiling(cache, slot, demand) {
            // Its tenant's own affair: nobody passes it by going first.
            let sequence = &self.sequences[slot];
            self.waiting.fair.caps(sequence.rank.priority, sequence.tenant);
            self.wait_for(slot, WaitingFor::Blocks);
            return false;
        }
        let fits = if self.running.is_empty() {
            demand.now.fits(spare)
        } else {
            let (pools, permille) = (cache.pools(), u64::from(self.config.watermark_permille));
            let watermark = GroupCounts::each(cache.groups(), |group| {
                u32::try_from(u64::from(pools[group]) * permille / 1000).unwrap_or(u32::MAX)
            });
            let margin = watermark + GroupCounts::full(self.claims(cache, tenant, demand.now[0]));
            let growth = self.scratch.growth.unwrap_or_else(|| self.sum_of_growth(cache));
            self.scratch.growth = Some(growth);
            (demand.now + demand.later + growth + margin).fits(spare)
        };
        if !fits {
            self.wait_for(slot, WaitingFor::Blocks);
            if !self.scratch.refused.contains(&slot) {
                self.scratch.refused.push(slot);
            }
        }
        fits
    }

    /// Its tenant's quota has room for it, and for the growth of its tenant's running sequences; alone, for what it needs now.
    fn within_ceiling(&mut self, cache: &KvCache, slot: Slot, demand: Demand) -> bool {
        if !cache.has_quotas() {
            return true;
        }
        let tenant = self.sequences[slot].root.tenant;
        let room = self.unreserved(cache, cache.available_to(tenant), None)[0];
        let mut needed = demand.now[0];
        for at in 0..self.running.len() {
            let running = self.running[at].1;
            if self.sequences[running].root.tenant == tenant {
                // Counted once, whoever runs.
                let later = if needed == demand.now[0] { demand.later[0] } else { 0 };
                needed += later + self.growth(cache, running)[0];
            }
        }
        if demand.reserve {
            needed = needed.max(demand.now[0] + demand.later[0]);
        }
        needed <= room
    }

    /// Blocks that other tenants, who wait and hold less than their guarantee, will want before a tenant above its own.
    fn claims(&self, cache: &KvCache, tenant: TenantId, now: u32) -> u32 {
        let active = |tenant: TenantId| cache.tenant_stats(tenant).active_blocks;
        if !cache.has_quotas() || active(tenant) + now <= cache.quota(tenant).guarantee {
            return 0;
        }
        let mut owners: Vec<TenantId> = Vec::new();
        for head in &self.scratch.heads {
            let first = self.waiting.of(head.priority, head.tenant).next();
            let owner = first.map(|slot| self.sequences[slot].root.tenant);
            owners.extend(owner.filter(|owner| *owner != tenant && !owners.contains(owner)));
        }
        owners.iter().map(|owner| cache.quota(*owner).guarantee.saturating_sub(active(*owner))).sum()
    }

    /// Blocks of group 0 that nobody who runs was promised or is about to need.
    pub(crate) fn unpromised(&self, cache: &KvCache) -> u32 {
        self.unreserved(cache, cache.available(), None).saturating_sub(self.sum_of_growth(cache))[0]
    }

    fn sum_of_growth(&self, cache: &KvCache) -> GroupCounts {
        let growth = self.running.iter().map(|(_, slot)| self.growth(cache, *slot));
        growth.fold(GroupCounts::default(), |sum, own| sum + own)
    }

    /// What it lacks for the tokens it knows and the next ones. A reservation counts by itself (`unreserved`).
    fn growth(&self, cache: &KvCache, slot: Slot) -> GroupCounts {
        let sequence = &self.sequences[slot];
        if sequence.reserved {
            return GroupCounts::default();
        }
        let next = (sequence.tokens.len() as u32).saturating_add(self.config.headroom_tokens);
        let positions = next.min(sequence.final_positions());
        sequence.blocks_missing(cache, positions, self.config.max_num_batched_tokens)
    }

    /// Takes place and blocks of running sequences of strictly worse priority, if that is enough to admit `slot`.
    fn displace(&mut self, cache: &mut KvCache, slot: Slot) -> bool {
        let priority = self.sequences[slot].rank.priority;
        let demand = self.demand(cache, slot);
        let needed = if demand.reserve { demand.now + demand.later } else { demand.now };
        let mut gain = GroupCounts::default();
        let mut victims = Vec::new();
        for (rank, victim) in self.running.iter().rev().take_while(|(rank, _)| rank.priority > priority) {
            let sequence = &self.sequences[*victim];
            // In a divided pool priority is a matter between a tenant's own sequences.
            let may = !cache.has_quotas() || sequence.root.tenant == self.sequences[slot].root.tenant;
            if let Some(table) = sequence.table.as_ref().filter(|_| !sequence.reserved && may) {
                gain += cache.exclusive_blocks(table);
                victims.push((Reverse(rank.priority), self.price(cache, *victim).1, *victim));
            }
        }
        victims.sort_unstable();
        let tenant = self.sequences[slot].root.tenant;
        if victims.is_empty() || !needed.fits(self.unreserved(cache, cache.available_to(tenant), None) + gain)
        {
            return false;
        }
        let mut victims = victims.into_iter();
        loop {
            let place = (self.running.len() as u32) < self.config.max_num_seqs;
            if place && needed.fits(self.unreserved(cache, cache.available_to(tenant), None)) {
                return true;
            }
            match victims.next() {
                Some((_, _, victim)) => self.preempt(cache, victim),
                None => return false,
            }
        }
    }

    fn attach(&mut self, cache: &mut KvCache, slot: Slot) {
        let demand = self.demand(cache, slot);
        let step = self.step;
        let sequence = &mut self.sequences[slot];
        let rank = sequence.rank;
        let was_shared =
            matches!(sequence.state, State::Waiting { reason: WaitingFor::SharedPrefix { .. }, .. });
        let swapped = sequence.swapped.as_ref().filter(|_| sequence.restores);
        let restored =
            swapped.and_then(|copy| cache.attach_swapped(&sequence.tokens, copy, &mut self.plan.swap_ins));
        self.scratch.swap_in_owners.resize(self.plan.swap_ins.len(), slot);
        let mut table = restored.unwrap_or_else(|| {
            let (table, copies) = cache.attach(&sequence.root, &sequence.tokens, sequence.attachable());
            self.plan.copies.extend(copies);
            self.scratch.copy_owners.resize(self.plan.copies.len(), slot);
            table
        });
        table.reserve(sequence.final_positions());
        sequence.computed = table.computed();
        sequence.table = Some(table);
        sequence.state = State::Running;
        sequence.fresh = true;
        sequence.reserved = demand.reserve;
        sequence.synced = 0;
        sequence.looked_up_step = step;
        if demand.reserve {
            self.scratch.reserved.push(slot);
        }
        if was_shared {
            self.counters.shared_prefix_tokens += u64::from(sequence.computed);
        }
        self.in_flight.announce(slot, sequence);
        self.learn_survival(slot);
        let sequence = &self.sequences[slot];
        let (tenant, turn) = (sequence.tenant, self.turn_of(slot));
        self.waiting.remove(tenant, rank, slot);
        self.start_running(slot);
        let growth = self.growth(cache, slot);
        if let Some(all) = &mut self.scratch.growth {
            *all += growth;
        }
        for at in 0..self.scratch.refused.len() {
            let refused = self.scratch.refused[at];
            if self.turn_of(refused) < turn {
                self.sequences[refused].bypassed += 1;
            }
        }
    }

    /// Blocks were taken for `slot` in the step being planned: they are no longer available, and it no longer lacks them.
    pub(super) fn took(&mut self, slot: Slot, blocks: GroupCounts) {
        let reserved = self.sequences[slot].reserved;
        if let Some(all) = self.scratch.growth.as_mut().filter(|_| !reserved) {
            *all = all.saturating_sub(blocks);
        }
    }

    pub(super) fn wait_for(&mut self, slot: Slot, reason: WaitingFor) {
        let now = self.now;
        let sequence = &mut self.sequences[slot];
        let State::Waiting { reason: before, since } = &mut sequence.state else { return };
        if std::mem::discriminant(before) != std::mem::discriminant(&reason) {
            *since = now;
            match reason {
                WaitingFor::Blocks => self.counters.block_waits += 1,
                WaitingFor::SharedPrefix { .. } => self.counters.shared_prefix_waits += 1,
                _ => {}
            }
        }
        *before = reason;
    }
}
