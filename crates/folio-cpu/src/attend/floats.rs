//! Keys and values that are widened to f32, and multiplied as such.
//!
//! Owns: what f32, f16, bf16 and e4m3 become. Must never: round (widening is exact). A score is one chain over the dimensions, an
//! output one chain over the positions.
//!
//! # Instructions
//!
//! Per 16 keys and dimension (AVX-512, `R` rows): f16 takes 2 loads, an insert, 2 of conversion and `R` multiply-adds; values
//! one load and no insert. So 64 values of one row take about 16 instructions on the arithmetic ports, of four rows 28. e4m3
//! takes 3 more per 32 values, for half the bytes.
#![allow(clippy::needless_range_loop, reason = "a register tile reads best by its indices")]

use std::marker::PhantomData;

use super::{Chunk, GROUPS, Reader, STEP, Step, Weights, key_scales, prefetch_scales, scaled_weights};
use crate::kv::GROUP;
use crate::simd::{LANES, Simd, Task};

/// How a KV type becomes f32.
pub(super) trait Kv {
    /// Bytes of a value.
    const SIZE: usize;
    /// What a value is worth, besides the scale of its token, in a format that has such scales.
    const UNIT: Option<f32> = None;
    /// Two dims of 16 tokens, from two groups of 8.
    /// # Safety
    /// Both are readable for 16 values.
    unsafe fn keys<S: Simd>(a: *const u8, b: *const u8) -> (S::V, S::V);
    /// 16 dims of one token.
    /// # Safety
    /// `p` is readable for 16 values.
    unsafe fn values<S: Simd>(p: *const u8) -> S::V;
}

pub(super) struct KvBf16;
pub(super) struct KvF16;
pub(super) struct KvF32;

impl Kv for KvBf16 {
    const SIZE: usize = 2;
    #[inline(always)]
    unsafe fn keys<S: Simd>(a: *const u8, b: *const u8) -> (S::V, S::V) {
        // SAFETY: the caller promises 16 values behind each.
        unsafe { S::bf16_pairs_halves(a.cast(), b.cast()) }
    }
    #[inline(always)]
    unsafe fn values<S: Simd>(p: *const u8) -> S::V {
        // SAFETY: the caller promises 16 values.
        unsafe { S::bf16(p.cast()) }
    }
}

impl Kv for KvF16 {
    const SIZE: usize = 2;
    #[inline(always)]
    unsafe fn keys<S: Simd>(a: *const u8, b: *const u8) -> (S::V, S::V) {
        // SAFETY: the caller promises 16 values behind each.
        unsafe { (S::f16_halves(a.cast(), b.cast()), S::f16_halves(a.add(16).cast(), b.add(16).cast())) }
    }
    #[inline(always)]
    unsafe fn values<S: Simd>(p: *const u8) -> S::V {
        // SAFETY: the caller promises 16 values.
        unsafe { S::f16(p.cast()) }
    }
}

impl Kv for KvF32 {
    const SIZE: usize = 4;
    #[inline(always)]
    unsafe fn keys<S: Simd>(a: *const u8, b: *const u8) -> (S::V, S::V) {
        // SAFETY: the caller promises 16 values behind each.
        unsafe { (S::load_halves(a.cast(), b.cast()), S::load_halves(a.add(32).cast(), b.add(32).cast())) }
    }
    #[inline(always)]
    unsafe fn values<S: Simd>(p: *const u8) -> S::V {
        // SAFETY: the caller promises 16 values.
        unsafe { S::load(p.cast()) }
    }
}

pub(super) struct KvFp8;

impl Kv for KvFp8 {
    const SIZE: usize = 1;
    const UNIT: Option<f32> = Some(256.0);
    #[inline(always)]
    unsafe fn keys<S: Simd>(a: *const u8, b: *const u8) -> (S::V, S::V) {
        // SAFETY: the caller promises 16 values behind each.
        unsafe { S::e4m3_pairs_halves(a, b) }
    }
    #[inline(always)]
    unsafe fn values<S: Simd>(p: *const u8) -> S::V {
        // SAFETY: the caller promises 16 values.
        unsafe { S::e4m3(p) }
    }
}

/// A chunk over a cache of `K`.
pub(super) struct OfFloats<'a, K> {
    chunk: Chunk<'a>,
    format: PhantomData<K>,
}

impl<'a, K> OfFloats<'a, K> {
    pub(super) fn new(chunk: Chunk<'a>) -> Self {
        Self { chunk, format: PhantomData }
    }
}

impl<K: Kv> Task for OfFloats<'_, K> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self) {
        // SAFETY: the contract of `Attend::chunk`.
        unsafe { self.chunk.run::<Floats<S, K>>() }
    }
}

/// Bytes of 16-bit keys of one pair of dims over a step.
const PAIR_BYTES: usize = 4 * STEP;

pub(super) struct Floats<S, K>(PhantomData<(S, K)>);

impl<S: Simd, K: Kv> Reader for Floats<S, K> {
    type S = S;

    #[inline(always)]
    unsafe fn scores<const R: usize>(chunk: &Chunk<'_>, step: &Step, first: usize, p: &mut [[f32; STEP]; R]) {
        // SAFETY: the contract of this function.
        unsafe {
            if S::WIDE {
                Self::score_vectors::<R, 2>(chunk, step, first, p, 0);
            } else {
                Self::score_vectors::<R, 1>(chunk, step, first, p, 0);
                Self::score_vectors::<R, 1>(chunk, step, first, p, 1);
            }
        }
    }

    #[inline(always)]
    unsafe fn add_values<const R: usize>(chunk: &Chunk<'_>, step: &Step, first: usize, weights: &Weights<R>) {
        let mut p = weights.p;
        let dim = chunk.attend.shape.value_dim;
        let mut d = 0;
        // SAFETY: the contract of this function; `p` is one step wide.
        unsafe {
            if let Some(unit) = K::UNIT {
                for p in &mut p {
                    for (j, scaled) in scaled_weights::<S>(step, p, unit).into_iter().enumerate() {
                        S::store(p.as_mut_ptr().add(j * LANES), scaled);
                    }
                }
            }
            if S::WIDE {
                while R <= 4 && d + 4 * LANES <= dim {
                    Self::add::<R, 4>(chunk, step, first, weights, &p, d);
                    d += 4 * LANES;
                }
                while d + 2 * LANES <= dim {
                    Self::add::<R, 2>(chunk, step, first, weights, &p, d);
                    d += 2 * LANES;
                }
            }
            while d < dim {
                Self::add::<R, 1>(chunk, step, first, weights, &p, d);
                d += LANES;
            }
        }
    }
}

impl<S: Simd, K: Kv> Floats<S, K> {
    /// `N` vectors of keys from vector `j` of the step.
    ///
    /// # Safety
    /// The contract of [`Reader::scores`].
    #[inline(always)]
    unsafe fn score_vectors<const R: usize, const N: usize>(
        chunk: &Chunk<'_>,
        step: &Step,
        first: usize,
        p: &mut [[f32; STEP]; R],
        j: usize,
    ) {
        let dim = chunk.attend.shape.key_dim;
        let mut acc = [[S::splat(0.0); N]; R];
        // SAFETY: each group holds `key_dim` dims of 8 tokens; queries are packed `[dim][R]` from `first * dim`.
        unsafe {
            let mut q = chunk.queries.add(first * dim);
            let mut at = 0;
            let (mut group, mut offset) = (0, 0);
            for _ in 0..dim / 2 {
                let mut pair = [(S::splat(0.0), S::splat(0.0)); N];
                for (n, v) in pair.iter_mut().enumerate() {
                    let g = 2 * (j + n);
                    *v = K::keys::<S>(step.at[g].keys.wrapping_add(at), step.at[g + 1].keys.wrapping_add(at));
                }
                if first == 0 && j == 0 {
                    // In the order of addresses, so that the machine's own prefetchers follow.
                    let ahead = step.next[group].keys.wrapping_add(offset);
                    for line in (0..PAIR_BYTES * K::SIZE / 2).step_by(64) {
                        S::prefetch(ahead.wrapping_add(line));
                    }
                    offset += PAIR_BYTES * K::SIZE / 2;
                    if offset >= GROUP * dim * K::SIZE {
                        (group, offset) = ((group + 1) % GROUPS, 0);
                    }
                }
                for r in 0..R {
                    let q = S::splat(*q.add(r));
                    for n in 0..N {
                        acc[r][n] = S::fma(pair[n].0, q, acc[r][n]);
                    }
                }
                for r in 0..R {
                    let q = S::splat(*q.add(R + r));
                    for n in 0..N {
                        acc[r][n] = S::fma(pair[n].1, q, acc[r][n]);
                    }
                }
                q = q.wrapping_add(2 * R);
                at += 2 * GROUP * K::SIZE;
            }
            if let Some(unit) = K::UNIT {
                if first == 0 && j == 0 {
                    prefetch_scales::<S>(step);
                }
                for n in 0..N {
                    let scale = key_scales::<S>(step, j + n);
                    let scale = S::mul(scale, S::splat(unit));
                    for r in 0..R {
                        acc[r][n] = S::mul(acc[r][n], scale);
                    }
                }
            }
            for r in 0..R {
                for n in 0..N {
                    S::store(p[r].as_mut_ptr().add((j + n) * LANES), acc[r][n]);
                }
            }
        }
    }

    /// Adds `D` vectors of dims from `d`: one chain over the row's own positions each.
    ///
    /// # Safety
    /// The contract of [`Reader::add_values`]; `p` are weights times scales.
    #[inline(always)]
    unsafe fn add<const R: usize, const D: usize>(
        chunk: &Chunk<'_>,
        step: &Step,
        first: usize,
        Weights { factor, valid, .. }: &Weights<R>,
        p: &[[f32; STEP]; R],
        d: usize,
    ) {
        // From one value to the next one's: values are at least as wide where keys hold them.
        let dim = chunk.attend.shape.key_dim;
        let stride = chunk.attend.shape.stride();
        let mut acc = [[S::splat(0.0); D]; R];
        // SAFETY: the rows are inside the partial, whose rows are whole vectors. A vector of values that reaches past the
        // last dim reads the next token, page, or the slack behind the cache, into lanes that nobody uses.
        unsafe {
            let at = chunk.result.acc.add(first * stride + d);
            for r in 0..R {
                for i in 0..D {
                    acc[r][i] = S::mul(S::load(at.add(r * stride + i * LANES)), S::splat(factor[r]));
                }
            }
            // Where windows begin, then the keys that all rows attend to, then where rows end.
            let (from, to) = (valid[R - 1].from, valid[0].to);
            let (from, to) = if from < to { (from, to) } else { (STEP, STEP) };
            for r in 0..R {
                for t in valid[r].from..valid[r].to.min(from) {
                    let from = step.at[t / GROUP].values.add((t % GROUP * dim + d) * K::SIZE);
                    for i in 0..D {
                        let v = K::values::<S>(from.add(i * LANES * K::SIZE));
                        acc[r][i] = S::fma(v, S::splat(p[r][t]), acc[r][i]);
                    }
                }
            }
            for group in from / GROUP..to.div_ceil(GROUP) {
                let (mut at, row_bytes) = (step.at[group].values, dim * K::SIZE);
                let tokens = from.max(group * GROUP)..to.min((group + 1) * GROUP);
                at = at.wrapping_add(tokens.start % GROUP * row_bytes + d * K::SIZE);
                if first == 0 {
                    // The same share of the group's bytes as of its dims.
                    let ahead = step.next[group].values.wrapping_add(GROUP * d * K::SIZE);
                    for line in (0..GROUP * D * LANES * K::SIZE).step_by(64) {
                        S::prefetch(ahead.wrapping_add(line));
                    }
                }
                for t in tokens {
                    for i in 0..D {
                        let v = K::values::<S>(at.wrapping_add(i * LANES * K::SIZE));
                        for r in 0..R {
                            acc[r][i] = S::fma(v, S::splat(p[r][t]), acc[r][i]);
                        }
                    }
                    at = at.wrapping_add(row_bytes);
                }
            }
            for r in 0..R {
                for t in to..valid[r].to {
                    let from = step.at[t / GROUP].values.add((t % GROUP * dim + d) * K::SIZE);
                    for i in 0..D {
                        let v = K::values::<S>(from.add(i * LANES * K::SIZE));
                        acc[r][i] = S::fma(v, S::splat(p[r][t]), acc[r][i]);
                    }
                }
                for i in 0..D {
                    S::store(at.add(r * stride + i * LANES), acc[r][i]);
                }
            }
        }
    }
}
