//! Chat messages: from OpenAI's shapes to what chat templates take.
//!
//! Invariants: only text gets through; everything else is refused by its path (`messages[2].content[1].image_url`). Text
//! parts are joined by a newline, as vLLM does. The `developer` role, which templates do not know, becomes `system`.

use serde_json::value::RawValue;
use serde_json::{Map, Value};

use crate::config::Limits;
use crate::error::ApiError;
use crate::fields::{Fields, parse};

const NOT_IN_MESSAGES: &[(&str, &str)] = &[
    ("annotations", "they belong to web search, which is not available"),
    ("audio", "the model takes text only"),
    ("function_call", "function calling is not available yet"),
    ("refusal", "put the refusal's text into content"),
    ("tool_call_id", "tool calls are not available yet"),
    ("tool_calls", "tool calls are not available yet"),
];

/// Reads and checks the `messages` field.
pub fn read(fields: &mut Fields, limits: &Limits) -> Result<Vec<Value>, ApiError> {
    let list: Vec<&RawValue> = fields.require("messages")?;
    if list.is_empty() {
        return Err(ApiError::invalid("messages", "'messages' is empty; give at least one message."));
    }
    if list.len() > limits.messages {
        let message = format!("'messages' has {} entries; the limit is {}.", list.len(), limits.messages);
        return Err(ApiError::invalid("messages", message));
    }
    list.iter().enumerate().map(|(index, raw)| message(raw, format!("messages[{index}]"))).collect()
}

fn message(raw: &RawValue, path: String) -> Result<Value, ApiError> {
    let mut fields = Fields::of_value(raw, path)?;
    let role: String = fields.require("role")?;
    let role = match role.as_str() {
        "system" | "developer" => "system",
        "user" => "user",
        "assistant" => "assistant",
        "tool" | "function" => {
            return Err(ApiError::unsupported(fields.path("role"), "tool calls are not available yet"));
        }
        other => {
            let path = fields.path("role");
            let message = format!(
                "Invalid value for '{path}': '{other}' is not one of system, developer, user, assistant."
            );
            return Err(ApiError::invalid(path, message));
        }
    };
    let mut out = Map::new();
    out.insert("role".into(), role.into());
    let content = match fields.raw("content") {
        Some(raw) => content(raw, &fields.path("content"))?,
        None => return Err(fields.missing("content")),
    };
    out.insert("content".into(), content.into());
    for name in ["name", "reasoning_content"] {
        if let Some(text) = fields.take::<String>(name)? {
            out.insert(name.into(), text.into());
        }
    }
    fields.finish(NOT_IN_MESSAGES)?;
    Ok(Value::Object(out))
}

fn content(raw: &RawValue, path: &str) -> Result<String, ApiError> {
    if !raw.get().starts_with('[') {
        return parse(raw, path);
    }
    let parts: Vec<&RawValue> = parse(raw, path)?;
    if parts.is_empty() {
        return Err(ApiError::invalid(path, format!("'{path}' has no parts.")));
    }
    let texts: Result<Vec<String>, ApiError> =
        parts.iter().enumerate().map(|(index, part)| text_part(part, format!("{path}[{index}]"))).collect();
    Ok(texts?.join("\n"))
}

fn text_part(raw: &RawValue, path: String) -> Result<String, ApiError> {
    let mut part = Fields::of_value(raw, path)?;
    let kind: String = part.require("type")?;
    if kind != "text" {
        return Err(ApiError::unsupported(part.path(&kind), "the model takes text only"));
    }
    let text = part.require("text")?;
    part.finish(&[])?;
    Ok(text)
}
