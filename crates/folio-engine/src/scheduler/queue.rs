//! Sequences that hold no blocks: a queue per class and tenant, by the caller's priority and then arrival. Who waits for something
//! outside is counted, and stands in no queue.
//!
//! Owns: who waits, how many for what, and that the virtual times ([`super::fair`]) hear of it. Must never: decide who leaves.
//!
//! Cost: `insert` and `remove` O(log waiting) plus what `fair` takes, iteration O(log waiting) to begin.

use std::collections::BTreeSet;

use folio_kv::TenantId;

use super::fair::Fairness;
use crate::config::SchedulerConfig;
use crate::plan::SequenceId;
use crate::sequence::{Rank, Sequence, Slot};
use crate::stats::{PerReason, WaitingFor};

pub(super) struct Queue {
    /// A tenant's part of a class is one range.
    set: BTreeSet<(i32, TenantId, Rank, Slot)>,
    pub fair: Fairness,
    pub counts: PerReason<u32>,
}

impl Queue {
    pub fn new(config: &SchedulerConfig) -> Self {
        Self { set: BTreeSet::new(), fair: Fairness::new(config), counts: PerReason::default() }
    }

    pub fn insert(&mut self, sequence: &Sequence, slot: Slot, reason: WaitingFor) {
        let Sequence { tenant, rank, .. } = *sequence;
        if reason.is_outside() {
            self.counts[reason] += 1;
        } else if self.set.insert((rank.class, tenant, rank, slot)) {
            self.fair.waits(rank.class, tenant);
            self.counts[reason] += 1;
        }
    }

    /// Nothing happens if it does not wait.
    pub fn remove(&mut self, sequence: &Sequence, slot: Slot, reason: WaitingFor) {
        let Sequence { tenant, rank, .. } = *sequence;
        if reason.is_outside() {
            self.counts[reason] -= 1;
        } else if self.set.remove(&(rank.class, tenant, rank, slot)) {
            self.fair.leaves(rank.class, tenant);
            self.counts[reason] -= 1;
        }
    }

    /// Somebody waits for something else now, or while it runs.
    pub fn changes(&mut self, before: Option<WaitingFor>, after: Option<WaitingFor>) {
        before.into_iter().for_each(|before| self.counts[before] -= 1);
        after.into_iter().for_each(|after| self.counts[after] += 1);
    }

    pub fn len(&self) -> usize {
        self.set.len()
    }

    /// The best class that waits.
    pub fn best_class(&self) -> Option<i32> {
        self.set.first().map(|(class, ..)| *class)
    }

    /// The tenants of the first and the last.
    pub fn ends(&self) -> impl Iterator<Item = TenantId> + '_ {
        self.set.first().into_iter().chain(self.set.last()).map(|(_, tenant, ..)| *tenant)
    }

    /// The best priority that somebody waits with in a class. O(tenants of the class * log waiting).
    pub fn best_priority(&self, class: i32) -> Option<i32> {
        let tenants = self.fair.waiting_tenants(class);
        tenants.filter_map(|tenant| self.ranks_of(class, tenant).next()).map(|(rank, _)| rank.priority).min()
    }

    /// Everybody, by class and tenant.
    pub fn iter(&self) -> impl Iterator<Item = Slot> + '_ {
        self.set.iter().map(|(.., slot)| *slot)
    }

    /// A tenant's part of a class, best first.
    pub fn of(&self, class: i32, tenant: TenantId) -> impl Iterator<Item = Slot> + '_ {
        self.ranks_of(class, tenant).map(|(_, slot)| slot)
    }

    fn ranks_of(&self, class: i32, tenant: TenantId) -> impl Iterator<Item = (Rank, Slot)> + '_ {
        let first = Rank { class, priority: i32::MIN, arrival: 0, id: SequenceId(0) };
        let last = Rank { class, priority: i32::MAX, arrival: u64::MAX, id: SequenceId(u64::MAX) };
        let range = (class, tenant, first, Slot(0))..=(class, tenant, last, Slot(u32::MAX));
        self.set.range(range).map(|(_, _, rank, slot)| (*rank, *slot))
    }
}
