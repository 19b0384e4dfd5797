//! What a tier finds that is given content as requests end, as it is evicted, or both, and what is written for that: one line of CSV per run.
//! `cargo run --release -p folio-sim --example demotion_study -- conversation_trace.jsonl.gz`

use std::fs::File;
use std::io::BufReader;

use flate2::read::GzDecoder;
use folio_sim::retention::tiers::{StoreRule, tiered};
use folio_sim::retention::workloads::Kind;
use folio_sim::retention::{BlockTrace, Policy};

/// Blocks of the cache, and of the tier behind it.
const SIZES: [(u32, u32); 7] =
    [(1000, 1000), (1000, 2000), (1000, 10_000), (2000, 2000), (2000, 20_000), (5000, 5000), (5000, 50_000)];

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let path = std::env::args().nth(1).ok_or("usage: demotion_study TRACE")?;
    let trace = BlockTrace::mooncake(BufReader::new(GzDecoder::new(File::open(path)?)))?;
    let recorded = ("recorded conversations", trace);
    let others = Kind::ALL.iter().map(|kind| (kind.name(), kind.generate(0, 4)));
    println!("workload,policy,blocks,tier,rule,asked,device,tier hits,written,of those at eviction");
    for (name, trace) in std::iter::once(recorded).chain(others) {
        for policy in [Policy::Lru, Policy::Folio] {
            for (blocks, tier) in SIZES {
                for rule in StoreRule::ALL {
                    let policy_of = policy.online(0.0).expect("it needs no future");
                    let found = tiered(&trace, blocks, tier, policy_of, rule);
                    let (policy, rule, asked) = (policy.name(), rule.name(), trace.blocks());
                    println!(
                        "\"{name}\",{policy},{blocks},{tier},\"{rule}\",{asked},{},{},{},{}",
                        found.device, found.tier, found.written, found.demoted
                    );
                }
            }
        }
    }
    Ok(())
}
