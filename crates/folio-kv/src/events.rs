//! What became cached where, and what is gone: for routers and indexes outside.
//!
//! Owns: a bounded list of events. Must never: be waited for. Who does not collect in time loses events, is told how many, and
//! has to begin anew from what it asks for.

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
