//! Packed weights on disk, so that a second start maps them instead of packing again.
//!
//! Owns: the file format, writing it, checking it, mapping it. Must never: know which model it holds (the loader's own
//! bytes, `about`, are carried and not read), or hand out a byte that does not have its checksum.
//!
//! # What is assumed of the medium
//!
//! A rename within a folder is atomic and does not overtake an fsync of the file renamed. Nothing else: a file may be cut
//! short, hold other bytes than were written, or be of another version of Folio. Each of these is an error that says so.
//!
//! # The file
//!
//! All numbers are little endian; `count` is a u32 followed by so many entries.
//!
//! | bytes | what |
//! |---|---|
//! | 8 | `FOLIOPAK` |
//! | 4, 4 | version of the format, bytes of the header (from byte 0) |
//! | 8 | XXH3-64 of the rest of the header |
//! | 8 | layout of the packed weights ([`LAYOUT`]) |
//! | 8, 8 | bytes of the file; start of the data, a multiple of 2 MiB |
//! | count x 1 | `about`: the loader's |
//! | count | matrices: rows u64, columns u64, count (0 or 1) of the section with the order of columns, count of segments: name of the encoding (count x 1), rows u64, section |
//! | count | vectors: values u64, section |
//! | count x 8 | XXH3-64 of every 2 MiB of the data |
//!
//! A section is the u64 offset of its first byte, a multiple of 4,096; its size follows from the shape. Sections hold
//! panels exactly as they lie in memory (see `packed` and `quant`), f32 values, or u32 columns. Between and after them are
//! zeros, and at least 64 bytes of them at the end.
//!
//! Everything is written in aligned units of 2 MiB: file systems with large folios then hold the file in huge pages, which
//! the mapping uses as they are. Cost of a start: one read of the file from the page cache, by all threads, for checksums.

mod header;
mod mapping;
mod write;

#[cfg(test)]
mod tests;

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use twox_hash::XxHash3_64;

pub use header::{Header, HeaderError, header_bytes};
pub(crate) use mapping::FileMap;
pub use write::PackedWeights;

use crate::error::CpuError;
use crate::memory::HugeBuffer;
use crate::packed::{PackedMatrix, Segment};
use crate::pool::{Claims, ThreadPool};
use crate::simd::LANES;

const MAGIC: &[u8; 8] = b"FOLIOPAK";
const VERSION: u32 = 1;
/// What the bytes of panels mean; the same on every instruction set. A test holds it against the packed bytes of every
/// encoding: whoever changes a layout changes this number.
const LAYOUT: u64 = 1;
/// Unit of writing and of checksums: a huge page.
const CHUNK: usize = 2 << 20;
/// Sections start at multiples of a page.
const ALIGN: usize = 4096;

/// Digest of everything besides the model that decides which bytes are in a packed file.
pub fn layout() -> [u64; 2] {
    [VERSION.into(), LAYOUT]
}

/// A packed file whose header is sound. Its data is checked when it is loaded.
pub struct PackedFile {
    shown: String,
    file: File,
    header: Header,
}

impl PackedFile {
    /// Opens a file and reads its header. While it is open, or its weights are, it holds a shared lock.
    pub fn open(path: &Path) -> Result<Self, CpuError> {
        let shown = path.display().to_string();
        let io = |source| CpuError::Io { file: shown.clone(), source };
        let file = File::open(path).map_err(io)?;
        // Without locks on this file system, a file in use may be removed, which does not disturb who has it open.
        let _ = file.try_lock_shared();
        let bytes = file.metadata().map_err(io)?.len();
        let header = read_header(&file, bytes).map_err(io)?;
        let header = header.map_err(|error| match error {
            HeaderError::NotPacked => CpuError::NotPacked { file: shown.clone() },
            HeaderError::OtherLayout => CpuError::OtherLayout { file: shown.clone() },
            HeaderError::Damaged(problem) => CpuError::Damaged { file: shown.clone(), problem },
        })?;
        Ok(Self { shown, file, header })
    }

    /// What the loader wrote there.
    pub fn about(&self) -> &[u8] {
        &self.header.about
    }

    /// Numbers of matrices and vectors.
    pub fn counts(&self) -> (usize, usize) {
        (self.header.matrices.len(), self.header.vectors.len())
    }

    pub fn bytes(&self) -> u64 {
        self.header.file_bytes
    }

    /// Maps the data, checks all of it with every thread, and gives the weights.
    pub(crate) fn load(self, pool: &mut ThreadPool) -> Result<PackedWeights, CpuError> {
        let Self { shown, file, header } = self;
        let map = FileMap::new(file, header.file_bytes as usize);
        let map = Arc::new(map.map_err(|source| CpuError::Io { file: shown.clone(), source })?);
        if let Some(chunk) = first_damaged(map.bytes(), &header, pool)? {
            let from = header.data_start + (chunk * CHUNK) as u64;
            let problem = format!("the 2 MiB from byte {from} do not have their checksum");
            return Err(CpuError::Damaged { file: shown, problem });
        }
        let problem = |problem| CpuError::Damaged { file: shown.clone(), problem };
        weights(&map, &header).map_err(problem)
    }
}

fn read_header(file: &File, bytes: u64) -> std::io::Result<Result<Header, HeaderError>> {
    let mut start = vec![0; 16.min(bytes) as usize];
    file.read_exact_at(&mut start, 0)?;
    let length = match header_bytes(&start) {
        Ok(length) => length.min(bytes),
        Err(error) => return Ok(Err(error)),
    };
    let mut header = vec![0; length as usize];
    file.read_exact_at(&mut header, 0)?;
    Ok(Header::parse(&header, bytes))
}

/// The first unit of data that is not what was written.
fn first_damaged(bytes: &[u8], header: &Header, pool: &mut ThreadPool) -> Result<Option<usize>, CpuError> {
    let data = &bytes[header.data_start as usize..];
    let damaged = AtomicU64::new(u64::MAX);
    let claims = Claims::default();
    pool.run(&|_| {
        while let Some(chunks) = claims.next(header.sums.len(), 8) {
            for index in chunks {
                let chunk = &data[index * CHUNK..data.len().min((index + 1) * CHUNK)];
                if XxHash3_64::oneshot(chunk) != header.sums[index] {
                    damaged.fetch_min(index as u64, Ordering::Relaxed);
                }
            }
        }
    })?;
    let first = damaged.into_inner();
    Ok((first != u64::MAX).then_some(first as usize))
}

/// Weights whose memory is the mapping. The sections were checked by [`Header::parse`].
fn weights(map: &Arc<FileMap>, header: &Header) -> Result<PackedWeights, String> {
    let bytes = |section: header::Section| {
        map.bytes().get(section.range()).ok_or("a section lies outside of it".to_owned())
    };
    let mut matrices = Vec::with_capacity(header.matrices.len());
    for entry in &header.matrices {
        let order = entry.order.map(|section| order(bytes(section)?)).transpose()?;
        let mut matrix = PackedMatrix { rows: 0, cols: entry.cols, segments: Vec::new(), order };
        for segment in &entry.segments {
            let memory = HugeBuffer::of_file(map, segment.panels.range());
            let memory = memory.ok_or("a section lies outside of it")?;
            let at = matrix.rows;
            matrix.segments.push(Segment::new(segment.encoding, segment.rows, at, entry.cols, memory));
            matrix.rows += segment.rows;
        }
        matrices.push(matrix);
    }
    let mut vectors = Vec::with_capacity(header.vectors.len());
    for entry in &header.vectors {
        let bytes = bytes(entry.values)?;
        let mut values: Vec<f32> = bytes.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect();
        values.resize(entry.len.next_multiple_of(LANES), 0.0);
        vectors.push((entry.len, values));
    }
    Ok(PackedWeights { matrices, vectors })
}

/// An order of columns, which kernels index with unchecked.
fn order(bytes: &[u8]) -> Result<Box<[u32]>, String> {
    let order: Box<[u32]> = bytes.as_chunks().0.iter().map(|b| u32::from_le_bytes(*b)).collect();
    let mut seen = vec![false; order.len()];
    let fresh =
        |column: &u32| seen.get_mut(*column as usize).is_some_and(|seen| !std::mem::replace(seen, true));
    if order.iter().all(fresh) { Ok(order) } else { Err("an order of columns is no permutation".to_owned()) }
}
