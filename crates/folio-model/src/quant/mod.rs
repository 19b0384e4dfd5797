//! How weights are stored: plain floats, or blocks of small integers with their scales.
//!
//! Owns: the names, sizes and exact meaning of the encodings. Must never: choose an encoding, or know a kernel. A block
//! format's value is defined by [`BlockFormat::decode`]; whatever a backend packs must compute with exactly those values.

mod decode;

use std::fmt;

use crate::backend::DType;

/// How the values of a tensor are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Encoding {
    Plain(DType),
    /// Rows of whole blocks. Only matrices are stored so.
    Block(BlockFormat),
}

impl Encoding {
    /// Bytes of `values` consecutive values of one row; `None` where they are not whole blocks or do not fit.
    pub fn bytes(self, values: usize) -> Option<usize> {
        match self {
            Encoding::Plain(dtype) => values.checked_mul(dtype.size()),
            Encoding::Block(format) => {
                let whole = values.is_multiple_of(format.values());
                (values / format.values()).checked_mul(format.bytes()).filter(|_| whole)
            }
        }
    }

    /// Bytes that a value takes, scales included.
    pub const fn bytes_per_value(self) -> f64 {
        match self {
            Encoding::Plain(dtype) => dtype.size() as f64,
            Encoding::Block(format) => format.bytes() as f64 / format.values() as f64,
        }
    }

    /// The element type, where values stand for themselves.
    pub const fn plain(self) -> Option<DType> {
        match self {
            Encoding::Plain(dtype) => Some(dtype),
            Encoding::Block(_) => None,
        }
    }
}

impl fmt::Display for Encoding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Encoding::Plain(dtype) => write!(f, "{dtype:?}"),
            Encoding::Block(format) => write!(f, "{format:?}"),
        }
    }
}

/// ggml's block formats, byte for byte (llama.cpp, `ggml-common.h`). Names are theirs.
#[allow(non_camel_case_types, reason = "the field's own names")]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum BlockFormat {
    /// 32 values: f16 `d`, 32 x i8. `x = d * q`
    Q8_0,
    /// 32 values: f16 `d`, 16 bytes of two nibbles (low: values 0..16, high: 16..32). `x = d * (q - 8)`
    Q4_0,
}

impl BlockFormat {
    /// ggml's number of the type, plus 16 (the first 16 are for plain types): part of a model's digest.
    pub(crate) const fn tag(self) -> u8 {
        16 + match self {
            BlockFormat::Q4_0 => 2,
            BlockFormat::Q8_0 => 8,
        }
    }

    /// Values of a block.
    pub const fn values(self) -> usize {
        match self {
            BlockFormat::Q8_0 | BlockFormat::Q4_0 => 32,
        }
    }

    /// Bytes of a block.
    pub const fn bytes(self) -> usize {
        match self {
            BlockFormat::Q8_0 => 34,
            BlockFormat::Q4_0 => 18,
        }
    }
}
