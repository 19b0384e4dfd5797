//! [`CpuBackend`]: weights, buffers and KV bytes on the host, and the `Backend` trait over them.
//!
//! Owns: memory and the order load, program, cache, forward. Must never: look inside a kernel, or allocate in `forward`
//! after the first steps.

use std::sync::Arc;

use folio_model::backend::{Backend, BackendError, Batch, BlockMemory, KvLayout, TensorView};
use folio_model::check::{self, BatchCheck, Loaded, PoolSize, ProgramCheck, Written};
use folio_model::program::{Buf, EmbeddingInput, MatrixId, Op, Program, VectorId};
use folio_model::quant::Encoding;
use folio_model::tables::BlockTables;

use crate::NUMERICS;
use crate::adapters::AdaptedRows;
use crate::attend::Window;
use crate::attention::{AttentionPlan, Shape};
use crate::error::CpuError;
use crate::experts::{self, ExpertBuffers};
use crate::groups::Groups;
use crate::kv::{KvPages, SharedBlocks};
use crate::latent;
use crate::linear::{SCRATCH, rows_of_heads};
use crate::memory::{Floats, HugeBuffer};
use crate::packed::{PackedMatrix, QuantizeWith};
use crate::packed_file::{PackedFile, PackedWeights};
use crate::plain::Kind;
use crate::pool::{Claims, ThreadPool, Worker};
use crate::quant::quantize::Quantize;
use crate::simd::dot::COLUMNS;
use crate::simd::{Isa, LANES};
use crate::stages::{self, Stage};
use crate::step::{Buffers, RowPlace, Step};

/// How to run.
#[derive(Clone, Copy, Debug, Default)]
pub struct CpuOptions {
    /// Workers; by default [`CpuBackend::detect_threads`].
    pub threads: Option<usize>,
    /// Instruction set; by default `FOLIO_ISA`, else the widest this machine runs.
    pub isa: Option<Isa>,
}

/// Matrices that were quantized while loading, and those that stayed plain because their columns are not whole blocks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Quantized {
    pub matrices: usize,
    pub kept_plain: usize,
}

/// The decoder on the processors of this machine.
pub struct CpuBackend {
    isa: Isa,
    pool: ThreadPool,
    quantize: Option<Quantize>,
    /// Matrices that [`CpuBackend::quantize_weights`] quantized, and left plain.
    quantized: Quantized,
    matrices: Vec<PackedMatrix>,
    vectors: Vec<(usize, Vec<f32>)>,
    model: Option<Model>,
    /// One per cache group.
    caches: Vec<KvPages>,
    pools: Vec<PoolSize>,
    tables: BlockTables,
    written: Written,
}

/// A loaded program and its memory.
struct Model {
    program: Program,
    stages: Vec<Stage>,
    buffers: Buffers,
    max_position: usize,
    /// One for each window and shape of heads.
    plans: Vec<AttentionPlan>,
    places: Vec<RowPlace>,
    adapted: AdaptedRows,
    max_rows: usize,
    max_logit_rows: usize,
    vocabulary: usize,
    input_width: usize,
    embeddings: Option<EmbeddingInput>,
}

impl CpuBackend {
    pub fn new(options: CpuOptions) -> Result<Self, CpuError> {
        let isa = match options.isa {
            Some(isa) => isa.checked()?,
            None => Isa::from_env()?,
        };
        let pool = ThreadPool::new(options.threads.unwrap_or_else(Self::detect_threads))?;
        Ok(Self {
            isa,
            pool,
            quantize: None,
            quantized: Quantized::default(),
            matrices: Vec::new(),
            vectors: Vec::new(),
            model: None,
            caches: Vec::new(),
            pools: Vec::new(),
            tables: BlockTables::default(),
            written: Written::default(),
        })
    }

    /// Quantizes plain matrices that are loaded from here on. Matrices whose columns are not a multiple of 32 stay as they
    /// are; a matrix that is quantized already is refused.
    pub fn quantize_weights(&mut self, to: Quantize) {
        self.quantize = Some(to);
    }

    /// What [`CpuBackend::quantize_weights`] did so far.
    pub fn quantized(&self) -> Quantized {
        self.quantized
    }

    /// Takes the weights of a file instead of `load_matrix` and `load_vector`: they get the ids of their order in it. Every
    /// byte is checked first.
    pub fn load_packed(&mut self, file: PackedFile) -> Result<(), CpuError> {
        let weights = file.load(&mut self.pool)?;
        self.matrices = weights.matrices;
        self.vectors = weights.vectors;
        Ok(())
    }

    /// The weights loaded so far, for a file. Shares their memory.
    pub fn packed_weights(&self) -> PackedWeights {
        PackedWeights { matrices: self.matrices.clone(), vectors: self.vectors.clone() }
    }

    /// Bytes of weights that are part of a mapped file: the system counts their memory as its cache.
    pub fn mapped_bytes(&self) -> u64 {
        let segments = self.matrices.iter().flat_map(|matrix| &matrix.segments);
        segments.filter(|segment| segment.memory.is_file()).map(|s| s.memory.len() as u64).sum()
    }

    /// Threads that the affinity mask and the cgroup allow this process.
    pub fn detect_threads() -> usize {
        crate::threads::allowance()
    }

    pub fn isa(&self) -> Isa {
        self.isa
    }

    pub fn threads(&self) -> usize {
        self.pool.count()
    }

    /// Bytes per second at which the loaded weights themselves can be read: the limit of decoding one sequence. It may differ
    /// from what a fresh buffer gives, because memory need not be equally fast everywhere. Zero without weights.
    pub fn weight_read_rate(&mut self) -> Result<f64, CpuError> {
        let segments = self.matrices.iter().flat_map(|matrix| &matrix.segments);
        let buffers: Vec<_> = segments.map(|segment| &*segment.memory).collect();
        crate::machine::read_rate(&mut self.pool, self.isa, &buffers)
    }
}

/// Whether rows of both fit one matrix: they take the same activations. Floats of different plain types do not.
fn stack(a: Encoding, b: Encoding) -> bool {
    let integers = |encoding| matches!(Kind::of(encoding), Kind::Integers(_));
    a == b || (a.plain().is_none() && b.plain().is_none() && integers(a) == integers(b))
}

/// What adapters add to has the shape that they are for.
fn check_adapters(batch: &Batch, matrices: &[PackedMatrix]) -> Result<(), BackendError> {
    let mut last = None;
    for adapter in batch.adapters.iter().flatten() {
        if last.is_some_and(|last| Arc::ptr_eq(last, adapter)) {
            continue;
        }
        for (matrix, low) in adapter.products() {
            let found = matrices.get(matrix.0 as usize).map(|matrix| (matrix.rows, matrix.cols));
            if found != Some((low.rows(), low.cols())) {
                let wanted = (low.rows(), low.cols());
                let problem =
                    format!("an adapter for a matrix of {wanted:?} meets matrix {}, {found:?}", matrix.0);
                return Err(BackendError::Batch(problem));
            }
        }
        last = Some(adapter);
    }
    Ok(())
}

/// Weights that somebody else quantized are not quantized again.
fn quantized_already(name: &str, part: &TensorView<'_>) -> BackendError {
    let reason = format!("it is {} already: --quantize is for weights in F32, F16 or BF16", part.encoding);
    check::shape_error(name, part.shape, reason)
}

impl Loaded for CpuBackend {
    fn matrix(&self, id: MatrixId) -> Option<(usize, usize)> {
        self.matrices.get(id.0 as usize).map(|matrix| (matrix.rows, matrix.cols))
    }

    fn vector(&self, id: VectorId) -> Option<usize> {
        self.vectors.get(id.0 as usize).map(|(values, _)| *values)
    }
}

/// What a failure of this crate is to the caller of a backend.
fn device(error: CpuError) -> BackendError {
    match error {
        CpuError::Map { needed_bytes, reason } => BackendError::OutOfMemory {
            what: "a buffer of the CPU backend",
            needed_bytes: needed_bytes as u64,
            reason: reason.to_string(),
        },
        other => BackendError::Device(other.to_string()),
    }
}

impl Backend for CpuBackend {
    fn name(&self) -> String {
        format!("cpu/{}", self.isa.name())
    }

    fn numerics(&self) -> String {
        format!("cpu kernels {NUMERICS}")
    }

    fn load_matrix(&mut self, name: &str, parts: &[TensorView<'_>]) -> Result<MatrixId, BackendError> {
        check::parts(name, parts, 2, stack)?;
        let with = self.quantize.map(|to| QuantizeWith { to, isa: self.isa });
        if let (Some(_), Some(part)) = (with, parts.iter().find(|part| part.encoding.plain().is_none())) {
            return Err(quantized_already(name, part));
        }
        let whole = parts[0].shape[1].is_multiple_of(COLUMNS);
        if with.is_some() {
            *(if whole { &mut self.quantized.matrices } else { &mut self.quantized.kept_plain }) += 1;
        }
        let matrix = PackedMatrix::pack(parts, with.filter(|_| whole), &mut self.pool).map_err(device)?;
        self.matrices.push(matrix);
        Ok(MatrixId(self.matrices.len() as u32 - 1))
    }

    fn load_vector(&mut self, name: &str, parts: &[TensorView<'_>]) -> Result<VectorId, BackendError> {
        check::parts(name, parts, 1, stack)?;
        let mut values = Vec::new();
        for part in parts {
            let dtype = check::plain(name, part)?;
            values.extend(part.bytes.chunks_exact(dtype.size()).map(|b| check::to_f32(dtype, b)));
        }
        let len = values.len();
        values.resize(len.next_multiple_of(LANES), 0.0);
        self.vectors.push((len, values));
        Ok(VectorId(self.vectors.len() as u32 - 1))
    }

    fn load_program(
        &mut self,
        program: Program,
        max_rows: usize,
        max_logit_rows: usize,
        max_position: usize,
    ) -> Result<(), BackendError> {
        ProgramCheck { program: &program, loaded: &*self }.all()?;
        let workers = self.pool.count();
        let mut plans: Vec<AttentionPlan> = Vec::new();
        let attends = program
            .attention
            .iter()
            .map(|spec| (Window::of(spec.window, spec.chunked), Shape::of(spec, workers, max_position)));
        let latent = program
            .latent
            .first()
            .map(|spec| (Window::of(None, false), Shape::of_latents(spec, workers, max_position)));
        for (window, shape) in attends.chain(latent) {
            if plans.iter().all(|plan| (plan.window, plan.shape) != (window, shape)) {
                plans.push(AttentionPlan::new(window, shape, max_rows));
            }
        }
        let heads_of = |spec: usize| rows_of_heads(program.attention[spec].head_dim);
        let stages = stages::stages(&program, |spec| heads_of(spec).is_some());
        let buffers = self.buffers(&program, &stages, &plans, max_rows, max_logit_rows).map_err(device)?;
        let vocabulary = program.vocabulary(|table| self.matrices[table.0 as usize].rows);
        let (input_width, embeddings) = (program.input_width(), program.embedding_input());
        let places = Vec::with_capacity(max_rows);
        self.model = Some(Model {
            program,
            stages,
            buffers,
            max_position,
            plans,
            places,
            adapted: AdaptedRows::default(),
            max_rows,
            max_logit_rows,
            vocabulary,
            input_width,
            embeddings,
        });
        Ok(())
    }

    fn allocate_cache(&mut self, layout: &KvLayout, blocks: &[usize]) -> Result<(), BackendError> {
        let model = self.model.as_ref().ok_or_else(|| BackendError::Device("no program is loaded".into()))?;
        check::layout(layout, blocks, &model.program)?;
        self.caches.clear(); // gives the old memory back first
        for (group, &blocks) in layout.groups.iter().zip(blocks) {
            self.caches.push(KvPages::new(group.clone(), blocks).map_err(device)?);
        }
        self.pools = PoolSize::of(layout, blocks);
        // Rows that may be taken back leave states of their own.
        let tentative = if self.pools.iter().any(|pool| pool.is_state) { model.max_rows } else { 0 };
        self.tables = BlockTables::new(&self.pools, model.max_position).with_tentative(tentative);
        self.written = Written::new(blocks);
        Ok(())
    }

    fn block_memory(&self) -> Option<Arc<dyn BlockMemory>> {
        Some(Arc::new(SharedBlocks::of(&self.caches)))
    }

    fn serves_adapters(&self) -> bool {
        true
    }

    fn embedding_input(&self) -> Option<EmbeddingInput> {
        self.model.as_ref().and_then(|model| model.embeddings)
    }

    fn forward(&mut self, batch: &Batch) -> Result<&[f32], BackendError> {
        self.forward_and(batch, 0, &|_, _| ())?;
        let logits = self.model.as_ref().map(|model| &model.buffers.logits);
        // SAFETY: there is room for the rows of any batch that was checked; only `forward_and` writes there, which this borrow
        // excludes.
        Ok(logits.map_or(&[], |logits| unsafe { logits.dense(batch.logit_rows.len()) }))
    }

    fn forward_and(
        &mut self,
        batch: &Batch,
        jobs: usize,
        job: &(dyn Fn(usize, &[f32]) + Sync),
    ) -> Result<(), BackendError> {
        let Some(model) = self.model.as_mut().filter(|_| !self.caches.is_empty()) else {
            return Err(BackendError::Device("no program or no cache is loaded".into()));
        };
        BatchCheck {
            max_rows: model.max_rows,
            max_logit_rows: model.max_logit_rows,
            max_position: model.max_position,
            vocabulary: model.vocabulary,
            input_width: model.input_width,
            embeddings: model.embeddings,
            has_features: model.program.features.is_some(),
            serves_adapters: true,
            chosen: 0,
            pools: &self.pools,
            tables: &mut self.tables,
            written: &mut self.written,
        }
        .all(batch)?;
        check_adapters(batch, &self.matrices)?;
        model.place(batch);
        model.adapted.find(batch, &model.places);
        model.make_room(batch).map_err(device)?;
        model.plans.iter_mut().for_each(|plan| plan.plan(batch));
        for claims in &model.buffers.claims {
            claims.reset();
        }
        let step = Step {
            isa: self.isa,
            program: &model.program,
            stages: &model.stages,
            matrices: &self.matrices,
            vectors: &self.vectors,
            buffers: &model.buffers,
            max_position: model.max_position,
            caches: &self.caches,
            tables: &self.tables,
            plans: &model.plans,
            places: &model.places,
            adapted: &model.adapted,
            batch,
        };
        let claims = Claims::default();
        let run = |worker: &Worker<'_>| {
            step.run(worker);
            if jobs == 0 {
                return;
            }
            worker.barrier();
            // SAFETY: there is room for the rows of any batch that was checked, and after the barrier nobody writes there.
            let logits = unsafe { step.buffers.logits.dense(batch.logit_rows.len()) };
            while let Some(index) = claims.next(jobs, 1) {
                job(index.start, logits);
            }
        };
        self.pool.run(&run).map_err(device)
    }

    fn hidden(&self, row: u32) -> &[f32] {
        self.model.as_ref().map_or(&[], |model| model.row(model.program.head.x, row))
    }

    fn features(&self, row: u32) -> &[f32] {
        let features = self.model.as_ref().and_then(|model| Some((model, model.program.features?)));
        features.map_or(&[], |(model, features)| model.row(features, row))
    }

    fn weight_bytes(&self) -> u64 {
        let matrices: usize = self.matrices.iter().map(PackedMatrix::bytes).sum();
        let vectors: usize = self.vectors.iter().map(|(_, v)| v.len() * 4).sum();
        (matrices + vectors) as u64
    }
}

impl CpuBackend {
    fn buffers(
        &self,
        program: &Program,
        stages: &[Stage],
        plans: &[AttentionPlan],
        max_rows: usize,
        max_logit_rows: usize,
    ) -> Result<Buffers, CpuError> {
        let stride = |width: &usize| width.next_multiple_of(LANES);
        let sizes: Vec<usize> = program.buffers.iter().map(|width| max_rows * stride(width)).collect();
        let logits = (max_logit_rows * program.head.vocab).next_multiple_of(LANES);
        let layout = stages::layout(program, stages, &sizes, logits);
        let memory = Floats::dense(1, layout.values)?;
        let row = |(start, width): (&usize, &usize)| memory.part(*start, *width, stride(width));
        let products = stages.iter().filter_map(|stage| match stage {
            Stage::Product(product) => Some((product.weight, max_rows)),
            Stage::Op(_) => None,
        });
        let packed = products.chain([(program.head.matrix, max_logit_rows)]).map(|(weight, most)| {
            let weight = &self.matrices[weight.0 as usize];
            (0..=most).map(|tokens| Groups::new(weight, self.isa, tokens).bytes()).max()
        });
        let of_experts = program.experts.iter().flat_map(|spec| {
            let bytes =
                |id: MatrixId| experts::packed_bytes(&self.matrices[id.0 as usize], self.isa, max_rows, spec);
            [bytes(spec.gate_up), bytes(spec.down)]
        });
        let of_heads = program.body.iter().filter_map(|op| match *op {
            Op::HeadLinear { weight, heads, .. } => {
                Some(latent::packed_bytes(&self.matrices[weight.0 as usize], self.isa, max_rows, heads))
            }
            _ => None,
        });
        let most = |values: fn(&Shape) -> usize| plans.iter().map(|plan| values(&plan.shape)).max();
        let scratch = SCRATCH.max(most(Shape::scratch_values).unwrap_or(0));
        Ok(Buffers {
            rows: layout.starts.iter().zip(&program.buffers).map(row).collect(),
            rotary: program
                .ropes
                .iter()
                .map(|rope| Floats::zeroed(max_rows, 2 * rope.inv_freq.len()))
                .collect::<Result<_, _>>()?,
            packed: HugeBuffer::zeroed(
                packed.flatten().chain(of_experts).chain(of_heads).max().unwrap_or(0),
            )?,
            logits: memory.part(layout.logits, program.head.vocab, program.head.vocab),
            partials: Floats::dense(1, most(Shape::partial_limit).unwrap_or(0))?,
            scratch: (0..self.pool.count()).map(|_| Floats::dense(1, scratch)).collect::<Result<_, _>>()?,
            experts: ExpertBuffers::new(program, max_rows, self.pool.count())?,
            adapted: Floats::zeroed(1, 0)?,
            claims: (0..2 * stages.len() + 2).map(|_| Claims::default()).collect(),
            memory,
        })
    }
}

impl Model {
    /// A row of a buffer that keeps its values to the end of a step: what the head reads, or features.
    fn row(&self, buf: Buf, row: u32) -> &[f32] {
        if row as usize >= self.max_rows || self.stages.is_empty() {
            return &[];
        }
        let rows = self.buffers.rows[buf.0 as usize];
        // SAFETY: a program with a stage has memory for `max_rows` rows of `width` values of what is asked for after it, zeroed at
        // first, and only `forward` writes there, which this borrow excludes.
        unsafe { std::slice::from_raw_parts(rows.row(row as usize), rows.width) }
    }

    /// Position of every row, and whose it is.
    fn place(&mut self, batch: &Batch) {
        self.places.clear();
        for (at, span) in batch.spans.iter().enumerate() {
            let positions = span.first_position..span.first_position + span.rows;
            let place = |position| {
                let (axes, slot, span) = ([position; 3], span.slot, at as u32);
                RowPlace { position, axes, slot, span }
            };
            self.places.extend(positions.map(place));
        }
        for of in &batch.positions {
            for row in of.first_row..of.first_row + of.rows {
                let place = &mut self.places[row as usize];
                place.axes = of.at(row, place.position);
            }
        }
    }

    /// Makes room for what the adapters of a batch make of its rows. Allocates where one is wider than any before.
    fn make_room(&mut self, batch: &Batch) -> Result<(), CpuError> {
        let lanes = batch.adapters.iter().flatten().map(|adapter| adapter.lanes()).max().unwrap_or(0);
        if lanes > self.buffers.adapted.view().width {
            self.buffers.adapted = Floats::zeroed(self.max_rows, lanes)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use folio_model::Checkpoint;
    use folio_model::testing::{ADAPTERS, Runner, adapted};

    use super::*;

    /// What adapters add is part of the products, whoever asks for it: nothing is joined otherwise, no stage comes or goes.
    #[test]
    fn adapters_leave_the_stages_as_they_are() {
        let backend = || CpuBackend::new(CpuOptions { threads: Some(2), isa: None }).expect("a backend");
        let stages = |runner: &Runner<CpuBackend>| {
            runner.backend.model.as_ref().expect("a program is loaded").stages.clone()
        };
        let prompt: Vec<u32> = (3..20).collect();
        for name in ADAPTERS {
            let checkpoint = Checkpoint::open(adapted(name)).expect("a fixture");
            let mut plain = Runner::load(&checkpoint, backend(), None);
            let expected = stages(&plain);
            let logits = plain.forward(&prompt, &[16]).to_vec();
            let mut used = Runner::with_adapter(name, backend());
            assert_ne!(used.forward(&prompt, &[16]), logits, "{name}");
            // It is there, and no row of the step has it.
            let mut idle = Runner::with_adapter(name, backend());
            let adapter = idle.adapter.take().expect("it was read");
            assert_eq!(idle.forward(&prompt, &[16]), logits, "{name}");
            assert_eq!(stages(&idle), expected, "{name}");
            idle.adapter = Some(adapter);
            idle.forward(&prompt[..1], &[0]);
            idle.adapter = None;
            idle.forward(&prompt[..1], &[0]);
            for runner in [&plain, &used, &idle] {
                assert_eq!(stages(runner), expected, "{name}");
            }
        }
    }
}
