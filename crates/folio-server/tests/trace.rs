//! `GET /v1/trace` over the real engine: what is recorded is what was served, says nothing of texts, and comes out the same when it is run
//! again.

mod common;

use std::sync::Arc;
use std::time::Duration;

use common::{Client, app, modelled};
use folio_engine::{Micros, SchedulerConfig};
use folio_kv::CacheConfig;
use folio_server::ServerConfig;
use folio_sim::CostModel;
use folio_sim::recorded::RecordedTrace;
use folio_sim::replay::{ReplayConfig, replay_in_full};
use folio_sim::retention::Policy;
use serde_json::{Value, json};

fn limits() -> SchedulerConfig {
    SchedulerConfig { max_model_len: 512, max_num_batched_tokens: 64, ..Default::default() }
}

/// Records while `run` goes on, which has a second.
async fn record(client: &Client, run: impl Future<Output = ()>) -> String {
    let recording = client.get("/v1/trace?seconds=1");
    let later = async {
        tokio::time::sleep(Duration::from_millis(100)).await;
        run.await;
    };
    let (reply, ()) = tokio::join!(recording, later);
    assert_eq!(reply.status.as_u16(), 200, "{}", reply.text);
    reply.text
}

fn number(of: &Value, path: &str) -> u64 {
    of.pointer(path).and_then(Value::as_u64).unwrap_or_else(|| panic!("{path} is no number: {of:#}"))
}

#[tokio::test]
async fn what_was_recorded_comes_out_the_same_in_the_simulator() {
    let engine = modelled(limits(), 64, 1 << 20);
    let client = Client::new(Arc::new(engine.clone()));
    let mut told = Vec::new();
    let text = record(&client, async {
        let first = "a secret that nobody else knows, and which is long enough for some blocks ".repeat(2);
        let other = "another conversation with words of its own. ".repeat(3);
        for (prompt, n) in [(&first, 1), (&first, 1), (&other, 2), (&first, 1), (&other, 1)] {
            let reply = client.complete(json!({"prompt": prompt, "max_tokens": 20, "n": n})).await.json();
            told.push((reply["usage"].clone(), n));
        }
        // A second turn: what was said is part of the prompt.
        let said = client.complete(json!({"prompt": first, "max_tokens": 40, "seed": 5})).await.json();
        let turn =
            format!("{first}{} And on it goes.", said["choices"][0]["text"].as_str().unwrap_or_default());
        told.push((said["usage"].clone(), 1));
        let reply = client.complete(json!({"prompt": turn, "max_tokens": 5})).await.json();
        told.push((reply["usage"].clone(), 1));
    })
    .await;

    // Nothing of a text.
    for word in ["secret", "nobody", "conversation", "And on"] {
        assert!(!text.contains(word), "{word}");
    }
    let trace = RecordedTrace::read(text.as_bytes()).expect("a recording");
    assert_eq!((trace.about.unfinished, trace.about.left_out), (0, 0));
    assert_eq!(trace.requests.len() as u64, told.iter().map(|(_, n)| n).sum::<u64>());
    let recorded = |figure: fn(&folio_sim::recorded::RecordedRequest) -> u32| -> u64 {
        trace.requests.iter().map(|request| u64::from(figure(request))).sum()
    };
    let usage = |path: &str| told.iter().map(|(usage, _)| number(usage, path)).sum::<u64>();
    assert_eq!(recorded(|request| request.output_tokens), usage("/completion_tokens"));
    assert!(recorded(|request| request.cached_tokens) > 0);

    let cache = CacheConfig { blocks: 64, block_tokens: 16, bytes_per_block: 1 << 20 };
    // Each is over before the next comes, as it was.
    let cost = CostModel { step_us: 1.0, token_us: 0.0, context_us_per_1k: 0.0 };
    let config = ReplayConfig {
        policy: Policy::Folio,
        depth_cost: 0.01,
        ..ReplayConfig::new(limits(), cache, cost, 512)
    };
    let replay = replay_in_full(&trace.traffic(), &config).expect("valid limits");
    assert_eq!(replay.report.requests, trace.requests.len() as u64);
    assert_eq!(replay.report.generated_tokens, recorded(|request| request.output_tokens));
    for (request, served) in trace.requests.iter().zip(&replay.served) {
        let served = served.expect("it ran");
        let (was, is) = (request.cached_tokens, served.cached_tokens);
        // Answers of one request share its prompt, which counts once there and is found here.
        let twin = trace.requests.iter().filter(|other| other.arrived == request.arrived).count() > 1;
        assert!(
            was / 16 == is / 16 || twin,
            "{was} of {} tokens were cached, {is} are",
            request.prompt_tokens
        );
    }
    engine.stop();
}

#[tokio::test]
async fn a_recording_opens_in_perfetto() {
    let engine = modelled(limits(), 64, 1 << 20);
    let client = Client::new(Arc::new(engine.clone()));
    let text = record(&client, async {
        client.complete(json!({"prompt": "x".repeat(100), "max_tokens": 20})).await;
    })
    .await;
    let file: Value = serde_json::from_str(&text).expect("JSON");
    let events = file["traceEvents"].as_array().expect("Chrome's trace events");
    let of = |category: &'static str| events.iter().filter(move |event| event["cat"] == category);
    // Every event has what its phase needs.
    for event in events {
        assert!(event["name"].is_string() && event["pid"].is_u64() && event["tid"].is_u64(), "{event}");
        match event["ph"].as_str() {
            Some("X") => assert!(event["ts"].is_u64() && event["dur"].is_u64(), "{event}"),
            Some("C") => assert!(event["ts"].is_u64() && event["args"].is_object(), "{event}"),
            Some("M") => assert!(event["args"]["name"].is_string(), "{event}"),
            other => panic!("{other:?}: {event}"),
        }
    }
    let request = of("folio.request").next().expect("a request");
    let names: Vec<&str> = of("folio.phase").filter_map(|event| event["name"].as_str()).collect();
    assert_eq!(names, ["queue", "prefill", "decode"]);
    // On its track, and within it.
    let span = |event: &Value| (number(event, "/ts"), number(event, "/ts") + number(event, "/dur"));
    let (from, to) = span(request);
    for phase in of("folio.phase") {
        assert_eq!((&phase["pid"], &phase["tid"]), (&request["pid"], &request["tid"]));
        assert!(span(phase).0 >= from && span(phase).1 <= to, "{phase}");
    }
    let steps: u64 = of("folio.steps")
        .flat_map(|event| event["args"].as_object().into_iter().flat_map(|kinds| kinds.values()))
        .map(|kind| number(kind, "/steps"))
        .sum();
    assert_eq!(steps, engine.stats().counters.steps);
    engine.stop();
}

#[tokio::test]
async fn it_is_the_operators_and_one_at_a_time() {
    let engine = modelled(limits(), 64, 1 << 20);
    let admin = folio_server::AdminConfig { listen: ([127, 0, 0, 1], 0).into(), keys: vec!["op".into()] };
    let config = ServerConfig { api_keys: vec!["k1".into()], admin: Some(admin), ..Default::default() };
    let client = Client::with(config, app(Arc::new(engine.clone())));
    assert_eq!(client.get("/v1/trace").await.status.as_u16(), 401);
    let refused = client.key("k1").get("/v1/trace").await;
    assert_eq!(
        (refused.status.as_u16(), &refused.json()["error"]["code"]),
        (403, &json!("insufficient_scope"))
    );
    assert_eq!(client.admin("k1").get("/v1/trace").await.status.as_u16(), 401);
    let operator = client.admin("op");
    for wrong in ["seconds=0", "seconds=601", "seconds=x", "minutes=1", "seconds=1&seconds=2"] {
        assert_eq!(operator.get(&format!("/v1/trace?{wrong}")).await.status.as_u16(), 400, "{wrong}");
    }
    let text = {
        let (first, second) = tokio::join!(operator.get("/v1/trace?seconds=1"), async {
            tokio::time::sleep(Duration::from_millis(200)).await;
            client.key("k1").complete(json!({"prompt": "x".repeat(40), "max_tokens": 5})).await;
            operator.get("/v1/trace?seconds=1").await
        });
        assert_eq!((second.status.as_u16(), &second.json()["error"]["code"]), (409, &json!("recording")));
        first.text
    };
    assert!(!text.contains("key:1"), "tenants are numbers");
    let trace = RecordedTrace::read(text.as_bytes()).expect("a recording");
    assert_eq!((trace.requests.len(), trace.requests[0].tenant), (1, 0));
    assert!(trace.requests[0].arrived >= Micros(100_000));

    // Whoever goes away ends it.
    let gone = tokio::time::timeout(Duration::from_millis(100), operator.get("/v1/trace?seconds=600"));
    assert!(gone.await.is_err());
    assert_eq!(operator.get("/v1/trace?seconds=1").await.status.as_u16(), 200);
    engine.stop();
}
