//! Token ids equal the reference libraries', and streamed text equals the whole decode, byte for byte.

mod common;
#[path = "common/spm.rs"]
mod spm;
#[path = "common/tiktoken.rs"]
mod tiktoken;

use std::path::Path;
use std::sync::LazyLock;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use folio_text::{DetokenizeOptions, Detokenizer, TextError, Tokenizer};
use proptest::prelude::*;
use serde_json::{Value, json};

const NO_LIMIT: usize = usize::MAX;

/// Pieces as a stream would send them, and their bytes so far after each token.
fn stream(tokenizer: &Tokenizer, ids: &[u32], options: DetokenizeOptions) -> Vec<String> {
    let mut detokenizer = Detokenizer::new(options);
    let mut pieces = Vec::new();
    for &id in ids {
        let mut piece = String::new();
        detokenizer.push(tokenizer, id, &mut piece);
        pieces.push(piece);
    }
    let mut rest = String::new();
    detokenizer.finish(tokenizer, &mut rest);
    pieces.push(rest);
    pieces
}

fn joined_bytes(tokenizer: &Tokenizer, ids: &[u32]) -> Vec<u8> {
    ids.iter().flat_map(|&id| tokenizer.token_bytes(id)).copied().collect()
}

/// Every golden text: same ids, and the text comes back from the ids.
fn check_goldens(tokenizer: &Tokenizer, goldens: &Path, name: &str) {
    let cases = common::gz_lines(goldens.join(format!("{name}.jsonl.gz")));
    assert!(cases.len() > 200, "{name}: only {} cases", cases.len());
    for case in &cases {
        let text = case["text"].as_str().expect("text");
        let expected: Vec<u32> = serde_json::from_value(case["ids"].clone()).expect("ids");
        let ids = tokenizer.encode(text, false, NO_LIMIT).expect("encodes");
        assert_eq!(ids, expected, "{name} {}: {text:?}", case["src"]);
        let mut composed = tokenizers::NormalizedString::from(text);
        if name == "qwen2" {
            composed.nfc();
        }
        assert_eq!(tokenizer.decode(&ids, false), composed.get(), "{name} {}", case["src"]);
        assert_eq!(stream(tokenizer, &ids, DetokenizeOptions::default()).concat(), composed.get());
    }
    println!("{name}: {} texts", cases.len());
}

fn llama2() -> Option<Tokenizer> {
    Some(Tokenizer::from_folder(&common::data("tok-llama2")?).expect("loads"))
}

#[test]
fn llama2_ids_and_text() {
    let (Some(tokenizer), Some(goldens)) = (llama2(), common::data("goldens-tokenizers")) else { return };
    assert_eq!(tokenizer.vocab_size(), 32000);
    assert_eq!(tokenizer.special_tokens().eos.as_ref().map(|t| t.id), Some(2));
    assert_eq!(tokenizer.encode("a", true, NO_LIMIT).expect("encodes")[0], 1);
    check_goldens(&tokenizer, &goldens, "llama2-hf-tokenizer-json");
}

#[test]
fn stories_prompts() {
    let Some(folder) = common::data("model-stories260k") else { return };
    let tokenizer = Tokenizer::from_folder(&folder.join("hf")).expect("loads");
    let goldens: Value =
        serde_json::from_slice(&std::fs::read(folder.join("goldens.json")).expect("goldens")).expect("json");
    for case in goldens["cases"].as_array().expect("cases") {
        let prompt = case["prompt"].as_str().expect("prompt");
        let ids = tokenizer.encode(prompt, true, NO_LIMIT).expect("encodes");
        assert_eq!(json!(ids), case["prompt_ids"], "{prompt:?}");
    }
}

fn from_ranks(ranks: &tiktoken::Ranks, pattern: &str, ignore_merges: bool, normalizer: Value) -> Tokenizer {
    let eot = ranks.len() as u32;
    let mut json = tiktoken::tokenizer_json(ranks, pattern, ignore_merges, &[("<|endoftext|>", eot)]);
    json["normalizer"] = normalizer;
    Tokenizer::from_bytes(json.to_string().as_bytes(), None).expect("loads")
}

#[test]
fn gpt2_ids_and_text() {
    let (Some(folder), Some(goldens)) = (common::data("tok-openai"), common::data("goldens-tokenizers"))
    else {
        return;
    };
    let file: Value =
        serde_json::from_slice(&std::fs::read(folder.join("gpt2.json")).expect("file")).expect("json");
    let ranks = tiktoken::rank_runs(file["bpe_ranks"].as_str().expect("ranks"));
    check_goldens(&from_ranks(&ranks, tiktoken::GPT2, false, Value::Null), &goldens, "gpt2");
}

#[test]
fn llama3_ids_and_text() {
    let (Some(folder), Some(goldens)) = (common::data("tok-llama3"), common::data("goldens-tokenizers"))
    else {
        return;
    };
    let text = std::fs::read_to_string(folder.join("tokenizer.model")).expect("file");
    let ranks = tiktoken::rank_lines(&text);
    check_goldens(&from_ranks(&ranks, tiktoken::LLAMA3, true, Value::Null), &goldens, "llama3");
}

#[test]
fn qwen2_ids_and_text() {
    let (Some(folder), Some(goldens)) = (common::data("tok-qwen"), common::data("goldens-tokenizers")) else {
        return;
    };
    let text = std::fs::read_to_string(folder.join("qwen.tiktoken")).expect("file");
    let ranks = tiktoken::rank_lines(&text);
    // Hugging Face's Qwen2 normalizes; the text that comes back is the composed one.
    let tokenizer = from_ranks(&ranks, tiktoken::QWEN2, false, json!({"type": "NFC"}));
    check_goldens(&tokenizer, &goldens, "qwen2");
}

/// Byte-level BPE over all bytes, three merges, a control token (259) and an ordinary added one (260).
fn tiny_bytes() -> Tokenizer {
    let mut ranks: tiktoken::Ranks = (0..=255u8).map(|b| (vec![b], u32::from(b))).collect();
    ranks.insert(vec![0xF0, 0x9F], 256);
    ranks.insert(vec![0x98, 0x80], 257);
    ranks.insert(b" the".to_vec(), 258);
    let mut json =
        tiktoken::tokenizer_json(&ranks, tiktoken::GPT2, true, &[("<|end|>", 259), ("<tool>", 260)]);
    json["added_tokens"][1]["special"] = json!(false);
    let config = json!({"eos_token": {"content": "<|end|>"}, "bos_token": null, "add_bos_token": false});
    Tokenizer::from_bytes(json.to_string().as_bytes(), Some(config.to_string().as_bytes())).expect("loads")
}

/// A tokenizer.json whose texts are written by a charsmap, with pieces of one character.
fn precompiled(map: &Value) -> Result<Tokenizer, TextError> {
    let vocab = [("<unk>", 0.0), ("a", -1.0), ("b", -2.0), (" ", -3.0), ("\u{301}", -4.0)];
    let added = json!([{"id": 5, "content": "<a>", "single_word": false, "lstrip": false, "rstrip": false,
        "normalized": true, "special": false}]);
    let normalizer = json!({"type": "Precompiled", "precompiled_charsmap": map});
    let file = json!({"version": "1.0", "truncation": null, "padding": null, "added_tokens": added,
        "normalizer": {"type": "Sequence", "normalizers": [normalizer]}, "pre_tokenizer": null,
        "post_processor": null, "decoder": null,
        "model": {"type": "Unigram", "unk_id": 0, "byte_fallback": false, "vocab": vocab}});
    Tokenizer::from_bytes(file.to_string().as_bytes(), None)
}

/// As Hugging Face's library does it: clusters of up to 5 bytes by the shortest rule, else single characters.
#[test]
fn a_charsmap_of_a_tokenizer_json_is_followed_as_the_library_does() {
    let rules = [("e\u{301}", "b"), ("e", "a"), ("\u{FF21}", "a"), ("½", "a b"), ("\u{AD}", ""), ("\t", " ")];
    let tokenizer = precompiled(&json!(BASE64.encode(spm::charsmap(&rules)))).expect("loads");
    for (text, ids) in [
        ("ee", &[1, 1][..]),
        ("e\u{301}", &[1]),
        ("\u{FF21}b", &[1, 2]),
        ("½", &[1, 3, 2]),
        ("a\u{AD}\tb", &[1, 3, 2]),
        ("\u{AD}a", &[1]),
        ("e\u{301}\u{301}\u{301}b", &[1, 4, 4, 4, 2]),
    ] {
        assert_eq!(tokenizer.encode(text, false, NO_LIMIT).expect("encodes"), ids, "{text:?}");
    }
}

/// The library would panic, on reading the file or on a text.
#[test]
fn a_damaged_charsmap_of_a_tokenizer_json_is_refused() {
    let refusal = |map: Value| precompiled(&map).expect_err("refused").to_string();
    let sound = spm::charsmap(&[("a", "b")]);
    let mut outside = sound.clone();
    outside[4..8].copy_from_slice(&(768u32 << 10).to_le_bytes());
    for (map, what) in [
        (json!(null), "base64"),
        (json!("%"), "base64"),
        (json!(""), "0 bytes"),
        (json!(BASE64.encode(&outside)), "points to 768"),
        (json!(BASE64.encode(&sound[..sound.len() - 2])), "has no end"),
    ] {
        let sentence = refusal(map);
        for part in ["tokenizer.json", "precompiled_charsmap", what] {
            assert!(sentence.contains(part), "{part:?} is not in: {sentence}");
        }
    }
    let untyped = json!({"normalizer": {"type": {"Precompiled": null}, "precompiled_charsmap": "%"}});
    let sentence = Tokenizer::from_bytes(untyped.to_string().as_bytes(), None).expect_err("refused");
    assert!(sentence.to_string().contains("`type` in its `normalizer`"), "{sentence}");
}

/// Sentencepiece-like BPE with byte fallback: `<unk>`, `<s>`, `</s>`, 256 bytes, then pieces.
fn tiny_sentencepiece(decoder: Value) -> Tokenizer {
    let mut vocab = serde_json::Map::new();
    for (id, token) in ["<unk>", "<s>", "</s>"].iter().enumerate() {
        vocab.insert(token.to_string(), json!(id));
    }
    for byte in 0..=255 {
        vocab.insert(format!("<0x{byte:02X}>"), json!(byte + 3));
    }
    for (id, token) in ["▁", "a", "▁a", "▁▁", "é", "b▁c"].iter().enumerate() {
        vocab.insert(token.to_string(), json!(id + 259));
    }
    let special = |id: u32, content: &str| {
        json!({"id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
               "normalized": false, "special": true})
    };
    let file = json!({
        "version": "1.0", "truncation": {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0},
        "padding": {"strategy": {"Fixed": 8}, "direction": "Right", "pad_to_multiple_of": null, "pad_id": 0,
                    "pad_type_id": 0, "pad_token": "<unk>"},
        "added_tokens": [special(0, "<unk>"), special(1, "<s>"), special(2, "</s>")],
        "normalizer": {"type": "Sequence", "normalizers": [
            {"type": "Prepend", "prepend": "▁"}, {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]},
        "pre_tokenizer": null, "post_processor": null, "decoder": decoder,
        "model": {"type": "BPE", "dropout": null, "unk_token": "<unk>", "continuing_subword_prefix": null,
                  "end_of_word_suffix": null, "fuse_unk": true, "byte_fallback": true, "vocab": vocab,
                  "merges": [["▁", "a"], ["▁", "▁"]]},
    });
    let config = json!({"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": true});
    Tokenizer::from_bytes(file.to_string().as_bytes(), Some(config.to_string().as_bytes())).expect("loads")
}

fn llama_decoder() -> Value {
    json!({"type": "Sequence", "decoders": [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0}]})
}

#[test]
fn a_file_may_not_truncate_or_pad() {
    let tokenizer = tiny_sentencepiece(llama_decoder());
    assert_eq!(tokenizer.encode("aaaaaa", false, NO_LIMIT).expect("encodes").len(), 6);
    assert_eq!(tokenizer.encode("a", false, NO_LIMIT).expect("encodes"), [261]);
}

#[test]
fn bos_is_added_where_only_the_configuration_says_so() {
    let tokenizer = tiny_sentencepiece(llama_decoder());
    assert_eq!(tokenizer.encode("a", true, NO_LIMIT).expect("encodes"), [1, 261]);
}

#[test]
fn a_text_over_the_limit_is_refused() {
    let tokenizer = tiny_bytes();
    assert!(matches!(tokenizer.encode("abcd", false, 3), Err(TextError::TooLong { bytes: 4, limit: 3 })));
    assert_eq!(tokenizer.encode("abc", false, 3).expect("encodes").len(), 3);
}

#[test]
fn split_characters_are_held_and_broken_ones_replaced() {
    let tokenizer = tiny_bytes();
    let options = DetokenizeOptions::default();
    assert_eq!(stream(&tokenizer, &[258, 256, 257, 33], options), [" the", "", "😀", "!", ""]);
    // An unfinished character before an ordinary byte, and at the end.
    assert_eq!(stream(&tokenizer, &[256, 65, 0xE4], options), ["", "\u{FFFD}A", "", "\u{FFFD}"]);
    // A stray continuation byte is not held.
    assert_eq!(stream(&tokenizer, &[0x80, 65], options), ["\u{FFFD}", "A", ""]);
    // Ids that are no token add nothing.
    assert_eq!(stream(&tokenizer, &[261, 9999, 65], options), ["", "", "A", ""]);
}

#[test]
fn special_tokens_are_skipped_when_asked() {
    let tokenizer = tiny_bytes();
    assert_eq!(tokenizer.encode("x<|end|><tool>", false, NO_LIMIT).expect("encodes"), [120, 259, 260]);
    assert_eq!(tokenizer.decode(&[120, 259, 260], true), "x<tool>");
    assert_eq!(tokenizer.decode(&[120, 259, 260], false), "x<|end|><tool>");
    assert_eq!(tokenizer.special_ids().collect::<Vec<_>>(), [259]);
    // A control token inside a character does not break it.
    assert_eq!(tokenizer.decode(&[256, 259, 257], true), "😀");
}

#[test]
fn the_first_space_is_a_mark_only_at_a_texts_start() {
    let tokenizer = tiny_sentencepiece(llama_decoder());
    let at_start = DetokenizeOptions { skip_special_tokens: true, continues: false };
    assert_eq!(stream(&tokenizer, &[1, 261, 261], at_start).concat(), "a a");
    let continued = DetokenizeOptions { continues: true, ..at_start };
    assert_eq!(stream(&tokenizer, &[261, 261], continued).concat(), " a a");
    // Without skipping, the text starts with the control token and nothing is stripped.
    assert_eq!(tokenizer.decode(&[1, 261], false), "<s> a");
    // One space at most.
    assert_eq!(tokenizer.decode(&[262, 260], false), " a");
}

#[test]
fn text_equals_the_library_decode_where_the_bytes_are_text() {
    let metaspace =
        json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": false});
    let whole = json!({"type": "WordPiece", "prefix": "##", "cleanup": false});
    for decoder in [llama_decoder(), metaspace, whole, Value::Null] {
        let tokenizer = tiny_sentencepiece(decoder.clone());
        let file = library_copy(&decoder);
        for ids in [vec![261, 260, 259, 264], vec![262, 261], vec![260, 263, 263], vec![264], vec![]] {
            let library = file.decode(&ids, true).expect("decodes");
            assert_eq!(tokenizer.decode(&ids, true), library, "{decoder} {ids:?}");
        }
    }
}

/// The same tokenizer as the library sees it.
fn library_copy(decoder: &Value) -> tokenizers::Tokenizer {
    let vocab: Vec<(String, u32)> = (0..265)
        .map(|id| match id {
            0..=2 => (["<unk>", "<s>", "</s>"][id as usize].to_owned(), id),
            3..=258 => (format!("<0x{:02X}>", id - 3), id),
            _ => (["▁", "a", "▁a", "▁▁", "é", "b▁c"][id as usize - 259].to_owned(), id),
        })
        .collect();
    let map: serde_json::Map<String, Value> = vocab.into_iter().map(|(t, id)| (t, json!(id))).collect();
    let file = json!({"version": "1.0", "added_tokens": [], "normalizer": null, "pre_tokenizer": null,
        "post_processor": null, "decoder": decoder, "truncation": null, "padding": null,
        "model": {"type": "BPE", "unk_token": "<unk>", "byte_fallback": true, "vocab": map, "merges": []}});
    tokenizers::Tokenizer::from_bytes(file.to_string()).expect("loads")
}

#[test]
fn damaged_files_are_refused_by_name() {
    let error = |json: &str, config: Option<&str>| {
        Tokenizer::from_bytes(json.as_bytes(), config.map(str::as_bytes)).expect_err("refused").to_string()
    };
    assert!(error("{", None).contains("tokenizer.json"));
    assert!(error("{\"model\": 3}", None).contains("tokenizer.json"));
    assert!(error("{\"version\": \"1.0\"}", None).contains("tokenizer.json"));
    let good = tiktoken::tokenizer_json(&[(vec![b'a'], 0)].into(), tiktoken::GPT2, true, &[]).to_string();
    assert!(error(&good, Some("[]")).contains("tokenizer_config.json"));
    let far =
        tiktoken::tokenizer_json(&[(vec![b'a'], u32::MAX)].into(), tiktoken::GPT2, true, &[]).to_string();
    assert!(error(&far, None).contains("larger than"));
    // The library would silently give this token the id 1.
    let gap =
        tiktoken::tokenizer_json(&[(vec![b'a'], 0)].into(), tiktoken::GPT2, true, &[("<e>", 7)]).to_string();
    assert!(error(&gap, None).contains("\"<e>\""));
    let folder = tempfile::tempdir().expect("folder");
    let refusal = || Tokenizer::from_folder(folder.path()).expect_err("refused").to_string();
    let error = refusal();
    assert!(error.contains("tokenizer.model") && error.contains("save_pretrained"), "{error}");
    std::fs::write(folder.path().join("tiktoken.model"), b"IQ== 0\n").expect("file");
    assert!(refusal().contains("tiktoken.model is not a tokenizer"));
    std::fs::write(folder.path().join("tokenizer.model"), b"x").expect("file");
    let error = refusal();
    assert!(error.contains("tokenizer.model") && error.contains("ends within the number"), "{error}");
}

static BYTES: LazyLock<Tokenizer> = LazyLock::new(tiny_bytes);
static PIECES: LazyLock<Tokenizer> = LazyLock::new(|| tiny_sentencepiece(llama_decoder()));

proptest! {
    #![proptest_config(ProptestConfig { cases: 512, failure_persistence: None, ..ProptestConfig::default() })]

    /// Any ids whatever: the pieces make up the whole, which is the lossy reading of the bytes.
    #[test]
    fn streamed_bytes_equal_the_whole(ids in prop::collection::vec(0u32..270, 0..40)) {
        let tokenizer = &*BYTES;
        let whole = tokenizer.decode(&ids, false);
        let bytes = joined_bytes(tokenizer, &ids);
        prop_assert_eq!(whole.as_str(), &*String::from_utf8_lossy(&bytes));
        prop_assert_eq!(stream(tokenizer, &ids, DetokenizeOptions::default()).concat(), whole);
    }

    /// A text cut into any bytes comes back exactly, and what is held is never more than three bytes.
    #[test]
    fn texts_come_back_from_single_bytes(text in "\\PC{0,40}") {
        let tokenizer = &*BYTES;
        let ids: Vec<u32> = text.bytes().map(u32::from).collect();
        let pieces = stream(tokenizer, &ids, DetokenizeOptions::default());
        prop_assert_eq!(pieces.last().map(String::as_str), Some(""));
        let mut sent = 0;
        for (index, piece) in pieces.iter().enumerate() {
            sent += piece.len();
            prop_assert!(index + 1 - sent.min(index + 1) <= 3);
        }
        prop_assert_eq!(pieces.concat(), text);
    }

    #[test]
    fn streamed_sentencepiece_equals_the_whole(ids in prop::collection::vec(0u32..270, 0..40), skip in any::<bool>()) {
        let tokenizer = &*PIECES;
        let options = DetokenizeOptions { skip_special_tokens: skip, continues: false };
        let kept: Vec<u32> = ids.iter().copied().filter(|id| !skip || *id > 2).collect();
        let bytes = joined_bytes(tokenizer, &kept);
        let expected = String::from_utf8_lossy(bytes.strip_prefix(b" ").unwrap_or(&bytes)).into_owned();
        prop_assert_eq!(stream(tokenizer, &ids, options).concat(), expected.clone());
        prop_assert_eq!(tokenizer.decode(&ids, skip), expected);
    }
}

/// Random real ids, with the real vocabulary.
#[test]
fn random_llama2_ids_stream_exactly() {
    let Some(tokenizer) = llama2() else { return };
    let mut state = 7u64;
    for _ in 0..300 {
        let ids: Vec<u32> = (0..64)
            .map(|_| {
                state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                (state >> 33) as u32 % if state & (1 << 20) == 0 { 32000 } else { 300 }
            })
            .collect();
        let bytes = joined_bytes(&tokenizer, &ids);
        let expected = String::from_utf8_lossy(bytes.strip_prefix(b" ").unwrap_or(&bytes)).into_owned();
        assert_eq!(stream(&tokenizer, &ids, DetokenizeOptions::default()).concat(), expected);
    }
}
