//! The header of a safetensors file.
//!
//! Layout: `u64` header length, little endian; that many bytes of JSON `{name: {dtype, shape, data_offsets}}` with an
//! optional `__metadata__`; then the tensors, back to back. Format: <https://github.com/huggingface/safetensors>.
//!
//! Own reader rather than the `safetensors` crate: a header comes from a stranger, every sum is checked here, and an
//! error names the tensor. Invariant: a [`TensorEntry`] that leaves this module lies inside the file it came from, has
//! exactly the bytes its shape needs, and overlaps no other. Cost: one pass over the header.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;

use serde::de::{Deserialize, Deserializer, IgnoredAny, MapAccess, Visitor};

use crate::backend::DType;

/// Same bound as the reference implementation.
const HEADER_BYTES_MAX: u64 = 100_000_000;
/// Nothing Folio serves has more than two; leaves room to name a wrong one.
const RANK_MAX: usize = 8;

/// One tensor of one file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorEntry {
    /// `Err` holds the name of a dtype that no weight has by itself: an error only for a tensor that is used as one.
    pub dtype: Result<DType, String>,
    pub shape: Vec<usize>,
    /// Byte range in the file.
    pub range: Range<usize>,
}

/// Reads the header of `file`, whose bytes these are. The error says what is wrong with the file.
pub fn read_header(bytes: &[u8]) -> Result<BTreeMap<String, TensorEntry>, String> {
    let length = bytes
        .first_chunk::<8>()
        .ok_or_else(|| format!("it is {} bytes long, too short for a safetensors file", bytes.len()))?;
    let length = u64::from_le_bytes(*length);
    if length > HEADER_BYTES_MAX {
        return Err(format!(
            "its header claims {length} bytes, more than the format's limit of {HEADER_BYTES_MAX}"
        ));
    }
    // At most 100 MB, so the conversion and the sum cannot overflow.
    let data_start = 8 + length as usize;
    let header = bytes
        .get(8..data_start)
        .ok_or_else(|| format!("its header claims {length} bytes but the file has only {}", bytes.len()))?;
    let RawHeader(raw) = serde_json::from_slice(header)
        .map_err(|error| format!("its header is not a table of tensors: {error}"))?;

    let data_len = bytes.len() - data_start;
    let mut entries = BTreeMap::new();
    for (name, raw) in raw {
        let entry =
            raw.check(data_start, data_len).map_err(|problem| format!("tensor `{name}` {problem}"))?;
        if entries.insert(name.clone(), entry).is_some() {
            return Err(format!("tensor `{name}` appears twice"));
        }
    }
    check_coverage(&entries, data_start, bytes.len())?;
    Ok(entries)
}

/// Tensors must cover the data part without holes or overlaps: anything else is a damaged or hostile file.
fn check_coverage(
    entries: &BTreeMap<String, TensorEntry>,
    data_start: usize,
    file_len: usize,
) -> Result<(), String> {
    let mut by_start: Vec<_> = entries.iter().collect();
    by_start.sort_by_key(|(_, entry)| (entry.range.start, entry.range.end));
    let mut expected = data_start;
    for (name, entry) in by_start {
        if entry.range.start != expected {
            return Err(format!(
                "tensor `{name}` starts at byte {} of the data, expected {}",
                entry.range.start - data_start,
                expected - data_start
            ));
        }
        expected = entry.range.end;
    }
    if expected != file_len {
        return Err(format!("{} bytes follow the last tensor", file_len - expected));
    }
    Ok(())
}

#[derive(serde::Deserialize)]
struct RawEntry {
    dtype: String,
    shape: Vec<u64>,
    data_offsets: [u64; 2],
}

impl RawEntry {
    fn check(self, data_start: usize, data_len: usize) -> Result<TensorEntry, String> {
        if self.shape.len() > RANK_MAX {
            return Err(format!("has {} dimensions", self.shape.len()));
        }
        let [begin, end] = self.data_offsets;
        if begin > end {
            return Err(format!("ends at byte {end}, before its start at {begin}"));
        }
        if end > data_len as u64 {
            return Err(format!(
                "ends at byte {end} of the data, which has only {data_len}: the file is cut short or its header is wrong"
            ));
        }
        let overflow = || format!("has an impossible shape {:?}", self.shape);
        let elements = self
            .shape
            .iter()
            .try_fold(1u64, |product, &size| product.checked_mul(size))
            .ok_or_else(overflow)?;
        let dtype = parse_dtype(&self.dtype);
        if let Some(size) = element_bytes(&self.dtype) {
            let needed = elements.checked_mul(size).ok_or_else(overflow)?;
            if end - begin != needed {
                return Err(format!(
                    "of shape {:?} and dtype {} has {} bytes, expected {needed}",
                    self.shape,
                    self.dtype,
                    end - begin
                ));
            }
        }
        let mut shape = Vec::with_capacity(self.shape.len());
        for &size in &self.shape {
            shape.push(usize::try_from(size).map_err(|_| overflow())?);
        }
        // Both are at most the length of a file that is mapped, so they fit.
        Ok(TensorEntry { dtype, shape, range: data_start + begin as usize..data_start + end as usize })
    }
}

/// Bytes of an element, for every dtype of whole bytes that the format has.
fn element_bytes(dtype: &str) -> Option<u64> {
    match dtype {
        "BOOL" | "I8" | "U8" | "F8_E4M3" | "F8_E5M2" | "F8_E8M0" => Some(1),
        "I16" | "U16" | "F16" | "BF16" => Some(2),
        "I32" | "U32" | "F32" => Some(4),
        "I64" | "U64" | "F64" | "C64" => Some(8),
        _ => None,
    }
}

fn parse_dtype(name: &str) -> Result<DType, String> {
    match name {
        "F32" => Ok(DType::F32),
        "F16" => Ok(DType::F16),
        "BF16" => Ok(DType::BF16),
        other => Err(other.chars().take(32).collect()),
    }
}

/// Keeps duplicates, which a map would swallow.
struct RawHeader(Vec<(String, RawEntry)>);

impl<'de> Deserialize<'de> for RawHeader {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct HeaderVisitor;
        impl<'de> Visitor<'de> for HeaderVisitor {
            type Value = RawHeader;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of tensors")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<RawHeader, A::Error> {
                let mut entries = Vec::new();
                while let Some(name) = map.next_key::<String>()? {
                    if name == "__metadata__" {
                        map.next_value::<IgnoredAny>()?;
                    } else {
                        entries.push((name, map.next_value()?));
                    }
                }
                Ok(RawHeader(entries))
            }
        }
        deserializer.deserialize_map(HeaderVisitor)
    }
}
