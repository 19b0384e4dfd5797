//! After warm-up a step allocates nothing: the built-in model decodes, the real scheduler, cache, backend and sampler run,
//! and every call to the allocator in this process is counted.
//!
//! Alone in its file, because the counter sees every thread of the process.

use std::alloc::{GlobalAlloc, Layout, System};
use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Barrier};

use folio_cpu::{CpuBackend, CpuOptions};
use folio_engine::plan::{ExecutorError, StepOutput, StepPlan};
use folio_engine::{
    EngineParts, Event, EventFeed, Executor, Micros, ModelExecutor, Request, RequestId, SamplingParams,
    Scheduler, SchedulerConfig, StepDriver, SystemClock, turn,
};
use folio_kv::{BlockHashes, CacheConfig, Identity, KvCache, Root, TenantId, default_policy};
use folio_model::backend::{Backend, BackendError, Batch, DType, KvLayout, Span, TableEdit, TensorView};
use folio_model::program::{MatrixId, Program, VectorId};
use folio_model::sampling::{Outcome, SampleRow};
use folio_model::{Checkpoint, LoadOptions, Model};

static CALLS: AtomicU64 = AtomicU64::new(0);

struct Counting;

// SAFETY: every call goes to the system's allocator unchanged; counting touches an atomic only.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        CALLS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller's promise is passed on.
        unsafe { System.alloc(layout) }
    }
    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        CALLS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller's promise is passed on.
        unsafe { System.alloc_zeroed(layout) }
    }
    unsafe fn realloc(&self, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        CALLS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller's promise is passed on.
        unsafe { System.realloc(at, layout, size) }
    }
    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise is passed on.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const SEQUENCES: u64 = 8;
const PROMPT: u32 = 100;
const STEPS: u32 = 300;
const WARM_UP: u32 = 20;
const ROWS: usize = 1024;

fn executor(blocks: usize) -> (ModelExecutor, usize) {
    let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("assets/demo");
    let checkpoint = Checkpoint::open(folder).expect("the built-in model");
    let mut backend =
        CpuBackend::new(CpuOptions { threads: Some(2), ..CpuOptions::default() }).expect("a backend");
    let options = LoadOptions {
        max_rows: ROWS,
        max_logit_rows: 64,
        max_model_len: None,
        kv_formats: DType::F16.into(),
        block_tokens: 16,
        keeps_all: false,
        taps: None,
        progress: None,
    };
    let model = Model::load(&checkpoint, &mut backend, options).expect("it loads");
    backend.allocate_cache(&model.kv_layout, &[blocks]).expect("a cache");
    (ModelExecutor::new(Box::new(backend), model.vocab, ROWS, 64), model.vocab)
}

/// Every way to choose a token but log probabilities, which are memory that the caller gets.
fn sampling(id: u64) -> SamplingParams {
    let greedy = SamplingParams::greedy(STEPS);
    let warm = SamplingParams { temperature: 0.8, ..greedy.clone() };
    match id % 4 {
        0 => greedy,
        1 => SamplingParams { top_p: 0.9, ..warm },
        2 => SamplingParams { top_k: 40, min_p: 0.01, ..warm },
        _ => SamplingParams { repetition_penalty: 1.1, frequency_penalty: 0.2, ..warm },
    }
}

fn root() -> Root {
    Root::derive(&Identity {
        tenant: TenantId(1),
        tenant_secret: &[1; 32],
        model_digest: &[2; 32],
        layout_digest: &[3; 32],
        extra: &[],
    })
}

/// One test, because the counter would see another that runs beside it.
#[test]
fn nothing_is_allocated_after_warm_up() {
    steps();
    overlap();
    the_loop();
    evictions();
    experts();
}

/// A device that samples, and says nothing but the same token.
#[derive(Default)]
struct Same {
    /// Rows of the steps that were begun.
    begun: VecDeque<usize>,
}

impl Backend for Same {
    fn name(&self) -> String {
        "same".to_owned()
    }

    fn numerics(&self) -> String {
        self.name()
    }

    fn load_matrix(&mut self, _: &str, _: &[TensorView<'_>]) -> Result<MatrixId, BackendError> {
        Ok(MatrixId(0))
    }

    fn load_vector(&mut self, _: &str, _: &[TensorView<'_>]) -> Result<VectorId, BackendError> {
        Ok(VectorId(0))
    }

    fn load_program(&mut self, _: Program, _: usize, _: usize, _: usize) -> Result<(), BackendError> {
        Ok(())
    }

    fn allocate_cache(&mut self, _: &KvLayout, _: &[usize]) -> Result<(), BackendError> {
        Ok(())
    }

    fn forward(&mut self, _: &Batch) -> Result<&[f32], BackendError> {
        Err(BackendError::Device("it samples".to_owned()))
    }

    fn samples(&self) -> Option<u32> {
        Some(0)
    }

    fn begin_and_sample(
        &mut self,
        batch: &Batch,
        rows: &mut dyn ExactSizeIterator<Item = SampleRow<'_>>,
    ) -> Result<(), BackendError> {
        assert_eq!(rows.len(), batch.logit_rows.len());
        self.begun.push_back(rows.len());
        rows.for_each(|row| {
            std::hint::black_box(row);
        });
        Ok(())
    }

    fn finish_sampled(&mut self, outcomes: &mut Vec<Outcome>) -> Result<(), BackendError> {
        let rows = self.begun.pop_front().unwrap_or(0);
        outcomes.extend((0..rows).map(|_| Outcome::Token { id: 3, logprobs: None }));
        Ok(())
    }

    fn hidden(&self, _: u32) -> &[f32] {
        &[]
    }

    fn weight_bytes(&self) -> u64 {
        0
    }
}

/// A step of an executor every millisecond.
struct Steps {
    executor: ModelExecutor,
    now: Micros,
    under_way: u32,
}

impl StepDriver for Steps {
    fn now(&mut self) -> Micros {
        self.now.0 += 1000;
        self.now
    }

    fn begin(&mut self, plan: &StepPlan, _: &Scheduler, _: &mut KvCache) {
        // Between two steps that do not overlap much time passes, so that nobody is waited for who cannot.
        self.now.0 += if self.under_way == 0 { 20_000 } else { 0 };
        self.under_way += 1;
        self.executor.begin(plan).expect("it begins");
    }

    fn finish(&mut self) -> (Micros, Result<&StepOutput, ExecutorError>) {
        self.under_way -= 1;
        (self.now, self.executor.finish())
    }
}

/// Two steps under way, on a device that samples.
fn overlap() {
    let config = CacheConfig { blocks: 512, block_tokens: 16, bytes_per_block: 1 };
    let mut cache = KvCache::new(config, default_policy(0.01));
    let mut scheduler = Scheduler::new(SchedulerConfig::default()).expect("valid limits").with_overlap(2, 1);
    let executor = ModelExecutor::new(Box::new(Same::default()), 1000, ROWS, 64);
    let mut driver = Steps { executor, now: Micros(0), under_way: 0 };
    let root = root();
    let requests = (0..SEQUENCES).map(|id| {
        let prompt = (0..PROMPT).map(|i| i * 37 + id as u32 * 101).collect::<Vec<_>>();
        Request::new(RequestId(id), TenantId(1), root, prompt.into(), sampling(id))
    });
    let requests = requests.into_iter().map(|request| request.hashed(16));
    scheduler.admit(requests, [], Micros(0));
    let mut counted: Vec<(u32, u64)> = Vec::with_capacity(STEPS as usize);
    for step in 1..STEPS {
        let before = CALLS.load(Ordering::Relaxed);
        turn(&mut scheduler, &mut cache, &mut driver).clear();
        let calls = CALLS.load(Ordering::Relaxed) - before;
        if step > WARM_UP && calls > 0 {
            counted.push((step, calls));
        }
    }
    assert!(scheduler.counters().steps_ahead > 280, "{:?}", scheduler.counters());
    assert!(counted.is_empty(), "(step, calls to the allocator): {counted:?}");
}

/// Waits in its first step until all requests were sent, and says how often the allocator was called between two later ones.
struct Watched {
    executor: ModelExecutor,
    sent: Arc<Barrier>,
    steps: u32,
    before: u64,
    calls: Arc<AtomicU64>,
}

impl Executor for Watched {
    fn depth(&self) -> usize {
        self.executor.depth()
    }

    fn begin(&mut self, plan: &StepPlan) -> Result<(), ExecutorError> {
        self.steps += 1;
        match self.steps {
            1 => drop(self.sent.wait()),
            // Two lists of tenants were published since.
            100 => self.before = CALLS.load(Ordering::Relaxed),
            290 => self.calls.store(CALLS.load(Ordering::Relaxed) - self.before, Ordering::Relaxed),
            _ => {}
        }
        self.executor.begin(plan)
    }

    fn finish(&mut self) -> Result<&StepOutput, ExecutorError> {
        self.executor.finish()
    }
}

/// All of the engine's loop: mailbox, steps, sinks, figures, what is told of the cache.
fn the_loop() {
    let cache = CacheConfig { blocks: 512, block_tokens: 16, bytes_per_block: 1 };
    let (sent, calls) = (Arc::new(Barrier::new(2)), Arc::new(AtomicU64::new(u64::MAX)));
    let executor = ModelExecutor::new(Box::new(Same::default()), 1000, ROWS, 64);
    let handle = folio_engine::start(EngineParts {
        config: SchedulerConfig::default(),
        cache: KvCache::new(cache, default_policy(0.01)),
        executor: Box::new(Watched {
            executor,
            sent: sent.clone(),
            steps: 0,
            before: 0,
            calls: calls.clone(),
        }),
        clock: Arc::new(SystemClock::new()),
        vocab: 1000,
        tiers: Vec::new(),
        events: Some(Arc::new(EventFeed::new(1024, 16))),
    })
    .expect("an engine");
    for id in 0..SEQUENCES {
        let prompt = (0..PROMPT).map(|i| (i * 37 + id as u32 * 101) % 1000).collect::<Vec<_>>();
        let request = Request::new(RequestId(id), TenantId(1), root(), prompt.into(), sampling(id));
        handle.submit(request, Box::new(|_: Event| true)).expect("a request");
    }
    sent.wait();
    // A channel would allocate where this thread begins to wait, whenever that is.
    while calls.load(Ordering::Relaxed) == u64::MAX {
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    assert_eq!(calls.load(Ordering::Relaxed), 0, "calls to the allocator in 190 turns of the loop");
    handle.stop();
    handle.join();
}

/// A backend alone, on a mixture of experts: steps of one row, of several, and of more than workers pack for themselves.
fn experts() {
    let checkpoint = Checkpoint::open(folio_model::testing::fixture("gpt_oss")).expect("a fixture");
    let mut backend =
        CpuBackend::new(CpuOptions { threads: Some(2), ..CpuOptions::default() }).expect("a backend");
    let options = LoadOptions {
        max_rows: 256,
        max_logit_rows: 8,
        max_model_len: None,
        kv_formats: DType::F16.into(),
        block_tokens: 16,
        keeps_all: false,
        taps: None,
        progress: None,
    };
    let model = Model::load(&checkpoint, &mut backend, options).expect("it loads");
    let groups = model.kv_layout.groups.len();
    backend.allocate_cache(&model.kv_layout, &vec![16; groups]).expect("a cache");
    let batch = |rows: u32| Batch {
        tokens: (0..rows).map(|i| i * 37 % model.vocab as u32).collect(),
        spans: vec![Span { first_row: 0, rows, first_position: 0, slot: 0, tentative_from: u32::MAX }],
        edits: (0..groups as u32).map(|group| TableEdit::whole(0, group, 0, 16)).collect(),
        blocks: (0..16).collect(),
        logit_rows: vec![rows - 1],
        ..Batch::default()
    };
    let batches = [1, 7, 256].map(batch);
    let run = |backend: &mut CpuBackend| {
        for batch in &batches {
            assert!(backend.forward(batch).is_ok_and(|logits| logits.iter().all(|x| x.is_finite())));
        }
    };
    run(&mut backend);
    let before = CALLS.load(Ordering::Relaxed);
    (0..5).for_each(|_| run(&mut backend));
    assert_eq!(CALLS.load(Ordering::Relaxed) - before, 0, "calls to the allocator");
}

/// What becomes of the cache is told, to somebody who never takes it.
fn listened(cache: &mut KvCache, most: u32) -> EventFeed {
    let feed = EventFeed::new(most as usize, cache.config().block_tokens);
    feed.open(cache);
    feed
}

/// A full pool under traffic that never repeats: every block taken is evicted from somebody, and the policy learns meanwhile.
fn evictions() {
    const BLOCKS: u32 = 256;
    let config = CacheConfig { blocks: BLOCKS, block_tokens: 1, bytes_per_block: 1 };
    let mut cache = KvCache::new(config, default_policy(0.01));
    let feed = listened(&mut cache, 4 * BLOCKS);
    let (root, mut copies) = (root(), Vec::new());
    let mut tokens = [0u32; 32];
    let mut calls = 0;
    for request in 0..600u32 {
        for (i, token) in tokens.iter_mut().enumerate() {
            *token = request * 100 + i as u32;
        }
        let hashes = BlockHashes::new(&root, &tokens, 1);
        let before = CALLS.load(Ordering::Relaxed);
        let mut table = cache.attach(hashes.clone(), &tokens, 31, &mut Vec::new());
        cache.grow(&mut table, 32, &mut copies).expect("the pool is larger than a request");
        cache.commit(&mut table, &tokens, 32).expect("in order");
        cache.release(table, &tokens);
        feed.put(&mut cache);
        if request >= 300 {
            calls += CALLS.load(Ordering::Relaxed) - before;
        }
    }
    assert!(cache.stats().evictions > 9000, "the pool was under pressure");
    assert_eq!(calls, 0, "calls to the allocator in 300 requests");
}

/// The built-in model decodes eight sequences.
fn steps() {
    let (executor, vocab) = executor(512);
    let mut driver = Steps { executor, now: Micros(0), under_way: 0 };
    let config = CacheConfig { blocks: 512, block_tokens: 16, bytes_per_block: 1 };
    let mut cache = KvCache::new(config, default_policy(0.01));
    let feed = listened(&mut cache, 1024);
    let mut scheduler = Scheduler::new(SchedulerConfig {
        max_num_seqs: 64,
        max_num_batched_tokens: ROWS as u32,
        max_model_len: 2048,
        ..SchedulerConfig::default()
    })
    .expect("valid limits");
    let root = root();
    let requests = (0..SEQUENCES).map(|id| {
        let prompt = (0..PROMPT).map(|i| (i * 37 + id as u32 * 101) % vocab as u32).collect::<Vec<_>>();
        Request::new(RequestId(id), TenantId(1), root, prompt.into(), sampling(id))
    });
    let requests = requests.into_iter().map(|request| request.hashed(16));
    scheduler.admit(requests, [], Micros(0));

    let mut tokens = 0;
    let mut counted: Vec<(u32, u64)> = Vec::with_capacity(STEPS as usize);
    for step in 1..STEPS {
        let before = CALLS.load(Ordering::Relaxed);
        let events = turn(&mut scheduler, &mut cache, &mut driver);
        feed.put(&mut cache);
        let calls = CALLS.load(Ordering::Relaxed) - before;
        if step > WARM_UP && calls > 0 {
            counted.push((step, calls));
        }
        tokens += events.iter().filter(|(_, event)| matches!(event, Event::Token { .. })).count();
        events.clear();
    }
    // Every step decoded every sequence: nothing was counted because nothing was done.
    assert_eq!(tokens as u64, SEQUENCES * u64::from(STEPS - 1));
    assert!(counted.is_empty(), "(step, calls to the allocator): {counted:?}");
}
