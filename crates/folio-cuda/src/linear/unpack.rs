//! Block formats as codes, scales and minimums: `value = scale * code + minimum`.
//!
//! Owns: what a block's numbers are as the kernels take them. Invariant: the products and sums, each rounded to f32, give exactly what
//! [`BlockFormat::decode`] gives, but for a NaN among e4m3 codes, which makes its whole group NaN.

use folio_model::quant::{
    BlockFormat, IqBlock, IqValues, MXFP4_VALUES, k_scale_min, mxfp4_scale, nvfp4_scale, q3_k_scale,
};
use half::f16;

/// What codes stand for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Codes {
    /// i8.
    Eight,
    /// e4m3.
    Fp8,
    /// A nibble less this.
    Four { offset: u32 },
    /// A nibble: E2M1, doubled.
    Mx4,
    /// A nibble: an index of IQ4_VALUES.
    Iq4,
}

/// How a format is held on the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct WeightLayout {
    pub codes: Codes,
    /// Columns that share a scale: 16, 32 or 128.
    pub group: usize,
    pub minimums: bool,
}

impl WeightLayout {
    pub fn of(format: BlockFormat) -> Self {
        let (codes, group, minimums) = match format {
            BlockFormat::Q4_0 | BlockFormat::Int4x32 => (Codes::Four { offset: 8 }, 32, false),
            BlockFormat::Int4x128 => (Codes::Four { offset: 8 }, 128, false),
            BlockFormat::Q4_1 | BlockFormat::Q4_K | BlockFormat::Uint4x32 => {
                (Codes::Four { offset: 0 }, 32, true)
            }
            BlockFormat::Uint4x128 => (Codes::Four { offset: 0 }, 128, true),
            BlockFormat::Q2_K => (Codes::Four { offset: 0 }, 16, true),
            BlockFormat::Q3_K => (Codes::Four { offset: 4 }, 16, false),
            BlockFormat::Q5_0 | BlockFormat::Q8_0 | BlockFormat::Int8x32 => (Codes::Eight, 32, false),
            BlockFormat::Int8x128 => (Codes::Eight, 128, false),
            BlockFormat::Q5_1 | BlockFormat::Q5_K => (Codes::Eight, 32, true),
            BlockFormat::IQ4_NL | BlockFormat::IQ4_XS => (Codes::Iq4, 32, false),
            BlockFormat::MXFP4 => (Codes::Mx4, 32, false),
            BlockFormat::Fp8x32 => (Codes::Fp8, 32, false),
            BlockFormat::Fp8x128 => (Codes::Fp8, 128, false),
            // Q6_K, and those whose nibbles no kernel knows: they have a byte for each.
            _ => (Codes::Eight, 16, false),
        };
        Self { codes, group, minimums }
    }
}

/// Where a block's numbers go: a code for every value, a scale and a minimum for every group.
pub struct Numbers<'a> {
    pub codes: &'a mut [u8],
    pub scales: &'a mut [f32],
    pub minimums: &'a mut [f32],
}

fn half(bytes: &[u8]) -> f32 {
    f16::from_le_bytes([bytes[0], bytes[1]]).to_f32()
}

fn single(bytes: &[u8]) -> f32 {
    f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]])
}

/// Nibbles in pairs that are 16 apart, run by run of 32.
fn nibbles(bytes: &[u8], codes: &mut [u8]) {
    for (bytes, codes) in bytes.chunks(16).zip(codes.chunks_mut(32)) {
        for (i, byte) in bytes.iter().enumerate() {
            codes[i] = byte & 15;
            codes[i + 16] = byte >> 4;
        }
    }
}

/// One block of `format`.
pub fn unpack(format: BlockFormat, block: &[u8], out: &mut Numbers<'_>) {
    let Numbers { codes, scales, minimums } = out;
    let fifth = |bits: &[u8], codes: &mut [u8]| {
        codes.iter_mut().enumerate().for_each(|(i, code)| *code |= (bits[i / 8] >> (i % 8) & 1) << 4);
    };
    match format {
        BlockFormat::Q4_0 | BlockFormat::IQ4_NL => {
            scales[0] = half(block);
            nibbles(&block[2..], codes);
        }
        BlockFormat::Q4_1 => {
            (scales[0], minimums[0]) = (half(block), half(&block[2..]));
            nibbles(&block[4..], codes);
        }
        BlockFormat::Q5_0 => {
            scales[0] = half(block);
            nibbles(&block[6..], codes);
            fifth(&block[2..6], codes);
            codes.iter_mut().for_each(|code| *code = code.wrapping_sub(16));
        }
        BlockFormat::Q5_1 => {
            (scales[0], minimums[0]) = (half(block), half(&block[2..]));
            nibbles(&block[8..], codes);
            fifth(&block[4..8], codes);
        }
        BlockFormat::Q8_0 => {
            scales[0] = half(block);
            codes.copy_from_slice(&block[2..]);
        }
        BlockFormat::MXFP4 => {
            scales[0] = mxfp4_scale(block[0]);
            nibbles(&block[1..], codes);
        }
        BlockFormat::Fp4x16 => {
            (scales[0], scales[1]) = (single(block), single(&block[4..]));
            nibbles(&block[8..], codes);
            codes.iter_mut().for_each(|code| *code = MXFP4_VALUES[usize::from(*code)] as u8);
        }
        BlockFormat::NVFP4 => {
            for (out, scale) in scales.iter_mut().zip(block) {
                *out = nvfp4_scale(*scale);
            }
            for (codes, bytes) in codes.chunks_mut(16).zip(block[4..].chunks(8)) {
                for (i, byte) in bytes.iter().enumerate() {
                    codes[i] = MXFP4_VALUES[usize::from(byte & 15)] as u8;
                    codes[i + 8] = MXFP4_VALUES[usize::from(byte >> 4)] as u8;
                }
            }
        }
        BlockFormat::Int4x32 | BlockFormat::Int4x128 => {
            scales[0] = single(block);
            nibbles(&block[4..], codes);
        }
        BlockFormat::Uint4x32 | BlockFormat::Uint4x128 => {
            scales[0] = single(block);
            minimums[0] = -(scales[0] * f32::from(block[4] as i8));
            nibbles(&block[5..], codes);
        }
        BlockFormat::Int8x32 | BlockFormat::Int8x128 => {
            scales[0] = single(block);
            codes.copy_from_slice(&block[4..]);
        }
        BlockFormat::Fp8x32 | BlockFormat::Fp8x128 => {
            let (d, nan) = (single(block), block[4..].iter().any(|code| code & 0x7f == 0x7f));
            // What decoding does to a scale that is too large.
            let d = if (d * 256.0).is_finite() { d } else { d * 256.0 };
            scales[0] = if nan { f32::NAN } else { d };
            codes.copy_from_slice(&block[4..]);
        }
        BlockFormat::Q2_K
        | BlockFormat::Q3_K
        | BlockFormat::Q4_K
        | BlockFormat::Q5_K
        | BlockFormat::Q6_K
        | BlockFormat::IQ4_XS => super_block(format, block, out),
        _ => {
            let IqValues { values, unit } = format.iq_values().expect("an i-quant");
            let block = IqBlock::read(format, block);
            for (out, scale) in scales.iter_mut().zip(block.scales) {
                *out = f16::from_bits(block.d).to_f32() * f32::from(scale) * unit;
            }
            for (out, code) in codes.iter_mut().zip(block.codes) {
                *out = values[usize::from(code)] as u8;
            }
        }
    }
}

/// The formats of 256 values, whose groups have scales in units of the block's.
fn super_block(format: BlockFormat, block: &[u8], out: &mut Numbers<'_>) {
    let Numbers { codes, scales, minimums } = out;
    let two_bits = |qs: &[u8], i: usize| {
        let run = i / 16;
        qs[32 * (run / 8) + 16 * (run % 2) + i % 16] >> (2 * (run % 8 / 2)) & 3
    };
    let twelve = |at: usize| -> &[u8; 12] { block[at..].first_chunk().expect("blocks are whole") };
    match format {
        BlockFormat::Q2_K => {
            let (d, min) = (half(&block[80..]), half(&block[82..]));
            for (run, byte) in block[..16].iter().enumerate() {
                scales[run] = d * f32::from(byte & 15);
                minimums[run] = -(min * f32::from(byte >> 4));
            }
            codes.iter_mut().enumerate().for_each(|(i, code)| *code = two_bits(&block[16..80], i));
        }
        BlockFormat::Q3_K => {
            let (d, mask) = (half(&block[108..]), &block[..32]);
            for (run, scale) in scales.iter_mut().enumerate() {
                *scale = d * f32::from(q3_k_scale(twelve(96), run));
            }
            for (i, code) in codes.iter_mut().enumerate() {
                let high = mask[i % 32] >> (i / 32) & 1;
                *code = two_bits(&block[32..96], i) | high << 2;
            }
        }
        BlockFormat::Q4_K | BlockFormat::Q5_K => {
            let (d, min) = (half(block), half(&block[2..]));
            for run in 0..8 {
                let (scale, minimum) = k_scale_min(twelve(4), run);
                scales[run] = d * f32::from(scale);
                minimums[run] = -(min * f32::from(minimum));
            }
            let five = format == BlockFormat::Q5_K;
            let low = &block[if five { 48 } else { 16 }..];
            for (i, code) in codes.iter_mut().enumerate() {
                let run = i / 32;
                *code = low[32 * (run / 2) + i % 32] >> (4 * (run % 2)) & 15;
                if five {
                    *code |= (block[16 + i % 32] >> run & 1) << 4;
                }
            }
        }
        BlockFormat::Q6_K => {
            let d = half(&block[208..]);
            for (scale, byte) in scales.iter_mut().zip(&block[192..208]) {
                *scale = d * f32::from(*byte as i8);
            }
            for (i, code) in codes.iter_mut().enumerate() {
                let (part, quarter, at) = (i / 128, i % 128 / 32, i % 32);
                let low = block[64 * part + 32 * (quarter % 2) + at] >> (4 * (quarter / 2)) & 15;
                let high = block[128 + 32 * part + at] >> (2 * quarter) & 3;
                *code = (low | high << 4).wrapping_sub(32);
            }
        }
        _ => {
            let (d, high) = (half(block), u16::from_le_bytes([block[2], block[3]]));
            for (run, out) in scales.iter_mut().enumerate() {
                let low = block[4 + run / 2] >> (4 * (run % 2)) & 15;
                let scale = low | ((high >> (2 * run) & 3) as u8) << 4;
                *out = d * (f32::from(scale) - 32.0);
            }
            nibbles(&block[8..], codes);
        }
    }
}

#[cfg(test)]
mod tests {
    use folio_model::quant::IQ4_VALUES;

    use super::*;

    fn number(codes: Codes, code: u8) -> f32 {
        match codes {
            Codes::Eight => f32::from(code as i8),
            Codes::Fp8 => {
                let mut block = 1.0f32.to_le_bytes().to_vec();
                block.extend([code; 32]);
                let mut values = [0.0; 32];
                BlockFormat::Fp8x32.decode(&block, &mut values);
                values[0]
            }
            Codes::Four { offset } => f32::from(code) - offset as f32,
            Codes::Mx4 => f32::from(MXFP4_VALUES[usize::from(code)]),
            Codes::Iq4 => f32::from(IQ4_VALUES[usize::from(code)]),
        }
    }

    /// Random blocks of every format, against its definition.
    #[test]
    fn numbers_make_exactly_the_values_that_decoding_makes() {
        let mut state = 1u32;
        let mut byte = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 24) as u8
        };
        for format in BlockFormat::ALL {
            let layout = WeightLayout::of(format);
            for _ in 0..50 {
                let block: Vec<u8> = (0..format.bytes()).map(|_| byte()).collect();
                let mut values = vec![0.0; format.values()];
                format.decode(&block, &mut values);
                let groups = format.values() / layout.group;
                let (mut codes, mut scales, mut minimums) =
                    (vec![0; format.values()], vec![0.0; groups], vec![0.0; groups]);
                let mut numbers = Numbers { codes: &mut codes, scales: &mut scales, minimums: &mut minimums };
                unpack(format, &block, &mut numbers);
                for (i, value) in values.iter().enumerate() {
                    let scaled = scales[i / layout.group] * number(layout.codes, codes[i]);
                    let found = if layout.minimums { scaled + minimums[i / layout.group] } else { scaled };
                    let group = &values[i / layout.group * layout.group..][..layout.group];
                    match group.iter().any(|value| value.is_nan()) {
                        true => assert!(found.is_nan() || found == *value),
                        false => assert_eq!(found, *value, "{format:?} {i}"),
                    }
                }
            }
        }
    }
}
