//! How fast values go to a Valkey and come back: through the client alone, and as blocks that are sealed on their way.
//!
//! `cargo run --release -p folio-tiers --example valkey_speed -- valkey://127.0.0.1:6379 [BLOCK_BYTES [BLOCKS [THREADS]]]`. Blocks of a
//! prompt are values of about 4 MiB. `tools/bench/valkey_speed.py` starts a server and runs its own benchmark beside this.

mod pool;

use std::sync::Arc;
use std::time::{Duration, Instant};

use folio_tiers::remote::valkey::{Valkey, ValkeyConfig};
use folio_tiers::remote::{Name, Objects, RemoteStore};
use folio_tiers::{Secret, Store, WallClock};

/// The allocator of `folio`.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

const LIMIT: Duration = Duration::from_secs(20);

/// Megabytes a second of `threads` that do one piece after the other, each with room of its own that it keeps, as the tier's threads have.
fn rate(bytes: usize, threads: usize, pieces: usize, one: impl Fn(usize, &mut Vec<u8>) + Sync) -> f64 {
    let began = Instant::now();
    std::thread::scope(|scope| {
        for thread in 0..threads {
            let one = &one;
            scope.spawn(move || {
                let mut scratch = Vec::new();
                (thread..pieces).step_by(threads).for_each(|at| one(at, &mut scratch));
            });
        }
    });
    bytes as f64 / began.elapsed().as_secs_f64() / 1e6
}

fn main() {
    let mut given = std::env::args().skip(1);
    let url = given.next().expect("valkey://HOST:PORT");
    let mut number = |default: usize| given.next().map_or(default, |text| text.parse().expect("a number"));
    let (block_bytes, blocks, threads) = (number(512 << 10), number(512), number(4));
    let config = ValkeyConfig { url: Secret(url), password: None, authorities: None };
    let client = Arc::new(Valkey::new(&config).expect("a server"));
    let value_bytes = client.limits().value_bytes;
    let bytes = block_bytes * blocks;
    println!("{bytes} bytes, {threads} threads");

    let values = bytes / value_bytes;
    let value: Vec<u8> = (0..value_bytes).map(|at| ((at * 131) >> 3) as u8).collect();
    let name = |at: usize| Name(*blake3::hash(&at.to_le_bytes()).as_bytes());
    let put = rate(values * value_bytes, threads, values, |at, _| {
        client.put(&name(at), &value, true, LIMIT).expect("it takes it");
    });
    let get = rate(values * value_bytes, threads, values, |at, _| {
        let got = client.get(&name(at), 0..value_bytes, LIMIT).expect("it answers").expect("it is there");
        assert_eq!(got.len(), value_bytes);
    });
    println!("unsealed, values of {value_bytes} bytes: set {put:.0} MB/s, get {get:.0} MB/s");

    let store = RemoteStore::new(client, [1; 32], None, WallClock::default()).expect("a store");
    let each = 64.min(blocks) as u32;
    let (prompts, device) = (blocks / each as usize, pool::device(block_bytes, each));
    let prompt = |at: usize| pool::prompt(at as u32, each);
    let bytes = prompts * each as usize * block_bytes;
    let stored = rate(bytes, threads, prompts, |at, scratch| {
        let done = store.store(&device, &pool::store_order(&prompt(at)), &|| true, scratch);
        assert_eq!(done.left, 0);
    });
    let loaded = rate(bytes, threads, prompts, |at, scratch| {
        assert_eq!(store.load(&device, &pool::load_order(&prompt(at)), scratch).left, 0);
    });
    println!("sealed, blocks of {block_bytes} bytes: store {stored:.0} MB/s, load {loaded:.0} MB/s");
}
