//! Stop strings over streamed text.
//!
//! Owns: the text that may still turn out to begin a stop string. Must never: release part of a stop string that is then
//! completed (unless it is to be included), or keep text back that can no longer be part of one.
//!
//! Invariant: what is released and where it stops depend on the text alone, not on how it was cut into pieces. The match
//! that *ends* first wins; among those ending together, the longest.
//!
//! Cost: linear in the text, for each stop string (Knuth, Morris and Pratt's search), whatever the strings look like.

#[derive(Clone, Debug, Default)]
pub struct StopMatcher {
    stops: Vec<Stop>,
    include: bool,
    /// Text that begins a stop string.
    held: String,
    /// Bytes compared, for tests.
    #[cfg(test)]
    compared: usize,
}

/// One stop string, which is not empty, and how far the text that ends here agrees with it.
#[derive(Clone, Debug)]
struct Stop {
    text: String,
    /// Behind so many bytes, the longest beginning that is their end as well.
    shorter: Vec<usize>,
    matched: usize,
}

impl Stop {
    fn new(text: String) -> Self {
        let mut stop = Self { shorter: vec![0], matched: 0, text };
        for at in 1..stop.text.len() {
            stop.step(stop.text.as_bytes()[at]);
            stop.shorter.push(stop.matched);
        }
        stop.matched = 0;
        stop
    }

    /// Takes one byte of text; how many comparisons that took.
    fn step(&mut self, byte: u8) -> usize {
        let mut compared = 1;
        while self.matched > 0 && self.text.as_bytes().get(self.matched) != Some(&byte) {
            self.matched = self.shorter[self.matched - 1];
            compared += 1;
        }
        self.matched += usize::from(self.text.as_bytes()[self.matched] == byte);
        compared
    }
}

impl StopMatcher {
    /// `include`: a matched stop string is part of the output. Empty strings are ignored.
    pub fn new(stops: impl IntoIterator<Item = String>, include: bool) -> Self {
        let stops = stops.into_iter().filter(|stop| !stop.is_empty()).map(Stop::new).collect();
        Self { stops, include, ..Self::default() }
    }

    /// Takes text as it is generated; appends to `out` what is safe to show. Returns the index of the stop string
    /// (among the non-empty ones) that ended the text; nothing may be pushed after that.
    pub fn push(&mut self, text: &str, out: &mut String) -> Option<usize> {
        let before = self.held.len();
        self.held.push_str(text);
        for (end, byte) in (before + 1..).zip(text.bytes()) {
            if let Some((index, length)) = self.step(byte) {
                out.push_str(&self.held[..if self.include { end } else { end - length }]);
                self.held.clear();
                return Some(index);
            }
        }
        let keep = self.stops.iter().map(|stop| stop.matched).max().unwrap_or(0);
        out.extend(self.held.drain(..self.held.len() - keep));
        None
    }

    /// Of the stop strings that end with this byte, the longest: its index and length.
    fn step(&mut self, byte: u8) -> Option<(usize, usize)> {
        let mut ended: Option<(usize, usize)> = None;
        for (index, stop) in self.stops.iter_mut().enumerate() {
            let compared = stop.step(byte);
            #[cfg(test)]
            {
                self.compared += compared;
            }
            #[cfg(not(test))]
            let _ = compared;
            let length = stop.text.len();
            if stop.matched == length && ended.is_none_or(|(_, longest)| length > longest) {
                ended = Some((index, length));
            }
        }
        ended
    }

    /// Lets text through that may not be matched (generated before `min_tokens`): nothing in it begins a stop string.
    pub fn pass(&mut self, text: &str, out: &mut String) {
        self.finish(out);
        out.push_str(text);
    }

    /// The stream ended without a match: what was held back is ordinary text.
    pub fn finish(&mut self, out: &mut String) {
        out.push_str(&self.held);
        self.held.clear();
        self.stops.iter_mut().for_each(|stop| stop.matched = 0);
    }

    /// Bytes held back now.
    pub fn held_bytes(&self) -> usize {
        self.held.len()
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

    /// Twice the text, or twice the stop string, is at most twice the work.
    #[test]
    fn work_is_linear() {
        let work = |stop: &str, text: &str| {
            let mut matcher = StopMatcher::new([stop.to_owned(), format!("{stop}c")], false);
            let mut out = String::new();
            text.chars().for_each(|c| assert_eq!(matcher.push(c.encode_utf8(&mut [0; 4]), &mut out), None));
            matcher.compared
        };
        let stop = |n| "a".repeat(n) + "b";
        for n in [500, 1000, 2000] {
            let (once, twice) = (work(&stop(n), &"a".repeat(4 * n)), work(&stop(2 * n), &"a".repeat(8 * n)));
            assert!(twice * 10 <= once * 23, "{once} {twice}");
            let mixed = |n: usize| work(&stop(50), &("a".repeat(49) + "x").repeat(n));
            assert!(mixed(2 * n) * 10 <= mixed(n) * 23);
        }
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
}
