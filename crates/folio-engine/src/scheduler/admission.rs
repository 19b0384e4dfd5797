//! May this sequence get blocks now?
//!
//! Owns: the gate between waiting and running. Must never: keep anybody out for ever.
//!
//! The gate: blocks must be available for all tokens that it and the running sequences know (not just a first chunk) and the
//! next tokens of each, and a watermark must stay free. How long outputs will be nobody guesses: room is left for `headroom_tokens` or
//! a share of what each may still generate, if that is more; the share fades while somebody waits for blocks and rises with every
//! preemption ([`Headroom`]; `docs/kv-cache.md` compares). An empty machine admits anything that fits at all.
//! Whoever was preempted is older than its tenant's others of its priority, and none of them goes before it.
//! A sequence that was preempted `max_preemptions` times needs all blocks of its longest possible output, and keeps them
//! reserved.
//!
//! Who does not fit is passed by others at most `max_bypasses` times; then nobody behind it is admitted until it is. Other
//! tenants may pass it only as far as fairness allows (`fair`). Who waits for an adapter holds up those with one alone (`adapters`).
//! In a divided pool (`folio_kv::Quota`) a sequence must fit its tenant's ceiling too, and a tenant that would hold more
//! than its guarantee leaves room for the unused guarantees of tenants that wait.
//!
//! A better class may displace a worse one, and a tenant's better priority its own worse one: the blocks and the place of the
//! cheapest of those that run.
//!
//! With `guarantee_completion` every sequence has such a reservation from the start, choices of one request included. So
//! nobody is ever preempted, and who comes first does so among those that wait but displaces nobody.
//!
//! Where batches are static ([`AdmissionPolicy::Static`]) the gate is open only while nobody runs.

use folio_kv::{BlockTable, GroupCounts, KvCache, TenantId};

use super::Scheduler;
use super::room::{Demand, GivesWay, Verdict};
use crate::config::AdmissionPolicy;
use crate::sequence::{Found, Fresh, Slot, State, Wait, Waiting};
use crate::stats::WaitingFor;

/// A lookup walks over the whole prompt; one that led to nothing is not repeated for this many plans.
const LOOKUP_PLANS: u64 = 64;

/// The part of what a sequence may still generate that admission leaves room for. Many that start together grow together: what is
/// admitted at once must fit later too, and only preemptions tell that it does not.
#[derive(Clone, Copy, Debug)]
pub(super) struct Headroom(f64);

impl Headroom {
    const FIRST: f64 = 0.2;
    const LEAST: f64 = 0.02;
    const PREEMPTION: f64 = 0.03;
    /// What a step leaves of it: half in 230.
    const STEP: f64 = 0.997;

    pub fn new() -> Self {
        Self(Self::FIRST)
    }

    /// A step is planned. `contended`: somebody was refused blocks in the last; else it returns to where it began, for the next
    /// who start together.
    pub fn step(&mut self, contended: bool) {
        self.0 = match contended || self.0 > Self::FIRST {
            true => (self.0 * Self::STEP).max(Self::LEAST),
            false => (self.0 / Self::STEP).min(Self::FIRST),
        };
    }

    pub fn preempted(&mut self) {
        self.0 = (self.0 + Self::PREEMPTION).min(1.0);
    }

    /// Tokens to leave room for, of `limit` that may come.
    fn of(self, limit: u32, headroom_tokens: u32) -> u32 {
        limit.min(headroom_tokens.max((f64::from(limit) * self.0) as u32))
    }
}

impl Scheduler {
    /// Whether looking at the waiting queue can lead to anything in this step.
    pub(super) fn admission_possible(&self) -> bool {
        if self.step.preempted || self.is_preempting() || self.waiting.len() == 0 {
            return false;
        }
        if self.config.admission == AdmissionPolicy::Static && !self.running.is_empty() {
            return false;
        }
        let room = (self.running.len() as u32) < self.config.max_num_seqs;
        room || (!self.config.guarantee_completion && self.displacement_possible())
    }

    /// Whether somebody who waits may have a better class than somebody who runs, or a better priority in the same class.
    fn displacement_possible(&self) -> bool {
        let (Some(best), Some((worst, _))) = (self.waiting.best_class(), self.running.last()) else {
            return false;
        };
        worst.class > best || self.waiting.best_priority(best).is_some_and(|own| own < worst.priority)
    }

    /// Learns what the cache holds of a waiting sequence, if that is not known or old.
    pub(super) fn look_up(&mut self, cache: &KvCache, slot: Slot) {
        let plans = self.step.plans;
        let found = self.sequences[slot].waiting().and_then(|waiting| waiting.found);
        if found.is_none_or(|found| plans - found.plan >= LOOKUP_PLANS) {
            self.look_up_now(cache, slot);
        }
    }

    pub(super) fn look_up_now(&mut self, cache: &KvCache, slot: Slot) {
        let sequence = &self.sequences[slot];
        let attachable = sequence.attachable() as usize;
        let lookup = cache.lookup(&sequence.hashes, &sequence.tokens[..attachable]);
        let found = Found { plan: self.step.plans, lookup };
        let sequence = &mut self.sequences[slot];
        sequence.hashes.set_declared(lookup.is_declared);
        if let Some(waiting) = sequence.waiting_mut() {
            waiting.found = Some(found);
        }
    }

    /// Attaches what is cached and makes the sequence running, or notes what it waits for.
    pub(super) fn try_admit(&mut self, cache: &mut KvCache, slot: Slot) -> bool {
        if self.step.preempted || self.is_preempting() {
            return false;
        }
        if self.waits_for_prefix(slot) || self.waits_for_adapter(slot) {
            return false;
        }
        if !self.admits(cache, slot) && !self.outranks_somebody(slot) {
            return false;
        }
        let found = self.sequences[slot].waiting().and_then(|waiting| waiting.found);
        if found.is_none_or(|found| found.plan != self.step.plans) {
            // What is decided now must be true now: blocks found earlier may be gone.
            self.look_up_now(cache, slot);
            if self.waits_for_prefix(slot) {
                return false;
            }
        }
        if !self.admits(cache, slot) && !self.displace(cache, slot) {
            return false;
        }
        if !self.admit_prefetched(cache, slot) && !self.admit_and_load(cache, slot) {
            self.attach(cache, slot);
        }
        true
    }

    fn outranks_somebody(&self, slot: Slot) -> bool {
        let sequence = &self.sequences[slot];
        self.running.iter().rev().any(|(_, other)| sequence.outranks(&self.sequences[*other]))
    }

    fn waits_for_prefix(&mut self, slot: Slot) -> bool {
        let Some(block) = self.awaited_prefix(slot) else { return false };
        if let Some(waiting) = self.sequences[slot].waiting_mut() {
            waiting.awaited_block = block;
        }
        self.wait_for(slot, WaitingFor::SharedPrefix);
        true
    }

    /// The last block that this one has in common with a running sequence that is computing the next one it lacks.
    pub(super) fn awaited_prefix(&self, slot: Slot) -> Option<u32> {
        let sequence = &self.sequences[slot];
        let waiting = sequence.waiting()?;
        if sequence.wants_rows() || waiting.prefetch.is_some() {
            return None;
        }
        if waiting.wait.is_over(self.now, &self.config) {
            return None;
        }
        let full_blocks = waiting.lookup().full_blocks;
        // Of the block with its last token nothing is of use: that row must be computed.
        let usable = sequence.prompt_blocks().min(sequence.attachable() / sequence.hashes.block_tokens());
        let missing = || (full_blocks..usable).filter_map(|at| sequence.hashes.get(at));
        let producer = self.shared_prefixes.producer(missing().next()?)?;
        if sequence.outranks(&self.sequences[producer]) {
            return None;
        }
        let common =
            missing().take_while(|hash| self.shared_prefixes.producer(hash) == Some(producer)).count() as u32;
        Some(full_blocks + common - 1)
    }

    /// It may only run when it can no longer be preempted: because it was so often, or because nobody ever is.
    pub(super) fn must_reserve(&self, slot: Slot) -> bool {
        self.config.guarantee_completion
            || self.sequences[slot].timing.preemptions >= self.config.max_preemptions
    }

    /// Blocks that its admission would take for everything known (idle cached blocks included; in a window group, what is held of it at
    /// once), and for its next tokens, or with a reservation all that it may generate.
    pub(super) fn growth_of(&self, cache: &KvCache, slot: Slot) -> [GroupCounts; 2] {
        let sequence = &self.sequences[slot];
        let known = sequence.known();
        let lookup = sequence.waiting().map(|waiting| waiting.lookup()).unwrap_or_default();
        let budget = self.config.max_num_batched_tokens;
        let reserve = self.must_reserve(slot);
        let limit = sequence.final_positions().saturating_sub(known);
        let growth = if reserve { limit } else { self.headroom.of(limit, self.config.headroom_tokens) };
        // Beside reservations each reference on a window's block counts; before the first, those that there are.
        let is_first = self.reservations.is_empty();
        let takes =
            |positions| cache.demand(&lookup, sequence.growth(positions, budget), reserve || !is_first);
        let now = takes(known);
        let later = takes(known + growth).saturating_sub(now);
        // What is loaded of it has its blocks; who is promised blocks is promised them as if it did not arrive.
        let loading = sequence.table().filter(|_| !reserve).map(|table| cache.written_by_transfers(table));
        let now = now.saturating_sub(loading.unwrap_or_default());
        let shared = if reserve && is_first { cache.shared_references() } else { GroupCounts::default() };
        [now + shared, later]
    }

    /// The gate. Notes the reason of a refusal.
    pub(super) fn admits(&mut self, cache: &KvCache, slot: Slot) -> bool {
        if self.running.len() as u32 >= self.config.max_num_seqs {
            self.wait_for(slot, WaitingFor::Turn);
            return false;
        }
        let blocks = self.growth_of(cache, slot);
        let demand = self.demand(cache, slot, blocks);
        match self.fits(cache, self.sequences[slot].owner(), demand, None) {
            Verdict::Fits => return true,
            Verdict::Lacks(_, GivesWay::Nobody) => self.refuse(slot, WaitingFor::Turn),
            Verdict::Lacks(_, GivesWay::Tenant | GivesWay::Borrowers) => {
                // An affair of quotas: nobody passes it by going first.
                let sequence = &self.sequences[slot];
                self.waiting.fair.limit_by_quota(sequence.rank.class, sequence.tenant);
                self.wait_for(slot, WaitingFor::Blocks);
            }
            Verdict::Lacks(..) => self.refuse(slot, WaitingFor::Blocks),
        }
        false
    }

    /// What admission asks for: beside what it takes there must be room for its next tokens, and for those who run. Alone it needs but
    /// what it takes, and with a reservation what that is below its tenant's ceiling.
    pub(super) fn demand(&mut self, cache: &KvCache, slot: Slot, [now, later]: [GroupCounts; 2]) -> Demand {
        let owner = self.sequences[slot].owner();
        let mut demand = Demand { blocks: now, adapters: self.new_adapters(slot), ..Demand::default() };
        if cache.has_quotas() {
            let its = self.running.iter().filter(|(_, running)| self.sequences[*running].owner() == owner);
            let mut growth = its.map(|(_, running)| self.growth(cache, *running)[0]).peekable();
            let later = if self.must_reserve(slot) || growth.peek().is_some() { later[0] } else { 0 };
            demand.left_to_tenant = later + growth.sum::<u32>();
        }
        if !self.running.is_empty() {
            let (pools, permille) = (cache.pools(), u64::from(self.config.watermark_permille));
            let watermark = GroupCounts::each(cache.groups(), |group| {
                u32::try_from(u64::from(pools[group]) * permille / 1000).unwrap_or(u32::MAX)
            });
            let claims = GroupCounts::full(self.claims(cache, owner, now[0]));
            let growth = self.step.growth.unwrap_or_else(|| self.sum_of_growth(cache));
            self.step.growth = Some(growth);
            demand.left = later + growth + watermark + claims;
        }
        demand
    }

    /// It lacks blocks, or too many adapters are in use and it waits for the turn of its own. Who passes it is counted.
    pub(super) fn refuse(&mut self, slot: Slot, reason: WaitingFor) {
        self.wait_for(slot, reason);
        self.step.contended |= reason == WaitingFor::Blocks;
        if let Some(waiting) = self.sequences[slot].waiting_mut() {
            waiting.lacks_adapter = reason == WaitingFor::Turn;
        }
        if !self.step.refused.contains(&slot) {
            self.step.refused.push(slot);
        }
    }

    /// Blocks that other tenants, who wait and hold less than their guarantee, will want before a tenant above its own.
    fn claims(&self, cache: &KvCache, tenant: TenantId, now: u32) -> u32 {
        let active = |tenant: TenantId| cache.tenant_stats(tenant).active[0];
        if !cache.has_quotas() || active(tenant) + now <= cache.quota(tenant).guarantee {
            return 0;
        }
        let mut owners: Vec<TenantId> = Vec::new();
        for head in &self.step.heads {
            let first = self.waiting.of(head.class, head.tenant).next();
            let owner = first.map(|slot| self.sequences[slot].owner());
            owners.extend(owner.filter(|owner| *owner != tenant && !owners.contains(owner)));
        }
        owners.iter().map(|owner| cache.quota(*owner).guarantee.saturating_sub(active(*owner))).sum()
    }

    pub(super) fn sum_of_growth(&self, cache: &KvCache) -> GroupCounts {
        let growth = self.running.iter().map(|(_, slot)| self.growth(cache, *slot));
        growth.fold(GroupCounts::default(), |sum, own| sum + own)
    }

    /// What it lacks for the tokens it knows and the next ones. A reservation counts by itself (`room`).
    fn growth(&self, cache: &KvCache, slot: Slot) -> GroupCounts {
        let sequence = &self.sequences[slot];
        if sequence.has_reservation() {
            return GroupCounts::default();
        }
        let known = sequence.known();
        let limit = sequence.final_positions().saturating_sub(known);
        self.missing(cache, slot, known + self.headroom.of(limit, self.config.headroom_tokens))
    }

    /// Whether a waiting sequence may take what a running one has.
    fn may_displace(&self, cache: &KvCache, slot: Slot, other: Slot) -> bool {
        let (sequence, other) = (&self.sequences[slot], &self.sequences[other]);
        // In a divided pool this is a matter between a tenant's own sequences.
        sequence.outranks(other) && (!cache.has_quotas() || other.owner() == sequence.owner())
    }

    /// Takes place and blocks of running sequences that `slot` outranks, if that is enough to admit it. Of victims that are under way
    /// it gets them later.
    fn displace(&mut self, cache: &mut KvCache, slot: Slot) -> bool {
        let ([now, later], owner) = (self.growth_of(cache, slot), self.sequences[slot].owner());
        let blocks = if self.must_reserve(slot) { now + later } else { now };
        let demand = Demand { blocks, adapters: self.new_adapters(slot), ..Demand::default() };
        let verdict = self.fits(cache, owner, demand, None);
        let others = self.running.iter().map(|(_, other)| *other);
        let victims = others.filter(|other| self.is_victim(*other) && self.may_displace(cache, slot, *other));
        let tables = victims.filter_map(|victim| self.sequences[victim].table());
        let gain = tables.map(|table| cache.exclusive_blocks(table)).reduce(|sum, own| sum + own);
        let in_vain = matches!(verdict, Verdict::Lacks(_, GivesWay::Nobody));
        if in_vain || gain.is_none_or(|gain| !verdict.lacking().fits(gain)) {
            return false;
        }
        loop {
            let place = ((self.running.len() as u32) - self.preempting) < self.config.max_num_seqs;
            let lacking = self.fits(cache, owner, demand, None).lacking().saturating_sub(self.coming(cache));
            if place && lacking.is_zero() {
                break;
            }
            let may = |other| self.may_displace(cache, slot, other);
            let Some(victim) = self.victim(cache, slot, lacking, may) else { break };
            self.preempt(cache, victim);
        }
        let place = (self.running.len() as u32) < self.config.max_num_seqs;
        place && self.fits(cache, owner, demand, None).fits()
    }

    fn attach(&mut self, cache: &mut KvCache, slot: Slot) {
        let sequence = &self.sequences[slot];
        let found = sequence.waiting().map(|waiting| waiting.lookup()).unwrap_or_default();
        let copies = &mut self.step.plan.copies;
        let table = cache.attach_found(sequence.hashes.clone(), &sequence.tokens, &found, copies);
        self.step.copy_owners.resize(copies.len(), slot);
        self.start(cache, slot, table, Fresh::Attached);
    }

    /// The waiting sequence runs, with a table that was attached for it.
    pub(super) fn start(&mut self, cache: &mut KvCache, slot: Slot, table: BlockTable, fresh: Fresh) {
        let order = self.queue_order(slot);
        self.prefetches.look = true;
        let sequence = &mut self.sequences[slot];
        let State::Waiting(Waiting { wait, at_stake, found, .. }) = sequence.state else { return };
        sequence.hashes.set_declared(table.hashes().declared_blocks() > 0);
        // What an operator declared is computed by its owner alone, whoever waits for it.
        let from = table.published_blocks().max(sequence.hashes.declared_blocks());
        let announced = self.shared_prefixes.announce(slot, sequence, from);
        sequence.timing.admitted(self.now);
        self.learn_survival(found.map_or(0, |found| found.lookup.positions()), at_stake);
        self.waited(slot, wait);
        self.start_running(cache, slot, table, Some(fresh));
        if let Some(running) = self.sequences[slot].running_mut() {
            running.announced = announced;
        }
        let growth = self.growth(cache, slot);
        if let Some(all) = &mut self.step.growth {
            *all += growth;
        }
        let uses_adapter = self.sequences[slot].request.adapter.is_some();
        for at in 0..self.step.refused.len() {
            let refused = self.step.refused[at];
            if self.queue_order(refused) < order
                && let Some(waiting) = self.sequences[refused].waiting_mut()
                // Who uses none takes nothing of what is lacked.
                && (uses_adapter || !waiting.lacks_adapter)
            {
                waiting.bypassed += 1;
            }
        }
    }

    /// Blocks were taken for `slot` in the step being planned: they are no longer available, and it no longer lacks them.
    pub(super) fn took(&mut self, slot: Slot, blocks: GroupCounts) {
        let reserved = self.sequences[slot].has_reservation();
        if let Some(all) = self.step.growth.as_mut().filter(|_| !reserved) {
            *all = all.saturating_sub(blocks);
        }
    }

    pub(super) fn wait_for(&mut self, slot: Slot, reason: WaitingFor) {
        let now = self.now;
        let waiting = self.sequences[slot].waiting_mut();
        let Some(waiting) = waiting.filter(|waiting| waiting.wait.reason != reason) else { return };
        let before = std::mem::replace(&mut waiting.wait, Wait { reason, since: now });
        if before.reason.is_outside() == reason.is_outside() {
            self.waiting.changes(Some(before.reason), Some(reason));
        } else {
            self.waiting.remove(&self.sequences[slot], slot, before.reason);
            self.waiting.insert(&self.sequences[slot], slot, reason);
        }
        self.waited(slot, before);
        self.counters.waits[reason] += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_share_rises_with_preemptions_and_fades_with_steps() {
        let mut headroom = Headroom::new();
        assert_eq!(
            [(1000, 64), (1000, 300), (100, 64), (30, 64)].map(|(l, h)| headroom.of(l, h)),
            [200, 300, 64, 30]
        );
        (0..230).for_each(|_| headroom.step(true));
        assert_eq!(headroom.of(1000, 0) / 5, 20, "half of it");
        (0..5).for_each(|_| headroom.preempted());
        assert_eq!(headroom.of(1000, 0) / 5, 50);
        (0..1000).for_each(|_| headroom.preempted());
        assert_eq!(headroom.of(1000, 0), 1000);
        (0..2000).for_each(|_| headroom.step(true));
        assert_eq!(headroom.of(1000, 0), 20, "the least");
        (0..230).for_each(|_| headroom.step(false));
        assert_eq!(headroom.of(1000, 0) / 5, 7, "twice as much");
        (0..2000).for_each(|_| headroom.step(false));
        assert_eq!(headroom.of(1000, 0), 200, "as at first");
    }
}
