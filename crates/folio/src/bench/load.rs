//! `folio bench serve`: load on any OpenAI-compatible server.
//!
//! Owns: when requests are sent (a fixed number in flight, Poisson arrivals or a trace's own), and the report. Requests
//! that fail are counted by kind and are part of no latency figure.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};
use hyper::Method;
use serde::Serialize;
use serde_json::{Value, json};
use tokio::sync::Semaphore;

use super::client::{Ask, Client, Failure, Timeline};
use super::stats::Summary;
use super::table;
use super::workload::{self, Item, Synthetic, TraceOptions};
use crate::cli::{BenchServeArgs, Endpoint};
use crate::progress::Bar;
use crate::units;

/// In flight at most when only arrivals decide.
const OPEN_LOOP_MAX: usize = 10_000;
const DEFAULT_CONCURRENCY: u32 = 8;

pub fn run(args: &BenchServeArgs) -> Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let report = runtime.block_on(measure(args))?;
    if args.json {
        println!("{}", serde_json::to_string_pretty(&report)?);
    } else {
        print!("{}", report.table());
    }
    if report.completed == 0 {
        bail!("no request succeeded");
    }
    Ok(())
}

async fn measure(args: &BenchServeArgs) -> Result<LoadReport> {
    if args.token_ids.is_some() && args.endpoint == Endpoint::Chat {
        bail!("--token-ids: chat has no prompts of token ids; use --endpoint completions");
    }
    let client = Arc::new(Client::new(&args.url, args.api_key.as_deref())?);
    let model = match &args.model {
        Some(model) => model.clone(),
        None => first_model(&client).await?,
    };
    let (items, left_out) = items(args)?;
    let words_per_token = match args.token_ids {
        Some(_) => 1.0,
        None => words_per_token(&client, &model, args.endpoint).await?,
    };
    let load = Arc::new(Load {
        client,
        model: model.clone(),
        endpoint: args.endpoint,
        ignore_eos: !args.allow_eos,
        words_per_token,
        token_ids: args.token_ids,
        timeout: Duration::from_secs(args.timeout),
    });
    let open_loop = items.iter().any(|item| item.at.is_some());
    let in_flight_max = match args.concurrency {
        Some(limit) => limit as usize,
        None if open_loop => OPEN_LOOP_MAX,
        None => DEFAULT_CONCURRENCY as usize,
    };
    if args.warmup > 0 {
        let warmup = warmup(args);
        send_all(&load, warmup, in_flight_max.min(args.warmup as usize), None).await;
    }
    let bar = Bar::items("requests", items.len() as u64);
    let outcome = send_all(&load, items, in_flight_max, Some(&bar)).await;
    bar.finish();
    let concurrency = (!open_loop || args.concurrency.is_some()).then_some(in_flight_max);
    Ok(LoadReport::new(args, model, concurrency, left_out, words_per_token, outcome))
}

async fn first_model(client: &Client) -> Result<String> {
    let models = client.json(Method::GET, "/models", None).await?;
    let name = models["data"][0]["id"].as_str().map(str::to_owned);
    name.ok_or_else(|| anyhow!("the server lists no model; give --model"))
}

fn items(args: &BenchServeArgs) -> Result<workload::Trace> {
    let requests = args.requests as usize;
    let options =
        TraceOptions { requests, speed: args.trace_speed, max_len: args.trace_max_len, seed: args.seed };
    let read = |path: &Path| {
        std::fs::read_to_string(path)
            .with_context(|| format!("cannot read {} (a .gz must be unpacked first)", path.display()))
    };
    if let Some(path) = &args.azure_trace {
        return workload::from_azure(&read(path)?, options);
    }
    if let Some(path) = &args.mooncake_trace {
        return workload::from_mooncake(&read(path)?, options);
    }
    if let Some(path) = &args.prompts {
        return Ok((workload::from_file(path, requests, args.output_len, args.rate, args.seed)?, 0));
    }
    Ok((synthetic(args, requests, args.rate, args.seed).items(), 0))
}

fn synthetic(args: &BenchServeArgs, requests: usize, rate: Option<f64>, seed: u64) -> Synthetic {
    let prefixes = args.shared_prefixes.zip(args.prefix_len);
    Synthetic { requests, input: args.input_len, output: args.output_len, prefixes, rate, seed }
}

/// Requests like the measured ones but with other texts, so that nothing measured is cached already.
fn warmup(args: &BenchServeArgs) -> Vec<Item> {
    synthetic(args, args.warmup as usize, None, !args.seed).items()
}

/// Asks the server how many tokens made-up words are: the difference of two prompts, so that a chat template does not count.
async fn words_per_token(client: &Client, model: &str, endpoint: Endpoint) -> Result<f64> {
    let mut tokens = [0u64; 2];
    let words = [64usize, 192];
    for (tokens, words) in tokens.iter_mut().zip(words) {
        let mut prompt = String::new();
        workload::append_words(&mut prompt, 0xCA11, words);
        let (path, body) = match endpoint {
            Endpoint::Completions => {
                ("/completions", json!({"model": model, "prompt": prompt, "max_tokens": 1}))
            }
            Endpoint::Chat => (
                "/chat/completions",
                json!({"model": model, "max_tokens": 1, "messages": [{"role": "user", "content": prompt}]}),
            ),
        };
        let answer = client.json(Method::POST, path, Some(&body)).await?;
        *tokens = answer["usage"]["prompt_tokens"].as_u64().unwrap_or(0);
    }
    let [few, many] = tokens;
    Ok(if many > few { (words[1] - words[0]) as f64 / (many - few) as f64 } else { 1.0 })
}

struct Load {
    client: Arc<Client>,
    model: String,
    endpoint: Endpoint,
    ignore_eos: bool,
    words_per_token: f64,
    token_ids: Option<workload::Range>,
    timeout: Duration,
}

impl Load {
    async fn send(&self, item: &Item) -> Result<Timeline, Failure> {
        let ask = Ask {
            endpoint: self.endpoint,
            model: self.model.clone(),
            prompt: match self.token_ids.and_then(|ids| item.prompt.ids(ids)) {
                Some(ids) => ids.into(),
                None => item.prompt.text(self.words_per_token).into(),
            },
            max_tokens: item.output_tokens,
            ignore_eos: self.ignore_eos,
        };
        match tokio::time::timeout(self.timeout, self.client.stream(&ask)).await {
            Ok(result) => result,
            Err(_) => Err(Failure { kind: "timeout".into(), detail: format!("after {:?}", self.timeout) }),
        }
    }
}

/// What happened to all requests.
struct Outcome {
    results: Vec<Result<Timeline, Failure>>,
    /// From the first request sent to the last one finished.
    elapsed: Duration,
    peak_in_flight: usize,
}

/// Sends every item at its time, as soon as a place is free, and waits for all.
async fn send_all(load: &Arc<Load>, items: Vec<Item>, in_flight_max: usize, bar: Option<&Bar>) -> Outcome {
    let places = Arc::new(Semaphore::new(in_flight_max));
    let in_flight = Arc::new(AtomicUsize::new(0));
    let peak = Arc::new(AtomicUsize::new(0));
    let (sender, mut done) = tokio::sync::mpsc::unbounded_channel();
    let count = items.len();
    let started = Instant::now();
    let (dispatch_load, dispatch_peak) = (load.clone(), peak.clone());
    let dispatch = async move {
        for item in items {
            if let Some(at) = item.at {
                tokio::time::sleep_until((started + at).into()).await;
            }
            let Ok(place) = places.clone().acquire_owned().await else { break };
            let now = in_flight.fetch_add(1, Ordering::Relaxed) + 1;
            dispatch_peak.fetch_max(now, Ordering::Relaxed);
            let (load, in_flight, sender) = (dispatch_load.clone(), in_flight.clone(), sender.clone());
            tokio::spawn(async move {
                let result = load.send(&item).await;
                in_flight.fetch_sub(1, Ordering::Relaxed);
                drop(place);
                // The receiver outlives every sender.
                let _ = sender.send(result);
            });
        }
    };
    let collect = async {
        let mut results = Vec::with_capacity(count);
        while let Some(result) = done.recv().await {
            if let Some(bar) = bar {
                bar.advance("");
            }
            results.push(result);
        }
        results
    };
    let ((), results) = tokio::join!(dispatch, collect);
    Outcome { results, elapsed: started.elapsed(), peak_in_flight: peak.load(Ordering::Relaxed) }
}

/// Everything measured; times in milliseconds.
#[derive(Debug, Serialize)]
struct LoadReport {
    url: String,
    model: String,
    endpoint: &'static str,
    requests: usize,
    completed: usize,
    /// By kind: count and one example.
    errors: BTreeMap<String, ErrorCount>,
    left_out_of_trace: usize,
    concurrency: Option<usize>,
    rate_per_s: Option<f64>,
    peak_in_flight: usize,
    elapsed_s: f64,
    words_per_token: f64,
    prompt_tokens: u64,
    cached_tokens: u64,
    output_tokens: u64,
    requests_per_s: f64,
    output_tokens_per_s: f64,
    total_tokens_per_s: f64,
    ttft_ms: Summary,
    tpot_ms: Summary,
    itl_ms: Summary,
    e2e_ms: Summary,
    goodput: Option<Goodput>,
}

#[derive(Debug, Default, Serialize)]
struct ErrorCount {
    count: usize,
    example: String,
}

/// Requests that met every limit.
#[derive(Debug, PartialEq, Serialize)]
struct Goodput {
    good: usize,
    good_share: f64,
    requests_per_s: f64,
    slo: Value,
}

fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

impl LoadReport {
    fn new(
        args: &BenchServeArgs,
        model: String,
        concurrency: Option<usize>,
        left_out: usize,
        words_per_token: f64,
        outcome: Outcome,
    ) -> Self {
        let requests = outcome.results.len();
        let mut errors: BTreeMap<String, ErrorCount> = BTreeMap::new();
        let mut done = Vec::with_capacity(requests);
        for result in outcome.results {
            match result {
                Ok(timeline) => done.push(timeline),
                Err(failure) => {
                    let entry = errors.entry(failure.kind).or_default();
                    entry.count += 1;
                    entry.example = failure.detail;
                }
            }
        }
        let elapsed_s = outcome.elapsed.as_secs_f64().max(1e-9);
        let sum = |of: fn(&Timeline) -> u64| done.iter().map(of).sum::<u64>();
        let (prompt_tokens, output_tokens) = (sum(|t| t.prompt_tokens), sum(|t| t.output_tokens));
        Self {
            url: args.url.clone(),
            model,
            endpoint: match args.endpoint {
                Endpoint::Completions => "completions",
                Endpoint::Chat => "chat",
            },
            requests,
            completed: done.len(),
            errors,
            left_out_of_trace: left_out,
            concurrency,
            rate_per_s: args.rate,
            peak_in_flight: outcome.peak_in_flight,
            elapsed_s,
            words_per_token,
            prompt_tokens,
            cached_tokens: sum(|t| t.cached_tokens),
            output_tokens,
            requests_per_s: done.len() as f64 / elapsed_s,
            output_tokens_per_s: output_tokens as f64 / elapsed_s,
            total_tokens_per_s: (prompt_tokens + output_tokens) as f64 / elapsed_s,
            ttft_ms: Summary::of(done.iter().map(|t| ms(t.first)).collect()),
            tpot_ms: Summary::of(done.iter().filter_map(|t| t.per_token().map(ms)).collect()),
            itl_ms: Summary::of(done.iter().flat_map(|t| t.gaps.iter().copied().map(ms)).collect()),
            e2e_ms: Summary::of(done.iter().map(|t| ms(t.total)).collect()),
            goodput: goodput(args, &done, requests, elapsed_s),
        }
    }

    fn table(&self) -> String {
        let mut out = format!("{} on {} ({})\n\n", self.model, self.url, self.endpoint);
        let mut line = |what: &str, text: String| out.push_str(&format!("{what:<22}{text}\n"));
        line("requests", format!("{} completed of {}", self.completed, self.requests));
        for (kind, error) in &self.errors {
            line("  failed", format!("{} x {kind}: {}", error.count, error.example));
        }
        if self.left_out_of_trace > 0 {
            line("  left out of trace", format!("{} longer than --trace-max-len", self.left_out_of_trace));
        }
        line(
            "in flight",
            match (self.concurrency, self.rate_per_s) {
                (Some(limit), None) => format!("at most {limit}, peak {}", self.peak_in_flight),
                (_, Some(rate)) => format!("{rate} arrivals per second, peak {}", self.peak_in_flight),
                (None, None) => format!("as the trace says, peak {}", self.peak_in_flight),
            },
        );
        line("time", units::duration(Duration::from_secs_f64(self.elapsed_s)));
        let cached = units::count(self.cached_tokens);
        line("prompt tokens", format!("{} ({cached} cached)", units::count(self.prompt_tokens)));
        line("output tokens", units::count(self.output_tokens));
        line("requests per s", format!("{:.2}", self.requests_per_s));
        line("output tokens per s", format!("{:.1}", self.output_tokens_per_s));
        line("all tokens per s", format!("{:.1}", self.total_tokens_per_s));
        if let Some(goodput) = &self.goodput {
            let share = goodput.good_share * 100.0;
            let text =
                format!("{:.2} requests per s, {} good ({share:.1} %)", goodput.requests_per_s, goodput.good);
            line("goodput", text);
        }
        let row = |name: &str, s: &Summary| {
            let mut cells = vec![name.to_owned()];
            cells.extend([s.mean, s.p50, s.p90, s.p99, s.max].map(|value| format!("{value:.2}")));
            cells
        };
        let rows = [
            row("TTFT", &self.ttft_ms),
            row("TPOT", &self.tpot_ms),
            row("inter-token", &self.itl_ms),
            row("end to end", &self.e2e_ms),
        ];
        out + "\n" + &table::render(&["ms", "mean", "p50", "p90", "p99", "max"], &rows)
    }
}

fn goodput(args: &BenchServeArgs, done: &[Timeline], requests: usize, elapsed_s: f64) -> Option<Goodput> {
    let (ttft, tpot, e2e) = (args.slo_ttft_ms, args.slo_tpot_ms, args.slo_e2e_ms);
    ttft.or(tpot).or(e2e)?;
    let within = |time: Option<Duration>, limit: Option<f64>| match (time, limit) {
        (Some(time), Some(limit)) => ms(time) <= limit,
        _ => true,
    };
    let good = done
        .iter()
        .filter(|t| within(Some(t.first), ttft) && within(t.per_token(), tpot) && within(Some(t.total), e2e))
        .count();
    Some(Goodput {
        good,
        good_share: good as f64 / requests.max(1) as f64,
        requests_per_s: good as f64 / elapsed_s,
        slo: json!({"ttft_ms": ttft, "tpot_ms": tpot, "e2e_ms": e2e}),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::{BenchMode, Cli, Command};
    use clap::Parser;

    fn args(line: &str) -> BenchServeArgs {
        match Cli::try_parse_from(line.split(' ')).expect("parses").command {
            Some(Command::Bench { mode: BenchMode::Serve(args) }) => *args,
            other => panic!("{other:?}"),
        }
    }

    fn timeline(first_ms: u64, total_ms: u64, output_tokens: u64) -> Timeline {
        let (first, total) = (Duration::from_millis(first_ms), Duration::from_millis(total_ms));
        Timeline { first, total, output_tokens, prompt_tokens: 10, ..Timeline::default() }
    }

    #[test]
    fn goodput_needs_every_limit_to_hold_and_counts_failures_as_bad() {
        let args = args("folio bench serve --url u --slo-ttft-ms 100 --slo-tpot-ms 10");
        let done =
            [timeline(50, 150, 11), timeline(150, 200, 11), timeline(50, 500, 11), timeline(99, 99, 1)];
        let goodput = goodput(&args, &done, 5, 2.0).expect("limits were given");
        assert_eq!((goodput.good, goodput.good_share, goodput.requests_per_s), (2, 0.4, 1.0));
    }

    #[test]
    fn without_limits_there_is_no_goodput() {
        assert_eq!(goodput(&args("folio bench serve --url u"), &[], 0, 1.0), None);
    }

    #[test]
    fn a_report_adds_up() {
        let failure = || Err(Failure { kind: "HTTP 429".into(), detail: "full".into() });
        let outcome = Outcome {
            results: vec![Ok(timeline(50, 150, 11)), failure(), Ok(timeline(70, 170, 11)), failure()],
            elapsed: Duration::from_secs(2),
            peak_in_flight: 3,
        };
        let report =
            LoadReport::new(&args("folio bench serve --url u"), "m".into(), Some(3), 0, 1.0, outcome);
        assert_eq!((report.requests, report.completed, report.errors["HTTP 429"].count), (4, 2, 2));
        assert_eq!((report.output_tokens_per_s, report.total_tokens_per_s), (11.0, 21.0));
        assert_eq!((report.ttft_ms.mean, report.tpot_ms.p50), (60.0, 10.0));
        let table = report.table();
        assert!(table.contains("2 x HTTP 429: full") && table.contains("TPOT"), "{table}");
    }
}
