//! Each rule of optional groups, where a drafter's KV lies, on the smallest pools that show it.

mod common;

use common::{ByRoot, config, root};
use folio_kv::{BlockTable, GroupConfig, HOLE, KvCache, Layout, LruLeafFirst};

/// Blocks of four tokens, in group 0 and in the optional one.
fn cache() -> KvCache {
    with_blocks(16)
}

/// So many in the optional one.
fn with_blocks(blocks: u32) -> KvCache {
    let (layout, optional) = (Layout::Paged, true);
    let group = GroupConfig { layout, blocks, block_tokens: 4, bytes_per_block: 64, optional };
    KvCache::with_groups(config(16, 4), &[group], Box::new(LruLeafFirst::new()))
}

/// Who shares the last block of an optional group and finds no block for a copy goes on without, and nothing is left half done.
#[test]
fn a_fork_without_a_block_of_an_optional_group_goes_on() {
    let group = GroupConfig { optional: true, ..GroupConfig::window(64, 1, 4, 64) };
    let mut cache = KvCache::with_groups(config(16, 4), &[group], Box::new(LruLeafFirst::new()));
    let (root, tokens) = (root(0), (0..40).collect::<Vec<u32>>());
    let (mut table, _) = cache.attach_at(&root, &tokens, 0);
    cache.grow(&mut table, 3, &mut Vec::new()).expect("room");
    cache.committed(&mut table, &tokens, 3);
    let mut fork = cache.fork(&mut table);
    let copies = &mut Vec::new();
    cache.grow(&mut fork, 4, copies).expect("the group is optional");
    assert_eq!((copies.len(), fork.group(1)), (1, &[HOLE][..]));
    cache.check(&[&table, &fork]).unwrap();
    [table, fork].into_iter().for_each(|table| drop(cache.release(table, &tokens)));
    cache.check(&[]).unwrap();
}

/// A drafter that lags behind has nothing published that it did not compute, and gets what it computes later published then.
#[test]
fn what_a_drafter_did_not_write_is_not_found() {
    let mut cache = cache();
    let (root, tokens) = (root(0), (0..40).collect::<Vec<u32>>());
    let found = |cache: &mut KvCache| {
        let (table, _) = cache.attach_at(&root, &tokens, 39);
        let found = (table.computed(), table.group(1).iter().filter(|block| **block != HOLE).count());
        assert_eq!(table.is_whole(1), found.1 * 4 >= found.0 as usize);
        cache.release(table, &tokens);
        found
    };
    let (mut table, _) = cache.attach_at(&root, &tokens, 0);
    cache.grow(&mut table, 14, &mut Vec::new()).expect("room");
    table.set_written(6);
    cache.committed(&mut table, &tokens, 12);
    assert_eq!((table.written(), found(&mut cache)), (6, (12, 1)));
    table.set_written(13);
    cache.committed(&mut table, &tokens, 13);
    assert_eq!(
        found(&mut cache),
        (12, 3),
        "what it caught up with; of the tail nothing is found before it is released"
    );
    table.set_written(13);
    cache.committed(&mut table, &tokens, 14);
    cache.check(&[&table]).unwrap();
    cache.release(table, &tokens);
    assert_eq!(found(&mut cache), (14, 3), "its tail was not written to the end");
    cache.check(&[]).unwrap();
}

/// What is optional is neither kept off the device nor loaded.
#[test]
fn transfers_leave_optional_groups_alone() {
    let mut cache = cache();
    let (root, tokens) = (root(0), (0..40).collect::<Vec<u32>>());
    let (mut table, _) = cache.attach_at(&root, &tokens, 0);
    cache.grow(&mut table, 8, &mut Vec::new()).expect("room");
    cache.committed(&mut table, &tokens, 8);
    let (lease, contents) = cache.lease(table.hashes(), (0, 8), u64::MAX);
    assert!(contents.len() == 2 && contents.iter().all(|content| content.group == 0), "{contents:?}");
    assert!(cache.end_lease(lease));
    cache.grow(&mut table, 12, &mut Vec::new()).expect("room");
    let (ticket, contents) = cache.begin_load(&mut table, 2).expect("the rest may be computed meanwhile");
    assert!(contents.len() == 2 && contents.iter().all(|content| content.group == 0), "{contents:?}");
    assert!(!table.is_whole(1), "what is loaded lacks the drafter's part");
    cache.end_load(ticket, Some(&mut table), &tokens, false).unwrap();
    cache.check(&[&table]).unwrap();
    cache.release(table, &tokens);
    // Nor do they wait for the end of one of its blocks.
    let group = GroupConfig { optional: true, layout: Layout::Paged, ..GroupConfig::window(1, 16, 8, 64) };
    let mut cache = KvCache::with_groups(config(16, 4), &[group], Box::new(LruLeafFirst::new()));
    assert_eq!(cache.border(13), 12);
    let (mut table, _) = cache.attach_at(&root, &tokens, 0);
    cache.grow(&mut table, 12, &mut Vec::new()).expect("room");
    cache.committed(&mut table, &tokens, 12);
    let (ticket, _) = cache.begin_load(&mut table, 2).expect("of group 0 it begins with a block");
    assert_eq!((table.group(1)[0] == HOLE, &table.group(1)[1..]), (false, &[HOLE; 2][..]));
    cache.check(&[&table]).unwrap();
    cache.end_load(ticket, Some(&mut table), &tokens, false).unwrap();
    cache.check(&[&table]).unwrap();
    cache.release(table, &tokens);
}

/// What was found without a drafter's part gets blocks for it, and is published when the drafter has computed it.
#[test]
fn what_is_found_without_an_optional_group_is_filled_again() {
    let mut cache = with_blocks(15);
    let (root, tokens) = (root(0), (0..40).collect::<Vec<u32>>());
    let (mut first, _) = cache.attach_at(&root, &tokens, 0);
    first.set_written(0);
    cache.grow(&mut first, 12, &mut Vec::new()).expect("room");
    cache.committed(&mut first, &tokens, 12);
    cache.release(first, &tokens);
    let (mut table, _) = cache.attach_at(&root, &tokens, 39);
    assert_eq!((table.computed(), table.group(1)), (12, &[HOLE; 3][..]));
    assert!(cache.refill(&mut table, 1..2) && table.is_whole(1));
    assert_eq!(table.written(), 0);
    cache.check(&[&table]).unwrap();
    table.set_written(9);
    cache.grow(&mut table, 14, &mut Vec::new()).expect("room");
    cache.committed(&mut table, &tokens, 13);
    cache.check(&[&table]).unwrap();
    let (other, _) = cache.attach_at(&root, &tokens, 12);
    assert_eq!(other.group(1)[..2], table.group(1)[..2], "what it wrote is found");
    assert_eq!(other.group(1)[2], HOLE);
    [table, other].into_iter().for_each(|table| drop(cache.release(table, &tokens)));
    cache.check(&[]).unwrap();
    // Where the pool has less room than what lacks, nothing is taken.
    let long: Vec<u32> = (100..160).collect();
    let (mut holder, _) = cache.attach_at(&root, &long, 0);
    holder.set_written(0);
    cache.grow(&mut holder, 52, &mut Vec::new()).expect("room");
    let (mut table, _) = cache.attach_at(&root, &tokens, 39);
    let before = table.group(1).to_vec();
    assert!(before.contains(&HOLE) && !cache.refill(&mut table, 1..2));
    assert_eq!(table.group(1), before);
    [table, holder].into_iter().for_each(|table| drop(cache.release(table, &long)));
}

/// An optional group has a pool of its own: when that is full its content makes way for its own, and what is cached of the model stays and is found.
#[test]
fn what_fills_an_optional_group_evicts_nothing_else() {
    // Room for all four prompts, and for one of them.
    let mut cache = with_blocks(3);
    let root = root(0);
    let prompts = [0, 100, 200, 300].map(|first| (first..first + 13).collect::<Vec<u32>>());
    for tokens in &prompts {
        let (mut table, _) = cache.attach_at(&root, tokens, 0);
        cache.grow(&mut table, 12, &mut Vec::new()).expect("room");
        cache.committed(&mut table, tokens, 12);
        assert!(table.is_whole(1), "the drafter's content before it is reclaimed");
        cache.release(table, tokens);
    }
    let stats = cache.stats();
    assert_eq!((stats.evictions, stats.windows()[0].evictions), (0, 9));
    let found = prompts.map(|tokens| {
        let (table, _) = cache.attach_at(&root, &tokens, 12);
        let found = (table.computed(), table.is_whole(1));
        cache.release(table, &tokens);
        found
    });
    assert_eq!(found, [(12, false), (12, false), (12, false), (12, true)]);
    cache.check(&[]).unwrap();
}

/// States of a drafter behind every eighth position and the last.
fn with_states() -> KvCache {
    let layout = Layout::State;
    let group = GroupConfig { layout, blocks: 8, block_tokens: 8, bytes_per_block: 64, optional: true };
    KvCache::with_groups(config(16, 4), &[group], Box::new(LruLeafFirst::new()))
}

/// The drafter computed all drafts but the last: of what was right its states are kept, and one that lacks is not that of another position.
#[test]
fn a_drafters_state_is_that_of_what_it_wrote() {
    let (mut cache, root, tokens) = (with_states(), root(0), (0..40).collect::<Vec<u32>>());
    let commit = |cache: &mut KvCache, table: &mut BlockTable, written: u32, computed: u32| {
        table.set_written(written);
        cache.committed(table, &tokens, computed);
        cache.check(&[&*table]).unwrap();
    };
    let (mut table, _) = cache.attach_at(&root, &tokens, 0);
    cache.grow(&mut table, 6, &mut Vec::new()).expect("room");
    commit(&mut cache, &mut table, 6, 6);
    table.set_tentative(3);
    cache.grow(&mut table, 10, &mut Vec::new()).expect("room");
    table.plan_tentative(Some(7));
    let planned = table.group(1).to_vec();
    assert_eq!(planned.len(), 1 + 3);
    for (written, computed) in [(7, 7), (8, 8), (9, 9), (9, 10)] {
        commit(&mut cache, &mut table, written, computed);
    }
    assert_eq!(table.group(1), [HOLE, planned[2], planned[0], planned[3]]);
    // It lags behind: what it goes on from stays, however far the rest is.
    table.set_tentative(0);
    cache.grow(&mut table, 20, &mut Vec::new()).expect("room");
    table.plan_tentative(None);
    commit(&mut cache, &mut table, 9, 20);
    assert_eq!((table.written(), table.group(1)[1]), (9, planned[2]));
    assert!(table.is_whole(1));
    // Who parts from it now has no state that the other's next rows overwrite.
    let fork = cache.fork(&mut table);
    assert!(!fork.is_whole(1) && table.is_whole(1));
    cache.check(&[&table, &fork]).unwrap();
    cache.release(fork, &tokens);
    cache.grow(&mut table, 21, &mut Vec::new()).expect("room");
    commit(&mut cache, &mut table, 21, 21);
    let fork = cache.fork(&mut table);
    assert!(fork.is_whole(1));
    [table, fork].into_iter().for_each(|table| drop(cache.release(table, &tokens)));
    cache.check(&[]).unwrap();
}

/// Rows of drafts have blocks of their own, also where no other group needs any.
#[test]
fn drafts_within_a_block_have_blocks_for_their_states() {
    let (mut cache, root, tokens) = (with_states(), root(0), (0..40).collect::<Vec<u32>>());
    let (mut table, _) = cache.attach_at(&root, &tokens, 0);
    cache.grow(&mut table, 5, &mut Vec::new()).expect("room");
    table.set_written(5);
    cache.committed(&mut table, &tokens, 5);
    table.set_tentative(2);
    cache.grow(&mut table, 8, &mut Vec::new()).expect("room");
    assert_eq!((table.capacity(), table.group(1).len()), (8, 1 + 2));
    cache.check(&[&table]).unwrap();
    cache.release(table, &tokens);
}

/// A conversation goes on from the state at its end; where less of it is shared the drafter goes on from the last before that, or begins with
/// the first token.
#[test]
fn a_state_of_another_position_is_not_found() {
    let (mut cache, root, tokens) = (with_states(), root(0), (0..40).collect::<Vec<u32>>());
    let (mut table, _) = cache.attach_at(&root, &tokens, 0);
    cache.grow(&mut table, 6, &mut Vec::new()).expect("room");
    table.set_written(6);
    cache.committed(&mut table, &tokens, 6);
    cache.release(table, &tokens);
    let (table, copies) = cache.attach_at(&root, &tokens, 39);
    assert_eq!((table.computed(), table.is_whole(1), copies.len()), (6, true, 2));
    cache.release(table, &tokens);
    let other: Vec<u32> = (0..5).chain(100..130).collect();
    let (mut table, _) = cache.attach_at(&root, &other, 34);
    assert_eq!((table.computed(), table.group(1), table.written()), (5, &[HOLE][..], 0));
    assert!(cache.refill(&mut table, 1..2) && table.is_whole(1));
    assert_eq!(table.written(), 0);
    cache.check(&[&table]).unwrap();
    cache.release(table, &other);
    // States behind eight positions and behind fourteen.
    let (mut table, _) = cache.attach_at(&root, &tokens, 0);
    cache.grow(&mut table, 14, &mut Vec::new()).expect("room");
    table.set_written(14);
    cache.committed(&mut table, &tokens, 14);
    cache.release(table, &tokens);
    let other: Vec<u32> = (0..12).chain(100..130).collect();
    let (mut table, _) = cache.attach_at(&root, &other, 34);
    assert_eq!((table.computed(), table.written(), table.is_whole(1)), (12, 8, false));
    let state = table.group(1)[0];
    assert!(cache.refill(&mut table, 1..2) && table.is_whole(1));
    assert_eq!((table.written(), table.group(1)[0], table.group(1).len()), (8, state, 2));
    cache.check(&[&table]).unwrap();
    cache.release(table, &other);
    cache.check(&[]).unwrap();
}
