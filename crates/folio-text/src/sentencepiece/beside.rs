//! The files beside a tokenizer.model, as far as they list tokens.
//!
//! Owns: their shapes. Must never: decide what a token is in the vocabulary (that is `vocabulary`).

use serde::Deserialize as _;
use serde_json::Value;

use super::CONFIG;
use crate::error::TextError;
use crate::tokenizer::{Object, parse_object};

const ADDED: &str = "added_tokens.json";

/// The bytes of the files beside a tokenizer.model, where they are there.
#[derive(Clone, Copy, Debug, Default)]
pub struct BesideModel<'a> {
    pub tokenizer_config: Option<&'a [u8]>,
    pub special_tokens_map: Option<&'a [u8]>,
    pub added_tokens: Option<&'a [u8]>,
}

/// A token as these files describe it.
#[derive(Clone, Debug, Default, serde::Deserialize)]
#[serde(default)]
pub(super) struct AddedSpec {
    pub content: String,
    pub special: bool,
    pub single_word: bool,
    pub lstrip: bool,
    pub rstrip: bool,
}

/// A token with its id, and the file that says so.
pub(super) struct Listed {
    pub id: u32,
    pub file: &'static str,
    pub token: AddedSpec,
}

impl AddedSpec {
    pub(super) fn plain(text: &str, special: bool) -> Self {
        Self { content: text.to_owned(), special, ..Self::default() }
    }

    /// `"</s>"` or `{"content": "</s>", ...}`, which is at `key` of `file`.
    pub(super) fn read(file: &str, key: &str, value: &Value, special: bool) -> Result<Self, TextError> {
        if let Some(text) = value.as_str() {
            return Ok(Self::plain(text, special));
        }
        match Self::deserialize(value) {
            Ok(token) => Ok(Self { special: token.special || special, ..token }),
            Err(error) => Err(bad(file, format!("`{key}`: {error}"))),
        }
    }
}

impl BesideModel<'_> {
    /// Tokens with ids. As transformers has it, added_tokens.json counts only where `config` lists none, and has those as special that are
    /// among `special`.
    pub(super) fn listed(&self, config: &Object, special: &[AddedSpec]) -> Result<Vec<Listed>, TextError> {
        let mut listed = Vec::new();
        if let Some(decoder) = config.get("added_tokens_decoder") {
            let Some(decoder) = decoder.as_object() else {
                return Err(bad(CONFIG, "`added_tokens_decoder` is no object".to_owned()));
            };
            for (key, value) in decoder {
                let Ok(id) = key.parse::<u32>() else {
                    return Err(bad(CONFIG, format!("`added_tokens_decoder` has the id {key:?}")));
                };
                let token = AddedSpec::read(CONFIG, "added_tokens_decoder", value, false)?;
                listed.push(Listed { id, file: CONFIG, token });
            }
            return Ok(listed);
        }
        for (text, id) in parse_object(ADDED, self.added_tokens)? {
            let Some(id) = id.as_u64().and_then(|id| u32::try_from(id).ok()) else {
                return Err(bad(ADDED, format!("the token {text:?} has the id {id}")));
            };
            let is_special = special.iter().any(|token| token.content == text);
            listed.push(Listed { id, file: ADDED, token: AddedSpec::plain(&text, is_special) });
        }
        Ok(listed)
    }
}

pub(super) fn bad(file: &str, reason: String) -> TextError {
    TextError::BadConfig { file: file.to_owned(), reason }
}
