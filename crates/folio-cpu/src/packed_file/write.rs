//! Writing a packed file.
//!
//! Owns: where everything lies, and that a file appears under its name complete or not at all. Cost: one pass over the
//! weights, 2 MiB of memory.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use twox_hash::XxHash3_64;

use super::header::{Header, MatrixEntry, Section, SegmentEntry, VectorEntry};
use super::{ALIGN, CHUNK};
use crate::error::CpuError;
use crate::memory::SLACK;
use crate::packed::PackedMatrix;

/// The weights of a backend, sharing its memory: they can be written while the backend runs.
pub struct PackedWeights {
    pub(crate) matrices: Vec<PackedMatrix>,
    pub(crate) vectors: Vec<(usize, Vec<f32>)>,
}

/// Called with the bytes written so far and in all; `false` gives up.
pub type Progress<'a> = &'a mut dyn FnMut(u64, u64) -> bool;

impl PackedWeights {
    /// The first so many matrices and vectors.
    pub fn first(mut self, (matrices, vectors): (usize, usize)) -> Self {
        self.matrices.truncate(matrices);
        self.vectors.truncate(vectors);
        self
    }

    /// Bytes that the file will have, to within its header.
    pub fn file_bytes(&self) -> u64 {
        self.plan(&[]).file_bytes
    }

    /// Writes the file under a temporary name beside `path`, which ends in `.tmp` and is locked meanwhile, and renames it
    /// when it is complete and on the disk.
    pub fn write(&self, path: &Path, about: &[u8], progress: Progress<'_>) -> Result<(), CpuError> {
        let mut name = path.file_name().unwrap_or_default().to_owned();
        name.push(format!(".{}.tmp", std::process::id()));
        let temporary = Temporary(path.with_file_name(name));
        let io = |source| CpuError::Io { file: temporary.0.display().to_string(), source };
        let file =
            OpenOptions::new().write(true).create(true).truncate(true).open(&temporary.0).map_err(io)?;
        let _ = file.try_lock();
        self.write_to(&file, about, progress).and_then(|()| file.sync_all()).map_err(io)?;
        fs::rename(&temporary.0, path).map_err(io)?;
        let _ = file.unlock();
        // Makes the name itself durable. Where folders cannot be synced, a crash may lose the file, never damage it.
        if let Some(Ok(folder)) = path.parent().map(File::open) {
            let _ = folder.sync_all();
        }
        Ok(())
    }

    fn write_to(&self, file: &File, about: &[u8], progress: Progress<'_>) -> io::Result<()> {
        let mut header = self.plan(about);
        let mut data =
            Data { file, at: header.data_start, unit: Vec::with_capacity(CHUNK), sums: Vec::new() };
        let end = header.file_bytes;
        let mut advance = |data: &Data<'_>| {
            if progress(data.at, end) { Ok(()) } else { Err(io::ErrorKind::Interrupted.into()) }
        };
        for (matrix, entry) in self.matrices.iter().zip(&header.matrices) {
            if let (Some(order), Some(section)) = (&matrix.order, entry.order) {
                data.pad_to(section.offset)?;
                for column in order.iter() {
                    data.put(&column.to_le_bytes())?;
                }
            }
            for (segment, entry) in matrix.segments.iter().zip(&entry.segments) {
                data.pad_to(entry.panels.offset)?;
                for part in segment.memory.bytes().chunks(16 * CHUNK) {
                    data.put(part)?;
                    advance(&data)?;
                }
            }
        }
        for ((len, values), entry) in self.vectors.iter().zip(&header.vectors) {
            data.pad_to(entry.values.offset)?;
            for value in &values[..*len] {
                data.put(&value.to_le_bytes())?;
            }
        }
        data.pad_to(end)?;
        data.write_unit()?;
        header.sums = data.sums;
        // Last, so that a file without its header is no packed file.
        file.write_all_at(&header.to_bytes(), 0)?;
        advance(&Data { file, at: end, unit: Vec::new(), sums: Vec::new() })
    }

    /// The header, with room for checksums that are not known yet.
    fn plan(&self, about: &[u8]) -> Header {
        let mut end = 0u64;
        // Offsets from the start of the data, which the length of the header decides.
        let mut section = |bytes: usize| {
            let section = Section { offset: end, bytes: bytes as u64 };
            end = (end + bytes as u64).next_multiple_of(ALIGN as u64);
            section
        };
        let matrices = self.matrices.iter().map(|matrix| MatrixEntry {
            rows: matrix.rows,
            cols: matrix.cols,
            order: matrix.order.as_ref().map(|order| section(4 * order.len())),
            segments: {
                let entry = |segment: &crate::packed::Segment| SegmentEntry {
                    encoding: segment.encoding,
                    rows: segment.rows,
                    panels: section(segment.memory.len()),
                };
                matrix.segments.iter().map(entry).collect()
            },
        });
        let matrices = matrices.collect();
        let vectors =
            self.vectors.iter().map(|(len, _)| VectorEntry { len: *len, values: section(4 * len) }).collect();
        let data_bytes = (end + SLACK as u64).next_multiple_of(ALIGN as u64);
        let sums = vec![0; data_bytes.div_ceil(CHUNK as u64) as usize];
        let mut header =
            Header { about: about.to_vec(), matrices, vectors, sums, file_bytes: 0, data_start: 0 };
        header.move_to((header.to_bytes().len() as u64).next_multiple_of(CHUNK as u64));
        header.file_bytes = header.data_start + data_bytes;
        header
    }
}

impl Header {
    fn move_to(&mut self, start: u64) {
        self.data_start = start;
        for matrix in &mut self.matrices {
            matrix.order.iter_mut().for_each(|section| section.offset += start);
            matrix.segments.iter_mut().for_each(|segment| segment.panels.offset += start);
        }
        self.vectors.iter_mut().for_each(|vector| vector.values.offset += start);
    }
}

/// The data in whole units.
struct Data<'a> {
    file: &'a File,
    /// Where the next byte goes.
    at: u64,
    unit: Vec<u8>,
    sums: Vec<u64>,
}

impl Data<'_> {
    fn put(&mut self, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            let (now, later) = bytes.split_at(bytes.len().min(CHUNK - self.unit.len()));
            self.unit.extend_from_slice(now);
            self.at += now.len() as u64;
            bytes = later;
            if self.unit.len() == CHUNK {
                self.write_unit()?;
            }
        }
        Ok(())
    }

    fn pad_to(&mut self, offset: u64) -> io::Result<()> {
        let zeros = [0; ALIGN];
        while self.at < offset {
            self.put(&zeros[..(offset - self.at).min(ALIGN as u64) as usize])?;
        }
        Ok(())
    }

    fn write_unit(&mut self) -> io::Result<()> {
        if !self.unit.is_empty() {
            self.file.write_all_at(&self.unit, self.at - self.unit.len() as u64)?;
            self.sums.push(XxHash3_64::oneshot(&self.unit));
            self.unit.clear();
        }
        Ok(())
    }
}

/// Removed when dropped; after the rename there is nothing under this name.
struct Temporary(PathBuf);

impl Drop for Temporary {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}
