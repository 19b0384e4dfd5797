//! The oracle: 16 lanes as an array, portable, always built.
//!
//! What takes more than an instruction or two for four lanes is a function of its own on x86-64, where every machine that is worth its speed has
//! another implementation: written out in each kernel it was more than a quarter of this crate's code, and of the time that it takes to compile.

use half::f16;

use super::{LANES, Simd};

#[derive(Clone, Copy)]
pub(crate) struct Scalar;

type V = [f32; LANES];

#[inline]
fn zip(a: V, b: V, f: impl Fn(f32, f32) -> f32) -> V {
    std::array::from_fn(|i| f(a[i], b[i]))
}

#[inline]
fn tree(mut v: V, f: impl Fn(f32, f32) -> f32) -> f32 {
    let mut width = LANES / 2;
    while width > 0 {
        for i in 0..width {
            v[i] = f(v[i], v[i + width]);
        }
        width /= 2;
    }
    v[0]
}

#[inline]
fn larger(a: f32, b: f32) -> f32 {
    if a > b { a } else { b }
}

impl Simd for Scalar {
    type V = V;

    const TOKENS: usize = 4;
    const WIDE: bool = false;

    #[inline]
    fn splat(x: f32) -> V {
        [x; LANES]
    }
    #[inline]
    unsafe fn load(p: *const f32) -> V {
        // SAFETY: the caller promises 16 readable values.
        unsafe { p.cast::<V>().read_unaligned() }
    }
    #[inline]
    unsafe fn store(p: *mut f32, v: V) {
        // SAFETY: the caller promises 16 writable values.
        unsafe { p.cast::<V>().write_unaligned(v) }
    }
    #[cfg_attr(target_arch = "x86_64", inline(never))]
    unsafe fn load_part(p: *const f32, n: usize) -> V {
        // SAFETY: the caller promises `n` readable values.
        std::array::from_fn(|i| if i < n { unsafe { p.add(i).read_unaligned() } } else { 0.0 })
    }
    #[cfg_attr(target_arch = "x86_64", inline(never))]
    unsafe fn store_part(p: *mut f32, n: usize, v: V) {
        for (i, x) in v.into_iter().enumerate().take(n) {
            // SAFETY: the caller promises `n` writable values.
            unsafe { p.add(i).write_unaligned(x) }
        }
    }

    #[inline]
    fn add(a: V, b: V) -> V {
        zip(a, b, |a, b| a + b)
    }
    #[inline]
    fn sub(a: V, b: V) -> V {
        zip(a, b, |a, b| a - b)
    }
    #[inline]
    fn mul(a: V, b: V) -> V {
        zip(a, b, |a, b| a * b)
    }
    #[inline]
    fn div(a: V, b: V) -> V {
        zip(a, b, |a, b| a / b)
    }
    #[cfg_attr(target_arch = "x86_64", inline(never))]
    fn fma(a: V, b: V, c: V) -> V {
        std::array::from_fn(|i| a[i].mul_add(b[i], c[i]))
    }
    #[cfg_attr(target_arch = "x86_64", inline(never))]
    fn fnma(a: V, b: V, c: V) -> V {
        std::array::from_fn(|i| (-a[i]).mul_add(b[i], c[i]))
    }
    #[cfg_attr(target_arch = "x86_64", inline(never))]
    fn max(a: V, b: V) -> V {
        zip(a, b, larger)
    }
    #[cfg_attr(target_arch = "x86_64", inline(never))]
    fn select_lt(a: V, b: V, yes: V, no: V) -> V {
        std::array::from_fn(|i| if a[i] < b[i] { yes[i] } else { no[i] })
    }
    #[cfg_attr(target_arch = "x86_64", inline(never))]
    fn select_first(n: usize, yes: V, no: V) -> V {
        std::array::from_fn(|i| if i < n { yes[i] } else { no[i] })
    }
    #[cfg_attr(target_arch = "x86_64", inline(never))]
    fn exp2_of_shifted(z: V) -> V {
        z.map(|z| f32::from_bits((z.to_bits() << 23).wrapping_add(1f32.to_bits())))
    }
    #[cfg_attr(target_arch = "x86_64", inline(never))]
    fn sum(v: V) -> f32 {
        tree(v, |a, b| a + b)
    }
    #[cfg_attr(target_arch = "x86_64", inline(never))]
    fn max_lane(v: V) -> f32 {
        tree(v, larger)
    }

    #[cfg_attr(target_arch = "x86_64", inline(never))]
    unsafe fn load_halves(a: *const f32, b: *const f32) -> V {
        // SAFETY: the caller promises 8 readable values behind each.
        std::array::from_fn(|i| unsafe { if i < 8 { *a.add(i) } else { *b.add(i - 8) } })
    }
    #[cfg_attr(target_arch = "x86_64", inline(never))]
    unsafe fn bf16_pairs(p: *const u16) -> (V, V) {
        // SAFETY: the caller promises 32 readable values: two halves of 16.
        unsafe { Self::bf16_pairs_halves(p, p.add(LANES)) }
    }
    #[cfg_attr(target_arch = "x86_64", inline(never))]
    unsafe fn bf16_pairs_halves(a: *const u16, b: *const u16) -> (V, V) {
        let at = |i: usize, odd: usize| {
            // SAFETY: the caller promises 16 readable values behind each.
            let bits = unsafe { if i < 8 { *a.add(2 * i + odd) } else { *b.add(2 * (i - 8) + odd) } };
            f32::from_bits(u32::from(bits) << 16)
        };
        (std::array::from_fn(|i| at(i, 0)), std::array::from_fn(|i| at(i, 1)))
    }
    #[cfg_attr(target_arch = "x86_64", inline(never))]
    unsafe fn bf16(p: *const u16) -> V {
        // A shift, like the vector code, keeps the payload of a NaN.
        // SAFETY: the caller promises 16 readable values.
        std::array::from_fn(|i| f32::from_bits(u32::from(unsafe { *p.add(i) }) << 16))
    }
    #[cfg_attr(target_arch = "x86_64", inline(never))]
    unsafe fn bf16_halves(a: *const u16, b: *const u16) -> V {
        let at = |i: usize| {
            // SAFETY: the caller promises 8 readable values behind each.
            let bits = unsafe { if i < 8 { *a.add(i) } else { *b.add(i - 8) } };
            f32::from_bits(u32::from(bits) << 16)
        };
        std::array::from_fn(at)
    }
    #[cfg_attr(target_arch = "x86_64", inline(never))]
    unsafe fn f16(p: *const u16) -> V {
        // SAFETY: the caller promises 16 readable values.
        std::array::from_fn(|i| f16::from_bits(unsafe { *p.add(i) }).to_f32())
    }
    #[cfg_attr(target_arch = "x86_64", inline(never))]
    unsafe fn f16_halves(a: *const u16, b: *const u16) -> V {
        let at = |i: usize| {
            // SAFETY: the caller promises 8 readable values behind each.
            let bits = unsafe { if i < 8 { *a.add(i) } else { *b.add(i - 8) } };
            f16::from_bits(bits).to_f32()
        };
        std::array::from_fn(at)
    }
    #[cfg_attr(target_arch = "x86_64", inline(never))]
    unsafe fn i8(p: *const i8) -> V {
        // SAFETY: the caller promises 16 readable values.
        std::array::from_fn(|i| f32::from(unsafe { *p.add(i) }))
    }
    #[cfg_attr(target_arch = "x86_64", inline(never))]
    unsafe fn mx_scales(p: *const u8) -> V {
        // SAFETY: the caller promises 16 readable values.
        std::array::from_fn(|i| folio_model::quant::mxfp4_scale(unsafe { *p.add(i) }))
    }
    #[cfg_attr(target_arch = "x86_64", inline(never))]
    unsafe fn e4m3_pairs(p: *const u8) -> (V, V) {
        // SAFETY: the caller promises 32 readable codes: two halves of 16.
        unsafe { Self::e4m3_pairs_halves(p, p.add(LANES)) }
    }
    #[cfg_attr(target_arch = "x86_64", inline(never))]
    unsafe fn e4m3_pairs_halves(a: *const u8, b: *const u8) -> (V, V) {
        let at = |i: usize| {
            // SAFETY: the caller promises 16 readable codes behind each.
            let code = unsafe { if i < 16 { *a.add(i) } else { *b.add(i - 16) } };
            folio_model::quant::e4m3_in_256ths(code).to_f32()
        };
        (std::array::from_fn(|i| at(2 * i)), std::array::from_fn(|i| at(2 * i + 1)))
    }
    #[cfg_attr(target_arch = "x86_64", inline(never))]
    unsafe fn e4m3(p: *const u8) -> V {
        // SAFETY: the caller promises 16 readable codes.
        std::array::from_fn(|i| folio_model::quant::e4m3_in_256ths(unsafe { *p.add(i) }).to_f32())
    }
    #[inline]
    fn prefetch(_: *const u8) {}
}
