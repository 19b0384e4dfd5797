//! Test data that is not ours: found by `FOLIO_TEST_DATA`, skipped with a warning without it.
#![allow(dead_code)] // Each test file uses a part of this.

use std::io::{Read, Write};
use std::path::PathBuf;

use folio_model::checkpoint::gguf::{Metadata, read_header};
use folio_text::Tokenizer;
use serde_json::{Map, Value, json};

/// A folder of the test data, or `None` after saying so.
pub fn data(folder: &str) -> Option<PathBuf> {
    let root = std::env::var_os("FOLIO_TEST_DATA").map(PathBuf::from);
    let root = root.unwrap_or_else(|| PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../../shared/data"));
    let path = root.join(folder);
    if path.exists() {
        return Some(path);
    }
    // Past the test runner, which shows what a passing test prints to nobody.
    let _ = writeln!(std::io::stderr(), "SKIPPED: no {} (set FOLIO_TEST_DATA)", path.display());
    None
}

/// The JSON objects of a gzipped file, one a line.
pub fn gz_lines(path: PathBuf) -> Vec<serde_json::Value> {
    let file = std::fs::File::open(&path).expect("golden file");
    let mut text = String::new();
    flate2::read::GzDecoder::new(file).read_to_string(&mut text).expect("gzip");
    text.lines().map(|line| serde_json::from_str(line).expect("json")).collect()
}

fn gguf(name: &str) -> Option<Tokenizer> {
    let path = data("tok-ggml-vocab")?.join(format!("ggml-vocab-{name}.gguf.gz"));
    let mut bytes = Vec::new();
    let file = std::fs::File::open(path).expect("vocabulary");
    flate2::read::GzDecoder::new(file).read_to_end(&mut bytes).expect("gzip");
    let header = read_header(&bytes).expect("sound");
    Some(Tokenizer::from_gguf(Metadata::new(name, &bytes, &header)).expect("supported"))
}

/// One of each kind.
pub fn real_tokenizers() -> Vec<(&'static str, Tokenizer)> {
    let names = ["llama-spm", "phi-3", "llama-bpe", "qwen2", "gpt-2", "starcoder"];
    let mut all: Vec<(&str, Tokenizer)> =
        names.into_iter().filter_map(|name| Some((name, gguf(name)?))).collect();
    let llama2 = data("tok-llama2").map(|folder| Tokenizer::from_folder(&folder).expect("loads"));
    all.extend(llama2.map(|tokenizer| ("llama2", tokenizer)));
    all
}

/// A tokenizer.json with this model, and the markers of a turn behind its vocabulary.
fn made(model: Value, words: Value, decoder: Value) -> Tokenizer {
    let first =
        model["vocab"].as_array().map_or_else(|| model["vocab"].as_object().map_or(0, Map::len), Vec::len);
    let markers = ["<|im_start|>", "<|im_end|>", "[CLS]", "<think>"];
    let added: Vec<Value> = markers
        .iter()
        .enumerate()
        .map(|(at, content)| {
            json!({"id": first + at, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
                "normalized": false, "special": at < 3})
        })
        .collect();
    let file = json!({"version": "1.0", "truncation": null, "padding": null, "added_tokens": added, "normalizer": null,
        "pre_tokenizer": words, "post_processor": null, "decoder": decoder, "model": model});
    Tokenizer::from_bytes(file.to_string().as_bytes(), None).expect("loads")
}

/// The kinds of models that no real vocabulary here is of, over printable ASCII and a few more.
pub fn made_tokenizers() -> Vec<(&'static str, Tokenizer)> {
    let chars: Vec<String> =
        (33..127u8).map(|byte| char::from(byte).to_string()).chain(["é".into(), "中".into()]).collect();
    let pieces = chars.iter().flat_map(|char| [char.clone(), format!("##{char}")]);
    let vocab: Map<String, Value> = ["[UNK]".to_owned()]
        .into_iter()
        .chain(pieces)
        .enumerate()
        .map(|(id, piece)| (piece, id.into()))
        .collect();
    let wordpiece = made(
        json!({"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##", "max_input_chars_per_word": 100,
            "vocab": vocab}),
        json!({"type": "BertPreTokenizer"}),
        json!({"type": "WordPiece", "prefix": "##", "cleanup": false}),
    );
    let words = ["▁", "▁a", "ab", "abc", "system", "user", "▁system"].map(str::to_owned);
    let scored: Vec<Value> = [("<unk>".to_owned(), 0.0)]
        .into_iter()
        .chain(words.into_iter().map(|word| (word, -2.0)))
        .chain(chars.iter().map(|char| (char.clone(), -4.0)))
        .chain((0..=255u8).map(|byte| (format!("<0x{byte:02X}>"), -9.0)))
        .map(|(piece, score)| json!([piece, score]))
        .collect();
    let unigram = made(
        json!({"type": "Unigram", "unk_id": 0, "byte_fallback": true, "vocab": scored}),
        json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": true}),
        json!({"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0}]}),
    );
    vec![("wordpiece", wordpiece), ("unigram", unigram)]
}
