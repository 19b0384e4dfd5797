//! Codes as two registers of 8 rows: pairs of byte products in 16 bit.
//!
//! Every function needs AVX2. They are reached through `dispatch` only, which checked the machine.
#![allow(clippy::needless_range_loop, reason = "a register tile reads best by its indices")]

use std::arch::asm;
use std::arch::x86_64::*;

use super::{Block, CHAINS, Codes, Dot, Sink, VECTORS};
use crate::simd::avx2::{Avx2 as Floats, Pair};
use crate::simd::unrolled;

#[derive(Clone, Copy)]
pub(crate) struct Avx2;

/// Rows of a register.
const ROWS: usize = 8;

impl Dot for Avx2 {
    type F = Floats;
    const TOKENS: usize = 8;
    const PRODUCTS: usize = 32;
    const LIFTS: bool = true;

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
    unsafe fn lift<C: Codes>(codes: *const u8, to: *mut u8) {
        unrolled!(VECTORS, j, {
            // SAFETY: the contract of this function; see the module comment for the features.
            unsafe {
                for first in [0, ROWS] {
                    let to = to.add(64 * j + 4 * first);
                    _mm256_storeu_si256(to.cast(), lifted::<C>(codes, j, first));
                }
            }
        });
    }

    #[inline(always)]
    unsafe fn block<C: Codes, const P: usize, const M: usize, const HALVES: bool>(
        codes: [*const u8; P],
        x: &Block,
        sink: &mut impl Sink<Pair>,
    ) {
        unrolled!(P, panel, {
            let codes = codes[panel];
            // SAFETY: the contract of this function, passed on.
            unsafe {
                match M {
                    1 => tokens::<C, M, 1, HALVES>(codes, panel, x, sink),
                    2 => tokens::<C, M, 2, HALVES>(codes, panel, x, sink),
                    3 | 6 => tokens::<C, M, 3, HALVES>(codes, panel, x, sink),
                    _ => tokens::<C, M, 4, HALVES>(codes, panel, x, sink),
                }
            }
        });
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
        if C::LIFTED {
            return _mm256_loadu_si256(codes.add(64 * j + at).cast());
        }
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

/// `G` tokens side by side, again and again; one load of an activation serves both halves of the rows.
///
/// Codes that are more than a load are lifted once for all tokens, to memory: registers hold the sums.
///
/// # Safety
/// That of [`Dot::block`]; `G` divides `M`.
#[inline(always)]
unsafe fn tokens<C: Codes, const M: usize, const G: usize, const HALVES: bool>(
    codes: *const u8,
    panel: usize,
    x: &Block,
    sink: &mut impl Sink<Pair>,
) {
    const { assert!(!C::WIDE || C::LIFT == 128) };
    // SAFETY: the contract of this function; see the module comment for the features.
    unsafe {
        let zero = _mm256_setzero_si256();
        let parts = if HALVES { 2 } else { 1 };
        // A half ends a run.
        let run = C::RUN.clamp(1, VECTORS / parts);
        let loaded = C::WIDE || C::LIFTED;
        let mut all = [[zero; 2]; VECTORS];
        if !loaded {
            for (j, w) in all.iter_mut().enumerate() {
                *w = [lifted::<C>(codes, j, 0), lifted::<C>(codes, j, ROWS)];
            }
        }
        // The compiler must not know how often: it would write the rounds out, with one order for all of them.
        let count = if G == M { M } else { std::hint::black_box(M) };
        for first in (0..count).step_by(G) {
            for part in 0..parts {
                let mut sums = [[[zero; 2]; G]; 2];
                unrolled!(VECTORS, j, {
                    if j * parts / VECTORS == part {
                        let w = match loaded {
                            true => [lifted::<C>(codes, j, 0), lifted::<C>(codes, j, ROWS)],
                            false => all[j % VECTORS],
                        };
                        columns::<C, G>(w, x.bytes.add(32 * first), j, run, &mut sums);
                    }
                });
                unrolled!(G, t, {
                    let [mut upper, mut lower] = sums[0][t];
                    if !C::WIDE {
                        let start = _mm256_set1_epi32(x.start::<C, M, HALVES>(first + t, part));
                        (upper, lower) = (_mm256_add_epi32(upper, start), _mm256_add_epi32(lower, start));
                    }
                    sink.take(
                        panel,
                        first + t,
                        part,
                        Pair(_mm256_cvtepi32_ps(upper), _mm256_cvtepi32_ps(lower)),
                    );
                });
            }
        }
    }
}

/// Columns `4 * j..` of `G` tokens from `x`: added to the second of `sums` in 16 bit, and at the end of a run to the first in 32.
#[inline(always)]
unsafe fn columns<C: Codes, const G: usize>(
    w: [__m256i; 2],
    x: *const u8,
    j: usize,
    run: usize,
    [sums, pairs]: &mut [[[__m256i; 2]; G]; 2],
) {
    // SAFETY: the contract of `Dot::block`; see the module comment for the features.
    unsafe {
        unrolled!(G, t, {
            let x = _mm256_set1_epi32(x.add(32 * t).cast::<i32>().add(j).read_unaligned());
            for half in 0..2 {
                let product = products::<C>(w[half], x);
                let (pairs, sum) = (&mut pairs[t][half], &mut sums[t][half]);
                *pairs = if j.is_multiple_of(run) { product } else { _mm256_add_epi16(*pairs, product) };
                if run > 1 {
                    *pairs = in_order(*pairs);
                }
                if j % run == run - 1 {
                    let wide = _mm256_madd_epi16(*pairs, _mm256_set1_epi16(1));
                    *sum = in_order(_mm256_add_epi32(*sum, wide));
                }
            }
        });
    }
}

/// Products of pairs of lifted codes; of values, as sizes times activations with their signs, where codes are wide.
#[inline(always)]
unsafe fn products<C: Codes>(lifted: __m256i, x: __m256i) -> __m256i {
    // SAFETY: see the module comment.
    unsafe {
        if !C::WIDE {
            return _mm256_maddubs_epi16(lifted, x);
        }
        let w = _mm256_xor_si256(lifted, _mm256_set1_epi8(-128));
        _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(x, w))
    }
}

/// `sum`, by no instruction. What was added to it is added here, column after column: the compiler would finish one token after
/// another and load all codes for each. By value and with its feature as intrinsics are, so that it is inlined as they are.
#[inline]
#[target_feature(enable = "avx")]
unsafe fn in_order(mut sum: __m256i) -> __m256i {
    // SAFETY: it does nothing.
    unsafe { asm!("/* {0} */", inout(ymm_reg) sum, options(nomem, nostack, preserves_flags)) };
    sum
}
