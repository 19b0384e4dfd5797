//! The small routes: models, health, metrics, version, tokenize, and a page for people.

use std::sync::atomic::Ordering;
use std::sync::{Arc, LazyLock};

use axum::body::Body;
use axum::extract::{Path, Request, State as Shared};
use axum::http::{HeaderMap, HeaderValue, Method, Response, Uri, header};
use axum::response::IntoResponse;
use folio_engine::handle::Health;
use folio_kv::TenantId;
use serde_json::{Value, json};

use crate::app::State;
use crate::endpoints::anthropic;
use crate::http::anthropic::is_meant;
use crate::http::reply::json_response;
use crate::http::reply::{Refusal, Reply};
use folio_api::ApiError;

/// Whose turn it is to have a page written that is nobody's in particular, and about how much work that is.
const NOBODY: TenantId = TenantId(u32::MAX);
const PAGE_BYTES: usize = 32 << 10;

/// OpenAI's list or, for clients that say a version of Anthropic's API, Anthropic's.
pub async fn models(Shared(state): Shared<Arc<State>>, request: Request) -> Reply {
    if is_meant(&request) {
        let page = anthropic::models(&state, request.uri().query().unwrap_or_default())?;
        return Ok(json_response(page.to_string()));
    }
    let list: Vec<Value> = state.context.model.listed().map(|name| describe(&state, name)).collect();
    Ok(json_response(json!({"object": "list", "data": list}).to_string()))
}

/// The name may contain slashes (`org/model`).
pub async fn model(Shared(state): Shared<Arc<State>>, Path(name): Path<String>, request: Request) -> Reply {
    if !state.context.model.answers_to(&name) {
        return Err(ApiError::model_not_found(&name, state.context.model.name()).into());
    }
    let described = match is_meant(&request) {
        true => anthropic::model(&state, &name),
        false => describe(&state, &name),
    };
    Ok(json_response(described.to_string()))
}

fn describe(state: &State, name: &str) -> Value {
    let model = &state.app.model;
    json!({
        "id": name, "object": "model", "created": model.created_s, "owned_by": "folio",
        "root": state.context.model.name(), "parent": null, "max_model_len": model.context_length,
    })
}

/// Forward progress, not existence: fails when work waits and nothing is computed, when the engine cannot go on, and while draining.
pub async fn health(Shared(state): Shared<Arc<State>>) -> Reply {
    if state.draining.load(Ordering::Acquire) {
        return Err(ApiError::unavailable("This server is shutting down.", 5).into());
    }
    match state.app.engine.health(state.config.limits.stall.as_micros() as u64) {
        Health::Ok => Ok(json_response(json!({"status": "ok"}).to_string())),
        Health::Stalled { for_us } => Err(ApiError::unavailable(
            format!(
                "Work is waiting; for {} s no token was computed and no request ended.",
                for_us / 1_000_000
            ),
            30,
        )
        .into()),
        Health::Unhealthy { reason } => {
            Err(ApiError::unavailable(format!("The engine cannot go on: {reason}."), 30).into())
        }
    }
}

/// On the serving port, which strangers reach: names of tenants are for operators.
pub async fn metrics(state: Shared<Arc<State>>, headers: HeaderMap) -> Reply {
    let operator = state.tenants.is_operator(&headers).await;
    figures(state, headers, operator).await
}

/// On the second listener.
pub async fn all_metrics(state: Shared<Arc<State>>, headers: HeaderMap) -> Reply {
    figures(state, headers, true).await
}

async fn figures(Shared(state): Shared<Arc<State>>, headers: HeaderMap, tenants: bool) -> Reply {
    let accept = headers.get(header::ACCEPT).and_then(|value| value.to_str().ok()).unwrap_or("");
    let openmetrics = accept.contains("application/openmetrics-text");
    state.metrics.in_flight_bytes.set(state.unread.held() as i64);
    state.metrics.text_waiting.set(state.text.waiting() as i64);
    let shared = state.clone();
    let page = state.off_thread(NOBODY, PAGE_BYTES, move || {
        let page = shared.metrics.render(openmetrics, tenants);
        page.map_err(|_| ApiError::internal("the metrics could not be written"))
    });
    let (text, content_type) = page.await?;
    Ok(([(header::CONTENT_TYPE, HeaderValue::from_static(content_type))], text).into_response())
}

/// `GET /openapi.json`
pub async fn openapi() -> Response<Body> {
    static TEXT: LazyLock<String> = LazyLock::new(|| folio_api::openapi::document().to_string());
    json_response(TEXT.clone())
}

pub async fn version(Shared(state): Shared<Arc<State>>) -> Response<Body> {
    json_response(json!({"version": state.app.version}).to_string())
}

/// Whether the process answers at all: also while it drains, and while the engine cannot go on.
pub async fn live() -> Response<Body> {
    json_response(json!({"status": "ok"}).to_string())
}

/// Whether requests should be sent here: what `/health` says.
pub async fn ready(state: Shared<Arc<State>>) -> Reply {
    health(state).await
}

pub async fn ping(state: Shared<Arc<State>>) -> Reply {
    health(state).await
}

/// What to say to somebody who is almost there.
const ROUTES: &[(&str, &str)] = &[
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/embeddings"),
    ("POST", "/v1/responses"),
    ("POST", "/v1/files"),
    ("POST", "/v1/batches"),
    ("POST", "/v1/chat/completions/render"),
    ("POST", "/v1/completions/render"),
    ("POST", "/v1/messages"),
    ("POST", "/v1/messages/count_tokens"),
    ("GET", "/v1/models"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("GET", "/health"),
    ("GET", "/livez"),
    ("GET", "/readyz"),
    ("GET", "/ping"),
    ("GET", "/metrics"),
    ("GET", "/version"),
    ("GET", "/load"),
    ("GET", "/v1/loads"),
];

fn method_of(path: &str) -> Option<&'static str> {
    ROUTES.iter().find(|(_, route)| *route == path).map(|(method, _)| *method)
}

pub async fn not_found(method: Method, uri: Uri) -> Refusal {
    // A slash at the end, no /v1, or one too many: clients differ in what they add to a base URL.
    let path = uri.path().trim_end_matches('/');
    let guesses =
        [path.to_owned(), format!("/v1{path}"), path.strip_prefix("/v1").unwrap_or(path).to_owned()];
    let hint = match guesses.iter().find_map(|guess| Some((method_of(guess)?, guess))) {
        Some((method, guess)) => format!("Did you mean {method} {guess}?"),
        None => "See GET / for what is here.".to_owned(),
    };
    Refusal(ApiError {
        code: Some("unknown_url"),
        ..ApiError::new(
            404,
            "invalid_request_error",
            format!("Unknown request URL: {method} {}. {hint}", uri.path()),
        )
    })
}

pub async fn method_not_allowed(method: Method, uri: Uri) -> Refusal {
    let hint = method_of(uri.path()).map(|method| format!("; use {method}")).unwrap_or_default();
    Refusal(ApiError {
        code: Some("method_not_allowed"),
        ..ApiError::new(
            405,
            "invalid_request_error",
            format!("{method} is not allowed for {}{hint}.", uri.path()),
        )
    })
}

/// What this is and how to use it, for a person with a browser or a terminal.
pub async fn index(Shared(state): Shared<Arc<State>>, headers: HeaderMap) -> Response<Body> {
    let text = introduction(&state, &headers);
    let accept = headers.get(header::ACCEPT).and_then(|value| value.to_str().ok()).unwrap_or("");
    if !accept.contains("text/html") {
        return text.into_response();
    }
    let html = format!(
        "<!doctype html><html lang=\"en\"><meta charset=\"utf-8\"><title>Folio</title><style>body{{font:16px/1.5 \
         system-ui;max-width:52rem;margin:3rem auto;padding:0 1rem}}pre{{white-space:pre-wrap}}</style>\
         <h1>Folio</h1><pre>{}</pre></html>",
        escape(&text)
    );
    let policy = "default-src 'none'; style-src 'unsafe-inline'";
    let headers =
        [(header::CONTENT_TYPE, "text/html; charset=utf-8"), (header::CONTENT_SECURITY_POLICY, policy)];
    (headers, html).into_response()
}

fn introduction(state: &State, headers: &HeaderMap) -> String {
    let model = state.context.model.name();
    let fallback = state.config.listen.to_string();
    let host = headers
        .get(header::HOST)
        .and_then(|host| host.to_str().ok())
        .filter(|host| host.bytes().all(|byte| byte.is_ascii_alphanumeric() || b".:-[]".contains(&byte)))
        .unwrap_or(&fallback);
    let body = json!({"model": model, "messages": [{"role": "user", "content": "Hello!"}]}).to_string();
    let body = body.replace('\'', "'\\''");
    format!(
        "Folio {} serves the model {model} (context {} tokens) over OpenAI's and Anthropic's APIs.\n\n\
         Try it:\n\n  curl http://{host}/v1/chat/completions -H 'content-type: application/json' -d '{body}'\n\n\
         Routes: POST /v1/chat/completions, POST /v1/completions, POST /v1/messages,\n\
         POST /v1/messages/count_tokens, GET /v1/models, POST /tokenize, POST /detokenize,\n\
         GET and POST /v1/cache/prefixes, GET /v1/cache/keys, GET /v1/usage, GET /health, GET /metrics,\n\
         GET /version\n",
        state.app.version, state.app.model.context_length,
    )
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}
