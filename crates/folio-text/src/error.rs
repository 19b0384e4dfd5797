//! What can go wrong with text, with the facts a user needs to mend it.

use std::path::PathBuf;

#[derive(Debug, thiserror::Error)]
pub enum TextError {
    #[error("cannot read {path}: {source}")]
    Io { path: PathBuf, source: std::io::Error },
    #[error(
        "{folder} has no tokenizer.json, tekken.json, tokenizer.model or tiktoken.model; convert the tokenizer with transformers' `AutoTokenizer.from_pretrained(...).save_pretrained(...)`"
    )]
    NoTokenizer { folder: PathBuf },
    #[error("{file} is not a tokenizer this version understands: {reason}")]
    BadTokenizer { file: String, reason: String },
    #[error("{file} is not valid JSON of the expected shape: {reason}")]
    BadConfig { file: String, reason: String },
    #[error("the text has {bytes} bytes, more than the limit of {limit}")]
    TooLong { bytes: usize, limit: usize },
    #[error("the tokenizer failed: {0}")]
    Encode(String),
    #[error("the chat template in {origin} does not parse: {reason}")]
    BadTemplate { origin: String, reason: String },
    #[error("this model has no chat template: use the completions endpoint, or give a template")]
    NoTemplate,
    #[error("the model has no chat template named {name:?}; it has: {known}")]
    UnknownTemplate { name: String, known: String },
    /// The template itself refused the conversation by calling `raise_exception`.
    #[error("the model's chat template refuses this conversation: {0}")]
    Refused(String),
    #[error("the chat template in {origin} failed: {reason}")]
    Render { origin: String, reason: String },
    #[error(
        "the conversation has every one of the {} signs from U+14400 on that markers in it could be kept apart with; leave one of them out",
        0x14646 - 0x14400 + 1
    )]
    NoSeam,
    #[error("chat_template_kwargs may not set {0:?}, which the server itself sets")]
    ReservedKwarg(String),
}
