//! The data that crosses the seam between bookkeeping and arithmetic: [`StepPlan`] in, [`StepOutput`] out.
//!
//! Plain data that can be printed, recorded, replayed and compared. A plan holds no tensor and no reference into the
//! scheduler.

use std::sync::Arc;

use crate::request::{SamplingParams, TokenLogprobs};

/// A sequence is one choice of one request. Never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SequenceId(pub u64);

/// Copy `tokens` positions of block `from` into block `to`, before anything else in the step, in list order.
pub use folio_kv::BlockCopy;

/// Everything one step computes. There are no phases: each entry is "compute the next n tokens of this sequence".
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StepPlan {
    pub step: u64,
    pub copies: Vec<BlockCopy>,
    pub sequences: Vec<SequencePlan>,
}

#[derive(Clone, Debug, PartialEq)]
pub struct SequencePlan {
    pub id: SequenceId,
    /// Absolute position of `tokens[0]`.
    pub first_position: u32,
    /// Token ids to compute.
    pub tokens: Vec<u32>,
    /// One table per cache group; there is one group today. Covers `first_position + tokens.len()` positions.
    pub block_tables: Vec<Vec<u32>>,
    /// Which rows want something from their logits, ascending by row.
    pub samples: Vec<SamplePlan>,
}

/// What is wanted of the logits of one row.
#[derive(Clone, Debug, PartialEq)]
pub struct SamplePlan {
    /// Index into [`SequencePlan::tokens`]; its logits predict position `first_position + row + 1`.
    pub row: u32,
    pub want: Want,
}

#[derive(Clone, Debug, PartialEq)]
pub enum Want {
    /// Choose the next token.
    Token(SampleSpec),
    /// Only the log probability of a known next token (prompt_logprobs).
    Score { next: u32, top: u32 },
}

/// All the sampler may depend on: promise 1 forbids it slots, steps and neighbours.
#[derive(Clone, Debug, PartialEq)]
pub struct SampleSpec {
    pub params: Arc<SamplingParams>,
    /// Request seed mixed with the choice index.
    pub seed: u64,
    /// Absolute position of the token being chosen: the counter of the RNG.
    pub position: u32,
    /// Prompt tokens (repetition penalty) and generated tokens so far (all penalties), if any penalty is on.
    pub prompt: Option<Arc<[u32]>>,
    pub generated: Vec<u32>,
    /// Tokens that must not be chosen now: stop tokens before min_tokens.
    pub forbidden: Vec<u32>,
    /// Choice of grammar mask; no grammar engine yet, so always `None`.
    pub grammar: Option<u64>,
}

#[derive(Clone, Debug, Default, PartialEq)]
pub struct StepOutput {
    pub step: u64,
    /// One entry per [`SequencePlan`], in the same order.
    pub sequences: Vec<SequenceOutput>,
}

#[derive(Clone, Debug, Default, PartialEq)]
pub struct SequenceOutput {
    /// One entry per [`SamplePlan`], in the same order.
    pub samples: Vec<Sampled>,
}

#[derive(Clone, Debug, PartialEq)]
pub struct Sampled {
    pub token: u32,
    pub logprobs: Option<TokenLogprobs>,
}

/// The only seam between bookkeeping and arithmetic.
pub trait Executor: Send {
    /// Computes the plan. Deterministic in the plan and the cached bits.
    fn execute(&mut self, plan: &StepPlan) -> Result<StepOutput, ExecutorError>;
}

#[derive(Clone, Debug, thiserror::Error)]
#[error("the executor failed in step {step}: {reason}")]
pub struct ExecutorError {
    pub step: u64,
    pub reason: String,
}
