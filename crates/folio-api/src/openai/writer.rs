//! Responses as JSON: OpenAI's objects for chat and for completions, whole and in chunks, with vLLM's additions
//! (`stop_reason`, `token_ids`, `prompt_token_ids`, `prompt_logprobs`) where they were asked for.
//!
//! Owns: field names and their order. Must never: decide anything. Cost: one serialization per chunk.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::sync::Arc;

use folio_text::{OutputEvent, Tokenizer};
use serde::{Serialize, Serializer, ser::SerializeMap};

use crate::error::ApiError;
use crate::events::{
    Delta, Finish, Finished, Predicted, PromptReport, Scored, StopReason, StreamSink, TokenLogprobs, Usage,
    Writer,
};
use crate::params::{Generation, StreamOptions};

/// JSON has no infinity; OpenAI writes this for "very unlikely".
const UNLIKELY: f32 = -9999.0;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CompletionKind {
    Chat,
    Completion,
}

/// What all objects of one response have in common.
pub struct CompletionWriter {
    pub kind: CompletionKind,
    pub id: String,
    pub created: u64,
    pub model: String,
    pub tokenizer: Arc<Tokenizer>,
    /// Alternatives asked for; `None`: no log probabilities.
    pub logprobs: Option<u32>,
    pub return_token_ids: bool,
    pub stream: Option<StreamOptions>,
}

/// vLLM's shape: a map from token id to its log probability, the prompt's own token and the alternatives.
pub struct PromptLogprobs(Vec<(u32, PromptLogprob)>);

#[derive(Serialize)]
struct PromptLogprob {
    logprob: f32,
    rank: u32,
    decoded_token: String,
}

impl Serialize for PromptLogprobs {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(Some(self.0.len()))?;
        for (id, entry) in &self.0 {
            map.serialize_entry(&id.to_string(), entry)?;
        }
        map.end()
    }
}

#[derive(Serialize)]
struct ResponseEnvelope<'a, C> {
    id: &'a str,
    object: &'static str,
    created: u64,
    model: &'a str,
    choices: Vec<C>,
    #[serde(skip_serializing_if = "Option::is_none")]
    usage: Option<Option<UsageFigures>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    metrics: Option<ResponseMetrics>,
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_token_ids: Option<&'a [u32]>,
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_logprobs: Option<Vec<Option<PromptLogprobs>>>,
}

/// OpenAI's `usage`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct UsageFigures {
    prompt_tokens: u64,
    total_tokens: u64,
    completion_tokens: u64,
    prompt_tokens_details: PromptDetails,
    /// Where reasoning is told apart, or drafts were verified.
    #[serde(skip_serializing_if = "Option::is_none")]
    completion_tokens_details: Option<CompletionDetails>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
struct CompletionDetails {
    #[serde(skip_serializing_if = "Option::is_none")]
    reasoning_tokens: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    accepted_prediction_tokens: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    rejected_prediction_tokens: Option<u64>,
}

/// vLLM's `metrics` of a response, of whoever asked for drafts: as many as are verified hangs on what else runs.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
struct ResponseMetrics {
    speculative_decoding: DraftFigures,
}

#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
struct DraftFigures {
    /// Where drafts came from.
    method: &'static str,
    num_spec_steps: u64,
    num_draft_tokens: u64,
    num_accepted_draft_tokens: u64,
    draft_acceptance_rate: f64,
    /// Tokens of a step that verified drafts.
    mean_acceptance_length: f64,
}

impl From<Predicted> for ResponseMetrics {
    fn from(Predicted { drafter, steps, accepted, rejected }: Predicted) -> Self {
        let drafts = accepted + rejected;
        let per = |of: u64| accepted as f64 / of.max(1) as f64;
        Self {
            speculative_decoding: DraftFigures {
                method: drafter,
                num_spec_steps: steps,
                num_draft_tokens: drafts,
                num_accepted_draft_tokens: accepted,
                draft_acceptance_rate: per(drafts),
                mean_acceptance_length: 1.0 + per(steps),
            },
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
struct PromptDetails {
    cached_tokens: u64,
}

impl From<Usage> for UsageFigures {
    fn from(usage: Usage) -> Self {
        Self {
            prompt_tokens: usage.prompt_tokens,
            total_tokens: usage.prompt_tokens + usage.completion_tokens,
            completion_tokens: usage.completion_tokens,
            prompt_tokens_details: PromptDetails { cached_tokens: usage.cached_tokens },
            completion_tokens_details: (usage.reasoning_tokens.is_some() || usage.predicted.is_some()).then(
                || CompletionDetails {
                    reasoning_tokens: usage.reasoning_tokens,
                    accepted_prediction_tokens: usage.predicted.map(|predicted| predicted.accepted),
                    rejected_prediction_tokens: usage.predicted.map(|predicted| predicted.rejected),
                },
            ),
        }
    }
}

#[derive(Serialize)]
struct ChatChoice<'a> {
    index: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    message: Option<ChatMessage<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    delta: Option<MessageDelta<'a>>,
    logprobs: Option<ChatLogprobs>,
    finish_reason: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    stop_reason: Option<&'a StopReason>,
    #[serde(skip_serializing_if = "Option::is_none")]
    token_ids: Option<&'a [u32]>,
    /// What the safety callout says.
    #[serde(skip_serializing_if = "Option::is_none")]
    safety: Option<&'a serde_json::Value>,
}

#[derive(Serialize)]
struct ChatMessage<'a> {
    role: &'static str,
    /// `null` where there is none but reasoning or calls.
    content: Option<Cow<'a, str>>,
    refusal: Option<()>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reasoning_content: Option<Cow<'a, str>>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    tool_calls: Vec<ChatToolCall<'a>>,
}

#[derive(Default, Serialize)]
struct MessageDelta<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    role: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    content: Option<Cow<'a, str>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reasoning_content: Option<Cow<'a, str>>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    tool_calls: Vec<ChatToolCall<'a>>,
}

/// A call, or in a stream more of one.
#[derive(Serialize)]
struct ChatToolCall<'a> {
    /// In streams.
    #[serde(skip_serializing_if = "Option::is_none")]
    index: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    id: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    r#type: Option<&'static str>,
    function: FunctionCall<'a>,
}

#[derive(Serialize)]
struct FunctionCall<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<&'a str>,
    arguments: String,
}

/// Ascending by index; one entry for each call.
fn calls(delta: &Delta, streamed: bool) -> Vec<ChatToolCall<'_>> {
    let mut calls: Vec<(u32, ChatToolCall)> = Vec::new();
    for piece in &delta.pieces {
        let (at, begun, arguments) = match piece {
            OutputEvent::CallStarted { index, id, name } => (*index, Some((id.as_str(), name.as_str())), ""),
            OutputEvent::Arguments { index, text } => (*index, None, text.as_str()),
            _ => continue,
        };
        match calls.last_mut() {
            Some((last, call)) if *last == at => call.function.arguments.push_str(arguments),
            _ => {
                let (id, name) = begun.unzip();
                let function = FunctionCall { name, arguments: arguments.to_owned() };
                let index = streamed.then_some(at);
                calls.push((at, ChatToolCall { index, id, r#type: id.map(|_| "function"), function }));
            }
        }
    }
    calls.into_iter().map(|(_, call)| call).collect()
}

#[derive(Serialize)]
struct ChatLogprobs {
    content: Vec<ChatToken>,
    refusal: Option<()>,
}

/// A token with its log probability, as chats and Ollama's API tell it.
#[derive(Serialize)]
pub(crate) struct ChatToken {
    token: String,
    logprob: f32,
    bytes: Vec<u8>,
    top_logprobs: Vec<ChatTop>,
}

#[derive(Serialize)]
struct ChatTop {
    token: String,
    logprob: f32,
    bytes: Vec<u8>,
}

/// Each with its `wanted` alternatives.
pub(crate) fn chat_tokens(tokenizer: &Tokenizer, scored: &[Scored], wanted: u32) -> Vec<ChatToken> {
    let bytes = |id: u32| tokenizer.token_bytes(id).to_vec();
    let top = |(id, logprob): &(u32, f32)| ChatTop {
        token: token_text(tokenizer, *id),
        logprob: finite(*logprob),
        bytes: bytes(*id),
    };
    let token = |entry: &Scored| ChatToken {
        token: token_text(tokenizer, entry.id),
        logprob: finite(entry.logprobs.logprob),
        bytes: bytes(entry.id),
        top_logprobs: entry.logprobs.top.iter().take(wanted as usize).map(top).collect(),
    };
    scored.iter().map(token).collect()
}

/// A token's text where its bytes are UTF-8, else its bytes as `\xe2\x82`, OpenAI's way.
fn token_text(tokenizer: &Tokenizer, id: u32) -> String {
    let bytes = tokenizer.token_bytes(id);
    match std::str::from_utf8(bytes) {
        Ok(text) => text.to_owned(),
        Err(_) => bytes.iter().map(|byte| format!("\\x{byte:02x}")).collect(),
    }
}

#[derive(Serialize)]
struct CompletionChoice<'a> {
    index: u32,
    text: Cow<'a, str>,
    logprobs: Option<CompletionLogprobs>,
    finish_reason: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    stop_reason: Option<&'a StopReason>,
    #[serde(skip_serializing_if = "Option::is_none")]
    token_ids: Option<&'a [u32]>,
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_token_ids: Option<&'a [u32]>,
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_logprobs: Option<Vec<Option<PromptLogprobs>>>,
    /// What the safety callout says.
    #[serde(skip_serializing_if = "Option::is_none")]
    safety: Option<&'a serde_json::Value>,
}

#[derive(Default, Serialize)]
struct CompletionLogprobs {
    text_offset: Vec<usize>,
    token_logprobs: Vec<Option<f32>>,
    tokens: Vec<String>,
    top_logprobs: Vec<Option<BTreeMap<String, f32>>>,
}

impl CompletionWriter {
    /// The whole response.
    pub fn whole(&self, choices: &[Finished], usage: Usage) -> String {
        let metrics = usage.predicted.map(ResponseMetrics::from);
        let usage = Some(Some(usage.into()));
        match self.kind {
            CompletionKind::Chat => {
                let prompt = choices.first().and_then(|choice| choice.prompt.as_ref());
                let list = choices.iter().map(|choice| self.chat_choice(choice)).collect();
                let envelope = ResponseEnvelope {
                    metrics,
                    prompt_token_ids: prompt.and_then(|prompt| self.prompt_token_ids(&prompt.tokens)),
                    prompt_logprobs: prompt.and_then(|prompt| self.prompt_logprobs(prompt)),
                    ..self.envelope("chat.completion", list, usage)
                };
                to_json(&envelope)
            }
            CompletionKind::Completion => {
                let list = choices
                    .iter()
                    .map(|c| self.completion_choice(c.index, &c.delta, Some(&c.finish), c.prompt.as_ref()))
                    .collect();
                to_json(&ResponseEnvelope { metrics, ..self.envelope("text_completion", list, usage) })
            }
        }
    }

    /// A chunk with text of one choice, or its end. `usage`: see [`ResponseEnvelope::usage`]; `None` leaves the field out.
    pub fn chunk(
        &self,
        index: u32,
        delta: &Delta,
        finish: Option<&Finish>,
        usage: Option<Option<UsageFigures>>,
    ) -> String {
        match self.kind {
            CompletionKind::Chat => {
                let part = MessageDelta {
                    role: None,
                    content: some(delta.content()),
                    reasoning_content: some(delta.reasoning()),
                    tool_calls: calls(delta, true),
                };
                let choice = ChatChoice {
                    index,
                    message: None,
                    delta: Some(part),
                    logprobs: self.chat_logprobs(&delta.scored),
                    finish_reason: finish.map(|finish| finish.reason),
                    stop_reason: finish.and_then(|finish| finish.stop_reason.as_ref()),
                    token_ids: self.token_ids(delta),
                    safety: finish.and_then(|finish| finish.safety.as_ref()),
                };
                to_json(&self.envelope("chat.completion.chunk", vec![choice], usage))
            }
            CompletionKind::Completion => {
                let choice = self.completion_choice(index, delta, finish, None);
                to_json(&self.envelope("text_completion", vec![choice], usage))
            }
        }
    }

    /// The first chunk of a choice: the role (chat), the prompt's ids where wanted. `None` when there is nothing to say.
    pub fn opening(&self, index: u32, prompt: &[u32], usage: Option<Option<UsageFigures>>) -> Option<String> {
        let prompt_token_ids = self.prompt_token_ids(prompt);
        match self.kind {
            CompletionKind::Chat => {
                let choice = ChatChoice {
                    index,
                    message: None,
                    delta: Some(MessageDelta {
                        role: Some("assistant"),
                        content: Some("".into()),
                        ..MessageDelta::default()
                    }),
                    logprobs: None,
                    finish_reason: None,
                    stop_reason: None,
                    token_ids: None,
                    safety: None,
                };
                let envelope = self.envelope("chat.completion.chunk", vec![choice], usage);
                Some(to_json(&ResponseEnvelope { prompt_token_ids, ..envelope }))
            }
            CompletionKind::Completion => {
                let ids = prompt_token_ids?;
                let nothing = Delta::default();
                let choice = self.completion_choice(index, &nothing, None, None);
                let choice = CompletionChoice { prompt_token_ids: Some(ids), ..choice };
                Some(to_json(&self.envelope("text_completion", vec![choice], usage)))
            }
        }
    }

    /// The last chunk when usage was asked for: no choices.
    pub fn usage_chunk(&self, usage: Usage) -> String {
        let object = match self.kind {
            CompletionKind::Chat => "chat.completion.chunk",
            CompletionKind::Completion => "text_completion",
        };
        let metrics = usage.predicted.map(ResponseMetrics::from);
        to_json(&ResponseEnvelope {
            metrics,
            ..self.envelope::<()>(object, Vec::new(), Some(Some(usage.into())))
        })
    }

    /// vLLM's `prompt_logprobs`: nothing for the first token.
    fn prompt_logprobs(&self, prompt: &PromptReport) -> Option<Vec<Option<PromptLogprobs>>> {
        let entries: &[TokenLogprobs] = prompt.logprobs.as_deref()?;
        let mut list = vec![None];
        for (id, entry) in prompt.tokens.iter().skip(1).zip(entries) {
            let describe = |id: u32, logprob: f32, rank: u32| {
                let decoded_token = token_text(&self.tokenizer, id);
                (id, PromptLogprob { logprob: finite(logprob), rank, decoded_token })
            };
            let mut map = vec![describe(*id, entry.logprob, entry.rank)];
            for (rank, (other, logprob)) in entry.top.iter().enumerate() {
                if other != id {
                    map.push(describe(*other, *logprob, rank as u32 + 1));
                }
            }
            list.push(Some(PromptLogprobs(map)));
        }
        Some(list)
    }

    fn prompt_token_ids<'a>(&self, prompt: &'a [u32]) -> Option<&'a [u32]> {
        self.return_token_ids.then_some(prompt)
    }

    fn envelope<C>(
        &self,
        object: &'static str,
        choices: Vec<C>,
        usage: Option<Option<UsageFigures>>,
    ) -> ResponseEnvelope<'_, C> {
        ResponseEnvelope {
            id: &self.id,
            object,
            created: self.created,
            model: &self.model,
            choices,
            usage,
            metrics: None,
            prompt_token_ids: None,
            prompt_logprobs: None,
        }
    }

    fn chat_choice<'a>(&'a self, choice: &'a Finished) -> ChatChoice<'a> {
        let (text, reasoning_content) = (choice.delta.content(), some(choice.delta.reasoning()));
        let tool_calls = calls(&choice.delta, false);
        let message = ChatMessage {
            role: "assistant",
            content: if reasoning_content.is_none() && tool_calls.is_empty() {
                Some(text)
            } else {
                some(text)
            },
            refusal: None,
            reasoning_content,
            tool_calls,
        };
        ChatChoice {
            index: choice.index,
            message: Some(message),
            delta: None,
            logprobs: self
                .chat_logprobs(&choice.delta.scored)
                .or_else(|| self.logprobs.map(|_| ChatLogprobs { content: Vec::new(), refusal: None })),
            finish_reason: Some(choice.finish.reason),
            stop_reason: choice.finish.stop_reason.as_ref(),
            token_ids: self.token_ids(&choice.delta),
            safety: choice.finish.safety.as_ref(),
        }
    }

    fn completion_choice<'a>(
        &'a self,
        index: u32,
        delta: &'a Delta,
        finish: Option<&'a Finish>,
        prompt: Option<&'a PromptReport>,
    ) -> CompletionChoice<'a> {
        CompletionChoice {
            index,
            text: delta.content(),
            logprobs: self.completion_logprobs(&delta.scored),
            finish_reason: finish.map(|finish| finish.reason),
            stop_reason: finish.and_then(|finish| finish.stop_reason.as_ref()),
            token_ids: self.token_ids(delta),
            prompt_token_ids: prompt.and_then(|prompt| self.prompt_token_ids(&prompt.tokens)),
            prompt_logprobs: prompt.and_then(|prompt| self.prompt_logprobs(prompt)),
            safety: finish.and_then(|finish| finish.safety.as_ref()),
        }
    }

    fn token_ids<'a>(&self, delta: &'a Delta) -> Option<&'a [u32]> {
        self.return_token_ids.then_some(&delta.token_ids)
    }

    /// [`token_text`] for completions, where a prefix marks bytes.
    fn completion_token_text(&self, id: u32) -> String {
        let text = token_text(&self.tokenizer, id);
        if std::str::from_utf8(self.tokenizer.token_bytes(id)).is_ok() {
            text
        } else {
            format!("bytes:{text}")
        }
    }

    fn chat_logprobs(&self, scored: &[Scored]) -> Option<ChatLogprobs> {
        let wanted = self.logprobs?;
        (!scored.is_empty())
            .then(|| ChatLogprobs { content: chat_tokens(&self.tokenizer, scored, wanted), refusal: None })
    }

    fn completion_logprobs(&self, scored: &[Scored]) -> Option<CompletionLogprobs> {
        let wanted = self.logprobs? as usize;
        let mut out = CompletionLogprobs::default();
        for entry in scored {
            let text = self.completion_token_text(entry.id);
            out.text_offset.push(entry.offset);
            if entry.logprobs.rank == 0 {
                // The prompt's first token: nothing predicts it.
                out.token_logprobs.push(None);
                out.top_logprobs.push(None);
            } else {
                let top = entry.logprobs.top.iter().take(wanted);
                let mut map: BTreeMap<String, f32> =
                    top.map(|(id, lp)| (self.completion_token_text(*id), finite(*lp))).collect();
                map.entry(text.clone()).or_insert(finite(entry.logprobs.logprob));
                out.token_logprobs.push(Some(finite(entry.logprobs.logprob)));
                out.top_logprobs.push(Some(map));
            }
            out.tokens.push(text);
        }
        Some(out)
    }
}

impl CompletionWriter {
    /// The frame of a response to one request.
    pub fn new(
        kind: CompletionKind,
        id: &str,
        model: &str,
        tokenizer: Arc<Tokenizer>,
        generation: &Generation,
    ) -> Self {
        let prefix = match kind {
            CompletionKind::Chat => "chatcmpl",
            CompletionKind::Completion => "cmpl",
        };
        Self {
            kind,
            id: format!("{prefix}-{}", generation.request_id.as_deref().unwrap_or(id)),
            created: crate::unix_s(),
            model: model.to_owned(),
            tokenizer,
            logprobs: generation.sampling.logprobs,
            return_token_ids: generation.return_token_ids,
            stream: generation.stream,
        }
    }

    /// The `usage` field of a chunk: left out, `null`, or figures so far.
    fn chunk_usage(&self, usage: Usage) -> Option<Option<UsageFigures>> {
        let options = self.stream?;
        options.include_usage.then(|| options.continuous_usage.then(|| usage.into()))
    }
}

impl Writer for CompletionWriter {
    fn opening(&mut self, index: u32, prompt: &PromptReport, usage: Usage, events: &dyn StreamSink) {
        if let Some(json) = CompletionWriter::opening(self, index, &prompt.tokens, self.chunk_usage(usage)) {
            events.send(&json);
        }
    }

    fn delta(
        &mut self,
        index: u32,
        delta: &Delta,
        finish: Option<&Finish>,
        usage: Usage,
        events: &dyn StreamSink,
    ) {
        events.send(&self.chunk(index, delta, finish, self.chunk_usage(usage)));
    }

    fn closing(&mut self, usage: Usage, events: &dyn StreamSink) {
        if self.stream.is_some_and(|options| options.include_usage) {
            events.send(&self.usage_chunk(usage));
        }
        events.send("[DONE]");
    }

    fn failed(&mut self, error: &ApiError, events: &dyn StreamSink) {
        events.send(&error.to_json());
        events.send("[DONE]");
    }

    fn whole(&mut self, choices: &[Finished], usage: Usage) -> String {
        CompletionWriter::whole(self, choices, usage)
    }
}

fn some(text: Cow<'_, str>) -> Option<Cow<'_, str>> {
    (!text.is_empty()).then_some(text)
}

fn finite(logprob: f32) -> f32 {
    if logprob.is_finite() { logprob.max(UNLIKELY) } else { UNLIKELY }
}

fn to_json<T: Serialize>(value: &T) -> String {
    serde_json::to_string(value).expect("plain data with string keys always serializes")
}
