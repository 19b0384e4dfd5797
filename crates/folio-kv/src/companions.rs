//! Window groups beside group 0: what a table holds of them, and what a hit needs of them.
//!
//! Owns: the part of every operation of [`KvCache`] that is about cache groups 1 and up. Must never: find content by
//! itself; group 0 is the only index.
//!
//! # Companions
//!
//! Layers that look back only `W` positions need only the blocks of the last window. They have a pool of their own, and its
//! blocks are *companions*: the block of group 0 that holds the same tokens names, per window group, the block there that
//! holds them too, or none. One hash index and one tree serve all groups, because
//! - whoever uses a companion holds its owner, at the same index of its table: an owner never leaves before its companion;
//! - a companion may leave at any time by itself: its owner stays findable and merely lacks it.
//!
//! # The window, exactly
//!
//! With `computed` positions the next query is at `computed` and reads `computed - W + 1 ..= computed`. A table holds the
//! blocks from that of position `computed - W + 1` on, and holes before. `commit` gives the rest back in the very step in
//! which the window left it; as companions of published blocks they stay to be hit until their pool needs them.
//!
//! # A hit
//!
//! `n` blocks of group 0 can be attached if each window group has companions of all of those `n` blocks that the window of
//! the next query touches. One pass over the chain finds the longest such `n`: per group the length of the unbroken run of
//! companions is enough.

use crate::cache::KvCache;
use crate::counts::{GroupCounts, MAX_GROUPS};
use crate::stats::MAX_WINDOWS;
use crate::table::BlockTable;
use crate::tree::Parent;
use crate::types::{BlockCopy, BlockId, HOLE, Root};

/// The copies one [`KvCache::attach`] asks for: at most one per cache group.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Copies {
    copies: [Option<BlockCopy>; MAX_GROUPS],
}

impl Copies {
    /// Leaves out a copy of a block into itself.
    pub(crate) fn push(&mut self, copy: BlockCopy) {
        self.copies[copy.group as usize] = (copy.from != copy.to).then_some(copy);
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    pub fn len(&self) -> usize {
        self.copies.iter().flatten().count()
    }

    /// The copy in the full-attention group.
    pub fn full(&self) -> Option<BlockCopy> {
        self.copies[0]
    }
}

impl IntoIterator for Copies {
    type Item = BlockCopy;
    type IntoIter = std::iter::Flatten<std::array::IntoIter<Option<BlockCopy>, MAX_GROUPS>>;

    /// In the order in which they must run.
    fn into_iter(self) -> Self::IntoIter {
        self.copies.into_iter().flatten()
    }
}

/// The longest beginning of a chain that can be attached.
pub(crate) struct Prefix {
    pub blocks: u32,
    /// What the block after it continues.
    pub parent: Parent,
    /// Its last block, and the last of those that an operator shares.
    pub last: Option<u32>,
    pub last_shared: Option<u32>,
    /// Blocks of group 0 in it that no table holds and no pin keeps.
    pub idle: u32,
    /// Blocks that group 0 has, at least `blocks`.
    pub chain: u32,
}

impl KvCache {
    /// Cache groups, at least 1.
    pub fn groups(&self) -> usize {
        1 + self.windows.len()
    }

    /// Blocks of each group's pool.
    pub fn pools(&self) -> GroupCounts {
        GroupCounts::each(self.groups(), |group| match group.checked_sub(1) {
            None => self.config.blocks,
            Some(window) => self.windows[window].config.blocks,
        })
    }

    pub(crate) fn window_tokens(&self) -> [u32; MAX_WINDOWS] {
        let mut tokens = [0; MAX_WINDOWS];
        tokens.iter_mut().zip(&self.windows).for_each(|(tokens, w)| *tokens = w.config.window_tokens);
        tokens
    }

    /// Finds the longest usable beginning of `tokens`; `each` is told every block of group 0 on the way, in order, those
    /// beyond the result included.
    pub(crate) fn find_prefix(&self, root: &Root, tokens: &[u32], mut each: impl FnMut(u32)) -> Prefix {
        let parent = Parent::Root(root.hash);
        let mut best = Prefix { blocks: 0, parent, last: None, last_shared: None, idle: 0, chain: 0 };
        let mut runs = [0; MAX_WINDOWS];
        let mut idle = 0;
        for hash in root.hashes(tokens, self.config.block_tokens) {
            let Some(block) = self.tree.find(&hash) else { break };
            each(block);
            best.chain += 1;
            if best.chain == root.shared_blocks() {
                best.last_shared = Some(block);
            }
            idle += u32::from(self.tree.block(block).refs == 0);
            if self.covered(&mut runs, block, best.chain) {
                best = Prefix { blocks: best.chain, last: Some(block), idle, ..best };
            }
        }
        best.parent = match (root.base(best.blocks), best.last) {
            (None, Some(last)) => Parent::Block(last),
            (base, _) => Parent::Root(base.unwrap_or(root.hash)),
        };
        best
    }

    /// The root to look `tokens` up with: without what is shared where that is not there as a whole, since nobody but its
    /// owner computes it, or where the tenant has more of its own.
    pub(crate) fn resolve(&self, root: &Root, tokens: &[u32]) -> Root {
        if root.shared.is_none() {
            return *root;
        }
        let shared = self.find_prefix(root, tokens, |_| ()).blocks;
        if shared < root.shared_blocks() || self.find_prefix(&root.own(), tokens, |_| ()).blocks > shared {
            return root.own();
        }
        *root
    }

    /// Whether every window of a sequence that attaches `blocks` blocks, the last of which is `block`, is there. `runs`:
    /// per window group, companions without a gap up to the block before; brought up to date.
    pub(crate) fn covered(&self, runs: &mut [u32; MAX_WINDOWS], block: u32, blocks: u32) -> bool {
        let size = self.config.block_tokens;
        let mut covered = true;
        for (window, run) in self.windows.iter().zip(runs) {
            *run = if window.companion(block).is_some() { *run + 1 } else { 0 };
            covered &= blocks - window.config.first_block(blocks * size, size) <= *run;
        }
        covered
    }

    /// Blocks that attaching `prefix` would take out of what is available.
    pub(crate) fn idle_blocks(&self, prefix: &Prefix) -> GroupCounts {
        let size = self.config.block_tokens;
        let mut idle = GroupCounts::full(prefix.idle);
        for (window, pool) in self.windows.iter().enumerate() {
            let first = pool.config.first_block(prefix.blocks * size, size);
            let mut next = prefix.last;
            for _ in first..prefix.blocks {
                let Some(block) = next else { break };
                let cached = pool.companion(block).is_some_and(|companion| pool.block(companion).refs == 0);
                idle[window + 1] += u32::from(cached);
                next = match self.tree.block(block).parent {
                    Parent::Block(parent) => Some(parent),
                    // The tenant's own part begins here; before it is what is shared, if anything.
                    Parent::Root(_) => prefix.last_shared.filter(|last| *last != block),
                };
            }
        }
        idle
    }

    /// The block to copy the longest beginning of `rest` from, among those that have all companions, and its length.
    pub(crate) fn tail_source(&self, parent: Parent, rest: &[u32]) -> Option<(u32, u32)> {
        let complete = |block| self.windows.iter().all(|window| window.companion(block).is_some());
        self.tree.best_child(parent, rest, complete)
    }

    /// The companions of a block, `HOLE` where there is none.
    pub(crate) fn companions(&self, block: BlockId) -> [BlockId; MAX_WINDOWS] {
        let mut companions = [HOLE; MAX_WINDOWS];
        for (companion, window) in companions.iter_mut().zip(&self.windows) {
            *companion = window.companion(block.0).unwrap_or(HOLE);
        }
        companions
    }

    /// References the last window of the full blocks that were just attached.
    pub(crate) fn attach_windows(&mut self, table: &mut BlockTable) {
        for (window, pool) in self.windows.iter_mut().enumerate() {
            let first = table.first_block(window, table.computed) as usize;
            let list = &mut table.windows[window];
            list.resize(first, HOLE);
            for owner in &table.blocks[first..] {
                let companion = pool.companion(owner.0).expect("a prefix is found only with its last window");
                pool.reference(companion);
                pool.keep(companion);
                list.push(companion);
            }
        }
    }

    /// Takes a block for a copied tail in every window group; `available` was asked before.
    pub(crate) fn attach_window_tail(
        &mut self,
        table: &mut BlockTable,
        sources: &[BlockId; MAX_WINDOWS],
        tokens: u32,
        copies: &mut Copies,
    ) {
        for (window, pool) in self.windows.iter_mut().enumerate() {
            let to = pool.take(table.root.tenant).expect("counted as available");
            pool.set_filled(to, tokens);
            table.windows[window].push(to);
            copies.push(BlockCopy { group: window as u32 + 1, from: sources[window], to, tokens });
        }
    }

    /// Replaces a shared, partly written block by a copy in every window group; `available` was asked before.
    pub(crate) fn replace_window_tail(
        &mut self,
        table: &mut BlockTable,
        index: usize,
        tokens: u32,
        copies: &mut Vec<BlockCopy>,
    ) {
        for (window, pool) in self.windows.iter_mut().enumerate() {
            let to = pool.take(table.root.tenant).expect("counted as available");
            pool.set_filled(to, tokens);
            let from = std::mem::replace(&mut table.windows[window][index], to);
            pool.unreference(from);
            copies.push(BlockCopy { group: window as u32 + 1, from, to, tokens });
            self.stats.copies += 1;
        }
    }

    /// As many blocks in every window group as in group 0; `available` was asked before.
    pub(crate) fn grow_windows(&mut self, table: &mut BlockTable) {
        for (pool, list) in self.windows.iter_mut().zip(&mut table.windows) {
            while list.len() < table.blocks.len() {
                list.push(pool.take(table.root.tenant).expect("counted as available"));
            }
        }
    }

    pub(crate) fn fill_windows(&mut self, table: &BlockTable, index: usize, filled: u32) {
        for (pool, list) in self.windows.iter_mut().zip(&table.windows) {
            debug_assert_eq!(pool.block(list[index]).refs, 1, "written without grow");
            pool.set_filled(list[index], filled);
        }
    }

    /// Block `index` of the table's group 0 is in the index now: its window blocks become companions, or give way to those
    /// it has. Whether it lacked one. (A table that came from a copy has holes where the copy had none.)
    pub(crate) fn publish_windows(&mut self, table: &mut BlockTable, index: usize) -> bool {
        let owner = table.blocks[index].0;
        let mut lacked = false;
        for (pool, list) in self.windows.iter_mut().zip(&mut table.windows) {
            if list[index] == HOLE {
                continue;
            }
            match pool.companion(owner) {
                Some(twin) => {
                    pool.reference(twin);
                    pool.unreference(std::mem::replace(&mut list[index], twin));
                }
                None => {
                    pool.adopt(list[index], owner);
                    lacked = true;
                }
            }
        }
        lacked
    }

    /// Gives back what the windows left behind since `before` positions were computed. The window that a lookup missed is
    /// kept from now on: it was wanted once.
    pub(crate) fn slide(&mut self, table: &mut BlockTable, before: u32) {
        for (window, pool) in self.windows.iter_mut().enumerate() {
            let (from, to) = (table.first_block(window, before), table.first_block(window, table.computed));
            let missed = table.first_block(window, table.missed * self.config.block_tokens)..table.missed;
            for (block, index) in table.windows[window][from as usize..to as usize].iter_mut().zip(from..) {
                let block = std::mem::replace(block, HOLE);
                if missed.contains(&index) {
                    pool.keep(block);
                }
                pool.unreference(block);
            }
        }
    }

    /// The table ends here: somebody may go on.
    pub(crate) fn keep_windows(&mut self, table: &BlockTable) {
        for (window, pool) in self.windows.iter_mut().enumerate() {
            table.held(window).iter().for_each(|block| pool.keep(*block));
        }
    }

    pub(crate) fn fork_windows(&mut self, table: &BlockTable, fork: &mut BlockTable) {
        for (window, pool) in self.windows.iter_mut().enumerate() {
            fork.windows[window].extend_from_slice(&table.windows[window][..fork.blocks.len()]);
            fork.held(window).iter().for_each(|block| pool.reference(*block));
        }
    }

    pub(crate) fn exclusive_in_window(&self, table: &BlockTable, window: usize) -> u32 {
        let pool = &self.windows[window];
        table.held(window).iter().filter(|block| pool.block(**block).refs == 1).count() as u32
    }

    pub(crate) fn drop_last_of_windows(&mut self, table: &mut BlockTable) {
        for (pool, list) in self.windows.iter_mut().zip(&mut table.windows) {
            if let Some(block) = list.pop().filter(|block| *block != HOLE) {
                pool.unreference(block);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::LruLeafFirst;
    use crate::types::{CacheConfig, Identity, TenantId, WindowConfig};

    const SIZE: u32 = 3;
    const CHAIN: u32 = 12;

    fn root() -> Root {
        Root::derive(&Identity {
            tenant: TenantId(0),
            tenant_secret: &[1; 32],
            model_digest: &[2; 32],
            layout_digest: &[3; 32],
            extra: &[],
        })
    }

    /// A chain of `CHAIN` blocks whose companions are missing where a bit of `holes` (12 per group) is set.
    fn chain_with_holes(windows: [u32; 2], holes: u32, tokens: &[u32]) -> KvCache {
        let config = CacheConfig { blocks: CHAIN, block_tokens: SIZE, bytes_per_block: 1 };
        let windows =
            windows.map(|window_tokens| WindowConfig { blocks: CHAIN, window_tokens, bytes_per_block: 1 });
        let mut cache = KvCache::with_windows(config, &windows, Box::new(LruLeafFirst::new()));
        let (mut table, _) = cache.attach(&root(), tokens, 0);
        cache.grow(&mut table, tokens.len() as u32, &mut Vec::new()).expect("room");
        cache.commit(&mut table, tokens, tokens.len() as u32);
        let owners = table.blocks.clone();
        cache.release(table, tokens);
        for (window, pool) in cache.windows.iter_mut().enumerate() {
            for (index, owner) in owners.iter().enumerate() {
                if holes >> (window as u32 * CHAIN + index as u32) & 1 == 1 {
                    pool.forget(owner.0);
                }
            }
        }
        cache.check(&[]).expect("invariants");
        cache
    }

    /// The longest hit by definition: every position that the query after it reads lies in a block that is there.
    fn longest_hit(windows: [u32; 2], holes: u32) -> u32 {
        let fits = |blocks: &u32| {
            windows.iter().enumerate().all(|(window, tokens)| {
                let end = blocks * SIZE;
                ((end + 1).saturating_sub(*tokens)..end)
                    .all(|position| holes >> (window as u32 * CHAIN + position / SIZE) & 1 == 0)
            })
        };
        (0..=CHAIN).rev().find(fits).expect("nothing always fits")
    }

    #[test]
    fn the_longest_hit_is_found_whatever_is_missing() {
        let tokens: Vec<u32> = (0..CHAIN * SIZE).collect();
        let mut lengths = std::collections::BTreeSet::new();
        for case in 0..600u32 {
            let windows = [1 + case % 11, 1 + case / 11 % 40];
            // Few holes and many alike.
            let word = case.wrapping_mul(0x9e37_79b9) ^ case.wrapping_mul(0x85eb_ca6b) >> 7;
            let holes =
                word & word.rotate_left(9) & if case % 2 == 0 { u32::MAX } else { word.rotate_left(17) };
            let cache = chain_with_holes(windows, holes, &tokens);
            let found = cache.lookup(&root(), &tokens);
            assert_eq!(found.full_blocks, longest_hit(windows, holes), "{windows:?} {holes:b}");
            assert_eq!(found.idle_blocks[0], found.full_blocks);
            lengths.insert(found.full_blocks);
        }
        assert!(lengths.len() > 6, "only hits of {lengths:?} blocks");
    }
}
