//! A directory looked at without a server.

mod common;

use std::fs;

use common::{ABOUT, block, config, open, segments, tenant};
use folio_tiers::inspect::{self, SegmentState};

#[test]
fn what_there_is_and_what_of_it_is_damaged() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(&config(dir.path()));
    for number in 0..30 {
        store.put(&common::key(number), &tenant(1), &block(number, 5000), &ABOUT).unwrap();
    }
    let busy = inspect::segments(dir.path(), false).unwrap_err().to_string();
    assert!(busy.contains("another process"), "{busy}");
    drop(store);
    let all = inspect::segments(dir.path(), true).unwrap();
    assert!(all.len() > 3 && all.iter().all(|segment| segment.state == SegmentState::Ended));
    assert!(all.iter().all(|segment| segment.damaged == Some(0) && segment.layout == common::LAYOUT));
    let sum = |of: fn(&inspect::SegmentInfo) -> u64| all.iter().map(of).sum::<u64>();
    assert_eq!((sum(|s| s.blocks), sum(|s| s.payload_bytes)), (30, 30 * 5000));
    // A bit of a block, a list, and a file of another version.
    let files = segments(dir.path());
    let change = |file: usize, at: usize| {
        let mut bytes = fs::read(&files[file]).unwrap();
        let at = at.min(bytes.len() - 1);
        bytes[at] ^= 1;
        fs::write(&files[file], bytes).unwrap();
    };
    change(0, 4096 + 300);
    change(1, usize::MAX);
    change(2, 8);
    let all = inspect::segments(dir.path(), true).unwrap();
    assert_eq!((all[0].state, all[0].damaged), (SegmentState::Ended, Some(1)));
    assert_eq!((all[1].state, all[1].damaged), (SegmentState::Open, Some(0)));
    // A first page that is damaged says nothing of a version.
    assert_eq!(all[2].state, SegmentState::Ended);
    let missing = inspect::segments(&dir.path().join("none"), false).unwrap_err().to_string();
    assert!(missing.contains("no such folder") && !dir.path().join("none").exists(), "{missing}");
}

#[test]
fn the_oldest_go_until_the_rest_fits() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(&config(dir.path()));
    for number in 0..30 {
        store.put(&common::key(number), &tenant(1), &block(number, 5000), &ABOUT).unwrap();
    }
    drop(store);
    let before = inspect::segments(dir.path(), false).unwrap();
    let left = before.iter().rev().take(2).map(|segment| segment.bytes).sum();
    let gone = inspect::shrink(dir.path(), left).unwrap();
    assert_eq!(gone.len(), before.len() - 2);
    let after = inspect::segments(dir.path(), false).unwrap();
    let names = |of: &[inspect::SegmentInfo]| of.iter().map(|segment| segment.number).collect::<Vec<_>>();
    assert_eq!(names(&after), names(&before[before.len() - 2..]));
    let store = open(&config(dir.path()));
    assert_eq!(store.stats().blocks, after.iter().map(|segment| segment.blocks).sum::<u64>());
}
