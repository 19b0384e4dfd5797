//! Drafts: what a sequence may be verified to say next, and how many of them are worth their rows.
//!
//! Owns: the number of drafts of each sequence in each step. Must never: change a token, keep anybody waiting, or take a block that somebody
//! needs.
//!
//! Drafts are either known before the plan ([`Scheduler::propose`]), or the step's own drafter proposes them, a model with its KV and states in
//! optional groups ([`crate::plan::DraftPlan`]). Its KV follows what is known: in steps of several tokens it computes the same tokens; in
//! steps of one it lags until drafts are wanted again. What it lacks of a prefix that was found without it, or loaded, it computes beside the
//! next steps, a bounded number of tokens in each; where a state is not there, that is all of it. How far it is there is the table's to know
//! ([`BlockTable::set_written`]), so that nothing is published that was not computed, and a state is kept while it goes on from that. Where a
//! group has no block for it, the sequence goes on without; and where its drafts for a tenant were wrong so often lately that none would pay,
//! it does not read most of that tenant's that begin ([`DrafterRecord`](crate::acceptance::DrafterRecord)).
//!
//! A drafter that reads the model's features ([`Reads::Features`]) has a row for each token behind the first, which lies at the position of
//! the features, the one before the token's. It can compute no more than the model has, in steps that are over; it does so in
//! every step with several rows, and before there are many single ones, because features are kept for it meanwhile. What the model does not
//! compute, because it was found, has none. Where the drafter's KV was found with it, or is missing for a few positions (whose rows are
//! computed without), it goes on; else its context begins anew, with the first position that the model computes, and what it writes then is nobody
//! else's.

use std::cmp::{Ordering, Reverse};

use folio_kv::{BlockTable, KvCache};

use super::Scheduler;
use super::budget::Step;
use super::context_times::Context;
use super::costs::{Costs, StepKind};
use super::tenant_rates::TenantRates;
use crate::acceptance::{DraftSource, TRIED};
use crate::plan::{DraftPlan, DrafterModel, PLACEHOLDER, Reads, SequencePlan};
use crate::request::RequestId;
use crate::sequence::{Running, Sequence, Slot, State};

/// How probable a draft is that rules leave alone: the text is certain, its tokens are not, and the last one may be longer than that text.
const FORCED: f32 = 0.95;
const FORCED_LAST: f32 = 0.5;
/// Drafts of which one is worth less than one part in so many more than the other are worth as much.
const ALIKE: f32 = 16.0;
/// What drafts add to a step counts so many times: estimates err.
const PAYS: f64 = 1.2;
/// Numbers of drafts that are compared for a step.
const LOOKED_AT: usize = 64;
/// Known tokens that a drafter computes before its drafts in one step.
const CATCH_UP: u32 = 64;

impl Scheduler {
    /// What a choice may say next, from the last token on that was told of it: verified in the next plan that has room for it, up to the
    /// first that is no token.
    pub fn propose(&mut self, request: RequestId, choice: u32, drafts: &[u32]) {
        let Some(slot) = self.slot_of(request, choice) else { return };
        let sequence = &mut self.sequences[slot];
        sequence.clear_drafts();
        sequence.drafts.extend(drafts.iter().copied().take_while(|token| *token < self.vocab));
    }

    /// Of what is proposed, what its guide is not known to forbid; and what it leaves alone is proposed.
    pub(super) fn filter_drafts(&mut self, slot: Slot) {
        let sequence = &mut self.sequences[slot];
        let Some(guide) = sequence.guide.as_ref().filter(|_| sequence.choice.is_some()) else { return };
        let forced = guide.0.draft(&mut sequence.drafts);
        let none = sequence.drafts.iter().position(|token| *token >= self.vocab);
        sequence.drafts.truncate(none.unwrap_or(usize::MAX));
        sequence.forced = forced.min(sequence.drafts.len()) as u32;
    }

    /// Whether drafts of a choice are worth looking for: not while they were just found not to be worth their rows.
    pub fn wants_drafts(&self, request: RequestId, choice: u32) -> bool {
        let is_paused = |slot: Slot| self.sequences[slot].acceptance.is_paused(self.next_step());
        self.slot_of(request, choice).is_some_and(|slot| !is_paused(slot))
    }

    /// Whether the next step overlaps those under way, so that who waits for these is not in it.
    pub(super) fn goes_ahead(&self) -> bool {
        self.under_way() && self.ring.lag == 1
    }

    /// How many drafts of whom make the next step say most tokens in a microsecond, by what steps took so far and by how many of each sequence's
    /// drafts were right; rarely one that would not pay, to find out whether that has changed. They are looked at together, since rows do not
    /// cost alike: a tile that is not worth it for one sequence may be for two, and a row of a long context costs more than one of a short one.
    /// Where several tenants are in the step, none of them is slowed by the others' drafts by more than a little (`tenant_rates`).
    ///
    /// Who has drafts, or needs its last token for more than its place, cannot be planned while a step with it runs. If it sat out alone, every
    /// step would lack half of those; where that costs more than the time between two steps, nobody overlaps. `false`: nothing is to be planned
    /// before what is under way is committed.
    pub(super) fn decide_drafts(&mut self) -> bool {
        let decoding = self.find_drafters();
        let rows = decoding.rows;
        if self.step.drafters.is_empty() && decoding.waiting == 0 {
            return true;
        }
        if !self.costs.knows_few(rows) {
            // What the step takes without drafts is found out first.
            for drafts in self.step.drafters.drain(..) {
                self.sequences[drafts.slot].clear_drafts();
            }
            return true;
        }
        let plain = self.without_drafts(&decoding);
        self.count_tenants();
        let paying = self.share_drafts(&decoding, &plain);
        let is_due = |drafts: &Drafts| {
            let sequence = &self.sequences[drafts.slot];
            let acceptance = &sequence.acceptance;
            let tried = acceptance.on_trial > 0 && !drafts.dear;
            drafts.granted == 0 && sequence.forced == 0 && (tried || acceptance.is_due(rows))
        };
        if self.goes_ahead() && (plain.together || paying || self.step.drafters.iter().any(is_due)) {
            return false;
        }
        self.try_drafts(&decoding, &plain);
        true
    }

    /// Whoever decodes in the next step, and of those in `step.drafters` who may have drafts, in the order of arrival.
    fn find_drafters(&mut self) -> Decoding {
        self.step.drafters.clear();
        let step = self.next_step();
        let (mut rows, mut waiting, mut kind, mut prompt_tokens) = (0, 0, StepKind::Alone, 0);
        let mut context = Context::default();
        // Somebody who runs has one; or there were in the last plan, and more wait.
        let mut prompts = self.step.granted > self.step.decodes && self.waiting.len() > 0;
        for at in 0..self.running.len() {
            let slot = self.running[at].1;
            let sequence = &self.sequences[slot];
            let ready = sequence.ready(step, self.ring.lag);
            if ready > 1 {
                (prompts, prompt_tokens) = (true, ready.saturating_add(prompt_tokens));
            }
            // In a pipeline those that are under way are in later steps.
            if !sequence.decodes() || (self.ring.lag > 1 && ready == 0) {
                continue;
            }
            rows += 1;
            let positions = sequence.known();
            context.add(positions.saturating_sub(1), 1);
            if !sequence.is_under_way() {
                self.filter_drafts(slot);
            }
            let sequence = &self.sequences[slot];
            // A prompt ends once.
            let waits = !sequence.can_be_followed() || sequence.is_awaited();
            waiting += u32::from(waits && sequence.choice.is_some());
            let most = self.drafts_wanted(sequence, step);
            if most > 0 {
                if sequence.drafts.is_empty() {
                    kind = StepKind::Drafting;
                }
                let arrival = sequence.rank.arrival;
                let drafts = Drafts { arrival, slot, tenant: 0, positions, most, granted: 0, dear: false };
                self.step.drafters.push(drafts);
                self.begin_drafts(slot);
            }
        }
        // Those who run are in the order of priority, which says nothing to other tenants.
        self.step.drafters.sort_unstable_by_key(|drafts| drafts.arrival);
        let line = self.costs.line();
        // What a model takes to draft is in the times of steps without prompts alone.
        let is_known = prompts && kind != StepKind::Drafting && line.0 > 0.0;
        let prompt_tokens = prompt_tokens.min(self.config.max_prefill_tokens_while_decoding);
        Decoding { rows, context, waiting, kind, prompt_us: is_known.then_some(line), prompt_tokens }
    }

    /// Whose sequences are in the step, so that drafts of one tenant do not slow the others.
    fn count_tenants(&mut self) {
        let step = self.next_step();
        let Step { drafters, tenants, .. } = &mut self.step;
        tenants.clear();
        if drafters.is_empty() {
            return;
        }
        for (_, slot) in &self.running {
            let sequence = &self.sequences[*slot];
            if sequence.decodes() || sequence.ready(step, self.ring.lag) > 0 {
                tenants.add(sequence.tenant);
            }
        }
        for drafts in drafters.iter_mut() {
            drafts.tenant = tenants.place(self.sequences[drafts.slot].tenant);
        }
        if self.running.len() < self.config.max_num_seqs as usize {
            self.waiting.ends().for_each(|tenant| tenants.begins(tenant));
        }
    }

    /// Of drafts that do not pay, some are verified to learn of them; nobody looks for the others for a while.
    fn try_drafts(&mut self, decoding: &Decoding, plain: &Plain) {
        let (step, Decoding { rows, context, kind, .. }) = (self.next_step(), *decoding);
        let us = |drafts: u32, kind| {
            let seen = context.attention * f64::from(drafts) / f64::from(rows);
            self.costs.step_us(rows + drafts, context.with_rows(seen), kind)
        };
        // One by one where a wrong one costs a token of its sequence.
        let all = rows * TRIED;
        let is_measured = rows + all <= self.costs.rows_max(kind);
        let at_once = match (us(all, kind), us(0, StepKind::Alone)) {
            (Some(all), Some(plain)) if is_measured && all <= 2.0 * plain => TRIED,
            _ => 1,
        };
        // Nothing is tried at the cost of other tenants.
        let longest = plain.us.map_or(f64::INFINITY, |us| us * self.step.tenants.longer());
        let mut granted: u32 = self.step.drafters.iter().map(|drafts| drafts.granted).sum();
        let mut fits = |drafts: u32| {
            let fits = longest.is_infinite() || us(granted + drafts, kind).is_some_and(|us| us <= longest);
            granted += if fits { drafts } else { 0 };
            fits
        };
        for drafts in &mut self.step.drafters {
            let sequence = &mut self.sequences[drafts.slot];
            if drafts.granted > 0 {
                sequence.acceptance.resume();
                continue;
            }
            let tried = drafts.most.min(at_once).min(sequence.acceptance.on_trial);
            if sequence.forced == 0 && tried > 0 && !drafts.dear && fits(tried) {
                drafts.granted = tried;
                sequence.acceptance.on_trial -= tried;
            } else if sequence.forced == 0 && sequence.acceptance.pause(step, rows) && fits(1) {
                drafts.granted = 1;
            } else {
                // What is left of them would keep its next steps from being planned ahead.
                sequence.clear_drafts();
            }
        }
        self.step.drafters.retain(|drafts| drafts.granted > 0);
    }

    /// What is known of a sequence's first drafts before they are verified is what became of its tenant's lately.
    fn begin_drafts(&mut self, slot: Slot) {
        let sequence = &mut self.sequences[slot];
        if sequence.forced == 0 && !sequence.acceptance.has_begun() {
            let source = sequence.draft_source(sequence.drafts.is_empty());
            sequence.acceptance.begin(source, self.draft_records.of(sequence.tenant, source));
        }
    }

    /// Drafts that a sequence has, as far as they can be used.
    fn drafts_wanted(&self, sequence: &Sequence, step: u64) -> u32 {
        // The last token that it may say needs no row.
        let most = sequence
            .drafts_possible(step)
            .min(sequence.generated_max.saturating_sub(sequence.generated() + 1));
        match self.drafter.filter(|_| sequence.drafts.is_empty()) {
            // It computes all that is known, and all drafts but the last.
            Some(model) => most.min(model.positions.saturating_add(1).saturating_sub(sequence.known())),
            None => most,
        }
    }

    /// The best step that has no drafts, of sequences of which some cannot be planned while a step with them runs.
    fn without_drafts(&self, decoding: &Decoding) -> Plain {
        let Decoding { rows, context, waiting, .. } = *decoding;
        let all = f64::from(rows);
        let us = |rows: u32, kind| self.costs.step_us(rows, context.times(f64::from(rows) / all), kind);
        if self.ring.depth == 1 || self.ring.lag > 1 {
            return Plain { tokens: all, us: us(rows, StepKind::Alone), together: false };
        }
        let ahead = Plain {
            tokens: all - f64::from(waiting) / 2.0,
            us: us(rows - waiting / 2, StepKind::Ahead),
            together: false,
        };
        let together = Plain { tokens: all, us: us(rows, StepKind::Alone), together: true };
        // What both take is found out first.
        let better = match [StepKind::Alone, StepKind::Ahead].map(|kind| self.costs.knows(kind)) {
            _ if waiting == 0 => false,
            [false, _] => true,
            [true, false] => false,
            [true, true] => together.rate() > ahead.rate(),
        };
        if better { together } else { ahead }
    }

    /// Grants the drafts that pay. `false`: none does.
    fn share_drafts(&mut self, decoding: &Decoding, plain: &Plain) -> bool {
        let Step { drafters, possible, tenants, .. } = &mut self.step;
        possible.clear();
        let most: u32 = drafters.iter().map(|drafts| drafts.most).sum();
        let (row_us, position_us) =
            decoding.prompt_us.unwrap_or_else(|| self.costs.draft_us(decoding.rows, most, decoding.kind));
        let price = |positions: u32| row_us + position_us * f64::from(positions);
        let least = drafters.iter().map(|drafts| price(drafts.positions)).fold(f64::INFINITY, f64::min);
        let token_us = plain.us.map(|us| us / plain.tokens);
        for (at, drafts) in drafters.iter_mut().enumerate() {
            let sequence = &self.sequences[drafts.slot];
            let mut right = 1.0;
            let source = sequence.draft_source(sequence.drafts.is_empty());
            let own = sequence.acceptance.probability(source);
            let each = self.draft_records.probability(sequence.tenant, source, own);
            let price = price(drafts.positions);
            let times = if price > least { (least / price) as f32 } else { 1.0 };
            drafts.dear = token_us.is_some_and(|us| position_us * f64::from(drafts.positions) > us);
            for draft in 1..=drafts.most {
                right *= match draft.cmp(&sequence.forced) {
                    Ordering::Less => FORCED,
                    Ordering::Equal => FORCED_LAST,
                    Ordering::Greater => each,
                };
                let (worth, said) = ((right * times * ALIKE) as u32, sequence.generated() + draft);
                possible.push(PossibleDraft { right, worth, said, at: at as u32 });
            }
        }
        // Of those that are worth as much whoever has said least comes first: where not all get a draft, all get on. Of one sequence the first
        // are worth most.
        possible.sort_unstable_by_key(|draft| (Reverse(draft.worth), draft.said, draft.at));
        let budget = self.config.max_num_batched_tokens.saturating_sub(decoding.rows) as usize;
        possible.truncate(budget);
        let drafts = possible.iter().map(|draft| {
            let Drafts { positions, tenant, .. } = drafters[draft.at as usize];
            NextDraft { right: draft.right, positions, tenant }
        });
        let best = match decoding.prompt_us {
            // What is worth most first: what is behind one that does not pay does not, either.
            Some(_) => {
                let token_us = token_us.unwrap_or(0.0);
                let pays =
                    |draft: &NextDraft| f64::from(draft.right) * token_us > PAYS * price(draft.positions);
                let paying = drafts.clone().take_while(pays).count();
                let plain_us = plain.us.unwrap_or(0.0) + row_us * f64::from(decoding.prompt_tokens);
                let us = |draft: &NextDraft| PAYS * price(draft.positions);
                borne(tenants, plain_us, drafts.take(paying), us)
            }
            None => best_drafts(&self.costs, decoding, plain, tenants, drafts),
        };
        for draft in &possible[..best] {
            drafters[draft.at as usize].granted += 1;
        }
        best > 0
    }

    /// Whether a model is to read a sequence that begins: whether its drafts would pay beside those that run, were they right as often as
    /// its tenant's were lately; rarely all the same.
    fn is_read(&mut self, slot: Slot) -> bool {
        let sequence = &self.sequences[slot];
        let (tenant, most, positions) = (sequence.tenant, sequence.model_drafts, sequence.known());
        let seen = self.step.seen.unwrap_or_else(|| self.seen_by_running());
        debug_assert_eq!(seen, self.seen_by_running(), "what one of them knows has changed unseen");
        self.step.seen = Some(seen);
        let (rows, mut context) = (self.running.len() as u32 + 1, seen);
        context.add(positions.saturating_sub(1), 1);
        let decoding = Decoding { rows, context, kind: StepKind::Drafting, ..Decoding::default() };
        let record = self.draft_records.of(tenant, DraftSource::Model);
        let right = record.rate();
        let pays = |us| {
            let plain = Plain { tokens: f64::from(decoding.rows), us: Some(us), together: false };
            let right = |draft: i32| right.powi(draft + 1);
            let drafts =
                (0..most as i32).map(|draft| NextDraft { right: right(draft), positions, tenant: 0 });
            best_drafts(&self.costs, &decoding, &plain, &mut TenantRates::default(), drafts) > 0
        };
        let known = self.costs.step_us(decoding.rows, decoding.context, StepKind::Alone);
        record.reads(known.filter(|_| self.costs.knows(StepKind::Drafting)).is_none_or(pays))
    }

    /// What a row of each running sequence sees. O(running).
    fn seen_by_running(&self) -> Context {
        let mut seen = Context::default();
        for (_, slot) in &self.running {
            seen.add(self.sequences[*slot].known().saturating_sub(1), 1);
        }
        seen
    }

    /// The rows of its drafts, as far as budget and free blocks go.
    pub(super) fn grant_drafts(&mut self, cache: &mut KvCache, slot: Slot, drafts: u32) {
        let sequence = &self.sequences[slot];
        let ready = |running: &&Running| running.granted == 1 && running.scheduled + 1 == sequence.known();
        let Some(running) = sequence.running().filter(ready) else { return };
        let (scheduled, by_model) = (running.scheduled, sequence.drafts.is_empty());
        let drafts = drafts.min(self.config.max_num_batched_tokens.saturating_sub(self.step.granted));
        if drafts == 0 {
            return;
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
            granted &= !by_model || self.drafter.is_some_and(|model| is_whole(&running.table, model));
        }
        if granted {
            self.grant(slot, drafts);
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
        let forced = drafts.min(sequence.forced);
        self.counters.forced_tokens += u64::from(forced);
        if drafts > forced {
            let counts = &mut self.counters.drafts[sequence.drafter() as usize];
            counts.sequences += 1;
            counts.tokens += u64::from(drafts - forced);
            sequence.timing.draft_steps += 1;
            sequence.timing.draft_tokens += drafts - forced;
        }
    }

    /// A draft of a sequence was compared with what was chosen: in this place of those that its guide does not leave alone.
    pub(super) fn count_outcome(&mut self, slot: Slot, place: usize, right: bool, by_model: bool) {
        let sequence = &mut self.sequences[slot];
        let source = sequence.draft_source(by_model);
        let expected = sequence.acceptance.add(source, place, right);
        self.draft_records.of(sequence.tenant, source).add(self.counters.steps, expected, right);
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
        let (most, begins) = (sequence.model_drafts, sequence.choice.is_none());
        if most > 0 && begins && !self.is_read(slot) {
            self.sequences[slot].model_drafts = 0;
        }
        let wanted = self.sequences[slot].model_drafts > 0;
        let is_there = wanted && self.refill_drafter(cache, slot, model);
        let Some(running) = self.sequences[slot].running_mut() else { return };
        if !wanted {
            running.table.leave_out();
        } else if is_there {
            begin_context(running, model);
        }
    }

    /// The drafter has a block wherever it is to compute. `false`: there is no room.
    fn refill_drafter(&mut self, cache: &mut KvCache, slot: Slot, model: DrafterModel) -> bool {
        let Some(running) = self.sequences[slot].running_mut() else { return false };
        if !is_whole(&running.table, model) {
            // What steps under way write is not known to the table.
            let waits = running.begun_steps > 0 || running.table.has_transfers();
            if waits || !cache.refill(&mut running.table, model.cache_groups()) {
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

/// Drafts of a sequence for the step being planned: how many there are, and how many it gets.
pub(super) struct Drafts {
    arrival: u64,
    pub slot: Slot,
    /// Its place in the step's [`TenantRates`].
    tenant: usize,
    /// That each of its drafts sees, nearly.
    positions: u32,
    most: u32,
    pub granted: u32,
    /// What one of them sees takes longer than a token without drafts: it would not pay if it were certain.
    dear: bool,
}

/// A draft that a sequence may have in the step being planned.
#[derive(Clone, Copy)]
pub(super) struct PossibleDraft {
    /// How probable it is.
    right: f32,
    /// The same, less as much as it is dearer than the cheapest of the step, as one of [`ALIKE`] grades.
    worth: u32,
    /// Tokens that its sequence has said with it.
    said: u32,
    /// Whose it is, of the step's drafters.
    at: u32,
}

/// One that may be added to those of a step.
#[derive(Clone, Copy)]
struct NextDraft {
    right: f32,
    /// That it sees.
    positions: u32,
    tenant: usize,
}

/// Sequences that decode in a step: how many, behind what, and how many of them cannot be planned while a step with them runs.
#[derive(Clone, Copy, Default)]
struct Decoding {
    rows: u32,
    context: Context,
    waiting: u32,
    /// Of a step in which some of them have drafts.
    kind: StepKind,
    /// Beside prompts a draft takes as long as a row of theirs: microseconds, and for each position that it sees.
    prompt_us: Option<(f64, f64)>,
    /// Of those that run, as far as they fit in.
    prompt_tokens: u32,
}

/// A step without drafts.
struct Plain {
    tokens: f64,
    /// Microseconds, once any are known.
    us: Option<f64>,
    /// Nothing else is under way with it.
    together: bool,
}

impl Plain {
    fn rate(&self) -> f64 {
        self.tokens / self.us.unwrap_or(1.0)
    }
}

/// How many drafts, of which those that are worth most come first, make a step of these sequences say most tokens in a microsecond; 0: they are
/// better left out.
fn best_drafts(
    costs: &Costs,
    decoding: &Decoding,
    plain: &Plain,
    tenants: &mut TenantRates,
    drafts: impl ExactSizeIterator<Item = NextDraft>,
) -> usize {
    let Decoding { rows, context, kind, .. } = *decoding;
    // Until steps have a price they cost nothing: the first drafts are the measurement.
    let plain_us = plain.us.or_else(|| costs.step_us(rows, context, kind)).unwrap_or(1.0);
    let explored = costs.rows_max(kind).saturating_sub(rows) as usize;
    // Of many, one number in so many is looked at.
    let most = drafts.len().min(explored);
    let stride = most.div_ceil(LOOKED_AT).max(1);
    let (mut best, mut best_rate) = (0, plain.tokens / plain_us);
    let (mut tokens, mut attention) = (f64::from(rows), 0.0);
    for (count, NextDraft { right, positions, tenant }) in (1..=most).zip(drafts) {
        tokens += f64::from(right);
        attention += f64::from(positions);
        tenants.draft(tenant, right);
        if count % stride != 0 && count != most {
            continue;
        }
        let us = costs.step_us(rows + count as u32, context.with_rows(attention), kind).unwrap_or(plain_us);
        let us = plain_us + PAYS * (us - plain_us).max(0.0);
        let rate = tokens / us;
        if rate > best_rate && us <= tenants.longer() * plain_us {
            (best, best_rate) = (count, rate);
        }
    }
    best
}

/// How many drafts that pay may come with a step of `plain_us` that is not longer for it than its tenants bear. `us`: what each adds.
fn borne(
    tenants: &mut TenantRates,
    plain_us: f64,
    drafts: impl ExactSizeIterator<Item = NextDraft>,
    us: impl Fn(&NextDraft) -> f64,
) -> usize {
    let most = drafts.len();
    // Of many, one number in so many is looked at.
    let stride = most.div_ceil(LOOKED_AT).max(1);
    let (mut borne, mut step_us) = (0, plain_us);
    for (count, draft) in (1..=most).zip(drafts) {
        tenants.draft(draft.tenant, draft.right);
        step_us += us(&draft);
        if (count % stride == 0 || count == most) && step_us <= tenants.longer() * plain_us {
            borne = count;
        }
    }
    borne
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
    if known > model.positions || !is_whole(&running.table, model) {
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

/// Whether the drafter has a block wherever it is to go on.
fn is_whole(table: &BlockTable, model: DrafterModel) -> bool {
    model.cache_groups().all(|group| table.is_whole(group))
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

#[cfg(test)]
mod tests {
    use folio_kv::TenantId;

    use super::*;

    /// Of drafts of the first of these tenants that add a hundredth each to a step.
    fn borne_beside(tenants: &[u32], count: usize) -> usize {
        let mut rates = TenantRates::default();
        tenants.iter().for_each(|tenant| rates.add(TenantId(*tenant)));
        let draft = NextDraft { right: 0.5, positions: 0, tenant: rates.place(TenantId(tenants[0])) };
        let drafts = vec![draft; count].into_iter();
        borne(&mut rates, 1000.0, drafts, |_| 10.0)
    }

    #[test]
    fn one_tenant_bears_all_that_pay_and_others_a_tenth() {
        for count in [0, 1, 63, 65, 67, 131] {
            assert_eq!(borne_beside(&[1, 1], count), count);
            let beside = borne_beside(&[1, 2], count);
            assert!((count.min(9)..=10).contains(&beside), "{beside} of {count}");
        }
    }
}
