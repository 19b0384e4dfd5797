//! What became cached where, and what is gone: for routers and indexes outside.
//!
//! Owns: a bounded list of events. Must never: be waited for. Who does not collect in time loses events, is told how many, and
//! has to begin anew from [`KvCache::resident`].

use crate::cache::KvCache;
use crate::types::{BlockHash, TenantId};

/// Where content resides.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Medium {
    Device,
    Host,
}

/// One change of where a full block's content resides, as far as group 0 is concerned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CacheEvent {
    /// `parent`: the block before it; `None` of the first of a chain.
    Stored {
        tenant: TenantId,
        hash: BlockHash,
        parent: Option<BlockHash>,
        medium: Medium,
    },
    Removed {
        tenant: TenantId,
        hash: BlockHash,
        medium: Medium,
    },
    /// [`KvCache::clear`] was asked for; what went is told one by one before it.
    Cleared {
        tenant: Option<TenantId>,
    },
}

#[derive(Debug, Default)]
pub(crate) struct Events {
    list: Vec<CacheEvent>,
    most: usize,
    lost: u64,
}

impl Events {
    pub fn is_on(&self) -> bool {
        self.most > 0
    }

    pub fn push(&mut self, event: CacheEvent) {
        match self.list.len() < self.most {
            true => self.list.push(event),
            false => self.lost += u64::from(self.is_on()),
        }
    }
}

impl KvCache {
    /// Records events from now on, at most so many until they are taken. 0: none.
    pub fn record_events(&mut self, most: usize) {
        self.events = Events { list: Vec::with_capacity(most), most, lost: 0 };
    }

    /// Moves what was recorded to `events`, in order; returns how many were lost since the last time.
    pub fn take_events(&mut self, events: &mut Vec<CacheEvent>) -> u64 {
        events.append(&mut self.events.list);
        std::mem::take(&mut self.events.lost)
    }

    pub(crate) fn record_cleared(&mut self, tenant: Option<TenantId>) {
        self.events.push(CacheEvent::Cleared { tenant });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::LruLeafFirst;
    use crate::{BlockHashes, CacheConfig, GroupCounts, Identity, Root};

    fn event(event: &CacheEvent) -> (bool, Medium, BlockHash, Option<BlockHash>) {
        match *event {
            CacheEvent::Stored { hash, parent, medium, .. } => (true, medium, hash, parent),
            CacheEvent::Removed { hash, medium, .. } => (false, medium, hash, None),
            CacheEvent::Cleared { .. } => panic!("nothing was cleared"),
        }
    }

    #[test]
    fn what_is_stored_and_removed_is_told_in_order_and_what_does_not_fit_is_counted() {
        let config = CacheConfig { blocks: 4, block_tokens: 2, bytes_per_block: 1 };
        let mut cache = KvCache::new(config, Box::new(LruLeafFirst::new()));
        cache.set_swap_space(GroupCounts::full(4));
        cache.record_events(6);
        let root = Root::derive(&Identity {
            tenant: TenantId(3),
            tenant_secret: &[1; 32],
            model_digest: &[2; 32],
            layout_digest: &[3; 32],
            extra: &[],
        });
        let tokens: Vec<u32> = (0..4).collect();
        let hashes = BlockHashes::new(&root, &tokens, 2);
        let [first, second] = [0, 1].map(|at| *hashes.get(false, at).expect("two blocks"));
        let mut table = cache.empty_table(hashes);
        cache.grow(&mut table, 4, &mut Vec::new()).expect("room");
        cache.commit(&mut table, &tokens, 4).expect("in order");
        let offer = cache.swap_offer(&table).expect("all of it is its own");
        let swapped = cache.swap_out(&table, &offer, &mut Vec::new());
        cache.end_load(swapped.ticket(), None, &[], true).expect("no table");
        cache.release(table, &tokens);
        let mut events = Vec::new();
        assert_eq!(cache.take_events(&mut events), 0);
        use Medium::{Device, Host};
        let device = [(true, Device, first, None), (true, Device, second, Some(first))];
        let host = [(true, Host, first, None), (true, Host, second, Some(first))];
        assert_eq!(events.iter().map(event).collect::<Vec<_>>(), [device, host].concat());
        events.clear();
        cache.clear(Some(TenantId(3)));
        cache.drop_swapped(swapped);
        assert_eq!(cache.take_events(&mut events), 0);
        assert_eq!(events.remove(2), CacheEvent::Cleared { tenant: Some(TenantId(3)) });
        let gone = [(false, Device, second, None), (false, Device, first, None)];
        let from_host = [(false, Host, second, None), (false, Host, first, None)];
        assert_eq!(events.iter().map(event).collect::<Vec<_>>(), [gone, from_host].concat());
        (0..8).for_each(|_| cache.clear(None));
        assert_eq!(cache.take_events(&mut events), 2, "two did not fit");
    }

    /// A sequence that is preempted, and ends before the step that would have copied it.
    #[test]
    fn of_a_copy_that_was_never_made_nobody_is_told() {
        let config = CacheConfig { blocks: 4, block_tokens: 2, bytes_per_block: 1 };
        let mut cache = KvCache::new(config, Box::new(LruLeafFirst::new()));
        cache.set_swap_space(GroupCounts::full(4));
        let root = Root::derive(&Identity {
            tenant: TenantId(3),
            tenant_secret: &[1; 32],
            model_digest: &[2; 32],
            layout_digest: &[3; 32],
            extra: &[],
        });
        let tokens: Vec<u32> = (0..4).collect();
        let mut table = cache.empty_table(BlockHashes::new(&root, &tokens, 2));
        cache.grow(&mut table, 4, &mut Vec::new()).expect("room");
        cache.commit(&mut table, &tokens, 4).expect("in order");
        cache.record_events(6);
        let offer = cache.swap_offer(&table).expect("all of it is its own");
        let swapped = cache.swap_out(&table, &offer, &mut Vec::new());
        cache.release(table, &tokens);
        cache.end_load(swapped.ticket(), None, &[], false).expect("no table");
        let resident = cache.resident();
        assert!(
            resident.len() == 2 && resident.iter().all(|of| event(of).1 == Medium::Device),
            "{resident:?}"
        );
        cache.drop_swapped(swapped);
        let mut events = Vec::new();
        cache.take_events(&mut events);
        assert_eq!(events, []);
        assert_eq!(cache.resident(), resident);
    }
}
