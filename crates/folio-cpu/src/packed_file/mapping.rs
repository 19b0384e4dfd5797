//! A packed file in memory.
//!
//! Owns: the mapping and the open file behind it, locked so that nobody takes it for unused. Must never: write.
//! Invariant: the mapping starts at a multiple of 2 MiB, as the file does, so that the kernel can map whole huge pages of
//! its cache: a file written in such units then costs no more faults and no more TLB misses than memory of our own.
//!
//! A file changed by someone else while it is mapped gives wrong weights, and one cut short ends the process with SIGBUS.
//! Folio itself never does either: it writes a new file and renames it into place.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::ptr::NonNull;

use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, mmap_anonymous, munmap};

use super::CHUNK;

/// A whole file, read-only.
#[derive(Debug)]
pub(crate) struct FileMap {
    start: NonNull<u8>,
    bytes: usize,
    /// Addresses set aside, of which the mapping is the aligned part.
    reserved: NonNull<u8>,
    reserved_bytes: usize,
    /// Holds the shared lock.
    _file: File,
}

// SAFETY: the mapping belongs to this value alone and is never written to.
unsafe impl Send for FileMap {}
// SAFETY: as above; shared access only reads.
unsafe impl Sync for FileMap {}

impl FileMap {
    /// Maps the first `bytes` of a file, which has at least that many.
    pub(crate) fn new(file: File, bytes: usize) -> io::Result<Self> {
        let none = || io::Error::from(io::ErrorKind::OutOfMemory);
        let reserved_bytes = bytes.checked_add(CHUNK).ok_or_else(none)?;
        // SAFETY: fresh addresses of the kernel's choice, without access: no existing memory is touched.
        let reserved = unsafe {
            let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
            mmap_anonymous(std::ptr::null_mut(), reserved_bytes, ProtFlags::empty(), flags)?
        };
        let reserved = NonNull::new(reserved.cast::<u8>()).ok_or_else(none)?;
        let skip = reserved.as_ptr().addr().next_multiple_of(CHUNK) - reserved.as_ptr().addr();
        let start = reserved.as_ptr().wrapping_add(skip);
        // SAFETY: `start .. start + bytes` lies inside the addresses just reserved, because `skip` is below CHUNK; nothing
        // else knows of them, so replacing them touches no memory in use.
        let mapped = unsafe {
            mmap(start.cast(), bytes, ProtFlags::READ, MapFlags::PRIVATE | MapFlags::FIXED, &file, 0)
        };
        let mut map = Self { start: reserved, bytes, reserved, reserved_bytes, _file: file };
        // A failure drops `map`, which gives the addresses back.
        map.start = NonNull::new(mapped?.cast()).ok_or_else(none)?;
        // SAFETY: the range is the mapping just made; the advice does not change its content. What is not in the page cache
        // is then read in huge pages, where the file system can; a kernel that cannot refuses, which costs speed only.
        let _ = unsafe { madvise(map.start.as_ptr().cast(), bytes, Advice::LinuxHugepage) };
        Ok(map)
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        // SAFETY: the mapping is readable for `bytes` and lives as long as `self`. That nobody changes the file meanwhile is
        // the module's stated assumption; the bytes are only ever read as plain numbers.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.bytes) }
    }

    /// Start of a range, if it lies inside.
    pub(crate) fn part(&self, range: Range<usize>) -> Option<NonNull<u8>> {
        let part = self.bytes().get(range)?;
        NonNull::new(part.as_ptr().cast_mut())
    }
}

impl Drop for FileMap {
    fn drop(&mut self) {
        // SAFETY: these addresses were reserved by `new`, and nothing borrowed from them outlives `self`.
        let _ = unsafe { munmap(self.reserved.as_ptr().cast(), self.reserved_bytes) };
    }
}
