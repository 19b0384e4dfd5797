//! How full admission keeps a contended pool, and how much preemptions cost, on generated traffic. No trace needed.

use std::sync::Arc;

use folio_engine::{Micros, SchedulerConfig};
use folio_kv::{CacheConfig, TenantId};
use folio_sim::CostModel;
use folio_sim::replay::{ReplayConfig, TraceReport, replay};
use folio_sim::rng::Rng;
use folio_sim::trace::TraceRequest;

/// Length of the output of request `index`.
type Outputs = fn(&mut Rng, usize) -> u64;

/// With the least share of the pool that must be used.
const TRAFFIC: [(&str, f64, Outputs); 4] = [
    ("skewed", 0.8, |rng, _| rng.skewed(4, 900)),
    ("all alike", 0.75, |_, _| 150),
    ("short or long", 0.65, |rng, _| if rng.one_in(3) { 600 } else { 20 }),
    // Short ones first, then long ones.
    ("changing", 0.65, |rng, index| if index < 400 { rng.range(5, 60) } else { rng.range(100, 400) }),
];

const REQUESTS: usize = 1000;

/// More than the pool can hold, from the first seconds on.
fn run(outputs: Outputs, guarantee_completion: bool) -> TraceReport {
    let rng = &mut Rng::new(7);
    let requests: Vec<TraceRequest> = (0..REQUESTS)
        .map(|index| {
            let length = rng.skewed(40, 3000) as usize;
            let prompt = (0..length).map(|at| (index * 31 + at * 7 + at * at) as u32 % 997 + 1).collect();
            TraceRequest {
                arrives: Micros(index as u64 * 60_000),
                tenant: TenantId(0),
                prompt,
                output: outputs(rng, index) as u32,
                max_tokens: None,
                answer: Arc::default(),
            }
        })
        .collect();
    let scheduler = SchedulerConfig {
        max_num_seqs: 128,
        max_num_batched_tokens: 2048,
        max_prefill_tokens_while_decoding: 1024,
        max_model_len: 4096,
        max_queued_requests: 4096,
        guarantee_completion,
        ..SchedulerConfig::default()
    };
    let cache = CacheConfig { blocks: 1536, block_tokens: 16, bytes_per_block: 1 };
    let cost = CostModel { step_us: 12_000.0, token_us: 60.0, context_us_per_1k: 2.0 };
    let config = ReplayConfig::new(scheduler, cache, cost, 1000);
    replay(&requests, &config).expect("valid limits")
}

#[test]
fn a_contended_pool_is_kept_full_and_little_is_computed_again() {
    for (name, least, outputs) in TRAFFIC {
        let [admitted, guaranteed] = [false, true].map(|guarantee| run(outputs, guarantee));
        println!(
            "{name}: {:.1} % of the pool, {:.1} % preempted, {:.1} % computed again; guaranteed: {:.1} %",
            100.0 * admitted.occupancy_full,
            100.0 * admitted.preempted,
            100.0 * admitted.recompute_rate,
            100.0 * guaranteed.occupancy_full
        );
        assert!(admitted.recompute_rate < 0.1, "{name}: {} computed again", admitted.recompute_rate);
        assert!(admitted.occupancy_full > least, "{name}: {} of the pool", admitted.occupancy_full);
        assert_eq!(guaranteed.preemptions, 0, "{name}");
        assert!(guaranteed.occupancy_full < admitted.occupancy_full, "{name}: nothing is gained");
    }
}

/// Requests that start together and generate much, in a pool for eight of them, and many more when those are nearly done: streams pause
/// where too many were admitted.
#[test]
fn long_outputs_that_start_together_do_not_pause_for_long() {
    let requests: Vec<TraceRequest> = (0..160u32)
        .map(|index| TraceRequest {
            arrives: Micros(if index < 40 { 0 } else { 30_000_000 }),
            tenant: TenantId(0),
            prompt: (0..40).map(|at| (index * 31 + at * 7) % 997 + 1).collect(),
            output: 1000,
            max_tokens: None,
            answer: Arc::default(),
        })
        .collect();
    let run = |guarantee_completion| {
        let scheduler = SchedulerConfig {
            max_num_seqs: 128,
            max_num_batched_tokens: 2048,
            max_prefill_tokens_while_decoding: 512,
            max_model_len: 1100,
            guarantee_completion,
            ..SchedulerConfig::default()
        };
        let cache = CacheConfig { blocks: 520, block_tokens: 16, bytes_per_block: 1 };
        let cost = CostModel { step_us: 12_000.0, token_us: 60.0, context_us_per_1k: 2.0 };
        let config = ReplayConfig::new(scheduler, cache, cost, 1024);
        replay(&requests, &config).expect("valid limits")
    };
    let (admitted, guaranteed) = (run(false), run(true));
    let (pauses, speed) =
        (admitted.tpot_s_p99 / guaranteed.tpot_s_p99, guaranteed.seconds / admitted.seconds);
    println!("{pauses:.2} times the time per token at the 99th percentile, {speed:.2} times as fast");
    assert!(pauses < 4.0 && speed > 1.1, "{pauses} {speed}");
}
