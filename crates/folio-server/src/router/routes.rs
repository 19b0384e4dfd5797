//! Every route of a server of several models: who is asked what.

use axum::Router;
use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::Response;
use axum::middleware::{Next, from_fn_with_state};
use axum::response::IntoResponse;
use axum::routing::{any, delete, get, post};
use folio_api::ApiError;

use crate::admin::OPEN;
use crate::arrival::{Listener, answered, let_in};
use crate::endpoints::ollama;
use crate::endpoints::pages::{live, method_not_allowed, not_found, openapi};
use crate::http::reply::Refusal;

use super::asking::{admin_by_query, admin_watched_by_query, by_body, by_id, by_query, watched_by_query};
use super::pages;
use super::state::RouterState;

/// Which requests a model's process answers: those whose body names it.
const BY_BODY: [&str; 15] = [
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/embeddings",
    "/v1/responses",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/chat/completions/render",
    "/v1/completions/render",
    "/tokenize",
    "/detokenize",
    "/api/chat",
    "/api/generate",
    "/api/embed",
    "/api/embeddings",
    "/api/show",
];
/// What every process has its own of: `?model=NAME` says whose is meant.
const BY_QUERY: [&str; 5] = ["/v1/cache/keys", "/load", "/v1/loads", "/v1/usage", "/v1/usage/records"];

/// What clients reach.
pub(super) fn serving(state: &RouterState, metrics_on_admin: bool) -> Router {
    let mut router = Router::new();
    if !metrics_on_admin {
        router = router.route("/metrics", get(pages::metrics));
    }
    for path in BY_BODY {
        router = router.route(path, post(by_body));
    }
    for path in BY_QUERY {
        router = router.route(path, get(by_query));
    }
    for path in ["/v1/files", "/v1/files/{*rest}", "/v1/batches", "/v1/batches/{*rest}"] {
        router = router.route(path, any(no_batches));
    }
    router
        .route("/", get(pages::index))
        .route("/v1/responses/{id}", get(by_id).delete(by_id))
        .route("/v1/responses/{id}/cancel", post(by_id))
        .route("/v1/responses/{id}/input_items", get(by_id))
        .route("/v1/cache/prefixes", get(by_query).post(by_body))
        .route("/v1/cache/prefixes/{id}", get(by_id).post(by_id).delete(by_id))
        .route("/v1/why", get(pages::why))
        .route("/v1/why/live", get(watched_by_query))
        .route("/v1/trace", get(watched_by_query))
        .route("/v1/models", get(pages::models))
        .route("/v1/models/{*name}", get(pages::model))
        .route("/api/tags", get(pages::tags))
        .route("/api/ps", get(pages::ps))
        .route("/api/pull", post(pages::pull))
        .route("/api/delete", delete(ollama::delete))
        .route("/api/version", get(ollama::version))
        .route("/health", get(pages::health))
        .route("/livez", get(live))
        .route("/readyz", get(pages::health))
        .route("/ping", get(pages::health).post(pages::health))
        .route("/version", get(pages::version))
        .route("/openapi.json", get(openapi))
        .fallback(not_found)
        .method_not_allowed_fallback(method_not_allowed)
        .layer(from_fn_with_state(state.clone(), around))
        .with_state(state.clone())
}

/// What operators reach.
pub(super) fn admin(state: &RouterState) -> Router {
    Router::new()
        .route("/health", get(pages::health))
        .route("/livez", get(live))
        .route("/readyz", get(pages::health))
        .route("/ping", get(pages::health))
        .route("/metrics", get(pages::all_metrics))
        .route("/v1/why", get(admin_by_query))
        .route("/v1/why/live", get(admin_watched_by_query))
        .route("/v1/trace", get(admin_watched_by_query))
        .route("/v1/usage/records", get(admin_by_query))
        .route("/reset_prefix_cache", post(admin_by_query))
        .route("/kv_events", get(admin_by_query))
        .route("/kv_events/blocks", get(admin_by_query))
        .route("/kv_events/republish", post(admin_by_query))
        .fallback(not_found)
        .method_not_allowed_fallback(method_not_allowed)
        .layer(from_fn_with_state(state.clone(), around_admin))
        .with_state(state.clone())
}

async fn around(State(state): State<RouterState>, request: Request, next: Next) -> Response<Body> {
    let_in(&state.tenants, &state.load, &*state, request, next).await
}

async fn around_admin(State(state): State<RouterState>, request: Request, next: Next) -> Response<Body> {
    let operator = match OPEN.contains(&request.uri().path()) {
        true => Ok(None),
        false => state.tenants.authenticate_operator(request.headers()).await.map(Some),
    };
    let answer = async |request| next.run(request).await;
    answered(&state.load, &*state, Listener::Admin, request, operator, answer).await
}

async fn no_batches() -> Response<Body> {
    let message = "Files and batches are not served where several models are: a batch outlives its requests, and models are unloaded when \
                   nobody asks. Serve the model by itself for them.";
    Refusal(ApiError { code: Some("unsupported_operation"), ..ApiError::bad_request(message) })
        .into_response()
}

#[cfg(test)]
mod tests {
    use folio_api::openapi::tables::ROUTES;

    /// What is described is here, too, or refused by name.
    #[test]
    fn every_route_of_one_model_is_one_of_several() {
        let source = include_str!("routes.rs");
        let source = source.split("pub(super) fn admin").next().unwrap_or_default();
        for route in ROUTES {
            let path = route.path.replace("/v1/models/{name}", "/v1/models/{*name}");
            let refused = path.starts_with("/v1/files") || path.starts_with("/v1/batches");
            assert!(refused || source.contains(&format!("\"{path}\"")), "{path}");
        }
    }
}
