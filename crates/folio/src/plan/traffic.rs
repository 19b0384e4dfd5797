//! What is asked of the machine: made-up requests of some lengths, or recorded ones.
//!
//! Owns: the same requests at any rate. Must never: say how long a step takes. Bounded by requests and by tokens of all prompts.

use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, Result, bail};
use folio_engine::Micros;
use folio_kv::TenantId;
use folio_sim::recorded::RecordedTrace;
use folio_sim::trace::{self, TOKENS_MAX, TraceRequest, token};

use crate::bench::workload::{Item, Prompt, Range, Synthetic};
use crate::units;

/// Requests of one simulation.
pub const REQUESTS_MAX: usize = 20_000;
/// Bytes of a file by which its kind is told.
const PEEKED: usize = 4096;
/// Of a trace's file, unpacked.
const FILE_BYTES_MAX: u64 = 1 << 30;

/// See the module documentation.
#[derive(Clone, Debug)]
pub enum Traffic {
    Made {
        prompt: Range,
        output: Range,
        /// (how many, tokens of each): common beginnings.
        prefixes: Option<(u32, u32)>,
        seed: u64,
    },
    Recorded {
        requests: Vec<TraceRequest>,
    },
}

impl Traffic {
    /// Azure's (CSV), Mooncake's (a line of JSON a request) or Folio's own recording, plain or gzipped; at most `limit` requests.
    pub fn open(path: &Path, limit: usize) -> Result<Self> {
        let requests = read(path, limit.min(REQUESTS_MAX)).with_context(|| path.display().to_string())?;
        if requests.is_empty() {
            bail!("{} has no request", path.display());
        }
        Ok(Self::Recorded { requests })
    }

    /// At most `count` requests that come at `rate` a second, as Poisson has it, or in the rhythm of the trace; `None`: all at once.
    pub fn requests(&self, count: usize, rate: Option<f64>) -> Vec<TraceRequest> {
        match self {
            Self::Made { .. } => self.items(count, rate).iter().map(as_recorded).collect(),
            Self::Recorded { requests } => {
                let requests = &requests[..count.min(requests.len())];
                let own = self.own_rate().unwrap_or(1.0);
                let at = |request: &TraceRequest| match rate {
                    Some(rate) => Micros((request.arrives.0 as f64 * own / rate) as u64),
                    None => Micros(0),
                };
                requests.iter().map(|of| TraceRequest { arrives: at(of), ..of.clone() }).collect()
            }
        }
    }

    /// The same as a load generator has it; none of what was recorded.
    pub fn items(&self, count: usize, rate: Option<f64>) -> Vec<Item> {
        match self {
            Self::Made { prompt, output, prefixes, seed } => {
                let (input, output, prefixes) = (*prompt, *output, *prefixes);
                Synthetic { requests: count, input, output, prefixes, rate, seed: *seed }.items()
            }
            Self::Recorded { .. } => Vec::new(),
        }
    }

    /// Requests a second, as recorded; `None`: they are made at any rate, or came all at once.
    pub fn own_rate(&self) -> Option<f64> {
        let Self::Recorded { requests } = self else { return None };
        let span_s = requests.iter().map(|request| request.arrives.0).max()? as f64 / 1e6;
        (span_s > 0.0).then(|| requests.len() as f64 / span_s)
    }

    /// Mean tokens of a prompt and of an output, and the longest sum of both.
    pub fn lengths(&self) -> (f64, f64, u32) {
        match self {
            Self::Made { prompt, output, prefixes, .. } => {
                let mean = |range: &Range| (f64::from(range.low) + f64::from(range.high)) / 2.0;
                let prefix = prefixes.map_or(0, |(_, tokens)| tokens);
                let longest = prefix.saturating_add(prompt.high).saturating_add(output.high);
                (f64::from(prefix) + mean(prompt), mean(output), longest)
            }
            Self::Recorded { requests } => {
                let n = requests.len().max(1) as f64;
                let prompt = |request: &TraceRequest| request.prompt.len() as u32;
                let longest =
                    requests.iter().map(|request| prompt(request).saturating_add(request.output)).max();
                (
                    requests.iter().map(|request| f64::from(prompt(request))).sum::<f64>() / n,
                    requests.iter().map(|request| f64::from(request.output)).sum::<f64>() / n,
                    longest.unwrap_or(0),
                )
            }
        }
    }

    /// Most requests of one simulation, so that the prompts fit.
    pub fn most(&self) -> usize {
        match self {
            Self::Made { .. } => {
                let (prompt, ..) = self.lengths();
                REQUESTS_MAX.min((TOKENS_MAX as f64 / 4.0 / prompt.max(1.0)) as usize)
            }
            Self::Recorded { requests } => requests.len(),
        }
    }

    /// Prompts may begin alike.
    pub fn shares(&self) -> bool {
        match self {
            Self::Made { prefixes, .. } => prefixes.is_some(),
            Self::Recorded { .. } => true,
        }
    }

    pub fn described(&self) -> String {
        let range = |range: &Range| match range.low == range.high {
            true => units::count(range.low.into()),
            false => format!("{} to {}", units::count(range.low.into()), units::count(range.high.into())),
        };
        match self {
            Self::Made { prompt, output, prefixes, .. } => {
                let prefixes = prefixes.map_or(String::new(), |(count, tokens)| {
                    format!(" behind one of {count} beginnings of {} tokens", units::count(tokens.into()))
                });
                format!("prompts of {}{prefixes}, outputs of {}", range(prompt), range(output))
            }
            Self::Recorded { requests } => {
                let (prompt, output, _) = self.lengths();
                let rate =
                    self.own_rate().map_or("all at once".to_owned(), |rate| format!("{rate:.2} a second"));
                format!(
                    "{} recorded requests, {rate}: prompts of {prompt:.0} and outputs of {output:.0} in the mean",
                    requests.len()
                )
            }
        }
    }
}

/// A made-up request as a trace has it.
pub fn as_recorded(item: &Item) -> TraceRequest {
    let pieces: &[(u64, u32)] = match &item.prompt {
        Prompt::Pieces(pieces) => pieces,
        Prompt::Text(_) => &[],
    };
    let tokens = pieces.iter().flat_map(|(seed, count)| (0..*count).map(|at| token(*seed, at.into())));
    TraceRequest {
        arrives: Micros(item.at.map_or(0, |at| at.as_micros() as u64)),
        tenant: TenantId(0),
        prompt: tokens.collect(),
        output: item.output_tokens,
        max_tokens: Some(item.output_tokens),
        answer: Arc::default(),
    }
}

/// What is in a trace's file, plain or gzipped.
pub fn text(path: &Path) -> Result<impl BufRead + use<>> {
    let mut file = BufReader::new(File::open(path).context("cannot be read")?);
    let packed = file.fill_buf().context("cannot be read")?.starts_with(&[0x1f, 0x8b]);
    let text: Box<dyn Read> =
        if packed { Box::new(flate2::read::GzDecoder::new(file)) } else { Box::new(file) };
    Ok(BufReader::new(text.take(FILE_BYTES_MAX)))
}

fn read(path: &Path, limit: usize) -> Result<Vec<TraceRequest>> {
    let mut text = text(path)?;
    let beginning = text.fill_buf().context("cannot be read")?;
    let is_recorded = ["traceEvents", "otherData", "displayTimeUnit"]
        .iter()
        .any(|key| beginning.windows(key.len()).take(PEEKED).any(|part| part == key.as_bytes()));
    let is_json = beginning.iter().find(|byte| !byte.is_ascii_whitespace()) == Some(&b'{');
    if is_recorded {
        let mut requests = RecordedTrace::read(text)?.traffic();
        requests.truncate(limit);
        return Ok(requests);
    }
    Ok(match is_json {
        true => trace::mooncake(text, limit)?,
        false => trace::azure(text, limit)?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chat(prefixes: Option<(u32, u32)>) -> Traffic {
        let (prompt, output) = (Range { low: 100, high: 300 }, Range { low: 50, high: 50 });
        Traffic::Made { prompt, output, prefixes, seed: 1 }
    }

    #[test]
    fn the_same_requests_come_at_any_rate() {
        let traffic = chat(Some((2, 64)));
        let (slow, fast) = (traffic.requests(100, Some(1.0)), traffic.requests(100, Some(10.0)));
        assert!(slow.iter().zip(&fast).all(|(one, other)| one.prompt == other.prompt));
        let last = |requests: &[TraceRequest]| requests[99].arrives.0 as f64;
        assert!((last(&slow) / last(&fast) - 10.0).abs() < 0.01);
        assert!(traffic.requests(9, None).iter().all(|request| request.arrives.0 == 0));
        // Every other begins alike.
        assert_eq!(slow[0].prompt[..64], slow[2].prompt[..64]);
        assert_ne!(slow[0].prompt[..64], slow[1].prompt[..64]);
        assert_eq!(traffic.lengths(), (264.0, 50.0, 414));
    }

    #[test]
    fn traces_are_told_apart_and_bounded() {
        let folder = tempfile::tempdir().expect("folder");
        let file = folder.path().join("trace");
        let lines: String = (0..10)
            .map(|at| {
                format!(
                    "{{\"timestamp\":{},\"input_length\":600,\"output_length\":5,\"hash_ids\":[1,2]}}\n",
                    at * 1000
                )
            })
            .collect();
        std::fs::write(&file, lines).expect("written");
        let traffic = Traffic::open(&file, 5).expect("Mooncake's");
        assert_eq!(traffic.lengths(), (600.0, 5.0, 605));
        assert_eq!(traffic.own_rate(), Some(5.0 / 4.0));
        let twice = traffic.requests(5, Some(2.5));
        assert_eq!(twice[4].arrives, Micros(2_000_000));
        std::fs::write(&file, "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.5,374,44\n")
            .expect("written");
        assert_eq!(Traffic::open(&file, 5).expect("Azure's").lengths(), (374.0, 44.0, 418));
        for wrong in ["", "{\n", "nothing\nnothing\n"] {
            std::fs::write(&file, wrong).expect("written");
            let error = format!("{:#}", Traffic::open(&file, 5).expect_err(wrong));
            assert!(error.contains("trace"), "{error}");
        }
    }
}
