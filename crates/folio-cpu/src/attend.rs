//! The attention kernel: one chunk of positions for the rows of one tile.
//!
//! Owns: the arithmetic of a row. Must never: let a neighbour in the tile, or anything stored at a position the row does not
//! attend to, touch a bit.
//!
//! For each chunk, in steps of [`STEP`] keys: scores (one chain over the dimensions per key, times the scale), maximum,
//! rescale of sum and accumulator (always, also by one), exponentials, sum over the fixed tree, values (one chain over the
//! positions per dimension). A masked key is replaced by minus infinity *by position* before anything is derived from it,
//! and its value is never multiplied: the chain of a row begins with its window and ends at its own position. A step with no
//! key for a row is skipped for that row, and so is a chunk. So stale bytes, even NaN, are read at most into lanes that are
//! thrown away, and blocks that were released (holes) not at all.
//!
//! Prefill and decode run this same code; a tile only decides how many rows share one pass over K and V.
//!
//! How keys and values are read is a [`Reader`]'s business: `floats` widens them to f32, `integers` multiplies their codes, `latents` reads
//! both from one place.
#![allow(clippy::needless_range_loop, reason = "a register tile reads best by its indices")]

mod floats;
mod integers;
mod latents;

use std::ops::Range;

use folio_model::backend::{HOLE, KvFormat};
use folio_model::tables::BlockTables;

use crate::attention::Shape;
use crate::kv::{GROUP, KvPages, rotate};
use crate::memory::Rows;
use crate::simd::{Isa, LANES, Simd, Task, dispatch, exp, exp_one, filled, ints, tanh};
use floats::{KvBf16, KvF16, KvF32, KvFp8, OfFloats};
use integers::{Int4, Int8, OfIntegers};
use latents::OfLatents;

/// Positions per partial result, counted from position 0.
pub(crate) const CHUNK: usize = 256;
/// Keys per softmax step.
pub(crate) const STEP: usize = 32;
/// Rows that pass over a step of keys together.
const ROWS: usize = 6;

/// How many positions a row attends to, its own among them, and whether only from where a run of as many begins. What a row attends to
/// first is never before what the row before it does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Window {
    tokens: usize,
    chunked: bool,
}

impl Window {
    pub(crate) fn of(window: Option<u32>, chunked: bool) -> Self {
        match window {
            Some(tokens) => Self { tokens: tokens as usize, chunked },
            None => Self { tokens: usize::MAX, chunked: false },
        }
    }

    /// First position that a row at `position` attends to.
    #[inline(always)]
    pub(crate) fn first(self, position: usize) -> usize {
        match self.chunked {
            true => position - position % self.tokens,
            false => (position + 1).saturating_sub(self.tokens),
        }
    }

    /// Last position whose row attends to `position`.
    fn last_reader(self, position: usize) -> usize {
        let from = if self.chunked { position - position % self.tokens } else { position };
        from.saturating_add(self.tokens - 1)
    }
}

/// Consecutive query tokens of one sequence and one KV head. Row `r` is token `r / group`, query head
/// `kv_head * group + r % group`.
#[derive(Clone, Debug)]
pub(crate) struct Tile {
    pub(crate) first_row: usize,
    pub(crate) tokens: usize,
    pub(crate) first_position: usize,
    /// Of the sequence's block tables.
    pub(crate) slot: u32,
    pub(crate) kv_head: usize,
}

/// Triples (maximum, sum, accumulator) of the rows of a tile. Accumulator rows are [`Shape::stride`] apart.
#[derive(Clone, Copy)]
pub(crate) struct Partial {
    pub(crate) max: *mut f32,
    pub(crate) sum: *mut f32,
    pub(crate) acc: *mut f32,
}

/// One attention operation, as every worker sees it.
///
/// Contract: `qkv` and `out` have a row for every row of the plan's tiles; `tables` hold those that tiles name, with
/// every block in range and every position of a tile covered; K and V of those positions are written and nobody writes
/// them, or `qkv`, now.
#[derive(Clone, Copy)]
pub(crate) struct Attend<'a> {
    pub(crate) isa: Isa,
    pub(crate) shape: Shape,
    pub(crate) scale: f32,
    pub(crate) softcap: Option<f32>,
    pub(crate) window: Window,
    /// One per query head.
    pub(crate) sinks: Option<&'a [f32]>,
    pub(crate) cache: &'a KvPages,
    /// The cache group: which of a sequence's block tables is meant.
    pub(crate) group: usize,
    pub(crate) layer: u32,
    pub(crate) tables: &'a BlockTables,
    /// Queries first.
    pub(crate) qkv: Rows,
    pub(crate) out: Rows,
    pub(crate) partials: *mut f32,
}

// SAFETY: pointers to buffers that workers share by the contract above.
unsafe impl Sync for Attend<'_> {}

impl Attend<'_> {
    /// Rows of a tile in passes of up to [`ROWS`]: first row and number.
    fn passes(rows: usize) -> impl Iterator<Item = (usize, usize)> {
        let count = rows.div_ceil(ROWS);
        (0..count).map(move |i| {
            let first = rows * i / count;
            (first, rows * (i + 1) / count - first)
        })
    }

    /// The queries of each pass as its keys need them: for floats, transposed into `[dim][row]`; for latents, row after row.
    ///
    /// # Safety
    /// `to` has room for the rows of the tile; the contract of [`Attend`].
    pub(crate) unsafe fn pack_queries(&self, tile: &Tile, to: *mut f32) {
        if self.cache.group.is_latent() {
            // SAFETY: the contract of this function.
            return unsafe { self.pack_rows(tile, to) };
        }
        match self.cache.format(self.layer) {
            KvFormat::F32 | KvFormat::F16 | KvFormat::BF16 | KvFormat::Fp8 => unsafe {
                // SAFETY: the contract of this function.
                self.pack_floats(tile, to)
            },
            // SAFETY: the contract of this function.
            format @ (KvFormat::Int8 | KvFormat::Int4) => unsafe { self.pack_integers(tile, format, to) },
        }
    }

    /// # Safety
    /// That of [`Attend::pack_queries`].
    unsafe fn pack_floats(&self, tile: &Tile, to: *mut f32) {
        let (group, dim) = (self.shape.group(), self.shape.key_dim);
        for (first, count) in Self::passes(tile.tokens * group) {
            for r in 0..count {
                let (token, head) = ((first + r) / group, tile.kv_head * group + (first + r) % group);
                // SAFETY: the contract of this function.
                unsafe {
                    let from = self.qkv.row(tile.first_row + token).add(head * dim);
                    for d in 0..dim {
                        *to.add(first * dim + d * count + r) = *from.add(d);
                    }
                }
            }
        }
    }

    /// Computes the triples of chunk `chunk` for the rows that attend to it. Others are left alone.
    ///
    /// # Safety
    /// The contract of [`Attend`]; `queries` from [`Self::pack_queries`]; `result` has room for the tile and is this
    /// worker's.
    pub(crate) unsafe fn chunk(&self, tile: &Tile, queries: *const f32, chunk: usize, result: Partial) {
        let task = Chunk { attend: self, tile, queries, chunk, result };
        if self.cache.group.is_latent() {
            return match self.cache.format(self.layer) {
                KvFormat::F32 => dispatch(self.isa, OfLatents::<KvF32>::new(task)),
                KvFormat::F16 => dispatch(self.isa, OfLatents::<KvF16>::new(task)),
                KvFormat::BF16 => dispatch(self.isa, OfLatents::<KvBf16>::new(task)),
                format => unreachable!("no latents in {format}: `check` refuses such a layout"),
            };
        }
        match self.cache.format(self.layer) {
            KvFormat::F32 => dispatch(self.isa, OfFloats::<KvF32>::new(task)),
            KvFormat::F16 => dispatch(self.isa, OfFloats::<KvF16>::new(task)),
            KvFormat::BF16 => dispatch(self.isa, OfFloats::<KvBf16>::new(task)),
            KvFormat::Fp8 => dispatch(self.isa, OfFloats::<KvFp8>::new(task)),
            KvFormat::Int8 => ints::dispatch(self.isa, OfIntegers::<Int8>::new(task)),
            KvFormat::Int4 => ints::dispatch(self.isa, OfIntegers::<Int4>::new(task)),
        }
    }

    /// First row of the tile at `position` or later.
    fn first_row_at(&self, tile: &Tile, position: usize) -> usize {
        position.saturating_sub(tile.first_position).min(tile.tokens) * self.shape.group()
    }

    /// First row of the tile that does not read `position`, because that is behind its window.
    fn first_row_past(&self, tile: &Tile, position: usize) -> usize {
        self.first_row_at(tile, self.window.last_reader(position).saturating_add(1))
    }

    /// Rows of the tile that attend to some position of `chunk`.
    fn rows_of(&self, tile: &Tile, chunk: usize) -> Range<usize> {
        let (start, end) = (chunk * CHUNK, (chunk + 1) * CHUNK);
        self.first_row_at(tile, start)..self.first_row_past(tile, end - 1)
    }

    /// Merges the result of `chunk` into the triples of the chunks before it; for rows that attend to none before it, it is
    /// the first triple.
    ///
    /// # Safety
    /// Both partials hold the tile; `whole` is this worker's.
    pub(crate) unsafe fn merge(&self, tile: &Tile, chunk: usize, whole: Partial, part: Partial) {
        let rows = self.rows_of(tile, chunk);
        let fresh = match chunk * CHUNK {
            0 => rows.start,
            start => self.first_row_past(tile, start - 1),
        };
        let stride = self.shape.stride();
        dispatch(self.isa, Merge { rows, fresh, stride, whole, part });
    }

    /// Divides by the sums and writes the output rows.
    ///
    /// # Safety
    /// The contract of [`Attend`]; nobody else writes these heads of these rows.
    pub(crate) unsafe fn write(&self, tile: &Tile, whole: Partial) {
        let (group, dim) = (self.shape.group(), self.shape.value_dim);
        let rotated = self.cache.format(self.layer) == KvFormat::Int4;
        for r in 0..tile.tokens * group {
            let (token, head) = (r / group, tile.kv_head * group + r % group);
            // SAFETY: the contract of this function.
            unsafe {
                let (max, sum) = (*whole.max.add(r), *whole.sum.add(r));
                let from = whole.acc.add(r * self.shape.stride());
                let to = self.out.row(tile.first_row + token).add(head * dim);
                match self.sinks {
                    None => {
                        for d in 0..dim {
                            *to.add(d) = *from.add(d) / sum;
                        }
                    }
                    Some(sinks) => {
                        let (factor, sum) = dispatch(self.isa, Sink { sink: sinks[head], max, sum });
                        for d in 0..dim {
                            *to.add(d) = *from.add(d) * factor / sum;
                        }
                    }
                }
                if rotated {
                    rotate(std::slice::from_raw_parts_mut(to, dim));
                }
            }
        }
    }
}

/// The sink as one more key, after all others, whose value is zero: the factor for the accumulator, and the sum with it.
struct Sink {
    sink: f32,
    max: f32,
    sum: f32,
}

impl Task for Sink {
    type Output = (f32, f32);

    #[inline(always)]
    fn run<S: Simd>(self) -> (f32, f32) {
        let max = if self.max > self.sink { self.max } else { self.sink };
        let factor = exp_one::<S>(self.max - max);
        (factor, self.sum.mul_add(factor, exp_one::<S>(self.sink - max)))
    }
}

struct Merge {
    rows: Range<usize>,
    /// First row for which `part` is all there is so far.
    fresh: usize,
    stride: usize,
    whole: Partial,
    part: Partial,
}

impl Task for Merge {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self) {
        for r in self.rows.clone() {
            // SAFETY: the contract of `Attend::merge`.
            unsafe {
                if r >= self.fresh {
                    *self.whole.max.add(r) = *self.part.max.add(r);
                    *self.whole.sum.add(r) = *self.part.sum.add(r);
                    for d in (0..self.stride).step_by(LANES) {
                        let from = self.part.acc.add(r * self.stride + d);
                        S::store(self.whole.acc.add(r * self.stride + d), S::load(from));
                    }
                    continue;
                }
                let (m, n) = (*self.whole.max.add(r), *self.part.max.add(r));
                let max = if m > n { m } else { n };
                let (a, b) = (exp_one::<S>(m - max), exp_one::<S>(n - max));
                *self.whole.max.add(r) = max;
                *self.whole.sum.add(r) = (*self.whole.sum.add(r)).mul_add(a, *self.part.sum.add(r) * b);
                let (a, b) = (S::splat(a), S::splat(b));
                for d in (0..self.stride).step_by(LANES) {
                    let to = self.whole.acc.add(r * self.stride + d);
                    let from = self.part.acc.add(r * self.stride + d);
                    S::store(to, S::fma(S::load(to), a, S::mul(S::load(from), b)));
                }
            }
        }
    }
}

/// Steps between asking for keys and values and using them.
const AHEAD: usize = 2;
/// Groups of keys in a step.
const GROUPS: usize = STEP / GROUP;

/// Where the keys and values of a group of positions lie. Scales mean nothing in formats without.
#[derive(Clone, Copy)]
struct Place {
    keys: *const u8,
    values: *const u8,
    key_scales: *const u16,
    value_scales: *const u16,
}

impl Place {
    const NOWHERE: Self = {
        let (codes, scales) = (std::ptr::null(), std::ptr::null());
        Self { keys: codes, values: codes, key_scales: scales, value_scales: scales }
    };
}

/// One step: where its keys and values lie.
struct Step {
    /// Absolute position of the first key.
    base: usize,
    /// Whether every row of the tile attends to every key.
    whole: bool,
    at: [Place; GROUPS],
    /// Of the step [`AHEAD`] of it, for prefetching; any address.
    next: [Place; GROUPS],
}

/// The groups of positions of one KV head of one sequence, in ascending order.
struct Walk<'a> {
    /// Blocks of the sequence.
    table: &'a [u32],
    /// What is read instead of a hole, at positions that every row masks: the block of the tile's first position.
    instead: u32,
    /// Page of block 0, and how far those of two blocks are apart.
    page: *const u8,
    block_bytes: usize,
    /// Of a block.
    tokens: usize,
    code_bytes: usize,
    plane_bytes: usize,
    /// Which block of the table is next, and which token of it.
    block: usize,
    token: usize,
}

impl<'a> Walk<'a> {
    /// From `position` on, which is a multiple of [`GROUP`].
    fn new(attend: &Attend<'a>, tile: &Tile, position: usize) -> Self {
        let (cache, layer) = (attend.cache, attend.layer);
        let tokens = cache.group.block_tokens;
        let table = attend.tables.table(tile.slot, attend.group);
        Self {
            table,
            instead: table[tile.first_position / tokens],
            page: cache.page(0, layer, tile.kv_head).cast_const(),
            block_bytes: cache.block_bytes,
            tokens,
            code_bytes: cache.code_bytes(layer),
            plane_bytes: cache.plane_bytes(layer),
            block: position / tokens,
            token: position % tokens,
        }
    }

    /// The next group. Past the end of the table, the last block again.
    #[inline(always)]
    fn group(&mut self) -> Place {
        let block = match self.table[self.block.min(self.table.len() - 1)] {
            HOLE => self.instead,
            block => block,
        };
        let page = self.page.wrapping_add(block as usize * self.block_bytes);
        let keys = page.wrapping_add(self.token * self.code_bytes);
        let scales = page.wrapping_add(2 * self.plane_bytes).cast::<u16>().wrapping_add(self.token);
        let place = Place {
            keys,
            values: keys.wrapping_add(self.plane_bytes),
            key_scales: scales,
            value_scales: scales.wrapping_add(self.tokens),
        };
        self.token += GROUP;
        if self.token == self.tokens {
            (self.block, self.token) = (self.block + 1, 0);
        }
        place
    }

    #[inline(always)]
    fn step(&mut self) -> [Place; GROUPS] {
        filled!([Place::NOWHERE; GROUPS], _j => self.group())
    }
}

/// What one step gave the rows of a pass.
struct Weights<const R: usize> {
    /// Of each key; exactly zero where the row does not attend to it.
    p: [[f32; STEP]; R],
    /// For what the row has accumulated so far.
    factor: [f32; R],
    /// Keys that the row attends to. Both ends ascend from row to row.
    valid: [Keys; R],
}

/// Keys of a step, counted from its first. None where `from` is not below `to`.
#[derive(Clone, Copy)]
struct Keys {
    from: usize,
    to: usize,
}

impl Keys {
    #[inline(always)]
    fn are_none(self) -> bool {
        self.from >= self.to
    }
}

/// How the keys and values of a format are read, with one instruction set.
trait Reader {
    type S: Simd;

    /// Dot products of the step's keys with the rows from `first`, unscaled; of keys that are masked, anything. Asks for keys
    /// [`AHEAD`] meanwhile.
    ///
    /// # Safety
    /// The contract of [`Attend::chunk`].
    unsafe fn scores<const R: usize>(chunk: &Chunk<'_>, step: &Step, first: usize, p: &mut [[f32; STEP]; R]);

    /// Adds the step's values to the accumulators of the rows from `first`, whose bits depend on the row alone. Rows without
    /// a key are left alone.
    ///
    /// # Safety
    /// The contract of [`Attend::chunk`].
    unsafe fn add_values<const R: usize>(chunk: &Chunk<'_>, step: &Step, first: usize, weights: &Weights<R>);
}

/// One chunk for one tile.
struct Chunk<'a> {
    attend: &'a Attend<'a>,
    tile: &'a Tile,
    /// As [`Attend::pack_queries`] leaves them.
    queries: *const f32,
    chunk: usize,
    result: Partial,
}

impl Chunk<'_> {
    /// Keys of the step that row `row` attends to.
    #[inline(always)]
    fn valid(&self, row: usize, base: usize) -> Keys {
        let position = self.tile.first_position + row / self.attend.shape.group();
        Keys {
            from: self.attend.window.first(position).saturating_sub(base).min(STEP),
            to: (position + 1).saturating_sub(base).min(STEP),
        }
    }

    /// `R` rows from `first` over one step.
    ///
    /// # Safety
    /// The contract of [`Attend::chunk`].
    #[inline(always)]
    unsafe fn rows<K: Reader, const R: usize>(&self, step: &Step, first: usize) {
        let mut weights =
            Weights { p: [[0f32; STEP]; R], factor: [1f32; R], valid: [Keys { from: 0, to: STEP }; R] };
        if !step.whole {
            weights.valid = filled!([Keys { from: 0, to: 0 }; R], r => self.valid(first + r, step.base));
        }
        // The last row is before the step, or its window of the first row behind it.
        if weights.valid[R - 1].to == 0 || weights.valid[0].from == STEP {
            return;
        }
        // SAFETY: the contract of this function; `p` is one step wide.
        unsafe {
            K::scores(self, step, first, &mut weights.p);
            for r in 0..R {
                let valid = weights.valid[r];
                if !valid.are_none() {
                    weights.factor[r] = self.softmax::<K::S>(&mut weights.p[r], valid, first + r);
                }
            }
            K::add_values(self, step, first, &weights);
        }
    }

    /// Scores of one row to weights; updates maximum and sum and gives the factor for the accumulator.
    ///
    /// # Safety
    /// The contract of [`Attend::chunk`].
    #[inline(always)]
    unsafe fn softmax<S: Simd>(&self, p: &mut [f32; STEP], Keys { from, to }: Keys, row: usize) -> f32 {
        let masked = S::splat(f32::NEG_INFINITY);
        let scale = S::splat(self.attend.scale);
        // SAFETY: `p` holds two vectors; the row is inside the partial.
        unsafe {
            let at = p.as_mut_ptr();
            let (mut low, mut high) = (S::mul(S::load(at), scale), S::mul(S::load(at.add(LANES)), scale));
            if let Some(cap) = self.attend.softcap {
                let cap = S::splat(cap);
                low = S::mul(cap, tanh::<S>(S::div(low, cap)));
                high = S::mul(cap, tanh::<S>(S::div(high, cap)));
            }
            if from > 0 || to < STEP {
                low = S::select_first(to, low, masked);
                high = S::select_first(to.saturating_sub(LANES), high, masked);
                low = S::select_first(from, masked, low);
                high = S::select_first(from.saturating_sub(LANES), masked, high);
            }
            let (max, sum) = (self.result.max.add(row), self.result.sum.add(row));
            let old = *max;
            let step_max = S::max_lane(S::max(low, high));
            let new = if old > step_max { old } else { step_max };
            // The exponential of zero is one; most steps find no new maximum.
            let factor = if old - new == 0.0 { 1.0 } else { exp_one::<S>(old - new) };
            let (low, high) = (exp::<S>(S::sub(low, S::splat(new))), exp::<S>(S::sub(high, S::splat(new))));
            S::store(at, low);
            S::store(at.add(LANES), high);
            *max = new;
            *sum = (*sum).mul_add(factor, S::sum(S::add(low, high)));
            factor
        }
    }

    /// The whole chunk.
    ///
    /// # Safety
    /// The contract of [`Attend::chunk`].
    #[inline(always)]
    unsafe fn run<K: Reader>(&self) {
        let rows = self.tile.tokens * self.attend.shape.group();
        let stride = self.attend.shape.stride();
        let start = self.chunk * CHUNK;
        let end = (start + CHUNK).min(self.tile.first_position + self.tile.tokens);
        // Steps before the window of the first row are before those of all.
        let window = self.attend.window;
        let first = start.max(window.first(self.tile.first_position) / STEP * STEP);
        let last_begins = window.first(self.tile.first_position + self.tile.tokens - 1);
        let mut walk = Walk::new(self.attend, self.tile, first);
        let mut coming = filled!([[Place::NOWHERE; GROUPS]; AHEAD], _i => walk.step());
        // SAFETY: the contract of this function.
        unsafe {
            for r in self.attend.rows_of(self.tile, self.chunk) {
                *self.result.max.add(r) = f32::NEG_INFINITY;
                *self.result.sum.add(r) = 0.0;
                for d in (0..stride).step_by(LANES) {
                    K::S::store(self.result.acc.add(r * stride + d), K::S::splat(0.0));
                }
            }
            for base in (first..end).step_by(STEP) {
                let whole = last_begins <= base && base + STEP <= self.tile.first_position + 1;
                let step = Step { base, whole, at: coming[0], next: walk.step() };
                coming.rotate_left(1);
                coming[AHEAD - 1] = step.next;
                for (first, count) in Attend::passes(rows) {
                    match count {
                        1 => self.rows::<K, 1>(&step, first),
                        2 => self.rows::<K, 2>(&step, first),
                        3 => self.rows::<K, 3>(&step, first),
                        4 => self.rows::<K, 4>(&step, first),
                        5 => self.rows::<K, 5>(&step, first),
                        _ => self.rows::<K, ROWS>(&step, first),
                    }
                }
            }
        }
    }
}

/// Scales of the 16 keys of groups `2 * j` and `2 * j + 1`.
///
/// # Safety
/// Both are readable for 8 scales.
#[inline(always)]
unsafe fn key_scales<S: Simd>(step: &Step, j: usize) -> S::V {
    // SAFETY: the contract of this function.
    unsafe { S::bf16_halves(step.at[2 * j].key_scales, step.at[2 * j + 1].key_scales) }
}

/// Weights of a row times the scales of its values; zero where a weight is zero, whatever the scale is.
///
/// # Safety
/// The scales of the step are readable.
#[inline(always)]
unsafe fn scaled_weights<S: Simd>(step: &Step, p: &[f32; STEP], times: f32) -> [S::V; 2] {
    let zero = S::splat(0.0);
    filled!([zero; 2], j => {
        // SAFETY: the contract of this function; `p` holds two vectors.
        let (scale, p) = unsafe {
            let (a, b) = (step.at[2 * j].value_scales, step.at[2 * j + 1].value_scales);
            (S::bf16_halves(a, b), S::load(p.as_ptr().add(j * LANES)))
        };
        S::select_lt(zero, p, S::mul(p, S::mul(scale, S::splat(times))), zero)
    })
}

/// Asks for the scales of a later step.
#[inline(always)]
fn prefetch_scales<S: Simd>(step: &Step) {
    for place in &step.next {
        S::prefetch(place.key_scales.cast());
        S::prefetch(place.value_scales.cast());
    }
}
