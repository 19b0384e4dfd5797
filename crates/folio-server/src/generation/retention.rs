//! How long a prompt should stay cached, in the engine's terms.
//!
//! Must never: know a block. Positions are those of the prompt's tokens as they are computed (after the chat template, and after
//! truncation).

use folio_api::ApiError;
use folio_api::cache::{CacheOptions, RetentionOptions};
use folio_engine::request::RetentionRange;
use folio_kv::{DEFAULT_PRIORITY, KeepRefused, Retention};

const _: () = assert!(folio_api::cache::PRIORITY_MAX == folio_kv::PRIORITY_MAX);

pub fn retention(asked: &RetentionOptions) -> Retention {
    Retention { priority: asked.priority.unwrap_or(DEFAULT_PRIORITY), ttl_us: asked.ttl_us }
}

fn over(asked: &RetentionOptions, tokens: std::ops::Range<u32>) -> RetentionRange {
    let Retention { priority, ttl_us } = retention(asked);
    RetentionRange { tokens, priority, ttl_us, pin: asked.pin.unwrap_or(false) }
}

/// For a prompt of so many tokens. What is disposable as a whole is so with everything that follows from it: its
/// answer would only be in the way of giving it up.
pub fn ranges(options: &CacheOptions, prompt_tokens: u32) -> Result<Vec<RetentionRange>, ApiError> {
    let whole = options.whole.map(|whole| {
        let disposable = retention(&whole).priority < DEFAULT_PRIORITY;
        over(&whole, 0..if disposable { u32::MAX } else { prompt_tokens })
    });
    let mut ranges: Vec<RetentionRange> = whole.into_iter().collect();
    for (index, ((start, end), part)) in options.ranges.iter().enumerate() {
        if start >= end || *end > prompt_tokens {
            let path = format!("cache.ranges[{index}].tokens");
            let message = format!(
                "Invalid '{path}': [{start}, {end}] is no range of the prompt's {prompt_tokens} tokens (start included, end not)."
            );
            return Err(ApiError::invalid(path, message));
        }
        ranges.push(over(part, *start..*end));
    }
    Ok(ranges)
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
                409,
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
    use folio_api::fields::Fields;

    fn options(body: &str) -> CacheOptions {
        CacheOptions::read(&mut Fields::of_body(body.as_bytes()).unwrap()).unwrap()
    }

    fn range(tokens: std::ops::Range<u32>, priority: u8, ttl_s: Option<u64>, pin: bool) -> RetentionRange {
        RetentionRange { tokens, priority, ttl_us: ttl_s.map(|s| s * 1_000_000), pin }
    }

    #[test]
    fn what_is_said_becomes_ranges_of_the_prompt() {
        for (body, expected) in [
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
            assert_eq!(ranges(&options(body), 90).unwrap(), expected, "{body}");
        }
    }

    #[test]
    fn ranges_outside_of_the_prompt_are_refused_by_name() {
        for tokens in ["[5, 5]", "[6, 5]", "[0, 91]"] {
            let body = format!(r#"{{"cache": {{"ranges": [{{"tokens": {tokens}}}]}}}}"#);
            let error = ranges(&options(&body), 90).unwrap_err();
            assert_eq!(error.param.as_deref(), Some("cache.ranges[0].tokens"), "{body}");
        }
    }
}
