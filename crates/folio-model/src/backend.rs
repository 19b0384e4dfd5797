//! The seam between the decoder and a device.
//!
//! Owns: the contract. A backend packs weights, holds the KV bytes, and executes a [`Program`] over a [`Batch`]. Must
//! never: see a request, a tenant or a tokenizer. Everything here is plain data, so that a batch can be printed,
//! recorded and replayed.

use crate::program::Program;
use crate::program::{MatrixId, VectorId};
use crate::quant::Encoding;

/// Element type of a checkpoint tensor or of the KV cache.
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

/// Geometry of the one cache group there is today: full attention, every layer alike.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvLayout {
    pub layers: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub dtype: DType,
    /// Tokens per block; a multiple of 8.
    pub block_tokens: usize,
}

impl KvLayout {
    /// Bytes of K and V of one token over all layers.
    pub const fn bytes_per_token(&self) -> usize {
        2 * self.layers * self.kv_heads * self.head_dim * self.dtype.size()
    }
    /// Bytes of one block over all layers.
    pub const fn bytes_per_block(&self) -> usize {
        self.bytes_per_token() * self.block_tokens
    }
}

/// Rows `first_row .. first_row + rows` of the batch are consecutive positions of one sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    pub first_row: u32,
    pub rows: u32,
    /// Absolute position of the first row; the KV of all positions before it is already in the cache.
    pub first_position: u32,
    /// Range into [`Batch::blocks`]: the block table of this sequence, covering at least `first_position + rows` tokens.
    pub blocks_start: u32,
    pub blocks_len: u32,
}

/// `tokens` first positions of block `from` are copied to block `to` before the step (copy-on-write).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockCopy {
    pub from: u32,
    pub to: u32,
    pub tokens: u32,
}

/// One step's work. Flat vectors, reused between steps.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Batch {
    /// Token id of each row.
    pub tokens: Vec<u32>,
    /// In row order; covers every row exactly once. A sequence may appear once per step.
    pub spans: Vec<Span>,
    /// Concatenated block tables.
    pub blocks: Vec<u32>,
    /// Rows whose logits are wanted, ascending.
    pub logit_rows: Vec<u32>,
    /// Performed before anything else.
    pub copies: Vec<BlockCopy>,
}

impl Batch {
    /// Empties the batch and keeps its memory.
    pub fn clear(&mut self) {
        self.tokens.clear();
        self.spans.clear();
        self.blocks.clear();
        self.logit_rows.clear();
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

/// A device that runs the decoder. Implemented by `folio-cpu`.
///
/// Call order: `load_*` any number of times, `load_program` once, `allocate_cache` once, then `forward` for ever.
pub trait Backend: Send {
    /// Short name for logs and metrics: "cpu/avx2", "cpu/scalar".
    fn name(&self) -> String;

    /// Packs a matrix `[sum of part rows, cols]`: the parts are stacked along rows (fused qkv, fused gate-up). All parts have
    /// the same number of columns and, where one of them is plain, the same encoding: only block formats mix, as they do in
    /// GGUF files (a backend may refuse to mix floats and integers). All have the same [`TensorView::order`]. `name` is for
    /// errors.
    fn load_matrix(&mut self, name: &str, parts: &[TensorView<'_>]) -> Result<MatrixId, BackendError>;

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

    /// Allocates `blocks` zeroed KV blocks.
    fn allocate_cache(&mut self, layout: KvLayout, blocks: usize) -> Result<(), BackendError>;

    /// Runs the program. Returns logits `[batch.logit_rows.len(), vocab]`, row-major, in the order of `logit_rows`.
    fn forward(&mut self, batch: &Batch) -> Result<&[f32], BackendError>;

    /// Bytes held for weights, for the accounting printed at start.
    fn weight_bytes(&self) -> u64;
}
