//! Ollama's messages: from its shapes to those of chat completions.
//!
//! Invariants: only text and tool calls get through. A call has an id here, and a result names its call: where the client says neither,
//! calls are numbered, and a result is of the first call, of its function's name where it has one, that has none yet.

use std::collections::{HashMap, HashSet, VecDeque};

use serde_json::{Map, Value, json};

use crate::context::RequestLimits;
use crate::error::{ApiError, NOT_TEXT};
use crate::fields::{Fields, Json};
use crate::hints::Hints;
use crate::tools::arguments_text;

const KNOWN: &[&str] = &["role", "content", "thinking", "tool_calls", "tool_name", "tool_call_id"];
const REFUSED: &[(&str, &str)] = &[
    ("images", NOT_TEXT),
    ("tool_call_id", "only a message with the role tool answers a call"),
    ("tool_calls", "only a message with the role assistant makes calls"),
    ("tool_name", "only a message with the role tool answers a call"),
];

/// Takes `messages`; there may be none.
pub(super) fn read(
    fields: &mut Fields,
    limits: &RequestLimits,
    hints: &mut Hints,
) -> Result<Vec<Value>, ApiError> {
    let list = fields.list("messages")?.unwrap_or_default();
    if list.len() > limits.messages {
        let message = format!("'messages' has {} entries; the limit is {}.", list.len(), limits.messages);
        return Err(ApiError::invalid("messages", message));
    }
    let mut calls = CallIds::default();
    let mut read = |(index, raw)| message(raw, format!("messages[{index}]"), &mut calls, hints);
    list.into_iter().enumerate().map(&mut read).collect()
}

/// CallIds of the last message that made some, in order. Cost: constant for each call and result.
#[derive(Default)]
struct CallIds {
    made: usize,
    order: VecDeque<String>,
    by_name: HashMap<String, VecDeque<String>>,
    names: HashMap<String, String>,
    answered: HashSet<String>,
}

impl CallIds {
    /// A message begins that may make calls; those before it get no result any more.
    fn begin(&mut self) {
        *self = Self { made: self.made, ..Self::default() };
    }

    fn make(&mut self, id: Option<String>, name: &str) -> String {
        let id = id.filter(|id| !id.is_empty()).unwrap_or_else(|| format!("call_{}", self.made));
        self.made += 1;
        self.order.push_back(id.clone());
        self.by_name.entry(name.to_owned()).or_default().push_back(id.clone());
        self.names.insert(id.clone(), name.to_owned());
        id
    }

    /// The call that a result is of, and its function's name. A conversation may begin behind the call.
    fn answer(&mut self, id: Option<String>, name: Option<String>) -> (String, Option<String>) {
        let Self { order, by_name, answered, .. } = self;
        let mut next = |queue: &mut VecDeque<String>| {
            std::iter::from_fn(|| queue.pop_front()).find(|id| !answered.contains(id))
        };
        let found = match (&id, &name) {
            (Some(_), _) => id,
            (None, Some(name)) => by_name.get_mut(name).and_then(&mut next),
            (None, None) => next(order),
        };
        let id = found.unwrap_or_else(|| format!("call_{}", self.made));
        self.answered.insert(id.clone());
        let called = self.names.get(&id).cloned();
        (id, called.or(name))
    }
}

fn message(raw: Json, path: String, calls: &mut CallIds, hints: &mut Hints) -> Result<Value, ApiError> {
    let mut fields = Fields::of_value(raw, path)?;
    let role: String = fields.require("role")?;
    let role = role.to_lowercase();
    if !["system", "user", "assistant", "tool"].contains(&role.as_str()) {
        let path = fields.path("role");
        let message =
            format!("Invalid value for '{path}': '{role}' is not one of system, user, assistant, tool.");
        return Err(ApiError::invalid(path, message));
    }
    let mut out = Map::new();
    out.insert("role".into(), role.as_str().into());
    out.insert("content".into(), fields.take::<String>("content")?.unwrap_or_default().into());
    let thinking = fields.take::<String>("thinking")?;
    match role.as_str() {
        "assistant" => {
            if let Some(thinking) = thinking.filter(|thinking| !thinking.is_empty()) {
                out.insert("reasoning_content".into(), thinking.into());
            }
            calls.begin();
            let list = fields.list("tool_calls")?.unwrap_or_default();
            let path = fields.path("tool_calls");
            let call = |(index, raw)| tool_call(raw, format!("{path}[{index}]"), calls, hints);
            let made: Vec<Value> = list.into_iter().enumerate().map(call).collect::<Result<_, _>>()?;
            if !made.is_empty() {
                out.insert("tool_calls".into(), made.into());
            }
        }
        "tool" => {
            let (id, name) = (fields.take("tool_call_id")?, fields.take("tool_name")?);
            let (id, name) = calls.answer(id, name);
            out.insert("tool_call_id".into(), id.into());
            name.into_iter().for_each(|name| drop(out.insert("name".into(), name.into())));
        }
        _ => {}
    }
    hints.finish(fields, KNOWN, REFUSED)?;
    Ok(Value::Object(out))
}

fn tool_call(raw: Json, path: String, calls: &mut CallIds, hints: &mut Hints) -> Result<Value, ApiError> {
    let mut call = Fields::of_value(raw, path)?;
    let id = call.take("id")?;
    if call.take::<String>("type")?.is_some_and(|kind| kind != "function") {
        return Err(ApiError::unsupported(call.path("type"), "only functions are available as tools"));
    }
    let mut function = Fields::of_value(call.require_raw("function")?, call.path("function"))?;
    let name: String = function.require("name")?;
    // Its place in the answer.
    function.take::<u32>("index")?;
    let arguments = arguments_text(function.take("arguments")?.unwrap_or_default());
    hints.finish(function, &["name", "index", "arguments"], &[])?;
    hints.finish(call, &["id", "type", "function"], &[])?;
    let id = calls.make(id, &name);
    Ok(json!({"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}))
}
