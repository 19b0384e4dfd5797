//! Content, wherever it is: which block of tokens continues which, and where a hash leads.
//!
//! Owns: the records of contents (nodes), the index over their hashes, and the shape of the tree. Must never: decide who is
//! evicted, count anything, or know more of storage than the block of group 0 that holds a node.
//!
//! It is a tree without token edges: a full block is found by its hash alone, and a parent keeps a list of its children,
//! newest first, for the sub-block search and for what depends on it. A *tail* (a block that is not full) is in its parent's
//! list and not in the index.
//!
//! A node is there while a block of group 0 holds its content, and a chain is closed to the front: so is its parent.
//!
//! The index is a table of words, open addressing: a node's number, and in the bits that it does not need some of its hash, so
//! that a probe touches a node's record only to find it.
//!
//! Cost: `find`, `insert`, `remove`, `touch` O(1). Memory: 64 bytes a node, 4 to 8 in the index.

use rustc_hash::FxHashMap;

use crate::policy::NONE;
use crate::types::{BlockHash, TenantId};

/// What a node continues.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Parent {
    Root(BlockHash),
    Node(u32),
}

/// One cache line.
#[derive(Clone, Debug)]
pub(crate) struct Node {
    /// Of a full one; zeros of a tail.
    pub hash: BlockHash,
    pub tenant: TenantId,
    /// The parent, or its root's entry with [`ROOT`] set.
    parent: u32,
    first_child: u32,
    prev_sibling: u32,
    next_sibling: u32,
    /// Its block of group 0.
    pub block: u32,
    /// How many nodes continue it.
    pub children: u32,
    /// Nodes before it, as far as they can be counted here.
    pub depth: u16,
    /// Lookups that found it, up to 255.
    pub hits: u8,
    pub kind: Kind,
}

/// What a node's block of group 0 holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Tokens, as many as there is room for.
    Full,
    /// The same, some of them placeholders, of which tokens say too little: nothing of it is copied.
    WithPlaceholders,
    /// Fewer tokens, none of them a placeholder.
    Tail,
}

impl Node {
    /// A record without content.
    const EMPTY: Self = Self {
        hash: BlockHash([0; 32]),
        tenant: TenantId(0),
        parent: NONE,
        first_child: NONE,
        prev_sibling: NONE,
        next_sibling: NONE,
        block: NONE,
        children: 0,
        depth: 0,
        hits: 0,
        kind: Kind::Full,
    };

    pub fn is_tail(&self) -> bool {
        self.kind == Kind::Tail
    }
}

const _: () = assert!(size_of::<Node>() == 64);

const ROOT: u32 = 1 << 31;

/// Nodes that are looked up side by side.
pub(crate) const RUN: usize = 64;

/// Where chains begin. An entry exists while it has children.
#[derive(Clone, Copy, Debug)]
struct RootEntry {
    hash: BlockHash,
    first_child: u32,
    /// The block before it, where that is of a prefix that an operator declared.
    behind: Option<BlockHash>,
}

#[derive(Debug)]
pub(crate) struct Nodes {
    nodes: Vec<Node>,
    /// The first record without content; they are linked by `next_sibling`.
    free: u32,
    index: Index,
    roots: Vec<RootEntry>,
    spare_roots: Vec<u32>,
    root_of: FxHashMap<BlockHash, u32>,
}

impl Nodes {
    pub fn new(most: u32) -> Self {
        assert!(most < ROOT - 1, "nodes are named by 31 bits");
        let empty = |at: u32| Node { next_sibling: if at + 1 < most { at + 1 } else { NONE }, ..Node::EMPTY };
        Self {
            nodes: (0..most).map(empty).collect(),
            free: if most > 0 { 0 } else { NONE },
            index: Index::new(most),
            roots: Vec::new(),
            spare_roots: Vec::new(),
            root_of: FxHashMap::default(),
        }
    }

    /// Records there are room for.
    pub fn capacity(&self) -> u32 {
        self.nodes.len() as u32
    }

    pub fn node(&self, node: u32) -> &Node {
        &self.nodes[node as usize]
    }

    pub fn node_mut(&mut self, node: u32) -> &mut Node {
        &mut self.nodes[node as usize]
    }

    /// The full node with this hash.
    pub fn find(&self, hash: &BlockHash) -> Option<u32> {
        self.index.find(hash, &self.nodes)
    }

    /// The nodes of the next hashes, as long as there are some and at most [`RUN`]; returns how many. Places in the index and records
    /// are touched side by side before they are looked at, so that a long chain does not wait for memory once for each.
    pub fn find_run<'a>(
        &self,
        hashes: &mut impl Iterator<Item = &'a BlockHash>,
        run: &mut [u32; RUN],
    ) -> usize {
        let mut wanted = [None; RUN];
        let mut count = 0;
        for (hash, (wanted, likely)) in hashes.zip(wanted.iter_mut().zip(run.iter_mut())).take(RUN) {
            *wanted = Some(hash);
            *likely = self.index.likely(hash);
            count += 1;
        }
        let touched =
            run[..count].iter().map(|node| self.nodes.get(*node as usize).map_or(0, |node| node.block));
        std::hint::black_box(touched.fold(0, |all, block| all ^ block));
        for (at, hash) in wanted[..count].iter().flatten().enumerate() {
            match self.find(hash) {
                Some(node) => run[at] = node,
                None => return at,
            }
        }
        count
    }

    pub fn parent(&self, node: u32) -> Parent {
        match self.node(node).parent {
            root if root & ROOT != 0 => Parent::Root(self.roots[(root & !ROOT) as usize].hash),
            parent => Parent::Node(parent),
        }
    }

    /// Whether there is such a node, of a full block.
    pub fn is_full(&self, node: u32) -> bool {
        let it = self.node(node);
        it.parent != NONE && !it.is_tail()
    }

    /// The block of a declared prefix that a root stands behind.
    pub fn behind(&self, root: &BlockHash) -> Option<BlockHash> {
        self.root_of.get(root).and_then(|root| self.roots[*root as usize].behind)
    }

    /// The root, which has children, stands behind this block.
    pub fn set_behind(&mut self, root: &BlockHash, block: BlockHash) {
        if let Some(root) = self.root_of.get(root) {
            self.roots[*root as usize].behind = Some(block);
        }
    }

    pub fn parent_node(&self, node: u32) -> Option<u32> {
        let parent = self.node(node).parent;
        (parent & ROOT == 0).then_some(parent)
    }

    /// Children of a parent, newest first.
    pub fn children(&self, parent: Parent) -> impl Iterator<Item = u32> + '_ {
        let first = match parent {
            Parent::Root(hash) => {
                self.root_of.get(&hash).map_or(NONE, |root| self.roots[*root as usize].first_child)
            }
            Parent::Node(parent) => self.node(parent).first_child,
        };
        let link = |node: u32| (node != NONE).then_some(node);
        std::iter::successors(link(first), move |node| link(self.node(*node).next_sibling))
    }

    /// A node that continues `parent`, with its block of group 0; `hash` of a full one, none for a tail.
    pub fn insert(&mut self, parent: Parent, tenant: TenantId, hash: Option<BlockHash>, block: u32) -> u32 {
        let id = self.free;
        assert!(id != NONE, "there are as many records as blocks of group 0");
        let (parent, depth) = match parent {
            Parent::Root(hash) => (ROOT | self.root(hash), 0),
            Parent::Node(parent) => (parent, self.node(parent).depth.saturating_add(1)),
        };
        self.free = self.node(id).next_sibling;
        *self.node_mut(id) = Node {
            hash: hash.unwrap_or(Node::EMPTY.hash),
            tenant,
            parent,
            block,
            depth,
            kind: if hash.is_some() { Kind::Full } else { Kind::Tail },
            ..Node::EMPTY
        };
        if let Some(hash) = hash {
            self.index.insert(&hash, id);
        }
        self.link(id);
        if let Some(parent) = self.parent_node(id) {
            self.node_mut(parent).children += 1;
        }
        id
    }

    fn root(&mut self, hash: BlockHash) -> u32 {
        let (roots, spare) = (&mut self.roots, &mut self.spare_roots);
        *self.root_of.entry(hash).or_insert_with(|| {
            let entry = RootEntry { hash, first_child: NONE, behind: None };
            match spare.pop() {
                Some(at) => {
                    roots[at as usize] = entry;
                    at
                }
                None => {
                    roots.push(entry);
                    roots.len() as u32 - 1
                }
            }
        })
    }

    /// Forgets a node without children; returns its parent if that has none any more.
    pub fn remove(&mut self, node: u32) -> Option<u32> {
        debug_assert!(self.node(node).first_child == NONE);
        if !self.node(node).is_tail() {
            self.index.remove(node, &self.nodes);
        }
        self.unlink(node);
        let parent = self.node(node).parent;
        if parent & ROOT != 0 && self.roots[(parent & !ROOT) as usize].first_child == NONE {
            let root = parent & !ROOT;
            self.root_of.remove(&self.roots[root as usize].hash);
            self.spare_roots.push(root);
        }
        let free = std::mem::replace(&mut self.free, node);
        let it = self.node_mut(node);
        (it.parent, it.next_sibling) = (NONE, free);
        let parent = (parent & ROOT == 0).then_some(parent)?;
        let children = &mut self.node_mut(parent).children;
        *children -= 1;
        (*children == 0).then_some(parent)
    }

    /// Makes the node the newest of its siblings.
    pub fn touch(&mut self, node: u32) {
        if self.node(node).prev_sibling != NONE {
            self.unlink(node);
            self.link(node);
        }
    }

    fn first_child(&mut self, parent: u32) -> &mut u32 {
        match parent & ROOT {
            0 => &mut self.nodes[parent as usize].first_child,
            _ => &mut self.roots[(parent & !ROOT) as usize].first_child,
        }
    }

    fn link(&mut self, node: u32) {
        let parent = self.node(node).parent;
        let first = std::mem::replace(self.first_child(parent), node);
        let it = self.node_mut(node);
        (it.prev_sibling, it.next_sibling) = (NONE, first);
        if first != NONE {
            self.node_mut(first).prev_sibling = node;
        }
    }

    fn unlink(&mut self, node: u32) {
        let Node { parent, prev_sibling, next_sibling, .. } = *self.node(node);
        match prev_sibling {
            NONE => *self.first_child(parent) = next_sibling,
            prev => self.node_mut(prev).next_sibling = next_sibling,
        }
        if next_sibling != NONE {
            self.node_mut(next_sibling).prev_sibling = prev_sibling;
        }
    }

    /// Every node there is.
    pub fn all(&self) -> impl Iterator<Item = (u32, &Node)> {
        (0..self.capacity()).zip(&self.nodes).filter(|(_, node)| node.parent != NONE)
    }

    /// Roots that have an entry.
    pub fn roots(&self) -> impl Iterator<Item = BlockHash> + '_ {
        self.root_of.keys().copied()
    }
}

/// Full nodes by their hashes. See the module documentation.
#[derive(Debug)]
struct Index {
    /// [`NONE`] where there is none.
    words: Vec<u32>,
    /// Bits of a word that name the node.
    bits: u32,
}

impl Index {
    fn new(most: u32) -> Self {
        let places = (u64::from(most) * 5 / 4 + 2).next_power_of_two();
        let bits = (most + 1).next_power_of_two().trailing_zeros();
        Self { words: vec![NONE; places as usize], bits }
    }

    /// Where the search for a hash begins, and what a word has of it.
    fn home(&self, hash: &BlockHash) -> (usize, u32) {
        let word = |at: usize| u32::from_le_bytes([0, 1, 2, 3].map(|byte| hash.0[at + byte]));
        let tag = if self.bits < 32 { word(4) >> self.bits << self.bits } else { 0 };
        (word(0) as usize & (self.words.len() - 1), tag)
    }

    fn node_in(&self, word: u32) -> u32 {
        if self.bits < 32 { word & ((1 << self.bits) - 1) } else { word }
    }

    /// The node that the first word for a hash names.
    fn likely(&self, hash: &BlockHash) -> u32 {
        self.node_in(self.words[self.home(hash).0])
    }

    fn find(&self, hash: &BlockHash, nodes: &[Node]) -> Option<u32> {
        let (mut at, tag) = self.home(hash);
        loop {
            let word = self.words[at];
            if word == NONE {
                return None;
            }
            let node = self.node_in(word);
            if word - node == tag && nodes[node as usize].hash == *hash {
                return Some(node);
            }
            at = (at + 1) & (self.words.len() - 1);
        }
    }

    fn insert(&mut self, hash: &BlockHash, node: u32) {
        let (mut at, tag) = self.home(hash);
        while self.words[at] != NONE {
            at = (at + 1) & (self.words.len() - 1);
        }
        self.words[at] = tag | node;
    }

    /// Closes the gap: whatever lies behind it without one in between is found from its home again.
    fn remove(&mut self, node: u32, nodes: &[Node]) {
        let mask = self.words.len() - 1;
        let (mut gap, tag) = self.home(&nodes[node as usize].hash);
        while self.words[gap] != tag | node {
            gap = (gap + 1) & mask;
        }
        let mut at = gap;
        loop {
            at = (at + 1) & mask;
            let word = self.words[at];
            if word == NONE {
                break;
            }
            let (home, _) = self.home(&nodes[self.node_in(word) as usize].hash);
            // Its home lies at the gap or before it.
            if (at.wrapping_sub(home) & mask) >= (at.wrapping_sub(gap) & mask) {
                self.words[gap] = word;
                gap = at;
            }
        }
        self.words[gap] = NONE;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hash(of: u32, spread: u32) -> BlockHash {
        let mut bytes = [0; 32];
        bytes[..4].copy_from_slice(&(of % spread).to_le_bytes());
        bytes[8..12].copy_from_slice(&of.to_le_bytes());
        BlockHash(bytes)
    }

    #[test]
    fn the_index_finds_exactly_what_is_there_however_homes_collide() {
        for (most, spread) in [(1, 1), (7, 1), (64, 5), (300, 1000)] {
            let mut nodes = Nodes::new(most);
            let mut there = std::collections::BTreeMap::new();
            let mut word = 1u64;
            for _ in 0..4000 {
                word = word.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                let of = (word >> 33) as u32 % (2 * most);
                match there.remove(&of) {
                    Some(node) => drop(nodes.remove(node)),
                    None if there.len() < most as usize => {
                        let root = Parent::Root(BlockHash([9; 32]));
                        there.insert(of, nodes.insert(root, TenantId(0), Some(hash(of, spread)), of));
                    }
                    None => {}
                }
                for of in 0..2 * most {
                    assert_eq!(nodes.find(&hash(of, spread)), there.get(&of).copied());
                }
            }
            assert_eq!(nodes.all().count(), there.len());
        }
    }

    #[test]
    fn who_has_no_children_has_no_entry_and_the_newest_child_is_first() {
        let mut nodes = Nodes::new(4);
        let root = Parent::Root(BlockHash([1; 32]));
        let [a, b, c] = [1, 2, 3].map(|of| nodes.insert(root, TenantId(of), Some(hash(of, 9)), of));
        assert_eq!(nodes.children(root).collect::<Vec<_>>(), [c, b, a]);
        nodes.touch(a);
        assert_eq!(nodes.children(root).collect::<Vec<_>>(), [a, c, b]);
        let tail = nodes.insert(Parent::Node(a), TenantId(1), None, 8);
        assert_eq!((nodes.node(a).children, nodes.parent(tail)), (1, Parent::Node(a)));
        assert_eq!((nodes.remove(tail), nodes.node(a).children), (Some(a), 0));
        [b, a, c].into_iter().for_each(|node| assert_eq!(nodes.remove(node), None));
        assert_eq!((nodes.roots().count(), nodes.all().count()), (0, 0));
    }
}
