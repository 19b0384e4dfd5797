//! How fast the tier in memory takes blocks and gives them back, beside a plain copy of the same bytes in the same process.
//!
//! `cargo run --release -p folio-tiers --example host_copy [BLOCK_BYTES [BLOCKS]]`. Blocks lie as in a pool, each in one piece; a store finds
//! a tier that is full, so that it copies to memory that was used before, as it does in a server that has run for a while.

mod pool;

use std::time::Instant;

use folio_tiers::{HostStore, Store, WallClock};

const ROUNDS: u32 = 9;

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
    let device = pool::device(block_bytes, blocks);
    // Room for two prompts: what is stored takes the place of the one before the last.
    let store = HostStore::new(2 * bytes as u64, WallClock::default());
    let put = |seed: u32| {
        let order = pool::store_order(&pool::prompt(seed, blocks));
        let (store, device) = (&store, &device);
        move || assert_eq!(store.store(device, &order, &|| true, &mut Vec::new()).left, 0)
    };
    (0..3).for_each(|seed| put(seed)());
    let orders: Vec<_> = (0..ROUNDS).map(|round| put(10 + round)).collect();
    let stored = rate(bytes, |round| orders[round as usize]());
    let order = pool::load_order(&pool::prompt(9 + ROUNDS, blocks));
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
