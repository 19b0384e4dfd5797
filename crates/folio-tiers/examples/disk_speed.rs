//! Rates of the disk store beside what the disk gives to plain reads and writes of the same sizes through the same calls.
//!
//! `cargo run --release -p folio-tiers --example disk_speed [FOLDER] [BLOCK_BYTES] [BLOCKS] [SMALL_BLOCKS] [THREADS]`; with `1000000` small blocks
//! what a start with so many costs: after a clean end, and with the lists of all segments lost, as after `kill -9`. As many threads as the tier has
//! (`--disk-kv-threads`) write and read at once: plain files, one for each, the cipher in memory, and the store.
//!
//! What is sealed is also told as a share of the slower of the disk and the cipher, which are measured in the same run, and of what a thread that does
//! both one after the other can reach, `1 / (1 / disk + 1 / cipher)`.

use std::path::Path;
use std::sync::Barrier;
use std::time::{Duration, Instant};

use chacha20poly1305::aead::inout::InOutBuf;
use chacha20poly1305::{AeadInOut, KeyInit, XChaCha20Poly1305};
use folio_kv::BlockHash;
use folio_tiers::io::{Directory, Folder, Pages};
use folio_tiers::{About, BlockKey, DataKey, DiskConfig, DiskStore};

fn key(at: usize) -> BlockKey {
    let mut hash = [0; 32];
    hash[..8].copy_from_slice(&(at as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes());
    BlockKey { hash: BlockHash(hash), group: 0 }
}

/// Bytes of memory that this process has.
fn resident() -> i64 {
    let statm = std::fs::read_to_string("/proc/self/statm").expect("Linux");
    let pages = statm.split(' ').nth(1).and_then(|pages| pages.parse::<i64>().ok());
    4096 * pages.expect("a number of pages")
}

/// MB/s of `threads` threads that begin together and have `bytes` each, by the one that takes longest.
fn together(threads: usize, bytes: usize, work: impl Fn(usize) + Sync) -> f64 {
    let begin = Barrier::new(threads);
    let timed = |thread| {
        begin.wait();
        let began = Instant::now();
        work(thread);
        began.elapsed()
    };
    let longest = std::thread::scope(|scope| {
        let timed = &timed;
        let threads: Vec<_> = (0..threads).map(|thread| scope.spawn(move || timed(thread))).collect();
        threads.into_iter().map(|thread| thread.join().expect("no panic")).max().expect("a thread")
    });
    (threads * bytes) as f64 / longest.as_secs_f64() / 1e6
}

/// To write and to read back pages of `bytes`, `blocks` for each thread.
fn device(dir: &Path, bytes: usize, blocks: usize, threads: usize) -> [f64; 2] {
    let folder = Directory::open(dir).expect("a folder").expect("nobody else's");
    let length = Pages::new(bytes + 4096).len();
    let name = |thread: usize| format!("plain{thread}");
    for thread in 0..threads {
        folder.create(&name(thread), (length * blocks) as u64).expect("room");
    }
    let write = together(threads, length * blocks, |thread| {
        let mut pages = Pages::new(length);
        pages.iter_mut().enumerate().for_each(|(at, byte)| *byte = (at * 31) as u8);
        let file = folder.open(&name(thread)).expect("it was created");
        for at in 0..blocks {
            file.write(&pages, (at * length) as u64).expect("written");
        }
    });
    let read = together(threads, length * blocks, |thread| {
        let mut pages = Pages::new(length);
        let file = folder.open(&name(thread)).expect("it was created");
        for at in 0..blocks {
            file.read(&mut pages, (at * length) as u64).expect("read");
        }
    });
    (0..threads).for_each(|thread| folder.remove(&name(thread)).expect("it is there"));
    let how = if folder.is_direct() { "O_DIRECT" } else { "page cache" };
    println!("disk, {how}: write {write:.0} MB/s, read {read:.0} MB/s");
    [write, read]
}

/// What is sealed and what is opened in memory, MB/s.
fn cipher(bytes: usize, blocks: usize, threads: usize) -> [f64; 2] {
    let cipher = XChaCha20Poly1305::new(&[7; 32].into());
    let nonce = [9; 24].into();
    let seal = together(threads, bytes * blocks, |_| {
        let mut block = vec![5; bytes];
        for _ in 0..blocks {
            let sealed = cipher.encrypt_inout_detached(&nonce, b"", (&mut *block).into());
            sealed.expect("short enough");
        }
    });
    let open = together(threads, bytes * blocks, |_| {
        let (mut sealed, mut into) = (vec![5; bytes], vec![0; bytes]);
        let tag = cipher.encrypt_inout_detached(&nonce, b"", (&mut *sealed).into()).expect("short enough");
        for _ in 0..blocks {
            let buffer = InOutBuf::new(&sealed, &mut into).expect("equally long");
            cipher.decrypt_inout_detached(&nonce, b"", buffer, &tag).expect("as it was sealed");
        }
    });
    println!("cipher: seals {seal:.0} MB/s, opens {open:.0} MB/s");
    [seal, open]
}

fn main() {
    let mut args = std::env::args().skip(1);
    let dir = args.next().unwrap_or_else(|| "target/disk_speed".into());
    let bytes: usize = args.next().and_then(|n| n.parse().ok()).unwrap_or(512 << 10);
    let blocks: usize = args.next().and_then(|n| n.parse().ok()).unwrap_or(2048);
    let many: usize = args.next().and_then(|n| n.parse().ok()).unwrap_or(100_000);
    let threads: usize = args.next().and_then(|n| n.parse().ok()).unwrap_or(4);
    let dir = Path::new(&dir);
    let each = blocks.div_ceil(threads);
    println!("{threads} threads with {each} blocks of {bytes} bytes each");
    let disk = device(&dir.join("plain"), bytes, each, threads);
    let cipher = cipher(bytes, each, threads);
    let secret = DataKey::from([7; 32]);
    let block: Vec<u8> = (0..bytes).map(|at| ((at * 131) >> 3) as u8).collect();
    for seal in [true, false] {
        let folder = dir.join(if seal { "sealed" } else { "unsealed" });
        let size = (2 * bytes * blocks) as u64 + (1 << 30);
        let store = DiskStore::open(DiskConfig { seal, ..DiskConfig::new(&folder, size, [1; 32]) });
        let store = store.expect("a store");
        store.wait_indexed();
        let write = together(threads, bytes * each, |thread| {
            for at in thread * each..(thread + 1) * each {
                store.put(&key(at), &secret, &block, &About::default()).expect("room");
            }
        });
        let read = together(threads, bytes * each, |thread| {
            let mut into = vec![0; bytes];
            for at in thread * each..(thread + 1) * each {
                store.get(&key(at), &secret, &mut into).expect("it was put");
            }
            assert_eq!(into, block);
        });
        let [put, get] = [(write, disk[0]), (read, disk[1])].map(|(rate, disk)| 100.0 * rate / disk);
        let how = if seal { "sealed" } else { "not sealed" };
        println!(
            "store, {how}: put {write:.0} MB/s ({put:.0} % of the disk), get {read:.0} MB/s ({get:.0} %)"
        );
        if seal {
            for (what, rate, disk, cipher) in
                [("put", write, disk[0], cipher[0]), ("get", read, disk[1], cipher[1])]
            {
                let (slower, both) = (disk.min(cipher), 1.0 / (1.0 / disk + 1.0 / cipher));
                let [slower, both] = [slower, both].map(|limit| 100.0 * rate / limit);
                println!(
                    "  {what}: {slower:.0} % of the slower of disk and cipher, {both:.0} % of one after the other"
                );
            }
        }
        drop(store);
        std::fs::remove_dir_all(&folder).expect("it is ours");
    }
    // What a start costs, with small blocks.
    // A block of 2 KiB and what is around it fill a page.
    let (small, folder) = (vec![3; 2048], dir.join("start"));
    let config = DiskConfig::new(&folder, (many as u64 + many as u64 / 4) * 4096 + (1 << 30), [1; 32]);
    let store = DiskStore::open(config.clone()).expect("a store");
    for at in 0..many {
        store.put(&key(at), &secret, &small, &About::default()).expect("room");
    }
    store.close();
    drop(store);
    let start = |what: &str| {
        let (before, began) = (resident(), Instant::now());
        let store = DiskStore::open(config.clone()).expect("a store");
        let answers = began.elapsed();
        // The one written last, which is known first.
        let mut found = vec![0; small.len()];
        while store.get(&key(many - 1), &secret, &mut found).is_err() && began.elapsed().as_secs() < 600 {
            std::thread::sleep(Duration::from_millis(1));
        }
        let first = began.elapsed();
        store.wait_indexed();
        let (blocks, all) = (store.stats().blocks, began.elapsed());
        let bytes = (resident() - before) as f64 / blocks as f64;
        println!(
            "start {what}: answers after {answers:.1?}, first hit after {first:.1?}, knows {blocks} blocks after {all:.1?}, {bytes:.0} bytes of memory each"
        );
    };
    start("after a clean end");
    for file in std::fs::read_dir(&folder).expect("a folder").flatten() {
        if file.path().extension().is_some_and(|of| of == "segment") {
            // The footer's end is gone.
            let length = file.metadata().expect("a file").len();
            let open = std::fs::OpenOptions::new().write(true).open(file.path()).expect("a file");
            open.set_len(length - 4096).expect("cut");
        }
    }
    start("with every footer lost");
    std::fs::remove_dir_all(dir).expect("it is ours");
}
