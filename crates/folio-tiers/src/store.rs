//! The store: what is asked of it, and what its threads share.
//!
//! | what | who changes it | |
//! |---|---|---|
//! | the index | `put`, `get` (forgets), reclaiming, the thread that reads the directory at the start | a lock per part |
//! | the table of segments | whoever begins or reclaims one | held for a look-up |
//! | the writer (which segment is open, the next number) | `put` where it takes room, `close` | held while a segment is begun |
//! | the open segment's list | `put` | held for an entry, or while the footer is written |
//!
//! A block is sealed and written outside every lock, into room that was set aside for it, so blocks are written side by side. Whoever
//! reads a segment holds it ([`Segment`] in an `Arc`), and what is held is not reclaimed: files are deleted only when nobody has them
//! open, so that what they took is free. An entry of the index goes before its file.
//!
//! Cost: `contains` a look-up under a lock that readers share; `get` one read and one decryption; `put` one encryption and one
//! write, and once a segment the deletion of another one, of which up to a quarter is read and written again.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError, RwLock, Weak};

use std::time::Duration;

use folio_engine::{Medium, Owner, Resident, Taken, TierEvent};
use folio_kv::TenantId;

use crate::clock::Forward;
use crate::index::{Fingerprint, Index, Place};
use crate::io::{Buffers, Directory, File, Folder, PAGE, Pages, read_full};
use crate::record::{self, Parsed};
use crate::seal::{NONCE, OwnerKey};
use crate::segment::{self, Entry};
use crate::shared::{Peers, is_gone};
use crate::types::{
    About, BlockKey, Class, DataKey, DiskConfig, DiskState, DiskStats, Miss, OpenError, PutError, Stored,
};
use crate::worth::{UseClock, Worth};
use crate::writer::Writer;

/// What is known of a file of records.
pub(crate) struct Segment {
    pub number: u32,
    /// That it counts for.
    pub bytes: AtomicU64,
    /// Of its records.
    pub payload: AtomicU64,
    /// Its blocks, as far as they are known; none where nothing of it is of use.
    pub worth: Mutex<Worth>,
    /// It is of another version, and never deleted.
    pub is_foreign: AtomicBool,
    /// Of its blocks, a [`Class`].
    pub class: AtomicU8,
}

impl Segment {
    pub fn new(number: u32, bytes: u64, class: Class, worth: Worth) -> Arc<Self> {
        Arc::new(Self {
            number,
            bytes: AtomicU64::new(bytes),
            payload: AtomicU64::new(0),
            worth: Mutex::new(worth),
            is_foreign: AtomicBool::new(false),
            class: AtomicU8::new(class as u8),
        })
    }
}

/// What expires, and when.
#[derive(Default)]
pub(crate) struct Ends {
    by_time: BTreeMap<(u32, Fingerprint), Place>,
    /// When the directory was last told the time.
    noted_s: u64,
}

#[derive(Default)]
pub(crate) struct StoreCounters {
    pub bytes_written: AtomicU64,
    pub payload_written: AtomicU64,
    pub hits: AtomicU64,
    pub misses: [AtomicU64; Miss::ALL.len()],
    pub reclaimed: AtomicU64,
    pub bytes_copied: AtomicU64,
}

/// Blocks in a directory. One process at a time writes to it.
pub struct DiskStore {
    pub(crate) config: DiskConfig,
    pub(crate) folder: Arc<dyn Folder>,
    pub(crate) index: Index,
    /// The others whose folder it is, too.
    pub(crate) peers: Option<Peers>,
    pub(crate) segments: RwLock<BTreeMap<u32, Arc<Segment>>>,
    pub(crate) writer: Mutex<Writer>,
    /// That all files count for.
    pub(crate) used: AtomicU64,
    pub(crate) uses: UseClock,
    pub(crate) wall: Forward,
    ends: Mutex<Ends>,
    /// The first of them; the greatest number: nothing expires.
    first_end: AtomicU32,
    pub(crate) counters: StoreCounters,
    pub(crate) buffers: Buffers,
    /// Why nothing is written any more.
    off: OnceLock<String>,
    /// Puts hold it to read, `close` to write: it waits for them.
    gate: RwLock<()>,
    indexed: Arc<(Mutex<bool>, Condvar)>,
}

/// Whoever panicked with it left it as it has to be: no lock is held over a change in two parts.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl DiskStore {
    /// Makes the directory where there is none. What it holds is read by a thread of its own; until then it is not found.
    pub fn open(config: DiskConfig) -> Result<Arc<Self>, OpenError> {
        if let Some(sharing) = config.shared {
            let (directory, peers) = Peers::open(&config, sharing)?;
            let config = DiskConfig { dir: peers.dir(), ..config };
            let store = Self::open_with(config, Arc::new(directory), Some(peers))?;
            let watched = Arc::downgrade(&store);
            std::thread::Builder::new()
                .name("folio-kv-peers".into())
                .spawn(move || Self::watch(&watched, sharing.refresh))
                .map_err(|error| OpenError::Io { dir: store.config.dir.clone(), error })?;
            return Ok(store);
        }
        let dir = &config.dir;
        let directory = match Directory::open(dir) {
            Ok(Some(directory)) => directory,
            Ok(None) => return Err(OpenError::InUse { dir: dir.clone() }),
            Err(error) => return Err(OpenError::Io { dir: dir.clone(), error }),
        };
        Self::open_in(config, Arc::new(directory))
    }

    /// In somebody else's files: tests let them fail.
    pub fn open_in(config: DiskConfig, folder: Arc<dyn Folder>) -> Result<Arc<Self>, OpenError> {
        Self::open_with(config, folder, None)
    }

    fn open_with(
        config: DiskConfig,
        folder: Arc<dyn Folder>,
        peers: Option<Peers>,
    ) -> Result<Arc<Self>, OpenError> {
        let (bytes, segment_bytes) = (config.bytes, config.segment_bytes);
        if !segment_bytes.is_multiple_of(PAGE as u64)
            || !(4 * PAGE as u64..=1 << 31).contains(&segment_bytes)
            || bytes < Self::FIXED + 2 * (segment_bytes + PAGE as u64)
        {
            return Err(OpenError::Size { bytes, segment_bytes });
        }
        let uses = UseClock::new(bytes);
        let (writer, segments, floor_s) = Writer::open(&config, &*folder, &uses)?;
        let held = segments.iter().map(|segment| segment.bytes.load(Relaxed)).sum::<u64>();
        let store = Arc::new(Self {
            index: Index::new(),
            peers,
            segments: RwLock::new(segments.iter().map(|segment| (segment.number, segment.clone())).collect()),
            uses,
            writer: Mutex::new(writer),
            used: AtomicU64::new(Self::FIXED + held),
            wall: Forward::new(config.clock.clone(), floor_s),
            ends: Mutex::default(),
            first_end: AtomicU32::new(u32::MAX),
            counters: StoreCounters::default(),
            buffers: Buffers::default(),
            off: OnceLock::new(),
            gate: RwLock::new(()),
            indexed: Arc::default(),
            config,
            folder,
        });
        let (reader, thread) =
            (Arc::downgrade(&store), std::thread::Builder::new().name("folio-kv-index".into()));
        thread
            .spawn(move || Self::read_directory(&reader, segments))
            .map_err(|error| OpenError::Io { dir: store.config.dir.clone(), error })?;
        Ok(store)
    }

    /// Of files that are no segments, and of the directory.
    pub(crate) const FIXED: u64 = 3 * PAGE as u64;

    /// The newest first: what was stored last is asked for first.
    fn read_directory(store: &Weak<Self>, segments: Vec<Arc<Segment>>) {
        /// Says so also where the thread panics, and when it has no hand on the store any more.
        struct Done(Arc<(Mutex<bool>, Condvar)>);
        impl Drop for Done {
            fn drop(&mut self) {
                *lock(&self.0.0) = true;
                self.0.1.notify_all();
            }
        }
        let Some(_done) = store.upgrade().map(|store| Done(store.indexed.clone())) else { return };
        let mut scanned = 0;
        for segment in segments.into_iter().rev() {
            let Some(store) = store.upgrade() else { return };
            store.read_segment(&segment, &mut scanned);
        }
        if let Some(store) = store.upgrade() {
            store.tell_of_others();
            store.shrink();
            store.refresh();
        }
    }

    /// What other versions wrote takes room, however long nobody reads it.
    fn tell_of_others(&self) {
        let segments = self.segments.read().unwrap_or_else(PoisonError::into_inner);
        let others = segments.values().filter(|segment| segment.is_foreign.load(Relaxed));
        let bytes: u64 = others.map(|segment| segment.bytes.load(Relaxed)).sum();
        if bytes > 0 {
            tracing::warn!(
                "{bytes} of the {} bytes that {} may take are segments of another version of Folio: they are neither read nor deleted",
                self.config.bytes,
                self.config.dir.display()
            );
        }
    }

    /// Has a block that is at a place forgotten when its time comes.
    pub(crate) fn note_end(&self, fingerprint: Fingerprint, place: Place, expires_s: u32) {
        if expires_s > 0 {
            lock(&self.ends).by_time.insert((expires_s, fingerprint), place);
            self.first_end.fetch_min(expires_s, Relaxed);
        }
    }

    /// So do those of a segment that is gone.
    pub(crate) fn forget_ends(&self, segment: u32) {
        lock(&self.ends).by_time.retain(|_, place| place.segment != segment);
    }

    /// Forgets what has expired. That it has is noted in the directory, so that no clock revives it.
    pub fn expire(&self) {
        if !self.wall.is_over(self.first_end.load(Relaxed)) {
            return;
        }
        let now_s = self.wall.now_s();
        let mut ends = lock(&self.ends);
        let mut gone = 0;
        while let Some(first) = ends.by_time.first_entry().filter(|first| u64::from(first.key().0) <= now_s) {
            let (_, fingerprint) = *first.key();
            let place = first.remove();
            gone += u64::from(self.forget(fingerprint, place));
        }
        let next = ends.by_time.first_key_value().map_or(u32::MAX, |((end, _), _)| *end);
        self.first_end.store(next, Relaxed);
        let note = gone > 0 && now_s > ends.noted_s;
        if note {
            ends.noted_s = now_s;
        }
        drop(ends);
        self.counters.misses[Miss::Expired as usize].fetch_add(gone, Relaxed);
        if note && !self.is_off() {
            self.note_time(&lock(&self.writer));
        }
    }

    /// Whether a block can be found. Memory only.
    pub fn contains(&self, key: &BlockKey) -> bool {
        let of_peers = |peers: &Peers| peers.index.find(key.into()).is_some();
        self.index.find(key.into()).is_some() || self.peers.as_ref().is_some_and(of_peers)
    }

    /// The longest block that can be stored.
    pub fn max_block_bytes(&self) -> usize {
        self.config.segment_bytes as usize - 2 * PAGE - record::HEADER
    }

    /// Reads a block into `into`, which is as long as it. On a miss `into` is as it was, and what was found to be wrong is forgotten.
    pub fn get(&self, key: &BlockKey, data_key: &DataKey, into: &mut [u8]) -> Result<(), Miss> {
        let fingerprint = Fingerprint::from(key);
        let found = match self.index.find(fingerprint) {
            // What is absent went with its segment, or is just being written again.
            Some(place) => self.read_record(place, key, data_key, into).inspect_err(|miss| {
                if *miss != Miss::Absent {
                    self.forget(fingerprint, place);
                }
            }),
            None => self.read_of_peers(fingerprint, key, data_key, into),
        };
        match found {
            Ok(()) => self.counters.hits.fetch_add(1, Relaxed),
            Err(miss) => self.counters.misses[miss as usize].fetch_add(1, Relaxed),
        };
        found
    }

    fn read_record(
        &self,
        place: Place,
        key: &BlockKey,
        data_key: &DataKey,
        into: &mut [u8],
    ) -> Result<(), Miss> {
        let segment = self.segment(place.segment).ok_or(Miss::Absent)?;
        let file = self.folder.open(&segment::name(segment.number)).map_err(|_| Miss::Io)?;
        self.read_page(&*file, place.page, key, data_key, into).map_err(|_| Miss::Io)??;
        self.touch(&segment, place.page, record::pages(into.len()));
        Ok(())
    }

    /// The record that begins at a page.
    fn read_page(
        &self,
        file: &dyn File,
        page: u32,
        key: &BlockKey,
        data_key: &DataKey,
        into: &mut [u8],
    ) -> std::io::Result<Result<(), Miss>> {
        let mut record = self.buffers.take(record::pages(into.len()) * PAGE);
        let read = read_full(file, &mut record, u64::from(page) * PAGE as u64);
        let found = read.map(|read| {
            record::read(&record[..read], key, &self.config.layout_digest, data_key, &self.wall, into)
        });
        self.buffers.give_back(record);
        found
    }

    /// Of another engine's segment. What is gone is absent.
    fn read_of_peers(
        &self,
        fingerprint: Fingerprint,
        key: &BlockKey,
        data_key: &DataKey,
        into: &mut [u8],
    ) -> Result<(), Miss> {
        let peers = self.peers.as_ref().ok_or(Miss::Absent)?;
        let (place, segment) = peers.find(fingerprint).ok_or(Miss::Absent)?;
        let file = self.peer_file(&segment);
        let found = match file.and_then(|file| self.read_page(&*file, place.page, key, data_key, into)) {
            Ok(found) => found,
            Err(error) if is_gone(&error) => {
                peers.forget(place.segment);
                Err(Miss::Absent)
            }
            Err(_) => Err(Miss::Io),
        };
        found.inspect_err(|_| {
            peers.index.remove(fingerprint, |now| now == place);
        })
    }

    fn segment(&self, number: u32) -> Option<Arc<Segment>> {
        self.segments.read().unwrap_or_else(PoisonError::into_inner).get(&number).cloned()
    }

    /// A block is wanted by who has it. Whether it can be found here; then it counts as used. `bytes`: of it and its lineage.
    pub(crate) fn want(&self, key: &BlockKey, bytes: usize) -> bool {
        let Some(place) = self.index.find(key.into()) else { return self.contains(key) };
        if let Some(segment) = self.segment(place.segment) {
            self.touch(&segment, place.page, record::pages(bytes));
        }
        true
    }

    /// Somebody got a record of so many pages, or has what is in it.
    fn touch(&self, segment: &Segment, page: u32, pages: usize) {
        let now = self.uses.pass(pages as u64);
        lock(&segment.worth).touch(page, now);
    }

    /// A block that is at a place cannot be found from then on. `false`: it is not there.
    fn forget(&self, fingerprint: Fingerprint, place: Place) -> bool {
        let was_there = self.index.remove(fingerprint, |now| now == place);
        if was_there {
            self.forget_place(place);
        }
        was_there
    }

    /// Nothing is found at a place any more.
    pub(crate) fn forget_place(&self, place: Place) {
        if let Some(segment) = self.segment(place.segment) {
            lock(&segment.worth).forget(place.page, self.uses.now());
        }
    }

    /// Writes a block, unless it is there. Once this has returned, the death of the process loses it no more.
    pub fn put(
        &self,
        key: &BlockKey,
        data_key: &DataKey,
        block: &[u8],
        about: &About<'_>,
    ) -> Result<Stored, PutError> {
        let entry = Entry {
            key: *key,
            page: 0,
            length: u32::try_from(block.len()).unwrap_or(u32::MAX),
            lineage: record::lineage_bytes(about.tokens.len()),
            expires_s: about.expires_s.unwrap_or(0),
        };
        self.put_with(entry, about, |record| {
            let nonce = if self.config.seal {
                let mut nonce = [0; NONCE];
                getrandom::fill(&mut nonce).map_err(|error| std::io::Error::other(error.to_string()))?;
                Some(nonce)
            } else {
                None
            };
            let what = (key, &self.config.layout_digest);
            record::write(record, what, data_key, nonce, block, about);
            Ok(())
        })
    }

    /// The same of a record that was made elsewhere, of a block of this layout. It is whole pages.
    pub(crate) fn put_record(&self, entry: &Entry, record: &[u8]) -> Result<Stored, PutError> {
        self.put_with(*entry, &About::default(), |into| {
            into.copy_from_slice(record);
            Ok(())
        })
    }

    /// `fill` makes the record, in whole pages. Where it lies is said later.
    fn put_with(
        &self,
        entry: Entry,
        about: &About<'_>,
        fill: impl FnOnce(&mut [u8]) -> std::io::Result<()>,
    ) -> Result<Stored, PutError> {
        let (most, bytes) = (self.max_block_bytes(), entry.body());
        if bytes > most {
            return Err(PutError::TooLarge { bytes, most });
        }
        if self.want(&entry.key, bytes) {
            return Ok(Stored::There);
        }
        let _gate = self.gate.read().unwrap_or_else(PoisonError::into_inner);
        self.write_block(entry, about, fill)?;
        Ok(Stored::New)
    }

    /// What of a record is told to who knows its tenant's key. `None`: it is nobody's of these, or has no lineage that can be believed.
    fn told(&self, file: &dyn File, place: Place, owners: &mut [Known]) -> Option<(Fingerprint, TierEvent)> {
        let begins = u64::from(place.page) * PAGE as u64;
        let mut head = self.buffers.take(PAGE);
        let told = (|| {
            let read = read_full(file, &mut head, begins).ok()?;
            let Parsed::Header(header) = record::parse(&head[..read]) else { return None };
            if header.key.group != 0 || header.layout != self.config.layout_digest {
                return None;
            }
            let at = owners.iter().position(|owner| header.is_of(&owner.mark))?;
            // Those beside it are rather its than another's.
            owners.swap(0, at);
            let from = record::HEADER + header.length as usize;
            let first = from / PAGE * PAGE;
            let mut pages = Pages::new(record::HEADER + header.body() - first);
            let read = read_full(file, &mut pages, begins + first as u64).ok()?;
            let lineage = pages[..read].get(from - first..)?.get(..usize::from(header.lineage))?;
            let (parent, tokens) = header.open_lineage(&head, lineage, &owners[0].key)?;
            let (medium, tenant, hash) = (Medium::Disk, owners[0].tenant, header.key.hash);
            Some(((&header.key).into(), TierEvent::Stored { medium, tenant, hash, parent, tokens }))
        })();
        self.buffers.give_back(head);
        told
    }

    /// The number of the next segment.
    pub(crate) fn next_segment(&self) -> u32 {
        lock(&self.writer).next
    }

    /// Ends the open segment with its footer, so that the next start reads no records. Nothing is written after it.
    pub fn close(&self) {
        let _ = self.off.set("closed".into());
        let _gate = self.gate.write().unwrap_or_else(PoisonError::into_inner);
        self.end_segments(&mut lock(&self.writer));
        self.peers.iter().for_each(Peers::release);
    }

    pub(crate) fn is_off(&self) -> bool {
        self.off.get().is_some()
    }

    pub(crate) fn turn_off(&self, error: &std::io::Error) {
        if self.off.set(error.to_string()).is_ok() {
            let dir = self.config.dir.display();
            tracing::warn!("the disk tier in {dir} stores no more blocks, and serves what it has: {error}");
        }
    }

    pub fn stats(&self) -> DiskStats {
        let load = |counter: &AtomicU64| counter.load(Relaxed);
        let segments = self.segments.read().unwrap_or_else(PoisonError::into_inner);
        let payload_bytes = segments.values().map(|segment| load(&segment.payload)).sum();
        let (segments, counters) = (segments.len() as u64, &self.counters);
        DiskStats {
            state: match self.off.get() {
                Some(reason) => DiskState::Off { reason: reason.clone() },
                None if !self.is_indexed() => DiskState::Opening,
                None => DiskState::On,
            },
            blocks: self.index.len() as u64 + self.peer_blocks(),
            bytes: load(&self.used),
            payload_bytes,
            segments,
            bytes_written: load(&counters.bytes_written),
            payload_written: load(&counters.payload_written),
            hits: load(&counters.hits),
            misses: std::array::from_fn(|reason| load(&counters.misses[reason])),
            reclaimed_blocks: load(&counters.reclaimed),
            bytes_copied: load(&counters.bytes_copied),
            direct: self.folder.is_direct(),
        }
    }

    /// Whether all that the directory had at the start is known.
    pub fn is_indexed(&self) -> bool {
        *lock(&self.indexed.0)
    }

    pub fn wait_indexed(&self) {
        let indexed = lock(&self.indexed.0);
        let _unused = self.indexed.1.wait_while(indexed, |indexed| !*indexed);
    }
}

/// A tenant whose blocks are told.
struct Known {
    tenant: TenantId,
    key: DataKey,
    mark: OwnerKey,
}

/// One or two pages are read of each record.
impl Resident for DiskStore {
    fn tell(&self, owners: &[Owner], tell: &mut dyn FnMut(TierEvent) -> Taken) {
        let known = |(tenant, key): &Owner| {
            let key = DataKey::from(*key);
            Known { tenant: *tenant, mark: OwnerKey::from(&key), key }
        };
        let mut owners: Vec<Known> = owners.iter().map(known).collect();
        self.wait_indexed();
        let mut open: Option<(u32, Box<dyn File>)> = None;
        for place in self.index.places() {
            if open.as_ref().is_none_or(|(segment, _)| *segment != place.segment) {
                let file = self.folder.open(&segment::name(place.segment));
                // Reclaimed meanwhile, or unreadable: nothing of it is told.
                let Ok(file) = file else { continue };
                open = Some((place.segment, file));
            }
            let Some((_, file)) = &open else { continue };
            let Some((fingerprint, event)) = self.told(&**file, place, &mut owners) else { continue };
            loop {
                match self.index.while_at(fingerprint, place, || tell(event.clone())) {
                    Some(Taken::NotYet) => std::thread::sleep(Duration::from_millis(1)),
                    Some(Taken::Never) => return,
                    Some(Taken::Yes) | None => break,
                }
            }
        }
    }
}

impl Drop for DiskStore {
    fn drop(&mut self) {
        self.close();
    }
}

impl std::fmt::Debug for DiskStore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("DiskStore").field("dir", &self.config.dir).finish_non_exhaustive()
    }
}
