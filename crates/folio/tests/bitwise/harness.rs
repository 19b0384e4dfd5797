//! Drives the real scheduler, cache and CPU backend step by step and records a hash of the logits of *every computed row*,
//! prompt rows included.
//!
//! A computed row is identified by what it is: the tokens up to it. So a run is checked against an oracle without knowing
//! which sequence is whose: every sequence the executor saw must agree, token for token and bit for bit, with one of the
//! requests run alone.

mod oracle;
mod recorder;

use std::num::NonZeroU32;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, mpsc};

use folio_cpu::{CpuBackend, CpuOptions};
use folio_cuda::CudaBackend;
use folio_engine::plan::{ExecutorError, StepOutput, StepPlan};
use folio_engine::{
    AdapterId, AdapterReport, Clock, DrafterModel, Drafters, DraftingExecutor, EmbeddingRange, Event,
    Executor, Micros, ModelExecutor, Pooling, Reads, Report, Request, RequestAdapter, RequestId, Rules as _,
    RulesRef, SamplingParams, Scheduler, SchedulerConfig, Speculation, StepDriver, Tier, TierStats,
    TransferOrder, find_in_tiers, turn,
};
use folio_kv::{CacheConfig, GroupConfig, Identity, KvCache, Layout, Root, TenantId, TierId, default_policy};
use folio_model::Checkpoint;
use folio_model::adapter::{Adapter, AdapterLimits};
use folio_model::backend::Backend;
use folio_model::draft_head::DraftHead;
use folio_model::testing::{adapter, adapters, heads};
use folio_model::{eagle, mtp};
use folio_sim::Pipeline;
use folio_sim::rules::{HashRules, Late};
use folio_tiers::io::Folder;
use folio_tiers::{DiskConfig, DiskStore, HostStore, Store, StoreTier, WallClock};

pub use oracle::{Drafter, Oracle, SCRIPTS, Script};
pub use recorder::{On, Recorder, Setup, runs, windows};

use recorder::{Row, changed, longer, longer_of, options};

pub const BLOCK_TOKENS: u32 = 16;
pub const MAX_LEN: u32 = 512;
/// A fixture of each kind of layer: attention to everything and through windows, a mixture of experts, states, short convolutions, latents.
pub const KINDS: [&str; 10] = [
    "llama3",
    "gemma3",
    "qwen3_moe",
    "qwen3_next",
    "nemotron_h",
    "deepseek_v3",
    "llama4_text",
    "granite4_h",
    "gemma4",
    "lfm2",
];
const MAX_ROWS: usize = 512;

/// A tier's clock. Leases are as long as steps of a thousand microseconds make them, which a busy machine does not keep to.
struct Still;

impl Clock for Still {
    fn now(&self) -> Micros {
        Micros(0)
    }
}

/// The loop's surroundings: steps of a thousand microseconds.
struct Device<'a> {
    executor: Box<dyn Executor + 'a>,
    now: u64,
    tiers: &'a [Arc<dyn Tier>],
    /// Orders of this turn, and the tiers of loads.
    ordered: usize,
    loaded_from: Vec<u8>,
}

impl StepDriver for Device<'_> {
    fn now(&mut self) -> Micros {
        Micros(self.now)
    }

    fn begin(&mut self, plan: &StepPlan, _: &Scheduler, _: &mut KvCache) {
        self.executor.begin(plan).expect("a plan that can be begun");
    }

    fn finish(&mut self) -> (Micros, Result<&StepOutput, ExecutorError>) {
        (Micros(self.now + 999), self.executor.finish())
    }

    fn order(&mut self, order: TransferOrder) -> bool {
        // Each of these ends with a report.
        self.ordered += usize::from(matches!(order, TransferOrder::Load(_) | TransferOrder::Store(_)));
        if let TransferOrder::Load(load) = &order {
            self.loaded_from.push(load.tier.0);
        }
        let takes = self.tiers[usize::from(order.tier().0)].order(order);
        assert!(takes, "little is to do");
        true
    }
}

/// An executor that a [`World`] keeps.
struct Lent<'a, E>(&'a mut E);

impl<E: Executor> Executor for Lent<'_, E> {
    fn begin(&mut self, plan: &StepPlan) -> Result<(), ExecutorError> {
        self.0.begin(plan)
    }

    fn begin_with_drafts(&mut self, plan: &StepPlan, drafts: &[u32]) -> Result<(), ExecutorError> {
        self.0.begin_with_drafts(plan, drafts)
    }

    fn finish(&mut self) -> Result<&StepOutput, ExecutorError> {
        self.0.finish()
    }
}

/// A request and the step at which it arrives.
#[derive(Clone, Debug)]
pub struct Arrival {
    pub step: u64,
    pub prompt: Vec<u32>,
    pub max_tokens: u32,
    /// Any token ends it.
    pub brief: bool,
    /// Seed of rules that its answer must follow.
    pub rules: Option<u64>,
    /// A vector is wanted instead of tokens.
    pub pooling: Option<Pooling>,
    /// How its tokens are drawn, where that is not the most probable each time.
    pub sampling: Option<SamplingParams>,
    /// A token that ends it.
    pub stop: Option<u32>,
    /// Which of [`World::adapters`] it asks for.
    pub adapter: Option<usize>,
    /// What stands in the places of some of its prompt's tokens.
    pub embeddings: Option<Arc<[EmbeddingRange]>>,
}

impl Arrival {
    pub fn new(prompt: Vec<u32>, max_tokens: u32) -> Self {
        let (step, brief, rules, pooling) = (0, false, None, None);
        let (sampling, stop, adapter, embeddings) = (None, None, None, None);
        Self { step, prompt, max_tokens, brief, rules, pooling, sampling, stop, adapter, embeddings }
    }

    /// What becomes of the rows of a prompt.
    pub fn pooled(prompt: Vec<u32>, pooling: Pooling) -> Self {
        Self { pooling: Some(pooling), ..Self::new(prompt, 0) }
    }

    /// A token that its rules, if it has any, forbid behind an answer.
    fn forbidden(&self, said: &[u32], vocab: u32) -> Option<u32> {
        let rules = HashRules { seed: self.rules?, ends: false, late: None };
        let mut logits = vec![0.0; vocab as usize];
        rules.guide(said).restrict(&[], &mut logits).expect("rules that never end");
        logits.iter().position(|logit| *logit < 0.0).map(|token| token as u32)
    }

    /// Could be long and is not: what admission learns from.
    pub fn brief(prompt: Vec<u32>) -> Self {
        Self { brief: true, ..Self::new(prompt, 50) }
    }
}

/// Of a token: the bits of its log probability, its rank, and ids and bits of the alternatives.
pub type LogprobBits = (u32, u32, Vec<(u32, u32)>);

/// What a run gave.
#[derive(Debug, Default)]
pub struct Run {
    /// Generated tokens of each arrival, in order.
    pub tokens: Vec<Vec<u32>>,
    /// What is reported of each beside its id, where that is wanted.
    pub logprobs: Vec<Vec<LogprobBits>>,
    /// The bits of its vector, where one was wanted.
    pub vectors: Vec<Vec<u32>>,
    /// Prompt tokens of each that were found in the cache.
    pub cached: Vec<u32>,
    /// Every sequence's computed rows, in no particular order.
    pub rows: Vec<Vec<Row>>,
    pub preemptions: u32,
    /// Of those, given to a tier to keep.
    pub kept: u64,
    /// Tokens computed again.
    pub recomputed: u64,
    pub steps: u64,
    /// Of those, begun while others were under way.
    pub ahead: u64,
    /// Rows that were under way when their sequence ended.
    pub orphans: u64,
    /// Drafts that were verified, and those that were right.
    pub drafts: (u64, u64),
    /// Rows whose mask was late.
    pub late: u64,
    /// Times that weights of an adapter were read.
    pub adapter_loads: u64,
    /// Whether what a tier was asked for arrived, for each load.
    pub loads: Vec<bool>,
    /// The tier of each load.
    pub loaded_from: Vec<u8>,
}

/// One engine's bookkeeping around a [`Recorder`].
pub struct World {
    pub recorder: Recorder,
    cache: KvCache,
    root: Root,
    depth: usize,
    lag: usize,
    drafter: Option<Drafter>,
    adapters: Vec<RequestAdapter>,
    /// Where each request's drafts come from.
    speculation: Vec<Speculation>,
    /// A model that proposes drafts.
    draft: Option<(ModelExecutor, DrafterModel)>,
    /// Time of the steps, where masks may be late.
    late: Option<Arc<AtomicU64>>,
    /// Where KV is kept off the device, the nearest first, and what they report.
    tiers: Vec<Arc<dyn Tier>>,
    reports: (mpsc::Sender<Report>, mpsc::Receiver<Report>),
}

impl World {
    pub fn new(fixture: &str, setup: Setup, blocks: u32) -> Self {
        Self::of(Recorder::load(fixture, setup, blocks), blocks)
    }

    /// A fixture whose decoder has another configuration.
    pub fn changed(
        fixture: &str,
        change: impl FnOnce(&mut serde_json::Value),
        setup: Setup,
        blocks: u32,
    ) -> Self {
        let checkpoint = changed(&folio_model::testing::fixture(fixture), change);
        Self::of(Recorder::load_tapped(&checkpoint, fixture, setup, blocks, None), blocks)
    }

    /// The model of an EAGLE-3 head (`testing::heads`), which proposes drafts for those that want a model's; its KV has `of_head` blocks.
    pub fn with_head(name: &str, setup: Setup, blocks: u32, of_head: u32) -> Self {
        let checkpoint = longer(&heads::target(name));
        let head = eagle::Head::open(&heads::head(name), &checkpoint).expect("a head");
        Self::drafted_by(&head, &checkpoint, name, setup, [blocks, of_head])
    }

    /// A model with an MTP head (`testing::heads`), likewise.
    pub fn with_mtp(name: &str, setup: Setup, blocks: u32, of_head: u32) -> Self {
        let checkpoint = longer_of(&heads::with_mtp(name));
        let head = mtp::Head::open(&checkpoint).expect("a sound head").expect("a head");
        Self::drafted_by(&head, &checkpoint, name, setup, [blocks, of_head])
    }

    fn drafted_by(
        head: &dyn DraftHead,
        checkpoint: &Checkpoint,
        name: &str,
        setup: Setup,
        [blocks, of_head]: [u32; 2],
    ) -> Self {
        let mut world = Self::of(Recorder::load_tapped(checkpoint, name, setup, blocks, Some(head)), blocks);
        let mut backend: Box<dyn Backend> = match setup.on {
            On::Cpu => {
                let options = CpuOptions { threads: Some(setup.threads), isa: setup.isa };
                Box::new(CpuBackend::new(options).expect("a backend"))
            }
            On::Device(order) | On::Library(order) => {
                Box::new(CudaBackend::new(folio_emulator::device(order)).expect("a backend"))
            }
        };
        let loaded = head.load(checkpoint, &mut *backend, &options(setup, None)).expect("a head loads");
        backend.allocate_cache(&loaded.kv_layout, &[of_head as usize]).expect("a cache");
        let drafter = ModelExecutor::new(backend, loaded.vocab, MAX_ROWS, MAX_ROWS);
        let drafter = match loaded.token_ids {
            Some(ids) => drafter.with_token_ids(ids, world.recorder.vocab),
            None => drafter,
        };
        world.draft_with(drafter, Reads::Features { width: head.width() }, of_head, &[]);
        world
    }

    fn of(recorder: Recorder, blocks: u32) -> Self {
        let cache = empty_cache(blocks, &recorder.windows);
        Self {
            recorder,
            cache,
            root: root(),
            depth: 1,
            lag: 1,
            drafter: None,
            adapters: Vec::new(),
            speculation: Vec::new(),
            draft: None,
            late: None,
            tiers: Vec::new(),
            reports: mpsc::channel(),
        }
    }

    /// From now on so many steps may be under way, choices are used `lag` steps later, and drafts are verified.
    pub fn overlap(&mut self, depth: usize, lag: usize, drafter: Option<Drafter>) {
        (self.depth, self.lag, self.drafter) = (depth, lag, drafter);
    }

    /// From now on requests may ask for these adapters (`testing::ADAPTERS`) of the fixture.
    pub fn adapters(&mut self, names: &[&str]) {
        self.adapters = self.read_adapters(names.iter().map(|name| adapter(name)));
    }

    /// From now on requests may ask for so many adapters that are made for this.
    pub fn make_adapters(&mut self, count: usize) {
        let made = (0..count).map(|seed| {
            let folder = tempfile::tempdir().expect("a folder");
            adapters::write_adapter(folder.path(), &self.recorder.targets, seed as u64 + 1);
            folder
        });
        self.adapters = self.read_adapters(made);
    }

    fn read_adapters(&self, folders: impl Iterator<Item = impl AsRef<Path>>) -> Vec<RequestAdapter> {
        let limits = AdapterLimits { rank: 64, bytes: 4 << 20 };
        let read = |(id, folder): (u32, _)| {
            let weights = Adapter::read(AsRef::as_ref(&folder), &self.recorder.targets, limits);
            RequestAdapter {
                id: AdapterId(NonZeroU32::MIN.saturating_add(id)),
                source: Arc::new(Arc::new(weights.expect("an adapter"))),
            }
        };
        (0..).zip(folders).map(read).collect()
    }

    /// From now on requests are speculated on like this.
    pub fn speculate(&mut self, speculation: Vec<Speculation>) {
        self.speculation = speculation;
    }

    /// From now on the model of a fixture proposes drafts for those that want a model's; each of its cache groups has so many blocks.
    /// `threads` and weights are as in `setup`.
    pub fn draft_by(&mut self, fixture: &str, setup: Setup, blocks: u32) {
        let Recorder { backend, vocab, windows, .. } = Recorder::load(fixture, setup, blocks);
        let drafter = ModelExecutor::new(backend, vocab, MAX_ROWS, MAX_ROWS);
        self.draft_with(drafter, Reads::Tokens, blocks, &windows);
    }

    /// `windows`: its cache groups beside full attention. What lies behind a window is kept.
    fn draft_with(&mut self, drafter: ModelExecutor, reads: Reads, blocks: u32, windows: &[GroupConfig]) {
        let config = *self.cache.config();
        let own = GroupConfig { blocks, optional: true, ..config.first_group() };
        let more = windows.iter().map(|window| {
            let layout = if window.layout == Layout::State { Layout::State } else { Layout::Paged };
            GroupConfig { layout, blocks, optional: true, ..*window }
        });
        let of_drafter: Vec<GroupConfig> = [own].into_iter().chain(more).collect();
        let of_model =
            self.recorder.windows.iter().map(|window| GroupConfig { blocks: config.blocks, ..*window });
        let groups: Vec<GroupConfig> = of_model.chain(of_drafter.iter().copied()).collect();
        self.cache = KvCache::with_groups(config, &groups, default_policy(0.01));
        let as_drafter = DrafterModel {
            group: 1 + self.recorder.windows.len(),
            groups: of_drafter.len(),
            block_tokens: own.block_tokens,
            positions: MAX_LEN,
            reads,
        };
        self.draft = Some((drafter, as_drafter));
    }

    /// From now on no mask is late.
    pub fn on_time(&mut self) {
        self.late = None;
    }

    /// From now on masks are late behind one token in three, by up to six steps.
    pub fn late_masks(&mut self) {
        self.late = Some(Arc::default());
    }

    pub fn keeping_in_memory(mut self, blocks: u32) -> Self {
        self.keep_in_memory(blocks);
        self
    }

    /// From now on with memory for so many blocks of each group beside the cache, which has none yet. Here copying takes no time and a step
    /// does, so whoever is preempted is kept there.
    pub fn keep_in_memory(&mut self, blocks: u32) {
        let memory = self.recorder.backend.block_memory().expect("memory that can be read");
        let bytes: usize = (0..=self.recorder.windows.len()).map(|group| memory.block_bytes(group)).sum();
        self.tiers.clear();
        self.keep_in(HostStore::new(u64::from(blocks) * bytes as u64, WallClock::default()));
    }

    /// From now on KV of what ends is kept in `dir`, at most `bytes` of it, and loaded where it is missed.
    pub fn keep_on_disk(&mut self, dir: &Path, bytes: u64) {
        self.tiers.clear();
        self.keep_behind(dir, bytes);
    }

    /// The same, in somebody else's files of `dir`.
    pub fn keep_in_folder(&mut self, folder: Arc<dyn Folder>, dir: &Path, bytes: u64) {
        let store = DiskStore::open_in(DiskConfig::new(dir, bytes, [3; 32]), folder).expect("a store");
        store.wait_indexed();
        self.tiers.clear();
        self.keep_in(store);
    }

    /// The same, in a tier that is farther than those there are.
    pub fn keep_behind(&mut self, dir: &Path, bytes: u64) {
        let store = DiskStore::open(DiskConfig::new(dir, bytes, [3; 32])).expect("a store");
        store.wait_indexed();
        self.keep_in(store);
    }

    fn keep_in(&mut self, store: Arc<dyn Store>) {
        let memory = self.recorder.backend.block_memory().expect("memory that can be read");
        let groups = (0..self.cache.groups()).map(|group| *self.cache.group_config(group));
        let groups = groups.filter(|group| !group.optional).collect();
        let tier = StoreTier::new(store, memory, groups, 2).expect("threads");
        let told = Mutex::new(self.reports.0.clone());
        let report = move |report| told.lock().expect("no panic").send(report).expect("somebody listens");
        tier.start(Box::new(report), Arc::new(Still), None);
        self.tiers.push(Arc::new(tier));
    }

    /// What the nearest tier did.
    pub fn tier_stats(&self) -> TierStats {
        self.tiers[0].stats()
    }

    /// From now on everybody's requests are another tenant's.
    pub fn change_tenant(&mut self) {
        self.root = root_of(TenantId(1), [8; 32]);
    }

    /// From now on everybody's requests may begin with `tokens`, which an operator declared to be shared and somebody else
    /// computed.
    pub fn declare(&mut self, tokens: &[u32]) {
        let own = std::mem::replace(&mut self.root, root_of(TenantId(9), [9; 32]));
        self.run(&whole(), &[Arrival::new(tokens.to_vec(), 1)]);
        self.root = own.below(&self.root, tokens, BLOCK_TOKENS);
    }

    /// Forgets all cached content; the KV bytes stay as stale as they are.
    pub fn forget(&mut self) {
        self.cache.clear(None);
    }

    pub fn run(&mut self, config: &SchedulerConfig, arrivals: &[Arrival]) -> Run {
        self.run_disturbed(config, arrivals, &mut |_, _, _| {})
    }

    /// `disturb` may act on the scheduler and the cache before each step.
    pub fn run_disturbed(
        &mut self,
        config: &SchedulerConfig,
        arrivals: &[Arrival],
        disturb: &mut dyn FnMut(u64, &mut Scheduler, &mut KvCache),
    ) -> Run {
        let scheduler = Scheduler::new(config.clone()).expect("a valid configuration");
        let mut scheduler = scheduler.with_overlap(self.depth, self.lag);
        let mut drafters = Drafters::default();
        let preempted_in = self.tiers.iter().position(|tier| tier.swaps());
        scheduler = scheduler
            .with_tiers(self.tiers.iter().map(|tier| tier.chunk_blocks()))
            .swapping_to(preempted_in.map(|at| TierId(at as u8)));
        let mut run =
            Run { tokens: vec![vec![]; arrivals.len()], cached: vec![0; arrivals.len()], ..Run::default() };
        run.vectors = run.tokens.clone();
        run.logprobs = vec![vec![]; arrivals.len()];
        let vocab = self.recorder.vocab();
        let requests: Vec<Request> =
            arrivals.iter().enumerate().map(|(id, arrival)| self.request(id, arrival)).collect();
        let pipeline = Pipeline::new(Lent(&mut self.recorder), self.depth, self.lag);
        let executor: Box<dyn Executor> = match &mut self.draft {
            Some((drafter, as_drafter)) => {
                Box::new(DraftingExecutor::new(pipeline, Lent(drafter), *as_drafter, vocab))
            }
            None => Box::new(pipeline),
        };
        scheduler = scheduler.with_drafter(executor.drafter()).with_vocab(vocab);
        // They come with their weights, of which stays what there is room for.
        for adapter in &self.adapters {
            let report = AdapterReport { id: adapter.id, weights: adapter.source.read() };
            scheduler.adapter_read(&mut self.cache, report, Micros(0));
        }
        let (ordered, loaded_from) = (0, Vec::new());
        let mut device = Device { executor, now: 0, tiers: &self.tiers, ordered, loaded_from };
        let mut finished = 0;
        while finished < arrivals.len() || scheduler.under_way() {
            assert!(run.steps < 20_000, "no progress");
            device.now = run.steps * 1000;
            self.late.iter().for_each(|clock| clock.store(device.now, Ordering::Relaxed));
            disturb(run.steps, &mut scheduler, &mut self.cache);
            let due = requests.iter().zip(arrivals).filter(|(_, arrival)| arrival.step == run.steps);
            let due = due.map(|(request, _)| {
                let (request, hashes) = request.clone().hashed(BLOCK_TOKENS);
                let most = (request.prompt.len() as u32 - 1) / BLOCK_TOKENS;
                let stored = find_in_tiers(&self.tiers, &hashes, most);
                (request, hashes.with_stored(stored))
            });
            let due = due.inspect(|(request, _)| drafters.open(request));
            scheduler.admit(due, [], Micros(device.now));
            drafters.propose(&mut scheduler);
            if let Some(drafter) = &self.drafter {
                drafter.propose(run.steps, vocab, &run, arrivals, &mut scheduler);
            }
            let events = turn(&mut scheduler, &mut self.cache, &mut device);
            drafters.follow(events);
            for (id, event) in events.drain(..) {
                let id = id.0 as usize;
                match event {
                    Event::Prompt { cached_tokens, .. } => run.cached[id] = cached_tokens,
                    Event::Token { token, .. } => {
                        run.tokens[id].push(token.id);
                        run.logprobs[id].extend(token.logprobs.map(|own| {
                            let top = own.top.iter().map(|(token, logprob)| (*token, logprob.to_bits()));
                            (own.logprob.to_bits(), own.rank, top.collect())
                        }));
                    }
                    Event::Pooled { vector } => {
                        run.vectors[id] = vector.iter().map(|value| value.to_bits()).collect();
                    }
                    Event::Finished { timing, error, .. } => {
                        assert_eq!(error, None);
                        run.preemptions += timing.preemptions;
                        finished += 1;
                    }
                }
            }
            for report in self.reports.1.iter().take(std::mem::take(&mut device.ordered)) {
                match report {
                    Report::Loaded { ticket, verified, .. } => {
                        run.loads.push(verified);
                        scheduler.end_load(&mut self.cache, ticket, verified, Micros(device.now));
                    }
                    Report::Cancelled { ticket } => {
                        scheduler.end_load(&mut self.cache, ticket, false, Micros(device.now));
                    }
                    Report::Read { lease, kept } => {
                        let now = Micros(device.now);
                        assert!(scheduler.end_store(&mut self.cache, lease, kept, now));
                    }
                }
            }
            scheduler.check(&self.cache).expect("the books balance");
            run.steps += 1;
        }
        run.loaded_from = std::mem::take(&mut device.loaded_from);
        drop(device);
        run.rows = self.recorder.take();
        run.kept = scheduler.counters().preemptions_swapped;
        let counters = scheduler.counters();
        (run.recomputed, run.ahead, run.orphans) =
            (counters.recomputed_tokens, counters.steps_ahead, counters.orphan_rows);
        run.late = counters.late_rows;
        run.adapter_loads = counters.adapter_loads;
        run.drafts = counters.draft_tokens();
        assert_eq!(self.cache.stats().active_blocks, 0, "everybody is gone, and nothing is read");
        run
    }

    fn request(&self, id: usize, arrival: &Arrival) -> Request {
        let greedy = SamplingParams::greedy(arrival.max_tokens);
        let mut sampling = arrival.sampling.clone().unwrap_or(greedy);
        if let Some(stop) = arrival.stop {
            // The model's own end, or the request's.
            let own = id.is_multiple_of(2);
            *(if own { &mut sampling.stop_token_ids } else { &mut sampling.eos_token_ids }) =
                Arc::new([stop]);
        }
        let late = || Late { clock: self.late.clone(), longest_us: 6000, never_one_in: 0 };
        let late = self.late.is_some().then(late);
        let rules = |seed| HashRules { seed, ends: false, late: late.clone() };
        sampling.rules = arrival.rules.map(|seed| RulesRef(Arc::new(rules(seed))));
        if arrival.brief {
            sampling.stop_token_ids = (0..self.recorder.vocab()).collect::<Vec<u32>>().into();
        }
        let prompt = arrival.prompt.clone().into();
        let adapter = arrival.adapter.map(|at| self.adapters[at].clone());
        let root = match &adapter {
            Some(adapter) => root_with(TenantId(1), [1; 32], adapter.source.digest()),
            None => self.root,
        };
        Request {
            pooling: arrival.pooling,
            speculation: self.speculation.get(id).cloned(),
            adapter,
            embeddings: arrival.embeddings.clone(),
            ..Request::new(RequestId(id as u64), TenantId(1), root, prompt, sampling)
        }
    }
}

/// One sequence at a time, prompts in one chunk.
pub fn whole() -> SchedulerConfig {
    SchedulerConfig { max_num_seqs: 1, max_num_batched_tokens: MAX_ROWS as u32, ..batched(1) }
}

/// One sequence at a time, at most `tokens` tokens a step.
pub fn chunked(tokens: u32) -> SchedulerConfig {
    SchedulerConfig { max_num_batched_tokens: tokens, ..whole() }
}

/// Up to `seqs` sequences in a step.
pub fn batched(seqs: u32) -> SchedulerConfig {
    SchedulerConfig {
        max_num_seqs: seqs,
        max_num_batched_tokens: MAX_ROWS as u32,
        max_prefill_tokens_while_decoding: 64,
        max_model_len: MAX_LEN,
        max_adapters: 4,
        ..SchedulerConfig::default()
    }
}

/// Pseudo-random tokens, the same for the same seed.
pub fn prompt(seed: u64, len: usize, vocab: u32) -> Vec<u32> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    (0..len)
        .map(|_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 33) as u32 % vocab
        })
        .collect()
}

/// Whether this one of several cases is this fixture's: each has a third of them, by turns, so that three in a row have all.
/// `FOLIO_TEST_EXHAUSTIVE` gives each all.
pub fn in_turn(fixture: usize, case: usize) -> bool {
    (fixture + case).is_multiple_of(3) || std::env::var_os("FOLIO_TEST_EXHAUSTIVE").is_some()
}

/// As many blocks for each window group as for group 0.
pub fn empty_cache(blocks: u32, windows: &[GroupConfig]) -> KvCache {
    let config = CacheConfig { blocks, block_tokens: BLOCK_TOKENS, bytes_per_block: 1 };
    let windows: Vec<GroupConfig> = windows.iter().map(|window| GroupConfig { blocks, ..*window }).collect();
    KvCache::with_groups(config, &windows, default_policy(0.01))
}

fn root() -> Root {
    root_of(TenantId(1), [1; 32])
}

pub fn root_of(tenant: TenantId, secret: [u8; 32]) -> Root {
    root_with(tenant, secret, &[])
}

fn root_with(tenant: TenantId, secret: [u8; 32], extra: &[u8]) -> Root {
    Root::derive(&Identity {
        tenant,
        tenant_secret: &secret,
        model_digest: &[2; 32],
        layout_digest: &[3; 32],
        extra,
    })
}
