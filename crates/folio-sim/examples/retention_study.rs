//! Learned retention on traffic of every kind, with every setting, and a tier behind it: one line of CSV per run. What follows from them,
//! each workload judged by the settings that were best on all others, `tools/bench/kv_report.py` says (`docs/kv-cache.md`).
//! `cargo run --release -p folio-sim --example retention_study -- conversation_trace.jsonl.gz [THREADS]`

use std::fs::File;
use std::io::BufReader;
use std::sync::atomic::{AtomicUsize, Ordering};

use flate2::read::GzDecoder;
use folio_kv::{EvictionPolicy, LearnedLifetimes, LearningSettings, LruLeafFirst};
use folio_sim::retention::tiers::{StoreRule, tiered};
use folio_sim::retention::workloads::{Workload, all};
use folio_sim::retention::{BlockTrace, Policy, hits, hits_with};

const SIZES: [u32; 4] = [1000, 2000, 5000, 10_000];
/// Blocks of the cache, and of the tier behind it.
const TIERS: [(u32, u32); 4] = [(1000, 2000), (1000, 10_000), (2000, 20_000), (5000, 50_000)];

fn settings() -> Vec<LearningSettings> {
    let mut all = Vec::new();
    for doubt in [0.05, 0.15, 0.3] {
        for prior in [8.0, 32.0] {
            for fade in [0.95, 0.98] {
                for ghosts_per_block in [4, 8] {
                    all.push(LearningSettings {
                        doubt,
                        prior,
                        fade,
                        ghosts_per_block,
                        ..LearningSettings::default()
                    });
                }
            }
        }
    }
    all
}

/// Of one workload, all lines.
fn study(workload: &Workload) -> String {
    let Workload { family, part, trace } = workload;
    let mut lines = String::new();
    let mut line = |what: &str, blocks: u32, tier: u32, found: u64, written: u64| {
        let total = trace.blocks();
        lines += &format!("\"{family}\",{part},{total},{what},{blocks},{tier},{found},{written}\n");
    };
    for blocks in SIZES {
        line("LRU", blocks, 0, hits(trace, blocks, Policy::Lru), 0);
        line("MIN", blocks, 0, hits(trace, blocks, Policy::Min), 0);
        for settings in settings() {
            let LearningSettings { doubt, prior, fade, ghosts_per_block, .. } = settings;
            let what = format!("doubt {doubt} prior {prior} fade {fade} ghosts {ghosts_per_block}");
            line(&what, blocks, 0, hits_with(trace, blocks, settings), 0);
        }
    }
    for (blocks, tier) in TIERS {
        line("MIN", blocks, tier, hits(trace, blocks + tier, Policy::Min), 0);
        let mut with = |what: &str, policy: Box<dyn EvictionPolicy>| {
            let found = tiered(trace, blocks, tier, policy, StoreRule::AtEnd);
            line(what, blocks, tier, found.device + found.tier, found.written);
        };
        with("LRU", Box::new(LruLeafFirst::new()));
        for least_return in [0.0, 0.05, 0.1, 0.2, 0.4] {
            let settings = LearningSettings { least_return, ..LearningSettings::default() };
            let policy = LearnedLifetimes::with_settings(0.0, settings);
            with(&format!("least return {least_return}"), Box::new(policy));
        }
    }
    lines
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let path = arguments.next().ok_or("usage: retention_study TRACE [THREADS]")?;
    let threads: usize = arguments.next().map_or(Ok(1), |text| text.parse())?;
    let trace = BlockTrace::mooncake(BufReader::new(GzDecoder::new(File::open(path)?)))?;
    let (workloads, next) = (all(trace), AtomicUsize::new(0));
    println!("family,part,total,what,blocks,tier,found,written");
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
