//! Keys and values that are integers with a scale per token, multiplied as integers.
//!
//! Owns: what int8 and int4 codes are multiplied with. Must never: let a scale be made from more than one row's own numbers.
//!
//! A query is rounded to 16-bit integers with one scale per row (largest magnitude / 32767), the weights of one step, times the
//! scales of their values, to 15 bits with one scale per row and step; so rounding them costs less than rounding to f16 would.
//! Products and sums are exact: `32767 * 127 * 512 < 2^31` for a score, `32767 * 127 * 32` for a step of values. So the bits do not
//! depend on the order inside a sum, and sets are free in it. A score is `(sum * key scale) * query scale`; an output is one chain
//! over the steps, `accumulator = sum * step scale + accumulator * factor`.
//!
//! # Instructions
//!
//! Per 64 codes of int8 and `R` rows with AVX-512: 2 loads (4 and 2 inserts for keys), 2 widenings to 16 bits, `2 * R` products
//! with VNNI (a product, a sum and a broadcast each without). So 64 values of one row take 6 instructions on the arithmetic ports
//! for keys and 4 for values where f16 takes 16, of four rows 12 and 10 where f16 takes 28; and half the bytes are read. int4
//! takes 5 more for the nibbles and a quarter of the bytes. Per step of 32 keys and row, rounding the weights adds some 15
//! instructions to the 60 of the softmax.
#![allow(clippy::needless_range_loop, reason = "a register tile reads best by its indices")]

use std::marker::PhantomData;

use folio_model::backend::KvFormat;
use folio_model::kv_format::{LEVELS, SCALED_HEAD_DIM_MAX};

use super::{
    Attend, Chunk, GROUPS, Reader, STEP, Step, Tile, Weights, key_scales, prefetch_scales, scaled_weights,
};
use crate::kv::{GROUP, largest_magnitude, nearest, rotate};
use crate::simd::ints::{IntTask, Ints};
use crate::simd::{LANES, Simd, filled};

/// Largest magnitude of a rounded query or weight.
const TOP: f32 = 32767.0;
/// Queries, and weights of a step, that are all smaller than this count as zero.
const TINY: f32 = 7.888_609e-31; // 2^-100
/// Dimensions of keys that are read together.
const QUAD: usize = 4;

/// How codes become pairs of 16-bit integers.
pub(super) trait Codes {
    /// Bytes of 4 dims of the keys of a group.
    const QUAD_BYTES: usize;
    /// Vectors of 16 dims of values that lie in one unit of 32 bytes.
    const VECTORS: usize;

    /// Dims `(0, 1)` and `(2, 3)` of a quad for 16 tokens, from two groups of 8.
    /// # Safety
    /// Both are readable for [`Codes::QUAD_BYTES`].
    unsafe fn keys<I: Ints>(a: *const u8, b: *const u8) -> [I::I; 2];
    /// A unit of values of two tokens: the first [`Codes::VECTORS`] are dims.
    /// # Safety
    /// `p` is readable for 32 bytes.
    unsafe fn values<I: Ints>(p: *const u8) -> [I::I; 2];
}

pub(super) struct Int8;
pub(super) struct Int4;

impl Codes for Int8 {
    const QUAD_BYTES: usize = 4 * GROUP;
    const VECTORS: usize = 1;
    #[inline(always)]
    unsafe fn keys<I: Ints>(a: *const u8, b: *const u8) -> [I::I; 2] {
        // SAFETY: the caller promises 32 bytes behind each.
        unsafe { [I::pairs_halves(a, b), I::pairs_halves(a.add(2 * GROUP), b.add(2 * GROUP))] }
    }
    #[inline(always)]
    unsafe fn values<I: Ints>(p: *const u8) -> [I::I; 2] {
        // SAFETY: the caller promises 32 bytes.
        unsafe { [I::pairs(p), I::zero()] }
    }
}

impl Codes for Int4 {
    const QUAD_BYTES: usize = 2 * GROUP;
    const VECTORS: usize = 2;
    #[inline(always)]
    unsafe fn keys<I: Ints>(a: *const u8, b: *const u8) -> [I::I; 2] {
        // SAFETY: the caller promises 16 bytes behind each.
        let (low, high) = unsafe { I::nibble_pairs_halves(a, b, &LEVELS) };
        [low, high]
    }
    #[inline(always)]
    unsafe fn values<I: Ints>(p: *const u8) -> [I::I; 2] {
        // SAFETY: the caller promises 32 bytes.
        let (low, high) = unsafe { I::nibble_pairs(p, &LEVELS) };
        [low, high]
    }
}

impl Attend<'_> {
    /// The queries of each pass as `[dim pair][row]` of two i16, then the scale of each row.
    ///
    /// # Safety
    /// That of [`Attend::pack_queries`].
    pub(super) unsafe fn pack_integers(&self, tile: &Tile, format: KvFormat, to: *mut f32) {
        let (group, dim) = (self.shape.group(), self.shape.key_dim);
        let mut query = [0f32; SCALED_HEAD_DIM_MAX];
        let query = &mut query[..dim];
        for (first, count) in Self::passes(tile.tokens * group) {
            // SAFETY: a pass has `dim * count` values; pairs take half of them, and at least `count` are left for scales.
            unsafe {
                let pairs = to.add(first * dim).cast::<[i16; 2]>();
                let scales = to.add(first * dim + dim / 2 * count);
                for r in 0..count {
                    let (token, head) = ((first + r) / group, tile.kv_head * group + (first + r) % group);
                    let from = self.qkv.row(tile.first_row + token).add(head * dim);
                    query.copy_from_slice(std::slice::from_raw_parts(from, dim));
                    if format == KvFormat::Int4 {
                        rotate(query);
                    }
                    // What is no number must stay visible; what is tiny is zero.
                    let (scale, inverse) = match largest_magnitude(query) {
                        largest if !largest.is_finite() => (f32::NAN, 0.0),
                        largest if largest < TINY => (0.0, 0.0),
                        largest => (largest / TOP, TOP / largest),
                    };
                    *scales.add(r) = scale;
                    for (i, pair) in query.chunks_exact(2).enumerate() {
                        let [a, b] = [pair[0], pair[1]].map(|x| nearest(x * inverse) as i16);
                        *pairs.add(i * count + r) = [a, b];
                    }
                }
            }
        }
    }
}

/// A chunk over a cache of `C`.
pub(super) struct OfIntegers<'a, C> {
    chunk: Chunk<'a>,
    format: PhantomData<C>,
}

impl<'a, C> OfIntegers<'a, C> {
    pub(super) fn new(chunk: Chunk<'a>) -> Self {
        Self { chunk, format: PhantomData }
    }
}

impl<C: Codes> IntTask for OfIntegers<'_, C> {
    #[inline(always)]
    fn run<I: Ints>(self) {
        // SAFETY: the contract of `Attend::chunk`.
        unsafe { self.chunk.run::<Integers<I, C>>() }
    }
}

struct Integers<I, C>(PhantomData<(I, C)>);

impl<I: Ints, C: Codes> Reader for Integers<I, C> {
    type S = I::F;

    #[inline(always)]
    unsafe fn scores<const R: usize>(chunk: &Chunk<'_>, step: &Step, first: usize, p: &mut [[f32; STEP]; R]) {
        if first == 0 {
            prefetch_scales::<I::F>(step);
        }
        // SAFETY: the contract of this function. One row or two alone need more chains to be busy.
        unsafe {
            if I::F::WIDE && R <= 2 {
                Self::score_vectors::<R, 2, 2>(chunk, step, first, p, 0);
            } else if I::F::WIDE {
                Self::score_vectors::<R, 2, 1>(chunk, step, first, p, 0);
            } else if R <= 2 {
                Self::score_vectors::<R, 1, 2>(chunk, step, first, p, 0);
                Self::score_vectors::<R, 1, 2>(chunk, step, first, p, 1);
            } else {
                Self::score_vectors::<R, 1, 1>(chunk, step, first, p, 0);
                Self::score_vectors::<R, 1, 1>(chunk, step, first, p, 1);
            }
        }
    }

    #[inline(always)]
    unsafe fn add_values<const R: usize>(chunk: &Chunk<'_>, step: &Step, first: usize, weights: &Weights<R>) {
        let mut rounded = Rounded { weights: [[0; STEP]; R], scale: [0.0; R] };
        let dim = chunk.attend.shape.key_dim;
        let (unit, mut d) = (C::VECTORS * LANES, 0);
        // SAFETY: the contract of this function. Whole units come first; what is left of the dims is one unit whose vectors
        // are not full.
        unsafe {
            for r in 0..R {
                (rounded.weights[r], rounded.scale[r]) = round_weights::<I>(step, &weights.p[r]);
            }
            let tile = Rows { chunk, step, first, weights, rounded: &rounded };
            if I::F::WIDE {
                while R <= 4 && d + 4 * LANES <= dim {
                    if C::VECTORS == 2 {
                        Self::add::<R, 2>(&tile, d, LANES);
                    } else {
                        Self::add::<R, 4>(&tile, d, LANES);
                    }
                    d += 4 * LANES;
                }
                while C::VECTORS == 1 && d + 2 * LANES <= dim {
                    Self::add::<R, 2>(&tile, d, LANES);
                    d += 2 * LANES;
                }
            }
            while d + unit <= dim {
                Self::add::<R, 1>(&tile, d, LANES);
                d += unit;
            }
            if d < dim {
                Self::add::<R, 1>(&tile, d, (dim - d) / C::VECTORS);
            }
        }
    }
}

/// The rows of a pass in one step.
struct Rows<'a, const R: usize> {
    chunk: &'a Chunk<'a>,
    step: &'a Step,
    first: usize,
    weights: &'a Weights<R>,
    rounded: &'a Rounded<R>,
}

/// Weights of one step times the scales of their values, as integers; and what one of those is worth.
struct Rounded<const R: usize> {
    weights: [[i16; STEP]; R],
    scale: [f32; R],
}

/// # Safety
/// The scales of the step are readable.
#[inline(always)]
unsafe fn round_weights<I: Ints>(step: &Step, p: &[f32; STEP]) -> ([i16; STEP], f32) {
    let mut weights = [0i16; STEP];
    // SAFETY: the contract of this function; `weights` holds two vectors.
    unsafe {
        let [low, high] = scaled_weights::<I::F>(step, p, 1.0);
        let largest = I::F::max_lane(I::F::max(low, high));
        // None of them is negative, so their sum tells whether all are numbers.
        if !I::F::sum(I::F::add(low, high)).is_finite() {
            return (weights, f32::NAN);
        }
        if largest < TINY {
            return (weights, 0.0);
        }
        let inverse = I::F::splat(TOP / largest);
        I::store_i16(weights.as_mut_ptr(), I::F::mul(low, inverse));
        I::store_i16(weights.as_mut_ptr().add(LANES), I::F::mul(high, inverse));
        (weights, largest / TOP)
    }
}

impl<I: Ints, C: Codes> Integers<I, C> {
    /// `N` vectors of keys from vector `j` of the step, in `P` chains each.
    ///
    /// # Safety
    /// The contract of [`Reader::scores`].
    #[inline(always)]
    unsafe fn score_vectors<const R: usize, const N: usize, const P: usize>(
        chunk: &Chunk<'_>,
        step: &Step,
        first: usize,
        p: &mut [[f32; STEP]; R],
        j: usize,
    ) {
        let dim = chunk.attend.shape.key_dim;
        let mut acc = [[[I::zero(); N]; R]; P];
        // SAFETY: each group holds `head_dim` dims of 8 tokens; queries are packed `[dim pair][R]` from `first * dim`.
        unsafe {
            let queries = chunk.queries.add(first * dim);
            let mut q = queries.cast::<i16>();
            let mut at = 0;
            let (mut group, mut offset) = (0, 0);
            for _ in 0..dim / QUAD {
                let keys = filled!([[I::zero(); 2]; N], n => {
                    let groups = step.at.as_ptr().add(2 * (j + n));
                    C::keys::<I>((*groups).keys.wrapping_add(at), (*groups.add(1)).keys.wrapping_add(at))
                });
                if first == 0 && j == 0 {
                    // In the order of addresses, so that the machine's own prefetchers follow.
                    let ahead = step.next[group].keys.wrapping_add(offset);
                    for line in (0..GROUPS * C::QUAD_BYTES).step_by(64) {
                        I::F::prefetch(ahead.wrapping_add(line));
                    }
                    offset += GROUPS * C::QUAD_BYTES;
                    if offset >= dim / QUAD * C::QUAD_BYTES {
                        (group, offset) = ((group + 1) % GROUPS, 0);
                    }
                }
                for pair in 0..2 {
                    for r in 0..R {
                        let q = I::splat_pair(q.add(2 * (pair * R + r)));
                        for n in 0..N {
                            let sum = &mut acc[pair % P][r][n];
                            *sum = I::dot(*sum, keys[n][pair], q);
                        }
                    }
                }
                q = q.wrapping_add(4 * R);
                at += C::QUAD_BYTES;
            }
            let query_scales = queries.add(dim / 2 * R);
            for n in 0..N {
                let scale = key_scales::<I::F>(step, j + n);
                for r in 0..R {
                    let sum = if P == 2 { I::add(acc[0][r][n], acc[P - 1][r][n]) } else { acc[0][r][n] };
                    let score = I::F::mul(I::to_float(sum), scale);
                    let score = I::F::mul(score, I::F::splat(*query_scales.add(r)));
                    I::F::store(p[r].as_mut_ptr().add((j + n) * LANES), score);
                }
            }
        }
    }

    /// Adds `D` units of dims from `d`. `lanes` lanes of each vector are dims; a unit is alone where those are not all.
    ///
    /// # Safety
    /// The contract of [`Reader::add_values`].
    #[inline(always)]
    unsafe fn add<const R: usize, const D: usize>(rows: &Rows<'_, R>, d: usize, lanes: usize) {
        let Rows { chunk, step, first, weights, rounded } = *rows;
        let stride = chunk.attend.shape.stride();
        // Bytes of one dim of two tokens are 2 in one vector a unit, 1 in two.
        let (from, row_bytes) = (d * 2 / C::VECTORS, chunk.attend.shape.key_dim * 2 / C::VECTORS);
        let mut sums = [[[I::zero(); 2]; D]; R];
        // SAFETY: the rows are inside the partial, whose rows are whole vectors. A vector of values that reaches past the
        // last dim reads the next tokens, page, or the slack behind the cache, into lanes that nobody uses.
        unsafe {
            // A weight of zero adds nothing, so that all rows may begin where the first does.
            let (low, high) = (weights.valid[0].from / 2 * 2, weights.valid[R - 1].to);
            for group in low / GROUP..high.div_ceil(GROUP) {
                let tokens = low.max(group * GROUP)..high.min((group + 1) * GROUP);
                let mut at = step.at[group].values.wrapping_add(tokens.start % GROUP / 2 * row_bytes + from);
                if first == 0 {
                    // The same share of the group's bytes as of its dims.
                    let ahead = step.next[group].values.wrapping_add(GROUP / 2 * from);
                    for line in (0..GROUP / 2 * D * 32).step_by(64) {
                        I::F::prefetch(ahead.wrapping_add(line));
                    }
                }
                for t in tokens.step_by(2) {
                    for i in 0..D {
                        let values = C::values::<I>(at.wrapping_add(32 * i));
                        for r in 0..R {
                            let weight = I::splat_pair(rounded.weights[r].as_ptr().add(t));
                            for v in 0..C::VECTORS {
                                sums[r][i][v] = I::dot(sums[r][i][v], values[v], weight);
                            }
                        }
                    }
                    at = at.wrapping_add(row_bytes);
                }
            }
            for r in 0..R {
                if weights.valid[r].are_none() {
                    continue;
                }
                let scale = I::F::splat(rounded.scale[r]);
                let factor = I::F::splat(weights.factor[r]);
                for i in 0..D {
                    for v in 0..C::VECTORS {
                        let dim = d + i * C::VECTORS * LANES + v * lanes;
                        let at = chunk.result.acc.add((first + r) * stride + dim);
                        let old = I::F::mul(I::F::load_part(at, lanes), factor);
                        I::F::store_part(at, lanes, I::F::fma(I::to_float(sums[r][i][v]), scale, old));
                    }
                }
            }
        }
    }
}
