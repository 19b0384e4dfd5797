//! Exact integer products for attention: pairs of 16-bit integers, summed in 32 bits.
//!
//! Owns: the seam for instruction sets ([`Ints`]) and its dispatch. Must never: round, but where it says so. Sums are integers
//! below 2^31, so they are the same for every set and in any order.
//!
//! A vector is 16 lanes of 32 bits: a sum, or a pair of 16-bit integers. Bytes are widened to pairs when they are loaded, so that
//! one operand may have 16 bits of precision and nothing saturates.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod scalar;

use super::{Isa, Simd, scalar::Scalar};

/// Sixteen lanes of integers and what attention does with them. Only [`dispatch`] may choose an implementation.
pub(crate) trait Ints: Copy + 'static {
    type F: Simd;
    /// 16 sums, or 16 pairs.
    type I: Copy;

    fn zero() -> Self::I;
    /// 32 bytes as 16 pairs.
    /// # Safety
    /// `p` is readable for 32 bytes.
    unsafe fn pairs(p: *const u8) -> Self::I;
    /// As [`Ints::pairs`], 8 pairs from each.
    /// # Safety
    /// Both are readable for 16 bytes.
    unsafe fn pairs_halves(a: *const u8, b: *const u8) -> Self::I;
    /// 32 bytes of two nibbles as 16 pairs of entries of `table` each: of the low nibbles, of the high ones.
    /// # Safety
    /// `p` is readable for 32 bytes.
    unsafe fn nibble_pairs(p: *const u8, table: &[i8; 16]) -> (Self::I, Self::I);
    /// As [`Ints::nibble_pairs`], 8 pairs from each.
    /// # Safety
    /// Both are readable for 16 bytes.
    unsafe fn nibble_pairs_halves(a: *const u8, b: *const u8, table: &[i8; 16]) -> (Self::I, Self::I);
    /// One pair in all lanes.
    /// # Safety
    /// `p` is readable for 2 values.
    unsafe fn splat_pair(p: *const i16) -> Self::I;
    /// `sum + a.0 * b.0 + a.1 * b.1` per lane.
    fn dot(sum: Self::I, a: Self::I, b: Self::I) -> Self::I;
    fn add(a: Self::I, b: Self::I) -> Self::I;
    /// Nearest even.
    fn to_float(sum: Self::I) -> <Self::F as Simd>::V;
    /// Nearest even; values are at most 32767 in magnitude, or no number (then what is stored is not said).
    /// # Safety
    /// `p` is writable for 16 values.
    unsafe fn store_i16(p: *mut i16, v: <Self::F as Simd>::V);
}

/// A kernel call: its arguments, and the code over any set.
pub(crate) trait IntTask {
    /// Implementations are `#[inline(always)]`.
    fn run<I: Ints>(self);
}

/// Runs a task with the vectors of `isa`.
#[inline]
pub(crate) fn dispatch<T: IntTask>(isa: Isa, task: T) {
    match isa {
        Isa::Scalar => task.run::<Scalar>(),
        // SAFETY: an `Isa` that reaches kernels went through `Isa::checked`, which found the features on this machine.
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 => unsafe { run_avx2(task) },
        // SAFETY: as above.
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 => unsafe { run_avx512(task) },
        // SAFETY: as above.
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512Vnni => unsafe { run_vnni(task) },
        #[cfg(not(target_arch = "x86_64"))]
        _ => task.run::<Scalar>(),
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx,avx2,fma,f16c")]
unsafe fn run_avx2<T: IntTask>(task: T) {
    task.run::<super::avx2::Avx2>();
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx,avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")]
unsafe fn run_avx512<T: IntTask>(task: T) {
    task.run::<avx512::Plain>();
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx,avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
unsafe fn run_vnni<T: IntTask>(task: T) {
    task.run::<avx512::Vnni>();
}

#[cfg(test)]
mod tests {
    use super::*;

    /// All operations once, on numbers that reach the ends of their ranges.
    struct All<'a>(&'a mut Vec<f32>);

    impl IntTask for All<'_> {
        #[inline(always)]
        fn run<I: Ints>(self) {
            let bytes: [u8; 64] = std::array::from_fn(|i| (i as u8).wrapping_mul(37) ^ 0x80);
            let words: [i16; 4] = [32767, -32767, -12345, 321];
            let table: [i8; 16] = std::array::from_fn(|i| (i as i8 - 8) * 15 + 3);
            let mut floats = [0f32; 16];
            let mut out = [0i16; 16];
            // SAFETY: all arrays are long enough.
            unsafe {
                let a = I::splat_pair(words.as_ptr());
                let b = I::splat_pair(words.as_ptr().add(2));
                let (low, high) = I::nibble_pairs(bytes.as_ptr().add(7), &table);
                let (c, d) = I::nibble_pairs_halves(bytes.as_ptr().add(1), bytes.as_ptr().add(40), &table);
                let all = [I::pairs(bytes.as_ptr().add(3)), low, high, c, d];
                let halves = I::pairs_halves(bytes.as_ptr().add(5), bytes.as_ptr().add(33));
                let mut sum = I::zero();
                for v in all.into_iter().chain([halves]) {
                    for w in [a, b] {
                        sum = I::dot(sum, v, w);
                        I::F::store(floats.as_mut_ptr(), I::to_float(sum));
                        self.0.extend(floats);
                    }
                }
                let numbers: [f32; 16] =
                    std::array::from_fn(|i| [32767.0, -32767.0, 0.5, 1.5, -2.5, 7.49, -0.0, 12345.5][i % 8]);
                I::store_i16(out.as_mut_ptr(), I::F::load(numbers.as_ptr()));
                self.0.extend(out.map(f32::from));
            }
        }
    }

    #[test]
    fn every_set_agrees_with_the_scalar_one() {
        let mut oracle = Vec::new();
        dispatch(Isa::Scalar, All(&mut oracle));
        assert_eq!(&oracle[12 * 16..][..8], [32767.0, -32767.0, 0.0, 2.0, -2.0, 7.0, 0.0, 12346.0]);
        for isa in Isa::ALL.into_iter().filter(|isa| isa.is_available()) {
            let mut got = Vec::new();
            dispatch(isa, All(&mut got));
            assert_eq!(got, oracle, "{isa:?}");
        }
    }
}
