//! How weights are stored: plain floats, or blocks of small integers with their scales.
//!
//! Owns: the names, sizes and exact meaning of the encodings. Must never: choose an encoding, or know a kernel. A block
//! format's value is defined by [`BlockFormat::decode`]; whatever a backend packs must compute with exactly those values.

mod decode;

use std::fmt;

pub use decode::{IQ4_VALUES, MXFP4_VALUES, k_scale_min, mxfp4_scale, q3_k_scale};

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

/// ggml's block formats, byte for byte (llama.cpp, `ggml-common.h`). Names are theirs; `d`, `m` and `min` are f16.
///
/// Those of 32 values store nibbles in pairs: byte `i` holds value `i` (low) and value `i + 16` (high). Those of 256 values
/// have scales of their own for every 16 or 32 values, themselves in units of `d`.
#[allow(non_camel_case_types, reason = "the field's own names")]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum BlockFormat {
    /// 32 values: `d`, 16 bytes of nibbles. `x = d * (q - 8)`
    Q4_0,
    /// 32 values: `d`, `m`, 16 bytes of nibbles. `x = d * q + m`
    Q4_1,
    /// 32 values: `d`, 32 fifth bits, 16 bytes of nibbles. `x = d * (q - 16)`
    Q5_0,
    /// 32 values: `d`, `m`, 32 fifth bits, 16 bytes of nibbles. `x = d * q + m`
    Q5_1,
    /// 32 values: `d`, 32 x i8. `x = d * q`
    Q8_0,
    /// 256 values in runs of 16: 16 bytes of (scale, minimum) nibbles, 64 bytes of 2 bits, `d`, `min`.
    /// `x = d * scale * q - min * minimum`
    Q2_K,
    /// 256 values in runs of 16: 32 bytes of third bits, 64 bytes of 2 bits, 12 bytes of 6-bit scales, `d`.
    /// `x = d * (scale - 32) * (q - 4)`
    Q3_K,
    /// 256 values in runs of 32: `d`, `min`, 12 bytes of 6-bit (scale, minimum), 128 bytes of nibbles.
    /// `x = d * scale * q - min * minimum`
    Q4_K,
    /// As Q4_K with 32 bytes of fifth bits before the nibbles.
    Q5_K,
    /// 256 values in runs of 16: 128 bytes of low nibbles, 64 bytes of high 2 bits, 16 x i8 scales, `d`.
    /// `x = d * scale * (q - 32)`
    Q6_K,
    /// 32 values: `d`, 16 bytes of nibbles that are indices of [`IQ4_VALUES`]. `x = d * value`
    IQ4_NL,
    /// 256 values in runs of 32: `d`, 8 x 2 high bits and 8 x 4 low bits of scales, 128 bytes of nibbles as in IQ4_NL.
    /// `x = d * (scale - 32) * value`
    IQ4_XS,
    /// 32 values (OCP MX): one byte of exponent, 16 bytes of nibbles (E2M1). `x = 2^(e - 128) * value`, with `value` of
    /// [`MXFP4_VALUES`]
    MXFP4,
}

impl BlockFormat {
    pub const ALL: [BlockFormat; 13] = [
        BlockFormat::Q4_0,
        BlockFormat::Q4_1,
        BlockFormat::Q5_0,
        BlockFormat::Q5_1,
        BlockFormat::Q8_0,
        BlockFormat::Q2_K,
        BlockFormat::Q3_K,
        BlockFormat::Q4_K,
        BlockFormat::Q5_K,
        BlockFormat::Q6_K,
        BlockFormat::IQ4_NL,
        BlockFormat::IQ4_XS,
        BlockFormat::MXFP4,
    ];

    /// ggml's number of the type (`enum ggml_type`).
    pub const fn ggml_type(self) -> u32 {
        match self {
            BlockFormat::Q4_0 => 2,
            BlockFormat::Q4_1 => 3,
            BlockFormat::Q5_0 => 6,
            BlockFormat::Q5_1 => 7,
            BlockFormat::Q8_0 => 8,
            BlockFormat::Q2_K => 10,
            BlockFormat::Q3_K => 11,
            BlockFormat::Q4_K => 12,
            BlockFormat::Q5_K => 13,
            BlockFormat::Q6_K => 14,
            BlockFormat::IQ4_NL => 20,
            BlockFormat::IQ4_XS => 23,
            BlockFormat::MXFP4 => 39,
        }
    }

    /// ggml's number, plus 16 (the first 16 are for plain types): part of a model's digest.
    pub(crate) const fn tag(self) -> u8 {
        16 + self.ggml_type() as u8
    }

    /// Values of a block.
    pub const fn values(self) -> usize {
        match self {
            BlockFormat::Q4_0
            | BlockFormat::Q4_1
            | BlockFormat::Q5_0
            | BlockFormat::Q5_1
            | BlockFormat::Q8_0
            | BlockFormat::IQ4_NL
            | BlockFormat::MXFP4 => 32,
            BlockFormat::Q2_K
            | BlockFormat::Q3_K
            | BlockFormat::Q4_K
            | BlockFormat::Q5_K
            | BlockFormat::Q6_K
            | BlockFormat::IQ4_XS => 256,
        }
    }

    /// Bytes of a block.
    pub const fn bytes(self) -> usize {
        match self {
            BlockFormat::Q4_0 => 18,
            BlockFormat::Q4_1 => 20,
            BlockFormat::Q5_0 => 22,
            BlockFormat::Q5_1 => 24,
            BlockFormat::Q8_0 => 34,
            BlockFormat::Q2_K => 84,
            BlockFormat::Q3_K => 110,
            BlockFormat::Q4_K => 144,
            BlockFormat::Q5_K => 176,
            BlockFormat::Q6_K => 210,
            BlockFormat::IQ4_NL => 18,
            BlockFormat::IQ4_XS => 136,
            BlockFormat::MXFP4 => 17,
        }
    }
}
