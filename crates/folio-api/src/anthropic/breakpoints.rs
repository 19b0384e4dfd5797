//! `cache_control`: reading breakpoints, and splitting the prompt's tokens by them.
//!
//! Everything a prompt has is cached anyway; a breakpoint says up to where it is meant to be. Where in the prompt that is, is found once it
//! is rendered. Invariants: at most [`BREAKPOINTS_MAX`], longer-lived ones first; the parts of a [`Split`] add up to the prompt.

use serde_json::Value;

use crate::error::ApiError;
use crate::fields::{Fields, Json};

pub const BREAKPOINTS_MAX: usize = 4;
const FIELD: &str = "cache_control";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ttl {
    FiveMinutes,
    OneHour,
}

impl Ttl {
    pub fn seconds(self) -> u64 {
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
    pub fn read(raw: Json, path: &str) -> Result<Self, ApiError> {
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
pub enum After {
    /// So many tools.
    Tools(usize),
    /// So many whole messages and this one, as far as it had been read.
    Message { before: usize, last: Value },
    /// The last message.
    End,
}

/// One breakpoint.
#[derive(Clone, Debug)]
pub struct Mark {
    pub after: After,
    pub ttl: Ttl,
}

/// The breakpoints of one request, in the prompt's order.
#[derive(Clone, Debug, Default)]
pub struct Breakpoints {
    pub list: Vec<Mark>,
    /// What the last block had.
    of_last_block: Option<CacheControl>,
}

impl Breakpoints {
    /// Takes the `cache_control` of one block; blocks come in the prompt's order.
    pub fn read(&mut self, block: &mut Fields, after: impl FnOnce() -> After) -> Result<(), ApiError> {
        self.of_last_block = None;
        let Some(raw) = block.raw(FIELD) else { return Ok(()) };
        let path = block.path(FIELD);
        let control = CacheControl::read(raw, &path)?;
        self.of_last_block = Some(control);
        self.push(&path, after(), control.ttl)
    }

    /// A message that is a plain string is a block without `cache_control`.
    pub fn pass(&mut self) {
        self.of_last_block = None;
    }

    /// The request's own `cache_control`: on the last block.
    pub fn read_automatic(&mut self, raw: Json) -> Result<(), ApiError> {
        let control = CacheControl::read(raw, FIELD)?;
        match self.of_last_block {
            None => self.push(FIELD, After::End, control.ttl),
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
            let last = match &mark.after {
                After::Message { before, last } => {
                    before + 1 == messages.len() && messages.last() == Some(last)
                }
                _ => false,
            };
            // Most templates want a message of the user after the system's.
            if last && messages.iter().any(|message| message["role"] != "system") {
                mark.after = After::End;
            }
        }
        let mut lifetimes = self.list.chunk_by(|one, next| one.ttl == next.ttl);
        lifetimes.any(|marks| !matches!(marks.last(), Some(Mark { after: After::End, .. })))
    }

    fn push(&mut self, path: &str, after: After, ttl: Ttl) -> Result<(), ApiError> {
        if self.list.len() == BREAKPOINTS_MAX {
            let message = format!(
                "'{path}' is one too many: at most {BREAKPOINTS_MAX} blocks may have 'cache_control'."
            );
            return Err(ApiError::invalid(path, message));
        }
        let shorter = |mark: &Mark| mark.ttl == Ttl::FiveMinutes;
        if ttl == Ttl::OneHour && self.list.iter().any(shorter) {
            let path = format!("{path}.ttl");
            let message = format!("Invalid '{path}': a block with \"1h\" cannot come after one with \"5m\".");
            return Err(ApiError::invalid(path, message));
        }
        self.list.push(Mark { after, ttl });
        Ok(())
    }
}

/// A breakpoint's place in the prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BreakpointPosition {
    /// Before it.
    pub tokens: u32,
    pub ttl: Ttl,
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
    pub fn new(breakpoints: &[BreakpointPosition], prompt: u64, cached: u64) -> Self {
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
        let at = |tokens, ttl| BreakpointPosition { tokens, ttl };
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
