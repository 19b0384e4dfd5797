//! What the router reads of a request's body: which model it is for, and what the request says of that model's life.
//!
//! Must never: judge anything else. Whatever is wrong with the rest the model's own process says.

use std::borrow::Cow;
use std::time::Duration;

use folio_api::ApiError;
use serde::Deserialize;
use serde_json::value::RawValue;

use super::keep_alive::of_field;

/// Of how long a model is to stay, as JSON.
const KEEP_ALIVE_BYTES: usize = 64;

/// What a body asks for.
#[derive(Debug, Default, PartialEq)]
pub(super) struct Asked {
    pub model: String,
    /// Ollama's: how long the model is to stay after it.
    pub keep_alive: Option<Option<Duration>>,
    /// There is nothing to be answered: the model is to be loaded, or unloaded.
    pub nothing: bool,
    /// The answer is not to be streamed.
    pub whole: bool,
}

#[derive(Deserialize)]
struct AskedFields<'a> {
    #[serde(borrow)]
    model: Option<Cow<'a, str>>,
    #[serde(borrow)]
    name: Option<&'a RawValue>,
    #[serde(borrow)]
    keep_alive: Option<&'a RawValue>,
    #[serde(borrow)]
    messages: Option<&'a RawValue>,
    #[serde(borrow)]
    prompt: Option<&'a RawValue>,
    #[serde(borrow)]
    background: Option<&'a RawValue>,
    #[serde(borrow)]
    stream: Option<&'a RawValue>,
}

impl Asked {
    /// Reads a body of this route. O(body), without a copy of it.
    pub fn read(path: &str, body: &[u8]) -> Result<Self, ApiError> {
        let ollama = path.starts_with("/api/");
        let fields: AskedFields<'_> = serde_json::from_slice(body)
            .map_err(|error| ApiError::bad_request(format!("The request body cannot be read: {error}.")))?;
        let text = |value: Option<&RawValue>| {
            value.and_then(|value| serde_json::from_str::<String>(value.get()).ok()).unwrap_or_default()
        };
        let mut model = fields.model.unwrap_or_default().into_owned();
        if model.is_empty() && ollama {
            // What older clients call it.
            model = text(fields.name);
        }
        if model.is_empty() {
            let message =
                "'model' is required: several models are served here, and GET /v1/models lists them.";
            return Err(ApiError::invalid("model", message));
        }
        if path == "/v1/responses" && fields.background.is_some_and(|value| value.get() == "true") {
            let why = "several models are served here, and one that nobody waits for may be unloaded; wait for the response, or stream it.";
            return Err(ApiError::unsupported("background", why));
        }
        // A number or a short text; nothing else is one.
        let keep_alive = fields.keep_alive.filter(|value| value.get().len() <= KEEP_ALIVE_BYTES);
        let keep_alive = keep_alive.and_then(|value| serde_json::from_str(value.get()).ok());
        let empty = |value: Option<&RawValue>| {
            value.is_none_or(|value| matches!(value.get(), "null" | "\"\"") || is_empty_list(value.get()))
        };
        let nothing = match path {
            "/api/chat" => empty(fields.messages),
            "/api/generate" => empty(fields.prompt),
            _ => false,
        };
        Ok(Self {
            model,
            keep_alive: keep_alive.filter(|_| ollama).and_then(|value| of_field(&value)),
            nothing,
            whole: fields.stream.is_some_and(|value| value.get() == "false"),
        })
    }
}

fn is_empty_list(json: &str) -> bool {
    json.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')).is_some_and(|rest| rest.trim().is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(path: &str, body: &str) -> Asked {
        Asked::read(path, body.as_bytes()).unwrap()
    }

    #[test]
    fn the_model_is_found_wherever_it_stands_and_the_rest_is_not_judged() {
        for body in [
            r#"{"model": "m"}"#,
            r#"{"messages": 3, "stream": "perhaps", "keep_alive": {}, "model": "m", "background": 1}"#,
            r#"{"messages": [{"content": "\"model\": \"x\""}], "model": "\u006d"}"#,
        ] {
            assert_eq!(read("/v1/chat/completions", body), Asked { model: "m".into(), ..Default::default() });
        }
        for (body, named) in [
            ("", "cannot be read"),
            ("[]", "cannot be read"),
            (r#"{"model": "m"#, "cannot be read"),
            (r#"{"model": 3}"#, "string"),
            (r#"{"model": "a", "model": "b"}"#, "duplicate field `model`"),
            ("{}", "'model' is required"),
            (r#"{"model": null}"#, "'model' is required"),
            (r#"{"name": "m"}"#, "'model' is required"),
        ] {
            let error = Asked::read("/v1/completions", body.as_bytes()).unwrap_err();
            assert!(error.status == 400 && error.message.contains(named), "{body}: {error:?}");
        }
        let deep = format!("{{\"model\": \"m\", \"x\": {}1{}}}", "[".repeat(100_000), "]".repeat(100_000));
        assert_eq!(read("/v1/completions", &deep).model, "m", "the model's own process refuses it");
    }

    #[test]
    fn ollamas_requests_say_how_long_a_model_stays_and_whether_there_is_anything_to_answer() {
        let asked = read("/api/generate", r#"{"name": "m", "keep_alive": 0}"#);
        assert_eq!(
            asked,
            Asked { model: "m".into(), keep_alive: Some(Some(Duration::ZERO)), nothing: true, whole: false }
        );
        let asked =
            read("/api/chat", r#"{"model": "m", "messages": [ ], "keep_alive": "-1", "stream": false}"#);
        assert_eq!(asked, Asked { model: "m".into(), keep_alive: Some(None), nothing: true, whole: true });
        assert!(!read("/api/chat", r#"{"model": "m", "messages": [{}]}"#).nothing);
        assert!(!read("/api/generate", r#"{"model": "m", "prompt": "x"}"#).nothing);
        let asked = read("/v1/completions", r#"{"model": "m", "keep_alive": 0}"#);
        assert_eq!((asked.keep_alive, asked.nothing), (None, false), "that is Ollama's alone");
    }

    #[test]
    fn nothing_is_left_to_run_behind_a_request() {
        let error = Asked::read("/v1/responses", br#"{"model": "m", "background": true}"#).unwrap_err();
        assert_eq!((error.status, error.param.as_deref()), (400, Some("background")));
        read("/v1/responses", r#"{"model": "m", "background": false}"#);
    }
}
