//! Which files a model consists of: the hub's answer to `/api/models/{id}/revision/{revision}?blobs=true`.
//!
//! The answer comes from a stranger and its names become paths: only plain names of known files are taken from it.

use std::path::Path;

use serde_json::Value;

use super::error::{HubError, Result};
use super::layout::is_commit;
use crate::checkpoint::gguf::is_gguf;

/// A file and how to know that it arrived whole.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RemoteFile {
    pub name: String,
    pub bytes: u64,
    pub etag: Etag,
}

/// The hub's name of a blob.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Etag {
    /// Large files: of the content, in hexadecimal.
    Sha256(String),
    /// Small files: of "blob {length}\0" and the content, in hexadecimal.
    GitSha1(String),
}

impl Etag {
    pub fn hex(&self) -> &str {
        match self {
            Etag::Sha256(hex) | Etag::GitSha1(hex) => hex,
        }
    }
}

/// A commit and those of its files that Folio can use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Listing {
    pub commit: String,
    /// Configuration and tokenizer.
    pub side: Vec<RemoteFile>,
    /// Every safetensors file at the top of the repository.
    pub weights: Vec<RemoteFile>,
    /// Every GGUF file, in folders too.
    pub gguf: Vec<RemoteFile>,
}

const SIDE_FILES: &[&str] = &[
    "config.json",
    "generation_config.json",
    "hf_quant_config.json",
    "tokenizer.json",
    "tekken.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "tiktoken.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "model.safetensors.index.json",
    // How a checkpoint for embeddings makes vectors.
    "modules.json",
    "1_Pooling/config.json",
    CARD,
];
/// The model card, whose head names the licence.
pub const CARD: &str = "README.md";

/// No file is larger: sums of sizes stay far from what a u64 holds.
const FILE_BYTES_MAX: u64 = 1 << 48;
const DEPTH_MAX: usize = 4;
const NAME_BYTES_MAX: usize = 255;

impl Listing {
    pub fn parse(url: &str, bytes: &[u8]) -> Result<Self> {
        let wrong = |reason: &str| HubError::Protocol { url: url.to_owned(), reason: reason.to_owned() };
        let value: Value =
            serde_json::from_slice(bytes).map_err(|error| wrong(&format!("not JSON: {error}")))?;
        let commit = value["sha"].as_str().filter(|commit| is_commit(commit));
        let commit = commit.ok_or_else(|| wrong("the answer names no commit"))?.to_owned();
        let siblings = value["siblings"].as_array().ok_or_else(|| wrong("the answer lists no files"))?;
        let mut listing = Self { commit, side: Vec::new(), weights: Vec::new(), gguf: Vec::new() };
        for sibling in siblings {
            let Some(name) = sibling["rfilename"].as_str() else { continue };
            let plain = !name.contains(['/', '\\', '\0']) && !name.starts_with('.');
            let kind = match name {
                name if SIDE_FILES.contains(&name) => &mut listing.side,
                name if plain && name.ends_with(".safetensors") => &mut listing.weights,
                name if is_gguf(Path::new(name)) && stays_below(name) => &mut listing.gguf,
                _ => continue,
            };
            let file = remote_file(name, sibling)
                .ok_or_else(|| wrong(&format!("the answer gives no size or checksum for {name}")))?;
            if file.bytes > FILE_BYTES_MAX {
                return Err(wrong(&format!(
                    "the answer gives {name} {} bytes, more than the limit of {FILE_BYTES_MAX}",
                    file.bytes
                )));
            }
            kind.push(file);
        }
        Ok(listing)
    }
}

/// Whether a file's path leads nowhere but into the folder that it is put below, on any system.
fn stays_below(path: &str) -> bool {
    let plain = |part: &str| {
        let charset = |c: char| c.is_ascii_alphanumeric() || "._-+ ()[]=,@".contains(c);
        (1..=NAME_BYTES_MAX).contains(&part.len()) && part.chars().all(charset) && !part.starts_with('.')
    };
    path.split('/').all(plain) && path.split('/').count() <= DEPTH_MAX
}

fn remote_file(name: &str, sibling: &Value) -> Option<RemoteFile> {
    let hex = |value: &Value, length: usize| {
        let text = value.as_str()?.to_ascii_lowercase();
        (text.len() == length && text.bytes().all(|byte| byte.is_ascii_hexdigit())).then_some(text)
    };
    let lfs = &sibling["lfs"];
    let (etag, bytes) = if lfs.is_object() {
        (Etag::Sha256(hex(&lfs["sha256"], 64)?), lfs["size"].as_u64().or(sibling["size"].as_u64())?)
    } else {
        (Etag::GitSha1(hex(&sibling["blobId"], 40)?), sibling["size"].as_u64()?)
    };
    Some(RemoteFile { name: name.to_owned(), bytes, etag })
}
