//! A span of each request, for OpenTelemetry: `--otlp-traces-endpoint`.
//!
//! Owns: what is told of a request and when. Must never: hold up a request, or tell of any text. A span is handed over at the end of its
//! request; a thread sends what came, [`BATCH`] together or after [`EVERY`], and drops what it cannot send. What waits for it is bounded,
//! and what finds no room is dropped and counted.
//!
//! Names are OpenTelemetry's for generative AI (`gen_ai.*`), those that vLLM's spans have beside them, and `folio.*` for what neither
//! knows. The request's span has a child for each phase: queue, prefill, decode; and for each preemption and load from a tier, the first
//! [`EVENTS_MAX`]. What it waited for otherwise (a mask, a shared prefix) is an attribute, summed up.

mod otlp;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use folio_engine::SamplingParams;
use folio_engine::request::{Micros, TierLoad, Timing};
use parking_lot::Mutex;
use prometheus_client::metrics::counter::Counter;
use prost::Message as _;

use otlp::{
    AnyValue, AnyValueKind, ArrayValue, ExportTraceServiceRequest, InstrumentationScope, KeyValue, Resource,
    ResourceSpans, ScopeSpans, Span, SpanKind, Status, attribute,
};

use crate::error::ServerError;
use crate::trace_context::TraceContext;

/// Requests that wait to be sent, and those sent together.
const WAITING_MAX: usize = 2048;
const BATCH: usize = 256;
/// Preemptions and loads of a request that are told with a span each.
const EVENTS_MAX: usize = 32;
/// Between the first of a batch and its sending.
const EVERY: Duration = Duration::from_secs(2);
/// For one batch.
const PATIENCE: Duration = Duration::from_secs(10);
/// For what is left when the server ends.
const CLOSING: Duration = Duration::from_secs(2);
/// Between two warnings.
const WARNED_EVERY: Duration = Duration::from_secs(60);

/// What one request asked for.
#[derive(Clone, Debug)]
pub(crate) struct Requested {
    pub context: Option<TraceContext>,
    /// OpenTelemetry's name of the operation: "chat", "text_completion", "embeddings".
    pub operation: &'static str,
    pub choices: usize,
    /// Of its first prompt.
    pub params: SamplingParams,
    pub is_streamed: bool,
}

/// Of a request, what is no phase: from when to when, engine time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TracedEvent {
    /// It had no blocks.
    Preempted(Micros, Micros),
    Loaded(TierLoad),
}

/// Those of a request, the first [`EVENTS_MAX`].
#[derive(Clone, Debug, Default)]
pub(crate) struct TracedEvents(Vec<TracedEvent>);

impl TracedEvents {
    /// Of a choice that ended. What several choices went through as one sequence is told once.
    pub fn add(&mut self, timing: &Timing) {
        let began = |pause: &(Micros, Micros)| pause.0 > Micros(0);
        let end = |back| if back > Micros(0) { back } else { timing.finished };
        let pauses = timing.pauses.into_iter().filter(began);
        let pauses = pauses.map(|(gone, back)| TracedEvent::Preempted(gone, end(back)));
        let loads = timing.loads.into_iter().filter(|load| load.to > Micros(0)).map(TracedEvent::Loaded);
        for event in pauses.chain(loads) {
            if self.0.len() < EVENTS_MAX && !self.0.contains(&event) {
                self.0.push(event);
            }
        }
    }

    pub fn has_loads(&self) -> bool {
        self.0.iter().any(|event| matches!(event, TracedEvent::Loaded(_)))
    }
}

/// What became of it; engine time.
#[derive(Clone, Debug, Default)]
pub(crate) struct TracedOutcome {
    pub id: String,
    pub tenant: Arc<str>,
    pub submitted: Micros,
    pub ended: Micros,
    /// Begin and end; of several choices from the first begin to the last end.
    pub phases: Vec<(&'static str, Micros, Micros)>,
    pub events: TracedEvents,
    /// Of tiers, by their ids; of none where there was no load.
    pub tiers: Vec<&'static str>,
    pub first_token: Option<Duration>,
    pub finish_reason: &'static str,
    pub prompt_tokens: u64,
    pub cached_tokens: u64,
    pub output_tokens: u64,
    pub preemptions: u32,
    /// By reason, microseconds.
    pub waited_us: Vec<(&'static str, u64)>,
    pub drafts: (u32, u32),
}

/// One request to be told of.
struct Traced {
    requested: Requested,
    outcome: TracedOutcome,
    /// When the engine's clock said 0, in nanoseconds of Unix time.
    zero_ns: u64,
}

/// Requests, by what became of telling of them.
#[derive(Clone, Debug, Default)]
pub(crate) struct TracedCounts {
    pub exported: Counter,
    /// There was no room.
    pub dropped: Counter,
    /// The endpoint did not take them.
    pub failed: Counter,
}

/// Where spans go.
pub(crate) struct Traces {
    sender: Mutex<Option<SyncSender<Traced>>>,
    thread: Mutex<Option<JoinHandle<()>>>,
    /// What is left is sent, and nothing is waited for any more.
    closing: Arc<AtomicBool>,
    counts: TracedCounts,
}

impl Traces {
    /// `endpoint`: an http(s) address; without a path `/v1/traces`. `model`: its served name.
    pub fn start(endpoint: &str, model: &str, counts: TracedCounts) -> Result<Self, ServerError> {
        let url = address(endpoint)?;
        let (sender, receiver) = sync_channel(WAITING_MAX);
        let closing = Arc::new(AtomicBool::new(false));
        let exporter = Exporter {
            url,
            model: model.to_owned(),
            agent: ureq::Agent::config_builder()
                .timeout_global(Some(PATIENCE))
                .http_status_as_error(true)
                .max_redirects(0)
                .build()
                .into(),
            counts: counts.clone(),
            closing: closing.clone(),
            warned: None,
        };
        let thread = std::thread::Builder::new()
            .name("traces".to_owned())
            .spawn(move || exporter.run(&receiver))
            .map_err(|error| ServerError::Config(format!("--otlp-traces-endpoint: no thread: {error}")))?;
        Ok(Self { sender: Mutex::new(Some(sender)), thread: Mutex::new(Some(thread)), closing, counts })
    }

    /// A request is over; `now`: the engine's time. One that its caller does not record is not told of.
    pub fn ended(&self, requested: Requested, outcome: TracedOutcome, now: Micros) {
        if requested.context.as_ref().is_some_and(|context| !context.is_sampled) {
            return;
        }
        let unix = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_nanos() as u64);
        let traced = Traced { requested, outcome, zero_ns: unix.saturating_sub(now.0 * 1000) };
        let sent = self.sender.lock().as_ref().is_some_and(|sender| sender.try_send(traced).is_ok());
        if !sent {
            self.counts.dropped.inc();
        }
    }

    /// Sends what is left, for [`CLOSING`] at most.
    pub fn close(&self) {
        self.closing.store(true, Ordering::Release);
        drop(self.sender.lock().take());
        let end = Instant::now() + CLOSING;
        if let Some(thread) = self.thread.lock().take() {
            while !thread.is_finished() && Instant::now() < end {
                std::thread::sleep(Duration::from_millis(5));
            }
        }
    }
}

fn address(endpoint: &str) -> Result<String, ServerError> {
    let wrong = |what: &str| Err(ServerError::Config(format!("--otlp-traces-endpoint {endpoint}: {what}")));
    let Ok(uri) = endpoint.parse::<ureq::http::Uri>() else { return wrong("is no address") };
    if !matches!(uri.scheme_str(), Some("http" | "https")) || uri.host().is_none_or(str::is_empty) {
        return wrong("give an http:// or https:// address, such as http://127.0.0.1:4318");
    }
    if uri.authority().is_some_and(|authority| authority.as_str().contains('@')) {
        return wrong("a password is not sent");
    }
    Ok(match uri.path() {
        "" | "/" => format!("{}/v1/traces", endpoint.trim_end_matches('/')),
        _ => endpoint.to_owned(),
    })
}

struct Exporter {
    url: String,
    model: String,
    agent: ureq::Agent,
    counts: TracedCounts,
    closing: Arc<AtomicBool>,
    warned: Option<Instant>,
}

impl Exporter {
    fn run(mut self, receiver: &Receiver<Traced>) {
        while let Ok(first) = receiver.recv() {
            let (mut batch, end) = (vec![first], Instant::now() + EVERY);
            while batch.len() < BATCH {
                let left = match self.closing.load(Ordering::Acquire) {
                    true => Duration::ZERO,
                    // Looks up now and then whether the server ends.
                    false => end.saturating_duration_since(Instant::now()).min(Duration::from_millis(100)),
                };
                match receiver.recv_timeout(left) {
                    Ok(traced) => batch.push(traced),
                    Err(RecvTimeoutError::Timeout) if left > Duration::ZERO && Instant::now() < end => {}
                    Err(_) => break,
                }
            }
            self.send(&batch);
        }
    }

    fn send(&mut self, batch: &[Traced]) {
        let body = request(&self.model, batch).encode_to_vec();
        let sent =
            self.agent.post(&self.url).header("content-type", "application/x-protobuf").send(&body[..]);
        let count = batch.len() as u64;
        match sent {
            Ok(_) => drop(self.counts.exported.inc_by(count)),
            Err(error) => {
                self.counts.failed.inc_by(count);
                if self.warned.is_none_or(|at| at.elapsed() >= WARNED_EVERY) {
                    self.warned = Some(Instant::now());
                    tracing::warn!(
                        "--otlp-traces-endpoint {}: {error}; {count} requests are not told of",
                        self.url
                    );
                }
            }
        }
    }
}

fn request(model: &str, batch: &[Traced]) -> ExportTraceServiceRequest {
    let attributes =
        vec![attribute("service.name", "folio"), attribute("service.version", env!("CARGO_PKG_VERSION"))];
    let scope =
        InstrumentationScope { name: "folio".to_owned(), version: env!("CARGO_PKG_VERSION").to_owned() };
    let spans = batch.iter().flat_map(|traced| traced.spans(model)).collect();
    let scope_spans = vec![ScopeSpans { scope: Some(scope), spans }];
    ExportTraceServiceRequest {
        resource_spans: vec![ResourceSpans { resource: Some(Resource { attributes }), scope_spans }],
    }
}

/// Random, and not all zeros.
fn fresh<const N: usize>() -> [u8; N] {
    let mut bytes = [0; N];
    // Where there is no randomness a span has an id that is not its own, and a request is none the worse.
    let _ = getrandom::fill(&mut bytes);
    bytes[N - 1] |= 1;
    bytes
}

impl Traced {
    /// The request's, and one for each of its phases, preemptions and loads.
    fn spans(&self, model: &str) -> Vec<Span> {
        let context = self.requested.context.as_ref();
        let (trace, id) = (context.map_or_else(fresh::<16>, |context| context.trace), fresh::<8>());
        let state = context.map_or(String::new(), |context| context.state.clone());
        let span = |name: String, kind: SpanKind, (from, to): (Micros, Micros)| Span {
            trace_id: trace.to_vec(),
            span_id: fresh::<8>().to_vec(),
            trace_state: state.clone(),
            parent_span_id: id.to_vec(),
            name,
            kind: kind as i32,
            start_time_unix_nano: self.zero_ns + from.0 * 1000,
            end_time_unix_nano: self.zero_ns + to.0.max(from.0) * 1000,
            attributes: Vec::new(),
            status: None,
            flags: 1,
        };
        let outcome = &self.outcome;
        let name = format!("{} {model}", self.requested.operation);
        let is_error = matches!(outcome.finish_reason, "error" | "deadline");
        let whole = Span {
            span_id: id.to_vec(),
            parent_span_id: context.map_or(Vec::new(), |context| context.parent.to_vec()),
            attributes: self.attributes(model),
            status: is_error.then(|| Status { message: outcome.finish_reason.to_owned(), code: 2 }),
            ..span(name, SpanKind::Server, (outcome.submitted, outcome.ended))
        };
        let phases = outcome.phases.iter();
        let phases =
            phases.map(|(name, from, to)| span((*name).to_owned(), SpanKind::Internal, (*from, *to)));
        let events = outcome.events.0.iter().map(|event| match event {
            TracedEvent::Preempted(from, to) => {
                span("preempted".to_owned(), SpanKind::Internal, (*from, *to))
            }
            TracedEvent::Loaded(load) => {
                let tier = outcome.tiers.get(usize::from(load.tier.0)).copied().unwrap_or_default();
                let verified = attribute("folio.verified", AnyValueKind::Flag(load.verified));
                Span {
                    attributes: vec![attribute("folio.tier", tier), verified],
                    ..span("tier_load".to_owned(), SpanKind::Internal, (load.from, load.to))
                }
            }
        });
        [whole].into_iter().chain(phases).chain(events).collect()
    }

    fn attributes(&self, model: &str) -> Vec<KeyValue> {
        let (requested, outcome) = (&self.requested, &self.outcome);
        let params = &requested.params;
        let s = |us: u64| us as f64 / 1e6;
        let reasons = ArrayValue { values: vec![AnyValue { value: Some(outcome.finish_reason.into()) }] };
        let mut all = vec![
            attribute("gen_ai.operation.name", requested.operation),
            attribute("gen_ai.provider.name", "folio"),
            attribute("gen_ai.request.model", model),
            attribute("gen_ai.response.model", model),
            attribute("gen_ai.response.id", &*outcome.id),
            attribute("gen_ai.request.id", &*outcome.id),
            attribute("gen_ai.response.finish_reasons", AnyValueKind::List(reasons)),
            attribute("gen_ai.request.max_tokens", u64::from(params.max_tokens)),
            attribute("gen_ai.request.temperature", f64::from(params.temperature)),
            attribute("gen_ai.request.top_p", f64::from(params.top_p)),
            attribute("gen_ai.request.top_k", u64::from(params.top_k)),
            attribute("gen_ai.request.frequency_penalty", f64::from(params.frequency_penalty)),
            attribute("gen_ai.request.presence_penalty", f64::from(params.presence_penalty)),
            attribute("gen_ai.request.choice.count", requested.choices as u64),
            attribute("gen_ai.request.n", requested.choices as u64),
            attribute("gen_ai.request.stream", AnyValueKind::Flag(requested.is_streamed)),
            attribute("gen_ai.usage.input_tokens", outcome.prompt_tokens),
            attribute("gen_ai.usage.output_tokens", outcome.output_tokens),
            attribute("gen_ai.usage.cache_read.input_tokens", outcome.cached_tokens),
            // As vLLM's spans have them.
            attribute("gen_ai.usage.prompt_tokens", outcome.prompt_tokens),
            attribute("gen_ai.usage.completion_tokens", outcome.output_tokens),
            attribute("gen_ai.usage.cached_tokens", outcome.cached_tokens),
            attribute("gen_ai.latency.e2e", s(outcome.ended.0.saturating_sub(outcome.submitted.0))),
            attribute("folio.tenant", &*outcome.tenant),
            attribute("folio.preemptions", u64::from(outcome.preemptions)),
        ];
        if let Some(after) = outcome.first_token {
            all.push(attribute("gen_ai.response.time_to_first_chunk", after.as_secs_f64()));
            all.push(attribute("gen_ai.latency.time_to_first_token", after.as_secs_f64()));
        }
        for (name, from, to) in &outcome.phases {
            let vllm = match *name {
                "queue" => "gen_ai.latency.time_in_queue",
                "prefill" => "gen_ai.latency.time_in_model_prefill",
                _ => "gen_ai.latency.time_in_model_decode",
            };
            all.push(attribute(vllm, s(to.0.saturating_sub(from.0))));
        }
        for (reason, us) in &outcome.waited_us {
            all.push(attribute(&format!("folio.waited.{reason}"), s(*us)));
        }
        if outcome.drafts.0 > 0 {
            all.push(attribute("folio.draft_tokens", u64::from(outcome.drafts.0)));
            all.push(attribute("folio.accepted_draft_tokens", u64::from(outcome.drafts.1)));
        }
        if matches!(outcome.finish_reason, "error" | "deadline") {
            all.push(attribute("error.type", outcome.finish_reason));
        }
        all
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};
    use std::net::TcpListener;

    use folio_kv::TierId;

    use super::*;

    /// Answers one request with this status, and gives its head and body.
    fn receiver(status: &'static str) -> (String, JoinHandle<(String, Vec<u8>)>) {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("an address");
        let thread = std::thread::spawn(move || {
            let (mut socket, _) = listener.accept().expect("a connection");
            let (mut bytes, mut buffer) = (Vec::new(), [0; 4096]);
            let (head, length) = loop {
                let count = socket.read(&mut buffer).expect("a request");
                bytes.extend_from_slice(&buffer[..count]);
                if let Some(end) = bytes.windows(4).position(|four| four == b"\r\n\r\n") {
                    let head = String::from_utf8_lossy(&bytes[..end]).to_lowercase();
                    let length = head.split("content-length: ").nth(1).expect("a length");
                    break (
                        head.clone(),
                        end + 4 + length.lines().next().unwrap_or("").parse::<usize>().expect("it"),
                    );
                }
            };
            while bytes.len() < length {
                let count = socket.read(&mut buffer).expect("a body");
                bytes.extend_from_slice(&buffer[..count]);
            }
            let answer = format!("HTTP/1.1 {status}\r\ncontent-length: 0\r\nconnection: close\r\n\r\n");
            socket.write_all(answer.as_bytes()).expect("an answer");
            let body = bytes.split_off(head.len() + 4);
            (head, body)
        });
        (format!("http://{address}"), thread)
    }

    fn requested(context: Option<TraceContext>) -> Requested {
        let params = SamplingParams::greedy(7);
        Requested { context, operation: "chat", choices: 2, params, is_streamed: true }
    }

    /// A preemption, one that lasted to the end, and a load, of two choices that were one sequence.
    fn events() -> TracedEvents {
        let mut timing = Timing { finished: Micros(9000), ..Timing::default() };
        timing.pauses[..2].copy_from_slice(&[(Micros(6000), Micros(7000)), (Micros(8000), Micros(0))]);
        timing.loads[0] = TierLoad { tier: TierId(1), from: Micros(1500), to: Micros(2500), verified: true };
        let mut events = TracedEvents::default();
        events.add(&timing);
        events.add(&timing);
        events
    }

    fn outcome() -> TracedOutcome {
        TracedOutcome {
            id: "req-1".to_owned(),
            tenant: "someone".into(),
            submitted: Micros(1000),
            ended: Micros(9000),
            phases: vec![
                ("queue", Micros(1000), Micros(2000)),
                ("prefill", Micros(2000), Micros(5000)),
                ("decode", Micros(5000), Micros(9000)),
            ],
            finish_reason: "length",
            prompt_tokens: 40,
            cached_tokens: 32,
            output_tokens: 7,
            waited_us: vec![("tier_load", 500)],
            events: events(),
            tiers: vec!["host", "disk"],
            ..TracedOutcome::default()
        }
    }

    fn text_of<'a>(span: &'a Span, key: &str) -> Option<&'a AnyValueKind> {
        span.attributes.iter().find(|one| one.key == key)?.value.as_ref()?.value.as_ref()
    }

    #[test]
    fn a_request_is_a_span_with_a_child_for_each_phase() {
        let (endpoint, thread) = receiver("200 OK");
        let counts = TracedCounts::default();
        let traces = Traces::start(&endpoint, "a-model", counts.clone()).expect("a thread");
        let context =
            TraceContext { trace: [7; 16], parent: [9; 8], is_sampled: true, state: "a=1".to_owned() };
        traces.ended(requested(Some(context.clone())), outcome(), Micros(9000));
        // Its caller does not record it.
        traces.ended(requested(Some(TraceContext { is_sampled: false, ..context })), outcome(), Micros(9000));
        traces.close();
        let (head, body) = thread.join().expect("a request");
        assert!(
            head.starts_with("post /v1/traces ") && head.contains("content-type: application/x-protobuf"),
            "{head}"
        );
        let sent = ExportTraceServiceRequest::decode(&body[..]).expect("protobuf");
        let spans = &sent.resource_spans[0].scope_spans[0].spans;
        let names: Vec<&str> = spans.iter().map(|span| &*span.name).collect();
        assert_eq!(
            names,
            ["chat a-model", "queue", "prefill", "decode", "preempted", "preempted", "tier_load"]
        );
        let whole = &spans[0];
        assert!(whole.trace_id == [7; 16] && whole.parent_span_id == [9; 8] && whole.trace_state == "a=1");
        assert_eq!(whole.kind, SpanKind::Server as i32);
        for child in &spans[1..] {
            assert!(child.trace_id == whole.trace_id && child.parent_span_id == whole.span_id, "{child:?}");
            assert!(child.start_time_unix_nano >= whole.start_time_unix_nano, "{child:?}");
            assert!(child.end_time_unix_nano <= whole.end_time_unix_nano, "{child:?}");
        }
        assert_eq!(whole.end_time_unix_nano - whole.start_time_unix_nano, 8_000_000);
        let times = |at: usize| {
            let since = |time: u64| (time - whole.start_time_unix_nano) / 1_000_000;
            (since(spans[at].start_time_unix_nano), since(spans[at].end_time_unix_nano))
        };
        assert_eq!([times(4), times(5)], [(5, 6), (7, 8)]);
        assert_eq!(spans[6].end_time_unix_nano - spans[6].start_time_unix_nano, 1_000_000);
        assert_eq!(text_of(&spans[6], "folio.tier"), Some(&AnyValueKind::Text("disk".to_owned())));
        assert_eq!(text_of(&spans[6], "folio.verified"), Some(&AnyValueKind::Flag(true)));
        assert_eq!(text_of(whole, "gen_ai.usage.cache_read.input_tokens"), Some(&AnyValueKind::Int(32)));
        assert_eq!(text_of(whole, "gen_ai.request.max_tokens"), Some(&AnyValueKind::Int(7)));
        assert_eq!(text_of(whole, "gen_ai.latency.time_in_queue"), Some(&AnyValueKind::Double(0.001)));
        assert_eq!(text_of(whole, "folio.waited.tier_load"), Some(&AnyValueKind::Double(0.0005)));
        assert_eq!(text_of(whole, "folio.tenant"), Some(&AnyValueKind::Text("someone".to_owned())));
        assert!(whole.status.is_none());
        assert_eq!((counts.exported.get(), counts.dropped.get(), counts.failed.get()), (1, 0, 0));
    }

    #[test]
    fn events_of_a_request_have_a_limit() {
        let mut events = TracedEvents::default();
        for at in 0..100 {
            let mut timing = Timing::default();
            timing.pauses[0] = (Micros(at + 1), Micros(at + 2));
            events.add(&timing);
        }
        assert_eq!(events.0.len(), EVENTS_MAX);
    }

    #[test]
    fn an_error_is_one_and_without_a_caller_a_trace_begins() {
        let zero_ns = 5;
        let failed = TracedOutcome {
            finish_reason: "error",
            phases: Vec::new(),
            events: TracedEvents::default(),
            ..outcome()
        };
        let traced = Traced { requested: requested(None), outcome: failed, zero_ns };
        let (one, other) = (traced.spans("m"), traced.spans("m"));
        assert_eq!(one.len(), 1);
        assert_eq!(one[0].status.as_ref().map(|status| status.code), Some(2));
        assert!(one[0].parent_span_id.is_empty() && one[0].trace_id != other[0].trace_id);
        assert_eq!(text_of(&one[0], "error.type"), Some(&AnyValueKind::Text("error".to_owned())));
    }

    #[test]
    fn what_is_not_taken_is_counted_and_the_server_goes_on() {
        let (endpoint, thread) = receiver("503 Service Unavailable");
        let counts = TracedCounts::default();
        let traces = Traces::start(&endpoint, "m", counts.clone()).expect("a thread");
        traces.ended(requested(None), outcome(), Micros(9000));
        traces.close();
        thread.join().expect("a request");
        assert_eq!((counts.exported.get(), counts.failed.get()), (0, 1));
        // Closed: there is nobody to take it.
        traces.ended(requested(None), outcome(), Micros(9000));
        assert_eq!(counts.dropped.get(), 1);
    }

    #[test]
    fn an_endpoint_is_an_address_and_nothing_else() {
        for (good, url) in [
            ("http://127.0.0.1:4318", "http://127.0.0.1:4318/v1/traces"),
            ("http://collector:4318/", "http://collector:4318/v1/traces"),
            ("https://host/own/path", "https://host/own/path"),
        ] {
            assert_eq!(address(good).expect("an address"), url);
        }
        for bad in ["", "collector", "collector:4317", "grpc://h:4317", "http://", "http://a:b@h"] {
            let error = address(bad).expect_err(bad).to_string();
            assert!(error.contains("--otlp-traces-endpoint"), "{bad}: {error}");
        }
    }
}
