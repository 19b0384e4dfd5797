//! What goes with latent attention: products of each head, and what is written to the cache.
//!
//! Owns: how workers share them. Must never: let the number of rows touch a bit: a product of each head is a product like any other
//! (`linear`).

use folio_model::program::{LatentSpec, MatrixId};

use crate::ahead::Ahead;
use crate::attend::{Attend, Window};
use crate::attention::Shape;
use crate::groups::{Groups, Source};
use crate::kv::Half;
use crate::linear::{BLOCK_ROWS, Linear, TILE_ROWS, Then};
use crate::memory::Rows;
use crate::packed::PackedMatrix;
use crate::pool::{Claims, Split, Worker};
use crate::rows::{RmsNorm, rotate};
use crate::simd::{Isa, dispatch};
use crate::step::{RowPlace, Step};

/// Where packed activations of a head start, in bytes.
const ALIGNED: usize = 64;

/// Bytes that the packed activations of all heads take, for steps of at most `max_rows` rows.
pub(crate) fn packed_bytes(weight: &PackedMatrix, isa: Isa, max_rows: usize, heads: usize) -> usize {
    let of_head = |rows: usize| Groups::new(weight, isa, rows).bytes().next_multiple_of(ALIGNED);
    heads * (0..=max_rows).map(of_head).max().unwrap_or(0)
}

impl Step<'_> {
    /// [`Op::HeadLinear`](folio_model::program::Op::HeadLinear). Every worker calls this, with claims that start over.
    pub(crate) fn head_linear(
        &self,
        worker: &Worker<'_>,
        (x, out): (Rows, Rows),
        weight: MatrixId,
        heads: usize,
        claims: &Claims,
    ) {
        let weight = self.matrix(weight);
        let groups = Groups::new(weight, self.isa, self.rows());
        let (cols, each) = (weight.cols, weight.rows / heads);
        let source = |head: usize| {
            let rows = x.columns(head * (x.width / heads), cols);
            Source { rows, picked: None, norm: None }
        };
        let scratch = self.buffers.scratch[worker.index()].view();
        let packed = self.buffers.packed.ptr();
        let stride = groups.bytes().next_multiple_of(ALIGNED);
        let as_is = groups.packed_already(&source(0));
        let alone = !as_is && groups.packed_alone(scratch.width * 4);
        if !as_is && !alone {
            for head in 0..heads {
                // SAFETY: the buffer is sized for all heads of most rows (`packed_bytes`); every worker is here, between two barriers,
                // with a share of its own.
                unsafe {
                    groups.pack(self.isa, worker.split(), &source(head), packed.wrapping_add(head * stride));
                }
            }
            worker.barrier();
        }
        let prepare = |head: usize| {
            let source = source(head);
            let x = if as_is {
                source.row(0).cast()
            } else if alone {
                let to = scratch.row(0).cast();
                // SAFETY: it fits the scratch, which is this worker's and which a product of one group leaves alone.
                unsafe { groups.pack(self.isa, Split::WHOLE, &source, to) };
                to.cast_const()
            } else {
                packed.wrapping_add(head * stride).cast_const()
            };
            let out = out.columns(head * (out.width / heads), each);
            Linear {
                isa: self.isa,
                ahead: Ahead::here(),
                weight,
                bias: None,
                x,
                groups,
                out,
                then: Then::Store,
                deltas: None,
            }
        };
        // Tiles of each head, cut at heads.
        let tiles = each.div_ceil(TILE_ROWS);
        let mut current = None;
        while let Some(claim) =
            claims.next_shrinking(heads * tiles, 1..BLOCK_ROWS / TILE_ROWS, worker.count())
        {
            for (head, range) in crate::experts::pieces(claim, tiles) {
                let linear = match current {
                    Some((of, linear)) if of == head => linear,
                    _ => prepare(head),
                };
                current = Some((head, linear));
                let first = head * each;
                let rows = first + range.start * TILE_ROWS..first + (range.end * TILE_ROWS).min(each);
                // SAFETY: packed with the same `isa`; sizes were checked with the program; the scratch is this worker's; the claim
                // gives it these outputs of every row.
                unsafe { linear.outputs(rows, first, scratch.row(0)) };
            }
        }
    }

    /// [`Op::WriteLatent`](folio_model::program::Op::WriteLatent).
    pub(crate) fn write_latent(
        &self,
        worker: &Worker<'_>,
        [q, latent, queries]: [Rows; 3],
        spec: &LatentSpec,
    ) {
        let table = self.buffers.rotary[spec.rope.0 as usize].view();
        // The latent of a row is one more head.
        for unit in worker.share(self.rows() * (spec.heads + 1), 1) {
            let (row, head) = (unit / (spec.heads + 1), unit % (spec.heads + 1));
            // SAFETY: written in `prepare`, a barrier ago.
            let table = unsafe { std::slice::from_raw_parts(table.row(row).cast_const(), table.width) };
            if head < spec.heads {
                let from = q.row(row).wrapping_add(head * spec.query_dim() + spec.nope_dim);
                let to = queries.row(row).wrapping_add(head * spec.key_dim() + spec.rank);
                // SAFETY: these values of both are the last ones of a head that is this worker's.
                unsafe {
                    std::ptr::copy_nonoverlapping(from.cast_const(), to, spec.rope_dim);
                    turn(spec, std::slice::from_raw_parts_mut(to, spec.rope_dim), table);
                }
                continue;
            }
            let start = latent.row(row);
            let (weight, width) = (self.vector(spec.norm).as_ptr(), spec.rank);
            dispatch(self.isa, RmsNorm { x: start, weight, eps: spec.norm_eps, width, out: start });
            let RowPlace { position, slot, .. } = self.places[row];
            let cache = &self.caches[spec.group as usize];
            let tokens = cache.group.block_tokens as u32;
            let block = self.tables.table(slot, spec.group as usize)[(position / tokens) as usize];
            // SAFETY: the row is this worker's. `check` found every written block to belong to one row range of one sequence, so this
            // position is, too.
            unsafe {
                let values = std::slice::from_raw_parts_mut(start, spec.key_dim());
                turn(spec, &mut values[spec.rank..], table);
                cache.write(Half::Value, block, spec.layer, 0, (position % tokens) as usize, values);
            }
        }
    }

    /// [`Op::LatentAttention`](folio_model::program::Op::LatentAttention).
    pub(crate) fn latent_attention(
        &self,
        worker: &Worker<'_>,
        (queries, out): (Rows, Rows),
        spec: &LatentSpec,
        claims: &[Claims],
    ) {
        let attend = Attend {
            isa: self.isa,
            shape: Shape::of_latents(spec, worker.count(), self.max_position),
            scale: spec.scale,
            softcap: None,
            window: Window::of(None, false),
            sinks: None,
            cache: &self.caches[spec.group as usize],
            group: spec.group as usize,
            layer: spec.layer,
            tables: self.tables,
            qkv: queries,
            out,
            partials: self.buffers.partials.view().row(0),
        };
        self.attend(worker, &attend, claims);
    }
}

/// Rotates what is rotated of a query or a key; pairs stay where they are.
fn turn(spec: &LatentSpec, values: &mut [f32], table: &[f32]) {
    if !spec.neighbours {
        return rotate(values, table);
    }
    let (cos, sin) = table.split_at(table.len() / 2);
    for ((pair, cos), sin) in values.as_chunks_mut::<2>().0.iter_mut().zip(cos).zip(sin) {
        let [a, b] = *pair;
        *pair = [a * cos - b * sin, b * cos + a * sin];
    }
}
