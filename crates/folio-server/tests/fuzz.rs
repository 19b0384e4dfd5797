//! Bodies nobody would send: whatever arrives at any route is answered in its API's shape, never by a failure of the server.

mod common;

use std::time::Duration;

use common::{Client, FakeEngine};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use serde_json::{Value, json};

const ROUTES: &[&str] = &[
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/chat/completions/render",
    "/v1/completions/render",
    "/v1/cache/prefixes",
    "/tokenize",
    "/detokenize",
];

/// Parameters of all routes, so that every reader of every parameter is met.
fn seeds() -> Vec<Value> {
    let tool = json!({"type": "function", "function": {"name": "f", "description": "d", "strict": true,
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": false}}});
    vec![
        json!({"model": "test-model", "messages": [{"role": "system", "content": "s"}, {"role": "user", "content": [{"type": "text", "text": "hi"}]},
            {"role": "assistant", "content": null, "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}]},
            {"role": "tool", "tool_call_id": "c", "content": "1"}],
            "tools": [tool], "tool_choice": "auto", "max_tokens": 4, "n": 2, "stop": ["x"], "temperature": 1.0, "top_p": 0.5, "top_k": 4, "seed": 7,
            "stream": true, "stream_options": {"include_usage": true}, "logprobs": true, "top_logprobs": 2, "logit_bias": {"5": 1.5},
            "frequency_penalty": 0.1, "presence_penalty": 0.1, "repetition_penalty": 1.1, "min_p": 0.1, "min_tokens": 1, "stop_token_ids": [3],
            "bad_words": ["b"], "allowed_token_ids": [104, 105], "response_format": {"type": "json_object"}, "priority": 1, "user": "u",
            "chat_template_kwargs": {"mood": "x"}, "metadata": {"a": "b"}, "reasoning_effort": "low", "parallel_tool_calls": true}),
        json!({"model": "test-model", "prompt": ["ab", "cd"], "max_tokens": 3, "echo": true, "logprobs": 2, "suffix": null, "best_of": 1, "n": 1,
            "prompt_logprobs": 1, "return_token_ids": true, "add_special_tokens": true, "truncate_prompt_tokens": 5, "ignore_eos": true,
            "structured_outputs": {"regex": "[a-z]+"}, "cache": {"ttl": 60, "pin": false, "priority": 50}, "prompt_cache_key": "k"}),
        json!({"model": "test-model", "input": [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]}], "instructions": "i",
            "max_output_tokens": 5, "text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}}}, "reasoning": {"effort": "low"},
            "store": true, "background": false, "previous_response_id": null, "tools": [], "tool_choice": "none", "truncation": "disabled"}),
        json!({"model": "test-model", "max_tokens": 5, "system": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}],
            "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}], "stop_sequences": ["x"], "thinking": {"type": "enabled", "budget_tokens": 1024},
            "tools": [{"name": "f", "input_schema": {"type": "object"}}], "tool_choice": {"type": "any"}, "metadata": {"user_id": "u"}}),
        json!({"tokens": [104, 105], "token_ids": [1, 2, 3], "prompt": "hi", "pin": true, "ttl": 5, "priority": 3, "return_token_strs": true}),
    ]
}

/// What somebody may put where something else belongs.
fn odd() -> impl Strategy<Value = Value> {
    prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<u64>().prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        Just(json!(1e308)),
        Just(json!("")),
        ".{0,20}".prop_map(Value::from),
        Just(json!("x".repeat(5000))),
        Just(json!([])),
        Just(json!({})),
        Just(json!([[[[[[[[]]]]]]]])),
        Just(json!([null, 1, "a", {}])),
        Just(json!({"type": "text"})),
        Just(json!({"type": "function", "function": {"name": "f"}})),
        Just(json!((0..300).collect::<Vec<_>>())),
    ]
}

/// Every place in a value, as a path.
fn places(value: &Value, path: &mut Vec<String>, all: &mut Vec<String>) {
    all.push(path.iter().map(|part| format!("/{part}")).collect());
    let children: Vec<(String, &Value)> = match value {
        Value::Object(map) => {
            map.iter().map(|(name, child)| (name.replace('~', "~0").replace('/', "~1"), child)).collect()
        }
        Value::Array(list) => list.iter().enumerate().map(|(at, child)| (at.to_string(), child)).collect(),
        _ => Vec::new(),
    };
    for (name, child) in children {
        path.push(name);
        places(child, path, all);
        path.pop();
    }
}

#[derive(Clone, Debug)]
enum Change {
    Put {
        place: prop::sample::Index,
        value: Value,
    },
    Remove {
        place: prop::sample::Index,
    },
    /// Of another seed.
    Add {
        seed: prop::sample::Index,
        place: prop::sample::Index,
    },
}

fn change() -> impl Strategy<Value = Change> {
    let index = any::<prop::sample::Index>;
    prop_oneof![
        4 => (index(), odd()).prop_map(|(place, value)| Change::Put { place, value }),
        2 => index().prop_map(|place| Change::Remove { place }),
        1 => (index(), index()).prop_map(|(seed, place)| Change::Add { seed, place }),
    ]
}

fn changed(mut body: Value, changes: &[Change]) -> Value {
    for change in changes {
        let mut all = Vec::new();
        places(&body, &mut Vec::new(), &mut all);
        match change {
            Change::Put { place, value } => {
                if let Some(at) = body.pointer_mut(&all[place.index(all.len())]) {
                    *at = value.clone();
                }
            }
            Change::Remove { place } => {
                let path = &all[place.index(all.len())];
                let (parent, name) = path.rsplit_once('/').unwrap_or(("", ""));
                match body.pointer_mut(parent) {
                    Some(Value::Object(map)) => drop(map.remove(name)),
                    Some(Value::Array(list)) => {
                        drop(name.parse().ok().filter(|at| *at < list.len()).map(|at: usize| list.remove(at)))
                    }
                    _ => {}
                }
            }
            Change::Add { seed, place } => {
                let seeds = seeds();
                let other = &seeds[seed.index(seeds.len())];
                let names: Vec<_> = other.as_object().into_iter().flatten().collect();
                if let (Some(map), (name, value)) = (body.as_object_mut(), names[place.index(names.len())]) {
                    map.insert(name.clone(), value.clone());
                }
            }
        }
    }
    body
}

/// Sends it everywhere it could mean something; what comes back is an answer, or an error that says what is wrong.
fn check(
    runtime: &tokio::runtime::Runtime,
    client: &Client,
    route: &str,
    body: Vec<u8>,
) -> Result<(), TestCaseError> {
    let request = client.request("POST", route, body);
    let answered = runtime.block_on(async {
        tokio::time::timeout(Duration::from_secs(60), async {
            common::reply(client.send(request).await).await
        })
        .await
    });
    let reply = answered.map_err(|_| TestCaseError::fail(format!("{route} hangs")))?;
    let status = reply.status.as_u16();
    prop_assert!(status < 500, "{route}: {status} {}", reply.text);
    if status != 200 {
        let error = reply.error();
        prop_assert!(
            error["message"].as_str().is_some_and(|message| message.len() > 5),
            "{route}: {}",
            reply.text
        );
        prop_assert!(reply.text.len() < 4096, "{route}: an error of {} bytes", reply.text.len());
    }
    Ok(())
}

fn runner(cases: u32) -> TestRunner {
    TestRunner::new(Config { cases, failure_persistence: None, ..Config::default() })
}

#[test]
fn mutated_bodies_are_answered_or_refused() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let client = runtime.block_on(async { Client::new(FakeEngine::saying("ok")) });
    let strategy = (0..ROUTES.len(), 0..seeds().len(), prop::collection::vec(change(), 0..6));
    runner(3000)
        .run(&strategy, |(route, seed, changes)| {
            let body = changed(seeds()[seed].clone(), &changes).to_string();
            check(&runtime, &client, ROUTES[route], body.into_bytes())
        })
        .unwrap();
}

#[test]
fn damaged_bytes_are_refused() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let client = runtime.block_on(async { Client::new(FakeEngine::saying("ok")) });
    let damage = prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..4);
    let strategy = (0..ROUTES.len(), 0..seeds().len(), damage, any::<prop::sample::Index>(), any::<bool>());
    runner(1500)
        .run(&strategy, |(route, seed, damage, end, cut)| {
            let mut body = seeds()[seed].to_string().into_bytes();
            let len = body.len();
            damage.iter().for_each(|(at, byte)| body[at.index(len)] = *byte);
            if cut {
                body.truncate(end.index(len));
            }
            check(&runtime, &client, ROUTES[route], body)
        })
        .unwrap();
    for depth in [100, 10_000, 1_000_000] {
        let nested = format!(r#"{{"messages": {}{}}}"#, "[".repeat(depth), "]".repeat(depth));
        for route in ROUTES {
            check(&runtime, &client, route, nested.clone().into_bytes()).unwrap();
        }
    }
}
