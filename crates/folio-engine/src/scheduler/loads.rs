//! Blocks of a sequence that are filled from outside the steps, by a transfer from a tier or a peer.
//!
//! Owns: when a transfer may begin, and what its report changes. Must never: hold up anybody else, or take what somebody was promised.
//!
//! A transfer writes the last blocks of a table ([`folio_kv::Ticket`]). Before those the sequence is computed as ever; with nothing
//! left there it is suspended ([`WaitingFor::TierLoad`]) until the transfer reports or the wait is over, and then computed here. What
//! it waited for in vain, or gave up with its table, stays the transfer's until its report. What arrives counts as cached.

use folio_kv::{KvCache, Ticket, Tiers};

use super::Scheduler;
use super::room::Resources;
use crate::request::{Micros, RequestId};
use crate::sequence::{Fresh, Slot, State};
use crate::stats::WaitingFor;

impl Scheduler {
    /// A transfer may write the next `blocks` blocks of what a choice of `request` is known to say (before they part all are one
    /// sequence), behind those that its table has; if it waits and there is room for it, it runs from now on with what is cached. The
    /// report is [`Scheduler::end_load`]. `None`: there is no room (`room`), somebody waits for blocks, the choice ended, the last token
    /// that it knows would be among them (that row must be computed), or see [`KvCache::begin_load`].
    pub fn begin_load(
        &mut self,
        cache: &mut KvCache,
        (request, choice): (RequestId, u32),
        blocks: u32,
        now: Micros,
    ) -> Option<Ticket> {
        self.now = now;
        self.recycle();
        let state = self.requests.get(&request)?;
        let stands_for = |slot: &&Slot| match self.sequences[**slot].choice {
            Some(own) => own.index == choice,
            None => state.unforked.contains(&choice),
        };
        let slot = *state.members.iter().find(stands_for)?;
        if self.contended() || self.preempting > 0 {
            return None;
        }
        let positions = blocks * cache.config().block_tokens;
        if !self.sequences[slot].is_running() && !self.admit_to_load(cache, slot, positions) {
            return None;
        }
        let sequence = &self.sequences[slot];
        let table = &sequence.running()?.table;
        let to = table.capacity() + positions;
        // Nobody's promise, its own included: if the transfer is late it needs as many blocks again.
        let needed = cache.needed(table, to);
        let transfer_bytes = cache.load_bytes(blocks);
        let asked = Resources { blocks: needed, transfer_bytes, ..Resources::default() };
        if !self.fits(cache, sequence.owner(), asked, None).fits() || to > sequence.attachable() {
            return None;
        }
        let id = sequence.id();
        let ticket = cache.begin_load(&mut self.sequences[slot].running_mut()?.table, blocks)?;
        self.loads.insert(ticket, (id, slot));
        self.update_reservation(cache, slot);
        self.wait_for_load(slot);
        Some(ticket)
    }

    /// Makes a waiting sequence running with whole blocks that the device has, if `positions` more may be loaded.
    fn admit_to_load(&mut self, cache: &mut KvCache, slot: Slot, positions: u32) -> bool {
        if self.sequences[slot].suspension().is_some() || self.is_swapping_out(slot) {
            return false;
        }
        self.step.growth = None;
        self.look_up_now(cache, slot);
        let sequence = &self.sequences[slot];
        let Some(waiting) = sequence.waiting().filter(|waiting| !waiting.swaps_in()) else { return false };
        let most = cache.border(waiting.lookup().full_blocks * cache.config().block_tokens);
        if most + positions > sequence.attachable() || !self.admits(cache, slot) {
            return false;
        }
        let sequence = &mut self.sequences[slot];
        let (hashes, copies) = (sequence.hashes.clone(), &mut Vec::new());
        let table = cache.attach(hashes, &sequence.tokens, most, Tiers::Device, copies, &mut Vec::new());
        if !copies.is_empty() {
            // They would have to run in a step.
            cache.release(table, &sequence.tokens);
            return false;
        }
        let swapped = sequence.waiting_mut().and_then(|waiting| waiting.swapped.take());
        self.start(cache, slot, table, Fresh { swapped, ran: true });
        true
    }

    /// A transfer ended: what arrived, if it was verified, need not be computed. Of a table that is gone its blocks are free.
    pub fn end_load(&mut self, cache: &mut KvCache, ticket: Ticket, verified: bool, now: Micros) {
        self.now = now;
        let owner = self.loads.remove(&ticket).filter(|(id, slot)| self.sequences.lives(*id, *slot));
        let has = |slot: &Slot| self.sequences[*slot].running().is_some_and(|it| it.table.has_ticket(ticket));
        let Some(slot) = owner.map(|(_, slot)| slot).filter(has) else {
            cache.end_load(ticket, None, &[], verified).expect("without a table nothing is committed");
            return;
        };
        let sequence = &mut self.sequences[slot];
        let State::Running(running) = &mut sequence.state else { return };
        let before = running.table.computed();
        if let Err(refused) = cache.end_load(ticket, Some(&mut running.table), &sequence.tokens, verified) {
            return self.end_with_error(cache, slot, refused.to_string().into());
        }
        let computed = running.table.computed();
        running.scheduled = running.scheduled.max(computed);
        cache.retain(&running.table, before, &sequence.request.retention);
        let hashes = (&sequence.hashes, sequence.declared);
        let blocks = running.table.published_blocks();
        self.shared_prefixes.published(slot, hashes, &mut running.announced, blocks);
        self.update_reservation(cache, slot);
        self.update_reservations(cache);
        let sequence = &self.sequences[slot];
        let goes_on =
            sequence.running().is_some_and(|running| running.scheduled < running.table.computable());
        if goes_on && sequence.suspension().is_some_and(|wait| wait.reason == WaitingFor::TierLoad) {
            self.resume_sequence(slot);
        }
    }

    /// It waits in vain for what transfers write: it is computed here.
    pub(super) fn drop_loads(&mut self, cache: &mut KvCache, slot: Slot) {
        if let Some(running) = self.sequences[slot].running_mut() {
            cache.drop_transfers(&mut running.table);
            self.update_reservation(cache, slot);
        }
    }

    /// Suspends who has nothing to compute but what transfers write.
    pub(super) fn wait_for_load(&mut self, slot: Slot) {
        let running = self.sequences[slot].running().filter(|running| running.begun_steps == 0);
        if running.is_some_and(|running| running.scheduled >= running.table.computable()) {
            self.suspend_sequence(slot, WaitingFor::TierLoad);
        }
    }
}
