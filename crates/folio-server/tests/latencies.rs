//! vLLM's latency histograms against a client's own clock: real sockets, the real engine, a device whose steps take a known time.
//!
//! Nothing is asserted about how long things take beyond what must be so: a step lasts at least as long as it sleeps, the server
//! sees the request after its client sent it and each token before its client got it, and parts add up to the whole.

mod common;

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use common::{Submitting, VOCAB, app};
use folio_engine::plan::ExecutorError;
use folio_engine::{
    EngineHandle, EngineParts, EventSink, Executor, ModelExecutor, Request, SchedulerConfig, StepOutput,
    StepPlan, SystemClock,
};
use folio_kv::{CacheConfig, KvCache, default_policy};
use folio_server::{Listeners, Server, ServerConfig};

use folio_sim::SimBackend;
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;

/// What a step takes at least.
const STEP: Duration = Duration::from_millis(15);
/// Prompt tokens of one step.
const CHUNK: usize = 16;
/// Clocks that count whole microseconds, and sums of floats.
const ROUNDING_S: f64 = 3e-6;

const TTFT: &str = "vllm:time_to_first_token_seconds";
const GAPS: &str = "vllm:inter_token_latency_seconds";
const PER_TOKEN: &str = "vllm:request_time_per_output_token_seconds";
const E2E: &str = "vllm:e2e_request_latency_seconds";
const QUEUE: &str = "vllm:request_queue_time_seconds";
const PREFILL: &str = "vllm:request_prefill_time_seconds";
const DECODE: &str = "vllm:request_decode_time_seconds";
const INFERENCE: &str = "vllm:request_inference_time_seconds";
const OVERHEAD: &str = "folio:request_overhead_seconds";
const LATENCIES: [&str; 8] = [TTFT, GAPS, PER_TOKEN, E2E, QUEUE, PREFILL, DECODE, INFERENCE];

/// Steps do not end while it is held.
#[derive(Default)]
struct Hold(Mutex<bool>, Condvar);

impl Hold {
    fn set(&self, held: bool) {
        *self.0.lock().unwrap() = held;
        self.1.notify_all();
    }
}

/// A device that takes its time.
struct Paced {
    inner: ModelExecutor,
    hold: Arc<Hold>,
}

impl Executor for Paced {
    fn begin(&mut self, plan: &StepPlan) -> Result<(), ExecutorError> {
        self.inner.begin(plan)
    }

    fn finish(&mut self) -> Result<&StepOutput, ExecutorError> {
        std::thread::sleep(STEP);
        drop(self.hold.1.wait_while(self.hold.0.lock().unwrap(), |held| *held).unwrap());
        self.inner.finish()
    }

    fn depth(&self) -> usize {
        self.inner.depth()
    }
}

struct Running {
    address: SocketAddr,
    hold: Arc<Hold>,
    taken: Arc<AtomicUsize>,
    _signals: mpsc::Sender<()>,
}

/// One request runs at a time.
async fn start() -> Running {
    let config = SchedulerConfig {
        max_num_seqs: 1,
        max_num_batched_tokens: CHUNK as u32,
        max_prefill_tokens_while_decoding: CHUNK as u32,
        max_model_len: 256,
        ..Default::default()
    };
    let hold = Arc::new(Hold::default());
    let backend = SimBackend::new(VOCAB as usize, 64, 16, CHUNK, 64);
    let inner = ModelExecutor::new(Box::new(backend), VOCAB as usize, CHUNK, 64);
    let engine = folio_engine::start(EngineParts {
        config,
        cache: KvCache::new(
            CacheConfig { blocks: 64, block_tokens: 16, bytes_per_block: 1 },
            default_policy(0.01),
        ),
        executor: Box::new(Paced { inner, hold: hold.clone() }),
        clock: Arc::new(SystemClock::new()),
        vocab: VOCAB,
        tiers: Vec::new(),
        events: None,
    })
    .unwrap();
    let taken = Arc::new(AtomicUsize::new(0));
    let count = taken.clone();
    let submit = move |engine: &EngineHandle, request: Request, sink: Box<dyn EventSink>| {
        let flag = engine.submit(request, sink);
        count.fetch_add(1, Ordering::SeqCst);
        flag
    };
    let engine = Submitting { engine, submit };
    let server = Server::new(ServerConfig::default(), app(Arc::new(engine))).unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let (signals, receiver) = mpsc::channel(4);
    tokio::spawn(server.listen(Listeners { serving: listener, admin: None }, receiver));
    Running { address, hold, taken, _signals: signals }
}

/// What a client measured: from before it sent its request to when it read the first token, and the end.
struct Measured {
    first_token_s: f64,
    end_s: f64,
}

async fn open(address: SocketAddr, method: &str, path: &str, body: &str) -> TcpStream {
    let mut socket = TcpStream::connect(address).await.unwrap();
    let head = format!(
        "{method} {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json\r\n\
         content-length: {}\r\n\r\n{body}",
        body.len()
    );
    socket.write_all(head.as_bytes()).await.unwrap();
    socket
}

/// Streams a completion of `tokens` tokens.
async fn stream(address: SocketAddr, prompt: String, tokens: usize) -> Measured {
    let body = json!({"prompt": prompt, "max_tokens": tokens, "ignore_eos": true, "stream": true,
        "return_token_ids": true, "temperature": 0});
    let began = Instant::now();
    let socket = open(address, "POST", "/v1/completions", &body.to_string()).await;
    let mut lines = BufReader::new(socket).split(b'\n');
    let (mut first_token_s, mut got) = (0.0, 0);
    while let Some(line) = lines.next_segment().await.unwrap() {
        let Some(data) = line.strip_prefix(b"data: ") else { continue };
        let Ok(event) = serde_json::from_slice::<Value>(data) else { continue };
        assert!(event.get("error").is_none(), "{event}");
        let ids = event["choices"][0]["token_ids"].as_array().map_or(0, Vec::len);
        if got == 0 && ids > 0 {
            first_token_s = began.elapsed().as_secs_f64();
        }
        got += ids;
    }
    assert_eq!(got, tokens);
    Measured { first_token_s, end_s: began.elapsed().as_secs_f64() }
}

/// Sum and count of a histogram.
type Totals = HashMap<&'static str, (f64, f64)>;

/// The histograms, once `ended` requests are counted in all of them.
async fn totals(address: SocketAddr, ended: usize) -> Totals {
    loop {
        let mut page = String::new();
        open(address, "GET", "/metrics", "").await.read_to_string(&mut page).await.unwrap();
        let value = |name: &str, part: &str| -> f64 {
            let line = page.lines().find(|line| {
                line.strip_prefix(name)
                    .and_then(|rest| rest.strip_prefix(part))
                    .is_some_and(|rest| rest.starts_with(['{', ' ']))
            });
            let line = line.unwrap_or_else(|| panic!("no {name}{part} in\n{page}"));
            line.rsplit_once(' ').unwrap().1.parse().unwrap()
        };
        let names = LATENCIES.into_iter().chain([OVERHEAD]);
        let totals: Totals = names.map(|name| (name, (value(name, "_sum"), value(name, "_count")))).collect();
        // The last to be counted.
        if totals[OVERHEAD].1 as usize == ended {
            return totals;
        }
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

/// What holds of the requests that ended between two looks at the page: `measured` by their clients, `tokens` generated by each.
/// The sums of what the server counted meanwhile.
fn check(
    before: &Totals,
    after: &Totals,
    measured: &[Measured],
    tokens: usize,
) -> HashMap<&'static str, f64> {
    let sum: HashMap<&str, f64> =
        after.iter().map(|(name, (sum, _))| (*name, sum - before[name].0)).collect();
    for name in LATENCIES {
        let count = (after[name].1 - before[name].1) as usize;
        let each = if name == GAPS { tokens - 1 } else { 1 };
        assert_eq!(count, measured.len() * each, "{name}");
        assert!(sum[name] >= 0.0, "{name}");
    }
    let rounding = ROUNDING_S * measured.len() as f64;
    let at_most = |less: f64, more: f64, what: &str| {
        assert!(less <= more + rounding, "{what}: {less} s is more than {more} s; {sum:?}");
    };
    let same = |one: f64, other: f64, what: &str| {
        at_most(one, other, what);
        at_most(other, one, what);
    };
    let total = |of: fn(&Measured) -> f64| measured.iter().map(of).sum::<f64>();
    let (first_token, end) = (total(|m| m.first_token_s), total(|m| m.end_s));
    // Against the client's clock.
    at_most(sum[TTFT], first_token, "the first token is chosen before its client has it");
    at_most(sum[E2E], end, "the answer ends before its client has the end");
    at_most(sum[GAPS], end, "between the tokens");
    for name in [QUEUE, PREFILL, DECODE, INFERENCE] {
        at_most(sum[name], sum[E2E], name);
    }
    at_most(sum[QUEUE] + sum[PREFILL], sum[TTFT], "queue and prefill end with the first token");
    // Within the server.
    same(sum[PREFILL] + sum[DECODE], sum[INFERENCE], "prefill and decode are the inference");
    same(sum[PER_TOKEN] * (tokens - 1) as f64, sum[GAPS], "from the first token to the last");
    at_most(sum[QUEUE] + sum[INFERENCE], sum[E2E], "the engine's part of the answer");
    at_most(sum[E2E], sum[QUEUE] + sum[INFERENCE] + sum[OVERHEAD], "the engine's part and the rest");
    // Against the device's: every token but the first takes a step of its own.
    let steps = |steps: usize| (steps * measured.len()) as f64 * STEP.as_secs_f64();
    at_most(steps(tokens - 1), sum[DECODE], "decode steps");
    at_most(steps(1), sum[PREFILL], "the prompt's step");
    sum
}

#[tokio::test(flavor = "multi_thread")]
async fn every_latency_is_within_what_the_client_measured() {
    let all = folio_server::metrics::documented();
    let all = all.filter(|doc| doc.kind == "histogram" && doc.name.starts_with("vllm:"));
    let seconds: Vec<&str> = all.map(|doc| doc.name).filter(|name| name.ends_with("_seconds")).collect();
    assert_eq!(seconds, LATENCIES, "every one of them is checked here");

    let running = start().await;
    let mut before = totals(running.address, 0).await;
    // A prompt of one chunk, and of three.
    for (at, (chars, steps)) in [(8, 1), (2 * CHUNK + 6, 3)].into_iter().enumerate() {
        let prompt = ["a", "b"][at].repeat(chars);
        let measured = stream(running.address, prompt, 4).await;
        let after = totals(running.address, at + 1).await;
        let sum = check(&before, &after, &[measured], 4);
        let least = (steps * STEP).as_secs_f64() - ROUNDING_S;
        assert!(sum[PREFILL] >= least, "{chars} tokens of prompt: {sum:?}");
        before = after;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_queue_is_as_long_as_somebody_else_runs() {
    const TOKENS: usize = 3;
    let running = start().await;
    let before = totals(running.address, 0).await;
    running.hold.set(true);
    let first = tokio::spawn(stream(running.address, "first".into(), TOKENS));
    while running.taken.load(Ordering::SeqCst) < 1 {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    let second = tokio::spawn(stream(running.address, "second".into(), TOKENS));
    while running.taken.load(Ordering::SeqCst) < 2 {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    // Both are in the engine, one in a step that does not end, or both before it.
    let both = Instant::now();
    tokio::time::sleep(4 * STEP).await;
    let held = both.elapsed().as_secs_f64();
    running.hold.set(false);
    let measured = [first.await.unwrap(), second.await.unwrap()];
    let after = totals(running.address, 2).await;
    let sum = check(&before, &after, &measured, TOKENS);
    let behind = held + (TOKENS as u32 - 1) as f64 * STEP.as_secs_f64();
    assert!(sum[QUEUE] >= behind - ROUNDING_S, "one waited for {behind} s: {sum:?}");
}
