//! `GET /v1/why` over the real engine: everybody's own figures and nobody else's, and all of the time.

mod common;

use std::sync::Arc;
use std::time::{Duration, Instant};

use common::{Client, FakeEngine, VOCAB, app};
use folio_engine::plan::ExecutorError;
use folio_engine::{
    EngineHandle, EngineParts, Executor, ModelExecutor, SchedulerConfig, StepOutput, StepPlan, SystemClock,
};
use folio_kv::{CacheConfig, KvCache, default_policy};
use folio_server::ServerConfig;
use folio_server::why::{Rates, Roofline, StepCosts, StepNeeds, StepShape, Targets, WhyConfig};
use folio_sim::SimBackend;
use serde_json::{Value, json};

fn engine() -> EngineHandle {
    engine_with(Duration::ZERO, SchedulerConfig::default().max_num_seqs)
}

/// A real executor, each step of which takes so much longer.
struct Slow(ModelExecutor, Duration);

impl Executor for Slow {
    fn begin(&mut self, plan: &StepPlan) -> Result<(), ExecutorError> {
        self.0.begin(plan)
    }

    fn finish(&mut self) -> Result<&StepOutput, ExecutorError> {
        std::thread::sleep(self.1);
        self.0.finish()
    }
}

fn engine_with(pause: Duration, max_num_seqs: u32) -> EngineHandle {
    let config = SchedulerConfig {
        max_model_len: 512,
        max_num_batched_tokens: 64,
        max_num_seqs,
        ..Default::default()
    };
    let backend = SimBackend::new(VOCAB as usize, 64, 16, 64, 64);
    let geometry = CacheConfig { blocks: 64, block_tokens: 16, bytes_per_block: 1 << 20 };
    folio_engine::start(EngineParts {
        config,
        cache: KvCache::new(geometry, default_policy(0.01)),
        executor: Box::new(Slow(ModelExecutor::new(Box::new(backend), VOCAB as usize, 64, 64), pause)),
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
    // The engine's time begins between these.
    let before = Instant::now();
    let engine = engine();
    let begun = Instant::now();
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
    let asked = Instant::now();
    let why = client.get("/v1/why").await.json();
    let answered = Instant::now();
    assert_eq!((&why["object"], &why["of"]), (&json!("why"), &json!("machine")));
    let cost = |path: &str| number(&why, &format!("/cost/{path}"));
    let parts = cost("seconds") + cost("unattributed_s") + cost("waiting_s") + cost("idle_s");
    let passed = number(&why, "/time/counted_s");
    assert!((parts - passed).abs() < 0.01 * passed, "{parts} of {passed}: {why:#}");
    // And by another clock, which cannot be more exact than when it was asked.
    let [least, most] = [asked - begun, answered - before].map(|of| of.as_secs_f64());
    for told in [parts, number(&why, "/window_s")] {
        let is_within = told > 0.99 * least - 0.01 && told < 1.01 * most + 0.01;
        assert!(is_within, "{told} s of {least} to {most}: {why:#}");
    }
    assert!(cost("untold_s").abs() < 0.01 * cost("steps_s"), "everything was told");
    let shares: f64 = ["prefill", "decode", "mixed", "waiting", "idle"]
        .iter()
        .map(|kind| number(&why, &format!("/time/{kind}")))
        .sum();
    assert!((shares - 1.0).abs() < 1e-9);
    // A second costs one.
    assert!((cost("price") - cost("seconds")).abs() < 1e-9);
    let tokens = cost("computed_tokens") * cost("per_million_computed")
        + cost("cached_tokens") * cost("per_million_cached")
        + cost("output_tokens") * cost("per_million_output");
    assert!(
        (tokens / 1e6 - cost("price")).abs() < 1e-6 * cost("price").max(1.0),
        "prices of tokens are the price"
    );
    assert_eq!(cost("output_tokens"), said);
    assert!(cost("cached_s") >= 0.0 && cost("cached_s") < cost("prompt_s"), "{why:#}");
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
    let reply = one.complete(json!({"prompt": "x".repeat(100), "max_tokens": 5, "ignore_eos": true})).await;
    let id = reply.headers["x-request-id"].to_str().unwrap().to_owned();
    two.complete(json!({"prompt": "y".repeat(60), "max_tokens": 3, "ignore_eos": true})).await;
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
    let rates = Rates {
        read_bytes_per_s: 1e12,
        weight_op_per_s: 1e12,
        attention_op_per_s: 1e12,
        copy_bytes_per_s: 1e12,
    };
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
    assert_eq!(advice[0]["costs"], json!({"text": "nothing"}), "it is the client's to change");
    assert!(number(&advice, "/0/evidence/tokens_behind") >= 176.0);
    assert!(!advice.to_string().contains("rest") && advice[0].get("gain").is_none(), "{advice}");
    assert_eq!(
        two.get("/v1/why").await.json()["advice"],
        json!([]),
        "whose prompts are alike is told nothing"
    );
    engine.stop();
}

/// Asks until it is so.
async fn until(client: &Client, is_so: impl Fn(&Value) -> bool) -> Value {
    let mut why = json!(null);
    for _ in 0..2000 {
        why = client.get("/v1/why").await.json();
        if is_so(&why) {
            return why;
        }
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    panic!("it never came to that: {why:#}");
}

#[tokio::test]
async fn who_is_in_time_and_how_many_a_second() {
    let engine = engine();
    let targets = Targets { chat: Duration::from_secs(3600), completion: Duration::ZERO };
    let why = WhyConfig { targets, ..WhyConfig::default() };
    let client = Client::with(ServerConfig { why, ..Default::default() }, app(Arc::new(engine.clone())));
    for turn in 0..3 {
        client.chat(json!({"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2, "ignore_eos": true})).await;
        let id = client
            .complete(json!({"prompt": "x".repeat(40 + turn), "max_tokens": 2, "ignore_eos": true}))
            .await;
        let id = id.headers["x-request-id"].to_str().unwrap().to_owned();
        let told = client.get(&format!("/v1/why?request={id}")).await.json();
        assert_eq!((&told["in_time"], number(&told, "/target_s")), (&json!(false), 0.0));
    }
    let why = client.get("/v1/why").await.json();
    let served = |name: &str| number(&why, &format!("/served/{name}"));
    assert_eq!((served("requests"), served("first_tokens"), served("in_time")), (6.0, 6.0, 3.0));
    assert_eq!(served("in_time_share"), 0.5);
    let window = number(&why, "/window_s");
    assert!((served("goodput_per_s") * window - 3.0).abs() < 1e-9, "{why:#}");
    assert!((served("output_tokens_per_s") * window - 12.0).abs() < 1e-9, "{why:#}");
    engine.stop();
}

#[tokio::test]
async fn without_targets_chats_have_half_a_second_and_completions_a_tenth() {
    let client = Client::new(FakeEngine::saying("hello"));
    let why = client.get("/v1/why").await.json();
    assert_eq!(why["served"]["targets"], json!({"chat_s": 0.5, "completion_s": 0.1}));
    let chat = client.chat(json!({"messages": [{"role": "user", "content": "hello"}]})).await;
    let completion = client.complete(json!({"prompt": "x"})).await;
    for (reply, wanted) in [(chat, 0.5), (completion, 0.1)] {
        let id = reply.headers["x-request-id"].to_str().unwrap().to_owned();
        let told = client.get(&format!("/v1/why?request={id}")).await.json();
        assert_eq!(number(&told, "/target_s"), wanted);
        let first = number(&told, "/time_to_first_token_s");
        assert_eq!(told["in_time"], json!(first <= wanted));
    }
    // What each tier has, by its name.
    let none = json!({
        "bytes": 0, "blocks": 0, "blocks_loaded": 0, "blocks_evicted": 0, "loaded_tokens": 0, "hit_share": null,
    });
    assert_eq!(why["cache"]["tiers"], json!({"disk": none}));
}

#[tokio::test]
async fn what_waits_what_is_unused_and_how_full_steps_are() {
    let engine = engine_with(Duration::from_millis(2), 1);
    let client = Client::with(ServerConfig::default(), app(Arc::new(engine.clone())));
    let ask = |letter: &str| {
        client.complete(json!({"prompt": letter.repeat(100), "max_tokens": 100, "ignore_eos": true}))
    };
    let looked = async {
        let why = until(&client, |why| number(why, "/queue/reasons/turn/now") == 2.0).await;
        assert_eq!((number(&why, "/queue/running"), number(&why, "/queue/waiting")), (1.0, 2.0));
        assert!(number(&why, "/queue/reasons/turn/mean") > 0.0, "{why:#}");
        // Of the last block's 16 slots one at least is used.
        let why = until(&client, |why| number(why, "/cache/waste") > 0.0).await;
        let (waste, active) = (number(&why, "/cache/waste"), number(&why, "/cache/bytes/active"));
        assert!(waste * active / f64::from(1 << 20) <= 15.0 / 16.0, "{why:#}");
        // Room for the longest sequence, of 256 tokens, in one piece would be 16 blocks.
        assert_eq!(number(&why, "/cache/contiguous/bytes"), 16.0 * f64::from(1 << 20));
        assert_eq!(number(&why, "/cache/contiguous/paged_bytes"), active);
    };
    tokio::join!(ask("x"), ask("y"), ask("z"), looked);
    idle(&engine).await;
    let why = client.get("/v1/why").await.json();
    let batch = |name: &str| number(&why, &format!("/batch/{name}"));
    let rows = batch("prompt_tokens") + batch("output_tokens");
    // The first token of an answer comes with its prompt.
    assert_eq!((batch("prompt_tokens"), batch("output_tokens")), (300.0, 297.0));
    assert!((batch("budget_used") - rows / batch("steps") / 64.0).abs() < 1e-9, "{why:#}");
    assert!((batch("tokens_per_step") - rows / batch("steps")).abs() < 1e-9, "{why:#}");
    assert_eq!((number(&why, "/cache/waste"), &why["cache"]["lifetime_s"]), (0.0, &json!(null)));
    engine.stop();
}

#[tokio::test]
async fn how_long_content_stays_and_what_larger_caches_would_hit() {
    let engine = engine();
    let client = Client::with(ServerConfig::default(), app(Arc::new(engine.clone())));
    // Twice the same nine prompts of 13 blocks; the cache has 64.
    for _ in 0..2 {
        for letter in "abcdefghi".chars() {
            client.complete(json!({"prompt": letter.to_string().repeat(208), "max_tokens": 1})).await;
        }
    }
    idle(&engine).await;
    let hits = "/cache/unbounded/hit_share";
    let why =
        until(&client, |why| why.pointer(hits).and_then(Value::as_f64).is_some_and(|share| share > 0.49))
            .await;
    let (evicted, cached) = (number(&why, "/cache/evicted_blocks"), number(&why, "/cache/bytes/cached"));
    let stays = cached / f64::from(1 << 20) * number(&why, "/window_s") / evicted;
    assert!(evicted > 0.0 && (number(&why, "/cache/lifetime_s") / stays - 1.0).abs() < 1e-9, "{why:#}");
    let unbounded = number(&why, hits);
    assert!(unbounded <= 0.5, "each was asked for twice: {why:#}");
    let by_memory = why["cache"]["unbounded"]["by_memory"].as_array().unwrap();
    let times: Vec<f64> = by_memory.iter().map(|of| number(of, "/times")).collect();
    let shares: Vec<f64> = by_memory.iter().map(|of| number(of, "/hit_share")).collect();
    assert_eq!(times, [1.0, 1.5, 2.0, 4.0, 8.0]);
    // All 117 blocks fit into twice the memory, and of the present the last ones are gone before they come again.
    assert!(shares.is_sorted() && shares[0] < 0.1, "{shares:?}");
    assert!((shares[2] - unbounded).abs() < 1e-6 && (shares[4] - unbounded).abs() < 1e-6, "{shares:?}");
    assert_eq!(number(&why, "/cache/unbounded/prompts_left_out"), 0.0);
    assert!(number(&why, "/cache/unbounded/found_share") < unbounded);
    engine.stop();
}

#[tokio::test]
async fn who_waits_for_room_is_told_apart() {
    let engine = engine_with(Duration::from_millis(2), 8);
    let client = Client::with(ServerConfig::default(), app(Arc::new(engine.clone())));
    // 13 blocks each to begin with, of 64.
    let ask = |letter: &str| {
        client.complete(json!({"prompt": letter.repeat(200), "max_tokens": 50, "ignore_eos": true}))
    };
    let looked = async {
        let why = until(&client, |why| number(why, "/queue/reasons/capacity/now") == 1.0).await;
        let capacity = |name: &str| number(&why, &format!("/queue/reasons/capacity/{name}"));
        assert!(capacity("mean") > 0.0 && capacity("began") >= 1.0, "{why:#}");
        assert_eq!(number(&why, "/queue/reasons/tier_load/began"), 0.0);
    };
    tokio::join!(ask("v"), ask("w"), ask("x"), ask("y"), ask("z"), looked);
    engine.stop();
}
