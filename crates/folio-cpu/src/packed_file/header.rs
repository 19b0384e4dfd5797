//! The header of a packed file, to and from bytes.
//!
//! Owns: every number of the header and what it may be. Must never: trust one: [`Header::parse`] takes any bytes and gives
//! an error, or a header whose every section lies inside the file and has the size its shape says.

use std::ops::Range;

use folio_model::quant::Encoding;
use twox_hash::XxHash3_64;

use super::{ALIGN, CHUNK, LAYOUT, MAGIC, VERSION};
use crate::memory::SLACK;
use crate::packed::Segment;

/// Bytes before the part of the header that its checksum covers.
const PROLOGUE: usize = 24;
/// More than the header of any model; a bound on what is read before anything is known.
pub const HEADER_BYTES_MAX: u64 = 64 << 20;
/// Rows or columns of a matrix, values of a vector.
const SIZE_MAX: u64 = 1 << 31;

/// What a packed file says about itself.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Header {
    pub file_bytes: u64,
    /// Start of the data; a multiple of [`CHUNK`].
    pub data_start: u64,
    /// What the model's loader wrote there.
    pub about: Vec<u8>,
    pub matrices: Vec<MatrixEntry>,
    pub vectors: Vec<VectorEntry>,
    /// XXH3 of each CHUNK of the data, the last one perhaps shorter.
    pub sums: Vec<u64>,
}

/// Where something lies in the file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Section {
    /// A multiple of [`ALIGN`].
    pub offset: u64,
    pub bytes: u64,
}

impl Section {
    pub(super) fn range(self) -> Range<usize> {
        self.offset as usize..(self.offset + self.bytes) as usize
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MatrixEntry {
    pub rows: usize,
    pub cols: usize,
    /// Order of the columns, as u32.
    pub order: Option<Section>,
    pub segments: Vec<SegmentEntry>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SegmentEntry {
    pub encoding: Encoding,
    pub rows: usize,
    pub panels: Section,
}

/// f32 values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VectorEntry {
    pub len: usize,
    pub values: Section,
}

/// Why bytes are not a header.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum HeaderError {
    NotPacked,
    /// Of another version of the format, or packed for other kernels.
    OtherLayout,
    Damaged(String),
}

fn damaged<T>(problem: impl Into<String>) -> Result<T, HeaderError> {
    Err(HeaderError::Damaged(problem.into()))
}

/// Bytes of the header that starts so: what must be read before [`Header::parse`].
pub fn header_bytes(start: &[u8]) -> Result<u64, HeaderError> {
    let mut bytes = Bytes { rest: start, at: 0 };
    if bytes.take(MAGIC.len()).ok() != Some(&MAGIC[..]) {
        return Err(HeaderError::NotPacked);
    }
    if bytes.u32()? != VERSION {
        return Err(HeaderError::OtherLayout);
    }
    let length = u64::from(bytes.u32()?);
    if length < PROLOGUE as u64 || length > HEADER_BYTES_MAX {
        return damaged(format!("its header is said to have {length} bytes"));
    }
    Ok(length)
}

impl Header {
    /// The header, after everything in it was checked. `bytes` may go on after it; `file_bytes` is the file's true length.
    pub fn parse(bytes: &[u8], file_bytes: u64) -> Result<Self, HeaderError> {
        let length = header_bytes(bytes)? as usize;
        let Some(bytes) = bytes.get(..length) else { return damaged("it ends inside its header") };
        let mut at = Bytes { rest: &bytes[16..], at: 16 };
        if at.u64()? != XxHash3_64::oneshot(&bytes[PROLOGUE..]) {
            return damaged("its header does not have its checksum");
        }
        if at.u64()? != LAYOUT {
            return Err(HeaderError::OtherLayout);
        }
        let mut header = Header { file_bytes: at.u64()?, data_start: at.u64()?, ..Header::default() };
        if header.file_bytes != file_bytes {
            return damaged(format!("it has {file_bytes} bytes, not {}", header.file_bytes));
        }
        let start = header.data_start;
        if start < length as u64 || !start.is_multiple_of(CHUNK as u64) || start > file_bytes {
            return damaged(format!("its data is said to start at byte {start}"));
        }
        let about = at.count(1)?;
        header.about = at.take(about)?.to_vec();
        for _ in 0..at.count(20)? {
            let matrix = at.matrix(&header)?;
            header.matrices.push(matrix);
        }
        for _ in 0..at.count(16)? {
            let vector = at.vector(&header)?;
            header.vectors.push(vector);
        }
        for _ in 0..at.count(8)? {
            header.sums.push(at.u64()?);
        }
        if header.sums.len() as u64 != (file_bytes - start).div_ceil(CHUNK as u64) {
            return damaged(format!("it has {} checksums", header.sums.len()));
        }
        if !at.rest.is_empty() {
            return damaged(format!("its header goes on after byte {}", at.at));
        }
        Ok(header)
    }

    pub(super) fn to_bytes(&self) -> Vec<u8> {
        let mut body = Vec::new();
        body.extend(LAYOUT.to_le_bytes());
        body.extend(self.file_bytes.to_le_bytes());
        body.extend(self.data_start.to_le_bytes());
        put_count(&mut body, self.about.len());
        body.extend(&self.about);
        put_count(&mut body, self.matrices.len());
        for matrix in &self.matrices {
            body.extend((matrix.rows as u64).to_le_bytes());
            body.extend((matrix.cols as u64).to_le_bytes());
            put_count(&mut body, matrix.order.iter().count());
            body.extend(matrix.order.iter().flat_map(|order| order.offset.to_le_bytes()));
            put_count(&mut body, matrix.segments.len());
            for segment in &matrix.segments {
                let name = segment.encoding.to_string();
                put_count(&mut body, name.len());
                body.extend(name.as_bytes());
                body.extend((segment.rows as u64).to_le_bytes());
                body.extend(segment.panels.offset.to_le_bytes());
            }
        }
        put_count(&mut body, self.vectors.len());
        for vector in &self.vectors {
            body.extend((vector.len as u64).to_le_bytes());
            body.extend(vector.values.offset.to_le_bytes());
        }
        put_count(&mut body, self.sums.len());
        body.extend(self.sums.iter().flat_map(|sum| sum.to_le_bytes()));
        let mut bytes = MAGIC.to_vec();
        bytes.extend(VERSION.to_le_bytes());
        bytes.extend(((PROLOGUE + body.len()) as u32).to_le_bytes());
        bytes.extend(XxHash3_64::oneshot(&body).to_le_bytes());
        bytes.extend(body);
        bytes
    }
}

fn put_count(to: &mut Vec<u8>, count: usize) {
    to.extend((count as u32).to_le_bytes());
}

/// Bytes not read yet.
struct Bytes<'a> {
    rest: &'a [u8],
    at: usize,
}

impl<'a> Bytes<'a> {
    fn take(&mut self, count: usize) -> Result<&'a [u8], HeaderError> {
        let Some((taken, rest)) = self.rest.split_at_checked(count) else {
            return damaged(format!("its header ends inside the field at byte {}", self.at));
        };
        self.rest = rest;
        self.at += count;
        Ok(taken)
    }

    fn number<const N: usize>(&mut self) -> Result<[u8; N], HeaderError> {
        let mut number = [0; N];
        number.copy_from_slice(self.take(N)?);
        Ok(number)
    }

    fn u32(&mut self) -> Result<u32, HeaderError> {
        self.number().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Result<u64, HeaderError> {
        self.number().map(u64::from_le_bytes)
    }

    /// How many things of at least `size` bytes follow.
    fn count(&mut self, size: usize) -> Result<usize, HeaderError> {
        let count = self.u32()? as usize;
        if count > self.rest.len() / size {
            return damaged(format!(
                "its header has no room for the {count} entries said before byte {}",
                self.at
            ));
        }
        Ok(count)
    }

    /// A number of rows, columns or values.
    fn size(&mut self) -> Result<usize, HeaderError> {
        match self.u64()? {
            size @ 1..=SIZE_MAX => Ok(size as usize),
            size => damaged(format!("a size is said to be {size}")),
        }
    }

    /// A section of that many bytes, with the readable bytes that kernels want after it.
    fn section(&mut self, header: &Header, bytes: Option<usize>) -> Result<Section, HeaderError> {
        let offset = self.u64()?;
        let end = bytes.and_then(|bytes| offset.checked_add(bytes as u64)?.checked_add(SLACK as u64));
        let inside = end.is_some_and(|end| end <= header.file_bytes) && offset >= header.data_start;
        match bytes {
            Some(bytes) if inside && offset.is_multiple_of(ALIGN as u64) => {
                Ok(Section { offset, bytes: bytes as u64 })
            }
            _ => damaged(format!("a section at byte {offset} is not inside its data")),
        }
    }

    fn matrix(&mut self, header: &Header) -> Result<MatrixEntry, HeaderError> {
        let (rows, cols) = (self.size()?, self.size()?);
        let order = match self.count(8)? {
            0 => None,
            1 => Some(self.section(header, cols.checked_mul(4))?),
            more => return damaged(format!("a matrix has {more} orders of columns")),
        };
        let mut segments: Vec<SegmentEntry> = Vec::new();
        for _ in 0..self.count(20)? {
            let name = self.count(1)?;
            let name = self.take(name)?;
            let Some(encoding) = std::str::from_utf8(name).ok().and_then(Encoding::named) else {
                return damaged("a matrix has an encoding that does not exist");
            };
            let rows = self.size()?;
            let bytes = Segment::memory_bytes(encoding, rows, cols);
            segments.push(SegmentEntry { encoding, rows, panels: self.section(header, bytes)? });
        }
        if segments.iter().map(|segment| segment.rows).sum::<usize>() != rows {
            return damaged("a matrix does not have the rows of its segments");
        }
        Ok(MatrixEntry { rows, cols, order, segments })
    }

    fn vector(&mut self, header: &Header) -> Result<VectorEntry, HeaderError> {
        let len = self.size()?;
        Ok(VectorEntry { len, values: self.section(header, len.checked_mul(4))? })
    }
}
