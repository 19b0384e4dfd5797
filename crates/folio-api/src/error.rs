//! Every refusal a client can meet, in OpenAI's shape: `{"error": {"message", "type", "param", "code"}}`.
//!
//! Invariant: no response of this server with a status of 400 or more has any other body. A message says what was
//! wrong, where, and what to do.

use std::borrow::Cow;

use serde::Serialize;

/// A refusal, ready to be sent.
#[derive(Clone, Debug, PartialEq)]
pub struct ApiError {
    /// Of HTTP.
    pub status: u16,
    pub message: String,
    /// OpenAI's `type`: `invalid_request_error`, `rate_limit_error`, `server_error`, ...
    pub kind: &'static str,
    /// The parameter at fault, as a path into the request (`messages[2].content`).
    pub param: Option<String>,
    pub code: Option<&'static str>,
    pub retry_after_s: Option<u32>,
}

#[derive(Serialize)]
struct ErrorEnvelope<'a> {
    error: ErrorDetail<'a>,
}

#[derive(Serialize)]
struct ErrorDetail<'a> {
    message: &'a str,
    r#type: &'a str,
    param: Option<&'a str>,
    code: Option<&'a str>,
}

impl ApiError {
    pub fn new(status: u16, kind: &'static str, message: impl Into<String>) -> Self {
        Self { status, message: message.into(), kind, param: None, code: None, retry_after_s: None }
    }

    /// 400 without a parameter: the request as a whole is at fault.
    pub fn bad_request(message: impl Into<String>) -> Self {
        Self::new(400, "invalid_request_error", message)
    }

    /// 400 that names the parameter at fault.
    pub fn invalid(param: impl Into<String>, message: impl Into<String>) -> Self {
        Self { param: Some(param.into()), code: Some("invalid_value"), ..Self::bad_request(message) }
    }

    /// 400 for a parameter that exists in the field's APIs but that this server does not honour.
    pub fn unsupported(param: impl Into<String>, why: &str) -> Self {
        let param = param.into();
        let message = format!("'{param}' is not supported by this server: {why}");
        Self { param: Some(param), code: Some("unsupported_parameter"), ..Self::bad_request(message) }
    }

    pub fn context_length(context: u32, prompt: usize, wanted: u32) -> Self {
        let message = format!(
            "This model's maximum context length is {context} tokens, but the request needs {} tokens ({prompt} in the \
             prompt, {wanted} for the completion). Shorten the prompt or lower max_tokens.",
            prompt as u64 + u64::from(wanted)
        );
        Self {
            param: Some("messages".into()),
            code: Some("context_length_exceeded"),
            ..Self::bad_request(message)
        }
    }

    pub fn unauthorized(message: impl Into<String>) -> Self {
        Self { code: Some("invalid_api_key"), ..Self::new(401, "invalid_request_error", message) }
    }

    pub fn not_found(message: impl Into<String>) -> Self {
        Self { code: Some("not_found"), ..Self::new(404, "invalid_request_error", message) }
    }

    pub fn model_not_found(asked: &str, served: &str) -> Self {
        let message = format!("The model '{asked}' does not exist here; this server serves '{served}'.");
        Self {
            param: Some("model".into()),
            code: Some("model_not_found"),
            ..Self::new(404, "invalid_request_error", message)
        }
    }

    pub fn too_large(limit_bytes: usize) -> Self {
        let message = format!("The request body is larger than this server's limit of {limit_bytes} bytes.");
        Self { code: Some("request_too_large"), ..Self::new(413, "invalid_request_error", message) }
    }

    /// 429: a bounded queue is full. Nothing was done; the same request may be sent again.
    pub fn busy(message: impl Into<String>, retry_after_s: u32) -> Self {
        Self {
            code: Some("queue_full"),
            retry_after_s: Some(retry_after_s),
            ..Self::new(429, "rate_limit_error", message)
        }
    }

    pub fn unavailable(message: impl Into<String>, retry_after_s: u32) -> Self {
        Self {
            code: Some("unavailable"),
            retry_after_s: Some(retry_after_s),
            ..Self::new(503, "server_error", message)
        }
    }

    pub fn deadline() -> Self {
        Self {
            code: Some("deadline_exceeded"),
            ..Self::new(
                504,
                "timeout_error",
                "The request did not finish within this server's request timeout.",
            )
        }
    }

    pub fn internal(message: impl Into<String>) -> Self {
        Self::new(500, "server_error", message)
    }

    /// The message for shapes that have no place for the parameter's name but that.
    pub fn told(&self) -> String {
        let message = match &self.param {
            Some(param) if !self.message.contains(param.as_str()) => {
                format!("{param}: {}", self.message).into()
            }
            _ => Cow::from(self.message.as_str()),
        };
        shortened(&message, MESSAGE_CHARS).into_owned()
    }

    /// The body: also the payload of an SSE error event.
    pub fn to_json(&self) -> String {
        let param = self.param.as_deref().map(|param| shortened(param, PARAM_CHARS));
        let detail = ErrorDetail {
            message: &shortened(&self.message, MESSAGE_CHARS),
            r#type: self.kind,
            param: param.as_deref(),
            code: self.code,
        };
        serde_json::to_string(&ErrorEnvelope { error: detail }).expect("strings always serialize")
    }
}

/// Why parts of messages that are no text are refused.
pub const NOT_TEXT: &str = "images and sounds are not served, the model takes text only";

/// A message may quote what the client sent, which may be megabytes.
pub const MESSAGE_CHARS: usize = 1000;
/// The same of the name of a parameter.
pub const PARAM_CHARS: usize = 200;

pub fn shortened(text: &str, chars: usize) -> Cow<'_, str> {
    match text.char_indices().nth(chars) {
        None => text.into(),
        Some((end, _)) => format!("{} ...", &text[..end]).into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_shape_is_openais() {
        let error = ApiError::invalid("temperature", "must be between 0 and 2");
        let json: serde_json::Value = serde_json::from_str(&error.to_json()).unwrap();
        assert_eq!(
            json,
            serde_json::json!({"error": {"message": "must be between 0 and 2", "type": "invalid_request_error",
                "param": "temperature", "code": "invalid_value"}})
        );
    }
}
