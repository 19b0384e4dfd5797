//! What clients of Anthropic's API say and expect in headers, and refusals in its shape.

use axum::body::Body;
use axum::extract::Request;
use axum::http::{HeaderMap, HeaderValue, Response, StatusCode};
use folio_api::ApiError;
use folio_api::anthropic::error;

const VERSION: &str = "anthropic-version";
/// Those with the shapes this server speaks; official clients send one or the other, by their age.
const KNOWN_VERSIONS: [&str; 2] = ["2023-06-01", "2026-10-21"];
const REQUEST_ID: &str = "request-id";

/// Whether the client speaks Anthropic's API: by the route, or by the header that only its clients send.
pub fn is_meant(request: &Request) -> bool {
    request.uri().path().starts_with("/v1/messages") || request.headers().contains_key(VERSION)
}

/// A client that says no version gets the same as one that says either.
pub fn check_version(headers: &HeaderMap) -> Result<(), ApiError> {
    match headers.get(VERSION) {
        Some(version) if !KNOWN_VERSIONS.iter().any(|known| version == known) => {
            let message = format!("The header '{VERSION}' must be {}.", KNOWN_VERSIONS.join(" or "));
            Err(ApiError::invalid(VERSION, message))
        }
        _ => Ok(()),
    }
}

/// Puts an error that some handler answered with into this API's shape, and names the request.
pub fn restate(response: &mut Response<Body>, request_id: &str) {
    if let Ok(id) = HeaderValue::from_str(request_id) {
        response.headers_mut().insert(REQUEST_ID, id);
    }
    if let Some(refused) = response.extensions_mut().remove::<ApiError>() {
        *response.body_mut() = Body::from(error::to_json(&refused, request_id));
        let status = StatusCode::from_u16(error::status(&refused));
        *response.status_mut() = status.unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    }
}
