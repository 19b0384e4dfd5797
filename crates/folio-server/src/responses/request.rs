//! The request: its items become a conversation, everything else is read as for a chat.
//!
//! Invariants: as everywhere, a field is honoured or refused by its path; [`REFUSED`] has what exists at OpenAI's and not here.
//! Reasoning belongs to the message or call that follows it; calls in a row belong to one message.

use std::collections::HashMap;

use serde_json::value::RawValue;
use serde_json::{Map, Value, json};

use super::answer::{Answer, Keeper};
use crate::app::State;
use crate::chat::{Conversation, check_model, encode_prompt};
use crate::error::ApiError;
use crate::fields::{Fields, parse};
use crate::generate::{Job, PromptJob, unix_s};
use crate::http::{Arrival, fresh_id};
use crate::params::Generation;
use crate::reading::EFFORT;
use crate::retain::CacheWish;
use crate::safety::{asker, screen_conversation};
use crate::structured::Wish;
use crate::tools::{ToolChoice, ToolUse, at_most, check_name, mode};

/// Fields that this server refuses, with the reason a client reads.
pub const REFUSED: &[(&str, &str)] = &[
    ("context_management", "the conversation is used as it is sent"),
    ("conversation", "use previous_response_id, or send the items"),
    ("max_tool_calls", "it limits built-in tools, and there are none"),
    ("moderation", "this server does not moderate"),
    ("prompt", "prompt templates are not kept here; send the items"),
    ("prompt_cache_options", "prefixes are cached automatically; use cache"),
];

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
    generation.structure = frame.text(&mut fields, limits)?;
    frame.reasoning(&mut fields, state, &mut kwargs)?;
    let tools = frame.tools(&mut fields, limits)?;
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
    fields.finish(REFUSED)?;
    if messages.len() > limits.messages {
        let message =
            format!("The conversation has {} messages; the limit is {}.", messages.len(), limits.messages);
        return Err(ApiError::invalid("input", message));
    }

    let kept = messages.clone();
    if let Some(text) = &instructions {
        messages.insert(0, json!({"role": "system", "content": text}));
    }
    let mut conversation = Conversation {
        messages,
        tools,
        kwargs,
        effort: None,
        add_generation_prompt: true,
        continue_final: false,
    };
    let screened = screen_conversation(state, arrival, &mut conversation)?;
    let rendered = conversation.prompt(state, true)?;
    generation.reading = rendered.reading;
    generation.follow(state, Some(&conversation))?;
    let mut tokens = encode_prompt(state, &rendered.prompt, false, false, "input")?;
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
    let answer = Answer::new(id.clone(), frame, keeper);
    let background =
        background.then(|| Background { id, response: answer.unfinished("in_progress"), messages: kept });
    let prompt =
        PromptJob { tokens: tokens.into(), params, echo: None, echo_logprobs: false, retention, screened };
    let asker = asker(state, arrival, "responses");
    let job = Job { wire: Box::new(answer), generation, prompts: vec![prompt], arrived: arrival.at, asker };
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
        if let Some(what) = include.first() {
            return Err(ApiError::unsupported(
                "include",
                &format!("'{what}' is not available; leave it out"),
            ));
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
        limits: &crate::config::Limits,
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
            text.finish(&[("verbosity", "say in the instructions how long the answer should be")])?;
        }
        self.0.insert("text".into(), told);
        Ok(wish)
    }

    fn reasoning(
        &mut self,
        fields: &mut Fields,
        state: &State,
        kwargs: &mut Map<String, Value>,
    ) -> Result<(), ApiError> {
        let mut told = json!({"effort": null, "summary": null});
        if let Some(raw) = fields.raw("reasoning") {
            let mut reasoning = Fields::of_value(raw, "reasoning".into())?;
            let effort = reasoning.take::<String>("effort")?;
            told["effort"] = effort.clone().into();
            state.readers.effort(&reasoning.path("effort"), effort, kwargs)?;
            for name in ["summary", "generate_summary"] {
                // "auto" asks for what there is: the reasoning itself.
                if reasoning.take::<String>(name)?.is_some_and(|summary| summary != "auto") {
                    return Err(ApiError::unsupported(
                        reasoning.path(name),
                        "reasoning is told as it is, not summed up",
                    ));
                }
            }
            reasoning.finish(&[])?;
        }
        debug_assert!(kwargs.keys().all(|key| key == EFFORT));
        self.0.insert("reasoning".into(), told);
        Ok(())
    }

    fn tools(&mut self, fields: &mut Fields, limits: &crate::config::Limits) -> Result<ToolUse, ApiError> {
        let list = fields.take::<Vec<&RawValue>>("tools")?.unwrap_or_default();
        if list.len() > limits.tools {
            let message = format!("'tools' has {} entries; the limit is {}.", list.len(), limits.tools);
            return Err(ApiError::invalid("tools", message));
        }
        let mut tools: Vec<Value> = Vec::with_capacity(list.len());
        let mut told = Vec::with_capacity(list.len());
        let mut held = Vec::new();
        for (index, raw) in list.iter().enumerate() {
            let path = format!("tools[{index}]");
            told.push(parse::<Value>(raw, &path)?);
            let mut tool = Fields::of_value(raw, path)?;
            if tool.require::<String>("type")? != "function" {
                return Err(ApiError::unsupported(
                    tool.path("type"),
                    "only functions are available as tools",
                ));
            }
            let name: String = tool.require("name")?;
            check_name(&name, &tool.path("name"))?;
            if tools.iter().any(|tool| tool["function"]["name"] == *name) {
                return Err(ApiError::invalid(
                    tool.path("name"),
                    format!("The function '{name}' is given twice."),
                ));
            }
            let mut function = Map::new();
            function.insert("name".into(), name.as_str().into());
            if let Some(description) = tool.take::<String>("description")? {
                function.insert("description".into(), description.into());
            }
            if let Some(parameters) = tool.take::<Map<String, Value>>("parameters")? {
                function.insert("parameters".into(), parameters.into());
            }
            if tool.take::<bool>("strict")?.unwrap_or(false) {
                held.push((name, tool.path("strict")));
            }
            tool.finish(&[("defer_loading", "all tools are shown from the start")])?;
            tools.push(json!({"type": "function", "function": function}));
        }
        let parallel = fields.take::<bool>("parallel_tool_calls")?.unwrap_or(true);
        let (choice, told_choice) = choice(fields, &mut tools)?;
        self.0.insert("tools".into(), told.into());
        self.0.insert("tool_choice".into(), told_choice);
        self.0.insert("parallel_tool_calls".into(), parallel.into());
        if tools.is_empty() {
            return Ok(ToolUse::default());
        }
        let mut tools = ToolUse::new(tools, choice, parallel);
        held.into_iter().for_each(|(function, param)| tools.hold(function, param));
        Ok(tools)
    }
}

fn choice(fields: &mut Fields, tools: &mut Vec<Value>) -> Result<(ToolChoice, Value), ApiError> {
    const CHOICE: &str = "tool_choice";
    let Some(raw) = fields.raw(CHOICE) else { return Ok((ToolChoice::Auto, "auto".into())) };
    let told: Value = parse(raw, CHOICE)?;
    let known = |name: &str, path: String, tools: &[Value]| match tools
        .iter()
        .any(|tool| tool["function"]["name"] == *name)
    {
        true => Ok(()),
        false => Err(ApiError::invalid(path, format!("The function '{name}' is not among 'tools'."))),
    };
    let choice = match &told {
        Value::String(name) => mode(name, CHOICE, true)?,
        _ => {
            let mut choice = Fields::of_value(raw, CHOICE.into())?;
            let chosen = match choice.require::<String>("type")?.as_str() {
                "function" => {
                    let name: String = choice.require("name")?;
                    known(&name, choice.path("name"), tools)?;
                    ToolChoice::Named(name)
                }
                "allowed_tools" => {
                    let chosen = mode(&choice.require::<String>("mode")?, &choice.path("mode"), false)?;
                    let list: Vec<&RawValue> = choice.require("tools")?;
                    at_most(list.len(), tools.len(), "tool_choice.tools")?;
                    let mut kept = Vec::new();
                    for (index, raw) in list.iter().enumerate() {
                        let mut entry = Fields::of_value(raw, format!("tool_choice.tools[{index}]"))?;
                        if entry.require::<String>("type")? != "function" {
                            return Err(ApiError::unsupported(
                                entry.path("type"),
                                "only functions are available",
                            ));
                        }
                        let name: String = entry.require("name")?;
                        known(&name, entry.path("name"), tools)?;
                        entry.finish(&[])?;
                        kept.push(name);
                    }
                    tools.retain(|tool| kept.iter().any(|name| tool["function"]["name"] == **name));
                    chosen
                }
                _ => {
                    return Err(ApiError::unsupported("tool_choice.type", "only function and allowed_tools"));
                }
            };
            choice.finish(&[])?;
            chosen
        }
    };
    if tools.is_empty() && !matches!(choice, ToolChoice::Auto | ToolChoice::None) {
        return Err(ApiError::invalid(CHOICE, "'tool_choice' asks for a call, but 'tools' are not given."));
    }
    Ok((choice, told))
}

/// The `input` field as messages.
fn input(fields: &mut Fields, limits: &crate::config::Limits) -> Result<Vec<Value>, ApiError> {
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
                "function": {"name": item["name"], "arguments": item["arguments"]},
            })),
            _ => {}
        }
    }
    gathered.finish()
}
