//! Sequences that hold no blocks: a queue per priority and tenant, in order of arrival.
//!
//! Owns: who waits, and that the virtual times ([`super::fair`]) hear of it. Must never: decide who leaves.
//!
//! Cost: `insert` and `remove` O(log waiting) plus what `fair` takes, iteration O(log waiting) to begin.

use std::collections::BTreeSet;

use folio_kv::TenantId;

use super::fair::Fairness;
use crate::config::SchedulerConfig;
use crate::plan::SequenceId;
use crate::sequence::{Rank, Slot};

pub(super) struct Queue {
    /// A tenant's part of a class is one range.
    set: BTreeSet<(i32, TenantId, Rank, Slot)>,
    pub fair: Fairness,
}

impl Queue {
    pub fn new(config: &SchedulerConfig) -> Self {
        Self { set: BTreeSet::new(), fair: Fairness::new(config) }
    }

    pub fn insert(&mut self, tenant: TenantId, rank: Rank, slot: Slot) {
        if self.set.insert((rank.priority, tenant, rank, slot)) {
            self.fair.waits(rank.priority, tenant);
        }
    }

    /// Nothing happens if it does not wait.
    pub fn remove(&mut self, tenant: TenantId, rank: Rank, slot: Slot) {
        if self.set.remove(&(rank.priority, tenant, rank, slot)) {
            self.fair.leaves(rank.priority, tenant);
        }
    }

    pub fn len(&self) -> usize {
        self.set.len()
    }

    /// The best priority that waits.
    pub fn best_priority(&self) -> Option<i32> {
        self.set.first().map(|(priority, ..)| *priority)
    }

    /// Everybody, by priority and tenant.
    pub fn iter(&self) -> impl Iterator<Item = Slot> + '_ {
        self.set.iter().map(|(.., slot)| *slot)
    }

    /// A tenant's part of a class, oldest first.
    pub fn of(&self, priority: i32, tenant: TenantId) -> impl Iterator<Item = Slot> + '_ {
        let first = Rank { priority, arrival: 0, id: SequenceId(0) };
        let last = Rank { priority, arrival: u64::MAX, id: SequenceId(u64::MAX) };
        let range = (priority, tenant, first, Slot(0))..=(priority, tenant, last, Slot(u32::MAX));
        self.set.range(range).map(|(.., slot)| *slot)
    }
}
