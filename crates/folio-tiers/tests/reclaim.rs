//! Which segment goes for others, and what of it is written again: what is worth the most for its room stays.

mod common;
#[allow(dead_code)]
#[path = "common/noise.rs"]
mod noise;

use std::collections::{HashMap, HashSet, VecDeque};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use common::device::{compute, contents, device, prompt, store_order};
use common::{ABOUT, block, config, key, tenant};
use folio_tiers::io::Folder;
use folio_tiers::{About, Class, DiskConfig, DiskStore, Store, Stored, WallClock};

/// A record takes two pages: there is room for 14 segments of 7 records.
const LENGTH: usize = 5000;
const SEGMENTS: usize = 14;
const RECORDS: usize = 7;
/// Of a segment's 16 pages, those that may hold what was written before.
const COPIED_MAX: u64 = 4 * 4096;

struct Random(u64);

impl Random {
    fn below(&mut self, most: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (self.0 >> 33) % most
    }
}

fn open(files: &noise::Files, clock: WallClock) -> Arc<DiskStore> {
    let config = DiskConfig { clock, ..config(Path::new("memory")) };
    let store = DiskStore::open_in(config, Arc::new(files.clone())).expect("it opens");
    store.wait_indexed();
    store
}

fn put(store: &DiskStore, number: u64, about: &About<'_>) -> Stored {
    store.put(&key(number), &tenant(1), &block(number, LENGTH), about).expect("there is room")
}

fn get(store: &DiskStore, number: u64) -> bool {
    let mut into = vec![0; LENGTH];
    let found = store.get(&key(number), &tenant(1), &mut into).is_ok();
    assert!(!found || into == block(number, LENGTH), "block {number} has wrong bytes");
    found
}

/// Segments that were begun, by the number of the last.
fn begun(files: &noise::Files) -> u64 {
    let number = |name: &str| -> Option<u64> { name.strip_suffix(".segment")?.parse().ok() };
    files.list().unwrap().iter().filter_map(|file| number(&file.name)).max().unwrap_or(0)
}

/// One block of each segment is asked for again and again: all of these stay, whichever segment goes.
#[test]
fn what_is_asked_for_is_written_again_when_its_segment_goes() {
    let files = noise::Files::default();
    let store = open(&files, WallClock::default());
    let blocks = (SEGMENTS * RECORDS) as u64;
    for number in 0..blocks {
        put(&store, number, &ABOUT);
    }
    for number in blocks..blocks + 300 {
        for wanted in (0..blocks).step_by(RECORDS) {
            assert!(get(&store, wanted), "block {wanted} is gone behind {number}");
        }
        put(&store, number, &ABOUT);
    }
    let stats = store.stats();
    assert!(stats.reclaimed_blocks > 250 && stats.bytes_copied > 0, "{stats:?}");
    assert!(stats.bytes_copied <= begun(&files) * COPIED_MAX, "{stats:?}");
}

/// What the cache in front still has is not got from here: that it is to be kept again counts as well.
#[test]
fn what_is_to_be_kept_again_is_written_again_when_its_segment_goes() {
    let files = noise::Files::default();
    let store = open(&files, WallClock::default());
    let device = device(4, &[]);
    let keep = |seed: u32| {
        let hashes = prompt(1, seed, 1);
        let contents = contents(&device, &hashes, 0, 1);
        compute(&device, &contents);
        store.store(&device, &store_order(&hashes, contents), &|| true, &mut Vec::new()).blocks
    };
    assert_eq!(keep(0), 1);
    for seed in 1..1000 {
        assert_eq!((keep(seed), keep(0)), (1, 0), "behind {seed} others");
    }
    assert!(DiskStore::stats(&store).reclaimed_blocks > 500);
}

/// Of requests of which few are for most of the blocks more are hits than where the oldest segment goes.
#[test]
fn skewed_requests_hit_more_than_where_the_oldest_goes() {
    const BLOCKS: u64 = 600;
    let files = noise::Files::default();
    let store = open(&files, WallClock::default());
    let ends: Vec<u64> = (1..=BLOCKS)
        .scan(0, |sum, at| {
            *sum += 1_000_000 / at;
            Some(*sum)
        })
        .collect();
    // What the same segments would have, the oldest first to go.
    let (mut oldest, mut known) = (VecDeque::new(), HashSet::new());
    let (mut hits, mut hits_oldest) = (0, 0);
    let mut random = Random(1);
    for _ in 0..3000 {
        let at = random.below(ends[ends.len() - 1]);
        let number = ends.partition_point(|end| *end <= at) as u64;
        if get(&store, number) {
            hits += 1;
        } else {
            put(&store, number, &ABOUT);
        }
        if !known.insert(number) {
            hits_oldest += 1;
            continue;
        }
        if oldest.len() == SEGMENTS * RECORDS {
            for gone in oldest.drain(..RECORDS) {
                known.remove(&gone);
            }
        }
        oldest.push_back(number);
    }
    assert!(hits >= hits_oldest + hits_oldest / 50, "{hits} hits, {hits_oldest} where the oldest goes");
    assert!(store.stats().bytes_copied <= begun(&files) * COPIED_MAX);
}

/// Whatever is stored, asked for, expires, is killed and started anew: the size holds, what is declared stays, and what is said to be there is.
#[test]
fn whatever_is_done_the_size_holds_and_what_is_declared_stays() {
    let (mut copied_ever, mut reclaimed_ever) = (0, 0);
    for seed in 0..6 {
        let mut files = noise::Files::default();
        let time = Arc::new(AtomicU64::new(1_000_000));
        let shown = time.clone();
        let clock = WallClock::new(move || shown.load(Relaxed));
        let limit = config(Path::new("memory")).bytes;
        let mut store = open(&files, clock.clone());
        let mut random = Random(seed);
        let mut expire: HashMap<u64, u64> = HashMap::new();
        let mut declared = HashSet::new();
        let mut copied = 0;
        for _ in 0..800 {
            store.expire();
            let few = 1 + random.below(300);
            let number = random.below(few);
            let class = match number {
                0..4 => Class::Declared,
                _ if number.is_multiple_of(7) => Class::Low,
                _ => Class::Ordinary,
            };
            match random.below(100) {
                0 => {
                    let lasting = |store: &DiskStore| -> Vec<u64> {
                        let there = (0..300).filter(|number| number % 5 > 0);
                        there.filter(|number| store.contains(&key(*number))).collect()
                    };
                    let before = lasting(&store);
                    let stats = store.stats();
                    (copied, reclaimed_ever) =
                        (copied + stats.bytes_copied, reclaimed_ever + stats.reclaimed_blocks);
                    // As a process leaves it that is killed, or one that ends.
                    let killed = files.copy();
                    drop(store);
                    files = if random.below(2) == 0 { killed } else { files };
                    store = open(&files, clock.clone());
                    assert_eq!(lasting(&store), before, "seed {seed}");
                }
                1..5 => {
                    time.fetch_add(1, Relaxed);
                }
                5..50 => {
                    let is_over = |end: &u64| *end <= time.load(Relaxed);
                    assert!(!get(&store, number) || !expire.get(&number).is_some_and(is_over), "seed {seed}");
                }
                _ => {
                    let end = time.load(Relaxed) + 1 + random.below(20);
                    let expires_s =
                        (number.is_multiple_of(5) && class < Class::Declared).then_some(end as u32);
                    let stored = put(&store, number, &About { class, expires_s, ..ABOUT });
                    if let (Stored::New, Some(end)) = (stored, expires_s) {
                        expire.insert(number, end.into());
                    }
                    declared.extend(Some(number).filter(|_| class == Class::Declared));
                }
            }
            assert!(declared.iter().all(|number| store.contains(&key(*number))), "seed {seed}");
            let bytes: u64 = files.list().unwrap().iter().map(|file| file.bytes).sum();
            assert!(bytes <= limit && store.stats().bytes <= limit, "seed {seed}: {bytes}");
        }
        store.expire();
        for number in (0..300).filter(|number| number % 5 > 0) {
            assert_eq!(store.contains(&key(number)), get(&store, number), "seed {seed}: block {number}");
        }
        copied += store.stats().bytes_copied;
        reclaimed_ever += store.stats().reclaimed_blocks;
        copied_ever += copied;
        assert!(copied <= begun(&files) * COPIED_MAX, "seed {seed}");
    }
    assert!(copied_ever > 0 && reclaimed_ever > 0, "{copied_ever} bytes, {reclaimed_ever} blocks");
}

/// What is written again counts for what may be written in a day; beyond it nothing is.
#[test]
fn what_is_written_again_is_within_the_bytes_of_a_day() {
    let files = noise::Files::default();
    // For 120 records, and not for what is to be written again.
    let most = 120 * (2 * 4096 + 64) + 18 * 3 * 4096;
    let config = DiskConfig { write_bytes_per_day: Some(most), ..config(Path::new("memory")) };
    let store = DiskStore::open_in(config, Arc::new(files.clone())).expect("it opens");
    store.wait_indexed();
    let mut stored = 0;
    for number in 0..200 {
        for wanted in (0..number).step_by(RECORDS) {
            get(&store, wanted);
        }
        stored += u64::from(store.put(&key(number), &tenant(1), &block(number, LENGTH), &ABOUT).is_ok());
    }
    let stats = store.stats();
    assert!(stats.bytes_copied > 0 && stored < 120, "{stored} {stats:?}");
    assert!(stored * 2 * 4096 + stats.bytes_copied <= most, "{stored} {stats:?}");
}
