//! What clients send, recorded with texts taken out (`agents/recorded`; of three that need an editor by hand, as their sources make it): each
//! request is accepted as it is, nothing of it is ignored, and its answer has what the client looks for.

mod common;

use std::path::Path;
use std::sync::Arc;

use common::{Client, FakeEngine, Reply, events, tool_app};
use folio_server::ServerConfig;
use serde::Deserialize;
use serde_json::{Value, json};

const TASK: &str = "Make a file made.txt with the word folio";
const LAST: &str = "Done: it is there.";

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Recorded {
    client: String,
    #[serde(rename = "how")]
    _how: String,
    requests: Vec<Asked>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Asked {
    method: String,
    path: String,
    headers: serde_json::Map<String, Value>,
    #[serde(default)]
    body: Value,
    /// Where a client takes a refusal for an answer.
    #[serde(default = "ok")]
    status: u16,
}

fn ok() -> u16 {
    200
}

impl Asked {
    /// The first of the functions that may be called, unless a result of one is there.
    fn function(&self) -> Option<String> {
        let tool = self.body["tools"].get(0)?;
        let text = self.body.to_string();
        let done = ["\"role\":\"tool\"", "function_call_output", "\"tool_result\""];
        let name = tool["function"]["name"].as_str().or(tool["name"].as_str())?;
        (!done.iter().any(|sign| text.contains(sign))).then(|| name.to_owned())
    }

    fn streams(&self) -> bool {
        self.body["stream"] == true
    }
}

/// Text of an answer, and the call in it: name and arguments.
fn told(asked: &Asked, reply: &Reply) -> (String, Option<(String, Value)>) {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let call =
        |name: &Value, arguments: &Value| Some((text(name), serde_json::from_str(&text(arguments)).unwrap()));
    let first =
        |list: &Value, kind: &str| list.as_array().unwrap().iter().find(|item| item["type"] == kind).cloned();
    match (asked.path.as_str(), asked.streams()) {
        ("/v1/completions", true) => {
            assert!(reply.text.ends_with("data: [DONE]\n\n"));
            (reply.events().iter().map(|event| text(&event["choices"][0]["text"])).collect(), None)
        }
        ("/v1/completions", false) => (text(&reply.json()["choices"][0]["text"]), None),
        ("/v1/chat/completions", true) => {
            assert!(reply.text.ends_with("data: [DONE]\n\n"));
            let events = events(&reply.text);
            let usage = asked.body["stream_options"]["include_usage"] == true;
            assert_eq!(events.iter().any(|event| event["usage"]["completion_tokens"].is_u64()), usage);
            let joined = |path: &str| -> String {
                events.iter().filter_map(|event| event.pointer(path)?.as_str()).collect()
            };
            let function = "/choices/0/delta/tool_calls/0/function";
            let (name, arguments) =
                (joined(&format!("{function}/name")), joined(&format!("{function}/arguments")));
            let call = if name.is_empty() { None } else { call(&name.into(), &arguments.into()) };
            (joined("/choices/0/delta/content"), call)
        }
        ("/v1/chat/completions", false) => {
            let message = reply.json()["choices"][0]["message"].clone();
            let function = message["tool_calls"].get(0).map(|call| call["function"].clone());
            (
                text(&message["content"]),
                function.and_then(|function| call(&function["name"], &function["arguments"])),
            )
        }
        ("/v1/responses", false) => {
            let output = reply.json()["output"].clone();
            let made = first(&output, "function_call");
            let said = first(&output, "message").map(|message| text(&message["content"][0]["text"]));
            (said.unwrap_or_default(), made.and_then(|made| call(&made["name"], &made["arguments"])))
        }
        ("/v1/messages", false) => {
            let content = reply.json()["content"].clone();
            let made = first(&content, "tool_use").map(|made| (text(&made["name"]), made["input"].clone()));
            (first(&content, "text").map(|block| text(&block["text"])).unwrap_or_default(), made)
        }
        other => panic!("{other:?} is not looked at"),
    }
}

async fn answered(client: &Client, engine: &Arc<FakeEngine>, who: &str, asked: &Asked) {
    let function = asked.function();
    let said = match &function {
        Some(name) => format!(
            "<think>The tool makes it.</think><tool_call>\n{}\n</tool_call>",
            json!({"name": name, "arguments": {"path": "made.txt"}})
        ),
        None => format!("<think>It is.</think>{LAST}"),
    };
    // Completions are not told apart.
    let said = if asked.path == "/v1/completions" { LAST.to_owned() } else { said };
    engine.plan(|plan| plan.say = said.into());
    let body = if asked.body.is_null() { String::new() } else { asked.body.to_string() };
    let mut request = client.request(&asked.method, &asked.path, body);
    for (name, value) in &asked.headers {
        let name: axum::http::HeaderName = name.parse().unwrap();
        request.headers_mut().insert(name, value.as_str().unwrap().parse().unwrap());
    }
    let reply = common::reply(client.send(request).await).await;
    assert_eq!(reply.status, asked.status, "{who} {}: {}", asked.path, reply.text);
    assert!(reply.headers.get("x-folio-ignored-fields").is_none(), "{who}: everything it sends is known");
    assert!(reply.headers.get("x-folio-tools-left-out").is_none(), "{who}: all of its tools are shown");
    if asked.method == "GET" {
        return;
    }
    let prompt: Vec<u8> = engine.last().prompt.iter().map(|id| u8::try_from(*id).unwrap_or(b'$')).collect();
    let prompt = String::from_utf8_lossy(&prompt);
    if asked.body.to_string().contains(TASK) {
        assert!(prompt.contains(TASK), "{who}: {prompt}");
    }
    if let Some(tool) = asked.body["tools"].get(0) {
        let name = tool["function"]["name"].as_str().or(tool["name"].as_str()).unwrap();
        assert!(prompt.contains(&format!("\"name\": \"{name}\"")), "{who}: its tools are shown: {prompt}");
    }
    let (text, call) = told(asked, &reply);
    match function {
        Some(name) => assert_eq!(call, Some((name, json!({"path": "made.txt"}))), "{who}: {}", reply.text),
        None if asked.body["echo"] == true => {
            let scores = reply.json()["choices"][0]["logprobs"]["token_logprobs"].clone();
            let scores = scores.as_array().unwrap();
            // Those of the prompt, of which the first has none, and of the one token that was asked for.
            assert_eq!(scores.len(), asked.body["prompt"][0].as_array().unwrap().len() + 1);
            assert!(scores[0].is_null() && scores[1..].iter().all(Value::is_number), "{who}: {scores:?}");
        }
        None => {
            // A byte is a token.
            let most = asked.body["max_tokens"].as_u64().or(asked.body["max_completion_tokens"].as_u64());
            let thought = if asked.path == "/v1/completions" { 0 } else { "<think>It is.</think>".len() };
            let shown =
                most.map_or(usize::MAX, |tokens| (tokens as usize).saturating_sub(thought)).min(LAST.len());
            assert_eq!((text.as_str(), call), (&LAST[..shown], None), "{who}: {}", reply.text);
        }
    }
}

#[tokio::test]
async fn what_clients_send_is_accepted_and_answered() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/agents/recorded");
    let mut files: Vec<_> = std::fs::read_dir(folder).unwrap().map(|file| file.unwrap().path()).collect();
    files.sort();
    assert!(files.len() >= 12, "{} clients", files.len());
    let engine = FakeEngine::saying("");
    let mut app = tool_app(engine.clone(), 1 << 20);
    app.model.names.extend(["folio".to_owned(), "folio-demo".to_owned()]);
    let client = Client::with(ServerConfig::default(), app);
    for file in files {
        let recorded: Recorded = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
        assert!(!recorded.requests.is_empty(), "{file:?}");
        for (index, asked) in recorded.requests.iter().enumerate() {
            answered(&client, &engine, &format!("{} ({index})", recorded.client), asked).await;
        }
    }
}
