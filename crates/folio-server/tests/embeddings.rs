//! `POST /v1/embeddings` over the real engine and a modelled device: the oracle's vectors, whatever the form and the company.

mod common;

use std::sync::Arc;

use axum::http::StatusCode;
use common::{Client, FakeEngine, VOCAB, app, facts, modelled};
use folio_engine::handle::Rejected;
use folio_engine::{FinishReason, Pooling, SchedulerConfig};
use folio_server::{App, ModelFacts, ServerConfig};
use folio_sim::oracle::expect;
use folio_sim::scenario::request;
use serde_json::{Value, json};

fn served(model: ModelFacts) -> Client {
    let config = SchedulerConfig { max_model_len: 256, max_num_batched_tokens: 64, ..Default::default() };
    let app = App { model, ..app(Arc::new(modelled(config, 256, 1))) };
    Client::with(ServerConfig::default(), app)
}

fn pooling(pooling: Pooling) -> Client {
    served(ModelFacts { pooling: Ok(pooling), ..facts() })
}

/// What the model makes of these tokens, first `dimensions` values, normalized.
fn alone(tokens: &[u32], pooling: Pooling, dimensions: usize) -> Vec<f32> {
    let mut request = request(1, tokens, 0);
    request.pooling = Some(pooling);
    let vector = expect(&request, VOCAB as usize, 256, &[]).pooled.unwrap();
    let length: f64 = vector[..dimensions].iter().map(|value| f64::from(*value).powi(2)).sum();
    vector[..dimensions].iter().map(|value| (f64::from(*value) / length.sqrt()) as f32).collect()
}

fn bytes(text: &str) -> Vec<u32> {
    text.bytes().map(u32::from).collect()
}

fn vectors(answer: &Value) -> Vec<Vec<f32>> {
    let data = answer["data"].as_array().unwrap();
    for (index, member) in data.iter().enumerate() {
        assert_eq!((&member["object"], &member["index"]), (&json!("embedding"), &json!(index)));
    }
    let numbers = |member: &Value| member["embedding"].as_array().unwrap().iter().map(number).collect();
    data.iter().map(numbers).collect()
}

fn number(value: &Value) -> f32 {
    value.to_string().parse().unwrap()
}

async fn embed(client: &Client, body: Value) -> Value {
    let reply = client.post("/v1/embeddings", &body).await;
    assert_eq!(reply.status, StatusCode::OK, "{}", reply.text);
    reply.json()
}

#[tokio::test]
async fn every_form_of_input_gives_the_models_vectors() {
    for way in [Pooling::Last, Pooling::Mean] {
        let client = pooling(way);
        let long = "the same beginning, ".repeat(8);
        for (input, expected) in [
            (json!("hello"), vec![bytes("hello")]),
            (json!(["hello", long]), vec![bytes("hello"), bytes(&long)]),
            (json!([3, 1, 4, 1, 5]), vec![vec![3, 1, 4, 1, 5]]),
            (json!([[7], [3, 1, 4]]), vec![vec![7], vec![3, 1, 4]]),
        ] {
            let tokens: usize = expected.iter().map(Vec::len).sum();
            let expected: Vec<_> = expected.iter().map(|tokens| alone(tokens, way, 3)).collect();
            // The second time some of it is cached.
            for _ in 0..2 {
                let answer = embed(&client, json!({"model": "test-model", "input": input})).await;
                assert_eq!(vectors(&answer), expected, "{input} {way:?}");
                assert_eq!(answer["usage"], json!({"prompt_tokens": tokens, "total_tokens": tokens}));
                assert_eq!((&answer["object"], &answer["model"]), (&json!("list"), &json!("test-model")));
            }
        }
    }
}

#[tokio::test]
async fn vectors_are_cut_and_encoded_as_asked() {
    let client = pooling(Pooling::Last);
    let answer = embed(&client, json!({"input": "hello", "dimensions": 2, "user": "u"})).await;
    assert_eq!(vectors(&answer), [alone(&bytes("hello"), Pooling::Last, 2)]);
    let answer =
        embed(&client, json!({"input": ["hello"], "encoding_format": "base64", "request_id": "mine"})).await;
    let text = answer["data"][0]["embedding"].as_str().unwrap();
    // Three floats are twelve bytes, so nothing is padded.
    assert!(text.len() == 16 && !text.contains('='), "{text}");
    assert_eq!(answer["id"], "embd-mine");
    let short = embed(&client, json!({"input": "hello", "truncate_prompt_tokens": 2})).await;
    assert_eq!(vectors(&short), [alone(&bytes("lo"), Pooling::Last, 3)]);
    assert_eq!(short["usage"]["prompt_tokens"], 2);
    let whole = embed(&client, json!({"input": "x".repeat(300), "truncate_prompt_tokens": -1})).await;
    assert_eq!(whole["usage"]["prompt_tokens"], 256, "an embedding needs no room for an answer");
}

/// More inputs than are with the engine at once, and than its queue holds.
#[tokio::test]
async fn a_long_list_does_not_fill_the_queue() {
    let config = SchedulerConfig {
        max_model_len: 256,
        max_num_batched_tokens: 64,
        max_queued_requests: 300,
        ..Default::default()
    };
    let client = Client::new(Arc::new(modelled(config, 64, 1)));
    let inputs: Vec<Vec<u32>> = (0..700).map(|i| vec![i % 256, i / 256, 9]).collect();
    let answer = embed(&client, json!({"input": inputs})).await;
    let expected: Vec<_> = inputs.iter().map(|tokens| alone(tokens, Pooling::Last, 3)).collect();
    assert_eq!(vectors(&answer), expected);
    assert_eq!(client.metric("vllm:prompt_tokens_total", &[]).await, 2100.0);
    assert_eq!(client.metric("vllm:request_success_total", &["stop"]).await, 700.0);
    let usage = client.get("/v1/usage").await.json();
    assert_eq!(usage["tenants"].as_array().map_or(&usage, |tenants| &tenants[0])["prompt_tokens"], 2100);
}

#[tokio::test]
async fn beside_answers_nothing_changes() {
    let client = pooling(Pooling::Mean);
    let completion = |prompt: &str| json!({"prompt": prompt, "max_tokens": 9, "temperature": 0});
    let bodies = [
        json!({"input": ["first one", "the second"]}),
        completion("first one"),
        json!({"input": "first one", "priority": 3}),
        completion("the second"),
    ];
    let (a, b, c, d) = tokio::join!(
        client.post("/v1/embeddings", &bodies[0]),
        client.post("/v1/completions", &bodies[1]),
        client.post("/v1/embeddings", &bodies[2]),
        client.post("/v1/completions", &bodies[3]),
    );
    let [first, second] = ["first one", "the second"].map(|text| alone(&bytes(text), Pooling::Mean, 3));
    assert_eq!(vectors(&a.json()), [first.clone(), second]);
    assert_eq!(vectors(&c.json()), [first]);
    for (reply, prompt) in [(b, "first one"), (d, "the second")] {
        let again = client.post("/v1/completions", &completion(prompt)).await;
        assert_eq!(reply.json()["choices"], again.json()["choices"]);
    }
}

#[tokio::test]
async fn what_cannot_be_done_is_refused_by_name() {
    let client = pooling(Pooling::Last);
    for (body, param, code) in [
        (json!({}), "input", "missing_required_parameter"),
        (json!({"input": ""}), "input", "invalid_value"),
        (json!({"input": []}), "input", "invalid_type"),
        (json!({"input": ["a", ""]}), "input", "invalid_value"),
        (json!({"input": [[1], []]}), "input", "invalid_value"),
        (json!({"input": ["a", 1]}), "input", "invalid_type"),
        (json!({"input": [VOCAB]}), "input", "invalid_value"),
        (json!({"input": "x".repeat(257)}), "input", "context_length_exceeded"),
        (json!({"input": "x".repeat(100_000)}), "input", "context_length_exceeded"),
        (json!({"input": vec!["a"; 2049]}), "input", "invalid_value"),
        (json!({"input": "a", "dimensions": 0}), "dimensions", "invalid_value"),
        (json!({"input": "a", "dimensions": 4}), "dimensions", "invalid_value"),
        (json!({"input": "a", "encoding_format": "int8"}), "encoding_format", "invalid_value"),
        (json!({"input": "a", "user": 1}), "user", "invalid_type"),
        (json!({"input": "a", "model": "other"}), "model", "model_not_found"),
        (json!({"input": "a", "normalize": false}), "normalize", "unsupported_parameter"),
        (json!({"input": "a", "cache_salt": "x"}), "cache_salt", "unsupported_parameter"),
        (json!({"input": "a", "temperature": 1}), "temperature", "unrecognized_parameter"),
        (json!({"input": "a", "truncate_prompt_tokens": 0}), "truncate_prompt_tokens", "invalid_value"),
    ] {
        let reply = client.post("/v1/embeddings", &body).await;
        let expected = if code == "model_not_found" { 404 } else { 400 };
        assert_eq!(reply.status.as_u16(), expected, "{body}: {}", reply.text);
        assert_eq!(
            (&reply.error()["param"], &reply.error()["code"]),
            (&json!(param), &json!(code)),
            "{body}"
        );
    }
    let unknown = served(ModelFacts { pooling: Err("it pools by cls_token".into()), ..facts() });
    let reply = unknown.post("/v1/embeddings", &json!({"input": "a"})).await;
    assert_eq!(reply.status, StatusCode::BAD_REQUEST);
    assert!(reply.text.contains("cls_token"), "{}", reply.text);
}

#[tokio::test]
async fn a_model_that_only_embeds_does_not_answer() {
    let client = served(ModelFacts { only_embeds: true, ..facts() });
    embed(&client, json!({"input": "a"})).await;
    for reply in [client.chat(json!({})).await, client.complete(json!({"stream": true})).await] {
        assert_eq!(reply.status, StatusCode::BAD_REQUEST);
        assert_eq!(reply.error()["code"], "only_embeddings");
    }
}

/// The first part of a list is done, the second finds the queue full.
#[tokio::test]
async fn a_list_that_is_begun_waits_for_room() {
    let engine = FakeEngine::saying("");
    let full = || Some(Rejected::QueueFull { queued_requests: 1, queued_tokens: 1, retry_after_s: 1 });
    engine.plan(|plan| {
        plan.end = Some(FinishReason::Stop);
        (plan.reject, plan.accept) = (full(), 266);
    });
    let client = Client::new(engine.clone());
    let inputs = vec![vec![7u32]; 300];
    let answer = embed(&client, json!({"input": inputs})).await;
    assert_eq!(answer["data"].as_array().unwrap().len(), 300);
    // One that is not begun is refused at once.
    engine.plan(|plan| (plan.reject, plan.accept) = (full(), 5));
    let refused = client.post("/v1/embeddings", &json!({"input": inputs})).await;
    assert_eq!(refused.status, StatusCode::TOO_MANY_REQUESTS);
    assert_eq!(refused.headers["retry-after"], "1");
}

#[tokio::test]
async fn a_client_that_leaves_cancels() {
    let engine = FakeEngine::saying("");
    engine.plan(|plan| plan.manual = true);
    let client = Client::new(engine.clone());
    let asking =
        tokio::spawn(async move { client.post("/v1/embeddings", &json!({"input": ["a", "b"]})).await });
    for _ in 0..1000 {
        if engine.live() == 2 {
            break;
        }
        tokio::time::sleep(std::time::Duration::from_millis(2)).await;
    }
    assert!(engine.live() == 2 && !engine.cancelled());
    asking.abort();
    let _ = asking.await;
    assert!(engine.cancelled());
    engine.step();
}
