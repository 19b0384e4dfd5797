//! How long a request wants its prompt to stay cached: the `cache` object, `prompt_cache_retention`, `prompt_cache_key`.
//!
//! Owns: reading and checking these. Positions are
//! those of the prompt's tokens as they are computed (after the chat template, and after truncation).

use crate::error::ApiError;
use crate::fields::{Fields, Json, parse, within};

const RANGES_MAX: usize = 16;
const KEY_BYTES_MAX: usize = 256;
/// 30 days.
const TTL_S_MAX: u64 = 30 * 24 * 3600;
/// What `prompt_cache_retention: "24h"` means.
const LONG: RetentionOptions =
    RetentionOptions { priority: Some(75), ttl_us: Some(24 * 3600 * 1_000_000), pin: None };
/// The highest that a request may ask for.
pub const PRIORITY_MAX: u8 = 100;

/// Priority, time to live and pin, as far as they are given.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RetentionOptions {
    pub priority: Option<u8>,
    pub ttl_us: Option<u64>,
    pub pin: Option<bool>,
}

/// What one request wants of the cache.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CacheOptions {
    /// For the whole prompt.
    pub whole: Option<RetentionOptions>,
    /// Of the prompt's tokens: start included, end not.
    pub ranges: Vec<((u32, u32), RetentionOptions)>,
    /// `prompt_cache_key`: under which hits are accounted.
    pub key: Option<String>,
}

impl RetentionOptions {
    /// Takes `priority`, `ttl` and `pin`.
    pub fn read(fields: &mut Fields) -> Result<Self, ApiError> {
        let priority = fields.take("priority")?;
        let priority = within(fields, "priority", priority, (0, PRIORITY_MAX))?;
        let path = fields.path("ttl");
        let ttl_us = fields.raw("ttl").map(|raw| ttl_us(raw, &path)).transpose()?;
        Ok(Self { priority, ttl_us, pin: fields.take("pin")? })
    }
}

/// Seconds, or a number with s, m, h or d.
fn ttl_us(raw: Json, path: &str) -> Result<u64, ApiError> {
    let seconds = match raw {
        Json::String(text) => {
            let unit = text.chars().last().unwrap_or(' ');
            let scale = match unit {
                's' => Some(1),
                'm' => Some(60),
                'h' => Some(3600),
                'd' => Some(24 * 3600),
                _ => None,
            };
            let digits = text.strip_suffix(unit).filter(|digits| digits.bytes().all(|b| b.is_ascii_digit()));
            let number = digits.and_then(|digits| digits.parse::<u64>().ok());
            number.zip(scale).and_then(|(number, scale)| number.checked_mul(scale))
        }
        other => parse::<u64>(other, path).ok(),
    };
    match seconds {
        Some(seconds) if (1..=TTL_S_MAX).contains(&seconds) => Ok(seconds * 1_000_000),
        _ => {
            let message = format!(
                "Invalid '{path}': give seconds (1 to {TTL_S_MAX}), or a number with a unit such as \"5m\", \"1h\" or \"2d\"."
            );
            Err(ApiError::invalid(path, message))
        }
    }
}

impl CacheOptions {
    /// Takes `cache`, `prompt_cache_retention` and `prompt_cache_key`.
    pub fn read(fields: &mut Fields) -> Result<Self, ApiError> {
        let mut options = Self { key: key(fields)?, ..Self::default() };
        let long = long(fields)?;
        let path = fields.path("cache");
        let Some(raw) = fields.raw("cache") else {
            options.whole = long;
            return Ok(options);
        };
        if long.is_some() {
            let message = "'prompt_cache_retention' and 'cache' say the same thing; give one of them.";
            return Err(ApiError::invalid("prompt_cache_retention", message));
        }
        let mut cache = Fields::of_value(raw, path)?;
        let whole = RetentionOptions::read(&mut cache)?;
        options.whole = (whole != RetentionOptions::default()).then_some(whole);
        let ranges = cache.list("ranges")?.unwrap_or_default();
        if ranges.len() > RANGES_MAX {
            let path = cache.path("ranges");
            let message = format!("'{path}' has {} ranges; the limit is {RANGES_MAX}.", ranges.len());
            return Err(ApiError::invalid(path, message));
        }
        for (index, raw) in ranges.into_iter().enumerate() {
            let mut range = Fields::of_value(raw, cache.path(&format!("ranges[{index}]")))?;
            let tokens = range.require::<(u32, u32)>("tokens")?;
            options.ranges.push((tokens, RetentionOptions::read(&mut range)?));
            range.finish(&[])?;
        }
        cache.finish(&[])?;
        Ok(options)
    }
}

/// `None`: nothing beyond what every prompt gets.
fn long(fields: &mut Fields) -> Result<Option<RetentionOptions>, ApiError> {
    match fields.take::<String>("prompt_cache_retention")?.as_deref() {
        None | Some("in_memory" | "in-memory") => Ok(None),
        Some("24h") => Ok(Some(LONG)),
        Some(other) => {
            let message = format!(
                "Invalid value for 'prompt_cache_retention': '{other}' is neither \"in_memory\" nor \"24h\"; 'cache' takes any 'ttl'."
            );
            Err(ApiError::invalid("prompt_cache_retention", message))
        }
    }
}

fn key(fields: &mut Fields) -> Result<Option<String>, ApiError> {
    let key = fields.take::<String>("prompt_cache_key")?;
    match key {
        Some(key) if key.is_empty() || key.len() > KEY_BYTES_MAX => {
            let message = format!(
                "Invalid 'prompt_cache_key': it has {} bytes; it must have 1 to {KEY_BYTES_MAX}.",
                key.len()
            );
            Err(ApiError::invalid("prompt_cache_key", message))
        }
        key => Ok(key),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options(body: &str) -> Result<CacheOptions, ApiError> {
        let mut fields = Fields::of_body(body.as_bytes())?;
        let options = CacheOptions::read(&mut fields)?;
        fields.finish(&[])?;
        Ok(options)
    }

    #[test]
    fn what_makes_no_sense_is_refused_by_name() {
        let many = format!(r#"{{"cache": {{"ranges": [{}]}}}}"#, vec![r#"{"tokens": [0, 1]}"#; 17].join(","));
        let long_key = format!(r#"{{"prompt_cache_key": "{}"}}"#, "k".repeat(257));
        for (body, param) in [
            (r#"{"cache": 1}"#, "cache"),
            (r#"{"cache": {"priority": 101}}"#, "cache.priority"),
            (r#"{"cache": {"priority": -1}}"#, "cache.priority"),
            (r#"{"cache": {"priority": "high"}}"#, "cache.priority"),
            (r#"{"cache": {"ttl": 0}}"#, "cache.ttl"),
            (r#"{"cache": {"ttl": "h"}}"#, "cache.ttl"),
            (r#"{"cache": {"ttl": "1w"}}"#, "cache.ttl"),
            (r#"{"cache": {"ttl": "+1h"}}"#, "cache.ttl"),
            (r#"{"cache": {"ttl": "31d"}}"#, "cache.ttl"),
            (r#"{"cache": {"ttl": "99999999999999999999d"}}"#, "cache.ttl"),
            (r#"{"cache": {"ttl": 1.5}}"#, "cache.ttl"),
            (r#"{"cache": {"pin": "yes"}}"#, "cache.pin"),
            (r#"{"cache": {"colour": 1}}"#, "cache.colour"),
            (r#"{"cache": {"ranges": [{}]}}"#, "cache.ranges[0].tokens"),
            (r#"{"cache": {"ranges": [{"tokens": [1, 2]}, {"tokens": 5}]}}"#, "cache.ranges[1].tokens"),
            (r#"{"cache": {"ranges": [{"tokens": [1, 2], "x": 1}]}}"#, "cache.ranges[0].x"),
            (many.as_str(), "cache.ranges"),
            (r#"{"prompt_cache_retention": "1h"}"#, "prompt_cache_retention"),
            (r#"{"prompt_cache_retention": "24h", "cache": {}}"#, "prompt_cache_retention"),
            (r#"{"prompt_cache_key": ""}"#, "prompt_cache_key"),
            (r#"{"prompt_cache_key": 5}"#, "prompt_cache_key"),
            (long_key.as_str(), "prompt_cache_key"),
        ] {
            let error = options(body).unwrap_err();
            assert_eq!((error.status, error.param.as_deref()), (400, Some(param)), "{body}");
            assert!(error.message.contains(param), "{}", error.message);
        }
    }
}
