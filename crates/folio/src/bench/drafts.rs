//! `folio bench drafts`: how often a draft model or a head is right, and what it costs, with the same number of drafts in every step.
//!
//! Owns: the dialogues that are asked, and the arithmetic. The engine's clock stands still, so that steps have no price and all drafts are verified
//! that there are: what the scheduler makes of them is `folio bench engine --speculate`. Steps are timed here, from the first token of an answer to its last.

use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use folio_cpu::machine::Machine;
use folio_engine::{
    Clock, DraftCounts, Drafter, Event, FinishReason, Micros, Request, SamplingParams, Speculation,
};
use folio_kv::TenantId;
use folio_server::Declared;
use serde::{Deserialize, Serialize};

use super::table;
use crate::cli::BenchDraftsArgs;
use crate::progress::Bar;
use crate::runtime::{DraftCost, Loaded, Runtime, chat_prompt};
use crate::session;

/// No answer takes longer.
const PATIENCE: Duration = Duration::from_secs(3600);
/// The engine has counted what it told.
const COUNTED_WITHIN: Duration = Duration::from_secs(1);
/// Longest dialogue, bytes.
const PROMPT_BYTES_MAX: usize = 1 << 20;

/// Time that stands still.
struct Still;

impl Clock for Still {
    fn now(&self) -> Micros {
        Micros(1)
    }
}

/// One line of what `tools/demo_model/generate.py --jsonl` writes.
#[derive(Deserialize)]
struct Dialogue {
    messages: Vec<serde_json::Value>,
}

#[derive(Debug, Serialize)]
struct Report {
    model: String,
    draft: String,
    version: &'static str,
    drafts: u32,
    read_bytes_per_s: f64,
    /// Bytes that the drafter reads for one draft: of weights, and of its KV for a token of context.
    draft_weight_bytes: u64,
    draft_kv_bytes_per_token: u64,
    figures: Vec<Figure>,
}

/// Of all dialogues at one temperature.
#[derive(Debug, Serialize)]
struct Figure {
    temperature: f32,
    answers: usize,
    tokens: u64,
    /// Steps with drafts, drafts, and those that were right, all and by place.
    steps: u64,
    drafted: u64,
    right: u64,
    right_by_place: Vec<u64>,
    /// 1 + right / steps.
    tokens_per_step: f64,
    /// Seconds of a step without drafts and with them.
    plain_step_s: f64,
    drafting_step_s: f64,
    /// What a step's drafts take at least: the bytes that the drafter reads for them, at the rate at which weights are read.
    roofline_s: f64,
}

pub fn run(args: &BenchDraftsArgs) -> Result<()> {
    let engine = &args.engine;
    engine.refuse_tiers()?;
    let threads = engine.threads.map(|threads| threads as usize);
    let fresh = Machine::measure(threads, None).context("measuring the machine")?;
    let mut loaded = Loaded::open(args.model.as_deref(), engine)?;
    let machine = loaded.weights.limits(fresh)?;
    let runtime = Runtime::serving_with(loaded, engine, &Declared::default(), None, Arc::new(Still))?;
    runtime.report.print();
    let model = runtime.drafter.filter(|drafter| drafter.is_model());
    let Some((drafter, cost)) = model.zip(runtime.draft_cost.as_ref()) else {
        bail!(
            "drafts of text are measured by folio bench engine --speculate; give --draft-model, or --speculate mtp"
        );
    };
    let prompts = prompts(&args.dialogues, &runtime)?;
    let mut report = Report {
        model: runtime.name.clone(),
        draft: cost.name.clone(),
        version: env!("CARGO_PKG_VERSION"),
        drafts: args.drafts,
        read_bytes_per_s: machine.read_bytes_per_s,
        draft_weight_bytes: cost.weight_bytes,
        draft_kv_bytes_per_token: cost.kv_bytes_per_token,
        figures: Vec::new(),
    };
    let bar = Bar::items("measuring", (args.temperature.len() * prompts.len()) as u64);
    for temperature in &args.temperature {
        let measured = measure(&runtime, args, drafter, &prompts, *temperature, &bar)?;
        report.figures.push(measured.figure(*temperature, cost, machine.read_bytes_per_s));
    }
    bar.finish();
    match args.json {
        true => println!("{}", serde_json::to_string_pretty(&report)?),
        false => print!("{}", report.table()),
    }
    Ok(())
}

/// Of a model without a chat template, texts to go on from: what the dialogues say.
fn prompts(path: &Path, runtime: &Runtime) -> Result<Vec<Arc<[u32]>>> {
    let text = std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
    let lines = (1..).zip(text.lines()).filter(|(_, line)| !line.trim().is_empty());
    let prompt = |(number, line): (usize, &str)| -> Result<Arc<[u32]>> {
        let place = || format!("{}, line {number}", path.display());
        let dialogue: Dialogue = serde_json::from_str(line).with_context(place)?;
        let prompt = match &runtime.template {
            Some(template) => {
                chat_prompt(template, &runtime.tokenizer, &dialogue.messages, 0, PROMPT_BYTES_MAX)
            }
            None => {
                let said = dialogue.messages.iter().filter_map(|message| message["content"].as_str());
                let said = said.collect::<Vec<_>>().join("\n");
                runtime.tokenizer.encode(&said, true, PROMPT_BYTES_MAX).map_err(Into::into)
            }
        };
        Ok(prompt.with_context(place)?.into())
    };
    let prompts: Vec<_> = lines.map(prompt).collect::<Result<_>>()?;
    ensure!(!prompts.is_empty(), "{} has no dialogues", path.display());
    Ok(prompts)
}

#[derive(Default)]
struct Measured {
    answers: usize,
    tokens: u64,
    /// Steps behind the first token, of answers with drafts, and the tokens before each, in all of them.
    steps: u64,
    positions: u64,
    plain_s: f64,
    drafting_s: f64,
    drafts: DraftCounts,
    most: u32,
}

fn measure(
    runtime: &Runtime,
    args: &BenchDraftsArgs,
    drafter: Drafter,
    prompts: &[Arc<[u32]>],
    temperature: f32,
    bar: &Bar,
) -> Result<Measured> {
    let counts = || runtime.engine.stats().counters.drafts[drafter as usize];
    let (before, mut right) = (counts(), 0);
    let mut all = Measured { most: args.drafts, ..Measured::default() };
    for (seed, prompt) in (1..).zip(prompts) {
        bar.advance(&format!("temperature {temperature}"));
        let eos_token_ids = runtime.model.eos_token_ids.clone().into();
        let sampling =
            SamplingParams { temperature, seed, eos_token_ids, ..SamplingParams::greedy(args.tokens) };
        let speculation = Speculation::new(drafter, args.drafts, prompt, &[]);
        let drafted = ask(runtime, prompt, &sampling, Some(&speculation))?;
        let plain = ask(runtime, prompt, &sampling, None)?;
        ensure!(
            plain.tokens == drafted.tokens,
            "with drafts the answer is another: this is a defect, please report it"
        );
        let tokens = plain.tokens.len() as u64;
        let steps = tokens.saturating_sub(1 + drafted.right);
        right += drafted.right;
        all.answers += 1;
        all.tokens += tokens;
        all.plain_s += plain.seconds;
        all.drafting_s += drafted.seconds;
        all.steps += steps;
        all.positions += (prompt.len() as u64 + tokens / 2) * steps;
    }
    // The engine tells of its last step a little later than that step's client.
    let until = Instant::now() + COUNTED_WITHIN;
    while counts().accepted - before.accepted < right && Instant::now() < until {
        std::thread::sleep(Duration::from_millis(1));
    }
    let after = counts();
    all.drafts = DraftCounts {
        sequences: after.sequences - before.sequences,
        tokens: after.tokens - before.tokens,
        accepted: after.accepted - before.accepted,
        accepted_by_place: std::array::from_fn(|at| {
            after.accepted_by_place[at] - before.accepted_by_place[at]
        }),
    };
    Ok(all)
}

/// One answer.
struct Answer {
    tokens: Vec<u32>,
    /// Drafts that were right.
    right: u64,
    /// Between the first token and the last.
    seconds: f64,
}

fn ask(
    runtime: &Runtime,
    prompt: &Arc<[u32]>,
    sampling: &SamplingParams,
    speculation: Option<&Speculation>,
) -> Result<Answer> {
    let (sender, events) = mpsc::channel();
    let sink = move |event: Event| sender.send((Instant::now(), event)).is_ok();
    let id = runtime.engine.next_request_id();
    // Nobody finds what another one computed: of a prompt that is found the drafter may know less.
    let root = session::local_root(runtime, &id.0.to_le_bytes());
    let request = Request::new(id, TenantId(0), root, prompt.clone(), sampling.clone());
    let request = Request { speculation: speculation.cloned(), ..request };
    runtime.engine.submit(request, Box::new(sink))?;
    let (mut tokens, mut times) = (Vec::new(), Vec::new());
    let right = loop {
        let (at, event) = events.recv_timeout(PATIENCE).context("the engine does not answer")?;
        match event {
            Event::Token { token, .. } => {
                tokens.push(token.id);
                times.push(at);
            }
            Event::Finished { reason: FinishReason::Length | FinishReason::Stop, timing, .. } => {
                break timing.accepted_draft_tokens.into();
            }
            Event::Finished { reason, error, .. } => {
                bail!("an answer ended with {reason:?}: {}", error.as_deref().unwrap_or("no message"))
            }
            Event::Prompt { .. } | Event::Pooled { .. } => {}
        }
    };
    let ends = times.first().zip(times.last());
    let seconds = ends.map_or(0.0, |(first, last)| last.duration_since(*first).as_secs_f64());
    Ok(Answer { tokens, right, seconds })
}

impl Measured {
    fn figure(&self, temperature: f32, cost: &DraftCost, read_bytes_per_s: f64) -> Figure {
        let of = |value: f64, count: u64| value / count.max(1) as f64;
        let drafts = &self.drafts;
        let positions = of(self.positions as f64, self.steps);
        let bytes = cost.weight_bytes as f64 + positions * cost.kv_bytes_per_token as f64;
        Figure {
            temperature,
            answers: self.answers,
            tokens: self.tokens,
            steps: drafts.sequences,
            drafted: drafts.tokens,
            right: drafts.accepted,
            right_by_place: drafts.accepted_by_place[..self.most as usize].to_vec(),
            tokens_per_step: 1.0 + of(drafts.accepted as f64, drafts.sequences),
            plain_step_s: of(self.plain_s, self.tokens.saturating_sub(self.answers as u64)),
            drafting_step_s: of(self.drafting_s, self.steps),
            roofline_s: of(drafts.tokens as f64, drafts.sequences) * bytes / read_bytes_per_s,
        }
    }
}

impl Report {
    fn table(&self) -> String {
        let row = |figure: &Figure| {
            let by_place = figure.right_by_place.iter();
            let by_place = by_place.map(|right| format!("{:.2}", *right as f64 / figure.steps.max(1) as f64));
            let added = figure.drafting_step_s - figure.plain_step_s;
            vec![
                format!("{}", figure.temperature),
                format!("{} of {}", figure.right, figure.drafted),
                by_place.collect::<Vec<_>>().join(", "),
                format!("{:.2}", figure.tokens_per_step),
                format!("{:.3}", figure.plain_step_s * 1e3),
                format!("{:.3}", figure.drafting_step_s * 1e3),
                format!("{:.3}", added * 1e3),
                format!("{:.3}", figure.roofline_s * 1e3),
            ]
        };
        let header = [
            "temperature",
            "drafts right",
            "by place",
            "1 + right / steps",
            "step, ms",
            "with drafts, ms",
            "more, ms",
            "of that, reading, ms",
        ];
        let rows: Vec<_> = self.figures.iter().map(row).collect();
        let about = format!(
            "{} with {} drafts of {} in every step, each of which reads {:.1} MB of weights; weights are read at {:.1} GB/s\n\n",
            self.model,
            self.drafts,
            self.draft,
            self.draft_weight_bytes as f64 / 1e6,
            self.read_bytes_per_s / 1e9,
        );
        about + &table::render(&header, &rows)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_figure_is_of_steps_with_drafts_and_of_the_bytes_that_they_read() {
        let drafts = DraftCounts { sequences: 10, tokens: 30, accepted: 17, ..DraftCounts::default() };
        let measured = Measured {
            answers: 2,
            tokens: 32,
            steps: 13,
            positions: 1300,
            plain_s: 3.0,
            drafting_s: 2.6,
            drafts,
            most: 3,
        };
        let cost = DraftCost { name: String::new(), weight_bytes: 900, kv_bytes_per_token: 1 };
        let figure = measured.figure(0.7, &cost, 1000.0);
        assert!((figure.tokens_per_step - 2.7).abs() < 1e-9);
        assert!((figure.plain_step_s - 0.1).abs() < 1e-9 && (figure.drafting_step_s - 0.2).abs() < 1e-9);
        // Three drafts, each of 900 bytes of weights and 100 positions.
        assert!((figure.roofline_s - 3.0).abs() < 1e-9);
        assert_eq!(figure.right_by_place.len(), 3);
    }
}
