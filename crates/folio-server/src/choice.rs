//! One choice's way from token ids to text: incremental detokenization, stop tokens, stop strings, log probabilities.
//!
//! Owns: what of the generated tokens is part of the answer. Invariants: text leaves only when no later token can change
//! it or make it part of a stop string; tokens after the one that ended the choice are not counted; the log probabilities
//! handed out are one per counted token, in order. Cost: a copy of each token's bytes, plus the stop matcher's.

use std::sync::Arc;

use folio_engine::SamplingParams;
use folio_engine::request::{Token, TokenLogprobs};
use folio_text::{DetokenizeOptions, Detokenizer, StopMatcher, Tokenizer};

use crate::params::Generation;

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
}

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
    pub text: String,
    pub token_ids: Vec<u32>,
    pub scored: Vec<Scored>,
}

impl Delta {
    pub fn is_empty(&self) -> bool {
        self.text.is_empty()
    }

    /// Appends what comes after.
    pub fn append(&mut self, mut next: Delta) {
        self.text.push_str(&next.text);
        self.token_ids.append(&mut next.token_ids);
        self.scored.append(&mut next.scored);
    }
}

/// State of one choice.
pub struct Choice {
    tokenizer: Arc<Tokenizer>,
    detokenizer: Detokenizer,
    matcher: StopMatcher,
    stops: Arc<[String]>,
    params: Arc<SamplingParams>,
    include_stop: bool,
    /// The caller asked for no tokens at all (`max_tokens: 0`).
    discard: bool,
    /// Counted tokens.
    pub tokens: u32,
    characters: usize,
    pending: Delta,
    finish: Option<Finish>,
}

impl Choice {
    pub fn new(tokenizer: Arc<Tokenizer>, generation: &Generation, params: Arc<SamplingParams>) -> Self {
        let options =
            DetokenizeOptions { skip_special_tokens: generation.skip_special_tokens, continues: true };
        Self {
            tokenizer,
            detokenizer: Detokenizer::new(options),
            matcher: StopMatcher::new(generation.stop.iter().cloned(), generation.include_stop),
            stops: generation.stop.clone().into(),
            params,
            include_stop: generation.include_stop,
            discard: generation.max_tokens == Some(0),
            tokens: 0,
            characters: 0,
            pending: Delta::default(),
            finish: None,
        }
    }

    pub fn finish(&self) -> Option<&Finish> {
        self.finish.as_ref()
    }

    /// Text of this many characters stands before the generated text.
    pub fn shown(&mut self, characters: usize) {
        self.characters += characters;
    }

    /// Takes the next token. `Some` when this token ended the choice here (a stop string): the engine does not know yet.
    pub fn push(&mut self, token: Token) -> Option<Finish> {
        if self.finish.is_some() || self.discard {
            return None;
        }
        let Token { id, logprobs } = token;
        self.tokens += 1;
        self.pending.token_ids.push(id);
        if let Some(logprobs) = logprobs {
            self.pending.scored.push(Scored { id, logprobs, offset: self.characters });
        }
        // The engine keeps these from being sampled before min_tokens, so one that arrives is the end.
        let ends = self.params.eos_token_ids.contains(&id) || self.params.stop_token_ids.contains(&id);
        if ends && !self.include_stop {
            return None;
        }
        let mut text = String::new();
        self.detokenizer.push(&self.tokenizer, id, &mut text);
        self.characters += text.chars().count();
        let stop = if self.tokens <= self.params.min_tokens {
            self.matcher.pass(&text, &mut self.pending.text);
            None
        } else {
            self.matcher.push(&text, &mut self.pending.text)
        };
        let stop = self.stops[stop?].clone();
        let finish = Finish { reason: "stop", stop_reason: Some(StopReason::Text(stop)) };
        self.finish = Some(finish.clone());
        Some(finish)
    }

    /// The engine ended the choice. Returns how, and makes all text that was held back available.
    pub fn end(&mut self, reason: &'static str, stop_token: Option<u32>) -> Finish {
        let mut rest = String::new();
        self.detokenizer.finish(&self.tokenizer, &mut rest);
        // An incomplete character became U+FFFD, which may still complete a stop string.
        let stopped = self.matcher.push(&rest, &mut self.pending.text);
        self.matcher.finish(&mut self.pending.text);
        let finish = match (self.discard, stopped) {
            (true, _) => Finish { reason: "length", stop_reason: None },
            (false, Some(index)) => {
                Finish { reason: "stop", stop_reason: Some(StopReason::Text(self.stops[index].clone())) }
            }
            (false, None) => {
                let named = stop_token.filter(|id| !self.params.eos_token_ids.contains(id));
                Finish { reason, stop_reason: named.map(StopReason::Token) }
            }
        };
        self.finish = Some(finish.clone());
        finish
    }

    /// What may be shown now. Tokens and log probabilities wait until there is text to go with them or the choice ended.
    pub fn take(&mut self) -> Option<Delta> {
        if self.pending.is_empty() && self.finish.is_none() {
            return None;
        }
        Some(std::mem::take(&mut self.pending))
    }
}
