//! Weights made up instead of read: a model of real shapes for measurements, from its configuration alone.
//!
//! Owns: the values, which are the same at every start. Must never: be taken for a model. What it says means nothing.
//!
//! All matrices share one run of random bytes, so that making a model of any size costs as much as making its largest matrix.

use crate::backend::{Backend, DType, TensorView};
use crate::decoder::{Load, WeightSpec};
use crate::error::{ModelError, Result};
use crate::program::{MatrixId, VectorId};
use crate::quant::{BlockFormat, Encoding};

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
    /// Of plain bf16, for matrices whose columns are not whole blocks.
    plain: Vec<u8>,
    blocks: Vec<u8>,
    pub(crate) parameters: u64,
}

impl<'a> Dummy<'a> {
    /// `specs`: all weights that will be asked for.
    pub(crate) fn new<'s>(
        backend: &'a mut dyn Backend,
        encoding: Encoding,
        specs: impl Iterator<Item = &'s WeightSpec>,
    ) -> Self {
        let mut most = [0, 0];
        for part in specs.flat_map(|spec| &spec.parts) {
            let [rows, cols] = *part.shape else { continue };
            let stored = stored(encoding, cols);
            let bytes = stored.bytes(cols).unwrap_or(0) * rows;
            let most = &mut most[usize::from(stored == encoding)];
            *most = bytes.max(*most);
        }
        let [plain, blocks] = most;
        Self {
            backend,
            encoding,
            plain: values(Encoding::Plain(DType::BF16), plain),
            blocks: values(encoding, blocks),
            parameters: 0,
        }
    }
}

impl Load<ModelError> for Dummy<'_> {
    fn matrix(&mut self, spec: &WeightSpec) -> Result<MatrixId> {
        let views = spec.parts.iter().map(|part| {
            let cols = part.shape.last().copied().unwrap_or(0);
            let encoding = stored(self.encoding, cols);
            let bytes = if encoding == self.encoding { &self.blocks } else { &self.plain };
            let length = encoding.bytes(cols).unwrap_or(0) * part.shape[0];
            TensorView { encoding, shape: &part.shape, bytes: &bytes[..length], order: None }
        });
        let views: Vec<_> = views.collect();
        self.parameters += views.iter().map(|view| view.shape.iter().product::<usize>() as u64).sum::<u64>();
        Ok(self.backend.load_matrix(&spec.label, &views)?)
    }

    /// Norms change nothing, biases and sinks are zero.
    fn vector(&mut self, spec: &WeightSpec) -> Result<VectorId> {
        let value: f32 = if spec.label.contains("norm") { 1.0 } else { 0.0 };
        let length: usize = spec.parts.iter().map(|part| part.shape.iter().product::<usize>()).sum();
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

/// So many bytes of values of about a fiftieth, either sign.
fn values(encoding: Encoding, bytes: usize) -> Vec<u8> {
    let mut state = 0x9e37_79b9_7f4a_7c15u64;
    let mut random = move || {
        // xorshift64* (Vigna, 2016)
        state ^= state >> 12;
        state ^= state << 25;
        state ^= state >> 27;
        state.wrapping_mul(0x2545_f491_4f6c_dd1d)
    };
    let mut made = Vec::with_capacity(bytes.next_multiple_of(8));
    while made.len() < bytes {
        made.extend(random().to_le_bytes());
    }
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
