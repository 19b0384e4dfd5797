//! Characters of JSON as what they stand for: the escapes in its strings are read, everything else is as it is.
//!
//! Invariant: every character handed on has the range of what it was written as; a range that is being read is [`open`].
//! Text that is no valid escape is handed on as it is written. No state depends on being inside a string: outside of strings
//! JSON has no backslash.
//!
//! [`open`]: Escapes::open

use std::ops::Range;

#[derive(Default)]
pub struct Escapes {
    /// An escape that is not complete: its characters with their ranges.
    held: Vec<(char, Range<u64>)>,
}

/// What the characters of an escape are.
enum Escape {
    Incomplete,
    Is(char),
    /// A surrogate without its other half.
    Lone,
    None,
}

impl Escapes {
    /// The next character, written at `range`.
    pub fn read(&mut self, c: char, range: Range<u64>, mut out: impl FnMut(char, Range<u64>)) {
        if self.held.is_empty() && c != '\\' {
            return out(c, range);
        }
        self.held.push((c, range));
        loop {
            match escape(&self.held) {
                Escape::Incomplete => return,
                Escape::Is(c) => {
                    let range = self.held[0].1.start..self.held[self.held.len() - 1].1.end;
                    self.held.clear();
                    return out(c, range);
                }
                // Six characters that stand for nothing; what follows is read for itself.
                Escape::Lone => {
                    let range = self.held[0].1.start..self.held[5].1.end;
                    self.held.drain(..6);
                    out(char::REPLACEMENT_CHARACTER, range);
                }
                Escape::None => {
                    let (c, range) = self.held.remove(0);
                    out(c, range);
                    // Characters behind a backslash that is none are plain up to the next backslash.
                    let plain = self.held.iter().take_while(|(c, _)| *c != '\\').count();
                    self.held.drain(..plain).for_each(|(c, range)| out(c, range));
                }
            }
            if self.held.is_empty() {
                return;
            }
        }
    }

    /// Nothing follows.
    pub fn finish(&mut self, mut out: impl FnMut(char, Range<u64>)) {
        self.held.drain(..).for_each(|(c, range)| out(c, range));
    }

    /// Where an incomplete escape begins.
    pub fn open(&self) -> Option<u64> {
        self.held.first().map(|(_, range)| range.start)
    }
}

fn escape(held: &[(char, Range<u64>)]) -> Escape {
    let Some((kind, _)) = held.get(1) else { return Escape::Incomplete };
    match kind {
        '"' | '\\' | '/' => return Escape::Is(*kind),
        'b' => return Escape::Is('\u{8}'),
        'f' => return Escape::Is('\u{c}'),
        'n' => return Escape::Is('\n'),
        'r' => return Escape::Is('\r'),
        't' => return Escape::Is('\t'),
        'u' => {}
        _ => return Escape::None,
    }
    let first = match unit(&held[2..]) {
        Ok(unit) => unit,
        Err(other) => return other,
    };
    if let Some(c) = char::from_u32(first) {
        return Escape::Is(c);
    }
    let high = (0xd800..0xdc00).contains(&first);
    let follows = |at: usize, expected: char| held.get(at).map(|(c, _)| *c == expected);
    match (high, follows(6, '\\'), follows(7, 'u')) {
        (true, None, _) | (true, Some(true), None) => return Escape::Incomplete,
        (true, Some(true), Some(true)) => {}
        _ => return Escape::Lone,
    }
    match unit(&held[8..]) {
        Ok(low @ 0xdc00..0xe000) => {
            let c = char::from_u32(0x10000 + ((first - 0xd800) << 10) + (low - 0xdc00));
            c.map_or(Escape::Lone, Escape::Is)
        }
        Err(Escape::Incomplete) => Escape::Incomplete,
        _ => Escape::Lone,
    }
}

/// Four hexadecimal digits.
fn unit(held: &[(char, Range<u64>)]) -> Result<u32, Escape> {
    let mut value = 0;
    for (c, _) in held.iter().take(4) {
        value = value << 4 | c.to_digit(16).ok_or(Escape::None)?;
    }
    if held.len() < 4 { Err(Escape::Incomplete) } else { Ok(value) }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What is read, and the text of every range.
    fn read(text: &str) -> (String, Vec<&str>) {
        let (mut escapes, mut said, mut ranges) = (Escapes::default(), String::new(), Vec::new());
        let mut take = |c, range: Range<u64>| {
            said.push(c);
            ranges.push(&text[range.start as usize..range.end as usize]);
        };
        for (at, c) in text.char_indices() {
            escapes.read(c, at as u64..(at + c.len_utf8()) as u64, &mut take);
        }
        escapes.finish(&mut take);
        (said, ranges)
    }

    #[test]
    fn escapes_are_what_they_stand_for() {
        let (said, ranges) = read(r#"{"a": "b\u0041\n\ud83d\ude00é"}"#);
        assert_eq!(said, "{\"a\": \"bA\n😀é\"}");
        assert!(ranges.contains(&r"\u0041") && ranges.contains(&r"\ud83d\ude00"));
        for (text, expected) in [
            (r"\x\n", "\\x\n"),
            (r"\u12", r"\u12"),
            (r"\u12\n", "\\u12\n"),
            (r"\ud83dx", "\u{fffd}x"),
            (r"\ud83d\u0041", "\u{fffd}A"),
            (r"\ud83d\n", "\u{fffd}\n"),
            (r"\ude00", "\u{fffd}"),
            (r"\\u0041", r"\u0041"),
            (r"\u00e9", "é"),
        ] {
            let (said, ranges) = read(text);
            assert_eq!(said, expected);
            assert_eq!(ranges.concat(), text, "nothing is lost");
        }
    }
}
