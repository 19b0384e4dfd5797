//! What stands between a model's answer and whoever reads it: text leaves when no rule can touch it any more.
//!
//! Owns: what is held back, what is replaced, and where a denied answer is cut. Every field of an answer (content,
//! reasoning, the arguments of a call) is a text of its own to the rules, whatever the model writes in between. Pieces leave
//! in the order in which they came, so a held piece holds those behind it.
//!
//! Invariants:
//! - What leaves, and whether the answer is denied, depends on the pieces' characters alone and not on how they were cut.
//! - No character of a match has left when it is found. A denied answer ends before whatever was held back then: the match,
//!   and what might have become another.
//! - What is part of any match of a redacting rule is replaced; matches that overlap are replaced as one.
//! - A token leaves when its text did, and never if any of its text was replaced or denied.
//!
//! In arguments, which are JSON, the rules read strings as what they stand for (`\u0041` is `A`).
//!
//! Cost: that of the automata, and a copy of the text.

use std::collections::{BTreeSet, VecDeque};
use std::ops::Range;
use std::sync::Arc;

use folio_text::{OutputEvent, Tokenizer};

use super::automaton::{Hit, Scan};
use super::escapes::Escapes;
use super::rules::{SafetyRules, merge};
use folio_api::events::{Delta, Scored};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum AnswerField {
    Content,
    Reasoning,
    Arguments(u32),
}

/// One field's way through the rules. Offsets count bytes of all pieces of the answer, in their order.
struct Channel {
    field: AnswerField,
    scan: Scan,
    /// Of arguments.
    escapes: Option<Escapes>,
    /// Disjoint and ascending, not yet shown.
    replaced: Vec<Hit>,
}

/// A piece that waits.
enum HeldPiece {
    Text {
        channel: usize,
        start: u64,
        text: String,
    },
    /// The beginning of a call.
    Call {
        at: u64,
        piece: OutputEvent,
    },
}

/// Tokens whose text is all between two offsets.
#[derive(Default)]
struct Group {
    start: u64,
    end: u64,
    ids: Vec<u32>,
    scored: Vec<Scored>,
}

/// See the module documentation.
pub struct AnswerGate {
    rules: Arc<SafetyRules>,
    tokenizer: Arc<Tokenizer>,
    /// Reasoning is read, and shown too.
    shows_reasoning: bool,
    channels: Vec<Channel>,
    waiting: VecDeque<HeldPiece>,
    groups: VecDeque<Group>,
    open: Group,
    /// Bytes that came.
    end: u64,
    /// Rules whose replacements were shown.
    redacted: BTreeSet<usize>,
    /// Where the answer ends, and the rule.
    denied: Option<(u64, usize)>,
    /// By how many characters the content was lengthened, in all, up to and with a replacement that ends here.
    shifts: Vec<(u64, isize)>,
    hits: Vec<Hit>,
}

impl AnswerGate {
    pub fn new(rules: Arc<SafetyRules>, tokenizer: Arc<Tokenizer>, shows_reasoning: bool) -> Self {
        Self {
            rules,
            tokenizer,
            shows_reasoning,
            channels: Vec::new(),
            waiting: VecDeque::new(),
            groups: VecDeque::new(),
            open: Group::default(),
            end: 0,
            redacted: BTreeSet::new(),
            denied: None,
            shifts: Vec::new(),
            hits: Vec::new(),
        }
    }

    /// The name of the rule that denied the answer.
    pub fn denied(&self) -> Option<&str> {
        self.denied.map(|(_, rule)| self.rules.name(rule))
    }

    /// Names of the rules that replaced something that was shown.
    pub fn redacted(&self) -> impl Iterator<Item = &str> {
        self.redacted.iter().map(|rule| self.rules.name(*rule))
    }

    /// The next token; its text may come later.
    pub fn token(&mut self, id: Option<u32>, scored: Option<Scored>) {
        self.open.ids.extend(id);
        self.open.scored.extend(scored);
    }

    /// All text of all tokens so far has come.
    pub fn settled(&mut self) {
        if self.open.ids.is_empty() && self.open.scored.is_empty() {
            return;
        }
        let group = std::mem::take(&mut self.open);
        self.open.start = self.end;
        self.groups.push_back(Group { end: self.end, ..group });
    }

    /// The next piece. After a denial nothing counts.
    pub fn push(&mut self, piece: OutputEvent) {
        if self.denied.is_some() {
            return;
        }
        let (field, text) = match piece {
            OutputEvent::Content(text) => (AnswerField::Content, text),
            OutputEvent::Reasoning(text) => (AnswerField::Reasoning, text),
            OutputEvent::Arguments { index, text } => (AnswerField::Arguments(index), text),
            OutputEvent::CallStarted { index, id, name } => {
                // A name has nothing that could stand in its place.
                if let Some(rule) = self.rules.first_in(&name) {
                    return self.deny(self.end, rule);
                }
                let piece = OutputEvent::CallStarted { index, id, name };
                return self.waiting.push_back(HeldPiece::Call { at: self.end, piece });
            }
            OutputEvent::CallEnded { .. } => return,
        };
        let channel = self.channel(field);
        let start = self.end;
        for c in text.chars() {
            let range = self.end..self.end + c.len_utf8() as u64;
            self.end = range.end;
            self.read(channel, c, range);
            if self.denied.is_some() {
                break;
            }
        }
        let read = (self.end - start) as usize;
        if read == 0 {
            return;
        }
        self.waiting.push_back(HeldPiece::Text { channel, start, text: text[..read].to_owned() });
    }

    fn channel(&mut self, field: AnswerField) -> usize {
        if let Some(index) = self.channels.iter().position(|channel| channel.field == field) {
            return index;
        }
        let escapes = matches!(field, AnswerField::Arguments(_)).then(Escapes::default);
        self.channels.push(Channel { field, scan: Scan::default(), escapes, replaced: Vec::new() });
        self.channels.len() - 1
    }

    fn read(&mut self, index: usize, c: char, range: Range<u64>) {
        let mut hits = std::mem::take(&mut self.hits);
        let channel = &mut self.channels[index];
        let (scan, automata) = (&mut channel.scan, &self.rules.automata);
        match &mut channel.escapes {
            Some(escapes) => escapes.read(c, range, |c, range| scan.read(automata, c, range, &mut hits)),
            None => scan.read(automata, c, range, &mut hits),
        }
        self.take(index, &mut hits);
        self.hits = hits;
    }

    /// Takes the matches in one channel at one moment.
    fn take(&mut self, index: usize, hits: &mut Vec<Hit>) {
        let denying = hits.iter().filter(|hit| self.rules.denies(hit.rule));
        let first = denying.min_by_key(|hit| (hit.range.start, hit.rule)).cloned();
        let replaced = &mut self.channels[index].replaced;
        for hit in hits.drain(..).filter(|hit| !self.rules.denies(hit.rule)) {
            merge(replaced, hit);
        }
        if let Some(hit) = first {
            self.deny(hit.range.start, hit.rule);
        }
    }

    fn deny(&mut self, at: u64, rule: usize) {
        let cut = self.horizon().min(at);
        self.denied = Some((cut, rule));
    }

    /// Everything before this offset is certain.
    fn horizon(&self) -> u64 {
        match self.denied {
            Some((cut, _)) => cut,
            None => self.channels.iter().map(|channel| channel.certain(self.end)).min().unwrap_or(self.end),
        }
    }

    /// The answer is over: what was held back is what it is, or what makes it denied.
    pub fn finish(&mut self) {
        self.settled();
        if self.denied.is_some() {
            return;
        }
        // All fields end at once, so the cut is before whatever any of them held.
        let held = self.horizon();
        let mut denied: Option<(u64, usize)> = None;
        for index in 0..self.channels.len() {
            let channel = &mut self.channels[index];
            let (scan, automata) = (&mut channel.scan, &self.rules.automata);
            let mut hits = Vec::new();
            if let Some(escapes) = &mut channel.escapes {
                escapes.finish(|c, range| scan.read(automata, c, range, &mut hits));
            }
            scan.finish(automata, &mut hits);
            self.take(index, &mut hits);
            if let Some((cut, rule)) = self.denied.take() {
                let cut = cut.min(held);
                denied = Some(denied.map_or((cut, rule), |(before, first)| (before.min(cut), first)));
            }
        }
        self.denied = denied;
    }

    /// Moves what is certain to `out`.
    pub fn release(&mut self, out: &mut Delta) {
        let horizon = self.horizon();
        while let Some(piece) = self.waiting.pop_front() {
            match piece {
                HeldPiece::Call { at, piece } if at <= horizon => out.push(piece),
                HeldPiece::Text { channel, start, text } if start < horizon => {
                    let certain = ((horizon - start) as usize).min(text.len());
                    self.show(channel, start, &text[..certain], out);
                    if certain < text.len() {
                        let rest = text[certain..].to_owned();
                        self.waiting.push_front(HeldPiece::Text { channel, start: horizon, text: rest });
                        break;
                    }
                }
                other => {
                    self.waiting.push_front(other);
                    break;
                }
            }
        }
        while self.groups.front().is_some_and(|group| group.end <= horizon) {
            let Some(mut group) = self.groups.pop_front() else { break };
            let touched = |hit: &Hit| hit.range.start < group.end && group.start < hit.range.end;
            if !self.channels.iter().flat_map(|channel| &channel.replaced).any(touched) {
                let before = self.shifts.partition_point(|(end, _)| *end <= group.start);
                let shift = before.checked_sub(1).map_or(0, |last| self.shifts[last].1);
                for scored in &mut group.scored {
                    scored.offset = scored.offset.saturating_add_signed(shift);
                    self.rules.prune(&mut scored.logprobs, &self.tokenizer);
                }
                out.token_ids.append(&mut group.ids);
                out.scored.append(&mut group.scored);
            }
        }
        let before = self.groups.front().map_or(self.open.start, |group| group.start);
        for channel in &mut self.channels {
            channel.replaced.retain(|hit| hit.range.end > horizon.min(before));
        }
        if self.denied.is_some() {
            self.waiting.clear();
            self.groups.clear();
            self.open = Group { start: self.end, ..Group::default() };
        }
    }

    /// Shows certain text that begins at `start`, but for what is replaced.
    fn show(&mut self, channel: usize, start: u64, text: &str, out: &mut Delta) {
        let Channel { field, replaced, .. } = &self.channels[channel];
        let (mut shown, mut at) = (String::new(), start);
        let mut shift = self.shifts.last().map_or(0, |(_, shift)| *shift);
        let end = start + text.len() as u64;
        for hit in replaced.iter().filter(|hit| hit.range.start < end && start < hit.range.end) {
            let within = hit.range.start.max(start)..hit.range.end.min(end);
            shown.push_str(&text[(at - start) as usize..(within.start - start) as usize]);
            let written = &text[(within.start - start) as usize..(within.end - start) as usize];
            shift -= written.chars().count() as isize;
            if hit.range.start >= start {
                let replacement = self.rules.replacement(hit.rule);
                shift += replacement.chars().count() as isize;
                self.redacted.insert(hit.rule);
                match field {
                    AnswerField::Arguments(_) => shown.push_str(&in_a_string(replacement)),
                    _ => shown.push_str(replacement),
                }
            }
            if *field == AnswerField::Content {
                self.shifts.push((within.end, shift));
            }
            at = within.end;
        }
        shown.push_str(&text[(at - start) as usize..]);
        if shown.is_empty() {
            return;
        }
        match *field {
            AnswerField::Content => out.push(OutputEvent::Content(shown)),
            AnswerField::Reasoning if !self.shows_reasoning => {}
            AnswerField::Reasoning => out.push(OutputEvent::Reasoning(shown)),
            AnswerField::Arguments(index) => out.push(OutputEvent::Arguments { index, text: shown }),
        }
    }
}

impl Channel {
    /// Everything of this field before this offset is certain; `end`: of what came.
    fn certain(&self, end: u64) -> u64 {
        let escape = self.escapes.as_ref().and_then(Escapes::open);
        let certain = [self.scan.oldest(), escape].into_iter().flatten().min().unwrap_or(end);
        // A match that one may still be coming to overlap with.
        let spoiled = self.replaced.iter().find(|hit| hit.range.contains(&certain));
        spoiled.map_or(certain, |hit| hit.range.start)
    }
}

/// A text as it stands between the quotes of a JSON string.
fn in_a_string(text: &str) -> String {
    let quoted = serde_json::Value::from(text).to_string();
    quoted[1..quoted.len() - 1].to_owned()
}

#[cfg(test)]
mod tests;
