//! The choices of one request: one sequence computes the prompt, then they part.
//!
//! Owns: what a request still owes its caller. Invariant: exactly one `Finished` per choice, and nothing after it.
//!
//! Until the prompt is computed a single sequence stands for every choice. All choices draw their first token from the
//! same row of logits; those that go on get a fork of the block table (copy-on-write), or wait like a preempted
//! sequence when there is no slot or block for them.

use std::sync::Arc;

use folio_kv::{BlockHashes, KvCache};
use smallvec::SmallVec;

use super::Scheduler;
use crate::acceptance::Acceptance;
use crate::embeddings;
use crate::guide::GuideRef;
use crate::plan::TokenHistory;
use crate::request::{
    Event, FinishReason, Micros, Request, RequestId, SamplingParams, Timing, TokenLogprobs,
};
use crate::sequence::{Choice, Rank, Sequence, Slot, State, Waiting, choice_seed};
use crate::stats::WaitingFor;

#[derive(Default)]
pub(crate) struct RequestState {
    /// What it is counted as while it waits to be scheduled.
    pub queued_tokens: u64,
    /// Its sequences, one until the prompt is computed.
    pub members: Vec<Slot>,
    /// Choices that have not got their first token, ascending. Empty once the prompt is done.
    pub unforked: Vec<u32>,
    /// Those that the step with the prompt's last row samples.
    pub sampled: Vec<u32>,
    /// It was part of a plan.
    pub scheduled: bool,
    /// Set when its first step is committed.
    pub cached_tokens: Option<u32>,
    /// Microseconds of steps in which the prompt's rows read those.
    pub cached_us: f32,
    pub scores: Vec<TokenLogprobs>,
    pub seed: u64,
}

impl RequestState {
    /// The choice, if there is but one and its prompt is not computed.
    pub fn single(&self) -> Option<Choice> {
        match self.unforked[..] {
            [index] => Some(Choice { index, seed: choice_seed(self.seed, index) }),
            _ => None,
        }
    }
}

impl Scheduler {
    pub(super) fn accept(&mut self, request: Request, hashes: BlockHashes, now: Micros) {
        self.counters.requests_received += 1;
        self.queued.requests += 1;
        let queued_tokens = request.queued_tokens();
        self.queued.tokens += queued_tokens;
        let first = self.new_sequence_id();
        let rank = Rank { class: request.class, priority: request.priority, arrival: first.0, id: first };
        let mut state = RequestState {
            queued_tokens,
            members: Vec::with_capacity(request.n as usize),
            unforked: (0..request.n).collect(),
            sampled: Vec::with_capacity(request.n as usize),
            seed: request.sampling.seed,
            ..RequestState::default()
        };
        let (id, deadline) = (request.id, request.deadline);
        self.prefetches.look = true;
        let mut sequence = first_sequence(request, hashes, rank, now, self.config.max_model_len);
        if self.drafter.is_none() {
            sequence.model_drafts = 0;
        }
        let slot = self.sequences.insert(sequence);
        state.members.push(slot);
        self.waiting.fair.begins(rank.class, self.sequences[slot].tenant);
        self.waiting.insert(&self.sequences[slot], slot, WaitingFor::Turn);
        self.deadlines.extend(deadline.map(|deadline| (deadline, id)));
        self.requests.insert(id, state);
    }

    /// Acts on cancellations, waits that are over and passed deadlines.
    pub(super) fn reap(&mut self, cache: &mut KvCache) {
        let mut cancelled = std::mem::take(&mut self.cancelled);
        for cancel in cancelled.drain(..) {
            match cancel.choice {
                None => self.end_request(cache, cancel.request, FinishReason::Cancelled, None),
                Some(choice) => self.end_choice(cache, cancel.request, choice, FinishReason::Cancelled),
            }
        }
        self.cancelled = cancelled;
        self.wake(cache);
        while let Some((deadline, id)) = self.deadlines.first().copied()
            && deadline <= self.now
        {
            self.deadlines.remove(&(deadline, id));
            self.end_request(cache, id, FinishReason::Deadline, None);
        }
    }

    /// Ends every choice that has not ended.
    pub(super) fn end_request(
        &mut self,
        cache: &mut KvCache,
        id: RequestId,
        reason: FinishReason,
        error: Option<Arc<str>>,
    ) {
        let Some(state) = self.requests.get(&id) else { return };
        let mut members = state.members.clone();
        members.sort_unstable_by_key(|slot| self.sequences[*slot].choice.map_or(0, |choice| choice.index));
        for slot in members {
            self.finish(cache, slot, reason, None, error.clone());
        }
    }

    /// Ends a single choice, forked or not. Unknown choices are ignored.
    fn end_choice(&mut self, cache: &mut KvCache, id: RequestId, choice: u32, reason: FinishReason) {
        let Some(state) = self.requests.get_mut(&id) else { return };
        if let Some(at) = state.unforked.iter().position(|unforked| *unforked == choice) {
            if state.unforked.len() == 1 {
                return self.end_request(cache, id, reason, None);
            }
            state.unforked.remove(at);
            let leader = state.members[0];
            let timing = self.sequences[leader].timing;
            self.emit_finished(id, choice, reason, None, None, timing);
            return;
        }
        if let Some(slot) = self.slot_of(id, choice) {
            self.finish(cache, slot, reason, None, None);
        }
    }

    /// The sequence of a choice whose prompt is computed.
    pub(super) fn slot_of(&self, id: RequestId, choice: u32) -> Option<Slot> {
        let is_it = |slot: &Slot| self.sequences[*slot].choice.is_some_and(|own| own.index == choice);
        self.requests.get(&id)?.members.iter().copied().find(is_it)
    }

    pub(super) fn end_with_error(&mut self, cache: &mut KvCache, slot: Slot, message: impl Into<Arc<str>>) {
        self.finish(cache, slot, FinishReason::Error, None, Some(message.into()));
    }

    /// Ends a sequence, and with it every choice that it stands for.
    pub(super) fn finish(
        &mut self,
        cache: &mut KvCache,
        slot: Slot,
        reason: FinishReason,
        stop_token: Option<u32>,
        error: Option<Arc<str>>,
    ) {
        let mut timing = self.timing(slot);
        let Sequence { request_id: id, choice, .. } = self.sequences[slot];
        let state = self.requests.get_mut(&id);
        let choices: SmallVec<[u32; 1]> = match choice {
            Some(choice) => SmallVec::from_buf([choice.index]),
            None => state.map(|state| std::mem::take(&mut state.unforked)).unwrap_or_default().into(),
        };
        for choice in choices {
            self.emit_finished(id, choice, reason, stop_token, error.clone(), timing);
            // What the prompt took is told once.
            timing.us = 0.0;
        }
        self.free_sequence(cache, slot);
    }

    /// Its times up to now, as whoever waits is told at the end.
    fn timing(&self, slot: Slot) -> Timing {
        let sequence = &self.sequences[slot];
        let mut timing = Timing { us: sequence.us, ..sequence.timing };
        if let Some(wait) = sequence.waiting().map(|waiting| waiting.wait).or(sequence.suspension()) {
            timing.waited_us[wait.reason] += self.now.0.saturating_sub(wait.since.0);
        }
        timing
    }

    /// Releases everything a sequence holds, and forgets its request with the last one.
    pub(super) fn free_sequence(&mut self, cache: &mut KvCache, slot: Slot) {
        self.forget_suspension(slot);
        self.store(cache, slot, u32::MAX);
        self.abort_prefetch(cache, slot);
        self.prefetches.look = true;
        self.release(cache, slot);
        let Some(sequence) = self.sequences.remove(slot) else { return };
        if let Some(waiting) = sequence.waiting() {
            self.waiting.remove(&sequence, slot, waiting.wait.reason);
        }
        self.waiting.fair.ends(sequence.rank.class, sequence.tenant);
        let id = sequence.request_id;
        let Some(state) = self.requests.get_mut(&id) else { return };
        state.members.retain(|member| *member != slot);
        if state.members.is_empty() {
            if let Some(deadline) = sequence.request.deadline {
                self.deadlines.remove(&(deadline, id));
            }
            if !state.scheduled {
                self.queued.requests -= 1;
                self.queued.tokens -= state.queued_tokens;
            }
            self.requests.remove(&id);
        }
    }

    pub(super) fn emit_finished(
        &mut self,
        id: RequestId,
        choice: u32,
        reason: FinishReason,
        stop_token: Option<u32>,
        error: Option<Arc<str>>,
        timing: Timing,
    ) {
        self.counters.finished[reason as usize] += 1;
        let timing = Box::new(Timing { finished: self.now, ..timing });
        self.events.push((id, Event::Finished { choice, reason, stop_token, error, timing }));
    }
}

/// The sequence that computes the prompt for all choices.
fn first_sequence(
    request: Request,
    hashes: BlockHashes,
    rank: Rank,
    now: Micros,
    max_model_len: u32,
) -> Sequence {
    let prompt_len = request.prompt.len() as u32;
    // Reserved in full: untouched pages cost nothing, and appending a token never allocates.
    let mut tokens = Vec::with_capacity((prompt_len + request.sampling.max_tokens) as usize);
    tokens.extend_from_slice(&request.prompt);
    let params = &request.sampling;
    Sequence {
        rank,
        choice: None,
        request_id: request.id,
        tenant: request.tenant,
        min_tokens: params.min_tokens,
        restricted: params.rules.is_some(),
        stop_tokens: params.eos_token_ids.iter().chain(&*params.stop_token_ids).copied().collect(),
        history: penalized(params)
            .then(|| Arc::new(TokenHistory::of_prompt(&request.prompt, params.max_tokens))),
        guide: params.rules.as_ref().map(|rules| GuideRef(rules.0.guide(&[]))),
        generated_max: params.max_tokens.min(max_model_len.saturating_sub(prompt_len)),
        params: Arc::new(params.clone()),
        tokens,
        prompt_len,
        scored: 0,
        hidden_sum: None,
        hashes,
        high_water: 0,
        position_shift: embeddings::shift_behind(request.embeddings()),
        us: 0.0,
        timing: Timing { arrived: now, ..Timing::default() },
        drafts: Vec::new(),
        forced: 0,
        model_drafts: request.speculation.as_ref().map_or(0, |speculation| speculation.by_model()),
        acceptance: Acceptance::default(),
        state: State::Waiting(Waiting::new(WaitingFor::Turn, now)),
        request: Arc::new(request),
    }
}

fn penalized(params: &SamplingParams) -> bool {
    params.presence_penalty != 0.0 || params.frequency_penalty != 0.0 || params.repetition_penalty != 1.0
}
