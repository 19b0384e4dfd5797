//! What preempted requests had is kept beside the cache, and not computed again.

use serde_json::json;

use super::Advice;
use super::change_cost::ChangeCost;
use super::evidence::Evidence;
use super::gain::Gain;

const PREEMPTION: &str = "preemption";

pub(super) fn preempted(evidence: &Evidence) -> Option<Advice> {
    let (preemptions, tokens) = (evidence.preemptions, evidence.recomputed_tokens as f64);
    if evidence.has_tier || preemptions == 0 || evidence.computed_tokens == 0 {
        return None;
    }
    let (load_s, how) = evidence.loading(tokens);
    // All that runs may be preempted at once.
    let bytes = evidence.bytes();
    Some(Advice {
        kind: PREEMPTION,
        what: format!(
            "Keep what preempted requests had in memory beside the cache: --host-kv-memory {:.0}MiB",
            bytes / f64::from(1 << 20)
        ),
        because: format!(
            "{preemptions} times a request lost its blocks to others, and {tokens:.0} tokens were computed again; {how}"
        ),
        gain: Gain::Recomputed { share: tokens / evidence.computed_tokens as f64, load_s },
        cost: ChangeCost::HostMemory(bytes),
        evidence: json!({"bytes": bytes, "load_s": load_s, "preemptions": preemptions, "recomputed_tokens": tokens}),
    })
}

#[cfg(test)]
mod tests {
    use folio_sim::CostModel;
    use folio_sim::replay::TierConfig;

    use super::super::testing::{MIB, all, kept_s, replay, request, run, text};
    use super::*;

    #[test]
    fn keeping_what_preempted_requests_had_gains_what_was_promised() {
        let requests: Vec<_> = (0..120).map(|at| request(0, text(at, 64), 150)).collect();
        let before = run(&requests, 300, None).report;
        let recomputed = before.recompute_rate
            * (before.prompt_tokens as f64 + before.generated_tokens as f64)
            / (1.0 - before.recompute_rate);
        let price = CostModel::CPU_1B.token_us / 1e6;
        let (found, evidence) = replay(300, &[]);
        let evidence = Evidence {
            computed_tokens: before.prompt_tokens,
            prompt_s: before.prompt_tokens as f64 * price,
            preemptions: before.preemptions,
            recomputed_tokens: recomputed as u64,
            copy_bytes_per_s: Some(1e9),
            ..evidence
        };
        let advice = all(&found, &evidence);
        assert_eq!(advice.iter().map(|advice| advice.kind).collect::<Vec<_>>(), [PREEMPTION]);
        let promised = advice[0].gain.seconds(&evidence);
        let told = advice[0].json(&evidence);
        assert_eq!(told["gain"]["step_s"].as_f64(), Some(promised));
        assert!(told["gain"]["recomputed_tokens"].is_number() && !advice[0].is_a_clients(), "{told}");
        let bytes = advice[0].evidence["bytes"].as_f64().expect("a number");
        assert_eq!(bytes, 300.0 * MIB);
        let after = run(&requests, 300, Some(TierConfig { bytes: bytes as u64, bytes_per_s: 1e9 })).report;
        assert_eq!(after.generated_tokens, before.generated_tokens);
        kept_s(promised, before.seconds - after.seconds);
        // Where a tier has them already, and where it would be slower than computing.
        assert_eq!(all(&found, &Evidence { has_tier: true, ..evidence }), []);
        assert_eq!(all(&found, &Evidence { copy_bytes_per_s: Some(10e6), ..evidence }), []);
    }
}
