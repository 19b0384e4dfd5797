//! What the engine tells of its cache, and when: before a step what it overwrites, behind it what can be read.

use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use folio_engine::plan::ExecutorError;
use folio_engine::request::Event;
use folio_engine::{
    CacheCommand, CacheResponse, EngineHandle, EngineParts, EventFeed, Executor, ModelExecutor,
    SchedulerConfig, StepOutput, StepPlan, SystemClock, TierBatch, start,
};
use folio_kv::{BlockHashes, CacheConfig, CacheEvent, KvCache, default_policy};
use folio_sim::SimBackend;
use folio_sim::scenario::{request, root};

const VOCAB: u32 = 29;
const BLOCKS: u32 = 10;
const SIZE: u32 = 8;

/// Of one step: what had been told since the step before when it began.
type Told = Arc<Mutex<Vec<Vec<CacheEvent>>>>;

/// Takes what was told before each step.
struct Watched {
    inner: ModelExecutor,
    feed: Arc<EventFeed>,
    told: Told,
}

impl Executor for Watched {
    fn begin(&mut self, plan: &StepPlan) -> Result<(), ExecutorError> {
        let mut batch = self.feed.empty_batch();
        self.feed.take(&mut batch, &mut TierBatch::default(), Duration::ZERO);
        self.told.lock().unwrap().push(batch.events);
        self.inner.begin(plan)
    }

    fn finish(&mut self) -> Result<&StepOutput, ExecutorError> {
        self.inner.finish()
    }
}

fn engine(feed: &Arc<EventFeed>, told: &Told) -> EngineHandle {
    let backend = SimBackend::new(VOCAB as usize, BLOCKS as usize, SIZE as usize, 64, 64);
    let inner = ModelExecutor::new(Box::new(backend), VOCAB as usize, 64, 64);
    let cache = CacheConfig { blocks: BLOCKS, block_tokens: SIZE, bytes_per_block: 1 };
    let config =
        SchedulerConfig { max_model_len: 76, max_num_batched_tokens: 64, ..SchedulerConfig::default() };
    start(EngineParts {
        config,
        cache: KvCache::new(cache, default_policy(0.01)),
        executor: Box::new(Watched { inner, feed: feed.clone(), told: told.clone() }),
        clock: Arc::new(SystemClock::new()),
        vocab: VOCAB,
        tiers: Vec::new(),
        events: Some(feed.clone()),
    })
    .expect("it starts")
}

/// Its answer's end, and by then everything about it was told.
fn serve(handle: &EngineHandle, of: u32) {
    let (sender, receiver) = channel();
    let prompt: Vec<u32> = (0..64).map(|at| (at * at + of) % VOCAB).collect();
    let request = request(of.into(), &prompt, 1);
    handle.submit(request, Box::new(move |event| sender.send(event).is_ok())).expect("accepted");
    while !matches!(receiver.recv_timeout(Duration::from_secs(30)), Ok(Event::Finished { .. })) {}
}

#[test]
fn what_a_step_overwrites_is_told_before_it_and_what_it_computed_behind_it() {
    let (feed, told) = (Arc::new(EventFeed::new(1024, SIZE)), Told::default());
    let handle = engine(&feed, &told);
    serve(&handle, 1);
    serve(&handle, 2);
    let steps = told.lock().unwrap().clone();
    let [first, second] = &steps[..] else { panic!("{} steps", steps.len()) };
    assert_eq!(first.len(), 0, "nothing is stored before it is computed");
    let stored = second.iter().take_while(|event| matches!(event, CacheEvent::Stored { .. })).count();
    let removed = second[stored..].iter().filter(|event| matches!(event, CacheEvent::Removed { .. })).count();
    // Of 10 blocks two were free, and a prompt takes 8.
    assert_eq!((stored, removed, second.len()), (8, 6, 14), "{second:?}");
    let (sender, receiver) = channel();
    handle.command(CacheCommand::Resident, Box::new(move |answer| drop(sender.send(answer)))).expect("taken");
    let Ok(CacheResponse::Resident(resident)) = receiver.recv() else { panic!("no answer") };
    let mut batch = feed.empty_batch();
    assert!(
        feed.take(&mut batch, &mut TierBatch::default(), Duration::from_secs(30)) && batch.events.len() == 8
    );
    assert!(batch.events.iter().all(|event| resident.events.contains(event)), "what was told is there");
    let prompt: Vec<u32> = (0..64).map(|at| (at * at + 2) % VOCAB).collect();
    assert_eq!(batch.tokens, prompt);
    let hashes = BlockHashes::new(&root(folio_kv::TenantId(0)), &prompt, SIZE);
    let told = batch.events.iter().map(|event| match event {
        CacheEvent::Stored { hash, .. } => *hash,
        other => panic!("{other:?}"),
    });
    assert!(told.eq(hashes.iter().copied()), "parents first");
    handle.stop();
    handle.join();
    assert!(
        !feed.take(&mut batch, &mut TierBatch::default(), Duration::from_secs(30)),
        "the feed ends with the engine"
    );
}

/// Nobody takes anything: the engine goes on, and who comes at last is told what is there.
#[test]
fn a_listener_that_sleeps_holds_up_nothing_and_is_told_all_of_it_when_it_wakes() {
    let (quiet, feed) = (Arc::new(EventFeed::new(1024, SIZE)), Arc::new(EventFeed::new(16, SIZE)));
    let told = Told::default();
    let backend = SimBackend::new(VOCAB as usize, BLOCKS as usize, SIZE as usize, 64, 64);
    let inner = ModelExecutor::new(Box::new(backend), VOCAB as usize, 64, 64);
    let cache = CacheConfig { blocks: BLOCKS, block_tokens: SIZE, bytes_per_block: 1 };
    let config =
        SchedulerConfig { max_model_len: 76, max_num_batched_tokens: 64, ..SchedulerConfig::default() };
    let handle = start(EngineParts {
        config,
        cache: KvCache::new(cache, default_policy(0.01)),
        executor: Box::new(Watched { inner, feed: quiet, told }),
        clock: Arc::new(SystemClock::new()),
        vocab: VOCAB,
        tiers: Vec::new(),
        events: Some(feed.clone()),
    })
    .expect("it starts");
    (0..20).for_each(|of| serve(&handle, of));
    // When that is answered all of the last request was told.
    let (sender, receiver) = channel();
    handle.command(CacheCommand::Resident, Box::new(move |answer| drop(sender.send(answer)))).expect("taken");
    let Ok(CacheResponse::Resident(resident)) = receiver.recv() else { panic!("no answer") };
    let mut held = std::collections::HashSet::new();
    let mut batch = feed.empty_batch();
    let mut anew = false;
    loop {
        assert!(feed.take(&mut batch, &mut TierBatch::default(), Duration::from_secs(30)));
        if batch.begins_anew {
            anew = true;
            held.clear();
        }
        for event in &batch.events {
            match event {
                CacheEvent::Stored { hash, .. } => assert!(held.insert(*hash)),
                CacheEvent::Removed { hash, .. } => assert!(held.remove(hash)),
                CacheEvent::Cleared { .. } => {}
            }
        }
        if anew && !batch.incomplete {
            break;
        }
    }
    assert_eq!(resident.events.len(), held.len());
    handle.stop();
    handle.join();
}
