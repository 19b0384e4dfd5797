//! What clients of a simulated world say about the cache: priorities, times to live and pins in their requests, and commands
//! between the steps, some of them about prefixes that are not theirs.
//!
//! Owns: these choices and the check that pins hold. Must never: draw from the world's own randomness, so that a world
//! is the same with and without this.

use folio_engine::{CacheCommand, CacheResponse, Scheduler};
use folio_kv::{BlockHashes, KvCache, PinLimits, PrefixId, Retention, RetentionRange, TenantId};

use crate::rng::Rng;
use crate::scenario::{Client, root};

const TENANTS: u32 = 4;

fn retention(rng: &mut Rng) -> Retention {
    Retention {
        priority: *rng.pick(&[0, 10, 50, 50, 60, 100]),
        ttl_us: rng.one_in(2).then(|| rng.skewed(1, 3_000_000)),
    }
}

/// What some of the clients want of the cache.
pub fn wishes(rng: &mut Rng, clients: &mut [Client]) {
    for client in clients {
        if rng.one_in(2) {
            continue;
        }
        let prompt = client.request.prompt.len() as u64;
        let mut range = || {
            let Retention { priority, ttl_us } = retention(rng);
            let start = if rng.one_in(2) { 0 } else { rng.range(0, prompt - 1) };
            let end = if rng.one_in(3) { u64::from(u32::MAX) } else { rng.range(start + 1, prompt) };
            RetentionRange { tokens: start as u32..end as u32, priority, ttl_us, pin: rng.one_in(3) }
        };
        client.request.retention = (0..2).map(|_| range()).collect();
    }
}

/// What may be pinned beside the largest request, which must always be able to run.
pub fn limits(rng: &mut Rng, blocks: u32, largest: u32) -> PinLimits {
    let spare = blocks.saturating_sub(largest);
    let pool = rng.range(0, spare.into()) as u32;
    PinLimits { pool, tenant: if rng.one_in(2) { pool } else { pool / 2 } }
}

/// One client's command, or none.
pub fn command(
    rng: &mut Rng,
    scheduler: &mut Scheduler,
    cache: &mut KvCache,
    clients: &[Client],
) -> Result<(), String> {
    if !rng.one_in(6) {
        return Ok(());
    }
    let tenant = TenantId(rng.range(1, TENANTS.into()) as u32);
    let all: Vec<(TenantId, PrefixId)> = (0..=TENANTS)
        .flat_map(|owner| cache.prefixes(TenantId(owner)).into_iter().map(move |p| (TenantId(owner), p.id)))
        .collect();
    if rng.one_in(3) || all.is_empty() {
        let request = &rng.pick(clients).request;
        let tokens = &request.prompt[..rng.range(1, request.prompt.len() as u64) as usize];
        let hashes = BlockHashes::new(&root(request.tenant), tokens, cache.config().block_tokens);
        let (tokens, retention, pin) = (tokens.len() as u32, retention(rng), rng.one_in(2));
        scheduler.command(cache, CacheCommand::Keep { hashes: Box::new(hashes), tokens, retention, pin });
        return Ok(());
    }
    let (owner, id) = *rng.pick(&all);
    let asked = match rng.range(0, 2) {
        0 => CacheCommand::Show { tenant, id },
        1 => CacheCommand::Change { tenant, id, retention: retention(rng), pin: rng.one_in(2) },
        _ => CacheCommand::Drop { tenant, id },
    };
    let answer = scheduler.command(cache, asked);
    if (answer == CacheResponse::Missing) == (owner == tenant) {
        return Err(format!("a prefix of {owner:?}, asked for by {tenant:?}: {answer:?}"));
    }
    Ok(())
}

/// Whatever is pinned is cached in full, and no more than may be; returns how many prefixes that are.
pub fn check(cache: &KvCache, limits: PinLimits) -> Result<u64, String> {
    let mut pinned = 0;
    for tenant in (0..=TENANTS).map(TenantId) {
        for prefix in cache.prefixes(tenant).into_iter().filter(|prefix| prefix.pinned) {
            pinned += 1;
            if prefix.cached_tokens != prefix.tokens {
                return Err(format!("{prefix:?} is pinned and not all there"));
            }
        }
        if cache.tenant_stats(tenant).pinned_blocks > limits.tenant {
            return Err(format!("{tenant:?} has pinned more than it may"));
        }
    }
    match cache.stats().pinned_blocks > limits.pool {
        true => Err("more is pinned than may be".into()),
        false => Ok(pinned),
    }
}
