//! From a prepared job to a running one: holds it against limits, submits it, and answers with what the driver writes.
//!
//! One task per HTTP request follows the events (`driver`), whatever the client does. The handler, or the event stream's body, only reads
//! what that task wrote; dropping it cancels. Invariant: all prompts of a job go to the engine, or none does.

use std::sync::Arc;
use std::time::Instant;

use axum::body::{Body, Bytes};
use axum::http::Response;
use folio_api::ApiError;
use folio_engine::handle::Rejected;
use folio_engine::{CancelFlag, Event, EventSink, Micros, Request};
use folio_kv::{BlockHashes, Root};
use tokio::sync::{mpsc, oneshot};

use crate::app::{Flight, State};
use crate::decoding::reading::Reading;
use crate::generation::driver::{Delivered, Output, ResponseDriver};
use crate::generation::job::Job;
use crate::http::caught;
use crate::http::reply::{json_bytes, tell};
use crate::http::stream::{self, Abort, Events};
use crate::tenancy::gate::{Entry, Need, TOKENS_EXPECTED, Ticket};
use crate::tenancy::tenants::Tenant;
use crate::tenancy::unread::Unread;

/// Runs the job and answers.
pub(crate) async fn run(
    state: &Arc<State>,
    tenant: &Tenant,
    job: Job,
    flight: Flight,
) -> Result<Response<Body>, ApiError> {
    let notes = job.notes.clone();
    let mut response = answer(state, tenant, job, flight).await?;
    tell(&notes, response.headers_mut());
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
        let idle = job.writer.keep_alive();
        let abort = spawn(state, tenant, job, flight, (unread, Output::Stream(events))).await?;
        return Ok(stream::response(body, abort.guard(), state.config.limits.keep_alive, idle));
    }
    let unread = Unread::new(state.unread.clone(), tenant.gate.clone());
    let (abort, answer) = start_counted(state, tenant, job, flight, unread.clone()).await?;
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
type Pending = oneshot::Receiver<Result<String, ApiError>>;

/// Runs the job whether anybody waits or not: how to cancel it, and where its answer comes.
pub(crate) async fn start(
    state: &Arc<State>,
    tenant: &Tenant,
    job: Job,
    flight: Flight,
) -> Result<(Abort, Pending), ApiError> {
    let unread = Unread::new(state.unread.clone(), tenant.gate.clone());
    start_counted(state, tenant, job, flight, unread).await
}

/// Runs a job that is streamed whether anybody reads or not: how to cancel it, and its events.
pub(crate) async fn start_streaming(
    state: &Arc<State>,
    tenant: &Tenant,
    job: Job,
    flight: Flight,
) -> Result<(Abort, stream::Reader), ApiError> {
    let unread = Unread::new(state.unread.clone(), tenant.gate.clone());
    let (events, reader) = Events::new(unread.clone());
    let abort = spawn(state, tenant, job, flight, (unread, Output::Stream(events))).await?;
    Ok((abort, reader))
}

async fn start_counted(
    state: &Arc<State>,
    tenant: &Tenant,
    job: Job,
    flight: Flight,
    unread: Arc<Unread>,
) -> Result<(Abort, Pending), ApiError> {
    let (sender, answer) = oneshot::channel();
    Ok((spawn(state, tenant, job, flight, (unread, Output::Whole(Some(sender)))).await?, answer))
}

async fn spawn(
    state: &Arc<State>,
    tenant: &Tenant,
    job: Job,
    flight: Flight,
    (unread, output): (Arc<Unread>, Output),
) -> Result<Abort, ApiError> {
    if state.app.model.only_embeds && job.pooling.is_none() {
        let message = "This model was published for embeddings and has no output matrix; use /v1/embeddings.";
        return Err(ApiError { code: Some("only_embeddings"), ..ApiError::bad_request(message) });
    }
    let hashes = hashes(state, tenant, &job).await?;
    // Bounded by bytes: `unread` counts what is in it.
    let (events, receiver) = mpsc::unbounded_channel();
    let mut job = job;
    let prompts = job.prompts.iter().map(|prompt| size_of_val(&*prompt.tokens)).sum();
    let mut held = state.unread.hold(&tenant.gate);
    held.grow(prompts).inspect_err(|_| flight.entry.give_back())?;
    let ticket = admit(tenant, &mut job, &flight.entry)?;
    let submitted = state.app.engine.now();
    let at_once = if is_only_gathered(state, &job, &output) { TOKENS_GATHERED } else { 1 };
    let sink = Sink { prompt: 0, events, unread: unread.clone(), at_once, waiting: Vec::new() };
    let abort = match submit(state, tenant, &job, hashes, &sink) {
        Ok(abort) => abort,
        Err(refused) => {
            ticket.refused();
            return Err(refused);
        }
    };
    state.metrics.passed_over(&job.notes);
    let meter = state.meters.of(tenant);
    job.prompts.iter().for_each(|_| meter.request());
    let driver = ResponseDriver::new(
        state.clone(),
        tenant.clone(),
        (ticket, submitted),
        job,
        abort.clone(),
        (unread, output),
    );
    let (shared, running) = (state.clone(), abort.clone());
    tokio::spawn(async move {
        if caught(driver.follow(receiver, flight)).await.is_none() {
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
            let fits = room > 0 || (job.pooling.is_some() && tokens as u32 == context);
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

/// Whether nobody sees the answer before its end, and no token of it can bring that end about: then the driver need not look at each one
/// when it comes.
fn is_only_gathered(state: &State, job: &Job, output: &Output) -> bool {
    let safety = &state.config.safety;
    matches!(output, Output::Whole(_))
        && job.generation.stop.is_empty()
        && !job.reading.as_ref().is_some_and(Reading::ends_early)
        && safety.output().is_none()
        && safety.judge().is_none()
}

/// Tokens of an answer that nobody sees before its end, after which the driver is woken.
const TOKENS_GATHERED: usize = 16;

/// The way of one prompt's events to the driver. Invariants: they arrive in order; only tokens wait, and none behind another event, the
/// engine's last for a choice among them, or behind what makes the request be over.
#[derive(Clone)]
struct Sink {
    prompt: usize,
    events: mpsc::UnboundedSender<Delivered>,
    unread: Arc<Unread>,
    /// Tokens that are sent together.
    at_once: usize,
    waiting: Vec<Delivered>,
}

impl EventSink for Sink {
    fn deliver(&mut self, event: Event) -> bool {
        if self.unread.is_over() {
            return false;
        }
        // The event that is too much is the last that is sent: it tells the driver.
        let room = self.unread.delivered(&event);
        let may_wait = room && matches!(event, Event::Token { .. });
        self.waiting.push(Delivered { prompt: self.prompt, event, at: Instant::now() });
        if may_wait && self.waiting.len() < self.at_once {
            return !self.events.is_closed();
        }
        self.waiting.drain(..).all(|delivered| self.events.send(delivered).is_ok()) && room
    }
}

/// Root and blocks of each prompt that goes to the engine, hashed on a thread that may wait for a tier.
fn hashes(
    state: &Arc<State>,
    tenant: &Tenant,
    job: &Job,
) -> impl Future<Output = Result<Vec<(Root, BlockHashes)>, ApiError>> + Send + use<> {
    let prompts = job.prompts.iter().filter(|prompt| !prompt.screened.denied);
    let prompts: Vec<_> = prompts.map(|prompt| (prompt.tokens.clone(), job.reads_shared(prompt))).collect();
    let (state, own) = (state.clone(), state.root(tenant));
    let hash_all = move || {
        let hash = |(tokens, reads_shared): &(Arc<[u32]>, bool)| {
            let shared = state.shared().filter(|_| *reads_shared);
            let root = shared.map_or(own, |shared| shared.root(own, tokens));
            (root, state.app.engine.hashes(&root, tokens))
        };
        prompts.iter().map(hash).collect()
    };
    async move {
        let hashed = tokio::task::spawn_blocking(hash_all).await;
        hashed.map_err(|_| ApiError::internal("hashing the prompt failed"))
    }
}

/// All prompts of the job go to the engine, or none does. `hashes`: of those that do.
fn submit(
    state: &State,
    tenant: &Tenant,
    job: &Job,
    hashes: Vec<(Root, BlockHashes)>,
    sink: &Sink,
) -> Result<Abort, ApiError> {
    let engine = &state.app.engine;
    let mut hashes = hashes.into_iter();
    let timeout = state.config.limits.request_timeout;
    let deadline = timeout.map(|limit| Micros(engine.now().0.saturating_add(limit.as_micros() as u64)));
    let mut flags = Vec::with_capacity(job.prompts.len());
    for (index, prompt) in job.prompts.iter().enumerate() {
        if prompt.screened.denied {
            flags.push(CancelFlag::default());
            continue;
        }
        let (root, hashes) = hashes.next().expect("one of each prompt that is not denied");
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
            pooling: job.pooling,
            adapter: None,
            speculation: prompt.speculation.clone(),
        };
        let sink = Sink { prompt: index, ..sink.clone() };
        match engine.submit(request, hashes, Box::new(sink)) {
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
        Rejected::LargerThanQuota { .. } => {
            ApiError { code: Some("quota_exceeded"), ..ApiError::new(413, "invalid_request_error", message) }
        }
        Rejected::TooManyChoices { .. } => ApiError::invalid("n", message),
        Rejected::Invalid { field, .. } => ApiError::invalid(field, message),
        Rejected::ShuttingDown => ApiError::unavailable(message, 5),
        Rejected::Unhealthy { .. } => ApiError::unavailable(message, 30),
    }
}
