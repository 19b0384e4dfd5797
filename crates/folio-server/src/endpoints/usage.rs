//! `GET /v1/usage`: what the asking tenant has used since the start.

use std::sync::Arc;

use axum::Extension;
use axum::extract::State as Shared;
use folio_kv::TenantId;
use serde_json::{Value, json};

use crate::app::State;
use crate::http::reply::{Reply, json_response};
use crate::observability::usage::seconds;
use crate::tenancy::tenants::Tenant;

/// `GET /v1/usage`
pub(crate) async fn usage(Shared(state): Shared<Arc<State>>, Extension(tenant): Extension<Tenant>) -> Reply {
    let count = state.meters.count(tenant.id);
    let answer = json!({
        "object": "usage",
        "since": state.started_s,
        "requests": count.requests,
        "prompt_tokens": count.prompt_tokens,
        "cached_tokens": count.cached_tokens,
        "computed_tokens": count.computed_tokens(),
        "completion_tokens": count.completion_tokens,
        "total_tokens": count.prompt_tokens + count.completion_tokens,
        "kv": memory(&state, tenant.cache),
    });
    Ok(json_response(answer.to_string()))
}

/// Bytes now, and bytes times seconds since the start, of the cache that the tenant uses.
fn memory(state: &State, cache: TenantId) -> Value {
    let kv = state.app.engine.holdings(cache).at(state.app.engine.now().0);
    json!({
        "active_bytes": kv.active_bytes,
        "cached_bytes": kv.cached_bytes,
        "active_byte_seconds": seconds(kv.active_byte_us),
        "cached_byte_seconds": seconds(kv.cached_byte_us),
    })
}
