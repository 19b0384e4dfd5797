//! Replays recorded traffic and prints what it costs:
//! `cargo run --release -p folio-sim --example trace_replay -- azure FILE.csv` (or `mooncake FILE.jsonl`, unpacked).

use std::fs::File;
use std::io::BufReader;

use folio_engine::SchedulerConfig;
use folio_kv::CacheConfig;
use folio_sim::CostModel;
use folio_sim::replay::{ReplayConfig, replay};
use folio_sim::trace::{TraceRequest, azure, mooncake};

const REQUESTS: usize = 2000;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [format, path] = arguments.as_slice() else {
        return Err("usage: trace_replay azure|mooncake FILE".into());
    };
    let file = BufReader::new(File::open(path)?);
    let requests: Vec<TraceRequest> = match format.as_str() {
        "azure" => azure(file, REQUESTS)?,
        "mooncake" => mooncake(file, REQUESTS)?,
        other => return Err(format!("unknown format {other}: azure or mooncake").into()),
    };
    let longest = requests.iter().map(|r| r.prompt.len() as u32 + r.output).max().unwrap_or(1);
    println!("{} requests, the longest {longest} tokens; 16-token blocks", requests.len());
    println!(
        "| pool tokens | mode | waste | occupancy | preempted/request | recomputed | cached | TTFT p50 s | p99 s | total s |"
    );
    println!("|---|---|---|---|---|---|---|---|---|---|");
    for factor in [1, 2, 4, 8] {
        for guarantee_completion in [false, true] {
            let blocks = factor * (longest + 1024).div_ceil(16);
            let scheduler = SchedulerConfig {
                max_num_seqs: 256,
                max_num_batched_tokens: 2048,
                max_prefill_tokens_while_decoding: 512,
                max_model_len: longest + 1024,
                guarantee_completion,
                ..SchedulerConfig::default()
            };
            let cache = CacheConfig { blocks, block_tokens: 16, bytes_per_block: 1 };
            // About an 8B model on a small GPU: 12 ms per step, 60 us per token.
            let cost = CostModel { step_us: 12_000.0, token_us: 60.0, context_us_per_1k: 2.0 };
            let config = ReplayConfig::new(scheduler, cache, cost, 1024);
            let r = replay(&requests, &config)?;
            println!(
                "| {} | {} | {:.2} % | {:.0} % | {:.3} | {:.2} % | {:.1} % | {:.2} | {:.2} | {:.0} |",
                blocks * 16,
                if guarantee_completion { "guaranteed" } else { "admitted" },
                r.waste * 100.0,
                r.occupancy * 100.0,
                r.preemption_rate,
                r.recompute_rate * 100.0,
                r.cached_tokens as f64 / r.prompt_tokens.max(1) as f64 * 100.0,
                r.ttft_s_p50,
                r.ttft_s_p99,
                r.seconds,
            );
        }
    }
    Ok(())
}
