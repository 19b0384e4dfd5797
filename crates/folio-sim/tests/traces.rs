//! Recorded traffic. Needs the trace data; prints a warning where it is absent.

use std::fs::File;
use std::io::{BufReader, Write};
use std::path::PathBuf;

use flate2::read::GzDecoder;
use folio_engine::SchedulerConfig;
use folio_kv::CacheConfig;
use folio_sim::CostModel;
use folio_sim::replay::{ReplayConfig, replay};
use folio_sim::retention::{BlockTrace, Policy, hits};
use folio_sim::trace::azure;

fn data(path: &str) -> Option<PathBuf> {
    let default = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../../shared/data");
    let folder = std::env::var_os("FOLIO_TEST_DATA").map_or(default, PathBuf::from);
    let file = folder.join(path);
    if !file.exists() {
        // Past the test runner, which shows what a passing test prints to nobody.
        let why = "not found; set FOLIO_TEST_DATA to the folder that holds it";
        let _ = writeln!(std::io::stderr(), "SKIPPED: {path} {why}");
        return None;
    }
    Some(file)
}

#[test]
fn azure_conversations_waste_under_four_percent_and_rarely_preempt() {
    let Some(path) = data("trace-azure-llm-2023/AzureLLMInferenceTrace_conv.csv") else { return };
    let file = BufReader::new(File::open(path).expect("the trace opens"));
    let requests = azure(file, 2000).expect("the trace parses");
    let scheduler = SchedulerConfig {
        max_num_seqs: 128,
        max_num_batched_tokens: 2048,
        max_prefill_tokens_while_decoding: 512,
        max_model_len: 16_384,
        ..SchedulerConfig::default()
    };
    // Tight: some twenty conversations fit.
    let cache = CacheConfig { blocks: 1536, block_tokens: 16, bytes_per_block: 1 };
    let cost = CostModel { step_us: 12_000.0, token_us: 60.0, context_us_per_1k: 2.0 };
    let config = ReplayConfig::new(scheduler, cache, cost, 1024);
    let report = replay(&requests, &config).expect("valid limits");
    println!("{report:#?}");
    assert_eq!(report.requests + report.refused, 2000);
    assert!(report.waste < 0.04, "waste {}", report.waste);
    assert!(report.preemption_rate < 0.01, "{} preemptions per request", report.preemption_rate);
    assert!(
        report.occupancy_full > 0.88,
        "the pool was {} full: admission is too shy",
        report.occupancy_full
    );
}

/// Whoever knows the future finds exactly what was published of the offline optimum, through the cache and the interface of policies.
#[test]
fn the_optimum_equals_the_published_counts() {
    let Some(path) = data("trace-mooncake-fast25/conversation_trace.jsonl.gz") else { return };
    let file = GzDecoder::new(File::open(path).expect("the trace opens"));
    let trace = BlockTrace::mooncake(BufReader::new(file)).expect("the trace parses");
    let path = data("trace-stats/prefix_cache_conversation_full.json").expect("it comes with the trace");
    let published: serde_json::Value =
        serde_json::from_slice(&std::fs::read(path).expect("readable")).expect("JSON");
    assert_eq!(Some(trace.blocks()), published["blocks"].as_u64());
    let mut compared = 0;
    for (name, figures) in published["policies"].as_object().expect("policies") {
        let Some(blocks) = name.strip_prefix("min@") else { continue };
        let found = hits(&trace, blocks.parse().expect("a number of blocks"), Policy::Min);
        assert_eq!(Some(found), figures["hit_blocks"].as_u64(), "{name}");
        compared += 1;
    }
    assert_eq!(compared, 5, "1k, 5k, 10k, 50k and 100k blocks");
}
