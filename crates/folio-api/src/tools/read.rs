//! The reader of `tools`, `tool_choice` and what goes with them, for all APIs.
//!
//! Owns: the three spellings of a function ([`Dialect`]) and of a choice. Invariants: a name is given once; a choice names what is offered;
//! tools that nobody here could run are left out. A namespace's functions are shown to the model as functions of their own, under the
//! namespace's name and theirs ([`flat`]).

use std::collections::HashSet;

use serde_json::{Map, Value, json};

use super::{ToolChoice, ToolUse, check_name, leave_out};
use crate::context::RequestLimits;
use crate::error::ApiError;
use crate::fields::{Fields, Json, parse};

const CHOICE: &str = "tool_choice";

/// Whose spelling it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dialect {
    /// A function is an object within its tool.
    Chat,
    /// Its fields are the tool's; there are namespaces of functions.
    Responses,
    /// Anthropic's.
    Messages,
}

/// Takes the fields; what they say is checked against each other. `after` takes what else a tool may have, and is told how many there are
/// with it.
pub fn read(
    fields: &mut Fields,
    dialect: Dialect,
    limits: &RequestLimits,
    after: &mut dyn FnMut(&mut Fields, usize) -> Result<(), ApiError>,
) -> Result<ToolUse, ApiError> {
    let list = fields.list("tools")?.unwrap_or_default();
    let mut reader =
        ToolsReader { dialect, limit: limits.tools, names: HashSet::new(), used: ToolUse::default() };
    reader.check_count(list.len())?;
    let mut list: Vec<(usize, Json)> = list.into_iter().enumerate().collect();
    let stays: &[&str] = if dialect == Dialect::Messages { &["custom"] } else { &[] };
    let left_out = leave_out(&mut list, stays);
    for (index, raw) in list {
        reader.tool(raw, format!("tools[{index}]"), None, after)?;
    }
    let parallel = match dialect {
        Dialect::Messages => None,
        Dialect::Chat | Dialect::Responses => fields.take::<bool>("parallel_tool_calls")?,
    };
    let raw_choice = fields.raw(CHOICE);
    if reader.used.tools.is_empty() {
        if parallel.is_some() && dialect == Dialect::Chat {
            let message = "'parallel_tool_calls' is only allowed when 'tools' are given.";
            return Err(ApiError::invalid("parallel_tool_calls", message));
        }
        let message = "'tool_choice' asks for a call, but 'tools' are not given.";
        let idle = raw_choice.is_none_or(is_idle);
        return if idle { Ok(ToolUse::default()) } else { Err(ApiError::invalid(CHOICE, message)) };
    }
    reader.used.choice = ToolChoice::Auto;
    reader.used.parallel = parallel.unwrap_or(true);
    reader.used.left_out = left_out;
    match raw_choice {
        Some(raw) if dialect == Dialect::Messages => reader.choose_messages(raw)?,
        Some(raw) => reader.choose(raw)?,
        None => {}
    }
    Ok(reader.used)
}

/// Whether a choice asks for nothing.
fn is_idle(raw: Json) -> bool {
    let choice: Value = parse(raw, CHOICE).unwrap_or_default();
    let kind = if choice.is_string() { &choice } else { &choice["type"] };
    kind == "none" || kind == "auto"
}

/// The model's name for a function of a namespace.
pub fn flat(namespace: &str, name: &str) -> String {
    format!("{namespace}__{name}")
}

/// One function in the shape of chat completions, and the field that says that it is strict.
pub fn definition(tool: &mut Fields, dialect: Dialect) -> Result<(Value, Option<String>), ApiError> {
    let name: String = tool.require("name")?;
    check_name(&name, &tool.path("name"))?;
    let mut function = Map::new();
    function.insert("name".into(), name.into());
    if let Some(description) = tool.take::<String>("description")? {
        function.insert("description".into(), description.into());
    }
    let parameters = match dialect {
        Dialect::Messages => Some(input_schema(tool)?),
        Dialect::Chat | Dialect::Responses => tool.take::<Map<String, Value>>("parameters")?,
    };
    if let Some(parameters) = parameters {
        function.insert("parameters".into(), parameters.into());
    }
    let strict = tool.take::<bool>("strict")?.unwrap_or(false).then(|| tool.path("strict"));
    // All tools are shown from the start, also those that a search would bring later; input is always streamed as it is written.
    let idle: &[&str] = match dialect {
        Dialect::Chat => &[],
        Dialect::Responses => &["defer_loading"],
        Dialect::Messages => &["defer_loading", "eager_input_streaming"],
    };
    for name in idle {
        tool.take::<bool>(name)?;
    }
    Ok((json!({"type": "function", "function": function}), strict))
}

fn input_schema(tool: &mut Fields) -> Result<Map<String, Value>, ApiError> {
    let schema: Map<String, Value> = tool.require("input_schema")?;
    if schema.get("type").and_then(Value::as_str) != Some("object") {
        let path = format!("{}.type", tool.path("input_schema"));
        let message = format!("Invalid '{path}': the schema of an input must be of type \"object\".");
        return Err(ApiError::invalid(path, message));
    }
    let callers = tool.take::<Vec<String>>("allowed_callers")?.unwrap_or_default();
    if callers.iter().any(|caller| caller != "direct") {
        let why = "only the model itself (\"direct\") calls";
        return Err(ApiError::unsupported(tool.path("allowed_callers"), why));
    }
    Ok(schema)
}

/// Refuses a tool of Anthropic's that is none of the client's own.
pub fn check_own(tool: &mut Fields) -> Result<(), ApiError> {
    let Some(kind) = tool.take::<String>("type")?.filter(|kind| kind != "custom") else { return Ok(()) };
    let why = format!(
        "'{kind}' runs on Anthropic's servers or needs a model trained for it; give a tool of your own"
    );
    Err(ApiError::unsupported(tool.path("type"), &why))
}

/// What was offered so far.
struct ToolsReader {
    dialect: Dialect,
    limit: usize,
    names: HashSet<String>,
    used: ToolUse,
}

impl ToolsReader {
    fn check_count(&self, count: usize) -> Result<(), ApiError> {
        if count > self.limit {
            let message = format!("'tools' has {count} entries; the limit is {}.", self.limit);
            return Err(ApiError::invalid("tools", message));
        }
        Ok(())
    }

    /// A function, or a namespace of functions.
    fn tool(
        &mut self,
        raw: Json,
        path: String,
        namespace: Option<&str>,
        after: &mut dyn FnMut(&mut Fields, usize) -> Result<(), ApiError>,
    ) -> Result<(), ApiError> {
        let written = (self.dialect == Dialect::Chat).then(|| raw.clone());
        let mut tool = Fields::of_value(raw, path.clone())?;
        if self.dialect == Dialect::Messages {
            check_own(&mut tool)?;
            self.function(&mut tool, None)?;
            after(&mut tool, self.used.tools.len())?;
            return tool.finish(&[("input_examples", "put examples into the description")]);
        }
        match (tool.require::<String>("type")?.as_str(), self.dialect, namespace) {
            ("function", Dialect::Chat, _) => {
                let mut function = Fields::of_value(tool.require_raw("function")?, tool.path("function"))?;
                self.function(&mut function, None)?;
                function.finish(&[])?;
                // As the client wrote it, but for what says nothing to the model: the order of its fields is part of the prompt.
                let mut written: Value = parse(written.unwrap_or(Json::Null), &path)?;
                written["function"].as_object_mut().and_then(|function| function.shift_remove("strict"));
                self.used.tools.last_mut().into_iter().for_each(|tool| *tool = written.clone());
            }
            ("function", _, _) => self.function(&mut tool, namespace)?,
            ("namespace", Dialect::Responses, None) => {
                let name: String = tool.require("name")?;
                check_name(&name, &tool.path("name"))?;
                tool.take::<String>("description")?;
                let path = tool.path("tools");
                let list = tool.require_list("tools")?;
                self.check_count(self.used.tools.len() + list.len())?;
                for (index, raw) in list.into_iter().enumerate() {
                    self.tool(raw, format!("{path}[{index}]"), Some(&name), after)?;
                }
            }
            _ => {
                return Err(ApiError::unsupported(
                    tool.path("type"),
                    "only functions are available as tools",
                ));
            }
        }
        tool.finish(&[])
    }

    fn function(&mut self, fields: &mut Fields, namespace: Option<&str>) -> Result<(), ApiError> {
        let (mut tool, strict) = definition(fields, self.dialect)?;
        let mut name = tool["function"]["name"].as_str().unwrap_or_default().to_owned();
        if let Some(namespace) = namespace {
            let shown = flat(namespace, &name);
            let own = std::mem::replace(&mut name, shown);
            check_name(&name, &fields.path("name"))?;
            tool["function"]["name"] = name.as_str().into();
            self.used.namespaces.insert(name.clone(), (namespace.to_owned(), own));
        }
        if !self.names.insert(name.clone()) {
            let message = format!("The function '{name}' is given twice.");
            return Err(ApiError::invalid(fields.path("name"), message));
        }
        self.used.tools.push(tool);
        strict.into_iter().for_each(|param| self.used.hold(name.clone(), param));
        Ok(())
    }

    fn choose(&mut self, raw: Json) -> Result<(), ApiError> {
        if matches!(raw, Json::String(_)) {
            self.used.choice = mode(&parse::<String>(raw, CHOICE)?, CHOICE, true)?;
            return Ok(());
        }
        let mut choice = Fields::of_value(raw, CHOICE.into())?;
        match choice.require::<String>("type")?.as_str() {
            "function" => self.used.choice = ToolChoice::Named(self.named(&mut choice)?),
            "allowed_tools" if self.dialect == Dialect::Chat => {
                let raw = choice.require_raw("allowed_tools")?;
                let mut allowed = Fields::of_value(raw, choice.path("allowed_tools"))?;
                self.allow(&mut allowed)?;
                allowed.finish(&[])?;
            }
            "allowed_tools" => self.allow(&mut choice)?,
            _ => return Err(ApiError::unsupported("tool_choice.type", "only function and allowed_tools")),
        }
        choice.finish(&[])
    }

    /// Leaves only the listed ones.
    fn allow(&mut self, allowed: &mut Fields) -> Result<(), ApiError> {
        self.used.choice = mode(&allowed.require::<String>("mode")?, &allowed.path("mode"), false)?;
        let list = allowed.require_list("tools")?;
        let (path, offered) = (allowed.path("tools"), self.used.tools.len());
        if list.is_empty() {
            return Err(ApiError::invalid(path.clone(), format!("'{path}' is empty; use \"none\".")));
        }
        if list.len() > offered {
            let message = format!("'{path}' has {} entries, but 'tools' has {offered}.", list.len());
            return Err(ApiError::invalid(path, message));
        }
        let mut kept = HashSet::new();
        for (index, raw) in list.into_iter().enumerate() {
            let mut entry = Fields::of_value(raw, format!("{path}[{index}]"))?;
            if entry.require::<String>("type")? != "function" {
                return Err(ApiError::unsupported(entry.path("type"), "only functions are available"));
            }
            kept.insert(self.named(&mut entry)?);
            entry.finish(&[])?;
        }
        let stays = |tool: &Value| tool["function"]["name"].as_str().is_some_and(|name| kept.contains(name));
        self.used.tools.retain(stays);
        Ok(())
    }

    fn choose_messages(&mut self, raw: Json) -> Result<(), ApiError> {
        let mut choice = Fields::of_value(raw, CHOICE.into())?;
        self.used.choice = match choice.require::<String>("type")?.as_str() {
            "auto" => ToolChoice::Auto,
            "any" => ToolChoice::Required,
            "none" => ToolChoice::None,
            "tool" => ToolChoice::Named(self.named(&mut choice)?),
            other => {
                let path = choice.path("type");
                let message =
                    format!("Invalid value for '{path}': '{other}' is not one of auto, any, tool, none.");
                return Err(ApiError::invalid(path, message));
            }
        };
        if self.used.choice != ToolChoice::None {
            self.used.parallel = !choice.take::<bool>("disable_parallel_tool_use")?.unwrap_or(false);
        }
        choice.finish(&[])
    }

    /// The function that a choice names.
    fn named(&self, choice: &mut Fields) -> Result<String, ApiError> {
        let (name, path) = match self.dialect {
            Dialect::Chat => {
                let mut function =
                    Fields::of_value(choice.require_raw("function")?, choice.path("function"))?;
                let name: String = function.require("name")?;
                let path = function.path("name");
                function.finish(&[])?;
                (name, path)
            }
            Dialect::Responses => {
                let name: String = choice.require("name")?;
                let namespace = choice.take::<String>("namespace")?;
                let path = choice.path("name");
                (namespace.map_or_else(|| name.clone(), |namespace| flat(&namespace, &name)), path)
            }
            Dialect::Messages => (choice.require("name")?, choice.path("name")),
        };
        match self.names.contains(&name) {
            true => Ok(name),
            false => Err(ApiError::invalid(path, format!("The function '{name}' is not among 'tools'."))),
        }
    }
}

/// A choice that is a word; `none`: that one, too.
fn mode(name: &str, path: &str, none: bool) -> Result<ToolChoice, ApiError> {
    match name {
        "none" if none => Ok(ToolChoice::None),
        "auto" => Ok(ToolChoice::Auto),
        "required" => Ok(ToolChoice::Required),
        other => {
            let known = if none { "none, auto, required or a function" } else { "auto, required" };
            let message = format!("Invalid value for '{path}': '{other}' is not one of {known}.");
            Err(ApiError::invalid(path, message))
        }
    }
}
