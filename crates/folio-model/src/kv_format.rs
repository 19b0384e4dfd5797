//! How a KV cache stores what it is given: the formats, and their arithmetic as plain scalar code.
//!
//! Owns: [`KvFormat`] and the one definition of what each format does to a head vector (K or V of one token of one head).
//! Must never: look at another token. Every scale is made from its own vector, so what a cache gives back for a token depends
//! on that token alone. A backend has kernels of its own; it is judged by [`encode`], [`decode`] and [`stored`].
//!
//! # The scaled formats
//!
//! One scale `s` per token and head, for K and V each, kept as bf16 (8 bits of precision, the range of f32).
//!
//! | format | a vector becomes | scale | what is read back |
//! |---|---|---|---|
//! | int8 | integers in -127..=127, nearest even of `x * (1 / s)` | largest magnitude / 127, rounded up to bf16 | `s * code` |
//! | fp8 | e4m3fn codes (OCP FP8), nearest even of `x * (1 / s)` | largest magnitude / 448, rounded up to bf16 | `s * e4m3(code)` |
//! | int4 | `x` is rotated, then each value becomes the nearest of the 16 [`LEVELS`] | see [`int4`] | rotated back: `s * LEVELS[code]` |
//!
//! The rotation is the Walsh-Hadamard transform, divided by the square root of its size so that it is its own inverse, over
//! blocks of [`rotation`] dimensions. It spreads a few large dimensions over all. Queries are rotated alike, which leaves
//! products with keys what they are; the sum over values is rotated back once per row.
//!
//! A vector whose largest magnitude is below [`FLUSH`] is stored as zeros. One with a value that is no finite number is
//! stored with a scale that is NaN, so that whoever reads it sees it.

use half::bf16;

use crate::backend::DType;
use crate::quant::e4m3_in_256ths;

/// How K and V of one token of one head are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum KvFormat {
    F32,
    F16,
    BF16,
    /// 8-bit integers with a scale.
    Int8,
    /// e4m3 with a scale.
    Fp8,
    /// Rotated, then 16 levels with a scale.
    Int4,
}

/// Bytes of a scale.
pub const SCALE_BYTES: usize = 2;
/// Largest `head_dim` of a format with a scale: sums of integer products stay below 2^31.
pub const SCALED_HEAD_DIM_MAX: usize = 512;
/// Vectors that are smaller than this everywhere are zeros to a scaled format.
pub const FLUSH: f32 = 8.881_784e-16; // 2^-50

/// What the 4-bit codes mean: the levels of Lloyd and Max for a Gaussian (J. Max, Quantizing for Minimum Distortion, 1960,
/// table I, 16 levels), in units of 2.7326 / 127 standard deviations, rounded to integers so that integer kernels can use
/// them.
pub const LEVELS: [i8; 16] = [-127, -96, -75, -58, -44, -31, -18, -6, 6, 18, 31, 44, 58, 75, 96, 127];
/// Largest level of Lloyd and Max, in standard deviations.
const TOP_LEVEL: f32 = 2.7326;

impl KvFormat {
    pub const ALL: [KvFormat; 6] =
        [KvFormat::F32, KvFormat::F16, KvFormat::BF16, KvFormat::Int8, KvFormat::Fp8, KvFormat::Int4];

    /// "f16", "int8": the word of `--kv-cache-dtype`.
    pub const fn name(self) -> &'static str {
        match self {
            KvFormat::F32 => "f32",
            KvFormat::F16 => "f16",
            KvFormat::BF16 => "bf16",
            KvFormat::Int8 => "int8",
            KvFormat::Fp8 => "fp8",
            KvFormat::Int4 => "int4",
        }
    }

    /// Whether each vector has a scale of its own.
    pub const fn is_scaled(self) -> bool {
        matches!(self, KvFormat::Int8 | KvFormat::Fp8 | KvFormat::Int4)
    }

    /// Bytes of K (or of V) of one token of one head without its scale.
    pub const fn code_bytes(self, head_dim: usize) -> usize {
        match self {
            KvFormat::F32 => 4 * head_dim,
            KvFormat::F16 | KvFormat::BF16 => 2 * head_dim,
            KvFormat::Int8 | KvFormat::Fp8 => head_dim,
            KvFormat::Int4 => head_dim / 2,
        }
    }

    /// Bytes of K (or of V) of one token of one head, scales included.
    pub const fn bytes_per_head(self, head_dim: usize) -> usize {
        self.code_bytes(head_dim) + if self.is_scaled() { SCALE_BYTES } else { 0 }
    }

    /// Why heads of this size cannot be stored so, if they cannot.
    pub fn refusal(self, head_dim: usize) -> Option<String> {
        let reason = match self {
            _ if !head_dim.is_multiple_of(2) => "is odd".to_owned(),
            _ if self.is_scaled() && head_dim > SCALED_HEAD_DIM_MAX => {
                format!("is over {SCALED_HEAD_DIM_MAX}")
            }
            KvFormat::Int8 if !head_dim.is_multiple_of(4) => "is not a multiple of 4".to_owned(),
            KvFormat::Int4 if rotation(head_dim) < ROTATION_MIN => {
                format!("is not a multiple of {ROTATION_MIN}, the least that is rotated")
            }
            _ => return None,
        };
        Some(format!("head_dim {head_dim} {reason}: no KV cache in {}", self.name()))
    }
}

impl std::fmt::Display for KvFormat {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

impl From<DType> for KvFormat {
    fn from(dtype: DType) -> Self {
        match dtype {
            DType::F32 => KvFormat::F32,
            DType::F16 => KvFormat::F16,
            DType::BF16 => KvFormat::BF16,
        }
    }
}

/// Which format each layer stores K and V in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KvFormats {
    pub most: KvFormat,
    /// Of the layers that `skip` names.
    pub skipped: KvFormat,
    pub skip: Vec<KvSkip>,
}

/// Layers that keep another format than most.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum KvSkip {
    /// One layer, counted from 0.
    Layer(usize),
    /// All layers with a sliding window.
    SlidingWindow,
    /// All layers without.
    FullAttention,
}

/// What a layer keeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KeptLayer {
    pub head_dim: usize,
    /// It has a sliding window.
    pub windowed: bool,
    /// The layer whose K and V it reads: itself, unless it keeps none.
    pub source: usize,
}

impl From<KvFormat> for KvFormats {
    fn from(format: KvFormat) -> Self {
        Self { most: format, skipped: format, skip: Vec::new() }
    }
}

impl From<DType> for KvFormats {
    fn from(dtype: DType) -> Self {
        KvFormat::from(dtype).into()
    }
}

impl std::str::FromStr for KvSkip {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "sliding_window" => Ok(KvSkip::SlidingWindow),
            "full_attention" => Ok(KvSkip::FullAttention),
            _ => text.parse().map(KvSkip::Layer).map_err(|_| {
                format!("`{text}` is neither a layer's number nor sliding_window or full_attention")
            }),
        }
    }
}

impl KvFormats {
    /// Of one layer of a model; `windowed` tells whether it has a sliding window.
    pub fn of(&self, layer: usize, windowed: bool) -> KvFormat {
        let named = |skip: &KvSkip| match skip {
            KvSkip::Layer(number) => *number == layer,
            KvSkip::SlidingWindow => windowed,
            KvSkip::FullAttention => !windowed,
        };
        if self.skip.iter().any(named) { self.skipped } else { self.most }
    }

    /// The format of each layer of a model. The error is a sentence: a format that cannot hold such heads, or layers to skip that the model
    /// does not have, or that keep nothing.
    pub fn of_layers(&self, kept: &[KeptLayer]) -> Result<Vec<KvFormat>, String> {
        let layers = kept.len();
        let has = |windowed: bool| kept.iter().any(|layer| layer.windowed == windowed);
        for skip in &self.skip {
            match skip {
                KvSkip::Layer(number) if *number >= layers => {
                    return Err(format!(
                        "layer {number} is to be skipped, but the model has {layers} layers, from 0"
                    ));
                }
                KvSkip::Layer(number) if kept[*number].source != *number => {
                    let source = kept[*number].source;
                    return Err(format!(
                        "layer {number} is to be skipped, but it reads the K and V of layer {source} and keeps none"
                    ));
                }
                KvSkip::SlidingWindow if !has(true) => {
                    return Err(
                        "sliding_window is to be skipped, but no layer of the model has a window".to_owned()
                    );
                }
                KvSkip::FullAttention if !has(false) => {
                    return Err("full_attention is to be skipped, but every layer of the model has a window"
                        .to_owned());
                }
                _ => {}
            }
        }
        let formats = kept.iter().map(|layer| self.of(layer.source, layer.windowed));
        let formats: Vec<KvFormat> = formats.collect();
        match formats.iter().zip(kept).find_map(|(format, layer)| format.refusal(layer.head_dim)) {
            Some(reason) => Err(reason),
            None => Ok(formats),
        }
    }
}

/// Least dimensions that are rotated together.
pub const ROTATION_MIN: usize = 8;

/// Dimensions that are rotated together: the largest power of two that divides `head_dim`.
pub const fn rotation(head_dim: usize) -> usize {
    1 << head_dim.trailing_zeros()
}

/// Rotates a head vector in place; twice is nothing but rounding. Within a block, level by level: `(a, b)` at distance 1, 2, 4
/// and so on become `(a + b, a - b)`; then all are multiplied by `1 / sqrt(size)`.
pub fn rotate(x: &mut [f32]) {
    let size = rotation(x.len());
    for block in x.chunks_mut(size) {
        let mut distance = 1;
        while distance < size {
            for i in (0..size).filter(|i| i & distance == 0) {
                let (a, b) = (block[i], block[i + distance]);
                (block[i], block[i + distance]) = (a + b, a - b);
            }
            distance *= 2;
        }
        block.iter_mut().for_each(|x| *x *= (size as f32).sqrt().recip());
    }
}

/// A head vector in a scaled format.
#[derive(Clone, Debug, PartialEq)]
pub struct Encoded {
    pub scale: bf16,
    /// One per dimension: an i8 as its byte, an e4m3 code, or an index of [`LEVELS`].
    pub codes: Vec<u8>,
}

/// What a scaled format makes of a vector. Panics on formats without a scale, which have no codes.
pub fn encode(format: KvFormat, x: &[f32]) -> Encoded {
    let mut x = x.to_vec();
    if format == KvFormat::Int4 {
        rotate(&mut x);
    }
    // Zero is stored as such in every format.
    let zero = if format == KvFormat::Int4 { 8 } else { 0 };
    let nothing = |scale| Encoded { scale, codes: vec![zero; x.len()] };
    if x.iter().any(|x| !x.is_finite()) {
        return nothing(bf16::NAN);
    }
    let largest = x.iter().fold(0f32, |largest, x| largest.max(x.abs()));
    if largest < FLUSH {
        return nothing(bf16::ZERO);
    }
    match format {
        KvFormat::Int8 => {
            let scale = round_up(largest / 127.0);
            let inverse = scale.to_f32().recip();
            let code = |x: &f32| (x * inverse).round_ties_even() as i8 as u8;
            Encoded { scale, codes: x.iter().map(code).collect() }
        }
        KvFormat::Fp8 => {
            let scale = round_up(largest / 448.0);
            let inverse = scale.to_f32().recip();
            Encoded { scale, codes: x.iter().map(|x| e4m3(x * inverse)).collect() }
        }
        KvFormat::Int4 => int4(&x),
        _ => panic!("{format} has no codes"),
    }
}

/// Values of a vector as kernels read them: of int4 still rotated.
pub fn decode(format: KvFormat, encoded: &Encoded) -> Vec<f32> {
    let scale = encoded.scale.to_f32();
    let value = |code: &u8| match format {
        KvFormat::Int8 => f32::from(*code as i8),
        KvFormat::Fp8 => e4m3_in_256ths(*code).to_f32() * 256.0,
        KvFormat::Int4 => f32::from(LEVELS[usize::from(*code)]),
        _ => panic!("{format} has no codes"),
    };
    encoded.codes.iter().map(|code| scale * value(code)).collect()
}

/// What a cache of this format gives back for a head vector, in the model's own dimensions.
pub fn stored(format: KvFormat, x: &[f32]) -> Vec<f32> {
    match format {
        KvFormat::F32 => x.to_vec(),
        KvFormat::F16 => x.iter().map(|x| half::f16::from_f32(*x).to_f32()).collect(),
        KvFormat::BF16 => x.iter().map(|x| bf16::from_f32(*x).to_f32()).collect(),
        KvFormat::Int8 | KvFormat::Fp8 => decode(format, &encode(format, x)),
        KvFormat::Int4 => {
            let mut values = decode(format, &encode(format, x));
            rotate(&mut values);
            values
        }
    }
}

/// The next bf16 that is not smaller, of a finite number that is not negative.
fn round_up(x: f32) -> bf16 {
    bf16::from_bits((x.to_bits().saturating_add(0xffff) >> 16) as u16)
}

/// The e4m3fn code that is nearest, ties to even; what is larger than 448 becomes 448.
fn e4m3(x: f32) -> u8 {
    let sign = (x.to_bits() >> 24 & 0x80) as u8;
    let x = x.abs();
    let code = if x < 1.0 / 64.0 {
        (x * 512.0).round_ties_even() as u32
    } else {
        let bits = x.to_bits();
        // 3 bits of fraction remain; the exponent's bias of 127 becomes 7.
        ((bits + 0x7_ffff + (bits >> 20 & 1)) >> 20) - ((127 - 7) << 3)
    };
    sign | code.min(0x7e) as u8
}

/// Lanes of the sums of [`int4`]: lane `i` adds the dimensions `i`, `i + 16`, ... in order.
const LANES: usize = 16;

/// A rotated, finite vector. The scale starts as that of a Gaussian of the same power. Twice, the nearest levels are found and
/// the scale becomes the one that is best for them by least squares, `sum(x * level) / sum(level^2)`; the second time it is
/// rounded to bf16, nearest even. Sums are taken in f32, see [`sum`].
fn int4(x: &[f32]) -> Encoded {
    let power = sum(x.iter().map(|x| x * x));
    let mut scale = (power / x.len() as f32).sqrt() * (TOP_LEVEL / 127.0);
    let mut codes = Vec::new();
    for _ in 0..2 {
        let inverse = scale.recip();
        codes = x.iter().map(|x| nearest_level(x * inverse)).collect();
        let level = |code: &u8| f32::from(LEVELS[usize::from(*code)]);
        let products = sum(codes.iter().zip(x).map(|(code, x)| x * level(code)));
        // Exact: integers below 2^24.
        let squares: f32 = codes.iter().map(|code| level(code) * level(code)).sum();
        scale = products / squares;
    }
    Encoded { scale: bf16::from_f32(scale), codes }
}

/// Sum in [`LANES`] lanes, then halves are added: lanes 0..8 and 8..16, and so on.
fn sum(values: impl Iterator<Item = f32>) -> f32 {
    let mut lanes = [0f32; LANES];
    for (i, value) in values.enumerate() {
        lanes[i % LANES] += value;
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

/// The level that is nearest; in the middle of two, the one nearer to zero; zero and less are told by the sign bit.
fn nearest_level(x: f32) -> u8 {
    let steps =
        (8..15).filter(|i| x.abs() > f32::from(i16::from(LEVELS[*i]) + i16::from(LEVELS[*i + 1])) / 2.0);
    let steps = steps.count() as u8;
    if x.is_sign_negative() { 7 - steps } else { 8 + steps }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A vector with one dimension that is much larger than the others, as keys have.
    fn vector(len: usize, seed: u32) -> Vec<f32> {
        let mut state = seed.wrapping_mul(2_654_435_769) | 1;
        let mut unit = || {
            state ^= state << 13;
            state ^= state >> 17;
            state ^= state << 5;
            state as f32 / u32::MAX as f32 - 0.5
        };
        // Sums of uniform numbers are nearly Gaussian.
        let mut x: Vec<f32> = (0..len).map(|_| (0..6).map(|_| unit()).sum()).collect();
        x[len / 3] *= 9.0;
        x
    }

    fn relative_error(format: KvFormat, x: &[f32]) -> f64 {
        let stored = stored(format, x);
        let power: f64 = x.iter().map(|x| f64::from(*x).powi(2)).sum();
        let error: f64 = x.iter().zip(stored).map(|(a, b)| f64::from(a - b).powi(2)).sum();
        (error / power).sqrt()
    }

    #[test]
    fn each_format_is_as_exact_as_its_bits() {
        for (format, least, most) in [
            (KvFormat::F32, 0.0, 0.0),
            (KvFormat::F16, 1e-5, 4e-4),
            (KvFormat::BF16, 1e-4, 3e-3),
            (KvFormat::Int8, 1e-3, 3e-2),
            (KvFormat::Fp8, 1e-2, 4e-2),
            (KvFormat::Int4, 5e-2, 1.5e-1),
        ] {
            for (len, seed) in [(8, 1), (64, 2), (80, 3), (96, 4), (128, 5), (256, 6)] {
                let error = relative_error(format, &vector(len, seed));
                assert!(error <= most, "{format} of {len}: {error}");
                assert!(len < 64 || error >= least, "{format} of {len}: {error} is too good");
            }
        }
    }

    #[test]
    fn a_scale_belongs_to_its_own_vector_and_its_largest_value_survives() {
        for format in [KvFormat::Int8, KvFormat::Fp8] {
            let x = vector(64, 9);
            let largest = x.iter().fold(0f32, |a, x| a.max(x.abs()));
            for factor in [1e-9, 1.0, 3e12] {
                let scaled: Vec<f32> = x.iter().map(|x| x * factor).collect();
                let most = stored(format, &scaled).iter().fold(0f32, |a, x| a.max(x.abs()));
                assert!((most / (largest * factor) - 1.0).abs() < 0.04, "{format}: {most}");
            }
        }
    }

    #[test]
    fn e4m3_rounds_to_nearest_even_and_saturates() {
        let all: Vec<(u8, f32)> =
            (0..0x7f).map(|code| (code, e4m3_in_256ths(code).to_f32() * 256.0)).collect();
        for (code, value) in &all {
            assert_eq!(e4m3(*value), *code);
            assert_eq!(e4m3(-*value), *code | 0x80);
        }
        for pair in all.windows(2) {
            let middle = (pair[0].1 + pair[1].1) / 2.0;
            assert_eq!(e4m3(middle), if pair[0].0 % 2 == 0 { pair[0].0 } else { pair[1].0 }, "{middle}");
            assert_eq!(e4m3(middle * 1.0001), pair[1].0);
            assert_eq!(e4m3(middle * 0.9999), pair[0].0);
        }
        assert_eq!((e4m3(449.0), e4m3(1e9)), (0x7e, 0x7e));
    }

    #[test]
    fn the_rotation_is_its_own_inverse_and_keeps_products() {
        for len in [8, 24, 64, 80, 128] {
            let (a, b) = (vector(len, 3), vector(len, 4));
            let dot = |a: &[f32], b: &[f32]| -> f64 {
                a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum()
            };
            let (mut c, mut d) = (a.clone(), b.clone());
            rotate(&mut c);
            rotate(&mut d);
            assert!((dot(&a, &b) - dot(&c, &d)).abs() < 1e-4 * dot(&a, &a));
            rotate(&mut c);
            assert!(a.iter().zip(&c).all(|(a, c)| (a - c).abs() < 1e-5));
        }
    }

    #[test]
    fn what_is_no_number_stays_none_and_what_is_tiny_is_zero() {
        for format in [KvFormat::Int8, KvFormat::Fp8, KvFormat::Int4] {
            for odd in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                let mut x = vector(16, 5);
                x[7] = odd;
                assert!(stored(format, &x).iter().all(|x| x.is_nan()), "{format} {odd}");
            }
            let tiny: Vec<f32> = vector(16, 5).iter().map(|x| x * 1e-17).collect();
            assert_eq!(stored(format, &tiny), [0.0; 16]);
            assert_eq!(stored(format, &[0.0; 16]), [0.0; 16]);
        }
    }

    #[test]
    fn heads_that_do_not_fit_are_refused_by_name() {
        for (format, head_dim, word) in [
            (KvFormat::F16, 9, "odd"),
            (KvFormat::Int8, 10, "multiple of 4"),
            (KvFormat::Int8, 516, "over 512"),
            (KvFormat::Fp8, 1024, "over 512"),
            (KvFormat::Int4, 12, "multiple of 8"),
        ] {
            let reason = format.refusal(head_dim).expect("refused");
            assert!(reason.contains(word) && reason.contains(format.name()), "{reason}");
        }
        assert!(KvFormat::ALL.iter().all(|format| format.refusal(80).is_none()));
    }

    #[test]
    fn skipped_layers_keep_their_format_and_must_exist() {
        let skipping = |skip: &[&str]| KvFormats {
            most: KvFormat::Int8,
            skipped: KvFormat::F16,
            skip: skip.iter().map(|text| text.parse().expect("a layer")).collect(),
        };
        let windows = [true, true, false];
        let (i, f) = (KvFormat::Int8, KvFormat::F16);
        let kept = |windows: &[bool], head_dim| -> Vec<KeptLayer> {
            let layer = |(source, &windowed)| KeptLayer { head_dim, windowed, source };
            windows.iter().enumerate().map(layer).collect()
        };
        for (skip, expected) in [
            (&[][..], [i, i, i]),
            (&["0"], [f, i, i]),
            (&["2", "1"], [i, f, f]),
            (&["sliding_window"], [f, f, i]),
            (&["full_attention", "0"], [f, i, f]),
        ] {
            assert_eq!(
                skipping(skip).of_layers(&kept(&windows, 64)).as_deref(),
                Ok(&expected[..]),
                "{skip:?}"
            );
        }
        let refused =
            |skip, windows: &[bool]| skipping(skip).of_layers(&kept(windows, 64)).expect_err("refused");
        assert!(refused(&["3"], &windows).contains("3 layers"));
        assert!(refused(&["sliding_window"], &[false]).contains("no layer"));
        assert!(refused(&["full_attention"], &[true]).contains("every layer"));
        assert!(skipping(&[]).of_layers(&kept(&windows, 10)).expect_err("refused").contains("multiple of 4"));
        let mut shared = kept(&windows, 64);
        shared[2].source = 1;
        let problem = skipping(&["2"]).of_layers(&shared).expect_err("refused");
        assert!(problem.contains("layer 2") && problem.contains("layer 1"), "{problem}");
        assert_eq!(skipping(&["1"]).of_layers(&shared).as_deref(), Ok(&[i, f, f][..]));
        assert!("last".parse::<KvSkip>().expect_err("refused").contains("last"));
    }

    #[test]
    fn bytes_count_the_scales() {
        let bytes = KvFormat::ALL.map(|format| format.bytes_per_head(128));
        assert_eq!(bytes, [512, 256, 256, 130, 130, 66]);
    }
}
