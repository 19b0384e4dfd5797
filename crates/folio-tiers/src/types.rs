//! What the store is asked and what it answers.

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use folio_kv::{BlockHash, DEFAULT_PRIORITY, OPERATOR_PRIORITY, TenantId};
use zeroize::Zeroize;

use crate::clock::WallClock;

/// What a block is stored under: its content and its cache group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BlockKey {
    pub hash: BlockHash,
    pub group: u8,
}

/// What is kept with a block on a disk.
#[derive(Clone, Copy, Debug, Default)]
pub struct About<'a> {
    /// Whose it is, for who is told what is stored.
    pub tenant: TenantId,
    /// Of a block of group 0: the block before it, and its tokens; without these it is never told.
    pub parent: Option<BlockHash>,
    pub tokens: &'a [u32],
    /// From then on it is not found, in seconds since 1970.
    pub expires_s: Option<u32>,
    /// What is in the way of others first, and last.
    pub class: Class,
}

/// In which order content goes for other content.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Class {
    /// Of a priority below the default one: before everything else.
    Low,
    #[default]
    Ordinary,
    /// Declared by an operator: behind everything else.
    Declared,
}

impl Class {
    pub const ALL: [Self; 3] = [Self::Low, Self::Ordinary, Self::Declared];

    /// A higher priority than the default one orders its own tenant's content, never that of two tenants.
    pub fn of(priority: u8) -> Self {
        match priority {
            ..DEFAULT_PRIORITY => Self::Low,
            OPERATOR_PRIORITY.. => Self::Declared,
            _ => Self::Ordinary,
        }
    }
}

/// The secret that seals a tenant's blocks. It is never shown, and overwritten when it is dropped.
#[derive(Clone)]
pub struct DataKey(pub(crate) [u8; 32]);

impl From<[u8; 32]> for DataKey {
    fn from(key: [u8; 32]) -> Self {
        Self(key)
    }
}

impl fmt::Debug for DataKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("DataKey(..)")
    }
}

impl Drop for DataKey {
    fn drop(&mut self) {
        self.0.zeroize();
    }
}

/// A text that opens something. It is never shown.
#[derive(Clone)]
pub struct Secret(pub String);

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("***")
    }
}

#[derive(Clone, Debug)]
pub struct DiskConfig {
    pub dir: PathBuf,
    /// The most that the directory may take on disk.
    pub bytes: u64,
    /// What is written before a new file is begun, and what is reclaimed at once.
    pub segment_bytes: u64,
    /// Whether blocks are encrypted. Without it they are authenticated all the same.
    pub seal: bool,
    /// Of what a block's bytes mean: model, numerics, geometry. Blocks of another one are misses.
    pub layout_digest: [u8; 32],
    /// The most that is written in any 24 hours; `None`: as much as comes.
    pub write_bytes_per_day: Option<u64>,
    /// By which content expires.
    pub clock: WallClock,
    /// The directory is shared with other engines, each of which has one of its own in it.
    pub shared: Option<Sharing>,
}

/// How a folder is shared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sharing {
    /// Between two looks at the others' directories.
    pub refresh: Duration,
    /// An engine that said nothing for so long has ended.
    pub lease: Duration,
}

impl Default for Sharing {
    fn default() -> Self {
        Self { refresh: Duration::from_secs(2), lease: Duration::from_secs(30) }
    }
}

impl DiskConfig {
    pub fn new(dir: impl Into<PathBuf>, bytes: u64, layout_digest: [u8; 32]) -> Self {
        let segment_bytes = (bytes / 16).min(64 << 20) / 4096 * 4096;
        let (dir, clock) = (dir.into(), WallClock::default());
        Self {
            dir,
            bytes,
            segment_bytes,
            seal: true,
            layout_digest,
            write_bytes_per_day: None,
            clock,
            shared: None,
        }
    }
}

#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    #[error("another process writes KV blocks to {}: give each server a directory of its own", dir.display())]
    InUse { dir: PathBuf },
    #[error(
        "a disk tier of {bytes} bytes with segments of {segment_bytes} cannot work: a segment is a multiple of 4096 bytes, at least 16384, and there is room for at least two"
    )]
    Size { bytes: u64, segment_bytes: u64 },
    #[error("cannot use {} for KV blocks: {error}", dir.display())]
    Io { dir: PathBuf, error: std::io::Error },
}

/// Why a block was not found. Whatever was wrong with a record, it is not looked at again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
pub enum Miss {
    #[error("it is not stored")]
    Absent,
    #[error("it has another length")]
    Length,
    #[error("it was written for another layout")]
    Layout,
    #[error("it was written by another version")]
    Version,
    #[error("another block lies there")]
    Block,
    #[error("it is sealed by another key, or was tampered with")]
    Key,
    #[error("it is damaged")]
    Damaged,
    #[error("its file, or its server, could not be read")]
    Io,
    #[error("it did not come in time")]
    Late,
    #[error("its server is not asked")]
    Off,
    #[error("its time to live is over")]
    Expired,
}

impl Miss {
    pub const ALL: [Self; 11] = [
        Self::Absent,
        Self::Length,
        Self::Layout,
        Self::Version,
        Self::Block,
        Self::Key,
        Self::Damaged,
        Self::Io,
        Self::Late,
        Self::Off,
        Self::Expired,
    ];

    /// For metrics.
    pub fn name(self) -> &'static str {
        match self {
            Self::Absent => "absent",
            Self::Length => "length",
            Self::Layout => "layout",
            Self::Version => "version",
            Self::Block => "block",
            Self::Key => "key",
            Self::Damaged => "damaged",
            Self::Io => "io",
            Self::Late => "late",
            Self::Off => "off",
            Self::Expired => "expired",
        }
    }
}

/// It is written, and survives the death of the process from here on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stored {
    New,
    /// It had been stored before.
    There,
}

#[derive(Debug, thiserror::Error)]
pub enum PutError {
    #[error("no segment can be reclaimed just now")]
    Full,
    #[error("the bytes that may be written in a day are used up")]
    WriteBudget,
    #[error("a block of {bytes} bytes is larger than a segment takes, which is {most}")]
    TooLarge { bytes: usize, most: usize },
    #[error("the disk tier no longer writes")]
    Off,
    #[error("writing failed: {0}")]
    Io(#[from] std::io::Error),
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DiskState {
    /// What the directory has is still being read: what is not known yet is a miss.
    Opening,
    On,
    /// Nothing is written any more; what is there is still read.
    Off {
        reason: String,
    },
}

#[derive(Clone, Debug)]
pub struct DiskStats {
    pub state: DiskState,
    /// That can be found.
    pub blocks: u64,
    /// That the directory takes on disk, the room of the segment that is being written included.
    pub bytes: u64,
    /// Of them, what callers stored.
    pub payload_bytes: u64,
    pub segments: u64,
    /// Written since the start, and what of it callers stored.
    pub bytes_written: u64,
    pub payload_written: u64,
    pub hits: u64,
    /// By [`Miss`], in the order of [`Miss::ALL`].
    pub misses: [u64; Miss::ALL.len()],
    /// That could be found and went with their segments.
    pub reclaimed_blocks: u64,
    /// Written again when their segments went, of the bytes written.
    pub bytes_copied: u64,
    /// Whether files are read and written past the page cache.
    pub direct: bool,
}

impl DiskStats {
    pub fn misses(&self, reason: Miss) -> u64 {
        self.misses[reason as usize]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn secrets_are_in_nothing_that_is_printed() {
        let (key, url) = (DataKey([0xab; 32]), Secret("valkey://me:hidden@host".into()));
        assert_eq!(format!("{key:?} {url:?}"), "DataKey(..) ***");
    }
}
