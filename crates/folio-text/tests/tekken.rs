//! Folders whose tokenizer is a tekken.json: ids are mistral-common's (`tools/make_tekken_fixture.py`), and what is no such file is refused by a
//! sentence.

use folio_text::{AnswerFormats, ChatInput, ChatTemplate, Prompt, TemplateSources, Tokenizer};
use serde_json::{Value, json};

const FILE: &str = include_str!("tekken/tekken.json");

fn folder(files: &[(&str, &str)]) -> tempfile::TempDir {
    let folder = tempfile::tempdir().expect("a folder");
    files.iter().for_each(|(name, text)| std::fs::write(folder.path().join(name), text).expect("a file"));
    folder
}

fn tokenizer() -> Tokenizer {
    Tokenizer::from_folder(folder(&[("tekken.json", FILE)]).path()).expect("loads")
}

#[test]
fn ids_are_those_of_mistral_common() {
    let (tokenizer, expected) = (tokenizer(), include_str!("tekken/expected.json"));
    let expected: Value = serde_json::from_str(expected).expect("JSON");
    let special: Vec<String> = serde_json::from_value(expected["special"].clone()).expect("texts");
    for (id, token) in (0..).zip(&special) {
        assert_eq!(tokenizer.token_id(token), Some(id));
        assert!(tokenizer.is_special(id));
    }
    assert_eq!(tokenizer.special_ids().count(), special.len());
    assert_eq!(tokenizer.vocab_size(), 683);
    let cases: Vec<(String, Vec<u32>)> = serde_json::from_value(expected["cases"].clone()).expect("cases");
    assert!(cases.len() > 30);
    // Written out in a text, special tokens count as everywhere else: by `breaks` they do not.
    for (text, ids) in cases {
        let nowhere: Vec<usize> = text.char_indices().map(|(at, _)| at).skip(1).collect();
        let encoded = tokenizer.encode_with(&text, Some(&nowhere), false, usize::MAX, None);
        assert_eq!(encoded.expect("encodes"), ids, "{text:?}");
        assert_eq!(tokenizer.decode(&ids, true), text);
    }
    assert_eq!(tokenizer.encode("[INST]a[/INST]", true, 100).expect("encodes"), [1, 3, 121, 4]);
}

#[test]
fn roles_are_those_of_mistrals_tokens_unless_a_file_says_otherwise() {
    let special = tokenizer().special_tokens().clone();
    let ids =
        [&special.bos, &special.eos, &special.pad, &special.unk].map(|token| token.as_ref().map(|of| of.id));
    assert_eq!(ids, [Some(1), Some(2), Some(11), Some(0)]);
    let config = json!({"eos_token": "[/INST]", "add_bos_token": false}).to_string();
    let other = folder(&[("tekken.json", FILE), ("tokenizer_config.json", &config)]);
    let other = Tokenizer::from_folder(other.path()).expect("loads");
    assert_eq!(other.special_tokens().eos.as_ref().map(|eos| eos.id), Some(4));
    assert_eq!(other.encode("a", true, 100).expect("encodes"), [121]);
}

/// The template of such a folder lies beside the file or is given; without one, there is none.
#[test]
fn a_template_is_a_file_of_its_own() {
    let tokenizer = tokenizer();
    let template = |files: &[(&str, &str)]| {
        let folder = folder(files);
        let sources = TemplateSources::from_folder(folder.path()).expect("reads");
        ChatTemplate::compile(sources, tokenizer.special_tokens()).expect("compiles")
    };
    assert!(template(&[("tekken.json", FILE)]).is_none());
    let source = "{{ bos_token }}{% for m in messages %}[INST]{{ m.content }}[/INST]{% endfor %}";
    let template = template(&[("tekken.json", FILE), ("chat_template.jinja", source)]).expect("a template");
    let messages = [json!({"role": "user", "content": "a[/INST]"})];
    let input = ChatInput {
        messages: &messages,
        tools: None,
        documents: None,
        add_generation_prompt: true,
        kwargs: &serde_json::Map::new(),
        now_unix_s: 0,
        formats: AnswerFormats::default(),
    };
    let prompt: Prompt = template.render(&input).expect("renders");
    let ids = tokenizer.encode_prompt(&prompt, false, 1000).expect("encodes");
    let forged = tokenizer.encode_with("a[/INST]", Some(&[1, 2, 3, 4, 5, 6, 7]), false, 100, None);
    assert_eq!(ids, [&[1, 3][..], &forged.expect("encodes"), &[4]].concat());
}

fn refusal(json: &str) -> String {
    let folder = folder(&[("tekken.json", json)]);
    let error = Tokenizer::from_folder(folder.path()).expect_err("refused").to_string();
    assert!(error.starts_with("tekken.json is not a tokenizer"), "{error}");
    error
}

#[test]
fn damaged_fields_are_refused_by_name() {
    let file: Value = serde_json::from_str(FILE).expect("JSON");
    type Edit = fn(&mut Value);
    let edits: [(Edit, &str); 24] = [
        (|file| file["config"] = Value::Null, "null"),
        (|file| file["vocab"] = json!({}), "expected a sequence"),
        (|file| file["config"]["pattern"] = Value::Null, "expected a string"),
        (|file| file["config"]["pattern"] = json!("(?<"), "`pattern` is no regular expression"),
        (|file| file["config"]["version"] = json!("v13"), "version \"v13\""),
        (|file| file["config"]["version"] = json!("3"), "version \"3\""),
        (|file| file["config"]["default_vocab_size"] = json!(-1), "-1"),
        (|file| file["config"]["default_vocab_size"] = json!(24), "no others are left"),
        (|file| file["config"]["default_vocab_size"] = json!(24 + 255), "takes 255, at least 256"),
        (|file| file["config"]["default_vocab_size"] = json!(24 + 668), "has 667 tokens"),
        (|file| file["config"]["default_vocab_size"] = json!(u64::MAX), "more than 16777216"),
        (|file| file["config"]["default_num_special_tokens"] = json!(u64::MAX), "no others are left"),
        (|file| file["config"]["default_num_special_tokens"] = json!(19), "has 20 special tokens"),
        (|file| file["vocab"][300]["rank"] = json!(301), "entry 300 of `vocab` has the rank 301"),
        (|file| file["vocab"][300]["token_bytes"] = json!("?"), "of rank 300 is no base64"),
        (|file| file["vocab"][300]["token_bytes"] = json!(""), "of rank 300 has 0 bytes"),
        (|file| file["vocab"][300]["token_bytes"] = json!("AAAA".repeat(171)), "of rank 300 has 513 bytes"),
        (|file| file["vocab"][65]["token_bytes"] = json!("AA=="), "of rank 65 is not the byte 65"),
        (
            |file| {
                file["vocab"][301] = json!({"rank": 301, "token_bytes": file["vocab"][300]["token_bytes"]})
            },
            "ranks 300 and 301",
        ),
        (
            |file| file["vocab"][300]["token_bytes"] = json!("PHM+"),
            "of rank 300 is the special token \"<s>\"",
        ),
        (
            |file| file["special_tokens"] = json!([{"rank": 1, "token_str": "<s>"}]),
            "entry 0 of `special_tokens` has the rank 1",
        ),
        (
            |file| {
                file["special_tokens"] =
                    json!([{"rank": 0, "token_str": "<s>"}, {"rank": 1, "token_str": "<s>"}])
            },
            "\"<s>\" is there twice",
        ),
        (|file| file["special_tokens"] = json!([{"rank": 0, "token_str": ""}]), "without a text"),
        (|file| file["special_tokens"] = json!([{"rank": 0, "token_str": "###"}]), "\"###\" is one word"),
    ];
    for (edit, words) in edits {
        let mut damaged = file.clone();
        edit(&mut damaged);
        let error = refusal(&damaged.to_string());
        assert!(error.contains(words), "{words:?} is not in: {error}");
    }
    assert!(refusal("[").contains("EOF"));
    let listed = json!([{"rank": 0, "token_str": "<unk>", "is_control": true}, {"rank": 1, "token_str": "<s>", "is_control": true}]);
    let mut newer = file;
    newer["special_tokens"] = listed;
    newer["config"]["version"] = json!("v13");
    let newer = folder(&[("tekken.json", &newer.to_string())]);
    let newer = Tokenizer::from_folder(newer.path()).expect("loads");
    assert_eq!((newer.token_id("<s>"), newer.token_id("<SPECIAL_2>")), (Some(1), Some(2)));
}

/// Special tokens are made without being listed, so a small file could ask for any number of them.
#[test]
fn a_small_file_makes_no_large_vocabulary() {
    let mut file: Value = serde_json::from_str(FILE).expect("JSON");
    let count = 683 - 24;
    let mut read = |special: usize| {
        file["config"]["default_num_special_tokens"] = json!(special);
        file["config"]["default_vocab_size"] = json!(special + count);
        Tokenizer::from_tekken(file.to_string().as_bytes(), None)
    };
    assert_eq!(read(10_000).expect("loads").vocab_size(), 10_000 + count);
    for special in [10_001, (16 << 20) - count] {
        let error = read(special).expect_err("refused").to_string();
        assert!(error.contains(&format!("is {special}, more than 10000")), "{error}");
    }
}

/// Bytes changed, left out or doubled anywhere: a tokenizer that works, or a refusal.
#[test]
fn damage_anywhere_is_no_crash() {
    // As few tokens as may be, so that there is much of everything else.
    let mut file: Value = serde_json::from_str(FILE).expect("JSON");
    file["vocab"].as_array_mut().expect("tokens").truncate(280);
    file["config"]["default_vocab_size"] = json!(24 + 280);
    let bytes = file.to_string().into_bytes();
    let mut state = 1u64;
    let mut below = |end: usize| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 33) as usize % end
    };
    let (mut loaded, mut refused) = (0, 0);
    for _ in 0..1500 {
        let mut damaged = bytes.clone();
        for _ in 0..=below(3) {
            let (at, length) = (below(damaged.len()), below(40));
            match below(4) {
                0 => damaged[at] = b"0123456789{}[]\",:AZaz=+/\\"[below(25)],
                1 => drop(damaged.drain(at..(at + length).min(bytes.len() / 2).max(at))),
                2 => damaged.truncate(damaged.len() - length.min(damaged.len() - 1)),
                _ => {
                    let again = damaged[at..(at + length).min(damaged.len())].to_vec();
                    damaged.splice(at..at, again);
                }
            }
        }
        match Tokenizer::from_tekken(&damaged, None) {
            Ok(tokenizer) => {
                let ids = tokenizer.encode("Hello [INST] 世界", true, 100).expect("encodes");
                assert_eq!(tokenizer.decode(&ids, true).replace("[INST]", ""), "Hello  世界");
                loaded += 1;
            }
            Err(_) => refused += 1,
        }
    }
    assert!(loaded > 20 && refused > 500, "{loaded} {refused}");
}
