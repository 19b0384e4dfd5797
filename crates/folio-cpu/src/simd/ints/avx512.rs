//! 16 lanes as one 512-bit register; with VNNI a product and its sum are one instruction.
//!
//! Every method needs AVX-512 F, BW, DQ and VL, and those of [`Vnni`] VNNI. They are reached through `dispatch` only, which
//! checked the machine.

use std::arch::x86_64::*;

use super::Ints;
use super::avx2::entries;
use crate::simd::avx2::two_halves;
use crate::simd::avx512::Avx512;

#[derive(Clone, Copy)]
pub(crate) struct Plain;

#[derive(Clone, Copy)]
pub(crate) struct Vnni;

/// Both sets, which differ in one operation.
macro_rules! ints {
    ($set:ty, $sum:ident, $a:ident, $b:ident, $dot:expr) => {
        impl Ints for $set {
            type F = Avx512;
            type I = __m512i;

            #[inline(always)]
            fn zero() -> __m512i {
                // SAFETY: see the module comment.
                unsafe { _mm512_setzero_si512() }
            }
            #[inline(always)]
            unsafe fn pairs(p: *const u8) -> __m512i {
                // SAFETY: the caller promises 32 bytes.
                unsafe { _mm512_cvtepi8_epi16(_mm256_loadu_si256(p.cast())) }
            }
            #[inline(always)]
            unsafe fn pairs_halves(a: *const u8, b: *const u8) -> __m512i {
                // SAFETY: the caller promises 16 bytes behind each.
                unsafe { _mm512_cvtepi8_epi16(two_halves(a, b)) }
            }
            #[inline(always)]
            unsafe fn nibble_pairs(p: *const u8, table: &[i8; 16]) -> (__m512i, __m512i) {
                // SAFETY: the caller promises 32 bytes.
                unsafe {
                    let (low, high) = entries(_mm256_loadu_si256(p.cast()), table);
                    (_mm512_cvtepi8_epi16(low), _mm512_cvtepi8_epi16(high))
                }
            }
            #[inline(always)]
            unsafe fn nibble_pairs_halves(
                a: *const u8,
                b: *const u8,
                table: &[i8; 16],
            ) -> (__m512i, __m512i) {
                // SAFETY: the caller promises 16 bytes behind each.
                unsafe {
                    let (low, high) = entries(two_halves(a, b), table);
                    (_mm512_cvtepi8_epi16(low), _mm512_cvtepi8_epi16(high))
                }
            }
            #[inline(always)]
            unsafe fn splat_pair(p: *const i16) -> __m512i {
                // SAFETY: the caller promises 2 values.
                unsafe { _mm512_set1_epi32(p.cast::<i32>().read_unaligned()) }
            }
            #[inline(always)]
            fn dot($sum: __m512i, $a: __m512i, $b: __m512i) -> __m512i {
                // SAFETY: see the module comment.
                unsafe { $dot }
            }
            #[inline(always)]
            fn add(a: __m512i, b: __m512i) -> __m512i {
                // SAFETY: see the module comment.
                unsafe { _mm512_add_epi32(a, b) }
            }
            #[inline(always)]
            fn to_float(sum: __m512i) -> __m512 {
                // SAFETY: see the module comment.
                unsafe { _mm512_cvtepi32_ps(sum) }
            }
            #[inline(always)]
            unsafe fn store_i16(p: *mut i16, v: __m512) {
                // SAFETY: the caller promises 16 writable values.
                unsafe { _mm256_storeu_si256(p.cast(), _mm512_cvtepi32_epi16(_mm512_cvtps_epi32(v))) }
            }
        }
    };
}

ints!(Plain, sum, a, b, _mm512_add_epi32(sum, _mm512_madd_epi16(a, b)));
ints!(Vnni, sum, a, b, _mm512_dpwssd_epi32(sum, a, b));
