//! Each rule of state groups where rows may be taken back, on the smallest pools that show it.

mod common;

use common::{ByRoot, config, root};
use folio_kv::{BlockId, BlockTable, GroupConfig, GroupCounts, HOLE, KvCache, Layout, LruLeafFirst, Root};

/// Blocks of four tokens in group 0, states behind every eighth position and the last.
fn cache(states: u32) -> KvCache {
    let group = GroupConfig {
        layout: Layout::State,
        blocks: states,
        block_tokens: 8,
        bytes_per_block: 64,
        optional: false,
    };
    KvCache::with_groups(config(16, 4), &[group], Box::new(LruLeafFirst::new()))
}

/// Plans positions up to `to`, of which the last `rows` may be taken back.
fn plan(cache: &mut KvCache, table: &mut BlockTable, to: u32, rows: u32) {
    table.set_tentative(rows);
    cache.grow(table, to, &mut Vec::new()).expect("room");
    table.plan_tentative((rows > 0).then_some(to - rows));
}

/// A conversation that ends at `end`.
fn converse(cache: &mut KvCache, root: &Root, tokens: &[u32], end: u32) {
    let (mut table, _) = cache.attach_at(root, tokens, 0);
    plan(cache, &mut table, end, 0);
    cache.committed(&mut table, tokens, end);
    cache.release(table, tokens);
}

fn states(table: &BlockTable) -> Vec<BlockId> {
    table.group(1).to_vec()
}

#[test]
fn what_is_taken_back_leaves_the_state_before_it() {
    let (mut cache, root, tokens) = (cache(8), root(0), (0..40).collect::<Vec<u32>>());
    let (mut table, _) = cache.attach_at(&root, &tokens, 0);
    plan(&mut cache, &mut table, 5, 0);
    cache.committed(&mut table, &tokens, 5);
    assert_eq!(states(&table).len(), 1, "one state, overwritten row by row");
    // A row that is certain, and three drafts: each draft has a block of its own.
    plan(&mut cache, &mut table, 9, 3);
    let planned = states(&table);
    assert_eq!(planned.len(), 1 + 3);
    assert_eq!(cache.needed(&table, 9), GroupCounts::default());
    // The first of them is right: its state is that of the block now, and the one before it is of no use.
    cache.committed(&mut table, &tokens, 6);
    cache.committed(&mut table, &tokens, 7);
    assert_eq!(states(&table), [planned[1], planned[0], planned[2], planned[3]]);
    cache.check(&[&table]).unwrap();
    // None is right.
    plan(&mut cache, &mut table, 9, 1);
    let planned = states(&table);
    cache.committed(&mut table, &tokens, 8);
    assert_eq!(states(&table), planned);
    cache.release(table, &tokens);
    cache.check(&[]).unwrap();
    assert_eq!(cache.lookup_at(&root, &tokens).full_blocks, 2, "the state behind eight positions is there");
}

#[test]
fn states_behind_full_blocks_are_kept_on_the_way() {
    let (mut cache, root, tokens) = (cache(8), root(0), (0..40).collect::<Vec<u32>>());
    let (mut table, _) = cache.attach_at(&root, &tokens, 0);
    plan(&mut cache, &mut table, 6, 0);
    cache.committed(&mut table, &tokens, 6);
    plan(&mut cache, &mut table, 10, 4);
    let planned = states(&table);
    assert_eq!(planned.len(), 1 + 4);
    // Positions 6 to 9 are right: the state behind position 7 is that of the full block, that behind 9 the last.
    cache.committed(&mut table, &tokens, 10);
    assert_eq!(states(&table)[..2], [HOLE, planned[4]]);
    cache.check(&[&table]).unwrap();
    cache.release(table, &tokens);
    let (table, _) = cache.attach_at(&root, &tokens[..9], 8);
    assert_eq!((table.computed(), states(&table)), (8, vec![planned[2]]));
    cache.release(table, &tokens);
    cache.check(&[]).unwrap();
}

#[test]
fn a_state_that_was_overwritten_is_not_kept() {
    for (overwritten, found) in [(false, 3), (true, 0)] {
        let (mut cache, root, tokens) = (cache(8), root(0), (0..40).collect::<Vec<u32>>());
        let (mut table, _) = cache.attach_at(&root, &tokens, 0);
        plan(&mut cache, &mut table, 3, 0);
        cache.committed(&mut table, &tokens, 3);
        // A step behind the end wrote position 3.
        if overwritten {
            table.set_overwritten();
        }
        cache.release(table, &tokens);
        let (table, copies) = cache.attach_at(&root, &tokens[..20], 19);
        assert_eq!(table.computed(), found, "{copies:?}");
        cache.release(table, &tokens);
        cache.check(&[]).unwrap();
    }
}

#[test]
fn rows_that_may_be_taken_back_are_counted_as_room() {
    let (mut cache, root, tokens) = (cache(4), root(0), (0..40).collect::<Vec<u32>>());
    let (mut table, _) = cache.attach_at(&root, &tokens, 0);
    plan(&mut cache, &mut table, 8, 0);
    cache.committed(&mut table, &tokens, 8);
    table.set_tentative(4);
    assert_eq!(cache.needed(&table, 12), GroupCounts::each(2, |group| [1, 4][group]));
    assert_eq!(cache.available()[1], 3);
    cache.grow(&mut table, 12, &mut Vec::new()).expect_err("one is missing");
    table.set_tentative(2);
    cache.grow(&mut table, 12, &mut Vec::new()).expect("that many are left");
    cache.release(table, &tokens);
    cache.check(&[]).unwrap();
}

/// States lie behind every eighth position, and where a conversation ended: it goes on from there, however far the last of the others.
#[test]
fn a_conversation_goes_on_from_the_state_at_its_end() {
    for end in [3, 7, 14, 15, 18, 22, 31] {
        let (mut cache, root, tokens) = (cache(8), root(0), (0..60).collect::<Vec<u32>>());
        converse(&mut cache, &root, &tokens, end);
        let found = cache.lookup_at(&root, &tokens);
        assert_eq!(found.full_blocks * 4 + found.tail_tokens, end);
        let (table, copies) = cache.attach_at(&root, &tokens, 40);
        assert_eq!(table.computed(), end, "{copies:?}");
        cache.check(&[&table]).unwrap();
        cache.release(table, &tokens);
        // Shorter than that, and there is no state: only those at borders are of use.
        let shorter = end - 1;
        let (table, _) = cache.attach_at(&root, &tokens[..shorter as usize], shorter);
        assert_eq!(table.computed(), shorter - shorter % 8);
        cache.release(table, &tokens);
        cache.check(&[]).unwrap();
    }
}

/// Where the block that the tail would be copied to cannot be had, nothing of it is attached.
#[test]
fn a_tail_that_cannot_be_copied_is_not_a_hit() {
    let (mut cache, root, tokens) = (cache(1), root(0), (0..60).collect::<Vec<u32>>());
    converse(&mut cache, &root, &tokens, 6);
    let (mut other, _) = cache.attach_at(&common::root(1), &tokens, 0);
    let taken = cache.lookup_at(&root, &tokens);
    assert_eq!(taken.full_blocks * 4 + taken.tail_tokens, 6);
    plan(&mut cache, &mut other, 1, 0);
    let (table, copies) = cache.attach_at(&root, &tokens, 40);
    assert_eq!((table.computed(), copies.len()), (0, 0));
    cache.check(&[&table, &other]).unwrap();
    cache.release(table, &tokens);
    cache.release(other, &tokens);
    cache.check(&[]).unwrap();
}

/// What three share ends within a block of states: the second has its state kept there and goes on in a copy, the third goes on from it.
#[test]
fn a_state_is_kept_where_prompts_part() {
    let (mut cache, root) = (cache(8), root(0));
    let mut converse = |own: u32| {
        let tokens: Vec<u32> = (0..12).chain(own..own + 20).collect();
        let (mut table, _) = cache.attach_at(&root, &tokens, 32);
        let (found, branch) = (table.computed(), table.branch());
        let mut copies = Vec::new();
        for end in (found / 4 + 1)..=8 {
            cache.grow(&mut table, 4 * end, &mut copies).expect("room");
            cache.committed(&mut table, &tokens, 4 * end);
            cache.keep_branch(&mut table);
            cache.check(&[&table]).unwrap();
        }
        let copied: Vec<(u32, u32)> = copies.iter().map(|copy| (copy.group, copy.tokens)).collect();
        cache.release(table, &tokens);
        cache.check(&[]).unwrap();
        (found, branch, copied)
    };
    assert_eq!(converse(100), (0, None, vec![]));
    assert_eq!(converse(200), (8, Some(12), vec![(1, 4)]));
    assert_eq!(converse(300), (12, None, vec![]));
}

/// What two share ends within a block of states. It is known with the second, that has its states computed again; the last before it is
/// wanted from then on, and stays however much passes by.
#[test]
fn the_state_where_prompts_part_outlives_what_merely_passes() {
    let (mut cache, root) = (cache(4), root(0));
    let prompt = |own: u32, end: u32| (0..20).chain(own..own + end - 20).collect::<Vec<u32>>();
    let stepwise = |cache: &mut KvCache, tokens: &[u32]| {
        let (mut table, _) = cache.attach_at(&root, tokens, tokens.len() as u32);
        let found = table.computed();
        for end in (found / 4 + 1)..=tokens.len() as u32 / 4 {
            plan(cache, &mut table, 4 * end, 0);
            cache.committed(&mut table, tokens, 4 * end);
        }
        cache.release(table, tokens);
        cache.check(&[]).unwrap();
        found
    };
    // Its states at 8 and 16 give way to what comes behind them.
    assert_eq!(stepwise(&mut cache, &prompt(100, 60)), 0);
    // Blocks of group 0 say that 20 are shared.
    assert_eq!(stepwise(&mut cache, &prompt(200, 24)), 0);
    assert_eq!(stepwise(&mut cache, &(500..536).collect::<Vec<u32>>()), 0);
    assert_eq!(stepwise(&mut cache, &prompt(300, 24)), 16);
}
