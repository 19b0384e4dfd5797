//! The data that crosses the seam between bookkeeping and arithmetic: [`StepPlan`] in, [`StepOutput`] out.
//!
//! Plain data that can be printed, recorded, replayed and compared. A plan holds no tensor but the embeddings that a request gave, and no
//! reference into the scheduler.

use std::borrow::Cow;
use std::ops::Range;
use std::sync::Arc;

/// In [`SequencePlan::tokens`], with the index of a sample: the token that the step [`SequencePlan::follows`] chooses for that
/// sample. Only in a plan that is begun while that step is under way. Where nothing is followed, with the index of a draft: what a
/// drafter that is a model proposes in this step ([`DraftPlan`], [`StepOutput::drafts`]).
pub use folio_model::backend::PLACEHOLDER;
use folio_model::program::EmbeddingInput;
use rustc_hash::FxHashMap;
use smallvec::SmallVec;

use crate::adapters::ResidentAdapter;
use crate::embeddings::EmbeddingRange;
use crate::guide::GuideRef;
use crate::request::{SamplingParams, TokenLogprobs};

/// A sequence is one choice of one request. Never reused.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SequenceId(pub u64);

/// Copy `tokens` positions of block `from` into block `to`, before anything else in the step, in list order.
pub use folio_kv::BlockCopy;
/// What stands in a window group's block table for a block that no query will read again.
pub use folio_kv::HOLE;

/// Everything one step computes. There are no phases: each entry is "compute the next n tokens of this sequence". Without
/// sequences there is nothing to begin, and nothing is under way.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StepPlan {
    pub step: u64,
    pub copies: Vec<BlockCopy>,
    pub sequences: Vec<Box<SequencePlan>>,
    /// `[rows, width]`: what each row is given beside its token, in order, of a model that takes that: a drafter which reads another's features.
    pub features: Vec<f32>,
}

#[derive(Clone, Debug, Default, PartialEq)]
pub struct SequencePlan {
    pub id: SequenceId,
    /// Absolute position of `tokens[0]`.
    pub first_position: u32,
    /// Token ids to compute. Behind an unfinished step that is one token, [`PLACEHOLDER`] and its place there.
    pub tokens: SmallVec<[u32; 4]>,
    /// Whose weights its rows use beside the model's. A step has no more than [`crate::SchedulerConfig::max_adapters`] of them.
    pub adapter: Option<ResidentAdapter>,
    /// Its request's, where rows are of the prompt ([`SequencePlan::give`]).
    pub embeddings: Option<Arc<[EmbeddingRange]>>,
    /// How far rows behind those stand from their positions in the sequence, on all axes of rotary embeddings.
    pub position_shift: i32,
    /// The unfinished step that chooses the token; `None`: it is known.
    pub follows: Option<u64>,
    /// The last so many tokens are drafts: of their rows those are confirmed that follow what was chosen.
    pub drafts: u32,
    /// What a drafter that is a model computes of it before.
    pub drafter: DraftPlan,
    /// The features of its last so many rows are wanted ([`StepOutput::features`]).
    pub features: u32,
    /// The rows of the last so many positions may be taken back: the drafts', and that whose mask may be late. In a drafter's pass some of
    /// them may be those of the passes before.
    pub tentative: u32,
    /// One table per cache group, group 0 first. They cover `first_position + tokens.len()` positions; in a window group `HOLE` stands
    /// where a block behind the window was released, in a state group there is a block for each tentative row behind those of the
    /// positions before.
    pub block_tables: Vec<Vec<u32>>,
    /// Where its tables are kept by whoever keeps tables: sequences that run at the same time differ in it, and it is below the most
    /// that ever did.
    pub table_slot: u32,
    /// The step that was planned with it before this one, 0 for none, and how its tables differ from those: one entry per group, or
    /// none where nothing changed.
    pub since: u64,
    pub changes: Vec<TableChange>,
    /// Which rows want something from their logits, ascending by row. A row may occur several times: the choices of one
    /// request are all drawn from the last row of its prompt.
    pub samples: SmallVec<[SamplePlan; 1]>,
}

/// What a drafter that is a model computes of a sequence, before the step's rows are: known tokens that its KV lacks, and behind the last
/// of them the drafts.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct DraftPlan {
    /// Position of `tokens[0]` in the drafter's KV: where it stands in the sequence, or one before that for a drafter that reads features
    /// ([`DrafterModel::reads`]), which are those of this position. Without tokens there is nothing to compute.
    pub first_position: u32,
    /// It sees nothing before this position, the first of a block: what was there is not known. 0 unless it reads features.
    pub context: u32,
    pub tokens: SmallVec<[u32; 2]>,
    /// Drafts to propose, named in [`SequencePlan::tokens`] from this place of the step on.
    pub drafts: u32,
    pub first_place: u32,
}

/// Entries of a block table that are not those of an earlier plan: all from `from` on, and before it `holes` new holes from
/// `first_hole` on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TableChange {
    pub from: u32,
    pub first_hole: u32,
    pub holes: u32,
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
    /// The row's hidden state after the final norm.
    Hidden,
    /// The sum of those of rows `first ..=` this one, row by row onto `before`: the sum over all positions before them, `None`
    /// where there are none. One per sequence, and no other want beside it.
    HiddenSum { first: u32, before: Option<Arc<[f64]>> },
}

impl DraftPlan {
    /// Nothing is to be computed. Keeps the memory.
    pub fn clear(&mut self) {
        self.tokens.clear();
        self.drafts = 0;
    }
}

impl SequencePlan {
    /// Whether it computes one known token, with drafts behind it.
    pub fn decodes(&self) -> bool {
        self.tokens.len() as u32 == 1 + self.drafts
    }

    /// Of nothing. Allocates nothing.
    pub fn empty(id: SequenceId) -> Self {
        Self { id, ..Self::default() }
    }

    /// The position behind its rows.
    pub fn end(&self) -> u32 {
        self.first_position + self.tokens.len() as u32
    }

    /// The position of the first row that may be taken back.
    pub fn tentative_from(&self) -> Option<u32> {
        (self.tentative > 0).then(|| self.end() - self.tentative)
    }

    /// The drafts up to the row of `sample`, whose token comes behind them.
    pub fn drafts_before(&self, sample: &SamplePlan) -> &[u32] {
        let first = self.tokens.len() - self.drafts as usize;
        &self.tokens[first..(sample.row as usize + 1).max(first)]
    }
}

/// All the sampler may depend on, beside the drafts: promise 1 forbids it slots, steps and neighbours.
#[derive(Clone, Debug, PartialEq)]
pub struct SampleSpec {
    pub params: Arc<SamplingParams>,
    /// Request seed mixed with the choice index.
    pub seed: u64,
    /// Absolute position of the token being chosen: the counter of the RNG.
    pub position: u32,
    /// Tokens seen so far, if a penalty is on. Shared with the scheduler, which copies on write: a plan stays as it was.
    pub history: Option<Arc<TokenHistory>>,
    /// Stop tokens must not be chosen now (before `min_tokens`).
    pub forbid_stop: bool,
    /// What may be chosen at all behind the drafts of its row, where something restricts it.
    pub guide: Option<GuideRef>,
}

/// Most tokens that a [`TokenHistory`] sets memory aside for: most outputs are shorter, and distinct tokens are fewer still.
const HISTORY_RESERVE: u32 = 2048;

/// What the penalties need to know of a sequence: which tokens occurred and how often, in order of first appearance.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TokenHistory {
    /// Tokens, and how often each was generated.
    entries: Vec<(u32, u32)>,
    /// Where a token's entry is.
    index: FxHashMap<u32, u32>,
    /// Tokens in all.
    len: usize,
}

impl TokenHistory {
    /// O(prompt), once per sequence. Sets memory aside for `more` tokens, up to a limit.
    pub fn of_prompt(prompt: &[u32], more: u32) -> Self {
        let mut history = Self::default();
        for token in prompt {
            history.entry(*token);
        }
        history.len = prompt.len();
        let more = more.min(HISTORY_RESERVE) as usize;
        history.entries.reserve(more);
        history.index.reserve(more);
        history
    }

    /// Counts one generated token. O(1).
    pub fn push(&mut self, token: u32) {
        *self.entry(token) += 1;
        self.len += 1;
    }

    /// Tokens of the prompt and generated ones.
    pub fn len(&self) -> usize {
        self.len
    }

    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    fn entry(&mut self, token: u32) -> &mut u32 {
        let next = self.entries.len() as u32;
        let at = *self.index.entry(token).or_insert(next);
        if at == next {
            self.entries.push((token, 0));
        }
        &mut self.entries[at as usize].1
    }

    /// Whether it occurred. O(1).
    pub fn contains(&self, token: u32) -> bool {
        self.index.contains_key(&token)
    }

    /// Every distinct token and how often it was generated.
    pub fn entries(&self) -> &[(u32, u32)] {
        &self.entries
    }
}

/// Flat, in the order of the plan: sequences in order, and the samples of each in order. Reused between steps.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StepOutput {
    pub step: u64,
    pub samples: Vec<Sampled>,
    /// What the drafts were that the plan names by place.
    pub drafts: Vec<u32>,
    /// `[rows, width]`: those that the plan wants ([`SequencePlan::features`]), in order.
    pub features: Vec<f32>,
}

/// The answer to one [`SamplePlan`].
#[derive(Clone, Debug, PartialEq)]
pub enum Sampled {
    /// To [`Want::Token`].
    Token { id: u32, logprobs: Option<TokenLogprobs> },
    /// To [`Want::Score`].
    Score(TokenLogprobs),
    /// To [`Want::Hidden`], `[hidden]`.
    Hidden(Vec<f32>),
    /// To [`Want::HiddenSum`], `[hidden]`.
    HiddenSum(Vec<f64>),
    /// To [`Want::Token`]: what its guide allows is not known yet. The row is to be computed again.
    Late,
    /// No answer exists: the logits or hidden states are not numbers, everything was forbidden, or a guide failed. Ends this sequence alone.
    Failed(Cow<'static, str>),
}

/// The only seam between bookkeeping and arithmetic. What is computed is deterministic in the plan and the cached bits. Steps are
/// computed in the order in which they were begun.
pub trait Executor: Send {
    /// Steps that may be begun and not finished, at least 1.
    fn depth(&self) -> usize {
        1
    }

    /// Steps between a choice and its use, at least 1: a plan may name the choices of unfinished steps that were begun so many steps
    /// before it or earlier. 1 on a device, the number of stages in a pipeline.
    fn lag(&self) -> usize {
        1
    }

    /// The model that it has for drafts, if it has one.
    fn drafter(&self) -> Option<DrafterModel> {
        None
    }

    /// What rows may be given in place of the embeddings of their tokens; `None`: nothing.
    fn embedding_input(&self) -> Option<EmbeddingInput> {
        None
    }

    /// Begins the step and has taken from the plan what it needs when this returns. After an error nothing was begun.
    fn begin(&mut self, plan: &StepPlan) -> Result<(), ExecutorError>;

    /// Begins a step that names drafts by place: these are they.
    fn begin_with_drafts(&mut self, plan: &StepPlan, drafts: &[u32]) -> Result<(), ExecutorError> {
        if !drafts.is_empty() {
            let reason = "it takes no drafts that are named by place".to_owned();
            return Err(ExecutorError { step: plan.step, reason });
        }
        self.begin(plan)
    }

    /// Waits for the oldest step that was begun and not finished; it is finished even where this is an error. The output is the
    /// executor's own memory, reused by the next call.
    fn finish(&mut self) -> Result<&StepOutput, ExecutorError>;

    /// Both, for callers that have nothing to do in between.
    fn execute(&mut self, plan: &StepPlan) -> Result<&StepOutput, ExecutorError> {
        self.begin(plan)?;
        self.finish()
    }
}

/// A drafter that is a model, as the scheduler knows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DrafterModel {
    /// The first of the cache groups of its KV and states, which are optional and the last of all; and how many they are: one where it reads
    /// features.
    pub group: usize,
    pub groups: usize,
    /// Tokens of a block of the first.
    pub block_tokens: u32,
    /// Most positions of a sequence that it can compute.
    pub positions: u32,
    pub reads: Reads,
}

impl DrafterModel {
    /// The cache groups that are its own.
    pub fn cache_groups(&self) -> Range<usize> {
        self.group..self.group + self.groups
    }
}

/// What a drafter that is a model reads of a sequence.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Reads {
    /// Its tokens.
    #[default]
    Tokens,
    /// Also the model's features of the position before each token, so many values (EAGLE-3). Where the model computed nothing they are zeros.
    Features { width: usize },
}

impl Reads {
    /// How far behind a token's position the drafter's row of it lies, which is that of what it reads last.
    pub fn lag(self) -> u32 {
        match self {
            Self::Tokens => 0,
            Self::Features { .. } => 1,
        }
    }
}

#[derive(Clone, Debug, thiserror::Error)]
#[error("the executor failed in step {step}: {reason}")]
pub struct ExecutorError {
    pub step: u64,
    pub reason: String,
}
