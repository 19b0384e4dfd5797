//! The plainest possible backend: the meaning of a [`Program`], written as loops.
//!
//! Owns: nothing but correctness. It is the oracle for every real backend and for the parity tests against transformers,
//! and a dependable stand-in where a test needs a model. Must never: be optimized, or share code with a backend it
//! judges. Row buffers are f32, as the contract says; every sum is taken in f64, so that its rounding is far below
//! theirs. Each row is computed by itself, hence bit-identical in any batch. Cost: thousands of times slower than it
//! need be.

mod cache;
mod checks;
mod experts;
mod latent;
mod recurrent;

use std::collections::BTreeMap;

use cache::Cache;

use crate::adapter::LANES;
use crate::backend::{Backend, BackendError, Batch, DType, KvLayout, Span, TensorView};
use crate::program::{Activation, AttentionSpec, Buf, EmbeddingInput, MatrixId, Op, Program, Rope, VectorId};
use crate::quant::Encoding;

type Result<T> = std::result::Result<T, BackendError>;

/// See the module's description.
#[derive(Default)]
pub struct ReferenceBackend {
    matrices: Vec<Matrix>,
    vectors: Vec<Vec<f32>>,
    program: Program,
    limits: Limits,
    /// One per cache group.
    caches: Vec<Cache>,
    /// Block tables by slot and group.
    tables: BTreeMap<(u32, usize), Vec<u32>>,
    /// One per [`Program::buffers`], `[rows, width]`.
    buffers: Vec<Vec<f32>>,
    logits: Vec<f32>,
    /// By row of the batch.
    hidden: BTreeMap<u32, Vec<f32>>,
}

#[derive(Clone, Copy, Default)]
struct Limits {
    rows: usize,
    logit_rows: usize,
    position: usize,
}

struct Matrix {
    rows: usize,
    cols: usize,
    data: Vec<f32>,
}

impl Matrix {
    fn row(&self, row: usize) -> &[f32] {
        &self.data[row * self.cols..(row + 1) * self.cols]
    }
}

impl ReferenceBackend {
    pub fn new() -> Self {
        Self::default()
    }

    fn vector(&self, id: VectorId) -> &[f32] {
        &self.vectors[id.0 as usize]
    }

    fn matrix(&self, id: MatrixId) -> &Matrix {
        &self.matrices[id.0 as usize]
    }

    fn run(&mut self, op: &Op, batch: &Batch) -> Result<()> {
        match *op {
            Op::Embed { table, out } => {
                let width = self.program.buffers[out.0 as usize];
                let mut rows = Vec::with_capacity(batch.tokens.len() * width);
                for token in &batch.tokens {
                    rows.extend_from_slice(self.matrix(table).row(*token as usize));
                }
                self.buffers[out.0 as usize] = rows;
            }
            Op::Merge { out } => {
                let width = self.program.buffers[out.0 as usize];
                let out = &mut self.buffers[out.0 as usize];
                for given in &batch.embeddings {
                    let [row, rows, first] = [given.first_row, given.rows, given.first].map(|at| at as usize);
                    let values = &given.values[first * width..(first + rows) * width];
                    out[row * width..(row + rows) * width].copy_from_slice(values);
                }
            }
            Op::RmsNorm { x, weight, eps, out } => {
                let weight = self.vector(weight);
                let rows = self.buffers[x.0 as usize]
                    .chunks(weight.len())
                    .flat_map(|row| rms_norm(row, weight, eps));
                self.buffers[out.0 as usize] = rows.collect();
            }
            Op::Linear { x, weight, bias, out, add } => {
                let matrix = self.matrix(weight);
                let bias = bias.map(|bias| self.vector(bias));
                let product: Vec<f32> = self.buffers[x.0 as usize]
                    .chunks(matrix.cols)
                    .enumerate()
                    .flat_map(|(at, row)| adapted(batch, at, weight, row, linear(matrix, bias, row)))
                    .collect();
                let out = &mut self.buffers[out.0 as usize];
                if add {
                    out.iter_mut().zip(product).for_each(|(sum, value)| *sum += value);
                } else {
                    *out = product;
                }
            }
            Op::Scale { x, by } => self.buffers[x.0 as usize].iter_mut().for_each(|value| *value *= by),
            Op::Copy { x, out } => self.buffers[out.0 as usize] = self.buffers[x.0 as usize].clone(),
            Op::Place { x, out, first } => {
                let x = self.buffers[x.0 as usize].clone();
                let (width, all) = (x.len() / batch.tokens.len(), self.program.buffers[out.0 as usize]);
                let out = &mut self.buffers[out.0 as usize];
                out.resize(batch.tokens.len() * all, 0.0);
                let rows = out.chunks_mut(all).zip(x.chunks(width));
                rows.for_each(|(out, x)| out[first..first + width].copy_from_slice(x));
            }
            Op::Input { out } => self.buffers[out.0 as usize].clone_from(&batch.features),
            Op::AddRmsNorm { x, weight, eps, out, times } => {
                let (weight, times) = (self.vector(weight), times.map_or(1.0, |times| self.vector(times)[0]));
                let rows = self.buffers[x.0 as usize].chunks(weight.len());
                let normed: Vec<f32> = rows.flat_map(|row| rms_norm(row, weight, eps)).collect();
                let out = self.buffers[out.0 as usize].iter_mut();
                out.zip(normed).for_each(|(sum, value)| *sum = (*sum + value) * times);
            }
            Op::Add { x, out } => {
                let x = self.buffers[x.0 as usize].clone();
                self.buffers[out.0 as usize].iter_mut().zip(x).for_each(|(sum, value)| *sum += value);
            }
            Op::Gate { x, by, first, activation } => {
                let by = self.buffers[by.0 as usize].clone();
                let (width, all) = (self.program.buffers[x.0 as usize], by.len() / batch.tokens.len());
                let rows = self.buffers[x.0 as usize].chunks_mut(width).zip(by.chunks(all));
                for (row, by) in rows {
                    let by = &by[first..first + width];
                    row.iter_mut().zip(by).for_each(|(value, by)| *value = gated(activation, *value, *by));
                }
            }
            Op::GatedLinear { x, weight, bias, activation, out } => {
                let matrix = self.matrix(weight);
                let bias = bias.map(|bias| self.vector(bias));
                let rows =
                    self.buffers[x.0 as usize].chunks(matrix.cols).enumerate().flat_map(|(at, row)| {
                        let both = adapted(batch, at, weight, row, linear(matrix, bias, row));
                        // Without a gate a value gates itself.
                        let (gate, up) = match activation.inputs() {
                            1 => (&both[..], &both[..]),
                            _ => both.split_at(matrix.rows / 2),
                        };
                        gate.iter()
                            .zip(up)
                            .map(|(gate, up)| gated(activation, *gate, *up))
                            .collect::<Vec<_>>()
                    });
                self.buffers[out.0 as usize] = rows.collect();
            }
            Op::Experts { x, logits, spec, out, add } => {
                let sums = self.experts(x, logits, &self.program.experts[spec]);
                let out = &mut self.buffers[out.0 as usize];
                if add {
                    out.iter_mut().zip(sums).for_each(|(sum, value)| *sum += value);
                } else {
                    *out = sums;
                }
            }
            Op::Convolve { x, spec } => self.convolve(x.0 as usize, spec, batch)?,
            Op::DeltaRule { qkv, gates, spec, out } => {
                self.delta_rule([qkv, gates, out].map(|buf| buf.0 as usize), spec, batch)?;
            }
            Op::GatedRmsNorm { x, gate, weight, eps } => {
                self.gated_rms_norm(x.0 as usize, gate.0 as usize, weight, eps);
            }
            Op::SigmoidGate { x, gate } => {
                let [x, gate] = [x, gate].map(|buf| buf.0 as usize);
                let each = self.program.buffers[x] / self.program.buffers[gate];
                self.sigmoid_gate(x, gate, each);
            }
            Op::StateSpace { xbc, steps, spec, out } => {
                self.state_space([xbc, steps, out].map(|buf| buf.0 as usize), spec, batch)?;
            }
            Op::SiluGate { x, gate } => {
                let gate = self.buffers[gate.0 as usize].clone();
                let x = &mut self.buffers[x.0 as usize];
                x.iter_mut()
                    .zip(gate)
                    .for_each(|(x, gate)| *x = (silu(f64::from(gate)) * f64::from(*x)) as f32);
            }
            Op::Multiply { x, by } => {
                let by = self.buffers[by.0 as usize].clone();
                self.buffers[x.0 as usize].iter_mut().zip(by).for_each(|(x, by)| *x *= by);
            }
            Op::TopGate { x, logits, out } => {
                let (width, count) =
                    (self.program.buffers[x.0 as usize], self.program.buffers[logits.0 as usize]);
                let rows = self.buffers[x.0 as usize].chunks(width);
                let rows = rows.zip(self.buffers[logits.0 as usize].chunks(count));
                let gated = rows.flat_map(|(row, logits)| {
                    let top = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
                    let by = 1.0 / (1.0 + (-f64::from(top)).exp());
                    row.iter().map(move |value| (f64::from(*value) * by) as f32)
                });
                self.buffers[out.0 as usize] = gated.collect();
            }
            Op::Center { x, out } => {
                let width = self.program.buffers[x.0 as usize];
                let rows = self.buffers[x.0 as usize].chunks(width).flat_map(|row| {
                    let mean = row.iter().map(|value| f64::from(*value)).sum::<f64>() / width as f64;
                    row.iter().map(move |value| (f64::from(*value) - mean) as f32)
                });
                self.buffers[out.0 as usize] = rows.collect();
            }
            Op::NormPart { x, first, weight, eps, parts } => {
                let (weight, width) = (self.vector(weight).to_vec(), self.program.buffers[x.0 as usize]);
                for row in self.buffers[x.0 as usize].chunks_mut(width) {
                    let (row, each) = (&mut row[first..first + weight.len()], weight.len() / parts);
                    for (part, weight) in row.chunks_mut(each).zip(weight.chunks(each)) {
                        part.copy_from_slice(&rms_norm(part, weight, eps));
                    }
                }
            }
            Op::XIelu { x, weight } => {
                let weight = self.vector(weight).to_vec();
                self.buffers[x.0 as usize].iter_mut().for_each(|value| *value = xielu(*value, &weight));
            }
            Op::HeadLinear { x, weight, heads, out } => {
                self.head_linear(x.0 as usize, weight, heads, out.0 as usize);
            }
            Op::WriteLatent { q, latent, spec, queries } => {
                self.write_latent([q, latent, queries].map(|buf| buf.0 as usize), spec, batch)?;
            }
            Op::LatentAttention { queries, spec, out } => {
                self.latent_attention(queries.0 as usize, spec, out.0 as usize, batch)?;
            }
            Op::WriteKv { qkv, spec } => self.write_kv(qkv.0 as usize, spec, batch)?,
            Op::Attention { qkv, spec, out } => {
                self.attention(qkv.0 as usize, spec, out.0 as usize, batch)?
            }
        }
        Ok(())
    }

    fn write_kv(&mut self, qkv: usize, spec: usize, batch: &Batch) -> Result<()> {
        let spec = self.program.attention[spec].clone();
        let rope = spec.rope.map(|rope| self.program.ropes[rope.0 as usize].clone());
        let norms = [spec.q_norm, spec.k_norm, spec.v_norm];
        let [q_norm, k_norm, v_norm] = norms.map(|norm| norm.map(|norm| self.vector(norm).to_vec()));
        let width = self.program.buffers[qkv];
        let group = spec.group as usize;
        let cache = self.caches.get_mut(group).ok_or_else(checks::no_cache)?;
        for span in &batch.spans {
            for (row, position) in rows_of(span) {
                let values = &mut self.buffers[qkv][row * width..(row + 1) * width];
                let (q, kv) = values.split_at_mut(spec.heads * spec.head_dim);
                let (k, v) = match spec.own_kv {
                    true => kv.split_at_mut(spec.kv_heads * spec.head_dim),
                    false => (kv, Default::default()),
                };
                if let Some(norm) = &v_norm {
                    for head in v.chunks_mut(spec.head_dim) {
                        head.copy_from_slice(&rms_norm(head, norm, spec.norm_eps));
                    }
                }
                for (heads, norm) in [(q, &q_norm), (k, &k_norm)] {
                    for head in heads.chunks_mut(spec.head_dim) {
                        let normalize = |head: &mut [f32]| {
                            if let Some(norm) = norm {
                                head.copy_from_slice(&rms_norm(head, norm, spec.norm_eps));
                            }
                        };
                        if !spec.norm_last {
                            normalize(head);
                        }
                        if let Some(rope) = &rope {
                            rotate(head, rope, batch.axes(row as u32, position as u32));
                        }
                        if spec.norm_last {
                            normalize(head);
                        }
                    }
                }
                if let Some(temper) = spec.temper {
                    let q = &mut values[..spec.heads * spec.head_dim];
                    q.iter_mut().for_each(|value| *value *= temper.at(position));
                }
                if !spec.own_kv {
                    continue;
                }
                let (k, v) = values[spec.heads * spec.head_dim..].split_at(spec.kv_heads * spec.head_dim);
                let block = self.tables[&(span.slot, group)][position / cache.block_tokens] as usize;
                cache.write(spec.layer as usize, block, position % cache.block_tokens, k, v);
            }
        }
        Ok(())
    }

    fn attention(&mut self, qkv: usize, spec: usize, out: usize, batch: &Batch) -> Result<()> {
        let spec = &self.program.attention[spec];
        let width = self.program.buffers[qkv];
        let group = spec.group as usize;
        let cache = self.caches.get(group).ok_or_else(checks::no_cache)?;
        let mut attended = vec![0.0; batch.tokens.len() * spec.heads * spec.head_dim];
        let mut heads = attended.chunks_mut(spec.head_dim);
        for span in &batch.spans {
            for (row, position) in rows_of(span) {
                let q = &self.buffers[qkv][row * width..row * width + spec.heads * spec.head_dim];
                for (head, q) in q.chunks(spec.head_dim).enumerate() {
                    let sink = spec.sinks.map(|sinks| self.vector(sinks)[head]);
                    let table = &self.tables[&(span.slot, group)];
                    let block_of = |position: usize| table[position / cache.block_tokens] as usize;
                    let result = attend(cache, spec, head, q, position, sink, block_of);
                    // Rows and heads come in the order of `attended`: spans cover the rows in order.
                    if let Some(slot) = heads.next() {
                        slot.copy_from_slice(&result);
                    }
                }
            }
        }
        self.buffers[out] = attended;
        Ok(())
    }

    fn head(&mut self, batch: &Batch) {
        let head = &self.program.head;
        let norm = self.vector(head.norm);
        let matrix = self.matrix(head.matrix);
        let x = &self.buffers[head.x.0 as usize];
        let logits = batch.logit_rows.iter().flat_map(|row| {
            let row = *row as usize * norm.len();
            let mut logits = linear(matrix, None, &rms_norm(&x[row..row + norm.len()], norm, head.eps));
            if let Some(cap) = head.softcap {
                logits.iter_mut().for_each(|logit| *logit = softcap(f64::from(*logit), cap) as f32);
            }
            logits
        });
        let logits = logits.collect();
        let hidden = batch.hidden_rows.iter().map(|row| {
            let start = *row as usize * norm.len();
            (*row, rms_norm(&x[start..start + norm.len()], norm, head.eps))
        });
        let hidden = hidden.collect();
        (self.logits, self.hidden) = (logits, hidden);
    }
}

impl Backend for ReferenceBackend {
    fn name(&self) -> String {
        "reference".to_owned()
    }

    fn serves_adapters(&self) -> bool {
        true
    }

    /// Of no use beyond this process: its sums may change at any time.
    fn numerics(&self) -> String {
        self.name()
    }

    fn load_matrix(&mut self, name: &str, parts: &[TensorView<'_>]) -> Result<MatrixId> {
        let (rows, cols) = checks::matrix_shape(name, parts)?;
        let data = parts.iter().flat_map(|part| in_order(part, decode(part))).collect();
        self.matrices.push(Matrix { rows, cols, data });
        Ok(MatrixId(self.matrices.len() as u32 - 1))
    }

    fn load_vector(&mut self, name: &str, parts: &[TensorView<'_>]) -> Result<VectorId> {
        checks::no_order(name, parts)?;
        self.vectors.push(parts.iter().flat_map(|part| decode(part)).collect());
        Ok(VectorId(self.vectors.len() as u32 - 1))
    }

    fn load_program(
        &mut self,
        program: Program,
        max_rows: usize,
        max_logit_rows: usize,
        max_position: usize,
    ) -> Result<()> {
        self.buffers = vec![Vec::new(); program.buffers.len()];
        self.limits = Limits { rows: max_rows, logit_rows: max_logit_rows, position: max_position };
        self.program = program;
        self.check_program()
    }

    fn allocate_cache(&mut self, layout: &KvLayout, blocks: &[usize]) -> Result<()> {
        checks::layout(layout, blocks, &self.program)?;
        let groups = layout.groups.iter().zip(blocks);
        self.caches = groups.map(|(group, blocks)| Cache::new(group.clone(), *blocks)).collect();
        self.tables.clear();
        Ok(())
    }

    fn forward(&mut self, batch: &Batch) -> Result<&[f32]> {
        self.edit_tables(batch)?;
        self.check_batch(batch)?;
        for copy in &batch.copies {
            self.caches[copy.group as usize].copy(copy);
        }
        let body = std::mem::take(&mut self.program.body);
        let result = body.iter().try_for_each(|op| self.run(op, batch));
        self.program.body = body;
        result?;
        self.head(batch);
        Ok(&self.logits)
    }

    fn embedding_input(&self) -> Option<EmbeddingInput> {
        self.program.embedding_input()
    }

    fn hidden(&self, row: u32) -> &[f32] {
        self.hidden.get(&row).map_or(&[], Vec::as_slice)
    }

    fn features(&self, row: u32) -> &[f32] {
        let Some(Buf(buffer)) = self.program.features else { return &[] };
        let width = self.program.buffers[buffer as usize];
        self.buffers[buffer as usize].get(row as usize * width..).map_or(&[], |rows| &rows[..width])
    }

    fn weight_bytes(&self) -> u64 {
        let matrices: usize = self.matrices.iter().map(|matrix| matrix.data.len()).sum();
        let vectors: usize = self.vectors.iter().map(Vec::len).sum();
        4 * (matrices + vectors) as u64
    }
}

/// A product with a matrix, and what the row's adapter adds to it.
fn adapted(batch: &Batch, row: usize, weight: MatrixId, x: &[f32], mut product: Vec<f32>) -> Vec<f32> {
    let spans = batch.spans.iter().zip(&batch.adapters);
    let span =
        spans.clone().find(|(span, _)| (span.first_row..span.first_row + span.rows).contains(&(row as u32)));
    let Some(low) = span.and_then(|(_, adapter)| adapter.as_ref()?.of(weight)) else { return product };
    let mut h: Vec<f64> = vec![0.0; low.lanes()];
    for (chunk, h) in h.chunks_mut(LANES).enumerate() {
        let down = low.down(chunk);
        for (col, x) in x.iter().enumerate() {
            let a = |lane| f64::from(down.get(col * LANES + lane));
            h.iter_mut().enumerate().for_each(|(lane, h)| *h += f64::from(*x) * a(lane));
        }
    }
    low.biases().iter().for_each(|bias| h[*bias] = 1.0);
    h.iter_mut().zip(low.scales()).for_each(|(h, scale)| *h *= f64::from(*scale));
    for (panel, out) in product.chunks_mut(LANES).enumerate() {
        let (first, up) = low.up(panel);
        for (lane, out) in out.iter_mut().enumerate() {
            let values = 0..up.len() / LANES;
            let sum: f64 = values.map(|at| f64::from(up.get(at * LANES + lane)) * h[first + at]).sum();
            *out += sum as f32;
        }
    }
    product
}

/// `(row in the batch, absolute position)` of a span.
fn rows_of(span: &Span) -> impl Iterator<Item = (usize, usize)> {
    let (row, position) = (span.first_row as usize, span.first_position as usize);
    (0..span.rows as usize).map(move |i| (row + i, position + i))
}

fn decode(part: &TensorView<'_>) -> Vec<f32> {
    let bytes = part.bytes;
    let dtype = match part.encoding {
        Encoding::Plain(dtype) => dtype,
        Encoding::Block(format) => {
            let mut values = vec![0.0; bytes.len() / format.bytes() * format.values()];
            format.decode(bytes, &mut values);
            return values;
        }
    };
    match dtype {
        DType::F32 => bytes.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect(),
        DType::F16 => {
            bytes.as_chunks().0.iter().map(|bytes| half::f16::from_le_bytes(*bytes).to_f32()).collect()
        }
        DType::BF16 => {
            bytes.as_chunks().0.iter().map(|bytes| half::bf16::from_le_bytes(*bytes).to_f32()).collect()
        }
    }
}

/// Columns where the model has them.
fn in_order(part: &TensorView<'_>, stored: Vec<f32>) -> Vec<f32> {
    let Some(order) = part.order else { return stored };
    let mut values = vec![0.0; stored.len()];
    for (values, stored) in values.chunks_mut(order.len()).zip(stored.chunks(order.len())) {
        for (column, value) in order.iter().zip(stored) {
            values[*column as usize] = *value;
        }
    }
    values
}

/// `weight` is `[alpha_p, alpha_n, beta, eps]`.
fn xielu(x: f32, weight: &[f32]) -> f32 {
    let [alpha_p, alpha_n, beta, eps] = [0, 1, 2, 3].map(|i| f64::from(weight[i]));
    let softplus = |x: f64| x.max(0.0) + (-x.abs()).exp().ln_1p();
    let x = f64::from(x);
    let curved = match x > 0.0 {
        true => softplus(alpha_p) * x * x,
        false => (beta + softplus(alpha_n)) * (x.min(eps).exp_m1() - x),
    };
    (curved + beta * x) as f32
}

fn dot(a: &[f32], b: &[f32]) -> f64 {
    a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum()
}

fn linear(matrix: &Matrix, bias: Option<&[f32]>, x: &[f32]) -> Vec<f32> {
    (0..matrix.rows)
        .map(|row| (dot(matrix.row(row), x) + bias.map_or(0.0, |bias| f64::from(bias[row]))) as f32)
        .collect()
}

fn rms_norm(x: &[f32], weight: &[f32], eps: f32) -> Vec<f32> {
    let inverse = (dot(x, x) / x.len() as f64 + f64::from(eps)).sqrt().recip();
    x.iter().zip(weight).map(|(x, weight)| (f64::from(*x) * inverse * f64::from(*weight)) as f32).collect()
}

fn gated(activation: Activation, gate: f32, up: f32) -> f32 {
    let (gate, up) = (f64::from(gate), f64::from(up));
    match activation {
        Activation::Silu => (silu(gate) * up) as f32,
        Activation::GeluTanh => {
            let inner = (2.0 / std::f64::consts::PI).sqrt() * (gate + 0.044_715 * gate.powi(3));
            (0.5 * gate * (1.0 + inner.tanh()) * up) as f32
        }
        Activation::SwigluOai { alpha, limit } => {
            let (alpha, limit) = (f64::from(alpha), f64::from(limit));
            let (gate, up) = (gate.min(limit), up.clamp(-limit, limit));
            (gate / (1.0 + (-alpha * gate).exp()) * (up + 1.0)) as f32
        }
        Activation::ReluSquared => (gate.max(0.0) * up) as f32,
    }
}

fn silu(x: f64) -> f64 {
    x / (1.0 + (-x).exp())
}

fn rotate(head: &mut [f32], rope: &Rope, positions: [u32; 3]) {
    let half = rope.inv_freq.len();
    for i in 0..half {
        let position = positions[rope.axes.get(i).map_or(0, |axis| usize::from(*axis))];
        let (sin, cos) = (f64::from(position) * f64::from(rope.inv_freq[i])).sin_cos();
        let (sin, cos) = (sin * f64::from(rope.scale), cos * f64::from(rope.scale));
        let (a, b) = (f64::from(head[i]), f64::from(head[i + half]));
        head[i] = (a * cos - b * sin) as f32;
        head[i + half] = (b * cos + a * sin) as f32;
    }
}

fn softcap(x: f64, cap: f32) -> f64 {
    f64::from(cap) * (x / f64::from(cap)).tanh()
}

/// One query head over the cached positions of its window, and its sink.
fn attend(
    cache: &Cache,
    spec: &AttentionSpec,
    head: usize,
    q: &[f32],
    position: usize,
    sink: Option<f32>,
    block_of: impl Fn(usize) -> usize,
) -> Vec<f32> {
    let (layer, kv_head) = (spec.layer as usize, head / (spec.heads / spec.kv_heads));
    let tokens = cache.block_tokens;
    let at = |position: usize| (layer, block_of(position), position % tokens, kv_head);
    let first = spec.first_position(position);
    let score = |position: usize| {
        let score = dot(q, cache.key(at(position))) * f64::from(spec.scale);
        spec.softcap.map_or(score, |cap| softcap(score, cap))
    };
    let scores: Vec<f64> = (first..=position).map(score).collect();
    let sink = sink.map_or(f64::NEG_INFINITY, f64::from);
    let max = scores.iter().copied().fold(sink, f64::max);
    let (mut sum, mut out) = ((sink - max).exp(), vec![0.0f64; spec.head_dim]);
    for (position, score) in (first..).zip(&scores) {
        let weight = (score - max).exp();
        sum += weight;
        for (out, value) in out.iter_mut().zip(cache.value(at(position))) {
            *out += weight * f64::from(*value);
        }
    }
    out.into_iter().map(|value| (value / sum) as f32).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_put_where_the_model_has_them() {
        let mut backend = ReferenceBackend::new();
        let bytes: Vec<u8> = (0..6).flat_map(|i| (i as f32).to_le_bytes()).collect();
        let view =
            |shape, order| TensorView { encoding: Encoding::Plain(DType::F32), shape, bytes: &bytes, order };
        let id = backend.load_matrix("a", &[view(&[2, 3], Some(&[2, 0, 1]))]).unwrap();
        assert_eq!(backend.matrix(id).row(0), [1.0, 2.0, 0.0]);
        assert_eq!(backend.matrix(id).row(1), [4.0, 5.0, 3.0]);
        for order in [&[0, 1][..], &[0, 1, 1], &[0, 1, 3], &[0, 1, 2, 2]] {
            assert!(backend.load_matrix("b", &[view(&[2, 3], Some(order))]).is_err(), "{order:?}");
        }
        let mixed = [view(&[2, 3], Some(&[2, 0, 1])), view(&[2, 3], None)];
        assert!(backend.load_matrix("c", &mixed).is_err());
        assert!(backend.load_vector("d", &[view(&[6], Some(&[0]))]).is_err());
    }
}
