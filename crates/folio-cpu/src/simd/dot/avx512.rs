//! Codes as one register of 16 rows: with VNNI bytes are multiplied straight into 32-bit sums, without it as in AVX2.
//!
//! Every function needs AVX-512 F, BW, DQ and VL, and those of [`Vnni`] VNNI. They are reached through `dispatch` only,
//! which checked the machine.
#![allow(clippy::needless_range_loop, reason = "a register tile reads best by its indices")]

use std::arch::x86_64::*;
use std::sync::atomic::{Ordering, compiler_fence};

use super::{Block, CHAINS, Codes, Dot, Sink, VECTORS};
use crate::simd::avx512::Avx512 as Floats;
use crate::simd::{filled, unrolled};

#[derive(Clone, Copy)]
pub(crate) struct Avx512;

#[derive(Clone, Copy)]
pub(crate) struct Vnni;

impl Dot for Vnni {
    type F = Floats;
    const TOKENS: usize = 8;
    const PANELS: usize = 2;
    const PRODUCTS: usize = 64;

    #[inline(always)]
    unsafe fn chains(rounds: usize) -> i32 {
        // SAFETY: the contract of this function; see the module comment for the features.
        unsafe {
            let x = _mm512_set1_epi8(std::hint::black_box(1));
            let mut sums = [x; CHAINS];
            for _ in 0..rounds {
                for sum in &mut sums {
                    *sum = _mm512_dpbusd_epi32(*sum, x, x);
                }
            }
            _mm512_reduce_add_epi32(sums.into_iter().fold(x, |a, b| _mm512_add_epi32(a, b)))
        }
    }

    #[inline(always)]
    unsafe fn block<C: Codes, const P: usize, const M: usize, const HALVES: bool>(
        codes: [*const u8; P],
        x: &Block,
        sink: &mut impl Sink<__m512>,
    ) {
        // SAFETY: the contract of this function, passed on.
        unsafe {
            if M > 1 {
                return panels::<C, P, M, HALVES>(codes, 0, x, sink);
            }
            // One token reads memory: one stream after the other.
            unrolled!(P, panel, { panels::<C, 1, M, HALVES>([codes[panel]], panel, x, sink) });
        }
    }
}

/// Panels from `first`, which share each activation.
///
/// # Safety
/// That of [`Dot::block`]; the machine has VNNI.
#[inline(always)]
unsafe fn panels<C: Codes, const P: usize, const M: usize, const HALVES: bool>(
    codes: [*const u8; P],
    first: usize,
    x: &Block,
    sink: &mut impl Sink<__m512>,
) {
    // SAFETY: the contract of this function; see the module comment for the features.
    unsafe {
        let zero = _mm512_setzero_si512();
        // Of one panel there are registers for all.
        let mut all = [zero; VECTORS];
        if P == 1 {
            all = filled!([zero; VECTORS], j => lifted::<C>(codes[0], j));
        }
        let parts = if HALVES { 2 } else { 1 };
        for part in 0..parts {
            let mut sums = [[zero; M]; P];
            for t in 0..M {
                let start = _mm512_set1_epi32(x.start::<C, M, HALVES>(t, part));
                for p in 0..P {
                    sums[p][t] = start;
                }
            }
            for j in VECTORS / parts * part..VECTORS / parts * (part + 1) {
                let w: [__m512i; P] =
                    filled!([zero; P], p => if P == 1 { all[j] } else { lifted::<C>(codes[p], j) });
                for t in 0..M {
                    let x = _mm512_set1_epi32(x.bytes.add(32 * t).cast::<i32>().add(j).read_unaligned());
                    for p in 0..P {
                        sums[p][t] = _mm512_dpbusd_epi32(sums[p][t], w[p], x);
                    }
                }
                // No instruction. It keeps the chains of all tokens side by side, column after column, which hides the
                // latency of a product; the compiler would finish one token after another.
                compiler_fence(Ordering::SeqCst);
            }
            unrolled!(P, p, {
                unrolled!(M, t, { sink.take(first + p, t, part, _mm512_cvtepi32_ps(sums[p][t])) });
            });
            compiler_fence(Ordering::SeqCst);
        }
    }
}

impl Dot for Avx512 {
    type F = Floats;
    const EVERY_FORM: bool = false;
    const TOKENS: usize = 8;
    const PRODUCTS: usize = 64;

    #[inline(always)]
    unsafe fn chains(rounds: usize) -> i32 {
        // SAFETY: the contract of this function; see the module comment for the features.
        unsafe {
            let x = _mm512_set1_epi8(std::hint::black_box(1));
            let ones = _mm512_set1_epi16(1);
            let mut sums = [x; CHAINS];
            for _ in 0..rounds {
                for sum in &mut sums {
                    let pairs = _mm512_maddubs_epi16(*sum, x);
                    *sum = _mm512_add_epi32(*sum, _mm512_madd_epi16(pairs, ones));
                }
            }
            _mm512_reduce_add_epi32(sums.into_iter().fold(x, |a, b| _mm512_add_epi32(a, b)))
        }
    }

    #[inline(always)]
    unsafe fn block<C: Codes, const P: usize, const M: usize, const HALVES: bool>(
        codes: [*const u8; P],
        x: &Block,
        sink: &mut impl Sink<__m512>,
    ) {
        unrolled!(P, panel, {
            // SAFETY: the contract of this function, passed on.
            unsafe {
                if C::WIDE {
                    wide::<C, M, HALVES>(codes[panel], panel, x, sink);
                } else {
                    narrow::<C, M, HALVES>(codes[panel], panel, x, sink);
                }
            }
        });
    }
}

/// Vector `j`, lifted.
///
/// # Safety
/// `codes` is readable for `C::BYTES`.
#[inline(always)]
unsafe fn lifted<C: Codes>(codes: *const u8, j: usize) -> __m512i {
    // SAFETY: the contract of this function; see the module comment for the features.
    unsafe {
        if C::BITS == 8 {
            return _mm512_xor_si512(_mm512_loadu_si512(codes.add(64 * j).cast()), _mm512_set1_epi8(-128));
        }
        let both = _mm512_loadu_si512(codes.add(64 * (j % 4)).cast());
        let low = if j < 4 { both } else { _mm512_srli_epi16::<4>(both) };
        let low = _mm512_and_si512(low, _mm512_set1_epi8(15));
        if let Some(table) = C::TABLE {
            let table = _mm512_broadcast_i32x4(_mm_loadu_si128(table.as_ptr().cast()));
            return _mm512_shuffle_epi8(table, low);
        }
        let (plane, left, mask) = match C::BITS {
            5 => (0, 4 - j as i32, 0x10),
            6 => (j / 4, 4 - 2 * (j as i32 % 4), 0x30),
            _ => return low,
        };
        let high = _mm512_loadu_si512(codes.add(256 + 64 * plane).cast());
        let high = if left >= 0 {
            _mm512_sll_epi16(high, _mm_cvtsi32_si128(left))
        } else {
            _mm512_srl_epi16(high, _mm_cvtsi32_si128(-left))
        };
        _mm512_or_si512(low, _mm512_and_si512(high, _mm512_set1_epi8(mask)))
    }
}

/// Pairs of byte products, several added in 16 bit.
///
/// # Safety
/// That of [`Dot::block`].
#[inline(always)]
unsafe fn narrow<C: Codes, const M: usize, const HALVES: bool>(
    codes: *const u8,
    panel: usize,
    x: &Block,
    sink: &mut impl Sink<__m512>,
) {
    // SAFETY: the contract of this function; see the module comment for the features.
    unsafe {
        let ones = _mm512_set1_epi16(1);
        let run = if C::RUN == 0 { 1 } else { C::RUN };
        let w: [__m512i; VECTORS] = filled!([_mm512_setzero_si512(); VECTORS], j => lifted::<C>(codes, j));
        unrolled!(M, t, {
            let x_at = x.bytes.add(32 * t).cast::<i32>();
            let mut sum = _mm512_set1_epi32(x.start::<C, M, HALVES>(t, 0));
            let mut pairs = _mm512_setzero_si512();
            for j in 0..VECTORS {
                if HALVES && j == 4 {
                    sink.take(panel, t, 0, _mm512_cvtepi32_ps(sum));
                    sum = _mm512_set1_epi32(x.start::<C, M, HALVES>(t, 1));
                }
                // Runs are 1, 2, 4 or 8 long; a half ends one.
                let run = if HALVES && run > 4 { 4 } else { run };
                let product = _mm512_maddubs_epi16(w[j], _mm512_set1_epi32(x_at.add(j).read_unaligned()));
                pairs = if j % run == 0 { product } else { _mm512_add_epi16(pairs, product) };
                if j % run == run - 1 {
                    sum = _mm512_add_epi32(sum, _mm512_madd_epi16(pairs, ones));
                }
            }
            sink.take(panel, t, usize::from(HALVES), _mm512_cvtepi32_ps(sum));
        });
    }
}

/// Pairs of products of sizes and activations that have the codes' signs.
///
/// # Safety
/// That of [`Dot::block`].
#[inline(always)]
unsafe fn wide<C: Codes, const M: usize, const HALVES: bool>(
    codes: *const u8,
    panel: usize,
    x: &Block,
    sink: &mut impl Sink<__m512>,
) {
    const { assert!(!C::WIDE || C::LIFT == 128) };
    // SAFETY: the contract of this function; see the module comment for the features.
    unsafe {
        let (zero, ones) = (_mm512_setzero_si512(), _mm512_set1_epi16(1));
        let mut sums = [zero; M];
        for j in 0..VECTORS {
            let w = _mm512_xor_si512(lifted::<C>(codes, j), _mm512_set1_epi8(-128));
            let (size, below_zero) = (_mm512_abs_epi8(w), _mm512_movepi8_mask(w));
            unrolled!(M, t, {
                let x_at = x.bytes.add(32 * t).cast::<i32>().add(j);
                let x = _mm512_set1_epi32(x_at.read_unaligned());
                let pairs = _mm512_maddubs_epi16(size, _mm512_mask_sub_epi8(x, below_zero, zero, x));
                sums[t] = _mm512_add_epi32(sums[t], _mm512_madd_epi16(pairs, ones));
            });
            if j == VECTORS - 1 || (HALVES && j == 3) {
                unrolled!(M, t, {
                    sink.take(panel, t, j / 4 * usize::from(HALVES), _mm512_cvtepi32_ps(sums[t]));
                    sums[t] = zero;
                });
            }
        }
    }
}
