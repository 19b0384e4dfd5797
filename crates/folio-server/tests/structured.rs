//! `response_format` and `structured_outputs` over the real engine and sampler, with a model whose logits are as good as random:
//! what it says follows the grammar because nothing else can be said.

mod common;

use std::sync::Arc;

use common::{Client, app, merged, template, tokenizer_with, tool_template};
use folio_engine::{EngineHandle, SchedulerConfig};
use folio_server::{App, Parsers, ServerConfig};
use folio_text::{ReasoningFormat, TOOL_FORMATS, ToolFormat};
use serde_json::{Value, json};

fn engine(blocks: u32) -> EngineHandle {
    let config = SchedulerConfig {
        max_model_len: 1024,
        max_num_seqs: 16,
        max_num_batched_tokens: 64,
        headroom_tokens: 0,
        ..Default::default()
    };
    common::modelled(config, blocks, 1)
}

fn client(blocks: u32) -> Client {
    Client::with(ServerConfig::default(), App { model: facts(), ..app(Arc::new(engine(blocks))) })
}

fn facts() -> folio_server::ModelFacts {
    folio_server::ModelFacts { context_length: 1024, ..common::facts() }
}

fn person() -> Value {
    json!({"type": "object", "additionalProperties": false, "required": ["name", "age", "tags"], "properties": {
        "name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
    }})
}

fn is_person(value: &Value) -> bool {
    let object = value.as_object().unwrap();
    object.len() == 3
        && value["name"].as_str().is_some_and(|name| name.chars().count() <= 8)
        && value["age"].as_u64().is_some_and(|age| age <= 150)
        && value["tags"]
            .as_array()
            .is_some_and(|tags| tags.len() <= 3 && tags.iter().all(|tag| tag == "a" || tag == "b"))
}

fn schema_format() -> Value {
    json!({"type": "json_schema", "json_schema": {"name": "person", "schema": person(), "strict": true}})
}

fn content(reply: &common::Reply) -> String {
    assert_eq!(reply.status, 200, "{}", reply.text);
    let choice = reply.json()["choices"][0].clone();
    assert_eq!(choice["finish_reason"], "stop", "{choice}");
    choice["message"]["content"].as_str().or(choice["text"].as_str()).unwrap().to_owned()
}

#[tokio::test]
async fn random_logits_say_nothing_but_what_the_schema_allows() {
    let client = client(64);
    for seed in 0..20 {
        let body =
            json!({"response_format": schema_format(), "temperature": 1, "seed": seed, "max_tokens": 400});
        let text = content(&client.chat(body).await);
        assert!(is_person(&serde_json::from_str(&text).unwrap()), "{text}");
    }
}

#[tokio::test]
async fn every_notation_is_followed() {
    let client = client(64);
    let outputs =
        |value: Value| json!({"structured_outputs": value, "temperature": 1, "seed": 5, "max_tokens": 300});
    let said = async |value: Value| content(&client.complete(outputs(value)).await);
    let as_text = said(json!({"json": person().to_string()})).await;
    assert!(is_person(&serde_json::from_str(&as_text).unwrap()));
    let compact =
        said(json!({"json": person(), "disable_any_whitespace": true, "disable_fallback": true})).await;
    let value: Value = serde_json::from_str(&compact).unwrap();
    assert_eq!(
        compact.matches([':', ',']).count(),
        compact.matches(": ").count() + compact.matches([':', ',']).count(),
        "{compact}"
    );
    assert!(is_person(&value));
    let open = json!({"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]});
    let closed =
        said(json!({"json": open, "disable_additional_properties": true, "whitespace_pattern": "_{0,2}"}))
            .await;
    assert_eq!(closed.replace('_', ""), "{\"a\":1}");
    assert!(["red", "green"].contains(&said(json!({"choice": ["red", "green"]})).await.as_str()));
    let matched = said(json!({"regex": "[0-9]{3}-(x|y)"})).await;
    assert!(matched.len() == 5 && matched[..3].parse::<u32>().is_ok(), "{matched}");
    let lark = said(json!({"grammar": "start: \"<\" inner \">\"\ninner: \"a\" | \"<\" inner \">\""})).await;
    assert!(lark.starts_with('<') && lark.trim_matches(['<', '>']) == "a", "{lark}");
    let gbnf = said(json!({"grammar": "root ::= \"SELECT \" column\ncolumn ::= \"x\" | \"y\""})).await;
    assert!(["SELECT x", "SELECT y"].contains(&gbnf.as_str()), "{gbnf}");
    let object =
        client.chat(json!({"response_format": {"type": "json_object"}, "seed": 3, "max_tokens": 400})).await;
    let choice = object.json()["choices"][0].clone();
    if choice["finish_reason"] == "stop" {
        assert!(
            serde_json::from_str::<Value>(choice["message"]["content"].as_str().unwrap())
                .unwrap()
                .is_object()
        );
    }
}

/// Preempted, interleaved and shared with others, an answer is what it is alone; so are the answers beside it.
#[tokio::test]
async fn a_crowd_in_a_small_pool_says_what_each_says_alone() {
    let body = |index: u32| {
        let mut body = json!({"messages": [{"role": "user", "content": format!("number {index} ").repeat(3)}],
            "temperature": 1, "seed": index, "max_tokens": 200, "n": 1 + index % 3});
        if !index.is_multiple_of(4) {
            body["response_format"] = schema_format();
        }
        body
    };
    let texts = |reply: &common::Reply| -> Vec<Value> {
        assert_eq!(reply.status, 200, "{}", reply.text);
        let json = reply.json();
        json["choices"]
            .as_array()
            .unwrap()
            .iter()
            .map(|choice| choice["message"]["content"].clone())
            .collect()
    };
    let (solo, crowd) = (client(64), client(40));
    for seed in 0..40 {
        // Teaches admission that answers are short, so that the long ones that follow are preempted.
        let short = json!({"structured_outputs": {"choice": ["y", "n"]}, "max_tokens": 200, "seed": seed});
        content(&crowd.complete(short).await);
    }
    let tasks: Vec<_> = (0..16)
        .map(|index| {
            let crowd = crowd.clone();
            tokio::spawn(async move { crowd.chat(body(index)).await })
        })
        .collect();
    for (index, task) in tasks.into_iter().enumerate() {
        let index = index as u32;
        let together = texts(&task.await.unwrap());
        assert_eq!(together, texts(&solo.chat(body(index)).await), "request {index}");
        for text in together.iter().filter(|_| !index.is_multiple_of(4)) {
            assert!(is_person(&serde_json::from_str(text.as_str().unwrap()).unwrap()), "{text}");
        }
    }
    assert!(
        crowd.metric("vllm:num_preemptions_total", &[]).await > 0.0,
        "the pool was too large to prove anything"
    );
    assert!(crowd.metric("folio:grammar_mask_seconds_count", &[]).await > 100.0);
}

#[tokio::test]
async fn the_streamed_answer_is_the_whole_one() {
    let client = client(64);
    let body = json!({"response_format": schema_format(), "temperature": 1, "seed": 9, "max_tokens": 400});
    let whole = content(&client.chat(body.clone()).await);
    let events = client.chat(merged(body, json!({"stream": true}))).await.events();
    let streamed: String =
        events.iter().filter_map(|event| event["choices"][0]["delta"]["content"].as_str()).collect();
    assert_eq!(streamed, whole);
}

#[tokio::test]
async fn the_grammar_outranks_min_tokens_and_cuts_at_max_tokens() {
    let client = client(64);
    let choice = json!({"structured_outputs": {"choice": ["yes"]}, "min_tokens": 20, "max_tokens": 30});
    assert_eq!(content(&client.complete(choice).await), "yes");
    let cut =
        client.complete(json!({"structured_outputs": {"regex": "a{50}"}, "max_tokens": 7})).await.json();
    assert_eq!(
        (&cut["choices"][0]["text"], &cut["choices"][0]["finish_reason"]),
        (&json!("aaaaaaa"), &json!("length"))
    );
    let biased =
        json!({"structured_outputs": {"choice": ["y", "n"]}, "logit_bias": {"110": 100}, "max_tokens": 5});
    assert_eq!(content(&client.complete(biased).await), "n", "other rules still count among what is allowed");
}

#[tokio::test]
async fn what_was_compiled_is_kept_for_whom_it_was() {
    let config = ServerConfig { api_keys: vec!["k1".into(), "k2".into()], ..Default::default() };
    let client = Client::with(config, App { model: facts(), ..app(Arc::new(engine(64))) });
    let (mine, other) = (client.key("k1"), client.key("k2"));
    let ask = json!({"response_format": schema_format(), "max_tokens": 500});
    let compiled = async || mine.metric("folio:grammar_compile_seconds_count", &[]).await;
    for _ in 0..3 {
        let reply = mine.chat(ask.clone()).await;
        assert_eq!(reply.status, 200, "{}", reply.text);
    }
    assert_eq!(compiled().await, 1.0);
    assert_eq!(other.chat(ask.clone()).await.status, 200);
    assert_eq!(compiled().await, 2.0, "what another asked for is nobody's business");
    let choice = json!({"structured_outputs": {"choice": ["a", "b"]}});
    assert_eq!(mine.chat(choice).await.status, 200);
    assert_eq!(compiled().await, 3.0);
}

#[tokio::test]
async fn what_cannot_be_followed_is_refused_by_name() {
    let client = client(64);
    let schema = |schema: Value| json!({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}});
    let outputs = |value: Value| json!({"structured_outputs": value});
    let named = json!({"type": "function", "function": {"name": "f"}});
    for (body, param, word) in [
        (
            schema(json!({"type": "array", "uniqueItems": true})),
            "response_format.json_schema.schema",
            "uniqueItems",
        ),
        (schema(json!(5)), "response_format.json_schema.schema", "object or a boolean"),
        (
            json!({"response_format": {"type": "json_schema"}}),
            "response_format.json_schema",
            "response_format.json_schema",
        ),
        (
            json!({"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}}),
            "response_format.json_schema.name",
            "name",
        ),
        (json!({"response_format": {"type": "yaml"}}), "response_format.type", "yaml"),
        (json!({"response_format": {"type": "structural_tag"}}), "response_format.type", "structural tags"),
        (json!({"response_format": {"type": "text", "more": 1}}), "response_format.more", "more"),
        (outputs(json!({})), "structured_outputs", "exactly one"),
        (outputs(json!({"regex": "a", "choice": ["b"]})), "structured_outputs", "exactly one"),
        (outputs(json!({"regex": "("})), "structured_outputs.regex", "regex"),
        (outputs(json!({"grammar": "root ::= nothing"})), "structured_outputs.grammar", "nothing"),
        (outputs(json!({"choice": []})), "structured_outputs.choice", "0 choices"),
        (outputs(json!({"json": "{"})), "structured_outputs.json", "not JSON"),
        (outputs(json!({"structural_tag": "x"})), "structured_outputs.structural_tag", "structural tags"),
        (outputs(json!({"regex": "a".repeat(300 << 10)})), "structured_outputs", "limit"),
        (json!({"structured_outputs": {"regex": "a"}, "ignore_eos": true}), "ignore_eos", "ignore_eos"),
        (
            json!({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}),
            "structured_outputs",
            "one of them",
        ),
        (json!({"tools": [named], "response_format": {"type": "json_object"}}), "tools", "tools"),
    ] {
        let reply = client.chat(body.clone()).await;
        assert_eq!(reply.status, 400, "{body}: {}", reply.text);
        let error = reply.error();
        assert_eq!(error["param"], param, "{error}");
        assert!(error["message"].as_str().unwrap().contains(word), "{error}");
    }
}

#[tokio::test]
async fn reasoning_comes_before_the_grammar() {
    let parsers = Parsers { tools: None, reasoning: ReasoningFormat::named("think") };
    let make = |names: [&str; 3]| {
        let app = App { model: facts(), parsers, ..app(Arc::new(engine(64))) };
        Client::with(
            ServerConfig::default(),
            App { tokenizer: Arc::new(tokenizer_with(names)), template: Some(Arc::new(template())), ..app },
        )
    };
    // `<think>` and `</think>` are tokens of their own, and made likely.
    let client = make(["<|end|>", "<think>", "</think>"]);
    let body = |seed: u32, bias: Value| json!({"structured_outputs": {"choice": ["yes", "no"]}, "temperature": 1, "seed": seed, "max_tokens": 60, "logit_bias": bias});
    let reply = client.chat(body(0, json!({"257": 100, "258": 100}))).await;
    assert!(["yes", "no"].contains(&content(&reply).as_str()), "{}", reply.text);
    let usage = &reply.json()["usage"]["completion_tokens_details"];
    assert!(usage["reasoning_tokens"].as_u64().unwrap() > 0, "{usage}");
    // An answer without reasoning begins with the grammar.
    let plain = client.chat(body(0, json!({"257": -100}))).await.json()["choices"][0].clone();
    assert!(["yes", "no"].contains(&plain["message"]["content"].as_str().unwrap()), "{plain}");
    // An answer that only thinks does not end before it has answered.
    let endless =
        client.chat(body(0, json!({"257": 100, "258": -100, "256": 100}))).await.json()["choices"][0].clone();
    assert_eq!(endless["finish_reason"], "length", "{endless}");
}

#[tokio::test]
async fn anthropics_output_format_is_followed_too() {
    let client = client(64);
    let format = json!({"type": "json_schema", "schema": person()});
    let body = |format: Value| {
        json!({"model": "test-model", "max_tokens": 400, "messages": [{"role": "user", "content": "who?"}],
            "temperature": 1, "output_config": {"format": format}})
    };
    let reply = client.post("/v1/messages", &body(format)).await.json();
    assert_eq!(reply["stop_reason"], "end_turn", "{reply}");
    assert!(
        is_person(&serde_json::from_str(reply["content"][0]["text"].as_str().unwrap()).unwrap()),
        "{reply}"
    );
    for (format, param) in [
        (json!({"type": "json_schema"}), "output_config.format.schema"),
        (json!({"type": "regex"}), "output_config.format.type"),
        (json!({"type": "json_schema", "schema": {"uniqueItems": true}}), "output_config.format.schema"),
    ] {
        let reply = client.post("/v1/messages", &body(format)).await;
        assert_eq!(
            (reply.status.as_u16(), &reply.error()["details"]["param"]),
            (400, &json!(param)),
            "{}",
            reply.text
        );
    }
}

fn tool_client(format: &'static ToolFormat) -> Client {
    let parsers = Parsers { tools: Some(format), reasoning: None };
    let app = App {
        model: facts(),
        parsers,
        template: Some(Arc::new(tool_template())),
        ..app(Arc::new(engine(64)))
    };
    Client::with(ServerConfig::default(), app)
}

fn pay(strict: bool) -> Value {
    let schema = json!({"type": "object", "additionalProperties": false, "required": ["to", "cents"], "properties": {
        "to": {"enum": ["ann", "bob"]}, "cents": {"type": "integer", "minimum": 1, "maximum": 99},
    }});
    json!({"type": "function", "function": {"name": "pay", "parameters": schema, "strict": strict}})
}

fn wait_tool() -> Value {
    json!({"type": "function", "function": {"name": "wait"}})
}

fn is_payment(call: &Value) -> bool {
    let Ok(arguments) = serde_json::from_str::<Value>(call["function"]["arguments"].as_str().unwrap()) else {
        return false;
    };
    call["function"]["name"] == "pay"
        && arguments.as_object().unwrap().len() == 2
        && ["ann", "bob"].contains(&arguments["to"].as_str().unwrap())
        && (1..100).contains(&arguments["cents"].as_u64().unwrap())
}

#[tokio::test]
async fn calls_of_a_strict_function_are_what_its_schema_says() {
    let mut held = 0;
    for format in TOOL_FORMATS {
        let client = tool_client(format);
        let named = json!({"type": "function", "function": {"name": "pay"}});
        let ask = json!({"tools": [pay(true)], "tool_choice": named, "max_tokens": 120, "temperature": 1});
        let reply = client.chat(ask.clone()).await;
        if format.place().is_none() {
            let error = reply.error();
            assert_eq!(
                (reply.status.as_u16(), &error["param"]),
                (400, &json!("tools[0].function.strict")),
                "{error}"
            );
            assert!(error["message"].as_str().unwrap().contains(format.name), "{error}");
            continue;
        }
        held += 1;
        let choice = reply.json()["choices"][0].clone();
        assert_eq!(choice["finish_reason"], "tool_calls", "{}: {choice}", format.name);
        assert!(is_payment(&choice["message"]["tool_calls"][0]), "{}: {choice}", format.name);
        let required = merged(ask, json!({"tool_choice": "required", "parallel_tool_calls": false}));
        let choice = client.chat(required).await.json()["choices"][0].clone();
        assert!(is_payment(&choice["message"]["tool_calls"][0]), "{}: {choice}", format.name);
    }
    assert!(held >= 10, "{held} formats can be held to a schema");
}

#[tokio::test]
async fn a_call_the_model_begins_itself_is_held_too_and_text_is_not() {
    let client = tool_client(ToolFormat::named("llama3_json").unwrap());
    let ask = |bias: Value| json!({"tools": [pay(true), wait_tool()], "max_tokens": 100, "logit_bias": bias});
    // `{` begins a call in this format, and is made likely; so are the letters of the strict function's name.
    let call = client.chat(ask(json!({"123": 100, "112": 50}))).await.json()["choices"][0].clone();
    assert!(is_payment(&call["message"]["tool_calls"][0]), "{call}");
    let text = client.chat(ask(json!({"120": 100}))).await.json()["choices"][0].clone();
    assert!(text["message"]["content"].as_str().is_some_and(|text| text.starts_with("xxx")), "{text}");
}

#[tokio::test]
async fn with_a_form_and_tools_an_answer_is_one_or_the_other() {
    let (mut answers, mut calls) = (0, 0);
    for format in TOOL_FORMATS.iter().filter(|format| !format.harmony) {
        let client = tool_client(format);
        let ask = json!({"tools": [pay(true), wait_tool()], "response_format": schema_format(), "max_tokens": 150, "temperature": 1});
        if format.place().is_none() {
            let error = client.chat(ask).await.error();
            assert_eq!(error["param"], "response_format.json_schema.schema", "{}: {error}", format.name);
            continue;
        }
        for seed in 0..6 {
            let reply = client.chat(merged(ask.clone(), json!({"seed": seed}))).await;
            assert_eq!(reply.status, 200, "{}: {}", format.name, reply.text);
            let choice = reply.json()["choices"][0].clone();
            match choice["finish_reason"].as_str().unwrap() {
                "tool_calls" => {
                    calls += 1;
                    let made = choice["message"]["tool_calls"].as_array().unwrap();
                    assert!(
                        made.iter().all(|call| call["function"]["name"] != "pay" || is_payment(call)),
                        "{choice}"
                    );
                    assert_eq!(choice["message"]["content"], Value::Null, "{}: {choice}", format.name);
                }
                "stop" => {
                    answers += 1;
                    let text = choice["message"]["content"].as_str().unwrap();
                    assert!(is_person(&serde_json::from_str(text).unwrap()), "{}: {text}", format.name);
                }
                _ => {}
            }
        }
        // Where a call must be made, the form has nothing to say.
        let must = merged(ask, json!({"tool_choice": {"type": "function", "function": {"name": "pay"}}}));
        let choice = client.chat(must).await.json()["choices"][0].clone();
        assert!(is_payment(&choice["message"]["tool_calls"][0]), "{}: {choice}", format.name);
    }
    assert!(answers >= 3 && calls >= 3, "{answers} answers and {calls} calls");
    let client = tool_client(ToolFormat::named("hermes").unwrap());
    let regex = json!({"tools": [wait_tool()], "structured_outputs": {"regex": "[a-z]+"}});
    assert_eq!(client.chat(regex).await.error()["param"], "structured_outputs.regex");
}

#[tokio::test]
async fn allowed_tokens_and_bad_words_are_kept_to() {
    let client = client(64);
    let said = async |extra: Value| {
        let reply =
            client.complete(merged(json!({"temperature": 1, "max_tokens": 60, "seed": 2}), extra)).await;
        assert_eq!(reply.status, 200, "{}", reply.text);
        reply.json()["choices"][0]["text"].as_str().unwrap().to_owned()
    };
    // As vLLM does it: what ends an answer is a token like any other.
    let text = said(json!({"allowed_token_ids": [97, 98, 99]})).await;
    assert!(text.len() == 60 && text.bytes().all(|byte| (97..100).contains(&byte)), "{text}");
    let text =
        said(json!({"allowed_token_ids": [97, 98], "bad_words": ["aa", "bb"], "ignore_eos": true})).await;
    assert!(text == "ab".repeat(30) || text == "ba".repeat(30), "{text}");
    let text = said(json!({"structured_outputs": {"regex": "[ab]{20}"}, "bad_words": ["a"]})).await;
    assert_eq!(text, "b".repeat(20), "a form and what is forbidden hold together");
    let stuck = client
        .complete(json!({"structured_outputs": {"choice": ["a"]}, "bad_words": ["a"], "max_tokens": 5}))
        .await;
    assert!(stuck.status == 500 && stuck.text.contains("every token is forbidden"), "{}", stuck.text);
    for (extra, param) in [
        (json!({"allowed_token_ids": []}), "allowed_token_ids"),
        (json!({"allowed_token_ids": [259]}), "allowed_token_ids"),
        (json!({"bad_words": [""]}), "bad_words"),
        (json!({"bad_words": vec!["x"; 257]}), "bad_words"),
        (json!({"thinking_token_budget": 5}), "thinking_token_budget"),
    ] {
        assert_eq!(client.complete(extra).await.error()["param"], param);
    }
}

#[tokio::test]
async fn a_call_that_must_be_made_waits_for_the_reasoning() {
    let parsers = Parsers { tools: ToolFormat::named("hermes"), reasoning: ReasoningFormat::named("think") };
    let app = App {
        model: facts(),
        parsers,
        tokenizer: Arc::new(tokenizer_with(["<|end|>", "<think>", "</think>"])),
        template: Some(Arc::new(tool_template())),
        ..app(Arc::new(engine(128)))
    };
    let client = Client::with(ServerConfig::default(), app);
    let ask = |extra: Value| {
        let base = json!({"tools": [wait_tool(), pay(false)], "max_tokens": 400, "temperature": 1, "seed": 7, "thinking_token_budget": 6});
        merged(base, extra)
    };
    let named = json!({"type": "function", "function": {"name": "pay"}});
    let opens = json!({"257": 100, "258": -100});
    for (extra, thinks) in [
        // The model opens its reasoning itself, the template did, or it does not think.
        (json!({"tool_choice": named, "logit_bias": opens}), true),
        (
            json!({"tool_choice": named, "chat_template_kwargs": {"thinking": true}, "logit_bias": {"258": -100}}),
            true,
        ),
        (json!({"tool_choice": named, "logit_bias": {"257": -100}}), false),
        (
            json!({"tools": [pay(false)], "tool_choice": "required", "parallel_tool_calls": false, "logit_bias": opens}),
            true,
        ),
    ] {
        let choice = client.chat(ask(extra.clone())).await.json()["choices"][0].clone();
        assert_eq!(choice["finish_reason"], "tool_calls", "{extra}: {choice}");
        let message = &choice["message"];
        assert_eq!(message["reasoning_content"].is_string(), thinks, "{extra}: {choice}");
        let call = &message["tool_calls"][0];
        assert!(is_payment(call), "{extra}: {choice}");
        assert_eq!(message["tool_calls"].as_array().map(Vec::len), Some(1));
        assert!(message["content"].as_str().is_none_or(|text| text.trim().is_empty()), "{choice}");
    }
}

/// The text of an answer's tokens, marks and all, and the answer.
async fn told(client: &Client, ask: Value) -> (String, Value) {
    let reply = client.chat(merged(ask, json!({"return_token_ids": true}))).await;
    assert_eq!(reply.status, 200, "{}", reply.text);
    let choice = reply.json()["choices"][0].clone();
    let ids = choice["token_ids"].as_array().unwrap().iter().map(|id| id.as_u64().unwrap());
    let bytes = ids.flat_map(|id| match id {
        257 => b"<think>".to_vec(),
        258 => b"</think>".to_vec(),
        id => vec![id as u8],
    });
    (String::from_utf8_lossy(&bytes.collect::<Vec<u8>>()).into_owned(), choice)
}

/// In every format: also where a call's arguments have no grammar, and where calls count at the start of an answer alone.
#[tokio::test]
async fn calls_of_every_format_that_must_be_made_wait_for_the_reasoning() {
    for format in TOOL_FORMATS.iter().filter(|format| !format.harmony) {
        let parsers = Parsers { tools: Some(format), reasoning: ReasoningFormat::named("think") };
        let app = App {
            model: facts(),
            parsers,
            tokenizer: Arc::new(tokenizer_with(["<|end|>", "<think>", "</think>"])),
            template: Some(Arc::new(tool_template())),
            ..app(Arc::new(engine(128)))
        };
        let client = Client::with(ServerConfig::default(), app);
        let named = json!({"type": "function", "function": {"name": "pay"}});
        let ask = json!({"tools": [wait_tool(), pay(false)], "tool_choice": named, "max_tokens": 300, "temperature": 1, "seed": 7,
            "thinking_token_budget": 6, "chat_template_kwargs": {"thinking": true}, "logit_bias": {"257": -100, "258": -100}});
        let (text, choice) = told(&client, ask).await;
        let (thought, answer) =
            text.split_once("</think>").unwrap_or_else(|| panic!("{}: {text}", format.name));
        assert!(!thought.is_empty() && choice["message"]["reasoning_content"].is_string(), "{choice}");
        // Kimi numbers its calls.
        let opening = format.opening(Some("pay"));
        let opening = opening.split(":0").next().unwrap_or_default().trim_end();
        let begins = answer.trim_start().starts_with(opening);
        assert!(begins, "{}: {answer:?}", format.name);
        if format.place().is_some() {
            assert!(is_payment(&choice["message"]["tool_calls"][0]), "{}: {choice}", format.name);
        }
    }
}

#[tokio::test]
async fn gpt_oss_thinks_before_a_call_that_must_be_made() {
    let parsers =
        Parsers { tools: ToolFormat::named("harmony"), reasoning: ReasoningFormat::named("harmony") };
    let app = App {
        model: facts(),
        parsers,
        tokenizer: Arc::new(tokenizer_with(["<|return|>", "<|channel|>", "<|message|>"])),
        template: Some(Arc::new(tool_template())),
        ..app(Arc::new(engine(128)))
    };
    let client = Client::with(ServerConfig::default(), app);
    let ask = json!({"tools": [wait_tool(), pay(false)], "max_tokens": 300, "temperature": 1, "seed": 7, "thinking_token_budget": 6,
        "logit_bias": {"257": -100, "258": -100}, "parallel_tool_calls": false});
    for choice in [json!({"type": "function", "function": {"name": "pay"}}), json!("required")] {
        let reply = client.chat(merged(ask.clone(), json!({"tool_choice": choice}))).await;
        let answer = reply.json()["choices"][0].clone();
        assert_eq!(answer["finish_reason"], "tool_calls", "{answer}");
        assert!(
            answer["message"]["reasoning_content"].as_str().is_some_and(|text| !text.is_empty()),
            "{answer}"
        );
        let call = &answer["message"]["tool_calls"][0];
        assert!(call["function"]["name"] == "wait" || is_payment(call), "{answer}");
    }
}

#[tokio::test]
async fn reasoning_ends_with_its_budget() {
    let parsers = Parsers { tools: None, reasoning: ReasoningFormat::named("think") };
    let tokenizer = Arc::new(tokenizer_with(["<|end|>", "<think>", "</think>"]));
    let app = App {
        model: facts(),
        parsers,
        tokenizer,
        template: Some(Arc::new(template())),
        ..app(Arc::new(engine(64)))
    };
    let client = Client::with(ServerConfig::default(), app);
    // The model would think for ever, in words of x.
    let ask = |extra: Value| {
        merged(
            json!({"temperature": 0, "max_tokens": 200, "return_token_ids": true, "logit_bias": {"257": 100, "258": -100, "256": -100}}),
            extra,
        )
    };
    let ids = async |extra: Value| -> Vec<u64> {
        let reply = client.chat(ask(extra)).await;
        assert_eq!(reply.status, 200, "{}", reply.text);
        reply.json()["choices"][0]["token_ids"]
            .as_array()
            .unwrap()
            .iter()
            .map(|id| id.as_u64().unwrap())
            .collect()
    };
    assert!(!ids(json!({})).await.contains(&258), "or there is nothing to prove");
    for budget in [0, 1, 17] {
        let said = ids(json!({"thinking_token_budget": budget})).await;
        assert_eq!(said.iter().position(|id| *id == 258), Some(1 + budget), "{said:?}");
    }
    let both = json!({"thinking_token_budget": 3, "structured_outputs": {"choice": ["yes"]}, "logit_bias": {"257": 100}});
    let choice = client.chat(ask(both)).await.json()["choices"][0].clone();
    assert_eq!(
        (&choice["message"]["content"], &choice["finish_reason"]),
        (&json!("yes"), &json!("stop")),
        "{choice}"
    );
    // Who does not think has no budget to keep to.
    let plain = ids(json!({"thinking_token_budget": 3, "logit_bias": {"120": 100, "257": -100, "258": -100, "256": -100}})).await;
    assert!(!plain.contains(&258));
}

/// As vLLM does it: where a call must be made, nobody has to ask for its arguments to be what the schema says.
#[tokio::test]
async fn calls_that_must_be_made_are_held_where_they_can_be() {
    let client = tool_client(ToolFormat::named("hermes").unwrap());
    let ask = |tool: Value| json!({"tools": [tool], "tool_choice": "required", "max_tokens": 120, "temperature": 1});
    let call = async |tool: Value| {
        client.chat(ask(tool)).await.json()["choices"][0]["message"]["tool_calls"][0].clone()
    };
    assert!(is_payment(&call(pay(false)).await));
    // A schema that cannot be kept to is no reason to refuse what was not asked to be strict.
    let odd = json!({"type": "function", "function": {"name": "odd", "parameters": {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": true}}}}});
    assert_eq!(call(odd).await["function"]["name"], "odd");
    let loose = tool_client(ToolFormat::named("pythonic").unwrap());
    assert_eq!(loose.chat(ask(pay(false))).await.status, 200);
}
