//! Recorded traffic: what came when, how long it was, and what of it was alike.
//!
//! Owns: reading the formats that others publish ([`crate::recorded`] is Folio's own). Only lengths and arrival times are recorded (and, for
//! Mooncake, which 512-token blocks prompts share), so tokens are made up: equal where the trace says equal.

use std::io::BufRead;
use std::sync::Arc;

use folio_engine::Micros;
use folio_kv::TenantId;
use serde::Deserialize;

use crate::rng::mix;

/// Made-up tokens are below this, and above 0, which ends an answer.
pub(crate) const VOCAB: u64 = 50_000;
/// Tokens per hash id in Mooncake's traces.
const MOONCAKE_BLOCK: usize = 512;
/// After the first request: a year.
const MILLIS_MAX: u64 = 366 * 86_400_000;

#[derive(Clone, Debug, PartialEq)]
pub struct TraceRequest {
    pub arrives: Micros,
    /// Whose turn it is. What is shared tokens alone say.
    pub tenant: TenantId,
    pub prompt: Arc<[u32]>,
    /// Tokens generated, at least 1.
    pub output: u32,
    /// What it asks for, where that is not the same for all.
    pub max_tokens: Option<u32>,
    /// The first tokens of the output, where they are known; the others are made up and like nobody's.
    pub answer: Arc<[u32]>,
}

#[derive(Debug, thiserror::Error)]
pub enum TraceError {
    #[error("the trace cannot be read: {0}")]
    Io(#[from] std::io::Error),
    #[error("line {line} of the trace: {reason}")]
    Line { line: usize, reason: String },
}

/// Tokens of all prompts of a trace: they are made, four bytes each.
pub const TOKENS_MAX: usize = 1 << 26;

/// Whether there is room for a prompt of `more` tokens beside those before it.
pub(crate) fn room(tokens: &mut usize, more: usize) -> Result<(), String> {
    *tokens = tokens.saturating_add(more);
    match *tokens > TOKENS_MAX {
        true => Err(format!("prompts have {tokens} tokens up to here, at most {TOKENS_MAX} are read")),
        false => Ok(()),
    }
}

/// A made-up token: equal sources are equal texts.
pub fn token(source: u64, at: u64) -> u32 {
    1 + (mix(source.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ at) % (VOCAB - 1)) as u32
}

/// Azure's LLM inference traces: `TIMESTAMP,ContextTokens,GeneratedTokens` with a header. Every prompt is its own.
pub fn azure(reader: impl BufRead, limit: usize) -> Result<Vec<TraceRequest>, TraceError> {
    let mut requests: Vec<TraceRequest> = Vec::new();
    let (mut first, mut tokens) = (None, 0);
    for (line, text) in reader.lines().enumerate().skip(1).take(limit) {
        let text = text?;
        let bad = |reason: &str| TraceError::Line { line: line + 1, reason: reason.into() };
        let mut fields = text.trim().split(',');
        let (time, context, output) = (fields.next(), fields.next(), fields.next());
        let seconds = time.and_then(seconds_of_day).ok_or_else(|| bad("no timestamp"))?;
        let context: u64 = context.and_then(|n| n.parse().ok()).ok_or_else(|| bad("no context tokens"))?;
        let output: u32 = output.and_then(|n| n.parse().ok()).ok_or_else(|| bad("no generated tokens"))?;
        room(&mut tokens, usize::try_from(context).unwrap_or(usize::MAX)).map_err(|reason| bad(&reason))?;
        let since = seconds - *first.get_or_insert(seconds);
        requests.push(TraceRequest {
            arrives: Micros((since.max(0.0) * 1e6) as u64),
            tenant: TenantId(0),
            prompt: (0..context.max(1)).map(|at| token(line as u64, at)).collect(),
            output: output.max(1),
            max_tokens: None,
            answer: Arc::default(),
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
    let (mut requests, mut made) = (Vec::new(), 0);
    for (line, text) in reader.lines().enumerate().take(limit) {
        let bad = |reason: String| TraceError::Line { line: line + 1, reason };
        let parsed: MooncakeLine = serde_json::from_str(&text?).map_err(|error| bad(error.to_string()))?;
        if parsed.timestamp > MILLIS_MAX {
            return Err(bad(format!(
                "timestamp is {} milliseconds, at most {MILLIS_MAX} are read",
                parsed.timestamp
            )));
        }
        room(&mut made, parsed.input_length.min(parsed.hash_ids.len() * MOONCAKE_BLOCK)).map_err(bad)?;
        let blocks = parsed.hash_ids.iter();
        let tokens = blocks.flat_map(|id| (0..MOONCAKE_BLOCK as u64).map(move |at| token(*id, at)));
        requests.push(TraceRequest {
            arrives: Micros(parsed.timestamp * 1000),
            tenant: TenantId(0),
            prompt: tokens.take(parsed.input_length.max(1)).collect(),
            output: parsed.output_length.max(1),
            max_tokens: None,
            answer: Arc::default(),
        });
    }
    Ok(requests)
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
        let bomb = azure("h\n2023-11-16 18:15:46.5,99999999999,44\n".as_bytes(), 10).expect_err("too long");
        assert!(bomb.to_string().contains("99999999999") && bomb.to_string().contains("67108864"), "{bomb}");

        let json = r#"{"timestamp": 3, "input_length": 700, "output_length": 5, "hash_ids": [1, 2]}
{"timestamp": 6, "input_length": 600, "output_length": 5, "hash_ids": [1, 9]}"#;
        let requests = mooncake(json.as_bytes(), 10).expect("valid");
        assert_eq!(requests[0].prompt[..512], requests[1].prompt[..512]);
        assert_ne!(requests[0].prompt[512..600], requests[1].prompt[512..600]);
        assert!(mooncake("{}".as_bytes(), 1).is_err());
        let late = json.replace("\"timestamp\": 6", "\"timestamp\": 99999999999999");
        let late = mooncake(late.as_bytes(), 10).expect_err("too late").to_string();
        assert!(late.contains("line 2") && late.contains("99999999999999"), "{late}");
    }
}
