//! From what the cache recorded to messages in one order.
//!
//! Owns: what is told of whom, and that a message says nothing that the one before it contradicts. Must never: tell of a tenant that is not named,
//! or of a block before its parent.
//!
//! States: *following* (what happens is told at once) -> *rebuilding* (the engine lost events: everything was cleared, and what it tells anew is only
//! collected, for it comes in no order) -> following, which begins with the whole tree.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use folio_engine::EventFeed;
use folio_kv::{CacheEvent, EventBatch, TenantId};
use rustc_hash::FxHashMap;

use crate::counts::{Counts, add};
use crate::log::Log;
use crate::publisher::Told;
use crate::tree::Tree;
use crate::wire::{Item, Wire};

/// Blocks of one message, and their tokens.
const BLOCKS_MAX: usize = 2048;
const TOKENS_MAX: usize = 1 << 16;
/// How long it sleeps at most.
const PATIENCE: Duration = Duration::from_secs(1);
/// Tenants of which it remembers whether they are told.
const TENANTS_MAX: usize = 1 << 16;

/// See the module documentation.
pub(crate) struct Sequencer {
    pub feed: Arc<EventFeed>,
    pub log: Arc<Log>,
    pub counts: Arc<Counts>,
    pub wire: Wire,
    pub told: Told,
    /// Whether chains have their tenant's name as extra key.
    pub salted: bool,
    pub tree: Tree,
    pub known: FxHashMap<TenantId, Option<Arc<str>>>,
    pub is_rebuilding: bool,
}

impl Sequencer {
    /// Until the feed is closed.
    pub fn run(mut self) {
        // Whatever an earlier process told is void.
        self.publish(&[Item::Cleared]);
        let mut batch = self.feed.empty_batch();
        while self.feed.take(&mut batch, PATIENCE) {
            self.follow(&batch);
            if self.counts.republish.swap(false, Relaxed) && !self.is_rebuilding {
                self.publish(&[Item::Cleared]);
                self.publish(&self.tree.items());
            }
        }
        self.publish(&[Item::Cleared]);
    }

    fn follow(&mut self, batch: &EventBatch) {
        if batch.begins_anew {
            add(&self.counts.lost, 1);
            self.tree.clear();
            if !self.is_rebuilding {
                self.publish(&[Item::Cleared]);
            }
            self.is_rebuilding = true;
        }
        let items = self.news(batch);
        match self.is_rebuilding {
            false => self.publish(&items),
            true if !batch.incomplete => {
                self.is_rebuilding = false;
                self.publish(&self.tree.items());
            }
            true => {}
        }
        if !batch.is_empty() {
            self.counts.blocks.store(self.tree.len(), Relaxed);
        }
    }

    /// What of a batch is to be told, noted in the tree.
    fn news(&mut self, batch: &EventBatch) -> Vec<Item> {
        let mut tokens = batch.tokens.chunks_exact(self.wire.block_tokens as usize);
        let mut items = Vec::new();
        for event in &batch.events {
            let item = match *event {
                CacheEvent::Stored { tenant, hash, parent } => {
                    let tokens = tokens.next().expect("the cache tells the tokens of what it stored");
                    let Some(name) = self.name_if_told(tenant) else { continue };
                    let salt = Some(name).filter(|_| self.salted);
                    Item::Stored { hash, parent, tokens: tokens.into(), salt }
                }
                CacheEvent::Removed { hash, .. } => Item::Removed { hash },
                // What went was told block by block; what is in use or pinned is still there.
                CacheEvent::Cleared { .. } => {
                    if self.tree.is_empty() {
                        items.push(Item::Cleared);
                    }
                    continue;
                }
            };
            if self.tree.apply(&item) {
                items.push(item);
            }
        }
        items
    }

    fn name_if_told(&mut self, tenant: TenantId) -> Option<Arc<str>> {
        if self.known.len() >= TENANTS_MAX {
            self.known.clear();
        }
        self.known.entry(tenant).or_insert_with(|| (self.told)(tenant)).clone()
    }

    fn publish(&self, items: &[Item]) {
        let blocks = (TOKENS_MAX / self.wire.block_tokens as usize).clamp(1, BLOCKS_MAX);
        for items in items.chunks(blocks) {
            let time = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |time| time.as_secs_f64());
            self.log.push(self.wire.batch(time, items));
            self.counts.count(items);
        }
    }
}
