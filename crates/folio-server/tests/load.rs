//! Load that is held: ten thousand connections that say nothing, and a thousand streams that are read beside them, from clients in processes
//! of their own. Memory is counted by the allocator, of this process alone; no time is looked at.

mod common;

use std::alloc::{GlobalAlloc, Layout, System};
use std::io::{BufRead, BufReader, Write};
use std::net::SocketAddr;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering::Relaxed};
use std::time::Duration;

use common::{FakeEngine, app};
use folio_server::{Limits, Listeners, Server, ServerConfig};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;

struct Counting;

static LIVE: AtomicI64 = AtomicI64::new(0);

// SAFETY: everything is the system allocator's; counting allocates nothing.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        LIVE.fetch_add(layout.size() as i64, Relaxed);
        // SAFETY: the caller's promises are handed on.
        unsafe { System.alloc(layout) }
    }
    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        LIVE.fetch_sub(layout.size() as i64, Relaxed);
        // SAFETY: as above.
        unsafe { System.dealloc(at, layout) }
    }
    unsafe fn realloc(&self, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        LIVE.fetch_add(size as i64 - layout.size() as i64, Relaxed);
        // SAFETY: as above.
        unsafe { System.realloc(at, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const CONNECTIONS: usize = 10_000;
const STREAMS: usize = 1_000;
/// Of an idle connection: its socket, its buffers, hyper's and ours.
const BYTES_PER_CONNECTION: i64 = 24 << 10;
/// Of a stream that is read: its connection, its request and its answer so far.
const BYTES_PER_STREAM: i64 = 64 << 10;

const ADDRESS: &str = "FOLIO_LOAD_ADDRESS";
const KIND: &str = "FOLIO_LOAD_KIND";

/// As many files as the system lets one process have; whether that is enough.
fn files(wanted: usize) -> bool {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let limit = getrlimit(Resource::Nofile);
    let _ = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, maximum: limit.maximum });
    getrlimit(Resource::Nofile).current.is_none_or(|files| files as usize > wanted + 200)
}

/// The other process: does what it is told by lines on its standard input, and says when it is done.
#[test]
#[ignore = "a part of the other tests, which start it"]
fn client_process() {
    let Ok(address) = std::env::var(ADDRESS) else { return };
    let address: SocketAddr = address.parse().unwrap();
    let streams = std::env::var(KIND).as_deref() == Ok("streams");
    assert!(files(CONNECTIONS));
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let mut open = Vec::new();
    for line in std::io::stdin().lines() {
        let count: usize = line.unwrap().parse().unwrap();
        runtime.block_on(async {
            open.truncate(count);
            while open.len() < count {
                let socket = TcpStream::connect(address).await.unwrap();
                open.push(tokio::spawn(hold(socket, streams)));
                // So that the accept queue is never full.
                tokio::task::yield_now().await;
            }
        });
        if open.len() > count {
            open.drain(count..).for_each(|task| task.abort());
        }
        println!("done {count}");
        std::io::stdout().flush().unwrap();
        if !streams {
            continue;
        }
        // Reads whatever comes until the other side is done.
        runtime.block_on(async {
            for task in open.drain(..) {
                let _ = task.await;
            }
        });
        println!("read");
        std::io::stdout().flush().unwrap();
    }
}

async fn hold(mut socket: TcpStream, stream: bool) {
    if stream {
        let body = r#"{"prompt": "hi", "max_tokens": 250, "stream": true}"#;
        let head = format!(
            "POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
            body.len()
        );
        socket.write_all((head + body).as_bytes()).await.unwrap();
    }
    let mut buffer = [0; 4096];
    while socket.read(&mut buffer).await.is_ok_and(|read| read > 0) {}
}

struct Client {
    child: Child,
    said: BufReader<std::process::ChildStdout>,
}

impl Client {
    fn start(address: SocketAddr, kind: &str) -> Self {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--ignored", "--exact", "client_process", "--nocapture"]);
        command.env(ADDRESS, address.to_string()).env(KIND, kind);
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let said = BufReader::new(child.stdout.take().unwrap());
        Self { child, said }
    }

    fn tell(&mut self, count: usize) {
        writeln!(self.child.stdin.as_mut().unwrap(), "{count}").unwrap();
    }

    fn hear(&mut self, wanted: &str) {
        let mut line = String::new();
        while !line.contains(wanted) {
            line.clear();
            assert!(self.said.read_line(&mut line).unwrap() > 0, "the client ended");
        }
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A server on a thread of its own.
fn served() -> (SocketAddr, Arc<FakeEngine>, mpsc::Sender<()>) {
    let engine = FakeEngine::saying(&"a".repeat(200));
    engine.plan(|plan| plan.manual = true);
    // However long this takes, nobody is given up for having said nothing.
    let limits = Limits { header_timeout: Duration::from_secs(3600), ..Limits::default() };
    let server =
        Server::new(ServerConfig { limits, ..ServerConfig::default() }, app(engine.clone())).unwrap();
    let (signals, receiver) = mpsc::channel(4);
    let (told, address) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let serving = TcpListener::bind("127.0.0.1:0").await.unwrap();
            told.send(serving.local_addr().unwrap()).unwrap();
            server.listen(Listeners { serving, admin: None }, receiver).await;
        });
    });
    (address.recv().unwrap(), engine, signals)
}

fn get(address: SocketAddr, path: &str) -> String {
    use std::io::Read;
    let mut socket = std::net::TcpStream::connect(address).unwrap();
    write!(socket, "GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").unwrap();
    let mut text = String::new();
    socket.read_to_string(&mut text).unwrap();
    text
}

fn connections(address: SocketAddr) -> usize {
    let page = get(address, "/metrics");
    let line = page.lines().find(|line| line.starts_with("folio:connections{")).unwrap();
    line.rsplit_once(' ').unwrap().1.parse().unwrap()
}

fn until(what: &str, condition: impl Fn() -> bool) {
    for _ in 0..12_000 {
        if condition() {
            return;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    panic!("{what}");
}

/// Idle connections first, and the streams beside them.
#[test]
fn connections_and_streams_are_held_together_in_flat_memory() {
    assert!(
        files(CONNECTIONS + STREAMS),
        "this system lets a process have fewer than {} files; raise its limit",
        CONNECTIONS + STREAMS
    );
    let (address, engine, _signals) = served();
    let mut idle = Client::start(address, "idle");
    let open = |client: &mut Client, count: usize| {
        client.tell(count);
        client.hear(&format!("done {count}"));
        until("all are accepted", || connections(address) == count + 1);
        LIVE.load(Relaxed)
    };
    let before = open(&mut idle, 100);
    let held = open(&mut idle, CONNECTIONS);
    let each = (held - before) / (CONNECTIONS - 100) as i64;
    println!("{CONNECTIONS} idle connections: {each} bytes each");
    assert!(each <= BYTES_PER_CONNECTION, "{each} bytes for an idle connection");

    let mut ended = held;
    for round in 0..2 {
        let mut streams = Client::start(address, "streams");
        streams.tell(STREAMS);
        streams.hear(&format!("done {STREAMS}"));
        until("all run", || engine.live() == STREAMS);
        assert_eq!(connections(address), CONNECTIONS + STREAMS + 1, "none gave way");
        let in_flight = |bytes: usize| {
            let line = format!("folio:in_flight_bytes{{model_name=\"test-model\"}} {bytes}\n");
            get(address, "/metrics").contains(&line)
        };
        let step = |count: usize| {
            for _ in 0..count {
                engine.step();
                until("all is read", || in_flight(STREAMS * 8));
            }
            LIVE.load(Relaxed)
        };
        // By then every queue has had each of its parts.
        let early = step(70);
        let late = step(100);
        let (stream, grown) = ((early - ended) / STREAMS as i64, (late - early) / STREAMS as i64);
        println!(
            "{STREAMS} open streams beside them: {stream} bytes each, {grown} more after 100 tokens more"
        );
        assert!(stream <= BYTES_PER_STREAM, "{stream} bytes for an open stream");
        // An answer's tokens, and no more than their places in it.
        assert!(grown < 1024, "{grown} bytes more of a stream that is read");
        assert!(get(address, "/health").starts_with("HTTP/1.1 200"), "and others are served");
        while engine.live() > 0 {
            engine.step();
        }
        streams.hear("read");
        until("nothing is held of the streams", || in_flight(0) && connections(address) == CONNECTIONS + 1);
        let after = LIVE.load(Relaxed);
        let left = (after - ended) / STREAMS as i64;
        println!("{left} bytes left of each stream that ended");
        // What a tenant's first requests leave behind is bounded (their records, room in tables), and so are the samples of the minutes that
        // pass meanwhile.
        assert!(round == 0 || left < 1024, "{left} bytes left of a stream that ended");
        ended = after;
    }
    drop(idle);
    until("they are given up", || connections(address) == 1);
}
