//! The slots of one cache group: what each holds, and who holds it.
//!
//! Owns: reference counts and the free list. Must never: know what content is worth, or who gives way.
//!
//! | state | references | content |
//! |---|---|---|
//! | free | 0 | none |
//! | private: being written by who holds it | > 0 | none |
//! | active | > 0 | a node |
//! | cached | 0 | a node |

use crate::policy::NONE;
use crate::types::TenantId;

/// 16 bytes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BlockSlot {
    /// Tables, copies, pins and holds.
    pub refs: u32,
    /// The node whose content it holds, or [`NONE`]; of a free slot the next free one.
    node: u32,
    pub tenant: TenantId,
    /// Positions written: none while a ticket's writer is at it.
    pub filled: u16,
    /// Allocated and referenced without pause since, so that its waste is not settled yet.
    pub open: bool,
    /// Cached, it goes after those that are not: the protected segment of a segmented LRU.
    pub protected: bool,
}

const _: () = assert!(size_of::<BlockSlot>() == 16);

impl BlockSlot {
    pub fn is_cached(&self) -> bool {
        self.refs == 0 && self.node != NONE
    }

    /// The node whose content it holds. Not to be asked of a free slot.
    pub fn node(&self) -> Option<u32> {
        (self.node != NONE).then_some(self.node)
    }
}

#[derive(Debug)]
pub(crate) struct Pool {
    slots: Vec<BlockSlot>,
    /// The free slot that is taken next, and how many there are.
    next: u32,
    free: u32,
    /// Bit `i`: slot `i` is free.
    is_free: Vec<u64>,
}

impl Pool {
    pub fn new(slots: u32) -> Self {
        let slot = |at: u32| BlockSlot {
            refs: 0,
            node: if at + 1 < slots { at + 1 } else { NONE },
            tenant: TenantId(0),
            filled: 0,
            open: false,
            protected: false,
        };
        let mut is_free = vec![u64::MAX; slots.div_ceil(64) as usize];
        if let Some(last) = is_free.last_mut().filter(|_| !slots.is_multiple_of(64)) {
            *last = (1 << (slots % 64)) - 1;
        }
        let next = if slots > 0 { 0 } else { NONE };
        Self { slots: (0..slots).map(slot).collect(), next, free: slots, is_free }
    }

    pub fn len(&self) -> u32 {
        self.slots.len() as u32
    }

    pub fn free(&self) -> u32 {
        self.free
    }

    pub fn is_free(&self, slot: u32) -> bool {
        self.is_free[slot as usize / 64] >> (slot % 64) & 1 == 1
    }

    pub fn slot(&self, slot: u32) -> &BlockSlot {
        &self.slots[slot as usize]
    }

    pub fn get(&self, slot: u32) -> Option<&BlockSlot> {
        self.slots.get(slot as usize)
    }

    pub fn slot_mut(&mut self, slot: u32) -> &mut BlockSlot {
        &mut self.slots[slot as usize]
    }

    /// A free slot, the one that became free last.
    pub fn pop(&mut self) -> Option<u32> {
        let slot = self.next;
        if slot == NONE {
            return None;
        }
        self.next = std::mem::replace(&mut self.slots[slot as usize].node, NONE);
        self.free -= 1;
        self.is_free[slot as usize / 64] &= !(1 << (slot % 64));
        Some(slot)
    }

    /// The slot, which nobody holds, is free and holds nothing.
    pub fn push(&mut self, slot: u32) {
        let (next, it) = (self.next, &mut self.slots[slot as usize]);
        debug_assert!(it.refs == 0 && it.node == NONE, "a slot in use was freed");
        it.node = next;
        self.next = slot;
        self.free += 1;
        self.is_free[slot as usize / 64] |= 1 << (slot % 64);
    }

    /// The private slot holds a node's content from now on, or an active or cached one does so no more.
    pub fn set_node(&mut self, slot: u32, node: Option<u32>) {
        debug_assert!(!self.is_free(slot));
        self.slots[slot as usize].node = node.unwrap_or(NONE);
    }

    /// Everything but what is free.
    pub fn used(&self) -> impl Iterator<Item = (u32, &BlockSlot)> {
        (0..self.len()).zip(&self.slots).filter(|(at, _)| !self.is_free(*at))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_come_in_order_and_the_last_that_was_freed_first() {
        for slots in [0, 1, 63, 64, 130] {
            let mut pool = Pool::new(slots);
            assert_eq!(pool.used().count(), 0);
            let all: Vec<u32> = std::iter::from_fn(|| pool.pop()).collect();
            assert_eq!((all, pool.free()), ((0..slots).collect(), 0));
            assert_eq!(pool.used().count(), slots as usize);
            (0..slots).step_by(3).for_each(|slot| pool.push(slot));
            assert_eq!(pool.free(), slots.div_ceil(3));
            assert_eq!(pool.used().filter(|(at, _)| at % 3 == 0).count(), 0);
            let last = slots.checked_sub(1).map(|last| last - last % 3);
            assert_eq!(pool.pop(), last);
        }
    }
}
