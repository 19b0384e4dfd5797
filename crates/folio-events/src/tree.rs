//! What resides where, of those who are told: what subscribers know, and what they cannot be told yet.
//!
//! Owns: one entry per block, with its tokens. Must never: let a block be told before the one that it stands behind. Everything can be told again
//! from it, without asking the engine or a tier.
//!
//! A block is *told* once the block before it is, in whatever medium. A tier may hold one whose parent is nowhere: nobody finds it from a prompt's
//! beginning, and it waits here until its parent comes. What was told stays told when its parent goes.
//!
//! Memory: some 150 bytes a block, and 4 a token.

use std::sync::Arc;

use folio_engine::{Medium, short_name};
use folio_kv::BlockHash;
use rustc_hash::FxHashMap;

use crate::wire::Item;

#[derive(Debug)]
struct TreeEntry {
    hash: BlockHash,
    parent: Option<BlockHash>,
    tokens: Arc<[u32]>,
    salt: Option<Arc<str>>,
    /// A bit for each medium in which it resides.
    media: u8,
    is_told: bool,
}

impl TreeEntry {
    fn stored(&self, medium: Medium) -> Item {
        let (hash, parent, tokens) = (self.hash, self.parent, self.tokens.clone());
        Item::Stored { hash, parent, tokens, salt: self.salt.clone(), medium }
    }
}

fn bit(medium: Medium) -> u8 {
    1 << medium as u8
}

/// By the short names of blocks. Hashes are keyed by secrets: nobody can make them collide.
#[derive(Debug, Default)]
pub(crate) struct Tree {
    blocks: FxHashMap<u64, TreeEntry>,
    /// By their parents, blocks that are not told.
    waiting: FxHashMap<u64, Vec<u64>>,
    /// Blocks that are told, by medium.
    told: [u64; Medium::ALL.len()],
}

impl Tree {
    pub fn is_empty(&self) -> bool {
        self.blocks.is_empty()
    }

    /// Blocks that are told, in the order of [`Medium::ALL`].
    pub fn told(&self) -> [u64; Medium::ALL.len()] {
        self.told
    }

    /// A block resides in the medium of `item`, which stores it. What is to be told goes to `news`.
    pub fn store(&mut self, item: Item, news: &mut Vec<Item>) {
        let Item::Stored { hash, parent, tokens, salt, medium } = item else { return };
        let name = short_name(&hash);
        let new = TreeEntry { hash, parent, tokens, salt, media: 0, is_told: false };
        let entry = self.blocks.entry(name).or_insert(new);
        let is_known = entry.media != 0;
        if entry.media & bit(medium) != 0 {
            return;
        }
        entry.media |= bit(medium);
        if entry.is_told {
            self.told[medium as usize] += 1;
            news.push(entry.stored(medium));
        } else if !is_known {
            self.tell_or_wait(name, news);
        }
    }

    /// A block no longer resides there.
    pub fn remove(&mut self, name: u64, medium: Medium, news: &mut Vec<Item>) {
        let Some(entry) = self.blocks.get_mut(&name).filter(|entry| entry.media & bit(medium) != 0) else {
            return;
        };
        entry.media &= !bit(medium);
        if entry.is_told {
            self.told[medium as usize] -= 1;
            news.push(Item::Removed { hash: entry.hash, medium });
        }
        if entry.media == 0 {
            self.forget(name);
        }
    }

    /// What is to be told where nothing of a medium resides any more, as far as is known.
    pub fn lose(&mut self, medium: Medium, news: &mut Vec<Item>) {
        let there = self.blocks.iter().filter(|(_, entry)| entry.media & bit(medium) != 0);
        for name in there.map(|(name, _)| *name).collect::<Vec<_>>() {
            self.remove(name, medium, news);
        }
    }

    fn forget(&mut self, name: u64) {
        let Some(TreeEntry { parent: Some(parent), is_told: false, .. }) = self.blocks.remove(&name) else {
            return;
        };
        let parent = short_name(&parent);
        if let Some(waiting) = self.waiting.get_mut(&parent) {
            waiting.retain(|child| *child != name);
            if waiting.is_empty() {
                self.waiting.remove(&parent);
            }
        }
    }

    /// Tells a block that was not told, and those that waited for it; or has it wait.
    fn tell_or_wait(&mut self, name: u64, news: &mut Vec<Item>) {
        let parent = self.blocks.get(&name).and_then(|entry| entry.parent).map(|parent| short_name(&parent));
        let waits = parent.filter(|parent| !self.blocks.get(parent).is_some_and(|entry| entry.is_told));
        if let Some(parent) = waits {
            return self.waiting.entry(parent).or_default().push(name);
        }
        let mut next = vec![name];
        while let Some(name) = next.pop() {
            let Some(entry) = self.blocks.get_mut(&name) else { continue };
            entry.is_told = true;
            for medium in Medium::ALL.into_iter().filter(|medium| entry.media & bit(*medium) != 0) {
                self.told[medium as usize] += 1;
                news.push(entry.stored(medium));
            }
            next.extend(self.waiting.remove(&name).unwrap_or_default());
        }
    }

    /// All of it as if it were stored now, each block behind its parent, and what is told of it.
    pub fn tell_again(&mut self) -> Vec<Item> {
        self.waiting.clear();
        self.told = Default::default();
        let names: Vec<u64> = self.blocks.keys().copied().collect();
        self.blocks.values_mut().for_each(|entry| entry.is_told = false);
        let mut items = Vec::with_capacity(names.len());
        names.into_iter().for_each(|name| self.tell_or_wait(name, &mut items));
        items
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hash(of: u8) -> BlockHash {
        BlockHash([of; 32])
    }

    fn stored(of: u8, parent: Option<u8>, medium: Medium) -> Item {
        let (hash, parent, tokens) = (hash(of), parent.map(hash), [u32::from(of)].into());
        Item::Stored { hash, parent, tokens, salt: None, medium }
    }

    fn gone(of: u8, medium: Medium) -> Item {
        Item::Removed { hash: hash(of), medium }
    }

    fn store(tree: &mut Tree, of: u8, parent: Option<u8>, medium: Medium) -> Vec<Item> {
        let mut news = Vec::new();
        tree.store(stored(of, parent, medium), &mut news);
        news
    }

    fn remove(tree: &mut Tree, of: u8, medium: Medium) -> Vec<Item> {
        let mut news = Vec::new();
        tree.remove(short_name(&hash(of)), medium, &mut news);
        news
    }

    use Medium::{Device, Disk, Host};

    #[test]
    fn a_block_is_told_behind_its_parent_wherever_that_is() {
        let mut tree = Tree::default();
        assert_eq!(store(&mut tree, 3, Some(2), Disk), []);
        assert_eq!(store(&mut tree, 3, Some(2), Host), []);
        assert_eq!(store(&mut tree, 2, Some(1), Disk), []);
        let all = [
            stored(1, None, Device),
            stored(2, Some(1), Disk),
            stored(3, Some(2), Host),
            stored(3, Some(2), Disk),
        ];
        assert_eq!(store(&mut tree, 1, None, Device), all);
        assert_eq!(store(&mut tree, 1, None, Device), [], "none is news twice");
        assert_eq!(store(&mut tree, 1, None, Disk), [stored(1, None, Disk)]);
        assert_eq!(remove(&mut tree, 1, Device), [gone(1, Device)]);
        assert_eq!(remove(&mut tree, 1, Device), []);
        assert_eq!(store(&mut tree, 4, Some(1), Disk), [stored(4, Some(1), Disk)], "it is on the disk");
    }

    #[test]
    fn what_waits_and_goes_is_never_told() {
        let mut tree = Tree::default();
        store(&mut tree, 2, Some(1), Disk);
        store(&mut tree, 3, Some(1), Disk);
        assert_eq!(remove(&mut tree, 2, Disk), []);
        assert_eq!(store(&mut tree, 1, None, Disk), [stored(1, None, Disk), stored(3, Some(1), Disk)]);
        assert!(tree.waiting.is_empty());
        store(&mut tree, 9, Some(8), Disk);
        remove(&mut tree, 9, Disk);
        assert!(tree.waiting.is_empty() && tree.blocks.len() == 2);
    }

    #[test]
    fn what_is_told_again_is_what_can_be_found() {
        let mut tree = Tree::default();
        for (of, parent) in [(1, None), (2, Some(1)), (3, Some(2)), (4, Some(2))] {
            store(&mut tree, of, parent, Device);
            store(&mut tree, of, parent, Disk);
        }
        remove(&mut tree, 2, Device);
        let items = tree.tell_again();
        let at = |of: u8, parent: Option<u8>, medium| {
            items.iter().position(|item| *item == stored(of, parent, medium)).expect("it is told")
        };
        assert_eq!((items.len(), tree.told()), (7, [3, 0, 4]));
        assert!(at(1, None, Device) < at(2, Some(1), Disk) && at(2, Some(1), Disk) < at(3, Some(2), Device));
        assert!(at(2, Some(1), Disk) < at(4, Some(2), Disk));
        // Nobody finds what stands behind a block that is nowhere; when it is back, that is told.
        assert_eq!(remove(&mut tree, 2, Disk), [gone(2, Disk)]);
        assert_eq!((tree.tell_again().len(), tree.told()), (2, [1, 0, 1]));
        assert_eq!(remove(&mut tree, 4, Disk), []);
        let back = [stored(2, Some(1), Host), stored(4, Some(2), Device)];
        let news = store(&mut tree, 2, Some(1), Host);
        assert!(news.len() == 4 && news[0] == back[0] && news.contains(&back[1]), "{news:?}");
    }

    #[test]
    fn a_medium_that_is_lost_is_taken_back() {
        let mut tree = Tree::default();
        store(&mut tree, 1, None, Device);
        store(&mut tree, 1, None, Disk);
        store(&mut tree, 2, Some(1), Disk);
        let mut news = Vec::new();
        tree.lose(Disk, &mut news);
        news.sort_by_key(|item| format!("{item:?}"));
        assert_eq!(news, [gone(1, Disk), gone(2, Disk)]);
        assert_eq!((tree.blocks.len(), tree.told()), (1, [1, 0, 0]));
        assert_eq!(store(&mut tree, 2, Some(1), Disk), [stored(2, Some(1), Disk)]);
    }
}
