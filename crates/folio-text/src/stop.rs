//! Stop strings over streamed text.
//!
//! Owns: the text that may still turn out to begin a stop string. Must never: release part of a stop string that is then
//! completed (unless it is to be included), or keep text back that can no longer be part of one.
//!
//! Invariant: what is released and where it stops depend on the text alone, not on how it was cut into pieces. The match
//! that *ends* first wins; among those ending together, the longest.
//!
//! Cost: each byte of text moves every stop string's automaton by amortized constant work (Knuth, Morris and Pratt, *Fast pattern
//! matching in strings*, 1977), whatever the strings and the text are. Making them is linear in their bytes; a clone shares them.

use std::sync::Arc;

use crate::work;

#[derive(Clone, Debug, Default)]
pub struct StopMatcher {
    /// Of non-empty strings.
    stops: Arc<[Stop]>,
    /// How much of each the text ends with.
    matched: Vec<usize>,
    include: bool,
    /// What was held back, behind some that was released already.
    held: String,
    released: usize,
}

/// A stop string.
#[derive(Debug)]
struct Stop {
    text: Box<str>,
    /// Of the first `n` bytes: the longest end that is also a beginning, and shorter than `n`.
    borders: Box<[u32]>,
}

impl Stop {
    fn new(string: String) -> Self {
        let text = string.as_bytes();
        work::add(text.len());
        let mut borders = vec![0u32; text.len() + 1];
        for end in 1..text.len() {
            let mut border = borders[end] as usize;
            while border > 0 && text[border] != text[end] {
                border = borders[border] as usize;
            }
            borders[end + 1] = (border + usize::from(text[border] == text[end])) as u32;
        }
        Self { text: string.into(), borders: borders.into() }
    }

    /// The text, which ends with the first `matched` bytes, goes on with `byte`. True: it ends with the stop string.
    fn push(&self, matched: &mut usize, byte: u8) -> bool {
        let text = self.text.as_bytes();
        while *matched > 0 && text[*matched] != byte {
            *matched = self.borders[*matched] as usize;
        }
        *matched += usize::from(text[*matched] == byte);
        *matched == text.len()
    }
}

impl StopMatcher {
    /// `include`: a matched stop string is part of the output. Empty strings are ignored.
    pub fn new(stops: impl IntoIterator<Item = String>, include: bool) -> Self {
        let stops: Arc<[Stop]> = stops.into_iter().filter(|stop| !stop.is_empty()).map(Stop::new).collect();
        Self { matched: vec![0; stops.len()], stops, include, held: String::new(), released: 0 }
    }

    /// A stop string, by its index among the non-empty ones.
    pub fn stop(&self, index: usize) -> &str {
        &self.stops[index].text
    }

    /// Takes text as it is generated; appends to `out` what is safe to show. Returns the index of the stop string
    /// (among the non-empty ones) that ended the text; nothing may be pushed after that.
    pub fn push(&mut self, text: &str, out: &mut String) -> Option<usize> {
        if self.stops.is_empty() {
            out.push_str(text);
            return None;
        }
        let before = self.held.len();
        self.held.push_str(text);
        work::add(text.len() * self.stops.len());
        if let Some((end, index)) = self.first_match(text) {
            let end = before + end;
            let start = end - self.stops[index].text.len();
            out.push_str(&self.held[self.released..if self.include { end } else { start }]);
            self.restart();
            return Some(index);
        }
        let keep = self.matched.iter().copied().max().unwrap_or(0);
        let release = self.held.len() - keep;
        out.push_str(&self.held[self.released..release]);
        self.released = release;
        if keep <= release {
            // Moved at most once for each byte that was released.
            work::add(keep);
            self.held.drain(..std::mem::take(&mut self.released));
        }
        None
    }

    /// Lets text through that may not be matched (generated before `min_tokens`): nothing in it begins a stop string.
    pub fn pass(&mut self, text: &str, out: &mut String) {
        self.finish(out);
        out.push_str(text);
    }

    /// The stream ended without a match: what was held back is ordinary text.
    pub fn finish(&mut self, out: &mut String) {
        out.push_str(&self.held[self.released..]);
        self.restart();
    }

    fn restart(&mut self) {
        self.held.clear();
        self.released = 0;
        self.matched.fill(0);
    }

    /// Bytes held back now.
    pub fn held_bytes(&self) -> usize {
        self.held.len() - self.released
    }

    /// The match that ends first in `text`, by its end there, and of those the longest.
    fn first_match(&mut self, text: &str) -> Option<(usize, usize)> {
        for (at, byte) in text.bytes().enumerate() {
            let mut found: Option<usize> = None;
            for index in 0..self.stops.len() {
                let longer = |found: usize| self.stops[index].text.len() > self.stops[found].text.len();
                let better = found.is_none_or(longer);
                if self.stops[index].push(&mut self.matched[index], byte) && better {
                    found = Some(index);
                }
            }
            if let Some(index) = found {
                return Some((at + 1, index));
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stream(stops: &[&str], include: bool, pieces: &[&str]) -> (String, Option<usize>) {
        let mut matcher = StopMatcher::new(stops.iter().map(|s| s.to_string()), include);
        let mut out = String::new();
        for piece in pieces {
            if let Some(index) = matcher.push(piece, &mut out) {
                return (out, Some(index));
            }
        }
        matcher.finish(&mut out);
        (out, None)
    }

    #[test]
    fn a_stop_string_across_pieces_is_cut() {
        assert_eq!(stream(&["###"], false, &["one#", "#", "#two"]), ("one".into(), Some(0)));
        assert_eq!(stream(&["###"], true, &["one#", "#", "#two"]), ("one###".into(), Some(0)));
        assert_eq!(stream(&["###"], false, &["one#", "#", "two"]), ("one##two".into(), None));
    }

    #[test]
    fn possible_beginnings_are_held_and_the_rest_is_not() {
        let mut matcher = StopMatcher::new(["abcabd".to_string()], false);
        let mut out = String::new();
        assert_eq!(matcher.push("xxabcab", &mut out), None);
        assert_eq!((out.as_str(), matcher.held_bytes()), ("xx", 5));
        assert_eq!(matcher.push("c", &mut out), None);
        assert_eq!((out.as_str(), matcher.held_bytes()), ("xxabc", 3));
        assert_eq!(matcher.push("abd!", &mut out), Some(0));
        assert_eq!(out, "xxabc");
    }

    #[test]
    fn the_first_to_end_wins_and_the_longest_of_those() {
        assert_eq!(stream(&["bcd", "b"], false, &["abcd"]), ("a".into(), Some(1)));
        assert_eq!(stream(&["d", "bcd"], false, &["abcd"]), ("a".into(), Some(1)));
    }

    #[test]
    fn multibyte_stops() {
        assert_eq!(stream(&["é。"], false, &["caf", "é", "。x"]), ("caf".into(), Some(0)));
        // "è" and "é" share their first byte.
        assert_eq!(stream(&["é"], false, &["caf", "è"]), ("cafè".into(), None));
    }

    #[test]
    fn text_passed_by_is_no_beginning() {
        let mut matcher = StopMatcher::new(["ab".to_string()], false);
        let mut out = String::new();
        matcher.pass("a", &mut out);
        assert_eq!(matcher.push("b", &mut out), None);
        assert_eq!(out, "ab");
    }

    #[test]
    fn empty_stops_never_match() {
        assert_eq!(stream(&[""], false, &["ab", "c"]), ("abc".into(), None));
    }

    #[test]
    fn cutting_does_not_matter() {
        let text = "aabaabaaab<|x|>";
        for stops in [&["aaab"][..], &["ba", "aab"], &["zz"], &["<|", "b<"]] {
            let whole = stream(stops, false, &[text]);
            for cut in 1..text.len() {
                for second in cut..text.len() {
                    let pieces = [&text[..cut], &text[cut..second], &text[second..]];
                    assert_eq!(stream(stops, false, &pieces), whole, "{stops:?} {pieces:?}");
                }
            }
        }
    }

    /// Against the definition: for every end of the text, whether some stop string ends there.
    #[test]
    fn the_automaton_agrees_with_looking_at_every_end() {
        let stops = ["aab", "aabaa", "b", "abab", "ba|"];
        let mut seed = 7u64;
        for _ in 0..500 {
            let mut text = String::new();
            for _ in 0..24 {
                seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                text.push(['a', 'a', 'b', '|'][(seed >> 60) as usize % 4]);
            }
            for used in [&stops[..2], &stops[3..], &stops[1..2]] {
                let first = (1..=text.len()).find_map(|end| {
                    let ending = used.iter().enumerate().filter(|(_, stop)| text[..end].ends_with(**stop));
                    ending.max_by_key(|(_, stop)| stop.len()).map(|(at, stop)| (end - stop.len(), at))
                });
                let expected = match first {
                    Some((start, at)) => (text[..start].to_owned(), Some(at)),
                    None => (text.clone(), None),
                };
                assert_eq!(stream(used, false, &[&text]), expected, "{text} {used:?}");
            }
        }
    }
}
