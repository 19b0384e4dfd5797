//! The header of a GGUF file: metadata and the table of tensors.
//!
//! Layout, little endian (llama.cpp, `docs/gguf.md`): `GGUF`; u32 version; u64 tensors; u64 keys; the keys, each a string
//! (u64 length, bytes), a u32 type and the value; the tensors, each a name, u32 rank, the u64 sizes (columns first), u32
//! ggml type and u64 offset; then, at the next multiple of `general.alignment`, the tensors' data.
//!
//! A file comes from a stranger: every length is checked against what is left of the file before it is used, no sum wraps,
//! and nothing is allocated for what the file merely claims. Invariant: a [`TensorInfo`] that leaves this module lies inside
//! the file, has exactly the bytes that its shape and encoding need, and overlaps no other. Cost: one pass over the header;
//! strings and arrays stay where they are and are read when asked for.

use std::collections::BTreeMap;
use std::ops::Range;

use super::types::{Kind, encoding};
use crate::quant::Encoding;

/// Real files have under 100 keys and under 2,000 tensors.
const KEYS_MAX: u64 = 1 << 16;
const TENSORS_MAX: u64 = 1 << 16;
/// The format's own limit.
pub(super) const KEY_BYTES_MAX: u64 = 65_535;
/// ggml's limit is 64.
const NAME_BYTES_MAX: u64 = 255;
/// The longest real strings are chat templates.
const TEXT_BYTES_MAX: u64 = 64 << 20;
const ARRAY_LEN_MAX: u64 = 1 << 26;
/// No key in use nests arrays at all.
const NESTING_MAX: u32 = 4;
const RANK_MAX: u32 = 4;
const ALIGNMENT: &str = "general.alignment";
const ALIGNMENT_DEFAULT: u64 = 32;
const ALIGNMENT_MAX: u64 = 1 << 20;

/// Why a header was refused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum HeaderError {
    /// What is wrong with it.
    Damaged(String),
    /// (what, what would be read instead)
    Unsupported(String, String),
}

type Result<T> = std::result::Result<T, HeaderError>;

fn damaged<T>(problem: impl Into<String>) -> Result<T> {
    Err(HeaderError::Damaged(problem.into()))
}

/// One metadata value. Strings and arrays are byte ranges of the file.
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    Unsigned(u64),
    Signed(i64),
    Float(f64),
    Bool(bool),
    Text(Range<usize>),
    Array(Array),
}

/// An array whose bytes have been walked: strings inside it end where they say.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Array {
    pub element: Kind,
    pub len: usize,
    pub range: Range<usize>,
}

impl Value {
    pub fn kind(&self) -> Kind {
        match self {
            Value::Unsigned(_) => Kind::U64,
            Value::Signed(_) => Kind::I64,
            Value::Float(_) => Kind::F64,
            Value::Bool(_) => Kind::Bool,
            Value::Text(_) => Kind::Text,
            Value::Array(_) => Kind::Array,
        }
    }
}

/// One tensor of one file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorInfo {
    /// `Err` holds the name of a ggml type that cannot be served; it is an error only for a tensor that is used.
    pub encoding: std::result::Result<Encoding, String>,
    /// Rows first, as everywhere in Folio; ggml writes columns first.
    pub shape: Vec<usize>,
    /// Byte range in the file; empty for an encoding that is not known.
    pub range: Range<usize>,
}

/// A header that was read and checked.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Header {
    pub version: u32,
    pub values: BTreeMap<String, Value>,
    pub tensors: BTreeMap<String, TensorInfo>,
}

/// Reads the header of the file that `bytes` are.
pub fn read_header(bytes: &[u8]) -> Result<Header> {
    let mut cursor = Cursor { bytes, at: 0 };
    let version = version(&mut cursor)?;
    let tensor_count = cursor.u64("number of tensors")?;
    let key_count = cursor.u64("number of keys")?;
    if tensor_count > TENSORS_MAX || key_count > KEYS_MAX {
        return damaged(format!(
            "it claims {tensor_count} tensors and {key_count} keys, more than the limits of {TENSORS_MAX} and {KEYS_MAX}"
        ));
    }
    let mut values = BTreeMap::new();
    for number in 0..key_count {
        let key = cursor.name(&format!("key number {number}"), KEY_BYTES_MAX)?;
        let value = cursor.value(&format!("key `{key}`"))?;
        if values.contains_key(&key) {
            return damaged(format!("key `{key}` appears twice"));
        }
        values.insert(key, value);
    }
    let alignment = alignment(&values)?;
    let mut raw = BTreeMap::new();
    for number in 0..tensor_count {
        let name = cursor.name(&format!("tensor number {number}"), NAME_BYTES_MAX)?;
        let tensor = RawTensor::read(&mut cursor, &name)?;
        if raw.contains_key(&name) {
            return damaged(format!("tensor `{name}` appears twice"));
        }
        raw.insert(name, tensor);
    }
    // A position in a mapped file plus less than a megabyte.
    let data_start = (cursor.at as u64).next_multiple_of(alignment);
    let tensors = place(raw, data_start, bytes.len() as u64, alignment)?;
    Ok(Header { version, values, tensors })
}

pub(super) fn version(cursor: &mut Cursor<'_>) -> Result<u32> {
    let magic = match cursor.bytes.first_chunk::<4>() {
        Some(magic) => magic,
        None => {
            return damaged(format!("it is {} bytes long, too short for a GGUF file", cursor.bytes.len()));
        }
    };
    match magic {
        b"GGUF" => cursor.at = 4,
        b"lmgg" | b"tjgg" | b"fmgg" => {
            let what = "a weight file of llama.cpp from before GGUF (ggml, ggmf or ggjt)".to_owned();
            return Err(HeaderError::Unsupported(what, "convert the original checkpoint again".to_owned()));
        }
        other => return damaged(format!("it starts with {other:?}, not with \"GGUF\"")),
    }
    match cursor.u32("version")? {
        version @ 2..=3 => Ok(version),
        version if version != 0 && version & 0xffff == 0 => Err(HeaderError::Unsupported(
            format!("a big-endian GGUF file (version {})", version.swap_bytes()),
            "supported: little endian; convert it with llama.cpp's gguf_convert_endian.py".to_owned(),
        )),
        version => Err(HeaderError::Unsupported(
            format!("GGUF version {version}"),
            "supported: versions 2 and 3; convert the original checkpoint again".to_owned(),
        )),
    }
}

fn alignment(values: &BTreeMap<String, Value>) -> Result<u64> {
    match values.get(ALIGNMENT) {
        None => Ok(ALIGNMENT_DEFAULT),
        Some(Value::Unsigned(size)) if size.is_power_of_two() && (8..=ALIGNMENT_MAX).contains(size) => {
            Ok(*size)
        }
        Some(other) => damaged(format!(
            "key `{ALIGNMENT}` is {other:?}, expected a power of two from 8 to {ALIGNMENT_MAX}"
        )),
    }
}

/// A tensor as the table says, before its data is looked for.
struct RawTensor {
    encoding: std::result::Result<Encoding, String>,
    shape: Vec<usize>,
    /// From the start of the data; `None` for an unknown encoding.
    bytes: Option<u64>,
    offset: u64,
}

impl RawTensor {
    fn read(cursor: &mut Cursor<'_>, name: &str) -> Result<Self> {
        let of = |part: &str| format!("{part} of tensor `{name}`");
        let rank = cursor.u32(&of("rank"))?;
        if rank == 0 || rank > RANK_MAX {
            return damaged(format!("tensor `{name}` has {rank} dimensions, expected 1 to {RANK_MAX}"));
        }
        let mut shape = Vec::with_capacity(rank as usize);
        for _ in 0..rank {
            let size = cursor.u64(&of("a size"))?;
            match usize::try_from(size) {
                Ok(size) => shape.push(size),
                Err(_) => return damaged(format!("tensor `{name}` has an impossible size {size}")),
            }
        }
        let encoding = encoding(cursor.u32(&of("type"))?);
        let offset = cursor.u64(&of("offset"))?;
        let columns = shape[0];
        shape.reverse();
        let bytes = match &encoding {
            Err(_) => None,
            Ok(encoding) => {
                let row = match encoding.bytes(columns) {
                    Some(row) => row as u64,
                    None => {
                        return damaged(format!(
                            "tensor `{name}` has rows of {columns} values, which are not whole blocks of {encoding}"
                        ));
                    }
                };
                let rows = shape[..shape.len() - 1].iter();
                match rows.map(|size| *size as u64).try_fold(row, u64::checked_mul) {
                    Some(bytes) => Some(bytes),
                    None => return damaged(format!("tensor `{name}` has an impossible shape {shape:?}")),
                }
            }
        };
        Ok(Self { encoding, shape, bytes, offset })
    }
}

/// Finds every tensor's bytes. Data must follow each other in any order, without overlaps.
fn place(
    raw: BTreeMap<String, RawTensor>,
    data_start: u64,
    file_len: u64,
    alignment: u64,
) -> Result<BTreeMap<String, TensorInfo>> {
    let mut by_offset: Vec<(&String, &RawTensor)> = raw.iter().collect();
    by_offset.sort_by_key(|(_, tensor)| (tensor.offset, tensor.bytes));
    let mut free = 0;
    for (name, tensor) in by_offset {
        let offset = tensor.offset;
        if !offset.is_multiple_of(alignment) {
            return damaged(format!(
                "tensor `{name}` starts at byte {offset} of the data, not a multiple of {alignment}"
            ));
        }
        if offset < free {
            return damaged(format!(
                "tensor `{name}` starts at byte {offset} of the data, inside of the one before, which ends at {free}"
            ));
        }
        let end = offset.checked_add(tensor.bytes.unwrap_or(0));
        match end.and_then(|end| data_start.checked_add(end)) {
            Some(end) if end <= file_len => {}
            _ => {
                return damaged(format!(
                    "tensor `{name}` ends past the end of the file at {file_len}: the file is cut short or its header is wrong"
                ));
            }
        }
        free = end.unwrap_or(free);
    }
    let placed = |tensor: RawTensor| {
        // Both were found to be at most the length of a file that is mapped.
        let start = (data_start + tensor.offset) as usize;
        let range = start..start + tensor.bytes.unwrap_or(0) as usize;
        TensorInfo { encoding: tensor.encoding, shape: tensor.shape, range }
    };
    Ok(raw.into_iter().map(|(name, tensor)| (name, placed(tensor))).collect())
}

pub(super) struct Cursor<'a> {
    pub bytes: &'a [u8],
    pub at: usize,
}

impl<'a> Cursor<'a> {
    fn take(&mut self, length: u64, what: &str) -> Result<&'a [u8]> {
        let left = self.bytes.len() - self.at;
        if length > left as u64 {
            return damaged(format!(
                "{what} needs {length} bytes at byte {}, where {left} are left",
                self.at
            ));
        }
        let taken = &self.bytes[self.at..self.at + length as usize];
        self.at += length as usize;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self, what: &str) -> Result<[u8; N]> {
        let mut array = [0; N];
        array.copy_from_slice(self.take(N as u64, what)?);
        Ok(array)
    }

    fn u32(&mut self, what: &str) -> Result<u32> {
        Ok(u32::from_le_bytes(self.array(what)?))
    }

    pub fn u64(&mut self, what: &str) -> Result<u64> {
        Ok(u64::from_le_bytes(self.array(what)?))
    }

    fn text(&mut self, what: &str, max: u64) -> Result<Range<usize>> {
        let length = self.u64(what)?;
        if length > max {
            return damaged(format!("{what} is {length} bytes long, more than the limit of {max}"));
        }
        self.take(length, what)?;
        Ok(self.at - length as usize..self.at)
    }

    /// A key or the name of a tensor.
    pub fn name(&mut self, what: &str, max: u64) -> Result<String> {
        let range = self.text(what, max)?;
        match std::str::from_utf8(&self.bytes[range]) {
            Ok(name) => Ok(name.to_owned()),
            Err(_) => damaged(format!("{what} is not UTF-8")),
        }
    }

    fn kind(&mut self, what: &str) -> Result<Kind> {
        let number = self.u32(what)?;
        match Kind::from_number(number) {
            Some(kind) => Ok(kind),
            None => damaged(format!("{what} has type number {number}, which the format does not know")),
        }
    }

    pub fn value(&mut self, what: &str) -> Result<Value> {
        Ok(match self.kind(what)? {
            Kind::U8 => Value::Unsigned(u8::from_le_bytes(self.array(what)?).into()),
            Kind::I8 => Value::Signed(i8::from_le_bytes(self.array(what)?).into()),
            Kind::U16 => Value::Unsigned(u16::from_le_bytes(self.array(what)?).into()),
            Kind::I16 => Value::Signed(i16::from_le_bytes(self.array(what)?).into()),
            Kind::U32 => Value::Unsigned(u32::from_le_bytes(self.array(what)?).into()),
            Kind::I32 => Value::Signed(i32::from_le_bytes(self.array(what)?).into()),
            Kind::U64 => Value::Unsigned(u64::from_le_bytes(self.array(what)?)),
            Kind::I64 => Value::Signed(i64::from_le_bytes(self.array(what)?)),
            Kind::F32 => Value::Float(f32::from_le_bytes(self.array(what)?).into()),
            Kind::F64 => Value::Float(f64::from_le_bytes(self.array(what)?)),
            Kind::Bool => match self.array(what)? {
                [0] => Value::Bool(false),
                [1] => Value::Bool(true),
                [other] => return damaged(format!("{what} is a boolean of value {other}")),
            },
            Kind::Text => Value::Text(self.text(what, TEXT_BYTES_MAX)?),
            Kind::Array => Value::Array(self.elements(what, NESTING_MAX)?),
        })
    }

    /// Walks an array, so that a later reader cannot run out of it.
    fn elements(&mut self, what: &str, depth: u32) -> Result<Array> {
        if depth == 0 {
            return damaged(format!("{what} nests arrays deeper than {NESTING_MAX}"));
        }
        let element = self.kind(what)?;
        let length = self.u64(what)?;
        if length > ARRAY_LEN_MAX {
            return damaged(format!(
                "{what} claims {length} elements, more than the limit of {ARRAY_LEN_MAX}"
            ));
        }
        let start = self.at;
        match element.size() {
            // At most 2^26 times 8.
            Some(size) => {
                self.take(length * size as u64, what)?;
            }
            None => {
                for _ in 0..length {
                    match element {
                        Kind::Array => {
                            self.elements(what, depth - 1)?;
                        }
                        _ => {
                            self.text(what, TEXT_BYTES_MAX)?;
                        }
                    }
                }
            }
        }
        Ok(Array { element, len: length as usize, range: start..self.at })
    }
}
