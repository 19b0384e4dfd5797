//! The whole truth about a cache, verified in O(blocks + references). For tests and simulators; changes nothing.

use rustc_hash::{FxHashMap, FxHashSet};

use crate::cache::KvCache;
use crate::stats::TenantStats;
use crate::table::BlockTable;
use crate::tree::{Content, Parent};
use crate::types::{BlockId, TenantId};

/// An invariant that does not hold.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Violation {
    #[error("block {block:?} counts {counted} references, tables and pins hold {held}")]
    References { block: BlockId, counted: u32, held: u32 },
    #[error("block {block:?} of tenant {owner:?} is in a table of tenant {holder:?}")]
    Tenant { block: BlockId, owner: TenantId, holder: TenantId },
    #[error("block {block:?} is in {states} of the states free, cached and active, not in one")]
    Partition { block: BlockId, states: u32 },
    #[error("block {block:?}: {what}")]
    Index { block: BlockId, what: &'static str },
    #[error("table entry {index}, block {block:?}: {what}")]
    Table { index: usize, block: BlockId, what: &'static str },
    #[error("{what} is reported as {reported} and is {actual}")]
    Count { what: &'static str, reported: u64, actual: u64 },
}

pub(crate) fn count(what: &'static str, reported: u64, actual: u64) -> Result<(), Violation> {
    if reported == actual { Ok(()) } else { Err(Violation::Count { what, reported, actual }) }
}

impl KvCache {
    /// Verifies every invariant of the crate. `tables` must be all tables that exist: reference counts are compared with
    /// them, so a leaked table is found too.
    pub fn check(&self, tables: &[&BlockTable]) -> Result<(), Violation> {
        self.check_references(tables)?;
        for table in tables {
            self.check_table(table)?;
        }
        self.check_partition()?;
        self.check_index()?;
        self.check_retention()?;
        self.check_quotas()?;
        self.check_windows(tables)?;
        self.check_counts()
    }

    fn check_references(&self, tables: &[&BlockTable]) -> Result<(), Violation> {
        let mut held = vec![0u32; self.config.blocks as usize];
        for table in tables {
            for (index, &block) in table.blocks.iter().enumerate() {
                match held.get_mut(block.0 as usize) {
                    Some(held) => *held += 1,
                    None => {
                        return Err(Violation::Table { index, block, what: "is not a block of this pool" });
                    }
                }
            }
        }
        for (tenant, hash) in self.prefixes.pinned() {
            let block = self.tree.find(hash).filter(|block| self.tree.block(*block).tenant == tenant);
            match block {
                Some(block) => held[block as usize] += 1,
                None => count("pinned blocks that are not in the index of their tenant", 0, 1)?,
            }
        }
        for (id, (block, &held)) in self.tree.blocks.iter().zip(&held).enumerate() {
            if block.refs != held {
                return Err(Violation::References { block: BlockId(id as u32), counted: block.refs, held });
            }
        }
        Ok(())
    }

    fn check_table(&self, table: &BlockTable) -> Result<(), Violation> {
        let size = self.config.block_tokens;
        count(
            "positions of a table that fit its blocks",
            table.computed.min(table.capacity()).into(),
            table.computed.into(),
        )?;
        count(
            "positions confirmed, at most computed",
            table.confirmed.min(table.computed).into(),
            table.confirmed.into(),
        )?;
        // What came from a copy is published by the commit of the step that fills it.
        let published = if table.restored { table.published } else { table.full_blocks() };
        count("published blocks of a table", table.published.into(), published.into())?;
        let mut parent = Parent::Root(table.root.hash);
        let mut hash = table.root.hash;
        let shared = table.root.shared_blocks();
        count("shared blocks of a table, all published", table.published.min(shared).into(), shared.into())?;
        for (index, &id) in table.blocks.iter().enumerate() {
            let block = self.tree.block(id.0);
            let fail = |what| Err(Violation::Table { index, block: id, what });
            let holder = table.root.owner(index as u32);
            if block.tenant != holder {
                return Err(Violation::Tenant { block: id, owner: block.tenant, holder });
            }
            if let Some(base) = table.root.base(index as u32) {
                parent = Parent::Root(base);
            }
            let start = index as u32 * size;
            if index < published as usize {
                if block.content != Content::Full || block.parent != parent {
                    return fail("is computed and not published as the child of the entry before");
                }
                hash = table.root.chain_at(index as u32, &hash, self.tree.tokens(id.0));
                if hash != block.hash {
                    return fail("has a hash that is not the hash of its chain");
                }
                parent = Parent::Block(id.0);
            } else if block.content != Content::Private {
                return fail("is not computed in full and yet in the index");
            } else if start >= table.computed && block.refs > 1 {
                return fail("is beyond the computed positions and shared");
            } else if block.filled < table.computed.saturating_sub(start).min(size) {
                return fail("counts fewer written positions than the table has computed");
            }
        }
        Ok(())
    }

    fn check_partition(&self) -> Result<(), Violation> {
        let mut states = vec![0u32; self.config.blocks as usize];
        for &block in &self.free {
            states[block as usize] += 1;
        }
        for (id, block) in self.tree.blocks.iter().enumerate() {
            let states = states[id] + u32::from(block.refs > 0) + u32::from(block.is_cached());
            if states != 1 {
                return Err(Violation::Partition { block: BlockId(id as u32), states });
            }
        }
        Ok(())
    }

    fn check_index(&self) -> Result<(), Violation> {
        let mut full = 0;
        let mut children = 0;
        for (id, block) in self.tree.blocks.iter().enumerate() {
            let id = id as u32;
            let fail = |what| Err(Violation::Index { block: BlockId(id), what });
            if block.content == Content::Private {
                continue;
            }
            if let Parent::Block(parent) = block.parent {
                let parent = self.tree.block(parent);
                if parent.content != Content::Full {
                    return fail("continues a block that is not a full one of the index");
                }
                if parent.tenant != block.tenant {
                    return fail("continues a block of another tenant");
                }
                if parent.refs < block.refs || parent.depth + 1 != block.depth {
                    return fail("has more references than its parent, or a wrong depth");
                }
            }
            match block.content {
                Content::Full if self.tree.find(&block.hash) != Some(id) => {
                    return fail("is not found by its hash");
                }
                Content::Full if block.filled != self.config.block_tokens => {
                    return fail("is published and not full");
                }
                Content::Tail if block.refs > 0 => return fail("is a tail and referenced"),
                Content::Tail if block.filled == 0 || block.filled >= self.config.block_tokens => {
                    return fail("is a tail of impossible length");
                }
                _ => {}
            }
            full += u64::from(block.content == Content::Full);
            children += self.check_children(Parent::Block(id), block.children.count)?;
        }
        for (&root, listed) in &self.tree.roots {
            count(
                "children of an entry for a root, at least one,",
                listed.count.max(1).into(),
                listed.count.into(),
            )?;
            children += self.check_children(Parent::Root(root), listed.count)?;
        }
        count("entries of the hash index", self.tree.map.len() as u64, full)?;
        let indexed = self.tree.blocks.iter().filter(|b| b.content != Content::Private).count();
        count("children listed by all parents", children, indexed as u64)
    }

    /// Every block is where the order of eviction says, and pinned blocks are counted once.
    fn check_retention(&self) -> Result<(), Violation> {
        for (id, block) in self.tree.blocks.iter().enumerate() {
            if let Err(what) = self.policy.check(id as u32, block.is_cached(), block.children.count) {
                return Err(Violation::Index { block: BlockId(id as u32), what });
            }
        }
        let misplaced = self.policy.misplaced(|block| self.tree.block(block).tenant);
        count("blocks in the wrong list of the eviction order", 0, misplaced)?;
        count("evictable blocks", self.policy.evictable().into(), self.stats.cached_blocks.into())?;
        let pinned: FxHashSet<_> = self.prefixes.pinned().map(|(_, hash)| *hash).collect();
        count("pinned blocks", self.stats.pinned_blocks.into(), pinned.len() as u64)
    }

    /// Every listed child names this parent and the list is as long as counted; returns that length.
    fn check_children(&self, parent: Parent, counted: u32) -> Result<u64, Violation> {
        let mut length = 0;
        for child in self.tree.children(parent).take(self.config.blocks as usize + 1) {
            let block = self.tree.block(child);
            if block.parent != parent || block.content == Content::Private {
                return Err(Violation::Index {
                    block: BlockId(child),
                    what: "is listed by a parent it does not have",
                });
            }
            length += 1;
        }
        count("children of a parent", counted.into(), length)?;
        Ok(length)
    }

    fn check_counts(&self) -> Result<(), Violation> {
        let stats = self.stats();
        let mut tenants: FxHashMap<TenantId, TenantStats> = FxHashMap::default();
        let (mut active, mut cached, mut tails, mut written) = (0u64, 0u64, 0u64, 0u64);
        for block in &self.tree.blocks {
            let tenant = tenants.entry(block.tenant).or_default();
            if block.refs > 0 {
                active += 1;
                written += u64::from(block.filled);
                tenant.active_blocks += 1;
            } else if block.is_cached() {
                cached += 1;
                tails += u64::from(block.content == Content::Tail);
                tenant.cached_blocks += 1;
            }
        }
        count("active blocks", stats.active_blocks.into(), active)?;
        count("cached blocks", stats.cached_blocks.into(), cached)?;
        count("cached tails", stats.cached_tails.into(), tails)?;
        count("written slots", stats.active_written_slots, written)?;
        count("blocks", stats.blocks.into(), active + cached + u64::from(stats.free_blocks))?;
        for (&tenant, reported) in &self.tenants {
            let actual = tenants.get(&tenant).copied().unwrap_or_default();
            count("active blocks of a tenant", reported.active_blocks.into(), actual.active_blocks.into())?;
            count("cached blocks of a tenant", reported.cached_blocks.into(), actual.cached_blocks.into())?;
        }
        let sum = |field: fn(&TenantStats) -> u64| self.tenants.values().map(field).sum::<u64>();
        count("active blocks of all tenants", sum(|t| t.active_blocks.into()), active)?;
        count("cached blocks of all tenants", sum(|t| t.cached_blocks.into()), cached)?;
        count("pinned blocks of all tenants", sum(|t| t.pinned_blocks.into()), stats.pinned_blocks.into())?;
        let sum = |field: fn(&TenantStats) -> u64| sum(field) + field(&self.retired);
        count("queries", stats.queries, sum(|t| t.queries))?;
        count("query tokens", stats.query_tokens, sum(|t| t.query_tokens))?;
        count("hit tokens", stats.hit_tokens, sum(|t| t.hit_tokens))?;
        count("tail hit tokens", stats.tail_hit_tokens, sum(|t| t.tail_hit_tokens))?;
        count("window miss tokens", stats.window_miss_tokens, sum(|t| t.window_miss_tokens))?;
        count("evictions", stats.evictions, sum(|t| t.evictions))
    }
}
