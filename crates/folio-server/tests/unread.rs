//! Clients that read slowly, or not at all: what is held for them is bounded by bytes and time, never by a count of events, and
//! nobody else notices.

mod common;

use std::future::poll_fn;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use axum::body::BodyDataStream;
use common::{Client, FakeEngine, app, modelled};
use folio_engine::{EngineHandle, SchedulerConfig};
use folio_server::{App, Engine, Limits, Listeners, Server, ServerConfig};
use futures_core::Stream;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;

const CONTEXT: u32 = 16 << 10;

fn engine() -> EngineHandle {
    let config =
        SchedulerConfig { max_model_len: CONTEXT, max_num_batched_tokens: 256, ..Default::default() };
    modelled(config, 8 * CONTEXT / 16, 1 << 20)
}

fn long(engine: Arc<dyn Engine>) -> App {
    let mut app = app(engine);
    app.model.context_length = CONTEXT;
    app
}

fn config(limits: Limits) -> ServerConfig {
    ServerConfig { limits, ..Default::default() }
}

/// A stream's body.
struct Reader(BodyDataStream);

impl Reader {
    async fn open(client: &Client, mut body: Value) -> Self {
        body["stream"] = true.into();
        body["prompt"] = "hi".into();
        let request = client.request("POST", "/v1/completions", body.to_string());
        let response = client.send(request).await;
        assert_eq!(response.status(), 200);
        Self(response.into_body().into_data_stream())
    }

    async fn next(&mut self) -> Option<String> {
        let part = poll_fn(|cx| Pin::new(&mut self.0).poll_next(cx)).await?.unwrap();
        Some(String::from_utf8(part.to_vec()).unwrap())
    }

    async fn rest(&mut self) -> String {
        let mut text = String::new();
        while let Some(part) = self.next().await {
            text += &part;
        }
        text
    }
}

/// The server's own tasks have done what they could.
async fn settled() {
    for _ in 0..20 {
        tokio::task::yield_now().await;
    }
}

async fn until(what: &str, mut condition: impl AsyncFnMut() -> bool) {
    for _ in 0..20_000 {
        if condition().await {
            return;
        }
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    panic!("it never came to be that {what}");
}

#[tokio::test]
async fn a_client_that_never_reads_has_vanished_when_its_bytes_are_too_many() {
    let engine = engine();
    let limits = Limits { unread_bytes: 200_000, ..Limits::default() };
    let client = Client::with(config(limits), long(Arc::new(engine.clone())));
    let body = json!({"max_tokens": 16_000, "ignore_eos": true, "logprobs": 20, "n": 4});
    let mut reader = Reader::open(&client, body).await;
    until("everything is free again", async || {
        let stats = engine.stats();
        assert!(client.metric("folio:in_flight_bytes", &[]).await < 1_000_000.0);
        stats.running == 0 && client.metric("vllm:request_success_total", &["abort"]).await == 4.0
    })
    .await;
    until("what it will not read is dropped", async || {
        client.metric("folio:in_flight_bytes", &[]).await < 10_000.0
    })
    .await;
    let text = reader.rest().await;
    assert!(
        text.len() < 10_000 && text.contains("too_much_unread") && text.ends_with("[DONE]\n\n"),
        "{text}"
    );
    drop(reader);
    until("nothing is held", async || client.metric("folio:in_flight_bytes", &[]).await == 0.0).await;
}

#[tokio::test]
async fn a_slow_and_steady_client_survives_however_many_events_wait() {
    let engine = FakeEngine::saying(&"x".repeat(3000));
    engine.plan(|plan| plan.manual = true);
    let limits = Limits { write_timeout: Duration::from_millis(150), ..Limits::default() };
    let client = Client::with(config(limits), long(engine.clone()));
    let mut reader = Reader::open(&client, json!({"max_tokens": 3000})).await;
    let mut text = String::new();
    for step in 0..3000 {
        engine.step();
        settled().await;
        // One event of ten, and the waiting between two never as long as the limit, which all of it is many times over.
        if step % 10 == 0 {
            text += &reader.next().await.unwrap();
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    }
    assert_eq!(engine.live(), 0);
    text += &reader.rest().await;
    assert_eq!(text.matches("\"text\":\"x\"").count(), 3000);
    assert!(text.ends_with("[DONE]\n\n"));
}

#[tokio::test]
async fn a_client_that_accepts_nothing_for_the_limit_has_vanished() {
    let engine = FakeEngine::saying(&"x".repeat(3000));
    engine.plan(|plan| plan.manual = true);
    let limits = Limits { write_timeout: Duration::from_millis(50), ..Limits::default() };
    let client = Client::with(config(limits), long(engine.clone()));
    let mut reader = Reader::open(&client, json!({})).await;
    // While nothing waits, nothing is missed.
    tokio::time::sleep(Duration::from_millis(80)).await;
    engine.step();
    settled().await;
    tokio::time::sleep(Duration::from_millis(80)).await;
    assert!(!engine.cancelled());
    engine.step();
    settled().await;
    assert!(engine.cancelled());
    engine.step();
    assert_eq!(engine.live(), 0);
    settled().await;
    let text = reader.rest().await;
    assert!(text.contains("accepted nothing") && !text.contains("\"text\":\"x\""), "{text}");
    assert_eq!(client.metric("vllm:request_success_total", &["abort"]).await, 1.0);
}

#[tokio::test]
async fn time_is_not_held_against_answers_that_are_not_streamed_and_bytes_are() {
    let engine = FakeEngine::saying(&"x".repeat(200));
    engine.plan(|plan| plan.manual = true);
    let limits = Limits {
        write_timeout: Duration::from_millis(10),
        unread_bytes: 200 * (96 + 21 * 144) / 2,
        ..Limits::default()
    };
    let client = Client::with(config(limits), long(engine.clone()));
    let ask = async |body: Value| {
        let asked = tokio::spawn({
            let client = client.clone();
            async move { client.complete(body).await }
        });
        until("it is there", async || engine.live() == 1).await;
        while engine.live() > 0 {
            engine.step();
            settled().await;
            tokio::time::sleep(Duration::from_micros(500)).await;
        }
        asked.await.unwrap()
    };
    let whole = ask(json!({"max_tokens": 200})).await;
    assert_eq!(
        (whole.status.as_u16(), whole.json()["usage"]["completion_tokens"].as_u64()),
        (200, Some(200))
    );
    drop(whole);
    let large = ask(json!({"max_tokens": 200, "logprobs": 20})).await;
    assert_eq!((large.status.as_u16(), large.error()["code"].as_str()), (400, Some("too_much_unread")));
    assert_eq!(client.metric("folio:in_flight_bytes", &[]).await, 0.0);
}

#[tokio::test]
async fn prompts_repeated_with_log_probabilities_are_counted_before_they_are_made() {
    let limits = Limits { unread_bytes: 4 << 20, ..Limits::default() };
    let client = Client::with(config(limits), long(FakeEngine::saying("ok")));
    let prompt = "y".repeat(4000);
    let body = json!({"prompt": prompt, "echo": true, "logprobs": 20, "n": 8, "max_tokens": 1});
    let reply = client.complete(body).await;
    assert_eq!((reply.status.as_u16(), reply.error()["code"].as_str()), (400, Some("too_much_unread")));
    let body = json!({"prompt": "y".repeat(100), "echo": true, "logprobs": 20, "n": 8, "max_tokens": 1});
    assert_eq!(client.complete(body).await.status.as_u16(), 200);
}

#[tokio::test]
async fn many_that_never_read_take_a_bounded_part_and_those_who_read_notice_nothing() {
    let engine = engine();
    let total = 2 << 20;
    let limits = Limits { in_flight_bytes: total, ..Limits::default() };
    let config = ServerConfig { api_keys: vec!["bad".into(), "good".into()], ..config(limits) };
    let client = Client::with(config, long(Arc::new(engine.clone())));
    let (bad, good) = (client.key("bad"), client.key("good"));
    let mut stuck = Vec::new();
    for _ in 0..24 {
        let body = json!({"max_tokens": 8000, "ignore_eos": true, "logprobs": 20});
        stuck.push(Reader::open(&bad, body).await);
    }
    let most = (total + 24 * (64 << 10)) as f64;
    for _ in 0..4 {
        let mut reader =
            Reader::open(&good, json!({"max_tokens": 300, "ignore_eos": true, "logprobs": 5, "stream_options": {"include_usage": true}})).await;
        let text = reader.rest().await;
        assert!(!text.contains("error") && text.ends_with("[DONE]\n\n"), "{text}");
        assert!(text.contains("\"completion_tokens\":300"), "{text}");
        assert!(good.metric("folio:in_flight_bytes", &[]).await < most);
    }
    until("all of those who do not read are gone", async || {
        assert!(good.metric("folio:in_flight_bytes", &[]).await < most);
        engine.stats().running == 0 && engine.stats().waiting == Default::default()
    })
    .await;
    let whole = good.complete(json!({"max_tokens": 200, "ignore_eos": true, "logprobs": 5})).await;
    assert_eq!(whole.status, 200, "{}", whole.text);
    drop((stuck, whole));
    until("nothing is held", async || good.metric("folio:in_flight_bytes", &[]).await == 0.0).await;
}

#[tokio::test]
async fn a_client_that_reads_a_byte_at_a_time_gets_every_byte() {
    let limits = Limits { unread_bytes: 4 << 20, ..Limits::default() };
    let server = Server::new(config(limits), long(Arc::new(engine()))).unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let (_signals, receiver) = mpsc::channel(4);
    let serving = tokio::spawn(server.listen(Listeners { serving: listener, admin: None }, receiver));
    let body = r#"{"prompt": "hi", "max_tokens": 400, "ignore_eos": true, "stream": true, "logprobs": 20, "stream_options": {"include_usage": true}}"#;
    let head =
        "POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json";
    let mut socket = TcpStream::connect(address).await.unwrap();
    socket
        .write_all(format!("{head}\r\ncontent-length: {}\r\n\r\n{body}", body.len()).as_bytes())
        .await
        .unwrap();
    let mut text = Vec::new();
    while let Ok(byte) = socket.read_u8().await {
        text.push(byte);
    }
    let text = String::from_utf8(text).unwrap();
    assert!(text.contains("\"completion_tokens\":400") && text.contains("[DONE]"));
    serving.abort();
}

/// A byte is a token, which takes four: prompts take room wherever they wait, not only as the text they came in.
#[tokio::test]
async fn prompts_that_wait_take_room_as_tokens() {
    let asked = async |room: usize, path: &str, body: &Value| {
        let limits = Limits { in_flight_bytes: room, ..Limits::default() };
        let reply = Client::with(config(limits), long(Arc::new(engine()))).post(path, body).await;
        if reply.status != 200 {
            reply.error()["code"].as_str().unwrap_or("none").to_owned()
        } else {
            String::new()
        }
    };
    let prefix = json!({"prompt": "a".repeat(16_000)});
    // 16 kB of text and 64 kB of ids: more than half, and less.
    assert_eq!(asked(150 << 10, "/v1/cache/prefixes", &prefix).await, "too_much_in_flight");
    assert_eq!(asked(200 << 10, "/v1/cache/prefixes", &prefix).await, "");
    // 240 kB of text, 820 kB of ids that are computed at once, and 140 kB of such that wait for them.
    let inputs = json!({"input": vec!["a".repeat(800); 300]});
    assert_eq!(asked(2_250_000, "/v1/embeddings", &inputs).await, "too_much_in_flight");
}

/// An answer shows as much of its prompt as it is asked to, in each of its choices.
#[tokio::test]
async fn what_answers_show_of_their_prompt_is_held_like_what_they_say() {
    let limits = Limits { unread_bytes: 100_000, ..Limits::default() };
    let client = Client::with(config(limits), long(FakeEngine::saying("ok")));
    let ask = json!({"prompt": "a".repeat(12_000), "n": 8, "max_tokens": 1});
    assert_eq!(client.post("/v1/completions", &ask).await.status, 200);
    for shown in [json!({"echo": true}), json!({"return_token_ids": true})] {
        let reply = client.post("/v1/completions", &common::merged(ask.clone(), shown.clone())).await;
        assert_eq!(reply.status, 400, "{shown}");
        assert_eq!(reply.error()["code"], "too_much_unread", "{shown}");
    }
}
