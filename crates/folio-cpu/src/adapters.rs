//! What adapters add to products: `B s(A x)` of the rows that have one, in f32 from the activations as they are.
//!
//! Owns: which rows are computed together, `h = s(A x)` before a product, and `B h` where its accumulators are put away. Must never: touch a
//! row without an adapter.
//!
//! Invariant (promise 1): a value of `h` is the sum of two chains, of the even and of the odd columns in ascending order, times its scale; a
//! value of the output takes the values of `h` in ascending order behind its bias. Neither depends on other rows, tiles or workers.

use std::ops::Range;
use std::sync::Arc;

use folio_model::adapter::{self, Adapter, AdapterSlice, LowRank};
use folio_model::backend::Batch;
use folio_model::program::MatrixId;
use half::{bf16, f16};

use crate::groups::Source;
use crate::linear::TILE_ROWS;
use crate::memory::Rows;
use crate::pool::Worker;
use crate::rows::InverseRms;
use crate::simd::{Isa, LANES, Simd, Task, dispatch, unrolled};
use crate::step::{RowPlace, Step};

const _: () = assert!(LANES == adapter::LANES);

/// Chains that a value of `h` is summed in: for a single row, that is as fast as A is read.
const CHAINS: usize = 2;
/// Rows that read A together, where that many accumulators fit the registers; a quarter of it elsewhere.
const TILE: usize = 8;
/// Columns that are normalized at a time.
const BLOCK: usize = 256;

const _: () = assert!(BLOCK.is_multiple_of(CHAINS));

/// Panels between the one that is added and the one whose B is fetched: those of the largest tile.
const AHEAD: usize = TILE_ROWS / LANES;
const CACHE_LINE: usize = 64;

/// Rows of a step that have an adapter, those of the same one side by side.
#[derive(Default)]
pub(crate) struct AdaptedRows {
    rows: Vec<u32>,
    /// Of `rows`: of one adapter each, at most [`TILE`].
    tiles: Vec<Range<usize>>,
}

impl AdaptedRows {
    /// For a batch whose rows' spans are `places`. O(rows log rows); nothing without adapters.
    pub(crate) fn find(&mut self, batch: &Batch, places: &[RowPlace]) {
        self.rows.clear();
        self.tiles.clear();
        if batch.adapters.iter().all(Option::is_none) {
            return;
        }
        let adapter =
            |row: &u32| batch.adapters[places[*row as usize].span as usize].as_ref().map(Arc::as_ptr);
        self.rows.extend((0..places.len() as u32).filter(|row| adapter(row).is_some()));
        self.rows.sort_unstable_by_key(|row| (adapter(row), *row));
        let mut first = 0;
        for same in self.rows.chunk_by(|a, b| adapter(a) == adapter(b)) {
            let end = first + same.len();
            self.tiles.extend((first..end).step_by(TILE).map(|start| start..end.min(start + TILE)));
            first = end;
        }
    }
}

/// What is added to one product.
#[derive(Clone, Copy)]
pub(crate) struct Deltas<'a> {
    matrix: MatrixId,
    adapters: &'a [Option<Arc<Adapter>>],
    places: &'a [RowPlace],
    /// `[rows, lanes]`
    h: Rows,
}

impl Deltas<'_> {
    #[inline(always)]
    fn of(&self, row: usize) -> Option<&LowRank> {
        self.adapters[self.places[row].span as usize].as_ref()?.of(self.matrix)
    }

    /// Whether the row before it has another adapter, or none.
    #[inline(always)]
    fn is_first(&self, row: usize) -> bool {
        let span = |row: usize| self.places[row].span as usize;
        let adapter = |span: usize| self.adapters[span].as_ref().map(Arc::as_ptr);
        row == 0 || (span(row - 1) != span(row) && adapter(span(row - 1)) != adapter(span(row)))
    }

    /// `v` and what is added to `count` values of row `row` of the product from output `first` on.
    ///
    /// # Safety
    /// `h` of the row is there, and nobody writes it.
    #[inline(always)]
    pub(crate) unsafe fn add<S: Simd>(&self, row: usize, first: usize, count: usize, v: S::V) -> S::V {
        let Some(low) = self.of(row) else { return v };
        if self.is_first(row) {
            let next = bytes(low.up(first / LANES + AHEAD).1);
            let mut line = next.start;
            while line < next.end {
                S::prefetch(line);
                line = line.wrapping_add(CACHE_LINE);
            }
        }
        let h = self.h.row(row).cast_const();
        if !first.is_multiple_of(LANES) {
            // SAFETY: the contract of this function.
            return unsafe { add_one_by_one::<S>(low, h, first, count, v) };
        }
        let (start, up) = low.up(first / LANES);
        let h = h.wrapping_add(start);
        // SAFETY: `h` has the values that the product's panels take.
        unsafe {
            match up {
                AdapterSlice::F32(up) => add_panel::<S, _>(h, up, v),
                AdapterSlice::F16(up) => add_panel::<S, _>(h, up, v),
                AdapterSlice::BF16(up) => add_panel::<S, _>(h, up, v),
            }
        }
    }
}

#[inline(always)]
fn bytes(of: AdapterSlice<'_>) -> Range<*const u8> {
    fn range<W>(of: &[W]) -> Range<*const u8> {
        let Range { start, end } = of.as_ptr_range();
        start.cast()..end.cast()
    }
    match of {
        AdapterSlice::F32(of) => range(of),
        AdapterSlice::F16(of) => range(of),
        AdapterSlice::BF16(of) => range(of),
    }
}

/// # Safety
/// `h` has a value for each 16 of `up`.
#[inline(always)]
unsafe fn add_panel<S: Simd, W: AdapterWeight>(h: *const f32, up: &[W], mut v: S::V) -> S::V {
    for (value, up) in up.chunks_exact(LANES).enumerate() {
        // SAFETY: the contract of this function; the chunk has 16 values.
        v = unsafe { S::fma(S::splat(*h.add(value)), W::load::<S>(up.as_ptr()), v) };
    }
    v
}

/// Rows that begin inside a panel: the same sums, value by value.
///
/// # Safety
/// `h` has the values that the product's panels take.
unsafe fn add_one_by_one<S: Simd>(low: &LowRank, h: *const f32, first: usize, count: usize, v: S::V) -> S::V {
    let mut values = [0f32; LANES];
    // SAFETY: the array has 16 values.
    unsafe { S::store(values.as_mut_ptr(), v) };
    for (lane, v) in values.iter_mut().enumerate().take(count) {
        let (start, up) = low.up((first + lane) / LANES);
        for value in 0..up.len() / LANES {
            // SAFETY: the contract of this function.
            let h = unsafe { *h.add(start + value) };
            *v = h.mul_add(up.get(value * LANES + (first + lane) % LANES), *v);
        }
    }
    // SAFETY: as above.
    unsafe { S::load(values.as_ptr()) }
}

impl<'a> Step<'a> {
    /// Computes a share of `h` of the rows that have an adapter for a product: all of it is there after a barrier. `None`: no row has.
    pub(crate) fn deltas(
        &self,
        worker: &Worker<'_>,
        source: &Source<'_>,
        matrix: MatrixId,
    ) -> Option<Deltas<'a>> {
        let AdaptedRows { rows, tiles } = self.adapted;
        let adapters = &self.batch.adapters;
        let h = self.buffers.adapted.view();
        let deltas = Deltas { matrix, adapters, places: self.places, h };
        let of = |tile: &Range<usize>| deltas.of(rows[tile.start] as usize);
        let chunks = tiles.iter().filter_map(of).map(LowRank::lanes).max()? / LANES;
        // Rows of one adapter after each other with the same sixteen rows of A.
        for item in worker.share(chunks * tiles.len(), 1) {
            let (chunk, tile) = (item / tiles.len(), &tiles[item % tiles.len()]);
            let Some(low) = of(tile).filter(|low| chunk * LANES < low.lanes()) else { continue };
            let isa = self.isa;
            let scales = &low.scales()[chunk * LANES..][..LANES];
            let place = DownPlace { isa, source, rows: &rows[tile.clone()], scales, h, chunk };
            match low.down(chunk) {
                AdapterSlice::F32(down) => dispatch(isa, Down { place, down }),
                AdapterSlice::F16(down) => dispatch(isa, Down { place, down }),
                AdapterSlice::BF16(down) => dispatch(isa, Down { place, down }),
            }
            for bias in low.biases().iter().filter(|bias| **bias / LANES == chunk) {
                for row in &rows[tile.clone()] {
                    // SAFETY: these values of `h` are this worker's.
                    unsafe { *h.row(*row as usize).add(*bias) = low.scales()[*bias] };
                }
            }
        }
        Some(deltas)
    }
}

/// A value of A or B.
trait AdapterWeight {
    /// Sixteen of them.
    ///
    /// # Safety
    /// They are there.
    unsafe fn load<S: Simd>(from: *const Self) -> S::V;
}

impl AdapterWeight for f32 {
    #[inline(always)]
    unsafe fn load<S: Simd>(from: *const Self) -> S::V {
        // SAFETY: the contract of this function.
        unsafe { S::load(from) }
    }
}

impl AdapterWeight for f16 {
    #[inline(always)]
    unsafe fn load<S: Simd>(from: *const Self) -> S::V {
        // SAFETY: the contract of this function; it is two bytes.
        unsafe { S::f16(from.cast()) }
    }
}

impl AdapterWeight for bf16 {
    #[inline(always)]
    unsafe fn load<S: Simd>(from: *const Self) -> S::V {
        // SAFETY: the contract of this function; it is two bytes.
        unsafe { S::bf16(from.cast()) }
    }
}

/// Sixteen values of `h` of rows with the same adapter.
#[derive(Clone, Copy)]
struct DownPlace<'a> {
    isa: Isa,
    source: &'a Source<'a>,
    rows: &'a [u32],
    /// `[16]`
    scales: &'a [f32],
    h: Rows,
    chunk: usize,
}

/// Computes them.
struct Down<'a, W> {
    place: DownPlace<'a>,
    /// `[cols, 16]`
    down: &'a [W],
}

impl<W: AdapterWeight> Down<'_, W> {
    /// # Safety
    /// The rows have `cols` values that nobody writes; nobody reads these values of `h`, or writes them.
    #[inline(always)]
    unsafe fn tile<S: Simd, const M: usize>(&self, rows: &[u32; M]) {
        let DownPlace { isa, source, scales, h, chunk, .. } = self.place;
        let cols = self.down.len() / LANES;
        let x = rows.map(|row| source.row(row as usize));
        let norm = source
            .norm
            .map(|(weight, eps)| (weight, x.map(|x| dispatch(isa, InverseRms { x, eps, width: cols }))));
        let mut sums = [[S::splat(0.0); M]; CHAINS];
        let mut normalized = [[0f32; BLOCK]; M];
        // SAFETY: the contract of this function; a norm's weight is padded to whole vectors.
        unsafe {
            for start in (0..cols).step_by(BLOCK) {
                let count = BLOCK.min(cols - start);
                let mut x = x.map(|x| x.add(start));
                if let Some((weight, inverses)) = norm {
                    for ((x, to), inverse) in x.iter_mut().zip(&mut normalized).zip(inverses) {
                        for at in (0..count).step_by(LANES) {
                            let value = S::load_part(x.add(at), (count - at).min(LANES));
                            let weight = S::load(weight.as_ptr().add(start + at));
                            S::store(
                                to.as_mut_ptr().add(at),
                                S::mul(S::mul(value, S::splat(inverse)), weight),
                            );
                        }
                        *x = to.as_ptr();
                    }
                }
                let mut down = self.down.as_ptr().add(start * LANES);
                for col in (0..count).step_by(CHAINS) {
                    for (chain, sums) in sums.iter_mut().enumerate().take(count - col) {
                        let a = W::load::<S>(down);
                        unrolled!(M, t, {
                            sums[t] = S::fma(S::splat(*x[t].add(col + chain)), a, sums[t]);
                        });
                        down = down.add(LANES);
                    }
                }
            }
            let scales = S::load(scales.as_ptr());
            let [even, odd] = sums;
            for ((even, odd), row) in even.into_iter().zip(odd).zip(rows) {
                let to = h.row(*row as usize).add(chunk * LANES);
                S::store(to, S::mul(S::add(even, odd), scales));
            }
        }
    }
}

impl<W: AdapterWeight> Task for Down<'_, W> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self) {
        let mut rows = self.place.rows;
        // SAFETY: who makes the task gives it these values of `h`.
        unsafe {
            if self.place.isa.is_wide() {
                while let Some((tile, rest)) = rows.split_first_chunk::<TILE>() {
                    self.tile::<S, TILE>(tile);
                    rows = rest;
                }
            }
            while let Some((tile, rest)) = rows.split_first_chunk::<{ TILE / 4 }>() {
                self.tile::<S, { TILE / 4 }>(tile);
                rows = rest;
            }
            for row in rows {
                self.tile::<S, 1>(&[*row]);
            }
        }
    }
}
