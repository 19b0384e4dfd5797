//! Drives the real scheduler, cache and CPU backend step by step and records a hash of the logits of *every computed row*,
//! prompt rows included.
//!
//! A computed row is identified by what it is: the tokens up to it. So a run is checked against an oracle without knowing
//! which sequence is whose: every sequence the executor saw must agree, token for token and bit for bit, with one of the
//! requests run alone.

use std::collections::{BTreeMap, HashMap};
use std::num::NonZeroU32;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, mpsc};

use folio_cpu::{CpuBackend, CpuOptions, Isa, Quantize};
use folio_cuda::CudaBackend;
use folio_emulator::Order;
use folio_engine::plan::{
    ExecutorError, PLACEHOLDER, SamplePlan, Sampled, SequenceId, StepOutput, StepPlan, Want,
};
use folio_engine::{
    AdapterId, Clock, DRAFTS_MAX, DrafterModel, Drafters, DraftingExecutor, Driver, Event, Executor, Micros,
    ModelExecutor, Pooling, Reads, Report, Request, RequestAdapter, RequestId, Rules as _, RulesRef, Sampler,
    SamplingParams, Scheduler, SchedulerConfig, Speculation, Tier, TierStats, TransferOrder, find_in_tiers,
    turn,
};
use folio_kv::{CacheConfig, GroupConfig, Identity, KvCache, Layout, Root, TenantId, TierId, default_policy};
use folio_model::adapter::{Adapter, AdapterLimits, AdapterTargets};
use folio_model::backend::{Backend, Batch, GroupKind, KvFormat, KvGroup, KvLayout, Span};
use folio_model::draft_head::DraftHead;
use folio_model::kv_format::{KvFormats, KvSkip};
use folio_model::testing::{adapter, heads};
use folio_model::{Checkpoint, LoadOptions, LoadedModel, Model, eagle, mtp};
use folio_sim::Pipeline;
use folio_sim::rules::{HashRules, Late};
use folio_tiers::{DiskConfig, DiskStore, HostStore, Store, StoreTier, WallClock};

use folio_model::testing::recast::{Cast, Recast};

pub const BLOCK_TOKENS: u32 = 16;
pub const MAX_LEN: u32 = 512;
/// A fixture of each kind of layer: attention to everything and through windows, a mixture of experts, states, latents.
pub const KINDS: [&str; 9] = [
    "llama3",
    "gemma3",
    "qwen3_moe",
    "qwen3_next",
    "nemotron_h",
    "deepseek_v3",
    "llama4_text",
    "granite4_h",
    "gemma4",
];
const MAX_ROWS: usize = 512;

/// What computes.
#[derive(Clone, Copy, Debug)]
pub enum On {
    Cpu,
    /// A GPU, where there is one; else its kernels on the host, threads in this order.
    Device(Order),
    /// The same, where a library multiplies what it may.
    Library(Order),
}

/// Which arithmetic to run.
#[derive(Clone, Copy, Debug)]
pub struct Setup {
    pub on: On,
    pub threads: usize,
    pub isa: Option<Isa>,
    pub kv: KvFormat,
    /// The first layer keeps f16.
    pub mixed: bool,
    /// Converts the checkpoint's weights while loading.
    pub weights: Cast,
    /// Quantizes them while loading, where the columns are whole blocks.
    pub quantize: Option<Quantize>,
    /// Blocks of window groups have so many times the tokens.
    pub window_blocks: u32,
}

impl Setup {
    pub const PLAIN: Setup = Setup {
        on: On::Cpu,
        threads: 2,
        isa: None,
        kv: KvFormat::F16,
        mixed: false,
        weights: Cast::Keep,
        quantize: None,
        window_blocks: 1,
    };
}

/// (position, token, hash of the logits row at that position)
type Row = (u32, u32, u64);

/// Whether this machine has the instruction set.
pub fn runs(isa: Isa) -> bool {
    CpuBackend::new(CpuOptions { threads: Some(1), isa: Some(isa) }).is_ok()
}

/// The backend, and what it computed since the last [`Recorder::take`].
pub struct Recorder {
    backend: Box<dyn Backend>,
    /// Whether the hidden state of every row is wanted in every step, or only where a request wants one: steps that want none may be
    /// run from a graph.
    all_hidden: bool,
    /// The cache groups beside full attention.
    windows: Vec<GroupConfig>,
    quantized: usize,
    vocab: usize,
    targets: AdapterTargets,
    batch: Batch,
    output: StepOutput,
    sampler: Sampler,
    rows: HashMap<SequenceId, BTreeMap<u32, Row>>,
}

impl Recorder {
    pub fn load(fixture: &str, setup: Setup, blocks: u32) -> Self {
        Self::load_tapped(&longer(fixture), fixture, setup, blocks, None)
    }

    /// With features for a head, if there is one.
    fn load_tapped(
        checkpoint: &Checkpoint,
        fixture: &str,
        setup: Setup,
        blocks: u32,
        taps: Option<&dyn DraftHead>,
    ) -> Self {
        let options = options(setup, taps);
        let (mut backend, mut model, quantized) = match setup.on {
            On::Cpu => {
                let options_of_cpu = CpuOptions { threads: Some(setup.threads), isa: setup.isa };
                let mut backend = CpuBackend::new(options_of_cpu).expect("a backend");
                if let Some(to) = setup.quantize {
                    backend.quantize_weights(to);
                }
                let (backend, model, recast) = load(checkpoint, backend, setup.weights, options);
                let quantized = backend.quantized().matrices + recast;
                (Box::new(backend) as Box<dyn Backend>, model, quantized)
            }
            On::Device(order) | On::Library(order) => {
                let library = matches!(setup.on, On::Library(_));
                let driver = match library {
                    true => folio_emulator::device_with_library(order),
                    false => folio_emulator::device(order),
                };
                let backend = CudaBackend::new(driver).expect("a backend");
                let (backend, model, recast) = load(checkpoint, backend, setup.weights, options);
                // On a GPU the library may be too old for a type of weights.
                let given = backend.given_to_a_library() > 0;
                assert!(given == library || backend.device().name != "emulator", "{fixture}");
                (Box::new(backend) as Box<dyn Backend>, model, recast)
            }
        };
        for group in model.kv_layout.groups.iter_mut().skip(1) {
            // States are kept as often as may be, so that there is much to go on from.
            let tokens =
                if group.state_values().is_some() { BLOCK_TOKENS as usize } else { group.block_tokens };
            group.block_tokens = tokens * setup.window_blocks as usize;
        }
        backend
            .allocate_cache(&model.kv_layout, &vec![blocks as usize; model.kv_layout.groups.len()])
            .expect("a cache");
        let vocab = model.vocab;
        Self {
            backend,
            all_hidden: matches!(setup.on, On::Cpu),
            windows: windows(&model.kv_layout),
            quantized,
            vocab,
            targets: model.targets,
            batch: Batch::default(),
            output: StepOutput::default(),
            sampler: Sampler::default(),
            rows: HashMap::new(),
        }
    }

    /// Matrices that became blocks while loading.
    pub fn quantized(&self) -> usize {
        self.quantized
    }

    pub fn vocab(&self) -> u32 {
        self.vocab as u32
    }

    /// Of a prefix of so many tokens, what can be gone on from behind a text that was computed on: all, or up to the last kept state.
    pub fn kept(&self, tokens: u32) -> u32 {
        let states = self.windows.iter().filter(|group| group.layout == Layout::State);
        states.fold(tokens, |tokens, group| tokens - tokens % group.block_tokens)
    }

    /// Whether some layers look back only so far, or keep states.
    pub fn has_windows(&self) -> bool {
        !self.windows.is_empty()
    }

    fn take(&mut self) -> Vec<Vec<Row>> {
        self.rows.drain().map(|(_, rows)| rows.into_values().collect()).collect()
    }
}

impl Executor for Recorder {
    fn begin(&mut self, plan: &StepPlan) -> Result<(), ExecutorError> {
        self.begin_with_drafts(plan, &[])
    }

    fn begin_with_drafts(&mut self, plan: &StepPlan, drafts: &[u32]) -> Result<(), ExecutorError> {
        let (batch, groups) = (&mut self.batch, 1 + self.windows.len());
        batch.clear();
        let mut plan = plan.clone();
        let tokens = plan.sequences.iter_mut().flat_map(|sequence| &mut sequence.tokens);
        for token in tokens.filter(|token| **token & PLACEHOLDER != 0) {
            *token = drafts[(*token & !PLACEHOLDER) as usize];
        }
        for copy in plan.copies.iter().filter(|copy| (copy.group as usize) < groups) {
            let (group, from, to, tokens) = (copy.group, copy.from.0, copy.to.0, copy.tokens);
            batch.copies.push(folio_model::backend::BlockCopy { group, from, to, tokens });
        }
        for (slot, sequence) in (0..).zip(&plan.sequences) {
            batch.spans.push(Span {
                first_row: batch.tokens.len() as u32,
                rows: sequence.tokens.len() as u32,
                first_position: sequence.first_position,
                slot,
                tentative_from: sequence.tentative_from().unwrap_or(u32::MAX),
            });
            batch.adapters.push(sequence.adapter.as_ref().map(|adapter| adapter.weights.clone()));
            batch.tokens.extend(&sequence.tokens);
            let end = batch.tokens.len() as u32;
            batch.feature_rows.extend(end - sequence.features..end);
            for (group, table) in (0..).zip(sequence.block_tables.iter().take(groups)) {
                batch.edit_table(slot, group, 0, table.iter().copied());
            }
        }
        if batch.adapters.iter().all(Option::is_none) {
            batch.adapters.clear();
        }
        batch.logit_rows.extend(0..batch.tokens.len() as u32);
        // Of every row too, so that each is judged beside all others.
        let wanted = |sample: &SamplePlan| matches!(sample.want, Want::Hidden | Want::HiddenSum { .. });
        if self.all_hidden || plan.sequences.iter().flat_map(|s| &s.samples).any(wanted) {
            batch.hidden_rows.extend(0..batch.tokens.len() as u32);
        }
        self.output.step = plan.step;
        self.output.samples.clear();
        self.output.drafts = drafts.to_vec();
        self.output.features.clear();
        if batch.tokens.is_empty() {
            return Ok(());
        }
        let logits = self.backend.forward(batch).expect("forward").to_vec();
        let features = batch.feature_rows.iter().flat_map(|row| self.backend.features(*row));
        self.output.features.extend(features);
        let row_of = |row: usize| &logits[row * self.vocab..][..self.vocab];
        for (span, sequence) in batch.spans.iter().zip(&plan.sequences) {
            let seen = self.rows.entry(sequence.id).or_default();
            let first = self.output.samples.len();
            for sample in &sequence.samples {
                let (first, row) = (span.first_row, span.first_row + sample.row);
                let hidden = |row| self.backend.hidden(row);
                self.output.samples.push(match &sample.want {
                    Want::Token(spec) => {
                        self.sampler.sample_behind(sequence.drafts_before(sample), row_of(row as usize), spec)
                    }
                    Want::Hidden => Sampled::Hidden(hidden(row).to_vec()),
                    Want::HiddenSum { first: from, before } => {
                        let mut sum = before.as_deref().map_or(vec![0.0; hidden(row).len()], <[f64]>::to_vec);
                        for row in first + from..=row {
                            sum.iter_mut()
                                .zip(hidden(row))
                                .for_each(|(sum, value)| *sum += f64::from(*value));
                        }
                        Sampled::HiddenSum(sum)
                    }
                    Want::Score { .. } => panic!("these requests want no scores"),
                });
            }
            // Rows of drafts count as far as each is what the row before it chooses, and no end.
            let known = sequence.tokens.len() - sequence.drafts as usize;
            let sampled = &self.output.samples[first..];
            let chosen = |at: usize| matches!(sampled[at], Sampled::Token { id, .. } if id == sequence.tokens[known + at]);
            let ends = |at: usize| match &sequence.samples[at].want {
                Want::Token(spec) => spec.params.stop_token_ids.contains(&sequence.tokens[known + at]),
                _ => false,
            };
            let right = (0..sequence.drafts as usize).take_while(|at| chosen(*at) && !ends(*at));
            let confirmed = known + right.count();
            for (i, token) in sequence.tokens[..confirmed].iter().enumerate() {
                let position = sequence.first_position + i as u32;
                // With another adapter it is another row.
                let adapter = sequence.adapter.as_ref().map_or(0, |adapter| adapter.id.0.get());
                let row = (position, adapter << 24 | *token, hash(row_of(span.first_row as usize + i)));
                // A position computed again (after preemption) must give what it gave before.
                assert_eq!(*seen.entry(position).or_insert(row), row, "recomputed differently");
            }
        }
        Ok(())
    }

    fn finish(&mut self) -> Result<&StepOutput, ExecutorError> {
        Ok(&self.output)
    }
}

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

impl Driver for Device<'_> {
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
        match order {
            TransferOrder::Load(load) => {
                self.loaded_from.push(load.tier.0);
                self.tiers[usize::from(load.tier.0)].load(load);
            }
            TransferOrder::Store(store) => {
                let stores = self.tiers[usize::from(store.tier.0)].store(store);
                assert!(stores, "little is to do");
            }
            TransferOrder::Promote { tier, ticket } => self.tiers[usize::from(tier.0)].promote(ticket),
            TransferOrder::Cancel { tier, ticket } => self.tiers[usize::from(tier.0)].cancel(ticket),
        }
        true
    }
}

/// Says before each step what each answer goes on with, from the last token that was told.
#[derive(Clone)]
pub struct Drafter {
    pub script: Script,
    /// What each arrival says, and would say behind its end.
    pub answers: Vec<Vec<u32>>,
}

/// What a [`Drafter`] says.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Script {
    /// Of so many drafts none to all are right, in turn.
    Mixed(usize),
    /// So many, all right.
    Right(usize),
    /// All wrong.
    Wrong,
    /// Right for so many tokens, then wrong.
    RightFor(usize),
    /// One right, then what is no token, then right ones.
    OutOfVocabulary,
    /// One that the arrival's rules forbid, or else its stop token, then right ones.
    Forbidden,
    /// Two right, then the arrival's stop token, then more.
    EndsInStop,
    /// Right ones and behind them more than the context has room for.
    LongerThanContext,
}

/// Each case that has a name.
pub const SCRIPTS: [Script; 9] = [
    Script::Mixed(3),
    Script::Right(5),
    Script::Wrong,
    Script::RightFor(1),
    Script::RightFor(4),
    Script::OutOfVocabulary,
    Script::Forbidden,
    Script::EndsInStop,
    Script::LongerThanContext,
];

impl Drafter {
    fn propose(&self, step: u64, vocab: u32, run: &Run, arrivals: &[Arrival], scheduler: &mut Scheduler) {
        for (id, (answer, said)) in self.answers.iter().zip(&run.tokens).enumerate() {
            let rest = answer.get(said.len()..).unwrap_or_default();
            let drafts = self.drafts(step as usize + id, vocab, &arrivals[id], said, rest);
            scheduler.propose(RequestId(id as u64), 0, &drafts);
        }
    }

    /// What `rest` makes of an answer that so far is `said`.
    fn drafts(&self, turn: usize, vocab: u32, arrival: &Arrival, said: &[u32], rest: &[u32]) -> Vec<u32> {
        // The first `right` are.
        let of = |right: usize, most: usize| -> Vec<u32> {
            let wrong = |at: usize| u32::from(at >= right);
            rest.iter().take(most).enumerate().map(|(at, token)| (token + wrong(at)) % vocab).collect()
        };
        let stop = arrival.stop.unwrap_or(0);
        let right = |most| of(most, most);
        match self.script {
            Script::Mixed(most) => of((turn + turn / 4) % 4 * most / 3, most),
            Script::Right(most) => right(most),
            Script::Wrong => of(0, 4),
            Script::RightFor(tokens) => of(tokens, tokens + 3),
            Script::OutOfVocabulary => {
                let outside = [vocab, PLACEHOLDER, u32::MAX][turn % 3];
                [&right(1)[..], &[outside], &rest[rest.len().min(2)..]].concat()
            }
            Script::Forbidden => [&[arrival.forbidden(said, vocab).unwrap_or(stop)], &right(3)[..]].concat(),
            Script::EndsInStop => [&right(2)[..], &[stop], &right(3)].concat(),
            Script::LongerThanContext => [&right(usize::MAX)[..], &[1; 4 * MAX_LEN as usize]].concat(),
        }
    }
}

/// What backends are prepared for.
fn options(setup: Setup, taps: Option<&dyn DraftHead>) -> LoadOptions<'_> {
    LoadOptions {
        max_rows: MAX_ROWS,
        max_logit_rows: MAX_ROWS,
        max_model_len: Some(MAX_LEN as usize),
        kv_formats: KvFormats {
            most: setup.kv,
            skipped: KvFormat::F16,
            skip: if setup.mixed { vec![KvSkip::Layer(0)] } else { vec![] },
        },
        block_tokens: BLOCK_TOKENS as usize,
        taps,
        progress: None,
    }
}

/// Loads a checkpoint whose weights are cast; and how many of its matrices became blocks.
fn load<B: Backend>(
    checkpoint: &Checkpoint,
    backend: B,
    cast: Cast,
    options: LoadOptions<'_>,
) -> (B, LoadedModel, usize) {
    let mut recast = Recast { backend, recast: 0, cast };
    let model = Model::load(checkpoint, &mut recast, options).expect("a fixture loads");
    (recast.backend, model, recast.recast)
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
}

impl Arrival {
    pub fn new(prompt: Vec<u32>, max_tokens: u32) -> Self {
        let (step, brief, rules, pooling) = (0, false, None, None);
        Self { step, prompt, max_tokens, brief, rules, pooling, sampling: None, stop: None, adapter: None }
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
        world.draft_with(drafter, Reads::Features { width: head.width() }, of_head);
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
        let limits = AdapterLimits { rank: 64, bytes: 1 << 20 };
        let read = |(id, name): (u32, &&str)| RequestAdapter {
            id: AdapterId(NonZeroU32::MIN.saturating_add(id)),
            weights: Arc::new(
                Adapter::read(&adapter(name), &self.recorder.targets, limits).expect("an adapter"),
            ),
        };
        self.adapters = (0..).zip(names).map(read).collect();
    }

    /// From now on requests are speculated on like this.
    pub fn speculate(&mut self, speculation: Vec<Speculation>) {
        self.speculation = speculation;
    }

    /// From now on the model of a fixture proposes drafts for those that want a model's; its KV has so many blocks. `threads` and weights
    /// are as in `setup`.
    pub fn draft_by(&mut self, fixture: &str, setup: Setup, blocks: u32) {
        let recorder = Recorder::load(fixture, setup, blocks);
        assert!(recorder.windows.is_empty(), "{fixture} has windows");
        let vocab = recorder.vocab;
        self.draft_with(
            ModelExecutor::new(recorder.backend, vocab, MAX_ROWS, MAX_ROWS),
            Reads::Tokens,
            blocks,
        );
    }

    fn draft_with(&mut self, drafter: ModelExecutor, reads: Reads, blocks: u32) {
        let config = *self.cache.config();
        let own = GroupConfig { blocks: config.blocks, ..config.first_group() };
        let windows =
            self.recorder.windows.iter().map(|window| GroupConfig { blocks: own.blocks, ..*window });
        let groups: Vec<GroupConfig> =
            windows.chain([GroupConfig { blocks, optional: true, ..own }]).collect();
        self.cache = KvCache::with_groups(config, &groups, default_policy(0.01));
        let as_drafter =
            DrafterModel { group: groups.len(), block_tokens: own.block_tokens, positions: MAX_LEN, reads };
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
        let pipeline = Pipeline::new(&mut self.recorder, self.depth, self.lag);
        let executor: Box<dyn Executor> = match &mut self.draft {
            Some((drafter, as_drafter)) => {
                Box::new(DraftingExecutor::new(pipeline, drafter, *as_drafter, vocab))
            }
            None => Box::new(pipeline),
        };
        scheduler = scheduler.with_drafter(executor.drafter()).with_vocab(vocab);
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
        run.drafts = counters.draft_tokens();
        assert_eq!(self.cache.stats().active_blocks, 0, "everybody is gone, and nothing is read");
        run
    }

    fn request(&self, id: usize, arrival: &Arrival) -> Request {
        let greedy = SamplingParams::greedy(arrival.max_tokens);
        let mut sampling = arrival.sampling.clone().unwrap_or(greedy);
        if let Some(stop) = arrival.stop {
            sampling.stop_token_ids = Arc::new([stop]);
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
            Some(adapter) => root_with(TenantId(1), [1; 32], adapter.weights.digest()),
            None => self.root,
        };
        Request {
            pooling: arrival.pooling,
            speculation: self.speculation.get(id).cloned(),
            adapter,
            ..Request::new(RequestId(id as u64), TenantId(1), root, prompt, sampling)
        }
    }
}

/// Each request alone, cold, its prompt in one chunk: what everything else must equal.
pub struct Oracle {
    /// Per request: token and logits hash of every position but the last.
    rows: Vec<Vec<Row>>,
    tokens: Vec<Vec<u32>>,
    logprobs: Vec<Vec<LogprobBits>>,
    vectors: Vec<Vec<u32>>,
}

impl Oracle {
    pub fn new(world: &mut World, arrivals: &[Arrival]) -> Self {
        let (rows, tokens, logprobs, vectors) = Default::default();
        let mut oracle = Self { rows, tokens, logprobs, vectors };
        for arrival in arrivals {
            world.forget();
            let alone = Arrival { step: 0, ..arrival.clone() };
            let mut run = world.run(&whole(), &[alone]);
            assert_eq!(run.cached, [0], "the oracle runs cold");
            oracle.tokens.push(run.tokens.remove(0));
            oracle.logprobs.push(run.logprobs.remove(0));
            oracle.vectors.push(run.vectors.remove(0));
            let wanted = arrival.pooling.is_some();
            assert_eq!(oracle.vectors.last().is_some_and(|vector| !vector.is_empty()), wanted);
            oracle.rows.push(run.rows.remove(0));
        }
        world.forget();
        oracle
    }

    /// The oracle of the first `count` requests.
    pub fn first(&self, count: usize) -> Self {
        let Self { rows, tokens, logprobs, vectors } = self;
        Self {
            rows: rows[..count].to_vec(),
            tokens: tokens[..count].to_vec(),
            logprobs: logprobs[..count].to_vec(),
            vectors: vectors[..count].to_vec(),
        }
    }

    /// Where drafts come from text: what they will say, but for one token in so many, is expected of them.
    pub fn speculation(
        &self,
        arrivals: &[Arrival],
        drafter: folio_engine::Drafter,
        wrong: usize,
    ) -> Vec<Speculation> {
        let of = |(arrival, answer): (&Arrival, &Vec<u32>)| {
            let said = (1..).zip(answer).map(|(at, token)| token.abs_diff(u32::from(at % wrong == 0)));
            let expected: Vec<u32> = if drafter.is_model() { Vec::new() } else { said.collect() };
            Speculation::new(drafter, DRAFTS_MAX, &arrival.prompt, &expected)
        };
        arrivals.iter().zip(&self.tokens).map(of).collect()
    }

    /// Who knows what they will say.
    pub fn drafter(&self, script: Script) -> Drafter {
        Drafter { script, answers: self.tokens.clone() }
    }

    /// Every request got its tokens, and every row that was computed has the bits it has alone.
    pub fn check(&self, run: &Run, what: &str) {
        assert_eq!(run.tokens, self.tokens, "{what}: other tokens");
        assert_eq!(run.logprobs, self.logprobs, "{what}: other log probabilities");
        assert_eq!(run.vectors, self.vectors, "{what}: other vectors");
        // Rows behind an answer's end: of steps that were under way when it ended.
        let mut orphans = 0;
        for rows in &run.rows {
            let same = |oracle: &&Vec<Row>| {
                rows.iter().all(|(position, token, _)| {
                    oracle.get(*position as usize).is_none_or(|row| row.1 == *token)
                })
            };
            let behind = |oracle: &Vec<Row>| {
                rows.iter().filter(|(position, ..)| *position as usize >= oracle.len()).count() as u64
            };
            // Requests may share a prefix, so several oracles can apply to a short piece: any of them will do.
            let candidates = || self.rows.iter().filter(same);
            let least = candidates().map(behind).min();
            orphans += least.unwrap_or_else(|| panic!("{what}: a sequence computed tokens nobody asked for"));
            let candidates = candidates().filter(|oracle| Some(behind(oracle)) == least);
            let differs =
                |oracle: &Vec<Row>, row: &Row| oracle.get(row.0 as usize).is_some_and(|own| own.2 != row.2);
            let differing = candidates.map(|oracle| rows.iter().find(|row| differs(oracle, row)));
            if let Some(row) = differing.min_by_key(Option::is_some).flatten() {
                panic!("{what}: the logits at position {} differ from the request alone", row.0);
            }
        }
        assert!(orphans <= run.orphans, "{what}: {orphans} rows behind the ends of answers");
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

/// All groups but the first, without pools.
pub fn windows(layout: &KvLayout) -> Vec<GroupConfig> {
    let window = |group: &KvGroup| match group.kind {
        GroupKind::Window { tokens } => GroupConfig::window(tokens, 0, group.block_tokens as u32, 1),
        GroupKind::State { .. } => {
            GroupConfig { layout: Layout::State, ..GroupConfig::window(0, 0, group.block_tokens as u32, 1) }
        }
        kind => panic!("a second group without a window: {kind:?}"),
    };
    layout.groups.iter().skip(1).map(window).collect()
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

/// FNV-1a over the bits.
fn hash(logits: &[f32]) -> u64 {
    logits.iter().fold(0xcbf2_9ce4_8422_2325, |hash, value| {
        (hash ^ u64::from(value.to_bits())).wrapping_mul(0x0000_0100_0000_01b3)
    })
}

/// The fixture with room for [`MAX_LEN`] positions: parity needs few, attention chunks need more. Its windows stay as they are.
fn longer(fixture: &str) -> Checkpoint {
    let quantized = folio_model::testing::QUANTIZED.contains(&fixture);
    longer_of(&match quantized {
        true => folio_model::testing::quantized(fixture),
        false => folio_model::testing::fixture(fixture),
    })
}

fn longer_of(folder: &Path) -> Checkpoint {
    let what = folder.display();
    let read = |name: &str| {
        std::fs::read(folder.join(name)).unwrap_or_else(|error| panic!("{what}/{name}: {error}"))
    };
    let mut config: serde_json::Value =
        serde_json::from_slice(&read("config.json")).expect("a fixture's config.json");
    let decoder = match config.get("text_config") {
        Some(_) => &mut config["text_config"],
        None => &mut config,
    };
    decoder["max_position_embeddings"] = MAX_LEN.into();
    let config = serde_json::to_vec(&config).expect("it was JSON");
    let mut files = vec![("config.json".to_owned(), config)];
    for entry in std::fs::read_dir(folder).expect("a fixture's folder").flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        if name.starts_with("model") {
            files.push((name.clone(), read(&name)));
        }
    }
    // Leaked: a checkpoint in memory is part of the program, and a test program is short-lived.
    let files: Vec<(&'static str, &'static [u8])> =
        files.into_iter().map(|(name, bytes)| (&*name.leak(), &*Vec::leak(bytes))).collect();
    Checkpoint::from_bytes(Vec::leak(files)).unwrap_or_else(|error| panic!("{what}: {error}"))
}
