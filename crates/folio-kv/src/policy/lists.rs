//! Several doubly linked lists over the same blocks; a block is in at most one of them.
//!
//! Owns: links. Must never: know what a list means. Every operation is O(1) and allocates nothing.

use super::NONE;

/// In `list`: the block is in no list.
const ABSENT: u8 = u8::MAX;

#[derive(Clone, Copy, Debug)]
struct Link {
    older: u32,
    younger: u32,
}

/// Fewer than 128 lists: a bit for each says whether it holds anything.
#[derive(Debug)]
pub(super) struct Lists {
    links: Vec<Link>,
    list: Vec<u8>,
    /// Oldest and youngest of each list.
    ends: Vec<(u32, u32)>,
    occupied: u128,
}

impl Lists {
    pub fn new(blocks: u32, lists: usize) -> Self {
        assert!(lists < 128, "a list is a bit of a 128-bit word");
        Self {
            links: vec![Link { older: NONE, younger: NONE }; blocks as usize],
            list: vec![ABSENT; blocks as usize],
            ends: vec![(NONE, NONE); lists],
            occupied: 0,
        }
    }

    pub fn oldest(&self, list: usize) -> Option<u32> {
        let (oldest, _) = self.ends[list];
        (oldest != NONE).then_some(oldest)
    }

    /// The first list from `from` on, and before `to`, that holds anything.
    pub fn first_occupied(&self, from: usize, to: usize) -> Option<usize> {
        let list = (self.occupied >> from).trailing_zeros() as usize + from;
        (list < to).then_some(list)
    }

    pub fn list_of(&self, block: u32) -> Option<usize> {
        let list = self.list[block as usize];
        (list != ABSENT).then_some(list.into())
    }

    pub fn push_youngest(&mut self, list: usize, block: u32) {
        let (oldest, youngest) = self.ends[list];
        self.join(list, block, Link { older: youngest, younger: NONE });
        match youngest {
            NONE => self.ends[list] = (block, block),
            youngest => {
                self.links[youngest as usize].younger = block;
                self.ends[list] = (oldest, block);
            }
        }
    }

    pub fn push_oldest(&mut self, list: usize, block: u32) {
        let (oldest, youngest) = self.ends[list];
        self.join(list, block, Link { older: NONE, younger: oldest });
        match oldest {
            NONE => self.ends[list] = (block, block),
            oldest => {
                self.links[oldest as usize].older = block;
                self.ends[list] = (block, youngest);
            }
        }
    }

    fn join(&mut self, list: usize, block: u32, link: Link) {
        debug_assert_eq!(self.list[block as usize], ABSENT, "a block is in one list at most");
        self.links[block as usize] = link;
        self.list[block as usize] = list as u8;
        self.occupied |= 1 << list;
    }

    /// Nothing happens to a block that is in no list.
    pub fn remove(&mut self, block: u32) {
        let Some(list) = self.list_of(block) else { return };
        let Link { older, younger } = self.links[block as usize];
        match older {
            NONE => self.ends[list].0 = younger,
            older => self.links[older as usize].younger = younger,
        }
        match younger {
            NONE => self.ends[list].1 = older,
            younger => self.links[younger as usize].older = older,
        }
        self.list[block as usize] = ABSENT;
        if self.ends[list].0 == NONE {
            self.occupied &= !(1 << list);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_keep_their_order_whatever_is_removed() {
        let mut lists = Lists::new(6, 3);
        for (list, block) in [(0, 1), (2, 2), (0, 3), (0, 4)] {
            lists.push_youngest(list, block);
        }
        lists.push_oldest(0, 5);
        assert_eq!((lists.oldest(0), lists.oldest(1), lists.oldest(2)), (Some(5), None, Some(2)));
        assert_eq!((lists.first_occupied(0, 3), lists.first_occupied(1, 3)), (Some(0), Some(2)));
        assert_eq!(lists.first_occupied(1, 2), None);
        lists.remove(3);
        lists.remove(3);
        lists.remove(5);
        assert_eq!((lists.oldest(0), lists.list_of(4), lists.list_of(3)), (Some(1), Some(0), None));
        lists.remove(1);
        lists.remove(4);
        lists.push_oldest(1, 0);
        assert_eq!((lists.oldest(0), lists.first_occupied(0, 3)), (None, Some(1)));
    }
}
