//! Safety: rules and the callout, in every API, streamed and whole.

mod common;

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpListener;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use common::{Client, FakeEngine, Reply, merged, tool_app};
use folio_server::{Safety, ServerConfig};
use serde_json::{Map, Value, json};

fn safety(declared: &Value) -> Safety {
    Safety::parse(&declared.to_string(), &|name| (name == "SAFETY_KEY").then(|| "sesame".to_owned())).unwrap()
}

fn client(engine: &Arc<FakeEngine>, declared: &Value) -> Client {
    let config = ServerConfig { safety: safety(declared), ..Default::default() };
    Client::with(config, tool_app(engine.clone(), 4096))
}

fn rules() -> Value {
    json!({"rules": [
        {"name": "codename", "strings": ["bluebird"], "ignore_case": true, "action": "deny"},
        {"name": "numbers", "regexes": ["[0-9]{3}-[0-9]{4}"], "action": "redact", "replacement": "#"},
    ]})
}

/// What the engine was given to read.
fn prompt(engine: &FakeEngine) -> String {
    let special = |id: u32| if id >= 256 { b'$' } else { id as u8 };
    String::from_utf8(engine.last().prompt.iter().map(|id| special(*id)).collect()).unwrap()
}

/// Text and end of every choice of a stream.
fn streamed(reply: &Reply, n: usize) -> Vec<(String, Value)> {
    let mut choices = vec![(String::new(), Value::Null); n];
    for event in reply.events() {
        let Some(choice) = event["choices"].get(0) else { continue };
        let at = choice["index"].as_u64().unwrap() as usize;
        let text = choice["text"].as_str().or(choice["delta"]["content"].as_str()).unwrap_or_default();
        choices[at].0 += text;
        if !choice["finish_reason"].is_null() {
            choices[at].1 = choice["finish_reason"].clone();
        }
    }
    choices
}

/// What is JSON inside of a text is judged as what it stands for, and within the limits of JSON.
#[tokio::test]
async fn arguments_of_calls_are_read_within_limits() {
    let engine = FakeEngine::saying("ok");
    let client = client(&engine, &rules());
    let ask = async |arguments: String| {
        let call = json!({"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}});
        let messages = json!([{"role": "user", "content": "a"}, {"role": "assistant", "content": null, "tool_calls": [call]}]);
        client.chat(json!({"messages": messages, "max_tokens": 1})).await
    };
    let escaped = r#"{"a": "555\u002d1234", "b": [1, 2]}"#;
    assert_eq!(ask(escaped.into()).await.status, 200);
    assert!(prompt(&engine).contains(r##"{"a": "#", "b": [1, 2]}"##), "{}", prompt(&engine));
    for too_much in [
        format!("{{\"a\": {}1{}}}", "[".repeat(101), "]".repeat(101)),
        json!({"tokens": vec![1; 1 << 18]}).to_string(),
        json!({"a": (0..5000).map(|at| (at.to_string(), json!(1))).collect::<Map<_, _>>()}).to_string(),
    ] {
        let refused = ask(too_much).await;
        assert_eq!((refused.status.as_u16(), &refused.error()["code"]), (400, &json!("too_complex")));
    }
}

#[tokio::test]
async fn a_denied_answer_is_cut_and_its_choice_cancelled() {
    let engine = FakeEngine::saying("one two BlueBird three");
    let client = client(&engine, &rules());
    let asked = json!({"max_tokens": 99, "return_token_ids": true, "logprobs": 1});
    let whole = client.complete(asked.clone()).await.json();
    let choice = &whole["choices"][0];
    assert_eq!((&choice["text"], &choice["finish_reason"]), (&json!("one two "), &json!("content_filter")));
    let said: Vec<u32> = "one two ".bytes().map(u32::from).collect();
    assert_eq!(choice["token_ids"], json!(said), "no id of what was denied");
    assert_eq!(choice["logprobs"]["tokens"].as_array().unwrap().len(), said.len());
    let reply = client.complete(merged(asked, json!({"stream": true}))).await;
    assert_eq!(streamed(&reply, 1), [("one two ".to_owned(), json!("content_filter"))]);
    assert!(!reply.text.contains("lueB") && !reply.text.contains("[66]"), "{}", reply.text);
    let counted = client.metric("folio:safety_verdicts_total", &["output", "codename", "deny"]).await;
    assert_eq!(counted, 2.0);
    assert_eq!(client.metric("vllm:request_success_total", &["content_filter"]).await, 2.0);

    let said = "a BlueBird";
    engine.plan(|plan| (plan.manual, plan.say) = (true, format!("{said} and more").into()));
    let sender = client.clone();
    let running = tokio::spawn(async move { sender.chat(json!({})).await.json() });
    while engine.live() == 0 {
        tokio::task::yield_now().await;
    }
    for _ in 0..said.len() {
        engine.step();
    }
    assert_eq!(running.await.unwrap()["choices"][0]["finish_reason"], "content_filter");
    assert_eq!(engine.live(), 1, "answered before the engine ended it");
    engine.step();
}

#[tokio::test]
async fn a_denied_choice_does_not_end_its_siblings() {
    let engine = FakeEngine::saying("choice {c} is here");
    let rules = json!({"rules": [{"name": "second", "strings": ["e 1 i"], "action": "deny"}]});
    let client = client(&engine, &rules);
    for stream in [false, true] {
        let reply = client.chat(json!({"n": 3, "stream": stream})).await;
        let choices = match stream {
            true => streamed(&reply, 3),
            false => {
                let choices = reply.json()["choices"].as_array().unwrap().clone();
                let text = |choice: &Value| choice["message"]["content"].as_str().unwrap().to_owned();
                choices.iter().map(|choice| (text(choice), choice["finish_reason"].clone())).collect()
            }
        };
        let ends = |text: &str, reason: &str| (text.to_owned(), json!(reason));
        let (first, last) = (ends("choice 0 is here", "stop"), ends("choice 2 is here", "stop"));
        assert_eq!(choices, [first, ends("choic", "content_filter"), last]);
    }
}

#[tokio::test]
async fn what_is_replaced_is_never_shown() {
    let engine = FakeEngine::saying("call 555-1234 now");
    let client = client(&engine, &rules());
    let asked = json!({"max_tokens": 99, "return_token_ids": true});
    let choice = client.complete(asked.clone()).await.json()["choices"][0].clone();
    assert_eq!((&choice["text"], &choice["finish_reason"]), (&json!("call # now"), &json!("stop")));
    let said: Vec<u32> = "call  now".bytes().map(u32::from).chain([common::EOS]).collect();
    assert_eq!(choice["token_ids"], json!(said));
    let reply = client.complete(merged(asked, json!({"stream": true}))).await;
    assert_eq!(streamed(&reply, 1), [("call # now".to_owned(), json!("stop"))]);
    assert!(!reply.text.contains("555-") && !reply.text.contains("[53]"), "{}", reply.text);
    assert_eq!(client.metric("folio:safety_verdicts_total", &["output", "numbers", "redact"]).await, 2.0);
}

#[tokio::test]
async fn an_echoed_prompt_is_part_of_the_answer() {
    let only = json!({"rules": [{"name": "r", "strings": ["bluebird"], "on": "output", "action": "deny"}]});
    let engine = FakeEngine::saying("bird sings");
    let client = client(&engine, &only);
    for stream in [false, true] {
        let asked =
            json!({"prompt": "a blue", "echo": true, "logprobs": 1, "stream": stream, "max_tokens": 99});
        let reply = client.complete(asked).await;
        let (text, end) = match stream {
            true => streamed(&reply, 1).remove(0),
            false => {
                let choice = reply.json()["choices"][0].clone();
                assert_eq!(choice["logprobs"]["tokens"], json!(["a", " "]));
                (choice["text"].as_str().unwrap().to_owned(), choice["finish_reason"].clone())
            }
        };
        assert_eq!((text.as_str(), end), ("a ", json!("content_filter")));
    }
}

#[tokio::test]
async fn reasoning_and_arguments_are_judged_too() {
    let engine = FakeEngine::saying("<think>about bluebird</think>yes");
    let client = client(&engine, &rules());
    let choice = client.chat(json!({})).await.json()["choices"][0].clone();
    assert_eq!(choice["finish_reason"], "content_filter");
    assert_eq!(choice["message"]["reasoning_content"], "about ");
    // Reasoning that nobody is shown is judged all the same.
    let hidden = client.chat(json!({"include_reasoning": false, "return_token_ids": true})).await.json();
    assert_eq!(hidden["choices"][0]["finish_reason"], "content_filter");

    let tools = json!([{"type": "function", "function": {"name": "dial"}}]);
    engine.plan(|plan| {
        let call = r#"<tool_call>{"name": "dial", "arguments": {"to": "555-\u00312\u00334"}}</tool_call>"#;
        plan.say = call.into();
    });
    let choice = client.chat(json!({"tools": tools})).await.json()["choices"][0].clone();
    assert_eq!(choice["message"]["tool_calls"][0]["function"]["arguments"], r##"{"to": "#"}"##);
    assert_eq!(choice["finish_reason"], "tool_calls");
}

#[tokio::test]
async fn a_denied_prompt_never_reaches_the_engine() {
    let engine = FakeEngine::saying("hello");
    let client = client(&engine, &rules());
    let bad = json!({"messages": [{"role": "user", "content": [{"type": "text", "text": "the Bluebird?"}]}]});
    let reply = client.post("/v1/chat/completions", &merged(bad.clone(), json!({"n": 2}))).await;
    assert_eq!(reply.status, 200);
    let answer = reply.json();
    assert_eq!(answer["choices"].as_array().unwrap().len(), 2);
    assert_eq!(answer["choices"][1]["finish_reason"], "content_filter");
    assert_eq!(answer["choices"][1]["message"]["content"], "");
    assert_eq!(answer["usage"]["completion_tokens"], 0);
    let reply = client.post("/v1/chat/completions", &merged(bad.clone(), json!({"stream": true}))).await;
    assert_eq!(streamed(&reply, 1), [(String::new(), json!("content_filter"))]);
    assert!(reply.text.ends_with("data: [DONE]\n\n"));

    // By their parts: the second of two prompts, ids, the tools, what a model is said to have called.
    let tools = json!([{"type": "function", "function": {"name": "f", "description": "finds bluebirds"}}]);
    let reply = client.chat(json!({"tools": tools})).await;
    assert_eq!(reply.json()["choices"][0]["finish_reason"], "content_filter");
    let arguments = r#"{"q": "b\u006cuebird"}"#;
    let call = json!({"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}});
    let messages = json!([{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "y"}]);
    let reply = client.chat(json!({"messages": messages})).await;
    assert_eq!(reply.json()["choices"][0]["finish_reason"], "content_filter");
    let ids: Vec<u32> = "a bluebird".bytes().map(u32::from).collect();
    let reply = client.complete(json!({"prompt": ids, "return_token_ids": true})).await;
    assert_eq!(reply.json()["choices"][0]["finish_reason"], "content_filter");
    assert!(engine.requests.lock().unwrap().is_empty(), "nothing was submitted");

    let reply = client.complete(json!({"prompt": ["bluebird", "fine"]})).await.json();
    assert_eq!(reply["choices"][0]["finish_reason"], "content_filter");
    assert_eq!(
        (&reply["choices"][1]["text"], &reply["choices"][1]["finish_reason"]),
        (&json!("hello"), &json!("stop"))
    );
    assert_eq!(reply["usage"]["prompt_tokens"], 4);
    assert_eq!(engine.requests.lock().unwrap().len(), 1);

    let message = json!({"max_tokens": 9, "messages": [{"role": "user", "content": "bluebird"}]});
    let answer = client.post("/v1/messages", &message).await.json();
    assert_eq!((&answer["stop_reason"], &answer["content"]), (&json!("refusal"), &json!([])));
    let answer = client.post("/v1/responses", &json!({"input": "bluebird"})).await.json();
    assert_eq!((&answer["status"], &answer["output"]), (&json!("incomplete"), &json!([])));
    assert_eq!(answer["incomplete_details"]["reason"], "content_filter");
    assert_eq!(engine.requests.lock().unwrap().len(), 1);
}

#[tokio::test]
async fn inputs_of_embeddings_are_judged_by_the_rules() {
    let engine = FakeEngine::saying("");
    let client = client(&engine, &rules());
    let reply = client.post("/v1/embeddings", &json!({"input": ["fine", "a bluebird"]})).await;
    assert_eq!((reply.status.as_u16(), &reply.error()["code"]), (400, &json!("content_filter")));
    assert!(engine.requests.lock().unwrap().is_empty());
}

#[tokio::test]
async fn what_is_replaced_in_a_prompt_the_model_does_not_read() {
    let engine = FakeEngine::saying("ok");
    let client = client(&engine, &rules());
    client.chat(json!({"messages": [{"role": "user", "content": "dial 555-1234 or 555-4321."}]})).await;
    assert_eq!(prompt(&engine), "[user]dial # or #.$[assistant]");
    client.complete(json!({"prompt": "555-1234!"})).await;
    assert_eq!(prompt(&engine), "#!");
    let system =
        json!({"max_tokens": 9, "system": "555-1234", "messages": [{"role": "user", "content": "x"}]});
    client.post("/v1/messages", &system).await;
    assert!(prompt(&engine).starts_with("[system]#$"), "{}", prompt(&engine));
    assert_eq!(client.metric("folio:safety_verdicts_total", &["input", "numbers", "redact"]).await, 3.0);
}

#[tokio::test]
async fn the_other_apis_say_it_their_way() {
    let engine = FakeEngine::saying("one bluebird");
    let client = client(&engine, &rules());
    let asked = json!({"max_tokens": 99, "messages": [{"role": "user", "content": "x"}]});
    let answer = client.post("/v1/messages", &asked).await.json();
    assert_eq!((&answer["stop_reason"], &answer["content"][0]["text"]), (&json!("refusal"), &json!("one ")));
    let reply = client.post("/v1/messages", &merged(asked, json!({"stream": true}))).await;
    assert!(
        reply.text.contains(r#""stop_reason":"refusal""#) && !reply.text.contains("blue"),
        "{}",
        reply.text
    );
    let answer = client.post("/v1/responses", &json!({"input": "x"})).await.json();
    assert_eq!(answer["incomplete_details"], json!({"reason": "content_filter"}));
    assert_eq!(answer["output"][0]["content"][0]["text"], "one ");
    let reply = client.post("/v1/responses", &json!({"input": "x", "stream": true})).await;
    assert!(
        reply.text.contains("event: response.incomplete") && !reply.text.contains("blue"),
        "{}",
        reply.text
    );
}

/// Questions, with the heads of their requests.
type Asked = Arc<Mutex<Vec<(Value, String)>>>;

/// A callout that answers each question with what `answer` makes of it; `None`: it never answers.
fn callout(answer: fn(&Value) -> Option<String>) -> (String, Asked) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}/judge", listener.local_addr().unwrap());
    let asked = Arc::new(Mutex::new(Vec::new()));
    let log = asked.clone();
    std::thread::spawn(move || {
        for socket in listener.incoming() {
            let (mut socket, log) = (socket.unwrap(), log.clone());
            std::thread::spawn(move || {
                let mut reader = BufReader::new(socket.try_clone().unwrap());
                loop {
                    let (mut head, mut line) = (String::new(), String::new());
                    while reader.read_line(&mut line).unwrap_or(0) > 2 {
                        head += &std::mem::take(&mut line);
                    }
                    let length = head.lines().find_map(|line| {
                        line.to_ascii_lowercase().strip_prefix("content-length: ")?.trim().parse().ok()
                    });
                    let Some(length) = length else { return };
                    let mut body = vec![0; length];
                    reader.read_exact(&mut body).unwrap();
                    let question: Value = serde_json::from_slice(&body).unwrap();
                    log.lock().unwrap().push((question.clone(), head));
                    let Some(said) = answer(&question) else {
                        std::thread::sleep(Duration::from_secs(30));
                        return;
                    };
                    let status = if said.contains("BROKEN") { "500 No" } else { "200 OK" };
                    let _ =
                        write!(socket, "HTTP/1.1 {status}\r\ncontent-length: {}\r\n\r\n{said}", said.len());
                }
            });
        }
    });
    (url, asked)
}

fn asking(url: &str, extra: Value) -> Value {
    json!({"callout": merged(json!({"url": url, "on_failure": "closed", "timeout_ms": 5000}), extra)})
}

#[tokio::test]
async fn the_callout_is_told_what_it_judges_and_allows() {
    let (url, asked) = callout(|_| Some(r#"{"action": "allow"}"#.into()));
    let engine = FakeEngine::saying("<think>hm</think>fine");
    let client =
        client(&engine, &asking(&url, json!({"secret_env": "SAFETY_KEY", "secret_header": "x-secret"})));
    let answer = client.chat(json!({"n": 2})).await.json();
    assert_eq!(answer["choices"][1]["message"]["content"], "fine");
    assert!(answer["choices"][1].get("safety").is_none());
    let asked = std::mem::take(&mut *asked.lock().unwrap());
    assert_eq!(asked.len(), 3);
    assert!(asked.iter().all(|(_, head)| head.contains("x-secret: sesame")));
    let (input, output) = (&asked[0].0, &asked[1].0);
    assert_eq!((&input["stage"], &input["tenant"]), (&json!("input"), &json!("anonymous")));
    assert_eq!((&input["model"], &input["api"]), (&json!("test-model"), &json!("chat.completions")));
    assert_eq!(input["messages"], json!([{"role": "user", "content": "hi"}]));
    assert_eq!((&output["stage"], &output["request_id"]), (&json!("output"), &input["request_id"]));
    assert_eq!((&output["text"], &output["reasoning"]), (&json!("fine"), &json!("hm")));
    assert_eq!((&output["finish_reason"], &output["tool_calls"]), (&json!("stop"), &json!([])));
    let mut choices: Vec<_> = asked[1..].iter().map(|(asked, _)| asked["choice"].as_u64().unwrap()).collect();
    choices.sort();
    assert_eq!(choices, [0, 1]);
    client.complete(json!({"prompt": [104, 105]})).await;
    client
        .post("/v1/messages", &json!({"max_tokens": 9, "messages": [{"role": "user", "content": "x"}]}))
        .await;
    client.post("/v1/responses", &json!({"input": "x"})).await;
    assert_eq!(client.metric("folio:safety_verdicts_total", &["callout", "allow", "input"]).await, 4.0);
    assert_eq!(client.metric("folio:safety_verdicts_total", &["callout", "allow", "output"]).await, 5.0);
}

#[tokio::test]
async fn the_callout_denies_prompts_and_answers() {
    let (url, _) = callout(|question| {
        let deny = question.to_string().contains("wicked");
        Some(json!({"action": if deny { "deny" } else { "allow" }, "reason": "r"}).to_string())
    });
    let engine = FakeEngine::saying("a wicked answer");
    let client = client(&engine, &asking(&url, json!({})));
    for stream in [false, true] {
        let reply = client.chat(json!({"stream": stream, "return_token_ids": true, "logprobs": true})).await;
        assert!(!reply.text.contains("wicked") && !reply.text.contains("[119]"), "{}", reply.text);
        assert!(reply.text.contains(r#""finish_reason":"content_filter""#), "{}", reply.text);
        let said =
            r#""safety":{"input":{"action":"allow","reason":"r"},"output":{"action":"deny","reason":"r"}}"#;
        assert!(reply.text.contains(said), "{}", reply.text);
    }
    let before = engine.requests.lock().unwrap().len();
    let reply = client.complete(json!({"prompt": ["wicked", "good"]})).await.json();
    assert_eq!(reply["choices"][0]["finish_reason"], "content_filter");
    assert_eq!(reply["choices"][0]["safety"]["input"]["action"], "deny");
    assert_eq!(engine.requests.lock().unwrap().len(), before + 1);
    let answer = client.post("/v1/responses", &json!({"input": "x"})).await.json();
    assert_eq!(answer["safety"]["output"]["reason"], "r");
    let asked = json!({"max_tokens": 99, "messages": [{"role": "user", "content": "x"}]});
    let answer = client.post("/v1/messages", &asked).await.json();
    assert_eq!(
        (&answer["stop_reason"], &answer["safety"]["output"]["action"]),
        (&json!("refusal"), &json!("deny"))
    );
}

#[tokio::test]
async fn the_callout_replaces_and_annotates() {
    let (url, _) = callout(|question| {
        let verdict = match (question["stage"].as_str().unwrap(), question.get("prompt")) {
            ("input", Some(_)) => json!({"action": "redact", "prompt": "other"}),
            ("input", None) => {
                json!({"action": "redact", "messages": [{"role": "user", "content": "other"}]})
            }
            _ if question["text"] == "plain" => json!({"action": "annotate", "annotations": {"risk": 0.5}}),
            _ => json!({"action": "redact", "text": "[cut]"}),
        };
        Some(verdict.to_string())
    });
    let engine = FakeEngine::saying("secret");
    let client = client(&engine, &asking(&url, json!({})));
    for stream in [false, true] {
        let reply = client.chat(json!({"stream": stream, "return_token_ids": true})).await;
        assert!(reply.text.contains("[cut]") && !reply.text.contains("secret"), "{}", reply.text);
        assert!(!reply.text.contains(r#""token_ids":[115"#), "{}", reply.text);
        assert_eq!(prompt(&engine), "[user]other$[assistant]");
    }
    engine.plan(|plan| plan.say = "plain".into());
    let choice = client.complete(json!({})).await.json()["choices"][0].clone();
    assert_eq!(prompt(&engine), "other");
    assert_eq!((&choice["text"], &choice["finish_reason"]), (&json!("plain"), &json!("stop")));
    assert_eq!(choice["safety"]["output"], json!({"action": "annotate", "annotations": {"risk": 0.5}}));
}

#[tokio::test]
async fn windows_are_judged_while_the_answer_is_written() {
    let (url, asked) = callout(|question| {
        let bad = question["text"].as_str().unwrap().contains("bad");
        Some(json!({"action": if bad { "deny" } else { "allow" }}).to_string())
    });
    let engine = FakeEngine::saying("0123456789abcdefghij then a bad end and more");
    let window = json!({"on": "output", "stream": "window", "window": 10, "overlap": 4});
    let client = client(&engine, &asking(&url, window));
    let reply = client.complete(json!({"max_tokens": 99, "stream": true})).await;
    let (text, end) = streamed(&reply, 1).remove(0);
    assert_eq!(end, "content_filter");
    assert!("0123456789abcdefghij then a ".starts_with(&text), "{text}");
    let asked = asked.lock().unwrap().clone();
    let mut written = String::new();
    for (question, _) in asked.iter() {
        let before = question["before"].as_str().unwrap();
        assert!(
            written.ends_with(before) && before.len() == 4.min(written.len()),
            "{before:?} of {written:?}"
        );
        written += question["text"].as_str().unwrap();
    }
    engine.plan(|plan| plan.say = "all is well here, and that is the whole of it".into());
    let whole = client.complete(json!({"max_tokens": 99})).await.json();
    assert_eq!(whole["choices"][0]["text"], "all is well here, and that is the whole of it");
}

#[tokio::test]
async fn a_callout_that_fails_is_open_or_closed() {
    for (answer, limit) in [
        ((|_| None) as fn(&Value) -> Option<String>, 150),
        (|_| Some("BROKEN".into()), 5000),
        (|_| Some("{\"action\": \"perhaps\"}".into()), 5000),
        (|_| Some("\u{1}".into()), 5000),
    ] {
        let (url, _) = callout(answer);
        failing(&url, limit).await;
    }
    // Nobody listens.
    let closed = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    failing(&format!("http://{closed}/"), 5000).await;
}

async fn failing(url: &str, limit: u64) {
    let began = Instant::now();
    let engine = FakeEngine::saying("answer");
    let with = |on: &str, failure: &str| {
        client(&engine, &asking(url, json!({"on": on, "on_failure": failure, "timeout_ms": limit})))
    };
    let reply = with("input", "closed").chat(json!({})).await;
    assert_eq!(reply.status, 503, "{}", reply.text);
    assert!(engine.requests.lock().unwrap().is_empty());
    let reply = with("both", "open").chat(json!({})).await.json();
    assert_eq!(reply["choices"][0]["message"]["content"], "answer");
    for stream in [false, true] {
        let reply = with("output", "closed").chat(json!({"stream": stream})).await;
        assert!(reply.text.contains("content_filter") && !reply.text.contains("answer"), "{}", reply.text);
    }
    assert!(began.elapsed() < Duration::from_secs(20), "no call outlives its limit by much");
}

#[tokio::test]
async fn a_callout_that_hangs_holds_nobody_else() {
    let (url, _) = callout(|question| match question.to_string().contains("slow") {
        true => None,
        false => Some(r#"{"action": "allow"}"#.into()),
    });
    let engine = FakeEngine::saying("answer");
    let client =
        client(&engine, &asking(&url, json!({"on": "input", "concurrency": 4, "timeout_ms": 5_000})));
    let slow = client.clone();
    let hanging: Vec<_> = (0..3)
        .map(|_| {
            let slow = slow.clone();
            tokio::spawn(async move { slow.complete(json!({"prompt": "slow"})).await.status })
        })
        .collect();
    tokio::time::sleep(Duration::from_millis(50)).await;
    assert_eq!(client.complete(json!({})).await.status, 200);
    assert!(hanging.iter().all(|hanging| !hanging.is_finished()));
}
