//! The part of [`KvCache::check`] that is about window groups.

use rustc_hash::FxHashMap;

use crate::cache::KvCache;
use crate::check::{Violation, count};
use crate::policy::NONE;
use crate::table::BlockTable;
use crate::tree::Content;
use crate::types::{BlockId, HOLE, TenantId};
use crate::window::{WindowBlock, WindowHeld, WindowPool};

impl KvCache {
    /// References, the window's extent in every table, the state of every block, companions, and the counts of each group.
    pub(crate) fn check_windows(&self, tables: &[&BlockTable]) -> Result<(), Violation> {
        for (window, pool) in self.windows.iter().enumerate() {
            let mut held = vec![0; pool.blocks.len()];
            for table in tables {
                self.check_window_table(window, pool, table)?;
                for block in table.windows[window].iter().filter(|block| **block != HOLE) {
                    held[block.0 as usize] += 1;
                }
            }
            for (id, (block, held)) in pool.blocks.iter().zip(held).enumerate() {
                if block.refs != held {
                    return Err(Violation::References {
                        block: BlockId(id as u32),
                        counted: block.refs,
                        held,
                    });
                }
            }
            self.check_companions(pool)?;
            check_window_states(pool)?;
            check_window_counts(pool)?;
        }
        Ok(())
    }

    fn check_window_table(
        &self,
        window: usize,
        pool: &WindowPool,
        table: &BlockTable,
    ) -> Result<(), Violation> {
        let (size, list) = (self.config.block_tokens, &table.windows[window]);
        let blocks = table.blocks.len() as u64;
        count("blocks of a table in a window group, as many as in group 0,", list.len() as u64, blocks)?;
        for (index, &id) in list.iter().enumerate() {
            let fail = |what| Err(Violation::Table { index, block: id, what });
            let start = index as u32 * size;
            // The last position the block can hold is at most `computed - W`: no query will read it again.
            if start + size + pool.config.window_tokens <= table.computed + 1 {
                if id != HOLE {
                    return fail("is behind the window and was not given back");
                }
                continue;
            }
            let Some(block) = pool.blocks.get(id.0 as usize) else {
                return fail("is within the window and not a block of its pool");
            };
            let holder = table.root.owner(index as u32);
            if block.tenant != holder {
                return Err(Violation::Tenant { block: id, owner: block.tenant, holder });
            }
            if start + size <= table.computed && !table.restored {
                if block.owner != table.blocks[index].0 {
                    return fail("is computed and not the companion of the block of group 0");
                }
            } else if block.owner != NONE {
                return fail("is not computed in full and yet a companion");
            } else if start >= table.computed && block.refs > 1 {
                return fail("is beyond the computed positions and shared");
            } else if block.filled < table.computed.saturating_sub(start).min(size) {
                return fail("counts fewer written positions than the table has computed");
            }
        }
        Ok(())
    }

    /// Owner and companion name each other, hold the same tokens, and a companion is never held without its owner.
    fn check_companions(&self, pool: &WindowPool) -> Result<(), Violation> {
        for (owner, &id) in pool.companions.iter().enumerate().filter(|(_, id)| **id != NONE) {
            let fail = |what| Err(Violation::Index { block: BlockId(id), what });
            let (full, companion) = (&self.tree.blocks[owner], &pool.blocks[id as usize]);
            if companion.owner != owner as u32 {
                return fail("is named as a companion by a block that is not its owner");
            }
            if full.content == Content::Private {
                return fail("is the companion of a block that is not in the index");
            }
            if (full.filled, full.tenant) != (companion.filled, companion.tenant) {
                return fail("does not hold what its owner holds");
            }
            if companion.refs > full.refs {
                return fail("is held more often than its owner");
            }
        }
        let named = |(id, block): (usize, &WindowBlock)| {
            block.owner == NONE || pool.companions.get(block.owner as usize) == Some(&(id as u32))
        };
        match pool.blocks.iter().enumerate().find(|entry| !named(*entry)) {
            Some((id, _)) => Err(Violation::Index {
                block: BlockId(id as u32),
                what: "has an owner that does not name it",
            }),
            None => Ok(()),
        }
    }
}

/// Every block is free, cached or active, and in the list that belongs to it.
fn check_window_states(pool: &WindowPool) -> Result<(), Violation> {
    let mut states = vec![0; pool.blocks.len()];
    pool.free.iter().for_each(|block| states[*block as usize] += 1);
    for block in pool.cached() {
        states[block.0 as usize] += 1;
        if !pool.block(block).is_cached() {
            return Err(Violation::Index { block, what: "is listed as cached and is not" });
        }
    }
    for (id, block) in pool.blocks.iter().enumerate() {
        let states = states[id] + u32::from(block.refs > 0);
        if states != 1 {
            return Err(Violation::Partition { block: BlockId(id as u32), states });
        }
    }
    Ok(())
}

fn check_window_counts(pool: &WindowPool) -> Result<(), Violation> {
    let mut tenants: FxHashMap<TenantId, WindowHeld> = FxHashMap::default();
    let (mut active, mut cached, mut written) = (0u64, 0u64, 0u64);
    for block in &pool.blocks {
        let held = tenants.entry(block.tenant).or_default();
        if block.refs > 0 {
            active += 1;
            written += u64::from(block.filled);
            held.active += 1;
        } else if block.is_cached() {
            cached += 1;
            held.cached += 1;
        }
    }
    count("active blocks of a window group", pool.stats.active_blocks.into(), active)?;
    count("cached blocks of a window group", pool.stats.cached_blocks.into(), cached)?;
    count("written slots of a window group", pool.stats.active_written_slots, written)?;
    for (tenant, reported) in &pool.tenants {
        let actual = tenants.remove(tenant).unwrap_or_default();
        count("active window blocks of a tenant", reported.active.into(), actual.active.into())?;
        count("cached window blocks of a tenant", reported.cached.into(), actual.cached.into())?;
    }
    let unknown = tenants.values().map(|held| u64::from(held.active + held.cached)).sum();
    count("window blocks of tenants that are not listed", 0, unknown)
}
