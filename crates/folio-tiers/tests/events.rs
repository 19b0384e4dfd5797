//! What tiers tell of what they hold: each change once and in order, and all of it again where it is asked for, to who has the keys.

mod common;

use std::collections::BTreeMap;
use std::fs;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use common::device::{compute, contents, device, prompt, root, store_order, tokens};
use common::{config, open, segments};
use folio_engine::{EventFeed, Medium, Owner, TierBatch, TierEvent, short_name};
use folio_kv::{BlockHashes, TenantId};
use folio_tiers::{Device, DiskStore, HostStore, OpenError, Store, WallClock};

/// What a listener knows: (parent, tokens) by short name.
type Held = BTreeMap<u64, (Option<u64>, Vec<u32>)>;

struct Listener {
    feed: Arc<EventFeed>,
    held: Held,
}

impl Listener {
    fn new(most: usize, store: Arc<impl Store>) -> Self {
        let feed = Arc::new(EventFeed::new(most, 4));
        store.listen(&feed);
        Self { feed, held: Held::new() }
    }

    /// Whether events were lost.
    fn follow(&mut self) -> bool {
        let mut batch = TierBatch::default();
        self.feed.take(&mut self.feed.empty_batch(), &mut batch, Duration::ZERO);
        for event in batch.events {
            match event {
                TierEvent::Stored { hash, parent, tokens, .. } => {
                    let parent = parent.map(|parent| short_name(&parent));
                    let known = self.held.insert(short_name(&hash), (parent, tokens.into()));
                    assert_eq!(known, None, "a block is told twice");
                }
                // Of groups above 0 nothing was told.
                TierEvent::Removed { name, .. } => drop(self.held.remove(&name)),
            }
        }
        !batch.lost.is_empty()
    }

    fn resident(&self, owners: &[Owner]) -> Held {
        let mut held = Held::new();
        for event in self.feed.resident(owners) {
            let TierEvent::Stored { hash, parent, tokens, .. } = event else { panic!("{event:?}") };
            held.insert(short_name(&hash), (parent.map(|parent| short_name(&parent)), tokens.into()));
        }
        held
    }
}

fn owners(tenants: &[u8]) -> Vec<Owner> {
    tenants.iter().map(|tenant| (TenantId((*tenant).into()), root(*tenant).data_key())).collect()
}

fn store(store: &impl Store, device: &Device, hashes: &BlockHashes, from: u32, to: u32) {
    let contents = contents(device, hashes, from, to);
    compute(device, &contents);
    store.store(device, &store_order(hashes, contents), &|| true, &mut Vec::new());
}

fn expected(hashes: &BlockHashes) -> Held {
    let names: Vec<u64> = hashes.iter().map(short_name).collect();
    let before = |at: usize| at.checked_sub(1).map(|at| names[at]);
    (0..names.len()).map(|at| (names[at], (before(at), tokens(at as u32).to_vec()))).collect()
}

/// Long enough that blocks go for others.
fn run(store_of: &Arc<impl Store>, device: &Device) -> Listener {
    let mut listener = Listener::new(100_000, store_of.clone());
    for seed in 0..60 {
        let hashes = prompt(1 + (seed % 2) as u8, seed % 40, 24);
        store(&**store_of, device, &hashes, 0, 24);
        assert!(!listener.follow());
        assert_eq!(listener.held, listener.resident(&owners(&[1, 2])));
    }
    let one = listener.resident(&owners(&[2]));
    assert!(!one.is_empty() && one.len() < listener.held.len(), "one tenant's alone");
    assert_eq!(listener.resident(&owners(&[3])), Held::new());
    listener
}

#[test]
fn what_is_told_is_what_is_held() {
    let device = device(24, &[8]);
    let host = HostStore::new(300_000, WallClock::default());
    run(&host, &device);
    assert!(host.stats().blocks_evicted > 100);
    for seal in [true, false] {
        let dir = tempfile::tempdir().unwrap();
        let disk = open(&folio_tiers::DiskConfig { seal, ..config(dir.path()) });
        run(&disk, &device);
        assert!(Store::stats(&*disk).blocks_evicted > 100);
    }
}

#[test]
fn a_restart_finds_what_was_told_with_its_tokens() {
    let (dir, device) = (tempfile::tempdir().unwrap(), device(24, &[8]));
    let disk = open(&config(dir.path()));
    let (own, other) = (prompt(1, 5, 24), prompt(2, 6, 20));
    store(&*disk, &device, &own, 0, 24);
    store(&*disk, &device, &other, 0, 20);
    let tell_all = |disk: &Arc<DiskStore>| {
        let mut listener = Listener::new(4000, disk.clone());
        listener.feed.tell_anew(Medium::Disk, owners(&[1])).unwrap();
        let end = std::time::Instant::now() + Duration::from_secs(30);
        while listener.held.len() < 24 && std::time::Instant::now() < end {
            listener.follow();
        }
        listener.held
    };
    // As a process leaves it that is killed, and one that ends.
    let killed = tempfile::tempdir().unwrap();
    common::copy(dir.path(), killed.path());
    let mut config_of = config(killed.path());
    config_of.dir = killed.path().to_owned();
    assert_eq!(tell_all(&open(&config_of)), expected(&own));
    drop(disk);
    let disk = open(&config(dir.path()));
    assert_eq!(tell_all(&disk), expected(&own), "and not another tenant's");
    drop(disk);
    // The thread that told it may still have a hand on it.
    let end = std::time::Instant::now() + Duration::from_secs(30);
    loop {
        match DiskStore::open(config(dir.path())) {
            Ok(store) => break store.wait_indexed(),
            Err(OpenError::InUse { .. }) => assert!(std::time::Instant::now() < end, "it is not let go of"),
            Err(error) => panic!("{error}"),
        }
    }
    // A bit of a lineage: that block is not told, and still served. Blocks of 600 bytes lie in a page with theirs.
    let path = segments(dir.path()).remove(0);
    let mut bytes = fs::read(&path).unwrap();
    bytes[4096 + 192 + 600 + 3] ^= 1;
    fs::write(&path, bytes).unwrap();
    let disk = open(&config(dir.path()));
    let listener = Listener::new(4000, disk.clone());
    let told = listener.resident(&owners(&[1]));
    assert_eq!(told.len(), 23);
    assert!(told.iter().all(|(name, what)| expected(&own).get(name) == Some(what)));
    assert_eq!(disk.find(&device, &own, 24), [Range { start: 0, end: 24 }]);
}

#[test]
fn what_a_listener_was_late_for_is_told_anew() {
    let device = device(24, &[]);
    let host = HostStore::new(300_000, WallClock::default());
    let mut listener = Listener::new(30, host.clone());
    for seed in 0..10 {
        store(&*host, &device, &prompt(1, seed, 24), 0, 24);
    }
    assert!(listener.follow(), "240 do not fit into 30");
    listener.held.clear();
    listener.feed.tell_anew(Medium::Host, owners(&[1])).unwrap();
    let resident = listener.resident(&owners(&[1]));
    assert_eq!(resident.len(), 240);
    let end = std::time::Instant::now() + Duration::from_secs(30);
    while listener.held != resident && std::time::Instant::now() < end {
        assert!(!listener.follow(), "what is told anew waits for room");
    }
    assert_eq!(listener.held, resident);
    // Who listens no more keeps no thread.
    listener.feed.close();
    listener.feed.tell_anew(Medium::Host, owners(&[1])).unwrap();
}
