//! `system` and `messages`: from content blocks to the messages that chat templates take.
//!
//! Invariants: consecutive messages of one role are one turn; texts of a turn are joined by a newline, as for OpenAI's text
//! parts; a tool's result becomes a message with the role `tool`, in its place. A turn of the assistant at the end is what
//! the model goes on with.

use std::collections::HashMap;

use folio_text::work;
use serde_json::{Map, Value, json};

use super::breakpoints::{After, Breakpoints};
use super::tools;
use crate::context::Context;
use crate::error::{ApiError, NOT_TEXT};
use crate::fields::{self, Fields, Json, parse};
use crate::hints::Hints;
use crate::tools::arguments_text;

const NO_SERVER_TOOLS: &str = "this server runs no tools itself";

/// Kinds of blocks that exist at Anthropic's and not here.
const OTHER_KINDS: &[(&str, &str)] = &[
    ("container_upload", NO_SERVER_TOOLS),
    ("document", "the model takes text only; send the document's text"),
    ("image", NOT_TEXT),
    ("mcp_tool_result", NO_SERVER_TOOLS),
    ("mcp_tool_use", NO_SERVER_TOOLS),
    ("redacted_thinking", "only the server that wrote it can read it; leave it out"),
    ("search_result", "citations are not available; send the result as text"),
    ("server_tool_use", NO_SERVER_TOOLS),
    ("web_search_tool_result", NO_SERVER_TOOLS),
];

/// Fields of blocks of all kinds.
const KNOWN: &[&str] = &[
    "type",
    "text",
    "citations",
    "thinking",
    "signature",
    "id",
    "name",
    "input",
    "caller",
    "tool_use_id",
    "content",
    "is_error",
    "tool_name",
    "tool",
    "cache_control",
];

/// Builds a conversation, block by block.
pub struct Turns<'a, 'b> {
    context: &'a Context,
    breakpoints: &'a mut Breakpoints,
    hints: &'a mut Hints<'b>,
    out: Vec<Value>,
    /// Of the calls so far: id to name.
    calls: HashMap<String, String>,
    /// Of the tools, by system messages.
    changes: Vec<tools::Change>,
    /// What the conversation ends with so far.
    last: Last,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Last {
    Text,
    Other,
}

impl<'a, 'b> Turns<'a, 'b> {
    pub fn new(context: &'a Context, breakpoints: &'a mut Breakpoints, hints: &'a mut Hints<'b>) -> Self {
        Self {
            context,
            breakpoints,
            hints,
            out: Vec::new(),
            calls: HashMap::new(),
            changes: Vec::new(),
            last: Last::Other,
        }
    }

    /// The top-level system prompt.
    pub fn system(&mut self, raw: Json) -> Result<(), ApiError> {
        self.content(raw, "system", "system")
    }

    pub fn messages(&mut self, fields: &mut Fields) -> Result<(), ApiError> {
        let list = fields.require_list("messages")?;
        let limit = self.context.limits.messages;
        if list.is_empty() {
            return Err(ApiError::invalid("messages", "'messages' is empty; give at least one message."));
        }
        if list.len() > limit {
            let message = format!("'messages' has {} entries; the limit is {limit}.", list.len());
            return Err(ApiError::invalid("messages", message));
        }
        for (index, raw) in list.into_iter().enumerate() {
            let mut message = Fields::of_value(raw, format!("messages[{index}]"))?;
            let role: String = message.require("role")?;
            if !["user", "assistant", "system"].contains(&role.as_str()) {
                let path = message.path("role");
                let text =
                    format!("Invalid value for '{path}': '{role}' is not one of user, assistant, system.");
                return Err(ApiError::invalid(path, text));
            }
            let content = message.require_raw("content")?;
            let path = message.path("content");
            self.hints.finish(message, &["role", "content"], &[])?;
            // An answer may have ended at once, and a system message may be there for what stands beside its content.
            let optional = role != "user";
            if is_empty(&content) && !optional {
                return Err(ApiError::invalid(path.clone(), format!("'{path}' is empty.")));
            }
            self.content(content, &path, &role)?;
        }
        Ok(())
    }

    /// What system messages changed of the tools.
    pub fn changes(&mut self) -> Vec<tools::Change> {
        std::mem::take(&mut self.changes)
    }

    /// The messages, and whether the model is to go on inside the last.
    pub fn finish(self) -> Result<(Vec<Value>, bool), ApiError> {
        let Some(last) = self.out.last().filter(|last| last["role"] == "assistant") else {
            return Ok((self.out, false));
        };
        let wrong = |message: &str| Err(ApiError::invalid("messages", message));
        if self.last != Last::Text {
            return wrong(
                "'messages' end with a tool_use or thinking block of the assistant; follow it with a user message (with the \
                 tool_result), or with text for the model to go on with.",
            );
        }
        if last["content"].as_str().is_some_and(|text| text.ends_with(char::is_whitespace)) {
            return wrong(
                "'messages' end with text of the assistant that ends with whitespace; remove the whitespace.",
            );
        }
        Ok((self.out, true))
    }

    /// A string, or a list of blocks.
    fn content(&mut self, raw: Json, path: &str, role: &str) -> Result<(), ApiError> {
        if !raw.is_list() {
            let text: String = parse(raw, path)?;
            if !text.is_empty() {
                self.breakpoints.pass();
                self.text(role, &text);
            }
            return Ok(());
        }
        let blocks = fields::list(raw, path)?;
        for (index, raw) in blocks.into_iter().enumerate() {
            self.block(raw, format!("{path}[{index}]"), role)?;
        }
        Ok(())
    }

    fn block(&mut self, raw: Json, path: String, role: &str) -> Result<(), ApiError> {
        let mut block = Fields::of_value(raw, path)?;
        let kind: String = block.require("type")?;
        match (kind.as_str(), role) {
            ("text", _) => {
                let text = self.text_of(&mut block)?;
                self.text(role, &text);
            }
            ("thinking", "assistant") => self.thinking(&mut block)?,
            ("tool_use", "assistant") => self.tool_use(&mut block)?,
            ("tool_result", "user") => return self.tool_result(block),
            ("tool_addition" | "tool_removal", "system") => {
                let (change, said) = tools::change(&mut block, kind == "tool_addition")?;
                self.changes.push(change);
                self.text(role, &said);
            }
            ("thinking" | "tool_use" | "tool_result", _) => {
                let path = block.path("type");
                let message =
                    format!("Invalid '{path}': a message with the role {role} has no {kind} blocks.");
                return Err(ApiError::invalid(path, message));
            }
            (other, _) => return Err(refuse_kind(&block, other)),
        }
        // What was thought is cached with what follows it.
        if kind != "thinking" {
            self.mark(&mut block)?;
        }
        self.hints.finish(block, KNOWN, &[])
    }

    fn text_of(&self, block: &mut Fields) -> Result<String, ApiError> {
        let text: String = block.require("text")?;
        if text.is_empty() {
            let path = block.path("text");
            return Err(ApiError::invalid(path.clone(), format!("'{path}' is empty; leave the block out.")));
        }
        if block.take::<Vec<Value>>("citations")?.is_some_and(|list| !list.is_empty()) {
            return Err(ApiError::unsupported(block.path("citations"), "the model takes text only"));
        }
        Ok(text)
    }

    fn text(&mut self, role: &str, text: &str) {
        append(&mut self.turn(role)["content"], text, "\n");
        self.last = Last::Text;
    }

    fn thinking(&mut self, block: &mut Fields) -> Result<(), ApiError> {
        let thought: String = block.require("thinking")?;
        // Opaque: a conversation is shown to the model as the client tells it.
        block.require::<String>("signature")?;
        if thought.is_empty() {
            return Ok(());
        }
        append(&mut self.turn("assistant")["reasoning_content"], &thought, "\n");
        self.last = Last::Other;
        Ok(())
    }

    fn tool_use(&mut self, block: &mut Fields) -> Result<(), ApiError> {
        if !self.context.capabilities.template.is_some_and(|template| template.takes_calls) {
            let why = "the model's chat template shows no tool calls to the model";
            return Err(ApiError::unsupported(block.path("tool_use"), why));
        }
        let id: String = block.require("id")?;
        let name: String = block.require("name")?;
        let input: Map<String, Value> = block.require("input")?;
        if let Some(raw) = block.raw("caller") {
            let mut caller = Fields::of_value(raw, block.path("caller"))?;
            if caller.require::<String>("type")? != "direct" {
                return Err(ApiError::unsupported(caller.path("type"), NO_SERVER_TOOLS));
            }
            self.hints.finish(caller, &["type"], &[])?;
        }
        let arguments = arguments_text(input);
        let call = json!({"id": id, "type": "function", "function": {"name": name, "arguments": arguments}});
        self.calls.insert(id, name);
        let turn = self.turn("assistant");
        match turn["tool_calls"].as_array_mut() {
            Some(calls) => calls.push(call),
            None => turn["tool_calls"] = json!([call]),
        }
        if turn["content"] == "" {
            turn["content"] = Value::Null;
        }
        self.last = Last::Other;
        Ok(())
    }

    fn tool_result(&mut self, mut block: Fields) -> Result<(), ApiError> {
        let id: String = block.require("tool_use_id")?;
        let Some(name) = self.calls.get(&id) else {
            let path = block.path("tool_use_id");
            let message = format!("Invalid '{path}': no tool_use block before it has the id '{id}'.");
            return Err(ApiError::invalid(path, message));
        };
        let failed = block.take::<bool>("is_error")?.unwrap_or(false);
        // Templates have no place for it, so it is said in words.
        let text = if failed { "Error: " } else { "" };
        self.out.push(json!({"role": "tool", "tool_call_id": id, "name": name, "content": text}));
        self.last = Last::Other;
        if let Some(raw) = block.raw("content") {
            self.result_content(raw, &block.path("content"))?;
        }
        self.mark(&mut block)?;
        self.hints.finish(block, KNOWN, &[])
    }

    fn result_content(&mut self, raw: Json, path: &str) -> Result<(), ApiError> {
        // After the words that it failed, where it did.
        let mut separator = "";
        let mut more = |out: &mut Vec<Value>, text: &str| {
            if let Some(message) = out.last_mut() {
                append(&mut message["content"], text, std::mem::replace(&mut separator, "\n"));
            }
        };
        if !raw.is_list() {
            more(&mut self.out, &parse::<String>(raw, path)?);
            return Ok(());
        }
        for (index, raw) in fields::list(raw, path)?.into_iter().enumerate() {
            let mut block = Fields::of_value(raw, format!("{path}[{index}]"))?;
            let kind: String = block.require("type")?;
            let text = match kind.as_str() {
                "text" => self.text_of(&mut block)?,
                // What a search for tools found; the tool is among the request's.
                "tool_reference" => {
                    format!("The tool {} is available.", block.require::<String>("tool_name")?)
                }
                _ => return Err(refuse_kind(&block, &kind)),
            };
            more(&mut self.out, &text);
            self.mark(&mut block)?;
            self.hints.finish(block, KNOWN, &[])?;
        }
        Ok(())
    }

    /// The message that more of this role's turn goes into.
    fn turn(&mut self, role: &str) -> &mut Value {
        if self.out.last().is_none_or(|last| last["role"] != *role) {
            self.out.push(json!({"role": role, "content": ""}));
        }
        let last = self.out.len() - 1;
        &mut self.out[last]
    }

    fn mark(&mut self, block: &mut Fields) -> Result<(), ApiError> {
        let out = &self.out;
        self.breakpoints.read(block, || After::Message {
            before: out.len().saturating_sub(1),
            last: out.last().cloned().unwrap_or_default(),
        })
    }
}

/// Adds to a text, or begins it. A long turn has many blocks: what is there already is not copied.
fn append(content: &mut Value, text: &str, separator: &str) {
    work::add(text.len());
    match content {
        Value::String(before) => {
            if !before.is_empty() {
                before.push_str(separator);
            }
            before.push_str(text);
        }
        other => *other = text.into(),
    }
}

/// `""` and `[]`.
fn is_empty(content: &Json) -> bool {
    match content {
        Json::String(text) => text.is_empty(),
        other => other.is_list() && other.is_empty(),
    }
}

/// Refuses a kind of block, tool or source by name, as something the API has and this server has not.
fn refuse_kind(fields: &Fields, kind: &str) -> ApiError {
    let why = match OTHER_KINDS.iter().find(|(name, _)| *name == kind) {
        Some((_, why)) => why,
        None => "the model takes text, tool calls, their results and thinking only",
    };
    ApiError::unsupported(fields.path(kind), why)
}
