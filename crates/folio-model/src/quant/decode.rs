//! The values of a block, in plain loops: the definition that every packed form is tested against.
//!
//! For ggml's formats each function is its `dequantize_row_*` (llama.cpp, `ggml-quants.c`) of the same name. All are products
//! and sums of f32 in a fixed order, each rounded by itself (no fused multiply-add). Invariant: any bytes decode; a scale that is
//! not finite gives values that are not finite, never a panic.

use half::f16;

use super::{BlockFormat, IqBlock, IqValues};

impl BlockFormat {
    /// Decodes whole blocks. Panics unless `bytes` is whole blocks and `out` has exactly their values.
    pub fn decode(self, bytes: &[u8], out: &mut [f32]) {
        assert_eq!(bytes.len() / self.bytes() * self.values(), out.len());
        assert!(bytes.len().is_multiple_of(self.bytes()));
        let one = match self {
            BlockFormat::Q4_0 => q4_0,
            BlockFormat::Q4_1 => q4_1,
            BlockFormat::Q5_0 => q5_0,
            BlockFormat::Q5_1 => q5_1,
            BlockFormat::Q8_0 => q8_0,
            BlockFormat::Q2_K => q2_k,
            BlockFormat::Q3_K => q3_k,
            BlockFormat::Q4_K => q4_k,
            BlockFormat::Q5_K => q5_k,
            BlockFormat::Q6_K => q6_k,
            BlockFormat::IQ4_NL => iq4_nl,
            BlockFormat::IQ4_XS => iq4_xs,
            BlockFormat::MXFP4 => mxfp4,
            BlockFormat::NVFP4 => nvfp4,
            BlockFormat::Int4x32 | BlockFormat::Int4x128 => int4,
            BlockFormat::Uint4x32 | BlockFormat::Uint4x128 => uint4,
            BlockFormat::Int8x32 | BlockFormat::Int8x128 => int8,
            BlockFormat::Fp8x32 | BlockFormat::Fp8x128 => fp8,
            BlockFormat::Fp4x16 => fp4,
            _ => return iq(self, bytes, out),
        };
        for (block, out) in bytes.chunks_exact(self.bytes()).zip(out.chunks_exact_mut(self.values())) {
            one(block, out);
        }
    }
}

/// What the 16 codes of IQ4_NL and IQ4_XS stand for.
pub const IQ4_VALUES: [i8; 16] = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];

/// What the 16 codes of MXFP4, NVFP4 and Fp4x16 (E2M1) stand for, doubled so that they are integers.
pub const MXFP4_VALUES: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];

/// The scale of an MXFP4 block, `2^(e - 128)`: half of what E8M0 means, since [`MXFP4_VALUES`] are doubled.
pub fn mxfp4_scale(e: u8) -> f32 {
    let e = u32::from(e);
    f32::from_bits(if e < 2 { 0x0020_0000 << e } else { (e - 1) << 23 })
}

/// Scale and minimum number `i` (of 8) in the 12 bytes of Q4_K and Q5_K; 6 bits each.
pub const fn k_scale_min(scales: &[u8; 12], i: usize) -> (u8, u8) {
    if i < 4 {
        (scales[i] & 63, scales[i + 4] & 63)
    } else {
        let both = scales[i + 4];
        (both & 15 | (scales[i - 4] >> 6) << 4, both >> 4 | (scales[i] >> 6) << 4)
    }
}

/// Scale number `i` (of 16) in the 12 bytes of Q3_K, in `-32..32`.
pub const fn q3_k_scale(scales: &[u8; 12], i: usize) -> i8 {
    let low = if i < 8 { scales[i] & 15 } else { scales[i - 8] >> 4 };
    let high = scales[8 + i % 4] >> (2 * (i / 4)) & 3;
    (low | high << 4) as i8 - 32
}

/// An e4m3fn code (OCP FP8: bias 7, no infinities, 0x7f and 0xff are NaN) in units of 256: the f16 with its bits shifted to
/// their places, which has a bias larger by 8. Exact for every number, subnormal ones too; NaN is not told from a number.
pub const fn e4m3_in_256ths(code: u8) -> f16 {
    let code = code as u16;
    f16::from_bits((code & 0x80) << 8 | (code & 0x7f) << 7)
}

/// What [`e4m3_in_256ths`] of a scale of NVFP4 is in: 256, halved since [`MXFP4_VALUES`] are doubled.
pub const NVFP4_UNIT: f32 = 128.0;

/// The code of e4m3 that stands for a scale of NVFP4: without a sign, and zero for its NaN, as ggml reads it.
pub const fn nvfp4_scale_code(scale: u8) -> u8 {
    if scale == 0x7f { 0 } else { scale & 0x7f }
}

/// Half of a scale of an NVFP4 block.
pub fn nvfp4_scale(scale: u8) -> f32 {
    e4m3_in_256ths(nvfp4_scale_code(scale)).to_f32() * NVFP4_UNIT
}

fn half(bytes: &[u8]) -> f32 {
    f16::from_le_bytes([bytes[0], bytes[1]]).to_f32()
}

/// `N` bytes at `at`; blocks are cut to size by the caller.
fn array<const N: usize>(block: &[u8], at: usize) -> &[u8; N] {
    block[at..].first_chunk().expect("blocks are whole")
}

/// 32 values of two nibbles a byte, the low ones first.
fn nibbles(bytes: &[u8], out: &mut [f32], value: impl Fn(usize, u8) -> f32) {
    let (low, high) = out.split_at_mut(16);
    for (i, byte) in bytes[..16].iter().enumerate() {
        low[i] = value(i, byte & 15);
        high[i] = value(i + 16, byte >> 4);
    }
}

fn q4_0(block: &[u8], out: &mut [f32]) {
    let d = half(block);
    nibbles(&block[2..], out, |_, q| (f32::from(q) - 8.0) * d);
}

fn q4_1(block: &[u8], out: &mut [f32]) {
    let (d, m) = (half(block), half(&block[2..]));
    nibbles(&block[4..], out, |_, q| f32::from(q) * d + m);
}

/// The nibble with its fifth bit.
fn five(bits: &[u8; 4], i: usize, q: u8) -> f32 {
    f32::from(q | (bits[i / 8] >> (i % 8) & 1) << 4)
}

fn q5_0(block: &[u8], out: &mut [f32]) {
    let (d, bits) = (half(block), array(block, 2));
    nibbles(&block[6..], out, |i, q| (five(bits, i, q) - 16.0) * d);
}

fn q5_1(block: &[u8], out: &mut [f32]) {
    let (d, m, bits) = (half(block), half(&block[2..]), array(block, 4));
    nibbles(&block[8..], out, |i, q| five(bits, i, q) * d + m);
}

fn q8_0(block: &[u8], out: &mut [f32]) {
    let d = half(block);
    for (x, q) in out.iter_mut().zip(&block[2..]) {
        *x = d * f32::from(*q as i8);
    }
}

/// 16 runs of 16 values; run `i` is bits `2 * (i % 8 / 2)..` of the 16 bytes at `32 * (i / 8) + 16 * (i % 2)`.
fn two_bits(qs: &[u8], run: usize, i: usize) -> u8 {
    qs[32 * (run / 8) + 16 * (run % 2) + i] >> (2 * (run % 8 / 2)) & 3
}

fn q2_k(block: &[u8], out: &mut [f32]) {
    let (scales, qs) = (&block[..16], &block[16..80]);
    let (d, min) = (half(&block[80..]), half(&block[82..]));
    for (run, out) in out.chunks_exact_mut(16).enumerate() {
        let (d, m) = (d * f32::from(scales[run] & 15), min * f32::from(scales[run] >> 4));
        for (i, x) in out.iter_mut().enumerate() {
            *x = d * f32::from(two_bits(qs, run, i)) - m;
        }
    }
}

fn q3_k(block: &[u8], out: &mut [f32]) {
    let (mask, qs, scales) = (&block[..32], &block[32..96], array(block, 96));
    let d = half(&block[108..]);
    for (run, out) in out.chunks_exact_mut(16).enumerate() {
        let d = d * f32::from(q3_k_scale(scales, run));
        for (i, x) in out.iter_mut().enumerate() {
            let high = mask[16 * (run % 2) + i] >> (run / 2) & 1;
            *x = d * (f32::from(two_bits(qs, run, i) | high << 2) - 4.0);
        }
    }
}

fn q4_k(block: &[u8], out: &mut [f32]) {
    let (d, min, scales) = (half(block), half(&block[2..]), array(block, 4));
    for (run, out) in out.chunks_exact_mut(32).enumerate() {
        let (scale, m) = k_scale_min(scales, run);
        let (d, m) = (d * f32::from(scale), min * f32::from(m));
        let qs = &block[16 + 32 * (run / 2)..];
        for (x, q) in out.iter_mut().zip(qs) {
            *x = d * f32::from(q >> (4 * (run % 2)) & 15) - m;
        }
    }
}

fn q5_k(block: &[u8], out: &mut [f32]) {
    let (d, min, scales) = (half(block), half(&block[2..]), array(block, 4));
    let bits = &block[16..48];
    for (run, out) in out.chunks_exact_mut(32).enumerate() {
        let (scale, m) = k_scale_min(scales, run);
        let (d, m) = (d * f32::from(scale), min * f32::from(m));
        let qs = &block[48 + 32 * (run / 2)..];
        for ((x, q), bits) in out.iter_mut().zip(qs).zip(bits) {
            *x = d * f32::from(q >> (4 * (run % 2)) & 15 | (bits >> run & 1) << 4) - m;
        }
    }
}

fn q6_k(block: &[u8], out: &mut [f32]) {
    let (low, high, scales) = (&block[..128], &block[128..192], &block[192..208]);
    let d = half(&block[208..]);
    for (run, out) in out.chunks_exact_mut(16).enumerate() {
        let d = d * f32::from(scales[run] as i8);
        // Two halves of 128 values; in each, four runs of 32 share 64 low bytes and 32 high bytes.
        let (part, quarter, at) = (run / 8, run % 8 / 2, 16 * (run % 2));
        let low = &low[64 * part + 32 * (quarter % 2) + at..];
        let high = &high[32 * part + at..];
        for ((x, low), high) in out.iter_mut().zip(low).zip(high) {
            let q = low >> (4 * (quarter / 2)) & 15 | (high >> (2 * quarter) & 3) << 4;
            *x = d * (f32::from(q) - 32.0);
        }
    }
}

fn iq4_nl(block: &[u8], out: &mut [f32]) {
    let d = half(block);
    nibbles(&block[2..], out, |_, q| d * f32::from(IQ4_VALUES[usize::from(q)]));
}

fn iq4_xs(block: &[u8], out: &mut [f32]) {
    let d = half(block);
    let high = u16::from_le_bytes(*array(block, 2));
    let low = &block[4..8];
    for (run, (out, qs)) in out.chunks_exact_mut(32).zip(block[8..].chunks_exact(16)).enumerate() {
        let scale = low[run / 2] >> (4 * (run % 2)) & 15 | ((high >> (2 * run) & 3) as u8) << 4;
        let d = d * (f32::from(scale) - 32.0);
        nibbles(qs, out, |_, q| d * f32::from(IQ4_VALUES[usize::from(q)]));
    }
}

/// Blocks of a format that has [`BlockFormat::iq_values`].
fn iq(format: BlockFormat, bytes: &[u8], out: &mut [f32]) {
    let IqValues { values, unit } = format.iq_values().expect("an i-quant");
    for (block, out) in bytes.chunks_exact(format.bytes()).zip(out.chunks_exact_mut(format.values())) {
        let IqBlock { d, scales, codes } = IqBlock::read(format, block);
        for (i, (x, code)) in out.iter_mut().zip(codes).enumerate() {
            let scale = f16::from_bits(d).to_f32() * f32::from(scales[i / 16]) * unit;
            *x = scale * f32::from(values[usize::from(code)]);
        }
    }
}

fn mxfp4(block: &[u8], out: &mut [f32]) {
    let d = mxfp4_scale(block[0]);
    nibbles(&block[1..], out, |_, q| f32::from(MXFP4_VALUES[usize::from(q)]) * d);
}

fn nvfp4(block: &[u8], out: &mut [f32]) {
    let (scales, codes) = block.split_at(4);
    let runs = out.chunks_exact_mut(16).zip(codes.chunks_exact(8));
    for ((out, codes), scale) in runs.zip(scales) {
        let d = nvfp4_scale(*scale);
        let (low, high) = out.split_at_mut(8);
        for (i, byte) in codes.iter().enumerate() {
            low[i] = d * f32::from(MXFP4_VALUES[usize::from(byte & 15)]);
            high[i] = d * f32::from(MXFP4_VALUES[usize::from(byte >> 4)]);
        }
    }
}

fn single(block: &[u8]) -> f32 {
    f32::from_le_bytes(*array(block, 0))
}

fn int4(block: &[u8], out: &mut [f32]) {
    let d = single(block);
    for (qs, out) in block[4..].chunks_exact(16).zip(out.chunks_exact_mut(32)) {
        nibbles(qs, out, |_, q| d * (f32::from(q) - 8.0));
    }
}

fn uint4(block: &[u8], out: &mut [f32]) {
    let (d, z) = (single(block), f32::from(block[4] as i8));
    for (qs, out) in block[5..].chunks_exact(16).zip(out.chunks_exact_mut(32)) {
        nibbles(qs, out, |_, q| d * f32::from(q) - d * z);
    }
}

fn int8(block: &[u8], out: &mut [f32]) {
    let d = single(block);
    for (x, q) in out.iter_mut().zip(&block[4..]) {
        *x = d * f32::from(*q as i8);
    }
}

fn fp8(block: &[u8], out: &mut [f32]) {
    // Exact, so that the product below is the only rounding.
    let d = single(block) * 256.0;
    for (x, q) in out.iter_mut().zip(&block[4..]) {
        *x = if q & 0x7f == 0x7f { f32::NAN } else { d * e4m3_in_256ths(*q).to_f32() };
    }
}

fn fp4(block: &[u8], out: &mut [f32]) {
    let d = [single(block), single(&block[4..])];
    nibbles(&block[8..], out, |i, q| d[i / 16] * f32::from(MXFP4_VALUES[usize::from(q)]));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_decodes_to_the_values_its_layout_says() {
        let mut q8 = f16::from_f32(0.5).to_le_bytes().to_vec();
        q8.extend((0..32).map(|i| (i * 7 - 100) as i8 as u8));
        let mut out = [0.0; 32];
        BlockFormat::Q8_0.decode(&q8, &mut out);
        assert_eq!(out, std::array::from_fn(|i| 0.5 * (i as f32 * 7.0 - 100.0)));

        let mut q4 = f16::from_f32(-0.25).to_le_bytes().to_vec();
        q4.extend((0..16).map(|i| (i | (15 - i) << 4) as u8));
        BlockFormat::Q4_0.decode(&q4, &mut out);
        assert_eq!(out[..16], std::array::from_fn::<f32, 16, _>(|i| -0.25 * (i as f32 - 8.0)));
        assert_eq!(out[16..], std::array::from_fn::<f32, 16, _>(|i| -0.25 * (7.0 - i as f32)));
    }

    /// Blocks with a full scale and all codes, against the sentence that defines the format.
    #[test]
    fn folios_own_formats_are_what_they_say() {
        let scales = [0.0123f32, -3.5e-5, 1.0e-41, f32::from_bits(0x3f80_0001)];
        for (d, values) in scales.into_iter().flat_map(|d| [(d, 32), (d, 128)]) {
            let of = |small, large| if values == 32 { small } else { large };
            let mut out = vec![9.0; values];
            let nibble = |i: usize| (7 * i + i / 16) as u8 & 15;
            let codes = (0..values / 2).map(|byte| {
                let at = byte / 16 * 32 + byte % 16;
                nibble(at) | nibble(at + 16) << 4
            });
            let block: Vec<u8> = d.to_le_bytes().into_iter().chain(codes.clone()).collect();
            of(BlockFormat::Int4x32, BlockFormat::Int4x128).decode(&block, &mut out);
            for (i, x) in out.iter().enumerate() {
                assert_eq!(*x, d * (f32::from(nibble(i)) - 8.0));
            }
            for z in 0..=16 {
                let block: Vec<u8> = d.to_le_bytes().into_iter().chain([z]).chain(codes.clone()).collect();
                of(BlockFormat::Uint4x32, BlockFormat::Uint4x128).decode(&block, &mut out);
                for (i, x) in out.iter().enumerate() {
                    let (q, z) = (f32::from(nibble(i)), f32::from(z));
                    assert_eq!(*x, d * q - d * z);
                    assert!((x - d * (q - z)).abs() <= d.abs() * 2e-6 + f32::from_bits(1));
                }
            }
            let byte = |i: usize| (37 * i + 128) as u8;
            let block: Vec<u8> = d.to_le_bytes().into_iter().chain((0..values).map(byte)).collect();
            of(BlockFormat::Int8x32, BlockFormat::Int8x128).decode(&block, &mut out);
            for (i, x) in out.iter().enumerate() {
                assert_eq!(*x, d * f32::from(byte(i) as i8));
            }
        }
    }

    /// Every code of E2M1 by its definition, under either scale.
    #[test]
    fn halves_of_e2m1_have_a_scale_each() {
        for scales in [[1.0f32, 0.0371], [-7.7e-6, 1.3e36], [f32::from_bits(0x3f80_0001), 0.0]] {
            let halved = scales.map(|scale| (scale / 2.0).to_le_bytes()).concat();
            // Both halves have all codes, the second in the other order.
            let block: Vec<u8> = halved.into_iter().chain((0..16).map(|i| i | (15 - i) << 4)).collect();
            let mut out = [9.0; 32];
            BlockFormat::Fp4x16.decode(&block, &mut out);
            for (i, x) in out.into_iter().enumerate() {
                let code = if i < 16 { i } else { 31 - i };
                let (e, m) = (code as i32 >> 1 & 3, (code & 1) as f32);
                let size = if e == 0 { m / 2.0 } else { (1.0 + m / 2.0) * 2f32.powi(e - 1) };
                assert_eq!(x, scales[i / 16] * if code > 7 { -size } else { size }, "{scales:?} {i}");
            }
        }
    }

    /// A scale of 16 bits has a product with every code and zero, so `d * q - d * z` is `d * (q - z)`.
    #[test]
    fn zeros_are_exact_where_scales_are_f16_or_bf16() {
        for bits in (0..=u16::MAX).step_by(7) {
            for d in [f16::from_bits(bits).to_f32(), half::bf16::from_bits(bits).to_f32()] {
                let largest = d * 16.0;
                if !largest.is_finite() || (d.abs() < f32::MIN_POSITIVE && d != 0.0) {
                    continue;
                }
                for z in 0..=16 {
                    let mut block = d.to_le_bytes().to_vec();
                    block.push(z);
                    block.extend((0..16).map(|i| i << 4 | (15 - i)));
                    let mut out = [9.0; 32];
                    BlockFormat::Uint4x32.decode(&block, &mut out);
                    for (i, x) in out.into_iter().enumerate() {
                        let q = if i < 16 { 15 - i } else { i - 16 };
                        assert_eq!(x, d * (q as f32 - f32::from(z)), "{d} {q} {z}");
                    }
                }
            }
        }
    }

    /// Every code of e4m3 by its definition, with one rounding.
    #[test]
    fn codes_of_e4m3_are_what_ocp_says() {
        for d in [1.0f32, 0.0371, -7.7e-6, 1.0e-40, 1.3e36] {
            for start in [0u8, 32, 64, 96, 128, 160, 192, 224] {
                let block: Vec<u8> = d.to_le_bytes().into_iter().chain(start..=start + 31).collect();
                let mut out = [9.0; 32];
                BlockFormat::Fp8x32.decode(&block, &mut out);
                for (x, code) in out.into_iter().zip(start..=start + 31) {
                    let (sign, e, m) = (code >> 7, i32::from(code >> 3 & 15), f64::from(code & 7));
                    let size =
                        if e == 0 { m / 8.0 * 2f64.powi(-6) } else { (1.0 + m / 8.0) * 2f64.powi(e - 7) };
                    let value = if sign == 1 { -size } else { size };
                    match code & 0x7f {
                        0x7f => assert!(x.is_nan()),
                        _ => assert_eq!(x.to_bits(), ((f64::from(d) * value) as f32).to_bits(), "{code:#x}"),
                    }
                }
            }
        }
        assert_eq!(e4m3_in_256ths(0x7e).to_f32() * 256.0, 448.0);
    }

    #[test]
    fn scales_of_mxfp4_are_powers_of_two_down_to_the_smallest() {
        assert_eq!(mxfp4_scale(0), 2f32.powi(-128));
        assert_eq!(mxfp4_scale(1), 2f32.powi(-127));
        assert_eq!(mxfp4_scale(2), 2f32.powi(-126));
        assert_eq!(mxfp4_scale(128), 1.0);
        assert_eq!(mxfp4_scale(255), 2f32.powi(127));
    }

    /// Every digit and place of TQ1_0 and TQ2_0, by their definitions.
    #[test]
    fn ternary_values_are_at_their_places() {
        let values: Vec<i8> = (0..256).map(|i: i32| ((i * i + i / 7) % 3) as i8 - 1).collect();
        let d = f16::from_f32(0.37);
        // Digits are a fraction of 256 in base 3, rounded up; the first is the most significant.
        let digits = |of: &[usize]| {
            let number = of.iter().fold(0, |sum, i| 3 * sum + (values[*i] + 1) as u32);
            let whole = number * 3u32.pow(5 - of.len() as u32);
            (whole * 256).div_ceil(243) as u8
        };
        let mut one: Vec<u8> = (0..32).map(|m| digits(&[0, 1, 2, 3, 4].map(|n| 32 * n + m))).collect();
        one.extend((0..16).map(|m| digits(&[0, 1, 2, 3, 4].map(|n| 160 + 16 * n + m))));
        one.extend((0..4).map(|m| digits(&[0, 1, 2, 3].map(|n| 240 + 4 * n + m))));
        one.extend(d.to_le_bytes());
        let place = |m: usize, n: usize| 128 * (m / 32) + 32 * n + m % 32;
        let mut two: Vec<u8> = (0..64)
            .map(|m| (0..4).fold(0, |byte, n| byte | ((values[place(m, n)] + 1) as u8) << (2 * n)))
            .collect();
        two.extend(d.to_le_bytes());
        for (format, block) in [(BlockFormat::TQ1_0, one), (BlockFormat::TQ2_0, two)] {
            let mut out = [9.0; 256];
            format.decode(&block, &mut out);
            for (i, (x, value)) in out.iter().zip(&values).enumerate() {
                assert_eq!(*x, d.to_f32() * f32::from(*value), "{format:?} {i}");
            }
        }
    }

    /// Every scale and code of NVFP4: a scale is e4m3's, but NaN is zero and a sign counts for nothing.
    #[test]
    fn scales_of_nvfp4_are_e4m3_without_a_sign() {
        for scale in 0..=255u8 {
            let (e, m) = (i32::from(scale >> 3 & 15), f32::from(scale & 7));
            let size = if e == 0 { m * 2f32.powi(-9) } else { (1.0 + m / 8.0) * 2f32.powi(e - 7) };
            let size = if scale == 0x7f { 0.0 } else { size };
            let mut block = vec![0, scale, 0, 0];
            block.extend([0; 8]);
            block.extend((0..8).map(|i| i | (15 - i) << 4));
            block.extend([0; 16]);
            let mut out = [9.0; 64];
            BlockFormat::NVFP4.decode(&block, &mut out);
            for (i, x) in out.into_iter().enumerate() {
                let code = match i {
                    16..24 => i - 16,
                    24..32 => 15 - (i - 24),
                    _ => 0,
                };
                assert_eq!(x, size / 2.0 * f32::from(MXFP4_VALUES[code]), "{scale:#x} {i}");
            }
        }
    }

    #[test]
    fn any_bytes_decode() {
        for format in BlockFormat::ALL {
            let mut out = vec![0.0; format.values()];
            for byte in [0x00, 0x7f, 0x80, 0xff] {
                format.decode(&vec![byte; format.bytes()], &mut out);
            }
        }
    }
}
