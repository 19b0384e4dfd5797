//! How long content is to be kept, said by whoever made it.
//!
//! Owns: the words for it. Must never: promise more than they say: a priority and a time to live move a block in the order
//! of eviction, only a pin keeps it (see `prefixes`).

use std::ops::Range;

/// Of content nobody said anything about.
pub const DEFAULT_PRIORITY: u8 = 50;
/// The highest that a client may ask for. It orders the blocks of its own tenant.
pub const PRIORITY_MAX: u8 = 100;
/// Of what an operator declared: behind everything else, whosever that is. No client can ask for it.
pub const OPERATOR_PRIORITY: u8 = PRIORITY_MAX + 1;

/// Place of a block in the order of eviction. The greater is the stronger: a higher priority, then a longer time to live.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Retention {
    /// 0 ..= [`PRIORITY_MAX`]; below [`DEFAULT_PRIORITY`] goes before everything else, above it after its tenant's other blocks.
    pub priority: u8,
    /// Unused for so long, microseconds, the block is given up before all others. `None`: never for this reason.
    pub ttl_us: Option<u64>,
}

impl Default for Retention {
    fn default() -> Self {
        Self { priority: DEFAULT_PRIORITY, ttl_us: None }
    }
}

impl PartialOrd for Retention {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Retention {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        let strength = |of: &Self| (of.priority, of.ttl_us.unwrap_or(u64::MAX));
        strength(self).cmp(&strength(other))
    }
}

/// What is wanted for some positions of a request. A block that holds one of them is meant as a whole.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RetentionRange {
    /// Positions; the end may lie beyond the prompt (`u32::MAX`: whatever is generated, too).
    pub tokens: Range<u32>,
    pub priority: u8,
    pub ttl_us: Option<u64>,
    /// Keep the blocks, and all before them, until they are unpinned (or `ttl_us` has passed without a use).
    pub pin: bool,
}

impl RetentionRange {
    pub fn retention(&self) -> Retention {
        Retention { priority: self.priority.min(OPERATOR_PRIORITY), ttl_us: self.ttl_us }
    }
}

/// What `ranges` want for the block of positions `block`: the strongest of those that cover part of it, if any does. Nothing found
/// behind a block is reachable without it, so what protects a later block protects this one, too.
pub(crate) fn strongest(ranges: &[RetentionRange], block: Range<u32>) -> Option<Retention> {
    let wanted = ranges.iter().filter(|range| {
        let covers = range.tokens.start < block.end && range.tokens.end > block.start;
        let lies_behind = range.tokens.start >= block.end;
        !range.tokens.is_empty() && (covers || (lies_behind && range.priority > DEFAULT_PRIORITY))
    });
    wanted.map(RetentionRange::retention).max()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn range(tokens: Range<u32>, priority: u8, ttl_us: Option<u64>) -> RetentionRange {
        RetentionRange { tokens, priority, ttl_us, pin: false }
    }

    #[test]
    fn the_strongest_of_what_covers_a_block_counts() {
        let of = |ranges: &[RetentionRange], block| {
            let Retention { priority, ttl_us } = strongest(ranges, block).unwrap_or_default();
            (priority, ttl_us)
        };
        assert_eq!(of(&[], 0..4), (50, None));
        let ranges = [range(0..5, 10, None), range(5..6, 80, Some(9)), range(9..9, 100, None)];
        assert_eq!(of(&ranges, 4..8), (80, Some(9)), "one position is enough");
        assert_eq!(of(&ranges, 0..4), (80, Some(9)), "what protects a later block protects this one");
        assert_eq!(of(&ranges, 8..12), (50, None), "an empty range covers nothing");
        let ranges = [range(0..8, 60, Some(5)), range(0..4, 60, None), range(8..12, 20, None)];
        assert_eq!(of(&ranges, 0..4), (60, None), "of equal priorities the longer time counts");
        assert_eq!(of(&ranges, 4..8), (60, Some(5)), "a weak range weakens nothing before it");
        assert_eq!(of(&[range(3..u32::MAX, 0, None)], 8..12), (0, None));
    }
}
