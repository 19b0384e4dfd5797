//! Quality of the formats of the KV cache.
//!
//! Owns: the loss of a text, position by position, and answers to questions about facts told earlier, in every format of one
//! loaded model. Must never: sample (answers are greedy), or keep the logits of more than a window. Cost: one prefill of the text,
//! and of each question, per format.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use folio_model::backend::{Batch, KvFormat, KvLayout, Span};
use folio_text::{AnswerFormats, ChatInput, ChatTemplate, Tokenizer};
use serde::{Deserialize, Serialize};

use super::{name, render};
use crate::bench::kl::{LogSoftmax, read_tokens, text_windows, token_windows};
use crate::cli::{BenchKvArgs, KvDtype};
use crate::device::{DeviceChoice, GemmBackend};
use crate::load_format::LoadFormat;
use crate::models::{Aliases, Source};
use crate::progress::Bar;
use crate::runtime::{self, WeightArgs, Weights};
use crate::units;

/// Rows of a step.
const STEP: usize = 128;
const BLOCK: usize = 16;
/// Longest answer, in tokens.
const ANSWER: usize = 80;
/// Longest prompt of a question, in bytes of text.
const PROMPT_BYTES_MAX: usize = 1 << 20;

pub(super) fn measure(args: &BenchKvArgs) -> Result<Quality> {
    let source = Source::parse(args.model.as_deref(), &Aliases::default())?;
    let (checkpoint, _held) = source.open()?;
    let tokenizer = runtime::load_tokenizer(&checkpoint)?;
    let windows = match (&args.text, &args.tokens) {
        (Some(path), _) => text_windows(path, &tokenizer, args.context, args.windows)?,
        (None, Some(path)) => token_windows(&read_tokens(path)?, args.context, args.windows),
        (None, None) => Vec::new(),
    };
    ensure!(
        !windows.is_empty() || (args.text.is_none() && args.tokens.is_none()),
        "there are fewer than {} tokens: give more, or a shorter --context",
        args.context
    );
    let questions = match &args.questions {
        Some(path) => read_questions(path)?,
        None => Vec::new(),
    };
    let weights = Weights::load(
        &checkpoint,
        &WeightArgs {
            device: DeviceChoice::Cpu,
            eager: false,
            gemm: GemmBackend::Own,
            format: LoadFormat::Auto,
            threads: args.threads,
            quantize: args.quantize,
            kv_dtype: KvDtype::F16,
            kv_skip: Vec::new(),
            max_model_len: None,
            keeps_all: false,
            block_tokens: BLOCK as u32,
            max_rows: STEP,
            max_logit_rows: STEP,
        },
    )?;
    let vocab = weights.model.vocab;
    if let Some(id) = windows.iter().flatten().find(|id| **id as usize >= vocab) {
        bail!("token {id} is not in the vocabulary of {vocab}");
    }
    let config = &weights.model.config;
    let (head_dim, full) = (config.head_dim, config.full_heads.map(|full| full.head_dim));
    let possible = args.format.iter().filter_map(|format| format.format());
    let mut formats: Vec<KvFormat> = vec![KvFormat::F16];
    formats.extend(possible.filter(|format| *format != KvFormat::F16));
    if let Some(reason) = formats
        .iter()
        .find_map(|format| full.into_iter().chain([head_dim]).find_map(|dim| format.refusal(dim)))
    {
        bail!("{reason}; leave it out with --format");
    }
    let mut model = Reading { weights, batch: Batch::default() };
    let losses = losses(&mut model, &formats, &windows)?;
    let answers = if questions.is_empty() {
        Vec::new()
    } else {
        let template = runtime::load_template(&checkpoint, &tokenizer, None)?;
        let template = template.context("the model has no chat template, which questions need")?;
        let prompts = prompts(&questions, &template, &tokenizer)?;
        answers(&mut model, &formats, &questions, &prompts, &tokenizer)?
    };
    let rows = formats.iter().enumerate().map(|(i, format)| Row {
        format: name(*format),
        bytes_per_token: model.layout(*format).bytes_per_token(),
        loss: losses.get(i).cloned(),
        retrieval: answers.get(i).cloned(),
    });
    Ok(Quality {
        model: source.name(),
        weights: model.weights.format.clone(),
        head_dim,
        context: args.context,
        windows: windows.len(),
        positions: windows.iter().map(|window| window.len() - 1).sum(),
        questions: questions.len(),
        formats: rows.collect(),
    })
}

#[derive(Debug, Serialize)]
pub(super) struct Quality {
    model: String,
    weights: String,
    head_dim: usize,
    context: u32,
    windows: usize,
    positions: usize,
    questions: usize,
    /// f16 first.
    formats: Vec<Row>,
}

#[derive(Debug, Serialize)]
struct Row {
    format: String,
    bytes_per_token: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    loss: Option<Loss>,
    #[serde(skip_serializing_if = "Option::is_none")]
    retrieval: Option<Retrieval>,
}

/// Over all positions of the text. Nats per token; errors are standard errors of the mean.
#[derive(Clone, Debug, Default, Serialize)]
struct Loss {
    nll: f64,
    nll_error: f64,
    /// Less that of f16 at the same position.
    difference: f64,
    difference_error: f64,
    /// Of f16's predictions, against these.
    kl: f64,
    /// Share of positions where both find the same token most likely.
    same_top: f64,
}

/// Right answers by the distance of the fact, in tokens.
#[derive(Clone, Debug, Default, Serialize)]
struct Retrieval {
    by_distance: BTreeMap<u32, Right>,
    all: Right,
}

#[derive(Clone, Copy, Debug, Default, Serialize)]
struct Right {
    asked: usize,
    right: usize,
    /// Answers that are, letter for letter, those of f16.
    same: usize,
}

impl Quality {
    pub(super) fn table(&self) -> String {
        let mut out = format!("{} ({}), head_dim {}\n", self.model, self.weights, self.head_dim);
        let mut rows = Vec::new();
        for row in &self.formats {
            let mut cells = vec![row.format.clone(), units::bytes(row.bytes_per_token as u64)];
            if let Some(loss) = &row.loss {
                cells.push(format!("{:.4}", loss.nll));
                cells.push(format!("{:+.5} ± {:.5}", loss.difference, loss.difference_error));
                cells.push(format!("{:.6}", loss.kl));
                cells.push(format!("{:.2} %", 100.0 * loss.same_top));
            }
            if let Some(retrieval) = &row.retrieval {
                cells.push(format!("{}/{}", retrieval.all.right, retrieval.all.asked));
                cells.push(format!("{}", retrieval.all.same));
            }
            rows.push(cells);
        }
        let mut header = vec!["KV", "per token"];
        if self.positions > 0 {
            header.extend(["nats/token", "less f16", "KL", "same top"]);
        }
        if self.questions > 0 {
            header.extend(["right", "as f16"]);
        }
        out += &render(&header, &rows);
        let first = self.formats.first().and_then(|row| row.retrieval.as_ref());
        if let Some(first) = first {
            let distances: Vec<String> = first.by_distance.keys().map(|d| format!("{d} tokens")).collect();
            let mut header = vec!["right, by distance"];
            header.extend(distances.iter().map(String::as_str));
            let rows: Vec<Vec<String>> = self
                .formats
                .iter()
                .map(|row| {
                    let retrieval = row.retrieval.iter().flat_map(|r| r.by_distance.values());
                    let cells = retrieval.map(|right| format!("{}/{}", right.right, right.asked));
                    std::iter::once(row.format.clone()).chain(cells).collect()
                })
                .collect();
            out += &render(&header, &rows);
        }
        out
    }
}

/// A loaded model that reads one sequence at a time.
struct Reading {
    weights: Weights,
    batch: Batch,
}

impl Reading {
    fn layout(&self, format: KvFormat) -> KvLayout {
        let mut layout = self.weights.model.kv_layout.clone();
        for group in &mut layout.groups {
            group.formats.fill(format);
        }
        layout
    }

    /// An empty cache for sequences of `tokens`.
    fn start(&mut self, format: KvFormat, tokens: usize) -> Result<()> {
        let layout = self.layout(format);
        let blocks = vec![tokens.div_ceil(BLOCK); layout.groups.len()];
        Ok(self.weights.backend.allocate_cache(&layout, &blocks)?)
    }

    /// Logits of the rows of `tokens` from `wanted` on; they follow the `position` tokens computed before.
    fn logits(&mut self, tokens: &[u32], position: usize, wanted: usize) -> Result<&[f32]> {
        let blocks = (position + tokens.len()).div_ceil(BLOCK) as u32;
        let groups = self.weights.model.kv_layout.groups.len();
        self.batch.clear();
        self.batch.tokens.extend_from_slice(tokens);
        (0..groups as u32).for_each(|group| self.batch.edit_table(0, group, 0, 0..blocks));
        self.batch.logit_rows.extend(wanted as u32..tokens.len() as u32);
        self.batch.spans.push(Span {
            first_row: 0,
            rows: tokens.len() as u32,
            first_position: position as u32,
            slot: 0,
            tentative_from: u32::MAX,
        });
        Ok(self.weights.backend.forward(&self.batch)?)
    }

    /// The most likely continuation of a prompt.
    fn answer(&mut self, format: KvFormat, prompt: &[u32]) -> Result<Vec<u32>> {
        let limit = (prompt.len() + ANSWER).min(self.weights.model.max_model_len);
        self.start(format, limit)?;
        let (mut answer, mut position, mut next) = (Vec::new(), 0, 0);
        for tokens in prompt.chunks(STEP) {
            next = top(self.logits(tokens, position, tokens.len() - 1)?);
            position += tokens.len();
        }
        while position < limit && !self.weights.model.eos_token_ids.contains(&next) {
            answer.push(next);
            next = top(self.logits(&[next], position, 0)?);
            position += 1;
        }
        Ok(answer)
    }
}

fn top(logits: &[f32]) -> u32 {
    LogSoftmax::of(logits).top as u32
}

/// Sums over positions of one format.
#[derive(Clone, Debug, Default)]
struct Sums {
    nll: Moments,
    difference: Moments,
    kl: f64,
    same_top: usize,
}

#[derive(Clone, Copy, Debug, Default)]
struct Moments {
    count: f64,
    sum: f64,
    squares: f64,
}

impl Moments {
    fn add(&mut self, x: f64) {
        self.count += 1.0;
        self.sum += x;
        self.squares += x * x;
    }

    fn mean(&self) -> f64 {
        self.sum / self.count
    }

    /// Standard error of the mean.
    fn error(&self) -> f64 {
        let variance = (self.squares / self.count - self.mean().powi(2)).max(0.0);
        (variance / (self.count - 1.0).max(1.0)).sqrt()
    }
}

/// The loss of each format; f16 is the first.
fn losses(model: &mut Reading, formats: &[KvFormat], windows: &[Vec<u32>]) -> Result<Vec<Loss>> {
    if windows.is_empty() {
        return Ok(Vec::new());
    }
    let vocab = model.weights.model.vocab;
    let mut sums = vec![Sums::default(); formats.len()];
    let bar = Bar::items("windows", windows.len() as u64);
    let mut base: Vec<f32> = Vec::new();
    for window in windows {
        bar.advance("");
        let end = window.len() - 1;
        base.clear();
        for (i, format) in formats.iter().enumerate() {
            model.start(*format, end)?;
            for start in (0..end).step_by(STEP) {
                let rows = start..end.min(start + STEP);
                let logits = model.logits(&window[rows.clone()], start, 0)?;
                if i == 0 {
                    base.extend_from_slice(logits);
                }
                let bases = base[rows.start * vocab..].chunks_exact(vocab);
                for ((row, base), next) in
                    logits.chunks_exact(vocab).zip(bases).zip(&window[rows.start + 1..])
                {
                    sums[i].add(base, row, *next as usize);
                }
            }
        }
    }
    bar.finish();
    Ok(sums.iter().map(Sums::loss).collect())
}

impl Sums {
    fn add(&mut self, base: &[f32], row: &[f32], next: usize) {
        let (p, q) = (LogSoftmax::of(base), LogSoftmax::of(row));
        self.nll.add(-q.at(row[next]));
        self.difference.add(p.at(base[next]) - q.at(row[next]));
        let terms = base.iter().zip(row).map(|(&b, &o)| {
            let log_p = p.at(b);
            log_p.exp() * (log_p - q.at(o))
        });
        self.kl += terms.sum::<f64>();
        self.same_top += usize::from(p.top == q.top);
    }

    fn loss(&self) -> Loss {
        Loss {
            nll: self.nll.mean(),
            nll_error: self.nll.error(),
            difference: self.difference.mean(),
            difference_error: self.difference.error(),
            kl: self.kl / self.nll.count,
            same_top: self.same_top as f64 / self.nll.count,
        }
    }
}

/// One line of what `tools/demo_model/generate.py --jsonl` writes.
#[derive(Debug, Deserialize)]
struct Question {
    messages: Vec<serde_json::Value>,
    answer: String,
    distance: u32,
}

fn read_questions(path: &Path) -> Result<Vec<Question>> {
    let text = std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
    let lines = text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
    lines
        .map(|(i, line)| {
            serde_json::from_str(line).with_context(|| format!("{}, line {}", path.display(), i + 1))
        })
        .collect()
}

fn prompts(questions: &[Question], template: &ChatTemplate, tokenizer: &Tokenizer) -> Result<Vec<Vec<u32>>> {
    let kwargs = serde_json::Map::new();
    let prompt = |question: &Question| -> Result<Vec<u32>> {
        let prompt = template.render(&ChatInput {
            messages: &question.messages,
            tools: None,
            documents: None,
            add_generation_prompt: true,
            kwargs: &kwargs,
            now_unix_s: 0,
            formats: AnswerFormats::default(),
        })?;
        // The template writes the special tokens itself.
        Ok(tokenizer.encode_prompt(&prompt, false, PROMPT_BYTES_MAX)?)
    };
    questions.iter().map(prompt).collect()
}

/// What each format answers; f16 is the first.
fn answers(
    model: &mut Reading,
    formats: &[KvFormat],
    questions: &[Question],
    prompts: &[Vec<u32>],
    tokenizer: &Tokenizer,
) -> Result<Vec<Retrieval>> {
    let mut results = vec![Retrieval::default(); formats.len()];
    let bar = Bar::items("questions", questions.len() as u64);
    for (question, prompt) in questions.iter().zip(prompts) {
        bar.advance("");
        ensure!(
            prompt.len() < model.weights.model.max_model_len,
            "a question of {} tokens is longer than the model's {}",
            prompt.len(),
            model.weights.model.max_model_len
        );
        let mut base = String::new();
        for (i, format) in formats.iter().enumerate() {
            let answer = tokenizer.decode(&model.answer(*format, prompt)?, true);
            let (right, same) = (contains(&answer, &question.answer), i == 0 || answer == base);
            let result = &mut results[i];
            for count in [&mut result.all, result.by_distance.entry(question.distance).or_default()] {
                count.asked += 1;
                count.right += usize::from(right);
                count.same += usize::from(same);
            }
            if i == 0 {
                base = answer;
            }
        }
    }
    bar.finish();
    Ok(results)
}

/// Whether `value` stands in `reply` as a word of its own, as `tools/demo_model/evaluate.py` judges.
fn contains(reply: &str, value: &str) -> bool {
    let part = |c: char| c.is_alphanumeric() || c == '_' || c == '-';
    reply.match_indices(value).any(|(at, _)| {
        let before = reply[..at].chars().next_back().is_some_and(part);
        let after = reply[at + value.len()..].chars().next().is_some_and(part);
        !before && !after
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_counts_as_a_word_of_its_own() {
        for (reply, value, right) in [
            ("The code is 9914.", "9914", true),
            ("The code is 19914.", "9914", false),
            ("Her name is Anna-Lena.", "Lena", false),
            ("Her name is Lena-Anna.", "Lena", false),
            ("It is Lenas.", "Lena", false),
            ("Lena", "Lena", true),
            ("Lenas, no: Lena", "Lena", true),
        ] {
            assert_eq!(contains(reply, value), right, "{reply}");
        }
    }

    #[test]
    fn the_same_logits_differ_by_nothing_and_others_by_their_loss() {
        let mut sums = Sums::default();
        let base = [1.0, 3.0, -2.0];
        for next in [0, 1] {
            sums.add(&base, &base, next);
        }
        let loss = sums.loss();
        assert_eq!((loss.difference, loss.difference_error, loss.same_top), (0.0, 0.0, 1.0));
        assert!(loss.kl.abs() < 1e-15 && loss.nll > 0.0 && loss.nll_error > 0.0);
        let mut sums = Sums::default();
        sums.add(&base, &[3.0, 1.0, -2.0], 1);
        assert!((sums.loss().difference - 2.0).abs() < 1e-6, "two nats less likely");
        assert_eq!(sums.loss().same_top, 0.0);
    }
}
