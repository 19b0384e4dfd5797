//! Micro-measurements: what steps of a model take on this machine, one kind at a time.
//!
//! Owns: which steps are measured, ascending by what they cost, in rounds of all of them: a machine that is slow for a moment is slow for one
//! round, and what is kept of a kind is the middle of its rounds. A step's time is the engine's own count of it ([`folio_engine::Work`]), the
//! scheduler's part included; nothing of a mix of requests is measured here, so that what a plan says of one was not fitted to it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Result;
use folio_engine::{Activity, Work};

use super::curve::StepSample;
use crate::bench::arrivals::{Arrival, answer};
use crate::bench::others::ProcessorTime;
use crate::bench::stats::Random;
use crate::cli::Sizes;
use crate::profile::MeasuredModel;
use crate::progress::Bar;
use crate::runtime::Runtime;

/// Tokens that the sequences of a batch decode together.
const DECODE: u32 = 24;
/// Prompts of sequences that decode, and how many of them: powers of so much up to the most that run, up to few, and the most alone.
const SHORT: u32 = 32;
const DEEP: [u32; 2] = [256, 1024];
const DEEP_BATCH: u32 = 8;
/// Steps in which a long prompt is computed beside one sequence.
const BESIDE: u32 = 8;
/// Of a request that comes first where there are several: while it is computed the others come, and begin together.
const LEAD: u32 = 64;
/// How long a kind is repeated in a round at least.
const LEAST: Duration = Duration::from_millis(40);
/// Rounds for a profile, and the time for all of them.
const ROUNDS: usize = 7;
const BUDGET: Duration = Duration::from_secs(90);
/// For the engine to say what the last step was.
const SETTLING: Duration = Duration::from_secs(1);

/// Of a model that runs and has nothing else to do. `sizes`: its limits.
pub fn measure(runtime: &Runtime, sizes: &Sizes) -> Result<MeasuredModel> {
    let (end, before) = (Instant::now() + BUDGET, ProcessorTime::now());
    let mut steps = Steps::new(runtime, sizes)?;
    let bar = Bar::items("measuring steps", (ROUNDS * steps.kinds.len()) as u64);
    let mut rounds = Vec::new();
    while rounds.len() < ROUNDS && (rounds.is_empty() || Instant::now() < end) {
        rounds.push(steps.round(end, |kind| bar.advance(kind))?);
    }
    bar.finish();
    Ok(MeasuredModel {
        name: runtime.name.clone(),
        parameters: runtime.model.parameters,
        layers: runtime.model.config.layers,
        hidden: runtime.model.config.hidden,
        weight_bytes: runtime.report.weight_bytes,
        kv_bytes_per_token: runtime.model.kv_layout.bytes_per_token() as u64,
        threads: runtime.report.threads,
        samples: medians(&rounds),
        others: before.and_then(|before| Some(ProcessorTime::now()?.others_since(before))),
    })
}

/// Tokens of the prompt and of the output of each sequence. They begin together.
#[derive(Clone, Debug, PartialEq)]
struct Kind(Vec<(u32, u32)>);

impl Kind {
    /// Tokens that it computes.
    fn rows(&self) -> u64 {
        self.0.iter().map(|(prompt, output)| u64::from(*prompt) + u64::from(*output)).sum()
    }
}

/// A step of each kind in the mean, where there was one, in the order of [`Activity::ALL`].
pub type Samples = [Option<StepSample>; Activity::STEPS];

/// What each kind took, up to where the time was up.
pub type Round = Vec<Samples>;

/// The kinds of steps of a model, to be measured in rounds.
pub struct Steps<'a> {
    runtime: &'a Runtime,
    kinds: Vec<Kind>,
    random: Random,
}

impl<'a> Steps<'a> {
    /// Runs a few, for what there is to warm up.
    pub fn new(runtime: &'a Runtime, sizes: &Sizes) -> Result<Self> {
        let mut steps = Self { runtime, kinds: kinds(runtime, sizes), random: Random::new(1) };
        steps.answer(&Kind(vec![(1, DECODE.min(runtime.max_model_len() - 1)); 2]))?;
        Ok(steps)
    }

    /// All kinds once, as far as they are expected to end by `end`; the first one in any case. `begins` is told of each.
    pub fn round(&mut self, end: Instant, begins: impl Fn(&str)) -> Result<Round> {
        let (mut round, mut row_s) = (Round::new(), 0.0);
        for at in 0..self.kinds.len() {
            let kind = self.kinds[at].clone();
            // Of many a row takes less than of few.
            let expected = Duration::from_secs_f64(row_s * kind.rows() as f64);
            if at > 0 && Instant::now() + expected >= end {
                break;
            }
            let longest = kind.0.iter().map(|(prompt, _)| *prompt).max().unwrap_or(0);
            begins(&format!("{} sequences, prompts of {longest}", kind.0.len()));
            let (begun, mut times) = (Instant::now(), 0);
            let before = work(self.runtime);
            while times == 0 || begun.elapsed() < LEAST {
                self.answer(&kind)?;
                times += 1;
            }
            let after = work(self.runtime);
            row_s = begun.elapsed().as_secs_f64() / f64::from(times) / kind.rows() as f64;
            round.push(samples(&before, &after));
        }
        Ok(round)
    }

    /// Until all of them ended.
    fn answer(&mut self, kind: &Kind) -> Result<()> {
        let vocabulary = self.runtime.model.vocab.min(self.runtime.tokenizer.vocab_size()).max(1) as u64;
        let lead = (kind.0.len() > 1).then_some((LEAD.min(self.runtime.max_model_len() / 2), 1));
        let arrival = |(prompt, output): (u32, u32)| {
            let prompt: Arc<[u32]> =
                (0..prompt.max(1)).map(|_| self.random.below(vocabulary) as u32).collect();
            Arrival { at: Duration::ZERO, prompt, output }
        };
        let arrivals: Vec<Arrival> = lead.into_iter().chain(kind.0.iter().copied()).map(arrival).collect();
        answer(self.runtime, &arrivals)?;
        Ok(())
    }
}

/// Ascending by what they compute.
fn kinds(runtime: &Runtime, sizes: &Sizes) -> Vec<Kind> {
    let powers = |step: u32, most: u32| {
        std::iter::successors(Some(1u32), move |n| n.checked_mul(step)).take_while(move |n| *n <= most)
    };
    let longest = runtime.max_model_len();
    let room = longest.saturating_sub(DECODE).max(1);
    let (first, later) = (sizes.max_num_batched_tokens, sizes.max_prefill_while_decoding.max(1));
    let decoding = |batch: u32, prompt: u32| {
        let prompt = prompt.min(room / 2).max(1);
        // Behind the first step so much of prompts is in each, and who is done early decodes more tokens, so that all end together.
        let behind = |at: u32| ((at + 1) * prompt).saturating_sub(first).div_ceil(later);
        let output = |at: u32| (DECODE + behind(batch - 1) - behind(at)).min(longest - prompt);
        Kind((0..batch).map(|at| (prompt, output(at))).collect())
    };
    let mut kinds = Vec::new();
    // Prompts alone: one step each. Kernels may compute rows in groups: a power of two is then the best case, one more the worst, and a line
    // between such places what any number of rows takes in the mean.
    let prompts = powers(2, first.min(room)).filter(|rows| *rows >= 16).flat_map(|rows| [rows, rows + 1]);
    kinds.extend(prompts.filter(|rows| *rows <= first.min(room)).map(|prompt| Kind(vec![(prompt, 1)])));
    // Decodes alone; while the prompts of many are computed, both.
    kinds.extend(powers(2, sizes.max_num_seqs).map(|batch| decoding(batch, SHORT)));
    let deep = powers(8, sizes.max_num_seqs.min(DEEP_BATCH));
    kinds.extend(deep.flat_map(|batch| DEEP.map(|prompt| decoding(batch, prompt))));
    kinds.push(decoding(sizes.max_num_seqs, DEEP[0]));
    // A long prompt beside one sequence.
    let beside = (first + BESIDE * later).min(room);
    kinds.push(Kind(vec![(SHORT.min(room), DECODE), (beside, 1)]));
    let positions = u64::from(runtime.report.kv_blocks) * runtime.model.kv_layout.block_tokens() as u64;
    // Half a pool of them.
    kinds.retain(|kind| kind.0.len() == 1 || 2 * kind.rows() < positions);
    kinds.sort_by_key(Kind::rows);
    kinds.dedup();
    kinds
}

/// Of the steps between two moments.
pub fn samples(before: &Work, after: &Work) -> Samples {
    [Activity::Prefill, Activity::Decode, Activity::Mixed].map(|activity| {
        let index = activity as usize;
        let work = after.steps[index].since(&before.steps[index]);
        let us = after.us(activity) - before.us(activity);
        (work.steps > 0 && us > 0).then(|| StepSample::mean(&work, us as f64))
    })
}

/// When nothing is computed any more.
pub fn work(runtime: &Runtime) -> Work {
    let end = Instant::now() + SETTLING;
    loop {
        let stats = runtime.engine.stats();
        if !stats.busy || Instant::now() >= end {
            return stats.work;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Of each kind of step the round whose rows took the middle time.
pub fn medians<'a>(rounds: impl IntoIterator<Item = &'a Round> + Clone) -> Vec<StepSample> {
    let kinds = rounds.clone().into_iter().map(Vec::len).max().unwrap_or(0);
    let of_kind = |(kind, activity): (usize, usize)| {
        let found = rounds.clone().into_iter().filter_map(|round| round.get(kind)?[activity]);
        let mut samples: Vec<StepSample> = found.collect();
        samples.sort_by(|one, other| (one.us / one.rows).total_cmp(&(other.us / other.rows)));
        samples.get(samples.len() / 2).copied()
    };
    let all = (0..kinds).flat_map(|kind| (0..Activity::STEPS).map(move |activity| (kind, activity)));
    all.filter_map(of_kind).collect()
}
