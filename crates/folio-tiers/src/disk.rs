//! The disk store behind a tier: each block for itself, found in memory.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use folio_engine::{EventFeed, LoadOrder, Medium, Resident, StoreOrder, TierStats};
use folio_kv::{BlockHashes, Content, Retention};

use crate::lookup::found;
use crate::store::DiskStore;
use crate::tier::{Carried, Device, Store};
use crate::types::{About, BlockKey, Class, DataKey, DiskState, Miss};

impl From<&Content> for BlockKey {
    fn from(content: &Content) -> Self {
        Self { hash: content.hash, group: content.group as u8 }
    }
}

impl Store for DiskStore {
    fn listen(self: Arc<Self>, feed: &Arc<EventFeed>) {
        if self.index.listen(feed) {
            let tier: Arc<dyn Resident> = self;
            feed.add_tier(Medium::Disk, &tier);
        }
    }

    fn find(&self, device: &Device, hashes: &BlockHashes, most: u32) -> Vec<Range<u32>> {
        self.expire();
        found(device, hashes, most, |key| self.contains(key))
    }

    fn load(&self, device: &Device, order: &LoadOrder, scratch: &mut Vec<u8>) -> Carried {
        let data_key = DataKey::from(order.root.data_key());
        Carried::one_by_one(device, &order.contents, |_, content, length| {
            scratch.resize(length, 0);
            self.get(&content.into(), &data_key, scratch).ok()?;
            device.memory.write(content.group as usize, content.block.0, scratch);
            Some(true)
        })
    }

    fn store(
        &self,
        device: &Device,
        order: &StoreOrder,
        holds: &dyn Fn() -> bool,
        scratch: &mut Vec<u8>,
    ) -> Carried {
        let data_key = DataKey::from(order.root.data_key());
        // What has expired is not there.
        self.expire();
        Carried::one_by_one(device, &order.contents, |at, content, length| {
            let key = content.into();
            // Without one it has expired; what stands behind it is worth no more.
            let Retention { priority, ttl_us } = order.lineage.retention(at)?;
            if self.want(&key, length) {
                return Some(false);
            }
            scratch.resize(length, 0);
            device.memory.read(content.group as usize, content.block.0, scratch);
            // Asked behind the copy: only then is it what was leased.
            let (parent, tokens) = order.lineage.of(&order.contents, at);
            let expires_s = self.wall.expires_s(ttl_us.map(Duration::from_micros));
            let (tenant, class) = (order.root.tenant, Class::of(priority));
            let about = About { tenant, parent, tokens, expires_s, class };
            (holds() && self.put(&key, &data_key, scratch, &about).is_ok()).then_some(true)
        })
    }

    fn stats(&self) -> TierStats {
        let disk = self.stats();
        let wrong =
            Miss::ALL.into_iter().filter(|miss| !matches!(miss, Miss::Absent | Miss::Late | Miss::Off));
        TierStats {
            name: "disk",
            off: match &disk.state {
                DiskState::Off { reason } => Some(reason.clone()),
                DiskState::Opening | DiskState::On => None,
            },
            blocks: disk.blocks,
            bytes: disk.bytes,
            bytes_limit: self.config.bytes,
            bytes_written: disk.bytes_written,
            payload_written: disk.payload_written,
            blocks_evicted: disk.reclaimed_blocks,
            misses: wrong.map(|miss| (miss.name(), disk.misses(miss))).collect(),
            ..TierStats::default()
        }
    }

    fn tick(&self) {
        self.expire();
    }

    fn close(&self) {
        self.close();
    }
}
