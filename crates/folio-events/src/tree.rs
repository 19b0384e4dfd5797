//! What was told and not taken back: the blocks that a subscriber knows who missed nothing.
//!
//! Owns: one entry per block, with its tokens. Must never: have a block of which nothing was told. Everything can be told again from it, each
//! block behind its parent, without asking the engine.
//!
//! Memory: some 120 bytes a block, and 4 a token.

use std::sync::Arc;

use folio_kv::{BlockHash, Medium};
use rustc_hash::FxHashMap;

use crate::wire::Item;

#[derive(Debug)]
struct Entry {
    parent: Option<BlockHash>,
    tokens: Arc<[u32]>,
    salt: Option<Arc<str>>,
    /// On the device, in host memory.
    places: [bool; 2],
}

/// Hashes are keyed by secrets: nobody can make them collide.
#[derive(Debug, Default)]
pub(crate) struct Tree {
    blocks: FxHashMap<BlockHash, Entry>,
    /// Blocks in each medium.
    counts: [u64; 2],
}

fn place(medium: Medium) -> usize {
    match medium {
        Medium::Device => 0,
        Medium::Host => 1,
    }
}

impl Tree {
    pub fn clear(&mut self) {
        *self = Self::default();
    }

    pub fn is_empty(&self) -> bool {
        self.blocks.is_empty()
    }

    /// Blocks on the device and in host memory.
    pub fn counts(&self) -> [u64; 2] {
        self.counts
    }

    /// Whether that is news. `item` stores or removes a block.
    pub fn apply(&mut self, item: &Item) -> bool {
        match item {
            Item::Stored { hash, parent, medium, tokens, salt } => {
                let entry = self.blocks.entry(*hash).or_insert_with(|| Entry {
                    parent: *parent,
                    tokens: tokens.clone(),
                    salt: salt.clone(),
                    places: [false; 2],
                });
                let is_new = !std::mem::replace(&mut entry.places[place(*medium)], true);
                self.counts[place(*medium)] += u64::from(is_new);
                is_new
            }
            Item::Removed { hash, medium } => {
                let Some(entry) = self.blocks.get_mut(hash) else { return false };
                let was = std::mem::replace(&mut entry.places[place(*medium)], false);
                if entry.places == [false; 2] {
                    self.blocks.remove(hash);
                }
                self.counts[place(*medium)] -= u64::from(was);
                was
            }
            Item::Cleared => false,
        }
    }

    /// All of it as if it were stored now, chain by chain, each block behind its parent: what is on the device, then what is in host memory.
    pub fn items(&self) -> Vec<Item> {
        let mut children: FxHashMap<BlockHash, Vec<BlockHash>> = FxHashMap::default();
        let mut order: Vec<BlockHash> = Vec::with_capacity(self.blocks.len());
        let mut next: Vec<BlockHash> = Vec::new();
        for (hash, entry) in &self.blocks {
            match entry.parent.filter(|parent| self.blocks.contains_key(parent)) {
                Some(parent) => children.entry(parent).or_default().push(*hash),
                None => next.push(*hash),
            }
        }
        while let Some(hash) = next.pop() {
            order.push(hash);
            next.extend(children.remove(&hash).unwrap_or_default());
        }
        let in_medium = |medium: Medium| {
            let there = order.iter().map(|hash| (hash, &self.blocks[hash]));
            let there = there.filter(move |(_, entry)| entry.places[place(medium)]);
            there.map(move |(hash, entry)| Item::Stored {
                hash: *hash,
                parent: entry.parent,
                medium,
                tokens: entry.tokens.clone(),
                salt: entry.salt.clone(),
            })
        };
        in_medium(Medium::Device).chain(in_medium(Medium::Host)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stored(of: u8, parent: Option<u8>, medium: Medium) -> Item {
        let hash = |of| BlockHash([of; 32]);
        let (hash, parent, tokens) = (hash(of), parent.map(hash), [u32::from(of)].into());
        Item::Stored { hash, parent, medium, tokens, salt: None }
    }

    #[test]
    fn what_is_told_again_is_what_was_told_each_behind_its_parent() {
        use Medium::{Device, Host};
        let mut tree = Tree::default();
        let told = [
            stored(1, None, Device),
            stored(3, Some(2), Device),
            stored(2, Some(1), Device),
            stored(2, Some(1), Host),
            stored(4, Some(2), Device),
            stored(9, Some(8), Device),
        ];
        assert!(told.iter().all(|item| tree.apply(item)));
        assert!(!told.iter().any(|item| tree.apply(item)), "none is news twice");
        assert_eq!(tree.counts(), [5, 1]);
        let items = tree.items();
        let at = |item: &Item| items.iter().position(|other| other == item).expect("it is told");
        assert_eq!(items.len(), told.len());
        for [parent, child] in [[0, 2], [2, 1], [2, 4], [2, 3]] {
            assert!(at(&told[parent]) < at(&told[child]));
        }
        let gone = |of: u8, medium| Item::Removed { hash: BlockHash([of; 32]), medium };
        assert!(tree.apply(&gone(2, Device)) && !tree.apply(&gone(2, Device)) && !tree.apply(&gone(7, Host)));
        assert_eq!(tree.counts(), [4, 1], "what is elsewhere stays");
        assert!(tree.apply(&gone(2, Host)) && tree.items().len() == 4);
        tree.clear();
        assert!(tree.is_empty());
    }
}
