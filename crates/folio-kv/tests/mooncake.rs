//! The real block manager, fed an hour of real traffic with no concurrency, reproduces published hit counts exactly.
//!
//! A hash id of the trace stands for one block of 512 tokens after a certain beginning, so it is used as the one token of
//! a block of one token. A request attaches what is cached, computes the rest and is released: lookup, then all of its
//! blocks present, then freed tail first, which makes its leaf the oldest of its blocks.

mod common;

use std::io::Read;

use common::{ByRoot, config, data, root};
use folio_kv::{EvictionPolicy, KvCache, LearnedLifetimes, LruLeafFirst};

struct Request {
    input_tokens: usize,
    ids: Vec<u32>,
}

fn trace() -> Option<Vec<Request>> {
    let file =
        std::fs::File::open(data("trace-mooncake-fast25/conversation_trace.jsonl.gz")?).expect("readable");
    let mut text = String::new();
    flate2::read::GzDecoder::new(file).read_to_string(&mut text).expect("a gzip file of UTF-8");
    let parse = |line: &str| {
        let json: serde_json::Value = serde_json::from_str(line).expect("one JSON object per line");
        Request {
            input_tokens: json["input_length"].as_u64().expect("input_length") as usize,
            ids: json["hash_ids"]
                .as_array()
                .expect("hash_ids")
                .iter()
                .map(|id| id.as_u64().expect("an id") as u32)
                .collect(),
        }
    };
    Some(text.lines().map(parse).collect())
}

fn published(file: &str) -> serde_json::Value {
    let path = data(&format!("trace-stats/{file}")).expect("the statistics come with the trace");
    serde_json::from_slice(&std::fs::read(path).expect("readable")).expect("JSON")
}

/// Blocks found in the cache over the whole trace.
fn replay<'a>(
    requests: impl Iterator<Item = &'a [u32]>,
    blocks: u32,
    policy: Box<dyn EvictionPolicy>,
) -> u64 {
    let mut cache = KvCache::new(config(blocks, 1), policy);
    let root = root(0);
    let mut copies = Vec::new();
    for ids in requests {
        let (mut table, copy) = cache.attach_at(&root, ids, ids.len() as u32);
        assert!(copy.is_empty(), "blocks of one token have no tails");
        cache.grow(&mut table, ids.len() as u32, &mut copies).expect("no request is larger than the pool");
        cache.committed(&mut table, ids, ids.len() as u32);
        cache.release(table, ids);
    }
    cache.check(&[]).expect("invariants");
    assert!(copies.is_empty());
    let stats = cache.stats();
    assert_eq!(
        stats.queries.hit_tokens + stats.published_blocks,
        stats.queries.tokens,
        "each block was found or computed"
    );
    stats.queries.hit_tokens
}

/// Compares every published capacity; does nothing where the trace is absent.
fn compare(file: &str, full_only: bool) {
    let Some(requests) = trace() else { return };
    let statistics = published(file);
    let policies = statistics["policies"].as_object().expect("policies");
    let present = |r: &Request| if full_only { r.input_tokens.saturating_sub(1) / 512 } else { r.ids.len() };
    let total: usize = requests.iter().map(&present).sum();
    assert_eq!(Some(total as u64), statistics["blocks"].as_u64());
    let mut compared = 0;
    for (name, figures) in policies {
        let blocks = match name.strip_prefix("lru@") {
            Some(blocks) => blocks.parse().expect("a number of blocks"),
            None if name == "inf" => 200_000,
            None => continue,
        };
        let hits =
            replay(requests.iter().map(|r| &r.ids[..present(r)]), blocks, Box::new(LruLeafFirst::new()));
        println!("{file} {name}: {hits} hit blocks");
        assert_eq!(Some(hits), figures["hit_blocks"].as_u64(), "{file} {name}");
        compared += 1;
    }
    assert_eq!(compared, 6, "unlimited, 1k, 5k, 10k, 50k and 100k blocks");
}

#[test]
fn lru_equals_the_published_counts_for_full_blocks() {
    compare("prefix_cache_conversation_full.json", true);
}

#[test]
fn lru_equals_the_published_counts_for_all_blocks() {
    compare("prefix_cache_conversation.json", false);
}

/// Hits of the published policies at a capacity, and the share of the gap from LRU to MIN that ours closes.
#[test]
fn learned_lifetimes_close_a_good_part_of_the_gap_to_the_optimum() {
    let Some(requests) = trace() else { return };
    let statistics = published("prefix_cache_conversation_full.json");
    let figure =
        |name: String| statistics["policies"][&name]["hit_blocks"].as_u64().expect("a published count");
    let total = statistics["blocks"].as_u64().expect("blocks") as f64;
    for (name, blocks, least) in [("1k", 1000, 0.22), ("5k", 5000, 0.24), ("10k", 10_000, 0.15)] {
        let full = requests.iter().map(|r| &r.ids[..r.input_tokens.saturating_sub(1) / 512]);
        let ours = replay(full, blocks, Box::new(LearnedLifetimes::new(0.0))) as f64;
        let (lru, min) = (figure(format!("lru@{blocks}")) as f64, figure(format!("min@{blocks}")) as f64);
        let closed = (ours - lru) / (min - lru);
        println!(
            "{name}: {:.2} % hits, LRU {:.2}, MIN {:.2}: {:.1} % of the gap",
            100.0 * ours / total,
            100.0 * lru / total,
            100.0 * min / total,
            100.0 * closed
        );
        assert!(closed >= least, "{name}: {closed}");
    }
    for blocks in [50_000, 100_000] {
        let full = requests.iter().map(|r| &r.ids[..r.input_tokens.saturating_sub(1) / 512]);
        let ours = replay(full, blocks, Box::new(LearnedLifetimes::new(0.0))) as f64;
        let lru = figure(format!("lru@{blocks}")) as f64;
        println!("{blocks}: {:.2} % hits, LRU {:.2}", 100.0 * ours / total, 100.0 * lru / total);
        assert!(ours / total >= lru / total - 0.003);
    }
}
