//! Sentencepiece's normalizer (`normalizer.cc`): how a text is written before it is cut into pieces.
//!
//! Owns: the rules of a [`Charsmap`], and what becomes of spaces. Must never: know which file it is from.
//!
//! Cost: linear in the text; what comes of it is bounded by what a [`Charsmap`] may write.

use crate::charsmap::Charsmap;
use crate::pieces::SPACE;

pub(crate) struct Normalizer {
    pub charsmap: Option<Charsmap>,
    /// Spaces are left out behind a space, and at both ends.
    pub removes_extra_spaces: bool,
    /// [`SPACE`] is written for a space.
    pub escapes_spaces: bool,
}

/// What a text begins with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PartStart {
    AsItIs,
    /// A space is put before it.
    Prefixed,
    /// A space at the beginning is none at an end.
    Continued,
}

impl Normalizer {
    /// Texts stay as they are, but for how spaces are written.
    pub(crate) const IDENTITY: Self =
        Self { charsmap: None, removes_extra_spaces: false, escapes_spaces: true };

    pub(crate) fn normalize(&self, text: &str, start: PartStart) -> String {
        let space = if self.escapes_spaces { SPACE } else { " " };
        let mut rest = text;
        let mut behind_space = self.removes_extra_spaces && start != PartStart::Continued;
        if behind_space {
            while let (" ", length) = self.first(rest) {
                rest = &rest[length..];
            }
        }
        if rest.is_empty() {
            return String::new();
        }
        let mut out = String::with_capacity(rest.len() + rest.len() / 4 + space.len());
        if start == PartStart::Prefixed {
            out.push_str(space);
        }
        while !rest.is_empty() {
            let (mut written, length) = self.first(rest);
            rest = &rest[length..];
            if behind_space {
                written = written.trim_start_matches(' ');
            }
            if written.is_empty() {
                continue;
            }
            behind_space = self.removes_extra_spaces && written.ends_with(' ');
            out.extend(written.split_inclusive(' ').flat_map(|word| match word.strip_suffix(' ') {
                Some(word) => [word, space],
                None => [word, ""],
            }));
        }
        if self.removes_extra_spaces {
            out.truncate(out.trim_end_matches(space).len());
        }
        out
    }

    /// What a beginning of `text` is written as, and its bytes. Of an empty text that is nothing.
    fn first<'a>(&'a self, text: &'a str) -> (&'a str, usize) {
        let length = match &self.charsmap {
            Some(map) => match map.longest(text) {
                Some(written) => return written,
                None => text.chars().next().map_or(0, char::len_utf8),
            },
            // A space, or all before the next one.
            None => text.find(' ').map_or(text.len(), |place| place.max(1)),
        };
        (&text[..length], length)
    }
}
