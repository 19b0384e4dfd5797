//! One choice's way from token ids to text: incremental detokenization, stop tokens, stop strings, reasoning and tool calls,
//! log probabilities.
//!
//! Owns: what of the generated tokens is part of the answer. Invariants: text leaves only when no later token can change
//! it or make it part of a stop string; tokens after the one that ended the choice are not counted; the log probabilities
//! handed out are one per counted token, in order. Cost: a copy of each token's bytes, plus the stop matcher's.

use std::sync::Arc;

use folio_engine::SamplingParams;
use folio_engine::request::{Token, TokenLogprobs};
use folio_text::{DetokenizeOptions, Detokenizer, OutputEvent, OutputParser, StopMatcher, Tokenizer};

use crate::params::Generation;
use crate::reading::Reading;

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

    /// Appends what comes after.
    pub fn append(&mut self, mut next: Delta) {
        next.pieces.into_iter().for_each(|piece| self.push(piece));
        self.token_ids.append(&mut next.token_ids);
        self.scored.append(&mut next.scored);
    }

    fn push(&mut self, piece: OutputEvent) {
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

/// Tells text, reasoning and calls apart.
struct Reader {
    reading: Reading,
    parser: OutputParser,
    events: Vec<OutputEvent>,
    /// Calls whose arguments are complete.
    complete: u32,
}

/// State of one choice.
pub struct Choice {
    tokenizer: Arc<Tokenizer>,
    detokenizer: Detokenizer,
    matcher: StopMatcher,
    stops: Arc<[String]>,
    params: Arc<SamplingParams>,
    include_stop: bool,
    /// `None`: all text is content.
    reader: Option<Reader>,
    /// Leave control tokens out, but for those the reader needs.
    skip_special: bool,
    /// The caller asked for no tokens at all (`max_tokens: 0`).
    discard: bool,
    /// Counted tokens.
    pub tokens: u32,
    /// Those after which the model was still thinking.
    pub reasoning_tokens: u32,
    characters: usize,
    pending: Delta,
    finish: Option<Finish>,
}

impl Choice {
    pub fn new(tokenizer: Arc<Tokenizer>, generation: &Generation, params: Arc<SamplingParams>) -> Self {
        // Control tokens are left out here, where it is known which of them are needed.
        let options = DetokenizeOptions { skip_special_tokens: false, continues: true };
        let reader = generation.reading.clone().map(|reading| {
            let mut events = Vec::new();
            let parser = reading.parser(&mut events);
            Reader { reading, parser, events, complete: 0 }
        });
        let mut choice = Self {
            tokenizer,
            detokenizer: Detokenizer::new(options),
            matcher: StopMatcher::new(generation.stop.iter().cloned(), generation.include_stop),
            stops: generation.stop.clone().into(),
            params,
            include_stop: generation.include_stop,
            reader,
            skip_special: generation.skip_special_tokens,
            discard: generation.max_tokens == Some(0),
            tokens: 0,
            reasoning_tokens: 0,
            characters: 0,
            pending: Delta::default(),
            finish: None,
        };
        choice.sort();
        choice
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
        let kept = self.reader.as_ref().is_some_and(|reader| reader.reading.keeps(id));
        if self.skip_special && self.tokenizer.is_special(id) && !kept {
            return None;
        }
        let (mut text, mut certain) = (String::new(), String::new());
        self.detokenizer.push(&self.tokenizer, id, &mut text);
        self.characters += text.chars().count();
        let stop = if self.tokens <= self.params.min_tokens {
            self.matcher.pass(&text, &mut certain);
            None
        } else {
            self.matcher.push(&text, &mut certain)
        };
        self.read(&certain, stop.is_some());
        let thinking = self.reader.as_ref().is_some_and(|reader| reader.parser.in_reasoning());
        self.reasoning_tokens += u32::from(thinking);
        let stop_reason = stop.map(|index| StopReason::Text(self.stops[index].clone()));
        // A reader that has all the calls it may read needs no more text.
        if stop_reason.is_none() && !self.reader.as_ref().is_some_and(|reader| reader.parser.is_over()) {
            return None;
        }
        let finish = Finish { reason: self.reason("stop"), stop_reason };
        self.finish = Some(finish.clone());
        Some(finish)
    }

    /// Shows text that is certain: as it is, or as what it turns out to be. `last`: nothing follows.
    fn read(&mut self, text: &str, last: bool) {
        let Some(reader) = &mut self.reader else {
            return self.pending.push(OutputEvent::Content(text.to_owned()));
        };
        reader.parser.push(text, &mut reader.events);
        if last {
            reader.parser.finish(&mut reader.events);
        }
        self.sort();
    }

    /// Puts the reader's events into their places.
    fn sort(&mut self) {
        let Some(reader) = &mut self.reader else { return };
        for event in reader.events.drain(..) {
            match event {
                OutputEvent::Reasoning(_) if !reader.reading.include_reasoning => {}
                OutputEvent::CallEnded { .. } => reader.complete += 1,
                shown => self.pending.push(shown),
            }
        }
    }

    /// OpenAI's name for an end at which the model called tools.
    fn reason(&self, reason: &'static str) -> &'static str {
        match &self.reader {
            Some(reader) if reason == "stop" && reader.complete > 0 => "tool_calls",
            _ => reason,
        }
    }

    /// The engine ended the choice. Returns how, and makes all text that was held back available.
    pub fn end(&mut self, reason: &'static str, stop_token: Option<u32>) -> Finish {
        let (mut rest, mut certain) = (String::new(), String::new());
        self.detokenizer.finish(&self.tokenizer, &mut rest);
        // An incomplete character became U+FFFD, which may still complete a stop string.
        let stopped = self.matcher.push(&rest, &mut certain);
        self.matcher.finish(&mut certain);
        self.read(&certain, true);
        let reason = self.reason(reason);
        let finish = match (self.discard, stopped) {
            (true, _) => Finish { reason: "length", stop_reason: None },
            (false, Some(index)) => {
                let stop_reason = Some(StopReason::Text(self.stops[index].clone()));
                Finish { reason: self.reason("stop"), stop_reason }
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
