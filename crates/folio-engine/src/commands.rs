//! What a caller may ask of the cache between two steps: list, keep, pin, unpin and drop its own prefixes.
//!
//! Owns: the words. Must never: make anybody wait in the engine. A command goes through the same bounded mailbox as
//! requests and is answered by a call of its reply, on the engine's thread; a reply that is dropped uncalled means that the
//! engine has ended.

use folio_kv::{
    BlockHashes, BlockView, EventBatch, KeepRefused, KvCache, PrefixId, PrefixInfo, Retention, TenantId,
};

use crate::scheduler::Scheduler;

/// Every command of a tenant's names it (or a root, which does): nothing of another's is reachable.
#[derive(Clone, Debug)]
pub enum CacheCommand {
    List {
        tenant: TenantId,
    },
    Show {
        tenant: TenantId,
        id: PrefixId,
    },
    /// Records, and pins if `pin`, what is cached of `tokens` tokens.
    Keep {
        hashes: Box<BlockHashes>,
        tokens: u32,
        retention: Retention,
        pin: bool,
    },
    /// Pins or unpins a recorded prefix and says anew how it is to be kept.
    Change {
        tenant: TenantId,
        id: PrefixId,
        retention: Retention,
        pin: bool,
    },
    /// Unpins and forgets a prefix and its content.
    Drop {
        tenant: TenantId,
        id: PrefixId,
    },
    /// Forgets whatever is cached and neither in use nor pinned, of one tenant or, an operator's wish, of all.
    Clear {
        tenant: Option<TenantId>,
    },
    /// Lists where every full block's content resides, an operator's wish. O(blocks).
    Resident,
    /// Shows some blocks, an operator's wish: see [`KvCache::view`]. Bounded however many are wanted.
    View {
        first: u32,
        step: u32,
        count: u32,
    },
}

#[derive(Clone, Debug, PartialEq)]
pub enum CacheResponse {
    Prefixes(Vec<PrefixInfo>),
    Prefix(PrefixInfo),
    Dropped {
        tokens: u64,
    },
    Cleared {
        blocks: u32,
    },
    /// As [`KvCache::resident`].
    Resident(EventBatch),
    /// As [`KvCache::view`].
    Blocks(Vec<BlockView>),
    /// The tenant has no such prefix, whoever else may.
    Missing,
    Refused(KeepRefused),
}

/// Takes the answer. Must not block and must not call the engine.
pub type CacheReply = Box<dyn FnOnce(CacheResponse) + Send>;

impl Scheduler {
    /// Carries out one command. Blocks that running sequences were promised are not pinned away from them.
    pub fn command(&mut self, cache: &mut KvCache, command: CacheCommand) -> CacheResponse {
        let kept = |kept| match kept {
            None => CacheResponse::Missing,
            Some(Ok(prefix)) => CacheResponse::Prefix(prefix),
            Some(Err(refused)) => CacheResponse::Refused(refused),
        };
        match command {
            CacheCommand::List { tenant } => CacheResponse::Prefixes(cache.prefixes(tenant)),
            CacheCommand::Show { tenant, id } => kept(cache.prefix(tenant, id).map(Ok)),
            CacheCommand::Keep { hashes, tokens, retention, pin } => {
                let spare = self.unpromised(cache);
                kept(Some(cache.keep_cached(&hashes, tokens, retention, pin, spare)))
            }
            CacheCommand::Change { tenant, id, retention, pin } => {
                let spare = self.unpromised(cache);
                kept(cache.change_prefix(tenant, id, retention, pin, spare))
            }
            CacheCommand::Drop { tenant, id } => match cache.drop_prefix(tenant, id) {
                Some(tokens) => CacheResponse::Dropped { tokens },
                None => CacheResponse::Missing,
            },
            CacheCommand::Clear { tenant } => {
                let before = cache.stats().free_blocks;
                cache.clear(tenant);
                CacheResponse::Cleared { blocks: cache.stats().free_blocks.saturating_sub(before) }
            }
            CacheCommand::Resident => CacheResponse::Resident(cache.resident()),
            CacheCommand::View { first, step, count } => {
                CacheResponse::Blocks(cache.view(first, step, count))
            }
        }
    }
}
