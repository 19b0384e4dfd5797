//! `folio bench kl`: how far a quantized model's predictions are from those of the model it was made from.
//!
//! Owns: the windows of tokens, both models side by side, and the arithmetic of the comparison, in f64. As in llama.cpp's
//! `llama-perplexity --kl-divergence`, tokens are cut into windows that start with an empty cache, and the second half of
//! each is scored. Must never: keep logits longer than a step. Cost: both models in memory, and one prefill of all windows
//! through each.

use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use folio_model::backend::{Batch, Span};
use serde::Serialize;

use super::stats::{Summary, median};
use super::table;
use crate::cli::BenchKlArgs;
use crate::device::{DeviceChoice, GemmBackend};
use crate::load_format::LoadFormat;
use crate::models::{Aliases, Source};
use crate::progress::Bar;
use crate::runtime::{self, WeightArgs, Weights};

/// Rows of a step: logits of that many are in memory at once. It changes no bit of them.
const STEP: usize = 64;
const BLOCK: usize = 16;
/// Texts are cut into at most `--windows`; a book is enough for a million.
const TEXT_BYTES: usize = 256 << 20;

pub fn run(args: &BenchKlArgs) -> Result<()> {
    if args.model.is_none() && args.quantize.is_none() {
        bail!("nothing to compare: give a second MODEL, or --quantize to quantize the first one");
    }
    let aliases = Aliases::default();
    let base_source = Source::parse(Some(&args.base), &aliases)?;
    let other_source = Source::parse(Some(args.model.as_deref().unwrap_or(&args.base)), &aliases)?;
    let (base_files, _held) = base_source.open()?;
    let windows = match (&args.text, &args.tokens) {
        (Some(path), _) => {
            text_windows(path, &runtime::load_tokenizer(&base_files)?, args.context, args.windows)?
        }
        (None, Some(path)) => token_windows(&read_tokens(path)?, args.context, args.windows),
        (None, None) => bail!("give --text or --tokens"),
    };
    ensure!(
        !windows.is_empty(),
        "there are fewer than {} tokens: give more, or a shorter --context",
        args.context
    );
    let mut base = Side::load(&base_source, &base_files, None, args)?;
    let (other_files, _held_too) = other_source.open()?;
    let mut other = Side::load(&other_source, &other_files, args.quantize, args)?;
    drop(other_files);
    let (ours, theirs) = (base.weights.model.vocab, other.weights.model.vocab);
    ensure!(ours == theirs, "these are not the same model: vocabularies of {ours} and {theirs} tokens");
    if let Some(id) = windows.iter().flatten().find(|id| **id as usize >= ours) {
        bail!("token {id} is not in the vocabulary of {ours}");
    }
    let mut tally = Tally::default();
    let bar = Bar::items("windows", windows.len() as u64);
    for window in &windows {
        bar.advance("");
        compare(&mut base, &mut other, window, &mut tally)?;
    }
    bar.finish();
    let report = KlReport::new(args, &base, &other, windows.len(), tally);
    if args.json {
        println!("{}", serde_json::to_string_pretty(&report)?);
    } else {
        print!("{}", report.table());
    }
    Ok(())
}

/// Windows of a text, each beginning with what the model expects at the beginning of a text.
pub(super) fn text_windows(
    path: &Path,
    tokenizer: &folio_text::Tokenizer,
    context: u32,
    most: Option<u32>,
) -> Result<Vec<Vec<u32>>> {
    let text = std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
    let tokens = tokenizer.encode(&text, false, TEXT_BYTES)?;
    let mut windows = token_windows(&tokens, context, most);
    let with_specials = tokenizer.encode("", true, TEXT_BYTES)?;
    let bos = tokenizer.special_tokens().bos.as_ref().map(|token| token.id);
    if let Some(bos) = bos.filter(|bos| with_specials.first() == Some(bos)) {
        windows.iter_mut().for_each(|window| window[0] = bos);
    }
    Ok(windows)
}

/// At most `most` windows of `context` tokens.
pub(super) fn token_windows(tokens: &[u32], context: u32, most: Option<u32>) -> Vec<Vec<u32>> {
    let windows = tokens.chunks_exact(context as usize).map(<[u32]>::to_vec);
    windows.take(most.unwrap_or(u32::MAX) as usize).collect()
}

/// Numbers in any notation that has only digits in numbers: a JSON array, or words.
pub(super) fn read_tokens(path: &Path) -> Result<Vec<u32>> {
    let text = std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
    let words = text.split(|c: char| c.is_whitespace() || matches!(c, '[' | ']' | ','));
    words
        .filter(|word| !word.is_empty())
        .map(|word| word.parse().with_context(|| format!("{}: `{word}` is not a token id", path.display())))
        .collect()
}

/// One of the two models.
struct Side {
    name: String,
    weights: Weights,
    batch: Batch,
}

impl Side {
    fn load(
        source: &Source,
        checkpoint: &folio_model::Checkpoint,
        quantize: Option<crate::cli::Quantize>,
        args: &BenchKlArgs,
    ) -> Result<Self> {
        let load = WeightArgs {
            device: DeviceChoice::Cpu,
            eager: false,
            gemm: GemmBackend::Own,
            format: LoadFormat::Auto,
            threads: args.threads,
            quantize,
            kv_dtype: args.kv_cache_dtype,
            kv_skip: Vec::new(),
            max_model_len: Some(args.context),
            keeps_all: false,
            block_tokens: BLOCK as u32,
            max_rows: STEP,
            max_logit_rows: STEP,
        };
        let mut weights = Weights::load(checkpoint, &load).with_context(|| source.name())?;
        let layout = weights.model.kv_layout.clone();
        let blocks = vec![(args.context as usize).div_ceil(BLOCK); layout.groups.len()];
        weights.backend.allocate_cache(&layout, &blocks)?;
        Ok(Self { name: source.name(), weights, batch: Batch::default() })
    }

    /// Logits of the rows of `tokens` from `scored` on; they follow the `position` tokens computed before.
    fn logits(&mut self, tokens: &[u32], position: usize, scored: usize) -> Result<&[f32]> {
        let blocks = (position + tokens.len()).div_ceil(BLOCK) as u32;
        self.batch.clear();
        self.batch.tokens.extend_from_slice(tokens);
        self.batch.edit_table(0, 0, 0, 0..blocks);
        self.batch.logit_rows.extend(scored as u32..tokens.len() as u32);
        self.batch.spans.push(Span {
            first_row: 0,
            rows: tokens.len() as u32,
            first_position: position as u32,
            slot: 0,
            tentative_from: u32::MAX,
        });
        Ok(self.weights.backend.forward(&self.batch)?)
    }
}

/// Runs one window through both and scores its second half. The last token has no successor to be predicted.
fn compare(base: &mut Side, other: &mut Side, window: &[u32], tally: &mut Tally) -> Result<()> {
    let vocab = base.weights.model.vocab;
    let (first, end) = (window.len() / 2, window.len() - 1);
    for start in (0..end).step_by(STEP) {
        let rows = start..end.min(start + STEP);
        let scored = first.clamp(start, rows.end) - start;
        let tokens = &window[rows.clone()];
        let logits = base.logits(tokens, start, scored)?.chunks_exact(vocab);
        let others = other.logits(tokens, start, scored)?.chunks_exact(vocab);
        let next = &window[start + scored + 1..=rows.end];
        for ((base, other), next) in logits.zip(others).zip(next) {
            tally.add(base, other, *next as usize);
        }
    }
    Ok(())
}

/// What is kept of every scored position.
#[derive(Debug, Default)]
struct Tally {
    /// Nats.
    divergences: Vec<f64>,
    same_top: usize,
    /// Sums of -ln p of the tokens that followed.
    base_surprise: f64,
    surprise: f64,
}

impl Tally {
    /// `next`: the token that followed.
    fn add(&mut self, base: &[f32], other: &[f32], next: usize) {
        let (p, q) = (LogSoftmax::of(base), LogSoftmax::of(other));
        let terms = base.iter().zip(other).map(|(&b, &o)| {
            let log_p = p.at(b);
            log_p.exp() * (log_p - q.at(o))
        });
        self.divergences.push(terms.sum());
        self.same_top += usize::from(p.top == q.top);
        self.base_surprise -= p.at(base[next]);
        self.surprise -= q.at(other[next]);
    }
}

/// A row of logits as logarithms of probabilities.
pub(super) struct LogSoftmax {
    pub(super) top: usize,
    /// ln of the sum of exp of all logits.
    log_sum: f64,
}

impl LogSoftmax {
    pub(super) fn of(logits: &[f32]) -> Self {
        let mut top = 0;
        for (index, logit) in logits.iter().enumerate() {
            if *logit > logits[top] {
                top = index;
            }
        }
        let largest = f64::from(logits[top]);
        let sum: f64 = logits.iter().map(|logit| (f64::from(*logit) - largest).exp()).sum();
        Self { top, log_sum: largest + sum.ln() }
    }

    pub(super) fn at(&self, logit: f32) -> f64 {
        f64::from(logit) - self.log_sum
    }
}

#[derive(Debug, Serialize)]
struct KlReport {
    version: &'static str,
    base: Compared,
    model: Compared,
    backend: String,
    context: u32,
    windows: usize,
    positions: usize,
    /// Nats; of the base's predictions, against the model's.
    mean_kl: f64,
    /// Standard error of the mean.
    mean_kl_error: f64,
    median_kl: f64,
    p99_kl: f64,
    max_kl: f64,
    /// Share of positions where both find the same token most likely.
    same_top: f64,
}

#[derive(Debug, Serialize)]
struct Compared {
    name: String,
    format: String,
    weight_bytes: u64,
    kv: String,
    perplexity: f64,
}

impl KlReport {
    fn new(args: &BenchKlArgs, base: &Side, other: &Side, windows: usize, tally: Tally) -> Self {
        let positions = tally.divergences.len();
        let compared = |side: &Side, surprise: f64| Compared {
            name: side.name.clone(),
            format: side.weights.format.clone(),
            weight_bytes: side.weights.backend.weight_bytes(),
            kv: crate::runtime::formats(&side.weights.model.kv_layout),
            perplexity: (surprise / positions as f64).exp(),
        };
        let summary = Summary::of(tally.divergences.clone());
        let squares: f64 = tally.divergences.iter().map(|d| (d - summary.mean).powi(2)).sum();
        let variance = squares / (positions.max(2) - 1) as f64;
        Self {
            version: env!("CARGO_PKG_VERSION"),
            base: compared(base, tally.base_surprise),
            model: compared(other, tally.surprise),
            backend: base.weights.backend.name(),
            context: args.context,
            windows,
            positions,
            mean_kl: summary.mean,
            mean_kl_error: (variance / positions as f64).sqrt(),
            median_kl: median(tally.divergences),
            p99_kl: summary.p99,
            max_kl: summary.max,
            same_top: tally.same_top as f64 / positions as f64,
        }
    }

    fn table(&self) -> String {
        let (base, model) = (&self.base, &self.model);
        let rows = [
            ("mean", format!("{:.6} +- {:.6}", self.mean_kl, self.mean_kl_error)),
            ("median", format!("{:.6}", self.median_kl)),
            ("99 %", format!("{:.6}", self.p99_kl)),
            ("largest", format!("{:.6}", self.max_kl)),
            ("same most likely token", format!("{:.2} %", 100.0 * self.same_top)),
            ("perplexity of the base", format!("{:.4}", base.perplexity)),
            ("perplexity of the model", format!("{:.4}", model.perplexity)),
        ];
        format!(
            "{} ({}) against {} ({}), KV in {} and {}: {} positions in {} windows of {}\n\n",
            model.name,
            model.format,
            base.name,
            base.format,
            model.kv,
            base.kv,
            self.positions,
            self.windows,
            self.context
        ) + &table::render(
            &["KL divergence (nats)", ""],
            &rows.map(|(what, text)| vec![what.to_owned(), text]),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tally(base: &[f32], other: &[f32], next: usize) -> Tally {
        let mut tally = Tally::default();
        tally.add(base, other, next);
        tally
    }

    #[test]
    fn divergence_is_that_of_the_definition() {
        // Probabilities 1/2, 1/4, 1/4 against 1/4, 1/4, 1/2.
        let (two, base, other) = (2f32.ln(), [2f32.ln(), 0.0, 0.0], [0.0, 0.0, 2f32.ln()]);
        let tally = tally(&base, &other, 0);
        let expected = 0.5 * f64::from(two) - 0.25 * f64::from(two);
        assert!((tally.divergences[0] - expected).abs() < 1e-7, "{:?}", tally.divergences);
        assert!((tally.base_surprise - 2f64.ln()).abs() < 1e-7);
        assert!((tally.surprise - 4f64.ln()).abs() < 1e-7);
        assert_eq!(tally.same_top, 0);
    }

    #[test]
    fn what_is_added_to_all_logits_changes_nothing() {
        let base = [3.0, -1.0, 0.5, 900.0];
        let tally = tally(&base, &base.map(|logit| logit + 64.0), 3);
        assert_eq!((tally.divergences[0], tally.same_top), (0.0, 1));
        assert_eq!(tally.surprise, 0.0);
    }

    #[test]
    fn token_files_are_read_in_both_notations_and_wrong_ones_are_refused() {
        let folder = tempfile::tempdir().expect("folder");
        let path = folder.path().join("tokens");
        let read = |text: &str| {
            std::fs::write(&path, text).expect("written");
            read_tokens(&path)
        };
        assert_eq!(read("[1, 2,\n3]").expect("reads"), [1, 2, 3]);
        assert_eq!(read("1 2 3\n").expect("reads"), [1, 2, 3]);
        for wrong in ["[1, -2]", "1.5", "{\"a\": 1}"] {
            assert!(format!("{:#}", read(wrong).expect_err(wrong)).contains("is not a token id"));
        }
        assert!(read_tokens(&folder.path().join("nothing")).is_err());
    }
}
