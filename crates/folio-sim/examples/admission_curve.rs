//! How full admission keeps the pool, and how often it was wrong, over the share of preemptions it aims at:
//! `cargo run -p folio-sim --example admission_curve -- AzureLLMInferenceTrace_conv.csv [REQUESTS]`.
//!
//! Arrivals are as recorded, or faster by the factor given, at pools that are too small for them, so that somebody waits most of
//! the time. "Use" is the mean share of the pool that sequences hold in the steps in which somebody is refused
//! blocks.

use std::fs::File;
use std::io::BufReader;

use folio_engine::{Micros, SchedulerConfig};
use folio_kv::CacheConfig;
use folio_sim::CostModel;
use folio_sim::trace::{ReplayConfig, TraceRequest, azure, replay};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let path = arguments.next().ok_or("usage: admission_curve FILE.csv [REQUESTS]")?;
    let limit = arguments.next().map_or(Ok(usize::MAX), |text| text.parse())?;
    let recorded = azure(BufReader::new(File::open(path)?), limit)?;
    println!("{} requests, max_tokens 1024, blocks of 16 tokens", recorded.len());
    println!(
        "| blocks | arrivals | aim | use | preempted | computed again | waste | steps with somebody refused |"
    );
    println!("|---:|---:|---|---:|---:|---:|---:|---:|");
    for (blocks, faster) in [(768, 1), (1536, 1), (4096, 4)] {
        let requests: Vec<TraceRequest> = recorded
            .iter()
            .map(|request| TraceRequest { arrives: Micros(request.arrives.0 / faster), ..request.clone() })
            .collect();
        for aim in [Some(200), Some(50), Some(10), Some(5), Some(1), None] {
            let config = ReplayConfig {
                scheduler: SchedulerConfig {
                    max_num_seqs: 512,
                    max_num_batched_tokens: 2048,
                    max_prefill_tokens_while_decoding: 512,
                    max_model_len: 16_384,
                    preemption_target_permille: aim.unwrap_or(0),
                    guarantee_completion: aim.is_none(),
                    ..SchedulerConfig::default()
                },
                cache: CacheConfig { blocks, block_tokens: 16, bytes_per_block: 1 },
                // About an 8B model on a small GPU: 12 ms per step, 60 us per token.
                cost: CostModel { step_us: 12_000.0, token_us: 60.0, context_us_per_1k: 2.0 },
                max_tokens: 1024,
                swap_blocks: 0,
                swap_us: 0.0,
            };
            let r = replay(&requests, &config)?;
            println!(
                "| {blocks} | {faster}x | {} | {:.1} % | {:.2} % | {:.2} % | {:.2} % | {:.0} % |",
                aim.map_or("guaranteed".into(), |aim| format!("{} %", f64::from(aim) / 10.0)),
                r.occupancy_full * 100.0,
                r.preemption_rate * 100.0,
                r.recompute_rate * 100.0,
                r.waste * 100.0,
                r.full_steps as f64 / r.steps as f64 * 100.0,
            );
        }
    }
    Ok(())
}
