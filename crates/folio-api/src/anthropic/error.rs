//! Refusals in Anthropic's shape: `{"type": "error", "error": {"type", "message"}, "request_id"}`.
//!
//! The reasons are those of every other API; only their names and, for an overload, the status differ.

use serde::Serialize;

use crate::error::{ApiError, PARAM_CHARS, shortened};

/// Anthropic's own, which its clients send again later.
const OVERLOADED: u16 = 529;

#[derive(Serialize)]
struct AnthropicError<'a> {
    r#type: &'static str,
    error: AnthropicErrorDetail<'a>,
    request_id: &'a str,
}

#[derive(Serialize)]
struct AnthropicErrorDetail<'a> {
    r#type: &'static str,
    message: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    details: Option<Cause<'a>>,
}

/// For programs; the message has all of it for people.
#[derive(Serialize)]
struct Cause<'a> {
    error_code: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    param: Option<&'a str>,
}

pub fn to_json(error: &ApiError, request_id: &str) -> String {
    let param = error.param.as_deref().map(|param| shortened(param, PARAM_CHARS));
    let details = error.code.map(|error_code| Cause { error_code, param: param.as_deref() });
    let detail = AnthropicErrorDetail { r#type: kind(error.status), message: error.told(), details };
    let envelope = AnthropicError { r#type: "error", error: detail, request_id };
    serde_json::to_string(&envelope).expect("strings always serialize")
}

/// Of HTTP.
pub fn status(error: &ApiError) -> u16 {
    match error.status {
        503 => OVERLOADED,
        other => other,
    }
}

fn kind(status: u16) -> &'static str {
    match status {
        401 => "authentication_error",
        403 => "permission_error",
        404 => "not_found_error",
        413 => "request_too_large",
        429 => "rate_limit_error",
        503 | OVERLOADED => "overloaded_error",
        504 => "timeout_error",
        500.. => "api_error",
        _ => "invalid_request_error",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    #[test]
    fn the_shape_is_anthropics() {
        let error = ApiError::invalid("max_tokens", "must be positive");
        let json: Value = serde_json::from_str(&to_json(&error, "abc")).unwrap();
        let details = json!({"error_code": "invalid_value", "param": "max_tokens"});
        let error = json!({"type": "invalid_request_error", "message": "max_tokens: must be positive", "details": details});
        assert_eq!(json, json!({"type": "error", "error": error, "request_id": "abc"}));
        let long = to_json(&ApiError::unsupported("x".repeat(5000), "no"), "abc");
        assert!(long.len() < 2000, "{} bytes quote what a client sent", long.len());
        let json: Value = serde_json::from_str(&to_json(&ApiError::internal("x"), "abc")).unwrap();
        assert_eq!(json["error"], json!({"type": "api_error", "message": "x"}));
    }
}
