//! A device that remembers instead of multiplying: its logits are a hash of everything read through the block table.
//!
//! The KV "value" of a position is a hash of its token, its absolute position and all values before it, as in a real
//! model, where keys and values of deeper layers depend on the whole context. Logits hash every value up to the row,
//! each read back from simulated memory through the block table. So a wrong block, a lost or misordered copy, a stale or
//! foreign content, a missing position: each gives other logits, and soon another token than the oracle's.

use folio_model::backend::{Backend, BackendError, Batch, KvLayout, TensorView};
use folio_model::program::{MatrixId, Program, VectorId};

use crate::rng::mix;

/// The context hash before the first position.
pub const EMPTY: u64 = 0x00f0_110f_0110_f011;

/// The value written for `token` at `position` after a context.
pub fn value(context: u64, token: u32, position: u32) -> u64 {
    // Never zero: zero is unwritten memory.
    mix(context ^ mix(u64::from(token) << 32 | u64::from(position))) | 1
}

/// The context after reading one more value.
pub fn extend(context: u64, value: u64) -> u64 {
    mix(context.rotate_left(17) ^ value)
}

/// The row of logits after a context: coarse, so that ties happen.
pub fn logits(context: u64, vocab: usize, out: &mut Vec<f32>) {
    out.extend((0..vocab as u64).map(|token| (mix(context ^ token) >> 56) as f32 / 16.0 - 8.0));
}

/// See the module documentation.
pub struct SimBackend {
    vocab: usize,
    block_tokens: usize,
    memory: Vec<u64>,
    logits: Vec<f32>,
    max_rows: usize,
    max_logit_rows: usize,
}

impl SimBackend {
    pub fn new(
        vocab: usize,
        blocks: usize,
        block_tokens: usize,
        max_rows: usize,
        max_logit_rows: usize,
    ) -> Self {
        Self {
            vocab,
            block_tokens,
            memory: vec![0; blocks * block_tokens],
            logits: Vec::new(),
            max_rows,
            max_logit_rows,
        }
    }

    fn slot(&self, table: &[u32], position: u32) -> Result<usize, BackendError> {
        let block = table.get(position as usize / self.block_tokens);
        let slot =
            block.map(|block| *block as usize * self.block_tokens + position as usize % self.block_tokens);
        slot.filter(|slot| *slot < self.memory.len())
            .ok_or_else(|| BackendError::Batch(format!("position {position} is outside of the block table")))
    }

    fn read(&self, table: &[u32], position: u32) -> Result<u64, BackendError> {
        match self.memory[self.slot(table, position)?] {
            0 => Err(BackendError::Device(format!("position {position} was read and never written"))),
            value => Ok(value),
        }
    }

    fn check(&self, batch: &Batch) -> Result<(), BackendError> {
        if batch.tokens.len() > self.max_rows || batch.logit_rows.len() > self.max_logit_rows {
            let (rows, logit_rows) = (batch.tokens.len(), batch.logit_rows.len());
            return Err(BackendError::Batch(format!(
                "{rows} rows and {logit_rows} rows of logits are too many"
            )));
        }
        if !batch.logit_rows.is_sorted_by(|a, b| a < b) {
            return Err(BackendError::Batch("logit rows must ascend".into()));
        }
        Ok(())
    }
}

impl Backend for SimBackend {
    fn name(&self) -> String {
        "sim".into()
    }

    fn load_matrix(&mut self, _name: &str, _parts: &[TensorView<'_>]) -> Result<MatrixId, BackendError> {
        Ok(MatrixId(0))
    }

    fn load_vector(&mut self, _name: &str, _parts: &[TensorView<'_>]) -> Result<VectorId, BackendError> {
        Ok(VectorId(0))
    }

    fn load_program(
        &mut self,
        _program: Program,
        max_rows: usize,
        max_logit_rows: usize,
        _max_position: usize,
    ) -> Result<(), BackendError> {
        (self.max_rows, self.max_logit_rows) = (max_rows, max_logit_rows);
        Ok(())
    }

    fn allocate_cache(&mut self, layout: &KvLayout, blocks: &[usize]) -> Result<(), BackendError> {
        let [blocks] = *blocks else {
            return Err(BackendError::Device(format!("one cache group is modelled, not {}", blocks.len())));
        };
        self.block_tokens = layout.block_tokens;
        self.memory = vec![0; blocks * layout.block_tokens];
        Ok(())
    }

    fn forward(&mut self, batch: &Batch) -> Result<&[f32], BackendError> {
        self.check(batch)?;
        for copy in &batch.copies {
            let (from, to) = (copy.from as usize * self.block_tokens, copy.to as usize * self.block_tokens);
            self.memory.copy_within(from..from + copy.tokens as usize, to);
        }
        self.logits.clear();
        let mut wanted = batch.logit_rows.iter().copied().peekable();
        for span in &batch.spans {
            let table = &batch.blocks[span.table(0)];
            let mut context = EMPTY;
            for position in 0..span.first_position {
                context = extend(context, self.read(table, position)?);
            }
            for row in span.first_row..span.first_row + span.rows {
                let position = span.first_position + row - span.first_row;
                let slot = self.slot(table, position)?;
                self.memory[slot] = value(context, batch.tokens[row as usize], position);
                context = extend(context, self.read(table, position)?);
                if wanted.next_if_eq(&row).is_some() {
                    logits(context, self.vocab, &mut self.logits);
                }
            }
        }
        Ok(&self.logits)
    }

    fn weight_bytes(&self) -> u64 {
        0
    }
}
