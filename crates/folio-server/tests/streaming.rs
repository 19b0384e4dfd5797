//! Event streams: their order, their bytes, their end, and what happens when nobody reads them.

mod common;

use std::future::poll_fn;
use std::pin::Pin;
use std::time::Duration;

use axum::body::BodyDataStream;
use common::{Client, FakeEngine, Reply, app, events, merged, tool_app};
use folio_engine::FinishReason;
use folio_server::{Limits, ServerConfig};
use futures_core::Stream;
use serde_json::{Value, json};

/// Reads a stream piece by piece.
struct Reader(BodyDataStream);

impl Reader {
    async fn open(client: &Client, extra: Value) -> Self {
        let body = merged(json!({"messages": [{"role": "user", "content": "hi"}], "stream": true}), extra);
        let request = client.request("POST", "/v1/chat/completions", body.to_string());
        Self(client.send(request).await.into_body().into_data_stream())
    }

    /// The next event's data.
    async fn next(&mut self) -> Option<String> {
        let chunk = poll_fn(|cx| Pin::new(&mut self.0).poll_next(cx)).await?.unwrap();
        Some(String::from_utf8(chunk.to_vec()).unwrap())
    }

    async fn content(&mut self) -> Value {
        let text = self.next().await.unwrap();
        events(&text)[0]["choices"][0]["delta"]["content"].clone()
    }
}

fn contents(events: &[Value], index: usize) -> String {
    let choices = events.iter().filter_map(|event| event["choices"].as_array()?.first());
    let of_index = choices.filter(|choice| choice["index"] == index);
    of_index.filter_map(|choice| choice["delta"]["content"].as_str().or(choice["text"].as_str())).collect()
}

#[tokio::test]
async fn a_chat_streams_in_order() {
    let client = Client::new(FakeEngine::saying("Hey"));
    let reply = client.chat(json!({"stream": true, "stream_options": {"include_usage": true}})).await;
    assert_eq!(reply.status, 200);
    assert!(reply.headers["content-type"].to_str().unwrap().starts_with("text/event-stream"));
    assert_eq!(reply.headers["x-accel-buffering"], "no");
    let events = reply.events();
    assert_eq!(events.len(), 7, "{events:?}");
    assert_eq!(events[0]["choices"][0]["delta"], json!({"role": "assistant", "content": ""}));
    for (event, text) in events[1..4].iter().zip(["H", "e", "y"]) {
        assert_eq!(event["choices"][0]["delta"], json!({"content": text}));
        assert_eq!(event["object"], "chat.completion.chunk");
        assert_eq!(event["id"], events[0]["id"]);
        assert!(event["choices"][0]["finish_reason"].is_null());
        assert!(event["usage"].is_null() && event.as_object().unwrap().contains_key("usage"));
    }
    assert_eq!(events[4]["choices"][0]["finish_reason"], "stop");
    assert_eq!(events[4]["choices"][0]["delta"], json!({}));
    assert_eq!(events[5]["choices"], json!([]));
    let prompt = "[user]hi".len() + 1 + "[assistant]".len();
    assert_eq!(
        events[5]["usage"],
        json!({"prompt_tokens": prompt, "completion_tokens": 4, "total_tokens": prompt + 4,
            "prompt_tokens_details": {"cached_tokens": 0}})
    );
    assert_eq!(events[6], "[DONE]");
    let events = client.chat(json!({"stream": true})).await.events();
    assert!(events.iter().all(|event| event.get("usage").is_none()), "usage only when asked for");
}

#[tokio::test]
async fn usage_with_every_chunk() {
    let client = Client::new(FakeEngine::saying("abc"));
    let options = json!({"include_usage": true, "continuous_usage_stats": true});
    let events = client.chat(json!({"stream": true, "stream_options": options})).await.events();
    let counts: Vec<_> =
        events.iter().filter_map(|event| event["usage"]["completion_tokens"].as_u64()).collect();
    assert_eq!(counts, [0, 1, 2, 3, 4, 4]);
}

#[tokio::test]
async fn a_streamed_answer_equals_the_whole_one() {
    // Several bytes per character: each byte is a token of its own.
    let text = "naïve 日本 👩‍🚀 — fin.";
    for (stop, want) in
        [(json!(null), text), (json!("🚀 — f"), "naïve 日本 👩\u{200d}"), (json!(["zz", "本"]), "naïve 日")]
    {
        let client = Client::new(FakeEngine::saying(text));
        for n in [1, 3] {
            let extra = json!({"stop": stop, "n": n, "logprobs": true, "return_token_ids": true});
            let whole = client.chat(extra.clone()).await.json();
            let events = client.chat(merged(extra, json!({"stream": true}))).await.events();
            for index in 0..n {
                let choice = &whole["choices"][index];
                assert_eq!(choice["message"]["content"], want);
                assert_eq!(contents(&events, index), want);
                let of_choice: Vec<&Value> = events
                    .iter()
                    .filter_map(|event| event["choices"].as_array()?.first())
                    .filter(|choice| choice["index"] == index)
                    .collect();
                let gather = |pick: fn(&Value) -> &Value| -> Vec<Value> {
                    of_choice.iter().filter_map(|choice| pick(choice).as_array()).flatten().cloned().collect()
                };
                assert_eq!(gather(|c| &c["token_ids"]), *choice["token_ids"].as_array().unwrap());
                let logprobs = gather(|c| &c["logprobs"]["content"]);
                assert_eq!(logprobs, *choice["logprobs"]["content"].as_array().unwrap());
                let finishes: Vec<_> =
                    of_choice.iter().filter(|choice| !choice["finish_reason"].is_null()).collect();
                assert_eq!(finishes.len(), 1);
                assert_eq!(finishes[0]["finish_reason"], choice["finish_reason"]);
            }
        }
    }
}

#[tokio::test]
async fn completions_stream_their_echo_first() {
    let client = Client::new(FakeEngine::saying("abc"));
    let events = client.complete(json!({"stream": true, "echo": true, "prompt": ["X", "Y"]})).await.events();
    assert_eq!((contents(&events, 0), contents(&events, 1)), ("Xabc".into(), "Yabc".into()));
    assert_eq!(events[0]["choices"][0]["text"], "X");
    assert_eq!(events[0]["object"], "text_completion");
    assert_eq!(events.last().unwrap(), "[DONE]");
}

#[tokio::test]
async fn text_is_held_only_while_it_may_be_a_stop_string() {
    let engine = FakeEngine::saying("a<b<e>c");
    engine.plan(|plan| plan.manual = true);
    let client = Client::new(engine.clone());
    let mut reader = Reader::open(&client, json!({"stop": "<e>"})).await;
    engine.step();
    assert_eq!(reader.content().await, "", "the role");
    assert_eq!(reader.content().await, "a");
    engine.step();
    engine.step();
    assert_eq!(reader.content().await, "<b", "'<' waited for what comes after it");
    engine.step();
    engine.step();
    engine.step();
    let last = events(&reader.next().await.unwrap());
    assert_eq!(last[0]["choices"][0]["finish_reason"], "stop");
    assert_eq!(last[0]["choices"][0]["delta"], json!({}));
    assert_eq!(reader.next().await.unwrap(), "data: [DONE]\n\n");
    assert_eq!(
        client.metric("vllm:generation_tokens_total", &[]).await,
        6.0,
        "what came after is not counted"
    );
}

#[tokio::test]
async fn a_client_that_vanishes_is_cancelled_within_one_step() {
    let engine = FakeEngine::saying("a long answer");
    engine.plan(|plan| plan.manual = true);
    let client = Client::new(engine.clone());
    let mut reader = Reader::open(&client, json!({"n": 2})).await;
    engine.step();
    reader.next().await.unwrap();
    assert_eq!(engine.live(), 1);
    drop(reader);
    engine.step();
    assert_eq!(engine.live(), 0);

    // The same for an answer that is not streamed.
    let asking = asking(&client, &engine, json!({})).await;
    engine.step();
    asking.abort();
    assert!(asking.await.is_err());
    engine.step();
    assert_eq!(engine.live(), 0);
    while client.metric("vllm:request_success_total", &["abort"]).await < 3.0 {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

/// The event loop has done all that there is to do.
async fn settled() {
    for _ in 0..1000 {
        tokio::task::yield_now().await;
    }
}

/// A request whose answer is not streamed, which the engine has begun.
async fn asking(client: &Client, engine: &FakeEngine, body: Value) -> tokio::task::JoinHandle<Reply> {
    let client = client.clone();
    let asking = tokio::spawn(async move { client.chat(body).await });
    while engine.live() == 0 {
        tokio::task::yield_now().await;
    }
    asking
}

#[tokio::test]
async fn tokens_that_nothing_waits_for_are_looked_at_several_at_a_time() {
    for (body, looked_at) in [(json!({}), [0.0, 16.0, 32.0]), (json!({"stop": "b"}), [15.0, 16.0, 36.0])] {
        let engine = FakeEngine::saying(&"a".repeat(40));
        engine.plan(|plan| plan.manual = true);
        let client = Client::new(engine.clone());
        let asking = asking(&client, &engine, body).await;
        for (steps, looked_at) in [15, 1, 20].into_iter().zip(looked_at) {
            (0..steps).for_each(|_| engine.step());
            settled().await;
            assert_eq!(client.metric("vllm:generation_tokens_total", &[]).await, looked_at);
        }
        while engine.live() > 0 {
            engine.step();
        }
        assert_eq!(asking.await.unwrap().json()["choices"][0]["message"]["content"], "a".repeat(40));
        let timed = ["vllm:time_to_first_token_seconds_count", "vllm:inter_token_latency_seconds_count"];
        let timed = [client.metric(timed[0], &[]).await, client.metric(timed[1], &[]).await];
        assert_eq!(timed, [1.0, 40.0], "each token, and the end is one");
    }
}

#[tokio::test]
async fn every_token_is_counted_however_an_answer_that_is_not_streamed_ends() {
    let ends = [None, Some(FinishReason::Error), Some(FinishReason::Deadline), Some(FinishReason::Cancelled)];
    for (end, n) in ends.into_iter().flat_map(|end| [(end, 1), (end, 3)]) {
        let engine = FakeEngine::saying(&"a".repeat(20));
        engine.plan(|plan| plan.end = end);
        let client = Client::new(engine.clone());
        let reply = client.chat(json!({"n": n})).await;
        let counted = client.metric("vllm:generation_tokens_total", &[]).await;
        assert_eq!(counted, f64::from(n * if end.is_none() { 21 } else { 20 }), "{end:?}");
        if end.is_none() {
            assert_eq!(reply.json()["usage"]["completion_tokens"], n * 21);
        }
    }
    // A client that left, too.
    let engine = FakeEngine::saying("a long answer");
    engine.plan(|plan| plan.manual = true);
    let client = Client::new(engine.clone());
    let asking = asking(&client, &engine, json!({})).await;
    (0..5).for_each(|_| engine.step());
    asking.abort();
    assert!(asking.await.is_err());
    engine.step();
    assert_eq!(engine.live(), 0);
    while client.metric("vllm:request_success_total", &["abort"]).await < 1.0 {
        tokio::task::yield_now().await;
    }
    assert_eq!(client.metric("vllm:generation_tokens_total", &[]).await, 5.0);
}

#[tokio::test]
async fn what_ends_an_answer_that_is_not_streamed_ends_it_when_it_happens() {
    let call = r#"<tool_call>{"name": "f", "arguments": {}}</tool_call>"#;
    let tools = json!([{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]);
    let one_call = json!({"tools": tools, "parallel_tool_calls": false});
    for (end, body) in [("<e>", json!({"stop": "<e>"})), (call, one_call)] {
        let engine = FakeEngine::saying(&format!("ab{end}and much that nobody wants"));
        engine.plan(|plan| plan.manual = true);
        let client = Client::with(ServerConfig::default(), tool_app(engine.clone(), 4096));
        let asking = asking(&client, &engine, body).await;
        (0..2 + end.len()).for_each(|_| engine.step());
        settled().await;
        assert!(asking.is_finished(), "{end}");
        assert_eq!(asking.await.unwrap().json()["choices"][0]["message"]["content"], "ab");
        assert_eq!(engine.live(), 1, "answered before the engine ended it");
    }
}

#[tokio::test]
async fn a_finished_answer_is_not_cancelled() {
    let engine = FakeEngine::saying("ok");
    let client = Client::new(engine.clone());
    for stream in [true, false] {
        client.chat(json!({"stream": stream})).await;
    }
    assert_eq!(client.metric("vllm:request_success_total", &["abort"]).await, 0.0);
    assert_eq!(client.metric("vllm:request_success_total", &["\"stop\""]).await, 2.0);
}

#[tokio::test]
async fn a_failure_in_mid_stream_is_an_error_event() {
    for (reason, kind) in [(FinishReason::Error, "server_error"), (FinishReason::Deadline, "timeout_error")] {
        let engine = FakeEngine::saying("par");
        engine.plan(|plan| plan.end = Some(reason));
        let client = Client::new(engine.clone());
        let events = client.chat(json!({"stream": true})).await.events();
        assert_eq!(contents(&events, 0), "par");
        let error = &events[events.len() - 2]["error"];
        assert_eq!((error["type"].as_str(), &events[events.len() - 1]), (Some(kind), &json!("[DONE]")));
        let reply = client.chat(json!({})).await;
        assert_eq!(reply.status, if kind == "timeout_error" { 504 } else { 500 });
        assert_eq!(reply.error()["type"], kind);
        assert_eq!(client.metric("vllm:request_success_total", &["error"]).await, 2.0);
    }
}

#[tokio::test]
async fn an_idle_stream_is_kept_alive() {
    let engine = FakeEngine::saying("x");
    engine.plan(|plan| plan.manual = true);
    let limits = Limits { keep_alive: Duration::from_millis(5), ..Limits::default() };
    let client = Client::with(ServerConfig { limits, ..Default::default() }, app(engine.clone()));
    let mut reader = Reader::open(&client, json!({})).await;
    for _ in 0..3 {
        assert_eq!(reader.next().await.unwrap(), ": keep-alive\n\n");
    }
}

#[tokio::test]
async fn a_sign_of_life_leaves_once_the_engine_has_accepted() {
    let engine = FakeEngine::saying("x");
    engine.plan(|plan| plan.manual = true);
    let limits = Limits { keep_alive: Duration::from_secs(3600), ..Limits::default() };
    let client = Client::with(ServerConfig { limits, ..Default::default() }, app(engine.clone()));
    let mut reader = Reader::open(&client, json!({})).await;
    assert_eq!(reader.next().await.unwrap(), ": keep-alive\n\n", "nothing is computed yet");
    engine.plan(|plan| plan.reject = Some(folio_engine::handle::Rejected::ShuttingDown));
    let refused = client.chat(json!({"stream": true})).await;
    assert_eq!(refused.status, 503, "a refusal stays a status");
}

#[tokio::test]
async fn a_slow_reader_does_not_hold_up_the_engine_and_loses_nothing() {
    let text = "word ".repeat(40);
    let engine = FakeEngine::saying(&text);
    engine.plan(|plan| plan.manual = true);
    let client = Client::new(engine.clone());
    let mut reader = Reader::open(&client, json!({})).await;
    while engine.live() > 0 {
        engine.step();
    }
    let mut all = String::new();
    while let Some(piece) = reader.next().await {
        all.push_str(&piece);
    }
    assert_eq!(contents(&events(&all), 0), text);
}
