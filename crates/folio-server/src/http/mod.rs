//! What all routes share: request ids, authentication, draining, reading a body within its limits, and counting.

pub(crate) mod connections;
pub(crate) mod pages;
pub(crate) mod pieces;
pub(crate) mod routing;
pub(crate) mod stream;
pub(crate) mod tls;
pub(crate) mod tokenize;

use std::future::{Future, poll_fn};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::Poll;
use std::time::{Duration, Instant};

use axum::body::{Body, Bytes};
use axum::extract::{FromRequest, MatchedPath, Request, State as Shared};
use axum::http::{HeaderMap, HeaderValue, Method, Response, StatusCode, header};
use axum::middleware::Next;
use axum::response::IntoResponse;
use futures_core::Stream;
use serde_json::json;

use crate::api::anthropic;
use crate::api::error::ApiError;
use crate::api::params::valid_request_id;
use crate::app::State;
use crate::config::Limits;
use crate::generation::safety::Replacement;
use crate::http::connections::Holding;
use crate::tenancy::gate::{Entry, Gate};
use crate::tenancy::keys::{Scope, random};
use crate::tenancy::tenants::{Tenant, missing_scope};
use crate::tenancy::unread::Held;

const REQUEST_ID: &str = "x-request-id";
/// Open to whoever reaches the port: they tell nothing about anybody's requests.
pub const OPEN: &[&str] =
    &["/", "/health", "/livez", "/readyz", "/ping", "/metrics", "/openapi.json", "/version"];
/// Refused while draining.
const GENERATING: &[&str] = &[
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/embeddings",
    "/v1/responses",
    "/v1/messages",
    "/v1/cache/prefixes",
];

/// The request's id: the client's where it is usable, else a fresh one.
#[derive(Clone)]
pub struct RequestName(pub String);

/// Who connected; known where there is a socket.
#[derive(Clone, Copy)]
pub struct Peer(pub std::net::SocketAddr);

/// Where a request came in.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Listener {
    Serving,
    Admin,
}

/// Around every route of the serving port.
pub async fn around(Shared(state): Shared<Arc<State>>, request: Request, next: Next) -> Response<Body> {
    let anthropic = anthropic::is_meant(&request);
    let mut request = request;
    let tenant = admit(&state, &mut request);
    if tenant.as_ref().is_err_and(|refused| refused.retry_after_s.is_some()) {
        discard(&mut request, &state.config.limits).await;
    }
    let entry = request.extensions().get::<Arc<Entry>>().cloned();
    let gate = request.extensions().get::<Arc<Gate>>().cloned();
    let generating = GENERATING.contains(&request.uri().path());
    let mut response =
        answered(&state, Listener::Serving, request, tenant, async |request| next.run(request).await).await;
    if let Some(gate) = gate.filter(|_| generating) {
        gate.tell(response.headers_mut(), Instant::now());
    }
    if anthropic {
        let id =
            response.headers().get(REQUEST_ID).and_then(|id| id.to_str().ok()).unwrap_or_default().to_owned();
        anthropic::restate(&mut response, &id);
    }
    match entry {
        // It runs until its answer was accepted or its client left.
        Some(entry) => response.map(|body| Body::new(Holding::new(body, entry))),
        None => response,
    }
}

/// Names the request, answers it or says why not, and counts.
pub async fn answered(
    state: &State,
    listener: Listener,
    mut request: Request,
    asking: Result<Option<Tenant>, ApiError>,
    answer: impl AsyncFnOnce(Request) -> Response<Body>,
) -> Response<Body> {
    let arrived = Instant::now();
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
    let peer = request.extensions().get::<Peer>().copied();
    let who = asking.as_ref().ok().and_then(|tenant| tenant.as_ref());
    let who = who.map(|tenant| (tenant.name.clone(), tenant.key.clone()));
    let mut response = match asking {
        Ok(tenant) => {
            if let Some(tenant) = tenant {
                request.extensions_mut().insert(tenant);
            }
            request.extensions_mut().insert(RequestName(id.clone()));
            match caught(answer(request)).await {
                Some(response) => response,
                None => {
                    state.metrics.panicked();
                    ApiError::internal("the server failed while it handled this request").into_response()
                }
            }
        }
        Err(refused) => refused.into_response(),
    };
    if let Ok(value) = HeaderValue::from_str(&id) {
        response.headers_mut().insert(REQUEST_ID, value);
    }
    let status = response.status().as_u16();
    state.metrics.http(&method, &handler, status);
    tracing::debug!(request = %id, %method, %handler, status, "answered");
    if let Some(audit) = &state.audit {
        let error = response.extensions().get::<ApiError>();
        audit.write(
            "request",
            json!({
                "request_id": id,
                "listener": if listener == Listener::Admin { "admin" } else { "serving" },
                "client": peer.map(|peer| peer.0.to_string()),
                "method": method,
                "route": handler,
                "tenant": who.as_ref().map(|(tenant, _)| &**tenant),
                "key": who.as_ref().map(|(_, key)| &**key),
                "status": status,
                "error": error.map(|error| error.code.unwrap_or(error.kind)),
                "ms": arrived.elapsed().as_millis() as u64,
            }),
        );
    }
    response
}

/// What comes of `future`, unless it panics: one request's failure ends no connection, and is counted.
pub(crate) async fn caught<T>(future: impl Future<Output = T>) -> Option<T> {
    let mut future = pin!(future);
    poll_fn(|cx| match catch_unwind(AssertUnwindSafe(|| future.as_mut().poll(cx))) {
        Ok(polled) => polled.map(Some),
        Err(_) => Poll::Ready(None),
    })
    .await
}

/// Who asks, if the route wants to know; or why not. A request that brings a body is let in here, before a byte of it is read.
fn admit(state: &State, request: &mut Request) -> Result<Option<Tenant>, ApiError> {
    let path = request.uri().path();
    if OPEN.contains(&path) {
        return Ok(None);
    }
    let tenant = state.tenants.authenticate(request.headers())?;
    let scope = Scope::of(path);
    if !tenant.scopes.has(scope) {
        return Err(missing_scope(scope));
    }
    anthropic::check_version(request.headers())?;
    let generating = GENERATING.contains(&path);
    if generating && state.draining.load(Ordering::Acquire) {
        return Err(ApiError::unavailable(
            "This server is shutting down; send the request to another one.",
            5,
        ));
    }
    request.extensions_mut().insert(tenant.gate.clone());
    if request.method() == Method::POST {
        let entry = tenant.gate.enter(generating, Instant::now())?;
        request.extensions_mut().insert(entry);
    }
    Ok(Some(tenant))
}

/// How long a body that nobody wants is let pass, so that its client gets to read the answer.
const DISCARDING: Duration = Duration::from_secs(5);

/// Lets a body pass whose request was told to come again. Nothing of it is kept.
async fn discard(request: &mut Request, limits: &Limits) {
    if request.headers().contains_key(header::EXPECT) {
        // Its client sends no body before it is asked to.
        return;
    }
    let body = std::mem::take(request.body_mut());
    let mut left = limits.body_bytes;
    let mut stream = pin!(body.into_data_stream());
    let passing = async {
        while let Some(Ok(chunk)) = poll_fn(|cx| stream.as_mut().poll_next(cx)).await {
            left = left.saturating_sub(chunk.len());
            if left == 0 {
                return;
            }
        }
    };
    let _ = tokio::time::timeout(DISCARDING, passing).await;
}

pub fn fresh_id() -> String {
    format!("{:032x}", u128::from_le_bytes(random()))
}

/// A request on its way to becoming a job.
#[derive(Clone)]
pub struct Arrival {
    pub tenant: Tenant,
    pub id: String,
    pub body: Bytes,
    /// What its body takes.
    _held: Option<Arc<Held>>,
    pub at: Instant,
    /// What the safety callout put in the place of its prompts.
    pub replaced: Vec<Option<Replacement>>,
}

impl Arrival {
    pub fn new(request: JsonRequest) -> Self {
        let held = Some(Arc::new(request.held));
        Self { _held: held, ..Self::of_line(request.tenant, request.id, request.body) }
    }

    /// A request that did not come by itself: a line of a batch.
    pub fn of_line(tenant: Tenant, id: String, body: Bytes) -> Self {
        Self { tenant, id, body, _held: None, at: Instant::now(), replaced: Vec::new() }
    }
}

/// An authenticated request with a JSON body, read within the limits.
pub struct JsonRequest {
    pub tenant: Tenant,
    pub id: String,
    pub body: Bytes,
    pub(crate) held: Held,
    pub(crate) entry: Arc<Entry>,
}

impl FromRequest<Arc<State>> for JsonRequest {
    type Rejection = ApiError;

    async fn from_request(request: Request, state: &Arc<State>) -> Result<Self, ApiError> {
        let (parts, body) = request.into_parts();
        let tenant = parts.extensions.get::<Tenant>().cloned();
        let tenant = tenant.ok_or_else(|| ApiError::internal("the request was not authenticated"))?;
        let entry = parts.extensions.get::<Arc<Entry>>().cloned();
        let entry = entry.ok_or_else(|| ApiError::internal("the request was not let in"))?;
        let id = parts.extensions.get::<RequestName>().map(|name| name.0.clone()).unwrap_or_default();
        check_content_type(&parts.headers)?;
        let limits = &state.config.limits;
        let mut held = state.unread.hold(&tenant.gate);
        let read = read_body(&parts.headers, body, limits.body_bytes, &mut held);
        let body = tokio::time::timeout(limits.body_timeout, read).await.map_err(|_| {
            let message =
                format!("The request body did not arrive within {} s.", limits.body_timeout.as_secs());
            ApiError::new(StatusCode::REQUEST_TIMEOUT, "invalid_request_error", message)
        })??;
        Ok(Self { tenant, id, body, held, entry })
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

/// What is made room for before it arrives.
const ROOM_BYTES: usize = 64 << 10;

/// Reads a body within `limit`. What arrived is counted in `held`; what was only announced takes nothing.
pub(crate) async fn read_body(
    headers: &HeaderMap,
    body: Body,
    limit: usize,
    held: &mut Held,
) -> Result<Bytes, ApiError> {
    let announced = headers.get(header::CONTENT_LENGTH).and_then(|v| v.to_str().ok()?.parse::<usize>().ok());
    let mut stream = pin!(body.into_data_stream());
    let mut bytes = Vec::with_capacity(announced.unwrap_or(0).min(limit).min(ROOM_BYTES));
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
            held.grow(chunk.len())?;
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
