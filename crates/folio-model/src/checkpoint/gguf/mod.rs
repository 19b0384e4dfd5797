//! GGUF, llama.cpp's single-file format: metadata, tokenizer and weights together.
//!
//! Owns: reading the file ([`read_header`]), what its metadata says about the decoder, its [`Vocabulary`], and which tensor
//! is which ([`Names`]). Must never: decode a block (that is `quant`), build a tokenizer (that is `folio-text`), or guess at what a
//! file leaves out. A key of the wrong type is an error that names file and key.

mod architecture;
mod config;
mod header;
mod names;
pub(super) mod open;
mod peek;
mod scaled;
mod types;
mod vocabulary;

pub(crate) use architecture::knows as knows_architecture;
pub use architecture::names as architecture_names;
pub(crate) use architecture::of_family as architecture_of;
pub use config::{Described, Find, describe};
pub use header::{Array, Header, HeaderError, TensorInfo, Value, read_header};
pub use names::{Names, RowOrder};
pub(crate) use open::{find_in, is_gguf, split_name};
pub(crate) use peek::architecture_in;
pub use scaled::Scaled;
pub use types::Kind;
pub use vocabulary::{SpecialIds, TokenKind, Vocabulary};

use crate::error::{ModelError, Result};

/// The metadata of an opened file: typed reading, with errors that name the key.
#[derive(Clone, Copy)]
pub struct Metadata<'a> {
    file: &'a str,
    bytes: &'a [u8],
    header: &'a Header,
}

impl<'a> Metadata<'a> {
    /// `bytes` are the file that `header` was read from.
    pub fn new(file: &'a str, bytes: &'a [u8], header: &'a Header) -> Self {
        Self { file, bytes, header }
    }

    /// Path of the file, for messages.
    pub fn file(&self) -> &'a str {
        self.file
    }

    pub fn keys(&self) -> impl Iterator<Item = &'a str> {
        self.header.values.keys().map(String::as_str)
    }

    pub fn has(&self, key: &str) -> bool {
        self.header.values.contains_key(key)
    }

    pub fn problem(&self, key: &str, problem: impl Into<String>) -> ModelError {
        ModelError::Field { file: self.file.to_owned(), field: key.to_owned(), problem: problem.into() }
    }

    fn value(&self, key: &str) -> Option<&'a Value> {
        self.header.values.get(key)
    }

    fn wrong(&self, key: &str, value: &Value, expected: &str) -> ModelError {
        let found = match value {
            Value::Unsigned(number) => number.to_string(),
            Value::Signed(number) => number.to_string(),
            Value::Float(number) => number.to_string(),
            Value::Bool(flag) => flag.to_string(),
            Value::Array(array) => format!("an array of {}", array.element.name()),
            Value::Text(_) => Kind::Text.name().to_owned(),
        };
        self.problem(key, format!("is {found}, expected {expected}"))
    }

    pub fn text(&self, key: &str) -> Result<Option<&'a str>> {
        match self.value(key) {
            None => Ok(None),
            Some(Value::Text(range)) => {
                let text = std::str::from_utf8(&self.bytes[range.clone()]);
                text.map(Some).map_err(|_| self.problem(key, "is not UTF-8"))
            }
            Some(other) => Err(self.wrong(key, other, "a string")),
        }
    }

    /// A non-negative integer of any width.
    pub fn integer(&self, key: &str) -> Result<Option<u64>> {
        match self.value(key) {
            None => Ok(None),
            Some(Value::Unsigned(number)) => Ok(Some(*number)),
            Some(Value::Signed(number)) if *number >= 0 => Ok(Some(number.unsigned_abs())),
            Some(other) => Err(self.wrong(key, other, "a non-negative integer")),
        }
    }

    /// A finite number.
    pub fn number(&self, key: &str) -> Result<Option<f64>> {
        match self.value(key) {
            None => Ok(None),
            Some(Value::Float(number)) if number.is_finite() => Ok(Some(*number)),
            Some(Value::Unsigned(number)) => Ok(Some(*number as f64)),
            Some(Value::Signed(number)) => Ok(Some(*number as f64)),
            Some(other) => Err(self.wrong(key, other, "a finite number")),
        }
    }

    pub fn flag(&self, key: &str) -> Result<Option<bool>> {
        match self.value(key) {
            None => Ok(None),
            Some(Value::Bool(flag)) => Ok(Some(*flag)),
            Some(other) => Err(self.wrong(key, other, "true or false")),
        }
    }

    pub fn texts(&self, key: &str) -> Result<Option<Vec<&'a str>>> {
        let array = match self.value(key) {
            None => return Ok(None),
            Some(Value::Array(array)) if array.element == Kind::Text => array,
            Some(other) => return Err(self.wrong(key, other, "an array of strings")),
        };
        let mut rest = &self.bytes[array.range.clone()];
        let mut texts = Vec::with_capacity(array.len);
        for index in 0..array.len {
            // The array was walked when the header was read.
            let (length, after) = rest.split_first_chunk::<8>().expect("strings lie inside their array");
            let (text, after) = after.split_at(u64::from_le_bytes(*length) as usize);
            let text = std::str::from_utf8(text).map_err(|_| {
                self.problem(key, format!("holds a string (number {index}) that is not UTF-8"))
            })?;
            texts.push(text);
            rest = after;
        }
        Ok(Some(texts))
    }

    /// An array of booleans, or of numbers that are 0 where it is not so.
    pub fn flags(&self, key: &str) -> Result<Option<Vec<bool>>> {
        match self.value(key) {
            Some(Value::Array(array)) if array.element == Kind::Bool => {
                Ok(Some(self.bytes[array.range.clone()].iter().map(|byte| *byte != 0).collect()))
            }
            _ => Ok(self.numbers(key)?.map(|numbers| numbers.iter().map(|number| *number != 0.0).collect())),
        }
    }

    /// An array of numbers of any kind.
    pub fn numbers(&self, key: &str) -> Result<Option<Vec<f64>>> {
        let array = match self.value(key) {
            None => return Ok(None),
            Some(Value::Array(array)) => array,
            Some(other) => return Err(self.wrong(key, other, "an array of numbers")),
        };
        let bytes = &self.bytes[array.range.clone()];
        let wrong = || self.wrong(key, &Value::Array(array.clone()), "an array of numbers");
        let Some(size) = array.element.size() else { return Err(wrong()) };
        let wide = |bytes: &[u8]| {
            let mut wide = [0; 8];
            wide[..bytes.len()].copy_from_slice(bytes);
            u64::from_le_bytes(wide)
        };
        // Moves the sign bit of a narrow integer to the top and back.
        let signed = |bytes: &[u8]| {
            let unused = 64 - 8 * bytes.len() as u32;
            (((wide(bytes) << unused) as i64) >> unused) as f64
        };
        let number = |bytes: &[u8]| match array.element {
            Kind::F32 => f64::from(f32::from_bits(wide(bytes) as u32)),
            Kind::F64 => f64::from_bits(wide(bytes)),
            Kind::I8 | Kind::I16 | Kind::I32 | Kind::I64 => signed(bytes),
            _ => wide(bytes) as f64,
        };
        if array.element == Kind::Bool {
            return Err(wrong());
        }
        Ok(Some(bytes.chunks_exact(size).map(number).collect()))
    }
}
