//! Added tokens in a text: where a tokenizer recognizes them, before anything else reads the text.
//!
//! Owns: the leftmost-longest search with what Hugging Face's tokenizers let an added token ask for (a word of its own,
//! white space around it), and the rule that nothing is recognized across a *break*: a place in the text where what
//! a client wrote was kept from being read as structure.
//!
//! Cost: linear in the text, however many tokens there are and whatever they ask for.

use std::ops::Range;
use std::sync::LazyLock;

use aho_corasick::{AhoCorasick, Input, MatchKind};
use regex::Regex;

use crate::token_cache::Part;

static WORD: LazyLock<Option<Regex>> = LazyLock::new(|| Regex::new(r"^\w$").ok());

/// What one added token asks for.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Added {
    pub id: u32,
    /// Found only between characters that are part of no word.
    pub single_word: bool,
    /// White space before, and after, belongs to the token.
    pub strips_left: bool,
    pub strips_right: bool,
}

/// A token and the part of the text that it takes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct FoundToken {
    pub id: u32,
    pub range: Range<usize>,
}

/// The added tokens of a tokenizer.
pub(crate) struct AddedTokens {
    automaton: AhoCorasick,
    tokens: Vec<Added>,
}

impl AddedTokens {
    pub(crate) fn new(tokens: impl IntoIterator<Item = (String, Added)>) -> Result<Self, String> {
        let (texts, tokens): (Vec<String>, Vec<Added>) =
            tokens.into_iter().filter(|(text, _)| !text.is_empty()).unzip();
        let automaton = AhoCorasick::builder().match_kind(MatchKind::LeftmostLongest).build(texts);
        Ok(Self { automaton: automaton.map_err(|error| error.to_string())?, tokens })
    }

    /// All tokens in `text`, in order. None lies across one of `breaks` (ascending), and one of a single character
    /// not between two of them.
    pub(crate) fn find(&self, text: &str, breaks: &[usize]) -> Vec<FoundToken> {
        let mut found = Vec::new();
        let (mut from, mut broken) = (0, false);
        for &end in breaks {
            let single = broken && text[from..end].chars().nth(1).is_none();
            if from < end && !single {
                self.find_within(text, from..end, |_| true, &mut found);
            }
            (from, broken) = (end, true);
        }
        self.find_within(text, from..text.len(), |_| true, &mut found);
        found
    }

    /// Those that `accept` takes, whose argument is where the token's own text is.
    pub(crate) fn find_accepted(&self, text: &str, accept: impl Fn(&FoundToken) -> bool) -> Vec<FoundToken> {
        let mut found = Vec::new();
        self.find_within(text, 0..text.len(), accept, &mut found);
        found
    }

    fn find_within(
        &self,
        text: &str,
        span: Range<usize>,
        accept: impl Fn(&FoundToken) -> bool,
        found: &mut Vec<FoundToken>,
    ) {
        for hit in self.automaton.find_iter(Input::new(text).range(span)) {
            let token = self.tokens[hit.pattern().as_usize()];
            let mut range = hit.range();
            if token.single_word && !stands_alone(text, &range) {
                continue;
            }
            if !accept(&FoundToken { id: token.id, range: range.clone() }) {
                continue;
            }
            let taken = found.last().map_or(0, |last| last.range.end).min(range.start);
            if token.strips_left {
                range.start = taken + text[taken..range.start].trim_end().len();
            }
            if token.strips_right {
                range.end += text[range.end..].len() - text[range.end..].trim_start().len();
            }
            found.push(FoundToken { id: token.id, range });
        }
    }
}

fn stands_alone(text: &str, range: &Range<usize>) -> bool {
    let is_word = |c: char| WORD.as_ref().is_some_and(|word| word.is_match(c.encode_utf8(&mut [0; 4])));
    let before = text[..range.start].chars().next_back();
    let after = text[range.end..].chars().next();
    !before.is_some_and(is_word) && !after.is_some_and(is_word)
}

/// The parts of a text of `length` bytes, with and without a token, in order; none is empty.
pub(crate) fn parts(found: &[FoundToken], length: usize) -> Vec<Part> {
    let mut parts = Vec::with_capacity(found.len() * 2 + 1);
    let mut from = 0;
    for FoundToken { id, range } in found {
        let start = range.start.max(from);
        if from < start {
            parts.push((from..start, None));
        }
        parts.push((start..range.end.max(start), Some(*id)));
        from = range.end.max(start);
    }
    if from < length {
        parts.push((from..length, None));
    }
    parts
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tokens(list: &[(&str, Added)]) -> AddedTokens {
        let with_ids =
            list.iter().zip(0..).map(|((text, added), id)| ((*text).to_owned(), Added { id, ..*added }));
        AddedTokens::new(with_ids).expect("builds")
    }

    fn found(tokens: &AddedTokens, text: &str, breaks: &[usize]) -> Vec<(u32, Range<usize>)> {
        tokens.find(text, breaks).into_iter().map(|found| (found.id, found.range)).collect()
    }

    #[test]
    fn the_longest_of_the_leftmost_counts() {
        let plain = Added::default();
        let tokens = tokens(&[("<a>", plain), ("<a>b", plain), ("b", plain)]);
        assert_eq!(found(&tokens, "x<a>bb", &[]), [(1, 1..5), (2, 5..6)]);
        // A break ends the longer one, and then the shorter one counts.
        assert_eq!(found(&tokens, "x<a>bb", &[4]), [(0, 1..4), (2, 4..5), (2, 5..6)]);
        assert_eq!(found(&tokens, "x<a>bb", &[2]), [(2, 4..5), (2, 5..6)]);
        // One character between two breaks is none, elsewhere it is one.
        assert_eq!(found(&tokens, "xbx", &[1, 2]), []);
        assert_eq!(found(&tokens, "xbx", &[1]), [(2, 1..2)]);
    }

    #[test]
    fn tokens_get_what_they_ask_for() {
        let tokens = tokens(&[
            ("<l>", Added { strips_left: true, ..Added::default() }),
            ("<r>", Added { strips_right: true, ..Added::default() }),
            ("word", Added { single_word: true, ..Added::default() }),
        ]);
        assert_eq!(found(&tokens, "a  <l> <r>  <l>b", &[]), [(0, 1..6), (1, 7..12), (0, 12..15)]);
        assert_eq!(found(&tokens, "word words é word", &[]), [(2, 0..4), (2, 14..18)]);
    }

    #[test]
    fn parts_cover_the_text() {
        let of = |id, range| FoundToken { id, range };
        assert_eq!(
            parts(&[of(7, 2..4), of(8, 4..5)], 6),
            [(0..2, None), (2..4, Some(7)), (4..5, Some(8)), (5..6, None)]
        );
        assert_eq!(parts(&[], 3), [(0..3, None)]);
        assert_eq!(parts(&[], 0), []);
    }
}
