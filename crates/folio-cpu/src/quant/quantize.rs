//! Plain weights to Q8_0 and Q4_0 blocks, while they are loaded.
//!
//! Owns: the choice of scales and codes. Must never: depend on the machine (sums go over fixed lanes, so every instruction
//! set chooses the same), or look past a block.
//!
//! - Q8_0: the scale is the largest magnitude over 127, as an f16; codes are the nearest to the value under *that* f16.
//! - Q4_0: 18 scales are tried, the largest value at every tenth of a code around either end of the codes. Each is improved
//!   once by least squares and judged, as the f16 it will be, by the error that is left, weighted by
//!   `sqrt(mean square + square)` of the values: large weights count more, small ones still count.
//!
//! Cost: Q4_0 about 0.3 microseconds a block with AVX2.

use half::f16;

use crate::simd::Isa;
use crate::simd::dot::{COLUMNS, Dot, DotTask, dispatch};

/// What plain weights become.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Quantize {
    /// Q8_0: 8.5 bits a weight.
    Q8,
    /// Q4_0: 4.5 bits a weight.
    Q4,
}

impl Quantize {
    /// The format that the weights have afterwards.
    pub const fn format(self) -> folio_model::quant::BlockFormat {
        match self {
            Quantize::Q8 => folio_model::quant::BlockFormat::Q8_0,
            Quantize::Q4 => folio_model::quant::BlockFormat::Q4_0,
        }
    }
}

impl Quantize {
    /// The blocks of consecutive values of a row: what a backend that quantizes while loading would hold. Panics unless
    /// `values` is a multiple of 32 long.
    pub fn row(self, values: &[f32]) -> Vec<u8> {
        let (blocks, rest) = values.as_chunks::<COLUMNS>();
        assert!(rest.is_empty(), "{} values are not whole blocks", values.len());
        let mut bytes = vec![0; blocks.len() * self.format().bytes()];
        for (values, block) in blocks.iter().zip(bytes.chunks_exact_mut(self.format().bytes())) {
            dispatch(Isa::best(), QuantizeBlock { to: self, values, block });
        }
        bytes
    }
}

const LANES: usize = 8;
type Lanes = [f32; LANES];

/// Sums and products over 32 values as four vectors of 8 lanes, added in a fixed order.
#[inline(always)]
fn sum(f: impl Fn(usize) -> f32) -> f32 {
    let mut lanes: Lanes = [0.0; LANES];
    for i in 0..COLUMNS / LANES {
        for (lane, sum) in lanes.iter_mut().enumerate() {
            *sum += f(LANES * i + lane);
        }
    }
    let [a, b, c, d, e, f, g, h] = lanes;
    ((a + e) + (c + g)) + ((b + f) + (d + h))
}

/// Quantizes one block of values. Runs through `dispatch`, for the speed of its features alone.
pub(crate) struct QuantizeBlock<'a> {
    pub(crate) to: Quantize,
    pub(crate) values: &'a [f32; COLUMNS],
    /// One block of the format.
    pub(crate) block: &'a mut [u8],
}

impl DotTask for QuantizeBlock<'_> {
    type Output = ();

    #[inline(always)]
    fn run<D: Dot>(self) {
        match self.to {
            Quantize::Q8 => q8(self.values, self.block),
            Quantize::Q4 => q4(self.values, self.block),
        }
    }
}

/// `1 / d`, or 0 where `d` is zero or not finite: codes are then zero, and the values zero or NaN as `d` has it.
#[inline(always)]
fn inverse(d: f16) -> f32 {
    let inverse = 1.0 / d.to_f32();
    if inverse.is_finite() { inverse } else { 0.0 }
}

#[inline(always)]
fn q8(x: &[f32; COLUMNS], block: &mut [u8]) {
    let amax = f32::from_bits(x.iter().fold(0, |max, x| (x.to_bits() & 0x7fff_ffff).max(max)));
    let d = f16::from_f32(amax / 127.0);
    let inverse = inverse(d);
    block[..2].copy_from_slice(&d.to_le_bytes());
    for (code, x) in block[2..].iter_mut().zip(x) {
        // `as` saturates, and NaN is 0.
        *code = (x * inverse).round_ties_even().clamp(-127.0, 127.0) as i8 as u8;
    }
}

/// Codes of Q4_0 as numbers, -8 to 7.
#[inline(always)]
fn codes(x: &[f32; COLUMNS], inverse: f32) -> [f32; COLUMNS] {
    // A loop: a closure would not get the features of the set, and rounding would become a call per value.
    let mut codes = *x;
    for code in &mut codes {
        *code = (*code * inverse).round_ties_even().clamp(-8.0, 7.0);
    }
    codes
}

#[inline(always)]
fn q4(x: &[f32; COLUMNS], block: &mut [u8]) {
    // The first of the largest magnitudes; NaN is larger than all.
    let largest =
        x.iter().fold(
            0f32,
            |best, x| {
                if x.to_bits() & 0x7fff_ffff > best.to_bits() & 0x7fff_ffff { *x } else { best }
            },
        );
    let mean_square = sum(|i| x[i] * x[i]) / COLUMNS as f32;
    let weights: [f32; COLUMNS] = std::array::from_fn(|i| (mean_square + x[i] * x[i]).sqrt());
    let mut best = (f16::from_f32(largest / -8.0), f32::INFINITY);
    for end in [-8.0, 7.0] {
        for step in -4..=4 {
            let candidate = codes(x, (end + 0.1 * step as f32) / largest);
            let square = sum(|i| weights[i] * candidate[i] * candidate[i]);
            let d = f16::from_f32(sum(|i| weights[i] * candidate[i] * x[i]) / square);
            let candidate = codes(x, inverse(d));
            let d_value = d.to_f32();
            let error = sum(|i| {
                let difference = x[i] - d_value * candidate[i];
                weights[i] * difference * difference
            });
            // A NaN is never better.
            if error < best.1 {
                best = (d, error);
            }
        }
    }
    let (d, _) = best;
    let codes = codes(x, inverse(d));
    block[..2].copy_from_slice(&d.to_le_bytes());
    for i in 0..16 {
        let nibble = |x: f32| (x as i8 + 8) as u8 & 15;
        block[2 + i] = nibble(codes[i]) | nibble(codes[i + 16]) << 4;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn values(seed: usize, spread: f32) -> [f32; COLUMNS] {
        std::array::from_fn(|i| {
            let x = (((i + 31 * seed) * 7919 + 13) % 1009) as f32 / 504.5 - 1.0;
            x * x * x * spread
        })
    }

    fn run(to: Quantize, values: &[f32; COLUMNS], isa: Isa) -> (Vec<u8>, [f32; COLUMNS]) {
        let mut block = vec![0; to.format().bytes()];
        dispatch(isa, QuantizeBlock { to, values, block: &mut block });
        let mut decoded = [0.0; COLUMNS];
        to.format().decode(&block, &mut decoded);
        (block, decoded)
    }

    fn square_error(a: &[f32; COLUMNS], b: &[f32; COLUMNS]) -> f64 {
        a.iter().zip(b).map(|(a, b)| f64::from(a - b).powi(2)).sum()
    }

    #[test]
    fn every_set_chooses_the_same_block() {
        for isa in Isa::ALL.into_iter().filter(|isa| isa.is_available()) {
            for (seed, to) in (0..40).flat_map(|seed| [(seed, Quantize::Q8), (seed, Quantize::Q4)]) {
                let x = values(seed, 0.02 * (1 + seed) as f32);
                assert_eq!(run(to, &x, isa).0, run(to, &x, Isa::Scalar).0, "{isa:?} {to:?}");
            }
        }
    }

    #[test]
    fn eight_bits_are_within_half_a_step() {
        for seed in 0..40 {
            let x = values(seed, 3.0);
            let step = x.iter().fold(0f32, |m, x| m.max(x.abs())) / 127.0;
            let (_, decoded) = run(Quantize::Q8, &x, Isa::best());
            for (x, y) in x.iter().zip(decoded) {
                // The scale itself is rounded to 11 bits.
                assert!((x - y).abs() <= step * 0.57, "{x} became {y}, a step is {step}");
            }
        }
    }

    #[test]
    fn four_bits_are_better_than_the_largest_value_at_the_end() {
        let (mut searched, mut plain) = (0.0, 0.0);
        for seed in 0..200 {
            let x = values(seed, 0.1);
            searched += square_error(&x, &run(Quantize::Q4, &x, Isa::best()).1);
            let largest = x.iter().fold(0f32, |best, x| if x.abs() > best.abs() { *x } else { best });
            let d = f16::from_f32(largest / -8.0);
            let naive = codes(&x, inverse(d)).map(|code| d.to_f32() * code);
            plain += square_error(&x, &naive);
        }
        assert!(searched < 0.9 * plain, "{searched} is not clearly below {plain}");
    }

    #[test]
    fn zeros_stay_zero_exact_values_stay_exact_and_nan_stays_nan() {
        for to in [Quantize::Q8, Quantize::Q4] {
            assert_eq!(run(to, &[0.0; COLUMNS], Isa::best()).1, [0.0; COLUMNS]);
            let exact: [f32; COLUMNS] = std::array::from_fn(|i| 0.25 * (i % 16) as f32 - 2.0);
            if to == Quantize::Q4 {
                assert_eq!(run(to, &exact, Isa::best()).1, exact);
            }
            let mut poisoned = exact;
            poisoned[3] = f32::NAN;
            assert!(run(to, &poisoned, Isa::best()).1.iter().all(|x| x.is_nan()), "{to:?}");
        }
    }
}
