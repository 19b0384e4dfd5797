//! What a step's result changes: positions computed, blocks published, tokens known, choices finished.
//!
//! A step that failed changes nothing but ends every sequence it contained; what the executor may have written is in
//! blocks that were never published.
//!
//! Of `n` rows the first `k` are confirmed: all of them, unless the last were drafts and something else was chosen, or the mask of one
//! was late. What is not confirmed is scheduled again.

use folio_kv::{GroupCounts, KeepRefused, KvCache, PrefixInfo, RetentionRange};

use super::Scheduler;
use super::build::{BegunStep, Planned};
use crate::plan::{ExecutorError, PLACEHOLDER, Sampled, SequenceId, StepOutput};
use crate::request::{Event, FinishReason, Micros, Pooling, RequestId, Timing, Token, TokenLogprobs};
use crate::sequence::{Choice, Fresh, Rank, Running, Sequence, Slot, State, Waiting, choice_seed};
use crate::stats::{PerReason, WaitingFor};
use crate::work::{Activity, Division};

impl Scheduler {
    /// Applies the result of the oldest step that is under way; without one there are only events. Those are in order, per
    /// request; the caller drains them.
    pub fn commit(
        &mut self,
        cache: &mut KvCache,
        result: Result<&StepOutput, ExecutorError>,
        now: Micros,
    ) -> &mut Vec<(RequestId, Event)> {
        self.now = now;
        cache.advance(now.0);
        self.recycle();
        let Some(begun) = self.ring.begun.pop_front() else { return &mut self.events };
        self.counters.steps += 1;
        let wanted = begun.planned.iter().map(|planned| planned.samples as usize).sum();
        match result.and_then(|output| samples_of(output, begun.step, wanted)) {
            Ok(output) => self.apply(cache, &begun, output),
            Err(error) => self.fail(cache, &begun, &error),
        }
        self.last_step = (begun.work.rows() as u32, begun.decodes);
        self.ring.spare.push(begun.clear());
        self.work.begin((!self.under_way() && self.requests.is_empty()).then_some(Activity::Idle));
        &mut self.events
    }

    fn apply(&mut self, cache: &mut KvCache, begun: &BegunStep, output: &StepOutput) {
        let us = self.work.stepped(&begun.work, self.now);
        self.costs.stepped(begun.computed, us as f64);
        let division = Division::new(&begun.work, us, self.costs.line());
        let mut divided = 0.0;
        let mut samples = output.samples.as_slice();
        for planned in &begun.planned {
            let (answers, rest) = samples.split_at(planned.samples as usize);
            samples = rest;
            if self.lands(planned) {
                divided += self.attribute(planned, &division);
                self.advance(cache, planned, answers, &output.drafts);
                self.preempt_victim(cache, planned);
            }
        }
        self.work.unattributed_us += (us as f64 - divided).max(0.0);
    }

    /// Ends everybody whom a failed step contained and who has not ended since it was planned.
    fn fail(&mut self, cache: &mut KvCache, begun: &BegunStep, error: &ExecutorError) {
        self.counters.executor_failures += 1;
        self.work.unattributed_us += self.work.stepped(&begun.work, self.now) as f64;
        let message: std::sync::Arc<str> = error.to_string().into();
        for planned in &begun.planned {
            if self.lands(planned) {
                self.end_with_error(cache, planned.slot, message.clone());
            }
        }
    }

    /// The step is not under way any more, for this sequence. `false`: it ended meanwhile.
    fn lands(&mut self, planned: &Planned) -> bool {
        let lives = self.sequences.lives(planned.id, planned.slot);
        let running = lives.then(|| self.sequences[planned.slot].running_mut()).flatten();
        let Some(running) = running else {
            self.counters.orphan_rows += u64::from(planned.rows);
            return false;
        };
        running.begun_steps -= 1;
        running.pending -= u32::from(planned.names);
        true
    }

    /// Its sequence's part of the step's time, which the sequence's next event tells.
    fn attribute(&mut self, planned: &Planned, division: &Division) -> f64 {
        let sequence = &mut self.sequences[planned.slot];
        let first = sequence.computed();
        let us = division.of(first, planned.rows);
        sequence.us += us as f32;
        if first > 0
            && sequence.choice.is_none()
            && let Some(state) = self.requests.get_mut(&sequence.request_id)
        {
            // Before its first step is over all that is there was found.
            let cached = state.cached_tokens.unwrap_or(first).min(first);
            state.cached_us += division.over(cached, planned.rows) as f32;
        }
        us
    }

    /// It was chosen to give its blocks up, and this was its last step under way.
    fn preempt_victim(&mut self, cache: &mut KvCache, planned: &Planned) {
        let lives = self.sequences.lives(planned.id, planned.slot);
        let running = lives.then(|| self.sequences[planned.slot].running()).flatten();
        if running.is_some_and(|running| running.preempted && running.begun_steps == 0) {
            self.preempt(cache, planned.slot);
        }
    }

    /// `places`: what drafts were that are named by place.
    fn advance(&mut self, cache: &mut KvCache, planned: &Planned, answers: &[Sampled], places: &[u32]) {
        let (slot, drafts) = (planned.slot, planned.drafts as usize);
        let (first, behind_drafts) = answers.split_at(answers.len() - drafts);
        if let Some(Sampled::Failed(reason)) = first.iter().find(|a| matches!(a, Sampled::Failed(_))) {
            return self.end_without_answer(cache, slot, reason);
        }
        let late = first.contains(&Sampled::Late);
        let (scores, answers) = answers.split_at(planned.scores as usize);
        self.drafter_computed(slot, planned.drafter_end, planned.drafts, 0);
        // Draft by draft from the last known token on, as long as each is what was chosen.
        if !self.confirm(cache, slot, planned.rows - planned.drafts - u32::from(late)) {
            return;
        }
        self.record_scores(slot, scores);
        if late {
            return self.defer(slot);
        }
        self.record_sum(slot, answers);
        for (at, next) in behind_drafts.iter().enumerate() {
            let Some((draft, by_model)) = self.draft(slot, drafts - at, places) else { return };
            self.take_tokens(cache, slot, &answers[at..=at]);
            if !self.sequences.lives(planned.id, slot) {
                return;
            }
            let right = self.sequences[slot].tokens.last() == Some(&draft);
            match at.checked_sub(planned.forced as usize) {
                None => self.counters.accepted_forced_tokens += u64::from(right),
                Some(place) => self.count_outcome(slot, place, right, by_model),
            }
            if !right {
                return self.take_back(slot);
            }
            self.drafter_computed(slot, planned.drafter_end, planned.drafts, at as u32 + 1);
            match next {
                Sampled::Late => return self.defer(slot),
                Sampled::Failed(reason) => return self.end_without_answer(cache, slot, reason),
                _ if !self.confirm(cache, slot, 1) => return,
                _ => {}
            }
        }
        self.take_tokens(cache, slot, &answers[drafts..]);
    }

    /// The draft that was planned as the `behind`-th token from the end, and whether a model proposed it. A sequence with drafts is planned again only behind their
    /// commit, so its entry is still that of the step.
    fn draft(&self, slot: Slot, behind: usize, places: &[u32]) -> Option<(u32, bool)> {
        let tokens =
            &self.step.entries.get(self.sequences[slot].running()?.table_slot as usize)?.as_ref()?.tokens;
        let token = *tokens.get(tokens.len().checked_sub(behind)?)?;
        match token & PLACEHOLDER {
            0 => Some((token, false)),
            _ => Some((*places.get((token & !PLACEHOLDER) as usize)?, true)),
        }
    }

    fn end_without_answer(&mut self, cache: &mut KvCache, slot: Slot, reason: &str) {
        let what = match self.sequences[slot].request.pooling {
            Some(_) => "the prompt cannot be pooled",
            None => "no token could be chosen",
        };
        self.end_with_error(cache, slot, format!("{what}: {reason}"));
    }

    /// Rows that were not confirmed are scheduled again, and so are the drafter's.
    fn take_back(&mut self, slot: Slot) {
        let Some(running) = self.sequences[slot].running_mut() else { return };
        running.scheduled = running.table.computed();
        if self.drafter.is_some() {
            running.drafter_computed = running.drafter_computed.min(running.scheduled);
            running.table.set_written(running.table.written());
        }
    }

    /// The mask of the row behind those that were confirmed was not there: it is computed again when it is, and nobody waits for that.
    fn defer(&mut self, slot: Slot) {
        self.counters.late_rows += 1;
        self.take_back(slot);
        self.suspend_sequence(slot, WaitingFor::Grammar);
    }

    /// So many positions more were computed. Without any, it stays as it was attached. `false`: that cannot be, and it ended.
    fn confirm(&mut self, cache: &mut KvCache, slot: Slot, rows: u32) -> bool {
        let block_tokens = cache.config().block_tokens;
        let sequence = &mut self.sequences[slot];
        let prompt_len = sequence.prompt_len;
        let State::Running(running) = &mut sequence.state else { return false };
        if rows == 0 {
            running.fresh.iter_mut().for_each(|fresh| *fresh = Fresh::Ran);
            return true;
        }
        let before = running.table.computed();
        let computed = before + rows;
        // What was found is wanted as much as what was computed.
        let from = if running.fresh.is_some() { 0 } else { before };
        if let Err(refused) = cache.commit(&mut running.table, &sequence.tokens, computed) {
            self.end_with_error(cache, slot, refused.to_string());
            return false;
        }
        // Behind it may be what was loaded.
        let there = running.table.computed();
        running.scheduled = running.scheduled.max(there);
        if there / block_tokens > from / block_tokens {
            cache.retain(&running.table, from, &sequence.request.retention);
            let (hashes, announced) = (&sequence.hashes, &mut running.announced);
            self.shared_prefixes.published(slot, hashes, announced, there / block_tokens);
        }
        if running.scheduled == there && running.reserved.is_none() {
            cache.keep_branch(&mut running.table);
        }
        let fresh = running.fresh.take();
        let charged = before.max(sequence.high_water);
        let recomputed = sequence.high_water.min(computed).saturating_sub(before);
        sequence.high_water = sequence.high_water.max(computed);
        let prompt = computed.min(prompt_len).saturating_sub(charged);
        if prompt > 0 {
            self.waiting.fair.charge(sequence.rank.class, sequence.tenant, prompt, 0);
        }
        self.counters.iteration_tokens += u64::from(rows);
        self.counters.recomputed_tokens += u64::from(recomputed);
        if fresh.is_some() {
            // The first step of a request that was really computed fixes what it took from the cache.
            let state = self.requests.get_mut(&sequence.request_id);
            let state = state.filter(|state| state.cached_tokens.is_none());
            state.into_iter().for_each(|state| state.cached_tokens = Some(before.min(prompt_len)));
        }
        self.update_reservation(cache, slot);
        self.wait_for_load(slot);
        true
    }

    fn record_scores(&mut self, slot: Slot, answers: &[Sampled]) {
        let sequence = &mut self.sequences[slot];
        if sequence.choice.is_some() || sequence.request.prompt_logprobs.is_none() {
            return;
        }
        sequence.scored = sequence.scored.max(sequence.computed().min(sequence.prompt_len - 1));
        if let Some(state) = self.requests.get_mut(&sequence.request_id) {
            state.scores.extend(answers.iter().filter_map(|answer| match answer {
                Sampled::Score(score) => Some(score.clone()),
                _ => None,
            }));
        }
    }

    /// Of the rows of a prompt whose mean is wanted.
    fn record_sum(&mut self, slot: Slot, answers: &[Sampled]) {
        if let Some(Sampled::HiddenSum(sum)) = answers.first() {
            let sequence = &mut self.sequences[slot];
            sequence.hidden_sum = Some(sum.as_slice().into());
            sequence.scored = sequence.scored.max(sequence.computed());
        }
    }

    fn take_tokens(&mut self, cache: &mut KvCache, slot: Slot, answers: &[Sampled]) {
        let sequence = &self.sequences[slot];
        if sequence.remaining() > 0 {
            return;
        }
        if sequence.choice.is_none() {
            return self.fork_choices(cache, slot, answers);
        }
        match answers.first() {
            Some(Sampled::Token { id, logprobs }) => self.append(cache, slot, *id, logprobs),
            _ => self.end_with_error(cache, slot, "the executor gave no token"),
        }
    }

    /// The prompt is computed: every choice gets its first token and goes its own way.
    fn fork_choices(&mut self, cache: &mut KvCache, leader: Slot, answers: &[Sampled]) {
        let kept = self.pin_prompt(cache, leader).map(Box::new);
        if cache.needed_groups() > 1 {
            // Who asks the same again computes the last row.
            self.store(cache, leader, self.sequences[leader].prompt_len - 1);
        }
        self.tell_prompt(leader, kept);
        if let Some(pooling) = self.sequences[leader].request.pooling {
            return self.pooled(cache, leader, pooling, answers);
        }
        if self.sequences[leader].params.max_tokens == 0 {
            return self.finish(cache, leader, FinishReason::Length, None, None);
        }
        let Some(state) = self.requests.get_mut(&self.sequences[leader].request_id) else { return };
        let (sampled, unforked) = (std::mem::take(&mut state.sampled), std::mem::take(&mut state.unforked));
        let seed = state.seed;
        let choice = |index| Choice { index, seed: choice_seed(seed, index) };
        // A choice that was ended while the step ran has an answer and no reader.
        let answers = sampled.iter().zip(answers).filter(|(choice, _)| unforked.contains(choice));
        let answers: Vec<(u32, &Sampled)> = answers.map(|(choice, answer)| (*choice, answer)).collect();
        let others = answers.iter().skip(1);
        let siblings: Vec<Slot> = others.map(|(index, _)| self.sibling(leader, choice(*index))).collect();
        // They take their share of the table while the leader still holds it.
        for (slot, (_, answer)) in siblings.into_iter().zip(answers.iter().skip(1)) {
            let Sampled::Token { id: token, logprobs } = answer else { continue };
            if self.end_of(&self.sequences[slot], *token, 1).is_none() {
                self.fork(cache, leader, slot);
            }
            self.append(cache, slot, *token, logprobs);
        }
        if let Some((index, Sampled::Token { id: token, logprobs })) = answers.first() {
            self.sequences[leader].choice = Some(choice(*index));
            self.append(cache, leader, *token, logprobs);
        }
    }

    /// The vector that was wanted instead of tokens, and the end.
    fn pooled(&mut self, cache: &mut KvCache, slot: Slot, pooling: Pooling, answers: &[Sampled]) {
        let sequence = &mut self.sequences[slot];
        sequence.timing.first_token = self.now;
        let (id, rows) = (sequence.request_id, f64::from(sequence.prompt_len));
        let vector = match (pooling, answers.first()) {
            (Pooling::Last, Some(Sampled::Hidden(row))) => Some(row.clone()),
            (Pooling::Mean, Some(Sampled::HiddenSum(sum))) => {
                Some(sum.iter().map(|sum| (sum / rows) as f32).collect())
            }
            _ => None,
        };
        let Some(vector) = vector else {
            return self.end_with_error(cache, slot, "the executor gave no hidden state");
        };
        self.events.push((id, Event::Pooled { vector }));
        self.finish(cache, slot, FinishReason::Stop, None, None);
    }

    /// The prompt is computed, and what was wanted of it is told.
    fn tell_prompt(&mut self, leader: Slot, kept: Option<Box<Result<PrefixInfo, KeepRefused>>>) {
        let sequence = &mut self.sequences[leader];
        let (id, tokens, us) = (sequence.request_id, sequence.prompt_len, std::mem::take(&mut sequence.us));
        let Some(state) = self.requests.get_mut(&id) else { return };
        let (cached_tokens, cached_us) = (state.cached_tokens.unwrap_or(0), state.cached_us);
        let prompt_logprobs = std::mem::take(&mut state.scores);
        self.counters.prompt_tokens += u64::from(tokens);
        self.counters.cached_prompt_tokens += u64::from(cached_tokens);
        self.events.push((id, Event::Prompt { cached_tokens, us, cached_us, prompt_logprobs, kept }));
    }

    /// Pins the prompt as far as its pinned ranges reach, if there are any.
    fn pin_prompt(&self, cache: &mut KvCache, leader: Slot) -> Option<Result<PrefixInfo, KeepRefused>> {
        let sequence = &self.sequences[leader];
        let pinned = || sequence.request.retention.iter().filter(|range| range.pin);
        let retention = pinned().map(RetentionRange::retention).max()?;
        let end = pinned().map(|range| range.tokens.end).max()?;
        // A block that holds a pinned position is pinned as a whole, as long as it is the prompt's alone.
        let end = end.checked_next_multiple_of(cache.config().block_tokens).unwrap_or(end);
        let table = &sequence.running()?.table;
        Some(cache.keep(table, end.min(sequence.prompt_len), retention, true))
    }

    /// Another choice of the leader's request: same prompt, no blocks yet, in the queue.
    fn sibling(&mut self, leader: Slot, choice: Choice) -> Slot {
        let id = self.new_sequence_id();
        let sibling = self.sequences[leader].sibling(id, choice, self.now);
        let (tenant, class, request) = (sibling.tenant, sibling.rank.class, sibling.request_id);
        let slot = self.sequences.insert(sibling);
        self.waiting.fair.begins(class, tenant);
        self.waiting.insert(&self.sequences[slot], slot, WaitingFor::Blocks);
        if let Some(state) = self.requests.get_mut(&request) {
            state.members.push(slot);
        }
        slot
    }

    /// Shares the leader's blocks with a sibling, if there is a place for it; otherwise it stays in the queue.
    fn fork(&mut self, cache: &mut KvCache, leader: Slot, sibling: Slot) {
        let reserve = self.must_reserve(sibling);
        let (parent, child) = (&self.sequences[leader], &self.sequences[sibling]);
        let Some(Running { table, .. }) = parent.running() else { return };
        // One block to write in must be left for it and one for the leader, or the fork only leads to preemption; with
        // reservations, all that it may ever need, or that it comes to share.
        let positions = if reserve { child.final_positions() } else { child.computed() };
        let mut room = GroupCounts::each(cache.groups(), |_| 2);
        if reserve || !self.reservations.is_empty() {
            let growth = child.growth(positions, self.config.max_num_batched_tokens);
            room += cache.fork_demand(table, growth);
        }
        let place = (self.running.len() as u32) < self.config.max_num_seqs;
        if !place || !self.fits(cache, child.owner(), room, None).fits() {
            return;
        }
        let Some(parent) = self.sequences[leader].running_mut() else { return };
        let table = cache.fork(&mut parent.table);
        self.start_running(cache, sibling, table, None);
        self.update_reservation(cache, leader);
    }

    /// Whether `token`, as the `generated`-th, is the last.
    fn end_of(&self, sequence: &Sequence, token: u32, generated: u32) -> Option<FinishReason> {
        match sequence.stop_tokens.contains(&token) {
            true => Some(FinishReason::Stop),
            false => (generated >= sequence.generated_max).then_some(FinishReason::Length),
        }
    }

    fn append(&mut self, cache: &mut KvCache, slot: Slot, id: u32, logprobs: &Option<TokenLogprobs>) {
        let now = self.now;
        let sequence = &mut self.sequences[slot];
        let (request, tenant) = (sequence.request_id, sequence.tenant);
        let choice = sequence.choice.map_or(0, |choice| choice.index);
        let us = std::mem::take(&mut sequence.us);
        let token = Token { id, us, logprobs: logprobs.clone() };
        self.events.push((request, Event::Token { choice, token }));
        sequence.push_token(id);
        if sequence.generated() == 1 {
            sequence.timing.first_token = now;
        }
        self.waiting.fair.charge(sequence.rank.class, tenant, 0, 1);
        self.counters.generation_tokens += 1;
        let sequence = &self.sequences[slot];
        if let Some(reason) = self.end_of(sequence, id, sequence.generated()) {
            let stop_token = (reason == FinishReason::Stop).then_some(id);
            return self.finish(cache, slot, reason, stop_token, None);
        }
        self.sequences[slot].follow();
    }
}

/// The output, if it is that of this step.
fn samples_of(output: &StepOutput, step: u64, wanted: usize) -> Result<&StepOutput, ExecutorError> {
    let (found, of) = (output.samples.len(), output.step);
    match (found, of) == (wanted, step) {
        true => Ok(output),
        false => {
            let reason = format!(
                "the executor answered {found} samples for step {of}, {wanted} were planned for step {step}"
            );
            Err(ExecutorError { step, reason })
        }
    }
}

impl Sequence {
    /// A copy that holds no blocks.
    fn sibling(&self, id: SequenceId, choice: Choice, now: Micros) -> Sequence {
        let mut tokens = Vec::with_capacity(self.tokens.capacity());
        tokens.extend_from_slice(&self.tokens);
        Sequence {
            rank: Rank { id, ..self.rank },
            choice: Some(choice),
            tokens,
            stop_tokens: self.stop_tokens.clone(),
            history: self.history.clone(),
            forced: 0,
            us: 0.0,
            // The leader's goes with the leader.
            guide: None,
            drafts: Vec::new(),
            request: self.request.clone(),
            params: self.params.clone(),
            hidden_sum: None,
            hashes: self.hashes.clone(),
            timing: Timing {
                preemptions: 0,
                pauses: Default::default(),
                loads: Default::default(),
                waited_us: PerReason::default(),
                ..self.timing
            },
            state: State::Waiting(Waiting::new(WaitingFor::Blocks, now)),
            ..*self
        }
    }
}
