//! A victim that asks as it always does, alone and beside an attacker that has as much under way as its key may have. Compared are
//! steps: all that the event loop does from one of the victim's requests to its answer, whoever it does it for. Server, attacker and victim
//! are tasks of one thread, so what they wait for each other is all there, and no clock is looked at.
//!
//! What text threads do for the attacker is not among the steps: it holds up who lines up with it, which the tests beside this file count
//! in prompts.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use folio_server::Limits;
use folio_text::work;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::task::JoinSet;

use super::{ASKED, Served, ask, served};

/// Of the attacker: requests at once, by its key's limit, and connections that send them, of which some are refused.
const AT_ONCE: usize = 12;
const CONNECTIONS: usize = 16;
/// Of the victim, one after the other.
const REQUESTS: usize = 24;
/// Beyond what its requests take alone: at the median, and at worst. A piece of work on the event loop is 160 Ki steps at most (`polls`),
/// of a long answer or body 20 Ki, and a request waits for a few of its turns.
const MEDIAN_MAX: u64 = 128 << 10;
const WORST_MAX: u64 = 512 << 10;

#[derive(Clone, Copy, Debug)]
enum Attack {
    Gets,
    Downloads,
    Uploads,
    Batches,
    SlowReaders,
    Tokenizing,
    Conversations,
    DeepJson,
    Names,
    HalfHeads,
    Prefixes,
    Grammars,
    Choices,
    Ollama,
    Kept,
    Strangers,
}

use Attack::*;

const ATTACKS: [Attack; 16] = [
    Gets,
    Downloads,
    Uploads,
    Batches,
    SlowReaders,
    Tokenizing,
    Conversations,
    DeepJson,
    Names,
    HalfHeads,
    Prefixes,
    Grammars,
    Choices,
    Ollama,
    Kept,
    Strangers,
];

const FORM: &str = "multipart/form-data; boundary=b";

fn form(content: &str) -> String {
    format!(
        "--b\r\ncontent-disposition: form-data; name=\"purpose\"\r\n\r\nbatch\r\n--b\r\ncontent-disposition: form-data; \
         name=\"file\"; filename=\"f\"\r\n\r\n{content}\r\n--b--\r\n"
    )
}

/// A request on a connection of its own, and its whole answer.
async fn send(address: SocketAddr, method: &str, path: &str, kind: &str, body: &str) -> String {
    let asked = async {
        let mut socket = TcpStream::connect(address).await?;
        let key = if path.contains("stranger") { "nobody" } else { "bad" };
        let head = format!(
            "{method} {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\nauthorization: Bearer {key}\r\n\
             content-type: {kind}\r\ncontent-length: {}\r\n\r\n",
            body.len()
        );
        socket.write_all(head.as_bytes()).await?;
        socket.write_all(body.as_bytes()).await?;
        let mut text = String::new();
        socket.read_to_string(&mut text).await?;
        std::io::Result::Ok(text)
    };
    asked.await.unwrap_or_default()
}

async fn post(address: SocketAddr, path: &str, body: &Value) -> String {
    send(address, "POST", path, "application/json", &body.to_string()).await
}

fn id(text: &str) -> String {
    let body = text.split_once("\r\n\r\n").map_or("", |(_, body)| body);
    let body: Value = serde_json::from_str(body).unwrap_or_default();
    body["id"].as_str().unwrap_or("none").to_owned()
}

/// What there is of the attacker's before it attacks.
#[derive(Clone)]
struct Prepared {
    address: SocketAddr,
    large: String,
    lines: String,
    /// Answers that it got, or pieces of such.
    had: Arc<AtomicU64>,
}

impl Prepared {
    async fn new(served: &Served) -> Self {
        let address = served.address;
        let upload =
            async |content: &str| id(&send(address, "POST", "/v1/files", FORM, &form(content)).await);
        for _ in 0..100 {
            upload("x").await;
        }
        let line = |at: usize| {
            let body = json!({"prompt": "hi", "max_tokens": 1});
            json!({"custom_id": at.to_string(), "method": "POST", "url": "/v1/completions", "body": body})
                .to_string()
        };
        let lines: Vec<String> = (0..64).map(line).collect();
        let (large, lines) = (upload(&"x".repeat(1 << 20)).await, upload(&lines.join("\n")).await);
        assert!(large.starts_with("file") && lines.starts_with("file"), "{large} {lines}");
        Self { address, large, lines, had: Arc::default() }
    }

    /// One connection's part: the next when the last was answered, without end.
    async fn attack(self, attack: Attack, number: usize) {
        let address = self.address;
        for round in number.. {
            let _: String = match attack {
                Gets => {
                    let paths = [
                        "/v1/models",
                        "/v1/files",
                        "/v1/batches?limit=100",
                        "/v1/responses/resp_0",
                        "/nowhere",
                        "/metrics",
                        "/openapi.json",
                        "/v1/cache/prefixes",
                    ];
                    send(address, "GET", paths[round % paths.len()], "", "").await
                }
                Downloads => send(address, "GET", &format!("/v1/files/{}/content", self.large), "", "").await,
                Uploads => {
                    let kept = send(address, "POST", "/v1/files", FORM, &form(&"y".repeat(1 << 20))).await;
                    send(address, "DELETE", &format!("/v1/files/{}", id(&kept)), "", "").await
                }
                Batches => {
                    let wanted = json!({"input_file_id": self.lines, "endpoint": "/v1/completions", "completion_window": "24h"});
                    let begun = post(address, "/v1/batches", &wanted).await;
                    send(address, "GET", &format!("/v1/batches/{}", id(&begun)), "", "").await
                }
                SlowReaders => {
                    let body = json!({"prompt": "hi", "max_tokens": 3000, "stream": true, "logprobs": 5})
                        .to_string();
                    self.slowly(&body).await
                }
                Tokenizing => {
                    post(
                        address,
                        "/tokenize",
                        &json!({"prompt": format!("{round} some words ").repeat(20_000)}),
                    )
                    .await
                }
                Conversations => {
                    let message = json!({"role": "user", "content": format!("{round} a")});
                    let body = json!({"max_tokens": 1, "messages": vec![message; 2000]});
                    post(address, "/v1/chat/completions", &body).await
                }
                DeepJson => {
                    let deep = format!("{}{}", "[".repeat(90), "]".repeat(90));
                    let body = format!("{{\"prompt\": [{}]}}", vec![deep; 2500].join(","));
                    send(address, "POST", "/v1/completions", "application/json", &body).await
                }
                Names => {
                    let names: serde_json::Map<String, Value> =
                        (0..4000).map(|at| (format!("{at:0100}"), at.into())).collect();
                    post(address, "/v1/messages", &Value::Object(names)).await
                }
                HalfHeads => {
                    let Ok(mut socket) = TcpStream::connect(address).await else { continue };
                    let _ = socket
                        .write_all(format!("GET /{} HTTP/1.1\r\nx: ", "y".repeat(4000)).as_bytes())
                        .await;
                    tokio::task::yield_now().await;
                    String::new()
                }
                Prefixes => {
                    let body = json!({"prompt": format!("{round} ab").repeat(40_000), "pin": round % 2 == 0});
                    post(address, "/v1/cache/prefixes", &body).await
                }
                Grammars => {
                    let properties: serde_json::Map<String, Value> =
                        (0..60).map(|at| (format!("p{round}_{at}"), json!({"type": "string"}))).collect();
                    let schema = json!({"type": "object", "properties": properties});
                    post(
                        address,
                        "/v1/completions",
                        &json!({"prompt": "hi", "max_tokens": 1, "structured_outputs": {"json": schema}}),
                    )
                    .await
                }
                Choices => {
                    let body = json!({"prompt": vec!["hi"; 256], "n": 2, "max_tokens": 4, "stream": true});
                    post(address, "/v1/completions", &body).await
                }
                Ollama => {
                    let body = json!({"messages": [{"role": "user", "content": format!("{round} a")}],
                        "options": {"num_predict": 1000}});
                    post(address, "/api/chat", &body).await
                }
                Kept => {
                    let body = json!({"input": format!("{round} ab").repeat(10_000), "max_output_tokens": 500,
                        "background": true, "stream": true});
                    let told = post(address, "/v1/responses", &body).await;
                    let id = told.find("resp_").map_or("none", |at| &told[at..at + 37]);
                    send(address, "GET", &format!("/v1/responses/{id}?stream=true"), "", "").await;
                    send(address, "DELETE", &format!("/v1/responses/{id}"), "", "").await
                }
                Strangers => {
                    post(address, "/v1/completions?stranger", &json!({"prompt": "a".repeat(100_000)})).await
                }
            };
            self.had.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Asks for a long stream and takes a byte of it at a time.
    async fn slowly(&self, body: &str) -> String {
        let Ok(mut socket) = TcpStream::connect(self.address).await else { return String::new() };
        let head = super::head("/v1/completions", "bad", body.len());
        if socket.write_all((head + body).as_bytes()).await.is_ok() {
            while socket.read_u8().await.is_ok() {
                self.had.fetch_add(1, Ordering::Relaxed);
                tokio::task::yield_now().await;
            }
        }
        String::new()
    }
}

/// Steps of each of the victim's requests, sorted.
async fn victim(address: SocketAddr) -> Vec<u64> {
    let mut steps = Vec::new();
    for _ in 0..REQUESTS {
        let before = work::done();
        let (status, text) = ask(address, "/v1/completions", "good", ASKED).await;
        assert_eq!(status, 200, "{text}");
        steps.push(work::done() - before);
    }
    steps.sort_unstable();
    steps
}

async fn pair(attack: Attack) {
    let limits = Limits { text_threads: 2, ..Limits::default() };
    let served = served(limits, json!({"max_concurrent_requests": AT_ONCE})).await;
    served.engine.plan(|plan| plan.say = vec![b'a'; 4000]);
    let prepared = Prepared::new(&served).await;
    let alone = victim(served.address).await;
    let mut attacking = JoinSet::new();
    for number in 0..CONNECTIONS {
        attacking.spawn(prepared.clone().attack(attack, number));
    }
    while prepared.had.load(Ordering::Relaxed) < 4 {
        tokio::task::yield_now().await;
    }
    let began = prepared.had.load(Ordering::Relaxed);
    let beside = victim(served.address).await;
    let meanwhile = prepared.had.load(Ordering::Relaxed) - began;
    attacking.shutdown().await;
    let (median, worst) = (REQUESTS / 2, REQUESTS - 1);
    let attack = format!("{attack:?}");
    println!(
        "{attack:14} alone {:8} {:8}  beside {:8} {:8}  attacker's answers {meanwhile}",
        alone[median], alone[worst], beside[median], beside[worst]
    );
    assert!(beside[median] <= alone[median] + MEDIAN_MAX, "{attack}: {alone:?} alone, {beside:?} beside it");
    assert!(beside[worst] <= alone[worst] + WORST_MAX, "{attack}: {alone:?} alone, {beside:?} beside it");
}

/// As the server's own ([`folio_server::run`]): sockets are asked after every second task.
#[test]
fn a_victim_waits_for_few_of_an_attackers_steps() {
    for attack in ATTACKS {
        let mut runtime = tokio::runtime::Builder::new_current_thread();
        let runtime = runtime.event_interval(2).global_queue_interval(2).enable_all().build().unwrap();
        runtime.block_on(async {
            let pair = tokio::time::timeout(std::time::Duration::from_secs(120), pair(attack));
            pair.await.unwrap_or_else(|_| panic!("{attack:?} stops everybody"));
        });
        runtime.shutdown_background();
    }
}
