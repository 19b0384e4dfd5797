//! What all routes share: request ids, authentication, draining, reading a body within its limits, and counting.

use std::future::poll_fn;
use std::hash::{BuildHasher, Hasher};
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use axum::body::{Body, Bytes};
use axum::extract::{FromRequest, MatchedPath, Request, State as Shared};
use axum::http::{HeaderMap, HeaderValue, Response, StatusCode, header};
use axum::middleware::Next;
use axum::response::IntoResponse;
use futures_core::Stream;

use crate::anthropic;
use crate::app::State;
use crate::error::ApiError;
use crate::params::valid_request_id;
use crate::tenants::Tenant;

const REQUEST_ID: &str = "x-request-id";
/// Open to whoever reaches the port: they tell nothing about anybody's requests.
const OPEN: &[&str] = &["/", "/health", "/ping", "/metrics", "/version"];
/// Refused while draining.
const GENERATING: &[&str] =
    &["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/cache/prefixes"];

/// The request's id: the client's where it is usable, else a fresh one.
#[derive(Clone)]
pub struct RequestName(pub String);

/// Around every route.
pub async fn around(Shared(state): Shared<Arc<State>>, mut request: Request, next: Next) -> Response<Body> {
    let id = request
        .headers()
        .get(REQUEST_ID)
        .and_then(|id| id.to_str().ok())
        .filter(|id| valid_request_id(id))
        .map_or_else(fresh_id, str::to_owned);
    let method = match request.method().as_str() {
        known @ ("GET" | "POST" | "HEAD" | "PUT" | "DELETE" | "OPTIONS" | "PATCH") => known,
        _ => "OTHER",
    }
    .to_owned();
    let handler = request.extensions().get::<MatchedPath>().map_or("none", MatchedPath::as_str).to_owned();
    let anthropic = anthropic::is_meant(&request);
    let mut response = match admit(&state, &request) {
        Ok(tenant) => {
            request.extensions_mut().insert(tenant);
            request.extensions_mut().insert(RequestName(id.clone()));
            next.run(request).await
        }
        Err(refused) => refused.into_response(),
    };
    if anthropic {
        anthropic::restate(&mut response, &id);
    }
    if let Ok(value) = HeaderValue::from_str(&id) {
        response.headers_mut().insert(REQUEST_ID, value);
    }
    state.metrics.http(&method, &handler, response.status().as_u16());
    tracing::debug!(request = %id, %method, %handler, status = response.status().as_u16(), "answered");
    response
}

fn admit(state: &State, request: &Request) -> Result<Tenant, ApiError> {
    let path = request.uri().path();
    if OPEN.contains(&path) {
        // Nothing behind these paths reads the tenant.
        return Ok(Tenant { id: folio_kv::TenantId(0), secret: [0; 32] });
    }
    let tenant = state.tenants.authenticate(request.headers())?.clone();
    anthropic::check_version(request.headers())?;
    if GENERATING.contains(&path) && state.draining.load(Ordering::Acquire) {
        return Err(ApiError::unavailable(
            "This server is shutting down; send the request to another one.",
            5,
        ));
    }
    Ok(tenant)
}

pub fn fresh_id() -> String {
    let half = || std::hash::RandomState::new().build_hasher().finish();
    format!("{:016x}{:016x}", half(), half())
}

/// An authenticated request with a JSON body, read within the limits.
pub struct JsonRequest {
    pub tenant: Tenant,
    pub id: String,
    pub body: Bytes,
}

impl FromRequest<Arc<State>> for JsonRequest {
    type Rejection = ApiError;

    async fn from_request(request: Request, state: &Arc<State>) -> Result<Self, ApiError> {
        let (parts, body) = request.into_parts();
        let tenant = parts.extensions.get::<Tenant>().cloned();
        let tenant = tenant.ok_or_else(|| ApiError::internal("the request was not authenticated"))?;
        let id = parts.extensions.get::<RequestName>().map(|name| name.0.clone()).unwrap_or_default();
        check_content_type(&parts.headers)?;
        let limits = &state.config.limits;
        let read = read_body(&parts.headers, body, limits.body_bytes);
        let body = tokio::time::timeout(limits.body_timeout, read).await.map_err(|_| {
            let message =
                format!("The request body did not arrive within {} s.", limits.body_timeout.as_secs());
            ApiError::new(StatusCode::REQUEST_TIMEOUT, "invalid_request_error", message)
        })??;
        Ok(Self { tenant, id, body })
    }
}

fn check_content_type(headers: &HeaderMap) -> Result<(), ApiError> {
    let Some(value) = headers.get(header::CONTENT_TYPE) else { return Ok(()) };
    let value = value.to_str().unwrap_or("?");
    let essence = value.split(';').next().unwrap_or_default().trim();
    if essence.eq_ignore_ascii_case("application/json") || essence.to_ascii_lowercase().ends_with("+json") {
        return Ok(());
    }
    let message = format!("Unsupported content type '{value}'; send 'Content-Type: application/json'.");
    Err(ApiError::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, "invalid_request_error", message))
}

/// What is read and thrown away of a body that is too large, so that the client gets to read the answer.
const DISCARD_BYTES_MAX: usize = 64 << 20;

async fn read_body(headers: &HeaderMap, body: Body, limit: usize) -> Result<Bytes, ApiError> {
    let announced = headers.get(header::CONTENT_LENGTH).and_then(|v| v.to_str().ok()?.parse::<usize>().ok());
    let mut stream = pin!(body.into_data_stream());
    let mut bytes = Vec::with_capacity(announced.unwrap_or(0).min(limit));
    let mut discarded = 0usize;
    let mut too_large = announced.is_some_and(|length| length > limit);
    if announced.is_some_and(|length| length > DISCARD_BYTES_MAX) {
        return Err(ApiError::too_large(limit));
    }
    while let Some(chunk) = poll_fn(|cx| stream.as_mut().poll_next(cx)).await {
        let chunk = chunk
            .map_err(|error| ApiError::bad_request(format!("The request body was cut off: {error}.")))?;
        too_large |= bytes.len() + chunk.len() > limit;
        if !too_large {
            bytes.extend_from_slice(&chunk);
            continue;
        }
        discarded += chunk.len();
        if discarded > DISCARD_BYTES_MAX {
            break;
        }
    }
    if too_large { Err(ApiError::too_large(limit)) } else { Ok(bytes.into()) }
}
