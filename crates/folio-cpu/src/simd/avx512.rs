//! 16 lanes as one 512-bit register.
//!
//! Every method needs AVX-512 F, BW, DQ and VL. They are reached through `dispatch` only, which checked the machine.
//! Reductions narrow to 256 and 128 bits in the order of the fixed tree, so they agree with the other sets.

use std::arch::x86_64::*;

use super::Simd;

#[derive(Clone, Copy)]
pub(crate) struct Avx512;

/// Bits set for lanes `i < n`.
#[inline(always)]
fn mask(n: usize) -> __mmask16 {
    ((1u32 << n.min(16)) - 1) as __mmask16
}

#[inline(always)]
fn even(v: __m512i) -> __m512 {
    // SAFETY: see the module comment.
    unsafe { _mm512_castsi512_ps(_mm512_slli_epi32::<16>(v)) }
}

#[inline(always)]
fn odd(v: __m512i) -> __m512 {
    // SAFETY: see the module comment.
    unsafe { _mm512_castsi512_ps(_mm512_and_si512(v, _mm512_set1_epi32(0xffff_0000_u32 as i32))) }
}

impl Simd for Avx512 {
    type V = __m512;

    const TOKENS: usize = 12;
    const WIDE: bool = true;

    #[inline(always)]
    fn splat(x: f32) -> __m512 {
        // SAFETY: see the module comment.
        unsafe { _mm512_set1_ps(x) }
    }
    #[inline(always)]
    unsafe fn load(p: *const f32) -> __m512 {
        // SAFETY: the caller promises 16 readable values.
        unsafe { _mm512_loadu_ps(p) }
    }
    #[inline(always)]
    unsafe fn store(p: *mut f32, v: __m512) {
        // SAFETY: the caller promises 16 writable values.
        unsafe { _mm512_storeu_ps(p, v) }
    }
    #[inline(always)]
    unsafe fn load_part(p: *const f32, n: usize) -> __m512 {
        // SAFETY: masked lanes are not accessed; the caller promises the first `n`.
        unsafe { _mm512_maskz_loadu_ps(mask(n), p) }
    }
    #[inline(always)]
    unsafe fn store_part(p: *mut f32, n: usize, v: __m512) {
        // SAFETY: masked lanes are not accessed; the caller promises the first `n`.
        unsafe { _mm512_mask_storeu_ps(p, mask(n), v) }
    }

    #[inline(always)]
    fn add(a: __m512, b: __m512) -> __m512 {
        // SAFETY: see the module comment.
        unsafe { _mm512_add_ps(a, b) }
    }
    #[inline(always)]
    fn sub(a: __m512, b: __m512) -> __m512 {
        // SAFETY: see the module comment.
        unsafe { _mm512_sub_ps(a, b) }
    }
    #[inline(always)]
    fn mul(a: __m512, b: __m512) -> __m512 {
        // SAFETY: see the module comment.
        unsafe { _mm512_mul_ps(a, b) }
    }
    #[inline(always)]
    fn div(a: __m512, b: __m512) -> __m512 {
        // SAFETY: see the module comment.
        unsafe { _mm512_div_ps(a, b) }
    }
    #[inline(always)]
    fn fma(a: __m512, b: __m512, c: __m512) -> __m512 {
        // SAFETY: see the module comment.
        unsafe { _mm512_fmadd_ps(a, b, c) }
    }
    #[inline(always)]
    fn fnma(a: __m512, b: __m512, c: __m512) -> __m512 {
        // SAFETY: see the module comment.
        unsafe { _mm512_fnmadd_ps(a, b, c) }
    }
    #[inline(always)]
    fn max(a: __m512, b: __m512) -> __m512 {
        // SAFETY: see the module comment.
        unsafe { _mm512_max_ps(a, b) }
    }
    #[inline(always)]
    fn select_lt(a: __m512, b: __m512, yes: __m512, no: __m512) -> __m512 {
        // SAFETY: see the module comment.
        unsafe { _mm512_mask_blend_ps(_mm512_cmp_ps_mask::<_CMP_LT_OQ>(a, b), no, yes) }
    }
    #[inline(always)]
    fn select_first(n: usize, yes: __m512, no: __m512) -> __m512 {
        // SAFETY: see the module comment.
        unsafe { _mm512_mask_blend_ps(mask(n), no, yes) }
    }
    #[inline(always)]
    fn exp2_of_shifted(z: __m512) -> __m512 {
        // SAFETY: see the module comment.
        unsafe {
            let one = _mm512_set1_epi32(1f32.to_bits() as i32);
            _mm512_castsi512_ps(_mm512_add_epi32(_mm512_slli_epi32::<23>(_mm512_castps_si512(z)), one))
        }
    }
    #[inline(always)]
    fn sum(v: __m512) -> f32 {
        // SAFETY: see the module comment.
        unsafe {
            let v = _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps::<1>(v));
            let v = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps::<1>(v));
            let v = _mm_add_ps(v, _mm_movehl_ps(v, v));
            _mm_cvtss_f32(_mm_add_ss(v, _mm_movehdup_ps(v)))
        }
    }
    #[inline(always)]
    fn max_lane(v: __m512) -> f32 {
        // SAFETY: see the module comment.
        unsafe {
            let v = _mm256_max_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps::<1>(v));
            let v = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps::<1>(v));
            let v = _mm_max_ps(v, _mm_movehl_ps(v, v));
            _mm_cvtss_f32(_mm_max_ss(v, _mm_movehdup_ps(v)))
        }
    }

    #[inline(always)]
    unsafe fn load_halves(a: *const f32, b: *const f32) -> __m512 {
        // SAFETY: the caller promises 8 readable values behind each.
        unsafe {
            let low = _mm512_castps256_ps512(_mm256_loadu_ps(a));
            _mm512_insertf32x8::<1>(low, _mm256_loadu_ps(b))
        }
    }
    #[inline(always)]
    unsafe fn bf16_pairs(p: *const u16) -> (__m512, __m512) {
        // SAFETY: the caller promises 32 readable values.
        let v = unsafe { _mm512_loadu_si512(p.cast()) };
        (even(v), odd(v))
    }
    #[inline(always)]
    unsafe fn bf16_pairs_halves(a: *const u16, b: *const u16) -> (__m512, __m512) {
        // SAFETY: the caller promises 16 readable values behind each.
        let v = unsafe {
            let low = _mm512_castsi256_si512(_mm256_loadu_si256(a.cast()));
            _mm512_inserti64x4::<1>(low, _mm256_loadu_si256(b.cast()))
        };
        (even(v), odd(v))
    }
    #[inline(always)]
    unsafe fn bf16(p: *const u16) -> __m512 {
        // SAFETY: the caller promises 16 readable values.
        unsafe {
            let half = _mm256_loadu_si256(p.cast());
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(half)))
        }
    }
    #[inline(always)]
    unsafe fn bf16_halves(a: *const u16, b: *const u16) -> __m512 {
        // SAFETY: the caller promises 8 readable values behind each.
        unsafe {
            let both = super::avx2::two_halves(a.cast(), b.cast());
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(both)))
        }
    }
    #[inline(always)]
    unsafe fn f16(p: *const u16) -> __m512 {
        // SAFETY: the caller promises 16 readable values.
        unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(p.cast())) }
    }
    #[inline(always)]
    unsafe fn f16_halves(a: *const u16, b: *const u16) -> __m512 {
        // SAFETY: the caller promises 8 readable values behind each.
        unsafe {
            let low = _mm256_castsi128_si256(_mm_loadu_si128(a.cast()));
            _mm512_cvtph_ps(_mm256_inserti128_si256::<1>(low, _mm_loadu_si128(b.cast())))
        }
    }
    #[inline(always)]
    unsafe fn i8(p: *const i8) -> __m512 {
        // SAFETY: the caller promises 16 readable values.
        unsafe { _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(p.cast()))) }
    }
    #[inline(always)]
    unsafe fn mx_scales(p: *const u8) -> __m512 {
        // SAFETY: the caller promises 16 readable values.
        unsafe {
            let e = _mm512_cvtepu8_epi32(_mm_loadu_si128(p.cast()));
            let normal = _mm512_slli_epi32::<23>(_mm512_sub_epi32(e, _mm512_set1_epi32(1)));
            let small = _mm512_sllv_epi32(_mm512_set1_epi32(0x0020_0000), e);
            let is_small = _mm512_cmplt_epi32_mask(e, _mm512_set1_epi32(2));
            _mm512_castsi512_ps(_mm512_mask_blend_epi32(is_small, normal, small))
        }
    }
    #[inline(always)]
    unsafe fn e4m3_pairs(p: *const u8) -> (__m512, __m512) {
        // SAFETY: the caller promises 32 readable codes; see the module comment for the features.
        unsafe {
            let (even, odd) = super::avx2::e4m3_words(_mm256_loadu_si256(p.cast()));
            (_mm512_cvtph_ps(even), _mm512_cvtph_ps(odd))
        }
    }
    #[inline(always)]
    unsafe fn e4m3_pairs_halves(a: *const u8, b: *const u8) -> (__m512, __m512) {
        // SAFETY: the caller promises 16 readable codes behind each; see the module comment for the features.
        unsafe {
            let (even, odd) = super::avx2::e4m3_words(super::avx2::two_halves(a, b));
            (_mm512_cvtph_ps(even), _mm512_cvtph_ps(odd))
        }
    }
    #[inline(always)]
    unsafe fn e4m3(p: *const u8) -> __m512 {
        // SAFETY: the caller promises 16 readable codes; see the module comment for the features.
        unsafe { _mm512_cvtph_ps(super::avx2::e4m3_bytes(p)) }
    }
    #[inline(always)]
    fn prefetch(p: *const u8) {
        // SAFETY: a prefetch never faults.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(p.cast()) }
    }
}
