//! Tokenizers of sentencepiece's tokenizer.model: ids are sentencepiece's, and what is damaged or not followed is refused by name.

mod common;
#[path = "common/spm.rs"]
mod spm;

use folio_text::{BesideModel, TextError, Tokenizer, work};
use serde_json::{Value, json};
use spm::{BYTE, CONTROL, NORMAL, UNKNOWN, UNUSED, USER_DEFINED, bytes, charsmap, number, piece, specs};

const NO_LIMIT: usize = usize::MAX;

const TOKENS: [(&str, f32, u64); 12] = [
    ("<unk>", 0.0, UNKNOWN),
    ("<s>", 0.0, CONTROL),
    ("</s>", 0.0, CONTROL),
    ("▁", -9.0, NORMAL),
    ("a", -8.0, NORMAL),
    ("b", -7.0, NORMAL),
    ("aa", -2.0, NORMAL),
    ("ab", -1.0, NORMAL),
    ("▁a", -5.0, NORMAL),
    ("<tool>", 0.0, USER_DEFINED),
    ("▁▁▁", 0.0, USER_DEFINED),
    ("bb", -0.5, UNUSED),
];

fn pieces() -> Vec<u8> {
    TOKENS.iter().flat_map(|(text, score, kind)| piece(text.as_bytes(), *score, *kind)).collect()
}

fn byte_pieces() -> Vec<u8> {
    (0..=255u8).flat_map(|byte| piece(format!("<0x{byte:02X}>").as_bytes(), 0.0, BYTE)).collect()
}

fn small() -> Vec<u8> {
    [pieces(), specs(&[], &[])].concat()
}

fn with(model: &[u8], config: Value) -> Result<Tokenizer, TextError> {
    let config = config.to_string();
    let beside = BesideModel { tokenizer_config: Some(config.as_bytes()), ..BesideModel::default() };
    Tokenizer::from_sentencepiece(model, beside)
}

fn load(model: &[u8]) -> Result<Tokenizer, TextError> {
    Tokenizer::from_sentencepiece(model, BesideModel::default())
}

fn refusal(model: &[u8]) -> String {
    load(model).expect_err("refused").to_string()
}

fn ids(tokenizer: &Tokenizer, text: &str) -> Vec<u32> {
    tokenizer.encode(text, false, NO_LIMIT).expect("encodes")
}

fn assert_names(sentence: &str, parts: &[&str]) {
    for part in parts {
        assert!(sentence.contains(part), "{part:?} is not in: {sentence}");
    }
}

#[test]
fn neighbours_are_merged_by_score_and_unknown_runs_are_one_token() {
    let tokenizer = load(&small()).expect("supported");
    assert_eq!(ids(&tokenizer, "aab"), [8, 7]);
    assert_eq!(ids(&tokenizer, "baaa"), [3, 5, 6, 4]);
    assert_eq!(ids(&tokenizer, "éüa"), [3, 0, 4]);
    // An unused piece scores above all, and is taken apart again.
    assert_eq!(ids(&tokenizer, "bb"), [3, 5, 5]);
    // What users defined is found where the text has spaces.
    assert_eq!(ids(&tokenizer, "a   </s>"), [8, 10, 2]);
    assert_eq!(tokenizer.encode("a", true, NO_LIMIT).expect("encodes"), [1, 8]);
    assert_eq!(tokenizer.decode(&[1, 8, 8, 9], true), "a a<tool>");
    assert_eq!(tokenizer.special_ids().collect::<Vec<_>>(), [0, 1, 2]);
    assert_eq!(tokenizer.special_tokens().named["eos"], "</s>");
}

#[test]
fn what_is_no_piece_becomes_bytes_where_the_model_says_so() {
    let model = [pieces(), byte_pieces(), specs(&number(35, 1), &[])].concat();
    let tokenizer = load(&model).expect("supported");
    let first = TOKENS.len() as u32;
    assert_eq!(ids(&tokenizer, "é"), [3, first + 0xC3, first + 0xA9]);
    assert_eq!(tokenizer.decode(&ids(&tokenizer, "aé\n b"), false), "aé\n b");
    let without = [pieces(), byte_pieces(), specs(&[], &[])].concat();
    assert_names(&refusal(&without), &["256 pieces of the type BYTE", "byte_fallback` is false"]);
    let missing = [pieces(), specs(&number(35, 1), &[])].concat();
    assert_names(&refusal(&missing), &["byte_fallback` is true", "<0x00>"]);
}

/// A model of the same pieces that takes the way with the largest sum.
fn unigram(more: &[u8], trainer: &[u8]) -> Vec<u8> {
    [&pieces()[..], more, &specs(&[&number(3, 1)[..], trainer].concat(), &[])[..]].concat()
}

#[test]
fn the_way_with_the_largest_sum_is_taken() {
    let tokenizer = load(&unigram(&piece(b"c", 0.0, UNUSED), &[])).expect("supported");
    assert_eq!(ids(&tokenizer, "aab"), [8, 7]);
    // Of two ways with one sum the first that is found; merging would begin at the left.
    assert_eq!(ids(&tokenizer, "baaa"), [3, 5, 4, 6]);
    // Characters that are no piece, or an unused one, are one token.
    assert_eq!(ids(&tokenizer, "éücabb"), [3, 0, 7, 5]);
    assert_eq!(ids(&tokenizer, ""), ids(&load(&small()).expect("supported"), ""));
    assert_eq!(ids(&tokenizer, "a<tool>a   </s>"), [8, 9, 8, 10, 2]);
    // What users defined is no piece of a text in which it may not be.
    let breaks = Some(&[3][..]);
    assert_eq!(tokenizer.encode_with("<tool>", breaks, false, NO_LIMIT, None).expect("encodes"), [3, 0]);
    // The score of what is no piece is below the least by 10, which a long piece may be.
    let long = load(&unigram(&piece(b"xy", -37.0, NORMAL), &[])).expect("supported");
    assert_eq!(ids(&long, "xy"), [3, 12]);
    let longer = [piece(b"xy", -97.0, NORMAL), piece(b"x", -1.0, NORMAL)].concat();
    assert_eq!(ids(&load(&unigram(&longer, &[])).expect("supported"), "xy"), [3, 12]);
    let longest = [&longer[..], &piece(b"y", -95.0, NORMAL)[..]].concat();
    assert_eq!(ids(&load(&unigram(&longest, &[])).expect("supported"), "xy"), [3, 13, 14]);
    let bytes = load(&unigram(&byte_pieces(), &number(35, 1))).expect("supported");
    let first = TOKENS.len() as u32;
    assert_eq!(ids(&bytes, "aé"), [8, first + 0xC3, first + 0xA9]);
    assert_eq!(bytes.decode(&ids(&bytes, "aé\n b"), false), "aé\n b");
}

/// Work in proportion to the text, also with pieces that are as long as one may be.
#[test]
fn the_best_way_costs_in_proportion() {
    let long = piece("a".repeat(512).as_bytes(), -1.0, NORMAL);
    let tokenizer = load(&unigram(&long, &[])).expect("supported");
    let steps = |n: usize| {
        let before = work::done();
        ids(&tokenizer, &"a".repeat(n));
        work::done() - before
    };
    let (single, double) = (steps(4000), steps(8000));
    assert!(single > 4000 * 512 && double < single * 23 / 10, "{single} and {double}");
}

#[test]
fn a_space_is_put_where_the_files_say() {
    let always = load(&small()).expect("supported");
    assert_eq!(ids(&always, "a<tool>a"), [8, 9, 8]);
    let first = with(&small(), json!({"legacy": false})).expect("supported");
    assert_eq!(ids(&first, "a<tool>a"), [8, 9, 4]);
    assert_eq!(ids(&first, "<tool>a"), [9, 4]);
    let never = [pieces(), specs(&[], &number(3, 0))].concat();
    let never = load(&never).expect("supported");
    assert_eq!(ids(&never, "a<tool>a"), [4, 9, 4]);
    assert_eq!(never.decode(&[8], false), " a");
}

/// Rules as those of NFKC, one of which is for the beginning of another.
const RULES: [(&str, &str); 7] = [
    ("e\u{301}", "b"),
    ("e", "a"),
    ("\u{FF21}", "a"),
    ("½", "a b"),
    ("\u{AD}", ""),
    ("\t", " "),
    ("¨", " b"),
];

/// A model that merges, and one that takes the best way, with this `normalizer_spec`.
fn both(normalizer: &[u8]) -> [Tokenizer; 2] {
    let model = |trainer: &[u8]| load(&[pieces(), specs(trainer, normalizer)].concat()).expect("supported");
    [model(&[]), model(&number(3, 1))]
}

#[test]
fn texts_are_written_as_the_longest_rules_say() {
    let plain = both(&[]);
    for (ours, plain) in both(&bytes(2, &charsmap(&RULES))).iter().zip(&plain) {
        for (text, written) in [
            ("\u{FF21}e\u{301}", "ab"),
            ("ee\u{301}\u{301}", "ab\u{301}"),
            ("e\u{300}a", "a\u{300}a"),
            ("\u{AD}a\u{AD}", "a"),
            (" a\tb  ", " a b  "),
            ("½¨", "a b b"),
            ("\0e", "\0a"),
        ] {
            assert_eq!(ids(ours, text), ids(plain, written), "{text:?}");
        }
        // The space before it is there before the text is.
        assert_eq!(ids(ours, "\u{AD}"), [3]);
        assert_eq!(ours.decode(&ids(ours, "e \u{FF21}"), false), "a a");
    }
}

#[test]
fn extra_spaces_are_left_out_where_the_model_says_so() {
    let normalizer = [bytes(2, &charsmap(&RULES)), number(4, 1)].concat();
    let plain = both(&[]);
    for (ours, plain) in both(&normalizer).iter().zip(&plain) {
        for (text, written) in [
            (" \ta \u{AD} b\t ", "a b"),
            ("½ ½", "a b a b"),
            ("a ¨", "a b"),
            ("¨a", "ba"),
            // It is written as a space is.
            ("a▁", "a"),
            (" ", ""),
            ("\u{AD}", ""),
        ] {
            assert_eq!(ids(ours, text), ids(plain, written), "{text:?}");
        }
        // A part between added tokens is a text of its own.
        assert_eq!(ids(ours, "a <tool> b"), [8, 9, 3, 5]);
    }
    let model = [pieces(), specs(&[], &number(4, 1))].concat();
    let first = with(&model, json!({"legacy": false})).expect("supported");
    assert_eq!(ids(&first, "a <tool>  b"), [8, 9, 3, 5]);
    assert_eq!(ids(&first, "a <tool>b "), [8, 9, 5]);
    assert_eq!(ids(&first, " <tool>"), [9]);
    let [never, _] = both(&[number(3, 0), number(4, 1)].concat());
    assert_eq!(ids(&never, " a<tool> a"), [4, 9, 4]);
    let [unescaped, _] = both(&number(5, 0));
    assert_eq!(ids(&unescaped, "a b"), [0, 4, 0, 5]);
}

#[test]
fn a_damaged_charsmap_is_refused_by_what_is_wrong() {
    let of = |map: &[u8]| refusal(&[pieces(), specs(&[], &bytes(2, map))].concat());
    let names = |map: &[u8], parts: &[&str]| {
        let sentence = of(map);
        assert_names(&sentence, &["tokenizer.model", "precompiled_charsmap"]);
        assert_names(&sentence, parts);
    };
    names(b"map", &["3 bytes"]);
    names(&[0; 5], &["a trie of 0 bytes"]);
    names(&[6, 0, 0, 0, 1, 2, 3, 4, 5, 6], &["6 bytes", "multiple of 4"]);
    names(&[0xFF; 12], &["8 that are left"]);
    names(&[4, 0, 0, 0, 0, 0, 0, 0], &["1 units", "points to 0"]);
    names(&vec![0u8; (4 << 20) + 1], &["4194305 bytes"]);
    // Its units: the root, that of "a", and where what is written for "a" begins.
    let sound = charsmap(&[("a", "é")]);
    let (root, node, leaf) = (0, 256 ^ 97, 512);
    let with_unit = |at: usize, unit: u32| {
        let mut map = sound.clone();
        map[4 + 4 * at..8 + 4 * at].copy_from_slice(&unit.to_le_bytes());
        map
    };
    let pointing = |at: usize, base: usize| with_unit(at, 97 | (1 << 8) | (((at ^ base) as u32) << 10));
    assert!(load(&[pieces(), specs(&[], &bytes(2, &pointing(node, leaf)))].concat()).is_ok());
    names(&pointing(root, 768), &["768 units", "points to 768"]);
    names(&pointing(node, 1024), &["points to 1024"]);
    names(&with_unit(node, 97 | (((node ^ 256) as u32) << 10)), &["more than 64 bytes"]);
    names(&with_unit(leaf, (1 << 31) | 1), &["byte 1 of 3", "no character begins"]);
    names(&with_unit(leaf, u32::MAX), &["byte 2147483647 of 3"]);
    names(&sound[..sound.len() - 1], &["has no end"]);
    names(&[&sound[..], &[0xFF]].concat(), &["no UTF-8"]);
    names(&charsmap(&[("a", &"b".repeat(17))]), &["1 bytes", "more than 16"]);
    names(&charsmap(&[(&"a".repeat(65), "")]), &["more than 64 bytes"]);
    let longest = charsmap(&[(&"a".repeat(64), &"b".repeat(1024))]);
    let [longest, _] = both(&bytes(2, &longest));
    assert_eq!(ids(&longest, &"a".repeat(64)).len(), 1025);
    // A rule that ends within a character is none.
    let mut within = charsmap(&[("é", "b")]);
    let first = 256 ^ 0xC3;
    within[4 + 4 * first + 1] |= 1;
    let [within, _] = both(&bytes(2, &within));
    assert_eq!(ids(&within, "éü"), [3, 5, 0]);
}

#[test]
fn added_tokens_come_from_the_files_beside() {
    let decoder = json!({"added_tokens_decoder": {
        "12": {"content": "<|end|>", "special": true, "rstrip": true},
        "14": {"content": "<x>", "special": false},
        "2": {"content": "</s>", "special": true}},
        "eos_token": "<|end|>", "add_bos_token": false, "add_eos_token": true, "tokenizer_class": "LlamaTokenizerFast"});
    let tokenizer = with(&small(), decoder).expect("supported");
    assert_eq!(tokenizer.vocab_size(), 15);
    assert_eq!(ids(&tokenizer, "a<|end|>  <x>"), [8, 12, 14]);
    assert!(tokenizer.is_special(12) && !tokenizer.is_special(14) && !tokenizer.is_special(13));
    assert_eq!(tokenizer.encode("a", true, NO_LIMIT).expect("encodes"), [8, 12]);
    assert_eq!(tokenizer.decode(&[8, 13, 14], false), "a<x>");
    let beside = BesideModel {
        added_tokens: Some(br#"{"<|end|>": 12, "<x>": 13}"#),
        special_tokens_map: Some(br#"{"additional_special_tokens": ["<|end|>"]}"#),
        ..BesideModel::default()
    };
    let tokenizer = Tokenizer::from_sentencepiece(&small(), beside).expect("supported");
    assert_eq!(tokenizer.special_ids().collect::<Vec<_>>(), [0, 1, 2, 12]);
    assert_eq!(ids(&tokenizer, "<x><|end|>"), [13, 12]);
    // A piece that is no text may be given another text, one that is may not.
    let renamed = json!({"added_tokens_decoder": {"9": {"content": "<other>", "special": true}}});
    let renamed = with(&small(), renamed).expect("supported");
    assert_eq!((renamed.token_id("<tool>"), renamed.token_id("<other>")), (None, Some(9)));
    let wrong = |config: Value| with(&small(), config).expect_err("refused").to_string();
    let listed = |id: &str, content: &str| wrong(json!({"added_tokens_decoder": {id: {"content": content}}}));
    assert_names(&listed("4", "<x>"), &["tokenizer_config.json", "\"<x>\"", "id 4", "\"a\""]);
    assert_names(&listed("40", "ab"), &["\"ab\"", "id 40", "id 7"]);
    assert_names(&listed("4000000000", "<x>"), &["4000000000", "12 pieces"]);
    assert_names(&listed("-1", "<x>"), &["\"-1\""]);
    assert_names(&listed("12", ""), &["id 12", "no text"]);
    assert_names(&listed("12", &"x".repeat(600)), &["600"]);
    assert_names(&wrong(json!({"added_tokens_decoder": []})), &["added_tokens_decoder"]);
    assert_names(
        &wrong(json!({"tokenizer_class": "ChatGLMTokenizer"})),
        &["tokenizer_class", "ChatGLMTokenizer"],
    );
}

#[test]
fn what_is_not_followed_is_refused_by_name() {
    let of = |trainer: &[u8], normalizer: &[u8]| refusal(&[pieces(), specs(trainer, normalizer)].concat());
    for (kind, name) in [(3, "WORD"), (4, "CHAR"), (9, "9")] {
        assert_names(&of(&number(3, kind), &[]), &["tokenizer.model", "trainer_spec.model_type", name]);
    }
    assert_names(&of(&number(24, 1), &[]), &["treat_whitespace_as_suffix", "save_pretrained"]);
    assert_names(&of(&number(41, 900), &[]), &["trainer_spec.bos_id", "900", "12 pieces"]);
    let tiktoken = b"IQ== 0\nIg== 1\nIw== 2\n";
    assert_names(&refusal(tiktoken), &["tokenizer.model", "tiktoken", "save_pretrained"]);
}

#[test]
fn wrong_pieces_are_refused_by_number() {
    let more = |piece: Vec<u8>| refusal(&[pieces(), piece, specs(&[], &[])].concat());
    assert_names(&more(piece(b"", 0.0, NORMAL)), &["tokenizer.model", "piece 12", "0 bytes"]);
    assert_names(&more(piece(b"", 0.0, NORMAL).repeat(1_000_000)), &["piece 12"]);
    assert_names(&more(piece(&[b'x'; 600], 0.0, NORMAL)), &["piece 12", "600 bytes"]);
    assert_names(&more(piece(b"ab", 0.0, NORMAL)), &["pieces 7 and 12", "\"ab\""]);
    assert_names(&more(piece(b"\xFF\xFE", 0.0, NORMAL)), &["piece 12", "UTF-8"]);
    assert_names(&more(piece(b"x", f32::NAN, NORMAL)), &["score", "piece 12", "not a number"]);
    assert_names(&more(piece(b"x", 0.0, 7)), &["type", "piece 12", "is 7"]);
    assert_names(&more(piece(b"x", 0.0, UNKNOWN)), &["pieces 0 and 12", "UNKNOWN"]);
    assert_names(&refusal(&specs(&[], &[])), &["no `pieces`"]);
    assert_names(&refusal(b""), &["no `pieces`"]);
    let unspecified = |field: u64| refusal(&[pieces(), bytes(field, &number(3, 2))].concat());
    assert_names(&unspecified(2), &["no `normalizer_spec`"]);
    assert_names(&unspecified(3), &["no `trainer_spec`"]);
    let known = [piece(b"x", 0.0, NORMAL), specs(&[], &[])].concat();
    assert_names(&refusal(&known), &["none of its pieces", "UNKNOWN"]);
}

/// Loads what may be damaged: a refusal names a file, and what loads can be used.
fn try_damaged(model: &[u8]) -> bool {
    match load(model) {
        Ok(tokenizer) => {
            let ids = ids(&tokenizer, "aab <tool>  é</s> b");
            assert!(ids.iter().all(|id| (*id as usize) < tokenizer.vocab_size()));
            tokenizer.decode(&ids, false);
            true
        }
        Err(error) => {
            assert!(error.to_string().starts_with("tokenizer.model"), "{error}");
            false
        }
    }
}

#[test]
fn a_file_cut_anywhere_is_refused() {
    let model = small();
    for end in 0..model.len() {
        // Also where it ends between two fields, one of its last is missing.
        assert!(!try_damaged(&model[..end]), "cut at {end}");
    }
    assert!(try_damaged(&model));
}

#[test]
fn flipped_bytes_are_refused_or_harmless() {
    let map = charsmap(&[("é", "e"), ("a", "b"), ("aab", " ")]);
    let model = [pieces(), byte_pieces(), specs(&number(35, 1), &bytes(2, &map))].concat();
    assert!(try_damaged(&model));
    // Most of a map is zeros that nothing points to.
    let places: Vec<usize> = (0..model.len()).filter(|at| model[*at] != 0).collect();
    let mut state = 11u64;
    let mut next = || {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 33) as usize
    };
    let mut refused = 0;
    for _ in 0..2000 {
        let mut damaged = model.clone();
        for _ in 0..=next() % 3 {
            let at = places[next() % places.len()];
            damaged[at] ^= 1 << (next() % 8);
        }
        refused += usize::from(!try_damaged(&damaged));
    }
    assert!(refused > 500, "{refused} were refused");
}

/// Llama 2's own file, without the tokenizer.json that lies beside it.
#[test]
fn llama2_ids_are_sentencepieces() {
    let (Some(source), Some(goldens)) = (common::data("tok-llama2"), common::data("goldens-tokenizers"))
    else {
        return;
    };
    let folder = tempfile::tempdir().expect("folder");
    for name in ["tokenizer.model", "tokenizer_config.json", "special_tokens_map.json"] {
        let bytes = std::fs::read(source.join(name)).expect("a file of the data");
        std::fs::write(folder.path().join(name), bytes).expect("written");
    }
    let tokenizer = Tokenizer::from_folder(folder.path()).expect("loads");
    assert_eq!(tokenizer.vocab_size(), 32000);
    assert_eq!(tokenizer.special_ids().collect::<Vec<_>>(), [0, 1, 2]);
    assert_eq!(tokenizer.encode("a", true, NO_LIMIT).expect("encodes")[0], 1);
    let cases = common::gz_lines(goldens.join("llama2-spm.jsonl.gz"));
    assert!(cases.len() > 200, "only {} cases", cases.len());
    for case in &cases {
        let text = case["text"].as_str().expect("text");
        let expected: Vec<u32> = serde_json::from_value(case["ids"].clone()).expect("ids");
        assert_eq!(ids(&tokenizer, text), expected, "{}: {text:?}", case["src"]);
        assert_eq!(tokenizer.decode(&expected, false), text, "{}", case["src"]);
    }
    let json = Tokenizer::from_folder(&source).expect("loads");
    for id in 0..32000 {
        assert_eq!(tokenizer.token_bytes(id), json.token_bytes(id), "{id}");
    }
}
