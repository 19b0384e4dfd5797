//! Blocks in the memory of this process, beside the device's own.
//!
//! Owns: the bytes, which are never more than it was given, and who goes for whom. Must never: hold up whoever looks a block up while
//! another is copied, or give one to another tenant than the one it was kept for.
//!
//! A block is found by its hash and cache group, as on a disk: the hash stands for the tenant's secret, the model, the layout and all tokens up to
//! the block's end. It is not sealed: whoever can read this memory can read the device's, too.
//!
//! What was not stored or loaded for longest goes. Of one order what is behind counts as older than what is before it, since without the latter
//! nobody asks for it; and no order takes the room of what it brings itself: of a prompt that is larger than the tier the beginning stays.
//!
//! Cost: O(log blocks) a block, and its copy, outside the lock. The memory of who went is used again.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use folio_engine::{LoadOrder, StoreOrder, TierStats};
use folio_kv::{BlockHashes, Content, TenantId};
use rustc_hash::FxHashMap;

use crate::lookup::found;
use crate::tier::{Carried, Device, Store};
use crate::types::{BlockKey, Miss};

/// See the module documentation.
pub struct HostStore {
    bytes_max: u64,
    kept: Mutex<Kept>,
}

#[derive(Default)]
struct Kept {
    blocks: FxHashMap<BlockKey, Block>,
    /// By when they were last wanted, the first to go first.
    order: BTreeMap<u64, BlockKey>,
    last: u64,
    /// Of all blocks, and of those that are being copied in.
    bytes: u64,
    bytes_stored: u64,
    evicted: u64,
    /// Not what they had to be: another tenant's, another length.
    wrong: [u64; 2],
}

struct Block {
    tenant: TenantId,
    used: u64,
    bytes: Arc<Vec<u8>>,
}

impl HostStore {
    pub fn new(bytes_max: u64) -> Arc<Self> {
        Arc::new(Self { bytes_max, kept: Mutex::default() })
    }

    fn lock(&self) -> MutexGuard<'_, Kept> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Memory for a block, charged; that of others, if there must be, that were last wanted before `since`.
    fn take(&self, length: usize, since: u64) -> Option<Arc<Vec<u8>>> {
        let mut kept = self.lock();
        let mut freed = None;
        while kept.bytes + length as u64 > self.bytes_max {
            let (_, key) = kept.order.first_key_value().filter(|(used, _)| **used < since)?;
            let key = *key;
            let block = kept.remove(&key)?;
            kept.evicted += 1;
            freed = Some(block.bytes);
        }
        kept.bytes += length as u64;
        drop(kept);
        // Somebody may still read it, or it may be of another group.
        let freed = freed.filter(|bytes| bytes.len() == length && Arc::strong_count(bytes) == 1);
        Some(freed.unwrap_or_else(|| Arc::new(vec![0; length])))
    }
}

impl Kept {
    fn remove(&mut self, key: &BlockKey) -> Option<Block> {
        let block = self.blocks.remove(key)?;
        self.order.remove(&block.used);
        self.bytes -= block.bytes.len() as u64;
        Some(block)
    }

    /// A block of this tenant and length.
    fn get(&mut self, key: &BlockKey, tenant: TenantId, length: usize) -> Option<Arc<Vec<u8>>> {
        let block = self.blocks.get(key)?;
        let wrong = [block.tenant != tenant, block.bytes.len() != length];
        if let Some(reason) = wrong.iter().position(|wrong| *wrong) {
            self.wrong[reason] += 1;
            return None;
        }
        Some(block.bytes.clone())
    }

    /// These were wanted now, the first the most.
    fn touch(&mut self, contents: &[Content]) {
        for content in contents.iter().rev() {
            let key = BlockKey::from(content);
            if let Some(block) = self.blocks.get_mut(&key) {
                self.last += 1;
                self.order.remove(&std::mem::replace(&mut block.used, self.last));
                self.order.insert(self.last, key);
            }
        }
    }
}

impl Store for HostStore {
    fn swaps(&self) -> bool {
        true
    }

    fn find(&self, device: &Device, hashes: &BlockHashes, most: u32) -> Vec<Range<u32>> {
        let kept = self.lock();
        found(device, hashes, most, |key| kept.blocks.contains_key(key))
    }

    fn load(&self, device: &Device, order: &LoadOrder, _: &mut Vec<u8>) -> Carried {
        let mut done = Carried { left: order.contents.len(), ..Carried::default() };
        for content in &order.contents {
            let length = device.block_bytes(content.group);
            let Some(bytes) = self.lock().get(&content.into(), order.root.tenant, length) else { break };
            device.memory.write(content.group as usize, content.block.0, &bytes);
            done = Carried { blocks: done.blocks + 1, bytes: done.bytes + length, left: done.left - 1 };
        }
        self.lock().touch(&order.contents[..done.blocks]);
        done
    }

    fn store(
        &self,
        device: &Device,
        order: &StoreOrder,
        holds: &dyn Fn() -> bool,
        _: &mut Vec<u8>,
    ) -> Carried {
        let mut done = Carried::default();
        let tenant = order.root.tenant;
        let since = {
            let mut kept = self.lock();
            let since = kept.last + 1;
            kept.touch(&order.contents);
            since
        };
        for (at, content) in order.contents.iter().enumerate() {
            let (key, length) = (BlockKey::from(content), device.block_bytes(content.group));
            if self.lock().get(&key, tenant, length).is_some() {
                continue;
            }
            let copied = self.take(length, since).and_then(|mut bytes| {
                let into = Arc::get_mut(&mut bytes).expect("nobody else has it");
                device.memory.read(content.group as usize, content.block.0, into);
                // Asked behind the copy: only then is it what was leased.
                let held = holds();
                let mut kept = self.lock();
                if !held {
                    kept.bytes -= length as u64;
                    return None;
                }
                // What another thread put there meanwhile, or what was not what it had to be.
                kept.remove(&key);
                kept.last += 1;
                let used = kept.last;
                kept.bytes_stored += length as u64;
                kept.order.insert(used, key);
                kept.blocks.insert(key, Block { tenant, used, bytes });
                Some(())
            });
            if copied.is_none() {
                done.left = order.contents.len() - at;
                break;
            }
            done = Carried { blocks: done.blocks + 1, bytes: done.bytes + length, left: 0 };
        }
        self.lock().touch(&order.contents[..order.contents.len() - done.left]);
        done
    }

    fn stats(&self) -> TierStats {
        let kept = self.lock();
        let reasons = [Miss::Key, Miss::Length].map(Miss::name);
        TierStats {
            name: "host",
            blocks: kept.blocks.len() as u64,
            bytes: kept.bytes,
            bytes_limit: self.bytes_max,
            bytes_written: kept.bytes_stored,
            blocks_evicted: kept.evicted,
            misses: reasons.into_iter().zip(kept.wrong).collect(),
            ..TierStats::default()
        }
    }

    fn close(&self) {}
}
