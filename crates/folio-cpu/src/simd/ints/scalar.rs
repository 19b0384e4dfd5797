//! The oracle.

use super::Ints;
use crate::simd::LANES;
use crate::simd::scalar::Scalar;

/// A sum is an i32; a pair has its first value in the low half.
type I = [i32; LANES];

fn pair(a: i8, b: i8) -> i32 {
    i32::from(i16::from(a) as u16) | i32::from(b) << 16
}

impl Ints for Scalar {
    type F = Scalar;
    type I = I;

    #[inline]
    fn zero() -> I {
        [0; LANES]
    }
    #[cfg_attr(target_arch = "x86_64", inline(never))]
    unsafe fn pairs(p: *const u8) -> I {
        // SAFETY: the caller promises 32 bytes: two halves of 16.
        unsafe { Self::pairs_halves(p, p.add(16)) }
    }
    #[cfg_attr(target_arch = "x86_64", inline(never))]
    unsafe fn pairs_halves(a: *const u8, b: *const u8) -> I {
        // SAFETY: the caller promises 16 bytes behind each.
        let at = |i: usize| unsafe { *(if i < 16 { a.add(i) } else { b.add(i - 16) }) as i8 };
        std::array::from_fn(|i| pair(at(2 * i), at(2 * i + 1)))
    }
    #[cfg_attr(target_arch = "x86_64", inline(never))]
    unsafe fn nibble_pairs(p: *const u8, table: &[i8; 16]) -> (I, I) {
        // SAFETY: the caller promises 32 bytes: two halves of 16.
        unsafe { Self::nibble_pairs_halves(p, p.add(16), table) }
    }
    #[cfg_attr(target_arch = "x86_64", inline(never))]
    unsafe fn nibble_pairs_halves(a: *const u8, b: *const u8, table: &[i8; 16]) -> (I, I) {
        // SAFETY: the caller promises 16 bytes behind each.
        let at = |i: usize| unsafe { *(if i < 16 { a.add(i) } else { b.add(i - 16) }) };
        let low = |i: usize| table[usize::from(at(i) & 15)];
        let high = |i: usize| table[usize::from(at(i) >> 4)];
        (
            std::array::from_fn(|i| pair(low(2 * i), low(2 * i + 1))),
            std::array::from_fn(|i| pair(high(2 * i), high(2 * i + 1))),
        )
    }
    #[cfg_attr(target_arch = "x86_64", inline(never))]
    unsafe fn splat_pair(p: *const i16) -> I {
        // SAFETY: the caller promises 2 values.
        [unsafe { p.cast::<i32>().read_unaligned() }; LANES]
    }
    #[cfg_attr(target_arch = "x86_64", inline(never))]
    fn dot(sum: I, a: I, b: I) -> I {
        let products = |a: i32, b: i32| {
            let (low, high) = (i32::from(a as i16) * i32::from(b as i16), (a >> 16) * (b >> 16));
            low.wrapping_add(high)
        };
        std::array::from_fn(|i| sum[i].wrapping_add(products(a[i], b[i])))
    }
    #[inline]
    fn add(a: I, b: I) -> I {
        std::array::from_fn(|i| a[i].wrapping_add(b[i]))
    }
    #[cfg_attr(target_arch = "x86_64", inline(never))]
    fn to_float(sum: I) -> [f32; LANES] {
        sum.map(|sum| sum as f32)
    }
    #[cfg_attr(target_arch = "x86_64", inline(never))]
    unsafe fn store_i16(p: *mut i16, v: [f32; LANES]) {
        for (i, v) in v.into_iter().enumerate() {
            // SAFETY: the caller promises 16 writable values.
            unsafe { p.add(i).write_unaligned(v.round_ties_even() as i16) }
        }
    }
}
