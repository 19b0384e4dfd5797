//! Prefixes that an operator declares: everybody reads them, only their owner writes them, and what stands behind them is nobody
//! else's. Each miss has its hit beside it, or it would prove nothing.

mod common;

use common::{ByRoot, cache, root, windowed};
use folio_kv::{
    BlockHashes, BlockTable, CacheEvent, EventBatch, GroupCounts, KvCache, Retention, Root, TenantId,
};

const SIZE: u32 = 4;

/// 3 whole blocks and 2 tokens more.
fn declared() -> Vec<u32> {
    (1000..1014).collect()
}

fn below(tenant: u32) -> Root {
    root(tenant).below(&root(9), &declared(), SIZE)
}

fn prompt(own: &[u32]) -> Vec<u32> {
    [&declared(), own].concat()
}

/// Serves `tokens`, with everything checked while it runs and after; what was found, in tokens.
fn serve(cache: &mut KvCache, root: &Root, tokens: &[u32]) -> u32 {
    let (mut table, _) = cache.attach_at(root, tokens, tokens.len() as u32 - 1);
    let found = table.computed();
    let mut copies = Vec::new();
    for computed in found + 1..=tokens.len() as u32 {
        cache.grow(&mut table, computed, &mut copies).expect("room");
        cache.committed(&mut table, tokens, computed);
        cache.check(&[&table]).expect("in order");
    }
    cache.release(table, tokens);
    cache.check(&[]).expect("in order");
    found
}

fn with_declared(cache: &mut KvCache) {
    assert_eq!(serve(cache, &root(9), &declared()), 0, "its owner computes it");
}

#[test]
fn everybody_finds_what_is_declared_and_only_their_own_behind_it() {
    for windows in [&[][..], &[(64, 6)], &[(64, 30), (64, 3)]] {
        let mut cache = windowed(64, SIZE, windows);
        with_declared(&mut cache);
        let secret = prompt(&[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]);
        assert_eq!(serve(&mut cache, &below(1), &secret), 12, "whole blocks of it");
        assert_eq!(
            serve(&mut cache, &below(2), &secret),
            12,
            "and nothing of what another appended: {windows:?}"
        );
        let again = serve(&mut cache, &below(1), &secret);
        assert!(again >= secret.len() as u32 - SIZE, "its own it finds: {again}");
        assert_eq!(serve(&mut cache, &root(3), &secret), 0, "without a declaration nothing is shared");
        assert_eq!(cache.tenant_stats(root(9).tenant).queries.count, 1, "the owner asked once");
    }
}

/// Reuse inside a block never crosses tenants: not right behind the declared part, where every tenant's blocks continue the
/// same block.
#[test]
fn no_part_of_a_block_is_copied_from_another_tenant() {
    let mut cache = cache(64, SIZE);
    with_declared(&mut cache);
    let secret = prompt(&[1, 2, 3, 4, 5, 6]);
    serve(&mut cache, &below(1), &secret);
    // Differs inside the first block behind, and inside a later one.
    for own in [&[77, 78, 79][..], &[1, 2, 3, 77, 78]] {
        let probe = prompt(own);
        assert_eq!(cache.probe_at(&below(2), &probe), 12, "{own:?}");
        assert!(
            cache.probe_at(&below(1), &probe) > 12,
            "the control: a part of a block is found by its own tenant"
        );
    }
    let before = cache.stats().copies;
    assert_eq!(serve(&mut cache, &below(2), &prompt(&[1, 2, 3, 77])), 12);
    assert_eq!(cache.stats().copies, before);
}

/// Not even what is given up for whom shows: another's block that begins alike makes no tail useless but its own tenant's.
#[test]
fn another_tenants_blocks_supersede_nothing() {
    let mut cache = cache(64, SIZE);
    with_declared(&mut cache);
    serve(&mut cache, &below(1), &prompt(&[1]));
    let tails = cache.stats().cached_tails;
    serve(&mut cache, &below(2), &prompt(&[1, 2, 3, 4, 5, 6]));
    assert_eq!(cache.stats().superseded_tails, 0);
    assert_eq!(cache.stats().cached_tails, tails);
    serve(&mut cache, &below(1), &prompt(&[1, 2, 3, 4, 5, 6]));
    assert_eq!(cache.stats().superseded_tails, 1, "the control");
}

#[test]
fn where_it_is_gone_everybody_computes_for_themselves() {
    let mut cache = cache(64, SIZE);
    let secret = prompt(&[1, 2, 3, 4, 5, 6, 7]);
    assert_eq!(serve(&mut cache, &below(1), &secret), 0, "nobody computed it yet");
    assert_eq!(serve(&mut cache, &below(2), &secret), 0, "and what a tenant computed is its own");
    assert!(serve(&mut cache, &below(1), &secret) > 12, "which it finds");
    with_declared(&mut cache);
    assert_eq!(serve(&mut cache, &below(3), &secret), 12, "from now on it is there");
    assert!(serve(&mut cache, &below(1), &secret) > 12, "who has more of its own takes that");
    cache.clear(Some(root(9).tenant));
    assert_eq!(serve(&mut cache, &below(4), &secret), 0);
}

#[test]
fn memory_is_charged_to_whom_it_belongs() {
    let mut cache = cache(64, SIZE);
    with_declared(&mut cache);
    let tokens = prompt(&[1, 2, 3]);
    let hold = |cache: &mut KvCache, tenant: u32| -> BlockTable {
        let (mut table, _) = cache.attach_at(&below(tenant), &tokens, tokens.len() as u32 - 1);
        cache.grow(&mut table, tokens.len() as u32, &mut Vec::new()).expect("room");
        cache.committed(&mut table, &tokens, tokens.len() as u32);
        table
    };
    let (mut one, two) = (hold(&mut cache, 1), hold(&mut cache, 2));
    cache.check(&[&one, &two]).expect("in order");
    let active = |cache: &KvCache, tenant: u32| cache.tenant_stats(root(tenant).tenant).active[0];
    assert_eq!([9, 1, 2].map(|tenant| active(&cache, tenant)), [3, 2, 2]);
    assert_eq!(cache.exclusive_blocks(&one), GroupCounts::full(2), "what is shared would not come free");
    let fork = cache.fork(&mut one);
    assert_eq!(fork.root(), one.root());
    cache.check(&[&one, &two, &fork]).expect("in order");
    for table in [one, two, fork] {
        cache.release(table, &tokens);
    }
    cache.check(&[]).expect("in order");
}

/// A tenant pins and retains what is its own; what is shared stays as its owner says.
#[test]
fn a_tenant_keeps_its_own_part_only() {
    let mut cache = cache(64, SIZE);
    with_declared(&mut cache);
    let tokens = prompt(&(0..10).collect::<Vec<u32>>());
    serve(&mut cache, &below(1), &tokens);
    let (table, _) = cache.attach_at(&below(1), &tokens, tokens.len() as u32 - 1);
    let info = cache.keep(&table, tokens.len() as u32, Retention::default(), true).expect("kept");
    assert_eq!(info.tokens, 8, "2 whole blocks behind the declared 3");
    cache.check(&[&table]).expect("in order");
    cache.release(table, &tokens);
    cache.clear(None);
    assert_eq!(cache.tenant_stats(root(9).tenant).cached[0], 0, "the shared part was not pinned by it");
    cache.check(&[]).expect("in order");
    with_declared(&mut cache);
    assert_eq!(serve(&mut cache, &below(1), &tokens), 20, "back, it is continued by what was kept");
}

/// Routers know tokens alone: to them what stands behind a declared prefix continues its last block, whoever's root it hangs on.
#[test]
fn in_events_a_block_behind_a_declared_prefix_continues_it() {
    let mut cache = windowed(64, SIZE, &[]);
    cache.record_events(16);
    with_declared(&mut cache);
    serve(&mut cache, &below(1), &prompt(&[1, 2]));
    let last = *BlockHashes::new(&root(9), &declared(), SIZE).get(2).expect("three blocks");
    let mut batch = EventBatch::with_capacity(16, SIZE);
    cache.take_events(&mut batch);
    for told in [batch, cache.resident()] {
        let Some(CacheEvent::Stored { tenant, parent, .. }) = told.events.last() else { panic!("{told:?}") };
        assert_eq!((told.events.len(), *tenant, *parent), (4, TenantId(1), Some(last)));
        assert_eq!(told.tokens[12..], [1012, 1013, 1, 2]);
    }
}
