//! Belady's MIN: evict what is wanted again latest. Needs the whole trace in advance.
//!
//! Ties go to the deepest block, and a block never wanted again is dropped at once. Since chains share the next use of
//! their deepest common request, no parent goes before its child.

use std::collections::{BTreeSet, HashMap};

use super::BlockTrace;

const NEVER: usize = usize::MAX;

pub(super) fn hits(trace: &BlockTrace, blocks: usize) -> u64 {
    let next = next_uses(trace);
    // Cached blocks by (next use, depth, id), and the same by id.
    let mut order: BTreeSet<(usize, usize, u32)> = BTreeSet::new();
    let mut cached: HashMap<u32, (usize, usize)> = HashMap::new();
    let mut found = 0;
    for (ids, next) in trace.requests.iter().zip(&next) {
        found += ids.iter().take_while(|id| cached.contains_key(id)).count() as u64;
        for (depth, (id, next)) in ids.iter().zip(next).enumerate() {
            if let Some((next, depth)) = cached.remove(id) {
                order.remove(&(next, depth, *id));
            }
            if *next != NEVER {
                cached.insert(*id, (*next, depth));
                order.insert((*next, depth, *id));
            }
        }
        while order.len() > blocks {
            if let Some((_, _, id)) = order.pop_last() {
                cached.remove(&id);
            }
        }
    }
    found
}

/// For each block of each request, the next request that has it.
fn next_uses(trace: &BlockTrace) -> Vec<Vec<usize>> {
    let mut seen: HashMap<u32, usize> = HashMap::new();
    let mut next: Vec<Vec<usize>> = Vec::with_capacity(trace.requests.len());
    for (request, ids) in trace.requests.iter().enumerate().rev() {
        next.push(ids.iter().map(|id| seen.get(id).copied().unwrap_or(NEVER)).collect());
        seen.extend(ids.iter().map(|id| (*id, request)));
    }
    next.reverse();
    next
}
