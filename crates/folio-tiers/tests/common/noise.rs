//! A folder in memory that somebody did anything to, and what must hold of it all the same. Also what `fuzz/fuzz_targets/disk_segments.rs` runs.

use std::collections::BTreeMap;
use std::io::{self, ErrorKind};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use folio_engine::{Resident, Taken, TierEvent};
use folio_kv::{BlockHash, TenantId};
use folio_tiers::io::{File, Folder, Listed};
use folio_tiers::{About, BlockKey, Class, DataKey, DiskConfig, DiskStore, Store, Stored};

const LAYOUT: [u8; 32] = [7; 32];
const BLOCKS: u8 = 40;
const BYTES: u64 = 1 << 20;

type Bytes = Arc<Mutex<Vec<u8>>>;

/// Files in memory.
#[derive(Clone, Default)]
pub struct Files(Arc<Mutex<BTreeMap<String, Bytes>>>);

struct Open(Bytes);

impl Folder for Files {
    fn list(&self) -> io::Result<Vec<Listed>> {
        let listed = |(name, bytes): (&String, &Bytes)| {
            let bytes = bytes.lock().unwrap().len() as u64;
            Listed { name: name.clone(), bytes, age: Duration::ZERO }
        };
        Ok(self.0.lock().unwrap().iter().map(listed).collect())
    }

    fn open(&self, name: &str) -> io::Result<Box<dyn File>> {
        let file = self.0.lock().unwrap().get(name).cloned();
        Ok(Box::new(Open(file.ok_or_else(|| io::Error::from(ErrorKind::NotFound))?)))
    }

    fn create(&self, name: &str, bytes: u64) -> io::Result<Box<dyn File>> {
        let file = Bytes::new(Mutex::new(vec![0; bytes as usize]));
        match self.0.lock().unwrap().insert(name.to_owned(), file.clone()) {
            Some(_) => Err(ErrorKind::AlreadyExists.into()),
            None => Ok(Box::new(Open(file))),
        }
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        self.0.lock().unwrap().remove(name).map(drop).ok_or_else(|| ErrorKind::NotFound.into())
    }

    fn is_direct(&self) -> bool {
        true
    }
}

impl File for Open {
    fn bytes(&self) -> io::Result<u64> {
        Ok(self.0.lock().unwrap().len() as u64)
    }

    fn read(&self, into: &mut [u8], at: u64) -> io::Result<usize> {
        let bytes = self.0.lock().unwrap();
        let rest = bytes.get(at as usize..).unwrap_or_default();
        let read = rest.len().min(into.len());
        into[..read].copy_from_slice(&rest[..read]);
        Ok(read)
    }

    fn write(&self, from: &[u8], at: u64) -> io::Result<usize> {
        let mut bytes = self.0.lock().unwrap();
        let end = at as usize + from.len();
        if bytes.len() < end {
            bytes.resize(end, 0);
        }
        bytes[at as usize..end].copy_from_slice(from);
        Ok(from.len())
    }

    fn cut(&self, bytes: u64) -> io::Result<()> {
        self.0.lock().unwrap().resize(bytes as usize, 0);
        Ok(())
    }
}

fn key(number: u8) -> BlockKey {
    BlockKey { hash: BlockHash([number + 1; 32]), group: number % 2 }
}

fn block(number: u8) -> Vec<u8> {
    (0..300 + 200 * usize::from(number)).map(|at| (at as u8).wrapping_mul(37) ^ number).collect()
}

fn data_key() -> DataKey {
    DataKey::from([9; 32])
}

fn lineage(number: u8) -> (Option<BlockHash>, [u32; 4]) {
    (number.checked_sub(2).map(|before| key(before).hash), [u32::from(number); 4])
}

fn put(store: &DiskStore, number: u8) -> Stored {
    let (parent, tokens) = lineage(number);
    let tokens = if number.is_multiple_of(2) { &tokens[..] } else { &[] };
    let about = About { tenant: TenantId(1), parent, tokens, expires_s: None, class: Class::Ordinary };
    store.put(&key(number), &data_key(), &block(number), &about).expect("there is room")
}

fn open(files: &Files) -> Option<Arc<DiskStore>> {
    let mut config = DiskConfig::new("memory", BYTES, LAYOUT);
    config.segment_bytes = 64 << 10;
    // A directory of another version is refused.
    let store = DiskStore::open_in(config, Arc::new(files.clone())).ok()?;
    store.wait_indexed();
    Some(store)
}

/// Some segments with footers, and one without.
pub fn written() -> Files {
    let files = Files::default();
    let store = open(&files).expect("an empty folder");
    for number in 0..BLOCKS / 2 {
        put(&store, number);
    }
    drop(store);
    let store = open(&files).expect("its own folder");
    for number in BLOCKS / 2..BLOCKS {
        put(&store, number);
    }
    let left = files.copy();
    drop(store);
    left
}

impl Files {
    pub fn copy(&self) -> Self {
        let copy = |(name, bytes): (&String, &Bytes)| {
            (name.clone(), Bytes::new(Mutex::new(bytes.lock().unwrap().clone())))
        };
        Self(Arc::new(Mutex::new(self.0.lock().unwrap().iter().map(copy).collect())))
    }

    /// Does what `orders` say, six bytes each: to which file, what, where and how much.
    pub fn spoil(&self, orders: &[u8]) {
        let files: Vec<Bytes> = self.0.lock().unwrap().values().cloned().collect();
        for order in orders.chunks_exact(6) {
            let mut bytes = files[usize::from(order[0]) % files.len()].lock().unwrap();
            let place = usize::from(u16::from_le_bytes([order[2], order[3]]));
            // Anywhere, or in what is read of a page first.
            let at = if order[1] & 0x80 == 0 { place * 3 } else { place % 64 * 4096 + place / 64 % 512 };
            let much = usize::from(order[4]) * 16 + 1;
            let at = at.min(bytes.len().saturating_sub(1));
            let end = (at + much).min(bytes.len());
            match order[1] & 0x7 {
                0 => bytes.truncate(at),
                1 if !bytes.is_empty() => bytes[at] ^= 1 << (order[5] % 8),
                2 => bytes[at..end].fill(0),
                3 => {
                    for (byte, at) in bytes[at..end].iter_mut().zip(0usize..) {
                        *byte = (at as u8 ^ order[5]).wrapping_mul(167);
                    }
                }
                4 => {
                    let from = usize::from(order[5]) * 4096;
                    let copied: Vec<u8> = bytes.iter().skip(from).take(end - at).copied().collect();
                    bytes[at..at + copied.len()].copy_from_slice(&copied);
                }
                5 if bytes.len() < 1 << 18 => bytes.extend(std::iter::repeat_n(order[5], much)),
                6 => {
                    // A page for another.
                    let (one, other) = (at / 4096 * 4096, usize::from(order[5]) % 32 * 4096);
                    for at in 0..4096 {
                        if one.max(other) + at < bytes.len() {
                            bytes.swap(one + at, other + at);
                        }
                    }
                }
                _ => {}
            }
        }
    }

    /// It opens or is refused; what is served, and told, is what was stored; and it goes on. How many blocks are found.
    pub fn check(&self) -> u32 {
        let Some(store) = open(self) else { return 0 };
        let mut told = Vec::new();
        store.tell(&[(TenantId(1), [9; 32]), (TenantId(2), [8; 32])], &mut |event| {
            told.push(event);
            Taken::Yes
        });
        for event in told {
            let TierEvent::Stored { tenant, hash, parent, tokens, .. } = event else { panic!("{event:?}") };
            let (before, of) = lineage(hash.0[0] - 1);
            assert_eq!(
                (tenant, parent, &*tokens),
                (TenantId(1), before, &of[..]),
                "a lineage that was not stored"
            );
        }
        let mut found = 0;
        for number in 0..BLOCKS {
            let mut into = vec![0xAA; block(number).len()];
            match store.get(&key(number), &data_key(), &mut into) {
                Ok(()) => assert_eq!(into, block(number), "block {number} has wrong bytes"),
                Err(_) => assert!(into.iter().all(|byte| *byte == 0xAA), "a miss wrote"),
            }
            found += u32::from(into[0] != 0xAA);
        }
        assert!(
            store.get(&key(0), &DataKey::from([8; 32]), &mut vec![0; block(0).len()]).is_err(),
            "another's key"
        );
        for number in 0..BLOCKS {
            put(&store, number);
        }
        let stats = Store::stats(&*store);
        assert!(stats.bytes <= BYTES && stats.off.is_none(), "{stats:?}");
        drop(store);
        let store = open(self).expect("it was opened before");
        for number in BLOCKS - 4..BLOCKS {
            let mut into = vec![0; block(number).len()];
            store.get(&key(number), &data_key(), &mut into).expect("what was stored last");
            assert_eq!(into, block(number));
        }
        found
    }
}
