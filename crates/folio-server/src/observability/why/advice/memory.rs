//! More of what is evicted stays: more memory for KV, the same memory with int8, or memory beside the cache.

use serde_json::json;

use super::super::prompts::PromptFindings;
use super::change_cost::ChangeCost;
use super::evidence::Evidence;
use super::gain::Gain;
use super::{Advice, BLOCKS};

/// Memory that is thought of, as multiples of the present.
const MULTIPLES: [f64; 4] = [1.5, 2.0, 4.0, 8.0];
/// Share of what the largest of them gains that is enough.
pub(super) const ENOUGH: f64 = 0.8;

/// Share of the computed tokens that would not have to be with room for `then` blocks instead of `now`.
pub(super) fn spared(found: &PromptFindings, now: f64, then: f64) -> Option<f64> {
    let index = &found.index;
    let (now, then) = (index.hits_with(now)?, index.hits_with(then)?);
    let found = index.found()?;
    // What is found already, by a better order of eviction than that of the last use, is not gained again.
    let more = (then - now).min(index.unbounded()? - found);
    Some((more / (1.0 - found).max(f64::MIN_POSITIVE)).clamp(0.0, 1.0))
}

/// The least of [`MULTIPLES`] that gains enough.
fn enough(gained: impl Fn(f64) -> f64) -> f64 {
    let most = gained(MULTIPLES[MULTIPLES.len() - 1]);
    MULTIPLES.into_iter().find(|times| gained(*times) >= ENOUGH * most).unwrap_or(MULTIPLES[0])
}

pub(super) fn all(found: &PromptFindings, evidence: &Evidence) -> Vec<Advice> {
    let index = &found.index;
    if evidence.evictions == 0 || index.asked() < BLOCKS {
        return Vec::new();
    }
    let blocks = f64::from(evidence.blocks);
    let (room, beside) = (evidence.room(), evidence.room_beside());
    let spared = |then: f64| spared(found, room, then.max(room)).unwrap_or(0.0);
    let percent = |share: f64| format!("{:.0} %", 100.0 * share);
    let hits = json!({
        "evicted_blocks": evidence.evictions,
        "hit_share": index.found(),
        "hit_share_unbounded": index.unbounded(),
    });
    let unbounded = percent(index.unbounded().unwrap_or(0.0));
    let found_now = percent(index.found().unwrap_or(0.0));
    let why = |share: f64| {
        format!(
            "hits are {found_now} of prompt tokens and would be {unbounded} without bounds; content is evicted before it is asked for again. {} of the prompt tokens computed now would be found",
            percent(share)
        )
    };
    let times = enough(|times| spared(times * blocks));
    let share = spared(times * blocks);
    let bytes = evidence.bytes();
    let mut all = vec![Advice {
        kind: "kv_memory",
        what: format!(
            "Give the KV cache {times} times the memory: --kv-cache-memory {:.0}MiB",
            bytes * times / f64::from(1 << 20)
        ),
        because: why(share),
        gain: Gain::of_prompts(share),
        cost: ChangeCost::CacheMemory(bytes * (times - 1.0)),
        evidence: json!({"times": times, "bytes": bytes * times, "cache": hits}),
    }];
    if let Some(times) = evidence.int8 {
        // What a tier holds is as small.
        let share = spared(times * room);
        all.push(Advice {
            kind: "kv_int8",
            what: "Keep KV as int8: --kv-cache-dtype int8".to_owned(),
            because: format!("the same memory holds {times:.2} times as many tokens; {}", why(share)),
            gain: Gain::of_prompts(share),
            cost: ChangeCost::Precision,
            evidence: json!({"times": times, "cache": hits}),
        });
    }
    if !evidence.has_tier {
        let more = bytes * times;
        let (load_s, how) = evidence.loading(share * evidence.computed_tokens as f64);
        all.push(Advice {
            kind: "host_tier",
            what: format!(
                "Keep evicted KV in memory beside the cache: --host-kv-memory {:.0}MiB",
                more / f64::from(1 << 20)
            ),
            because: format!("{}; {how}", why(share)),
            gain: Gain::Prompts { share, load_s },
            cost: ChangeCost::HostMemory(more),
            evidence: json!({"bytes": more, "load_s": load_s, "cache": hits}),
        });
    }
    if let Some(tier) = evidence.tier.filter(|tier| tier.name == "host" && tier.is_full) {
        let times = enough(|times| spared(times * beside));
        let (share, bytes) = (spared(times * beside), tier.bytes as f64);
        let (load_s, how) = evidence.loading(share * evidence.computed_tokens as f64);
        all.push(Advice {
            kind: "larger_tier",
            what: format!(
                "Give what is kept beside the cache {times} times the memory: --host-kv-memory {:.0}MiB",
                bytes * times / f64::from(1 << 20)
            ),
            because: format!("memory beside the cache is full, too; {}; {how}", why(share)),
            gain: Gain::Prompts { share, load_s },
            cost: ChangeCost::HostMemory(bytes * (times - 1.0)),
            evidence: json!({"times": times, "bytes": bytes * times, "load_s": load_s, "cache": hits}),
        });
    }
    all
}

#[cfg(test)]
mod tests {
    use folio_sim::replay::{Replay, TierConfig};
    use folio_sim::trace::TraceRequest;

    use super::super::TierRoom;
    use super::super::testing::{
        self, MIB, documents, kept, kept_s, kinds, replay, request, run, seconds, seen,
    };
    use super::*;

    #[test]
    fn more_memory_gains_what_was_promised() {
        let prompts = documents(40, 600);
        let (found, evidence) = replay(300, &prompts);
        let advice = testing::all(&found, &evidence);
        let kinds: Vec<_> = advice.iter().map(|advice| advice.kind).collect();
        for kind in ["kv_memory", "kv_int8", "host_tier"] {
            assert!(kinds.contains(&kind), "{kind}: {kinds:?}");
        }
        assert!(advice.is_sorted_by(|one, other| one.gain.share(&evidence) >= other.gain.share(&evidence)));
        for one in &advice {
            let (told, bytes) = (one.json(&evidence), one.evidence["bytes"].as_f64());
            match one.kind {
                "kv_memory" => {
                    assert_eq!(told["costs"]["memory_bytes"].as_f64(), bytes.map(|all| all - 300.0 * MIB))
                }
                "host_tier" => assert_eq!(told["costs"]["host_memory_bytes"].as_f64(), bytes),
                "kv_int8" => assert!(told["costs"]["kl"][0].is_number(), "{told}"),
                _ => {}
            }
            assert!(told["costs"]["text"].is_string(), "{told}");
        }
        for one in advice.iter().filter(|advice| advice.evidence["times"].is_number()) {
            let times = one.evidence["times"].as_f64().expect("a number");
            let (_, after) = replay((300.0 * times) as u32, &prompts);
            kept(one.gain.share(&evidence), &evidence, &after);
        }
    }

    /// Documents that are asked about one after another, so that whoever is loaded is waited for.
    fn one_by_one(prompts: &[Vec<u32>]) -> Vec<TraceRequest> {
        (0..).zip(prompts).map(|(at, prompt)| request(at * 60_000_000, prompt.clone(), 1)).collect()
    }

    #[test]
    fn memory_beside_the_cache_gains_what_was_promised_less_what_loading_takes() {
        let prompts = documents(40, 600);
        let requests = one_by_one(&prompts);
        let before = run(&requests, 300, None);
        let (found, evidence) = seen(&prompts, &before);
        let advice = |rate| {
            let evidence = Evidence { copy_bytes_per_s: rate, ..evidence };
            let advice = testing::all(&found, &evidence);
            let tier = advice.into_iter().find(|advice| advice.kind == "host_tier");
            tier.map(|advice| (advice.gain.seconds(&evidence), advice))
        };
        let (free, unmeasured) = advice(None).expect("there is cause");
        assert!(unmeasured.because.contains("was not measured"), "{unmeasured:?}");
        for rate in [1e9, 150e6] {
            let (promised, advice) = advice(Some(rate)).expect("it pays");
            assert!(promised < free && advice.because.contains("taken off"), "{advice:?}");
            let bytes = advice.evidence["bytes"].as_f64().expect("a number") as u64;
            let after = run(&requests, 300, Some(TierConfig { bytes, bytes_per_s: rate }));
            kept_s(promised, seconds(&before) - seconds(&after));
        }
        // As long as computing takes.
        assert_eq!(advice(Some(20e6)), None);
    }

    #[test]
    fn a_larger_tier_gains_what_was_promised() {
        let prompts = documents(40, 600);
        let requests = one_by_one(&prompts);
        let with = |bytes| -> Replay { run(&requests, 300, Some(TierConfig { bytes, bytes_per_s: 1e9 })) };
        let bytes = (450.0 * MIB) as u64;
        let before = with(bytes);
        let (found, evidence) = seen(&prompts, &before);
        let tier = |is_full| Some(TierRoom { name: "host", bytes, is_full });
        let evidence = Evidence { has_tier: true, tier: tier(true), copy_bytes_per_s: Some(1e9), ..evidence };
        let advice = testing::all(&found, &evidence);
        let larger = advice.iter().find(|advice| advice.kind == "larger_tier").expect("there is cause");
        let named = larger.evidence["bytes"].as_f64().expect("a number");
        assert_eq!(larger.json(&evidence)["costs"]["host_memory_bytes"].as_f64(), Some(named - 450.0 * MIB));
        kept_s(larger.gain.seconds(&evidence), seconds(&before) - seconds(&with(named as u64)));
        assert!(advice.iter().all(|advice| advice.kind != "host_tier"), "there is one");
        // Where the tier is as large as any cache that is thought of, a larger cache finds nothing more.
        let kinds = |tier| kinds(&found, &Evidence { tier, ..evidence });
        assert!(!kinds(tier(false)).contains(&"larger_tier"), "it has room");
        assert!(!kinds(Some(TierRoom { name: "disk", bytes, is_full: true })).contains(&"larger_tier"));
        let large = Some(TierRoom { name: "host", bytes: (2400.0 * MIB) as u64, is_full: true });
        assert!(!kinds(large).iter().any(|kind| ["kv_memory", "larger_tier"].contains(kind)));
    }
}
