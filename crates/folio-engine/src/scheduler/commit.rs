//! What a step's result changes: positions computed, blocks published, tokens known, choices finished.
//!
//! A step that failed changes nothing but ends every sequence it contained; what the executor may have written is in
//! blocks that were never published.

use folio_kv::{GroupCounts, KeepRefused, KvCache, PrefixInfo, RetentionRange};

use super::Scheduler;
use super::costs::Computed;
use crate::plan::{ExecutorError, Sampled, SequenceId, SequencePlan, StepOutput, SwapTimes, Want};
use crate::request::{Event, FinishReason, Micros, Pooling, RequestId, Timing, Token, TokenLogprobs};
use crate::sequence::{Sequence, Slot, State, choice_seed};
use crate::stats::WaitingFor;

/// One choice's token, as sampled.
struct Draw<'a> {
    token: u32,
    logprobs: &'a Option<TokenLogprobs>,
}

impl Scheduler {
    /// Applies the result of the oldest step that was planned and is not committed. Events are in order, per request; the caller drains them.
    pub fn commit(
        &mut self,
        cache: &mut KvCache,
        result: Result<&StepOutput, ExecutorError>,
        now: Micros,
    ) -> &mut Vec<(RequestId, Event)> {
        self.now = now;
        cache.advance(now.0);
        let Err(result) = self.commit_behind(cache, result) else { return &mut self.events };
        let mut entries = std::mem::take(&mut self.plan.sequences);
        let mut planned = std::mem::take(&mut self.planned);
        if !planned.is_empty() {
            self.counters.steps += 1;
        }
        let wanted = entries.iter().map(|entry| entry.samples.len()).sum();
        match result.and_then(|output| answers(output, self.step, wanted)) {
            Ok(output) => self.apply(cache, &planned, &mut entries, output),
            Err(error) => {
                self.swaps_failed(cache);
                self.fail_sequences(cache, &planned, &error);
            }
        }
        entries.clear();
        self.plan.sequences = entries;
        planned.clear();
        self.planned = planned;
        &mut self.events
    }

    fn apply(
        &mut self,
        cache: &mut KvCache,
        planned: &[(SequenceId, Slot)],
        entries: &mut [SequencePlan],
        output: &StepOutput,
    ) {
        if !planned.is_empty() {
            self.learn_costs(computed(entries), output.swap_times);
            self.swaps_ran(cache, output.swap_times);
        }
        let mut samples = output.samples.as_slice();
        for ((id, slot), entry) in planned.iter().zip(entries) {
            let (mine, rest) = samples.split_at(entry.samples.len());
            samples = rest;
            if self.sequences.lives(*id, *slot) {
                let (granted, scores) = take_back(&mut self.sequences[*slot], entry);
                self.advance(cache, *slot, granted, scores, mine);
            }
        }
    }

    /// What the step that just ran says about the price of computing.
    pub(super) fn learn_costs(&mut self, computed: Computed, swaps: SwapTimes) {
        let us = self.now.0.saturating_sub(self.planned_at.0) as f64;
        self.costs.stepped(computed, (us - swaps.out_us - swaps.in_us).max(0.0));
    }

    /// Ends everybody whom a failed step contained and who has not ended since it was planned.
    pub(super) fn fail_sequences(
        &mut self,
        cache: &mut KvCache,
        planned: &[(SequenceId, Slot)],
        error: &ExecutorError,
    ) {
        self.counters.executor_failures += 1;
        let message: std::sync::Arc<str> = error.to_string().into();
        for (id, slot) in planned {
            if self.sequences.lives(*id, *slot) {
                self.end_with_error(cache, *slot, message.clone());
            }
        }
    }

    fn end_with_error(&mut self, cache: &mut KvCache, slot: Slot, message: std::sync::Arc<str>) {
        if self.sequences[slot].born {
            self.finish(cache, slot, FinishReason::Error, None, Some(message));
        } else {
            self.finish_unborn(cache, slot, FinishReason::Error, Some(message));
        }
    }

    /// `granted` positions of a sequence were computed; `answers` are those to its samples, the first `scores` of them scores.
    pub(super) fn advance(
        &mut self,
        cache: &mut KvCache,
        slot: Slot,
        granted: u32,
        scores: usize,
        answers: &[Sampled],
    ) {
        let failure = answers.iter().find_map(|answer| match answer {
            Sampled::Failed(reason) => Some(reason),
            _ => None,
        });
        if let Some(reason) = failure {
            let what = match self.sequences[slot].pooling {
                Some(_) => "the prompt cannot be pooled",
                None => "no token could be chosen",
            };
            return self.end_with_error(cache, slot, format!("{what}: {reason}").into());
        }
        let block_tokens = cache.config().block_tokens;
        let sequence = &mut self.sequences[slot];
        // What came from a copy gives way to equal blocks that were published meanwhile.
        let restored = sequence.fresh && sequence.restores;
        let unchanged = if restored { 0 } else { sequence.computed / block_tokens };
        sequence.synced = sequence.synced.min(unchanged);
        let charged = sequence.computed.max(sequence.high_water);
        let recomputed =
            sequence.high_water.min(sequence.computed + granted).saturating_sub(sequence.computed);
        sequence.computed += granted;
        sequence.high_water = sequence.high_water.max(sequence.computed);
        // What was found is wanted as much as what was computed.
        let from = if sequence.fresh { 0 } else { sequence.computed - granted };
        if let Some(table) = &mut sequence.table {
            cache.commit(table, &sequence.tokens, sequence.computed);
            cache.retain(table, from, &sequence.retention);
        }
        self.in_flight.published(slot, sequence, block_tokens);
        let (priority, tenant) = (sequence.rank.priority, sequence.tenant);
        let prompt = sequence.computed.min(sequence.prompt_len).saturating_sub(charged);
        self.waiting.fair.charge(priority, tenant, prompt, 0);
        self.tenants.entry(tenant).or_default().computed_prompt_tokens += u64::from(prompt);
        self.counters.iteration_tokens += u64::from(granted);
        self.counters.recomputed_tokens += u64::from(recomputed);
        if std::mem::take(&mut self.sequences[slot].fresh) {
            self.first_run(slot, granted);
            self.forget_copy(cache, slot);
        }
        self.keep_scores(slot, &answers[..scores]);
        self.keep_sum(slot, &answers[scores..]);
        self.take_tokens(cache, slot, &answers[scores..]);
    }

    /// The first step of a request that was really computed fixes what it took from the cache.
    fn first_run(&mut self, slot: Slot, granted: u32) {
        let now = self.now;
        let sequence = &mut self.sequences[slot];
        let Some(group) = self.groups.get_mut(&sequence.request) else { return };
        if group.cached_tokens.is_none() {
            group.cached_tokens = Some((sequence.computed - granted).min(sequence.prompt_len));
            sequence.timing.scheduled = now;
            self.queued.requests -= 1;
            self.queued.tokens -= u64::from(group.prompt_len);
        }
    }

    fn keep_scores(&mut self, slot: Slot, answers: &[Sampled]) {
        let sequence = &mut self.sequences[slot];
        if sequence.score_top.is_none() {
            return;
        }
        sequence.scored = sequence.scored.max(sequence.computed.min(sequence.prompt_len - 1));
        if let Some(group) = self.groups.get_mut(&sequence.request) {
            group.scores.extend(answers.iter().filter_map(|answer| match answer {
                Sampled::Score(score) => Some(score.clone()),
                _ => None,
            }));
        }
    }

    /// Of the rows of a prompt whose mean is wanted.
    fn keep_sum(&mut self, slot: Slot, answers: &[Sampled]) {
        if let Some(Sampled::HiddenSum(sum)) = answers.first() {
            let sequence = &mut self.sequences[slot];
            sequence.hidden_sum = Some(sum.as_slice().into());
            sequence.scored = sequence.scored.max(sequence.computed);
        }
    }

    fn take_tokens(&mut self, cache: &mut KvCache, slot: Slot, answers: &[Sampled]) {
        let sequence = &self.sequences[slot];
        if sequence.remaining() > 0 {
            return;
        }
        if !sequence.born {
            return self.part(cache, slot, answers);
        }
        match answers.first() {
            Some(Sampled::Token { id, logprobs }) => self.append(cache, slot, Draw { token: *id, logprobs }),
            _ => self.end_with_error(cache, slot, "the executor gave no token".into()),
        }
    }

    /// The prompt is computed: every choice gets its first token and goes its own way.
    fn part(&mut self, cache: &mut KvCache, leader: Slot, answers: &[Sampled]) {
        let id = self.sequences[leader].request;
        let kept = self.keep_prompt(cache, leader);
        let unborn = self.prompt_done(id, kept);
        if let Some(pooling) = self.sequences[leader].pooling {
            return self.pooled(cache, leader, pooling, answers);
        }
        if self.sequences[leader].params.max_tokens == 0 {
            let timing = self.sequences[leader].timing;
            for choice in unborn {
                self.emit_finished(id, choice, FinishReason::Length, None, None, timing);
            }
            return self.retire(cache, leader);
        }
        let seed = self.groups.get(&id).map_or(0, |group| group.seed);
        let mut members = vec![leader];
        for _ in 1..unborn.len() {
            let sibling = self.sibling(leader);
            members.push(sibling);
        }
        for (slot, choice) in members.iter().zip(&unborn) {
            let sequence = &mut self.sequences[*slot];
            sequence.born = true;
            sequence.choice = *choice;
            sequence.seed = choice_seed(seed, *choice);
        }
        // Siblings take their share of the table while the leader still holds it.
        for (slot, answer) in members.iter().zip(answers).skip(1) {
            let Sampled::Token { id: token, logprobs } = answer else { continue };
            if self.goes_on(*slot, *token) {
                self.fork(cache, leader, *slot);
            }
            self.append(cache, *slot, Draw { token: *token, logprobs });
        }
        if let Some(Sampled::Token { id: token, logprobs }) = answers.first() {
            self.append(cache, leader, Draw { token: *token, logprobs });
        }
    }

    /// The vector that was wanted instead of tokens, and the end.
    fn pooled(&mut self, cache: &mut KvCache, slot: Slot, pooling: Pooling, answers: &[Sampled]) {
        let sequence = &self.sequences[slot];
        let (id, timing) = (sequence.request, Timing { first_token: self.now, ..sequence.timing });
        let rows = f64::from(sequence.prompt_len);
        let vector = match (pooling, answers.first()) {
            (Pooling::Last, Some(Sampled::Hidden(row))) => Some(row.clone()),
            (Pooling::Mean, Some(Sampled::HiddenSum(sum))) => {
                Some(sum.iter().map(|sum| (sum / rows) as f32).collect())
            }
            _ => None,
        };
        let (reason, error) = match vector {
            Some(vector) => {
                self.events.push((id, Event::Pooled { vector }));
                (FinishReason::Stop, None)
            }
            None => (FinishReason::Error, Some("the executor gave no hidden state".into())),
        };
        self.emit_finished(id, 0, reason, None, error, timing);
        self.retire(cache, slot);
    }

    /// Emits `Prompt` and takes the choices out of the group.
    fn prompt_done(&mut self, id: RequestId, kept: Option<Result<PrefixInfo, KeepRefused>>) -> Vec<u32> {
        let Some(group) = self.groups.get_mut(&id) else { return Vec::new() };
        let cached_tokens = group.cached_tokens.unwrap_or(0);
        let prompt_logprobs = std::mem::take(&mut group.scores);
        let prompt_len = group.prompt_len;
        let unborn = std::mem::take(&mut group.unborn);
        let tenant = group.tenant;
        self.counters.prompt_tokens += u64::from(prompt_len);
        self.counters.cached_prompt_tokens += u64::from(cached_tokens);
        let figures = self.tenants.entry(tenant).or_default();
        figures.prompt_tokens += u64::from(prompt_len);
        figures.cached_prompt_tokens += u64::from(cached_tokens);
        self.events.push((id, Event::Prompt { cached_tokens, prompt_logprobs, kept }));
        unborn
    }

    /// Pins the prompt as far as its pinned ranges reach, if there are any.
    fn keep_prompt(&self, cache: &mut KvCache, leader: Slot) -> Option<Result<PrefixInfo, KeepRefused>> {
        let sequence = &self.sequences[leader];
        let pinned = || sequence.retention.iter().filter(|range| range.pin);
        let retention = pinned().map(RetentionRange::retention).max()?;
        let end = pinned().map(|range| range.tokens.end).max()?;
        // A block that holds a pinned position is pinned as a whole, as long as it is the prompt's alone.
        let end = end.checked_next_multiple_of(cache.config().block_tokens).unwrap_or(end);
        let table = sequence.table.as_ref()?;
        Some(cache.keep(table, end.min(sequence.prompt_len), retention, true))
    }

    /// Another choice of the leader's request: same prompt, no blocks yet, in the queue.
    fn sibling(&mut self, leader: Slot) -> Slot {
        let id = self.new_sequence_id();
        let now = self.now;
        let sibling = self.sequences[leader].sibling(id, now);
        let (tenant, rank, request) = (sibling.tenant, sibling.rank, sibling.request);
        let slot = self.sequences.insert(Box::new(sibling));
        self.waiting.fair.begins(rank.priority);
        self.waiting.insert(tenant, rank, slot);
        if let Some(group) = self.groups.get_mut(&request) {
            group.members.push(slot);
        }
        slot
    }

    /// Shares the leader's blocks with a sibling, if there is a place for it; otherwise it stays in the queue.
    fn fork(&mut self, cache: &mut KvCache, leader: Slot, sibling: Slot) {
        let reserve = self.must_reserve(sibling);
        let (leads, wants) = (&self.sequences[leader], &self.sequences[sibling]);
        let Some(table) = &leads.table else { return };
        // One block to write in must be left for it and one for the leader, or the fork only leads to preemption; with
        // a reservation, all that it may ever need, and what the leader may need because it shares.
        let chunk = wants.chunk_max(self.config.max_num_batched_tokens);
        let (fork, loss) = cache.fork_demand(table, wants.final_positions(), chunk);
        let mut room = GroupCounts::each(cache.groups(), |_| 2);
        if reserve {
            room += fork;
        }
        if leads.reserved {
            room += loss;
        }
        let place = (self.running.len() as u32) < self.config.max_num_seqs;
        if !place || !room.fits(self.unreserved(cache, cache.available_to(wants.root.tenant), None)) {
            return;
        }
        let mut table = cache.fork(table);
        let sequence = &mut self.sequences[sibling];
        table.reserve(sequence.final_positions());
        sequence.computed = table.computed();
        sequence.table = Some(table);
        sequence.state = State::Running;
        sequence.synced = 0;
        sequence.reserved = reserve;
        if reserve {
            self.scratch.reserved.push(sibling);
        }
        let (tenant, rank) = (sequence.tenant, sequence.rank);
        self.waiting.remove(tenant, rank, sibling);
        self.start_running(sibling);
    }

    fn goes_on(&self, slot: Slot, token: u32) -> bool {
        self.end_of(&self.sequences[slot], token, 1).is_none()
    }

    /// Whether `token`, as the `generated`-th, is the last.
    fn end_of(&self, sequence: &Sequence, token: u32, generated: u32) -> Option<FinishReason> {
        let params = &sequence.params;
        if params.eos_token_ids.contains(&token) || params.stop_token_ids.contains(&token) {
            return Some(FinishReason::Stop);
        }
        self.is_full(sequence, generated).then_some(FinishReason::Length)
    }

    /// Whether it may have no more than `generated` tokens.
    pub(super) fn is_full(&self, sequence: &Sequence, generated: u32) -> bool {
        generated >= sequence.params.max_tokens
            || sequence.prompt_len + generated >= self.config.max_model_len
    }

    fn append(&mut self, cache: &mut KvCache, slot: Slot, draw: Draw<'_>) {
        let now = self.now;
        let sequence = &mut self.sequences[slot];
        sequence.push_token(draw.token);
        if sequence.generated() == 1 {
            sequence.timing.first_token = now;
        }
        let (request, choice, tenant) = (sequence.request, sequence.choice, sequence.tenant);
        self.waiting.fair.charge(sequence.rank.priority, tenant, 0, 1);
        let token = Token { id: draw.token, logprobs: draw.logprobs.clone() };
        self.events.push((request, Event::Token { choice, token }));
        self.counters.generation_tokens += 1;
        self.tenants.entry(tenant).or_default().generation_tokens += 1;
        let sequence = &self.sequences[slot];
        if let Some(reason) = self.end_of(sequence, draw.token, sequence.generated()) {
            let stop_token = (reason == FinishReason::Stop).then_some(draw.token);
            return self.finish(cache, slot, reason, stop_token, None);
        }
        self.sequences[slot].follow();
    }
}

/// The output, if it is that of this step.
pub(super) fn answers(output: &StepOutput, step: u64, wanted: usize) -> Result<&StepOutput, ExecutorError> {
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

/// Returns the plan's memory to its sequence and drops what the plan shares with it, so that it is changed in place. What it was
/// granted, and how many of its samples were scores.
pub(super) fn take_back(sequence: &mut Sequence, entry: &mut SequencePlan) -> (u32, usize) {
    std::mem::swap(&mut sequence.plan, entry);
    let samples = &mut sequence.plan.samples;
    let scores = samples.iter().take_while(|sample| matches!(sample.want, Want::Score { .. })).count();
    samples.clear();
    (std::mem::take(&mut sequence.granted), scores)
}

fn computed(entries: &[SequencePlan]) -> Computed {
    let mut computed = Computed::default();
    for entry in entries {
        let tokens = entry.tokens.len() as f64;
        if entry.tokens.len() == 1 {
            computed.decodes += 1;
        } else {
            computed.tokens += tokens;
            computed.positions += tokens * (f64::from(entry.first_position) + tokens / 2.0);
        }
    }
    computed
}

impl Sequence {
    /// A copy that holds no blocks.
    fn sibling(&self, id: crate::plan::SequenceId, now: Micros) -> Sequence {
        let mut tokens = Vec::with_capacity(self.tokens.capacity());
        tokens.extend_from_slice(&self.tokens);
        Sequence {
            rank: crate::sequence::Rank { id, ..self.rank },
            request: self.request,
            tenant: self.tenant,
            root: self.root,
            choice: 0,
            born: true,
            params: self.params.clone(),
            seed: 0,
            history: self.history.clone(),
            // The leader's goes with the leader.
            guide: None,
            tokens,
            prompt_len: self.prompt_len,
            computed: 0,
            table: None,
            state: State::Waiting { reason: WaitingFor::Blocks, since: now },
            score_top: None,
            pooling: None,
            hidden_sum: None,
            retention: self.retention.clone(),
            scored: 0,
            timing: crate::request::Timing { preemptions: 0, ..self.timing },
            reserved: false,
            bypassed: 0,
            high_water: self.high_water,
            hashes: self.hashes.clone(),
            hashes_shared: self.hashes_shared,
            announced: (0, 0),
            awaited_block: 0,
            lookup: Default::default(),
            looked_up_step: 0,
            found: 0,
            swapped: None,
            swap_pending: false,
            restores: false,
            at_stake: (0, 0),
            granted: 0,
            fresh: false,
            plan: Sequence::empty_plan(id),
            synced: 0,
        }
    }
}
