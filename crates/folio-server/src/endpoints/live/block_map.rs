//! The pool as a map of cells: whose block it is, what state it is in, and how long ago it was freed.
//!
//! Owns: cells, and which blocks are looked at next. Must never: have more than [`CELLS_MAX`] cells or names than [`NAMES_MAX`], or know what a block
//! holds. Of a pool of more blocks a cell is one block of several, the first.
//!
//! A cell is two characters of [`ALPHABET`]'s and [`STATES`]: `.` free, `w` private, `a` active, `0` to `7` cached; and whose it is, by its place in
//! the list of names. The number of a cached block is the share of the pool that was freed since it was: 0 for less than a 64th, then
//! doubling, 6 for as much and 7 for more; `c` where the policy does not count.

use folio_kv::{BlockState, BlockView, TenantId};

/// Cells of the map.
pub(super) const CELLS_MAX: u32 = 4096;
/// Names that cells have; whoever comes later is the last of them.
pub(super) const NAMES_MAX: usize = 64;
const ALPHABET: &[u8; NAMES_MAX] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";
const STATES: &[u8] = b"01234567";
/// What the last name stands for.
const OTHERS: &str = ":others";

/// See the module documentation.
#[derive(Default)]
pub(super) struct BlockMap {
    blocks: u32,
    cells: Vec<[u8; 2]>,
    names: Vec<(TenantId, String)>,
    /// The cell that is looked at next.
    next: u32,
}

/// Cells that changed, as they are told.
#[derive(Debug, PartialEq)]
pub(super) struct MapPiece {
    pub from: u32,
    pub cells: String,
    /// There are names that were not there before.
    pub names: bool,
}

impl BlockMap {
    /// The pool has so many blocks.
    pub fn resize(&mut self, blocks: u32) {
        if blocks != self.blocks {
            let cells = blocks.div_ceil(step(blocks));
            *self = Self { blocks, cells: vec![*b".A"; cells as usize], ..Self::default() };
        }
    }

    /// Blocks from one cell to the next.
    pub fn step(&self) -> u32 {
        step(self.blocks)
    }

    /// The cell that is looked at next.
    pub fn next(&self) -> u32 {
        self.next
    }

    /// What was seen of the cells from [`Self::next`] on. `name`: of whoever was not seen before.
    pub fn see(&mut self, blocks: &[BlockView], name: impl Fn(TenantId) -> String) -> MapPiece {
        let (from, names) = (self.next, self.names.len());
        let mut text = String::with_capacity(2 * blocks.len());
        for (at, block) in (from as usize..self.cells.len()).zip(blocks) {
            let cell = [state(block.state, self.blocks), self.owner(block, &name)];
            self.cells[at] = cell;
            text.extend(cell.map(char::from));
        }
        self.next += blocks.len() as u32;
        if self.next as usize >= self.cells.len() || blocks.is_empty() {
            self.next = 0;
        }
        MapPiece { from, cells: text, names: self.names.len() > names }
    }

    fn owner(&mut self, block: &BlockView, name: impl Fn(TenantId) -> String) -> u8 {
        if block.state == BlockState::Free {
            return ALPHABET[0];
        }
        let known = self.names.iter().position(|(tenant, _)| *tenant == block.tenant);
        let at = known.unwrap_or_else(|| {
            let others = self.names.len() + 1 >= NAMES_MAX;
            if self.names.len() < NAMES_MAX {
                let name = if others { OTHERS.to_owned() } else { name(block.tenant) };
                self.names.push((block.tenant, name));
            }
            self.names.len() - 1
        });
        ALPHABET[at]
    }

    /// All of it.
    pub fn whole(&self) -> MapPiece {
        let cells = self.cells.iter().flatten().map(|byte| char::from(*byte)).collect();
        MapPiece { from: 0, cells, names: true }
    }

    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.names.iter().map(|(_, name)| name.as_str())
    }
}

fn step(blocks: u32) -> u32 {
    blocks.div_ceil(CELLS_MAX).max(1)
}

fn state(state: BlockState, blocks: u32) -> u8 {
    match state {
        BlockState::Free => b'.',
        BlockState::Private => b'w',
        BlockState::Active => b'a',
        BlockState::Cached { age: None } => b'c',
        BlockState::Cached { age: Some(age) } => {
            // 64ths of the pool.
            let parts = age.saturating_mul(64) / u64::from(blocks.max(1));
            STATES[parts.checked_ilog2().map_or(0, |octave| octave as usize + 1).min(STATES.len() - 1)]
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn block(state: BlockState, tenant: u32) -> BlockView {
        BlockView { state, tenant: TenantId(tenant), node: None }
    }

    fn cached(age: u64) -> BlockState {
        BlockState::Cached { age: Some(age) }
    }

    #[test]
    fn cells_say_state_age_and_owner() {
        let mut map = BlockMap::default();
        map.resize(640);
        assert_eq!((map.step(), map.whole().cells.len()), (1, 1280));
        let ages = [0, 9, 10, 20, 40, 80, 160, 320, 640, 1 << 40].map(|age| block(cached(age), 5));
        let seen = map.see(&ages, |tenant| format!("t{}", tenant.0));
        assert_eq!((seen.cells.as_str(), seen.names), ("0A0A1A2A3A4A5A6A7A7A", true));
        let others =
            [BlockState::Free, BlockState::Private, BlockState::Active, BlockState::Cached { age: None }];
        let seen = map.see(&others.map(|state| block(state, 6)), |tenant| format!("t{}", tenant.0));
        assert_eq!((seen.from, seen.cells.as_str(), seen.names), (10, ".AwBaBcB", true));
        assert_eq!(map.names().collect::<Vec<_>>(), ["t5", "t6"]);
        assert!(map.whole().cells.starts_with("0A0A1A2A3A4A5A6A7A7A.AwBaBcB.A"));
        // What is shorter than wanted was the end.
        assert!(!map.see(&[], |_| String::new()).names);
        assert_eq!(map.next(), 0);
    }

    #[test]
    fn there_are_never_more_cells_or_names_than_may_be() {
        for blocks in [0, 1, 4095, 4096, 4097, 100_000, u32::MAX] {
            let mut map = BlockMap::default();
            map.resize(blocks);
            let cells = map.whole().cells.len() as u32 / 2;
            assert!(
                cells <= CELLS_MAX && u64::from(cells) * u64::from(map.step()) >= blocks.into(),
                "{blocks}"
            );
        }
        let mut map = BlockMap::default();
        map.resize(200);
        let all: Vec<_> = (0..200).map(|tenant| block(BlockState::Active, tenant)).collect();
        let seen = map.see(&all, |tenant| tenant.0.to_string());
        assert_eq!(map.names().count(), NAMES_MAX);
        assert_eq!((map.names().last(), &seen.cells[398..]), (Some(OTHERS), "a_"));
    }
}
