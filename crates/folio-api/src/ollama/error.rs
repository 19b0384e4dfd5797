//! Refusals in Ollama's shape: `{"error": "..."}`, and for programs the parameter and the code that every other API's have.

use serde::Serialize;

use crate::error::{ApiError, PARAM_CHARS, shortened};

#[derive(Serialize)]
struct OllamaError<'a> {
    error: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    param: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    code: Option<&'static str>,
}

/// The body, and the line that ends a stream.
pub fn to_json(error: &ApiError) -> String {
    let param = error.param.as_deref().map(|param| shortened(param, PARAM_CHARS));
    let refusal = OllamaError { error: error.told(), param: param.as_deref(), code: error.code };
    serde_json::to_string(&refusal).expect("strings always serialize")
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    #[test]
    fn the_shape_is_ollamas() {
        let error = ApiError::invalid("options.top_p", "must be positive");
        let told: Value = serde_json::from_str(&to_json(&error)).unwrap();
        let error = "options.top_p: must be positive";
        assert_eq!(told, json!({"error": error, "param": "options.top_p", "code": "invalid_value"}));
        assert!(to_json(&ApiError::unsupported("x".repeat(5000), "no")).len() < 2000);
        assert_eq!(to_json(&ApiError::internal("x")), r#"{"error":"x"}"#);
    }
}
