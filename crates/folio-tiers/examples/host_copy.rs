//! How fast the tier in memory takes blocks and gives them back, beside a plain copy of the same bytes in the same process.
//!
//! `cargo run --release -p folio-tiers --example host_copy [BLOCK_BYTES [BLOCKS]]`. Blocks lie as in a pool, each in one piece; a store finds
//! a tier that is full, so that it copies to memory that was used before, as it does in a server that has run for a while.

use std::sync::{Arc, Mutex};
use std::time::Instant;

use folio_engine::{LoadOrder, Micros, StoreOrder};
use folio_kv::{
    BlockHashes, BlockId, CacheConfig, Content, GroupConfig, Identity, Lease, Lineage, Root, TenantId,
    Ticket, TierId,
};
use folio_model::backend::BlockMemory;
use folio_tiers::{Device, HostStore, Store, WallClock};

const BLOCK_TOKENS: u32 = 16;
const ROUNDS: u32 = 9;

/// A pool of blocks.
struct Pool {
    block_bytes: usize,
    blocks: Vec<Mutex<Vec<u8>>>,
}

impl BlockMemory for Pool {
    fn block_bytes(&self, _: usize) -> usize {
        self.block_bytes
    }

    fn read(&self, _: usize, block: u32, into: &mut [u8]) {
        into.copy_from_slice(&self.blocks[block as usize].lock().expect("one thread"));
    }

    fn write(&self, _: usize, block: u32, from: &[u8]) {
        self.blocks[block as usize].lock().expect("one thread").copy_from_slice(from);
    }
}

fn prompt(seed: u32, blocks: u32) -> BlockHashes {
    let root = Root::derive(&Identity {
        tenant: TenantId(1),
        tenant_secret: &[1; 32],
        model_digest: &[2; 32],
        layout_digest: &[3; 32],
        extra: &[],
    });
    let tokens: Vec<u32> = (0..blocks * BLOCK_TOKENS).map(|at| at ^ (seed << 20)).collect();
    BlockHashes::new(&root, &tokens, BLOCK_TOKENS)
}

fn contents(hashes: &BlockHashes) -> Vec<Content> {
    let content = |(index, hash): (u32, _)| Content { group: 0, index, block: BlockId(index), hash };
    (0..).zip(hashes.iter(false).copied()).map(content).collect()
}

/// Gigabytes a second of the median of several rounds.
fn rate(bytes: usize, mut round: impl FnMut(u32)) -> f64 {
    let mut seconds: Vec<f64> = (0..ROUNDS)
        .map(|number| {
            let began = Instant::now();
            round(number);
            began.elapsed().as_secs_f64()
        })
        .collect();
    seconds.sort_by(f64::total_cmp);
    bytes as f64 / seconds[seconds.len() / 2] / 1e9
}

fn main() {
    let mut given = std::env::args().skip(1).map(|text| text.parse::<u64>().expect("a number"));
    let block_bytes = given.next().unwrap_or(2 << 20) as usize;
    let blocks = given.next().unwrap_or(128) as u32;
    let bytes = block_bytes * blocks as usize;
    let pool = Pool {
        block_bytes,
        blocks: (0..blocks).map(|at| Mutex::new(vec![at as u8 | 1; block_bytes])).collect(),
    };
    let config = CacheConfig { blocks, block_tokens: BLOCK_TOKENS, bytes_per_block: block_bytes as u64 };
    let groups: Vec<GroupConfig> = vec![config.first_group()];
    let device = Device { memory: Arc::new(pool), groups };
    // Room for two prompts: what is stored takes the place of the one before the last.
    let store = HostStore::new(2 * bytes as u64, WallClock::default());
    let put = |seed: u32| {
        let hashes = prompt(seed, blocks);
        let (root, contents) = (*hashes.root(), contents(&hashes));
        let lineage = Lineage::default();
        let order =
            StoreOrder { tier: TierId(0), lease: Lease(1), until: Micros(u64::MAX), root, contents, lineage };
        move |store: &HostStore, device: &Device| {
            let done = store.store(device, &order, &|| true, &mut Vec::new());
            assert_eq!(done.left, 0);
        }
    };
    (0..3).for_each(|seed| put(seed)(&store, &device));
    let orders: Vec<_> = (0..ROUNDS).map(|round| put(10 + round)).collect();
    let stored = rate(bytes, |round| orders[round as usize](&store, &device));
    let hashes = prompt(9 + ROUNDS, blocks);
    let order = LoadOrder {
        tier: TierId(0),
        ticket: Ticket(1),
        root: *hashes.root(),
        contents: contents(&hashes),
        prefetch: false,
    };
    let loaded = rate(bytes, |_| assert_eq!(store.load(&device, &order, &mut Vec::new()).left, 0));
    let from = vec![1u8; bytes];
    let mut to = vec![2u8; bytes];
    let copied = rate(bytes, |_| {
        for (to, from) in to.chunks_exact_mut(block_bytes).zip(from.chunks_exact(block_bytes)) {
            std::hint::black_box(to).copy_from_slice(std::hint::black_box(from));
        }
    });
    println!("{blocks} blocks of {block_bytes} bytes, one thread, median of {ROUNDS}");
    println!("copy   {copied:7.2} GB/s");
    println!("store  {stored:7.2} GB/s  {:5.1} % of a copy", 100.0 * stored / copied);
    println!("load   {loaded:7.2} GB/s  {:5.1} % of a copy", 100.0 * loaded / copied);
}
