//! KV that was on a disk: what comes back from there has the bits it had, and what is damaged does not come back.

use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::Relaxed};

use folio_model::backend::KvFormat;
use folio_model::testing::FIXTURES;
use folio_tiers::io::{Directory, File, Folder, Listed};

use crate::harness::{Arrival, Oracle, Setup, World, batched, chunked, in_turn, prompt, whole};

const DISK: u64 = 64 << 20;

/// Lengths that end inside a block, at its end, and beyond every fixture's window.
fn arrivals(vocab: u32) -> [Arrival; 4] {
    [(60, 12), (32, 17), (129, 5), (7, 9)]
        .map(|(len, max_tokens)| Arrival::new(prompt(len as u64, len, vocab), max_tokens))
}

fn cached(lengths: &[Arrival]) -> Vec<u32> {
    // The last token is computed.
    lengths.iter().map(|arrival| (arrival.prompt.len() as u32 - 1) / 16 * 16).collect()
}

#[test]
fn after_a_disk() {
    for (number, fixture) in FIXTURES.iter().enumerate() {
        let folder = tempfile::tempdir().expect("a folder");
        let mut world = World::new(fixture, Setup::PLAIN, 64);
        let arrivals = arrivals(world.recorder.vocab());
        let oracle = Oracle::new(&mut world, &arrivals);
        world.keep_on_disk(folder.path(), DISK);
        oracle.check(&world.run(&batched(4), &arrivals), &format!("{fixture}, nothing is stored"));
        for (_, chunk) in [1, 24, 512].into_iter().enumerate().filter(|(at, _)| in_turn(number, *at)) {
            world.forget();
            let run = world.run(&chunked(chunk), &arrivals);
            let what = format!("{fixture}, from the disk, chunks of {chunk}");
            oracle.check(&run, &what);
            assert_eq!((run.cached, run.loads), (cached(&arrivals), vec![true; 3]), "{what}");
        }
        // Another process: its memory holds nothing, or anything.
        let mut again = World::new(fixture, Setup { threads: 1, ..Setup::PLAIN }, 64);
        drop(world);
        again.keep_on_disk(folder.path(), DISK);
        let run = again.run(&batched(4), &arrivals);
        oracle.check(&run, &format!("{fixture}, after a restart"));
        assert_eq!(run.cached, cached(&arrivals), "{fixture}, after a restart");
    }
}

#[test]
fn in_every_format_of_the_cache() {
    for fixture in ["llama3", "gemma3"] {
        for (kv, mixed) in KvFormat::ALL.into_iter().flat_map(|kv| [(kv, false), (kv, true)]) {
            let folder = tempfile::tempdir().expect("a folder");
            let mut world = World::new(fixture, Setup { kv, mixed, ..Setup::PLAIN }, 64);
            let arrivals = arrivals(world.recorder.vocab());
            let oracle = Oracle::new(&mut world, &arrivals);
            world.keep_on_disk(folder.path(), DISK);
            world.run(&whole(), &arrivals);
            world.forget();
            let run = world.run(&batched(4), &arrivals);
            let what = format!("{fixture}, {kv} cache, mixed {mixed}");
            oracle.check(&run, &what);
            assert_eq!(run.cached, cached(&arrivals), "{what}");
        }
    }
}

/// The device has the beginning, the disk what follows: an answer becomes part of the next prompt.
#[test]
fn behind_what_the_device_has() {
    for fixture in FIXTURES {
        let folder = tempfile::tempdir().expect("a folder");
        let mut world = World::new(fixture, Setup::PLAIN, 64);
        let first = Arrival::new(prompt(5, 70, world.recorder.vocab()), 30);
        let said = Oracle::new(&mut world, std::slice::from_ref(&first));
        world.keep_on_disk(folder.path(), DISK);
        let run = world.run(&whole(), std::slice::from_ref(&first));
        said.check(&run, fixture);
        let mut history = first.prompt.clone();
        history.extend(&run.tokens[0]);
        history.extend(prompt(6, 21, world.recorder.vocab()));
        let next = [Arrival::new(history, 6)];
        let beginning = [Arrival::new(first.prompt[..33].to_vec(), 1)];
        let mut alone = World::new(fixture, Setup::PLAIN, 64);
        let oracle = Oracle::new(&mut alone, &next);
        world.forget();
        world.run(&whole(), &beginning);
        let run = world.run(&whole(), &next);
        oracle.check(&run, fixture);
        assert_eq!((run.cached[0], run.loads), (96, vec![true]), "{fixture}");
    }
}

/// One disk has the beginnings, the other, which is farther, all: what comes from both has the bits, and then the near one has all.
#[test]
fn from_two_tiers() {
    for fixture in ["llama3", "gemma3"] {
        let (near, far) = (tempfile::tempdir().expect("a folder"), tempfile::tempdir().expect("a folder"));
        let mut world = World::new(fixture, Setup::PLAIN, 64);
        let arrivals = arrivals(world.recorder.vocab());
        let oracle = Oracle::new(&mut world, &arrivals);
        let beginnings: Vec<Arrival> = arrivals
            .iter()
            .map(|of| Arrival::new(of.prompt[..of.prompt.len().min(33)].to_vec(), 1))
            .collect();
        world.keep_on_disk(near.path(), DISK);
        world.run(&whole(), &beginnings);
        world.keep_on_disk(far.path(), DISK);
        world.forget();
        world.run(&whole(), &arrivals);
        world.keep_on_disk(near.path(), DISK);
        world.keep_behind(far.path(), DISK);
        for last in [false, true] {
            world.forget();
            let run = world.run(&batched(4), &arrivals);
            let what = format!("{fixture}, promoted: {last}");
            oracle.check(&run, &what);
            assert_eq!(run.cached, cached(&arrivals), "{what} {:?}", run.loaded_from);
            assert_eq!(run.loaded_from.contains(&1), !last, "{what}: {:?}", run.loaded_from);
        }
        // The far one tells lies: nothing of it is used.
        world.keep_on_disk(&near.path().join("new"), DISK);
        for seed in 0..8 {
            damage(far.path(), seed);
        }
        world.keep_behind(far.path(), DISK);
        world.forget();
        oracle.check(&world.run(&batched(4), &arrivals), &format!("{fixture}, the far one is damaged"));
    }
}

/// After a restart memory is empty and the disk is not: what comes from there once comes from memory the next time.
#[test]
fn what_came_from_a_disk_is_in_memory_from_then_on() {
    for fixture in ["llama3", "gemma3"] {
        let folder = tempfile::tempdir().expect("a folder");
        let mut world = World::new(fixture, Setup::PLAIN, 64);
        let arrivals = arrivals(world.recorder.vocab());
        let oracle = Oracle::new(&mut world, &arrivals);
        world.keep_on_disk(folder.path(), DISK);
        world.run(&whole(), &arrivals);
        world.keep_in_memory(256);
        world.keep_behind(folder.path(), DISK);
        for from in [1, 0] {
            world.forget();
            let run = world.run(&batched(4), &arrivals);
            oracle.check(&run, &format!("{fixture}, from tier {from}"));
            assert_eq!(run.cached, cached(&arrivals), "{fixture} {:?}", run.loaded_from);
            assert!(!run.loaded_from.is_empty() && run.loaded_from.iter().all(|tier| *tier == from));
        }
        assert!(world.tier_stats().blocks_loaded > 0);
    }
}

#[test]
fn nobody_elses() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut world = World::new("llama3", Setup::PLAIN, 64);
    let arrivals = arrivals(world.recorder.vocab());
    world.keep_on_disk(folder.path(), DISK);
    world.run(&whole(), &arrivals);
    world.forget();
    world.change_tenant();
    let run = world.run(&whole(), &arrivals);
    assert_eq!((run.cached, run.loads), (vec![0; 4], vec![]));
}

/// Bytes anywhere in the files are changed: what that spoils is computed.
#[test]
fn from_a_damaged_disk() {
    let (mut loaded, mut refused) = (0, 0);
    for seed in 0..24 {
        let fixture = if seed % 2 == 0 { "llama3" } else { "gemma3" };
        let folder = tempfile::tempdir().expect("a folder");
        let mut world = World::new(fixture, Setup::PLAIN, 64);
        let arrivals = arrivals(world.recorder.vocab());
        let oracle = Oracle::new(&mut world, &arrivals);
        world.keep_on_disk(folder.path(), DISK);
        world.run(&whole(), &arrivals);
        if seed % 3 == 0 {
            // What is known of the files stays, but their bytes.
            damage(folder.path(), seed);
        } else {
            let mut again = World::new(fixture, Setup::PLAIN, 64);
            drop(std::mem::replace(&mut world, {
                again.forget();
                again
            }));
            damage(folder.path(), seed);
            world.keep_on_disk(folder.path(), DISK);
        }
        world.forget();
        let run = world.run(&batched(4), &arrivals);
        oracle.check(&run, &format!("{fixture}, damaged by {seed}"));
        loaded += run.loads.iter().filter(|arrived| **arrived).count();
        refused += run.loads.iter().filter(|arrived| !**arrived).count();
    }
    assert!(loaded > 3 && refused > 3, "{loaded} loads arrived, {refused} were refused");
}

fn damage(folder: &Path, seed: u64) {
    let mut files: Vec<_> =
        std::fs::read_dir(folder).expect("a folder").flatten().map(|of| of.path()).collect();
    files.sort();
    let places = prompt(seed + 77, 6, 1 << 30);
    for (at, file) in files.iter().enumerate().filter(|(_, file)| file.is_file()) {
        let length = std::fs::metadata(file).expect("a file").len();
        if length < 4096 {
            continue;
        }
        let open = std::fs::OpenOptions::new().read(true).write(true).open(file).expect("a file");
        for place in &places[..1 + (seed as usize + at) % places.len()] {
            let (offset, mut byte) = (u64::from(*place) % length, [0]);
            open.read_exact_at(&mut byte, offset).expect("a byte");
            open.write_all_at(&[byte[0] ^ (1 << (place % 8))], offset).expect("a byte");
        }
    }
}

/// The disk has room for next to nothing, and gives it to whoever came last.
#[test]
fn from_a_disk_that_is_too_small() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut world = World::new("llama3", Setup::PLAIN, 64);
    let vocab = world.recorder.vocab();
    let many: Vec<Arrival> = (0..24).map(|at| Arrival::new(prompt(at + 9, 100, vocab), 3)).collect();
    let oracle = Oracle::new(&mut world, &many);
    world.keep_on_disk(folder.path(), 512 << 10);
    for _ in 0..3 {
        world.forget();
        oracle.check(&world.run(&batched(4), &many), "a small disk");
    }
    let stats = world.tier_stats();
    assert!(stats.blocks_evicted > 0 && stats.bytes <= 512 << 10, "{stats:?}");
}

/// What writes do from the moment when so many have gone well, and reads, once they are to fail.
#[derive(Clone)]
struct Failure {
    writes_left: Arc<AtomicU32>,
    write: fn(usize) -> io::Result<usize>,
    reads_fail: Arc<AtomicBool>,
}

struct Failing(Directory, Failure);
struct FailingFile(Box<dyn File>, Failure);

impl Folder for Failing {
    fn list(&self) -> io::Result<Vec<Listed>> {
        self.0.list()
    }
    fn open(&self, name: &str) -> io::Result<Box<dyn File>> {
        Ok(Box::new(FailingFile(self.0.open(name)?, self.1.clone())))
    }
    fn create(&self, name: &str, bytes: u64) -> io::Result<Box<dyn File>> {
        Ok(Box::new(FailingFile(self.0.create(name, bytes)?, self.1.clone())))
    }
    fn remove(&self, name: &str) -> io::Result<()> {
        self.0.remove(name)
    }
    fn is_direct(&self) -> bool {
        self.0.is_direct()
    }
}

impl File for FailingFile {
    fn bytes(&self) -> io::Result<u64> {
        self.0.bytes()
    }
    fn read(&self, into: &mut [u8], at: u64) -> io::Result<usize> {
        match self.1.reads_fail.load(Relaxed) {
            true => Err(io::Error::from_raw_os_error(5)),
            false => self.0.read(into, at),
        }
    }
    fn write(&self, bytes: &[u8], at: u64) -> io::Result<usize> {
        match self.1.writes_left.fetch_update(Relaxed, Relaxed, |left| left.checked_sub(1)) {
            Ok(_) => self.0.write(bytes, at),
            Err(_) => (self.1.write)(bytes.len()),
        }
    }
    fn cut(&self, bytes: u64) -> io::Result<()> {
        self.0.cut(bytes)
    }
}

/// No space, an error, a short write while answers are computed: nothing more is stored, what is there comes back, and when that cannot be
/// read, either, it is computed. The bits are the same throughout.
#[test]
fn from_a_disk_that_fails_meanwhile() {
    let failures: [fn(usize) -> io::Result<usize>; 3] = [
        |_| Err(io::Error::from_raw_os_error(28)),
        |_| Err(io::Error::from_raw_os_error(5)),
        |bytes| Ok(bytes / 2),
    ];
    for write in failures {
        let folder = tempfile::tempdir().expect("a folder");
        let mut world = World::new("llama3", Setup::PLAIN, 64);
        let arrivals = arrivals(world.recorder.vocab());
        let oracle = Oracle::new(&mut world, &arrivals);
        // The directory's file and a segment's first page, and of fifteen blocks the first six.
        let (writes_left, reads_fail) = (Arc::new(AtomicU32::new(8)), Arc::new(AtomicBool::new(false)));
        let failure = Failure { writes_left, write, reads_fail: reads_fail.clone() };
        let directory = Directory::open(folder.path()).expect("a folder").expect("nobody else's");
        world.keep_in_folder(Arc::new(Failing(directory, failure)), folder.path(), DISK);
        oracle.check(&world.run(&batched(4), &arrivals), "while it fails");
        let stats = world.tier_stats();
        assert!(stats.off.is_some() && (1..=6).contains(&stats.blocks_stored), "{stats:?}");
        world.forget();
        let run = world.run(&batched(4), &arrivals);
        oracle.check(&run, "with what it had stored");
        assert!(run.cached.iter().any(|cached| *cached > 0) && run.loads.iter().all(|arrived| *arrived));
        assert_eq!(world.tier_stats().blocks_stored, stats.blocks_stored, "nothing more");
        world.forget();
        reads_fail.store(true, Relaxed);
        let run = world.run(&batched(4), &arrivals);
        oracle.check(&run, "with nothing of it");
        assert!(run.loads.iter().all(|arrived| !*arrived) && run.cached == [0; 4], "{run:?}");
    }
}
