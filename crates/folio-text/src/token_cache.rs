//! Texts that were tokenized before: a conversation comes again with every turn, and only its end is new.
//!
//! Owns: where a text is cut into segments, and what a segment is found by. Must never: keep anything itself, or know
//! whose text it is: a [`TokenCache`] belongs to one tenant, since by the time that a look-up saves anybody could tell what was
//! tokenized before.
//!
//! Invariant: the ids are those of the whole text. A cut lies behind an added token that was found in the whole text:
//! there every tokenizer cuts first, and what lies between two such tokens is normalized, cut into words and merged by
//! itself. A segment's key is a digest of all that decides its ids: which tokens were found, the texts between them, the
//! breaks inside those, and whether it begins the text.
//!
//! Cost: a digest of the text, once, and a look-up for each segment; of what is found nothing is tokenized.

use std::ops::Range;
use std::sync::Arc;

use crate::work;

/// Digest of a segment.
pub type SegmentKey = [u8; 32];

/// Keeps the ids of segments between calls, for one tenant.
pub trait TokenCache {
    fn find(&self, key: &SegmentKey) -> Option<Arc<[u32]>>;
    fn keep(&self, key: SegmentKey, ids: &[u32]);
}

/// A part of a text, and the added token that it is.
pub(crate) type Part = (Range<usize>, Option<u32>);

/// Shortest segment but the last, bytes: an entry takes some 200 besides its ids.
const SEGMENT_BYTES: usize = 1024;

/// `parts` cut into segments. Where a segment ends depends on nothing behind it.
pub(crate) fn segments(parts: &[Part]) -> impl Iterator<Item = &[Part]> {
    let mut from = 0;
    parts.split_inclusive(move |(range, token)| {
        let ends = token.is_some() && range.end - from >= SEGMENT_BYTES;
        if ends {
            from = range.end;
        }
        ends
    })
}

/// `breaks`: those of the text, if it is a prompt.
pub(crate) fn key(text: &str, segment: &[Part], breaks: Option<&[usize]>) -> SegmentKey {
    let number = |number: usize| (number as u64).to_le_bytes();
    let mut digest = blake3::Hasher::new();
    let at_start = segment.first().is_some_and(|(range, _)| range.start == 0);
    digest.update(&[u8::from(at_start), u8::from(breaks.is_some())]);
    for (range, token) in segment {
        if let Some(id) = token {
            digest.update(&[1]).update(&id.to_le_bytes());
            continue;
        }
        work::add(range.len());
        digest.update(&[0]).update(&number(range.len())).update(&text.as_bytes()[range.clone()]);
        let breaks = breaks.unwrap_or_default();
        let inside = |at: usize| breaks.partition_point(|place| *place < at);
        let breaks = &breaks[inside(range.start + 1)..inside(range.end)];
        digest.update(&number(breaks.len()));
        breaks.iter().for_each(|place| {
            digest.update(&number(place - range.start));
        });
    }
    digest.finalize().into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn segments_end_behind_tokens_and_keep_their_ends_when_the_text_grows() {
        let mut parts: Vec<Part> = Vec::new();
        let mut at = 0;
        for length in [10, 700, 400, 3000, 5, 1, 1030, 20] {
            parts.push((at..at + length, None));
            parts.push((at + length..at + length + 4, Some(7)));
            at += length + 4;
        }
        parts.push((at..at + 5000, None));
        let ends = |parts: &[Part]| -> Vec<usize> {
            segments(parts).map(|segment| segment.last().expect("not empty").0.end).collect()
        };
        let all = ends(&parts);
        assert_eq!(all, [1122, 4126, 5174, 10198]);
        for count in 0..parts.len() {
            let some = ends(&parts[..count]);
            let same = some.len().saturating_sub(1);
            assert_eq!(some[..same], all[..same]);
            assert_eq!(some.last().copied(), parts[..count].last().map(|part| part.0.end));
        }
    }

    #[test]
    fn a_key_is_of_all_that_decides_ids() {
        let (text, other) = ("a<s>bc", "a<s>bd");
        let parts = [(0..1, None), (1..4, Some(3)), (4..6, None)];
        let mut keys = vec![
            key(text, &parts, None),
            key(text, &parts, Some(&[])),
            key(text, &parts, Some(&[5])),
            key(other, &parts, None),
            key(text, &[(0..1, None), (1..4, Some(4)), (4..6, None)], None),
            key(text, &[(0..6, None)], None),
            key(text, &parts[1..], None),
            key(text, &parts[..2], None),
        ];
        // Breaks at the edges of a part lie in no token.
        assert_eq!(key(text, &parts, Some(&[0, 1, 2, 4, 6])), keys[1]);
        // It does not matter where a segment is, but whether it is first.
        assert_eq!(key("xa<s>bc", &[(2..5, Some(3)), (5..7, None)], None), keys[6]);
        assert_ne!(key("xa<s>bc", &[(1..2, None)], None), key("a", &[(0..1, None)], None));
        let count = keys.len();
        keys.sort();
        keys.dedup();
        assert_eq!(keys.len(), count);
    }
}
