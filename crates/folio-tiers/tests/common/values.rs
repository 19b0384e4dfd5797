//! Values of a server that answers anything, and what must hold of who reads them all the same. Also what `fuzz/fuzz_targets/remote_values.rs`
//! runs.

use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use folio_kv::BlockHashes;
use folio_tiers::remote::{Fault, Name, ObjectLimits, Objects, RemoteStore};
use folio_tiers::{Device, Store, WallClock};

use super::LAYOUT;
use super::device::{BLOCK_BYTES, compute, contents, device, filled, load_order, prompt, store_order};

/// A header and a block of group 0.
pub const RECORD: usize = 192 + BLOCK_BYTES;
const BLOCKS: u32 = 8;
/// Blocks of group 0, and those that a window reads behind them.
pub const ALL: usize = BLOCKS as usize + 2;

#[derive(Default)]
struct Shelf {
    /// In the order in which they were stored.
    values: Mutex<Vec<(Name, Vec<u8>)>>,
    /// Bytes behind each answer that nobody asked for.
    more: AtomicUsize,
    /// Names that it says more, or less, of than it was asked.
    names: AtomicUsize,
}

/// See the module documentation.
#[derive(Default)]
pub struct Values(Arc<Shelf>);

impl Objects for Shelf {
    fn name(&self) -> &'static str {
        "shelf"
    }

    fn server(&self) -> String {
        "here".into()
    }

    fn limits(&self) -> ObjectLimits {
        let limit = Duration::from_secs(5);
        ObjectLimits {
            value_bytes: 4 * RECORD + 100,
            value_bytes_max: 1 << 20,
            asked_at_once: 8,
            find: limit,
            carry: limit,
        }
    }

    fn exist(&self, names: &[Name], _: Duration) -> Result<Vec<bool>, Fault> {
        let values = self.values.lock().unwrap();
        let is_there = |name: &Name| values.iter().any(|(known, _)| known == name);
        let mut there: Vec<bool> = names.iter().map(is_there).collect();
        match self.names.load(Relaxed) {
            0 => {}
            more if more.is_multiple_of(2) => there.resize(there.len() + more, true),
            less => there.truncate(there.len().saturating_sub(less)),
        }
        Ok(there)
    }

    fn get(&self, name: &Name, range: Range<usize>, _: Duration) -> Result<Option<Vec<u8>>, Fault> {
        let values = self.values.lock().unwrap();
        let Some((_, value)) = values.iter().find(|(known, _)| known == name) else { return Ok(None) };
        let mut answer = value[range.start.min(value.len())..range.end.min(value.len())].to_vec();
        answer.resize(answer.len() + self.more.load(Relaxed), 0xAA);
        Ok(Some(answer))
    }

    fn put(&self, name: &Name, value: &[u8], replace: bool, _: Duration) -> Result<(), Fault> {
        let mut values = self.values.lock().unwrap();
        match values.iter_mut().find(|(known, _)| known == name) {
            Some((_, known)) if replace => *known = value.to_vec(),
            Some(_) => {}
            None => values.push((*name, value.to_vec())),
        }
        Ok(())
    }

    fn ping(&self, _: Duration) -> Result<(), Fault> {
        Ok(())
    }
}

fn hashes() -> BlockHashes {
    prompt(1, 7, BLOCKS)
}

fn small() -> Device {
    device(BLOCKS, &[8])
}

impl Values {
    /// What an engine stored: two values of four blocks, and one of what a window reads.
    pub fn written() -> Self {
        let values = Self::default();
        let engine = values.engine();
        values.store(&engine);
        values
    }

    /// Who reads and writes them.
    pub fn engine(&self) -> Arc<RemoteStore> {
        RemoteStore::new(self.0.clone(), LAYOUT, None, WallClock::default()).expect("a thread for it")
    }

    pub fn copy(&self) -> Self {
        let values = Mutex::new(self.0.values.lock().unwrap().clone());
        Self(Arc::new(Shelf { values, ..Shelf::default() }))
    }

    pub fn values(&self) -> usize {
        self.0.values.lock().unwrap().len()
    }

    pub fn value(&self, at: usize) -> Vec<u8> {
        self.0.values.lock().unwrap()[at].1.clone()
    }

    pub fn set(&self, at: usize, value: Vec<u8>) {
        self.0.values.lock().unwrap()[at].1 = value;
    }

    fn store(&self, engine: &RemoteStore) {
        let (device, hashes) = (small(), hashes());
        let contents = contents(&device, &hashes, 0, BLOCKS);
        compute(&device, &contents);
        engine.store(&device, &store_order(&hashes, contents), &|| true, &mut Vec::new());
    }

    /// How many blocks come into memory that held nothing, each of which is right. `true`: all that were ordered.
    pub fn load(&self, engine: &RemoteStore) -> (usize, bool) {
        let (device, hashes) = (small(), hashes());
        let contents = contents(&device, &hashes, 0, BLOCKS);
        let done = engine.load(&device, &load_order(&hashes, contents.clone()), &mut Vec::new());
        let filled = filled(&device, &contents);
        assert!(filled >= done.blocks, "{done:?}, and {filled} blocks came");
        (filled, done.left == 0)
    }

    /// Does what `orders` say, five bytes each: to which value, what, where and how much.
    pub fn spoil(&self, orders: &[u8]) {
        for order in orders.chunks_exact(5) {
            let mut values = self.0.values.lock().unwrap();
            if values.is_empty() {
                return;
            }
            let (one, other) = (usize::from(order[0]) % values.len(), usize::from(order[4]) % values.len());
            let place = usize::from(u16::from_le_bytes([order[2], order[3]]));
            let other_value = values[other].1.clone();
            let value = &mut values[one].1;
            let at = place.min(value.len().saturating_sub(1));
            let end = (at + usize::from(order[4]) * 8 + 1).min(value.len());
            match order[1] % 10 {
                0 => value.truncate(at),
                1 if !value.is_empty() => value[at] ^= 1 << (order[4] % 8),
                2 => value[at..end].fill(0),
                3 => {
                    for (byte, at) in value[at..end].iter_mut().zip(0usize..) {
                        *byte = (at as u8 ^ order[4]).wrapping_mul(167);
                    }
                }
                4 => {
                    let from = other_value.get(at..end.min(other_value.len())).unwrap_or_default();
                    value[at..at + from.len()].copy_from_slice(from);
                }
                5 => *value = other_value,
                6 => drop(values.remove(one)),
                7 => value.resize(value.len() + usize::from(order[4]), order[3]),
                8 => self.0.more.store(usize::from(order[4]) + 1, Relaxed),
                _ => self.0.names.store(usize::from(order[4]) + 1, Relaxed),
            }
        }
    }

    /// What is found and comes is right, and what is wrong is written over once the server answers what it was asked. How many blocks came.
    pub fn check(&self) -> usize {
        let engine = self.engine();
        for range in engine.find(&small(), &hashes(), BLOCKS) {
            assert!(range.start < range.end && range.end <= BLOCKS, "{range:?}");
        }
        let (came, _) = self.load(&engine);
        self.0.more.store(0, Relaxed);
        self.0.names.store(0, Relaxed);
        // One value a round shows to be wrong, and is computed and stored again.
        for _ in 0..4 {
            self.store(&engine);
            if self.load(&engine) == (ALL, true) {
                return came;
            }
        }
        panic!("what was wrong is not written over");
    }
}
