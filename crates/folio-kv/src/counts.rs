//! Numbers of blocks, one per cache group.
//!
//! Owns: [`GroupCounts`] and its arithmetic, which is component by component and saturates. Group 0 is full attention; the
//! groups a cache does not have count zero.

use std::fmt;
use std::ops::{Add, AddAssign, Index, IndexMut};

/// Most cache groups of a model, the full-attention group included.
pub const MAX_GROUPS: usize = 4;

/// Blocks per cache group.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GroupCounts([u32; MAX_GROUPS]);

impl GroupCounts {
    /// `blocks` of group 0, none of any other.
    pub const fn full(blocks: u32) -> Self {
        Self([blocks, 0, 0, 0])
    }

    /// `blocks(group)` of each of the first `groups` groups.
    pub fn each(groups: usize, blocks: impl FnMut(usize) -> u32) -> Self {
        let mut counts = Self::default();
        counts.0.iter_mut().zip((0..groups).map(blocks)).for_each(|(count, blocks)| *count = blocks);
        counts
    }

    /// Whether no group's count exceeds that of `room`.
    pub fn fits(self, room: Self) -> bool {
        self.0.iter().zip(&room.0).all(|(count, room)| count <= room)
    }

    pub fn is_zero(self) -> bool {
        self == Self::default()
    }

    /// What is left of each group's count, at least 0.
    pub fn saturating_sub(self, other: Self) -> Self {
        self.zip(other, u32::saturating_sub)
    }

    /// The smallest count among the first `groups` groups.
    pub fn least(self, groups: usize) -> u32 {
        self.0[..groups.clamp(1, MAX_GROUPS)].iter().copied().min().unwrap_or(0)
    }

    fn zip(self, other: Self, f: impl Fn(u32, u32) -> u32) -> Self {
        Self(std::array::from_fn(|group| f(self.0[group], other.0[group])))
    }
}

impl Add for GroupCounts {
    type Output = Self;
    fn add(self, other: Self) -> Self {
        self.zip(other, u32::saturating_add)
    }
}

impl AddAssign for GroupCounts {
    fn add_assign(&mut self, other: Self) {
        *self = *self + other;
    }
}

impl Index<usize> for GroupCounts {
    type Output = u32;
    fn index(&self, group: usize) -> &u32 {
        &self.0[group]
    }
}

impl IndexMut<usize> for GroupCounts {
    fn index_mut(&mut self, group: usize) -> &mut u32 {
        &mut self.0[group]
    }
}

impl fmt::Display for GroupCounts {
    /// "3" for group 0 alone, else "3+5": trailing groups without blocks are left out.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let groups = self.0.iter().rposition(|count| *count > 0).map_or(1, |last| last + 1);
        for (group, count) in self.0[..groups].iter().enumerate() {
            write!(f, "{}{count}", if group == 0 { "" } else { "+" })?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_fits_only_if_it_fits_in_every_group() {
        let room = GroupCounts::each(2, |group| [5, 2][group]);
        assert!(GroupCounts::full(5).fits(room));
        assert!(!GroupCounts::full(6).fits(room));
        assert!(!GroupCounts::each(2, |_| 3).fits(room));
        assert_eq!((room.least(1), room.least(2)), (5, 2));
        assert_eq!(room.saturating_sub(GroupCounts::each(2, |_| 3)), GroupCounts::full(2));
        assert_eq!((room + GroupCounts::full(u32::MAX))[0], u32::MAX);
        assert_eq!((room.to_string(), GroupCounts::full(3).to_string()), ("5+2".into(), "3".into()));
    }
}
