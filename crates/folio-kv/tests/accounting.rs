//! KV byte-seconds against a model that adds up, after every tick, what everybody holds.

mod common;

use std::collections::HashMap;

use common::{ByRoot, config, root};
use folio_kv::{BlockTable, GroupConfig, Identity, KvCache, LruLeafFirst, Root, TenantId};
use proptest::prelude::*;

const BYTES: u128 = 1024;
fn window() -> GroupConfig {
    GroupConfig::window(7, 12, 4, 100)
}
const TENANTS: u32 = 3;

#[derive(Clone, Debug)]
enum Op {
    /// A sequence of a tenant: which text, how long.
    Start {
        tenant: u32,
        text: u32,
        tokens: u32,
    },
    Grow {
        which: usize,
        tokens: u32,
    },
    Fork {
        which: usize,
    },
    End {
        which: usize,
    },
    Clear {
        tenant: u32,
    },
    Pass {
        us: u64,
    },
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        3 => (0..TENANTS, 0..3u32, 1..40u32).prop_map(|(tenant, text, tokens)| Op::Start { tenant, text, tokens }),
        3 => (0..8usize, 1..20u32).prop_map(|(which, tokens)| Op::Grow { which, tokens }),
        1 => (0..8usize).prop_map(|which| Op::Fork { which }),
        2 => (0..8usize).prop_map(|which| Op::End { which }),
        1 => (0..TENANTS).prop_map(|tenant| Op::Clear { tenant }),
        4 => (1..5000u64).prop_map(|us| Op::Pass { us }),
    ]
}

struct Running {
    table: BlockTable,
    tokens: Vec<u32>,
}

fn text(kind: u32, length: u32) -> Vec<u32> {
    (0..length).map(|at| kind * 100 + at).collect()
}

fn grow(cache: &mut KvCache, running: &mut Running, tokens: u32) {
    let length = running.table.computed() + tokens;
    while running.tokens.len() < length as usize {
        running.tokens.push(running.tokens.len() as u32 * 3);
    }
    if cache.grow(&mut running.table, length, &mut Vec::new()).is_ok() {
        cache.committed(&mut running.table, &running.tokens, length);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    #[test]
    fn integrals_are_exact(ops in prop::collection::vec(op(), 1..80)) {
        let mut cache = KvCache::with_groups(config(12, 4), &[window()], Box::new(LruLeafFirst::new()));
        let mut running: Vec<Running> = Vec::new();
        let mut now = 0;
        let mut held: HashMap<u32, (u128, u128)> = HashMap::new();
        for op in ops {
            match op {
                Op::Start { tenant, text: kind, tokens } => {
                    let tokens = text(kind, tokens);
                    let (table, _) = cache.attach_at(&root(tenant), &tokens, tokens.len() as u32 - 1);
                    let mut started = Running { table, tokens };
                    let missing = started.tokens.len() as u32 - started.table.computed();
                    grow(&mut cache, &mut started, missing);
                    running.push(started);
                }
                Op::Grow { which, tokens } => {
                    if let Some(one) = running.get_mut(which) {
                        grow(&mut cache, one, tokens);
                    }
                }
                Op::Fork { which } => {
                    if let Some(one) = running.get_mut(which) {
                        let (table, tokens) = (cache.fork(&mut one.table), one.tokens.clone());
                        running.push(Running { table, tokens });
                    }
                }
                Op::End { which } => {
                    if which < running.len() {
                        let one = running.swap_remove(which);
                        cache.release(one.table, &one.tokens);
                    }
                }
                Op::Clear { tenant } => cache.clear(Some(TenantId(tenant))),
                Op::Pass { us } => {
                    for tenant in 0..TENANTS {
                        let stats = cache.tenant_stats(TenantId(tenant));
                        let held = held.entry(tenant).or_default();
                        let bytes = |full: u32, window: u32| {
                            u128::from(full) * BYTES + u128::from(window) * u128::from(100u64)
                        };
                        held.0 += bytes(stats.active[0], stats.active[1]) * u128::from(us);
                        held.1 += bytes(stats.cached[0], stats.cached[1]) * u128::from(us);
                    }
                    now += us;
                    cache.advance(now);
                }
            }
            let tables: Vec<&BlockTable> = running.iter().map(|one| &one.table).collect();
            prop_assert_eq!(cache.check(&tables), Ok(()));
            for tenant in 0..TENANTS {
                let holdings = cache.holdings(TenantId(tenant));
                let (active, cached) = held.get(&tenant).copied().unwrap_or_default();
                prop_assert_eq!((holdings.active_byte_us, holdings.cached_byte_us), (active, cached));
            }
        }
        let sum = |of: fn(&folio_kv::Holdings) -> u64| (0..TENANTS).map(|t| of(&cache.holdings(TenantId(t)))).sum::<u64>();
        prop_assert_eq!(sum(|h| h.active_bytes), cache.stats().active_bytes());
        prop_assert_eq!(sum(|h| h.cached_bytes), cache.stats().cached_bytes());
        let later = cache.holdings(TenantId(0)).at(now + 10);
        cache.advance(now + 10);
        prop_assert_eq!(later, cache.holdings(TenantId(0)), "whoever has a snapshot can go on by itself");
        running.drain(..).for_each(|one| drop(cache.release(one.table, &one.tokens)));
    }
}

/// A tenant that comes once leaves nothing but its totals.
#[test]
fn tenants_that_hold_nothing_are_forgotten_and_their_totals_are_not() {
    let mut cache = common::windowed(64, 1, &[(32, 4)]);
    let (mut queries, mut byte_us, mut most) = (0, 0, 0);
    for visit in 0..100_000u32 {
        // Everybody once, and one who comes back again and again.
        let tenant = if visit % 50 == 0 { 0 } else { visit };
        let root = Root::derive(&Identity {
            tenant: TenantId(tenant),
            tenant_secret: &[tenant as u8; 32],
            model_digest: &[7; 32],
            layout_digest: &[9; 32],
            extra: &[],
        });
        common::serve(&mut cache, &root, &[1, visit]);
        cache.advance(u64::from(visit) * 10);
        cache.retire_tenants(|tenant, stats, holdings| {
            if tenant == TenantId(0) {
                queries += stats.queries.count;
                byte_us += holdings.cached_byte_us;
            }
        });
        most = most.max(cache.tenants().count());
    }
    cache.check(&[]).expect("the sums over tenants are those of the cache");
    assert!(most <= 200, "{most} tenants");
    let (stats, holdings) = (cache.tenant_stats(TenantId(0)), cache.holdings(TenantId(0)));
    assert_eq!(queries + stats.queries.count, 2000, "handed over and since");
    assert!(byte_us + holdings.cached_byte_us > 0);
    cache.clear(None);
    cache.retire_tenants(|_, _, _| ());
    assert_eq!(cache.stats().queries.count, 100_000);
}
