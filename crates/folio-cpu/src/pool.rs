//! The thread pool: every worker runs the same function, once per step, with barriers inside.
//!
//! Owns: threads, the wake-up of a step, [`Worker::barrier`], [`Claims`]. Must never: know what is computed, allocate per
//! step, or use more threads than it was made with. The caller of [`ThreadPool::run`] is worker 0.
//!
//! # States and who may touch them
//!
//! - `epoch` (caller writes, workers read). An odd or even number has no meaning; a *change* means "a job is there".
//!   Written once per run, after `job`, with release order; a worker that sees the change by acquire sees the job.
//! - `job` (caller writes, workers read): valid from the change of `epoch` until `running` falls to zero. The caller does
//!   not return from `run` before that, so the borrow behind the pointer outlives its use.
//! - `running` (caller sets to the number of other workers before `epoch` changes; each worker takes one off when it is
//!   done, panicked or not). Zero means: nobody but the caller touches the pool.
//! - `parked[i]` (worker i sets it, the caller clears it): "worker i may be asleep, unpark it".
//! - `arrived`, `passed` (workers, inside a run): the barrier. The last to arrive zeroes `arrived` and then bumps `passed`;
//!   the others wait for `passed` to change. Zeroing before bumping makes the next barrier safe to enter.
//! - `failed` (any worker sets it when it panics, the caller clears it after the run).
//!
//! # Risky situations
//!
//! - *A worker goes to sleep while the caller posts a job.* The worker sets `parked`, then reads `epoch` again; the caller
//!   changes `epoch`, then reads `parked`. Both pairs are sequentially consistent, so one of the two sees the other. An
//!   `unpark` before the `park` leaves a token, so the `park` returns at once. A stale token costs one more loop.
//! - *A worker panics.* It sets `failed` and counts itself out. Others may wait for it in a barrier: they poll `failed` and
//!   unwind too, so all count themselves out. Barrier state is then stale; the caller resets it while it is alone.
//! - *The caller itself panics inside the job.* It is caught like any worker's; `run` still waits for the others.
//! - *A worker is preempted by the host.* The others spin briefly, then yield, then nap between polls, so that it can run on
//!   their processor. Nobody has to wake them.
//! - *The pool is dropped.* `quit` is set before a last change of `epoch`; threads are joined.

use std::any::Any;
use std::cell::UnsafeCell;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{JoinHandle, Thread};

use crate::error::CpuError;

/// More than any machine this is meant for; a bound on memory and on typing errors.
pub const MAX_THREADS: usize = 512;
/// Polls with a pause in between: some 30 microseconds.
const SPINS: u32 = 2000;
/// Polls with a yield in between, before a worker without a job goes to sleep.
const YIELDS: u32 = 64;
/// The same inside a run: some 200 microseconds. Whoever is waited for then has lost its processor to somebody else, and may have this
/// one; a yield alone does not give it away for longer than a moment.
const YIELDS_IN_RUN: u32 = 512;
/// Sleep between polls after that.
const NAP: std::time::Duration = std::time::Duration::from_micros(50);

/// Keeps what one core writes away from what another polls (two lines: prefetchers fetch pairs).
#[repr(align(128))]
#[derive(Default)]
struct Padded<T>(T);

type Job = *const (dyn Fn(&Worker<'_>) + Sync);

struct Shared {
    epoch: Padded<AtomicU32>,
    running: Padded<AtomicUsize>,
    arrived: Padded<AtomicUsize>,
    passed: Padded<AtomicU32>,
    failed: Padded<AtomicBool>,
    parked: Vec<Padded<AtomicBool>>,
    quit: AtomicBool,
    job: UnsafeCell<Option<Job>>,
    /// First panic of a run: worker and message.
    panic: Mutex<Option<(usize, String)>>,
    count: usize,
}

// SAFETY: `job` is written by the caller only while no worker runs and read by workers only after the release/acquire pair
// on `epoch`; everything else is atomic or locked. The pointer behind `job` is to a `Sync` closure.
unsafe impl Sync for Shared {}
// SAFETY: as above; the raw pointer is never dereferenced outside a run.
unsafe impl Send for Shared {}

/// One of the threads inside a run.
pub struct Worker<'a> {
    index: usize,
    shared: &'a Shared,
}

/// Unwinds workers whose neighbour panicked, without a second message.
struct NeighbourPanicked;

impl Worker<'_> {
    /// 0 is the caller.
    pub fn index(&self) -> usize {
        self.index
    }

    /// Workers in this run.
    pub fn count(&self) -> usize {
        self.shared.count
    }

    /// Waits until every worker is here. What was written before is seen by all after.
    pub fn barrier(&self) {
        let shared = self.shared;
        if shared.count == 1 {
            return;
        }
        let generation = shared.passed.0.load(Ordering::Relaxed);
        if shared.arrived.0.fetch_add(1, Ordering::AcqRel) + 1 == shared.count {
            shared.arrived.0.store(0, Ordering::Relaxed);
            shared.passed.0.store(generation.wrapping_add(1), Ordering::Release);
            return;
        }
        let mut polls = 0u32;
        while shared.passed.0.load(Ordering::Acquire) == generation {
            if shared.failed.0.load(Ordering::Relaxed) {
                resume_unwind(Box::new(NeighbourPanicked));
            }
            wait(&mut polls);
        }
    }

    /// This worker's share of `0..total` in whole multiples of `align`: contiguous, disjoint, covering.
    pub fn share(&self, total: usize, align: usize) -> Range<usize> {
        self.split().share(total, align)
    }

    /// Which share of any work is this worker's.
    pub fn split(&self) -> Split {
        Split { index: self.index, count: self.shared.count }
    }
}

/// One of `count` shares of any work.
#[derive(Clone, Copy, Debug)]
pub struct Split {
    index: usize,
    count: usize,
}

impl Split {
    /// All of it.
    pub const WHOLE: Split = Split { index: 0, count: 1 };

    /// See [`Worker::share`].
    pub fn share(&self, total: usize, align: usize) -> Range<usize> {
        let units = total.div_ceil(align);
        let at = |i: usize| (units * i / self.count * align).min(total);
        at(self.index)..at(self.index + 1)
    }
}

fn wait(polls: &mut u32) {
    *polls = polls.saturating_add(1);
    if *polls < SPINS {
        std::hint::spin_loop();
    } else if *polls < SPINS + YIELDS_IN_RUN {
        std::thread::yield_now();
    } else {
        std::thread::sleep(NAP);
    }
}

/// Work that is handed out in order, piece by piece, so that a stolen processor delays one piece only.
///
/// Who computes a piece never changes its bits.
#[derive(Default)]
pub struct Claims(Padded<AtomicUsize>);

impl Claims {
    /// Starts over. Only while no worker claims: before a run, or with a barrier on both sides.
    pub fn reset(&self) {
        self.0.0.store(0, Ordering::Relaxed);
    }

    /// The next piece of `0..total`, `size` long (the last may be shorter).
    pub fn next(&self, total: usize, size: usize) -> Option<Range<usize>> {
        let start = self.0.0.fetch_add(size, Ordering::Relaxed);
        (start < total).then(|| start..(start + size).min(total))
    }

    /// The next piece of `0..total`, smaller the less is left, so that `workers` finish together: half of a worker's share
    /// of the rest, in whole multiples of `size.start` and at most about `size.end`.
    pub fn next_shrinking(&self, total: usize, size: Range<usize>, workers: usize) -> Option<Range<usize>> {
        let end = |start: usize| {
            let share = ((total - start) / (2 * workers)).min(size.end) / size.start * size.start;
            (start + share.max(size.start)).min(total)
        };
        let claim = |start| (start < total).then(|| end(start));
        let start = self.0.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, claim).ok()?;
        Some(start..end(start))
    }
}

/// Threads that wait for steps.
pub struct ThreadPool {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
    handles: Vec<Thread>,
}

impl ThreadPool {
    /// A pool of `count` workers: the caller and `count - 1` threads.
    pub fn new(count: usize) -> Result<Self, CpuError> {
        if count == 0 || count > MAX_THREADS {
            return Err(CpuError::Threads(count));
        }
        let shared = Arc::new(Shared {
            epoch: Padded::default(),
            running: Padded::default(),
            arrived: Padded::default(),
            passed: Padded::default(),
            failed: Padded::default(),
            parked: (0..count).map(|_| Padded::default()).collect(),
            quit: AtomicBool::new(false),
            job: UnsafeCell::new(None),
            panic: Mutex::new(None),
            count,
        });
        let mut pool = ThreadPool { shared, threads: Vec::new(), handles: Vec::new() };
        for index in 1..count {
            let shared = Arc::clone(&pool.shared);
            let thread = std::thread::Builder::new()
                .name(format!("folio-cpu-{index}"))
                .spawn(move || serve(&shared, index))
                .map_err(CpuError::Spawn)?;
            pool.handles.push(thread.thread().clone());
            pool.threads.push(thread);
        }
        Ok(pool)
    }

    /// Workers, the caller included.
    pub fn count(&self) -> usize {
        self.shared.count
    }

    /// Runs `job` on every worker and returns when all are done. A panic in any of them is an error here; the pool stays
    /// usable.
    pub fn run(&mut self, job: &(dyn Fn(&Worker<'_>) + Sync)) -> Result<(), CpuError> {
        let shared = &*self.shared;
        // SAFETY: only the lifetime is erased. The pointer is read by workers of this run only, and this function does not
        // return before `running` is zero.
        let pointer = unsafe { std::mem::transmute::<*const (dyn Fn(&Worker<'_>) + Sync + '_), Job>(job) };
        // SAFETY: no worker runs, so nobody reads the cell.
        unsafe { *shared.job.get() = Some(pointer) };
        shared.running.0.store(shared.count - 1, Ordering::Relaxed);
        shared.epoch.0.fetch_add(1, Ordering::SeqCst);
        self.wake();
        work(shared, 0, job);
        let mut polls = 0;
        while shared.running.0.load(Ordering::Acquire) != 0 {
            wait(&mut polls);
        }
        // SAFETY: `running` is zero: no worker reads the cell.
        unsafe { *shared.job.get() = None };
        if !shared.failed.0.swap(false, Ordering::Relaxed) {
            return Ok(());
        }
        shared.arrived.0.store(0, Ordering::Relaxed);
        let first = shared.panic.lock().unwrap_or_else(PoisonError::into_inner).take();
        let (worker, message) = first.unwrap_or((0, "unknown".to_owned()));
        Err(CpuError::Panicked { worker, message })
    }

    fn wake(&self) {
        for (index, thread) in self.handles.iter().enumerate() {
            if self.shared.parked[index + 1].0.swap(false, Ordering::SeqCst) {
                thread.unpark();
            }
        }
    }
}

impl Drop for ThreadPool {
    fn drop(&mut self) {
        self.shared.quit.store(true, Ordering::Relaxed);
        self.shared.epoch.0.fetch_add(1, Ordering::SeqCst);
        self.wake();
        for thread in self.threads.drain(..) {
            // A worker catches every panic of a job, so there is nothing to learn from its result.
            let _ = thread.join();
        }
    }
}

/// A worker thread: waits for epochs, runs jobs.
fn serve(shared: &Shared, index: usize) {
    let mut seen = 0;
    loop {
        seen = next_epoch(shared, index, seen);
        if shared.quit.load(Ordering::Relaxed) {
            return;
        }
        // SAFETY: the change of `epoch` was seen with acquire order and `running` counts this worker, so the caller is
        // inside `run`: the cell is not written and the closure behind it is alive.
        let job = unsafe { (*shared.job.get()).map(|job| &*job) };
        if let Some(job) = job {
            work(shared, index, job);
        }
        shared.running.0.fetch_sub(1, Ordering::Release);
    }
}

/// Spins, then yields, then sleeps until `epoch` is not `seen`.
fn next_epoch(shared: &Shared, index: usize, seen: u32) -> u32 {
    let mut polls = 0u32;
    loop {
        let now = shared.epoch.0.load(Ordering::SeqCst);
        if now != seen {
            shared.parked[index].0.store(false, Ordering::Relaxed);
            return now;
        }
        polls = polls.saturating_add(1);
        if polls < SPINS {
            std::hint::spin_loop();
        } else if polls < SPINS + YIELDS {
            std::thread::yield_now();
        } else {
            shared.parked[index].0.store(true, Ordering::SeqCst);
            if shared.epoch.0.load(Ordering::SeqCst) == seen {
                std::thread::park();
            }
        }
    }
}

/// Runs the job and turns a panic into a flag and a message.
fn work(shared: &Shared, index: usize, job: &(dyn Fn(&Worker<'_>) + Sync)) {
    let worker = Worker { index, shared };
    if let Err(payload) = catch_unwind(AssertUnwindSafe(|| job(&worker))) {
        if !payload.is::<NeighbourPanicked>() {
            let mut first = shared.panic.lock().unwrap_or_else(PoisonError::into_inner);
            first.get_or_insert_with(|| (index, message(&*payload)));
        }
        shared.failed.0.store(true, Ordering::Release);
    }
}

fn message(payload: &(dyn Any + Send)) -> String {
    let text = payload.downcast_ref::<&str>().map(|s| (*s).to_owned());
    text.or_else(|| payload.downcast_ref::<String>().cloned()).unwrap_or_else(|| "no message".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_worker_runs_every_job_once() {
        for count in [1, 2, 3, 8] {
            let mut pool = ThreadPool::new(count).expect("pool");
            let runs: Vec<AtomicUsize> = (0..count).map(|_| AtomicUsize::new(0)).collect();
            for round in 1..=2000 {
                pool.run(&|w| {
                    runs[w.index()].fetch_add(1, Ordering::Relaxed);
                })
                .expect("no panic");
                assert!(runs.iter().all(|n| n.load(Ordering::Relaxed) == round));
                if round % 500 == 0 {
                    std::thread::sleep(std::time::Duration::from_millis(3)); // lets workers park
                }
            }
        }
    }

    #[test]
    fn a_barrier_separates_what_is_before_from_what_is_after() {
        let mut pool = ThreadPool::new(4).expect("pool");
        let slots: Vec<AtomicUsize> = (0..4).map(|_| AtomicUsize::new(0)).collect();
        pool.run(&|w| {
            for round in 1..=5000 {
                slots[w.index()].store(round, Ordering::Relaxed);
                w.barrier();
                assert!(slots.iter().all(|s| s.load(Ordering::Relaxed) == round));
                w.barrier();
            }
        })
        .expect("no worker saw a stale value");
    }

    #[test]
    fn a_panic_is_an_error_and_the_pool_lives_on() {
        let mut pool = ThreadPool::new(3).expect("pool");
        for victim in [0, 1, 2] {
            let result = pool.run(&|w| {
                w.barrier();
                if w.index() == victim {
                    resume_unwind(Box::new("broken on purpose")); // no message on stderr
                }
                w.barrier();
                w.barrier();
            });
            match result {
                Err(CpuError::Panicked { worker, message }) => {
                    assert_eq!((worker, message.as_str()), (victim, "broken on purpose"));
                }
                other => panic!("expected a panic error, got {other:?}"),
            }
            let sum = AtomicUsize::new(0);
            pool.run(&|w| {
                w.barrier();
                sum.fetch_add(w.index() + 1, Ordering::Relaxed);
                w.barrier();
            })
            .expect("the pool works after a panic");
            assert_eq!(sum.into_inner(), 6);
        }
    }

    #[test]
    fn shares_and_claims_cover_everything_once() {
        let mut pool = ThreadPool::new(3).expect("pool");
        for total in [0, 1, 15, 16, 17, 1000] {
            let hits: Vec<AtomicUsize> = (0..total).map(|_| AtomicUsize::new(0)).collect();
            let (claims, shrinking) = (Claims::default(), Claims::default());
            pool.run(&|w| {
                for i in w.share(total, 16) {
                    hits[i].fetch_add(1, Ordering::Relaxed);
                }
                while let Some(piece) = claims.next(total, 7) {
                    for i in piece {
                        hits[i].fetch_add(10, Ordering::Relaxed);
                    }
                }
                while let Some(piece) = shrinking.next_shrinking(total, 4..64, w.count()) {
                    for i in piece {
                        hits[i].fetch_add(100, Ordering::Relaxed);
                    }
                }
            })
            .expect("no panic");
            assert!(hits.iter().all(|n| n.load(Ordering::Relaxed) == 111), "total {total}");
        }
    }

    #[test]
    fn pieces_shrink_towards_the_end() {
        let claims = Claims::default();
        let pieces: Vec<_> = std::iter::from_fn(|| claims.next_shrinking(1000, 16..200, 2)).collect();
        let sizes: Vec<usize> = pieces.iter().map(ExactSizeIterator::len).collect();
        assert_eq!(sizes[..5], [192, 192, 144, 112, 80], "a quarter of what is left");
        assert!(sizes.is_sorted_by(|a, b| a >= b) && sizes[sizes.len() - 2] == 16, "{sizes:?}");
        assert_eq!(claims.next_shrinking(1000, 16..200, 2), None);
    }

    #[test]
    fn a_pool_of_no_threads_is_refused() {
        assert!(matches!(ThreadPool::new(0), Err(CpuError::Threads(0))));
        assert!(matches!(ThreadPool::new(MAX_THREADS + 1), Err(CpuError::Threads(_))));
    }
}
