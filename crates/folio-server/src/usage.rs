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

/// What a meter showed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Count {
    pub requests: u64,
    pub prompt_tokens: u64,
    pub cached_tokens: u64,
    pub completion_tokens: u64,
}

impl Count {
    /// Prompt tokens that were not found in the cache.
    pub fn computed_tokens(&self) -> u64 {
        self.prompt_tokens - self.cached_tokens.min(self.prompt_tokens)
    }

    pub fn add(&mut self, other: Count) {
        self.requests += other.requests;
        self.prompt_tokens += other.prompt_tokens;
        self.cached_tokens += other.cached_tokens;
        self.completion_tokens += other.completion_tokens;
    }
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

    fn count(&self) -> Count {
        let of = |count: &AtomicU64| count.load(Ordering::Relaxed);
        // Cached before prompt: counted together, they are never seen the other way round.
        let cached_tokens = of(&self.cached_tokens);
        Count {
            requests: of(&self.requests),
            prompt_tokens: of(&self.prompt_tokens),
            cached_tokens,
            completion_tokens: of(&self.completion_tokens),
        }
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

    /// Zeros for a tenant that is none.
    pub fn count(&self, tenant: TenantId) -> Count {
        self.tenants.get(&tenant).map(|meter| meter.count()).unwrap_or_default()
    }
}

pub(crate) async fn usage(
    Shared(state): Shared<Arc<State>>,
    Extension(tenant): Extension<Tenant>,
) -> Result<Response<Body>, ApiError> {
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
