//! The disk as a tier of an engine: threads that carry blocks between the device's memory and the store.
//!
//! Owns: the queue of what is ordered, and its bounds. Must never: decide what is worth it, touch a block without a hold, or leave an
//! order without its report.
//!
//! Loads go before stores. What is stored is read block by block under its lease: a copy counts only if the lease still held when it was
//! made, so what is given up is never stored as something else. A load fills blocks with what was verified, and is reported as a whole:
//! one block that is not there, or not what it has to be, and nothing of it is used.

use std::collections::VecDeque;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use folio_engine::{Clock, LoadOrder, Report, ReportSink, StoreOrder, Tier, TierStats, TransferOrder};
use folio_kv::{BlockHashes, Content, GroupConfig};
use folio_model::backend::BlockMemory;

use crate::store::DiskStore;
use crate::types::{BlockKey, DataKey, DiskState, Miss};

/// Of the device's memory, what stores that wait may hold up: what an engine leaves in the meantime is not stored. So much is written
/// before anybody notices.
const WAITING_SHARE: u64 = 8;
const WAITING_BYTES_LEAST: u64 = 64 << 20;

/// See the module documentation.
pub struct DiskTier {
    shared: Arc<Shared>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

struct Shared {
    store: Arc<DiskStore>,
    bytes_limit: u64,
    memory: Arc<dyn BlockMemory>,
    /// Of all cache groups.
    groups: Vec<GroupConfig>,
    waiting_bytes_max: u64,
    /// Where reports go, and the clock of leases.
    engine: OnceLock<(ReportSink, Arc<dyn Clock>)>,
    queue: Mutex<Queue>,
    changed: Condvar,
    counts: Counts,
}

#[derive(Default)]
struct Queue {
    loads: VecDeque<LoadOrder>,
    stores: VecDeque<StoreOrder>,
    waiting_bytes: u64,
    /// Orders that a thread is at.
    working: u32,
    closed: bool,
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

impl DiskTier {
    /// `memory`: the device's blocks, of the cache groups `groups`. `threads`: at least one.
    pub fn new(
        store: Arc<DiskStore>,
        bytes_limit: u64,
        memory: Arc<dyn BlockMemory>,
        groups: Vec<GroupConfig>,
        threads: usize,
    ) -> std::io::Result<Self> {
        let (engine, queue, counts) = Default::default();
        let changed = Condvar::new();
        let pool = |(group, config): (usize, &GroupConfig)| {
            u64::from(config.blocks) * memory.block_bytes(group) as u64
        };
        let bytes = groups.iter().enumerate().map(pool).sum::<u64>();
        let waiting_bytes_max = (bytes / WAITING_SHARE).max(WAITING_BYTES_LEAST);
        let shared = Arc::new(Shared {
            store,
            bytes_limit,
            memory,
            groups,
            waiting_bytes_max,
            engine,
            queue,
            changed,
            counts,
        });
        let spawn = |_| {
            let shared = shared.clone();
            std::thread::Builder::new().name("folio-disk-kv".into()).spawn(move || shared.work())
        };
        let threads = (0..threads.max(1)).map(spawn).collect::<Result<_, _>>()?;
        Ok(Self { shared, threads: Mutex::new(threads) })
    }
}

impl Tier for DiskTier {
    fn start(&self, reports: ReportSink, clock: Arc<dyn Clock>) {
        // Whoever starts it twice talks to the first.
        let _ = self.shared.engine.set((reports, clock));
    }

    fn find(&self, hashes: &BlockHashes, most: u32) -> Vec<Range<u32>> {
        self.shared.find(hashes, most)
    }

    fn load(&self, order: LoadOrder) {
        self.shared.lock().loads.push_back(order);
        self.shared.changed.notify_one();
    }

    fn store(&self, order: StoreOrder) -> bool {
        let bytes = self.shared.bytes_of(&order.contents);
        let mut queue = self.shared.lock();
        let fits = queue.waiting_bytes == 0 || queue.waiting_bytes + bytes <= self.shared.waiting_bytes_max;
        if queue.closed || !fits {
            add(&self.shared.counts.blocks_dropped, order.contents.len());
            return false;
        }
        queue.waiting_bytes += bytes;
        queue.stores.push_back(order);
        drop(queue);
        self.shared.changed.notify_one();
        true
    }

    fn stats(&self) -> TierStats {
        let (disk, counts) = (self.shared.store.stats(), &self.shared.counts);
        let get = |count: &AtomicU64| count.load(Ordering::Relaxed);
        let damaged = Miss::ALL.into_iter().filter(|miss| *miss != Miss::Absent);
        TierStats {
            name: "disk",
            off: match &disk.state {
                DiskState::Off { reason } => Some(reason.clone()),
                DiskState::Opening | DiskState::On => None,
            },
            blocks: disk.blocks,
            bytes: disk.bytes,
            bytes_limit: self.shared.bytes_limit,
            blocks_stored: get(&counts.blocks_stored),
            blocks_loaded: get(&counts.blocks_loaded),
            bytes_written: disk.bytes_written,
            bytes_read: get(&counts.bytes_read),
            blocks_evicted: disk.reclaimed_blocks,
            blocks_dropped: get(&counts.blocks_dropped),
            misses: damaged.map(|miss| (miss.name(), disk.misses(miss))).collect(),
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

impl Drop for DiskTier {
    fn drop(&mut self) {
        self.close(Duration::ZERO);
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn bytes_of(&self, contents: &[Content]) -> u64 {
        contents.iter().map(|content| self.memory.block_bytes(content.group as usize) as u64).sum()
    }

    fn report(&self, report: Report) {
        if let Some((reports, _)) = self.engine.get() {
            reports(report);
        }
    }

    /// See [`Tier::find`].
    fn find(&self, hashes: &BlockHashes, most: u32) -> Vec<Range<u32>> {
        let declared = hashes.root().declared_blocks() > 0;
        let key = |hash, group| BlockKey { hash, group };
        let is_stored: Vec<bool> = hashes
            .iter(declared)
            .take(most as usize)
            .map(|hash| self.store.contains(&key(*hash, 0)))
            .collect();
        let mut ranges: Vec<Range<u32>> = Vec::new();
        for (at, _) in (0..).zip(&is_stored).filter(|(_, stored)| **stored) {
            match ranges.last_mut().filter(|range| range.end == at) {
                Some(range) => range.end = at + 1,
                None => ranges.push(at..at + 1),
            }
        }
        if self.groups.len() > 1 {
            // Up to the last end behind which the other groups have what is read.
            let has = |group: usize, last: u32| {
                let hash = hashes.get(declared, last);
                hash.is_some_and(|hash| self.store.contains(&key(*hash, group as u8)))
            };
            for range in &mut ranges {
                let ends = |end: &u32| (1..self.groups.len()).all(|group| self.reads(group, *end, &has));
                range.end = range.clone().rev().map(|last| last + 1).find(ends).unwrap_or(range.start);
            }
            ranges.retain(|range| !range.is_empty());
        }
        ranges
    }

    /// Whether a group has what the query behind `end` blocks of group 0 reads. The last block is asked for first: it is rarely there.
    fn reads(&self, group: usize, end: u32, has: &impl Fn(usize, u32) -> bool) -> bool {
        let (size, config) = (self.groups[0].block_tokens, &self.groups[group]);
        let (positions, ratio) = (end * size, config.block_tokens / size);
        let whole = positions / config.block_tokens;
        positions.is_multiple_of(config.block_tokens)
            && (config.optional
                || (config.first_block(positions)..whole)
                    .rev()
                    .all(|index| has(group, (index + 1) * ratio - 1)))
    }

    fn work(&self) {
        let largest = (0..self.groups.len()).map(|group| self.memory.block_bytes(group)).max().unwrap_or(0);
        let mut bytes = vec![0; largest];
        while let Some(order) = self.next() {
            let done = catch_unwind(AssertUnwindSafe(|| self.carry(&order, &mut bytes)));
            if done.is_err() {
                tracing::error!("a thread of the disk tier panicked; the order it was at is given up");
            }
            self.report(match order {
                TransferOrder::Load(LoadOrder { ticket, .. }) => {
                    let (verified, us) = done.unwrap_or((false, 0));
                    let bytes = self.bytes_of_order(&order);
                    Report::Loaded { ticket, verified, bytes, us }
                }
                TransferOrder::Store(StoreOrder { lease, .. }) => Report::Read { lease },
            });
            let mut queue = self.lock();
            queue.working -= 1;
            if matches!(order, TransferOrder::Store(_)) {
                queue.waiting_bytes -= self.bytes_of_order(&order);
            }
            drop(queue);
            self.changed.notify_all();
        }
    }

    fn bytes_of_order(&self, order: &TransferOrder) -> u64 {
        match order {
            TransferOrder::Load(LoadOrder { contents, .. })
            | TransferOrder::Store(StoreOrder { contents, .. }) => self.bytes_of(contents),
        }
    }

    /// `None`: it is closed, and there is nothing left to load.
    fn next(&self) -> Option<TransferOrder> {
        let mut queue = self.lock();
        loop {
            let load = queue.loads.pop_front().map(TransferOrder::Load);
            let order = load.or_else(|| queue.stores.pop_front().map(TransferOrder::Store));
            if order.is_some() {
                queue.working += 1;
                return order;
            }
            if queue.closed {
                return None;
            }
            queue = self.changed.wait(queue).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Whether all of a load is there, and what it took.
    fn carry(&self, order: &TransferOrder, buffer: &mut [u8]) -> (bool, u64) {
        match order {
            TransferOrder::Load(load) => {
                let began = Instant::now();
                let verified = self.load(load, buffer);
                (verified, began.elapsed().as_micros() as u64)
            }
            TransferOrder::Store(store) => {
                self.store_all(store, buffer);
                (true, 0)
            }
        }
    }

    fn load(&self, order: &LoadOrder, buffer: &mut [u8]) -> bool {
        let data_key = DataKey::from(order.root.data_key());
        for content in &order.contents {
            let group = content.group as usize;
            let bytes = &mut buffer[..self.memory.block_bytes(group)];
            let key = BlockKey { hash: content.hash, group: content.group as u8 };
            if self.store.get(&key, &data_key, bytes).is_err() {
                return false;
            }
            self.memory.write(group, content.block.0, bytes);
            add(&self.counts.bytes_read, bytes.len());
            add(&self.counts.blocks_loaded, 1);
        }
        true
    }

    fn store_all(&self, order: &StoreOrder, buffer: &mut [u8]) {
        let data_key = DataKey::from(order.root.data_key());
        let holds = || self.engine.get().is_some_and(|(_, clock)| clock.now() < order.until);
        for (at, content) in order.contents.iter().enumerate() {
            let group = content.group as usize;
            let key = BlockKey { hash: content.hash, group: content.group as u8 };
            if self.store.contains(&key) {
                continue;
            }
            let bytes = &mut buffer[..self.memory.block_bytes(group)];
            self.memory.read(group, content.block.0, bytes);
            // Asked behind the copy: only then is it what was leased.
            if !holds() || self.store.put(&key, &data_key, bytes).is_err() {
                return add(&self.counts.blocks_dropped, order.contents.len() - at);
            }
            add(&self.counts.blocks_stored, 1);
        }
    }
}
