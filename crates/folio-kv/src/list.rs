//! Lists of blocks in order of last use, any number of them over one array of links.
//!
//! Owns: the links. Must never: know what a list means. A block is in one list at most; which, its holder knows.
//!
//! Cost: 8 bytes a block, everything O(1).

use crate::policy::NONE;

/// In `older`: the block is in no list.
const ABSENT: u32 = NONE - 1;

#[derive(Clone, Copy, Debug)]
struct Link {
    older: u32,
    younger: u32,
}

/// One list: its oldest and its youngest block, or [`NONE`] twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct List {
    pub oldest: u32,
    pub youngest: u32,
}

impl List {
    pub const EMPTY: Self = Self { oldest: NONE, youngest: NONE };

    pub fn oldest(self) -> Option<u32> {
        (self.oldest != NONE).then_some(self.oldest)
    }
}

/// See the module documentation.
#[derive(Debug)]
pub(crate) struct Links(Vec<Link>);

impl Links {
    pub fn new(blocks: u32) -> Self {
        Self(vec![Link { older: ABSENT, younger: NONE }; blocks as usize])
    }

    /// Of none yet, with memory set aside.
    pub fn with_capacity(blocks: u32) -> Self {
        Self(Vec::with_capacity(blocks as usize))
    }

    /// One more, in no list. Returns its number.
    pub fn add(&mut self) -> u32 {
        self.0.push(Link { older: ABSENT, younger: NONE });
        self.0.len() as u32 - 1
    }

    /// Reads what is kept of the block, for nothing but to have it near.
    pub fn touch(&self, block: u32) -> u32 {
        self.0[block as usize].older
    }

    /// Whether it is in a list.
    pub fn contains(&self, block: u32) -> bool {
        self.0.get(block as usize).is_some_and(|link| link.older != ABSENT)
    }

    pub fn push_youngest(&mut self, list: &mut List, block: u32) {
        self.join(list, block, Link { older: list.youngest, younger: NONE });
    }

    pub fn push_oldest(&mut self, list: &mut List, block: u32) {
        self.join(list, block, Link { older: NONE, younger: list.oldest });
    }

    fn join(&mut self, list: &mut List, block: u32, link: Link) {
        debug_assert!(!self.contains(block), "a block is in one list at most");
        self.0[block as usize] = link;
        self.tie(list, link, block, block);
    }

    /// Makes `first` and `last` the neighbours of what is on either side of `link`.
    fn tie(&mut self, list: &mut List, link: Link, first: u32, last: u32) {
        match link.older {
            NONE => list.oldest = first,
            older => self.0[older as usize].younger = first,
        }
        match link.younger {
            NONE => list.youngest = last,
            younger => self.0[younger as usize].older = last,
        }
    }

    /// Takes a block out of its list.
    pub fn remove(&mut self, list: &mut List, block: u32) {
        debug_assert!(self.contains(block), "it is in a list");
        let link = self.0[block as usize];
        self.tie(list, link, link.younger, link.older);
        self.0[block as usize].older = ABSENT;
    }

    /// The blocks of a list, oldest first; at most one more than there are, whatever the links say.
    pub fn of(&self, list: List) -> impl Iterator<Item = u32> + '_ {
        let link = |block: u32| (block != NONE).then_some(block);
        let blocks =
            std::iter::successors(link(list.oldest), move |block| link(self.0[*block as usize].younger));
        blocks.take(self.0.len() + 1)
    }
}
