//! The real executor: a plan becomes batches for a [`Backend`], logits become tokens.
//!
//! Owns: the translation and the sampler. Must never: decide anything; what it computes is a function of the plan and
//! the cached bits.
//!
//! A step is one forward pass, unless it wants more rows of logits than the backend has room for (prompt logprobs):
//! then it is split, between sequences where possible and within a sequence where not. Splitting changes no bit, because
//! rows do not depend on which batch they are in.
//!
//! Cost outside the backend: a copy of the plan's block tables and tokens, and the sampler. Allocates nothing once its
//! buffers have grown.

use folio_model::backend::{self, Backend, Batch, BlockCopy, Span, SwapTimes};

use crate::plan::{self, Executor, ExecutorError, SamplePlan, SequencePlan, StepOutput, StepPlan, Want};
use crate::sampler::Sampler;

/// Runs plans on a backend. See the module documentation.
pub struct ModelExecutor {
    backend: Box<dyn Backend>,
    sampler: Sampler,
    vocab: usize,
    max_rows: usize,
    max_logit_rows: usize,
    batch: Batch,
    /// Which samples each logit row of `batch` serves: (sequence of the plan, range of its samples).
    served: Vec<Served>,
    output: StepOutput,
}

/// Block table entries of a step that memory is set aside for: a million tokens of context at 16 tokens a block.
const TABLE_ENTRIES: usize = 1 << 16;

#[derive(Clone, Copy, Debug)]
struct Served {
    sequence: u32,
    first_sample: u32,
    samples: u32,
}

impl ModelExecutor {
    /// `backend` has its program, sized for `max_rows` rows and `max_logit_rows` rows of logits, and its cache.
    pub fn new(backend: Box<dyn Backend>, vocab: usize, max_rows: usize, max_logit_rows: usize) -> Self {
        Self {
            backend,
            sampler: Sampler::default(),
            vocab,
            max_rows: max_rows.max(1),
            max_logit_rows: max_logit_rows.max(1),
            batch: Batch { blocks: Vec::with_capacity(TABLE_ENTRIES), ..Batch::default() },
            served: Vec::new(),
            output: StepOutput::default(),
        }
    }

    pub fn backend(&self) -> &dyn Backend {
        &*self.backend
    }

    /// Adds rows `first..` of a sequence, as many as fit. Returns the row after the last that was added.
    fn add(&mut self, index: usize, plan: &SequencePlan, first: usize, samples: &mut usize) -> usize {
        let mut last = plan.tokens.len().min(first + self.max_rows - self.batch.tokens.len());
        let base = self.batch.tokens.len();
        while let Some(sample) = plan.samples.get(*samples) {
            let row = sample.row as usize;
            if row >= last {
                break;
            }
            if self.batch.logit_rows.len() == self.max_logit_rows {
                last = row;
                break;
            }
            let same = plan.samples[*samples..].iter().take_while(|other| other.row == sample.row).count();
            self.batch.logit_rows.push((base + row - first) as u32);
            self.served.push(Served {
                sequence: index as u32,
                first_sample: *samples as u32,
                samples: same as u32,
            });
            *samples += same;
        }
        if last > first {
            let blocks_start = self.batch.blocks.len() as u32;
            for table in &plan.block_tables {
                self.batch.blocks.extend_from_slice(table);
            }
            self.batch.spans.push(Span {
                first_row: base as u32,
                rows: (last - first) as u32,
                first_position: plan.first_position + first as u32,
                blocks_start,
                blocks_len: plan.block_tables.first().map_or(0, Vec::len) as u32,
            });
            self.batch.tokens.extend_from_slice(&plan.tokens[first..last]);
        }
        last
    }

    /// Computes the batch and answers what it serves.
    fn flush(&mut self, plan: &StepPlan) -> Result<(), ExecutorError> {
        let failed = |reason: String| ExecutorError { step: plan.step, reason };
        let swapped = !self.batch.swap_outs.is_empty() || !self.batch.swap_ins.is_empty();
        let logits = self.backend.forward(&self.batch).map_err(|error| failed(error.to_string()))?;
        if logits.len() != self.batch.logit_rows.len() * self.vocab {
            return Err(failed(format!(
                "the backend returned {} logits for {} rows of {}",
                logits.len(),
                self.batch.logit_rows.len(),
                self.vocab
            )));
        }
        for (row, served) in logits.chunks_exact(self.vocab).zip(&self.served) {
            let sequence = &plan.sequences[served.sequence as usize];
            let from = served.first_sample as usize;
            for SamplePlan { want, .. } in &sequence.samples[from..from + served.samples as usize] {
                self.output.samples.push(match want {
                    Want::Token(spec) => self.sampler.sample(row, spec),
                    Want::Score { next, top } => self.sampler.score(row, *next, *top),
                });
            }
        }
        if swapped {
            self.output.swap_times = self.backend.swap_times();
        }
        self.batch.clear();
        self.served.clear();
        Ok(())
    }
}

fn block_swap(swap: &plan::BlockSwap) -> backend::BlockSwap {
    backend::BlockSwap { group: swap.group, block: swap.block.0, slot: swap.slot }
}

impl Executor for ModelExecutor {
    fn execute(&mut self, plan: &StepPlan) -> Result<&StepOutput, ExecutorError> {
        self.output.step = plan.step;
        self.output.samples.clear();
        self.output.swap_times = SwapTimes::default();
        self.batch.clear();
        self.served.clear();
        self.batch.swap_outs.extend(plan.swap_outs.iter().map(block_swap));
        self.batch.swap_ins.extend(plan.swap_ins.iter().map(block_swap));
        let copies = plan.copies.iter();
        self.batch.copies.extend(copies.map(|c| BlockCopy {
            group: c.group,
            from: c.from.0,
            to: c.to.0,
            tokens: c.tokens,
        }));
        for (index, sequence) in plan.sequences.iter().enumerate() {
            let (mut row, mut samples) = (0, 0);
            loop {
                row = self.add(index, sequence, row, &mut samples);
                if row == sequence.tokens.len() {
                    break;
                }
                // Full: compute what there is, so that the rest finds these positions in the cache.
                self.flush(plan)?;
            }
        }
        self.flush(plan)?;
        Ok(&self.output)
    }
}
