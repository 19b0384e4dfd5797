//! The event loop is everybody's: between two moments at which it could do something else, no request takes more of it than a
//! bounded amount of work, whatever it asks for. Counted in steps ([`folio_text::work`]) per poll, on the loop's own thread.

mod common;

use std::future::Future;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll};

use axum::body::to_bytes;
use common::room::{self, Counting};
use common::targets::ROUTES;
use common::{Client, FakeEngine, SEVERAL, app, tool_app};
use folio_engine::FinishReason;
use folio_server::{Limits, ServerConfig};
use folio_text::{ChatTemplate, TemplateSources, work};
use serde_json::{Value, json};

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Of one poll: some hundred microseconds, at the speed at which bytes are looked at.
const STEPS_MAX: u64 = 160 << 10;

/// Of one that writes a piece of a long answer, of which there may be thousands.
const PIECE_MAX: u64 = 20 << 10;

/// Remembers the most steps that one of its polls took.
struct Watched<F> {
    inner: Pin<Box<F>>,
    most: Arc<AtomicU64>,
}

impl<F: Future> Future for Watched<F> {
    type Output = F::Output;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<F::Output> {
        let before = work::done();
        let polled = self.inner.as_mut().poll(cx);
        self.most.fetch_max(work::done() - before, Ordering::Relaxed);
        polled
    }
}

/// Answers a request and reads its body: status, text, and the steps of the longest poll.
async fn watched(client: &Client, method: &str, path: &str, body: String) -> (u16, String, u64) {
    let most = Arc::new(AtomicU64::new(0));
    let answer = async {
        let response = client.send(client.request(method, path, body)).await;
        let (head, body) = response.into_parts();
        (head.status.as_u16(), to_bytes(body, usize::MAX).await.unwrap())
    };
    let watched = Watched { inner: Box::pin(answer), most: most.clone() };
    let (status, bytes) = pin!(watched).await;
    (status, String::from_utf8(bytes.to_vec()).unwrap(), most.load(Ordering::Relaxed))
}

fn client() -> Client {
    let mut app = app(FakeEngine::saying("ok"));
    app.model.context_length = 1 << 22;
    Client::with(ServerConfig { limits: Limits::default(), ..Default::default() }, app)
}

#[tokio::test]
async fn large_bodies_are_read_off_the_loop_on_every_route() {
    let client = client();
    let text = "ab ".repeat(1 << 20);
    let names: serde_json::Map<String, Value> =
        (0..4000).map(|at| (format!("{at:0100}"), Value::from(at))).collect();
    let bodies = [
        json!({"prompt": text, "max_tokens": 1}),
        json!({"messages": [{"role": "user", "content": text}], "max_tokens": 1}),
        json!({"input": text}),
        json!({"tokens": vec![97; 1 << 20]}),
        Value::Object(names),
    ];
    for path in ROUTES {
        for body in &bodies {
            let (status, text, most) = watched(&client, "POST", path, body.to_string()).await;
            assert!(
                most <= STEPS_MAX,
                "{path}: {most} steps in one poll: {status} {}",
                &text[..text.len().min(80)]
            );
        }
    }
}

/// Whose process is to answer is read off the loop, too, where several models are served; of what is kept in memory nothing is copied.
#[tokio::test]
async fn large_bodies_are_read_off_the_loop_of_several_models() {
    let client = Client::several(&ServerConfig::default());
    let text = "ab ".repeat(1 << 20);
    for path in ROUTES {
        // One that is served is not started for it.
        let model = if path == "/api/pull" { SEVERAL } else { "no-such-model" };
        for body in [
            json!({"prompt": text, "model": model}),
            json!({"x": vec![[1]; 1 << 19], "keep_alive": vec![1; 1 << 19], "model": model}),
        ] {
            let body = body.to_string();
            let (before, bytes) = (room::made(), body.len() as u64);
            let (status, text, most) = watched(&client, "POST", path, body).await;
            // It arrives, and is put together once.
            let made = room::made() - before;
            assert!(
                status != 500 && most <= STEPS_MAX && made < 4 * bytes,
                "{path}: {status} {most} steps in one poll, {made} bytes made for {bytes}: {text}"
            );
        }
    }
}

/// A line is as long as a body may be, and nobody waits for it.
#[tokio::test]
async fn long_lines_of_batches_are_read_off_the_loop() {
    let client = client();
    let text = "ab ".repeat(1 << 20);
    for (path, body) in [
        ("/v1/completions", json!({"prompt": text, "max_tokens": 1})),
        ("/v1/chat/completions", json!({"messages": [{"role": "user", "content": text}], "max_tokens": 1})),
        ("/v1/responses", json!({"input": text, "max_output_tokens": 1})),
        ("/v1/responses", json!({"input": "hi", "metadata": vec![[[1]]; 1 << 20]})),
        ("/v1/embeddings", json!({"input": text})),
    ] {
        let line = json!({"custom_id": "1", "method": "POST", "url": path, "body": body});
        let form = format!(
            "--b\r\nContent-Disposition: form-data; name=\"purpose\"\r\n\r\nbatch\r\n--b\r\nContent-Disposition: form-data; \
             name=\"file\"; filename=\"f\"\r\n\r\n{line}\r\n--b--\r\n"
        );
        let mut request = client.request("POST", "/v1/files", form);
        request.headers_mut().insert("content-type", "multipart/form-data; boundary=b".parse().unwrap());
        let file = common::reply(client.send(request).await).await.json();
        let wanted = json!({"input_file_id": file["id"], "endpoint": path, "completion_window": "24h"});
        let (steps, made) = (work::done(), room::made());
        let batch = client.post("/v1/batches", &wanted).await.json();
        let batch = format!("/v1/batches/{}", batch["id"].as_str().unwrap());
        while client.get(&batch).await.json()["status"] != "completed" {
            tokio::time::sleep(std::time::Duration::from_millis(20)).await;
        }
        let (steps, made) = (work::done() - steps, room::made() - made);
        // Asking for it takes some, as often as it is asked.
        assert!(steps < 1 << 20 && made < 48 << 20, "{path}: {steps} steps, {made} bytes made");
    }
}

/// The same with everything that the loop's thread does until then: also what tasks of the server do that nobody polls here.
async fn in_all(client: &Client, method: &str, path: &str, body: &Value) -> (u16, String, u64) {
    let before = work::done();
    let body = if body.is_null() { String::new() } else { body.to_string() };
    let (status, text, _) = watched(client, method, path, body).await;
    // The task that wrote the answer may have more to do.
    for _ in 0..8 {
        tokio::task::yield_now().await;
    }
    (status, text, work::done() - before)
}

/// A response repeats its request, whole and in three events, and is kept and told again.
#[tokio::test]
async fn what_a_response_repeats_is_written_off_the_loop() {
    let engine = FakeEngine::saying("ok");
    let client = Client::with(ServerConfig::default(), tool_app(engine.clone(), 1 << 23));
    let long = "ab ".repeat(1 << 20);
    let tool =
        json!({"type": "function", "name": "f", "description": long, "parameters": {"type": "object"}});
    for (what, more) in [
        ("instructions", json!({"instructions": long})),
        ("tools", json!({"tools": [tool], "tool_choice": "none"})),
    ] {
        for how in [
            json!({}),
            json!({"stream": true}),
            json!({"background": true}),
            json!({"background": true, "stream": true}),
        ] {
            let mut body = json!({"input": "hi", "max_output_tokens": 1});
            for part in [&more, &how] {
                body.as_object_mut().unwrap().extend(part.as_object().unwrap().clone());
            }
            let (status, text, steps) = in_all(&client, "POST", "/v1/responses", &body).await;
            assert!(
                status == 200 && text.len() > 1 << 20,
                "{what} {how}: {status} {}",
                &text[..text.len().min(300)]
            );
            assert!(steps <= STEPS_MAX, "{what} {how}: {steps} steps");
            let start = text.find("resp_").unwrap();
            let path = format!("/v1/responses/{}", &text[start..start + 37]);
            for (method, path) in [
                ("GET", path.clone()),
                ("GET", format!("{path}/input_items")),
                ("POST", format!("{path}/cancel")),
            ] {
                let (_, text, steps) = in_all(&client, method, &path, &Value::Null).await;
                assert!(steps <= STEPS_MAX, "{method} {path}: {steps} steps, {} bytes", text.len());
            }
        }
    }
    // One that does not end by itself is cancelled, and one that fails says so.
    engine.plan(|plan| plan.manual = true);
    let body = json!({"input": "hi", "max_output_tokens": 1, "background": true, "instructions": long});
    let (_, text, _) = in_all(&client, "POST", "/v1/responses", &body).await;
    let id = serde_json::from_str::<Value>(&text).unwrap()["id"].as_str().unwrap().to_owned();
    let path = format!("/v1/responses/{id}/cancel");
    let (status, text, steps) = in_all(&client, "POST", &path, &Value::Null).await;
    assert!(status == 200 && text.contains(r#""status":"cancelled""#) && steps <= STEPS_MAX, "{steps}");
    engine.plan(|plan| (plan.manual, plan.end) = (false, Some(FinishReason::Error)));
    let body = json!({"input": "hi", "max_output_tokens": 9, "stream": true, "instructions": long});
    let (_, text, steps) = in_all(&client, "POST", "/v1/responses", &body).await;
    assert!(text.contains("response.failed") && steps <= STEPS_MAX, "{steps}");
}

/// So does the end of each of its items.
#[tokio::test]
async fn the_end_of_a_long_item_is_written_off_the_loop() {
    let mut app = app(FakeEngine::saying(&"a".repeat(100_000)));
    app.model.context_length = 1 << 20;
    let client = Client::with(ServerConfig::default(), app);
    let body = json!({"input": "hi", "stream": true});
    let before = work::done();
    let (status, text, _) = watched(&client, "POST", "/v1/responses", body.to_string()).await;
    assert!(status == 200 && text.contains("response.completed"));
    // 100,000 events of a token each, and nothing that is as long as the answer, which would be 400,000 bytes more.
    let tokens: usize =
        text.split("event: response.output_text.delta").skip(1).map(|event| event.len()).sum();
    let steps = work::done() - before;
    assert!((steps as usize) < tokens * 2, "{steps} steps for {tokens} bytes of deltas");
}

#[tokio::test]
async fn what_a_client_attaches_for_itself_is_short() {
    let client = client();
    let long = "x".repeat(513);
    for (name, value) in [
        ("metadata", json!({"a": long})),
        ("metadata", (0..17).map(|at| (at.to_string(), json!("b"))).collect()),
        ("metadata", json!({"n".repeat(65): "b"})),
        ("user", json!(long)),
        ("safety_identifier", json!(long)),
    ] {
        for (path, body) in [
            ("/v1/responses", json!({"input": "hi", name: value})),
            ("/v1/chat/completions", json!({"messages": [{"role": "user", "content": "hi"}], name: value})),
        ] {
            let (status, text, _) = watched(&client, "POST", path, body.to_string()).await;
            let error: Value = serde_json::from_str(&text).unwrap();
            assert_eq!((status, &error["error"]["param"]), (400, &json!(name)), "{path} {text}");
        }
    }
}

#[tokio::test]
async fn a_short_request_for_a_long_conversation_is_no_short_one() {
    let client = client();
    let body = json!({"input": "ab ".repeat(1 << 18), "max_output_tokens": 1});
    let (status, text, _) = watched(&client, "POST", "/v1/responses", body.to_string()).await;
    assert_eq!(status, 200);
    let id = serde_json::from_str::<Value>(&text).unwrap()["id"].clone();
    let body = json!({"input": "on", "previous_response_id": id, "max_output_tokens": 1}).to_string();
    assert!(body.len() < 200);
    let (status, text, most) = watched(&client, "POST", "/v1/responses", body).await;
    assert_eq!(status, 200);
    assert!(text.len() > 100 && most <= STEPS_MAX, "{most} steps in one poll");
}

#[tokio::test]
async fn long_answers_are_written_while_they_are_read() {
    let client = client();
    let prompt = "a".repeat(1 << 20);
    let body = json!({"prompt": prompt, "return_token_strs": true});
    let (status, text, most) = watched(&client, "POST", "/tokenize", body.to_string()).await;
    let answer: Value = serde_json::from_str(&text).unwrap();
    assert_eq!((status, answer["count"].as_u64()), (200, Some(1 << 20)));
    assert_eq!(answer["tokens"].as_array().unwrap().len(), 1 << 20);
    assert_eq!(answer["token_strs"][(1 << 20) - 1], "a");
    assert!(most <= PIECE_MAX, "{most} steps in one poll");
    let (status, text, most) =
        watched(&client, "POST", "/detokenize", json!({"tokens": answer["tokens"]}).to_string()).await;
    assert_eq!((status, serde_json::from_str::<Value>(&text).unwrap()["prompt"] == *prompt), (200, true));
    assert!(most <= STEPS_MAX, "{most} steps in one poll");
    // Characters that are cut by tokens, and broken ones, come out as decoding the whole has them.
    let tokens: Vec<u32> = b"\xe2\x82\xac\xe2\x82 \"\\\n\xff".iter().map(|byte| u32::from(*byte)).collect();
    let (_, text, _) = watched(&client, "POST", "/detokenize", json!({"tokens": tokens}).to_string()).await;
    assert_eq!(serde_json::from_str::<Value>(&text).unwrap()["prompt"], "€\u{fffd} \"\\\n\u{fffd}");
    let (_, text, _) =
        watched(&client, "POST", "/v1/completions/render", r#"{"prompt": ["ab", "c"]}"#.into()).await;
    let rendered: Value = serde_json::from_str(&text).unwrap();
    assert_eq!((&rendered[0]["token_ids"], &rendered[1]["token_ids"]), (&json!([97, 98]), &json!([99])));
}

#[tokio::test]
async fn an_answer_that_is_not_streamed_is_written_off_the_loop() {
    let engine = FakeEngine::saying(&"a".repeat(3000));
    let mut app = app(engine);
    app.model.context_length = 1 << 16;
    let client = Client::with(ServerConfig::default(), app);
    let body = json!({"prompt": "hi", "max_tokens": 4000, "logprobs": 20, "n": 8});
    let (status, text, most) = watched(&client, "POST", "/v1/completions", body.to_string()).await;
    assert!(status == 200 && text.len() > 1 << 20 && most <= STEPS_MAX, "{status} {} {most}", text.len());
}

/// A model's template may make much of a short conversation: then it is rendered where that delays nobody.
#[tokio::test]
async fn what_a_template_makes_long_is_read_off_the_loop() {
    let hostile = [
        "{% for i in range(3000) %}{% for j in range(300) %}{% endfor %}{% endfor %}ok",
        "{% set ns = namespace(t='a') %}{% for i in range(18) %}{% set ns.t = ns.t ~ ns.t %}{% endfor %}{{ ns.t[:8] }}",
        "{% for i in range(6000) %}0123456789{% endfor %}",
        "{{ messages[0].content * 40000 }}",
    ];
    for source in hostile {
        let mut sources = TemplateSources::default();
        sources.add("default", source, "test");
        let mut app = app(FakeEngine::saying("ok"));
        app.model.context_length = 1 << 20;
        app.template = Some(Arc::new(
            ChatTemplate::compile(sources, common::tokenizer().special_tokens()).unwrap().unwrap(),
        ));
        let client = Client::with(ServerConfig::default(), app);
        let body = json!({"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1});
        let (status, text, steps) = in_all(&client, "POST", "/v1/chat/completions", &body).await;
        assert!(status == 200 && steps <= STEPS_MAX, "{source}: {status} {steps} {text}");
    }
}

/// Of all that a tenant has as much is worked on as is shown, and not on the loop.
#[tokio::test]
async fn lists_of_files_and_batches_are_written_off_the_loop() {
    let client = client();
    let form = |text: &str| {
        format!(
            "--b\r\nContent-Disposition: form-data; name=\"purpose\"\r\n\r\nbatch\r\n--b\r\nContent-Disposition: form-data; \
             name=\"file\"; filename=\"{}\"\r\n\r\n{text}\r\n--b--\r\n",
            "n".repeat(500)
        )
    };
    let mut id = String::new();
    for _ in 0..400 {
        let mut request = client.request("POST", "/v1/files", form("x"));
        request.headers_mut().insert("content-type", "multipart/form-data; boundary=b".parse().unwrap());
        let file: Value =
            serde_json::from_str(&common::reply(client.send(request).await).await.text).unwrap();
        id = file["id"].as_str().unwrap().to_owned();
    }
    let metadata: serde_json::Map<String, Value> =
        (0..16).map(|at| (at.to_string(), "m".repeat(512).into())).collect();
    // Each is over at once: its line is none.
    for _ in 0..100 {
        let wanted = json!({"input_file_id": id, "endpoint": "/v1/completions", "completion_window": "24h",
            "metadata": metadata});
        let (status, text, _) = watched(&client, "POST", "/v1/batches", wanted.to_string()).await;
        assert_eq!(status, 200, "{text}");
        let id = serde_json::from_str::<Value>(&text).unwrap()["id"].as_str().unwrap().to_owned();
        while !common::reply(client.send(client.request("GET", &format!("/v1/batches/{id}"), "")).await)
            .await
            .text
            .contains("failed_at\":1")
        {
            tokio::time::sleep(std::time::Duration::from_millis(1)).await;
        }
    }
    for path in ["/v1/files", "/v1/batches?limit=100", "/v1/batches?limit=1"] {
        let (status, text, steps) = in_all(&client, "GET", path, &Value::Null).await;
        assert!(status == 200 && text.len() > 8000, "{status} {}", text.len());
        assert!(steps <= PIECE_MAX, "{path}: {steps} steps for {} bytes", text.len());
    }
}

/// What a request says is looked at once, and not for each of its choices.
#[tokio::test]
async fn hundreds_of_choices_are_begun_in_a_turn() {
    let client = client();
    let stops = vec!["ab".repeat(512); 16];
    let body =
        json!({"prompt": vec!["hi"; 64], "n": 8, "max_tokens": 1, "stop": stops, "logit_bias": {"97": 1}});
    let (status, text, most) = watched(&client, "POST", "/v1/completions", body.to_string()).await;
    let choices = text.matches("\"finish_reason\"").count();
    assert!(
        status == 200 && choices == 512 && most <= STEPS_MAX,
        "{status}: {choices} choices, {most} steps in one poll"
    );
}
