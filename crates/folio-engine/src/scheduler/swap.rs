//! Copies of preempted sequences in host memory: when one is made, when it is used, and when it is forgotten.
//!
//! Owns: the choice between copying and computing again, by measured cost (`costs`). Must never: matter for what is
//! generated, or for who runs: without any copy everything is computed again, and the same bits come out.
//!
//! At a preemption two costs are compared: to copy what only the victim holds out and, as far as it will not survive in the
//! prefix cache, in again; and to compute again what will not survive. At its return, when it is known what survived, the
//! same is asked once more. A copy lives until its sequence has run again or ends, whatever comes first. Until the step that
//! makes it is committed its sequence waits ([`WaitingFor::SwapOut`]); if that step fails, it is forgotten.

use folio_kv::{KvCache, Swapped, Ticket, Tiers};

use super::Scheduler;
use super::build::BegunStep;
use crate::plan::{BlockSwap, SwapTimes};
use crate::request::RequestId;
use crate::sequence::{Found, Sequence, Slot};

impl Scheduler {
    /// Copies what `victim` is about to lose, if that is cheaper than computing it again; and the positions at stake.
    pub(super) fn swap_out(&mut self, cache: &mut KvCache, victim: Slot) -> (Option<Swapped>, (u32, u32)) {
        let running = self.sequences[victim].running();
        // Nothing was computed since it came: what it has is what it had.
        let Some(running) = running.filter(|running| running.fresh.is_none()) else { return (None, (0, 0)) };
        let table = &running.table;
        let Some(offer) = cache.swap_offer(table) else { return (None, (0, table.computed())) };
        let at_stake = (offer.from, offer.to);
        if !self.costs.swap_out_pays(&offer) {
            return (None, at_stake);
        }
        let blocks = cache.swap_out(table, &offer, &mut self.step.plan.swap_outs);
        self.step.swap_out_owners.resize(self.step.plan.swap_outs.len(), victim);
        (Some(blocks), at_stake)
    }

    /// Looks for what host memory has of a waiting sequence, in its own copy or in others' of the same content, and whether using it
    /// beats what the device alone has. Changes what was found if so.
    pub(super) fn look_up_swapped(&self, cache: &KvCache, sequence: &Sequence, found: &mut Found) {
        let swapped = sequence.waiting().and_then(|waiting| waiting.swapped.as_ref());
        if swapped.is_none() && !cache.has_swapped() {
            return;
        }
        let tokens = &sequence.tokens[..sequence.attachable() as usize];
        let lookup = cache.lookup(&sequence.hashes, tokens, Tiers::Host(swapped));
        let positions = lookup.full_blocks * cache.config().block_tokens + lookup.tail_tokens;
        if self.costs.swap_in_pays(lookup.load_bytes, found.cached..positions) {
            *found = Found { lookup, swaps_in: true, ..*found };
        }
    }

    /// The sequence comes back: remembers how much of what it gave up was still cached.
    pub(super) fn learn_survival(&mut self, found: u32, (from, to): (u32, u32)) {
        if from < to {
            self.costs.survived(found.clamp(from, to) - from, to - from);
        }
    }

    /// Whether an unfinished step copies the sequence's blocks out.
    pub(super) fn is_swapping_out(&self, slot: Slot) -> bool {
        let owner = (self.sequences[slot].id(), slot);
        self.ring.begun.iter().any(|begun| begun.swapped_out.iter().any(|(of, _)| *of == owner))
    }

    /// Forgets a copy of `slot`, if there is one.
    pub(super) fn drop_swapped(&mut self, cache: &mut KvCache, slot: Slot, swapped: Option<Swapped>) {
        let Some(swapped) = swapped else { return };
        if drop_of(slot, &mut self.step.plan.swap_outs, &mut self.step.swap_out_owners) {
            end(cache, swapped.ticket(), false);
        }
        cache.drop_swapped(swapped);
    }

    /// The step ran: what it was to copy is copied.
    pub(super) fn swaps_ran(&mut self, cache: &mut KvCache, begun: &BegunStep, times: SwapTimes) {
        begun.swapped_out.iter().for_each(|(_, ticket)| end(cache, *ticket, true));
        if begun.out_bytes > 0 {
            self.counters.swapped_out_bytes += begun.out_bytes;
            self.costs.swapped_out(begun.out_bytes, times.out_us);
        }
        if begun.in_bytes > 0 {
            self.counters.swapped_in_bytes += begun.in_bytes;
            self.costs.swapped_in(begun.in_bytes, times.in_us);
        }
    }

    /// The step failed: nobody knows what of its copying happened.
    pub(super) fn swaps_failed(&mut self, cache: &mut KvCache, begun: &BegunStep) {
        for ((id, slot), ticket) in &begun.swapped_out {
            end(cache, *ticket, false);
            if self.sequences.lives(*id, *slot)
                && let Some(waiting) = self.sequences[*slot].waiting_mut()
            {
                waiting.found = None;
                let swapped = waiting.swapped.take();
                self.drop_swapped(cache, *slot, swapped);
            }
        }
    }

    /// Every copy there is, and whose it is.
    pub fn swapped(&self) -> impl Iterator<Item = (RequestId, &folio_kv::Swapped)> {
        self.sequences.iter().filter_map(|sequence| Some((sequence.request_id, sequence.swapped()?)))
    }
}

/// Bytes of the blocks of all `swaps`.
pub(super) fn bytes_of(cache: &KvCache, swaps: &[BlockSwap]) -> u64 {
    if swaps.is_empty() {
        return 0;
    }
    swaps.iter().map(|swap| cache.group_config(swap.group as usize).bytes_per_block).sum()
}

/// The step that makes a copy is over, or will never be.
fn end(cache: &mut KvCache, ticket: Ticket, made: bool) {
    cache.end_load(ticket, None, &[], made).expect("a copy is of no table");
}

/// Takes the entries of `slot` out of two lists in step, if it has any.
pub(super) fn drop_of<T>(slot: Slot, swaps: &mut Vec<T>, owners: &mut Vec<Slot>) -> bool {
    let has = owners.contains(&slot);
    if has {
        let mut owner = owners.iter();
        swaps.retain(|_| owner.next() != Some(&slot));
        owners.retain(|owner| *owner != slot);
    }
    has
}
