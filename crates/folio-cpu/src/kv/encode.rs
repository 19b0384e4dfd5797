//! Head vectors in the formats that have a scale.
//!
//! Owns: what `folio_model::kv_format` defines, written so that a compiler makes vectors of it. Must never: differ from that by a
//! bit; a test compares them. Cost: a few passes over one head vector.

use folio_model::backend::KvFormat;
use folio_model::kv_format::{FLUSH, LEVELS, SCALED_HEAD_DIM_MAX, rotation};
use half::bf16;

/// One byte per dimension.
pub(super) type Codes = [u8; SCALED_HEAD_DIM_MAX];

/// `1.5 * 2^23`: added to a number below 2^22, its low bits are that number as an integer, nearest even.
const SHIFT: f32 = 12_582_912.0;
/// Lanes of sums.
const LANES: usize = 16;

/// Codes of a vector, and its scale as the bits of a bf16.
pub(super) fn encode(format: KvFormat, x: &[f32], codes: &mut [u8]) -> u16 {
    let mut rotated = [0f32; SCALED_HEAD_DIM_MAX];
    let (zero, x) = match format {
        KvFormat::Int4 => {
            let rotated = &mut rotated[..x.len()];
            rotated.copy_from_slice(x);
            rotate(rotated);
            (8, &*rotated)
        }
        _ => (0, x),
    };
    let largest = largest_magnitude(x);
    if !largest.is_finite() || largest < FLUSH {
        codes.fill(zero);
        return if largest.is_finite() { 0 } else { bf16::NAN.to_bits() };
    }
    match format {
        KvFormat::Int8 => {
            let (scale, inverse) = scale_of(largest / 127.0);
            codes.iter_mut().zip(x).for_each(|(code, x)| *code = nearest(x * inverse) as u8);
            scale
        }
        KvFormat::Fp8 => {
            let (scale, inverse) = scale_of(largest / 448.0);
            codes.iter_mut().zip(x).for_each(|(code, x)| *code = e4m3(x * inverse));
            scale
        }
        _ => int4(x, codes),
    }
}

/// The largest magnitude; infinite, or no number, where a value is.
pub(crate) fn largest_magnitude(x: &[f32]) -> f32 {
    let bits = x.iter().fold(0i32, |largest, x| largest.max((x.to_bits() & 0x7fff_ffff) as i32));
    f32::from_bits(bits as u32)
}

/// Nearest even of a number below 2^22 in magnitude, without a library call where there is no instruction for it.
#[inline(always)]
pub(crate) fn nearest(x: f32) -> i32 {
    (x + SHIFT).to_bits() as i32 - SHIFT.to_bits() as i32
}

/// Rotates a head vector in place: see `kv_format`.
pub(crate) fn rotate(x: &mut [f32]) {
    let size = rotation(x.len());
    let norm = (size as f32).sqrt().recip();
    for block in x.chunks_exact_mut(size) {
        let mut distance = 1;
        while distance < size {
            for pair in block.chunks_exact_mut(2 * distance) {
                let (a, b) = pair.split_at_mut(distance);
                for (a, b) in a.iter_mut().zip(b) {
                    (*a, *b) = (*a + *b, *a - *b);
                }
            }
            distance *= 2;
        }
        block.iter_mut().for_each(|x| *x *= norm);
    }
}

/// The next bf16 that is not smaller, and one over it.
fn scale_of(x: f32) -> (u16, f32) {
    let bits = x.to_bits().saturating_add(0xffff) & 0xffff_0000;
    ((bits >> 16) as u16, f32::from_bits(bits).recip())
}

#[inline(always)]
fn e4m3(x: f32) -> u8 {
    let bits = x.to_bits();
    let magnitude = bits & 0x7fff_ffff;
    // Multiples of 2^-9 below the normal numbers: the low bits of a sum whose last place that is.
    let low = (f32::from_bits(magnitude) + 16_384.0).to_bits() - 16_384f32.to_bits();
    let high = (magnitude.wrapping_add(0x7_ffff + (magnitude >> 20 & 1)) >> 20).wrapping_sub(120 << 3);
    let code = if magnitude < 0x3c80_0000 { low } else { high.min(0x7e) };
    (bits >> 24 & 0x80 | code) as u8
}

/// Half way between the levels above zero, in twice their unit.
const MIDDLES: [f32; 7] = {
    let mut middles = [0.0; 7];
    let mut i = 0;
    while i < 7 {
        middles[i] = (LEVELS[8 + i] as f32 + LEVELS[9 + i] as f32) / 2.0;
        i += 1;
    }
    middles
};

fn int4(x: &[f32], codes: &mut [u8]) -> u16 {
    let mut scale = (sum(x, |x, _| x * x, codes) / x.len() as f32).sqrt() * (2.7326 / 127.0);
    for _ in 0..2 {
        let inverse = scale.recip();
        for (code, x) in codes.iter_mut().zip(x) {
            let y = x * inverse;
            let steps = MIDDLES.iter().map(|middle| u8::from(y.abs() > *middle)).sum::<u8>();
            *code = if y.is_sign_negative() { 7 - steps } else { 8 + steps };
        }
        let level = |code: u8| f32::from(LEVELS[usize::from(code & 15)]);
        let products = sum(x, |x, code| x * level(code), codes);
        let squares: i32 = codes.iter().map(|code| i32::from(LEVELS[usize::from(code & 15)]).pow(2)).sum();
        scale = products / squares as f32;
    }
    bf16::from_f32(scale).to_bits()
}

/// Sum of `term(value, code)` in [`LANES`] lanes, then of halves.
#[inline(always)]
fn sum(x: &[f32], term: impl Fn(f32, u8) -> f32, codes: &[u8]) -> f32 {
    let mut lanes = [0f32; LANES];
    for (x, codes) in x.chunks(LANES).zip(codes.chunks(LANES)) {
        for (lane, (x, code)) in lanes.iter_mut().zip(x.iter().zip(codes)) {
            *lane += term(*x, *code);
        }
    }
    let mut width = LANES / 2;
    while width > 0 {
        for i in 0..width {
            lanes[i] += lanes[i + width];
        }
        width /= 2;
    }
    lanes[0]
}
