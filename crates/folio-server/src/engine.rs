//! What is served: the engine as the server sees it, and the model's tokenizer, template and numbers.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use folio_api::SamplingDefaults;
use folio_api::hints::HintPolicy;
use folio_api::{ApiError, Capabilities, Context, Model, Parsers, RequestLimits};
use folio_engine::handle::{Health, Rejected};
use folio_engine::{
    CacheCommand, CacheReply, CancelFlag, EngineHandle, EngineStats, EventSink, Micros, Pooling, Request,
    RequestAdapter, RequestId, SchedulerConfig, TierStats,
};
use folio_kv::{BlockHashes, Holdings, Root, TenantId};
use folio_text::{ChatTemplate, Tokenizer, work};

use crate::adapters::{Adapters, AllowedAdapters};
use crate::error::ServerError;
use crate::threads::{LOOKUPS, Pool, WorkLost};

/// The engine as the server sees it: every method but `hashes` returns at once. [`EngineHandle`] is the engine; tests have others.
pub trait Engine: Send + Sync + 'static {
    fn next_request_id(&self) -> RequestId;
    /// Why a request would be refused now: before anything is done for it.
    fn check(&self, request: &Request) -> Result<(), Rejected>;
    /// What identifies the blocks of a prompt, and which of them tiers have. O(prompt).
    fn hashes(&self, root: &Root, prompt: &[u32]) -> BlockHashes;
    /// Whether `hashes` may wait for a tier.
    fn asks_a_tier(&self) -> bool;
    /// `hashes`: of the request's root and prompt.
    fn submit(
        &self,
        request: Request,
        hashes: BlockHashes,
        sink: Box<dyn EventSink>,
    ) -> Result<CancelFlag, Rejected>;
    /// Asks something of the cache; the answer goes to `reply`, which is dropped if there will be none.
    fn command(&self, command: CacheCommand, reply: CacheReply) -> Result<(), Rejected>;
    fn stats(&self) -> Arc<EngineStats>;
    /// Memory that a tenant holds and has held since the start.
    fn holdings(&self, tenant: TenantId) -> Holdings;
    /// Forgets what tenants held that are no more.
    fn retain_tenants(&self, stays: &dyn Fn(TenantId) -> bool);
    fn health(&self, stall_us: u64) -> Health;
    /// Of what keeps KV off the device, the nearest first.
    fn tier_stats(&self) -> Vec<TierStats> {
        Vec::new()
    }
    fn now(&self) -> Micros;
    /// Most choices of one request.
    fn choices_max(&self) -> u32;
    /// Most sequences and tokens of a step.
    fn step_limits(&self) -> (u32, u32) {
        self.limits().map_or((1, 1), |limits| (limits.max_num_seqs, limits.max_num_batched_tokens))
    }
    /// What it schedules by.
    fn limits(&self) -> Option<&SchedulerConfig> {
        None
    }
    fn drain(&self);
    fn stop(&self);
}

/// Prompt tokens that are hashed on the event loop: 256 blocks of 16.
const HASHED_AT_ONCE: usize = 4096;

/// [`Engine::hashes`] of prompts that were checked, each with its root: on a thread of its own where that may wait or take long.
pub(crate) async fn hashes(
    served: &Served,
    tenant: TenantId,
    prompts: Vec<(Root, Arc<[u32]>)>,
) -> Vec<BlockHashes> {
    let engine = served.engine.clone();
    let tokens = prompts.iter().map(|(_, prompt)| prompt.len()).sum::<usize>();
    let at_once = !engine.asks_a_tier() && tokens <= HASHED_AT_ONCE;
    let hash_all = move || prompts.iter().map(|(root, prompt)| engine.hashes(root, prompt)).collect();
    if at_once {
        work::add(size_of::<u32>() * tokens);
        return hash_all();
    }
    match served.lookups.finish(tenant, size_of::<u32>() * tokens, hash_all).await {
        Ok(hashes) => hashes,
        Err(WorkLost) => panic!("prompts were not hashed"),
    }
}

/// Hands a request to the engine. Nothing is hashed of one that is refused.
pub(crate) async fn submit(
    served: &Served,
    request: Request,
    sink: Box<dyn EventSink>,
) -> Result<CancelFlag, Rejected> {
    served.engine.check(&request)?;
    let prompts = vec![(request.root, request.prompt.clone())];
    let hashes = hashes(served, request.tenant, prompts).await.remove(0);
    served.engine.submit(request, hashes, sink)
}

impl Engine for EngineHandle {
    fn next_request_id(&self) -> RequestId {
        self.next_request_id()
    }
    fn check(&self, request: &Request) -> Result<(), Rejected> {
        self.check(request)
    }
    fn hashes(&self, root: &Root, prompt: &[u32]) -> BlockHashes {
        self.hashes(root, prompt)
    }
    fn asks_a_tier(&self) -> bool {
        self.asks_a_tier()
    }
    fn submit(
        &self,
        request: Request,
        hashes: BlockHashes,
        sink: Box<dyn EventSink>,
    ) -> Result<CancelFlag, Rejected> {
        self.submit_hashed(request, hashes, sink)
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
    fn tier_stats(&self) -> Vec<TierStats> {
        self.tier_stats()
    }
    fn now(&self) -> Micros {
        self.now()
    }
    fn choices_max(&self) -> u32 {
        self.config().max_choices
    }
    fn limits(&self) -> Option<&SchedulerConfig> {
        Some(self.config())
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
    pub weights: WeightFacts,
}

/// What is told of a model's weights, and has no effect.
#[derive(Clone, Debug, Default)]
pub struct WeightFacts {
    /// Name of the family, such as "qwen3".
    pub family: String,
    pub parameters: u64,
    /// What they are stored as, such as "bf16".
    pub format: String,
    /// As they are loaded.
    pub bytes: u64,
    /// They are in the memory of a GPU.
    pub on_gpu: bool,
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
    /// Which adapters of the model are served.
    pub adapters: Arc<Adapters>,
    /// Of the program, for `/version`.
    pub version: &'static str,
}

/// The one model that is served, and the engine that computes it.
pub(crate) struct Served {
    pub engine: Arc<dyn Engine>,
    /// Threads that hash prompts and look them up in tiers.
    pub lookups: Pool,
    pub tokenizer: Arc<Tokenizer>,
    pub template: Option<Arc<ChatTemplate>>,
    pub parsers: Parsers,
    pub model: ModelFacts,
    pub adapters: Arc<Adapters>,
    pub version: &'static str,
    /// Where, for whoever is not told by a request.
    pub listen: SocketAddr,
    /// What readers of requests know of it.
    pub context: Context,
}

impl Served {
    /// A request may have as many choices as the engine takes.
    pub fn new(
        app: App,
        limits: &RequestLimits,
        hints: &HintPolicy,
        listen: SocketAddr,
    ) -> Result<Self, ServerError> {
        let App { engine, tokenizer, template, parsers, model, adapters, version } = app;
        let mut limits = limits.clone();
        limits.choices = limits.choices.min(engine.choices_max()).max(1);
        let known = Model {
            names: model.names.clone(),
            vocab_size: model.vocab_size,
            eos_token_ids: model.eos_token_ids.clone(),
            hidden: model.hidden,
            defaults: model.defaults.clone(),
            has_adapters: adapters.can_be(),
        };
        let capabilities = Capabilities::new(parsers, template.as_deref());
        let lookups = Pool::new(LOOKUPS, 0);
        let context = Context { model: known, limits, hints: hints.clone(), capabilities };
        let problem = match &model {
            _ if context.model.name().is_empty() => "the model has no name that is no pattern",
            model if model.vocab_size == 0 => "the model has no vocabulary",
            model if model.context_length < 2 => "the model's context is shorter than two tokens",
            _ => {
                return Ok(Self {
                    engine,
                    lookups,
                    tokenizer,
                    template,
                    parsers,
                    model,
                    adapters,
                    version,
                    listen,
                    context,
                });
            }
        };
        Err(ServerError::Config(problem.into()))
    }

    /// The name that responses and metrics have.
    pub fn name(&self) -> &str {
        self.context.model.name()
    }

    /// The adapter of a name that is not the model's. One that is not among `allowed` is answered as if there were none of this name.
    pub fn adapter(
        &self,
        name: Option<&str>,
        allowed: &AllowedAdapters,
    ) -> Result<Option<RequestAdapter>, ApiError> {
        let Some(name) = name else { return Ok(None) };
        let found = allowed.has(name).then(|| self.adapters.get(name));
        match found.flatten() {
            Some(adapter) => Ok(Some(adapter)),
            None => Err(ApiError::model_not_found(name, self.name())),
        }
    }

    /// When a request that is submitted now is out of time, by the engine's clock.
    pub fn deadline(&self, timeout: Option<Duration>) -> Option<Micros> {
        timeout.map(|limit| Micros(self.engine.now().0.saturating_add(limit.as_micros() as u64)))
    }
}
