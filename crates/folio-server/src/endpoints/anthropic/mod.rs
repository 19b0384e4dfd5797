//! Anthropic's API: `/v1/messages` and what goes with it.
//!
//! Must never: generate, render or read an answer itself: a request becomes the same conversation and the same job as a chat of OpenAI's.
//! `cache` places the breakpoints. Cost beyond a chat's: for each breakpoint one more rendering of the conversation up to it, but for those
//! of a lifetime whose last is at the conversation's end.

mod cache;
mod models;

use std::sync::Arc;

use axum::extract::State as Shared;
use folio_api::ApiError;
use folio_api::anthropic::{self, MessageWriter};
use folio_kv::TenantId;
use serde_json::json;

pub use models::{model, models};

use crate::app::State;
use crate::arrival::{Arrival, JsonRequest};
use crate::generation::job::{Job, PromptJob};
use crate::generation::prompt::prompt;
use crate::generation::sampling::{fit, rules};
use crate::generation::screening::{asker, screen_conversation};
use crate::generation::tokenizing::{encode_prompt, speculation};
use crate::http::reply::Reply;
use crate::http::reply::json_response;

/// `POST /v1/messages`.
pub(crate) fn prepare(state: &State, arrival: &Arrival) -> Result<Job, ApiError> {
    let facts = &state.app.model;
    let read = {
        let _span = step!("read");
        anthropic::Request::read(&arrival.body, &state.context)?
    };
    let (mut breakpoints, wanted) = (read.breakpoints, read.max_tokens);
    let mut request = read.request;
    let screened = screen_conversation(state, arrival, &mut request.conversation)?;
    // Rendering puts the messages the template's way; a cut inside them begins with the client's.
    let source = breakpoints.inside(&request.conversation.messages).then(|| request.conversation.clone());
    let rendered = prompt(state, &mut request.conversation, request.include_reasoning)?;
    let mut tokens =
        encode_prompt(state, Some(arrival.tenant.id), &rendered.prompt, false, false, "messages")?;
    let placing = cache::Placing {
        state,
        tenant: arrival.tenant.id,
        conversation: &request.conversation,
        source: source.as_ref(),
        prompt: &rendered.prompt,
        tokens: &tokens,
    };
    let placed = placing.find(&breakpoints);
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
    let answer = MessageWriter::new(&arrival.id, state.context.model.name(), placed, cut);
    let speculation = speculation(state, arrival.tenant.id, &generation, &tokens)?;
    let prompt = PromptJob {
        tokens: tokens.into(),
        params,
        echo: None,
        echo_logprobs: false,
        retention,
        screened,
        speculation,
    };
    let asker = asker(state, arrival, "messages");
    let (writer, prompts, arrived, notes) = (Box::new(answer), vec![prompt], arrival.at, request.notes);
    Ok(Job { writer, generation, reading, pooling: None, prompts, arrived, asker, notes })
}

/// `POST /v1/messages/count_tokens`: what `usage` would add up to.
pub async fn count_tokens(Shared(state): Shared<Arc<State>>, request: JsonRequest) -> Reply {
    let shared = state.clone();
    let JsonRequest { tenant, body, held: _held, .. } = request;
    let count = state.off_thread(tenant.id, body.len(), move || counted(&shared, tenant.id, &body)).await?;
    Ok(json_response(json!({"input_tokens": count}).to_string()))
}

fn counted(state: &State, tenant: TenantId, body: &[u8]) -> Result<usize, ApiError> {
    let mut conversation = anthropic::counted(body, &state.context)?;
    let rendered = prompt(state, &mut conversation, true)?;
    // Counting is what this is for, so a text longer than the context is no error here.
    Ok(encode_prompt(state, Some(tenant), &rendered.prompt, false, true, "messages")?.len())
}
