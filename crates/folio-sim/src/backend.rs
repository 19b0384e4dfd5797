//! A device that remembers instead of multiplying: its logits are a hash of everything read through the block table.
//!
//! The KV "value" of a position is a hash of its token, its absolute position and all values before it, as in a real
//! model, where keys and values of deeper layers depend on the whole context. Logits hash every value up to the row,
//! each read back from simulated memory through the block table. So a wrong block, a lost or misordered copy, a stale or
//! foreign content, a missing position: each gives other logits, and soon another token than the oracle's.
//!
//! A window group has values of its own. A row writes its own and reads those of its window, and what it read enters the
//! value it writes to group 0: what went wrong in a window is never forgotten. Reading a hole is an error. A state is the value of all
//! states before it. An optional group holds what follows from group 0: what is there must be right, and nothing need be there.

use folio_kv::{GroupConfig, Layout};
use folio_model::backend::{
    Backend, BackendError, Batch, GroupKind, HOLE, KvGroup, KvLayout, Span, TensorView,
};
use folio_model::check::PoolSize;
use folio_model::program::{MatrixId, Program, VectorId};
use folio_model::sampling::{Outcome, SampleRow};
use folio_model::tables::BlockTables;

use crate::memory::{GroupMemory, Memory, block_cells, copy_blocks};
use crate::rng::mix;
use crate::sampling::Chooser;

/// Rows that may be taken back in one step.
const TENTATIVE: usize = 64;

/// Most alternatives that a device which samples gives log probabilities of: fewer than requests of the simulator ask for.
const ALTERNATIVES: u32 = 2;

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

/// The value written to group `group`, from 1 on, for `token` at `position`. `before`: the state before it, 0 where the group holds
/// none.
pub fn group_value(context: u64, before: u64, token: u32, position: u32, group: usize) -> u64 {
    value(context ^ before.rotate_left(9) ^ mix(group as u64), token, position)
}

/// What optional group `group` holds where group 0 holds `value`.
pub fn optional_value(value: u64, group: usize) -> u64 {
    mix(value ^ mix(group as u64)) | 1
}

/// The row of logits after a context: coarse, so that ties happen.
pub fn logits(context: u64, vocab: usize, out: &mut Vec<f32>) {
    out.extend((0..vocab as u64).map(|token| (mix(context ^ token) >> 56) as f32 / 16.0 - 8.0));
}

/// The hidden state after a context, `[3]`: sums of these in another order or of other rows differ.
pub fn hidden(context: u64) -> [f32; 3] {
    [0u64, 1, 2].map(|at| (mix(context ^ 0x41dd ^ at) >> 32) as f32 * 1e-6)
}

/// The features of a row: its context and its position, in pieces that f32 holds exactly.
pub const FEATURES: usize = 6;

/// What a head is to be given of a row ([`crate::head`]).
pub fn features(context: u64, position: u32) -> [f32; FEATURES] {
    let piece = |value: u64, at: usize| f32::from((value >> (16 * at)) as u16);
    let of = |at: usize| if at < 4 { piece(context, at) } else { piece(position.into(), at - 4) };
    std::array::from_fn(of)
}

/// See the module documentation.
pub struct SimBackend {
    vocab: usize,
    memory: Memory,
    tables: BlockTables,
    logits: Vec<f32>,
    hidden: Vec<[f32; 3]>,
    features: Vec<[f32; FEATURES]>,
    max_rows: usize,
    max_logit_rows: usize,
    /// It chooses tokens by itself.
    chooser: Option<Chooser>,
    /// What it is not to be asked is a panic: whoever asked would go on without it.
    strict: bool,
    /// Behind one in four contexts its logits are others.
    errs: bool,
}

impl SimBackend {
    pub fn new(
        vocab: usize,
        blocks: usize,
        block_tokens: usize,
        max_rows: usize,
        max_logit_rows: usize,
    ) -> Self {
        let mut this = Self {
            vocab,
            memory: Memory::default(),
            tables: BlockTables::default(),
            logits: Vec::new(),
            hidden: Vec::new(),
            features: Vec::new(),
            max_rows,
            max_logit_rows,
            chooser: None,
            strict: false,
            errs: false,
        };
        let (blocks, block_tokens) = (blocks as u32, block_tokens as u32);
        let first =
            GroupConfig { layout: Layout::Paged, blocks, block_tokens, bytes_per_block: 1, optional: false };
        this.add_groups([GroupMemory::new(first)]);
        this
    }

    /// More cache groups, and empty block tables for sequences as long as the pool.
    fn add_groups(&mut self, more: impl IntoIterator<Item = GroupMemory>) {
        let mut groups = self.memory.groups();
        groups.extend(more);
        let sizes = sizes(&groups);
        self.tables =
            BlockTables::new(&sizes, groups[0].cells.len()).with_tentative(self.max_rows.max(TENTATIVE));
    }

    /// What it holds, to be read and written beside the steps.
    pub fn memory(&self) -> Memory {
        self.memory.clone()
    }

    /// Which chooses tokens by itself, and computes a step when somebody waits for it.
    pub fn with_sampling(mut self) -> Self {
        self.chooser = Some(Chooser::default());
        self
    }

    /// Of which nothing wrong is asked.
    pub fn strict(mut self) -> Self {
        self.strict = true;
        self
    }

    /// Whose logits are now and then those of another context. What it writes is the same.
    pub fn erring(mut self) -> Self {
        self.errs = true;
        self
    }

    /// With more cache groups.
    pub fn with_groups(mut self, groups: &[GroupConfig]) -> Self {
        self.add_groups(groups.iter().copied().map(GroupMemory::new));
        self
    }

    fn check(&self, batch: &Batch) -> Result<(), BackendError> {
        if batch.tokens.len() > self.max_rows || batch.logit_rows.len() > self.max_logit_rows {
            let (rows, logit_rows) = (batch.tokens.len(), batch.logit_rows.len());
            return Err(BackendError::Batch(format!(
                "{rows} rows and {logit_rows} rows of logits are too many"
            )));
        }
        let ascend = |rows: &[u32]| rows.is_sorted_by(|a, b| a < b);
        if ![&batch.logit_rows, &batch.hidden_rows, &batch.feature_rows].into_iter().all(|rows| ascend(rows))
        {
            return Err(BackendError::Batch("rows of which something is wanted must ascend".into()));
        }
        Ok(())
    }
}

impl Backend for SimBackend {
    fn name(&self) -> String {
        "sim".into()
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
        let group = |(group, blocks): (&KvGroup, &usize)| {
            let layout = match group.kind {
                GroupKind::Full | GroupKind::Latent { .. } => Layout::Paged,
                GroupKind::Window { tokens } => Layout::Window { tokens },
                GroupKind::State { .. } => Layout::State,
            };
            let (blocks, block_tokens) = (*blocks as u32, group.block_tokens as u32);
            Ok(GroupMemory::new(GroupConfig {
                layout,
                blocks,
                block_tokens,
                bytes_per_block: 1,
                optional: false,
            }))
        };
        let groups = layout.groups.iter().zip(blocks).map(group).collect::<Result<Vec<_>, _>>()?;
        self.memory.groups().clear();
        self.add_groups(groups);
        Ok(())
    }

    fn forward(&mut self, batch: &Batch) -> Result<&[f32], BackendError> {
        if self.chooser.as_ref().is_some_and(Chooser::busy) {
            return Err(BackendError::Device("a step that was begun is not finished".into()));
        }
        self.check(batch)?;
        self.compute(batch)?;
        Ok(&self.logits)
    }

    fn samples(&self) -> Option<u32> {
        self.chooser.as_ref().map(|_| ALTERNATIVES)
    }

    fn begin_and_sample(
        &mut self,
        batch: &Batch,
        rows: &mut dyn ExactSizeIterator<Item = SampleRow<'_>>,
    ) -> Result<(), BackendError> {
        self.check(batch)?;
        self.chooser()?.begin(batch, rows)
    }

    fn finish_sampled(&mut self, outcomes: &mut Vec<Outcome>) -> Result<(), BackendError> {
        let batch = self.chooser()?.next()?;
        let computed = self.compute(&batch);
        let Some(chooser) = &mut self.chooser else { return computed };
        match computed {
            Ok(()) => chooser.choose(&self.logits, self.vocab, outcomes),
            Err(_) => chooser.give_up(),
        }
        computed
    }

    fn sampled_logits(&self, row: u32) -> &[f32] {
        self.logits.chunks_exact(self.vocab).nth(row as usize).unwrap_or_default()
    }

    fn hidden(&self, row: u32) -> &[f32] {
        self.hidden.get(row as usize).map_or(&[], |row| row)
    }

    fn features(&self, row: u32) -> &[f32] {
        self.features.get(row as usize).map_or(&[], |row| row)
    }

    fn weight_bytes(&self) -> u64 {
        0
    }
}

impl SimBackend {
    fn chooser(&mut self) -> Result<&mut Chooser, BackendError> {
        self.chooser.as_mut().ok_or_else(|| BackendError::Device("sim does not sample".into()))
    }

    /// Leaves the logits and hidden states that the batch wants in `self`.
    fn compute(&mut self, batch: &Batch) -> Result<(), BackendError> {
        let computed = self.compute_rows(batch);
        if let Err(error) = &computed {
            assert!(!self.strict, "{error}: {batch:?}");
        }
        computed
    }

    fn compute_rows(&mut self, batch: &Batch) -> Result<(), BackendError> {
        let mut groups = self.memory.groups();
        self.tables.apply(batch, &sizes(&groups)).map_err(BackendError::Batch)?;
        copy_blocks(&mut groups, batch);
        let mut step = Step { tables: &self.tables, groups: &mut groups };
        self.logits.clear();
        self.hidden.clear();
        self.hidden.resize(batch.tokens.len(), [f32::NAN; 3]);
        self.features.clear();
        self.features.resize(batch.tokens.len(), [f32::NAN; FEATURES]);
        let mut wanted = batch.logit_rows.iter().copied().peekable();
        let mut wanted_hidden = batch.hidden_rows.iter().copied().peekable();
        for span in &batch.spans {
            let mut context = EMPTY;
            for position in 0..span.first_position {
                context = extend(context, step.needed(span, 0, position)?);
            }
            for row in span.first_row..span.first_row + span.rows {
                let position = span.first_position + row - span.first_row;
                context = step.row(span, context, batch.tokens[row as usize], position)?;
                if wanted.next_if_eq(&row).is_some() {
                    let errs = self.errs && mix(context ^ 0xe445).is_multiple_of(4);
                    logits(if errs { !context } else { context }, self.vocab, &mut self.logits);
                }
                if wanted_hidden.next_if_eq(&row).is_some() {
                    self.hidden[row as usize] = hidden(context);
                }
                if batch.feature_rows.binary_search(&row).is_ok() {
                    self.features[row as usize] = features(context, position);
                }
            }
        }
        Ok(())
    }
}

fn sizes(groups: &[GroupMemory]) -> Vec<PoolSize> {
    groups.iter().map(GroupMemory::size).collect()
}

/// What the rows of a step read and write.
struct Step<'a> {
    tables: &'a BlockTables,
    groups: &'a mut [GroupMemory],
}

impl Step<'_> {
    /// Where a position of a group lies in its memory; `None`: in a hole of an optional group.
    fn cell(&self, span: &Span, group: usize, position: u32) -> Result<Option<usize>, BackendError> {
        let bad = |what| Err(BackendError::Batch(format!("group {group}: position {position} {what}")));
        let (table, config) = (self.tables.table(span.slot, group), self.groups[group].config);
        let (size, state) = (config.block_tokens, config.layout == Layout::State);
        let index = if state { span.state_entry(position, size) } else { position / size };
        let Some(block) = table.get(index as usize) else {
            return bad("is outside of the block table");
        };
        if *block == HOLE {
            return if config.optional { Ok(None) } else { bad("is behind the window and was released") };
        }
        let within = if state { 0 } else { position % size };
        let cell = *block as usize * block_cells(&config) + within as usize;
        if cell < self.groups[group].cells.len() { Ok(Some(cell)) } else { bad("is outside of the pool") }
    }

    fn read(&self, span: &Span, group: usize, position: u32) -> Result<Option<u64>, BackendError> {
        let Some(cell) = self.cell(span, group, position)? else { return Ok(None) };
        match self.groups[group].cells[cell] {
            0 => Err(BackendError::Device(format!("position {position} was read and never written"))),
            value => Ok(Some(value)),
        }
    }

    /// What a group that everybody needs holds of a position.
    fn needed(&self, span: &Span, group: usize, position: u32) -> Result<u64, BackendError> {
        self.read(span, group, position).map(|value| value.unwrap_or(0))
    }

    fn write(&mut self, span: &Span, group: usize, position: u32, value: u64) -> Result<(), BackendError> {
        if let Some(cell) = self.cell(span, group, position)? {
            self.groups[group].cells[cell] = value;
        }
        Ok(())
    }

    /// One row: writes its values, reads those of its windows and the states before it; the context after it.
    fn row(&mut self, span: &Span, context: u64, token: u32, position: u32) -> Result<u64, BackendError> {
        let mut seen = 0;
        for group in 1..self.groups.len() {
            let config = self.groups[group].config;
            if config.optional {
                continue;
            }
            let (mut before, mut first) = (0, position);
            match config.layout {
                Layout::State if position > 0 => before = self.needed(span, group, position - 1)?,
                Layout::State => {}
                layout => first = (position + 1).saturating_sub(layout.reach().unwrap_or(u32::MAX)),
            }
            self.write(span, group, position, group_value(context, before, token, position, group))?;
            for position in first..=position {
                seen = extend(seen, self.needed(span, group, position)?);
            }
        }
        self.write(span, 0, position, value(context ^ seen, token, position))?;
        self.optional(span, position)?;
        Ok(extend(context, self.needed(span, 0, position)?))
    }

    /// Reads all that optional groups should have before a position, and writes what they have of it: a state over the one before.
    fn optional(&mut self, span: &Span, position: u32) -> Result<(), BackendError> {
        for group in 1..self.groups.len() {
            let config = self.groups[group].config;
            if !config.optional {
                continue;
            }
            let reach = config.layout.reach().unwrap_or(u32::MAX);
            for before in (position + 1).saturating_sub(reach)..position {
                let wanted = optional_value(self.needed(span, 0, before)?, group);
                if self.read(span, group, before)?.is_some_and(|value| value != wanted) {
                    return Err(BackendError::Device(format!(
                        "group {group}, which is optional: position {before} holds something else"
                    )));
                }
            }
            let value = optional_value(self.needed(span, 0, position)?, group);
            self.write(span, group, position, value)?;
        }
        Ok(())
    }
}
