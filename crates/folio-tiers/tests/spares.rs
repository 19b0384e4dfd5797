//! The memory of the tier in memory: made ahead, used again, never more than it may be, and neither made nor given back while somebody is kept
//! from looking something up.

mod common;

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::SeqCst};
use std::sync::mpsc::channel;
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

use common::device::{BLOCK_BYTES, compute, contents, device, prompt, store_order};
use folio_engine::Tier;
use folio_kv::{BlockHashes, Retention};
use folio_model::backend::{BlockMemory, HostBuffer};
use folio_tiers::{Device, HostStore, Store, StoreTier, WallClock};

/// Counts buffers, and asks the store something whenever one is made or given back.
struct Counting {
    of: Arc<dyn BlockMemory>,
    counts: Arc<Counts>,
}

#[derive(Default)]
struct Counts {
    made: AtomicUsize,
    given_back: AtomicUsize,
    bytes: AtomicUsize,
    store: OnceLock<Weak<HostStore>>,
}

impl Counts {
    fn look(&self) {
        let Some(store) = self.store.get().and_then(Weak::upgrade) else { return };
        let (says, said) = channel();
        std::thread::spawn(move || says.send(store.stats().bytes));
        let answer = said.recv_timeout(Duration::from_secs(20));
        assert!(answer.is_ok() || std::thread::panicking(), "nobody can look anything up meanwhile");
    }

    fn made_and_given_back(&self) -> (usize, usize) {
        (self.made.load(SeqCst), self.given_back.load(SeqCst))
    }
}

struct Buffer(Vec<u8>, Arc<Counts>);

impl HostBuffer for Buffer {
    fn bytes(&self) -> &[u8] {
        &self.0
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.0
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        self.1.given_back.fetch_add(1, SeqCst);
        self.1.bytes.fetch_sub(self.0.len(), SeqCst);
        self.1.look();
    }
}

impl BlockMemory for Counting {
    fn host_buffer(&self, bytes: usize) -> Arc<dyn HostBuffer> {
        self.counts.made.fetch_add(1, SeqCst);
        self.counts.bytes.fetch_add(bytes, SeqCst);
        self.counts.look();
        Arc::new(Buffer(vec![0; bytes], self.counts.clone()))
    }

    fn block_bytes(&self, group: usize) -> usize {
        self.of.block_bytes(group)
    }

    fn read(&self, group: usize, block: u32, into: &mut [u8]) {
        self.of.read(group, block, into);
    }

    fn write(&self, group: usize, block: u32, from: &[u8]) {
        self.of.write(group, block, from);
    }
}

struct Bench {
    store: Arc<HostStore>,
    device: Device,
    counts: Arc<Counts>,
    time: Arc<AtomicU64>,
}

/// Room for so many blocks of the first group.
fn bench(blocks: usize, windows: &[u32]) -> Bench {
    let time = Arc::new(AtomicU64::new(1000));
    let shown = time.clone();
    let store = HostStore::new((blocks * BLOCK_BYTES) as u64, WallClock::new(move || shown.load(SeqCst)));
    let counts = Arc::new(Counts::default());
    counts.store.set(Arc::downgrade(&store)).expect("once");
    let Device { memory, groups } = device(16, windows);
    let memory = Arc::new(Counting { of: memory, counts: counts.clone() });
    Bench { store, device: Device { memory, groups }, counts, time }
}

impl Bench {
    /// How many were kept.
    fn keep(&self, hashes: &BlockHashes, blocks: u32, ttl_s: Option<u64>) -> usize {
        let contents = contents(&self.device, hashes, 0, blocks);
        compute(&self.device, &contents);
        let mut order = store_order(hashes, contents);
        let retention = Retention { ttl_us: ttl_s.map(|s| s * 1_000_000), ..Retention::default() };
        order.lineage.retentions = vec![Some(retention); order.contents.len()];
        self.store.store(&self.device, &order, &|| true, &mut Vec::new()).blocks
    }

    fn has(&self, hashes: &BlockHashes) -> usize {
        self.store.find(&self.device, hashes, hashes.len()).iter().map(|range| range.len()).sum()
    }
}

#[test]
fn the_memory_of_what_expired_is_used_again() {
    let bench = bench(8, &[]);
    let (brief, later) = (prompt(1, 1, 6), prompt(1, 2, 8));
    assert_eq!(bench.keep(&brief, 6, Some(10)), 6);
    bench.time.store(1011, SeqCst);
    assert_eq!(bench.has(&brief), 0);
    assert_eq!(bench.counts.made_and_given_back(), (6, 0));
    assert_eq!(bench.keep(&later, 8, None), 8);
    assert_eq!(bench.has(&later), 8);
    assert_eq!(bench.counts.made_and_given_back(), (8, 0));
    // What goes to make room, too.
    assert_eq!(bench.keep(&prompt(1, 3, 5), 5, None), 5);
    assert_eq!(bench.counts.made_and_given_back(), (8, 0));
}

#[test]
fn the_memory_of_what_was_not_kept_is_used_again() {
    let bench = bench(4, &[]);
    let hashes = prompt(1, 1, 4);
    let order = store_order(&hashes, contents(&bench.device, &hashes, 0, 4));
    let done = bench.store.store(&bench.device, &order, &|| false, &mut Vec::new());
    assert_eq!((done.blocks, bench.store.stats().bytes), (0, 0));
    assert_eq!(bench.keep(&hashes, 4, None), 4);
    assert_eq!(bench.counts.made_and_given_back(), (4, 0));
}

#[test]
fn it_is_made_ahead() {
    let bench = bench(8, &[]);
    let ready = || bench.store.stats().bytes_ready.expect("it makes some");
    for blocks in 0..8 {
        assert_eq!(ready(), (blocks * BLOCK_BYTES) as u64);
        assert!(bench.store.prepare(&bench.device));
    }
    assert!(!bench.store.prepare(&bench.device));
    assert_eq!((ready(), bench.store.stats().bytes), (bench.store.stats().bytes_limit, 0));
    let hashes = prompt(1, 1, 8);
    assert_eq!((bench.keep(&hashes, 8, None), bench.has(&hashes)), (8, 8));
    assert_eq!(bench.counts.made_and_given_back(), (8, 0), "storing makes none");
}

/// What was made for one group gives way to what another needs, and then only what is needed.
#[test]
fn blocks_of_other_groups_take_the_place_of_spare_ones() {
    let bench = bench(16, &[8]);
    while bench.store.prepare(&bench.device) {}
    for seed in 0..6 {
        let hashes = prompt(1, seed, 8);
        assert_eq!((bench.keep(&hashes, 8, None), bench.has(&hashes)), (10, 8), "with two of the window");
        let (stats, bytes) = (bench.store.stats(), bench.counts.bytes.load(SeqCst) as u64);
        assert_eq!(stats.bytes_ready, Some(bytes));
        assert!(bytes <= stats.bytes_limit, "{stats:?}");
    }
    assert!(bench.counts.made_and_given_back().1 > 0);
}

/// Its threads do it, from the start.
#[test]
fn a_tier_makes_it_by_itself() {
    let bench = bench(40, &[]);
    let (memory, groups) = (bench.device.memory.clone(), bench.device.groups.clone());
    let tier = StoreTier::new(bench.store.clone(), memory, groups, 2).expect("a tier");
    let end = Instant::now() + Duration::from_secs(60);
    while tier.stats().bytes_ready != Some(tier.stats().bytes_limit) {
        assert!(Instant::now() < end, "{:?}", tier.stats());
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(bench.counts.made_and_given_back(), (40, 0));
    tier.close(Duration::ZERO);
}
