//! The server over the real engine, scheduler and cache; only the arithmetic is modelled.

mod common;

use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use axum::body::BodyDataStream;
use common::{Client, VOCAB, app, events, merged};
use folio_engine::plan::ExecutorError;
use folio_engine::{
    EngineHandle, EngineParts, Executor, FinishReason, ModelExecutor, SchedulerConfig, StepOutput, StepPlan,
    SystemClock,
};
use folio_kv::{CacheConfig, GroupConfig, KvCache, default_policy};
use folio_server::ServerConfig;
use folio_sim::SimBackend;
use serde_json::{Value, json};

const BLOCKS: u32 = 64;

/// Lets steps happen when the test allows.
#[derive(Clone, Default)]
struct Gate(Arc<(Mutex<Option<u32>>, Condvar)>);

impl Gate {
    fn closed() -> Self {
        let gate = Self::default();
        *gate.0.0.lock().unwrap() = Some(0);
        gate
    }

    fn allow(&self, steps: u32) {
        if let Some(allowed) = &mut *self.0.0.lock().unwrap() {
            *allowed += steps;
        }
        self.0.1.notify_all();
    }

    fn open(&self) {
        *self.0.0.lock().unwrap() = None;
        self.0.1.notify_all();
    }

    fn pass(&self) {
        let waiting = self.0.1.wait_while(self.0.0.lock().unwrap(), |allowed| *allowed == Some(0));
        if let Some(allowed) = &mut *waiting.unwrap() {
            *allowed -= 1;
        }
    }
}

struct Gated(Gate, ModelExecutor);

impl Executor for Gated {
    fn begin(&mut self, plan: &StepPlan) -> Result<(), ExecutorError> {
        self.0.pass();
        self.1.begin(plan)
    }

    fn finish(&mut self) -> Result<&StepOutput, ExecutorError> {
        self.1.finish()
    }
}

fn engine(gate: Gate, change: impl FnOnce(&mut SchedulerConfig)) -> EngineHandle {
    engine_with(gate, change, &[])
}

/// With a window group for each (blocks, window).
fn engine_with(
    gate: Gate,
    change: impl FnOnce(&mut SchedulerConfig),
    windows: &[(u32, u32)],
) -> EngineHandle {
    let mut config = SchedulerConfig {
        max_model_len: 256,
        max_num_seqs: 16,
        max_num_batched_tokens: 64,
        ..Default::default()
    };
    change(&mut config);
    let window = |(blocks, tokens): &(u32, u32)| GroupConfig::window(*tokens, *blocks, 16, 1);
    let windows: Vec<GroupConfig> = windows.iter().map(window).collect();
    let backend = SimBackend::new(VOCAB as usize, BLOCKS as usize, 16, 64, 64).with_groups(&windows);
    let geometry = CacheConfig { blocks: BLOCKS, block_tokens: 16, bytes_per_block: 1 };
    let cache = KvCache::with_groups(geometry, &windows, default_policy(0.01));
    folio_engine::start(EngineParts {
        config,
        cache,
        executor: Box::new(Gated(gate, ModelExecutor::new(Box::new(backend), VOCAB as usize, 64, 64))),
        clock: Arc::new(SystemClock::new()),
        vocab: VOCAB,
        tiers: Vec::new(),
        events: None,
    })
    .unwrap()
}

fn client(engine: &EngineHandle) -> Client {
    Client::new(Arc::new(engine.clone()))
}

async fn until(mut condition: impl FnMut() -> bool) {
    for _ in 0..5_000 {
        if condition() {
            return;
        }
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    panic!("what was waited for never happened");
}

fn text(reply: &Value) -> String {
    reply["choices"][0]["text"].as_str().unwrap().to_owned()
}

#[tokio::test]
async fn tenants_share_nothing_and_cached_tokens_are_exact() {
    let engine = engine(Gate::default(), |_| ());
    let config = ServerConfig { api_keys: vec!["k1".into(), "k2".into()], ..Default::default() };
    let client = Client::with(config, app(Arc::new(engine.clone())));
    let prompt = "x".repeat(100);
    let cached = async |key: &str| {
        let reply =
            client.key(key).complete(json!({"prompt": prompt, "temperature": 0, "max_tokens": 4})).await;
        let usage = reply.json()["usage"].clone();
        assert_eq!(usage["prompt_tokens"], 100);
        (usage["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap(), text(&reply.json()))
    };
    let (first, said) = cached("k1").await;
    assert_eq!(first, 0);
    let (again, same) = cached("k1").await;
    assert!((96..100).contains(&again), "six full blocks at least, but never the last token: {again}");
    assert_eq!(same, said, "the same tokens from the cache");
    let (other, same) = cached("k2").await;
    assert_eq!(other, 0, "another tenant's cache is out of reach");
    assert_eq!(same, said);
    assert_eq!(client.metric("vllm:prompt_tokens_cached_total", &[]).await, again as f64);
    assert_eq!(client.metric("vllm:prefix_cache_hits_total", &[]).await, again as f64);
    assert_eq!(client.metric("vllm:prefix_cache_queries_total", &[]).await, 300.0);
}

#[tokio::test]
async fn routers_see_tokens_and_load() {
    let gate = Gate::closed();
    let engine = engine(gate.clone(), |_| ());
    let client = client(&engine);
    let body = json!({"messages": [{"role": "user", "content": "hello"}], "max_tokens": 7});
    let rendered = client.post("/v1/chat/completions/render", &body).await.json();
    let tokens =
        client.post("/tokenize", &json!({"messages": body["messages"]})).await.json()["tokens"].clone();
    assert_eq!((&rendered["token_ids"], &rendered["max_tokens"]), (&tokens, &json!(7)));
    let list = client.post("/v1/completions/render", &json!({"prompt": [[5, 6], [1, 2, 3]]})).await.json();
    assert_eq!(list[0]["token_ids"], json!([5, 6]));
    assert_eq!(list[1]["token_ids"], json!([1, 2, 3]));
    let wrong = client.post("/v1/chat/completions/render", &json!({"messages": [], "nonsense": 1})).await;
    assert_eq!(wrong.status, 400);

    let idle = client.get("/v1/loads").await.json();
    assert_eq!(
        (&idle["loads"][0]["num_total_reqs"], &idle["loads"][0]["num_used_tokens"]),
        (&json!(0), &json!(0))
    );
    assert_eq!(client.get("/load").await.json(), json!({"server_load": 0}));
    let busy = client.clone();
    let running = tokio::spawn(async move {
        busy.complete(json!({"prompt": "x".repeat(40), "max_tokens": 9, "ignore_eos": true})).await
    });
    gate.allow(2);
    until(|| engine.stats().running == 1).await;
    let load = client.get("/v1/loads").await.json()["loads"][0].clone();
    assert_eq!((&load["num_running_reqs"], &load["max_total_num_tokens"]), (&json!(1), &json!(BLOCKS * 16)));
    assert!(load["num_used_tokens"].as_u64().unwrap() >= 40, "{load}");
    assert_eq!(client.get("/load").await.json(), json!({"server_load": 1}));
    gate.open();
    assert_eq!(running.await.unwrap().status, 200);
}

#[tokio::test]
async fn concurrent_streams_say_what_each_says_alone() {
    let solo = client(&engine(Gate::default(), |_| ()));
    let crowd = client(&engine(Gate::default(), |_| ()));
    let body = |index: u32| {
        json!({"prompt": format!("prompt number {index}").repeat(1 + index as usize % 5), "max_tokens": 24,
            "temperature": if index.is_multiple_of(2) { 0.0 } else { 1.0 }, "seed": index, "ignore_eos": true})
    };
    let mut tasks = Vec::new();
    for index in 0..24 {
        let crowd = crowd.clone();
        tasks.push(tokio::spawn(async move {
            let events = crowd.complete(merged(body(index), json!({"stream": true}))).await.events();
            assert_eq!(events.last().unwrap(), "[DONE]");
            events.iter().filter_map(|event| event["choices"][0]["text"].as_str()).collect::<String>()
        }));
    }
    for (index, task) in tasks.into_iter().enumerate() {
        let alone = text(&solo.complete(body(index as u32)).await.json());
        assert_eq!(task.await.unwrap(), alone, "request {index}");
    }
}

#[tokio::test]
async fn a_vanished_client_frees_its_blocks_within_one_step() {
    let gate = Gate::closed();
    let engine = engine(gate.clone(), |_| ());
    let client = client(&engine);
    let body = json!({"prompt": "some prompt", "stream": true, "max_tokens": 100, "ignore_eos": true});
    let response = client.send(client.request("POST", "/v1/completions", body.to_string())).await;
    let stream: BodyDataStream = response.into_body().into_data_stream();
    gate.allow(3);
    until(|| engine.stats().counters.generation_tokens >= 3 && engine.stats().cache.active_blocks > 0).await;
    drop(stream);
    // The step in progress ends; no other is allowed.
    gate.allow(1);
    until(|| engine.stats().cache.active_blocks == 0).await;
    assert!(engine.stats().counters.steps <= 4 + 1, "{:?}", engine.stats().counters);
    assert_eq!(engine.stats().counters.finished[FinishReason::Cancelled as usize], 1);
}

#[tokio::test]
async fn a_stop_string_ends_its_choice_alone() {
    let engine = engine(Gate::default(), |_| ());
    let client = client(&engine);
    let base =
        json!({"prompt": "p", "n": 3, "max_tokens": 60, "seed": 5, "ignore_eos": true, "temperature": 1});
    let free: Vec<String> = {
        let reply = client.complete(base.clone()).await.json();
        reply["choices"].as_array().unwrap().iter().map(|c| c["text"].as_str().unwrap().to_owned()).collect()
    };
    // A piece of the second choice's text that the others do not have.
    let characters: Vec<char> = free[1].chars().collect();
    let stop = characters.windows(2).skip(5).map(|pair| pair.iter().collect::<String>());
    let stop = { stop }
        .find(|stop| !stop.contains('\u{fffd}') && !free[0].contains(stop) && !free[2].contains(stop));
    let stop = stop.expect("random text has such a pair");
    let reply = client.complete(merged(base, json!({"stop": stop}))).await.json();
    let choices = reply["choices"].as_array().unwrap();
    assert_eq!(choices[0]["text"], free[0]);
    assert_eq!(choices[2]["text"], free[2]);
    assert_eq!(choices[1]["text"], free[1][..free[1].find(&stop).unwrap()]);
    assert_eq!((&choices[1]["finish_reason"], &choices[1]["stop_reason"]), (&json!("stop"), &json!(stop)));
    assert_eq!(choices[0]["finish_reason"], "length");
    until(|| engine.stats().cache.active_blocks == 0).await;
}

#[tokio::test]
async fn a_full_queue_is_429_and_says_when_to_retry() {
    let gate = Gate::closed();
    let engine = engine(gate.clone(), |config| (config.max_queued_requests, config.max_num_seqs) = (2, 1));
    let client = client(&engine);
    let mut tasks = Vec::new();
    for _ in 0..8 {
        let client = client.clone();
        tasks.push(tokio::spawn(async move { client.complete(json!({"max_tokens": 3})).await }));
    }
    until(|| tasks.iter().filter(|task| task.is_finished()).count() >= 5).await;
    gate.open();
    let (mut served, mut refused) = (0, 0);
    for task in tasks {
        let reply = task.await.unwrap();
        match reply.status.as_u16() {
            200 => served += 1,
            429 => {
                refused += 1;
                let seconds: u32 = reply.headers["retry-after"].to_str().unwrap().parse().unwrap();
                assert!((1..=120).contains(&seconds));
                assert_eq!(reply.error()["code"], "queue_full");
            }
            other => panic!("{other}: {}", reply.text),
        }
    }
    assert!(served >= 2 && refused >= 5 && served + refused == 8, "{served} {refused}");
    assert_eq!(client.complete(json!({"max_tokens": 3})).await.status, 200, "and then there is room");
}

#[tokio::test]
async fn the_engines_counters_agree_with_the_servers() {
    let engine = engine(Gate::default(), |_| ());
    let client = client(&engine);
    for index in 0..6 {
        let prompt = "shared beginning, long enough for a block ".to_owned() + &index.to_string();
        let body = json!({"prompt": prompt, "n": 1 + index % 3, "max_tokens": 5 + index, "logprobs": 2});
        let reply = client.complete(body).await.json();
        let usage = &reply["usage"];
        let tokens: usize = reply["choices"]
            .as_array()
            .unwrap()
            .iter()
            .map(|choice| choice["logprobs"]["tokens"].as_array().unwrap().len())
            .sum();
        assert_eq!(usage["completion_tokens"], tokens, "one log probability for each counted token");
    }
    // The engine publishes its figures after it has delivered the last event.
    until(|| !engine.stats().busy).await;
    let counters = engine.stats().counters;
    assert_eq!(client.metric("vllm:prompt_tokens_total", &[]).await, counters.prompt_tokens as f64);
    assert_eq!(
        client.metric("vllm:prompt_tokens_cached_total", &[]).await,
        counters.cached_prompt_tokens as f64
    );
    assert_eq!(client.metric("vllm:generation_tokens_total", &[]).await, counters.generation_tokens as f64);
    assert_eq!(client.metric("vllm:iteration_tokens_total_count", &[]).await, counters.steps as f64);
    assert_eq!(client.metric("folio:kv_cache_blocks", &["active"]).await, 0.0);
    assert!(counters.cached_prompt_tokens > 0);
}

#[tokio::test]
async fn cache_groups_are_told_apart_where_there_are_several() {
    let one = client(&engine(Gate::default(), |_| ()));
    assert!(!one.get("/metrics").await.text.contains("group="));
    let engine = engine_with(Gate::default(), |_| (), &[(12, 32)]);
    let client = client(&engine);
    client.complete(json!({"prompt": "x".repeat(150), "max_tokens": 60, "ignore_eos": true})).await;
    until(|| !engine.stats().busy).await;
    let stats = engine.stats().cache;
    for (group, blocks) in [("group=\"0\"", BLOCKS), ("group=\"1\"", 12)] {
        let mut sum = 0.0;
        for state in ["free", "cached", "active"] {
            sum += client.metric("folio:kv_cache_blocks", &[group, state]).await;
        }
        assert_eq!(sum, f64::from(blocks));
    }
    let evictions = client.metric("folio:kv_cache_evictions_total", &["group=\"1\""]).await;
    assert_eq!(evictions, stats.windows()[0].evictions as f64);
    assert!(evictions > 0.0);
    assert_eq!(
        client.metric("folio:kv_cache_evictions_total", &["group=\"0\""]).await,
        stats.evictions as f64
    );
}

#[tokio::test]
async fn prompt_log_probabilities_and_echo() {
    let client = client(&engine(Gate::default(), |_| ()));
    let body = json!({"prompt": "hello", "echo": true, "logprobs": 2, "max_tokens": 2, "ignore_eos": true});
    let whole = client.complete(body.clone()).await.json();
    let lp = &whole["choices"][0]["logprobs"];
    assert_eq!(lp["tokens"].as_array().unwrap().len(), 7);
    assert!(lp["token_logprobs"][0].is_null());
    assert!(lp["token_logprobs"].as_array().unwrap()[1..].iter().all(|lp| lp.as_f64().unwrap() <= 0.0));
    let streamed = client.complete(merged(body, json!({"stream": true, "seed": 1}))).await.events();
    assert_eq!(streamed[0]["choices"][0]["logprobs"]["tokens"].as_array().unwrap().len(), 5);
    assert_eq!(streamed[0]["choices"][0]["logprobs"]["token_logprobs"][1], lp["token_logprobs"][1]);
    let reply = client.chat(json!({"prompt_logprobs": 1, "max_tokens": 1})).await.json();
    assert_eq!(reply["prompt_logprobs"].as_array().unwrap().len(), 20);
}

#[tokio::test]
async fn a_deadline_ends_a_request_with_504() {
    let gate = Gate::closed();
    let engine = engine(gate.clone(), |_| ());
    // Long enough for the engine to begin.
    let timeout = Duration::from_millis(500);
    let limits = folio_server::Limits { request_timeout: Some(timeout), ..Default::default() };
    let client = Client::with(ServerConfig { limits, ..Default::default() }, app(Arc::new(engine.clone())));
    let asking = tokio::spawn({
        let client = client.clone();
        async move { client.complete(json!({"max_tokens": 50, "ignore_eos": true})).await }
    });
    until(|| engine.stats().busy).await;
    tokio::time::sleep(timeout + Duration::from_millis(10)).await;
    gate.open();
    let reply = asking.await.unwrap();
    assert_eq!((reply.status.as_u16(), &reply.error()["code"]), (504, &json!("deadline_exceeded")));
    assert!(events("").is_empty());
}
