//! Prefixes that an operator declares, over the real engine: every tenant finds them, and of each other nothing more.

mod common;

use std::sync::Arc;
use std::time::Duration;

use common::{Client, app};
use folio_engine::{EngineHandle, SchedulerConfig};
use folio_server::{Declared, Server, ServerConfig};
use serde_json::{Value, json};

fn engine() -> EngineHandle {
    let config = SchedulerConfig { max_model_len: 256, max_num_batched_tokens: 64, ..Default::default() };
    common::modelled(config, 64, 1024)
}

fn config(prefixes: Value) -> ServerConfig {
    let file = json!({
        "tenants": [{"name": "a", "keys": ["k1"]}, {"name": "b", "keys": ["k2"]}, {"name": "c", "keys": ["k3"]}],
        "prefixes": prefixes,
    });
    let tenants = Declared::parse(&file.to_string(), &|_| None).unwrap();
    ServerConfig { tenants, ..Default::default() }
}

/// A server that has computed what is declared.
async fn ready(engine: &EngineHandle, config: ServerConfig) -> Client {
    let server = Server::new(config, app(Arc::new(engine.clone()))).unwrap();
    server.compute_shared().await;
    Client::of(server)
}

async fn cached(client: &Client, key: &str, body: Value) -> u64 {
    let reply = client.key(key).complete(common::merged(json!({"max_tokens": 2}), body)).await;
    assert_eq!(reply.status.as_u16(), 200, "{}", reply.text);
    reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap()
}

fn declared() -> String {
    (0..100u8).map(|at| char::from(b'a' + at % 23)).collect()
}

#[tokio::test]
async fn every_tenant_finds_what_is_declared_and_nobody_what_another_appended() {
    let engine = engine();
    let client = ready(&engine, config(json!([{"name": "assistant", "prompt": declared()}]))).await;
    let shared = cached(&client, "k1", json!({"prompt": declared() + "?!?!?!?!?!"})).await;
    assert!((80..=100).contains(&shared) && shared.is_multiple_of(16), "whole blocks: {shared}");
    let secret = json!({"prompt": declared() + &"my own secret ".repeat(5)});
    let first = cached(&client, "k1", secret.clone()).await;
    assert!(first < shared + 16, "its own until here are a few tokens inside a block: {first}");
    assert_eq!(cached(&client, "k2", secret.clone()).await, shared, "what another appended is missed");
    assert!(cached(&client, "k1", secret).await > shared + 32, "the control: it is there");
    // Inside the first block behind the declared part, too.
    let probe = json!({"prompt": declared() + "my own sXXX"});
    assert_eq!(cached(&client, "k3", probe.clone()).await, shared);
    assert!(cached(&client, "k1", probe).await > shared, "the control");
    assert_eq!(cached(&client, "k3", json!({"prompt": "z".repeat(100)})).await, 0);
    engine.stop();
}

#[tokio::test]
async fn a_conversation_may_be_declared() {
    let engine = engine();
    let system = json!({"role": "system", "content": declared()});
    let client = ready(&engine, config(json!([{"name": "chat", "messages": [system]}]))).await;
    for key in ["k1", "k2"] {
        let user = json!({"role": "user", "content": format!("hello from {key}")});
        let body = json!({"model": "test-model", "messages": [system, user], "max_tokens": 2});
        let reply = client.key(key).post("/v1/chat/completions", &body).await.json();
        let cached = reply["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap();
        assert!(cached >= 80, "{key}: {reply}");
    }
    engine.stop();
}

/// Pinned, it survives whatever tenants do; and no tenant can list or drop it.
#[tokio::test]
async fn it_stays_and_is_nobodys_to_drop() {
    let engine = engine();
    let client = ready(&engine, config(json!([{"name": "assistant", "prompt": declared()}]))).await;
    for round in 0..20u8 {
        let other: String =
            (0..200u8).map(|at| char::from(b'a' + (at.wrapping_mul(round + 3) ^ round) % 26)).collect();
        cached(&client, "k1", json!({"prompt": other})).await;
    }
    assert!(cached(&client, "k2", json!({"prompt": declared() + "?"})).await >= 80);
    let listed = client.key("k2").get("/v1/cache/prefixes").await.json();
    assert_eq!(listed["data"], json!([]), "it is the operator's");
    // A tenant that keeps the same text keeps its own copy of it.
    let body = json!({"prompt": declared(), "pin": true});
    let kept = client.key("k2").post("/v1/cache/prefixes", &body).await;
    assert_eq!(kept.status.as_u16(), 200, "{}", kept.text);
    engine.stop();
}

#[tokio::test]
async fn what_was_missed_is_computed_again() {
    let engine = engine();
    let mut config = config(json!([{"name": "assistant", "prompt": declared()}]));
    config.tenant_metrics = true;
    config.admin =
        Some(folio_server::AdminConfig { listen: ([127, 0, 0, 1], 0).into(), keys: vec!["op".into()] });
    // Nothing was computed yet: the first request misses, and has it computed for those to come.
    let client = Client::with(config, app(Arc::new(engine.clone())));
    assert_eq!(cached(&client, "k1", json!({"prompt": declared() + "1"})).await, 0);
    let mut tries = 0;
    let operator = client.key("op");
    while operator.metric("folio:tenant_kv_cache_bytes", &["prefix=\"assistant\"", "\"cached\""]).await == 0.0
    {
        tries += 1;
        assert!(tries < 1000, "nobody computed it");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    assert!(cached(&client, "k2", json!({"prompt": declared() + "2"})).await >= 80);
    engine.stop();
}

#[tokio::test]
async fn mistakes_are_named_with_their_prefix() {
    let engine = engine();
    for (prefix, named) in [
        (json!({"name": "x"}), "messages"),
        (json!({"name": "x", "prompt": "short"}), "less than a block of 16"),
        (json!({"name": "x", "prompt": declared(), "pin": true}), "pin"),
        (json!({"name": "x", "prompt": "y".repeat(400)}), "context"),
        (json!({"name": "x", "token_ids": [4_000_000]}), "token_ids"),
    ] {
        let error = Server::new(config(json!([prefix])), app(Arc::new(engine.clone()))).err().unwrap();
        let error = error.to_string();
        assert!(error.contains("prefix \"x\"") && error.contains(named), "{named}: {error}");
    }
    engine.stop();
}
