//! Prefixes that somebody asked to keep by name: to list, to pin, to drop. And what requests say about their blocks.
//!
//! Owns: the records, the limits of pinning, the account of pinned blocks. Must never: keep a block by anything but a pin
//! (a record alone promises nothing), or find a record by anything but its tenant and its id.
//!
//! A record is a chain of full blocks, known by its tenant and the beginning of its last block's hash: keyed by the
//! tenant's secret, so it can neither be guessed nor mean the same for two tenants. The same content has one record.
//!
//! A pin is a reference on every block of its record's chain, as a table has one: what is pinned is in use. A block that
//! several records pin counts once, and the limits are checked when a pin is made: pinning is refused, never computing.
//!
//! Cost: nothing looks at another tenant's records, of which each has at most [`PREFIXES_MAX`]. `retain` O(blocks it is asked
//! for); keeping, pinning and unpinning O(blocks of the prefix); `drop_prefix` O(blocks that continue it). To describe a
//! record is O(log blocks of the prefix), with sliding windows at most [`WINDOW_LOOK`] more. `advance` O(log pins) for each
//! that is due.

use std::collections::{BTreeMap, BTreeSet};

use rustc_hash::FxHashMap;

use crate::cache::KvCache;
use crate::hash::BlockHashes;
use crate::nodes::Parent;
use crate::retention::{Retention, RetentionRange, strongest};
use crate::table::BlockTable;
use crate::types::{BlockHash, BlockId, TenantId};

/// Records one tenant may have.
pub const PREFIXES_MAX: usize = 256;

/// Where windows lack what the end of a record needs, blocks before it that are tried.
const WINDOW_LOOK: u32 = 256;

/// Blocks whose time to live is looked at by one call of [`KvCache::advance`]; the rest by the next.
const EXPIRED_MAX: u32 = 4096;

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
    /// All of it the tenant's own.
    #[error(
        "pinning {tokens} tokens more would exceed what you may pin: {pinned_tokens} of {limit_tokens} tokens are pinned"
    )]
    PinLimit { tokens: u64, pinned_tokens: u64, limit_tokens: u64 },
    /// Says nothing of what others pinned.
    #[error(
        "pinning {tokens} tokens more would exceed what may be pinned in all; unpin some, or ask for a high priority instead"
    )]
    PinsFull { tokens: u64 },
    #[error("nothing can be pinned in a cache divided by quotas; ask for a high priority instead")]
    Divided,
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
    /// A tenant has an entry while it has records.
    records: FxHashMap<TenantId, BTreeMap<PrefixId, Record>>,
    /// Pins that end, by when at the earliest: a use since then is seen when it is due.
    ends: BTreeSet<(u64, TenantId, PrefixId)>,
    limits: PinLimits,
    /// Blocks looked up to describe records.
    #[cfg(test)]
    looked_up: std::cell::Cell<u64>,
}

impl Prefixes {
    pub fn new(limits: PinLimits) -> Self {
        Self {
            records: FxHashMap::default(),
            ends: BTreeSet::new(),
            limits,
            #[cfg(test)]
            looked_up: Default::default(),
        }
    }

    fn of(&self, tenant: TenantId) -> impl Iterator<Item = (&PrefixId, &Record)> {
        self.records.get(&tenant).into_iter().flatten()
    }

    fn get(&self, tenant: TenantId, id: PrefixId) -> Option<&Record> {
        self.records.get(&tenant)?.get(&id)
    }

    /// Whether the tenant has as many records as it may.
    fn is_full(&self, tenant: TenantId) -> bool {
        self.records.get(&tenant).is_some_and(|records| records.len() >= PREFIXES_MAX)
    }

    fn insert(&mut self, tenant: TenantId, id: PrefixId, record: Record) {
        let end = record.pinned_until;
        if let Some(old) = self.records.entry(tenant).or_default().insert(id, record) {
            self.ends.remove(&(old.pinned_until.unwrap_or(0), tenant, id));
        }
        self.ends.extend(end.map(|end| (end, tenant, id)));
    }

    fn remove(&mut self, tenant: TenantId, id: PrefixId) -> Option<Record> {
        let records = self.records.get_mut(&tenant)?;
        let record = records.remove(&id)?;
        if records.is_empty() {
            self.records.remove(&tenant);
        }
        self.ends.remove(&(record.pinned_until.unwrap_or(0), tenant, id));
        Some(record)
    }

    /// Blocks and pins of all records, for `check`.
    pub fn pinned(&self) -> impl Iterator<Item = (TenantId, &BlockHash)> {
        let all =
            self.records.iter().flat_map(|(tenant, of)| of.values().map(move |record| (*tenant, record)));
        let pinned = all.filter(|(_, record)| record.pinned);
        pinned.flat_map(|(tenant, record)| record.hashes.iter().map(move |hash| (tenant, hash)))
    }

    /// Leading blocks of a chain that a pinned record of its tenant, other than `id`, has, too. O(records * log blocks).
    fn pinned_of(&self, tenant: TenantId, id: PrefixId, chain: &[BlockHash]) -> u32 {
        let others = self.of(tenant).filter(|(other, record)| record.pinned && **other != id);
        // Equal hashes have equal beginnings.
        let common = others.map(|(_, record)| {
            let both = chain.len().min(record.hashes.len());
            let (mut from, mut to) = (0, both);
            while from < to {
                let middle = from + (to - from) / 2;
                if chain[middle] == record.hashes[middle] { from = middle + 1 } else { to = middle }
            }
            from
        });
        common.max().unwrap_or(0) as u32
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
        let mut looks = EXPIRED_MAX;
        while let Some(block) = self.policy.next_due(self.now_us, &mut looks) {
            self.policy.expire(block, &self.meta(BlockId(block)));
        }
        self.end_pins(now_us);
        self.end_leases(now_us);
    }

    /// Applies what a request wants to the published blocks of its table that end after position `from`: what it found
    /// and what it computed. A block keeps the stronger of this and what it had; a time to live begins anew. Where no
    /// range lies a block is wanted like any other (it becomes of the default priority if it was of less). Pins are made by [`KvCache::keep`].
    pub fn retain(&mut self, table: &BlockTable, from: u32, ranges: &[RetentionRange]) {
        let size = self.config.block_tokens;
        // What an operator declared is kept as the operator says.
        for index in (from / size).max(table.declared_blocks())..table.published[0] {
            let block = table.lists[0][index as usize];
            let wanted = strongest(ranges, index * size..(index + 1) * size);
            self.policy.retain(block.0, wanted, self.now_us, &self.meta(block));
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
        let count = (tokens / self.config.block_tokens).min(table.published[0]);
        // What an operator declared is not the tenant's to keep: a root that shares is not for sequences that pin.
        let own = table.declared_blocks().min(count) as usize..count as usize;
        let tenant = table.hashes.root().tenant;
        self.keep_blocks(tenant, tokens, &table.lists[0][own], retention, pin, u32::MAX)
    }

    /// [`KvCache::keep`] for `tokens` tokens of content that is cached, whoever is using it. At most `spare` blocks that could
    /// have been evicted may become pinned.
    pub fn keep_cached(
        &mut self,
        hashes: &BlockHashes,
        tokens: u32,
        retention: Retention,
        pin: bool,
        spare: u32,
    ) -> Result<PrefixInfo, KeepRefused> {
        let blocks = self.whole(hashes.chain(false).iter(), hashes.len(), tokens)?;
        self.keep_blocks(hashes.root().tenant, tokens, &blocks, retention, pin, spare)
    }

    fn keep_blocks(
        &mut self,
        tenant: TenantId,
        tokens: u32,
        blocks: &[BlockId],
        retention: Retention,
        pin: bool,
        spare: u32,
    ) -> Result<PrefixInfo, KeepRefused> {
        let Some(last) = blocks.last() else {
            return Err(KeepRefused::TooShort { tokens, block_tokens: self.config.block_tokens });
        };
        let id = PrefixId::of(&self.hash_of(*last));
        let known = self.prefixes.get(tenant, id).map(|record| (record.pinned, record.created));
        let was_pinned = known.is_some_and(|(pinned, _)| pinned);
        if known.is_none() && self.prefixes.is_full(tenant) {
            self.forget_lapsed(tenant);
            if self.prefixes.is_full(tenant) {
                return Err(KeepRefused::TooMany);
            }
        }
        let hashes: Box<[_]> = blocks.iter().map(|block| self.hash_of(*block)).collect();
        if pin && !was_pinned {
            self.pin_blocks(tenant, id, &hashes, blocks, spare)?;
        } else if was_pinned && !pin {
            self.unpin_blocks(tenant, id, &hashes, blocks);
        }
        for &block in blocks {
            self.policy.retain(block.0, Some(retention), self.now_us, &self.meta(block));
        }
        let created = known.map_or(self.now_us, |(_, created)| created);
        let pinned_until = retention.ttl_us.filter(|_| pin).map(|ttl| self.now_us.saturating_add(ttl));
        let record = Record { hashes, retention, pinned: pin, pinned_until, created };
        let info = self.describe(id, &record);
        self.prefixes.insert(tenant, id, record);
        Ok(info)
    }

    /// The block of a record at `index`, if it is cached.
    fn block_at(&self, record: &Record, index: u32) -> Option<BlockId> {
        #[cfg(test)]
        self.prefixes.looked_up.set(self.prefixes.looked_up.get() + 1);
        self.find_block(record.hashes.get(index as usize)?)
    }

    /// Of a published, full block.
    fn hash_of(&self, block: BlockId) -> BlockHash {
        self.nodes.node(self.node_of(block)).hash
    }

    /// Leading blocks of a record that a request would find. A cached block's parent is cached: they are a beginning of the
    /// record. Where windows lack what a hit there needs, it is shorter.
    fn cached_blocks_of(&self, record: &Record) -> u32 {
        let (mut from, mut to) = (0, record.hashes.len() as u32);
        while from < to {
            // Most are cached as a whole: the end first.
            let middle = if to as usize == record.hashes.len() { to - 1 } else { from + (to - from) / 2 };
            match self.block_at(record, middle) {
                Some(_) => from = middle + 1,
                None => to = middle,
            }
        }
        let least = from.saturating_sub(WINDOW_LOOK);
        while from > least {
            let Some(hole) = self.hole_in_groups(record, from) else { return from };
            // Whatever ends between the hole and here needs it, too.
            from = hole;
        }
        if from == 0 || self.needed_groups() == 1 { from } else { 0 }
    }

    /// The last block of group 0 with which a block ends that the query behind `blocks` blocks reads and some group lacks.
    fn hole_in_groups(&self, record: &Record, blocks: u32) -> Option<u32> {
        let computed = blocks * self.config.block_tokens;
        let needed = |group: usize| {
            let config = self.groups[group].config;
            let ratio = config.block_tokens / self.config.block_tokens;
            (!config.optional).then_some((group, config.first_block(computed) * ratio, ratio))
        };
        let groups: Vec<(usize, u32, u32)> = self.others().filter_map(needed).collect();
        let first_of_all = groups.iter().map(|(_, first, _)| *first).min()?;
        (first_of_all..blocks).rev().find(|at| {
            let node = self.block_at(record, *at).map(|block| self.node_of(block));
            groups.iter().any(|(group, first, ratio)| {
                let ends = (at + 1) % ratio == 0 || at + 1 == blocks;
                at >= first && ends && node.and_then(|node| self.place(*group, node)).is_none()
            })
        })
    }

    fn describe(&self, id: PrefixId, record: &Record) -> PrefixInfo {
        let size = self.config.block_tokens;
        let cached = self.cached_blocks_of(record);
        let last = record.hashes.last().and_then(|hash| self.find_block(hash));
        let expires = last.and_then(|block| self.policy.expires(block.0));
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
        let own = self.prefixes.of(tenant);
        let mut list: Vec<PrefixInfo> = own.map(|(id, record)| self.describe(*id, record)).collect();
        list.sort_unstable_by_key(|prefix| (prefix.created_us, prefix.id));
        list
    }

    pub fn prefix(&self, tenant: TenantId, id: PrefixId) -> Option<PrefixInfo> {
        self.prefixes.get(tenant, id).map(|record| self.describe(id, record))
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
        let hashes = &self.prefixes.get(tenant, id)?.hashes;
        let tokens = hashes.len() as u32 * self.config.block_tokens;
        let blocks = self.whole(hashes.iter(), hashes.len() as u32, tokens);
        Some(blocks.and_then(|blocks| self.keep_blocks(tenant, tokens, &blocks, retention, pin, spare)))
    }

    /// The blocks of a chain of `count`, if all are on the device.
    fn whole<'a>(
        &self,
        chain: impl Iterator<Item = &'a BlockHash>,
        count: u32,
        tokens: u32,
    ) -> Result<Vec<BlockId>, KeepRefused> {
        let blocks = self.cached_run(chain);
        let cached_tokens = blocks.len() as u32 * self.config.block_tokens;
        let is_whole = blocks.len() as u32 == count;
        if is_whole { Ok(blocks) } else { Err(KeepRefused::NotCached { tokens, cached_tokens }) }
    }

    /// Forgets a record, its pin, and its content: what continues it and what only it contained, as far as no table and
    /// no pin holds it. Returns the tokens dropped; `None`: the tenant has no such prefix.
    pub fn drop_prefix(&mut self, tenant: TenantId, id: PrefixId) -> Option<u64> {
        let record = self.prefixes.remove(tenant, id)?;
        let blocks = self.cached_run(record.hashes.iter());
        if record.pinned {
            self.unpin_blocks(tenant, id, &record.hashes, &blocks);
        }
        if blocks.len() < record.hashes.len() {
            return Some(0);
        }
        let last = *blocks.last()?;
        let mut below = vec![self.node_of(last)];
        let mut at = 0;
        while let Some(&node) = below.get(at) {
            below.extend(self.nodes.children(Parent::Node(node)));
            at += 1;
        }
        let mut dropped = 0;
        for &node in below.iter().skip(1).rev() {
            dropped += self.drop_block(self.block_of(node));
        }
        for &block in blocks.iter().rev() {
            let id = PrefixId::of(&self.hash_of(block));
            let kept = block != last && self.prefixes.get(tenant, id).is_some();
            let tokens = if kept { 0 } else { self.drop_block(block) };
            if tokens == 0 {
                break;
            }
            dropped += tokens;
        }
        Some(dropped)
    }

    /// Frees a block nobody holds; returns the tokens it held, 0 if it stays.
    fn drop_block(&mut self, block: BlockId) -> u64 {
        if !self.is_cached_leaf(block.0) {
            return 0;
        }
        let tokens = self.slot(0, block).filled.into();
        self.free_block(block);
        tokens
    }

    /// Makes room for records: those of which nothing is cached.
    fn forget_lapsed(&mut self, tenant: TenantId) {
        let lapsed = |record: &Record| !record.pinned && self.find_block(&record.hashes[0]).is_none();
        let own = self.prefixes.of(tenant).filter(|(_, record)| lapsed(record));
        for id in own.map(|(id, _)| *id).collect::<Vec<_>>() {
            self.prefixes.remove(tenant, id);
        }
    }

    /// `blocks` are those of the chain `hashes`, all of them.
    fn pin_blocks(
        &mut self,
        tenant: TenantId,
        id: PrefixId,
        hashes: &[BlockHash],
        blocks: &[BlockId],
        spare: u32,
    ) -> Result<(), KeepRefused> {
        if self.needed_groups() > 1 {
            return Err(KeepRefused::Windows);
        }
        if self.has_quotas() {
            return Err(KeepRefused::Divided);
        }
        let fresh = blocks.len() as u32 - self.prefixes.pinned_of(tenant, id, hashes);
        let idle = blocks.iter().filter(|block| self.slot(0, **block).refs == 0).count() as u32;
        let size = u64::from(self.config.block_tokens);
        let (limits, mine) = (self.prefixes.limits, self.tenant_stats(tenant).pinned_blocks);
        let tokens = u64::from(fresh) * size;
        let limit = limits.tenant.min(limits.pool);
        if fresh + mine > limit {
            let (pinned_tokens, limit_tokens) = (u64::from(mine) * size, u64::from(limit) * size);
            return Err(KeepRefused::PinLimit { tokens, pinned_tokens, limit_tokens });
        }
        if fresh + self.stats.pinned_blocks > limits.pool {
            return Err(KeepRefused::PinsFull { tokens });
        }
        if idle > spare {
            return Err(KeepRefused::Busy);
        }
        blocks.iter().for_each(|block| self.reference(0, *block));
        self.stats.pinned_blocks += fresh;
        self.tenants.entry(tenant).or_default().stats.pinned_blocks += fresh;
        Ok(())
    }

    fn unpin_blocks(&mut self, tenant: TenantId, id: PrefixId, hashes: &[BlockHash], blocks: &[BlockId]) {
        let loose = blocks.len() as u32 - self.prefixes.pinned_of(tenant, id, hashes);
        // The tail first, as a table gives its blocks back.
        blocks.iter().rev().for_each(|block| self.unreference(0, *block));
        self.stats.pinned_blocks -= loose;
        self.tenants.entry(tenant).or_default().stats.pinned_blocks -= loose;
    }

    /// Ends the pins whose time has passed without a use.
    fn end_pins(&mut self, now: u64) {
        while let Some(&(end, tenant, id)) = self.prefixes.ends.first().filter(|(end, ..)| *end <= now) {
            self.prefixes.ends.remove(&(end, tenant, id));
            // A use began the time of its last block anew.
            let last =
                self.prefixes.get(tenant, id).and_then(|record| self.find_block(record.hashes.last()?));
            let until = last.and_then(|block| self.policy.expires(block.0)).unwrap_or(0);
            let records = self.prefixes.records.get_mut(&tenant);
            let Some(record) = records.and_then(|records| records.get_mut(&id)) else { continue };
            if until > now {
                record.pinned_until = Some(until);
                self.prefixes.ends.insert((until, tenant, id));
                continue;
            }
            (record.pinned, record.pinned_until) = (false, None);
            let hashes = record.hashes.clone();
            let blocks = self.cached_run(hashes.iter());
            self.unpin_blocks(tenant, id, &hashes, &blocks);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::LruLeafFirst;
    use crate::types::{CacheConfig, GroupConfig, Identity, Layout, Root};

    const BLOCK: u32 = 4;
    const CHAIN: u32 = 64;

    fn root(tenant: u32) -> Root {
        let secret = [tenant as u8; 32];
        let (tenant, tenant_secret) = (TenantId(tenant), &secret);
        let (model_digest, layout_digest) = (&[2; 32], &[3; 32]);
        Root::derive(&Identity { tenant, tenant_secret, model_digest, layout_digest, extra: &[] })
    }

    fn text(which: u32) -> Vec<u32> {
        (0..CHAIN * BLOCK).map(|at| which * 1000 + at).collect()
    }

    /// Listing costs what the tenant itself has recorded, whatever others have, and a pin that ends looks at no other record.
    #[test]
    fn no_command_and_no_end_of_a_pin_looks_at_another_tenant_s_records() {
        let config = CacheConfig { blocks: 4000, block_tokens: BLOCK, bytes_per_block: 1 };
        let mut cache = KvCache::new(config, Box::new(LruLeafFirst::new()));
        let mut keep = |tenant: u32, which: u32, ttl_us: Option<u64>| {
            let text = text(which);
            let hashes = BlockHashes::new(&root(tenant), &text, BLOCK);
            let mut table = cache.attach(hashes, &text, 0, &mut Vec::new());
            cache.grow(&mut table, text.len() as u32, &mut Vec::new()).expect("room");
            cache.commit(&mut table, &text, text.len() as u32).expect("in order");
            cache.release(table, &text);
            let retention = Retention { ttl_us, ..Retention::default() };
            for blocks in 1..=CHAIN / 2 {
                let part = &text[..(blocks * BLOCK) as usize];
                let hashes = BlockHashes::new(&root(tenant), part, BLOCK);
                let tokens = part.len() as u32;
                let kept = cache.keep_cached(&hashes, tokens, retention, ttl_us.is_some(), u32::MAX);
                kept.expect("within the limits");
            }
        };
        (0..50).for_each(|other| keep(2 + other, other, None));
        keep(1, 100, Some(1000));
        let looked_up = |cache: &mut KvCache, work: &mut dyn FnMut(&mut KvCache)| {
            cache.prefixes.looked_up.set(0);
            work(cache);
            cache.prefixes.looked_up.get()
        };
        let listed = looked_up(&mut cache, &mut |cache| assert_eq!(cache.prefixes(TenantId(1)).len(), 32));
        assert!(listed <= 32 * 6, "{listed} blocks looked up for 32 records");
        assert_eq!(looked_up(&mut cache, &mut |cache| assert!(cache.prefixes(TenantId(999)).is_empty())), 0);
        assert_eq!(cache.prefixes.ends.len(), 32, "only pins that end are in order of their end");
        cache.advance(1000);
        assert_eq!((cache.prefixes.ends.len(), cache.stats().pinned_blocks), (0, 0));
        cache.check(&[]).expect("invariants");
        for prefix in cache.prefixes(TenantId(1)) {
            cache.drop_prefix(TenantId(1), prefix.id);
        }
        assert_eq!(cache.prefixes.records.len(), 50, "who has no records has no entry");
    }

    /// The count of cached blocks, whatever is gone, with and without windows.
    #[test]
    fn what_is_cached_of_a_record_is_what_a_request_would_find() {
        for case in 0..200u32 {
            let windows: &[u32] = [&[][..], &[9], &[30, 5]][case as usize % 3];
            let window = |tokens: &u32| GroupConfig {
                layout: Layout::Window { tokens: *tokens },
                blocks: 24,
                block_tokens: BLOCK << (case / 100),
                bytes_per_block: 1,
                optional: false,
            };
            let windows: Vec<_> = windows.iter().map(window).collect();
            let config = CacheConfig { blocks: 24, block_tokens: BLOCK, bytes_per_block: 1 };
            let mut cache = KvCache::with_groups(config, &windows, Box::new(LruLeafFirst::new()));
            let text: Vec<u32> = (0..16 * BLOCK).collect();
            let hashes = BlockHashes::new(&root(1), &text, BLOCK);
            let mut table = cache.attach(hashes.clone(), &text, 0, &mut Vec::new());
            cache.grow(&mut table, 64, &mut Vec::new()).expect("room");
            cache.commit(&mut table, &text, 64).expect("in order");
            let nodes: Vec<u32> = table.blocks().iter().map(|block| cache.node_of(*block)).collect();
            cache.release(table, &text);
            let id = cache.keep_cached(&hashes, 64, Retention::default(), false, 0).expect("cached").id;
            let word = case.wrapping_mul(0x9e37_79b9);
            for group in cache.others() {
                for (at, node) in nodes.iter().enumerate() {
                    if word.rotate_right(7 * group as u32 + at as u32) % 5 == 0 {
                        cache.free_place(group, *node);
                    }
                }
            }
            let empty = BlockHashes::new(&root(2), &[], BLOCK);
            let mut other = cache.attach(empty, &[], 0, &mut Vec::new());
            cache.grow(&mut other, (word >> 27) % 24 * BLOCK, &mut Vec::new()).expect("room");
            let found = cache.lookup(&hashes, &text).full_blocks * BLOCK;
            let info = cache.prefix(TenantId(1), id).expect("recorded");
            assert_eq!(info.cached_tokens, found, "case {case}");
        }
    }
}
