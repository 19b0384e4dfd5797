//! What is kept of files and batches, and how it is written: JSON with a version ([`VERSION`]). What an older program wrote is read,
//! what a newer one wrote is refused. JSON is written beside its place, synchronized and moved there.

use std::fs::{self, File};
use std::io::{self, BufRead, BufReader, Cursor, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use tokio::sync::Notify;

use super::lines::{BatchUsage, Endpoint, LineError, LineSpan};

/// Of what is written. 0: before there were versions, otherwise like 1. Whoever changes what a record means counts it up and reads
/// the older ones too.
pub const VERSION: u32 = 1;
/// What was written of something, and in which version.
pub trait Versioned {
    fn version(&self) -> u32;
}

impl Versioned for FileMeta {
    fn version(&self) -> u32 {
        self.version
    }
}

impl Versioned for BatchRecord {
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
pub enum FileContent {
    Memory(Arc<[u8]>),
    Disk(PathBuf),
}

impl FileContent {
    pub fn reader(&self) -> io::Result<Box<dyn BufRead + Send>> {
        Ok(match self {
            Self::Memory(bytes) => Box::new(Cursor::new(bytes.clone())),
            Self::Disk(path) => Box::new(BufReader::new(File::open(path)?)),
        })
    }

    pub fn line(&self, place: LineSpan) -> io::Result<Vec<u8>> {
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
pub enum BatchStatus {
    Validating,
    InProgress,
    Finalizing,
    Completed,
    Failed,
    Expired,
    Cancelling,
    Cancelled,
}

impl BatchStatus {
    pub fn is_final(self) -> bool {
        matches!(self, Self::Completed | Self::Failed | Self::Expired | Self::Cancelled)
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct BatchCounts {
    pub total: u64,
    pub completed: u64,
    pub failed: u64,
}

/// A batch as it is kept.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct BatchRecord {
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
    pub status: BatchStatus,
    pub created_at: u64,
    pub expires_at: u64,
    pub in_progress_at: Option<u64>,
    pub finalizing_at: Option<u64>,
    pub cancelling_at: Option<u64>,
    /// When it came to its last status.
    pub ended_at: Option<u64>,
    pub errors: Vec<LineError>,
    pub counts: BatchCounts,
    pub usage: BatchUsage,
    pub metadata: Option<serde_json::Map<String, serde_json::Value>>,
    /// Seconds that its output files are kept.
    pub output_seconds: u64,
}

/// A batch that requests can see change.
pub struct Batch {
    record: Mutex<BatchRecord>,
    /// Somebody wants it to end.
    pub wake: Notify,
}

impl Batch {
    pub fn new(record: BatchRecord) -> Arc<Self> {
        Arc::new(Self { record: Mutex::new(record), wake: Notify::new() })
    }

    /// Whether it goes on and reads this file.
    pub fn reads(&self, file: &str) -> bool {
        let record = self.record.lock();
        record.input_file_id == file && !record.status.is_final()
    }

    pub fn record(&self) -> BatchRecord {
        self.record.lock().clone()
    }

    pub fn status(&self) -> BatchStatus {
        self.record.lock().status
    }

    pub fn change(&self, change: impl FnOnce(&mut BatchRecord)) {
        change(&mut self.record.lock());
    }
}

pub fn listed(folder: &Path) -> io::Result<Vec<PathBuf>> {
    fs::read_dir(folder)?.map(|entry| Ok(entry?.path())).collect()
}

/// Every JSON file of a folder. What was not moved to its place is removed.
pub fn read_all<T: serde::de::DeserializeOwned + Versioned>(folder: &Path) -> Result<Vec<T>, String> {
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

pub fn write_json(path: &Path, value: &impl Serialize) -> io::Result<()> {
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
