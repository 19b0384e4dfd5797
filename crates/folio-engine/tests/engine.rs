//! The engine from outside: threads, sinks, limits, shutdown, failures.

use std::num::NonZeroU32;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use folio_engine::plan::ExecutorError;
use folio_engine::progress::FAILURES_MAX;
use folio_engine::request::{Event, Request, RequestId};
use folio_engine::{
    Adapter, AdapterId, AdapterSource, Clock, EngineHandle, EngineParts, EventFeed, Executor, FinishReason,
    Guide, Health, Micros, ModelExecutor, Rejected, ReportSink, RequestAdapter, Restricted, Rules, RulesRef,
    SchedulerConfig, StepOutput, StepPlan, Tier, TierStats, TransferOrder, WaitingFor, start,
};
use folio_kv::{BlockHashes, CacheConfig, Holdings, KvCache, TenantId, default_policy};
use folio_sim::SimBackend;
use folio_sim::oracle::expect;
use folio_sim::scenario::{request, root};

const VOCAB: u32 = 29;
const BLOCKS: u32 = 40;

#[derive(Default)]
struct ManualClock {
    now: AtomicU64,
    asked: AtomicU64,
}

impl Clock for ManualClock {
    fn now(&self) -> Micros {
        self.asked.fetch_add(1, Ordering::SeqCst);
        Micros(self.now.load(Ordering::SeqCst))
    }
}

/// What a test does to a step before it runs.
enum Mood {
    Run,
    Fail,
    Panic,
}

/// Runs a step only when it is told to, if it was given a leash.
struct Leashed {
    inner: ModelExecutor,
    leash: Option<Receiver<Mood>>,
    entered: Sender<()>,
    _alive: Arc<()>,
}

impl Executor for Leashed {
    fn begin(&mut self, plan: &StepPlan) -> Result<(), ExecutorError> {
        let _ = self.entered.send(());
        match self.leash.as_ref().map_or(Mood::Run, |leash| leash.recv().unwrap_or(Mood::Run)) {
            Mood::Run => self.inner.begin(plan),
            Mood::Fail => Err(ExecutorError { step: plan.step, reason: "told to".into() }),
            Mood::Panic => panic!("told to"),
        }
    }

    fn finish(&mut self) -> Result<&StepOutput, ExecutorError> {
        self.inner.finish()
    }

    fn depth(&self) -> usize {
        self.inner.depth()
    }
}

struct Bench {
    handle: EngineHandle,
    clock: Arc<ManualClock>,
    /// Answers the executor, once per step.
    moods: Sender<Mood>,
    /// The executor was entered.
    entered: Receiver<()>,
    alive: Arc<()>,
}

fn limits() -> SchedulerConfig {
    SchedulerConfig {
        max_num_seqs: 8,
        max_num_batched_tokens: 64,
        max_model_len: 512,
        max_queued_requests: 3,
        max_queued_tokens: 200,
        max_choices: 4,
        ..SchedulerConfig::default()
    }
}

fn bench(leashed: bool) -> Bench {
    bench_with(limits(), leashed)
}

fn bench_with(config: SchedulerConfig, leashed: bool) -> Bench {
    bench_on(SimBackend::new(VOCAB as usize, BLOCKS as usize, 8, 64, 64), config, leashed)
}

/// On a device that chooses tokens by itself.
fn bench_ahead(leashed: bool) -> Bench {
    let backend = SimBackend::new(VOCAB as usize, BLOCKS as usize, 8, 64, 64).with_sampling();
    bench_on(backend, limits(), leashed)
}

fn bench_on(backend: SimBackend, config: SchedulerConfig, leashed: bool) -> Bench {
    bench_beside(backend, config, leashed, Vec::new())
}

fn bench_beside(
    backend: SimBackend,
    config: SchedulerConfig,
    leashed: bool,
    tiers: Vec<Arc<dyn Tier>>,
) -> Bench {
    let clock = Arc::new(ManualClock::default());
    let ((moods, leash), (entered_sender, entered)) = (channel(), channel());
    let alive = Arc::new(());
    let executor = Leashed {
        inner: ModelExecutor::new(Box::new(backend), VOCAB as usize, 64, 64),
        leash: leashed.then_some(leash),
        entered: entered_sender,
        _alive: alive.clone(),
    };
    let cache = KvCache::new(
        CacheConfig { blocks: BLOCKS, block_tokens: 8, bytes_per_block: 1 },
        default_policy(0.01),
    );
    let parts = EngineParts {
        config,
        cache,
        executor: Box::new(executor),
        clock: clock.clone(),
        vocab: VOCAB,
        tiers,
        events: None,
    };
    let handle = start(parts).expect("the engine starts");
    Bench { handle, clock, moods, entered, alive }
}

/// Long enough for any machine; nothing is asserted about how long things take.
const PATIENCE: Duration = Duration::from_secs(30);

fn submit(handle: &EngineHandle, request: Request) -> (folio_engine::CancelFlag, Receiver<Event>) {
    let (sender, receiver) = channel();
    let flag = handle.submit(request, Box::new(move |event| sender.send(event).is_ok())).expect("accepted");
    (flag, receiver)
}

/// Reads until every choice has finished.
fn read(events: &Receiver<Event>, n: usize) -> Vec<Event> {
    let mut seen = Vec::new();
    while seen.iter().filter(|event| matches!(event, Event::Finished { .. })).count() < n {
        seen.push(events.recv_timeout(PATIENCE).expect("the engine went silent"));
    }
    assert!(events.try_recv().is_err(), "nothing comes after the end");
    seen
}

fn tokens(events: &[Event]) -> Vec<u32> {
    let token = |event: &Event| match event {
        Event::Token { token, .. } => Some(token.id),
        _ => None,
    };
    events.iter().filter_map(token).collect()
}

fn reason(events: &[Event]) -> FinishReason {
    let reason = |event: &Event| match event {
        Event::Finished { reason, .. } => Some(*reason),
        _ => None,
    };
    events.iter().find_map(reason).expect("finished")
}

fn wait_until(what: &str, mut done: impl FnMut() -> bool) {
    let began = std::time::Instant::now();
    while !done() {
        assert!(began.elapsed() < PATIENCE, "waited in vain: {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn answers_as_if_each_request_were_alone() {
    let bench = bench_with(
        SchedulerConfig { max_queued_requests: 100, max_queued_tokens: 10_000, ..limits() },
        false,
    );
    let requests: Vec<Request> = (1..20u32)
        .map(|id| {
            let mut request = request(id.into(), &[id % 29, 3, 4, id % 7], 5 + id % 9);
            request.sampling.temperature = (id % 2) as f32;
            request
        })
        .collect();
    let readers: Vec<_> = requests.iter().map(|request| submit(&bench.handle, request.clone()).1).collect();
    for (request, reader) in requests.iter().zip(readers) {
        let events = read(&reader, 1);
        let want = expect(request, VOCAB as usize, 512, &[]);
        assert_eq!(tokens(&events), want.choices[0].tokens.iter().map(|(t, _)| *t).collect::<Vec<_>>());
    }
    wait_until("the engine is idle", || !bench.handle.stats().busy);
    let counters = bench.handle.stats().counters;
    assert_eq!(counters.prompt_tokens, 19 * 4);
    assert_eq!(
        counters.generation_tokens,
        requests.iter().map(|r| u64::from(r.sampling.max_tokens)).sum::<u64>()
    );
    assert_eq!(bench.handle.stats().cache.active_blocks, 0);
}

#[test]
fn an_idle_engine_sleeps() {
    let bench = bench(false);
    read(&submit(&bench.handle, request(1, &[1, 2], 2)).1, 1);
    wait_until("the engine is idle", || !bench.handle.stats().busy);
    // Let it reach its rest, then nothing may look at the clock any more.
    std::thread::sleep(Duration::from_millis(20));
    let asked = bench.clock.asked.load(Ordering::SeqCst);
    std::thread::sleep(Duration::from_millis(50));
    assert_eq!(bench.clock.asked.load(Ordering::SeqCst), asked);
}

/// Rules whose masks never come.
struct Silent;

impl Rules for Silent {
    fn guide(&self, _: &[u32]) -> Arc<dyn Guide> {
        Arc::new(Silent)
    }

    fn name(&self) -> &str {
        "silent"
    }
}

impl Guide for Silent {
    fn advance(&self, _: u32) {}

    fn restrict(&self, _: &[u32], _: &mut [f32]) -> Result<Restricted, String> {
        Ok(Restricted::Late)
    }

    fn is_ready(&self, _: &[u32]) -> bool {
        false
    }
}

/// Where nobody is left but who waits for a mask, the engine looks again about once in a millisecond.
#[test]
fn an_engine_that_waits_for_a_mask_does_not_spin() {
    let bench = bench(false);
    let mut silent = request(1, &[1, 2], 2);
    silent.sampling.rules = Some(RulesRef(Arc::new(Silent)));
    let (_, events) = submit(&bench.handle, silent);
    wait_until("it waits", || bench.handle.stats().waiting[WaitingFor::Grammar] == 1);
    assert_eq!((bench.handle.stats().running, bench.handle.stats().waiting.total()), (0, 1));
    std::thread::sleep(Duration::from_millis(20));
    let asked = bench.clock.asked.load(Ordering::SeqCst);
    std::thread::sleep(Duration::from_millis(100));
    let turns = bench.clock.asked.load(Ordering::SeqCst) - asked;
    assert!(turns < 2000, "it asked the clock {turns} times in a tenth of a second");
    bench.clock.now.store(4_000_000, Ordering::SeqCst);
    assert_eq!(bench.handle.health(1_000_000), Health::Ok, "it waits within its limit");
    bench.clock.now.store(6_000_000, Ordering::SeqCst);
    assert_eq!(reason(&read(&events, 1)), FinishReason::Error);
}

#[test]
fn a_vanished_client_frees_its_blocks_within_one_step() {
    let bench = bench(true);
    let (_, events) = submit(&bench.handle, request(1, &[1, 2, 3], 200));
    bench.entered.recv_timeout(PATIENCE).expect("first step");
    drop(events);
    bench.moods.send(Mood::Run).expect("running");
    // The failed delivery is noticed after this step; nothing is left for a second one.
    wait_until("its blocks are free", || {
        let stats = bench.handle.stats();
        !stats.busy && stats.counters.requests_received == 1
    });
    assert!(bench.entered.try_recv().is_err(), "a second step was computed for nobody");
    assert_eq!(bench.handle.stats().cache.active_blocks, 0);
    assert_eq!(bench.handle.stats().counters.finished[FinishReason::Cancelled as usize], 1);
}

#[test]
fn a_cancelled_request_ends_within_one_step() {
    let bench = bench(true);
    let (flag, events) = submit(&bench.handle, request(1, &[1, 2, 3], 200));
    bench.entered.recv_timeout(PATIENCE).expect("first step");
    flag.cancel();
    flag.cancel();
    bench.moods.send(Mood::Run).expect("running");
    let seen = read(&events, 1);
    assert_eq!(reason(&seen), FinishReason::Cancelled);
    assert_eq!(tokens(&seen).len(), 1, "the step in progress was its last");
    wait_until("idle", || !bench.handle.stats().busy);
    assert_eq!(bench.handle.stats().cache.active_blocks, 0);
}

#[test]
fn one_choice_is_ended_and_the_others_go_on() {
    let bench = bench(true);
    let mut many = request(1, &[1, 2, 3], 6);
    many.n = 3;
    many.sampling.temperature = 1.0;
    let (flag, events) = submit(&bench.handle, many);
    bench.entered.recv_timeout(PATIENCE).expect("first step");
    flag.cancel_choice(1);
    (0..6).for_each(|_| bench.moods.send(Mood::Run).expect("running"));
    let seen = read(&events, 3);
    let end_of = |wanted: u32| {
        seen.iter().find_map(|event| match event {
            Event::Finished { choice, reason, .. } if *choice == wanted => Some(*reason),
            _ => None,
        })
    };
    assert_eq!(end_of(0), Some(FinishReason::Length));
    assert_eq!(end_of(1), Some(FinishReason::Cancelled));
    assert_eq!(end_of(2), Some(FinishReason::Length));
    assert_eq!(tokens(&seen).len(), 6 + 1 + 6);
}

#[test]
fn the_queue_is_bounded_by_requests_and_by_tokens() {
    let by_requests = bench(true);
    let hold = submit(&by_requests.handle, request(1, &[1], 5));
    by_requests.entered.recv_timeout(PATIENCE).expect("first step");
    // The first one counts until its first step has ended.
    let queued: Vec<_> = (2..4).map(|id| submit(&by_requests.handle, request(id, &[1, 2], 5))).collect();
    let refused = by_requests.handle.submit(request(9, &[1], 5), Box::new(|_| true));
    let Err(Rejected::QueueFull { queued_requests: 3, retry_after_s, .. }) = refused else {
        panic!("not refused: {refused:?}")
    };
    assert!(retry_after_s >= 1);
    drop(by_requests.moods);
    for (_, events) in queued.iter().chain([&hold]) {
        assert_eq!(reason(&read(events, 1)), FinishReason::Length);
    }
    read(&submit(&by_requests.handle, request(10, &[1], 5)).1, 1);

    let by_tokens = bench(true);
    let _hold = submit(&by_tokens.handle, request(1, &[1; 150], 5));
    let refused = by_tokens.handle.submit(request(2, &[1; 51], 5), Box::new(|_| true));
    assert!(matches!(refused, Err(Rejected::QueueFull { queued_tokens: 150, .. })), "{refused:?}");
    assert!(by_tokens.handle.submit(request(3, &[1; 50], 5), Box::new(|_| true)).is_ok());
    drop(by_tokens.moods);
}

#[test]
fn what_can_never_run_is_refused_at_once() {
    let bench = bench(false);
    let refuse = |request: Request| bench.handle.submit(request, Box::new(|_| true)).expect_err("refused");
    assert!(matches!(refuse(request(1, &[1; 500], 13)), Rejected::TooLong { max_model_len: 512, .. }));
    // 40 blocks of 8 hold 320 tokens; the last generated token needs no room.
    assert!(matches!(
        refuse(request(1, &[1; 300], 22)),
        Rejected::LargerThanCache { needed_tokens: 321, .. }
    ));
    read(&submit(&bench.handle, request(1, &[1; 300], 21)).1, 1);
    assert!(matches!(
        refuse(Request { n: 5, ..request(2, &[1], 1) }),
        Rejected::TooManyChoices { n: 5, max: 4 }
    ));
    let field = |request: Request| match refuse(request) {
        Rejected::Invalid { field, .. } => field,
        other => panic!("{other}"),
    };
    assert_eq!(
        field(Request {
            adapter: Some(folio_engine::AdapterId(std::num::NonZeroU32::MIN).into()),
            ..request(2, &[1], 1)
        }),
        "adapter"
    );
    let image = folio_engine::EmbeddingRange {
        start: 0,
        len: 1,
        content: [1; 32],
        embeddings: [0.5f32; 4].into(),
        positions: None,
    };
    let embeddings = Some([image].into());
    assert_eq!(field(Request { embeddings, ..request(2, &[1, 2], 1) }), "embeddings");
    assert_eq!(field(request(2, &[], 1)), "prompt");
    assert_eq!(field(request(2, &[29], 1)), "prompt");
    assert_eq!(field(Request { n: 0, ..request(2, &[1], 1) }), "n");
    let with = |change: fn(&mut folio_engine::SamplingParams)| {
        let mut request = request(2, &[1], 4);
        change(&mut request.sampling);
        request
    };
    assert_eq!(field(with(|p| p.temperature = f32::NAN)), "temperature");
    assert_eq!(field(with(|p| p.temperature = -1.0)), "temperature");
    assert_eq!(field(with(|p| p.top_p = 0.0)), "top_p");
    assert_eq!(field(with(|p| p.min_p = 1.5)), "min_p");
    assert_eq!(field(with(|p| p.repetition_penalty = 0.0)), "repetition_penalty");
    assert_eq!(field(with(|p| p.presence_penalty = f32::INFINITY)), "presence_penalty");
    assert_eq!(field(with(|p| p.frequency_penalty = f32::NAN)), "frequency_penalty");
    assert_eq!(field(with(|p| p.min_tokens = 5)), "min_tokens");
    assert_eq!(field(with(|p| p.logit_bias = Arc::new([(29, 1.0)]))), "logit_bias");
    assert_eq!(field(with(|p| p.logit_bias = Arc::new([(3, 1.0), (3, 1.0)]))), "logit_bias");
}

/// Weights of some bytes, that tell on which thread they are read.
struct Told(u64, Sender<String>);

impl AdapterSource for Told {
    fn digest(&self) -> &[u8; 32] {
        &[0; 32]
    }

    fn bytes(&self) -> u64 {
        self.0
    }

    fn read(&self) -> Result<Arc<Adapter>, String> {
        let thread = std::thread::current().name().unwrap_or_default().to_owned();
        self.1.send(thread).map_err(|error| error.to_string())?;
        Ok(Arc::default())
    }
}

#[test]
fn weights_of_adapters_are_read_beside_the_engine_and_kept_while_there_is_room() {
    let limits =
        SchedulerConfig { max_adapters: 1, max_resident_adapters: 1, max_adapter_bytes: 8, ..limits() };
    let bench = bench_with(limits, false);
    let (sender, threads) = channel();
    let id = |of: u32| AdapterId(NonZeroU32::new(of).expect("a number"));
    let with = |number: u64, of: u32, bytes: u64| {
        let source = Arc::new(Told(bytes, sender.clone()));
        let adapter = Some(RequestAdapter { id: id(of), source });
        Request { adapter, ..request(number, &[1, 2, 3], 4) }
    };
    bench.handle.keep_adapter(id(1), Arc::default());
    for (number, of) in (1..).zip([1, 2, 1, 1]) {
        let events = read(&submit(&bench.handle, with(number, of, 8)).1, 1);
        let alone = expect(&request(number, &[1, 2, 3], 4), VOCAB as usize, 512, &[]);
        assert!(alone.choices[0].tokens.iter().map(|(token, _)| *token).eq(tokens(&events)));
    }
    assert_eq!(threads.try_iter().collect::<Vec<_>>(), ["folio-adapters"; 2]);
    let counters = bench.handle.stats().counters;
    assert_eq!((counters.adapter_loads, counters.adapter_evictions), (2, 2));
    let refused = bench.handle.submit(with(9, 3, 9), Box::new(|_| true)).expect_err("refused");
    assert!(refused.to_string().contains("9 bytes") && refused.to_string().contains("have 8"), "{refused}");
}

#[test]
fn draining_finishes_what_runs_and_takes_nothing_new() {
    let bench = bench(true);
    let (_, events) = submit(&bench.handle, request(1, &[1, 2], 4));
    bench.entered.recv_timeout(PATIENCE).expect("first step");
    bench.handle.drain();
    let refused = bench.handle.submit(request(2, &[1], 1), Box::new(|_| true));
    assert_eq!(refused.expect_err("refused"), Rejected::ShuttingDown);
    (0..4).for_each(|_| bench.moods.send(Mood::Run).expect("running"));
    assert_eq!(reason(&read(&events, 1)), FinishReason::Length);
    bench.handle.join();
    assert!(bench.handle.is_finished());
}

#[test]
fn stopping_ends_everything_with_an_error() {
    let bench = bench(true);
    let (_, running) = submit(&bench.handle, request(1, &[1, 2], 200));
    bench.entered.recv_timeout(PATIENCE).expect("first step");
    let (_, queued) = submit(&bench.handle, request(2, &[1, 2], 4));
    bench.handle.stop();
    bench.moods.send(Mood::Run).expect("running");
    assert_eq!(reason(&read(&running, 1)), FinishReason::Error);
    assert_eq!(reason(&read(&queued, 1)), FinishReason::Error);
    bench.handle.join();
}

#[test]
fn the_engine_ends_with_its_last_handle() {
    let Bench { handle, alive, .. } = bench(false);
    let other = handle.clone();
    drop(handle);
    read(&submit(&other, request(1, &[1], 2)).1, 1);
    drop(other);
    wait_until("the engine's parts are dropped", || Arc::strong_count(&alive) == 1);
}

#[test]
fn an_executor_error_ends_the_step_it_hit_and_no_more() {
    let bench = bench(true);
    let (_, hit) = submit(&bench.handle, request(1, &[1, 2], 20));
    bench.entered.recv_timeout(PATIENCE).expect("first step");
    let (_, spared) = submit(&bench.handle, request(2, &[3, 4], 3));
    bench.moods.send(Mood::Fail).expect("running");
    let seen = read(&hit, 1);
    assert!(
        matches!(seen.last(), Some(Event::Finished { error: Some(error), .. }) if error.contains("told to"))
    );
    assert_eq!(reason(&seen), FinishReason::Error);
    (0..3).for_each(|_| bench.moods.send(Mood::Run).expect("running"));
    assert_eq!(reason(&read(&spared, 1)), FinishReason::Length);
    wait_until("idle", || !bench.handle.stats().busy);
    let stats = bench.handle.stats();
    assert_eq!((stats.counters.executor_failures, stats.cache.active_blocks), (1, 0));
    assert_eq!(bench.handle.health(1), Health::Ok);
}

#[test]
fn an_executor_panic_ends_everything_and_shows() {
    let bench = bench(true);
    let (_, hit) = submit(&bench.handle, request(1, &[1, 2], 20));
    bench.entered.recv_timeout(PATIENCE).expect("first step");
    let (_, queued) = submit(&bench.handle, request(2, &[3, 4], 3));
    bench.moods.send(Mood::Panic).expect("running");
    assert_eq!(reason(&read(&hit, 1)), FinishReason::Error);
    assert_eq!(reason(&read(&queued, 1)), FinishReason::Error);
    wait_until("unhealthy", || matches!(bench.handle.health(1_000_000), Health::Unhealthy { .. }));
    let refused = bench.handle.submit(request(3, &[1], 1), Box::new(|_| true)).expect_err("refused");
    assert!(matches!(refused, Rejected::Unhealthy { reason } if reason.contains("told to")));
    bench.handle.stop();
    bench.handle.join();
}

fn one_at_a_time() -> SchedulerConfig {
    SchedulerConfig { max_num_seqs: 1, max_queued_requests: 100, max_queued_tokens: 10_000, ..limits() }
}

#[test]
fn an_executor_that_fails_for_ever_makes_the_engine_unhealthy_and_nobody_hangs() {
    let bench = bench_with(one_at_a_time(), true);
    let count = u64::from(FAILURES_MAX) + 4;
    let readers: Vec<_> = (1..=count).map(|id| submit(&bench.handle, request(id, &[1, 2], 5)).1).collect();
    // No step is told more than that: none is begun afterwards.
    for failures in 0..FAILURES_MAX {
        assert_eq!(bench.handle.health(1_000_000), Health::Ok, "after {failures}");
        bench.entered.recv_timeout(PATIENCE).expect("another step");
        bench.moods.send(Mood::Fail).expect("running");
    }
    for reader in &readers {
        let seen = read(reader, 1);
        assert!(
            matches!(seen.last(), Some(Event::Finished { error: Some(error), .. }) if error.contains("told to"))
        );
    }
    wait_until("unhealthy", || bench.handle.health(1_000_000) != Health::Ok);
    let Health::Unhealthy { reason } = bench.handle.health(1_000_000) else { panic!("stalled") };
    assert!(reason.contains("8 steps in a row failed") && reason.contains("told to"), "{reason}");
    let refused = bench.handle.submit(request(99, &[1], 1), Box::new(|_| true)).expect_err("refused");
    assert!(matches!(refused, Rejected::Unhealthy { .. }), "{refused}");
    assert!(bench.entered.try_recv().is_err(), "the executor was called again");
    let failures = || bench.handle.stats().counters.executor_failures;
    wait_until("counted", || failures() == u64::from(FAILURES_MAX));
}

#[test]
fn one_step_that_is_computed_makes_up_for_those_that_failed() {
    let bench = bench_with(one_at_a_time(), true);
    for round in 0..3 {
        for failure in 1..FAILURES_MAX {
            let (_, events) = submit(&bench.handle, request(u64::from(100 * round + failure), &[1, 2], 1));
            bench.moods.send(Mood::Fail).expect("running");
            assert_eq!(reason(&read(&events, 1)), FinishReason::Error);
        }
        let (_, events) = submit(&bench.handle, request(u64::from(100 * round), &[1, 2], 1));
        bench.moods.send(Mood::Run).expect("running");
        assert_eq!(reason(&read(&events, 1)), FinishReason::Length);
        assert_eq!(bench.handle.health(1_000_000), Health::Ok);
    }
}

/// Turns of the loop, and requests that a failing executor ends, are not progress.
#[test]
fn an_executor_that_fails_slowly_is_a_stall() {
    let bench = bench_with(one_at_a_time(), true);
    let readers: Vec<_> = (1..5).map(|id| submit(&bench.handle, request(id, &[1, 2], 5)).1).collect();
    for reader in &readers[..3] {
        bench.entered.recv_timeout(PATIENCE).expect("another step");
        bench.clock.now.fetch_add(400_000, Ordering::SeqCst);
        bench.moods.send(Mood::Fail).expect("running");
        assert_eq!(reason(&read(reader, 1)), FinishReason::Error);
    }
    bench.entered.recv_timeout(PATIENCE).expect("another step");
    assert_eq!(bench.handle.health(1_000_000), Health::Stalled { for_us: 1_200_000 });
    (0..5).for_each(|_| bench.moods.send(Mood::Run).expect("running"));
    assert_eq!(reason(&read(&readers[3], 1)), FinishReason::Length);
    wait_until("healthy", || bench.handle.health(1_000_000) == Health::Ok);
}

#[test]
fn a_panicking_sink_only_loses_its_own_request() {
    let bench = bench(false);
    let flag = bench.handle.submit(request(1, &[1, 2], 50), Box::new(|_| panic!("bad sink")));
    assert!(flag.is_ok());
    let (_, events) = submit(&bench.handle, request(2, &[1, 2], 50));
    assert_eq!(reason(&read(&events, 1)), FinishReason::Length);
    wait_until("idle", || !bench.handle.stats().busy);
    assert_eq!(bench.handle.stats().counters.finished[FinishReason::Cancelled as usize], 1);
}

#[test]
fn health_means_progress() {
    let bench = bench(true);
    bench.clock.now.store(60_000_000, Ordering::SeqCst);
    assert_eq!(bench.handle.health(1_000_000), Health::Ok, "nothing to do for a minute is healthy");
    let (_, events) = submit(&bench.handle, request(1, &[1, 2], 2));
    bench.entered.recv_timeout(PATIENCE).expect("first step");
    assert_eq!(bench.handle.health(1_000_000), Health::Ok, "it has only begun");
    bench.clock.now.fetch_add(5_000_000, Ordering::SeqCst);
    assert_eq!(bench.handle.health(1_000_000), Health::Stalled { for_us: 5_000_000 });
    bench.moods.send(Mood::Run).expect("running");
    bench.entered.recv_timeout(PATIENCE).expect("second step");
    assert_eq!(bench.handle.health(1_000_000), Health::Ok);
    bench.moods.send(Mood::Run).expect("running");
    read(&events, 1);
}

#[test]
fn a_deadline_passes_while_others_run() {
    let bench = bench(true);
    let (_, events) =
        submit(&bench.handle, Request { deadline: Some(Micros(1_000)), ..request(1, &[1], 300) });
    bench.entered.recv_timeout(PATIENCE).expect("first step");
    bench.clock.now.store(2_000, Ordering::SeqCst);
    bench.moods.send(Mood::Run).expect("running");
    assert_eq!(reason(&read(&events, 1)), FinishReason::Deadline);
}

#[test]
fn an_id_in_use_is_refused() {
    let bench = bench(true);
    let (_, first) = submit(&bench.handle, request(1, &[1, 2], 2));
    bench.entered.recv_timeout(PATIENCE).expect("first step");
    let seen = Arc::new(Mutex::new(Vec::new()));
    let sink = seen.clone();
    let second = bench.handle.submit(
        request(1, &[1, 2], 2),
        Box::new(move |event| {
            sink.lock().expect("not poisoned").push(event);
            true
        }),
    );
    assert!(second.is_ok());
    (0..2).for_each(|_| bench.moods.send(Mood::Run).expect("running"));
    assert_eq!(reason(&read(&first, 1)), FinishReason::Length);
    let seen = seen.lock().expect("not poisoned");
    assert!(matches!(&seen[..], [Event::Finished { reason: FinishReason::Error, .. }]), "{seen:?}");
    assert_ne!(bench.handle.next_request_id(), RequestId(0));
    assert_ne!(bench.handle.next_request_id(), bench.handle.next_request_id());
}

#[test]
fn steps_are_begun_while_others_run_where_the_device_chooses() {
    let bench = bench_ahead(false);
    let requests: Vec<Request> = (1..4).map(|id| request(id, &[id as u32, 2, 3], 20 + id as u32)).collect();
    let streams: Vec<_> = requests.iter().map(|request| submit(&bench.handle, request.clone())).collect();
    for (request, (_, events)) in requests.iter().zip(&streams) {
        let alone = expect(request, VOCAB as usize, 512, &[]);
        let want: Vec<u32> = alone.choices[0].tokens.iter().map(|(token, _)| *token).collect();
        assert_eq!(tokens(&read(events, 1)), want);
    }
    wait_until("idle", || !bench.handle.stats().busy);
    let stats = bench.handle.stats();
    assert!(stats.counters.steps_ahead > 10, "{:?}", stats.counters);
    assert_eq!(stats.cache.active_blocks, 0);
}

/// The prompt's step, the first decode, and the step that is begun while that runs.
#[test]
fn a_step_that_fails_or_panics_ahead_ends_whom_it_had_after_the_one_before() {
    for panics in [false, true] {
        let bench = bench_ahead(true);
        let (_, events) = submit(&bench.handle, request(1, &[1, 2], 20));
        let last = if panics { Mood::Panic } else { Mood::Fail };
        for mood in [Mood::Run, Mood::Run, last] {
            bench.entered.recv_timeout(PATIENCE).expect("a step");
            bench.moods.send(mood).expect("running");
        }
        if !panics {
            // Behind the step that was not begun another is, of a sequence that ends meanwhile.
            bench.entered.recv_timeout(PATIENCE).expect("a step");
            bench.moods.send(Mood::Run).expect("running");
        }
        let seen = read(&events, 1);
        // What an executor that panicked may still say is not listened to.
        let said = if panics { 1 } else { 2 };
        assert_eq!((tokens(&seen).len(), reason(&seen)), (said, FinishReason::Error));
        assert!(
            matches!(seen.last(), Some(Event::Finished { error: Some(error), .. }) if error.contains("told to"))
        );
        if panics {
            wait_until("unhealthy", || matches!(bench.handle.health(1), Health::Unhealthy { .. }));
        }
        bench.handle.stop();
        bench.handle.join();
    }
}

/// Tenants that come once leave nothing in the engine's snapshot; what they held is told until nobody wants to know.
#[test]
fn tenants_that_hold_nothing_are_forgotten_and_what_they_held_is_told() {
    const VISITS: u32 = 100_000;
    const COMES_AGAIN: TenantId = TenantId(0);
    let config = SchedulerConfig { max_queued_requests: 100, max_queued_tokens: 1000, ..limits() };
    let bench = bench_with(config, false);
    let handle = &bench.handle;
    let (mut most, mut held) = (0, Holdings::default());
    for visit in (1..=VISITS).step_by(50) {
        let readers: Vec<_> = (visit..visit + 50)
            .map(|id| {
                let tenant = if id % 50 == 0 { COMES_AGAIN } else { TenantId(id) };
                let prompt = [0, 1, 2, 3, 4, 5, 6, id % 29];
                submit(handle, Request { tenant, root: root(tenant), ..request(id.into(), &prompt, 1) }).1
            })
            .collect();
        bench.clock.now.fetch_add(10, Ordering::SeqCst);
        readers.iter().for_each(|reader| drop(read(reader, 1)));
        // What is cached now is so for a while, however soon the others come.
        bench.clock.now.fetch_add(10, Ordering::SeqCst);
        most = most.max(handle.stats().tenants.len());
        let now = handle.holdings(COMES_AGAIN);
        assert!(now.active_byte_us >= held.active_byte_us && now.cached_byte_us >= held.cached_byte_us);
        held = now;
    }
    assert!(most <= 128 + 2 * BLOCKS as usize, "{most} tenants");
    wait_until("the engine is idle", || !handle.stats().busy);
    let stats = handle.stats();
    let mut all = stats.retired;
    stats.tenants.iter().for_each(|(_, held)| all.carry(held));
    let each = (0..=VISITS).map(|tenant| handle.holdings(TenantId(tenant)));
    let mut sum = Holdings::default();
    each.for_each(|held| sum.carry(&held));
    assert_eq!((sum.active_byte_us, sum.cached_byte_us), (all.active_byte_us, all.cached_byte_us));
    assert!(stats.retired.cached_byte_us > 0);

    let retired = |tenant: u32| stats.tenants.iter().all(|(known, _)| known.0 != tenant);
    let gone = (1..).find(|id| retired(*id) && handle.holdings(TenantId(*id)).cached_byte_us > 0);
    let gone = TenantId(gone.expect("somebody held something"));
    handle.retain_tenants(&|tenant| tenant == COMES_AGAIN);
    assert_eq!(handle.holdings(gone), Holdings::default());
    assert!(handle.holdings(COMES_AGAIN).cached_byte_us >= held.cached_byte_us);
    assert_eq!(handle.stats().retired, stats.retired, "the sum keeps them");
}

/// Takes what it is given, and never says that it has read it.
#[derive(Default)]
struct Mute(Mutex<Vec<usize>>);

impl Tier for Mute {
    fn start(&self, _: ReportSink, _: Arc<dyn Clock>, _: Option<&Arc<EventFeed>>) {}
    fn find(&self, _: &BlockHashes, _: u32) -> Vec<std::ops::Range<u32>> {
        Vec::new()
    }
    fn order(&self, order: TransferOrder) -> bool {
        if let TransferOrder::Store(store) = order {
            self.0.lock().unwrap().push(store.contents.len());
        }
        true
    }
    fn stats(&self) -> TierStats {
        TierStats::default()
    }
    fn close(&self, _: Duration) {}
}

#[test]
fn what_waits_to_be_stored_is_ordered_before_the_engine_ends() {
    let tier = Arc::new(Mute::default());
    let backend = SimBackend::new(VOCAB as usize, BLOCKS as usize, 8, 64, 64);
    let config = SchedulerConfig { max_store_bytes: 1, ..limits() };
    let bench = bench_beside(backend, config, false, vec![tier.clone()]);
    for id in 1..=3u32 {
        let prompt: Vec<u32> = (0..8 * id).map(|at| (at * 5 + id) % VOCAB).collect();
        read(&submit(&bench.handle, request(id.into(), &prompt, 1)).1, 1);
    }
    wait_until("the engine is idle", || !bench.handle.stats().busy);
    assert_eq!(*tier.0.lock().unwrap(), [1], "the others wait for it");
    bench.handle.drain();
    bench.handle.join();
    assert_eq!(*tier.0.lock().unwrap(), [1, 2, 3]);
}
