//! Replays recorded traffic through the real scheduler and cache in virtual time, and reports what it cost.
//!
//! Owns: reading the traces and playing clients and device. Only lengths and arrival times are recorded (and, for
//! Mooncake, which 512-token blocks prompts share), so tokens are made up: equal where the trace says equal.
//!
//! The scheduler is not told how long an output will be: every request asks for the same `max_tokens`, and the modelled
//! device ends it where the trace does.

use std::io::BufRead;
use std::sync::Arc;

use folio_engine::plan::{ExecutorError, Sampled, StepOutput, StepPlan, Want};
use folio_engine::request::{Event, Request, RequestId, SamplingParams};
use folio_engine::{Driver, Micros, Scheduler, SchedulerConfig, turn};
use folio_kv::{CacheConfig, KvCache, LruLeafFirst, TenantId};
use serde::Deserialize;

use crate::cost::CostModel;
use crate::rng::mix;
use crate::scenario::root;

/// Made-up tokens are below this; the stop token is 0.
const VOCAB: u64 = 50_000;
const STOP: u32 = 0;
/// Tokens per hash id in Mooncake's traces.
const MOONCAKE_BLOCK: usize = 512;

#[derive(Clone, Debug, PartialEq)]
pub struct TraceRequest {
    pub arrives: Micros,
    pub prompt: Arc<[u32]>,
    /// Tokens generated, at least 1.
    pub output: u32,
    /// What it asks for, where that is not the same for all.
    pub max_tokens: Option<u32>,
}

#[derive(Debug, thiserror::Error)]
pub enum TraceError {
    #[error("the trace cannot be read: {0}")]
    Io(#[from] std::io::Error),
    #[error("line {line} of the trace: {reason}")]
    Line { line: usize, reason: String },
}

fn token(source: u64, at: u64) -> u32 {
    1 + (mix(source.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ at) % (VOCAB - 1)) as u32
}

/// Azure's LLM inference traces: `TIMESTAMP,ContextTokens,GeneratedTokens` with a header. Every prompt is its own.
pub fn azure(reader: impl BufRead, limit: usize) -> Result<Vec<TraceRequest>, TraceError> {
    let mut requests: Vec<TraceRequest> = Vec::new();
    let mut first = None;
    for (line, text) in reader.lines().enumerate().skip(1).take(limit) {
        let text = text?;
        let bad = |reason: &str| TraceError::Line { line: line + 1, reason: reason.into() };
        let mut fields = text.trim().split(',');
        let (time, context, output) = (fields.next(), fields.next(), fields.next());
        let seconds = time.and_then(seconds_of_day).ok_or_else(|| bad("no timestamp"))?;
        let context: u64 = context.and_then(|n| n.parse().ok()).ok_or_else(|| bad("no context tokens"))?;
        let output: u32 = output.and_then(|n| n.parse().ok()).ok_or_else(|| bad("no generated tokens"))?;
        let since = seconds - *first.get_or_insert(seconds);
        requests.push(TraceRequest {
            arrives: Micros((since.max(0.0) * 1e6) as u64),
            prompt: (0..context.max(1)).map(|at| token(line as u64, at)).collect(),
            output: output.max(1),
            max_tokens: None,
        });
    }
    Ok(requests)
}

/// `2023-11-16 18:15:46.6805900`
fn seconds_of_day(timestamp: &str) -> Option<f64> {
    let mut fields = timestamp.split(' ').nth(1)?.split(':').map(|field| field.parse::<f64>().ok());
    Some(fields.next()?? * 3600.0 + fields.next()?? * 60.0 + fields.next()??)
}

#[derive(Deserialize)]
struct MooncakeLine {
    timestamp: u64,
    input_length: usize,
    output_length: u32,
    hash_ids: Vec<u64>,
}

/// Mooncake's traces, unpacked: one JSON object per line. Equal hash ids mean equal 512-token blocks.
pub fn mooncake(reader: impl BufRead, limit: usize) -> Result<Vec<TraceRequest>, TraceError> {
    let mut requests = Vec::new();
    for (line, text) in reader.lines().enumerate().take(limit) {
        let parsed: MooncakeLine = serde_json::from_str(&text?)
            .map_err(|error| TraceError::Line { line: line + 1, reason: error.to_string() })?;
        let blocks = parsed.hash_ids.iter();
        let tokens = blocks.flat_map(|id| (0..MOONCAKE_BLOCK as u64).map(move |at| token(*id, at)));
        requests.push(TraceRequest {
            arrives: Micros(parsed.timestamp * 1000),
            prompt: tokens.take(parsed.input_length.max(1)).collect(),
            output: parsed.output_length.max(1),
            max_tokens: None,
        });
    }
    Ok(requests)
}

/// The machine a trace is replayed on.
#[derive(Clone, Debug)]
pub struct ReplayConfig {
    pub scheduler: SchedulerConfig,
    pub cache: CacheConfig,
    pub cost: CostModel,
    /// What every request asks for; outputs longer than this are cut.
    pub max_tokens: u32,
}

/// What a replay cost.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct TraceReport {
    pub requests: u64,
    /// Requests the machine could never hold.
    pub refused: u64,
    pub steps: u64,
    pub prompt_tokens: u64,
    pub cached_tokens: u64,
    pub generated_tokens: u64,
    pub preemptions: u64,
    /// Share of the requests that were preempted at least once.
    pub preempted: f64,
    /// Sequences preempted per request, and tokens computed again per token computed.
    pub preemption_rate: f64,
    pub recompute_rate: f64,
    /// Share of all block slots ever allocated that was never written.
    pub waste: f64,
    /// Mean share of the pool held by sequences while something runs, and while somebody waits for blocks.
    pub occupancy: f64,
    pub occupancy_full: f64,
    /// Steps in which somebody waited for blocks.
    pub full_steps: u64,
    pub seconds: f64,
    pub ttft_s_p50: f64,
    pub ttft_s_p99: f64,
    /// Time per token after the first, and from arrival to the end.
    pub tpot_s_p50: f64,
    pub tpot_s_p99: f64,
    pub e2e_s_p50: f64,
    pub e2e_s_p99: f64,
}

struct TraceDevice<'a> {
    requests: &'a [TraceRequest],
    cost: CostModel,
    now: Micros,
    output: StepOutput,
}

impl Driver for TraceDevice<'_> {
    fn now(&mut self) -> Micros {
        self.now
    }

    fn begin(&mut self, plan: &StepPlan, _: &Scheduler, _: &mut KvCache) {
        self.now.0 += self.cost.step(plan).max(1);
        self.output.step = plan.step;
        self.output.samples.clear();
        for sample in plan.sequences.iter().flat_map(|sequence| &sequence.samples) {
            let Want::Token(spec) = &sample.want else { continue };
            // A request's seed is its number in the trace.
            let request = &self.requests[spec.params.seed as usize];
            let generated = spec.position + 1 - request.prompt.len() as u32;
            let id = match generated >= request.output {
                true => STOP,
                false => token(u64::MAX - spec.params.seed, u64::from(spec.position)),
            };
            self.output.samples.push(Sampled::Token { id, logprobs: None });
        }
    }

    fn finish(&mut self) -> (Micros, Result<&StepOutput, ExecutorError>) {
        (self.now, Ok(&self.output))
    }
}

/// Runs all requests to their end. Arrivals are as recorded, steps take what the cost model says.
pub fn replay(
    requests: &[TraceRequest],
    config: &ReplayConfig,
) -> Result<TraceReport, folio_engine::ConfigError> {
    let mut scheduler = Scheduler::new(config.scheduler.clone())?;
    let mut cache = KvCache::new(config.cache, Box::new(LruLeafFirst::new()));
    let output = StepOutput::default();
    let mut device = TraceDevice { requests, cost: config.cost, now: Micros(0), output };
    let mut report = TraceReport::default();
    let (mut first_tokens, mut per_token, mut ends) = (Vec::new(), Vec::new(), Vec::new());
    let mut occupancy = 0.0;
    let mut waiting = requests.iter().enumerate().peekable();
    let mut now = Micros(0);
    let block_tokens = config.cache.block_tokens;
    loop {
        if !scheduler.has_work() {
            match waiting.peek() {
                Some((_, next)) => now = now.max(next.arrives),
                None => break,
            }
        }
        while let Some((index, request)) = waiting.next_if(|(_, request)| request.arrives <= now) {
            match build(index, request, config) {
                Some(request) => scheduler.admit([request.hashed(block_tokens)], [], now),
                None => report.refused += 1,
            }
        }
        device.now = now;
        for (id, event) in turn(&mut scheduler, &mut cache, &mut device).drain(..) {
            if let Event::Finished { timing, .. } = event {
                let seconds = |from: Micros, to: Micros| (to.0 - from.0) as f64 / 1e6;
                first_tokens.push(seconds(timing.arrived, timing.first_token));
                let after = requests[id.0 as usize - 1].output.saturating_sub(1);
                if after > 0 {
                    per_token.push(seconds(timing.first_token, timing.finished) / f64::from(after));
                }
                ends.push(seconds(timing.arrived, timing.finished));
                report.preempted += f64::from(u8::from(timing.preemptions > 0));
            }
        }
        now = device.now.max(Micros(now.0 + 1));
        let held = f64::from(cache.stats().active_blocks) / f64::from(config.cache.blocks.max(1));
        occupancy += held;
        if scheduler.contended() {
            report.occupancy_full += held;
            report.full_steps += 1;
        }
    }
    let counters = *scheduler.counters();
    report.requests = counters.requests_received;
    report.steps = counters.steps;
    report.prompt_tokens = counters.prompt_tokens;
    report.cached_tokens = counters.cached_prompt_tokens;
    report.generated_tokens = counters.generation_tokens;
    report.preemptions = counters.preemptions;
    report.preempted /= counters.requests_received.max(1) as f64;
    report.preemption_rate = counters.preemptions as f64 / counters.requests_received.max(1) as f64;
    report.recompute_rate = counters.recomputed_tokens as f64 / counters.iteration_tokens.max(1) as f64;
    report.waste = cache.stats().lifetime_waste();
    report.occupancy = occupancy / counters.steps.max(1) as f64;
    report.occupancy_full /= report.full_steps.max(1) as f64;
    report.seconds = now.0 as f64 / 1e6;
    [report.ttft_s_p50, report.ttft_s_p99] = quantiles(first_tokens);
    [report.tpot_s_p50, report.tpot_s_p99] = quantiles(per_token);
    [report.e2e_s_p50, report.e2e_s_p99] = quantiles(ends);
    Ok(report)
}

/// The median and the 99th percentile.
fn quantiles(mut values: Vec<f64>) -> [f64; 2] {
    values.sort_by(f64::total_cmp);
    [0.5, 0.99]
        .map(|q| values.get((values.len().saturating_sub(1) as f64 * q) as usize).copied().unwrap_or(0.0))
}

/// The request as the engine would accept it, or nothing if it could never run.
fn build(index: usize, request: &TraceRequest, config: &ReplayConfig) -> Option<Request> {
    let prompt = request.prompt.len() as u64;
    let pool = u64::from(config.cache.blocks) * u64::from(config.cache.block_tokens);
    let room =
        u64::from(config.scheduler.max_model_len).min(pool).checked_sub(prompt).filter(|room| *room > 0)?;
    let max_tokens = request.max_tokens.unwrap_or(config.max_tokens);
    let mut sampling = SamplingParams::greedy(u64::from(max_tokens).min(room) as u32);
    sampling.seed = index as u64;
    sampling.stop_token_ids = Arc::new([STOP]);
    let (id, tenant) = (RequestId(index as u64 + 1), TenantId(0));
    Some(Request::new(id, tenant, root(tenant), request.prompt.clone(), sampling))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn traces_are_parsed_and_bad_lines_are_named() {
        let csv = "TIMESTAMP,ContextTokens,GeneratedTokens\n\
                   2023-11-16 18:15:46.5,374,44\n2023-11-16 18:15:48.75,2,0\n";
        let requests = azure(csv.as_bytes(), 10).expect("valid");
        assert_eq!((requests[0].arrives, requests[0].prompt.len(), requests[0].output), (Micros(0), 374, 44));
        assert_eq!(
            (requests[1].arrives, requests[1].prompt.len(), requests[1].output),
            (Micros(2_250_000), 2, 1)
        );
        assert_ne!(requests[0].prompt[..2], requests[1].prompt[..]);
        let bad = azure("h\n2023-11-16 18:15:46.5,x,44\n".as_bytes(), 10).expect_err("bad");
        assert!(bad.to_string().contains("line 2"), "{bad}");

        let json = r#"{"timestamp": 3, "input_length": 700, "output_length": 5, "hash_ids": [1, 2]}
{"timestamp": 6, "input_length": 600, "output_length": 5, "hash_ids": [1, 9]}"#;
        let requests = mooncake(json.as_bytes(), 10).expect("valid");
        assert_eq!(requests[0].prompt[..512], requests[1].prompt[..512]);
        assert_ne!(requests[0].prompt[512..600], requests[1].prompt[512..600]);
        assert!(mooncake("{}".as_bytes(), 1).is_err());
    }

    #[test]
    fn a_replay_gives_every_request_its_recorded_length() {
        let json: String = (0..40)
            .map(|i| {
                let (at, length, output) = (i * 10, 600 + i * 3, 1 + i % 30);
                format!("{{\"timestamp\":{at},\"input_length\":{length},\"output_length\":{output},\"hash_ids\":[1,{}]}}\n", i + 2)
            })
            .collect();
        let requests = mooncake(json.as_bytes(), 100).expect("valid");
        let config = ReplayConfig {
            scheduler: SchedulerConfig::default(),
            cache: CacheConfig { blocks: 400, block_tokens: 16, bytes_per_block: 1 },
            cost: CostModel::CPU_1B,
            max_tokens: 200,
        };
        let report = replay(&requests, &config).expect("valid limits");
        assert_eq!(report.requests, 40);
        assert_eq!(report.generated_tokens, requests.iter().map(|r| u64::from(r.output)).sum::<u64>());
        assert_eq!(report.cached_tokens, 39 * 512, "the common first block is computed once");
        assert!(report.occupancy > 0.0 && report.occupancy <= 1.0);
    }
}
