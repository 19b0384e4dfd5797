//! Tools and reasoning over the chat endpoint: what reaches the template, what is read back, streamed and whole.

mod common;

use std::sync::Arc;

use common::{Client, FakeEngine, Reply, app, merged, tool_template};
use folio_engine::FinishReason;
use folio_server::{App, Parsers, ServerConfig};
use folio_text::{ReasoningFormat, ToolFormat};
use serde_json::{Value, json};

const CALL: &str =
    "<tool_call>\n{\"name\": \"get_weather\", \"arguments\": {\"city\": \"Paris\"}}\n</tool_call>";

fn client(engine: &Arc<FakeEngine>, tools: &str, reasoning: &str) -> Client {
    let parsers = Parsers { tools: ToolFormat::named(tools), reasoning: ReasoningFormat::named(reasoning) };
    let mut app = App { template: Some(Arc::new(tool_template())), parsers, ..app(engine.clone()) };
    app.model.context_length = 2048;
    Client::with(ServerConfig::default(), app)
}

fn tools() -> Value {
    let parameters = json!({"type": "object", "properties": {"city": {"type": "string"}}});
    json!([
        {"type": "function", "function": {"name": "get_weather", "description": "Weather", "parameters": parameters}},
        {"type": "function", "function": {"name": "now"}},
    ])
}

fn prompt(engine: &FakeEngine) -> String {
    let special = |id: u32| if id >= 256 { b'$' } else { id as u8 };
    String::from_utf8(engine.last().prompt.iter().map(|id| special(*id)).collect()).unwrap()
}

/// The message a client gathers from a stream.
fn gathered(reply: &Reply) -> (Value, Value) {
    let mut message = json!({"content": "", "reasoning_content": "", "tool_calls": []});
    let mut finish = Value::Null;
    for event in reply.events() {
        let Some(choice) = event["choices"].get(0) else { continue };
        let delta = &choice["delta"];
        for key in ["content", "reasoning_content"] {
            if let Some(text) = delta[key].as_str() {
                message[key] = format!("{}{text}", message[key].as_str().unwrap()).into();
            }
        }
        for call in delta["tool_calls"].as_array().into_iter().flatten() {
            let index = call["index"].as_u64().unwrap() as usize;
            let calls = message["tool_calls"].as_array_mut().unwrap();
            if let Some(id) = call["id"].as_str() {
                assert_eq!((index, &call["type"]), (calls.len(), &json!("function")));
                let name = &call["function"]["name"];
                calls
                    .push(json!({"id": id, "type": "function", "function": {"name": name, "arguments": ""}}));
            }
            let arguments = &mut calls[index]["function"]["arguments"];
            *arguments =
                format!("{}{}", arguments.as_str().unwrap(), call["function"]["arguments"].as_str().unwrap())
                    .into();
        }
        if !choice["finish_reason"].is_null() {
            assert!(finish.is_null(), "one end");
            finish = choice["finish_reason"].clone();
        }
    }
    (message, finish)
}

/// The whole answer's message and end, after checking that the streamed answer is the same.
async fn both(client: &Client, extra: Value) -> (Value, Value) {
    let whole = client.chat(extra.clone()).await;
    assert_eq!(whole.status, 200, "{}", whole.text);
    let choice = whole.json()["choices"][0].clone();
    let message = choice["message"].clone();
    let streamed = client.chat(merged(extra, json!({"stream": true}))).await;
    let (mut gathered, finish) = gathered(&streamed);
    assert_eq!(finish, choice["finish_reason"]);
    for key in ["content", "reasoning_content"] {
        assert_eq!(gathered[key], message[key].as_str().unwrap_or_default(), "{key}");
    }
    let mut calls = message["tool_calls"].as_array().cloned().unwrap_or_default();
    // Each answer has ids of its own.
    for call in calls.iter_mut().chain(gathered["tool_calls"].as_array_mut().unwrap()) {
        assert!(call.as_object_mut().unwrap().remove("id").unwrap().as_str().unwrap().starts_with("call_"));
    }
    assert_eq!(gathered["tool_calls"], Value::Array(calls));
    (message, choice["finish_reason"].clone())
}

#[tokio::test]
async fn a_call_is_told_as_a_call() {
    let engine = FakeEngine::saying(&format!("Let me see. {CALL}"));
    let client = client(&engine, "hermes", "");
    let (message, finish) = both(&client, json!({"tools": tools()})).await;
    assert_eq!((&message["content"], &finish), (&json!("Let me see. "), &json!("tool_calls")));
    assert_eq!(
        message["tool_calls"][0]["function"],
        json!({"name": "get_weather", "arguments": "{\"city\": \"Paris\"}"})
    );
    assert_eq!(message["tool_calls"][0]["type"], "function");
    let shown = prompt(&engine);
    assert!(
        shown.starts_with("<tool>{\"type\": \"function\", \"function\": {\"name\": \"get_weather\""),
        "{shown}"
    );

    engine.plan(|plan| plan.say = format!("{CALL}\n{}", CALL.replace("Paris", "Rome")).into());
    let (message, _) = both(&client, json!({"tools": tools(), "tool_choice": "auto"})).await;
    assert!(message["content"].is_null());
    assert_eq!(message["tool_calls"].as_array().unwrap().len(), 2);
    assert!(message["tool_calls"][1].get("index").is_none(), "only streams number calls");
    // One is all: the rest is not generated.
    engine.plan(|plan| plan.manual = false);
    let (message, finish) = both(&client, json!({"tools": tools(), "parallel_tool_calls": false})).await;
    assert_eq!((message["tool_calls"].as_array().unwrap().len(), finish), (1, json!("tool_calls")));

    // The same text is text where nobody may call.
    for extra in [json!({}), json!({"tools": tools(), "tool_choice": "none"})] {
        let (message, finish) = both(&client, extra).await;
        assert_eq!((message["content"].as_str().unwrap().len(), finish), (2 * CALL.len(), json!("stop")));
        assert!(message.get("tool_calls").is_none());
        assert!(!prompt(&engine).contains("<tool>"));
    }
    assert_eq!(client.metric("vllm:request_success_total", &["finished_reason=\"stop\""]).await, 10.0);
}

#[tokio::test]
async fn arguments_stream_piece_by_piece() {
    let client = client(&FakeEngine::saying(CALL), "hermes", "");
    let events = client.chat(json!({"tools": tools(), "stream": true})).await.events();
    let pieces: Vec<&Value> =
        events.iter().filter_map(|event| event["choices"][0]["delta"]["tool_calls"].get(0)).collect();
    assert!(pieces.len() > 10, "one for each token: {}", pieces.len());
    assert!(pieces[0]["id"].is_string() && pieces[0]["function"]["name"] == "get_weather");
    assert!(
        pieces[1..].iter().all(|piece| piece.get("id").is_none() && piece["function"].get("name").is_none())
    );
}

#[tokio::test]
async fn an_answer_cut_off_in_a_call_says_length() {
    let engine = FakeEngine::saying(CALL);
    let client = client(&engine, "hermes", "");
    let (message, finish) = both(&client, json!({"tools": tools(), "max_tokens": 60})).await;
    assert_eq!(finish, "length");
    let arguments = message["tool_calls"][0]["function"]["arguments"].as_str().unwrap();
    assert!(!arguments.is_empty() && "{\"city\": \"Paris\"}".starts_with(arguments), "{arguments}");
    engine.plan(|plan| plan.end = Some(FinishReason::Length));
    assert_eq!(both(&client, json!({"tools": tools()})).await.1, "length");
}

#[tokio::test]
async fn a_call_that_must_be_made_is_begun_in_the_prompt_or_held_behind_the_reasoning() {
    let engine = FakeEngine::saying(" {\"city\": \"Oslo\"}}\n</tool_call>\nand more");
    let client = client(&engine, "hermes", "think");
    let named = json!({"type": "function", "function": {"name": "get_weather"}});
    let extra = json!({"tools": tools(), "tool_choice": named});
    let (message, finish) = both(&client, extra.clone()).await;
    assert!(prompt(&engine).ends_with("[assistant]<tool_call>\n{\"name\": \"get_weather\", \"arguments\":"));
    assert_eq!(finish, "tool_calls");
    assert!(message["content"].is_null(), "a named function is called once, and that is all: {message}");
    assert_eq!(
        message["tool_calls"][0]["function"],
        json!({"name": "get_weather", "arguments": "{\"city\": \"Oslo\"}"})
    );
    // A model that thinks first writes the call itself, behind its reasoning; where calls have no grammar, it is held to their beginning.
    let inside = json!({"chat_template_kwargs": {"thinking": true}});
    client.chat(merged(extra.clone(), inside.clone())).await;
    assert!(prompt(&engine).ends_with("[assistant]<think>\n"), "{}", prompt(&engine));
    assert!(engine.last().sampling.rules.is_some(), "and nothing else can be chosen");
    let ungrammatical = self::client(&engine, "qwen3_coder", "think");
    ungrammatical.chat(merged(extra.clone(), inside.clone())).await;
    assert!(prompt(&engine).ends_with("[assistant]<think>\n"), "{}", prompt(&engine));
    assert!(engine.last().sampling.rules.is_some(), "and nothing else can be chosen");
    // What cannot be held is refused where it was to be strict.
    let mut strict = tools();
    strict[0]["function"]["strict"] = true.into();
    let reply = ungrammatical.chat(merged(extra.clone(), json!({"tools": strict}))).await;
    assert_eq!((reply.status.as_u16(), &reply.error()["param"]), (400, &json!("tools[0].function.strict")));

    engine.plan(|plan| plan.say = b"now\", \"arguments\": {}}\n</tool_call>".into());
    let (message, _) = both(&client, json!({"tools": tools(), "tool_choice": "required"})).await;
    assert!(prompt(&engine).ends_with("<tool_call>\n{\"name\": \""));
    assert_eq!(message["tool_calls"][0]["function"], json!({"name": "now", "arguments": "{}"}));

    // Only some of the tools.
    let allowed = json!({"type": "allowed_tools", "allowed_tools": {"mode": "required",
        "tools": [{"type": "function", "function": {"name": "now"}}]}});
    both(&client, json!({"tools": tools(), "tool_choice": allowed})).await;
    assert!(prompt(&engine).contains("\"now\"") && !prompt(&engine).contains("get_weather"));
    let reply = client.chat(merged(extra, json!({"add_generation_prompt": false}))).await;
    assert_eq!((reply.status.as_u16(), &reply.error()["param"]), (400, &json!("tool_choice")));
}

#[tokio::test]
async fn gpt_oss_speaks_in_channels() {
    let engine = FakeEngine::saying(
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.now \
         <|constrain|>json<|message|>{\"a\":1}",
    );
    let client = client(&engine, "harmony", "harmony");
    let (message, finish) = both(&client, json!({"tools": tools()})).await;
    assert_eq!((&message["reasoning_content"], finish), (&json!("Hm."), json!("tool_calls")));
    assert_eq!(message["tool_calls"][0]["function"], json!({"name": "now", "arguments": "{\"a\":1}"}));
    // A call that must be made comes behind the reasoning, which is begun for the model: behind the same token it could answer.
    engine.plan(|plan| {
        plan.say = b"Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.now <|constrain|>json<|message|>{\"a\":2}"
            .into()
    });
    let named = json!({"type": "function", "function": {"name": "now"}});
    let extra = json!({"tools": tools(), "tool_choice": named});
    let (message, finish) = both(&client, extra.clone()).await;
    assert!(prompt(&engine).ends_with("[assistant]<|channel|>analysis<|message|>"), "{}", prompt(&engine));
    assert!(engine.last().sampling.rules.is_some(), "and nothing but the call can be chosen then");
    assert_eq!((&message["reasoning_content"], finish), (&json!("Hm."), json!("tool_calls")));
    assert_eq!(message["tool_calls"][0]["function"], json!({"name": "now", "arguments": "{\"a\":2}"}));
    // Where nobody reads reasoning, whatever the model says in a call that was begun for it is its arguments.
    engine.plan(|plan| plan.say = b"{\"a\":2}".into());
    let (message, _) = both(&self::client(&engine, "harmony", ""), extra).await;
    assert_eq!(message["tool_calls"][0]["function"], json!({"name": "now", "arguments": "{\"a\":2}"}));
}

#[tokio::test]
async fn reasoning_is_told_apart() {
    let engine = FakeEngine::saying("<think>\nso é\n</think>\n\nYes");
    let client = client(&engine, "", "think");
    let (message, finish) = both(&client, json!({})).await;
    assert_eq!(message["reasoning_content"], "\nso é\n");
    assert_eq!((&message["content"], finish), (&json!("\n\nYes"), json!("stop")));
    let usage = client.chat(json!({})).await.json()["usage"].clone();
    // A byte is a token; the last of the closing mark is no thought any more.
    let thought = "<think>\nso é\n</think>".len() - 1;
    assert_eq!(
        usage["completion_tokens_details"],
        json!({"reasoning_tokens": thought - "<think>".len() + 1})
    );
    // Opened by the template.
    engine.plan(|plan| plan.say = b"so</think>Yes".into());
    let inside = json!({"chat_template_kwargs": {"thinking": true}});
    let (message, _) = both(&client, inside.clone()).await;
    assert_eq!((&message["reasoning_content"], &message["content"]), (&json!("so"), &json!("Yes")));
    let without = merged(inside, json!({"include_reasoning": false}));
    let (message, _) = both(&client, without).await;
    assert_eq!((message.get("reasoning_content"), &message["content"]), (None, &json!("Yes")));
    // A stop string counts in content.
    let (message, _) = both(&client, json!({"stop": "Y", "chat_template_kwargs": {"thinking": 1}})).await;
    assert_eq!((&message["reasoning_content"], &message["content"]), (&json!("so"), &Value::Null));
    // The beginning of the answer that is continued left it open.
    let messages =
        json!([{"role": "user", "content": "hi"}, {"role": "assistant", "content": "<think>well"}]);
    let (message, _) = both(&client, json!({"messages": messages, "continue_final_message": true})).await;
    assert_eq!((&message["reasoning_content"], &message["content"]), (&json!("so"), &json!("Yes")));
}

#[tokio::test]
async fn stop_strings_cut_content_alone_unless_asked() {
    let said = format!("<think>to Paris?</think>I ask. {CALL}");
    let engine = FakeEngine::saying(&said);
    let client = client(&engine, "hermes", "think");
    let (message, finish) = both(&client, json!({"tools": tools(), "stop": ["Paris", "\n"]})).await;
    assert_eq!((&message["reasoning_content"], finish), (&json!("to Paris?"), json!("tool_calls")));
    assert_eq!(message["tool_calls"][0]["function"]["arguments"], "{\"city\": \"Paris\"}");
    // In content before the call it ends the answer, also where it is written in pieces.
    let (message, finish) = both(&client, json!({"tools": tools(), "stop": "ask."})).await;
    assert_eq!((&message["content"], message.get("tool_calls"), finish), (&json!("I "), None, json!("stop")));
    // It does not reach from content over a call.
    let (message, finish) = both(&client, json!({"tools": tools(), "stop": ". <"})).await;
    assert_eq!(
        (&message["tool_calls"][0]["function"]["name"], finish),
        (&json!("get_weather"), json!("tool_calls"))
    );
    // What begins a stop string and ends the answer is shown.
    engine.plan(|plan| plan.say = b"<think>a</think>I as".into());
    let (message, _) = both(&client, json!({"tools": tools(), "stop": "ask."})).await;
    assert_eq!(message["content"], "I as");
    engine.plan(|plan| plan.say = said.into());
    let everywhere = json!({"tools": tools(), "stop": "Paris", "stop_everywhere": true});
    let (message, finish) = both(&client, everywhere).await;
    assert_eq!(
        (&message["reasoning_content"], message.get("tool_calls"), finish),
        (&json!("to "), None, json!("stop"))
    );
    // Nothing is cut before so many tokens.
    engine.plan(|plan| plan.say = b"Paris or Paris".into());
    let (message, _) = both(&client, json!({"stop": "Paris", "min_tokens": 8})).await;
    assert_eq!(message["content"], "Paris or ");
}

#[tokio::test]
async fn reasoning_effort_reaches_a_template_that_asks_for_it() {
    let engine = FakeEngine::saying("ok");
    let client = client(&engine, "", "think");
    assert_eq!(client.chat(json!({"reasoning_effort": "high"})).await.status, 200);
    assert!(prompt(&engine).ends_with("$(high)[assistant]"), "{}", prompt(&engine));
    let reply = client.chat(json!({"reasoning_effort": "much"})).await;
    assert_eq!((reply.status.as_u16(), &reply.error()["param"]), (400, &json!("reasoning_effort")));
}

#[tokio::test]
async fn control_tokens_stay_only_where_the_reader_needs_them() {
    // <|a|> is 257; here it opens calls of gpt-oss's kind only for a parser that looks for it.
    let engine = FakeEngine::saying("a");
    engine.plan(|plan| plan.extra = vec![257]);
    let reply = client(&engine, "hermes", "").chat(json!({"tools": tools()})).await.json();
    assert_eq!(reply["choices"][0]["message"]["content"], "a");
    let reply = client(&engine, "hermes", "")
        .chat(json!({"skip_special_tokens": false, "tools": tools()}))
        .await
        .json();
    assert_eq!(reply["choices"][0]["message"]["content"], "a<|a|>");
    // <tool_call> as a control token of the vocabulary.
    let tokenizer = common::tokenizer_with(["<|end|>", "<tool_call>", "</tool_call>"]);
    let engine = FakeEngine::saying("");
    engine.plan(|plan| {
        let body = b"{\"name\": \"now\"}".iter().map(|byte| u32::from(*byte));
        plan.extra = [257].into_iter().chain(body).chain([258]).collect();
    });
    let parsers = Parsers { tools: ToolFormat::named("hermes"), reasoning: None };
    let mut app = App { template: Some(Arc::new(tool_template())), parsers, ..app(engine) };
    app.tokenizer = Arc::new(tokenizer);
    app.model.context_length = 2048;
    let client = Client::with(ServerConfig::default(), app);
    let (message, _) = both(&client, json!({"tools": tools()})).await;
    assert_eq!(message["tool_calls"][0]["function"], json!({"name": "now", "arguments": "{}"}));
    // Without tools nobody needs them, and they are left out as ever.
    let (message, _) = both(&client, json!({})).await;
    assert_eq!(message["content"], "{\"name\": \"now\"}");
}

#[tokio::test]
async fn earlier_calls_and_their_results_reach_the_template() {
    let engine = FakeEngine::saying("Sunny.");
    let client = client(&engine, "hermes", "");
    let call = |arguments: &str| json!({"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": arguments}});
    let conversation = |arguments: &str| {
        json!([
            {"role": "user", "content": "Weather?"},
            {"role": "assistant", "content": null, "tool_calls": [call(arguments)]},
            {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "sunny"}]},
        ])
    };
    let reply =
        client.chat(json!({"messages": conversation("{\"b\": 1, \"a\": 2}"), "tools": tools()})).await;
    assert_eq!(reply.status, 200, "{}", reply.text);
    let shown = prompt(&engine);
    let want = "[user]Weather?$[assistant]<call>{\"name\": \"get_weather\", \"arguments\": {\"b\": 1, \"a\": 2}}</call>$\
                [tool]sunny(call_1)$[assistant]";
    assert!(shown.ends_with(want), "{shown}");
    // What a model wrote wrongly goes back as it was.
    assert_eq!(client.chat(json!({"messages": conversation("{oops")})).await.status, 200);
    assert!(prompt(&engine).contains("\"arguments\": \"{oops\""), "{}", prompt(&engine));
    // Counting tokens sees the same prompt.
    let body = json!({"messages": conversation("{}"), "tools": tools()});
    let count = client.post("/tokenize", &body).await.json()["count"].as_u64().unwrap();
    client.chat(body).await;
    assert_eq!(count as usize, engine.last().prompt.len());
}

#[tokio::test]
async fn what_cannot_be_honoured_is_refused_by_name() {
    let engine = FakeEngine::saying("ok");
    let able = client(&engine, "hermes", "think");
    let tool = |function: Value| json!([{"type": "function", "function": function}]);
    for (extra, param) in [
        (json!({"tools": tool(json!({"name": "f g"}))}), "tools[0].function.name"),
        (json!({"tools": tool(json!({}))}), "tools[0].function.name"),
        (json!({"tools": tool(json!({"name": "f", "parameters": 5}))}), "tools[0].function.parameters"),
        (json!({"tools": tool(json!({"name": "f", "nonsense": 5}))}), "tools[0].function.nonsense"),
        (json!({"tools": [{"type": "custom", "custom": {"name": "c"}}]}), "tools[0].type"),
        (json!({"tools": [tools()[0], tools()[0]]}), "tools[1].function.name"),
        (json!({"tools": tools(), "tool_choice": "maybe"}), "tool_choice"),
        (
            json!({"tools": tools(), "tool_choice": {"type": "function", "function": {"name": "x"}}}),
            "tool_choice.function.name",
        ),
        (
            json!({"tools": tools(), "tool_choice": {"type": "custom", "custom": {"name": "x"}}}),
            "tool_choice.type",
        ),
        (json!({"tool_choice": "required"}), "tool_choice"),
        (json!({"parallel_tool_calls": true}), "parallel_tool_calls"),
        (json!({"functions": [{"name": "f"}]}), "functions"),
        (json!({"messages": [{"role": "tool", "content": "x"}]}), "messages[0].tool_call_id"),
        (
            json!({"messages": [{"role": "user", "content": "x", "tool_call_id": "y"}]}),
            "messages[0].tool_call_id",
        ),
        (
            json!({"messages": [{"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "f"}}]}]}),
            "messages[0].tool_calls[0].function.arguments",
        ),
        (json!({"messages": [{"role": "user", "content": null}]}), "messages[0].content"),
    ] {
        let reply = able.chat(extra.clone()).await;
        assert_eq!(
            (reply.status.as_u16(), &reply.error()["param"]),
            (400, &json!(param)),
            "{extra}: {}",
            reply.text
        );
    }
    assert_eq!(able.chat(json!({"tools": tool(json!({"name": "f", "strict": false}))})).await.status, 200);
    assert!(!prompt(&engine).contains("strict"));
    assert_eq!(able.chat(json!({"tool_choice": "auto", "tools": []})).await.status, 200);
    assert_eq!(able.complete(json!({"tools": tools()})).await.error()["param"], "tools");
    // No parser; no place in the template.
    let reply = client(&engine, "", "").chat(json!({"tools": tools()})).await;
    assert_eq!((reply.status.as_u16(), &reply.error()["param"]), (400, &json!("tools")));
    assert!(reply.error()["message"].as_str().unwrap().contains("--tool-call-parser"));
    let reply = client(&engine, "", "").chat(json!({"include_reasoning": false})).await;
    assert_eq!(reply.error()["param"], "include_reasoning");
    let parsers = Parsers { tools: ToolFormat::named("hermes"), reasoning: None };
    let plain = Client::with(ServerConfig::default(), App { parsers, ..app(engine.clone()) });
    let reply = plain.chat(json!({"tools": tools()})).await;
    assert!(reply.error()["message"].as_str().unwrap().contains("--chat-template"), "{}", reply.text);
    let call = json!({"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}});
    let messages = json!([{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [call]}]);
    assert_eq!(plain.chat(json!({"messages": messages})).await.error()["param"], "messages[1].tool_calls");
    // "none" asks for nothing that is not there.
    assert_eq!(plain.chat(json!({"tools": tools(), "tool_choice": "none"})).await.status, 200);
}
