//! Agents as they are: what Claude Code and codex send (recorded, texts taken out), and what becomes of it.

mod common;

use std::sync::Arc;

use common::{Client, FakeEngine, Reply, merged, tool_app, tool_template};
use folio_server::{HintPolicy, ServerConfig};
use folio_text::{ChatTemplate, TemplateSources};
use serde_json::{Value, json};

const CLAUDE_CODE: [&str; 2] =
    [include_str!("agents/claude_code_first.json"), include_str!("agents/claude_code_result.json")];
const CODEX: [&str; 2] = [include_str!("agents/codex_first.json"), include_str!("agents/codex_result.json")];

fn client_of(engine: &Arc<FakeEngine>, template: ChatTemplate, config: ServerConfig) -> Client {
    let mut app = tool_app(engine.clone(), 1 << 20);
    app.template = Some(Arc::new(template));
    app.model.names.extend(["claude-*".to_owned(), "folio-model".to_owned()]);
    Client::with(config, app)
}

fn client(engine: &Arc<FakeEngine>) -> Client {
    client_of(engine, tool_template(), ServerConfig::default())
}

fn compiled(source: &str) -> ChatTemplate {
    let mut sources = TemplateSources::default();
    sources.add("default", source, "test");
    ChatTemplate::compile(sources, common::tokenizer().special_tokens()).unwrap().unwrap()
}

fn prompt(engine: &FakeEngine) -> String {
    let special = |id: u32| if id >= 256 { b'$' } else { id as u8 };
    String::from_utf8(engine.last().prompt.iter().map(|id| special(*id)).collect()).unwrap()
}

fn body(recorded: &str) -> Value {
    serde_json::from_str(recorded).unwrap()
}

/// The data of a stream of named events.
fn named(reply: &Reply) -> Vec<Value> {
    let data = reply.text.lines().filter_map(|line| line.strip_prefix("data: "));
    data.map(|data| serde_json::from_str(data).unwrap()).collect()
}

#[tokio::test]
async fn claude_code_is_answered() {
    let engine = FakeEngine::saying("Done.");
    let client = client(&engine);
    for recorded in CLAUDE_CODE {
        let reply = client.post("/v1/messages", &body(recorded)).await;
        assert_eq!(reply.status, 200, "{}", reply.text);
        assert!(reply.headers.get("x-folio-ignored-fields").is_none(), "everything it sends is known");
        let events = named(&reply);
        assert_eq!(events[0]["message"]["model"], "test-model", "which model it was");
        assert_eq!(events.last().unwrap()["type"], "message_stop");
    }
    let shown = prompt(&engine);
    assert!(shown.contains("\"name\": \"Bash\"") && shown.contains("[tool]folio"), "{shown}");
    let count = merged(
        body(CLAUDE_CODE[1]),
        json!({"max_tokens": null, "stream": null, "metadata": null, "context_management": null}),
    );
    let mut count = count;
    for name in ["max_tokens", "stream", "metadata"] {
        count.as_object_mut().unwrap().remove(name);
    }
    let counted = client.post("/v1/messages/count_tokens", &count).await;
    assert_eq!(counted.json()["input_tokens"], engine.last().prompt.len(), "{}", counted.text);
}

#[tokio::test]
async fn tools_come_and_go_in_mid_conversation() {
    let engine = FakeEngine::saying("ok");
    let client = client(&engine);
    let tool = |name: &str| json!({"name": name, "input_schema": {"type": "object"}});
    let ask = |tools: Value, blocks: Value| {
        json!({"max_tokens": 9, "tools": tools, "messages": [
            {"role": "user", "content": "hi"},
            {"role": "system", "content": blocks},
            {"role": "user", "content": [{"type": "text", "text": "go on"}]},
        ]})
    };
    let reference =
        |kind: &str, name: &str| json!({"type": kind, "tool": {"type": "tool_reference", "name": name}});
    let added =
        json!({"type": "tool_addition", "tool": {"type": "tool_definition", "definition": tool("new_one")}});
    let blocks = json!([{"type": "text", "text": "Note."}, reference("tool_removal", "old_one"), added]);
    let reply = client.post("/v1/messages", &ask(json!([tool("old_one"), tool("kept")]), blocks)).await;
    assert_eq!(reply.status, 200, "{}", reply.text);
    let shown = prompt(&engine);
    let tools: Vec<&str> = shown.split("<tool>").skip(1).collect();
    assert!(tools.len() == 2 && tools[0].contains("kept") && tools[1].contains("new_one"), "{shown}");
    assert!(
        shown.contains("Note.\nThe tool old_one is not available any more.\nThe tool new_one is available."),
        "{shown}"
    );
    let again = json!([reference("tool_removal", "kept"), reference("tool_addition", "kept")]);
    assert_eq!(client.post("/v1/messages", &ask(json!([tool("kept")]), again)).await.status, 200);
    assert!(prompt(&engine).contains("<tool>"), "{}", prompt(&engine));
    let forced = json!({"tool_choice": {"type": "tool", "name": "kept"}});
    let gone = ask(json!([tool("kept")]), json!([reference("tool_removal", "kept")]));
    assert_eq!(
        client.post("/v1/messages", &merged(gone, forced)).await.error()["details"]["param"],
        "tool_choice"
    );
    let never = json!([reference("tool_addition", "never")]);
    let reply = client.post("/v1/messages", &ask(json!([tool("kept")]), never)).await;
    assert_eq!(reply.error()["details"]["param"], "messages", "{}", reply.text);
    let by_user = json!({"max_tokens": 9, "messages": [{"role": "user", "content": [reference("tool_addition", "x")]}]});
    assert_eq!(client.post("/v1/messages", &by_user).await.status, 400);
    // What a search for tools found is told in its result.
    let found = json!([{"role": "user", "content": "hi"},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "kept", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a",
            "content": [{"type": "tool_reference", "tool_name": "kept"}]}]}]);
    let body = json!({"max_tokens": 9, "tools": [tool("kept")], "messages": found});
    assert_eq!(client.post("/v1/messages", &body).await.status, 200);
    assert!(prompt(&engine).contains("[tool]The tool kept is available."), "{}", prompt(&engine));
}

#[tokio::test]
async fn codex_is_answered_and_what_cannot_run_is_named() {
    let call = "<tool_call>\n{\"name\": \"multi_agent_v1__close_agent\", \"arguments\": {\"target\": \"a\"}}\n</tool_call>";
    let engine = FakeEngine::saying(call);
    let client = client(&engine);
    for recorded in CODEX {
        let reply = client.post("/v1/responses", &body(recorded)).await;
        assert_eq!(reply.status, 200, "{}", reply.text);
        assert_eq!(reply.headers["x-folio-tools-left-out"], "web_search");
        let events = named(&reply);
        let item = &events.last().unwrap()["response"]["output"][0];
        assert_eq!(
            (&item["namespace"], &item["name"]),
            (&json!("multi_agent_v1"), &json!("close_agent")),
            "a call is told as the client named the function"
        );
    }
    let shown = prompt(&engine);
    assert!(shown.contains("\"name\": \"exec_command\"") && !shown.contains("web_search"), "{shown}");
    assert!(shown.contains("Some text of"), "the tool's result");
    // The call comes back with its namespace, and the model sees what it wrote.
    let mut next = body(CODEX[1]);
    let items = next["input"].as_array_mut().unwrap();
    items.push(json!({"type": "function_call", "call_id": "c2", "namespace": "multi_agent_v1", "name": "close_agent", "arguments": "{}"}));
    items.push(json!({"type": "function_call_output", "call_id": "c2", "output": "closed"}));
    assert_eq!(client.post("/v1/responses", &next).await.status, 200);
    assert!(
        prompt(&engine).contains("<call>{\"name\": \"multi_agent_v1__close_agent\""),
        "{}",
        prompt(&engine)
    );
    let metrics = client.get("/metrics").await.text;
    assert!(metrics.contains("folio:tools_left_out_total{model_name=\"test-model\"} 3"), "{metrics}");
}

#[tokio::test]
async fn unknown_fields_pass_where_the_operator_says_so_and_are_named() {
    let ask = json!({"messages": [{"role": "user", "content": "hi", "weather": 1}], "mood": {"a": 1}});
    let engine = FakeEngine::saying("ok");
    let refusing = client(&engine);
    let error = refusing.chat(ask.clone()).await.error();
    assert_eq!(error["param"], "messages[0].weather");
    assert!(error["message"].as_str().unwrap().contains("--accept-hint messages[].weather"), "{error}");

    let hints = HintPolicy::new(vec!["mood".into(), "messages[].weather".into()], false).unwrap();
    let accepting = client_of(&engine, tool_template(), ServerConfig { hints, ..Default::default() });
    let reply = accepting.chat(ask.clone()).await;
    assert_eq!((reply.status.as_u16(), reply.headers.get("x-folio-ignored-fields")), (200, None));

    let hints = HintPolicy::new(Vec::new(), true).unwrap();
    let warning = client_of(&engine, tool_template(), ServerConfig { hints, ..Default::default() });
    let with = prompt(&engine);
    for stream in [false, true] {
        let reply = warning.chat(merged(ask.clone(), json!({"stream": stream}))).await;
        assert_eq!(reply.status, 200, "{}", reply.text);
        assert_eq!(reply.headers["x-folio-ignored-fields"], "messages[0].weather, mood");
        assert_eq!(prompt(&engine), with);
    }
    let metrics = warning.get("/metrics").await.text;
    assert!(metrics.contains("folio:ignored_fields_total{model_name=\"test-model\"} 4"), "{metrics}");
    // Whatever chooses tokens, and whatever is within tools or a format, is refused all the same.
    let tool = json!({"type": "function", "function": {"name": "f"}, "mood": 1});
    for (extra, param) in [
        (json!({"mirostat": 2}), "mirostat"),
        (json!({"temprature": 0.2}), "temprature"),
        (json!({"max_output_tokens": 5}), "max_output_tokens"),
        (json!({"tools": [tool]}), "tools[0].mood"),
        (json!({"response_format": {"type": "text", "mood": 1}}), "response_format.mood"),
    ] {
        let reply = warning.chat(extra.clone()).await;
        assert_eq!((reply.status.as_u16(), &reply.error()["param"]), (400, &json!(param)), "{extra}");
    }
    for (route, extra) in [
        ("/v1/responses", json!({"input": "x", "seed": 1})),
        ("/v1/messages", json!({"messages": ask["messages"], "max_tokens": 1, "seed": 1})),
    ] {
        let reply = warning.post(route, &extra).await;
        assert_eq!(reply.status, 400, "{route}: {}", reply.text);
    }
}

#[tokio::test]
async fn histories_of_our_own_making_are_accepted() {
    let engine = FakeEngine::saying("<think>only thought</think>");
    let client = client(&engine);
    let first = client.chat(json!({})).await.json();
    let said = &first["choices"][0]["message"];
    assert_eq!((&said["content"], &said["reasoning_content"]), (&Value::Null, &json!("only thought")));
    let user = json!({"role": "user", "content": "hi"});
    let reply = client.chat(json!({"messages": [user, said, user]})).await;
    assert_eq!(reply.status, 200, "{}", reply.text);
    // The name that vLLM gives it now.
    let other = json!({"role": "assistant", "content": null, "reasoning": "only thought"});
    assert_eq!(client.chat(json!({"messages": [user, other, user]})).await.status, 200);
    let both = json!({"role": "assistant", "reasoning": "a", "reasoning_content": "b"});
    assert_eq!(
        client.chat(json!({"messages": [user, both, user]})).await.error()["param"],
        "messages[1].reasoning"
    );
    assert_eq!(
        client.chat(json!({"messages": [{"role": "user"}]})).await.error()["param"],
        "messages[0].content"
    );

    let asked = json!({"max_tokens": 500, "messages": [user]});
    let first = client.post("/v1/messages", &asked).await.json();
    let again = json!({"max_tokens": 500, "messages": [user, {"role": "assistant", "content": first["content"]}, user]});
    let reply = client.post("/v1/messages", &again).await;
    assert_eq!(reply.status, 200, "{}", reply.text);
    engine.plan(|plan| plan.say = Vec::new());
    let empty = client.post("/v1/messages", &asked).await.json();
    assert_eq!(empty["content"], json!([]));
    let again = json!({"max_tokens": 500, "messages": [user, {"role": "assistant", "content": []}, user]});
    let reply = client.post("/v1/messages", &again).await;
    assert_eq!(reply.status, 200, "{}", reply.text);
}

#[tokio::test]
async fn system_messages_go_where_the_template_takes_them() {
    let strict = "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('late') }}{% endif %}\
                  {% if not loop.first and m.role == 'user' and messages[loop.index0 - 1].role == 'user' %}{{ raise_exception('twice') }}{% endif %}\
                  [{{ m.role }}]{{ m.content }}{% endfor %}";
    let engine = FakeEngine::saying("ok");
    let strict = client_of(&engine, compiled(strict), ServerConfig::default());
    let message = |role: &str, content: &str| json!({"role": role, "content": content});
    let messages = json!([
        message("system", "A"),
        message("developer", "B"),
        message("user", "C"),
        message("system", "D"),
        message("assistant", "E"),
        message("system", "F"),
        message("user", "G"),
    ]);
    let reply = strict.chat(json!({"messages": messages})).await;
    assert_eq!(reply.status, 200, "{}", reply.text);
    assert_eq!(prompt(&engine), "[system]A\n\nB[user]C\n\nD[assistant]E[user]F\n\nG");
    let lenient = client(&engine);
    assert_eq!(lenient.chat(json!({"messages": messages})).await.status, 200);
    assert_eq!(
        prompt(&engine),
        "[system]A$[system]B$[user]C$[system]D$[assistant]E$[system]F$[user]G$[assistant]",
        "untouched where the template takes them"
    );
}

#[tokio::test]
async fn models_are_asked_for_by_patterns_too() {
    let client = client(&FakeEngine::saying("ok"));
    for (model, status) in [("claude-haiku-4-5", 200), ("folio-model", 200), ("claude", 404), ("gpt-5", 404)]
    {
        let reply = client.chat(json!({"model": model})).await;
        assert_eq!(reply.status, status, "{model}: {}", reply.text);
        if status == 200 {
            assert_eq!(reply.json()["model"], "test-model");
        }
    }
    let listed = client.get("/v1/models").await.json();
    let ids: Vec<&str> =
        listed["data"].as_array().unwrap().iter().map(|model| model["id"].as_str().unwrap()).collect();
    assert_eq!(ids, ["test-model", "org/alias", "folio-model"], "patterns are no names");
    assert_eq!(client.get("/v1/models/claude-opus-5-5").await.json()["root"], "test-model");
}
