//! What a load generator sends: lengths, texts and arrival times, from a seed, a file or a trace.
//!
//! Owns: the plan of every request before the first is sent. Texts are made from word lists by the request's own seed when
//! it is sent, so a trace of gigabytes of prompts needs no memory. Invariant: the same arguments give the same load.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use serde::Deserialize;

use super::stats::Random;

/// `64` or `100..900`, both ends included.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Range {
    pub low: u32,
    pub high: u32,
}

impl Range {
    pub fn parse(text: &str) -> Result<Self, String> {
        let number =
            |part: &str| part.trim().parse::<u32>().map_err(|_| format!("`{text}` is not a length or A..B"));
        let (low, high) = match text.split_once("..") {
            Some((low, high)) => (number(low)?, number(high)?),
            None => (number(text)?, number(text)?),
        };
        if low == 0 || low > high {
            return Err(format!("`{text}` must be at least 1 and ascending"));
        }
        Ok(Self { low, high })
    }

    fn draw(self, random: &mut Random) -> u32 {
        self.low + random.below(u64::from(self.high - self.low) + 1) as u32
    }
}

/// One request to be sent.
#[derive(Clone, Debug, PartialEq)]
pub struct Item {
    /// After the start; `None`: as soon as a place is free.
    pub at: Option<Duration>,
    pub output_tokens: u32,
    pub prompt: Prompt,
}

#[derive(Clone, Debug, PartialEq)]
pub enum Prompt {
    Text(String),
    /// Consecutive pieces of made-up text: (seed, tokens). Equal seeds are equal texts.
    Pieces(Vec<(u64, u32)>),
}

impl Prompt {
    /// Made-up tokens of this range, as many as asked for; `None` for a given text.
    pub fn ids(&self, ids: Range) -> Option<Vec<u32>> {
        let Prompt::Pieces(pieces) = self else { return None };
        let mut out = Vec::new();
        for &(seed, tokens) in pieces {
            append_ids(&mut out, seed, tokens, ids);
        }
        Some(out)
    }

    /// `words_per_token` of the tokenizer at the other end.
    pub fn text(&self, words_per_token: f64) -> String {
        match self {
            Prompt::Text(text) => text.clone(),
            Prompt::Pieces(pieces) => {
                let mut out = String::new();
                for &(seed, tokens) in pieces {
                    let words = (f64::from(tokens) * words_per_token).round().max(1.0) as usize;
                    append_words(&mut out, seed, words);
                }
                out
            }
        }
    }
}

/// Equal seeds are equal tokens.
fn append_ids(out: &mut Vec<u32>, seed: u64, tokens: u32, ids: Range) {
    let mut random = Random::new(seed);
    out.extend((0..tokens).map(|_| ids.draw(&mut random)));
}

/// `words` made-up words.
pub fn append_words(out: &mut String, seed: u64, words: usize) {
    let mut random = Random::new(seed);
    for _ in 0..words {
        if !out.is_empty() {
            out.push(' ');
        }
        out.push_str(WORDS[random.below(WORDS.len() as u64) as usize]);
    }
}

/// Short common words: about one token each in most vocabularies.
const WORDS: [&str; 64] = [
    "the", "of", "and", "to", "in", "is", "you", "that", "it", "he", "was", "for", "on", "are", "as", "with",
    "his", "they", "at", "be", "this", "have", "from", "or", "one", "had", "by", "word", "but", "not",
    "what", "all", "were", "we", "when", "your", "can", "said", "there", "use", "an", "each", "which", "she",
    "do", "how", "their", "if", "will", "up", "other", "about", "out", "many", "then", "them", "these", "so",
    "some", "her", "would", "make", "like", "him",
];

/// Random lengths, optionally with one of a few common beginnings.
#[derive(Clone, Debug)]
pub struct Synthetic {
    pub requests: usize,
    pub input: Range,
    pub output: Range,
    /// (how many, tokens of each).
    pub prefixes: Option<(u32, u32)>,
    pub rate: Option<f64>,
    pub seed: u64,
}

impl Synthetic {
    pub fn items(&self) -> Vec<Item> {
        let mut random = Random::new(self.seed);
        let mut arrivals = Arrivals::new(self.rate, self.seed);
        (0..self.requests)
            .map(|index| {
                let mut pieces = Vec::with_capacity(2);
                if let Some((count, tokens)) = self.prefixes {
                    // Prefixes have small seeds of their own, so that every request with one has the same text.
                    pieces.push((self.seed ^ (1 + index as u64 % u64::from(count.max(1))), tokens));
                }
                pieces.push((random.draw(), self.input.draw(&mut random)));
                Item {
                    at: arrivals.next(),
                    output_tokens: self.output.draw(&mut random),
                    prompt: Prompt::Pieces(pieces),
                }
            })
            .collect()
    }
}

struct Arrivals {
    rate: Option<f64>,
    random: Random,
    now_s: f64,
}

impl Arrivals {
    fn new(rate: Option<f64>, seed: u64) -> Self {
        Self { rate, random: Random::new(seed ^ 0xA221), now_s: 0.0 }
    }

    fn next(&mut self) -> Option<Duration> {
        let rate = self.rate?;
        let at = self.now_s;
        self.now_s += self.random.exponential(rate);
        Some(Duration::from_secs_f64(at))
    }
}

/// Prompts of a file, over and over until there are enough.
pub fn from_file(
    path: &Path,
    requests: usize,
    output: Range,
    rate: Option<f64>,
    seed: u64,
) -> Result<Vec<Item>> {
    let text = std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
    let jsonl = path.extension().is_some_and(|extension| extension == "jsonl");
    let mut prompts = Vec::new();
    for (index, line) in text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
        if !jsonl {
            prompts.push(line.to_owned());
            continue;
        }
        let line: PromptLine =
            serde_json::from_str(line).with_context(|| format!("{}, line {}", path.display(), index + 1))?;
        let prompt = line.prompt.or_else(|| line.turns?.into_iter().next());
        prompts.push(prompt.with_context(|| {
            format!("{}, line {}: neither \"prompt\" nor \"turns\"", path.display(), index + 1)
        })?);
    }
    if prompts.is_empty() {
        bail!("{} has no prompt", path.display());
    }
    let mut random = Random::new(seed);
    let mut arrivals = Arrivals::new(rate, seed);
    Ok((0..requests)
        .map(|index| Item {
            at: arrivals.next(),
            output_tokens: output.draw(&mut random),
            prompt: Prompt::Text(prompts[index % prompts.len()].clone()),
        })
        .collect())
}

#[derive(Deserialize)]
struct PromptLine {
    prompt: Option<String>,
    turns: Option<Vec<String>>,
}

/// What to take of a trace.
#[derive(Clone, Copy, Debug)]
pub struct TraceOptions {
    pub requests: usize,
    /// Trace seconds are divided by this.
    pub speed: f64,
    /// Longer requests (input and output together) are left out.
    pub max_len: Option<u32>,
    pub seed: u64,
}

impl TraceOptions {
    fn keeps(&self, input: u32, output: u32) -> bool {
        self.max_len.is_none_or(|limit| u64::from(input) + u64::from(output) <= u64::from(limit))
    }
}

/// Items, and how many requests were left out for their length before enough were found.
pub type Trace = (Vec<Item>, usize);

/// `TIMESTAMP,ContextTokens,GeneratedTokens`, as published in AzurePublicDataset.
pub fn from_azure(text: &str, options: TraceOptions) -> Result<Trace> {
    let mut items: Vec<Item> = Vec::new();
    let (mut left_out, mut first, mut last) = (0, None, 0.0);
    for (index, line) in text.lines().enumerate().skip(1).filter(|(_, line)| !line.trim().is_empty()) {
        if items.len() == options.requests {
            break;
        }
        let place = || format!("line {} of the Azure trace: {line}", index + 1);
        let fields: Vec<&str> = line.trim().split(',').collect();
        let [time, input, output] = fields.as_slice() else { bail!("{} has not three fields", place()) };
        let seconds = clock_seconds(time).with_context(place)?;
        let (input, output): (u32, u32) =
            (input.parse().with_context(place)?, output.parse().with_context(place)?);
        if !options.keeps(input, output) {
            left_out += 1;
            continue;
        }
        // The trace is in order; a clock that goes back has passed midnight.
        let since = seconds - *first.get_or_insert(seconds);
        last = if since < last - 43_200.0 { since + 86_400.0 } else { since };
        items.push(Item {
            at: Some(Duration::from_secs_f64(last.max(0.0) / options.speed)),
            output_tokens: output.max(1),
            prompt: Prompt::Pieces(vec![(options.seed ^ (index as u64) << 20, input.max(1))]),
        });
    }
    if items.is_empty() {
        bail!("the Azure trace has no request that fits");
    }
    Ok((items, left_out))
}

/// Seconds since midnight of `2023-11-16 18:15:46.6805900`.
fn clock_seconds(time: &str) -> Result<f64> {
    let clock = time.split_once([' ', 'T']).map_or(time, |(_, clock)| clock);
    let fields: Vec<&str> = clock.trim_end_matches('Z').split(':').collect();
    let [hours, minutes, seconds] = fields.as_slice() else { bail!("`{time}` is no time") };
    Ok(hours.parse::<f64>()? * 3600.0 + minutes.parse::<f64>()? * 60.0 + seconds.parse::<f64>()?)
}

/// Tokens of one Mooncake block.
const MOONCAKE_BLOCK: u32 = 512;

#[derive(Deserialize)]
struct MooncakeLine {
    timestamp: f64,
    input_length: u32,
    output_length: u32,
    hash_ids: Vec<u64>,
}

/// One JSON object a line; equal `hash_ids` become equal texts, so that prefixes are shared as in the trace.
pub fn from_mooncake(text: &str, options: TraceOptions) -> Result<Trace> {
    let mut items = Vec::new();
    let (mut left_out, mut first) = (0, None);
    for (index, line) in text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
        if items.len() == options.requests {
            break;
        }
        let request: MooncakeLine = serde_json::from_str(line)
            .with_context(|| format!("line {} of the Mooncake trace", index + 1))?;
        if !options.keeps(request.input_length, request.output_length) {
            left_out += 1;
            continue;
        }
        let since_ms = request.timestamp - *first.get_or_insert(request.timestamp);
        let mut left = request.input_length.max(1);
        let mut pieces = Vec::with_capacity(request.hash_ids.len());
        for id in request.hash_ids {
            let tokens = left.min(MOONCAKE_BLOCK);
            if tokens == 0 {
                break;
            }
            pieces.push((options.seed ^ id.wrapping_mul(0x9E37_79B9), tokens));
            left -= tokens;
        }
        items.push(Item {
            at: Some(Duration::from_secs_f64((since_ms / 1000.0).max(0.0) / options.speed)),
            output_tokens: request.output_length.max(1),
            prompt: Prompt::Pieces(pieces),
        });
    }
    if items.is_empty() {
        bail!("the Mooncake trace has no request that fits");
    }
    Ok((items, left_out))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn synthetic(prefixes: Option<(u32, u32)>, rate: Option<f64>) -> Synthetic {
        let (input, output) = (Range { low: 10, high: 20 }, Range { low: 5, high: 5 });
        Synthetic { requests: 200, input, output, prefixes, rate, seed: 7 }
    }

    #[test]
    fn ranges_are_read() {
        assert_eq!(Range::parse("64"), Ok(Range { low: 64, high: 64 }));
        assert_eq!(Range::parse("100..900"), Ok(Range { low: 100, high: 900 }));
        for wrong in ["", "0", "9..3", "a..b", "-1", "1..2..3"] {
            assert!(Range::parse(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn the_same_seed_is_the_same_load() {
        let items = synthetic(None, Some(5.0)).items();
        assert_eq!(items, synthetic(None, Some(5.0)).items());
        assert!(items.windows(2).all(|pair| pair[0].at <= pair[1].at));
        let lengths: Vec<usize> = items.iter().map(|i| i.prompt.text(1.0).split(' ').count()).collect();
        assert!(lengths.iter().all(|n| (10..=20).contains(n)));
        assert!(lengths.contains(&10) && lengths.contains(&20));
        let texts: std::collections::HashSet<String> = items.iter().map(|i| i.prompt.text(1.0)).collect();
        assert_eq!(texts.len(), 200, "no two prompts are the same");
    }

    #[test]
    fn prompts_of_ids_have_exact_lengths_and_share_their_beginnings() {
        let (low, high) = (1000, 1999);
        let items = synthetic(Some((4, 50)), None).items();
        let ids: Vec<_> =
            items.iter().map(|item| item.prompt.ids(Range { low, high }).expect("made up")).collect();
        assert!(ids.iter().all(|ids| (60..=70).contains(&ids.len())));
        assert!(ids.iter().flatten().all(|id| (low..=high).contains(id)));
        assert!(ids[0][..50] == ids[4][..50] && ids[0][..50] != ids[1][..50] && ids[0][50..] != ids[4][50..]);
        assert_eq!(Prompt::Text("given".into()).ids(Range { low, high }), None);
    }

    #[test]
    fn shared_prefixes_are_shared() {
        let items = synthetic(Some((4, 50)), None).items();
        let beginnings: std::collections::HashSet<Vec<String>> = items
            .iter()
            .map(|item| item.prompt.text(1.0).split(' ').take(50).map(str::to_owned).collect())
            .collect();
        assert_eq!(beginnings.len(), 4);
        assert!(items.iter().all(|item| item.at.is_none()));
    }

    #[test]
    fn an_azure_trace_keeps_lengths_and_times() {
        let text = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 23:59:58.5000000,374,44\n\
                    2023-11-16 23:59:59.5000000,9000,1\n2023-11-17 00:00:00.5000000,12,0\n";
        let options = TraceOptions { requests: 10, speed: 2.0, max_len: Some(4096), seed: 0 };
        let (items, left_out) = from_azure(text, options).expect("reads");
        assert_eq!((items.len(), left_out), (2, 1));
        assert_eq!(items[0].prompt.text(1.0).split(' ').count(), 374);
        assert_eq!((items[0].output_tokens, items[1].output_tokens), (44, 1));
        assert_eq!(items[1].at, Some(Duration::from_secs(1)));
        assert!(from_azure("TIMESTAMP\nx,1\n", options).is_err());
    }

    #[test]
    fn a_mooncake_trace_shares_what_the_trace_shares() {
        let text = r#"{"timestamp": 1000, "input_length": 700, "output_length": 9, "hash_ids": [1, 2]}
{"timestamp": 4000, "input_length": 900, "output_length": 9, "hash_ids": [1, 3]}"#;
        let options = TraceOptions { requests: 10, speed: 1.0, max_len: None, seed: 5 };
        let (items, _) = from_mooncake(text, options).expect("reads");
        let texts: Vec<Vec<String>> =
            items.iter().map(|item| item.prompt.text(1.0).split(' ').map(str::to_owned).collect()).collect();
        assert_eq!((texts[0].len(), texts[1].len()), (700, 900));
        assert_eq!(texts[0][..512], texts[1][..512]);
        assert_ne!(texts[0][512..600], texts[1][512..600]);
        assert_eq!(items[1].at, Some(Duration::from_secs(3)));
    }

    #[test]
    fn prompts_come_from_files() {
        let folder = tempfile::tempdir().expect("folder");
        let plain = folder.path().join("p.txt");
        std::fs::write(&plain, "one\n\ntwo\n").expect("file");
        let output = Range { low: 3, high: 3 };
        let items = from_file(&plain, 3, output, None, 0).expect("reads");
        let texts: Vec<String> = items.iter().map(|item| item.prompt.text(1.0)).collect();
        assert_eq!(texts, ["one", "two", "one"]);
        let lines = folder.path().join("p.jsonl");
        std::fs::write(&lines, "{\"prompt\": \"a\"}\n{\"turns\": [\"b\", \"c\"]}\n").expect("file");
        let items = from_file(&lines, 2, output, None, 0).expect("reads");
        assert_eq!(items[1].prompt.text(1.0), "b");
        std::fs::write(&lines, "{\"text\": \"a\"}\n").expect("file");
        assert!(from_file(&lines, 2, output, None, 0).is_err());
    }
}
