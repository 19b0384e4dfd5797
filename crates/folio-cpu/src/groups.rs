//! Groups of tokens: how the activations of a product are cut and packed for the register tile.
//!
//! Owns: the size of groups, the layout of packed activations. Must never: let a token see its group (a group decides where
//! a token's values lie, never what they are).
//!
//! Columns are in the order in which the weights are stored: act-order of GPTQ costs a gather here, and nothing elsewhere.
//!
//! With weights that are floats a group is `[column][token]` f32, columns padded to a pair; with others integers as in
//! `quant::activations`. Cost: one pass over the activations.

use crate::memory::Rows;
use crate::packed::PackedMatrix;
use crate::plain::{self, Kind};
use crate::pool::Worker;
use crate::quant::activations::{self, Layout, Quantize};
use crate::quant::tile::Needs;
use crate::simd::Isa;
use crate::simd::dot::{COLUMNS, dispatch};

/// Blocks of columns that a worker rounds at a time.
const BLOCKS_PER_PIECE: usize = 8;

/// Columns transposed at a time: one cache line of each token is read, and what is written stays in the first level.
const TRANSPOSED: usize = 16;

/// Groups of tokens, as even as they can be.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Groups<'a> {
    tokens: usize,
    pub(crate) count: usize,
    cols: usize,
    layout: Option<Layout>,
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
            Layout { slots, words: needs.words, halves: needs.halves }
        });
        Self { tokens, count, cols: weight.cols, layout, order: weight.order.as_deref() }
    }

    /// First token of a group.
    pub(crate) fn start(&self, group: usize) -> usize {
        self.tokens * group / self.count
    }

    /// Of integers; `None` with weights that are floats.
    pub(crate) fn layout(&self) -> Option<Layout> {
        self.layout
    }

    /// Where a group starts in the packed activations, in bytes.
    pub(crate) fn offset(&self, group: usize) -> usize {
        match self.layout {
            Some(layout) => group * (self.cols / COLUMNS) * layout.block_bytes(),
            None => self.start(group) * self.cols.next_multiple_of(2) * 4,
        }
    }

    /// Bytes that packed activations take at most.
    pub(crate) fn bytes_limit(tokens: usize, cols: usize) -> usize {
        activations::bytes_limit(tokens, cols).max(tokens * cols.next_multiple_of(2) * 4)
    }

    /// One token is its own packed form with float weights in the model's order: rows are padded with zeros.
    pub(crate) fn packed_already(&self) -> bool {
        self.tokens == 1 && self.layout.is_none() && self.order.is_none()
    }

    /// This worker's share of packing `x`. Takes a barrier to be read by all.
    ///
    /// # Safety
    /// `x` has the rows of the groups with at least `cols` values; `to` has room for [`Groups::bytes_limit`], aligned to 4;
    /// every worker calls this with the same arguments, and nobody reads `to` meanwhile.
    pub(crate) unsafe fn pack(&self, isa: Isa, worker: &Worker<'_>, x: Rows, to: *mut u8) {
        let Some(layout) = self.layout else {
            for group in worker.share(self.count, 1) {
                // SAFETY: the contract of this function; the group is this worker's.
                unsafe { self.transpose(x, group, to.add(self.offset(group)).cast()) };
            }
            return;
        };
        let blocks = self.cols / COLUMNS;
        let pieces = blocks.div_ceil(BLOCKS_PER_PIECE);
        for piece in worker.share(self.count * pieces, 1) {
            let (group, first_block) = (piece / pieces, piece % pieces * BLOCKS_PER_PIECE);
            let blocks = first_block..(first_block + BLOCKS_PER_PIECE).min(blocks);
            let to = to.wrapping_add(self.offset(group));
            let tokens = self.start(group)..self.start(group + 1);
            dispatch(isa, Quantize { x, tokens, blocks, layout, order: self.order, to });
        }
    }

    /// # Safety
    /// That of [`Groups::pack`]; the group, which starts at `to`, is this caller's.
    unsafe fn transpose(&self, x: Rows, group: usize, to: *mut f32) {
        let (first, last) = (self.start(group), self.start(group + 1));
        let size = last - first;
        let padded = self.cols.next_multiple_of(2);
        // SAFETY: the contract of this function; indices stay below `size * padded` from the group's start.
        unsafe {
            for start in (0..self.cols).step_by(TRANSPOSED) {
                let columns = start..self.cols.min(start + TRANSPOSED);
                for t in 0..size {
                    let from = x.row(first + t).cast_const();
                    match self.order {
                        None => {
                            for k in columns.clone() {
                                *to.add(k * size + t) = *from.add(k);
                            }
                        }
                        Some(order) => {
                            for k in columns.clone() {
                                *to.add(k * size + t) = *from.add(order[k] as usize);
                            }
                        }
                    }
                }
            }
            if padded > self.cols {
                std::slice::from_raw_parts_mut(to.add(self.cols * size), size).fill(0.0);
            }
        }
    }
}
