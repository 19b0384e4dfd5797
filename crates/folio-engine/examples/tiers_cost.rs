//! What tiers cost the engine's thread: `cargo run --release -p folio-engine --example tiers_cost [PAIRS [TIERS]]`.
//!
//! 256 sequences run; prompts of 512 tokens, answers of 64, so that in each step some end and others begin, each with a prefix of 256 tokens that
//! was there before. Without tiers, and with two (or TIERS) that lack everything and have read what they are given by the next step. Prints plan,
//! commit and what is ordered and reported in between, of a step at the median and of all steps, in pairs.

use std::time::{Duration, Instant};

use folio_engine::plan::{Sampled, StepOutput};
use folio_engine::{Micros, Scheduler, SchedulerConfig, TransferOrder};
use folio_kv::{CacheConfig, KvCache, default_policy};
use folio_sim::scenario::request;

/// The allocator of `folio`.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

const SEQUENCES: u64 = 256;
const PROMPT: u32 = 512;
const SHARED: u32 = 256;
const OUTPUT: u32 = 64;
const STEPS: usize = 3000;
const WARM: usize = 300;

/// Microseconds of a step at the median, and on average; blocks that were stored.
fn measure(tiers: usize) -> (f64, f64, u64) {
    let config = SchedulerConfig {
        max_num_seqs: SEQUENCES as u32,
        max_num_batched_tokens: 8192,
        max_prefill_tokens_while_decoding: 8192,
        max_model_len: 1024,
        max_store_bytes: 2000,
        ..SchedulerConfig::default()
    };
    let mut scheduler = Scheduler::new(config).expect("valid limits").with_tiers(vec![1; tiers]);
    let geometry = CacheConfig { blocks: 16_000, block_tokens: 16, bytes_per_block: 1 };
    let mut cache = KvCache::new(geometry, default_policy(0.0));
    let (mut id, mut now, mut stored) = (0, 0, 0);
    let (mut times, mut output) = (Vec::new(), StepOutput::default());
    let mut orders: Vec<TransferOrder> = Vec::new();
    while times.len() < STEPS + WARM {
        // Made before the clock runs: requests are hashed elsewhere.
        let news: Vec<_> = (id..)
            .take((SEQUENCES - scheduler.tables().count() as u64).min(8) as usize)
            .map(|id| {
                let token = |at: u32| {
                    let seed = if at < SHARED { id as u32 % 50 } else { id as u32 + 1000 };
                    at.wrapping_mul(2_654_435_761).wrapping_add(seed * 7919) % 32_000
                };
                let prompt: Vec<u32> = (0..PROMPT).map(token).collect();
                request(id, &prompt, OUTPUT + id as u32 % 17).hashed(16)
            })
            .collect();
        id += news.len() as u64;
        now += 1000;
        let began = Instant::now();
        for order in orders.drain(..) {
            let TransferOrder::Store(store) = order else { unreachable!("nothing is loaded") };
            stored += store.contents.len() as u64;
            scheduler.end_store(&mut cache, store.lease, store.contents.len() as u32, Micros(now));
        }
        scheduler.admit(news, [], Micros(now));
        let plan = scheduler.plan(&mut cache, Micros(now));
        let mut spent = began.elapsed();
        output.step = plan.step;
        output.samples.clear();
        let wanted: usize = plan.sequences.iter().map(|sequence| sequence.samples.len()).sum();
        output.samples.resize(wanted, Sampled::Token { id: now as u32 % 31_000, logprobs: None });
        let began = Instant::now();
        scheduler.commit(&mut cache, Ok(&output), Micros(now)).clear();
        orders.extend(scheduler.transfers());
        spent += began.elapsed();
        times.push(spent);
    }
    times.drain(..WARM);
    let all: Duration = times.iter().sum();
    times.sort_unstable();
    (times[STEPS / 2].as_secs_f64() * 1e6, all.as_secs_f64() * 1e6 / STEPS as f64, stored)
}

fn main() {
    let number = |at, default| std::env::args().nth(at).map_or(default, |n| n.parse().expect("a number"));
    let (pairs, tiers): (usize, usize) = (number(1, 10), number(2, 2));
    let mut ratios: [Vec<f64>; 2] = Default::default();
    for _ in 0..pairs {
        let (without, with) = (measure(0), measure(tiers));
        println!(
            "a step: {:.1} us without tiers, {:.1} with; on average {:.1} and {:.1}; {} blocks given to {tiers} tiers",
            without.0, with.0, without.1, with.1, with.2
        );
        ratios[0].push(with.0 / without.0);
        ratios[1].push(with.1 / without.1);
    }
    for (what, mut ratios) in ["the median", "the average"].into_iter().zip(ratios) {
        ratios.sort_by(f64::total_cmp);
        let (least, most) = (ratios[0], ratios[pairs - 1]);
        println!("{what}: {:.3} times as long with tiers ({least:.3} to {most:.3})", ratios[pairs / 2]);
    }
}
