//! What a running server is made of, and the state its handlers share.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

use folio_api::{ApiError, Context};
use folio_events::KvEvents;
use folio_kv::{Identity, Root, TenantId};
use folio_text::work::giving_way;
use prometheus_client::collector::Collector;
use tokio::sync::Notify;

use crate::batch::Batches;
use crate::config::ServerConfig;
use crate::decoding::reading::Readers;
use crate::decoding::structured::Structures;
use crate::engine::App;
use crate::error::ServerError;
use crate::observability::audit::Audit;
use crate::observability::kv_events;
use crate::observability::metrics::Metrics;
use crate::observability::tenant_metrics::TenantCollector;
use crate::observability::usage::Meters;
use crate::response_store::Store;
use crate::tenancy::cache_keys::CacheKeys;
use crate::tenancy::declared::DeclaredPrefix;
use crate::tenancy::fair_queue::FairQueue;
use crate::tenancy::gate::Entry;
use crate::tenancy::kept::{KeptTokens, TOKENS_BYTES_MAX};
use crate::tenancy::keyring::Keyring;
use crate::tenancy::shared_prefixes::SharedPrefixes;
use crate::tenancy::tenants::{Tenant, Tenants};
use crate::tenancy::unread::Budget;

/// Shared by all handlers.
pub(crate) struct State {
    pub app: App,
    /// What readers of requests know.
    pub context: Context,
    pub config: ServerConfig,
    pub tenants: Arc<Tenants>,
    /// What is told of the cache's content.
    pub kv_events: Option<Arc<KvEvents>>,
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
    /// `tokens`: those of a prefix that the operator declared.
    pub fn new(
        mut config: ServerConfig,
        app: App,
        tokens: fn(&Self, &DeclaredPrefix) -> Result<Vec<u32>, ApiError>,
    ) -> Result<Arc<Self>, ServerError> {
        let context = app.context(&config.limits.request, &config.hints);
        let problem = match &app.model {
            _ if context.model.name().is_empty() => Some("the model has no name that is no pattern"),
            model if model.vocab_size == 0 => Some("the model has no vocabulary"),
            model if model.context_length < 2 => Some("the model's context is shorter than two tokens"),
            _ => None,
        };
        if let Some(problem) = problem {
            return Err(ServerError::Config(problem.into()));
        }
        let tenants = Arc::new(config.key_ring()?);
        // The keys themselves are not needed any more.
        config.api_keys.clear();
        config.admin.iter_mut().for_each(|admin| admin.keys.clear());
        let declared = std::mem::take(&mut config.tenants).prefixes;
        config.keyring = Keyring::default();
        let audit = config.audit_file.as_deref().map(Audit::open).transpose()?;
        let text = FairQueue::new(config.limits.text_threads, config.limits.text_waiting);
        let meters = Arc::new(Meters::new(context.model.name(), config.usage_file.as_deref())?);
        let by_tenant = config
            .tenant_metrics
            .then(|| TenantCollector::new(app.engine.clone(), meters.clone(), tenants.clone()))
            .map(|collector| Box::new(collector) as Box<dyn Collector>);
        let kv_events = config.kv_events.as_ref().map(|source| kv_events::start(source, &tenants));
        let kv_events = kv_events.transpose()?.map(Arc::new);
        let metrics = Metrics::new(&app.engine, kv_events.clone(), context.model.name(), by_tenant);
        let readers = Readers::new(app.parsers, &app.tokenizer);
        let ends = app.model.eos_token_ids.clone();
        let structures = Structures::new(app.tokenizer.clone(), ends, metrics.masks.clone());
        let state = Arc::new(Self {
            batches: Batches::open(&config.batch)?,
            unread: {
                let limits = &config.limits;
                Budget::new(limits.unread_bytes, limits.in_flight_bytes, limits.write_timeout)
            },
            responses: Arc::new(Store::new(config.limits.responses, config.limits.responses_bytes)),
            app,
            context,
            config,
            metrics,
            readers,
            structures,
            tokens: KeptTokens::new(TOKENS_BYTES_MAX),
            meters,
            started_s: folio_api::unix_s(),
            tenants,
            kv_events,
            audit,
            cache_keys: CacheKeys::default(),
            text,
            draining: AtomicBool::new(false),
            in_flight: Arc::default(),
            shared: OnceLock::new(),
        });
        let block_tokens = state.app.engine.stats().cache.block_tokens;
        let declared = declared.iter().zip(state.tenants.prefixes());
        let read = |(prefix, holder)| (prefix, state.root(holder), tokens(&state, prefix));
        let shared = SharedPrefixes::new(declared.map(read), block_tokens)?;
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
            giving_way(work)
        });
        done.await.unwrap_or_else(|_| {
            self.metrics.panicked();
            Err(ApiError::internal("preparing the request failed"))
        })
    }
}
