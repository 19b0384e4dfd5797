//! What happened: metrics, usage, the audit log, and why it took what it took.

pub(crate) mod audit;
pub(crate) mod kv_events;
pub mod metrics;
pub(crate) mod recording;
pub mod tenant_metrics;
pub(crate) mod traces;
pub(crate) mod usage;
pub mod why;

use std::sync::Arc;

use audit::Audit;
use kv_events::Published;
use metrics::Metrics;
use recording::Recorder;
use traces::Traces;
use usage::Meters;
use why::Why;

/// Where it is counted and written down what happened.
pub(crate) struct Observability {
    pub metrics: Metrics,
    pub meters: Arc<Meters>,
    pub why: Why,
    /// Where traffic is recorded, when somebody asks for it.
    pub recorder: Arc<Recorder>,
    pub audit: Option<Audit>,
    /// Where spans of requests go.
    pub traces: Option<Arc<Traces>>,
    /// What is told of the cache's content.
    pub kv_events: Option<Published>,
    /// Since when usage is counted. Unix time, seconds.
    pub started_s: u64,
}

/// A step between a request's bytes and the engine, as a span: who wants to know where the time goes can subscribe.
macro_rules! step {
    ($name:literal) => {
        tracing::trace_span!(target: "folio_server::prepare", $name).entered()
    };
}
pub(crate) use step;
