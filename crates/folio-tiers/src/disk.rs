//! The disk store behind a tier: each block for itself, found in memory.

use std::ops::Range;

use folio_engine::{LoadOrder, StoreOrder, TierStats};
use folio_kv::{BlockHashes, Content};

use crate::lookup::found;
use crate::store::DiskStore;
use crate::tier::{Carried, Device, Store};
use crate::types::{BlockKey, DataKey, DiskState, Miss};

impl From<&Content> for BlockKey {
    fn from(content: &Content) -> Self {
        Self { hash: content.hash, group: content.group as u8 }
    }
}

impl Store for DiskStore {
    fn find(&self, device: &Device, hashes: &BlockHashes, most: u32) -> Vec<Range<u32>> {
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
        for (at, content) in order.contents.iter().enumerate() {
            let key = content.into();
            if self.contains(&key) {
                continue;
            }
            let length = device.block_bytes(content.group);
            scratch.resize(length, 0);
            device.memory.read(content.group as usize, content.block.0, scratch);
            // Asked behind the copy: only then is it what was leased.
            if !holds() || self.put(&key, &data_key, scratch).is_err() {
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
            blocks_evicted: disk.reclaimed_blocks,
            misses: wrong.map(|miss| (miss.name(), disk.misses(miss))).collect(),
            ..TierStats::default()
        }
    }

    fn close(&self) {
        self.close();
    }
}
