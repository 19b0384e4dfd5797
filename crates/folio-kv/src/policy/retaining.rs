//! What callers said about how long blocks are to be kept, before the policy's own order.
//!
//! Owns: priority, time to live and pins of every indexed block, and the order of those that have any. Must never: rank
//! blocks nobody said anything about (the policy inside does), look at a tenant, or read a clock.
//!
//! # Order of eviction
//!
//! 1. expired blocks, then those of less than the default priority, lowest first;
//! 2. blocks of the default priority, in the order of the policy inside;
//! 3. blocks of more than the default priority, lowest first;
//! 4. pinned blocks: never.
//!
//! Inside one priority the block freed longest ago goes first. A block is a candidate once it has no children, so a parent
//! outlives its children whatever either was given.
//!
//! # What the policy inside sees
//!
//! A freed block that is not of the default priority is not its business: it is told that the block was removed, and that
//! it was inserted again when it is used or becomes ordinary. So its guarantees hold as written, and what it learns from
//! removed content goes on.
//!
//! Cost: every hook is O(1) on top of the policy's own (expiry amortized, see `due`), and nothing is allocated after
//! `resize`.

use super::due::Due;
use super::lists::Lists;
use super::{BlockMeta, EvictionPolicy};
use crate::retention::{DEFAULT_PRIORITY, PRIORITY_MAX, Retention};
use crate::types::{BlockId, TenantId};

/// List 0 is of expired blocks, then one for each priority.
const LISTS: usize = PRIORITY_MAX as usize + 2;
const DEFAULT_LIST: usize = DEFAULT_PRIORITY as usize + 1;

/// Whose business a block is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Place {
    /// In use, or not indexed.
    #[default]
    Used,
    /// Freed and ordinary: the policy inside has it.
    Inner,
    /// Freed and of another list than the default one.
    Listed,
    /// Freed and pinned.
    Pinned,
}

#[derive(Clone, Copy, Debug, Default)]
struct Kept {
    place: Place,
    /// Freed and without children.
    leaf: bool,
    /// Somebody said how to keep it. Until then it takes whatever is said first.
    told: bool,
    expired: bool,
    retention: Retention,
    pins: u32,
    /// Hits before the policy inside last saw it inserted.
    hits_before: u32,
}

impl Kept {
    fn list(&self) -> usize {
        if self.expired { 0 } else { usize::from(self.retention.priority) + 1 }
    }

    fn home(&self) -> Place {
        match self.list() {
            _ if self.pins > 0 => Place::Pinned,
            DEFAULT_LIST => Place::Inner,
            _ => Place::Listed,
        }
    }
}

/// See the module documentation.
pub(crate) struct Retaining {
    inner: Box<dyn EvictionPolicy>,
    kept: Vec<Kept>,
    /// Freed blocks without children, by [`Kept::list`].
    lists: Lists,
    due: Due,
    /// Blocks in [`Place::Listed`].
    listed: u32,
    /// Of the blocks in [`Place::Inner`], those without children.
    inner_leaves: u32,
}

impl Retaining {
    pub fn new(inner: Box<dyn EvictionPolicy>) -> Self {
        Self {
            inner,
            kept: Vec::new(),
            lists: Lists::new(0, LISTS),
            due: Due::new(0),
            listed: 0,
            inner_leaves: 0,
        }
    }

    pub fn now(&self) -> u64 {
        self.due.now()
    }

    pub fn advance(&mut self, now_us: u64) {
        self.due.advance(now_us);
    }

    /// A block whose time to live has passed; the caller answers with [`Retaining::expire`].
    pub fn next_due(&mut self) -> Option<u32> {
        self.due.next()
    }

    pub fn expire(&mut self, block: u32, meta: &BlockMeta) {
        self.kept[block as usize].expired = true;
        self.settle(block, meta);
    }

    pub fn is_pinned(&self, block: u32) -> bool {
        self.kept[block as usize].pins > 0
    }

    pub fn pins(&self, block: u32) -> u32 {
        self.kept[block as usize].pins
    }

    /// What holds for the block now; `None` once its time to live has passed.
    pub fn retention(&self, block: u32) -> Option<Retention> {
        let kept = &self.kept[block as usize];
        (!kept.expired).then_some(kept.retention)
    }

    pub fn expires(&self, block: u32) -> Option<u64> {
        self.due.expires(block)
    }

    /// The stronger of what holds for the block and `wanted`; a time to live begins anew. Who wants nothing in particular
    /// wants the default priority, and leaves a time to live as it is.
    pub fn retain(&mut self, block: u32, wanted: Option<Retention>, meta: &BlockMeta) {
        let kept = &mut self.kept[block as usize];
        let moved = kept.list();
        let stronger = match wanted {
            Some(wanted) => wanted > kept.retention,
            None => kept.retention.priority < DEFAULT_PRIORITY,
        };
        if !kept.told || kept.expired || stronger {
            kept.retention = wanted.unwrap_or_default();
        }
        kept.told = true;
        kept.expired = false;
        let moved = moved != kept.list();
        match kept.retention.ttl_us {
            Some(ttl) => self.due.set(block, self.due.now().saturating_add(ttl.max(1))),
            None => self.due.clear(block),
        }
        if moved {
            self.settle(block, meta);
        }
    }

    pub fn pin(&mut self, block: u32, meta: &BlockMeta) {
        self.kept[block as usize].pins += 1;
        self.settle(block, meta);
    }

    pub fn unpin(&mut self, block: u32, meta: &BlockMeta) {
        self.kept[block as usize].pins -= 1;
        self.settle(block, meta);
    }

    /// The meta of a block as the policy inside knows it.
    fn inner_meta(&self, block: u32, meta: &BlockMeta) -> BlockMeta {
        BlockMeta { hits: meta.hits - self.kept[block as usize].hits_before, ..*meta }
    }

    fn insert_inside(&mut self, block: u32, meta: &BlockMeta) {
        self.kept[block as usize].hits_before = meta.hits;
        self.inner.on_insert(BlockId(block), &self.inner_meta(block, meta));
    }

    /// Puts a freed block where it belongs now.
    fn settle(&mut self, block: u32, meta: &BlockMeta) {
        let kept = self.kept[block as usize];
        let home = kept.home();
        let stays = kept.place == home && home != Place::Listed;
        if kept.place == Place::Used || stays {
            return;
        }
        if kept.place == Place::Inner {
            let meta = self.inner_meta(block, meta);
            self.leave(block);
            self.inner.on_remove(BlockId(block), &meta);
        } else {
            self.leave(block);
            if home == Place::Inner {
                self.insert_inside(block, meta);
                self.inner.on_free(BlockId(block), &self.inner_meta(block, meta));
            }
        }
        self.enter(block, home);
    }

    /// Takes a freed block out of its place. The policy inside is the caller's business.
    fn leave(&mut self, block: u32) {
        let kept = &mut self.kept[block as usize];
        match std::mem::replace(&mut kept.place, Place::Used) {
            Place::Inner => self.inner_leaves -= u32::from(kept.leaf),
            Place::Listed => {
                self.listed -= 1;
                self.lists.remove(block);
            }
            Place::Pinned | Place::Used => {}
        }
    }

    fn enter(&mut self, block: u32, place: Place) {
        let kept = &mut self.kept[block as usize];
        kept.place = place;
        match place {
            Place::Inner => self.inner_leaves += u32::from(kept.leaf),
            Place::Listed => {
                self.listed += 1;
                if kept.leaf {
                    self.lists.push_youngest(kept.list(), block);
                }
            }
            Place::Pinned | Place::Used => {}
        }
    }

    /// What does not hold for a block, in words. `freed`: it is indexed and in no table.
    pub fn check(&self, block: u32, freed: bool, children: u32) -> Result<(), &'static str> {
        let kept = &self.kept[block as usize];
        if (kept.place != Place::Used) != freed {
            return Err("is freed and in use at once, for the eviction order");
        }
        if freed && (kept.place != kept.home() || kept.leaf != (children == 0)) {
            return Err("is in the wrong place of the eviction order");
        }
        let listed = kept.place == Place::Listed && kept.leaf;
        if self.lists.list_of(block) != listed.then(|| kept.list()) {
            return Err("is in the wrong list of the eviction order");
        }
        if self.due.expires(block).is_some() != (!kept.expired && kept.retention.ttl_us.is_some()) {
            return Err("has a time to live that does not run");
        }
        Ok(())
    }
}

impl EvictionPolicy for Retaining {
    fn resize(&mut self, blocks: u32) {
        self.inner.resize(blocks);
        self.kept = vec![Kept::default(); blocks as usize];
        self.lists = Lists::new(blocks, LISTS);
        self.due = Due::new(blocks);
    }

    fn on_insert(&mut self, block: BlockId, meta: &BlockMeta) {
        self.kept[block.0 as usize] = Kept::default();
        self.insert_inside(block.0, meta);
    }

    fn on_hit(&mut self, block: BlockId, meta: &BlockMeta) {
        let kept = &self.kept[block.0 as usize];
        match kept.place {
            Place::Used | Place::Inner => self.inner.on_hit(block, &self.inner_meta(block.0, meta)),
            Place::Listed if kept.leaf => {
                self.lists.remove(block.0);
                self.lists.push_youngest(kept.list(), block.0);
            }
            Place::Listed | Place::Pinned => {}
        }
    }

    fn on_free(&mut self, block: BlockId, meta: &BlockMeta) {
        let inner_meta = self.inner_meta(block.0, meta);
        self.inner.on_free(block, &inner_meta);
        let kept = &mut self.kept[block.0 as usize];
        kept.leaf = meta.children == 0;
        let home = kept.home();
        if home != Place::Inner {
            self.inner.on_remove(block, &inner_meta);
        }
        self.enter(block.0, home);
    }

    fn on_use(&mut self, block: BlockId, meta: &BlockMeta) {
        let place = self.kept[block.0 as usize].place;
        self.leave(block.0);
        match place {
            Place::Inner | Place::Used => self.inner.on_use(block, &self.inner_meta(block.0, meta)),
            Place::Listed | Place::Pinned => self.insert_inside(block.0, meta),
        }
    }

    fn on_leaf(&mut self, block: BlockId, meta: &BlockMeta) {
        let inner_meta = self.inner_meta(block.0, meta);
        let kept = &mut self.kept[block.0 as usize];
        let freed = kept.place != Place::Used;
        kept.leaf = freed;
        match kept.place {
            Place::Inner => {
                self.inner_leaves += 1;
                self.inner.on_leaf(block, &inner_meta);
            }
            Place::Used => self.inner.on_leaf(block, &inner_meta),
            // Its child was the oldest: the rest of the chain goes before younger chains do.
            Place::Listed => self.lists.push_oldest(kept.list(), block.0),
            Place::Pinned => {}
        }
    }

    fn on_remove(&mut self, block: BlockId, meta: &BlockMeta) {
        debug_assert_eq!(self.kept[block.0 as usize].pins, 0, "a pinned block stays");
        let inside = self.kept[block.0 as usize].place == Place::Inner;
        let inner_meta = self.inner_meta(block.0, meta);
        self.leave(block.0);
        self.due.clear(block.0);
        self.kept[block.0 as usize] = Kept::default();
        if inside {
            self.inner.on_remove(block, &inner_meta);
        }
    }

    fn victim(&mut self, taker: TenantId) -> Option<BlockId> {
        let oldest = |lists: &Lists, from, to| {
            lists.first_occupied(from, to).and_then(|list| lists.oldest(list)).map(BlockId)
        };
        if let Some(weak) = oldest(&self.lists, 0, DEFAULT_LIST) {
            return Some(weak);
        }
        let ordinary = (self.inner_leaves > 0).then(|| self.inner.victim(taker)).flatten();
        ordinary.or_else(|| oldest(&self.lists, DEFAULT_LIST + 1, LISTS))
    }

    fn evictable(&self) -> u32 {
        self.inner.evictable() + self.listed
    }
}
