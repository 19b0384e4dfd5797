//! Blocks that move to another directory as one file.

mod common;

use std::fs;
use std::os::unix::fs::PermissionsExt;

use common::{ABOUT, block, config, has, key, open, segments, tenant};
use folio_tiers::DiskConfig;
use folio_tiers::export::{MoveError, Moved, export, import};

const BYTES: u64 = 4 << 20;

fn filled(dir: &std::path::Path, numbers: std::ops::Range<u64>) {
    let store = open(&config(dir));
    for number in numbers {
        store.put(&key(number), &tenant(1), &block(number, 5000), &ABOUT).unwrap();
    }
}

#[test]
fn what_is_exported_is_found_where_it_is_imported_by_who_has_the_key() {
    let (from, to) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let file = to.path().join("blocks");
    let dir = to.path().join("new");
    filled(from.path(), 0..40);
    let store = open(&config(from.path()));
    let busy = export(from.path(), None, None, &file).unwrap_err().to_string();
    assert!(busy.contains("another process") && !file.exists(), "{busy}");
    drop(store);
    let moved = export(from.path(), None, None, &file).unwrap();
    assert_eq!(moved, Moved { blocks: 40, bytes: 40 * 5000, known: 0, damaged: 0 });
    assert_eq!(fs::metadata(&file).unwrap().permissions().mode() & 0o777, 0o600);
    assert!(
        matches!(export(from.path(), None, None, &file), Err(MoveError::File { .. })),
        "nothing is written over"
    );
    filled(&dir, 30..45);
    assert_eq!(
        import(&dir, BYTES, &file).unwrap(),
        Moved { blocks: 30, bytes: 30 * 5000, known: 10, damaged: 0 }
    );
    assert_eq!(import(&dir, BYTES, &file).unwrap().known, 40);
    let store = open(&DiskConfig { dir: dir.clone(), bytes: BYTES, ..config(&dir) });
    assert!((0..45).all(|number| has(&store, number, &tenant(1), 5000)));
    assert!(!has(&store, 3, &tenant(2), 5000), "another tenant's key opens nothing");
    let busy = import(&dir, BYTES, &file).unwrap_err().to_string();
    assert!(busy.contains("another process"), "{busy}");
}

#[test]
fn one_layout_is_exported() {
    let (dir, out) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    filled(dir.path(), 0..5);
    let other = DiskConfig { layout_digest: [0xab; 32], ..config(dir.path()) };
    open(&other).put(&key(50), &tenant(1), &block(50, 5000), &ABOUT).unwrap();
    let blocks = |layout, name: &str| {
        export(dir.path(), layout, None, &out.path().join(name)).map(|moved| moved.blocks)
    };
    assert_eq!(blocks(None, "last").unwrap(), 1);
    assert_eq!(blocks(Some("0707"), "first").unwrap(), 5);
    let error = blocks(Some("cd"), "none").unwrap_err().to_string();
    assert!(error.contains("\"cd\"") && !out.path().join("none").exists(), "{error}");
    let empty = tempfile::tempdir().unwrap();
    assert!(matches!(
        export(empty.path(), None, None, &out.path().join("empty")),
        Err(MoveError::Layout { .. })
    ));
}

/// Whatever a file holds, it is imported as a whole, or refused by name and nothing of it is.
#[test]
fn of_a_file_that_is_damaged_or_made_up_nothing_is_imported() {
    let (from, out) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let file = out.path().join("blocks");
    filled(from.path(), 0..6);
    export(from.path(), None, None, &file).unwrap();
    let good = fs::read(&file).unwrap();
    let (mut refused, mut whole) = (0, 0);
    let mut attempt = |bytes: &[u8], what: &str| {
        fs::write(&file, bytes).unwrap();
        let dir = tempfile::tempdir().unwrap();
        let there = match import(dir.path(), BYTES, &file) {
            Ok(_) => 6,
            Err(error) => {
                assert!(error.to_string().contains("blocks"), "{what}: {error}");
                assert!(segments(dir.path()).is_empty(), "{what}: {error}");
                0
            }
        };
        let store = open(&DiskConfig { dir: dir.path().to_owned(), bytes: BYTES, ..config(dir.path()) });
        // `has` compares the bytes.
        let found = (0..6).filter(|number| has(&store, *number, &tenant(1), 5000)).count();
        assert_eq!(found, there, "{what}");
        *(if there > 0 { &mut whole } else { &mut refused }) += 1;
    };
    for length in (0..good.len()).step_by(1013) {
        attempt(&good[..length], "cut short");
    }
    for at in (0..good.len()).step_by(311).chain(good.len() - 64..good.len()) {
        let mut bytes = good.clone();
        bytes[at] ^= 1 << (at % 8);
        attempt(&bytes, "a bit");
    }
    // A list that says what it wants, with checksums that are right.
    let end = good.len() - 64;
    for (field, value) in [(12, u32::MAX), (12, 7), (16, 0), (16, u32::MAX), (16, 1), (8, 2)] {
        let mut bytes = good.clone();
        bytes[end + field..end + field + 4].copy_from_slice(&value.to_le_bytes());
        let crc = crc32c::crc32c(&bytes[end..end + 60]);
        bytes[end + 60..].copy_from_slice(&crc.to_le_bytes());
        attempt(&bytes, "a list of lies");
    }
    let list = good.len() - 4096;
    for (field, value) in [(36, 0u32), (36, u32::MAX), (36, 3), (40, u32::MAX), (40, 0), (40, 4999)] {
        let mut bytes = good.clone();
        bytes[list + field..list + field + 4].copy_from_slice(&value.to_le_bytes());
        let crc = crc32c::crc32c(&bytes[list..end]);
        bytes[end + 20..end + 24].copy_from_slice(&crc.to_le_bytes());
        let crc = crc32c::crc32c(&bytes[end..end + 60]);
        bytes[end + 60..].copy_from_slice(&crc.to_le_bytes());
        attempt(&bytes, "an entry of lies");
    }
    // Behind a block there are zeros, which are nothing's.
    assert!(refused > 100 && whole > 20, "{refused} refused, {whole} whole");
    let missing = import(out.path(), BYTES, &out.path().join("none")).unwrap_err();
    assert!(matches!(missing, MoveError::File { .. }), "{missing}");
    fs::write(&file, b"anything else").unwrap();
    assert!(matches!(import(out.path(), BYTES, &file), Err(MoveError::NotAnExport { .. })));
}

#[test]
fn where_not_all_can_be_stored_nothing_is() {
    let (from, to) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let (file, dir) = (to.path().join("blocks"), to.path().join("new"));
    filled(from.path(), 0..60);
    export(from.path(), None, None, &file).unwrap();
    assert!(matches!(import(&dir, 300 << 10, &file), Err(MoveError::Room { .. })));
    // The second segment cannot be made.
    fs::create_dir_all(dir.join("0000000002.segment")).unwrap();
    assert!(matches!(import(&dir, BYTES, &file), Err(MoveError::Put(_))));
    fs::remove_dir(dir.join("0000000002.segment")).unwrap();
    assert!(segments(&dir).is_empty());
    assert_eq!(import(&dir, BYTES, &file).unwrap().blocks, 60);
    // What is damaged in a folder is not exported.
    let segment = &segments(from.path())[0];
    let mut bytes = fs::read(segment).unwrap();
    bytes[4096 + 300] ^= 1;
    fs::write(segment, bytes).unwrap();
    let blocks = export(from.path(), None, None, &to.path().join("less")).unwrap();
    assert_eq!((blocks.blocks + blocks.damaged, blocks.damaged), (blocks_of(&dir), 1));
}

fn blocks_of(dir: &std::path::Path) -> u64 {
    folio_tiers::inspect::segments(dir, false).unwrap().iter().map(|segment| segment.blocks).sum()
}

#[test]
fn one_tenants_blocks_are_exported_by_its_key() {
    let (from, to, out) =
        (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let store = open(&config(from.path()));
    for number in 0..12 {
        let owner = 1 + (number % 3) as u8;
        store.put(&key(number), &tenant(owner), &block(number, 5000), &ABOUT).unwrap();
    }
    drop(store);
    let file = out.path().join("two");
    assert_eq!(export(from.path(), None, Some(&tenant(2)), &file).unwrap().blocks, 4);
    let moved = import(to.path(), BYTES, &file).unwrap();
    assert_eq!(moved.blocks, 4);
    let store = open(&DiskConfig { dir: to.path().to_owned(), bytes: BYTES, ..config(to.path()) });
    for number in 0..12 {
        let owner = 1 + (number % 3) as u8;
        assert_eq!(has(&store, number, &tenant(owner), 5000), owner == 2, "{number}");
    }
    drop(store);
    let none = export(from.path(), None, Some(&tenant(9)), &out.path().join("none")).unwrap();
    assert_eq!(none.blocks, 0, "of who has nothing there");
}
