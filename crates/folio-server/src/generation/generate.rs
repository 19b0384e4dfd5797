//! From a prepared job to an answer: submits to the engine, follows its events, and writes the response.
//!
//! One task per HTTP request follows the events at the engine's pace, whatever the client does, so stop strings are found
//! when they happen and figures are counted once. The handler, or the event stream's body, only reads what that task
//! wrote; dropping it cancels. Invariants: every choice ends exactly once for the client; figures are counted before the
//! response that reports them is sent; the task lives until the engine has ended every choice.

mod judge;

use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use axum::body::{Body, Bytes};
use axum::http::{HeaderValue, Response, StatusCode, header};
use folio_engine::handle::Rejected;
use folio_engine::request::{RetentionRange, Timing, Token, TokenLogprobs};
use folio_engine::{CancelFlag, Event, FinishReason, Micros, Request, SamplingParams};
use folio_text::{DetokenizeOptions, Detokenizer, work};
use judge::{Judge, Judged, Verdict};
use serde_json::{Map, Value, json};
use tokio::sync::{mpsc, oneshot};

use crate::api::error::ApiError;
use crate::api::hints::Notes;
use crate::api::params::Generation;
use crate::api::retain::refused;
use crate::app::{Flight, State};
use crate::generation::choice::{Choice, Delta, Scored};
use crate::generation::reading::Reading;
use crate::generation::safety::{self, Screened};
use crate::generation::wire::{Finished, PromptReport, Usage, Wire};
use crate::http::stream::{self, Abort, Events};
use crate::http::{Arrival, JsonRequest, caught};
use crate::observability::metrics::{FinishedChoice, FinishedPrompt};
use crate::observability::usage::Meter;
use crate::tenancy::gate::{Entry, Need, TOKENS_EXPECTED, Ticket};
use crate::tenancy::tenants::Tenant;
use crate::tenancy::unread::{Unread, event_bytes, gathered_bytes};

/// A request ready for the engine.
pub struct Job {
    /// Writes the answer.
    pub wire: Box<dyn Wire>,
    pub generation: Generation,
    pub prompts: Vec<PromptJob>,
    /// When the HTTP request arrived.
    pub arrived: Instant,
    /// Who asks for what, for the safety callout.
    pub asker: Map<String, Value>,
    /// What the answer's headers say about the request.
    pub notes: Notes,
}

impl AsMut<Job> for Job {
    fn as_mut(&mut self) -> &mut Job {
        self
    }
}

pub struct PromptJob {
    pub tokens: Arc<[u32]>,
    pub params: SamplingParams,
    /// Text shown before the generated text (`echo`).
    pub echo: Option<String>,
    /// The prompt's own log probabilities are part of the answer's (`echo` with `logprobs`).
    pub echo_logprobs: bool,
    /// How long which parts of it should stay cached.
    pub retention: Vec<RetentionRange>,
    /// The verdict on it.
    pub screened: Screened,
}

impl Job {
    /// Whether a prompt may begin with blocks that an operator shares: not where every row of it is wanted, and not where it
    /// is pinned, since pins are of a tenant's own blocks.
    fn reads_shared(&self, prompt: &PromptJob) -> bool {
        self.generation.prompt_logprobs.is_none() && !prompt.retention.iter().any(|range| range.pin)
    }
}

/// Unix time, seconds.
pub fn unix_s() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs()
}

/// Reads a request off the event loop with the endpoint's own `prepare`, runs it and answers.
pub(crate) async fn handle(
    state: Arc<State>,
    request: JsonRequest,
    prepare: fn(&State, &Arrival) -> Result<Job, ApiError>,
) -> Result<Response<Body>, ApiError> {
    let flight = Flight::new(state.in_flight.enter(), &request.id, request.entry.clone());
    let arrival = Arrival::new(request);
    let tenant = arrival.tenant.clone();
    let job = safety::prepared(&state, arrival, prepare).await?;
    run(&state, &tenant, job, flight).await
}

/// Bytes of an answer that are worked on at once, on the event loop.
const AT_ONCE_BYTES: usize = 64 << 10;
/// Bytes of a body that is read at once.
const QUICK_BYTES: usize = 1024;
/// What makes even a short body slow to read: everything that is compiled.
const SLOW: [&[u8]; 9] = [
    b"format",
    b"structured",
    b"tool",
    b"grammar",
    b"schema",
    b"bad_words",
    b"\\u",
    // A conversation that is kept here, of any length.
    b"previous_response",
    b"reference",
];

/// Whether a request is read in less time than it takes to hand it to another thread and back: some 100 us, more on a busy
/// machine. An escape could spell any name, so a body with one is not quick.
pub(crate) fn is_quick(body: &[u8]) -> bool {
    let has = |name: &[u8]| body.windows(name.len()).any(|window| window == name);
    body.len() <= QUICK_BYTES && !SLOW.iter().any(|name| has(name))
}

/// Runs the job and answers.
pub(crate) async fn run(
    state: &Arc<State>,
    tenant: &Tenant,
    job: Job,
    flight: Flight,
) -> Result<Response<Body>, ApiError> {
    let notes = job.notes.clone();
    let mut response = answer(state, tenant, job, flight).await?;
    notes.tell(response.headers_mut());
    Ok(response)
}

async fn answer(
    state: &Arc<State>,
    tenant: &Tenant,
    job: Job,
    flight: Flight,
) -> Result<Response<Body>, ApiError> {
    if job.generation.stream.is_some() {
        let unread = Unread::new(state.unread.clone(), tenant.gate.clone());
        let (events, body) = Events::new(unread.clone());
        let idle = job.wire.keep_alive();
        let abort = spawn(state, tenant, job, flight, (unread, Output::Stream(events)))?;
        return Ok(stream::response(body, abort.guard(), state.config.limits.keep_alive, idle));
    }
    let unread = Unread::new(state.unread.clone(), tenant.gate.clone());
    let (abort, answer) = start_counted(state, tenant, job, flight, unread.clone())?;
    let guard = abort.guard();
    let json = answer.await.unwrap_or_else(|_| Err(ApiError::internal("the request was lost")))?;
    drop(guard);
    Ok(json_bytes(Bytes::from_owner(Whole { json, _unread: unread })))
}

/// An answer that counts as unread until its last byte is on its way.
struct Whole {
    json: String,
    _unread: Arc<Unread>,
}

impl AsRef<[u8]> for Whole {
    fn as_ref(&self) -> &[u8] {
        self.json.as_bytes()
    }
}

/// Where an answer that is not streamed comes.
type Answer = oneshot::Receiver<Result<String, ApiError>>;

/// Runs the job whether anybody waits or not: how to cancel it, and where its answer comes.
pub(crate) fn start(
    state: &Arc<State>,
    tenant: &Tenant,
    job: Job,
    flight: Flight,
) -> Result<(Abort, Answer), ApiError> {
    let unread = Unread::new(state.unread.clone(), tenant.gate.clone());
    start_counted(state, tenant, job, flight, unread)
}

/// Runs a job that is streamed whether anybody reads or not: how to cancel it, and its events.
pub(crate) fn start_streaming(
    state: &Arc<State>,
    tenant: &Tenant,
    job: Job,
    flight: Flight,
) -> Result<(Abort, stream::Reader), ApiError> {
    let unread = Unread::new(state.unread.clone(), tenant.gate.clone());
    let (events, reader) = Events::new(unread.clone());
    let abort = spawn(state, tenant, job, flight, (unread, Output::Stream(events)))?;
    Ok((abort, reader))
}

fn start_counted(
    state: &Arc<State>,
    tenant: &Tenant,
    job: Job,
    flight: Flight,
    unread: Arc<Unread>,
) -> Result<(Abort, Answer), ApiError> {
    let (sender, answer) = oneshot::channel();
    Ok((spawn(state, tenant, job, flight, (unread, Output::Whole(Some(sender))))?, answer))
}

fn spawn(
    state: &Arc<State>,
    tenant: &Tenant,
    job: Job,
    flight: Flight,
    (unread, output): (Arc<Unread>, Output),
) -> Result<Abort, ApiError> {
    if state.app.model.only_embeds && job.generation.pooling.is_none() {
        let message = "This model was published for embeddings and has no output matrix; use /v1/embeddings.";
        return Err(ApiError { code: Some("only_embeddings"), ..ApiError::bad_request(message) });
    }
    // Bounded by bytes: `unread` counts what is in it.
    let (events, receiver) = mpsc::unbounded_channel();
    let mut job = job;
    let prompts = job.prompts.iter().map(|prompt| size_of_val(&*prompt.tokens)).sum();
    let mut held = state.unread.hold(&tenant.gate);
    held.grow(prompts).inspect_err(|_| flight.entry.give_back())?;
    let ticket = admit(tenant, &mut job, &flight.entry)?;
    let submitted = state.app.engine.now();
    let abort = match submit(state, tenant, &job, (&unread, events)) {
        Ok(abort) => abort,
        Err(refused) => {
            ticket.refused();
            return Err(refused);
        }
    };
    state.metrics.passed_over(&job.notes);
    let meter = state.meters.of(tenant);
    job.prompts.iter().for_each(|_| meter.request());
    let pump =
        Pump::new(state.clone(), tenant.clone(), (ticket, submitted), job, abort.clone(), (unread, output));
    let (shared, running) = (state.clone(), abort.clone());
    tokio::spawn(async move {
        if caught(pump.follow(receiver, flight)).await.is_none() {
            shared.metrics.panicked();
            running.cancel();
        }
        drop(held);
    });
    Ok(abort)
}

/// Holds the job against what its tenant may have.
fn admit(tenant: &Tenant, job: &mut Job, entry: &Arc<Entry>) -> Result<Ticket, ApiError> {
    let asked = job.generation.max_tokens;
    let mut need = Need { prompts: job.prompts.len() as u32, prompt_tokens: 0, output_tokens: 0 };
    for prompt in &mut job.prompts {
        let tokens = prompt.tokens.len();
        if let Some(context) = tenant.gate.limits().max_context {
            let room = context.saturating_sub(tokens as u32);
            // A vector needs no room behind its prompt.
            let fits = room > 0 || (job.generation.pooling.is_some() && tokens as u32 == context);
            if !fits || asked.is_some_and(|asked| asked > room) {
                return Err(ApiError::context_length(context, tokens, asked.unwrap_or(1)));
            }
            prompt.params.max_tokens = prompt.params.max_tokens.min(room);
        }
        let output = asked.unwrap_or(TOKENS_EXPECTED).min(prompt.params.max_tokens);
        need.prompt_tokens += tokens as u64;
        need.output_tokens += u64::from(output) * u64::from(job.generation.n);
    }
    entry.reserve(need, Instant::now())
}

pub fn json_response(json: String) -> Response<Body> {
    json_bytes(json.into())
}

fn json_bytes(json: Bytes) -> Response<Body> {
    let mut response = Response::new(Body::from(json));
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}

type EventSender = mpsc::UnboundedSender<(usize, Event)>;

/// All prompts of the job go to the engine, or none does.
fn submit(
    state: &State,
    tenant: &Tenant,
    job: &Job,
    (unread, events): (&Arc<Unread>, EventSender),
) -> Result<Abort, ApiError> {
    let engine = &state.app.engine;
    let root = state.root(tenant);
    let timeout = state.config.limits.request_timeout;
    let deadline = timeout.map(|limit| Micros(engine.now().0.saturating_add(limit.as_micros() as u64)));
    let mut flags = Vec::with_capacity(job.prompts.len());
    for (index, prompt) in job.prompts.iter().enumerate() {
        if prompt.screened.denied {
            flags.push(CancelFlag::default());
            continue;
        }
        let root = match state.shared().filter(|_| job.reads_shared(prompt)) {
            Some(shared) => shared.root(root, &prompt.tokens),
            None => root,
        };
        let request = Request {
            id: engine.next_request_id(),
            tenant: tenant.id,
            root,
            prompt: prompt.tokens.clone(),
            n: job.generation.n,
            sampling: prompt.params.clone(),
            class: tenant.class.saturating_add(job.generation.behind),
            priority: job.generation.priority,
            deadline,
            prompt_logprobs: job.generation.prompt_logprobs,
            retention: prompt.retention.clone(),
            pooling: job.generation.pooling,
        };
        let (unread, events) = (unread.clone(), events.clone());
        // The event that is too much is the last that is sent: it tells the pump.
        let sink = move |event: Event| {
            !unread.is_over() && unread.delivered(&event) & events.send((index, event)).is_ok()
        };
        match engine.submit(request, Box::new(sink)) {
            Ok(flag) => flags.push(flag),
            Err(rejected) => {
                Abort::new(flags).cancel();
                state.metrics.rejected(&rejected);
                return Err(refusal(rejected));
            }
        }
    }
    Ok(Abort::new(flags))
}

/// The engine's reasons in HTTP's terms.
pub fn refusal(rejected: Rejected) -> ApiError {
    let message = rejected.to_string();
    match rejected {
        Rejected::QueueFull { retry_after_s, .. } => ApiError::busy(message, retry_after_s),
        Rejected::TooLong { .. } | Rejected::LargerThanCache { .. } => {
            ApiError { code: Some("context_length_exceeded"), ..ApiError::bad_request(message) }
        }
        Rejected::LargerThanQuota { .. } => ApiError {
            code: Some("quota_exceeded"),
            ..ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, "invalid_request_error", message)
        },
        Rejected::TooManyChoices { .. } => ApiError::invalid("n", message),
        Rejected::Invalid { field, .. } => ApiError::invalid(field, message),
        Rejected::ShuttingDown => ApiError::unavailable(message, 5),
        Rejected::Unhealthy { .. } => ApiError::unavailable(message, 30),
    }
}

enum Output {
    Stream(Events),
    Whole(Option<oneshot::Sender<Result<String, ApiError>>>),
}

/// One choice of one prompt.
struct Slot {
    choice: Choice,
    /// Text and tokens of a response that is not streamed.
    whole: Delta,
    first_token: Option<Instant>,
    last_token: Option<Instant>,
    /// Bytes gathered of what was not shown yet.
    hidden: usize,
    /// Over for the client.
    done: bool,
    /// Over for the engine.
    ended: bool,
    judged: Judged,
}

/// Follows one job.
struct Pump {
    state: Arc<State>,
    /// Of the tenant that asked.
    meter: Arc<Meter>,
    tenant: Tenant,
    /// Until the end.
    ticket: Option<Ticket>,
    job: Job,
    abort: Abort,
    output: Output,
    unread: Arc<Unread>,
    /// Bytes that are gathered here, of which `unread` knows so far.
    gathered: usize,
    counted: usize,
    /// Prompt-major: choice `c` of prompt `p` is `p * n + c`.
    slots: Vec<Slot>,
    reports: Vec<Option<PromptReport>>,
    usage: Usage,
    /// When the prompts were handed to the engine, and when it ended the last choice, by its clock.
    submitted: Micros,
    finished: Micros,
    /// An error was sent, or the client left.
    failed: bool,
    /// The response is complete.
    answered: bool,
    /// Who judges answers, where somebody does.
    judge: Option<Judge>,
    verdicts: mpsc::UnboundedReceiver<Verdict>,
}

impl Pump {
    fn new(
        state: Arc<State>,
        tenant: Tenant,
        (ticket, submitted): (Ticket, Micros),
        job: Job,
        abort: Abort,
        (unread, output): (Arc<Unread>, Output),
    ) -> Self {
        let mut slots = Vec::new();
        let rules = state.config.safety.output().cloned();
        for prompt in &job.prompts {
            let params = Arc::new(prompt.params.clone());
            for _ in 0..job.generation.n {
                let tokenizer = state.app.tokenizer.clone();
                let choice = Choice::new(tokenizer, &job.generation, params.clone(), rules.as_ref());
                slots.push(Slot {
                    choice,
                    whole: Delta::default(),
                    first_token: None,
                    last_token: None,
                    hidden: 0,
                    done: false,
                    ended: prompt.screened.denied,
                    judged: Judged::default(),
                });
            }
        }
        let judge = state.config.safety.judge().cloned();
        let meter = state.meters.of(&tenant);
        let (sender, verdicts) = mpsc::unbounded_channel();
        let reports = vec![None; job.prompts.len()];
        let thinks = job.generation.reading.as_ref().is_some_and(Reading::separates_reasoning);
        let usage = Usage { reasoning_tokens: thinks.then_some(0), ..Usage::default() };
        Self {
            state,
            tenant,
            ticket: Some(ticket),
            meter,
            job,
            abort,
            output,
            unread,
            gathered: 0,
            counted: 0,
            slots,
            reports,
            usage,
            submitted,
            finished: submitted,
            failed: false,
            answered: false,
            judge: judge.map(|callout| Judge { callout, sender }),
            verdicts,
        }
    }

    async fn follow(mut self, mut events: mpsc::UnboundedReceiver<(usize, Event)>, flight: Flight) {
        self.refuse_denied();
        loop {
            if !self.answered && self.slots.iter().all(|slot| slot.done) {
                let bytes = if matches!(self.output, Output::Whole(_)) { self.gathered } else { 0 };
                let Some(answered) = self.off_loop(bytes, Pump::answer).await else { return };
                self = answered;
            }
            let running = self.slots.iter().any(|slot| !slot.ended);
            let judging = self.slots.iter().any(|slot| slot.judged.asking);
            tokio::select! {
                event = events.recv(), if running => match event {
                    Some((prompt, event)) => {
                        let bytes = event_bytes(&event);
                        self.unread.release(bytes);
                        let bytes = bytes + self.echo_bytes(prompt, &event);
                        let Some(done) = self.off_loop(bytes, move |pump| pump.event(prompt, event)).await else { return };
                        self = done;
                    }
                    None => {
                        self.fail(ApiError::internal("the engine stopped before the request was finished"));
                        break;
                    }
                },
                Some((index, verdict)) = self.verdicts.recv(), if judging => self.judged(index, verdict),
                else => break,
            }
            self.count_gathered();
        }
        self.abort.finished();
        if let Some(ticket) = self.ticket.take() {
            ticket.settle(self.usage.prompt_tokens + self.usage.completion_tokens);
        }
        if !self.failed {
            let in_engine = Duration::from_micros(self.finished.0.saturating_sub(self.submitted.0));
            self.state.metrics.overhead(self.job.arrived.elapsed().saturating_sub(in_engine));
        }
        self.audit(&flight);
        drop(flight);
    }

    /// Does work on about so many bytes: at once where they are few, else on a text thread, when it is the tenant's turn. `None`: it
    /// failed, and the request with it.
    async fn off_loop(mut self, bytes: usize, work: impl FnOnce(&mut Self) + Send + 'static) -> Option<Self> {
        if bytes <= AT_ONCE_BYTES {
            work::add(bytes);
            work(&mut self);
            return Some(self);
        }
        let (state, abort) = (self.state.clone(), self.abort.clone());
        // It was let in before: where the line is full, it does not wait in it.
        let turn = state.text.turn(&self.tenant.id, bytes as u64).await;
        let worked = tokio::task::spawn_blocking(move || {
            let _turn = turn;
            work(&mut self);
            self
        });
        let worked = worked.await;
        if worked.is_err() {
            state.metrics.panicked();
            abort.cancel();
        }
        worked.ok()
    }

    /// Bytes of a prompt that are decoded, token by token, to be shown before its answer.
    fn echo_bytes(&self, prompt: usize, event: &Event) -> usize {
        let job = &self.job.prompts[prompt];
        match event {
            Event::Prompt { .. } if job.echo_logprobs => job.tokens.len() * gathered_bytes(None),
            _ => 0,
        }
    }

    /// Tells `unread` what is gathered, and ends the answer where that, or what the client did not accept, is too much.
    fn count_gathered(&mut self) {
        let (before, now) = (std::mem::replace(&mut self.counted, self.gathered), self.gathered);
        if now > before {
            self.unread.hold(now - before);
        } else {
            self.unread.release(before - now);
        }
        if !self.unread.is_over() || self.failed || self.answered {
            return;
        }
        for index in 0..self.slots.len() {
            let slot = &mut self.slots[index];
            (slot.whole, slot.judged) = (Delta::default(), Judged::default());
            if !std::mem::replace(&mut slot.done, true) {
                self.count(index, "abort");
            }
        }
        if let Output::Stream(events) = &self.output {
            events.cut();
        }
        self.unread.release(std::mem::take(&mut self.counted));
        self.gathered = 0;
        self.fail(self.unread.refusal());
    }

    /// What was computed for whom, and how it ended.
    fn audit(&self, flight: &Flight) {
        let Some(audit) = &self.state.audit else { return };
        let ends = self.slots.iter().map(|slot| slot.choice.finish().map_or("error", |finish| finish.reason));
        audit.write(
            "generation",
            json!({
                "request_id": flight.request,
                "tenant": &*self.tenant.name,
                "key": &*self.tenant.key,
                "model": self.state.app.model.name(),
                "prompts": self.job.prompts.len(),
                "prompt_tokens": self.usage.prompt_tokens,
                "cached_tokens": self.usage.cached_tokens,
                "completion_tokens": self.usage.completion_tokens,
                "finish_reasons": ends.collect::<Vec<_>>(),
                "failed": self.failed,
                "ms": self.job.arrived.elapsed().as_millis() as u64,
            }),
        );
    }

    fn event(&mut self, prompt: usize, event: Event) {
        match event {
            Event::Prompt { cached_tokens, prompt_logprobs, kept } => {
                // Before anything of the answer is shown; the figures are counted all the same.
                if let Some(Err(reason)) = kept {
                    self.fail(refused(&reason, "cache.pin", "cache.pin"));
                }
                self.prompt_done(prompt, cached_tokens, prompt_logprobs);
            }
            Event::Token { choice, token } => {
                let index = self.index(prompt, choice);
                self.token(index, token);
            }
            Event::Pooled { vector } => {
                let index = self.index(prompt, 0);
                self.slots[index].whole.vector = vector;
            }
            Event::Finished { choice, reason, stop_token, error, timing } => {
                let index = self.index(prompt, choice);
                self.slots[index].ended = true;
                let slot = &self.slots[index];
                let produced = slot.choice.tokens > 0 || !slot.whole.vector.is_empty();
                // It also queues until the step under way ends and the engine takes it up.
                let timing = Timing { arrived: self.submitted, ..timing };
                self.state.metrics.timing(&timing, produced);
                self.finished = self.finished.max(timing.finished);
                self.ended(index, reason, stop_token, error);
            }
        }
    }

    fn index(&self, prompt: usize, choice: u32) -> usize {
        prompt * self.job.generation.n as usize + choice as usize
    }

    fn prompt_of(&self, index: usize) -> usize {
        index / self.job.generation.n as usize
    }

    /// The prompt was computed: its figures are final and its choices begin.
    fn prompt_done(
        &mut self,
        prompt: usize,
        cached: u32,
        logprobs: Vec<folio_engine::request::TokenLogprobs>,
    ) {
        let job = &self.job.prompts[prompt];
        let tokens = job.tokens.len() as u64;
        self.usage.prompt_tokens += tokens;
        self.usage.cached_tokens += u64::from(cached);
        self.state.metrics.prompt(tokens, u64::from(cached));
        self.meter.prompt(tokens, cached.into());
        self.ticket.iter_mut().for_each(Ticket::started);
        if let Some(shared) = self.state.shared().filter(|_| self.job.reads_shared(job)) {
            shared.served(&self.state, &job.tokens, cached);
        }
        if let Some(key) = &self.job.generation.cache.key {
            self.state.cache_keys.count(self.tenant.id, key, tokens, cached.into());
        }
        let wanted = self.job.generation.prompt_logprobs.is_some() && !job.echo_logprobs;
        // Every choice shows them.
        let shown: usize = logprobs.iter().map(|entry| gathered_bytes(Some(entry))).sum();
        self.gathered += shown.saturating_mul(self.job.generation.n as usize);
        self.count_gathered();
        if self.failed {
            return;
        }
        let job = &self.job.prompts[prompt];
        let echo = self.echo(prompt, &logprobs);
        let report = PromptReport { tokens: job.tokens.clone(), logprobs: wanted.then(|| logprobs.into()) };
        let n = self.job.generation.n as usize;
        for index in prompt * n..(prompt + 1) * n {
            self.open(index, &report);
            if let Some((echo, characters)) = &echo {
                self.slots[index].hidden += shown;
                match self.slots[index].choice.echo(echo, *characters) {
                    Some(_) => self.stop(index),
                    None => self.flush(index),
                }
            }
        }
        self.reports[prompt] = Some(report);
    }

    /// A choice begins.
    fn open(&mut self, index: usize, report: &PromptReport) {
        if let Output::Stream(events) = &self.output {
            self.job.wire.opening(index as u32, report, self.usage, events);
        }
    }

    /// A choice ended before the engine knows.
    fn stop(&mut self, index: usize) {
        self.cancel(index);
        self.complete(index);
    }

    fn cancel(&mut self, index: usize) {
        let prompt = self.prompt_of(index);
        let choice = index as u32 - (prompt as u32) * self.job.generation.n;
        self.abort.cancel_choice(prompt, choice);
    }

    /// What `echo` puts before the generated text, and its length in characters.
    fn echo(&self, prompt: usize, logprobs: &[TokenLogprobs]) -> Option<(Delta, usize)> {
        let job = &self.job.prompts[prompt];
        let text = job.echo.clone()?;
        let mut scored = Vec::new();
        if job.echo_logprobs {
            let tokenizer = &self.state.app.tokenizer;
            let skip_special_tokens = self.job.generation.skip_special_tokens;
            let mut detokenizer =
                Detokenizer::new(DetokenizeOptions { skip_special_tokens, continues: false });
            let mut before = String::new();
            let (mut at, mut offset) = (0, 0);
            for (position, id) in job.tokens.iter().enumerate() {
                // Rank 0 marks the first token, which nothing predicts.
                let logprobs = match position.checked_sub(1) {
                    Some(entry) => logprobs.get(entry).cloned().unwrap_or_default(),
                    None => Default::default(),
                };
                scored.push(Scored { id: *id, logprobs, offset });
                before.clear();
                // A special token is in the text only where the client wrote it there.
                let written = text
                    .get(at..)
                    .is_some_and(|rest| rest.as_bytes().starts_with(tokenizer.token_bytes(*id)));
                match tokenizer.is_special(*id) && written {
                    true => before.push_str(&String::from_utf8_lossy(tokenizer.token_bytes(*id))),
                    false => detokenizer.push(tokenizer, *id, &mut before),
                }
                at += before.len();
                offset += before.chars().count();
            }
        }
        let characters = text.chars().count();
        Some((Delta { scored, ..Delta::text(text) }, characters))
    }

    fn token(&mut self, index: usize, token: Token) {
        let now = Instant::now();
        let slot = &mut self.slots[index];
        if slot.done || slot.judged.over || self.failed {
            return;
        }
        match slot.last_token.replace(now) {
            Some(last) => self.state.metrics.inter_token(now - last),
            None => {
                slot.first_token = Some(now);
                self.state.metrics.first_token(now - self.job.arrived);
            }
        }
        let bytes = gathered_bytes(token.logprobs.as_ref());
        slot.hidden += bytes;
        self.gathered += bytes;
        let (before, thought) = (slot.choice.tokens, slot.choice.reasoning_tokens);
        let stopped = slot.choice.push(token);
        let counted = u64::from(slot.choice.tokens - before);
        if let Some(tokens) = &mut self.usage.reasoning_tokens {
            *tokens += u64::from(slot.choice.reasoning_tokens - thought);
        }
        self.usage.completion_tokens += counted;
        self.state.metrics.generated(counted);
        self.meter.generated(counted);
        match stopped {
            Some(_) => self.stop(index),
            None => self.flush(index),
        }
    }

    /// The engine ended a choice.
    fn ended(
        &mut self,
        index: usize,
        reason: FinishReason,
        stop_token: Option<u32>,
        error: Option<Arc<str>>,
    ) {
        if self.slots[index].done || self.slots[index].judged.over {
            return;
        }
        let reason = match reason {
            FinishReason::Stop => "stop",
            FinishReason::Length => "length",
            FinishReason::Cancelled | FinishReason::Deadline | FinishReason::Error => {
                self.slots[index].done = true;
                self.count(index, if reason == FinishReason::Cancelled { "abort" } else { "error" });
                let message = error.as_deref().unwrap_or("the request was cancelled by the server");
                return match reason {
                    FinishReason::Deadline => self.fail(ApiError::deadline()),
                    _ if self.state.draining.load(std::sync::atomic::Ordering::Acquire) => {
                        self.fail(ApiError::unavailable("the server is shutting down", 5));
                    }
                    _ => self.fail(ApiError::internal(message)),
                };
            }
        };
        self.slots[index].choice.end(reason, stop_token);
        self.complete(index);
    }

    /// Counts a choice, and its prompt when this was the last of it.
    fn count(&self, index: usize, reason: &'static str) {
        let slot = &self.slots[index];
        let now = Instant::now();
        let decode = slot.first_token.zip(slot.last_token).map(|(first, last)| last - first);
        self.state.metrics.choice(FinishedChoice {
            reason,
            e2e: now - self.job.arrived,
            tokens: slot.choice.tokens,
            decode,
        });
        let (prompt, n) = (self.prompt_of(index), self.job.generation.n as usize);
        let siblings = &self.slots[prompt * n..(prompt + 1) * n];
        if siblings.iter().all(|slot| slot.done) {
            let job = &self.job.prompts[prompt];
            self.state.metrics.request(FinishedPrompt {
                prompt_tokens: job.tokens.len(),
                n: self.job.generation.n,
                max_tokens: self.job.generation.max_tokens.unwrap_or(job.params.max_tokens),
                most_generated: siblings.iter().map(|slot| slot.choice.tokens).max().unwrap_or(0),
            });
        }
    }

    fn show(&mut self, index: usize, delta: Delta) {
        if self.failed {
            return;
        }
        let slot = &mut self.slots[index];
        let mut shown = std::mem::take(&mut slot.judged.asked_bytes);
        if self.judge.is_none() || slot.done {
            shown += std::mem::take(&mut slot.hidden);
        }
        match &self.output {
            Output::Stream(events) => {
                self.gathered -= shown;
                let finish = slot.done.then(|| slot.choice.finish()).flatten();
                self.job.wire.delta(index as u32, &delta, finish, self.usage, events);
            }
            Output::Whole(_) => slot.whole.append(delta),
        }
    }

    /// Everybody is done.
    fn answer(&mut self) {
        self.answered = true;
        if self.failed {
            return;
        }
        self.abort.finished();
        match &mut self.output {
            Output::Stream(events) => self.job.wire.closing(self.usage, events),
            Output::Whole(sender) => {
                let n = self.job.generation.n as usize;
                let choices = self.slots.iter_mut().enumerate().filter_map(|(index, slot)| {
                    Some(Finished {
                        index: index as u32,
                        delta: std::mem::take(&mut slot.whole),
                        finish: slot.choice.finish()?.clone(),
                        prompt: self.reports[index / n].clone(),
                    })
                });
                let json = self.job.wire.whole(&choices.collect::<Vec<_>>(), self.usage);
                self.gathered = json.len();
                if let Some(sender) = sender.take() {
                    let _ = sender.send(Ok(json));
                }
            }
        }
        self.close();
    }

    /// Tells the client, once, and ends what still runs.
    fn fail(&mut self, error: ApiError) {
        if std::mem::replace(&mut self.failed, true) {
            return;
        }
        self.abort.cancel();
        match &mut self.output {
            Output::Stream(events) => self.job.wire.failed(&error, events),
            Output::Whole(sender) => {
                if let Some(sender) = sender.take() {
                    let _ = sender.send(Err(error));
                }
            }
        }
        self.close();
    }

    /// Ends the response; the task itself goes on until the engine is done.
    fn close(&mut self) {
        self.output = Output::Whole(None);
    }
}

#[cfg(test)]
mod tests {
    use super::is_quick;

    #[test]
    fn whatever_is_compiled_is_not_quick_however_it_is_spelled() {
        assert!(is_quick(br#"{"prompt": "hi", "max_tokens": 4}"#));
        for slow in [
            r#"{"response_format": {"type": "json_object"}}"#,
            r#"{"response_f\u006frmat": {"type": "json_object"}}"#,
            r#"{"structured_outputs": {"regex": "a"}}"#,
            r#"{"text": {"format": {}}}"#,
            r#"{"tools": []}"#,
            r#"{"bad_words": ["a"]}"#,
            r#"{"input": "on", "previous_response_id": "resp_1"}"#,
        ] {
            assert!(!is_quick(slow.as_bytes()), "{slow}");
        }
        assert!(!is_quick(&[b'x'; 2000]));
    }
}
