//! Changes of the tools in mid-conversation.

use serde_json::Value;

use crate::context::RequestLimits;
use crate::error::ApiError;
use crate::fields::Fields;
use crate::tools::{Dialect, ToolChoice, ToolUse, check_own};

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
    let mut tool = Fields::of_value(block.require_raw("tool")?, block.path("tool"))?;
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
            let mut definition = Fields::of_value(tool.require_raw("definition")?, tool.path("definition"))?;
            check_own(&mut definition)?;
            let (value, strict) = crate::tools::definition(&mut definition, Dialect::Messages)?;
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
pub fn apply(changes: Vec<Change>, tools: &mut ToolUse, limits: &RequestLimits) -> Result<(), ApiError> {
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
            Err(ApiError::invalid("tool_choice", message))
        }
        _ => Ok(()),
    }
}
