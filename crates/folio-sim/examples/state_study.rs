//! Which states of recurrent layers are worth keeping: the engine's rule, what it was, and Marconi's in the same memory, divided between states
//! and K and V in several ways, over traffic of every kind: one line of CSV per run. What follows, `tools/bench/kv_report.py` says (`docs/kv-cache.md`).
//! `cargo run --release -p folio-sim --example state_study -- conversation_trace.jsonl.gz [THREADS]`

use std::fs::File;
use std::io::BufReader;
use std::sync::atomic::{AtomicUsize, Ordering};

use flate2::read::GzDecoder;
use folio_sim::retention::states::{Keep, hits_with_states};
use folio_sim::retention::workloads::{Workload, all};
use folio_sim::retention::{BlockTrace, Policy, hits};

/// Memory, in K and V of so many blocks of 512 tokens.
const SIZES: [u32; 4] = [2000, 4000, 10_000, 20_000];
/// Of it, for states.
const SHARES: [f64; 4] = [0.125, 0.25, 0.5, 0.75];
/// Name, bytes of a state over those of K and V of a block, and blocks from one kept state to the next (`docs/kv-cache.md`).
const MODELS: [(&str, f64, u32); 2] =
    [("Qwen3.5-9B", 50.0 / 16.0, 1), ("Qwen3-Next-80B-A3B", 75.0 / 12.0, 2)];

/// Of one workload, all lines.
fn study(Workload { family, part, trace }: &Workload) -> String {
    let mut lines = String::new();
    for (model, state, every) in MODELS {
        for memory in SIZES {
            for share in SHARES {
                let states = (share * f64::from(memory) / state) as u32;
                let blocks = ((1.0 - share) * f64::from(memory)) as u32;
                // "passed" is the engine's.
                let rules = [
                    ("passed", Keep::Every(every)),
                    ("passed alone", Keep::Passed(every)),
                    ("Marconi", Keep::Marconi),
                ];
                let found = rules.map(|(name, keep)| (name, hits_with_states(trace, blocks, states, keep)));
                for (rule, found) in
                    found.into_iter().chain([("no states", hits(trace, blocks, Policy::Folio))])
                {
                    let total = trace.blocks();
                    lines +=
                        &format!("\"{family}\",{part},{total},{model},{memory},{share},{rule},{found}\n");
                }
            }
        }
    }
    lines
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let path = arguments.next().ok_or("usage: state_study TRACE [THREADS]")?;
    let threads: usize = arguments.next().map_or(Ok(1), |text| text.parse())?;
    let trace = BlockTrace::mooncake(BufReader::new(GzDecoder::new(File::open(path)?)))?;
    let (workloads, next) = (all(trace), AtomicUsize::new(0));
    println!("family,part,total,model,memory,share,rule,found");
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                while let Some(workload) = workloads.get(next.fetch_add(1, Ordering::Relaxed)) {
                    print!("{}", study(workload));
                }
            });
        }
    });
    Ok(())
}
