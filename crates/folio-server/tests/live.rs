//! The page at `/` and its figures (`GET /v1/why/live`): who is told what, how much that may take, and that nothing is done while nobody looks.

mod common;

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use axum::body::{Body, BodyDataStream};
use common::{Client, FakeEngine, app, modelled, reply};
use folio_engine::{EngineHandle, SchedulerConfig};
use folio_server::{AdminConfig, ServerConfig};
use futures_core::Stream;
use serde_json::{Value, json};

fn engine(blocks: u32) -> EngineHandle {
    let config = SchedulerConfig { max_model_len: 256, max_num_batched_tokens: 64, ..Default::default() };
    modelled(config, blocks, 1 << 20)
}

/// What a page reads.
struct Page {
    body: Pin<Box<BodyDataStream>>,
    text: String,
}

impl Page {
    async fn open(client: &Client) -> Self {
        let response = client.send(client.request("GET", "/v1/why/live", Body::empty())).await;
        assert_eq!(response.status().as_u16(), 200);
        assert_eq!(response.headers()["content-type"], "text/event-stream; charset=utf-8");
        Self { body: Box::pin(response.into_body().into_data_stream()), text: String::new() }
    }

    /// The next event of this name, and what came before it is gone.
    async fn next(&mut self, name: &str) -> Value {
        let wanted = format!("event: {name}\ndata: ");
        for _ in 0..400 {
            while let Some((event, rest)) = self.text.split_once("\n\n") {
                let found = event.strip_prefix(&wanted).map(|data| serde_json::from_str(data).expect("JSON"));
                self.text = rest.to_owned();
                if let Some(found) = found {
                    return found;
                }
            }
            let piece = std::future::poll_fn(|cx| self.body.as_mut().poll_next(cx));
            let piece = tokio::time::timeout(Duration::from_secs(30), piece).await.expect("it goes on");
            let piece = piece.expect("it does not end").expect("it is read");
            self.text.push_str(std::str::from_utf8(&piece).expect("text"));
        }
        panic!("no {name} came");
    }

    /// Reads what waits, to its end.
    async fn end(mut self) {
        let piece = async |body: &mut Pin<Box<BodyDataStream>>| {
            std::future::poll_fn(|cx| body.as_mut().poll_next(cx)).await
        };
        while tokio::time::timeout(Duration::from_secs(30), piece(&mut self.body))
            .await
            .expect("it ends")
            .is_some()
        {}
    }
}

async fn until(what: &str, mut is: impl AsyncFnMut() -> bool) {
    for _ in 0..600 {
        if is().await {
            return;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    panic!("it never happened: {what}");
}

async fn samples(client: &Client) -> f64 {
    client.metric("folio:page_samples_total", &[]).await
}

#[tokio::test]
async fn browsers_get_a_page_that_may_load_nothing_and_others_the_list_of_routes() {
    let client = Client::new(FakeEngine::saying(""));
    let get = async |accept: &'static str| {
        let mut request = client.request("GET", "/", Body::empty());
        request.headers_mut().insert("accept", accept.parse().unwrap());
        reply(client.send(request).await).await
    };
    let page = get("text/html,application/xhtml+xml,*/*;q=0.8").await;
    assert_eq!(page.headers["content-type"], "text/html; charset=utf-8");
    let policy = page.headers["content-security-policy"].to_str().unwrap();
    for part in [
        "default-src 'none'",
        "script-src 'sha256-",
        "style-src 'sha256-",
        "connect-src 'self'",
        "frame-ancestors 'none'",
    ] {
        assert!(policy.contains(part), "{policy}");
    }
    assert!(!policy.contains("unsafe") && !policy.contains('*'), "{policy}");
    assert_eq!(page.headers["x-content-type-options"], "nosniff");
    assert_eq!(page.headers["vary"], "accept");
    assert!(page.text.starts_with("<!doctype html>") && page.text.contains("Prefix tree by sizes"));
    for other in ["*/*", "application/json", "text/plain"] {
        let list = get(other).await;
        assert!(list.text.contains("POST /v1/chat/completions"), "{}", list.text);
        assert_eq!(
            (&list.headers["content-type"], &list.headers["vary"]),
            (&"text/plain; charset=utf-8".parse().unwrap(), &"accept".parse().unwrap())
        );
    }
}

#[tokio::test]
async fn with_keys_the_page_tells_nothing_and_its_figures_are_for_operators() {
    let file = r#"{"tenants": [{"name": "acme-of-the-file", "keys": ["k1"]}]}"#;
    let tenants = folio_server::Declared::parse(file, &|_| None).unwrap();
    let admin = AdminConfig { listen: ([127, 0, 0, 1], 0).into(), keys: vec!["op".into()] };
    let config = ServerConfig { tenants, admin: Some(admin), ..Default::default() };
    let engine = engine(64);
    let client = Client::with(config, app(Arc::new(engine.clone())));
    let mut request = client.request("GET", "/", Body::empty());
    request.headers_mut().insert("accept", "text/html".parse().unwrap());
    let page = reply(client.send(request).await).await;
    assert_eq!(page.status.as_u16(), 200, "it asks for the key");
    assert!(!page.text.contains("acme-of-the-file") && !page.text.contains("test-model"));

    for (who, status) in [(client.clone(), 401), (client.key("wrong"), 401), (client.key("k1"), 403)] {
        assert_eq!(who.get("/v1/why/live").await.status.as_u16(), status);
    }
    assert_eq!(client.key("k1").get("/v1/why/live").await.error()["code"], "insufficient_scope");
    assert_eq!(client.admin("k1").get("/v1/why/live").await.status.as_u16(), 401);
    let shell = client.admin("").get("/").await;
    assert!(shell.status.is_success() && shell.text == page.text, "the admin listener has it, too");

    client.key("k1").complete(json!({"prompt": "x".repeat(100), "max_tokens": 2})).await;
    let mut operator = Page::open(&client.admin("op")).await;
    assert_eq!(operator.next("hello").await["chat"], false, "nobody is answered on that listener");
    let why = operator.next("why").await;
    assert_eq!(why["cost"]["tenants"]["acme-of-the-file"]["output_tokens"], 2);
    engine.stop();
}

#[tokio::test]
async fn nothing_is_sampled_while_nobody_looks_and_what_looking_takes_is_counted() {
    let engine = engine(64);
    let client = Client::new(Arc::new(engine.clone()));
    client.complete(json!({"prompt": "x".repeat(100), "max_tokens": 2})).await;
    client.get("/").await;
    tokio::time::sleep(Duration::from_millis(600)).await;
    assert_eq!((samples(&client).await, client.metric("folio:pages_open", &[]).await), (0.0, 0.0));
    let mut page = Page::open(&client).await;
    let other = Page::open(&client).await;
    page.next("hello").await;
    page.next("why").await;
    assert_eq!(client.metric("folio:pages_open", &[]).await, 2.0);
    page.next("why").await;
    let sampled = samples(&client).await;
    assert!((5.0..8.0).contains(&sampled), "{sampled}: two pages are one sample");
    let took = client.metric("folio:page_processor_seconds_total", &[]).await;
    assert!(took > 0.0);
    drop((page, other));
    until("the pages are closed", async || client.metric("folio:pages_open", &[]).await == 0.0).await;
    let (sampled, steps) = (samples(&client).await, engine.stats().counters.steps);
    tokio::time::sleep(Duration::from_millis(800)).await;
    assert_eq!((samples(&client).await, engine.stats().counters.steps), (sampled, steps));
    // Whoever comes again is told all of it again.
    let mut again = Page::open(&client).await;
    assert_eq!(again.next("hello").await["blocks"], 64);
    assert_eq!(again.next("tree").await["blocks"], engine.stats().cache.cached_blocks);
    engine.stop();
}

#[tokio::test]
async fn the_map_and_the_tree_are_what_the_cache_holds() {
    let engine = engine(64);
    let config = ServerConfig { api_keys: Vec::new(), ..Default::default() };
    let client = Client::with(config, app(Arc::new(engine.clone())));
    let shared = "s".repeat(64);
    for (end, tokens) in [("a", 33), ("b", 17)] {
        let prompt = shared.clone() + &end.repeat(tokens);
        client.complete(json!({"prompt": prompt, "max_tokens": 1})).await;
    }
    until("the engine is idle", async || !engine.stats().busy).await;
    let mut page = Page::open(&client).await;
    let hello = page.next("hello").await;
    assert_eq!(
        (&hello["block_tokens"], &hello["blocks_per_cell"], &hello["chat"]),
        (&json!(16), &json!(1), &json!(true))
    );
    let empty = page.next("sample").await;
    assert_eq!(empty["map"]["cells"].as_str().map(str::len), Some(128), "all that is known by then");
    let sample = page.next("sample").await;
    let cells = sample["map"]["cells"].as_str().unwrap();
    let stats = engine.stats().cache;
    let count = |is: &dyn Fn(u8) -> bool| cells.bytes().step_by(2).filter(|state| is(*state)).count() as u32;
    assert_eq!(count(&|state| state.is_ascii_digit()), stats.cached_blocks);
    assert_eq!(count(&|state| state == b'.'), stats.free_blocks);
    assert_eq!(sample["map"]["tenants"].as_array().map(Vec::len), Some(1));
    // Four blocks that both have, then two and one of each.
    let tree = page.next("tree").await;
    assert_eq!(tree["blocks"], stats.cached_blocks);
    let runs: Vec<[i64; 5]> = serde_json::from_value(tree["runs"].clone()).unwrap();
    assert_eq!(&runs[0][..4], [-1, 0, 0, 4], "{runs:?}");
    assert_eq!(runs[0][4], i64::from(stats.cached_blocks));
    let mut ends: Vec<_> = runs[1..].iter().map(|run| (run[0], run[2])).collect();
    ends.dedup();
    assert_eq!((runs.len(), ends), (3, vec![(0, 4)]));
    let why = page.next("why").await;
    let contiguous = &why["cache"]["contiguous"];
    assert_eq!((&contiguous["sequences_max"], &contiguous["sequence_tokens"]), (&json!(4), &json!(256)));
    assert!(why["latency"]["time_to_first_token_s"]["p50"].as_f64().unwrap() > 0.0);
    assert_eq!(why["latency"]["time_to_first_token_s"]["count"], 2);
    engine.stop();
}

#[tokio::test]
async fn a_pool_of_more_blocks_than_cells_is_looked_at_in_pieces() {
    let engine = engine(10_000);
    let client = Client::new(Arc::new(engine.clone()));
    client.complete(json!({"prompt": "x".repeat(200), "max_tokens": 1})).await;
    let mut page = Page::open(&client).await;
    let hello = page.next("hello").await;
    assert_eq!((&hello["blocks"], &hello["blocks_per_cell"]), (&json!(10_000), &json!(3)));
    let known = page.next("sample").await["map"]["cells"].as_str().unwrap().len() / 2;
    let mut seen = Vec::new();
    for _ in 0..5 {
        let map = page.next("sample").await["map"].clone();
        seen.push((map["from"].as_u64().unwrap(), map["cells"].as_str().unwrap().len() / 2));
    }
    assert_eq!(known, 3334);
    assert_eq!(seen, [(0, 1024), (1024, 1024), (2048, 1024), (3072, 262), (0, 1024)]);
    assert_eq!(page.next("tree").await["blocks"], engine.stats().cache.cached_blocks);
    engine.stop();
}

#[tokio::test]
async fn names_that_are_markup_are_no_part_of_the_page() {
    let mut app = app(FakeEngine::saying(""));
    app.model.names[0] = "</script><b>model</b>".into();
    let client = Client::with(ServerConfig::default(), app);
    let mut request = client.request("GET", "/", Body::empty());
    request.headers_mut().insert("accept", "text/html".parse().unwrap());
    request.headers_mut().insert("host", "<b>".parse().unwrap());
    assert!(!reply(client.send(request).await).await.text.contains("<b>"));
    let mut page = Page::open(&client).await;
    assert_eq!(page.next("hello").await["model"], "</script><b>model</b>");
}

#[tokio::test]
async fn there_are_only_so_many_pages_and_who_does_not_read_is_let_go_of() {
    let engine = engine(64);
    let client = Client::new(Arc::new(engine.clone()));
    let mut pages = Vec::new();
    for _ in 0..16 {
        pages.push(Page::open(&client).await);
    }
    let refused = client.get("/v1/why/live").await;
    assert_eq!((refused.status.as_u16(), &refused.headers["retry-after"]), (429, &"5".parse().unwrap()));
    assert_eq!(refused.error()["code"], "too_many_pages");
    // One reads, the others do not.
    let mut reader = pages.pop().unwrap();
    for _ in 0..14 {
        reader.next("sample").await;
    }
    until("the others are let go of", async || client.metric("folio:pages_open", &[]).await == 1.0).await;
    for page in pages {
        page.end().await;
    }
    reader.next("sample").await;
    drop(Page::open(&client).await);
    engine.stop();
}

#[tokio::test]
async fn an_engine_without_a_cache_to_show_and_a_server_that_drains_are_told_all_the_same() {
    let client = Client::new(FakeEngine::saying("hello"));
    let mut page = Page::open(&client).await;
    assert_eq!(page.next("hello").await["blocks"], 0);
    page.next("why").await;
    page.next("sample").await;
}
