//! The second listener: what operators may do and no tenant.
//!
//! Owns: its routes and who may use them. Must never: be reachable through the serving port. Every route but `/health` asks for an
//! admin key (`--admin-key`, or one of the file of keys with the scope `admin`) where there is such a key or file.

mod kv_events;
pub(crate) mod records;

use std::sync::Arc;

use axum::Router;
use axum::body::Body;
use axum::extract::{Request, State as Shared};
use axum::http::{Response, Uri};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::IntoResponse;
use axum::routing::{get, post};
use folio_engine::{CacheCommand, CacheResponse};
use serde_json::json;

use crate::app::State;
use crate::arrival::{Listener, answered};
use crate::endpoints::pages;
use crate::endpoints::prefixes::command;
use crate::http::reply::Refusal;
use crate::http::reply::json_response;
use folio_api::ApiError;

const OPEN: &[&str] = &["/health", "/livez", "/readyz", "/ping"];

pub(crate) fn router(state: &Arc<State>) -> Router {
    Router::new()
        .route("/health", get(pages::health))
        .route("/livez", get(pages::live))
        .route("/readyz", get(pages::ready))
        .route("/ping", get(pages::ping))
        .route("/metrics", get(pages::all_metrics))
        .route("/reset_prefix_cache", post(reset_prefix_cache))
        .route("/v1/usage/records", get(records::all))
        .route("/kv_events", get(kv_events::show))
        .route("/kv_events/blocks", get(kv_events::blocks))
        .route("/kv_events/republish", post(kv_events::republish))
        .fallback(pages::not_found)
        .method_not_allowed_fallback(pages::method_not_allowed)
        .layer(from_fn_with_state(state.clone(), around))
        .with_state(state.clone())
}

async fn around(Shared(state): Shared<Arc<State>>, request: Request, next: Next) -> Response<Body> {
    let open = OPEN.contains(&request.uri().path());
    let operator = match open {
        true => Ok(None),
        false => state.tenants.authenticate_operator(request.headers()).await.map(Some),
    };
    answered(&state, Listener::Admin, request, operator, async |request| next.run(request).await).await
}

/// `POST /reset_prefix_cache[?tenant=NAME]`: forgets what is cached, but for what is in use, pinned or declared.
async fn reset_prefix_cache(Shared(state): Shared<Arc<State>>, uri: Uri) -> Response<Body> {
    let tenant = match uri.query().filter(|query| !query.is_empty()) {
        None => None,
        Some(query) => {
            let name = query.strip_prefix("tenant=");
            let found =
                name.and_then(|name| state.tenants.caches().into_iter().find(|(_, known, _)| known == name));
            match found {
                Some((_, _, id)) => Some(id),
                None => {
                    let message = "The only parameter is 'tenant', the name of a tenant or group that has a cache of its own.";
                    return Refusal(ApiError::invalid("tenant", message)).into_response();
                }
            }
        }
    };
    match command(&state, CacheCommand::Clear { tenant }).await {
        Ok(CacheResponse::Cleared { blocks }) => {
            json_response(json!({"object": "cache.reset", "freed_blocks": blocks}).to_string())
        }
        Ok(_) => Refusal(ApiError::internal("the cache answered something else")).into_response(),
        Err(error) => Refusal(error).into_response(),
    }
}
