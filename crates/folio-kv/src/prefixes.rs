//! Prefixes that somebody asked to keep by name: to list, to pin, to drop. And what requests say about their blocks.
//!
//! Owns: the records, the limits of pinning, the account of pinned blocks. Must never: keep a block by anything but a pin
//! (a record alone promises nothing), or find a record by anything but its tenant and its id.
//!
//! A record is a chain of full blocks, known by its tenant and the beginning of its last block's hash: keyed by the
//! tenant's secret, so it can neither be guessed nor mean the same for two tenants. The same content has one record.
//!
//! A pin covers a whole chain, so a pinned block's parent is pinned, and whatever is not pinned can be evicted leaf first.
//! Pins of several records on one block are counted. The limits are checked when a pin is made, in blocks not pinned yet:
//! pinning is refused, never computing.
//!
//! Cost: `retain` O(blocks it is asked for), the rest O(blocks of the prefix); `drop_prefix` O(blocks that continue it).
//! `advance` O(1) amortized, and O(records) when a pin ends. Records are bounded per tenant.

use rustc_hash::FxHashMap;

use crate::cache::KvCache;
use crate::retention::{Retention, RetentionRange, strongest};
use crate::table::BlockTable;
use crate::tree::{Content, Parent};
use crate::types::{BlockHash, BlockId, Root, TenantId};

/// Records one tenant may have.
pub const PREFIXES_MAX: usize = 256;

/// Names a prefix among its tenant's: the first half of its last block's hash.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PrefixId(pub [u8; 16]);

/// Most blocks that may be pinned at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PinLimits {
    pub pool: u32,
    pub tenant: u32,
}

/// What is known of a kept prefix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PrefixInfo {
    pub id: PrefixId,
    /// Tokens of its blocks: the prompt's, cut to whole blocks.
    pub tokens: u32,
    /// Of those, from the start, how many are cached now.
    pub cached_tokens: u32,
    pub pinned: bool,
    /// As asked for.
    pub retention: Retention,
    /// When it falls back behind everything else (or is unpinned), if it is not used until then.
    pub expires_us: Option<u64>,
    pub created_us: u64,
}

/// Why a prefix is not kept. Nothing was changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum KeepRefused {
    #[error("the prefix has {tokens} tokens; the cache keeps whole blocks of {block_tokens}")]
    TooShort { tokens: u32, block_tokens: u32 },
    #[error("only {cached_tokens} of the {tokens} tokens are in the cache")]
    NotCached { tokens: u32, cached_tokens: u32 },
    #[error("{PREFIXES_MAX} prefixes are kept already; drop some first")]
    TooMany,
    #[error(
        "pinning {tokens} tokens more would exceed what {whose} may pin: {pinned_tokens} of {limit_tokens} tokens are pinned"
    )]
    PinLimit { tokens: u64, pinned_tokens: u64, limit_tokens: u64, whose: &'static str },
    #[error(
        "this model has layers with a sliding window, whose blocks cannot be pinned; ask for a high priority instead"
    )]
    Windows,
    #[error("the memory it takes is promised to requests that are running; try again later")]
    Busy,
}

struct Record {
    hashes: Box<[BlockHash]>,
    retention: Retention,
    pinned: bool,
    /// When the pin ends, unless the prefix was used meanwhile.
    pinned_until: Option<u64>,
    created: u64,
}

/// All records, and the account of pinned blocks.
pub(crate) struct Prefixes {
    records: FxHashMap<(TenantId, PrefixId), Record>,
    counts: FxHashMap<TenantId, usize>,
    limits: PinLimits,
    /// Pinned blocks that no table references.
    pub pinned_idle: u32,
    /// No pin ends before.
    next_end: u64,
}

impl Prefixes {
    pub fn new(limits: PinLimits) -> Self {
        Self {
            records: FxHashMap::default(),
            counts: FxHashMap::default(),
            limits,
            pinned_idle: 0,
            next_end: u64::MAX,
        }
    }

    /// Blocks and pins of all records, for `check`.
    pub fn pinned(&self) -> impl Iterator<Item = (TenantId, &BlockHash)> {
        let pinned = self.records.iter().filter(|(_, record)| record.pinned);
        pinned.flat_map(|((tenant, _), record)| record.hashes.iter().map(|hash| (*tenant, hash)))
    }

    fn ends_with(&self, tenant: TenantId, hash: &BlockHash) -> bool {
        self.records.contains_key(&(tenant, PrefixId::of(hash)))
    }
}

impl PrefixId {
    fn of(last: &BlockHash) -> Self {
        Self(std::array::from_fn(|i| last.0[i]))
    }
}

impl KvCache {
    /// A quarter of the pool, for all and for each, until this is called.
    pub fn set_pin_limits(&mut self, limits: PinLimits) {
        self.prefixes.limits = limits;
    }

    /// The time for everything that expires, microseconds. Once per step; it never goes back.
    pub fn advance(&mut self, now_us: u64) {
        self.now_us = self.now_us.max(now_us);
        self.windows.iter_mut().for_each(|window| window.now_us = self.now_us);
        self.policy.advance(now_us);
        while let Some(block) = self.policy.next_due() {
            self.policy.expire(block, &self.tree.meta(block));
        }
        if self.prefixes.next_end <= now_us {
            self.end_pins(now_us);
        }
    }

    /// Applies what a request wants to the published blocks of its table that end after position `from`: what it found
    /// and what it computed. A block keeps the stronger of this and what it had; a time to live begins anew. Where no
    /// range lies a block is wanted like any other (it becomes of the default priority if it was of less). Pins are made by [`KvCache::keep`].
    pub fn retain(&mut self, table: &BlockTable, from: u32, ranges: &[RetentionRange]) {
        let size = self.config.block_tokens;
        // What an operator shares is kept as the operator says.
        for index in (from / size).max(table.root.shared_blocks())..table.full_blocks() {
            let block = table.blocks[index as usize];
            let wanted = strongest(ranges, index * size..(index + 1) * size);
            self.policy.retain(block.0, wanted, &self.tree.meta(block.0));
        }
    }

    /// Records the first `tokens` of a table, cut to whole blocks, and pins them if asked to. Recorded before, the record
    /// is changed. The table's blocks are retained accordingly.
    pub fn keep(
        &mut self,
        table: &BlockTable,
        tokens: u32,
        retention: Retention,
        pin: bool,
    ) -> Result<PrefixInfo, KeepRefused> {
        let count = tokens.min(table.computed) / self.config.block_tokens;
        // What an operator shares is not the tenant's to keep: a root that shares is not for sequences that pin.
        let own = table.root.shared_blocks().min(count) as usize..count as usize;
        let blocks: Vec<u32> = table.blocks[own].iter().map(|block| block.0).collect();
        self.keep_blocks(table.root.tenant, tokens, &blocks, retention, pin, u32::MAX)
    }

    /// [`KvCache::keep`] for content that is cached, whoever is using it. At most `spare` blocks that could have been
    /// evicted may become pinned.
    pub fn keep_cached(
        &mut self,
        root: &Root,
        tokens: &[u32],
        retention: Retention,
        pin: bool,
        spare: u32,
    ) -> Result<PrefixInfo, KeepRefused> {
        let hashes = self.block_hashes(&root.own(), tokens);
        let blocks: Vec<u32> = hashes.iter().map_while(|hash| self.tree.find(hash)).collect();
        if blocks.len() < hashes.len() {
            let cached_tokens = blocks.len() as u32 * self.config.block_tokens;
            return Err(KeepRefused::NotCached { tokens: tokens.len() as u32, cached_tokens });
        }
        self.keep_blocks(root.tenant, tokens.len() as u32, &blocks, retention, pin, spare)
    }

    fn keep_blocks(
        &mut self,
        tenant: TenantId,
        tokens: u32,
        blocks: &[u32],
        retention: Retention,
        pin: bool,
        spare: u32,
    ) -> Result<PrefixInfo, KeepRefused> {
        let Some(last) = blocks.last() else {
            return Err(KeepRefused::TooShort { tokens, block_tokens: self.config.block_tokens });
        };
        let id = PrefixId::of(&self.tree.block(*last).hash);
        let known = self.prefixes.records.get(&(tenant, id));
        let was_pinned = known.is_some_and(|record| record.pinned);
        if known.is_none() && self.prefixes.counts.get(&tenant).is_some_and(|count| *count >= PREFIXES_MAX) {
            self.forget_lapsed(tenant);
            if self.prefixes.counts.get(&tenant).is_some_and(|count| *count >= PREFIXES_MAX) {
                return Err(KeepRefused::TooMany);
            }
        }
        if pin && !was_pinned {
            self.pin_blocks(tenant, blocks, spare)?;
        } else if was_pinned && !pin {
            self.unpin_blocks(tenant, blocks);
        }
        for &block in blocks {
            self.policy.retain(block, Some(retention), &self.tree.meta(block));
        }
        let now = self.policy.now();
        let created = self.prefixes.records.get(&(tenant, id)).map_or(now, |record| record.created);
        let pinned_until = retention.ttl_us.filter(|_| pin).map(|ttl| now.saturating_add(ttl));
        self.prefixes.next_end = self.prefixes.next_end.min(pinned_until.unwrap_or(u64::MAX));
        let hashes = blocks.iter().map(|block| self.tree.block(*block).hash).collect();
        let record = Record { hashes, retention, pinned: pin, pinned_until, created };
        let info = self.describe(id, &record);
        if self.prefixes.records.insert((tenant, id), record).is_none() {
            *self.prefixes.counts.entry(tenant).or_default() += 1;
        }
        Ok(info)
    }

    fn describe(&self, id: PrefixId, record: &Record) -> PrefixInfo {
        let size = self.config.block_tokens;
        let (mut runs, mut found, mut cached) = (Default::default(), 0, 0);
        for block in record.hashes.iter().map_while(|hash| self.tree.find(hash)) {
            found += 1;
            // As a request would find it: what windows lack is not of use.
            if self.covered(&mut runs, block, found) {
                cached = found;
            }
        }
        let last = record.hashes.last().and_then(|hash| self.tree.find(hash));
        let expires = last.and_then(|block| self.policy.expires(block));
        PrefixInfo {
            id,
            tokens: record.hashes.len() as u32 * size,
            cached_tokens: cached * size,
            pinned: record.pinned,
            retention: record.retention,
            expires_us: if record.pinned { expires.max(record.pinned_until) } else { expires },
            created_us: record.created,
        }
    }

    /// The tenant's prefixes, oldest first.
    pub fn prefixes(&self, tenant: TenantId) -> Vec<PrefixInfo> {
        let own = self.prefixes.records.iter().filter(|((owner, _), _)| *owner == tenant);
        let mut list: Vec<PrefixInfo> = own.map(|((_, id), record)| self.describe(*id, record)).collect();
        list.sort_unstable_by_key(|prefix| (prefix.created_us, prefix.id));
        list
    }

    pub fn prefix(&self, tenant: TenantId, id: PrefixId) -> Option<PrefixInfo> {
        self.prefixes.records.get(&(tenant, id)).map(|record| self.describe(id, record))
    }

    /// Pins or unpins a recorded prefix and says anew how its blocks are to be kept. `None`: the tenant has no such
    /// prefix. `spare`: see [`KvCache::keep_cached`].
    pub fn change_prefix(
        &mut self,
        tenant: TenantId,
        id: PrefixId,
        retention: Retention,
        pin: bool,
        spare: u32,
    ) -> Option<Result<PrefixInfo, KeepRefused>> {
        let record = self.prefixes.records.get(&(tenant, id))?;
        let blocks: Vec<u32> = record.hashes.iter().map_while(|hash| self.tree.find(hash)).collect();
        let tokens = record.hashes.len() as u32 * self.config.block_tokens;
        if blocks.len() < record.hashes.len() {
            let cached_tokens = blocks.len() as u32 * self.config.block_tokens;
            return Some(Err(KeepRefused::NotCached { tokens, cached_tokens }));
        }
        Some(self.keep_blocks(tenant, tokens, &blocks, retention, pin, spare))
    }

    /// Forgets a record, its pin, and its content: what continues it and what only it contained, as far as no table and
    /// no pin holds it. Returns the tokens dropped; `None`: the tenant has no such prefix.
    pub fn drop_prefix(&mut self, tenant: TenantId, id: PrefixId) -> Option<u64> {
        let record = self.prefixes.records.remove(&(tenant, id))?;
        self.count_record_gone(tenant);
        let blocks: Vec<u32> = record.hashes.iter().map_while(|hash| self.tree.find(hash)).collect();
        if record.pinned {
            self.unpin_blocks(tenant, &blocks);
        }
        if blocks.len() < record.hashes.len() {
            return Some(0);
        }
        let last = *blocks.last()?;
        let mut below = vec![last];
        let mut at = 0;
        while let Some(&block) = below.get(at) {
            below.extend(self.tree.children(Parent::Block(block)));
            at += 1;
        }
        let mut dropped = 0;
        for &block in below.iter().skip(1).rev() {
            dropped += self.drop_block(block);
        }
        for &block in blocks.iter().rev() {
            let kept = block != last && self.prefixes.ends_with(tenant, &self.tree.block(block).hash);
            let tokens = if kept { 0 } else { self.drop_block(block) };
            if tokens == 0 {
                break;
            }
            dropped += tokens;
        }
        Some(dropped)
    }

    /// Frees a block nobody holds; returns the tokens it held, 0 if it stays.
    fn drop_block(&mut self, block: u32) -> u64 {
        let b = self.tree.block(block);
        if !b.is_cached() || b.children.count > 0 || self.policy.is_pinned(block) {
            return 0;
        }
        let tokens = u64::from(b.filled);
        self.forget(block);
        self.free.push(block);
        tokens
    }

    fn count_record_gone(&mut self, tenant: TenantId) {
        if let Some(count) = self.prefixes.counts.get_mut(&tenant) {
            *count -= 1;
        }
    }

    /// Makes room for records: those of which nothing is cached.
    fn forget_lapsed(&mut self, tenant: TenantId) {
        let tree = &self.tree;
        let before = self.prefixes.records.len();
        self.prefixes.records.retain(|(owner, _), record| {
            *owner != tenant || record.pinned || tree.find(&record.hashes[0]).is_some()
        });
        if let Some(count) = self.prefixes.counts.get_mut(&tenant) {
            *count -= before - self.prefixes.records.len();
        }
    }

    fn pin_blocks(&mut self, tenant: TenantId, blocks: &[u32], spare: u32) -> Result<(), KeepRefused> {
        if !self.windows.is_empty() {
            return Err(KeepRefused::Windows);
        }
        let fresh = blocks.iter().filter(|block| !self.policy.is_pinned(**block));
        let idle = fresh.clone().filter(|block| self.tree.block(**block).refs == 0).count() as u32;
        let fresh = fresh.count() as u32;
        let size = u64::from(self.config.block_tokens);
        let (limits, mine) = (self.prefixes.limits, self.tenant_stats(tenant).pinned_blocks);
        let checks = [
            ("one tenant, of a cache divided by quotas", mine, if self.has_quotas() { 0 } else { u32::MAX }),
            ("one tenant", mine, limits.tenant.min(limits.pool)),
            ("all tenants together", self.stats.pinned_blocks, limits.pool),
        ];
        for (whose, pinned, limit) in checks {
            if fresh + pinned > limit {
                return Err(KeepRefused::PinLimit {
                    tokens: u64::from(fresh) * size,
                    pinned_tokens: u64::from(pinned) * size,
                    limit_tokens: u64::from(limit) * size,
                    whose,
                });
            }
        }
        if idle > spare {
            return Err(KeepRefused::Busy);
        }
        for &block in blocks {
            debug_assert_eq!(self.tree.block(block).content, Content::Full);
            self.policy.pin(block, &self.tree.meta(block));
        }
        self.prefixes.pinned_idle += idle;
        self.stats.pinned_blocks += fresh;
        let counts = self.tenant(tenant);
        counts.pinned_blocks += fresh;
        counts.pinned_idle += idle;
        Ok(())
    }

    fn unpin_blocks(&mut self, tenant: TenantId, blocks: &[u32]) {
        let (mut loose, mut idle) = (0, 0);
        for &block in blocks {
            self.policy.unpin(block, &self.tree.meta(block));
            if !self.policy.is_pinned(block) {
                loose += 1;
                idle += u32::from(self.tree.block(block).refs == 0);
            }
        }
        self.stats.pinned_blocks -= loose;
        self.prefixes.pinned_idle -= idle;
        let counts = self.tenant(tenant);
        counts.pinned_blocks -= loose;
        counts.pinned_idle -= idle;
    }

    /// Ends the pins whose time has passed without a use.
    fn end_pins(&mut self, now: u64) {
        let mut over = Vec::new();
        let mut next = u64::MAX;
        for (key, record) in &mut self.prefixes.records {
            let Some(until) = record.pinned_until.filter(|_| record.pinned) else { continue };
            // A use began the time of its last block anew.
            let last = record.hashes.last().and_then(|hash| self.tree.find(hash));
            let until = until.max(last.and_then(|block| self.policy.expires(block)).unwrap_or(0));
            record.pinned_until = Some(until);
            match until <= now {
                true => over.push(*key),
                false => next = next.min(until),
            }
        }
        self.prefixes.next_end = next;
        for key in over {
            let Some(record) = self.prefixes.records.get_mut(&key) else { continue };
            (record.pinned, record.pinned_until) = (false, None);
            let blocks: Vec<u32> = record.hashes.iter().filter_map(|hash| self.tree.find(hash)).collect();
            self.unpin_blocks(key.0, &blocks);
        }
    }

    /// Whether the block may be evicted once it is cached and has no children.
    pub(crate) fn is_pinned(&self, block: BlockId) -> bool {
        self.policy.is_pinned(block.0)
    }
}
