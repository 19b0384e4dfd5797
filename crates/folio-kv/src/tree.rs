//! Blocks and the index over them: hash -> block, parent links, child lists, and the token ids each block stands for.
//!
//! Owns: the records of all blocks and the shape of the tree. Must never: decide who is evicted or count anything for
//! accounting.
//!
//! It is a tree without token edges: a full block is found by its hash alone, and a parent keeps a list of its children,
//! newest first, only for the sub-block search and for leaf-first eviction. A *tail* (a block that is not full) is in its
//! parent's list and not in the map.
//!
//! Cost: `find`, `insert`, `remove`, `touch` O(1); `best_child` compares at most [`CHILDREN_SCANNED`] blocks.

use rustc_hash::FxHashMap;

use crate::policy::{BlockMeta, NONE};
use crate::types::{BlockHash, BlockId, TenantId};

/// Children looked at when searching for a shared beginning, newest first.
pub(crate) const CHILDREN_SCANNED: usize = 16;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Content {
    /// Not in the index: free, or being written by the tables that hold it.
    Private,
    /// Full, immutable, found by hash.
    Full,
    /// Written in part, immutable, unreferenced: only ever copied from.
    Tail,
}

/// What a block continues.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Parent {
    Root(BlockHash),
    Block(u32),
}

#[derive(Clone, Debug)]
pub(crate) struct Block {
    pub tenant: TenantId,
    /// Tables that hold it.
    pub refs: u32,
    pub content: Content,
    /// Positions written.
    pub filled: u32,
    /// Allocated and referenced without pause since: its waste is not settled yet.
    pub open: bool,
    /// Of a full block.
    pub hash: BlockHash,
    pub parent: Parent,
    pub depth: u32,
    pub hits: u32,
    pub children: Children,
    prev_sibling: u32,
    next_sibling: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Children {
    pub first: u32,
    pub count: u32,
}

impl Block {
    pub fn is_cached(&self) -> bool {
        self.refs == 0 && self.content != Content::Private
    }
}

const CHILDLESS: Children = Children { first: NONE, count: 0 };

pub(crate) struct Tree {
    pub blocks: Vec<Block>,
    pub map: FxHashMap<BlockHash, u32>,
    /// Children of chain starts; an entry exists while it has children.
    pub roots: FxHashMap<BlockHash, Children>,
    /// Token ids of every indexed block, `[blocks, block_tokens]`.
    tokens: Vec<u32>,
    block_tokens: usize,
}

/// Length of the common beginning.
fn common(a: &[u32], b: &[u32]) -> usize {
    a.iter().zip(b).take_while(|(a, b)| a == b).count()
}

impl Tree {
    pub fn new(blocks: u32, block_tokens: u32) -> Self {
        let block = Block {
            tenant: TenantId(0),
            refs: 0,
            content: Content::Private,
            filled: 0,
            open: false,
            hash: BlockHash([0; 32]),
            parent: Parent::Root(BlockHash([0; 32])),
            depth: 0,
            hits: 0,
            children: CHILDLESS,
            prev_sibling: NONE,
            next_sibling: NONE,
        };
        let mut map = FxHashMap::default();
        // Twice the entries: removed ones leave marks, and up to half full the map cleans up in place.
        map.reserve(2 * blocks as usize);
        Self {
            blocks: vec![block; blocks as usize],
            map,
            roots: FxHashMap::default(),
            tokens: vec![0; blocks as usize * block_tokens as usize],
            block_tokens: block_tokens as usize,
        }
    }

    pub fn block(&self, block: u32) -> &Block {
        &self.blocks[block as usize]
    }

    pub fn block_mut(&mut self, block: u32) -> &mut Block {
        &mut self.blocks[block as usize]
    }

    pub fn find(&self, hash: &BlockHash) -> Option<u32> {
        self.map.get(hash).copied()
    }

    /// Token ids of an indexed block, or of a private one as far as they were ever indexed (meaningless).
    pub fn tokens(&self, block: u32) -> &[u32] {
        let start = block as usize * self.block_tokens;
        &self.tokens[start..start + self.block(block).filled as usize]
    }

    pub fn meta(&self, block: u32) -> BlockMeta {
        let b = self.block(block);
        BlockMeta {
            tenant: b.tenant,
            parent: match b.parent {
                Parent::Root(_) => None,
                Parent::Block(parent) => Some(BlockId(parent)),
            },
            children: b.children.count,
            depth: b.depth,
            tokens: b.filled,
            hits: b.hits,
            hash: (b.content == Content::Full).then_some(b.hash),
        }
    }

    /// Children of a parent, newest first.
    pub fn children(&self, parent: Parent) -> impl Iterator<Item = u32> + '_ {
        let mut next = self.children_of(parent).first;
        std::iter::from_fn(move || {
            let child = next;
            (child != NONE).then(|| {
                next = self.block(child).next_sibling;
                child
            })
        })
    }

    fn children_of(&self, parent: Parent) -> Children {
        match parent {
            Parent::Root(hash) => self.roots.get(&hash).copied().unwrap_or(CHILDLESS),
            Parent::Block(parent) => self.block(parent).children,
        }
    }

    fn set_children(&mut self, parent: Parent, children: Children) {
        match parent {
            Parent::Root(hash) if children.count == 0 => {
                self.roots.remove(&hash);
            }
            Parent::Root(hash) => {
                self.roots.insert(hash, children);
            }
            Parent::Block(parent) => self.block_mut(parent).children = children,
        }
    }

    /// Indexes a private block that holds `tokens` after `parent`; `hash` for a full one, none for a tail.
    pub fn insert(&mut self, block: u32, parent: Parent, tokens: &[u32], hash: Option<BlockHash>) {
        let depth = match parent {
            Parent::Root(_) => 0,
            Parent::Block(parent) => self.block(parent).depth + 1,
        };
        let start = block as usize * self.block_tokens;
        self.tokens[start..start + tokens.len()].copy_from_slice(tokens);
        let b = self.block_mut(block);
        debug_assert_eq!(b.content, Content::Private);
        b.content = if hash.is_some() { Content::Full } else { Content::Tail };
        b.filled = tokens.len() as u32;
        b.parent = parent;
        b.depth = depth;
        b.hits = 0;
        b.children = CHILDLESS;
        if let Some(hash) = hash {
            b.hash = hash;
            self.map.insert(hash, block);
        }
        self.link(block);
    }

    /// Takes a childless block out of the index; returns the parent if that is childless now.
    pub fn remove(&mut self, block: u32) -> Option<u32> {
        debug_assert_eq!(self.block(block).children.count, 0);
        let (hash, content, parent) = {
            let b = self.block_mut(block);
            (b.hash, std::mem::replace(&mut b.content, Content::Private), b.parent)
        };
        if content == Content::Full {
            self.map.remove(&hash);
        }
        self.unlink(block);
        match parent {
            Parent::Block(parent) if self.block(parent).children.count == 0 => Some(parent),
            _ => None,
        }
    }

    /// Makes the block the newest of its siblings.
    pub fn touch(&mut self, block: u32) {
        if self.block(block).prev_sibling != NONE {
            self.unlink(block);
            self.link(block);
        }
    }

    /// Among the newest children of `parent`, the `usable` one that shares the longest beginning with `tokens` (ties: the
    /// newest), and the length of it, which is positive.
    pub fn best_child(
        &self,
        parent: Parent,
        tokens: &[u32],
        usable: impl Fn(u32) -> bool,
    ) -> Option<(u32, u32)> {
        let mut best = None;
        let mut length = 0;
        for child in self.children(parent).take(CHILDREN_SCANNED) {
            let shared = common(self.tokens(child), tokens);
            if shared > length && usable(child) {
                (best, length) = (Some(child), shared);
            }
        }
        best.map(|child| (child, length as u32))
    }

    /// A tail other than `block`, among the newest siblings, that `block` makes useless: its tokens begin `block`'s.
    pub fn superseded_by(&self, block: u32) -> Option<u32> {
        let tokens = self.tokens(block);
        self.children(self.block(block).parent).take(CHILDREN_SCANNED).find(|&c| {
            c != block && self.block(c).content == Content::Tail && tokens.starts_with(self.tokens(c))
        })
    }

    fn link(&mut self, block: u32) {
        let parent = self.block(block).parent;
        let Children { first, count } = self.children_of(parent);
        let b = self.block_mut(block);
        b.prev_sibling = NONE;
        b.next_sibling = first;
        if first != NONE {
            self.block_mut(first).prev_sibling = block;
        }
        self.set_children(parent, Children { first: block, count: count + 1 });
    }

    fn unlink(&mut self, block: u32) {
        let Block { parent, prev_sibling, next_sibling, .. } = *self.block(block);
        let mut children = self.children_of(parent);
        children.count -= 1;
        match prev_sibling {
            NONE => children.first = next_sibling,
            prev => self.block_mut(prev).next_sibling = next_sibling,
        }
        if next_sibling != NONE {
            self.block_mut(next_sibling).prev_sibling = prev_sibling;
        }
        self.set_children(parent, children);
    }
}
