//! `tools`, `tool_choice` and `parallel_tool_calls`: from the request to values.
//!
//! Invariants: the template gets every tool as the client wrote it; what cannot be kept to (a tool that is no function) is
//! refused by name. A call that must be made is begun for the model in the prompt; see `reading`.

use folio_text::{Callee, Functions};
use serde_json::Value;
use serde_json::value::RawValue;

use crate::api::error::ApiError;
use crate::api::fields::{Fields, parse};
use crate::config::Limits;

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
pub struct Held {
    /// The first field that asks for it; `None`: no function is strict, and what cannot be held is not.
    pub param: Option<String>,
    /// Whether each is strict.
    pub callees: Vec<(bool, Callee)>,
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
}

impl ToolUse {
    /// Takes the fields; what they say is checked against each other.
    pub fn read(fields: &mut Fields, limits: &Limits) -> Result<Self, ApiError> {
        let list = fields.take::<Vec<&RawValue>>("tools")?.unwrap_or_default();
        if list.len() > limits.tools {
            let message = format!("'tools' has {} entries; the limit is {}.", list.len(), limits.tools);
            return Err(ApiError::invalid("tools", message));
        }
        let mut tools = Vec::with_capacity(list.len());
        let mut names = Vec::with_capacity(list.len());
        let mut held = Self::default();
        let mut list: Vec<(usize, &RawValue)> = list.into_iter().enumerate().collect();
        held.left_out = leave_out(&mut list, &[]);
        for (index, raw) in list {
            let (name, tool, strict) = tool(raw, format!("tools[{index}]"))?;
            if strict {
                held.hold(name.clone(), format!("tools[{index}].function.strict"));
            }
            if names.contains(&name) {
                let path = format!("tools[{index}].function.name");
                return Err(ApiError::invalid(path, format!("The function '{name}' is given twice.")));
            }
            names.push(name);
            tools.push(tool);
        }
        let parallel = fields.take::<bool>("parallel_tool_calls")?;
        let raw_choice = fields.raw("tool_choice");
        if tools.is_empty() {
            if parallel.is_some() {
                let message = "'parallel_tool_calls' is only allowed when 'tools' are given.";
                return Err(ApiError::invalid("parallel_tool_calls", message));
            }
            let idle = raw_choice.is_none_or(|raw| matches!(raw.get(), "\"none\"" | "\"auto\""));
            let message = "'tool_choice' asks for a call, but 'tools' are not given.";
            return if idle { Ok(Self::default()) } else { Err(ApiError::invalid("tool_choice", message)) };
        }
        let mut tool_use =
            Self { tools, choice: ToolChoice::Auto, parallel: parallel.unwrap_or(true), ..held };
        if let Some(raw) = raw_choice {
            tool_use.choose(raw, &names)?;
        }
        Ok(tool_use)
    }

    /// Checked `tools` in the shape of OpenAI's, with different names.
    pub fn new(tools: Vec<Value>, choice: ToolChoice, parallel: bool) -> Self {
        Self { tools, choice, parallel, ..Self::default() }
    }

    /// The arguments of `function` must be what its schema says; `param` asks for it.
    pub fn hold(&mut self, function: String, param: String) {
        if self.strict.is_empty() {
            self.strict_param = param;
        }
        self.strict.push(function);
    }

    /// All functions that may be called, with the schemas their arguments are held to: those of strict functions, and every one where a
    /// call must be made. `None`: nothing is held.
    pub fn held(&self) -> Option<Held> {
        let callees = self.callees();
        let strict = callees.iter().any(|(strict, _)| *strict);
        (strict || self.must()).then(|| Held { param: strict.then(|| self.strict_param.clone()), callees })
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
    pub fn callees(&self) -> Vec<(bool, Callee)> {
        let must = self.must();
        let callee = |tool: &Value| {
            let function = &tool["function"];
            let name = function["name"].as_str()?.to_owned();
            let strict = self.strict.contains(&name);
            let schema = (strict || must).then(|| function.get("parameters").cloned()).flatten();
            Some((strict, Callee { name, schema }))
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

    fn choose(&mut self, raw: &RawValue, names: &[String]) -> Result<(), ApiError> {
        const CHOICE: &str = "tool_choice";
        if raw.get().starts_with('"') {
            self.choice = mode(&parse::<String>(raw, CHOICE)?, CHOICE, true)?;
            return Ok(());
        }
        let mut fields = Fields::of_value(raw, CHOICE.into())?;
        let kind: String = fields.require("type")?;
        match kind.as_str() {
            "function" => {
                let name = function_name(fields.require("function")?, "tool_choice.function", names)?;
                self.choice = ToolChoice::Named(name);
            }
            "allowed_tools" => {
                let mut allowed =
                    Fields::of_value(fields.require("allowed_tools")?, "tool_choice.allowed_tools".into())?;
                let path = allowed.path("mode");
                self.choice = mode(&allowed.require::<String>("mode")?, &path, false)?;
                let list: Vec<&RawValue> = allowed.require("tools")?;
                let path = allowed.path("tools");
                at_most(list.len(), names.len(), &path)?;
                let kept: Result<Vec<String>, ApiError> = list
                    .iter()
                    .enumerate()
                    .map(|(index, raw)| {
                        let path = format!("{path}[{index}]");
                        let mut entry = Fields::of_value(raw, path.clone())?;
                        if entry.require::<String>("type")? != "function" {
                            return Err(ApiError::unsupported(
                                entry.path("type"),
                                "only functions are available",
                            ));
                        }
                        let name = function_name(entry.require("function")?, &entry.path("function"), names)?;
                        entry.finish(&[]).map(|()| name)
                    })
                    .collect();
                let kept = kept?;
                if kept.is_empty() {
                    return Err(ApiError::invalid(path.clone(), format!("'{path}' is empty; use \"none\".")));
                }
                self.tools.retain(|tool| kept.iter().any(|name| tool["function"]["name"] == **name));
                allowed.finish(&[])?;
            }
            _ => return Err(ApiError::unsupported("tool_choice.type", "only function and allowed_tools")),
        }
        fields.finish(&[])
    }
}

/// A choice that is a word; `none`: that one, too.
pub fn mode(name: &str, path: &str, none: bool) -> Result<ToolChoice, ApiError> {
    match name {
        "none" if none => Ok(ToolChoice::None),
        "auto" => Ok(ToolChoice::Auto),
        "required" => Ok(ToolChoice::Required),
        other => {
            let known = if none { "none, auto, required or a function" } else { "auto, required" };
            Err(ApiError::invalid(
                path,
                format!("Invalid value for '{path}': '{other}' is not one of {known}."),
            ))
        }
    }
}

/// `{"name": ...}` of one of the request's functions.
fn function_name(raw: &RawValue, path: &str, names: &[String]) -> Result<String, ApiError> {
    let mut fields = Fields::of_value(raw, path.to_owned())?;
    let name: String = fields.require("name")?;
    if !names.contains(&name) {
        let path = fields.path("name");
        return Err(ApiError::invalid(path, format!("The function '{name}' is not among 'tools'.")));
    }
    fields.finish(&[])?;
    Ok(name)
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
pub fn leave_out(list: &mut Vec<(usize, &RawValue)>, stays: &[&str]) -> Vec<String> {
    #[derive(serde::Deserialize)]
    struct Kind<'a> {
        #[serde(borrow, rename = "type")]
        kind: Option<std::borrow::Cow<'a, str>>,
    }
    let known = |kind: &str| {
        NOT_HERE.iter().any(|known| {
            kind.strip_prefix(known).is_some_and(|rest| rest.is_empty() || rest.starts_with('_'))
        })
    };
    let mut left_out = Vec::new();
    let mut kept = Vec::with_capacity(list.len());
    for (index, raw) in list.iter() {
        let kind = serde_json::from_str::<Kind>(raw.get()).ok().and_then(|tool| tool.kind);
        match kind {
            Some(kind) if known(&kind) && !stays.contains(&&*kind) => left_out.push(kind.into_owned()),
            _ => kept.push((*index, *raw)),
        }
    }
    if kept.is_empty() {
        return Vec::new();
    }
    *list = kept;
    left_out
}

/// Name and value of one tool, and whether it is strict.
fn tool(raw: &RawValue, path: String) -> Result<(String, Value, bool), ApiError> {
    let mut fields = Fields::of_value(raw, path.clone())?;
    if fields.require::<String>("type")? != "function" {
        return Err(ApiError::unsupported(fields.path("type"), "only functions are available as tools"));
    }
    let mut function = Fields::of_value(fields.require("function")?, fields.path("function"))?;
    let name: String = function.require("name")?;
    check_name(&name, &function.path("name"))?;
    function.take::<String>("description")?;
    function.take::<serde_json::Map<String, Value>>("parameters")?;
    let strict = function.take::<bool>("strict")?.unwrap_or(false);
    function.finish(&[])?;
    fields.finish(&[])?;
    let mut value: Value = parse(raw, &path)?;
    if let Some(function) = value["function"].as_object_mut() {
        // It says nothing to the model.
        function.remove("strict");
    }
    Ok((name, value, strict))
}

/// A choice among the tools has no more entries than there are tools.
pub fn at_most(entries: usize, tools: usize, path: &str) -> Result<(), ApiError> {
    if entries > tools {
        let message = format!("'{path}' has {entries} entries, but 'tools' has {tools}.");
        return Err(ApiError::invalid(path, message));
    }
    Ok(())
}
