//! `folio trace replay`: a recording in the simulator, beside what was recorded, and the load that the same requests could be.
//!
//! Owns: the comparison. Of what was recorded only what came is given to the simulator; what became of it is what is compared.

use anyhow::{Context, Result, bail};
use folio_engine::SchedulerConfig;
use folio_kv::CacheConfig;
use folio_sim::recorded::{RecordedSteps, RecordedTrace};
use folio_sim::replay::{Replay, ReplayConfig, Served, replay_in_full};
use serde::Serialize;

use super::choice;
use super::curve::{Measured, StepCurve, StepSample};
use super::load::{Case, Spread, World, times};
use super::model::PlannedModel;
use super::report::{load_table, number};
use super::setup::Setup;
use super::traffic::{self, Traffic};
use crate::bench::table;
use crate::cli::{TraceReplayArgs, WorldArgs};

/// Samples that a curve is fitted to, evenly taken of all.
const SAMPLES_MAX: usize = 240;
/// Shares of the knee that are looked at.
const SHARES: [f64; 3] = [0.5, 0.8, 1.1];

/// What became of the requests.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
struct Outcome {
    requests: u64,
    prompt_tokens: u64,
    cached_tokens: u64,
    output_tokens: u64,
    preemptions: u64,
    steps: u64,
    ttft_s: Spread,
    tpot_s: Spread,
    e2e_s: Spread,
}

pub fn run(args: &TraceReplayArgs) -> Result<()> {
    let file = || args.file.display().to_string();
    let trace = RecordedTrace::read(traffic::text(&args.file).with_context(file)?).with_context(file)?;
    if trace.requests.is_empty() {
        bail!("{} has no request", args.file.display());
    }
    let traffic = Traffic::Recorded { requests: trace.traffic() };
    let worlds = worlds(args, &trace, &traffic)?;
    let recorded = recorded(&trace);
    let mut simulated = Vec::new();
    let mut cases = Vec::new();
    for (world, at_once) in &worlds {
        let replay = replay_in_full(&traffic.requests(trace.requests.len(), traffic.own_rate()), world)?;
        simulated.push(outcome(&replay));
        let own: Vec<f64> = traffic.own_rate().into_iter().collect();
        cases.push(Case::of(world, &traffic, *at_once, &SHARES, &own)?);
    }
    if args.json {
        let report = serde_json::json!({
            "object": "trace.replay",
            "version": env!("CARGO_PKG_VERSION"),
            "traffic": traffic.described(),
            "unfinished": trace.about.unfinished,
            "left_out": trace.about.left_out,
            "recorded": recorded,
            "simulated": simulated,
            "cases": cases,
        });
        println!("{report:#}");
    } else {
        print!("{}", text(&trace, &traffic, &recorded, &simulated));
        print!("{}", load_table(&cases));
    }
    Ok(())
}

/// What is simulated, and how many sequences run there at once: as it was recorded, or a model on a machine.
fn worlds(args: &TraceReplayArgs, trace: &RecordedTrace, traffic: &Traffic) -> Result<Vec<(World, u32)>> {
    let (prompt, output, longest) = traffic.lengths();
    let mean = (prompt + output).ceil() as u32;
    if let Some(model) = &args.model {
        let model = PlannedModel::open(model)?;
        let mut setup = Setup::new(&model, choice(&model, &args.world)?, longest)?;
        if let Some(blocks) = args.blocks {
            setup.pool.blocks = blocks;
        }
        let at_once = setup.fitting(mean).min(setup.choice.sizes().max_num_seqs).max(1);
        return Ok(setup.curves.iter().map(|curve| (setup.world(curve.clone()), at_once)).collect());
    }
    refuse_machine(&args.world)?;
    let Some(curve) = Measured::of(&samples(&trace.steps)) else {
        bail!(
            "{} has too few steps to tell how long they take: record for longer, or give --model and --machine",
            args.file.display()
        );
    };
    let (about, world) = (&trace.about, &args.world);
    let scheduler = SchedulerConfig {
        max_num_seqs: world.max_num_seqs.unwrap_or(about.max_num_seqs),
        max_num_batched_tokens: world.max_num_batched_tokens.unwrap_or(about.max_num_batched_tokens),
        max_prefill_tokens_while_decoding: world
            .max_prefill_while_decoding
            .unwrap_or(about.max_prefill_while_decoding),
        max_model_len: world.max_model_len.unwrap_or(about.max_model_len),
        ..SchedulerConfig::default()
    };
    let cache = CacheConfig {
        blocks: args.blocks.unwrap_or(about.blocks),
        block_tokens: world.block_size.unwrap_or(about.block_tokens),
        bytes_per_block: about.bytes_per_block.max(1),
    };
    let fitting = cache.blocks / mean.div_ceil(cache.block_tokens).max(1);
    let at_once = fitting.min(scheduler.max_num_seqs).max(1);
    let world = ReplayConfig {
        policy: world.policy,
        drafts: world.drafts,
        ..ReplayConfig::new(scheduler, cache, StepCurve::Measured(curve), about.max_model_len)
    };
    Ok(vec![(world, at_once)])
}

/// What says something of a machine has a meaning with a model only.
fn refuse_machine(world: &WorldArgs) -> Result<()> {
    let given = [
        ("--machine", world.machine.is_some()),
        ("--devices", world.devices > 1),
        ("--threads", world.threads.is_some()),
        ("--weights", world.weights.is_some()),
        ("--kv-cache-dtype", world.kv_cache_dtype.format().is_some()),
        ("--kv-cache-memory", world.kv_cache_memory.is_some()),
        ("--kv-cache-share", world.kv_cache_share.is_some()),
        ("--host-kv-memory", world.host_kv_memory.is_some()),
    ];
    match given.into_iter().find(|(_, given)| *given) {
        Some((flag, _)) => bail!("{flag} needs --model: without one steps take what was recorded"),
        None => Ok(()),
    }
}

fn samples(steps: &[RecordedSteps]) -> Vec<StepSample> {
    let every = steps.len().div_ceil(SAMPLES_MAX).max(1);
    let sample = |of: &RecordedSteps| {
        let mean = |count: u64| count as f64 / of.steps as f64;
        StepSample {
            rows: mean(of.rows),
            sequences: mean(of.sequences),
            logit_rows: mean(of.logit_rows),
            kv_positions: mean(of.kv_positions),
            attention: mean(of.attention),
            us: of.us / of.steps as f64,
        }
    };
    steps.iter().step_by(every).map(sample).collect()
}

fn recorded(trace: &RecordedTrace) -> Outcome {
    let served = trace.requests.iter().filter_map(|request| {
        Some(Served {
            arrived: request.arrived,
            first_token: request.first_token?,
            finished: request.finished,
            cached_tokens: request.cached_tokens,
            output_tokens: request.output_tokens,
            preemptions: request.preemptions,
        })
    });
    let (ttft_s, tpot_s, e2e_s) = times(served.collect());
    let sum = |figure: fn(&folio_sim::recorded::RecordedRequest) -> u32| -> u64 {
        trace.requests.iter().map(|request| u64::from(figure(request))).sum()
    };
    Outcome {
        requests: trace.requests.len() as u64,
        prompt_tokens: sum(|request| request.prompt_tokens),
        cached_tokens: sum(|request| request.cached_tokens),
        output_tokens: sum(|request| request.output_tokens),
        preemptions: sum(|request| request.preemptions),
        steps: trace.steps.iter().map(|steps| steps.steps).sum(),
        ttft_s,
        tpot_s,
        e2e_s,
    }
}

fn outcome(replay: &Replay) -> Outcome {
    let report = &replay.report;
    let (ttft_s, tpot_s, e2e_s) = times(replay.served.iter().flatten().copied().collect());
    Outcome {
        requests: report.requests,
        prompt_tokens: report.prompt_tokens,
        cached_tokens: report.cached_tokens,
        output_tokens: report.generated_tokens,
        preemptions: report.preemptions,
        steps: report.steps,
        ttft_s,
        tpot_s,
        e2e_s,
    }
}

fn text(trace: &RecordedTrace, traffic: &Traffic, recorded: &Outcome, simulated: &[Outcome]) -> String {
    let about = &trace.about;
    let mut out = format!(
        "{}, recorded for {:.0} s\n{} did not end meanwhile, {} were left out\n\n",
        traffic.described(),
        about.seconds,
        about.unfinished,
        about.left_out
    );
    type Figure = fn(&Outcome) -> f64;
    let figures: [(&str, Figure); 12] = [
        ("requests", |of| of.requests as f64),
        ("prompt tokens", |of| of.prompt_tokens as f64),
        ("cached tokens", |of| of.cached_tokens as f64),
        ("output tokens", |of| of.output_tokens as f64),
        ("preemptions", |of| of.preemptions as f64),
        ("steps", |of| of.steps as f64),
        ("TTFT s", |of| of.ttft_s.p50),
        ("TTFT s, p99", |of| of.ttft_s.p99),
        ("TPOT ms", |of| 1e3 * of.tpot_s.p50),
        ("TPOT ms, p99", |of| 1e3 * of.tpot_s.p99),
        ("end to end s", |of| of.e2e_s.p50),
        ("end to end s, p99", |of| of.e2e_s.p99),
    ];
    let row = |(name, figure): (&str, Figure)| {
        let ends = simulated.iter().map(|of| number(figure(of))).collect::<Vec<_>>().join(" to ");
        vec![name.to_owned(), number(figure(recorded)), ends]
    };
    let rows: Vec<_> = figures.into_iter().map(row).collect();
    out += &table::render(&["", "recorded", "simulated"], &rows);
    out
}
