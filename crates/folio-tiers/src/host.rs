//! Blocks in the memory of this process, beside the device's own.
//!
//! Owns: the bytes, which are never more than it was given, and who goes for whom. Must never: hold up whoever looks a block up while
//! another is copied, or give one to another tenant than the one it was kept for.
//!
//! A block is found by its hash and cache group, as on a disk: the hash stands for the tenant's secret, the model, the layout and all tokens up to
//! the block's end. It is not sealed: whoever can read this memory can read the device's, too.
//!
//! What was not stored or loaded for longest says whose content goes: of that tenant the block of the lowest priority, and of these the one that was
//! not wanted for longest. So a priority orders its tenant's content and nobody else's; but what is of less than the default one goes before
//! everything, and what an operator declared behind it. Of one order what is behind counts as older than what is before it, since without the
//! latter nobody asks for it; and no order takes the room of what it brings itself: of a prompt that is larger than the tier the beginning stays.
//! What has a time to live is not found behind it.
//!
//! Memory that holds no block any more, or none yet, is *spare*, and used again: it counts as the tier's like the rest, and is set aside from the
//! start, where there is nothing else to do. It is made and given back outside the lock, for what is page-locked takes its time.
//!
//! Cost: what finding and listing a block costs (`blocks`), and its copy, outside the lock.

mod blocks;

use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use folio_engine::{
    EventFeed, LoadOrder, Medium, Owner, Resident, StoreOrder, Taken, TierEvent, TierStats, short_name,
};
use folio_kv::{BlockHashes, Content, Retention, TenantId};
use folio_model::backend::HostBuffer;
use rustc_hash::FxHashMap;

use crate::clock::{Forward, WallClock};
use crate::lookup::found;
use crate::tier::{Carried, Device, Store};
use crate::types::{BlockKey, Miss};
use blocks::{Block, Blocks};

/// See the module documentation.
pub struct HostStore {
    bytes_max: u64,
    kept: Mutex<Kept>,
    clock: Forward,
    /// Who is told what is held.
    feed: OnceLock<Arc<EventFeed>>,
}

#[derive(Default)]
struct Kept {
    blocks: Blocks,
    /// Of all blocks, and of those that are being copied in.
    bytes: u64,
    /// By their length; somebody may still read one. And the bytes of these, and of those that are being made.
    spares: FxHashMap<usize, Vec<Arc<dyn HostBuffer>>>,
    spare_bytes: u64,
    bytes_stored: u64,
    evicted: u64,
    expired: u64,
    /// Not what they had to be: another tenant's, another length.
    wrong: [u64; 2],
}

/// What is told of a block, where anything is.
fn stored(blocks: &Blocks, at: u32) -> Option<TierEvent> {
    let (parent, tokens) = blocks.lineage(at)?.clone();
    let (tenant, hash) = (blocks[at].tenant, blocks[at].key.hash);
    Some(TierEvent::Stored { medium: Medium::Host, tenant, hash, parent, tokens })
}

impl HostStore {
    /// `clock`: by which content expires.
    pub fn new(bytes_max: u64, clock: WallClock) -> Arc<Self> {
        let clock = Forward::new(clock, 0);
        Arc::new(Self { bytes_max, kept: Mutex::default(), clock, feed: OnceLock::new() })
    }

    /// The lock, and nothing behind it that has expired.
    fn fresh(&self) -> MutexGuard<'_, Kept> {
        let mut kept = self.lock();
        while let Some((_, key)) = kept.blocks.first_end().filter(|(end, _)| self.clock.is_over(*end)) {
            self.remove(&mut kept, &key);
            kept.expired += 1;
        }
        kept
    }

    fn lock(&self) -> MutexGuard<'_, Kept> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Memory for a block, charged; that of others, if there must be, that were last wanted before `since`.
    fn take(&self, device: &Device, length: usize, since: u64) -> Option<Arc<dyn HostBuffer>> {
        let mut given_back = Vec::new();
        let mut kept = self.fresh();
        let spare = loop {
            let spare = kept.take_spare(length);
            if spare.is_some() || kept.has_room(length, self.bytes_max) {
                break spare;
            }
            match kept.take_other_spare(length) {
                Some(of_another_group) => given_back.push(of_another_group),
                None => self.evict(&mut kept, since)?,
            }
        };
        kept.bytes += length as u64;
        drop(kept);
        drop(given_back);
        Some(spare.unwrap_or_else(|| device.memory.host_buffer(length)))
    }

    /// Content goes whose turn it is.
    fn evict(&self, kept: &mut Kept, since: u64) -> Option<()> {
        let (oldest, weakest) = kept.blocks.next_to_go(since)?;
        let key = kept.blocks[weakest].key;
        self.remove(kept, &key);
        if weakest != oldest {
            // Another paid for it; next time its turn comes as if it were wanted now.
            kept.blocks.want(oldest);
        }
        kept.evicted += 1;
        Some(())
    }

    /// Under the lock, so that events of a block come in their order.
    fn remove(&self, kept: &mut Kept, key: &BlockKey) {
        let Some(block) = kept.blocks.remove(key) else { return };
        kept.spare(block.bytes);
        if let (Some(feed), Some(_)) = (self.feed.get(), &block.lineage) {
            feed.push(TierEvent::Removed { medium: Medium::Host, name: short_name(&key.hash) });
        }
    }
}

impl Resident for HostStore {
    fn tell(&self, owners: &[Owner], tell: &mut dyn FnMut(TierEvent) -> Taken) {
        let keys: Vec<BlockKey> = self.lock().blocks.keys().filter(|key| key.group == 0).copied().collect();
        for key in keys {
            loop {
                let kept = self.lock();
                let is_told = |at: &u32| owners.iter().any(|(tenant, _)| *tenant == kept.blocks[*at].tenant);
                let event = kept.blocks.find(&key).filter(is_told).and_then(|at| stored(&kept.blocks, at));
                match event.map_or(Taken::Yes, &mut *tell) {
                    Taken::Yes => break,
                    Taken::Never => return,
                    Taken::NotYet => {}
                }
                drop(kept);
                std::thread::sleep(Duration::from_millis(1));
            }
        }
    }
}

impl Kept {
    fn has_room(&self, length: usize, bytes_max: u64) -> bool {
        self.bytes + self.spare_bytes + length as u64 <= bytes_max
    }

    /// What was charged for a block holds none any more.
    fn spare(&mut self, bytes: Arc<dyn HostBuffer>) {
        let length = bytes.bytes().len();
        self.bytes -= length as u64;
        self.spare_bytes += length as u64;
        self.spares.entry(length).or_default().push(bytes);
    }

    /// Memory of this length that nobody reads.
    fn take_spare(&mut self, length: usize) -> Option<Arc<dyn HostBuffer>> {
        let spares = self.spares.get_mut(&length)?;
        let at = spares.iter().rposition(|spare| Arc::strong_count(spare) == 1)?;
        self.spare_bytes -= length as u64;
        Some(spares.swap_remove(at))
    }

    /// The same of any other length.
    fn take_other_spare(&mut self, length: usize) -> Option<Arc<dyn HostBuffer>> {
        let others: Vec<usize> = self.spares.keys().copied().filter(|other| *other != length).collect();
        others.into_iter().find_map(|other| self.take_spare(other))
    }

    /// A block of this tenant and length.
    fn find(&mut self, key: &BlockKey, tenant: TenantId, length: usize) -> Option<u32> {
        let at = self.blocks.find(key)?;
        let block = &self.blocks[at];
        let kept = block.bytes.as_ref().map_or(0, |bytes| bytes.bytes().len());
        let wrong = [block.tenant != tenant, kept != length];
        if let Some(reason) = wrong.iter().position(|wrong| *wrong) {
            self.wrong[reason] += 1;
            return None;
        }
        Some(at)
    }

    /// These were wanted now, the first the most.
    fn touch(&mut self, contents: &[Content]) {
        for content in contents.iter().rev() {
            if let Some(at) = self.blocks.find(&content.into()) {
                self.blocks.want(at);
            }
        }
    }
}

impl Store for HostStore {
    fn listen(self: Arc<Self>, feed: &Arc<EventFeed>) {
        if self.feed.set(feed.clone()).is_ok() {
            let tier: Arc<dyn Resident> = self;
            feed.add_tier(Medium::Host, &tier);
        }
    }

    fn swaps(&self) -> bool {
        true
    }

    fn find(&self, device: &Device, hashes: &BlockHashes, most: u32) -> Vec<Range<u32>> {
        let kept = self.fresh();
        found(device, hashes, most, |key| kept.blocks.find(key).is_some())
    }

    fn load(&self, device: &Device, order: &LoadOrder, _: &mut Vec<u8>) -> Carried {
        let done = Carried::one_by_one(device, &order.contents, |_, content, length| {
            let mut kept = self.fresh();
            let block = kept.find(&content.into(), order.root.tenant, length)?;
            let bytes = kept.blocks[block].bytes.clone()?;
            drop(kept);
            device.memory.write(content.group as usize, content.block.0, bytes.bytes());
            Some(true)
        });
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
        let tenant = order.root.tenant;
        let since = {
            let mut kept = self.lock();
            let since = kept.blocks.next_want();
            kept.touch(&order.contents);
            since
        };
        let done = Carried::one_by_one(device, &order.contents, |at, content, length| {
            let key = BlockKey::from(content);
            // Without one it has expired; what stands behind it is worth no more.
            let Retention { priority, ttl_us } = order.lineage.retention(at)?;
            let expires_s = self.clock.expires_s(ttl_us.map(Duration::from_micros)).unwrap_or(0);
            let mut kept = self.fresh();
            if let Some(block) = kept.find(&key, tenant, length) {
                kept.blocks.strengthen(block, priority, expires_s);
                return Some(false);
            }
            drop(kept);
            let mut bytes = self.take(device, length, since)?;
            let into = Arc::get_mut(&mut bytes).expect("nobody else has it");
            device.memory.read(content.group as usize, content.block.0, into.bytes_mut());
            // Asked behind the copy: only then is it what was leased.
            let held = holds();
            let mut kept = self.lock();
            if !held {
                kept.spare(bytes);
                return None;
            }
            // What another thread put there meanwhile, or what was not what it had to be.
            self.remove(&mut kept, &key);
            kept.bytes_stored += length as u64;
            let feed = self.feed.get().filter(|_| key.group == 0);
            let lineage = feed.map(|_| {
                let (parent, tokens) = order.lineage.of(&order.contents, at);
                (parent, tokens.into())
            });
            let block = Block { tenant, priority, expires_s, bytes, lineage };
            let block = kept.blocks.insert(key, block);
            if let Some((feed, event)) = feed.zip(stored(&kept.blocks, block)) {
                feed.push(event);
            }
            Some(true)
        });
        self.lock().touch(&order.contents[..order.contents.len() - done.left]);
        done
    }

    fn stats(&self) -> TierStats {
        let kept = self.lock();
        let reasons = [Miss::Key, Miss::Length, Miss::Expired].map(Miss::name);
        let [key, length] = kept.wrong;
        TierStats {
            name: "host",
            blocks: kept.blocks.len().into(),
            bytes: kept.bytes,
            bytes_limit: self.bytes_max,
            bytes_ready: Some(kept.bytes + kept.spare_bytes),
            bytes_written: kept.bytes_stored,
            payload_written: kept.bytes_stored,
            blocks_evicted: kept.evicted,
            misses: reasons.into_iter().zip([key, length, kept.expired]).collect(),
            ..TierStats::default()
        }
    }

    fn prepare(&self, device: &Device) -> bool {
        // Of the group that has the most; what another needs takes the place of some.
        let length = device.block_bytes(0);
        let mut kept = self.lock();
        if length == 0 || !kept.has_room(length, self.bytes_max) {
            return false;
        }
        kept.spare_bytes += length as u64;
        drop(kept);
        let bytes = device.memory.host_buffer(length);
        self.lock().spares.entry(length).or_default().push(bytes);
        true
    }

    fn tick(&self) {
        drop(self.fresh());
    }

    fn close(&self) {}
}
