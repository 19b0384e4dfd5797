//! Answers: Ollama's object, whole and as lines of JSON.
//!
//! Owns: field names. Invariants: a stream's lines amount to the whole; the last one, `done`, has the figures. A call is told when it is
//! complete, since its arguments are an object.

use std::borrow::Cow;
use std::sync::Arc;
use std::time::Duration;

use folio_text::{OutputEvent, Tokenizer, rfc_3339};
use serde::Serialize;
use serde_json::Value;

use super::error;
use crate::error::ApiError;
use crate::events::{Delta, Finish, Finished, Framing, PromptReport, StreamSink, Times, Usage, Writer};
use crate::openai::writer::{ChatToken, CompletionKind, chat_tokens};
use crate::params::Generation;
use crate::tools::arguments_object;

/// Whitespace before a line's JSON: nothing else may be there that is not a line.
const IDLE: &str = " ";
/// Of an answer to a request that asks for none.
const LOADED: &str = "load";

/// Writes one answer.
pub struct LineWriter {
    /// Of `/api/chat`, or of `/api/generate`.
    kind: CompletionKind,
    model: String,
    created_at: String,
    tokenizer: Arc<Tokenizer>,
    /// Alternatives asked for; `None`: no log probabilities.
    logprobs: Option<u32>,
    calls: GatheredCalls,
    finish: Option<Finish>,
}

/// GatheredCalls that were not told yet.
#[derive(Default)]
struct GatheredCalls {
    /// The one that is being written.
    open: Option<Call>,
    complete: Vec<Call>,
    made: u32,
}

struct Call {
    id: String,
    index: u32,
    name: String,
    arguments: String,
}

impl GatheredCalls {
    fn push(&mut self, piece: &OutputEvent) {
        match piece {
            OutputEvent::CallStarted { id, name, .. } => {
                self.end();
                let (id, name, index) = (id.clone(), name.clone(), self.made);
                self.open = Some(Call { id, index, name, arguments: String::new() });
                self.made += 1;
            }
            OutputEvent::Arguments { text, .. } => {
                self.open.iter_mut().for_each(|call| call.arguments.push_str(text));
            }
            OutputEvent::CallEnded { .. } => self.end(),
            OutputEvent::Content(_) | OutputEvent::Reasoning(_) => {}
        }
    }

    /// The call is complete, or as much of it as there will be.
    fn end(&mut self) {
        self.complete.extend(self.open.take());
    }

    fn told(&mut self) -> Vec<OllamaToolCall> {
        let told = |call: Call| OllamaToolCall {
            id: call.id,
            function: Function {
                index: call.index,
                name: call.name,
                arguments: arguments_object(&call.arguments),
            },
        };
        self.complete.drain(..).map(told).collect()
    }
}

#[derive(Serialize)]
struct OllamaToolCall {
    id: String,
    function: Function,
}

#[derive(Serialize)]
struct Function {
    index: u32,
    name: String,
    arguments: Value,
}

#[derive(Serialize)]
struct AnswerLine<'a> {
    model: &'a str,
    created_at: &'a str,
    #[serde(flatten)]
    said: MessageOrText<'a>,
    done: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    done_reason: Option<&'a str>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    logprobs: Vec<ChatToken>,
    /// What the safety callout says.
    #[serde(skip_serializing_if = "Option::is_none")]
    safety: Option<&'a Value>,
    #[serde(flatten)]
    figures: Option<LineFigures>,
}

#[derive(Serialize)]
#[serde(untagged)]
enum MessageOrText<'a> {
    Message {
        message: OllamaMessage<'a>,
    },
    Response {
        response: Cow<'a, str>,
        #[serde(skip_serializing_if = "str::is_empty")]
        thinking: Cow<'a, str>,
    },
}

#[derive(Serialize)]
struct OllamaMessage<'a> {
    role: &'static str,
    content: Cow<'a, str>,
    #[serde(skip_serializing_if = "str::is_empty")]
    thinking: Cow<'a, str>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    tool_calls: Vec<OllamaToolCall>,
}

/// Durations in nanoseconds.
#[derive(Serialize)]
struct LineFigures {
    total_duration: u64,
    load_duration: u64,
    prompt_eval_count: u64,
    prompt_eval_duration: u64,
    eval_count: u64,
    eval_duration: u64,
}

impl From<Usage> for LineFigures {
    fn from(usage: Usage) -> Self {
        let Times { total, prompt, answer } = usage.times;
        let ns = |duration: Duration| u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX);
        Self {
            total_duration: ns(total),
            load_duration: 0,
            prompt_eval_count: usage.prompt_tokens,
            prompt_eval_duration: ns(prompt),
            eval_count: usage.completion_tokens,
            eval_duration: ns(answer),
        }
    }
}

impl LineWriter {
    pub fn new(
        kind: CompletionKind,
        model: &str,
        tokenizer: Arc<Tokenizer>,
        generation: &Generation,
    ) -> Self {
        Self {
            kind,
            model: model.to_owned(),
            created_at: rfc_3339(crate::unix_s() as i64),
            tokenizer,
            logprobs: generation.sampling.logprobs,
            calls: GatheredCalls::default(),
            finish: None,
        }
    }

    fn line<'a>(&'a self, delta: &'a Delta, tool_calls: Vec<OllamaToolCall>) -> AnswerLine<'a> {
        let (content, thinking) = (delta.content(), delta.reasoning());
        let said = match self.kind {
            CompletionKind::Chat => MessageOrText::Message {
                message: OllamaMessage { role: "assistant", content, thinking, tool_calls },
            },
            CompletionKind::Completion => MessageOrText::Response { response: content, thinking },
        };
        let logprobs = self.logprobs.map(|wanted| chat_tokens(&self.tokenizer, &delta.scored, wanted));
        AnswerLine {
            model: &self.model,
            created_at: &self.created_at,
            said,
            done: false,
            done_reason: None,
            logprobs: logprobs.unwrap_or_default(),
            safety: None,
            figures: None,
        }
    }

    /// The end of an answer, behind the last of it. Where nothing was asked there are no figures.
    fn end<'a>(&'a self, last: AnswerLine<'a>, finish: Option<&'a Finish>, usage: Usage) -> AnswerLine<'a> {
        let done_reason = match finish.map(|finish| finish.reason) {
            None => LOADED,
            // GatheredCalls are no reason of their own.
            Some("tool_calls") => "stop",
            Some(reason) => reason,
        };
        let safety = finish.and_then(|finish| finish.safety.as_ref());
        let figures = finish.map(|_| usage.into());
        AnswerLine { done: true, done_reason: Some(done_reason), safety, figures, ..last }
    }
}

impl Writer for LineWriter {
    fn opening(&mut self, _: u32, _: &PromptReport, _: Usage, _: &dyn StreamSink) {}

    fn delta(&mut self, _: u32, delta: &Delta, finish: Option<&Finish>, _: Usage, events: &dyn StreamSink) {
        delta.pieces.iter().for_each(|piece| self.calls.push(piece));
        if finish.is_some() {
            self.calls.end();
            self.finish = finish.cloned();
        }
        let text = |piece: &OutputEvent| matches!(piece, OutputEvent::Content(_) | OutputEvent::Reasoning(_));
        let scored = self.logprobs.is_some() && !delta.scored.is_empty();
        if scored || delta.pieces.iter().any(text) {
            events.send(&to_json(&self.line(delta, Vec::new())));
        }
    }

    fn closing(&mut self, usage: Usage, events: &dyn StreamSink) {
        self.catch_up(events);
        let nothing = Delta::default();
        let end = self.end(self.line(&nothing, Vec::new()), self.finish.as_ref(), usage);
        events.send(&to_json(&end));
    }

    fn failed(&mut self, error: &ApiError, events: &dyn StreamSink) {
        events.send(&error::to_json(error));
    }

    fn whole(&mut self, choices: &[Finished], usage: Usage) -> String {
        let choice = choices.first();
        choice.iter().flat_map(|choice| &choice.delta.pieces).for_each(|piece| self.calls.push(piece));
        self.calls.end();
        let (calls, nothing) = (self.calls.told(), Delta::default());
        let all = self.line(choice.map_or(&nothing, |choice| &choice.delta), calls);
        to_json(&self.end(all, choice.map(|choice| &choice.finish), usage))
    }

    fn owes(&self) -> usize {
        self.calls.complete.iter().map(|call| call.name.len() + call.arguments.len()).sum()
    }

    fn catch_up(&mut self, events: &dyn StreamSink) {
        let calls = self.calls.told();
        if !calls.is_empty() {
            events.send(&to_json(&self.line(&Delta::default(), calls)));
        }
    }

    fn keep_alive(&self) -> &'static str {
        IDLE
    }

    fn framing(&self) -> Framing {
        Framing::Lines
    }
}

fn to_json<T: Serialize>(value: &T) -> String {
    serde_json::to_string(value).expect("plain data with string keys always serializes")
}
