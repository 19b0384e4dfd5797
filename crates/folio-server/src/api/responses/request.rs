//! The request: its items become a conversation (`items`), everything else is read as for a chat.
//!
//! Invariants: as everywhere, a field is honoured, refused by its path, or a hint; [`REFUSED`] has what exists at OpenAI's and not here.

use std::collections::HashMap;
use std::sync::Arc;

use serde_json::{Map, Value, json};

use super::answer::{Answer, Keeper};
use super::items::{self, Source};
use super::sealed::Sealer;
use super::{tools, truncation};
use crate::api::effort::{self, Thinking};
use crate::api::error::ApiError;
use crate::api::fields::{Fields, parse};
use crate::api::hints::{Api, Hints};
use crate::api::openai::chat::{Conversation, check_model};
use crate::api::openapi::tables::RESPONSE;
use crate::api::params::Generation;
use crate::api::retain::CacheWish;
use crate::api::structured::Wish;
use crate::app::State;
use crate::config::Limits;
use crate::generation::generate::{Job, PromptJob, unix_s};
use crate::generation::safety::{asker, screen_conversation};
use crate::generation::tokenizing::encode_prompt;
use crate::http::{Arrival, fresh_id};

/// Fields that this server refuses, with the reason a client reads.
pub const REFUSED: &[(&str, &str)] = &[
    ("context_management", "the conversation is used as it is sent"),
    ("conversation", "use previous_response_id, or send the items"),
    ("moderation", "this server does not moderate"),
    ("prompt", "prompt templates are not kept here; send the items"),
    ("prompt_cache_options", "prefixes are cached automatically; use cache"),
];

/// What `include` may ask for. All but the first are parts of results of tools that run at a provider's, of which there are none.
const INCLUDES: &[&str] = &[
    ENCRYPTED,
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "web_search_call.action.sources",
    "web_search_call.results",
];
const ENCRYPTED: &str = "reasoning.encrypted_content";
const SUMMARIES: &[&str] = &["auto", "concise", "detailed", "none"];

/// A request ready to run.
pub struct Prepared {
    pub job: Job,
    /// It runs without a client that waits: the response as it is meanwhile, and its conversation.
    pub background: Option<Background>,
}

pub struct Background {
    pub id: String,
    pub response: Value,
    pub messages: Vec<Value>,
    pub input: Arc<[Value]>,
}

impl AsMut<Job> for Prepared {
    fn as_mut(&mut self) -> &mut Job {
        &mut self.job
    }
}

pub fn prepare(state: &State, arrival: &Arrival) -> Result<Prepared, ApiError> {
    let tenant = arrival.tenant.id;
    let (facts, limits) = (&state.app.model, &state.config.limits);
    let mut fields = Fields::of_body(&arrival.body)?;
    let mut hints = Hints::new(&state.config.hints, Api::Responses);
    check_model(&mut fields, state)?;
    let mut generation = Generation::read_plain(&mut fields, facts, limits, "stop")?;
    generation.cache = CacheWish::read(&mut fields)?;
    generation.max_tokens = fields.take("max_output_tokens")?;
    if generation.max_tokens == Some(0) {
        return Err(ApiError::invalid(
            "max_output_tokens",
            "Invalid 'max_output_tokens': 0 is not a positive number.",
        ));
    }
    let mut frame = Frame::default();
    let mut kwargs = Map::new();
    frame.plain(&mut fields)?;
    generation.structure = frame.text(&mut fields, limits, &mut hints)?;
    let budget = frame.reasoning(&mut fields, state, &mut kwargs)?;
    generation.bounds.thinking = budget;
    let (mut tools, namespaces) = tools::read(&mut fields, limits, &mut frame.told)?;
    let store = fields.take::<bool>("store")?.unwrap_or(true);
    let background = fields.take::<bool>("background")?.unwrap_or(false);
    if background && !store {
        return Err(ApiError::invalid(
            "background",
            "'background' needs 'store': its answer is asked for later.",
        ));
    }
    let instructions = fields.take::<String>("instructions")?;
    let previous = fields.take::<String>("previous_response_id")?;
    let mut messages: Vec<Value> = match &previous {
        Some(id) => match state.responses.get(tenant, id) {
            Some(record) => record.messages.to_vec(),
            None => return Err(super::not_found("previous_response_id", id)),
        },
        None => Vec::new(),
    };
    let sealer = Sealer::new(state, &arrival.tenant)?;
    let source = Source { state, tenant: &arrival.tenant, sealer: &sealer };
    let input = items::read(&mut fields, &source, limits, &mut hints)?;
    messages.extend(input.messages);
    let mut notes = hints.close(fields, &RESPONSE)?;
    notes.left_out = std::mem::take(&mut tools.left_out);
    if messages.len() > limits.messages {
        let message =
            format!("The conversation has {} messages; the limit is {}.", messages.len(), limits.messages);
        return Err(ApiError::invalid("input", message));
    }

    let kept = messages.clone();
    if let Some(text) = &instructions {
        messages.insert(0, json!({"role": "system", "content": text}));
    }
    let mut conversation =
        Conversation { messages, tools, kwargs, budget, add_generation_prompt: true, continue_final: false };
    let screened = screen_conversation(state, arrival, &mut conversation)?;
    let (rendered, mut tokens) = match frame.truncates {
        true => truncation::prompt(state, tenant, &mut conversation, generation.max_tokens)?,
        false => {
            let rendered = conversation.prompt(state, true)?;
            let tokens = encode_prompt(state, Some(tenant), &rendered.prompt, false, false, "input")?;
            (rendered, tokens)
        }
    };
    generation.reading = rendered.reading;
    generation.follow(state, tenant, Some(&conversation))?;
    let params = generation.fit(&mut tokens, facts, "input")?;
    let retention = generation.cache.ranges(tokens.len() as u32)?;

    // Not the request's id, which clients may choose and repeat.
    let id = format!("resp_{}", fresh_id());
    let (sealer, truncates) = (frame.seals.then_some(sealer), frame.truncates);
    let fields_told = frame.finish(json!({
        "id": id, "object": "response", "created_at": unix_s(), "completed_at": null, "error": null, "incomplete_details": null,
        "instructions": instructions, "max_output_tokens": generation.max_tokens, "model": facts.name(), "usage": null,
        "previous_response_id": previous, "temperature": generation.sampling.temperature, "top_p": generation.sampling.top_p,
        "store": store, "background": background, "truncation": if truncates { "auto" } else { "disabled" }, "service_tier": "default", "top_logprobs": 0,
        "max_tool_calls": null,
    }));
    let input = items::named(input.items, &id);
    let keeper = store.then(|| Keeper {
        store: state.responses.clone(),
        tenant,
        messages: kept.clone(),
        input: input.clone(),
    });
    let answer = Answer::new(id.clone(), fields_told, keeper, namespaces, sealer);
    let background = background.then(|| Background {
        id,
        response: answer.unfinished("in_progress"),
        messages: kept,
        input,
    });
    let prompt =
        PromptJob { tokens: tokens.into(), params, echo: None, echo_logprobs: false, retention, screened };
    let asker = asker(state, arrival, "responses");
    let job =
        Job { wire: Box::new(answer), generation, prompts: vec![prompt], arrived: arrival.at, asker, notes };
    Ok(Prepared { job, background })
}

/// What the response repeats of the request, and what that asks for.
#[derive(Default)]
struct Frame {
    told: Map<String, Value>,
    /// Reasoning is carried by the client, sealed.
    seals: bool,
    /// What does not fit is left out from the beginning.
    truncates: bool,
}

impl Frame {
    fn finish(self, rest: Value) -> Map<String, Value> {
        let mut all = self.told;
        if let Value::Object(rest) = rest {
            all.extend(rest);
        }
        all
    }

    /// What is checked and repeated, and has no effect; and what can only have its default.
    fn plain(&mut self, fields: &mut Fields) -> Result<(), ApiError> {
        for name in ["user", "safety_identifier"] {
            self.told.insert(name.into(), fields.take::<String>(name)?.into());
        }
        let metadata = fields.take::<HashMap<String, String>>("metadata")?.unwrap_or_default();
        self.told.insert("metadata".into(), json!(metadata));
        fields.only("service_tier", &["auto", "default"], "there is one tier")?;
        self.truncates = match fields.take::<String>("truncation")?.as_deref() {
            None | Some("disabled") => false,
            Some("auto") => true,
            Some(other) => {
                let message =
                    format!("Invalid value for 'truncation': '{other}' is not one of auto, disabled.");
                return Err(ApiError::invalid("truncation", message));
            }
        };
        if fields.take::<u32>("top_logprobs")?.is_some_and(|top| top > 0) {
            return Err(ApiError::unsupported("top_logprobs", "use chat completions for log probabilities"));
        }
        let include = fields.take::<Vec<String>>("include")?.unwrap_or_default();
        if let Some(what) = include.iter().find(|what| !INCLUDES.contains(&&***what)) {
            let known = INCLUDES.join(", ");
            let why = format!("'{what}' is not available; known are {known}");
            return Err(ApiError::unsupported("include", &why));
        }
        self.seals = include.iter().any(|what| what == ENCRYPTED);
        if let Some(raw) = fields.raw("stream_options") {
            let mut options = Fields::of_value(raw, "stream_options".into())?;
            if options.take("include_obfuscation")?.unwrap_or(false) {
                let why = "events are not padded; leave it out or send false";
                return Err(ApiError::unsupported(options.path("include_obfuscation"), why));
            }
            options.finish(&[])?;
        }
        Ok(())
    }

    fn text(
        &mut self,
        fields: &mut Fields,
        limits: &Limits,
        hints: &mut Hints,
    ) -> Result<Option<Wish>, ApiError> {
        let mut wish = None;
        let mut told = json!({"format": {"type": "text"}});
        if let Some(raw) = fields.raw("text") {
            let mut text = Fields::of_value(raw, "text".into())?;
            if let Some(raw) = text.raw("format") {
                told["format"] = parse(raw, "text.format")?;
                let mut format = Fields::of_value(raw, "text.format".into())?;
                wish = match format.require::<String>("type")?.as_str() {
                    "text" => None,
                    "json_object" => Some(Wish::json(json!({"type": "object"}), "text.format".into())),
                    "json_schema" => Some(Wish::of_named(&mut format, limits)?),
                    other => {
                        let message = format!(
                            "Invalid value for 'text.format.type': '{other}' is not one of text, json_object, json_schema."
                        );
                        return Err(ApiError::invalid("text.format.type", message));
                    }
                };
                format.finish(&[])?;
            }
            hints.finish(text, &["format"], &[])?;
        }
        self.told.insert("text".into(), told);
        Ok(wish)
    }

    fn reasoning(
        &mut self,
        fields: &mut Fields,
        state: &State,
        kwargs: &mut Map<String, Value>,
    ) -> Result<Option<(u32, &'static str)>, ApiError> {
        let mut budget = None;
        let mut told = json!({"effort": null, "summary": null});
        if let Some(raw) = fields.raw("reasoning") {
            let mut reasoning = Fields::of_value(raw, "reasoning".into())?;
            let effort = reasoning.take::<String>("effort")?;
            told["effort"] = effort.clone().into();
            let thinking = Thinking::default();
            budget = effort::apply(&state.readers, "reasoning.effort", effort.as_deref(), thinking, kwargs)?;
            for name in ["summary", "generate_summary"] {
                // What there is is told: the reasoning itself.
                let summary = reasoning.take::<String>(name)?;
                if let Some(summary) = summary.filter(|summary| !SUMMARIES.contains(&&**summary)) {
                    let (path, known) = (reasoning.path(name), SUMMARIES.join(", "));
                    let message = format!("Invalid value for '{path}': '{summary}' is not one of {known}.");
                    return Err(ApiError::invalid(path, message));
                }
            }
            reasoning.finish(&[])?;
        }
        self.told.insert("reasoning".into(), told);
        Ok(budget)
    }
}
