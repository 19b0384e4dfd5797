//! The second listener: what operators may do and no tenant.
//!
//! Owns: who may use its routes, and what only they do. Must never: be reachable through the serving port. Every route but `/health` and the page asks for an
//! admin key (`--admin-key`, or one of the file of keys with the scope `admin`) where there is such a key or file.

pub(crate) mod adapters;
pub(crate) mod kv_events;
pub(crate) mod records;

use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::{Response, Uri};
use axum::middleware::Next;
use axum::response::IntoResponse;
use folio_engine::{CacheCommand, CacheResponse};
use serde_json::json;

use crate::arrival::{Listener, answered};
use crate::endpoints::prefixes::command;
use crate::engine::Served;
use crate::http::Shared;
use crate::http::reply::{Refusal, json_response};
use crate::load::Load;
use crate::observability::Observability;
use crate::tenancy::Tenancy;
use folio_api::ApiError;

pub(crate) const OPEN: &[&str] = &["/", "/health", "/livez", "/readyz", "/ping"];

/// Around every route of the admin listener.
pub(crate) async fn around(
    State(tenancy): Shared<Tenancy>,
    State(load): Shared<Load>,
    State(observability): Shared<Observability>,
    request: Request,
    next: Next,
) -> Response<Body> {
    let open = OPEN.contains(&request.uri().path());
    let operator = match open {
        true => Ok(None),
        false => tenancy.tenants.authenticate_operator(request.headers()).await.map(Some),
    };
    let answer = async |request| next.run(request).await;
    answered(&load, &*observability, Listener::Admin, request, operator, answer).await
}

/// `POST /reset_prefix_cache[?tenant=NAME]`: forgets what is cached, but for what is in use, pinned or declared.
pub(crate) async fn reset_prefix_cache(
    State(tenancy): Shared<Tenancy>,
    State(served): Shared<Served>,
    uri: Uri,
) -> Response<Body> {
    let tenant = match uri.query().filter(|query| !query.is_empty()) {
        None => None,
        Some(query) => {
            let name = query.strip_prefix("tenant=");
            let found = name
                .and_then(|name| tenancy.tenants.caches().into_iter().find(|(_, known, _)| known == name));
            match found {
                Some((_, _, id)) => Some(id),
                None => {
                    let message = "The only parameter is 'tenant', the name of a tenant or group that has a cache of its own.";
                    return Refusal(ApiError::invalid("tenant", message)).into_response();
                }
            }
        }
    };
    match command(&served, CacheCommand::Clear { tenant }).await {
        Ok(CacheResponse::Cleared { blocks }) => {
            json_response(json!({"object": "cache.reset", "freed_blocks": blocks}).to_string())
        }
        Ok(_) => Refusal(ApiError::internal("the cache answered something else")).into_response(),
        Err(error) => Refusal(error).into_response(),
    }
}
