//! What room admission leaves, and what that costs and brings, over traffic, pools, arrivals and seeds: one line of CSV per run
//! (`docs/kv-cache.md`).
//! `cargo run --release -p folio-sim --example admission_study -- FOLDER [THREADS [MIX]]`
//!
//! FOLDER holds the traces: `azure.csv`, `mooncake.jsonl` (unpacked) and ServeGen's `reason` and `m-small`; what is absent is
//! skipped. Arrivals are a burst (all at once) or at 0.95 of the rate at which the burst was served, Poisson or in the trace's own rhythm.

use std::fmt::Write;
use std::fs::File;
use std::io::BufReader;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use folio_engine::{Micros, SchedulerConfig};
use folio_kv::{CacheConfig, TenantId};
use folio_sim::CostModel;
use folio_sim::replay::{ReplayConfig, TraceReport, replay};
use folio_sim::rng::Rng;
use folio_sim::trace::{TraceRequest, azure, mooncake};

const REQUESTS: usize = 300;
const SEEDS: u64 = 3;
const BLOCK: u32 = 16;

/// About an 8B model on a small GPU: 12 ms per step, 60 us per token; and a 1B model on two cores.
const GPU: CostModel = CostModel { step_us: 12_000.0, token_us: 60.0, context_us_per_1k: 2.0 };

/// Mean final lengths that the pool holds, a burst, on the processor.
const WORLDS: [(u32, bool, bool); 6] = [
    (24, true, false),
    (24, false, false),
    (8, true, false),
    (8, false, false),
    (8, false, true),
    (64, false, false),
];

struct Mix {
    name: &'static str,
    max_tokens: u32,
    requests: Box<dyn Fn(u64) -> Vec<TraceRequest> + Sync>,
}

#[derive(Clone, Copy)]
struct World {
    mix: usize,
    /// Mean final lengths that the pool holds.
    holds: u32,
    burst: bool,
    cpu: bool,
    seed: u64,
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let folder = arguments.next().ok_or("usage: admission_study FOLDER [THREADS [MIX]]")?;
    let threads: usize = arguments.next().map_or(Ok(1), |text| text.parse())?;
    let mixes = mixes(Path::new(&folder));
    let only = arguments.next();
    let mut worlds = Vec::new();
    for seed in 0..SEEDS {
        for (mix, name) in mixes.iter().map(|mix| mix.name).enumerate() {
            if only.as_ref().is_some_and(|only| !name.contains(only.as_str())) {
                continue;
            }
            for (holds, burst, cpu) in WORLDS {
                worlds.push(World { mix, holds, burst, cpu, seed });
            }
        }
    }
    println!(
        "mix,holds,arrivals,device,seed,rule,tokens_per_s,preempted,recomputed,fill,fill_contended,contended_steps,\
         ttft_p50,ttft_p99,tpot_p50,tpot_p99,e2e_p50,e2e_p99,makespan,preemptions,refused"
    );
    let next = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                while let Some(world) = worlds.get(next.fetch_add(1, Ordering::Relaxed)) {
                    print!("{}", run_all(&mixes[world.mix], *world));
                }
            });
        }
    });
    Ok(())
}

/// Name, headroom_tokens, watermark_permille; all with the share of what is still to come, and who was preempted first.
const RULES: [(&str, u32, u32); 4] =
    [("headroom 0", 0, 10), ("headroom 64", 64, 10), ("headroom 256", 256, 10), ("watermark 100", 64, 100)];

fn run_all(mix: &Mix, world: World) -> String {
    let mut requests = (mix.requests)(world.seed);
    // Long ones make long runs.
    let most = match mix.name {
        "servegen reason" | "mooncake" => 120,
        "long output" | "short in long out" => 200,
        _ => REQUESTS,
    };
    requests.truncate(most);
    let lengths = |r: &TraceRequest| (r.prompt.len() as u32 + r.output).div_ceil(BLOCK);
    let total: u32 = requests.iter().map(lengths).sum();
    let room = mix.max_tokens.min(16_384);
    let longest = requests.iter().map(|r| r.prompt.len() as u32 + room.max(r.output)).max().unwrap_or(1);
    let blocks = (total * world.holds / requests.len() as u32).max(longest.div_ceil(BLOCK) + 1);
    let scheduler = SchedulerConfig {
        max_num_seqs: 512,
        max_num_batched_tokens: if world.cpu { 512 } else { 2048 },
        max_prefill_tokens_while_decoding: if world.cpu { 64 } else { 512 },
        max_model_len: longest + 1,
        ..SchedulerConfig::default()
    };
    let cache = CacheConfig { blocks, block_tokens: BLOCK, bytes_per_block: 1 << 20 };
    let cost = if world.cpu { CostModel::CPU_1B } else { GPU };
    let mut config = ReplayConfig::new(scheduler, cache, cost, mix.max_tokens);
    if world.cpu {
        config.scheduler.max_num_seqs = 128;
    }
    let recorded: Vec<u64> = requests.iter().map(|r| r.arrives.0).collect();
    requests.iter_mut().for_each(|r| r.arrives = Micros(0));
    if !world.burst {
        // Nearly as fast as the burst is served.
        let served = replay(&requests, &config).expect("valid limits").seconds * 1e6;
        let span = (recorded.iter().max().copied().unwrap_or(0) - recorded[0]).max(1) as f64;
        for (request, at) in requests.iter_mut().zip(&recorded) {
            request.arrives = Micros(((at - recorded[0]) as f64 * served * 0.95 / span) as u64);
        }
    }
    let mut text = String::new();
    for (name, headroom, watermark) in RULES {
        config.scheduler.headroom_tokens = headroom;
        config.scheduler.watermark_permille = watermark;
        let r = replay(&requests, &config).expect("valid limits");
        line(&mut text, mix.name, world, name, &r);
    }
    config.scheduler.guarantee_completion = true;
    line(&mut text, mix.name, world, "guaranteed", &replay(&requests, &config).expect("valid limits"));
    text
}

fn line(text: &mut String, mix: &str, world: World, rule: &str, r: &TraceReport) {
    let World { holds, burst, cpu, seed, .. } = world;
    let arrivals = if burst { "burst" } else { "steady" };
    let device = if cpu { "cpu" } else { "gpu" };
    let _ = writeln!(
        text,
        "{mix},{holds},{arrivals},{device},{seed},{rule},{:.2},{:.4},{:.4},{:.4},{:.4},{:.4},{:.3},{:.3},{:.4},{:.4},{:.3},{:.3},{:.2},{},{}",
        r.generated_tokens as f64 / r.seconds,
        r.preempted,
        r.recompute_rate,
        r.occupancy,
        r.occupancy_full,
        r.full_steps as f64 / r.steps as f64,
        r.ttft_s_p50,
        r.ttft_s_p99,
        r.tpot_s_p50,
        r.tpot_s_p99,
        r.e2e_s_p50,
        r.e2e_s_p99,
        r.seconds,
        r.preemptions,
        r.refused,
    );
}

/// A normal deviate.
fn normal(rng: &mut Rng) -> f64 {
    (0..12).map(|_| rng.unit()).sum::<f64>() - 6.0
}

fn lognormal(rng: &mut Rng, median: f64, sigma: f64, most: u32) -> u32 {
    ((median * (sigma * normal(rng)).exp()) as u32).clamp(1, most)
}

/// Poisson arrivals of requests with these lengths (prompt, output, max_tokens).
fn made(seed: u64, lengths: impl Fn(&mut Rng) -> (u32, u32, Option<u32>)) -> Vec<TraceRequest> {
    let rng = &mut Rng::new(seed);
    let mut now = 0.0;
    let requests = (0..REQUESTS as u64).map(|index| {
        now -= 1e6 * (1.0 - rng.unit()).ln();
        let (prompt, output, max_tokens) = lengths(rng);
        let tokens =
            (0..u64::from(prompt)).map(|at| 1 + (folio_sim::rng::mix(index << 32 | at) % 49_999) as u32);
        TraceRequest {
            arrives: Micros(now as u64),
            tenant: TenantId(0),
            prompt: tokens.collect(),
            output,
            max_tokens,
            answer: Arc::default(),
        }
    });
    requests.collect()
}

fn pareto(rng: &mut Rng) -> u32 {
    ((30.0 / (1.0 - rng.unit()).powf(1.0 / 1.1)) as u32).min(8192)
}

fn mixes(folder: &Path) -> Vec<Mix> {
    let mut mixes = Vec::new();
    let mut add = |name, max_tokens, lengths: fn(&mut Rng) -> (u32, u32, Option<u32>)| {
        mixes.push(Mix { name, max_tokens, requests: Box::new(move |seed| made(seed, lengths)) });
    };
    add("chat", 1024, |rng| (lognormal(rng, 400.0, 0.9, 3000), lognormal(rng, 180.0, 0.8, 1024), None));
    add("long output", 4096, |rng| {
        (lognormal(rng, 150.0, 0.7, 1500), lognormal(rng, 1200.0, 0.5, 4096), None)
    });
    add("short or long", 1024, |rng| {
        (lognormal(rng, 250.0, 0.7, 1500), if rng.one_in(3) { 600 } else { 20 }, None)
    });
    add("heavy tail", 8192, |rng| (lognormal(rng, 250.0, 0.7, 1500), pareto(rng), None));
    add("heavy tail tight", 8192, |rng| {
        let (prompt, output) = (lognormal(rng, 250.0, 0.7, 1500), pareto(rng));
        (prompt, output, Some(output.next_multiple_of(64)))
    });
    add("all alike", 512, |_| (500, 500, Some(512)));
    add("all alike loose", 4096, |_| (500, 500, None));
    add("short in long out", 1024, |rng| (lognormal(rng, 40.0, 0.5, 200), 1000, Some(1024)));
    let path = folder.join("azure.csv");
    if path.exists() {
        let all =
            azure(BufReader::new(File::open(path).expect("it opens")), 3 * REQUESTS).expect("it parses");
        mixes.push(Mix { name: "azure conv", max_tokens: 1024, requests: windowed(all) });
    }
    let path = folder.join("mooncake.jsonl");
    if path.exists() {
        let all =
            mooncake(BufReader::new(File::open(path).expect("it opens")), 3 * REQUESTS).expect("it parses");
        mixes.push(Mix { name: "mooncake", max_tokens: 2048, requests: windowed(all) });
    }
    for (name, path, max_tokens) in
        [("servegen reason", "reason", 16_384), ("servegen m-small", "m-small", 4096)]
    {
        let clients = servegen(&folder.join(path));
        if !clients.is_empty() {
            let requests = move |seed| {
                made(seed, |rng| {
                    let (_, input, output) = &clients[pick(rng, clients.iter().map(|c| c.0))];
                    let mut of = |pmf: &[(u32, f64)]| pmf[pick(rng, pmf.iter().map(|p| p.1))].0.max(1);
                    (of(input).min(8192), of(output).min(max_tokens), None)
                })
            };
            mixes.push(Mix { name, max_tokens, requests: Box::new(requests) });
        }
    }
    mixes
}

fn windowed(all: Vec<TraceRequest>) -> Box<dyn Fn(u64) -> Vec<TraceRequest> + Sync> {
    Box::new(move |seed| all.iter().skip(seed as usize * REQUESTS).take(REQUESTS).cloned().collect())
}

fn pick(rng: &mut Rng, weights: impl Iterator<Item = f64> + Clone) -> usize {
    let mut left = rng.unit() * weights.clone().sum::<f64>();
    let mut last = 0;
    for (at, weight) in weights.enumerate() {
        if weight > 0.0 {
            last = at;
            left -= weight;
            if left < 0.0 {
                break;
            }
        }
    }
    last
}

type Pmf = Vec<(u32, f64)>;

/// Every client of ServeGen: its mean rate, and the lengths of its first window that has some.
fn servegen(folder: &Path) -> Vec<(f64, Pmf, Pmf)> {
    let pmf = |text: &str| -> Pmf {
        let fields = text.trim_matches(['{', '}']).split(", ").filter_map(|field| field.split_once(": "));
        fields.filter_map(|(length, share)| Some((length.parse().ok()?, share.parse().ok()?))).collect()
    };
    let mut clients = Vec::new();
    for chunk in 0..200 {
        let Ok(text) = std::fs::read_to_string(folder.join(format!("chunk-{chunk}-dataset.json"))) else {
            continue;
        };
        let Ok(windows) = serde_json::from_str::<serde_json::Value>(&text) else { continue };
        let trace =
            std::fs::read_to_string(folder.join(format!("chunk-{chunk}-trace.csv"))).unwrap_or_default();
        let rate = trace.lines().filter_map(|line| line.split(',').nth(1)?.parse::<f64>().ok()).sum();
        for window in windows.as_object().into_iter().flat_map(|windows| windows.values()) {
            let of = |name: &str| pmf(window[name].as_str().unwrap_or_default());
            let (input, output) = (of("input_tokens"), of("output_tokens"));
            if !input.is_empty() && !output.is_empty() {
                clients.push((rate, input, output));
                break;
            }
        }
    }
    clients
}
