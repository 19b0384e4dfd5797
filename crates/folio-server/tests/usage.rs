//! `GET /v1/usage` over the real engine: equal to the sums over the responses, and to nobody else's.

mod common;

use std::sync::Arc;
use std::time::Duration;

use common::{Client, VOCAB, app};
use folio_engine::{EngineHandle, EngineParts, ModelExecutor, SchedulerConfig, SystemClock};
use folio_kv::{CacheConfig, KvCache, LruLeafFirst};
use folio_server::ServerConfig;
use folio_sim::SimBackend;
use serde_json::{Value, json};

const BYTES: u64 = 1 << 20;

fn engine() -> EngineHandle {
    engine_for(&folio_server::Declared::default())
}

fn engine_for(tenants: &folio_server::Declared) -> EngineHandle {
    let config = SchedulerConfig { max_model_len: 256, max_num_batched_tokens: 64, ..Default::default() };
    let backend = SimBackend::new(VOCAB as usize, 64, 16, 64, 64);
    let geometry = CacheConfig { blocks: 64, block_tokens: 16, bytes_per_block: BYTES };
    let mut cache = KvCache::new(geometry, Box::new(LruLeafFirst::default()));
    cache.set_quotas(&tenants.quotas(64)).unwrap();
    folio_engine::start(EngineParts {
        config,
        cache,
        executor: Box::new(ModelExecutor::new(Box::new(backend), VOCAB as usize, 64, 64)),
        clock: Arc::new(SystemClock::new()),
        vocab: VOCAB,
    })
    .unwrap()
}

/// Prompt, cached and generated tokens of a response.
fn add(total: &mut [u64; 3], usage: &Value) {
    total[0] += usage["prompt_tokens"].as_u64().unwrap();
    total[1] += usage["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap();
    total[2] += usage["completion_tokens"].as_u64().unwrap();
}

fn tokens(usage: &Value) -> [u64; 3] {
    ["prompt_tokens", "cached_tokens", "completion_tokens"].map(|name| usage[name].as_u64().unwrap())
}

#[tokio::test]
async fn usage_is_the_sum_of_the_tenants_own_responses() {
    let engine = engine();
    let config = ServerConfig { api_keys: vec!["k1".into(), "k2".into()], ..Default::default() };
    let client = Client::with(config, app(Arc::new(engine.clone())));
    let (one, two) = (client.key("k1"), client.key("k2"));
    assert_eq!(client.get("/v1/usage").await.status.as_u16(), 401, "usage is a tenant's own business");
    let before = one.get("/v1/usage").await.json();
    assert_eq!((tokens(&before), before["requests"].as_u64()), ([0; 3], Some(0)));
    assert_eq!(before["kv"]["active_byte_seconds"], 0.0);

    let mut total = [0; 3];
    let prompt = "x".repeat(100);
    for extra in
        [json!({"max_tokens": 4}), json!({"max_tokens": 7, "n": 2}), json!({"max_tokens": 0, "echo": true})]
    {
        let reply = one.complete(common::merged(json!({"prompt": prompt}), extra)).await;
        add(&mut total, &reply.json()["usage"]);
        assert_eq!(tokens(&one.get("/v1/usage").await.json()), total, "right after the response");
    }
    let stream =
        json!({"prompt": prompt, "stream": true, "stream_options": {"include_usage": true}, "max_tokens": 3});
    let events = one.complete(stream).await.events();
    let last = events.iter().rev().find(|event| event["usage"].is_object()).unwrap();
    add(&mut total, &last["usage"]);
    assert!(total[1] >= 3 * 96, "the prompt came from the cache");

    let usage = one.get("/v1/usage").await.json();
    assert_eq!(tokens(&usage), total);
    assert_eq!(usage["computed_tokens"].as_u64(), Some(total[0] - total[1]));
    assert_eq!(usage["requests"].as_u64(), Some(4));
    assert_eq!(tokens(&two.get("/v1/usage").await.json()), [0; 3], "and nobody else's");
    assert_eq!(client.metric("vllm:prompt_tokens_total", &[]).await, total[0] as f64);
    assert_eq!(client.metric("vllm:generation_tokens_total", &[]).await, total[2] as f64);

    let mut tries = 0;
    while engine.stats().busy {
        tries += 1;
        assert!(tries < 5000, "the engine never fell idle");
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    let kv = one.get("/v1/usage").await.json()["kv"].clone();
    tokio::time::sleep(Duration::from_millis(20)).await;
    let later = one.get("/v1/usage").await.json()["kv"].clone();
    let number = |kv: &Value, name: &str| kv[name].as_f64().unwrap();
    assert!(number(&kv, "active_byte_seconds") > 0.0);
    assert_eq!(kv["active_byte_seconds"], later["active_byte_seconds"], "nothing runs");
    assert_eq!(kv["active_bytes"], 0);
    let cached = number(&kv, "cached_bytes");
    assert!(cached >= (6 * BYTES) as f64, "the prompt's full blocks stay");
    let grown = number(&later, "cached_byte_seconds") - number(&kv, "cached_byte_seconds");
    assert!(grown >= 0.02 * cached, "what stays costs as time passes: {grown}");
    let total = client.metric("folio:kv_cache_byte_seconds", &["cached"]).await;
    assert!(total >= number(&later, "cached_byte_seconds"), "all tenants together");
    assert_eq!(number(&two.get("/v1/usage").await.json()["kv"], "cached_byte_seconds"), 0.0);
    engine.stop();
}

#[tokio::test]
async fn a_group_shares_what_it_caches_and_nobody_else_does() {
    let engine = engine();
    let file = r#"{"tenants": [{"name": "acme", "keys": ["k1"]}, {"name": "a", "keys": ["k2"], "group": "lab"},
        {"name": "b", "keys": ["k3"], "group": "lab"}], "groups": [{"name": "lab"}]}"#;
    let tenants = folio_server::Declared::parse(file, &|_| None).unwrap();
    let config = ServerConfig { tenants, ..Default::default() };
    let client = Client::with(config, app(Arc::new(engine.clone())));
    let prompt = "y".repeat(100);
    let cached = async |key: &str| {
        let reply = client.key(key).complete(json!({"prompt": prompt, "max_tokens": 2})).await;
        reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap()
    };
    assert_eq!(cached("k2").await, 0);
    assert!(cached("k3").await >= 96, "of one group");
    assert_eq!(cached("k1").await, 0, "not of the group");
    assert_eq!(client.complete(json!({"prompt": prompt})).await.status.as_u16(), 401, "keys are required");
    let usage = async |key: &str| client.key(key).get("/v1/usage").await.json();
    assert_eq!(usage("k2").await["cached_tokens"], 0, "tokens are each one's own");
    assert!(usage("k3").await["cached_tokens"].as_u64().unwrap() >= 96);
    let kv = usage("k3").await["kv"]["cached_bytes"].clone();
    assert_eq!(usage("k2").await["kv"]["cached_bytes"], kv, "memory is the group's");
    engine.stop();
}

#[tokio::test]
async fn a_guarantee_survives_a_flood_and_a_ceiling_is_one() {
    let file = r#"{"tenants": [{"name": "small", "keys": ["k1"], "guarantee": 8}, {"name": "loud", "keys": ["k2"], "ceiling": "50%"}]}"#;
    let tenants = folio_server::Declared::parse(file, &|_| None).unwrap();
    let engine = engine_for(&tenants);
    let config = ServerConfig { tenants, ..Default::default() };
    let client = Client::with(config, app(Arc::new(engine.clone())));
    let (small, loud) = (client.key("k1"), client.key("k2"));
    let prompt = "y".repeat(100);
    small.complete(json!({"prompt": prompt, "max_tokens": 2})).await;
    for round in 0..12 {
        let flood: String =
            (0..200u8).map(|at| char::from(b'a' + (at.wrapping_mul(round + 3) ^ round) % 26)).collect();
        let reply = loud.complete(json!({"prompt": flood, "max_tokens": 2})).await;
        assert_eq!(reply.status.as_u16(), 200);
        let held = loud.get("/v1/usage").await.json()["kv"].clone();
        let held = held["active_bytes"].as_u64().unwrap() + held["cached_bytes"].as_u64().unwrap();
        assert!(held <= 32 * BYTES, "half of 64 blocks, and {} are held", held / BYTES);
    }
    let again = small.complete(json!({"prompt": prompt, "max_tokens": 2})).await.json();
    assert!(again["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap() >= 96, "{again}");
    engine.stop();
}

#[tokio::test]
async fn what_can_never_fit_its_quota_is_413() {
    let file =
        r#"{"tenants": [{"name": "tiny", "keys": ["k1"], "ceiling": 4}, {"name": "other", "keys": ["k2"]}]}"#;
    let tenants = folio_server::Declared::parse(file, &|_| None).unwrap();
    let engine = engine_for(&tenants);
    let client = Client::with(ServerConfig { tenants, ..Default::default() }, app(Arc::new(engine.clone())));
    let body = json!({"prompt": "z".repeat(60), "max_tokens": 6});
    let refused = client.key("k1").complete(body.clone()).await;
    assert_eq!(refused.status.as_u16(), 413);
    assert_eq!(refused.error()["code"], "quota_exceeded");
    assert!(refused.error()["message"].as_str().unwrap().contains("64"), "names what the quota allows");
    assert_eq!(client.key("k2").complete(body).await.status.as_u16(), 200);
    let fits = json!({"prompt": "z".repeat(60), "max_tokens": 4});
    assert_eq!(client.key("k1").complete(fits).await.status.as_u16(), 200);
    engine.stop();
}
