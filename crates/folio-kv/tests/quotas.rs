//! Quotas: what each rule of `quota` says, alone, and all of them under random use, checked against counts over all blocks.

mod common;

use common::{ByRoot, config, root, serve};
use folio_kv::{
    BlockTable, EvictionPolicy, GroupConfig, KvCache, Layout, LearnedLifetimes, LruLeafFirst, Quota,
    QuotaError, TenantId,
};
use proptest::prelude::*;

const SIZE: u32 = 4;

fn cache(blocks: u32, quotas: &[(u32, u32, u32)]) -> KvCache {
    let mut cache = KvCache::new(config(blocks, SIZE), Box::new(LruLeafFirst::new()));
    let quotas: Vec<(TenantId, Quota)> = quotas
        .iter()
        .map(|(tenant, guarantee, ceiling)| {
            (TenantId(*tenant), Quota { guarantee: *guarantee, ceiling: *ceiling })
        })
        .collect();
    cache.set_quotas(&quotas).expect("a division that can be");
    cache
}

fn text(kind: u32, blocks: u32) -> Vec<u32> {
    (0..blocks * SIZE).map(|at| kind * 1000 + at).collect()
}

fn held(cache: &KvCache, tenant: u32) -> u32 {
    cache.held_blocks(TenantId(tenant))
}

fn running(cache: &mut KvCache, tenant: u32, kind: u32, blocks: u32) -> BlockTable {
    let mut table = cache.empty_table(cache.hashes_at(&root(tenant), &[]));
    cache.grow(&mut table, blocks * SIZE, &mut Vec::new()).expect("room");
    cache.committed(&mut table, &text(kind, blocks), blocks * SIZE);
    table
}

#[test]
fn what_is_idle_is_lent_and_comes_back_by_eviction() {
    let mut cache = cache(10, &[(1, 5, 10), (2, 0, 10)]);
    serve(&mut cache, &root(2), &text(1, 10));
    assert_eq!(held(&cache, 2), 10, "the whole pool, while nobody wants it");
    serve(&mut cache, &root(1), &text(2, 5));
    assert_eq!((held(&cache, 1), held(&cache, 2)), (5, 5));
    serve(&mut cache, &root(2), &text(3, 5));
    assert_eq!((held(&cache, 1), held(&cache, 2)), (5, 5), "a guarantee is never evicted for another");
    assert_eq!(cache.probe_at(&root(1), &text(2, 5)), 5 * SIZE);
}

#[test]
fn at_its_ceiling_a_tenant_evicts_its_own() {
    let mut cache = cache(10, &[(1, 0, 4)]);
    serve(&mut cache, &root(2), &text(1, 3));
    serve(&mut cache, &root(1), &text(2, 4));
    serve(&mut cache, &root(1), &text(3, 2));
    assert_eq!((held(&cache, 1), held(&cache, 2)), (4, 3), "although three blocks are free");
    let table = running(&mut cache, 1, 4, 4);
    assert_eq!(cache.room(TenantId(1)), (3 + 3, 0), "nothing of its own is left to evict");
    let mut more = cache.empty_table(cache.hashes_at(&root(1), &[]));
    assert!(cache.grow(&mut more, 1, &mut Vec::new()).is_err());
    cache.release(more, &[]);
    cache.release(table, &text(4, 4));
}

#[test]
fn below_its_guarantee_a_tenant_takes_from_others_before_itself() {
    let mut cache = cache(8, &[(1, 4, 8)]);
    serve(&mut cache, &root(1), &text(1, 2));
    serve(&mut cache, &root(2), &text(2, 6));
    // Its own two are the oldest.
    serve(&mut cache, &root(1), &text(3, 2));
    assert_eq!((held(&cache, 1), held(&cache, 2)), (4, 4));
    assert_eq!(cache.probe_at(&root(1), &text(1, 2)), 2 * SIZE, "its own stayed");
}

#[test]
fn a_running_block_is_never_taken() {
    let mut cache = cache(6, &[(1, 4, 6)]);
    let table = running(&mut cache, 2, 1, 5);
    assert_eq!(cache.room(TenantId(1)).0, 1, "what runs beyond a guarantee is waited for");
    cache.release(table, &text(1, 5));
    assert_eq!(cache.room(TenantId(1)).0, 6);
    assert_eq!((cache.quota_limit(TenantId(1)), cache.quota_limit(TenantId(2))), (6, 2));
}

#[test]
fn divisions_that_cannot_be_are_refused() {
    let mut cache = KvCache::new(config(10, SIZE), Box::new(LruLeafFirst::new()));
    let mut set = |tenant, guarantee, ceiling| {
        cache.set_quotas(&[
            (TenantId(7), Quota { guarantee: 6, ceiling: 9 }),
            (tenant, Quota { guarantee, ceiling }),
        ])
    };
    let tenant = TenantId(8);
    assert_eq!(set(tenant, 5, 10), Err(QuotaError::Guarantees { sum: 11, blocks: 10 }));
    assert_eq!(
        set(tenant, 5, 4),
        Err(QuotaError::GuaranteeAboveCeiling { tenant, guarantee: 5, ceiling: 4 })
    );
    assert_eq!(set(tenant, 0, 11), Err(QuotaError::Ceiling { tenant, ceiling: 11, blocks: 10 }));
    assert_eq!(set(tenant, 4, 4), Ok(()));
}

#[derive(Clone, Debug)]
enum Op {
    Start { tenant: u32, kind: u32, tokens: u32 },
    Grow { which: usize, tokens: u32 },
    Fork { which: usize },
    End { which: usize },
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        4 => (0..4u32, 0..4u32, 1..30u32).prop_map(|(tenant, kind, tokens)| Op::Start { tenant, kind, tokens }),
        3 => (0..6usize, 1..12u32).prop_map(|(which, tokens)| Op::Grow { which, tokens }),
        1 => (0..6usize).prop_map(|which| Op::Fork { which }),
        4 => (0..6usize).prop_map(|which| Op::End { which }),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, ..ProptestConfig::default() })]

    /// The lists, the counts and the room of each tenant are checked against all blocks after every operation.
    #[test]
    fn rules_hold_whatever_happens(
        ops in prop::collection::vec(op(), 1..80),
        guarantees in prop::collection::vec(0..6u32, 3),
        above in prop::collection::vec(1..20u32, 3),
        learned in any::<bool>(),
        grouped in any::<bool>(),
    ) {
        let policy: Box<dyn EvictionPolicy> = match learned {
            true => Box::new(LearnedLifetimes::new(0.1)),
            false => Box::new(LruLeafFirst::new()),
        };
        // Larger blocks, in which a hit may end: of a group that is needed, and of a drafter's states, which are few.
        let window = GroupConfig::window(6, 24, 2 * SIZE, 256);
        let states = GroupConfig { layout: Layout::State, blocks: 5, optional: true, ..window };
        let more = [window, states];
        let more = if grouped { more.as_slice() } else { &more[..0] };
        let mut cache = KvCache::with_groups(config(20, SIZE), more, policy);
        let quotas: Vec<(TenantId, Quota)> = (0..3)
            .map(|t| (t as u32, guarantees[t], (guarantees[t] + above[t]).min(20)))
            .map(|(tenant, guarantee, ceiling)| (TenantId(tenant), Quota { guarantee, ceiling }))
            .collect();
        cache.set_quotas(&quotas).expect("at most 15 of 20 are guaranteed");
        let mut tables: Vec<(BlockTable, Vec<u32>)> = Vec::new();
        for op in ops {
            let before: Vec<u32> = (0..4).map(|tenant| held(&cache, tenant)).collect();
            let mut taker = None;
            match op {
                Op::Start { tenant, kind, tokens } => {
                    let tokens: Vec<u32> = text(kind, 8)[..tokens as usize].to_vec();
                    let (table, _) = cache.attach_at(&root(tenant), &tokens, tokens.len() as u32 - 1);
                    tables.push((table, tokens));
                    taker = Some(tenant);
                }
                Op::Grow { which, tokens } => {
                    if let Some((table, known)) = tables.get_mut(which) {
                        let to = table.computed() + tokens;
                        let start = known.len() as u32;
                        known.extend((start..to.max(start)).map(|at| at * 5));
                        let tenant = table.root().tenant;
                        let room = cache.available_to(tenant);
                        let fits = cache.needed(table, to).fits(room);
                        let grown = cache.grow(table, to, &mut Vec::new()).is_ok();
                        prop_assert_eq!(grown, fits, "room is what can be taken, exactly");
                        if grown {
                            cache.committed(table, known, to);
                        }
                        taker = Some(tenant.0);
                    }
                }
                Op::Fork { which } => {
                    if let Some((table, known)) = tables.get_mut(which) {
                        let (table, known) = (cache.fork(table), known.clone());
                        tables.push((table, known));
                    }
                }
                Op::End { which } => {
                    if which < tables.len() {
                        let (table, known) = tables.swap_remove(which);
                        cache.release(table, &known);
                    }
                }
            }
            let all: Vec<&BlockTable> = tables.iter().map(|(table, _)| table).collect();
            prop_assert_eq!(cache.check(&all), Ok(()));
            for tenant in 0..4 {
                let (was, is) = (before[tenant as usize], held(&cache, tenant));
                let guarantee = cache.quota(TenantId(tenant)).guarantee;
                if let Some(taker) = taker.filter(|taker| *taker != tenant) {
                    prop_assert!(is >= was.min(guarantee), "{taker} took what {tenant} is guaranteed: {was} to {is}");
                }
            }
        }
        tables.drain(..).for_each(|(table, known)| drop(cache.release(table, &known)));
    }
}
