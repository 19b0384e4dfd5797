//! Drafts: what a sequence may be verified to say next, and how many of them are worth their rows.
//!
//! Owns: the number of drafts of each sequence in each step. Must never: change a token, keep anybody waiting, or take a block that somebody
//! needs.
//!
//! Drafts are either known before the plan ([`Scheduler::propose`]), or the step's own drafter proposes them, a model with its KV in an
//! optional group ([`crate::plan::DraftPlan`]). Its KV follows what is known: in steps of several tokens it computes the same tokens; in
//! steps of one it lags until drafts are wanted again. What it lacks of a prefix that was found without it, or loaded, it computes beside the
//! next steps, a bounded number of tokens in each. How far it is there is the table's to know
//! ([`BlockTable::set_written`](folio_kv::BlockTable::set_written)), so that nothing is published that was not computed. Where the group
//! has no block for it, the sequence goes on without; and where its drafts for a tenant were wrong so often lately that none would pay, it does not
//! read most of that tenant's that begin ([`DrafterRecord`](crate::acceptance::DrafterRecord)).
//!
//! A drafter that reads the model's features ([`Reads::Features`]) has a row for each token behind the first, which lies at the position of
//! the features, the one before the token's. It can compute no more than the model has, in steps that are over; it does so in
//! every step with several rows, and before there are many single ones, because features are kept for it meanwhile. What the model does not
//! compute, because it was found, has none. Where the drafter's KV was found with it, or is missing for a few positions (whose rows are
//! computed without), it goes on; else its context begins anew, with the first position that the model computes, and what it writes then is nobody
//! else's.

use folio_kv::{KvCache, TenantId};

use super::Scheduler;
use super::costs::Costs;
use crate::plan::{DraftPlan, DrafterModel, PLACEHOLDER, Reads, SequencePlan};
use crate::request::RequestId;
use crate::sequence::{Running, Sequence, Slot, State};

/// How probable a draft is that rules leave alone: the text is certain, its tokens are not, and the last one may be longer than that text.
const FORCED: f64 = 0.95;
const FORCED_LAST: f64 = 0.5;
/// What drafts add to a step counts so many times: estimates err.
const PAYS: f64 = 1.2;
/// Rows that may cost as much as one of them.
const TILE: u32 = 8;
/// Known tokens that a drafter computes before its drafts in one step.
const CATCH_UP: u32 = 64;

impl Scheduler {
    /// What a choice may say next, from the last token on that was told of it: verified in the next plan that has room for it, up to the
    /// first that is no token.
    pub fn propose(&mut self, request: RequestId, choice: u32, drafts: &[u32]) {
        let Some(slot) = self.slot_of(request, choice) else { return };
        let sequence = &mut self.sequences[slot];
        sequence.drafts.clear();
        sequence.drafts.extend(drafts.iter().copied().take_while(|token| *token < self.vocab));
        sequence.forced = false;
    }

    /// Where nothing else is proposed, what its guide leaves alone is.
    pub(super) fn jump_ahead(&mut self, slot: Slot) -> bool {
        let sequence = &mut self.sequences[slot];
        let possible = sequence.drafts.is_empty() && sequence.choice.is_some();
        let Some(guide) = sequence.guide.as_ref().filter(|_| possible) else { return false };
        guide.0.forced(&mut sequence.drafts);
        let none = sequence.drafts.iter().position(|token| *token >= self.vocab);
        sequence.drafts.truncate(none.unwrap_or(usize::MAX));
        sequence.forced = !sequence.drafts.is_empty();
        sequence.forced
    }

    /// Whether drafts of a choice are worth looking for: not while they were just found not to be worth their rows.
    pub fn wants_drafts(&self, request: RequestId, choice: u32) -> bool {
        let is_paused = |slot: Slot| self.sequences[slot].acceptance.is_paused(self.next_step());
        self.slot_of(request, choice).is_some_and(|slot| !is_paused(slot))
    }

    /// How many of its drafts make the step say most tokens in a microsecond, by what steps took so far and by how many of its drafts
    /// were right; and how many tokens more those are expected to be. Rarely one that would not pay, to find out whether that has changed.
    fn drafts_that_pay(&mut self, slot: Slot, most: u32) -> (u32, f64) {
        let (next_step, rows, so_far) = (self.next_step(), self.step.granted, self.step.expected);
        let Sequence { acceptance, forced, drafts: known, .. } = &mut self.sequences[slot];
        let last = known.len() as u32;
        let right = |draft: u32| match *forced {
            true if draft == last => FORCED_LAST,
            true => FORCED,
            false => f64::from(acceptance.outcomes.probability),
        };
        let drafting = self.step.drafting || known.is_empty();
        // Until steps have a price they cost nothing: the first drafts are the measurement.
        let plain = self.costs.step_us(rows, self.step.drafting);
        let plain = plain.or_else(|| self.costs.step_us(rows, drafting)).unwrap_or(1.0);
        let (best, best_gain) = best_drafts(&self.costs, (rows, so_far, plain), drafting, most, right);
        if best == 0 && most > 0 && !*forced {
            return (u32::from(acceptance.pause(next_step, rows)), 0.0);
        }
        if best > 0 {
            acceptance.resume();
        }
        (best, best_gain)
    }

    /// Whether a model is to read a sequence that begins: whether its drafts would pay beside those that run, were they right as often as
    /// its tenant's were lately; rarely all the same.
    fn is_read(&mut self, tenant: TenantId, most: u32) -> bool {
        let rows = self.running.len() as u32 + 1;
        let record = self.drafter_records.of(tenant);
        let right = f64::from(record.outcomes.probability);
        let pays =
            |plain| best_drafts(&self.costs, (rows, f64::from(rows), plain), true, most, |_| right).0 > 0;
        let known = self.costs.step_us(rows, false).filter(|_| self.costs.knows_drafting());
        record.reads(known.is_none_or(pays))
    }

    /// Rows for what it may go on with, as far as budget and free blocks go.
    pub(super) fn grant_drafts(&mut self, cache: &mut KvCache, slot: Slot) {
        let sequence = &self.sequences[slot];
        let ready = |running: &&Running| running.granted == 1 && running.scheduled + 1 == sequence.known();
        let Some(running) = sequence.running().filter(ready) else { return };
        let (scheduled, by_model) = (running.scheduled, sequence.drafts.is_empty());
        // The last token that it may say needs no row.
        let more = sequence.generated_max.saturating_sub(sequence.generated() + 1);
        let budget = self.config.max_num_batched_tokens.saturating_sub(self.step.granted);
        let mut most = sequence.drafts_possible(self.next_step()).min(more).min(budget);
        if let Some(model) = self.drafter.filter(|_| by_model) {
            // It computes all that is known, and all drafts but the last.
            most = most.min(model.positions.saturating_add(1).saturating_sub(sequence.known()));
        }
        let (drafts, expected) = self.drafts_that_pay(slot, most);
        if drafts == 0 {
            // What is left of them would keep its next steps from being planned ahead.
            return self.sequences[slot].drafts.clear();
        }
        if by_model && !self.drafter_keeps_up(cache, slot) {
            return;
        }
        let sequence = &self.sequences[slot];
        let (to, tentative, owner) = (scheduled + 1 + drafts, sequence.tentative(), sequence.owner());
        let Some(running) = self.sequences[slot].running_mut() else { return };
        running.table.set_tentative(tentative + drafts);
        let needed = cache.needed(&running.table, to);
        let mut granted = self.fits(cache, owner, needed, None).fits() && self.grow(cache, slot, to);
        if let Some(running) = self.sequences[slot].running_mut() {
            running.table.set_tentative(tentative);
            granted &= !by_model || self.drafter.is_some_and(|model| running.table.is_whole(model.group));
        }
        if granted {
            self.grant(slot, drafts);
            self.step.expected += expected;
            self.step.drafting |= by_model;
            self.count_drafts(slot, drafts);
            let sequence = &self.sequences[slot];
            let known = sequence.drafts.get(..drafts as usize);
            known
                .into_iter()
                .for_each(|drafts| sequence.guide.iter().for_each(|guide| guide.0.expect(drafts)));
        }
    }

    fn count_drafts(&mut self, slot: Slot, drafts: u32) {
        let sequence = &mut self.sequences[slot];
        if sequence.forced {
            self.counters.forced_tokens += u64::from(drafts);
        } else {
            let counts = &mut self.counters.drafts[sequence.drafter() as usize];
            counts.sequences += 1;
            counts.tokens += u64::from(drafts);
            sequence.timing.draft_steps += 1;
            sequence.timing.draft_tokens += drafts;
        }
    }

    /// A draft of a sequence was compared with what was chosen.
    pub(super) fn count_outcome(&mut self, slot: Slot, place: usize, right: bool, by_model: bool) {
        let sequence = &mut self.sequences[slot];
        if sequence.forced {
            self.counters.accepted_forced_tokens += u64::from(right);
            return;
        }
        sequence.acceptance.add(right);
        if by_model {
            self.drafter_records.of(sequence.tenant).add(right);
        }
        if right {
            sequence.timing.accepted_draft_tokens += 1;
            self.counters.drafts[sequence.drafter() as usize].accept(place);
        }
    }

    /// A sequence gets a table: what the drafter's KV has of it is what was attached.
    pub(super) fn start_drafter(&mut self, cache: &mut KvCache, slot: Slot) {
        let Some(model) = self.drafter else { return };
        let Some(running) = self.sequences[slot].running_mut() else { return };
        let written = running.table.written();
        running.table.set_written(written);
        let sequence = &self.sequences[slot];
        let (tenant, most, begins) = (sequence.tenant, sequence.model_drafts, sequence.choice.is_none());
        if most > 0 && begins && !self.is_read(tenant, most) {
            self.sequences[slot].model_drafts = 0;
        }
        if self.sequences[slot].model_drafts > 0
            && self.refill_drafter(cache, slot, model)
            && let Some(running) = self.sequences[slot].running_mut()
        {
            begin_context(running, model);
        }
    }

    /// The drafter has a block wherever it is to compute. `false`: there is no room.
    fn refill_drafter(&mut self, cache: &mut KvCache, slot: Slot, model: DrafterModel) -> bool {
        let Some(running) = self.sequences[slot].running_mut() else { return false };
        if !running.table.is_whole(model.group) {
            if running.table.has_transfers() || !cache.refill(&mut running.table, model.group) {
                return false;
            }
            running.drafter_computed = running.table.written();
            begin_context(running, model);
        }
        true
    }

    /// Whether the drafter can propose in this step. Where it lacks more than a few tokens, it computes some of them instead.
    fn drafter_keeps_up(&mut self, cache: &mut KvCache, slot: Slot) -> bool {
        let Some(model) = self.drafter else { return false };
        if !self.refill_drafter(cache, slot, model) {
            return false;
        }
        let known = self.sequences[slot].known();
        let Some(running) = self.sequences[slot].running_mut() else { return false };
        if model.reads != Reads::Tokens {
            // It never lacks much of what it reads, and drafts from what the model computed last: not while that is under way.
            let computed = running.table.computed();
            return computed > running.features_from && computed == running.scheduled;
        }
        running.drafter_lags = known > running.drafter_computed + CATCH_UP;
        !running.drafter_lags
    }

    /// A step is over in which the drafter computed up to `end`, known tokens and `drafts` of its own, all but the last of which it computed
    /// too; the first `right` of them were what was chosen.
    pub(super) fn drafter_computed(&mut self, slot: Slot, end: u32, drafts: u32, right: u32) {
        let reads = self.drafter.map_or(Reads::Tokens, |model| model.reads);
        let Some(running) = self.sequences[slot].running_mut().filter(|_| end > 0) else { return };
        let computed = match reads {
            Reads::Tokens => end + right.min(drafts.saturating_sub(1)),
            // Its drafts' rows have features of its own: they are computed again with the model's.
            Reads::Features { .. } => end,
        };
        running.table.set_written(if running.drafter_context > 0 { 0 } else { computed });
        if drafts > 0 {
            running.drafter_computed = computed;
        }
    }
}

/// How many drafts beside so many rows, which say so many tokens in so many microseconds, make a step say most tokens in a microsecond; and how
/// many tokens more that is expected to be. `right`: how probable each is.
fn best_drafts(
    costs: &Costs,
    (rows, so_far, plain): (u32, f64, f64),
    drafting: bool,
    most: u32,
    right: impl Fn(u32) -> f64,
) -> (u32, f64) {
    let (mut best, mut best_rate, mut best_gain) = (0, so_far / plain, 0.0);
    let (mut probability, mut gain) = (1.0, 0.0);
    let explored = costs.rows_max(drafting).saturating_sub(rows);
    for drafts in 1..=most.min(explored) {
        probability *= right(drafts);
        gain += probability;
        let us = costs.step_us(rows + drafts, drafting).unwrap_or(plain);
        let rate = (so_far + gain) / (plain + PAYS * (us - plain).max(0.0));
        if rate > best_rate {
            (best, best_rate, best_gain) = (drafts, rate, gain);
        } else if drafts > best + TILE {
            break;
        }
    }
    (best, best_gain)
}

/// What the drafter computes of a sequence whose rows are planned, and the names of its drafts, which have the places from `places` on.
/// Returns where that ends, 0 where it computes nothing. `spare`: tokens that drafters may compute in the step to catch up.
pub(super) fn plan(
    entry: &mut SequencePlan,
    sequence: &mut Sequence,
    model: DrafterModel,
    places: &mut u32,
    spare: &mut u32,
) -> u32 {
    let known = sequence.known().min(entry.end());
    let by_model = entry.follows.is_none() && entry.tokens.last() == Some(&PLACEHOLDER);
    let rows = known.saturating_sub(entry.first_position);
    let (wanted, prompt) = (sequence.model_drafts > 0, sequence.choice.is_none());
    let State::Running(running) = &mut sequence.state else { return 0 };
    let lags = std::mem::take(&mut running.drafter_lags);
    if known > model.positions || !running.table.is_whole(model.group) {
        return 0;
    }
    // As far as what it reads is there; and a step of one token is computed when there are drafts behind it again, or when features become
    // many.
    let (there, many) = match model.reads {
        Reads::Tokens => (known, false),
        Reads::Features { .. } => {
            entry.features = if wanted { entry.tokens.len() as u32 } else { 0 };
            let there = running.table.computed().min(known.saturating_sub(1));
            (there, there >= running.drafter_computed + CATCH_UP)
        }
    };
    let goes_along = wanted && (rows > 1 || prompt || many);
    if !(by_model || goes_along || lags) {
        return 0;
    }
    // Where a mask was late the last token is computed again.
    let last = there.saturating_sub(1);
    let computed = if by_model { running.drafter_computed.min(last) } else { running.drafter_computed };
    let own = if goes_along { rows } else { 0 };
    let end = match model.reads {
        Reads::Tokens if !by_model => there.min(computed + own + *spare),
        _ => there,
    };
    if computed >= end {
        return 0;
    }
    *spare -= (end - computed).saturating_sub(own).min(*spare);
    running.drafter_computed = end;
    let drafts = if by_model { entry.drafts } else { 0 };
    let DraftPlan { first_position, context, tokens, drafts: planned, first_place } = &mut entry.drafter;
    (*first_position, *context) = (computed, running.drafter_context);
    (*planned, *first_place) = (drafts, *places);
    let lag = model.reads.lag();
    tokens.extend_from_slice(&sequence.tokens[(computed + lag) as usize..(end + lag) as usize]);
    let first = entry.tokens.len() - drafts as usize;
    for token in &mut entry.tokens[first..] {
        *token = PLACEHOLDER | *places;
        *places += 1;
    }
    end
}

/// A drafter that reads features has those that the model computes from here on. Of what was before it sees nothing, where it lacks more
/// than a few positions of that.
fn begin_context(running: &mut Running, model: DrafterModel) {
    if model.reads == Reads::Tokens {
        return;
    }
    running.features_from = running.scheduled;
    if running.scheduled > running.drafter_computed + CATCH_UP {
        running.drafter_context = running.scheduled / model.block_tokens * model.block_tokens;
        running.drafter_computed = running.drafter_context;
        running.table.set_written(0);
    }
}
