//! What was told and not taken back: the blocks that a subscriber knows who missed nothing.
//!
//! Owns: one entry per block, with its tokens. Must never: have a block of which nothing was told. Everything can be told again from it, each
//! block behind its parent, without asking the engine.
//!
//! Memory: some 120 bytes a block, and 4 a token.

use std::sync::Arc;

use folio_kv::BlockHash;
use rustc_hash::FxHashMap;

use crate::wire::Item;

#[derive(Debug)]
struct Entry {
    parent: Option<BlockHash>,
    tokens: Arc<[u32]>,
    salt: Option<Arc<str>>,
}

/// Hashes are keyed by secrets: nobody can make them collide.
#[derive(Debug, Default)]
pub(crate) struct Tree {
    blocks: FxHashMap<BlockHash, Entry>,
}

impl Tree {
    pub fn clear(&mut self) {
        *self = Self::default();
    }

    pub fn is_empty(&self) -> bool {
        self.blocks.is_empty()
    }

    pub fn len(&self) -> u64 {
        self.blocks.len() as u64
    }

    /// Whether that is news. `item` stores or removes a block.
    pub fn apply(&mut self, item: &Item) -> bool {
        match item {
            Item::Stored { hash, parent, tokens, salt } => {
                let entry = Entry { parent: *parent, tokens: tokens.clone(), salt: salt.clone() };
                self.blocks.insert(*hash, entry).is_none()
            }
            Item::Removed { hash } => self.blocks.remove(hash).is_some(),
            Item::Cleared => false,
        }
    }

    /// All of it as if it were stored now, chain by chain, each block behind its parent.
    pub fn items(&self) -> Vec<Item> {
        let mut children: FxHashMap<BlockHash, Vec<BlockHash>> = FxHashMap::default();
        let mut items: Vec<Item> = Vec::with_capacity(self.blocks.len());
        let mut next: Vec<BlockHash> = Vec::new();
        for (hash, entry) in &self.blocks {
            match entry.parent.filter(|parent| self.blocks.contains_key(parent)) {
                Some(parent) => children.entry(parent).or_default().push(*hash),
                None => next.push(*hash),
            }
        }
        while let Some(hash) = next.pop() {
            let Entry { parent, tokens, salt } = &self.blocks[&hash];
            items.push(Item::Stored { hash, parent: *parent, tokens: tokens.clone(), salt: salt.clone() });
            next.extend(children.remove(&hash).unwrap_or_default());
        }
        items
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stored(of: u8, parent: Option<u8>) -> Item {
        let hash = |of| BlockHash([of; 32]);
        let (hash, parent, tokens) = (hash(of), parent.map(hash), [u32::from(of)].into());
        Item::Stored { hash, parent, tokens, salt: None }
    }

    #[test]
    fn what_is_told_again_is_what_was_told_each_behind_its_parent() {
        let mut tree = Tree::default();
        let told =
            [stored(1, None), stored(3, Some(2)), stored(2, Some(1)), stored(4, Some(2)), stored(9, Some(8))];
        assert!(told.iter().all(|item| tree.apply(item)));
        assert!(!told.iter().any(|item| tree.apply(item)), "none is news twice");
        assert_eq!(tree.len(), 5);
        let items = tree.items();
        let at = |item: &Item| items.iter().position(|other| other == item).expect("it is told");
        assert_eq!(items.len(), told.len());
        for [parent, child] in [[0, 2], [2, 1], [2, 3]] {
            assert!(at(&told[parent]) < at(&told[child]));
        }
        let gone = |of: u8| Item::Removed { hash: BlockHash([of; 32]) };
        assert!(tree.apply(&gone(2)) && !tree.apply(&gone(2)) && !tree.apply(&gone(7)));
        assert!(tree.len() == 4 && tree.items().len() == 4);
        tree.clear();
        assert!(tree.is_empty());
    }
}
