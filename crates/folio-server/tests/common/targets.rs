//! What `fuzz/` searches and `tests/fuzz.rs` tries by seeds: bytes from a stranger, and what must be true of any of them. One function
//! for each reader, which panics where it is not.

use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::http::{HeaderName, HeaderValue, Request};
use folio_engine::SchedulerConfig;
use folio_server::{Declared, Engine, Safety, ServerConfig, check};
use serde_json::{Value, json};

use super::{Client, EOS, FakeEngine, Reply, modelled, reply, tool_app};

/// Every route that takes a POST of JSON, and something in the place of an id.
pub const ROUTES: [&str; 21] = [
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
    "/v1/embeddings",
    "/v1/batches",
    "/v1/cache/prefixes/pfx_00000000000000000000000000000000",
    "/v1/responses/resp_0/cancel",
    "/api/chat",
    "/api/generate",
    "/api/embed",
    "/api/embeddings",
    "/api/show",
    "/api/pull",
    "/v1/batches/batch_0/cancel",
];

/// Longest that one answer may take before it counts as none.
const PATIENCE: Duration = Duration::from_secs(60);

/// A server with tools and reasoning, and the thread that it runs on.
pub struct Target {
    runtime: tokio::runtime::Runtime,
    engine: Arc<FakeEngine>,
    client: Client,
    /// Of an engine with a cache.
    caching: Client,
    /// Of several models.
    several: Client,
}

impl Target {
    pub fn new() -> Self {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let engine = FakeEngine::saying("ok");
        let client = |engine: Arc<dyn Engine>| {
            let app = tool_app(engine, 1 << 14);
            let config = ServerConfig { api_keys: vec!["key".into()], ..Default::default() };
            Client::with(config, app).key("key")
        };
        let scheduler =
            SchedulerConfig { max_model_len: 256, max_num_batched_tokens: 64, ..Default::default() };
        let _runtime = runtime.enter();
        let (client, caching) = (client(engine.clone()), client(Arc::new(modelled(scheduler, 64, 1 << 20))));
        let several = Client::several(&ServerConfig::default());
        drop(_runtime);
        Self { runtime, engine, client, caching, several }
    }

    fn send(&self, what: &str, request: Request<Body>) -> Reply {
        self.send_to(if what.starts_with("/v1/cache") { &self.caching } else { &self.client }, what, request)
    }

    fn send_to(&self, client: &Client, what: &str, request: Request<Body>) -> Reply {
        let answered = self.runtime.block_on(async {
            tokio::time::timeout(PATIENCE, async { reply(client.send(request).await).await }).await
        });
        // A fuzzer would keep every request otherwise.
        self.engine.requests.lock().unwrap().clear();
        answered.unwrap_or_else(|_| panic!("{what} hangs"))
    }

    /// An answer, or an error that says what is wrong: in the API's shape, in no more bytes than a person reads.
    fn judge(&self, what: &str, request: Request<Body>) -> Reply {
        let reply = self.send(what, request);
        assert!(reply.status.as_u16() < 500, "{what}: {} {}", reply.status, reply.text);
        said(what, reply)
    }

    /// The same of a router: which model it is for is read, or the error says what is wrong. Its one model does not start.
    pub fn router(&self, data: &[u8]) {
        let Some((route, body)) = data.split_first() else { return };
        let route = ROUTES[usize::from(route.wrapping_sub(b'a')) % ROUTES.len()];
        let reply = self.send_to(&self.several, route, self.several.request("POST", route, body.to_vec()));
        assert!(reply.status != 500, "{route}: {}", reply.text);
        said(route, reply);
    }

    /// The first byte is the route (`a`: the first), the others are the body.
    pub fn json(&self, data: &[u8]) {
        if let Some((route, body)) = data.split_first() {
            self.body(ROUTES[usize::from(route.wrapping_sub(b'a')) % ROUTES.len()], body.to_vec());
        }
    }

    pub fn body(&self, route: &str, body: Vec<u8>) {
        self.judge(route, self.client.request("POST", route, body));
    }

    /// A line with the content type, and a form behind it. Whatever of it is taken for a file is kept as it came.
    pub fn multipart(&self, data: &[u8]) {
        let end = data.iter().position(|byte| *byte == b'\n').unwrap_or(data.len());
        let Ok(kind) = HeaderValue::from_bytes(&data[..end]) else { return };
        let body = data.get(end + 1..).unwrap_or_default();
        let mut request = self.client.request("POST", "/v1/files", body.to_vec());
        request.headers_mut().insert("content-type", kind);
        let taken = self.judge("/v1/files", request);
        if taken.status != 200 {
            return;
        }
        let path = format!("/v1/files/{}", taken.json()["id"].as_str().unwrap());
        let content = self.client.request("GET", &format!("{path}/content"), Body::empty());
        let content = self.runtime.block_on(async {
            let answer = self.client.send(content).await;
            axum::body::to_bytes(answer.into_body(), usize::MAX).await.unwrap()
        });
        let within = content.is_empty() || body.windows(content.len()).any(|part| part == content);
        assert!(within, "a file that nobody sent");
        assert_eq!(taken.json()["bytes"], content.len());
        assert_eq!(self.send(&path, self.client.request("DELETE", &path, Body::empty())).status, 200);
    }

    /// The lines of a batch: it ends, and each of them has at most one result.
    pub fn batch_lines(&self, data: &[u8]) {
        let mut form =
            b"--b\r\ncontent-disposition: form-data; name=\"purpose\"\r\n\r\nbatch\r\n--b\r\n".to_vec();
        form.extend_from_slice(
            b"content-disposition: form-data; name=\"file\"; filename=\"in.jsonl\"\r\n\r\n",
        );
        form.extend_from_slice(data);
        form.extend_from_slice(b"\r\n--b--\r\n");
        let mut request = self.client.request("POST", "/v1/files", form);
        request
            .headers_mut()
            .insert("content-type", HeaderValue::from_static("multipart/form-data; boundary=b"));
        let file = self.judge("/v1/files", request);
        if file.status != 200 {
            return;
        }
        for endpoint in ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/embeddings"] {
            let wanted =
                json!({"input_file_id": file.json()["id"], "endpoint": endpoint, "completion_window": "24h"});
            let begun =
                self.judge("/v1/batches", self.client.request("POST", "/v1/batches", wanted.to_string()));
            assert_eq!(begun.status, 200, "{}", begun.text);
            let ended = self.ended(begun.json());
            let lines = data.split(|byte| *byte == b'\n').count() as u64;
            let counts = |what: &str| ended["request_counts"][what].as_u64().unwrap();
            assert!(counts("completed") + counts("failed") <= counts("total").min(lines), "{ended}");
            for file in ["output_file_id", "error_file_id"] {
                if let Some(id) = ended[file].as_str() {
                    let path = format!("/v1/files/{id}");
                    self.send(&path, self.client.request("DELETE", &path, Body::empty()));
                }
            }
        }
        let path = format!("/v1/files/{}", file.json()["id"].as_str().unwrap());
        assert_eq!(self.send(&path, self.client.request("DELETE", &path, Body::empty())).status, 200);
    }

    fn ended(&self, batch: Value) -> Value {
        let path = format!("/v1/batches/{}", batch["id"].as_str().unwrap());
        for _ in 0..60_000 {
            let now = self.send(&path, self.client.request("GET", &path, Body::empty())).json();
            if ["completed", "failed"].iter().any(|status| now["status"] == **status) {
                return now;
            }
            self.runtime.block_on(async { tokio::time::sleep(Duration::from_millis(1)).await });
        }
        panic!("a batch does not end: {batch}");
    }

    /// Lines of `name: value` on any route, and a small body.
    pub fn headers(&self, data: &[u8]) {
        let Some((route, lines)) = data.split_first() else { return };
        let (route, method) = match usize::from(*route) {
            at if at < ROUTES.len() => (ROUTES[at], "POST"),
            at => (["/v1/models", "/health", "/metrics", "/v1/files"][at % 4], "GET"),
        };
        let mut request =
            self.client.request(method, route, r#"{"prompt": "hi", "input": "hi", "max_tokens": 1}"#);
        for line in lines.split(|byte| *byte == b'\n').take(100) {
            let Some(colon) = line.iter().position(|byte| *byte == b':') else { continue };
            let name = HeaderName::from_bytes(line[..colon].trim_ascii());
            let value = HeaderValue::from_bytes(line[colon + 1..].trim_ascii());
            if let (Ok(name), Ok(value)) = (name, value) {
                request.headers_mut().append(name, value);
            }
        }
        let asked = request.headers().get("x-request-id").cloned();
        let reply = self.send(route, request);
        assert!(reply.status.as_u16() < 500, "{route}: {} {}", reply.status, reply.text);
        let named = reply.headers.get("x-request-id").unwrap();
        let usable = named.as_bytes().iter().all(u8::is_ascii_graphic) && named.len() <= 256;
        assert!(usable && (asked.is_none() || !named.is_empty()), "{named:?}");
    }

    /// What a model says, in every API's stream: whole frames of whole JSON, and together the same as the answer that is not streamed.
    pub fn sse(&self, data: &[u8]) {
        let said: Vec<u8> = data.iter().copied().take(512).collect();
        self.engine.plan(|plan| (plan.say, plan.extra) = (said, vec![EOS]));
        let tool = json!({"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}});
        let messages = json!([{"role": "user", "content": "hi"}]);
        let ask = |path: &str, body: &Value| {
            let reply = self.send(path, self.client.request("POST", path, body.to_string()));
            assert_eq!(reply.status, 200, "{path}: {}", reply.text);
            reply
        };
        let both = |path: &str, body: Value| {
            let whole = ask(path, &body).json();
            let stream = ask(path, &super::merged(body, json!({"stream": true})));
            (whole, frames(&stream.text))
        };
        let joined = |frames: &[Value], path: &str| {
            frames.iter().filter_map(|frame| frame.pointer(path)?.as_str()).collect::<String>()
        };
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();

        let (whole, frames) = both("/v1/completions", json!({"prompt": "hi", "max_tokens": 600}));
        assert_eq!(joined(&frames, "/choices/0/text"), text(&whole["choices"][0]["text"]));

        let body = json!({"messages": messages, "max_tokens": 600, "tools": [tool]});
        let (whole, frames) = both("/v1/chat/completions", body);
        let message = &whole["choices"][0]["message"];
        assert_eq!(joined(&frames, "/choices/0/delta/content"), text(&message["content"]));
        let arguments = message["tool_calls"].as_array().into_iter().flatten();
        let arguments: String = arguments.map(|call| text(&call["function"]["arguments"])).collect();
        assert_eq!(joined(&frames, "/choices/0/delta/tool_calls/0/function/arguments"), arguments);

        let (whole, frames) = both("/v1/messages", json!({"messages": messages, "max_tokens": 600}));
        let blocks = whole["content"].as_array().unwrap().iter();
        let shown: String = blocks.map(|block| text(&block["text"])).collect();
        assert_eq!(joined(&frames, "/delta/text"), shown);

        let (whole, frames) = both("/v1/responses", json!({"input": "hi", "max_output_tokens": 600}));
        let items = whole["output"].as_array().unwrap().iter().filter(|item| item["type"] == "message");
        let shown: String = items.map(|item| text(&item["content"][0]["text"])).collect();
        let deltas = frames.iter().filter(|frame| frame["type"] == "response.output_text.delta");
        assert_eq!(deltas.map(|frame| text(&frame["delta"])).collect::<String>(), shown);

        let body = json!({"messages": messages, "tools": [tool], "options": {"num_predict": 600}});
        let whole = ask("/api/chat", &super::merged(body.clone(), json!({"stream": false}))).json();
        let lines = ask("/api/chat", &body).lines();
        for part in ["content", "thinking"] {
            assert_eq!(joined(&lines, &format!("/message/{part}")), text(&whole["message"][part]));
        }
        let calls = |line: &Value| line["message"]["tool_calls"].as_array().cloned().unwrap_or_default();
        let plain = |mut call: Value| call["function"].take();
        let streamed = lines.iter().flat_map(calls).map(plain).collect::<Vec<_>>();
        assert_eq!(streamed, calls(&whole).into_iter().map(plain).collect::<Vec<_>>());
    }
}

/// An error says what is wrong, and no more than a person reads.
fn said(what: &str, reply: Reply) -> Reply {
    if !reply.status.is_success() {
        let error = reply.error();
        let said = error["message"].as_str().is_some_and(|message| message.len() > 5);
        assert!(said, "{what}: {}", reply.text);
        assert!(reply.text.len() < 4096, "{what}: an error of {} bytes", reply.text.len());
    }
    reply
}

/// The JSON of every event; the text is frames and nothing else, by the rules of the standard (lines end with LF, CR LF or CR, as a
/// client may read them).
fn frames(text: &str) -> Vec<Value> {
    assert!(text.ends_with("\n\n"), "the last frame is cut short: {text:?}");
    let lines = text.replace("\r\n", "\n").replace('\r', "\n");
    let mut out = Vec::new();
    for frame in lines.trim_end_matches('\n').split("\n\n") {
        let mut data = frame.lines().filter_map(|line| match line.split_once(": ") {
            Some(("data", data)) => Some(data),
            Some(("event" | "id", _)) => None,
            _ if line.starts_with(':') => None,
            _ => panic!("no field of an event: {line:?}"),
        });
        let (first, more) = (data.next(), data.next());
        assert_eq!(more, None, "JSON is on one line");
        match first {
            None | Some("[DONE]") => {}
            Some(json) => {
                out.push(serde_json::from_str(json).unwrap_or_else(|error| panic!("{error}: {json:?}")))
            }
        }
    }
    out
}

/// A tenants file, or rules: a server could be started with them, or the error says what is wrong with which.
pub fn declared(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    let environment = |_: &str| Some("of the environment".to_owned());
    let wrong = |error: String, file: &str| {
        let named = error.strip_prefix("the server configuration is invalid: ");
        assert!(named.is_some_and(|reason| reason.starts_with(file)), "{error}");
    };
    match Declared::parse(text, &environment) {
        Ok(tenants) => {
            assert!(tenants.tenants.iter().all(|tenant| tenant.weight > 0 && !tenant.name.is_empty()));
            // Two tenants may have one key, or none.
            if let Err(error) = check(&ServerConfig { tenants, ..Default::default() }) {
                assert!(error.to_string().len() > 20, "{error}");
            }
        }
        Err(error) => wrong(error.to_string(), "the tenants file: "),
    }
    match Safety::parse(text, &environment) {
        Ok(safety) => assert!(!safety.to_string().is_empty()),
        Err(error) => wrong(error.to_string(), "safety: "),
    }
}
