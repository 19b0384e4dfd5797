//! What adapters add to products: `B (A x)` of the rows that have one, in f32 from the activations as they are.
//!
//! Owns: `h = A x` before a product, and `B h` where its accumulators are put away. Must never: touch a row without an adapter.
//!
//! Invariant (promise 1): a value of `h` takes the columns in four chains, column by column, whose sums are added in pairs; a value of the
//! output takes the values of `h` in ascending order behind its bias. Neither depends on other rows, tiles or workers.

use std::sync::Arc;

use folio_model::adapter::{self, Adapter, LowRank};
use folio_model::program::MatrixId;

use crate::groups::Source;
use crate::memory::Rows;
use crate::pool::Worker;
use crate::rows::InverseRms;
use crate::simd::{LANES, Simd, Task, dispatch};
use crate::step::{RowPlace, Step};

const _: () = assert!(LANES == adapter::LANES);

/// Chains that a value of `h` is summed in.
const CHAINS: usize = 4;

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

    /// `v` and what is added to `count` values of row `row` of the product from output `first` on.
    ///
    /// # Safety
    /// `h` of the row is there, and nobody writes it.
    #[inline(always)]
    pub(crate) unsafe fn add<S: Simd>(&self, row: usize, first: usize, count: usize, v: S::V) -> S::V {
        let Some(low) = self.of(row) else { return v };
        let h = self.h.row(row).cast_const();
        // SAFETY: `h` has the values that the product's panels take; the arrays are as long as they say.
        unsafe {
            if first.is_multiple_of(LANES) {
                let (start, up) = low.up(first / LANES);
                let mut v = v;
                for (value, up) in up.chunks_exact(LANES).enumerate() {
                    v = S::fma(S::splat(*h.add(start + value)), S::load(up.as_ptr()), v);
                }
                return v;
            }
            // Rows that begin inside a panel: the same sums, value by value.
            let mut values = [0f32; LANES];
            S::store(values.as_mut_ptr(), v);
            for (lane, v) in values.iter_mut().enumerate().take(count) {
                let (start, up) = low.up((first + lane) / LANES);
                for (value, up) in up.chunks_exact(LANES).enumerate() {
                    *v = (*h.add(start + value)).mul_add(up[(first + lane) % LANES], *v);
                }
            }
            S::load(values.as_ptr())
        }
    }
}

impl<'a> Step<'a> {
    /// Computes `h` of the rows that have an adapter for a product, and waits for the other workers. `None`: no row has.
    pub(crate) fn deltas(
        &self,
        worker: &Worker<'_>,
        source: &Source<'_>,
        matrix: MatrixId,
    ) -> Option<Deltas<'a>> {
        let adapters = &self.batch.adapters;
        let products = adapters.iter().flatten().filter_map(|adapter| adapter.of(matrix));
        let chunks = products.map(LowRank::lanes).max()? / LANES;
        let h = self.buffers.adapted.view();
        let deltas = Deltas { matrix, adapters, places: self.places, h };
        for item in worker.share(self.rows() * chunks, 1) {
            let (row, chunk) = (item / chunks, item % chunks);
            let Some(low) = deltas.of(row).filter(|low| chunk * LANES < low.lanes()) else { continue };
            let (x, cols) = (source.row(row), low.cols());
            let norm = source.norm.map(|(weight, eps)| {
                (weight.as_ptr(), dispatch(self.isa, InverseRms { x, eps, width: cols }))
            });
            let out = h.row(row).wrapping_add(chunk * LANES);
            dispatch(self.isa, Down { x, norm, down: low.down(chunk), out });
            for one in low.ones().iter().filter(|one| **one / LANES == chunk) {
                // SAFETY: these values of `h` are this worker's.
                unsafe { *out.add(one % LANES) = 1.0 };
            }
        }
        worker.barrier();
        Some(deltas)
    }
}

/// Sixteen values of `h`.
struct Down<'a> {
    x: *const f32,
    /// The norm's weight, and what values are multiplied by before it.
    norm: Option<(*const f32, f32)>,
    /// `[cols, 16]`
    down: &'a [f32],
    out: *mut f32,
}

impl Task for Down<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self) {
        let cols = self.down.len() / LANES;
        let [mut a, mut b, mut c, mut d] = [S::splat(0.0); CHAINS];
        // SAFETY: who makes the task promises `cols` values of `x` and of the norm's weight, and 16 of `out`.
        unsafe {
            let term = |col: usize, sum: S::V| {
                let x = *self.x.add(col);
                let x = match self.norm {
                    Some((weight, inverse)) => x * inverse * *weight.add(col),
                    None => x,
                };
                S::fma(S::splat(x), S::load(self.down.as_ptr().add(col * LANES)), sum)
            };
            let whole = cols / CHAINS * CHAINS;
            for col in (0..whole).step_by(CHAINS) {
                a = term(col, a);
                b = term(col + 1, b);
                c = term(col + 2, c);
                d = term(col + 3, d);
            }
            for (col, chain) in (whole..cols).zip([&mut a, &mut b, &mut c]) {
                *chain = term(col, *chain);
            }
            S::store(self.out, S::add(S::add(a, b), S::add(c, d)));
        }
    }
}
