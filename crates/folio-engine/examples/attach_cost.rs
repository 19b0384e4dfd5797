//! What it takes from the mailbox to the plan when all of a long prompt is cached:
//! `cargo run --release -p folio-engine --example attach_cost [-- BLOCKS ...]`, by default pools of 100,000 and 10,000,000 blocks.
//!
//! Prompts of 100,000 tokens, in blocks of 16, fill the pool; their blocks lie scattered over it, because 64 of them were computed
//! side by side, in chunks of 512 tokens and random order (`--scatter`: block by block, which no cache of a processor likes).
//! *admit*: the scheduler takes the request in. *plan*: it looks the prompt up, attaches it and makes the plan. *attach*,
//! *release*: of these the cache's part, measured by itself. All with the hashes given, as a server gives them.

use std::time::{Duration, Instant};

use folio_engine::{CancelRequest, Micros, RequestId, Scheduler, SchedulerConfig};
use folio_kv::{BlockHashes, BlockTable, CacheConfig, KvCache, default_policy};
use folio_sim::scenario::{request, root};

/// The allocator of `folio`.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

const BLOCK: u32 = 16;
const PROMPT: u32 = 100_000;
const PER_PROMPT: u32 = PROMPT / BLOCK;
const ROUNDS: usize = 60;

struct Random(u64);

impl Random {
    fn below(&mut self, most: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        ((self.0 >> 33) % most as u64) as usize
    }
}

fn prompt(of: u32) -> Vec<u32> {
    (0..PROMPT).map(|at| (at ^ of.wrapping_mul(0x9e37_79b9)) % 200_000).collect()
}

/// Fills the pool with prompts, many at a time, a chunk of one after a chunk of another.
fn fill(cache: &mut KvCache, prompts: u32, chunk: u32) {
    let mut random = Random(7);
    let mut next = 0;
    while next < prompts {
        let together = (prompts - next).min(64);
        let mut open: Vec<(BlockTable, Vec<u32>)> = (next..next + together)
            .map(|of| {
                let tokens = prompt(of);
                let hashes = BlockHashes::new(&root(folio_kv::TenantId(0)), &tokens, BLOCK);
                (cache.empty_table(hashes), tokens)
            })
            .collect();
        next += together;
        while !open.is_empty() {
            let at = random.below(open.len());
            let (table, tokens) = &mut open[at];
            let to = (table.computed() + chunk).min(PROMPT);
            cache.grow(table, to, &mut Vec::new()).expect("the pool holds all prompts");
            cache.commit(table, tokens, to).expect("what was grown can be committed");
            if to == PROMPT {
                let (table, tokens) = open.swap_remove(at);
                cache.release(table, &tokens);
            }
        }
    }
}

fn show(mut times: Vec<Duration>) -> String {
    times.sort_unstable();
    let us = |at: usize| times[at].as_nanos() as f64 / 1000.0;
    format!("median {:8.1} us, worst {:8.1} us", us(times.len() / 2), us(times.len() - 1))
}

fn measure(blocks: u32, chunk: u32) {
    let config = CacheConfig { blocks, block_tokens: BLOCK, bytes_per_block: 1 };
    let mut cache = KvCache::new(config, default_policy(0.001));
    // Some blocks are left free for what is computed behind the prompts.
    let prompts = (blocks - 200) / PER_PROMPT;
    fill(&mut cache, prompts, chunk);
    let limits = SchedulerConfig { max_model_len: 2 * PROMPT, ..SchedulerConfig::default() };
    let mut scheduler = Scheduler::new(limits).expect("valid limits");
    let (mut admit, mut plan, mut attach, mut release) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    let mut random = Random(11);
    for round in 0..ROUNDS as u64 {
        let tokens = prompt(random.below(prompts as usize) as u32);
        let submission = request(1 + round, &tokens, 10).hashed(BLOCK);
        let now = Micros(round * 1000);
        let began = Instant::now();
        scheduler.admit([submission], [], now);
        admit.push(began.elapsed());
        let began = Instant::now();
        let made = scheduler.plan(&mut cache, now);
        plan.push(began.elapsed());
        assert_eq!(
            made.sequences[0].first_position,
            PROMPT - 1 - (PROMPT - 1) % BLOCK + BLOCK - 1,
            "it was cached"
        );
        let step = made.step;
        let cancel = CancelRequest { request: RequestId(1 + round), choice: None };
        let failed = folio_engine::plan::ExecutorError { step, reason: "enough".into() };
        scheduler.commit(&mut cache, Err(failed), now).clear();
        scheduler.admit([], [cancel], now);

        let tokens = prompt(random.below(prompts as usize) as u32);
        let hashes = BlockHashes::new(&root(folio_kv::TenantId(0)), &tokens, BLOCK);
        let began = Instant::now();
        let table = cache.attach(hashes, &tokens, PROMPT - 1, &mut Vec::new());
        attach.push(began.elapsed());
        let began = Instant::now();
        cache.release(table, &tokens);
        release.push(began.elapsed());
    }
    println!("{PROMPT} tokens, all of them cached, in a pool of {blocks} blocks:");
    println!("  admit   {}", show(admit));
    println!("  plan    {}", show(plan));
    println!("  attach  {}", show(attach));
    println!("  release {}", show(release));
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut sizes = Vec::new();
    let mut chunk = 512;
    for argument in std::env::args().skip(1) {
        if argument == "--scatter" {
            chunk = BLOCK;
            continue;
        }
        sizes.push(argument.parse().map_err(|_| format!("`{argument}` is not a number of blocks"))?);
    }
    if sizes.is_empty() {
        sizes = vec![100_000, 10_000_000];
    }
    sizes.into_iter().for_each(|blocks| measure(blocks, chunk));
    Ok(())
}
