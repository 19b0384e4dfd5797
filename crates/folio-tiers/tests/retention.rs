//! What was said of a content's retention holds in every tier: a time to live by a clock that only goes forward, and priorities.

mod common;

use std::collections::HashMap;
use std::ops::Range;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use common::device::{BLOCK_BYTES, compute, contents, device, load_order, prompt, store_order};
use common::{config, open, segments};
use folio_kv::{BlockHashes, Retention};
use folio_tiers::remote::{Fault, Name, ObjectLimits, Objects, RemoteStore};
use folio_tiers::{Device, DiskStore, HostStore, Store, WallClock};

/// A clock that shows what it is set to.
fn clock(now_s: u64) -> (Arc<AtomicU64>, WallClock) {
    let time = Arc::new(AtomicU64::new(now_s));
    let shown = time.clone();
    (time, WallClock::new(move || shown.load(Relaxed)))
}

fn keep(
    store: &impl Store,
    device: &Device,
    hashes: &BlockHashes,
    blocks: u32,
    retention: Option<Retention>,
) -> usize {
    let contents = contents(device, hashes, 0, blocks);
    compute(device, &contents);
    let mut order = store_order(hashes, contents);
    order.lineage.retentions = vec![retention; order.contents.len()];
    store.store(device, &order, &|| true, &mut Vec::new()).blocks
}

fn ttl(seconds: u64) -> Option<Retention> {
    Some(Retention { ttl_us: Some(seconds * 1_000_000), ..Retention::default() })
}

fn priority(priority: u8) -> Option<Retention> {
    Some(Retention { priority, ttl_us: None })
}

/// Some blocks, of a prompt.
fn has(store: &impl Store, device: &Device, hashes: &BlockHashes) -> u32 {
    let found = store.find(device, hashes, hashes.len());
    found.iter().map(|range| range.end - range.start).sum()
}

/// Values of a server.
#[derive(Default)]
struct Shelf(Mutex<HashMap<Name, Vec<u8>>>);

impl Objects for Shelf {
    fn name(&self) -> &'static str {
        "shelf"
    }

    fn server(&self) -> String {
        "here".into()
    }

    fn limits(&self) -> ObjectLimits {
        let (find, carry) = (Duration::from_secs(5), Duration::from_secs(5));
        ObjectLimits { value_bytes: 4 * 1024, value_bytes_max: 1 << 20, asked_at_once: 8, find, carry }
    }

    fn exist(&self, names: &[Name], _: Duration) -> Result<Vec<bool>, Fault> {
        let values = self.0.lock().unwrap();
        Ok(names.iter().map(|name| values.contains_key(name)).collect())
    }

    fn get(&self, name: &Name, range: Range<usize>, _: Duration) -> Result<Option<Vec<u8>>, Fault> {
        let value = self.0.lock().unwrap().get(name).cloned();
        Ok(value.map(|value| value[range.start.min(value.len())..range.end.min(value.len())].to_vec()))
    }

    fn put(&self, name: &Name, value: &[u8], _: bool, _: Duration) -> Result<(), Fault> {
        self.0.lock().unwrap().insert(*name, value.to_vec());
        Ok(())
    }

    fn ping(&self, _: Duration) -> Result<(), Fault> {
        Ok(())
    }
}

fn loads(store: &impl Store, device: &Device, hashes: &BlockHashes, blocks: u32) -> bool {
    store.load(device, &load_order(hashes, contents(device, hashes, 0, blocks)), &mut Vec::new()).left == 0
}

fn on_disk(dir: &Path, clock: WallClock) -> Arc<DiskStore> {
    open(&folio_tiers::DiskConfig { clock, ..config(dir) })
}

/// Kept for ten seconds, for ever, and not at all; then the time passes and the clock is set back.
fn expires(store: &impl Store, time: &AtomicU64, finds: bool) {
    let device = device(8, &[]);
    let (brief, long, over) = (prompt(1, 1, 4), prompt(1, 2, 4), prompt(1, 3, 4));
    assert_eq!(keep(store, &device, &brief, 4, ttl(10)), 4);
    assert_eq!(keep(store, &device, &long, 4, Some(Retention::default())), 4);
    assert_eq!(keep(store, &device, &over, 4, None), 0, "its time was over before");
    assert_eq!(has(store, &device, &over), 0);
    time.fetch_add(9, Relaxed);
    store.tick();
    assert!(has(store, &device, &brief) == 4 && loads(store, &device, &brief, 4));
    time.fetch_add(1, Relaxed);
    // A server has values whose end only shows when they are read.
    assert!(!finds || has(store, &device, &brief) == 0);
    assert!(!loads(store, &device, &brief, 4));
    time.store(5, Relaxed);
    assert!(has(store, &device, &brief) == 0 && !loads(store, &device, &brief, 4), "no clock revives it");
    assert!(has(store, &device, &long) == 4 && loads(store, &device, &long, 4));
}

#[test]
fn a_time_to_live_holds_in_every_tier_whatever_the_clock_does() {
    let (time, host) = clock(1_000_000);
    expires(&*HostStore::new(1 << 20, host), &time, true);
    let (time, server) = clock(1_000_000);
    let shelf = Arc::new(Shelf::default());
    expires(&*RemoteStore::new(shelf.clone(), [7; 32], None, server).unwrap(), &time, false);
    let dir = tempfile::tempdir().unwrap();
    let (time, disk) = clock(1_000_000);
    let store = on_disk(dir.path(), disk.clone());
    expires(&*store, &time, true);
    // The next process does not find it either: killed, ended, and with a list that says it never expires.
    let (device, brief, long) = (device(8, &[]), prompt(1, 1, 4), prompt(1, 2, 4));
    let killed = tempfile::tempdir().unwrap();
    common::copy(dir.path(), killed.path());
    drop(store);
    for dir in [dir.path(), killed.path()] {
        let store = on_disk(dir, disk.clone());
        assert_eq!((has(&*store, &device, &brief), has(&*store, &device, &long)), (0, 4));
        assert!(!loads(&*store, &device, &brief, 4));
    }
}

#[test]
fn a_time_to_live_is_sealed_with_the_block() {
    let dir = tempfile::tempdir().unwrap();
    let (time, disk) = clock(1_000_000);
    let (device, brief) = (device(8, &[]), prompt(1, 1, 4));
    let store = on_disk(dir.path(), disk.clone());
    keep(&*store, &device, &brief, 4, ttl(10));
    drop(store);
    let path = segments(dir.path()).remove(0);
    let mut bytes = std::fs::read(&path).unwrap();
    let header = &mut bytes[4096..4096 + 192];
    assert_eq!(header[88..92], 1_000_010u32.to_le_bytes());
    header[88..92].fill(0);
    let crc = crc32c::crc32c(&header[..188]);
    header[188..].copy_from_slice(&crc.to_le_bytes());
    // Nor does its list say so any more: it is at the file's end, and found damaged.
    bytes.truncate(bytes.len() - 1);
    std::fs::write(&path, bytes).unwrap();
    time.store(2_000_000, Relaxed);
    let store = on_disk(dir.path(), disk);
    assert_eq!(
        store.find(&device, &brief, 4),
        [Range { start: 0, end: 1 }],
        "the others say that they are over"
    );
    assert!(!loads(&*store, &device, &brief, 1), "a block whose end was taken out is nobody's");
}

#[test]
fn in_host_memory_a_priority_orders_its_own_tenants_content() {
    let device = device(8, &[]);
    let host = HostStore::new(12 * BLOCK_BYTES as u64, WallClock::default());
    let (kept, plain, other) = (prompt(1, 1, 4), prompt(1, 2, 4), prompt(2, 3, 4));
    keep(&*host, &device, &kept, 4, priority(90));
    keep(&*host, &device, &plain, 4, priority(50));
    keep(&*host, &device, &other, 4, priority(50));
    // The oldest is wanted most by its tenant, whose other content goes for it.
    keep(&*host, &device, &prompt(3, 4, 4), 4, priority(50));
    let left = |of| has(&*host, &device, of);
    assert_eq!((left(&kept), left(&plain), left(&other)), (4, 0, 4));
    // With nothing else of that tenant left it goes in its turn: nobody pays for another's priorities.
    for seed in 10..16 {
        keep(&*host, &device, &prompt(3, seed, 4), 4, priority(50));
    }
    assert_eq!((left(&kept), left(&other)), (0, 0));
}

#[test]
fn in_every_tier_what_is_worth_little_goes_first_and_what_an_operator_declared_last() {
    let device = device(8, &[]);
    let dir = tempfile::tempdir().unwrap();
    let host = HostStore::new(80 * BLOCK_BYTES as u64, WallClock::default());
    // A record takes a page, a segment has room for 13 of them, and there are 15 segments.
    let disk = on_disk(dir.path(), WallClock::default());
    fn check(store: &impl Store, device: &Device, most: u32) {
        let (declared, plain) = (prompt(9, 1, 8), prompt(1, 2, 8));
        keep(store, device, &declared, 8, priority(101));
        keep(store, device, &plain, 8, priority(50));
        for seed in 10..10 + most {
            keep(store, device, &prompt(2, seed, 8), 8, priority(10));
        }
        assert_eq!((has(store, device, &declared), has(store, device, &plain)), (8, 8), "little for little");
        for seed in 100..100 + most {
            keep(store, device, &prompt(3, seed, 8), 8, priority(50));
        }
        assert_eq!((has(store, device, &declared), has(store, device, &plain)), (8, 0));
    }
    check(&*host, &device, 20);
    check(&*disk, &device, 60);
    assert!(Store::stats(&*disk).blocks_evicted > 100 && host.stats().blocks_evicted > 100);
}

#[test]
fn what_is_wanted_longer_again_stays_longer_in_host_memory() {
    let (time, shown) = clock(1000);
    let (device, hashes) = (device(8, &[]), prompt(1, 1, 4));
    let host = HostStore::new(1 << 20, shown);
    keep(&*host, &device, &hashes, 4, ttl(10));
    assert_eq!(keep(&*host, &device, &hashes, 4, ttl(60)), 0, "it is there");
    time.store(1030, Relaxed);
    assert_eq!(has(&*host, &device, &hashes), 4);
    time.store(1060, Relaxed);
    host.tick();
    assert_eq!((has(&*host, &device, &hashes), host.stats().blocks, host.stats().bytes), (0, 0, 0));
}
