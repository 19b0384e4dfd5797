//! Nothing that a stranger sends may cost more than in proportion to its length, and nothing that is kept more than in proportion to its
//! number. Every route, parser and writer gets hostile input of one size and of twice the size; the work, counted and not timed, grows by
//! no more than [`MOST`]. Grammars are compiled on threads of their own: `grammars`.
//!
//! Counted are the steps that readers add up themselves ([`folio_text::work`]: bytes looked at or moved, names compared) and, by the
//! allocator, every byte that is made room for, in our code and in that of others. A path that compares or copies what is before it
//! for everything that comes doubles both.

mod common;

use std::future::poll_fn;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use common::room::{self, Counting};
use common::targets::ROUTES;
use common::{FakeEngine, Reply, reply, tool_app};
use folio_server::{HintPolicy, Limits, Safety, Server, ServerConfig, router_of};
use folio_text::{
    DetokenizeOptions, Detokenizer, OutputParser, ParserSetup, REASONING_FORMATS, ReasoningFormat,
    SegmentKey, StopMatcher, TOOL_FORMATS, TokenCache, Tokenizer, ToolFormat, work,
};
use futures_core::Stream;
use serde_json::{Value, json};
use tower::ServiceExt;

/// Twice the input, and no more than so much of the work.
const MOST: f64 = 2.3;

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Steps and bytes of this thread so far.
fn here() -> [u64; 2] {
    [work::done(), room::made()]
}

/// Holds `run`, which works on this thread, to its promise from `size` to twice that.
fn doubles(what: &str, size: usize, run: impl Fn(usize)) {
    doubles_by(what, size, here, run);
}

/// The same with another count of what was done so far.
fn doubles_by(what: &str, size: usize, so_far: impl Fn() -> [u64; 2], run: impl Fn(usize)) {
    let counted = |size| {
        let before = so_far();
        run(size);
        let after = so_far();
        [0, 1].map(|kind| (after[kind] - before[kind]) as f64)
    };
    // Whatever is made once is made; what is kept of a text is not kept of these.
    run(size / 2);
    let (single, double) = (counted(size), counted(2 * size));
    for (kind, (single, double)) in ["steps", "bytes"].iter().zip(single.iter().zip(double)) {
        let ratio = double / single.max(1.0);
        println!("{what:60} {kind} {single:12.0} {double:12.0} {ratio:.2}");
        // Below this it is what every request costs.
        assert!(
            double < 4096.0 || ratio <= MOST,
            "{what}: {single} {kind} at {size} and {double} at twice that: {ratio:.2} times"
        );
    }
}

/// A server whose text work runs on one thread beside this one, so that both can be counted.
struct Served {
    engine: Arc<FakeEngine>,
    router: axum::Router,
    runtime: tokio::runtime::Runtime,
}

impl Served {
    fn new() -> Self {
        Self::with(ServerConfig::default())
    }

    fn with(config: ServerConfig) -> Self {
        // A prompt may be as long as it likes: it is its reading that is looked at.
        let engine = FakeEngine::saying("ok");
        let app = tool_app(engine.clone(), 1 << 22);
        let mut runtime = tokio::runtime::Builder::new_current_thread();
        runtime.enable_all().max_blocking_threads(1).thread_keep_alive(Duration::from_secs(600));
        let router = Server::new(ServerConfig { limits: Self::limits(), ..config }, app).unwrap().router();
        Self { engine, router, runtime: runtime.build().unwrap() }
    }

    /// Nothing has a thread of its own, where it would not be counted.
    fn limits() -> Limits {
        Limits { body_bytes: 64 << 20, text_large_bytes: usize::MAX, ..Limits::default() }
    }

    /// A router of several models.
    fn several() -> Self {
        let config = ServerConfig { limits: Self::limits(), ..ServerConfig::default() };
        Self { router: router_of(&config, common::several()).unwrap(), ..Self::new() }
    }

    /// Of the event loop and of the text thread.
    fn so_far(&self) -> [u64; 2] {
        let beside = self.runtime.block_on(async { tokio::task::spawn_blocking(here).await.unwrap() });
        [0, 1].map(|kind| here()[kind] + beside[kind])
    }

    fn doubles(&self, what: &str, size: usize, run: impl Fn(usize)) {
        doubles_by(what, size, || self.so_far(), run);
    }

    /// Answers one request, and says with which status.
    fn ask(&self, path: &str, kind: &str, body: &str) -> u16 {
        self.ask_as("", path, kind, body)
    }

    fn ask_as(&self, key: &str, path: &str, kind: &str, body: &str) -> u16 {
        self.reply_as(key, "POST", path, kind, body).status.as_u16()
    }

    fn reply(&self, method: &str, path: &str, kind: &str, body: &str) -> Reply {
        self.reply_as("", method, path, kind, body)
    }

    fn reply_as(&self, key: &str, method: &str, path: &str, kind: &str, body: &str) -> Reply {
        let request = axum::http::Request::builder().method(method).uri(path).header("content-type", kind);
        let request = match key {
            "" => request,
            key => request.header("authorization", format!("Bearer {key}")),
        };
        let request = request.body(Body::from(body.to_owned())).unwrap();
        let answer = async { reply(self.router.clone().oneshot(request).await.unwrap()).await };
        self.runtime.block_on(answer)
    }

    /// Keeps a file of so many lines for a batch: its id.
    fn upload(&self, lines: usize) -> Value {
        let mut form = "--b\r\ncontent-disposition: form-data; name=\"purpose\"\r\n\r\nbatch\r\n--b\r\n\
             content-disposition: form-data; name=\"file\"; filename=\"f\"\r\n\r\n"
            .to_owned();
        for line in 0..lines {
            let body = json!({"prompt": "hi", "max_tokens": 1});
            form += &json!({"custom_id": line.to_string(), "method": "POST", "url": "/v1/completions", "body": body})
                .to_string();
            form += "\n";
        }
        let file =
            self.reply("POST", "/v1/files", "multipart/form-data; boundary=b", &(form + "\r\n--b--\r\n"));
        assert_eq!(file.status, 200, "{}", file.text);
        file.json()["id"].clone()
    }

    /// Runs all lines of a file.
    fn run_batch(&self, file: &Value, lines: usize) {
        let batch = json!({"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h"})
            .to_string();
        let batch = self.reply("POST", "/v1/batches", "application/json", &batch).json();
        let path = format!("/v1/batches/{}", batch["id"].as_str().unwrap_or_else(|| panic!("{batch}")));
        for _ in 0..60_000 {
            let now = self.reply("GET", &path, "application/json", "").json();
            if now["status"] == "completed" {
                return assert_eq!(now["request_counts"]["completed"], lines);
            }
            self.runtime.block_on(async { tokio::time::sleep(Duration::from_millis(1)).await });
        }
        panic!("a batch does not end");
    }
}

/// What a body may be full of, made `n` long.
type Flood = (&'static str, fn(usize) -> Value);

fn list(n: usize, item: Value) -> Value {
    vec![item; n].into()
}

fn names(n: usize) -> Value {
    Value::Object((0..n).map(|at| (format!("k{at:07}"), Value::from(at))).collect())
}

fn tool(at: usize) -> Value {
    let function = json!({"name": format!("f{at}"), "description": "d", "parameters": {"type": "object", "properties": names(4)}});
    json!({"type": "function", "function": function})
}

/// Valid and invalid: each reaches some reader with much of something.
const FLOODS: [Flood; 21] = [
    ("names of the request", names),
    ("values nobody reads", |n| json!({"x": list(n, json!(1))})),
    ("nested lists", |n| json!({"x": list(n, json!([[[[1]]]]))})),
    ("one text", |n| json!({"prompt": "ab ".repeat(n), "input": "ab ".repeat(n), "tokens": [1]})),
    ("white space", |n| json!({"prompt": " ".repeat(n), "input": "\n \n".repeat(n)})),
    (
        "escapes",
        |n| json!({"prompt": "\u{1}\"\\".repeat(n), "messages": [{"role": "user", "content": "\u{1}".repeat(n)}]}),
    ),
    (
        "token ids",
        |n| json!({"prompt": list(n, json!(97)), "input": list(n, json!(97)), "tokens": list(n, json!(97))}),
    ),
    ("broken characters", |n| json!({"tokens": list(n, json!(195))})),
    (
        "user messages",
        |n| json!({"max_tokens": 1, "messages": list(n, json!({"role": "user", "content": "a"}))}),
    ),
    ("parts of a message", |n| {
        let parts = list(n, json!({"type": "text", "text": "a"}));
        json!({"max_tokens": 1, "messages": [{"role": "user", "content": parts}]})
    }),
    ("parts of a system prompt", |n| {
        let parts = list(n, json!({"type": "text", "text": "a"}));
        json!({"max_tokens": 1, "system": parts, "messages": [{"role": "user", "content": "a"}]})
    }),
    ("thoughts", |n| {
        let parts = list(n, json!({"type": "thinking", "thinking": "a", "signature": ""}));
        json!({"max_tokens": 1, "messages": [{"role": "assistant", "content": parts}, {"role": "user", "content": "a"}]})
    }),
    ("calls and results of Ollama's", |n| {
        let call = |at: usize| json!({"function": {"name": format!("f{}", at % 7), "arguments": {}}});
        let result = |at: usize| match at % 3 {
            0 => json!({"role": "tool", "content": "a"}),
            1 => json!({"role": "tool", "content": "a", "tool_name": format!("f{}", at % 7)}),
            _ => json!({"role": "tool", "content": "a", "tool_call_id": format!("call_{}", n - at)}),
        };
        let made = json!({"role": "assistant", "tool_calls": (0..n).map(call).collect::<Vec<_>>()});
        let messages: Vec<Value> = std::iter::once(made).chain((0..n).map(result)).collect();
        json!({"messages": messages, "options": {"num_predict": 1}})
    }),
    ("calls and results", |n| {
        let call = |at: usize| json!({"type": "tool_use", "id": format!("c{at}"), "name": "f", "input": {}});
        let result =
            |at: usize| json!({"type": "tool_result", "tool_use_id": format!("c{at}"), "content": "a"});
        let calls: Vec<Value> = (0..n).map(call).collect();
        let results: Vec<Value> = (0..n).map(result).collect();
        json!({"max_tokens": 1, "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": calls},
            {"role": "user", "content": results}]})
    }),
    ("parts of one result", |n| {
        let parts = list(n, json!({"type": "text", "text": "a"}));
        json!({"max_tokens": 1, "messages": [{"role": "user", "content": "a"},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": parts}]}]})
    }),
    ("calls of a message", |n| {
        let call = json!({"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}});
        json!({"messages": [{"role": "assistant", "content": null, "tool_calls": list(n, call)}]})
    }),
    ("JSON in a call's arguments", |n| {
        let arguments = json!({"a": list(n, json!(1))}).to_string();
        let call = json!({"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}});
        json!({"messages": [{"role": "assistant", "content": null, "tool_calls": [call]}]})
    }),
    ("items", |n| json!({"input": list(n, json!({"type": "message", "role": "user", "content": "a"}))})),
    ("tools", |n| {
        let tools: Vec<Value> = (0..n / 8).map(tool).collect();
        json!({"messages": [{"role": "user", "content": "a"}], "tools": tools})
    }),
    ("allowed tools", |n| {
        let allowed = list(n, json!({"type": "function", "function": {"name": "f0"}, "name": "f0"}));
        let choice = json!({"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": allowed}, "mode": "auto", "tools": allowed});
        json!({"messages": [{"role": "user", "content": "a"}], "input": "a", "tools": [tool(0)], "tool_choice": choice})
    }),
    (
        "variables of the template",
        |n| json!({"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"mood": list(n, json!("x"))}}),
    ),
];

#[test]
fn every_route_reads_every_flood_in_proportion() {
    for (what, flood) in FLOODS {
        for path in ROUTES.into_iter().chain(["/v1/files"]) {
            // Another server: it keeps nothing of what others tokenized.
            let server = Served::new();
            // Past what is refused by its number (messages, tools) as well as below it.
            for size in [500, 3000] {
                server.doubles(&format!("{path} {what}"), size, |n| {
                    let status = server.ask(path, "application/json", &flood(n).to_string());
                    // 503: the engine of this test has no cache to keep anything in.
                    assert!(status != 500, "{path} {what}: {status}");
                });
            }
        }
    }
}

/// Rules look through all that a model reads of a conversation, and through JSON inside of it.
#[test]
fn every_flood_is_judged_in_proportion() {
    let rules = json!({"rules": [
        {"name": "denied", "strings": ["never said"], "action": "deny"},
        {"name": "replaced", "regexes": ["a1{1,3}b"], "action": "redact", "replacement": "#"},
    ]});
    let safety = Safety::parse(&rules.to_string(), &|_| None).unwrap();
    let arguments: Flood = ("what is replaced in a call's arguments", |n| {
        let arguments = json!({"a": list(n, json!("a11b"))}).to_string();
        let call = json!({"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}});
        json!({"messages": [{"role": "assistant", "content": null, "tool_calls": [call]}]})
    });
    for (what, flood) in FLOODS.into_iter().chain([arguments]) {
        for path in ["/v1/chat/completions", "/v1/messages", "/v1/responses", "/v1/completions", "/api/chat"]
        {
            let server = Served::with(ServerConfig { safety: safety.clone(), ..ServerConfig::default() });
            server.doubles(&format!("{path} {what} with rules"), 1000, |n| {
                let status = server.ask(path, "application/json", &flood(n).to_string());
                assert!(status != 500, "{path} {what}: {status}");
            });
        }
    }
}

/// Whose process is to answer: of a model that is served and of one that is not.
#[test]
fn a_router_reads_every_flood_in_proportion() {
    for (what, flood) in FLOODS {
        for path in ROUTES {
            let server = Served::several();
            let model = if path == "/api/pull" { common::SEVERAL } else { "no-such-model" };
            server.doubles(&format!("{path} {what} of several models"), 1500, |n| {
                let status =
                    server.ask(path, "application/json", &with(flood(n), "model", model).to_string());
                assert!(status != 500, "{path} {what}: {status}");
            });
        }
    }
}

fn with(mut body: Value, name: &str, value: &str) -> Value {
    body[name] = value.into();
    body
}

#[test]
fn forms_are_read_in_proportion() {
    let server = Served::new();
    let send = |what: &str, n: usize, form: &dyn Fn(usize) -> String| {
        server.doubles(&format!("/v1/files {what}"), n, |n| {
            server.ask("/v1/files", "multipart/form-data; boundary=b", &form(n));
        });
    };
    let named =
        |name: &str| format!("--b\r\nContent-Disposition: form-data; name=\"{name}\"; filename=\"f\"");
    for (what, filling) in [("almost the boundary", "\r\n--"), ("lines", "{}\n"), ("quotes", "\"\\")] {
        send(what, 20_000, &|n| format!("{}\r\n\r\n{}\r\n--b--\r\n", named("file"), filling.repeat(n)));
    }
    send("before the first part", 20_000, &|n| format!("{}\r\n--b--\r\n", "\r\n-".repeat(n)));
    for part in ["purpose", "file", "expires_after[anchor]", "x"] {
        let parts = |n: usize| format!("{}\r\n\r\nbatch\r\n", named(part)).repeat(n) + "--b--\r\n";
        send(&format!("parts {part}"), 2000, &parts);
    }
    send("headers of a part", 2000, &|n| {
        format!("{}\r\n{}\r\nx\r\n--b--\r\n", named("file"), "x-y: z\r\n".repeat(n))
    });
    send("a long header of a part", 20_000, &|n| {
        format!("{}; {}\r\n\r\nx\r\n--b--\r\n", named("file"), "a=\"\\\";".repeat(n))
    });
    send("a name", 20_000, &|n| format!("{}\r\n\r\nx\r\n--b--\r\n", named(&"n".repeat(n))));
    server.doubles("/v1/files a boundary", 2000, |n| {
        let boundary = "b".repeat(n);
        let kind = format!("multipart/form-data; boundary={boundary}");
        server.ask("/v1/files", &kind, &format!("--{boundary}\r\n\r\nx\r\n--{boundary}--\r\n"));
    });
}

/// Fields that nobody knows, where the operator lets them pass and where not: looked up in tables, and held against every known name.
#[test]
fn fields_that_nobody_knows_are_looked_up_in_proportion() {
    let message = |more: Value| common::merged(json!({"role": "user", "content": "a"}), more);
    let floods: [Flood; 5] = [
        ("a long name", |n| json!({"x".repeat(n): 1})),
        ("names almost known", |n| (0..n).map(|at| (format!("max_tokens_{at}"), json!(1))).collect()),
        (
            "a hint with much in it",
            |n| json!({"client_metadata": names(n), "metadata": names(n), "verbosity": list(n, json!(1))}),
        ),
        (
            "values of a hint",
            |n| json!({"include": list(n, json!("reasoning.encrypted_content")), "input": "a"}),
        ),
        (
            "betas",
            |n| json!({"betas": list(n, json!("b")), "context_management": {"edits": list(n, json!({}))}}),
        ),
    ];
    let accepted = vec!["messages[].mood".to_owned(), "input[].mood".to_owned()];
    for (said, hints) in [
        ("refused", HintPolicy::default()),
        ("warned", HintPolicy::new(Vec::new(), true).unwrap()),
        ("accepted", HintPolicy::new(accepted, true).unwrap()),
    ] {
        let server = Served::with(ServerConfig { hints, ..Default::default() });
        for path in ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"] {
            let ask = |n: usize, flood: &dyn Fn(usize) -> Value| {
                let base = json!({"max_tokens": 1, "messages": [message(json!({}))]});
                assert_ne!(
                    server.ask(path, "application/json", &common::merged(base, flood(n)).to_string()),
                    500
                );
            };
            for (what, flood) in floods {
                server.doubles(&format!("{path} {said} {what}"), 3000, |n| ask(n, &flood));
            }
            let moody = |n: usize| {
                let list = list(n, message(json!({"mood": 1})));
                json!({"messages": list, "input": list})
            };
            server.doubles(&format!("{path} {said} in each message"), 500, |n| ask(n, &moody));
        }
    }
}

/// An answer of a size.
type Says = fn(usize) -> String;

/// What a model says, told by every API, in a stream and whole.
#[test]
fn answers_are_written_in_proportion() {
    let says: [(&str, Says); 6] = [
        ("text", |n| "word \n".repeat(n)),
        ("escapes", |n| "\u{1}\"\\".repeat(2 * n)),
        ("thoughts", |n| format!("<think>{}</think>ok", "so ".repeat(2 * n))),
        ("one call", |n| {
            format!(
                "<tool_call>\n{{\"name\": \"f0\", \"arguments\": {{\"a\": \"{}\"}}}}\n</tool_call>",
                "x ".repeat(3 * n)
            )
        }),
        ("calls", |n| {
            "<tool_call>\n{\"name\": \"f0\", \"arguments\": {\"a\": 1}}\n</tool_call>\n".repeat(n / 8)
        }),
        ("thoughts again and again", |n| "<think>a</think>b".repeat(n / 3)),
    ];
    let server = Served::new();
    let ask = |path: &str, n: usize, body: &Value, say: fn(usize) -> String| {
        server.engine.plan(|plan| plan.say = say(n).into());
        let reply = server.reply("POST", path, "application/json", &body.to_string());
        assert_eq!(reply.status, 200, "{}", reply.text);
        server.engine.requests.lock().unwrap().clear();
    };
    let messages = json!([{"role": "user", "content": "hi"}]);
    let many = 1 << 20;
    for (what, say) in says {
        for stream in [false, true] {
            let responses = json!({"type": "function", "name": "f0", "parameters": {"type": "object"}});
            for (path, body) in [
                ("/v1/completions", json!({"prompt": "hi", "max_tokens": many, "logprobs": 2})),
                (
                    "/v1/chat/completions",
                    json!({"messages": messages, "max_tokens": many, "tools": [tool(0)]}),
                ),
                (
                    "/v1/chat/completions",
                    json!({"messages": messages, "max_tokens": many, "n": 3, "logprobs": true, "stop": ["never said", "\n\n"]}),
                ),
                ("/v1/responses", json!({"input": "hi", "max_output_tokens": many, "tools": [responses]})),
                (
                    "/v1/responses",
                    json!({"input": "hi", "max_output_tokens": many, "background": stream, "store": true}),
                ),
                (
                    "/v1/messages",
                    json!({"messages": messages, "max_tokens": many, "tools": [{"name": "f0", "input_schema": {"type": "object"}}]}),
                ),
                (
                    "/api/chat",
                    json!({"messages": messages, "options": {"num_predict": many}, "tools": [tool(0)]}),
                ),
            ] {
                let body = common::merged(body, json!({"stream": stream}));
                server.doubles(&format!("{path} {what} stream {stream}"), 400, |n| ask(path, n, &body, say));
            }
        }
    }
}

/// What is long is written on a text thread; on the event loop it is handed on, in parts.
#[test]
fn what_is_long_is_written_off_the_event_loop() {
    let server = Served::new();
    server.engine.plan(|plan| plan.vector = vec![0.1; 4096]);
    let prompt = "ab ".repeat(70_000);
    let completion = json!({"prompt": prompt, "n": 8, "max_tokens": 1});
    let (echo, ids) = (json!({"echo": true}), json!({"return_token_ids": true}));
    let both = common::merged(echo.clone(), ids.clone());
    let inputs = json!({"input": vec!["a"; 256]});
    for (path, body) in [
        ("/v1/completions", common::merged(completion.clone(), echo)),
        ("/v1/completions", common::merged(completion.clone(), ids)),
        ("/v1/completions", common::merged(completion, both)),
        ("/v1/embeddings", inputs.clone()),
        ("/v1/embeddings", common::merged(inputs.clone(), json!({"encoding_format": "base64"}))),
        ("/api/embed", inputs),
    ] {
        for stream in [false, true] {
            let (mut body, what) = (body.clone(), format!("{path} stream {stream}"));
            match path {
                "/v1/completions" => body["stream"] = stream.into(),
                _ if stream => continue,
                _ => {}
            }
            let request = axum::http::Request::builder().method("POST").uri(path);
            let request = request.header("content-type", "application/json");
            let request = request.body(Body::from(body.to_string())).unwrap();
            let before = here()[1];
            let told: usize = server.runtime.block_on(async {
                let response = server.router.clone().oneshot(request).await.unwrap();
                assert_eq!(response.status(), 200, "{what}");
                let (mut body, mut told) = (response.into_body().into_data_stream(), 0);
                while let Some(part) = poll_fn(|cx| Pin::new(&mut body).poll_next(cx)).await {
                    told += part.unwrap().len();
                }
                told
            });
            server.engine.requests.lock().unwrap().clear();
            let made = here()[1] - before;
            println!("{what}: {told} bytes told, {made} made room for");
            assert!(told > 1 << 20 && made < 3 * told as u64, "{what}: {made} for {told}");
        }
    }
}

/// What is shown of what a tenant has is in proportion to what it has.
#[test]
fn what_is_kept_is_shown_in_proportion() {
    const KEPT: usize = 64;
    const SIZES: [usize; 3] = [KEPT / 2, KEPT, 2 * KEPT];
    let holding = |fill: &dyn Fn(&Served, usize) -> String| {
        SIZES.map(|size| {
            let server = Served::new();
            let path = fill(&server, size);
            (size, server, path)
        })
    };
    let shown = |what: &str, paths: &[&str], fill: &dyn Fn(&Served, usize) -> String| {
        let servers = holding(fill);
        for path in paths {
            let so_far = || {
                let all = servers.iter().map(|(_, server, _)| server.so_far());
                // Each count has this thread's own in it.
                let [steps, bytes] = here();
                all.fold([steps, bytes], |sum, one| [sum[0] + one[0] - steps, sum[1] + one[1] - bytes])
            };
            doubles_by(&format!("GET {path} {what}"), KEPT, so_far, |n| {
                let (_, server, id) = servers.iter().find(|(size, ..)| *size == n).unwrap();
                let reply = server.reply("GET", &path.replace("{id}", id), "", "");
                assert_eq!(reply.status, 200, "{path}: {}", reply.text);
            });
        }
    };
    let everything =
        ["/v1/files", "/v1/files?limit=10", "/v1/usage", "/metrics", "/v1/models", "/v1/cache/keys"];
    shown("files", &everything, &|server, n| {
        (0..n).for_each(|_| drop(server.upload(1)));
        String::new()
    });
    shown("batches", &["/v1/batches", "/v1/batches?limit=100", "/v1/files", "/metrics"], &|server, n| {
        let file = server.upload(1);
        (0..n).for_each(|_| server.run_batch(&file, 1));
        String::new()
    });
    let respond = |server: &Served, body: &Value| {
        let reply = server.reply("POST", "/v1/responses", "application/json", &body.to_string());
        let at = reply.text.find("resp_").unwrap_or_else(|| panic!("{}", reply.text));
        reply.text[at..at + 37].to_owned()
    };
    shown(
        "responses",
        &["/v1/responses/{id}", "/v1/responses/{id}/input_items", "/metrics"],
        &|server, n| (0..n).map(|_| respond(server, &json!({"input": "hi"}))).last().unwrap(),
    );
    let paths = [
        "/v1/responses/{id}",
        "/v1/responses/{id}/input_items?limit=100",
        "/v1/responses/{id}?stream=true",
        "/v1/responses/{id}?stream=true&starting_after=5",
    ];
    shown("items and events", &paths, &|server, n| {
        server.engine.plan(|plan| plan.say = "word ".repeat(n).into());
        let item = json!({"type": "message", "role": "user", "content": "a"});
        respond(
            server,
            &json!({"input": list(n, item), "background": true, "stream": true, "max_output_tokens": 1 << 20}),
        )
    });
    // A conversation of so many turns goes on.
    let servers = holding(&|server, n| {
        (0..n).fold(String::new(), |before, _| {
            let more = if before.is_empty() { json!({}) } else { json!({"previous_response_id": before}) };
            respond(server, &common::merged(json!({"input": "hi"}), more))
        })
    });
    let so_far = || {
        servers.iter().fold([0, 0], |sum, (_, server, _)| {
            let one = server.so_far();
            [sum[0] + one[0], sum[1] + one[1]]
        })
    };
    doubles_by("POST /v1/responses turns before it", KEPT, so_far, |n| {
        let (_, server, id) = servers.iter().find(|(size, ..)| *size == n).unwrap();
        respond(server, &json!({"input": "on", "previous_response_id": id}));
    });
}

#[test]
fn a_line_of_a_batch_costs_the_same_however_many_there_are_and_however_many_files() {
    const LINES: usize = 64;
    const FILES: usize = 400;
    let server = Served::new();
    let file = server.upload(LINES);
    let steps = || {
        let before = server.so_far()[0];
        server.run_batch(&file, LINES);
        server.so_far()[0] - before
    };
    let few = (steps(), steps()).1;
    (0..FILES).for_each(|_| drop(server.upload(1)));
    let many = steps();
    println!("{LINES} lines: {few} steps, beside {FILES} files {many}");
    assert!(many < few + FILES as u64 / 4, "{few} steps, and {many} beside {FILES} files");
    let files = [LINES / 2, LINES, 2 * LINES].map(|lines| (lines, server.upload(lines)));
    server.doubles("lines of a batch", LINES, |n| {
        let (lines, file) = files.iter().find(|(lines, _)| *lines == n).unwrap();
        server.run_batch(file, *lines);
    });
}

/// Text that keeps each format's reader waiting.
fn hostile(format: &ToolFormat) -> Vec<String> {
    let mut texts = vec!["<".into(), "{\"name\": \"f\", ".into(), "[".into(), " \n".into(), "f(a=".into()];
    texts.extend(format.markers().map(str::to_owned));
    texts.extend(
        format.markers().map(|marker| marker[..marker.len() - 1].to_owned()).filter(|text| !text.is_empty()),
    );
    texts.extend(
        format.markers().map(|marker| format!("{marker}{{\"name\": \"f\", \"arguments\": {{\"a\": \"x")),
    );
    texts
}

#[test]
fn every_tool_parser_reads_whatever_a_model_writes_in_proportion() {
    for format in TOOL_FORMATS {
        for reasoning in [None, ReasoningFormat::named("think")] {
            for text in hostile(format) {
                // Beyond the 64 calls that may turn out to be none.
                doubles(&format!("{} {text:?}", format.name), 2000, |n| {
                    let setup = ParserSetup { tools: Some(format), reasoning, ..Default::default() };
                    let (mut parser, mut events) = (OutputParser::new(setup), Vec::new());
                    for _ in 0..n {
                        parser.push(&text, &mut events);
                        // Whoever reads a stream takes what became certain.
                        events.clear();
                    }
                    parser.finish(&mut events);
                });
            }
        }
    }
    for format in REASONING_FORMATS {
        for text in [format.open, format.close, "<", "a"] {
            doubles(&format!("{} {text:?}", format.name), 2000, |n| {
                let setup = ParserSetup { reasoning: Some(format), ..Default::default() };
                let (mut parser, mut events) = (OutputParser::new(setup), Vec::new());
                (0..n).for_each(|_| parser.push(text, &mut events));
                parser.finish(&mut events);
            });
        }
    }
}

#[test]
fn stop_strings_are_looked_for_in_proportion_to_them_and_to_the_text() {
    let run = |stops: &[String], text: &str| {
        let mut matcher = StopMatcher::new(stops.iter().cloned(), false);
        let mut out = String::new();
        for piece in text.as_bytes().chunks(3) {
            matcher.push(std::str::from_utf8(piece).unwrap(), &mut out);
        }
        matcher.finish(&mut out);
    };
    // Its beginning is matched up to the middle, again and again.
    let almost = |n: usize| format!("{}b{}", "a".repeat(n / 2), "a".repeat(n / 2));
    doubles("longer stop strings", 4096, |n| run(&vec![almost(n); 16], &"a".repeat(n)));
    doubles("longer text", 4096, |n| run(&vec![almost(512); 16], &"a".repeat(n)));
    doubles("more stop strings", 128, |n| run(&vec![almost(128); n], &"a".repeat(1000)));
}

#[test]
fn tokens_become_text_in_proportion() {
    let tokenizer = common::tokenizer();
    let pieces = word_pieces();
    for (what, tokenizer, id) in [
        ("bytes", &tokenizer, 97),
        ("broken bytes", &tokenizer, 0xe2),
        ("control tokens", &tokenizer, 256),
        ("pieces of words", &pieces, 3),
        ("tokens without text", &pieces, 0),
    ] {
        doubles(&format!("detokenizer: {what}"), 4000, |n| {
            let options = DetokenizeOptions { skip_special_tokens: true, continues: false };
            let (mut detokenizer, mut out) = (Detokenizer::new(options), String::new());
            for _ in 0..n {
                detokenizer.push(tokenizer, id, &mut out);
                out.clear();
            }
            detokenizer.finish(tokenizer, &mut out);
        });
    }
}

/// A vocabulary whose decoder has no bytes per token.
fn word_pieces() -> Tokenizer {
    let special = json!([{"id": 0, "content": "[PAD]", "single_word": false, "lstrip": false, "rstrip": false,
        "normalized": false, "special": true}]);
    let file = json!({
        "version": "1.0", "truncation": null, "padding": null, "normalizer": null, "post_processor": null,
        "added_tokens": special, "pre_tokenizer": {"type": "Whitespace"},
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": true},
        "model": {"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##", "max_input_chars_per_word": 100,
            "vocab": {"[PAD]": 0, "[UNK]": 1, "a": 2, "##a": 3}},
    });
    Tokenizer::from_bytes(file.to_string().as_bytes(), None).unwrap()
}

#[test]
fn text_becomes_tokens_in_proportion() {
    let bytes = common::tokenizer();
    for (what, tokenizer) in [("bytes", &bytes), ("pieces of words", &word_pieces())] {
        for text in ["a", " ", "a ", "\n", "é", "<|", "<|end|>", "'s", "1", "\u{200d}"] {
            doubles(&format!("tokenizer: {what} {text:?}"), 4000, |n| {
                tokenizer.encode(&text.repeat(n), true, usize::MAX).unwrap();
            });
        }
    }
}

/// Nobody can tell by the time whether another tenant sent the same.
#[test]
fn a_conversation_that_comes_again_is_tokenized_once_for_each_tenant() {
    let keys = vec!["one".to_owned(), "two".to_owned()];
    let server = Served::with(ServerConfig { api_keys: keys, ..Default::default() });
    let message = |at: usize| {
        let role = if at.is_multiple_of(2) { "user" } else { "assistant" };
        json!({"role": role, "content": format!("message {at} ").repeat(50)})
    };
    let messages: Vec<Value> = (0..41).map(message).collect();
    let body = |path: &str| match path {
        "/tokenize" | "/v1/messages/count_tokens" => json!({"messages": messages}).to_string(),
        _ => json!({"max_tokens": 1, "messages": messages}).to_string(),
    };
    let steps = |key: &str, path: &str| {
        let before = server.so_far()[0];
        assert_eq!(server.ask_as(key, path, "application/json", &body(path)), 200);
        server.so_far()[0] - before
    };
    for path in ["/v1/chat/completions", "/v1/messages", "/v1/messages/count_tokens", "/tokenize"] {
        let [first, again, other, other_again] = ["one", "one", "two", "two"].map(|key| steps(key, path));
        println!("{path} {first} {again} {other} {other_again}");
        if path == "/v1/chat/completions" {
            assert!(2 * again < first, "{again} steps after {first}");
            assert!(
                other.abs_diff(first) * 20 < first,
                "{other} steps for another tenant, {first} for the first"
            );
            assert!(other_again.abs_diff(again) * 20 < again, "{other_again} and {again}");
        } else {
            // Every route finds what another kept.
            assert!(2 * first < 3 * again, "{path}: {first} and {again}");
        }
    }
}

/// Texts of which everything is kept: what is left is to look it up.
#[test]
fn kept_texts_are_looked_up_in_proportion() {
    #[derive(Default)]
    struct Kept(std::sync::Mutex<std::collections::HashMap<SegmentKey, Arc<[u32]>>>);
    impl TokenCache for Kept {
        fn find(&self, key: &SegmentKey) -> Option<Arc<[u32]>> {
            self.0.lock().unwrap().get(key).cloned()
        }
        fn keep(&self, key: SegmentKey, ids: &[u32]) {
            self.0.lock().unwrap().insert(key, ids.into());
        }
    }
    let (tokenizer, kept) = (common::tokenizer(), Kept::default());
    for text in ["a", "<|end|>", "a<|end|>", "a<|en"] {
        for breaks in [None, Some(4usize)] {
            doubles(&format!("kept: {text:?} {breaks:?}"), 4000, |n| {
                let text = text.repeat(n);
                let breaks: Option<Vec<usize>> = breaks.map(|every| (1..text.len()).step_by(every).collect());
                let encode = || {
                    tokenizer.encode_with(&text, breaks.as_deref(), true, usize::MAX, Some(&kept)).unwrap()
                };
                assert_eq!(encode(), encode());
            });
        }
    }
}
