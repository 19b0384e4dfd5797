//! `tools` and `tool_choice`: from the shapes of responses to the shared [`ToolUse`].
//!
//! Invariants: a namespace's functions are shown to the model as functions of their own, under the namespace's name and theirs
//! ([`flat`]); a call of one is told with both, as the client gave them. Tools that nobody here could run are left out (`tools`).

use std::collections::{HashMap, HashSet};

use serde_json::value::RawValue;
use serde_json::{Map, Value, json};

use crate::api::error::ApiError;
use crate::api::fields::{Fields, parse};
use crate::api::tools::{ToolChoice, ToolUse, at_most, check_name, leave_out, mode};
use crate::config::Limits;

/// Functions of namespaces: the model's name for each to the namespace's and its own.
pub type Namespaces = HashMap<String, (String, String)>;

/// The model's name for a function of a namespace.
pub fn flat(namespace: &str, name: &str) -> String {
    format!("{namespace}__{name}")
}

/// Takes the fields; `told` is what the response repeats of them.
pub fn read(
    fields: &mut Fields,
    limits: &Limits,
    told: &mut Map<String, Value>,
) -> Result<(ToolUse, Namespaces), ApiError> {
    let list = fields.take::<Vec<&RawValue>>("tools")?.unwrap_or_default();
    let mut offered = Offered { limit: limits.tools, ..Offered::default() };
    offered.check_count(list.len())?;
    let all: Result<Vec<Value>, ApiError> =
        list.iter().enumerate().map(|(index, raw)| parse(raw, &format!("tools[{index}]"))).collect();
    let mut list: Vec<(usize, &RawValue)> = list.into_iter().enumerate().collect();
    let left_out = leave_out(&mut list, &[]);
    for (index, raw) in list {
        offered.tool(raw, format!("tools[{index}]"), None)?;
    }
    let Offered { mut tools, held, namespaces, .. } = offered;
    let parallel = fields.take::<bool>("parallel_tool_calls")?.unwrap_or(true);
    let (choice, told_choice) = choice(fields, &mut tools)?;
    told.insert("tools".into(), all?.into());
    told.insert("tool_choice".into(), told_choice);
    told.insert("parallel_tool_calls".into(), parallel.into());
    if tools.is_empty() {
        return Ok((ToolUse::default(), namespaces));
    }
    let mut tools = ToolUse::new(tools, choice, parallel);
    tools.left_out = left_out;
    held.into_iter().for_each(|(function, param)| tools.hold(function, param));
    Ok((tools, namespaces))
}

/// What was offered so far.
#[derive(Default)]
struct Offered {
    limit: usize,
    tools: Vec<Value>,
    names: HashSet<String>,
    /// Strict functions, and the field that says so.
    held: Vec<(String, String)>,
    namespaces: Namespaces,
}

impl Offered {
    fn check_count(&self, count: usize) -> Result<(), ApiError> {
        if count > self.limit {
            let message = format!("'tools' has {count} entries; the limit is {}.", self.limit);
            return Err(ApiError::invalid("tools", message));
        }
        Ok(())
    }

    /// A function, or a namespace of functions.
    fn tool(&mut self, raw: &RawValue, path: String, namespace: Option<&str>) -> Result<(), ApiError> {
        let mut tool = Fields::of_value(raw, path)?;
        match (tool.require::<String>("type")?.as_str(), namespace) {
            ("function", _) => self.function(tool, namespace),
            ("namespace", None) => {
                let name: String = tool.require("name")?;
                check_name(&name, &tool.path("name"))?;
                tool.take::<String>("description")?;
                let path = tool.path("tools");
                let list: Vec<&RawValue> = tool.require("tools")?;
                tool.finish(&[])?;
                self.check_count(self.tools.len() + list.len())?;
                for (index, raw) in list.iter().enumerate() {
                    self.tool(raw, format!("{path}[{index}]"), Some(&name))?;
                }
                Ok(())
            }
            _ => Err(ApiError::unsupported(tool.path("type"), "only functions are available as tools")),
        }
    }

    fn function(&mut self, mut tool: Fields, namespace: Option<&str>) -> Result<(), ApiError> {
        let own: String = tool.require("name")?;
        let name = namespace.map_or_else(|| own.clone(), |namespace| flat(namespace, &own));
        check_name(&name, &tool.path("name"))?;
        if !self.names.insert(name.clone()) {
            let message = format!("The function '{name}' is given twice.");
            return Err(ApiError::invalid(tool.path("name"), message));
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
            self.held.push((name.clone(), tool.path("strict")));
        }
        // All tools are shown from the start, also those that a search would bring later.
        tool.take::<bool>("defer_loading")?;
        tool.finish(&[])?;
        self.tools.push(json!({"type": "function", "function": function}));
        if let Some(namespace) = namespace {
            self.namespaces.insert(name, (namespace.to_owned(), own));
        }
        Ok(())
    }
}

/// The function that an entry of `tool_choice` names.
fn named(entry: &mut Fields) -> Result<String, ApiError> {
    let name: String = entry.require("name")?;
    Ok(match entry.take::<String>("namespace")? {
        Some(namespace) => flat(&namespace, &name),
        None => name,
    })
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
                    let name = named(&mut choice)?;
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
                        let name = named(&mut entry)?;
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
