//! Anthropic's API: `/v1/messages` and what goes with it.
//!
//! Must never: generate, render or read an answer itself: a request becomes the same conversation and the same job as a chat of OpenAI's.
//! `cache` places the breakpoints. Cost beyond a chat's: for each breakpoint one more rendering of the conversation up to it.

mod cache;
mod models;

use std::sync::Arc;

use axum::body::Body;
use axum::extract::{Request, State as Shared};
use axum::http::{HeaderMap, HeaderValue, Response, StatusCode};
use folio_api::ApiError;
use folio_api::anthropic::{self, Answer, error};
use serde_json::json;

pub use models::{model, models};

use crate::app::State;
use crate::generation::generate::{Job, PromptJob, json_response};
use crate::generation::prompt::{encode_prompt, prompt};
use crate::generation::safety::{asker, screen_conversation};
use crate::generation::sampling::{fit, rules};
use crate::http::reply::Reply;
use crate::http::{Arrival, JsonRequest};

const VERSION: &str = "anthropic-version";
/// Those with the shapes this server speaks; official clients send one or the other, by their age.
const KNOWN_VERSIONS: [&str; 2] = ["2023-06-01", "2026-10-21"];
const REQUEST_ID: &str = "request-id";

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

/// Puts an error that some handler answered with into this API's shape, and names the request.
pub fn restate(response: &mut Response<Body>, request_id: &str) {
    if let Ok(id) = HeaderValue::from_str(request_id) {
        response.headers_mut().insert(REQUEST_ID, id);
    }
    if let Some(refused) = response.extensions_mut().remove::<ApiError>() {
        *response.body_mut() = Body::from(error::to_json(&refused, request_id));
        let status = StatusCode::from_u16(error::status(&refused));
        *response.status_mut() = status.unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    }
}

/// `POST /v1/messages`.
pub(crate) fn prepare(state: &State, arrival: &Arrival) -> Result<Job, ApiError> {
    let facts = &state.app.model;
    let read = anthropic::Request::read(&arrival.body, &state.context)?;
    let (breakpoints, wanted) = (read.breakpoints, read.max_tokens);
    let mut request = read.request;
    let screened = screen_conversation(state, arrival, &mut request.conversation)?;
    // Rendering puts the messages the template's way; the breakpoints' cuts begin with the client's.
    let source = (!breakpoints.list.is_empty()).then(|| request.conversation.clone());
    let rendered = prompt(state, &mut request.conversation, request.include_reasoning)?;
    let mut tokens = encode_prompt(state, &rendered.prompt, false, false, "messages")?;
    let placed = source
        .map(|source| cache::place(state, &source, &breakpoints, &rendered.prompt, &tokens))
        .unwrap_or_default();
    let (mut generation, reading) = (request.generation, rendered.reading);
    let rules =
        rules(state, arrival.tenant.id, &generation, Some((&request.conversation, reading.as_ref())))?;
    // What the context cannot hold is left out, and the answer says so.
    let room = (facts.context_length as usize).saturating_sub(tokens.len()) as u32;
    let cut = wanted > room && room > 0;
    generation.max_tokens = Some(if cut { room } else { wanted });
    let mut params = fit(&generation, rules, &mut tokens, facts, "messages")?;
    // The engine always chooses a token; with 0 nobody sees it.
    params.max_tokens = params.max_tokens.max(1);
    let retention = cache::ranges(&placed);
    let answer = Answer::new(&arrival.id, state.context.model.name(), placed, cut);
    let prompt =
        PromptJob { tokens: tokens.into(), params, echo: None, echo_logprobs: false, retention, screened };
    let asker = asker(state, arrival, "messages");
    let (writer, prompts, arrived, notes) = (Box::new(answer), vec![prompt], arrival.at, request.notes);
    Ok(Job { writer, generation, reading, pooling: None, prompts, arrived, asker, notes })
}

/// `POST /v1/messages/count_tokens`: what `usage` would add up to.
pub async fn count_tokens(Shared(state): Shared<Arc<State>>, request: JsonRequest) -> Reply {
    let shared = state.clone();
    let JsonRequest { tenant, body, held: _held, .. } = request;
    let count = state.off_thread(tenant.id, body.len(), move || counted(&shared, &body)).await?;
    Ok(json_response(json!({"input_tokens": count}).to_string()))
}

fn counted(state: &State, body: &[u8]) -> Result<usize, ApiError> {
    let mut conversation = anthropic::counted(body, &state.context)?;
    let rendered = prompt(state, &mut conversation, true)?;
    // Counting is what this is for, so a text longer than the context is no error here.
    Ok(encode_prompt(state, &rendered.prompt, false, true, "messages")?.len())
}
