//! Copies of preempted sequences in host memory: when one is made, when it is used, and when it is forgotten.
//!
//! Owns: the choice between copying and computing again, by measured cost (`costs`). Must never: matter for what is
//! generated, or for who runs: without any copy everything is computed again, and the same bits come out.
//!
//! At a preemption two prices are compared: to copy what only the victim holds out and, as far as it will not survive in the
//! prefix cache, in again; and to compute again what will not survive. At its return, when it is known what survived, the
//! same is asked once more. A copy lives until its sequence has run again or ends, whatever comes first, and until its
//! copying out has run it is worth nothing: if that step fails, it is forgotten.

use folio_kv::KvCache;

use super::Scheduler;
use crate::plan::SwapTimes;
use crate::request::RequestId;
use crate::sequence::{Sequence, Slot};

impl Scheduler {
    /// Copies what `victim` is about to lose, if that is cheaper than computing it again. Whether a copy exists now.
    pub(super) fn swap_out(&mut self, cache: &mut KvCache, victim: Slot) -> bool {
        let sequence = &mut self.sequences[victim];
        if sequence.fresh {
            // Nothing was computed since it came: what it has is what it had.
            return sequence.swapped.is_some();
        }
        sequence.at_stake = (0, sequence.computed);
        let Some((table, offer)) =
            sequence.table.as_ref().and_then(|table| Some((table, cache.swap_offer(table)?)))
        else {
            return false;
        };
        sequence.at_stake = (offer.from, offer.to);
        if !self.costs.copying_pays(&offer) {
            return false;
        }
        sequence.swapped = Some(cache.swap_out(table, &offer, &mut self.plan.swap_outs));
        sequence.swap_pending = true;
        self.scratch.swap_out_owners.resize(self.plan.swap_outs.len(), victim);
        true
    }

    /// Looks for a waiting sequence's copy, and whether using it beats what the cache alone has of it. Changes its lookup
    /// if so.
    pub(super) fn look_up_copy(&mut self, cache: &KvCache, slot: Slot) {
        let sequence = &mut self.sequences[slot];
        sequence.found =
            sequence.lookup.full_blocks * cache.config().block_tokens + sequence.lookup.tail_tokens;
        sequence.restores = false;
        let Some(swapped) = &sequence.swapped else { return };
        let Some(found) = cache.lookup_swapped(&sequence.tokens, swapped) else { return };
        let bytes = cache.restored_bytes(swapped, &found);
        if self.costs.restoring_pays(bytes, sequence.found..swapped.positions()) {
            sequence.lookup = found;
            sequence.restores = true;
        }
    }

    /// The sequence comes back: remembers how much of what it gave up was still cached.
    pub(super) fn learn_survival(&mut self, slot: Slot) {
        let Sequence { found, at_stake: (from, to), .. } = self.sequences[slot];
        if from < to {
            self.costs.survived(found.clamp(from, to) - from, to - from);
        }
        self.sequences[slot].at_stake = (0, 0);
    }

    /// Forgets the sequence's copy, if it has one.
    pub(super) fn forget_copy(&mut self, cache: &mut KvCache, slot: Slot) {
        let Some(swapped) = self.sequences[slot].swapped.take() else { return };
        if std::mem::take(&mut self.sequences[slot].swap_pending) {
            drop_of(slot, &mut self.plan.swap_outs, &mut self.scratch.swap_out_owners);
        }
        cache.drop_swapped(swapped);
    }

    /// Forgets what `slot` was to get from its copy in the step being planned: it gave its blocks up.
    pub(super) fn drop_swap_ins(&mut self, slot: Slot) {
        drop_of(slot, &mut self.plan.swap_ins, &mut self.scratch.swap_in_owners);
    }

    /// The step ran: what it was to copy is copied.
    pub(super) fn swaps_ran(&mut self, cache: &KvCache, times: SwapTimes) {
        let bytes_of = |group: u32| match (group as usize).checked_sub(1) {
            None => cache.config().bytes_per_block,
            Some(window) => cache.stats().windows[window].bytes_per_block,
        };
        if !self.plan.swap_outs.is_empty() {
            let bytes = self.plan.swap_outs.iter().map(|swap| bytes_of(swap.group)).sum::<u64>();
            self.counters.swapped_out_bytes += bytes;
            self.costs.copied_out(bytes, times.out_us);
        }
        if !self.plan.swap_ins.is_empty() {
            let bytes = self.plan.swap_ins.iter().map(|swap| bytes_of(swap.group)).sum::<u64>();
            self.counters.swapped_in_bytes += bytes;
            self.costs.copied_in(bytes, times.in_us);
        }
        self.plan.swap_outs.clear();
        for slot in self.scratch.swap_out_owners.drain(..) {
            self.sequences[slot].swap_pending = false;
        }
    }

    /// The step failed: nobody knows what of its copying happened.
    pub(super) fn swaps_failed(&mut self, cache: &mut KvCache) {
        self.plan.swap_outs.clear();
        for slot in self.scratch.swap_out_owners.drain(..) {
            self.sequences[slot].swap_pending = false;
            if let Some(swapped) = self.sequences[slot].swapped.take() {
                cache.drop_swapped(swapped);
            }
        }
    }

    /// Every copy there is, and whose it is.
    pub fn copies(&self) -> impl Iterator<Item = (RequestId, &folio_kv::Swapped)> {
        self.sequences
            .iter()
            .filter_map(|sequence| sequence.swapped.as_ref().map(|copy| (sequence.request, copy)))
    }
}

/// Takes the entries of `slot` out of two lists in step.
fn drop_of<T>(slot: Slot, swaps: &mut Vec<T>, owners: &mut Vec<Slot>) {
    if owners.contains(&slot) {
        let mut owner = owners.iter();
        swaps.retain(|_| owner.next() != Some(&slot));
        owners.retain(|owner| *owner != slot);
    }
}
