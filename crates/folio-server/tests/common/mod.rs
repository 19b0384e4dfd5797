//! A server without a socket, around an engine that says what it is told to, one step at a time.
#![allow(dead_code)]

pub mod room;
pub mod targets;

use std::collections::VecDeque;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::Router;
use axum::body::{Body, to_bytes};
use axum::http::{HeaderMap, Request as HttpRequest, Response, StatusCode};
use folio_engine::handle::{Health, Rejected};
use folio_engine::request::{Timing, Token, TokenLogprobs};
use folio_engine::{
    CacheCommand, CacheReply, CancelFlag, EngineHandle, EngineParts, EngineStats, Event, EventSink,
    FinishReason, Micros, ModelExecutor, Pooling, Request, RequestId, SchedulerConfig, SystemClock, Tier,
    TierStats,
};
use folio_kv::{BlockHashes, CacheConfig, Holdings, KvCache, Root, TenantId, default_policy};
use folio_server::{
    Adapters, App, Engine, ModelFacts, ModelProcess, Parsers, RouterConfig, SamplingDefaults, Server,
    ServerConfig, WeightFacts, router_of,
};
use folio_sim::SimBackend;
use folio_text::{ChatTemplate, ReasoningFormat, TemplateSources, Tokenizer, ToolFormat, work};
use serde_json::{Value, json};
use tower::ServiceExt;

pub const EOS: u32 = 256;
pub const VOCAB: u32 = 259;

/// One token per byte, id = byte; `<|end|>` (256) and two more special tokens.
pub fn tokenizer() -> Tokenizer {
    tokenizer_with(["<|end|>", "<|a|>", "<|b|>"])
}

/// The same with these special tokens, from 256 on.
pub fn tokenizer_with(names: [&str; 3]) -> Tokenizer {
    let mut vocab = serde_json::Map::new();
    let printable = |b: u32| (33..=126).contains(&b) || (161..=172).contains(&b) || (174..=255).contains(&b);
    let mut others = 256;
    for byte in 0..256u32 {
        let code = if printable(byte) {
            byte
        } else {
            others += 1;
            others - 1
        };
        vocab.insert(char::from_u32(code).unwrap().to_string(), byte.into());
    }
    let special = |id: u32, text: &str| {
        json!({"id": id, "content": text, "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false, "special": true})
    };
    let file = json!({
        "version": "1.0", "truncation": null, "padding": null, "normalizer": null, "post_processor": null,
        "added_tokens": [special(256, names[0]), special(257, names[1]), special(258, names[2])],
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false},
        "decoder": {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true},
        "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "vocab": vocab, "merges": []},
    });
    Tokenizer::from_bytes(file.to_string().as_bytes(), None).unwrap()
}

pub fn template() -> ChatTemplate {
    let source = "{% for m in messages %}[{{ m.role }}]{{ m.content }}<|end|>{% endfor %}\
                  {% if mood is defined %}({{ mood }}){% endif %}\
                  {% if add_generation_prompt %}[assistant]{% endif %}";
    let mut sources = TemplateSources::default();
    sources.add("default", source, "test");
    ChatTemplate::compile(sources, tokenizer().special_tokens()).unwrap().unwrap()
}

/// A template that shows tools and calls, and opens reasoning when asked to.
pub fn tool_template() -> ChatTemplate {
    let source = "{% for t in tools or [] %}<tool>{{ t | tojson }}</tool>{% endfor %}\
                  {% for m in messages %}[{{ m.role }}]{{ m.content or '' }}\
                  {% for c in m.tool_calls or [] %}<call>{{ c.function | tojson }}</call>{% endfor %}\
                  {% if m.tool_call_id is defined %}({{ m.tool_call_id }}){% endif %}<|end|>{% endfor %}\
                  {% if reasoning_effort is defined %}({{ reasoning_effort }}){% endif %}\
                  {% if add_generation_prompt %}[assistant]{% if thinking is defined %}<think>\n{% endif %}{% endif %}";
    let mut sources = TemplateSources::default();
    sources.add("default", source, "test");
    ChatTemplate::compile(sources, tokenizer().special_tokens()).unwrap().unwrap()
}

pub fn facts() -> ModelFacts {
    ModelFacts {
        names: vec!["test-model".into(), "org/alias".into()],
        created_s: 1_700_000_000,
        context_length: 256,
        vocab_size: VOCAB,
        eos_token_ids: Arc::new([EOS]),
        hidden: 3,
        pooling: Ok(Pooling::Last),
        only_embeds: false,
        defaults: SamplingDefaults { temperature: Some(0.7), top_k: Some(11), ..Default::default() },
        model_digest: [1; 32],
        layout_digest: [2; 32],
        weights: WeightFacts {
            family: "test".into(),
            parameters: 1_500_000,
            format: "bf16".into(),
            bytes: 3_000_000,
            on_gpu: false,
        },
    }
}

/// A request the fake engine works on.
struct Live {
    request: Request,
    sink: Box<dyn EventSink>,
    flag: CancelFlag,
    /// Tokens still to be said, per choice; a choice that was ended has `None`.
    choices: Vec<Option<VecDeque<u32>>>,
    said: Vec<u32>,
    prompt_told: bool,
}

/// What the engine does with requests.
#[derive(Default)]
pub struct Plan {
    /// Bytes every choice says, before an end-of-sequence token. `{c}` is replaced by the choice's number.
    pub say: Vec<u8>,
    /// Token ids said after that.
    pub extra: Vec<u32>,
    /// Instead of end-of-sequence: this reason once the text is said.
    pub end: Option<FinishReason>,
    pub cached: u32,
    /// The submission after `accept` more is refused with this.
    pub reject: Option<Rejected>,
    pub accept: u32,
    /// Submissions wait for [`FakeEngine::step`]; else they are answered at once.
    pub manual: bool,
    pub health: Option<Health>,
    /// Submitting panics.
    pub panics: bool,
    /// What prompts of which a vector is wanted come to.
    pub vector: Vec<f32>,
}

#[derive(Default)]
pub struct FakeEngine {
    pub plan: Mutex<Plan>,
    pub requests: Mutex<Vec<Request>>,
    live: Mutex<Vec<Live>>,
    ids: AtomicU64,
    /// Prompts that were hashed.
    pub hashed: AtomicU64,
    pub phase: Mutex<&'static str>,
}

impl FakeEngine {
    pub fn saying(text: &str) -> Arc<Self> {
        let engine = Self::default();
        engine.plan.lock().unwrap().say = text.into();
        Arc::new(engine)
    }

    pub fn plan(&self, change: impl FnOnce(&mut Plan)) {
        change(&mut self.plan.lock().unwrap());
    }

    pub fn last(&self) -> Request {
        self.requests.lock().unwrap().last().unwrap().clone()
    }

    pub fn live(&self) -> usize {
        self.live.lock().unwrap().len()
    }

    /// Whether every living request was cancelled (and there is one).
    pub fn cancelled(&self) -> bool {
        let live = self.live.lock().unwrap();
        !live.is_empty() && live.iter().all(|live| live.flag.is_cancelled())
    }

    /// One step: every living choice says one token; what was cancelled ends.
    pub fn step(&self) {
        let end = self.plan.lock().unwrap().end;
        let cached = self.plan.lock().unwrap().cached;
        let vector = self.plan.lock().unwrap().vector.clone();
        let mut live = self.live.lock().unwrap();
        live.retain_mut(|live| live.step(end, cached, &vector));
    }
}

impl Live {
    /// False when nothing is left of it.
    fn step(&mut self, end: Option<FinishReason>, cached: u32, vector: &[f32]) -> bool {
        // Of a request that is speculated on, half of four drafts were right.
        let drafts = if self.request.speculation.is_some() { 4 } else { 0 };
        let finished = |choice, reason, stop_token| Event::Finished {
            choice,
            reason,
            stop_token,
            error: (reason == FinishReason::Error).then(|| "the executor failed".into()),
            timing: Box::new(Timing {
                draft_steps: drafts / 2,
                draft_tokens: drafts,
                accepted_draft_tokens: drafts / 2,
                ..Timing::default()
            }),
        };
        if self.flag.is_cancelled() {
            for choice in 0..self.choices.len() {
                if self.choices[choice].take().is_some() {
                    self.sink.deliver(finished(choice as u32, FinishReason::Cancelled, None));
                }
            }
            return false;
        }
        if !std::mem::replace(&mut self.prompt_told, true) {
            let scores = match self.request.prompt_logprobs {
                Some(top) => self.request.prompt[1..].iter().map(|id| logprobs(*id, top)).collect(),
                None => Vec::new(),
            };
            self.sink.deliver(Event::Prompt {
                cached_tokens: cached,
                us: 0.0,
                cached_us: 0.0,
                prompt_logprobs: scores,
                kept: None,
            });
        }
        let params = &self.request.sampling;
        if params.max_tokens == 0 {
            if self.request.pooling.is_some() {
                self.sink.deliver(Event::Pooled { vector: vector.to_vec() });
            }
            // A prefix that is only computed.
            (0..self.choices.len()).for_each(|choice| {
                self.sink.deliver(finished(choice as u32, FinishReason::Length, None));
            });
            return false;
        }
        for index in 0..self.choices.len() {
            let Some(tokens) = &mut self.choices[index] else { continue };
            let choice = index as u32;
            let next = tokens.pop_front().or(if end.is_none() { Some(EOS) } else { None });
            let Some(id) = next else {
                self.choices[index] = None;
                self.sink.deliver(finished(choice, end.unwrap(), None));
                continue;
            };
            self.said[index] += 1;
            let logprobs = params.logprobs.map(|top| logprobs(id, top));
            let stop = params.eos_token_ids.contains(&id) || params.stop_token_ids.contains(&id);
            self.sink.deliver(Event::Token { choice, token: Token { id, us: 0.0, logprobs } });
            if stop {
                self.choices[index] = None;
                self.sink.deliver(finished(choice, FinishReason::Stop, Some(id)));
            } else if self.said[index] >= params.max_tokens {
                self.choices[index] = None;
                self.sink.deliver(finished(choice, FinishReason::Length, None));
            }
        }
        self.choices.iter().any(Option::is_some)
    }
}

fn logprobs(id: u32, top: u32) -> TokenLogprobs {
    let alternatives = (0..top).map(|rank| (if rank == 0 { id } else { rank }, -0.5 - rank as f32)).collect();
    TokenLogprobs { logprob: -0.5, rank: 1, top: alternatives }
}

impl Engine for FakeEngine {
    fn tier_stats(&self) -> Vec<TierStats> {
        let (misses, requests) = (vec![("damaged", 0)], vec![("answered", 0)]);
        vec![TierStats { name: "disk", bytes_limit: 1, misses, requests, ..TierStats::default() }]
    }

    fn next_request_id(&self) -> RequestId {
        RequestId(self.ids.fetch_add(1, Ordering::Relaxed))
    }

    fn check(&self, _: &Request) -> Result<(), Rejected> {
        let mut plan = self.plan.lock().unwrap();
        match plan.accept {
            0 => plan.reject.take().map_or(Ok(()), Err),
            _ => Ok(()),
        }
    }
    fn hashes(&self, root: &Root, prompt: &[u32]) -> BlockHashes {
        self.hashed.fetch_add(1, Ordering::Relaxed);
        work::add(size_of_val(prompt));
        BlockHashes::new(root, prompt, 16)
    }
    fn asks_a_tier(&self) -> bool {
        false
    }
    fn submit(
        &self,
        request: Request,
        _: BlockHashes,
        sink: Box<dyn EventSink>,
    ) -> Result<CancelFlag, Rejected> {
        let panics = self.plan.lock().unwrap().panics;
        assert!(!panics, "as the test wants it");
        let mut plan = self.plan.lock().unwrap();
        if plan.reject.is_some() && plan.accept == 0 {
            return Err(plan.reject.take().unwrap());
        }
        plan.accept = plan.accept.saturating_sub(1);
        drop(plan);
        self.requests.lock().unwrap().push(request.clone());
        let flag = CancelFlag::default();
        let plan = self.plan.lock().unwrap();
        let manual = plan.manual;
        let say = String::from_utf8_lossy(&plan.say).contains("{c}");
        let choices = (0..request.n).map(|choice| {
            let bytes = match say {
                true => String::from_utf8_lossy(&plan.say).replace("{c}", &choice.to_string()).into_bytes(),
                false => plan.say.clone(),
            };
            Some(bytes.into_iter().map(u32::from).chain(plan.extra.iter().copied()).collect())
        });
        let choices: Vec<_> = choices.collect();
        drop(plan);
        let said = vec![0; choices.len()];
        self.live.lock().unwrap().push(Live {
            request,
            sink,
            flag: flag.clone(),
            choices,
            said,
            prompt_told: false,
        });
        while !manual && self.live() > 0 {
            self.step();
        }
        Ok(flag)
    }

    /// It has no cache: the reply is dropped, as by an engine that ended.
    fn command(&self, _command: CacheCommand, _reply: CacheReply) -> Result<(), Rejected> {
        Ok(())
    }

    fn stats(&self) -> Arc<EngineStats> {
        let mut stats = EngineStats { running: self.live() as u32, ..Default::default() };
        stats.cache.groups[0].block_tokens = 16;
        stats.load_costs.fill(Some(folio_engine::LoadCost { latency_us: 1000.0, us_per_byte: 0.001 }));
        Arc::new(stats)
    }

    fn holdings(&self, _tenant: TenantId) -> Holdings {
        Holdings::default()
    }

    fn retain_tenants(&self, _stays: &dyn Fn(TenantId) -> bool) {}

    fn health(&self, _stall_us: u64) -> Health {
        self.plan.lock().unwrap().health.clone().unwrap_or(Health::Ok)
    }

    fn now(&self) -> Micros {
        Micros(1_000)
    }

    fn choices_max(&self) -> u32 {
        8
    }

    fn drain(&self) {
        *self.phase.lock().unwrap() = "draining";
    }

    fn stop(&self) {
        *self.phase.lock().unwrap() = "stopped";
        self.live.lock().unwrap().iter().for_each(|live| live.flag.cancel());
        self.step();
    }
}

/// An engine that is given requests by `submit`.
pub struct Submitting<E, F> {
    pub engine: E,
    pub submit: F,
}

impl<E: Engine, F> Engine for Submitting<E, F>
where
    F: Fn(&E, Request, Box<dyn EventSink>) -> Result<CancelFlag, Rejected> + Send + Sync + 'static,
{
    fn next_request_id(&self) -> RequestId {
        self.engine.next_request_id()
    }
    fn check(&self, request: &Request) -> Result<(), Rejected> {
        self.engine.check(request)
    }
    fn hashes(&self, root: &Root, prompt: &[u32]) -> BlockHashes {
        self.engine.hashes(root, prompt)
    }
    fn asks_a_tier(&self) -> bool {
        self.engine.asks_a_tier()
    }
    fn submit(
        &self,
        request: Request,
        _: BlockHashes,
        sink: Box<dyn EventSink>,
    ) -> Result<CancelFlag, Rejected> {
        (self.submit)(&self.engine, request, sink)
    }
    fn command(&self, command: CacheCommand, reply: CacheReply) -> Result<(), Rejected> {
        self.engine.command(command, reply)
    }
    fn stats(&self) -> Arc<EngineStats> {
        self.engine.stats()
    }
    fn holdings(&self, tenant: TenantId) -> Holdings {
        self.engine.holdings(tenant)
    }
    fn retain_tenants(&self, stays: &dyn Fn(TenantId) -> bool) {
        self.engine.retain_tenants(stays);
    }
    fn health(&self, stall_us: u64) -> Health {
        self.engine.health(stall_us)
    }
    fn now(&self) -> Micros {
        self.engine.now()
    }
    fn choices_max(&self) -> u32 {
        self.engine.choices_max()
    }
    fn drain(&self) {
        self.engine.drain();
    }
    fn stop(&self) {
        self.engine.stop();
    }
}

/// The real engine around a modelled backend with `blocks` blocks of 16 tokens.
pub fn modelled(config: SchedulerConfig, blocks: u32, bytes_per_block: u64) -> EngineHandle {
    modelled_with(config, blocks, bytes_per_block, Vec::new())
}

/// The same with tiers.
pub fn modelled_with(
    config: SchedulerConfig,
    blocks: u32,
    bytes_per_block: u64,
    tiers: Vec<Arc<dyn Tier>>,
) -> EngineHandle {
    let rows = config.max_num_batched_tokens as usize;
    let backend = SimBackend::new(VOCAB as usize, blocks as usize, 16, rows, 64);
    let geometry = CacheConfig { blocks, block_tokens: 16, bytes_per_block };
    folio_engine::start(EngineParts {
        config,
        cache: KvCache::new(geometry, default_policy(0.01)),
        executor: Box::new(ModelExecutor::new(Box::new(backend), VOCAB as usize, rows, 64)),
        clock: Arc::new(SystemClock::new()),
        vocab: VOCAB,
        tiers,
        events: None,
    })
    .unwrap()
}

pub fn app(engine: Arc<dyn Engine>) -> App {
    App {
        engine,
        tokenizer: Arc::new(tokenizer()),
        template: Some(Arc::new(template())),
        parsers: Default::default(),
        model: facts(),
        adapters: Default::default(),
        version: "1.2.3",
    }
}

/// The same with adapters of these names, which change nothing.
pub fn app_with_adapters(engine: Arc<dyn Engine>, names: &[&str]) -> App {
    let load = |_: &Path| -> Result<folio_engine::Adapter, String> { Ok(Default::default()) };
    let adapters = Adapters::new(Box::new(load), Box::new(|_, _| ()), None);
    names.iter().for_each(|name| adapters.load_at_start(name, Path::new("/adapter")).unwrap());
    App { adapters: Arc::new(adapters), ..app(engine) }
}

/// The same with tools as Hermes' and reasoning in `<think>`, and a context of its own.
pub fn tool_app(engine: Arc<dyn Engine>, context_length: u32) -> App {
    let parsers = Parsers { tools: ToolFormat::named("hermes"), reasoning: ReasoningFormat::named("think") };
    let model = ModelFacts { context_length, ..facts() };
    App { template: Some(Arc::new(tool_template())), parsers, model, ..app(engine) }
}

/// The one model of a server of several.
pub const SEVERAL: &str = "one-of-several";

pub fn several() -> RouterConfig {
    let model = ModelProcess {
        names: vec![SEVERAL.into()],
        adapters: Vec::new(),
        need_bytes: 1,
        weight_bytes: 1,
        on_gpu: false,
        family: "qwen3".into(),
        parameters: 1,
        format: "bf16".into(),
        context_length: 256,
        digest: "0".into(),
        keep_alive: None,
        arguments: Vec::new(),
    };
    RouterConfig {
        models: vec![model],
        program: "/nowhere/to/be/found".into(),
        configuration: "".into(),
        memory_bytes: 1,
        start_timeout: Duration::from_secs(1),
        wait_timeout: Duration::from_secs(1),
        waiting: 2,
        version: "1.2.3",
    }
}

/// Sends requests to a router.
#[derive(Clone)]
pub struct Client {
    /// None: of a router of several models.
    server: Option<Arc<Server>>,
    router: Router,
    key: Option<String>,
}

pub struct Reply {
    pub status: StatusCode,
    pub headers: HeaderMap,
    pub text: String,
}

impl Reply {
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.text).unwrap_or_else(|error| panic!("{error}: {}", self.text))
    }

    /// Of Ollama's shape, which has a text there, as the others'.
    pub fn error(&self) -> Value {
        let json = self.json();
        match &json["error"] {
            Value::String(message) => {
                json!({"message": message, "param": json["param"], "code": json["code"]})
            }
            error => error.clone(),
        }
    }

    /// Of `application/x-ndjson`.
    pub fn lines(&self) -> Vec<Value> {
        let line = |line| serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line:?}"));
        assert!(self.text.ends_with('\n'), "the last line is cut short: {:?}", self.text);
        self.text.lines().map(line).collect()
    }

    /// The events of a stream, `[DONE]` as a string.
    pub fn events(&self) -> Vec<Value> {
        events(&self.text)
    }
}

pub fn events(text: &str) -> Vec<Value> {
    let data = text.split("\n\n").filter_map(|event| event.strip_prefix("data: "));
    data.map(|data| serde_json::from_str(data).unwrap_or_else(|_| data.into())).collect()
}

impl Client {
    pub fn new(engine: Arc<dyn Engine>) -> Self {
        Self::with(ServerConfig::default(), app(engine))
    }

    pub fn with(config: ServerConfig, app: App) -> Self {
        Self::of(Server::new(config, app).unwrap())
    }

    pub fn of(server: Server) -> Self {
        Self { router: server.router(), server: Some(Arc::new(server)), key: None }
    }

    /// Of a server of several models, of which there is one ([`SEVERAL`]), which does not start.
    pub fn several(config: &ServerConfig) -> Self {
        Self { router: router_of(config, several()).unwrap(), server: None, key: None }
    }

    /// The same, whose model has adapters of these names.
    pub fn several_with_adapters(config: &ServerConfig, names: &[&str]) -> Self {
        let mut several = several();
        several.models[0].adapters = names.iter().map(|name| (*name).to_owned()).collect();
        Self { router: router_of(config, several).unwrap(), server: None, key: None }
    }

    fn server(&self) -> &Server {
        self.server.as_ref().expect("a server of one model")
    }

    pub fn save_usage(&self) {
        self.server().save_usage();
    }

    pub fn key(&self, key: &str) -> Self {
        Self { key: Some(key.into()), ..self.clone() }
    }

    /// On the second listener.
    pub fn admin(&self, key: &str) -> Self {
        Self { router: self.server().admin_router(), ..self.key(key) }
    }

    pub async fn send(&self, request: HttpRequest<Body>) -> Response<Body> {
        self.router.clone().oneshot(request).await.unwrap()
    }

    pub fn request(&self, method: &str, path: &str, body: impl Into<Body>) -> HttpRequest<Body> {
        let mut builder = HttpRequest::builder().method(method).uri(path);
        if let Some(key) = &self.key {
            builder = builder.header("authorization", format!("Bearer {key}"));
        }
        if method == "POST" {
            builder = builder.header("content-type", "application/json");
        }
        builder.body(body.into()).unwrap()
    }

    pub async fn get(&self, path: &str) -> Reply {
        reply(self.send(self.request("GET", path, Body::empty())).await).await
    }

    pub async fn post(&self, path: &str, body: &Value) -> Reply {
        reply(self.send(self.request("POST", path, body.to_string())).await).await
    }

    pub async fn request_delete(&self, path: &str) -> Reply {
        reply(self.send(self.request("DELETE", path, Body::empty())).await).await
    }

    /// A chat with one user message "hi" and these further parameters.
    pub async fn chat(&self, extra: Value) -> Reply {
        self.post(
            "/v1/chat/completions",
            &merged(json!({"messages": [{"role": "user", "content": "hi"}]}), extra),
        )
        .await
    }

    /// A completion of "hi" with these further parameters.
    pub async fn complete(&self, extra: Value) -> Reply {
        self.post("/v1/completions", &merged(json!({"prompt": "hi"}), extra)).await
    }

    /// The value of a metric line that starts with `name` and contains all `labels`.
    pub async fn metric(&self, name: &str, labels: &[&str]) -> f64 {
        let page = self.get("/metrics").await.text;
        let line = page.lines().find(|line| {
            line.strip_prefix(name).is_some_and(|rest| rest.starts_with(['{', ' ']))
                && labels.iter().all(|label| line.contains(label))
        });
        let line = line.unwrap_or_else(|| panic!("no {name} {labels:?} in\n{page}"));
        line.rsplit_once(' ').unwrap().1.parse().unwrap()
    }
}

pub async fn reply(response: Response<Body>) -> Reply {
    let (parts, body) = response.into_parts();
    let bytes = to_bytes(body, usize::MAX).await.unwrap();
    Reply { status: parts.status, headers: parts.headers, text: String::from_utf8(bytes.to_vec()).unwrap() }
}

pub fn merged(mut base: Value, extra: Value) -> Value {
    for (name, value) in extra.as_object().unwrap() {
        base[name] = value.clone();
    }
    base
}
