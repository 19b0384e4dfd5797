//! Groups of tokens: how the activations of a product are cut and packed for the register tile.
//!
//! Owns: the size of groups, the layout of packed activations. Must never: let a token see its group (a group decides where
//! a token's values lie, never what they are).
//!
//! Columns are in the order in which the weights are stored: act-order of GPTQ costs a gather here, and nothing elsewhere.
//!
//! With weights that are floats a group is `[column][token]` f32, columns padded to a pair; with others integers as in
//! `quant::activations`. Rows may be normalized on the way: value by value what `rows::RmsNorm` would have written. Cost: one
//! pass over the activations, one more with a norm.

use std::ops::Range;

use crate::memory::Rows;
use crate::packed::PackedMatrix;
use crate::plain::{self, Kind};
use crate::pool::Split;
use crate::quant::activations::{ActivationLayout, Quantize};
use crate::quant::tile::Needs;
use crate::rows::InverseRms;
use crate::simd::dot::COLUMNS;
use crate::simd::{Isa, dispatch, dot};

/// Blocks of columns that a worker rounds at a time.
const BLOCKS_PER_PIECE: usize = 8;
/// Columns that a worker transposes at a time.
const COLS_PER_PIECE: usize = 256;

/// Columns transposed at a time: one cache line of each token is read, and what is written stays in the first level.
const TRANSPOSED: usize = 16;

/// No set has larger groups.
pub(crate) const MOST_TOKENS: usize = 12;

/// Values that a worker packs for itself sooner than it waits for the others to pack their shares: a microsecond, with
/// weights that are integers and others.
const ALONE: [usize; 2] = [16384, 4096];

/// What a product multiplies.
#[derive(Clone, Copy)]
pub(crate) struct Source<'a> {
    pub(crate) rows: Rows,
    /// Which row each token is; `None` where that is its number.
    pub(crate) picked: Option<&'a [u32]>,
    /// Rows are normalized first. The norm's weight, padded to whole vectors, and epsilon.
    pub(crate) norm: Option<(&'a [f32], f32)>,
}

impl Source<'_> {
    #[inline(always)]
    pub(crate) fn row(&self, token: usize) -> *const f32 {
        let row = self.picked.map_or(token, |picked| picked[token] as usize);
        self.rows.row(row).cast_const()
    }

    /// What the values of each token of a group are multiplied by before the weight of the norm.
    ///
    /// # Safety
    /// The rows have `cols` values that nobody writes.
    unsafe fn inverses(&self, isa: Isa, tokens: Range<usize>, cols: usize) -> [f32; MOST_TOKENS] {
        let mut inverses = [1.0; MOST_TOKENS];
        if let Some((_, eps)) = self.norm {
            for (inverse, token) in inverses.iter_mut().zip(tokens) {
                *inverse = dispatch(isa, InverseRms { x: self.row(token), eps, width: cols });
            }
        }
        inverses
    }
}

/// Groups of tokens, as even as they can be.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Groups<'a> {
    tokens: usize,
    pub(crate) count: usize,
    cols: usize,
    layout: Option<ActivationLayout>,
    /// Which of the model's columns each packed column is, where the weights have an order of their own.
    order: Option<&'a [u32]>,
}

impl<'a> Groups<'a> {
    /// For a product of `tokens` tokens with `weight`.
    pub(crate) fn new(weight: &'a PackedMatrix, isa: Isa, tokens: usize) -> Self {
        let formats = weight.segments.iter().filter_map(|segment| match Kind::of(segment.encoding) {
            Kind::Floats(_) => None,
            Kind::Integers(format) => Some(format),
        });
        let needs = formats.map(|format| Needs::of(isa, format)).reduce(Needs::and);
        let limit = needs.map_or_else(|| plain::group_limit(isa), |needs| needs.tokens);
        let count = tokens.div_ceil(limit);
        let layout = needs.map(|needs| {
            let slots = needs.slots(tokens.div_ceil(count.max(1)));
            ActivationLayout { slots, halves: needs.halves }
        });
        Self { tokens, count, cols: weight.cols, layout, order: weight.order.as_deref() }
    }

    /// Tokens of a group.
    fn tokens_of(&self, group: usize) -> Range<usize> {
        self.start(group)..self.start(group + 1)
    }

    /// First token of a group.
    pub(crate) fn start(&self, group: usize) -> usize {
        self.tokens * group / self.count
    }

    /// Of integers; `None` with weights that are floats.
    pub(crate) fn layout(&self) -> Option<ActivationLayout> {
        self.layout
    }

    /// Where a group starts in the packed activations, in bytes.
    pub(crate) fn offset(&self, group: usize) -> usize {
        match self.layout {
            Some(layout) => group * (self.cols / COLUMNS) * layout.block_bytes(),
            None => self.start(group) * self.cols.next_multiple_of(2) * 4,
        }
    }

    /// Bytes that the packed activations take.
    pub(crate) fn bytes(&self) -> usize {
        if self.count == 0 { 0 } else { self.offset(self.count) }
    }

    /// One token is its own packed form with float weights in the model's order. (The other half of the last pair of columns
    /// may hold anything.)
    pub(crate) fn packed_already(&self, source: &Source<'_>) -> bool {
        let as_is = self.order.is_none() && source.norm.is_none() && self.cols.is_multiple_of(2);
        self.tokens == 1 && self.layout.is_none() && as_is
    }

    /// Whether every worker should pack everything, into `bytes` of its own, sooner than wait for the others.
    pub(crate) fn packed_alone(&self, bytes: usize) -> bool {
        let cheap = self.tokens * self.cols <= ALONE[usize::from(self.layout.is_none())];
        self.count == 1 && self.bytes() <= bytes && (cheap || (self.layout.is_none() && self.tokens == 1))
    }

    /// A share of packing `source`. All shares are there after a barrier.
    ///
    /// # Safety
    /// `source` has the rows of the groups with at least `cols` values, and nobody writes them; `to` has room for
    /// [`Groups::bytes`], aligned to 4, and nobody reads it, or writes this share of it.
    pub(crate) unsafe fn pack(&self, isa: Isa, split: Split, source: &Source<'_>, to: *mut u8) {
        let (size, total) = match self.layout {
            Some(_) => (BLOCKS_PER_PIECE, self.cols / COLUMNS),
            None => (COLS_PER_PIECE, self.cols.next_multiple_of(2)),
        };
        let pieces = total.div_ceil(size);
        let (mut normed, mut inverses) = (None, [1.0; MOST_TOKENS]);
        for piece in split.share(self.count * pieces, 1) {
            let (group, first) = (piece / pieces, piece % pieces * size);
            let range = first..(first + size).min(total);
            let tokens = self.tokens_of(group);
            if normed != Some(group) {
                // SAFETY: the contract of this function.
                inverses = unsafe { source.inverses(isa, tokens.clone(), self.cols) };
                normed = Some(group);
            }
            let to = to.wrapping_add(self.offset(group));
            match self.layout {
                Some(layout) => {
                    let blocks = range;
                    let order = self.order;
                    dot::dispatch(isa, Quantize { source, inverses, tokens, blocks, layout, order, to });
                }
                // SAFETY: the contract of this function; these columns of the group are this share's.
                None => unsafe { self.transpose(source, &inverses, tokens, range, to.cast()) },
            }
        }
    }

    /// Columns of a group to `[column][token]`.
    ///
    /// # Safety
    /// That of [`Groups::pack`]; the group starts at `to`, and these columns of it are this caller's.
    unsafe fn transpose(
        &self,
        source: &Source<'_>,
        inverses: &[f32; MOST_TOKENS],
        tokens: Range<usize>,
        columns: Range<usize>,
        to: *mut f32,
    ) {
        let size = tokens.len();
        let last = columns.end.min(self.cols);
        // SAFETY: the contract of this function; indices stay below `size * padded columns` from the group's start.
        unsafe {
            for start in (columns.start..last).step_by(TRANSPOSED) {
                for (t, inverse) in inverses.iter().enumerate().take(size) {
                    let from = source.row(tokens.start + t);
                    for k in start..last.min(start + TRANSPOSED) {
                        let column = self.order.map_or(k, |order| order[k] as usize);
                        let x = *from.add(column);
                        *to.add(k * size + t) = match source.norm {
                            Some((weight, _)) => x * inverse * weight[column],
                            None => x,
                        };
                    }
                }
            }
            if columns.end > last {
                std::slice::from_raw_parts_mut(to.add(last * size), size).fill(0.0);
            }
        }
    }
}
