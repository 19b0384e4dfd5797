//! Tokenizers and templates inside GGUF files: ids equal llama.cpp's and the models' own tokenizers'.

mod common;

use std::io::Read;

use folio_model::checkpoint::gguf::{Header, Metadata, read_header};
use folio_model::testing::gguf::Writer;
use folio_text::{DetokenizeOptions, Detokenizer, TemplateSources, TextError, Tokenizer};
use serde_json::Value;

const NO_LIMIT: usize = usize::MAX;

/// A vocabulary file of llama.cpp: no tensors.
struct File {
    name: String,
    bytes: Vec<u8>,
    header: Header,
}

impl File {
    fn new(name: &str, bytes: Vec<u8>) -> Self {
        let header = read_header(&bytes).expect("sound");
        Self { name: name.to_owned(), bytes, header }
    }

    fn metadata(&self) -> Metadata<'_> {
        Metadata::new(&self.name, &self.bytes, &self.header)
    }

    fn tokenizer(&self) -> Result<Tokenizer, TextError> {
        Tokenizer::from_gguf(self.metadata())
    }
}

fn vocabulary(name: &str) -> Option<File> {
    let path = common::data("tok-ggml-vocab")?.join(format!("ggml-vocab-{name}.gguf.gz"));
    let mut bytes = Vec::new();
    let file = std::fs::File::open(path).expect("vocabulary");
    flate2::read::GzDecoder::new(file).read_to_end(&mut bytes).expect("gzip");
    Some(File::new(name, bytes))
}

/// llama.cpp's own cases: texts and ids without bos. `golden` names those of the model's own tokenizer.
fn check(name: &str, golden: Option<&str>) -> Option<(File, Tokenizer)> {
    let (file, folder) = (vocabulary(name)?, common::data("tok-ggml-vocab")?);
    let tokenizer = file.tokenizer().expect("supported");
    let read = |end: &str| {
        std::fs::read_to_string(folder.join(format!("ggml-vocab-{name}.gguf.{end}"))).expect("cases")
    };
    let (texts, ids) = (read("inp"), read("out"));
    let mut checked = 0;
    for (text, line) in texts.split("\n__ggml_vocab_test__\n").zip(ids.lines()) {
        let expected: Vec<u32> = line.split_whitespace().map(|id| id.parse().expect("id")).collect();
        assert_eq!(tokenizer.encode(text, false, NO_LIMIT).expect("encodes"), expected, "{name}: {text:?}");
        check_text(&tokenizer, text, &expected);
        checked += 1;
    }
    assert!(checked >= 46, "{name}: only {checked} cases");
    if let (Some(golden), Some(goldens)) = (golden, common::data("goldens-tokenizers")) {
        let cases = common::gz_lines(goldens.join(format!("{golden}.jsonl.gz")));
        assert!(cases.len() > 200, "{golden}");
        for case in &cases {
            let text = case["text"].as_str().expect("text");
            let expected: Vec<u32> = serde_json::from_value(case["ids"].clone()).expect("ids");
            let ids = tokenizer.encode(text, false, NO_LIMIT).expect("encodes");
            assert_eq!(ids, expected, "{golden} {}: {text:?}", case["src"]);
        }
        checked += cases.len();
    }
    println!("{name}: {checked} texts");
    Some((file, tokenizer))
}

/// The text comes back from its ids.
fn check_text(tokenizer: &Tokenizer, text: &str, ids: &[u32]) {
    let mut detokenizer = Detokenizer::new(DetokenizeOptions::default());
    let mut back = String::new();
    for id in ids {
        detokenizer.push(tokenizer, *id, &mut back);
    }
    detokenizer.finish(tokenizer, &mut back);
    assert_eq!(back, text);
}

#[test]
fn llama_bpe() {
    let Some((_, tokenizer)) = check("llama-bpe", Some("llama3")) else { return };
    let text = "<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>";
    let ids = tokenizer.encode(text, true, NO_LIMIT).expect("encodes");
    // bos is added though the file does not say so: the pre-tokenizer's models expect it.
    assert_eq!(ids, [128000, 128006, 882, 128007, 271, 13347, 128009]);
    assert_eq!(tokenizer.decode(&ids, true), "user\n\nHi");
    assert_eq!(tokenizer.special_tokens().bos.as_ref().map(|bos| bos.id), Some(128000));
    assert_eq!(tokenizer.special_tokens().named["eos"], "<|end_of_text|>");
    assert_eq!(tokenizer.vocab_size(), 128256);
    assert_eq!(tokenizer.token_id("<|eot_id|>"), Some(128009));
}

#[test]
fn llama_spm() {
    check("llama-spm", Some("llama2-spm"));
}

#[test]
fn phi3() {
    let Some((_, tokenizer)) = check("phi-3", None) else { return };
    let ids = tokenizer.encode("<|user|>\nHi<|end|>\n<|assistant|>\n", true, NO_LIMIT).expect("encodes");
    // White space after a role belongs to it, and a space is put before what follows.
    assert_eq!(ids, [1, 32010, 6324, 32007, 32001]);
    assert_eq!(tokenizer.decode(&ids, true), "Hi");
    assert_eq!(tokenizer.token_text(6324).as_deref(), Some("▁Hi"));
    assert!(tokenizer.is_special(32007) && !tokenizer.is_special(6324) && !tokenizer.is_special(3));
}

#[test]
fn qwen2() {
    let Some((file, tokenizer)) = check("qwen2", Some("qwen2")) else { return };
    let sources = TemplateSources::from_gguf(file.metadata()).expect("reads");
    let template = folio_text::ChatTemplate::compile(sources, tokenizer.special_tokens()).expect("compiles");
    assert_eq!(template.expect("there is one").origin(), "tokenizer.chat_template of qwen2");
}

#[test]
fn gpt2() {
    let Some((file, _)) = check("gpt-2", Some("gpt2")) else { return };
    assert!(TemplateSources::from_gguf(file.metadata()).expect("reads").is_empty());
}

#[test]
fn starcoder() {
    check("starcoder", None);
}

/// Each named pre-tokenizer on a small vocabulary that shows every cut: ids are llama.cpp's (`tools/make_pre_tokens.py`).
#[test]
fn every_pre_tokenizer_cuts_as_llama_cpp_does() {
    let expected: Value = serde_json::from_str(include_str!("gguf_pre.json")).expect("JSON");
    let strings = |key: &str| serde_json::from_value::<Vec<String>>(expected[key].clone()).expect("strings");
    let (texts, tokens, merges) = (strings("texts"), strings("tokens"), strings("merges"));
    let mut seen = std::collections::BTreeSet::new();
    for (name, ids) in expected["ids"].as_object().expect("names") {
        let writer = Writer::new("llama")
            .text("tokenizer.ggml.model", "gpt2")
            .text("tokenizer.ggml.pre", name)
            .texts("tokenizer.ggml.tokens", &tokens.iter().map(String::as_str).collect::<Vec<_>>())
            .texts("tokenizer.ggml.merges", &merges.iter().map(String::as_str).collect::<Vec<_>>());
        let tokenizer = File::new(name, writer.finish()).tokenizer().expect("supported");
        let ids: Vec<Vec<u32>> = serde_json::from_value(ids.clone()).expect("ids");
        for (text, ids) in texts.iter().zip(&ids) {
            // llama.cpp's patterns for these two leave out the combining marks that the models' own have.
            if ["tekken", "gpt-4o"].contains(&name.as_str()) && text.contains('\u{94d}') {
                continue;
            }
            assert_eq!(&tokenizer.encode(text, false, NO_LIMIT).expect("encodes"), ids, "{name}: {text:?}");
            check_text(&tokenizer, text, ids);
        }
        seen.insert(ids);
    }
    // The texts tell them apart, but for qwen2 and deepseek-r1-qwen, which differ in composition alone.
    assert_eq!((expected["ids"].as_object().expect("names").len(), seen.len()), (12, 11));
}

/// A small file of our own making.
struct Builder(Writer);

impl Builder {
    fn new(model: &str, tokens: &[&str], kinds: &[i32]) -> Self {
        let writer = Writer::new("llama").text("tokenizer.ggml.model", model);
        Self(writer.texts("tokenizer.ggml.tokens", tokens).i32s("tokenizer.ggml.token_type", kinds))
    }

    fn with(self, edit: impl FnOnce(Writer) -> Writer) -> Self {
        Self(edit(self.0))
    }

    fn file(self) -> File {
        File::new("small.gguf", self.0.finish())
    }

    fn refusal(self) -> String {
        let file = self.file();
        file.tokenizer().expect_err("refused").to_string()
    }
}

fn assert_names(sentence: &str, parts: &[&str]) {
    for part in parts {
        assert!(sentence.contains(part), "{part:?} is not in: {sentence}");
    }
}

#[test]
fn what_is_not_understood_is_refused_by_name() {
    let gpt2 = || Builder::new("gpt2", &["a", "b", "ab"], &[1, 1, 1]);
    let merges = |w: Writer| w.texts("tokenizer.ggml.merges", &["a b"]);
    let pre = |name: &'static str| move |w: Writer| w.text("tokenizer.ggml.pre", name);
    gpt2().with(merges).with(pre("gpt-2")).file().tokenizer().expect("supported");
    assert_names(&gpt2().with(merges).refusal(), &["small.gguf", "tokenizer.ggml.pre", "convert"]);
    assert_names(&gpt2().with(merges).with(pre("default")).refusal(), &["tokenizer.ggml.pre"]);
    assert_names(&gpt2().with(merges).with(pre("viking")).refusal(), &["`viking`", "llama-bpe", "qwen2"]);
    assert_names(&gpt2().with(pre("gpt-2")).refusal(), &["tokenizer.ggml.merges"]);
    let wrong = |merge: &'static str| {
        gpt2().with(pre("gpt-2")).with(|w| w.texts("tokenizer.ggml.merges", &[merge])).refusal()
    };
    assert_names(&wrong("ab"), &["\"ab\"", "two tokens"]);
    assert_names(&wrong(""), &["two tokens"]);
    assert_names(&wrong("ab ab"), &["\"abab\""]);
    assert_names(&wrong("a c"), &["\"c\""]);
    let bert = Builder::new("bert", &["a"], &[1]).refusal();
    assert_names(&bert, &["`bert`", "gpt2", "gemma4", "llama"]);
    assert_names(&Builder::new("gemma4", &["a"], &[1]).refusal(), &["tokenizer.ggml.merges"]);
    assert_names(&Builder::new("llama", &["a"], &[1]).refusal(), &["tokenizer.ggml.scores"]);
    assert_names(&Builder::new("llama", &["a", "a"], &[1, 1]).refusal(), &["\"a\" twice", "0", "1"]);
    assert_names(&Builder::new("llama", &["a"], &[1, 1]).refusal(), &["token_type", "2 types for 1"]);
    let empty = File::new("small.gguf", Writer::new("llama").finish());
    assert_names(&empty.tokenizer().expect_err("refused").to_string(), &["small.gguf", "no tokenizer"]);
}

/// Merges go across words, in their own order; scores mean nothing.
#[test]
fn characters_are_merged_in_order_and_fall_back_to_bytes() {
    let tokens = [
        "<pad>",
        "<eos>",
        "<bos>",
        "<unk>",
        "▁",
        "a",
        "b",
        "ab",
        "▁a",
        "b▁",
        "\n",
        "\n\n",
        "<0xC3>",
        "<0xA9>",
        "<|channel>",
        "<turn|>",
        "▁▁",
    ];
    let kinds = [3, 3, 3, 3, 1, 1, 1, 1, 1, 1, 1, 1, 6, 6, 4, 4, 1];
    let merges = ["b ▁", "a b", "▁ a", "\n \n", "▁ ▁"];
    let file = Builder::new("gemma4", &tokens, &kinds)
        .with(|w| w.texts("tokenizer.ggml.merges", &merges))
        .with(|w| w.u32("tokenizer.ggml.bos_token_id", 2).u32("tokenizer.ggml.eos_token_id", 1))
        .with(|w| w.u32("tokenizer.ggml.unknown_token_id", 3).u32("tokenizer.ggml.padding_token_id", 0))
        .file();
    let tokenizer = file.tokenizer().expect("supported");
    let ids = |text: &str| tokenizer.encode(text, false, NO_LIMIT).expect("encodes");
    // No space is put before a text, and a token may end with one.
    assert_eq!(ids("ab"), [7]);
    assert_eq!(ids("ab ab"), [5, 9, 7]);
    assert_eq!(ids(" a\n\n\n  a"), [8, 11, 10, 4, 8]);
    assert_eq!(ids("é"), [12, 13]);
    assert_eq!(ids("a<|channel>b<turn|>"), [5, 14, 6, 15]);
    assert_eq!(tokenizer.encode("a", true, NO_LIMIT).expect("encodes"), [2, 5]);
    assert_eq!(tokenizer.decode(&[2, 8, 9, 12, 13, 14, 11, 15], true), " ab é<|channel>\n\n");
    for text in ["ab  ab\n", "é ab", " "] {
        assert_eq!(tokenizer.decode(&ids(text), true), text);
    }
}

#[test]
fn sentencepiece_follows_scores_and_falls_back_to_bytes() {
    // Two ids without a text, as some files have.
    let tokens = ["<unk>", "<s>", "</s>", "▁", "a", "b", "aa", "ab", "<tool>", "<0x43>", "▁a", "", ""];
    let scores: Vec<f32> = vec![0.0, 0.0, 0.0, -9.0, -8.0, -7.0, -2.0, -1.0, 0.0, 0.0, -5.0, 0.0, 0.0];
    let build = |edit: fn(Writer) -> Writer| {
        let kinds = [2, 3, 3, 1, 1, 1, 1, 1, 4, 6, 1, 1, 3];
        let file = Builder::new("llama", &tokens, &kinds)
            .with(|w| w.f32s("tokenizer.ggml.scores", &scores))
            .with(edit)
            .file();
        file.tokenizer().expect("supported")
    };
    let plain = build(|w| w);
    let ids = |tokenizer: &Tokenizer, text: &str| tokenizer.encode(text, false, NO_LIMIT).expect("encodes");
    // "ab" scores above "aa", wherever it is; equal scores go to the left.
    assert_eq!(ids(&plain, "aab"), [10, 7]);
    assert_eq!(ids(&plain, "baaa"), [3, 5, 6, 4]);
    // A byte where there is one, <unk> where there is not; control tokens are recognized, bytes are not spelled.
    assert_eq!(ids(&plain, "C"), [3, 9]);
    assert_eq!(ids(&plain, "é"), [3, 0]);
    assert_eq!(ids(&plain, "a</s>b<tool>"), [10, 2, 3, 5, 8]);
    assert_eq!(plain.encode("a", true, NO_LIMIT).expect("encodes"), [1, 10]);
    assert_eq!(plain.decode(&[1, 10, 9, 8], true), "aC<tool>");
    let ends =
        build(|w| w.flag("tokenizer.ggml.add_eos_token", true).flag("tokenizer.ggml.add_bos_token", false));
    assert_eq!(ends.encode("a", true, NO_LIMIT).expect("encodes"), [10, 2]);
    let bare = build(|w| w.flag("tokenizer.ggml.add_space_prefix", false));
    assert_eq!(ids(&bare, "ab a"), [7, 10]);
    assert_eq!(bare.decode(&[10], true), " a");
}
