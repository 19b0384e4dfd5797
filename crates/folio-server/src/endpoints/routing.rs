//! What gateways and routers ask before they send a request: its tokens, and how busy this server is.
//!
//! `/v1/chat/completions/render` and `/v1/completions/render` (vLLM's): the request checked and turned into token ids as it would be,
//! and not run, so that a router can tell by its prefix where it is cached. `/load` (vLLM's) and `/v1/loads` (SGLang's): figures of
//! now. Invariant: no figure tells one tenant's load from another's.

use std::fmt::Write;
use std::sync::Arc;

use axum::body::Body;
use axum::extract::State;
use axum::http::Response;
use serde_json::json;

use crate::arrival::{Arrival, JsonRequest};
use crate::endpoints::openai::chat;
use crate::endpoints::openai::completions;
use crate::engine::Served;
use crate::generation::Generator;
use crate::generation::input::InputProcessor;
use crate::generation::job::Job;
use crate::http::Shared;
use crate::http::pieces;
use crate::http::reply::{Reply, json_response};
use crate::load::Load;
use folio_api::{ApiError, unix_s};

type Prepare = fn(&InputProcessor, &Arrival) -> Result<Job, ApiError>;

/// `POST /v1/chat/completions/render`: one object.
pub async fn render_chat(State(generator): Shared<Generator>, request: JsonRequest) -> Reply {
    render(generator, request, chat::prepare, false).await
}

/// `POST /v1/completions/render`: a list, one for each prompt.
pub async fn render_completions(State(generator): Shared<Generator>, request: JsonRequest) -> Reply {
    render(generator, request, completions::prepare, true).await
}

async fn render(generator: Arc<Generator>, request: JsonRequest, prepare: Prepare, list: bool) -> Reply {
    let inputs = generator.inputs.clone();
    let arrival = Arrival::new(request);
    let (gate, id) = (arrival.tenant.gate.clone(), arrival.id.clone());
    let (tenant, bytes) = (arrival.tenant.id, arrival.body.len());
    let read = generator.load.off_thread(tenant, bytes, move || {
        let job = prepare(&inputs, &arrival)?;
        let prompts = job.prompts.into_iter().map(|prompt| (prompt.tokens, prompt.params.max_tokens));
        Ok(prompts.collect::<Vec<_>>())
    });
    let prompts = read.await?;
    let mut held = generator.load.unread.hold(&gate);
    held.grow(prompts.iter().map(|(tokens, _)| size_of_val(&**tokens)).sum())?;
    let described = json!({"request_id": id, "model": generator.served.name(), "features": null}).to_string();
    // Of which prompt, and which of its ids: `None` before the first.
    let (mut prompt, mut at) = (0, None);
    Ok(pieces::json(move |out| {
        // Held until the last id was written.
        let _ = &held;
        let Some((tokens, max_tokens)) = prompts.get(prompt) else {
            let over = prompt == prompts.len();
            prompt = usize::MAX;
            if over && list {
                out.push(']');
            }
            return over;
        };
        at = match at {
            None => {
                let before = if !list {
                    ""
                } else if prompt == 0 {
                    "["
                } else {
                    ","
                };
                let fields = described.trim_end_matches('}');
                let _ = write!(out, r#"{before}{fields},"max_tokens":{max_tokens},"token_ids":["#);
                Some(0)
            }
            Some(next) if next < tokens.len() => {
                let _ = write!(out, "{}{}", if next > 0 { "," } else { "" }, tokens[next]);
                Some(next + 1)
            }
            Some(_) => {
                out.push_str("]}");
                prompt += 1;
                None
            }
        };
        true
    }))
}

/// `GET /load`: generations between their arrival and their end.
pub async fn load(State(load): Shared<Load>) -> Response<Body> {
    json_response(json!({"server_load": load.in_flight.count()}).to_string())
}

/// `GET /v1/loads`: one entry, as there is one engine.
pub async fn loads(State(served): Shared<Served>) -> Response<Body> {
    let stats = served.engine.stats();
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
        "token_usage": cache.usage(),
        "gen_throughput": generated,
        "cache_hit_rate": ratio(cache.queries.hit_tokens as f64, cache.queries.tokens as f64),
        "utilization": cache.usage(),
    });
    json_response(json!({"timestamp": unix_s(), "dp_rank_count": 1, "loads": [load]}).to_string())
}
