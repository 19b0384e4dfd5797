//! What to change, with the evidence and what it would gain.
//!
//! Owns: which figures are a cause, and the model that the gain is computed from. Must never: say anything where there is no cause, or tell a
//! token of anybody's prompt.
//!
//! The gain of all advice so far is tokens that need not be computed, in the time that the prompts' tokens of the window took by
//! themselves, less what loading them takes at the machine's measured rate. With more memory the cache hits what a cache of the last blocks of that size would have hit, less what one of the present
//! size would (`shadow`): the difference is told, since Folio's own order of eviction is not that of the last use.

use folio_kv::TenantId;
use serde_json::{Value, json};

use super::breaks::Break;
use super::change_cost::ChangeCost;
use super::evidence::Evidence;
use super::prompts::PromptFindings;
use super::repeated::RepeatedPrefix;

/// Least share of the computed tokens of prompts that advice is given for.
const LEAST: f64 = 0.05;
/// Memory that is thought of, as multiples of the present.
const MULTIPLES: [f64; 4] = [1.5, 2.0, 4.0, 8.0];
/// Share of what the largest of them gains that is enough.
const ENOUGH: f64 = 0.8;
/// Blocks that must have been asked for, and prompts that must have broken, before anything is said.
const BLOCKS: f64 = 64.0;
const PROMPTS: f64 = 4.0;
/// Prompts that must have begun with a prefix before it is worth pinning, and the share of the cache that it may take.
const REPEATED: f64 = 8.0;
const PINNED: f64 = 0.25;
/// What is computed again is no token of a prompt.
const PREEMPTION: &str = "preemption";
/// The kinds of advice that are a client's to follow.
const BROKEN: &str = "broken_prefix";
const PIN: &str = "pin_prefix";

/// One change.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Advice {
    pub kind: &'static str,
    pub what: String,
    pub because: String,
    /// Share of the computed tokens of prompts that would not be computed; or what would not be computed again, as such a share.
    pub share: f64,
    /// Seconds that loading them takes.
    pub load_s: f64,
    pub cost: ChangeCost,
    pub evidence: Value,
}

impl Advice {
    /// It is for a client to follow, and says nothing of others.
    pub fn is_a_clients(&self) -> bool {
        [BROKEN, PIN].contains(&self.kind)
    }

    /// Without what it gains, which is of everybody's figures.
    pub fn told(&self) -> Value {
        let costs = self.cost.json();
        json!({"kind": self.kind, "do": self.what, "because": self.because, "costs": costs, "evidence": self.evidence})
    }

    /// With what it gains of the window.
    pub fn json(&self, evidence: &Evidence) -> Value {
        let mut told = self.told();
        let (tokens, step_s) = (self.share * evidence.computed_tokens as f64, self.gain_s(evidence));
        told["gain"] = match self.kind {
            PREEMPTION => json!({"recomputed_tokens": tokens, "step_s": step_s}),
            _ => json!({"prompt_tokens_share": self.share, "prompt_tokens": tokens, "step_s": step_s}),
        };
        told
    }

    fn gain_s(&self, evidence: &Evidence) -> f64 {
        self.share * evidence.prompt_s - self.load_s
    }
}

/// Share of the computed tokens that would not have to be with room for `then` blocks instead of `now`.
fn spared(found: &PromptFindings, now: f64, then: f64) -> Option<f64> {
    let index = &found.index;
    let (now, then) = (index.hits_with(now)?, index.hits_with(then)?);
    let found = index.found()?;
    // What is found already, by a better order of eviction than that of the last use, is not gained again.
    let more = (then - now).min(index.unbounded()? - found);
    Some((more / (1.0 - found).max(f64::MIN_POSITIVE)).clamp(0.0, 1.0))
}

/// All of it, what gains most first. `name`: of a tenant, whose prompts may be spoken of.
pub(super) fn advise(
    found: &PromptFindings,
    evidence: &Evidence,
    name: impl Fn(TenantId) -> Option<String>,
) -> Vec<Advice> {
    let mut all: Vec<Advice> = memory(found, evidence);
    all.extend(preempted(evidence));
    all.extend(found.breaks.all().filter_map(|of| broken(found, evidence, of, &name(of.tenant)?)));
    if evidence.evictions > 0 {
        let most = (PINNED * f64::from(evidence.blocks)) as u32;
        let worst = found.repeated.worst(most, REPEATED);
        all.extend(worst.iter().filter_map(|of| repeated(found, evidence, of, &name(of.tenant)?)));
    }
    let least_s = LEAST * evidence.prompt_s;
    all.retain(|advice| advice.share >= LEAST && advice.gain_s(evidence) >= least_s);
    all.sort_by(|one, other| other.gain_s(evidence).total_cmp(&one.gain_s(evidence)));
    all
}

/// The least of [`MULTIPLES`] that gains enough.
fn enough(gained: impl Fn(f64) -> f64) -> f64 {
    let most = gained(MULTIPLES[MULTIPLES.len() - 1]);
    MULTIPLES.into_iter().find(|times| gained(*times) >= ENOUGH * most).unwrap_or(MULTIPLES[0])
}

fn memory(found: &PromptFindings, evidence: &Evidence) -> Vec<Advice> {
    let index = &found.index;
    if evidence.evictions == 0 || index.asked() < BLOCKS {
        return Vec::new();
    }
    // A tier has what the cache has, too.
    let blocks = f64::from(evidence.blocks);
    let beside = evidence.tier.map_or(0.0, |tier| tier.bytes as f64 / evidence.block_bytes.max(1) as f64);
    let room = blocks.max(beside);
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
        share,
        load_s: 0.0,
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
            share,
            load_s: 0.0,
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
            share,
            load_s,
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
            share,
            load_s,
            cost: ChangeCost::HostMemory(bytes * (times - 1.0)),
            evidence: json!({"times": times, "bytes": bytes * times, "load_s": load_s, "cache": hits}),
        });
    }
    all
}

/// What preempted sequences had is kept beside the cache and not computed again.
fn preempted(evidence: &Evidence) -> Option<Advice> {
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
        share: tokens / evidence.computed_tokens as f64,
        load_s,
        cost: ChangeCost::HostMemory(bytes),
        evidence: json!({"bytes": bytes, "load_s": load_s, "preemptions": preemptions, "recomputed_tokens": tokens}),
    })
}

/// Tokens of prompts that were computed, as far back as is looked.
fn computed(found: &PromptFindings, evidence: &Evidence) -> Option<f64> {
    let blocks = found.index.asked() * (1.0 - found.index.found()?);
    Some(blocks * f64::from(evidence.block_tokens)).filter(|computed| *computed > 0.0)
}

fn repeated(found: &PromptFindings, evidence: &Evidence, of: &RepeatedPrefix, name: &str) -> Option<Advice> {
    let (tokens, prompts) = (of.blocks * evidence.block_tokens, of.prompts);
    // What else is found now had these blocks, too: of that goes their part.
    let found_now = found.index.asked() * found.index.found()? * f64::from(evidence.block_tokens);
    let displaced = found_now * f64::from(of.blocks) / f64::from(evidence.blocks.max(1));
    let gained = (of.computed_again - displaced).max(0.0);
    Some(Advice {
        kind: PIN,
        what: format!(
            "Pin the first {tokens} tokens that prompts of {name} begin with: \"pin\": true in `cache` of one such request"
        ),
        because: format!(
            "about {prompts:.0} prompts began with them, and they were evicted and computed again: {:.0} tokens of them; they take {:.1} % of the cache",
            of.computed_again,
            100.0 * f64::from(of.blocks) / f64::from(evidence.blocks.max(1))
        ),
        share: (gained / computed(found, evidence)?).min(1.0),
        load_s: 0.0,
        cost: ChangeCost::PartOfCache(f64::from(of.blocks) * evidence.block_bytes as f64),
        evidence: json!({"tenant": name, "tokens": tokens, "prompts": prompts, "computed_again": of.computed_again}),
    })
}

fn broken(found: &PromptFindings, evidence: &Evidence, of: &Break, name: &str) -> Option<Advice> {
    let computed = computed(found, evidence).filter(|_| of.prompts >= PROMPTS)?;
    let share = (of.tokens / computed).min(1.0);
    let behind = of.tokens / of.prompts;
    Some(Advice {
        kind: BROKEN,
        what: format!("Have {name} put what changes in its prompts at token {} behind what does not", of.at),
        because: format!(
            "its prompts differ from those before at token {}, and about {behind:.0} tokens behind that are as before and computed again",
            of.at
        ),
        share,
        load_s: 0.0,
        cost: ChangeCost::Nothing,
        evidence: json!({"tenant": name, "position": of.at, "tokens_behind": behind}),
    })
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use folio_engine::request::RequestId;
    use folio_engine::{CacheCommand, CacheResponse, Micros, Request, SamplingParams, SchedulerConfig};
    use folio_kv::{BlockHashes, CacheConfig, Identity, KvCache, LruLeafFirst, Retention, Root, TenantId};
    use folio_sim::CostModel;
    use folio_sim::machine::{Machine, VOCAB};
    use folio_sim::replay::{Replay, ReplayConfig, TierConfig, replay_in_full};
    use folio_sim::trace::TraceRequest;

    use super::*;
    use crate::observability::why::evidence::TierRoom;

    const TENANT: TenantId = TenantId(1);
    const BLOCK: u32 = 4;

    fn root() -> Root {
        Root::derive(&Identity {
            tenant: TENANT,
            tenant_secret: &[1; 32],
            model_digest: &[2; 32],
            layout_digest: &[3; 32],
            extra: &[],
        })
    }

    /// The same numbers every time.
    fn numbers(seed: u64) -> impl FnMut() -> u64 {
        let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
        move || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state >> 11
        }
    }

    fn text(seed: u64, tokens: usize) -> Vec<u32> {
        let mut next = numbers(seed);
        (0..tokens).map(|_| (next() % u64::from(VOCAB)) as u32).collect()
    }

    /// What the engine computes of prompts that come one after the other, and what is found out about them.
    fn replay(blocks: u32, prompts: &[Vec<u32>]) -> (PromptFindings, Evidence) {
        replay_on(Machine::new(config(), blocks, BLOCK), prompts, &[])
    }

    /// The same where what was used least recently is evicted, and where this is pinned as soon as a prompt has it.
    fn replay_pinning(blocks: u32, prompts: &[Vec<u32>], pinned: &[u32]) -> (PromptFindings, Evidence) {
        let mut machine = Machine::new(config(), blocks, BLOCK);
        let policy = Box::new(LruLeafFirst::default());
        machine.cache = KvCache::new(*machine.cache.config(), policy);
        replay_on(machine, prompts, pinned)
    }

    fn config() -> SchedulerConfig {
        SchedulerConfig { max_model_len: 512, max_num_batched_tokens: 256, ..Default::default() }
    }

    fn replay_on(mut machine: Machine, prompts: &[Vec<u32>], pinned: &[u32]) -> (PromptFindings, Evidence) {
        let blocks = machine.cache.config().blocks;
        let mut found = PromptFindings::default();
        for (id, prompt) in prompts.iter().enumerate() {
            let prompt: Arc<[u32]> = prompt.as_slice().into();
            let sampling = SamplingParams::greedy(1);
            machine.submit(Request::new(RequestId(id as u64), TENANT, root(), prompt.clone(), sampling));
            machine.run();
            let cached = machine.cached_tokens(id as u64).expect("its prompt was computed");
            if !pinned.is_empty() && prompt.starts_with(pinned) {
                let (hashes, tokens) = (BlockHashes::new(&root(), pinned, BLOCK).into(), pinned.len() as u32);
                let keep = CacheCommand::Keep { hashes, tokens, retention: Retention::default(), pin: true };
                let kept = machine.scheduler.command(&mut machine.cache, keep);
                assert!(matches!(kept, CacheResponse::Prefix(_)), "{kept:?}");
            }
            found.see(TENANT, &BlockHashes::new(&root(), &prompt, BLOCK), &prompt, cached, Micros(0));
        }
        let (stats, counters) = (machine.cache.stats(), machine.scheduler.counters());
        let evidence = Evidence {
            blocks,
            block_tokens: BLOCK,
            block_bytes: 1 << 20,
            evictions: stats.evictions,
            computed_tokens: counters.prompt_tokens - counters.cached_prompt_tokens,
            prompt_s: 1.0,
            int8: Some(1.9),
            has_tier: false,
            tier: None,
            preemptions: counters.preemptions,
            recomputed_tokens: counters.recomputed_tokens,
            copy_bytes_per_s: None,
        };
        (found, evidence)
    }

    fn all(found: &PromptFindings, evidence: &Evidence) -> Vec<Advice> {
        advise(found, evidence, |_| Some("acme".to_owned()))
    }

    /// What was gained, against what was promised.
    fn kept(promised: f64, before: &Evidence, after: &Evidence) {
        let gained = 1.0 - after.computed_tokens as f64 / before.computed_tokens as f64;
        assert!(
            gained > promised / 1.5 && gained < promised * 1.5,
            "{promised} was promised, {gained} gained"
        );
    }

    /// Documents that are asked about again, some more often than others.
    fn documents(count: u64, requests: usize) -> Vec<Vec<u32>> {
        let mut next = numbers(7);
        let mut share = move || next() as f64 / (1u64 << 53) as f64;
        let ask = |at: usize| {
            [text((share().powi(2) * count as f64) as u64, 120), text(1000 + at as u64, 8)].concat()
        };
        (0..requests).map(ask).collect()
    }

    #[test]
    fn more_memory_gains_what_was_promised() {
        let prompts = documents(40, 600);
        let (found, evidence) = replay(300, &prompts);
        let advice = all(&found, &evidence);
        let kinds: Vec<_> = advice.iter().map(|advice| advice.kind).collect();
        for kind in ["kv_memory", "kv_int8", "host_tier"] {
            assert!(kinds.contains(&kind), "{kind}: {kinds:?}");
        }
        assert!(advice.is_sorted_by(|one, other| one.share >= other.share));
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
        for Advice { share, evidence: of, .. } in
            advice.iter().filter(|advice| advice.evidence["times"].is_number())
        {
            let times = of["times"].as_f64().expect("a number");
            let (_, after) = replay((300.0 * times) as u32, &prompts);
            kept(*share, &evidence, &after);
        }
    }

    const MIB: f64 = (1 << 20) as f64;

    /// In virtual time, with as much memory beside the cache, and so fast.
    fn run(requests: &[TraceRequest], blocks: u32, tier: Option<TierConfig>) -> Replay {
        let cache = CacheConfig { blocks, block_tokens: BLOCK, bytes_per_block: 1 << 20 };
        let limits = SchedulerConfig { watermark_permille: 0, headroom_tokens: 0, ..config() };
        let replay = ReplayConfig::new(limits, cache, CostModel::CPU_1B, 200);
        replay_in_full(requests, &ReplayConfig { tier, ..replay }).expect("valid limits")
    }

    fn request(at: u64, prompt: Vec<u32>, output: u32) -> TraceRequest {
        let (prompt, answer) = (prompt.into(), Arc::default());
        TraceRequest { arrives: Micros(at), tenant: TENANT, prompt, output, max_tokens: None, answer }
    }

    /// Of all requests, one after another.
    fn seconds(replay: &Replay) -> f64 {
        replay.served.iter().flatten().map(|one| one.e2e_s()).sum()
    }

    /// What is found out about prompts of which this became.
    fn seen(prompts: &[Vec<u32>], became: &Replay) -> (PromptFindings, Evidence) {
        let mut found = PromptFindings::default();
        for (prompt, served) in prompts.iter().zip(&became.served) {
            let cached = served.expect("it ran").cached_tokens;
            found.see(TENANT, &BlockHashes::new(&root(), prompt, BLOCK), prompt, cached, Micros(0));
        }
        let (_, evidence) = replay(300, prompts);
        let computed_tokens = became.report.prompt_tokens - became.report.cached_tokens;
        (found, Evidence { computed_tokens, prompt_s: seconds(became), ..evidence })
    }

    /// Seconds that were gained, against those that were promised.
    fn kept_s(promised: f64, gained: f64) {
        let is_kept = gained > promised / 1.5 && gained < promised * 1.5;
        assert!(is_kept, "{promised} s were promised, {gained} s gained");
    }

    #[test]
    fn memory_beside_the_cache_gains_what_was_promised_less_what_loading_takes() {
        // One after another, so that whoever is loaded is waited for.
        let prompts = documents(40, 600);
        let requests: Vec<_> =
            (0..).zip(&prompts).map(|(at, prompt)| request(at * 60_000_000, prompt.clone(), 1)).collect();
        let before = run(&requests, 300, None);
        let (found, evidence) = seen(&prompts, &before);
        let advice = |rate| {
            let evidence = Evidence { copy_bytes_per_s: rate, ..evidence };
            let advice = all(&found, &evidence);
            let tier = advice.into_iter().find(|advice| advice.kind == "host_tier");
            tier.map(|advice| (advice.gain_s(&evidence), advice))
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
        let requests: Vec<_> =
            (0..).zip(&prompts).map(|(at, prompt)| request(at * 60_000_000, prompt.clone(), 1)).collect();
        let with = |bytes| run(&requests, 300, Some(TierConfig { bytes, bytes_per_s: 1e9 }));
        let bytes = (450.0 * MIB) as u64;
        let before = with(bytes);
        let (found, evidence) = seen(&prompts, &before);
        let tier = |is_full| Some(TierRoom { name: "host", bytes, is_full });
        let evidence = Evidence { has_tier: true, tier: tier(true), copy_bytes_per_s: Some(1e9), ..evidence };
        let advice = all(&found, &evidence);
        let larger = advice.iter().find(|advice| advice.kind == "larger_tier").expect("there is cause");
        let named = larger.evidence["bytes"].as_f64().expect("a number");
        assert_eq!(larger.json(&evidence)["costs"]["host_memory_bytes"].as_f64(), Some(named - 450.0 * MIB));
        kept_s(larger.gain_s(&evidence), seconds(&before) - seconds(&with(named as u64)));
        assert!(advice.iter().all(|advice| advice.kind != "host_tier"), "there is one");
        // Where the tier is as large as any cache that is thought of, a larger cache finds nothing more.
        let kinds = |tier| {
            let advice = all(&found, &Evidence { tier, ..evidence });
            advice.iter().map(|advice| advice.kind).collect::<Vec<_>>()
        };
        assert!(!kinds(tier(false)).contains(&"larger_tier"), "it has room");
        assert!(!kinds(Some(TierRoom { name: "disk", bytes, is_full: true })).contains(&"larger_tier"));
        let large = Some(TierRoom { name: "host", bytes: (2400.0 * MIB) as u64, is_full: true });
        assert!(!kinds(large).iter().any(|kind| ["kv_memory", "larger_tier"].contains(kind)));
    }

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
        let promised = advice[0].gain_s(&evidence);
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

    #[test]
    fn a_prefix_that_is_no_longer_broken_gains_what_was_promised() {
        let (front, rest) = (text(1, 37), text(2, 160));
        let changing: Vec<Vec<u32>> = (0..60).map(|turn| text(5000 + turn, 3)).collect();
        let broken: Vec<_> = changing.iter().map(|change| [&front[..], change, &rest].concat()).collect();
        let (found, evidence) = replay(4000, &broken);
        let advice = all(&found, &evidence);
        assert_eq!(
            advice.iter().map(|advice| advice.kind).collect::<Vec<_>>(),
            [BROKEN],
            "nothing was evicted"
        );
        assert_eq!(advice[0].evidence["position"], 37);
        assert_eq!(advice[0].told()["costs"], json!({"text": "nothing"}));
        assert!(advice[0].what.contains("acme") && advice[0].what.contains("37"));
        let mended: Vec<_> = changing.iter().map(|change| [&front[..], &rest, change].concat()).collect();
        let (found, after) = replay(4000, &mended);
        kept(advice[0].share, &evidence, &after);
        assert_eq!(all(&found, &after), [], "and there is no more to say");
    }

    #[test]
    fn a_pinned_prefix_gains_what_was_promised() {
        // Every twelfth prompt begins with it; what comes between takes the whole cache.
        let front = text(1, 200);
        let ask = |at: u64| match at % 12 {
            0 => [&front[..], &text(2000 + at, 8)].concat(),
            _ => text(5000 + at, 120),
        };
        let prompts: Vec<_> = (0..400).map(ask).collect();
        let (found, evidence) = replay(300, &prompts);
        assert!(all(&found, &evidence).iter().all(|advice| advice.kind != PIN), "Folio keeps it by itself");
        let (found, evidence) = replay_pinning(300, &prompts, &[]);
        let advice = all(&found, &evidence);
        let pin = advice.iter().find(|advice| advice.kind == PIN).expect("it is worth pinning");
        assert!(
            pin.is_a_clients() && pin.what.contains("192 tokens") && pin.what.contains("acme"),
            "{pin:?}"
        );
        assert_eq!(pin.told()["costs"]["cache_bytes"].as_f64(), Some(192.0 / f64::from(BLOCK) * MIB));
        let (found, after) = replay_pinning(300, &prompts, &front[..192]);
        kept(pin.share, &evidence, &after);
        assert!(all(&found, &after).iter().all(|advice| advice.kind != PIN), "and there is no more to say");
    }

    #[test]
    fn where_there_is_no_cause_nothing_is_said() {
        let different: Vec<_> = (0..200).map(|seed| text(seed, 150)).collect();
        let (found, evidence) = replay(300, &different);
        assert!(evidence.evictions > 0);
        assert_eq!(all(&found, &evidence), [], "nothing is ever asked for again");
        let (found, evidence) = replay(3000, &documents(40, 200));
        assert_eq!((evidence.evictions, all(&found, &evidence)), (0, vec![]), "all of it fits");
        let turns: Vec<_> = (1..20).map(|turn| text(3, 20 * turn)).collect();
        let (found, evidence) = replay(300, &turns);
        assert_eq!(all(&found, &evidence), [], "a conversation that goes on");
    }
}
