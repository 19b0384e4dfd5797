//! Sentencepiece's unigram model: of all ways to write a text in pieces, the one whose scores have the largest sum.
//!
//! The algorithm is sentencepiece's (`unigram_model.cc`, `EncodeOptimized`), with its roundings: sums are kept as f32, and the first of equal ones
//! stays. A character that is no piece is one all the same, with a score below every piece's.
//!
//! Owns: the best way. Must never: know which file a vocabulary is from.
//!
//! Cost: each character with what follows it, as far as a piece may go: linear in the text's length times that of the longest piece.

use std::ops::Range;

use crate::work;

/// What a character that is no piece has less than the least score.
const UNKNOWN_PENALTY: f32 = 10.0;
const UNKNOWN: u32 = u32::MAX;
const NONE: usize = usize::MAX;
/// A byte is compared with those of some pieces.
const BYTE_STEPS: usize = 8;

pub(crate) struct Unigram {
    /// Ids of the pieces, in the order of their bytes.
    sorted: Vec<u32>,
    /// The score of a character that is no piece.
    unknown: f32,
}

/// The last piece of the best way to a place.
#[derive(Clone, Copy)]
struct BestPathNode {
    start: usize,
    /// Of the whole way.
    score: f32,
    id: u32,
}

impl BestPathNode {
    fn offer(&mut self, start: usize, score: f64, id: u32) {
        if self.start == NONE || score > f64::from(self.score) {
            *self = Self { start, score: score as f32, id };
        }
    }
}

impl Unigram {
    /// `pieces`: ids of what texts are written in; `least`: the least score of those that were trained.
    pub(crate) fn new(mut pieces: Vec<u32>, tokens: &[String], least: f32) -> Self {
        pieces.sort_unstable_by(|a, b| tokens[*a as usize].as_bytes().cmp(tokens[*b as usize].as_bytes()));
        Self { sorted: pieces, unknown: least - UNKNOWN_PENALTY }
    }

    /// Where each piece of `text` is, and its id; `None`: a character that is no piece. `tokens` and `scores` are by id.
    pub(crate) fn best(
        &self,
        tokens: &[String],
        scores: &[f32],
        text: &str,
    ) -> Vec<(Range<usize>, Option<u32>)> {
        let mut ways = vec![BestPathNode { start: NONE, score: 0.0, id: UNKNOWN }; text.len() + 1];
        for (start, char) in text.char_indices() {
            let (here, behind) = (ways[start].score, start + char.len_utf8());
            let (mut is_piece, mut looked, mut pieces) = (false, 0, &self.sorted[..]);
            for (depth, byte) in text.as_bytes()[start..].iter().enumerate() {
                looked += 1;
                pieces = going_on(pieces, tokens, depth, *byte);
                let Some(&id) = pieces.first() else { break };
                let end = start + depth + 1;
                if tokens[id as usize].len() == depth + 1 {
                    ways[end].offer(start, f64::from(scores[id as usize]) + f64::from(here), id);
                    is_piece |= end == behind;
                }
            }
            work::add(BYTE_STEPS * looked);
            if !is_piece {
                ways[behind].offer(start, f64::from(self.unknown + here), UNKNOWN);
            }
        }
        let (mut path, mut end) = (Vec::new(), text.len());
        while end > 0 {
            let BestPathNode { start, id, .. } = ways[end];
            path.push((start..end, (id != UNKNOWN).then_some(id)));
            end = start;
        }
        path.reverse();
        path
    }
}

/// Of sorted pieces that begin alike, those with `byte` at `depth`. The first of them may end there.
fn going_on<'a>(pieces: &'a [u32], tokens: &[String], depth: usize, byte: u8) -> &'a [u32] {
    let at = |id: &u32| tokens[*id as usize].as_bytes().get(depth).copied();
    let from = pieces.partition_point(|id| at(id) < Some(byte));
    let to = pieces.partition_point(|id| at(id) <= Some(byte));
    &pieces[from..to]
}
