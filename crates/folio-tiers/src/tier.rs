//! A store as a tier of an engine: threads that carry blocks between the device's memory and the store.
//!
//! Owns: the queue of what is ordered, which the engine bounds. Must never: decide what is worth it, touch a block without a hold, or leave an
//! order without its report.
//!
//! Loads go before those of requests that still wait in the queue, and both before stores. What is stored is read under its lease: a copy counts only if the lease still held when it was made, so what is
//! given up is never stored as something else. A load fills blocks with what was verified, and is reported as a whole: one block that is
//! not there, or not what it has to be, and nothing of it is used.

use std::collections::VecDeque;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use folio_engine::{
    Clock, EventFeed, LoadOrder, Report, ReportSink, StoreOrder, Tier, TierStats, TransferOrder,
};
use folio_kv::{BlockHashes, Content, GroupConfig, Ticket};
use folio_model::backend::BlockMemory;

/// What blocks are carried to and from. Orders come from several threads at once, one at a time from each.
pub trait Store: Send + Sync + 'static {
    /// How many blocks of group 0 it keeps together, a power of two: see [`Tier::chunk_blocks`].
    fn chunk_blocks(&self, _: &Device) -> u32 {
        1
    }

    /// See [`Tier::swaps`].
    fn swaps(&self) -> bool {
        false
    }

    /// Tells `feed` from now on what it holds of group 0, and can be asked for all of it. Called once, before anything is stored.
    fn listen(self: Arc<Self>, _feed: &Arc<EventFeed>) {}

    /// See [`Tier::find`].
    fn find(&self, device: &Device, hashes: &BlockHashes, most: u32) -> Vec<Range<u32>>;

    /// Fills blocks, up to the first that is not there or not what it has to be. `scratch` keeps its room from order to order.
    fn load(&self, device: &Device, order: &LoadOrder, scratch: &mut Vec<u8>) -> Carried;

    /// Keeps blocks. `holds` is asked behind each copy: where it says no, what was copied is thrown away, and nothing more is read.
    fn store(
        &self,
        device: &Device,
        order: &StoreOrder,
        holds: &dyn Fn() -> bool,
        scratch: &mut Vec<u8>,
    ) -> Carried;

    /// All but what its threads count: blocks stored, loaded and dropped, bytes read.
    fn stats(&self) -> TierStats;

    /// Makes a part of what it will need, where there is nothing else to do. `false`: nothing is left to make.
    fn prepare(&self, _: &Device) -> bool {
        false
    }

    /// What is to be done from time to time. Called every second where there is nothing else to do.
    fn tick(&self) {}

    /// Nothing is asked for any more.
    fn close(&self);
}

/// Between two ticks.
const TICK: Duration = Duration::from_secs(1);

/// The blocks that are carried.
pub struct Device {
    pub memory: Arc<dyn BlockMemory>,
    /// Of all cache groups.
    pub groups: Vec<GroupConfig>,
}

impl Device {
    pub fn block_bytes(&self, group: u32) -> usize {
        self.memory.block_bytes(group as usize)
    }

    fn bytes_of(&self, contents: &[Content]) -> u64 {
        contents.iter().map(|content| self.block_bytes(content.group) as u64).sum()
    }
}

/// What became of an order.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Carried {
    /// Blocks that were carried now; not those that the store had.
    pub blocks: usize,
    /// Their bytes.
    pub bytes: usize,
    /// Blocks that were given up.
    pub left: usize,
}

impl Carried {
    /// Carries each of these by itself, up to the first that is given up. `carry` is told which it is, and its length; it says whether it was
    /// carried now, or the store had it, or `None`.
    pub(crate) fn one_by_one(
        device: &Device,
        contents: &[Content],
        mut carry: impl FnMut(usize, &Content, usize) -> Option<bool>,
    ) -> Self {
        let mut done = Self { left: contents.len(), ..Self::default() };
        for (at, content) in contents.iter().enumerate() {
            let length = device.block_bytes(content.group);
            let Some(is_new) = carry(at, content, length) else { break };
            done.left -= 1;
            if is_new {
                (done.blocks, done.bytes) = (done.blocks + 1, done.bytes + length);
            }
        }
        done
    }
}

/// See the module documentation.
pub struct StoreTier {
    shared: Arc<Shared>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

struct Shared {
    store: Arc<dyn Store>,
    device: Device,
    /// Where reports go, and the clock of leases.
    engine: OnceLock<(ReportSink, Arc<dyn Clock>)>,
    queue: Mutex<Queue>,
    changed: Condvar,
    counts: Counts,
}

#[derive(Default)]
struct Queue {
    loads: VecDeque<LoadOrder>,
    prefetches: VecDeque<LoadOrder>,
    stores: VecDeque<StoreOrder>,
    /// Orders that a thread is at.
    working: u32,
    closed: bool,
}

/// What a thread is at.
enum CarryOrder {
    Load(LoadOrder),
    Store(StoreOrder),
}

#[derive(Default)]
struct Counts {
    blocks_stored: AtomicU64,
    blocks_loaded: AtomicU64,
    blocks_dropped: AtomicU64,
    bytes_read: AtomicU64,
}

fn add(count: &AtomicU64, more: usize) {
    count.fetch_add(more as u64, Ordering::Relaxed);
}

impl StoreTier {
    /// `memory`: the device's blocks, of the cache groups `groups`. `threads`: at least one.
    pub fn new(
        store: Arc<dyn Store>,
        memory: Arc<dyn BlockMemory>,
        groups: Vec<GroupConfig>,
        threads: usize,
    ) -> std::io::Result<Self> {
        let (engine, queue, counts) = Default::default();
        let changed = Condvar::new();
        let name = format!("folio-{}-kv", store.stats().name);
        let device = Device { memory, groups };
        let shared = Arc::new(Shared { store, device, engine, queue, changed, counts });
        let spawn = |_| {
            let shared = shared.clone();
            std::thread::Builder::new().name(name.clone()).spawn(move || shared.work())
        };
        let threads = (0..threads.max(1)).map(spawn).collect::<Result<_, _>>()?;
        Ok(Self { shared, threads: Mutex::new(threads) })
    }
}

impl Tier for StoreTier {
    fn start(&self, reports: ReportSink, clock: Arc<dyn Clock>, events: Option<&Arc<EventFeed>>) {
        if let Some(feed) = events {
            self.shared.store.clone().listen(feed);
        }
        // Whoever starts it twice talks to the first.
        let _ = self.shared.engine.set((reports, clock));
    }

    fn chunk_blocks(&self) -> u32 {
        self.shared.store.chunk_blocks(&self.shared.device)
    }

    fn swaps(&self) -> bool {
        self.shared.store.swaps()
    }

    fn find(&self, hashes: &BlockHashes, most: u32) -> Vec<Range<u32>> {
        self.shared.store.find(&self.shared.device, hashes, most)
    }

    fn order(&self, order: TransferOrder) -> bool {
        let at =
            |loads: &VecDeque<LoadOrder>, ticket: Ticket| loads.iter().position(|load| load.ticket == ticket);
        let mut queue = self.shared.lock();
        let Queue { loads, prefetches, stores, closed, .. } = &mut *queue;
        match order {
            TransferOrder::Load(load) if load.prefetch => prefetches.push_back(load),
            TransferOrder::Load(load) => loads.push_back(load),
            TransferOrder::Store(store) if *closed => {
                add(&self.shared.counts.blocks_dropped, store.contents.len());
                return false;
            }
            TransferOrder::Store(store) => stores.push_back(store),
            TransferOrder::Promote { ticket, .. } => {
                loads.extend(at(prefetches, ticket).and_then(|at| prefetches.remove(at)));
            }
            TransferOrder::Cancel { ticket, .. } => {
                let waits = [loads, prefetches].into_iter().find_map(|of| of.remove(at(of, ticket)?));
                drop(queue);
                if waits.is_some() {
                    self.shared.report(Report::Cancelled { ticket });
                }
                return true;
            }
        }
        drop(queue);
        self.shared.changed.notify_one();
        true
    }

    fn stats(&self) -> TierStats {
        let counts = &self.shared.counts;
        let get = |count: &AtomicU64| count.load(Ordering::Relaxed);
        TierStats {
            blocks_stored: get(&counts.blocks_stored),
            blocks_loaded: get(&counts.blocks_loaded),
            bytes_read: get(&counts.bytes_read),
            blocks_dropped: get(&counts.blocks_dropped),
            ..self.shared.store.stats()
        }
    }

    fn close(&self, patience: Duration) {
        let end = Instant::now() + patience;
        let mut queue = self.shared.lock();
        while queue.working > 0 || !queue.stores.is_empty() {
            let Some(left) = end.checked_duration_since(Instant::now()).filter(|left| !left.is_zero()) else {
                break;
            };
            let waited = self.shared.changed.wait_timeout(queue, left);
            queue = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        queue.closed = true;
        let left: usize = queue.stores.drain(..).map(|order| order.contents.len()).sum();
        add(&self.shared.counts.blocks_dropped, left);
        drop(queue);
        self.shared.changed.notify_all();
        for thread in std::mem::take(&mut *self.threads.lock().unwrap_or_else(PoisonError::into_inner)) {
            // A thread's panics are caught where they happen.
            let _ = thread.join();
        }
        self.shared.store.close();
    }
}

impl Drop for StoreTier {
    fn drop(&mut self) {
        self.close(Duration::ZERO);
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn report(&self, report: Report) {
        if let Some((reports, _)) = self.engine.get() {
            reports(report);
        }
    }

    fn work(&self) {
        let mut scratch = Vec::new();
        while let Some(order) = self.next() {
            let began = Instant::now();
            let done = catch_unwind(AssertUnwindSafe(|| self.carry(&order, &mut scratch)));
            let left = done.unwrap_or_else(|_| {
                tracing::error!("a thread of a tier panicked; the order it was at is given up");
                usize::MAX
            });
            self.report(match order {
                CarryOrder::Load(LoadOrder { tier, ticket, contents, .. }) => {
                    let (verified, us) = (left == 0, began.elapsed().as_micros() as u64);
                    let bytes = self.device.bytes_of(&contents);
                    Report::Loaded { tier, ticket, verified, bytes, us }
                }
                CarryOrder::Store(StoreOrder { lease, contents, .. }) => {
                    Report::Read { lease, kept: contents.len().saturating_sub(left) as u32 }
                }
            });
            self.lock().working -= 1;
            self.changed.notify_all();
        }
    }

    /// `None`: it is closed, and there is nothing left to load.
    fn next(&self) -> Option<CarryOrder> {
        let (mut queue, mut prepares) = (self.lock(), true);
        loop {
            let load = queue.loads.pop_front();
            let load = load.or_else(|| queue.prefetches.pop_front()).map(CarryOrder::Load);
            let order = load.or_else(|| queue.stores.pop_front().map(CarryOrder::Store));
            if order.is_some() {
                queue.working += 1;
                return order;
            }
            if queue.closed {
                return None;
            }
            if prepares {
                drop(queue);
                prepares = self.store.prepare(&self.device);
                queue = self.lock();
                continue;
            }
            let (waited, end) =
                self.changed.wait_timeout(queue, TICK).unwrap_or_else(PoisonError::into_inner);
            queue = waited;
            if end.timed_out() {
                drop(queue);
                self.store.tick();
                queue = self.lock();
            }
        }
    }

    /// How many blocks were given up.
    fn carry(&self, order: &CarryOrder, scratch: &mut Vec<u8>) -> usize {
        let counts = &self.counts;
        let done = match order {
            CarryOrder::Load(load) => {
                let done = self.store.load(&self.device, load, scratch);
                add(&counts.blocks_loaded, done.blocks);
                add(&counts.bytes_read, done.bytes);
                done
            }
            CarryOrder::Store(store) => {
                let holds = || self.engine.get().is_some_and(|(_, clock)| clock.now() < store.until);
                let done = self.store.store(&self.device, store, &holds, scratch);
                add(&counts.blocks_stored, done.blocks);
                add(&counts.blocks_dropped, done.left);
                done
            }
        };
        done.left
    }
}
