//! Anthropic's API: what reaches the template, what is written back, whole and streamed, and what is refused.

mod common;

use std::sync::Arc;

use axum::body::Body;
use common::{Client, FakeEngine, Reply, app, events, merged, reply, tokenizer, tool_app};
use folio_engine::FinishReason;
use folio_engine::handle::Rejected;
use folio_engine::request::RetentionRange;
use folio_server::{App, Parsers, ServerConfig};
use folio_text::{ChatTemplate, ReasoningFormat, TemplateSources};
use serde_json::{Value, json};

const MESSAGES: &str = "/v1/messages";
const CALL: &str =
    "<tool_call>\n{\"name\": \"get_weather\", \"arguments\": {\"city\": \"Paris\"}}\n</tool_call>";

/// Shows tools, calls, results and reasoning; thinks unless told not to.
fn template() -> ChatTemplate {
    let source = "{% if messages[0].role == 'system' %}[system]{{ messages[0].content }}<|end|>{% endif %}\
                  {% for t in tools or [] %}<tool>{{ t | tojson }}</tool>{% endfor %}\
                  {% for m in messages %}{% if not (loop.first and m.role == 'system') %}[{{ m.role }}]\
                  {% if m.reasoning_content is defined %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content or '' }}\
                  {% for c in m.tool_calls or [] %}<call>{{ c.function | tojson }}</call>{% endfor %}\
                  {% if m.tool_call_id is defined %}({{ m.tool_call_id }}, {{ m.name }}){% endif %}<|end|>{% endif %}{% endfor %}\
                  {% if add_generation_prompt %}[assistant]\
                  {% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}";
    let mut sources = TemplateSources::default();
    sources.add("default", source, "test");
    ChatTemplate::compile(sources, tokenizer().special_tokens()).unwrap().unwrap()
}

fn client(engine: &Arc<FakeEngine>) -> Client {
    let mut app = tool_app(engine.clone(), 4096);
    app.template = Some(Arc::new(template()));
    Client::with(ServerConfig::default(), app)
}

fn tools() -> Value {
    let schema = json!({"type": "object", "properties": {"city": {"type": "string"}}});
    json!([
        {"name": "get_weather", "description": "Weather", "input_schema": schema},
        {"name": "now", "input_schema": {"type": "object"}},
    ])
}

/// A request with one user message "hi" and these further fields.
async fn ask(client: &Client, extra: Value) -> Reply {
    let base =
        json!({"model": "test-model", "max_tokens": 400, "messages": [{"role": "user", "content": "hi"}]});
    client.post(MESSAGES, &merged(base, extra)).await
}

fn prompt(engine: &FakeEngine) -> String {
    let special = |id: u32| if id >= 256 { b'$' } else { id as u8 };
    String::from_utf8(engine.last().prompt.iter().map(|id| special(*id)).collect()).unwrap()
}

/// `(event's name, data)` of a stream.
fn named(reply: &Reply) -> Vec<(String, Value)> {
    let parse = |event: &str| {
        let (name, data) =
            event.strip_prefix("event: ").expect("a name").split_once("\ndata: ").expect("data");
        (name.to_owned(), serde_json::from_str(data).expect("JSON"))
    };
    reply.text.split("\n\n").filter(|event| !event.is_empty()).map(parse).collect()
}

/// The message that a stream amounts to, gathered as the SDK does it, with every event's place checked.
fn gathered(reply: &Reply) -> Value {
    let list = named(reply);
    assert!(list.iter().all(|(name, data)| data["type"] == **name), "{}", reply.text);
    let mut message = list[0].1["message"].clone();
    assert_eq!(list[0].0, "message_start");
    assert_eq!((&message["content"], &message["stop_reason"]), (&json!([]), &Value::Null));
    let (mut open, mut input) = (false, String::new());
    for (name, data) in &list[1..] {
        let content = message["content"].as_array_mut().unwrap();
        match name.as_str() {
            "content_block_start" => {
                assert!(!open && data["index"] == content.len());
                open = true;
                content.push(data["content_block"].clone());
            }
            "content_block_delta" => {
                assert!(open && data["index"] == content.len() - 1);
                let block = content.last_mut().unwrap();
                let delta = &data["delta"];
                let mut append = |field: &str| {
                    block[field] =
                        format!("{}{}", block[field].as_str().unwrap(), delta[field].as_str().unwrap())
                            .into();
                };
                match delta["type"].as_str().unwrap() {
                    "text_delta" => append("text"),
                    "thinking_delta" => append("thinking"),
                    "signature_delta" => append("signature"),
                    "input_json_delta" => input.push_str(delta["partial_json"].as_str().unwrap()),
                    other => panic!("{other}"),
                }
            }
            "content_block_stop" => {
                assert!(std::mem::take(&mut open) && data["index"] == content.len() - 1);
                let block = content.last_mut().unwrap();
                if block["type"] == "tool_use" {
                    block["input"] = serde_json::from_str(&std::mem::take(&mut input)).unwrap();
                }
            }
            "message_delta" => {
                for field in ["stop_reason", "stop_sequence"] {
                    message[field] = data["delta"][field].clone();
                }
                message["usage"] = data["usage"].clone();
            }
            "message_stop" => assert!(!open),
            other => panic!("{other}"),
        }
    }
    let names: Vec<&str> = list.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(names[names.len() - 2..], ["message_delta", "message_stop"]);
    message
}

/// The same message without what differs between two answers.
fn comparable(mut message: Value) -> Value {
    message["id"] = Value::Null;
    for block in message["content"].as_array_mut().unwrap() {
        if block["type"] == "tool_use" {
            assert!(block["id"].as_str().unwrap().starts_with("toolu_"), "{block}");
            block["id"] = Value::Null;
        }
    }
    message
}

#[tokio::test]
async fn a_message_is_answered() {
    let engine = FakeEngine::saying("hello");
    let client = client(&engine);
    let body = json!({"system": "Be brief.", "temperature": 0.5, "top_p": 0.9, "top_k": 3, "metadata": {"user_id": "u"}});
    let answer = ask(&client, body).await;
    assert_eq!(answer.status, 200, "{}", answer.text);
    let message = answer.json();
    assert!(message["id"].as_str().unwrap().starts_with("msg_"));
    assert_eq!(answer.headers["request-id"], answer.headers["x-request-id"]);
    let usage = json!({
        "input_tokens": engine.last().prompt.len(), "cache_creation_input_tokens": 0, "cache_read_input_tokens": 0,
        "cache_creation": {"ephemeral_5m_input_tokens": 0, "ephemeral_1h_input_tokens": 0},
        "output_tokens": 6, "output_tokens_details": {"thinking_tokens": 0}, "service_tier": "standard",
    });
    let expected = json!({
        "id": message["id"], "type": "message", "role": "assistant", "model": "test-model",
        "content": [{"type": "text", "text": "hello", "citations": null}],
        "stop_reason": "end_turn", "stop_sequence": null, "usage": usage,
    });
    assert_eq!(message, expected);
    assert_eq!(prompt(&engine), "[system]Be brief.$[user]hi$[assistant]");
    let sampling = engine.last().sampling;
    assert_eq!((sampling.temperature, sampling.top_p, sampling.top_k), (0.5, 0.9, 3));
    assert_eq!((sampling.max_tokens, engine.last().n), (400, 1));
}

#[tokio::test]
async fn blocks_become_the_templates_messages() {
    let engine = FakeEngine::saying("ok");
    let client = client(&engine);
    let text = |text: &str| json!({"type": "text", "text": text});
    let call =
        |id: &str, input: Value| json!({"type": "tool_use", "id": id, "name": "get_weather", "input": input});
    let thought = json!({"type": "thinking", "thinking": "hm", "signature": "s"});
    let messages = json!([
        {"role": "user", "content": "one"},
        {"role": "user", "content": [text("two"), text("three")]},
        {"role": "assistant", "content": [thought, text("I look."), call("a", json!({"city": "Paris"})),
            call("b", json!({"INVALID_JSON": "{\"city"}))]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "a", "content": [text("sun"), text("20 C")]},
            {"type": "tool_result", "tool_use_id": "b", "is_error": true, "content": "no such city"},
            text("So?"),
        ]},
    ]);
    let system = json!([text("S1"), text("S2")]);
    let answer = ask(&client, json!({"messages": messages, "system": system})).await;
    assert_eq!(answer.status, 200, "{}", answer.text);
    let expected = "[system]S1\nS2$[user]one\ntwo\nthree$[assistant]<think>hm</think>I look.\
        <call>{\"name\": \"get_weather\", \"arguments\": {\"city\": \"Paris\"}}</call>\
        <call>{\"name\": \"get_weather\", \"arguments\": \"{\\\"city\"}</call>$\
        [tool]sun\n20 C(a, get_weather)$[tool]Error: no such city(b, get_weather)$[user]So?$[assistant]";
    assert_eq!(prompt(&engine), expected);
}

#[tokio::test]
async fn the_model_goes_on_with_what_the_assistant_began() {
    let engine = FakeEngine::saying(" blue");
    let client = client(&engine);
    let messages = |last: Value| json!({"messages": [{"role": "user", "content": "Sky?"}, {"role": "assistant", "content": last}]});
    let answer = ask(&client, messages("It is".into())).await.json();
    assert_eq!(prompt(&engine), "[user]Sky?$[assistant]It is");
    assert_eq!(answer["content"][0]["text"], " blue");
    ask(&client, messages("".into())).await;
    assert_eq!(prompt(&engine), "[user]Sky?$[assistant]");
    let error = ask(&client, messages("It is ".into())).await.error();
    assert!(error["message"].as_str().unwrap().contains("whitespace"), "{error}");
    let begun = merged(messages("It is".into()), json!({"tools": tools(), "tool_choice": {"type": "any"}}));
    assert_eq!(ask(&client, begun).await.error()["details"]["param"], "tool_choice");
}

#[tokio::test]
async fn a_stream_amounts_to_the_whole() {
    let said = format!("<think>\nWhich city?\n</think>\n\nI look.\n{CALL}\n");
    for (text, extra) in [
        ("hello", json!({})),
        ("", json!({})),
        (" ", json!({})),
        (said.as_str(), json!({"tools": tools()})),
        (said.as_str(), json!({})),
        (said.as_str(), json!({"tools": tools(), "thinking": {"type": "adaptive", "display": "omitted"}})),
        ("abc, def", json!({"stop_sequences": [", d"]})),
    ] {
        let engine = FakeEngine::saying(text);
        let client = client(&engine);
        let whole = ask(&client, extra.clone()).await;
        let streamed = ask(&client, merged(extra, json!({"stream": true}))).await;
        assert_eq!(streamed.headers["content-type"], "text/event-stream; charset=utf-8");
        assert_eq!(comparable(gathered(&streamed)), comparable(whole.json()), "{text}");
    }
}

#[tokio::test]
async fn thinking_and_calls_are_blocks_of_their_own() {
    let engine = FakeEngine::saying(&format!("<think>\nWhich city?\n</think>\n\nI look.\n{CALL}"));
    let client = client(&engine);
    let message = ask(&client, json!({"tools": tools()})).await.json();
    let content = message["content"].as_array().unwrap();
    assert_eq!(content.len(), 3, "{message}");
    assert_eq!(
        (&content[0]["type"], &content[0]["thinking"]),
        (&json!("thinking"), &json!("\nWhich city?\n"))
    );
    assert_eq!(content[0]["signature"].as_str().unwrap().len(), 64);
    assert_eq!(content[1]["text"], "I look.\n");
    assert_eq!(
        (&content[2]["name"], &content[2]["input"]),
        (&json!("get_weather"), &json!({"city": "Paris"}))
    );
    assert_eq!(message["stop_reason"], "tool_use");
    assert!(message["usage"]["output_tokens_details"]["thinking_tokens"].as_u64().unwrap() > 5);
    // It goes back as it came.
    let id = &content[2]["id"];
    let result =
        json!({"role": "user", "content": [{"type": "tool_result", "tool_use_id": id, "content": "sun"}]});
    let messages =
        json!([{"role": "user", "content": "hi"}, {"role": "assistant", "content": content}, result]);
    assert_eq!(ask(&client, json!({"messages": messages, "tools": tools()})).await.status, 200);
    assert!(
        prompt(&engine).contains("[assistant]<think>\nWhich city?\n</think>I look.\n<call>"),
        "{}",
        prompt(&engine)
    );
}

#[tokio::test]
async fn tools_are_chosen_as_asked() {
    let engine = FakeEngine::saying(&format!("{CALL}\n{CALL}"));
    let client = client(&engine);
    let chosen = |choice: Value| json!({"tools": tools(), "tool_choice": choice});
    let calls = |reply: &Reply| reply.json()["content"].as_array().unwrap().len();
    let both = ask(&client, chosen(json!({"type": "auto"}))).await;
    assert_eq!(calls(&both), 2);
    assert!(
        prompt(&engine).contains("<tool>{\"type\": \"function\", \"function\": {\"name\": \"get_weather\"")
    );
    let one = ask(&client, chosen(json!({"type": "auto", "disable_parallel_tool_use": true}))).await;
    assert_eq!((calls(&one), &one.json()["stop_reason"]), (1, &json!("tool_use")));
    let none = ask(&client, chosen(json!({"type": "none"}))).await.json();
    assert!(
        none["content"][0]["text"].as_str().unwrap().starts_with("<tool_call>")
            && !prompt(&engine).contains("<tool>")
    );

    engine.plan(|plan| plan.say = "now\", \"arguments\": {}}\n</tool_call>".into());
    let any = ask(&client, chosen(json!({"type": "any"}))).await.json();
    assert!(prompt(&engine).ends_with("[assistant]<tool_call>\n{\"name\": \""), "{}", prompt(&engine));
    assert_eq!((&any["content"][0]["name"], &any["content"][0]["input"]), (&json!("now"), &json!({})));
    engine.plan(|plan| plan.say = "{\"city\": \"Ro".into());
    let named = chosen(json!({"type": "tool", "name": "get_weather"}));
    let cut = ask(&client, merged(named, json!({"max_tokens": 12}))).await.json();
    assert_eq!(cut["content"][0]["input"], json!({"INVALID_JSON": "{\"city\": \"Ro"}));
    assert_eq!(cut["stop_reason"], "max_tokens");
}

#[tokio::test]
async fn every_end_has_its_reason() {
    let engine = FakeEngine::saying("abcdef");
    let client = client(&engine);
    let end = async |extra: Value| {
        let message = ask(&client, extra).await.json();
        (
            message["stop_reason"].clone(),
            message["stop_sequence"].clone(),
            message["content"][0]["text"].clone(),
        )
    };
    assert_eq!(end(json!({})).await, (json!("end_turn"), Value::Null, json!("abcdef")));
    assert_eq!(
        end(json!({"stop_sequences": ["x", "de"]})).await,
        (json!("stop_sequence"), json!("de"), json!("abc"))
    );
    assert_eq!(end(json!({"max_tokens": 2})).await, (json!("max_tokens"), Value::Null, json!("ab")));
    engine.plan(|plan| plan.say = "a".repeat(5000).into());
    let (reason, _, text) = end(json!({"max_tokens": 5000})).await;
    assert_eq!(reason, "model_context_window_exceeded");
    assert_eq!(text.as_str().unwrap().len(), 4096 - engine.last().prompt.len());
    // Nothing but the prompt is computed.
    let message = ask(&client, json!({"max_tokens": 0})).await.json();
    assert_eq!((&message["content"], &message["stop_reason"]), (&json!([]), &json!("max_tokens")));
    assert_eq!(message["usage"]["output_tokens"], 0);
    assert_eq!(engine.last().sampling.max_tokens, 1);
}

#[tokio::test]
async fn thinking_turns_the_templates_switch() {
    let engine = FakeEngine::saying("ok");
    let client = client(&engine);
    let thinking = |value: Value| json!({"thinking": value});
    let off = "[user]hi$[assistant]<think>\n\n</think>\n\n";
    let on = "[user]hi$[assistant]";
    for (value, expected) in
        [(json!({"type": "disabled"}), off), (json!({"type": "adaptive"}), on), (Value::Null, on)]
    {
        let answer = ask(&client, thinking(value.clone())).await;
        assert_eq!(answer.status, 200, "{}", answer.text);
        assert_eq!(prompt(&engine), expected, "{value}");
    }
    let enabled =
        |budget: u32| json!({"max_tokens": 2000, "thinking": {"type": "enabled", "budget_tokens": budget}});
    assert_eq!(ask(&client, enabled(1999)).await.status, 200);
    for budget in [1023, 2000] {
        let error = ask(&client, enabled(budget)).await.error();
        assert_eq!(error["details"]["param"], "thinking.budget_tokens", "{budget}: {error}");
    }
    // gpt-oss's reasoning is a channel, which a budget ends, too.
    let parsers = Parsers { tools: None, reasoning: ReasoningFormat::named("harmony") };
    let mut channels = App { template: Some(Arc::new(template())), parsers, ..app(engine.clone()) };
    channels.model.context_length = 4096;
    let channels = Client::with(ServerConfig::default(), channels);
    assert_eq!(ask(&channels, enabled(1999)).await.status, 200);
    assert_eq!(ask(&channels, enabled(1500)).await.status, 200);
    assert!(engine.last().sampling.rules.is_some(), "the budget is kept to");
    // A model that does not think, with a template that has no switch.
    let plain = Client::new(engine.clone());
    let answer = ask(&plain, json!({"max_tokens": 2, "thinking": {"type": "disabled"}})).await;
    assert_eq!(answer.status, 200, "{}", answer.text);
    let answer =
        ask(&plain, json!({"max_tokens": 2, "thinking": {"type": "adaptive", "display": "omitted"}})).await;
    assert_eq!(answer.status, 200, "{}", answer.text);
    let answer =
        ask(&plain, json!({"max_tokens": 2000, "thinking": {"type": "enabled", "budget_tokens": 1999}}));
    assert_ne!(answer.await.error()["details"]["param"], "thinking.type", "there is nothing to turn");
}

#[tokio::test]
async fn what_is_not_honoured_is_refused_by_name() {
    let engine = FakeEngine::saying("ok");
    let client = client(&engine);
    let user = |block: Value| json!({"messages": [{"role": "user", "content": [block]}]});
    let tool = |extra: Value| json!({"tools": [merged(tools()[0].clone(), extra)]});
    let cached = |control: Value| user(json!({"type": "text", "text": "a", "cache_control": control}));
    let block = "messages[0].content[0]";
    let cases = [
        (json!({"max_tokens": null}), "max_tokens"),
        (json!({"max_tokens": -1}), "max_tokens"),
        (json!({"messages": []}), "messages"),
        (json!({"messages": [{"role": "robot", "content": "a"}]}), "messages[0].role"),
        (json!({"messages": [{"role": "user", "content": ""}]}), "messages[0].content"),
        (json!({"messages": [{"role": "user", "content": [ ]}]}), "messages[0].content"),
        (json!({"messages": [{"role": "user"}]}), "messages[0].content"),
        (json!({"messages": [{"role": "user", "content": "a", "name": "b"}]}), "messages[0].name"),
        (user(json!({"type": "text", "text": ""})), "messages[0].content[0].text"),
        (user(json!({"type": "image", "source": {}})), "messages[0].content[0].image"),
        (user(json!({"type": "document", "source": {}})), "messages[0].content[0].document"),
        (user(json!({"type": "server_tool_use"})), "messages[0].content[0].server_tool_use"),
        (user(json!({"type": "novelty"})), "messages[0].content[0].novelty"),
        (user(json!({"type": "thinking", "thinking": "a", "signature": ""})), "messages[0].content[0].type"),
        (user(json!({"type": "tool_result", "tool_use_id": "x"})), "messages[0].content[0].tool_use_id"),
        (user(json!({"type": "text", "text": "a", "color": 1})), "messages[0].content[0].color"),
        (json!({"system": [{"type": "image"}]}), "system[0].image"),
        (json!({"system": 1}), "system"),
        (json!({"temperature": 3}), "temperature"),
        (json!({"top_k": -2}), "top_k"),
        (json!({"stop_sequences": [""]}), "stop_sequences"),
        (json!({"stop_sequences": 1}), "stop_sequences"),
        (json!({"metadata": {"name": "x"}}), "metadata.name"),
        (json!({"service_tier": "gold"}), "service_tier"),
        (json!({"speed": "fast"}), "speed"),
        (json!({"container": "c"}), "container"),
        (json!({"mcp_servers": [{"url": "x"}]}), "mcp_servers"),
        (json!({"context_management": {"edits": [1]}}), "context_management"),
        (json!({"context_management": {"edits": [{"type": "compact_20260112"}]}}), "context_management"),
        (json!({"output_config": {"effort": "lowest"}}), "output_config.effort"),
        (json!({"output_config": {"task_budget": 7}}), "output_config.task_budget"),
        (json!({"thinking": {"type": "between_tools"}}), "thinking.type"),
        (json!({"thinking": {"type": "sometimes"}}), "thinking.type"),
        (json!({"thinking": {"type": "adaptive", "display": "all"}}), "thinking.display"),
        (json!({"thinking": {"type": "disabled", "display": "omitted"}}), "thinking.display"),
        (json!({"logit_bias": {"1": 1}}), "logit_bias"),
        (json!({"n": 2}), "n"),
        (json!({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}), "tools[0].type"),
        (json!({"tools": [{"name": "a b", "input_schema": {"type": "object"}}]}), "tools[0].name"),
        (json!({"tools": [{"name": "a"}]}), "tools[0].input_schema"),
        (json!({"tools": [{"name": "a", "input_schema": {"type": "array"}}]}), "tools[0].input_schema.type"),
        (json!({"tools": [tools()[0], tools()[0]]}), "tools[1].name"),
        (json!({"tools": [tools()[0], {"type": "web_serch", "name": "web_search"}]}), "tools[1].type"),
        (
            merged(
                json!({"tools": [tools()[0], {"type": "web_search_20250305", "name": "web_search"}]}),
                json!({"tool_choice": {"type": "tool", "name": "web_search"}}),
            ),
            "tool_choice.name",
        ),
        (tool(json!({"allowed_callers": ["code_execution_20250825"]})), "tools[0].allowed_callers"),
        (tool(json!({"input_examples": [{}, {"a": 1}]})), "tools[0].input_examples"),
        (json!({"tool_choice": {"type": "any"}}), "tool_choice"),
        (json!({"tools": tools(), "tool_choice": {"type": "tool", "name": "x"}}), "tool_choice.name"),
        (json!({"tools": tools(), "tool_choice": {"type": "all"}}), "tool_choice.type"),
        (cached(json!({"type": "forever"})), "messages[0].content[0].cache_control.type"),
        (cached(json!({"type": "ephemeral", "ttl": "2h"})), "messages[0].content[0].cache_control.ttl"),
        (cached(json!({"type": "ephemeral", "scope": "all"})), "messages[0].content[0].cache_control.scope"),
    ];
    for (extra, param) in cases {
        let answer = ask(&client, extra.clone()).await;
        assert_eq!(answer.status, 400, "{extra}: {}", answer.text);
        let error = answer.error();
        assert_eq!(
            (&error["type"], &error["details"]["param"]),
            (&json!("invalid_request_error"), &json!(param)),
            "{extra}"
        );
        assert!(error["message"].as_str().unwrap().contains(param), "{error}");
    }
    assert!(engine.requests.lock().unwrap().is_empty());
    let reasonless = Client::new(engine.clone());
    let answer = ask(&reasonless, merged(json!({"max_tokens": 2}), json!({"tools": tools()}))).await;
    assert_eq!(answer.error()["details"]["param"], "tools");
    let call = json!([{"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "b", "input": {}}]}]);
    let answer = ask(&reasonless, json!({"max_tokens": 2, "messages": call})).await;
    assert_eq!(answer.error()["details"]["param"], format!("{block}.tool_use"));
}

#[tokio::test]
async fn breakpoints_split_the_prompts_tokens() {
    let engine = FakeEngine::saying("ok");
    let client = client(&engine);
    let control = |ttl: &str| json!({"type": "ephemeral", "ttl": ttl});
    let marked = |text: &str, ttl: &str| json!({"type": "text", "text": text, "cache_control": control(ttl)});
    let mut tools = tools();
    tools[1]["cache_control"] = control("1h");
    let messages = json!([
        {"role": "user", "content": [marked("first", "5m"), {"type": "text", "text": "second"}]},
        {"role": "assistant", "content": "yes"},
        {"role": "user", "content": [marked("third", "5m"), {"type": "text", "text": "fourth"}]},
    ]);
    let body = json!({"tools": tools, "system": [marked("System.", "1h"), {"type": "text", "text": "More."}],
        "messages": messages});
    let usage = async |cached: u32| {
        engine.plan(|plan| plan.cached = cached);
        let usage = ask(&client, body.clone()).await.json()["usage"].clone();
        let field = |name: &str| usage[name].as_u64().unwrap();
        let all =
            field("input_tokens") + field("cache_creation_input_tokens") + field("cache_read_input_tokens");
        assert_eq!(all, engine.last().prompt.len() as u64);
        assert_eq!(field("cache_read_input_tokens"), u64::from(cached));
        let creation = &usage["cache_creation"];
        let parts = ["ephemeral_1h_input_tokens", "ephemeral_5m_input_tokens"]
            .map(|name| creation[name].as_u64().unwrap());
        assert_eq!(parts[0] + parts[1], field("cache_creation_input_tokens"));
        parts
    };
    let parts = usage(0).await;
    // One byte is one token here. The template has the system prompt before the tools, so a breakpoint after the tools takes
    // in both, and the header of the user's turn, which is the same whatever the user says.
    let text = prompt(&engine);
    let before = |needle: &str| text.find(needle).unwrap() as u64;
    let tools_end = before("first");
    assert_eq!(parts, [tools_end, before("\nfourth") - tools_end]);
    // The cache is told how long each part is meant to stay.
    let kept = |tokens: std::ops::Range<u64>, minutes: u64| RetentionRange {
        tokens: tokens.start as u32..tokens.end as u32,
        priority: 60,
        ttl_us: Some(minutes * 60_000_000),
        pin: false,
    };
    let expected = [kept(0..tools_end, 60), kept(tools_end..before("\nfourth"), 5)];
    assert_eq!(engine.last().retention, expected);
    assert_eq!(usage(10).await, [tools_end - 10, parts[1]]);
    assert_eq!(usage(tools_end as u32 + 3).await, [0, parts[1] - 3]);
    assert_eq!(usage(text.len() as u32 - 1).await, [0, 0]);
}

#[tokio::test]
async fn the_request_itself_may_ask_for_a_breakpoint() {
    let engine = FakeEngine::saying("ok");
    let client = client(&engine);
    let answer = ask(&client, json!({"cache_control": {"type": "ephemeral"}})).await.json();
    assert_eq!(prompt(&engine), "[user]hi$[assistant]");
    assert_eq!(answer["usage"]["cache_creation_input_tokens"], "[user]hi$".len());
    assert_eq!(answer["usage"]["input_tokens"], "[assistant]".len());
    let hour = json!({"type": "ephemeral", "ttl": "1h"});
    let block = json!({"type": "text", "text": "a", "cache_control": hour});
    // The last block is the message, a plain string, and not the system block with a breakpoint of its own.
    let system = json!({"system": [block], "cache_control": {"type": "ephemeral"}});
    assert_eq!(ask(&client, system).await.status, 200);
    let with = |count: usize, control: Value| {
        let content = vec![block.clone(); count];
        json!({"messages": [{"role": "user", "content": content}], "cache_control": control})
    };
    assert_eq!(ask(&client, with(4, Value::Null)).await.status, 200);
    assert_eq!(ask(&client, with(4, hour.clone())).await.status, 200, "the last block has it already");
    for (body, param) in [
        (with(5, Value::Null), "messages[0].content[4].cache_control"),
        (with(1, json!({"type": "ephemeral"})), "cache_control.ttl"),
        (
            merged(
                with(0, hour.clone()),
                json!({"messages": [{"role": "user", "content": "a"}],
            "system": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}]}),
            ),
            "cache_control.ttl",
        ),
    ] {
        let answer = ask(&client, body.clone()).await;
        assert_eq!(
            (answer.status.as_u16(), &answer.error()["details"]["param"]),
            (400, &json!(param)),
            "{body}"
        );
    }
}

#[tokio::test]
async fn tokens_are_counted_without_an_answer() {
    let engine = FakeEngine::saying("ok");
    let client = client(&engine);
    let body = json!({"model": "test-model", "messages": [{"role": "user", "content": "hi"}], "system": "S",
        "tools": tools(), "tool_choice": {"type": "any"}, "thinking": {"type": "disabled"}});
    let count = client.post("/v1/messages/count_tokens", &body).await;
    assert_eq!(count.status, 200, "{}", count.text);
    assert!(engine.requests.lock().unwrap().is_empty());
    let usage = ask(&client, body).await.json()["usage"]["input_tokens"].clone();
    assert_eq!(count.json(), json!({"input_tokens": usage}));
    let long = json!({"messages": [{"role": "user", "content": "a".repeat(10_000)}]});
    assert!(
        client.post("/v1/messages/count_tokens", &long).await.json()["input_tokens"].as_u64() > Some(10_000)
    );
    let refused = client.post("/v1/messages/count_tokens", &merged(long, json!({"max_tokens": 1}))).await;
    assert_eq!(refused.error()["details"]["param"], "max_tokens");
}

#[tokio::test]
async fn errors_have_anthropics_shape_wherever_they_arise() {
    let engine = FakeEngine::saying("ok");
    let config = ServerConfig { api_keys: vec!["secret".into()], ..ServerConfig::default() };
    let client = Client::with(config, app(engine.clone()));
    let kind = |reply: &Reply| {
        let json = reply.json();
        assert_eq!(
            (&json["type"], &json["request_id"]),
            (&json!("error"), &json!(reply.headers["request-id"].to_str().unwrap()))
        );
        (reply.status.as_u16(), json["error"]["type"].as_str().unwrap().to_owned())
    };
    let error = |status: u16, kind: &str| (status, kind.to_owned());
    assert_eq!(kind(&ask(&client, json!({})).await), error(401, "authentication_error"));
    let body = json!({"max_tokens": 4, "messages": [{"role": "user", "content": "hi"}]}).to_string();
    let with_key = |key: &str, body: &str| {
        let mut request = client.request("POST", MESSAGES, body.to_owned());
        request.headers_mut().insert("x-api-key", key.parse().unwrap());
        request
    };
    let send = async |request| reply(client.send(request).await).await;
    assert_eq!(kind(&send(with_key("wrong", &body)).await), error(401, "authentication_error"));
    assert_eq!(send(with_key("secret", &body)).await.status, 200);
    let mut old = with_key("secret", &body);
    old.headers_mut().insert("anthropic-version", "2023-01-01".parse().unwrap());
    assert_eq!(kind(&send(old).await), error(400, "invalid_request_error"));
    for version in ["2023-06-01", "2026-10-21"] {
        let mut known = with_key("secret", &body);
        known.headers_mut().insert("anthropic-version", version.parse().unwrap());
        assert_eq!(send(known).await.status, 200, "{version}");
    }
    assert_eq!(kind(&send(with_key("secret", "{")).await), error(400, "invalid_request_error"));

    let client = client.key("secret");
    assert_eq!(kind(&client.get("/v1/messages/batches").await), error(404, "not_found_error"));
    assert_eq!(kind(&client.get(MESSAGES).await), error(405, "invalid_request_error"));
    assert_eq!(kind(&ask(&client, json!({"model": "claude"})).await), error(404, "not_found_error"));
    assert_eq!(
        kind(&ask(&client, json!({"system": "a".repeat(9 << 20)})).await),
        error(413, "request_too_large")
    );
    let refuse = |rejected: Rejected| engine.plan(|plan| plan.reject = Some(rejected));
    refuse(Rejected::QueueFull { queued_requests: 1, queued_tokens: 1, retry_after_s: 7 });
    let full = ask(&client, json!({"max_tokens": 4})).await;
    assert_eq!(
        (kind(&full), &full.headers["retry-after"]),
        (error(429, "rate_limit_error"), &"7".parse().unwrap())
    );
    refuse(Rejected::ShuttingDown);
    let closing = ask(&client, json!({"max_tokens": 4})).await;
    assert_eq!(kind(&closing), error(529, "overloaded_error"));
    assert!(closing.headers.contains_key("retry-after"));

    engine.plan(|plan| plan.end = Some(FinishReason::Error));
    assert_eq!(kind(&ask(&client, json!({"max_tokens": 4})).await), error(500, "api_error"));
    let broken = ask(&client, json!({"max_tokens": 4, "stream": true})).await;
    let (name, last) = named(&broken).pop().unwrap();
    assert_eq!((name.as_str(), &last["error"]["type"]), ("error", &json!("api_error")));
    assert!(events(&broken.text).is_empty(), "no unnamed events, no [DONE]");
    // OpenAI's own routes are as they were.
    assert!(client.chat(json!({"n": 0})).await.error()["param"] == "n");
}

#[tokio::test]
async fn models_are_listed_for_anthropics_clients() {
    let client = Client::new(FakeEngine::saying(""));
    let get = async |path: &str| {
        let mut request = client.request("GET", path, Body::empty());
        request.headers_mut().insert("anthropic-version", "2023-06-01".parse().unwrap());
        reply(client.send(request).await).await.json()
    };
    let model = |id: &str| {
        json!({"type": "model", "id": id, "display_name": id, "created_at": "2023-11-14T22:13:20Z", "lifecycle": "active",
            "max_input_tokens": 255, "max_tokens": 255})
    };
    let page = |ids: &[&str], more: bool| {
        let data: Vec<Value> = ids.iter().map(|id| model(id)).collect();
        json!({"data": data, "has_more": more, "first_id": ids.first(), "last_id": ids.last()})
    };
    assert_eq!(get("/v1/models").await, page(&["test-model", "org/alias"], false));
    assert_eq!(get("/v1/models?limit=1").await, page(&["test-model"], true));
    assert_eq!(get("/v1/models?limit=1&after_id=test-model").await, page(&["org/alias"], false));
    assert_eq!(get("/v1/models?before_id=org%2Falias").await, page(&["test-model"], false));
    assert_eq!(get("/v1/models/org/alias").await, model("org/alias"));
    assert_eq!(get("/v1/models/gpt").await["error"]["type"], "not_found_error");
    assert_eq!(get("/v1/models?limit=0").await["error"]["details"]["param"], "limit");
    assert_eq!(client.get("/v1/models").await.json()["object"], "list");
}
