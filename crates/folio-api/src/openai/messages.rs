//! Chat messages: from OpenAI's shapes to what chat templates take.
//!
//! Invariants: only text and tool calls get through; everything else is refused by its path
//! (`messages[2].content[1].image_url`). Text parts are joined by a newline, as vLLM does. The `developer` role, which templates
//! do not know, becomes `system`. [`for_template`] puts calls the way the model's template takes them.

use folio_text::TemplateTools;
use serde_json::{Map, Value};

use crate::context::RequestLimits;
use crate::error::{ApiError, NOT_TEXT};
use crate::fields::{self, Fields, Json, parse};
use crate::hints::Hints;

const KNOWN: &[&str] =
    &["role", "content", "name", "reasoning_content", "reasoning", "tool_calls", "tool_call_id"];
const NOT_IN_MESSAGES: &[(&str, &str)] = &[
    ("annotations", "they belong to web search, which is not available"),
    ("audio", NOT_TEXT),
    ("function_call", "use tool_calls"),
    ("refusal", "put the refusal's text into content"),
    ("tool_call_id", "only a message with the role tool answers a call"),
    ("tool_calls", "only a message with the role assistant makes calls"),
];

/// Reads and checks the `messages` field.
pub fn read(fields: &mut Fields, limits: &RequestLimits, hints: &mut Hints) -> Result<Vec<Value>, ApiError> {
    let list = fields.require_list("messages")?;
    if list.is_empty() {
        return Err(ApiError::invalid("messages", "'messages' is empty; give at least one message."));
    }
    if list.len() > limits.messages {
        let message = format!("'messages' has {} entries; the limit is {}.", list.len(), limits.messages);
        return Err(ApiError::invalid("messages", message));
    }
    list.into_iter()
        .enumerate()
        .map(|(index, raw)| message(raw, format!("messages[{index}]"), hints))
        .collect()
}

fn message(raw: Json, path: String, hints: &mut Hints) -> Result<Value, ApiError> {
    let mut fields = Fields::of_value(raw, path)?;
    let role: String = fields.require("role")?;
    let role = match role.as_str() {
        "system" | "developer" => "system",
        "user" => "user",
        "assistant" => "assistant",
        "tool" => "tool",
        "function" => {
            return Err(ApiError::unsupported(fields.path("role"), "use the role tool"));
        }
        other => {
            let path = fields.path("role");
            let message = format!(
                "Invalid value for '{path}': '{other}' is not one of system, developer, user, assistant, tool."
            );
            return Err(ApiError::invalid(path, message));
        }
    };
    let mut out = Map::new();
    out.insert("role".into(), role.into());
    let calls = match role {
        "assistant" => tool_calls(&mut fields, hints)?,
        _ => Vec::new(),
    };
    let reasoning = reasoning(&mut fields)?.filter(|_| role == "assistant");
    let content = match fields.raw("content") {
        Some(raw) => Value::String(content(raw, &fields.path("content"), hints)?),
        // An answer may have been nothing but reasoning or calls, or have ended at once.
        None if role == "assistant" => Value::Null,
        None => return Err(fields.missing("content")),
    };
    out.insert("content".into(), content);
    if let Some(name) = fields.take::<String>("name")? {
        out.insert("name".into(), name.into());
    }
    if let Some(reasoning) = reasoning {
        out.insert("reasoning_content".into(), reasoning.into());
    }
    if !calls.is_empty() {
        out.insert("tool_calls".into(), calls.into());
    }
    if role == "tool" {
        out.insert("tool_call_id".into(), fields.require::<String>("tool_call_id")?.into());
    }
    hints.finish(fields, KNOWN, NOT_IN_MESSAGES)?;
    Ok(Value::Object(out))
}

/// What the model thought, under the name that this server gives it or vLLM's newer one.
fn reasoning(fields: &mut Fields) -> Result<Option<String>, ApiError> {
    let ours = fields.take::<String>("reasoning_content")?;
    let other = fields.take::<String>("reasoning")?;
    if ours.is_some() && other.is_some() && ours != other {
        let path = fields.path("reasoning");
        let message = format!("'{path}' contradicts 'reasoning_content'; give one of them.");
        return Err(ApiError::invalid(path, message));
    }
    Ok(ours.or(other))
}

fn tool_calls(fields: &mut Fields, hints: &mut Hints) -> Result<Vec<Value>, ApiError> {
    let list = fields.list("tool_calls")?.unwrap_or_default();
    let path = fields.path("tool_calls");
    let call = |(index, raw)| tool_call(raw, format!("{path}[{index}]"), hints);
    list.into_iter().enumerate().map(call).collect()
}

fn tool_call(raw: Json, path: String, hints: &mut Hints) -> Result<Value, ApiError> {
    let mut call = Fields::of_value(raw, path)?;
    let id: String = call.require("id")?;
    if call.take::<String>("type")?.is_some_and(|kind| kind != "function") {
        return Err(ApiError::unsupported(call.path("type"), "only functions are available as tools"));
    }
    // Clients that gather a stream send what they gathered.
    call.take::<u32>("index")?;
    let mut function = Fields::of_value(call.require_raw("function")?, call.path("function"))?;
    let name: String = function.require("name")?;
    let arguments: String = function.require("arguments")?;
    hints.finish(function, &["name", "arguments"], &[])?;
    hints.finish(call, &["id", "type", "index", "function"], &[])?;
    let function = serde_json::json!({"name": name, "arguments": arguments});
    Ok(serde_json::json!({"id": id, "type": "function", "function": function}))
}

/// Puts calls, content beside them and reasoning the way the template takes them.
pub fn for_template(messages: &mut Vec<Value>, template: &TemplateTools) -> Result<(), ApiError> {
    for (index, message) in messages.iter_mut().enumerate() {
        let Some(message) = message.as_object_mut() else { continue };
        if let Some(calls) = message.get_mut("tool_calls").and_then(Value::as_array_mut) {
            if !template.takes_calls {
                let why = "the model's chat template shows no tool calls to the model";
                return Err(ApiError::unsupported(format!("messages[{index}].tool_calls"), why));
            }
            for call in calls.iter_mut().filter(|_| template.object_arguments) {
                let arguments = &mut call["function"]["arguments"];
                let text = arguments.as_str().unwrap_or_default().trim();
                // What a model wrote wrongly goes back to it as it was.
                if text.is_empty() {
                    *arguments = Value::Object(Map::new());
                    continue;
                }
                // JSON inside of a string has the same limits.
                let read = Json::within::<Map<String, Value>>(text.as_bytes()).map_err(|error| ApiError {
                    param: Some(format!("messages[{index}].tool_calls")),
                    ..error
                })?;
                if let Ok(object) = read {
                    *arguments = Value::Object(object);
                }
            }
            if message["content"].is_null() && !template.null_content {
                message["content"] = "".into();
            }
        }
        if message["content"].is_null() && !message.contains_key("tool_calls") {
            message["content"] = "".into();
        }
        if template.thinking
            && let Some(reasoning) = message.remove("reasoning_content")
        {
            // gpt-oss's template refuses both beside calls.
            let both = message.contains_key("tool_calls")
                && message["content"].as_str().is_some_and(|c| !c.is_empty());
            if !both {
                message.insert("thinking".into(), reasoning);
            }
        }
    }
    put_in_order(messages, template);
    Ok(())
}

/// Joins and renames what a template would refuse: a system message behind the beginning goes to the user's message beside it, or
/// becomes one; so do messages of the user that follow one another.
fn put_in_order(messages: &mut Vec<Value>, template: &TemplateTools) {
    if template.late_system && template.repeated_users {
        return;
    }
    let mut out: Vec<Value> = Vec::with_capacity(messages.len());
    let mut begun = false;
    for mut message in messages.drain(..) {
        begun |= message["role"] != "system";
        if message["role"] == "system" && begun && !template.late_system {
            message["role"] = "user".into();
        }
        let joins = match (message["role"].as_str(), out.last().map(|last| &last["role"])) {
            (Some("system"), Some(last)) => last == "system" && !template.late_system,
            (Some("user"), Some(last)) => last == "user" && !template.repeated_users,
            _ => false,
        };
        match out.last_mut().filter(|_| joins).map(|last| &mut last["content"]) {
            Some(Value::String(before)) => {
                before.push_str("\n\n");
                before.push_str(message["content"].as_str().unwrap_or_default());
            }
            _ => out.push(message),
        }
    }
    *messages = out;
}

fn content(raw: Json, path: &str, hints: &mut Hints) -> Result<String, ApiError> {
    if !raw.is_list() {
        return parse(raw, path);
    }
    let parts = fields::list(raw, path)?;
    if parts.is_empty() {
        return Err(ApiError::invalid(path, format!("'{path}' has no parts.")));
    }
    let part = |(index, part): (usize, Json)| text_part(part, format!("{path}[{index}]"), hints);
    let texts: Result<Vec<String>, ApiError> = parts.into_iter().enumerate().map(part).collect();
    Ok(texts?.join("\n"))
}

fn text_part(raw: Json, path: String, hints: &mut Hints) -> Result<String, ApiError> {
    let mut part = Fields::of_value(raw, path)?;
    let kind: String = part.require("type")?;
    if kind != "text" {
        return Err(ApiError::unsupported(part.path(&kind), NOT_TEXT));
    }
    let text = part.require("text")?;
    hints.finish(part, &["type", "text"], &[])?;
    Ok(text)
}
