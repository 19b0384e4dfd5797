//! 16 lanes as two 256-bit registers.
//!
//! Every method needs AVX2. They are reached through `dispatch` only, which checked the machine.

use std::arch::x86_64::*;

use super::Ints;
use crate::simd::avx2::{Avx2, Pair, two_halves};

type I = (__m256i, __m256i);

/// Entries of the table for the low and the high nibbles of 32 bytes.
#[inline(always)]
pub(super) fn entries(bytes: __m256i, table: &[i8; 16]) -> (__m256i, __m256i) {
    // SAFETY: the table has 16 bytes; see the module comment for the features.
    unsafe {
        let table = _mm256_broadcastsi128_si256(_mm_loadu_si128(table.as_ptr().cast()));
        let mask = _mm256_set1_epi8(15);
        let low = _mm256_and_si256(bytes, mask);
        let high = _mm256_and_si256(_mm256_srli_epi16::<4>(bytes), mask);
        (_mm256_shuffle_epi8(table, low), _mm256_shuffle_epi8(table, high))
    }
}

#[inline(always)]
fn wide(bytes: __m256i) -> I {
    // SAFETY: see the module comment.
    unsafe {
        (
            _mm256_cvtepi8_epi16(_mm256_castsi256_si128(bytes)),
            _mm256_cvtepi8_epi16(_mm256_extracti128_si256::<1>(bytes)),
        )
    }
}

impl Ints for Avx2 {
    type F = Avx2;
    type I = I;

    #[inline(always)]
    fn zero() -> I {
        // SAFETY: see the module comment.
        unsafe { (_mm256_setzero_si256(), _mm256_setzero_si256()) }
    }
    #[inline(always)]
    unsafe fn pairs(p: *const u8) -> I {
        // SAFETY: the caller promises 32 bytes.
        unsafe { Self::pairs_halves(p, p.add(16)) }
    }
    #[inline(always)]
    unsafe fn pairs_halves(a: *const u8, b: *const u8) -> I {
        // SAFETY: the caller promises 16 bytes behind each.
        unsafe {
            (_mm256_cvtepi8_epi16(_mm_loadu_si128(a.cast())), _mm256_cvtepi8_epi16(_mm_loadu_si128(b.cast())))
        }
    }
    #[inline(always)]
    unsafe fn nibble_pairs(p: *const u8, table: &[i8; 16]) -> (I, I) {
        // SAFETY: the caller promises 32 bytes.
        let (low, high) = entries(unsafe { _mm256_loadu_si256(p.cast()) }, table);
        (wide(low), wide(high))
    }
    #[inline(always)]
    unsafe fn nibble_pairs_halves(a: *const u8, b: *const u8, table: &[i8; 16]) -> (I, I) {
        // SAFETY: the caller promises 16 bytes behind each.
        let (low, high) = entries(unsafe { two_halves(a, b) }, table);
        (wide(low), wide(high))
    }
    #[inline(always)]
    unsafe fn splat_pair(p: *const i16) -> I {
        // SAFETY: the caller promises 2 values.
        unsafe {
            let v = _mm256_set1_epi32(p.cast::<i32>().read_unaligned());
            (v, v)
        }
    }
    #[inline(always)]
    fn dot(sum: I, a: I, b: I) -> I {
        // SAFETY: see the module comment.
        unsafe {
            (
                _mm256_add_epi32(sum.0, _mm256_madd_epi16(a.0, b.0)),
                _mm256_add_epi32(sum.1, _mm256_madd_epi16(a.1, b.1)),
            )
        }
    }
    #[inline(always)]
    fn add(a: I, b: I) -> I {
        // SAFETY: see the module comment.
        unsafe { (_mm256_add_epi32(a.0, b.0), _mm256_add_epi32(a.1, b.1)) }
    }
    #[inline(always)]
    fn to_float(sum: I) -> Pair {
        // SAFETY: see the module comment.
        unsafe { Pair(_mm256_cvtepi32_ps(sum.0), _mm256_cvtepi32_ps(sum.1)) }
    }
    #[inline(always)]
    unsafe fn store_i16(p: *mut i16, v: Pair) {
        // SAFETY: the caller promises 16 writable values; see the module comment for the features.
        unsafe {
            let packed = _mm256_packs_epi32(_mm256_cvtps_epi32(v.0), _mm256_cvtps_epi32(v.1));
            _mm256_storeu_si256(p.cast(), _mm256_permute4x64_epi64::<0b11_01_10_00>(packed));
        }
    }
}
