//! Tenants against tenants, over real sockets on loopback: an attacker at its limits, and a victim that asks as it always does.
//! Compared is the victim's completed work in counted steps with and without the attacker, never time.

#[path = "../common/mod.rs"]
mod common;
mod pairs;

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use common::targets::ROUTES;
use common::{FakeEngine, app};
use folio_server::{Declared, Limits, Listeners, Server, ServerConfig};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio::task::JoinSet;

struct Served {
    address: SocketAddr,
    engine: Arc<FakeEngine>,
    _signals: mpsc::Sender<()>,
}

/// A server with a key for the attacker (`bad`, with these limits) and one for the victim (`good`).
async fn served(limits: Limits, of_attacker: Value) -> Served {
    let engine = FakeEngine::saying("ok");
    let tenants = json!({"tenants": [{"name": "attacker", "keys": ["bad"], "limits": of_attacker},
        {"name": "victim", "keys": ["good"]}]});
    let tenants = Declared::parse(&tenants.to_string(), &|_| None).unwrap();
    let mut app = app(engine.clone());
    app.model.context_length = 1 << 22;
    let server = Server::new(ServerConfig { tenants, limits, ..Default::default() }, app).unwrap();
    let serving = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = serving.local_addr().unwrap();
    let (signals, receiver) = mpsc::channel(4);
    tokio::spawn(server.listen(Listeners { serving, admin: None }, receiver));
    Served { address, engine, _signals: signals }
}

fn head(path: &str, key: &str, length: usize) -> String {
    format!(
        "POST {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\nauthorization: Bearer {key}\r\n\
         content-type: application/json\r\ncontent-length: {length}\r\n\r\n"
    )
}

/// Asks on a connection of its own: the status (0: none came), and the answer.
async fn ask(address: SocketAddr, path: &str, key: &str, body: &str) -> (u16, String) {
    let asked = async {
        let mut socket = TcpStream::connect(address).await?;
        socket.write_all(head(path, key, body.len()).as_bytes()).await?;
        socket.write_all(body.as_bytes()).await?;
        let mut text = String::new();
        socket.read_to_string(&mut text).await?;
        std::io::Result::Ok(text)
    };
    let text = asked.await.unwrap_or_default();
    let status = text.split(' ').nth(1).and_then(|status| status.parse().ok()).unwrap_or(0);
    (status, text)
}

async fn metric(address: SocketAddr, name: &str) -> f64 {
    let mut socket = TcpStream::connect(address).await.unwrap();
    socket.write_all(b"GET /metrics HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").await.unwrap();
    let mut text = String::new();
    socket.read_to_string(&mut text).await.unwrap();
    let line =
        text.lines().find(|line| line.strip_prefix(name).is_some_and(|rest| rest.starts_with(['{', ' '])));
    line.and_then(|line| line.rsplit_once(' '))
        .unwrap_or_else(|| panic!("no {name} in {text}"))
        .1
        .parse()
        .unwrap()
}

const ASKED: &str = r#"{"prompt": "hi", "max_tokens": 4}"#;

/// The victim asks so often, one after the other; all are answered.
async fn victim(address: SocketAddr, times: usize) {
    for _ in 0..times {
        let answered =
            tokio::time::timeout(Duration::from_secs(60), ask(address, "/v1/completions", "good", ASKED));
        let (status, text) = answered.await.expect("the victim is answered");
        assert_eq!(status, 200, "{text}");
    }
}

#[tokio::test]
async fn bodies_that_take_long_to_read_delay_nobody_else() {
    let served = served(Limits { text_threads: 2, ..Limits::default() }, json!({})).await;
    let address = served.address;
    let large = json!({"prompt": "ab ".repeat(300_000), "max_tokens": 1}).to_string();
    let mut attack = JoinSet::new();
    for _ in 0..24 {
        let large = large.clone();
        attack.spawn(async move { ask(address, "/v1/completions", "bad", &large).await.0 });
    }
    // Not so short that it is read on the event loop: it lines up with the others.
    let asked = json!({"prompt": "hi ".repeat(1000), "max_tokens": 4}).to_string();
    for _ in 0..8 {
        assert_eq!(ask(address, "/v1/completions", "good", &asked).await.0, 200);
    }
    let before =
        served.engine.requests.lock().unwrap().iter().filter(|request| request.prompt.len() > 10_000).count();
    assert!(before < 20, "the victim waited for {before} of the attacker's 24 large prompts");
    while attack.join_next().await.is_some() {}
}

#[tokio::test]
async fn what_is_over_its_limit_is_refused_before_it_is_read() {
    let served = served(Limits::default(), json!({"requests_per_minute": 5})).await;
    let address = served.address;
    for path in ROUTES.into_iter().chain(["/v1/files"]) {
        // Its limit is used up by requests that are refused for what is in them.
        for _ in 0..5 {
            ask(address, path, "bad", "{").await;
        }
        // No byte of the body comes, and the answer does.
        let mut socket = TcpStream::connect(address).await.unwrap();
        let head = head(path, "bad", 8 << 20).replace("\r\n\r\n", "\r\nexpect: 100-continue\r\n\r\n");
        socket.write_all(head.as_bytes()).await.unwrap();
        let mut text = vec![0; 64];
        let read =
            tokio::time::timeout(Duration::from_secs(20), socket.read(&mut text)).await.unwrap().unwrap();
        let text = String::from_utf8_lossy(&text[..read]).into_owned();
        assert!(text.starts_with("HTTP/1.1 429"), "{path}: {text}");
    }
    assert_eq!(metric(address, "folio:in_flight_bytes").await, 0.0);
    victim(address, 3).await;
}

#[tokio::test]
async fn bodies_that_never_end_hold_what_came_and_half_of_the_room_at_most() {
    const ROOM: usize = 4 << 20;
    let limits = Limits { in_flight_bytes: ROOM, ..Limits::default() };
    let served = served(limits, json!({})).await;
    let address = served.address;
    let mut open = Vec::new();
    for _ in 0..12 {
        let mut socket = TcpStream::connect(address).await.unwrap();
        socket.write_all(head("/v1/completions", "bad", 8 << 20).as_bytes()).await.unwrap();
        // The server may have refused it already.
        let _ = socket.write_all(&vec![b' '; 1 << 20]).await;
        open.push(socket);
    }
    tokio::time::sleep(Duration::from_millis(200)).await;
    let held = metric(address, "folio:in_flight_bytes").await;
    assert!(held <= (ROOM / 2 + 12 * (64 << 10)) as f64, "{held} of {ROOM}");
    let asked = json!({"prompt": "hi ".repeat(30_000), "max_tokens": 1}).to_string();
    assert_eq!(
        ask(address, "/v1/completions", "good", &asked).await.0,
        200,
        "the other half is there for others"
    );
    drop(open);
    let mut tries = 0;
    while metric(address, "folio:in_flight_bytes").await > 0.0 {
        tries += 1;
        assert!(tries < 1000, "what was held is given back");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

#[tokio::test]
async fn answers_nobody_reads_count_until_they_are_read() {
    let served = served(Limits::default(), json!({"max_concurrent_requests": 2})).await;
    let address = served.address;
    // Finished at once, and more than the socket's buffers take.
    served.engine.plan(|plan| plan.say = vec![b'a'; 60_000]);
    let body = json!({"prompt": "hi", "max_tokens": 70_000, "stream": true, "logprobs": 5}).to_string();
    let mut unread = Vec::new();
    for _ in 0..2 {
        let mut socket = TcpStream::connect(address).await.unwrap();
        let head = head("/v1/completions", "bad", body.len());
        socket.write_all((head + &body).as_bytes()).await.unwrap();
        let mut begin = [0; 16];
        socket.read_exact(&mut begin).await.unwrap();
        unread.push(socket);
    }
    let mut tries = 0;
    while served.engine.live() > 0 {
        tries += 1;
        assert!(tries < 1000);
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let (status, text) = ask(address, "/v1/completions", "bad", ASKED).await;
    assert!(status == 429 && text.contains("running"), "{text}");
    drop(unread.pop());
    let mut tries = 0;
    while ask(address, "/v1/completions", "bad", r#"{"prompt": "hi", "max_tokens": 1}"#).await.0 != 200 {
        tries += 1;
        assert!(tries < 1000, "its client left, and it counts no more");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

#[tokio::test]
async fn a_handler_that_panics_answers_500_and_is_counted() {
    let served = served(Limits::default(), json!({})).await;
    served.engine.plan(|plan| plan.panics = true);
    let (status, text) = ask(served.address, "/v1/completions", "good", ASKED).await;
    assert!(status == 500 && text.contains("server_error"), "{text}");
    served.engine.plan(|plan| plan.panics = false);
    victim(served.address, 1).await;
    assert_eq!(metric(served.address, "folio:panics_total").await, 1.0);
}

/// What is not HTTP/1.1 is closed, and nothing else notices.
#[tokio::test]
async fn other_protocols_and_slow_heads_are_closed() {
    let limits = Limits { header_timeout: Duration::from_millis(300), ..Limits::default() };
    let served = served(limits, json!({})).await;
    let mut h2 = TcpStream::connect(served.address).await.unwrap();
    h2.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n").await.unwrap();
    let mut text = Vec::new();
    let ended = tokio::time::timeout(Duration::from_secs(20), h2.read_to_end(&mut text)).await;
    assert!(ended.is_ok(), "an h2 preface is closed");
    assert!(!text.starts_with(b"\0\0"), "and not answered in h2");
    let mut slow = Vec::new();
    for _ in 0..200 {
        let mut socket = TcpStream::connect(served.address).await.unwrap();
        socket.write_all(b"GET /health HTTP/1.1\r\nx").await.unwrap();
        slow.push(socket);
    }
    victim(served.address, 5).await;
    for mut socket in slow {
        let mut text = Vec::new();
        let ended = tokio::time::timeout(Duration::from_secs(20), socket.read_to_end(&mut text)).await;
        assert!(ended.is_ok(), "a head that does not come is not waited for");
    }
    let many: String = (0..200).map(|at| format!("x{at}: y\r\n")).collect();
    let mut flood = TcpStream::connect(served.address).await.unwrap();
    flood.write_all(format!("GET /health HTTP/1.1\r\nhost: x\r\n{many}\r\n").as_bytes()).await.unwrap();
    let mut text = String::new();
    let _ = flood.read_to_string(&mut text).await;
    assert!(text.starts_with("HTTP/1.1 431"), "{text:?}");
}

/// An address may have any bytes; what it names is refused in the API's shape on every route.
#[tokio::test]
async fn addresses_that_are_no_text_are_refused_in_the_apis_shape() {
    let served = served(Limits::default(), json!({})).await;
    for (method, path) in [
        ("GET", "/v1/responses/%ff"),
        ("DELETE", "/v1/responses/%ff"),
        ("GET", "/v1/responses/%ff/input_items"),
        ("POST", "/v1/responses/%ff/cancel"),
        ("GET", "/v1/cache/prefixes/%ff"),
        ("DELETE", "/v1/cache/prefixes/%ff"),
        ("GET", "/v1/files/%ff"),
        ("DELETE", "/v1/files/%ff"),
        ("GET", "/v1/files/%ff/content"),
        ("GET", "/v1/batches/%ff"),
        ("POST", "/v1/batches/%ff/cancel"),
        ("GET", "/v1/models/%ff"),
    ] {
        let mut socket = TcpStream::connect(served.address).await.unwrap();
        let asked = head(path, "good", 0).replacen("POST", method, 1);
        socket.write_all(asked.as_bytes()).await.unwrap();
        let mut text = String::new();
        socket.read_to_string(&mut text).await.unwrap();
        let (_, body) = text.split_once("\r\n\r\n").unwrap();
        let error: Value = serde_json::from_str(body).unwrap_or_else(|_| panic!("{method} {path}: {text}"));
        assert!(
            text.starts_with("HTTP/1.1 400") && error["error"]["param"] == "id",
            "{method} {path}: {text}"
        );
    }
}

/// The id of a response that was begun on this connection and goes on.
async fn begun(engine: &FakeEngine, socket: &mut TcpStream) -> String {
    while engine.live() == 0 {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    engine.step();
    let mut told = Vec::new();
    loop {
        assert!(socket.read_buf(&mut told).await.unwrap() > 0);
        let text = String::from_utf8_lossy(&told);
        if let Some(at) = text.find("resp_").filter(|at| text.len() > at + 37) {
            return text[at..at + 37].to_owned();
        }
    }
}

/// A connection that answers is never closed to make room, and reading one's own response costs nothing.
#[tokio::test]
async fn whoever_reads_its_own_response_again_and_again_leaves_connections_to_others() {
    const CONNECTIONS: usize = 8;
    let served = served(Limits { connections: CONNECTIONS, ..Limits::default() }, json!({})).await;
    let address = served.address;
    served.engine.plan(|plan| plan.manual = true);
    let body = json!({"input": "hi", "background": true, "stream": true}).to_string();
    let mut first = TcpStream::connect(address).await.unwrap();
    first.write_all((head("/v1/responses", "bad", body.len()) + &body).as_bytes()).await.unwrap();
    let start = begun(&served.engine, &mut first).await;
    drop(first);
    let asked = format!(
        "GET /v1/responses/{start}?stream=true HTTP/1.1\r\nhost: x\r\nauthorization: Bearer bad\r\n\r\n"
    );
    let mut open = Vec::new();
    for _ in 0..CONNECTIONS {
        let mut socket = TcpStream::connect(address).await.unwrap();
        socket.write_all(asked.as_bytes()).await.unwrap();
        let mut begin = [0; 12];
        let read = tokio::time::timeout(Duration::from_secs(20), socket.read_exact(&mut begin)).await;
        read.expect("everybody is answered, or refused").unwrap();
        open.push((socket, String::from_utf8_lossy(&begin).into_owned()));
    }
    let answered = open.iter().filter(|(_, begin)| begin.ends_with("200")).count();
    assert!((1..=CONNECTIONS / 2).contains(&answered), "{answered} of {CONNECTIONS}");
    assert!(open.iter().all(|(_, begin)| begin.ends_with("200") || begin.ends_with("429")), "{open:?}");
    served.engine.plan(|plan| plan.manual = false);
    victim(address, 5).await;
}

/// Whoever has no key asks for what needs none, again and again on each connection, and reads nothing of it; or guesses keys.
#[tokio::test]
async fn strangers_who_do_not_read_leave_connections_and_memory_to_others() {
    const CONNECTIONS: usize = 8;
    const ROOM: usize = 16 << 20;
    let limits = Limits { connections: CONNECTIONS, in_flight_bytes: ROOM, ..Limits::default() };
    let served = served(limits, json!({})).await;
    let address = served.address;
    let asked = [
        "GET /openapi.json HTTP/1.1\r\nhost: x\r\n\r\n".repeat(2000),
        "GET /v1/models HTTP/1.1\r\nhost: x\r\nauthorization: Bearer guess\r\n\r\n".repeat(2000),
    ];
    let mut open = Vec::new();
    for round in 0..4 {
        for at in 0..CONNECTIONS {
            let mut socket = TcpStream::connect(address).await.unwrap();
            // As much of it as is taken; it may be closed already.
            let asks = socket.write_all(asked[at % 2].as_bytes());
            let _ = tokio::time::timeout(Duration::from_millis(50), asks).await;
            open.push(socket);
        }
        victim(address, 3).await;
        let held = metric(address, "folio:in_flight_bytes").await;
        assert!(held <= (ROOM / 2 + (CONNECTIONS << 16)) as f64, "round {round}: {held} of {ROOM}");
    }
}

/// Limits on how much runs at once hold for requests without a body, too.
#[tokio::test]
async fn requests_without_a_body_have_as_many_places_as_those_with_one() {
    let served = served(Limits::default(), json!({"max_concurrent_requests": 2})).await;
    let address = served.address;
    served.engine.plan(|plan| plan.manual = true);
    let body = json!({"input": "hi", "background": true, "stream": true}).to_string();
    let mut first = TcpStream::connect(address).await.unwrap();
    first.write_all((head("/v1/responses", "bad", body.len()) + &body).as_bytes()).await.unwrap();
    let path = format!("/v1/responses/{}?stream=true", begun(&served.engine, &mut first).await);
    let (one, two, three) =
        (begin(address, &path).await, begin(address, &path).await, begin(address, &path).await);
    assert!(one.1.ends_with("200") && two.1.ends_with("200") && three.1.ends_with("429"), "{three:?}");
}

/// The attacker asks for what is kept, and reads the status alone.
async fn begin(address: SocketAddr, path: &str) -> (TcpStream, String) {
    let mut socket = TcpStream::connect(address).await.unwrap();
    let asked = format!("GET {path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer bad\r\n\r\n");
    socket.write_all(asked.as_bytes()).await.unwrap();
    let mut begin = [0; 12];
    socket.read_exact(&mut begin).await.unwrap();
    (socket, String::from_utf8_lossy(&begin).into_owned())
}

/// Two hundred bytes go on from as much as was kept before: that is what a turn costs.
#[tokio::test]
async fn short_requests_for_long_conversations_delay_nobody_else() {
    let served = served(Limits { text_threads: 2, ..Limits::default() }, json!({})).await;
    let address = served.address;
    let long = json!({"input": "ab ".repeat(300_000), "max_output_tokens": 1}).to_string();
    let (status, text) = ask(address, "/v1/responses", "bad", &long).await;
    assert_eq!(status, 200);
    let at = text.find("resp_").unwrap();
    let short =
        json!({"input": "on", "previous_response_id": text[at..at + 37], "max_output_tokens": 1}).to_string();
    let mut attack = JoinSet::new();
    for _ in 0..24 {
        let short = short.clone();
        attack.spawn(async move { ask(address, "/v1/responses", "bad", &short).await.0 });
    }
    let asked = json!({"prompt": "hi ".repeat(1000), "max_tokens": 4}).to_string();
    for _ in 0..8 {
        assert_eq!(ask(address, "/v1/completions", "good", &asked).await.0, 200);
    }
    let large = |requests: &[folio_engine::Request]| {
        requests.iter().filter(|request| request.prompt.len() > 10_000).count()
    };
    let before = large(&served.engine.requests.lock().unwrap()).saturating_sub(1);
    assert!(before < 20, "the victim waited for {before} of the attacker's 24 conversations");
    while let Some(status) = attack.join_next().await {
        assert_eq!(status.unwrap(), 200);
    }
}

/// What is kept once may be asked for by as many as there are connections, and each is told all of it.
#[tokio::test]
async fn what_is_kept_is_told_to_those_who_do_not_read_it_within_half_of_the_room() {
    const ROOM: usize = 40 << 20;
    let served = served(Limits { in_flight_bytes: ROOM, ..Limits::default() }, json!({})).await;
    let address = served.address;
    // More than sockets take, and six times as long as it is in tokens.
    let long = json!({"input": "\u{1}".repeat(1_200_000), "max_output_tokens": 1}).to_string();
    let (status, text) = ask(address, "/v1/responses", "bad", &long).await;
    assert_eq!(status, 200);
    let at = text.find("resp_").unwrap();
    let id = text[at..at + 37].to_owned();
    let path = format!("/v1/responses/{id}/input_items");
    let mut open = Vec::new();
    for _ in 0..8 {
        open.push(begin(address, &path).await);
    }
    let answered = open.iter().filter(|(_, begin)| begin.ends_with("200")).count();
    assert!((1..=2).contains(&answered), "{answered} answers of 7 MB in a room of {ROOM}");
    assert!(open.iter().all(|(_, begin)| begin.ends_with("200") || begin.ends_with("429")), "{open:?}");
    let held = metric(address, "folio:in_flight_bytes").await;
    assert!(held > (answered * 7_200_000) as f64 && held <= (ROOM / 2) as f64, "{held} of {ROOM}");
    victim(address, 3).await;
    drop(open);
    let mut tries = 0;
    while metric(address, "folio:in_flight_bytes").await > 0.0 {
        tries += 1;
        assert!(tries < 1000, "what was held is given back");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    assert!(begin(address, &path).await.1.ends_with("200"));
}

/// An item that is kept once may be named four thousand times.
#[tokio::test]
async fn what_a_request_names_of_what_is_kept_is_bounded() {
    let served = served(Limits { body_bytes: 1 << 20, ..Limits::default() }, json!({})).await;
    let address = served.address;
    let long = json!({"input": "ab ".repeat(100_000), "max_output_tokens": 1}).to_string();
    let (status, text) = ask(address, "/v1/responses", "bad", &long).await;
    assert_eq!(status, 200);
    let at = text.find("resp_").unwrap();
    let item = format!("in_{}_0", &text[at + 5..at + 37]);
    let named = |times: usize| {
        let items = vec![json!({"type": "item_reference", "id": item}); times];
        json!({"input": items, "max_output_tokens": 1}).to_string()
    };
    let (status, text) = ask(address, "/v1/responses", "bad", &named(4000)).await;
    assert!(status == 400 && text.contains("refers to"), "{text}");
    let (status, text) = ask(address, "/v1/responses", "bad", &named(2)).await;
    assert_eq!(status, 200, "{text}");
    assert_eq!(metric(address, "folio:in_flight_bytes").await, 0.0);
}
