//! Anthropic's API: `/v1/messages` and what goes with it.
//!
//! Must never: generate, render or read an answer itself: a request becomes the same conversation and the same job as a chat of OpenAI's.
//! `cache` places the breakpoints. Cost beyond a chat's: for each breakpoint one more rendering of the conversation up to it, but for those
//! of a lifetime whose last is at the conversation's end.

mod cache;
mod models;

use axum::extract::State;
use folio_api::ApiError;
use folio_api::anthropic::{self, MessageWriter};
use folio_kv::TenantId;
use serde_json::json;

pub use models::{described, model, models, page};

use crate::arrival::{Arrival, JsonRequest};
use crate::generation::input::InputProcessor;
use crate::generation::job::{Job, PromptJob};
use crate::generation::prompt::prompt;
use crate::generation::sampling::rules;
use crate::generation::screening::screen_conversation;
use crate::generation::tokenizing::encode_prompt;
use crate::http::Shared;
use crate::http::reply::{Reply, json_response};
use crate::load::Load;
use crate::observability::step;

/// `POST /v1/messages`.
pub(crate) fn prepare(inputs: &InputProcessor, arrival: &Arrival) -> Result<Job, ApiError> {
    let read = {
        let _span = step!("read");
        anthropic::MessagesRequest::read(&arrival.body, &inputs.served.context)?
    };
    let (mut breakpoints, wanted) = (read.breakpoints, read.max_tokens);
    let mut request = read.request;
    let screened = screen_conversation(inputs, arrival, &mut request.conversation)?;
    // Rendering puts the messages the template's way; a cut inside them begins with the client's.
    let source = breakpoints.inside(&request.conversation.messages).then(|| request.conversation.clone());
    let rendered = prompt(inputs, &mut request.conversation, request.include_reasoning)?;
    let tokens = encode_prompt(inputs, Some(arrival.tenant.id), &rendered.prompt, false, false, "messages")?;
    let placing = cache::BreakpointContext {
        inputs,
        tenant: arrival.tenant.id,
        conversation: &request.conversation,
        source: source.as_ref(),
        prompt: &rendered.prompt,
        tokens: &tokens,
    };
    let placed = placing.find(&breakpoints);
    let (mut generation, reading) = (request.generation, rendered.reading);
    let rules =
        rules(inputs, arrival.tenant.id, &generation, Some((&request.conversation, reading.as_ref())))?;
    // What the context cannot hold is left out, and the answer says so.
    let room = (inputs.served.model.context_length as usize).saturating_sub(tokens.len()) as u32;
    let cut = wanted > room && room > 0;
    generation.max_tokens = Some(if cut { room } else { wanted });
    let retention = cache::ranges(&placed);
    let prompt = PromptJob::wanted(inputs, arrival.tenant.id, &generation, rules, tokens, "messages")?;
    let prompt = PromptJob { retention, screened, ..prompt };
    let writer =
        Box::new(MessageWriter::new(&arrival.id, generation.model(inputs.served.name()), placed, cut));
    let (arrived, asker) = (arrival.at, inputs.asker(arrival, "messages"));
    let notes = request.notes;
    Ok(Job { reading, arrived, asker, notes, ..Job::new(writer, generation, vec![prompt]) })
}

/// `POST /v1/messages/count_tokens`: what `usage` would add up to.
pub async fn count_tokens(
    State(inputs): Shared<InputProcessor>,
    State(load): Shared<Load>,
    request: JsonRequest,
) -> Reply {
    let JsonRequest { tenant, body, held: _held, .. } = request;
    let count = load.off_thread(tenant.id, body.len(), move || counted(&inputs, tenant.id, &body)).await?;
    Ok(json_response(json!({"input_tokens": count}).to_string()))
}

fn counted(inputs: &InputProcessor, tenant: TenantId, body: &[u8]) -> Result<usize, ApiError> {
    let mut conversation = anthropic::counted(body, &inputs.served.context)?;
    let rendered = prompt(inputs, &mut conversation, true)?;
    // Counting is what this is for, so a text longer than the context is no error here.
    Ok(encode_prompt(inputs, Some(tenant), &rendered.prompt, false, true, "messages")?.len())
}
