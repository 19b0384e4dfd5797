//! Codes as two registers of 8 rows: bytes with 16-bit sums, or 16-bit codes.
//!
//! Every function needs AVX2. They are reached through `dispatch` only, which checked the machine.
#![allow(clippy::needless_range_loop, reason = "a register tile reads best by its indices")]

use std::arch::x86_64::*;

use super::{Block, CHAINS, Codes, Dot, Sink, VECTORS};
use crate::simd::avx2::{Avx2 as Floats, Pair};
use crate::simd::{filled, unrolled};

#[derive(Clone, Copy)]
pub(crate) struct Avx2;

/// Rows of a register.
const ROWS: usize = 8;

impl Dot for Avx2 {
    type F = Floats;
    const WORDS: bool = true;
    const TOKENS: [usize; 2] = [8, 4];
    const PRODUCTS: usize = 32;

    #[inline(always)]
    unsafe fn chains(rounds: usize) -> i32 {
        // SAFETY: the contract of this function; see the module comment for the features.
        unsafe {
            let x = _mm256_set1_epi8(std::hint::black_box(1));
            let ones = _mm256_set1_epi16(1);
            let mut sums = [x; CHAINS];
            for _ in 0..rounds {
                for sum in &mut sums {
                    let pairs = _mm256_maddubs_epi16(*sum, x);
                    *sum = _mm256_add_epi32(*sum, _mm256_madd_epi16(pairs, ones));
                }
            }
            _mm256_extract_epi32::<0>(sums.into_iter().fold(x, |a, b| _mm256_add_epi32(a, b)))
        }
    }

    #[inline(always)]
    unsafe fn block<C: Codes, const M: usize, const HALVES: bool>(
        codes: *const u8,
        x: &Block,
        sink: &mut impl Sink<Pair>,
    ) {
        // SAFETY: the contract of this function, passed on.
        unsafe {
            if C::WIDE {
                wide::<C, M, HALVES>(codes, x, sink);
            } else {
                narrow::<C, M, HALVES>(codes, x, sink);
            }
        }
    }
}

/// Vector `j` of 8 rows from `first`, lifted.
///
/// # Safety
/// `codes` is readable for `C::BYTES`.
#[inline(always)]
unsafe fn lifted<C: Codes>(codes: *const u8, j: usize, first: usize) -> __m256i {
    let at = 4 * first;
    // SAFETY: the contract of this function; see the module comment for the features.
    unsafe {
        if C::BITS == 8 {
            let codes = _mm256_loadu_si256(codes.add(64 * j + at).cast());
            return _mm256_xor_si256(codes, _mm256_set1_epi8(-128));
        }
        let both = _mm256_loadu_si256(codes.add(64 * (j % 4) + at).cast());
        let low = if j < 4 { both } else { _mm256_srli_epi16::<4>(both) };
        let low = _mm256_and_si256(low, _mm256_set1_epi8(15));
        if let Some(table) = C::TABLE {
            let table = _mm256_broadcastsi128_si256(_mm_loadu_si128(table.as_ptr().cast()));
            return _mm256_shuffle_epi8(table, low);
        }
        let (plane, left, mask) = match C::BITS {
            5 => (0, 4 - j as i32, 0x10),
            6 => (j / 4, 4 - 2 * (j as i32 % 4), 0x30),
            _ => return low,
        };
        let high = _mm256_loadu_si256(codes.add(256 + 64 * plane + at).cast());
        let high = if left >= 0 {
            _mm256_sll_epi16(high, _mm_cvtsi32_si128(left))
        } else {
            _mm256_srl_epi16(high, _mm_cvtsi32_si128(-left))
        };
        _mm256_or_si256(low, _mm256_and_si256(high, _mm256_set1_epi8(mask)))
    }
}

/// Pairs of byte products, several added in 16 bit.
///
/// # Safety
/// That of [`Dot::block`].
#[inline(always)]
unsafe fn narrow<C: Codes, const M: usize, const HALVES: bool>(
    codes: *const u8,
    x: &Block,
    sink: &mut impl Sink<Pair>,
) {
    // SAFETY: the contract of this function; see the module comment for the features.
    unsafe {
        let mut upper = [[_mm256_setzero_si256(); 2]; M];
        let parts = if HALVES { 2 } else { 1 };
        let w: [__m256i; VECTORS] = filled!([_mm256_setzero_si256(); VECTORS], j => lifted::<C>(codes, j, 0));
        unrolled!(M, t, {
            for part in 0..parts {
                upper[t][part] = sum::<C, M, HALVES>(&w, x, t, part);
            }
        });
        let w: [__m256i; VECTORS] =
            filled!([_mm256_setzero_si256(); VECTORS], j => lifted::<C>(codes, j, ROWS));
        unrolled!(M, t, {
            for part in 0..parts {
                let lower = sum::<C, M, HALVES>(&w, x, t, part);
                sink.take(t, part, Pair(_mm256_cvtepi32_ps(upper[t][part]), _mm256_cvtepi32_ps(lower)));
            }
        });
    }
}

/// # Safety
/// That of [`Dot::block`].
#[inline(always)]
unsafe fn sum<C: Codes, const M: usize, const HALVES: bool>(
    w: &[__m256i; VECTORS],
    x: &Block,
    token: usize,
    part: usize,
) -> __m256i {
    // SAFETY: the contract of this function; see the module comment for the features.
    unsafe {
        let ones = _mm256_set1_epi16(1);
        let x_at = x.bytes.add(32 * token).cast::<i32>();
        let (first, last) = if HALVES { (4 * part, 4 * part + 4) } else { (0, VECTORS) };
        let run = if C::RUN == 0 { 1 } else { C::RUN };
        let mut sum = _mm256_set1_epi32(x.start::<C, M, HALVES>(token, part));
        let mut pairs = _mm256_setzero_si256();
        for j in first..last {
            let product = _mm256_maddubs_epi16(w[j], _mm256_set1_epi32(x_at.add(j).read_unaligned()));
            pairs = if (j - first) % run == 0 { product } else { _mm256_add_epi16(pairs, product) };
            if (j - first) % run == run - 1 || j == last - 1 {
                sum = _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, ones));
            }
        }
        sum
    }
}

/// Products of 16-bit codes: three shifts make two vectors of them, for all tokens.
///
/// # Safety
/// That of [`Dot::block`].
#[inline(always)]
unsafe fn wide<C: Codes, const M: usize, const HALVES: bool>(
    codes: *const u8,
    x: &Block,
    sink: &mut impl Sink<Pair>,
) {
    // SAFETY: the contract of this function; see the module comment for the features.
    unsafe {
        let mut sums = [[_mm256_setzero_si256(); 2]; M];
        for j in 0..VECTORS {
            let a = split(signed::<C>(codes, j, 0));
            let b = split(signed::<C>(codes, j, ROWS));
            unrolled!(M, t, {
                let x_at = x.words.add(64 * t + 8 * j).cast::<i32>();
                let even = _mm256_set1_epi32(x_at.read_unaligned());
                let odd = _mm256_set1_epi32(x_at.add(1).read_unaligned());
                let [sum_a, sum_b] = &mut sums[t];
                *sum_a = _mm256_add_epi32(*sum_a, _mm256_madd_epi16(a.0, even));
                *sum_b = _mm256_add_epi32(*sum_b, _mm256_madd_epi16(b.0, even));
                *sum_a = _mm256_add_epi32(*sum_a, _mm256_madd_epi16(a.1, odd));
                *sum_b = _mm256_add_epi32(*sum_b, _mm256_madd_epi16(b.1, odd));
            });
            if j == VECTORS - 1 || (HALVES && j == 3) {
                unrolled!(M, t, {
                    let [sum_a, sum_b] = sums[t];
                    sink.take(
                        t,
                        j / 4 * usize::from(HALVES),
                        Pair(_mm256_cvtepi32_ps(sum_a), _mm256_cvtepi32_ps(sum_b)),
                    );
                    sums[t] = [_mm256_setzero_si256(); 2];
                });
            }
        }
    }
}

/// Vector `j` of 8 rows from `first`, as values.
///
/// # Safety
/// `codes` is readable for `C::BYTES`.
#[inline(always)]
unsafe fn signed<C: Codes>(codes: *const u8, j: usize, first: usize) -> __m256i {
    const { assert!(!C::WIDE || C::LIFT == 128) };
    // SAFETY: the contract of this function; see the module comment for the features.
    unsafe { _mm256_xor_si256(lifted::<C>(codes, j, first), _mm256_set1_epi8(-128)) }
}

/// Columns 0 and 2, and columns 1 and 3, of a vector as 16-bit numbers.
#[inline(always)]
fn split(v: __m256i) -> (__m256i, __m256i) {
    // SAFETY: see the module comment.
    unsafe { (_mm256_srai_epi16::<8>(_mm256_slli_epi16::<8>(v)), _mm256_srai_epi16::<8>(v)) }
}
