//! From what the cache recorded to messages in one order.
//!
//! Owns: what is told of whom, and that a message says nothing that the one before it contradicts. Must never: tell of a tenant that is not named,
//! or of a block before its parent.
//!
//! Tiers tell what they hold at the start, as they read it, and again where their events were lost; what the device holds is not told again for
//! that.
//!
//! States: *following* (what happens is told at once) -> *rebuilding* (the engine lost events: everything was cleared, and what it tells anew is only
//! collected, for it comes in no order) -> following, which begins with the whole tree.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use folio_engine::{EventFeed, Medium, TierBatch, TierEvent, short_name};
use folio_kv::{CacheEvent, EventBatch, TenantId};
use rustc_hash::FxHashMap;

use crate::counts::{Counts, add};
use crate::log::Log;
use crate::publisher::{CacheNames, Owners};
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
    pub told: CacheNames,
    pub owners: Owners,
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
        self.feed.media().into_iter().for_each(|medium| self.ask(medium));
        let (mut batch, mut of_tiers) = (self.feed.empty_batch(), TierBatch::default());
        while self.feed.take(&mut batch, &mut of_tiers, PATIENCE) {
            self.follow(&batch, &mut of_tiers);
            if self.counts.republish.swap(false, Relaxed) && !self.is_rebuilding {
                self.publish(&[Item::Cleared]);
                let all = self.tree.tell_again();
                self.publish(&all);
                // Tenants may have come whose blocks a tier could not tell before.
                self.feed.media().into_iter().for_each(|medium| self.ask(medium));
            }
        }
        self.publish(&[Item::Cleared]);
    }

    /// Has what a tier holds told.
    fn ask(&self, medium: Medium) {
        if let Err(error) = self.feed.tell_anew(medium, (self.owners)()) {
            tracing::error!(%error, ?medium, "what a tier holds cannot be told");
        }
    }

    fn follow(&mut self, batch: &EventBatch, of_tiers: &mut TierBatch) {
        if batch.begins_anew {
            add(&self.counts.lost, 1);
            // It is told of everything that all is cleared.
            self.tree.lose(Medium::Device, &mut Vec::new());
            if !self.is_rebuilding {
                self.publish(&[Item::Cleared]);
            }
            self.is_rebuilding = true;
        }
        let mut items = Vec::new();
        self.news(batch, &mut items);
        // Behind the device's: a tier gets its blocks from there.
        self.news_of_tiers(of_tiers, &mut items);
        match self.is_rebuilding {
            false => self.publish(&items),
            true if !batch.incomplete => {
                self.is_rebuilding = false;
                let all = self.tree.tell_again();
                self.publish(&all);
            }
            true => {}
        }
        if !(batch.is_empty() && of_tiers.is_empty()) {
            let told = self.counts.blocks.iter().zip(self.tree.told());
            told.for_each(|(count, blocks)| count.store(blocks, Relaxed));
        }
    }

    /// What of a batch is to be told, noted in the tree.
    fn news(&mut self, batch: &EventBatch, news: &mut Vec<Item>) {
        let medium = Medium::Device;
        let mut tokens = batch.tokens.chunks_exact(self.wire.block_tokens as usize);
        for event in &batch.events {
            match *event {
                CacheEvent::Stored { tenant, hash, parent } => {
                    let tokens = tokens.next().expect("the cache tells the tokens of what it stored");
                    let Some(name) = self.name_if_told(tenant) else { continue };
                    let salt = Some(name).filter(|_| self.salted);
                    self.tree.store(Item::Stored { hash, parent, tokens: tokens.into(), salt, medium }, news);
                }
                CacheEvent::Removed { hash, .. } => self.tree.remove(short_name(&hash), medium, news),
                // What went was told block by block; what is in use or pinned is still there.
                CacheEvent::Cleared { .. } => {
                    if self.tree.is_empty() {
                        news.push(Item::Cleared);
                    }
                }
            }
        }
    }

    fn news_of_tiers(&mut self, batch: &mut TierBatch, news: &mut Vec<Item>) {
        for medium in &batch.lost {
            add(&self.counts.lost, 1);
            self.tree.lose(*medium, news);
        }
        for event in batch.events.drain(..) {
            match event {
                TierEvent::Stored { medium, tenant, hash, parent, tokens } => {
                    let Some(name) = self.name_if_told(tenant) else { continue };
                    let salt = Some(name).filter(|_| self.salted);
                    self.tree.store(Item::Stored { hash, parent, tokens: tokens.into(), salt, medium }, news);
                }
                TierEvent::Removed { medium, name } => self.tree.remove(name, medium, news),
            }
        }
        batch.lost.iter().for_each(|medium| self.ask(*medium));
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
