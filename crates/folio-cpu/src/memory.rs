//! Large buffers: anonymous mappings on huge pages.
//!
//! Owns: [`HugeBuffer`] (bytes) and [`Floats`] (row buffers that workers share). Must never: know what the bytes mean.
//! Invariants: zeroed when made, aligned to a page (so to 64 bytes), readable 64 bytes past the end (kernels load whole
//! vectors). Pages are taken when they are first written.

use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;

use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};

use crate::error::CpuError;
use crate::packed_file::FileMap;

/// Readable bytes past the end of every buffer.
pub(crate) const SLACK: usize = 64;
const HUGE_PAGE: usize = 2 << 20;

/// An anonymous mapping that asks for huge pages; or part of a packed file, which is only ever read.
#[derive(Debug)]
pub(crate) struct HugeBuffer {
    start: NonNull<u8>,
    bytes: usize,
    mapped: usize,
    /// The mapping it is part of, where it has none of its own.
    file: Option<Arc<FileMap>>,
}

// SAFETY: the mapping belongs to this value alone; it is plain memory without thread affinity.
unsafe impl Send for HugeBuffer {}
// SAFETY: shared access hands out pointers only; who dereferences them states why that is not a race.
unsafe impl Sync for HugeBuffer {}

impl HugeBuffer {
    pub(crate) fn zeroed(bytes: usize) -> Result<Self, CpuError> {
        let too_large =
            || CpuError::Map { needed_bytes: bytes, reason: std::io::ErrorKind::OutOfMemory.into() };
        // Whole huge pages, so that the kernel aligns the mapping to them.
        let unit = if bytes >= HUGE_PAGE { HUGE_PAGE } else { 4096 };
        let mapped =
            bytes.checked_add(SLACK).and_then(|n| n.checked_next_multiple_of(unit)).ok_or_else(too_large)?;
        // SAFETY: a fresh private mapping at an address of the kernel's choice touches no existing memory.
        let start = unsafe {
            mmap_anonymous(
                std::ptr::null_mut(),
                mapped,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::PRIVATE,
            )
        }
        .map_err(|e| CpuError::Map { needed_bytes: bytes, reason: e.into() })?;
        if mapped >= HUGE_PAGE {
            // SAFETY: the range is the mapping just made; the advice does not change its content. A kernel without
            // transparent huge pages refuses, which costs speed only.
            let _ = unsafe { madvise(start, mapped, Advice::LinuxHugepage) };
        }
        let start = NonNull::new(start.cast()).ok_or_else(too_large)?;
        Ok(Self { start, bytes, mapped, file: None })
    }

    /// A page-aligned range of a mapped file, if it and the readable bytes past it lie inside. Never written to.
    pub(crate) fn of_file(file: &Arc<FileMap>, range: Range<usize>) -> Option<Self> {
        let start = file.part(range.start..range.end.checked_add(SLACK)?)?;
        Some(Self { start, bytes: range.len(), mapped: 0, file: Some(file.clone()) })
    }

    pub(crate) fn is_file(&self) -> bool {
        self.file.is_some()
    }

    /// The bytes, when nobody writes them any more: weights after packing.
    pub(crate) fn bytes(&self) -> &[u8] {
        // SAFETY: the mapping is initialized (zeroed, or a file), at least this long, and borrowed with `self`; that nobody
        // writes is the caller's word, and packing is the only writer of weights.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.bytes) }
    }

    pub(crate) fn len(&self) -> usize {
        self.bytes
    }

    pub(crate) fn ptr(&self) -> *mut u8 {
        self.start.as_ptr()
    }
}

impl Drop for HugeBuffer {
    fn drop(&mut self) {
        if self.file.is_some() {
            return;
        }
        // SAFETY: the range was mapped by `zeroed` and nothing borrowed from it outlives `self`.
        let _ = unsafe { munmap(self.start.as_ptr().cast(), self.mapped) };
    }
}

/// Gives memory that was freed back to the system, where the C library keeps it for later. Loading a model frees much that
/// serving it never needs again.
pub fn trim_heap() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    {
        // SAFETY: the signature is that of glibc's <malloc.h>.
        unsafe extern "C" {
            /// Of glibc: releases free pages of every arena, and keeps `pad` bytes at the top of the heap.
            fn malloc_trim(pad: usize) -> std::ffi::c_int;
        }
        // SAFETY: it takes no pointer, may be called from any thread, and touches free memory only.
        unsafe { malloc_trim(0) };
    }
}

/// `[rows, width]` f32 values with rows padded to a whole number of vectors.
#[derive(Debug)]
pub(crate) struct Floats {
    memory: HugeBuffer,
    width: usize,
    stride: usize,
}

impl Floats {
    pub(crate) fn zeroed(rows: usize, width: usize) -> Result<Self, CpuError> {
        Self::with_stride(rows, width, width.next_multiple_of(crate::simd::LANES))
    }

    /// Rows that touch each other: what callers outside see as one slice.
    pub(crate) fn dense(rows: usize, width: usize) -> Result<Self, CpuError> {
        Self::with_stride(rows, width, width)
    }

    fn with_stride(rows: usize, width: usize, stride: usize) -> Result<Self, CpuError> {
        let bytes = rows.saturating_mul(stride).saturating_mul(4);
        Ok(Self { memory: HugeBuffer::zeroed(bytes)?, width, stride })
    }

    pub(crate) fn view(&self) -> Rows {
        Rows { start: self.memory.ptr().cast(), width: self.width, stride: self.stride }
    }

    /// Rows of `width` values that start at value `start`, `stride` apart.
    pub(crate) fn part(&self, start: usize, width: usize, stride: usize) -> Rows {
        Rows { start: self.view().start.wrapping_add(start), width, stride }
    }
}

/// A pointer to row buffers, copied into kernels.
///
/// Workers write disjoint parts between two barriers; every use says which.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rows {
    start: *mut f32,
    pub(crate) width: usize,
    pub(crate) stride: usize,
}

// SAFETY: a pointer; dereferencing it is what needs, and has, a reason.
unsafe impl Send for Rows {}
// SAFETY: as above.
unsafe impl Sync for Rows {}

impl Rows {
    /// Start of row `row`. Pointer arithmetic only.
    #[inline(always)]
    pub(crate) fn row(&self, row: usize) -> *mut f32 {
        self.start.wrapping_add(row * self.stride)
    }

    /// The first `rows` rows as one slice.
    ///
    /// # Safety
    /// They touch each other, and nobody writes there or frees them as long as the slice is used.
    pub(crate) unsafe fn dense<'a>(self, rows: usize) -> &'a [f32] {
        debug_assert_eq!(self.stride, self.width);
        // SAFETY: the contract of this function.
        unsafe { std::slice::from_raw_parts(self.start, rows * self.width) }
    }

    /// Of each row `width` values from `at` on.
    pub(crate) fn columns(self, at: usize, width: usize) -> Self {
        Self { start: self.start.wrapping_add(at), width, ..self }
    }

    /// The rows from `row` on.
    pub(crate) fn from(self, row: usize) -> Self {
        Self { start: self.row(row), ..self }
    }
}
