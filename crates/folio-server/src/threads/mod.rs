//! Threads for what may not be done on the event loop, by kind of work.
//!
//! Owns: how many pieces of a kind are done at once, and whose is next. Invariant: no kind waits for another's. What reads prompts goes on
//! while every thread for files waits for a disk, and the other way round. Each kind is fair between tenants.
//!
//! The threads are the runtime's, whose number is the sum of all kinds (`serve::runtime`): a piece that has its turn has a thread; a large
//! piece ([`fair_queue::LARGE`]) has one of its own, of low priority. Work
//! of which there is never more than one piece (a look at the file of keys, a page of records) has no kind, and is part of [`SINGLE`].

pub(crate) mod fair_queue;

use folio_kv::TenantId;

use fair_queue::{FairQueue, Full, Turn};

/// Pieces of work on files at once. They wait for a disk and not for a processor; more of them make a disk no faster.
pub const FILES: usize = 8;
/// Prompts hashed and looked up in tiers at once. One may wait half a second for a bucket.
pub const LOOKUPS: usize = 64;
/// Pieces that no kind counts: each of the parts that have some does one at a time.
pub const SINGLE: usize = 16;

/// How much large pieces give way (`nice`): a tenth of the share of other threads, where those want all processors.
const LARGE_NICE: i32 = 10;

/// Whose work it is that no tenant asked for.
pub const NOBODY: TenantId = TenantId(u32::MAX);

/// Threads of one kind.
pub struct Pool {
    queue: FairQueue<TenantId>,
    /// A piece that costs more has a thread of its own.
    large: usize,
}

/// The work was not done to its end: it panicked, or the process ends.
#[derive(Debug)]
pub struct WorkLost;

impl Pool {
    /// So many pieces at once, and so many in line.
    pub fn new(threads: usize, waiting: usize) -> Self {
        Self { queue: FairQueue::new(threads, waiting), large: fair_queue::LARGE as usize }
    }

    /// Only pieces that cost more have a thread of their own.
    pub fn with_large(self, large: usize) -> Self {
        Self { large, ..self }
    }

    /// Pieces in line.
    pub fn waiting(&self) -> usize {
        self.queue.waiting()
    }

    /// Does a piece of a tenant's work when it is its turn, unless the line is full. `cost`: about how many bytes are worked on.
    pub async fn run<T: Send + 'static>(
        &self,
        tenant: TenantId,
        cost: usize,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<Result<T, WorkLost>, Full> {
        let turn = self.queue.turn(&tenant, cost as u64).await?;
        Ok(in_turn(turn, cost > self.large, work).await)
    }

    /// The same for what was let in before: it waits where the line is full. So there are never more than requests that were let in.
    pub async fn finish<T: Send + 'static>(
        &self,
        tenant: TenantId,
        cost: usize,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, WorkLost> {
        let turn = self.queue.turn_of_admitted(&tenant, cost as u64).await;
        in_turn(turn.map_err(|_| WorkLost)?, cost > self.large, work).await
    }
}

/// Begins the work at once, so that who waits for it holds nothing of it.
fn in_turn<T: Send + 'static>(
    turn: Turn<TenantId>,
    is_large: bool,
    work: impl FnOnce() -> T + Send + 'static,
) -> impl Future<Output = Result<T, WorkLost>> {
    let (done, result) = tokio::sync::oneshot::channel();
    let work = move || {
        let result = work();
        // Held until the work is done, even when nobody waits for it any more, and given back before anybody hears of it.
        drop(turn);
        let _ = done.send(result);
    };
    // Where it is lost, nobody sends.
    if is_large {
        behind_others(work);
    } else {
        drop(tokio::task::spawn_blocking(work));
    }
    async { result.await.map_err(|_| WorkLost) }
}

/// On a thread of its own that gives way to the engine's, the event loop and small pieces: those take microseconds, and where they want its
/// processor they would wait for milliseconds. Where processors are busy with prompts, a tenth of one reads a text faster than it is computed.
fn behind_others(work: impl FnOnce() + Send + 'static) {
    let thread = std::thread::Builder::new().name("folio-large".into()).spawn(move || {
        // Of this thread alone, on Linux.
        if cfg!(target_os = "linux") {
            let nice =
                rustix::process::getpriority_process(None).map_or(LARGE_NICE, |nice| nice.max(LARGE_NICE));
            let _ = rustix::process::setpriority_process(None, nice);
        }
        work();
    });
    if let Err(error) = thread {
        tracing::error!("no thread for a large piece of work: {error}");
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    #[tokio::test]
    async fn a_large_piece_gives_way_and_a_small_one_does_not() {
        let pool = Pool::new(2, 2);
        let nice = || rustix::process::getpriority_process(None).expect("a priority");
        let of = async |cost| pool.run(NOBODY, cost, nice).await.unwrap().unwrap();
        let (small, large) = (of(1).await, of(fair_queue::LARGE as usize + 1).await);
        assert_eq!((small, of(1).await), (nice(), nice()), "and so are small ones behind it");
        assert_eq!(large, if cfg!(target_os = "linux") { small.max(LARGE_NICE) } else { small });
        let lost = pool.finish(NOBODY, usize::MAX, || panic!("as it may")).await;
        assert!(lost.is_err_and(|_: WorkLost| true));
        assert_eq!(of(usize::MAX).await, large, "its turn came back");
    }

    #[tokio::test]
    async fn no_kind_waits_for_another_and_what_was_let_in_is_not_refused() {
        let (slow, quick) = (Pool::new(2, 2), Pool::new(1, 2));
        let (release, held) = mpsc::channel::<()>();
        let held = std::sync::Arc::new(parking_lot::Mutex::new(held));
        let wait = || {
            let held = held.clone();
            move || {
                let _ = held.lock().recv();
            }
        };
        let tenant = TenantId(0);
        let mut stuck = Vec::new();
        for _ in 0..4 {
            stuck.push(Box::pin(slow.finish(tenant, 1, wait())));
        }
        for piece in &mut stuck {
            assert!(tokio::time::timeout(std::time::Duration::from_millis(1), piece).await.is_err());
        }
        assert!(slow.run(tenant, 1, || ()).await.is_err(), "the line is full");
        assert_eq!(quick.run(tenant, 1, || 7).await.unwrap().unwrap(), 7);
        assert!(quick.finish(tenant, 1, || panic!("as it may")).await.is_err_and(|_: WorkLost| true));
        drop(release);
        for piece in stuck {
            piece.await.unwrap();
        }
        assert_eq!(slow.waiting(), 0);
    }
}
