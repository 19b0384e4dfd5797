//! Anthropic's API: `/v1/messages` and what goes with it.
//!
//! Owns: Anthropic's names, shapes and rules. Must never: generate, render or read an answer itself: a request becomes the
//! same conversation and the same job as a chat of OpenAI's (`request`, `blocks`, `tools`), and what `generate` follows is
//! written in Anthropic's events (`answer`). `cache` places the breakpoints, `error` says refusals Anthropic's way.
//!
//! Invariants: every field is honoured, refused by its path, or a hint; `input_tokens` + `cache_creation_input_tokens` +
//! `cache_read_input_tokens` are the tokens of the prompt. Cost beyond a chat's: for each breakpoint one more rendering of the
//! conversation up to it, but for those of a lifetime whose last is at the conversation's end.

mod answer;
mod blocks;
mod cache;
mod error;
mod models;
mod request;
mod tools;

use std::sync::Arc;

use axum::body::Body;
use axum::extract::{Request, State as Shared};
use axum::http::{HeaderMap, Response};
use folio_kv::TenantId;

pub use error::restate;
pub use models::{model, models};
pub use request::REFUSED;

use crate::api::error::ApiError;
use crate::api::fields::Fields;
use crate::api::hints::{Api, Hints};
use crate::api::openai::chat::check_model;
use crate::api::openapi::tables::{COUNT, MESSAGE};
use crate::api::params::Generation;
use crate::app::State;
use crate::generation::generate::{Job, PromptJob, json_response};
use crate::generation::safety::{asker, screen_conversation};
use crate::generation::tokenizing::encode_prompt;
use crate::http::{Arrival, JsonRequest};
use answer::Answer;
use request::Asked;

const VERSION: &str = "anthropic-version";
/// Those with the shapes this server speaks; official clients send one or the other, by their age.
const KNOWN_VERSIONS: [&str; 2] = ["2023-06-01", "2026-10-21"];
const STOP: &str = "stop_sequences";

/// Whether the client speaks Anthropic's API: by the route, or by the header that only its clients send.
pub fn is_meant(request: &Request) -> bool {
    request.uri().path().starts_with("/v1/messages") || request.headers().contains_key(VERSION)
}

/// A client that says no version gets the same as one that says either.
pub fn check_version(headers: &HeaderMap) -> Result<(), ApiError> {
    match headers.get(VERSION) {
        Some(version) if !KNOWN_VERSIONS.iter().any(|known| version == known) => {
            let message = format!("The header '{VERSION}' must be {}.", KNOWN_VERSIONS.join(" or "));
            Err(ApiError::invalid(VERSION, message))
        }
        _ => Ok(()),
    }
}

/// `POST /v1/messages`.
pub(crate) fn prepare(state: &State, arrival: &Arrival) -> Result<Job, ApiError> {
    let reading = step!("read");
    let facts = &state.app.model;
    let mut fields = Fields::of_body(&arrival.body)?;
    let mut hints = Hints::new(&state.config.hints, Api::Messages);
    check_model(&mut fields, state)?;
    let mut generation = Generation::read_plain(&mut fields, facts, &state.config.limits, STOP)?;
    let wanted: u32 = fields.require("max_tokens")?;
    request::metadata_only(&mut fields)?;
    let mut asked = Asked::read(&mut fields, state, Some(wanted), &mut hints)?;
    let mut notes = hints.close(fields, &MESSAGE)?;
    notes.left_out = std::mem::take(&mut asked.conversation.tools.left_out);
    drop(reading);

    generation.structure = asked.structure.take();
    generation.bounds.thinking = asked.conversation.budget;
    let screened = screen_conversation(state, arrival, &mut asked.conversation)?;
    let prompt = asked.prompt(state, arrival.tenant.id, false)?;
    generation.reading = prompt.reading;
    generation.follow(state, arrival.tenant.id, Some(&asked.conversation))?;
    // What the context cannot hold is left out, and the answer says so.
    let room = (facts.context_length as usize).saturating_sub(prompt.tokens.len()) as u32;
    let cut = wanted > room && room > 0;
    generation.max_tokens = Some(if cut { room } else { wanted });
    let mut tokens = prompt.tokens;
    let mut params = generation.fit(&mut tokens, facts, "messages")?;
    // The engine always chooses a token; with 0 nobody sees it.
    params.max_tokens = params.max_tokens.max(1);
    let retention = cache::ranges(&prompt.breakpoints);
    let wire = Answer::new(&arrival.id, facts.name(), prompt.breakpoints, cut);
    let prompt =
        PromptJob { tokens: tokens.into(), params, echo: None, echo_logprobs: false, retention, screened };
    let asker = asker(state, arrival, "messages");
    Ok(Job { wire: Box::new(wire), generation, prompts: vec![prompt], arrived: arrival.at, asker, notes })
}

/// `POST /v1/messages/count_tokens`: what `usage` would add up to.
pub async fn count_tokens(
    Shared(state): Shared<Arc<State>>,
    request: JsonRequest,
) -> Result<Response<Body>, ApiError> {
    let shared = state.clone();
    let JsonRequest { tenant, body, held: _held, .. } = request;
    let count = state.off_thread(tenant.id, body.len(), move || counted(&shared, tenant.id, &body)).await?;
    Ok(json_response(serde_json::json!({"input_tokens": count}).to_string()))
}

fn counted(state: &State, tenant: TenantId, body: &[u8]) -> Result<usize, ApiError> {
    let mut fields = Fields::of_body(body)?;
    let mut hints = Hints::new(&state.config.hints, Api::Messages);
    check_model(&mut fields, state)?;
    request::one_speed(&mut fields)?;
    let mut asked = Asked::read(&mut fields, state, None, &mut hints)?;
    hints.close(fields, &COUNT)?;
    // Counting is what this is for, so a text longer than the context is no error here.
    Ok(asked.prompt(state, tenant, true)?.tokens.len())
}

/// A conversation as token ids, with its breakpoints' places.
struct Prompt {
    tokens: Vec<u32>,
    reading: Option<crate::generation::reading::Reading>,
    breakpoints: Vec<cache::Breakpoint>,
}

impl Asked {
    /// `any_length`: also longer than the context.
    fn prompt(&mut self, state: &State, tenant: TenantId, any_length: bool) -> Result<Prompt, ApiError> {
        // Rendering puts the messages the template's way; a cut inside them begins with the client's.
        let placed = !any_length && !self.marks.is_empty();
        let inside = placed && self.marks.inside(&self.conversation.messages);
        let source = inside.then(|| self.conversation.clone());
        let rendered = self.conversation.prompt(state, self.include_reasoning)?;
        let tokens = encode_prompt(state, Some(tenant), &rendered.prompt, false, any_length, "messages")?;
        let placing = cache::Placing {
            state,
            tenant,
            conversation: &self.conversation,
            source: source.as_ref(),
            prompt: &rendered.prompt,
            tokens: &tokens,
        };
        let breakpoints = if placed { placing.find(&self.marks) } else { Vec::new() };
        Ok(Prompt { tokens, reading: rendered.reading, breakpoints })
    }
}
