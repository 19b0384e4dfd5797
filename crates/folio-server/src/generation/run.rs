//! From a prepared job to a running one: holds it against limits, submits it, and answers with what the driver writes.
//!
//! One task per HTTP request follows the events (`driver`), whatever the client does. The handler, or the event stream's body, only reads
//! what that task wrote; dropping it cancels. Invariant: all prompts of a job go to the engine, or none does.

use std::sync::Arc;
use std::time::Instant;

use axum::body::Body;
use axum::http::Response;
use folio_api::ApiError;
use folio_engine::handle::Rejected;
use folio_engine::{CancelFlag, Event, EventSink, Request, RequestAdapter, SamplingParams};
use folio_kv::BlockHashes;
use tokio::sync::{mpsc, oneshot};

use crate::arrival::Flight;
use crate::decoding::reading::Reading;
use crate::engine::{self, Served};
use crate::generation::Generator;
use crate::generation::driver::{Delivered, Output, ResponseDriver, Whole};
use crate::generation::job::{Job, PromptJob};
use crate::http::caught;
use crate::http::reply::{json_counted, tell};
use crate::http::stream::{self, Abort, Events};
use crate::observability::traces::Requested;
use crate::observability::why::{RequestKind, SubmittedRequest};
use crate::tenancy::gate::{AdmittedRequest, Need, Permit, TOKENS_EXPECTED};
use crate::tenancy::tenant::Tenant;
use crate::tenancy::unread::Unread;

impl Generator {
    /// Runs the job and answers.
    pub async fn run(
        self: &Arc<Self>,
        tenant: &Tenant,
        job: Job,
        flight: Flight,
    ) -> Result<Response<Body>, ApiError> {
        let notes = job.notes.clone();
        let mut response = if job.generation.stream.is_some() {
            let form = (job.writer.framing(), job.writer.keep_alive());
            let (abort, events) = self.start_streaming(tenant, job, flight).await?;
            stream::response(events, abort.guard(), self.load.limits.keep_alive, form)
        } else {
            let whole = self.start(tenant, job, flight).await?.answer().await?;
            json_counted(whole)
        };
        tell(&notes, response.headers_mut());
        Ok(response)
    }

    /// Runs the job whether anybody waits or not.
    pub async fn start(
        self: &Arc<Self>,
        tenant: &Tenant,
        job: Job,
        flight: Flight,
    ) -> Result<Started, ApiError> {
        let (sender, answer) = oneshot::channel();
        let unread = self.load.unread.answer(&tenant.gate);
        let abort = self.spawn(tenant, job, flight, (unread, Output::Whole(Some(sender)))).await?;
        Ok(Started { abort, answer })
    }

    /// Runs a job that is streamed whether anybody reads or not: how to cancel it, and its events.
    pub async fn start_streaming(
        self: &Arc<Self>,
        tenant: &Tenant,
        job: Job,
        flight: Flight,
    ) -> Result<(Abort, stream::FrameReader), ApiError> {
        let unread = self.load.unread.answer(&tenant.gate);
        let (events, reader) = Events::new(unread.clone(), job.writer.framing());
        let abort = self.spawn(tenant, job, flight, (unread, Output::Stream(events))).await?;
        Ok((abort, reader))
    }

    async fn spawn(
        self: &Arc<Self>,
        tenant: &Tenant,
        job: Job,
        flight: Flight,
        (unread, output): (Arc<Unread>, Output),
    ) -> Result<Abort, ApiError> {
        if self.served.model.only_embeds && job.pooling.is_none() {
            let message =
                "This model was published for embeddings and has no output matrix; use /v1/embeddings.";
            return Err(ApiError { code: Some("only_embeddings"), ..ApiError::bad_request(message) });
        }
        // Bounded by bytes: `unread` counts what is in it.
        let (events, receiver) = mpsc::unbounded_channel();
        let mut job = job;
        let prompts = job.prompts.iter().map(|prompt| size_of_val(&*prompt.tokens)).sum();
        let mut held = self.load.unread.hold(&tenant.gate);
        held.grow(prompts).inspect_err(|_| flight.entry.give_back())?;
        let ticket = admit(tenant, &mut job, &flight.entry)?;
        let submitted = self.served.engine.now();
        let at_once = if self.is_only_gathered(&job, &output) { TOKENS_GATHERED } else { 1 };
        let sink = PromptSink { prompt: 0, events, unread: unread.clone(), at_once, waiting: Vec::new() };
        let adapter = self.served.adapter(job.generation.adapter.as_deref(), &tenant.adapters);
        let adapter = adapter.inspect_err(|_| flight.entry.give_back())?;
        let requests = self.requests(tenant, &job, adapter.as_ref());
        let (abort, hashes) = match submit(&self.served, tenant, requests, (job.prompts.len(), sink)).await {
            Ok(submitted) => submitted,
            Err(rejected) => {
                ticket.refused();
                self.observability.metrics.rejected(&rejected);
                return Err(refusal(rejected));
            }
        };
        self.observability.metrics.passed_over(&job.notes);
        let meter = self.observability.meters.of(tenant);
        job.prompts.iter().for_each(|_| meter.request());
        let requested = self.observability.traces.as_ref().map(|_| Box::new(requested(&job, &flight)));
        let begun = SubmittedRequest {
            id: &flight.request,
            asked: job.asked,
            hashes,
            max_tokens: job.prompts.iter().map(|prompt| prompt.params.max_tokens).collect(),
            answers: job.generation.n,
            is_drafted: job.prompts.iter().any(|prompt| prompt.speculation.is_some()),
            submitted,
            requested,
        };
        let record = self.observability.why.begin(tenant, begun);
        let driver = ResponseDriver::new(
            self.clone(),
            tenant.clone(),
            (ticket, submitted, record),
            job,
            abort.clone(),
            (unread, output),
        );
        let (shared, running) = (self.observability.clone(), abort.clone());
        tokio::spawn(async move {
            if caught(driver.follow(receiver, flight)).await.is_none() {
                shared.metrics.panicked();
                running.cancel();
            }
            drop(held);
        });
        Ok(abort)
    }

    /// Whether nobody sees the answer before its end, and no token of it can bring that end about: then the driver need not look at each one
    /// when it comes.
    fn is_only_gathered(&self, job: &Job, output: &Output) -> bool {
        let safety = &self.inputs.safety;
        matches!(output, Output::Whole(_))
            && job.generation.stop.is_empty()
            && !job.reading.as_ref().is_some_and(Reading::ends_early)
            && safety.output().is_none()
            && safety.judge().is_none()
    }

    /// The engine's requests, each with the place of its prompt, without those that may not go there.
    fn requests(
        &self,
        tenant: &Tenant,
        job: &Job,
        adapter: Option<&RequestAdapter>,
    ) -> Vec<(usize, Request)> {
        let own = self.tenancy.root(tenant, adapter);
        let deadline = self.served.deadline(self.load.limits.request_timeout);
        let request = |prompt: &PromptJob| Request {
            n: job.generation.n,
            class: tenant.class.saturating_add(job.generation.behind),
            priority: job.generation.priority,
            deadline,
            prompt_logprobs: job.generation.prompt_logprobs,
            retention: prompt.retention.clone(),
            pooling: job.pooling,
            adapter: adapter.cloned(),
            speculation: prompt.speculation.clone(),
            ..Request::new(
                self.served.engine.next_request_id(),
                tenant.id,
                match job.reads_shared(prompt) && adapter.is_none() {
                    true => self.tenancy.shared.root(own, &prompt.tokens),
                    false => own,
                },
                prompt.tokens.clone(),
                prompt.params.clone(),
            )
        };
        let allowed = job.prompts.iter().enumerate().filter(|(_, prompt)| !prompt.screened.denied);
        allowed.map(|(place, prompt)| (place, request(prompt))).collect()
    }
}

/// All of them go to the engine, or none does. Nothing is hashed of what is refused. `prompts`: of the job. With what identifies the blocks of
/// each.
async fn submit(
    served: &Served,
    tenant: &Tenant,
    requests: Vec<(usize, Request)>,
    (prompts, sink): (usize, PromptSink),
) -> Result<(Abort, Vec<(usize, BlockHashes)>), Rejected> {
    let engine = &served.engine;
    let (places, requests): (Vec<_>, Vec<_>) = requests.into_iter().unzip();
    requests.iter().try_for_each(|request| engine.check(request))?;
    let asked = requests.iter().map(|request| (request.root, request.prompt.clone())).collect();
    let hashes = engine::hashes(served, tenant.id, asked).await;
    let mut flags = vec![CancelFlag::default(); prompts];
    let submitted: Vec<_> = places.iter().copied().zip(hashes.iter().cloned()).collect();
    for ((prompt, request), hashes) in places.into_iter().zip(requests).zip(hashes) {
        let sink = PromptSink { prompt, ..sink.clone() };
        match engine.submit(request, hashes, Box::new(sink)) {
            Ok(flag) => flags[prompt] = flag,
            Err(rejected) => {
                Abort::new(flags).cancel();
                return Err(rejected);
            }
        }
    }
    Ok((Abort::new(flags), submitted))
}

/// A job that runs, and whose answer is wanted whole.
pub(crate) struct Started {
    pub abort: Abort,
    pub answer: oneshot::Receiver<Result<Whole, ApiError>>,
}

impl Started {
    /// Waits for the answer. Dropped before that, it cancels the job.
    pub async fn answer(self) -> Result<Whole, ApiError> {
        let guard = self.abort.guard();
        let answer = self.answer.await.unwrap_or_else(|_| Err(ApiError::internal("the request was lost")));
        drop(guard);
        answer
    }
}

/// Holds the job against what its tenant may have.
fn requested(job: &Job, flight: &Flight) -> Requested {
    Requested {
        context: flight.entry.trace.get().map(|trace| (**trace).clone()),
        operation: match (job.pooling, job.asked) {
            (Some(_), _) => "embeddings",
            (None, RequestKind::Chat) => "chat",
            (None, RequestKind::Completion) => "text_completion",
        },
        choices: job.generation.n as usize,
        params: job.prompts.first().map_or_else(|| SamplingParams::greedy(0), |prompt| prompt.params.clone()),
        is_streamed: job.generation.stream.is_some(),
    }
}

fn admit(tenant: &Tenant, job: &mut Job, entry: &Arc<AdmittedRequest>) -> Result<Permit, ApiError> {
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

/// Tokens of an answer that nobody sees before its end, after which the driver is woken.
const TOKENS_GATHERED: usize = 16;

/// The way of one prompt's events to the driver. Invariants: they arrive in order; only tokens wait, and none behind another event, the
/// engine's last for a choice among them, or behind what makes the request be over.
#[derive(Clone)]
struct PromptSink {
    prompt: usize,
    events: mpsc::UnboundedSender<Delivered>,
    unread: Arc<Unread>,
    /// Tokens that are sent together.
    at_once: usize,
    waiting: Vec<Delivered>,
}

impl EventSink for PromptSink {
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
