//! `tools` and `tool_choice`: from Anthropic's shapes to the shared [`ToolUse`].

use serde_json::value::RawValue;
use serde_json::{Map, Value, json};

use super::cache::{Marks, Place};
use crate::api::error::ApiError;
use crate::api::fields::Fields;
use crate::api::tools::{ToolChoice, ToolUse, check_name, leave_out};
use crate::config::Limits;

const CHOICE: &str = "tool_choice";

/// Takes both fields.
pub fn read(fields: &mut Fields, limits: &Limits, marks: &mut Marks) -> Result<ToolUse, ApiError> {
    let list = fields.take::<Vec<&RawValue>>("tools")?.unwrap_or_default();
    if list.len() > limits.tools {
        let message = format!("'tools' has {} entries; the limit is {}.", list.len(), limits.tools);
        return Err(ApiError::invalid("tools", message));
    }
    let mut tools: Vec<Value> = Vec::with_capacity(list.len());
    let mut held = Vec::new();
    let mut list: Vec<(usize, &RawValue)> = list.into_iter().enumerate().collect();
    let left_out = leave_out(&mut list, &["custom"]);
    for (index, raw) in list {
        let path = format!("tools[{index}]");
        let mut tool = Fields::of_value(raw, path)?;
        let value = function(&mut tool)?;
        let name = &value["function"]["name"];
        if tools.iter().any(|other| other["function"]["name"] == *name) {
            let path = tool.path("name");
            return Err(ApiError::invalid(path, format!("The tool {name} is given twice.")));
        }
        if tool.take::<bool>("strict")?.unwrap_or(false) {
            held.push((
                value["function"]["name"].as_str().unwrap_or_default().to_owned(),
                tool.path("strict"),
            ));
        }
        tools.push(value);
        let shown = tools.len();
        marks.read(&mut tool, || Place::Tools(shown))?;
        tool.finish(&[("input_examples", "put examples into the description")])?;
    }
    let (choice, parallel) = match fields.raw(CHOICE) {
        Some(raw) => choice(raw, &tools)?,
        None => (ToolChoice::Auto, true),
    };
    if tools.is_empty() {
        return Ok(ToolUse::default());
    }
    let mut tools = ToolUse::new(tools, choice, parallel);
    tools.left_out = left_out;
    held.into_iter().for_each(|(function, param)| tools.hold(function, param));
    Ok(tools)
}

/// A change of the tools in mid-conversation, by a block of a system message.
pub enum Change {
    /// And the field that says its arguments are held to its schema.
    Add(Value, Option<String>),
    /// One of the request's that was removed before.
    Restore(String),
    Remove(String),
}

/// Reads a `tool_addition` or `tool_removal` block: the change, and the words in which the model is told.
pub fn change(block: &mut Fields, adds: bool) -> Result<(Change, String), ApiError> {
    let mut tool = Fields::of_value(block.require("tool")?, block.path("tool"))?;
    let kind: String = tool.require("type")?;
    let (change, name) = match (kind.as_str(), adds) {
        ("tool_reference", _) => {
            let name = match tool.take::<String>("name")? {
                Some(name) => name,
                None => tool.require("tool_name")?,
            };
            (if adds { Change::Restore(name.clone()) } else { Change::Remove(name.clone()) }, name)
        }
        ("tool_definition", true) => {
            let mut definition = Fields::of_value(tool.require("definition")?, tool.path("definition"))?;
            let value = function(&mut definition)?;
            let strict = definition.take::<bool>("strict")?.unwrap_or(false);
            let strict = strict.then(|| definition.path("strict"));
            definition.finish(&[])?;
            let name = value["function"]["name"].as_str().unwrap_or_default().to_owned();
            (Change::Add(value, strict), name)
        }
        (other, _) => {
            let known = if adds { "tool_reference, tool_definition" } else { "tool_reference" };
            let path = tool.path("type");
            let message = format!("Invalid value for '{path}': '{other}' is not one of {known}.");
            return Err(ApiError::invalid(path, message));
        }
    };
    tool.finish(&[])?;
    let said = if adds { "is available" } else { "is not available any more" };
    Ok((change, format!("The tool {name} {said}.")))
}

/// Makes the changes, in their order.
pub fn apply(changes: Vec<Change>, tools: &mut ToolUse, limits: &Limits) -> Result<(), ApiError> {
    let offered = tools.clone();
    for change in changes {
        match change {
            Change::Add(tool, strict) => {
                let name = tool["function"]["name"].as_str().unwrap_or_default().to_owned();
                tools.add(tool);
                strict.into_iter().for_each(|param| tools.hold(name.clone(), param));
            }
            Change::Restore(name) => match offered.named(&name) {
                Some(tool) => tools.add(tool.clone()),
                // Added by a definition of its own, or never there.
                None if tools.named(&name).is_some() => {}
                None => {
                    let message =
                        format!("The tool '{name}' is not among 'tools', so it cannot be added by its name.");
                    return Err(ApiError::invalid("messages", message));
                }
            },
            Change::Remove(name) => tools.remove(&name),
        }
        if tools.count() > limits.tools {
            let message = format!("'messages' add more than {} tools.", limits.tools);
            return Err(ApiError::invalid("messages", message));
        }
    }
    match &tools.choice {
        ToolChoice::Named(name) if tools.named(name).is_none() => {
            let message =
                format!("'tool_choice' asks for a call of '{name}', which a system message removed.");
            Err(ApiError::invalid(CHOICE, message))
        }
        _ => Ok(()),
    }
}

/// One tool in OpenAI's shape, which is what chat templates take.
fn function(tool: &mut Fields) -> Result<Value, ApiError> {
    if let Some(kind) = tool.take::<String>("type")?.filter(|kind| kind != "custom") {
        let why = format!(
            "'{kind}' runs on Anthropic's servers or needs a model trained for it; give a tool of your own"
        );
        return Err(ApiError::unsupported(tool.path("type"), &why));
    }
    let name: String = tool.require("name")?;
    check_name(&name, &tool.path("name"))?;
    let mut function = Map::new();
    function.insert("name".into(), name.into());
    if let Some(description) = tool.take::<String>("description")? {
        function.insert("description".into(), description.into());
    }
    let schema: Map<String, Value> = tool.require("input_schema")?;
    if schema.get("type").and_then(Value::as_str) != Some("object") {
        let path = format!("{}.type", tool.path("input_schema"));
        let message = format!("Invalid '{path}': the schema of an input must be of type \"object\".");
        return Err(ApiError::invalid(path, message));
    }
    function.insert("parameters".into(), schema.into());
    // All tools are shown from the start, also those that a search would bring later; input is always streamed as it is written.
    for name in ["defer_loading", "eager_input_streaming"] {
        tool.take::<bool>(name)?;
    }
    let callers = tool.take::<Vec<String>>("allowed_callers")?.unwrap_or_default();
    if callers.iter().any(|caller| caller != "direct") {
        return Err(ApiError::unsupported(
            tool.path("allowed_callers"),
            "only the model itself (\"direct\") calls",
        ));
    }
    Ok(json!({"type": "function", "function": function}))
}

fn choice(raw: &RawValue, tools: &[Value]) -> Result<(ToolChoice, bool), ApiError> {
    let mut fields = Fields::of_value(raw, CHOICE.into())?;
    let kind: String = fields.require("type")?;
    let choice = match kind.as_str() {
        "auto" => ToolChoice::Auto,
        "any" => ToolChoice::Required,
        "none" => ToolChoice::None,
        "tool" => {
            let name: String = fields.require("name")?;
            if !tools.iter().any(|tool| tool["function"]["name"] == *name) {
                let path = fields.path("name");
                return Err(ApiError::invalid(path, format!("The tool '{name}' is not among 'tools'.")));
            }
            ToolChoice::Named(name)
        }
        other => {
            let path = fields.path("type");
            let message =
                format!("Invalid value for '{path}': '{other}' is not one of auto, any, tool, none.");
            return Err(ApiError::invalid(path, message));
        }
    };
    if choice == ToolChoice::Required && tools.is_empty() {
        let message = "'tool_choice' asks for a call, but 'tools' are not given.";
        return Err(ApiError::invalid(CHOICE, message));
    }
    let single = match choice {
        ToolChoice::None => false,
        _ => fields.take::<bool>("disable_parallel_tool_use")?.unwrap_or(false),
    };
    fields.finish(&[])?;
    Ok((choice, !single))
}
