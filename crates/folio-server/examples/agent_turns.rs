//! What the server does between a request's bytes and the engine, for an agent's session that grows turn by turn.
//!
//!     cargo run --release -p folio-server --example agent_turns -- [--turns 100] [--sessions 3] [--out results.json --name NAME]
//!
//! Each turn is a request to `/v1/messages` with the whole conversation so far, tools, and four cache breakpoints, put to the real router
//! without a socket. It is timed until the engine is given the token ids; what the engine's handle does then (hashing the prompt's blocks)
//! is timed apart. The vocabulary is Qwen2's and the template Qwen3's, from the test data (`FOLIO_TEST_DATA`); what the agent reads are
//! sources of this repository. The steps within are the server's own spans.

#[path = "../tests/common/mod.rs"]
mod common;

use std::collections::BTreeMap;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use axum::body::Body;
use common::{FakeEngine, Submitting};
use folio_engine::{Drafter, EventSink, Request};
use folio_model::checkpoint::gguf::{Metadata, read_header};
use folio_server::{App, Engine, Server, ServerConfig};
use folio_text::{ChatTemplate, TemplateSources, Tokenizer};
use serde_json::{Value, json};
use tower::ServiceExt;
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Metadata as SpanMetadata, Subscriber};

struct Given {
    at: Instant,
    tokens: usize,
    hashing_ms: f64,
}

/// An engine that notes when it was given what.
fn noting(given: Arc<Mutex<Option<Given>>>) -> impl Engine {
    let submit = move |engine: &FakeEngine, request: Request, sink: Box<dyn EventSink>| {
        let (at, tokens) = (Instant::now(), request.prompt.len());
        let (request, _) = request.hashed(16);
        let hashing_ms = ms(at);
        *given.lock().expect("no panic") = Some(Given { at, tokens, hashing_ms });
        let hashes = engine.hashes(&request.root, &request.prompt);
        let flag = engine.submit(request, hashes, sink);
        engine.requests.lock().expect("no panic").clear();
        flag
    };
    Submitting { engine: FakeEngine::default(), submit }
}

fn ms(since: Instant) -> f64 {
    since.elapsed().as_secs_f64() * 1000.0
}

/// Adds up the time inside each span, less that inside spans within it. One request is worked on at a time.
#[derive(Clone, Default)]
struct Spans(Arc<Mutex<Inner>>);

#[derive(Default)]
struct Inner {
    names: Vec<&'static str>,
    /// Entered: which, when, and the time of spans within.
    open: Vec<(u64, Instant, f64)>,
    /// By name: times entered, and milliseconds.
    sums: BTreeMap<&'static str, (u32, f64)>,
}

impl Subscriber for Spans {
    fn enabled(&self, metadata: &SpanMetadata<'_>) -> bool {
        metadata.is_span() && metadata.target() == "folio_server::prepare"
    }

    fn new_span(&self, span: &Attributes<'_>) -> Id {
        let mut inner = self.0.lock().expect("no panic");
        inner.names.push(span.metadata().name());
        Id::from_u64(inner.names.len() as u64)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, _: &Event<'_>) {}

    fn enter(&self, id: &Id) {
        self.0.lock().expect("no panic").open.push((id.into_u64(), Instant::now(), 0.0));
    }

    fn exit(&self, id: &Id) {
        let mut inner = self.0.lock().expect("no panic");
        let Some((entered, at, within)) = inner.open.pop() else { return };
        assert_eq!(entered, id.into_u64(), "spans are left in order");
        let took = ms(at);
        if let Some((_, _, outer)) = inner.open.last_mut() {
            *outer += took;
        }
        let name = inner.names[entered as usize - 1];
        let sum = inner.sums.entry(name).or_default();
        *sum = (sum.0 + 1, sum.1 + took - within);
    }
}

impl Spans {
    /// Since the last time.
    fn take(&self) -> BTreeMap<&'static str, (u32, f64)> {
        let mut inner = self.0.lock().expect("no panic");
        inner.names.clear();
        std::mem::take(&mut inner.sums)
    }
}

/// What an agent says and is told, of a length in tokens that agents have.
struct Session {
    texts: Vec<String>,
    messages: Vec<Value>,
}

impl Session {
    fn new(texts: &[String]) -> Self {
        Self {
            texts: texts.to_vec(),
            messages: vec![json!({"role": "user", "content": "Find out why the test fails, and mend it."})],
        }
    }

    fn part(&self, index: usize, bytes: usize) -> &str {
        let text = &self.texts[index % self.texts.len()];
        let from = text.floor_char_boundary((index * 997) % text.len().saturating_sub(bytes).max(1));
        &text[from..text.floor_char_boundary((from + bytes).min(text.len()))]
    }

    /// The next request, after the answer and the tool's result before it.
    fn turn(&mut self, turn: usize) -> Vec<u8> {
        if turn > 0 {
            let id = format!("toolu_{turn:08}");
            let input = json!({"path": format!("src/part_{turn}.rs"), "offset": turn, "limit": 80});
            self.messages.push(json!({"role": "assistant", "content": [
                {"type": "text", "text": format!("I look at part {turn}. {}", self.part(turn * 3, 400))},
                {"type": "tool_use", "id": id, "name": "tool_3", "input": input}]}));
            let result = self.part(turn * 7 + 1, 2900).to_owned();
            self.messages.push(json!({"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": id, "content": [{"type": "text", "text": result}]}]}));
        }
        let tools: Vec<Value> = (0..18).map(|at| self.tool(at)).collect();
        let mut messages = self.messages.clone();
        // The last two of the user, as agents mark them.
        for message in messages.iter_mut().rev().step_by(2).take(2) {
            if let Some(block) = message["content"].as_array_mut().and_then(|blocks| blocks.last_mut()) {
                block["cache_control"] = json!({"type": "ephemeral"});
            }
        }
        let system = json!([{"type": "text", "text": "You are an agent at a command line."},
            {"type": "text", "text": self.part(5, 30_000), "cache_control": {"type": "ephemeral"}}]);
        let body = json!({"model": "test-model", "max_tokens": 1000, "stream": true, "system": system, "tools": tools,
            "messages": messages});
        body.to_string().into_bytes()
    }

    fn tool(&self, at: usize) -> Value {
        let property = |name: &str| json!({"type": "string", "description": format!("{name}: {}", self.part(at + name.len(), 120))});
        let mut tool = json!({"name": format!("tool_{at}"), "description": self.part(at, 1200),
            "input_schema": {"type": "object", "properties": {"path": property("path"), "offset": {"type": "integer"},
                "limit": {"type": "integer"}, "why": property("why")}, "required": ["path"]}});
        if at == 17 {
            tool["cache_control"] = json!({"type": "ephemeral"});
        }
        tool
    }
}

fn data() -> PathBuf {
    let root = std::env::var_os("FOLIO_TEST_DATA").map(PathBuf::from);
    root.unwrap_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared/data"))
}

fn tokenizer() -> Tokenizer {
    let path = data().join("tok-ggml-vocab/ggml-vocab-qwen2.gguf.gz");
    let mut bytes = Vec::new();
    let file = std::fs::File::open(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    flate2::read::GzDecoder::new(file).read_to_end(&mut bytes).expect("gzip");
    let header = read_header(&bytes).expect("a vocabulary");
    Tokenizer::from_gguf(Metadata::new("qwen2", &bytes, &header)).expect("a known kind")
}

fn app(engine: Arc<dyn Engine>) -> App {
    let tokenizer = tokenizer();
    let source =
        std::fs::read_to_string(data().join("templates-llamacpp/Qwen-Qwen3-0.6B.jinja")).expect("a template");
    let mut sources = TemplateSources::default();
    sources.add("default", &source, "test data");
    let template =
        ChatTemplate::compile(sources, tokenizer.special_tokens()).expect("compiles").expect("one");
    let mut app = common::tool_app(engine, 1 << 18);
    app.model.vocab_size = tokenizer.vocab_size() as u32;
    (app.tokenizer, app.template) = (Arc::new(tokenizer), Some(Arc::new(template)));
    app
}

fn resident_mib() -> f64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let kib = line.and_then(|line| line.split_whitespace().next()?.parse::<f64>().ok());
    kib.unwrap_or(0.0) / 1024.0
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(0.0)
}

fn sources() -> Vec<String> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../folio-text/src");
    let mut paths: Vec<PathBuf> =
        std::fs::read_dir(folder).expect("sources").map(|entry| entry.expect("a file").path()).collect();
    paths.sort();
    let texts = paths.iter().filter_map(|path| std::fs::read_to_string(path).ok());
    let texts: Vec<String> = texts.filter(|text| text.len() > 3000).collect();
    std::iter::once(texts.concat()).chain(texts.iter().cloned()).collect()
}

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let option =
        |name: &str| arguments.iter().position(|a| a == name).and_then(|at| arguments.get(at + 1)).cloned();
    let number = |name: &str, or: usize| option(name).map_or(or, |text| text.parse().expect("a number"));
    let (turns, sessions) = (number("--turns", 100), number("--sessions", 3));
    let spans = Spans::default();
    tracing::subscriber::set_global_default(spans.clone()).expect("the first");
    let submitted = Arc::default();
    let engine = Arc::new(noting(Arc::clone(&submitted)));
    let config = ServerConfig { speculate: Some(Drafter::default()), ..ServerConfig::default() };
    let router = Server::new(config, app(engine)).expect("a server").router();
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    let texts = sources();
    let mut results = Vec::new();
    for session in 0..sessions {
        // Another session reads other files.
        let mut talk = Session::new(&texts[session % texts.len()..]);
        let mut rows = Vec::new();
        for turn in 0..turns {
            let body = talk.turn(turn);
            let bytes = body.len();
            let request = axum::http::Request::builder().method("POST").uri("/v1/messages");
            let request =
                request.header("content-type", "application/json").body(Body::from(body)).expect("a request");
            let router = router.clone();
            let (began, status) = runtime.block_on(async move {
                let began = Instant::now();
                let response = router.oneshot(request).await.expect("an answer");
                let status = response.status().as_u16();
                axum::body::to_bytes(response.into_body(), usize::MAX).await.expect("a body");
                (began, status)
            });
            assert_eq!(status, 200);
            let given = submitted.lock().expect("no panic").take().expect("the engine was given it");
            let total = (given.at - began).as_secs_f64() * 1000.0;
            let steps: BTreeMap<&str, Value> = spans
                .take()
                .into_iter()
                .map(|(name, (times, ms))| (name, json!({"times": times, "ms": ms})))
                .collect();
            rows.push(json!({"turn": turn, "body_bytes": bytes, "tokens": given.tokens, "ms": total,
                "hashing_ms": given.hashing_ms, "steps": steps, "resident_mib": resident_mib()}));
        }
        print(session, &rows);
        results.push(rows);
    }
    if let Some(path) = option("--out") {
        let cpu = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let cpu = cpu.lines().find_map(|line| line.strip_prefix("model name")).unwrap_or_default();
        let all = json!({"kind": "agent-turns", "shape": option("--name"), "cpu": cpu.trim_start_matches([' ', '\t', ':']),
            "turns": turns, "sessions": results});
        std::fs::write(path, serde_json::to_string(&all).expect("plain data") + "\n")
            .expect("the results are written");
    }
}

fn print(session: usize, rows: &[Value]) {
    let of = |field: &str| median(rows.iter().filter_map(|row| row[field].as_f64()).collect());
    let last = &rows[rows.len() - 1];
    println!(
        "session {session}: {} turns, median {:.0} tokens (last {}), {:.2} ms a turn (first {:.2}, last {:.2}), hashing {:.2} ms, {:.0} MiB resident",
        rows.len(),
        of("tokens"),
        last["tokens"],
        of("ms"),
        rows[0]["ms"].as_f64().unwrap_or(0.0),
        last["ms"].as_f64().unwrap_or(0.0),
        of("hashing_ms"),
        last["resident_mib"].as_f64().unwrap_or(0.0),
    );
    let names: std::collections::BTreeSet<&String> =
        rows.iter().filter_map(|row| row["steps"].as_object()).flat_map(|steps| steps.keys()).collect();
    for name in names {
        let of = |field: &str| {
            median(rows.iter().map(|row| row["steps"][name][field].as_f64().unwrap_or(0.0)).collect())
        };
        println!("    {name:12} {:.0} times, {:.2} ms", of("times"), of("ms"));
    }
}
