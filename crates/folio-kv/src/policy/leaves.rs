//! Freed blocks without children: what may go next, by tenant and level, each list in order of last use.
//!
//! Owns: links. Must never: know what a level means, but that one of them is *ordinary*: most blocks are of it. A tenant has
//! an entry while it has such blocks.
//!
//! Cost: 8 bytes a block. O(1) for ordinary blocks; for others O(log lists) of one tenant and of all.

use std::collections::BTreeMap;
use std::ops::Range;

use rustc_hash::FxHashMap;

use crate::list::{Links, List};
use crate::types::TenantId;

/// A list of another level than the ordinary one, and when it is its tenant's turn.
#[derive(Clone, Copy, Debug)]
struct Special {
    level: u8,
    turn: u64,
    list: List,
}

#[derive(Debug)]
struct Owned {
    ordinary: List,
    /// Ascending, none of them empty.
    special: Vec<Special>,
}

#[derive(Debug)]
pub(super) struct Leaves {
    ordinary: u8,
    links: Links,
    tenants: FxHashMap<TenantId, Owned>,
    /// All special lists. Tenants with one of the same level take turns.
    turns: BTreeMap<(u8, u64), TenantId>,
    turn: u64,
}

impl Leaves {
    pub fn new(blocks: u32, ordinary: u8) -> Self {
        let links = Links::new(blocks);
        Self { ordinary, links, tenants: FxHashMap::default(), turns: BTreeMap::new(), turn: 0 }
    }

    /// Reads what is kept of the block, for nothing but to have it near.
    pub fn touch(&self, block: u32) -> u32 {
        self.links.touch(block)
    }

    pub fn contains(&self, block: u32) -> bool {
        self.links.contains(block)
    }

    /// Links, and a list, which is made if it is not there.
    fn list(&mut self, tenant: TenantId, level: u8) -> (&mut Links, &mut List) {
        let owned =
            self.tenants.entry(tenant).or_insert(Owned { ordinary: List::EMPTY, special: Vec::new() });
        if level == self.ordinary {
            return (&mut self.links, &mut owned.ordinary);
        }
        let at = owned.special.binary_search_by_key(&level, |list| list.level);
        let at = at.unwrap_or_else(|at| {
            self.turn += 1;
            self.turns.insert((level, self.turn), tenant);
            owned.special.insert(at, Special { level, turn: self.turn, list: List::EMPTY });
            at
        });
        (&mut self.links, &mut owned.special[at].list)
    }

    pub fn push_youngest(&mut self, tenant: TenantId, level: u8, block: u32) {
        let (links, list) = self.list(tenant, level);
        links.push_youngest(list, block);
    }

    pub fn push_oldest(&mut self, tenant: TenantId, level: u8, block: u32) {
        let (links, list) = self.list(tenant, level);
        links.push_oldest(list, block);
    }

    /// Whether it was in the list.
    pub fn remove(&mut self, tenant: TenantId, level: u8, block: u32) -> bool {
        if !self.contains(block) {
            return false;
        }
        let (links, list) = self.list(tenant, level);
        links.remove(list, block);
        if *list == List::EMPTY {
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
        if lists.ordinary == List::EMPTY && lists.special.is_empty() {
            self.tenants.remove(&tenant);
        }
    }

    /// The tenant's block of the lowest level, there the one that was freed longest ago.
    pub fn weakest(&self, tenant: TenantId) -> Option<u32> {
        let lists = self.tenants.get(&tenant)?;
        let special = lists.special.first();
        let below = special.filter(|special| special.level < self.ordinary || lists.ordinary == List::EMPTY);
        below.map_or(lists.ordinary, |special| special.list).oldest()
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
        lists.special[at].list.oldest()
    }

    /// Every listed block with its tenant and its level, oldest first.
    pub fn all(&self) -> impl Iterator<Item = (TenantId, u8, u32)> + '_ {
        self.tenants.iter().flat_map(move |(tenant, lists)| {
            let special = lists.special.iter().map(|special| (special.level, special.list));
            let all = special.chain([(self.ordinary, lists.ordinary)]);
            all.flat_map(move |(level, list)| self.links.of(list).map(move |block| (*tenant, level, block)))
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
