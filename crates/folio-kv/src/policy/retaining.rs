//! What callers said about how long their blocks are to be kept, beside the policy's own order.
//!
//! Owns: the retention of every indexed block, as one sort key, and per tenant the order of what may go. Must never: let what
//! one tenant says cost another tenant a block, or read a clock.
//!
//! # The key
//!
//! A block's *level*: expired is 0, then every priority, and above all of a client's what an operator declared.
//!
//! # Order of eviction
//!
//! 1. What its owner offers to whomever: expired blocks, then those of less than the default priority, lowest first. Tenants
//!    that offer the same take turns.
//! 2. The policy inside says *whose* block goes. It ranks all other blocks as if nobody had said anything; of the tenant
//!    whose block it names the weakest goes: the named one, unless that has a raised priority and the tenant something of
//!    less, of which it is the one freed longest ago. So a raised priority is paid for with the tenant's own blocks, and
//!    another tenant loses exactly the blocks that it would lose if nothing had been said.
//! 3. What an operator declared.
//!
//! A block is a candidate once it has no children, so a parent outlives its children whatever either was given. What a pin
//! holds is in use, and no candidate.
//!
//! # What the policy inside sees
//!
//! A freed block of 1 or 3 is not its business: it is told that the block was removed, and that it was inserted again when
//! it is used or becomes ordinary. So its guarantees hold as written, and what it learns from removed content goes on.
//!
//! Cost: 9 bytes a block, some 50 more for each with a time to live. Hooks are O(1) on top of the policy's own where nobody
//! said anything, else O(log lists).

use super::due::Due;
use super::leaves::Leaves;
use super::{BlockMeta, EvictionPolicy};
use crate::retention::{DEFAULT_PRIORITY, OPERATOR_PRIORITY, Retention};
use crate::types::{BlockId, TenantId};

const EXPIRED: u8 = 0;
const DEFAULT: u8 = DEFAULT_PRIORITY + 1;
const OPERATOR: u8 = OPERATOR_PRIORITY + 1;
/// Ordinary, and takes whatever is said first.
const UNTOLD: u8 = 0x7f;
/// Added to the level of a freed block.
const FREED: u8 = 0x80;

/// See the module documentation.
pub(crate) struct Retaining {
    policy: Box<dyn EvictionPolicy>,
    levels: Vec<u8>,
    leaves: Leaves,
    due: Due,
}

/// Whether freed blocks of this level are the business of the policy inside.
fn is_inside(level: u8) -> bool {
    (DEFAULT..OPERATOR).contains(&level)
}

impl Retaining {
    pub fn new(mut policy: Box<dyn EvictionPolicy>, blocks: u32) -> Self {
        policy.resize(blocks);
        let levels = vec![UNTOLD; blocks as usize];
        Self { policy, levels, leaves: Leaves::new(blocks, DEFAULT), due: Due::default() }
    }

    /// A block whose time to live has passed; the caller answers with [`Retaining::expire`]. See [`Due::next`].
    pub fn next_due(&mut self, now_us: u64, looks: &mut u32) -> Option<u32> {
        self.due.next(now_us, looks)
    }

    pub fn expire(&mut self, block: u32, meta: &BlockMeta) {
        self.set_level(block, EXPIRED, meta);
    }

    fn level(&self, block: u32) -> u8 {
        match self.levels[block as usize] & !FREED {
            UNTOLD => DEFAULT,
            level => level,
        }
    }

    fn is_freed(&self, block: u32) -> bool {
        self.levels[block as usize] & FREED != 0
    }

    /// What holds for the block now; `None` once its time to live has passed.
    pub fn retention(&self, block: u32) -> Option<Retention> {
        let priority = self.level(block).checked_sub(1)?;
        Some(Retention { priority, ttl_us: self.due.ttl(block) })
    }

    pub fn expires(&self, block: u32) -> Option<u64> {
        self.due.expires(block)
    }

    /// The stronger of what holds for the block and `wanted`; a time to live begins anew. Who wants nothing in particular
    /// wants the default priority, and leaves a time to live as it is.
    pub fn retain(&mut self, block: u32, wanted: Option<Retention>, now_us: u64, meta: &BlockMeta) {
        let told = self.levels[block as usize] & !FREED != UNTOLD;
        let known = if told { self.retention(block) } else { None };
        let retention = match (known, wanted) {
            (Some(known), Some(wanted)) => known.max(wanted),
            (Some(known), None) if known.priority >= DEFAULT_PRIORITY => known,
            (_, wanted) => wanted.unwrap_or_default(),
        };
        match retention.ttl_us {
            Some(ttl) => self.due.set(block, ttl, now_us),
            None => self.due.clear(block),
        }
        self.set_level(block, retention.priority + 1, meta);
    }

    fn set_level(&mut self, block: u32, level: u8, meta: &BlockMeta) {
        let (was, freed) = (self.level(block), self.is_freed(block));
        if freed && was != level {
            let leaf = self.leaves.remove(meta.tenant, was, block);
            match (is_inside(was), is_inside(level)) {
                (true, false) => self.policy.on_remove(BlockId(block), meta),
                (false, true) => {
                    self.take_in(block, meta);
                    self.policy.on_free(BlockId(block), meta);
                }
                _ => {}
            }
            if leaf {
                self.leaves.push_youngest(meta.tenant, level, block);
            }
        }
        self.levels[block as usize] = level | if freed { FREED } else { 0 };
    }

    fn take_in(&mut self, block: u32, meta: &BlockMeta) {
        self.policy.on_insert(BlockId(block), &BlockMeta { hits: 0, ..*meta });
    }

    /// Content of a block entered the index.
    pub fn on_insert(&mut self, block: BlockId, meta: &BlockMeta) {
        self.levels[block.0 as usize] = UNTOLD;
        self.policy.on_insert(block, meta);
    }

    pub fn on_hit(&mut self, block: BlockId, meta: &BlockMeta) {
        let level = self.level(block.0);
        if !self.is_freed(block.0) || is_inside(level) {
            self.policy.on_hit(block, meta);
        }
        if self.leaves.remove(meta.tenant, level, block.0) {
            self.leaves.push_youngest(meta.tenant, level, block.0);
        }
    }

    pub fn on_free(&mut self, block: BlockId, meta: &BlockMeta) {
        let level = self.level(block.0);
        self.levels[block.0 as usize] |= FREED;
        self.policy.on_free(block, meta);
        if !is_inside(level) {
            self.policy.on_remove(block, meta);
        }
        if meta.children == 0 {
            self.leaves.push_youngest(meta.tenant, level, block.0);
        }
    }

    /// See [`EvictionPolicy::is_worth_storing`]. What somebody said is to be kept is.
    pub fn is_worth_storing(&self, block: BlockId, meta: &BlockMeta, deepest: BlockId) -> bool {
        self.level(block.0) > DEFAULT || self.policy.is_worth_storing(block, meta, deepest)
    }

    /// See [`EvictionPolicy::prefetch`].
    pub fn prefetch(&self, blocks: &[BlockId]) {
        let touched =
            blocks.iter().map(|block| u32::from(self.levels[block.0 as usize]) ^ self.leaves.touch(block.0));
        std::hint::black_box(touched.fold(0, |all, one| all ^ one));
        self.policy.prefetch(blocks);
    }

    pub fn on_use(&mut self, block: BlockId, meta: &BlockMeta) {
        let level = self.level(block.0);
        self.levels[block.0 as usize] &= !FREED;
        self.leaves.remove(meta.tenant, level, block.0);
        match is_inside(level) {
            true => self.policy.on_use(block, meta),
            false => self.take_in(block.0, meta),
        }
    }

    pub fn on_leaf(&mut self, block: BlockId, meta: &BlockMeta) {
        let (level, freed) = (self.level(block.0), self.is_freed(block.0));
        if !freed || is_inside(level) {
            self.policy.on_leaf(block, meta);
        }
        if freed {
            // Its child was the oldest: the rest of the chain goes before younger chains do.
            self.leaves.push_oldest(meta.tenant, level, block.0);
        }
    }

    pub fn on_remove(&mut self, block: BlockId, meta: &BlockMeta) {
        let level = self.level(block.0);
        self.leaves.remove(meta.tenant, level, block.0);
        if is_inside(level) {
            self.policy.on_remove(block, meta);
        }
        self.due.clear(block.0);
        self.levels[block.0 as usize] = UNTOLD;
    }

    /// The block to give up; `owner` says whose a block is. See the module documentation.
    pub fn victim(&mut self, owner: impl Fn(BlockId) -> Option<TenantId>) -> Option<BlockId> {
        if let Some(offered) = self.leaves.take_turn(0..DEFAULT) {
            return Some(BlockId(offered));
        }
        let Some(named) = self.policy.victim() else {
            return self.leaves.take_turn(OPERATOR..u8::MAX).map(BlockId);
        };
        let leaf = self.leaves.contains(named.0);
        if leaf && self.level(named.0) == DEFAULT {
            return Some(named);
        }
        let weakest = owner(named).and_then(|owner| self.leaves.weakest(owner));
        let weakest = weakest.filter(|weakest| !leaf || self.level(*weakest) < self.level(named.0));
        Some(weakest.map_or(named, BlockId))
    }

    /// The tenant's block that goes first.
    pub fn weakest(&self, tenant: TenantId) -> Option<u32> {
        self.leaves.weakest(tenant)
    }

    /// See [`EvictionPolicy::age`]. Of blocks that the policy inside does not see nothing is counted.
    pub fn age(&self, block: BlockId) -> Option<u64> {
        is_inside(self.level(block.0)).then(|| self.policy.age(block))?
    }

    /// What does not hold for a block, in words. `freed`: it is indexed and in no table.
    pub fn check(&self, block: u32, freed: bool, children: u32) -> Result<(), &'static str> {
        if self.is_freed(block) != freed {
            return Err("is freed and in use at once, for the eviction order");
        }
        if self.leaves.contains(block) != (freed && children == 0) {
            return Err("is a candidate for eviction and has children, or none and is not one");
        }
        if self.due.expires(block).is_some() && self.level(block) == EXPIRED {
            return Err("has expired and will expire");
        }
        Ok(())
    }

    /// Candidates for eviction that stand under another tenant or level than their own.
    pub fn misplaced(&self, owner: impl Fn(u32) -> TenantId) -> u64 {
        let all = self.leaves.all();
        all.filter(|(tenant, level, block)| *tenant != owner(*block) || *level != self.level(*block)).count()
            as u64
    }
}
