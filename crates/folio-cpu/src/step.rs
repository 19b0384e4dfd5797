//! One step: the program over a batch, as every worker runs it.
//!
//! Owns: which worker does what between two barriers. Must never: allocate, or check what `check` has checked.
//!
//! Invariant behind every `unsafe` here: between two barriers, a worker writes only the rows, heads, panels or pages that
//! `Worker::share` or a claim gave it, and nobody reads what another worker is writing. Each operation ends with a barrier.

use folio_model::backend::Batch;
use folio_model::program::{AttentionSpec, Buf, MatrixId, Op, Program, VectorId};

use crate::attend::{Attend, Window};
use crate::attention::{AttentionPlan, Shape};
use crate::groups::Groups;
use crate::kv::KvCache;
use crate::linear::Linear;
use crate::memory::{Floats, HugeBuffer, Rows};
use crate::packed::PackedMatrix;
use crate::pool::{Claims, Worker};
use crate::rows::{GatedMul, RmsNorm, Softcap, rotary_table, rotate};
use crate::simd::{Isa, dispatch};

/// Columns of one piece of an element-wise operation.
const PIECE: usize = 512;

/// Where a row stands.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct RowPlace {
    pub(crate) position: u32,
    /// Where [`Batch::blocks`] names the block of the first cache group that its K and V are written to; further groups'
    /// are `stride` entries apart.
    pub(crate) entry: u32,
    pub(crate) stride: u32,
    /// Token inside the block.
    pub(crate) slot: u32,
}

/// Memory of a loaded program, sized once.
pub(crate) struct Buffers {
    pub(crate) rows: Vec<Floats>,
    /// Cosines and sines of each row, one buffer per rotary table.
    pub(crate) rotary: Vec<Floats>,
    /// Activations as [`Groups::pack`] leaves them.
    pub(crate) packed: HugeBuffer,
    /// Normalized rows whose logits are wanted.
    pub(crate) selected: Floats,
    pub(crate) logits: Floats,
    pub(crate) partials: Floats,
    /// One row per worker.
    pub(crate) scratch: Vec<Floats>,
    /// Two per operation of the body, two for the head.
    pub(crate) claims: Vec<Claims>,
}

/// Everything a worker needs for one step.
pub(crate) struct Step<'a> {
    pub(crate) isa: Isa,
    pub(crate) program: &'a Program,
    pub(crate) matrices: &'a [PackedMatrix],
    /// Length, and values padded to whole vectors.
    pub(crate) vectors: &'a [(usize, Vec<f32>)],
    pub(crate) buffers: &'a Buffers,
    pub(crate) shape: Shape,
    pub(crate) caches: &'a [KvCache],
    /// One for each window.
    pub(crate) plans: &'a [AttentionPlan],
    pub(crate) places: &'a [RowPlace],
    pub(crate) batch: &'a Batch,
}

impl Step<'_> {
    /// The whole step. Every worker of the pool calls this once.
    pub(crate) fn run(&self, worker: &Worker<'_>) {
        self.prepare(worker);
        for (i, op) in self.program.body.iter().enumerate() {
            self.op(worker, op, &self.buffers.claims[2 * i..2 * i + 2]);
            worker.barrier();
        }
        if !self.batch.logit_rows.is_empty() {
            self.head(worker);
        }
    }

    fn rows(&self) -> usize {
        self.batch.tokens.len()
    }

    fn buf(&self, buf: Buf) -> Rows {
        self.buffers.rows[buf.0 as usize].view()
    }

    fn matrix(&self, id: MatrixId) -> &PackedMatrix {
        &self.matrices[id.0 as usize]
    }

    fn vector(&self, id: VectorId) -> &[f32] {
        &self.vectors[id.0 as usize].1
    }

    /// Block copies (split by layer, so that a chain of copies keeps its order) and rotary tables (split by row).
    fn prepare(&self, worker: &Worker<'_>) {
        for (group, cache) in self.caches.iter().enumerate() {
            for layer in worker.share(cache.group.layers(), 1) {
                for &copy in self.batch.copies.iter().filter(|copy| copy.group as usize == group) {
                    // SAFETY: `check` found the blocks in range and different; this worker owns the layer.
                    unsafe { cache.copy_layer(copy, layer as u32) };
                }
            }
        }
        for (rope, table) in self.program.ropes.iter().zip(&self.buffers.rotary) {
            let table = table.view();
            for row in worker.share(self.rows(), 1) {
                // SAFETY: the row is this worker's and `width` long.
                let out = unsafe { std::slice::from_raw_parts_mut(table.row(row), table.width) };
                rotary_table(self.places[row].position as usize, &rope.inv_freq, rope.scale, out);
            }
        }
        worker.barrier();
    }

    fn op(&self, worker: &Worker<'_>, op: &Op, claims: &[Claims]) {
        match *op {
            Op::Embed { table, out } => {
                let out = self.buf(out);
                for row in worker.share(self.rows(), 1) {
                    // SAFETY: the row is this worker's and `width` long.
                    let to = unsafe { std::slice::from_raw_parts_mut(out.row(row), out.width) };
                    self.matrix(table).lookup(self.batch.tokens[row] as usize, to);
                }
            }
            Op::RmsNorm { x, weight, eps, out } => {
                let (x, out) = (self.buf(x), self.buf(out));
                let weight = self.vector(weight).as_ptr();
                for row in worker.share(self.rows(), 1) {
                    let (x, width, out) = (x.row(row).cast_const(), x.width, out.row(row));
                    dispatch(self.isa, RmsNorm { x, weight, eps, width, out });
                }
            }
            Op::Linear { x, weight, bias, out, add } => {
                let bias = bias.map(|id| self.vector(id));
                let linear = LinearOp { x: self.buf(x), weight, bias, out: self.buf(out), add };
                self.linear(worker, linear, self.rows(), &claims[0]);
            }
            Op::WriteKv { qkv, spec } => self.write_kv(worker, self.buf(qkv), &self.program.attention[spec]),
            Op::Attention { qkv, spec, out } => {
                self.attention(worker, self.buf(qkv), &self.program.attention[spec], self.buf(out), claims);
            }
            Op::Scale { x, by } => {
                let x = self.buf(x);
                for row in worker.share(self.rows(), 1) {
                    // SAFETY: the row is this worker's and `width` long.
                    let row = unsafe { std::slice::from_raw_parts_mut(x.row(row), x.width) };
                    row.iter_mut().for_each(|value| *value *= by);
                }
            }
            Op::AddRmsNorm { x, weight, eps, out } => {
                let (x, out) = (self.buf(x), self.buf(out));
                let weight = self.vector(weight).as_ptr();
                for row in worker.share(self.rows(), 1) {
                    let (from, width) = (x.row(row), x.width);
                    dispatch(self.isa, RmsNorm { x: from, weight, eps, width, out: from });
                    // SAFETY: both rows are this worker's and `width` long, in buffers that differ.
                    unsafe {
                        let to = std::slice::from_raw_parts_mut(out.row(row), width);
                        let from = std::slice::from_raw_parts(from, width);
                        to.iter_mut().zip(from).for_each(|(sum, value)| *sum += value);
                    }
                }
            }
            Op::SiluMul { x, out } | Op::GeluMul { x, out } => {
                let gelu = matches!(op, Op::GeluMul { .. });
                let (x, out) = (self.buf(x), self.buf(out));
                let pieces = out.width.div_ceil(PIECE);
                for piece in worker.share(self.rows() * pieces, 1) {
                    let (row, col) = (piece / pieces, piece % pieces * PIECE);
                    let gate = x.row(row).wrapping_add(col).cast_const();
                    let count = PIECE.min(out.width - col);
                    let up = gate.wrapping_add(out.width);
                    dispatch(
                        self.isa,
                        GatedMul { gelu, gate, up, out: out.row(row).wrapping_add(col), count },
                    );
                }
            }
        }
    }

    fn linear(&self, worker: &Worker<'_>, op: LinearOp<'_>, tokens: usize, claims: &Claims) {
        let weight = self.matrix(op.weight);
        let groups = Groups::new(weight, self.isa, tokens);
        let x: *const u8 = if groups.packed_already() {
            op.x.row(0).cast_const().cast()
        } else {
            let to = self.buffers.packed.ptr();
            // SAFETY: the buffer is sized for the widest input and most rows; all workers are here, between two barriers.
            unsafe { groups.pack(self.isa, worker, op.x, to) };
            worker.barrier();
            to
        };
        let linear = Linear { isa: self.isa, weight, bias: op.bias, x, groups, out: op.out, add: op.add };
        let scratch = self.buffers.scratch[worker.index()].view().row(0);
        // SAFETY: packed with the same `isa`; widths were checked with the program; the scratch is this worker's.
        unsafe { linear.run(claims, scratch) };
    }

    /// Norm and rotation of q and k in place, then K and V to the cache, one head of one row at a time.
    fn write_kv(&self, worker: &Worker<'_>, qkv: Rows, spec: &AttentionSpec) {
        let heads = spec.heads + spec.kv_heads;
        let dim = spec.head_dim;
        for item in worker.share(self.rows() * heads, 1) {
            let (row, head) = (item / heads, item % heads);
            let start = qkv.row(row).wrapping_add(head * dim);
            let is_key = head >= spec.heads;
            if let Some(norm) = if is_key { spec.k_norm } else { spec.q_norm } {
                let weight = self.vector(norm).as_ptr();
                dispatch(self.isa, RmsNorm { x: start, weight, eps: spec.norm_eps, width: dim, out: start });
            }
            // SAFETY: the head is this worker's; K heads follow Q heads, V heads follow K heads in the row.
            let (k, v) = unsafe {
                let v = start.wrapping_add(spec.kv_heads * dim);
                let v = if is_key { v } else { start };
                (std::slice::from_raw_parts_mut(start, dim), v)
            };
            if let Some(rope) = spec.rope {
                let table = self.buffers.rotary[rope.0 as usize].view();
                // SAFETY: written in `prepare`, a barrier ago.
                rotate(k, unsafe { std::slice::from_raw_parts(table.row(row), table.width) });
            }
            if is_key {
                let RowPlace { entry, stride, slot, .. } = self.places[row];
                let block = self.batch.blocks[(entry + spec.group * stride) as usize];
                // SAFETY: `check` found every written block to belong to one row range of one sequence, so this position is
                // this worker's; the V head of the row is read only.
                unsafe {
                    let v = std::slice::from_raw_parts(v, dim);
                    self.caches[spec.group as usize].write(
                        block,
                        spec.layer,
                        head - spec.heads,
                        slot as usize,
                        k,
                        v,
                    );
                }
            }
        }
    }

    fn attention(&self, worker: &Worker<'_>, qkv: Rows, spec: &AttentionSpec, out: Rows, claims: &[Claims]) {
        let window = Window::of(spec.window);
        let Some(plan) = self.plans.iter().find(|plan| plan.window == window) else {
            unreachable!("a plan is made for every window of the program")
        };
        let attend = Attend {
            isa: self.isa,
            shape: self.shape,
            scale: spec.scale,
            softcap: spec.softcap,
            window,
            sinks: spec.sinks.map(|id| self.vector(id)),
            cache: &self.caches[spec.group as usize],
            group: spec.group as usize,
            layer: spec.layer,
            blocks: &self.batch.blocks,
            qkv,
            out,
            partials: self.buffers.partials.view().row(0),
        };
        let scratch = self.buffers.scratch[worker.index()].view().row(0);
        while let Some(mut range) = claims[0].next(plan.items.len(), 1) {
            let item = &plan.items[range.next().unwrap_or_default()];
            // SAFETY: the plan was made from the checked batch; the claim gives the item to this worker.
            unsafe { attend.item(item, scratch) };
        }
        if plan.merges.is_empty() {
            return;
        }
        worker.barrier();
        while let Some(mut range) = claims[1].next(plan.merges.len(), 1) {
            // SAFETY: all items are done since the barrier; the claim gives the tile to this worker.
            unsafe { attend.merge_tile(&plan.merges[range.next().unwrap_or_default()]) };
        }
    }

    /// Norm and logits of the rows that want them.
    fn head(&self, worker: &Worker<'_>) {
        let head = &self.program.head;
        let (x, selected) = (self.buf(head.x), self.buffers.selected.view());
        let wanted = &self.batch.logit_rows;
        let weight = self.vector(head.norm).as_ptr();
        for i in worker.share(wanted.len(), 1) {
            let from = x.row(wanted[i] as usize).cast_const();
            dispatch(
                self.isa,
                RmsNorm { x: from, weight, eps: head.eps, width: x.width, out: selected.row(i) },
            );
        }
        worker.barrier();
        let out = self.buffers.logits.view();
        let linear = LinearOp { x: selected, weight: head.matrix, bias: None, out, add: false };
        self.linear(worker, linear, wanted.len(), &self.buffers.claims[2 * self.program.body.len()]);
        if let Some(cap) = head.softcap {
            worker.barrier();
            for i in worker.share(wanted.len(), 1) {
                dispatch(self.isa, Softcap { cap, x: out.row(i), count: head.vocab });
            }
        }
    }
}

struct LinearOp<'a> {
    x: Rows,
    weight: MatrixId,
    bias: Option<&'a [f32]>,
    out: Rows,
    add: bool,
}
