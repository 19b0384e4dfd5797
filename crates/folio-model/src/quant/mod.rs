//! How weights are stored: plain floats, or blocks of small integers with their scales.
//!
//! Owns: the names, sizes and exact meaning of the encodings. Must never: choose an encoding, or know a kernel. A block
//! format's value is defined by [`BlockFormat::decode`]; whatever a backend packs must compute with exactly those values.

mod decode;
mod iq;

use std::fmt;

pub use decode::{
    IQ4_VALUES, MXFP4_VALUES, NVFP4_UNIT, e4m3_in_256ths, k_scale_min, mxfp4_scale, nvfp4_scale,
    nvfp4_scale_code, q3_k_scale,
};
pub use iq::{IQ1_VALUES, IQ2_VALUES, IQ3_S_VALUES, IQ3_XXS_VALUES, IqBlock, IqValues, TERNARY_VALUES};

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

    /// The encoding of that name, as [`Encoding`] displays it.
    pub fn named(name: &str) -> Option<Self> {
        let plain = [DType::F32, DType::F16, DType::BF16].map(Encoding::Plain);
        let blocks = BlockFormat::ALL.into_iter().map(Encoding::Block);
        plain.into_iter().chain(blocks).find(|encoding| encoding.to_string() == name)
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

/// ggml's block formats, byte for byte (llama.cpp, `ggml-common.h`), and Folio's own.
///
/// Names of ggml's are theirs; `d`, `m` and `min` are f16. Those of 32 values store nibbles in pairs: byte `i` holds value `i`
/// (low) and value `i + 16` (high). Those of 256 values have scales of their own for every 16 or 32 values, themselves in
/// units of `d`.
///
/// Folio's own (`Int4x32` to `Fp4x16`) are what quantized safetensors checkpoints are re-expressed in: the kind of code, and
/// how many values share a scale. No file holds them. `d` is an f32, because checkpoints have scales in f16, bf16 and f32;
/// each run of 32 nibbles is 16 bytes in pairs as above; numbers are little endian.
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
    /// 256 values in runs of 32: `d`, and of each run 4 points of 8 values, 4 x 7 signs and a scale of 4 bits. This and those to
    /// TQ2_0: see [`IqBlock`].
    IQ2_XXS,
    /// 256 values in runs of 16: `d`, 32 x (9 bits of a point of 8 values, 7 signs), 16 scales of 4 bits.
    IQ2_XS,
    /// 256 values in runs of 16: `d`, 32 points of 8 values, 256 signs, 32 x 2 high bits of points, 16 scales of 4 bits.
    IQ2_S,
    /// 256 values in runs of 32: `d`, 64 points of 4 values, and of each run 4 x 7 signs and a scale of 4 bits.
    IQ3_XXS,
    /// 256 values in runs of 32: `d`, 64 points of 4 values, 64 high bits of them, 256 signs, 8 scales of 4 bits.
    IQ3_S,
    /// 256 values in runs of 32: `d`, 32 points of 8 values, and of each run 4 x 3 high bits, a scale of 3 bits and the sign of
    /// an eighth.
    IQ1_S,
    /// 256 values in runs of 16: 32 points of 8 values, 32 x (3 high bits, the sign of an eighth), 16 scales of 3 bits with `d`
    /// between them.
    IQ1_M,
    /// 256 values: 48 bytes of 5 and 4 bytes of 4 digits of base 3, `d`. `x = d * (digit - 1)`
    TQ1_0,
    /// 256 values: 64 bytes of 2 bits, `d`. `x = d * (q - 1)`
    TQ2_0,
    /// 32 values (OCP MX): one byte of exponent, 16 bytes of nibbles (E2M1). `x = 2^(e - 128) * value`, with `value` of
    /// [`MXFP4_VALUES`]
    MXFP4,
    /// 64 values in runs of 16: 4 scales (e4m3 without a sign), 4 x 8 bytes of nibbles (E2M1): byte `i` of a run holds value `i` (low)
    /// and value `i + 8` (high). `x = scale / 2 * value`, with `value` of [`MXFP4_VALUES`]; see [`nvfp4_scale`]
    NVFP4,
    /// 32 values: `d`, 16 bytes of nibbles. `x = d * (q - 8)`
    Int4x32,
    /// 128 values: `d`, 64 bytes of nibbles. `x = d * (q - 8)`
    Int4x128,
    /// 32 values: `d`, `z` (i8, 0 to 16), 16 bytes of nibbles. `x = d * q - d * z`, which is `d * (q - z)` for every `d`
    /// of at most 20 bits, as f16 and bf16 have.
    Uint4x32,
    /// 128 values: `d`, `z`, 64 bytes of nibbles, likewise.
    Uint4x128,
    /// 32 values: `d`, 32 x i8. `x = d * q`
    Int8x32,
    /// 128 values: `d`, 128 x i8. `x = d * q`
    Int8x128,
    /// 32 values: `d`, 32 codes of e4m3fn (OCP FP8). `x = d * e4m3(q)`. A `d` of 2^120 or more counts as infinite.
    Fp8x32,
    /// 128 values: `d`, 128 codes of e4m3fn, likewise.
    Fp8x128,
    /// 32 values: `d` of the first 16, `d` of the others, 16 bytes of nibbles (E2M1). `x = d * value`, with `value` of
    /// [`MXFP4_VALUES`], so that `d` is half of a checkpoint's scale.
    Fp4x16,
}

impl BlockFormat {
    pub const ALL: [BlockFormat; 32] = [
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
        BlockFormat::IQ2_XXS,
        BlockFormat::IQ2_XS,
        BlockFormat::IQ2_S,
        BlockFormat::IQ3_XXS,
        BlockFormat::IQ3_S,
        BlockFormat::IQ1_S,
        BlockFormat::IQ1_M,
        BlockFormat::TQ1_0,
        BlockFormat::TQ2_0,
        BlockFormat::MXFP4,
        BlockFormat::NVFP4,
        BlockFormat::Int4x32,
        BlockFormat::Int4x128,
        BlockFormat::Uint4x32,
        BlockFormat::Uint4x128,
        BlockFormat::Int8x32,
        BlockFormat::Int8x128,
        BlockFormat::Fp8x32,
        BlockFormat::Fp8x128,
        BlockFormat::Fp4x16,
    ];

    /// The formats that GGUF files have.
    pub fn of_ggml() -> impl Iterator<Item = BlockFormat> {
        Self::ALL.into_iter().filter(|format| format.ggml_type().is_some())
    }

    /// ggml's number of the type (`enum ggml_type`); `None` for Folio's own.
    pub const fn ggml_type(self) -> Option<u32> {
        Some(match self {
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
            BlockFormat::IQ2_XXS => 16,
            BlockFormat::IQ2_XS => 17,
            BlockFormat::IQ2_S => 22,
            BlockFormat::IQ3_XXS => 18,
            BlockFormat::IQ3_S => 21,
            BlockFormat::IQ1_S => 19,
            BlockFormat::IQ1_M => 29,
            BlockFormat::TQ1_0 => 34,
            BlockFormat::TQ2_0 => 35,
            BlockFormat::MXFP4 => 39,
            BlockFormat::NVFP4 => 40,
            _ => return None,
        })
    }

    /// Part of a model's digest. The first 16 are for plain types, then come ggml's numbers, and from 128 on Folio's own.
    pub(crate) const fn tag(self) -> u8 {
        match self {
            BlockFormat::Int4x32 => 128,
            BlockFormat::Int4x128 => 129,
            BlockFormat::Uint4x32 => 130,
            BlockFormat::Uint4x128 => 131,
            BlockFormat::Int8x32 => 132,
            BlockFormat::Int8x128 => 133,
            BlockFormat::Fp8x32 => 134,
            BlockFormat::Fp8x128 => 135,
            BlockFormat::Fp4x16 => 136,
            _ => match self.ggml_type() {
                Some(number) => 16 + number as u8,
                None => unreachable!(),
            },
        }
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
            | BlockFormat::MXFP4
            | BlockFormat::Int4x32
            | BlockFormat::Uint4x32
            | BlockFormat::Int8x32
            | BlockFormat::Fp8x32
            | BlockFormat::Fp4x16 => 32,
            BlockFormat::NVFP4 => 64,
            BlockFormat::Int4x128 | BlockFormat::Uint4x128 | BlockFormat::Int8x128 | BlockFormat::Fp8x128 => {
                128
            }
            BlockFormat::Q2_K
            | BlockFormat::Q3_K
            | BlockFormat::Q4_K
            | BlockFormat::Q5_K
            | BlockFormat::Q6_K
            | BlockFormat::IQ4_XS
            | BlockFormat::IQ2_XXS
            | BlockFormat::IQ2_XS
            | BlockFormat::IQ2_S
            | BlockFormat::IQ3_XXS
            | BlockFormat::IQ3_S
            | BlockFormat::IQ1_S
            | BlockFormat::IQ1_M
            | BlockFormat::TQ1_0
            | BlockFormat::TQ2_0 => 256,
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
            BlockFormat::IQ2_XXS => 66,
            BlockFormat::IQ2_XS => 74,
            BlockFormat::IQ2_S => 82,
            BlockFormat::IQ3_XXS => 98,
            BlockFormat::IQ3_S => 110,
            BlockFormat::IQ1_S => 50,
            BlockFormat::IQ1_M => 56,
            BlockFormat::TQ1_0 => 54,
            BlockFormat::TQ2_0 => 66,
            BlockFormat::MXFP4 => 17,
            BlockFormat::NVFP4 => 4 + 32,
            BlockFormat::Int4x32 => 4 + 16,
            BlockFormat::Int4x128 => 4 + 64,
            BlockFormat::Uint4x32 => 5 + 16,
            BlockFormat::Uint4x128 => 5 + 64,
            BlockFormat::Int8x32 | BlockFormat::Fp8x32 => 4 + 32,
            BlockFormat::Int8x128 | BlockFormat::Fp8x128 => 4 + 128,
            BlockFormat::Fp4x16 => 2 * 4 + 16,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Part of every stored digest: a tag must never change, nor be used twice.
    #[test]
    fn tags_stay_what_they_were() {
        let tags = BlockFormat::ALL.map(BlockFormat::tag);
        let want = [
            18, 19, 22, 23, 24, 26, 27, 28, 29, 30, 36, 39, 32, 33, 38, 34, 37, 35, 45, 50, 51, 55, 56, 128,
            129, 130, 131, 132, 133, 134, 135, 136,
        ];
        assert_eq!(tags, want);
        assert_eq!(BlockFormat::of_ggml().count(), 23);
    }
}
