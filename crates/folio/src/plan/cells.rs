//! `folio bench plan`: what a plan says of loads, beside what the engine in this process does under them.
//!
//! Owns: the cells (a kind of traffic and a load each), which nothing was fitted to, and their order: all of them in turn, several times, so
//! that a slow minute of the machine is in all of them. Compared are medians over the turns.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use folio_engine::Micros;
use folio_model::kv_format::KvFormat;
use folio_sim::replay::Served;
use folio_sim::retention::Policy;
use serde::Serialize;

use super::curve::StepCurve;
use super::load::{World, at_of, knee_of, steady_rate, times};
use super::machine::Machine;
use super::model::{PlannedModel, WeightFormat};
use super::setup::{Choice, Setup};
use super::traffic::{Traffic, as_recorded};
use crate::bench::arrivals::{Answered, Arrival, answer};
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

/// Of tokens of prompts, those that were found.
const CACHED: &str = "cached, %";

/// (name, tokens of prompts, of outputs, common beginnings).
type Kind = (&'static str, Range, Range, Option<(u32, u32)>);

const KINDS: [Kind; 4] = [
    ("chat", Range { low: 100, high: 300 }, Range { low: 100, high: 100 }, None),
    ("long prompts", Range { low: 900, high: 1100 }, Range { low: 50, high: 50 }, None),
    ("long outputs", Range { low: 20, high: 60 }, Range { low: 200, high: 300 }, None),
    ("shared beginnings", Range { low: 40, high: 80 }, Range { low: 60, high: 60 }, Some((4, 512))),
];

/// A figure as it was planned and measured.
#[derive(Clone, Debug, Serialize)]
struct Compared {
    traffic: &'static str,
    /// Of the knee; `None`: the knee itself.
    load: Option<f64>,
    what: &'static str,
    planned: f64,
    measured: f64,
    /// Each turn's.
    turns: Vec<f64>,
    error: f64,
}

struct Cell {
    traffic: &'static str,
    load: Option<f64>,
    items: Vec<Item>,
    /// Name and planned figure, and what each turn measured.
    figures: Vec<(&'static str, f64, Vec<f64>)>,
}

pub fn run(args: &BenchPlanArgs) -> Result<()> {
    args.engine.refuse_tiers()?;
    // Where all come at once, all wait.
    let (max_queued_requests, max_queued_tokens) = (2 * REQUESTS[1] as u32, u64::MAX >> 1);
    let engine = EngineArgs { max_queued_requests, max_queued_tokens, ..args.engine.clone() };
    let runtime = Runtime::start(args.model.as_deref(), &engine)?;
    let (setup, world) = setup(args, &runtime)?;
    let mut cells = cells(args, &setup, &world)?;
    let bar = Bar::items("measuring", u64::from(args.repeat) * cells.len() as u64);
    let mut texts = 0;
    for _ in 0..args.repeat {
        for cell in &mut cells {
            bar.advance(&format!(
                "{}, {}",
                cell.traffic,
                cell.load.map_or("the knee".to_owned(), |load| format!("{load}"))
            ));
            texts += 1;
            cell.measure(&runtime, texts)?;
        }
    }
    bar.finish();
    let compared: Vec<Compared> = cells.into_iter().flat_map(Cell::compared).collect();
    let found = errors(&compared);
    if args.json {
        let bounds = BOUNDS.iter().zip(found);
        let bounds = bounds.map(|((what, most), error)| serde_json::json!({"what": what, "error": error, "most": most, "within": error <= *most}));
        let report = serde_json::json!({
            "version": env!("CARGO_PKG_VERSION"),
            "model": runtime.name,
            "device": runtime.report.device,
            "seconds": args.seconds,
            "turns": args.repeat,
            "worst_error_of_fit": setup.curve_worst,
            "cells": compared,
            "bounds": bounds.collect::<Vec<_>>(),
        });
        println!("{report:#}");
    } else {
        print!("{}", text(&compared, found));
    }
    Ok(())
}

/// The plan's world with the pools that the engine has.
fn setup(args: &BenchPlanArgs, runtime: &Runtime) -> Result<(Setup, World)> {
    let model = PlannedModel::open(args.model.as_deref().unwrap_or("demo"))?;
    let engine = &args.engine;
    let threads = (!runtime.report.on_gpu).then_some(runtime.report.threads as u32);
    let file = args
        .profile
        .as_ref()
        .map(|file| file.to_str().context("the profile's name is no text"))
        .transpose()?;
    let mut machine = Machine::find(file, threads)?;
    let weights = match engine.quantize {
        None => model.stored,
        Some(Quantize::Q8) => WeightFormat::Q8,
        Some(Quantize::Q4) => WeightFormat::Q4,
    };
    // The engine has its memory already.
    machine.memory_bytes.value = 2.0 * (model.weight_bytes(weights) + runtime.report.kv_bytes) as f64;
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
    let setup = Setup::new(&model, choice, 1)?;
    match setup.curves.first().cloned() {
        Some(curve @ StepCurve::Measured(_)) => {
            let world = setup.world(curve);
            Ok((setup, world))
        }
        _ => bail!(
            "the profile has no steps of {} in this form on {}: measure them with `folio doctor {} --write-profile`",
            runtime.name,
            runtime.report.device,
            args.model.as_deref().unwrap_or_default()
        ),
    }
}

fn cells(args: &BenchPlanArgs, setup: &Setup, world: &World) -> Result<Vec<Cell>> {
    let mut cells = Vec::new();
    for (name, prompt, output, prefixes) in KINDS {
        let traffic = Traffic::Made { prompt, output, prefixes, seed: 7 };
        let (.., longest) = traffic.lengths();
        if longest > setup.max_model_len {
            eprintln!("{name}: {longest} tokens are more than the context of {}", setup.max_model_len);
            continue;
        }
        let planned = |items: &[Item]| items.iter().map(as_recorded).collect::<Vec<_>>();
        let count = |rate: f64| (rate * f64::from(args.seconds)).clamp(REQUESTS[0], REQUESTS[1]) as usize;
        // Enough to fill the batch several times: the first guess says how many.
        let guess = knee_of(world, &planned(&traffic.items(REQUESTS[0] as usize, None)))?;
        let least = (4 * setup.choice.sizes().max_num_seqs as usize).min(REQUESTS[1] as usize);
        let items = traffic.items(count(guess).max(least), None);
        let knee = knee_of(world, &planned(&items))?;
        cells.push(Cell {
            traffic: name,
            load: None,
            items,
            figures: vec![("knee, requests/s", knee, Vec::new())],
        });
        for load in LOADS {
            let rate = load * knee;
            let items = traffic.items(count(rate), Some(rate));
            let point = at_of(world, &planned(&items), rate)?;
            let figures = [
                ("TTFT, ms", 1e3 * point.ttft_s.p50),
                ("TPOT, ms", 1e3 * point.tpot_s.p50),
                ("end to end, ms", 1e3 * point.e2e_s.p50),
                (CACHED, 100.0 * point.cached),
            ];
            let figures = figures.map(|(what, planned)| (what, planned, Vec::new())).into();
            cells.push(Cell { traffic: name, load: Some(load), items, figures });
        }
    }
    Ok(cells)
}

impl Cell {
    /// `texts`: another number, other texts, so that the cache has nothing of a run before.
    fn measure(&mut self, runtime: &Runtime, texts: u64) -> Result<()> {
        let vocabulary = runtime.model.vocab.min(runtime.tokenizer.vocab_size()).max(1) as u32;
        let arrival = |item: &Item| Arrival {
            at: item.at.unwrap_or(Duration::ZERO),
            prompt: prompt(&item.prompt, texts, vocabulary),
            output: item.output_tokens,
        };
        let arrivals: Vec<Arrival> = self.items.iter().map(arrival).collect();
        let answers = answer(runtime, &arrivals)?;
        let found = match self.load {
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
        for ((.., turns), found) in self.figures.iter_mut().zip(found) {
            turns.push(found);
        }
        Ok(())
    }

    fn compared(self) -> Vec<Compared> {
        let Self { traffic, load, figures, .. } = self;
        let one = |(what, planned, turns): (&'static str, f64, Vec<f64>)| {
            let measured = median(turns.clone());
            // Of a share in points, for it may be nothing.
            let error = match what == CACHED {
                true => (planned - measured) / 100.0,
                false => planned / measured - 1.0,
            };
            Compared { traffic, load, what, planned, measured, turns, error }
        };
        figures.into_iter().map(one).collect()
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
            items: Vec::new(),
            figures: vec![(what, planned, turns.to_vec())],
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
