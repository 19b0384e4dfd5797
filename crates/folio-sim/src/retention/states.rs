//! States of recurrent layers over recorded traffic: what is found again by which rule of what is kept.
//!
//! Owns: the rules, and the cache with states that they race in: in the model of [`super::hits`], but that a prompt is computed block by block.
//! Must never: choose who goes; that the real cache does under every rule, with the same memory.

use folio_kv::{BlockHashes, CacheConfig, GroupConfig, KvCache, Layout, LearnedLifetimes, TenantId};

use super::BlockTrace;
use crate::scenario::root;

/// Behind which blocks a state is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Keep {
    /// Behind every so many, where a request ends, and where it leaves what others began with; those that were merely passed go first. The
    /// engine's.
    Every(u32),
    /// The same, but where requests part within such a distance only the last before: to compare with.
    Passed(u32),
    /// Where a request ends, and where it leaves what others began with (Marconi, arXiv 2411.19379, section 4.1: what two requests share is
    /// known with the second, has its state from then on, and is found by the third).
    Marconi,
}

/// Blocks found with `blocks` for keys and values and room for `states`.
pub fn hits_with_states(trace: &BlockTrace, blocks: u32, states: u32, keep: Keep) -> u64 {
    let root = root(TenantId(0));
    let every = match keep {
        Keep::Every(every) | Keep::Passed(every) => every,
        Keep::Marconi => 1,
    };
    let group = GroupConfig {
        layout: Layout::State,
        blocks: states,
        block_tokens: every,
        bytes_per_block: 1,
        optional: false,
    };
    let config = CacheConfig { blocks, block_tokens: 1, bytes_per_block: 1 };
    let mut cache = KvCache::with_groups(config, &[group], Box::new(LearnedLifetimes::new(0.0)));
    let mut copies = Vec::new();
    for ids in &trace.requests {
        let length = ids.len() as u32;
        let mut table = cache.attach(BlockHashes::new(&root, ids, 1), ids, length, &mut copies);
        // Who does not fit as a whole keeps nothing new, as without states.
        let end = if length <= blocks { length } else { table.computed() };
        for computed in table.computed() + 1..=end {
            cache.grow(&mut table, computed, &mut copies).expect("nothing else is in use");
            cache.commit(&mut table, ids, computed).expect("what was grown can be committed");
            if let Keep::Every(_) = keep {
                cache.keep_branch(&mut table);
            }
        }
        cache.release(table, ids);
        copies.clear();
        if keep == Keep::Marconi {
            cache.drop_passed(1);
        }
    }
    cache.stats().queries.hit_tokens
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::retention::{Policy, hits};

    fn found(requests: &[&[u32]], states: u32, keep: Keep) -> u64 {
        let trace = BlockTrace { requests: requests.iter().map(|ids| ids.to_vec()).collect() };
        hits_with_states(&trace, 100, states, keep)
    }

    /// A conversation goes on from where it ended under all. What two share is found by the second where a state was passed, as far as the last
    /// of them where they lie apart, and by the third as a whole where one is kept where requests part.
    #[test]
    fn each_rule_keeps_what_its_name_says() {
        let goes_on: [&[u32]; 2] = [&[1, 2, 3], &[1, 2, 3, 4]];
        let shared: [&[u32]; 4] = [&[1, 2, 3, 4], &[1, 2, 3, 5], &[1, 2, 3, 6], &[1, 2, 3, 7]];
        let rules = [(Keep::Every(1), 9), (Keep::Every(2), 8), (Keep::Passed(2), 6), (Keep::Marconi, 6)];
        for (keep, of_shared) in rules {
            assert_eq!(found(&goes_on, 10, keep), 3, "{keep:?}");
            assert_eq!(found(&shared, 10, keep), of_shared, "{keep:?}");
        }
    }

    /// What was passed takes no room from what is wanted, however much of it there is.
    #[test]
    fn a_long_prompt_costs_no_state_that_was_wanted() {
        let long: Vec<u32> = (100..160).collect();
        let requests: [&[u32]; 3] = [&[1, 2], &long, &[1, 2, 3]];
        for keep in [Keep::Every(1), Keep::Marconi] {
            assert_eq!(found(&requests, 5, keep), 2, "{keep:?}");
        }
    }

    #[test]
    fn with_a_state_for_each_block_all_is_found_that_is_without() {
        let trace = crate::retention::workloads::Kind::Chats.generate(1, 4);
        assert_eq!(hits_with_states(&trace, 2000, 2000, Keep::Every(1)), hits(&trace, 2000, Policy::Folio));
    }
}
