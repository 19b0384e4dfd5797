//! `GET /v1/usage`: what the asking tenant has used since the start.

use axum::extract::State;
use folio_kv::TenantId;
use serde_json::{Value, json};

use crate::engine::Served;
use crate::http::Shared;
use crate::http::reply::{Reply, json_response};
use crate::observability::Observability;
use crate::observability::usage::seconds;
use crate::tenancy::tenant::Tenant;

/// `GET /v1/usage`
pub(crate) async fn usage(
    State(observability): Shared<Observability>,
    State(served): Shared<Served>,
    tenant: Tenant,
) -> Reply {
    let count = observability.meters.count(tenant.id);
    let answer = json!({
        "object": "usage",
        "since": observability.started_s,
        "requests": count.requests,
        "prompt_tokens": count.prompt_tokens,
        "cached_tokens": count.cached_tokens,
        "computed_tokens": count.computed_tokens(),
        "completion_tokens": count.completion_tokens,
        "total_tokens": count.prompt_tokens + count.completion_tokens,
        "kv": memory(&served, tenant.cache),
    });
    Ok(json_response(answer.to_string()))
}

/// Bytes now, and bytes times seconds since the start, of the cache that the tenant uses.
fn memory(served: &Served, cache: TenantId) -> Value {
    let kv = served.engine.holdings(cache).at(served.engine.now().0);
    json!({
        "active_bytes": kv.active_bytes,
        "cached_bytes": kv.cached_bytes,
        "active_byte_seconds": seconds(kv.active_byte_us),
        "cached_byte_seconds": seconds(kv.cached_byte_us),
    })
}
