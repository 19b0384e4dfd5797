//! Smaller blocks, where what the last block of each sequence lacks is a part of the cache.
//!
//! A sequence ends anywhere in its last block, so blocks of `n` tokens lack about `(n - 1) / 2` of each: what was measured of the present size
//! becomes so much less with a smaller one, and the same memory holds so many more tokens. What more room gains is `memory`'s.

use serde_json::json;

use super::super::prompts::PromptFindings;
use super::change_cost::ChangeCost;
use super::evidence::Evidence;
use super::gain::Gain;
use super::memory::{ENOUGH, spared};
use super::{Advice, BLOCKS};

/// Blocks have a multiple of so many tokens.
const MULTIPLE: u32 = 8;

pub(super) fn smaller(found: &PromptFindings, evidence: &Evidence) -> Option<Advice> {
    let (size, waste) = (evidence.block_tokens, evidence.waste?);
    if evidence.has_windows || evidence.evictions == 0 || found.index.asked() < BLOCKS {
        return None;
    }
    // Of blocks that are not full nothing is in the index: they have on average as many tokens as they lack.
    let room = evidence.room() * (1.0 - 2.0 * waste).max(0.0);
    let times = |smaller: u32| {
        let lacks = waste * f64::from(smaller - 1) / f64::from(size - 1);
        1.0 / (1.0 - waste + lacks)
    };
    let gained = |smaller: u32| spared(found, room, room * times(smaller)).unwrap_or(0.0);
    let sizes = || [2, 4, 8, 16].into_iter().map(|by| size / by).filter(|of| of % MULTIPLE == 0 && *of > 0);
    let most = sizes().map(gained).fold(0.0, f64::max);
    let smaller = sizes().find(|of| gained(*of) >= ENOUGH * most)?;
    let (share, times) = (gained(smaller), times(smaller));
    Some(Advice {
        kind: "block_size",
        what: format!("Keep KV in blocks of {smaller} tokens: --block-size {smaller}"),
        because: format!(
            "content is evicted before it is asked for again, and {:.0} % of the slots of blocks of {size} tokens are never written; with {smaller} the same memory holds {times:.2} times as many tokens, and {:.0} % of the prompt tokens computed now would be found",
            100.0 * waste,
            100.0 * share
        ),
        gain: Gain::of_prompts(share),
        cost: ChangeCost::MoreBlocks(size / smaller),
        evidence: json!({"block_tokens": smaller, "waste": waste, "evicted_blocks": evidence.evictions}),
    })
}

#[cfg(test)]
mod tests {
    use super::super::testing::{all, asked_about, evicting_last_used, kept, numbers, replay_on, text};
    use super::*;

    /// Texts of 33 to 64 tokens that come again.
    fn short(count: u64, requests: usize) -> Vec<Vec<u32>> {
        let of = |seed: u64| text(seed, 33 + (numbers(100 + seed)() % 32) as usize);
        asked_about(count, requests).map(of).collect()
    }

    #[test]
    fn smaller_blocks_gain_what_was_promised() {
        let prompts = short(200, 1000);
        // The same memory.
        let with = |size: u32| replay_on(evicting_last_used(160 * 32 / size, size), &prompts, &[]);
        let (found, evidence) = with(32);
        let find = |evidence: &Evidence| {
            all(&found, evidence).into_iter().find(|advice| advice.kind == "block_size")
        };
        let advice = find(&evidence).expect("there is cause");
        assert_eq!((&advice.evidence["block_tokens"], advice.is_a_clients()), (&json!(8), false));
        assert!(advice.what.ends_with("--block-size 8"), "{advice:?}");
        assert_eq!(advice.told()["costs"]["blocks_times"], 4);
        let (_, after) = with(8);
        kept(advice.gain.share(&evidence), &evidence, &after);
        // Where blocks are written to their end, where it is not known, and where it says nothing of other groups.
        for waste in [Some(0.0), None] {
            assert_eq!(find(&Evidence { waste, ..evidence }), None);
        }
        assert_eq!(find(&Evidence { has_windows: true, ..evidence }), None);
        assert_eq!(find(&Evidence { evictions: 0, ..evidence }), None, "everything fits");
    }

    #[test]
    fn of_the_smallest_blocks_nothing_is_said() {
        let prompts = short(200, 300);
        let (found, evidence) = replay_on(evicting_last_used(160 * 4, 8), &prompts, &[]);
        assert!(evidence.evictions > 0 && evidence.waste.is_some_and(|waste| waste > 0.05));
        assert!(all(&found, &evidence).iter().all(|advice| advice.kind != "block_size"));
    }
}
