//! The request: its items become a conversation, everything else is read as for a chat.
//!
//! Invariants: as everywhere, a field is honoured or refused by its path; [`REFUSED`] has what exists at OpenAI's and not here.
//! Reasoning belongs to the message or call that follows it; calls in a row belong to one message.

use std::collections::HashMap;

use serde_json::value::RawValue;
use serde_json::{Map, Value, json};

use super::answer::{Answer, Keeper};
use super::tools::{self, flat};
use crate::app::State;
use crate::chat::{Conversation, check_model, encode};
use crate::config::Limits;
use crate::effort::{self, Thinking};
use crate::error::ApiError;
use crate::fields::{Fields, parse};
use crate::generate::{Job, PromptJob, unix_s};
use crate::hints::{Api, Hints};
use crate::http::{Arrival, fresh_id};
use crate::openapi::tables::RESPONSE;
use crate::params::Generation;
use crate::retain::CacheWish;
use crate::safety::{asker, screen_conversation};
use crate::structured::Wish;

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
    let (mut tools, namespaces) = tools::read(&mut fields, limits, &mut frame.0)?;
    let store = fields.take::<bool>("store")?.unwrap_or(true);
    let background = fields.take::<bool>("background")?.unwrap_or(false);
    if background && !store {
        return Err(ApiError::invalid(
            "background",
            "'background' needs 'store': its answer is asked for later.",
        ));
    }
    if background && generation.stream.is_some() {
        return Err(ApiError::unsupported(
            "background",
            "a streamed response has a client that waits; send one of the two",
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
    messages.extend(input(&mut fields, limits)?);
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
    let rendered = conversation.prompt(state, true)?;
    generation.reading = rendered.reading;
    generation.follow(state, Some(&conversation))?;
    let mut tokens = encode(state, &rendered.text, false, false, "input")?;
    let params = generation.fit(&mut tokens, facts, "input")?;
    let retention = generation.cache.ranges(tokens.len() as u32)?;

    // Not the request's id, which clients may choose and repeat.
    let id = format!("resp_{}", fresh_id());
    let frame = frame.finish(json!({
        "id": id, "object": "response", "created_at": unix_s(), "completed_at": null, "error": null, "incomplete_details": null,
        "instructions": instructions, "max_output_tokens": generation.max_tokens, "model": facts.name(), "usage": null,
        "previous_response_id": previous, "temperature": generation.sampling.temperature, "top_p": generation.sampling.top_p,
        "store": store, "background": background, "truncation": "disabled", "service_tier": "default", "top_logprobs": 0,
        "max_tool_calls": null,
    }));
    let keeper = store.then(|| Keeper { store: state.responses.clone(), tenant, messages: kept.clone() });
    let answer = Answer::new(id.clone(), frame, keeper, namespaces);
    let background =
        background.then(|| Background { id, response: answer.unfinished("in_progress"), messages: kept });
    let prompt =
        PromptJob { tokens: tokens.into(), params, echo: None, echo_logprobs: false, retention, screened };
    let asker = asker(state, arrival, "responses");
    let job =
        Job { wire: Box::new(answer), generation, prompts: vec![prompt], arrived: arrival.at, asker, notes };
    Ok(Prepared { job, background })
}

/// What the response repeats of the request.
#[derive(Default)]
struct Frame(Map<String, Value>);

impl Frame {
    fn finish(self, rest: Value) -> Map<String, Value> {
        let mut all = self.0;
        if let Value::Object(rest) = rest {
            all.extend(rest);
        }
        all
    }

    /// What is checked and repeated, and has no effect; and what can only have its default.
    fn plain(&mut self, fields: &mut Fields) -> Result<(), ApiError> {
        for name in ["user", "safety_identifier"] {
            self.0.insert(name.into(), fields.take::<String>(name)?.into());
        }
        let metadata = fields.take::<HashMap<String, String>>("metadata")?.unwrap_or_default();
        self.0.insert("metadata".into(), json!(metadata));
        fields.only("service_tier", &["auto", "default"], "there is one tier")?;
        fields.only("truncation", &["disabled"], "nothing of a conversation is dropped; send fewer items")?;
        if fields.take::<u32>("top_logprobs")?.is_some_and(|top| top > 0) {
            return Err(ApiError::unsupported("top_logprobs", "use chat completions for log probabilities"));
        }
        let include = fields.take::<Vec<String>>("include")?.unwrap_or_default();
        if let Some(what) = include.iter().find(|what| !INCLUDES.contains(&&***what)) {
            let known = INCLUDES.join(", ");
            let why = format!("'{what}' is not available; known are {known}");
            return Err(ApiError::unsupported("include", &why));
        }
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
        self.0.insert("text".into(), told);
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
        self.0.insert("reasoning".into(), told);
        Ok(budget)
    }
}

/// The `input` field as messages.
fn input(fields: &mut Fields, limits: &Limits) -> Result<Vec<Value>, ApiError> {
    let raw: &RawValue = fields.require("input")?;
    if !raw.get().starts_with('[') {
        let text: String = parse(raw, "input")?;
        return Ok(vec![json!({"role": "user", "content": text})]);
    }
    let items: Vec<&RawValue> = parse(raw, "input")?;
    if items.is_empty() || items.len() > limits.messages {
        let message = format!("'input' has {} items; give 1 to {}.", items.len(), limits.messages);
        return Err(ApiError::invalid("input", message));
    }
    let mut gathered = Gathered::default();
    for (index, raw) in items.iter().enumerate() {
        item(raw, format!("input[{index}]"), &mut gathered)?;
    }
    Ok(gathered.finish())
}

fn item(raw: &RawValue, path: String, out: &mut Gathered) -> Result<(), ApiError> {
    let mut item = Fields::of_value(raw, path)?;
    let kind = item.take::<String>("type")?;
    // Names and states that the server itself gave.
    item.take::<String>("id")?;
    item.take::<String>("status")?;
    match kind.as_deref().unwrap_or("message") {
        "message" => {
            let role: String = item.require("role")?;
            let text = texts(
                item.require("content")?,
                item.path("content"),
                &["input_text", "output_text", "text", "refusal"],
            )?;
            item.take::<String>("phase")?;
            match role.as_str() {
                "assistant" => out.assistant(text),
                "system" | "developer" => out.message("system", text),
                "user" => out.message("user", text),
                other => {
                    let path = item.path("role");
                    let message = format!(
                        "Invalid value for '{path}': '{other}' is not one of user, assistant, system, developer."
                    );
                    return Err(ApiError::invalid(path, message));
                }
            }
        }
        "function_call" => {
            let (id, name): (String, String) = (item.require("call_id")?, item.require("name")?);
            let name = match item.take::<String>("namespace")? {
                Some(namespace) => flat(&namespace, &name),
                None => name,
            };
            let arguments: String = item.require("arguments")?;
            out.call(
                json!({"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}),
            );
        }
        "function_call_output" => {
            let id: String = item.require("call_id")?;
            let text =
                texts(item.require("output")?, item.path("output"), &["input_text", "output_text", "text"])?;
            out.flush();
            out.messages.push(json!({"role": "tool", "tool_call_id": id, "content": text}));
        }
        "reasoning" => {
            item.take::<Vec<Value>>("summary")?;
            item.take::<String>("encrypted_content")?;
            if let Some(raw) = item.raw("content").filter(|raw| raw.get() != "[]") {
                out.reasoning(texts(raw, item.path("content"), &["reasoning_text", "text"])?);
            }
        }
        other => {
            return Err(ApiError::unsupported(
                item.path("type"),
                &format!("items of type '{other}' are not available"),
            ));
        }
    }
    item.finish(&[])
}

/// Text, or parts that are text.
fn texts(raw: &RawValue, path: String, kinds: &[&str]) -> Result<String, ApiError> {
    if !raw.get().starts_with('[') {
        return parse(raw, &path);
    }
    let parts: Vec<&RawValue> = parse(raw, &path)?;
    let text = |(index, raw): (usize, &&RawValue)| {
        let mut part = Fields::of_value(raw, format!("{path}[{index}]"))?;
        let kind: String = part.require("type")?;
        if !kinds.contains(&kind.as_str()) {
            return Err(ApiError::unsupported(
                part.path("type"),
                &format!("'{kind}' is not text, and the model takes text only"),
            ));
        }
        let text: String = part.require(if kind == "refusal" { "refusal" } else { "text" })?;
        // What the server itself says about its texts.
        part.take::<Vec<Value>>("annotations")?;
        part.take::<Vec<Value>>("logprobs")?;
        part.finish(&[])?;
        Ok(text)
    };
    let texts: Result<Vec<String>, ApiError> = parts.iter().enumerate().map(text).collect();
    Ok(texts?.join("\n"))
}

/// Items on their way to messages: one of the assistant's may be open.
#[derive(Default)]
struct Gathered {
    messages: Vec<Value>,
    open: Option<Map<String, Value>>,
}

impl Gathered {
    fn message(&mut self, role: &str, text: String) {
        self.flush();
        self.messages.push(json!({"role": role, "content": text}));
    }

    fn assistant(&mut self, text: String) {
        if self
            .open
            .as_ref()
            .is_some_and(|open| open.contains_key("content") || open.contains_key("tool_calls"))
        {
            self.flush();
        }
        self.open.get_or_insert_default().insert("content".into(), text.into());
    }

    fn call(&mut self, call: Value) {
        let open = self.open.get_or_insert_default();
        if let Value::Array(calls) = open.entry("tool_calls").or_insert_with(|| json!([])) {
            calls.push(call);
        }
    }

    fn reasoning(&mut self, text: String) {
        self.flush();
        self.open.get_or_insert_default().insert("reasoning_content".into(), text.into());
    }

    fn flush(&mut self) {
        let Some(mut open) = self.open.take() else { return };
        if !open.contains_key("content") {
            let empty = if open.contains_key("tool_calls") { Value::Null } else { "".into() };
            open.insert("content".into(), empty);
        }
        open.insert("role".into(), "assistant".into());
        self.messages.push(Value::Object(open));
    }

    fn finish(mut self) -> Vec<Value> {
        self.flush();
        self.messages
    }
}

/// The name under which the model called.
fn called(item: &Value) -> String {
    let name = item["name"].as_str().unwrap_or_default();
    item["namespace"].as_str().map_or_else(|| name.to_owned(), |namespace| flat(namespace, name))
}

/// An answer's items as messages, for what goes on from it.
pub fn said(output: &[Value]) -> Vec<Value> {
    let mut gathered = Gathered::default();
    let text = |item: &Value| item["content"][0]["text"].as_str().unwrap_or_default().to_owned();
    for item in output {
        match item["type"].as_str() {
            Some("message") => gathered.assistant(text(item)),
            Some("reasoning") => gathered.reasoning(text(item)),
            Some("function_call") => gathered.call(json!({
                "id": item["call_id"], "type": "function",
                "function": {"name": called(item), "arguments": item["arguments"]},
            })),
            _ => {}
        }
    }
    gathered.finish()
}
