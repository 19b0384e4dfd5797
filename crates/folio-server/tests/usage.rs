//! `GET /v1/usage` over the real engine: equal to the sums over the responses, and to nobody else's.

mod common;

use std::sync::Arc;
use std::time::Duration;

use common::{Client, VOCAB, app};
use folio_engine::{EngineHandle, EngineParts, ModelExecutor, SchedulerConfig, SystemClock};
use folio_kv::{CacheConfig, KvCache, default_policy};
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
    let mut cache = KvCache::new(geometry, default_policy(0.01));
    cache.set_quotas(&tenants.quotas(64)).unwrap();
    folio_engine::start(EngineParts {
        config,
        cache,
        executor: Box::new(ModelExecutor::new(Box::new(backend), VOCAB as usize, 64, 64)),
        clock: Arc::new(SystemClock::new()),
        vocab: VOCAB,
        tiers: Vec::new(),
        events: None,
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

const FILE: &str = r#"{"tenants": [{"name": "acme-secret", "keys": ["k1"]}, {"name": "ann", "keys": ["k2"], "group": "lab-secret"},
    {"name": "bob", "keys": ["k3"], "group": "lab-secret"}], "groups": [{"name": "lab-secret"}]}"#;

fn operators() -> Option<folio_server::AdminConfig> {
    Some(folio_server::AdminConfig { listen: ([127, 0, 0, 1], 0).into(), keys: vec!["op".into()] })
}

/// A server with those tenants and a key beside them, after a request of each.
async fn asked_by_all(tenant_metrics: bool) -> (Client, EngineHandle) {
    let engine = engine();
    let tenants = folio_server::Declared::parse(FILE, &|_| None).unwrap();
    let api_keys = vec!["k0".into()];
    let config = ServerConfig { tenants, api_keys, tenant_metrics, admin: operators(), ..Default::default() };
    let client = Client::with(config, app(Arc::new(engine.clone())));
    for (key, letter) in [("k0", "x"), ("k1", "y"), ("k1", "y"), ("k2", "z"), ("k3", "z")] {
        let reply = client.key(key).complete(json!({"prompt": letter.repeat(100), "max_tokens": 3})).await;
        assert_eq!(reply.status.as_u16(), 200);
    }
    while engine.stats().busy {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    (client, engine)
}

#[tokio::test]
async fn no_tenant_is_named_on_the_metrics_page_unasked() {
    let (client, engine) = asked_by_all(false).await;
    let page = client.get("/metrics").await.text;
    assert!(page.contains("folio:kv_cache_byte_seconds"));
    for name in ["acme-secret", "ann", "bob", "lab-secret", "key:1", "tenant"] {
        let named = page.lines().find(|line| !line.starts_with('#') && line.contains(&format!("\"{name}")));
        assert_eq!(named, None, "{name}");
    }
    assert!(!page.contains("folio:tenant_"));
    engine.stop();
}

#[tokio::test]
async fn metrics_by_tenant_are_what_usage_says() {
    let (client, engine) = asked_by_all(true).await;
    for stranger in [client.clone(), client.key("k1"), client.key("wrong")] {
        let page = stranger.get("/metrics").await.text;
        assert!(page.ends_with('\n') && page.contains("folio:kv_cache_byte_seconds"));
        assert!(!page.contains("folio:tenant_") && !page.contains("secret"), "names are for operators");
    }
    let tenants = client.clone();
    let client = client.key("op");
    let page = client.get("/metrics").await.text;
    for (key, name) in [("k0", "key:1"), ("k1", "acme-secret"), ("k2", "ann"), ("k3", "bob")] {
        let usage = tenants.key(key).get("/v1/usage").await.json();
        let tenant = format!("tenant=\"{name}\"");
        for (metric, label, field) in [
            ("folio:tenant_requests_total", "", "requests"),
            ("folio:tenant_prompt_tokens_total", "source=\"computed\"", "computed_tokens"),
            ("folio:tenant_prompt_tokens_total", "source=\"cached\"", "cached_tokens"),
            ("folio:tenant_generation_tokens_total", "", "completion_tokens"),
        ] {
            let value = client.metric(metric, &[&tenant, label]).await;
            assert_eq!(Some(value), usage[field].as_f64(), "{name} {metric} {label}");
        }
    }
    assert!(client.metric("folio:tenant_prompt_tokens_total", &["acme-secret", "\"cached\""]).await >= 96.0);
    let kv = client.key("k2").get("/v1/usage").await.json()["kv"].clone();
    let cached = client.metric("folio:tenant_kv_cache_bytes", &["group=\"lab-secret\"", "\"cached\""]).await;
    assert_eq!(Some(cached), kv["cached_bytes"].as_f64(), "memory is the group's");
    let of_member = |line: &&str| line.starts_with("folio:tenant_kv") && line.contains("\"ann\"");
    assert_eq!(page.lines().find(of_member), None, "and stands there once");
    let sum = |metric: &str| {
        let samples = page.lines().filter(|line| line.starts_with(metric));
        samples.map(|line| line.rsplit_once(' ').unwrap().1.parse::<f64>().unwrap()).sum::<f64>()
    };
    let (of_tenants, all) = (sum("folio:tenant_kv_cache_byte_seconds{"), sum("folio:kv_cache_byte_seconds{"));
    // Rendered one after the other: what is cached costs a little more each time.
    assert!(of_tenants > 0.0 && (of_tenants - all).abs() < 0.2 * all, "{of_tenants} of {all}");
    for doc in folio_server::tenant_metrics::documented() {
        assert!(
            page.contains(&format!("# HELP {} {}.\n# TYPE {} {}\n", doc.name, doc.help, doc.name, doc.kind))
        );
    }
    engine.stop();
}

/// A file's names cannot have them, but whoever builds a server from parts may.
#[tokio::test]
async fn quotes_and_newlines_in_a_name_are_escaped() {
    let engine = engine();
    let mut tenants = folio_server::Declared::parse(FILE, &|_| None).unwrap();
    tenants.tenants[0].name = "a\"b\\c\nd".into();
    let config = ServerConfig { tenants, tenant_metrics: true, admin: operators(), ..Default::default() };
    let client = Client::with(config, app(Arc::new(engine.clone()))).key("op");
    let page = client.get("/metrics").await.text;
    assert!(page.contains(r#"tenant="a\"b\\c\nd""#), "{page}");
    engine.stop();
}

#[tokio::test]
async fn a_server_without_keys_has_one_tenant() {
    let engine = engine();
    let config = ServerConfig { tenant_metrics: true, ..Default::default() };
    let client = Client::with(config, app(Arc::new(engine.clone())));
    client.complete(json!({"prompt": "x".repeat(40), "max_tokens": 1})).await;
    assert_eq!(client.metric("folio:tenant_requests_total", &["tenant=\"anonymous\""]).await, 1.0);
    engine.stop();
}
