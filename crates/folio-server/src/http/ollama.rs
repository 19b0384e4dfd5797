//! What clients of Ollama's API expect beyond its routes: refusals in its shape, and bodies as `curl -d` sends them.

use axum::body::Body;
use axum::http::{HeaderMap, Response, header};
use folio_api::ApiError;
use folio_api::ollama::error;

pub fn is_meant(path: &str) -> bool {
    path.starts_with("/api/")
}

/// Ollama's documentation has `curl -d` without a content type. A page of another site may send such a request unasked, but not
/// without saying where it comes from.
pub fn takes_forms(path: &str, headers: &HeaderMap) -> bool {
    is_meant(path) && !headers.contains_key(header::ORIGIN)
}

/// Puts an error that some handler answered with into this API's shape.
pub fn restate(response: &mut Response<Body>) {
    if let Some(refused) = response.extensions_mut().remove::<ApiError>() {
        *response.body_mut() = Body::from(error::to_json(&refused));
    }
}
