//! What each tenant's requests took: sums over the last minute, and its last requests one by one.
//!
//! Owns: where the engine's events are added up. Must never: keep anything of a prompt or an answer but counts. Bounded: [`SLICES`] sums and
//! [`RECORDS_MAX`] requests for each tenant, and as many tenants as there are.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use folio_engine::request::Timing;
use folio_engine::{FinishReason, Micros, WaitingFor};
use folio_kv::{BlockHashes, TenantId};
use parking_lot::Mutex;
use serde_json::{Map, Value, json};

use super::config::{SLICE_US, SLICES, seconds, since, window_from};
use super::kind::RequestKind;
use super::latencies::{Latencies, Latency};
use super::prompts::Prompts;
use crate::engine::Engine;
use crate::observability::recording::{RecordedAnswer, Recorder};
use crate::observability::traces::{Requested, TracedEvents, TracedOutcome, Traces};
use crate::tenancy::tenant::Tenant;

/// Requests of a tenant that can be explained, the last ones.
const RECORDS_MAX: usize = 256;

/// What requests took and got.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Spending {
    pub requests: u64,
    /// Microseconds of steps; of those of prompts, what their rows took to read what was cached.
    pub prompt_us: f64,
    pub cached_us: f64,
    pub output_us: f64,
    pub computed_tokens: u64,
    pub cached_tokens: u64,
    pub output_tokens: u64,
    /// Requests whose first token came, and those of them that had it in time.
    pub begun: u64,
    pub in_time: u64,
}

impl Spending {
    pub fn us(&self) -> f64 {
        self.prompt_us + self.output_us
    }

    /// What prompts took but to read what was cached.
    pub fn computed_us(&self) -> f64 {
        self.prompt_us - self.cached_us
    }

    pub fn add(&mut self, other: &Self) {
        self.requests += other.requests;
        self.prompt_us += other.prompt_us;
        self.cached_us += other.cached_us;
        self.output_us += other.output_us;
        self.computed_tokens += other.computed_tokens;
        self.cached_tokens += other.cached_tokens;
        self.output_tokens += other.output_tokens;
        self.begun += other.begun;
        self.in_time += other.in_time;
    }
}

#[derive(Default)]
struct RecentRequests {
    /// Each with its number since the start.
    slices: [(u64, Spending); SLICES],
    records: VecDeque<Arc<Mutex<RequestFacts>>>,
}

/// One tenant's.
pub(super) struct Account {
    pub tenant: TenantId,
    pub name: Arc<str>,
    inner: Mutex<RecentRequests>,
}

impl Account {
    pub fn new(tenant: &Tenant) -> Self {
        Self { tenant: tenant.id, name: tenant.name.clone(), inner: Mutex::default() }
    }

    fn spend(&self, now: Micros, what: impl FnOnce(&mut Spending)) {
        let slice = now.0 / SLICE_US;
        let mut inner = self.inner.lock();
        let (number, spent) = &mut inner.slices[slice as usize % SLICES];
        if *number != slice {
            (*number, *spent) = (slice, Spending::default());
        }
        what(spent);
    }

    /// A prompt was computed. `us`: of steps, and of that to read what was cached.
    pub fn computed(&self, now: Micros, tokens: u64, cached: u64, us: (f32, f32)) {
        self.spend(now, |spent| {
            spent.computed_tokens += tokens - cached.min(tokens);
            spent.cached_tokens += cached;
            spent.prompt_us += f64::from(us.0);
            spent.cached_us += f64::from(us.1);
        });
    }

    /// Since [`window_from`].
    pub fn spent(&self, now: Micros) -> Spending {
        let (first, last) = (window_from(now).0 / SLICE_US, now.0 / SLICE_US);
        let mut sum = Spending::default();
        let inner = self.inner.lock();
        let slices = inner.slices.iter().filter(|(number, _)| (first..=last).contains(number));
        slices.for_each(|(_, spent)| sum.add(spent));
        sum
    }

    /// The last request of that id, and when it came.
    pub fn find(&self, id: &str) -> Option<(Micros, Value)> {
        let inner = self.inner.lock();
        let facts = inner.records.iter().rev().map(|facts| facts.lock()).find(|facts| facts.id == id)?;
        Some((facts.submitted, facts.json()))
    }
}

/// What is known of one request.
struct RequestFacts {
    id: String,
    asked: RequestKind,
    target: Duration,
    submitted: Micros,
    prompts: usize,
    prompts_done: usize,
    prompt_tokens: u64,
    cached_tokens: u64,
    output_tokens: u64,
    prompt_us: f64,
    output_us: f64,
    first_token: Option<Duration>,
    /// Of its choices: the longest.
    queue_us: u64,
    prefill_us: u64,
    decode_us: u64,
    /// Of its choices: the sum.
    preemptions: u32,
    waited_us: [u64; WaitingFor::ALL.len()],
    drafts: (u32, u32),
    /// Of its choices the first: arrival at the engine, the first step, the first token.
    began: Option<[Micros; 3]>,
    /// The engine ended a choice: the last reason.
    finished: Option<(FinishReason, Micros)>,
    over: bool,
}

impl RequestFacts {
    fn state(&self) -> &'static str {
        match self.finished {
            Some((reason, _)) if self.over => match reason {
                FinishReason::Stop => "stop",
                FinishReason::Length => "length",
                FinishReason::Cancelled => "cancelled",
                FinishReason::Deadline => "deadline",
                FinishReason::Error => "error",
            },
            _ if self.over => "error",
            _ if self.prompts_done < self.prompts => "prompt",
            _ => "output",
        }
    }

    /// For its trace. `now`: the engine's time.
    fn outcome(&self, tenant: &Arc<str>, now: Micros) -> TracedOutcome {
        let ended = self.finished.map_or(now, |(_, at)| at);
        let [arrived, scheduled, first_token] = self.began.unwrap_or_default();
        let marks = [
            ("queue", arrived, scheduled),
            ("prefill", scheduled, first_token),
            ("decode", first_token, ended),
        ];
        // What did not begin has no phase.
        let phases = marks.into_iter().filter(|(_, from, to)| from.0 > 0 && to >= from).collect();
        let waited = WaitingFor::ALL.into_iter().zip(self.waited_us).filter(|(_, us)| *us > 0);
        TracedOutcome {
            id: self.id.clone(),
            tenant: tenant.clone(),
            submitted: self.submitted,
            ended,
            phases,
            first_token: self.first_token,
            finish_reason: self.state(),
            prompt_tokens: self.prompt_tokens,
            cached_tokens: self.cached_tokens,
            output_tokens: self.output_tokens,
            preemptions: self.preemptions,
            waited_us: waited.map(|(reason, us)| (reason.name(), us)).collect(),
            drafts: self.drafts,
            ..TracedOutcome::default()
        }
    }

    fn json(&self) -> Value {
        let s = |us: u64| seconds(us as f64);
        let waited = WaitingFor::ALL.into_iter().zip(self.waited_us).filter(|(_, us)| *us > 0);
        let waited: Map<String, Value> =
            waited.map(|(reason, us)| (reason.name().to_owned(), s(us).into())).collect();
        json!({
            "object": "why.request",
            "id": self.id,
            "kind": self.asked.name(),
            "state": self.state(),
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "output_tokens": self.output_tokens,
            "queue_s": s(self.queue_us),
            "prefill_s": s(self.prefill_us),
            "decode_s": s(self.decode_us),
            "total_s": self.finished.map(|(_, at)| s(since(self.submitted, at))),
            "time_to_first_token_s": self.first_token.map(|after| after.as_secs_f64()),
            "target_s": self.target.as_secs_f64(),
            "in_time": self.first_token.map(|after| after <= self.target),
            "waited_s": waited,
            "preemptions": self.preemptions,
            "draft_tokens": self.drafts.0,
            "accepted_draft_tokens": self.drafts.1,
            "compute": {"prompt_s": seconds(self.prompt_us), "output_s": seconds(self.output_us)},
        })
    }
}

/// A request that was handed to the engine.
pub(crate) struct SubmittedRequest<'a> {
    pub id: &'a str,
    pub asked: RequestKind,
    /// Of each prompt that the engine got, by its place.
    pub hashes: Vec<(usize, BlockHashes)>,
    /// Of all prompts, by their places: the most tokens of an answer. And answers of each.
    pub max_tokens: Vec<u32>,
    pub answers: u32,
    /// It has a drafter.
    pub is_drafted: bool,
    pub submitted: Micros,
    /// Where it is told of in a trace.
    pub requested: Option<Box<Requested>>,
}

/// Where what becomes of a request is told.
pub(super) struct RecordParts {
    pub account: Arc<Account>,
    pub engine: Arc<dyn Engine>,
    pub prompts: Arc<Prompts>,
    pub latencies: Arc<Latencies>,
    pub traces: Option<Arc<Traces>>,
    pub recorder: Arc<Recorder>,
}

/// One request while it is followed: what becomes of it, for its tenant's sums and for itself.
pub(crate) struct RequestRecord {
    parts: RecordParts,
    facts: Arc<Mutex<RequestFacts>>,
    hashes: Vec<(usize, BlockHashes)>,
    max_tokens: Vec<u32>,
    is_drafted: bool,
    /// Of each prompt: tokens that were found.
    cached: Vec<u32>,
    /// Of each choice.
    answers: Vec<Vec<u32>>,
    requested: Option<Box<Requested>>,
    events: TracedEvents,
}

impl RequestRecord {
    pub(super) fn new(
        parts: RecordParts,
        SubmittedRequest { id, asked, hashes, max_tokens, answers, is_drafted, submitted, requested }: SubmittedRequest<
            '_,
        >,
        target: Duration,
    ) -> Self {
        let facts = Arc::new(Mutex::new(RequestFacts {
            id: id.to_owned(),
            asked,
            target,
            submitted,
            prompts: hashes.len(),
            prompts_done: 0,
            prompt_tokens: 0,
            cached_tokens: 0,
            output_tokens: 0,
            prompt_us: 0.0,
            output_us: 0.0,
            first_token: None,
            queue_us: 0,
            prefill_us: 0,
            decode_us: 0,
            preemptions: 0,
            waited_us: [0; WaitingFor::ALL.len()],
            drafts: (0, 0),
            began: None,
            finished: None,
            over: false,
        }));
        parts.account.spend(submitted, |spent| spent.requests += 1);
        parts.recorder.submitted(hashes.len() as u64 * u64::from(answers));
        let mut inner = parts.account.inner.lock();
        if inner.records.len() == RECORDS_MAX {
            inner.records.pop_front();
        }
        inner.records.push_back(facts.clone());
        drop(inner);
        let cached = vec![0; max_tokens.len()];
        Self {
            parts,
            facts,
            hashes,
            max_tokens,
            is_drafted,
            cached,
            answers: Vec::new(),
            requested,
            events: TracedEvents::default(),
        }
    }

    fn spend(&self, what: impl FnOnce(&mut Spending)) {
        self.parts.account.spend(self.parts.engine.now(), what);
    }

    fn took(&self, latency: Latency, us: f64) {
        self.parts.latencies.count(self.parts.engine.now(), latency, us);
    }

    fn hashes(&self, prompt: usize) -> Option<BlockHashes> {
        self.hashes.iter().find(|(place, _)| *place == prompt).map(|(_, hashes)| hashes.clone())
    }

    /// A prompt was computed. `us`: of steps, and of that to read what was cached.
    pub fn prompt(&mut self, place: usize, prompt: &Arc<[u32]>, cached: u32, us: (f32, f32)) {
        if let Some(found) = self.cached.get_mut(place) {
            *found = cached;
        }
        let RecordParts { account, engine, prompts, .. } = &self.parts;
        let (tokens, now) = (prompt.len() as u64, engine.now());
        if let Some(hashes) = self.hashes(place) {
            prompts.prompt(account.tenant, hashes, prompt.clone(), cached, now);
        }
        let cached = u64::from(cached);
        account.computed(now, tokens, cached, us);
        let mut facts = self.facts.lock();
        facts.prompts_done += 1;
        facts.prompt_tokens += tokens;
        facts.cached_tokens += cached;
        facts.prompt_us += f64::from(us.0);
    }

    /// A token of a choice came, which took so much of steps.
    pub fn token(&mut self, choice: usize, token: u32, us: f32) {
        if self.answers.len() <= choice {
            self.answers.resize_with(choice + 1, Vec::new);
        }
        self.answers[choice].push(token);
        let us = f64::from(us);
        self.spend(|spent| {
            spent.output_tokens += 1;
            spent.output_us += us;
        });
        let mut facts = self.facts.lock();
        facts.output_tokens += 1;
        facts.output_us += us;
    }

    /// Where traffic is recorded, an answer of a prompt ended.
    fn record(
        &self,
        (place, prompt): (usize, &Arc<[u32]>),
        hashes: &BlockHashes,
        answer: &[u32],
        (reason, timing): (FinishReason, &Timing),
    ) {
        let RecordParts { account, recorder, .. } = &self.parts;
        if !recorder.is_on() {
            return;
        }
        recorder.ended(RecordedAnswer {
            tenant: account.tenant,
            submitted: timing.arrived,
            hashes: hashes.clone(),
            prompt: prompt.clone(),
            cached_tokens: self.cached.get(place).copied().unwrap_or(0),
            max_tokens: self.max_tokens.get(place).copied().unwrap_or(0),
            answer: answer.to_vec(),
            reason,
            timing: *timing,
        });
    }

    /// The first token of an answer came so long after the request. Of several answers the first counts.
    pub fn first_token(&self, after: Duration) {
        let mut facts = self.facts.lock();
        if facts.first_token.is_some() {
            return;
        }
        facts.first_token = Some(after);
        let in_time = after <= facts.target;
        drop(facts);
        self.took(Latency::FirstToken, after.as_micros() as f64);
        self.spend(|spent| {
            spent.begun += 1;
            spent.in_time += u64::from(in_time);
        });
    }

    /// Of a choice that produced something.
    fn count_times(&self, choice: usize, timing: &Timing) {
        let tokens = self.answers.get(choice).map_or(0, Vec::len);
        if tokens == 0 || timing.first_token == Micros(0) {
            return;
        }
        self.took(Latency::Queue, since(timing.arrived, timing.scheduled) as f64);
        self.took(Latency::Total, since(timing.arrived, timing.finished) as f64);
        if tokens > 1 {
            let decode = since(timing.first_token, timing.finished) as f64;
            self.took(Latency::PerOutputToken, decode / (tokens - 1) as f64);
        }
    }

    /// The engine ended a choice of a prompt.
    pub fn finished(
        &mut self,
        (place, prompt, choice): (usize, &Arc<[u32]>, usize),
        reason: FinishReason,
        timing: &Timing,
    ) {
        self.count_times(choice, timing);
        let answer = self.answers.get_mut(choice).map(std::mem::take);
        if let Some(hashes) = self.hashes(place) {
            self.record((place, prompt), &hashes, answer.as_deref().unwrap_or_default(), (reason, timing));
            if let Some(mut answer) = answer {
                if !self.is_drafted {
                    self.parts.prompts.undrafted(prompt, &answer);
                }
                // The last token is never computed.
                answer.pop();
                let block = hashes.block_tokens() as usize;
                if (prompt.len() + answer.len()) / block > prompt.len() / block {
                    self.parts.prompts.answer(hashes, prompt.clone(), answer);
                }
            }
        }
        if self.requested.is_some() {
            self.events.add(timing);
        }
        let us = f64::from(timing.us);
        let mut facts = self.facts.lock();
        let of_prompt = facts.prompts_done < facts.prompts;
        *if of_prompt { &mut facts.prompt_us } else { &mut facts.output_us } += us;
        facts.queue_us = facts.queue_us.max(since(timing.arrived, timing.scheduled));
        facts.prefill_us = facts.prefill_us.max(since(timing.scheduled, timing.first_token));
        if timing.first_token > Micros(0) {
            facts.decode_us = facts.decode_us.max(since(timing.first_token, timing.finished));
        }
        let times = [timing.arrived, timing.scheduled, timing.first_token];
        let began = facts.began.unwrap_or(times);
        // A time of 0: it did not come to that.
        let first = |one: Micros, other: Micros| {
            if one.0 == 0 || other.0 == 0 { one.max(other) } else { one.min(other) }
        };
        facts.began = Some([0, 1, 2].map(|at| first(began[at], times[at])));
        facts.preemptions += timing.preemptions;
        for (sum, (_, waited)) in facts.waited_us.iter_mut().zip(timing.waited_us.iter()) {
            *sum += waited;
        }
        facts.drafts.0 += timing.draft_tokens;
        facts.drafts.1 += timing.accepted_draft_tokens;
        facts.finished = Some((reason, timing.finished));
        drop(facts);
        self.spend(|spent| *if of_prompt { &mut spent.prompt_us } else { &mut spent.output_us } += us);
    }
}

impl Drop for RequestRecord {
    /// Nothing more comes.
    fn drop(&mut self) {
        let mut facts = self.facts.lock();
        facts.over = true;
        if let (Some(traces), Some(requested)) = (&self.parts.traces, self.requested.take()) {
            let (now, events) = (self.parts.engine.now(), std::mem::take(&mut self.events));
            let tiers = match events.has_loads() {
                true => self.parts.engine.tier_stats().iter().map(|tier| tier.name).collect(),
                false => Vec::new(),
            };
            let outcome = facts.outcome(&self.parts.account.name, now);
            traces.ended(*requested, TracedOutcome { events, tiers, ..outcome }, now);
        }
    }
}
