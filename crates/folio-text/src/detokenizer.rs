//! Ids to text, one token at a time.
//!
//! Owns: the bytes of a character that is not complete yet. Must never: emit part of a character, or text that a later
//! token would change.
//!
//! Invariant: for any ids, the pieces pushed out plus what `finish` gives are `Tokenizer::decode` of those ids (with
//! `continues` unset), because both are this code; and equal to the lossy UTF-8 reading of the concatenated bytes.
//!
//! Cost: a copy of the token's bytes. Decoders without per-token bytes (WordPiece) decode a short window of tokens twice.

use crate::decoder::{DecodeKind, Start};
use crate::tokenizer::Tokenizer;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DetokenizeOptions {
    /// Leave control tokens out of the text.
    pub skip_special_tokens: bool,
    /// The text continues a prompt: a sentencepiece token's leading space is a real space, not the mark of a text's start.
    pub continues: bool,
}

/// State of one stream. Give every call the same tokenizer.
#[derive(Clone, Debug)]
pub struct Detokenizer {
    options: DetokenizeOptions,
    /// Bytes that are the beginning of a character, at most three, plus the token being added.
    pending: Vec<u8>,
    /// Nothing has been emitted or held back yet.
    at_start: bool,
    /// Spaces still to be stripped.
    strip: Option<usize>,
    window: Window,
}

/// The decode-prefix scheme: `ids[prefix..read]` is context whose text is already out.
#[derive(Clone, Debug, Default)]
struct Window {
    ids: Vec<u32>,
    read: usize,
}

/// Tokens without certain text that are decoded again with every further one.
const WAITING_MAX: usize = 8;

impl Detokenizer {
    pub fn new(options: DetokenizeOptions) -> Self {
        Self {
            options,
            pending: Vec::new(),
            at_start: !options.continues,
            strip: None,
            window: Window::default(),
        }
    }

    /// Appends the text that became certain with token `id`.
    pub fn push(&mut self, tokenizer: &Tokenizer, id: u32, out: &mut String) {
        match tokenizer.kind() {
            DecodeKind::Table(start) => self.push_bytes(tokenizer, start, id, out),
            DecodeKind::Whole => self.push_window(tokenizer, id, out),
        }
    }

    /// Appends what is left at the end of the stream; an incomplete character becomes U+FFFD. The detokenizer is then as
    /// new, in the middle of a text.
    pub fn finish(&mut self, tokenizer: &Tokenizer, out: &mut String) {
        if tokenizer.kind() == DecodeKind::Whole {
            self.flush_window(tokenizer, out);
        }
        out.push_str(&String::from_utf8_lossy(&self.pending));
        self.pending.clear();
        self.at_start = false;
        self.strip = None;
    }

    /// True while some bytes wait for the rest of their character.
    pub fn is_holding(&self) -> bool {
        !self.pending.is_empty() || self.window.read < self.window.ids.len()
    }

    fn push_bytes(&mut self, tokenizer: &Tokenizer, start: Start, id: u32, out: &mut String) {
        if self.options.skip_special_tokens && tokenizer.is_special(id) {
            return;
        }
        let mut bytes = tokenizer.token_bytes(id);
        if self.at_start {
            self.at_start = false;
            match start {
                Start::Keep => {}
                Start::StripSpaces(spaces) => self.strip = Some(spaces),
                Start::StripFirstToken => {
                    self.pending.extend(bytes.iter().filter(|byte| **byte != b' '));
                    return self.drain(out);
                }
            }
        }
        while let Some(left) = self.strip {
            match bytes {
                [b' ', rest @ ..] if left > 0 => {
                    bytes = rest;
                    self.strip = Some(left - 1);
                }
                // A token without bytes does not end the start of the text.
                [] if left > 0 => return,
                _ => self.strip = None,
            }
        }
        self.pending.extend_from_slice(bytes);
        self.drain(out);
    }

    /// Moves all complete characters from `pending` to `out`, broken bytes as U+FFFD (the maximal-subpart rule of
    /// `String::from_utf8_lossy`), and keeps a beginning that may still be completed.
    fn drain(&mut self, out: &mut String) {
        crate::work::add(self.pending.len());
        let mut done = 0;
        loop {
            let rest = &self.pending[done..];
            match std::str::from_utf8(rest) {
                Ok(text) => {
                    out.push_str(text);
                    done = self.pending.len();
                    break;
                }
                Err(error) => {
                    let (valid, _) = rest.split_at(error.valid_up_to());
                    out.push_str(&String::from_utf8_lossy(valid));
                    done += error.valid_up_to();
                    match error.error_len() {
                        Some(broken) => {
                            out.push(char::REPLACEMENT_CHARACTER);
                            done += broken;
                        }
                        None => break,
                    }
                }
            }
        }
        self.pending.drain(..done);
    }

    fn push_window(&mut self, tokenizer: &Tokenizer, id: u32, out: &mut String) {
        self.window.ids.push(id);
        let (before, after) = self.window_texts(tokenizer);
        // An unfinished character shows as U+FFFD at the end; wait for it, and for tokens that add no text, but not for ever.
        let waits = self.window.ids.len() - self.window.read < WAITING_MAX;
        let unfinished = after.len() <= before.len() || after.ends_with(char::REPLACEMENT_CHARACTER);
        if unfinished && waits {
            return;
        }
        if let Some(new) = after.get(before.len()..) {
            out.push_str(new);
        }
        self.window.ids.drain(..self.window.read);
        self.window.read = self.window.ids.len();
    }

    fn flush_window(&mut self, tokenizer: &Tokenizer, out: &mut String) {
        let (before, after) = self.window_texts(tokenizer);
        out.push_str(after.get(before.len()..).unwrap_or_default());
        self.window = Window::default();
    }

    fn window_texts(&self, tokenizer: &Tokenizer) -> (String, String) {
        crate::work::add(self.window.read + self.window.ids.len());
        let skip = self.options.skip_special_tokens;
        let before = tokenizer.library_decode(&self.window.ids[..self.window.read], skip);
        (before, tokenizer.library_decode(&self.window.ids, skip))
    }
}
