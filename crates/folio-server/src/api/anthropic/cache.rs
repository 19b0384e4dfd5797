//! `cache_control`: reading breakpoints, finding where in the prompt they are, and splitting the prompt's tokens by them.
//!
//! Everything a prompt has is cached anyway; a breakpoint says up to where it is meant to be. One at the conversation's end, as agents have
//! it, is where the template first asked whether the assistant's turn is to begin. The place of another is found by rendering the
//! conversation up to it: the tokens that lie wholly within the text in which that and the whole prompt agree. The prompt is tokenized once.
//! Invariants: at most [`BREAKPOINTS_MAX`], longer-lived ones first; places never go back; the parts of a [`Split`] add up to the prompt.

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

/// Bytes of what opens the assistant's turn, at most. Where a template wrote more since it asked whether to, it is asked again without.
const HEADER_BYTES: usize = 256;

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

    /// Once all `messages` are known: whether a place is needed inside of them.
    pub fn inside(&mut self, messages: &[Value]) -> bool {
        for mark in &mut self.list {
            let last = match &mark.place {
                Place::Message { before, last } => {
                    before + 1 == messages.len() && messages.last() == Some(last)
                }
                _ => false,
            };
            // Most templates want a message of the user after the system's.
            if last && messages.iter().any(|message| message["role"] != "system") {
                mark.place = Place::End;
            }
        }
        let mut lifetimes = self.list.chunk_by(|one, next| one.control == next.control);
        lifetimes.any(|marks| !matches!(marks.last(), Some(Mark { place: Place::End, .. })))
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

/// What places are found in.
pub struct Placing<'a> {
    pub state: &'a State,
    pub tenant: TenantId,
    /// As it went into the template.
    pub conversation: &'a Conversation,
    /// As it came, where one of the places needs it ([`Marks::inside`]).
    pub source: Option<&'a Conversation>,
    pub prompt: &'a Prompt,
    pub tokens: &'a [u32],
}

impl Placing<'_> {
    /// The furthest place of each lifetime: those before it would say the same of the same tokens. Nothing is further than the conversation's
    /// end. Where a template cannot render a conversation cut short, that place is where the one before is.
    pub fn find(&self, marks: &Marks) -> Vec<Breakpoint> {
        let _span = step!("breakpoints");
        let mut reached = 0;
        let lifetimes = marks.list.chunk_by(|one, next| one.control == next.control);
        let place = |marks: &[Mark]| {
            let last = marks.last().filter(|mark| matches!(mark.place, Place::End));
            let counted = last.map_or(marks, std::slice::from_ref);
            reached = counted.iter().map(|mark| self.tokens_before(&mark.place)).fold(reached, u32::max);
            Breakpoint { tokens: reached, ttl: marks[0].control.ttl }
        };
        lifetimes.map(place).collect()
    }

    fn tokens_before(&self, place: &Place) -> u32 {
        let prompt = self.prompt;
        let shared = |cut: Result<Prompt, ApiError>| prompt.shared(&cut.unwrap_or_default()).text().len();
        let bytes = match place {
            Place::End if prompt.text().len() - prompt.before_answer() <= HEADER_BYTES => {
                prompt.before_answer()
            }
            Place::End => shared(self.conversation.through_template(self.state, false)),
            place => {
                self.source.map_or(0, |source| shared_prompt(self.state, source, place, prompt).text().len())
            }
        };
        let tokens = before(self.state, prompt.text(), self.tokens, bytes).unwrap_or_else(|| {
            let mut cut = prompt.clone();
            cut.truncate(bytes);
            let cut = encode_prompt(self.state, Some(self.tenant), &cut, false, true, "messages");
            cut.unwrap_or_default().iter().zip(self.tokens).take_while(|(a, b)| a == b).count()
        });
        tokens as u32
    }
}

/// Tokens that end within the first `bytes`, counted from the end of the text. `None`: behind them the tokenizer changed the text before it
/// cut it.
fn before(state: &State, text: &str, tokens: &[u32], bytes: usize) -> Option<usize> {
    let mut rest = text.as_bytes();
    for (index, token) in tokens.iter().enumerate().rev() {
        if rest.len() <= bytes {
            return Some(index + 1);
        }
        rest = rest.strip_suffix(state.app.tokenizer.token_bytes(*token))?;
    }
    rest.is_empty().then_some(0)
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
