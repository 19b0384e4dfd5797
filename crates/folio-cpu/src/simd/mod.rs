//! The vector type kernels are written over, and the one place where instruction sets are chosen.
//!
//! Owns: [`Isa`] (what the machine has, what `FOLIO_ISA` forces), [`Simd`] (16 virtual f32 lanes) and [`dispatch`]. Must
//! never: know what a kernel computes.
//!
//! Invariants: every implementation of [`Simd`] gives the same bits for the same inputs. A vector is always 16 lanes: one
//! AVX-512 register, two AVX2 registers, or an array. Reductions are one fixed tree over those lanes
//! (`i + 8`, `i + 4`, `i + 2`, `i + 1`), so no result depends on the width of a register. A multiply-add is always fused.
//!
//! A kernel is a value that implements [`Task`]; [`dispatch`] runs it inside a function compiled with the features of the
//! chosen set. Everything below is `inline(always)`, so the features reach the intrinsics (memchr's technique).

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
pub(crate) mod dot;
pub(crate) mod ints;
mod scalar;

pub(crate) use scalar::Scalar;

use crate::error::CpuError;

/// Repeats a body with a constant index: what is past `$count` is not even compiled, and arrays become registers.
macro_rules! unrolled {
    ($count:expr, $t:ident, $body:block) => {
        $crate::simd::unrolled!(@ $count, $t, $body, 0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15)
    };
    (@ $count:expr, $t:ident, $body:block, $($i:literal)*) => {
        $(if const { $i < $count } {
            let $t: usize = $i;
            $body
        })*
    };
}
pub(crate) use unrolled;

/// An array whose values are made one by one, without a closure: the body of one is a function of its own, without the
/// instructions of its caller, and where it is not inlined every intrinsic in it becomes a call.
macro_rules! filled {
    ([$zero:expr; $count:expr], $i:ident => $value:expr) => {{
        let mut all = [$zero; $count];
        for $i in 0..$count {
            all[$i] = $value;
        }
        all
    }};
}
pub(crate) use filled;

/// f32 lanes of a vector, whatever the machine.
pub(crate) const LANES: usize = 16;

/// An instruction set the kernels are compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Isa {
    /// Portable code, the oracle of the others.
    Scalar,
    /// AVX2, FMA and F16C.
    Avx2,
    /// AVX-512 F, BW, DQ and VL.
    Avx512,
    /// The same and VNNI, which multiplies quantized weights. Everything else is as with `Avx512`.
    Avx512Vnni,
}

impl Isa {
    pub const ALL: [Isa; 4] = [Isa::Scalar, Isa::Avx2, Isa::Avx512, Isa::Avx512Vnni];

    pub const fn name(self) -> &'static str {
        match self {
            Isa::Scalar => "scalar",
            Isa::Avx2 => "avx2",
            Isa::Avx512 => "avx512",
            Isa::Avx512Vnni => "avx512vnni",
        }
    }

    /// Whether this machine runs it.
    pub fn is_available(self) -> bool {
        match self {
            Isa::Scalar => true,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => {
                is_x86_feature_detected!("avx2")
                    && is_x86_feature_detected!("fma")
                    && is_x86_feature_detected!("f16c")
            }
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => {
                Isa::Avx2.is_available()
                    && is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512dq")
                    && is_x86_feature_detected!("avx512vl")
            }
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512Vnni => Isa::Avx512.is_available() && is_x86_feature_detected!("avx512vnni"),
            #[cfg(not(target_arch = "x86_64"))]
            _ => false,
        }
    }

    /// Whether floats lie in registers of 512 bit.
    pub(crate) fn is_wide(self) -> bool {
        matches!(self, Isa::Avx512 | Isa::Avx512Vnni)
    }

    /// The widest set this machine runs.
    pub fn best() -> Isa {
        *Isa::ALL.iter().rev().find(|isa| isa.is_available()).unwrap_or(&Isa::Scalar)
    }

    /// `FOLIO_ISA` if it is set, else [`Isa::best`].
    pub fn from_env() -> Result<Isa, CpuError> {
        match std::env::var("FOLIO_ISA") {
            Ok(name) => Isa::parse(&name),
            Err(std::env::VarError::NotPresent) => Ok(Isa::best()),
            Err(std::env::VarError::NotUnicode(name)) => {
                Err(CpuError::UnknownIsa(name.to_string_lossy().into_owned()))
            }
        }
    }

    /// Parses a name and checks that this machine runs it.
    pub fn parse(name: &str) -> Result<Isa, CpuError> {
        let isa = Isa::ALL
            .into_iter()
            .find(|isa| isa.name() == name)
            .ok_or_else(|| CpuError::UnknownIsa(name.to_owned()))?;
        isa.checked()
    }

    pub(crate) fn checked(self) -> Result<Isa, CpuError> {
        if self.is_available() { Ok(self) } else { Err(CpuError::IsaUnavailable(self.name())) }
    }
}

/// Sixteen f32 lanes and what kernels do with them.
///
/// Only [`dispatch`] may choose an implementation: the methods execute instructions that the machine must have.
pub(crate) trait Simd: Copy + 'static {
    type V: Copy;

    /// Most tokens in one register tile of a matrix product.
    const TOKENS: usize;
    /// Whether a tile of several tokens should span two panels.
    const WIDE: bool;

    fn splat(x: f32) -> Self::V;
    /// # Safety
    /// `p` is readable for 16 values.
    unsafe fn load(p: *const f32) -> Self::V;
    /// # Safety
    /// `p` is writable for 16 values.
    unsafe fn store(p: *mut f32, v: Self::V);
    /// Loads `n <= 16` values; the other lanes are zero.
    /// # Safety
    /// `p` is readable for `n` values.
    unsafe fn load_part(p: *const f32, n: usize) -> Self::V;
    /// # Safety
    /// `p` is writable for `n <= 16` values.
    unsafe fn store_part(p: *mut f32, n: usize, v: Self::V);

    fn add(a: Self::V, b: Self::V) -> Self::V;
    fn sub(a: Self::V, b: Self::V) -> Self::V;
    fn mul(a: Self::V, b: Self::V) -> Self::V;
    fn div(a: Self::V, b: Self::V) -> Self::V;
    /// `a * b + c`, rounded once.
    fn fma(a: Self::V, b: Self::V, c: Self::V) -> Self::V;
    /// `c - a * b`, rounded once.
    fn fnma(a: Self::V, b: Self::V, c: Self::V) -> Self::V;
    /// `a > b ? a : b` (so a NaN in `b` survives).
    fn max(a: Self::V, b: Self::V) -> Self::V;
    /// `a < b ? yes : no` per lane; a NaN compares false.
    fn select_lt(a: Self::V, b: Self::V, yes: Self::V, no: Self::V) -> Self::V;
    /// Lane `i` is `yes` where `i < n`, else `no`.
    fn select_first(n: usize, yes: Self::V, no: Self::V) -> Self::V;
    /// `2^n` where `z = n + 1.5 * 2^23`.
    fn exp2_of_shifted(z: Self::V) -> Self::V;
    /// Sum over the fixed tree.
    fn sum(v: Self::V) -> f32;
    /// Maximum over the fixed tree.
    fn max_lane(v: Self::V) -> f32;

    /// Two 8-lane halves.
    /// # Safety
    /// Both are readable for 8 values.
    unsafe fn load_halves(a: *const f32, b: *const f32) -> Self::V;
    /// 16 dwords of bf16 pairs: the even elements, then the odd ones.
    /// # Safety
    /// `p` is readable for 32 values.
    unsafe fn bf16_pairs(p: *const u16) -> (Self::V, Self::V);
    /// As [`Simd::bf16_pairs`], from two halves of 8 dwords.
    /// # Safety
    /// Both are readable for 16 values.
    unsafe fn bf16_pairs_halves(a: *const u16, b: *const u16) -> (Self::V, Self::V);
    /// 16 consecutive bf16.
    /// # Safety
    /// `p` is readable for 16 values.
    unsafe fn bf16(p: *const u16) -> Self::V;
    /// Two halves of 8 bf16.
    /// # Safety
    /// Both are readable for 8 values.
    unsafe fn bf16_halves(a: *const u16, b: *const u16) -> Self::V;
    /// 16 consecutive f16.
    /// # Safety
    /// `p` is readable for 16 values.
    unsafe fn f16(p: *const u16) -> Self::V;
    /// Two halves of 8 f16.
    /// # Safety
    /// Both are readable for 8 values.
    unsafe fn f16_halves(a: *const u16, b: *const u16) -> Self::V;
    /// 16 consecutive i8.
    /// # Safety
    /// `p` is readable for 16 values.
    unsafe fn i8(p: *const i8) -> Self::V;
    /// 16 scales of MXFP4, `2^(e - 128)`.
    /// # Safety
    /// `p` is readable for 16 values.
    unsafe fn mx_scales(p: *const u8) -> Self::V;
    /// 16 words of pairs of e4m3 codes, each in 256ths (see `e4m3_in_256ths`): the even ones, then the odd ones.
    /// # Safety
    /// `p` is readable for 32 codes.
    unsafe fn e4m3_pairs(p: *const u8) -> (Self::V, Self::V);
    /// As [`Simd::e4m3_pairs`], from two halves of 8 pairs.
    /// # Safety
    /// Both are readable for 16 codes.
    unsafe fn e4m3_pairs_halves(a: *const u8, b: *const u8) -> (Self::V, Self::V);
    /// 16 consecutive codes of e4m3, in 256ths.
    /// # Safety
    /// `p` is readable for 16 codes.
    unsafe fn e4m3(p: *const u8) -> Self::V;
    /// Asks for the cache line at `p`, which may be any address, into the second-level cache.
    fn prefetch(p: *const u8);
}

/// `e^x`, at most 2 ulp wrong; exactly 1 at 0, exactly 0 below -87, saturated above 88; NaN stays NaN.
///
/// The polynomial of expf in Arm's optimized-routines.
#[inline(always)]
pub(crate) fn exp<S: Simd>(x: S::V) -> S::V {
    let low = S::splat(-87.0);
    let shift = S::splat(12_582_912.0); // 1.5 * 2^23
    let clamped = S::max(low, x);
    let high = S::splat(88.0);
    let clamped = S::select_lt(high, clamped, high, clamped);
    let z = S::fma(clamped, S::splat(std::f32::consts::LOG2_E), shift);
    let n = S::sub(z, shift);
    let b = S::fnma(n, S::splat(f32::from_bits(0x3f31_7200)), clamped);
    let b = S::fnma(n, S::splat(f32::from_bits(0x35bf_be8e)), b);
    let k = S::exp2_of_shifted(z);
    let u = S::mul(b, b);
    let high_terms = S::fma(S::splat(f32::from_bits(0x3c07_2010)), b, S::splat(f32::from_bits(0x3d2b_9f17)));
    let low_terms = S::fma(S::splat(f32::from_bits(0x3e2a_af33)), b, S::splat(f32::from_bits(0x3eff_fedb)));
    let j = S::fma(high_terms, u, low_terms);
    let j = S::fma(j, u, S::mul(S::splat(f32::from_bits(0x3f7f_fff6)), b));
    S::select_lt(x, low, S::splat(0.0), S::fma(j, k, k))
}

/// [`exp`] of one value: the same bits as any lane.
#[inline(always)]
pub(crate) fn exp_one<S: Simd>(x: f32) -> f32 {
    S::max_lane(exp::<S>(S::splat(x)))
}

/// The hyperbolic tangent, wrong by at most 2e-7; NaN stays NaN.
///
/// Below 0.625 Cephes' tanhf polynomial, above from [`exp`].
#[inline(always)]
pub(crate) fn tanh<S: Simd>(x: S::V) -> S::V {
    let (zero, one) = (S::splat(0.0), S::splat(1.0));
    let size = S::max(x, S::sub(zero, x));
    let e = exp::<S>(S::add(size, size));
    let large = S::sub(one, S::div(S::splat(2.0), S::add(e, one)));
    let large = S::select_lt(x, zero, S::sub(zero, large), large);
    let z = S::mul(x, x);
    let p = S::fma(S::splat(-5.704_988_7e-3), z, S::splat(2.063_909e-2));
    let p = S::fma(p, z, S::splat(-5.373_971_6e-2));
    let p = S::fma(p, z, S::splat(1.333_144_2e-1));
    let p = S::fma(p, z, S::splat(-3.333_328e-1));
    let small = S::fma(S::mul(p, z), x, x);
    S::select_lt(size, S::splat(0.625), small, large)
}

/// A kernel call: its arguments, and the code over any vector type.
pub(crate) trait Task {
    type Output;
    /// Implementations are `#[inline(always)]`.
    fn run<S: Simd>(self) -> Self::Output;
}

/// Runs a task with the vector type of `isa`.
#[inline]
pub(crate) fn dispatch<T: Task>(isa: Isa, task: T) -> T::Output {
    match isa {
        Isa::Scalar => task.run::<Scalar>(),
        // SAFETY: an `Isa` that reaches kernels went through `Isa::checked`, which found the features on this machine.
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 => unsafe { run_avx2(task) },
        // SAFETY: as above.
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 | Isa::Avx512Vnni => unsafe { run_avx512(task) },
        #[cfg(not(target_arch = "x86_64"))]
        _ => task.run::<Scalar>(),
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx,avx2,fma,f16c")]
unsafe fn run_avx2<T: Task>(task: T) -> T::Output {
    task.run::<avx2::Avx2>()
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx,avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")]
unsafe fn run_avx512<T: Task>(task: T) -> T::Output {
    task.run::<avx512::Avx512>()
}
