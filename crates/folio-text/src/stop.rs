//! Stop strings over streamed text.
//!
//! Owns: the text that may still turn out to begin a stop string. Must never: release part of a stop string that is then
//! completed (unless it is to be included), or keep text back that can no longer be part of one.
//!
//! Invariant: what is released and where it stops depend on the text alone, not on how it was cut into pieces. The match
//! that *ends* first wins; among those ending together, the longest.
//!
//! Cost: each piece is searched once together with at most the longest stop string's length of older text.

#[derive(Clone, Debug, Default)]
pub struct StopMatcher {
    /// Non-empty strings.
    stops: Vec<String>,
    include: bool,
    held: String,
    longest: usize,
}

impl StopMatcher {
    /// `include`: a matched stop string is part of the output. Empty strings are ignored.
    pub fn new(stops: impl IntoIterator<Item = String>, include: bool) -> Self {
        let stops: Vec<String> = stops.into_iter().filter(|stop| !stop.is_empty()).collect();
        let longest = stops.iter().map(String::len).max().unwrap_or(0);
        Self { stops, include, held: String::new(), longest }
    }

    /// Takes text as it is generated; appends to `out` what is safe to show. Returns the index of the stop string
    /// (among the non-empty ones) that ended the text; nothing may be pushed after that.
    pub fn push(&mut self, text: &str, out: &mut String) -> Option<usize> {
        if self.stops.is_empty() {
            out.push_str(text);
            return None;
        }
        self.held.push_str(text);
        if let Some((start, end, index)) = self.first_match() {
            out.push_str(&self.held[..if self.include { end } else { start }]);
            self.held.clear();
            return Some(index);
        }
        let keep = self.prefix_suffix();
        let release = self.held.len() - keep;
        out.push_str(&self.held[..release]);
        self.held.drain(..release);
        None
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
    }

    /// Bytes held back now.
    pub fn held_bytes(&self) -> usize {
        self.held.len()
    }

    /// (start, end, index) of the match that ends first.
    fn first_match(&self) -> Option<(usize, usize, usize)> {
        let matches = self.stops.iter().enumerate().filter_map(|(index, stop)| {
            let start = self.held.find(stop.as_str())?;
            Some((start, start + stop.len(), index))
        });
        matches.min_by_key(|&(start, end, index)| (end, start, index))
    }

    /// Length of the longest suffix of the held text that begins some stop string.
    fn prefix_suffix(&self) -> usize {
        let held = self.held.as_bytes();
        let most = held.len().min(self.longest - 1);
        (1..=most)
            .rev()
            .find(|&len| {
                let suffix = &held[held.len() - len..];
                self.stops.iter().any(|stop| stop.len() > len && stop.as_bytes().starts_with(suffix))
            })
            .unwrap_or(0)
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
}
