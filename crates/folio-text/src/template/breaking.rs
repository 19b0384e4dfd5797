//! Markers in what a client wrote, broken: a conversation cannot forge its own structure.
//!
//! A *marker* is an added token that a template or a model may mean something by: every special one, and of the others
//! those with a sign in them (`<tool_call>`; not a word, not white space) or that the template itself names. Before a
//! string of the conversation is rendered, a *seam* is put into each marker in it, behind its first character: one
//! character that occurs nowhere else, which is taken out again after rendering ([`Prompt`]). What the template writes
//! itself has none. A marker may also be made of pieces: a string that ends with the beginning of one is broken there,
//! and one that begins with the end of one before it.
//!
//! Invariant: a string without (pieces of) markers is rendered as it is.
//!
//! Cost: linear in the strings; nothing but the search where there are no markers.
//!
//! [`Prompt`]: crate::Prompt

use std::borrow::Cow;
use std::collections::HashSet;

use aho_corasick::{AhoCorasick, Input, MatchKind};
use serde_json::Value as Json;

use super::ChatInput;
use crate::error::TextError;
use crate::tools::{OutputEvent, OutputParser, ParserSetup};

/// Seams: signs of a script that nobody writes in, which no filter changes, escapes or takes for white space or case.
pub(super) const SEAMS: std::ops::RangeInclusive<char> = '\u{14400}'..='\u{14646}';

/// The markers of a model.
pub(super) struct Markers {
    automaton: AhoCorasick,
    /// Sorted.
    texts: Vec<String>,
    /// What markers end with, without their first character.
    ends: HashSet<String>,
    /// The first and the last bytes of markers.
    first: [bool; 256],
    last: [bool; 256],
    longest: usize,
}

/// Where one string may not be read as structure: which seam, and which markers it may have.
pub(super) struct Breaking<'a> {
    markers: Option<&'a Markers>,
    pub(super) seam: Option<char>,
}

impl Markers {
    /// Of all added tokens: (text, special). `None`: there are none.
    pub(super) fn new(added: &[(String, bool)], sources: &[&str]) -> Option<Self> {
        let is_marker = |text: &str, special: bool| {
            let sign = |c: char| !c.is_alphanumeric() && !c.is_whitespace() && c != '▁' && c != '_';
            !text.is_empty()
                && (special
                    || text.contains(sign)
                    || (!text.trim().is_empty() && sources.iter().any(|source| source.contains(text))))
        };
        let mut texts: Vec<String> = added
            .iter()
            .filter(|(text, special)| is_marker(text, *special))
            .map(|(text, _)| text.clone())
            .collect();
        texts.sort();
        texts.dedup();
        let automaton = AhoCorasick::builder().match_kind(MatchKind::Standard).build(&texts).ok()?;
        let inner =
            |text: &str| text.char_indices().skip(1).map(|(at, _)| text[at..].to_owned()).collect::<Vec<_>>();
        let (mut first, mut last) = ([false; 256], [false; 256]);
        for text in texts.iter().map(|text| text.as_bytes()) {
            text.first().into_iter().for_each(|byte| first[usize::from(*byte)] = true);
            text.last().into_iter().for_each(|byte| last[usize::from(*byte)] = true);
        }
        Some(Self {
            automaton,
            ends: texts.iter().flat_map(|text| inner(text)).collect(),
            first,
            last,
            longest: texts.iter().map(String::len).max()?,
            texts,
        })
    }

    /// Places for seams in `text`, ascending. Markers that are part of one of `kept` stay whole.
    fn places(&self, text: &str, kept: &[&str]) -> Vec<usize> {
        let mut places = Vec::new();
        if self.begins_inside(text) {
            places.push(0);
        }
        for found in self.automaton.find_overlapping_iter(Input::new(text)) {
            let marker = &text[found.range()];
            if kept.iter().any(|kept| kept.contains(marker)) {
                continue;
            }
            let behind = found.start() + first_char(marker);
            // One character has no inside.
            places.extend((behind == found.end()).then_some(found.start()));
            places.push(behind);
        }
        let from = text.ceil_char_boundary(text.len().saturating_sub(self.longest - 1));
        let begin = |(at, _): &(usize, char)| self.first[usize::from(text.as_bytes()[from + at])];
        for (at, _) in text[from..].char_indices().filter(begin) {
            let rest = &text[from + at..];
            let next = self.texts.partition_point(|marker| marker.as_str() < rest);
            let begins = self
                .texts
                .get(next)
                .is_some_and(|marker| marker.len() > rest.len() && marker.starts_with(rest));
            places.extend(begins.then(|| from + at + first_char(rest)));
        }
        places.sort_unstable();
        places.dedup();
        places
    }

    /// Whether `text` begins with the end of a marker, or is all of the middle of one (and not just a word).
    fn begins_inside(&self, text: &str) -> bool {
        let near = &text[..text.floor_char_boundary(self.longest)];
        let ends = near
            .char_indices()
            .filter(|(at, c)| self.last[usize::from(near.as_bytes()[at + c.len_utf8() - 1])]);
        if ends.map(|(at, c)| &near[..at + c.len_utf8()]).any(|end| self.ends.contains(end)) {
            return true;
        }
        let word = |c: char| c.is_alphanumeric() || c == '_';
        text.len() < self.longest
            && !text.chars().all(word)
            && self.texts.iter().any(|marker| marker[first_char(marker)..].contains(text))
    }
}

fn first_char(text: &str) -> usize {
    text.chars().next().map_or(0, char::len_utf8)
}

impl<'a> Breaking<'a> {
    /// `sources`: the templates, which have no seam either.
    pub(super) fn new(
        markers: Option<&'a Markers>,
        sources: &TakenCharacters,
        input: &ChatInput<'_>,
    ) -> Result<Self, TextError> {
        let Some(markers) = markers else { return Ok(Self { markers: None, seam: None }) };
        let mut taken = sources.clone();
        let lists = [Some(input.messages), input.tools, input.documents];
        lists.into_iter().flatten().flatten().for_each(|value| taken.see(value));
        input.kwargs.iter().for_each(|(key, value)| {
            taken.see_text(key);
            taken.see(value);
        });
        let seam = SEAMS.clone().find(|seam| !taken.0.contains(seam)).ok_or(TextError::NoSeam)?;
        Ok(Self { markers: Some(markers), seam: Some(seam) })
    }

    /// `text` with its markers broken, but for those that `kept` has.
    pub(super) fn text<'t>(&self, text: &'t str, kept: &[&str]) -> Cow<'t, str> {
        let (Some(markers), Some(seam)) = (self.markers, self.seam) else { return Cow::Borrowed(text) };
        let places = markers.places(text, kept);
        if places.is_empty() {
            return Cow::Borrowed(text);
        }
        let mut out = String::with_capacity(text.len() + places.len() * seam.len_utf8());
        let mut from = 0;
        for place in places {
            out.push_str(&text[from..place]);
            out.push(seam);
            from = place;
        }
        out.push_str(&text[from..]);
        Cow::Owned(out)
    }
}

/// Which characters of [`SEAMS`] occur.
#[derive(Clone, Debug, Default)]
pub(super) struct TakenCharacters(HashSet<char>);

impl TakenCharacters {
    pub(super) fn see_text(&mut self, text: &str) {
        if !text.is_ascii() {
            self.0.extend(text.chars().filter(|c| SEAMS.contains(c)));
        }
    }

    fn see(&mut self, value: &Json) {
        match value {
            Json::String(text) => self.see_text(text),
            Json::Array(items) => items.iter().for_each(|item| self.see(item)),
            Json::Object(map) => map.iter().for_each(|(key, value)| {
                self.see_text(key);
                self.see(value);
            }),
            _ => {}
        }
    }
}

/// Bytes of an earlier answer that are parsed at once.
const PIECE: usize = 64;

/// The markers that an earlier answer may have in its content: those of its reasoning and calls, if it has such.
pub(super) fn own_markers(input: &ChatInput<'_>, content: &str) -> Vec<&'static str> {
    let formats = input.formats;
    // gpt-oss's are those of its turns as well.
    let tools = formats.tools.filter(|format| !format.harmony);
    let reasoning = formats.reasoning.filter(|format| !format.harmony);
    let markers = || {
        let tools = tools.into_iter().flat_map(|format| format.markers());
        tools.chain(reasoning.into_iter().flat_map(|format| format.markers()))
    };
    if !markers().any(|marker| content.contains(marker)) {
        return Vec::new();
    }
    let inside_reasoning = reasoning.is_some_and(|format| {
        // A prompt that opened it left the answer only the end.
        let opened = content.find(format.open).unwrap_or(content.len());
        content.find(format.close).is_some_and(|closed| closed < opened)
    });
    let setup = ParserSetup { tools, reasoning, inside_reasoning, ..ParserSetup::default() };
    let (mut parser, mut events) = (OutputParser::new(setup), Vec::new());
    // Piece by piece, as it was written: the parser searches all that it holds.
    let mut rest = content;
    while !rest.is_empty() {
        let (piece, behind) = rest.split_at(rest.floor_char_boundary(PIECE));
        parser.push(piece, &mut events);
        events.retain(|event| !matches!(event, OutputEvent::Content(_)));
        rest = behind;
    }
    parser.finish(&mut events);
    match events.iter().all(|event| matches!(event, OutputEvent::Content(_))) {
        true => Vec::new(),
        false => markers().collect(),
    }
}
