//! What a request and an operator say of speculative decoding, and what a client is told of it.

mod common;

use common::{Client, FakeEngine, app, merged};
use folio_engine::Drafter;
use folio_server::{App, ModelFacts, ServerConfig};
use serde_json::{Value, json};

fn predicted(text: &str) -> Value {
    json!({"type": "content", "content": text})
}

#[tokio::test]
async fn a_prediction_and_a_number_of_drafts_reach_the_engine() {
    let engine = FakeEngine::saying("ok");
    let client = Client::new(engine.clone());
    client.chat(json!({})).await;
    assert!(engine.last().speculation.is_none(), "the operator has it off");
    client.chat(json!({"prediction": null, "speculative.n_max": null})).await;
    assert!(engine.last().speculation.is_none());
    let parts = json!({"type": "content", "content": [{"type": "text", "text": "ab"}, {"type": "text", "text": "c"}]});
    for prediction in [predicted("abc"), parts] {
        assert_eq!(client.chat(json!({"prediction": prediction})).await.status, 200);
        let speculation = engine.last().speculation.expect("it is on");
        assert_eq!(speculation.prediction(), b"abc".map(u32::from));
        assert_eq!((speculation.drafter(), speculation.most()), (Drafter::Suffix, 16));
    }
    client.complete(json!({"speculative.n_max": 4})).await;
    let speculation = engine.last().speculation.expect("it is on");
    assert_eq!((speculation.prediction().len(), speculation.most()), (0, 4));
    client.chat(json!({"speculative.n_max": 0, "prediction": predicted("abc")})).await;
    assert!(engine.last().speculation.is_none(), "off by the request's word");
}

#[tokio::test]
async fn the_operators_word_is_the_default() {
    let engine = FakeEngine::saying("ok");
    let config = ServerConfig { speculate: Some(Drafter::Ngram), ..ServerConfig::default() };
    let client = Client::with(config, app(engine.clone()));
    client.chat(json!({})).await;
    let speculation = engine.last().speculation.expect("it is on");
    assert_eq!((speculation.drafter(), speculation.most()), (Drafter::Ngram, 16));
    client.chat(json!({"speculative.n_max": 0})).await;
    assert!(engine.last().speculation.is_none());
}

#[tokio::test]
async fn a_request_chooses_among_the_drafters_that_there_are_in_every_api() {
    let hi = json!([{"role": "user", "content": "hi"}]);
    let apis = [
        ("/v1/chat/completions", json!({"messages": hi})),
        ("/v1/completions", json!({"prompt": "hi"})),
        ("/v1/responses", json!({"input": "hi"})),
        ("/v1/messages", json!({"messages": hi, "max_tokens": 4})),
    ];
    for served in
        [None, Some(Drafter::Suffix), Some(Drafter::Model), Some(Drafter::Eagle3), Some(Drafter::Mtp)]
    {
        let engine = FakeEngine::saying("ok");
        let config = ServerConfig { speculate: served, ..ServerConfig::default() };
        let client = Client::with(config, app(engine.clone()));
        let own = served.filter(|drafter| drafter.is_model());
        for (path, base) in &apis {
            let ask = async |more: Value| client.post(path, &merged(base.clone(), more)).await;
            let drafter = || engine.last().speculation.map(|speculation| speculation.drafter());
            assert_eq!(ask(json!({})).await.status, 200);
            assert_eq!(drafter(), served, "{path}");
            for drafter_asked in Drafter::ALL {
                let reply = ask(json!({"speculative.type": drafter_asked.name()})).await;
                if !drafter_asked.is_model() || own == Some(drafter_asked) {
                    assert_eq!(reply.status, 200, "{}", reply.text);
                    assert_eq!(drafter(), Some(drafter_asked), "{path}");
                    continue;
                }
                let error = reply.error();
                let param = error.get("details").unwrap_or(&error)["param"].clone();
                assert_eq!(
                    (reply.status.as_u16(), param),
                    (400, json!("speculative.type")),
                    "{}",
                    reply.text
                );
                let own = own.map_or(String::new(), |own| format!("{}, ", own.name()));
                let has = format!("this server has suffix, ngram, {own}off, none.");
                assert!(reply.text.contains(&has), "{}", reply.text);
            }
            for off in [
                json!({"speculative.type": "off"}),
                json!({"speculative.type": "none"}),
                json!({"speculative.n_max": 0}),
            ] {
                assert_eq!(ask(off).await.status, 200);
                assert_eq!(drafter(), None, "{path}");
            }
            let few =
                json!({"speculative.type": "ngram", "speculative.n_max": 2, "prediction": predicted("abc")});
            assert_eq!(ask(few).await.status, 200);
            let speculation = engine.last().speculation.expect("it is on");
            assert_eq!((speculation.drafter(), speculation.most()), (Drafter::Ngram, 2));
            assert_eq!(speculation.prediction(), b"abc".map(u32::from), "{path}");
        }
    }
    // It was the request that asked.
    let client = Client::new(FakeEngine::saying("ok"));
    let whole = client.chat(json!({"speculative.type": "ngram"})).await.json();
    assert_eq!(whole["metrics"]["speculative_decoding"]["method"], "ngram", "{whole}");
}

#[tokio::test]
async fn usage_says_what_came_of_it() {
    let client = Client::new(FakeEngine::saying("ok"));
    let usage = |body: Value| body["usage"]["completion_tokens_details"].clone();
    assert_eq!(usage(client.chat(json!({})).await.json()), Value::Null, "nothing was drafted");
    let config = ServerConfig { speculate: Some(Drafter::Suffix), ..ServerConfig::default() };
    let drafted = Client::with(config, app(FakeEngine::saying("ok")));
    assert_eq!(usage(drafted.chat(json!({})).await.json()), Value::Null, "it was not the request that asked");
    assert_ne!(usage(drafted.chat(json!({"speculative.n_max": 2})).await.json()), Value::Null);
    let whole = drafted.chat(json!({"speculative.n_max": 2})).await.json();
    let figures = json!({"method": "suffix", "num_spec_steps": 2, "num_draft_tokens": 4, "num_accepted_draft_tokens": 2,
        "draft_acceptance_rate": 0.5, "mean_acceptance_length": 2.0});
    assert_eq!(whole["metrics"], json!({"speculative_decoding": figures}));
    let whole = drafted.complete(json!({"speculative.n_max": 2})).await.json();
    assert_eq!(whole["metrics"]["speculative_decoding"], figures, "{whole}");
    assert!(
        drafted.chat(json!({})).await.json().get("metrics").is_none(),
        "it was not the request that asked"
    );
    let streamed = json!({"speculative.n_max": 2, "stream": true, "stream_options": {"include_usage": true}});
    let streamed = drafted.chat(streamed).await.text;
    assert_eq!(streamed.matches("\"speculative_decoding\"").count(), 1, "in the last chunk: {streamed}");
    let two = json!({"accepted_prediction_tokens": 4, "rejected_prediction_tokens": 4});
    assert_eq!(usage(client.chat(json!({"prediction": predicted("ok"), "n": 2})).await.json()), two);
}

#[tokio::test]
async fn what_is_no_prediction_is_refused_by_name() {
    let client = Client::new(FakeEngine::saying("ok"));
    for (prediction, name) in [
        (json!("abc"), "prediction"),
        (json!(["abc"]), "prediction"),
        (json!(7), "prediction"),
        (json!({}), "prediction.type"),
        (json!({"type": "content"}), "prediction.content"),
        (json!({"type": "text", "content": "abc"}), "prediction.type"),
        (json!({"type": "content", "content": 7}), "prediction.content"),
        (json!({"type": "content", "content": null}), "prediction.content"),
        (json!({"type": "content", "content": "a", "more": 1}), "prediction.more"),
        (json!({"type": "content", "content": ["a"]}), "prediction.content[0]"),
        (json!({"type": "content", "content": [{"type": "image_url"}]}), "prediction.content[0].type"),
        (json!({"type": "content", "content": [{"type": "text", "text": 1}]}), "prediction.content[0].text"),
        (predicted(&"a".repeat(300)), "prediction"),
        (predicted(&"a".repeat(1 << 20)), "prediction"),
    ] {
        let reply = client.chat(json!({"prediction": prediction})).await;
        assert_eq!(reply.status, 400, "{}", reply.text);
        assert_eq!(reply.json()["error"]["param"], name, "{}", reply.text);
    }
    let reply = client.chat(json!({"prediction": predicted(&"a".repeat(300))})).await;
    assert!(
        reply.text.contains("300 tokens") && reply.text.contains("context length is 256"),
        "{}",
        reply.text
    );
    let reply = client.chat(json!({"speculative.n_max": 17})).await;
    assert!(reply.text.contains("17 is not between 0 and 16"), "{}", reply.text);
    let small =
        App { model: ModelFacts { context_length: 12, ..common::facts() }, ..app(FakeEngine::saying("ok")) };
    let small = Client::with(ServerConfig::default(), small);
    let reply = small.complete(json!({"prompt": "a", "max_tokens": 2, "speculative.n_max": 13})).await;
    assert_eq!(
        (reply.status.as_u16(), &reply.error()["param"]),
        (400, &json!("speculative.n_max")),
        "{}",
        reply.text
    );
    assert!(reply.text.contains("is 13") && reply.text.contains("context length is 12"), "{}", reply.text);
    assert_eq!(
        small.complete(json!({"prompt": "a", "max_tokens": 2, "speculative.n_max": 12})).await.status,
        200
    );
    for most in [json!(17), json!(-1), json!("4"), json!(1.5)] {
        let reply = client.chat(json!({"speculative.n_max": most})).await;
        assert_eq!(reply.json()["error"]["param"], "speculative.n_max", "{}", reply.text);
    }
}
