//! What is chosen from a row of logits, as plain data: the seam between the engine's sampler and a backend that samples by itself.
//!
//! Owns: the words of the question and of the answer. Must never: choose. For the same logits a backend's answers are those of
//! `folio-engine`'s sampler, bit for bit. Where something else has a word (a guide, whose mask need not be known before the step is over), the row
//! itself is asked for.

/// What is wanted of a row of logits.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SampleRow<'a> {
    pub choice: Choice<'a>,
    /// Log probabilities of the raw row: of the chosen token, and of so many best ones. A known token always has them.
    pub logprobs: Option<u32>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Choice<'a> {
    /// None: this token is judged.
    Known(u32),
    Draw(Draw<'a>),
    /// The caller's, from the row itself ([`Backend::sampled_logits`](crate::backend::Backend::sampled_logits)); no step may name it.
    Logits,
}

/// How a token is drawn; the names are those of `SamplingParams`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Draw<'a> {
    pub seed: u64,
    /// Absolute position of the token.
    pub position: u32,
    /// 0 is greedy.
    pub temperature: f32,
    /// 0 is off.
    pub top_k: u32,
    /// 1 is off.
    pub top_p: f32,
    /// 0 is off.
    pub min_p: f32,
    pub repetition_penalty: f32,
    pub frequency_penalty: f32,
    pub presence_penalty: f32,
    /// Tokens of the sequence, each once, and how often each was generated; empty where no penalty is on.
    pub seen: &'a [(u32, u32)],
    /// Added to logits; each token once.
    pub bias: &'a [(u32, f32)],
    /// Tokens that must not be chosen.
    pub forbidden: [&'a [u32]; 2],
}

impl Draw<'_> {
    /// Whether the choice is not from the logits as they are.
    pub fn changes_logits(&self) -> bool {
        !self.seen.is_empty() || !self.bias.is_empty() || self.forbidden.iter().any(|list| !list.is_empty())
    }
}

/// What became of a row.
#[derive(Clone, Debug, PartialEq)]
pub enum Outcome {
    Token {
        id: u32,
        logprobs: Option<Logprobs>,
    },
    /// To [`Choice::Known`].
    Score(Logprobs),
    /// To [`Choice::Logits`].
    Logits,
    /// No answer exists.
    Failed(&'static str),
}

/// Log probabilities of the raw row.
#[derive(Clone, Debug, PartialEq)]
pub struct Logprobs {
    pub logprob: f32,
    /// 1 is the best.
    pub rank: u32,
    /// Best first.
    pub top: Vec<(u32, f32)>,
}
