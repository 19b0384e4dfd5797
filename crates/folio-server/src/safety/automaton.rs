//! Patterns as automata that read one character at a time.
//!
//! Owns: which ranges of a text match, and from where on a match may still be coming. A DFA is run from every position at
//! which a match can begin; a position whose run died is certain. So what is found depends on the characters alone and not
//! on how the text came: there is nothing to search again when more of it arrives.
//!
//! Invariants: a match is at most [`Automaton::longest`] bytes, so at most that many runs live at once. Offsets are the
//! caller's own (a character of the text may be an escape sequence of what is shown).
//!
//! Of `regex-automata` are the tables and their states. Why not `aho-corasick` for strings: it folds the case of ASCII only, and neither
//! it nor any other search of a stream tells where a match may still be coming, which is what text is held back by.
//!
//! Cost: per byte and automaton one table look-up for each run that lives; most die with their first byte.

use std::ops::Range;

use regex_automata::dfa::{Automaton as _, StartKind, dense};
use regex_automata::nfa::thompson;
use regex_automata::util::primitives::StateID;
use regex_automata::util::{start, syntax};
use regex_automata::{Anchored, MatchKind};

/// Bytes of the longest match of a pattern.
pub const LONGEST_MAX: usize = 4096;
/// Bytes of one automaton's tables.
const TABLE_BYTES_MAX: usize = 16 << 20;

/// Patterns of one rule that are looked for together.
pub struct Automaton {
    dfa: dense::DFA<Vec<u32>>,
    /// Index of the rule.
    pub rule: usize,
    /// Bytes.
    longest: u32,
    /// No pattern looks beyond its match, so a match is one as soon as its last byte is there.
    eager: bool,
    /// Bytes a match may begin with; only where nothing looks back.
    first: Option<Box<[bool; 256]>>,
}

/// A match: offsets in the caller's terms.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hit {
    pub rule: usize,
    pub range: Range<u64>,
}

/// A run of an automaton from one position on.
#[derive(Clone, Copy, Debug)]
struct Run {
    start: u64,
    state: StateID,
    /// Bytes read.
    length: u32,
}

impl Automaton {
    /// Strings; of several that begin together the longest counts.
    pub fn of_strings(rule: usize, strings: &[String], ignore_case: bool) -> Result<Self, String> {
        let patterns: Vec<String> = strings.iter().map(|string| regex_syntax::escape(string)).collect();
        let options = syntax::Config::new().case_insensitive(ignore_case);
        Self::build(rule, &patterns, options, MatchKind::All, None)
    }

    /// A regular expression in the syntax of the `regex` crate. `longest`: bytes a match may have, where the expression itself
    /// sets no bound.
    pub fn of_regex(rule: usize, pattern: &str, longest: Option<usize>) -> Result<Self, String> {
        let patterns = [pattern.to_owned()];
        Self::build(rule, &patterns, syntax::Config::new(), MatchKind::LeftmostFirst, longest)
    }

    fn build(
        rule: usize,
        patterns: &[String],
        options: syntax::Config,
        kind: MatchKind,
        bound: Option<usize>,
    ) -> Result<Self, String> {
        let (mut longest, mut eager) = (0, true);
        for pattern in patterns {
            let parsed = syntax::parse_with(pattern, &options).map_err(|error| error.to_string())?;
            let facts = parsed.properties();
            if facts.minimum_len().unwrap_or(0) == 0 {
                return Err("it matches the empty text, so it would match everything".into());
            }
            let most = match (facts.maximum_len(), bound) {
                (Some(most), bound) => most.min(bound.unwrap_or(most)),
                (None, Some(bound)) => bound,
                (None, None) => {
                    return Err("a match of it may be of any length, and text is held back while it may still be one: \
                                give the rule max_bytes, or the expression a bound ({0,20} in the place of *)"
                        .into());
                }
            };
            if most > LONGEST_MAX {
                return Err(format!(
                    "a match of it may have {most} bytes; the limit is {LONGEST_MAX} (max_bytes sets a lower one)"
                ));
            }
            let looks = facts.look_set();
            if looks.contains_word_unicode() {
                return Err("word boundaries are available for ASCII only: write (?-u:\\b)".into());
            }
            longest = longest.max(most);
            eager &= looks.is_empty();
        }
        let config = dense::Config::new()
            .start_kind(StartKind::Anchored)
            .match_kind(kind)
            .dfa_size_limit(Some(TABLE_BYTES_MAX))
            .determinize_size_limit(Some(4 * TABLE_BYTES_MAX));
        let dfa = dense::Builder::new()
            .configure(config)
            .thompson(thompson::Config::new().nfa_size_limit(Some(TABLE_BYTES_MAX)))
            .syntax(options)
            .build_many(patterns)
            .map_err(|error| error.to_string())?;
        let mut automaton = Self { dfa, rule, longest: longest as u32, eager, first: None };
        if eager {
            let begin = automaton.begin(None);
            let alive = |byte| !automaton.dfa.is_dead_state(automaton.dfa.next_state(begin, byte));
            let first: Vec<bool> = (0..=255).map(alive).collect();
            automaton.first = <[bool; 256]>::try_from(first).ok().map(Box::new);
        }
        Ok(automaton)
    }

    fn begin(&self, before: Option<u8>) -> StateID {
        let config = start::Config::new().look_behind(before).anchored(Anchored::Yes);
        self.dfa.start_state(&config).expect("the automaton has anchored starts and no quit bytes")
    }

    /// Reads the next character, which is shown at `range`. `before`: the byte before it.
    fn read(
        &self,
        runs: &mut Vec<Run>,
        before: Option<u8>,
        bytes: &[u8],
        range: &Range<u64>,
        hits: &mut Vec<Hit>,
    ) {
        if self.first.as_ref().is_none_or(|first| first[usize::from(bytes[0])]) {
            runs.push(Run { start: range.start, state: self.begin(before), length: 0 });
        }
        let mut hit = |start, end| hits.push(Hit { rule: self.rule, range: start..end });
        for &byte in bytes {
            runs.retain_mut(|run| {
                run.state = self.dfa.next_state(run.state, byte);
                run.length += 1;
                // The automaton tells a match with the byte that follows it.
                if self.dfa.is_match_state(run.state) && !self.eager && run.length - 1 <= self.longest {
                    hit(run.start, range.start);
                }
                !self.dfa.is_dead_state(run.state) && run.length <= self.longest + u32::from(!self.eager)
            });
        }
        if self.eager {
            self.end(runs, range.end, hits);
        }
    }

    /// What matches if the text ends at `end`.
    fn end(&self, runs: &[Run], end: u64, hits: &mut Vec<Hit>) {
        for run in runs {
            if run.length <= self.longest && self.dfa.is_match_state(self.dfa.next_eoi_state(run.state)) {
                hits.push(Hit { rule: self.rule, range: run.start..end });
            }
        }
    }
}

/// A text on its way through several automata.
#[derive(Default)]
pub struct Scan {
    runs: Vec<Vec<Run>>,
    /// The last byte read.
    before: Option<u8>,
    end: u64,
}

impl Scan {
    /// Reads a character that is shown at `range`. All scans of a text take the same automata.
    pub fn read(&mut self, automata: &[Automaton], c: char, range: Range<u64>, hits: &mut Vec<Hit>) {
        self.runs.resize_with(automata.len(), Vec::new);
        let mut buffer = [0; 4];
        let bytes = c.encode_utf8(&mut buffer).as_bytes();
        for (automaton, runs) in automata.iter().zip(&mut self.runs) {
            automaton.read(runs, self.before, bytes, &range, hits);
        }
        self.before = bytes.last().copied();
        self.end = range.end;
    }

    /// The text is over.
    pub fn finish(&mut self, automata: &[Automaton], hits: &mut Vec<Hit>) {
        for (automaton, runs) in automata.iter().zip(&mut self.runs) {
            if !automaton.eager {
                automaton.end(runs, self.end, hits);
            }
            runs.clear();
        }
    }

    /// Where the earliest match begins that may still be coming.
    pub fn oldest(&self) -> Option<u64> {
        self.runs.iter().filter_map(|runs| runs.first()).map(|run| run.start).min()
    }
}

/// All matches in a text; offsets are bytes.
pub fn hits_in(automata: &[Automaton], text: &str) -> Vec<Hit> {
    let (mut scan, mut hits) = (Scan::default(), Vec::new());
    if automata.is_empty() {
        return hits;
    }
    for (at, c) in text.char_indices() {
        scan.read(automata, c, at as u64..(at + c.len_utf8()) as u64, &mut hits);
    }
    scan.finish(automata, &mut hits);
    hits
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ranges(automaton: Automaton, text: &str) -> Vec<(u64, u64)> {
        hits_in(&[automaton], text).into_iter().map(|hit| (hit.range.start, hit.range.end)).collect()
    }

    #[test]
    fn strings_are_taken_as_they_are() {
        let strings = |list: &[&str], case| {
            Automaton::of_strings(0, &list.iter().map(|s| s.to_string()).collect::<Vec<_>>(), case).unwrap()
        };
        assert_eq!(ranges(strings(&["a.c"], false), "abc a.c"), [(4, 7)]);
        assert_eq!(ranges(strings(&["ÄB", "b c"], true), "xäb C"), [(1, 4), (3, 6)]);
        assert_eq!(ranges(strings(&["<&>"], false), "<&>"), [(0, 3)]);
        assert_eq!(ranges(strings(&["ab"], false), "aab"), [(1, 3)]);
        // The Kelvin sign is a k of three bytes.
        assert_eq!(ranges(strings(&["ok"], true), "o\u{212a}"), [(0, 4)]);
    }

    #[test]
    fn regexes_are_bounded_and_look_around() {
        let regex = |pattern, longest| Automaton::of_regex(0, pattern, longest);
        assert_eq!(ranges(regex(r"\d{3}-\d{2}", None).unwrap(), "a 123-45."), [(2, 8)]);
        assert_eq!(
            ranges(regex(r"(?-u:\b)cat(?-u:\b)", None).unwrap(), "cat concat cat"),
            [(0, 3), (11, 14)]
        );
        assert_eq!(ranges(regex(r"^a", None).unwrap(), "aa"), [(0, 1)]);
        assert_eq!(ranges(regex(r"(?m)a$", None).unwrap(), "a\nba"), [(0, 1), (3, 4)]);
        assert_eq!(ranges(regex(r"x[^y]*y", Some(3)).unwrap(), "x12y x1y"), [(5, 8)]);
        for (pattern, said) in [
            ("a*", "empty"),
            ("a+", "max_bytes"),
            ("a{5000}", "4096"),
            (r"\bcat", "ASCII"),
            ("(", "unclosed"),
            (r"(?-u)\xff", "UTF-8"),
        ] {
            let error = regex(pattern, None).err().unwrap_or_else(|| panic!("{pattern} was taken"));
            assert!(error.contains(said), "{pattern}: {error}");
        }
    }

    #[test]
    fn the_oldest_run_is_the_earliest_match_to_come() {
        let automata = [Automaton::of_strings(0, &["abcabd".into()], false).unwrap()];
        let (mut scan, mut hits, mut oldest) = (Scan::default(), Vec::new(), Vec::new());
        for (at, c) in "xabcabcabd".chars().enumerate() {
            scan.read(&automata, c, at as u64..at as u64 + 1, &mut hits);
            oldest.push(scan.oldest());
        }
        let expected =
            [None, Some(1), Some(1), Some(1), Some(1), Some(1), Some(4), Some(4), Some(4), Some(4)];
        assert_eq!(oldest, expected);
        assert_eq!(hits, [Hit { rule: 0, range: 4..10 }]);
    }
}
