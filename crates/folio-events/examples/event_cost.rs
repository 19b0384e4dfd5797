//! What KV events cost: the engine's thread per block, the publisher per block, and a subscriber over loopback.
//!
//! `cargo run --release -p folio-events --example event_cost`

use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use folio_engine::EventFeed;
use folio_events::{EventSource, KvEvents, KvEventsConfig};
use folio_kv::{BlockHashes, CacheConfig, Identity, KvCache, LruLeafFirst, Root, TenantId};

const BLOCKS: u32 = 100_000;
const SIZE: u32 = 16;
/// Blocks that a step completes, of as many that were evicted for them.
const STEP: u32 = 64;
const STEPS: u32 = 5_000;

fn main() -> anyhow::Result<()> {
    let off = steps(None)?;
    println!("engine, events off      {off:>8.0} ns a block (stored, and one removed for it)");
    let feed = Arc::new(EventFeed::new(100_000, SIZE));
    let on = steps(Some(&feed))?;
    println!("engine, nobody listens  {on:>8.0} ns a block, {:+.0} ns", on - off);
    let feed = Arc::new(EventFeed::new(1_000_000, SIZE));
    let json = r#"{"enable_kv_cache_events": true, "tenants": "*", "endpoint": "tcp://127.0.0.1:0"}"#;
    let config = KvEventsConfig::parse(Some(json), None)?.expect("it is on");
    let events = KvEvents::start(
        &EventSource { config, feed: feed.clone() },
        Box::new(|_| Some("".into())),
        Box::new(Vec::new),
    )?;
    let reader = subscribe(&events)?;
    let began = Instant::now();
    let on = steps(Some(&feed))?;
    println!("engine, publishing      {on:>8.0} ns a block, {:+.0} ns", on - off);
    let told = loop {
        let stats = events.stats();
        if stats.stored >= u64::from(STEP * STEPS) || stats.lost > 0 {
            break stats.stored + stats.removed;
        }
        std::thread::sleep(Duration::from_millis(1));
    };
    let seconds = began.elapsed().as_secs_f64();
    println!("publisher               {:>8.2} M events/s", told as f64 / seconds / 1e6);
    println!("lost {}, dropped {}", events.stats().lost, events.stats().dropped);
    events.stop();
    let bytes = reader.join().expect("the reader ends");
    println!(
        "subscriber              {:>8.1} MB, {:.0} MB/s",
        bytes as f64 / 1e6,
        bytes as f64 / seconds / 1e6
    );
    Ok(())
}

/// Nanoseconds a block.
fn steps(feed: Option<&Arc<EventFeed>>) -> anyhow::Result<f64> {
    let config = CacheConfig { blocks: BLOCKS, block_tokens: SIZE, bytes_per_block: 1 };
    let mut cache = KvCache::new(config, Box::new(LruLeafFirst::new()));
    if let Some(feed) = feed {
        feed.open(&mut cache);
    }
    let root = Root::derive(&Identity {
        tenant: TenantId(1),
        tenant_secret: &[1; 32],
        model_digest: &[2; 32],
        layout_digest: &[3; 32],
        extra: &[],
    });
    let mut spent = Duration::ZERO;
    for step in 0..STEPS {
        let tokens: Vec<u32> = (0..STEP * SIZE).map(|at| step * 7919 + at).collect();
        let hashes = BlockHashes::new(&root, &tokens, SIZE);
        let began = Instant::now();
        let mut table = cache.empty_table(hashes);
        cache.grow(&mut table, STEP * SIZE, &mut Vec::new())?;
        cache.commit(&mut table, &tokens, STEP * SIZE)?;
        cache.release(table, &tokens);
        if let Some(feed) = feed {
            feed.put(&mut cache);
        }
        spent += began.elapsed();
    }
    Ok(spent.as_nanos() as f64 / f64::from(STEP * STEPS))
}

/// Reads all there is; returns its bytes.
fn subscribe(events: &KvEvents) -> anyhow::Result<std::thread::JoinHandle<u64>> {
    let mut stream = TcpStream::connect(events.endpoint())?;
    let mut hello = vec![0; 64];
    (hello[0], hello[9], hello[10]) = (0xff, 0x7f, 3);
    hello[12..16].copy_from_slice(b"NULL");
    hello.extend(b"\x04\x19\x05READY\x0bSocket-Type\0\0\0\x03SUB\0\x01\x01");
    stream.write_all(&hello)?;
    while events.stats().subscribers.iter().all(|of| of.late.is_none()) {
        std::thread::sleep(Duration::from_millis(1));
    }
    Ok(std::thread::spawn(move || {
        let (mut bytes, mut buffer) = (0, vec![0; 1 << 20]);
        while let Ok(read @ 1..) = stream.read(&mut buffer) {
            bytes += read as u64;
        }
        bytes
    }))
}
