//! Exact integer products of quantized weights and quantized activations, one block of 32 columns at a time.
//!
//! Owns: how codes lie in memory ([`Codes`]), the seam for instruction sets ([`Dot`]), and its dispatch. Must never: round.
//! What leaves a [`Dot`] is an integer below 2^24, as f32; it is the same for every set, so sets are free in their order
//! inside a block. Scales and sums over blocks are the caller's, in plain [`Simd`] arithmetic.
//!
//! # Codes of a block
//!
//! 32 columns of 16 rows are 8 vectors of 64 bytes: byte `4 * row + i` of vector `j` is column `4 * j + i`. Their low four
//! bits lie in 256 bytes (vector `j` in the low nibbles of bytes `64 * j..`, vector `j + 4` in the high ones), a fifth bit
//! in 64 bytes (vector `j` in bit `j`), a fifth and sixth bit in 128 bytes (vector `j` in bits `2 * (j % 4)..` of half
//! `j / 4`). Codes of eight bits lie as they are. So a lane is always a row, and no sum across lanes is needed.
//!
//! # Why nothing overflows
//!
//! Activations are in `-127..=127`. 16-bit sums of pairs take at most `2 * TOP * 127`, and [`Codes::RUN`] of them are added
//! before they are widened. Pairs of codes that do not fit 16 bit so ([`Codes::WIDE`]) do as sizes times signed activations, at most
//! `2 * 128 * 127`; a set that multiplies bytes into 32 bit has no need of that. 32-bit sums of a block are below
//! `32 * 255 * 127 < 2^20`.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod scalar;

use super::{Isa, Simd};

/// Columns of a block.
pub(crate) const COLUMNS: usize = 32;
/// Vectors of 4 columns of 16 rows in a block.
pub(crate) const VECTORS: usize = 8;

/// What the codes of a block are.
pub(crate) trait Codes: Copy + 'static {
    /// 4, 5, 6 or 8.
    const BITS: usize;
    /// The unsigned byte that kernels multiply is the value plus this: a multiple of 8, and 128 where they are [`Codes::WIDE`].
    const LIFT: u8;
    /// The largest such byte.
    const TOP: u8;
    /// The lifted value of each nibble, where it is not the nibble itself.
    const TABLE: Option<[u8; 16]> = None;
    /// What a value is in units of the scale, a power of two.
    const UNIT: f32 = 1.0;

    /// Bytes of a block of 16 rows.
    const BYTES: usize = 64 * Self::BITS;
    /// Products of pairs that may be added in 16 bit: 8, 4, 2, or 0 for none.
    const RUN: usize = match 32767 / (254 * Self::TOP as usize) {
        0 => 0,
        1 => 1,
        2..4 => 2,
        4..8 => 4,
        _ => 8,
    };
    const WIDE: bool = Self::RUN == 0;
    /// Whether they lie as [`Dot::lift`] leaves them.
    #[cfg_attr(not(target_arch = "x86_64"), expect(dead_code, reason = "sets of instructions ask for it"))]
    const LIFTED: bool = false;
}

/// Bytes of a block of lifted codes.
pub(crate) const LIFTED_BYTES: usize = 64 * VECTORS;

/// Codes as [`Dot::lift`] leaves them: lifted, vector after vector.
#[derive(Clone, Copy)]
pub(crate) struct Lifted<C>(std::marker::PhantomData<C>);

impl<C: Codes> Codes for Lifted<C> {
    const BITS: usize = C::BITS;
    const LIFT: u8 = C::LIFT;
    const TOP: u8 = C::TOP;
    const BYTES: usize = LIFTED_BYTES;
    const LIFTED: bool = true;
}

/// The activations of one block of columns for `M` tokens, as `ActivationLayout` has them.
#[derive(Clone, Copy)]
pub(crate) struct Block {
    /// `[token][32]` i8
    pub(crate) bytes: *const u8,
    /// `[Field][token]`, 4 bytes each.
    pub(crate) meta: *const f32,
}

/// What is known of a token's block besides its codes. The last four are present for formats with a scale per 16 columns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
pub(crate) enum Field {
    /// f32: what a code is worth.
    Scale,
    /// f32: scale times the sum of the codes, rounded once.
    Sum,
    /// i32: -8 times the sum of the codes.
    Minus8,
    /// i32: -128 times it.
    Minus128,
    /// The same of columns 0 to 15 and 16 to 31.
    LowSum,
    HighSum,
    LowMinus8,
    HighMinus8,
}

impl Block {
    #[inline(always)]
    pub(crate) fn field<const M: usize>(&self, field: Field) -> *const f32 {
        self.meta.wrapping_add(field as usize * M)
    }

    /// What takes the lift of `C` out of a token's sum: `-LIFT * sum` over the block (`part` 0 of 1) or over half of it.
    ///
    /// # Safety
    /// The block holds `M` tokens and, with `HALVES`, the fields of halves.
    #[inline(always)]
    #[cfg_attr(not(target_arch = "x86_64"), expect(dead_code, reason = "sets of instructions ask for it"))]
    unsafe fn start<C: Codes, const M: usize, const HALVES: bool>(&self, token: usize, part: usize) -> i32 {
        // SAFETY: the contract of this function.
        let read = |field| unsafe { *self.field::<M>(field).cast::<i32>().add(token) };
        let eights = i32::from(C::LIFT) / 8;
        match (C::LIFT, HALVES, part) {
            (0, ..) => 0,
            (128, false, _) => read(Field::Minus128),
            (_, false, _) => read(Field::Minus8) * eights,
            (_, true, 0) => read(Field::LowMinus8) * eights,
            (_, true, _) => read(Field::HighMinus8) * eights,
        }
    }
}

/// Takes sums as they come.
pub(crate) trait Sink<V> {
    /// The sums of the 16 rows of a panel and one token over part `part` of the block. Parts of a token come in order.
    fn take(&mut self, panel: usize, token: usize, part: usize, sum: V);
}

/// Chains that hide the latency of a product (11 cycles with AVX2 on Intel, whose three ports take one of them a cycle) and fit
/// the registers of every set.
pub(crate) const CHAINS: usize = 13;

/// An instruction set's way to multiply codes.
///
/// Only [`dispatch`] may choose an implementation: the methods execute instructions that the machine must have.
pub(crate) trait Dot: Copy + 'static {
    /// The floats that go with it.
    type F: Simd;
    /// Whether every form is compiled for it, not the common ones alone.
    const EVERY_FORM: bool = true;
    /// Most tokens of a register tile.
    const TOKENS: usize;
    /// Panels of a tile of eight tokens, 1 or 2: more than one share each activation.
    const PANELS: usize = 1;

    /// Whether codes of less than a byte are lifted once for all groups of tokens, where there are several.
    const LIFTS: bool = false;

    /// Products of bytes in one register.
    const PRODUCTS: usize;

    /// Multiplies bytes and adds them up in 32 bits, `rounds` times in each of [`CHAINS`] registers that do not wait for one
    /// another: what the machine can do at most. Gives a sum, so that nothing is left out.
    ///
    /// # Safety
    /// The machine has the set.
    unsafe fn chains(rounds: usize) -> i32;

    /// Writes a block of codes as `block` takes it with [`Lifted`]: of a set that has [`Self::LIFTS`].
    ///
    /// # Safety
    /// `codes` is readable for `C::BYTES`, `to` writable for [`LIFTED_BYTES`].
    unsafe fn lift<C: Codes>(_codes: *const u8, _to: *mut u8) {
        unreachable!("this set lifts codes as it multiplies them")
    }

    /// Multiplies a block of each of `P` panels with the activations of `M` tokens. With `HALVES`, columns 0 to 15 and 16 to 31
    /// are parts 0 and 1.
    ///
    /// # Safety
    /// All `codes` are readable for `C::BYTES`, `x` holds `M` tokens with what [`Block`] says.
    unsafe fn block<C: Codes, const P: usize, const M: usize, const HALVES: bool>(
        codes: [*const u8; P],
        x: &Block,
        sink: &mut impl Sink<<Self::F as Simd>::V>,
    );
}

/// A kernel call over any [`Dot`].
pub(crate) trait DotTask {
    type Output;
    /// Implementations are `#[inline(always)]`.
    fn run<D: Dot>(self) -> Self::Output;
}

/// Runs a task with what `isa` has.
#[inline]
pub(crate) fn dispatch<T: DotTask>(isa: Isa, task: T) -> T::Output {
    match isa {
        Isa::Scalar => task.run::<scalar::Scalar>(),
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
        _ => task.run::<scalar::Scalar>(),
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx,avx2,fma,f16c")]
unsafe fn run_avx2<T: DotTask>(task: T) -> T::Output {
    task.run::<avx2::Avx2>()
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx,avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")]
unsafe fn run_avx512<T: DotTask>(task: T) -> T::Output {
    task.run::<avx512::Avx512>()
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx,avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
unsafe fn run_vnni<T: DotTask>(task: T) -> T::Output {
    task.run::<avx512::Vnni>()
}

/// The lifted code of byte `i` of vector `j`: the definition of the layout.
///
/// # Safety
/// `codes` is readable for `C::BYTES`.
#[inline(always)]
pub(crate) unsafe fn lifted<C: Codes>(codes: *const u8, j: usize, i: usize) -> u8 {
    // SAFETY: the contract of this function; the planes are where the module comment has them.
    unsafe {
        if C::BITS == 8 {
            return *codes.add(64 * j + i) ^ 0x80;
        }
        let low = *codes.add(64 * (j % 4) + i) >> (4 * (j / 4)) & 15;
        let high = match C::BITS {
            5 => *codes.add(256 + i) >> j & 1,
            6 => *codes.add(256 + 64 * (j / 4) + i) >> (2 * (j % 4)) & 3,
            _ => 0,
        };
        match C::TABLE {
            Some(table) => table[usize::from(low)],
            None => low | high << 4,
        }
    }
}

/// Adds a code to a zeroed block; the inverse of [`lifted`] before the table. Eight bits are taken as signed.
pub(crate) fn put<C: Codes>(codes: &mut [u8], j: usize, i: usize, code: u8) {
    if C::BITS == 8 {
        codes[64 * j + i] = code;
        return;
    }
    codes[64 * (j % 4) + i] |= (code & 15) << (4 * (j / 4));
    match C::BITS {
        5 => codes[256 + i] |= (code >> 4 & 1) << j,
        6 => codes[256 + 64 * (j / 4) + i] |= (code >> 4 & 3) << (2 * (j % 4)),
        _ => (),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::quant::Signed8;
    use crate::simd::LANES;

    const TOKENS: usize = 4;

    /// One block of Q8_0 of the same code everywhere and activations of the same size; what each set sums.
    struct Same(i8, [i8; TOKENS]);

    struct Sums<S> {
        all: [[f32; LANES]; TOKENS],
        set: std::marker::PhantomData<S>,
    }

    impl<S: Simd> Sink<S::V> for Sums<S> {
        fn take(&mut self, _: usize, token: usize, _: usize, sum: S::V) {
            // SAFETY: a row holds a vector.
            unsafe { S::store(self.all[token].as_mut_ptr(), sum) };
        }
    }

    impl DotTask for &Same {
        type Output = [[f32; LANES]; TOKENS];

        #[inline(always)]
        fn run<D: Dot>(self) -> Self::Output {
            let codes = [self.0 as u8; Signed8::BYTES];
            let bytes = self.1.map(|x| [x; COLUMNS]);
            let mut meta = [[0i32; TOKENS]; 4];
            meta[Field::Minus128 as usize] = self.1.map(|x| -128 * COLUMNS as i32 * i32::from(x));
            let x = Block { bytes: bytes.as_ptr().cast(), meta: meta.as_ptr().cast() };
            let mut sums = Sums::<D::F> { all: [[0.0; LANES]; TOKENS], set: std::marker::PhantomData };
            // SAFETY: whole codes, and as many tokens with their fields.
            unsafe { D::block::<Signed8, 1, TOKENS, false>([codes.as_ptr()], &x, &mut sums) };
            sums.all
        }
    }

    #[test]
    fn the_largest_codes_and_activations_overflow_in_no_set() {
        for code in [-128, -127, 127] {
            let case = Same(code, [127, -127, 1, -1]);
            let want = case.1.map(|x| [32.0 * f32::from(code) * f32::from(x); LANES]);
            for isa in Isa::ALL.into_iter().filter(|isa| isa.is_available()) {
                assert_eq!(dispatch(isa, &case), want, "{isa:?} {code}");
            }
        }
    }
}
