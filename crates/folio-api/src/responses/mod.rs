//! `/v1/responses`: OpenAI's newer API, on the same conversation as a chat.
//!
//! Owns: its names, shapes and events. What it needs of responses that were answered before comes through a [`History`].

mod items;
mod request;
mod writer;

use std::sync::Arc;

use serde_json::Value;

pub use items::{named, page};
pub use request::ResponsesRequest;
pub use writer::{Keep, ResponseWriter, Seal, ended};

use crate::error::ApiError;

/// Responses that can be gone on from, of whoever asks.
pub trait History {
    /// The conversation up to the end of a response, without instructions. An error: it is more than may be read.
    fn messages(&self, response: &str) -> Result<Option<Arc<[Value]>>, ApiError>;
    /// An item of a response, or of what it was asked with. An error: it is more than may be read.
    fn item(&self, response: &str, id: &str) -> Result<Option<Value>, ApiError>;
    /// What was thought, of what was sealed for the client to carry. `path` is where it stands in the request.
    fn unseal(&self, sealed: &str, path: &str) -> Result<String, ApiError>;
    /// Whether a response is stored that says nothing of it.
    fn keeps(&self) -> bool {
        true
    }
}

/// The same for an id that never was, that is forgotten, and that is another's.
pub fn not_found(param: &str, id: &str) -> ApiError {
    let id: String = id.chars().take(128).collect();
    ApiError {
        param: Some(param.into()),
        code: Some("response_not_found"),
        ..ApiError::new(404, "invalid_request_error", format!("Response with id '{id}' not found."))
    }
}
