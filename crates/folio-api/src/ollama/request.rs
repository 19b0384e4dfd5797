//! The requests of `/api/chat` and `/api/generate`: what becomes the prompt, and what says how to answer it.

use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::models::adapter;
use super::{messages, options};
use crate::constraint::Constraint;
use crate::context::{Context, RequestLimits};
use crate::conversation::Conversation;
use crate::effort::Thinking;
use crate::error::ApiError;
use crate::fields::{Fields, Json};
use crate::hints::{Api, Hints, Notes};
use crate::openai::chat::{ReasoningBudget, logprobs};
use crate::openapi::ollama::{CHAT, GENERATE};
use crate::params::{Generation, StreamOptions, only};
use crate::tools::{self, Dialect, ToolUse};

const THINK: &str = "think";
const FORMAT: &str = "format";

/// What is to be answered.
#[derive(Clone, Debug)]
pub enum PromptSource {
    /// Nothing: the model is to be loaded, which it is.
    Nothing,
    /// A text as it is, which the model goes on with.
    Text(String),
    Conversation(Box<Conversation>),
}

/// A request for an answer.
#[derive(Clone, Debug)]
pub struct OllamaRequest {
    pub generation: Generation,
    pub prompt: PromptSource,
    /// A conversation that is too long loses its oldest turns.
    pub truncates: bool,
    /// What was thought is part of the answer.
    pub include_reasoning: bool,
    pub notes: Notes,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Think {
    Switch(bool),
    Effort(String),
}

/// What a request says of thinking.
struct ThinkFields {
    shown: bool,
    kwargs: Map<String, Value>,
    budget: ReasoningBudget,
    /// It asks for some.
    wanted: bool,
}

/// Reads a request to `/api/chat`.
pub fn chat(body: &[u8], context: &Context) -> Result<OllamaRequest, ApiError> {
    let mut fields = Fields::of_body(body)?;
    let mut hints = Hints::new(&context.hints, Api::Ollama);
    let mut generation = generation(&mut fields, context, &mut hints)?;
    let messages = messages::read(&mut fields, &context.limits, &mut hints)?;
    let tools = tools::read(&mut fields, Dialect::Chat, &context.limits, &mut |_, _| Ok(()))?;
    let think = think(&mut fields, context)?;
    let truncates = fields.take("truncate")?.unwrap_or(false);
    let mut notes = hints.close(fields, &CHAT)?;
    generation.bounds.thinking = think.budget;
    let prompt = match messages.is_empty() {
        true => PromptSource::Nothing,
        false => {
            let mut conversation = conversation(messages, tools, think.kwargs);
            notes.left_out = std::mem::take(&mut conversation.tools.left_out);
            PromptSource::Conversation(conversation.into())
        }
    };
    Ok(OllamaRequest { generation, prompt, truncates, include_reasoning: think.shown, notes })
}

/// Reads a request to `/api/generate`.
pub fn generate(body: &[u8], context: &Context) -> Result<OllamaRequest, ApiError> {
    let mut fields = Fields::of_body(body)?;
    let mut hints = Hints::new(&context.hints, Api::Ollama);
    let mut generation = generation(&mut fields, context, &mut hints)?;
    let prompt = fields.take::<String>("prompt")?.unwrap_or_default();
    let system = fields.take::<String>("system")?.filter(|system| !system.is_empty());
    let raw = fields.take("raw")?.unwrap_or(false);
    for name in ["suffix", "template"] {
        // Older SDKs send them for what is not used.
        if matches!(fields.peek(name), Some(Json::String(text)) if text.is_empty()) {
            fields.raw(name);
        }
    }
    let think = think(&mut fields, context)?;
    only(&mut fields, "truncate", &[false], "there are no turns that could be left out; use /api/chat")?;
    let notes = hints.close(fields, &GENERATE)?;
    for (asked, name) in [(system.is_some(), "system"), (think.wanted, THINK)] {
        if asked && raw {
            let message =
                format!("'{name}' is for the chat template, which 'raw' leaves out; give one of them.");
            return Err(ApiError::invalid(name, message));
        }
    }
    // A model without a template is one that goes on with texts.
    let raw = raw || (context.capabilities.template.is_none() && system.is_none());
    let prompt = match (prompt.is_empty(), raw) {
        (true, _) => PromptSource::Nothing,
        (false, true) => PromptSource::Text(prompt),
        (false, false) => {
            generation.bounds.thinking = think.budget;
            let system = system.map(|text| json!({"role": "system", "content": text}));
            let messages = system.into_iter().chain([json!({"role": "user", "content": prompt})]).collect();
            PromptSource::Conversation(conversation(messages, ToolUse::default(), think.kwargs).into())
        }
    };
    Ok(OllamaRequest { generation, prompt, truncates: false, include_reasoning: think.shown, notes })
}

/// A last message of the assistant is the beginning of the answer.
fn conversation(messages: Vec<Value>, tools: ToolUse, kwargs: Map<String, Value>) -> Conversation {
    let mut conversation =
        Conversation { messages, tools, kwargs, add_generation_prompt: true, continue_final: false };
    let calls = conversation.messages.last().is_some_and(|last| last.get("tool_calls").is_some());
    conversation.continue_final = conversation.final_text().is_some() && !calls;
    conversation.add_generation_prompt = !conversation.continue_final;
    conversation
}

/// Takes what both have in common.
fn generation(fields: &mut Fields, context: &Context, hints: &mut Hints) -> Result<Generation, ApiError> {
    let adapter = adapter(fields, context)?;
    let mut generation = Generation { adapter, ..options::read(fields, context, hints)? };
    generation.stream = fields.take("stream")?.unwrap_or(true).then(StreamOptions::default);
    generation.sampling.logprobs = logprobs(fields, context.limits.logprobs)?;
    generation.constraint = format(fields, &context.limits)?;
    only(fields, "shift", &[false], "an answer ends where the context does; no position is moved")?;
    Ok(generation)
}

/// JSON, or what a schema allows.
fn format(fields: &mut Fields, limits: &RequestLimits) -> Result<Option<Constraint>, ApiError> {
    match fields.raw(FORMAT) {
        None => Ok(None),
        Some(Json::String(word)) if word.is_empty() => Ok(None),
        Some(Json::String(word)) if word == "json" => {
            Ok(Some(Constraint::json(json!({"type": "object"}), FORMAT.into())))
        }
        Some(raw @ Json::Object(_)) => Constraint::of_schema(raw, FORMAT.into(), limits).map(Some),
        Some(_) => Err(ApiError::invalid(FORMAT, "Invalid 'format': use \"json\" or a JSON schema.")),
    }
}

fn think(fields: &mut Fields, context: &Context) -> Result<ThinkFields, ApiError> {
    let said = match fields.raw(THINK).map(Think::deserialize).transpose() {
        Ok(said) => said,
        Err(_) => {
            let message = "Invalid 'think': use true, false, or how much: low, medium, high, max.";
            return Err(ApiError::invalid(THINK, message));
        }
    };
    let (on, effort) = match said {
        None => (None, None),
        Some(Think::Switch(on)) => (Some(on), None),
        Some(Think::Effort(effort)) => (None, Some(effort)),
    };
    let mut kwargs = Map::new();
    let thinking = Thinking { on, budget: None };
    let budget = context.capabilities.efforts.apply(THINK, effort.as_deref(), thinking, &mut kwargs)?;
    // Without a known mark there is nothing to leave out.
    let shown = on != Some(false) || !context.capabilities.reasons();
    Ok(ThinkFields { shown, kwargs, budget, wanted: on == Some(true) || effort.is_some() })
}
