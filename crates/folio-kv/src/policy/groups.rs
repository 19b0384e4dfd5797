//! Freed blocks in order of last use, in groups that were freed together.
//!
//! Owns: an intrusive list of groups and, inside each, an intrusive list of blocks. Must never: choose. A group is what one
//! release freed in one class: blocks of one chain, tail first. So the first of a group is its deepest block, the only one
//! of the group that can be without children. Every operation is O(1).

use super::NONE;

#[derive(Clone, Copy, Debug)]
struct Link {
    prev: u32,
    next: u32,
    /// `NONE`: the block is in no list.
    group: u32,
}

#[derive(Clone, Copy, Debug)]
struct Group {
    first: u32,
    last: u32,
    /// Towards the old end, and towards the young end.
    older: u32,
    younger: u32,
    list: u8,
}

#[derive(Clone, Copy, Debug)]
struct Ends {
    oldest: u32,
    youngest: u32,
}

/// `lists` lists over the same blocks; a block is in at most one.
#[derive(Debug)]
pub(super) struct Groups {
    links: Vec<Link>,
    groups: Vec<Group>,
    /// First of the empty groups, linked by `older`.
    spare: u32,
    ends: Vec<Ends>,
    len: u32,
}

impl Groups {
    pub fn new(blocks: u32, lists: usize) -> Self {
        Self {
            links: vec![Link { prev: NONE, next: NONE, group: NONE }; blocks as usize],
            groups: Vec::with_capacity(blocks as usize),
            spare: NONE,
            ends: vec![Ends { oldest: NONE, youngest: NONE }; lists],
            len: 0,
        }
    }

    pub fn len(&self) -> u32 {
        self.len
    }

    pub fn contains(&self, block: u32) -> bool {
        self.links[block as usize].group != NONE
    }

    /// Appends the block at the young end of `list`: to the youngest group if `joins`, else as a group of its own.
    pub fn push(&mut self, list: usize, block: u32, joins: bool) {
        let youngest = self.ends[list].youngest;
        let group = if joins && youngest != NONE { youngest } else { self.open(list) };
        let last = std::mem::replace(&mut self.groups[group as usize].last, block);
        match last {
            NONE => self.groups[group as usize].first = block,
            last => self.links[last as usize].next = block,
        }
        self.links[block as usize] = Link { prev: last, next: NONE, group };
        self.len += 1;
    }

    fn open(&mut self, list: usize) -> u32 {
        let older = self.ends[list].youngest;
        let group = Group { first: NONE, last: NONE, older, younger: NONE, list: list as u8 };
        let id = match self.spare {
            NONE => {
                self.groups.push(group);
                self.groups.len() as u32 - 1
            }
            id => {
                self.spare = std::mem::replace(&mut self.groups[id as usize], group).older;
                id
            }
        };
        match older {
            NONE => self.ends[list].oldest = id,
            older => self.groups[older as usize].younger = id,
        }
        self.ends[list].youngest = id;
        id
    }

    pub fn remove(&mut self, block: u32) {
        let Link { prev, next, group } = self.links[block as usize];
        match prev {
            NONE => self.groups[group as usize].first = next,
            prev => self.links[prev as usize].next = next,
        }
        match next {
            NONE => self.groups[group as usize].last = prev,
            next => self.links[next as usize].prev = prev,
        }
        self.links[block as usize].group = NONE;
        self.len -= 1;
        if self.groups[group as usize].first == NONE {
            self.close(group);
        }
    }

    fn close(&mut self, id: u32) {
        let Group { older, younger, list, .. } = self.groups[id as usize];
        match older {
            NONE => self.ends[list as usize].oldest = younger,
            older => self.groups[older as usize].younger = younger,
        }
        match younger {
            NONE => self.ends[list as usize].youngest = older,
            younger => self.groups[younger as usize].older = older,
        }
        self.groups[id as usize].older = std::mem::replace(&mut self.spare, id);
    }

    /// First block of each group, from the old end.
    pub fn oldest_first(&self, list: usize) -> impl Iterator<Item = u32> + '_ {
        self.firsts(self.ends[list].oldest, |group| group.younger)
    }

    /// First block of each group, from the young end.
    pub fn youngest_first(&self, list: usize) -> impl Iterator<Item = u32> + '_ {
        self.firsts(self.ends[list].youngest, |group| group.older)
    }

    fn firsts<'a>(&'a self, start: u32, next: impl Fn(&Group) -> u32 + 'a) -> impl Iterator<Item = u32> + 'a {
        let group = move |id: u32| self.groups.get(id as usize);
        std::iter::successors(group(start), move |at| group(next(at))).map(|group| group.first)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_keep_their_order_whatever_is_removed() {
        let mut groups = Groups::new(8, 2);
        for (list, block, joins) in
            [(0, 3, false), (0, 1, true), (1, 5, false), (0, 2, false), (0, 7, true), (0, 4, false)]
        {
            groups.push(list, block, joins);
        }
        let old = |groups: &Groups| groups.oldest_first(0).collect::<Vec<_>>();
        assert_eq!(old(&groups), [3, 2, 4]);
        assert_eq!(groups.youngest_first(0).collect::<Vec<_>>(), [4, 2, 3]);
        assert_eq!(groups.oldest_first(1).collect::<Vec<_>>(), [5]);
        groups.remove(3);
        assert_eq!(old(&groups), [1, 2, 4], "the next of the group moves up");
        groups.remove(2);
        groups.remove(7);
        assert_eq!(old(&groups), [1, 4], "an empty group is gone");
        groups.remove(1);
        groups.remove(4);
        assert_eq!(old(&groups), [0; 0]);
        groups.push(0, 6, true);
        assert_eq!(old(&groups), [6], "there is nothing to join in an empty list");
        assert_eq!(groups.len(), 2);
        assert!(groups.contains(5) && groups.contains(6) && !groups.contains(4));
    }
}
