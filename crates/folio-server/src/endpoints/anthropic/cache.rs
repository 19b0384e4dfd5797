//! `cache_control`: finding where in the prompt breakpoints are.
//!
//! A breakpoint's place is found by rendering
//! the conversation up to it: the tokens that lie wholly within the text in which that and the whole prompt agree. The prompt is tokenized
//! once; only where a tokenizer changes texts (a normalizer, a space put before) is each such text tokenized again. Invariant: places
//! never go back.

use folio_api::anthropic::breakpoints::{After, Breakpoints, Placed};
use folio_api::conversation::Conversation;
use folio_engine::request::RetentionRange;
use folio_kv::{DEFAULT_PRIORITY, TenantId};
use folio_text::Prompt;
use serde_json::{Value, json};

use crate::app::State;
use crate::generation::prompt::render;
use crate::generation::tokenizing::encode_prompt;

/// In the cache, of what a breakpoint asks to keep; above what nobody asked for, below what an operator or a client puts higher.
const PRIORITY: u8 = DEFAULT_PRIORITY + 10;

/// Finds the places. `source` is the conversation before it was rendered to `prompt` and tokenized to `tokens`. A template that
/// cannot render a conversation cut short leaves the breakpoint where the one before it is.
pub fn place(
    state: &State,
    tenant: TenantId,
    source: &Conversation,
    breakpoints: &Breakpoints,
    prompt: &Prompt,
    tokens: &[u32],
) -> Vec<Placed> {
    let _span = step!("breakpoints");
    let mut reached = 0;
    let mut out = Vec::with_capacity(breakpoints.list.len());
    let ends = ends(state, prompt.text(), tokens);
    for mark in &breakpoints.list {
        let shared = shared_prompt(state, source, &mark.after, prompt);
        let within = match &ends {
            Some(ends) => ends.partition_point(|end| *end <= shared.text().len()),
            None => {
                let cut =
                    encode_prompt(state, Some(tenant), &shared, false, true, "messages").unwrap_or_default();
                cut.iter().zip(tokens).take_while(|(a, b)| a == b).count()
            }
        };
        reached = reached.max(within as u32);
        out.push(Placed { tokens: reached, ttl: mark.ttl });
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
fn shared_prompt(state: &State, source: &Conversation, after: &After, prompt: &Prompt) -> Prompt {
    let shared = |messages: Vec<Value>, tools: Option<usize>| {
        let tools = tools.map_or_else(|| source.tools.clone(), |count| source.tools.first(count));
        let mut cut = Conversation {
            messages,
            tools,
            kwargs: source.kwargs.clone(),
            add_generation_prompt: false,
            continue_final: false,
        };
        prompt.shared(&render(state, &mut cut).unwrap_or_default())
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
pub fn ranges(breakpoints: &[Placed]) -> Vec<RetentionRange> {
    let mut from = 0;
    let range = |breakpoint: &Placed| {
        let tokens = std::mem::replace(&mut from, breakpoint.tokens)..breakpoint.tokens;
        let ttl_us = Some(breakpoint.ttl.seconds() * 1_000_000);
        RetentionRange { tokens, priority: PRIORITY, ttl_us, pin: false }
    };
    breakpoints.iter().map(range).filter(|range| !range.tokens.is_empty()).collect()
}
