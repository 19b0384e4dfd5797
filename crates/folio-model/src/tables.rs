//! Block tables as a backend keeps them from step to step, so that a batch says only what changed.
//!
//! Owns: that every entry names a block of its group, or a hole where a group may have some. Whatever reads a table may rely on it.
//! Must never: know whose table it is. Cost of a step: the entries that it changes.

use crate::backend::{Batch, HOLE, TableEdit};
use crate::check::PoolSize;

/// Slots are below this.
pub const SLOTS_MAX: u32 = 1 << 20;

/// One table per slot and cache group.
#[derive(Clone, Debug, Default)]
pub struct BlockTables {
    /// Entries of the longest table of each group.
    longest: Vec<usize>,
    /// `[slot][group]`
    tables: Vec<Vec<u32>>,
}

impl BlockTables {
    /// Empty tables for sequences of at most `max_position` tokens, or of as many as the first group's pool holds.
    pub fn new(pools: &[PoolSize], max_position: usize) -> Self {
        let positions = pools.first().map_or(0, |pool| max_position.min(pool.blocks * pool.block_tokens));
        let longest = pools.iter().map(|pool| positions.div_ceil(pool.block_tokens)).collect();
        Self { longest, tables: Vec::new() }
    }

    /// With room for the blocks of so many rows that may be taken back, in groups that have such.
    pub fn with_tentative(mut self, rows: usize) -> Self {
        self.longest.iter_mut().for_each(|longest| *longest += rows);
        self
    }

    /// Entries of the longest table of each group.
    pub fn longest(&self) -> &[usize] {
        &self.longest
    }

    /// Slots that have ever had a table.
    pub fn slots(&self) -> u32 {
        (self.tables.len() / self.longest.len().max(1)) as u32
    }

    /// The block table of a slot; empty where it never had one.
    pub fn table(&self, slot: u32, group: usize) -> &[u32] {
        self.tables.get(slot as usize * self.longest.len() + group).map_or(&[], Vec::as_slice)
    }

    /// Takes over what a batch changes, in order. Of one that is refused, edits before the wrong one have been made.
    pub fn apply(&mut self, batch: &Batch, pools: &[PoolSize]) -> Result<(), String> {
        batch.edits.iter().try_for_each(|edit| {
            self.edit(edit, &batch.blocks, pools).map_err(|reason| format!("{edit:?}: {reason}"))
        })
    }

    fn edit(&mut self, edit: &TableEdit, blocks: &[u32], pools: &[PoolSize]) -> Result<(), String> {
        let (groups, group) = (self.longest.len(), edit.group as usize);
        let Some(pool) = pools.get(group).filter(|_| group < groups) else {
            return Err("there is no such group".to_owned());
        };
        if edit.slot >= SLOTS_MAX {
            return Err(format!("slots are below {SLOTS_MAX}"));
        }
        let Some(new) = blocks.get(edit.range()) else {
            return Err(format!("the batch has {} entries", blocks.len()));
        };
        let hole = |block: u32| group > 0 && block == HOLE;
        if let Some(block) = new.iter().find(|&&block| block as usize >= pool.blocks && !hole(block)) {
            return Err(format!("block {block} does not exist: there are {}", pool.blocks));
        }
        let (start, len, longest) = (edit.start as usize, edit.len as usize, self.longest[group]);
        let end = start + new.len();
        let had = self.table(edit.slot, group).len();
        if start > had || len < end || len > had.max(end) || len > longest {
            return Err(format!("the table has {had} entries, and may have {longest}"));
        }
        let at = edit.slot as usize * groups + group;
        if at >= self.tables.len() {
            // A whole slot, with room for its longest tables: they grow in steps that allocate nothing.
            self.tables.resize_with((edit.slot as usize + 1) * groups, Vec::new);
        }
        let table = &mut self.tables[at];
        table.reserve(longest.saturating_sub(table.len()));
        table.resize(had.max(end), 0);
        table[start..end].copy_from_slice(new);
        table.truncate(len);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn pool(blocks: usize, block_tokens: usize) -> PoolSize {
        PoolSize { blocks, block_tokens, is_state: false }
    }

    const POOLS: [PoolSize; 2] = [pool(8, 16), pool(4, 32)];

    fn edited(
        tables: &mut BlockTables,
        slot: u32,
        group: u32,
        start: u32,
        blocks: &[u32],
    ) -> Result<(), String> {
        let mut batch = Batch::default();
        batch.edit_table(slot, group, start, blocks.iter().copied());
        tables.apply(&batch, &POOLS)
    }

    #[test]
    fn edits_replace_what_they_name_and_nothing_else() {
        let mut tables = BlockTables::new(&POOLS, 100);
        assert_eq!(tables.longest(), [7, 4]);
        edited(&mut tables, 2, 0, 0, &[1, 2, 3]).unwrap();
        edited(&mut tables, 2, 1, 0, &[3, 0]).unwrap();
        edited(&mut tables, 2, 0, 3, &[4]).unwrap();
        assert_eq!((tables.table(2, 0), tables.table(2, 1)), (&[1, 2, 3, 4][..], &[3, 0][..]));
        edited(&mut tables, 2, 0, 1, &[7]).unwrap();
        assert_eq!(tables.table(2, 0), [1, 7], "a shorter table");
        assert_eq!((tables.slots(), tables.table(1, 1), tables.table(9, 0)), (3, &[][..], &[][..]));
        let mut batch = Batch::default();
        batch.edit_table(2, 1, 0, [HOLE]);
        batch.edits[0].len = 2;
        tables.apply(&batch, &POOLS).unwrap();
        assert_eq!(tables.table(2, 1), [HOLE, 0], "the rest stays");
    }

    #[test]
    fn no_table_ever_names_what_is_no_block_of_its_group() {
        let mut tables = BlockTables::new(&POOLS, 100);
        edited(&mut tables, 0, 1, 0, &[1]).unwrap();
        let wrong: [(u32, u32, u32, &[u32], &str); 7] = [
            (0, 0, 0, &[8], "block 8 does not exist"),
            (0, 1, 0, &[4], "block 4 does not exist"),
            (0, 0, 0, &[HOLE], "does not exist"),
            (0, 2, 0, &[0], "no such group"),
            (SLOTS_MAX, 0, 0, &[0], "slots are below"),
            (0, 1, 2, &[0], "the table has 1 entries"),
            (0, 1, 0, &[0; 5], "may have 4"),
        ];
        for (slot, group, start, blocks, reason) in wrong {
            let error = edited(&mut tables, slot, group, start, blocks).expect_err(reason);
            assert!(error.contains(reason), "{error}");
        }
        let broken: [fn(&mut TableEdit); 3] =
            [|edit| edit.len = 0, |edit| edit.len = 3, |edit| edit.blocks_start = 1];
        for change in broken {
            let mut batch = Batch::default();
            batch.edit_table(0, 1, 0, [2]);
            change(&mut batch.edits[0]);
            assert!(tables.apply(&batch, &POOLS).is_err(), "{:?}", batch.edits[0]);
        }
        assert_eq!(
            (tables.table(0, 0), tables.table(0, 1)),
            (&[][..], &[1][..]),
            "nothing of it was taken over"
        );
        assert_eq!(BlockTables::new(&POOLS, 1 << 28).longest(), [8, 4], "no sequence has more than the pool");
    }
}
