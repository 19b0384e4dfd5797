//! How many blocks of recorded traffic each retention policy finds again.
//!
//! Owns: the traffic as block ids, the race of policies over it (`workloads`: traffic to race on; `tiers`: with a tier behind the cache; `states`: with states beside it). Must never: re-implement the cache: every policy runs inside the
//! real [`KvCache`], the offline optimum, too.
//!
//! The model, the same for every policy: requests one after another; a request finds its leading cached blocks, all of its
//! blocks are present after it, and it ends before the next comes. Only full blocks count, and one token of a prompt is
//! always left to compute, as in a real engine. No output blocks.
//!
//! The optimum is of what is kept *between* requests: what a request has beyond that it computes in room of its own, so that nothing
//! is given up for a block that is not worth keeping. The others make room for a request first, as an engine must.

mod optimum;
mod rivals;
pub mod states;
pub mod tiers;
pub mod workloads;

use std::collections::HashMap;
use std::io::BufRead;

use folio_kv::{
    BlockHashes, CacheConfig, EvictionPolicy, KvCache, LearnedLifetimes, LearningSettings, LruLeafFirst,
    Root, TenantId,
};
use serde::Deserialize;

use crate::scenario::root;
use crate::trace::TraceError;

/// Requests as the blocks of their prompts. Equal ids are equal blocks after equal beginnings.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BlockTrace {
    pub requests: Vec<Vec<u32>>,
}

#[derive(Deserialize)]
struct Line {
    input_length: usize,
    hash_ids: Vec<u64>,
}

/// Tokens per hash id in Mooncake's traces.
const BLOCK_TOKENS: usize = 512;

impl BlockTrace {
    /// Mooncake's traces, unpacked: one JSON object per line with `input_length` and `hash_ids`.
    pub fn mooncake(reader: impl BufRead) -> Result<Self, TraceError> {
        let mut ids = HashMap::new();
        let mut requests = Vec::new();
        for (line, text) in reader.lines().enumerate() {
            let bad = |reason: String| TraceError::Line { line: line + 1, reason };
            let parsed: Line = serde_json::from_str(&text?).map_err(|error| bad(error.to_string()))?;
            let full = parsed.input_length.saturating_sub(1) / BLOCK_TOKENS;
            if parsed.hash_ids.len() < full {
                return Err(bad(format!(
                    "{} hash_ids for {} tokens",
                    parsed.hash_ids.len(),
                    parsed.input_length
                )));
            }
            requests.push(Vec::with_capacity(full));
            for id in &parsed.hash_ids[..full] {
                let next = ids.len() as u32;
                requests[line].push(*ids.entry(*id).or_insert(next));
            }
        }
        Ok(Self { requests })
    }

    /// Blocks of all prompts, found or not.
    pub fn blocks(&self) -> u64 {
        self.requests.iter().map(|ids| ids.len() as u64).sum()
    }
}

/// Who may race.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Policy {
    /// The default of the engine.
    Folio,
    Lru,
    Fifo,
    Lfu,
    S3Fifo,
    /// Belady's optimum, which knows the future.
    Min,
}

impl Policy {
    pub const ALL: [Policy; 6] =
        [Policy::Folio, Policy::Lru, Policy::Fifo, Policy::Lfu, Policy::S3Fifo, Policy::Min];

    pub const fn name(self) -> &'static str {
        match self {
            Policy::Folio => "Folio",
            Policy::Lru => "LRU",
            Policy::Fifo => "FIFO",
            Policy::Lfu => "LFU",
            Policy::S3Fifo => "S3-FIFO",
            Policy::Min => "MIN",
        }
    }

    /// Of a cache whose deeper blocks cost so much more to compute ([`folio_kv::default_policy`]). `None`: it has to know the future.
    pub fn online(self, depth_cost: f64) -> Option<Box<dyn EvictionPolicy>> {
        Some(match self {
            Policy::Folio => Box::new(LearnedLifetimes::new(depth_cost)),
            Policy::Lru => Box::new(LruLeafFirst::new()),
            Policy::Fifo => Box::new(rivals::Ranked::new(rivals::fifo)),
            Policy::Lfu => Box::new(rivals::Ranked::new(rivals::lfu)),
            Policy::S3Fifo => Box::new(rivals::S3Fifo::default()),
            Policy::Min => return None,
        })
    }

    /// As it is before `trace`, which only the optimum may look at.
    fn begin(self, trace: &BlockTrace, root: &Root) -> Box<dyn EvictionPolicy> {
        self.online(0.0).unwrap_or_else(|| {
            Box::new(optimum::Min::new(trace.requests.iter().map(|ids| {
                let hashes = BlockHashes::new(root, ids, 1);
                hashes.iter().copied().collect::<Vec<_>>()
            })))
        })
    }
}

/// Blocks found in a cache of `blocks` blocks. A request that is larger than the cache finds what it finds and keeps nothing new,
/// under every policy but the optimum.
pub fn hits(trace: &BlockTrace, blocks: u32, policy: Policy) -> u64 {
    let longest = trace.requests.iter().map(Vec::len).max().unwrap_or(0) as u32;
    let room = if policy == Policy::Min { longest } else { 0 };
    replay(trace, blocks, room, policy.begin(trace, &root(TenantId(0))))
}

/// The same under learned retention with other settings.
pub fn hits_with(trace: &BlockTrace, blocks: u32, settings: LearningSettings) -> u64 {
    replay(trace, blocks, 0, Box::new(LearnedLifetimes::with_settings(0.0, settings)))
}

fn replay(trace: &BlockTrace, blocks: u32, room: u32, policy: Box<dyn EvictionPolicy>) -> u64 {
    let root = root(TenantId(0));
    let config = CacheConfig { blocks: blocks + room, block_tokens: 1, bytes_per_block: 1 };
    let mut cache = KvCache::new(config, policy);
    let mut copies = Vec::new();
    for ids in &trace.requests {
        let length = ids.len() as u32;
        // A block of one token has no part that could be copied.
        let hashes = BlockHashes::new(&root, ids, 1);
        let mut table = cache.attach(hashes, ids, length, &mut Vec::new());
        if cache.grow(&mut table, length, &mut copies).is_ok() {
            cache.commit(&mut table, ids, length).expect("what was grown can be committed");
        }
        cache.release(table, ids);
        if cache.stats().cached_blocks > blocks {
            // The room is free again for the next: what is not worth keeping goes.
            let mut all = cache.empty_table(BlockHashes::new(&root, &[], 1));
            cache.grow(&mut all, room, &mut copies).expect("nothing is in use");
            cache.release(all, &[]);
        }
    }
    cache.stats().queries.hit_tokens
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rng::mix;

    fn trace(requests: &[&[u32]]) -> BlockTrace {
        BlockTrace { requests: requests.iter().map(|ids| ids.to_vec()).collect() }
    }

    #[test]
    fn traces_are_read_and_faults_are_named() {
        let text = "{\"input_length\": 1025, \"hash_ids\": [7, 9, 3]}\n{\"input_length\": 1024, \"hash_ids\": [7, 8]}\n";
        let read = BlockTrace::mooncake(text.as_bytes()).expect("valid");
        assert_eq!(read.requests, [vec![0, 1], vec![0]], "full blocks, one token left to compute");
        let error = |text: &str| BlockTrace::mooncake(text.as_bytes()).expect_err("invalid").to_string();
        assert!(error("{}").contains("line 1"));
        assert!(error("{\"input_length\": 5000, \"hash_ids\": [1]}").contains("1 hash_ids for 5000 tokens"));
    }

    #[test]
    fn each_policy_does_what_its_name_says() {
        // One block is wanted again and again while others pass by once.
        let favourite: Vec<Vec<u32>> =
            (1..20).flat_map(|other| [vec![0], vec![other], vec![other + 100]]).collect();
        let favourite = BlockTrace { requests: favourite };
        let found = |policy| hits(&favourite, 2, policy);
        assert_eq!(found(Policy::Lru), 0, "two strangers in between push it out");
        assert_eq!(found(Policy::Fifo), 0);
        assert_eq!(found(Policy::Min), 18);
        // A block found twice stays under LFU, whatever comes.
        let twice = trace(&[&[0], &[0], &[0], &[1], &[2], &[3], &[4], &[0]]);
        assert_eq!(hits(&twice, 2, Policy::Lfu), 3);
        assert_eq!(hits(&twice, 2, Policy::Lru), 2);
        // FIFO does not care that a block was found; LRU does.
        let renewed = trace(&[&[0], &[1], &[0], &[2], &[0]]);
        assert_eq!((hits(&renewed, 2, Policy::Fifo), hits(&renewed, 2, Policy::Lru)), (1, 2));
    }

    #[test]
    fn nobody_beats_the_optimum_and_all_agree_when_there_is_room() {
        for seed in 0..20 {
            let mut state = seed;
            let mut random = |below: u64| {
                state = mix(state);
                (state % below) as u32
            };
            // Chains: block `chain * 100 + depth`.
            let requests = (0..300).map(|_| {
                let (chain, length) = (random(12), 1 + random(9));
                (0..length).map(|depth| chain * 100 + depth).collect()
            });
            let trace = BlockTrace { requests: requests.collect() };
            for blocks in [12, 30, 60] {
                let best = hits(&trace, blocks, Policy::Min);
                for policy in Policy::ALL {
                    let found = hits(&trace, blocks, policy);
                    assert!(
                        found <= best,
                        "seed {seed}, {blocks} blocks, {}: {found} > {best}",
                        policy.name()
                    );
                }
            }
            let roomy = Policy::ALL.map(|policy| hits(&trace, 200, policy));
            assert!(roomy.iter().all(|found| *found == roomy[0]), "{roomy:?}");
        }
    }
}
