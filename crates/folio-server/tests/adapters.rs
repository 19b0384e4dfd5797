//! Who may use which adapter: for everybody else there is none of this name, on every route.

mod common;

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use axum::body::Body;
use common::{Client, FakeEngine, Reply, app, app_with_adapters, modelled, reply};
use folio_engine::{Adapter, SchedulerConfig};
use folio_server::{Adapters, AdminConfig, App, Declared, Server, ServerConfig};
use serde_json::{Value, json};

/// Names of adapters, and one that nobody has, as long as the first.
const ADAPTERS: [&str; 3] = ["sql", "team-a", "public"];
const NIL: &str = "nil";

/// Of `acme`, which may use two of three; of `other`, which may use the third; of `none` and of `all`.
fn config() -> ServerConfig {
    let file = json!({"tenants": [
        {"name": "acme", "keys": ["acme"], "adapters": ["sql", "team-*"]},
        {"name": "other", "keys": ["other"]},
        {"name": "none", "keys": ["none"], "adapters": []},
        {"name": "all", "keys": ["all"], "adapters": ["*"]},
    ], "default_adapters": ["public"]});
    let admin = AdminConfig { listen: ([127, 0, 0, 1], 0).into(), keys: vec!["root".into()] };
    ServerConfig {
        tenants: Declared::parse(&file.to_string(), &|_| None).unwrap(),
        admin: Some(admin),
        ..Default::default()
    }
}

fn client() -> Client {
    Client::of(Server::new(config(), app_with_adapters(FakeEngine::saying("ok"), &ADAPTERS)).unwrap())
}

/// Every route whose body names a model, but the name, and whether something is computed.
fn bodies() -> Vec<(&'static str, Value, bool)> {
    let messages = json!([{"role": "user", "content": "hi"}]);
    vec![
        ("/v1/chat/completions", json!({"messages": messages}), true),
        ("/v1/chat/completions", json!({"messages": messages, "stream": true}), true),
        ("/v1/completions", json!({"prompt": "hi"}), true),
        ("/v1/responses", json!({"input": "hi"}), true),
        ("/v1/responses", json!({"input": "hi", "background": true}), true),
        ("/v1/messages", json!({"messages": messages, "max_tokens": 4}), true),
        ("/v1/embeddings", json!({"input": "hi"}), true),
        ("/api/chat", json!({"messages": messages, "stream": false}), true),
        ("/api/generate", json!({"prompt": "hi"}), true),
        ("/api/embed", json!({"input": "hi"}), true),
        ("/api/embeddings", json!({"prompt": "hi"}), true),
        ("/tokenize", json!({"prompt": "hi"}), false),
        ("/detokenize", json!({"tokens": [104]}), false),
    ]
}

/// With an id of its own, which some answers repeat.
async fn ask(client: &Client, method: &str, path: &str, body: String) -> Reply {
    let mut request = client.request(method, path, Body::from(body));
    request.headers_mut().insert("x-request-id", "mine".parse().unwrap());
    reply(client.send(request).await).await
}

async fn post(client: &Client, path: &str, body: &Value, model: &str) -> Reply {
    let body = common::merged(body.clone(), json!({"model": model}));
    ask(client, "POST", path, body.to_string()).await
}

/// What was answered about one name is what was answered about the other, but for the name.
fn same(found: &Reply, name: &str, nil: &Reply, what: &str) {
    assert_eq!((found.status, &found.headers), (nil.status, &nil.headers), "{what}");
    assert_eq!(found.text, nil.text.replace(NIL, name), "{what}");
}

fn names(list: &Value) -> Vec<&str> {
    list["data"].as_array().unwrap().iter().map(|model| model["id"].as_str().unwrap()).collect()
}

#[tokio::test]
async fn an_adapter_of_others_is_a_name_that_does_not_exist_on_every_route() {
    let engine = FakeEngine::saying("ok");
    let client = Client::of(Server::new(config(), app_with_adapters(engine.clone(), &ADAPTERS)).unwrap());
    let asked = || engine.requests.lock().unwrap().len();
    for (path, body, computes) in bodies() {
        for (key, model) in [("acme", "sql"), ("acme", "team-a"), ("other", "public"), ("all", "sql")] {
            let answer = post(&client.key(key), path, &body, model).await;
            assert_eq!(answer.status, 200, "{key} {model} {path}: {}", answer.text);
            assert!(!computes || engine.last().adapter.is_some(), "{path}");
        }
        let before = asked();
        for key in ["other", "none"] {
            let attacker = client.key(key);
            let nil = post(&attacker, path, &body, NIL).await;
            assert_eq!(nil.status, 404, "{path}: {}", nil.text);
            // As long as the other, so that no header differs either.
            same(&post(&attacker, path, &body, "sql").await, "sql", &nil, path);
            let longer = post(&attacker, path, &body, "team-a").await;
            assert_eq!((longer.status, longer.text), (nil.status, nil.text.replace(NIL, "team-a")), "{path}");
        }
        let latest = post(&client.key("none"), path, &body, "public:latest").await;
        assert_eq!(latest.status, 404, "{path}: {}", latest.text);
        assert_eq!(asked(), before, "{path}: the engine was asked");
    }
}

#[tokio::test]
async fn a_name_that_is_not_looked_at_is_not_told_either() {
    let client = client();
    let messages = json!({"messages": [{"role": "user", "content": "hi"}]});
    for (path, body) in [
        ("/v1/messages/count_tokens", &messages),
        ("/v1/chat/completions/render", &messages),
        ("/v1/completions/render", &json!({"prompt": "hi"})),
        ("/v1/cache/prefixes", &json!({"prompt": "hi"})),
        ("/api/show", &json!({})),
        ("/api/pull", &json!({"stream": false})),
    ] {
        let attacker = client.key("none");
        let nil = post(&attacker, path, body, NIL).await;
        same(&post(&attacker, path, body, "sql").await, "sql", &nil, path);
    }
    let refused = post(&client.key("acme"), "/v1/cache/prefixes", &json!({"prompt": "hi"}), "sql").await;
    assert_eq!(refused.status, 400, "there is one for its owner: {}", refused.text);
}

#[tokio::test]
async fn lists_have_the_adapters_that_there_are_for_who_asks() {
    let client = client();
    let own = ["test-model", "org/alias"];
    for (key, adapters) in [
        ("acme", &["sql", "team-a"][..]),
        ("other", &["public"]),
        ("none", &[]),
        ("all", &["public", "sql", "team-a"]),
    ] {
        let client = client.key(key);
        let list = client.get("/v1/models").await.json();
        assert_eq!(names(&list), [&own[..], adapters].concat(), "{key}");
        let nil = ask(&client, "GET", "/v1/models/nil", String::new()).await;
        assert_eq!(nil.status, 404);
        for name in ADAPTERS {
            let answer = ask(&client, "GET", &format!("/v1/models/{name}"), String::new()).await;
            match adapters.contains(&name) {
                true => assert_eq!((answer.status.as_u16(), &answer.json()["id"]), (200, &json!(name))),
                false => assert_eq!((answer.status, answer.text), (nil.status, nil.text.replace(NIL, name))),
            }
        }
        let tags = client.get("/api/tags").await.text;
        assert!(ADAPTERS.iter().all(|name| !tags.contains(name)), "{tags}");
    }
}

/// They may be those of requests of others.
#[tokio::test]
async fn names_of_adapters_on_the_metrics_page_are_for_operators() {
    let named = |page: &str| page.contains("\nvllm:lora_requests_info{");
    let client = client();
    for key in ["acme", "none", "wrong"] {
        let page = client.key(key).get("/metrics").await.text;
        assert!(!named(&page) && page.contains("vllm:num_requests_running"), "{page}");
    }
    assert!(named(&client.key("root").get("/metrics").await.text));
    assert!(named(&client.admin("root").get("/metrics").await.text));
    let open = Client::with(ServerConfig::default(), app_with_adapters(FakeEngine::saying(""), &ADAPTERS));
    assert!(named(&open.get("/metrics").await.text), "where nobody is told apart they are for all");
}

#[tokio::test]
async fn a_server_of_several_models_starts_none_for_an_adapter_of_others() {
    let client = Client::several_with_adapters(&config(), &ADAPTERS);
    for (path, body, _) in bodies().into_iter().filter(|(_, body, _)| body["background"].is_null()) {
        let attacker = client.key("none");
        let nil = post(&attacker, path, &body, NIL).await;
        assert_eq!(nil.status, 404, "{path}: {}", nil.text);
        same(&post(&attacker, path, &body, "sql").await, "sql", &nil, path);
        let started = post(&client.key("acme"), path, &body, "sql").await;
        assert!(started.status.is_server_error(), "{path}: {}", started.text);
    }
    for (key, adapters) in [("acme", &["sql", "team-a"][..]), ("none", &[])] {
        let client = client.key(key);
        let list = client.get("/v1/models").await.json();
        assert_eq!(names(&list), [&[common::SEVERAL][..], adapters].concat(), "{key}");
        for path in ["/v1/models/", "/v1/usage?model=", "/v1/why?model="] {
            let nil = ask(&client, "GET", &format!("{path}{NIL}"), String::new()).await;
            let found = ask(&client, "GET", &format!("{path}sql"), String::new()).await;
            let told = found.text == nil.text.replace(NIL, "sql");
            assert_eq!(told, adapters.is_empty(), "{path}: {}", found.text);
        }
    }
    let index = client.get("/").await.text;
    assert!(index.contains(common::SEVERAL) && ADAPTERS.iter().all(|name| !index.contains(name)), "{index}");
}

/// Weights that are not in memory are read again. Where that fails a request ends with what is wrong, which names neither a file nor a name that
/// others have for the same weights, and the adapter is there again when its file is.
#[tokio::test]
async fn a_request_whose_adapter_cannot_be_read_again_says_so() {
    let is_there = Arc::new(AtomicBool::new(true));
    let found = is_there.clone();
    let load = move |path: &Path| -> Result<Adapter, String> {
        let problem = || format!("{} is missing", path.display());
        found.load(Ordering::SeqCst).then(Adapter::default).ok_or_else(problem)
    };
    let adapters = Adapters::new(Box::new(load), Box::new(|_, _| ()), None);
    adapters.load_at_start("sql", Path::new("/secret")).unwrap();
    let config = SchedulerConfig { max_adapters: 1, ..Default::default() };
    let served = App { adapters: Arc::new(adapters), ..app(Arc::new(modelled(config, 64, 1))) };
    let client = Client::with(ServerConfig::default(), served);
    let body = json!({"model": "sql", "prompt": "hi", "max_tokens": 2});
    is_there.store(false, Ordering::SeqCst);
    let failed = client.post("/v1/completions", &body).await;
    assert_eq!(failed.status, 500, "{}", failed.text);
    assert!(failed.text.contains("cannot be read any more"), "{}", failed.text);
    assert!(!failed.text.contains("secret") && !failed.text.contains("sql"), "{}", failed.text);
    is_there.store(true, Ordering::SeqCst);
    assert_eq!(client.post("/v1/completions", &body).await.status, 200);
    for (name, labels, value) in [
        ("folio:adapter_loads_total", &["outcome=\"loaded\""][..], 1.0),
        ("folio:adapter_loads_total", &["outcome=\"failed\""], 1.0),
        ("folio:adapter_evictions_total", &[], 0.0),
        ("folio:adapters_resident", &[], 1.0),
        ("folio:adapter_bytes", &[], 0.0),
        ("folio:waits_total", &["reason=\"adapter\""], 2.0),
    ] {
        assert_eq!(client.metric(name, labels).await, value, "{name} {labels:?}");
    }
}

/// While weights are read nobody else waits, and who waits for them has its answer, though its adapter has no name any more.
#[tokio::test]
async fn a_request_that_waits_for_an_adapter_is_answered_when_that_is_unloaded() {
    let (entered, mut reads) = tokio::sync::mpsc::unbounded_channel();
    let (go, gate) = std::sync::mpsc::channel();
    let gate = Mutex::new(gate);
    let load = move |_: &Path| -> Result<Adapter, String> {
        entered.send(()).unwrap();
        gate.lock().unwrap().recv().map_err(|error| error.to_string())?;
        Ok(Adapter::default())
    };
    go.send(()).unwrap();
    let adapters = Arc::new(Adapters::new(Box::new(load), Box::new(|_, _| ()), Some("/".into())));
    adapters.load_at_start("sql", Path::new("/adapter")).unwrap();
    reads.recv().await.unwrap();
    let config = SchedulerConfig { max_adapters: 1, ..Default::default() };
    let served = App { adapters: adapters.clone(), ..app(Arc::new(modelled(config, 64, 1))) };
    let client = Client::with(ServerConfig::default(), served);
    let body = |model: &str| json!({"model": model, "prompt": "hi", "max_tokens": 2});
    let with_adapter = body("sql");
    let waits = client.post("/v1/completions", &with_adapter);
    let others = async {
        reads.recv().await.unwrap();
        assert_eq!(client.post("/v1/completions", &body("test-model")).await.status, 200);
        adapters.unload("sql").unwrap();
        assert_eq!(client.post("/v1/completions", &with_adapter).await.status, 404);
        go.send(()).unwrap();
    };
    let (answer, ()) = tokio::join!(waits, others);
    assert_eq!(answer.status, 200, "{}", answer.text);
}
