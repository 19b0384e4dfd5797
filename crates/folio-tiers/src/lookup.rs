//! What a store has of a prompt, where it knows that by itself: each block is found alone.

use std::ops::Range;

use folio_kv::BlockHashes;

use crate::tier::Device;
use crate::types::BlockKey;

/// See [`Tier::find`](folio_engine::Tier::find).
pub(crate) fn found(
    device: &Device,
    hashes: &BlockHashes,
    most: u32,
    contains: impl Fn(&BlockKey) -> bool,
) -> Vec<Range<u32>> {
    let key = |hash, group| BlockKey { hash, group };
    let is_stored: Vec<bool> =
        hashes.iter().take(most as usize).map(|hash| contains(&key(*hash, 0))).collect();
    let mut ranges: Vec<Range<u32>> = Vec::new();
    for (at, _) in (0..).zip(&is_stored).filter(|(_, stored)| **stored) {
        match ranges.last_mut().filter(|range| range.end == at) {
            Some(range) => range.end = at + 1,
            None => ranges.push(at..at + 1),
        }
    }
    if device.groups.len() > 1 {
        // Up to the last end behind which the other groups have what is read.
        let has = |group: usize, last: u32| {
            let hash = hashes.get(last);
            hash.is_some_and(|hash| contains(&key(*hash, group as u8)))
        };
        for range in &mut ranges {
            let ends = |end: &u32| (1..device.groups.len()).all(|group| reads(device, group, *end, &has));
            range.end = range.clone().rev().map(|last| last + 1).find(ends).unwrap_or(range.start);
        }
        ranges.retain(|range| !range.is_empty());
    }
    ranges
}

/// Whether a group has what the query behind `end` blocks of group 0 reads. The last block is asked for first: it is rarely there.
fn reads(device: &Device, group: usize, end: u32, has: &impl Fn(usize, u32) -> bool) -> bool {
    let (size, config) = (device.groups[0].block_tokens, &device.groups[group]);
    let (positions, ratio) = (end * size, config.block_tokens / size);
    let whole = positions / config.block_tokens;
    positions.is_multiple_of(config.block_tokens)
        && (config.optional
            || (config.first_block(positions)..whole).rev().all(|index| has(group, (index + 1) * ratio - 1)))
}
