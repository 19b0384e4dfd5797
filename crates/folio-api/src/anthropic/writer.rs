//! Answers: Anthropic's message, whole and as events.
//!
//! Owns: content blocks in Anthropic's shape. Invariant: a stream's blocks are those of the whole.

use serde::Serialize;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use super::breakpoints::{BreakpointPosition, Split};
use super::error;
use crate::blocks::{BlockKind, BlockStep, Blocks};
use crate::error::ApiError;
use crate::events::{
    CONTENT_FILTER, Delta, Finish, Finished, PromptReport, StopReason, StreamSink, Usage, Writer,
};
use crate::tools::arguments_object;

const PING: &str = "event: ping\ndata: {\"type\": \"ping\"}\n\n";

/// Writes one answer.
pub struct MessageWriter {
    request_id: String,
    model: String,
    breakpoints: Vec<BreakpointPosition>,
    /// max_tokens was lowered to what the context holds.
    cut: bool,
    blocks: Blocks,
    /// Digest of the thinking block that is open.
    thinking: Option<Sha256>,
    /// Of the block that is open, or comes next.
    index: u32,
    finish: Option<Finish>,
}

#[derive(Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum Block {
    Text { text: String, citations: Option<()> },
    Thinking { thinking: String, signature: String },
    ToolUse { id: String, name: String, input: Value },
}

#[derive(Serialize)]
#[serde(tag = "type")]
enum BlockDelta<'a> {
    #[serde(rename = "text_delta")]
    Text { text: &'a str },
    #[serde(rename = "thinking_delta")]
    Thinking { thinking: &'a str },
    #[serde(rename = "signature_delta")]
    Signature { signature: &'a str },
    #[serde(rename = "input_json_delta")]
    Input { partial_json: &'a str },
}

#[derive(Serialize)]
struct AnthropicMessage<'a> {
    id: String,
    r#type: &'static str,
    role: &'static str,
    model: &'a str,
    content: Vec<Block>,
    #[serde(flatten)]
    end: MessageEnd<'a>,
    usage: MessageUsage,
}

#[derive(Default, Serialize)]
struct MessageEnd<'a> {
    stop_reason: Option<&'static str>,
    stop_sequence: Option<&'a str>,
    /// What the safety callout says.
    #[serde(skip_serializing_if = "Option::is_none")]
    safety: Option<&'a Value>,
}

#[derive(Serialize)]
struct MessageUsage {
    input_tokens: u64,
    cache_creation_input_tokens: u64,
    cache_read_input_tokens: u64,
    cache_creation: Creation,
    output_tokens: u64,
    /// Where reasoning is told apart.
    #[serde(skip_serializing_if = "Option::is_none")]
    output_tokens_details: Option<OutputDetails>,
    service_tier: &'static str,
}

#[derive(Serialize)]
struct Creation {
    ephemeral_5m_input_tokens: u64,
    ephemeral_1h_input_tokens: u64,
}

#[derive(Serialize)]
struct OutputDetails {
    thinking_tokens: u64,
}

#[derive(Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum StreamEvent<'a> {
    MessageStart { message: AnthropicMessage<'a> },
    ContentBlockStart { index: u32, content_block: Block },
    ContentBlockDelta { index: u32, delta: BlockDelta<'a> },
    ContentBlockStop { index: u32 },
    MessageDelta { delta: MessageEnd<'a>, usage: MessageUsage },
    MessageStop,
}

impl StreamEvent<'_> {
    fn send(&self, events: &dyn StreamSink) {
        let name = match self {
            Self::MessageStart { .. } => "message_start",
            Self::ContentBlockStart { .. } => "content_block_start",
            Self::ContentBlockDelta { .. } => "content_block_delta",
            Self::ContentBlockStop { .. } => "content_block_stop",
            Self::MessageDelta { .. } => "message_delta",
            Self::MessageStop => "message_stop",
        };
        events.named(name, &to_json(self));
    }
}

fn to_json<T: Serialize>(value: &T) -> String {
    serde_json::to_string(value).expect("plain data with string keys always serializes")
}

impl MessageWriter {
    pub fn new(request_id: &str, model: &str, breakpoints: Vec<BreakpointPosition>, cut: bool) -> Self {
        Self {
            request_id: request_id.to_owned(),
            model: model.to_owned(),
            breakpoints,
            cut,
            blocks: Blocks::default(),
            thinking: None,
            index: 0,
            finish: None,
        }
    }

    fn message<'a>(&'a self, content: Vec<Block>, end: MessageEnd<'a>, usage: Usage) -> AnthropicMessage<'a> {
        AnthropicMessage {
            id: format!("msg_{}", self.request_id),
            r#type: "message",
            role: "assistant",
            model: &self.model,
            content,
            end,
            usage: self.figures(usage),
        }
    }

    fn figures(&self, usage: Usage) -> MessageUsage {
        let split = Split::new(&self.breakpoints, usage.prompt_tokens, usage.cached_tokens);
        MessageUsage {
            input_tokens: split.rest,
            cache_creation_input_tokens: split.written_5m + split.written_1h,
            cache_read_input_tokens: split.read,
            cache_creation: Creation {
                ephemeral_5m_input_tokens: split.written_5m,
                ephemeral_1h_input_tokens: split.written_1h,
            },
            output_tokens: usage.completion_tokens,
            output_tokens_details: usage
                .reasoning_tokens
                .map(|thinking_tokens| OutputDetails { thinking_tokens }),
            service_tier: "standard",
        }
    }

    fn end<'a>(&self, finish: &'a Finish) -> MessageEnd<'a> {
        let (stop_reason, stop_sequence) = match (finish.reason, &finish.stop_reason) {
            (_, Some(StopReason::Text(text))) => ("stop_sequence", Some(text.as_str())),
            ("length", _) if self.cut => ("model_context_window_exceeded", None),
            ("length", _) => ("max_tokens", None),
            ("tool_calls", _) => ("tool_use", None),
            (CONTENT_FILTER, _) => ("refusal", None),
            _ => ("end_turn", None),
        };
        MessageEnd { stop_reason: Some(stop_reason), stop_sequence, safety: finish.safety.as_ref() }
    }

    fn send(&mut self, steps: Vec<BlockStep>, events: &dyn StreamSink) {
        for step in steps {
            let index = self.index;
            let delta = |delta| StreamEvent::ContentBlockDelta { index, delta }.send(events);
            match &step {
                BlockStep::Start(kind) => {
                    self.thinking = (*kind == BlockKind::Thinking).then(Sha256::new);
                    StreamEvent::ContentBlockStart { index, content_block: empty(kind) }.send(events);
                }
                BlockStep::Text(text) => delta(BlockDelta::Text { text }),
                BlockStep::Thinking(thinking) => {
                    self.thinking.iter_mut().for_each(|digest| digest.update(thinking));
                    delta(BlockDelta::Thinking { thinking });
                }
                BlockStep::Input(partial_json) => delta(BlockDelta::Input { partial_json }),
                BlockStep::Stop => {
                    if let Some(mut digest) = self.thinking.take() {
                        delta(BlockDelta::Signature { signature: &signature(&mut digest) });
                    }
                    StreamEvent::ContentBlockStop { index }.send(events);
                    self.index += 1;
                }
            }
        }
    }
}

impl Writer for MessageWriter {
    fn opening(&mut self, _: u32, _: &PromptReport, usage: Usage, events: &dyn StreamSink) {
        let message = self.message(Vec::new(), MessageEnd::default(), usage);
        StreamEvent::MessageStart { message }.send(events);
    }

    fn delta(&mut self, _: u32, delta: &Delta, finish: Option<&Finish>, _: Usage, events: &dyn StreamSink) {
        let mut steps = Vec::new();
        delta.pieces.iter().for_each(|piece| self.blocks.push(piece, &mut steps));
        if finish.is_some() {
            self.blocks.finish(&mut steps);
            self.finish = finish.cloned();
        }
        self.send(steps, events);
    }

    fn closing(&mut self, usage: Usage, events: &dyn StreamSink) {
        let end = self.finish.as_ref().map(|finish| self.end(finish)).unwrap_or_default();
        StreamEvent::MessageDelta { delta: end, usage: self.figures(usage) }.send(events);
        StreamEvent::MessageStop.send(events);
    }

    fn failed(&mut self, error: &ApiError, events: &dyn StreamSink) {
        events.named("error", &error::to_json(error, &self.request_id));
    }

    fn whole(&mut self, choices: &[Finished], usage: Usage) -> String {
        let mut steps = Vec::new();
        for choice in choices {
            choice.delta.pieces.iter().for_each(|piece| self.blocks.push(piece, &mut steps));
            self.blocks.finish(&mut steps);
        }
        let end = choices.first().map(|choice| self.end(&choice.finish)).unwrap_or_default();
        to_json(&self.message(gathered(steps), end, usage))
    }

    fn keep_alive(&self) -> &'static str {
        PING
    }
}

/// What a block begins as.
fn empty(kind: &BlockKind) -> Block {
    match kind.clone() {
        BlockKind::Text => Block::Text { text: String::new(), citations: None },
        BlockKind::Thinking => Block::Thinking { thinking: String::new(), signature: String::new() },
        BlockKind::Tool { id, name } => {
            // What other servers' clients know: their ids begin so. Some templates need theirs as they are.
            let id = id.strip_prefix("call_").map_or_else(|| id.clone(), |rest| format!("toolu_{rest}"));
            Block::ToolUse { id, name, input: json!({}) }
        }
    }
}

fn signature(digest: &mut Sha256) -> String {
    hex::encode(digest.finalize_reset())
}

/// The blocks that a stream's steps amount to.
fn gathered(steps: Vec<BlockStep>) -> Vec<Block> {
    let mut blocks = Vec::new();
    let mut input = String::new();
    for step in steps {
        match (step, blocks.last_mut()) {
            (BlockStep::Start(kind), _) => blocks.push(empty(&kind)),
            (BlockStep::Text(next), Some(Block::Text { text, .. })) => text.push_str(&next),
            (BlockStep::Thinking(next), Some(Block::Thinking { thinking, .. })) => thinking.push_str(&next),
            (BlockStep::Input(next), Some(Block::ToolUse { .. })) => input.push_str(&next),
            (BlockStep::Stop, Some(Block::Thinking { thinking, signature: signed })) => {
                *signed = signature(&mut Sha256::new_with_prefix(thinking.as_bytes()));
            }
            (BlockStep::Stop, Some(Block::ToolUse { input: parsed, .. })) => {
                *parsed = arguments_object(&std::mem::take(&mut input))
            }
            _ => {}
        }
    }
    blocks
}
