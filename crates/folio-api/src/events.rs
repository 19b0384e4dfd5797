//! What an answer is made of, and what every API's way of writing it can do.
//!
//! Owns: the figures and pieces that a writer is given. Must never: decide what is part of an answer, or when. Invariant: `opening` comes
//! before any `delta` of its choice, `closing` or `failed` last and once.

use std::borrow::Cow;
use std::sync::Arc;
use std::time::Duration;

use folio_text::OutputEvent;

use crate::error::ApiError;

/// Where a streamed answer's events go.
pub trait StreamSink {
    fn send(&self, json: &str);
    /// An event with a name, where the framing has such.
    fn named(&self, name: &str, json: &str);
}

/// How the events of a stream are told apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Framing {
    /// `text/event-stream`.
    Events,
    /// `application/x-ndjson`: JSON without line breaks, one on a line.
    Lines,
}

/// A comment of an event stream, which readers skip.
pub const KEEP_ALIVE: &str = ": keep-alive\n\n";

/// Natural-log probabilities from the model's raw distribution.
#[derive(Clone, Debug, PartialEq, Default)]
pub struct TokenLogprobs {
    pub logprob: f32,
    /// 1 is the most likely token.
    pub rank: u32,
    /// Best first.
    pub top: Vec<(u32, f32)>,
}

/// Why a choice ended, as vLLM's `stop_reason` tells it: the string or the token id; nothing for end-of-sequence.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
#[serde(untagged)]
pub enum StopReason {
    Token(u32),
    Text(String),
}

/// How a choice ended.
#[derive(Clone, Debug, PartialEq)]
pub struct Finish {
    /// OpenAI's `finish_reason`.
    pub reason: &'static str,
    pub stop_reason: Option<StopReason>,
    /// What the safety callout says about it, for the answer's `safety` field.
    pub safety: Option<serde_json::Value>,
}

impl Finish {
    pub fn new(reason: &'static str, stop_reason: Option<StopReason>) -> Self {
        Self { reason, stop_reason, safety: None }
    }

    /// An answer that nobody may read on.
    pub fn denied() -> Self {
        Self::new(CONTENT_FILTER, None)
    }
}

/// OpenAI's `finish_reason` of what was denied.
pub const CONTENT_FILTER: &str = "content_filter";

/// A counted token with its log probability.
#[derive(Clone, Debug, PartialEq)]
pub struct Scored {
    pub id: u32,
    pub logprobs: TokenLogprobs,
    /// Characters of this choice's text before the token.
    pub offset: usize,
}

/// What may be shown next.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Delta {
    /// Text, reasoning and calls in the order in which the model wrote them; neighbours of one kind are one piece.
    pub pieces: Vec<OutputEvent>,
    pub token_ids: Vec<u32>,
    pub scored: Vec<Scored>,
    /// Of a pooled prompt, as it comes from the engine.
    pub vector: Vec<f32>,
}

impl Delta {
    pub fn text(text: String) -> Self {
        Self { pieces: vec![OutputEvent::Content(text)], ..Self::default() }
    }

    pub fn is_empty(&self) -> bool {
        self.pieces.is_empty()
    }

    /// All its text that is neither reasoning nor a call, wherever it stands.
    pub fn content(&self) -> Cow<'_, str> {
        self.joined(|piece| if let OutputEvent::Content(text) = piece { Some(text) } else { None })
    }

    /// All its reasoning.
    pub fn reasoning(&self) -> Cow<'_, str> {
        self.joined(|piece| if let OutputEvent::Reasoning(text) = piece { Some(text) } else { None })
    }

    fn joined<'a>(&'a self, kind: impl Fn(&'a OutputEvent) -> Option<&'a str>) -> Cow<'a, str> {
        let mut all = Cow::Borrowed("");
        self.pieces.iter().filter_map(kind).for_each(|text| all += text);
        all
    }

    /// Appends what comes after.
    pub fn append(&mut self, mut next: Delta) {
        next.pieces.into_iter().for_each(|piece| self.push(piece));
        self.token_ids.append(&mut next.token_ids);
        self.scored.append(&mut next.scored);
    }

    pub fn push(&mut self, piece: OutputEvent) {
        match (self.pieces.last_mut(), &piece) {
            (_, OutputEvent::Content(text) | OutputEvent::Reasoning(text)) if text.is_empty() => {}
            (Some(OutputEvent::Content(last)), OutputEvent::Content(next)) => last.push_str(next),
            (Some(OutputEvent::Reasoning(last)), OutputEvent::Reasoning(next)) => last.push_str(next),
            (
                Some(OutputEvent::Arguments { index, text }),
                OutputEvent::Arguments { index: same, text: next },
            ) if index == same => text.push_str(next),
            _ => self.pieces.push(piece),
        }
    }
}

/// What a request cost, so far or in all.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    pub prompt_tokens: u64,
    /// Of those, how many were not computed.
    pub cached_tokens: u64,
    pub completion_tokens: u64,
    /// Where reasoning is told apart.
    pub reasoning_tokens: Option<u64>,
    /// Of drafts, where some were verified.
    pub predicted: Option<Predicted>,
    pub times: Times,
}

/// How long an answer took so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Times {
    /// Since the request arrived; known at the end.
    pub total: Duration,
    /// From the request's arrival until its last prompt was computed, waiting included.
    pub prompt: Duration,
    /// From there to the last token.
    pub answer: Duration,
}

/// What became of drafts, of all choices together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Predicted {
    /// Where they came from, as flags and metrics have it.
    pub drafter: &'static str,
    /// Steps that verified some, each choice's counted by itself.
    pub steps: u64,
    /// Those that were right, and those that were computed for nothing.
    pub accepted: u64,
    pub rejected: u64,
}

/// One finished choice of a whole response.
pub struct Finished {
    pub index: u32,
    pub delta: Delta,
    pub finish: Finish,
    pub prompt: Option<PromptReport>,
}

/// What is known about a prompt once it was computed.
#[derive(Clone)]
pub struct PromptReport {
    pub tokens: Arc<[u32]>,
    /// Of the second token on, where they were asked for.
    pub logprobs: Option<Arc<[TokenLogprobs]>>,
}

/// Writes one response.
pub trait Writer: Send {
    /// The prompt was computed; choice `index` begins.
    fn opening(&mut self, index: u32, prompt: &PromptReport, usage: Usage, events: &dyn StreamSink);
    /// More of a choice; with `finish`, the last of it.
    fn delta(
        &mut self,
        index: u32,
        delta: &Delta,
        finish: Option<&Finish>,
        usage: Usage,
        events: &dyn StreamSink,
    );
    /// All choices are complete.
    fn closing(&mut self, usage: Usage, events: &dyn StreamSink);
    /// The stream ends with an error.
    fn failed(&mut self, error: &ApiError, events: &dyn StreamSink);
    /// The response that is not streamed.
    fn whole(&mut self, choices: &[Finished], usage: Usage) -> String;
    /// About how many bytes are copied where the answer begins, ends or fails, beside what is given: what of the request and of the answer
    /// is told again.
    fn repeats(&self) -> usize {
        0
    }
    /// About how many bytes are copied by [`Writer::catch_up`]; 0: nothing was put off.
    fn owes(&self) -> usize {
        0
    }
    /// Writes what was put off because it is long. `closing` does so too.
    fn catch_up(&mut self, _events: &dyn StreamSink) {}
    /// Sent on an idle stream.
    fn keep_alive(&self) -> &'static str {
        KEEP_ALIVE
    }
    fn framing(&self) -> Framing {
        Framing::Events
    }
}
