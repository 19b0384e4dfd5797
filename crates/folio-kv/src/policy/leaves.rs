//! Freed blocks without children: what may go next, by tenant and level, each list in order of last use.
//!
//! Owns: links. Must never: know what a level means, but that one of them is *ordinary*: most blocks are of it. A tenant has
//! an entry while it has such blocks.
//!
//! Cost: 8 bytes a block. O(1) for ordinary blocks; for others O(log lists) of one tenant and of all.

use std::collections::BTreeMap;
use std::ops::Range;

use rustc_hash::FxHashMap;

use super::NONE;
use crate::types::TenantId;

/// In `older`: the block is in no list.
const ABSENT: u32 = NONE - 1;

#[derive(Clone, Copy, Debug)]
struct Link {
    older: u32,
    younger: u32,
}

/// Oldest and youngest of a list.
#[derive(Clone, Copy, Debug)]
struct Ends(u32, u32);

const EMPTY: Ends = Ends(NONE, NONE);

/// A list of another level than the ordinary one, and when it is its tenant's turn.
#[derive(Clone, Copy, Debug)]
struct Special {
    level: u8,
    turn: u64,
    ends: Ends,
}

#[derive(Debug)]
struct Lists {
    ordinary: Ends,
    /// Ascending, none of them empty.
    special: Vec<Special>,
}

#[derive(Debug)]
pub(super) struct Leaves {
    ordinary: u8,
    links: Vec<Link>,
    tenants: FxHashMap<TenantId, Lists>,
    /// All special lists. Tenants with one of the same level take turns.
    turns: BTreeMap<(u8, u64), TenantId>,
    turn: u64,
}

impl Leaves {
    pub fn new(blocks: u32, ordinary: u8) -> Self {
        let links = vec![Link { older: ABSENT, younger: NONE }; blocks as usize];
        Self { ordinary, links, tenants: FxHashMap::default(), turns: BTreeMap::new(), turn: 0 }
    }

    /// Reads what is kept of the block, for nothing but to have it near.
    pub fn touch(&self, block: u32) -> u32 {
        self.links[block as usize].older
    }

    pub fn contains(&self, block: u32) -> bool {
        self.links.get(block as usize).is_some_and(|link| link.older != ABSENT)
    }

    /// The ends of a list, which is made if it is not there.
    fn ends(&mut self, tenant: TenantId, level: u8) -> &mut Ends {
        let lists = self.tenants.entry(tenant).or_insert(Lists { ordinary: EMPTY, special: Vec::new() });
        if level == self.ordinary {
            return &mut lists.ordinary;
        }
        let at = lists.special.binary_search_by_key(&level, |list| list.level);
        let at = at.unwrap_or_else(|at| {
            self.turn += 1;
            self.turns.insert((level, self.turn), tenant);
            lists.special.insert(at, Special { level, turn: self.turn, ends: EMPTY });
            at
        });
        &mut lists.special[at].ends
    }

    pub fn push_youngest(&mut self, tenant: TenantId, level: u8, block: u32) {
        let Ends(_, youngest) = *self.ends(tenant, level);
        self.join(tenant, level, block, Link { older: youngest, younger: NONE });
    }

    pub fn push_oldest(&mut self, tenant: TenantId, level: u8, block: u32) {
        let Ends(oldest, _) = *self.ends(tenant, level);
        self.join(tenant, level, block, Link { older: NONE, younger: oldest });
    }

    fn join(&mut self, tenant: TenantId, level: u8, block: u32, link: Link) {
        debug_assert!(!self.contains(block), "a block is in one list at most");
        self.links[block as usize] = link;
        self.tie(tenant, level, link, block, block);
    }

    /// Makes `first` and `last` the neighbours of what is on either side of `link`.
    fn tie(&mut self, tenant: TenantId, level: u8, link: Link, first: u32, last: u32) {
        match link.older {
            NONE => self.ends(tenant, level).0 = first,
            older => self.links[older as usize].younger = first,
        }
        match link.younger {
            NONE => self.ends(tenant, level).1 = last,
            younger => self.links[younger as usize].older = last,
        }
    }

    /// Whether it was in the list.
    pub fn remove(&mut self, tenant: TenantId, level: u8, block: u32) -> bool {
        if !self.contains(block) {
            return false;
        }
        let link = self.links[block as usize];
        self.tie(tenant, level, link, link.younger, link.older);
        self.links[block as usize].older = ABSENT;
        if (link.older, link.younger) == (NONE, NONE) {
            self.close(tenant, level);
        }
        true
    }

    /// The list is empty.
    fn close(&mut self, tenant: TenantId, level: u8) {
        let Some(lists) = self.tenants.get_mut(&tenant) else { return };
        if let Ok(at) = lists.special.binary_search_by_key(&level, |list| list.level) {
            let list = lists.special.remove(at);
            self.turns.remove(&(level, list.turn));
        }
        if lists.ordinary.0 == NONE && lists.special.is_empty() {
            self.tenants.remove(&tenant);
        }
    }

    /// The tenant's block of the lowest level, there the one that was freed longest ago.
    pub fn weakest(&self, tenant: TenantId) -> Option<u32> {
        let lists = self.tenants.get(&tenant)?;
        let special = lists.special.first();
        let below = special.filter(|list| list.level < self.ordinary || lists.ordinary.0 == NONE);
        let Ends(oldest, _) = below.map_or(lists.ordinary, |list| list.ends);
        (oldest != NONE).then_some(oldest)
    }

    /// The oldest block of the lowest special level among `levels`, of the tenant whose turn it is; the turn passes on.
    pub fn take_turn(&mut self, levels: Range<u8>) -> Option<u32> {
        let (&(level, turn), &tenant) = self.turns.range((levels.start, 0)..(levels.end, 0)).next()?;
        let lists = self.tenants.get_mut(&tenant)?;
        let at = lists.special.binary_search_by_key(&level, |list| list.level).ok()?;
        self.turn += 1;
        lists.special[at].turn = self.turn;
        self.turns.remove(&(level, turn));
        self.turns.insert((level, self.turn), tenant);
        Some(lists.special[at].ends.0)
    }

    /// Every listed block with its tenant and its level, oldest first.
    pub fn all(&self) -> impl Iterator<Item = (TenantId, u8, u32)> + '_ {
        self.tenants.iter().flat_map(move |(tenant, lists)| {
            let special = lists.special.iter().map(|list| (list.level, list.ends));
            special.chain([(self.ordinary, lists.ordinary)]).flat_map(move |(level, ends)| {
                let link = |block: u32| (block != NONE).then_some(block);
                let blocks = std::iter::successors(link(ends.0), move |block| {
                    link(self.links[*block as usize].younger)
                });
                blocks.map(move |block| (*tenant, level, block))
            })
        })
    }

    #[cfg(test)]
    pub fn is_empty(&self) -> bool {
        self.tenants.is_empty() && self.turns.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_keep_their_order_whatever_is_removed() {
        let (one, two) = (TenantId(1), TenantId(2));
        let mut leaves = Leaves::new(9, 5);
        for (tenant, level, block) in
            [(one, 5, 1), (one, 7, 2), (one, 5, 3), (two, 2, 4), (one, 2, 5), (two, 2, 6)]
        {
            leaves.push_youngest(tenant, level, block);
        }
        leaves.push_oldest(one, 5, 7);
        assert_eq!(
            (leaves.weakest(one), leaves.weakest(two), leaves.weakest(TenantId(3))),
            (Some(5), Some(4), None)
        );
        assert_eq!([0; 3].map(|_| leaves.take_turn(0..5)), [Some(4), Some(5), Some(4)], "tenants take turns");
        assert_eq!((leaves.take_turn(3..5), leaves.take_turn(6..9)), (None, Some(2)));
        assert!(leaves.remove(one, 2, 5) && !leaves.remove(one, 2, 5));
        assert_eq!(leaves.weakest(one), Some(7));
        assert!(leaves.remove(one, 5, 1));
        let all: Vec<_> = leaves.all().filter(|(tenant, ..)| *tenant == one).collect();
        assert_eq!(all, [(one, 7, 2), (one, 5, 7), (one, 5, 3)]);
        leaves.remove(one, 5, 7);
        leaves.remove(one, 5, 3);
        assert_eq!(leaves.weakest(one), Some(2));
        leaves.remove(one, 7, 2);
        leaves.remove(two, 2, 4);
        assert_eq!(leaves.take_turn(0..9), Some(6));
        leaves.remove(two, 2, 6);
        assert!(leaves.is_empty(), "who has nothing has no entry");
    }
}
