//! Weights made up instead of read: a model of real shapes for measurements, from its configuration alone.
//!
//! Owns: the values, which are the same at every start and on every device. Must never: be taken for a model. What it says means
//! nothing.
//!
//! A matrix is the beginning of one run of random words ([`word`]), as its encoding stores rows, with what would be no sensible number
//! put right ([`values`]). A word follows from its place in the run alone: a device can make any part of a matrix where that part
//! lies ([`Backend::make_up_matrix`]). The host makes the run once, as long as the largest matrix that the device leaves to it.

use std::collections::HashMap;

use crate::backend::{Backend, DType, TensorView};
use crate::error::{ModelError, Result};
use crate::program::{MatrixId, VectorId};
use crate::quant::{BlockFormat, Encoding};
use crate::weights::{Load, Made, WeightSpec};

/// Encodings that can be made up.
pub const ENCODINGS: [Encoding; 12] = [
    Encoding::Plain(DType::BF16),
    Encoding::Plain(DType::F16),
    Encoding::Plain(DType::F32),
    Encoding::Block(BlockFormat::Q8_0),
    Encoding::Block(BlockFormat::Q4_0),
    Encoding::Block(BlockFormat::MXFP4),
    Encoding::Block(BlockFormat::Int4x32),
    Encoding::Block(BlockFormat::Int4x128),
    Encoding::Block(BlockFormat::Int8x32),
    Encoding::Block(BlockFormat::Int8x128),
    Encoding::Block(BlockFormat::Fp8x32),
    Encoding::Block(BlockFormat::Fp8x128),
];

/// Gives a backend made-up weights.
pub(crate) struct Dummy<'a> {
    backend: &'a mut dyn Backend,
    encoding: Encoding,
    /// As long as the largest matrix that was made here in each encoding: the one that is asked for, and those of matrices that cannot
    /// be in it.
    runs: HashMap<Encoding, Vec<u8>>,
    pub(crate) parameters: u64,
}

impl<'a> Dummy<'a> {
    pub(crate) fn new(backend: &'a mut dyn Backend, encoding: Encoding) -> Self {
        Self { backend, encoding, runs: HashMap::new(), parameters: 0 }
    }
}

impl Load<ModelError> for Dummy<'_> {
    fn matrix(&mut self, spec: &WeightSpec) -> Result<MatrixId> {
        let [rows, cols] = spec.matrix_shape();
        let encoding = match spec.made {
            // As it is where it was quantized.
            Made::Transposed { .. } if self.encoding.plain().is_none() => Encoding::Plain(DType::F32),
            _ => stored(self.encoding, cols),
        };
        self.parameters += (rows * cols) as u64;
        if let Some(made) = self.backend.make_up_matrix(&spec.label, encoding, [rows, cols])? {
            return Ok(made);
        }
        let bytes = rows * encoding.bytes(cols).unwrap_or(0);
        let run = self.runs.entry(encoding).or_default();
        if run.len() < bytes {
            *run = values(encoding, bytes);
        }
        let view = TensorView { encoding, shape: &[rows, cols], bytes: &run[..bytes], order: None };
        Ok(self.backend.load_matrix(&spec.label, &[view])?)
    }

    /// Norms and scales change nothing, states decay a little, convolutions take a mean; biases and sinks are zero.
    fn vector(&mut self, spec: &WeightSpec) -> Result<VectorId> {
        let value: f32 = match spec.made {
            Made::MinusExp => -0.02,
            Made::Taps => 0.25,
            Made::Linear { .. } if spec.label.contains("norm") || spec.label.ends_with("_scale") => 1.0,
            Made::Ones { .. } => 1.0,
            Made::Linear { .. } | Made::Transposed { .. } => 0.0,
        };
        let length: usize = match spec.made {
            Made::Ones { count } => count,
            _ => spec.parts.iter().map(|part| part.shape.iter().product::<usize>()).sum(),
        };
        self.parameters += length as u64;
        let (shape, bytes) = ([length], value.to_le_bytes().repeat(length));
        let encoding = Encoding::Plain(DType::F32);
        let view = TensorView { encoding, shape: &shape, bytes: &bytes, order: None };
        Ok(self.backend.load_vector(&spec.label, &[view])?)
    }
}

/// What a matrix of so many columns is made up in.
fn stored(encoding: Encoding, cols: usize) -> Encoding {
    if encoding.bytes(cols).is_some() { encoding } else { Encoding::Plain(DType::BF16) }
}

/// Word `place` of the run: Chris Wellons' `lowbias32`, a bijection of 32 bits.
pub const fn word(place: u32) -> u32 {
    let mut x = place;
    x ^= x >> 16;
    x = x.wrapping_mul(0x7feb_352d);
    x ^= x >> 15;
    x = x.wrapping_mul(0x846c_a68b);
    x ^ x >> 16
}

/// The beginning of the run, so many bytes of it, as values of about a fiftieth of either sign. Words are little endian; beyond 16 GiB
/// they begin again.
pub fn values(encoding: Encoding, bytes: usize) -> Vec<u8> {
    let mut made: Vec<u8> =
        (0..bytes.div_ceil(4)).flat_map(|place| word(place as u32).to_le_bytes()).collect();
    made.truncate(bytes);
    match encoding {
        // 2^-6 to 2^-5: the exponent is set, sign and fraction stay.
        Encoding::Plain(DType::BF16) => each(&mut made, |b: &mut [u8; 2]| b[1] = b[1] & 0x80 | 0x3c),
        Encoding::Plain(DType::F16) => each(&mut made, |b: &mut [u8; 2]| b[1] = b[1] & 0x83 | 0x24),
        Encoding::Plain(DType::F32) => each(&mut made, |b: &mut [u8; 4]| b[3] = b[3] & 0x80 | 0x3c),
        Encoding::Block(format) => {
            for block in made.chunks_exact_mut(format.bytes()) {
                scale(format, block);
            }
        }
    }
    made
}

fn each<const N: usize>(bytes: &mut [u8], mut change: impl FnMut(&mut [u8; N])) {
    bytes.as_chunks_mut().0.iter_mut().for_each(&mut change);
}

/// Puts a sensible scale where the block has it; codes that are no number become zero.
fn scale(format: BlockFormat, block: &mut [u8]) {
    let short = |value: f32| half::f16::from_f32(value).to_le_bytes();
    match format {
        BlockFormat::Q8_0 => block[..2].copy_from_slice(&short(0.02 / 64.0)),
        BlockFormat::Q4_0 => block[..2].copy_from_slice(&short(0.02 / 4.0)),
        BlockFormat::MXFP4 => block[0] = 120,
        BlockFormat::Int8x32 | BlockFormat::Int8x128 => {
            block[..4].copy_from_slice(&(0.02f32 / 64.0).to_le_bytes());
        }
        BlockFormat::Fp8x32 | BlockFormat::Fp8x128 => {
            block[..4].copy_from_slice(&(0.02f32 / 8.0).to_le_bytes());
            block[4..].iter_mut().filter(|code| **code & 0x7f == 0x7f).for_each(|code| *code = 0);
        }
        _ => block[..4].copy_from_slice(&(0.02f32 / 4.0).to_le_bytes()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_finite_small_and_neither_all_of_one_sign_nor_all_alike() {
        for encoding in ENCODINGS {
            let count = 4096;
            let bytes = values(encoding, encoding.bytes(count).unwrap());
            let mut decoded = vec![0.0f32; count];
            match encoding {
                Encoding::Block(format) => format.decode(&bytes, &mut decoded),
                Encoding::Plain(dtype) => {
                    for (value, bytes) in decoded.iter_mut().zip(bytes.chunks_exact(dtype.size())) {
                        *value = crate::check::to_f32(dtype, bytes);
                    }
                }
            }
            assert!(decoded.iter().all(|value| value.is_finite() && value.abs() < 2.0), "{encoding}");
            let mean = decoded.iter().map(|value| value.abs()).sum::<f32>() / count as f32;
            assert!((0.002..0.3).contains(&mean), "{encoding}: {mean}");
            let above = decoded.iter().filter(|value| **value > 0.0).count();
            assert!((count / 3..2 * count / 3).contains(&above), "{encoding}: {above} of {count} above zero");
        }
    }
}
