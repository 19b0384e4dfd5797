//! 16 lanes as two 256-bit registers.
//!
//! Every method needs AVX2, FMA and F16C. They are reached through `dispatch` only, which checked the machine.

use std::arch::x86_64::*;

use super::Simd;

#[derive(Clone, Copy)]
pub(crate) struct Avx2;

#[derive(Clone, Copy)]
pub(crate) struct Pair(pub(super) __m256, pub(super) __m256);

/// Applies an intrinsic to both halves.
macro_rules! both {
    ($f:ident, $a:expr, $b:expr) => {{
        let (a, b) = ($a, $b);
        // SAFETY: see the module comment: `dispatch` checked the features.
        unsafe { Pair($f(a.0, b.0), $f(a.1, b.1)) }
    }};
    ($f:ident, $a:expr, $b:expr, $c:expr) => {{
        let (a, b, c) = ($a, $b, $c);
        // SAFETY: see the module comment: `dispatch` checked the features.
        unsafe { Pair($f(a.0, b.0, c.0), $f(a.1, b.1, c.1)) }
    }};
}

/// All ones in lanes `i < n` of 8.
#[inline(always)]
fn mask(n: usize) -> __m256i {
    // SAFETY: see the module comment.
    unsafe {
        let lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
        _mm256_cmpgt_epi32(_mm256_set1_epi32(n.min(8) as i32), lanes)
    }
}

#[inline(always)]
fn even(v: __m256i) -> __m256 {
    // SAFETY: see the module comment.
    unsafe { _mm256_castsi256_ps(_mm256_slli_epi32::<16>(v)) }
}

#[inline(always)]
fn odd(v: __m256i) -> __m256 {
    // SAFETY: see the module comment.
    unsafe { _mm256_castsi256_ps(_mm256_and_si256(v, _mm256_set1_epi32(0xffff_0000_u32 as i32))) }
}

#[inline(always)]
unsafe fn wide_bf16(p: *const u16) -> __m256 {
    // SAFETY: the caller promises 8 readable values; features as above.
    unsafe {
        let half = _mm_loadu_si128(p.cast());
        _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(half)))
    }
}

#[inline(always)]
unsafe fn wide_f16(p: *const u16) -> __m256 {
    // SAFETY: the caller promises 8 readable values; features as above.
    unsafe { _mm256_cvtph_ps(_mm_loadu_si128(p.cast())) }
}

/// The low and the high bytes of 16 words as f16 in 256ths: the sign stays at the top, the rest goes two bits below it.
#[inline(always)]
pub(super) fn e4m3_words(words: __m256i) -> (__m256i, __m256i) {
    // SAFETY: see the module comment.
    unsafe {
        let place =
            |high| _mm256_and_si256(_mm256_srai_epi16::<1>(high), _mm256_set1_epi16(0xbf80_u16 as i16));
        (place(_mm256_slli_epi16::<8>(words)), place(words))
    }
}

/// 16 bytes from each.
/// # Safety
/// Both are readable for 16 bytes.
#[inline(always)]
pub(super) unsafe fn two_halves(a: *const u8, b: *const u8) -> __m256i {
    // SAFETY: the contract of this function; see the module comment for the features.
    unsafe {
        let low = _mm256_castsi128_si256(_mm_loadu_si128(a.cast()));
        _mm256_inserti128_si256::<1>(low, _mm_loadu_si128(b.cast()))
    }
}

/// 16 codes as f16 in 256ths, in order.
/// # Safety
/// `p` is readable for 16 codes.
#[inline(always)]
pub(super) unsafe fn e4m3_bytes(p: *const u8) -> __m256i {
    // SAFETY: the contract of this function; see the module comment for the features.
    e4m3_words(unsafe { _mm256_slli_epi16::<8>(_mm256_cvtepu8_epi16(_mm_loadu_si128(p.cast()))) }).1
}

/// 16 f16.
#[inline(always)]
fn wide_halves(v: __m256i) -> Pair {
    // SAFETY: see the module comment.
    unsafe {
        Pair(_mm256_cvtph_ps(_mm256_castsi256_si128(v)), _mm256_cvtph_ps(_mm256_extracti128_si256::<1>(v)))
    }
}

impl Simd for Avx2 {
    type V = Pair;

    const TOKENS: usize = 6;
    const WIDE: bool = false;

    #[inline(always)]
    fn splat(x: f32) -> Pair {
        // SAFETY: see the module comment.
        let v = unsafe { _mm256_set1_ps(x) };
        Pair(v, v)
    }
    #[inline(always)]
    unsafe fn load(p: *const f32) -> Pair {
        // SAFETY: the caller promises 16 readable values.
        unsafe { Pair(_mm256_loadu_ps(p), _mm256_loadu_ps(p.add(8))) }
    }
    #[inline(always)]
    unsafe fn store(p: *mut f32, v: Pair) {
        // SAFETY: the caller promises 16 writable values.
        unsafe {
            _mm256_storeu_ps(p, v.0);
            _mm256_storeu_ps(p.add(8), v.1);
        }
    }
    #[inline(always)]
    unsafe fn load_part(p: *const f32, n: usize) -> Pair {
        // SAFETY: masked lanes are not accessed; the caller promises the first `n`. The second address may lie past the
        // end, so it is computed without the in-bounds promise of `add`.
        unsafe {
            Pair(
                _mm256_maskload_ps(p, mask(n)),
                _mm256_maskload_ps(p.wrapping_add(8), mask(n.saturating_sub(8))),
            )
        }
    }
    #[inline(always)]
    unsafe fn store_part(p: *mut f32, n: usize, v: Pair) {
        // SAFETY: as in `load_part`.
        unsafe {
            _mm256_maskstore_ps(p, mask(n), v.0);
            _mm256_maskstore_ps(p.wrapping_add(8), mask(n.saturating_sub(8)), v.1);
        }
    }

    #[inline(always)]
    fn add(a: Pair, b: Pair) -> Pair {
        both!(_mm256_add_ps, a, b)
    }
    #[inline(always)]
    fn sub(a: Pair, b: Pair) -> Pair {
        both!(_mm256_sub_ps, a, b)
    }
    #[inline(always)]
    fn mul(a: Pair, b: Pair) -> Pair {
        both!(_mm256_mul_ps, a, b)
    }
    #[inline(always)]
    fn div(a: Pair, b: Pair) -> Pair {
        both!(_mm256_div_ps, a, b)
    }
    #[inline(always)]
    fn fma(a: Pair, b: Pair, c: Pair) -> Pair {
        both!(_mm256_fmadd_ps, a, b, c)
    }
    #[inline(always)]
    fn fnma(a: Pair, b: Pair, c: Pair) -> Pair {
        both!(_mm256_fnmadd_ps, a, b, c)
    }
    #[inline(always)]
    fn max(a: Pair, b: Pair) -> Pair {
        both!(_mm256_max_ps, a, b)
    }
    #[inline(always)]
    fn select_lt(a: Pair, b: Pair, yes: Pair, no: Pair) -> Pair {
        // SAFETY: see the module comment.
        unsafe {
            Pair(
                _mm256_blendv_ps(no.0, yes.0, _mm256_cmp_ps::<_CMP_LT_OQ>(a.0, b.0)),
                _mm256_blendv_ps(no.1, yes.1, _mm256_cmp_ps::<_CMP_LT_OQ>(a.1, b.1)),
            )
        }
    }
    #[inline(always)]
    fn select_first(n: usize, yes: Pair, no: Pair) -> Pair {
        // SAFETY: see the module comment.
        unsafe {
            Pair(
                _mm256_blendv_ps(no.0, yes.0, _mm256_castsi256_ps(mask(n))),
                _mm256_blendv_ps(no.1, yes.1, _mm256_castsi256_ps(mask(n.saturating_sub(8)))),
            )
        }
    }
    #[inline(always)]
    fn exp2_of_shifted(z: Pair) -> Pair {
        // SAFETY: see the module comment.
        unsafe {
            let one = _mm256_set1_epi32(1f32.to_bits() as i32);
            let power = |z| {
                _mm256_castsi256_ps(_mm256_add_epi32(_mm256_slli_epi32::<23>(_mm256_castps_si256(z)), one))
            };
            Pair(power(z.0), power(z.1))
        }
    }
    #[inline(always)]
    fn sum(v: Pair) -> f32 {
        // SAFETY: see the module comment.
        unsafe {
            let v = _mm256_add_ps(v.0, v.1);
            let v = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps::<1>(v));
            let v = _mm_add_ps(v, _mm_movehl_ps(v, v));
            _mm_cvtss_f32(_mm_add_ss(v, _mm_movehdup_ps(v)))
        }
    }
    #[inline(always)]
    fn max_lane(v: Pair) -> f32 {
        // SAFETY: see the module comment.
        unsafe {
            let v = _mm256_max_ps(v.0, v.1);
            let v = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps::<1>(v));
            let v = _mm_max_ps(v, _mm_movehl_ps(v, v));
            _mm_cvtss_f32(_mm_max_ss(v, _mm_movehdup_ps(v)))
        }
    }

    #[inline(always)]
    unsafe fn load_halves(a: *const f32, b: *const f32) -> Pair {
        // SAFETY: the caller promises 8 readable values behind each.
        unsafe { Pair(_mm256_loadu_ps(a), _mm256_loadu_ps(b)) }
    }
    #[inline(always)]
    unsafe fn bf16_pairs(p: *const u16) -> (Pair, Pair) {
        // SAFETY: the caller promises 32 readable values: two halves of 16.
        unsafe { Self::bf16_pairs_halves(p, p.add(16)) }
    }
    #[inline(always)]
    unsafe fn bf16_pairs_halves(a: *const u16, b: *const u16) -> (Pair, Pair) {
        // SAFETY: the caller promises 16 readable values behind each.
        let (a, b) = unsafe { (_mm256_loadu_si256(a.cast()), _mm256_loadu_si256(b.cast())) };
        (Pair(even(a), even(b)), Pair(odd(a), odd(b)))
    }
    #[inline(always)]
    unsafe fn bf16(p: *const u16) -> Pair {
        // SAFETY: the caller promises 16 readable values.
        unsafe { Pair(wide_bf16(p), wide_bf16(p.add(8))) }
    }
    #[inline(always)]
    unsafe fn bf16_halves(a: *const u16, b: *const u16) -> Pair {
        // SAFETY: the caller promises 8 readable values behind each.
        unsafe { Pair(wide_bf16(a), wide_bf16(b)) }
    }
    #[inline(always)]
    unsafe fn f16(p: *const u16) -> Pair {
        // SAFETY: the caller promises 16 readable values.
        unsafe { Pair(wide_f16(p), wide_f16(p.add(8))) }
    }
    #[inline(always)]
    unsafe fn f16_halves(a: *const u16, b: *const u16) -> Pair {
        // SAFETY: the caller promises 8 readable values behind each.
        unsafe { Pair(wide_f16(a), wide_f16(b)) }
    }
    #[inline(always)]
    unsafe fn i8(p: *const i8) -> Pair {
        // SAFETY: the caller promises 16 readable values.
        unsafe {
            let v = _mm_loadu_si128(p.cast());
            let wide = |v| _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(v));
            Pair(wide(v), wide(_mm_bsrli_si128::<8>(v)))
        }
    }
    #[inline(always)]
    unsafe fn mx_scales(p: *const u8) -> Pair {
        // SAFETY: the caller promises 16 readable values.
        unsafe {
            let v = _mm_loadu_si128(p.cast());
            let scale = |e| {
                let normal = _mm256_slli_epi32::<23>(_mm256_sub_epi32(e, _mm256_set1_epi32(1)));
                let small = _mm256_sllv_epi32(_mm256_set1_epi32(0x0020_0000), e);
                let is_small = _mm256_cmpgt_epi32(_mm256_set1_epi32(2), e);
                _mm256_castsi256_ps(_mm256_blendv_epi8(normal, small, is_small))
            };
            Pair(scale(_mm256_cvtepu8_epi32(v)), scale(_mm256_cvtepu8_epi32(_mm_bsrli_si128::<8>(v))))
        }
    }
    #[inline(always)]
    unsafe fn e4m3_pairs(p: *const u8) -> (Pair, Pair) {
        // SAFETY: the caller promises 32 readable codes.
        let (even, odd) = e4m3_words(unsafe { _mm256_loadu_si256(p.cast()) });
        (wide_halves(even), wide_halves(odd))
    }
    #[inline(always)]
    unsafe fn e4m3_pairs_halves(a: *const u8, b: *const u8) -> (Pair, Pair) {
        // SAFETY: the caller promises 16 readable codes behind each.
        let (even, odd) = e4m3_words(unsafe { two_halves(a, b) });
        (wide_halves(even), wide_halves(odd))
    }
    #[inline(always)]
    unsafe fn e4m3(p: *const u8) -> Pair {
        // SAFETY: the caller promises 16 readable codes.
        wide_halves(unsafe { e4m3_bytes(p) })
    }
    #[inline(always)]
    fn prefetch(p: *const u8) {
        // SAFETY: a prefetch never faults.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(p.cast()) }
    }
}
