//! The table of hints: fields that agents send and that this server can pass over without anybody losing anything.
//!
//! A row needs a reason why neither a token nor a tenant's isolation can depend on the field here. What has an effect where the model's
//! chat template has a place for it stands in the table too ([`Hint::honoured`]): it is a hint where the template has none.

use std::fmt;

use serde::Deserialize;
use serde_json::Value;

use crate::error::ApiError;
use crate::fields::{Json, parse};
use crate::openapi::tables::Api;

/// What a hint may be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HintShape {
    Object,
    List,
    Boolean,
    Count,
    Integer,
    Number,
    /// Seconds as a number, or with units as Go writes it: `5m`, `1h30m`, `-1`.
    Duration,
    Words(&'static [&'static str]),
    /// A list of objects whose `type` is one of these.
    Kinds(&'static [&'static str]),
}

impl fmt::Display for HintShape {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        match self {
            Self::Object => f.write_str("an object"),
            Self::List => f.write_str("a list"),
            Self::Boolean => f.write_str("true or false"),
            Self::Count => f.write_str("a whole number"),
            Self::Integer => f.write_str("an integer"),
            Self::Number => f.write_str("a number"),
            Self::Duration => f.write_str("a number of seconds, or a duration such as 5m"),
            Self::Words(words) => one_of(f, words),
            Self::Kinds(kinds) => {
                f.write_str("an object with a list of edits of the types ")?;
                one_of(f, kinds)
            }
        }
    }
}

fn one_of(f: &mut fmt::Formatter, words: &[&str]) -> fmt::Result {
    for (index, word) in words.iter().enumerate() {
        let before = match index {
            0 => "",
            _ if index + 1 == words.len() => " or ",
            _ => ", ",
        };
        write!(f, "{before}{word}")?;
    }
    Ok(())
}

/// One field.
#[derive(Clone, Copy, Debug)]
pub struct Hint {
    pub api: Api,
    /// Into the request; `[]` behind a list.
    pub path: &'static str,
    pub shape: HintShape,
    pub why: &'static str,
    pub sent_by: &'static str,
    /// A reader of its own turns what the chat template has for it; it is a hint where that has nothing.
    pub honoured: bool,
}

#[derive(Deserialize)]
struct Edits {
    #[serde(default)]
    edits: Vec<Edit>,
}

#[derive(Deserialize)]
struct Edit {
    #[serde(rename = "type")]
    kind: String,
}

impl Hint {
    /// Refuses a value that the table does not list.
    pub fn check(&self, raw: Json, path: &str) -> Result<(), ApiError> {
        let fits = match self.shape {
            HintShape::Object => matches!(raw, Json::Object(_)),
            HintShape::List => raw.is_list(),
            HintShape::Boolean => matches!(raw, Json::Bool(_)),
            HintShape::Count => parse::<u32>(raw.clone(), path).is_ok(),
            HintShape::Integer => parse::<i64>(raw.clone(), path).is_ok(),
            HintShape::Number => matches!(raw, Json::Number(_)),
            HintShape::Duration => match &raw {
                Json::Number(_) => true,
                Json::String(text) => is_duration(text),
                _ => false,
            },
            HintShape::Words(words) => {
                parse::<String>(raw.clone(), path).is_ok_and(|word| words.contains(&&*word))
            }
            HintShape::Kinds(kinds) => parse::<Edits>(raw.clone(), path)
                .is_ok_and(|list| list.edits.iter().all(|edit| kinds.contains(&&*edit.kind))),
        };
        match fits {
            true => Ok(()),
            false => {
                let mut got = parse::<Value>(raw, path)?.to_string();
                got.truncate(got.floor_char_boundary(80));
                Err(ApiError::invalid(path, format!("Invalid '{path}': {got} is not {}.", self.shape)))
            }
        }
    }
}

/// As Go's `time.ParseDuration` takes it, and a number without a unit.
fn is_duration(text: &str) -> bool {
    let text = text.strip_prefix(['-', '+']).unwrap_or(text);
    if text.parse::<u64>().is_ok() {
        return true;
    }
    let mut parts = text.split_inclusive(|c: char| !(c.is_ascii_digit() || c == '.')).peekable();
    let mut any = false;
    while let Some(part) = parts.next() {
        let number = part.trim_end_matches(|c: char| !(c.is_ascii_digit() || c == '.'));
        let mut unit = part[number.len()..].to_owned();
        // A unit of two letters is two parts.
        if let Some(second) = parts.next_if(|next| next.starts_with(|c: char| c.is_alphabetic())) {
            unit += second;
        }
        let known = ["ns", "us", "µs", "ms", "s", "m", "h"].contains(&&*unit);
        any = known && number.parse::<f64>().is_ok();
        if !any {
            return false;
        }
    }
    any
}

const EFFORT: HintShape = HintShape::Words(&["none", "minimal", "low", "medium", "high", "xhigh", "max"]);
const VERBOSITY: HintShape = HintShape::Words(&["low", "medium", "high"]);
const NO_PLACE: &str = "where the chat template has a word, a switch or a budget for it, that is turned; a model without one thinks as it does";
const LENGTH: &str = "an answer is as long as the model makes it; nothing is cut or padded";
const LOADED: &str = "memory, devices and threads are those that the server was started with";
const NEVER_CUT: &str = "the context is the served model's; what does not fit into it is a 400, and nothing of a prompt is dropped to go on";
const MIROSTAT: &str = "it belongs to mirostat, which is off";
const CACHED: &str = "every prompt is cached, and a tenant's hits are its own";

const fn row(
    api: Api,
    path: &'static str,
    shape: HintShape,
    why: &'static str,
    sent_by: &'static str,
) -> Hint {
    Hint { api, path, shape, why, sent_by, honoured: false }
}

/// The same for a field that has an effect where it can.
const fn partly(
    api: Api,
    path: &'static str,
    shape: HintShape,
    why: &'static str,
    sent_by: &'static str,
) -> Hint {
    Hint { honoured: true, ..row(api, path, shape, why, sent_by) }
}

pub const HINTS: &[Hint] = &[
    row(Api::Chat, "messages[].cache_control", HintShape::Object, CACHED, "LiteLLM, Aider"),
    row(Api::Chat, "messages[].content[].cache_control", HintShape::Object, CACHED, "opencode, Aider"),
    row(
        Api::Chat,
        "messages[].provider_specific_fields",
        HintShape::Object,
        "what a proxy noted for itself",
        "LiteLLM",
    ),
    row(
        Api::Chat,
        "messages[].reasoning_details",
        HintShape::List,
        "the same reasoning again; reasoning_content and reasoning are read",
        "OpenRouter's clients",
    ),
    partly(Api::Chat, "reasoning_effort", EFFORT, NO_PLACE, "opencode, codex, OpenAI's SDKs"),
    row(Api::Chat, "verbosity", VERBOSITY, LENGTH, "OpenAI's SDKs"),
    row(
        Api::Messages,
        "context_management",
        HintShape::Kinds(&["clear_thinking_20251015", "clear_tool_uses_20250919"]),
        "the conversation is used as it is sent; nothing of it is cleared",
        "Claude Code",
    ),
    row(
        Api::Messages,
        "diagnostics",
        HintShape::Object,
        "usage and /metrics tell what was cached",
        "Claude Code",
    ),
    row(
        Api::Messages,
        "fallbacks",
        HintShape::List,
        "there is one model, so none is fallen back to",
        "Claude Code",
    ),
    row(
        Api::Messages,
        "messages[].output_config",
        HintShape::Object,
        "the request's own output_config says how much to think",
        "Claude Code",
    ),
    partly(Api::Messages, "output_config.effort", EFFORT, NO_PLACE, "Claude Code"),
    row(
        Api::Messages,
        "output_config.task_budget",
        HintShape::Object,
        "advice to a model that was trained for it; max_tokens is the limit",
        "Claude Code",
    ),
    partly(
        Api::Messages,
        "thinking",
        HintShape::Object,
        "with a model that is not known to think, enabled and adaptive ask for nothing it could do",
        "Claude Code",
    ),
    row(Api::Responses, "client_metadata", HintShape::Object, "notes of the client's own", "codex"),
    partly(
        Api::Responses,
        "include",
        HintShape::List,
        "parts of results of built-in tools, of which there are none; reasoning.encrypted_content is honoured",
        "codex, the Agents SDK",
    ),
    row(
        Api::Responses,
        "max_tool_calls",
        HintShape::Count,
        "it limits built-in tools, and there are none",
        "OpenAI's SDKs",
    ),
    partly(Api::Responses, "reasoning.effort", EFFORT, NO_PLACE, "codex"),
    partly(
        Api::Responses,
        "reasoning.summary",
        HintShape::Words(&["auto", "concise", "detailed", "none"]),
        "reasoning is told as it is, which is more than a summary",
        "codex",
    ),
    row(Api::Responses, "text.verbosity", VERBOSITY, LENGTH, "codex"),
    row(
        Api::Ollama,
        "keep_alive",
        HintShape::Duration,
        "the model stays loaded as long as the server runs; of several models (configuration.md) it is honoured where no keys are asked for",
        "Ollama's SDKs, Open WebUI",
    ),
    row(Api::Ollama, "options.f16_kv", HintShape::Boolean, LOADED, "Ollama's SDKs"),
    row(
        Api::Ollama,
        "options.logits_all",
        HintShape::Boolean,
        "log probabilities are asked for with logprobs",
        "Ollama's SDKs",
    ),
    row(Api::Ollama, "options.low_vram", HintShape::Boolean, LOADED, "Ollama's SDKs"),
    row(Api::Ollama, "options.main_gpu", HintShape::Integer, LOADED, "Ollama's SDKs"),
    row(Api::Ollama, "options.mirostat_eta", HintShape::Number, MIROSTAT, "Ollama's SDKs"),
    row(Api::Ollama, "options.mirostat_tau", HintShape::Number, MIROSTAT, "Ollama's SDKs"),
    row(Api::Ollama, "options.num_batch", HintShape::Integer, LOADED, "Ollama's SDKs"),
    row(
        Api::Ollama,
        "options.num_ctx",
        HintShape::Integer,
        NEVER_CUT,
        "Ollama's SDKs, Open WebUI, LangChain",
    ),
    row(Api::Ollama, "options.num_gpu", HintShape::Integer, LOADED, "Ollama's SDKs"),
    row(Api::Ollama, "options.num_keep", HintShape::Integer, NEVER_CUT, "Ollama's SDKs"),
    row(Api::Ollama, "options.num_thread", HintShape::Integer, LOADED, "Ollama's SDKs"),
    row(Api::Ollama, "options.numa", HintShape::Boolean, LOADED, "Ollama's SDKs"),
    row(Api::Ollama, "options.use_mlock", HintShape::Boolean, LOADED, "Ollama's SDKs"),
    row(Api::Ollama, "options.use_mmap", HintShape::Boolean, LOADED, "Ollama's SDKs"),
    partly(Api::Ollama, "think", EFFORT, NO_PLACE, "Ollama's SDKs"),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_are_those_of_go() {
        for text in ["5m", "-1", "0", "300ms", "1.5h", "2h45m", "-1m", "10us", "3600", "1h30m5s"] {
            assert!(is_duration(text), "{text}");
        }
        for text in ["", "m", "5 m", "five", "1h30", "5mm", "1..5s", "ms5"] {
            assert!(!is_duration(text), "{text}");
        }
    }
}
