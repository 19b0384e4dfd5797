//! A request ready for the engine.

use std::sync::Arc;
use std::time::Instant;

use folio_api::ApiError;
use folio_api::events::Writer;
use folio_api::hints::Notes;
use folio_api::params::Generation;
use folio_engine::request::RetentionRange;
use folio_engine::{Pooling, RulesRef, SamplingParams, Speculation};
use folio_kv::TenantId;
use serde_json::{Map, Value};

use crate::decoding::reading::Reading;
use crate::generation::input::InputProcessor;
use crate::generation::retention::ranges;
use crate::generation::sampling::fit;
use crate::generation::tokenizing::speculation;
use crate::observability::why::RequestKind;
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
    pub asked: RequestKind,
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

impl PromptJob {
    /// A prompt of which nothing is said but its tokens and how an answer's are chosen.
    pub fn new(tokens: Arc<[u32]>, params: SamplingParams) -> Self {
        Self {
            tokens,
            params,
            echo: None,
            echo_logprobs: false,
            retention: Vec::new(),
            speculation: None,
            screened: Screened::default(),
        }
    }

    /// A prompt as its request wants it: cut and checked against the context ([`fit`]), kept, speculated on. `param` names its field.
    pub fn wanted(
        inputs: &InputProcessor,
        tenant: TenantId,
        generation: &Generation,
        rules: Option<RulesRef>,
        mut tokens: Vec<u32>,
        param: &str,
    ) -> Result<Self, ApiError> {
        let params = fit(generation, rules, &mut tokens, &inputs.served.model, param)?;
        let retention = ranges(&generation.cache, tokens.len() as u32)?;
        let tokens: Arc<[u32]> = tokens.into();
        let speculation = speculation(inputs, tenant, generation, &tokens)?;
        Ok(Self { retention, speculation, ..Self::new(tokens, params) })
    }
}

impl Job {
    /// A job whose answer is all text, in a chat, and of which nothing is told.
    pub fn new(writer: Box<dyn Writer>, generation: Generation, prompts: Vec<PromptJob>) -> Self {
        Self {
            writer,
            generation,
            reading: None,
            pooling: None,
            prompts,
            asked: RequestKind::Chat,
            arrived: Instant::now(),
            asker: Map::new(),
            notes: Notes::default(),
        }
    }

    /// Whether a prompt may begin with blocks that an operator shares: not where every row of it is wanted, and not where it
    /// is pinned, since pins are of a tenant's own blocks.
    pub(super) fn reads_shared(&self, prompt: &PromptJob) -> bool {
        self.generation.prompt_logprobs.is_none() && !prompt.retention.iter().any(|range| range.pin)
    }
}
