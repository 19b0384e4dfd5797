//! What leaves: refusals as responses, and what headers say about a request.
//!
//! Invariant: no response of this server with a status of 400 or more has a body that is no refusal.

use axum::body::{Body, Bytes};
use axum::http::{HeaderMap, HeaderName, HeaderValue, Response, StatusCode, header};
use axum::response::IntoResponse;
use folio_api::ApiError;
use folio_api::hints::Notes;

/// What a handler answers.
pub type Reply = Result<Response<Body>, Refusal>;

/// A refusal on its way to the client.
#[derive(Debug)]
pub struct Refusal(pub ApiError);

impl From<ApiError> for Refusal {
    fn from(error: ApiError) -> Self {
        Self(error)
    }
}

impl IntoResponse for Refusal {
    fn into_response(self) -> Response<Body> {
        let Self(error) = self;
        let mut response = Response::new(Body::from(error.to_json()));
        *response.status_mut() =
            StatusCode::from_u16(error.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        let headers = response.headers_mut();
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
        if let Some(seconds) = error.retry_after_s {
            headers.insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        if error.status == 401 {
            headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        // For whoever has to say the same in another API's shape.
        response.extensions_mut().insert(error);
        response
    }
}

pub fn json_response(json: String) -> Response<Body> {
    json_bytes(json.into())
}

/// Of an answer: whoever made it has counted its bytes, until they are read.
#[derive(Clone, Copy)]
pub(crate) struct AlreadyCounted;

/// What counts itself among what is held for its tenant while it is there.
pub(crate) fn json_counted(json: impl AsRef<[u8]> + Send + 'static) -> Response<Body> {
    let mut response = json_bytes(Bytes::from_owner(json));
    response.extensions_mut().insert(AlreadyCounted);
    response
}

pub fn json_bytes(json: Bytes) -> Response<Body> {
    let mut response = Response::new(Body::from(json));
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}

/// Fields that the server dropped because it was told to.
const IGNORED: HeaderName = HeaderName::from_static("x-folio-ignored-fields");
/// Tools that were offered and left out of the prompt.
const LEFT_OUT: HeaderName = HeaderName::from_static("x-folio-tools-left-out");
/// Names in a header, and bytes of each.
const NAMED_MAX: usize = 16;
const NAME_BYTES: usize = 64;
/// Says what became of the request's fields.
pub fn tell(notes: &Notes, headers: &mut HeaderMap) {
    for (name, list) in [(IGNORED, &notes.ignored), (LEFT_OUT, &notes.left_out)] {
        if let Some(value) = named(list) {
            headers.insert(name, value);
        }
    }
}

/// Names as one header: visible ASCII, bounded.
fn named(list: &[String]) -> Option<HeaderValue> {
    if list.is_empty() {
        return None;
    }
    let visible = |name: &String| {
        let shown = |c: char| if c.is_ascii_graphic() && c != ',' { c } else { '?' };
        name.chars().take(NAME_BYTES).map(shown).collect::<String>()
    };
    let mut names: Vec<String> = list.iter().take(NAMED_MAX).map(visible).collect();
    if list.len() > NAMED_MAX {
        names.push(format!("and {} more", list.len() - NAMED_MAX));
    }
    HeaderValue::from_str(&names.join(", ")).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_says_when_to_come_again() {
        let response = Refusal(ApiError::busy("full", 3)).into_response();
        assert_eq!(
            (response.status().as_u16(), &response.headers()["retry-after"]),
            (429, &"3".parse().unwrap())
        );
    }

    #[test]
    fn names_in_headers_are_visible_and_bounded() {
        let value = named(&(0..40).map(|index| format!("f{index}\n")).collect::<Vec<_>>()).unwrap();
        assert!(value.to_str().unwrap().ends_with("f15?, and 24 more"), "{value:?}");
    }
}
