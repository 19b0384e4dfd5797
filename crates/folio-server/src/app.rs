//! What a running server is made of, and the state its handlers share.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

use folio_engine::handle::{Health, Rejected};
use folio_engine::{
    CacheCommand, CacheReply, CancelFlag, EngineHandle, EngineStats, EventSink, Micros, Pooling, Request,
    RequestId,
};
use folio_kv::{Holdings, Identity, Root, TenantId};
use folio_text::{ChatTemplate, Tokenizer};
use tokio::sync::Notify;

use crate::api::error::{ApiError, ServerError};
use crate::api::params::SamplingDefaults;
use crate::api::responses::store::Store;
use crate::api::structured::Structures;
use crate::batch::Batches;
use crate::config::ServerConfig;
use crate::generation::reading::{Parsers, Readers};
use crate::generation::shared_prefixes::SharedPrefixes;
use crate::generation::tokenizing::{KEPT_BYTES_MAX, KeptTokens};
use crate::observability::audit::Audit;
use crate::observability::metrics::Metrics;
use crate::observability::tenant_metrics::TenantCollector;
use crate::observability::usage::Meters;
use crate::tenancy::cache_keys::CacheKeys;
use crate::tenancy::fair_queue::FairQueue;
use crate::tenancy::gate::Entry;
use crate::tenancy::tenants::{Tenant, Tenants};
use crate::tenancy::unread::Budget;

/// The engine as the server sees it: every method returns at once. [`EngineHandle`] is the engine; tests have others.
pub trait Engine: Send + Sync + 'static {
    fn next_request_id(&self) -> RequestId;
    fn submit(&self, request: Request, sink: Box<dyn EventSink>) -> Result<CancelFlag, Rejected>;
    /// Asks something of the cache; the answer goes to `reply`, which is dropped if there will be none.
    fn command(&self, command: CacheCommand, reply: CacheReply) -> Result<(), Rejected>;
    fn stats(&self) -> Arc<EngineStats>;
    /// Memory that a tenant holds and has held since the start.
    fn holdings(&self, tenant: TenantId) -> Holdings;
    /// Forgets what tenants held that are no more.
    fn retain_tenants(&self, stays: &dyn Fn(TenantId) -> bool);
    fn health(&self, stall_us: u64) -> Health;
    fn now(&self) -> Micros;
    /// Most choices of one request.
    fn choices_max(&self) -> u32;
    fn drain(&self);
    fn stop(&self);
}

impl Engine for EngineHandle {
    fn next_request_id(&self) -> RequestId {
        self.next_request_id()
    }
    fn submit(&self, request: Request, sink: Box<dyn EventSink>) -> Result<CancelFlag, Rejected> {
        self.submit(request, sink)
    }
    fn command(&self, command: CacheCommand, reply: CacheReply) -> Result<(), Rejected> {
        self.command(command, reply)
    }
    fn stats(&self) -> Arc<EngineStats> {
        self.stats()
    }
    fn holdings(&self, tenant: TenantId) -> Holdings {
        self.holdings(tenant)
    }
    fn retain_tenants(&self, stays: &dyn Fn(TenantId) -> bool) {
        self.retain_tenants(stays);
    }
    fn health(&self, stall_us: u64) -> Health {
        self.health(stall_us)
    }
    fn now(&self) -> Micros {
        self.now()
    }
    fn choices_max(&self) -> u32 {
        self.config().max_choices
    }
    fn drain(&self) {
        self.drain();
    }
    fn stop(&self) {
        self.stop();
    }
}

/// Everything the server needs to know about the one model it serves.
#[derive(Clone, Debug)]
pub struct ModelFacts {
    /// Names the model answers to, and patterns of such names. The first that is no pattern is the one in responses and metrics; there
    /// is at least that.
    pub names: Vec<String>,
    /// Unix time, seconds, for `GET /v1/models`.
    pub created_s: u64,
    /// Prompt and generated tokens of one sequence.
    pub context_length: u32,
    /// Token ids at or above this are refused.
    pub vocab_size: u32,
    pub eos_token_ids: Arc<[u32]>,
    /// Values of a vector.
    pub hidden: u32,
    /// How vectors are made of prompts, or why they cannot be.
    pub pooling: Result<Pooling, String>,
    /// It makes vectors and no tokens.
    pub only_embeds: bool,
    /// From `generation_config.json`.
    pub defaults: SamplingDefaults,
    /// Digest of the checkpoint's bytes and configuration.
    pub model_digest: [u8; 32],
    /// Digest of the KV layout.
    pub layout_digest: [u8; 32],
}

impl ModelFacts {
    pub fn name(&self) -> &str {
        self.listed().next().map_or("", String::as_str)
    }

    /// Names that are no patterns.
    pub fn listed(&self) -> impl Iterator<Item = &String> {
        self.names.iter().filter(|name| !is_pattern(name))
    }

    /// Whether a request for a model of this name is for this one. Linear in the name.
    pub fn answers_to(&self, asked: &str) -> bool {
        self.names.iter().any(|name| match is_pattern(name) {
            true => matches(name, asked),
            false => name == asked,
        })
    }
}

/// Whether a name stands for many: `*` in it is any text.
pub fn is_pattern(name: &str) -> bool {
    name.contains('*')
}

fn matches(pattern: &str, name: &str) -> bool {
    let mut parts = pattern.split('*');
    let first = parts.next().unwrap_or_default();
    let Some(mut rest) = name.strip_prefix(first) else { return false };
    let Some(last) = parts.next_back() else { return rest.is_empty() };
    for part in parts {
        // The earliest place leaves the most for what follows.
        let Some(at) = rest.find(part) else { return false };
        rest = &rest[at + part.len()..];
    }
    rest.ends_with(last)
}

/// What `serve` is given.
#[derive(Clone)]
pub struct App {
    pub engine: Arc<dyn Engine>,
    pub tokenizer: Arc<Tokenizer>,
    /// `None`: chat is refused, completions work.
    pub template: Option<Arc<ChatTemplate>>,
    /// How the model writes tool calls and reasoning.
    pub parsers: Parsers,
    pub model: ModelFacts,
    /// Of the program, for `/version`.
    pub version: &'static str,
}

/// Shared by all handlers.
pub(crate) struct State {
    pub app: App,
    pub config: ServerConfig,
    pub tenants: Arc<Tenants>,
    pub audit: Option<Audit>,
    pub metrics: Metrics,
    pub readers: Readers,
    pub structures: Structures,
    pub tokens: KeptTokens,
    pub meters: Arc<Meters>,
    pub responses: Arc<Store>,
    pub batches: Batches,
    /// Unix time, seconds.
    pub started_s: u64,
    pub cache_keys: CacheKeys,
    /// Set once, before anything is served.
    shared: OnceLock<SharedPrefixes>,
    /// Whose text is worked on next.
    pub text: FairQueue<TenantId>,
    /// No new generation is taken.
    pub draining: AtomicBool,
    pub in_flight: Arc<InFlight>,
    /// Bytes that are held for requests.
    pub unread: Arc<Budget>,
}

/// Generations between their request's arrival and the engine's last word about them.
#[derive(Default)]
pub(crate) struct InFlight {
    count: AtomicUsize,
    changed: Notify,
}

/// Counts as one while it lives.
pub(crate) struct Counted(Arc<InFlight>);

/// A generation, from its request's arrival until the engine is done with it.
pub(crate) struct Flight {
    _counted: Option<Counted>,
    /// Id of the HTTP request.
    pub request: String,
    /// Among its tenant's.
    pub entry: Arc<Entry>,
}

impl Flight {
    pub fn new(counted: Counted, request: &str, entry: Arc<Entry>) -> Self {
        Self { _counted: Some(counted), request: request.to_owned(), entry }
    }

    /// Of a generation that is part of what somebody else counts.
    pub fn within(request: &str, entry: Arc<Entry>) -> Self {
        Self { _counted: None, request: request.to_owned(), entry }
    }
}

impl InFlight {
    pub fn enter(self: &Arc<Self>) -> Counted {
        self.count.fetch_add(1, Ordering::AcqRel);
        Counted(self.clone())
    }

    pub fn count(&self) -> usize {
        self.count.load(Ordering::Acquire)
    }

    /// Returns when nothing is in flight.
    pub async fn idle(&self) {
        loop {
            // Registered before looking, so that no change is missed.
            let changed = self.changed.notified();
            if self.count() == 0 {
                return;
            }
            changed.await;
        }
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        if self.0.count.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.0.changed.notify_waiters();
        }
    }
}

impl State {
    pub fn new(mut config: ServerConfig, app: App) -> Result<Arc<Self>, ServerError> {
        let problem = match &app.model {
            model if model.name().is_empty() => Some("the model has no name that is no pattern"),
            model if model.vocab_size == 0 => Some("the model has no vocabulary"),
            model if model.context_length < 2 => Some("the model's context is shorter than two tokens"),
            _ => None,
        };
        if let Some(problem) = problem {
            return Err(ServerError::Config(problem.into()));
        }
        config.limits.choices = config.limits.choices.min(app.engine.choices_max()).max(1);
        let tenants = Arc::new(Tenants::of_config(&config)?);
        // The keys themselves are not needed any more.
        config.api_keys.clear();
        config.admin.iter_mut().for_each(|admin| admin.keys.clear());
        let declared = std::mem::take(&mut config.tenants).prefixes;
        config.server_secret = None;
        let audit = config.audit_file.as_deref().map(Audit::open).transpose()?;
        let text = FairQueue::new(config.limits.text_threads, config.limits.text_waiting);
        let meters = Arc::new(Meters::new(app.model.name(), config.usage_file.as_deref())?);
        let by_tenant = config
            .tenant_metrics
            .then(|| TenantCollector::new(app.engine.clone(), meters.clone(), tenants.clone()));
        let metrics = Metrics::new(&app, by_tenant);
        let readers = Readers::new(app.parsers, app.template.as_deref(), &app.tokenizer);
        let ends = app.model.eos_token_ids.clone();
        let structures = Structures::new(app.tokenizer.clone(), ends, metrics.masks.clone());
        let state = Arc::new(Self {
            batches: Batches::open(&config.batch)?,
            unread: Budget::new(&config.limits),
            responses: Arc::new(Store::new(config.limits.responses, config.limits.responses_bytes)),
            app,
            config,
            metrics,
            readers,
            structures,
            tokens: KeptTokens::new(KEPT_BYTES_MAX),
            meters,
            started_s: crate::generation::generate::unix_s(),
            tenants,
            audit,
            cache_keys: CacheKeys::default(),
            text,
            draining: AtomicBool::new(false),
            in_flight: Arc::default(),
            shared: OnceLock::new(),
        });
        let shared = SharedPrefixes::read(&state, &declared)?;
        state.shared.get_or_init(|| shared);
        Ok(state)
    }

    /// Lets go of tenants that have no valid key and are at rest, and of what is counted for them.
    pub fn forget_tenants(&self) {
        let gone = self.tenants.leave();
        if !gone.is_empty() {
            self.meters.forget(&gone);
            self.cache_keys.forget(&gone);
            self.structures.forget(&gone);
            self.tokens.forget(&gone);
        }
        // Also of tenants that left before: what they had cached was evicted since.
        self.app.engine.retain_tenants(&|tenant| self.tenants.is_known(tenant));
    }

    /// What the operator declared to be shared.
    pub fn shared(&self) -> Option<&SharedPrefixes> {
        self.shared.get()
    }

    /// Start of the tenant's block-hash chains.
    pub fn root(&self, tenant: &Tenant) -> Root {
        Root::derive(&Identity {
            tenant: tenant.cache,
            tenant_secret: &tenant.secret,
            model_digest: &self.app.model.model_digest,
            layout_digest: &self.app.model.layout_digest,
            extra: &[],
        })
    }

    /// Runs `work` (parsing, rendering, tokenizing) on a text thread, off the event loop, when it is the tenant's turn. `bytes`:
    /// about how many are worked on.
    pub async fn off_thread<T: Send + 'static>(
        &self,
        tenant: TenantId,
        bytes: usize,
        work: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
    ) -> Result<T, ApiError> {
        let turn = self.text.turn(&tenant, bytes as u64).await;
        let turn = turn.map_err(|_| ApiError::busy("Too many requests are being read and tokenized.", 1))?;
        let done = tokio::task::spawn_blocking(move || {
            // Held until the work is done, even when the client left meanwhile.
            let _turn = turn;
            work()
        });
        done.await.unwrap_or_else(|_| {
            self.metrics.panicked();
            Err(ApiError::internal("preparing the request failed"))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::matches;

    #[test]
    fn a_star_is_any_text() {
        for (pattern, name, fits) in [
            ("claude-*", "claude-opus-5-5", true),
            ("claude-*", "claude-", true),
            ("claude-*", "claude", false),
            ("*", "", true),
            ("*haiku*", "claude-haiku-4-5", true),
            ("gpt-*-mini", "gpt-5-mini", true),
            ("gpt-*-mini", "gpt-mini", false),
            ("a*b*c", "a-b-b-c", true),
            ("a*b*c", "a-c-b", false),
            ("a*a", "a", false),
        ] {
            assert_eq!(matches(pattern, name), fits, "{pattern} {name}");
        }
    }
}
