//! KV events, as an operator sees them: who listens, what a listener should know, and telling all of it again.
//!
//! Owns: three routes. Must never: list a block of a tenant that is not told.

use axum::body::Body;
use axum::extract::State;
use axum::http::{Response, StatusCode};
use folio_api::ApiError;
use folio_engine::{CacheCommand, CacheResponse, Medium, TierEvent};
use folio_events::{CacheNames, int_hash, medium_name};
use folio_kv::{BlockHash, CacheEvent, EventBatch};
use serde_json::{Value, json};

use crate::endpoints::prefixes::command;
use crate::engine::Served;
use crate::http::Shared;
use crate::http::reply::{Reply, json_response};
use crate::load::Load;
use crate::observability::Observability;
use crate::observability::kv_events::{Published, owners, told};
use crate::tenancy::Tenancy;
use crate::threads::{NOBODY, WorkLost};

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

/// `GET /kv_events/blocks`: what the engine and its tiers hold of those who are told, from themselves: what a subscriber should know when all that
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
    let (owners, feed) = (owners(&source.config, &tenancy.tenants), source.feed.clone());
    let list = move || list(&resident, &feed.resident(&owners()), &told, size).to_string();
    // Tiers read it from a disk.
    let written = load.files.finish(NOBODY, bytes, list).await;
    Ok(json_response(written.map_err(|WorkLost| unexpected())?))
}

fn unexpected() -> ApiError {
    ApiError::internal("the cache answered something else")
}

/// What the device holds, and what tiers do.
fn list(resident: &EventBatch, of_tiers: &[TierEvent], told: &CacheNames, block_tokens: u32) -> Value {
    let block = |medium, tenant, hash: &BlockHash, parent: Option<BlockHash>, tokens: &[u32]| {
        let name = told(tenant)?;
        Some(json!({
            "hash": int_hash(hash),
            "parent": parent.as_ref().map(int_hash),
            "medium": medium_name(medium),
            "tenant": &*name,
            "token_ids": tokens,
        }))
    };
    let stored = resident.events.iter().zip(resident.tokens.chunks_exact(block_tokens as usize));
    let device = stored.filter_map(|(event, tokens)| match event {
        CacheEvent::Stored { tenant, hash, parent } => block(Medium::Device, *tenant, hash, *parent, tokens),
        CacheEvent::Removed { .. } | CacheEvent::Cleared { .. } => None,
    });
    let tiers = of_tiers.iter().filter_map(|event| match event {
        TierEvent::Stored { medium, tenant, hash, parent, tokens } => {
            block(*medium, *tenant, hash, *parent, tokens)
        }
        TierEvent::Removed { .. } => None,
    });
    let data: Vec<Value> = device.chain(tiers).collect();
    json!({"object": "list", "block_size": block_tokens, "data": data})
}

/// `POST /kv_events/republish`: everybody is told that everything is cleared, and then all of it again.
pub(crate) async fn republish(State(observability): Shared<Observability>) -> Reply {
    published(&observability)?.events.republish();
    let mut answer: Response<Body> = json_response(json!({"object": "kv_events.republish"}).to_string());
    *answer.status_mut() = StatusCode::ACCEPTED;
    Ok(answer)
}
