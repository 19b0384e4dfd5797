use super::*;

/// A vocabulary of single bytes (0 to 255), some longer pieces, and an end.
fn grammars() -> (Tokenizer, Grammars) {
    let tokenizer = tokenizer();
    let end = tokenizer.token_id("<end>").expect("there is an end");
    let grammars = Grammars::new(&tokenizer, &[end]).expect("compiles");
    (tokenizer, grammars)
}

fn tokenizer() -> Tokenizer {
    // GPT-2's alphabet: a printable stand-in for every byte.
    let mut table = Vec::new();
    let mut extra = 256u32;
    for byte in 0..=255u32 {
        let plain = (33..=126).contains(&byte) || (161..=172).contains(&byte) || (174..=255).contains(&byte);
        let c = if plain { byte } else { extra };
        extra += u32::from(!plain);
        table.push(char::from_u32(c).expect("a character"));
    }
    let mut vocab = serde_json::Map::new();
    for (id, c) in table.iter().enumerate() {
        vocab.insert(c.to_string(), id.into());
    }
    for piece in ["true", "\":", "{\"", "\"}", "ab", "abc", "\",\""] {
        vocab.insert(piece.to_owned(), vocab.len().into());
    }
    let end = vocab.len();
    let json = json!({
        "model": {"type": "BPE", "vocab": vocab, "merges": []},
        "decoder": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false},
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false},
        "added_tokens": [{"id": end, "content": "<end>", "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": true}],
    });
    Tokenizer::from_bytes(json.to_string().as_bytes(), None).expect("a tokenizer")
}

/// Follows `text` byte by byte: `Err` at the first byte that may not come, else whether the answer may end.
fn follow(grammar: &Grammar, text: &str) -> Result<bool, usize> {
    let mut matcher = grammar.matcher();
    let mut words = Vec::new();
    for (at, byte) in text.bytes().enumerate() {
        matcher.allowed(&mut words).expect("a mask");
        if words[usize::from(byte) / 32] >> (byte % 32) & 1 == 0 {
            return Err(at);
        }
        matcher.accept(u32::from(byte)).expect("allowed, so accepted");
    }
    Ok(matcher.is_complete())
}

fn json_syntax(schema: Value) -> Syntax {
    Syntax::Json { schema, whitespace: Whitespace::default() }
}

#[test]
fn each_notation_allows_its_texts_and_no_others() {
    let (_, grammars) = grammars();
    let object = json!({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": false});
    let cases: Vec<(Syntax, Vec<&str>, Vec<&str>)> = vec![
        (
            json_syntax(object),
            vec!["{\"a\":1}", "{\"a\": -20}", "{\n  \"a\": 1\n}"],
            vec!["{}", "{\"b\"", "{\"a\":1.5", "[", " {"],
        ),
        (json_syntax(json!(true)), vec!["1", "\"x\"", "[1, {}]"], vec!["x"]),
        (Syntax::Regex("[a-c]{2,3}(é)?".into()), vec!["ab", "abcé"], vec!["a", "abd"]),
        (
            Syntax::Choice(vec!["yes".into(), "no \"quoted\"\n".into()]),
            vec!["yes", "no \"quoted\"\n"],
            vec!["ye", "maybe"],
        ),
        (
            Syntax::Grammar("start: \"a\" b*\nb: \"b\" | \"(\" b \")\"\n".into()),
            vec!["a", "ab(b)((b))"],
            vec!["b", "a(b"],
        ),
        (
            Syntax::Grammar("root ::= \"a\" [x-z]{2} | b\nb ::= \"b\" b?".into()),
            vec!["axz", "bbb"],
            vec!["ax", "c"],
        ),
    ];
    for (syntax, good, bad) in cases {
        let grammar = grammars.compile(&syntax).unwrap_or_else(|e| panic!("{syntax:?}: {e}"));
        for text in good {
            assert_eq!(follow(&grammar, text), Ok(true), "{syntax:?} {text:?}");
        }
        for text in bad {
            assert_ne!(follow(&grammar, text), Ok(true), "{syntax:?} {text:?}");
        }
    }
}

#[test]
fn an_end_is_allowed_exactly_where_the_answer_may_end() {
    let (tokenizer, grammars) = grammars();
    let end = tokenizer.token_id("<end>").expect("there is an end");
    let grammar = grammars.compile(&Syntax::Regex("a(b)?".into())).expect("compiles");
    let mut matcher = grammar.matcher();
    let mut words = Vec::new();
    let mut may_end = |matcher: &mut Matcher| {
        matcher.allowed(&mut words).expect("a mask");
        words[end as usize / 32] >> (end % 32) & 1 == 1
    };
    assert!(!may_end(&mut matcher));
    matcher.accept(u32::from(b'a')).expect("a");
    assert!(may_end(&mut matcher));
    matcher.accept(u32::from(b'b')).expect("b");
    assert!(may_end(&mut matcher), "nothing else may come, and the end may");
    matcher.accept(end).expect("the end");
}

#[test]
fn tokens_of_several_bytes_are_allowed_where_all_of_them_fit() {
    let (tokenizer, grammars) = grammars();
    let grammar = grammars.compile(&Syntax::Regex("ab?".into())).expect("compiles");
    let mut words = Vec::new();
    grammar.matcher().allowed(&mut words).expect("a mask");
    let allowed = |token: &str| {
        let id = tokenizer.token_id(token).expect("a token");
        words[id as usize / 32] >> (id % 32) & 1 == 1
    };
    assert!(allowed("a") && allowed("ab"));
    assert!(!allowed("abc") && !allowed("true"));
}

#[test]
fn what_cannot_be_kept_is_refused_with_its_name() {
    let (_, grammars) = grammars();
    let deep = format!("{}a{}", "(".repeat(100_000), ")".repeat(100_000));
    let nested = (0..100).fold(json!({"type": "null"}), |inner, _| json!({"type": "array", "items": inner}));
    assert!(grammars.compile(&json_syntax(nested)).is_ok(), "a deep schema is no fault");
    for (syntax, expected) in [
        (
            json_syntax(
                json!({"type": "object", "propertyNames": {"maxLength": 3}, "unevaluatedProperties": false}),
            ),
            "unevaluatedProperties",
        ),
        (json_syntax(json!({"type": "array", "uniqueItems": true})), "uniqueItems"),
        (json_syntax(json!({"type": "strange"})), "strange"),
        (json_syntax(json!({"$ref": "#/$defs/none"})), "none"),
        (json_syntax(json!({"x-guidance": {"lenient": true}})), "x-guidance"),
        (json_syntax(json!(false)), "allows nothing"),
        (json_syntax(json!(3)), "object or a boolean"),
        (Syntax::Regex("a(".into()), "("),
        (Syntax::Regex(deep.clone()), "nested"),
        (Syntax::Grammar(deep), "nested"),
        (Syntax::Grammar("start: b".into()), "b"),
        (Syntax::Choice(vec![]), "0 choices"),
    ] {
        let error = match grammars.compile(&syntax) {
            Err(error) => error.to_string(),
            Ok(_) => panic!("{syntax:?} was taken"),
        };
        assert!(error.contains(expected), "{error:?} does not name {expected:?}");
        assert!(error.chars().count() <= MESSAGE_MAX);
    }
}

#[test]
fn what_must_come_is_found_without_a_trace() {
    let (_, grammars) = grammars();
    let grammar = grammars.compile(&Syntax::Regex("abc(a|b)c*".into())).expect("compiles");
    let (mut asked, mut other) = (grammar.matcher(), grammar.matcher());
    assert_eq!(asked.forced(), b"abc");
    let allowed = |matcher: &mut Matcher| {
        let mut words = Vec::new();
        matcher.allowed(&mut words).expect("a mask");
        words
    };
    assert_eq!(allowed(&mut asked), allowed(&mut other), "it may be cut in another way");
    asked.accept(u32::from(b'a')).expect("allowed");
    other.accept(u32::from(b'a')).expect("allowed");
    asked.forced();
    assert_eq!(allowed(&mut asked), allowed(&mut other));
    asked.accept(u32::from(b'b')).expect("allowed");
    asked.accept(u32::from(b'c')).expect("allowed");
    assert_eq!(asked.forced(), b"", "two may come");
}

/// Behind drafts a matcher that was brought back allows what a fresh one does, and the answer's own never knows of them; also where the
/// library cannot take back what it was told.
#[test]
fn what_is_looked_ahead_for_leaves_no_trace() {
    let (tokenizer, grammars) = grammars();
    let array = json!({"type": "array", "items": {"enum": ["a", "ab", true]}});
    let cases = [
        (json_syntax(array), "[\"ab\", true,\"a\"]"),
        (Syntax::Regex("(ab|cd){2}a*".into()), "cdabaa"),
        (Syntax::Grammar("start: \"x\" c \"a\" \"b\" | \"y\" c \"a\" \"c\"\nc: \"c\"\n".into()), "ycac"),
        (Syntax::Grammar("start: \"a\" some \"b\"\nsome[max_tokens=3]: /[ac]+/\n".into()), "accb"),
    ];
    let allowed = |matcher: &mut Matcher| {
        let mut words = Vec::new();
        matcher.allowed(&mut words).expect("a mask");
        words
    };
    for (syntax, text) in cases {
        let grammar = grammars.compile(&syntax).unwrap_or_else(|e| panic!("{syntax:?}: {e}"));
        let mut answer = grammar.matcher();
        let mut told: Vec<u32> = Vec::new();
        for at in 0..=text.len() {
            let mut ahead = answer.ahead();
            let mut plain = grammar.matcher();
            told.iter().for_each(|token| plain.accept(*token).expect("allowed"));
            assert_eq!(allowed(&mut answer), allowed(&mut plain), "{text} {at}");
            for draft in 0..4 {
                let words = allowed(&mut ahead);
                assert_eq!(words, allowed(&mut plain), "{text} {at} {draft}");
                let ids: Vec<u32> = (0..tokenizer.vocab_size() as u32)
                    .filter(|id| words[*id as usize / 32] >> (id % 32) & 1 == 1)
                    .collect();
                let next = ids[(at + draft) * 7 % ids.len()];
                ahead.accept(next).expect("allowed");
                plain.accept(next).expect("allowed");
            }
            answer.give_back(ahead);
            answer.forced();
            if let Some(byte) = text.as_bytes().get(at) {
                answer.accept(u32::from(*byte)).expect("allowed");
                told.push(u32::from(*byte));
            }
        }
        assert!(answer.is_complete(), "{text}");
    }
}
