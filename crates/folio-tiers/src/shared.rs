//! A folder that several engines share: each writes in a directory of its own, and reads what the others have ended.
//!
//! | in the folder | who changes it |
//! |---|---|
//! | a directory with 16 hexadecimal digits for each engine, new at each start | its owner, who has the lock on its file `lock` |
//! | its segments, and `store` | likewise; a segment that has a footer is never changed again, only deleted |
//! | its file `lease` | its owner writes other bytes there each time that it looks at the folder, and deletes it when it ends in order |
//!
//! Owns: what is known of the others' segments, and whose directory is an orphan. Must never: write or delete in a directory whose lock this
//! process has not, or believe anything that it reads there before it is verified.
//!
//! Only what was ended is read of others, so nobody reads what is being written. A file that is gone (its owner needed the room, or its directory was adopted)
//! is a miss, as is everything that is not what it has to be.
//!
//! An *orphan* is a directory without a lease, or with one that was the same for [`Sharing::lease`] by this process's own clock, whose lock can be taken. Who
//! takes it owns it: its segments are moved to the own directory while there is room, deleted where there is none, and the empty
//! directory goes. A move is a rename, so whoever reads the file meanwhile reads on.
//!
//! Cost: a look at the folder lists each directory and reads the footers of new segments, on a thread of its own; a question is one look-up more in
//! memory. Of others no more than [`ENGINES_MAX`] directories and [`BLOCKS_MAX`] blocks are known.

use std::collections::BTreeMap;
use std::fs;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError, RwLock, Weak};
use std::time::{Duration, Instant};

use rustc_hash::FxHashMap;
use rustix::io::Errno;

use crate::index::{Fingerprint, Index, Place};
use crate::io::{Directory, File, Listed, list, lock_directory, open_to_read};
use crate::segment::{self, Contents, Found};
use crate::store::{DiskStore, lock};
use crate::types::{DiskConfig, OpenError, Sharing};

/// Directories of others that are looked at.
const ENGINES_MAX: usize = 256;
/// Blocks of others that are known, some 50 bytes each.
const BLOCKS_MAX: usize = 4 << 20;
/// Files without a footer that are looked at in a directory each time: those that are being written, and a few of who died.
const OPEN_MAX: usize = 16;
const LEASE: &str = "lease";
/// Of a directory, beside its segments.
const BESIDE: [&str; 4] = ["store", "probe", LEASE, "lock"];

/// A segment of another engine.
pub(crate) struct PeerSegment {
    pub path: PathBuf,
    fingerprints: Box<[Fingerprint]>,
}

pub(crate) struct Peers {
    root: PathBuf,
    own: String,
    layout: [u8; 32],
    sharing: Sharing,
    /// Places are segments by the number that they have here.
    pub index: Index,
    segments: RwLock<FxHashMap<u32, Arc<PeerSegment>>>,
    /// Of all of them.
    blocks: AtomicUsize,
    /// Held while the folder is looked at.
    known: Mutex<PeersSeen>,
}

#[derive(Default)]
struct PeersSeen {
    engines: BTreeMap<String, PeerEngine>,
    /// Of the last segment.
    last: u32,
    beats: u64,
    /// The lease was given back.
    released: bool,
}

struct PeerEngine {
    /// By the names of their files.
    segments: BTreeMap<String, u32>,
    /// What its lease was, and since when.
    lease: Vec<u8>,
    since: Instant,
}

/// A file that was there, and is not any more.
pub(crate) fn is_gone(error: &io::Error) -> bool {
    error.kind() == ErrorKind::NotFound || error.raw_os_error() == Some(Errno::STALE.raw_os_error())
}

fn is_engine(name: &str) -> bool {
    name.len() == 16 && name.bytes().all(|byte| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte))
}

impl Peers {
    /// Makes a directory for this engine in the folder of `config`, which is its from then on.
    pub fn open(config: &DiskConfig, sharing: Sharing) -> Result<(Directory, Self), OpenError> {
        let root = config.dir.clone();
        let io = |error| OpenError::Io { dir: root.clone(), error };
        let new = || -> io::Result<Option<(String, Directory)>> {
            let mut random = [0; 8];
            getrandom::fill(&mut random).map_err(|error| io::Error::other(error.to_string()))?;
            let own = format!("{:016x}", u64::from_le_bytes(random));
            Ok(Directory::open(&root.join(&own))?.map(|directory| (own, directory)))
        };
        // Before it has a lock it looks like an orphan, and somebody may have taken it.
        let mut made = Ok(None);
        for _ in 0..3 {
            made = new();
            if matches!(made, Ok(Some(_))) {
                break;
            }
        }
        let (own, directory) = made.map_err(io)?.ok_or_else(|| OpenError::InUse { dir: root.clone() })?;
        let peers = Self {
            own,
            layout: config.layout_digest,
            sharing,
            index: Index::new(),
            segments: RwLock::default(),
            blocks: AtomicUsize::new(0),
            known: Mutex::default(),
            root: root.clone(),
        };
        peers.beat().map_err(io)?;
        Ok((directory, peers))
    }

    pub fn dir(&self) -> PathBuf {
        self.root.join(&self.own)
    }

    /// Says that this engine lives.
    fn beat(&self) -> io::Result<()> {
        let mut known = lock(&self.known);
        if known.released {
            return Ok(());
        }
        known.beats += 1;
        fs::write(self.dir().join(LEASE), known.beats.to_le_bytes())
    }

    /// Nothing is written in the own directory any more: whoever has room may take what is there at once.
    pub fn release(&self) {
        lock(&self.known).released = true;
        let _ = fs::remove_file(self.dir().join(LEASE));
    }

    pub fn find(&self, fingerprint: Fingerprint) -> Option<(Place, Arc<PeerSegment>)> {
        let place = self.index.find(fingerprint)?;
        let segments = self.segments.read().unwrap_or_else(PoisonError::into_inner);
        Some((place, segments.get(&place.segment)?.clone()))
    }

    /// A segment is gone. Its name stays known, so that it is not read again, until it is not listed any more.
    pub fn forget(&self, number: u32) {
        let segment = self.segments.write().unwrap_or_else(PoisonError::into_inner).remove(&number);
        let Some(segment) = segment else { return };
        let here = |place: Place| place.segment == number;
        segment.fingerprints.iter().for_each(|fingerprint| {
            self.index.remove(*fingerprint, here);
        });
        self.blocks.fetch_sub(segment.fingerprints.len(), Relaxed);
    }

    /// Learns what others have ended and what is gone. Returns directories that may be orphans.
    fn look(&self, is_over: impl Fn(u32) -> bool) -> io::Result<Vec<String>> {
        let names = fs::read_dir(&self.root)?.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
        let mut names: Vec<String> = names.filter(|name| is_engine(name) && *name != self.own).collect();
        names.sort_unstable();
        names.truncate(ENGINES_MAX);
        let known = &mut *lock(&self.known);
        let PeersSeen { engines, last, .. } = known;
        engines.retain(|name, engine| {
            let stays = names.binary_search(name).is_ok();
            if !stays {
                engine.segments.values().for_each(|number| self.forget(*number));
            }
            stays
        });
        let mut orphans = Vec::new();
        for name in names {
            let dir = self.root.join(&name);
            let engine = engines.entry(name.clone()).or_insert_with(|| PeerEngine {
                segments: BTreeMap::new(),
                lease: Vec::new(),
                since: Instant::now(),
            });
            // What cannot be listed has nothing.
            let mut files = list(&dir).unwrap_or_default();
            files.retain(|file| segment::number(&file.name).is_some());
            files.sort_by(|a, b| b.name.cmp(&a.name));
            engine.segments.retain(|name, number| {
                let stays = files.binary_search_by(|file| name.cmp(&file.name)).is_ok();
                if !stays {
                    self.forget(*number);
                }
                stays
            });
            self.read_new(&dir, &files, engine, last, &is_over);
            let lease = fs::read(dir.join(LEASE));
            let is_released = lease.as_ref().is_err_and(is_gone);
            if let Ok(lease) = lease
                && lease != engine.lease
            {
                (engine.lease, engine.since) = (lease, Instant::now());
            }
            if is_released || engine.since.elapsed() >= self.sharing.lease {
                orphans.push(name);
            }
        }
        Ok(orphans)
    }

    /// Reads the footers of segments that are not known, the newest first.
    fn read_new(
        &self,
        dir: &Path,
        files: &[Listed],
        engine: &mut PeerEngine,
        last: &mut u32,
        is_over: &impl Fn(u32) -> bool,
    ) {
        let mut open = 0;
        for file in files.iter().filter(|file| file.bytes > 0) {
            if self.blocks.load(Relaxed) >= BLOCKS_MAX || open == OPEN_MAX {
                return;
            }
            if engine.segments.contains_key(&file.name) {
                continue;
            }
            let path = dir.join(&file.name);
            let read = open_to_read(&path, false).and_then(|file| segment::read_ended(&*file));
            let Ok(Some(Contents { entries, layout, .. })) = read else {
                open += 1;
                continue;
            };
            *last += 1;
            // Of another model what is to be known is that it need not be read again.
            let ours = entries.iter().filter(|entry| layout == self.layout && !is_over(entry.expires_s));
            let places: Vec<_> = ours
                .map(|entry| (Fingerprint::from(&entry.key), Place { segment: *last, page: entry.page }))
                .collect();
            let fingerprints = places.iter().map(|(fingerprint, _)| *fingerprint).collect();
            self.blocks.fetch_add(places.len(), Relaxed);
            let mut segments = self.segments.write().unwrap_or_else(PoisonError::into_inner);
            segments.insert(*last, Arc::new(PeerSegment { path, fingerprints }));
            drop(segments);
            for (fingerprint, place) in &places {
                self.index.insert(*fingerprint, *place, || None);
            }
            engine.segments.insert(file.name.clone(), *last);
        }
    }
}

impl DiskStore {
    /// Looks at the folder now and then, for as long as the store is there. Who reads the directory at the start looks first.
    pub(crate) fn watch(store: &Weak<Self>, every: Duration) {
        loop {
            std::thread::sleep(every);
            let Some(store) = store.upgrade() else { return };
            store.refresh();
        }
    }

    /// Looks at the directories of the others: what they have ended can be found from then on, and orphans are adopted. Nothing happens where
    /// nothing is shared.
    pub fn refresh(&self) {
        let Some(peers) = &self.peers else { return };
        // Whoever cannot write its lease is an orphan to the others, who see that it has the lock.
        let _ = peers.beat();
        match peers.look(|expires_s| self.wall.is_over(expires_s)) {
            Ok(orphans) => orphans.iter().for_each(|name| self.adopt(peers, name)),
            Err(error) => tracing::debug!("the folder of the disk tier cannot be read: {error}"),
        }
    }

    /// Moves the segments of an orphan here. Nothing happens if somebody has its lock.
    fn adopt(&self, peers: &Peers, name: &str) {
        let dir = peers.root.join(name);
        if self.is_off() {
            return;
        }
        let Ok(Some(_lock)) = lock_directory(&dir) else { return };
        if let Ok(file) = open_to_read(&dir.join("store"), false) {
            self.wall.pass(crate::writer::time_of(&*file));
        }
        let mut files = list(&dir).unwrap_or_default();
        files.retain(|file| segment::number(&file.name).is_some());
        files.sort_by(|a, b| b.name.cmp(&a.name));
        let before = self.index.len();
        for file in files {
            let path = dir.join(&file.name);
            match self.adopt_segment(&path, &file) {
                Ok(true) => {}
                // What another version wrote is left alone.
                Ok(false) if is_foreign(&path) => {}
                Ok(false) => drop(fs::remove_file(&path)),
                Err(_) => return,
            }
        }
        BESIDE.iter().for_each(|name| drop(fs::remove_file(dir.join(name))));
        let _ = fs::remove_dir(&dir);
        let blocks = self.index.len().saturating_sub(before);
        tracing::info!("{blocks} blocks in {} were adopted: their engine has ended", dir.display());
    }
}

fn is_foreign(path: &Path) -> bool {
    let read = open_to_read(path, false).and_then(|file| segment::read(&*file, false));
    matches!(read, Ok(Found::Foreign))
}

impl DiskStore {
    /// Of a block that is not here.
    pub(crate) fn peer_file(&self, segment: &PeerSegment) -> io::Result<Box<dyn File>> {
        open_to_read(&segment.path, self.folder.is_direct())
    }

    /// Blocks of others that can be found.
    pub(crate) fn peer_blocks(&self) -> u64 {
        self.peers.as_ref().map_or(0, |peers| peers.index.len() as u64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_gone_is_told_from_what_cannot_be_read() {
        assert!(is_gone(&io::Error::from_raw_os_error(2)), "ENOENT");
        assert!(is_gone(&io::Error::from_raw_os_error(116)), "ESTALE");
        assert!(!is_gone(&io::Error::from_raw_os_error(5)), "EIO");
        assert!(is_engine("00ff34567890abcd") && !is_engine("00FF34567890abcd") && !is_engine("keyring"));
    }
}
