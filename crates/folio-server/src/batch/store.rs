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
//! JSON has a version ([`VERSION`]): what an older program wrote is read, what a newer one wrote is refused.
//!
//! Results are appended to the data of the output files, whose ids a batch has from the beginning; they become files when the
//! batch ends. So a process that ends at any moment leaves whole lines and at most one that is cut short, which is dropped, and
//! the batch goes on behind them. JSON is written beside its place, synchronized and moved there.
//!
//! Cost: what is somebody's is found under its owner and then by id, so no call goes through what others have. A list is as long as
//! its owner's, and a file is looked at when it expires. Whoever goes through several counts them as work.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::fs::{self, File, OpenOptions};
use std::io::{self, BufRead, BufReader, Cursor, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use folio_text::work;
use indexmap::IndexMap;
use parking_lot::{Mutex, MutexGuard};
use serde::{Deserialize, Serialize};
use tokio::sync::Notify;

use super::lines::{Endpoint, LineError, Place, Usage};
use super::{BatchConfig, BatchLimits};
use crate::error::ServerError;
use crate::http::fresh_id;
use folio_api::ApiError;
use folio_api::unix_s;

/// Of what is written. 0: before there were versions, otherwise like 1. Whoever changes what a record means counts it up and reads
/// the older ones too.
pub const VERSION: u32 = 1;
/// After so long an expired file is looked at again that a batch still read.
const AGAIN_S: u64 = 60;

/// What was written of something, and in which version.
trait Versioned {
    fn version(&self) -> u32;
}

impl Versioned for FileMeta {
    fn version(&self) -> u32 {
        self.version
    }
}

impl Versioned for Record {
    fn version(&self) -> u32 {
        self.version
    }
}

/// What is said of a file.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct FileMeta {
    #[serde(default)]
    pub version: u32,
    pub id: String,
    pub owner: String,
    pub bytes: u64,
    pub created_at: u64,
    pub expires_at: Option<u64>,
    pub filename: String,
    /// "batch" or "batch_output"
    pub purpose: String,
}

/// What a file holds.
#[derive(Clone, Debug)]
pub enum Content {
    Memory(Arc<[u8]>),
    Disk(PathBuf),
}

impl Content {
    pub fn reader(&self) -> io::Result<Box<dyn BufRead + Send>> {
        Ok(match self {
            Self::Memory(bytes) => Box::new(Cursor::new(bytes.clone())),
            Self::Disk(path) => Box::new(BufReader::new(File::open(path)?)),
        })
    }

    pub fn line(&self, place: Place) -> io::Result<Vec<u8>> {
        let mut line = vec![0; place.bytes as usize];
        match self {
            Self::Memory(bytes) => {
                let start = place.start as usize;
                let found = bytes.get(start..start + line.len());
                line.copy_from_slice(found.ok_or(io::ErrorKind::UnexpectedEof)?);
            }
            Self::Disk(path) => {
                let mut file = File::open(path)?;
                file.seek(SeekFrom::Start(place.start))?;
                file.read_exact(&mut line)?;
            }
        }
        Ok(line)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Status {
    Validating,
    InProgress,
    Finalizing,
    Completed,
    Failed,
    Expired,
    Cancelling,
    Cancelled,
}

impl Status {
    pub fn is_final(self) -> bool {
        matches!(self, Self::Completed | Self::Failed | Self::Expired | Self::Cancelled)
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Counts {
    pub total: u64,
    pub completed: u64,
    pub failed: u64,
}

/// A batch as it is kept.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Record {
    #[serde(default)]
    pub version: u32,
    pub id: String,
    pub owner: String,
    /// What an operator calls the key it was made with, for records of usage.
    pub key: String,
    pub endpoint: Endpoint,
    pub input_file_id: String,
    pub output_file_id: String,
    pub error_file_id: String,
    /// Of those, what became a file.
    pub published: (bool, bool),
    pub status: Status,
    pub created_at: u64,
    pub expires_at: u64,
    pub in_progress_at: Option<u64>,
    pub finalizing_at: Option<u64>,
    pub cancelling_at: Option<u64>,
    /// When it came to its last status.
    pub ended_at: Option<u64>,
    pub errors: Vec<LineError>,
    pub counts: Counts,
    pub usage: Usage,
    pub metadata: Option<serde_json::Map<String, serde_json::Value>>,
    /// Seconds that its output files are kept.
    pub output_seconds: u64,
}

/// A batch that requests can see change.
pub struct Batch {
    record: Mutex<Record>,
    /// Somebody wants it to end.
    pub wake: Notify,
}

impl Batch {
    pub fn record(&self) -> Record {
        self.record.lock().clone()
    }

    pub fn status(&self) -> Status {
        self.record.lock().status
    }

    pub fn change(&self, change: impl FnOnce(&mut Record)) {
        change(&mut self.record.lock());
    }
}

struct Entry {
    meta: FileMeta,
    content: Content,
    /// When it is looked at whether it goes.
    expires_at: Option<u64>,
}

/// Bytes that are kept: of everybody, and of each owner. Files, and results that are no file yet.
#[derive(Default)]
struct Room {
    all: u64,
    own: HashMap<Arc<str>, u64>,
}

impl Room {
    fn take(&mut self, owner: &str, bytes: u64) {
        self.all += bytes;
        match self.own.get_mut(owner) {
            Some(own) => *own += bytes,
            None => drop(self.own.insert(owner.into(), bytes)),
        }
    }

    fn give_back(&mut self, owner: &str, bytes: u64) {
        self.all -= bytes;
        if let Some(own) = self.own.get_mut(owner) {
            *own -= bytes;
            if *own == 0 {
                self.own.remove(owner);
            }
        }
    }
}

/// What a batch's results take, until they are files.
struct Taken {
    room: Arc<Mutex<Room>>,
    owner: Arc<str>,
    bytes: u64,
}

impl Taken {
    fn grow(&mut self, more: u64) {
        self.room.lock().take(&self.owner, more);
        self.bytes += more;
    }
}

impl Drop for Taken {
    fn drop(&mut self) {
        self.room.lock().give_back(&self.owner, self.bytes);
    }
}

/// What one owner has, oldest first.
#[derive(Default)]
struct Own {
    files: IndexMap<String, Entry>,
    batches: IndexMap<String, Arc<Batch>>,
}

impl Own {
    /// Whether a batch that is not over reads the file.
    fn reads(&self, id: &str) -> bool {
        work::add(self.batches.len());
        self.batches.values().any(|batch| {
            let record = batch.record.lock();
            record.input_file_id == id && !record.status.is_final()
        })
    }
}

#[derive(Default)]
struct Inner {
    own: HashMap<String, Own>,
    /// When, whose and which file.
    expiring: BTreeSet<(u64, String, String)>,
}

impl Inner {
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
    inner: Mutex<Inner>,
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
        let mut records: Vec<Record> = read_all(&dir.join("batches"))?;
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
            let content = Content::Disk(self.data(&meta.id).unwrap_or_default());
            self.insert(meta, content);
        }
        for record in records {
            self.add(record);
        }
        Ok(())
    }

    fn data(&self, id: &str) -> Option<PathBuf> {
        Some(self.dir.as_ref()?.join("files").join(format!("{id}.data")))
    }

    fn insert(&self, meta: FileMeta, content: Content) {
        let mut inner = self.inner.lock();
        self.room.lock().take(&meta.owner, meta.bytes);
        let (owner, id, expires_at) = (meta.owner.clone(), meta.id.clone(), meta.expires_at);
        let own = inner.own.entry(owner.clone()).or_default();
        own.files.insert(id.clone(), Entry { meta, content, expires_at: None });
        if let Some(at) = expires_at {
            inner.expire(&owner, &id, at);
        }
    }

    fn add(&self, record: Record) -> Arc<Batch> {
        let (owner, id) = (record.owner.clone(), record.id.clone());
        let batch = Arc::new(Batch { wake: Notify::new(), record: Mutex::new(record) });
        self.inner.lock().own.entry(owner).or_default().batches.insert(id, batch.clone());
        batch
    }

    /// Keeps an uploaded file. Blocks while it is written.
    pub fn put(
        &self,
        owner: &str,
        filename: &str,
        bytes: &[u8],
        expires_at: Option<u64>,
    ) -> Result<FileMeta, ApiError> {
        let count = self.current().own.get(owner).map_or(0, |own| own.files.len());
        if count >= self.limits.files {
            let message = format!("You have {count} files, the limit is {}; delete some.", self.limits.files);
            return Err(full(message));
        }
        if !self.has_room(owner, bytes.len() as u64) {
            return Err(full(
                "There is no room for this file; delete others, or wait until batches expire.".into(),
            ));
        }
        let meta = FileMeta {
            version: VERSION,
            id: format!("file-{}", fresh_id()),
            owner: owner.to_owned(),
            bytes: bytes.len() as u64,
            created_at: unix_s(),
            expires_at,
            filename: filename.to_owned(),
            purpose: "batch".to_owned(),
        };
        let content = match self.data(&meta.id) {
            None => Content::Memory(bytes.into()),
            Some(path) => {
                let mut file = File::create(&path).map_err(storage)?;
                file.write_all(bytes).and_then(|()| file.sync_all()).map_err(storage)?;
                self.save_meta(&meta).map_err(storage)?;
                Content::Disk(path)
            }
        };
        self.insert(meta.clone(), content);
        Ok(meta)
    }

    fn save_meta(&self, meta: &FileMeta) -> io::Result<()> {
        let Some(dir) = &self.dir else { return Ok(()) };
        write_json(&dir.join("files").join(format!("{}.json", meta.id)), meta)
    }

    /// Whether so many bytes more fit: into all there may be, and into half of that for one owner.
    pub fn has_room(&self, owner: &str, more: u64) -> bool {
        let room = self.room.lock();
        let own = room.own.get(owner).copied().unwrap_or_default();
        room.all + more <= self.bytes_max && own + more <= self.bytes_max / 2
    }

    /// Without the files that are expired.
    fn current(&self) -> MutexGuard<'_, Inner> {
        self.at(unix_s())
    }

    fn at(&self, now: u64) -> MutexGuard<'_, Inner> {
        let mut inner = self.inner.lock();
        while inner.expiring.first().is_some_and(|(at, ..)| *at <= now) {
            let Some((_, owner, id)) = inner.expiring.pop_first() else { break };
            work::add(1);
            if inner.own.get(&owner).is_some_and(|own| own.reads(&id)) {
                inner.expire(&owner, &id, now + AGAIN_S);
            } else {
                self.remove(&mut inner, &owner, &id);
            }
        }
        inner
    }

    fn remove(&self, inner: &mut Inner, owner: &str, id: &str) {
        let Some(own) = inner.own.get_mut(owner) else { return };
        let Some(entry) = own.files.shift_remove(id) else { return };
        if own.files.is_empty() && own.batches.is_empty() {
            inner.own.remove(owner);
        }
        if let Some(at) = entry.expires_at {
            inner.expiring.remove(&(at, owner.to_owned(), id.to_owned()));
        }
        self.room.lock().give_back(owner, entry.meta.bytes);
        if let (Some(dir), Some(data)) = (&self.dir, self.data(id)) {
            // First what makes it a file; data alone is removed at the next start.
            let _ = fs::remove_file(dir.join("files").join(format!("{id}.json")));
            let _ = fs::remove_file(data);
        }
    }

    pub fn file(&self, owner: &str, id: &str) -> Option<(FileMeta, Content)> {
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
        self.remove(&mut inner, owner, id);
        Ok(true)
    }

    /// Keeps a new batch. The oldest of those that are over give way.
    pub fn begin(&self, record: Record) -> Result<Arc<Batch>, ApiError> {
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
        let record = Record { version: VERSION, ..batch.record() };
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

    /// Everybody's that go on, oldest first.
    pub fn unfinished(&self) -> Vec<Arc<Batch>> {
        let inner = self.inner.lock();
        let all = inner.own.values().flat_map(|own| own.batches.values());
        let mut all: Vec<_> = all.filter(|batch| !batch.status().is_final()).cloned().collect();
        all.sort_by_key(|batch| batch.record.lock().created_at);
        all
    }

    /// Where a batch's results go, behind those it has.
    pub fn results(&self, batch: &Arc<Batch>) -> io::Result<Results> {
        let record = batch.record();
        let open = |id: &str| match self.data(id) {
            None => Ok(Sink::Memory(Vec::new())),
            Some(path) => Sink::open(path),
        };
        let sinks = [open(&record.output_file_id)?, open(&record.error_file_id)?];
        let mut taken = Taken { room: self.room.clone(), owner: record.owner.into(), bytes: 0 };
        taken.grow(sinks.iter().map(Sink::bytes).sum());
        Ok(Results { batch: batch.clone(), sinks, taken })
    }

    /// Makes files of results; an empty one is none.
    pub fn publish(&self, results: Results) -> io::Result<()> {
        let record = results.batch.record();
        let now = unix_s();
        let ids = [(&record.output_file_id, "output"), (&record.error_file_id, "error")];
        // From here on they are files, or nothing.
        drop(results.taken);
        let mut published = [false; 2];
        for (at, (sink, (id, what))) in results.sinks.into_iter().zip(ids).enumerate() {
            let bytes = sink.bytes();
            let content = match sink {
                Sink::Memory(bytes) => Content::Memory(bytes.into()),
                Sink::Disk { file, path, bytes } => {
                    // A line that a full disk cut short is none.
                    file.set_len(bytes)?;
                    file.sync_all()?;
                    Content::Disk(path)
                }
            };
            published[at] = bytes > 0;
            if bytes == 0 {
                if let Content::Disk(path) = content {
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
            self.insert(meta, content);
        }
        results.batch.change(|record| record.published = published.into());
        Ok(())
    }
}

/// Results of a batch that runs.
pub struct Results {
    batch: Arc<Batch>,
    /// Of what was answered, and of what was not.
    sinks: [Sink; 2],
    taken: Taken,
}

enum Sink {
    Memory(Vec<u8>),
    Disk { file: File, path: PathBuf, bytes: u64 },
}

impl Sink {
    /// Behind the last whole line.
    fn open(path: PathBuf) -> io::Result<Self> {
        let mut file = OpenOptions::new().read(true).append(true).create(true).open(&path)?;
        let mut whole = 0;
        let mut reader = BufReader::new(&mut file);
        let mut line = Vec::new();
        loop {
            line.clear();
            match reader.read_until(b'\n', &mut line)? {
                0 => break,
                bytes if line.ends_with(b"\n") => whole += bytes as u64,
                _ => break,
            }
        }
        file.set_len(whole)?;
        Ok(Self::Disk { file, path, bytes: whole })
    }

    fn bytes(&self) -> u64 {
        match self {
            Self::Memory(bytes) => bytes.len() as u64,
            Self::Disk { bytes, .. } => *bytes,
        }
    }

    fn lines(&self) -> io::Result<Box<dyn BufRead + '_>> {
        Ok(match self {
            Self::Memory(bytes) => Box::new(bytes.as_slice()),
            Self::Disk { path, .. } => Box::new(BufReader::new(File::open(path)?)),
        })
    }
}

impl Results {
    /// Adds a line, to the answers or to the others.
    pub fn append(&mut self, answered: bool, line: &str) -> io::Result<()> {
        match &mut self.sinks[usize::from(!answered)] {
            Sink::Memory(bytes) => bytes.extend_from_slice(line.as_bytes()),
            Sink::Disk { file, bytes, .. } => {
                file.write_all(line.as_bytes())?;
                *bytes += line.len() as u64;
            }
        }
        self.taken.grow(line.len() as u64);
        Ok(())
    }

    /// Calls `each` with every line there is, and whether it is an answer.
    pub fn each(&self, mut each: impl FnMut(bool, &[u8])) -> io::Result<()> {
        for (sink, answered) in self.sinks.iter().zip([true, false]) {
            for line in sink.lines()?.split(b'\n') {
                each(answered, &line?);
            }
        }
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

fn listed(folder: &Path) -> io::Result<Vec<PathBuf>> {
    fs::read_dir(folder)?.map(|entry| Ok(entry?.path())).collect()
}

/// Every JSON file of a folder. What was not moved to its place is removed.
fn read_all<T: serde::de::DeserializeOwned + Versioned>(folder: &Path) -> Result<Vec<T>, String> {
    let mut all = Vec::new();
    for path in listed(folder).map_err(|error| error.to_string())? {
        let failed = |error: &dyn std::fmt::Display| format!("{}: {error}", path.display());
        match path.extension().and_then(|extension| extension.to_str()) {
            Some("json") => {
                let bytes = fs::read(&path).map_err(|error| failed(&error))?;
                let read: T = serde_json::from_slice(&bytes).map_err(|error| failed(&error))?;
                if read.version() > VERSION {
                    let newer =
                        "a newer version of this program wrote it; run that one, or give another folder";
                    return Err(failed(&newer));
                }
                all.push(read);
            }
            Some("new") => fs::remove_file(&path).map_err(|error| failed(&error))?,
            _ => {}
        }
    }
    Ok(all)
}

fn write_json(path: &Path, value: &impl Serialize) -> io::Result<()> {
    let fresh = path.with_extension("new");
    let mut file = File::create(&fresh)?;
    file.write_all(&serde_json::to_vec(value)?)?;
    file.sync_all()?;
    fs::rename(&fresh, path)?;
    match path.parent() {
        Some(folder) => File::open(folder)?.sync_all(),
        None => Ok(()),
    }
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

    fn record(input: &str) -> Record {
        let record = serde_json::json!({"id": "batch_1", "owner": "a", "key": "", "endpoint": "/v1/completions",
            "input_file_id": input, "output_file_id": "o", "error_file_id": "e", "published": [false, false],
            "status": "in_progress", "created_at": 1, "expires_at": 2, "errors": [],
            "counts": Counts::default(), "usage": Usage::default(), "output_seconds": 1});
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
    fn an_expired_file_goes_once_and_not_while_a_batch_reads_it() {
        let store = Store::open(&BatchConfig::default()).unwrap();
        let at = unix_s() + 1000;
        let put = |expires_at| store.put("a", "f", b"abc", expires_at).unwrap().id;
        let (read, other, kept) = (put(Some(at)), put(Some(at)), put(None));
        let batch = store.begin(record(&read)).unwrap();
        let left = |now| {
            let before = work::done();
            let ids: Vec<String> = store.at(now).own["a"].files.keys().cloned().collect();
            (ids, work::done() - before)
        };
        assert_eq!(left(at - 1), (vec![read.clone(), other, kept.clone()], 0));
        // Two are looked at, each with the one batch.
        assert_eq!(left(at), (vec![read.clone(), kept.clone()], 4));
        batch.change(|record| record.status = Status::Completed);
        assert_eq!(left(at + AGAIN_S - 1), (vec![read, kept.clone()], 0));
        assert_eq!(left(at + AGAIN_S).0, [kept.as_str()]);
        assert!(store.delete("a", &kept).unwrap());
        let room = store.room.lock();
        assert_eq!((room.all, room.own.len(), store.inner.lock().expiring.len()), (0, 0, 0));
    }
}
