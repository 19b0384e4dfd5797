//! Whatever happens to the files and to the disk: what was acknowledged is there as far as its bytes are, and nothing wrong is served.

mod common;

use std::fs;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering::Relaxed};

use common::{ABOUT, block, config, copy, has, key, open, segments, tenant};
use folio_tiers::io::{Directory, File, Folder, Listed};
use folio_tiers::{DiskState, DiskStore, Miss, PutError};

const LENGTH: usize = 5000;
/// Pages that a record takes.
const PAGES: usize = 2;

/// The process dies while it writes: the file ends at some byte, or is zeros from there. Every record before it is there.
#[test]
fn a_death_at_any_byte_loses_nothing_before_it() {
    let (dir, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let store = open(&config(dir.path()));
    for number in 0..4 {
        store.put(&key(number), &tenant(1), &block(number, LENGTH), &ABOUT).unwrap();
    }
    copy(dir.path(), other.path());
    let path = segments(other.path()).remove(0);
    let whole = fs::read(&path).unwrap();
    let written = 4096 * (1 + 4 * PAGES);
    let mut config = config(other.path());
    config.dir = other.path().to_owned();
    for at in (0..=written).filter(|at| at % 61 == 0 || at % 4096 < 2 || at % 4096 == 4095) {
        for zeros in [false, true] {
            let mut torn = whole[..at].to_vec();
            if zeros {
                torn.resize(whole.len(), 0);
            }
            fs::write(&path, torn).unwrap();
            let store = open(&config);
            for number in 0..4 {
                let there = has(&store, number, &tenant(1), LENGTH);
                let end = 4096 * (1 + (number as usize + 1) * PAGES);
                assert!(there || at < end, "cut at {at}, zeros {zeros}: block {number} is lost");
            }
            store.put(&key(9), &tenant(1), &block(9, LENGTH), &ABOUT).unwrap();
            drop(store);
            let store = open(&config);
            assert!(has(&store, 9, &tenant(1), LENGTH));
            drop(store);
            for path in segments(other.path()) {
                fs::remove_file(path).unwrap();
            }
        }
    }
}

#[test]
fn flipped_bits_are_misses() {
    for seal in [true, false] {
        let (dir, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let mut config = config(dir.path());
        config.seal = seal;
        let store = open(&config);
        for number in 0..2 {
            store.put(&key(number), &tenant(1), &block(number, 600), &ABOUT).unwrap();
        }
        drop(store);
        copy(dir.path(), other.path());
        config.dir = other.path().to_owned();
        let path = segments(other.path()).remove(0);
        let whole = fs::read(&path).unwrap();
        for at in (0..whole.len()).filter(|at| at % 4096 < 800 && at % 3 == 0 || at % 4096 > 4030) {
            let mut wrong = whole.clone();
            wrong[at] ^= 1 << (at % 8);
            fs::write(&path, wrong).unwrap();
            let store = open(&config);
            let found = (0..2).filter(|number| has(&store, *number, &tenant(1), 600)).count();
            assert!(found >= 1, "a bit at {at} took both blocks");
        }
    }
}

/// Another tenant's key, another layout, another length, another block at the same place.
#[test]
fn what_is_not_asked_for_is_not_served() {
    let dir = tempfile::tempdir().unwrap();
    let mut config = config(dir.path());
    let store = open(&config);
    let miss = |store: &DiskStore, number, owner, length| {
        let found = store.get(&key(number), &tenant(owner), &mut vec![0; length]).unwrap_err();
        assert!(!store.contains(&key(number)), "it is looked at again");
        assert_eq!(store.stats().misses(found), 1);
        found
    };
    for number in 0..4 {
        store.put(&key(number), &tenant(1), &block(number, LENGTH), &ABOUT).unwrap();
    }
    assert_eq!(miss(&store, 0, 2, LENGTH), Miss::Key);
    assert_eq!(miss(&store, 1, 1, LENGTH + 1), Miss::Length);
    assert_eq!(miss(&store, 5, 1, LENGTH), Miss::Absent);
    drop(store);
    // Two records change places.
    let path = segments(dir.path()).remove(0);
    let mut bytes = fs::read(&path).unwrap();
    let record = 4096 * PAGES;
    let (head, tail) = bytes.split_at_mut(4096 + record * 3);
    head[4096 + record * 2..].swap_with_slice(&mut tail[..record]);
    fs::write(&path, bytes).unwrap();
    let store = open(&config);
    assert_eq!(miss(&store, 2, 1, LENGTH), Miss::Block);
    assert!(has(&store, 1, &tenant(1), LENGTH));
    drop(store);
    config.layout_digest = [8; 32];
    let store = open(&config);
    assert_eq!(store.stats().blocks, 0);
}

/// A disk that fails in one way while `how` says so.
struct Failing(Directory, Arc<AtomicU8>);
struct FailingFile(Box<dyn File>, Arc<AtomicU8>);

impl Folder for Failing {
    fn list(&self) -> io::Result<Vec<Listed>> {
        self.0.list()
    }
    fn open(&self, name: &str) -> io::Result<Box<dyn File>> {
        Ok(Box::new(FailingFile(self.0.open(name)?, self.1.clone())))
    }
    fn create(&self, name: &str, bytes: u64) -> io::Result<Box<dyn File>> {
        Ok(Box::new(FailingFile(self.0.create(name, bytes)?, self.1.clone())))
    }
    fn remove(&self, name: &str) -> io::Result<()> {
        self.0.remove(name)
    }
    fn is_direct(&self) -> bool {
        self.0.is_direct()
    }
}

impl File for FailingFile {
    fn bytes(&self) -> io::Result<u64> {
        self.0.bytes()
    }
    fn read(&self, into: &mut [u8], at: u64) -> io::Result<usize> {
        self.0.read(into, at)
    }
    fn write(&self, bytes: &[u8], at: u64) -> io::Result<usize> {
        match self.1.load(Relaxed) {
            1 => Err(io::Error::from_raw_os_error(28)),
            2 => Err(io::Error::from_raw_os_error(5)),
            3 => self.0.write(&bytes[..4096], at),
            _ => self.0.write(bytes, at),
        }
    }
    fn cut(&self, bytes: u64) -> io::Result<()> {
        self.0.cut(bytes)
    }
}

/// No space, an error, a short write: nothing more is written, what is there is served, and the next start has all of it.
#[test]
fn a_disk_that_fails_turns_writing_off() {
    for failure in 1..=3 {
        let dir = tempfile::tempdir().unwrap();
        let how = Arc::new(AtomicU8::new(0));
        let folder = Failing(Directory::open(dir.path()).unwrap().unwrap(), how.clone());
        let store = DiskStore::open_in(config(dir.path()), Arc::new(folder)).unwrap();
        store.wait_indexed();
        store.put(&key(1), &tenant(1), &block(1, LENGTH), &ABOUT).unwrap();
        how.store(failure, Relaxed);
        assert!(matches!(store.put(&key(2), &tenant(1), &block(2, LENGTH), &ABOUT), Err(PutError::Io(_))));
        how.store(0, Relaxed);
        assert!(matches!(store.put(&key(3), &tenant(1), &block(3, LENGTH), &ABOUT), Err(PutError::Off)));
        assert!(matches!(store.stats().state, DiskState::Off { .. }));
        assert!(has(&store, 1, &tenant(1), LENGTH));
        assert!(!store.contains(&key(2)));
        drop(store);
        let store = open(&config(dir.path()));
        assert!(has(&store, 1, &tenant(1), LENGTH));
        assert!(!has(&store, 2, &tenant(1), LENGTH));
    }
}

/// Blocks that come and go from several threads: what is got is right, and the directory is never larger than it may be.
#[test]
fn room_is_reclaimed_and_never_exceeded() {
    let dir = tempfile::tempdir().unwrap();
    let config = config(dir.path());
    let store = open(&config);
    std::thread::scope(|scope| {
        for thread in 0..3u64 {
            let (store, config) = (&store, &config);
            scope.spawn(move || {
                for number in 0..200 {
                    let number = thread * 1000 + number;
                    match store.put(&key(number), &tenant(1), &block(number, LENGTH), &ABOUT) {
                        Ok(_) | Err(PutError::Full) => {}
                        Err(error) => panic!("{error}"),
                    }
                    has(store, number / 2, &tenant(1), LENGTH);
                    assert!(store.stats().bytes <= config.bytes);
                    let files = segments(&config.dir);
                    let bytes: u64 =
                        files.iter().filter_map(|path| Some(fs::metadata(path).ok()?.len())).sum();
                    assert!(bytes <= config.bytes, "{bytes}");
                }
            });
        }
    });
    let stats = store.stats();
    assert!(stats.reclaimed_blocks > 300, "{stats:?}");
    assert!(has(&store, 199, &tenant(1), LENGTH) || has(&store, 2199, &tenant(1), LENGTH));
    drop(store);
    let store = open(&config);
    assert_eq!(store.stats().blocks, stats.blocks);
}
