//! Activations as 8-bit integers, in the order the tile reads them.
//!
//! Owns: the rounding of activations, and their layout per group of tokens. Must never: look at another token.
//!
//! A block is 32 columns of one token: `scale = amax / 127`, codes are `x * (127 / amax)` rounded to nearest, ties to even.
//! A block whose `amax` is below [`LEAST`] is zero; one that holds a NaN or an infinity has the codes 0 and a scale that is
//! not finite, so that its outputs are NaN. Every instruction set computes exactly this.
//!
//! Cost: one pass over the activations, about a nanosecond per value of 16.

use std::ops::Range;

use crate::groups::{MOST_TOKENS, Source};
use crate::simd::dot::{Block, COLUMNS, Dot, DotTask, Field};

/// Smaller blocks have no finite `127 / amax` that is worth having.
const LEAST: f32 = 1e-30;
const _: () = assert!(127.0 / LEAST < f32::MAX);

/// How the activations of a product lie: `[group][block of 32 columns][parts]`, each part for all slots of the group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ActivationLayout {
    /// Tokens of a group, with those that pad it.
    pub(crate) slots: usize,
    /// Whether the fields of half blocks are there.
    pub(crate) halves: bool,
}

impl ActivationLayout {
    /// Bytes of a block of columns.
    pub(crate) fn block_bytes(&self) -> usize {
        self.slots * (COLUMNS + self.fields() * 4)
    }

    fn fields(&self) -> usize {
        if self.halves { 8 } else { 4 }
    }

    /// The block at `start`.
    #[inline(always)]
    pub(crate) fn block(&self, start: *const u8) -> Block {
        Block { bytes: start, meta: start.wrapping_add(self.slots * COLUMNS).cast() }
    }
}

/// Rounds the columns of `blocks` for `tokens` of `source`, which are the first slots of a group.
pub(crate) struct Quantize<'a> {
    pub(crate) source: &'a Source<'a>,
    /// Of the norm of each token, if there is one.
    pub(crate) inverses: [f32; MOST_TOKENS],
    pub(crate) tokens: Range<usize>,
    pub(crate) blocks: Range<usize>,
    pub(crate) layout: ActivationLayout,
    /// Which column of the source each packed column is; `None` where they are the same. A permutation of the columns.
    pub(crate) order: Option<&'a [u32]>,
    /// Block 0 of the group. The caller promises room for all blocks, and that nobody else touches these.
    pub(crate) to: *mut u8,
}

impl DotTask for Quantize<'_> {
    type Output = ();

    #[inline(always)]
    fn run<D: Dot>(self) {
        for block in self.blocks.clone() {
            let to = self.to.wrapping_add(block * self.layout.block_bytes());
            for slot in 0..self.layout.slots {
                let token = self.tokens.start + slot;
                let rounded = if token < self.tokens.end {
                    // SAFETY: the row has these columns; they are whole blocks.
                    unsafe { self.rounded(self.source.row(token), self.inverses[slot], block) }
                } else {
                    Rounded::zero(0.0)
                };
                // SAFETY: the block is this caller's, and the slot is inside it.
                unsafe { self.write(to, slot, &rounded) };
            }
        }
    }
}

impl Quantize<'_> {
    /// # Safety
    /// `row` has the columns of the block, or all that `order` names.
    #[inline(always)]
    unsafe fn rounded(&self, row: *const f32, inverse: f32, block: usize) -> Rounded {
        let first = block * COLUMNS;
        let Some(order) = self.order else {
            // SAFETY: the contract of this function.
            let x = unsafe { &*row.add(first).cast::<[f32; COLUMNS]>() };
            let Some((weight, _)) = self.source.norm else { return round(x) };
            let mut normed = [0f32; COLUMNS];
            let weight = &weight[first..first + COLUMNS];
            for i in 0..COLUMNS {
                normed[i] = x[i] * inverse * weight[i];
            }
            return round(&normed);
        };
        let mut x = [0f32; COLUMNS];
        for (x, column) in x.iter_mut().zip(&order[first..first + COLUMNS]) {
            let column = *column as usize;
            // SAFETY: the contract of this function.
            *x = unsafe { *row.add(column) };
            if let Some((weight, _)) = self.source.norm {
                *x = *x * inverse * weight[column];
            }
        }
        round(&x)
    }
}

struct Rounded {
    codes: [i8; COLUMNS],
    scale: f32,
    /// Of the first and second half of the codes.
    sums: [i32; 2],
}

impl Rounded {
    fn zero(scale: f32) -> Self {
        Self { codes: [0; COLUMNS], scale, sums: [0; 2] }
    }
}

#[inline(always)]
fn round(x: &[f32; COLUMNS]) -> Rounded {
    // As bits, NaN is above infinity and infinity above all numbers. (Loops: closures would not get the features of the
    // set, and rounding would become a call per value.)
    let mut largest = 0;
    for x in x {
        largest = largest.max(x.to_bits() & 0x7fff_ffff);
    }
    let amax = f32::from_bits(largest);
    if !amax.is_finite() {
        return Rounded::zero(amax);
    }
    if amax < LEAST {
        return Rounded::zero(0.0);
    }
    let inverse = 127.0 / amax;
    let mut rounded = [0; COLUMNS];
    for (code, x) in rounded.iter_mut().zip(x) {
        // SAFETY: |x| <= amax, so the product is at most 127 and half an ulp, and rounds to an integer of that size.
        *code = unsafe { (x * inverse).round_ties_even().to_int_unchecked::<i32>() };
    }
    let (mut codes, mut sums) = ([0; COLUMNS], [0; 2]);
    for i in 0..COLUMNS / 2 {
        sums[0] += rounded[i];
        sums[1] += rounded[COLUMNS / 2 + i];
    }
    for (code, rounded) in codes.iter_mut().zip(rounded) {
        *code = rounded as i8;
    }
    Rounded { codes, scale: amax / 127.0, sums }
}

impl Quantize<'_> {
    /// # Safety
    /// The block at `to` is writable, and `slot` is one of its slots.
    #[inline(always)]
    unsafe fn write(&self, to: *mut u8, slot: usize, rounded: &Rounded) {
        let block = self.layout.block(to);
        let Rounded { codes, scale, sums: [low, high] } = *rounded;
        let put = |field: Field, bits: u32| {
            let at = block.meta.wrapping_add(field as usize * self.layout.slots + slot);
            // SAFETY: the contract of this function; fields of halves are written only where the layout has them.
            unsafe { at.cast_mut().cast::<u32>().write_unaligned(bits) };
        };
        let sum = |sum: i32| (scale * sum as f32).to_bits();
        // SAFETY: the contract of this function.
        unsafe { block.bytes.cast_mut().add(slot * COLUMNS).cast::<[i8; COLUMNS]>().write(codes) };
        put(Field::Scale, scale.to_bits());
        put(Field::Sum, sum(low + high));
        put(Field::Minus8, (-8 * (low + high)) as u32);
        put(Field::Minus128, (-128 * (low + high)) as u32);
        if self.layout.halves {
            put(Field::LowSum, sum(low));
            put(Field::HighSum, sum(high));
            put(Field::LowMinus8, (-8 * low) as u32);
            put(Field::HighMinus8, (-8 * high) as u32);
        }
    }
}
