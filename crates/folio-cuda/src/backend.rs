//! [`CudaBackend`]: weights, row buffers and KV blocks on a device, and the `Backend` trait over them.
//!
//! Owns: memory and the order load, program, cache, forward. Must never: know a kernel's inside, or allocate in `forward` but where the
//! metadata outgrows its place.
//!
//! A forward pass is: copies of blocks, one upload of the step's words, launches (or one graph of them), one download of logits, or of what
//! was chosen from them. Of steps that are sampled here, one may be begun while another runs (`turns`): its tokens may be what that one
//! chooses, which a kernel puts among its words before anything else reads them.

use std::sync::Arc;

use folio_model::backend::{Backend, BackendError, Batch, BlockMemory, KvLayout, PLACEHOLDER, TensorView};
use folio_model::check::{self, BatchCheck, Loaded, PoolSize, ProgramCheck, Written};
use folio_model::kv_format::KvFormat;
use folio_model::program::{MatrixId, Op, Program, VectorId};
use folio_model::quant::Encoding;
use folio_model::sampling::{Outcome, SampleRow};
use folio_model::tables::BlockTables;

use crate::NUMERICS;
use crate::attention;
use crate::driver::{Copies, DevicePtr, Driver, DriverError, HostId, floats};
use crate::graphs::{Bucket, Graphs};
use crate::kernels;
use crate::kv::{DeviceBlocks, KvPool};
use crate::launches::{Launches, Model};
use crate::linear::{self, DeviceMatrix};
use crate::machine::{self, Effort, Rates};
use crate::planes::{Meta, Planes};
use crate::sample::{self, Needs, Sampling};
use crate::step::{KeptTables, StepWords};
use crate::tables::{DeviceTables, set_tables};
use crate::turns::{Turns, Words};

/// Vectors are padded with zeros to this many values.
const PAD: usize = 32;
/// Most sequences of a step that is run from a graph.
const GRAPH_ROWS: u32 = 256;

/// The decoder on a device.
pub struct CudaBackend {
    driver: Box<dyn Driver>,
    /// The name of the library of products, if one was opened.
    library: String,
    matrices: Vec<DeviceMatrix>,
    vectors: Vec<Vector>,
    model: Option<Model>,
    /// One per cache group.
    pools: Vec<KvPool>,
    sizes: Vec<PoolSize>,
    /// For copies of their blocks beside the steps.
    copies: Option<Arc<dyn Copies>>,
    written: Written,
    /// Block tables on the host, and the same on the device.
    tables: BlockTables,
    on_device: DeviceTables,
    /// Those on the device are not known to be the same.
    resend: bool,
    /// Of each group.
    block_tokens: Vec<u32>,
    step: StepWords,
    staging: Words,
    /// Logits and hidden rows on the host.
    answers: Option<Answers>,
    /// Of the rows to sample from, and what was chosen.
    sampling: Words,
    chosen: Words,
    turns: Turns,
    /// Rows that the step before chooses for; none where that was not sampled here, or failed.
    last: usize,
    /// Where rules change logits.
    changed: Option<DevicePtr>,
    /// Of the rows of a step on their way to the device, or of what it chose.
    records: Vec<u32>,
    /// Of the last batch.
    hidden_rows: Vec<u32>,
    feature_rows: Vec<u32>,
    graphs: Graphs,
    use_graphs: bool,
}

/// A vector on the device, f32.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Vector {
    pub(crate) len: usize,
    pub(crate) at: DevicePtr,
}

struct Answers {
    logits: HostId,
    hidden: HostId,
    features: HostId,
}

impl CudaBackend {
    /// Takes a device and compiles the kernels for it, but those for a format of the cache, which come with the cache.
    pub fn new(mut driver: Box<dyn Driver>) -> Result<Self, DriverError> {
        let modules: Vec<_> = kernels::always().copied().collect();
        driver.prepare(&modules)?;
        for module in &modules {
            driver.load(module)?;
        }
        let library = driver.gemm().map_or(String::new(), |gemm| gemm.name());
        Ok(Self {
            driver,
            library,
            matrices: Vec::new(),
            vectors: Vec::new(),
            model: None,
            pools: Vec::new(),
            sizes: Vec::new(),
            copies: None,
            written: Written::default(),
            tables: BlockTables::default(),
            on_device: DeviceTables::default(),
            resend: true,
            block_tokens: Vec::new(),
            step: StepWords::default(),
            staging: Words::default(),
            answers: None,
            sampling: Words::default(),
            chosen: Words::default(),
            turns: Turns::default(),
            last: 0,
            changed: None,
            records: Vec::new(),
            hidden_rows: Vec::new(),
            feature_rows: Vec::new(),
            graphs: Graphs::default(),
            use_graphs: true,
        })
    }

    /// Launches every step by itself (`--enforce-eager`).
    pub fn without_graphs(&mut self) {
        self.use_graphs = false;
    }

    /// Graphs captured so far.
    pub fn graphs(&self) -> usize {
        self.graphs.count()
    }

    /// Bytes of device memory that are free: after the program is loaded, what the KV cache can be made of.
    pub fn free_bytes(&self) -> Result<u64, DriverError> {
        self.driver.free_bytes()
    }

    /// Bytes of row buffers, workspaces and metadata.
    pub fn buffer_bytes(&self) -> u64 {
        self.model.as_ref().map_or(0, |model| model.bytes)
    }

    /// Matrices that a library multiplies.
    pub fn given_to_a_library(&self) -> usize {
        self.matrices.iter().filter(|matrix| matrix.algorithm_of_a_library().is_some()).count()
    }

    /// What the device is.
    pub fn device(&self) -> &crate::driver::DeviceInfo {
        self.driver.info()
    }

    /// Measures what the device can do.
    pub fn rates(&mut self, effort: Effort) -> Result<Rates, DriverError> {
        machine::measure(&mut *self.driver, effort)
    }

    /// Sends the words of the step. What was captured with another address is forgotten.
    fn send(&mut self, turn: usize) -> Result<Meta, DriverError> {
        let words = self.step.words();
        if self.staging.reserve(&mut *self.driver, turn, words.len())? {
            self.graphs.clear();
        }
        Ok(Meta(self.staging.send(&mut *self.driver, turn, words)?))
    }

    /// Puts the tokens that the step before chooses among the words of this one.
    fn follow(&mut self, meta: Meta, batch: &Batch, turn: usize) -> Result<(), DriverError> {
        let Some(model) =
            self.model.as_ref().filter(|_| batch.tokens.iter().any(|token| token & PLACEHOLDER != 0))
        else {
            return Ok(());
        };
        let (rows, vocabulary) = (batch.tokens.len() as u32, model.vocabulary as u32);
        let top = self.turns.of[1 - turn].top;
        sample::follow(&mut *self.driver, meta, rows, self.chosen.device()?, top, vocabulary)
    }

    /// Launches the step, or the graph that covers it.
    fn launch(&mut self, meta: Meta) -> Result<(), DriverError> {
        let Some(model) = &self.model else { return Ok(()) };
        let bounds = self.step.bounds();
        let most = GRAPH_ROWS.min(model.max_rows as u32).min(model.max_logit_rows as u32);
        let bucket = Bucket::of(&bounds, most).filter(|_| self.use_graphs);
        let mut launches = Launches {
            driver: &mut *self.driver,
            model,
            matrices: &self.matrices,
            vectors: &self.vectors,
            pools: &self.pools,
            meta,
        };
        let Some(bucket) = bucket else { return launches.all(&bounds) };
        let graph = match self.graphs.get(&bucket) {
            Some(graph) => graph,
            None if self.graphs.is_first(bucket) => return launches.all(&bucket.bounds()),
            None => {
                launches.driver.begin_capture()?;
                let launched = launches.all(&bucket.bounds());
                // A capture that was begun is ended, whatever happened in it.
                let graph = launches.driver.end_capture();
                launched?;
                let graph = graph?;
                self.graphs.insert(bucket, graph);
                graph
            }
        };
        self.driver.replay(graph)
    }

    /// Checks a batch and starts its step: everything but what comes back. It may name `chosen` tokens of the step before.
    fn start(&mut self, batch: &Batch, turn: usize, chosen: usize) -> Result<(), BackendError> {
        let Some(model) = self.model.as_ref().filter(|_| !self.pools.is_empty()) else {
            return Err(BackendError::Device("no program or no cache is loaded".into()));
        };
        // Until the device has what a batch changes.
        let all = std::mem::replace(&mut self.resend, true);
        BatchCheck {
            max_rows: model.max_rows,
            max_logit_rows: model.max_logit_rows,
            max_position: model.max_position,
            vocabulary: model.vocabulary,
            input_width: model.input_width,
            // What embeds reads tokens alone.
            embeddings: None,
            has_features: model.program.features.is_some(),
            serves_adapters: false,
            chosen,
            pools: &self.sizes,
            tables: &mut self.tables,
            written: &mut self.written,
        }
        .all(batch)?;
        self.begin(batch, turn, all).map_err(failed)
    }

    fn begin(&mut self, batch: &Batch, turn: usize, all: bool) -> Result<(), DriverError> {
        for copy in &batch.copies {
            self.pools[copy.group as usize].copy(&mut *self.driver, copy.from, copy.to)?;
        }
        self.hidden_rows.clone_from(&batch.hidden_rows);
        self.feature_rows.clone_from(&batch.feature_rows);
        let moved = self.on_device.reserve(&mut *self.driver, self.tables.slots())?;
        let (host, device, block_tokens) = (&self.tables, &self.on_device, &self.block_tokens);
        let all = all || moved;
        let narrow = self.model.as_ref().map_or(1, |model| model.narrow_tile);
        self.step.fill(batch, &KeptTables { host, device, all, block_tokens }, narrow);
        let edits = self.step.edits();
        if batch.tokens.is_empty() && edits == 0 {
            self.resend = false;
            return Ok(());
        }
        let meta = self.send(turn)?;
        if edits > 0 {
            set_tables(&mut *self.driver, meta, edits)?;
        }
        self.resend = false;
        if batch.tokens.is_empty() {
            return Ok(());
        }
        self.follow(meta, batch, turn)?;
        self.launch(meta)?;
        let (Some(model), Some(answers)) = (&self.model, &self.answers) else { return Ok(()) };
        let hidden = model.hidden_bytes(batch);
        if let (true, Some(rows)) = (hidden > 0, model.hidden.f32) {
            self.driver.download_async(rows, answers.hidden, 0, hidden)?;
        }
        self.fetch_features()
    }

    /// Begins to copy the wanted rows of features to the host, neighbours at once.
    fn fetch_features(&mut self) -> Result<(), DriverError> {
        let (Some(model), Some(answers)) = (&self.model, &self.answers) else { return Ok(()) };
        let Some(Planes { f32: Some(at), f32_stride, .. }) = model.features() else { return Ok(()) };
        let row = 4 * u64::from(*f32_stride);
        let mut to = 0;
        for rows in self.feature_rows.chunk_by(|row, next| row + 1 == *next) {
            let from = DevicePtr(at.0 + u64::from(rows[0]) * row);
            let bytes = rows.len() as u64 * row;
            self.driver.download_async(from, answers.features, to, bytes)?;
            to += bytes;
        }
        Ok(())
    }

    /// Waits for the logits of the step.
    fn finish(&mut self, batch: &Batch) -> Result<(), DriverError> {
        let (Some(model), Some(answers)) = (&self.model, &self.answers) else { return Ok(()) };
        let bytes = model.logits_bytes(batch);
        if bytes > 0 {
            self.driver.download_async(model.logits, answers.logits, 0, bytes)?;
        }
        self.driver.synchronize()
    }

    /// Samples from the logits of the step.
    fn choose(
        &mut self,
        rows: &mut dyn ExactSizeIterator<Item = SampleRow<'_>>,
        turn: usize,
    ) -> Result<(), DriverError> {
        let step = &mut self.turns.of[turn];
        let Needs { top, scratch } = sample::encode(rows, &mut self.records, &mut step.asked);
        step.top = top;
        let rows = step.asked.len();
        let Some(model) = self.model.as_ref().filter(|_| rows > 0) else {
            return step.close(&mut *self.driver);
        };
        let words = rows * sample::result_words(top);
        self.sampling.reserve(&mut *self.driver, turn, self.records.len())?;
        self.chosen.reserve(&mut *self.driver, turn, words)?;
        let logits = model.logits_planes(model.logits);
        let scratch = match (scratch, self.changed) {
            (false, _) => None,
            (true, Some(at)) => Some(model.logits_planes(at)),
            (true, None) => {
                // Most servers never need it, and it is as large as the logits.
                let at = self.driver.allocate(model.all_logits_bytes())?;
                self.changed = Some(at);
                Some(model.logits_planes(at))
            }
        };
        let sampling = Sampling {
            words: self.sampling.send(&mut *self.driver, turn, &self.records)?,
            rows: rows as u32,
            logits: &logits,
            scratch: scratch.as_ref(),
            top,
            out: self.chosen.device()?,
        };
        sample::sample(&mut *self.driver, &sampling)?;
        self.chosen.fetch(&mut *self.driver, turn, words)?;
        let step = &mut self.turns.of[turn];
        step.fetch_logits(&mut *self.driver, model.logits, 4 * model.program.head.vocab as u64)?;
        step.close(&mut *self.driver)
    }

    /// Waits for the step and reads what it chose.
    fn read(&mut self, turn: usize, outcomes: &mut Vec<Outcome>) -> Result<(), DriverError> {
        let step = &self.turns.of[turn];
        step.wait(&mut *self.driver)?;
        if step.asked.is_empty() {
            return Ok(());
        }
        let each = sample::result_words(step.top);
        self.records.clear();
        self.records.extend(self.chosen.fetched(&*self.driver, turn)?.take(each * step.asked.len()));
        let answers = step.asked.iter().zip(self.records.chunks_exact(each));
        outcomes.extend(answers.map(|(row, words)| sample::decode(*row, words)));
        Ok(())
    }
}

/// What a failure of a device is to the caller of a backend.
pub(crate) fn failed(error: DriverError) -> BackendError {
    match error {
        DriverError::OutOfMemory { needed_bytes, free_bytes } => BackendError::OutOfMemory {
            what: "a buffer of the CUDA backend",
            needed_bytes,
            reason: format!("{free_bytes} bytes of device memory are free"),
        },
        other => BackendError::Device(other.to_string()),
    }
}

impl Loaded for CudaBackend {
    fn matrix(&self, id: MatrixId) -> Option<(usize, usize)> {
        self.matrices.get(id.0 as usize).map(|matrix| (matrix.rows, matrix.cols))
    }

    fn vector(&self, id: VectorId) -> Option<usize> {
        self.vectors.get(id.0 as usize).map(|vector| vector.len)
    }
}

impl Backend for CudaBackend {
    fn name(&self) -> String {
        format!("cuda/sm_{}", self.driver.info().arch)
    }

    /// With the architecture, whose matrix instructions round in ways of their own, and for each matrix that a library multiplies the
    /// library's version and algorithm.
    fn numerics(&self) -> String {
        let mut text = format!("cuda kernels {NUMERICS} on sm_{}", self.driver.info().arch);
        // What a drafter reads decides nothing of K and V.
        let features =
            self.model.as_ref().and_then(|model| Some((model.program.features?, &model.program.body)));
        let makes_features = |index: usize| {
            features.is_some_and(|(features, body)| {
                let makes = |op: &Op| matches!(op, Op::Linear { weight, out, .. } if *out == features && weight.0 as usize == index);
                body.iter().any(makes)
            })
        };
        for (index, matrix) in self.matrices.iter().enumerate().filter(|(index, _)| !makes_features(*index)) {
            if let Some(algorithm) = matrix.algorithm_of_a_library() {
                text += &format!(", matrix {index} by {} {:x?}", self.library, algorithm.0);
            }
        }
        text
    }

    fn load_matrix(&mut self, name: &str, parts: &[TensorView<'_>]) -> Result<MatrixId, BackendError> {
        check::parts(name, parts, 2, linear::stack)?;
        self.matrices.push(linear::load(&mut *self.driver, name, parts)?);
        Ok(MatrixId(self.matrices.len() as u32 - 1))
    }

    fn make_up_matrix(
        &mut self,
        name: &str,
        encoding: Encoding,
        shape: [usize; 2],
    ) -> Result<Option<MatrixId>, BackendError> {
        let Some(matrix) = linear::make_up(&mut *self.driver, name, encoding, shape)? else {
            return Ok(None);
        };
        self.matrices.push(matrix);
        Ok(Some(MatrixId(self.matrices.len() as u32 - 1)))
    }

    fn load_vector(&mut self, name: &str, parts: &[TensorView<'_>]) -> Result<VectorId, BackendError> {
        check::parts(name, parts, 1, |_, _| true)?;
        let mut values: Vec<f32> = Vec::new();
        for part in parts {
            let dtype = check::plain(name, part)?;
            values.extend(part.bytes.chunks_exact(dtype.size()).map(|bytes| check::to_f32(dtype, bytes)));
        }
        let len = values.len();
        values.resize(len.next_multiple_of(PAD), 0.0);
        let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        let at = self.driver.allocate(bytes.len() as u64).map_err(failed)?;
        self.driver.upload(at, &bytes).map_err(failed)?;
        self.vectors.push(Vector { len, at });
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
        let most = max_rows.max(max_logit_rows);
        linear::adopt(&mut *self.driver, &program, &mut self.matrices, most)?;
        let model =
            Model::new(&mut *self.driver, program, &self.matrices, (max_rows, max_logit_rows, max_position))?;
        let (vocab, hidden) = (model.program.head.vocab, model.hidden.f32_stride as usize);
        let features = model.features().map_or(0, |features| features.f32_stride as usize);
        self.answers = Some(Answers {
            logits: self.driver.allocate_host(4 * (max_logit_rows * vocab) as u64).map_err(failed)?,
            hidden: self.driver.allocate_host(4 * (max_rows * hidden) as u64).map_err(failed)?,
            features: self.driver.allocate_host(4 * (max_rows * features) as u64).map_err(failed)?,
        });
        self.model = Some(model);
        self.graphs.clear();
        Ok(())
    }

    fn allocate_cache(&mut self, layout: &KvLayout, blocks: &[usize]) -> Result<(), BackendError> {
        let model = self.model.as_mut().ok_or_else(|| BackendError::Device("no program is loaded".into()))?;
        check::layout(layout, blocks, &model.program)?;
        let most = self.driver.info().shared_bytes;
        for group in &layout.groups {
            let needs = |format: &KvFormat| attention::least_shared_bytes(*format, group.head_dim);
            if let Some(format) = group.formats.iter().find(|format| needs(format) > most) {
                let (dim, needed) = (group.head_dim, needs(format));
                return Err(BackendError::Device(format!(
                    "attention over heads of {dim} dimensions in {format} needs {needed} bytes of shared memory, this device \
                     has {most}: give another --kv-cache-dtype, or --device cpu"
                )));
            }
        }
        let held = |format: &KvFormat| layout.groups.iter().any(|group| group.formats.contains(format));
        for module in KvFormat::ALL.into_iter().filter(held).filter_map(kernels::of_cache) {
            self.driver.load(module).map_err(failed)?;
        }
        for pool in self.pools.drain(..) {
            pool.free(&mut *self.driver).map_err(failed)?; // gives the old memory back first
        }
        self.on_device.free(&mut *self.driver).map_err(failed)?;
        self.sizes = PoolSize::of(layout, blocks);
        self.tables = BlockTables::new(&self.sizes, model.max_position);
        self.on_device = DeviceTables::new(self.tables.longest());
        for (index, (group, &blocks)) in layout.groups.iter().zip(blocks).enumerate() {
            let start = self.on_device.start(index);
            let pool = KvPool::allocate(&mut *self.driver, group, start, blocks);
            self.pools.push(pool.map_err(failed)?);
        }
        model.prepare_attention(&mut *self.driver, &self.pools).map_err(failed)?;
        self.written = Written::new(blocks);
        self.block_tokens = self.pools.iter().map(|pool| pool.block_tokens).collect();
        self.graphs.clear();
        // What is copied beside the stream finds the blocks zeroed.
        self.driver.synchronize().map_err(failed)?;
        self.copies = Some(self.driver.copies().map_err(failed)?);
        Ok(())
    }

    fn block_memory(&self) -> Option<Arc<dyn BlockMemory>> {
        let copies = self.copies.clone()?;
        let pools = self.pools.iter().map(|pool| (pool.base, pool.blocks, pool.block_bytes));
        Some(Arc::new(DeviceBlocks { copies, pools: pools.collect() }))
    }

    fn forward(&mut self, batch: &Batch) -> Result<&[f32], BackendError> {
        let Some(turn) = self.turns.next().filter(|_| self.turns.none_begun()) else {
            return Err(BackendError::Device("a step that was begun is not finished".into()));
        };
        self.last = 0;
        self.start(batch, turn, 0)?;
        self.finish(batch).map_err(failed)?;
        let (Some(model), Some(answers)) = (&self.model, &self.answers) else { return Ok(&[]) };
        let logits = floats(self.driver.host(answers.logits));
        Ok(&logits[..batch.logit_rows.len() * model.program.head.vocab])
    }

    fn samples(&self) -> Option<u32> {
        let vocabulary = self.model.as_ref().map_or(0, |model| model.program.head.vocab);
        (vocabulary < sample::VOCABULARY_MAX).then_some(sample::TOP_MAX)
    }

    fn begin_and_sample(
        &mut self,
        batch: &Batch,
        rows: &mut dyn ExactSizeIterator<Item = SampleRow<'_>>,
    ) -> Result<(), BackendError> {
        if rows.len() != batch.logit_rows.len() {
            let (asked, wanted) = (rows.len(), batch.logit_rows.len());
            return Err(BackendError::Batch(format!("{asked} rows to sample of {wanted} rows of logits")));
        }
        let Some(turn) = self.turns.next() else {
            return Err(BackendError::Device("two steps are under way".into()));
        };
        let chosen = std::mem::take(&mut self.last);
        let started = self.start(batch, turn, chosen);
        if let Err(error) = started.and_then(|()| self.choose(rows, turn).map_err(failed)) {
            // What was asked for may still read this turn's memory, which the next step gets.
            let _ = self.driver.synchronize();
            return Err(error);
        }
        self.last = batch.logit_rows.len();
        self.turns.begin();
        Ok(())
    }

    fn finish_sampled(&mut self, outcomes: &mut Vec<Outcome>) -> Result<(), BackendError> {
        let Some(turn) = self.turns.finish() else {
            return Err(BackendError::Device("no step was begun".into()));
        };
        self.read(turn, outcomes).map_err(failed)
    }

    fn sampled_logits(&self, row: u32) -> &[f32] {
        let bytes = self.model.as_ref().map_or(0, |model| 4 * model.program.head.vocab);
        self.turns.finished().logits(&*self.driver, row as usize, bytes).map_or(&[], floats)
    }

    fn hidden(&self, row: u32) -> &[f32] {
        let (Some(model), Some(answers)) = (&self.model, &self.answers) else { return &[] };
        let Ok(index) = self.hidden_rows.binary_search(&row) else { return &[] };
        let (stride, width) = (model.hidden.f32_stride as usize, model.hidden.width as usize);
        &floats(self.driver.host_bytes(answers.hidden))[index * stride..][..width]
    }

    fn features(&self, row: u32) -> &[f32] {
        let features = self.model.as_ref().and_then(Model::features);
        let (Some(features), Some(answers)) = (features, &self.answers) else { return &[] };
        let Ok(index) = self.feature_rows.binary_search(&row) else { return &[] };
        let (stride, width) = (features.f32_stride as usize, features.width as usize);
        &floats(self.driver.host_bytes(answers.features))[index * stride..][..width]
    }

    fn weight_bytes(&self) -> u64 {
        let matrices: u64 = self.matrices.iter().map(|matrix| matrix.bytes).sum();
        let vectors: usize = self.vectors.iter().map(|v| v.len.next_multiple_of(PAD) * 4).sum();
        matrices + vectors as u64
    }
}
