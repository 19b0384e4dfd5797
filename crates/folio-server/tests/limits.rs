//! Keys, scopes, limits per tenant, records of usage and the admin listener, over the real engine and over one that does what
//! it is told.

mod common;

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::http::Request as HttpRequest;
use common::{Client, FakeEngine, app, modelled, reply};
use folio_engine::SchedulerConfig;
use folio_engine::handle::Rejected;
use folio_server::keys::{self, NewKey, Scope};
use folio_server::{AdminConfig, Declared, Peer, Server, ServerConfig};
use serde_json::{Value, json};
use tower::ServiceExt;

fn declared(limits: Value) -> Declared {
    let file = json!({"tenants": [{"name": "acme", "keys": ["k"], "limits": limits}, {"name": "free", "keys": ["f"]}]});
    Declared::parse(&file.to_string(), &|_| None).unwrap()
}

fn limited(engine: Arc<FakeEngine>, limits: Value) -> Client {
    let config = ServerConfig { tenants: declared(limits), ..Default::default() };
    Client::with(config, app(engine))
}

fn engine() -> folio_engine::EngineHandle {
    modelled(
        SchedulerConfig { max_model_len: 256, max_num_batched_tokens: 64, ..Default::default() },
        64,
        1 << 20,
    )
}

fn make(path: &Path, tenant: &str, scopes: &[Scope]) -> (String, String) {
    let new = NewKey { tenant: tenant.into(), name: String::new(), scopes: scopes.into(), expires_s: None };
    let (record, key) = keys::create(path, new, folio_server::unix_s()).unwrap();
    (record.id, key)
}

#[tokio::test]
async fn a_flood_beyond_the_limit_waits_for_its_refusals_and_nobody_else_does() {
    let client = limited(FakeEngine::saying("ok"), json!({"requests_per_minute": 1}));
    let (flood, other) = (client.key("k"), client.key("f"));
    assert_eq!(flood.complete(json!({})).await.status.as_u16(), 200);
    // What waits for nothing is answered when it is looked at for the first time.
    let at_once = async || {
        let reply = tokio::time::timeout(Duration::ZERO, flood.complete(json!({}))).await;
        reply.is_ok_and(|reply| reply.status.as_u16() == 429)
    };
    let mut refused = 0;
    while at_once().await {
        refused += 1;
        assert!(refused < 60_000, "a client that comes again at once is told to without end");
    }
    assert!(refused >= 6000, "{refused}");
    assert_eq!(flood.complete(json!({})).await.status.as_u16(), 429, "it is told in its turn");
    assert_eq!(other.complete(json!({})).await.status.as_u16(), 200);
}

/// Whatever they are refused for, with a key or without; who is not refused is answered at once, from the same address.
#[tokio::test]
async fn a_flood_of_refused_requests_waits_for_its_answers_and_no_other_address_does() {
    let client = limited(FakeEngine::saying("ok"), json!({}));
    let send = async |client: &Client, from: [u8; 4], method, path: &str, body: &'static str| {
        let mut request = client.request(method, path, body);
        request.extensions_mut().insert(Peer((from, 1).into()));
        client.send(request).await.status().as_u16()
    };
    let (flood, other) = ([192, 0, 2, 1], [192, 0, 2, 2]);
    let (nobody, holder) = (client.key("none"), client.key("k"));
    let refused = [
        (&nobody, "POST", "/v1/completions", "{}", 401),
        (&holder, "GET", "/v1/nothing", "", 404),
        (&holder, "POST", "/v1/completions", "{", 400),
        (&holder, "DELETE", "/v1/completions", "", 405),
    ];
    // What waits for nothing is answered when it is looked at for the first time.
    let mut at_once = 0;
    'flood: loop {
        for (client, method, path, body, status) in refused {
            let reply = send(client, flood, method, path, body);
            match tokio::time::timeout(Duration::ZERO, reply).await {
                Ok(answered) => assert_eq!(answered, status, "{path}"),
                Err(_) => break 'flood,
            }
            at_once += 1;
            assert!(at_once < 60_000, "a client is refused at once without end");
        }
    }
    assert!(at_once >= 6000, "{at_once}");
    let now = async |client, from, path| {
        tokio::time::timeout(Duration::ZERO, send(client, from, "GET", path, "")).await.ok()
    };
    assert_eq!(now(&holder, flood, "/v1/models").await, Some(200), "what is not refused does not wait");
    // One in 1,024 shares the flood's bucket.
    let others = [other, [198, 51, 100, 7], [203, 0, 113, 9]];
    let mut answered = Vec::new();
    for from in others {
        answered.extend(now(&nobody, from, "/v1/models").await);
    }
    assert!(answered.len() >= 2 && answered.iter().all(|status| *status == 401), "{answered:?}");
    assert_eq!(send(&nobody, flood, "GET", "/v1/models", "").await, 401, "it is told in its turn");
}

#[tokio::test]
async fn requests_and_tokens_per_minute_are_a_tenants_own() {
    let engine = FakeEngine::saying("ok");
    let client = limited(engine.clone(), json!({"requests_per_minute": 3, "tokens_per_minute": 1000}));
    let (acme, free) = (client.key("k"), client.key("f"));
    for left in [2, 1] {
        let reply = acme.complete(json!({"max_tokens": 5})).await;
        assert_eq!(reply.status.as_u16(), 200, "{}", reply.text);
        assert_eq!(reply.headers["x-ratelimit-remaining-requests"], left.to_string());
        assert_eq!(reply.headers["x-ratelimit-limit-tokens"], "1000");
    }
    let large = acme.complete(json!({"max_tokens": 200, "n": 6})).await;
    assert_eq!(
        (large.status.as_u16(), large.error()["type"].as_str()),
        (429, Some("tokens")),
        "{}",
        large.text
    );
    assert_eq!(large.error()["code"], "rate_limit_exceeded");
    assert!(large.headers["retry-after"].to_str().unwrap().parse::<u32>().unwrap() >= 1);
    assert_eq!(
        acme.complete(json!({"max_tokens": 5})).await.status.as_u16(),
        200,
        "what was refused cost nothing"
    );
    let fourth = acme.complete(json!({"max_tokens": 5})).await;
    assert_eq!((fourth.status.as_u16(), fourth.error()["type"].as_str()), (429, Some("requests")));
    for _ in 0..5 {
        let reply = free.complete(json!({"max_tokens": 5})).await;
        assert_eq!((reply.status.as_u16(), reply.headers.get("x-ratelimit-limit-tokens")), (200, None));
    }
    assert_eq!(acme.get("/v1/models").await.status.as_u16(), 200, "what computes nothing is not limited");
    // Used: three answers of "hi" + "ok" and an end.
    let usage = acme.get("/v1/usage").await.json();
    let left = fourth.headers["x-ratelimit-remaining-tokens"].to_str().unwrap().parse::<u64>().unwrap();
    assert!(left.abs_diff(1000 - usage["total_tokens"].as_u64().unwrap()) <= 20, "{left} {usage}");
}

#[tokio::test]
async fn running_and_waiting_requests_are_limited_until_they_end() {
    let engine = FakeEngine::saying("ok");
    engine.plan(|plan| plan.manual = true);
    let client =
        limited(engine.clone(), json!({"max_concurrent_requests": 2, "max_queued_requests": 1})).key("k");
    let ask = |client: &Client| {
        let client = client.clone();
        tokio::spawn(async move { client.complete(json!({"max_tokens": 5})).await })
    };
    let settle = async || {
        for _ in 0..50 {
            tokio::task::yield_now().await;
            tokio::time::sleep(std::time::Duration::from_millis(1)).await
        }
    };
    let first = ask(&client);
    settle().await;
    let waiting = client.complete(json!({})).await;
    assert!(waiting.status.as_u16() == 429 && waiting.text.contains("waiting"), "{}", waiting.text);
    engine.step();
    settle().await;
    let second = ask(&client);
    settle().await;
    let running = client.complete(json!({})).await;
    assert!(running.status.as_u16() == 429 && running.text.contains("running"), "{}", running.text);
    while engine.live() > 0 {
        engine.step();
    }
    for reply in [first.await.unwrap(), second.await.unwrap()] {
        assert_eq!(reply.status.as_u16(), 200);
    }
    engine.plan(|plan| plan.manual = false);
    settle().await;
    assert_eq!(client.complete(json!({})).await.status.as_u16(), 200);
}

#[tokio::test]
async fn a_tenants_context_may_be_shorter_than_the_models() {
    let engine = FakeEngine::saying("ok");
    let client = limited(engine.clone(), json!({"max_context": 20})).key("k");
    let reply = client.complete(json!({"prompt": "x".repeat(15), "max_tokens": 6})).await;
    assert_eq!(
        (reply.status.as_u16(), reply.error()["code"].as_str()),
        (400, Some("context_length_exceeded"))
    );
    assert!(reply.text.contains("20 tokens"), "{}", reply.text);
    assert_eq!(client.complete(json!({"prompt": "x".repeat(20)})).await.status.as_u16(), 400);
    assert_eq!(client.chat(json!({})).await.status.as_u16(), 400, "the template alone is longer");
    assert_eq!(
        client.complete(json!({"prompt": "x".repeat(15), "max_tokens": 5})).await.status.as_u16(),
        200
    );
    let client = limited(engine.clone(), json!({"max_context": 100})).key("k");
    assert_eq!(client.chat(json!({})).await.status.as_u16(), 200);
    let request = engine.last();
    assert_eq!(
        request.sampling.max_tokens as usize,
        100 - request.prompt.len(),
        "an answer may fill the rest"
    );
}

#[tokio::test]
async fn a_request_orders_its_tenants_within_the_range_and_the_class_is_the_operators() {
    let file = json!({"tenants": [
        {"name": "acme", "keys": ["k"], "class": -3, "priority": {"min": -5, "max": 7}},
        {"name": "free", "keys": ["f"]}]});
    let tenants = Declared::parse(&file.to_string(), &|_| None).unwrap();
    let engine = FakeEngine::saying("ok");
    let client = Client::with(ServerConfig { tenants, ..Default::default() }, app(engine.clone()));
    let (acme, free) = (client.key("k"), client.key("f"));
    let sent = |engine: &FakeEngine| (engine.last().class, engine.last().priority);
    for priority in [-5, 0, 7] {
        assert_eq!(acme.complete(json!({"priority": priority})).await.status, 200);
        assert_eq!(sent(&engine), (-3, priority));
    }
    let embed = json!({"input": "hi", "priority": 8});
    let refused = [
        acme.complete(json!({"priority": -6})).await,
        acme.chat(json!({"priority": 8})).await,
        acme.post("/v1/embeddings", &embed).await,
    ];
    for reply in refused {
        assert_eq!((reply.status.as_u16(), reply.error()["param"].as_str()), (400, Some("priority")));
        assert!(reply.text.contains("between -5 and 7"), "{}", reply.text);
    }
    assert_eq!(free.complete(json!({"priority": -1_000_000})).await.status, 200);
    assert_eq!(sent(&engine), (0, -1_000_000));
    assert_eq!(
        free.complete(json!({"class": -9})).await.error()["param"],
        "class",
        "it is not the client's to choose"
    );
}

#[tokio::test]
async fn what_the_engine_refuses_costs_nothing() {
    let engine = FakeEngine::saying("ok");
    let client =
        limited(engine.clone(), json!({"requests_per_minute": 1, "tokens_per_minute": 100})).key("k");
    let refused = Rejected::QueueFull { queued_requests: 1, queued_tokens: 9, retry_after_s: 1 };
    engine.plan(|plan| plan.reject = Some(refused));
    assert_eq!(client.complete(json!({"max_tokens": 90})).await.error()["code"], "queue_full");
    let hashed = || engine.hashed.load(std::sync::atomic::Ordering::Relaxed);
    assert_eq!(hashed(), 0, "not even its hashes");
    assert_eq!(client.complete(json!({"max_tokens": 90})).await.status.as_u16(), 200);
    assert_eq!(hashed(), 1);
    assert_eq!(client.complete(json!({"max_tokens": 90})).await.status.as_u16(), 429);
    assert_eq!(hashed(), 1, "what the key's limits refuse costs no hashes either");
}

#[tokio::test]
async fn scopes_say_what_a_key_opens_and_revoking_closes_it_at_once() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("keys.redb");
    let (id, all) = make(&path, "acme", &Scope::DEFAULT);
    let (_, usage) = make(&path, "acme", &[Scope::Usage]);
    let config = ServerConfig { key_file: Some(path.clone()), ..Default::default() };
    let client = Client::with(config, app(Arc::new(engine())));
    assert_eq!(client.get("/v1/models").await.status.as_u16(), 401);
    let (all, usage) = (client.key(&all), client.key(&usage));
    assert_eq!(all.complete(json!({"max_tokens": 2})).await.status.as_u16(), 200);
    assert_eq!(usage.get("/v1/usage").await.json()["requests"], 1, "two keys, one tenant");
    for path in ["/v1/models", "/v1/cache/prefixes"] {
        let reply = usage.get(path).await;
        assert_eq!(
            (reply.status.as_u16(), reply.error()["code"].as_str()),
            (403, Some("insufficient_scope")),
            "{path}"
        );
    }
    assert_eq!(usage.complete(json!({})).await.status.as_u16(), 403);
    keys::revoke(&path, &id, folio_server::unix_s()).unwrap();
    let reply = all.complete(json!({})).await;
    assert!(reply.status.as_u16() == 401 && reply.text.contains("revoked"), "{}", reply.text);
    assert_eq!(usage.get("/v1/usage").await.status.as_u16(), 200);
}

#[tokio::test]
async fn records_reconcile_with_responses_by_key_and_outlive_the_server() {
    let folder = tempfile::tempdir().unwrap();
    let (keys_path, usage_path) = (folder.path().join("keys.redb"), folder.path().join("usage.redb"));
    let (first_id, first) = make(&keys_path, "acme", &Scope::DEFAULT);
    let (second_id, second) = make(&keys_path, "acme", &Scope::DEFAULT);
    let (_, other) = make(&keys_path, "other", &Scope::DEFAULT);
    let config = || ServerConfig {
        key_file: Some(keys_path.clone()),
        usage_file: Some(usage_path.clone()),
        admin: Some(AdminConfig { listen: ([127, 0, 0, 1], 0).into(), keys: vec!["root".into()] }),
        ..Default::default()
    };
    let mut sums = std::collections::BTreeMap::<String, [u64; 4]>::new();
    let server = Server::new(config(), app(Arc::new(engine()))).unwrap();
    let admin = server.admin_router();
    let client = Client::of(server);
    for round in 0..4u64 {
        for (id, key) in [(&first_id, &first), (&second_id, &second), (&"other".to_owned(), &other)] {
            let prompt = "y".repeat(40);
            let reply =
                client.key(key).complete(json!({"prompt": prompt, "max_tokens": 3 + round, "n": 2})).await;
            let usage = reply.json()["usage"].clone();
            let sum = sums.entry(id.clone()).or_default();
            let cached = usage["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap_or(0);
            let new = [
                1,
                usage["prompt_tokens"].as_u64().unwrap(),
                cached,
                usage["completion_tokens"].as_u64().unwrap(),
            ];
            sum.iter_mut().zip(new).for_each(|(sum, new)| *sum += new);
        }
    }
    let check = async |client: &Client, from: &str| {
        let records = client.key(&first).get("/v1/usage/records?group_by=key,model").await.json();
        let rows = records["data"].as_array().unwrap().clone();
        assert_eq!(rows.len(), 2, "{from}: {records}");
        for row in rows {
            let names = ["requests", "prompt_tokens", "cached_tokens", "completion_tokens"];
            let row_sums = names.map(|name| row[name].as_u64().unwrap());
            assert_eq!(row_sums, sums[row["key"].as_str().unwrap()], "{from}");
            assert_eq!((row["tenant"].as_str(), row["model"].as_str()), (Some("acme"), Some("test-model")));
        }
        let csv = client.key(&first).get("/v1/usage/records?format=csv&group_by=").await;
        assert_eq!(csv.headers["content-type"], "text/csv; charset=utf-8");
        let line = csv.text.lines().nth(1).unwrap();
        let total = [&first_id, &second_id].map(|id| sums[id][3]).iter().sum::<u64>();
        assert!(line.contains(",acme,,,8,") && line.ends_with(&format!(",{total}")), "{}", csv.text);
    };
    check(&client, "counted").await;

    let ask = |path: &str, key: &str| {
        let request = HttpRequest::builder().uri(path).header("authorization", format!("Bearer {key}"));
        let (admin, request) = (admin.clone(), request.body(Body::empty()).unwrap());
        async move { reply(admin.oneshot(request).await.unwrap()).await }
    };
    let all = ask("/v1/usage/records?group_by=", "root").await.json();
    assert_eq!(all["data"].as_array().unwrap().len(), 2, "every tenant, for the operator: {all}");
    assert_eq!(ask("/v1/usage/records", &first).await.status.as_u16(), 403, "a tenant is no operator");
    assert_eq!(ask("/v1/usage/records", "guess").await.status.as_u16(), 401);
    assert_eq!(client.key("root").get("/v1/models").await.status.as_u16(), 401, "an operator is no tenant");
    assert_eq!(client.key(&first).get("/v1/usage/records?limit=3").await.error()["param"], "limit");

    // The server ends in order and another one begins.
    let server = Server::new(ServerConfig { usage_file: None, ..config() }, app(Arc::new(engine()))).unwrap();
    let before = Client::of(server).key(&first).get("/v1/usage/records").await.json();
    assert_eq!(before["data"], json!([]), "nothing is anywhere else");
    drop(admin);
    client.save_usage();
    drop(client);
    let server = Server::new(config(), app(Arc::new(engine()))).unwrap();
    check(&Client::of(server), "read again").await;
}

#[tokio::test]
async fn operators_reset_the_prefix_cache_and_tenants_cannot() {
    let config = |keys: &[&str]| ServerConfig {
        tenants: declared(json!({})),
        admin: Some(AdminConfig {
            listen: ([127, 0, 0, 1], 0).into(),
            keys: keys.iter().map(|key| key.to_string()).collect(),
        }),
        metrics_on_admin: true,
        ..Default::default()
    };
    let server = Server::new(config(&["root"]), app(Arc::new(engine()))).unwrap();
    let admin = server.admin_router();
    let client = Client::of(server);
    let ask = |method: &str, path: &str, key: Option<&str>| {
        let mut request = HttpRequest::builder().uri(path).method(method);
        if let Some(key) = key {
            request = request.header("x-api-key", key);
        }
        let (admin, request) = (admin.clone(), request.body(Body::empty()).unwrap());
        async move { reply(admin.oneshot(request).await.unwrap()).await }
    };
    let cached = async |key: &str| {
        let reply = client.key(key).complete(json!({"prompt": "z".repeat(64), "max_tokens": 2})).await;
        reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap()
    };
    assert_eq!((cached("k").await, cached("k").await), (0, 63));
    assert_eq!((cached("f").await, cached("f").await), (0, 63));
    for key in [None, Some("k"), Some("guess")] {
        assert_eq!(ask("POST", "/reset_prefix_cache", key).await.status.as_u16(), 401, "{key:?}");
    }
    let one = ask("POST", "/reset_prefix_cache?tenant=acme", Some("root")).await;
    assert!(one.json()["freed_blocks"].as_u64().unwrap() >= 4, "{}", one.text);
    assert_eq!((cached("k").await, cached("f").await), (0, 63), "only that tenant's");
    assert_eq!(ask("POST", "/reset_prefix_cache", Some("root")).await.status.as_u16(), 200);
    assert_eq!((cached("k").await, cached("f").await), (0, 0));
    let nobody = ask("POST", "/reset_prefix_cache?tenant=nobody", Some("root")).await;
    assert_eq!((nobody.status.as_u16(), nobody.error()["param"].as_str()), (400, Some("tenant")));
    assert_eq!(ask("GET", "/reset_prefix_cache", Some("root")).await.status.as_u16(), 405);
    assert_eq!(ask("GET", "/v1/models", Some("root")).await.status.as_u16(), 404);
    assert_eq!(client.key("k").post("/reset_prefix_cache", &json!({})).await.status.as_u16(), 404);

    // The metrics moved.
    assert_eq!(client.key("k").get("/metrics").await.status.as_u16(), 404);
    assert_eq!(ask("GET", "/metrics", None).await.status.as_u16(), 401);
    assert!(ask("GET", "/metrics", Some("root")).await.text.contains("vllm:prompt_tokens_total"));
    assert_eq!(ask("GET", "/health", None).await.status.as_u16(), 200);
    let twice = Server::new(config(&["k"]), app(Arc::new(engine()))).err().unwrap().to_string();
    assert!(twice.contains("admin key") && twice.contains("twice"), "{twice}");
}

#[tokio::test]
async fn the_audit_log_says_who_did_what_and_has_no_text_and_no_key() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("audit.jsonl");
    let config =
        ServerConfig { tenants: declared(json!({})), audit_file: Some(path.clone()), ..Default::default() };
    let client = Client::with(config, app(FakeEngine::saying("SECRETANSWER")));
    let reply = client
        .key("k")
        .complete(json!({"prompt": "SECRETPROMPT", "max_tokens": 30, "user": "SECRETUSER"}))
        .await;
    let id = reply.headers["x-request-id"].to_str().unwrap().to_owned();
    client.key("k").chat(json!({"stream": true, "max_tokens": 4})).await;
    client.key("SECRETKEY").complete(json!({})).await;
    client.key("k").complete(json!({"temperature": -1})).await;
    drop(client);
    // The log is written when the last who writes it is gone.
    let mut text = String::new();
    for _ in 0..500 {
        text = std::fs::read_to_string(&path).unwrap();
        if text.lines().count() >= 6 {
            break;
        }
        tokio::time::sleep(std::time::Duration::from_millis(10)).await;
    }
    assert!(!text.contains("SECRET"), "{text}");
    let lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let of = |event: &str| lines.iter().filter(|line| line["event"] == event).cloned().collect::<Vec<_>>();
    let (requests, generations) = (of("request"), of("generation"));
    assert_eq!((requests.len(), generations.len()), (4, 2), "{text}");
    let generation = generations.iter().find(|line| line["request_id"] == id.as_str()).unwrap();
    assert_eq!(generation["tenant"], "acme");
    assert_eq!(generation["key"], "acme:1");
    assert_eq!((&generation["prompt_tokens"], &generation["completion_tokens"]), (&json!(12), &json!(13)));
    assert_eq!(generation["finish_reasons"], json!(["stop"]));
    let statuses: Vec<_> =
        requests.iter().map(|line| (line["status"].as_u64().unwrap(), line["error"].clone())).collect();
    assert_eq!(statuses[2..], [(401, json!("invalid_api_key")), (400, json!("invalid_value"))]);
    assert_eq!(requests[2]["tenant"], Value::Null);
    assert_eq!(requests[0]["route"], "/v1/completions");
}
