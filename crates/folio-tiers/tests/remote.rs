//! A store behind a server: what one engine stores another finds and loads, with few questions, and whatever the server does, no wrong
//! byte reaches the device and nobody waits.

mod common;

use std::collections::HashMap;
use std::ops::Range;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use common::device::{
    BLOCK_BYTES, BLOCK_TOKENS, compute, contents, device, filled, load_order, prompt, root, store_order,
};
use folio_kv::BlockHashes;
use folio_tiers::remote::{Fault, Name, ObjectLimits, Objects, RemoteStore};
use folio_tiers::{Carried, Device, Store, WallClock};

const LAYOUT: [u8; 32] = [9; 32];
/// Of four blocks.
const RECORD: usize = 192 + BLOCK_BYTES;

/// A server in memory.
#[derive(Default)]
struct Shelf {
    values: Mutex<HashMap<Name, Vec<u8>>>,
    questions: AtomicUsize,
    names: AtomicUsize,
    puts: AtomicUsize,
    /// 1: it does not answer; 2: it refuses; 3: it is gone.
    how: AtomicU32,
    pings: AtomicUsize,
    /// Questions at this moment, the most of them so far, and how long each takes.
    now: AtomicUsize,
    most: AtomicUsize,
    takes_ms: AtomicUsize,
}

impl Shelf {
    fn asked(&self) -> Result<(), Fault> {
        self.questions.fetch_add(1, SeqCst);
        match self.how.load(SeqCst) {
            1 => Err(Fault::Late),
            2 => Err(Fault::Refused("it is full".into())),
            3 => Err(Fault::Broken("it is gone".into())),
            _ => Ok(()),
        }
    }

    fn change(&self, change: impl FnMut(&Name, &mut Vec<u8>)) {
        let mut change = change;
        self.values.lock().unwrap().iter_mut().for_each(|(name, value)| change(name, value));
    }
}

impl Objects for Shelf {
    fn name(&self) -> &'static str {
        "shelf"
    }
    fn server(&self) -> String {
        "a shelf".into()
    }
    fn limits(&self) -> ObjectLimits {
        let second = Duration::from_secs(1);
        ObjectLimits {
            value_bytes: 4 * RECORD + 100,
            value_bytes_max: 1 << 20,
            asked_at_once: 16,
            find: second,
            carry: second,
        }
    }
    fn exist(&self, names: &[Name], _: Duration) -> Result<Vec<bool>, Fault> {
        self.asked()?;
        self.names.fetch_add(names.len(), SeqCst);
        self.most.fetch_max(self.now.fetch_add(1, SeqCst) + 1, SeqCst);
        std::thread::sleep(Duration::from_millis(self.takes_ms.load(SeqCst) as u64));
        self.now.fetch_sub(1, SeqCst);
        let values = self.values.lock().unwrap();
        Ok(names.iter().map(|name| values.contains_key(name)).collect())
    }
    fn get(&self, name: &Name, range: Range<usize>, _: Duration) -> Result<Option<Vec<u8>>, Fault> {
        self.asked()?;
        let values = self.values.lock().unwrap();
        Ok(values
            .get(name)
            .map(|value| value[range.start.min(value.len())..range.end.min(value.len())].to_vec()))
    }
    fn put(&self, name: &Name, value: &[u8], replace: bool, _: Duration) -> Result<(), Fault> {
        self.asked()?;
        self.puts.fetch_add(1, SeqCst);
        let mut values = self.values.lock().unwrap();
        match replace {
            true => drop(values.insert(*name, value.to_vec())),
            false => drop(values.entry(*name).or_insert_with(|| value.to_vec())),
        }
        Ok(())
    }
    fn ping(&self, _: Duration) -> Result<(), Fault> {
        self.pings.fetch_add(1, SeqCst);
        match self.how.load(SeqCst) {
            0 => Ok(()),
            _ => Err(Fault::Late),
        }
    }
}

fn engine(shelf: &Arc<Shelf>) -> Arc<RemoteStore> {
    RemoteStore::new(shelf.clone(), LAYOUT, None, WallClock::default()).unwrap()
}

fn store_all(store: &RemoteStore, hashes: &BlockHashes, to: u32, windows: &[u32]) -> Carried {
    let device = device(to, windows);
    let own = hashes.root().declared_blocks();
    let contents = contents(&device, hashes, own, to);
    compute(&device, &contents);
    store.store(&device, &store_order(hashes, contents), &|| true, &mut Vec::new())
}

/// What a load of `from..to` fills, on a device that held nothing.
fn load(store: &RemoteStore, hashes: &BlockHashes, from: u32, to: u32, windows: &[u32]) -> (Carried, usize) {
    let device = device(to, windows);
    let contents = contents(&device, hashes, from, to);
    let done = store.load(&device, &load_order(hashes, contents.clone()), &mut Vec::new());
    let filled = filled(&device, &contents);
    assert!(filled >= done.blocks);
    (done, filled)
}

fn small() -> Device {
    device(1, &[])
}

fn misses(store: &RemoteStore, reason: &str) -> u64 {
    let misses = store.stats().misses;
    misses.iter().find(|(name, _)| *name == reason).expect("a reason").1
}

#[test]
fn what_one_engine_stores_another_finds_and_loads() {
    let shelf = Arc::new(Shelf::default());
    let (one, other) = (engine(&shelf), engine(&shelf));
    let hashes = prompt(1, 7, 42);
    assert_eq!(one.chunk_blocks(&small()), 4);
    assert_eq!(one.find(&small(), &hashes, 41), []);
    let stored = store_all(&one, &hashes, 42, &[]);
    assert_eq!(stored, Carried { blocks: 40, bytes: 40 * BLOCK_BYTES, left: 0 }, "whole chunks");
    assert_eq!(shelf.values.lock().unwrap().len(), 10);
    let (written, payload) = (one.stats().bytes_written, one.stats().payload_written);
    assert_eq!((written, payload), (40 * (BLOCK_BYTES + 192) as u64, 40 * BLOCK_BYTES as u64));
    assert_eq!(one.find(&small(), &hashes, 41).first(), Some(&(0..40)));
    assert_eq!(other.find(&small(), &hashes, 41).first(), Some(&(0..40)));
    assert_eq!(other.find(&small(), &hashes, 38).first(), Some(&(0..36)), "no further than it may be loaded");
    for (from, to) in [(0, 40), (3, 40), (17, 20), (39, 40)] {
        let (done, filled) = load(&other, &hashes, from, to, &[]);
        assert_eq!((done.left, filled), (0, (to - from) as usize), "{from}..{to}");
    }
    // It is there: nothing is carried again.
    let puts = shelf.puts.load(SeqCst);
    assert_eq!(store_all(&other, &hashes, 40, &[]).blocks, 0);
    assert_eq!(shelf.puts.load(SeqCst), puts);
    // Another tenant, with the same tokens, finds nothing, and so does whoever computes otherwise.
    assert_eq!(other.find(&small(), &prompt(2, 7, 42), 41), []);
    let otherwise = RemoteStore::new(shelf.clone(), [8; 32], None, WallClock::default()).unwrap();
    assert_eq!(otherwise.find(&small(), &hashes, 41), []);
}

/// Who did not look a prompt up, for a nearer tier had it, asks before it carries what is there.
#[test]
fn what_is_there_is_not_carried_again_by_who_did_not_look_it_up() {
    let shelf = Arc::new(Shelf::default());
    let hashes = prompt(1, 7, 42);
    store_all(&engine(&shelf), &hashes, 24, &[]);
    let (puts, questions) = (shelf.puts.load(SeqCst), shelf.questions.load(SeqCst));
    let stored = store_all(&engine(&shelf), &hashes, 42, &[]);
    assert_eq!((stored.blocks, shelf.puts.load(SeqCst) - puts), (16, 4), "what it lacks");
    assert!(shelf.questions.load(SeqCst) - questions <= 4 + 3, "and few questions");
}

#[test]
fn a_long_prompt_takes_few_questions() {
    let shelf = Arc::new(Shelf::default());
    let one = engine(&shelf);
    for there in [0u32, 4, 400, 3996, 8000, 12000] {
        let hashes = prompt(1, there, 12000);
        store_all(&one, &hashes, there, &[]);
        let other = engine(&shelf);
        let (questions, names) = (shelf.questions.load(SeqCst), shelf.names.load(SeqCst));
        let found = other.find(&small(), &hashes, 12000);
        assert_eq!(found.first().map_or(0, |range| range.end), there);
        let (questions, names) = (shelf.questions.load(SeqCst) - questions, shelf.names.load(SeqCst) - names);
        assert!(questions <= 4 && names <= 64, "{there}: {questions} questions for {names} names");
        let before = shelf.questions.load(SeqCst);
        assert_eq!(other.find(&small(), &hashes, there), found, "it remembers");
        assert_eq!(shelf.questions.load(SeqCst), before);
    }
}

/// A server forgets what it wants.
#[test]
fn what_was_forgotten_in_between_is_computed_and_stored_again() {
    let shelf = Arc::new(Shelf::default());
    let (one, other) = (engine(&shelf), engine(&shelf));
    let hashes = prompt(1, 7, 40);
    store_all(&one, &hashes, 40, &[]);
    assert_eq!(other.find(&small(), &hashes, 40).first(), Some(&(0..40)));
    let third = {
        // By what a store of so much less lacks.
        let few = Arc::new(Shelf::default());
        store_all(&engine(&few), &hashes, 8, &[]);
        let more = Arc::new(Shelf::default());
        store_all(&engine(&more), &hashes, 12, &[]);
        let few = few.values.lock().unwrap();
        *more.values.lock().unwrap().keys().find(|name| !few.contains_key(name)).unwrap()
    };
    shelf.values.lock().unwrap().remove(&third).expect("the third chunk");
    let (done, filled) = load(&other, &hashes, 0, 40, &[]);
    assert_eq!((done.blocks, done.left, filled), (8, 32, 8));
    assert_eq!(misses(&other, "absent"), 4);
    assert_eq!(other.find(&small(), &hashes, 40).first(), Some(&(0..8)));
    assert_eq!(store_all(&other, &hashes, 40, &[]).blocks, 4, "what is missing");
    assert_eq!(other.find(&small(), &hashes, 40).first(), Some(&(0..40)));
    assert_eq!(load(&other, &hashes, 0, 40, &[]).1, 40);
}

/// Bits, lengths, places, tenants, layouts: whatever is done to values, what comes is right or a miss, and it is written over.
#[test]
fn a_store_that_was_tampered_with_gives_misses() {
    type Damage = Box<dyn Fn(&mut HashMap<Name, Vec<u8>>)>;
    let each =
        |change: fn(&mut Vec<u8>)| -> Damage { Box::new(move |values| values.values_mut().for_each(change)) };
    let mut damages: Vec<(&str, Damage)> = vec![
        ("empty", each(Vec::clear)),
        ("one byte", each(|value| value.truncate(1))),
        ("a byte short", each(|value| value.truncate(4 * RECORD - 1))),
        ("a record short", each(|value| value.truncate(3 * RECORD))),
        ("zeros", each(|value| value.fill(0))),
        (
            "noise",
            each(|value| value.iter_mut().zip(0u32..).for_each(|(byte, at)| *byte = ((at * 31) >> 3) as u8)),
        ),
        ("records turned round", each(|value| value.rotate_left(RECORD))),
        (
            "another version",
            each(|value| {
                value[8] = 3;
                let crc = crc32c::crc32c(&value[..188]);
                value[188..192].copy_from_slice(&crc.to_le_bytes());
            }),
        ),
        (
            "values exchanged",
            Box::new(|values| {
                let names: Vec<Name> = values.keys().copied().collect();
                let first = values[&names[0]].clone();
                for pair in names.windows(2) {
                    let next = values[&pair[1]].clone();
                    values.insert(pair[0], next);
                }
                values.insert(names[names.len() - 1], first);
            }),
        ),
    ];
    for at in (0..RECORD).step_by(7).chain([RECORD * 2 + 5, RECORD * 4 - 1]) {
        let flip = move |values: &mut HashMap<Name, Vec<u8>>| {
            values.values_mut().for_each(|value| value[at] ^= 1 << (at % 8));
        };
        damages.push(("a bit", Box::new(flip)));
    }
    for (what, damage) in damages {
        let shelf = Arc::new(Shelf::default());
        let (one, other) = (engine(&shelf), engine(&shelf));
        let hashes = prompt(1, 7, 8);
        store_all(&one, &hashes, 8, &[]);
        damage(&mut shelf.values.lock().unwrap());
        assert_eq!(other.find(&small(), &hashes, 8).first(), Some(&(0..8)), "{what}");
        let (done, _) = load(&other, &hashes, 0, 8, &[]);
        assert!(done.left > 0, "{what}");
        let wrong: u64 = other.stats().misses.iter().map(|(_, n)| n).sum();
        assert!(wrong > 0, "{what}");
        assert_eq!(other.find(&small(), &hashes, 8), [], "{what}: it is not looked at again");
        store_all(&other, &hashes, 8, &[]);
        let third = engine(&shelf);
        let (done, filled) = load(&third, &hashes, 0, 4, &[]);
        assert_eq!((done.left, filled), (0, 4), "{what}: what is wrong is written over");
    }
}

/// Values of another tenant, or another layout, under the names that are asked for.
#[test]
fn a_store_that_was_replayed_gives_misses() {
    for (tenant, layout) in [(2, LAYOUT), (1, [8; 32])] {
        let (shelf, other) = (Arc::new(Shelf::default()), Arc::new(Shelf::default()));
        let hashes = prompt(1, 7, 4);
        store_all(&engine(&shelf), &hashes, 4, &[]);
        let strange = RemoteStore::new(other.clone(), layout, None, WallClock::default()).unwrap();
        store_all(&strange, &prompt(tenant, 7, 4), 4, &[]);
        let value = other.values.lock().unwrap().values().next().unwrap().clone();
        shelf.change(|_, own| *own = value.clone());
        let store = engine(&shelf);
        assert_eq!(store.find(&small(), &hashes, 4).first(), Some(&(0..4)));
        assert_eq!(load(&store, &hashes, 0, 4, &[]).1, 0);
    }
}

#[test]
fn windows_come_with_the_end_that_they_were_stored_for() {
    let shelf = Arc::new(Shelf::default());
    let windows = [22, 9];
    let (one, other) = (engine(&shelf), engine(&shelf));
    let hashes = prompt(1, 7, 40);
    let stored = store_all(&one, &hashes, 24, &windows);
    assert_eq!(stored.left, 0);
    assert!(stored.blocks > 24);
    let device = device(1, &windows);
    assert_eq!(other.find(&device, &hashes, 40).first(), Some(&(0..24)));
    assert_eq!(other.find(&device, &hashes, 20), [], "no window ends there");
    for from in [0, 19, 23] {
        let (done, filled) = load(&other, &hashes, from, 24, &windows);
        assert_eq!((done.left, filled), (0, done.blocks), "from {from}");
    }
    // Without one value of a window its end is none.
    let names: Vec<Name> = shelf.values.lock().unwrap().keys().copied().collect();
    for name in names {
        let value = shelf.values.lock().unwrap().remove(&name).unwrap();
        let third = engine(&shelf);
        for _ in 0..3 {
            if let Some(found) = third.find(&device, &hashes, 40).pop() {
                assert!(load(&third, &hashes, 0, found.end, &windows).0.left > 0);
            }
        }
        assert_eq!(third.find(&device, &hashes, 40), [], "it is not tried for ever");
        shelf.values.lock().unwrap().insert(name, value);
    }
}

#[test]
fn behind_what_an_operator_declared() {
    let shelf = Arc::new(Shelf::default());
    let (one, other) = (engine(&shelf), engine(&shelf));
    let tokens: Vec<u32> = (0..40 * BLOCK_TOKENS).collect();
    // Six blocks are the operator's, so the second chunk has two.
    let root = root(1).below(&root(9), &tokens[..(6 * BLOCK_TOKENS) as usize], BLOCK_TOKENS);
    let hashes = BlockHashes::new(&root, &tokens, BLOCK_TOKENS);
    assert_eq!(store_all(&one, &hashes, 40, &[]).blocks, 34);
    assert_eq!(other.find(&small(), &hashes, 40).first(), Some(&(6..40)));
    for from in [6, 7, 8, 20] {
        assert_eq!(load(&other, &hashes, from, 40, &[]).1, 40 - from as usize);
    }
}

/// What is copied after the lease is never stored.
#[test]
fn what_is_not_held_any_more_is_not_stored() {
    let shelf = Arc::new(Shelf::default());
    let store = engine(&shelf);
    let (device, hashes) = (device(8, &[]), prompt(1, 7, 8));
    let contents = contents(&device, &hashes, 0, 8);
    let asked = AtomicUsize::new(0);
    let holds = || asked.fetch_add(1, SeqCst) == 0;
    let done = store.store(&device, &store_order(&hashes, contents), &holds, &mut Vec::new());
    assert_eq!((done.blocks, done.left, shelf.values.lock().unwrap().len()), (4, 4, 1));
}

#[test]
fn a_server_that_does_not_answer_is_not_asked_until_it_does() {
    for how in [1, 3] {
        let shelf = Arc::new(Shelf::default());
        let store = engine(&shelf);
        let hashes = prompt(1, 7, 8);
        store_all(&store, &hashes, 8, &[]);
        shelf.how.store(how, SeqCst);
        for _ in 0..3 {
            assert!(store.stats().off.is_none());
            assert!(load(&store, &hashes, 0, 8, &[]).0.left > 0);
        }
        assert!(store.stats().off.is_some());
        let questions = shelf.questions.load(SeqCst);
        assert_eq!(store.find(&small(), &hashes, 8), [], "nothing is promised");
        assert_eq!(load(&store, &hashes, 0, 8, &[]).1, 0);
        assert_eq!(store_all(&store, &prompt(1, 8, 8), 8, &[]).left, 8);
        assert_eq!(shelf.questions.load(SeqCst), questions);
        assert_eq!(misses(&store, "off"), 4);
        shelf.how.store(0, SeqCst);
        let end = Instant::now() + Duration::from_secs(20);
        while store.stats().off.is_some() {
            assert!(Instant::now() < end, "it was not asked again");
            std::thread::sleep(Duration::from_millis(10));
        }
        assert_eq!(store.find(&small(), &hashes, 8).first(), Some(&(0..8)), "what was there is there");
        assert_eq!(load(&store, &hashes, 0, 8, &[]).1, 8);
        // It counts as back only after an answer to a real question.
        assert!(shelf.pings.load(SeqCst) > 0);
    }
}

/// That it says no is an answer: what it has is read on.
#[test]
fn a_server_that_is_full_is_read() {
    let shelf = Arc::new(Shelf::default());
    let store = engine(&shelf);
    let hashes = prompt(1, 7, 8);
    store_all(&store, &hashes, 8, &[]);
    shelf.how.store(2, SeqCst);
    for seed in 0..9 {
        assert_eq!(store_all(&store, &prompt(1, 100 + seed, 8), 8, &[]).left, 8);
    }
    assert_eq!(store.stats().off, None);
    shelf.how.store(0, SeqCst);
    assert_eq!(load(&store, &hashes, 0, 8, &[]).1, 8);
}

/// From the start: it is served without, and later with it.
#[test]
fn a_server_that_was_gone_at_the_start_is_found_later() {
    let shelf = Arc::new(Shelf::default());
    shelf.how.store(3, SeqCst);
    let store = RemoteStore::new(
        shelf.clone(),
        LAYOUT,
        Some(Fault::Broken("nobody is there".into())),
        WallClock::default(),
    )
    .unwrap();
    assert_eq!(store.stats().off.as_deref(), Some("nobody is there"));
    let hashes = prompt(1, 7, 8);
    assert_eq!(store_all(&store, &hashes, 8, &[]).left, 8);
    assert_eq!(shelf.questions.load(SeqCst), 0);
    shelf.how.store(0, SeqCst);
    let end = Instant::now() + Duration::from_secs(20);
    while store.stats().off.is_some() {
        assert!(Instant::now() < end);
        std::thread::sleep(Duration::from_millis(10));
    }
    assert_eq!(store_all(&store, &hashes, 8, &[]).left, 0);
}

#[test]
fn look_ups_at_once_are_bounded() {
    let shelf = Arc::new(Shelf::default());
    let store = engine(&shelf);
    shelf.takes_ms.store(300, SeqCst);
    std::thread::scope(|scope| {
        for seed in 0..80 {
            let store = &store;
            scope.spawn(move || assert_eq!(store.find(&small(), &prompt(1, seed, 8), 8), []));
        }
    });
    assert!((2..=32).contains(&shelf.most.load(SeqCst)), "{}", shelf.most.load(SeqCst));
    shelf.takes_ms.store(0, SeqCst);
    store_all(&store, &prompt(1, 1, 8), 8, &[]);
    assert_eq!(engine(&shelf).find(&small(), &prompt(1, 1, 8), 8).first(), Some(&(0..8)));
}
