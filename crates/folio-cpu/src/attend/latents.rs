//! Keys that hold their values: latents, one vector of a token for all heads, `[token][dim]`.
//!
//! Owns: products of queries with such keys. Must never: round (widening is exact), or let what lies behind the last dim of a token touch
//! a bit. A score is 16 chains over the dimensions, added over the fixed tree; values are added as those of any other token are
//! (`floats`).
//!
//! All heads of a row, and all rows of a tile, share each pass over the latents: the tile is a matrix product of
//! `[rows x heads, dims]` with `[dims, tokens]`, in register tiles of [`ROWS`](super::ROWS) by [`TOKENS`] or one.
#![allow(clippy::needless_range_loop, reason = "a register tile reads best by its indices")]

use std::marker::PhantomData;

use super::floats::{Floats, Kv};
use super::{Attend, Chunk, GROUPS, Reader, STEP, Step, Tile, Weights};
use crate::kv::GROUP;
use crate::simd::{LANES, Simd, Task};

/// Keys that a register tile takes where there are registers for it.
const TOKENS: usize = 4;

impl Attend<'_> {
    /// Queries as they are, each padded to whole vectors with zeros.
    ///
    /// # Safety
    /// That of [`Attend::pack_queries`].
    pub(super) unsafe fn pack_rows(&self, tile: &Tile, to: *mut f32) {
        let (heads, dim) = (self.shape.group(), self.shape.key_dim);
        let stride = dim.next_multiple_of(LANES);
        for r in 0..tile.tokens * heads {
            // SAFETY: the contract of this function.
            unsafe {
                let from = self.qkv.row(tile.first_row + r / heads).add(r % heads * dim);
                let to = to.add(r * stride);
                std::ptr::copy_nonoverlapping(from.cast_const(), to, dim);
                std::slice::from_raw_parts_mut(to.add(dim), stride - dim).fill(0.0);
            }
        }
    }
}

/// A chunk over latents of `K`.
pub(super) struct OfLatents<'a, K> {
    chunk: Chunk<'a>,
    format: PhantomData<K>,
}

impl<'a, K> OfLatents<'a, K> {
    pub(super) fn new(chunk: Chunk<'a>) -> Self {
        Self { chunk, format: PhantomData }
    }
}

impl<K: Kv> Task for OfLatents<'_, K> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self) {
        // SAFETY: the contract of `Attend::chunk`.
        unsafe { self.chunk.run::<Latents<S, K>>() }
    }
}

struct Latents<S, K>(PhantomData<(S, K)>);

impl<S: Simd, K: Kv> Reader for Latents<S, K> {
    type S = S;

    #[inline(always)]
    unsafe fn scores<const R: usize>(chunk: &Chunk<'_>, step: &Step, first: usize, p: &mut [[f32; STEP]; R]) {
        if first == 0 {
            let bytes = GROUP * chunk.attend.shape.key_dim * K::SIZE;
            for place in &step.next {
                (0..bytes).step_by(64).for_each(|line| S::prefetch(place.keys.wrapping_add(line)));
            }
        }
        // SAFETY: the contract of this function.
        unsafe {
            if S::WIDE {
                (0..STEP).step_by(TOKENS).for_each(|t| Self::products::<R, TOKENS>(chunk, step, first, p, t));
            } else {
                (0..STEP).for_each(|t| Self::products::<R, 1>(chunk, step, first, p, t));
            }
        }
    }

    #[inline(always)]
    unsafe fn add_values<const R: usize>(chunk: &Chunk<'_>, step: &Step, first: usize, weights: &Weights<R>) {
        // SAFETY: the contract of this function; a step of latents says of its values what it says of its keys.
        unsafe { Floats::<S, K>::add_values(chunk, step, first, weights) }
    }
}

impl<S: Simd, K: Kv> Latents<S, K> {
    /// Scores of `T` keys from key `t` of the step.
    ///
    /// # Safety
    /// The contract of [`Reader::scores`].
    #[inline(always)]
    unsafe fn products<const R: usize, const T: usize>(
        chunk: &Chunk<'_>,
        step: &Step,
        first: usize,
        p: &mut [[f32; STEP]; R],
        t: usize,
    ) {
        let dim = chunk.attend.shape.key_dim;
        let stride = dim.next_multiple_of(LANES);
        let mut acc = [[S::splat(0.0); T]; R];
        // SAFETY: each group holds `dim` values of 8 tokens, of which there are [`GROUPS`]; queries are `stride` apart. A vector that
        // reaches past the last dim reads the next token, or the slack behind the cache, into lanes that become zero.
        unsafe {
            let queries = chunk.queries.add(first * stride);
            let mut keys = [std::ptr::null::<u8>(); T];
            for (i, key) in keys.iter_mut().enumerate() {
                let (group, token) = ((t + i) / GROUP % GROUPS, (t + i) % GROUP);
                *key = step.at[group].keys.wrapping_add(token * dim * K::SIZE);
            }
            for d in (0..dim).step_by(LANES) {
                let mut values = [S::splat(0.0); T];
                for i in 0..T {
                    values[i] = K::values::<S>(keys[i].wrapping_add(d * K::SIZE));
                    if d + LANES > dim {
                        values[i] = S::select_first(dim - d, values[i], S::splat(0.0));
                    }
                }
                for r in 0..R {
                    let q = S::load(queries.add(r * stride + d));
                    for i in 0..T {
                        acc[r][i] = S::fma(values[i], q, acc[r][i]);
                    }
                }
            }
        }
        for r in 0..R {
            for i in 0..T {
                p[r][t + i] = S::sum(acc[r][i]);
            }
        }
    }
}
