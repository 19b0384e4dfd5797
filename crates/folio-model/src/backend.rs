//! The seam between the decoder and a device.
//!
//! Owns: the contract. A backend packs weights, holds the KV bytes, and executes a [`Program`] over a [`Batch`]. Must
//! never: see a request, a tenant or a tokenizer. Everything here is plain data, so that a batch can be printed,
//! recorded and replayed.

pub use crate::kv_format::KvFormat;
use std::sync::Arc;

use crate::adapter::Adapter;
use crate::program::{EmbeddingInput, MatrixId, Program, VectorId};
use crate::quant::Encoding;
use crate::sampling::{Outcome, SampleRow};

/// Element type of a checkpoint tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DType {
    F32,
    F16,
    BF16,
}

impl DType {
    /// Bytes per element.
    pub const fn size(self) -> usize {
        match self {
            DType::F32 => 4,
            DType::F16 | DType::BF16 => 2,
        }
    }
}

/// A row-major tensor as it lies in the checkpoint (memory-mapped; little endian, possibly unaligned).
#[derive(Clone, Copy, Debug)]
pub struct TensorView<'a> {
    pub encoding: Encoding,
    /// `[rows]` or `[rows, cols]`.
    pub shape: &'a [usize],
    pub bytes: &'a [u8],
    /// Of a matrix whose columns are stored in an order of their own (GPTQ's act-order): stored column `j` is the model's
    /// column `order[j]`. A permutation of `0..cols`; `None` is the model's order.
    pub order: Option<&'a [u32]>,
}

impl TensorView<'_> {
    /// Whether [`TensorView::order`] is absent, or a permutation of the columns of this matrix.
    pub fn order_fits(&self) -> bool {
        let Some(order) = self.order else { return true };
        let [_, cols] = *self.shape else { return false };
        let mut seen = vec![false; cols];
        let fresh =
            |column: &u32| seen.get_mut(*column as usize).is_some_and(|seen| !std::mem::replace(seen, true));
        order.len() == cols && order.iter().all(fresh)
    }
}

/// How long the layers of a cache group need what they stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum GroupKind {
    /// Every position, as long as the sequence lives.
    Full,
    /// A query at position `p` reads positions `p - tokens + 1 ..= p`; what lies behind is released.
    Window { tokens: u32 },
    /// Every position likewise, one vector of `head_dim` values per token instead of K and V per head: the key of all heads, and in its
    /// first `rank` values what they attend to ([`crate::program::LatentSpec`]).
    Latent { rank: u32 },
    /// What recurrent layers keep of all positions so far: `values` numbers in f32 per layer ([`crate::program::StatePlace`] says where
    /// in it). A block holds the state behind the last of its positions that was computed.
    State { values: usize },
}

impl GroupKind {
    /// Whether a layer with this window (`None`: all positions) may store its K and V here.
    pub fn holds(self, window: Option<u32>) -> bool {
        match self {
            GroupKind::Full => true,
            GroupKind::Window { tokens } => window.is_some_and(|window| window <= tokens),
            GroupKind::Latent { .. } | GroupKind::State { .. } => false,
        }
    }
}

/// Layers that share geometry and lifetime: one block of the group's own pool holds a block of tokens of all of them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KvGroup {
    pub kind: GroupKind,
    /// Tokens of a block: a multiple of 8, and of those of group 0.
    pub block_tokens: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    /// One per layer of the group; f32 of each that keeps a state, which has no heads.
    pub formats: Vec<KvFormat>,
}

impl KvGroup {
    pub fn layers(&self) -> usize {
        self.formats.len()
    }

    /// Values of the state of a layer, where that is what the group holds.
    pub fn state_values(&self) -> Option<usize> {
        match self.kind {
            GroupKind::State { values } => Some(values),
            _ => None,
        }
    }

    /// Whether keys are latents, and hold values.
    pub fn is_latent(&self) -> bool {
        matches!(self.kind, GroupKind::Latent { .. })
    }

    /// Vectors of a token and head: K and V, or one latent; of a state none.
    pub fn vectors(&self) -> usize {
        match self.kind {
            GroupKind::Full | GroupKind::Window { .. } => 2,
            GroupKind::Latent { .. } => 1,
            GroupKind::State { .. } => 0,
        }
    }

    /// Bytes of K and V of one token over all layers of the group; of a state, which does not grow, none.
    pub fn bytes_per_token(&self) -> usize {
        let head = |format: &KvFormat| format.bytes_per_head(self.head_dim);
        self.vectors() * self.kv_heads * self.formats.iter().map(head).sum::<usize>()
    }

    pub fn bytes_per_block(&self) -> usize {
        match self.state_values() {
            Some(values) => self.layers() * values * size_of::<f32>(),
            None => self.bytes_per_token() * self.block_tokens,
        }
    }
}

/// What the KV cache of a model is made of.
///
/// Invariant: the first group keeps every position, [`GroupKind::Full`] or [`GroupKind::Latent`], and no other is of either kind. It is
/// also what the prefix index indexes, so it exists, without layers, where every layer has a window.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KvLayout {
    pub groups: Vec<KvGroup>,
}

/// In a block table: a block behind the window, released. Nothing reads it.
pub const HOLE: u32 = u32::MAX;

impl KvLayout {
    /// One group of full attention, every layer alike.
    pub fn full(
        layers: usize,
        kv_heads: usize,
        head_dim: usize,
        format: KvFormat,
        block_tokens: usize,
    ) -> Self {
        let formats = vec![format; layers];
        let group = KvGroup { kind: GroupKind::Full, block_tokens, kv_heads, head_dim, formats };
        Self { groups: vec![group] }
    }

    /// Tokens of a block of the first group.
    pub fn block_tokens(&self) -> usize {
        self.groups.first().map_or(0, |group| group.block_tokens)
    }

    /// Bytes of K and V of one token over all layers of all groups.
    pub fn bytes_per_token(&self) -> usize {
        self.groups.iter().map(KvGroup::bytes_per_token).sum()
    }
}

/// Rows `first_row .. first_row + rows` of the batch are consecutive positions of one sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    pub first_row: u32,
    pub rows: u32,
    /// Absolute position of the first row; the KV of all positions before it is already in the cache.
    pub first_position: u32,
    /// Of its block tables, one per cache group, which the backend keeps; each covers at least `first_position + rows` tokens.
    pub slot: u32,
    /// Rows from this position on may be taken back, `u32::MAX`: none. In a state group each of them leaves its state in a block of
    /// its own, in order behind those of the positions before; other layouts need no such thing.
    pub tentative_from: u32,
}

impl Span {
    /// Entry of the block table of a state group, in blocks of `block_tokens`, of the block that holds the state behind `position`.
    pub fn state_entry(&self, position: u32, block_tokens: u32) -> u32 {
        match position.checked_sub(self.tentative_from) {
            Some(row) => self.tentative_from.div_ceil(block_tokens) + row,
            None => position / block_tokens,
        }
    }
}

/// What changed in the block table of a slot and cache group: `blocks_len` entries from entry `start` on are those of
/// [`Batch::blocks`] from `blocks_start` on, and the table has `len` entries afterwards. Other entries stay as they were.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TableEdit {
    pub slot: u32,
    pub group: u32,
    pub start: u32,
    pub blocks_start: u32,
    pub blocks_len: u32,
    pub len: u32,
}

impl TableEdit {
    /// Replaces the table.
    pub const fn whole(slot: u32, group: u32, blocks_start: u32, blocks_len: u32) -> Self {
        Self { slot, group, start: 0, blocks_start, blocks_len, len: blocks_len }
    }

    /// The new entries in [`Batch::blocks`].
    pub fn range(&self) -> std::ops::Range<usize> {
        let start = self.blocks_start as usize;
        start..start + self.blocks_len as usize
    }
}

/// `tokens` first positions of block `from` of a cache group are copied to its block `to` before the step (copy-on-write). A state is
/// copied as a whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockCopy {
    pub group: u32,
    pub from: u32,
    pub to: u32,
    pub tokens: u32,
}

/// In [`Batch::tokens`], with the index of a row of logits: the token that was chosen from that row in the step begun before, which may
/// still run ([`Backend::begin_and_sample`]). Where none could be chosen, any token.
pub const PLACEHOLDER: u32 = 1 << 31;

/// Rows `first_row .. first_row + rows` of the batch have embeddings of their own, whatever their tokens are: of `values`, `[_, width]`,
/// those from number `first` on.
#[derive(Clone, Debug, PartialEq)]
pub struct RowEmbeddings {
    pub first_row: u32,
    pub rows: u32,
    pub first: u32,
    pub values: Arc<[f32]>,
}

/// Where rows `first_row .. first_row + rows` of the batch stand on the axes of rotary embeddings.
#[derive(Clone, Debug, PartialEq)]
pub struct RowPositions {
    pub first_row: u32,
    pub rows: u32,
    pub axes: Axes,
}

/// Positions on three axes: time, height and width.
#[derive(Clone, Debug, PartialEq)]
pub enum Axes {
    /// On all of them so far from their positions in the sequence.
    Shifted(i32),
    /// Those of `values` from number `first` on.
    Each { first: u32, values: Arc<[[u32; 3]]> },
}

impl RowPositions {
    /// Of row `row`, which is one of these and is at `position` of its sequence.
    pub fn at(&self, row: u32, position: u32) -> [u32; 3] {
        match &self.axes {
            Axes::Shifted(by) => [position.wrapping_add_signed(*by); 3],
            Axes::Each { first, values } => values[(first + row - self.first_row) as usize],
        }
    }
}

/// One step's work. Flat vectors, reused between steps.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Batch {
    /// Token id of each row, or [`PLACEHOLDER`].
    pub tokens: Vec<u32>,
    /// In row order; covers every row exactly once. A sequence may appear once per step.
    pub spans: Vec<Span>,
    /// What is added to the products of each span's rows, of a backend that can ([`Backend::serves_adapters`]). Empty: nothing anywhere.
    pub adapters: Vec<Option<Arc<Adapter>>>,
    /// What changed in block tables since the batch before, in order. After an error a backend may have taken over some of it.
    pub edits: Vec<TableEdit>,
    /// New entries of block tables.
    pub blocks: Vec<u32>,
    /// Rows whose logits are wanted, ascending.
    pub logit_rows: Vec<u32>,
    /// Rows whose hidden state after the final norm is wanted, ascending; see [`Backend::hidden`].
    pub hidden_rows: Vec<u32>,
    /// Rows whose features are wanted, ascending; see [`Backend::features`].
    pub feature_rows: Vec<u32>,
    /// `[rows, width]`: what each row is given beside its token, of a program that takes that ([`Program::input_width`]).
    pub features: Vec<f32>,
    /// Rows with embeddings of their own, in order, of a program that takes some ([`Backend::embedding_input`]).
    pub embeddings: Vec<RowEmbeddings>,
    /// Rows whose positions on the axes of rotary embeddings are not those in their sequence, in order; likewise.
    pub positions: Vec<RowPositions>,
    /// Performed before anything else, in list order.
    pub copies: Vec<BlockCopy>,
}

impl Batch {
    /// Entries `start ..` of the block table of a slot and cache group are `blocks`.
    pub fn edit_table(&mut self, slot: u32, group: u32, start: u32, blocks: impl IntoIterator<Item = u32>) {
        let blocks_start = self.blocks.len() as u32;
        self.blocks.extend(blocks);
        let blocks_len = self.blocks.len() as u32 - blocks_start;
        self.edits.push(TableEdit { slot, group, start, blocks_start, blocks_len, len: start + blocks_len });
    }

    /// Where a row, which is at `position` of its sequence, stands on the axes of rotary embeddings.
    pub fn axes(&self, row: u32, position: u32) -> [u32; 3] {
        let has = |of: &&RowPositions| (of.first_row..of.first_row + of.rows).contains(&row);
        self.positions.iter().find(has).map_or([position; 3], |of| of.at(row, position))
    }

    /// Empties the batch and keeps its memory.
    pub fn clear(&mut self) {
        self.clear_rows();
        self.edits.clear();
        self.blocks.clear();
    }

    /// The same but for the edits of block tables: no backend has taken them over.
    pub fn clear_rows(&mut self) {
        self.tokens.clear();
        self.spans.clear();
        self.adapters.clear();
        self.logit_rows.clear();
        self.hidden_rows.clear();
        self.feature_rows.clear();
        self.features.clear();
        self.embeddings.clear();
        self.positions.clear();
        self.copies.clear();
    }
}

#[derive(Debug, thiserror::Error)]
pub enum BackendError {
    #[error("out of memory: {what} needs {needed_bytes} bytes: {reason}")]
    OutOfMemory { what: &'static str, needed_bytes: u64, reason: String },
    #[error("matrix {name} has shape {shape:?}, which this backend cannot hold: {reason}")]
    Shape { name: String, shape: Vec<usize>, reason: String },
    #[error("the batch is malformed: {0}")]
    Batch(String),
    #[error("the device failed: {0}")]
    Device(String),
}

/// See [`BlockMemory::host_buffer`].
pub trait HostBuffer: Send + Sync {
    fn bytes(&self) -> &[u8];

    fn bytes_mut(&mut self) -> &mut [u8];
}

impl HostBuffer for Vec<u8> {
    fn bytes(&self) -> &[u8] {
        self
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        self
    }
}

/// The blocks of all pools as bytes, for threads beside the steps that carry them to a tier and back. What they mean is the backend's
/// business ([`Backend::numerics`] tells who can read them).
///
/// Nothing orders this with steps but the cache's holds: who reads a block has leased it, which no step writes; who writes one has it
/// under a ticket, which no step touches, and begins when the last step that was planned before the ticket is over.
pub trait BlockMemory: Send + Sync {
    /// Zeroed memory of the host that nobody else has, and that [`BlockMemory::read`] and [`BlockMemory::write`] copy at the best rate there
    /// is. It may take longer to get and to give back than other memory: for who keeps it.
    fn host_buffer(&self, bytes: usize) -> Arc<dyn HostBuffer> {
        Arc::new(vec![0; bytes])
    }

    /// Of one block of a group: all of its layers, in one piece.
    fn block_bytes(&self, group: usize) -> usize;

    /// `into`: as long as the block.
    fn read(&self, group: usize, block: u32, into: &mut [u8]);

    /// `from`: as long as the block.
    fn write(&self, group: usize, block: u32, from: &[u8]);
}

/// A device that runs the decoder. Implemented by `folio-cpu`.
///
/// Call order: `load_*` any number of times, `load_program` once, `allocate_cache` once, then `forward` for ever.
pub trait Backend: Send {
    /// Short name for logs and metrics: "cpu/avx2", "cpu/scalar".
    fn name(&self) -> String;

    /// What decides the bits of cached K and V here, given the program and the weights: the backend, the version of its kernels'
    /// arithmetic, and every choice that was made between products that differ in bits. Never what changes none: an instruction set,
    /// threads, the size of a pool, graphs. Asked after [`Backend::load_program`].
    fn numerics(&self) -> String;

    /// Packs a matrix `[sum of part rows, cols]`: the parts are stacked along rows (fused qkv, fused gate-up). All parts have
    /// the same number of columns and, where one of them is plain, the same encoding: only block formats mix, as they do in
    /// GGUF files (a backend may refuse to mix floats and integers). All have the same [`TensorView::order`]. `name` is for
    /// errors.
    fn load_matrix(&mut self, name: &str, parts: &[TensorView<'_>]) -> Result<MatrixId, BackendError>;

    /// Makes up a matrix `[rows, cols]` as [`dummy::values`](crate::dummy::values) defines it, where the device can do that itself.
    /// `None`: it cannot, and the caller gives the values to [`Backend::load_matrix`].
    fn make_up_matrix(
        &mut self,
        _name: &str,
        _encoding: Encoding,
        _shape: [usize; 2],
    ) -> Result<Option<MatrixId>, BackendError> {
        Ok(None)
    }

    /// Concatenates vectors, converted to f32.
    fn load_vector(&mut self, name: &str, parts: &[TensorView<'_>]) -> Result<VectorId, BackendError>;

    /// Fixes what [`Backend::forward`] computes and sizes the buffers for at most `max_rows` rows a step and
    /// `max_logit_rows` rows of logits. `max_position` bounds the rotary tables.
    fn load_program(
        &mut self,
        program: Program,
        max_rows: usize,
        max_logit_rows: usize,
        max_position: usize,
    ) -> Result<(), BackendError>;

    /// Allocates zeroed KV blocks: `blocks[g]` of group `g`.
    fn allocate_cache(&mut self, layout: &KvLayout, blocks: &[usize]) -> Result<(), BackendError>;

    /// What [`Backend::allocate_cache`] allocated, for copies beside the steps. `None`: this backend cannot.
    fn block_memory(&self) -> Option<Arc<dyn BlockMemory>> {
        None
    }

    /// Whether batches may have [`Batch::adapters`].
    fn serves_adapters(&self) -> bool {
        false
    }

    /// What batches may give rows of the loaded program in place of embeddings; `None`: nothing.
    fn embedding_input(&self) -> Option<EmbeddingInput> {
        None
    }

    /// Runs the program. Returns logits `[batch.logit_rows.len(), vocab]`, row-major, in the order of `logit_rows`.
    fn forward(&mut self, batch: &Batch) -> Result<&[f32], BackendError>;

    /// As `forward`, and calls `job` with each of `0..jobs` and the logits, once each, on the threads that this backend computes with, where
    /// it has any. No job may wait for another.
    fn forward_and(
        &mut self,
        batch: &Batch,
        jobs: usize,
        job: &(dyn Fn(usize, &[f32]) + Sync),
    ) -> Result<(), BackendError> {
        let logits = self.forward(batch)?;
        (0..jobs).for_each(|index| job(index, logits));
        Ok(())
    }

    /// Most alternatives that [`Backend::begin_and_sample`] gives log probabilities of; `None`: this backend does not sample.
    fn samples(&self) -> Option<u32> {
        None
    }

    /// As `forward`, but of each of the batch's rows of logits comes what `rows` asks, in order, instead of the logits, and that from
    /// [`Backend::finish_sampled`]. Has taken what it needs of its arguments when it returns; after an error nothing was begun. At most
    /// two steps are begun and not finished, and with one of those nothing else is asked but the second. Asked only of a backend that
    /// [`Backend::samples`].
    fn begin_and_sample(
        &mut self,
        _batch: &Batch,
        _rows: &mut dyn ExactSizeIterator<Item = SampleRow<'_>>,
    ) -> Result<(), BackendError> {
        Err(BackendError::Device(format!("{} does not sample", self.name())))
    }

    /// Waits for the older of the steps that were begun and adds an outcome for each of its rows; it is finished even where this is an
    /// error.
    fn finish_sampled(&mut self, _outcomes: &mut Vec<Outcome>) -> Result<(), BackendError> {
        Err(BackendError::Device(format!("{} does not sample", self.name())))
    }

    /// Of the step that [`Backend::finish_sampled`] waited for last, the logits, `[vocab]`, of row `row` of its rows of logits, of which
    /// [`Choice::Logits`](crate::sampling::Choice::Logits) was asked. Until the next step is begun; of any other row it is anything.
    fn sampled_logits(&self, _row: u32) -> &[f32] {
        &[]
    }

    /// The hidden state after the final norm, `[hidden]`, of row `row` of the last batch, whose step is finished, which was one of its
    /// `hidden_rows`. Of any other row it is anything.
    fn hidden(&self, row: u32) -> &[f32];

    /// What [`Program::features`] holds of row `row` of the last batch, whose step is finished, which was one of its `feature_rows`. Of any
    /// other row, and of one of its `hidden_rows` where both are one buffer, it is anything.
    fn features(&self, _row: u32) -> &[f32] {
        &[]
    }

    /// Bytes held for weights, for the accounting printed at start.
    fn weight_bytes(&self) -> u64;
}
