//! `folio bench engine`: prefill and decode rates of the engine in this process, next to the machine's measured limits.
//!
//! Owns: the workloads. What limits them is in `limits`; the read bandwidth is that of the weights themselves, measured where
//! they lie.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use folio_cpu::machine::Machine;
use folio_engine::{Event, FinishReason, Request, SamplingParams, Speculation};
use folio_kv::TenantId;
use serde::Serialize;

use super::limits::{Costs, Limit};
use super::speculation::{self, Drafted};
use super::stats::{Random, Summary, median};
use super::table;
use super::texts::{self, TextFigure};
use crate::cli::BenchEngineArgs;
use crate::progress::Bar;
use crate::runtime::{Loaded, Runtime};
use crate::{session, units};

/// No figure of the engine takes longer.
const PATIENCE: Duration = Duration::from_secs(3600);

pub fn run(args: &BenchEngineArgs) -> Result<()> {
    let mut engine = args.engine.clone();
    let most = args.batch.iter().copied().max().unwrap_or(1).max(1);
    // What was not asked for is the device's to say, unless the batches need more than any device has by itself.
    let least = engine.sizes(false);
    let reach = |asked: Option<u32>, least: u32| if least < most { Some(most) } else { asked };
    engine.max_num_seqs = reach(engine.max_num_seqs, least.max_num_seqs);
    engine.max_num_batched_tokens = reach(engine.max_num_batched_tokens, least.max_num_batched_tokens);
    engine.refuse_tiers()?;
    let threads = engine.threads.map(|threads| threads as usize);
    eprintln!("measuring the machine ...");
    let fresh = Machine::measure(threads, None).context("measuring the machine")?;
    let mut loaded = Loaded::open(args.model.as_deref(), &engine)?;
    // Not while something is measured.
    if let Some(unsaved) = loaded.weights.unsaved.take() {
        unsaved.save(&AtomicBool::new(false));
    }
    let machine = loaded.weights.limits(fresh)?;
    let runtime = Runtime::serving(loaded, &engine, &folio_server::Declared::default(), None)?;
    runtime.report.print();
    let mut report =
        Bench { runtime: &runtime, args, random: Random::new(1), tenant: TenantId(0) }.run(&machine)?;
    report.fresh_read_bytes_per_s = fresh.read_bytes_per_s;
    if args.json {
        println!("{}", serde_json::to_string_pretty(&report)?);
    } else {
        print!("{}", report.table());
    }
    Ok(())
}

#[derive(Debug, Serialize)]
struct Report {
    model: String,
    backend: String,
    device: String,
    /// 0: a GPU.
    threads: usize,
    /// What most of the weights are stored as, and quantized to while loading.
    format: String,
    weight_bytes: u64,
    kv_bytes: u64,
    version: &'static str,
    /// Of the weights themselves, and of a fresh buffer: memory need not be equally fast everywhere.
    read_bytes_per_s: f64,
    fresh_read_bytes_per_s: f64,
    f32_flop_per_s: f64,
    int8_op_per_s: f64,
    prefill: Vec<Figure>,
    decode: Vec<Figure>,
    /// With `--speculate`.
    speculation: Vec<Drafted>,
    /// With `--texts`, and then alone.
    texts: Vec<TextFigure>,
    /// What did not fit, and why.
    skipped: Vec<String>,
}

/// One measured rate.
#[derive(Debug, Serialize)]
struct Figure {
    batch: u32,
    /// Tokens of each sequence: of the prompt when prefilling, of the context when decoding.
    tokens: u32,
    /// Median over the repetitions.
    tokens_per_s: f64,
    min_tokens_per_s: f64,
    max_tokens_per_s: f64,
    limit_tokens_per_s: f64,
    /// "bytes" or "multiplications".
    limited_by: &'static str,
    share_of_limit: f64,
}

pub(super) struct Bench<'a> {
    pub(super) runtime: &'a Runtime,
    pub(super) args: &'a BenchEngineArgs,
    pub(super) random: Random,
    /// Whose the next requests are.
    pub(super) tenant: TenantId,
}

impl Bench<'_> {
    fn run(mut self, machine: &Machine) -> Result<Report> {
        let costs = Costs::of(&self.runtime.model, self.runtime.report.weight_bytes);
        let mut report = Report {
            model: self.runtime.name.clone(),
            backend: self.runtime.report.backend.clone(),
            device: self.runtime.report.device.clone(),
            threads: machine.threads,
            format: self.runtime.format.clone(),
            weight_bytes: self.runtime.report.weight_bytes,
            kv_bytes: self.runtime.report.kv_bytes,
            version: env!("CARGO_PKG_VERSION"),
            read_bytes_per_s: machine.read_bytes_per_s,
            fresh_read_bytes_per_s: machine.read_bytes_per_s,
            f32_flop_per_s: machine.f32_flop_per_s,
            int8_op_per_s: machine.int8_op_per_s,
            prefill: Vec::new(),
            decode: Vec::new(),
            speculation: Vec::new(),
            texts: Vec::new(),
            skipped: Vec::new(),
        };
        let drafter = self.runtime.drafter.filter(|_| self.args.engine.names_drafter());
        if !self.args.texts.is_empty() {
            let drafter = drafter.context("--texts measures drafts: give --speculate")?;
            let bar = Bar::items("measuring", self.args.texts.len() as u64);
            for folder in &self.args.texts {
                bar.advance(&folder.display().to_string());
                report.texts.extend(self.texts(drafter, folder)?);
            }
            bar.finish();
            return Ok(report);
        }
        let drafted = drafter.map_or(0, |_| self.args.batch.len());
        let figures = self.args.prefill.len() + self.args.batch.len() * self.args.depth.len() + drafted;
        let bar = Bar::items("measuring", figures as u64);
        for &tokens in &self.args.prefill {
            bar.advance(&format!("prefill of {tokens}"));
            if let Err(reason) = self.fits(1, tokens, 1) {
                report.skipped.push(format!("prefill of {tokens}: {reason}"));
                continue;
            }
            let rates = self.repeat(true, |bench| bench.prefill(tokens))?;
            report.prefill.push(figure(1, tokens, rates, costs.prefill(machine, tokens.into())));
        }
        for &depth in &self.args.depth {
            for &batch in &self.args.batch {
                bar.advance(&format!("decode of {batch} at {depth}"));
                if let Err(reason) = self.fits(batch, depth.max(1), self.args.decode + 1) {
                    report.skipped.push(format!("decode of {batch} at {depth}: {reason}"));
                    continue;
                }
                // Computing the prompts warms up what there is to warm up, and may take long.
                let rates = self.repeat(depth <= 1, |bench| bench.decode(batch, depth))?;
                // In the middle of the measured tokens.
                let middle = f64::from(depth.max(1)) + f64::from(self.args.decode) / 2.0;
                report.decode.push(figure(batch, depth, rates, costs.decode(machine, batch.into(), middle)));
            }
        }
        if let Some(drafter) = drafter {
            for &batch in &self.args.batch {
                bar.advance(&format!("speculation, batch {batch}"));
                let measured = self.speculation(drafter, batch)?;
                measured.map_or_else(
                    |reason| report.skipped.push(format!("speculation, batch {batch}: {reason}")),
                    |drafted| report.speculation.extend(drafted),
                );
            }
        }
        bar.finish();
        Ok(report)
    }

    /// A warm-up if wanted, then the repetitions.
    fn repeat(
        &mut self,
        warm_up: bool,
        mut measure: impl FnMut(&mut Self) -> Result<f64>,
    ) -> Result<Vec<f64>> {
        if warm_up {
            measure(self)?;
        }
        (0..self.args.repeat).map(|_| measure(self)).collect()
    }

    pub(super) fn fits(&self, batch: u32, prompt: u32, output: u32) -> std::result::Result<(), String> {
        let length = u64::from(prompt) + u64::from(output);
        let limit = u64::from(self.runtime.max_model_len());
        if batch == 0 || prompt == 0 {
            return Err("nothing to do".into());
        }
        if length > limit {
            return Err(format!("{length} tokens are more than the context of {limit}"));
        }
        let block = u64::from(self.args.engine.block_size);
        let needed = u64::from(batch) * (length.div_ceil(block) + 1);
        let blocks = u64::from(self.runtime.report.kv_blocks);
        if needed > blocks {
            return Err(format!("{needed} KV blocks needed, {blocks} there are"));
        }
        Ok(())
    }

    /// Tokens nobody has seen: nothing of them is cached.
    pub(super) fn prompt(&mut self, tokens: u32) -> Arc<[u32]> {
        let vocabulary = self.runtime.model.vocab.min(self.runtime.tokenizer.vocab_size()).max(1) as u64;
        (0..tokens).map(|_| self.random.below(vocabulary) as u32).collect()
    }

    /// Prompt tokens per second.
    fn prefill(&mut self, tokens: u32) -> Result<f64> {
        let prompt = self.prompt(tokens);
        let started = Instant::now();
        let times = self.generate(vec![prompt], 1)?;
        Ok(f64::from(tokens) / times[0][0].duration_since(started).as_secs_f64())
    }

    /// Tokens per second of all sequences together, while all of them decode.
    fn decode(&mut self, batch: u32, depth: u32) -> Result<f64> {
        let prompts: Vec<Arc<[u32]>> = (0..batch).map(|_| self.prompt(depth.max(1))).collect();
        if depth > 1 {
            // The prompts' KV is computed first, so that all sequences then begin in the same step.
            for prompt in &prompts {
                self.generate(vec![prompt.clone()], 1)?;
            }
        }
        let times = self.generate(prompts, self.args.decode)?;
        together(&times).context("the sequences never decoded together: give a larger --decode")
    }

    /// When each token of each prompt arrived.
    fn generate(&self, prompts: Vec<Arc<[u32]>>, max_tokens: u32) -> Result<Vec<Vec<Instant>>> {
        let prompts = prompts.into_iter().map(|prompt| (prompt, None)).collect();
        Ok(self
            .answer(prompts, &SamplingParams::greedy(max_tokens))?
            .into_iter()
            .map(|answer| answer.times)
            .collect())
    }

    /// What becomes of prompts that are sent together.
    pub(super) fn answer(
        &self,
        prompts: Vec<(Arc<[u32]>, Option<Speculation>)>,
        sampling: &SamplingParams,
    ) -> Result<Vec<Answer>> {
        let (sender, events) = mpsc::channel();
        let mut answers: Vec<Answer> = prompts.iter().map(|_| Answer::default()).collect();
        let mut running = prompts.len();
        for (index, (prompt, speculation)) in prompts.into_iter().enumerate() {
            let sender = sender.clone();
            let sink = move |event: Event| sender.send((index, Instant::now(), event)).is_ok();
            let request = Request { speculation, ..self.request(prompt, sampling.clone()) };
            self.runtime.engine.submit(request, Box::new(sink))?;
        }
        drop(sender);
        while running > 0 {
            let (index, at, event) = events.recv_timeout(PATIENCE).context("the engine does not answer")?;
            let answer = &mut answers[index];
            match event {
                Event::Prompt { .. } | Event::Pooled { .. } => {}
                Event::Token { token, .. } => {
                    answer.times.push(at);
                    answer.tokens.push(token.id);
                }
                Event::Finished { reason: FinishReason::Length, timing, .. } => {
                    (answer.drafts, answer.right) = (timing.draft_tokens, timing.accepted_draft_tokens);
                    running -= 1;
                }
                Event::Finished { reason, error, .. } => {
                    bail!("a sequence ended with {reason:?}: {}", error.as_deref().unwrap_or("no message"))
                }
            }
        }
        Ok(answers)
    }

    fn request(&self, prompt: Arc<[u32]>, sampling: SamplingParams) -> Request {
        let id = self.runtime.engine.next_request_id();
        let root = session::local_root(self.runtime, &[]);
        Request::new(id, self.tenant, root, prompt, sampling)
    }
}

/// What became of one prompt.
#[derive(Default)]
pub(super) struct Answer {
    pub times: Vec<Instant>,
    pub tokens: Vec<u32>,
    pub drafts: u32,
    pub right: u32,
}

/// Tokens per second of all sequences, while all of them decode: the sum of what each makes between its last token before that time and
/// its last one in it. (Tokens of a step arrive one after the other, and with drafts several of a sequence: so each has whole steps.)
/// `None` where one of them makes none.
pub(super) fn together(times: &[Vec<Instant>]) -> Option<f64> {
    let from = *times.iter().filter_map(|times| times.first()).max()?;
    let to = *times.iter().filter_map(|times| times.last()).min()?;
    let rate = |times: &Vec<Instant>| {
        let arrived = |until| times.partition_point(|at| *at <= until);
        let (before, after) = (arrived(from), arrived(to));
        let more = after.checked_sub(before).filter(|more| *more > 0)?;
        Some(more as f64 / times[after - 1].duration_since(times[before - 1]).as_secs_f64())
    };
    times.iter().map(rate).sum()
}

fn figure(batch: u32, tokens: u32, rates: Vec<f64>, limit: Limit) -> Figure {
    let min = rates.iter().copied().fold(f64::INFINITY, f64::min);
    let max = Summary::of(rates.clone()).max;
    let rate = median(rates);
    Figure {
        batch,
        tokens,
        tokens_per_s: rate,
        min_tokens_per_s: min,
        max_tokens_per_s: max,
        limit_tokens_per_s: limit.tokens_per_s,
        limited_by: limit.by,
        share_of_limit: rate / limit.tokens_per_s,
    }
}

impl Report {
    fn table(&self) -> String {
        let mut out = format!(
            "{} on {}, {}: {} of weights ({})\nmeasured limits: weights read at {:.1} GB/s, {}\n\n",
            self.model,
            self.backend,
            self.device,
            units::bytes(self.weight_bytes),
            self.format,
            self.read_bytes_per_s / 1e9,
            match self.threads {
                0 => format!("{:.0} TFLOP/s of matrix instructions in bf16", self.f32_flop_per_s / 1e12),
                _ => format!(
                    "{:.0} GFLOP/s in f32, {:.0} Gop/s in bytes",
                    self.f32_flop_per_s / 1e9,
                    self.int8_op_per_s / 1e9
                ),
            }
        );
        let row = |name: String, figure: &Figure| {
            vec![
                name,
                format!("{:.1}", figure.tokens_per_s),
                format!("{:.1}..{:.1}", figure.min_tokens_per_s, figure.max_tokens_per_s),
                format!("{:.1}", figure.limit_tokens_per_s),
                figure.limited_by.to_owned(),
                format!("{:.0} %", figure.share_of_limit * 100.0),
            ]
        };
        let prefill = self.prefill.iter().map(|f| row(format!("prefill {}", f.tokens), f));
        let decode =
            self.decode.iter().map(|f| row(format!("decode batch {} depth {}", f.batch, f.tokens), f));
        let rows: Vec<Vec<String>> = prefill.chain(decode).collect();
        if !rows.is_empty() {
            out += &table::render(&["", "tokens/s", "min..max", "limit", "limited by", "reached"], &rows);
        }
        if !self.speculation.is_empty() {
            out += &format!("\n{}", speculation::table(&self.speculation));
        }
        if !self.texts.is_empty() {
            out += &texts::table(&self.texts);
        }
        for skipped in &self.skipped {
            out += &format!("skipped {skipped}\n");
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    /// Tokens of sequences that begin at these steps and make as many tokens, a step every 10 ms; those of a step arrive 0.1 ms apart.
    fn steps(begins: &[u64], tokens: u64) -> Vec<Vec<Instant>> {
        let start = Instant::now();
        let at = |i: usize, step: u64| start + Duration::from_micros(10_000 * step + 100 * i as u64);
        begins.iter().enumerate().map(|(i, &b)| (b..b + tokens).map(|step| at(i, step)).collect()).collect()
    }

    #[test]
    fn the_rate_of_sequences_together_is_that_of_their_steps() {
        for (begins, tokens) in [(&[0; 32][..], 16), (&[0; 8], 4), (&[0], 2), (&[0, 3, 1], 12)] {
            let rate = together(&steps(begins, tokens)).expect("a rate");
            let want = 100.0 * begins.len() as f64;
            assert!((rate / want - 1.0).abs() < 1e-6, "{begins:?}: {rate}, not {want}");
        }
    }

    #[test]
    fn who_is_alone_at_the_end_and_what_comes_in_one_step_do_not_count() {
        let start = Instant::now();
        // Steps of four tokens, and of one, of 10 ms each; the second sequence goes on for as long again.
        let at = |step: u64, token: u64| start + Duration::from_micros(10_000 * step + token);
        let fast = (0..10).flat_map(|step| (0..4).map(move |token| at(step, token))).collect();
        let slow = (0..20).map(|step| at(step, 9)).collect();
        let rate = together(&[fast, slow]).expect("a rate");
        assert!((rate / 500.0 - 1.0).abs() < 0.01, "{rate}");
    }

    #[test]
    fn sequences_that_never_decode_together_have_no_rate() {
        assert_eq!(together(&steps(&[0, 4], 4)), None);
        assert_eq!(together(&steps(&[0], 1)), None);
        assert_eq!(together(&[vec![], vec![]]), None);
    }
}
