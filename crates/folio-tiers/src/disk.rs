//! The disk store behind a tier: each block for itself, found in memory.

use std::ops::Range;

use folio_engine::{LoadOrder, StoreOrder, TierStats};
use folio_kv::{BlockHashes, Content};

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
        let declared = hashes.root().declared_blocks() > 0;
        let key = |hash, group| BlockKey { hash, group };
        let is_stored: Vec<bool> =
            hashes.iter(declared).take(most as usize).map(|hash| self.contains(&key(*hash, 0))).collect();
        let mut ranges: Vec<Range<u32>> = Vec::new();
        for (at, _) in (0..).zip(&is_stored).filter(|(_, stored)| **stored) {
            match ranges.last_mut().filter(|range| range.end == at) {
                Some(range) => range.end = at + 1,
                None => ranges.push(at..at + 1),
            }
        }
        if device.groups.len() > 1 {
            // Up to the last end behind which the other groups have what is read.
            let has = |group: usize, last: u32| {
                let hash = hashes.get(declared, last);
                hash.is_some_and(|hash| self.contains(&key(*hash, group as u8)))
            };
            for range in &mut ranges {
                let ends = |end: &u32| (1..device.groups.len()).all(|group| reads(device, group, *end, &has));
                range.end = range.clone().rev().map(|last| last + 1).find(ends).unwrap_or(range.start);
            }
            ranges.retain(|range| !range.is_empty());
        }
        ranges
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

/// Whether a group has what the query behind `end` blocks of group 0 reads. The last block is asked for first: it is rarely there.
fn reads(device: &Device, group: usize, end: u32, has: &impl Fn(usize, u32) -> bool) -> bool {
    let (size, config) = (device.groups[0].block_tokens, &device.groups[group]);
    let (positions, ratio) = (end * size, config.block_tokens / size);
    let whole = positions / config.block_tokens;
    positions.is_multiple_of(config.block_tokens)
        && (config.optional
            || (config.first_block(positions)..whole).rev().all(|index| has(group, (index + 1) * ratio - 1)))
}
