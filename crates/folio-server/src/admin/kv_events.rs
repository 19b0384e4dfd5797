//! KV events, as an operator sees them: who listens, what a listener should know, and telling all of it again.
//!
//! Owns: three routes. Must never: list a block of a tenant that is not told.

use axum::body::Body;
use axum::extract::State;
use axum::http::{Response, StatusCode};
use folio_api::ApiError;
use folio_engine::{CacheCommand, CacheResponse};
use folio_events::{MEDIUM, Told, int_hash};
use folio_kv::{CacheEvent, EventBatch};
use serde_json::{Value, json};

use crate::endpoints::prefixes::command;
use crate::engine::Served;
use crate::http::Shared;
use crate::http::reply::{Reply, json_response};
use crate::load::Load;
use crate::observability::Observability;
use crate::observability::kv_events::{Published, told};
use crate::tenancy::Tenancy;
use crate::threads::{Lost, NOBODY};

fn published(observability: &Observability) -> Result<&Published, ApiError> {
    let off =
        || ApiError::invalid("kv_events", "KV events are off: start the server with --kv-events-config.");
    observability.kv_events.as_ref().ok_or_else(off)
}

/// `GET /kv_events`: what is published, and who listens.
pub(crate) async fn show(State(observability): Shared<Observability>) -> Reply {
    let events = &published(&observability)?.events;
    let stats = events.stats();
    let subscribers: Vec<Value> = stats
        .subscribers
        .iter()
        .map(|of| {
            json!({
                "address": of.address.to_string(), "sent": of.sent, "dropped": of.dropped, "late": of.late,
            })
        })
        .collect();
    let answer = json!({
        "object": "kv_events",
        "endpoint": format!("tcp://{}", events.endpoint()),
        "replay_endpoint": events.replay_endpoint().map(|address| format!("tcp://{address}")),
        "oldest_message": stats.oldest_message,
        "next_message": stats.next_message,
        "subscribers": subscribers,
    });
    Ok(json_response(answer.to_string()))
}

/// `GET /kv_events/blocks`: what the engine holds of those who are told, from the engine itself: what a subscriber should know when all that
/// happened until now was told.
pub(crate) async fn blocks(
    State(observability): Shared<Observability>,
    State(tenancy): Shared<Tenancy>,
    State(served): Shared<Served>,
    State(load): Shared<Load>,
) -> Reply {
    let source = &published(&observability)?.source;
    let (told, size) = (told(&source.config, &tenancy.tenants), source.feed.block_tokens());
    let CacheResponse::Resident(resident) = command(&served, CacheCommand::Resident).await? else {
        return Err(unexpected().into());
    };
    let bytes = size_of_val(resident.tokens.as_slice());
    let written = load.text.finish(NOBODY, bytes, move || list(&resident, &told, size).to_string()).await;
    Ok(json_response(written.map_err(|Lost| unexpected())?))
}

fn unexpected() -> ApiError {
    ApiError::internal("the cache answered something else")
}

fn list(resident: &EventBatch, told: &Told, block_tokens: u32) -> Value {
    let stored = resident.events.iter().zip(resident.tokens.chunks_exact(block_tokens as usize));
    let block = |(event, tokens): (&CacheEvent, &[u32])| {
        let CacheEvent::Stored { tenant, hash, parent } = event else { return None };
        let name = told(*tenant)?;
        Some(json!({
            "hash": int_hash(hash),
            "parent": parent.as_ref().map(int_hash),
            "medium": MEDIUM,
            "tenant": &*name,
            "token_ids": tokens,
        }))
    };
    let data: Vec<Value> = stored.filter_map(block).collect();
    json!({"object": "list", "block_size": block_tokens, "data": data})
}

/// `POST /kv_events/republish`: everybody is told that everything is cleared, and then all of it again.
pub(crate) async fn republish(State(observability): Shared<Observability>) -> Reply {
    published(&observability)?.events.republish();
    let mut answer: Response<Body> = json_response(json!({"object": "kv_events.republish"}).to_string());
    *answer.status_mut() = StatusCode::ACCEPTED;
    Ok(answer)
}
