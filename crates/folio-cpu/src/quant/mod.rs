//! Quantized weights: what each block format becomes in memory, and the arithmetic over it.
//!
//! Owns: the packed forms ([`Form`]), which block format has which ([`with_form`]), activations as integers
//! ([`activations`]), the register tile ([`tile`]). Must never: change a weight. A packed weight has exactly the value that
//! `BlockFormat::decode` gives it.
//!
//! # The arithmetic (promise 1)
//!
//! Activations become integers in `-127..=127` per token and per 32 columns, whoever else is in the batch. An output starts
//! at zero; for each block of columns in ascending order (per 16 where the format has a scale per 16):
//!
//! 1. `sum` = integer products of codes and activations, exact.
//! 2. `acc = fma(sum, weight_scale * x_scale, acc)`, the product of the scales rounded once.
//! 3. With a minimum per block: `acc = fma(minimum, x_sum, acc)`, where `x_sum` is the scale of the activations times their
//!    sum, rounded once. Where a format has a scale per 16, both halves take step 2, then both take step 3.
//!
//! Then the bias, then the residual. `weight_scale` is one f32: an f16 as it is stored, or a f16 times a 6- or 8-bit
//! integer, and of i-quants a power of two, which is exact; of NVFP4 an e4m3; in Folio's own formats it is the f32 itself.
//!
//! # ActivationLayout
//!
//! Rows are cut into panels of 16. A panel is a sequence of records; a record holds the scales of 16 rows side by side and
//! then their codes (see [`simd::dot`](crate::simd::dot)), so that one token reads memory once and in order:
//!
//! | form | columns | record |
//! |---|---|---|
//! | [`Simple`] | 32 | `d` 16 x f16, with a minimum `m` 16 x f16, codes |
//! | [`Mx`] | 32 | exponents 16 x u8, codes |
//! | [`Super`] | 256 | `d` 16 x f16, with minima `min` 16 x f16, then 8 times: 1 or 2 scales 16 x i8, as many minima 16 x i8, codes |
//! | [`Grouped`] | 32 or 128 | `d` 16 x f32, with zeros `z` 16 x u8, codes of each 32 columns |
//! | [`Halves`] | 32 | `d` of columns 0 to 15 and of the others, 16 x f32 each, codes |
//! | [`Quarters`] | 64 | 4 times 16 x e4m3, codes of each 32 columns |
//!
//! | block format | form | codes |
//! |---|---|---|
//! | Q8_0 | [`Simple`] | [`Signed8`] |
//! | Q4_0, Q5_0 | [`Simple`] | [`Signed4`], [`Signed5`] |
//! | Q4_1, Q5_1 | [`Simple`] with a minimum | [`Unsigned4`], [`Unsigned5`] |
//! | IQ4_NL, MXFP4 | [`Simple`], [`Mx`] | [`Iq4`], [`E2m1`] |
//! | Q4_K, Q5_K | [`Super`] with minima | [`Unsigned4`], [`Unsigned5`] |
//! | IQ4_XS | [`Super`] | [`Iq4`] |
//! | IQ3_XXS, IQ3_S | [`Super`] | [`Iq3Xxs`], [`Iq3S`] |
//! | IQ2_XXS, IQ2_XS, IQ2_S, IQ1_S, IQ1_M | [`Super`], a scale per 16 columns | [`Iq2`], [`Iq1`] |
//! | TQ1_0, TQ2_0 | [`Super`] | [`Ternary`] |
//! | Q2_K | [`Super`] with minima, a scale per 16 columns | [`Unsigned4`] |
//! | Q3_K, Q6_K | [`Super`], a scale per 16 columns | [`Signed4`], [`Signed6`] |
//! | Int4x32, Int4x128 | [`Grouped`] | [`Signed4`] |
//! | Uint4x32, Uint4x128 | [`Grouped`] with zeros; the minimum is `-(d * z)` | [`Unsigned4`] |
//! | Int8x32, Int8x128 | [`Grouped`] | [`Signed8`] |
//! | Fp4x16, NVFP4 | [`Halves`], [`Quarters`] | [`E2m1`] |
//! | Fp8x32, Fp8x128 | none: floats, see `plain` | |
//!
//! Cost: a weight takes the bits of its block format, and at most 0.15 more (Q2_K and Q3_K: up to 2.5 more; i-quants of 1 to 3 bits and
//! ternary formats: 4.3 or 4.6 in all).

pub(crate) mod activations;
pub(crate) mod pack;
pub(crate) mod quantize;
pub(crate) mod tile;

use folio_model::quant::{
    BlockFormat, IQ1_VALUES, IQ2_VALUES, IQ3_S_VALUES, IQ3_XXS_VALUES, IQ4_VALUES, MXFP4_VALUES, NVFP4_UNIT,
    TERNARY_VALUES,
};

use crate::simd::dot::Codes;
use crate::simd::{LANES, Simd};

/// How a block format lies in a panel.
pub(crate) trait Form: Copy + 'static {
    type C: Codes;
    /// Bytes of a record of 16 rows.
    const BYTES: usize;
    /// Blocks of 32 columns in a record.
    const BLOCKS: usize;
    /// Whether a block has a scale for each 16 columns.
    const HALVES: bool;
    /// Whether tiles of many sizes are compiled for it.
    const COMMON: bool;
    /// Whether values have a minimum (or offset) besides the scale.
    const MINIMA: bool;

    /// Where the codes of a block start in the record.
    fn codes_at(block: usize) -> usize;

    /// Scales of 16 rows, for part 0 and 1 of a block (equal where the form has one per block).
    ///
    /// # Safety
    /// `record` is readable for `BYTES`.
    unsafe fn scales<S: Simd>(record: *const u8, block: usize) -> [S::V; 2];

    /// What is added to code times scale, likewise. Zero where the form has none.
    ///
    /// # Safety
    /// `record` is readable for `BYTES`.
    unsafe fn offsets<S: Simd>(record: *const u8, block: usize) -> [S::V; 2];

    /// Puts what a source block says besides codes into the record: the inverse of `scales` and `offsets`.
    fn put_scales(record: &mut [u8], row: usize, source: &Scales);
}

/// What a source block says besides its codes, whatever its format. Fields that a format lacks are zero.
#[derive(Clone, Copy, Default)]
pub(crate) struct Scales {
    /// f16 bits.
    pub(crate) d: u16,
    /// f16 bits of the unit of minima, or of the minimum.
    pub(crate) min: u16,
    /// f32 bits, of Folio's own formats; the second of columns 16 to 31, where they have one.
    pub(crate) d32: [u32; 2],
    /// The zero of those that have one.
    pub(crate) zero: u8,
    /// The exponent of MXFP4.
    pub(crate) exponent: u8,
    /// Codes of NVFP4's scales.
    pub(crate) e4m3: [u8; 4],
    /// Per 16 columns, in units of `d` and `min`. Formats with one scale per 32 have it twice.
    pub(crate) scales: [i8; 16],
    pub(crate) minima: [i8; 16],
}

/// Value `row` of the 16 at `at`.
fn put_at<const N: usize>(record: &mut [u8], at: usize, row: usize, bytes: [u8; N]) {
    record[at + N * row..][..N].copy_from_slice(&bytes);
}

/// f16 `d`, perhaps f16 `m`, codes of 32 columns.
#[derive(Clone, Copy)]
pub(crate) struct Simple<C, const MINIMA: bool, const COMMON: bool>(std::marker::PhantomData<C>);

/// Exponents, codes of 32 columns.
#[derive(Clone, Copy)]
pub(crate) struct Mx<C>(std::marker::PhantomData<C>);

/// `BLOCKS` times 32 columns under one f32 `d`, perhaps one zero.
#[derive(Clone, Copy)]
pub(crate) struct Grouped<C, const BLOCKS: usize, const ZEROS: bool>(std::marker::PhantomData<C>);

/// 32 columns, an f32 `d` for each half of them.
#[derive(Clone, Copy)]
pub(crate) struct Halves<C>(std::marker::PhantomData<C>);

/// 64 columns, a code of e4m3 for each 16 of them.
#[derive(Clone, Copy)]
pub(crate) struct Quarters<C>(std::marker::PhantomData<C>);

/// 256 columns under one f16 `d`, perhaps one f16 `min`.
#[derive(Clone, Copy)]
pub(crate) struct Super<C, const HALVES: bool, const MINIMA: bool>(std::marker::PhantomData<C>);

impl<C: Codes, const MINIMA: bool, const COMMON: bool> Form for Simple<C, MINIMA, COMMON> {
    type C = C;
    const BYTES: usize = Self::CODES + C::BYTES;
    const BLOCKS: usize = 1;
    const HALVES: bool = false;
    const MINIMA: bool = MINIMA;
    const COMMON: bool = COMMON;

    #[inline(always)]
    fn codes_at(_: usize) -> usize {
        Self::CODES
    }
    #[inline(always)]
    unsafe fn scales<S: Simd>(record: *const u8, _: usize) -> [S::V; 2] {
        // SAFETY: the record starts with 16 f16.
        [unsafe { S::f16(record.cast()) }; 2]
    }
    #[inline(always)]
    unsafe fn offsets<S: Simd>(record: *const u8, _: usize) -> [S::V; 2] {
        // SAFETY: with minima, they follow the scales.
        [if MINIMA { unsafe { S::f16(record.cast::<u16>().add(LANES)) } } else { S::splat(0.0) }; 2]
    }
    fn put_scales(record: &mut [u8], row: usize, source: &Scales) {
        put_at(record, 0, row, source.d.to_le_bytes());
        if MINIMA {
            put_at(record, 2 * LANES, row, source.min.to_le_bytes());
        }
    }
}

impl<C: Codes, const MINIMA: bool, const COMMON: bool> Simple<C, MINIMA, COMMON> {
    const CODES: usize = 2 * LANES * if MINIMA { 2 } else { 1 };
}

impl<C: Codes> Form for Mx<C> {
    type C = C;
    const BYTES: usize = LANES + C::BYTES;
    const BLOCKS: usize = 1;
    const HALVES: bool = false;
    const MINIMA: bool = false;
    const COMMON: bool = false;

    #[inline(always)]
    fn codes_at(_: usize) -> usize {
        LANES
    }
    #[inline(always)]
    unsafe fn scales<S: Simd>(record: *const u8, _: usize) -> [S::V; 2] {
        // SAFETY: the record starts with 16 exponents.
        [unsafe { S::mx_scales(record) }; 2]
    }
    #[inline(always)]
    unsafe fn offsets<S: Simd>(_: *const u8, _: usize) -> [S::V; 2] {
        [S::splat(0.0); 2]
    }
    fn put_scales(record: &mut [u8], row: usize, source: &Scales) {
        put_at(record, 0, row, [source.exponent]);
    }
}

impl<C: Codes, const BLOCKS: usize, const ZEROS: bool> Grouped<C, BLOCKS, ZEROS> {
    const ZEROS_AT: usize = 4 * LANES;
    const CODES: usize = Self::ZEROS_AT + if ZEROS { LANES } else { 0 };
}

impl<C: Codes, const BLOCKS: usize, const ZEROS: bool> Form for Grouped<C, BLOCKS, ZEROS> {
    type C = C;
    const BYTES: usize = Self::CODES + BLOCKS * C::BYTES;
    const BLOCKS: usize = BLOCKS;
    const HALVES: bool = false;
    const MINIMA: bool = ZEROS;
    const COMMON: bool = false;

    #[inline(always)]
    fn codes_at(block: usize) -> usize {
        Self::CODES + block * C::BYTES
    }
    #[inline(always)]
    unsafe fn scales<S: Simd>(record: *const u8, _: usize) -> [S::V; 2] {
        // SAFETY: the record starts with 16 f32.
        [unsafe { S::load(record.cast()) }; 2]
    }
    #[inline(always)]
    unsafe fn offsets<S: Simd>(record: *const u8, _: usize) -> [S::V; 2] {
        if !ZEROS {
            return [S::splat(0.0); 2];
        }
        // SAFETY: zeros follow the scales; they are small, so the sign of a byte does not matter.
        let products = unsafe { S::mul(S::load(record.cast()), S::i8(record.add(Self::ZEROS_AT).cast())) };
        [S::sub(S::splat(0.0), products); 2]
    }
    fn put_scales(record: &mut [u8], row: usize, source: &Scales) {
        put_at(record, 0, row, source.d32[0].to_le_bytes());
        if ZEROS {
            put_at(record, Self::ZEROS_AT, row, [source.zero]);
        }
    }
}

impl<C: Codes> Form for Halves<C> {
    type C = C;
    const BYTES: usize = 2 * 4 * LANES + C::BYTES;
    const BLOCKS: usize = 1;
    const HALVES: bool = true;
    const MINIMA: bool = false;
    const COMMON: bool = false;

    #[inline(always)]
    fn codes_at(_: usize) -> usize {
        2 * 4 * LANES
    }
    #[inline(always)]
    unsafe fn scales<S: Simd>(record: *const u8, _: usize) -> [S::V; 2] {
        // SAFETY: the record starts with twice 16 f32.
        unsafe { [S::load(record.cast()), S::load(record.cast::<f32>().add(LANES))] }
    }
    #[inline(always)]
    unsafe fn offsets<S: Simd>(_: *const u8, _: usize) -> [S::V; 2] {
        [S::splat(0.0); 2]
    }
    fn put_scales(record: &mut [u8], row: usize, source: &Scales) {
        put_at(record, 0, row, source.d32[0].to_le_bytes());
        put_at(record, 4 * LANES, row, source.d32[1].to_le_bytes());
    }
}

impl<C: Codes> Form for Quarters<C> {
    type C = C;
    const BYTES: usize = 4 * LANES + 2 * C::BYTES;
    const BLOCKS: usize = 2;
    const HALVES: bool = true;
    const MINIMA: bool = false;
    const COMMON: bool = false;

    #[inline(always)]
    fn codes_at(block: usize) -> usize {
        4 * LANES + block * C::BYTES
    }
    #[inline(always)]
    unsafe fn scales<S: Simd>(record: *const u8, block: usize) -> [S::V; 2] {
        let unit = S::splat(NVFP4_UNIT);
        // SAFETY: the record starts with four times 16 codes.
        unsafe {
            let codes = record.add(2 * LANES * block);
            [S::mul(S::e4m3(codes), unit), S::mul(S::e4m3(codes.add(LANES)), unit)]
        }
    }
    #[inline(always)]
    unsafe fn offsets<S: Simd>(_: *const u8, _: usize) -> [S::V; 2] {
        [S::splat(0.0); 2]
    }
    fn put_scales(record: &mut [u8], row: usize, source: &Scales) {
        for (part, code) in source.e4m3.into_iter().enumerate() {
            put_at(record, LANES * part, row, [code]);
        }
    }
}

impl<C: Codes, const HALVES: bool, const MINIMA: bool> Super<C, HALVES, MINIMA> {
    const PARTS: usize = if HALVES { 2 } else { 1 };
    /// Bytes of the scales of a block without its minima.
    const SCALES: usize = LANES * Self::PARTS;
    const HEAD: usize = 2 * LANES * if MINIMA { 2 } else { 1 };
    const BLOCK: usize = Self::SCALES * if MINIMA { 2 } else { 1 } + C::BYTES;

    #[inline(always)]
    fn scales_at(block: usize) -> usize {
        Self::HEAD + block * Self::BLOCK
    }

    /// 16 f16 at `unit` times the bytes of each part at `at`, times what codes are in; exact.
    ///
    /// # Safety
    /// Both lie in the record.
    #[inline(always)]
    unsafe fn products<S: Simd>(record: *const u8, unit: usize, at: usize) -> [S::V; 2] {
        // SAFETY: the contract of this function.
        unsafe {
            let mut unit = S::f16(record.add(unit).cast());
            if C::UNIT != 1.0 {
                unit = S::mul(unit, S::splat(C::UNIT));
            }
            let first = S::mul(unit, S::i8(record.add(at).cast()));
            if HALVES { [first, S::mul(unit, S::i8(record.add(at + LANES).cast()))] } else { [first; 2] }
        }
    }
}

impl<C: Codes, const HALVES: bool, const MINIMA: bool> Form for Super<C, HALVES, MINIMA> {
    type C = C;
    const BYTES: usize = Self::HEAD + 8 * Self::BLOCK;
    const BLOCKS: usize = 8;
    const HALVES: bool = HALVES;
    const MINIMA: bool = MINIMA;
    const COMMON: bool = false;

    #[inline(always)]
    fn codes_at(block: usize) -> usize {
        Self::HEAD + (block + 1) * Self::BLOCK - C::BYTES
    }
    #[inline(always)]
    unsafe fn scales<S: Simd>(record: *const u8, block: usize) -> [S::V; 2] {
        // SAFETY: `d` and the scales of the block lie in the record.
        unsafe { Self::products::<S>(record, 0, Self::scales_at(block)) }
    }
    #[inline(always)]
    unsafe fn offsets<S: Simd>(record: *const u8, block: usize) -> [S::V; 2] {
        if !MINIMA {
            return [S::splat(0.0); 2];
        }
        // SAFETY: `min` follows `d`, and the minima of the block follow its scales.
        let minima = unsafe { Self::products::<S>(record, 2 * LANES, Self::scales_at(block) + Self::SCALES) };
        [S::sub(S::splat(0.0), minima[0]), S::sub(S::splat(0.0), minima[1])]
    }
    fn put_scales(record: &mut [u8], row: usize, source: &Scales) {
        put_at(record, 0, row, source.d.to_le_bytes());
        if MINIMA {
            put_at(record, 2 * LANES, row, source.min.to_le_bytes());
        }
        for (block, part) in (0..8).flat_map(|block| (0..Self::PARTS).map(move |part| (block, part))) {
            let at = Self::scales_at(block) + LANES * part;
            put_at(record, at, row, source.scales[2 * block + part].to_le_bytes());
            if MINIMA {
                put_at(record, at + Self::SCALES, row, source.minima[2 * block + part].to_le_bytes());
            }
        }
    }
}

/// Declares what codes are.
macro_rules! codes {
    ($($(#[$doc:meta])*
    $name:ident: $bits:literal bits, lift $lift:literal, top $top:literal $(, table $table:expr)? $(, unit $unit:expr)?;)*) => {
        $($(#[$doc])*
        #[derive(Clone, Copy)]
        pub(crate) struct $name;
        impl Codes for $name {
            const BITS: usize = $bits;
            const LIFT: u8 = $lift;
            const TOP: u8 = $top;
            $(const TABLE: Option<[u8; 16]> = Some($table);)?
            $(const UNIT: f32 = $unit;)?
        })*
    };
}

codes! {
    /// -128 to 127.
    Signed8: 8 bits, lift 128, top 255;
    /// 0 to 15.
    Unsigned4: 4 bits, lift 0, top 15;
    /// -8 to 7.
    Signed4: 4 bits, lift 8, top 15;
    /// 0 to 31.
    Unsigned5: 5 bits, lift 0, top 31;
    /// -16 to 15.
    Signed5: 5 bits, lift 16, top 31;
    /// -32 to 31.
    Signed6: 6 bits, lift 32, top 63;
    /// The 16 values of IQ4_NL.
    Iq4: 4 bits, lift 128, top 241, table lift(IQ4_VALUES, 128);
    /// The 16 values of MXFP4, NVFP4 and Fp4x16, doubled.
    E2m1: 4 bits, lift 16, top 28, table lift(MXFP4_VALUES, 16);
    /// The values of IQ2_XXS, IQ2_XS and IQ2_S.
    Iq2: 4 bits, lift 48, top 91, table lift(IQ2_VALUES.values, 48), unit IQ2_VALUES.unit;
    /// Those of IQ3_XXS.
    Iq3Xxs: 4 bits, lift 32, top 63, table lift(IQ3_XXS_VALUES.values, 32), unit IQ3_XXS_VALUES.unit;
    /// Those of IQ3_S.
    Iq3S: 4 bits, lift 16, top 31, table lift(IQ3_S_VALUES.values, 16), unit IQ3_S_VALUES.unit;
    /// Those of IQ1_S and IQ1_M.
    Iq1: 4 bits, lift 16, top 25, table lift(IQ1_VALUES.values, 16), unit IQ1_VALUES.unit;
    /// Those of TQ1_0 and TQ2_0.
    Ternary: 4 bits, lift 8, top 10, table lift(TERNARY_VALUES.values, 8);
}

const fn lift(values: [i8; 16], by: i16) -> [u8; 16] {
    let mut table = [0; 16];
    let mut i = 0;
    while i < 16 {
        table[i] = (values[i] as i16 + by) as u8;
        i += 1;
    }
    table
}

/// Something to do with the form of a block format.
pub(crate) trait FormTask {
    type Output;
    fn run<F: Form>(self) -> Self::Output;
}

/// Runs a task with the form of `format`, which is not FP8.
pub(crate) fn with_form<T: FormTask>(format: BlockFormat, task: T) -> T::Output {
    match format {
        BlockFormat::Q8_0 => task.run::<Simple<Signed8, false, true>>(),
        BlockFormat::Q4_0 => task.run::<Simple<Signed4, false, true>>(),
        BlockFormat::Q4_1 => task.run::<Simple<Unsigned4, true, false>>(),
        BlockFormat::Q5_0 => task.run::<Simple<Signed5, false, false>>(),
        BlockFormat::Q5_1 => task.run::<Simple<Unsigned5, true, false>>(),
        BlockFormat::IQ4_NL => task.run::<Simple<Iq4, false, false>>(),
        BlockFormat::MXFP4 => task.run::<Mx<E2m1>>(),
        BlockFormat::Q2_K => task.run::<Super<Unsigned4, true, true>>(),
        BlockFormat::Q3_K => task.run::<Super<Signed4, true, false>>(),
        BlockFormat::Q4_K => task.run::<Super<Unsigned4, false, true>>(),
        BlockFormat::Q5_K => task.run::<Super<Unsigned5, false, true>>(),
        BlockFormat::Q6_K => task.run::<Super<Signed6, true, false>>(),
        BlockFormat::IQ4_XS => task.run::<Super<Iq4, false, false>>(),
        BlockFormat::IQ2_XXS | BlockFormat::IQ2_XS | BlockFormat::IQ2_S => {
            task.run::<Super<Iq2, true, false>>()
        }
        BlockFormat::IQ3_XXS => task.run::<Super<Iq3Xxs, false, false>>(),
        BlockFormat::IQ3_S => task.run::<Super<Iq3S, false, false>>(),
        BlockFormat::IQ1_S | BlockFormat::IQ1_M => task.run::<Super<Iq1, true, false>>(),
        BlockFormat::TQ1_0 | BlockFormat::TQ2_0 => task.run::<Super<Ternary, false, false>>(),
        BlockFormat::NVFP4 => task.run::<Quarters<E2m1>>(),
        BlockFormat::Int4x32 => task.run::<Grouped<Signed4, 1, false>>(),
        BlockFormat::Int4x128 => task.run::<Grouped<Signed4, 4, false>>(),
        BlockFormat::Uint4x32 => task.run::<Grouped<Unsigned4, 1, true>>(),
        BlockFormat::Uint4x128 => task.run::<Grouped<Unsigned4, 4, true>>(),
        BlockFormat::Int8x32 => task.run::<Grouped<Signed8, 1, false>>(),
        BlockFormat::Int8x128 => task.run::<Grouped<Signed8, 4, false>>(),
        BlockFormat::Fp4x16 => task.run::<Halves<E2m1>>(),
        BlockFormat::Fp8x32 | BlockFormat::Fp8x128 => unreachable!("FP8 has no integers"),
    }
}
