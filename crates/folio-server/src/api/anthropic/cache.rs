//! `cache_control`: reading breakpoints, finding where in the prompt they are, and splitting the prompt's tokens by them.
//!
//! Everything a prompt has is cached anyway; a breakpoint says up to where it is meant to be. Its place is found by rendering
//! the conversation up to it: the tokens that lie wholly within the text in which that and the whole prompt agree. The prompt is tokenized
//! once; only where a tokenizer changes texts (a normalizer, a space put before) is each such text tokenized again. Invariants: at most
//! [`BREAKPOINTS_MAX`], longer-lived ones first; places never go back; the parts of a [`Split`] add up to the prompt.

use folio_engine::request::RetentionRange;
use folio_kv::{DEFAULT_PRIORITY, TenantId};
use folio_text::Prompt;
use serde_json::value::RawValue;
use serde_json::{Value, json};

use crate::api::error::ApiError;
use crate::api::fields::Fields;
use crate::api::openai::chat::Conversation;
use crate::app::State;
use crate::generation::tokenizing::encode_prompt;

const BREAKPOINTS_MAX: usize = 4;
const FIELD: &str = "cache_control";
/// In the cache, of what a breakpoint asks to keep; above what nobody asked for, below what an operator or a client puts higher.
const PRIORITY: u8 = DEFAULT_PRIORITY + 10;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ttl {
    FiveMinutes,
    OneHour,
}

impl Ttl {
    fn seconds(self) -> u64 {
        match self {
            Self::FiveMinutes => 300,
            Self::OneHour => 3600,
        }
    }
}

/// What a `cache_control` field says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CacheControl {
    pub ttl: Ttl,
}

impl CacheControl {
    pub fn read(raw: &RawValue, path: &str) -> Result<Self, ApiError> {
        let mut fields = Fields::of_value(raw, path.to_owned())?;
        let invalid = |path: String, value: &str, known: &str| {
            let message = format!("Invalid value for '{path}': '{value}' is not one of {known}.");
            Err(ApiError::invalid(path, message))
        };
        let kind: String = fields.require("type")?;
        if kind != "ephemeral" {
            return invalid(fields.path("type"), &kind, "ephemeral");
        }
        let ttl = match fields.take::<String>("ttl")?.as_deref() {
            None | Some("5m") => Ttl::FiveMinutes,
            Some("1h") => Ttl::OneHour,
            Some(other) => return invalid(fields.path("ttl"), other, "5m, 1h"),
        };
        fields.finish(&[])?;
        Ok(Self { ttl })
    }
}

/// What a breakpoint comes after.
#[derive(Clone, Debug)]
pub enum Place {
    /// So many tools.
    Tools(usize),
    /// So many whole messages and this one, as far as it had been read.
    Message { before: usize, last: Value },
    /// The last message.
    End,
}

#[derive(Clone, Debug)]
struct Mark {
    place: Place,
    control: CacheControl,
}

/// The breakpoints of one request, in the prompt's order.
#[derive(Clone, Debug, Default)]
pub struct Marks {
    list: Vec<Mark>,
    /// What the last block had.
    of_last_block: Option<CacheControl>,
}

impl Marks {
    /// Takes the `cache_control` of one block; blocks come in the prompt's order.
    pub fn read(&mut self, block: &mut Fields, place: impl FnOnce() -> Place) -> Result<(), ApiError> {
        self.of_last_block = None;
        let Some(raw) = block.raw(FIELD) else { return Ok(()) };
        let path = block.path(FIELD);
        let control = CacheControl::read(raw, &path)?;
        self.of_last_block = Some(control);
        self.push(&path, place(), control)
    }

    /// A message that is a plain string is a block without `cache_control`.
    pub fn pass(&mut self) {
        self.of_last_block = None;
    }

    /// The request's own `cache_control`: on the last block.
    pub fn read_automatic(&mut self, raw: &RawValue) -> Result<(), ApiError> {
        let control = CacheControl::read(raw, FIELD)?;
        match self.of_last_block {
            None => self.push(FIELD, Place::End, control),
            Some(own) if own == control => Ok(()),
            Some(_) => {
                let message = "'cache_control' has another 'ttl' than the last block's own 'cache_control'.";
                Err(ApiError::invalid("cache_control.ttl", message))
            }
        }
    }

    pub fn is_empty(&self) -> bool {
        self.list.is_empty()
    }

    fn push(&mut self, path: &str, place: Place, control: CacheControl) -> Result<(), ApiError> {
        if self.list.len() == BREAKPOINTS_MAX {
            let message = format!(
                "'{path}' is one too many: at most {BREAKPOINTS_MAX} blocks may have 'cache_control'."
            );
            return Err(ApiError::invalid(path, message));
        }
        let shorter = |mark: &Mark| mark.control.ttl == Ttl::FiveMinutes;
        if control.ttl == Ttl::OneHour && self.list.iter().any(shorter) {
            let path = format!("{path}.ttl");
            let message = format!("Invalid '{path}': a block with \"1h\" cannot come after one with \"5m\".");
            return Err(ApiError::invalid(path, message));
        }
        self.list.push(Mark { place, control });
        Ok(())
    }
}

/// A breakpoint's place in the prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Breakpoint {
    /// Before it.
    pub tokens: u32,
    pub ttl: Ttl,
}

/// Finds the places. `source` is the conversation before it was rendered to `prompt` and tokenized to `tokens`. A template that
/// cannot render a conversation cut short leaves the breakpoint where the one before it is.
pub fn place(
    state: &State,
    tenant: TenantId,
    source: &Conversation,
    marks: &Marks,
    prompt: &Prompt,
    tokens: &[u32],
) -> Vec<Breakpoint> {
    let _span = step!("breakpoints");
    let mut reached = 0;
    let mut out = Vec::with_capacity(marks.list.len());
    let ends = ends(state, prompt.text(), tokens);
    for mark in &marks.list {
        let shared = shared_prompt(state, source, &mark.place, prompt);
        let within = match &ends {
            Some(ends) => ends.partition_point(|end| *end <= shared.text().len()),
            None => {
                let cut =
                    encode_prompt(state, Some(tenant), &shared, false, true, "messages").unwrap_or_default();
                cut.iter().zip(tokens).take_while(|(a, b)| a == b).count()
            }
        };
        reached = reached.max(within as u32);
        out.push(Breakpoint { tokens: reached, ttl: mark.control.ttl });
    }
    out
}

/// Where each token ends in the text, in bytes. `None`: the tokenizer changes texts before it cuts them.
fn ends(state: &State, text: &str, tokens: &[u32]) -> Option<Vec<usize>> {
    let tokenizer = &state.app.tokenizer;
    let mut end = 0;
    let mut ends = Vec::with_capacity(tokens.len());
    for token in tokens {
        let bytes = tokenizer.token_bytes(*token);
        if text.as_bytes().get(end..end + bytes.len()) != Some(bytes) {
            return None;
        }
        end += bytes.len();
        ends.push(end);
    }
    (end == text.len()).then_some(ends)
}

/// The beginning of `prompt` that the conversation up to `place` decides.
fn shared_prompt(state: &State, source: &Conversation, place: &Place, prompt: &Prompt) -> Prompt {
    let shared = |messages: Vec<Value>, tools: Option<usize>| {
        let tools = tools.map_or_else(|| source.tools.clone(), |count| source.tools.first(count));
        let mut cut = Conversation {
            messages,
            tools,
            kwargs: source.kwargs.clone(),
            budget: None,
            add_generation_prompt: false,
            continue_final: false,
        };
        prompt.shared(&cut.render(state).unwrap_or_default())
    };
    match place {
        Place::End => shared(source.messages.clone(), None),
        Place::Message { before, last } => {
            let mut messages: Vec<Value> = source.messages.iter().take(*before).cloned().collect();
            messages.push(last.clone());
            if messages.iter().all(|message| message["role"] == "system") {
                messages.push(another_user(source));
            }
            shared(messages, None)
        }
        Place::Tools(count) => {
            let alone = shared(vec![another_user(source)], Some(*count));
            // Some templates have the system prompt first: then it belongs to what comes before.
            let system = source.messages.first().filter(|message| message["role"] == "system");
            let Some(system) = system else { return alone };
            let after = shared(vec![system.clone(), another_user(source)], Some(*count));
            let tools = source.tools.first(*count);
            let shown = |prompt: &Prompt| tools.last_name().is_some_and(|name| prompt.text().contains(name));
            if shown(&after) && !shown(&alone) { after } else { alone }
        }
    }
}

/// A user message that differs from the conversation's first from its first character on; many templates want one.
fn another_user(source: &Conversation) -> Value {
    let first = source.messages.iter().find(|message| message["role"] == "user");
    let begins_with_a =
        first.is_some_and(|first| first["content"].as_str().is_some_and(|c| c.starts_with('A')));
    json!({"role": "user", "content": if begins_with_a { "B" } else { "A" }})
}

/// What is up to a breakpoint goes after everything nobody asked to keep, until it was not used for so long; then it goes first.
pub fn ranges(breakpoints: &[Breakpoint]) -> Vec<RetentionRange> {
    let mut from = 0;
    let range = |breakpoint: &Breakpoint| {
        let tokens = std::mem::replace(&mut from, breakpoint.tokens)..breakpoint.tokens;
        let ttl_us = Some(breakpoint.ttl.seconds() * 1_000_000);
        RetentionRange { tokens, priority: PRIORITY, ttl_us, pin: false }
    };
    breakpoints.iter().map(range).filter(|range| !range.tokens.is_empty()).collect()
}

/// A prompt's tokens, Anthropic's way.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Split {
    /// Found in the cache.
    pub read: u64,
    /// Computed, up to the last breakpoint of each lifetime.
    pub written_5m: u64,
    pub written_1h: u64,
    /// Computed, after the last breakpoint.
    pub rest: u64,
}

impl Split {
    pub fn new(breakpoints: &[Breakpoint], prompt: u64, cached: u64) -> Self {
        let mut split = Self { read: cached, ..Self::default() };
        let mut from = cached;
        for breakpoint in breakpoints {
            let to = u64::from(breakpoint.tokens).clamp(from, prompt.max(from));
            match breakpoint.ttl {
                Ttl::FiveMinutes => split.written_5m += to - from,
                Ttl::OneHour => split.written_1h += to - from,
            }
            from = to;
        }
        split.rest = prompt.saturating_sub(from);
        split
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_parts_add_up_to_the_prompt() {
        let at = |tokens, ttl| Breakpoint { tokens, ttl };
        let list = [at(10, Ttl::OneHour), at(30, Ttl::FiveMinutes), at(60, Ttl::FiveMinutes)];
        for cached in 0..=100 {
            let split = Split::new(&list, 100, cached);
            assert_eq!(split.read + split.written_5m + split.written_1h + split.rest, 100);
            assert_eq!(split.read, cached);
            assert_eq!(split.written_1h, 10u64.saturating_sub(cached));
            assert_eq!(split.written_5m, 60 - cached.clamp(10, 60));
        }
        assert_eq!(Split::new(&[], 100, 40), Split { read: 40, rest: 60, ..Split::default() });
    }
}
