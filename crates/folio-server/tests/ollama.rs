//! Ollama's API over the router: what its clients send, and what they get.

mod common;

use std::sync::Arc;

use axum::body::Body;
use common::{Client, FakeEngine, Reply, app, merged, modelled, reply, tool_app};
use folio_engine::SchedulerConfig;
use folio_server::{Declared, ServerConfig};
use serde_json::{Value, json};

fn client_of(engine: &Arc<FakeEngine>) -> Client {
    Client::with(ServerConfig::default(), tool_app(engine.clone(), 4096))
}

fn ask(more: Value) -> Value {
    merged(json!({"model": "test-model", "messages": [{"role": "user", "content": "Hi"}]}), more)
}

fn whole(more: Value) -> Value {
    merged(ask(more), json!({"stream": false}))
}

fn content(lines: &[Value]) -> String {
    lines.iter().filter_map(|line| line["message"]["content"].as_str()).collect()
}

/// What the engine was asked to go on with.
fn prompt(engine: &FakeEngine) -> String {
    engine.last().prompt.iter().map(|id| char::from_u32(*id).filter(|_| *id < 256).unwrap_or('$')).collect()
}

#[tokio::test]
async fn a_chat_is_lines_unless_told_otherwise() {
    let engine = FakeEngine::saying("Hello you");
    let client = client_of(&engine);
    let streamed = client.post("/api/chat", &ask(json!({"options": {"num_predict": 20, "seed": 3}}))).await;
    assert_eq!(streamed.status, 200, "{}", streamed.text);
    assert_eq!(streamed.headers["content-type"], "application/x-ndjson");
    let lines = streamed.lines();
    assert_eq!(content(&lines), "Hello you");
    let (end, before) = lines.split_last().unwrap();
    assert!(before.iter().all(|line| line["done"] == false) && end["done"] == true, "{lines:?}");
    let answer = client.post("/api/chat", &whole(json!({"options": {"num_predict": 20, "seed": 3}}))).await;
    assert_eq!(answer.headers["content-type"], "application/json");
    let answer = answer.json();
    assert_eq!(answer["message"], json!({"role": "assistant", "content": "Hello you"}));
    for name in ["done_reason", "prompt_eval_count", "eval_count", "model"] {
        assert_eq!(answer[name], end[name], "{name}");
    }
    assert_eq!((&answer["eval_count"], &answer["done_reason"]), (&json!(10), &json!("stop")));
    assert_eq!(answer["prompt_eval_count"], engine.last().prompt.len());
    for one in [&answer, end] {
        let ns = |name: &str| one[name].as_u64().unwrap();
        assert!(ns("total_duration") >= ns("prompt_eval_duration") + ns("eval_duration"), "{one}");
        assert!(ns("prompt_eval_duration") > 0);
    }
    let asked = &engine.last().sampling;
    assert_eq!((asked.max_tokens, asked.seed), (20, 3));
    let short = client.post("/api/chat", &whole(json!({"options": {"num_predict": 4}}))).await.json();
    assert_eq!((&short["message"]["content"], &short["done_reason"]), (&json!("Hell"), &json!("length")));
}

#[tokio::test]
async fn names_with_a_tag_are_the_models() {
    let client = client_of(&FakeEngine::saying("ok"));
    for name in ["test-model", "test-model:latest", "org/alias", "org/alias:latest"] {
        let reply = client.post("/api/chat", &whole(json!({"model": name}))).await;
        assert_eq!((reply.status.as_u16(), &reply.json()["model"]), (200, &json!("test-model")), "{name}");
    }
    for name in ["test-model:7b", "llama3.2"] {
        for (path, body) in [
            ("/api/chat", whole(json!({"model": name}))),
            ("/api/show", json!({"model": name})),
            ("/api/pull", json!({"name": name})),
        ] {
            let reply = client.post(path, &body).await;
            assert_eq!(reply.status, 404, "{path}: {}", reply.text);
            assert!(reply.json()["error"].as_str().unwrap().contains("test-model"), "{}", reply.text);
        }
    }
}

#[tokio::test]
async fn thinking_and_calls_are_told_apart() {
    let engine = FakeEngine::saying(
        "<think>hm</think>Ok.<tool_call>{\"name\": \"f\", \"arguments\": {\"a\": 1}}</tool_call>",
    );
    let client = client_of(&engine);
    let tools = json!([{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]);
    let lines = client.post("/api/chat", &ask(json!({"tools": tools}))).await.lines();
    let answer = client.post("/api/chat", &whole(json!({"tools": tools}))).await.json();
    let message = &answer["message"];
    assert_eq!((&message["thinking"], &message["content"]), (&json!("hm"), &json!("Ok.")));
    let function = json!({"index": 0, "name": "f", "arguments": {"a": 1}});
    assert_eq!(message["tool_calls"][0]["function"], function);
    let calls: Vec<&Value> =
        lines.iter().filter(|line| line["message"].get("tool_calls").is_some()).collect();
    assert_eq!((calls.len(), &calls[0]["message"]["tool_calls"][0]["function"]), (1, &function));
    assert_eq!(
        (&answer["done_reason"], &lines.last().unwrap()["done_reason"]),
        (&json!("stop"), &json!("stop"))
    );
    // The SDKs send back what they got, without its id.
    let mut said = message.clone();
    said["tool_calls"][0].as_object_mut().unwrap().remove("id");
    let messages =
        json!([{"role": "user", "content": "Hi"}, said, {"role": "tool", "content": "7", "tool_name": "f"}]);
    let again = client.post("/api/chat", &whole(json!({"messages": messages, "tools": tools}))).await;
    assert_eq!(again.status, 200, "{}", again.text);
    assert!(prompt(&engine).contains("[tool]7(call_0)"), "{}", prompt(&engine));
}

#[tokio::test]
async fn thinking_is_turned_off() {
    let engine = FakeEngine::saying("<think>hm</think>Ok.");
    let client = client_of(&engine);
    let answer = client.post("/api/chat", &whole(json!({"think": false}))).await.json();
    assert!(answer["message"].get("thinking").is_none(), "{answer}");
    for think in [json!(true), json!("low"), json!("max")] {
        let reply =
            client.post("/api/generate", &json!({"prompt": "Hi", "think": think, "stream": false})).await;
        assert_eq!((reply.status.as_u16(), &reply.json()["thinking"]), (200, &json!("hm")), "{}", reply.text);
    }
}

#[tokio::test]
async fn a_generation_goes_through_the_template_or_not() {
    let engine = FakeEngine::saying("Well");
    let client = Client::new(engine.clone());
    let ask = json!({"prompt": "Once", "system": "Be brief", "stream": false});
    let answer = client.post("/api/generate", &ask).await.json();
    assert_eq!((&answer["response"], &answer["done"]), (&json!("Well"), &json!(true)));
    assert!(answer.get("context").is_none() && answer.get("message").is_none());
    assert_eq!(prompt(&engine), "[system]Be brief$[user]Once$[assistant]");
    let lines = client.post("/api/generate", &json!({"prompt": "Once", "raw": true})).await.lines();
    assert_eq!(prompt(&engine), "Once");
    let said: String = lines.iter().filter_map(|line| line["response"].as_str()).collect();
    assert_eq!(said, "Well");
    // The assistant's own beginning is gone on with.
    let begun = json!([{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "So"}]);
    client.post("/api/chat", &json!({"messages": begun, "stream": false})).await;
    assert_eq!(prompt(&engine), "[user]Hi$[assistant]So");
}

#[tokio::test]
async fn who_asks_for_nothing_is_answered_without_the_engine() {
    let engine = FakeEngine::saying("ok");
    let client = Client::new(engine.clone());
    for (path, body) in [
        ("/api/generate", json!({"model": "test-model"})),
        ("/api/generate", json!({"model": "test-model", "prompt": "", "keep_alive": -1, "stream": false})),
        ("/api/chat", json!({"model": "test-model", "messages": [], "keep_alive": "1h30m"})),
        ("/api/chat", json!({"model": "test-model", "keep_alive": 0, "stream": false})),
    ] {
        let reply = client.post(path, &body).await;
        let told: Value = serde_json::from_str(&reply.text).unwrap_or_else(|_| panic!("{}", reply.text));
        assert_eq!((&told["done"], &told["done_reason"]), (&json!(true), &json!("load")), "{body}");
    }
    assert!(engine.requests.lock().unwrap().is_empty());
}

#[tokio::test]
async fn a_chat_that_is_too_long_is_refused_or_loses_its_oldest_turns() {
    let engine = FakeEngine::saying("ok");
    let client = Client::new(engine.clone());
    let turns: Vec<Value> = (0..40)
        .flat_map(|at| {
            [
                json!({"role": "user", "content": format!("question {at}")}),
                json!({"role": "assistant", "content": "yes"}),
            ]
        })
        .chain([json!({"role": "user", "content": "last"})])
        .collect();
    let ask = json!({"messages": turns, "stream": false, "options": {"num_predict": 5}});
    let refused = client.post("/api/chat", &ask).await;
    assert_eq!((refused.status.as_u16(), &refused.json()["code"]), (400, &json!("context_length_exceeded")));
    let cut = client.post("/api/chat", &merged(ask, json!({"truncate": true}))).await;
    assert_eq!(cut.status, 200, "{}", cut.text);
    let prompt = prompt(&engine);
    assert!(
        prompt.contains("last") && prompt.contains("question 39") && !prompt.contains("question 3$"),
        "{prompt}"
    );
}

#[tokio::test]
async fn errors_are_ollamas() {
    let engine = FakeEngine::saying("ok");
    let client =
        Client::with(ServerConfig { api_keys: vec!["k".into()], ..Default::default() }, app(engine.clone()));
    let told = |reply: &Reply| {
        let json = reply.json();
        assert!(json["error"].is_string(), "{}", reply.text);
        (reply.status.as_u16(), json)
    };
    let (status, _) = told(&client.post("/api/chat", &ask(json!({}))).await);
    assert_eq!(status, 401);
    let client = client.key("k");
    let (status, json) = told(&client.post("/api/chat", &ask(json!({"options": {"mirostat": 2}}))).await);
    assert_eq!(
        (status, &json["param"], &json["code"]),
        (400, &json!("options.mirostat"), &json!("unsupported_parameter"))
    );
    let create = client.post("/api/create", &json!({"model": "x"})).await;
    assert_eq!(told(&create).0, 404);
    assert_eq!(told(&client.get("/api/chat").await).0, 405);
    // Only an operator is told what to do instead.
    let deleted =
        reply(client.send(client.request("DELETE", "/api/delete", r#"{"model": "test-model"}"#)).await).await;
    let (status, json) = told(&deleted);
    assert_eq!((status, &json["code"]), (403, &json!("insufficient_scope")));
    // A stream that fails ends with a line that says so.
    engine.plan(|plan| plan.end = Some(folio_engine::FinishReason::Error));
    let lines = client.post("/api/chat", &ask(json!({}))).await.lines();
    let last = lines.last().unwrap();
    assert!(last["error"].is_string() && last.get("done").is_none(), "{last}");
}

#[tokio::test]
async fn curls_content_type_is_taken_but_not_from_another_site() {
    let client = Client::new(FakeEngine::saying("ok"));
    let send = async |path: &str, origin: Option<&str>| {
        let mut request = client.request("POST", path, Body::from(whole(json!({})).to_string()));
        request.headers_mut().insert("content-type", "application/x-www-form-urlencoded".parse().unwrap());
        if let Some(origin) = origin {
            request.headers_mut().insert("origin", origin.parse().unwrap());
        }
        client.send(request).await.status().as_u16()
    };
    assert_eq!(send("/api/chat", None).await, 200);
    assert_eq!(send("/api/chat", Some("https://example.com")).await, 415);
    assert_eq!(send("/v1/chat/completions", None).await, 415);
}

#[tokio::test]
async fn the_served_model_is_listed_and_shown() {
    let client = client_of(&FakeEngine::saying("ok"));
    let head = |path: &str| client.request("HEAD", path, "");
    for path in ["/", "/api/version", "/api/tags"] {
        assert_eq!(client.send(head(path)).await.status(), 200, "{path}");
    }
    let tags = client.get("/api/tags").await.json();
    let names: Vec<&Value> = tags["models"].as_array().unwrap().iter().map(|model| &model["model"]).collect();
    assert_eq!(names, ["test-model:latest", "org/alias:latest"]);
    let model = &tags["models"][0];
    assert_eq!((&model["size"], &model["modified_at"]), (&json!(3_000_000), &json!("2023-11-14T22:13:20Z")));
    assert_eq!(model["digest"], "01".repeat(32));
    assert_eq!(
        (&model["details"]["family"], &model["details"]["parameter_size"]),
        (&json!("test"), &json!("1.50M"))
    );
    let running = client.get("/api/ps").await.json();
    assert_eq!(
        (&running["models"][0]["context_length"], &running["models"][0]["size_vram"]),
        (&json!(4096), &json!(0))
    );
    let shown = client.post("/api/show", &json!({"model": "test-model", "verbose": true})).await.json();
    assert_eq!(shown["capabilities"], json!(["completion", "tools", "thinking", "embedding"]));
    assert_eq!(
        (&shown["model_info"]["test.context_length"], &shown["model_info"]["general.parameter_count"]),
        (&json!(4096), &json!(1_500_000))
    );
    assert!(shown["template"].as_str().unwrap().contains("add_generation_prompt"));
    assert_eq!(shown["parameters"], format!("{:<30} 0.7\n{:<30} 11", "temperature", "top_k"));
    let version = client.get("/api/version").await.json();
    assert_eq!(version["version"].as_str().unwrap().split('.').count(), 3);
    for (stream, lines) in [(None, 2), (Some(true), 2), (Some(false), 1)] {
        let reply = client.post("/api/pull", &json!({"name": "test-model:latest", "stream": stream})).await;
        assert!(
            reply.text.lines().count() == lines && reply.text.contains(r#"{"status":"success"}"#),
            "{}",
            reply.text
        );
    }
    let other = client.post("/api/pull", &json!({"model": "llama3.2"})).await;
    assert!(other.status == 404 && other.text.contains("folio pull"), "{}", other.text);
}

#[tokio::test]
async fn vectors_are_those_of_embeddings() {
    let scheduler = SchedulerConfig { max_model_len: 256, max_num_batched_tokens: 64, ..Default::default() };
    let client = Client::new(Arc::new(modelled(scheduler, 64, 1 << 20)));
    let vectors = |list: &Value| -> Vec<Vec<f64>> { serde_json::from_value(list.clone()).unwrap() };
    let same = client.post("/v1/embeddings", &json!({"input": ["one", "two"]})).await.json();
    let same: Vec<Vec<f64>> = same["data"]
        .as_array()
        .unwrap()
        .iter()
        .map(|one| serde_json::from_value(one["embedding"].clone()).unwrap())
        .collect();
    let both = client
        .post(
            "/api/embed",
            &json!({"model": "test-model:latest", "input": ["one", "two"], "options": {"num_ctx": 64}}),
        )
        .await
        .json();
    assert_eq!(vectors(&both["embeddings"]), same);
    assert_eq!((&both["prompt_eval_count"], &both["model"]), (&json!(6), &json!("test-model")));
    assert!(both["total_duration"].as_u64().unwrap() > 0);
    let one = client.post("/api/embeddings", &json!({"prompt": "two"})).await.json();
    assert_eq!(one.as_object().unwrap().len(), 1);
    assert_eq!(vectors(&json!([one["embedding"]])), same[1..]);
    let short = client.post("/api/embed", &json!({"input": "one", "dimensions": 2})).await.json();
    assert_eq!(vectors(&short["embeddings"])[0].len(), 2);
    // What is too long loses its end, unless told otherwise.
    let long = "abcdefgh".repeat(64);
    let cut = client.post("/api/embed", &json!({"input": [&long, &long[..256]]})).await.json();
    let cut_vectors = vectors(&cut["embeddings"]);
    assert!(
        cut_vectors[0] == cut_vectors[1] && cut["prompt_eval_count"] == 512,
        "{}",
        cut["prompt_eval_count"]
    );
    let refused = client.post("/api/embed", &json!({"input": long, "truncate": false})).await;
    assert_eq!((refused.status.as_u16(), &refused.json()["code"]), (400, &json!("context_length_exceeded")));
    let empty = client.post("/api/embeddings", &json!({"prompt": ""})).await;
    assert_eq!((empty.status.as_u16(), &empty.json()["param"]), (400, &json!("prompt")));
}

#[tokio::test]
async fn a_tenants_limits_are_those_of_every_route() {
    let tenants = json!({"tenants": [{"name": "a", "keys": ["k"], "limits": {"requests_per_minute": 2}}]});
    let tenants = Declared::parse(&tenants.to_string(), &|_| None).unwrap();
    let config = ServerConfig { tenants, ..Default::default() };
    let client = Client::with(config, app(FakeEngine::saying("ok"))).key("k");
    for _ in 0..2 {
        let reply = client.post("/api/chat", &whole(json!({}))).await;
        assert_eq!(reply.status, 200, "{}", reply.text);
        assert!(reply.headers.contains_key("x-ratelimit-remaining-requests"));
    }
    let refused = client.post("/api/generate", &json!({"prompt": "Hi"})).await;
    assert_eq!(refused.status, 429);
    assert!(
        refused.json()["error"].is_string() && refused.headers.contains_key("retry-after"),
        "{}",
        refused.text
    );
}
