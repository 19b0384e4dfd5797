//! The ledger of room: what is set aside for whom, and what is left for anybody else.
//!
//! Owns: the sum of all reservations, by cache group, and the limits of adapters in a step and of bytes in transfer. Must never: look at a
//! sequence that is not asked about.
//!
//! A running sequence with a reservation may still take [`Running::reserved`](crate::sequence::Running) blocks, however others
//! grow. The sum of those is kept as they change: when it grows, and when its step is committed. Nobody else changes it: that somebody shares a
//! window's blocks is counted beside it ([`KvCache::shared_references`]). So asking costs O(1), not a look at everybody (in a divided pool
//! O(tenants with one)).

use folio_kv::{GroupCounts, KvCache, TenantId};
use rustc_hash::FxHashMap;

use super::Scheduler;
use crate::sequence::Slot;

/// What somebody asks for; every part of it must be there.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Demand {
    /// Per cache group. A state is a block of its group.
    pub blocks: GroupCounts,
    /// That must be left behind those: of the pools, and of group 0 below its tenant's ceiling.
    pub left: GroupCounts,
    pub left_to_tenant: u32,
    /// That no running sequence uses yet (`adapters`).
    pub adapters: u32,
    /// That a transfer from outside is to write.
    pub transfer_bytes: u64,
}

impl From<GroupCounts> for Demand {
    fn from(blocks: GroupCounts) -> Self {
        Self { blocks, ..Self::default() }
    }
}

#[derive(Default)]
pub(super) struct Reservations {
    blocks: GroupCounts,
    /// Whose: how many, and how many blocks of group 0.
    owners: FxHashMap<TenantId, (u32, u32)>,
}

/// Whose blocks could make up for what is short.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum GivesWay {
    /// No blocks do: a slot comes from the end of the last who uses its adapter, bytes in transfer from reports of transfers.
    Nobody,
    /// The tenant's own: it is at its ceiling.
    Tenant,
    /// The tenant's own, and those of whoever holds more than its guarantee: others' guarantees leave it no more.
    Borrowers,
    /// Anybody's: the pool is not divided, or it would have room and must leave it to others.
    Anybody,
}

/// Whether it can be had now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    Fits,
    /// So many blocks are short; none, where something else is.
    Lacks(GroupCounts, GivesWay),
}

impl Verdict {
    pub fn fits(self) -> bool {
        self == Verdict::Fits
    }

    /// Blocks that are short.
    pub fn lacking(self) -> GroupCounts {
        match self {
            Verdict::Fits => GroupCounts::default(),
            Verdict::Lacks(blocks, _) => blocks,
        }
    }
}

impl Reservations {
    pub fn is_empty(&self) -> bool {
        self.owners.is_empty()
    }

    /// All reservations, for `check`.
    pub fn blocks(&self) -> (GroupCounts, u32) {
        (self.blocks, self.owners.values().map(|(count, _)| count).sum())
    }

    /// Replaces what one sequence of `owner` had set aside.
    pub fn change(&mut self, owner: TenantId, before: Option<GroupCounts>, after: Option<GroupCounts>) {
        if before.or(after).is_none() {
            return;
        }
        let (less, more) = (before.unwrap_or_default(), after.unwrap_or_default());
        self.blocks = (self.blocks + more).saturating_sub(less);
        let (count, blocks) = self.owners.entry(owner).or_default();
        *count = *count + u32::from(after.is_some()) - u32::from(before.is_some());
        *blocks = *blocks + more[0] - less[0];
        if *count == 0 {
            self.owners.remove(&owner);
        }
    }
}

impl Scheduler {
    /// Whether `owner` can take what it asks for, and leave what is to be left, without breaking a reservation; `own`'s does not count
    /// against it. Everybody who decides about room asks this.
    pub(super) fn fits(
        &self,
        cache: &KvCache,
        owner: TenantId,
        demand: impl Into<Demand>,
        own: Option<Slot>,
    ) -> Verdict {
        let asked = demand.into();
        let (pools, ceiling) = self.unreserved(cache, owner, own);
        let of_tenant = asked.blocks[0] + asked.left_to_tenant;
        let above = of_tenant.saturating_sub(ceiling);
        let mut blocks = (asked.blocks + asked.left).saturating_sub(pools);
        blocks[0] = blocks[0].max(above);
        let adapters = self.adapters.in_use.len() as u32 + asked.adapters;
        let too_many = asked.adapters > 0 && adapters > self.config.max_adapters;
        let bytes = cache.loading_bytes() + asked.transfer_bytes;
        let too_much = asked.transfer_bytes > 0 && bytes > self.config.max_transfer_bytes;
        let gives_way = match cache.has_quotas() {
            _ if too_many || too_much => GivesWay::Nobody,
            _ if blocks.is_zero() => return Verdict::Fits,
            true if above > 0 => GivesWay::Tenant,
            true if of_tenant > pools[0] || asked.left.is_zero() => GivesWay::Borrowers,
            _ => GivesWay::Anybody,
        };
        Verdict::Lacks(blocks, gives_way)
    }

    /// Adapters that a sequence which does not run would bring to those in use.
    pub(super) fn new_adapters(&self, slot: Slot) -> u32 {
        let adapter = self.sequences[slot].request.adapter_id();
        u32::from(adapter.is_some_and(|adapter| !self.adapters.in_use.contains_key(&adapter)))
    }

    /// What a tenant may take without breaking a reservation but `own`'s: of the pools, and of group 0 below its ceiling.
    fn unreserved(&self, cache: &KvCache, owner: TenantId, own: Option<Slot>) -> (GroupCounts, u32) {
        let mine = own.and_then(|slot| self.sequences[slot].running()?.reserved).unwrap_or_default();
        let (mut pools, mut ceiling) = (cache.available(), u32::MAX);
        if cache.has_quotas() {
            (pools[0], ceiling) = cache.room(owner);
            for (tenant, (_, blocks)) in &self.reservations.owners {
                match *tenant == owner {
                    true => ceiling = ceiling.saturating_sub(blocks - mine[0]),
                    // Whatever anybody takes may be what a reservation of another tenant counts on.
                    false => pools[0] = pools[0].min(cache.room(*tenant).0),
                }
            }
        }
        if self.reservations.is_empty() {
            return (pools, ceiling);
        }
        let others = self.reservations.blocks.saturating_sub(mine);
        (pools.saturating_sub(others + cache.shared_references()), ceiling)
    }

    /// The most that [`Scheduler::fits`].
    pub(super) fn spare(&self, cache: &KvCache, owner: TenantId, own: Option<Slot>) -> GroupCounts {
        let (mut pools, ceiling) = self.unreserved(cache, owner, own);
        pools[0] = pools[0].min(ceiling);
        pools
    }

    /// Blocks of group 0 that nobody who runs was promised or is about to need.
    pub(crate) fn unpromised(&self, cache: &KvCache) -> u32 {
        cache.available().saturating_sub(self.reservations.blocks + self.sum_of_growth(cache))[0]
    }

    /// Sets aside, for a running sequence, all that it may ever need.
    pub(super) fn reserve(&mut self, cache: &KvCache, slot: Slot) {
        if let Some(running) = self.sequences[slot].running_mut() {
            running.reserved = Some(GroupCounts::default());
            self.reservations.change(self.sequences[slot].owner(), None, Some(GroupCounts::default()));
        }
        self.update_reservation(cache, slot);
    }

    /// What it may still need has changed.
    pub(super) fn update_reservation(&mut self, cache: &KvCache, slot: Slot) {
        let sequence = &self.sequences[slot];
        let Some(before) = sequence.running().and_then(|running| running.reserved) else { return };
        let (positions, owner) = (sequence.final_positions(), sequence.owner());
        let after = self.missing(cache, slot, positions);
        if let Some(running) = self.sequences[slot].running_mut() {
            running.reserved = Some(after);
        }
        self.reservations.change(owner, Some(before), Some(after));
    }

    /// Blocks a sequence will still take until `positions`; none without a table.
    pub(super) fn missing(&self, cache: &KvCache, slot: Slot, positions: u32) -> GroupCounts {
        let sequence = &self.sequences[slot];
        sequence.running().map_or_else(GroupCounts::default, |running| {
            cache.missing(&running.table, sequence.growth(positions, self.config.max_num_batched_tokens))
        })
    }
}

#[cfg(test)]
mod tests {
    use folio_kv::{BlockHashes, CacheConfig, Identity, LruLeafFirst, Quota, Root};

    use super::*;
    use crate::SchedulerConfig;

    /// Ten blocks, of which tenant 2 holds seven.
    fn cache(quotas: &[(TenantId, Quota)]) -> KvCache {
        let config = CacheConfig { blocks: 10, block_tokens: 4, bytes_per_block: 1 };
        let mut cache = KvCache::new(config, Box::new(LruLeafFirst::new()));
        cache.set_quotas(quotas).expect("a division that can be");
        let (tenant_secret, model_digest, layout_digest) = (&[2; 32], &[0; 32], &[0; 32]);
        let tenant = TenantId(2);
        let identity = Identity { tenant, tenant_secret, model_digest, layout_digest, extra: &[] };
        let mut table = cache.empty_table(BlockHashes::new(&Root::derive(&identity), &[], 4));
        cache.grow(&mut table, 28, &mut Vec::new()).expect("room for seven");
        std::mem::forget(table);
        cache
    }

    #[test]
    fn what_does_not_fit_is_told_by_part_by_number_and_by_who_could_give_way() {
        let config = SchedulerConfig { max_adapters: 1, max_transfer_bytes: 100, ..Default::default() };
        let scheduler = Scheduler::new(config).expect("valid limits");
        let asks = |cache: &KvCache, demand: Demand| scheduler.fits(cache, TenantId(1), demand, None);
        let blocks = |count| Demand::from(GroupCounts::full(count));
        let lacks = |count, gives_way| Verdict::Lacks(GroupCounts::full(count), gives_way);
        let whole = cache(&[]);
        assert_eq!(asks(&whole, blocks(3)), Verdict::Fits);
        assert_eq!(asks(&whole, blocks(4)), lacks(1, GivesWay::Anybody));
        let and_left = Demand { left: GroupCounts::full(2), ..blocks(2) };
        assert_eq!(asks(&whole, and_left), lacks(1, GivesWay::Anybody));

        let quota = |tenant, guarantee, ceiling| (TenantId(tenant), Quota { guarantee, ceiling });
        let divided = cache(&[quota(1, 2, 6), quota(2, 4, 10)]);
        assert_eq!(asks(&divided, blocks(3)), Verdict::Fits);
        assert_eq!(asks(&divided, blocks(5)), lacks(2, GivesWay::Borrowers), "the pool is short");
        assert_eq!(asks(&divided, blocks(7)), lacks(4, GivesWay::Tenant), "the ceiling is, too");
        let and_left = Demand { left_to_tenant: 4, ..blocks(3) };
        assert_eq!(asks(&divided, and_left), lacks(1, GivesWay::Tenant), "the ceiling alone is");
        let and_left = Demand { left: GroupCounts::full(2), ..blocks(2) };
        assert_eq!(asks(&divided, and_left), lacks(1, GivesWay::Anybody), "others are left too little");

        for short in [Demand { adapters: 2, ..blocks(3) }, Demand { transfer_bytes: 101, ..blocks(3) }] {
            assert_eq!(asks(&whole, short), lacks(0, GivesWay::Nobody));
        }
    }
}
