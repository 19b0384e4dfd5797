//! `folio bench plan`: what a plan says of loads, beside what the engine in this process does under them.
//!
//! Owns: the cells (a kind of traffic and a load each), which nothing was fitted to, and their order. All of them take turns, several times, and
//! steps are measured one kind at a time before and behind each kind of traffic: what is planned of a turn is planned with steps of that
//! time, so that a slow minute of the machine is in both. Compared are medians over the turns.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use folio_engine::{Activity, Micros, StepWork, Work};
use folio_model::kv_format::KvFormat;
use folio_sim::StepTime;
use folio_sim::replay::Served;
use folio_sim::retention::Policy;
use folio_sim::trace::TraceRequest;
use serde::Serialize;

use super::curve::{Measured, StepCurve};
use super::load::{World, at_of, knee_of, steady_rate, times};
use super::machine::Machine;
use super::model::{PlannedModel, WeightFormat};
use super::setup::{Choice, Setup};
use super::steps::{Round, Samples, Steps, medians, samples, work};
use super::traffic::{Traffic, as_recorded};
use crate::bench::arrivals::{Answered, Arrival, answer};
use crate::bench::others::{NOTABLE, ProcessorTime};
use crate::bench::stats::median;
use crate::bench::table;
use crate::bench::workload::{Item, Prompt, Range};
use crate::cli::{BenchPlanArgs, EngineArgs, Quantize};
use crate::progress::Bar;
use crate::runtime::Runtime;

/// Loads of each kind of traffic, as shares of the knee that the plan names.
const LOADS: [f64; 2] = [0.5, 0.8];
/// Requests of a run, whatever the rate is.
const REQUESTS: [f64; 2] = [40.0, 3000.0];

/// What a plan is held to: the median and the worst error of times per token, that of knees, and that of times to the first token.
const BOUNDS: [(&str, f64); 4] =
    [("median of TPOT", 0.15), ("worst of TPOT", 0.30), ("worst knee", 0.15), ("worst of TTFT", 0.25)];

/// Rounds of steps before and behind each kind of traffic, which take no longer than one of its runs, or than this where that is longer.
const ROUNDS: usize = 2;
const ROUNDS_TIME: Duration = Duration::from_secs(10);

/// Of tokens of prompts, those that were found.
const CACHED: &str = "cached, %";
/// A step of each kind in the mean; planned is what the curve says of the steps that were run. What is wrong there is the curve's fault, and
/// the rest of what is wrong elsewhere the simulator's.
const STEPS: [(Activity, &str); Activity::STEPS] = [
    (Activity::Prefill, "a step of prompts, us"),
    (Activity::Decode, "a step that decodes, us"),
    (Activity::Mixed, "a step of both, us"),
];
/// Of the knee, and of a load.
const OF_KNEE: &[&str] = &["knee, requests/s"];
const OF_LOAD: &[&str] = &["TTFT, ms", "TPOT, ms", "end to end, ms", CACHED];

/// (name, tokens of prompts, of outputs, common beginnings).
type Kind = (&'static str, Range, Range, Option<(u32, u32)>);

const KINDS: [Kind; 4] = [
    ("chat", Range { low: 100, high: 300 }, Range { low: 100, high: 100 }, None),
    ("long prompts", Range { low: 900, high: 1100 }, Range { low: 50, high: 50 }, None),
    ("long outputs", Range { low: 20, high: 60 }, Range { low: 200, high: 300 }, None),
    ("shared beginnings", Range { low: 40, high: 80 }, Range { low: 60, high: 60 }, Some((4, 512))),
];

/// A figure as it was planned and measured: medians over the turns.
#[derive(Clone, Debug, Serialize)]
struct Compared {
    traffic: &'static str,
    /// Of the knee; `None`: the knee itself.
    load: Option<f64>,
    what: &'static str,
    planned: f64,
    measured: f64,
    /// Each turn's.
    planned_turns: Vec<f64>,
    turns: Vec<f64>,
    error: f64,
}

struct Cell {
    traffic: &'static str,
    load: Option<f64>,
    figures: Vec<Figure>,
    /// Its steps, of each turn.
    steps: Vec<Samples>,
}

struct Figure {
    what: &'static str,
    /// Of each turn.
    planned: Vec<f64>,
    measured: Vec<f64>,
}

/// One kind of traffic at one load in one turn.
struct Run {
    items: Vec<Item>,
    /// Requests a second that come; `None`: all at once.
    rate: Option<f64>,
    measured: Vec<f64>,
    /// What its steps computed, and how long they took.
    before: Work,
    after: Work,
}

pub fn run(args: &BenchPlanArgs) -> Result<()> {
    args.engine.refuse_tiers()?;
    // Where all come at once, all wait.
    let (max_queued_requests, max_queued_tokens) = (2 * REQUESTS[1] as u32, u64::MAX >> 1);
    let engine = EngineArgs { max_queued_requests, max_queued_tokens, ..args.engine.clone() };
    let runtime = Runtime::start(args.model.as_deref(), &engine)?;
    let setup = setup(args, &runtime)?;
    let mut bench = Bench {
        seconds: args.seconds,
        steps: Steps::new(&runtime, &setup.choice.sizes())?,
        runtime: &runtime,
        setup: &setup,
        texts: 0,
    };
    let kinds: Vec<&Kind> = KINDS.iter().filter(|kind| bench.fits(kind)).collect();
    let of_kind = |(name, ..): &&Kind| {
        let loads = std::iter::once(None).chain(LOADS.map(Some));
        loads.map(|load| Cell::new(name, load)).collect::<Vec<_>>()
    };
    let mut cells: Vec<Vec<Cell>> = kinds.iter().map(of_kind).collect();
    let bar = Bar::items("measuring", u64::from(args.repeat) * kinds.len() as u64);
    let before = ProcessorTime::now();
    let mut rounds = bench.rounds()?;
    let mut latest = rounds.len();
    for _ in 0..args.repeat {
        for (kind, cells) in kinds.iter().zip(&mut cells) {
            bar.advance(kind.0);
            let runs = bench.runs(kind, &curve(&rounds[rounds.len() - latest..])?)?;
            let behind = bench.rounds()?;
            let around = latest + behind.len();
            latest = behind.len();
            rounds.extend(behind);
            let world = setup.world(curve(&rounds[rounds.len() - around..])?);
            for (cell, run) in cells.iter_mut().zip(&runs) {
                cell.take(run, &world)?;
            }
        }
    }
    bar.finish();
    let others = before.and_then(|before| Some(ProcessorTime::now()?.others_since(before)));
    // What was run, for who asks why a plan is wrong.
    let runs =
        |cell: &Cell| serde_json::json!({"traffic": cell.traffic, "load": cell.load, "steps": cell.steps});
    let runs: Vec<_> = cells.iter().flatten().map(runs).collect();
    let compared: Vec<Compared> = cells.into_iter().flatten().flat_map(Cell::compared).collect();
    let found = errors(&compared);
    if args.json {
        let bounds = BOUNDS.iter().zip(found);
        let bounds = bounds.map(|((what, most), error)| serde_json::json!({"what": what, "error": error, "most": most, "within": error <= *most}));
        let steps = medians(&rounds);
        let report = serde_json::json!({
            "version": env!("CARGO_PKG_VERSION"),
            "model": runtime.name,
            "device": runtime.report.device,
            "seconds": args.seconds,
            "turns": args.repeat,
            "others": others,
            "worst_error_of_fit": Measured::of(&steps).map(|curve| curve.worst),
            "steps": steps,
            "cells": compared,
            "runs": runs,
            "bounds": bounds.collect::<Vec<_>>(),
        });
        println!("{report:#}");
    } else {
        print!("{}", text(&compared, found));
        if let Some(share) = others.filter(|share| *share > NOTABLE) {
            println!("other processes had {:.0} % of the processors meanwhile", 100.0 * share);
        }
    }
    Ok(())
}

fn curve(rounds: &[Round]) -> Result<StepCurve> {
    let curve = Measured::of(&medians(rounds))
        .context("too few kinds of steps were measured: give more --seconds")?;
    Ok(StepCurve::Measured(curve))
}

/// What the engine has, as a plan has it.
fn setup(args: &BenchPlanArgs, runtime: &Runtime) -> Result<Setup> {
    let model = PlannedModel::open(args.model.as_deref().unwrap_or("demo"))?;
    let engine = &args.engine;
    let weights = match engine.quantize {
        None => model.stored,
        Some(Quantize::Q8) => WeightFormat::Q8,
        Some(Quantize::Q4) => WeightFormat::Q4,
    };
    // The engine has its memory already.
    let memory_bytes = 2 * (model.weight_bytes(weights) + runtime.report.kv_bytes);
    let machine = Machine::running(&runtime.report.device, runtime.report.on_gpu, memory_bytes);
    let own = runtime.model.kv_layout.groups.first().and_then(|group| group.formats.first()).copied();
    let choice = Choice {
        machine,
        weights,
        kv: engine.kv_cache_dtype.format().or(own).unwrap_or(KvFormat::BF16),
        block_tokens: engine.block_size,
        max_model_len: Some(runtime.max_model_len()),
        max_num_seqs: engine.max_num_seqs,
        max_num_batched_tokens: engine.max_num_batched_tokens,
        max_prefill_while_decoding: engine.max_prefill_while_decoding,
        kv_cache_memory: Some(runtime.report.kv_bytes),
        kv_cache_share: None,
        host_kv: None,
        drafts: None,
        policy: Policy::Folio,
    };
    Setup::new(&model, choice, 1)
}

/// What measures.
struct Bench<'a> {
    seconds: u32,
    runtime: &'a Runtime,
    setup: &'a Setup,
    steps: Steps<'a>,
    /// Another number, other texts, so that the cache has nothing of a run before.
    texts: u64,
}

impl Bench<'_> {
    fn fits(&self, (name, prompt, output, prefixes): &Kind) -> bool {
        let (.., longest) = traffic(*prompt, *output, *prefixes).lengths();
        let fits = longest <= self.setup.max_model_len;
        if !fits {
            eprintln!("{name}: {longest} tokens are more than the context of {}", self.setup.max_model_len);
        }
        fits
    }

    fn rounds(&mut self) -> Result<Vec<Round>> {
        let end = Instant::now() + Duration::from_secs(self.seconds.into()).max(ROUNDS_TIME);
        let mut rounds = Vec::new();
        while rounds.len() < ROUNDS && (rounds.is_empty() || Instant::now() < end) {
            rounds.push(self.steps.round(end, |_| ())?);
        }
        Ok(rounds)
    }

    /// The knee, and the loads at shares of the one that is planned with `curve`.
    fn runs(&mut self, (_, prompt, output, prefixes): &Kind, curve: &StepCurve) -> Result<Vec<Run>> {
        let (world, traffic) = (self.setup.world(curve.clone()), traffic(*prompt, *output, *prefixes));
        let count = |rate: f64| (rate * f64::from(self.seconds)).clamp(REQUESTS[0], REQUESTS[1]) as usize;
        // Enough to fill the batch several times: the first guess says how many.
        let guess = knee_of(&world, &planned(&traffic.items(REQUESTS[0] as usize, None)))?;
        let least = (4 * self.setup.choice.sizes().max_num_seqs as usize).min(REQUESTS[1] as usize);
        let burst = traffic.items(count(guess).max(least), None);
        let knee = knee_of(&world, &planned(&burst))?;
        let mut arrivals = vec![(burst, None)];
        arrivals.extend(
            LOADS.map(|load| (traffic.items(count(load * knee), Some(load * knee)), Some(load * knee))),
        );
        arrivals.into_iter().map(|(items, rate)| self.run(items, rate)).collect()
    }

    fn run(&mut self, items: Vec<Item>, rate: Option<f64>) -> Result<Run> {
        self.texts += 1;
        let vocabulary = self.runtime.model.vocab.min(self.runtime.tokenizer.vocab_size()).max(1) as u32;
        let arrival = |item: &Item| Arrival {
            at: item.at.unwrap_or(Duration::ZERO),
            prompt: prompt(&item.prompt, self.texts, vocabulary),
            output: item.output_tokens,
        };
        let arrivals: Vec<Arrival> = items.iter().map(arrival).collect();
        let before = work(self.runtime);
        let answers = answer(self.runtime, &arrivals)?;
        let after = work(self.runtime);
        let mut measured = match rate {
            None => vec![knee(&answers)],
            Some(_) => {
                let served =
                    arrivals.iter().zip(&answers).filter_map(|(arrival, answer)| served(arrival, answer));
                let (ttft, tpot, e2e) = times(served.collect());
                let [ttft, tpot, e2e] = [ttft, tpot, e2e].map(|spread| 1e3 * spread.p50);
                let cached: f64 = answers.iter().map(|answer| f64::from(answer.cached_tokens)).sum();
                let prompts: usize = arrivals.iter().map(|arrival| arrival.prompt.len()).sum();
                vec![ttft, tpot, e2e, 100.0 * cached / prompts.max(1) as f64]
            }
        };
        measured.extend(mean_steps(&before, &after, |_, us| us as f64));
        Ok(Run { items, rate, measured, before, after })
    }
}

fn traffic(prompt: Range, output: Range, prefixes: Option<(u32, u32)>) -> Traffic {
    Traffic::Made { prompt, output, prefixes, seed: 7 }
}

fn planned(items: &[Item]) -> Vec<TraceRequest> {
    items.iter().map(as_recorded).collect()
}

/// Microseconds of a step of each kind in the mean between two moments, where `us` says it of all of one kind (and is told what was
/// measured); nothing where there was none.
fn mean_steps(before: &Work, after: &Work, us: impl Fn(&StepWork, u64) -> f64) -> [f64; Activity::STEPS] {
    STEPS.map(|(activity, _)| {
        let work = after.steps[activity as usize].since(&before.steps[activity as usize]);
        let measured = after.us(activity) - before.us(activity);
        if work.steps > 0 { us(&work, measured) / work.steps as f64 } else { 0.0 }
    })
}

impl Cell {
    fn new(traffic: &'static str, load: Option<f64>) -> Self {
        let figure = |what: &&'static str| Figure { what, planned: Vec::new(), measured: Vec::new() };
        let names = if load.is_some() { OF_LOAD } else { OF_KNEE };
        let steps = STEPS.map(|(_, what)| what);
        let figures = names.iter().chain(&steps).map(figure).collect();
        Self { traffic, load, figures, steps: Vec::new() }
    }

    /// What one turn measured, and what `world` says of the same requests.
    fn take(&mut self, run: &Run, world: &World) -> Result<()> {
        self.steps.push(samples(&run.before, &run.after));
        let mut found = match run.rate {
            None => vec![knee_of(world, &planned(&run.items))?],
            Some(rate) => {
                let point = at_of(world, &planned(&run.items), rate)?;
                let [ttft, tpot, e2e] =
                    [point.ttft_s, point.tpot_s, point.e2e_s].map(|spread| 1e3 * spread.p50);
                vec![ttft, tpot, e2e, 100.0 * point.cached]
            }
        };
        found.extend(mean_steps(&run.before, &run.after, |work, _| world.cost.us(work) * work.steps as f64));
        for ((figure, planned), measured) in self.figures.iter_mut().zip(found).zip(&run.measured) {
            figure.planned.push(planned);
            figure.measured.push(*measured);
        }
        Ok(())
    }

    fn compared(self) -> Vec<Compared> {
        let Self { traffic, load, figures, .. } = self;
        let one = |Figure { what, planned: planned_turns, measured: turns }: Figure| {
            let (planned, measured) = (median(planned_turns.clone()), median(turns.clone()));
            // Of a share in points, for it may be nothing.
            let error = match what == CACHED {
                true => (planned - measured) / 100.0,
                false => planned / measured - 1.0,
            };
            Compared { traffic, load, what, planned, measured, planned_turns, turns, error }
        };
        // There was no step of that kind.
        figures.into_iter().map(one).filter(|one| one.what == CACHED || one.measured > 0.0).collect()
    }
}

/// Alike where the traffic's are, and of another text with each number.
fn prompt(prompt: &Prompt, texts: u64, vocabulary: u32) -> Arc<[u32]> {
    let pieces = match prompt {
        Prompt::Pieces(pieces) => pieces.iter().map(|(seed, tokens)| (seed ^ texts << 48, *tokens)).collect(),
        Prompt::Text(_) => Vec::new(),
    };
    let ids = Range { low: 0, high: vocabulary - 1 };
    Prompt::Pieces(pieces).ids(ids).unwrap_or_default().into()
}

fn served(arrival: &Arrival, answer: &Answered) -> Option<Served> {
    let micros = |at: &Duration| Micros(at.as_micros() as u64);
    Some(Served {
        arrived: micros(&arrival.at),
        first_token: micros(answer.tokens.first()?),
        finished: micros(answer.tokens.last()?),
        output_tokens: answer.tokens.len() as u32,
        ..Served::default()
    })
}

fn knee(answers: &[Answered]) -> f64 {
    let mut tokens: Vec<f64> =
        answers.iter().flat_map(|answer| &answer.tokens).map(Duration::as_secs_f64).collect();
    tokens.sort_by(f64::total_cmp);
    steady_rate(answers.len(), tokens.into_iter().zip(1..))
}

/// In the order of [`BOUNDS`].
fn errors(compared: &[Compared]) -> [f64; 4] {
    let of = |what: &str| -> Vec<f64> {
        compared.iter().filter(|one| one.what.starts_with(what)).map(|one| one.error.abs()).collect()
    };
    let worst = |errors: Vec<f64>| errors.into_iter().fold(0.0, f64::max);
    [median(of("TPOT")), worst(of("TPOT")), worst(of("knee")), worst(of("TTFT"))]
}

fn text(compared: &[Compared], errors: [f64; 4]) -> String {
    let row = |one: &Compared| {
        vec![
            one.traffic.to_owned(),
            one.load.map_or("all at once".to_owned(), |load| format!("{:.0} %", 100.0 * load)),
            one.what.to_owned(),
            format!("{:.2}", one.planned),
            format!("{:.2}", one.measured),
            format!("{:+.0} %", 100.0 * one.error),
        ]
    };
    let rows: Vec<_> = compared.iter().map(row).collect();
    let mut out = table::render(&["traffic", "of the knee", "", "planned", "measured", "error"], &rows);
    out += "\n";
    for ((what, most), error) in BOUNDS.iter().zip(errors) {
        let verdict = if error <= *most { "within" } else { "beyond" };
        out += &format!("{what}: {:.0} %, {verdict} {:.0} %\n", 100.0 * error, 100.0 * most);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_have_other_texts_that_are_alike_where_they_were() {
        let pieces = |own| Prompt::Pieces(vec![(5, 32), (own, 8)]);
        let (one, other) = (prompt(&pieces(1), 1, 100), prompt(&pieces(2), 1, 100));
        assert_eq!(one[..32], other[..32]);
        assert_ne!(one[32..], other[32..]);
        assert_ne!(one[..32], prompt(&pieces(1), 2, 100)[..32]);
        assert!(one.iter().all(|id| *id < 100));
    }

    #[test]
    fn errors_are_of_medians_over_turns() {
        let cell = |load, what, planned, turns: &[f64]| Cell {
            traffic: "chat",
            load,
            figures: vec![Figure { what, planned: vec![planned; turns.len()], measured: turns.to_vec() }],
            steps: Vec::new(),
        };
        let cells = [
            cell(None, "knee, requests/s", 11.0, &[9.0, 10.0, 30.0]),
            cell(Some(0.5), "TTFT, ms", 80.0, &[100.0]),
            cell(Some(0.5), "TPOT, ms", 10.0, &[10.0]),
            cell(Some(0.8), "TPOT, ms", 8.0, &[10.0]),
        ];
        let compared: Vec<Compared> = cells.into_iter().flat_map(Cell::compared).collect();
        let found = errors(&compared).map(|error| (error * 100.0).round());
        assert_eq!(found, [10.0, 20.0, 10.0, 20.0]);
        let text = text(&compared, errors(&compared));
        assert!(text.contains("worst knee: 10 %, within 15 %"), "{text}");
    }
}
