//! Blocks of a sequence that are filled from outside the steps, by a transfer from a tier or a peer; and those that a tier reads.
//!
//! Owns: when a transfer may begin, and what its report changes. Must never: hold up anybody else, or take what somebody was promised.
//!
//! Where tiers are served ([`Scheduler::with_tiers`]), a sequence that is admitted is loaded as far as they have what the device lacks
//! ([`folio_kv::BlockHashes::stored_from`]), each part from the tier that brings it the soonest, if that is cheaper than to compute it, by
//! measured latencies and rates (`costs`); and at its end what tiers lack of it is stored (`stores`), as it is where it is preempted (`swap`). Who fills and
//! who reads is told by [`Scheduler::transfers`].
//!
//! A transfer writes the last blocks of a table ([`folio_kv::Ticket`]). Before those the sequence is computed as ever; with nothing
//! left there it is suspended ([`WaitingFor::TierLoad`]) until the transfer reports or the wait is over, and then computed here. What
//! it waited for in vain, or gave up with its table, stays the transfer's until its report. What arrives counts as cached.

use std::collections::VecDeque;
use std::ops::Range;

use folio_kv::{BlockTable, Content, KvCache, Ticket, TierId};
use smallvec::SmallVec;

use super::Scheduler;
use super::costs::LoadSize;
use super::room::Demand;
use super::stores::Storing;
use super::swap::Leaving;
use crate::plan::SequenceId;
use crate::request::{Micros, RequestId, TierLoad};
use crate::sequence::{Fresh, Sequence, Slot, State, Waiting};
use crate::stats::WaitingFor;
use crate::tier::{CHUNK_BLOCKS_MAX, LoadOrder, StoreOrder, TransferOrder};

/// What tiers are asked for.
#[derive(Default)]
pub(super) struct Transfers {
    /// Blocks that each tier keeps together, the nearest first.
    pub chunks: Vec<u32>,
    /// Where preempted sequences are kept, and what is still read there (`swap`).
    pub swap: Option<TierId>,
    pub leaving: Vec<Leaving>,
    /// Each with the step that was being planned.
    loads: VecDeque<(u64, LoadOrder)>,
    /// What is said of loads that were handed out.
    changes: Vec<TransferOrder>,
    /// What waits to be stored or is being read (`stores`), and what is to be handed out of it.
    pub storing: Vec<Storing>,
    pub stores: Vec<StoreOrder>,
}

/// A transfer that has not reported.
#[derive(Clone, Copy)]
pub(super) struct OpenTransfer {
    /// Whose table it was begun for.
    pub owner: (SequenceId, Slot),
    /// Who was asked for it; `None`: somebody else fills it.
    tier: Option<TierId>,
    since: Micros,
    /// What it writes, where its sequence waited.
    pub prefetch_bytes: u64,
}

/// Transfers of one table.
pub(super) type Tickets = SmallVec<[Ticket; 4]>;

impl Transfers {
    /// Each with what it keeps together.
    pub fn tiers(&self) -> impl Iterator<Item = (TierId, u32)> {
        (0..).map(TierId).zip(self.chunks.iter().copied())
    }

    /// What one of them keeps together.
    pub fn chunk(&self, tier: TierId) -> u32 {
        self.chunks.get(usize::from(tier.0)).copied().unwrap_or(1)
    }
}

/// Blocks of a sequence that a tier can bring.
pub(super) struct Offer {
    tier: TierId,
    pub blocks: Range<u32>,
    /// To compute them takes longer.
    pub pays: bool,
}

/// The last position up to `positions` at which blocks of all groups end, and the `chunk` blocks that a tier keeps together.
pub(super) fn chunk_end(cache: &KvCache, chunk: u32, positions: u32) -> u32 {
    let chunk = chunk * cache.config().block_tokens;
    let mut end = cache.border(positions);
    while !end.is_multiple_of(chunk) {
        end = cache.border(end - end % chunk);
    }
    end
}

/// What the load of these blocks is.
pub(super) fn load_size(cache: &KvCache, blocks: Range<u32>) -> LoadSize {
    let orders = match cache.needed_groups() {
        1 => blocks.end.div_ceil(CHUNK_BLOCKS_MAX) - blocks.start / CHUNK_BLOCKS_MAX,
        _ => 1,
    };
    LoadSize { bytes: cache.load_bytes(blocks.end - blocks.start), orders }
}

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
        if self.contended() || self.is_preempting() {
            return None;
        }
        let positions = blocks * cache.config().block_tokens;
        if !self.sequences[slot].is_running() && !self.admit_to_load(cache, slot, positions) {
            return None;
        }
        let (ticket, _) = self.load_behind(cache, slot, blocks, None)?;
        self.wait_for_load(slot);
        Some(ticket)
    }

    /// A transfer may write the next `blocks` blocks behind those that a sequence has: it runs, or is loaded while it waits.
    fn load_behind(
        &mut self,
        cache: &mut KvCache,
        slot: Slot,
        blocks: u32,
        tier: Option<TierId>,
    ) -> Option<(Ticket, Vec<Content>)> {
        let sequence = &self.sequences[slot];
        let table = sequence.table()?;
        let to = table.capacity() + blocks * cache.config().block_tokens;
        // Nobody's promise, its own included: if the transfer is late it needs as many blocks again.
        let needed = cache.needed(table, to);
        let transfer_bytes = cache.load_bytes(blocks);
        let asked = Demand { blocks: needed, transfer_bytes, ..Demand::default() };
        if !self.fits(cache, sequence.owner(), asked, None).fits() || to > sequence.attachable() {
            return None;
        }
        let (owner, waits) = ((sequence.id(), slot), !sequence.is_running());
        let prefetch_bytes = if waits { transfer_bytes } else { 0 };
        let (ticket, contents) = cache.begin_load(self.sequences[slot].table_mut()?, blocks)?;
        self.prefetches.bytes += prefetch_bytes;
        self.loads.insert(ticket, OpenTransfer { owner, tier, since: self.now, prefetch_bytes });
        self.update_reservation(cache, slot);
        Some((ticket, contents))
    }

    /// Admits a waiting sequence, which fits, with whole blocks that the device has, and begins to load what a tier has behind them.
    /// `false`: that does not pay, or cannot be.
    pub(super) fn admit_and_load(&mut self, cache: &mut KvCache, slot: Slot) -> bool {
        let Some(offer) = self.offer(cache, slot, false) else { return false };
        if !self.accepts(&offer) {
            return false;
        }
        let Some(table) = self.attach_whole(cache, slot, offer.blocks.start * cache.config().block_tokens)
        else {
            return false;
        };
        self.start(cache, slot, table, Fresh::Ran);
        self.take_offers(cache, slot, offer, false);
        self.wait_for_load(slot);
        true
    }

    /// What a tier has of a waiting sequence behind whole blocks that the device has, by the last look at it.
    pub(super) fn offer(&self, cache: &KvCache, slot: Slot, prefetch: bool) -> Option<Offer> {
        let sequence = &self.sequences[slot];
        let found = sequence.waiting()?.found?;
        let (size, shared) = (cache.config().block_tokens, sequence.hashes.root().declared_blocks());
        // What an operator declared is its owner's to load.
        let mine = sequence.hashes.declared_blocks() == shared && found.lookup.full_blocks >= shared;
        if self.transfers.chunks.is_empty() || !mine {
            return None;
        }
        let from = cache.border(found.lookup.full_blocks * size) / size;
        self.best_offer(cache, slot, (from, found.lookup.positions()), prefetch)
    }

    /// Orders an offer for a sequence that has what is before it, and what other tiers have behind that.
    pub(super) fn take_offers(&mut self, cache: &mut KvCache, slot: Slot, mut offer: Offer, prefetch: bool) {
        while self.take_offer(cache, slot, &offer, prefetch) && cache.needed_groups() == 1 {
            let next = offer.blocks.end;
            let cached = next * cache.config().block_tokens;
            let Some(more) = self.best_offer(cache, slot, (next, cached), prefetch) else { break };
            if !self.accepts(&more) {
                break;
            }
            offer = more;
        }
    }

    /// Whether what a tier offers is to be loaded.
    fn accepts(&mut self, offer: &Offer) -> bool {
        self.counters.declined_offers[usize::from(offer.tier.0)] += u64::from(!offer.pays);
        offer.pays
    }

    /// Bytes that another load may write.
    fn transfer_room(&self, cache: &KvCache, prefetch: bool) -> u64 {
        let all = self.config.max_transfer_bytes.saturating_sub(cache.loading_bytes());
        match prefetch {
            true => all.min(self.config.max_prefetch_bytes.saturating_sub(self.prefetches.bytes)),
            false => all,
        }
    }

    /// Which tier brings the blocks of a sequence from `from` on, and up to where: the one that spares the most time, of equals the
    /// one that has more, and then the nearest. `cached`: positions that the device has. `None`: none has them.
    fn best_offer(
        &self,
        cache: &KvCache,
        slot: Slot,
        (from, cached): (u32, u32),
        prefetch: bool,
    ) -> Option<Offer> {
        let (sequence, size) = (&self.sequences[slot], cache.config().block_tokens);
        let goes_on = cache.needed_groups() == 1;
        let room = self.transfer_room(cache, prefetch);
        let most = u32::try_from(room / cache.load_bytes(1).max(1)).unwrap_or(u32::MAX);
        let offer = |(tier, chunk): (TierId, u32)| {
            let end = sequence.hashes.stored_from(tier, from)?;
            let there = cache.border(sequence.attachable().min(end * size)) / size;
            let to = from + there.saturating_sub(from).min(most);
            let to = chunk_end(cache, chunk, to * size) / size;
            // Windows and states are stored for the end alone.
            let is_of_use = to > from && to * size > cached && (goes_on || to == end);
            is_of_use.then_some(Offer { tier, blocks: from..to, pays: false })
        };
        let offers = || self.transfers.tiers().filter_map(offer);
        let spared = |tier, to| {
            self.costs.spared_by_load(tier, load_size(cache, from..to), cached.min(to * size)..to * size)
        };
        // Where more can follow, by what all of them have.
        let common = offers().map(|offer| offer.blocks.end).min()?;
        let reach = |offer: &Offer| if goes_on { common } else { offer.blocks.end };
        let offers = offers().map(|offer| ((spared(offer.tier, reach(&offer)), reach(&offer)), offer));
        let (_, best) = offers.reduce(|best, next| if next.0 > best.0 { next } else { best })?;
        let pays = spared(best.tier, best.blocks.end) >= 0.0;
        Some(Offer { pays, ..best })
    }

    /// Orders what a tier offers. `false`: not all of it could be.
    fn take_offer(&mut self, cache: &mut KvCache, slot: Slot, offer: &Offer, prefetch: bool) -> bool {
        let (tier, mut next, end) = (offer.tier, offer.blocks.start, offer.blocks.end);
        self.counters.taken_offers[usize::from(tier.0)] += 1;
        while next < end {
            // At their borders chunks end.
            let border = (next / CHUNK_BLOCKS_MAX + 1) * CHUNK_BLOCKS_MAX;
            let blocks = if cache.needed_groups() == 1 { border.min(end) - next } else { end - next };
            let Some((ticket, contents)) = self.load_behind(cache, slot, blocks, Some(tier)) else {
                return false;
            };
            let Some(root) = self.sequences[slot].table().map(BlockTable::root) else { return false };
            let step = self.next_step();
            let order = LoadOrder { tier, ticket, root, contents, prefetch };
            self.transfers.loads.push_back((step, order));
            next += blocks;
        }
        true
    }

    /// Transfers that may begin now, each once. A load writes where steps that were planned before it may still read or write, so it
    /// begins when they are over.
    pub fn transfers(&mut self) -> impl Iterator<Item = TransferOrder> {
        let begun = self.ring.begun.front().map_or(u64::MAX, |begun| begun.step);
        let ready = self.transfers.loads.partition_point(|(step, _)| *step < begun);
        let loads = self.transfers.loads.drain(..ready).map(|(_, load)| TransferOrder::Load(load));
        let loads = loads.chain(self.transfers.changes.drain(..));
        loads.chain(self.transfers.stores.drain(..).map(TransferOrder::Store))
    }

    /// Makes a waiting sequence running with whole blocks that the device has, if `positions` more may be loaded.
    fn admit_to_load(&mut self, cache: &mut KvCache, slot: Slot, positions: u32) -> bool {
        if self.sequences[slot].suspension().is_some() || self.sequences[slot].table().is_some() {
            return false;
        }
        (self.step.growth, self.step.seen) = (None, None);
        self.look_up_now(cache, slot);
        let sequence = &self.sequences[slot];
        let Some(waiting) = sequence.waiting() else { return false };
        let most = cache.border(waiting.lookup().full_blocks * cache.config().block_tokens);
        let is_possible = most + positions <= sequence.attachable();
        if !is_possible || self.waits_for_adapter(slot) || !self.admits(cache, slot) {
            return false;
        }
        let Some(table) = self.attach_whole(cache, slot, most) else { return false };
        self.start(cache, slot, table, Fresh::Ran);
        true
    }

    /// A table with whole blocks that the device has of a waiting sequence, up to a position.
    pub(super) fn attach_whole(&self, cache: &mut KvCache, slot: Slot, most: u32) -> Option<BlockTable> {
        let sequence = &self.sequences[slot];
        let (hashes, copies) = (sequence.hashes.clone(), &mut Vec::new());
        let table = cache.attach(hashes, &sequence.tokens, most, copies);
        if !copies.is_empty() {
            // They would have to run in a step.
            cache.release(table, &sequence.tokens);
            return None;
        }
        Some(table)
    }

    /// A tier ended a load, and what that took.
    pub fn loaded(&mut self, tier: TierId, verified: bool, bytes: u64, us: u64) {
        let at = usize::from(tier.0);
        self.counters.tier_loads[at] += 1;
        self.counters.failed_tier_loads[at] += u64::from(!verified);
        if verified {
            self.costs.loaded(tier, bytes, us as f64);
        }
    }

    /// A transfer ended: what arrived, if it was verified, need not be computed. Of a table that is gone its blocks are free.
    pub fn end_load(&mut self, cache: &mut KvCache, ticket: Ticket, verified: bool, now: Micros) {
        self.now = now;
        let load = self.loads.remove(&ticket);
        self.prefetches.bytes -= load.map_or(0, |load| load.prefetch_bytes);
        let owner = load.map(|load| load.owner).filter(|(id, slot)| self.sequences.lives(*id, *slot));
        if let (Some((_, slot)), Some(OpenTransfer { tier: Some(tier), since, .. })) = (owner, load) {
            self.sequences[slot].timing.loaded(TierLoad { tier, from: since, to: now, verified });
        }
        let has = |slot: &Slot| self.sequences[*slot].table().is_some_and(|table| table.has_ticket(ticket));
        let Some(slot) = owner.map(|(_, slot)| slot).filter(has) else {
            cache.end_load(ticket, None, &[], verified).expect("without a table nothing is committed");
            return;
        };
        let others = self.tickets(slot);
        let Sequence { state, tokens, request, .. } = &mut self.sequences[slot];
        let table = match state {
            State::Running(running) => &mut running.table,
            State::Waiting(Waiting { prefetch: Some(prefetch), .. }) => &mut prefetch.table,
            State::Waiting(_) => return,
        };
        let before = table.computed();
        if let Err(refused) = cache.end_load(ticket, Some(table), tokens, verified) {
            return self.end_with_error(cache, slot, refused.to_string());
        }
        let computed = table.computed();
        self.counters.loaded_tokens += u64::from(computed - before);
        if let Some(tier) = load.and_then(|load| load.tier) {
            self.counters.tier_tokens[usize::from(tier.0)] += u64::from(computed - before);
        }
        cache.retain(table, before, &request.retention);
        if !verified {
            self.cancel(cache, slot, others);
        }
        let sequence = &mut self.sequences[slot];
        let State::Running(running) = &mut sequence.state else {
            return self.prefetched(cache, slot, computed - before, verified);
        };
        running.scheduled = running.scheduled.max(computed);
        let blocks = running.table.published_blocks();
        self.shared_prefixes.published(slot, &sequence.hashes, &mut running.announced, blocks);
        self.update_reservation(cache, slot);
        let sequence = &self.sequences[slot];
        let goes_on =
            sequence.running().is_some_and(|running| running.scheduled < running.table.computable());
        if goes_on && sequence.suspension().is_some_and(|wait| wait.reason == WaitingFor::TierLoad) {
            self.resume_sequence(slot);
        }
    }

    /// It waits in vain for what transfers write: it is computed here.
    pub(super) fn drop_loads(&mut self, cache: &mut KvCache, slot: Slot) {
        let tickets = self.tickets(slot);
        if let Some(table) = self.sequences[slot].table_mut() {
            cache.drop_transfers(table);
            self.update_reservation(cache, slot);
            self.cancel(cache, slot, tickets);
        }
    }

    /// What transfers write of a sequence.
    pub(super) fn tickets(&self, slot: Slot) -> Tickets {
        self.sequences[slot].table().into_iter().flat_map(|table| table.tickets()).collect()
    }

    /// Nobody waits for those of these loads any more that are not in the table of `slot`: what is not begun ends.
    pub(super) fn cancel(&mut self, cache: &mut KvCache, slot: Slot, tickets: Tickets) {
        let stays = |ticket: &Ticket| {
            let table = self.sequences[slot].table();
            table.is_some_and(|table| table.has_ticket(*ticket))
        };
        let gone: Tickets = tickets.into_iter().filter(|ticket| !stays(ticket)).collect();
        for ticket in gone {
            let Some(load) = self.loads.get(&ticket).copied() else { continue };
            let Some(tier) = load.tier else { continue };
            let Some(at) = self.transfers.loads.iter().position(|(_, order)| order.ticket == ticket) else {
                self.transfers.changes.push(TransferOrder::Cancel { tier, ticket });
                continue;
            };
            self.transfers.loads.remove(at);
            self.loads.remove(&ticket);
            self.prefetches.bytes -= load.prefetch_bytes;
            cache.end_load(ticket, None, &[], false).expect("without a table nothing is committed");
        }
    }

    /// The loads of a sequence go behind no others any more.
    pub(super) fn promote(&mut self, slot: Slot) {
        for ticket in self.tickets(slot) {
            let Some(tier) = self.loads.get(&ticket).and_then(|load| load.tier) else { continue };
            match self.transfers.loads.iter_mut().find(|(_, order)| order.ticket == ticket) {
                Some((_, order)) => order.prefetch = false,
                None => self.transfers.changes.push(TransferOrder::Promote { tier, ticket }),
            }
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
