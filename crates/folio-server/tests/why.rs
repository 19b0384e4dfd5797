//! `GET /v1/why` over the real engine: everybody's own figures and nobody else's, and all of the time.

mod common;

use std::sync::Arc;
use std::time::Duration;

use common::{Client, VOCAB, app};
use folio_engine::{EngineHandle, EngineParts, ModelExecutor, SchedulerConfig, SystemClock};
use folio_kv::{CacheConfig, KvCache, default_policy};
use folio_server::ServerConfig;
use folio_server::why::{Rates, Roofline, StepCosts, StepNeeds, StepShape, WhyConfig};
use folio_sim::SimBackend;
use serde_json::{Value, json};

fn engine() -> EngineHandle {
    let config = SchedulerConfig { max_model_len: 512, max_num_batched_tokens: 64, ..Default::default() };
    let backend = SimBackend::new(VOCAB as usize, 64, 16, 64, 64);
    let geometry = CacheConfig { blocks: 64, block_tokens: 16, bytes_per_block: 1 << 20 };
    folio_engine::start(EngineParts {
        config,
        cache: KvCache::new(geometry, default_policy(0.01)),
        executor: Box::new(ModelExecutor::new(Box::new(backend), VOCAB as usize, 64, 64)),
        clock: Arc::new(SystemClock::new()),
        vocab: VOCAB,
        tiers: Vec::new(),
        events: None,
    })
    .unwrap()
}

async fn idle(engine: &EngineHandle) {
    for _ in 0..5000 {
        if !engine.stats().busy {
            return;
        }
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    panic!("the engine never fell idle");
}

fn number(of: &Value, path: &str) -> f64 {
    of.pointer(path).and_then(Value::as_f64).unwrap_or_else(|| panic!("{path} is no number: {of:#}"))
}

#[tokio::test]
async fn costs_add_up_to_the_time_that_passed() {
    let engine = engine();
    let why = WhyConfig { price_per_hour: Some(3600.0), ..WhyConfig::default() };
    let config = ServerConfig { why, ..Default::default() };
    let client = Client::with(config, app(Arc::new(engine.clone())));
    let mut said = 0.0;
    for round in 0..4 {
        let prompt = "x".repeat(100 + 40 * round);
        let reply = client.complete(json!({"prompt": prompt, "max_tokens": 10, "n": 2})).await;
        said += number(&reply.json(), "/usage/completion_tokens");
    }
    idle(&engine).await;
    let why = client.get("/v1/why").await.json();
    assert_eq!((&why["object"], &why["of"]), (&json!("why"), &json!("machine")));
    let cost = |path: &str| number(&why, &format!("/cost/{path}"));
    let parts = cost("seconds") + cost("unattributed_s") + cost("waiting_s") + cost("idle_s");
    let passed = number(&why, "/time/counted_s");
    assert!((parts - passed).abs() < 0.01 * passed, "{parts} of {passed}: {why:#}");
    assert!(cost("untold_s").abs() < 0.01 * cost("steps_s"), "everything was told");
    let shares: f64 = ["prefill", "decode", "mixed", "waiting", "idle"]
        .iter()
        .map(|kind| number(&why, &format!("/time/{kind}")))
        .sum();
    assert!((shares - 1.0).abs() < 1e-9);
    // A second costs one.
    assert!((cost("price") - cost("seconds")).abs() < 1e-9);
    let tokens = cost("computed_tokens") * cost("per_million_computed")
        + cost("output_tokens") * cost("per_million_output");
    assert!(
        (tokens / 1e6 - cost("price")).abs() < 1e-6 * cost("price").max(1.0),
        "prices of tokens are the price"
    );
    assert_eq!((cost("output_tokens"), cost("per_million_cached")), (said, 0.0));
    assert!(cost("cached_tokens") > 0.0 && cost("spared_by_cache_s") > 0.0);
    assert_eq!(number(&why, "/served/first_tokens"), 4.0);
    assert!(
        why["limits"]["why"].is_string() && why["limits"]["known"] == false,
        "no profile: {}",
        why["limits"]
    );
    assert_eq!(number(&why, "/batch/tokens_max"), 64.0);
    assert_eq!(why["advice"], json!([]), "there is no cause for any");
    engine.stop();
}

#[tokio::test]
async fn a_tenant_sees_its_own_and_operators_see_all() {
    let engine = engine();
    let admin = folio_server::AdminConfig { listen: ([127, 0, 0, 1], 0).into(), keys: vec!["op".into()] };
    let config =
        ServerConfig { api_keys: vec!["k1".into(), "k2".into()], admin: Some(admin), ..Default::default() };
    let client = Client::with(config, app(Arc::new(engine.clone())));
    let (one, two) = (client.key("k1"), client.key("k2"));
    assert_eq!(client.get("/v1/why").await.status.as_u16(), 401);
    let reply = one.complete(json!({"prompt": "x".repeat(100), "max_tokens": 5})).await;
    let id = reply.headers["x-request-id"].to_str().unwrap().to_owned();
    two.complete(json!({"prompt": "y".repeat(60), "max_tokens": 3})).await;
    idle(&engine).await;

    let own = one.get("/v1/why").await.json();
    assert_eq!(
        (&own["of"], number(&own, "/cost/output_tokens"), number(&own, "/served/requests")),
        (&json!("key:1"), 5.0, 1.0)
    );
    for of_all in ["time", "limits", "batch", "queue"] {
        assert!(own.get(of_all).is_none(), "{of_all} is of everybody");
    }
    assert!(!own.to_string().contains("key:2"), "{own}");
    assert_eq!(number(&two.get("/v1/why").await.json(), "/cost/output_tokens"), 3.0);

    let told = one.get(&format!("/v1/why?request={id}")).await.json();
    assert_eq!(
        (&told["id"], &told["state"], &told["kind"]),
        (&json!(id), &json!("length"), &json!("completion"))
    );
    assert_eq!((number(&told, "/prompt_tokens"), number(&told, "/output_tokens")), (100.0, 5.0));
    assert!(
        number(&told, "/compute/prompt_s") > 0.0 && number(&told, "/total_s") >= number(&told, "/decode_s")
    );
    assert!(number(&told, "/time_to_first_token_s") > 0.0);

    // Another's request is as unknown as none.
    let others = two.get(&format!("/v1/why?request={id}")).await;
    let none = two.get("/v1/why?request=nothing").await;
    let blind = |text: String| text.replace(&id, "").replace("nothing", "");
    assert_eq!((others.status.as_u16(), none.status.as_u16()), (404, 404));
    assert_eq!(blind(others.json().to_string()), blind(none.json().to_string()));

    let operator = client.admin("op");
    let all = operator.get("/v1/why").await.json();
    assert_eq!(number(&all, "/cost/tenants/key:1/output_tokens"), 5.0);
    assert_eq!(number(&all, "/cost/tenants/key:2/output_tokens"), 3.0);
    assert!(number(&all, "/cache/tenants/key:1/cached_bytes") > 0.0);
    assert_eq!(operator.get(&format!("/v1/why?request={id}")).await.json()["id"], json!(id));
    assert_eq!(client.admin("k1").get("/v1/why").await.status.as_u16(), 401);
    engine.stop();
}

#[tokio::test]
async fn what_cannot_be_asked_is_refused_and_floods_pass_the_tenants_limits() {
    let engine = engine();
    let file = r#"{"tenants": [{"name": "acme", "keys": ["k1"], "limits": {"max_concurrent_requests": 2}}]}"#;
    let tenants = folio_server::Declared::parse(file, &|_| None).unwrap();
    let client =
        Client::with(ServerConfig { tenants, ..Default::default() }, app(Arc::new(engine.clone()))).key("k1");
    for junk in
        ["?x=1", "?request=", "?request=a&request=b", "?request=a&tenant=b", "?%ff=1", "?request", "?=&="]
    {
        let reply = client.get(&format!("/v1/why{junk}")).await;
        assert_eq!(reply.status.as_u16(), 400, "{junk}: {}", reply.text);
    }
    assert_eq!(client.get("/v1/why?").await.status.as_u16(), 200);
    let long = "a".repeat(20_000);
    assert_eq!(client.get(&format!("/v1/why?request={long}")).await.status.as_u16(), 404);
    // Answers that are not read hold their places.
    let ask = || client.send(client.request("GET", "/v1/why", axum::body::Body::empty()));
    let unread = [ask().await, ask().await];
    assert!(unread.iter().all(|reply| reply.status().is_success()));
    assert_eq!(ask().await.status().as_u16(), 429, "a flood of questions stops at the tenant's limits");
    drop(unread);
    assert_eq!(ask().await.status().as_u16(), 200);
    engine.stop();
}

/// As fast as the machine: a millisecond for each step.
struct Costs;

impl StepCosts for Costs {
    fn demand(&self, step: &StepShape) -> StepNeeds {
        StepNeeds { bytes: 1e6 + step.kv_positions, weights: step.rows, attention: step.attention }
    }
}

#[tokio::test]
async fn with_a_profile_steps_are_told_as_shares_of_the_machines_limits() {
    let engine = engine();
    let rates = Rates { read_bytes_per_s: 1e12, weight_op_per_s: 1e12, attention_op_per_s: 1e12 };
    let why = WhyConfig { roofline: Ok(Roofline { costs: Arc::new(Costs), rates }), ..WhyConfig::default() };
    let client = Client::with(ServerConfig { why, ..Default::default() }, app(Arc::new(engine.clone())));
    client.complete(json!({"prompt": "x".repeat(100), "max_tokens": 20})).await;
    idle(&engine).await;
    let limits = client.get("/v1/why").await.json()["limits"].clone();
    let decode = |name: &str| number(&limits, &format!("/decode/{name}"));
    assert!(decode("bandwidth") > 0.0 && decode("bandwidth") > decode("arithmetic"), "{limits}");
    assert_eq!(limits["decode"]["limited_by"], "bandwidth");
    assert_eq!(number(&limits, "/machine/read_bytes_per_s"), 1e12);
    assert!(limits["mixed"].is_null(), "there was no such step");
    engine.stop();
}

#[tokio::test]
async fn a_client_that_breaks_its_own_prefix_is_told_where_and_nobody_is_told_what() {
    let engine = engine();
    let config = ServerConfig { api_keys: vec!["k1".into(), "k2".into()], ..Default::default() };
    let client = Client::with(config, app(Arc::new(engine.clone())));
    let (one, two) = (client.key("k1"), client.key("k2"));
    for turn in 0..8 {
        // A token a letter.
        let prompt = format!("{}{turn}{}", "s".repeat(37), "rest".repeat(50));
        one.complete(json!({"prompt": prompt, "max_tokens": 1})).await;
        two.complete(json!({"prompt": "t".repeat(200), "max_tokens": 1})).await;
    }
    idle(&engine).await;
    let mut advice = json!([]);
    for _ in 0..1000 {
        advice = one.get("/v1/why").await.json()["advice"].clone();
        if advice[0]["evidence"]["tokens_behind"].is_number() {
            break;
        }
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    assert_eq!(advice[0]["kind"], "broken_prefix", "{advice}");
    assert_eq!(advice[0]["evidence"]["position"], 37);
    assert!(number(&advice, "/0/evidence/tokens_behind") >= 176.0);
    assert!(!advice.to_string().contains("rest") && advice[0].get("gain").is_none(), "{advice}");
    assert_eq!(
        two.get("/v1/why").await.json()["advice"],
        json!([]),
        "whose prompts are alike is told nothing"
    );
    engine.stop();
}
