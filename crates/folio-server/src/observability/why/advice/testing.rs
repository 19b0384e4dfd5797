//! Traffic for tests of advice: through the real scheduler and cache, before a change and after it.

use std::sync::Arc;

use folio_engine::request::RequestId;
use folio_engine::{CacheCommand, CacheResponse, Drafter, Micros, Request, SamplingParams, SchedulerConfig};
use folio_kv::{BlockHashes, CacheConfig, Identity, KvCache, LruLeafFirst, Retention, Root, TenantId};
use folio_sim::CostModel;
use folio_sim::machine::{Machine, VOCAB};
use folio_sim::replay::{Replay, ReplayConfig, TierConfig, replay_in_full};
use folio_sim::trace::TraceRequest;

use super::super::prompts::PromptFindings;
use super::{Advice, Evidence, StepEvidence, advise};

const TENANT: TenantId = TenantId(1);
pub const BLOCK: u32 = 4;
pub const MIB: f64 = (1 << 20) as f64;

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
pub fn numbers(seed: u64) -> impl FnMut() -> u64 {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state >> 11
    }
}

pub fn text(seed: u64, tokens: usize) -> Vec<u32> {
    let mut next = numbers(seed);
    (0..tokens).map(|_| (next() % u64::from(VOCAB)) as u32).collect()
}

/// What so many requests are about, some more often than others.
pub fn asked_about(count: u64, requests: usize) -> impl Iterator<Item = u64> {
    let mut next = numbers(7);
    let mut share = move || next() as f64 / (1u64 << 53) as f64;
    (0..requests).map(move |_| (share().powi(2) * count as f64) as u64)
}

/// Documents that are asked about again.
pub fn documents(count: u64, requests: usize) -> Vec<Vec<u32>> {
    let all = asked_about(count, requests).zip(1000..);
    all.map(|(of, at)| [text(of, 120), text(at, 8)].concat()).collect()
}

pub fn config() -> SchedulerConfig {
    SchedulerConfig { max_model_len: 512, max_num_batched_tokens: 256, ..Default::default() }
}

/// What the engine computes of prompts that come one after the other, and what is found out about them.
pub fn replay(blocks: u32, prompts: &[Vec<u32>]) -> (PromptFindings, Evidence) {
    replay_on(Machine::new(config(), blocks, BLOCK), prompts, &[])
}

/// The same where what was used least recently is evicted, and where this is pinned as soon as a prompt has it.
pub fn replay_pinning(blocks: u32, prompts: &[Vec<u32>], pinned: &[u32]) -> (PromptFindings, Evidence) {
    replay_on(evicting_last_used(blocks, BLOCK), prompts, pinned)
}

/// Where what was used least recently is evicted.
pub fn evicting_last_used(blocks: u32, block_tokens: u32) -> Machine {
    let mut machine = Machine::new(config(), blocks, block_tokens);
    let policy = Box::new(LruLeafFirst::default());
    machine.cache = KvCache::new(*machine.cache.config(), policy);
    machine
}

pub fn replay_on(mut machine: Machine, prompts: &[Vec<u32>], pinned: &[u32]) -> (PromptFindings, Evidence) {
    let CacheConfig { blocks, block_tokens, .. } = *machine.cache.config();
    let mut found = PromptFindings::default();
    for (id, prompt) in prompts.iter().enumerate() {
        let prompt: Arc<[u32]> = prompt.as_slice().into();
        let sampling = SamplingParams::greedy(1);
        machine.submit(Request::new(RequestId(id as u64), TENANT, root(), prompt.clone(), sampling));
        machine.run();
        let cached = machine.cached_tokens(id as u64).expect("its prompt was computed");
        if !pinned.is_empty() && prompt.starts_with(pinned) {
            let (hashes, tokens) =
                (BlockHashes::new(&root(), pinned, block_tokens).into(), pinned.len() as u32);
            let keep = CacheCommand::Keep { hashes, tokens, retention: Retention::default(), pin: true };
            let kept = machine.scheduler.command(&mut machine.cache, keep);
            assert!(matches!(kept, CacheResponse::Prefix(_)), "{kept:?}");
        }
        found.see(TENANT, &BlockHashes::new(&root(), &prompt, block_tokens), &prompt, cached, Micros(0));
    }
    let (stats, counters) = (machine.cache.stats(), machine.scheduler.counters());
    let evidence = Evidence {
        blocks,
        block_tokens,
        block_bytes: 1 << 20,
        has_windows: false,
        evictions: stats.evictions,
        waste: Some(stats.lifetime_waste()),
        computed_tokens: counters.prompt_tokens - counters.cached_prompt_tokens,
        prompt_s: 1.0,
        int8: Some(1.9),
        has_tier: false,
        tier: None,
        preemptions: counters.preemptions,
        recomputed_tokens: counters.recomputed_tokens,
        copy_bytes_per_s: None,
        steps: StepEvidence::default(),
    };
    (found, evidence)
}

pub fn all(found: &PromptFindings, evidence: &Evidence) -> Vec<Advice> {
    advise(found, evidence, |_| Some("acme".to_owned()))
}

pub fn kinds(found: &PromptFindings, evidence: &Evidence) -> Vec<&'static str> {
    all(found, evidence).iter().map(|advice| advice.kind).collect()
}

/// What was gained, against what was promised.
pub fn kept(promised: f64, before: &Evidence, after: &Evidence) {
    let gained = 1.0 - after.computed_tokens as f64 / before.computed_tokens as f64;
    let is_kept = gained > promised / 1.5 && gained < promised * 1.5;
    assert!(is_kept, "{promised} was promised, {gained} gained");
}

/// Seconds that were gained, against those that were promised.
pub fn kept_s(promised: f64, gained: f64) {
    let is_kept = gained > promised / 1.5 && gained < promised * 1.5;
    assert!(is_kept, "{promised} s were promised, {gained} s gained");
}

pub fn request(at: u64, prompt: Vec<u32>, output: u32) -> TraceRequest {
    let (prompt, answer) = (prompt.into(), Arc::default());
    TraceRequest { arrives: Micros(at), tenant: TENANT, prompt, output, max_tokens: None, answer }
}

/// In virtual time, with as much memory beside the cache, and so fast.
pub fn run(requests: &[TraceRequest], blocks: u32, tier: Option<TierConfig>) -> Replay {
    run_with(requests, blocks, tier, config())
}

pub fn run_with(
    requests: &[TraceRequest],
    blocks: u32,
    tier: Option<TierConfig>,
    limits: SchedulerConfig,
) -> Replay {
    let cache = CacheConfig { blocks, block_tokens: BLOCK, bytes_per_block: 1 << 20 };
    let limits = SchedulerConfig { watermark_permille: 0, headroom_tokens: 0, ..limits };
    let replay = ReplayConfig::new(limits, cache, CostModel::CPU_1B, 200);
    replay_in_full(requests, &ReplayConfig { tier, ..replay }).expect("valid limits")
}

/// The same with drafts, and everything in the cache.
pub fn run_drafting(requests: &[TraceRequest], blocks: u32, drafter: Option<Drafter>) -> Replay {
    let cache = CacheConfig { blocks, block_tokens: BLOCK, bytes_per_block: 1 << 20 };
    let replay = ReplayConfig::new(config(), cache, CostModel::CPU_1B, 200);
    replay_in_full(requests, &ReplayConfig { drafter, ..replay }).expect("valid limits")
}

/// Of its steps, while so many requests waited for their turn.
pub fn step_evidence(became: &Replay, sequences_max: u32, waiting_for_turn: f64) -> StepEvidence {
    let work = &became.work;
    StepEvidence {
        row_us: became.row_us,
        sequences_max,
        tokens_max: config().max_num_batched_tokens,
        waiting_for_turn,
        ..StepEvidence::of(|activity| (work.steps[activity as usize], work.us(activity)))
    }
}

/// Of all requests, one after another.
pub fn seconds(replay: &Replay) -> f64 {
    replay.served.iter().flatten().map(|one| one.e2e_s()).sum()
}

/// What is found out about prompts of which this became.
pub fn seen(prompts: &[Vec<u32>], became: &Replay) -> (PromptFindings, Evidence) {
    let mut found = PromptFindings::default();
    for (prompt, served) in prompts.iter().zip(&became.served) {
        let cached = served.expect("it ran").cached_tokens;
        found.see(TENANT, &BlockHashes::new(&root(), prompt, BLOCK), prompt, cached, Micros(0));
    }
    let (_, evidence) = replay(300, prompts);
    let computed_tokens = became.report.prompt_tokens - became.report.cached_tokens;
    (found, Evidence { computed_tokens, prompt_s: seconds(became), ..evidence })
}
