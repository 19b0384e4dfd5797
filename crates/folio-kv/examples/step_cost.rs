//! Prints what the cache costs a decode step, and an attach. `cargo run --release -p folio-kv --example step_cost`

use std::time::{Duration, Instant};

use folio_kv::{CacheConfig, DecodeWorkload, OutOfBlocks};

const STEPS: u32 = 1024;
const PROMPT_TOKENS: u32 = 4096;

fn median(mut times: Vec<Duration>) -> Duration {
    times.sort();
    times[times.len() / 2]
}

fn main() -> Result<(), OutOfBlocks> {
    println!("block of 16 tokens, prompts of {PROMPT_TOKENS}, {STEPS} decode steps");
    println!(
        "{:>10} {:>14} {:>14} {:>16} {:>14}",
        "sequences", "step median", "step worst", "per sequence", "attach 4k"
    );
    for sequences in [1, 16, 64, 256, 1024] {
        let blocks = sequences * (PROMPT_TOKENS + STEPS).div_ceil(16) + 1;
        let config = CacheConfig { blocks, block_tokens: 16, bytes_per_block: 1 };
        let mut workload = DecodeWorkload::new(config, sequences, PROMPT_TOKENS)?;
        let mut times = Vec::new();
        for _ in 0..STEPS {
            let start = Instant::now();
            workload.step()?;
            times.push(start.elapsed());
        }
        let attaches = (0..101).map(|_| {
            let start = Instant::now();
            workload.reattach(0);
            start.elapsed()
        });
        let attach = median(attaches.collect());
        let worst = times.iter().max().copied().unwrap_or_default();
        let step = median(times);
        println!("{sequences:>10} {step:>14.1?} {worst:>14.1?} {:>16.1?} {attach:>14.1?}", step / sequences);
    }
    Ok(())
}
