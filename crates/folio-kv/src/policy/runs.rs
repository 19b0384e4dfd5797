//! Freed blocks in order of last use, in runs that were freed together.
//!
//! Owns: an intrusive list of runs and, inside each, an intrusive list of blocks. Must never: choose. A run is what one
//! release freed in one class: blocks of one chain, tail first. So the first of a run is its deepest block, the only one
//! of the run that can be without children. Every operation is O(1).

use super::NONE;
use crate::list::{Links, List};

#[derive(Clone, Copy, Debug)]
struct RunLink {
    prev: u32,
    next: u32,
    /// `NONE`: the block is in no list.
    run: u32,
}

#[derive(Clone, Copy, Debug)]
struct Run {
    first: u32,
    last: u32,
    list: u8,
}

/// `lists` lists over the same blocks; a block is in at most one.
#[derive(Debug)]
pub(super) struct Runs {
    links: Vec<RunLink>,
    runs: Vec<Run>,
    /// Runs without blocks.
    spare: Vec<u32>,
    order: Links,
    lists: Vec<List>,
}

impl Runs {
    pub fn new(blocks: u32, lists: usize) -> Self {
        Self {
            links: vec![RunLink { prev: NONE, next: NONE, run: NONE }; blocks as usize],
            runs: Vec::with_capacity(blocks as usize),
            spare: Vec::with_capacity(blocks as usize),
            order: Links::with_capacity(blocks),
            lists: vec![List::EMPTY; lists],
        }
    }

    /// Reads what is kept of the block, for nothing but to have it near.
    pub fn touch(&self, block: u32) -> u32 {
        self.links[block as usize].run
    }

    pub fn contains(&self, block: u32) -> bool {
        self.links[block as usize].run != NONE
    }

    /// Appends the block at the young end of `list`: to the youngest run if `joins`, else as a run of its own.
    pub fn push(&mut self, list: usize, block: u32, joins: bool) {
        let youngest = self.lists[list].youngest;
        let run = if joins && youngest != NONE { youngest } else { self.open(list) };
        let last = std::mem::replace(&mut self.runs[run as usize].last, block);
        match last {
            NONE => self.runs[run as usize].first = block,
            last => self.links[last as usize].next = block,
        }
        self.links[block as usize] = RunLink { prev: last, next: NONE, run };
    }

    fn open(&mut self, list: usize) -> u32 {
        let run = Run { first: NONE, last: NONE, list: list as u8 };
        let id = match self.spare.pop() {
            Some(id) => {
                self.runs[id as usize] = run;
                id
            }
            None => {
                self.runs.push(run);
                self.order.add()
            }
        };
        self.order.push_youngest(&mut self.lists[list], id);
        id
    }

    pub fn remove(&mut self, block: u32) {
        let RunLink { prev, next, run } = self.links[block as usize];
        match prev {
            NONE => self.runs[run as usize].first = next,
            prev => self.links[prev as usize].next = next,
        }
        match next {
            NONE => self.runs[run as usize].last = prev,
            next => self.links[next as usize].prev = prev,
        }
        self.links[block as usize].run = NONE;
        let Run { first, list, .. } = self.runs[run as usize];
        if first == NONE {
            self.order.remove(&mut self.lists[list as usize], run);
            self.spare.push(run);
        }
    }

    /// First block of each run, from the old end.
    pub fn oldest_first(&self, list: usize) -> impl Iterator<Item = u32> + '_ {
        self.order.of(self.lists[list]).map(|run| self.runs[run as usize].first)
    }

    /// First block of the youngest run.
    pub fn youngest(&self, list: usize) -> Option<u32> {
        self.runs.get(self.lists[list].youngest as usize).map(|run| run.first)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_keep_their_order_whatever_is_removed() {
        let mut runs = Runs::new(8, 2);
        for (list, block, joins) in
            [(0, 3, false), (0, 1, true), (1, 5, false), (0, 2, false), (0, 7, true), (0, 4, false)]
        {
            runs.push(list, block, joins);
        }
        let old = |runs: &Runs| runs.oldest_first(0).collect::<Vec<_>>();
        assert_eq!(old(&runs), [3, 2, 4]);
        assert_eq!((runs.youngest(0), runs.youngest(1)), (Some(4), Some(5)));
        assert_eq!(runs.oldest_first(1).collect::<Vec<_>>(), [5]);
        runs.remove(3);
        assert_eq!(old(&runs), [1, 2, 4], "the next of the run moves up");
        runs.remove(2);
        runs.remove(7);
        assert_eq!(old(&runs), [1, 4], "an empty run is gone");
        runs.remove(1);
        runs.remove(4);
        assert_eq!((old(&runs), runs.youngest(0)), (vec![], None));
        runs.push(0, 6, true);
        assert_eq!(old(&runs), [6], "there is nothing to join in an empty list");
        assert!(runs.contains(5) && runs.contains(6) && !runs.contains(4));
    }
}
