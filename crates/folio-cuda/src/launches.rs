//! A program as launches.
//!
//! Owns: the memory of a loaded program ([`Model`]) and the order of launches ([`Launches`]). Must never: allocate while launching, or
//! look at a batch: all it knows of a step are bounds, so that what it does can be captured.

use folio_model::backend::{BackendError, Batch};
use folio_model::program::{Activation, AttentionSpec, Buf, MatrixId, Op, Program, VectorId};

use crate::attention::CHUNK;
use crate::attention::{self, Attention, AttentionPlan, TileBounds};
use crate::backend::{Vector, failed};
use crate::driver::{DevicePtr, Driver, DriverError};
use crate::experts::{self, Mixture};
use crate::kv::{self, KvPool, KvWrite, Queries, RopeOnDevice};
use crate::linear::{self, DeviceMatrix, Output, Scratch};
use crate::planes::{Meta, Planes, RowBound, word};
use crate::rows::{self, Listed, Norm};
use crate::rows_plan::{self, Needs};
use crate::step::Bounds;

type Result<T> = std::result::Result<T, DriverError>;

/// Most bytes of partial results; where more were needed, fewer tiles are split.
const PARTIALS_MAX: u64 = 512 << 20;

/// A loaded program and its memory on the device.
pub(crate) struct Model {
    pub(crate) program: Program,
    /// Tokens whose rows one warp has room for in every layer.
    pub(crate) narrow_tile: u32,
    pub(crate) max_rows: usize,
    pub(crate) max_logit_rows: usize,
    pub(crate) max_position: usize,
    /// Tokens there are.
    pub(crate) vocabulary: usize,
    /// Values that a row is given beside its token.
    pub(crate) input_width: usize,
    /// One per buffer of the program.
    buffers: Vec<Planes>,
    /// `[gate | up]` of the widest gated product.
    gate_up: Option<DevicePtr>,
    /// Workspace of the largest mixture of experts.
    mixture: DevicePtr,
    /// Of products by a library.
    scratch: Scratch,
    ropes: Vec<RopeOnDevice>,
    queries: Queries,
    /// Partial results of attention.
    partials: DevicePtr,
    partials_bytes: u64,
    /// Rows whose logits are wanted, after the last norm.
    normed: Planes,
    /// Rows whose hidden state is wanted, after the last norm.
    pub(crate) hidden: Planes,
    /// `[max_logit_rows, vocab]`
    pub(crate) logits: DevicePtr,
    /// Bytes of all of these.
    pub(crate) bytes: u64,
}

impl Model {
    /// `program` was checked against `matrices`; `limits` are rows, rows of logits and positions.
    pub(crate) fn new(
        driver: &mut dyn Driver,
        program: Program,
        matrices: &[DeviceMatrix],
        limits: (usize, usize, usize),
    ) -> std::result::Result<Self, BackendError> {
        let floats = |id: MatrixId| matrices[id.0 as usize].reads_floats();
        let needs = rows_plan::needs(&program, floats);
        if let Some(reason) = rows_plan::refusal(&program, &needs) {
            return Err(BackendError::Device(reason));
        }
        if let Some(spec) = program.attention.iter().find(|spec| spec.head_dim > attention::HEAD_DIM_MAX) {
            let reason = format!(
                "heads of {} dimensions, at most {} are served",
                spec.head_dim,
                attention::HEAD_DIM_MAX
            );
            return Err(BackendError::Device(format!("the CUDA backend: {reason}")));
        }
        if let Some(reason) = program.experts.iter().find_map(|spec| experts::refusal(spec, limits.0)) {
            return Err(BackendError::Device(format!("the CUDA backend: {reason}")));
        }
        let before = driver.free_bytes().map_err(failed)?;
        let made = Self::allocate(driver, program, matrices, limits, &needs);
        let mut model = made.map_err(failed)?;
        model.bytes = before.saturating_sub(driver.free_bytes().map_err(failed)?);
        Ok(model)
    }

    fn allocate(
        driver: &mut dyn Driver,
        program: Program,
        matrices: &[DeviceMatrix],
        (max_rows, max_logit_rows, max_position): (usize, usize, usize),
        needs: &[Needs],
    ) -> Result<Self> {
        let buffers = program.buffers.iter().zip(needs);
        let buffers = buffers.map(|(&width, &needs)| rows_plan::allocate(driver, width, max_rows, needs));
        let buffers = buffers.collect::<Result<Vec<_>>>()?;
        let gated = program.body.iter().filter_map(|op| match op {
            Op::GatedLinear { weight, .. } => Some(matrices[weight.0 as usize].rows),
            _ => None,
        });
        let gate_up =
            gated.max().map(|width| driver.allocate((4 * max_rows * stride(width)) as u64)).transpose()?;
        for id in program.experts.iter().flat_map(|spec| [spec.gate_up, spec.down]) {
            matrices[id.0 as usize].expert_modules().try_for_each(|module| driver.load(module))?;
        }
        let mixtures = program.experts.iter().map(|spec| {
            let matrix = |id: MatrixId| &matrices[id.0 as usize];
            experts::workspace_bytes(spec, matrix(spec.gate_up), matrix(spec.down), max_rows)
        });
        let mixture = match mixtures.max() {
            Some(bytes) => driver.allocate(bytes)?,
            None => DevicePtr::default(),
        };
        let scratch = Scratch::allocate(driver, &program, matrices, max_rows.max(max_logit_rows))?;
        let ropes = program.ropes.iter().map(|rope| {
            let bytes: Vec<u8> = rope.inv_freq.iter().flat_map(|value| value.to_le_bytes()).collect();
            let inv_freq = driver.allocate(bytes.len() as u64)?;
            driver.upload(inv_freq, &bytes)?;
            let pairs = rope.inv_freq.len();
            let table = driver.allocate((4 * max_rows * 2 * pairs) as u64)?;
            Ok(RopeOnDevice { inv_freq, pairs: pairs as u32, scale: rope.scale, table })
        });
        let ropes = ropes.collect::<Result<Vec<_>>>()?;
        let head = &program.head;
        let floats = matrices[head.matrix.0 as usize].reads_floats();
        let width = program.buffers[head.x.0 as usize];
        let normed =
            rows_plan::allocate(driver, width, max_logit_rows, Needs { f32: floats, bf16: !floats })?;
        let hidden = rows_plan::allocate(driver, width, max_rows, Needs { f32: true, bf16: false })?;
        let logits = driver.allocate((4 * max_logit_rows * head.vocab) as u64)?;
        let tile_tokens = program.attention.iter().map(attention::warp_tokens);
        Ok(Self {
            narrow_tile: tile_tokens.min().unwrap_or(1),
            max_rows,
            max_logit_rows,
            max_position,
            vocabulary: program.vocabulary(|table| matrices[table.0 as usize].rows),
            input_width: program.input_width(),
            buffers,
            gate_up,
            mixture,
            scratch,
            ropes,
            queries: Queries(DevicePtr::default()),
            partials: DevicePtr::default(),
            partials_bytes: 0,
            normed,
            hidden,
            logits,
            bytes: 0,
            program,
        })
    }

    /// Allocates what attention over these pools needs.
    pub(crate) fn prepare_attention(&mut self, driver: &mut dyn Driver, pools: &[KvPool]) -> Result<()> {
        for old in [self.queries.0, self.partials] {
            if old != DevicePtr::default() {
                driver.free(old)?;
            }
        }
        let before = driver.free_bytes()?;
        let queries = self.program.attention.iter().map(|spec| {
            let format = pools[spec.group as usize].format(spec.layer);
            Queries::bytes(format, self.max_rows, spec.heads, spec.head_dim)
        });
        self.queries = Queries(driver.allocate(queries.max().unwrap_or(0))?);
        let info = driver.info().clone();
        let workspace = self.program.attention.iter().map(|spec| {
            // More tiles are never split: see the plan.
            let tiles = (4 * info.multiprocessors).div_ceil(spec.kv_heads as u32).min(self.max_rows as u32);
            let bounds = TileBounds {
                tiles,
                tile_tokens: word::TILE_TOKENS,
                rows: self.max_rows as u32,
                positions: self.max_position as u32,
            };
            AttentionPlan::splitting(spec, &bounds).workspace_bytes
        });
        self.partials_bytes = workspace.max().unwrap_or(0).min(PARTIALS_MAX);
        self.partials = driver.allocate(self.partials_bytes)?;
        self.bytes += before.saturating_sub(driver.free_bytes()?);
        Ok(())
    }

    /// Bytes of the logits that a batch asks for.
    pub(crate) fn logits_bytes(&self, batch: &Batch) -> u64 {
        (4 * batch.logit_rows.len() * self.program.head.vocab) as u64
    }

    /// Bytes of the logits of as many rows as there may be.
    pub(crate) fn all_logits_bytes(&self) -> u64 {
        (4 * self.max_logit_rows * self.program.head.vocab) as u64
    }

    /// Rows of logits that lie at `at`.
    pub(crate) fn logits_planes(&self, at: DevicePtr) -> Planes {
        let width = self.program.head.vocab as u32;
        Planes { width, f32: Some(at), f32_stride: width, ..Planes::default() }
    }

    /// Bytes of the hidden states that a batch asks for, from one row's start to the next one's.
    pub(crate) fn hidden_bytes(&self, batch: &Batch) -> u64 {
        (4 * batch.hidden_rows.len() * self.hidden.f32_stride as usize) as u64
    }

    /// Where features lie, if there are any: in the f32 plane.
    pub(crate) fn features(&self) -> Option<&Planes> {
        self.program.features.map(|features| self.planes(features))
    }

    fn planes(&self, buf: Buf) -> &Planes {
        &self.buffers[buf.0 as usize]
    }
}

fn stride(width: usize) -> usize {
    width.next_multiple_of(32)
}

/// What a step's launches are made of.
pub(crate) struct Launches<'a> {
    pub(crate) driver: &'a mut dyn Driver,
    pub(crate) model: &'a Model,
    pub(crate) matrices: &'a [DeviceMatrix],
    pub(crate) vectors: &'a [Vector],
    pub(crate) pools: &'a [KvPool],
    pub(crate) meta: Meta,
}

impl Launches<'_> {
    /// Everything between the upload of a step's words and the download of its logits.
    pub(crate) fn all(&mut self, bounds: &Bounds) -> Result<()> {
        let rows = RowBound { bound: bounds.rows, count_word: word::ROWS };
        for rope in &self.model.ropes {
            kv::rope_table(self.driver, self.meta, rows, rope)?;
        }
        for op in &self.model.program.body {
            self.op(op, rows, bounds)?;
        }
        self.head(bounds)
    }

    fn vector(&self, id: VectorId) -> DevicePtr {
        self.vectors[id.0 as usize].at
    }

    fn norm(&self, weight: VectorId, eps: f32) -> Norm {
        Norm { weight: self.vector(weight), eps }
    }

    fn op(&mut self, op: &Op, rows: RowBound, bounds: &Bounds) -> Result<()> {
        let (model, meta) = (self.model, self.meta);
        match *op {
            Op::Embed { table, out } => {
                linear::embed(self.driver, meta, rows, &self.matrices[table.0 as usize], model.planes(out))
            }
            Op::RmsNorm { x, weight, eps, out } => {
                let norm = self.norm(weight, eps);
                rows::norm(self.driver, meta, rows, model.planes(x), norm, model.planes(out))
            }
            Op::AddRmsNorm { x, weight, eps, out, .. } => {
                let norm = self.norm(weight, eps);
                rows::add_norm(self.driver, meta, rows, model.planes(x), norm, model.planes(out))
            }
            Op::Scale { x, by } => rows::scale(self.driver, meta, rows, model.planes(x), by),
            Op::Copy { x, out } => rows::copy(self.driver, meta, rows, model.planes(x), model.planes(out)),
            Op::Place { x, out, first } => {
                let out = model.planes(out).from(first);
                rows::copy(self.driver, meta, rows, model.planes(x), &out)
            }
            // The check of batches refuses embeddings.
            Op::Merge { .. } => Ok(()),
            Op::Input { out } => rows::input(self.driver, meta, rows, model.planes(out)),
            Op::Linear { x, weight, bias, out, add } => {
                let out = model.planes(out);
                let out = Output { at: out.f32.unwrap_or_default(), stride: out.f32_stride, add };
                self.product(rows, model.planes(x), weight, bias, out)
            }
            Op::GatedLinear { x, weight, bias, activation, out } => {
                self.gated(rows, (x, weight, bias), activation, out)
            }
            Op::WriteKv { qkv, spec } => {
                self.write_kv(rows, model.planes(qkv), &model.program.attention[spec])
            }
            Op::Attention { spec, out, .. } => {
                let spec = &model.program.attention[spec];
                let bounds = TileBounds {
                    tiles: bounds.tiles,
                    tile_tokens: bounds.tile_tokens,
                    rows: bounds.rows,
                    positions: bounds.chunks * CHUNK,
                };
                let work = Attention {
                    queries: model.queries,
                    pool: &self.pools[spec.group as usize],
                    sinks: spec.sinks.map(|sinks| self.vector(sinks)),
                    out: model.planes(out),
                    bounds,
                    plan: AttentionPlan::new(self.driver.info(), spec, &bounds, model.partials_bytes),
                    workspace: model.partials,
                };
                attention::attend(self.driver, meta, spec, &work)
            }
            Op::Convolve { .. }
            | Op::DeltaRule { .. }
            | Op::GatedRmsNorm { .. }
            | Op::SigmoidGate { .. }
            | Op::Multiply { .. }
            | Op::StateSpace { .. }
            | Op::SiluGate { .. }
            | Op::TopGate { .. }
            | Op::Add { .. }
            | Op::Gate { .. }
            | Op::Center { .. }
            | Op::NormPart { .. }
            | Op::XIelu { .. }
            | Op::HeadLinear { .. }
            | Op::WriteLatent { .. }
            | Op::LatentAttention { .. } => unreachable!("refused with the program"),
            Op::Experts { x, logits, spec, out, add } => {
                let spec = &model.program.experts[spec];
                let mixture = Mixture {
                    spec,
                    gate_up: &self.matrices[spec.gate_up.0 as usize],
                    gate_up_bias: spec.gate_up_bias.map(|bias| self.vector(bias)),
                    down: &self.matrices[spec.down.0 as usize],
                    down_bias: spec.down_bias.map(|bias| self.vector(bias)),
                    workspace: model.mixture,
                };
                let out = model.planes(out);
                let out = Output { at: out.f32.unwrap_or_default(), stride: out.f32_stride, add };
                experts::mix(self.driver, meta, rows, (model.planes(x), model.planes(logits)), &mixture, out)
            }
        }
    }

    fn product(
        &mut self,
        rows: RowBound,
        x: &Planes,
        weight: MatrixId,
        bias: Option<VectorId>,
        out: Output,
    ) -> Result<()> {
        let bias = bias.map(|bias| self.vector(bias));
        let (matrix, scratch) = (&self.matrices[weight.0 as usize], &self.model.scratch);
        linear::product(self.driver, self.meta, rows, x, matrix, bias, out, scratch)
    }

    fn gated(
        &mut self,
        rows: RowBound,
        (x, weight, bias): (Buf, MatrixId, Option<VectorId>),
        activation: Activation,
        out: Buf,
    ) -> Result<()> {
        let model = self.model;
        let width = self.matrices[weight.0 as usize].rows as u32;
        let gate_up = Planes {
            width,
            f32: model.gate_up,
            f32_stride: stride(width as usize) as u32,
            ..Planes::default()
        };
        let scratch =
            Output { at: model.gate_up.unwrap_or_default(), stride: gate_up.f32_stride, add: false };
        self.product(rows, model.planes(x), weight, bias, scratch)?;
        rows::gate(self.driver, self.meta, rows, &gate_up, activation, model.planes(out))
    }

    fn write_kv(&mut self, rows: RowBound, qkv: &Planes, spec: &AttentionSpec) -> Result<()> {
        let write = KvWrite {
            qkv,
            rope: spec.rope.map(|rope| &self.model.ropes[rope.0 as usize]),
            q_norm: spec.q_norm.map(|norm| self.vector(norm)),
            k_norm: spec.k_norm.map(|norm| self.vector(norm)),
            pool: &self.pools[spec.group as usize],
            queries: self.model.queries,
        };
        kv::write_kv(self.driver, self.meta, rows, spec, &write)
    }

    fn head(&mut self, bounds: &Bounds) -> Result<()> {
        let (model, meta) = (self.model, self.meta);
        let head = &model.program.head;
        let (x, norm) = (model.planes(head.x), self.norm(head.norm, head.eps));
        if bounds.hidden_rows > 0 {
            rows::norm_listed(self.driver, meta, Listed::Hidden(bounds.hidden_rows), x, norm, &model.hidden)?;
        }
        if bounds.logit_rows == 0 {
            return Ok(());
        }
        rows::norm_listed(self.driver, meta, Listed::Logits(bounds.logit_rows), x, norm, &model.normed)?;
        let rows = RowBound { bound: bounds.logit_rows, count_word: word::LOGIT_ROWS };
        let stride = head.vocab as u32;
        self.product(
            rows,
            &model.normed,
            head.matrix,
            None,
            Output { at: model.logits, stride, add: false },
        )?;
        let Some(cap) = head.softcap else { return Ok(()) };
        rows::softcap(self.driver, meta, rows, &model.logits_planes(model.logits), cap)
    }
}
