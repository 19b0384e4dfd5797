//! One step: the program over a batch, as every worker runs it.
//!
//! Owns: which worker does what between two barriers. Must never: allocate, or check what `check` has checked.
//!
//! Invariant behind every `unsafe` here: between two barriers, a worker writes only the rows, heads, panels or pages that
//! `Worker::share` or a claim gave it, and nobody reads what another worker is writing. Each stage ends with a barrier.

use std::ops::Range;

use folio_model::backend::Batch;
use folio_model::program::{Activation, AttentionSpec, Buf, MatrixId, Op, Program, VectorId};
use folio_model::tables::BlockTables;

use crate::adapters::{AdaptedRows, Deltas};
use crate::ahead::Ahead;
use crate::attend::{Attend, Window};
use crate::attention::{AttentionPlan, Shape};
use crate::experts::{ExpertBuffers, Mixture};
use crate::groups::{Groups, Source};
use crate::kv::{Half, KvPages};
use crate::linear::{Linear, Share, TILE_ROWS, Then, rows_of_heads};
use crate::memory::{Floats, HugeBuffer, Rows};
use crate::packed::PackedMatrix;
use crate::pool::{Claims, Split, Worker};
use crate::rows::{Center, Gate, Multiply, NormPart, RmsNorm, Softcap, TopGate, XIelu, rotary_table, rotate};
use crate::simd::{Isa, dispatch};
use crate::stages::{Product, Stage};

/// Where a row stands.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct RowPlace {
    pub(crate) position: u32,
    /// The same for its rotation.
    pub(crate) axes: [u32; 3],
    /// Of its sequence's block tables.
    pub(crate) slot: u32,
    pub(crate) span: u32,
}

/// Memory of a loaded program, sized once.
pub(crate) struct Buffers {
    /// In `memory`, one over the other where they are not needed at the same time.
    pub(crate) rows: Vec<Rows>,
    /// There too. Rows touch each other.
    pub(crate) logits: Rows,
    #[allow(dead_code, reason = "what `rows` point into")]
    pub(crate) memory: Floats,
    /// Cosines and sines of each row, one buffer per rotary table.
    pub(crate) rotary: Vec<Floats>,
    /// Activations as [`Groups::pack`] leaves them.
    pub(crate) packed: HugeBuffer,
    pub(crate) partials: Floats,
    /// One row per worker.
    pub(crate) scratch: Vec<Floats>,
    pub(crate) experts: ExpertBuffers,
    /// What adapters make of each row before a product: as wide as the widest so far.
    pub(crate) adapted: Floats,
    /// Two per stage, two for the head.
    pub(crate) claims: Vec<Claims>,
}

/// Everything a worker needs for one step.
pub(crate) struct Step<'a> {
    pub(crate) isa: Isa,
    pub(crate) program: &'a Program,
    pub(crate) stages: &'a [Stage],
    pub(crate) matrices: &'a [PackedMatrix],
    /// Length, and values padded to whole vectors.
    pub(crate) vectors: &'a [(usize, Vec<f32>)],
    pub(crate) buffers: &'a Buffers,
    pub(crate) max_position: usize,
    pub(crate) caches: &'a [KvPages],
    pub(crate) tables: &'a BlockTables,
    /// One for each window and shape of heads.
    pub(crate) plans: &'a [AttentionPlan],
    pub(crate) places: &'a [RowPlace],
    pub(crate) adapted: &'a AdaptedRows,
    pub(crate) batch: &'a Batch,
}

impl Step<'_> {
    /// The whole step. Every worker of the pool calls this once.
    pub(crate) fn run(&self, worker: &Worker<'_>) {
        self.prepare(worker);
        // The first operation looks up embeddings and needs nothing of that.
        if !matches!(self.stages.first(), Some(Stage::Op(Op::Embed { .. }))) {
            worker.barrier();
        }
        for (i, stage) in self.stages.iter().enumerate() {
            if self.batch.embeddings.is_empty() && matches!(stage, Stage::Op(Op::Merge { .. })) {
                continue;
            }
            let claims = &self.buffers.claims[2 * i..2 * i + 2];
            match stage {
                Stage::Op(op) => self.op(worker, op, claims),
                Stage::Product(product) => self.product(worker, product, &claims[0]),
            }
            worker.barrier();
        }
        if !self.batch.logit_rows.is_empty() {
            self.head(worker);
        }
        if !self.batch.hidden_rows.is_empty() {
            self.hidden(worker);
        }
    }

    /// The final norm, in place, of the rows whose hidden state is wanted. Nothing needs their old values any more.
    fn hidden(&self, worker: &Worker<'_>) {
        if !self.batch.logit_rows.is_empty() {
            worker.barrier();
        }
        let head = &self.program.head;
        let (x, weight) = (self.buf(head.x), self.vector(head.norm).as_ptr());
        for at in worker.share(self.batch.hidden_rows.len(), 1) {
            let (row, width, eps) = (x.row(self.batch.hidden_rows[at] as usize), x.width, head.eps);
            dispatch(self.isa, RmsNorm { x: row, weight, eps, width, out: row });
        }
    }

    pub(crate) fn rows(&self) -> usize {
        self.batch.tokens.len()
    }

    fn buf(&self, buf: Buf) -> Rows {
        self.buffers.rows[buf.0 as usize]
    }

    pub(crate) fn matrix(&self, id: MatrixId) -> &PackedMatrix {
        &self.matrices[id.0 as usize]
    }

    pub(crate) fn vector(&self, id: VectorId) -> &[f32] {
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
                rotary_table(self.places[row].axes, rope, out);
            }
        }
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
            Op::Merge { out } => {
                let out = self.buf(out);
                for given in &self.batch.embeddings {
                    for at in worker.share(given.rows as usize, 1) {
                        let from = (given.first as usize + at) * out.width;
                        // SAFETY: the row is this worker's and `width` long.
                        let to = unsafe {
                            let row = out.row(given.first_row as usize + at);
                            std::slice::from_raw_parts_mut(row, out.width)
                        };
                        to.copy_from_slice(&given.values[from..from + out.width]);
                    }
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
            Op::Linear { .. } | Op::GatedLinear { .. } => unreachable!("products are stages of their own"),
            Op::WriteKv { qkv, spec } => self.write_kv(worker, self.buf(qkv), &self.program.attention[spec]),
            Op::Attention { qkv, spec, out } => {
                self.attention(worker, self.buf(qkv), &self.program.attention[spec], self.buf(out), claims);
            }
            Op::Experts { x, logits, spec, out, add } => {
                let spec = &self.program.experts[spec];
                let [x, logits, out] = [x, logits, out].map(|buf| self.buf(buf));
                self.experts(worker, Mixture { spec, x, logits, out, add }, claims);
            }
            Op::Copy { x, out } => {
                let (x, out) = (self.buf(x), self.buf(out));
                for row in worker.share(self.rows(), 1) {
                    // SAFETY: both rows are this worker's and `width` long, in buffers that differ.
                    unsafe { std::ptr::copy_nonoverlapping(x.row(row).cast_const(), out.row(row), x.width) };
                }
            }
            Op::Place { x, out, first } => {
                let (x, out) = (self.buf(x), self.buf(out));
                for row in worker.share(self.rows(), 1) {
                    // SAFETY: both rows are this worker's, in buffers that differ, and that of `out` ends no earlier.
                    unsafe {
                        let to = out.row(row).add(first);
                        std::ptr::copy_nonoverlapping(x.row(row).cast_const(), to, x.width);
                    }
                }
            }
            Op::Input { out } => {
                let out = self.buf(out);
                for row in worker.share(self.rows(), 1) {
                    // SAFETY: the row is this worker's and `width` long.
                    let to = unsafe { std::slice::from_raw_parts_mut(out.row(row), out.width) };
                    to.copy_from_slice(&self.batch.features[row * out.width..][..out.width]);
                }
            }
            Op::Convolve { x, spec } => {
                self.convolve(worker, self.buf(x), &self.program.convolutions[spec]);
            }
            Op::DeltaRule { qkv, gates, spec, out } => {
                let rows = [qkv, gates, out].map(|buf| self.buf(buf));
                self.delta_rule(worker, rows, &self.program.delta[spec], &claims[0]);
            }
            Op::GatedRmsNorm { x, gate, weight, eps } => {
                self.gated_rms_norm(worker, self.buf(x), self.buf(gate), weight, eps);
            }
            Op::SigmoidGate { x, gate } => self.sigmoid_gate(worker, self.buf(x), self.buf(gate)),
            Op::Multiply { x, by } => {
                let (x, by) = (self.buf(x), self.buf(by));
                for row in worker.share(self.rows(), 1) {
                    dispatch(self.isa, Multiply { x: x.row(row), by: by.row(row), width: x.width });
                }
            }
            Op::Center { x, out } => {
                let (x, out) = (self.buf(x), self.buf(out));
                for row in worker.share(self.rows(), 1) {
                    dispatch(self.isa, Center { x: x.row(row), width: x.width, out: out.row(row) });
                }
            }
            Op::NormPart { x, first, weight, eps, parts } => {
                let (x, width) = (self.buf(x), self.vectors[weight.0 as usize].0 / parts);
                let weight = self.vector(weight);
                for unit in worker.share(self.rows() * parts, 1) {
                    let (row, at) = (unit / parts, unit % parts * width);
                    let part = x.row(row).wrapping_add(first + at);
                    dispatch(self.isa, NormPart { x: part, weight: &weight[at..at + width], eps });
                }
            }
            Op::TopGate { x, logits, out } => {
                let (x, logits, out) = (self.buf(x), self.buf(logits), self.buf(out));
                for row in worker.share(self.rows(), 1) {
                    let task = TopGate {
                        x: x.row(row),
                        width: x.width,
                        logits: logits.row(row),
                        count: logits.width,
                        out: out.row(row),
                    };
                    dispatch(self.isa, task);
                }
            }
            Op::StateSpace { xbc, steps, spec, out } => {
                let rows = [xbc, steps, out].map(|buf| self.buf(buf));
                self.state_space(rows, &self.program.state_spaces[spec], &claims[0]);
            }
            Op::SiluGate { x, gate } => {
                let (x, gate) = (self.buf(x), self.buf(gate));
                for row in worker.share(self.rows(), 1) {
                    let (activation, up) = (Activation::Silu, x.row(row));
                    dispatch(self.isa, Gate { activation, gate: gate.row(row), up, out: up, width: x.width });
                }
            }
            Op::XIelu { x, weight } => {
                let (x, curve) = (self.buf(x), XIelu::curve(self.vector(weight)));
                for row in worker.share(self.rows(), 1) {
                    dispatch(self.isa, XIelu { curve, x: x.row(row), width: x.width });
                }
            }
            Op::HeadLinear { x, weight, heads, out } => {
                self.head_linear(worker, (self.buf(x), self.buf(out)), weight, heads, &claims[0]);
            }
            Op::WriteLatent { q, latent, spec, queries } => {
                let rows = [q, latent, queries].map(|buf| self.buf(buf));
                self.write_latent(worker, rows, &self.program.latent[spec]);
            }
            Op::LatentAttention { queries, spec, out } => {
                let rows = (self.buf(queries), self.buf(out));
                self.latent_attention(worker, rows, &self.program.latent[spec], claims);
            }
            Op::Scale { x, by } => {
                let x = self.buf(x);
                for row in worker.share(self.rows(), 1) {
                    // SAFETY: the row is this worker's and `width` long.
                    let row = unsafe { std::slice::from_raw_parts_mut(x.row(row), x.width) };
                    row.iter_mut().for_each(|value| *value *= by);
                }
            }
            Op::AddRmsNorm { x, weight, eps, out, times } => {
                let (x, out) = (self.buf(x), self.buf(out));
                let weight = self.vector(weight).as_ptr();
                let times = times.map(|times| self.vector(times)[0]);
                for row in worker.share(self.rows(), 1) {
                    let (from, width) = (x.row(row), x.width);
                    dispatch(self.isa, RmsNorm { x: from, weight, eps, width, out: from });
                    // SAFETY: both rows are this worker's and `width` long, in buffers that differ.
                    unsafe {
                        let to = std::slice::from_raw_parts_mut(out.row(row), width);
                        let from = std::slice::from_raw_parts(from, width);
                        to.iter_mut().zip(from).for_each(|(sum, value)| *sum += value);
                        if let Some(times) = times {
                            to.iter_mut().for_each(|sum| *sum *= times);
                        }
                    }
                }
            }
            Op::Add { x, out } => {
                let (x, out) = (self.buf(x), self.buf(out));
                for row in worker.share(self.rows(), 1) {
                    // SAFETY: both rows are this worker's and `width` long, in buffers that differ.
                    let (to, from) = unsafe {
                        let from = std::slice::from_raw_parts(x.row(row).cast_const(), x.width);
                        (std::slice::from_raw_parts_mut(out.row(row), x.width), from)
                    };
                    to.iter_mut().zip(from).for_each(|(sum, value)| *sum += value);
                }
            }
            Op::Gate { x, by, first, activation } => {
                let (x, by) = (self.buf(x), self.buf(by));
                for row in worker.share(self.rows(), 1) {
                    let (gate, up) = (x.row(row), by.row(row).wrapping_add(first));
                    dispatch(self.isa, Gate { activation, gate, up, out: gate, width: x.width });
                }
            }
        }
    }

    fn product(&self, worker: &Worker<'_>, product: &Product, claims: &Claims) {
        let Product { x, norm, weight, bias, then, out, heads } = *product;
        let norm = norm.map(|(weight, eps)| (self.vector(weight), eps));
        let source = Source { rows: self.buf(x), picked: None, norm };
        let bias = bias.map(|id| self.vector(id));
        let out = self.buf(out);
        let deltas = self.deltas(worker, &source, weight);
        let linear = LinearOp { source, weight, bias, out, then, deltas: deltas.as_ref() };
        let heads = heads.map(|spec| &self.program.attention[spec]);
        let unit = heads.and_then(|spec| rows_of_heads(spec.head_dim)).unwrap_or(TILE_ROWS);
        self.linear(worker, linear, self.rows(), Share { claims, workers: worker.count(), unit }, |rows| {
            let Some(spec) = heads else { return };
            let heads = rows.start / spec.head_dim..rows.end / spec.head_dim;
            for row in 0..self.rows() {
                heads.clone().for_each(|head| self.finish_head(out, spec, row, head));
            }
        });
    }

    /// The product, and `done` with the rows that this worker computed.
    fn linear(
        &self,
        worker: &Worker<'_>,
        op: LinearOp<'_>,
        tokens: usize,
        share: Share<'_>,
        done: impl FnMut(Range<usize>),
    ) {
        let LinearOp { source, weight, bias, out, then, deltas } = op;
        let weight = self.matrix(weight);
        let groups = Groups::new(weight, self.isa, tokens);
        let scratch = self.buffers.scratch[worker.index()].view();
        // What the others compute of the deltas is there behind a barrier.
        let wait = || deltas.iter().for_each(|_| worker.barrier());
        let x = if groups.packed_already(&source) {
            wait();
            source.row(0).cast()
        } else if groups.packed_alone(scratch.width * 4) {
            wait();
            let to = scratch.row(0).cast();
            // SAFETY: it fits the scratch, which is this worker's and which a product of one group leaves alone.
            unsafe { groups.pack(self.isa, Split::WHOLE, &source, to) };
            to.cast_const()
        } else {
            let to = self.buffers.packed.ptr();
            // SAFETY: the buffer is sized for every product and most rows; all workers are here, between two barriers.
            unsafe { groups.pack(self.isa, worker.split(), &source, to) };
            worker.barrier();
            to.cast_const()
        };
        let linear =
            Linear { isa: self.isa, ahead: Ahead::here(), weight, bias, x, groups, out, then, deltas };
        // SAFETY: packed with the same `isa`; widths were checked with the program; the scratch is this worker's.
        unsafe { linear.run(share, scratch.row(0), done) };
    }

    fn write_kv(&self, worker: &Worker<'_>, qkv: Rows, spec: &AttentionSpec) {
        let heads = spec.row_heads();
        for item in worker.share(self.rows() * heads, 1) {
            self.finish_head(qkv, spec, item / heads, item % heads);
        }
    }

    /// Norm and, of q or k, rotation of one head in place, then K or V to the cache. Heads of q come first in the row, then those
    /// of k, then those of v, if they are the layer's own. The caller owns the head.
    fn finish_head(&self, qkv: Rows, spec: &AttentionSpec, row: usize, head: usize) {
        let dim = spec.head_dim;
        let start = qkv.row(row).wrapping_add(head * dim);
        // SAFETY: the head is the caller's.
        let values = unsafe { std::slice::from_raw_parts_mut(start, dim) };
        let (keys, is_value) = (spec.heads..spec.heads + spec.kv_heads, head >= spec.heads + spec.kv_heads);
        let norm = match is_value {
            true => spec.v_norm,
            false if keys.contains(&head) => spec.k_norm,
            false => spec.q_norm,
        };
        let normalize = |now: bool| {
            if let Some(norm) = norm.filter(|_| now) {
                let weight = self.vector(norm).as_ptr();
                let norm = RmsNorm { x: start, weight, eps: spec.norm_eps, width: dim, out: start };
                dispatch(self.isa, norm);
            }
        };
        if is_value {
            normalize(true);
        } else {
            normalize(!spec.norm_last);
            if let Some(rope) = spec.rope {
                let table = self.buffers.rotary[rope.0 as usize].view();
                // SAFETY: written in `prepare`, a barrier ago.
                rotate(values, unsafe { std::slice::from_raw_parts(table.row(row), table.width) });
            }
            normalize(spec.norm_last);
        }
        if head < spec.heads {
            if let Some(temper) = spec.temper {
                let by = temper.at(self.places[row].position as usize);
                values.iter_mut().for_each(|value| *value *= by);
            }
            return;
        }
        let RowPlace { position, slot, .. } = self.places[row];
        let half = if is_value { Half::Value } else { Half::Key };
        let cache = &self.caches[spec.group as usize];
        let tokens = cache.group.block_tokens as u32;
        let block = self.tables.table(slot, spec.group as usize)[(position / tokens) as usize];
        let at = (head - spec.heads) % spec.kv_heads;
        // SAFETY: `check` found every written block to belong to one row range of one sequence, so this head of this position is
        // the caller's.
        unsafe { cache.write(half, block, spec.layer, at, (position % tokens) as usize, values) };
    }

    fn attention(&self, worker: &Worker<'_>, qkv: Rows, spec: &AttentionSpec, out: Rows, claims: &[Claims]) {
        let window = Window::of(spec.window, spec.chunked);
        let attend = Attend {
            isa: self.isa,
            shape: Shape::of(spec, worker.count(), self.max_position),
            scale: spec.scale,
            softcap: spec.softcap,
            window,
            sinks: spec.sinks.map(|id| self.vector(id)),
            cache: &self.caches[spec.group as usize],
            group: spec.group as usize,
            layer: spec.layer,
            tables: self.tables,
            qkv,
            out,
            partials: self.buffers.partials.view().row(0),
        };
        self.attend(worker, &attend, claims);
    }

    /// All items of the plan for its window, and what is left to merge.
    pub(crate) fn attend(&self, worker: &Worker<'_>, attend: &Attend<'_>, claims: &[Claims]) {
        let fits = |plan: &&AttentionPlan| plan.window == attend.window && plan.shape == attend.shape;
        let Some(plan) = self.plans.iter().find(fits) else {
            unreachable!("a plan is made for every window and shape of heads of the program")
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
        let picked = &self.batch.logit_rows;
        let norm = Some((self.vector(head.norm), head.eps));
        let source = Source { rows: self.buf(head.x), picked: Some(picked), norm };
        let out = self.buffers.logits;
        let linear =
            LinearOp { source, weight: head.matrix, bias: None, out, then: Then::Store, deltas: None };
        let claims = &self.buffers.claims[2 * self.stages.len()];
        let share = Share { claims, workers: worker.count(), unit: TILE_ROWS };
        self.linear(worker, linear, picked.len(), share, |_| ());
        if let Some(cap) = head.softcap {
            worker.barrier();
            for i in worker.share(picked.len(), 1) {
                dispatch(self.isa, Softcap { cap, x: out.row(i), count: head.vocab });
            }
        }
    }
}

struct LinearOp<'a> {
    source: Source<'a>,
    weight: MatrixId,
    bias: Option<&'a [f32]>,
    out: Rows,
    then: Then,
    deltas: Option<&'a Deltas<'a>>,
}
