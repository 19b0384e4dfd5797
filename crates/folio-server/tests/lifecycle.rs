//! Over real sockets: draining, stopping, connections, and clients that hang up.

mod common;

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use common::{FakeEngine, app};
use folio_engine::handle::Rejected;
use folio_server::{Limits, Listeners, Server, ServerConfig};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

struct Running {
    address: SocketAddr,
    signals: mpsc::Sender<()>,
    /// What is left of the time for draining.
    server: JoinHandle<Duration>,
    engine: Arc<FakeEngine>,
}

/// A served engine whose steps the test makes.
async fn start(config: ServerConfig) -> Running {
    let engine = FakeEngine::saying("abc");
    engine.plan(|plan| plan.manual = true);
    let server = Server::new(config, app(engine.clone())).unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let (signals, receiver) = mpsc::channel(4);
    let server = tokio::spawn(server.listen(Listeners { serving: listener, admin: None }, receiver));
    Running { address, signals, server, engine }
}

const CHAT: &str = r#"{"stream": true, "messages": [{"role": "user", "content": "hi"}]}"#;

impl Running {
    async fn open(&self, method: &str, path: &str, body: &str) -> TcpStream {
        let mut socket = TcpStream::connect(self.address).await.unwrap();
        let request = format!(
            "{method} {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json\r\n\
             content-length: {}\r\n\r\n{body}",
            body.len()
        );
        socket.write_all(request.as_bytes()).await.unwrap();
        socket
    }

    async fn ask(&self, method: &str, path: &str, body: &str) -> String {
        rest(&mut self.open(method, path, body).await).await
    }

    /// Whether an answer of this route began.
    fn served(&self, metrics: &str, route: &str) -> bool {
        metrics.lines().any(|line| line.starts_with("http_requests_total") && line.contains(route))
    }

    async fn live(&self, count: usize) {
        until(|| self.engine.live() == count).await;
    }
}

async fn rest(socket: &mut TcpStream) -> String {
    let mut text = String::new();
    socket.read_to_string(&mut text).await.unwrap();
    text
}

async fn until(mut condition: impl FnMut() -> bool) {
    while !condition() {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

#[tokio::test]
async fn a_signal_drains_and_running_requests_finish() {
    let running = start(ServerConfig::default()).await;
    let mut streaming = running.open("POST", "/v1/chat/completions", CHAT).await;
    running.live(1).await;
    running.engine.step();
    running.signals.send(()).await.unwrap();
    until(|| *running.engine.phase.lock().unwrap() == "draining").await;

    let refused = running.ask("POST", "/v1/chat/completions", CHAT).await;
    assert!(refused.starts_with("HTTP/1.1 503") && refused.contains("retry-after: 5"), "{refused}");
    assert!(running.ask("GET", "/health", "").await.starts_with("HTTP/1.1 503"));
    assert!(running.ask("GET", "/metrics", "").await.starts_with("HTTP/1.1 200"));
    assert!(!running.server.is_finished(), "one request still runs");

    while running.engine.live() > 0 {
        running.engine.step();
    }
    let text = rest(&mut streaming).await;
    for piece in ["\"a\"", "\"b\"", "\"c\"", "[DONE]"] {
        assert!(text.contains(piece), "{piece} is missing in {text}");
    }
    let left = running.server.await.unwrap();
    assert!(
        Duration::ZERO < left && left < ServerConfig::default().drain_timeout,
        "of one patience: {left:?}"
    );
    assert_eq!(*running.engine.phase.lock().unwrap(), "stopped");
    assert!(TcpStream::connect(running.address).await.is_err());
}

#[test]
fn several_threads_of_the_event_loop_serve_all_and_drain() {
    const AT_ONCE: usize = 48;
    for threads in [2, 4] {
        let mut runtime = tokio::runtime::Builder::new_multi_thread();
        runtime.worker_threads(threads).enable_all().build().unwrap().block_on(async {
            let running = Arc::new(start(ServerConfig::default()).await);
            running.engine.plan(|plan| plan.manual = false);
            let ask = |at: usize| {
                let running = running.clone();
                tokio::spawn(async move {
                    let body = format!(
                        r#"{{"stream": {}, "messages": [{{"role": "user", "content": "hi {at}"}}]}}"#,
                        at.is_multiple_of(2)
                    );
                    running.ask("POST", "/v1/chat/completions", &body).await
                })
            };
            let asked: Vec<_> = (0..AT_ONCE).map(ask).collect();
            for (at, answer) in asked.into_iter().enumerate() {
                let answer = answer.await.unwrap();
                let end = if at.is_multiple_of(2) { "[DONE]" } else { "\"abc\"" };
                assert!(answer.starts_with("HTTP/1.1 200") && answer.contains(end), "{answer}");
            }
            let metrics = running.ask("GET", "/metrics", "").await;
            let counted: f64 = metrics
                .lines()
                .filter(|line| {
                    line.starts_with("http_requests_total") && line.contains("/v1/chat/completions")
                })
                .filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok())
                .sum();
            assert_eq!(counted, AT_ONCE as f64, "{metrics}");
            assert!(metrics.contains("folio:event_loop_lag_seconds_count"), "{metrics}");
            running.signals.send(()).await.unwrap();
            let running = Arc::into_inner(running).expect("nobody asks any more");
            running.server.await.unwrap();
        });
    }
}

/// What a socket brings until it has brought `wanted`.
async fn read_until(socket: &mut TcpStream, wanted: &str) -> String {
    let (mut bytes, mut part) = (Vec::new(), [0; 1024]);
    loop {
        let text = String::from_utf8_lossy(&bytes).into_owned();
        if text.contains(wanted) {
            return text;
        }
        let read = socket.read(&mut part).await.unwrap();
        assert!(read > 0, "no {wanted} in {text}");
        bytes.extend_from_slice(&part[..read]);
    }
}

/// A refusal by the engine is a status; what it took is answered at once, before it was looked up; the figures come with the look-up, and in
/// the end are those that are counted.
#[tokio::test]
async fn a_message_stream_opens_when_it_is_taken_and_starts_when_it_was_looked_up() {
    let running = start(ServerConfig::default()).await;
    let message = r#"{"stream": true, "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}"#;
    let full = Rejected::QueueFull { queued_requests: 1, queued_tokens: 9, retry_after_s: 3 };
    running.engine.plan(|plan| plan.reject = Some(full));
    let refused = running.ask("POST", "/v1/messages", message).await;
    assert!(refused.starts_with("HTTP/1.1 429") && refused.contains("retry-after: 3"), "{refused}");

    let mut socket = running.open("POST", "/v1/messages", message).await;
    running.live(1).await;
    let mut text = read_until(&mut socket, "event: ping").await;
    assert!(text.starts_with("HTTP/1.1 200") && !text.contains("message_start"), "{text}");
    running.engine.plan(|plan| plan.cached = 5);
    while running.engine.live() > 0 {
        running.engine.step();
    }
    text.push_str(&rest(&mut socket).await);

    let events = text.lines().filter_map(|line| serde_json::from_str(line.strip_prefix("data: ")?).ok());
    let events: Vec<serde_json::Value> = events.collect();
    let usage = |kind: &str| {
        let event = events.iter().find(|event| event["type"] == kind);
        let event = event.unwrap_or_else(|| panic!("no {kind} in {text}"));
        if kind == "message_start" { event["message"]["usage"].clone() } else { event["usage"].clone() }
    };
    let (started, billed) = (usage("message_start"), usage("message_delta"));
    let prompt = running.engine.last().prompt.len() as u64;
    for usage in [&started, &billed] {
        assert_eq!(usage["cache_read_input_tokens"], 5);
        assert_eq!(usage["input_tokens"], prompt - 5);
    }
    assert_eq!(started["output_tokens"], 0);
    let metrics = running.ask("GET", "/metrics", "").await;
    let counted = |name: &str| {
        let line = metrics.lines().find(|line| line.starts_with(name)).expect("a metric");
        line.rsplit_once(' ').expect("a value").1.parse::<u64>().expect("a number")
    };
    assert_eq!(billed["output_tokens"], counted("vllm:generation_tokens_total"));
    assert!(counted("vllm:generation_tokens_total") >= 3, "as many as were said");
    assert_eq!(counted("vllm:prompt_tokens_total"), prompt);
    assert_eq!(counted("vllm:prompt_tokens_cached_total"), 5);
}

#[tokio::test]
async fn a_second_signal_stops_at_once() {
    let running = start(ServerConfig::default()).await;
    let messages = r#""messages": [{"role": "user", "content": "hi"}]"#;
    let streams = [
        ("/v1/chat/completions", format!(r#"{{"stream": true, {messages}}}"#)),
        ("/v1/completions", r#"{"stream": true, "prompt": "hi"}"#.to_owned()),
        ("/v1/messages", format!(r#"{{"stream": true, "max_tokens": 9, {messages}}}"#)),
        ("/v1/responses", r#"{"stream": true, "input": "hi"}"#.to_owned()),
        ("/v1/responses", r#"{"stream": true, "background": true, "input": "hi"}"#.to_owned()),
        ("/api/chat", format!("{{{messages}}}")),
        ("/api/generate", r#"{"prompt": "hi"}"#.to_owned()),
    ];
    let mut streaming = Vec::new();
    for (path, body) in &streams {
        streaming.push(running.open("POST", path, body).await);
    }
    let whole = r#"{"messages": [{"role": "user", "content": "hi"}]}"#;
    let mut waiting = running.open("POST", "/v1/chat/completions", whole).await;
    running.live(streams.len() + 1).await;
    running.signals.send(()).await.unwrap();
    running.signals.send(()).await.unwrap();
    assert_eq!(running.server.await.unwrap(), Duration::ZERO, "nothing is left");
    assert_eq!(*running.engine.phase.lock().unwrap(), "stopped");
    for socket in &mut streaming {
        assert_told(&rest(socket).await);
    }
    let answer = rest(&mut waiting).await;
    assert!(answer.starts_with("HTTP/1.1 503") && answer.contains("shutting down"), "{answer}");
}

#[tokio::test]
async fn a_drain_ends_even_if_a_request_does_not() {
    let config = ServerConfig { drain_timeout: Duration::from_millis(10), ..Default::default() };
    let running = start(config).await;
    let mut streaming = running.open("POST", "/v1/chat/completions", CHAT).await;
    running.live(1).await;
    assert!(running.ask("GET", "/readyz", "").await.starts_with("HTTP/1.1 200"));
    running.signals.send(()).await.unwrap();
    assert_eq!(running.server.await.unwrap(), Duration::ZERO, "nothing is left");
    assert_told(&rest(&mut streaming).await);
}

/// The stream says why it ends, and ends as one.
fn assert_told(stream: &str) {
    assert!(stream.contains("\"error\":") && stream.contains("shutting down"), "{stream}");
    assert!(stream.ends_with("0\r\n\r\n"), "{stream}");
}

#[tokio::test]
async fn a_draining_server_is_alive_and_not_ready() {
    let running = start(ServerConfig::default()).await;
    let _streaming = running.open("POST", "/v1/chat/completions", CHAT).await;
    running.live(1).await;
    running.signals.send(()).await.unwrap();
    until(|| *running.engine.phase.lock().unwrap() == "draining").await;
    assert!(running.ask("GET", "/livez", "").await.starts_with("HTTP/1.1 200"));
    for path in ["/readyz", "/health"] {
        assert!(running.ask("GET", path, "").await.starts_with("HTTP/1.1 503"), "{path}");
    }
    running.signals.send(()).await.unwrap();
    running.server.await.unwrap();
}

#[tokio::test]
async fn an_idle_server_ends_at_once_with_open_connections() {
    let running = start(ServerConfig::default()).await;
    let mut idle = TcpStream::connect(running.address).await.unwrap();
    idle.write_all(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n").await.unwrap();
    let mut buffer = [0; 12];
    idle.read_exact(&mut buffer).await.unwrap();
    running.signals.send(()).await.unwrap();
    running.server.await.unwrap();
    rest(&mut idle).await;
}

#[tokio::test]
async fn a_closed_socket_cancels_streamed_or_not() {
    let running = start(ServerConfig::default()).await;
    for body in [CHAT.to_owned(), CHAT.replace("true", "false")] {
        let socket = running.open("POST", "/v1/chat/completions", &body).await;
        running.live(1).await;
        running.engine.step();
        drop(socket);
        // The kernel tells the server, which cancels; the next step after that frees.
        until(|| {
            running.engine.cancelled() && {
                running.engine.step();
                running.engine.live() == 0
            }
        })
        .await;
    }
}

#[tokio::test]
async fn slow_heads_are_cut() {
    let limits = Limits { header_timeout: Duration::from_millis(50), ..Limits::default() };
    let running = start(ServerConfig { limits, ..Default::default() }).await;
    let mut slow = TcpStream::connect(running.address).await.unwrap();
    slow.write_all(b"GET /health HTTP/1.1\r\nhost").await.unwrap();
    // What the slow one got, if anything, is no answer to its request.
    let mut text = Vec::new();
    let _ = slow.read_to_end(&mut text).await;
    assert!(!String::from_utf8_lossy(&text).contains("200 OK"));
}

#[tokio::test]
async fn idle_connections_lock_nobody_out_and_busy_ones_are_never_closed() {
    let limits = Limits { connections: 3, ..Limits::default() };
    let running = start(ServerConfig { limits, ..Default::default() }).await;
    let mut busy = running.open("POST", "/v1/chat/completions", CHAT).await;
    running.live(1).await;
    let mut idle = Vec::new();
    for _ in 0..20 {
        let mut socket = TcpStream::connect(running.address).await.unwrap();
        // Some say half a request, some had an answer and stay.
        match idle.len() % 3 {
            0 => socket.write_all(b"GET /hea").await.unwrap(),
            1 => socket.write_all(b"GET /ping HTTP/1.1\r\nhost: x\r\n\r\n").await.unwrap(),
            _ => {}
        }
        idle.push(socket);
        assert!(running.ask("GET", "/version", "").await.starts_with("HTTP/1.1 200"));
    }
    assert_eq!(running.engine.live(), 1, "it was not cancelled");
    while running.engine.live() > 0 {
        running.engine.step();
        tokio::task::yield_now().await;
    }
    let text = rest(&mut busy).await;
    assert!(text.contains("[DONE]"), "{text}");
    let mut first = Vec::new();
    let _ = idle[0].read_to_end(&mut first).await;
    assert!(first.is_empty(), "the one idle for longest went");
}

#[tokio::test]
async fn a_client_that_never_reads_is_cut_off() {
    let limits = Limits { write_timeout: Duration::from_millis(100), ..Limits::default() };
    let running = start(ServerConfig { limits, ..Default::default() }).await;
    // The answer is far longer than what the system holds of it.
    let body = format!(r#"{{"prompt": "{}"}}"#, "x".repeat(4 << 20));
    let mut stuck = running.open("POST", "/tokenize", &body).await;
    loop {
        let page = running.ask("GET", "/metrics", "").await;
        let open = page.lines().find(|line| line.starts_with("folio:connections{"));
        let open: f64 = open.unwrap_or_else(|| panic!("{page}")).rsplit(' ').next().unwrap().parse().unwrap();
        // The one that asks.
        if open == 1.0 && running.served(&page, "/tokenize") {
            break;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let mut text = Vec::new();
    let _ = stuck.read_to_end(&mut text).await;
    assert!(text.len() < 12 << 20, "{} bytes", text.len());
}

#[tokio::test]
async fn floods_of_headers_are_refused() {
    let running = start(ServerConfig::default()).await;
    for flood in [
        format!("GET /version HTTP/1.1\r\nhost: x\r\nx: {}\r\n\r\n", "y".repeat(1 << 20)),
        format!("GET /version HTTP/1.1\r\nhost: x\r\n{}\r\n", "x: y\r\n".repeat(100_000)),
        format!("GET /{} HTTP/1.1\r\nhost: x\r\n\r\n", "y".repeat(1 << 20)),
    ] {
        let mut socket = TcpStream::connect(running.address).await.unwrap();
        // What is too much is let pass, so that its sender reads the answer.
        socket.write_all(flood.as_bytes()).await.unwrap();
        let mut text = Vec::new();
        let _ = socket.read_to_end(&mut text).await;
        let text = String::from_utf8_lossy(&text);
        assert!(text.starts_with("HTTP/1.1 431") || text.starts_with("HTTP/1.1 414"), "{text:?}");
    }
    assert!(running.ask("GET", "/version", "").await.starts_with("HTTP/1.1 200"));
}

#[tokio::test]
async fn a_body_that_does_not_arrive_is_given_up() {
    let limits = Limits { body_timeout: Duration::from_millis(20), ..Limits::default() };
    let running = start(ServerConfig { limits, ..Default::default() }).await;
    let mut socket = TcpStream::connect(running.address).await.unwrap();
    socket
        .write_all(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 10\r\n\r\n{")
        .await
        .unwrap();
    let mut status = [0; 12];
    socket.read_exact(&mut status).await.unwrap();
    assert_eq!(&status, b"HTTP/1.1 408");
}
