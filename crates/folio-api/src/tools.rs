//! `tools`, `tool_choice` and `parallel_tool_calls`: from the request to values.
//!
//! Owns: what a request says about tools, whichever API it speaks ([`read`]). Invariants: the template gets every tool in the shape of chat completions, those of that API as the client wrote them; what cannot be kept to (a tool that is no function) is
//! refused by name.

mod read;

use std::collections::HashMap;

use folio_text::{CallableFunction, Functions};
use serde_json::{Map, Value, json};

use crate::context::Capabilities;
use crate::error::ApiError;
use crate::fields::Json;

pub use read::{Dialect, check_own, definition, flat, read};

/// Whether the model may, must or must not call.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum ToolChoice {
    /// No tools are shown and nothing is read as a call.
    #[default]
    None,
    Auto,
    Required,
    Named(String),
}

/// Functions whose calls are held to something.
pub struct ConstrainedCalls {
    /// The first field that asks for it; `None`: no function is strict, and what cannot be held is not.
    pub param: Option<String>,
    /// Whether each is strict.
    pub callees: Vec<(bool, CallableFunction)>,
}

/// What a request says about tools.
#[derive(Clone, Debug, Default)]
pub struct ToolUse {
    tools: Vec<Value>,
    pub choice: ToolChoice,
    /// Several calls in one answer.
    pub parallel: bool,
    /// Functions whose arguments must be what their schema says, and the first field that asks for it.
    strict: Vec<String>,
    strict_param: String,
    /// Kinds of tools that were offered and that the model does not see.
    pub left_out: Vec<String>,
    /// Functions of namespaces: the model's name for each to the namespace's and its own.
    pub namespaces: HashMap<String, (String, String)>,
}

impl ToolUse {
    /// The arguments of `function` must be what its schema says; `param` asks for it.
    pub fn hold(&mut self, function: String, param: String) {
        if self.strict.is_empty() {
            self.strict_param = param;
        }
        self.strict.push(function);
    }

    /// All functions that may be called, with the schemas their arguments are held to: those of strict functions, and every one where a
    /// call must be made. `None`: nothing is held.
    pub fn held(&self) -> Option<ConstrainedCalls> {
        let callees = self.callees();
        let strict = callees.iter().any(|(strict, _)| *strict);
        (strict || self.must())
            .then(|| ConstrainedCalls { param: strict.then(|| self.strict_param.clone()), callees })
    }

    /// Refuses tools that this model could not be given or whose calls could not be read.
    pub fn check(&self, capabilities: &Capabilities) -> Result<(), ApiError> {
        if self.shown().is_none() {
            return Ok(());
        }
        if !capabilities.template.is_some_and(|template| template.takes_tools) {
            let why = "the model's chat template shows no tools to the model; the server can be given one that does \
                       (--chat-template)";
            return Err(ApiError::unsupported("tools", why));
        }
        if capabilities.parsers.tools.is_none() {
            let why =
                "how this model writes tool calls is not known; the server can be told (--tool-call-parser)";
            return Err(ApiError::unsupported("tools", why));
        }
        Ok(())
    }

    /// Whether there is no answer but a call.
    pub fn must(&self) -> bool {
        matches!(self.choice, ToolChoice::Required | ToolChoice::Named(_))
    }

    /// Whether the choice leaves this function to be called.
    pub fn may_call(&self, name: &str) -> bool {
        match &self.choice {
            ToolChoice::Named(only) => only == name,
            _ => true,
        }
    }

    /// All functions that may be called, whether each is strict, and its schema where it is to be kept to.
    pub fn callees(&self) -> Vec<(bool, CallableFunction)> {
        let must = self.must();
        let callee = |tool: &Value| {
            let function = &tool["function"];
            let name = function["name"].as_str()?.to_owned();
            let strict = self.strict.contains(&name);
            let schema = (strict || must).then(|| function.get("parameters").cloned()).flatten();
            Some((strict, CallableFunction { name, schema }))
        };
        self.shown().unwrap_or_default().iter().filter_map(callee).collect()
    }

    /// The same with the first `count` tools only.
    pub fn first(&self, count: usize) -> Self {
        let tools = self.tools.iter().take(count).cloned().collect();
        Self { tools, ..self.clone() }
    }

    pub fn count(&self) -> usize {
        self.tools.len()
    }

    pub fn named(&self, name: &str) -> Option<&Value> {
        self.tools.iter().find(|tool| tool["function"]["name"] == *name)
    }

    /// Offers a tool, in the place of one of its name.
    pub fn add(&mut self, tool: Value) {
        if self.tools.is_empty() && self.choice == ToolChoice::None {
            (self.choice, self.parallel) = (ToolChoice::Auto, true);
        }
        match self.tools.iter_mut().find(|other| other["function"]["name"] == tool["function"]["name"]) {
            Some(other) => *other = tool,
            None => self.tools.push(tool),
        }
    }

    pub fn remove(&mut self, name: &str) {
        self.tools.retain(|tool| tool["function"]["name"] != *name);
    }

    pub fn last_name(&self) -> Option<&str> {
        self.tools.last()?["function"]["name"].as_str()
    }

    /// The tools the template is to show.
    pub fn shown(&self) -> Option<&[Value]> {
        (self.choice != ToolChoice::None).then_some(self.tools.as_slice())
    }

    /// The same, to put other texts into them; names stay.
    pub fn shown_mut(&mut self) -> &mut [Value] {
        if self.choice == ToolChoice::None { &mut [] } else { &mut self.tools }
    }

    pub fn functions(&self) -> Functions {
        Functions::of_tools(self.shown().unwrap_or_default())
    }
}

/// Refuses what no API takes as a function's name.
pub fn check_name(name: &str, path: &str) -> Result<(), ApiError> {
    let valid = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-' | b'.');
    if !(1..=128).contains(&name.len()) || !name.bytes().all(valid) {
        let message =
            format!("Invalid '{path}': use 1 to 128 letters, digits, underscores, dashes and dots.");
        return Err(ApiError::invalid(path, message));
    }
    Ok(())
}

/// What the arguments of a call are called that are no JSON object (they may be cut off), as Anthropic's documentation advises.
const INVALID_JSON: &str = "INVALID_JSON";

/// The arguments of a call for APIs that have them as an object; text that is none is told as it is.
pub fn arguments_object(text: &str) -> Value {
    if text.trim().is_empty() {
        return json!({});
    }
    serde_json::from_str(text).ok().filter(Value::is_object).unwrap_or_else(|| json!({INVALID_JSON: text}))
}

/// The text that such an object was: what a model wrote wrongly goes back to it as it was.
pub fn arguments_text(object: Map<String, Value>) -> String {
    let wrong = (object.len() == 1).then(|| object.get(INVALID_JSON)).flatten().and_then(Value::as_str);
    wrong.map_or_else(|| Value::Object(object.clone()).to_string(), str::to_owned)
}

/// Kinds of tools that run at a provider's, or that only its own models know how to call; by their beginning, as many carry a date.
const NOT_HERE: &[&str] = &[
    "advisor",
    "apply_patch",
    "bash",
    "code_execution",
    "code_interpreter",
    "computer",
    "custom",
    "file_search",
    "image_generation",
    "local_shell",
    "mcp",
    "memory",
    "programmatic_tool_calling",
    "shell",
    "text_editor",
    "tool_search",
    "web_fetch",
    "web_search",
];

/// Leaves out of the offered tools those that nobody could run, and names them, as long as others are offered beside them. `stays`: kinds
/// that this API's clients run themselves. Where none would be left the reader refuses the first by its place.
fn leave_out(list: &mut Vec<(usize, Json)>, stays: &[&str]) -> Vec<String> {
    let known = |kind: &str| {
        NOT_HERE.iter().any(|known| {
            kind.strip_prefix(known).is_some_and(|rest| rest.is_empty() || rest.starts_with('_'))
        })
    };
    let left_out_kind = |tool: &Json| {
        let Json::Object(fields) = tool else { return None };
        let (_, kind) = fields.iter().find(|(name, _)| name == "type")?;
        let Json::String(kind) = kind else { return None };
        (known(kind) && !stays.contains(&&**kind)).then(|| kind.to_string())
    };
    let left_out: Vec<String> = list.iter().filter_map(|(_, tool)| left_out_kind(tool)).collect();
    if left_out.len() == list.len() {
        return Vec::new();
    }
    list.retain(|(_, tool)| left_out_kind(tool).is_none());
    left_out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_that_are_no_object_are_told_as_they_are_and_come_back_so() {
        assert_eq!(arguments_object(""), json!({}));
        for text in ["{\"a\":1}", "{\"a\": ", "[1]"] {
            let Value::Object(object) = arguments_object(text) else { panic!("{text}") };
            assert_eq!(arguments_text(object), text);
        }
        assert_eq!(arguments_object("{\"a\": "), json!({INVALID_JSON: "{\"a\": "}));
    }
}
