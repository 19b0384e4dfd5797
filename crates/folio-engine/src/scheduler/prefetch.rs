//! Loads that begin while their request waits in the queue.
//!
//! Owns: whose they are, how many there may be, and when one is given up. Must never: make anybody wait, or take what somebody was promised.
//!
//! Who waits for a place, or for the turns of others, may find what tiers have of it on the device when it is admitted. Of the first
//! [`max_prefetch_requests`](crate::SchedulerConfig::max_prefetch_requests) in the queue (tenants in the order of their turns, each with as many)
//! those are loaded for which there is room beside everybody who runs, and beside those of the queue before them: what the gate of
//! admission would leave them (`admission`). The blocks are their tenant's from then on, as those of who runs. What is under way may
//! write [`max_prefetch_bytes`](crate::SchedulerConfig::max_prefetch_bytes), tiers do what others wait for first, and where somebody is refused blocks
//! all of it is given up.
//!
//! What arrived is cached, like all that nobody holds, and whoever needs blocks may take it; then it is looked for further on, from where it
//! ended, so that it is loaded once at most while it waits. Who is admitted before everything arrived goes on with its transfers as
//! if they had begun then.
//!
//! Cost: O(`max_prefetch_requests`) per plan, and where the queue moved, a request came or a load ended what a look at the head of the queue costs
//! admission: O(tenants that wait), and a lookup for each candidate.

use folio_kv::{GroupCounts, KvCache};

use super::Scheduler;
use super::loads::Offer;
use super::room::Demand;
use crate::plan::SequenceId;
use crate::request::Micros;
use crate::sequence::{Fresh, Prefetch, Slot, Waiting};
use crate::stats::WaitingFor;

/// What is loaded of sequences that wait.
#[derive(Default)]
pub(super) struct Prefetches {
    under_way: Vec<(SequenceId, Slot)>,
    /// That their transfers write, until they report.
    pub bytes: u64,
    /// Something changed since the queue was looked at.
    pub look: bool,
}

impl Scheduler {
    /// Ends what is late or in the way, and begins what there is room for.
    pub(super) fn prefetch(&mut self, cache: &mut KvCache) {
        if self.transfers.chunks.is_empty() || self.config.max_prefetch_requests == 0 {
            return;
        }
        if self.contended() {
            self.abort_prefetches(cache);
            return;
        }
        for at in (0..self.prefetches.under_way.len()).rev() {
            let slot = self.prefetches.under_way[at].1;
            let prefetch = self.sequences[slot].waiting().and_then(|waiting| waiting.prefetch.as_ref());
            if prefetch.is_none_or(|prefetch| prefetch.until < self.now) {
                self.abort_prefetch(cache, slot);
            }
        }
        let most = self.config.max_prefetch_requests as usize;
        if self.step.preempted
            || self.is_preempting()
            || self.waiting.len() == 0
            || self.prefetches.under_way.len() >= most
            || !std::mem::take(&mut self.prefetches.look)
        {
            return;
        }
        let mut candidates = std::mem::take(&mut self.step.order);
        self.head_of_queue(most, &mut candidates);
        if !candidates.iter().any(|slot| self.sequences[*slot].hashes.is_stored()) {
            candidates.clear();
        }
        let mut ahead = GroupCounts::default();
        for slot in candidates.drain(..) {
            self.look_up(cache, slot);
            if self.prefetches.under_way.len() < most && self.may_prefetch(cache, slot, ahead) {
                self.begin_prefetch(cache, slot);
            }
            let [now, later] = self.growth_of(cache, slot);
            ahead += now + later;
        }
        self.step.order = candidates;
    }

    /// The first in the queue, tenants in the order of their turns.
    fn head_of_queue(&mut self, most: usize, into: &mut Vec<Slot>) {
        into.clear();
        let heads = self.take_heads();
        let each = (most / heads.len().max(1)).max(1);
        let of = |head: &super::fair::Head| self.waiting.of(head.class, head.tenant).take(each);
        into.extend(heads.iter().take(most).flat_map(of));
        self.step.heads = heads;
    }

    /// Something is to be loaded of it, and there is room for it behind those `ahead` of it.
    fn may_prefetch(&mut self, cache: &KvCache, slot: Slot, ahead: GroupCounts) -> bool {
        let Some(offer) = self.prefetch_offer(cache, slot) else { return false };
        let sequence = &self.sequences[slot];
        let tenant = sequence.owner();
        let first = sequence.hashes.get(offer.blocks.start);
        // What is loaded for another is there soon.
        let mut others =
            self.prefetches.under_way.iter().filter_map(|(_, slot)| self.sequences[*slot].waiting());
        if others.any(|other| other.prefetch.as_ref().map(|prefetch| &prefetch.first) == first) {
            return false;
        }
        let [now, later] = self.growth_of(cache, slot);
        let demand = Demand { adapters: 0, ..self.demand(cache, slot, [now + ahead, later]) };
        self.fits(cache, tenant, demand, None).fits()
    }

    fn prefetch_offer(&self, cache: &KvCache, slot: Slot) -> Option<Offer> {
        let waiting = self.sequences[slot].waiting()?;
        if waiting.prefetch.is_some() || self.awaited_prefix(slot).is_some() {
            return None;
        }
        let is_new = |offer: &Offer| offer.pays && offer.blocks.start >= waiting.prefetched;
        self.offer(cache, slot, true).filter(is_new)
    }

    fn begin_prefetch(&mut self, cache: &mut KvCache, slot: Slot) {
        // What it was found to have may be gone.
        self.look_up_now(cache, slot);
        let Some(offer) = self.prefetch_offer(cache, slot) else { return };
        let (id, from) = (self.sequences[slot].id(), offer.blocks.start);
        let until = WaitingFor::TierLoad.until(self.now, &self.config).unwrap_or(Micros(u64::MAX));
        let table = self.attach_whole(cache, slot, from * cache.config().block_tokens);
        let sequence = &mut self.sequences[slot];
        let first = sequence.hashes.get(from).copied();
        let Some(waiting) = sequence.waiting_mut() else { return };
        let (Some(table), Some(first)) = (table, first) else {
            waiting.prefetched = u32::MAX;
            return;
        };
        waiting.prefetch = Some(Prefetch { table, until, first });
        self.take_offers(cache, slot, offer, true);
        self.prefetches.under_way.push((id, slot));
        self.counters.prefetches.begun += 1;
        if self.tickets(slot).is_empty() {
            self.abort_prefetch(cache, slot);
        }
    }

    /// A transfer ended that was begun for a sequence that waits: so many tokens arrived.
    pub(super) fn prefetched(&mut self, cache: &mut KvCache, slot: Slot, tokens: u32, verified: bool) {
        self.counters.prefetches.tokens += u64::from(tokens);
        let size = cache.config().block_tokens;
        let Some(Waiting { prefetch: Some(Prefetch { table, .. }), prefetched, .. }) =
            self.sequences[slot].waiting_mut()
        else {
            return;
        };
        if !verified {
            *prefetched = u32::MAX;
        }
        if table.tickets().next().is_some() {
            return;
        }
        let complete = *prefetched != u32::MAX;
        *prefetched = (*prefetched).max(table.computed() / size);
        self.end_prefetch(cache, slot);
        let counts = &mut self.counters.prefetches;
        *(if complete { &mut counts.completed } else { &mut counts.aborted }) += 1;
    }

    /// Nobody waits for what is loaded of a waiting sequence, and it is not tried again. Nothing happens where nothing is.
    pub(super) fn abort_prefetch(&mut self, cache: &mut KvCache, slot: Slot) {
        let Some(Waiting { prefetch: Some(_), prefetched, .. }) = self.sequences[slot].waiting_mut() else {
            return;
        };
        *prefetched = u32::MAX;
        self.drop_loads(cache, slot);
        self.end_prefetch(cache, slot);
        self.counters.prefetches.aborted += 1;
    }

    /// Somebody lacks blocks. Whether any may have come back by this.
    pub(super) fn abort_prefetches(&mut self, cache: &mut KvCache) -> bool {
        let any = !self.prefetches.under_way.is_empty();
        while let Some((_, slot)) = self.prefetches.under_way.last().copied() {
            self.abort_prefetch(cache, slot);
        }
        any
    }

    /// What arrived is cached.
    fn end_prefetch(&mut self, cache: &mut KvCache, slot: Slot) {
        let sequence = &mut self.sequences[slot];
        let prefetch = sequence.waiting_mut().and_then(|waiting| {
            waiting.found = None;
            waiting.prefetch.take()
        });
        if let Some(prefetch) = prefetch {
            cache.release(prefetch.table, &sequence.tokens);
        }
        self.forget_prefetch(slot);
    }

    fn forget_prefetch(&mut self, slot: Slot) {
        self.prefetches.under_way.retain(|(_, other)| *other != slot);
        self.prefetches.look = true;
    }

    /// Admits a waiting sequence, which fits, with what is being loaded of it. `false`: nothing is, or the device has more by now.
    pub(super) fn admit_prefetched(&mut self, cache: &mut KvCache, slot: Slot) -> bool {
        let Some(waiting) = self.sequences[slot].waiting_mut() else { return false };
        let found = waiting.lookup().positions();
        let Some(prefetch) = waiting.prefetch.take_if(|prefetch| found < prefetch.table.capacity()) else {
            if waiting.prefetch.is_some() {
                self.abort_prefetch(cache, slot);
                self.look_up_now(cache, slot);
            }
            return false;
        };
        self.forget_prefetch(slot);
        self.counters.prefetches.admitted += 1;
        self.start(cache, slot, prefetch.table, Fresh::Ran);
        self.promote(slot);
        self.wait_for_load(slot);
        true
    }

    /// For `check`: who is loaded is known, waits, and is within the limits.
    pub(super) fn check_prefetches(&self) -> Result<(), String> {
        let loaded =
            self.sequences.iter().filter(|sequence| !sequence.is_running() && sequence.table().is_some());
        let under_way = &self.prefetches.under_way;
        let known = |(id, slot): &(SequenceId, Slot)| {
            let waits = || self.sequences[*slot].waiting().is_some_and(|waiting| waiting.prefetch.is_some());
            self.sequences.lives(*id, *slot) && waits()
        };
        if loaded.count() != under_way.len() || !under_way.iter().all(known) {
            return Err(format!("others than {under_way:?} are loaded while they wait"));
        }
        let bytes: u64 = self.loads.values().map(|load| load.prefetch_bytes).sum();
        let limits = (self.config.max_prefetch_requests as usize, self.config.max_prefetch_bytes);
        match bytes == self.prefetches.bytes && under_way.len() <= limits.0 && bytes <= limits.1 {
            true => Ok(()),
            false => Err(format!("{under_way:?} are loaded with {bytes} bytes, at most {limits:?}")),
        }
    }
}
