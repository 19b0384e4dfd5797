//! A folder of several engines: each writes in a directory of its own, reads what the others ended, and takes what an engine left that is gone.

mod common;

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use common::{ABOUT, block, copy, has, key, segments, tenant};
use folio_tiers::{DiskConfig, DiskStore, Miss, Sharing, Stored};

const LENGTH: usize = 9000;
const DAY: Duration = Duration::from_secs(86_400);

/// Looked at by hand; who said nothing for a day has ended.
fn config(root: &Path) -> DiskConfig {
    sharing(root, DAY)
}

fn sharing(root: &Path, lease: Duration) -> DiskConfig {
    DiskConfig { shared: Some(Sharing { refresh: DAY, lease }), ..common::config(root) }
}

/// It has looked once.
fn open(config: &DiskConfig) -> Arc<DiskStore> {
    let store = DiskStore::open(config.clone()).expect("it opens");
    store.wait_indexed();
    store
}

/// Four blocks make a segment.
fn put(store: &DiskStore, numbers: std::ops::Range<u64>) {
    for number in numbers {
        store.put(&key(number), &tenant(1), &block(number, LENGTH), &ABOUT).unwrap();
    }
}

fn found(store: &DiskStore, numbers: std::ops::Range<u64>) -> usize {
    numbers.filter(|number| has(store, *number, &tenant(1), LENGTH)).count()
}

/// The engines' directories.
fn engines(root: &Path) -> Vec<PathBuf> {
    let mut dirs: Vec<PathBuf> = fs::read_dir(root).unwrap().map(|entry| entry.unwrap().path()).collect();
    dirs.retain(|path| path.is_dir());
    dirs.sort();
    dirs
}

/// As it is where the process of its only engine was killed.
fn killed(root: &Path, to: &Path) {
    for dir in engines(root) {
        copy(&dir, &to.join(dir.file_name().unwrap()));
    }
}

#[test]
fn what_one_has_ended_the_others_read() {
    let root = tempfile::tempdir().unwrap();
    let (one, two) = (open(&config(root.path())), open(&config(root.path())));
    assert_eq!(engines(root.path()).len(), 2, "one writer a directory");
    put(&one, 0..8);
    assert_eq!(found(&two, 0..8), 0, "before it looks");
    two.refresh();
    let ended = found(&two, 0..8);
    assert_eq!(ended, 4, "the segment that is being written is nobody else's");
    assert_eq!(two.put(&key(0), &tenant(1), &block(0, LENGTH), &ABOUT).unwrap(), Stored::There);
    assert_eq!(found(&one, 0..8), 8);
    assert!(
        two.get(&key(0), &tenant(2), &mut vec![0; LENGTH]).is_err(),
        "another tenant's key opens nothing"
    );
    one.close();
    two.refresh();
    assert_eq!(found(&two, 1..8), 7, "what was open, too");
}

#[test]
fn the_owner_deletes_and_who_reads_misses() {
    let root = tempfile::tempdir().unwrap();
    let (one, two) = (open(&config(root.path())), open(&config(root.path())));
    put(&one, 0..8);
    two.refresh();
    assert!(two.contains(&key(0)));
    // As much as there is room for goes through the first.
    put(&one, 100..300);
    assert!(!one.contains(&key(0)));
    assert!(two.contains(&key(0)), "it has not looked");
    assert_eq!(two.get(&key(0), &tenant(1), &mut vec![0; LENGTH]), Err(Miss::Absent));
    assert!(!two.contains(&key(0)) && !two.contains(&key(1)), "its whole segment is gone");
    two.refresh();
    assert_eq!(found(&two, 0..6), 0);
    assert!(found(&two, 200..290) > 50);
    // The second deletes nothing of the first: it has no room for two of these.
    let before = segments(&engines(root.path())[0]).len() + segments(&engines(root.path())[1]).len();
    two.refresh();
    let after = segments(&engines(root.path())[0]).len() + segments(&engines(root.path())[1]).len();
    assert_eq!(before, after);
}

#[test]
fn damaged_foreign_and_truncated_segments_are_misses() {
    let (from, root) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let one = open(&config(from.path()));
    put(&one, 0..6);
    one.close();
    let dir = engines(from.path()).remove(0);
    let whole = fs::read(segments(&dir).remove(0)).unwrap();
    let other = root.path().join("00000000000000aa");
    fs::create_dir(&other).unwrap();
    fs::write(other.join("lease"), b"lives").unwrap();
    let path = other.join("0000000001.segment");
    let seen = |bytes: &[u8]| {
        fs::write(&path, bytes).unwrap();
        let two = open(&config(root.path()));
        two.refresh();
        let found = found(&two, 0..6);
        two.close();
        drop(two);
        // Not by somebody else's lease.
        engines(root.path())
            .iter()
            .filter(|dir| **dir != other)
            .for_each(|dir| fs::remove_dir_all(dir).unwrap());
        found
    };
    let all = seen(&whole);
    assert_eq!(all, 4);
    for at in (0..whole.len()).step_by(1531) {
        let mut wrong = whole.clone();
        wrong[at] ^= 4;
        assert!(seen(&wrong) <= all);
    }
    let mut in_a_block = whole.clone();
    in_a_block[4096 + 500] ^= 1;
    assert_eq!(seen(&in_a_block), all - 1);
    for at in [0, 1, 4095, 4096, 20_000, whole.len() - 4096, whole.len() - 1] {
        assert_eq!(seen(&whole[..at]), 0, "cut at {at}");
    }
    // Of another version, and no segment at all.
    let mut newer = whole.clone();
    newer[8] = 9;
    let crc = crc32c::crc32c(&newer[..12]);
    newer[12..16].copy_from_slice(&crc.to_le_bytes());
    assert_eq!((seen(&newer), seen(&vec![7; 50_000])), (0, 0));
    // Of another model.
    fs::write(&path, &whole).unwrap();
    let two = open(&DiskConfig { layout_digest: [9; 32], ..config(root.path()) });
    assert_eq!(two.stats().blocks, 0);
}

#[test]
fn what_a_killed_engine_left_is_adopted_when_its_lease_is_over() {
    let (from, root) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let one = open(&config(from.path()));
    put(&one, 0..8);
    killed(from.path(), root.path());
    let two = open(&config(root.path()));
    let ended = found(&two, 0..8);
    assert_eq!(ended, 4, "its lease is not over, and what it ended is read");
    assert_eq!(engines(root.path()).len(), 2);
    two.close();
    drop(two);
    // For the third it is over, and the second gave its own back.
    let three = open(&sharing(root.path(), Duration::ZERO));
    assert_eq!(found(&three, 0..8), 8, "also what was being written");
    assert_eq!(engines(root.path()).len(), 1, "the empty directories are gone");
    put(&three, 10..20);
    assert_eq!(found(&three, 0..20), 18);
    three.close();
    drop(three);
    let four = open(&config(root.path()));
    four.refresh();
    assert_eq!(
        (found(&four, 0..20), engines(root.path()).len()),
        (18, 1),
        "a restart takes all of it at once"
    );
}

#[test]
fn nobody_who_lives_is_adopted() {
    let root = tempfile::tempdir().unwrap();
    let one = open(&config(root.path()));
    put(&one, 0..8);
    // By its lease it has ended, and it has the lock.
    let two = open(&sharing(root.path(), Duration::ZERO));
    (0..3).for_each(|_| two.refresh());
    assert_eq!(engines(root.path()).len(), 2);
    put(&one, 8..30);
    assert_eq!(found(&one, 0..30), 30);
}

#[test]
fn of_an_orphan_what_there_is_room_for_is_kept() {
    let (from, root) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let one = open(&config(from.path()));
    put(&one, 0..60);
    killed(from.path(), root.path());
    let small = DiskConfig { bytes: 400 << 10, ..sharing(root.path(), Duration::ZERO) };
    let two = open(&small);
    let stats = two.stats();
    assert!(stats.bytes <= small.bytes && stats.blocks > 10, "{stats:?}");
    assert!(found(&two, 54..60) > found(&two, 0..6), "the newest first");
    assert_eq!(engines(root.path()).len(), 1);
}
