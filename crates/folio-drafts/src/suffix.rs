//! What comes next, by what came next where the same was said before.
//!
//! Owns: the choice among places of texts. Must never: know requests. Scores are those of Arctic's suffix decoding (arXiv 2411.04975):
//! for each length of match, follow the most frequent token among the places that match so far, as long as its share of them stays
//! probable and no longer than the match; the sum of the shares is the number of tokens that will be accepted, if the past is a guide.
//! The best length wins, of equals the longer.
//!
//! Of each text the newest [`COMPARED_MAX`] places with the same last two tokens are compared, no further back than [`DEPTH`] tokens, and
//! the [`PLACES_MAX`] that match furthest are counted: so the cost is bounded but for a probe for each block of an index.

use super::index::SEPARATOR;
use super::text::View;

/// Longest match that is told from a longer one.
pub const DEPTH: usize = 24;
/// Newest places of a text that are compared, and those of them that are counted. With only the latter compared, sources that are given back with changes
/// have a tenth fewer tokens a step: the place that goes on is behind newer ones.
pub const COMPARED_MAX: usize = 64;
pub const PLACES_MAX: usize = 8;
/// Less probable tokens end a draft.
const PROBABLE: f64 = 0.1;
/// Shortest match of n-gram lookup.
const NGRAM_MIN: usize = 3;
/// Last tokens that may all be others than a text has, and of how many of the last [`DEPTH`] so many are the same at least, where it begins to
/// be followed. Of source that is given back with changes and has 5.1 tokens a step without this, 3 of 24 made 4.6: some of its blanks and
/// signs stand everywhere.
const OTHERS_MAX: usize = 2;
pub const SAME_MIN: (usize, usize) = (2, 3);
/// From there on it is followed while of the last so many tokens a few are the same.
pub const LAST: usize = 8;
pub const LAST_SAME_MIN: usize = 2;

/// A place, and how much before it matches.
#[derive(Clone, Copy, Debug)]
struct Place {
    text: usize,
    next: usize,
    matched: usize,
}

/// Where a text goes on that is said but for some tokens, as far as it was found: its place there less the tokens that were said.
#[derive(Clone, Copy, Debug, Default)]
pub struct Alignment(Option<usize>);

impl Alignment {
    /// The place behind so many tokens, if something follows it.
    fn place(self, said: usize, text: View<'_>) -> Option<usize> {
        self.0.map(|place| place.wrapping_add(said)).filter(|place| *place < text.tokens.len())
    }
}

/// Memory for looking, reused.
#[derive(Debug, Default)]
pub struct Search {
    places: Vec<Place>,
    alive: Vec<Place>,
    path: Vec<u32>,
}

impl Search {
    /// Replaces `drafts` by what most probably follows `context` in `texts`, at most `most` tokens. Returns the tokens of it that can
    /// be expected to be right; 0.0: nothing is known.
    pub fn suffix(&mut self, texts: &[View<'_>], context: &[u32], most: usize, drafts: &mut Vec<u32>) -> f64 {
        drafts.clear();
        self.find(texts, context);
        let mut best = 0.0;
        let mut end = 0;
        while end < self.places.len() {
            let matched = self.places[end].matched;
            end += self.places[end..].iter().take_while(|place| place.matched == matched).count();
            let score = self.follow(texts, end, most.min(matched));
            if score > best {
                best = score;
                std::mem::swap(drafts, &mut self.path);
            }
        }
        best
    }

    /// The same by n-gram lookup: what followed the newest of the longest matches, of at least three tokens.
    pub fn ngram(&mut self, texts: &[View<'_>], context: &[u32], most: usize, drafts: &mut Vec<u32>) {
        drafts.clear();
        self.find(texts, context);
        let Some(place) = self.places.first().filter(|place| place.matched >= NGRAM_MIN) else { return };
        let next = texts[place.text].tokens[place.next..].iter().copied();
        drafts.extend(next.take_while(|token| *token != SEPARATOR).take(most));
    }

    /// Replaces `drafts` by what follows in a text that is said but for some tokens: at the place where most of the last [`DEPTH`] tokens of
    /// `context` stand, even if the last two are others; where none has most of them, at the one where it went on before (`alignment`, of this
    /// text and a context that grows). No more tokens than are the same there. Returns how many of the last [`LAST`] are; 0: nothing.
    pub fn aligned(
        &self,
        text: View<'_>,
        context: &[u32],
        alignment: &mut Alignment,
        most: usize,
        drafts: &mut Vec<u32>,
    ) -> usize {
        drafts.clear();
        let said = context.len();
        let context = &context[said.saturating_sub(DEPTH)..];
        let (mut same, mut next) = (0, 0);
        for others in 0..=OTHERS_MAX.min(context.len()) {
            let places = text.places(&context[..context.len() - others]).take(COMPARED_MAX);
            for place in places.map(|place| place + others).filter(|place| *place < text.tokens.len()) {
                let found = text.same(context, place);
                if found > same {
                    (same, next) = (found, place);
                }
            }
        }
        if same * SAME_MIN.1 < context.len() * SAME_MIN.0 || same == 0 {
            let Some(place) = alignment.place(said, text) else { return 0 };
            (same, next) = (text.same(context, place), place);
        }
        let last = text.same(&context[context.len().saturating_sub(LAST)..], next);
        if last < LAST_SAME_MIN {
            return 0;
        }
        alignment.0 = Some(next.wrapping_sub(said));
        drafts.extend(text.tokens[next..].iter().take(most.min(same)));
        last
    }

    /// The longest match of what was looked for last.
    pub fn longest(&self) -> usize {
        self.places.first().map_or(0, |place| place.matched)
    }

    /// The longest match first; of equals the order of texts, and in a text the newest.
    fn find(&mut self, texts: &[View<'_>], context: &[u32]) {
        let context = &context[context.len().saturating_sub(DEPTH)..];
        let key =
            |place: &Place| (std::cmp::Reverse(place.matched), place.text, std::cmp::Reverse(place.next));
        self.places.clear();
        for (at, text) in texts.iter().enumerate() {
            let from = self.places.len();
            let places = text.places(context).take(COMPARED_MAX);
            self.places.extend(places.map(|next| Place {
                text: at,
                next,
                matched: text.matched(context, next),
            }));
            self.places[from..].sort_unstable_by_key(key);
            self.places.truncate(from + PLACES_MAX);
        }
        self.places.sort_unstable_by_key(key);
    }

    /// Leaves in `path` what the first `end` places go on with, and returns its score.
    fn follow(&mut self, texts: &[View<'_>], end: usize, most: usize) -> f64 {
        self.alive.clear();
        self.alive.extend_from_slice(&self.places[..end]);
        self.path.clear();
        let (mut score, mut probability) = (0.0, 1.0);
        let next = |place: &Place| texts[place.text].tokens.get(place.next).copied().unwrap_or(SEPARATOR);
        while self.path.len() < most {
            // The most frequent; of equals that of the first place.
            let (mut token, mut count) = (SEPARATOR, 0);
            for (at, place) in self.alive.iter().enumerate() {
                let own = next(place);
                let more = self.alive[at..].iter().filter(|other| next(other) == own).count();
                if own != SEPARATOR && more > count {
                    (token, count) = (own, more);
                }
                if count >= self.alive.len() - at {
                    break;
                }
            }
            probability *= count as f64 / self.alive.len().max(1) as f64;
            if count == 0 || probability < PROBABLE {
                break;
            }
            score += probability;
            self.path.push(token);
            self.alive.retain_mut(|place| {
                let goes_on = next(place) == token;
                place.next += 1;
                goes_on
            });
        }
        score
    }
}
