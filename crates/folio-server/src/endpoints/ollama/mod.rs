//! Ollama's API: `/api/chat`, `/api/generate` and what goes with them.
//!
//! Must never: generate, render or read an answer itself: a request becomes the same conversation and the same job as a chat of OpenAI's. One
//! that asks for nothing but that the model be loaded is a job without a prompt.

mod models;

use axum::extract::State;
use folio_api::ApiError;
use folio_api::ollama::{self, LineWriter, OllamaRequest, PromptSource, embed};
use folio_api::openai::writer::CompletionKind;

pub(crate) use models::details;
pub use models::{delete, ps, pull, show, tags, version};

use crate::arrival::{Arrival, JsonRequest};
use crate::endpoints::openai::embeddings;
use crate::generation::Generator;
use crate::generation::input::InputProcessor;
use crate::generation::job::{Job, PromptJob};
use crate::generation::prompt::prompt;
use crate::generation::sampling::rules;
use crate::generation::screening::{screen_conversation, screen_prompt};
use crate::generation::tokenizing::{encode, encode_prompt};
use crate::generation::truncation::truncated;
use crate::http::Shared;
use crate::http::reply::Reply;
use crate::observability::step;
use crate::observability::why::RequestKind;

/// `POST /api/chat`.
pub(crate) fn chat(inputs: &InputProcessor, arrival: &Arrival) -> Result<Job, ApiError> {
    let request = {
        let _span = step!("read");
        ollama::chat(&arrival.body, &inputs.served.context)?
    };
    job(inputs, arrival, request, (CompletionKind::Chat, "messages", "ollama.chat"))
}

/// `POST /api/generate`.
pub(crate) fn generate(inputs: &InputProcessor, arrival: &Arrival) -> Result<Job, ApiError> {
    let request = {
        let _span = step!("read");
        ollama::generate(&arrival.body, &inputs.served.context)?
    };
    job(inputs, arrival, request, (CompletionKind::Completion, "prompt", "ollama.generate"))
}

/// `param` names the prompt's field.
fn job(
    inputs: &InputProcessor,
    arrival: &Arrival,
    request: OllamaRequest,
    (kind, param, api): (CompletionKind, &str, &'static str),
) -> Result<Job, ApiError> {
    let OllamaRequest { generation, prompt: source, truncates, include_reasoning, notes } = request;
    let tenant = arrival.tenant.id;
    let (mut prompts, mut reading, mut asked) = (Vec::new(), None, RequestKind::Chat);
    match source {
        PromptSource::Nothing => {}
        PromptSource::Text(text) => {
            asked = RequestKind::Completion;
            let (screened, replaced) = screen_prompt(inputs, arrival, 0, || text.clone())?;
            let text = replaced.unwrap_or(text);
            let tokens = encode(inputs, Some(tenant), &text, true, false, param)?;
            let rules = rules(inputs, tenant, &generation, None)?;
            let wanted = PromptJob::wanted(inputs, tenant, &generation, rules, tokens, param)?;
            prompts.push(PromptJob { screened, ..wanted });
        }
        PromptSource::Conversation(mut conversation) => {
            let screened = screen_conversation(inputs, arrival, &mut conversation)?;
            let (rendered, tokens) = match truncates {
                true => {
                    let wanted = (generation.max_tokens, include_reasoning);
                    truncated(inputs, tenant, &mut conversation, wanted, param)?
                }
                false => {
                    let rendered = prompt(inputs, &mut conversation, include_reasoning)?;
                    let tokens = encode_prompt(inputs, Some(tenant), &rendered.prompt, false, false, param)?;
                    (rendered, tokens)
                }
            };
            reading = rendered.reading;
            let rules = rules(inputs, tenant, &generation, Some((&conversation, reading.as_ref())))?;
            let wanted = PromptJob::wanted(inputs, tenant, &generation, rules, tokens, param)?;
            prompts.push(PromptJob { screened, ..wanted });
        }
    }
    let (name, tokenizer) = (generation.model(inputs.served.name()), inputs.served.tokenizer.clone());
    let writer = Box::new(LineWriter::new(kind, name, tokenizer, &generation));
    let (arrived, asker) = (arrival.at, inputs.asker(arrival, api));
    Ok(Job { reading, asked, arrived, asker, notes, ..Job::new(writer, generation, prompts) })
}

/// `POST /api/embed`.
pub(crate) async fn embed(State(generator): Shared<Generator>, request: JsonRequest) -> Reply {
    embeddings::reply(generator, request, embed::embed).await
}

/// `POST /api/embeddings`.
pub(crate) async fn embed_one(State(generator): Shared<Generator>, request: JsonRequest) -> Reply {
    embeddings::reply(generator, request, embed::embeddings).await
}
