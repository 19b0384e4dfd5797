//! Prints what one block costs at pools of very different sizes: every operation is O(1).
//!
//! `cargo run --release -p folio-kv --example block_cost [-- BLOCKS ...]`, by default 1,000, 100,000 and 10,000,000.
//!
//! Chains of 64 blocks of 16 tokens. *take*: a block that was never used. *publish*: hash it and enter it into the index.
//! *release*: give a chain's references back. *hit*: find and reference a cached block, chains in random order.
//! *evict*: take a block from a full pool, which drops the content of another. All per block, of the median chain. *worst*:
//! the slowest release of a chain, in which retention may relearn (once per half pool of freed blocks).

use std::time::{Duration, Instant};

use folio_kv::{
    BlockHashes, BlockTable, CacheConfig, EvictionPolicy, Identity, KvCache, LearnedLifetimes, LruLeafFirst,
    OutOfBlocks, Root, TenantId,
};

const BLOCK_TOKENS: u32 = 16;
const CHAIN: u32 = 64;
/// Chains that hits and evictions are measured on, at most.
const CHAINS_MEASURED: u32 = 20_000;

/// Time of an operation on each chain.
#[derive(Default)]
struct Cost(Vec<Duration>);

impl Cost {
    fn of<T>(&mut self, work: impl FnOnce() -> T) -> T {
        let start = Instant::now();
        let result = work();
        self.0.push(start.elapsed());
        result
    }

    /// Of the median chain, so that what the system does in between does not count.
    fn per_block(&self) -> String {
        let mut times = self.0.clone();
        times.sort_unstable();
        let median = times.get(times.len() / 2).copied().unwrap_or_default();
        format!("{:.0} ns", median.as_nanos() as f64 / f64::from(CHAIN))
    }

    fn worst(&self) -> Duration {
        self.0.iter().max().copied().unwrap_or_default()
    }
}

#[derive(Default)]
struct Costs {
    take: Cost,
    evict: Cost,
    publish: Cost,
    hit: Cost,
    release: Cost,
}

struct Bench {
    cache: KvCache,
    root: Root,
    tokens: Vec<u32>,
    costs: Costs,
}

impl Bench {
    fn new(blocks: u32, policy: Box<dyn EvictionPolicy>) -> Self {
        let root = Root::derive(&Identity {
            tenant: TenantId(0),
            tenant_secret: &[0; 32],
            model_digest: &[0; 32],
            layout_digest: &[0; 32],
            extra: &[],
        });
        let config = CacheConfig { blocks, block_tokens: BLOCK_TOKENS, bytes_per_block: 1 };
        Self { cache: KvCache::new(config, policy), root, tokens: Vec::new(), costs: Costs::default() }
    }

    /// The text of a chain: no two share a block.
    fn chain(&mut self, number: u32) {
        self.tokens.clear();
        self.tokens
            .extend((0..CHAIN * BLOCK_TOKENS).map(|i| number.wrapping_mul(2_654_435_761).wrapping_add(i)));
        self.tokens[0] = number;
    }

    /// A request of nothing known: its blocks come from the free list, or from others once that is empty.
    fn compute(&mut self, number: u32, evicts: bool) -> Result<(), OutOfBlocks> {
        self.chain(number);
        let length = CHAIN * BLOCK_TOKENS;
        let mut table = self.cache.empty_table(self.hashes());
        let cost = if evicts { &mut self.costs.evict } else { &mut self.costs.take };
        cost.of(|| self.cache.grow(&mut table, length, &mut Vec::new()))?;
        self.costs.publish.of(|| self.cache.commit(&mut table, &self.tokens, length)).expect("in order");
        self.release(table);
        Ok(())
    }

    fn hashes(&self) -> BlockHashes {
        BlockHashes::new(&self.root, &self.tokens, BLOCK_TOKENS)
    }

    fn release(&mut self, table: BlockTable) {
        self.costs.release.of(|| self.cache.release(table, &self.tokens));
    }

    /// A request of a chain that is cached.
    fn find(&mut self, number: u32) {
        self.chain(number);
        let length = CHAIN * BLOCK_TOKENS;
        let hashes = self.hashes();
        let copies = &mut Vec::new();
        let table = self.costs.hit.of(|| self.cache.attach(hashes, &self.tokens, length, copies));
        assert_eq!(table.computed(), length, "chain {number} is cached");
        self.release(table);
    }
}

/// Bytes of this process in memory; 0 where the system does not tell.
fn resident() -> u64 {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
    statm.split_whitespace().nth(1).and_then(|pages| pages.parse::<u64>().ok()).unwrap_or(0) * 4096
}

fn run(name: &str, blocks: u32, policy: Box<dyn EvictionPolicy>) -> Result<(), OutOfBlocks> {
    let before = resident();
    let mut bench = Bench::new(blocks, policy);
    let chains = blocks / CHAIN;
    (0..chains).try_for_each(|number| bench.compute(number, false))?;
    let mut at = 1u64;
    for _ in 0..chains.min(CHAINS_MEASURED) {
        at = at.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        bench.find(((at >> 32) % u64::from(chains)) as u32);
    }
    // What the division left over is taken first.
    bench.compute(chains, false)?;
    for number in 0..CHAINS_MEASURED.max(chains.min(2 * CHAINS_MEASURED)) {
        bench.compute(chains + 1 + number, true)?;
    }
    assert!(bench.cache.stats().evictions >= u64::from(CHAINS_MEASURED * CHAIN), "the pool was full");
    let bytes = resident().saturating_sub(before) / u64::from(blocks);
    let Costs { take, evict, publish, hit, release } = &bench.costs;
    println!(
        "{blocks:>10}  {name:<10} {:>8} {:>8} {:>8} {:>8} {:>8} {:>10.1?} {bytes:>12}",
        take.per_block(),
        publish.per_block(),
        release.per_block(),
        hit.per_block(),
        evict.per_block(),
        release.worst()
    );
    Ok(())
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut sizes: Vec<u32> = Vec::new();
    for argument in std::env::args().skip(1) {
        sizes.push(argument.parse().map_err(|_| format!("`{argument}` is not a number of blocks"))?);
    }
    if sizes.is_empty() {
        sizes = vec![1_000, 100_000, 10_000_000];
    }
    println!(
        "{:>10}  {:<10} {:>8} {:>8} {:>8} {:>8} {:>8} {:>10} {:>12}",
        "blocks", "retention", "take", "publish", "release", "hit", "evict", "worst", "bytes/block"
    );
    for blocks in sizes {
        run("learned", blocks, Box::new(LearnedLifetimes::new(0.0)))?;
        run("LRU", blocks, Box::new(LruLeafFirst::new()))?;
    }
    Ok(())
}
