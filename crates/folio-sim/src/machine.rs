//! One engine without threads or clock, stepped by hand: for tests of single behaviours.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::ops::Range;
use std::sync::Arc;

use folio_engine::plan::{ExecutorError, StepOutput, StepPlan};
use folio_engine::request::{Event, RequestId, Token};
use folio_engine::{
    Adapter, AdapterId, AdapterOrder, AdapterReport, CancelRequest, DrafterModel, DraftingExecutor, Executor,
    FinishReason, LoadOrder, Micros, ModelExecutor, Reads, Request, Scheduler, SchedulerConfig, StepDriver,
    StoreOrder, TransferOrder, turn,
};
use folio_kv::{
    BlockHash, BlockHashes, CacheConfig, Content, GroupConfig, KvCache, Layout, TierId, default_policy,
};
use folio_model::backend::Backend;

use crate::backend::{FEATURES, SimBackend};
use crate::head::HeadBackend;
use crate::memory::Memory;
use crate::oracle::{Expectation, expect};
use crate::pipeline::Pipeline;

/// Vocabulary of the modelled backend in a [`Machine`].
pub const VOCAB: u32 = 29;

/// The real scheduler, cache and model executor over a [`SimBackend`].
pub struct Machine {
    pub scheduler: Scheduler,
    pub cache: KvCache,
    driver: Steps,
    pub now: Micros,
    /// All events so far.
    pub events: BTreeMap<RequestId, Vec<Event>>,
    pub max_model_len: u32,
    /// Blocks and tokens.
    groups: Vec<GroupConfig>,
    rows: usize,
    config: SchedulerConfig,
    cancellations: Vec<CancelRequest>,
    /// Whether the tier is asked what it has of them.
    requests: Vec<(Request, bool)>,
    samples: bool,
    overlap: (usize, usize),
    tier: Option<MachineTier>,
}

/// Keeps what ended or was preempted, in memory; nothing goes from it.
#[derive(Default)]
struct MachineTier {
    /// The device's.
    memory: Memory,
    /// Blocks that it takes, and microseconds for each.
    most: usize,
    us: f64,
    /// What it was asked for, when that began and when it is done.
    orders: VecDeque<(Micros, Micros, TransferOrder)>,
    kept: HashMap<(u32, BlockHash), Vec<u64>>,
}

impl MachineTier {
    /// How many of the contents it has, from the first on.
    fn store(&mut self, contents: &[Content]) -> u32 {
        let groups = self.memory.groups();
        let mut stored = 0;
        for Content { group, block, hash, .. } in contents {
            if self.kept.len() == self.most && !self.kept.contains_key(&(*group, *hash)) {
                break;
            }
            let cells = groups[*group as usize].block(block.0).to_vec();
            self.kept.insert((*group, *hash), cells);
            stored += 1;
        }
        stored
    }

    /// Takes an order, behind those before it, unless it is one about those.
    fn order(&mut self, order: TransferOrder, now: Micros) {
        let (TransferOrder::Load(LoadOrder { contents, .. })
        | TransferOrder::Store(StoreOrder { contents, .. })) = &order
        else {
            return;
        };
        let from = self.orders.back().map_or(now, |(_, done, _)| (*done).max(now));
        let done = Micros(from.0 + (contents.len() as f64 * self.us) as u64);
        self.orders.push_back((from, done, order));
    }

    /// Blocks of a prompt that it has, from the first on.
    fn find(&self, hashes: &BlockHashes) -> u32 {
        hashes.iter().take_while(|hash| self.kept.contains_key(&(0, **hash))).count() as u32
    }

    /// Whether it had all.
    fn load(&self, contents: &[Content]) -> bool {
        let mut groups = self.memory.groups();
        contents.iter().all(|Content { group, block, hash, .. }| {
            let cells = self.kept.get(&(*group, *hash));
            let to = groups[*group as usize].block_mut(block.0);
            cells.is_some_and(|cells| {
                to.copy_from_slice(cells);
                true
            })
        })
    }
}

/// Steps of a millisecond, and more where a model drafts.
struct Steps {
    executor: Box<dyn Executor>,
    now: Micros,
    drafter_us: u64,
    /// What a step takes longer that was begun when none was under way.
    alone_us: u64,
    alone: bool,
    plans: Vec<StepPlan>,
    /// Why a step could not be begun.
    begun: VecDeque<Option<ExecutorError>>,
    /// What the tier was asked for in this turn.
    orders: Vec<TransferOrder>,
    /// Adapters whose weights are being read, where that takes until the test says so.
    reads: Option<Vec<AdapterId>>,
}

impl Steps {
    /// What the last step took.
    fn step_us(&self) -> u64 {
        let sequences = || self.plans.last().into_iter().flat_map(|plan| &plan.sequences);
        let drafted = sequences().any(|sequence| !sequence.drafter.tokens.is_empty());
        1000 + if drafted { self.drafter_us } else { 0 } + if self.alone { self.alone_us } else { 0 }
    }
}

impl StepDriver for Steps {
    fn now(&mut self) -> Micros {
        self.now
    }

    fn begin(&mut self, plan: &StepPlan, scheduler: &Scheduler, cache: &mut KvCache) {
        if let Err(what) = scheduler.check(cache) {
            panic!("before step {}: {what}\n{plan:?}", plan.step);
        }
        self.plans.push(plan.clone());
        self.alone = self.begun.is_empty();
        self.begun.push_back(self.executor.begin(plan).err());
    }

    fn finish(&mut self) -> (Micros, Result<&StepOutput, ExecutorError>) {
        let done = Micros(self.now.0 + self.step_us());
        let output = match self.begun.pop_front().flatten() {
            Some(error) => Err(error),
            None => self.executor.finish(),
        };
        (done, output)
    }

    fn order(&mut self, order: TransferOrder) -> bool {
        self.orders.push(order);
        true
    }

    fn order_adapter(&mut self, order: AdapterOrder) -> Option<AdapterReport> {
        match (&mut self.reads, order) {
            (Some(reads), AdapterOrder::Read(adapter)) => {
                reads.push(adapter.id);
                None
            }
            (_, order) => order.carry_out(),
        }
    }
}

impl Machine {
    pub fn new(config: SchedulerConfig, blocks: u32, block_tokens: u32) -> Self {
        Self::with_windows(config, blocks, block_tokens, &[])
    }

    /// With a window group for each (blocks, window).
    pub fn with_windows(
        config: SchedulerConfig,
        blocks: u32,
        block_tokens: u32,
        windows: &[(u32, u32)],
    ) -> Self {
        let group = |(blocks, tokens): &(u32, u32)| GroupConfig::window(*tokens, *blocks, block_tokens, 1);
        Self::with_groups(config, blocks, block_tokens, &windows.iter().map(group).collect::<Vec<_>>())
    }

    pub fn with_groups(
        config: SchedulerConfig,
        blocks: u32,
        block_tokens: u32,
        groups: &[GroupConfig],
    ) -> Self {
        let rows = config.max_num_batched_tokens as usize;
        let backend = SimBackend::new(VOCAB as usize, blocks as usize, block_tokens as usize, rows, rows)
            .with_groups(groups);
        Self {
            max_model_len: config.max_model_len,
            config: config.clone(),
            scheduler: Scheduler::new(config).expect("the test's limits are valid"),
            cache: KvCache::with_groups(
                CacheConfig { blocks, block_tokens, bytes_per_block: 1 },
                groups,
                default_policy(0.01),
            ),
            driver: Steps {
                executor: Box::new(ModelExecutor::new(Box::new(backend), VOCAB as usize, rows, rows)),
                now: Micros(0),
                drafter_us: 0,
                alone_us: 0,
                alone: true,
                plans: Vec::new(),
                begun: VecDeque::new(),
                orders: Vec::new(),
                reads: None,
            },
            overlap: (1, 1),
            groups: groups.to_vec(),
            rows,
            now: Micros(0),
            events: BTreeMap::new(),
            cancellations: Vec::new(),
            requests: Vec::new(),
            samples: false,
            tier: None,
        }
    }

    /// On a device that chooses tokens by itself, so that two steps can be under way. Before anything runs.
    pub fn with_sampling(mut self) -> Self {
        self.samples = true;
        self.rebuilt()
    }

    /// In a pipeline. Before anything runs.
    pub fn with_pipeline(mut self, depth: usize, lag: usize) -> Self {
        self.overlap = (depth, lag);
        self.rebuilt()
    }

    /// With a model for drafts that has so many blocks of each group, sees so many positions and computes so many rows at once. It is the same
    /// as the other model, but that it keeps what lies behind a window. Before anything runs.
    pub fn with_drafter(self, blocks: u32, positions: u32, rows: usize) -> Self {
        let (vocab, block_tokens) = (VOCAB as usize, self.cache.config().block_tokens as usize);
        let more: Vec<GroupConfig> =
            self.groups.iter().map(|group| GroupConfig { blocks, ..*group }).collect();
        let backend = SimBackend::new(vocab, blocks as usize, block_tokens, rows, rows).with_groups(&more);
        let backend = if self.samples { backend.with_sampling() } else { backend };
        self.drafted_by(Box::new(backend), blocks, positions, Reads::Tokens, &more)
    }

    /// Each step in which it computes takes so much longer.
    pub fn with_drafter_time(mut self, us: u64) -> Self {
        self.driver.drafter_us = us;
        self
    }

    /// Each step that overlaps with none takes so much longer.
    pub fn with_time_between_steps(mut self, us: u64) -> Self {
        self.driver.alone_us = us;
        self
    }

    /// With a head for drafts, which is always right where it is given the right features; otherwise likewise.
    pub fn with_head(self, blocks: u32, rows: usize) -> Self {
        let block_tokens = self.cache.config().block_tokens as usize;
        let backend = HeadBackend::new(VOCAB as usize, blocks as usize, block_tokens, rows);
        self.drafted_by(Box::new(backend), blocks, u32::MAX, Reads::Features { width: FEATURES }, &[])
    }

    /// `more`: its groups beside the first.
    fn drafted_by(
        mut self,
        backend: Box<dyn Backend>,
        blocks: u32,
        positions: u32,
        reads: Reads,
        more: &[GroupConfig],
    ) -> Self {
        let config = *self.cache.config();
        let first = GroupConfig { blocks, optional: true, ..config.first_group() };
        let more = more.iter().map(|group| {
            let layout = if group.layout == Layout::State { Layout::State } else { Layout::Paged };
            GroupConfig { layout, optional: true, ..*group }
        });
        let own: Vec<GroupConfig> = [first].into_iter().chain(more).collect();
        let all = [&self.groups[..], &own].concat();
        self.cache = KvCache::with_groups(config, &all, default_policy(0.01));
        let (vocab, rows, block_tokens) = (VOCAB as usize, self.rows, config.block_tokens);
        let of_model = SimBackend::new(vocab, config.blocks as usize, block_tokens as usize, rows, rows)
            .with_groups(&self.groups);
        let of_model = if self.samples { of_model.with_sampling() } else { of_model };
        let executor = |backend| ModelExecutor::new(backend, vocab, rows, rows);
        let group = 1 + self.groups.len();
        let as_drafter = DrafterModel { group, groups: own.len(), block_tokens, positions, reads };
        let model = executor(Box::new(of_model)).with_groups(group);
        self.driver.executor = Box::new(DraftingExecutor::new(model, executor(backend), as_drafter, VOCAB));
        let scheduler = Scheduler::new(self.config.clone()).expect("the test's limits are valid");
        let (depth, lag) = (self.driver.executor.depth(), self.driver.executor.lag());
        self.scheduler = scheduler.with_overlap(depth, lag).with_drafter(self.driver.executor.drafter());
        self
    }

    /// With a tier that keeps `blocks` blocks of what ended or was preempted, and takes `us` microseconds for each. Before anything runs.
    pub fn with_tier(mut self, blocks: usize, us: f64) -> Self {
        self.tier = Some(MachineTier { most: blocks, us, ..MachineTier::default() });
        self.rebuilt()
    }

    /// Weights of adapters are there when the test says so ([`Machine::adapter_read`]), not in the turn in which they are wanted.
    pub fn with_slow_adapters(mut self) -> Self {
        self.driver.reads = Some(Vec::new());
        self
    }

    /// Adapters whose weights are being read, in the order in which they were wanted.
    pub fn reads(&self) -> &[AdapterId] {
        self.driver.reads.as_deref().unwrap_or_default()
    }

    /// The first of those is read, or cannot be.
    pub fn adapter_read(&mut self, weights: Result<Arc<Adapter>, String>) {
        let id = self.driver.reads.as_mut().expect("slow adapters").remove(0);
        self.scheduler.adapter_read(&mut self.cache, AdapterReport { id, weights }, self.now);
    }

    fn rebuilt(mut self) -> Self {
        let (rows, config) = (self.rows, *self.cache.config());
        let backend =
            SimBackend::new(VOCAB as usize, config.blocks as usize, config.block_tokens as usize, rows, rows)
                .with_groups(&self.groups);
        let backend = if self.samples { backend.with_sampling() } else { backend };
        let memory = backend.memory();
        let executor = ModelExecutor::new(Box::new(backend), VOCAB as usize, rows, rows);
        let (depth, lag) = self.overlap;
        self.driver.executor =
            if depth > 1 { Box::new(Pipeline::new(executor, depth, lag)) } else { Box::new(executor) };
        let scheduler = Scheduler::new(self.config.clone()).expect("the test's limits are valid");
        self.scheduler = scheduler.with_overlap(self.driver.executor.depth(), self.driver.executor.lag());
        if let Some(tier) = &mut self.tier {
            tier.memory = memory;
            self.scheduler = self.scheduler.with_tiers([1]).swapping_to(Some(TierId(0)));
        }
        self
    }

    /// Arrives before the next step.
    pub fn submit(&mut self, request: Request) {
        self.requests.push((request, false));
    }

    /// The same for one whose blocks are looked for in the tier.
    pub fn submit_found(&mut self, request: Request) {
        self.requests.push((request, true));
    }

    /// Takes effect in the next step.
    pub fn cancel(&mut self, request: u64) {
        self.cancellations.push(CancelRequest { request: RequestId(request), choice: None });
    }

    /// One turn of the loop, a millisecond long or as long as its step, with everything checked behind it. Returns the plan that was made last.
    pub fn step(&mut self) -> &StepPlan {
        let block_tokens = self.cache.config().block_tokens;
        let tier = self.tier.as_ref();
        let requests = self.requests.drain(..).map(|(request, is_found)| {
            let (request, hashes) = request.hashed(block_tokens);
            let most = (request.prompt.len() as u32 - 1) / block_tokens;
            let found = tier.filter(|_| is_found).map_or(0, |tier| tier.find(&hashes).min(most));
            let stored = if found > 0 { vec![vec![Range { start: 0, end: found }]] } else { Vec::new() };
            (request, hashes.with_stored(stored))
        });
        self.scheduler.admit(requests, self.cancellations.drain(..), self.now);
        let before = self.driver.plans.len();
        self.driver.now = self.now;
        for (id, event) in turn(&mut self.scheduler, &mut self.cache, &mut self.driver).drain(..) {
            self.events.entry(id).or_default().push(event);
        }
        self.now.0 += self.driver.step_us();
        self.carry();
        if let Err(what) = self.scheduler.check(&self.cache) {
            panic!("after step {}: {what}", self.driver.plans.len());
        }
        if self.driver.plans.len() == before {
            self.driver.plans.push(StepPlan::default());
        }
        self.driver.plans.last().expect("just pushed")
    }

    /// What the tier has done by now is reported.
    fn carry(&mut self) {
        let Some(tier) = &mut self.tier else { return };
        self.driver.orders.drain(..).for_each(|order| tier.order(order, self.now));
        // What takes less than a step is not waited for.
        let soon = Micros(self.now.0 + 999);
        while let Some((from, done, order)) = tier.orders.pop_front_if(|(_, done, _)| *done <= soon) {
            self.now = self.now.max(done);
            match order {
                TransferOrder::Load(load) => {
                    let (verified, us) = (tier.load(&load.contents), done.0 - from.0);
                    self.scheduler.loaded(load.tier, verified, load.contents.len() as u64, us);
                    self.scheduler.end_load(&mut self.cache, load.ticket, verified, self.now);
                }
                TransferOrder::Store(store) => {
                    let held = self.now < store.until;
                    let kept = if held { tier.store(&store.contents) } else { 0 };
                    self.scheduler.end_store(&mut self.cache, store.lease, kept, self.now);
                }
                TransferOrder::Promote { .. } | TransferOrder::Cancel { .. } => {}
            }
        }
    }

    /// All plans so far; an empty one for a turn without any.
    pub fn plans(&self) -> &[StepPlan] {
        &self.driver.plans
    }

    /// Until nothing is left to do.
    pub fn run(&mut self) {
        for _ in 0..100_000 {
            if !self.scheduler.has_work() && self.requests.is_empty() {
                return;
            }
            self.step();
        }
        panic!("not finished:\n{:?}", self.scheduler);
    }

    pub fn tokens(&self, request: u64, choice: u32) -> Vec<u32> {
        let events = self.events.get(&RequestId(request)).into_iter().flatten();
        let token = |event: &Event| match event {
            Event::Token { choice: of, token: Token { id, .. } } if *of == choice => Some(*id),
            _ => None,
        };
        events.filter_map(token).collect()
    }

    pub fn finished(&self, request: u64) -> Vec<(u32, FinishReason)> {
        let events = self.events.get(&RequestId(request)).into_iter().flatten();
        let finished = |event: &Event| match event {
            Event::Finished { choice, reason, .. } => Some((*choice, *reason)),
            _ => None,
        };
        events.filter_map(finished).collect()
    }

    pub fn cached_tokens(&self, request: u64) -> Option<u32> {
        self.events.get(&RequestId(request)).into_iter().flatten().find_map(|event| match event {
            Event::Prompt { cached_tokens, .. } => Some(*cached_tokens),
            _ => None,
        })
    }

    /// Tokens computed in all steps.
    pub fn computed(&self) -> u64 {
        self.scheduler.counters().iteration_tokens
    }

    /// What `request` generates alone.
    pub fn alone(&self, request: &Request) -> Expectation {
        expect(request, VOCAB as usize, self.max_model_len, &self.groups)
    }

    /// Panics unless every choice of `request` got exactly what it gets alone.
    pub fn assert_as_alone(&self, request: &Request) {
        for (choice, answer) in self.alone(request).choices.iter().enumerate() {
            let want: Vec<u32> = answer.tokens.iter().map(|(token, _)| *token).collect();
            assert_eq!(self.tokens(request.id.0, choice as u32), want, "{:?} choice {choice}", request.id);
            assert!(
                self.finished(request.id.0).contains(&(choice as u32, answer.reason)),
                "{:?} choice {choice} should end with {:?}",
                request.id,
                answer.reason
            );
        }
    }
}
