use std::sync::Arc;

use folio_api::events::TokenLogprobs;
use folio_text::{OutputEvent, Tokenizer};
use proptest::prelude::*;

use super::*;
use crate::safety::automaton::Automaton;
use crate::safety::rules::Rule;

/// One token per byte of ASCII.
fn tokenizer() -> Arc<Tokenizer> {
    let vocab: serde_json::Map<_, _> =
        (33..127u8).map(|b| ((b as char).to_string(), u32::from(b).into())).collect();
    let file = serde_json::json!({
        "version": "1.0", "truncation": null, "padding": null, "normalizer": null, "post_processor": null, "added_tokens": [],
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false},
        "decoder": {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true},
        "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "vocab": vocab, "merges": []},
    });
    Arc::new(Tokenizer::from_bytes(file.to_string().as_bytes(), None).unwrap())
}

fn rules(list: &[(&str, Option<&str>)]) -> Arc<SafetyRules> {
    let mut rules = SafetyRules::default();
    for (index, (pattern, replacement)) in list.iter().enumerate() {
        let automaton = match pattern.strip_prefix("re:") {
            Some(regex) => Automaton::of_regex(index, regex, Some(8)),
            None => Automaton::of_strings(index, &[pattern.to_string()], false),
        };
        rules.automata.push(automaton.unwrap());
        rules.rules.push(Rule { name: index.to_string(), replacement: replacement.map(str::to_owned) });
    }
    Arc::new(rules)
}

fn content(text: &str) -> OutputEvent {
    OutputEvent::Content(text.into())
}

/// Everything that leaves, piece by piece, and whether it was denied.
fn through(rules: &Arc<SafetyRules>, pieces: &[OutputEvent]) -> (Vec<OutputEvent>, bool) {
    let mut gate = AnswerGate::new(rules.clone(), tokenizer(), true);
    let mut out = Delta::default();
    for piece in pieces {
        gate.push(piece.clone());
        gate.release(&mut out);
        if gate.denied().is_some() {
            return (out.pieces, true);
        }
    }
    gate.finish();
    gate.release(&mut out);
    (out.pieces, gate.denied().is_some())
}

#[test]
fn text_that_can_be_no_match_leaves_at_once() {
    let rules = rules(&[("abcabd", None)]);
    let mut gate = AnswerGate::new(rules, tokenizer(), true);
    let mut shown = |text: &str| {
        let mut out = Delta::default();
        gate.push(content(text));
        gate.release(&mut out);
        match out.pieces.as_slice() {
            [] => String::new(),
            [OutputEvent::Content(text)] => text.clone(),
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(
        [shown("xxabcab"), shown("c"), shown("aby"), shown("z")],
        ["xx", "abc", "abcaby", "z"].map(|s| s)
    );
}

#[test]
fn a_denied_answer_ends_before_its_match_and_before_what_was_held() {
    let denying = rules(&[("badger", None), ("a badger here", None)]);
    assert_eq!(
        through(&denying, &[content("see "), content("a bad"), content("ger!")]),
        (vec![content("see ")], true)
    );
    assert_eq!(through(&denying, &[content("a bad")]), (vec![content("a bad")], false));
    // A match at the very end, which only the end makes one.
    let end = rules(&[("re:cat$", None)]);
    assert_eq!(through(&end, &[content("a ca"), content("t")]), (vec![content("a ")], true));
    assert_eq!(through(&end, &[content("a cats")]), (vec![content("a cats")], false));
}

#[test]
fn a_match_goes_across_what_stands_between_but_not_across_fields() {
    let denying = rules(&[("bomb", None)]);
    let thought = OutputEvent::Reasoning("hm".into());
    let call = OutputEvent::CallStarted { index: 0, id: "i".into(), name: "f".into() };
    let split = [content("a bo"), thought.clone(), call.clone(), content("mb")];
    assert_eq!(through(&denying, &split), (vec![content("a ")], true));
    let fields = [content("a bo"), OutputEvent::Reasoning("mb".into())];
    assert_eq!(
        through(&denying, &fields),
        (vec![content("a bo"), OutputEvent::Reasoning("mb".into())], false)
    );
    let named = OutputEvent::CallStarted { index: 0, id: "i".into(), name: "bombs".into() };
    assert_eq!(through(&denying, &[content("a "), named]), (vec![content("a ")], true));
}

#[test]
fn arguments_are_read_as_what_they_stand_for() {
    let both = rules(&[("bomb", None), ("x\"y", Some("a\"b"))]);
    let arguments = |text: &str| OutputEvent::Arguments { index: 0, text: text.into() };
    assert_eq!(
        through(&both, &[arguments(r#"{"a": "\u006"#), arguments(r#"2omb"}"#)]),
        (vec![arguments(r#"{"a": ""#)], true)
    );
    let replaced = vec![arguments(r#"{"a": "<a\"b>"}"#)];
    assert_eq!(through(&both, &[arguments(r#"{"a": "<x\"y>"}"#)]), (replaced, false));
}

#[test]
fn overlapping_matches_are_replaced_as_one() {
    let replacing = rules(&[("abc", Some("1")), ("cde", Some("2")), ("ef", Some("3"))]);
    assert_eq!(
        through(&replacing, &[content("<ab"), content("cd"), content("ef>")]),
        (vec![content("<1>")], false)
    );
    assert_eq!(through(&replacing, &[content("abcabc")]), (vec![content("11")], false));
    assert_eq!(through(&replacing, &[content("abcd")]), (vec![content("1d")], false));
}

#[test]
fn tokens_leave_with_their_text_and_not_without() {
    let mixed = rules(&[("bad", None), ("xyz", Some("longer"))]);
    let mut gate = AnswerGate::new(mixed, tokenizer(), true);
    let mut out = Delta::default();
    let mut say = |gate: &mut AnswerGate, text: &str, offset: usize| {
        for (at, byte) in text.bytes().enumerate() {
            let logprobs = TokenLogprobs { top: vec![(u32::from(b'q'), -1.0)], ..Default::default() };
            gate.token(Some(byte.into()), Some(Scored { id: byte.into(), logprobs, offset: offset + at }));
            gate.push(content(&(byte as char).to_string()));
            gate.settled();
            gate.release(&mut out);
        }
        (std::mem::take(&mut out.token_ids), std::mem::take(&mut out.scored))
    };
    let ids = |text: &str| text.bytes().map(u32::from).collect::<Vec<_>>();
    assert_eq!(say(&mut gate, "ab", 0).0, ids("a"));
    assert_eq!(say(&mut gate, "ox", 2).0, ids("bo"));
    let (after, scored) = say(&mut gate, "yzk", 4);
    assert_eq!(after, ids("k"));
    assert_eq!(scored[0].offset, 9, "\"abo\" and \"longer\" stand before it");
    assert_eq!(say(&mut gate, "ba", 7).0, ids(""));
    assert_eq!(say(&mut gate, "d", 9).0, ids(""));
    assert!(gate.denied().is_some());
}

#[test]
fn alternatives_that_are_matches_are_left_out() {
    let rules = rules(&[("q", None)]);
    let mut logprobs =
        TokenLogprobs { top: vec![(u32::from(b'q'), -1.0), (u32::from(b'r'), -2.0)], ..Default::default() };
    rules.prune(&mut logprobs, &tokenizer());
    assert_eq!(logprobs.top, [(u32::from(b'r'), -2.0)]);
}

/// Pieces of an answer in fields, from a small alphabet so that patterns happen.
fn pieces() -> impl Strategy<Value = Vec<OutputEvent>> {
    let text = "[abc\\\\u06é]{0,12}";
    let piece = prop_oneof![
        4 => text.prop_map(OutputEvent::Content),
        2 => text.prop_map(OutputEvent::Reasoning),
        2 => (0..2u32, text).prop_map(|(index, text)| OutputEvent::Arguments { index, text }),
        1 => (0..2u32).prop_map(|index| OutputEvent::CallStarted { index, id: "i".into(), name: "f".into() }),
    ];
    prop::collection::vec(piece, 1..6)
}

fn patterns() -> impl Strategy<Value = Vec<(String, bool)>> {
    const REGEXES: [&str; 6] =
        ["re:a[bc]{1,3}a", "re:b+?c", "re:c$", "re:(?-u:\\bab)", "re:a[ab]c?[bc]*", "re:é."];
    let pattern = prop_oneof!["[abc]{1,4}", prop::sample::select(&REGEXES[..]).prop_map(str::to_owned)];
    prop::collection::vec((pattern, any::<bool>()), 1..4)
}

/// Every piece cut into its characters.
fn cut(pieces: &[OutputEvent], sizes: &[usize]) -> Vec<OutputEvent> {
    let mut sizes = sizes.iter().cycle();
    let mut out = Vec::new();
    for piece in pieces {
        let (text, make): (&str, Box<dyn Fn(String) -> OutputEvent>) = match piece {
            OutputEvent::Content(text) => (text, Box::new(OutputEvent::Content)),
            OutputEvent::Reasoning(text) => (text, Box::new(OutputEvent::Reasoning)),
            OutputEvent::Arguments { index, text } => {
                let index = *index;
                (text, Box::new(move |text| OutputEvent::Arguments { index, text }))
            }
            other => {
                out.push(other.clone());
                continue;
            }
        };
        let characters: Vec<char> = text.chars().collect();
        let mut rest = characters.as_slice();
        while !rest.is_empty() {
            let size = (*sizes.next().unwrap()).min(rest.len());
            out.push(make(rest[..size].iter().collect()));
            rest = &rest[size..];
        }
    }
    out
}

proptest! {
    #[test]
    fn the_verdict_is_the_same_for_every_cutting(
        patterns in patterns(), pieces in pieces(), sizes in prop::collection::vec(1..5usize, 1..8),
    ) {
        let list: Vec<_> = patterns.iter().map(|(p, deny)| (p.as_str(), (!deny).then_some("_"))).collect();
        let rules = rules(&list);
        let whole = through(&rules, &pieces);
        prop_assert_eq!(&through(&rules, &cut(&pieces, &sizes)), &whole);
        prop_assert_eq!(&through(&rules, &cut(&pieces, &[1])), &whole);
    }

    /// Against a search by other means, for strings in one field.
    #[test]
    fn strings_are_found_as_by_searching(
        strings in prop::collection::vec("[abc]{1,4}", 1..4), text in "[abc]{0,24}", deny in any::<bool>(),
    ) {
        let list: Vec<_> = strings.iter().map(|s| (s.as_str(), (!deny).then_some("_"))).collect();
        let (shown, denied) = through(&rules(&list), &cut(&[content(&text)], &[2]));
        let shown = shown.iter().map(|piece| match piece { OutputEvent::Content(t) => t.as_str(), _ => "" }).collect::<String>();
        let (text, strings) = (text.as_str(), strings.as_slice());
        let found = |at: usize| strings.iter().filter(move |s| text[at..].starts_with(s.as_str()));
        if deny {
            let ends = (0..text.len()).flat_map(|at| found(at).map(move |s| (at + s.len(), at)));
            match ends.min() {
                None => prop_assert_eq!((shown.as_str(), denied), (text, false)),
                Some((end, start)) => {
                    prop_assert!(denied && shown.len() <= start && text.starts_with(&shown));
                    // Nothing is cut off but what might have become a match.
                    let begins = |at: usize| strings.iter().any(|s| s.starts_with(&text[at..end]) || text[at..end].starts_with(s.as_str()));
                    prop_assert!(shown.len() == start || begins(shown.len()));
                }
            }
        } else {
            let mut covered = vec![false; text.len()];
            for at in 0..text.len() {
                found(at).for_each(|s| covered[at..at + s.len()].fill(true));
            }
            let kept: String = text.chars().zip(&covered).filter(|(_, c)| !**c).map(|(c, _)| c).collect();
            prop_assert_eq!(shown.replace('_', ""), kept);
            prop_assert!(!denied);
        }
    }
}
