//! `cache_control`: finding where in the prompt breakpoints are.
//!
//! One at the conversation's end, as agents have it, is where the template first asked whether the assistant's turn is to begin. The place
//! of another is found by rendering the conversation up to it: the tokens that lie wholly within the text in which that and the whole
//! prompt agree. The prompt is tokenized once. Invariant: places never go back.

use folio_api::ApiError;
use folio_api::anthropic::breakpoints::{After, BreakpointPosition, Breakpoints, Mark};
use folio_api::conversation::Conversation;
use folio_engine::request::RetentionRange;
use folio_kv::{DEFAULT_PRIORITY, TenantId};
use folio_text::Prompt;
use serde_json::{Value, json};

use crate::generation::input::InputProcessor;
use crate::generation::prompt::{render, through_template};
use crate::generation::tokenizing::encode_prompt;
use crate::observability::step;

/// In the cache, of what a breakpoint asks to keep; above what nobody asked for, below what an operator or a client puts higher.
const PRIORITY: u8 = DEFAULT_PRIORITY + 10;

/// Bytes of what opens the assistant's turn, at most. Where a template wrote more since it asked whether to, it is asked again without.
const HEADER_BYTES: usize = 256;

/// What places are found in.
pub struct BreakpointContext<'a> {
    pub inputs: &'a InputProcessor,
    pub tenant: TenantId,
    /// As it went into the template.
    pub conversation: &'a Conversation,
    /// As it came, where one of the places needs it ([`Breakpoints::inside`]).
    pub source: Option<&'a Conversation>,
    pub prompt: &'a Prompt,
    pub tokens: &'a [u32],
}

impl BreakpointContext<'_> {
    /// The furthest place of each lifetime: those before it would say the same of the same tokens. Nothing is further than the conversation's
    /// end. Where a template cannot render a conversation cut short, that place is where the one before is.
    pub fn find(&self, breakpoints: &Breakpoints) -> Vec<BreakpointPosition> {
        let _span = step!("breakpoints");
        let mut reached = 0;
        let lifetimes = breakpoints.list.chunk_by(|one, next| one.ttl == next.ttl);
        let place = |marks: &[Mark]| {
            let last = marks.last().filter(|mark| matches!(mark.after, After::End));
            let counted = last.map_or(marks, std::slice::from_ref);
            reached = counted.iter().map(|mark| self.tokens_before(&mark.after)).fold(reached, u32::max);
            BreakpointPosition { tokens: reached, ttl: marks[0].ttl }
        };
        lifetimes.map(place).collect()
    }

    fn tokens_before(&self, after: &After) -> u32 {
        let prompt = self.prompt;
        let shared = |cut: Result<Prompt, ApiError>| prompt.shared(&cut.unwrap_or_default()).text().len();
        let bytes = match after {
            After::End if prompt.text().len() - prompt.before_answer() <= HEADER_BYTES => {
                prompt.before_answer()
            }
            After::End => shared(through_template(self.inputs, self.conversation, false)),
            after => {
                self.source.map_or(0, |source| shared_prompt(self.inputs, source, after, prompt).text().len())
            }
        };
        let tokens = before(self.inputs, prompt.text(), self.tokens, bytes).unwrap_or_else(|| {
            let mut cut = prompt.clone();
            cut.truncate(bytes);
            let cut = encode_prompt(self.inputs, Some(self.tenant), &cut, false, true, "messages");
            cut.unwrap_or_default().iter().zip(self.tokens).take_while(|(a, b)| a == b).count()
        });
        tokens as u32
    }
}

/// Tokens that end within the first `bytes`, counted from the end of the text. `None`: behind them the tokenizer changed the text before it
/// cut it.
fn before(inputs: &InputProcessor, text: &str, tokens: &[u32], bytes: usize) -> Option<usize> {
    let mut rest = text.as_bytes();
    for (index, token) in tokens.iter().enumerate().rev() {
        if rest.len() <= bytes {
            return Some(index + 1);
        }
        rest = rest.strip_suffix(inputs.served.tokenizer.token_bytes(*token))?;
    }
    rest.is_empty().then_some(0)
}

/// The beginning of `prompt` that the conversation up to `place` decides.
fn shared_prompt(inputs: &InputProcessor, source: &Conversation, after: &After, prompt: &Prompt) -> Prompt {
    let shared = |messages: Vec<Value>, tools: Option<usize>| {
        let tools = tools.map_or_else(|| source.tools.clone(), |count| source.tools.first(count));
        let mut cut = Conversation {
            messages,
            tools,
            kwargs: source.kwargs.clone(),
            add_generation_prompt: false,
            continue_final: false,
        };
        prompt.shared(&render(inputs, &mut cut).unwrap_or_default())
    };
    match after {
        After::End => shared(source.messages.clone(), None),
        After::Message { before, last } => {
            let mut messages: Vec<Value> = source.messages.iter().take(*before).cloned().collect();
            messages.push(last.clone());
            if messages.iter().all(|message| message["role"] == "system") {
                messages.push(another_user(source));
            }
            shared(messages, None)
        }
        After::Tools(count) => {
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
pub fn ranges(breakpoints: &[BreakpointPosition]) -> Vec<RetentionRange> {
    let mut from = 0;
    let range = |breakpoint: &BreakpointPosition| {
        let tokens = std::mem::replace(&mut from, breakpoint.tokens)..breakpoint.tokens;
        let ttl_us = Some(breakpoint.ttl.seconds() * 1_000_000);
        RetentionRange { tokens, priority: PRIORITY, ttl_us, pin: false }
    };
    breakpoints.iter().map(range).filter(|range| !range.tokens.is_empty()).collect()
}
