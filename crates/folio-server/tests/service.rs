//! Everything around generating: limits, errors, keys, metrics, health, and the small routes.

mod common;

use axum::body::Body;
use axum::http::Request;
use common::{Client, FakeEngine, app, reply};
use folio_engine::handle::{Health, Rejected};
use folio_server::openapi::tables::ROUTES;
use folio_server::{Limits, RequestLimits, ServerConfig};
use serde_json::{Value, json};

#[tokio::test]
async fn every_error_has_openais_shape() {
    let client = Client::new(FakeEngine::saying("ok"));
    let chat = "/v1/chat/completions";
    let with_type = |value: &str| {
        Request::builder()
            .method("POST")
            .uri(chat)
            .header("content-type", value)
            .body(Body::from("{}"))
            .unwrap()
    };
    for (request, status, code) in [
        (client.request("GET", "/nowhere", ""), 404, json!("unknown_url")),
        (client.request("POST", "/v1/images/generations", "{}"), 404, json!("unknown_url")),
        (client.request("GET", chat, ""), 405, json!("method_not_allowed")),
        (client.request("DELETE", "/v1/models", ""), 405, json!("method_not_allowed")),
        (with_type("text/plain"), 415, Value::Null),
        (client.request("POST", chat, "{\n nope"), 400, Value::Null),
        (client.request("POST", chat, ""), 400, Value::Null),
        (client.request("POST", chat, vec![b'"', 0xff, b'"']), 400, Value::Null),
        (client.request("POST", chat, "[".repeat(100_000)), 400, json!("too_complex")),
        (client.request("POST", chat, "{}"), 400, json!("missing_required_parameter")),
        (
            client.request("POST", chat, r#"{"model": "gpt-9", "messages": []}"#),
            404,
            json!("model_not_found"),
        ),
        (client.request("GET", "/v1/models/gpt-9", ""), 404, json!("model_not_found")),
    ] {
        let what = format!("{} {}", request.method(), request.uri());
        let reply = reply(client.send(request).await).await;
        let error = reply.error();
        assert_eq!((reply.status.as_u16(), &error["code"]), (status, &code), "{what}: {}", reply.text);
        assert_eq!(reply.headers["content-type"], "application/json");
        assert!(reply.headers.contains_key("x-request-id"));
        assert!(error["message"].as_str().is_some_and(|message| !message.is_empty()));
        assert_eq!(
            error.as_object().unwrap().keys().collect::<Vec<_>>(),
            ["message", "type", "param", "code"]
        );
    }
    let reply = reply(client.send(client.request("POST", chat, "{\n nope")).await).await;
    assert!(reply.error()["message"].as_str().unwrap().contains("line 2 column"), "{}", reply.text);
    let charset = with_type("application/json; charset=utf-8");
    assert_eq!(client.send(charset).await.status(), 400, "read, and found to lack messages");
}

#[tokio::test]
async fn a_terminal_is_told_every_route() {
    let one = Client::new(FakeEngine::saying("ok"));
    for client in [one, Client::several(&ServerConfig::default())] {
        let page = client.get("/").await;
        assert!(page.status == 200 && page.text.contains("1.2.3"), "{}", page.text);
        let routes = page.text.split_once("Routes: ").unwrap().1.trim_end();
        let told: Vec<&str> = routes.split(", ").collect();
        for route in ROUTES {
            let route = format!("{} {}", route.method.to_uppercase(), route.path);
            assert!(told.contains(&&*route), "{route} is not told");
        }
        assert_eq!(told.len(), ROUTES.len());
    }
}

#[tokio::test]
async fn a_router_tells_how_it_does_itself() {
    let several = Client::several(&ServerConfig::default());
    assert_eq!(several.metric("folio:panics_total", &[]).await, 0.0);
    assert_eq!(several.metric("folio:event_loop_lag_seconds_count", &[]).await, 0.0);
}

#[tokio::test]
async fn request_ids_are_echoed_or_made() {
    let client = Client::new(FakeEngine::saying("ok"));
    let send = async |id: &str| {
        let mut request = client.request("GET", "/version", "");
        request.headers_mut().insert("x-request-id", id.parse().unwrap());
        client.send(request).await.headers()["x-request-id"].to_str().unwrap().to_owned()
    };
    assert_eq!(send("abc-1").await, "abc-1");
    assert_eq!(send("not usable").await.len(), 32);
    let reply = client.chat(json!({})).await;
    let id = reply.headers["x-request-id"].to_str().unwrap();
    assert_eq!(reply.json()["id"], format!("chatcmpl-{id}"));
}

#[tokio::test]
async fn sizes_are_limited() {
    let request = RequestLimits { messages: 3, prompts: 2, total_choices: 5, ..RequestLimits::default() };
    let limits = Limits { body_bytes: 1000, request, ..Limits::default() };
    let config = ServerConfig { limits, ..Default::default() };
    let client = Client::with(config, app(FakeEngine::saying("ok")));
    let big = json!({"prompt": "x".repeat(1000)}).to_string();
    let reply_big = reply(client.send(client.request("POST", "/v1/completions", big.clone())).await).await;
    assert_eq!((reply_big.status.as_u16(), &reply_big.error()["code"]), (413, &json!("request_too_large")));
    assert!(reply_big.error()["message"].as_str().unwrap().contains("1000"));
    let mut announced = client.request("POST", "/v1/completions", big);
    announced.headers_mut().insert("content-length", "99999999999".parse().unwrap());
    assert_eq!(client.send(announced).await.status(), 413);
    let message = json!({"role": "user", "content": "a"});
    let reply = client.chat(json!({"messages": [message, message, message, message]})).await;
    assert_eq!((reply.status.as_u16(), &reply.error()["param"]), (400, &json!("messages")));
    let reply = client.complete(json!({"prompt": ["a", "b"], "n": 3})).await;
    assert_eq!((reply.status.as_u16(), &reply.error()["param"]), (400, &json!("n")));
    let reply = client.complete(json!({"prompt": ["a", "b", "c"]})).await;
    assert_eq!((reply.status.as_u16(), &reply.error()["param"]), (400, &json!("prompt")));
}

#[tokio::test]
async fn prompts_longer_than_the_context_are_refused_with_numbers() {
    let engine = FakeEngine::saying("ok");
    let client = Client::new(engine.clone());
    for (extra, numbers) in [
        (json!({"prompt": "x".repeat(250)}), vec!["256", "250", "16"]),
        (json!({"prompt": "x".repeat(256), "max_tokens": 0}), vec!["256", "1"]),
        (json!({"prompt": vec![65; 300]}), vec!["256", "300"]),
        // Too long to be worth tokenizing.
        (json!({"prompt": "x".repeat(300_000)}), vec!["256", "300000"]),
    ] {
        let reply = client.complete(extra).await;
        let error = reply.error();
        assert_eq!((reply.status.as_u16(), &error["code"]), (400, &json!("context_length_exceeded")));
        assert_eq!(error["param"], "prompt");
        for number in numbers {
            assert!(error["message"].as_str().unwrap().contains(number), "{error}");
        }
    }
    assert_eq!(client.complete(json!({"prompt": "x".repeat(240)})).await.status, 200, "just fits");
    let reply = client.complete(json!({"prompt": "x".repeat(300_000), "truncate_prompt_tokens": -1})).await;
    assert_eq!(reply.status, 200);
    assert_eq!(engine.last().prompt.len(), 240);
    assert_eq!(client.complete(json!({"max_tokens": 256})).await.error()["param"], "max_tokens");
    let long = json!([{"role": "user", "content": "x".repeat(300)}]);
    assert_eq!(client.chat(json!({"messages": long})).await.error()["param"], "messages");
}

#[tokio::test]
async fn refusals_of_the_engine_in_http() {
    let engine = FakeEngine::saying("ok");
    let client = Client::new(engine.clone());
    let full = Rejected::QueueFull { queued_requests: 3, queued_tokens: 400, retry_after_s: 7 };
    for (rejected, status, retry_after) in [
        (full.clone(), 429, Some("7")),
        (Rejected::LargerThanCache { needed_tokens: 9, cache_tokens: 8 }, 400, None),
        (Rejected::Invalid { field: "n", reason: "odd".into() }, 400, None),
        (Rejected::ShuttingDown, 503, Some("5")),
        (Rejected::Unhealthy { reason: "broken".into() }, 503, Some("30")),
    ] {
        engine.plan(|plan| plan.reject = Some(rejected.clone()));
        let reply = client.chat(json!({"stream": true})).await;
        assert_eq!(reply.status, status, "{rejected:?}");
        assert_eq!(reply.headers.get("retry-after").map(|v| v.to_str().unwrap()), retry_after);
        assert!(reply.error()["message"].as_str().unwrap().contains(&rejected.to_string()));
    }
    assert_eq!(client.metric("vllm:admission_rejections_total", &["queue_full"]).await, 1.0);
    // Of two prompts the second is refused: neither runs.
    engine.plan(|plan| (plan.manual, plan.accept, plan.reject) = (true, 1, Some(full)));
    assert_eq!(client.complete(json!({"prompt": ["a", "b"]})).await.status, 429);
    assert_eq!(engine.live(), 1);
    engine.step();
    assert_eq!(engine.live(), 0);
}

#[tokio::test]
async fn keys_are_required_where_they_are_configured() {
    let config = || ServerConfig { api_keys: vec!["k1".into(), "k2".into()], ..Default::default() };
    let engine = FakeEngine::saying("ok");
    let client = Client::with(config(), app(engine.clone()));
    for path in ["/v1/models", "/v1/chat/completions", "/tokenize", "/nowhere"] {
        for client in [client.clone(), client.key("k3")] {
            let reply = client.get(path).await;
            assert_eq!(
                (reply.status.as_u16(), &reply.error()["code"]),
                (401, &json!("invalid_api_key")),
                "{path}"
            );
            assert_eq!(reply.headers["www-authenticate"], "Bearer");
        }
    }
    for path in ["/", "/health", "/metrics", "/version", "/ping"] {
        assert_eq!(client.get(path).await.status, 200, "{path} is open");
    }
    assert_eq!(client.key("k1").chat(json!({})).await.status, 200);
    let first = engine.last();
    assert_eq!(client.key("k2").chat(json!({})).await.status, 200);
    let second = engine.last();
    assert_ne!((first.tenant, first.root), (second.tenant, second.root));
    assert_eq!(client.key("k1").chat(json!({"user": "k2"})).await.status, 200);
    assert_eq!((engine.last().tenant, engine.last().root), (first.tenant, first.root));
    assert!(
        folio_server::Server::new(ServerConfig { api_keys: vec!["a b".into()], ..config() }, app(engine))
            .is_err()
    );
}

#[tokio::test]
async fn counters_equal_the_sums_over_responses() {
    let engine = FakeEngine::saying("some words. and more");
    engine.plan(|plan| plan.cached = 2);
    let client = Client::new(engine.clone());
    let (mut prompt, mut cached, mut completion) = (0, 0, 0);
    let (mut stop, mut length) = (0, 0);
    let mut requests = 0;
    for (n, extra) in [
        (1, json!({})),
        (3, json!({"max_tokens": 4})),
        (2, json!({"stop": "."})),
        (1, json!({"stop": ["and m"], "logprobs": 1})),
        (1, json!({"prompt": ["one", "two", "three"], "max_tokens": 7})),
        (1, json!({"max_tokens": 0})),
    ] {
        for stream in [false, true] {
            let mut extra = common::merged(extra.clone(), json!({"n": n}));
            if stream {
                extra["stream"] = true.into();
                extra["stream_options"] = json!({"include_usage": true});
            }
            let reply = client.complete(extra).await;
            requests += 1;
            let objects = if stream { reply.events() } else { vec![reply.json()] };
            for object in &objects {
                let usage = &object["usage"];
                prompt += usage["prompt_tokens"].as_u64().unwrap_or(0);
                completion += usage["completion_tokens"].as_u64().unwrap_or(0);
                cached += usage["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap_or(0);
                for choice in object["choices"].as_array().into_iter().flatten() {
                    stop += u32::from(choice["finish_reason"] == "stop");
                    length += u32::from(choice["finish_reason"] == "length");
                }
            }
        }
    }
    client.chat(json!({"oops": 1})).await;
    assert!(prompt > 0 && cached > 0 && completion > 0 && stop > 0 && length > 0);
    assert_eq!(
        client.metric("vllm:prompt_tokens_total", &["model_name=\"test-model\""]).await,
        prompt as f64
    );
    assert_eq!(client.metric("vllm:prompt_tokens_cached_total", &[]).await, cached as f64);
    assert_eq!(client.metric("vllm:generation_tokens_total", &[]).await, completion as f64);
    assert_eq!(client.metric("vllm:request_success_total", &["\"stop\""]).await, f64::from(stop));
    assert_eq!(client.metric("vllm:request_success_total", &["\"length\""]).await, f64::from(length));
    assert_eq!(client.metric("vllm:e2e_request_latency_seconds_count", &[]).await, f64::from(stop + length));
    assert_eq!(client.metric("vllm:request_generation_tokens_sum", &[]).await, completion as f64);
    assert_eq!(client.metric("vllm:request_prompt_tokens_sum", &[]).await, prompt as f64);
    let ok = ["/v1/completions", "\"200\"", "POST"];
    assert_eq!(client.metric("http_requests_total", &ok).await, f64::from(requests));
    assert_eq!(client.metric("http_requests_total", &["/v1/chat/completions", "\"400\""]).await, 1.0);
}

#[tokio::test]
async fn the_metrics_page_is_what_is_documented() {
    let engine = FakeEngine::saying("ok");
    let json = r#"{"enable_kv_cache_events": true, "tenants": "*", "endpoint": "tcp://127.0.0.1:0"}"#;
    let events = folio_events::KvEventsConfig::parse(Some(json), None).unwrap().unwrap();
    let feed = std::sync::Arc::new(folio_engine::EventFeed::new(1024, 16));
    let kv_events = Some(folio_events::EventSource { config: events, feed });
    let client = Client::with(ServerConfig { kv_events, ..ServerConfig::default() }, app(engine.clone()));
    client.chat(json!({"n": 2})).await;
    engine.plan(|plan| plan.reject = Some(Rejected::ShuttingDown));
    client.chat(json!({})).await;
    let page = client.get("/metrics").await;
    assert_eq!(page.headers["content-type"], "text/plain; version=0.0.4; charset=utf-8");
    let mut described: Vec<(String, String)> = Vec::new();
    for line in page.text.lines() {
        if let Some(rest) = line.strip_prefix("# TYPE ") {
            let (name, kind) = rest.split_once(' ').unwrap();
            described.push((name.into(), kind.into()));
        }
    }
    described.sort();
    let mut documented: Vec<(String, String)> =
        folio_server::metrics::documented().map(|d| (d.name.to_owned(), d.kind.to_owned())).collect();
    documented.sort();
    assert_eq!(described, documented);
    for doc in folio_server::metrics::documented() {
        let help = format!("# HELP {} {}.", doc.name, doc.help);
        assert!(page.text.contains(&help), "{help}");
        // "group where there are several" is a label that this engine, with one cache group, does not have.
        let always = doc.labels.split([',', ';']).map(str::trim).filter(|label| !label.contains(' '));
        for label in always.filter(|label| !label.is_empty()) {
            let sample = page.text.lines().find(|line| line.starts_with(doc.name)).unwrap();
            assert!(sample.contains(&format!("{label}=\"")), "{sample} has no {label}");
        }
        let samples = page.text.lines().filter(|line| line.starts_with(doc.name));
        assert!(samples.clone().count() > 0, "{}", doc.name);
        assert!(samples.clone().all(|line| line.contains("model_name=\"test-model\"")), "{}", doc.name);
    }
    assert!(!page.text.contains("# EOF"));
    let mut request = client.request("GET", "/metrics", "");
    request.headers_mut().insert("accept", "application/openmetrics-text".parse().unwrap());
    let page = reply(client.send(request).await).await;
    assert!(page.headers["content-type"].to_str().unwrap().starts_with("application/openmetrics-text"));
    assert!(page.text.ends_with("# EOF\n"));
}

#[tokio::test]
async fn health_is_forward_progress() {
    let engine = FakeEngine::saying("ok");
    let client = Client::new(engine.clone());
    assert_eq!(client.get("/health").await.status, 200);
    engine.plan(|plan| plan.health = Some(Health::Stalled { for_us: 61_000_000 }));
    let reply = client.get("/health").await;
    assert_eq!(reply.status, 503);
    assert!(reply.error()["message"].as_str().unwrap().contains("61 s"));
    engine.plan(|plan| plan.health = Some(Health::Unhealthy { reason: "NaN".into() }));
    let reply = client.get("/ping").await;
    assert_eq!(reply.status, 503);
    assert!(reply.error()["message"].as_str().unwrap().contains("NaN"), "{}", reply.text);
}

#[tokio::test]
async fn the_small_routes() {
    let client = Client::new(FakeEngine::saying("ok"));
    let models = client.get("/v1/models").await.json();
    assert_eq!(models["data"][0]["id"], "test-model");
    assert_eq!(models["data"][0]["max_model_len"], 256);
    assert_eq!(client.get("/v1/models/org/alias").await.json()["id"], "org/alias");
    assert_eq!(client.get("/version").await.json()["version"], "1.2.3");
    let ids = client.post("/tokenize", &json!({"prompt": "hi", "return_token_strs": true})).await.json();
    assert_eq!(
        ids,
        json!({"count": 2, "max_model_len": 256, "tokens": [104, 105], "token_strs": ["h", "i"]})
    );
    let chat =
        client.post("/tokenize", &json!({"messages": [{"role": "user", "content": "hi"}]})).await.json();
    assert_eq!(chat["count"], 20);
    let text = client.post("/detokenize", &json!({"tokens": [104, 105, 256]})).await.json();
    assert_eq!(text["prompt"], "hi<|end|>");
    let error = client.post("/detokenize", &json!({"tokens": [999]})).await;
    assert_eq!((error.status.as_u16(), &error.error()["param"]), (400, &json!("tokens")));
    let page = client.get("/").await;
    assert!(page.text.contains("curl http://127.0.0.1:8000/v1/chat/completions"), "{}", page.text);
    let mut request = client.request("GET", "/", "");
    request.headers_mut().insert("accept", "text/html".parse().unwrap());
    request.headers_mut().insert("host", "<script>".parse().unwrap());
    let page = reply(client.send(request).await).await;
    assert!(page.text.contains("<h1>Folio") && !page.text.contains("<script>"));
}

#[tokio::test]
async fn without_a_template_chat_is_refused_and_completions_work() {
    let app = folio_server::App { template: None, ..app(FakeEngine::saying("ok")) };
    let client = Client::with(ServerConfig::default(), app);
    let reply = client.chat(json!({})).await;
    assert_eq!((reply.status.as_u16(), &reply.error()["code"]), (400, &json!("no_chat_template")));
    assert_eq!(client.complete(json!({})).await.status, 200);
}

#[tokio::test]
async fn who_is_almost_there_is_told_the_way() {
    let client = Client::new(FakeEngine::saying("x"));
    for (method, path, hint) in [
        ("POST", "/chat/completions", "Did you mean POST /v1/chat/completions?"),
        ("POST", "/v1/chat/completions/", "Did you mean POST /v1/chat/completions?"),
        ("POST", "/v1/v1/messages", "Did you mean POST /v1/messages?"),
        ("GET", "/v1/health", "Did you mean GET /health?"),
        ("GET", "/nowhere", "See GET / for what is here."),
        ("GET", "/v1/completions", "use POST"),
    ] {
        let answer = reply(client.send(client.request(method, path, "{}")).await).await;
        let message = answer.error()["message"].as_str().unwrap().to_owned();
        assert!(message.contains(hint), "{method} {path}: {message}");
    }
}
