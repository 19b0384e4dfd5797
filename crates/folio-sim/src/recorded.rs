//! Folio's own recordings (`GET /v1/trace`, `folio trace record`): Chrome's trace events, of which the arguments say what came and what
//! became of it.
//!
//! Owns: reading them. A file is a stranger's: everything in it is bounded, and what is wrong is named with the request it is of. Tokens are
//! made up, equal where the recording's numbers of blocks are.

use std::collections::HashMap;
use std::io::Read;
use std::sync::Arc;

use folio_engine::Micros;
use folio_kv::TenantId;
use serde::Deserialize;

use crate::trace::{TraceRequest, room, token};

/// Of the format; `folio-server`'s recorder writes it.
const VERSION: u64 = 1;
/// Of a file.
const BYTES_MAX: u64 = 128 << 20;
const REQUESTS_MAX: usize = 100_000;
/// Tokens of one request.
const TOKENS_MAX: u64 = 1 << 24;
/// A week.
const MICROS_MAX: f64 = 7.0 * 86_400e6;

#[derive(Debug, thiserror::Error)]
pub enum RecordedError {
    #[error("it cannot be read: {0}")]
    Io(#[from] std::io::Error),
    #[error("it has more than {BYTES_MAX} bytes")]
    TooLarge,
    #[error("it is no trace of `folio trace record`: {0}")]
    NotOne(String),
    #[error("it is of version {found} of the format, and this Folio reads version {VERSION}")]
    Version { found: u64 },
    #[error("request {number}: {reason}")]
    Request { number: usize, reason: String },
}

/// What was said of the whole.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
pub struct RecordedAbout {
    format: String,
    version: u64,
    #[serde(default)]
    pub model: String,
    #[serde(default)]
    pub seconds: f64,
    /// Requests that did not end while it was recorded, and those there was no room for: neither is in it.
    #[serde(default)]
    pub unfinished: u64,
    #[serde(default)]
    pub left_out: u64,
    pub blocks: u32,
    pub block_tokens: u32,
    #[serde(default)]
    pub bytes_per_block: u64,
    pub max_num_seqs: u32,
    pub max_num_batched_tokens: u32,
    pub max_prefill_while_decoding: u32,
    pub max_model_len: u32,
}

/// A request as it was served.
#[derive(Clone, Debug, PartialEq)]
pub struct RecordedRequest {
    pub arrived: Micros,
    /// `None`: it ended without one.
    pub first_token: Option<Micros>,
    pub finished: Micros,
    pub tenant: u32,
    pub prompt_tokens: u32,
    pub cached_tokens: u32,
    pub output_tokens: u32,
    pub max_tokens: u32,
    pub preemptions: u32,
    /// (first, how many) of consecutive numbers.
    prompt_blocks: Vec<(u32, u32)>,
    prompt_tail: Option<u32>,
    output_blocks: Vec<(u32, u32)>,
}

/// What steps of one kind did in a short time.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
pub struct RecordedSteps {
    pub steps: u64,
    pub us: f64,
    pub sequences: u64,
    pub rows: u64,
    pub logit_rows: u64,
    pub kv_positions: u64,
    pub attention: u64,
}

/// See the module documentation.
#[derive(Clone, Debug, PartialEq)]
pub struct RecordedTrace {
    pub about: RecordedAbout,
    /// Ascending by arrival.
    pub requests: Vec<RecordedRequest>,
    pub steps: Vec<RecordedSteps>,
}

#[derive(Deserialize)]
struct File {
    #[serde(rename = "otherData")]
    about: Option<RecordedAbout>,
    #[serde(rename = "traceEvents")]
    events: Vec<TraceEvent>,
}

/// Of all that a trace event may have, what is read.
#[derive(Deserialize)]
struct TraceEvent {
    #[serde(default)]
    cat: String,
    #[serde(default)]
    ts: f64,
    #[serde(default)]
    dur: f64,
    #[serde(default)]
    args: serde_json::Value,
}

#[derive(Deserialize)]
struct RequestArgs {
    tenant: u32,
    prompt_tokens: u64,
    cached_tokens: u64,
    output_tokens: u64,
    max_tokens: u64,
    first_token: Option<f64>,
    #[serde(default)]
    preemptions: u32,
    prompt_blocks: Vec<(u32, u32)>,
    prompt_tail: Option<u32>,
    #[serde(default)]
    output_blocks: Vec<(u32, u32)>,
}

impl RecordedTrace {
    pub fn read(reader: impl Read) -> Result<Self, RecordedError> {
        let mut text = Vec::new();
        reader.take(BYTES_MAX + 1).read_to_end(&mut text)?;
        if text.len() as u64 > BYTES_MAX {
            return Err(RecordedError::TooLarge);
        }
        Self::parse(&text)
    }

    fn parse(text: &[u8]) -> Result<Self, RecordedError> {
        let file: File =
            serde_json::from_slice(text).map_err(|error| RecordedError::NotOne(error.to_string()))?;
        let about = file.about.ok_or_else(|| RecordedError::NotOne("there is no otherData".to_owned()))?;
        if about.format != "folio-trace" {
            return Err(RecordedError::NotOne(format!("its format is {:?}", about.format)));
        }
        if about.version != VERSION {
            return Err(RecordedError::Version { found: about.version });
        }
        about.check().map_err(RecordedError::NotOne)?;
        let (mut requests, mut steps, mut tokens) = (Vec::new(), Vec::new(), 0);
        for event in file.events {
            match &*event.cat {
                "folio.request" => {
                    let number = requests.len() + 1;
                    let wrong = |reason| RecordedError::Request { number, reason };
                    if requests.len() == REQUESTS_MAX {
                        return Err(wrong(format!("at most {REQUESTS_MAX} are read")));
                    }
                    let request = RecordedRequest::of(event, &about).map_err(wrong)?;
                    room(&mut tokens, request.prompt_tokens as usize + request.output_tokens as usize)
                        .map_err(wrong)?;
                    requests.push(request);
                }
                "folio.steps" => steps.extend(steps_of(&event.args)),
                _ => {}
            }
        }
        requests.sort_by_key(|request| request.arrived);
        Ok(Self { about, requests, steps })
    }

    /// The same requests, to be run again.
    pub fn traffic(&self) -> Vec<TraceRequest> {
        let mut texts = Texts { block_tokens: self.about.block_tokens, known: HashMap::new() };
        self.requests.iter().map(|request| texts.request(request)).collect()
    }
}

impl RecordedAbout {
    fn check(&self) -> Result<(), String> {
        for (name, value, most) in [
            ("blocks", self.blocks, u32::MAX >> 1),
            ("block_tokens", self.block_tokens, 1 << 16),
            ("max_num_seqs", self.max_num_seqs, 1 << 16),
            ("max_num_batched_tokens", self.max_num_batched_tokens, 1 << 20),
            ("max_prefill_while_decoding", self.max_prefill_while_decoding, 1 << 20),
            ("max_model_len", self.max_model_len, TOKENS_MAX as u32),
        ] {
            if value == 0 || value > most {
                return Err(format!("{name} is {value}, expected 1 to {most}"));
            }
        }
        match self.seconds.is_finite() && self.seconds >= 0.0 {
            true => Ok(()),
            false => Err(format!("seconds is {}", self.seconds)),
        }
    }
}

impl RecordedRequest {
    fn of(event: TraceEvent, about: &RecordedAbout) -> Result<Self, String> {
        let args: RequestArgs = serde_json::from_value(event.args).map_err(|error| error.to_string())?;
        let tokens = |name: &str, value: u64, least: u64| match (least..=TOKENS_MAX).contains(&value) {
            true => Ok(value as u32),
            false => Err(format!("{name} is {value}, expected {least} to {TOKENS_MAX}")),
        };
        let micros = |name: &str, value: f64| match (0.0..=MICROS_MAX).contains(&value) {
            true => Ok(Micros(value as u64)),
            false => Err(format!("{name} is {value} microseconds, expected 0 to {MICROS_MAX}")),
        };
        let prompt_tokens = tokens("prompt_tokens", args.prompt_tokens, 1)?;
        let output_tokens = tokens("output_tokens", args.output_tokens, 0)?;
        let size = about.block_tokens;
        let full = prompt_tokens / size;
        let count = |runs: &[(u32, u32)]| -> Result<u64, String> {
            match runs.iter().find(|(first, count)| first.checked_add(*count).is_none()) {
                Some((first, count)) => Err(format!("{count} blocks from number {first} are too many")),
                None => Ok(runs.iter().map(|(_, count)| u64::from(*count)).sum()),
            }
        };
        let (found, more) = (count(&args.prompt_blocks)?, count(&args.output_blocks)?);
        if found != u64::from(full) {
            return Err(format!(
                "{found} blocks of {size} for a prompt of {prompt_tokens} tokens, which has {full}"
            ));
        }
        let most = (u64::from(prompt_tokens) + u64::from(output_tokens)) / u64::from(size) - u64::from(full);
        if more > most {
            return Err(format!("{more} blocks behind the prompt's, where there is room for {most}"));
        }
        if args.prompt_tail.is_some() == prompt_tokens.is_multiple_of(size) {
            return Err(format!(
                "a prompt of {prompt_tokens} tokens in blocks of {size} has its end, or none"
            ));
        }
        let arrived = micros("ts", event.ts)?;
        Ok(Self {
            arrived,
            first_token: args.first_token.map(|at| micros("first_token", at)).transpose()?,
            finished: Micros(arrived.0 + micros("dur", event.dur)?.0),
            tenant: args.tenant,
            prompt_tokens,
            cached_tokens: tokens("cached_tokens", args.cached_tokens, 0)?.min(prompt_tokens),
            output_tokens,
            max_tokens: tokens("max_tokens", args.max_tokens, 0)?,
            preemptions: args.preemptions,
            prompt_blocks: args.prompt_blocks,
            prompt_tail: args.prompt_tail,
            output_blocks: args.output_blocks,
        })
    }
}

/// Of each kind; what is no such thing says nothing of how long steps take, and is left.
fn steps_of(args: &serde_json::Value) -> Vec<RecordedSteps> {
    let kinds = args.as_object().into_iter().flat_map(|kinds| kinds.values());
    let parsed = kinds.filter_map(|kind| RecordedSteps::deserialize(kind).ok());
    parsed.filter(|steps| steps.steps > 0 && steps.us > 0.0 && steps.us < MICROS_MAX).collect()
}

/// Made-up texts of numbered blocks.
struct Texts {
    block_tokens: u32,
    /// Blocks that begin with the end of a prompt, as they were first seen.
    known: HashMap<u32, Arc<[u32]>>,
}

impl Texts {
    fn block(&self, number: u32) -> Arc<[u32]> {
        let made = || (0..self.block_tokens).map(|at| token(number.into(), at.into())).collect();
        self.known.get(&number).cloned().unwrap_or_else(made)
    }

    fn request(&mut self, request: &RecordedRequest) -> TraceRequest {
        let numbers = |runs: &[(u32, u32)]| -> Vec<u32> {
            runs.iter().flat_map(|(first, count)| *first..*first + *count).collect()
        };
        let mut prompt: Vec<u32> = numbers(&request.prompt_blocks)
            .into_iter()
            .flat_map(|number| self.block(number).to_vec())
            .collect();
        let full = prompt.len();
        // A tail's number is nobody else's.
        let tail = request.prompt_tail.map_or(0, u64::from);
        prompt.extend((0..request.prompt_tokens - full as u32).map(|at| token(tail, at.into())));
        let mut answer: Vec<u32> = Vec::new();
        for (index, number) in numbers(&request.output_blocks).into_iter().enumerate() {
            let begun = if index == 0 { &prompt[full..] } else { &[] };
            let block = match begun.is_empty() || self.known.contains_key(&number) {
                true => self.block(number),
                // The prompt's end, and then the block's own.
                false => {
                    let own = self.block(number);
                    let block: Arc<[u32]> = begun.iter().chain(&own[begun.len()..]).copied().collect();
                    self.known.insert(number, block.clone());
                    block
                }
            };
            answer.extend(&block[begun.len()..]);
        }
        answer.truncate(request.output_tokens as usize);
        TraceRequest {
            arrives: request.arrived,
            tenant: TenantId(request.tenant),
            prompt: prompt.into(),
            output: request.output_tokens.max(1),
            max_tokens: Some(request.max_tokens.max(request.output_tokens).max(1)),
            answer: answer.into(),
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::rng::Rng;

    fn about() -> Value {
        json!({"format": "folio-trace", "version": 1, "blocks": 100, "block_tokens": 16, "max_num_seqs": 8,
            "max_num_batched_tokens": 64, "max_prefill_while_decoding": 16, "max_model_len": 1024})
    }

    fn request(ts: i64, prompt: u32, blocks: Value, tail: Option<u32>) -> Value {
        json!({"ph": "X", "cat": "folio.request", "ts": ts, "dur": 10, "args": {
            "tenant": 0, "prompt_tokens": prompt, "cached_tokens": 0, "output_tokens": 20, "max_tokens": 30,
            "first_token": 5, "prompt_blocks": blocks, "prompt_tail": tail, "output_blocks": [[7, 1]]}})
    }

    fn read(about: Value, events: Value) -> Result<RecordedTrace, RecordedError> {
        RecordedTrace::read(json!({"otherData": about, "traceEvents": events}).to_string().as_bytes())
    }

    #[test]
    fn equal_numbers_are_equal_tokens_also_of_an_answer_that_comes_back() {
        // The second turn has the block across the first's border.
        let events = json!([
            request(50, 56, json!([[0, 2], [7, 1]]), Some(9)),
            request(0, 40, json!([[0, 2]]), Some(5)),
            request(20, 40, json!([[0, 2]]), Some(5)),
            {"ph": "C", "cat": "whatever", "args": {"x": 1}},
            {"ph": "X", "cat": "folio.steps", "ts": 0, "dur": 5, "args": {"decode": {"steps": 2, "us": 100,
                "sequences": 2, "rows": 2, "logit_rows": 2, "kv_positions": 80, "attention": 80}, "mixed": "nothing"}},
        ]);
        let trace = read(about(), events).expect("a trace");
        assert_eq!(trace.requests.iter().map(|request| request.arrived.0).collect::<Vec<_>>(), [0, 20, 50]);
        assert_eq!((trace.steps.len(), trace.steps[0].rows), (1, 2));
        let traffic = trace.traffic();
        assert_eq!(traffic[0].prompt, traffic[1].prompt);
        let said: Vec<u32> = traffic[0].prompt.iter().chain(&*traffic[0].answer).copied().collect();
        assert_eq!(said[..48], traffic[2].prompt[..48]);
        assert_eq!((traffic[0].output, traffic[0].max_tokens), (20, Some(30)));
    }

    #[test]
    fn what_is_wrong_is_named() {
        let wrong = |about: Value, events: Value| read(about, events).expect_err("wrong").to_string();
        let one = |event: Value| wrong(about(), json!([event]));
        let mut newer = about();
        newer["version"] = 2.into();
        assert!(wrong(newer, json!([])).contains("version 2"));
        let mut other = about();
        other["format"] = "else".into();
        assert!(wrong(other, json!([])).contains("else"));
        let mut none = about();
        none["block_tokens"] = 0.into();
        assert!(wrong(none, json!([])).contains("block_tokens is 0"));
        assert!(wrong(Value::Null, json!([])).contains("otherData"));
        let negative = one(request(-5, 40, json!([[0, 2]]), Some(5)));
        assert!(negative.contains("request 1") && negative.contains("-5"), "{negative}");
        let few = one(request(0, 40, json!([[0, 1]]), Some(5)));
        assert!(few.contains("1 blocks") && few.contains("40 tokens"), "{few}");
        let many = one(request(0, 40, json!([[0, 2], [u32::MAX, 9]]), Some(5)));
        assert!(many.contains("too many"), "{many}");
        assert!(one(request(0, 40, json!([[0, 2]]), None)).contains("its end"));
        let mut huge = request(0, 40, json!([[0, 2]]), Some(5));
        huge["args"]["output_tokens"] = (1u64 << 40).into();
        assert!(one(huge).contains("output_tokens is 1099511627776"));
        let bomb: Vec<Value> = (0..9).map(|_| request(0, 1 << 24, json!([[0, 1 << 20]]), None)).collect();
        assert!(wrong(about(), bomb.into()).contains("at most 67108864"));
        let text = json!({"otherData": about(), "traceEvents": []}).to_string();
        for cut in [0, 1, text.len() / 2, text.len() - 1] {
            let error = RecordedTrace::read(&text.as_bytes()[..cut]).expect_err("truncated").to_string();
            assert!(error.contains("no trace of `folio trace record`"), "{error}");
        }
    }

    #[test]
    fn a_spoiled_file_is_refused_or_run() {
        let events = json!([
            request(0, 40, json!([[0, 2]]), Some(5)),
            request(20, 56, json!([[0, 2], [7, 1]]), Some(9)),
            {"ph": "X", "cat": "folio.steps", "args": {"decode": {"steps": 2, "us": 100, "sequences": 2,
                "rows": 2, "logit_rows": 2, "kv_positions": 80, "attention": 80}}},
        ]);
        let text = json!({"otherData": about(), "traceEvents": events}).to_string().into_bytes();
        let mut random = Rng::new(7);
        let (mut refused, mut run) = (0, 0);
        for _ in 0..4000 {
            let mut spoiled = text.clone();
            for _ in 0..1 + random.range(0, 2) {
                let at = random.range(0, spoiled.len() as u64 - 1) as usize;
                // A digit for a digit, so that many files are still JSON.
                spoiled[at] = match spoiled[at].is_ascii_digit() {
                    true => b'0' + random.range(0, 9) as u8,
                    false if random.one_in(8) => random.range(0, 255) as u8,
                    false => spoiled[at],
                };
            }
            match RecordedTrace::read(&*spoiled) {
                Err(_) => refused += 1,
                Ok(trace) => {
                    let traffic = trace.traffic();
                    assert_eq!(traffic.len(), trace.requests.len());
                    for (request, made) in trace.requests.iter().zip(&traffic) {
                        assert_eq!(made.prompt.len() as u32, request.prompt_tokens);
                        assert!(made.answer.len() as u32 <= made.output);
                    }
                    run += 1;
                }
            }
        }
        assert!(refused > 300 && run > 300, "{refused} refused, {run} run");
    }
}
