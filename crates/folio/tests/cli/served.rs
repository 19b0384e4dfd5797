//! `folio serve`: asked, measured and stopped.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStderr, Command, Stdio};

use serde_json::{Value, json};

use crate::{folio, refusal, stdout};

/// A server of the built-in model on a free port; killed when dropped.
pub struct Served {
    child: Child,
    errors: BufReader<ChildStderr>,
    address: String,
}

impl Served {
    pub fn start(arguments: &[&str]) -> Self {
        let mut child = folio(&[&["serve", "--port", "0"][..], arguments].concat())
            .stderr(Stdio::piped())
            .spawn()
            .expect("folio runs");
        let errors = BufReader::new(child.stderr.take().expect("pipe"));
        let mut served = Self { child, errors, address: String::new() };
        let mut log = String::new();
        while served.address.is_empty() {
            let mut line = String::new();
            assert!(served.errors.read_line(&mut line).expect("text") > 0, "the server ended: {log}");
            if let Some(rest) = line.strip_prefix("listening on http://") {
                served.address = rest.split_whitespace().next().expect("address").to_owned();
            }
            log.push_str(&line);
        }
        served
    }

    fn get(&self, path: &str, header: &str) -> String {
        let mut socket = TcpStream::connect(&self.address).expect("connects");
        let request = format!("GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n{header}\r\n");
        socket.write_all(request.as_bytes()).expect("sent");
        let mut answer = String::new();
        socket.read_to_string(&mut answer).expect("answer");
        answer
    }

    /// The answer's body, which must be JSON.
    pub fn post(&self, path: &str, body: &Value) -> Value {
        let mut socket = TcpStream::connect(&self.address).expect("connects");
        let body = body.to_string();
        let head = format!(
            "POST {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json\r\n"
        );
        socket
            .write_all(format!("{head}content-length: {}\r\n\r\n{body}", body.len()).as_bytes())
            .expect("sent");
        let mut answer = String::new();
        socket.read_to_string(&mut answer).expect("answer");
        let (_, body) = answer.split_once("\r\n\r\n").expect("a head");
        serde_json::from_str(body).unwrap_or_else(|_| panic!("{answer}"))
    }

    /// SIGTERM; the rest of standard error.
    fn stop(mut self) -> String {
        let status = Command::new("kill").arg(self.child.id().to_string()).status().expect("kill");
        assert!(status.success());
        let mut rest = String::new();
        self.errors.read_to_string(&mut rest).expect("text");
        assert_eq!(self.child.wait().expect("ends").code(), Some(0), "{rest}");
        rest
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        // Already gone after `stop`.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

pub fn ids(value: &Value) -> Vec<u64> {
    value.as_array().expect("a list").iter().filter_map(Value::as_u64).collect()
}

/// A fixture's checkpoint with the built-in model's tokens.
pub fn servable(checkpoint: &Path) -> tempfile::TempDir {
    let folder = tempfile::tempdir().expect("a folder");
    let demo = Path::new(env!("CARGO_MANIFEST_DIR")).join("assets/demo");
    let own = std::fs::read_dir(checkpoint).expect("a fixture").map(|file| file.expect("a file").path());
    let of_expected = |file: &PathBuf| file.file_stem().is_some_and(|name| name == "expected");
    let files = ["generation_config.json", "tokenizer.json", "tokenizer_config.json"];
    for file in own.filter(|file| !of_expected(file)).chain(files.map(|file| demo.join(file))) {
        std::fs::copy(&file, folder.path().join(file.file_name().expect("a name"))).expect("copied");
    }
    folder
}

/// A prompt for a fixture, and the tokens behind it.
pub fn said_by_transformers(name: &str) -> [Vec<u64>; 2] {
    let file = folio_model::testing::fixture(name).join("expected.json");
    let text = std::fs::read_to_string(file).expect("what is expected");
    let expected: Value = serde_json::from_str(&text).expect("JSON");
    ["prompt", "greedy"].map(|field| ids(&expected["cases"][0][field]))
}

/// Each family through the API: the tokens that transformers chooses, and what follows them from what was kept.
#[test]
fn each_family_says_what_transformers_says_and_goes_on_from_what_is_kept() {
    use folio_model::testing::FIXTURES;
    for name in FIXTURES {
        let fixture = folio_model::testing::fixture(name);
        let (folder, [prompt, greedy]) = (servable(&fixture), said_by_transformers(name));
        let model = folder.path().to_str().expect("a path");
        let served = Served::start(&[model, "--served-model-name", "it", "--kv-cache-dtype", "f32"]);
        let ask = |prompt: &[u64], most: usize| {
            let body = json!({"model": "it", "prompt": prompt, "max_tokens": most, "temperature": 0,
                "ignore_eos": true, "return_token_ids": true});
            let answer = served.post("/v1/completions", &body);
            let cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64();
            (ids(&answer["choices"][0]["token_ids"]), cached.expect("a number") as usize)
        };
        assert_eq!(ask(&prompt, greedy.len()), (greedy.clone(), 0), "{name}");
        // The next turn of the conversation, and the same without what was kept.
        let next = [&prompt[..], &greedy].concat();
        let (said, cached) = ask(&next, 8);
        assert_eq!(cached, next.len() - 1, "{name}");
        let alone = Served::start(&[model, "--served-model-name", "it", "--kv-cache-dtype", "f32"]);
        let body = json!({"model": "it", "prompt": next, "max_tokens": 8, "temperature": 0,
            "ignore_eos": true, "return_token_ids": true});
        let cold = alone.post("/v1/completions", &body);
        assert_eq!(ids(&cold["choices"][0]["token_ids"]), said, "{name}");
    }
}

#[test]
fn a_server_is_measured_and_stopped() {
    let served = Served::start(&["--served-model-name", "tiny,alias"]);
    let models = served.get("/v1/models", "");
    assert!(models.contains("tiny") && models.contains("alias"), "{models}");
    let url = format!("http://{}", served.address);
    for endpoint in ["completions", "chat"] {
        let load = ["--requests", "12", "--warmup", "2", "--concurrency", "4", "--input-len", "20..60"];
        let more = ["--output-len", "4..8", "--endpoint", endpoint, "--slo-e2e-ms", "600000", "--json"];
        let report = stdout(&[&["bench", "serve", "--url", &url][..], &load, &more].concat());
        let report: Value = serde_json::from_str(&report).expect("JSON");
        assert_eq!((&report["completed"], &report["model"]), (&12.into(), &"tiny".into()), "{report}");
        assert_eq!(report["goodput"]["good"], 12);
        let output_tokens = report["output_tokens"].as_u64().expect("count");
        assert!(
            (12 * 4..=12 * 8).contains(&output_tokens),
            "ignore_eos gives the length asked for: {report}"
        );
        let mean_prompt = report["prompt_tokens"].as_u64().expect("count") / 12;
        assert!((15..=90).contains(&mean_prompt), "{report}");
    }
    let shared = ["--requests", "8", "--warmup", "0", "--concurrency", "1", "--shared-prefixes", "1"];
    let more = ["--prefix-len", "200", "--input-len", "10", "--output-len", "2", "--rate", "50", "--json"];
    let report = stdout(&[&["bench", "serve", "--url", &url][..], &shared, &more].concat());
    let report: Value = serde_json::from_str(&report).expect("JSON");
    assert!(report["cached_tokens"].as_u64() > Some(7 * 150), "the prefix is found: {report}");
    let exact = ["--requests", "6", "--warmup", "0", "--shared-prefixes", "3", "--prefix-len", "100"];
    let more = ["--input-len", "20", "--output-len", "2", "--token-ids", "300..900", "--json"];
    let report = stdout(&[&["bench", "serve", "--url", &url][..], &exact, &more].concat());
    let report: Value = serde_json::from_str(&report).expect("JSON");
    assert_eq!((&report["completed"], &report["prompt_tokens"]), (&6.into(), &720.into()), "{report}");
    let talk = folio(&["chat", "--url", &url, "--max-tokens", "4"]).output().expect("folio runs");
    assert!(String::from_utf8_lossy(&talk.stderr).contains("Talking to tiny at"));
    served.stop();
}

/// On the first run, with nothing set: a tool is called where it fits, or where it must be, its result is read, and no call is made
/// where none fits.
#[test]
fn the_built_in_model_calls_tools() {
    let served = Served::start(&[]);
    let tool = |name: &str, about: &str, key: &str| {
        json!({"type": "function", "function": {"name": name, "description": about,
            "parameters": {"type": "object", "properties": {key: {"type": "string"}}, "required": [key]}}})
    };
    let tools = [
        tool("get_time", "Get the current time in a city", "city"),
        tool("calculate", "Calculate an expression", "expression"),
        tool("lookup", "Look up a topic", "query"),
    ];
    let ask = |messages: &Value, choice: Value| {
        let body = json!({"messages": messages, "tools": tools, "tool_choice": choice, "temperature": 0, "max_tokens": 100});
        let answer = served.post("/v1/chat/completions", &body);
        answer["choices"][0]["message"].clone()
    };
    let user = |text: &str| json!([{"role": "user", "content": text}]);
    let call = |message: &Value| {
        let function = &message["tool_calls"][0]["function"];
        let arguments = function["arguments"].as_str().unwrap_or_else(|| panic!("no call: {message}"));
        (function["name"].clone(), serde_json::from_str::<Value>(arguments).expect("JSON"))
    };
    for (text, name, arguments) in [
        ("What time is it in Oslo?", "get_time", json!({"city": "Oslo"})),
        ("What is 384 * 27?", "calculate", json!({"expression": "384 * 27"})),
        ("Look up Mount Fuji.", "lookup", json!({"query": "Mount Fuji"})),
    ] {
        assert_eq!(call(&ask(&user(text), json!("auto"))), (name.into(), arguments), "{text}");
    }
    let forced = json!({"type": "function", "function": {"name": "lookup"}});
    let (name, arguments) = call(&ask(&user("Hello!"), forced));
    assert_eq!(name, "lookup");
    assert!(arguments["query"].is_string(), "{arguments}");
    let (name, _) = call(&ask(&user("Tell me the time in Lima."), json!("required")));
    assert_eq!(name, "get_time");

    let asked = ask(&user("What is 384 * 27?"), json!("auto"));
    let result = json!({"role": "tool", "tool_call_id": asked["tool_calls"][0]["id"], "content": "10368"});
    let question = json!({"role": "user", "content": "What is 384 * 27?"});
    let told = ask(&json!([question, asked, result]), json!("auto"));
    assert!(told["content"].as_str().is_some_and(|text| text.contains("10368")), "{told}");
    let hello = ask(&user("Hello!"), json!("auto"));
    assert!(hello["tool_calls"].is_null() && hello["content"].is_string(), "{hello}");
    served.stop();
}

#[test]
fn keys_are_required_where_given() {
    let served = Served::start(&["--api-key", "secret"]);
    assert!(served.get("/v1/models", "").starts_with("HTTP/1.1 401"));
    assert!(served.get("/v1/models", "authorization: Bearer secret\r\n").starts_with("HTTP/1.1 200"));
    let url = format!("http://{}", served.address);
    let without = refusal(&["bench", "serve", "--url", &url, "--requests", "1"]);
    assert!(without.contains("401"), "{without}");
    served.stop();
}
