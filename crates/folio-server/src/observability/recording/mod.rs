//! A recording of the traffic, which Perfetto opens and `folio trace replay` runs again: what is behind `GET /v1/trace`.
//!
//! Owns: what is told of requests and steps while somebody records. Must never: tell of a text, of a token, or of anything by which one
//! recording could be joined with another: of contents only which are equal within the recording is told, tenants are numbers. While nobody
//! records, an answer's end costs one look at a flag.
//!
//! What a request was comes with its end, over a bounded queue, to a thread that numbers its blocks (`blocks`); what finds no room is left
//! out and counted. Steps are the differences of the engine's snapshot, taken every [`SAMPLED_EVERY`]. Bounded: one recording at a time,
//! [`SECONDS_MAX`], [`REQUESTS_MAX`] answers, and as many different blocks as `blocks` keeps.

mod blocks;
mod file;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::time::Duration;

use folio_engine::request::Timing;
use folio_engine::{EngineStats, FinishReason, Micros, SchedulerConfig, Work};
use folio_kv::{BlockHashes, TenantId};
use parking_lot::Mutex;
use tokio::sync::oneshot;

use crate::engine::Engine;
use blocks::{BlockNumbers, Numbered};

/// The longest recording.
pub(crate) const SECONDS_MAX: u64 = 600;
/// Answers of one recording.
const REQUESTS_MAX: usize = 50_000;
/// Between two samples of the engine's snapshot.
const SAMPLED_EVERY: Duration = Duration::from_millis(50);
/// Answers on their way to the thread.
const WAITING_MAX: usize = 1024;

/// An answer that ended, one of perhaps several of its request.
pub(crate) struct RecordedAnswer {
    pub tenant: TenantId,
    /// When its request was handed to the engine.
    pub submitted: Micros,
    pub hashes: BlockHashes,
    pub prompt: Arc<[u32]>,
    pub cached_tokens: u32,
    /// What was asked for.
    pub max_tokens: u32,
    /// All tokens; the last was not computed.
    pub answer: Vec<u32>,
    pub reason: FinishReason,
    pub timing: Timing,
}

/// See the module documentation.
pub(crate) struct Recorder {
    engine: Arc<dyn Engine>,
    /// Somebody records.
    on: AtomicBool,
    running: Mutex<Option<CurrentRecording>>,
}

struct CurrentRecording {
    sender: SyncSender<RecordedAnswer>,
    from: Micros,
    counts: Arc<RecordedCounts>,
}

#[derive(Default)]
struct RecordedCounts {
    /// Requests that were submitted, and answers that were not recorded for want of room.
    submitted: AtomicU64,
    left_out: AtomicU64,
}

/// Why nothing is recorded.
#[derive(Debug)]
pub(crate) enum NotRecorded {
    /// Somebody else records.
    Busy,
    /// Its thread could not be started.
    Thread(std::io::Error),
}

/// The engine's snapshot at one time.
#[derive(Clone, Copy)]
struct RecordedSample {
    at: Micros,
    work: Work,
    running: u32,
    waiting: u32,
    active_blocks: u32,
    cached_blocks: u32,
}

impl RecordedSample {
    fn of(stats: &EngineStats, at: Micros) -> Self {
        Self {
            at,
            work: stats.work,
            running: stats.running,
            waiting: stats.waiting.iter().map(|(_, count)| count).sum(),
            active_blocks: stats.cache.active_blocks,
            cached_blocks: stats.cache.cached_blocks,
        }
    }
}

/// What a recording's file is made of.
pub(crate) struct Recording {
    from: Micros,
    to: Micros,
    limits: SchedulerConfig,
    blocks: u32,
    block_tokens: u32,
    bytes_per_block: u64,
    submitted: u64,
    left_out: u64,
    answers: Vec<NumberedAnswer>,
    samples: Vec<RecordedSample>,
}

/// What the thread makes of what ends.
#[derive(Default)]
struct NumberedAnswers {
    answers: Vec<NumberedAnswer>,
    /// Answers that there was no room for.
    left_out: u64,
}

/// An answer without its texts.
struct NumberedAnswer {
    tenant: u32,
    submitted: Micros,
    prompt_tokens: u32,
    cached_tokens: u32,
    output_tokens: u32,
    max_tokens: u32,
    reason: FinishReason,
    timing: Timing,
    numbered: Numbered,
}

impl Recorder {
    pub fn new(engine: Arc<dyn Engine>) -> Self {
        Self { engine, on: AtomicBool::new(false), running: Mutex::default() }
    }

    /// Whether to tell of what ends ([`Recorder::ended`]).
    pub fn is_on(&self) -> bool {
        self.on.load(Ordering::Relaxed)
    }

    /// A request was handed to the engine, for so many answers.
    pub fn submitted(&self, answers: u64) {
        if self.is_on()
            && let Some(running) = &*self.running.lock()
        {
            running.counts.submitted.fetch_add(answers, Ordering::Relaxed);
        }
    }

    /// An answer ended. What was there before the recording is not part of it.
    pub fn ended(&self, answer: RecordedAnswer) {
        let running = self.running.lock();
        let Some(running) = running.as_ref().filter(|running| answer.submitted >= running.from) else {
            return;
        };
        if let Err(TrySendError::Full(_)) = running.sender.try_send(answer) {
            running.counts.left_out.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Records for so long. Dropped, it ends.
    pub async fn record(self: &Arc<Self>, duration: Duration) -> Result<Recording, NotRecorded> {
        let (mut guard, numbered) = self.begin()?;
        let (from, counts) = (guard.from, guard.counts.clone());
        let to = Micros(from.0 + duration.as_micros() as u64);
        let mut samples = vec![self.sample()];
        loop {
            let now = self.engine.now();
            if now >= to {
                break;
            }
            let left = Duration::from_micros(to.0 - now.0);
            tokio::time::sleep(left.min(SAMPLED_EVERY)).await;
            samples.push(self.sample());
        }
        guard.end();
        // The thread ends with what is on its way.
        let NumberedAnswers { answers, left_out } = numbered.await.unwrap_or_default();
        let stats = self.engine.stats();
        Ok(Recording {
            from,
            to,
            limits: self.engine.limits().cloned().unwrap_or_default(),
            blocks: stats.cache.blocks,
            block_tokens: stats.cache.block_tokens,
            bytes_per_block: stats.cache.bytes_per_block,
            submitted: counts.submitted.load(Ordering::Relaxed),
            left_out: counts.left_out.load(Ordering::Relaxed) + left_out,
            answers,
            samples,
        })
    }

    fn sample(&self) -> RecordedSample {
        RecordedSample::of(&self.engine.stats(), self.engine.now())
    }

    /// What ends it, and where what was kept comes then.
    fn begin(self: &Arc<Self>) -> Result<(RecordingGuard, oneshot::Receiver<NumberedAnswers>), NotRecorded> {
        let mut running = self.running.lock();
        if running.is_some() {
            return Err(NotRecorded::Busy);
        }
        let (sender, receiver) = sync_channel(WAITING_MAX);
        let (done, numbered) = oneshot::channel();
        let thread = std::thread::Builder::new().name("folio-record".into());
        // Nobody waits for it who went away.
        thread.spawn(move || drop(done.send(number(&receiver)))).map_err(NotRecorded::Thread)?;
        let (from, counts) = (self.engine.now(), Arc::new(RecordedCounts::default()));
        *running = Some(CurrentRecording { sender, from, counts: counts.clone() });
        self.on.store(true, Ordering::Relaxed);
        Ok((RecordingGuard { recorder: self.clone(), from, counts, over: false }, numbered))
    }
}

/// Ends a recording, whatever becomes of whoever asked for it.
struct RecordingGuard {
    recorder: Arc<Recorder>,
    from: Micros,
    counts: Arc<RecordedCounts>,
    over: bool,
}

impl RecordingGuard {
    fn end(&mut self) {
        if !std::mem::replace(&mut self.over, true) {
            self.recorder.on.store(false, Ordering::Relaxed);
            *self.recorder.running.lock() = None;
        }
    }
}

impl Drop for RecordingGuard {
    fn drop(&mut self) {
        self.end();
    }
}

/// Takes the texts off what comes, until nobody sends any more.
fn number(receiver: &Receiver<RecordedAnswer>) -> NumberedAnswers {
    let (mut blocks, mut kept) = (BlockNumbers::default(), NumberedAnswers::default());
    while let Ok(answer) = receiver.recv() {
        let output_tokens = answer.answer.len() as u32;
        let computed = &answer.answer[..answer.answer.len().saturating_sub(1)];
        let numbered = match kept.answers.len() < REQUESTS_MAX {
            true => blocks.number(answer.tenant, answer.hashes, &answer.prompt, computed),
            false => None,
        };
        let Some(numbered) = numbered else {
            kept.left_out += 1;
            continue;
        };
        kept.answers.push(NumberedAnswer {
            tenant: blocks.tenant(answer.tenant),
            submitted: answer.submitted,
            prompt_tokens: answer.prompt.len() as u32,
            cached_tokens: answer.cached_tokens,
            output_tokens,
            max_tokens: answer.max_tokens,
            reason: answer.reason,
            timing: answer.timing,
            numbered,
        });
    }
    kept
}
