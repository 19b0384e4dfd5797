//! What load does: the real scheduler in the simulator, at rates up to the one where it tips over and beyond.
//!
//! Owns: the definition of the knee, and how many requests say enough. Nothing here is random but arrivals, by the traffic's seed.

use anyhow::{Result, bail};
use folio_engine::StepWork;
use folio_sim::StepTime;
use folio_sim::replay::{Replay, ReplayConfig, Served, replay_in_full};
use folio_sim::trace::TraceRequest;
use serde::Serialize;

use super::curve::StepCurve;
use super::parallel::each;
use super::setup::Setup;
use super::traffic::Traffic;
use crate::bench::stats::Summary;

/// Requests of a simulation: as many times those that run at once, within these.
const TIMES: usize = 6;
const REQUESTS: [usize; 2] = [200, 3000];
/// The first of them find an empty machine and are not counted.
const WARM_UP: f64 = 0.2;
/// Shares of all generated tokens between which the knee is measured: before, the batch fills; behind, it drains.
const STEADY: [f64; 2] = [0.2, 0.8];
/// Rows of a prompt whose rate is told.
const PREFILL: u32 = 512;

/// What the simulator runs.
pub type World = ReplayConfig<StepCurve>;

/// Where requests come at one rate.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct LoadPoint {
    /// Of the knee; `None`: of what was asked for.
    pub share_of_knee: Option<f64>,
    pub requests_per_s: f64,
    pub output_tokens_per_s: f64,
    pub ttft_s: Spread,
    pub tpot_s: Spread,
    pub e2e_s: Spread,
    /// Share of prompt tokens that were found.
    pub cached: f64,
    pub preempted: f64,
    /// Mean share of the KV pool that running sequences hold.
    pub occupancy: f64,
    /// More come than are served: the queue grows as long as they do.
    pub over: bool,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Spread {
    pub p50: f64,
    pub p99: f64,
}

impl Spread {
    fn of(values: Vec<f64>) -> Self {
        let Summary { p50, p99, .. } = Summary::of(values);
        Self { p50, p99 }
    }
}

/// One end of what is expected.
#[derive(Clone, Debug, Serialize)]
pub struct Case {
    /// Of the machine's limits; `None`: steps were measured.
    pub share_of_limits: Option<f64>,
    /// Tokens a second: of one sequence that decodes, of as many as fit or may run, and of a prompt of 512.
    pub decode_one_per_s: f64,
    pub decode_all_per_s: f64,
    pub prefill_per_s: f64,
    /// Requests a second at which it tips over: more are never served.
    pub knee_per_s: f64,
    pub points: Vec<LoadPoint>,
}

/// Sequences of the traffic that run at once.
pub fn at_once(setup: &Setup, traffic: &Traffic) -> u32 {
    let (prompt, output, _) = traffic.lengths();
    setup.fitting((prompt + output).ceil() as u32).min(setup.choice.sizes().max_num_seqs).max(1)
}

fn requests(at_once: u32, traffic: &Traffic) -> usize {
    let wanted = at_once as usize * TIMES;
    wanted.clamp(REQUESTS[0], REQUESTS[1]).min(traffic.most()).max(1)
}

impl Case {
    /// At these shares of the knee, and these rates. `at_once`: sequences that run together.
    pub fn of(world: &World, traffic: &Traffic, at_once: u32, shares: &[f64], rates: &[f64]) -> Result<Self> {
        let (curve, knee) = (&world.cost, knee(world, traffic, at_once)?);
        let (prompt, output, _) = traffic.lengths();
        let depth = (prompt + output / 2.0) as u64;
        let decode = |batch: u64| {
            let attention = batch * depth;
            let work = StepWork {
                sequences: batch,
                decode_rows: batch,
                logit_rows: batch,
                kv_positions: attention,
                attention,
                ..one()
            };
            batch as f64 / curve.us(&work) * 1e6
        };
        let rows =
            u64::from(PREFILL.min(world.scheduler.max_model_len).min(world.scheduler.max_num_batched_tokens));
        let prefill = StepWork {
            sequences: 1,
            prompt_rows: rows,
            logit_rows: 1,
            attention: rows * (rows + 1) / 2,
            ..one()
        };
        let at_shares = shares.iter().map(|share| (Some(*share), share * knee));
        let points: Vec<(Option<f64>, f64)> =
            at_shares.chain(rates.iter().map(|rate| (None, *rate))).collect();
        let point = |(share, rate): &(Option<f64>, f64)| {
            let point = at(world, traffic, at_once, *rate)?;
            Ok(LoadPoint { share_of_knee: *share, over: *rate > knee, ..point })
        };
        let points = each(&points, point).into_iter().collect::<Result<_>>()?;
        Ok(Self {
            share_of_limits: match curve {
                StepCurve::Limits(limits) => Some(limits.share),
                StepCurve::Measured(_) | StepCurve::Scaled { .. } => None,
            },
            decode_one_per_s: decode(1),
            decode_all_per_s: decode(at_once.into()),
            prefill_per_s: rows as f64 / curve.us(&prefill) * 1e6,
            knee_per_s: knee,
            points,
        })
    }
}

fn one() -> StepWork {
    StepWork { steps: 1, ..StepWork::default() }
}

/// The most requests a second that are ever served: all are there at once, and tokens come as fast as they can.
pub fn knee(world: &World, traffic: &Traffic, at_once: u32) -> Result<f64> {
    knee_of(world, &traffic.requests(requests(at_once, traffic), None))
}

/// The same of requests that are there at once. An error: not one of them can be served.
pub fn knee_of(world: &World, burst: &[TraceRequest]) -> Result<f64> {
    let replay = replay_in_full(burst, world)?;
    let served = replay.served.iter().flatten().count();
    if served == 0 {
        bail!(
            "not one of {} requests can be served: {} blocks of {} tokens of KV cache, sequences of {} tokens at most",
            burst.len(),
            world.cache.blocks,
            world.cache.block_tokens,
            world.scheduler.max_model_len
        );
    }
    let steady =
        steady_rate(served, replay.generated.iter().map(|(at, tokens)| (at.0 as f64 / 1e6, *tokens)));
    // Of a handful there is no middle.
    Ok(if steady > 0.0 { steady } else { served as f64 / replay.report.seconds })
}

/// Requests a second between a fifth and four fifths of all tokens. `generated`: (seconds, tokens so far), ascending.
pub fn steady_rate(requests: usize, generated: impl Iterator<Item = (f64, u64)>) -> f64 {
    let generated: Vec<(f64, u64)> = generated.collect();
    let all = generated.last().map_or(0, |(_, tokens)| *tokens);
    let reached = |share: f64| {
        let at = generated.partition_point(|(_, tokens)| (*tokens as f64) < share * all as f64);
        generated.get(at).copied().unwrap_or_default()
    };
    let [(from, before), (to, after)] = STEADY.map(reached);
    // Of the tokens that came between, for steps bring many.
    let part = after.saturating_sub(before) as f64 / all.max(1) as f64;
    if to > from { requests as f64 * part / (to - from) } else { 0.0 }
}

/// One simulation of requests at `rate`.
fn at(world: &World, traffic: &Traffic, at_once: u32, rate: f64) -> Result<LoadPoint> {
    at_of(world, &traffic.requests(requests(at_once, traffic), Some(rate)), rate)
}

/// The same of requests that come so.
pub fn at_of(world: &World, requests: &[TraceRequest], rate: f64) -> Result<LoadPoint> {
    Ok(point(&replay_in_full(requests, world)?, rate))
}

/// What a simulation says of its rate.
pub fn point(replay: &Replay, rate: f64) -> LoadPoint {
    let served: Vec<Served> = replay.served.iter().flatten().copied().collect();
    let (ttft_s, tpot_s, e2e_s) = times(served);
    let report = &replay.report;
    LoadPoint {
        share_of_knee: None,
        requests_per_s: rate,
        output_tokens_per_s: report.generated_tokens as f64 / report.seconds.max(f64::MIN_POSITIVE),
        ttft_s,
        tpot_s,
        e2e_s,
        cached: report.cached_tokens as f64 / report.prompt_tokens.max(1) as f64,
        preempted: report.preempted,
        occupancy: report.occupancy,
        over: false,
    }
}

/// To the first token, per token behind it, and to the end; without those that came first.
pub fn times(mut served: Vec<Served>) -> (Spread, Spread, Spread) {
    served.sort_by_key(|served| served.arrived);
    let counted = &served[(served.len() as f64 * WARM_UP) as usize..];
    (
        Spread::of(counted.iter().map(Served::ttft_s).collect()),
        Spread::of(counted.iter().filter_map(Served::tpot_s).collect()),
        Spread::of(counted.iter().map(Served::e2e_s).collect()),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_knee_is_measured_where_the_batch_is_full() {
        // Ten requests of ten tokens; slow to begin, a token every 0.1 s, and slow to end.
        let mut at = 0.0;
        let generated = (1..=100u64).map(|tokens| {
            at += if (20..80).contains(&tokens) { 0.1 } else { 1.0 };
            (at, tokens)
        });
        let rate = steady_rate(10, generated);
        assert!((0.85..1.05).contains(&rate), "{rate}");
        assert_eq!(steady_rate(0, std::iter::empty()), 0.0);
        assert_eq!(steady_rate(1, std::iter::once((1.0, 1))), 0.0, "one step says nothing");
    }
}
