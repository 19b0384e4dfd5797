//! Folders whose tokenizer is a tiktoken.model: Moonshot's class is followed, and any other is refused by a sentence.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use folio_text::{TextError, Tokenizer};
use serde_json::{Value, json};

const NO_LIMIT: usize = usize::MAX;

/// All bytes, the last one first, and four more.
fn tokens() -> Vec<Vec<u8>> {
    let bytes = (0..=255u8).rev().map(|byte| vec![byte]);
    bytes.chain(["ab", "中文", "34", " a"].map(|text| text.as_bytes().to_vec())).collect()
}

fn list(tokens: &[Vec<u8>]) -> String {
    (0..).zip(tokens).map(|(rank, token): (usize, _)| format!("{} {rank}\n", BASE64.encode(token))).collect()
}

fn config() -> Value {
    json!({"auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", null]},
        "tokenizer_class": "TikTokenTokenizer", "bos_token": "[BOS]", "eos_token": {"content": "<|im_end|>"},
        "additional_special_tokens": ["<|im_user|>"],
        "added_tokens_decoder": {
            "260": {"content": "[BOS]", "special": true}, "261": {"content": "[EOS]"},
            "262": {"content": "<|im_end|>", "special": true}, "263": {"content": "<|im_user|>", "special": false},
            "264": {"content": "<|tool_call_begin|>", "special": false}}})
}

fn load(list: &str, config: &Value) -> Result<Tokenizer, TextError> {
    Tokenizer::from_tiktoken(list.as_bytes(), Some(config.to_string().as_bytes()))
}

fn ids(tokenizer: &Tokenizer, text: &str) -> Vec<u32> {
    tokenizer.encode(text, true, NO_LIMIT).expect("encodes")
}

#[test]
fn words_and_special_tokens_are_those_of_the_class() {
    let folder = tempfile::tempdir().expect("a folder");
    std::fs::write(folder.path().join("tiktoken.model"), list(&tokens())).expect("written");
    std::fs::write(folder.path().join("tokenizer_config.json"), config().to_string()).expect("written");
    let tokenizer = Tokenizer::from_folder(folder.path()).expect("loads");
    let byte = |byte: u8| 255 - u32::from(byte);
    assert_eq!(ids(&tokenizer, "abab a"), [256, 256, 259]);
    // A run of Chinese characters is a word, and a word that is a token is that token.
    assert_eq!(ids(&tokenizer, "中文a"), [257, byte(b'a')]);
    // Numbers are cut after three digits.
    assert_eq!(ids(&tokenizer, "1234"), [b'1', b'2', b'3', b'4'].map(byte));
    assert_eq!(ids(&tokenizer, "34"), [258]);
    // Nothing is put around a text.
    assert_eq!(ids(&tokenizer, "ab<|im_end|><|tool_call_begin|>"), [256, 262, 264]);
    assert_eq!(tokenizer.decode(&[260, 256, 262, 263, 264, 257], true), "ab<|tool_call_begin|>中文");
    assert_eq!(tokenizer.special_ids().collect::<Vec<_>>(), [260, 261, 262, 263]);
    assert_eq!(tokenizer.token_id("<|reserved_token_515|>"), Some(515));
    assert_eq!(tokenizer.vocab_size(), 516);
    let special = tokenizer.special_tokens();
    let roles = [&special.bos, &special.eos].map(|token| token.as_ref().map(|token| token.id));
    assert_eq!(roles, [Some(260), Some(262)]);
    // No special token is made of a text in which none may be.
    let broken = tokenizer.encode_with("<|im_end|>", Some(&[3]), false, NO_LIMIT, None).expect("encodes");
    assert!(broken.iter().all(|id| *id < 260), "{broken:?}");
}

#[test]
fn what_is_no_such_file_is_refused_by_a_sentence() {
    let refused = |list: &str, config: &Value, words: &str| {
        let error = load(list, config).expect_err("refused").to_string();
        assert!(error.starts_with("tiktoken.model is not a tokenizer"), "{error}");
        assert!(error.contains(words), "{words:?} is not in: {error}");
    };
    let sound = list(&tokens());
    let with = |change: fn(&mut Value)| {
        let mut config = config();
        change(&mut config);
        config
    };
    refused(&sound, &json!({}), "tokenization_kimi.TikTokenTokenizer");
    refused(&sound, &json!({"auto_map": {"AutoTokenizer": []}}), "tokenization_kimi");
    refused(
        &sound,
        &with(|config| config["auto_map"]["AutoTokenizer"][0] = json!("hy.HYTokenizer")),
        "hy.HYTokenizer",
    );
    let named = "moonshotai/Moonlight--tokenization_moonshot.TikTokenTokenizer";
    let mut moonlight = config();
    moonlight["auto_map"]["AutoTokenizer"] = json!(named);
    assert!(load(&sound, &moonlight).is_ok());
    let changed = |change: fn(&mut Vec<Vec<u8>>)| {
        let mut tokens = tokens();
        change(&mut tokens);
        list(&tokens)
    };
    refused("", &config(), "the byte 0 is none of its tokens");
    refused(&changed(|tokens| drop(tokens.remove(255 - 65))), &config(), "the byte 65 is none");
    // Behind one more token the special ones have other ids.
    let unlisted = with(|config| config["added_tokens_decoder"] = json!({}));
    refused(&changed(|tokens| tokens.push(b"ab".to_vec())), &unlisted, "ranks 256 and 260 are the same");
    refused(&changed(|tokens| tokens.push(Vec::new())), &config(), "of rank 260 has 0 bytes");
    refused(&changed(|tokens| tokens.push(vec![b'a'; 513])), &config(), "of rank 260 has 513 bytes");
    refused(&format!("{sound}YWI= 261\n"), &config(), "entry 260 has the rank \"261\"");
    refused(&format!("{sound}YWI="), &config(), "entry 260 has the rank \"\"");
    refused(&format!("{sound}? 260"), &config(), "of rank 260 is no base64");
    for id in ["259", "516", "-1", "x"] {
        let mut config = config();
        config["added_tokens_decoder"][id] = json!({"content": "<x>"});
        refused(&sound, &config, &format!("for the id {id:?}, expected a `content` for one of 260 to 515"));
    }
    refused(&sound, &with(|config| config["added_tokens_decoder"]["265"] = json!({})), "for the id \"265\"");
    let named = |text: &str| {
        let mut config = config();
        config["added_tokens_decoder"]["265"] = json!({"content": text});
        config
    };
    refused(&sound, &named("[EOS]"), "\"[EOS]\" is there twice");
    refused(&sound, &named(""), "without a text");
    refused(&sound, &named("ab"), "of rank 256 is the special token \"ab\"");
    refused(&sound, &named("word"), "\"word\" is one word");
    let error = Tokenizer::from_tiktoken(sound.as_bytes(), Some(b"[]")).expect_err("refused");
    assert!(error.to_string().starts_with("tokenizer_config.json"), "{error}");
}
