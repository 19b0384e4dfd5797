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
        let mut done = Carried { left: order.contents.len(), ..Carried::default() };
        for content in &order.contents {
            let length = device.block_bytes(content.group);
            scratch.resize(length, 0);
            if self.get(&content.into(), &data_key, scratch).is_err() {
                break;
            }
            device.memory.write(content.group as usize, content.block.0, scratch);
            done = Carried { blocks: done.blocks + 1, bytes: done.bytes + length, left: done.left - 1 };
        }
        done
    }

    fn store(
        &self,
        device: &Device,
        order: &StoreOrder,
        holds: &dyn Fn() -> bool,
        scratch: &mut Vec<u8>,
    ) -> Carried {
        let data_key = DataKey::from(order.root.data_key());
        let mut done = Carried::default();
        // What has expired is not there.
        self.expire();
        for (at, content) in order.contents.iter().enumerate() {
            let key = content.into();
            let Some(Retention { priority, ttl_us }) = order.lineage.retention(at) else {
                // What stands behind it is worth no more.
                done.left = order.contents.len() - at;
                break;
            };
            let length = device.block_bytes(content.group);
            if self.want(&key, length) {
                continue;
            }
            scratch.resize(length, 0);
            device.memory.read(content.group as usize, content.block.0, scratch);
            // Asked behind the copy: only then is it what was leased.
            let (parent, tokens) = order.lineage.of(&order.contents, at);
            let expires_s = self.wall.expires_s(ttl_us.map(Duration::from_micros));
            let (tenant, class) = (order.root.tenant, Class::of(priority));
            let about = About { tenant, parent, tokens, expires_s, class };
            if !holds() || self.put(&key, &data_key, scratch, &about).is_err() {
                done.left = order.contents.len() - at;
                break;
            }
            done = Carried { blocks: done.blocks + 1, bytes: done.bytes + length, left: 0 };
        }
        done
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
