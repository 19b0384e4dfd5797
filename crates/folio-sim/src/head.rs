//! A modelled EAGLE-3 head: from the features of the row before and a token it knows what a [`SimBackend`](crate::SimBackend) knows.
//!
//! Right features make it say what the model will say, and its own features are the model's of the next row; any others, of another row or
//! of none, make it say something else. What it writes is told by the features, too, and whatever its context should hold must have been written
//! since, so that a missing row shows: it refuses to go on. Rows without features (zeros) are as good as any there.

use folio_model::backend::{Backend, BackendError, Batch, KvLayout, TensorView};
use folio_model::check::PoolSize;
use folio_model::program::{MatrixId, Program, VectorId};
use folio_model::tables::BlockTables;

use crate::backend::{FEATURES, extend, features, logits, value};

/// See the module documentation.
pub struct HeadBackend {
    vocab: usize,
    pool: PoolSize,
    /// `[blocks * block_tokens]`, 0 where nothing was ever written.
    cells: Vec<u64>,
    tables: BlockTables,
    logits: Vec<f32>,
    features: Vec<[f32; FEATURES]>,
    max_rows: usize,
    /// What it is not to be asked is a panic: whoever asked would go on without it.
    strict: bool,
}

impl HeadBackend {
    pub fn new(vocab: usize, blocks: usize, block_tokens: usize, max_rows: usize) -> Self {
        let pool = PoolSize { blocks, block_tokens, is_state: false };
        Self {
            vocab,
            pool,
            cells: vec![0; blocks * block_tokens],
            tables: BlockTables::new(&[pool], blocks * block_tokens),
            logits: Vec::new(),
            features: Vec::new(),
            max_rows,
            strict: false,
        }
    }

    /// Of which nothing wrong is asked.
    pub fn strict(mut self) -> Self {
        self.strict = true;
        self
    }

    fn cell(&self, slot: u32, position: u32) -> Result<usize, BackendError> {
        let tokens = self.pool.block_tokens;
        let block = self.tables.table(slot, 0).get(position as usize / tokens);
        let block = block.filter(|block| (**block as usize) < self.pool.blocks);
        let outside = || BackendError::Batch(format!("position {position} is outside of the block table"));
        Ok(*block.ok_or_else(outside)? as usize * tokens + position as usize % tokens)
    }
}

/// The context and the position that features tell.
fn told(features: &[f32]) -> (u64, u32) {
    let pieces =
        |range: std::ops::Range<usize>| range.rev().fold(0u64, |value, at| value << 16 | features[at] as u64);
    (pieces(0..4), pieces(4..6) as u32)
}

impl Backend for HeadBackend {
    fn name(&self) -> String {
        "sim head".into()
    }

    fn numerics(&self) -> String {
        self.name()
    }

    fn load_matrix(&mut self, _name: &str, _parts: &[TensorView<'_>]) -> Result<MatrixId, BackendError> {
        Ok(MatrixId(0))
    }

    fn load_vector(&mut self, _name: &str, _parts: &[TensorView<'_>]) -> Result<VectorId, BackendError> {
        Ok(VectorId(0))
    }

    fn load_program(&mut self, _: Program, _: usize, _: usize, _: usize) -> Result<(), BackendError> {
        Ok(())
    }

    fn allocate_cache(&mut self, _layout: &KvLayout, _blocks: &[usize]) -> Result<(), BackendError> {
        Ok(())
    }

    fn forward(&mut self, batch: &Batch) -> Result<&[f32], BackendError> {
        if let Err(error) = self.compute(batch) {
            assert!(!self.strict, "{error}: {batch:?}");
            return Err(error);
        }
        Ok(&self.logits)
    }

    fn hidden(&self, _row: u32) -> &[f32] {
        &[]
    }

    fn features(&self, row: u32) -> &[f32] {
        self.features.get(row as usize).map_or(&[], |row| row)
    }

    fn weight_bytes(&self) -> u64 {
        0
    }
}

impl HeadBackend {
    fn compute(&mut self, batch: &Batch) -> Result<(), BackendError> {
        let rows = batch.tokens.len();
        if rows > self.max_rows || batch.features.len() != rows * FEATURES {
            let given = batch.features.len();
            return Err(BackendError::Batch(format!("{rows} rows with {given} features")));
        }
        self.tables.apply(batch, &[self.pool]).map_err(BackendError::Batch)?;
        for copy in &batch.copies {
            let tokens = self.pool.block_tokens;
            let (from, to) = (copy.from as usize * tokens, copy.to as usize * tokens);
            self.cells.copy_within(from..from + copy.tokens as usize, to);
        }
        self.logits.clear();
        self.features.clear();
        for span in &batch.spans {
            for position in 0..span.first_position {
                if self.cells[self.cell(span.slot, position)?] == 0 {
                    let what = format!("position {position} was read and never written");
                    return Err(BackendError::Device(what));
                }
            }
            for row in span.first_row..span.first_row + span.rows {
                let given = &batch.features[row as usize * FEATURES..][..FEATURES];
                let ((context, position), token) = (told(given), batch.tokens[row as usize]);
                let value = value(context, token, position + 1);
                let cell = self.cell(span.slot, span.first_position + row - span.first_row)?;
                self.cells[cell] = value;
                let context = extend(context, value);
                if batch.logit_rows.binary_search(&row).is_ok() {
                    logits(context, self.vocab, &mut self.logits);
                }
                self.features.push(features(context, position + 1));
            }
        }
        Ok(())
    }
}
