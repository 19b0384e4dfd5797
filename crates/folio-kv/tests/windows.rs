//! Each rule of the window groups, on the smallest pools that show it.

mod common;

use common::{ByRoot, root, serve, windowed};
use folio_kv::{BlockCopy, BlockTable, GroupCounts, HOLE, KvCache, OutOfBlocks, Root, TenantId};

fn range(tokens: std::ops::Range<u32>) -> Vec<u32> {
    tokens.collect()
}

fn compute(cache: &mut KvCache, table: &mut BlockTable, tokens: &[u32], upto: u32) -> Vec<BlockCopy> {
    let mut copies = Vec::new();
    cache.grow(table, upto, &mut copies).expect("room");
    cache.committed(table, tokens, upto);
    copies
}

fn started(cache: &mut KvCache, root: &Root, tokens: &[u32]) -> BlockTable {
    let (mut table, _) = cache.attach_at(root, tokens, 0);
    compute(cache, &mut table, tokens, tokens.len() as u32);
    table
}

/// Leading holes and held blocks of a window group.
fn held(table: &BlockTable, group: usize) -> (usize, usize) {
    let blocks = table.group(group);
    let holes = blocks.iter().take_while(|block| **block == HOLE).count();
    assert!(!blocks[holes..].contains(&HOLE), "a hole within the window");
    (holes, blocks.len() - holes)
}

#[test]
fn what_leaves_the_window_is_given_back_in_the_same_commit() {
    let (mut cache, root) = (windowed(16, 4, &[(8, 6)]), root(0));
    let tokens = range(0..40);
    let (mut table, _) = cache.attach_at(&root, &tokens, 0);
    // The query at `computed` reads positions computed - 5 ..= computed.
    for (computed, holes, blocks) in [(4, 0, 1), (8, 0, 2), (9, 1, 2), (12, 1, 2), (13, 2, 2), (16, 2, 2)] {
        compute(&mut cache, &mut table, &tokens, computed);
        assert_eq!(held(&table, 1), (holes, blocks), "{computed} computed");
        assert_eq!(cache.stats().windows()[0].active_blocks as usize, blocks);
        cache.check(&[&table]).unwrap();
    }
    assert_eq!(table.blocks().len(), 4, "full attention keeps everything");
    // A long chunk needs room for all of it, and leaves the window's blocks only.
    assert_eq!(cache.needed(&table, 40), GroupCounts::each(2, |_| 6));
    compute(&mut cache, &mut table, &tokens, 40);
    assert_eq!(held(&table, 1), (8, 2));
    cache.release(table, &tokens);
    cache.check(&[]).unwrap();
}

#[test]
fn unpublished_blocks_behind_the_window_do_not_exist_and_published_ones_stay_to_be_hit() {
    let (mut cache, root) = (windowed(16, 4, &[(6, 4)]), root(0));
    let tokens = range(0..24);
    let table = started(&mut cache, &root, &tokens);
    let window = cache.stats().windows()[0];
    assert_eq!((window.active_blocks, window.cached_blocks, window.free_blocks), (1, 5, 0));
    // The pool needs them: the oldest go, and their owners stay where they are.
    let other = started(&mut cache, &root, &range(100..108));
    let window = cache.stats().windows()[0];
    assert_eq!((window.evictions, window.cached_blocks), (2, 4));
    assert_eq!(cache.stats().evictions, 0);
    cache.check(&[&table, &other]).unwrap();
    cache.release(table, &tokens);
    cache.release(other, &range(100..108));
}

#[test]
fn a_hit_needs_only_the_last_window() {
    let (mut cache, root) = (windowed(16, 4, &[(4, 6)]), root(0));
    let tokens = range(0..32);
    // In chunks of a block: two blocks are held, the two behind them are cached, everything earlier is gone.
    let (mut table, _) = cache.attach_at(&root, &tokens, 0);
    (1..=8).for_each(|blocks| drop(compute(&mut cache, &mut table, &tokens, 4 * blocks)));
    assert_eq!(cache.stats().windows()[0].evictions, 4);
    cache.release(table, &tokens);

    let found = cache.lookup_at(&root, &tokens);
    assert_eq!((found.full_blocks, found.idle_blocks), (8, GroupCounts::each(2, |group| [8, 2][group])));
    let (table, _) = cache.attach_at(&root, &tokens, 32);
    assert_eq!(table.computed(), 32);
    assert_eq!(held(&table, 1), (6, 2));
    assert_eq!(cache.available(), GroupCounts::each(2, |group| [8, 2][group]));
    cache.check(&[&table]).unwrap();
    cache.release(table, &tokens);

    // Seven blocks have their window too; of five, the window is gone, and with it every shorter hit.
    assert_eq!(cache.probe_at(&root, &tokens[..28]), 28);
    assert_eq!(cache.probe_at(&root, &tokens[..20]), 0);
    let (table, _) = cache.attach_at(&root, &tokens[..20], 20);
    assert_eq!((table.computed(), cache.stats().queries.window_miss_tokens), (0, 20));
    cache.release(table, &[]);
    assert_eq!(cache.stats().queries.window_miss_tokens, 0);
}

#[test]
fn a_long_prompt_recycles_what_it_slid_over_and_leaves_the_ends_of_others() {
    let (mut cache, root) = (windowed(200, 4, &[(12, 6)]), root(0));
    let ended = range(0..20);
    serve(&mut cache, &root, &ended);
    // 40 blocks go through a pool of 12.
    let long = range(1000..1160);
    let (mut table, _) = cache.attach_at(&root, &long, 0);
    (1..=20).for_each(|chunk| drop(compute(&mut cache, &mut table, &long, 8 * chunk)));
    assert!(cache.stats().windows()[0].evictions > 20);
    assert_eq!(cache.probe_at(&root, &ended), 20, "the end of a conversation outlives what nobody asked for");
    cache.check(&[&table]).unwrap();
    cache.release(table, &long);
    assert_eq!(cache.probe_at(&root, &long), 160);
}

#[test]
fn a_beginning_that_was_missed_once_is_kept_when_it_is_computed_again() {
    let (mut cache, root) = (windowed(200, 4, &[(12, 6)]), root(0));
    let shared = range(0..16);
    let with = |own: u32| [shared.clone(), range(own..own + 60)].concat();
    let (first, second) = (with(1000), with(2000));
    let answer = |cache: &mut KvCache, tokens: &[u32]| {
        let (mut table, _) = cache.attach_at(&root, tokens, tokens.len() as u32 - 1);
        let found = table.computed();
        while table.computed() < tokens.len() as u32 {
            let upto = (table.computed() + 8).min(tokens.len() as u32);
            compute(cache, &mut table, tokens, upto);
        }
        cache.release(table, tokens);
        found
    };
    assert_eq!(answer(&mut cache, &first), 0);
    assert_eq!(answer(&mut cache, &second), 0, "its window was passed and recycled");
    assert_eq!(cache.stats().queries.window_miss_tokens, 16);
    assert_eq!(answer(&mut cache, &with(3000)), 16);
    assert_eq!(answer(&mut cache, &with(4000)), 16);
    assert_eq!(cache.stats().queries.window_miss_tokens, 16);
    cache.check(&[]).unwrap();
}

#[test]
fn a_missing_companion_costs_the_hits_whose_window_it_is_in() {
    let (mut cache, root) = (windowed(16, 4, &[(8, 5), (16, 40)]), root(0));
    let tokens = range(0..32);
    let table = started(&mut cache, &root, &tokens);
    cache.release(table, &tokens);
    assert_eq!(cache.probe_at(&root, &tokens), 32);
    // Blocks 0 to 6 left the window in that order, block 7 was released last: three new blocks evict 0, 1 and 2.
    let other = started(&mut cache, &root, &range(100..112));
    assert_eq!(cache.stats().windows()[0].evictions, 3);
    assert_eq!(cache.stats().windows()[1].evictions, 0);
    assert_eq!(cache.probe_at(&root, &tokens[..12]), 0);
    assert_eq!(cache.probe_at(&root, &tokens[..16]), 16, "its window is block 3");
    assert_eq!(cache.probe_at(&root, &tokens), 32);
    // What is computed again brings its companions back, where they were missing.
    let (mut again, _) = cache.attach_at(&root, &tokens, 12);
    assert_eq!(again.computed(), 0);
    cache.release(other, &range(100..112));
    compute(&mut cache, &mut again, &tokens, 12);
    assert_eq!(again.blocks().len(), 3);
    assert_eq!(cache.stats().dedups, 3, "group 0 had the blocks");
    cache.check(&[&again]).unwrap();
    cache.release(again, &tokens);
    assert_eq!(cache.probe_at(&root, &tokens[..12]), 12);
    cache.check(&[]).unwrap();
}

#[test]
fn a_tail_is_copied_in_every_group_and_only_from_a_block_that_has_all_companions() {
    let (mut cache, root) = (windowed(8, 4, &[(4, 8)]), root(0));
    let tokens = range(0..7);
    serve(&mut cache, &root, &tokens);
    let (table, copies) = cache.attach_at(&root, &[0, 1, 2, 3, 4, 5, 99], 6);
    assert_eq!(table.computed(), 6);
    let groups: Vec<(u32, u32)> = copies.into_iter().map(|copy| (copy.group, copy.tokens)).collect();
    assert_eq!(groups, [(0, 2), (1, 2)]);
    cache.check(&[&table]).unwrap();
    cache.release(table, &[0, 1, 2, 3, 4, 5, 99]);

    // All of the window's pool goes to others: the tail is there in group 0 and of no use.
    let other = started(&mut cache, &root, &range(100..116));
    assert_eq!(cache.probe_at(&root, &tokens), 0);
    cache.release(other, &range(100..116));
    cache.check(&[]).unwrap();
}

#[test]
fn a_fork_shares_the_window_and_each_group_copies_its_part_of_a_shared_block() {
    let (mut cache, root) = (windowed(16, 4, &[(8, 6)]), root(0));
    let tokens = range(0..14);
    let mut a = started(&mut cache, &root, &tokens);
    let mut b = cache.fork(&mut a);
    assert_eq!(held(&b, 1), (2, 2));
    assert_eq!(cache.stats().windows()[0].active_blocks, 2);
    assert_eq!(cache.exclusive_blocks(&a), GroupCounts::default());
    assert_eq!(cache.needed(&b, 15), GroupCounts::each(2, |_| 1));
    let mut other = tokens.clone();
    other.push(99);
    let copies = compute(&mut cache, &mut b, &other, 15);
    assert_eq!(copies.iter().map(|copy| (copy.group, copy.tokens)).collect::<Vec<_>>(), [(0, 2), (1, 2)]);
    assert_eq!(copies[1].from, a.group(1)[3]);
    assert_eq!(copies[1].to, b.group(1)[3]);
    assert!(cache.needed(&a, 15).is_zero(), "the last holder writes in place");
    let longer = range(0..40);
    compute(&mut cache, &mut a, &longer, 16);
    cache.check(&[&a, &b]).unwrap();
    // One slides on, the other still holds what both had.
    compute(&mut cache, &mut a, &longer, 17);
    assert_eq!((held(&a, 1), held(&b, 1)), ((3, 2), (2, 2)));
    cache.check(&[&a, &b]).unwrap();
    cache.release(a, &longer);
    cache.release(b, &other);
    cache.check(&[]).unwrap();
    assert_eq!(cache.available(), cache.pools());
}

#[test]
fn grow_is_all_or_nothing_over_all_groups() {
    let (mut cache, root) = (windowed(16, 4, &[(2, 8)]), root(0));
    let (mut table, _) = cache.attach_at(&root, &range(0..12), 0);
    let before = cache.stats();
    let available = GroupCounts::each(2, |group| [16, 2][group]);
    assert_eq!((cache.needed(&table, 12), cache.available()), (GroupCounts::each(2, |_| 3), available));
    assert_eq!(cache.grow(&mut table, 12, &mut Vec::new()), Err(OutOfBlocks));
    assert_eq!((cache.stats(), table.blocks().is_empty()), (before, true));
    compute(&mut cache, &mut table, &range(0..12), 8);
    // The window of position 8 starts at 1: nothing is behind it yet, so a third block is not to be had.
    assert!(cache.grow(&mut table, 9, &mut Vec::new()).is_err());
    cache.release(table, &range(0..12));
    cache.check(&[]).unwrap();
}

#[test]
fn an_evicted_owner_takes_its_companions_along() {
    let (mut cache, root) = (windowed(4, 4, &[(8, 8)]), root(0));
    serve(&mut cache, &root, &range(0..16));
    assert_eq!(cache.stats().windows()[0].cached_blocks, 4);
    let table = started(&mut cache, &root, &range(100..108));
    let window = cache.stats().windows()[0];
    assert_eq!((cache.stats().evictions, window.evictions), (2, 0));
    assert_eq!((window.active_blocks, window.cached_blocks, window.free_blocks), (2, 2, 4));
    cache.check(&[&table]).unwrap();
    cache.release(table, &range(100..108));
}

#[test]
fn tenants_and_bytes_are_counted_per_group_and_cleared_alike() {
    let mut cache = windowed(16, 4, &[(8, 1), (8, 100)]);
    let tokens = range(0..12);
    let table = started(&mut cache, &root(0), &tokens);
    serve(&mut cache, &root(1), &range(0..8));
    let stats = cache.stats();
    assert_eq!(stats.active_bytes(), 3 * 1024 + 3 * 256, "the short window holds nothing at a block's end");
    assert_eq!(stats.cached_bytes(), 2 * 1024 + (3 + 2 + 2) * 256);
    let windows = |of: folio_kv::GroupCounts| [1, 2, 3].map(|group| of[group]);
    let tenant = cache.tenant_stats(TenantId(0));
    assert_eq!((windows(tenant.active), windows(tenant.cached)), ([0, 3, 0], [3, 0, 0]));
    assert_eq!(windows(cache.tenant_stats(TenantId(1)).cached), [2, 2, 0]);
    assert_eq!(stats.usage(), 3.0 / 8.0, "the fullest group");
    cache.clear(Some(TenantId(1)));
    assert_eq!(windows(cache.tenant_stats(TenantId(1)).cached), [0; 3]);
    assert_eq!(windows(cache.tenant_stats(TenantId(0)).cached), [3, 0, 0]);
    cache.clear(None);
    let cached = windows(cache.tenant_stats(TenantId(0)).cached);
    assert_eq!(cached, [0; 3], "behind the window of a running sequence");
    cache.check(&[&table]).unwrap();
    cache.release(table, &tokens);
}
