//! What became cached where, and what is gone: for routers and indexes outside.
//!
//! Owns: a bounded list of events. Must never: be waited for, or walk the cache in one go. Who does not collect in time loses events and is told
//! everything anew, a piece at a time: nodes in the order of their numbers, and of those that were told what happens to them in the meantime.
//!
//! Memory: set aside when recording begins; none is allocated later.

use crate::cache::KvCache;
use crate::nodes::Parent;
use crate::types::{BlockHash, TenantId};

/// One change of what full blocks' content resides on the device, as far as group 0 is concerned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CacheEvent {
    /// `parent`: the block before it; `None` of the first of a chain.
    Stored {
        tenant: TenantId,
        hash: BlockHash,
        parent: Option<BlockHash>,
    },
    Removed {
        tenant: TenantId,
        hash: BlockHash,
    },
    /// [`KvCache::clear`] was asked for; what went is told one by one before it.
    Cleared {
        tenant: Option<TenantId>,
    },
}

/// Events in the order in which they happened, with the tokens of what was stored. Memory for as many as there may be is set aside when it is
/// made.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct EventBatch {
    pub events: Vec<CacheEvent>,
    /// `[stored events, block_tokens]`: of each [`CacheEvent::Stored`] among the events, in their order.
    pub tokens: Vec<u32>,
    /// Events were lost: whatever was told before these counts for nothing. They tell again what resides, beside what goes on.
    pub begins_anew: bool,
    /// What is told anew does not end with these events; until it does, a parent may be told after its child.
    pub incomplete: bool,
}

impl EventBatch {
    pub fn with_capacity(most: usize, block_tokens: u32) -> Self {
        let tokens = Vec::with_capacity(most * block_tokens as usize);
        Self { events: Vec::with_capacity(most), tokens, ..Self::default() }
    }

    /// Whether it says nothing.
    pub fn is_empty(&self) -> bool {
        self.events.is_empty() && !self.begins_anew
    }

    pub fn clear(&mut self) {
        self.events.clear();
        self.tokens.clear();
        (self.begins_anew, self.incomplete) = (false, false);
    }

    fn begin_anew(&mut self) {
        self.clear();
        self.begins_anew = true;
    }

    fn room(&self) -> usize {
        self.events.capacity() - self.events.len()
    }

    /// All of `other`, or nothing.
    fn append(&mut self, other: &mut Self) -> bool {
        let fits = other.events.len() <= self.room();
        if fits {
            self.events.append(&mut other.events);
            self.tokens.append(&mut other.tokens);
        }
        fits
    }
}

/// Nodes that are told anew in one go.
const SCAN: usize = 512;

#[derive(Debug, Default)]
pub(crate) struct Events {
    /// What happened since events were taken. No capacity: nothing is recorded.
    batch: EventBatch,
    /// It was full.
    lost: bool,
    /// The first node that is still to be told anew; what happens to those behind it shows then.
    scan: Option<u32>,
}

impl Events {
    pub fn is_on(&self) -> bool {
        self.batch.events.capacity() > 0
    }

    /// Whether what happens to the node is told.
    pub fn follows(&self, node: u32) -> bool {
        self.is_on() && !self.lost && self.scan.is_none_or(|scan| node < scan)
    }

    /// `tokens`: of a stored one.
    pub fn push(&mut self, event: CacheEvent, tokens: &[u32]) {
        if self.batch.room() == 0 {
            self.batch.clear();
            self.lost = self.is_on();
        } else if !self.lost {
            self.batch.events.push(event);
            self.batch.tokens.extend_from_slice(tokens);
        }
    }
}

impl KvCache {
    /// Records events from now on, at most so many until they are taken. 0: none.
    pub fn record_events(&mut self, most: usize) {
        let size = self.config.block_tokens;
        self.events = Events { batch: EventBatch::with_capacity(most, size), ..Events::default() };
    }

    /// Whether taking events would tell anything.
    pub fn has_events(&self) -> bool {
        let Events { batch, lost, scan, .. } = &self.events;
        *lost || scan.is_some() || !batch.events.is_empty()
    }

    /// Whether there is more to tell even if nothing happens any more.
    pub fn tells_anew(&self) -> bool {
        self.events.lost || self.events.scan.is_some()
    }

    /// Moves what was recorded to the end of `into`. Where events were lost, or there is no room for them, `into` begins anew: this call and
    /// the next tell what resides, [`SCAN`] nodes at a time. O(events).
    pub fn take_events(&mut self, into: &mut EventBatch) {
        let mut recorded = std::mem::take(&mut self.events.batch);
        if self.events.lost || !into.append(&mut recorded) {
            recorded.clear();
            into.begin_anew();
            (self.events.lost, self.events.scan) = (false, Some(0));
        }
        self.events.batch = recorded;
        if let Some(first) = self.events.scan {
            let nodes = into.room().min(SCAN);
            let end = (first + nodes as u32).min(self.nodes.capacity());
            for node in first..end {
                self.tell_node(node, into);
            }
            self.events.scan = (end < self.nodes.capacity()).then_some(end);
        }
        into.incomplete = self.events.scan.is_some();
    }

    pub(crate) fn tell_node(&self, node: u32, into: &mut EventBatch) {
        if self.nodes.is_full(node) {
            into.events.push(self.event(node, true));
            into.tokens.extend_from_slice(self.tokens_of(self.block_of(node)));
        }
    }

    pub(crate) fn record(&mut self, node: u32, stored: bool) {
        if !self.events.follows(node) || self.nodes.node(node).is_tail() {
            return;
        }
        let event = self.event(node, stored);
        let tokens = if stored { self.place_of_tokens(self.block_of(node)) } else { 0..0 };
        self.events.push(event, &self.tokens[tokens]);
    }

    /// Of the block before a node's; `None` of the first of a chain.
    pub(crate) fn parent_hash(&self, node: u32) -> Option<BlockHash> {
        match self.nodes.parent(node) {
            Parent::Node(parent) => Some(self.nodes.node(parent).hash),
            Parent::Root(root) => self.nodes.behind(&root),
        }
    }

    fn event(&self, node: u32, stored: bool) -> CacheEvent {
        let parent = self.parent_hash(node);
        let (tenant, hash) = (self.nodes.node(node).tenant, self.nodes.node(node).hash);
        match stored {
            true => CacheEvent::Stored { tenant, hash, parent },
            false => CacheEvent::Removed { tenant, hash },
        }
    }

    pub(crate) fn record_cleared(&mut self, tenant: Option<TenantId>) {
        if self.events.is_on() {
            self.events.push(CacheEvent::Cleared { tenant }, &[]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::LruLeafFirst;
    use crate::{BlockHashes, CacheConfig, Identity, Root};

    fn event(event: &CacheEvent) -> (bool, BlockHash, Option<BlockHash>) {
        match *event {
            CacheEvent::Stored { hash, parent, .. } => (true, hash, parent),
            CacheEvent::Removed { hash, .. } => (false, hash, None),
            CacheEvent::Cleared { .. } => panic!("nothing was cleared"),
        }
    }

    #[test]
    fn what_is_stored_and_removed_is_told_in_order_and_what_does_not_fit_is_counted() {
        let config = CacheConfig { blocks: 4, block_tokens: 2, bytes_per_block: 1 };
        let mut cache = KvCache::new(config, Box::new(LruLeafFirst::new()));
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
        let [first, second] = [0, 1].map(|at| *hashes.get(at).expect("two blocks"));
        let mut table = cache.empty_table(hashes);
        cache.grow(&mut table, 4, &mut Vec::new()).expect("room");
        cache.commit(&mut table, &tokens, 4).expect("in order");
        cache.release(table, &tokens);
        let mut batch = EventBatch::with_capacity(6, 2);
        cache.take_events(&mut batch);
        let stored = [(true, first, None), (true, second, Some(first))];
        assert_eq!(batch.events.iter().map(event).collect::<Vec<_>>(), stored);
        assert_eq!(batch.tokens, [0, 1, 2, 3]);
        batch.clear();
        cache.clear(Some(TenantId(3)));
        cache.take_events(&mut batch);
        assert!(!batch.begins_anew && batch.tokens.is_empty());
        assert_eq!(batch.events.remove(2), CacheEvent::Cleared { tenant: Some(TenantId(3)) });
        let gone = [(false, second, None), (false, first, None)];
        assert_eq!(batch.events.iter().map(event).collect::<Vec<_>>(), gone);
        assert!(!cache.has_events());
    }

    /// A cache of `blocks` blocks of 2 tokens that has a chain of `chain` of them, and their hashes.
    fn filled(blocks: u32, chain: u32, most: usize) -> (KvCache, BlockHashes) {
        let config = CacheConfig { blocks, block_tokens: 2, bytes_per_block: 1 };
        let mut cache = KvCache::new(config, Box::new(LruLeafFirst::new()));
        cache.record_events(most);
        let hashes = add(&mut cache, 7, 2 * chain);
        (cache, hashes)
    }

    fn add(cache: &mut KvCache, first: u32, tokens: u32) -> BlockHashes {
        let root = Root::derive(&Identity {
            tenant: TenantId(3),
            tenant_secret: &[1; 32],
            model_digest: &[2; 32],
            layout_digest: &[3; 32],
            extra: &[],
        });
        let tokens: Vec<u32> = (first..first + tokens).collect();
        let hashes = BlockHashes::new(&root, &tokens, 2);
        let mut table = cache.empty_table(hashes.clone());
        cache.grow(&mut table, tokens.len() as u32, &mut Vec::new()).expect("room");
        cache.commit(&mut table, &tokens, tokens.len() as u32).expect("in order");
        cache.release(table, &tokens);
        hashes
    }

    #[test]
    fn who_was_late_is_told_everything_anew_in_pieces_whatever_happens_in_between() {
        let (mut cache, _) = filled(3000, 2000, 1100);
        let mut batch = EventBatch::with_capacity(1100, 2);
        let mut held = std::collections::BTreeMap::new();
        let mut pieces = 0;
        loop {
            cache.take_events(&mut batch);
            assert_eq!(batch.begins_anew, pieces == 0, "2000 did not fit");
            let mut tokens = batch.tokens.chunks_exact(2);
            for of in &batch.events {
                let (stored, hash, _) = event(of);
                let known = match stored {
                    true => held.insert(hash.0, tokens.next().expect("each has its tokens").to_vec()),
                    false => Some(held.remove(&hash.0).expect("it was told")).filter(|_| false),
                };
                assert_eq!(known, None, "nothing is told twice");
            }
            pieces += 1;
            let more = batch.incomplete;
            batch.clear();
            if !more {
                break;
            }
            // Some leave that were told and some that were not, and others come.
            add(&mut cache, 10_000 * pieces, 300);
        }
        let resident = cache.resident();
        let tokens = resident.tokens.chunks_exact(2).map(<[u32]>::to_vec);
        let expected = resident.events.iter().map(|of| event(of).1.0).zip(tokens);
        assert_eq!(held, expected.collect());
        assert!(pieces > 4 && !cache.tells_anew() && !cache.has_events(), "{pieces}");
    }

    #[test]
    fn who_has_no_room_is_told_anew_and_without_a_listener_nothing_is_recorded() {
        let (mut cache, hashes) = filled(8, 4, 100);
        let mut small = EventBatch::with_capacity(3, 2);
        cache.take_events(&mut small);
        assert!(small.begins_anew && small.incomplete && small.events.len() <= 3);
        let mut told: Vec<_> = small.events.clone();
        while small.incomplete {
            small.clear();
            cache.take_events(&mut small);
            told.extend_from_slice(&small.events);
        }
        let mut told: Vec<_> = told.iter().map(|of| event(of).1.0).collect();
        let mut expected: Vec<_> = hashes.iter().map(|hash| hash.0).collect();
        told.sort();
        expected.sort();
        assert_eq!(told, expected);
        let (cache, _) = filled(8, 4, 0);
        assert!(!cache.has_events() && !cache.tells_anew());
    }
}
