//! A request ready for the engine.

use std::sync::Arc;
use std::time::Instant;

use folio_api::events::Writer;
use folio_api::hints::Notes;
use folio_api::params::Generation;
use folio_engine::request::RetentionRange;
use folio_engine::{Pooling, SamplingParams, Speculation};
use serde_json::{Map, Value};

use crate::decoding::reading::Reading;
use crate::safety::Screened;

/// A request ready for the engine.
pub struct Job {
    /// Writes the answer.
    pub writer: Box<dyn Writer>,
    pub generation: Generation,
    /// How reasoning and tool calls are told from text. `None`: all is text.
    pub reading: Option<Reading>,
    /// A vector is wanted instead of an answer.
    pub pooling: Option<Pooling>,
    pub prompts: Vec<PromptJob>,
    /// When the HTTP request arrived.
    pub arrived: Instant,
    /// Who asks for what, for the safety callout.
    pub asker: Map<String, Value>,
    /// What the answer's headers say about the request.
    pub notes: Notes,
}

impl AsMut<Job> for Job {
    fn as_mut(&mut self) -> &mut Job {
        self
    }
}

pub struct PromptJob {
    pub tokens: Arc<[u32]>,
    pub params: SamplingParams,
    /// Text shown before the generated text (`echo`).
    pub echo: Option<String>,
    /// The prompt's own log probabilities are part of the answer's (`echo` with `logprobs`).
    pub echo_logprobs: bool,
    /// How long which parts of it should stay cached.
    pub retention: Vec<RetentionRange>,
    /// Where drafts of its answers come from.
    pub speculation: Option<Speculation>,
    /// The verdict on it.
    pub screened: Screened,
}

impl Job {
    /// Whether a prompt may begin with blocks that an operator shares: not where every row of it is wanted, and not where it
    /// is pinned, since pins are of a tenant's own blocks.
    pub(super) fn reads_shared(&self, prompt: &PromptJob) -> bool {
        self.generation.prompt_logprobs.is_none() && !prompt.retention.iter().any(|range| range.pin)
    }
}
