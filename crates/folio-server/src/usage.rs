//! `GET /v1/usage`: what the asking tenant has used since the server started, and holds now.
//!
//! Owns: token counts per tenant, counted with the responses (so that the sums over a tenant's responses and its usage are
//! equal at any moment). Memory comes from the engine's snapshot, brought up to date: exact while nothing runs, at most a
//! few steps behind while something does. Must never: tell a tenant about another.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use axum::Extension;
use axum::body::Body;
use axum::extract::State as Shared;
use axum::http::Response;
use folio_engine::stats::TenantFigures;
use folio_kv::TenantId;
use serde_json::{Value, json};

use crate::app::State;
use crate::error::ApiError;
use crate::generate::json_response;
use crate::tenants::{Tenant, Tenants};

/// One tenant's tokens.
#[derive(Debug, Default)]
pub(crate) struct Meter {
    requests: AtomicU64,
    prompt_tokens: AtomicU64,
    cached_tokens: AtomicU64,
    completion_tokens: AtomicU64,
}

impl Meter {
    /// The engine took a prompt.
    pub fn request(&self) {
        self.requests.fetch_add(1, Ordering::Relaxed);
    }

    /// A prompt was computed.
    pub fn prompt(&self, tokens: u64, cached: u64) {
        self.prompt_tokens.fetch_add(tokens, Ordering::Relaxed);
        self.cached_tokens.fetch_add(cached, Ordering::Relaxed);
    }

    pub fn generated(&self, tokens: u64) {
        self.completion_tokens.fetch_add(tokens, Ordering::Relaxed);
    }
}

/// A meter for every tenant there is.
pub(crate) struct Meters {
    tenants: HashMap<TenantId, Arc<Meter>>,
}

impl Meters {
    pub fn new(tenants: &Tenants) -> Self {
        Self { tenants: tenants.all().map(|tenant| (tenant.id, Arc::default())).collect() }
    }

    /// Of a tenant that authenticated, so there is one.
    pub fn of(&self, tenant: TenantId) -> Arc<Meter> {
        self.tenants.get(&tenant).cloned().unwrap_or_default()
    }
}

pub(crate) async fn usage(
    Shared(state): Shared<Arc<State>>,
    Extension(tenant): Extension<Tenant>,
) -> Result<Response<Body>, ApiError> {
    let meter = state.meters.of(tenant.id);
    let of = |count: &AtomicU64| count.load(Ordering::Relaxed);
    let (prompt, cached) = (of(&meter.prompt_tokens), of(&meter.cached_tokens));
    let completion = of(&meter.completion_tokens);
    let answer = json!({
        "object": "usage",
        "since": state.started_s,
        "requests": of(&meter.requests),
        "prompt_tokens": prompt,
        "cached_tokens": cached,
        "computed_tokens": prompt - cached.min(prompt),
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "kv": memory(&state, state.root(tenant.id)?.tenant),
    });
    Ok(json_response(answer.to_string()))
}

/// Bytes now, and bytes times seconds since the start, of the cache that the tenant uses.
fn memory(state: &State, cache: TenantId) -> Value {
    let stats = state.app.engine.stats();
    let at = stats.tenants.binary_search_by_key(&cache, |figures| figures.tenant);
    let figures = at.map(|at| stats.tenants[at]).unwrap_or_default();
    let TenantFigures { kv, .. } = figures;
    let kv = kv.at(state.app.engine.now().0);
    json!({
        "active_bytes": kv.active_bytes,
        "cached_bytes": kv.cached_bytes,
        "active_byte_seconds": seconds(kv.active_byte_us),
        "cached_byte_seconds": seconds(kv.cached_byte_us),
    })
}

/// Of an integral over microseconds.
pub(crate) fn seconds(integral: u128) -> f64 {
    integral as f64 / 1e6
}
