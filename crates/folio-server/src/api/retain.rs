//! How long a request wants its prompt to stay cached: the `cache` object, `prompt_cache_retention`, `prompt_cache_key`.
//!
//! Owns: reading and checking these, and what they mean in the engine's terms. Must never: know a block. Positions are
//! those of the prompt's tokens as they are computed (after the chat template, and after truncation).

use folio_engine::request::RetentionRange;
use folio_kv::{DEFAULT_PRIORITY, KeepRefused, PRIORITY_MAX, Retention};
use serde_json::value::RawValue;

use crate::api::error::ApiError;
use crate::api::fields::{Fields, within};

const RANGES_MAX: usize = 16;
const KEY_BYTES_MAX: usize = 256;
/// 30 days.
const TTL_S_MAX: u64 = 30 * 24 * 3600;
/// What `prompt_cache_retention: "24h"` means.
const LONG: Retention = Retention { priority: 75, ttl_us: Some(24 * 3600 * 1_000_000) };

/// Priority, time to live and pin, as far as they are given.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Wish {
    pub priority: Option<u8>,
    pub ttl_us: Option<u64>,
    pub pin: Option<bool>,
}

/// What one request wants of the cache.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CacheWish {
    /// For the whole prompt.
    pub whole: Option<Wish>,
    ranges: Vec<((u32, u32), Wish)>,
    /// `prompt_cache_key`: under which hits are accounted.
    pub key: Option<String>,
}

impl Wish {
    /// Takes `priority`, `ttl` and `pin`.
    pub fn read(fields: &mut Fields) -> Result<Self, ApiError> {
        let priority = fields.take("priority")?;
        let priority = within(fields, "priority", priority, (0, PRIORITY_MAX))?;
        let path = fields.path("ttl");
        let ttl_us = fields.raw("ttl").map(|raw| ttl_us(raw, &path)).transpose()?;
        Ok(Self { priority, ttl_us, pin: fields.take("pin")? })
    }

    pub fn retention(&self) -> Retention {
        Retention { priority: self.priority.unwrap_or(DEFAULT_PRIORITY), ttl_us: self.ttl_us }
    }

    fn over(&self, tokens: std::ops::Range<u32>) -> RetentionRange {
        let Retention { priority, ttl_us } = self.retention();
        RetentionRange { tokens, priority, ttl_us, pin: self.pin.unwrap_or(false) }
    }
}

/// Seconds, or a number with s, m, h or d.
fn ttl_us(raw: &RawValue, path: &str) -> Result<u64, ApiError> {
    let seconds = match serde_json::from_str::<String>(raw.get()) {
        Ok(text) => {
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
        Err(_) => serde_json::from_str::<u64>(raw.get()).ok(),
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

impl CacheWish {
    /// Takes `cache`, `prompt_cache_retention` and `prompt_cache_key`.
    pub fn read(fields: &mut Fields) -> Result<Self, ApiError> {
        let mut wish = Self { key: key(fields)?, ..Self::default() };
        let long = long(fields)?;
        let path = fields.path("cache");
        let Some(raw) = fields.raw("cache") else {
            wish.whole = long.map(|Retention { priority, ttl_us }| Wish {
                priority: Some(priority),
                ttl_us,
                ..Wish::default()
            });
            return Ok(wish);
        };
        if long.is_some() {
            let message = "'prompt_cache_retention' and 'cache' say the same thing; give one of them.";
            return Err(ApiError::invalid("prompt_cache_retention", message));
        }
        let mut cache = Fields::of_value(raw, path)?;
        let whole = Wish::read(&mut cache)?;
        wish.whole = (whole != Wish::default()).then_some(whole);
        let ranges = cache.take::<Vec<&RawValue>>("ranges")?.unwrap_or_default();
        if ranges.len() > RANGES_MAX {
            let path = cache.path("ranges");
            let message = format!("'{path}' has {} ranges; the limit is {RANGES_MAX}.", ranges.len());
            return Err(ApiError::invalid(path, message));
        }
        for (index, raw) in ranges.into_iter().enumerate() {
            let mut range = Fields::of_value(raw, cache.path(&format!("ranges[{index}]")))?;
            let tokens = range.require::<(u32, u32)>("tokens")?;
            wish.ranges.push((tokens, Wish::read(&mut range)?));
            range.finish(&[])?;
        }
        cache.finish(&[])?;
        Ok(wish)
    }

    /// For a prompt of so many tokens. What is disposable as a whole is so with everything that follows from it: its
    /// answer would only be in the way of giving it up.
    pub fn ranges(&self, prompt_tokens: u32) -> Result<Vec<RetentionRange>, ApiError> {
        let whole = self.whole.map(|whole| {
            let disposable = whole.retention().priority < DEFAULT_PRIORITY;
            whole.over(0..if disposable { u32::MAX } else { prompt_tokens })
        });
        let mut ranges: Vec<RetentionRange> = whole.into_iter().collect();
        for (index, ((start, end), wish)) in self.ranges.iter().enumerate() {
            if start >= end || *end > prompt_tokens {
                let path = format!("cache.ranges[{index}].tokens");
                let message = format!(
                    "Invalid '{path}': [{start}, {end}] is no range of the prompt's {prompt_tokens} tokens (start included, end not)."
                );
                return Err(ApiError::invalid(path, message));
            }
            ranges.push(wish.over(*start..*end));
        }
        Ok(ranges)
    }
}

/// `None`: nothing beyond what every prompt gets.
fn long(fields: &mut Fields) -> Result<Option<Retention>, ApiError> {
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

/// The cache's refusals in HTTP's terms. `pin` and `prompt` name the parameters that asked for it.
pub fn refused(refused: &KeepRefused, pin: &str, prompt: &str) -> ApiError {
    let message = format!("The prefix cannot be kept: {refused}.");
    match refused {
        KeepRefused::TooShort { .. } => ApiError::invalid(prompt, message),
        KeepRefused::PinLimit { .. } | KeepRefused::PinsFull { .. } | KeepRefused::Divided => {
            ApiError { code: Some("pin_limit_exceeded"), ..ApiError::invalid(pin, message) }
        }
        KeepRefused::Windows => ApiError::unsupported(pin, &refused.to_string()),
        KeepRefused::TooMany => {
            ApiError { code: Some("too_many_prefixes"), ..ApiError::bad_request(message) }
        }
        KeepRefused::NotCached { .. } => ApiError {
            code: Some("not_cached"),
            ..ApiError::new(
                axum::http::StatusCode::CONFLICT,
                "invalid_request_error",
                format!("{message} Send its text to POST /v1/cache/prefixes to compute it again."),
            )
        },
        KeepRefused::Busy => ApiError { code: Some("cache_busy"), ..ApiError::busy(message, 1) },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wish(body: &str) -> Result<CacheWish, ApiError> {
        let mut fields = Fields::of_body(body.as_bytes())?;
        let wish = CacheWish::read(&mut fields)?;
        fields.finish(&[])?;
        Ok(wish)
    }

    fn range(tokens: std::ops::Range<u32>, priority: u8, ttl_s: Option<u64>, pin: bool) -> RetentionRange {
        RetentionRange { tokens, priority, ttl_us: ttl_s.map(|s| s * 1_000_000), pin }
    }

    #[test]
    fn what_is_said_becomes_ranges_of_the_prompt() {
        for (body, ranges) in [
            (r#"{}"#, vec![]),
            (r#"{"cache": {}}"#, vec![]),
            (r#"{"prompt_cache_retention": "in_memory"}"#, vec![]),
            (r#"{"prompt_cache_retention": "24h"}"#, vec![range(0..90, 75, Some(86400), false)]),
            (r#"{"cache": {"priority": 80, "ttl": "5m"}}"#, vec![range(0..90, 80, Some(300), false)]),
            (r#"{"cache": {"priority": 0}}"#, vec![range(0..u32::MAX, 0, None, false)]),
            (r#"{"cache": {"ttl": 7}}"#, vec![range(0..90, 50, Some(7), false)]),
            (
                r#"{"cache": {"pin": true, "ranges": [{"tokens": [3, 90], "priority": 9, "ttl": "2d"}]}}"#,
                vec![range(0..90, 50, None, true), range(3..90, 9, Some(172_800), false)],
            ),
        ] {
            assert_eq!(wish(body).unwrap().ranges(90).unwrap(), ranges, "{body}");
        }
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
            let error = wish(body).unwrap_err();
            assert_eq!((error.status.as_u16(), error.param.as_deref()), (400, Some(param)), "{body}");
            assert!(error.message.contains(param), "{}", error.message);
        }
        for tokens in ["[5, 5]", "[6, 5]", "[0, 91]"] {
            let body = format!(r#"{{"cache": {{"ranges": [{{"tokens": {tokens}}}]}}}}"#);
            let error = wish(&body).unwrap().ranges(90).unwrap_err();
            assert_eq!(error.param.as_deref(), Some("cache.ranges[0].tokens"), "{body}");
        }
    }
}
