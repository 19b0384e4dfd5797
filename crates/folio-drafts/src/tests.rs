use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::sync::Arc;

use proptest::prelude::*;

use super::answers::Answers;
use super::index::{BLOCK_TOKENS, IndexBlock, IndexCache, NoIndexCache, PairIndex, SEPARATOR};
use super::suffix::{Alignment, COMPARED_MAX, DEPTH, LAST, LAST_SAME_MIN, PLACES_MAX, Search};
use super::text::{GrowingText, TOKEN_BYTES, View};

/// What `Search::suffix` says, from all of every text, by counting.
fn oracle(texts: &[Vec<u32>], context: &[u32], most: usize) -> (f64, Vec<u32>) {
    let context = &context[context.len().saturating_sub(DEPTH)..];
    let mut places: Vec<(usize, usize, usize)> = Vec::new();
    for (at, text) in texts.iter().enumerate() {
        let matched = |next: usize| {
            (0..context.len().min(next))
                .take_while(|back| {
                    text[next - 1 - back] == context[context.len() - 1 - back]
                        && text[next - 1 - back] != SEPARATOR
                })
                .count()
        };
        let found = (2..text.len()).rev().map(|next| (matched(next), at, next)).filter(|(m, ..)| *m >= 2);
        let mut found: Vec<_> = found.take(COMPARED_MAX).collect();
        found.sort_by_key(|(m, _, next)| (std::cmp::Reverse(*m), std::cmp::Reverse(*next)));
        places.extend(found.into_iter().take(PLACES_MAX));
    }
    let (mut best, mut drafts) = (0.0, Vec::new());
    for length in (2..=DEPTH).rev() {
        let mut alive: Vec<_> = places.iter().filter(|(m, ..)| *m >= length).copied().collect();
        if !alive.iter().any(|(m, ..)| *m == length) {
            continue;
        }
        alive.sort_by_key(|(m, at, next)| (std::cmp::Reverse(*m), *at, std::cmp::Reverse(*next)));
        let (mut score, mut probability, mut path) = (0.0, 1.0, Vec::new());
        while path.len() < most.min(length) {
            let next: Vec<u32> = alive
                .iter()
                .map(|(_, at, next)| texts[*at].get(*next).copied().unwrap_or(SEPARATOR))
                .collect();
            let votes = |token: u32| next.iter().filter(|other| **other == token).count();
            let real = next.iter().copied().filter(|token| *token != SEPARATOR);
            let Some(count) = real.clone().map(votes).max() else { break };
            let Some(token) = real.clone().find(|token| votes(*token) == count) else { break };
            probability *= count as f64 / alive.len() as f64;
            if probability < 0.1 {
                break;
            }
            score += probability;
            path.push(token);
            let on = alive.iter().zip(&next).filter(|(_, next)| **next == token);
            alive = on.map(|((m, at, next), _)| (*m, *at, next + 1)).collect();
        }
        if score > best {
            (best, drafts) = (score, path);
        }
    }
    (best, drafts)
}

fn text() -> impl Strategy<Value = Vec<u32>> {
    let token = prop_oneof![8 => 0u32..4, 1 => Just(SEPARATOR)];
    proptest::collection::vec(token, 0..120)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn a_draft_is_what_counting_finds(
        texts in proptest::collection::vec(text(), 1..4),
        context in proptest::collection::vec(0u32..4, 0..40),
        most in 0usize..20,
    ) {
        let indexed: Vec<GrowingText> = texts.iter().map(|text| GrowingText::of(text, 0)).collect();
        let indexed: Vec<View<'_>> = indexed.iter().map(GrowingText::view).collect();
        let mut drafts = vec![7];
        let score = Search::default().suffix(&indexed, &context, most, &mut drafts);
        let (expected, path) = oracle(&texts, &context, most);
        prop_assert_eq!(&drafts, &path);
        prop_assert!((score - expected).abs() < 1e-9);
    }

    #[test]
    fn a_lookup_is_what_followed_the_newest_longest_match(
        text in text(),
        context in proptest::collection::vec(0u32..4, 0..40),
        most in 0usize..20,
    ) {
        let mut drafts = vec![7];
        Search::default().ngram(&[GrowingText::of(&text, 0).view()], &context, most, &mut drafts);
        // Among the places that are looked at.
        let depth = context.len().min(DEPTH);
        let context = &context[context.len() - depth..];
        let ends = |next: usize, length: usize| {
            length <= next && length <= depth && text[next - length..next] == context[depth - length..]
        };
        let places = (2..text.len()).rev().filter(|next| depth >= 2 && ends(*next, 2)).take(COMPARED_MAX);
        let length = |next: &usize| (2..=depth).rev().find(|length| ends(*next, *length)).unwrap_or(0);
        let places: Vec<usize> = places.collect();
        let place = places.into_iter().rev().max_by_key(length).filter(|next| length(next) >= 3);
        let expected: Vec<u32> = place.map_or(Vec::new(), |next| {
            text[next..].iter().copied().take_while(|token| *token != SEPARATOR).take(most).collect()
        });
        prop_assert_eq!(drafts, expected);
    }

    #[test]
    fn what_is_expected_is_followed_where_most_of_the_last_tokens_stand(
        text in proptest::collection::vec(0u32..6, 0..60),
        said in any::<proptest::sample::Index>(),
        others in proptest::collection::vec((0usize..40, 0u32..6), 0..14),
        most in 0usize..20,
    ) {
        let mut context = text[..said.index(text.len() + 1)].to_vec();
        others.iter().for_each(|(at, token)| context.iter_mut().rev().nth(*at).into_iter().for_each(|old| *old = *token));
        let mut drafts = vec![7];
        let (view, alignment) = (GrowingText::of(&text, 0), &mut Alignment::default());
        let same = Search::default().aligned(view.view(), &context, alignment, most, &mut drafts);
        let depth = context.len().min(DEPTH);
        let context = &context[context.len() - depth..];
        let same_at = |next: usize, depth: usize| {
            (1..=depth.min(next)).filter(|back| text[next - back] == context[context.len() - back]).count()
        };
        // Two neighbours among the last four tokens are the same.
        let is_found = |next: &usize| {
            (0..=2).any(|others| {
                depth >= others + 2 && *next >= others + 2
                    && text[next - others - 2..next - others] == context[depth - others - 2..depth - others]
            })
        };
        let found: Vec<usize> = (0..text.len()).filter(is_found).collect();
        let most_same = found.iter().map(|next| same_at(*next, depth)).max().unwrap_or(0);
        let goes_on = |next: &usize| {
            let last = same_at(*next, depth.min(LAST));
            let is_followed = 3 * most_same >= 2 * depth && last >= LAST_SAME_MIN;
            let drafted = if is_followed { text[*next..].iter().take(most.min(most_same)) } else { [].iter().take(0) };
            same == if is_followed { last } else { 0 } && drafted.eq(drafts.iter())
        };
        let mut best = found.iter().filter(|next| same_at(**next, depth) == most_same);
        prop_assert!(best.any(goes_on) || (found.is_empty() && same == 0 && drafts.is_empty()));
    }
}

/// Says `told`, and looks what is expected of `text` before each token. Returns whether something was, and whether it was right.
fn expected(text: &[u32], told: &[u32]) -> Vec<(bool, bool)> {
    let text = GrowingText::of(text, 0);
    let (search, mut alignment, mut drafts) = (Search::default(), Alignment::default(), Vec::new());
    let mut at = |said: usize| {
        search.aligned(text.view(), &told[..said], &mut alignment, 4, &mut drafts);
        (!drafts.is_empty(), drafts.first() == Some(&told[said]))
    };
    (0..told.len()).map(&mut at).collect()
}

#[test]
fn a_text_is_followed_where_each_second_token_is_another() {
    let text: Vec<u32> = (0..400).collect();
    let told: Vec<u32> =
        text.iter().map(|token| token + 1000 * u32::from(*token > 9 && token % 2 == 0)).collect();
    let expected = expected(&text, &told);
    for (at, expected) in expected.into_iter().enumerate().skip(10) {
        assert_eq!(expected, (true, at % 2 == 1), "{at}");
    }
}

#[test]
fn what_is_put_in_ends_what_is_expected_and_most_of_the_last_tokens_begin_it_again() {
    let text: Vec<u32> = (0..80).collect();
    let told: Vec<u32> = (0..40).chain(1000..1020).chain(40..80).collect();
    let expected = expected(&text, &told);
    let all = |range: std::ops::Range<usize>| {
        expected[range].iter().filter(|(is_expected, _)| *is_expected).count()
    };
    assert_eq!(
        all(40..60),
        LAST - LAST_SAME_MIN + 1,
        "the first is not known to be another, and so many more"
    );
    // Until then the suffix is what tells.
    assert_eq!(all(60..76), 0);
    assert!(expected[76..].iter().all(|expected| *expected == (true, true)));
}

/// Keeps everything, and counts the tokens of what is made.
#[derive(Default)]
struct Everything {
    blocks: RefCell<HashMap<Vec<u32>, Arc<IndexBlock>>>,
    made: Cell<usize>,
}

impl IndexCache for Everything {
    fn block(&self, tokens: &[u32], make: &dyn Fn() -> Arc<IndexBlock>) -> Arc<IndexBlock> {
        let mut blocks = self.blocks.borrow_mut();
        let of_these = blocks.entry(tokens.into()).or_insert_with(|| {
            self.made.set(self.made.get() + BLOCK_TOKENS);
            make()
        });
        of_these.clone()
    }
}

/// Text in which most pairs are rare and some tokens stand between texts.
fn long_text() -> impl Strategy<Value = Vec<u32>> {
    let token = prop_oneof![200 => 0u32..50, 1 => Just(SEPARATOR)];
    proptest::collection::vec(token, 1..3 * BLOCK_TOKENS)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn an_index_of_kept_blocks_drafts_as_one_that_is_made_anew(
        first in long_text(),
        cuts in proptest::collection::vec(any::<proptest::sample::Index>(), 1..5),
        news in proptest::collection::vec(long_text(), 5),
        most in 1usize..20,
    ) {
        let cache = Everything::default();
        let (mut text, mut search, mut length) = (first, Search::default(), 0);
        // A conversation that goes on, from its end or from somewhere before.
        for (turn, new) in news.iter().enumerate() {
            if let Some(cut) = cuts.get(turn).filter(|_| turn % 2 == 1) {
                text.truncate(cut.index(text.len()) + 1);
            }
            length = text.len().min(length);
            text.extend(new);
            let made = cache.made.get();
            let kept = PairIndex::of(&text, &cache);
            prop_assert!(cache.made.get() - made <= text.len() - length + BLOCK_TOKENS, "more than is new");
            length = text.len();
            let fresh = PairIndex::of(&text, &NoIndexCache);
            let grown = GrowingText::of(&text, 0);
            for end in (0..text.len()).step_by(97) {
                let context = &text[end.saturating_sub(40)..end];
                let mut drafts: [Vec<u32>; 3] = Default::default();
                for (index, drafts) in [&kept, &fresh].into_iter().zip(&mut drafts) {
                    search.suffix(&[View { tokens: &text, index }], context, most, drafts);
                }
                search.suffix(&[grown.view()], context, most, &mut drafts[2]);
                prop_assert!(drafts[0] == drafts[1] && drafts[1] == drafts[2], "{drafts:?}");
                if end % 20 == 0 {
                    prop_assert_eq!(&drafts[0], &oracle(&[text.clone()], context, most).1);
                }
            }
        }
    }
}

#[test]
fn an_index_takes_no_more_than_is_counted() {
    for tokens in [1, 2, 7, 8, 9, 500, 2047, 2048] {
        let text: Vec<u32> = (0..tokens).collect();
        for index in [PairIndex::of(&text, &NoIndexCache), GrowingText::of(&text, 0).view().index.clone()] {
            let bytes = index.bytes();
            assert!(bytes <= tokens as usize * TOKEN_BYTES + 200, "{bytes} of {tokens}");
        }
    }
}

const A: u32 = 1;
const B: u32 = 2;

/// A finished answer, taken up as a whole.
fn add<O: Copy + Eq + std::hash::Hash>(answers: &mut Answers<O>, owner: O, answer: &[u32]) {
    answers.add(owner, answer.to_vec(), 0);
    answers.index(usize::MAX);
}

#[test]
fn answers_are_taken_up_in_parts() {
    let mut whole = Answers::new(1 << 20, 1 << 22);
    let mut parts = Answers::new(1 << 20, 1 << 22);
    let text: Vec<u32> = (100..800).collect();
    for answers in [&mut whole, &mut parts] {
        answers.add(A, text.clone(), 20);
        answers.add(B, vec![5, 6, 7, 8], 0);
        answers.add(A, vec![1, 2, 3], 1);
    }
    whole.index(usize::MAX);
    let found = |answers: &mut Answers<_>, owner, context: &[u32]| {
        let (mut search, mut drafts) = (Search::default(), Vec::new());
        if let Some(texts) = answers.of(owner) {
            search.suffix(&texts, context, 4, &mut drafts);
        }
        drafts
    };
    parts.index(100);
    assert!(!found(&mut parts, A, &text[90..100]).is_empty(), "of the first part");
    assert!(found(&mut parts, A, &text[650..680]).is_empty() && found(&mut parts, B, &[5, 6]).is_empty());
    let mut rounds = 0;
    while found(&mut parts, B, &[5, 6]).is_empty() {
        parts.index(100);
        rounds += 1;
    }
    assert_eq!((rounds, found(&mut parts, B, &[5, 6, 7])), (6, vec![8]), "684 tokens in all");
    for context in [&text[90..100], &text[400..420], &text[650..680]] {
        assert_eq!(found(&mut parts, A, context), found(&mut whole, A, context));
    }
    assert_eq!(parts.bytes(), whole.bytes());
    parts.index(0);
}

#[test]
fn answers_are_their_owners() {
    let mut answers = Answers::new(1 << 20, 1 << 22);
    add(&mut answers, A, &[1, 2, 3, 4, 5]);
    assert!(answers.of(B).is_none());
    let mut drafts = Vec::new();
    let own = answers.of(A).expect("it has one");
    Search::default().suffix(&own, &[9, 1, 2], 8, &mut drafts);
    assert_eq!(drafts, [3, 4], "as many as match");
}

#[test]
fn stores_hold_no_more_than_their_bytes() {
    let (each, all) = (100 * TOKEN_BYTES, 250 * TOKEN_BYTES);
    let mut answers = Answers::new(each, all);
    for owner in 0..10 {
        for at in 0..100 {
            add(&mut answers, owner, &(0..1 + at * 7 % 90).collect::<Vec<u32>>());
            let held = answers
                .of(owner)
                .map_or(0, |texts| texts.iter().map(|text| text.tokens.len() * TOKEN_BYTES).sum());
            assert!(held <= each, "{held}");
            assert!(answers.bytes() <= all);
        }
    }
    assert!(answers.of(0).is_none(), "used least recently");
    assert!(answers.of(9).is_some());
}

#[test]
fn old_answers_give_way_to_new_ones() {
    let mut answers = Answers::new(40 * TOKEN_BYTES, 1 << 20);
    add(&mut answers, A, &[1, 2, 3]);
    (0..20).for_each(|at| add(&mut answers, A, &[100 + at, 200 + at, 300 + at]));
    let mut drafts = Vec::new();
    let mut search = Search::default();
    search.suffix(&answers.of(A).expect("it has some"), &[1, 2], 4, &mut drafts);
    assert!(drafts.is_empty());
    search.suffix(&answers.of(A).expect("it has some"), &[119, 219], 4, &mut drafts);
    assert_eq!(drafts, [319]);
}
