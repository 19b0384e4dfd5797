//! What a request forbids in its answers beside a form: `allowed_token_ids`, `bad_words`, `thinking_token_budget`.

use crate::context::{Model, RequestLimits};
use crate::error::ApiError;
use crate::fields::Fields;

/// What a request says.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Bounds {
    /// Nothing else may come, what ends an answer included.
    pub allowed: Option<Vec<u32>>,
    /// Texts that must not be written.
    pub bad_words: Vec<String>,
    /// Tokens of reasoning, and the field that says so.
    pub thinking: Option<(u32, &'static str)>,
}

impl Bounds {
    /// Takes the fields.
    pub fn read(fields: &mut Fields, model: &Model, limits: &RequestLimits) -> Result<Self, ApiError> {
        let allowed = fields.take::<Vec<u32>>("allowed_token_ids")?;
        if let Some(ids) = &allowed {
            if ids.is_empty() {
                return Err(ApiError::invalid(
                    "allowed_token_ids",
                    "'allowed_token_ids' is empty; leave it out.",
                ));
            }
            model.check_token_ids(ids, "allowed_token_ids")?;
        }
        let bad_words = fields.take::<Vec<String>>("bad_words")?.unwrap_or_default();
        if bad_words.len() > limits.bad_words {
            let message =
                format!("'bad_words' has {} entries; the limit is {}.", bad_words.len(), limits.bad_words);
            return Err(ApiError::invalid("bad_words", message));
        }
        if let Some(word) =
            bad_words.iter().find(|word| word.is_empty() || word.len() > limits.stop_string_bytes)
        {
            let message = format!(
                "Invalid 'bad_words': an entry has {} bytes; it must have 1 to {}.",
                word.len(),
                limits.stop_string_bytes
            );
            return Err(ApiError::invalid("bad_words", message));
        }
        const BUDGET: &str = "thinking_token_budget";
        let thinking = fields.take::<u32>(BUDGET)?.map(|budget| (budget, BUDGET));
        Ok(Self { allowed, bad_words, thinking })
    }
}
