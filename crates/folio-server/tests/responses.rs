//! `/v1/responses`: items in and out, events, what is kept and for whom.

mod common;

use std::future::poll_fn;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use common::{Client, FakeEngine, app, merged, tool_app};
use folio_engine::FinishReason;
use folio_server::{App, Parsers, ServerConfig};
use folio_text::{ChatTemplate, ReasoningFormat, TemplateSources};
use futures_core::Stream;
use serde_json::{Value, json};

const SAID: &str =
    "<think>hm</think>It is <tool_call>\n{\"name\": \"add\", \"arguments\": {\"a\": 1}}\n</tool_call>";

fn client(engine: &Arc<FakeEngine>) -> Client {
    with(engine, ServerConfig::default())
}

fn with(engine: &Arc<FakeEngine>, config: ServerConfig) -> Client {
    Client::with(config, tool_app(engine.clone(), 4096))
}

async fn create(client: &Client, body: Value) -> Value {
    let reply = client.post("/v1/responses", &merged(json!({"input": "hi"}), body)).await;
    assert_eq!(reply.status, 200, "{}", reply.text);
    reply.json()
}

fn add() -> Value {
    json!({"type": "function", "name": "add", "description": "Adds", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}})
}

fn prompt(engine: &FakeEngine) -> String {
    let special = |id: u32| if id >= 256 { b'$' } else { id as u8 };
    String::from_utf8(engine.last().prompt.iter().map(|id| special(*id)).collect()).unwrap()
}

#[tokio::test]
async fn an_answer_is_a_list_of_items() {
    let engine = FakeEngine::saying(SAID);
    let client = client(&engine);
    let response = create(&client, json!({"tools": [add()], "instructions": "Be brief.", "metadata": {"k": "v"}, "max_output_tokens": 500})).await;
    assert_eq!(
        (&response["object"], &response["status"], &response["error"]),
        (&json!("response"), &json!("completed"), &Value::Null)
    );
    let kinds: Vec<&str> =
        response["output"].as_array().unwrap().iter().map(|item| item["type"].as_str().unwrap()).collect();
    assert_eq!(kinds, ["reasoning", "message", "function_call"]);
    assert_eq!(response["output"][0]["content"], json!([{"type": "reasoning_text", "text": "hm"}]));
    assert_eq!(response["output"][1]["content"][0]["text"], "It is ");
    let call = &response["output"][2];
    assert_eq!((&call["name"], &call["status"]), (&json!("add"), &json!("completed")));
    assert_eq!(serde_json::from_str::<Value>(call["arguments"].as_str().unwrap()).unwrap(), json!({"a": 1}));
    assert_eq!((&response["metadata"], &response["instructions"]), (&json!({"k": "v"}), &json!("Be brief.")));
    assert_eq!(response["tools"], json!([add()]));
    let usage = &response["usage"];
    assert_eq!(
        usage["total_tokens"].as_u64(),
        Some(usage["input_tokens"].as_u64().unwrap() + usage["output_tokens"].as_u64().unwrap())
    );
    assert!(
        prompt(&engine).contains("Be brief.") && prompt(&engine).contains("\"name\": \"add\""),
        "{}",
        prompt(&engine)
    );
}

#[tokio::test]
async fn a_streams_last_event_is_the_whole_answer() {
    let engine = FakeEngine::saying(SAID);
    let client = client(&engine);
    let body = json!({"input": "hi", "tools": [add()], "stream": true});
    let reply = client.post("/v1/responses", &body).await;
    let events: Vec<Value> = reply
        .text
        .split("\n\n")
        .filter(|event| !event.is_empty())
        .map(|event| {
            let (name, data) = event.split_once('\n').unwrap();
            let data: Value = serde_json::from_str(data.strip_prefix("data: ").unwrap()).unwrap();
            assert_eq!(name.strip_prefix("event: "), data["type"].as_str());
            data
        })
        .collect();
    for (index, event) in events.iter().enumerate() {
        assert_eq!(event["sequence_number"], index);
    }
    let kinds: Vec<&str> = events.iter().map(|event| event["type"].as_str().unwrap()).collect();
    assert_eq!(kinds[..2], ["response.created", "response.in_progress"]);
    assert_eq!(*kinds.last().unwrap(), "response.completed");
    let (mut items, mut open) = (Vec::new(), None);
    for event in &events {
        let kind = event["type"].as_str().unwrap();
        match kind {
            "response.output_item.added" => {
                assert!(open.is_none());
                open = Some((event["item"].clone(), String::new()));
                assert_eq!(event["output_index"], items.len());
            }
            "response.output_item.done" => {
                let (begun, text): (Value, String) = open.take().unwrap();
                let item = &event["item"];
                assert_eq!(
                    (&begun["id"], &begun["status"], &item["status"]),
                    (&item["id"], &json!("in_progress"), &json!("completed"))
                );
                let said = item["content"][0]["text"].as_str().or(item["arguments"].as_str()).unwrap();
                assert_eq!(said, text);
                items.push(item.clone());
            }
            _ if kind.ends_with(".delta") => {
                let (item, text) = open.as_mut().unwrap();
                assert_eq!(event["item_id"], item["id"]);
                text.push_str(event["delta"].as_str().unwrap());
            }
            _ => {}
        }
    }
    let last = &events.last().unwrap()["response"];
    assert_eq!(last["output"], json!(items));
    let stored = client.get(&format!("/v1/responses/{}", last["id"].as_str().unwrap())).await.json();
    assert_eq!(stored, *last, "what is kept is what was answered");
    let whole = create(&client, json!({"tools": [add()]})).await;
    let texts = |response: &Value| -> Vec<Value> {
        response["output"]
            .as_array()
            .unwrap()
            .iter()
            .map(|item| json!([item["type"], item["content"], item["arguments"]]))
            .collect()
    };
    assert_eq!(texts(&whole), texts(last));
}

#[tokio::test]
async fn a_conversation_goes_on_from_a_response() {
    let engine = FakeEngine::saying(SAID);
    let client = client(&engine);
    let first =
        create(&client, json!({"input": "one plus nothing", "tools": [add()], "instructions": "Only now."}))
            .await;
    let call = first["output"][2]["call_id"].clone();
    let body = json!({"previous_response_id": first["id"], "tools": [add()], "input": [{"type": "function_call_output", "call_id": call, "output": "42"}]});
    let second = create(&client, body.clone()).await;
    assert_eq!(second["previous_response_id"], first["id"]);
    let continued = prompt(&engine);
    for part in ["one plus nothing", "It is", "\"a\": 1", "42"] {
        assert!(continued.contains(part), "{part}: {continued}");
    }
    assert!(!continued.contains("Only now."), "instructions are not carried over");
    // The same conversation, sent as items, is the same prompt.
    let items: Vec<Value> =
        [json!({"role": "user", "content": [{"type": "input_text", "text": "one plus nothing"}]})]
            .into_iter()
            .chain(first["output"].as_array().unwrap().iter().cloned())
            .chain(body["input"].as_array().unwrap().iter().cloned())
            .collect();
    create(&client, json!({"tools": [add()], "input": items})).await;
    assert_eq!(prompt(&engine), continued);
    let gone =
        client.post("/v1/responses", &json!({"input": "x", "previous_response_id": "resp_none"})).await;
    assert_eq!((gone.status.as_u16(), &gone.error()["param"]), (404, &json!("previous_response_id")));
    let unkept = create(&client, json!({"store": false})).await;
    assert_eq!(client.get(&format!("/v1/responses/{}", unkept["id"].as_str().unwrap())).await.status, 404);
}

#[tokio::test]
async fn responses_are_reached_by_their_own_key_only() {
    let engine = FakeEngine::saying("ok");
    let config = ServerConfig { api_keys: vec!["k1".into(), "k2".into()], ..Default::default() };
    let client = with(&engine, config);
    let (mine, other) = (client.key("k1"), client.key("k2"));
    let id = create(&mine, json!({})).await["id"].as_str().unwrap().to_owned();
    let path = format!("/v1/responses/{id}");
    assert_eq!(mine.get(&path).await.status, 200);
    let foreign = other.get(&path).await;
    let never = other.get("/v1/responses/resp_never").await;
    assert_eq!(foreign.status, 404);
    assert_eq!(
        foreign.text.replace(&id, "ID"),
        never.text.replace("resp_never", "ID"),
        "as if it had never been"
    );
    let continued = other.post("/v1/responses", &json!({"input": "x", "previous_response_id": id})).await;
    assert_eq!(continued.status, 404);
    for request in [("DELETE", path.clone()), ("POST", format!("{path}/cancel"))] {
        let response = other.send(other.request(request.0, &request.1, "{}")).await;
        assert_eq!(response.status(), 404);
    }
    let deleted = mine.send(mine.request("DELETE", &path, "")).await;
    assert_eq!((deleted.status().as_u16(), mine.get(&path).await.status.as_u16()), (200, 404));
}

#[tokio::test]
async fn background_responses_are_asked_for_later_or_cancelled() {
    let engine = FakeEngine::saying("ok");
    let client = client(&engine);
    let begun = create(&client, json!({"background": true})).await;
    assert_eq!(begun["status"], "in_progress");
    let path = format!("/v1/responses/{}", begun["id"].as_str().unwrap());
    let until = async |status: &str| {
        for _ in 0..500 {
            let now = client.get(&path).await.json();
            if now["status"] == status {
                return now;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        panic!("never {status}");
    };
    let done = until("completed").await;
    assert_eq!(done["output"][0]["content"][0]["text"], "ok");
    let late = client.post(&format!("{path}/cancel"), &json!({})).await.json();
    assert_eq!(late["status"], "completed", "what is over stays as it is");

    engine.plan(|plan| plan.manual = true);
    let begun = create(&client, json!({"background": true})).await;
    let path = format!("/v1/responses/{}", begun["id"].as_str().unwrap());
    let cancelled = client.post(&format!("{path}/cancel"), &json!({})).await.json();
    assert_eq!(cancelled["status"], "cancelled");
    assert!(engine.cancelled());
    assert_eq!(client.get(&path).await.json()["status"], "cancelled");
    let foreground = client.clone();
    engine.plan(|plan| plan.manual = false);
    let id = create(&foreground, json!({})).await["id"].as_str().unwrap().to_owned();
    assert_eq!(foreground.post(&format!("/v1/responses/{id}/cancel"), &json!({})).await.status, 400);
}

#[tokio::test]
async fn a_stream_from_the_background_goes_on_without_its_reader_and_is_read_again() {
    let engine = FakeEngine::saying("a longer answer");
    engine.plan(|plan| plan.manual = true);
    let config = ServerConfig { api_keys: vec!["k1".into(), "k2".into()], ..Default::default() };
    let client = with(&engine, config);
    let (mine, other) = (client.key("k1"), client.key("k2"));
    let body = json!({"input": "hi", "background": true, "stream": true}).to_string();
    let response = mine.send(mine.request("POST", "/v1/responses", body)).await;
    assert_eq!(response.status(), 200);
    engine.step();
    let mut body = response.into_body().into_data_stream();
    let first = poll_fn(|cx| Pin::new(&mut body).poll_next(cx)).await.unwrap().unwrap();
    let created = named_events(std::str::from_utf8(&first).unwrap());
    let id = created[0]["response"]["id"].as_str().unwrap().to_owned();
    // The client leaves before much is said.
    drop(body);
    let mut steps = 0;
    while engine.live() > 0 {
        engine.step();
        tokio::task::yield_now().await;
        steps += 1;
    }
    assert!(steps > 10 && !engine.cancelled());
    let path = format!("/v1/responses/{id}");
    let all = mine.get(&format!("{path}?stream=true")).await;
    let events = named_events(&all.text);
    assert_eq!(events[0]["type"], "response.created");
    assert_eq!(events.last().unwrap()["type"], "response.completed");
    assert!(events.iter().enumerate().all(|(index, event)| event["sequence_number"] == index));
    for after in [0, 4, events.len() - 2, events.len() - 1] {
        let rest = mine.get(&format!("{path}?stream=true&starting_after={after}")).await;
        assert_eq!(named_events(&rest.text), events[after + 1..], "{after}");
    }
    let kept = mine.get(&path).await.json();
    assert_eq!(kept, events.last().unwrap()["response"]);
    assert_eq!(other.get(&format!("{path}?stream=true")).await.status, 404);
    assert_eq!(mine.get(&format!("{path}?starting_after=3")).await.error()["param"], "starting_after");
    engine.plan(|plan| plan.manual = false);
    let plain = create(&mine, json!({})).await;
    let path = format!("/v1/responses/{}?stream=true", plain["id"].as_str().unwrap());
    assert_eq!(mine.get(&path).await.error()["param"], "stream");
}

#[tokio::test]
async fn a_background_stream_that_fails_says_so_in_both_places() {
    let engine = FakeEngine::saying("half");
    engine.plan(|plan| plan.end = Some(FinishReason::Error));
    let client = client(&engine);
    let reply =
        client.post("/v1/responses", &json!({"input": "hi", "background": true, "stream": true})).await;
    let events = named_events(&reply.text);
    let last = events.last().unwrap();
    assert_eq!(last["type"], "response.failed", "{}", reply.text);
    let path = format!("/v1/responses/{}", last["response"]["id"].as_str().unwrap());
    assert_eq!(client.get(&path).await.json()["status"], "failed");
}

fn named_events(text: &str) -> Vec<Value> {
    text.lines()
        .filter_map(|line| line.strip_prefix("data: "))
        .map(|data| serde_json::from_str(data).unwrap())
        .collect()
}

#[tokio::test]
async fn reasoning_is_carried_sealed_for_its_own_tenant() {
    let engine = FakeEngine::saying("<think>a thought</think>said");
    let config = ServerConfig { api_keys: vec!["k1".into(), "k2".into()], ..Default::default() };
    let mut sources = TemplateSources::default();
    let source = "{% for m in messages %}[{{ m.role }}]{% if m.reasoning_content is defined %}{{ '{' ~ m.reasoning_content ~ '}' }}{% endif %}\
                  {{ m.content }}{% endfor %}";
    sources.add("default", source, "test");
    let template = ChatTemplate::compile(sources, common::tokenizer().special_tokens()).unwrap().unwrap();
    let parsers = Parsers { tools: None, reasoning: ReasoningFormat::named("think") };
    let client =
        Client::with(config, App { template: Some(Arc::new(template)), parsers, ..app(engine.clone()) });
    let (mine, other) = (client.key("k1"), client.key("k2"));
    let plain = create(&mine, json!({"store": false})).await;
    assert!(plain["output"][0].get("encrypted_content").is_none(), "nobody asked for it");
    let asked = json!({"store": false, "include": ["reasoning.encrypted_content"]});
    let first = create(&mine, asked.clone()).await;
    let mut item = first["output"][0].clone();
    item.as_object_mut().unwrap().remove("content");
    assert!(!item.to_string().contains("a thought"));
    let body =
        merged(asked, json!({"input": [item, first["output"][1], {"role": "user", "content": "more"}]}));
    create(&mine, body.clone()).await;
    assert!(prompt(&engine).contains("{a thought}said"), "opened for the model: {}", prompt(&engine));
    let refused = other.post("/v1/responses", &body).await;
    assert_eq!(refused.error()["code"], "invalid_encrypted_content", "{}", refused.text);
    // Told plainly beside it, it is what the client says, as everywhere.
    let told =
        json!({"input": [first["output"][0], first["output"][1], {"role": "user", "content": "more"}]});
    assert_eq!(other.post("/v1/responses", &told).await.status, 200);
}

#[tokio::test]
async fn items_are_listed_and_referred_to() {
    let engine = FakeEngine::saying("It is 4.");
    let config = ServerConfig { api_keys: vec!["k1".into(), "k2".into()], ..Default::default() };
    let client = with(&engine, config);
    let (mine, other) = (client.key("k1"), client.key("k2"));
    let items = json!([{"role": "user", "content": "two and two"}, {"role": "user", "content": "quickly"}]);
    let first = create(&mine, json!({"input": items})).await;
    let path = format!("/v1/responses/{}/input_items", first["id"].as_str().unwrap());
    let listed = mine.get(&format!("{path}?order=asc&limit=1")).await.json();
    assert_eq!((&listed["data"][0]["content"], &listed["has_more"]), (&json!("two and two"), &json!(true)));
    let after = format!("{path}?order=asc&after={}", listed["last_id"].as_str().unwrap());
    let rest = mine.get(&after).await.json();
    assert_eq!((&rest["data"][0]["content"], &rest["has_more"]), (&json!("quickly"), &json!(false)));
    assert_eq!(mine.get(&path).await.json()["data"][0]["content"], "quickly", "the last first");
    assert_eq!(mine.get(&format!("{path}?limit=0")).await.error()["param"], "limit");
    assert_eq!(other.get(&path).await.status, 404);
    let text = create(&mine, json!({"input": "hello"})).await;
    let path = format!("/v1/responses/{}/input_items", text["id"].as_str().unwrap());
    assert_eq!(mine.get(&path).await.json()["data"][0]["content"][0]["text"], "hello");

    let refer = |item: &Value| json!({"type": "item_reference", "id": item["id"]});
    let body = json!({"input": [refer(&listed["data"][0]), refer(&first["output"][0]), {"role": "user", "content": "sure?"}]});
    let second = create(&mine, body.clone()).await;
    assert_eq!(prompt(&engine), "[user]two and two$[assistant]It is 4.$[user]sure?$[assistant]");
    let path = format!("/v1/responses/{}/input_items?order=asc", second["id"].as_str().unwrap());
    let kept = mine.get(&path).await.json();
    assert_eq!(kept["data"][1]["content"][0]["text"], "It is 4.", "references are followed");
    let foreign = other.post("/v1/responses", &body).await;
    assert_eq!((foreign.status.as_u16(), &foreign.error()["param"]), (400, &json!("input[0].id")));
}

#[tokio::test]
async fn a_conversation_that_is_too_long_loses_its_oldest_turns_where_asked() {
    let engine = FakeEngine::saying("ok");
    let client = client(&engine);
    let turn = |index: usize| {
        [
            json!({"role": "user", "content": format!("q{index} {}", "x".repeat(500))}),
            json!({"role": "assistant", "content": format!("a{index}")}),
        ]
    };
    let mut items: Vec<Value> = (0..20).flat_map(turn).collect();
    items.push(json!({"role": "user", "content": "last"}));
    let body = json!({"input": items, "instructions": "Stay.", "max_output_tokens": 100});
    assert_eq!(client.post("/v1/responses", &body).await.error()["code"], "context_length_exceeded");
    let response = create(&client, merged(body.clone(), json!({"truncation": "auto"}))).await;
    assert_eq!(response["truncation"], "auto");
    let shown = prompt(&engine);
    assert!(shown.starts_with("[system]Stay.$[user]q13 "), "{shown}");
    assert!(shown.contains("a19") && shown.ends_with("[user]last$[assistant]"), "{shown}");
    assert!(shown.len() + 100 <= 4096 && shown.len() + 100 + 530 > 4096, "as much as fits: {}", shown.len());
    let whole = json!({"input": "y".repeat(5000), "truncation": "auto"});
    assert_eq!(client.post("/v1/responses", &whole).await.error()["code"], "context_length_exceeded");
}

#[tokio::test]
async fn a_response_that_was_cut_says_so() {
    let engine = FakeEngine::saying("a long answer");
    engine.plan(|plan| plan.end = Some(FinishReason::Length));
    let response = create(&client(&engine), json!({})).await;
    assert_eq!(
        (&response["status"], &response["incomplete_details"]["reason"]),
        (&json!("incomplete"), &json!("max_output_tokens"))
    );
    assert_eq!(response["output"][0]["status"], "incomplete");
}

#[tokio::test]
async fn what_is_not_honoured_is_refused_by_name() {
    let client = client(&FakeEngine::saying("ok"));
    for (body, param) in [
        (json!({"input": 5}), "input"),
        (json!({"input": []}), "input"),
        (json!({"input": [{"type": "item_reference", "id": "x"}]}), "input[0].id"),
        (json!({"input": [{"type": "item_reference"}]}), "input[0].id"),
        (
            json!({"input": [{"type": "reasoning", "summary": [], "encrypted_content": "fr1.x"}]}),
            "input[0].encrypted_content",
        ),
        (json!({"input": [{"type": "message", "role": "user", "content": "x", "mood": 1}]}), "input[0].mood"),
        (
            json!({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}),
            "input[0].content[0].type",
        ),
        (json!({"input": [{"role": "nobody", "content": "x"}]}), "input[0].role"),
        (json!({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}), "input[0].call_id"),
        (json!({"tools": [{"type": "web_search"}]}), "tools[0].type"),
        (json!({"tools": [add(), add()]}), "tools[1].name"),
        (json!({"tool_choice": "required"}), "tool_choice"),
        (json!({"tools": [add()], "tool_choice": {"type": "function", "name": "sub"}}), "tool_choice.name"),
        (json!({"text": {"format": {"type": "yaml"}}}), "text.format.type"),
        (
            json!({"text": {"format": {"type": "json_schema", "name": "x", "schema": {"uniqueItems": true}}}}),
            "text.format.schema",
        ),
        (json!({"tools": [add(), {"type": "novelty"}]}), "tools[1].type"),
        (
            json!({"tools": [add(), {"type": "web_search"}], "tool_choice": {"type": "web_search"}}),
            "tool_choice.type",
        ),
        (
            json!({"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "mcp"}]}]}),
            "tools[0].tools[0].type",
        ),
        (json!({"text": {"verbosity": "lower"}}), "text.verbosity"),
        (json!({"reasoning": {"summary": "long"}}), "reasoning.summary"),
        (json!({"include": ["message.output_text.logprobs"]}), "include"),
        (json!({"truncation": "some"}), "truncation"),
        (json!({"top_logprobs": 3}), "top_logprobs"),
        (json!({"background": true, "store": false}), "background"),
        (json!({"conversation": "conv_1"}), "conversation"),
        (json!({"max_tool_calls": "3"}), "max_tool_calls"),
        (json!({"max_output_tokens": 0}), "max_output_tokens"),
        (json!({"n": 2}), "n"),
        (json!({"messages": []}), "messages"),
    ] {
        let reply = client.post("/v1/responses", &merged(json!({"input": "hi"}), body.clone())).await;
        assert_eq!(
            (reply.status.as_u16(), &reply.error()["param"]),
            (400, &json!(param)),
            "{body}: {}",
            reply.text
        );
    }
    let missing = client.post("/v1/responses", &json!({})).await;
    assert_eq!(missing.error()["param"], "input");
}
