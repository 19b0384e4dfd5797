//! One choice's way from token ids to text: incremental detokenization, stop tokens, stop strings, reasoning and tool calls,
//! log probabilities.
//!
//! Owns: what of the generated tokens is part of the answer. Invariants: text leaves only when no later token can change
//! it or make it part of a stop string or of what a rule forbids (`safety`); tokens after the one that ended the choice are not counted; the log probabilities
//! handed out are one per counted token, in order. Cost: a copy of each token's bytes, plus the stop matcher's.

use std::sync::Arc;

use folio_api::events::{Delta, Finish, Scored, StopReason, TokenLogprobs};
use folio_api::params::Generation;
use folio_engine::SamplingParams;
use folio_engine::request::{self, Token};
use folio_text::{DetokenizeOptions, Detokenizer, OutputEvent, OutputParser, StopMatcher, Tokenizer};

use crate::decoding::reading::Reading;
use crate::safety::SafetyRules;
use crate::safety::gate::AnswerGate;

/// The engine's log probabilities as answers tell them.
pub fn told(logprobs: request::TokenLogprobs) -> TokenLogprobs {
    let request::TokenLogprobs { logprob, rank, top } = logprobs;
    TokenLogprobs { logprob, rank, top }
}

/// Tells text, reasoning and calls apart.
struct OutputReader {
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
    params: Arc<SamplingParams>,
    include_stop: bool,
    /// Stop strings count in reasoning and calls, too.
    stops_everywhere: bool,
    /// The one that was met.
    stopped: Option<usize>,
    /// `None`: all text is content.
    reader: Option<OutputReader>,
    /// Leave control tokens out, but for those the reader needs.
    skip_special: bool,
    /// The caller asked for no tokens at all (`max_tokens: 0`).
    discard: bool,
    /// Counted tokens.
    pub tokens: u32,
    /// Those after which the model was still thinking.
    pub reasoning_tokens: u32,
    characters: usize,
    /// What the rules for answers still hold back; `None`: there are no rules.
    gate: Option<AnswerGate>,
    pending: Delta,
    finish: Option<Finish>,
}

impl Choice {
    /// `matcher`: of the request's stop strings.
    pub fn new(
        tokenizer: Arc<Tokenizer>,
        generation: &Generation,
        reading: Option<&Reading>,
        (params, matcher): (Arc<SamplingParams>, StopMatcher),
        rules: Option<&Arc<SafetyRules>>,
    ) -> Self {
        // Control tokens are left out here, where it is known which of them are needed.
        let options = DetokenizeOptions { skip_special_tokens: false, continues: true };
        let reader = reading.cloned().map(|reading| {
            let mut events = Vec::new();
            let parser = reading.parser(&mut events);
            OutputReader { reading, parser, events, complete: 0 }
        });
        let shows_reasoning = reading.is_none_or(|reading| reading.include_reasoning);
        let gate = rules.map(|rules| AnswerGate::new(rules.clone(), tokenizer.clone(), shows_reasoning));
        let mut choice = Self {
            tokenizer,
            detokenizer: Detokenizer::new(options),
            matcher,
            params,
            include_stop: generation.include_stop,
            stops_everywhere: generation.stop_everywhere,
            stopped: None,
            reader,
            skip_special: generation.skip_special_tokens,
            discard: generation.max_tokens == Some(0),
            tokens: 0,
            reasoning_tokens: 0,
            characters: 0,
            gate,
            pending: Delta::default(),
            finish: None,
        };
        choice.sort();
        choice
    }

    pub fn finish(&self) -> Option<&Finish> {
        self.finish.as_ref()
    }

    /// The gate of the rules for answers, where there are rules.
    pub fn gate(&self) -> Option<&AnswerGate> {
        self.gate.as_ref()
    }

    /// Nobody may read on.
    pub fn deny(&mut self) {
        self.pending = Delta::default();
        self.finish = Some(Finish::denied());
    }

    /// Says something about the choice, which is over.
    pub fn note(&mut self, notes: serde_json::Value) {
        self.finish.iter_mut().for_each(|finish| finish.safety = Some(notes.clone()));
    }

    /// Puts text of the prompt before the generated text, of this many characters. `Some`: the choice ends here.
    pub fn echo(&mut self, echo: &Delta, characters: usize) -> Option<Finish> {
        self.characters += characters;
        let Some(gate) = &mut self.gate else {
            self.pending.append(echo.clone());
            return None;
        };
        let mut scored = echo.scored.iter().cloned().peekable();
        let mut before = 0;
        for piece in &echo.pieces {
            let OutputEvent::Content(text) = piece else { continue };
            let mut rest = text.as_str();
            // Each token goes with the text up to the next.
            while let Some(token) = scored.next() {
                gate.token(None, Some(token));
                let upto = scored.peek().map_or(usize::MAX, |next| next.offset) - before;
                let bytes = rest.char_indices().nth(upto).map_or(rest.len(), |(at, _)| at);
                gate.push(OutputEvent::Content(rest[..bytes].to_owned()));
                gate.settled();
                rest = &rest[bytes..];
                before += upto.min(characters);
            }
            gate.push(OutputEvent::Content(rest.to_owned()));
        }
        self.pass()
    }

    /// Takes the next token. `Some` when this token ended the choice here (a stop string, a rule): the engine does not know yet.
    pub fn push(&mut self, token: Token) -> Option<Finish> {
        if self.finish.is_some() || self.discard {
            return None;
        }
        let Token { id, logprobs, .. } = token;
        self.tokens += 1;
        let scored =
            logprobs.map(|logprobs| Scored { id, logprobs: told(logprobs), offset: self.characters });
        match &mut self.gate {
            Some(gate) => gate.token(Some(id), scored),
            None => {
                self.pending.token_ids.push(id);
                self.pending.scored.extend(scored);
            }
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
        let stop = if self.stops_in_content() {
            self.read(&text, false);
            self.stopped
        } else {
            let stop = self.matched(&text, &mut certain);
            self.read(&certain, stop.is_some());
            stop
        };
        let thinking = self.reader.as_ref().is_some_and(|reader| reader.parser.in_reasoning());
        self.reasoning_tokens += u32::from(thinking);
        let stop_reason = stop.map(|index| StopReason::Text(self.matcher.stop(index).to_owned()));
        // A reader that has all the calls it may read needs no more text.
        if stop_reason.is_none() && !self.reader.as_ref().is_some_and(|reader| reader.parser.is_over()) {
            return self.pass();
        }
        Some(self.conclude(Finish::new(self.reason("stop"), stop_reason)))
    }

    /// Stop strings count in what the reader tells to be content, and nowhere else.
    fn stops_in_content(&self) -> bool {
        self.reader.is_some() && !self.stops_everywhere
    }

    /// Matches text; what is certain of it goes to `certain`. Before `min_tokens` nothing stops.
    fn matched(&mut self, text: &str, certain: &mut String) -> Option<usize> {
        if self.tokens <= self.params.min_tokens {
            self.matcher.pass(text, certain);
            return None;
        }
        self.matcher.push(text, certain)
    }

    /// Lets through what the rules hold back no longer. `Some`: one of them denied the choice.
    fn pass(&mut self) -> Option<Finish> {
        let gate = self.gate.as_mut()?;
        let reading = self.reader.as_ref().is_some_and(|reader| reader.parser.held_bytes() > 0);
        if !reading && !self.detokenizer.is_holding() && self.matcher.held_bytes() == 0 {
            gate.settled();
        }
        gate.release(&mut self.pending);
        gate.denied()?;
        self.finish = Some(Finish::denied());
        self.finish.clone()
    }

    /// The choice is over, unless a rule has another end for it.
    fn conclude(&mut self, finish: Finish) -> Finish {
        let denied = self.gate.as_mut().is_some_and(|gate| {
            gate.finish();
            gate.release(&mut self.pending);
            gate.denied().is_some()
        });
        let finish = if denied { Finish::denied() } else { finish };
        self.finish = Some(finish.clone());
        finish
    }

    /// Shows text that is certain: as it is, or as what it turns out to be. `last`: nothing follows.
    fn read(&mut self, text: &str, last: bool) {
        let Some(reader) = &mut self.reader else {
            let piece = OutputEvent::Content(text.to_owned());
            return match &mut self.gate {
                Some(gate) => gate.push(piece),
                None => self.pending.push(piece),
            };
        };
        reader.parser.push(text, &mut reader.events);
        if last {
            reader.parser.finish(&mut reader.events);
        }
        self.sort();
    }

    /// Puts the reader's events into their places, up to a stop string.
    fn sort(&mut self) {
        let Some(reader) = &mut self.reader else { return };
        let mut events = std::mem::take(&mut reader.events);
        let in_content = self.stops_in_content();
        for event in events.drain(..) {
            if self.stopped.is_some() {
                break;
            }
            let mut certain = String::new();
            let event = match event {
                OutputEvent::Content(text) if in_content => {
                    self.stopped = self.matched(&text, &mut certain);
                    OutputEvent::Content(certain)
                }
                other => {
                    // No stop string reaches over what is no content.
                    if in_content {
                        self.matcher.finish(&mut certain);
                        self.place(OutputEvent::Content(certain));
                    }
                    other
                }
            };
            self.place(event);
        }
        if let Some(reader) = &mut self.reader {
            // Emptied, with its room.
            reader.events = events;
        }
    }

    fn place(&mut self, event: OutputEvent) {
        if let Some(reader) = &mut self.reader {
            match (event, &mut self.gate) {
                (OutputEvent::CallEnded { .. }, _) => reader.complete += 1,
                (event, Some(gate)) => gate.push(event),
                (OutputEvent::Reasoning(_), None) if !reader.reading.include_reasoning => {}
                (shown, None) => self.pending.push(shown),
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
        let stopped = if self.stops_in_content() {
            self.read(&rest, true);
            if self.stopped.is_none() {
                self.matcher.finish(&mut certain);
                self.place(OutputEvent::Content(certain));
            }
            self.stopped
        } else {
            let stopped = self.matcher.push(&rest, &mut certain);
            self.matcher.finish(&mut certain);
            self.read(&certain, true);
            stopped
        };
        let reason = self.reason(reason);
        let finish = match (self.discard, stopped) {
            (true, _) => Finish::new("length", None),
            (false, Some(index)) => {
                Finish::new(self.reason("stop"), Some(StopReason::Text(self.matcher.stop(index).to_owned())))
            }
            (false, None) => {
                let named = stop_token.filter(|id| !self.params.eos_token_ids.contains(id));
                Finish::new(reason, named.map(StopReason::Token))
            }
        };
        self.conclude(finish)
    }

    /// What may be shown now. Tokens and log probabilities wait until there is text to go with them or the choice ended.
    pub fn take(&mut self) -> Option<Delta> {
        if self.pending.is_empty() && self.finish.is_none() {
            return None;
        }
        Some(std::mem::take(&mut self.pending))
    }
}
