//! Test data that is not ours: found by `FOLIO_TEST_DATA`, skipped with a warning without it.
#![allow(dead_code)] // Each test file uses a part of this.

use std::io::{Read, Write};
use std::path::PathBuf;

use folio_model::checkpoint::gguf::{Metadata, read_header};
use folio_text::Tokenizer;

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
