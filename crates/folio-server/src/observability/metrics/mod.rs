//! `/metrics`: vLLM's names, so that dashboards, autoscalers and routers work unconfigured.
//!
//! Owns: names, help texts, buckets, and what is counted when. Two sources: what the server counted with the responses it
//! sent (so sums over responses and counters are equal), and the engine's snapshot, read when somebody asks. Invariant:
//! [`documented`] lists exactly what is exported. Cost: counting is an atomic add or a short lock; rendering copies.

mod documented;
mod engine;
mod kv_events;
mod samples;

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use folio_api::hints::Notes;
use folio_engine::Micros;
use folio_engine::handle::Rejected;
use folio_engine::request::Timing;
use folio_events::KvEvents;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::{Metric, Registry};

use documented::SERVER;
pub(crate) use documented::{COUNTER, counter, gauge};
pub use documented::{Documented, documented};
use engine::EngineCollector;
pub(crate) use samples::{Labels, Samples, encode_samples};

use crate::adapters::Adapters;
use crate::engine::Engine;
use crate::observability::traces::TracedCounts;

/// vLLM's edges for the time between tokens.
const TOKEN_S: &[f64] = &[
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
];
/// vLLM's edges for the time to the first token.
const FIRST_TOKEN_S: &[f64] = &[
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0,
    80.0, 160.0, 640.0, 2560.0,
];
/// vLLM's edges for whole requests and their phases.
const REQUEST_S: &[f64] = &[
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0,
    960.0, 1920.0, 7680.0,
];
const SIZES: &[f64] =
    &[1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 2e5, 5e5, 1e6];
const COUNTS: &[f64] = &[1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0];

/// How lines begin that name adapters.
const ADAPTERS_IN_USE: &str = "vllm:lora_requests_info{";

/// For work of microseconds to milliseconds.
const SHORT_S: &[f64] =
    &[1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0];

/// Fine around what is promised.
const OVERHEAD_S: &[f64] =
    &[1e-4, 2e-4, 3e-4, 5e-4, 7.5e-4, 1e-3, 1.5e-3, 2e-3, 3e-3, 5e-3, 0.01, 0.025, 0.1, 0.5, 2.0];

/// A choice that ended.
pub struct FinishedChoice {
    pub reason: &'static str,
    pub e2e: Duration,
    pub tokens: u32,
    /// From its first token to its last.
    pub decode: Option<Duration>,
}

/// A prompt all of whose choices ended.
pub struct FinishedPrompt {
    pub prompt_tokens: usize,
    pub n: u32,
    pub max_tokens: u32,
    pub most_generated: u32,
}

pub struct Metrics {
    registry: Registry,
    prompt_tokens: Counter,
    prompt_tokens_cached: Counter,
    generation_tokens: Counter,
    finished: Family<Labels, Counter>,
    rejections: Family<Labels, Counter>,
    safety: Family<Labels, Counter>,
    ignored_fields: Counter,
    tools_left_out: Counter,
    time_to_first_token: Histogram,
    inter_token_latency: Histogram,
    time_per_output_token: Histogram,
    e2e: Histogram,
    overhead: Histogram,
    queue: Histogram,
    prefill: Histogram,
    decode: Histogram,
    inference: Histogram,
    preemptions: Histogram,
    prompt_size: Histogram,
    generation_size: Histogram,
    most_generated: Histogram,
    params_n: Histogram,
    params_max_tokens: Histogram,
    http: Family<Labels, Counter>,
    pub connections: Gauge,
    /// Set before a page is written.
    pub in_flight_bytes: Gauge,
    pub text_waiting: Gauge,
    /// How much later than it wanted the event loop came, in seconds.
    pub lag: Histogram,
    pub panics: Counter,
    /// What is said of each tenant, where that was asked for: not for strangers.
    by_tenant: Option<Registry>,
    /// Names of adapters are for operators.
    hides_adapters: bool,
    traced: Family<Labels, Counter>,
    batch_lines: Family<Labels, Counter>,
    /// Lines of batches that run.
    pub batch_running: Gauge,
    pub masks: Arc<MaskFigures>,
    pub(crate) page: PageFigures,
}

/// What showing the live page takes.
pub(crate) struct PageFigures {
    /// Pages that are open.
    pub open: Gauge,
    pub samples: Counter,
    processor_s: Counter<f64, AtomicU64>,
}

impl PageFigures {
    /// Sampling took so much of a processor.
    pub fn took(&self, time: Duration) {
        self.processor_s.inc_by(time.as_secs_f64());
    }
}

/// What following grammars takes.
pub struct MaskFigures {
    compile: Histogram,
    mask: Histogram,
    wait: Histogram,
}

impl Default for MaskFigures {
    fn default() -> Self {
        Self { compile: seconds(SHORT_S), mask: seconds(SHORT_S), wait: seconds(SHORT_S) }
    }
}

impl MaskFigures {
    pub fn compiled(&self, took: Duration) {
        self.compile.observe(took.as_secs_f64());
    }

    pub fn computed(&self, took: Duration) {
        self.mask.observe(took.as_secs_f64());
    }

    pub fn waited(&self, took: Duration) {
        self.wait.observe(took.as_secs_f64());
    }
}

fn seconds(edges: &[f64]) -> Histogram {
    Histogram::new(edges.iter().copied())
}

/// Where metrics are made: what is documented of each is told to the page.
struct Registered<'a>(&'a mut Registry);

impl Registered<'_> {
    fn plain<M: Metric + Clone + Default>(&mut self, name: &str) -> M {
        self.add(name, M::default())
    }

    fn histogram(&mut self, name: &str, edges: &[f64]) -> Histogram {
        self.add(name, seconds(edges))
    }

    fn add<M: Metric + Clone>(&mut self, name: &str, metric: M) -> M {
        let found = SERVER.iter().find(|documented| documented.name == name);
        let Documented { help, .. } = found.unwrap_or_else(|| unreachable!("{name} is not documented"));
        self.0.register(name.strip_suffix("_total").unwrap_or(name), *help, metric.clone());
        metric
    }
}

/// What a server that computes nothing counts of itself.
pub(crate) struct FrontFigures {
    registry: Registry,
    pub lag: Histogram,
    pub panics: Counter,
}

impl Default for FrontFigures {
    fn default() -> Self {
        let mut registry = Registry::default();
        let metrics = &mut Registered(&mut registry);
        let lag = metrics.histogram("folio:event_loop_lag_seconds", OVERHEAD_S);
        let panics = metrics.plain("folio:panics_total");
        Self { registry, lag, panics }
    }
}

impl FrontFigures {
    /// In Prometheus' classic text.
    pub fn render(&self) -> Result<String, fmt::Error> {
        let mut text = String::new();
        encode(&mut text, &self.registry)?;
        Ok(classic(&text))
    }
}

impl Metrics {
    /// `hides_adapters`: names of adapters are for operators. `by_tenant`: what the page says of each tenant, where that was asked for.
    pub(crate) fn new(
        engine: &Arc<dyn Engine>,
        kv_events: Option<Arc<KvEvents>>,
        (adapters, hides_adapters): (Arc<Adapters>, bool),
        model: &str,
        by_tenant: Option<Box<dyn Collector>>,
    ) -> Self {
        let registry = || Registry::with_labels([("model_name".into(), model.to_owned().into())].into_iter());
        let of_tenants = by_tenant.map(|by_tenant| {
            let mut tenants = registry();
            tenants.register_collector(by_tenant);
            tenants
        });
        let mut registry = registry();
        registry.register_collector(Box::new(EngineCollector {
            engine: engine.clone(),
            kv_events,
            adapters,
        }));
        let metrics = &mut Registered(&mut registry);
        let masks = MaskFigures {
            compile: metrics.histogram("folio:grammar_compile_seconds", SHORT_S),
            mask: metrics.histogram("folio:grammar_mask_seconds", SHORT_S),
            wait: metrics.histogram("folio:grammar_wait_seconds", SHORT_S),
        };
        let metrics = Self {
            prompt_tokens: metrics.plain("vllm:prompt_tokens_total"),
            prompt_tokens_cached: metrics.plain("vllm:prompt_tokens_cached_total"),
            generation_tokens: metrics.plain("vllm:generation_tokens_total"),
            finished: metrics.plain("vllm:request_success_total"),
            rejections: metrics.plain("vllm:admission_rejections_total"),
            safety: metrics.plain("folio:safety_verdicts_total"),
            ignored_fields: metrics.plain("folio:ignored_fields_total"),
            tools_left_out: metrics.plain("folio:tools_left_out_total"),
            time_to_first_token: metrics.histogram("vllm:time_to_first_token_seconds", FIRST_TOKEN_S),
            inter_token_latency: metrics.histogram("vllm:inter_token_latency_seconds", TOKEN_S),
            time_per_output_token: metrics.histogram("vllm:request_time_per_output_token_seconds", TOKEN_S),
            e2e: metrics.histogram("vllm:e2e_request_latency_seconds", REQUEST_S),
            overhead: metrics.histogram("folio:request_overhead_seconds", OVERHEAD_S),
            queue: metrics.histogram("vllm:request_queue_time_seconds", REQUEST_S),
            prefill: metrics.histogram("vllm:request_prefill_time_seconds", REQUEST_S),
            decode: metrics.histogram("vllm:request_decode_time_seconds", REQUEST_S),
            inference: metrics.histogram("vllm:request_inference_time_seconds", REQUEST_S),
            preemptions: metrics.histogram("vllm:request_num_preemptions", COUNTS),
            prompt_size: metrics.histogram("vllm:request_prompt_tokens", SIZES),
            generation_size: metrics.histogram("vllm:request_generation_tokens", SIZES),
            most_generated: metrics.histogram("vllm:request_max_num_generation_tokens", SIZES),
            params_n: metrics.histogram("vllm:request_params_n", COUNTS),
            params_max_tokens: metrics.histogram("vllm:request_params_max_tokens", SIZES),
            http: metrics.plain("http_requests_total"),
            connections: metrics.plain("folio:connections"),
            in_flight_bytes: metrics.plain("folio:in_flight_bytes"),
            text_waiting: metrics.plain("folio:text_waiting"),
            lag: metrics.histogram("folio:event_loop_lag_seconds", OVERHEAD_S),
            panics: metrics.plain("folio:panics_total"),
            traced: metrics.plain("folio:traced_requests_total"),
            batch_lines: metrics.plain("folio:batch_lines_total"),
            batch_running: metrics.plain("folio:batch_lines_running"),
            masks: Arc::new(masks),
            page: PageFigures {
                open: metrics.plain("folio:pages_open"),
                samples: metrics.plain("folio:page_samples_total"),
                processor_s: metrics.plain("folio:page_processor_seconds_total"),
            },
            registry,
            by_tenant: of_tenants,
            hides_adapters,
        };
        drop(metrics.traced());
        for reason in ["stop", "length", "content_filter", "abort", "error"] {
            drop(metrics.finished.get_or_create(&vec![("finished_reason", reason.to_owned())]));
        }
        for result in ["completed", "failed"] {
            drop(metrics.batch_lines.get_or_create(&vec![("result", result.to_owned())]));
        }
        // There from the start, so that an alert on them has something to look at.
        for stage in ["input", "output"] {
            let labels = [("stage", stage), ("by", "callout"), ("action", "failed")];
            let labels = labels.map(|(name, value)| (name, value.to_owned())).to_vec();
            drop(metrics.safety.get_or_create(&labels));
        }
        metrics
    }

    /// Where it is counted what became of telling of requests.
    pub(crate) fn traced(&self) -> TracedCounts {
        let of = |result: &str| self.traced.get_or_create(&vec![("result", result.to_owned())]).clone();
        TracedCounts { exported: of("exported"), dropped: of("dropped"), failed: of("failed") }
    }

    /// A prompt was computed.
    pub fn prompt(&self, tokens: u64, cached: u64) {
        self.prompt_tokens.inc_by(tokens);
        self.prompt_tokens_cached.inc_by(cached);
    }

    pub fn generated(&self, tokens: u64) {
        self.generation_tokens.inc_by(tokens);
    }

    /// A request took this much longer than it was in the engine.
    pub fn overhead(&self, time: Duration) {
        self.overhead.observe(time.as_secs_f64());
    }

    /// A request was not handled to its end.
    pub fn panicked(&self) {
        self.panics.inc();
    }

    pub fn first_token(&self, after: Duration) {
        self.time_to_first_token.observe(after.as_secs_f64());
    }

    pub fn inter_token(&self, gap: Duration) {
        self.inter_token_latency.observe(gap.as_secs_f64());
    }

    pub fn choice(&self, choice: FinishedChoice) {
        self.finished.get_or_create(&vec![("finished_reason", choice.reason.to_owned())]).inc();
        self.e2e.observe(choice.e2e.as_secs_f64());
        self.generation_size.observe(f64::from(choice.tokens));
        if let Some(decode) = choice.decode.filter(|_| choice.tokens > 1) {
            self.time_per_output_token.observe(decode.as_secs_f64() / f64::from(choice.tokens - 1));
        }
    }

    pub fn request(&self, request: FinishedPrompt) {
        self.prompt_size.observe(request.prompt_tokens as f64);
        self.params_n.observe(f64::from(request.n));
        self.params_max_tokens.observe(f64::from(request.max_tokens));
        self.most_generated.observe(f64::from(request.most_generated));
    }

    /// The engine's own times of a choice that produced something.
    pub fn timing(&self, timing: &Timing, produced: bool) {
        if !produced {
            return;
        }
        let between = |from: Micros, to: Micros| to.0.saturating_sub(from.0) as f64 / 1e6;
        self.queue.observe(between(timing.arrived, timing.scheduled));
        self.prefill.observe(between(timing.scheduled, timing.first_token));
        self.decode.observe(between(timing.first_token, timing.finished));
        self.inference.observe(between(timing.scheduled, timing.finished));
        self.preemptions.observe(f64::from(timing.preemptions));
    }

    /// A line of a batch has its result.
    pub fn batch_line(&self, completed: bool) {
        let result = if completed { "completed" } else { "failed" };
        self.batch_lines.get_or_create(&vec![("result", result.to_owned())]).inc();
    }

    /// A prompt or an answer was judged by a rule or the callout.
    pub fn safety(&self, stage: &'static str, by: &str, action: &'static str) {
        let labels = vec![("stage", stage.to_owned()), ("by", by.to_owned()), ("action", action.to_owned())];
        self.safety.get_or_create(&labels).inc();
    }

    /// What an answer's headers say was passed over.
    pub fn passed_over(&self, notes: &Notes) {
        self.ignored_fields.inc_by(notes.ignored.len() as u64);
        self.tools_left_out.inc_by(notes.left_out.len() as u64);
    }

    pub fn rejected(&self, rejected: &Rejected) {
        let reason = match rejected {
            Rejected::QueueFull { .. } => "queue_full",
            Rejected::TooLong { .. } => "too_long",
            Rejected::LargerThanCache { .. } => "larger_than_cache",
            Rejected::LargerThanQuota { .. } => "larger_than_quota",
            Rejected::TooManyChoices { .. } | Rejected::Invalid { .. } => "invalid",
            Rejected::ShuttingDown => "shutting_down",
            Rejected::Unhealthy { .. } => "unhealthy",
        };
        self.rejections.get_or_create(&vec![("reason", reason.to_owned())]).inc();
    }

    pub fn http(&self, method: &str, handler: &str, status: u16) {
        let labels = vec![
            ("method", method.to_owned()),
            ("handler", handler.to_owned()),
            ("status", status.to_string()),
        ];
        self.http.get_or_create(&labels).inc();
    }

    /// The page: OpenMetrics where the scraper accepts it, else Prometheus' classic text.
    /// `operator`: with what is said of each tenant, by its name, and of adapters that not everybody may know of.
    pub fn render(&self, openmetrics: bool, operator: bool) -> Result<(String, &'static str), fmt::Error> {
        let mut text = String::new();
        encode(&mut text, &self.registry)?;
        if self.hides_adapters && !operator {
            text = text.split_inclusive('\n').filter(|line| !line.starts_with(ADAPTERS_IN_USE)).collect();
        }
        if let Some(by_tenant) = self.by_tenant.as_ref().filter(|_| operator) {
            text.truncate(text.trim_end().strip_suffix("# EOF").map_or(text.len(), str::len));
            encode(&mut text, by_tenant)?;
        }
        if openmetrics {
            return Ok((text, "application/openmetrics-text; version=1.0.0; charset=utf-8"));
        }
        Ok((classic(&text), "text/plain; version=0.0.4; charset=utf-8"))
    }
}

/// OpenMetrics describes a counter `x` and samples `x_total`; the classic format describes `x_total` as well.
fn classic(openmetrics: &str) -> String {
    let mut out = String::with_capacity(openmetrics.len() + 512);
    let mut help: Option<&str> = None;
    for line in openmetrics.lines() {
        if line == "# EOF" {
            continue;
        }
        if line.starts_with("# HELP ") {
            help = Some(line);
            continue;
        }
        if let Some(rest) = line.strip_prefix("# TYPE ") {
            let (name, kind) = rest.split_once(' ').unwrap_or((rest, "untyped"));
            let suffix = if kind == COUNTER { "_total" } else { "" };
            if let Some((_, text)) = help.take().and_then(|help| help["# HELP ".len()..].split_once(' ')) {
                out.push_str(&format!("# HELP {name}{suffix} {text}\n"));
            }
            out.push_str(&format!("# TYPE {name}{suffix} {kind}\n"));
            continue;
        }
        out.push_str(line);
        out.push('\n');
    }
    out
}
