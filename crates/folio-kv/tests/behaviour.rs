//! Each rule of the cache, on the smallest pool that shows it.

mod common;

use common::{ByRoot, Fifo, cache, config, root, serve};
use folio_kv::{
    BlockCopy, BlockId, BlockMeta, BlockTable, CommitRefused, EvictionPolicy, GroupCounts, KvCache,
    LruLeafFirst, OutOfBlocks, Root, TenantId,
};

fn run(cache: &mut KvCache, table: &mut BlockTable, tokens: &[u32]) -> Vec<BlockCopy> {
    let mut copies = Vec::new();
    cache.grow(table, tokens.len() as u32, &mut copies).expect("room");
    cache.committed(table, tokens, tokens.len() as u32);
    copies
}

fn started(cache: &mut KvCache, root: &Root, tokens: &[u32]) -> BlockTable {
    let (mut table, _) = cache.attach_at(root, tokens, tokens.len() as u32);
    run(cache, &mut table, tokens);
    table
}

fn range(tokens: std::ops::Range<u32>) -> Vec<u32> {
    tokens.collect()
}

#[test]
fn a_prefix_is_found_to_the_token_and_counted() {
    let (mut cache, root) = (cache(16, 4), root(0));
    let first = range(0..10);
    assert_eq!(serve(&mut cache, &root, &first), 0);
    assert_eq!(cache.stats().cached_blocks, 3);
    assert_eq!(cache.stats().cached_tails, 1);

    // Two full blocks, and one of the two tail tokens: position 9 must be left to compute.
    let (table, copy) = cache.attach_at(&root, &first, 9);
    assert_eq!(table.computed(), 9);
    assert_eq!(copy.first().copied().map(|c| c.tokens), Some(1));
    assert_eq!(cache.stats().queries.hit_tokens, 9);
    assert_eq!(cache.stats().queries.tail_hit_tokens, 1);
    assert_eq!(cache.stats().queries.tokens, 20);
    assert_eq!(cache.stats().copies, 1);
    let tenant = cache.tenant_stats(TenantId(0));
    assert_eq!(
        (tenant.queries.tokens, tenant.queries.hit_tokens, tenant.active[0], tenant.cached[0]),
        (20, 9, 3, 1)
    );
    cache.check(&[&table]).unwrap();
    cache.release(table, &first);
    cache.check(&[]).unwrap();
}

#[test]
fn part_of_a_full_block_is_copied_when_the_last_token_must_be_computed() {
    let (mut cache, root) = (cache(16, 4), root(0));
    let tokens = range(0..8);
    serve(&mut cache, &root, &tokens);
    let (table, copy) = cache.attach_at(&root, &tokens, 7);
    assert_eq!(table.computed(), 7);
    let copy = copy.first().copied().expect("three tokens of the second block");
    assert_eq!(copy.tokens, 3);
    assert_eq!(table.blocks()[1], copy.to);
    assert_ne!(copy.from, copy.to);
    cache.release(table, &tokens);
}

#[test]
fn probe_and_lookup_agree_with_attach_and_change_nothing() {
    let (mut cache, root) = (cache(4, 4), root(0));
    let old = range(0..4);
    let new = range(100..104);
    serve(&mut cache, &root, &old);
    serve(&mut cache, &root, &new);
    let before = cache.stats();
    assert_eq!(cache.probe_at(&root, &range(0..9)), 4);
    assert_eq!(cache.probe_at(&root, &[0, 1, 77]), 2);
    let lookup = cache.lookup_at(&root, &range(0..4));
    assert_eq!((lookup.full_blocks, lookup.idle_blocks[0], lookup.tail_tokens), (1, 1, 0));
    assert_eq!(cache.stats(), before);
    // `old` is still the older one.
    let table = started(&mut cache, &root, &range(200..212));
    assert_eq!(cache.probe_at(&root, &old), 0);
    assert_eq!(cache.probe_at(&root, &new), 4);
    cache.release(table, &range(200..212));
}

#[test]
fn equal_content_computed_twice_is_kept_once() {
    let (mut cache, root) = (cache(8, 4), root(0));
    let tokens = range(0..8);
    let (mut a, _) = cache.attach_at(&root, &tokens, 8);
    let (mut b, _) = cache.attach_at(&root, &tokens, 8);
    run(&mut cache, &mut a, &tokens);
    assert_eq!(cache.stats().active_blocks, 2);
    run(&mut cache, &mut b, &tokens);
    assert_eq!(a.blocks(), b.blocks());
    let stats = cache.stats();
    assert_eq!((stats.dedups, stats.active_blocks, stats.free_blocks), (2, 2, 6));
    assert_eq!(stats.published_blocks, 2);
    cache.check(&[&a, &b]).unwrap();
    cache.release(a, &tokens);
    assert_eq!(cache.stats().active_blocks, 2);
    cache.release(b, &tokens);
    assert_eq!(cache.stats().cached_blocks, 2);
    cache.check(&[]).unwrap();
}

#[test]
fn a_tail_that_says_nothing_new_is_not_kept_and_a_longer_one_replaces_it() {
    let (mut cache, root) = (cache(8, 4), root(0));
    serve(&mut cache, &root, &[1, 2, 3]);
    let (mut table, _) = cache.attach_at(&root, &[1, 2], 0);
    run(&mut cache, &mut table, &[1, 2]);
    cache.release(table, &[1, 2]);
    assert_eq!((cache.stats().cached_tails, cache.stats().dedups), (1, 1));
    assert_eq!(cache.probe_at(&root, &[1, 2, 3]), 3);
    // A full block makes the tail useless.
    serve(&mut cache, &root, &[1, 2, 3, 4]);
    let stats = cache.stats();
    assert_eq!((stats.cached_tails, stats.cached_blocks, stats.superseded_tails), (0, 1, 1));
    cache.check(&[]).unwrap();
}

#[test]
fn leaves_go_before_their_parents_and_the_oldest_leaf_first() {
    let (mut cache, root) = (cache(6, 2), root(0));
    let (a, b) = (range(0..6), range(100..106));
    serve(&mut cache, &root, &a);
    serve(&mut cache, &root, &b);
    assert_eq!(cache.available()[0], 6);
    for (taken, left_of_a, left_of_b) in [(1, 4, 6), (2, 2, 6), (3, 0, 6), (4, 0, 4)] {
        let table = started(&mut cache, &root, &range(1000..1000 + 2 * taken));
        assert_eq!(cache.probe_at(&root, &a), left_of_a);
        assert_eq!(cache.probe_at(&root, &b), left_of_b);
        cache.check(&[&table]).unwrap();
        cache.release(table, &range(1000..1000 + 2 * taken));
    }
    assert_eq!(cache.stats().evictions, 4);
}

#[test]
fn a_use_makes_a_chain_young() {
    let (mut cache, root) = (cache(4, 2), root(0));
    serve(&mut cache, &root, &range(0..4));
    serve(&mut cache, &root, &range(100..104));
    serve(&mut cache, &root, &range(0..4));
    let table = started(&mut cache, &root, &range(1000..1004));
    assert_eq!(cache.probe_at(&root, &range(0..4)), 4);
    assert_eq!(cache.probe_at(&root, &range(100..104)), 0);
    cache.release(table, &range(1000..1004));
}

#[test]
fn a_copied_tail_becomes_young_too() {
    let (mut cache, root) = (cache(4, 4), root(0));
    serve(&mut cache, &root, &[1, 2]);
    serve(&mut cache, &root, &[7, 8]);
    let (table, copy) = cache.attach_at(&root, &[1, 2, 9], 2);
    assert!(!copy.is_empty());
    cache.release(table, &[1, 2, 9]);
    let table = started(&mut cache, &root, &range(1000..1012));
    assert_eq!((cache.probe_at(&root, &[1, 2]), cache.probe_at(&root, &[7, 8])), (2, 0));
    cache.release(table, &range(1000..1012));
}

#[test]
fn unused_blocks_are_taken_before_cached_ones() {
    let (mut cache, root) = (cache(4, 2), root(0));
    serve(&mut cache, &root, &range(0..4));
    let table = started(&mut cache, &root, &range(100..104));
    assert_eq!((cache.stats().evictions, cache.stats().free_blocks), (0, 0));
    assert_eq!(cache.probe_at(&root, &range(0..4)), 4);
    cache.release(table, &range(100..104));
}

#[test]
fn blocks_in_use_are_never_taken_and_grow_is_all_or_nothing() {
    let (mut cache, root) = (cache(4, 2), root(0));
    let a = started(&mut cache, &root, &range(0..6));
    let (mut b, _) = cache.attach_at(&root, &range(100..104), 3);
    let before = cache.stats();
    let mut copies = Vec::new();
    assert_eq!((cache.needed(&b, 4), cache.available()), (GroupCounts::full(2), GroupCounts::full(1)));
    assert_eq!(cache.grow(&mut b, 4, &mut copies), Err(OutOfBlocks));
    assert!(b.blocks().is_empty() && copies.is_empty());
    assert_eq!(cache.stats(), before);
    cache.check(&[&a, &b]).unwrap();
    cache.release(a, &range(0..6));
    cache.grow(&mut b, 4, &mut copies).unwrap();
    cache.release(b, &[]);
    cache.check(&[]).unwrap();
}

#[test]
fn a_source_evicted_in_the_same_step_is_still_named_by_the_copy() {
    let (mut cache, root) = (cache(3, 4), root(0));
    serve(&mut cache, &root, &[1, 2, 3]);
    let (table, copy) = cache.attach_at(&root, &[1, 2, 9], 2);
    let copy = copy.first().copied().unwrap();
    // Somebody else takes every block that is left, the source among them.
    let (mut other, _) = cache.attach_at(&root, &range(100..108), 7);
    cache.grow(&mut other, 8, &mut Vec::new()).unwrap();
    assert!(other.blocks().contains(&copy.from));
    assert!(!other.blocks().contains(&copy.to));
    cache.check(&[&table, &other]).unwrap();
    cache.release(other, &[]);
    cache.release(table, &[1, 2, 9]);
}

#[test]
fn a_source_that_is_the_only_block_left_is_taken_over_without_a_copy() {
    let (mut cache, root) = (cache(1, 4), root(0));
    serve(&mut cache, &root, &[1, 2, 3]);
    let (mut table, copy) = cache.attach_at(&root, &[1, 2, 9, 9], 3);
    assert_eq!((table.computed(), copy.first().copied()), (2, None));
    assert_eq!(cache.stats().copies, 0);
    assert_eq!(cache.stats().evictions, 1);
    run(&mut cache, &mut table, &[1, 2, 9, 9]);
    cache.check(&[&table]).unwrap();
    cache.release(table, &[1, 2, 9, 9]);
    assert_eq!(cache.probe_at(&root, &[1, 2, 9, 9]), 4);
}

#[test]
fn without_a_block_for_the_tail_only_full_blocks_are_attached() {
    let (mut cache, root) = (cache(2, 4), root(0));
    let tokens = range(0..6);
    serve(&mut cache, &root, &tokens[..4]);
    let other = started(&mut cache, &root, &range(100..104));
    // The one full block is attached; part of it would be a hit for a shorter prompt but there is no room to copy.
    let (full, copy) = cache.attach_at(&root, &tokens, 5);
    assert_eq!((full.computed(), copy.first().copied()), (4, None));
    let (none, copy) = cache.attach_at(&root, &tokens, 3);
    assert_eq!((none.computed(), copy.first().copied(), none.blocks().is_empty()), (0, None, true));
    assert_eq!(cache.stats().queries.hit_tokens, 4);
    cache.check(&[&full, &none, &other]).unwrap();
    for (table, tokens) in [(full, &tokens[..]), (none, &[]), (other, &range(100..104))] {
        cache.release(table, tokens);
    }
}

#[test]
fn a_fork_shares_all_and_the_first_writer_copies() {
    let (mut cache, root) = (cache(8, 4), root(0));
    let mut a = started(&mut cache, &root, &range(0..6));
    cache.grow(&mut a, 16, &mut Vec::new()).unwrap();
    let mut b = cache.fork(&mut a);
    let mut c = cache.fork(&mut b);
    assert_eq!(b.blocks(), &a.blocks()[..2], "unwritten blocks stay with the original");
    assert_eq!((b.computed(), b.capacity()), (6, 8));
    assert_eq!(cache.stats().active_blocks, 4);
    assert_eq!(cache.needed(&b, 7)[0], 1);
    assert_eq!(cache.needed(&b, 6)[0], 0);
    let tokens = |last: u32| range(0..6).into_iter().chain([last]).collect::<Vec<_>>();

    let copies = run(&mut cache, &mut b, &tokens(50));
    assert_eq!(copies, [BlockCopy { group: 0, from: a.blocks()[1], to: b.blocks()[1], tokens: 2 }]);
    let copies = run(&mut cache, &mut c, &tokens(51));
    assert_eq!(copies.len(), 1);
    // The last holder writes in place.
    assert_eq!(cache.needed(&a, 7)[0], 0);
    assert_eq!(run(&mut cache, &mut a, &tokens(52)), []);
    cache.check(&[&a, &b, &c]).unwrap();
    for (table, last) in [(a, 52), (b, 50), (c, 51)] {
        cache.release(table, &tokens(last));
    }
    assert_eq!(cache.stats().copies, 2);
    assert_eq!(cache.stats().cached_tails, 3);
    assert_eq!(cache.probe_at(&root, &tokens(51)), 7);
    cache.check(&[]).unwrap();
}

/// A table with a copy pending from a source that is gone since; the second table is the one that took it.
fn pending_copy(cache: &mut KvCache, root: &Root) -> (BlockTable, BlockTable) {
    serve(cache, root, &[1, 2, 3]);
    let (table, copy) = cache.attach_at(root, &[1, 2, 9], 2);
    let mut other = cache.empty_table(cache.hashes_at(root, &[]));
    cache.grow(&mut other, 4, &mut Vec::new()).unwrap();
    assert_eq!(other.blocks(), [copy.first().copied().expect("two tokens are copied").from]);
    (table, other)
}

#[test]
fn a_copy_that_was_never_run_is_never_indexed() {
    let (mut cache, root) = (cache(2, 4), root(0));
    let (table, other) = pending_copy(&mut cache, &root);
    cache.release(table, &[1, 2, 9]);
    assert_eq!(cache.stats().cached_blocks, 0, "nobody knows what the target holds");
    cache.check(&[&other]).unwrap();
    cache.release(other, &[]);
}

#[test]
fn an_abandoned_attach_leaves_no_trace_in_the_statistics() {
    let (mut cache, root) = (cache(8, 4), root(0));
    serve(&mut cache, &root, &range(0..10));
    let mut before = cache.stats();
    let tenant = cache.tenant_stats(TenantId(0));
    let (mut table, copy) = cache.attach_at(&root, &range(0..12), 11);
    assert!(!copy.is_empty());
    cache.grow(&mut table, 12, &mut Vec::new()).unwrap();
    cache.release(table, &range(0..12));
    let after = cache.stats();
    before.groups[0].allocations = after.allocations;
    assert_eq!(after, before);
    assert_eq!(cache.tenant_stats(TenantId(0)), tenant);
    cache.check(&[]).unwrap();
}

#[test]
fn tenants_are_walls() {
    let mut cache = cache(16, 4);
    let (alice, bob) = (root(1), root(2));
    let tokens = range(0..10);
    assert_eq!(serve(&mut cache, &alice, &tokens), 0);
    assert_eq!(cache.probe_at(&bob, &tokens), 0);
    let a = started(&mut cache, &alice, &tokens);
    let b = started(&mut cache, &bob, &tokens);
    assert!(a.blocks().iter().all(|block| !b.blocks().contains(block)));
    assert_eq!(cache.tenant_stats(TenantId(2)).queries.hit_tokens, 0);
    assert_eq!(cache.tenant_stats(TenantId(1)).queries.hit_tokens, 10);
    let (ours, theirs) = (
        cache.hashes_at(&alice, &tokens).iter().copied().collect::<Vec<_>>(),
        cache.hashes_at(&bob, &tokens).iter().copied().collect::<Vec<_>>(),
    );
    assert_eq!((ours.len(), theirs.len()), (2, 2));
    assert!(ours.iter().all(|hash| !theirs.contains(hash)));
    cache.check(&[&a, &b]).unwrap();
    assert_eq!(cache.tenants().count(), 2);

    cache.release(a, &tokens);
    cache.release(b, &tokens);
    cache.clear(Some(TenantId(1)));
    assert_eq!(cache.probe_at(&alice, &tokens), 0);
    assert_eq!(cache.probe_at(&bob, &tokens), 10);
    assert_eq!(cache.tenant_stats(TenantId(1)).cached[0], 0);
    cache.check(&[]).unwrap();
}

#[test]
fn clear_spares_what_is_in_use() {
    let (mut cache, root) = (cache(16, 2), root(0));
    let held = started(&mut cache, &root, &range(0..4));
    serve(&mut cache, &root, &range(0..9));
    cache.clear(None);
    let stats = cache.stats();
    assert_eq!((stats.cached_blocks, stats.active_blocks, stats.free_blocks), (0, 2, 14));
    assert_eq!(cache.probe_at(&root, &range(0..9)), 4);
    cache.check(&[&held]).unwrap();
    cache.release(held, &range(0..4));
}

#[test]
fn waste_counts_slots_nobody_wrote() {
    let (mut cache, root) = (cache(16, 4), root(0));
    let (mut table, _) = cache.attach_at(&root, &range(0..6), 5);
    cache.grow(&mut table, 12, &mut Vec::new()).unwrap();
    cache.committed(&mut table, &range(0..6), 6);
    let stats = cache.stats();
    assert_eq!((stats.active_slots(), stats.active_written_slots, stats.waste()), (12, 6, 0.5));
    assert_eq!(stats.lifetime_waste(), 0.0);
    assert_eq!((stats.active_bytes(), stats.cached_bytes()), (3072, 0));
    cache.release(table, &range(0..6));
    let stats = cache.stats();
    assert_eq!((stats.closed_slots, stats.closed_written_slots, stats.lifetime_waste()), (12, 6, 0.5));
    assert_eq!((stats.active_slots(), stats.waste()), (0, 0.0));
    assert_eq!((stats.active_bytes(), stats.cached_bytes()), (0, 2048));
}

#[test]
fn check_finds_a_leaked_table_and_a_foreign_one() {
    let (mut cache, root) = (cache(4, 2), root(0));
    let table = started(&mut cache, &root, &range(0..4));
    let wrong = |tables: &[&BlockTable]| cache.check(tables).unwrap_err();
    assert!(wrong(&[]).ends_with("counts 1 references and is held by 0"));
    assert!(wrong(&[&table, &table]).ends_with("counts 1 references and is held by 2"));
    cache.check(&[&table]).unwrap();
    cache.release(table, &range(0..4));
}

#[test]
fn the_policy_decides_who_goes() {
    let survivor = |policy: Box<dyn EvictionPolicy>| {
        let (mut cache, root) = (KvCache::new(config(2, 2), policy), root(0));
        serve(&mut cache, &root, &[1, 1]);
        serve(&mut cache, &root, &[2, 2]);
        serve(&mut cache, &root, &[1, 1]);
        serve(&mut cache, &root, &[3, 3]);
        cache.check(&[]).unwrap();
        (cache.probe_at(&root, &[1, 1]), cache.probe_at(&root, &[2, 2]))
    };
    assert_eq!(survivor(Box::new(LruLeafFirst::new())), (2, 0));
    assert_eq!(survivor(Box::<Fifo>::default()), (0, 2));
}

/// Names parents, blocks in use and blocks that do not exist.
#[derive(Default)]
struct Faulty {
    calls: u32,
}

impl EvictionPolicy for Faulty {
    fn resize(&mut self, _blocks: u32) {}
    fn on_free(&mut self, _block: BlockId, _meta: &BlockMeta) {}
    fn on_use(&mut self, _block: BlockId, _meta: &BlockMeta) {}
    fn on_remove(&mut self, _block: BlockId, _meta: &BlockMeta) {}
    fn victim(&mut self) -> Option<BlockId> {
        self.calls += 1;
        [Some(BlockId(0)), Some(BlockId(u32::MAX)), None][self.calls as usize % 3]
    }
}

#[test]
fn a_faulty_policy_costs_hits_and_never_correctness() {
    let mut cache = KvCache::new(config(6, 2), Box::<Faulty>::default());
    let root = root(0);
    let held = started(&mut cache, &root, &range(0..2));
    for start in 0..20 {
        serve(&mut cache, &root, &range(start..start + 7));
        cache.check(&[&held]).unwrap();
    }
    assert_eq!(cache.probe_at(&root, &range(0..2)), 2);
    assert!(cache.stats().evictions > 20);
    cache.release(held, &range(0..2));
}

/// Writes down every hook and otherwise is LRU.
struct Recorder {
    lru: LruLeafFirst,
    log: std::sync::Arc<std::sync::Mutex<Vec<String>>>,
}

impl Recorder {
    fn note(&self, hook: &str, block: BlockId, meta: &BlockMeta) {
        let line =
            format!("{hook} {} depth {} children {} hits {}", block.0, meta.depth, meta.children, meta.hits);
        self.log.lock().unwrap().push(line);
    }
}

impl EvictionPolicy for Recorder {
    fn resize(&mut self, blocks: u32) {
        self.lru.resize(blocks);
    }
    fn on_insert(&mut self, block: BlockId, meta: &BlockMeta) {
        self.note("insert", block, meta);
        self.lru.on_insert(block, meta);
    }
    fn on_hit(&mut self, block: BlockId, meta: &BlockMeta) {
        self.note("hit", block, meta);
        self.lru.on_hit(block, meta);
    }
    fn on_free(&mut self, block: BlockId, meta: &BlockMeta) {
        self.note("free", block, meta);
        self.lru.on_free(block, meta);
    }
    fn on_use(&mut self, block: BlockId, meta: &BlockMeta) {
        self.note("use", block, meta);
        self.lru.on_use(block, meta);
    }
    fn on_leaf(&mut self, block: BlockId, meta: &BlockMeta) {
        self.note("leaf", block, meta);
        self.lru.on_leaf(block, meta);
    }
    fn on_remove(&mut self, block: BlockId, meta: &BlockMeta) {
        self.note("remove", block, meta);
        self.lru.on_remove(block, meta);
    }
    fn victim(&mut self) -> Option<BlockId> {
        self.lru.victim()
    }
}

#[test]
fn a_policy_is_told_everything_in_order() {
    let log = std::sync::Arc::<std::sync::Mutex<Vec<String>>>::default();
    let recorder = Recorder { lru: LruLeafFirst::new(), log: log.clone() };
    let (mut cache, root) = (KvCache::new(config(2, 2), Box::new(recorder)), root(0));
    let told = || std::mem::take(&mut *log.lock().unwrap());

    serve(&mut cache, &root, &[1, 2, 3]);
    assert_eq!(
        told(),
        [
            "insert 0 depth 0 children 0 hits 0",
            "insert 1 depth 1 children 0 hits 0",
            "free 1 depth 1 children 0 hits 0",
            "free 0 depth 0 children 1 hits 0",
        ]
    );
    // The full block is used; the tail is the only block left, so it is hit, removed, and taken over in place.
    let (table, _) = cache.attach_at(&root, &[1, 2, 3, 4], 3);
    assert_eq!(
        told(),
        [
            "use 0 depth 0 children 1 hits 0",
            "hit 0 depth 0 children 1 hits 1",
            "hit 1 depth 1 children 0 hits 1",
            "remove 1 depth 1 children 0 hits 1",
            "leaf 0 depth 0 children 0 hits 1",
        ]
    );
    cache.release(table, &[1, 2, 3, 4]);
    assert_eq!(
        told(),
        [
            "insert 1 depth 1 children 0 hits 0",
            "free 1 depth 1 children 0 hits 0",
            "free 0 depth 0 children 1 hits 1",
        ],
        "content taken over in place is content still"
    );
    cache.clear(None);
    assert_eq!(
        told(),
        [
            "remove 1 depth 1 children 0 hits 0",
            "leaf 0 depth 0 children 0 hits 1",
            "remove 0 depth 0 children 0 hits 1",
        ]
    );
}

#[test]
fn a_tail_that_is_computed_again_becomes_young() {
    let (mut cache, root) = (cache(3, 4), root(0));
    serve(&mut cache, &root, &[1, 2]);
    serve(&mut cache, &root, &[7, 8]);
    let (mut table, _) = cache.attach_at(&root, &[1, 2], 0);
    run(&mut cache, &mut table, &[1, 2]);
    cache.release(table, &[1, 2]);
    let table = started(&mut cache, &root, &range(1000..1008));
    assert_eq!((cache.probe_at(&root, &[1, 2]), cache.probe_at(&root, &[7, 8])), (2, 0));
    cache.release(table, &range(1000..1008));
}

#[test]
fn a_longer_tail_replaces_a_shorter_one() {
    let (mut cache, root) = (cache(8, 4), root(0));
    serve(&mut cache, &root, &[1]);
    serve(&mut cache, &root, &[1, 2, 3]);
    let stats = cache.stats();
    assert_eq!((stats.cached_tails, stats.superseded_tails, stats.free_blocks), (1, 1, 7));
    cache.check(&[]).unwrap();
}

#[test]
fn a_fork_of_a_copy_that_was_never_run_is_not_indexed_either() {
    let (mut cache, root) = (cache(2, 4), root(0));
    let (mut table, other) = pending_copy(&mut cache, &root);
    let fork = cache.fork(&mut table);
    cache.release(table, &[1, 2, 9]);
    cache.release(fork, &[1, 2, 9]);
    assert_eq!(cache.stats().cached_blocks, 0);
    cache.check(&[&other]).unwrap();
    cache.release(other, &[]);
}

#[test]
fn what_is_found_and_cannot_be_copied_is_no_hit() {
    let log = std::sync::Arc::<std::sync::Mutex<Vec<String>>>::default();
    let recorder = Recorder { lru: LruLeafFirst::new(), log: log.clone() };
    let (mut cache, root) = (KvCache::new(config(1, 2), Box::new(recorder)), root(0));
    let held = started(&mut cache, &root, &[1, 2]);
    let (table, copy) = cache.attach_at(&root, &[1, 9], 1);
    assert_eq!((table.computed(), copy.first().copied()), (0, None));
    assert_eq!(*log.lock().unwrap(), ["insert 0 depth 0 children 0 hits 0"]);
    cache.release(table, &[1, 9]);
    cache.release(held, &[1, 2]);
}

#[test]
fn abandoning_after_a_commit_keeps_the_count_of_what_was_served() {
    let (mut cache, root) = (cache(8, 4), root(0));
    let table = started(&mut cache, &root, &range(0..6));
    let queried = cache.stats().queries.tokens;
    cache.release(table, &range(0..6));
    assert_eq!((queried, cache.stats().queries.tokens), (6, 6));
    assert_eq!(cache.stats().closed_slots, 8);
}

#[test]
fn the_search_for_a_tail_sees_the_children_used_last() {
    let (mut cache, root) = (cache(64, 4), root(0));
    for child in 0..20 {
        serve(&mut cache, &root, &[child, 1]);
        // Child 0 is used again and again, child 1 never.
        assert_eq!(cache.probe_at(&root, &[0, 1]), 2);
        let (table, _) = cache.attach_at(&root, &[0, 1], 2);
        cache.release(table, &[0, 1]);
    }
    assert_eq!(cache.probe_at(&root, &[1, 1]), 0, "beyond the bound of the search");
    assert_eq!(cache.probe_at(&root, &[19, 1]), 2);
}

#[test]
fn a_commit_that_cannot_be_is_refused_and_changes_nothing() {
    let (mut cache, root) = (cache(16, 4), root(0));
    let tokens = range(0..12);
    let mut table = started(&mut cache, &root, &tokens[..6]);
    cache.grow(&mut table, 8, &mut Vec::new()).expect("room");
    let refused = |computed, tokens| Err(CommitRefused { computed, before: 6, tokens, capacity: 8 });
    // Behind what was computed, beyond what there is room for, beyond what is known.
    assert_eq!(cache.commit(&mut table, &tokens, 5), refused(5, 12));
    assert_eq!(cache.commit(&mut table, &tokens, 9), refused(9, 12));
    assert_eq!(cache.commit(&mut table, &tokens[..7], 8), refused(8, 7));
    assert_eq!((table.computed(), table.published_blocks()), (6, 1));
    cache.check(&[&table]).unwrap();
    assert_eq!(cache.commit(&mut table, &tokens, 8), Ok(()));
    cache.release(table, &tokens);
}
