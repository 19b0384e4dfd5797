//! Blocks in memory of the process: what was kept is found and loaded, by its tenant alone, and never takes more than it may.

#![expect(clippy::single_range_in_vec_init, reason = "what a tier has is a list of ranges, often of one")]

mod common;

use std::sync::atomic::{AtomicU32, Ordering::SeqCst};

use common::device::{BLOCK_BYTES, compute, contents, device, filled, load_order, prompt, root, store_order};
use folio_kv::BlockHashes;
use folio_tiers::{Carried, Device, HostStore, Store, WallClock};

fn kept(blocks: u64) -> std::sync::Arc<HostStore> {
    HostStore::new(blocks * BLOCK_BYTES as u64, WallClock::default())
}

/// Computes blocks `from..to` of a prompt and stores them.
fn store(store: &HostStore, device: &Device, hashes: &BlockHashes, from: u32, to: u32) -> Carried {
    let contents = contents(device, hashes, from, to);
    compute(device, &contents);
    store.store(device, &store_order(hashes, contents), &|| true, &mut Vec::new())
}

/// Loads them into a device that has nothing; how many arrived.
fn load(store: &HostStore, blocks: u32, windows: &[u32], hashes: &BlockHashes, to: u32) -> usize {
    let empty = device(blocks, windows);
    let contents = contents(&empty, hashes, 0, to);
    let done = store.load(&empty, &load_order(hashes, contents.clone()), &mut Vec::new());
    assert_eq!(done.blocks + done.left, contents.len());
    assert_eq!(filled(&empty, &contents), done.blocks);
    done.blocks
}

#[test]
fn what_was_kept_is_found_and_loaded() {
    for windows in [&[][..], &[8, 12]] {
        let host = HostStore::new(1 << 20, WallClock::default());
        let (device, hashes) = (device(16, windows), prompt(1, 7, 10));
        assert_eq!(host.find(&device, &hashes, 10), []);
        let done = store(&host, &device, &hashes, 0, 10);
        assert!(done.left == 0 && done.blocks >= 10);
        assert_eq!(host.find(&device, &hashes, 10), [0..10]);
        // Of windows nothing is known but behind the end.
        let part: &[_] = if windows.is_empty() { &[0..6] } else { &[] };
        assert_eq!(host.find(&device, &hashes, 6), part);
        assert_eq!(load(&host, 16, windows, &hashes, 10), done.blocks);
        assert_eq!(store(&host, &device, &hashes, 0, 10), Carried::default(), "it is there");
        let stats = host.stats();
        let window_bytes = (done.bytes - 10 * BLOCK_BYTES) as u64;
        assert_eq!((stats.blocks, stats.bytes), (done.blocks as u64, 10 * BLOCK_BYTES as u64 + window_bytes));
    }
}

#[test]
fn nobody_elses_and_of_no_other_length() {
    let (host, device) = (kept(100), device(16, &[]));
    let mine = prompt(1, 7, 4);
    store(&host, &device, &mine, 0, 4);
    // Another tenant's chain never has these hashes. Who has them all the same gets nothing.
    assert_eq!(host.find(&device, &prompt(2, 7, 4), 4), []);
    let mut stolen = load_order(&mine, contents(&device, &mine, 0, 4));
    stolen.root = root(2);
    assert_eq!(host.load(&device, &stolen, &mut Vec::new()), Carried { left: 4, ..Carried::default() });
    assert_eq!(host.stats().misses, [("key", 1), ("length", 0), ("expired", 0)]);
}

#[test]
fn the_least_recently_wanted_goes_from_its_end() {
    let (host, device) = (kept(10), device(16, &[]));
    let [first, second, third] = [1, 2, 3].map(|seed| prompt(1, seed, 4));
    for hashes in [&first, &second] {
        store(&host, &device, hashes, 0, 4);
    }
    assert_eq!(load(&host, 16, &[], &first, 4), 4, "wanted again");
    store(&host, &device, &third, 0, 4);
    let found = |hashes| host.find(&device, hashes, 4);
    assert_eq!([found(&first), found(&second), found(&third)], [vec![0..4], vec![0..2], vec![0..4]]);
    let stats = host.stats();
    assert_eq!((stats.blocks, stats.bytes, stats.blocks_evicted), (10, stats.bytes_limit, 2));
    // What is larger than all of it keeps its beginning, and takes nothing of itself.
    let long = prompt(1, 9, 14);
    let done = store(&host, &device, &long, 0, 14);
    assert_eq!((done.blocks, done.left), (10, 4));
    assert_eq!(host.find(&device, &long, 14), [0..10]);
    assert_eq!(load(&host, 16, &[], &long, 14), 10, "and no more");
}

#[test]
fn what_was_copied_without_a_lease_is_not_kept() {
    let (host, device, hashes) = (kept(100), device(16, &[]), prompt(1, 7, 6));
    let contents = contents(&device, &hashes, 0, 6);
    compute(&device, &contents);
    let asked = AtomicU32::new(0);
    let holds = || asked.fetch_add(1, SeqCst) < 4;
    let done = host.store(&device, &store_order(&hashes, contents), &holds, &mut Vec::new());
    assert_eq!((done.blocks, done.left), (4, 2));
    assert_eq!(host.find(&device, &hashes, 6), [0..4]);
    assert_eq!(host.stats().bytes, 4 * BLOCK_BYTES as u64, "its room is free again");
}

/// Several threads store and load at once in too little room: what is loaded is right, and the room is never more than it may be.
#[test]
fn several_at_once() {
    let host = kept(30);
    std::thread::scope(|scope| {
        for thread in 0..4u32 {
            let host = &host;
            scope.spawn(move || {
                let device = device(16, &[]);
                for round in 0..200 {
                    let hashes = prompt(1, (round * 7 + thread) % 5, 12);
                    store(host, &device, &hashes, 0, 12);
                    load(host, 16, &[], &prompt(1, (round + thread) % 5, 12), 12);
                    let stats = host.stats();
                    assert!(stats.bytes <= stats.bytes_limit, "{stats:?}");
                }
            });
        }
    });
    let stats = host.stats();
    assert!(stats.blocks_evicted > 0 && stats.bytes == stats.blocks * BLOCK_BYTES as u64, "{stats:?}");
}
