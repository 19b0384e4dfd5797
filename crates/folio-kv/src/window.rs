//! The pool of one window group: the layers that look back `window_tokens` positions and no further.
//!
//! Owns: the group's block records, its free list, the order in which its cached blocks are given up, and which of its
//! blocks is the *companion* of which block of group 0. Must never: be searched. Nothing finds a block here but through
//! the block of group 0 that holds the same tokens.
//!
//! # The order of giving up
//!
//! A window's blocks are worth something together, and only where somebody goes on: at the end of a conversation, at the
//! end of a shared beginning. What a window merely slid over is worth next to nothing, and a long prompt slides over more
//! blocks than the pool has. So cached blocks stand in two lists, each in order of last use, and *passed* ones go first.
//! *Kept* is what a table held at its end, what was ever part of a hit, and what a lookup missed when it was computed again
//! ([`WindowPool::keep`]).
//!
//! | state | references | companion |
//! |---|---|---|
//! | free | 0 | no |
//! | active, being written | > 0 | no |
//! | active, published | > 0 | yes |
//! | cached | 0 | yes |
//!
//! Invariants: a companion is referenced at most as often as its owner, because every table that holds it holds its owner
//! at the same index; so an owner that leaves the index takes only cached companions along. Owner and companion hold the
//! same number of positions.
//!
//! Cost: O(1) each, `clear` O(cached).

use rustc_hash::FxHashMap;

use crate::account::Ledger;
use crate::policy::NONE;
use crate::stats::WindowStats;
use crate::types::{BlockId, TenantId, WindowConfig};

#[derive(Clone, Debug)]
pub(crate) struct WindowBlock {
    pub tenant: TenantId,
    /// Tables that hold it.
    pub refs: u32,
    /// The block of group 0 it is the companion of, or [`NONE`]: free or private to the tables that hold it.
    pub owner: u32,
    /// Positions written.
    pub filled: u32,
    /// Which list it stands in while cached.
    pub kept: bool,
    /// Neighbours there.
    prev: u32,
    next: u32,
}

impl WindowBlock {
    pub fn is_cached(&self) -> bool {
        self.refs == 0 && self.owner != NONE
    }
}

/// One tenant's blocks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct WindowHeld {
    pub active: u32,
    pub cached: u32,
    pub ledger: Ledger,
}

/// See the module documentation.
pub(crate) struct WindowPool {
    pub config: WindowConfig,
    pub blocks: Vec<WindowBlock>,
    /// Blocks without content; the last is taken first.
    pub free: Vec<u32>,
    /// Per block of group 0: its companion here, or [`NONE`].
    pub companions: Vec<u32>,
    pub stats: WindowStats,
    pub tenants: FxHashMap<TenantId, WindowHeld>,
    /// As last told.
    pub now_us: u64,
    /// Cached blocks that were passed, and that are kept.
    lists: [List; 2],
}

/// Blocks in order of last use.
#[derive(Clone, Copy, Debug)]
struct List {
    oldest: u32,
    newest: u32,
}

impl WindowPool {
    /// `owners`: blocks of group 0.
    pub fn new(config: WindowConfig, owners: u32) -> Self {
        assert!(config.window_tokens > 0, "a window holds at least the position itself");
        assert!(config.blocks < NONE - 1, "block ids are 32 bit with two values reserved");
        let block = WindowBlock {
            tenant: TenantId(0),
            refs: 0,
            owner: NONE,
            filled: 0,
            kept: false,
            prev: NONE,
            next: NONE,
        };
        Self {
            config,
            blocks: vec![block; config.blocks as usize],
            free: (0..config.blocks).rev().collect(),
            companions: vec![NONE; owners as usize],
            stats: WindowStats::new(&config),
            tenants: FxHashMap::default(),
            now_us: 0,
            lists: [List { oldest: NONE, newest: NONE }; 2],
        }
    }

    pub fn block(&self, block: BlockId) -> &WindowBlock {
        &self.blocks[block.0 as usize]
    }

    fn block_mut(&mut self, block: BlockId) -> &mut WindowBlock {
        &mut self.blocks[block.0 as usize]
    }

    /// Blocks that `take` can give: free and cached ones.
    pub fn available(&self) -> u32 {
        self.free.len() as u32 + self.stats.cached_blocks
    }

    /// The block that holds the same tokens as block `owner` of group 0.
    pub fn companion(&self, owner: u32) -> Option<BlockId> {
        let companion = self.companions[owner as usize];
        (companion != NONE).then_some(BlockId(companion))
    }

    /// A block to write in, referenced once: free ones first, then passed ones, then kept ones.
    pub fn take(&mut self, tenant: TenantId) -> Option<BlockId> {
        let block = match self.free.pop() {
            Some(block) => BlockId(block),
            None => {
                let oldest = self.lists.iter().map(|list| list.oldest).find(|oldest| *oldest != NONE);
                let oldest = BlockId(oldest?);
                self.stats.evictions += 1;
                self.drop_content(oldest);
                oldest
            }
        };
        let b = self.block_mut(block);
        debug_assert!(b.refs == 0 && b.owner == NONE, "a block in use was taken");
        b.tenant = tenant;
        b.refs = 1;
        b.filled = 0;
        b.kept = false;
        self.stats.allocations += 1;
        self.stats.active_blocks += 1;
        self.held(tenant).active += 1;
        Some(block)
    }

    /// Sets how many positions of an active, private block are written.
    pub fn set_filled(&mut self, block: BlockId, filled: u32) {
        let b = self.block_mut(block);
        debug_assert!(b.refs > 0 && b.owner == NONE);
        let before = std::mem::replace(&mut b.filled, filled);
        self.stats.active_written_slots += u64::from(filled);
        self.stats.active_written_slots -= u64::from(before);
    }

    /// Makes a private block the companion of block `owner` of group 0, which has none.
    pub fn adopt(&mut self, block: BlockId, owner: u32) {
        debug_assert!(self.companions[owner as usize] == NONE && self.block(block).owner == NONE);
        self.companions[owner as usize] = block.0;
        self.block_mut(block).owner = owner;
    }

    pub fn reference(&mut self, block: BlockId) {
        let b = self.block_mut(block);
        b.refs += 1;
        if b.refs > 1 {
            return;
        }
        let (tenant, filled) = (b.tenant, u64::from(b.filled));
        self.unlink(block);
        self.stats.cached_blocks -= 1;
        self.stats.active_blocks += 1;
        self.stats.active_written_slots += filled;
        let held = self.held(tenant);
        held.cached -= 1;
        held.active += 1;
    }

    /// A table ends with the block, attached it, or computed again what was missed: cached, it goes after those that were
    /// only passed.
    pub fn keep(&mut self, block: BlockId) {
        let b = self.block_mut(block);
        debug_assert!(b.refs > 0, "a cached block stays in its list");
        b.kept = true;
    }

    /// A private block becomes free with its last reference, a companion cached.
    pub fn unreference(&mut self, block: BlockId) {
        let b = self.block_mut(block);
        b.refs -= 1;
        if b.refs > 0 {
            return;
        }
        let (tenant, filled, private) = (b.tenant, u64::from(b.filled), b.owner == NONE);
        self.stats.active_blocks -= 1;
        self.stats.active_written_slots -= filled;
        self.held(tenant).active -= 1;
        if private {
            self.free.push(block.0);
            return;
        }
        self.push_newest(block);
        self.stats.cached_blocks += 1;
        self.held(tenant).cached += 1;
    }

    /// Block `owner` of group 0 was found: its companion was used.
    pub fn touch(&mut self, owner: u32) {
        if let Some(companion) = self.companion(owner).filter(|block| self.block(*block).is_cached()) {
            self.unlink(companion);
            self.push_newest(companion);
        }
    }

    /// Block `owner` of group 0 leaves the index; nobody holds it, so nobody holds its companion.
    pub fn forget(&mut self, owner: u32) {
        if let Some(companion) = self.companion(owner) {
            self.drop_content(companion);
            self.free.push(companion.0);
        }
    }

    /// Drops all cached blocks, of one tenant or of all.
    pub fn clear(&mut self, tenant: Option<TenantId>) {
        for list in self.lists {
            let mut next = list.oldest;
            while next != NONE {
                let block = BlockId(next);
                let b = self.block(block);
                next = b.next;
                if tenant.is_none_or(|tenant| tenant == b.tenant) {
                    self.drop_content(block);
                    self.free.push(block.0);
                }
            }
        }
    }

    /// The cached block is in no state until the caller puts it somewhere.
    fn drop_content(&mut self, block: BlockId) {
        debug_assert!(self.block(block).is_cached());
        self.unlink(block);
        let b = self.block_mut(block);
        let (tenant, owner) = (b.tenant, std::mem::replace(&mut b.owner, NONE));
        self.companions[owner as usize] = NONE;
        self.stats.cached_blocks -= 1;
        self.held(tenant).cached -= 1;
    }

    /// To change a tenant's counts: what it held until now is on its account first.
    fn held(&mut self, tenant: TenantId) -> &mut WindowHeld {
        let held = self.tenants.entry(tenant).or_default();
        held.ledger.settle(self.now_us, held.active, held.cached);
        held
    }

    fn push_newest(&mut self, block: BlockId) {
        let list = &mut self.lists[usize::from(self.blocks[block.0 as usize].kept)];
        let newest = std::mem::replace(&mut list.newest, block.0);
        match newest {
            NONE => list.oldest = block.0,
            newest => self.blocks[newest as usize].next = block.0,
        }
        let b = self.block_mut(block);
        (b.prev, b.next) = (newest, NONE);
    }

    fn unlink(&mut self, block: BlockId) {
        let WindowBlock { prev, next, kept, .. } = *self.block(block);
        let list = &mut self.lists[usize::from(kept)];
        match prev {
            NONE => list.oldest = next,
            prev => self.blocks[prev as usize].next = next,
        }
        match next {
            NONE => list.newest = prev,
            next => self.blocks[next as usize].prev = prev,
        }
    }

    /// Cached blocks in the order they will be given up. For `check`: at most one more per list than there are blocks.
    pub fn cached(&self) -> impl Iterator<Item = BlockId> + '_ {
        let follow = move |list: &List| {
            let mut next = list.oldest;
            let blocks = std::iter::from_fn(move || {
                let block = next;
                (block != NONE).then(|| {
                    next = self.blocks[block as usize].next;
                    BlockId(block)
                })
            });
            blocks.take(self.blocks.len() + 1)
        };
        self.lists.iter().flat_map(follow)
    }
}
