//! Files and batches, in memory or in a folder.
//!
//! Owns: what exists, whose it is, how much there may be, and what outlives the process. Must never: run a request, or show one
//! owner what is another's.
//!
//! With a folder everything is there:
//!
//! ```text
//! lock                    held by the process that uses the folder
//! files/<id>.data         what a file holds
//! files/<id>.json         what is said of it; a file without it is no file yet
//! batches/<id>.json       a batch, replaced as a whole whenever its status changes
//! ```
//!
//! Results are appended to the data of the output files, whose ids a batch has from the beginning; they become files when the
//! batch ends. So a process that ends at any moment leaves whole lines and at most one that is cut short, which is dropped, and
//! the batch goes on behind them.
//!
//! Cost: what is somebody's is found under its owner and then by id, so no call goes through what others have. A list is as long as
//! its owner's, or a page of it, and a file is looked at when it expires. The lock is never held across anything that a disk does. Whoever goes through several counts them as work.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use folio_text::work;
use indexmap::IndexMap;
use parking_lot::{Mutex, MutexGuard};

use super::config::{BatchConfig, BatchLimits};
use super::records::{Batch, BatchRecord, FileContent, FileMeta, VERSION, listed, read_all, write_json};
use super::results::{ResultSink, Results, Room, TakenRoom};
use crate::error::ServerError;
use crate::http::fresh_id;
use folio_api::ApiError;
use folio_api::unix_s;

/// After so long an expired file is looked at again that a batch still read.
const AGAIN_S: u64 = 60;

struct FileEntry {
    meta: FileMeta,
    content: FileContent,
    _room: TakenRoom,
    /// When it is looked at whether it goes.
    expires_at: Option<u64>,
}

/// What one owner has, oldest first.
#[derive(Default)]
struct OwnerRecords {
    files: IndexMap<String, FileEntry>,
    batches: IndexMap<String, Arc<Batch>>,
}

impl OwnerRecords {
    /// Whether a batch that is not over reads the file.
    fn reads(&self, id: &str) -> bool {
        work::add(self.batches.len());
        self.batches.values().any(|batch| batch.reads(id))
    }
}

#[derive(Default)]
struct FileTable {
    own: HashMap<String, OwnerRecords>,
    /// When, whose and which file.
    expiring: BTreeSet<(u64, String, String)>,
}

impl FileTable {
    fn expire(&mut self, owner: &str, id: &str, at: u64) {
        if let Some(entry) = self.own.get_mut(owner).and_then(|own| own.files.get_mut(id)) {
            entry.expires_at = Some(at);
            self.expiring.insert((at, owner.to_owned(), id.to_owned()));
        }
    }
}

/// See the module documentation.
pub struct Store {
    dir: Option<PathBuf>,
    pub limits: BatchLimits,
    bytes_max: u64,
    inner: Mutex<FileTable>,
    /// Counted as it changes, since every line of a batch asks. Locked after `inner`.
    room: Arc<Mutex<Room>>,
    _lock: Option<File>,
}

impl Store {
    pub fn open(config: &BatchConfig) -> Result<Self, ServerError> {
        let mut store = Self {
            dir: config.dir.clone(),
            limits: config.limits.clone(),
            bytes_max: config.bytes_max(),
            inner: Mutex::default(),
            room: Arc::default(),
            _lock: None,
        };
        if let Some(dir) = &config.dir {
            let failed =
                |what: String| ServerError::Config(format!("the batch folder {}: {what}", dir.display()));
            store._lock = Some(store.open_dir(dir).map_err(|error| failed(error.to_string()))?);
            store.load(dir).map_err(failed)?;
        }
        Ok(store)
    }

    fn open_dir(&self, dir: &Path) -> io::Result<File> {
        for folder in ["files", "batches"] {
            create_private(&dir.join(folder))?;
        }
        let lock = File::create(dir.join("lock"))?;
        lock.try_lock().map_err(|_| io::Error::other("another server uses it"))?;
        Ok(lock)
    }

    /// What an earlier process left. Data that belongs to nothing is removed.
    fn load(&self, dir: &Path) -> Result<(), String> {
        let mut records: Vec<BatchRecord> = read_all(&dir.join("batches"))?;
        let mut metas: Vec<FileMeta> = read_all(&dir.join("files"))?;
        records.sort_by(|a, b| (a.created_at, &a.id).cmp(&(b.created_at, &b.id)));
        metas.sort_by(|a, b| (a.created_at, &a.id).cmp(&(b.created_at, &b.id)));
        let growing = records.iter().filter(|record| !record.status.is_final());
        let mut known: HashSet<&str> =
            growing.flat_map(|record| [&*record.output_file_id, &record.error_file_id]).collect();
        known.extend(metas.iter().map(|meta| &*meta.id));
        for path in listed(&dir.join("files")).map_err(|error| error.to_string())? {
            let stem = path.file_stem().and_then(|stem| stem.to_str()).unwrap_or_default();
            let data = path.extension().is_some_and(|extension| extension == "data");
            if !data || known.contains(stem) {
                continue;
            }
            fs::remove_file(&path).map_err(|error| format!("{}: {error}", path.display()))?;
        }
        for meta in metas {
            let content = FileContent::Disk(self.data(&meta.id).unwrap_or_default());
            let room = TakenRoom::new(&self.room, &meta.owner, meta.bytes);
            self.insert(meta, content, room);
        }
        for record in records {
            self.add(record);
        }
        Ok(())
    }

    fn data(&self, id: &str) -> Option<PathBuf> {
        Some(self.dir.as_ref()?.join("files").join(format!("{id}.data")))
    }

    fn insert(&self, meta: FileMeta, content: FileContent, room: TakenRoom) {
        let mut inner = self.inner.lock();
        let (owner, id, expires_at) = (meta.owner.clone(), meta.id.clone(), meta.expires_at);
        let own = inner.own.entry(owner.clone()).or_default();
        own.files.insert(id.clone(), FileEntry { meta, content, _room: room, expires_at: None });
        if let Some(at) = expires_at {
            inner.expire(&owner, &id, at);
        }
    }

    fn add(&self, record: BatchRecord) -> Arc<Batch> {
        let (owner, id) = (record.owner.clone(), record.id.clone());
        let batch = Batch::new(record);
        self.inner.lock().own.entry(owner).or_default().batches.insert(id, batch.clone());
        batch
    }

    /// Keeps an uploaded file, for so many seconds. Blocks while it is written.
    pub fn put(
        &self,
        owner: &str,
        filename: &str,
        bytes: &[u8],
        seconds: Option<u64>,
    ) -> Result<FileMeta, ApiError> {
        drop(self.current());
        // Taken before it is written, so that many at once are no more than one after the other.
        let room = TakenRoom::within(&self.room, owner, bytes.len() as u64, |room| {
            let (count, limit) = (room.files(owner), self.limits.files);
            if count >= limit {
                let what = "files, uploads and batches that run";
                return Err(full(format!("You have {count} {what}, the limit is {limit}; delete some.")));
            }
            let fits = room.fits(owner, bytes.len() as u64, self.bytes_max);
            fits.then_some(()).ok_or_else(|| {
                full("There is no room for this file; delete others, or wait until batches expire.".into())
            })
        })?;
        let created_at = unix_s();
        let meta = FileMeta {
            version: VERSION,
            id: format!("file-{}", fresh_id()),
            owner: owner.to_owned(),
            bytes: bytes.len() as u64,
            created_at,
            expires_at: seconds.map(|seconds| created_at.saturating_add(seconds)),
            filename: filename.to_owned(),
            purpose: "batch".to_owned(),
        };
        let content = match self.data(&meta.id) {
            None => FileContent::Memory(bytes.into()),
            Some(path) => {
                let write = |mut file: File| file.write_all(bytes).and_then(|()| file.sync_all());
                let written = File::create(&path).and_then(write).and_then(|()| self.save_meta(&meta));
                if let Err(error) = written {
                    self.unlink(&meta.id);
                    return Err(storage(error));
                }
                FileContent::Disk(path)
            }
        };
        self.insert(meta.clone(), content, room);
        Ok(meta)
    }

    fn save_meta(&self, meta: &FileMeta) -> io::Result<()> {
        let Some(dir) = &self.dir else { return Ok(()) };
        write_json(&dir.join("files").join(format!("{}.json", meta.id)), meta)
    }

    /// Whether so many bytes more fit ([`Room::fits`]).
    pub fn has_room(&self, owner: &str, more: u64) -> bool {
        self.room.lock().fits(owner, more, self.bytes_max)
    }

    /// Without the files that are expired. Whoever is first to ask removes them, and blocks for it.
    fn current(&self) -> MutexGuard<'_, FileTable> {
        self.at(unix_s())
    }

    fn at(&self, now: u64) -> MutexGuard<'_, FileTable> {
        let mut inner = self.inner.lock();
        let mut gone = Vec::new();
        while inner.expiring.first().is_some_and(|(at, ..)| *at <= now) {
            let Some((_, owner, id)) = inner.expiring.pop_first() else { break };
            work::add(1);
            if inner.own.get(&owner).is_some_and(|own| own.reads(&id)) {
                inner.expire(&owner, &id, now + AGAIN_S);
            } else if self.take(&mut inner, &owner, &id) {
                gone.push(id);
            }
        }
        if gone.is_empty() {
            return inner;
        }
        drop(inner);
        gone.iter().for_each(|id| self.unlink(id));
        self.inner.lock()
    }

    /// A file is none any more; it is to be unlinked once nobody waits for the lock. Whether it was one.
    fn take(&self, inner: &mut FileTable, owner: &str, id: &str) -> bool {
        let Some(own) = inner.own.get_mut(owner) else { return false };
        let Some(entry) = own.files.shift_remove(id) else { return false };
        if own.files.is_empty() && own.batches.is_empty() {
            inner.own.remove(owner);
        }
        if let Some(at) = entry.expires_at {
            inner.expiring.remove(&(at, owner.to_owned(), id.to_owned()));
        }
        true
    }

    fn unlink(&self, id: &str) {
        if let (Some(dir), Some(data)) = (&self.dir, self.data(id)) {
            // First what makes it a file; data alone is removed at the next start.
            let _ = fs::remove_file(dir.join("files").join(format!("{id}.json")));
            let _ = fs::remove_file(data);
        }
    }

    pub fn file(&self, owner: &str, id: &str) -> Option<(FileMeta, FileContent)> {
        let inner = self.current();
        let entry = inner.own.get(owner)?.files.get(id)?;
        Some((entry.meta.clone(), entry.content.clone()))
    }

    /// Oldest first.
    pub fn files(&self, owner: &str) -> Vec<FileMeta> {
        let inner = self.current();
        let Some(own) = inner.own.get(owner) else { return Vec::new() };
        work::add(own.files.len());
        own.files.values().map(|entry| entry.meta.clone()).collect()
    }

    /// Whether there was such a file; a batch that runs keeps its input.
    pub fn delete(&self, owner: &str, id: &str) -> Result<bool, ApiError> {
        let mut inner = self.inner.lock();
        let Some(own) = inner.own.get(owner).filter(|own| own.files.contains_key(id)) else {
            return Ok(false);
        };
        if own.reads(id) {
            let message = format!("File '{id}' is the input of a batch that runs; cancel the batch first.");
            return Err(ApiError {
                code: Some("file_in_use"),
                ..ApiError::new(409, "invalid_request_error", message)
            });
        }
        let found = self.take(&mut inner, owner, id);
        drop(inner);
        self.unlink(id);
        Ok(found)
    }

    /// Keeps a new batch. The oldest of those that are over give way.
    pub fn begin(&self, record: BatchRecord) -> Result<Arc<Batch>, ApiError> {
        let mut own = self.batches(&record.owner);
        let running = own.iter().filter(|batch| !batch.status().is_final()).count();
        if running >= self.limits.running {
            let message =
                format!("{running} of your batches are not finished, and {} may be.", self.limits.running);
            return Err(ApiError::busy(message, 60));
        }
        own.retain(|batch| batch.status().is_final());
        let over = (own.len() + 1).saturating_sub(self.limits.kept);
        for old in own.into_iter().take(over) {
            let id = old.record().id;
            if let Some(own) = self.inner.lock().own.get_mut(&record.owner) {
                own.batches.shift_remove(&id);
            }
            if let Some(dir) = &self.dir {
                let _ = fs::remove_file(dir.join("batches").join(format!("{id}.json")));
            }
        }
        let batch = self.add(record);
        self.save(&batch).map_err(storage)?;
        Ok(batch)
    }

    /// Writes down how a batch stands.
    pub fn save(&self, batch: &Batch) -> io::Result<()> {
        let Some(dir) = &self.dir else { return Ok(()) };
        let record = BatchRecord { version: VERSION, ..batch.record() };
        write_json(&dir.join("batches").join(format!("{}.json", record.id)), &record)
    }

    pub fn batch(&self, owner: &str, id: &str) -> Option<Arc<Batch>> {
        self.inner.lock().own.get(owner)?.batches.get(id).cloned()
    }

    /// Oldest first.
    pub fn batches(&self, owner: &str) -> Vec<Arc<Batch>> {
        let inner = self.inner.lock();
        let Some(own) = inner.own.get(owner) else { return Vec::new() };
        work::add(own.batches.len());
        own.batches.values().cloned().collect()
    }

    /// So many of them at most, the newest first, from behind the one of this id on, and whether there are more. `None`: there is none of
    /// this id.
    pub fn batches_page(
        &self,
        owner: &str,
        after: Option<&str>,
        limit: usize,
    ) -> Option<(Vec<Arc<Batch>>, bool)> {
        let inner = self.inner.lock();
        let own = inner.own.get(owner).map(|own| &own.batches);
        let end = match after {
            Some(id) => own.and_then(|own| own.get_index_of(id))?,
            None => own.map_or(0, IndexMap::len),
        };
        let start = end.saturating_sub(limit);
        work::add(end - start);
        let page = own.and_then(|own| own.get_range(start..end)).into_iter().flat_map(|page| page.values());
        Some((page.rev().cloned().collect(), start > 0))
    }

    /// Everybody's that go on, oldest first.
    pub fn unfinished(&self) -> Vec<Arc<Batch>> {
        let inner = self.inner.lock();
        let all = inner.own.values().flat_map(|own| own.batches.values());
        let mut all: Vec<_> = all.filter(|batch| !batch.status().is_final()).cloned().collect();
        all.sort_by_key(|batch| batch.record().created_at);
        all
    }

    /// Where a batch's results go, behind those it has.
    pub fn results(&self, batch: &Arc<Batch>) -> io::Result<Results> {
        let record = batch.record();
        let open = |id: &str| match self.data(id) {
            None => Ok(ResultSink::Memory(Vec::new())),
            Some(path) => ResultSink::open(path),
        };
        let sinks = [open(&record.output_file_id)?, open(&record.error_file_id)?];
        Ok(Results::new(batch.clone(), sinks, &self.room))
    }

    /// Makes files of results; an empty one is none.
    pub fn publish(&self, results: Results) -> io::Result<()> {
        let record = results.batch.record();
        let now = unix_s();
        let ids = [(&record.output_file_id, "output"), (&record.error_file_id, "error")];
        // From here on they are files, or nothing.
        let (batch, sinks) = results.into_sinks();
        let mut published = [false; 2];
        for (at, (sink, (id, what))) in sinks.into_iter().zip(ids).enumerate() {
            let bytes = sink.bytes();
            let content = match sink {
                ResultSink::Memory(bytes) => FileContent::Memory(bytes.into()),
                ResultSink::Disk { file, path, bytes } => {
                    // A line that a full disk cut short is none.
                    file.set_len(bytes)?;
                    file.sync_all()?;
                    FileContent::Disk(path)
                }
            };
            published[at] = bytes > 0;
            if bytes == 0 {
                if let FileContent::Disk(path) = content {
                    fs::remove_file(path)?;
                }
                continue;
            }
            let meta = FileMeta {
                version: VERSION,
                id: id.clone(),
                owner: record.owner.clone(),
                bytes,
                created_at: now,
                expires_at: Some(now + record.output_seconds),
                filename: format!("{}_{what}.jsonl", record.id),
                purpose: "batch_output".to_owned(),
            };
            self.save_meta(&meta)?;
            let room = TakenRoom::new(&self.room, &meta.owner, meta.bytes);
            self.insert(meta, content, room);
        }
        batch.change(|record| record.published = published.into());
        Ok(())
    }
}

/// A folder that only its owner may look into: prompts and answers are in it.
fn create_private(folder: &Path) -> io::Result<()> {
    let mut builder = fs::DirBuilder::new();
    builder.recursive(true);
    #[cfg(unix)]
    std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
    builder.create(folder)
}

fn full(message: String) -> ApiError {
    ApiError { code: Some("storage_full"), ..ApiError::new(413, "invalid_request_error", message) }
}

fn storage(error: io::Error) -> ApiError {
    ApiError { code: Some("storage"), ..ApiError::internal(format!("The batch folder: {error}.")) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::batch::lines::BatchUsage;
    use crate::batch::records::{BatchCounts, BatchStatus};

    fn record(input: &str) -> BatchRecord {
        let record = serde_json::json!({"id": "batch_1", "owner": "a", "key": "", "endpoint": "/v1/completions",
            "input_file_id": input, "output_file_id": "o", "error_file_id": "e", "published": [false, false],
            "status": "in_progress", "created_at": 1, "expires_at": 2, "errors": [],
            "counts": BatchCounts::default(), "usage": BatchUsage::default(), "output_seconds": 1});
        serde_json::from_value(record).unwrap()
    }

    #[test]
    fn a_file_costs_the_same_however_many_there_are() {
        let limits = BatchLimits { files: 10_000, ..Default::default() };
        let store = Store::open(&BatchConfig { limits, ..Default::default() }).unwrap();
        let steps = || {
            let before = work::done();
            let id = store.put("a", "f", b"x", Some(u64::MAX)).unwrap().id;
            assert!(store.file("a", &id).is_some() && store.file("b", &id).is_none());
            work::done() - before
        };
        let few = steps();
        (0..4000).for_each(|n| drop(store.put(["a", "b"][n % 2], "f", b"x", Some(u64::MAX)).unwrap()));
        assert_eq!(steps(), few);
        assert_eq!((store.files("a").len(), store.files("b").len()), (2002, 2000));
    }

    #[test]
    fn files_that_arrive_together_take_no_more_than_there_is() {
        let limits = BatchLimits { files: 3, ..Default::default() };
        for (config, bytes, each) in [
            (BatchConfig { storage_bytes: Some(1000), ..Default::default() }, 200, 2),
            (BatchConfig { limits, ..Default::default() }, 1, 3),
        ] {
            let store = Store::open(&config).unwrap();
            let gate = std::sync::Barrier::new(8);
            let put = &|at: usize| {
                gate.wait();
                store.put(["a", "b"][at % 2], "f", &vec![0; bytes], None).is_ok()
            };
            let kept = std::thread::scope(|scope| {
                let threads: Vec<_> = (0..8).map(|at| scope.spawn(move || put(at))).collect();
                threads.into_iter().map(|thread| thread.join().unwrap()).filter(|kept| *kept).count()
            });
            assert_eq!((kept, store.room.lock().all), (2 * each, (2 * each * bytes) as u64));
            for owner in ["a", "b"] {
                for meta in store.files(owner) {
                    store.delete(owner, &meta.id).unwrap();
                }
            }
            let room = store.room.lock();
            assert_eq!((room.all, room.own.len()), (0, 0));
        }
    }

    #[test]
    fn an_expired_file_goes_once_and_not_while_a_batch_reads_it() {
        let store = Store::open(&BatchConfig::default()).unwrap();
        let put = |seconds| store.put("a", "f", b"abc", seconds).unwrap();
        let (read, other, kept) = (put(Some(1000)), put(Some(1000)).id, put(None).id);
        // The second may be of the next second.
        let at = read.expires_at.unwrap() + 1;
        assert_eq!(read.expires_at, Some(read.created_at + 1000));
        let read = read.id;
        let batch = store.begin(record(&read)).unwrap();
        let left = |now| {
            let before = work::done();
            let ids: Vec<String> = store.at(now).own["a"].files.keys().cloned().collect();
            (ids, work::done() - before)
        };
        assert_eq!(left(at - 2), (vec![read.clone(), other, kept.clone()], 0));
        // Two are looked at, each with the one batch.
        assert_eq!(left(at), (vec![read.clone(), kept.clone()], 4));
        batch.change(|record| record.status = BatchStatus::Completed);
        assert_eq!(left(at + AGAIN_S - 1), (vec![read, kept.clone()], 0));
        assert_eq!(left(at + AGAIN_S).0, [kept.as_str()]);
        assert!(store.delete("a", &kept).unwrap());
        let room = store.room.lock();
        assert_eq!((room.all, room.own.len(), store.inner.lock().expiring.len()), (0, 0, 0));
    }
}
