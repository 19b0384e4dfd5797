//! The seam between following an answer and writing it: what every API's way of writing answers can do.
//!
//! Owns: the figures and pieces a writer is given. Must never: decide what is part of an answer (`choice`), or when
//! (`generate`). Invariant: `opening` comes before any `delta` of its choice, `closing` or `failed` last and once.

use std::sync::Arc;

use folio_engine::request::TokenLogprobs;

use crate::api::error::ApiError;
use crate::api::openai::shape::{Kind, Shape, UsageFigures};
use crate::api::params::Generation;
use crate::app::State;
use crate::generation::choice::{Delta, Finish};
use crate::generation::generate::unix_s;
use crate::http::stream::{Events, KEEP_ALIVE};

/// What a request cost, so far or in all.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    pub prompt_tokens: u64,
    /// Of those, how many were not computed.
    pub cached_tokens: u64,
    pub completion_tokens: u64,
    /// Where reasoning is told apart.
    pub reasoning_tokens: Option<u64>,
}

/// One finished choice of a whole response.
pub struct Finished {
    pub index: u32,
    pub delta: Delta,
    pub finish: Finish,
    pub prompt: Option<PromptReport>,
}

/// What is known about a prompt once it was computed.
#[derive(Clone)]
pub struct PromptReport {
    pub tokens: Arc<[u32]>,
    /// Of the second token on, where they were asked for.
    pub logprobs: Option<Arc<[TokenLogprobs]>>,
}

/// Writes one response.
pub trait Wire: Send {
    /// The prompt was computed; choice `index` begins.
    fn opening(&mut self, index: u32, prompt: &PromptReport, usage: Usage, events: &Events);
    /// More of a choice; with `finish`, the last of it.
    fn delta(&mut self, index: u32, delta: &Delta, finish: Option<&Finish>, usage: Usage, events: &Events);
    /// All choices are complete.
    fn closing(&mut self, usage: Usage, events: &Events);
    /// The stream ends with an error.
    fn failed(&mut self, error: &ApiError, events: &Events);
    /// The response that is not streamed.
    fn whole(&mut self, choices: &[Finished], usage: Usage) -> String;
    /// Sent on an idle stream.
    fn keep_alive(&self) -> &'static str {
        KEEP_ALIVE
    }
}

impl Shape {
    /// The frame of a response to one request.
    pub fn new(state: &State, kind: Kind, id: &str, generation: &Generation) -> Self {
        let prefix = match kind {
            Kind::Chat => "chatcmpl",
            Kind::Completion => "cmpl",
        };
        Self {
            kind,
            id: format!("{prefix}-{}", generation.request_id.as_deref().unwrap_or(id)),
            created: unix_s(),
            model: state.app.model.name().to_owned(),
            tokenizer: state.app.tokenizer.clone(),
            logprobs: generation.sampling.logprobs,
            return_token_ids: generation.return_token_ids,
            stream: generation.stream,
        }
    }

    /// The `usage` field of a chunk: left out, `null`, or figures so far.
    fn chunk_usage(&self, usage: Usage) -> Option<Option<UsageFigures>> {
        let options = self.stream?;
        options.include_usage.then(|| options.continuous_usage.then(|| usage.into()))
    }
}

impl Wire for Shape {
    fn opening(&mut self, index: u32, prompt: &PromptReport, usage: Usage, events: &Events) {
        if let Some(json) = Shape::opening(self, index, &prompt.tokens, self.chunk_usage(usage)) {
            events.send(&json);
        }
    }

    fn delta(&mut self, index: u32, delta: &Delta, finish: Option<&Finish>, usage: Usage, events: &Events) {
        events.send(&self.chunk(index, delta, finish, self.chunk_usage(usage)));
    }

    fn closing(&mut self, usage: Usage, events: &Events) {
        if self.stream.is_some_and(|options| options.include_usage) {
            events.send(&self.usage_chunk(usage));
        }
        events.send("[DONE]");
    }

    fn failed(&mut self, error: &ApiError, events: &Events) {
        events.send(&error.to_json());
        events.send("[DONE]");
    }

    fn whole(&mut self, choices: &[Finished], usage: Usage) -> String {
        Shape::whole(self, choices, usage)
    }
}
