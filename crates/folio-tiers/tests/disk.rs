//! What the store promises while nothing goes wrong: what was put is got, also after a restart, within the room that it has.

mod common;

use std::fs;
use std::path::Path;

use common::{ABOUT, block, config, copy, has, key, open, segments, tenant};
use folio_tiers::{DiskState, DiskStore, OpenError, PutError, Stored};

#[test]
fn what_was_put_is_got_by_whoever_has_the_key() {
    for seal in [true, false] {
        let dir = tempfile::tempdir().unwrap();
        let config = folio_tiers::DiskConfig { seal, ..config(dir.path()) };
        let store = open(&config);
        for length in [0, 1, 63, 3904, 3905, 20000] {
            let number = length as u64;
            assert_eq!(
                store.put(&key(number), &tenant(1), &block(number, length), &ABOUT).unwrap(),
                Stored::New
            );
            assert!(store.contains(&key(number)));
            assert!(has(&store, number, &tenant(1), length));
            assert_eq!(
                store.put(&key(number), &tenant(1), &block(number, length), &ABOUT).unwrap(),
                Stored::There
            );
        }
        let text = vec![b'x'; 5000];
        store.put(&key(99), &tenant(1), &text, &ABOUT).unwrap();
        let on_disk: Vec<u8> = segments(dir.path()).iter().flat_map(|path| fs::read(path).unwrap()).collect();
        assert_eq!(on_disk.windows(64).any(|bytes| bytes == &text[..64]), !seal, "sealed means unreadable");
        let stats = store.stats();
        assert_eq!((stats.blocks, stats.hits), (7, 6));
        assert_eq!(stats.payload_bytes, 1 + 63 + 3904 + 3905 + 20000 + 5000);
        assert_eq!(stats.payload_written, stats.payload_bytes, "and what lies around it in whole pages");
        assert!(stats.bytes_written >= 7 * 4096 + 20000 && stats.bytes_written.is_multiple_of(4096));
        assert_eq!(stats.state, DiskState::On);
        assert_eq!(
            [1, 63, 3904, 17, 20000].map(|number| store.contains(&key(number))),
            [true, true, true, false, true]
        );
    }
}

/// A restart finds everything, whether the store was closed or its process killed, sealed or not.
#[test]
fn a_restart_finds_everything() {
    for (closed, seal) in [(true, true), (false, true), (true, false), (false, false)] {
        let (dir, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let mut config = config(dir.path());
        config.seal = seal;
        let store = open(&config);
        for number in 0..40 {
            store.put(&key(number), &tenant(1), &block(number, 9000), &ABOUT).unwrap();
        }
        if closed {
            store.close();
        }
        copy(dir.path(), other.path());
        config.dir = other.path().to_owned();
        // What was written without a seal is read by a server that seals.
        config.seal = true;
        let store = open(&config);
        assert_eq!(store.stats().blocks, 40);
        assert_eq!(store.stats().payload_bytes, 40 * 9000);
        assert!((0..40).all(|number| has(&store, number, &tenant(1), 9000)));
        assert_eq!(store.put(&key(3), &tenant(1), &block(3, 9000), &ABOUT).unwrap(), Stored::There);
        assert_eq!(store.put(&key(50), &tenant(1), &block(50, 9000), &ABOUT).unwrap(), Stored::New);
    }
}

/// Marks a file as another version's.
fn of_version(path: &Path, version: u32) {
    let mut bytes = fs::read(path).unwrap();
    bytes[8..12].copy_from_slice(&version.to_le_bytes());
    let sums: &[usize] = if bytes.starts_with(b"FOLIOKVS") { &[12] } else { &[16, 28] };
    for at in sums {
        let crc = crc32c::crc32c(&bytes[..*at]);
        bytes[*at..at + 4].copy_from_slice(&crc.to_le_bytes());
    }
    fs::write(path, bytes).unwrap();
}

/// A directory that a later version used, or an earlier one: what it wrote stays byte for byte, takes its room, and is not found; new
/// segments stand beside it.
#[test]
fn what_another_version_wrote_is_left_alone() {
    for version in [1, 3, u32::MAX] {
        let dir = tempfile::tempdir().unwrap();
        let store = open(&config(dir.path()));
        for number in 0..40 {
            store.put(&key(number), &tenant(1), &block(number, 9000), &ABOUT).unwrap();
        }
        store.close();
        drop(store);
        let theirs = segments(dir.path());
        theirs.iter().for_each(|path| of_version(path, version));
        of_version(&dir.path().join("store"), version);
        let before: Vec<_> = theirs.iter().map(|path| fs::read(path).unwrap()).collect();
        // Also while nobody has looked into the files.
        let config = config(dir.path());
        let store = DiskStore::open(config.clone()).expect("it opens");
        for number in 100..400 {
            store.put(&key(number), &tenant(1), &block(number, 9000), &ABOUT).unwrap();
            assert!(has(&store, number, &tenant(1), 9000));
            assert!(store.stats().bytes <= config.bytes);
        }
        store.wait_indexed();
        assert!(!store.contains(&key(3)), "theirs is a miss");
        store.close();
        drop(store);
        let after: Vec<_> = theirs.iter().map(|path| fs::read(path).unwrap()).collect();
        assert!(before == after, "version {version}");
        assert!(segments(dir.path()).len() > theirs.len());
        // The next start finds its own, and theirs are where they were.
        let store = open(&config);
        assert!(has(&store, 399, &tenant(1), 9000) && !store.contains(&key(3)));
        assert!(theirs.iter().all(|path| path.exists()));
    }
}

/// Where it leaves no room nothing is stored, and all is served that is.
#[test]
fn what_another_version_wrote_may_take_all_the_room() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(&config(dir.path()));
    for number in 0..100 {
        store.put(&key(number), &tenant(1), &block(number, 9000), &ABOUT).unwrap();
    }
    drop(store);
    segments(dir.path()).iter().for_each(|path| of_version(path, 3));
    let store = open(&config(dir.path()));
    assert!(matches!(store.put(&key(1), &tenant(1), &block(1, 9000), &ABOUT), Err(PutError::Full)));
    assert_eq!((store.stats().state, store.stats().blocks), (DiskState::On, 0));
}

#[test]
fn a_directory_has_one_writer() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(&config(dir.path()));
    let error = DiskStore::open(config(dir.path())).unwrap_err();
    assert!(matches!(error, OpenError::InUse { .. }));
    assert!(error.to_string().contains(dir.path().to_str().unwrap()));
    drop(store);
    open(&config(dir.path()));
}

#[test]
fn sizes_that_cannot_work_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    for (bytes, segment_bytes) in [(1 << 20, 12288), (1 << 20, 65537), (1 << 20, 1 << 19), (0, 0)] {
        let config = folio_tiers::DiskConfig { bytes, segment_bytes, ..config(dir.path()) };
        assert!(matches!(DiskStore::open(config), Err(OpenError::Size { .. })), "{bytes} {segment_bytes}");
    }
    let store = open(&config(dir.path()));
    let most = store.max_block_bytes();
    assert!(matches!(
        store.put(&key(1), &tenant(1), &vec![0; most + 1], &ABOUT),
        Err(PutError::TooLarge { .. })
    ));
    assert_eq!(store.put(&key(1), &tenant(1), &vec![0; most], &ABOUT).unwrap(), Stored::New);
}
