//! The items of a request: read into a conversation, kept to be listed, and referred to by later requests.
//!
//! Invariants: an item that was kept has an id from which its response is found, so that a reference costs one look-up; references reach
//! the tenant's own responses and no others'. Reasoning belongs to the message or call that follows it; calls in a row belong to one
//! message.

use std::sync::Arc;

use serde_json::{Map, Value, json};

use super::History;
use crate::context::RequestLimits;
use crate::error::{ApiError, NOT_TEXT};
use crate::fields::{self, Fields, Json, parse};
use crate::hints::Hints;
use crate::tools::flat;

/// Fields of items of all types.
const KNOWN: &[&str] = &[
    "type",
    "id",
    "status",
    "role",
    "content",
    "phase",
    "call_id",
    "name",
    "namespace",
    "arguments",
    "output",
    "summary",
    "encrypted_content",
];

/// What the `input` field says.
pub struct Input {
    pub messages: Vec<Value>,
    /// The items as they were given, references followed.
    pub items: Vec<Value>,
}

/// Takes the `input` field.
pub fn read(
    fields: &mut Fields,
    history: &dyn History,
    limits: &RequestLimits,
    hints: &mut Hints,
) -> Result<Input, ApiError> {
    let raw = fields.require_raw("input")?;
    if !raw.is_list() {
        let text: String = parse(raw, "input")?;
        let part = json!({"type": "input_text", "text": text});
        let item = json!({"type": "message", "role": "user", "status": "completed", "content": [part]});
        return Ok(Input { messages: vec![json!({"role": "user", "content": text})], items: vec![item] });
    }
    let list = fields::list(raw, "input")?;
    if list.is_empty() || list.len() > limits.messages {
        let message = format!("'input' has {} items; give 1 to {}.", list.len(), limits.messages);
        return Err(ApiError::invalid("input", message));
    }
    let source = Source(history);
    let mut gathered = Gathered::default();
    let mut items = Vec::with_capacity(list.len());
    for (index, raw) in list.into_iter().enumerate() {
        let path = format!("input[{index}]");
        let mut given: Value = parse(raw.clone(), &path)?;
        match source.referred(&given, &path)? {
            Some(found) => {
                source.item(Json::of_value(&found)?, path, &mut gathered, hints)?;
                items.push(found);
            }
            None => {
                source.item(raw, path, &mut gathered, hints)?;
                if let Some(given) = given.as_object_mut() {
                    given.entry("type").or_insert("message".into());
                }
                items.push(given);
            }
        }
    }
    Ok(Input { messages: gathered.finish(), items })
}

/// Names the items of a response, so that they can be listed and referred to.
pub fn named(mut items: Vec<Value>, response: &str) -> Arc<[Value]> {
    let name = response.trim_start_matches("resp_");
    for (index, item) in items.iter_mut().enumerate() {
        // Not the client's own ids: those may be another response's.
        item["id"] = format!("in_{name}_{index}").into();
    }
    items.into()
}

/// Reads items, one after the other.
struct Source<'a>(&'a dyn History);

impl Source<'_> {
    /// What an `item_reference` is about; `None`: the item is none.
    fn referred(&self, item: &Value, path: &str) -> Result<Option<Value>, ApiError> {
        if item["type"] != "item_reference" {
            return Ok(None);
        }
        let id = item["id"].as_str().unwrap_or_default();
        // `rs_NAME_3` is an item of `resp_NAME`.
        let response = id.rsplit('_').nth(1).map(|name| format!("resp_{name}"));
        let found = response.map(|response| self.0.item(&response, id)).transpose()?.flatten();
        found.map(Some).ok_or_else(|| {
            let path = format!("{path}.id");
            let id: String = id.chars().take(128).collect();
            let message = format!(
                "Invalid '{path}': no response that is kept has an item '{id}'; send the item itself."
            );
            ApiError { code: Some("item_not_found"), ..ApiError::invalid(path, message) }
        })
    }

    fn item(&self, raw: Json, path: String, out: &mut Gathered, hints: &mut Hints) -> Result<(), ApiError> {
        let mut item = Fields::of_value(raw, path)?;
        let kind = item.take::<String>("type")?;
        // Names and states that the server itself gave.
        item.take::<String>("id")?;
        item.take::<String>("status")?;
        match kind.as_deref().unwrap_or("message") {
            "message" => message(&mut item, out, hints)?,
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
                let text = texts(
                    item.require_raw("output")?,
                    item.path("output"),
                    &["input_text", "output_text", "text"],
                    hints,
                )?;
                out.flush();
                out.messages.push(json!({"role": "tool", "tool_call_id": id, "content": text}));
            }
            "reasoning" => {
                item.take::<Vec<Value>>("summary")?;
                let sealed = item.take::<String>("encrypted_content")?;
                match (item.raw("content").filter(|raw| !raw.is_list() || !raw.is_empty()), sealed) {
                    (Some(raw), _) => {
                        let path = item.path("content");
                        out.reasoning(texts(raw, path, &["reasoning_text", "text"], hints)?);
                    }
                    (None, Some(sealed)) => {
                        out.reasoning(self.0.unseal(&sealed, &item.path("encrypted_content"))?);
                    }
                    (None, None) => {}
                }
            }
            other => {
                return Err(ApiError::unsupported(
                    item.path("type"),
                    &format!("items of type '{other}' are not available"),
                ));
            }
        }
        hints.finish(item, KNOWN, &[])
    }
}

fn message(item: &mut Fields, out: &mut Gathered, hints: &mut Hints) -> Result<(), ApiError> {
    let role: String = item.require("role")?;
    let kinds = ["input_text", "output_text", "text", "refusal"];
    let text = texts(item.require_raw("content")?, item.path("content"), &kinds, hints)?;
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
    Ok(())
}

/// Text, or parts that are text.
fn texts(raw: Json, path: String, kinds: &[&str], hints: &mut Hints) -> Result<String, ApiError> {
    if !raw.is_list() {
        return parse(raw, &path);
    }
    let parts = fields::list(raw, &path)?;
    let mut text = |(index, raw): (usize, Json)| {
        let mut part = Fields::of_value(raw, format!("{path}[{index}]"))?;
        let kind: String = part.require("type")?;
        if !kinds.contains(&kind.as_str()) {
            return Err(ApiError::unsupported(
                part.path("type"),
                &format!("'{kind}' is not text: {NOT_TEXT}"),
            ));
        }
        let text: String = part.require(if kind == "refusal" { "refusal" } else { "text" })?;
        // What the server itself says about its texts.
        part.take::<Vec<Value>>("annotations")?;
        part.take::<Vec<Value>>("logprobs")?;
        hints.finish(part, &["type", "text", "refusal", "annotations", "logprobs"], &[])?;
        Ok(text)
    };
    let texts: Result<Vec<String>, ApiError> = parts.into_iter().enumerate().map(&mut text).collect();
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

const LIMIT: usize = 20;
const LIMIT_MAX: usize = 100;

/// One page of kept items, by the query's `limit`, `after` and `order` (`desc` unless it says `asc`).
pub fn page(items: &[Value], query: &str) -> Result<Value, ApiError> {
    let (mut limit, mut after, mut ascending) = (LIMIT, None, false);
    for (name, value) in form_urlencoded::parse(query.as_bytes()) {
        match (&*name, &*value) {
            ("order", "asc") => ascending = true,
            ("order", "desc") => ascending = false,
            ("order", _) => return Err(ApiError::invalid("order", "Invalid 'order': use asc or desc.")),
            ("after", value) => after = Some(value.to_owned()),
            ("limit", value) => {
                let limits = 1..=LIMIT_MAX;
                limit = value.parse().ok().filter(|limit| limits.contains(limit)).ok_or_else(|| {
                    ApiError::invalid(
                        "limit",
                        format!("Invalid 'limit': use a number from 1 to {LIMIT_MAX}."),
                    )
                })?;
            }
            (other, _) => return Err(ApiError::unsupported(other, "only limit, after and order")),
        }
    }
    let mut list: Vec<&Value> = items.iter().collect();
    if !ascending {
        list.reverse();
    }
    if let Some(after) = after {
        let at = list.iter().position(|item| item["id"] == *after).ok_or_else(|| {
            ApiError::invalid("after", "Invalid 'after': the response has no item of this id.")
        })?;
        list.drain(..=at);
    }
    let more = list.len() > limit;
    list.truncate(limit);
    let id = |item: Option<&&Value>| item.map(|item| item["id"].clone());
    Ok(json!({
        "object": "list", "data": list, "first_id": id(list.first()), "last_id": id(list.last()), "has_more": more,
    }))
}
