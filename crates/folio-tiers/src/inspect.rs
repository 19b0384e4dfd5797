//! What a directory holds, looked at without a server. No key is needed: damage shows in checksums.
//!
//! Nobody else may use the directory meanwhile: the same lock as a server's is taken.

use std::io;
use std::path::Path;
use std::time::Duration;

use crate::export::whole;
use crate::io::{Directory, File, Folder};
use crate::segment::{self, Contents, Entry, Found};
use crate::types::OpenError;

/// What is to be said of a segment's file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SegmentState {
    /// It was ended, and lists its blocks.
    Ended,
    /// Its process was killed, or its list is damaged: blocks are found one by one.
    Open,
    /// Another version wrote it.
    Foreign,
    Unreadable,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SegmentInfo {
    pub number: u32,
    pub state: SegmentState,
    /// Of its file.
    pub bytes: u64,
    /// Since it was last written.
    pub age: Duration,
    pub blocks: u64,
    pub payload_bytes: u64,
    /// Of its blocks.
    pub layout: [u8; 32],
    /// Blocks that are not what was written, where that was asked for.
    pub damaged: Option<u64>,
}

pub(crate) fn open(dir: &Path) -> Result<Directory, OpenError> {
    if !dir.is_dir() {
        let error = io::Error::new(io::ErrorKind::NotFound, "there is no such folder");
        return Err(OpenError::Io { dir: dir.to_owned(), error });
    }
    match Directory::open(dir) {
        Ok(Some(directory)) => Ok(directory),
        Ok(None) => Err(OpenError::InUse { dir: dir.to_owned() }),
        Err(error) => Err(OpenError::Io { dir: dir.to_owned(), error }),
    }
}

/// The segments of a directory, the oldest first. `verify`: every block is read.
pub fn segments(dir: &Path, verify: bool) -> Result<Vec<SegmentInfo>, OpenError> {
    let folder = open(dir)?;
    let mut files = folder.list().map_err(|error| OpenError::Io { dir: dir.to_owned(), error })?;
    files.sort_by(|a, b| a.name.cmp(&b.name));
    let segment = |file: crate::io::Listed| {
        let number = segment::number(&file.name)?;
        let read = folder.open(&file.name).and_then(|open| Ok((segment::read(&*open, false)?, open)));
        let (state, contents, open) = match read {
            Ok((Found::Footer(contents), open)) => (SegmentState::Ended, contents, Some(open)),
            Ok((Found::Scanned(contents), open)) => (SegmentState::Open, contents, Some(open)),
            Ok((Found::Foreign, _)) => (SegmentState::Foreign, Contents::default(), None),
            Err(_) => (SegmentState::Unreadable, Contents::default(), None),
        };
        let is_damaged =
            |open: &dyn File, entry: &&Entry| !matches!(whole(open, entry, &contents.layout), Ok(Some(_)));
        let damaged = open
            .filter(|_| verify)
            .map(|open| contents.entries.iter().filter(|entry| is_damaged(&*open, entry)).count() as u64);
        Some(SegmentInfo {
            number,
            state,
            bytes: file.bytes,
            age: file.age,
            blocks: contents.entries.len() as u64,
            payload_bytes: contents.entries.iter().map(|entry| u64::from(entry.length)).sum(),
            layout: contents.layout,
            damaged,
        })
    };
    Ok(files.into_iter().filter_map(segment).collect())
}

/// Deletes the segments that were not written for longest until the rest takes at most `bytes`; those of other versions stay. Returns what
/// was deleted.
pub fn shrink(dir: &Path, bytes: u64) -> Result<Vec<SegmentInfo>, OpenError> {
    let mut all = segments(dir, false)?;
    let folder = open(dir)?;
    let mut left: u64 = all.iter().map(|segment| segment.bytes).sum();
    all.retain(|segment| segment.state != SegmentState::Foreign);
    all.sort_by_key(|segment| (std::cmp::Reverse(segment.age), segment.number));
    let mut deleted = Vec::new();
    for segment in all {
        if left <= bytes {
            break;
        }
        let removed = folder.remove(&segment::name(segment.number));
        removed.map_err(|error| OpenError::Io { dir: dir.to_owned(), error })?;
        left -= segment.bytes;
        deleted.push(segment);
    }
    Ok(deleted)
}
