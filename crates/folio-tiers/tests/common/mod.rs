//! Small stores, and blocks whose bytes follow from their number.
#![allow(dead_code)]

pub mod device;
pub mod objects;
pub mod values;

use std::fs;
use std::path::Path;
use std::sync::Arc;

use folio_kv::{BlockHash, TenantId};
use folio_tiers::{About, BlockKey, Class, DataKey, DiskConfig, DiskStore};

pub const LAYOUT: [u8; 32] = [7; 32];
/// Nothing.
pub const ABOUT: About<'static> =
    About { tenant: TenantId(0), parent: None, tokens: &[], expires_s: None, class: Class::Ordinary };

pub fn key(number: u64) -> BlockKey {
    let mut seed = number;
    let mut hash = [0; 32];
    for byte in &mut hash {
        seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        *byte = (seed >> 56) as u8;
    }
    BlockKey { hash: BlockHash(hash), group: (number % 3) as u8 }
}

pub fn tenant(number: u8) -> DataKey {
    DataKey::from([number; 32])
}

/// Of a block, some hundred bytes or as many as `length`.
pub fn block(number: u64, length: usize) -> Vec<u8> {
    let mut seed = number ^ 0x5555;
    let mut next = || {
        seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (seed >> 56) as u8
    };
    (0..length).map(|_| next()).collect()
}

pub fn config(dir: &Path) -> DiskConfig {
    let mut config = DiskConfig::new(dir, 1 << 20, LAYOUT);
    config.segment_bytes = 64 << 10;
    config
}

pub fn open(config: &DiskConfig) -> Arc<DiskStore> {
    let store = DiskStore::open(config.clone()).expect("it opens");
    store.wait_indexed();
    store
}

/// As it is while a process writes to it: what a sudden death leaves.
pub fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for file in fs::read_dir(from).unwrap() {
        let file = file.unwrap();
        if file.file_name() != "lock" {
            fs::copy(file.path(), to.join(file.file_name())).unwrap();
        }
    }
}

/// The segments' files, in their order.
pub fn segments(dir: &Path) -> Vec<std::path::PathBuf> {
    let mut files: Vec<_> = fs::read_dir(dir)
        .unwrap()
        .map(|file| file.unwrap().path())
        .filter(|path| path.extension().is_some_and(|extension| extension == "segment"))
        .collect();
    files.sort();
    files
}

/// Whether a block is there; if so it is right.
pub fn has(store: &DiskStore, number: u64, data_key: &DataKey, length: usize) -> bool {
    let mut into = vec![0xAA; length];
    match store.get(&key(number), data_key, &mut into) {
        Ok(()) => {
            assert_eq!(into, block(number, length), "block {number} has wrong bytes");
            true
        }
        Err(_) => {
            assert!(into.iter().all(|byte| *byte == 0xAA), "a miss wrote");
            false
        }
    }
}
