//! The small routes: models, health, metrics, version, and what is told where there is nothing.

use std::sync::LazyLock;

use axum::body::{Body, Bytes};
use axum::extract::{Request, State};
use axum::http::{HeaderMap, HeaderValue, Method, Response, Uri, header};
use axum::response::IntoResponse;
use folio_engine::handle::Health;
use serde_json::{Value, json};

use crate::adapters::AdapterCard;
use crate::arrival::Id;
use crate::endpoints::anthropic;
use crate::engine::Served;
use crate::http::Shared;
use crate::http::anthropic::is_meant;
use crate::http::reply::{Refusal, Reply, json_bytes, json_response};
use crate::load::Load;
use crate::observability::Observability;
use crate::tenancy::Tenancy;
use crate::tenancy::tenant::Tenant;
use crate::threads::NOBODY;
use folio_api::ApiError;
use folio_api::openapi::tables::ROUTES;

/// About how much work a page is.
const PAGE_BYTES: usize = 32 << 10;

/// OpenAI's list or, for clients that say a version of Anthropic's API, Anthropic's. With the adapters that there are for who asks.
pub async fn models(State(served): Shared<Served>, tenant: Tenant, request: Request) -> Reply {
    if is_meant(&request) {
        let page = anthropic::models(&served, request.uri().query().unwrap_or_default())?;
        return Ok(json_response(page.to_string()));
    }
    let mut list: Vec<Value> = served.context.model.listed().map(|name| describe(&served, name)).collect();
    let cards = served.adapters.cards();
    let allowed = cards.iter().filter(|card| tenant.adapters.has(&card.name));
    list.extend(allowed.map(|card| describe_adapter(&served, card)));
    Ok(json_response(json!({"object": "list", "data": list}).to_string()))
}

/// The name may contain slashes (`org/model`).
pub async fn model(State(served): Shared<Served>, tenant: Tenant, Id(name): Id, request: Request) -> Reply {
    let allowed = tenant.adapters.has(&name);
    let card = served.adapters.cards().into_iter().find(|card| allowed && card.name == name);
    if let Some(card) = card.filter(|_| !is_meant(&request)) {
        return Ok(json_response(describe_adapter(&served, &card).to_string()));
    }
    if !served.context.model.answers_to(&name) {
        return Err(ApiError::model_not_found(&name, served.name()).into());
    }
    let described = match is_meant(&request) {
        true => anthropic::model(&served, &name),
        false => describe(&served, &name),
    };
    Ok(json_response(described.to_string()))
}

fn describe(served: &Served, name: &str) -> Value {
    let model = &served.model;
    json!({
        "id": name, "object": "model", "created": model.created_s, "owned_by": "folio",
        "root": served.name(), "parent": null, "max_model_len": model.context_length,
    })
}

fn describe_adapter(served: &Served, card: &AdapterCard) -> Value {
    let mut described = describe(served, &card.name);
    described["root"] = card.path.as_str().into();
    described["parent"] = served.name().into();
    described["lora_rank"] = card.rank.into();
    described
}

/// Forward progress, not existence, and whether requests should be sent here: fails when work waits and nothing is computed, when the engine cannot go on, and while draining.
pub async fn health(State(served): Shared<Served>, State(load): Shared<Load>) -> Reply {
    if load.is_draining() {
        return Err(ApiError::unavailable("This server is shutting down.", 5).into());
    }
    match served.engine.health(load.limits.stall.as_micros() as u64) {
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
pub async fn metrics(
    State(tenancy): Shared<Tenancy>,
    observability: Shared<Observability>,
    load: Shared<Load>,
    headers: HeaderMap,
) -> Reply {
    let operator = tenancy.tenants.is_operator(&headers).await;
    figures(observability, load, headers, operator).await
}

/// On the second listener.
pub async fn all_metrics(
    observability: Shared<Observability>,
    load: Shared<Load>,
    headers: HeaderMap,
) -> Reply {
    figures(observability, load, headers, true).await
}

async fn figures(
    State(observability): Shared<Observability>,
    State(load): Shared<Load>,
    headers: HeaderMap,
    operator: bool,
) -> Reply {
    let accept = headers.get(header::ACCEPT).and_then(|value| value.to_str().ok()).unwrap_or("");
    let openmetrics = accept.contains("application/openmetrics-text");
    observability.metrics.in_flight_bytes.set(load.unread.held() as i64);
    observability.metrics.text_waiting.set(load.text.waiting() as i64);
    let page = load.off_thread(NOBODY, PAGE_BYTES, move || {
        let page = observability.metrics.render(openmetrics, operator);
        page.map_err(|_| ApiError::internal("the metrics could not be written"))
    });
    let (text, content_type) = page.await?;
    Ok(([(header::CONTENT_TYPE, HeaderValue::from_static(content_type))], text).into_response())
}

/// `GET /openapi.json`
pub async fn openapi() -> Response<Body> {
    static TEXT: LazyLock<Bytes> = LazyLock::new(|| folio_api::openapi::document().to_string().into());
    json_bytes(TEXT.clone())
}

pub async fn version(State(served): Shared<Served>) -> Response<Body> {
    json_response(json!({"version": served.version}).to_string())
}

/// Whether the process answers at all: also while it drains, and while the engine cannot go on.
pub async fn live() -> Response<Body> {
    json_response(json!({"status": "ok"}).to_string())
}

/// What to say to somebody who is almost there.
fn methods_of(path: &str) -> Option<String> {
    let methods = ROUTES.iter().filter(|route| route.path == path).map(|route| route.method.to_uppercase());
    Some(methods.collect::<Vec<_>>().join(" or ")).filter(|methods| !methods.is_empty())
}

pub async fn not_found(method: Method, uri: Uri) -> Refusal {
    // A slash at the end, no /v1, or one too many: clients differ in what they add to a base URL.
    let path = uri.path().trim_end_matches('/');
    let guesses =
        [path.to_owned(), format!("/v1{path}"), path.strip_prefix("/v1").unwrap_or(path).to_owned()];
    let hint = match guesses.iter().find_map(|guess| Some((methods_of(guess)?, guess))) {
        Some((methods, guess)) => format!("Did you mean {methods} {guess}?"),
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
    let hint = methods_of(uri.path()).map(|methods| format!("; use {methods}")).unwrap_or_default();
    Refusal(ApiError {
        code: Some("method_not_allowed"),
        ..ApiError::new(
            405,
            "invalid_request_error",
            format!("{method} is not allowed for {}{hint}.", uri.path()),
        )
    })
}

/// What this is and how to use it, for a terminal.
pub(super) fn introduction(served: &Served, headers: &HeaderMap) -> String {
    let model = served.name();
    let fallback = served.listen.to_string();
    let host = headers
        .get(header::HOST)
        .and_then(|host| host.to_str().ok())
        .filter(|host| host.bytes().all(|byte| byte.is_ascii_alphanumeric() || b".:-[]".contains(&byte)))
        .unwrap_or(&fallback);
    let body = json!({"model": model, "messages": [{"role": "user", "content": "Hello!"}]}).to_string();
    let body = body.replace('\'', "'\\''");
    let routes = ROUTES.iter().map(|route| format!("{} {}", route.method.to_uppercase(), route.path));
    format!(
        "Folio {} serves the model {model} (context {} tokens) over OpenAI's, Anthropic's and Ollama's APIs.\n\n\
         Try it:\n\n  curl http://{host}/v1/chat/completions -H 'content-type: application/json' -d '{body}'\n\n\
         Routes: {}\n",
        served.version,
        served.model.context_length,
        routes.collect::<Vec<_>>().join(", "),
    )
}
