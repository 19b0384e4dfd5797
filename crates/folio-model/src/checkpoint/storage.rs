//! Bytes of a weight file: memory-mapped, or part of the program itself.
//!
//! Owns: the only `unsafe` of this crate. Must never: be written to. Pages of a mapping are read from disk when touched
//! and belong to the page cache; [`Storage::release`] gives them back once a tensor has been packed, so that resident
//! memory is the packed weights and not twice that.

#![allow(unsafe_code)]

use std::fs::{File, Metadata};
use std::io;
use std::ops::Range;
use std::os::unix::fs::MetadataExt;

use memmap2::{Mmap, UncheckedAdvice};

pub enum Storage {
    Mapped(Mmap, Stamp),
    /// Built into the program.
    Static(&'static [u8]),
}

/// Tells a file from any other and from itself after a change: device, inode, length, and the times (s, ns) of the last
/// change of its content and of anything about it. Where it lies and what it is called do not matter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stamp(pub [u64; 7]);

impl Stamp {
    pub fn of(file: &Metadata) -> Self {
        Self([
            file.dev(),
            file.ino(),
            file.len(),
            file.mtime() as u64,
            file.mtime_nsec() as u64,
            file.ctime() as u64,
            file.ctime_nsec() as u64,
        ])
    }
}

impl Storage {
    /// Maps a file for reading.
    pub fn map(file: &File) -> io::Result<Self> {
        let metadata = file.metadata()?;
        if metadata.len() == 0 {
            return Ok(Storage::Static(&[]));
        }
        // SAFETY: the mapping is private and read-only. Rust also wants the bytes not to change while they are borrowed:
        // a checkpoint is not written to while it is served (the downloader renames complete files into place and never
        // rewrites one). A file changed by someone else gives wrong weights, and one cut short ends the process with
        // SIGBUS; neither can corrupt this process's own memory, since the bytes are only ever read as plain numbers and
        // every length used was checked against the mapping's own.
        let map = unsafe { Mmap::map(file)? };
        Ok(Storage::Mapped(map, Stamp::of(&metadata)))
    }

    /// What the file was when it was mapped; `None` without a file.
    pub fn stamp(&self) -> Option<Stamp> {
        match self {
            Storage::Mapped(_, stamp) => Some(*stamp),
            Storage::Static(_) => None,
        }
    }

    pub fn bytes(&self) -> &[u8] {
        match self {
            Storage::Mapped(map, _) => map,
            Storage::Static(bytes) => bytes,
        }
    }

    /// Drops the resident pages that lie wholly inside `range`; reading them again fetches them from the file.
    pub fn release(&self, range: Range<usize>) {
        const PAGE: usize = 4096;
        let Storage::Mapped(map, _) = self else { return };
        // Partial pages at both ends are shared with neighbours that may not have been read yet.
        let start = range.start.next_multiple_of(PAGE);
        let end = range.end.min(map.len()) / PAGE * PAGE;
        if start >= end {
            return;
        }
        // SAFETY: MADV_DONTNEED on a read-only, file-backed private mapping never modifies what later reads see: there
        // are no private dirty pages to lose, and the next access faults the same file bytes in again. The range was
        // clamped to the mapping above. Failure only costs memory, so it is ignored.
        let _ = unsafe { map.unchecked_advise_range(UncheckedAdvice::DontNeed, start, end - start) };
    }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;
    use std::io::Write;

    /// Resident bytes of the mapping that starts at `address`.
    fn resident_bytes(address: usize) -> usize {
        let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let mapping = maps.split_once(&format!("{address:x}-")).unwrap().1;
        let line = mapping.lines().find(|line| line.starts_with("Rss:")).unwrap();
        line.split_whitespace().nth(1).unwrap().parse::<usize>().unwrap() * 1024
    }

    #[test]
    fn released_pages_leave_memory_and_read_the_same_again() {
        const SIZE: usize = 4 << 20;
        let mut file = tempfile::tempfile().unwrap();
        let content: Vec<u8> = (0..SIZE).map(|i| (i / 4096) as u8).collect();
        file.write_all(&content).unwrap();
        let storage = Storage::map(&file).unwrap();
        let address = storage.bytes().as_ptr() as usize;
        assert!(storage.bytes() == content);
        assert_eq!(resident_bytes(address), SIZE);
        // The first and last pages are partly outside of the range, so they may stay.
        storage.release(100..SIZE - 100);
        assert!(resident_bytes(address) <= 2 * 4096);
        assert!(storage.bytes() == content);
        storage.release(SIZE..SIZE + 4096);
        storage.release(0..usize::MAX);
        assert_eq!(resident_bytes(address), 0);
    }

    #[test]
    fn an_empty_file_is_no_bytes() {
        assert!(Storage::map(&tempfile::tempfile().unwrap()).unwrap().bytes().is_empty());
    }
}
