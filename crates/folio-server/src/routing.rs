//! What gateways and routers ask before they send a request: its tokens, and how busy this server is.
//!
//! `/v1/chat/completions/render` and `/v1/completions/render` (vLLM's): the request checked and turned into token ids as it would be,
//! and not run, so that a router can tell by its prefix where it is cached. `/load` (vLLM's) and `/v1/loads` (SGLang's): figures of
//! now. Invariant: no figure tells one tenant's load from another's.

use std::sync::Arc;

use axum::body::Body;
use axum::extract::State as Shared;
use axum::http::Response;
use serde_json::{Value, json};

use crate::app::State;
use crate::error::ApiError;
use crate::generate::{Job, json_response, unix_s};
use crate::http::{Arrival, JsonRequest};
use crate::{chat, completions};

type Answer = Result<Response<Body>, ApiError>;
type Prepare = fn(&State, &Arrival) -> Result<Job, ApiError>;

/// `POST /v1/chat/completions/render`: one object.
pub async fn render_chat(Shared(state): Shared<Arc<State>>, request: JsonRequest) -> Answer {
    let rendered = render(state, request, chat::prepare).await?;
    Ok(json_response(rendered.into_iter().next().unwrap_or_default().to_string()))
}

/// `POST /v1/completions/render`: a list, one for each prompt.
pub async fn render_completions(Shared(state): Shared<Arc<State>>, request: JsonRequest) -> Answer {
    Ok(json_response(Value::from(render(state, request, completions::prepare).await?).to_string()))
}

async fn render(state: Arc<State>, request: JsonRequest, prepare: Prepare) -> Result<Vec<Value>, ApiError> {
    let shared = state.clone();
    let arrival = Arrival::new(request);
    state
        .off_thread(move || {
            let job = prepare(&shared, &arrival)?;
            let rendered = job.prompts.iter().map(|prompt| {
                json!({
                    "request_id": arrival.id, "model": shared.app.model.name(), "token_ids": *prompt.tokens, "features": null,
                    "max_tokens": prompt.params.max_tokens,
                })
            });
            Ok(rendered.collect())
        })
        .await
}

/// `GET /load`: generations between their arrival and their end.
pub async fn load(Shared(state): Shared<Arc<State>>) -> Response<Body> {
    json_response(json!({"server_load": state.in_flight.count()}).to_string())
}

/// `GET /v1/loads`: one entry, as there is one engine.
pub async fn loads(Shared(state): Shared<Arc<State>>) -> Response<Body> {
    let stats = state.app.engine.stats();
    let cache = &stats.cache;
    let tokens = |blocks: u32| u64::from(blocks) * u64::from(cache.block_tokens);
    let waiting = stats.waiting.total();
    let ratio = |part: f64, whole: f64| if whole > 0.0 { part / whole } else { 0.0 };
    let seconds = stats.last_step_us as f64 / 1e6;
    let generated = if stats.busy { ratio(f64::from(stats.last_step_decodes), seconds) } else { 0.0 };
    let load = json!({
        "dp_rank": 0,
        "num_running_reqs": stats.running,
        "num_waiting_reqs": waiting,
        "num_waiting_uncached_tokens": stats.queued_tokens,
        "num_total_reqs": stats.running + waiting,
        "num_used_tokens": tokens(cache.active_blocks),
        "max_total_num_tokens": tokens(cache.blocks),
        "token_usage": stats.kv_usage(),
        "gen_throughput": generated,
        "cache_hit_rate": ratio(cache.hit_tokens as f64, cache.query_tokens as f64),
        "utilization": stats.kv_usage(),
    });
    json_response(json!({"timestamp": unix_s(), "dp_rank_count": 1, "loads": [load]}).to_string())
}
