//! What a client attaches to a request for itself: `metadata`, `user`, `safety_identifier`. Checked, within limits, and without effect; some
//! answers repeat it.

use serde_json::{Map, Value};

use crate::error::ApiError;
use crate::fields::Fields;

/// Fields that name somebody.
pub const NAMES: [&str; 2] = ["user", "safety_identifier"];
const PAIRS: usize = 16;
const KEY_CHARACTERS: usize = 64;
const CHARACTERS: usize = 512;

/// Takes a name.
pub fn name(fields: &mut Fields, name: &str) -> Result<Option<String>, ApiError> {
    let text = fields.take::<String>(name)?;
    let characters = text.as_ref().map_or(0, |text| text.chars().count());
    if characters > CHARACTERS {
        let message = format!("Invalid '{name}': it has {characters} characters; the limit is {CHARACTERS}.");
        return Err(ApiError::invalid(name, message));
    }
    Ok(text)
}

/// Takes `metadata`.
pub fn metadata(fields: &mut Fields) -> Result<Option<Map<String, Value>>, ApiError> {
    let metadata = fields.take::<Map<String, Value>>("metadata")?;
    let text = |value: &Value| value.as_str().is_some_and(|text| text.chars().count() <= CHARACTERS);
    let pair = |(key, value): (&String, &Value)| key.chars().count() <= KEY_CHARACTERS && text(value);
    if metadata.as_ref().is_some_and(|metadata| metadata.len() > PAIRS || !metadata.iter().all(pair)) {
        let message = format!(
            "Invalid 'metadata': at most {PAIRS} strings of {CHARACTERS} characters, with names of {KEY_CHARACTERS}."
        );
        return Err(ApiError::invalid("metadata", message));
    }
    Ok(metadata)
}
