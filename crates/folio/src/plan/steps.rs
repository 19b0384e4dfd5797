//! Micro-measurements: what steps of a model take on this machine, one kind at a time.
//!
//! Owns: which steps are measured, ascending by what they cost, in rounds of all of them: a machine that is slow for a moment is slow for one
//! round, and what is kept of a kind is the middle of its rounds. A step's time is the engine's own count of it ([`folio_engine::Work`]), the
//! scheduler's part included; nothing of a mix of requests is measured here, so that what a plan says of one was not fitted to it.
//!
//! Most kinds come together and are computed one after another. Some are of spaced requests: a prompt behind a pause, and prompts one by one
//! beside a sequence that decodes, as they come to a machine that is not full. There a step takes longer, which is kept by itself ([`Spaced`]).

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Result;
use folio_engine::{Activity, Work};

use super::curve::{Spaced, StepSample};
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
/// Prompts of spaced requests, the pause before each, and how many come one by one beside a sequence that decodes.
const SPACED: [u32; 3] = [24, 60, 160];
const PAUSE: Duration = Duration::from_millis(5);
const ONE_BY_ONE: usize = 4;
/// Where such a prompt takes longer, it is not measured: what pauses cost is lost in it.
const SPACED_MOST: Duration = Duration::from_millis(100);
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
    let (samples, spaced) = medians(&rounds);
    Ok(MeasuredModel {
        name: runtime.name.clone(),
        parameters: runtime.model.parameters,
        layers: runtime.model.config.layers,
        hidden: runtime.model.config.hidden,
        weight_bytes: runtime.report.weight_bytes,
        kv_bytes_per_token: runtime.model.kv_layout.bytes_per_token() as u64,
        threads: runtime.report.threads,
        samples,
        spaced,
        others: before.and_then(|before| Some(ProcessorTime::now()?.others_since(before))),
    })
}

/// Tokens of the prompt and of the output of each sequence, and how they come.
#[derive(Clone, Debug, PartialEq)]
struct Kind {
    sequences: Vec<(u32, u32)>,
    comes: Comes,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Comes {
    /// They begin together.
    Together,
    /// Behind a pause; where there are several, the first decodes until the others have come, one by one.
    Spaced,
}

impl Kind {
    fn together(sequences: Vec<(u32, u32)>) -> Self {
        Self { sequences, comes: Comes::Together }
    }

    fn spaced(sequences: Vec<(u32, u32)>) -> Self {
        Self { sequences, comes: Comes::Spaced }
    }

    /// Tokens that it computes.
    fn rows(&self) -> u64 {
        self.sequences.iter().map(|(prompt, output)| u64::from(*prompt) + u64::from(*output)).sum()
    }

    /// Of its prompts.
    fn longest(&self) -> u32 {
        self.sequences.iter().map(|(prompt, _)| *prompt).max().unwrap_or(0)
    }

    /// When each sequence comes, where a row of a prompt takes so many seconds: a prompt is done before the next comes.
    fn times(&self, row_s: f64) -> Vec<Duration> {
        let gap = PAUSE + Duration::from_secs_f64(2.0 * row_s * f64::from(self.longest()));
        let at = |at: usize| match self.comes {
            Comes::Together => Duration::ZERO,
            Comes::Spaced => PAUSE + gap * at as u32,
        };
        (0..self.sequences.len()).map(at).collect()
    }

    /// The same with an output of the first that lasts until the last has come, where a token takes so many seconds; at most `most` tokens.
    fn lasting(mut self, row_s: f64, token_s: f64, most: u32) -> Self {
        let last = self.times(row_s).pop().unwrap_or_default();
        if let (Comes::Spaced, [(_, output), _, ..]) = (self.comes, &mut self.sequences[..]) {
            *output = ((last.as_secs_f64() / token_s) as u32).max(*output).min(most);
        }
        self
    }
}

/// A step of each kind in the mean, where there was one, in the order of [`Activity::ALL`].
pub type Samples = [Option<StepSample>; Activity::STEPS];

/// What each kind took, up to where the time was up: of those that come together, and of spaced ones.
#[derive(Clone, Debug, Default)]
pub struct Round {
    together: Vec<Samples>,
    spaced: Vec<Samples>,
}

impl Round {
    fn push(&mut self, comes: Comes, samples: Samples) {
        match comes {
            Comes::Together => self.together.push(samples),
            Comes::Spaced => self.spaced.push(samples),
        }
    }
}

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
        steps.answer(&Kind::together(vec![(1, DECODE.min(runtime.max_model_len() - 1)); 2]), 0.0)?;
        Ok(steps)
    }

    /// All kinds once, as far as they are expected to end by `end`; the first one in any case. `begins` is told of each.
    pub fn round(&mut self, end: Instant, begins: impl Fn(&str)) -> Result<Round> {
        let (mut round, mut row_s) = (Round::default(), 0.0);
        // Of one sequence that decodes.
        let mut token_s = f64::INFINITY;
        let most = self.runtime.max_model_len().saturating_sub(SHORT).max(1);
        for at in 0..self.kinds.len() {
            let kind = self.kinds[at].clone().lasting(row_s, token_s, most);
            // Of many a row takes less than of few.
            let expected = Duration::from_secs_f64(row_s * kind.rows() as f64);
            if at > 0 && Instant::now() + expected >= end {
                break;
            }
            begins(&format!("{} sequences, prompts of {}", kind.sequences.len(), kind.longest()));
            let is_spaced = kind.comes == Comes::Spaced;
            if is_spaced && row_s * f64::from(kind.longest()) > SPACED_MOST.as_secs_f64() {
                round.push(kind.comes, Samples::default());
                continue;
            }
            let (begun, mut times) = (Instant::now(), 0);
            let before = work(self.runtime);
            while times == 0 || begun.elapsed() < LEAST {
                self.answer(&kind, row_s)?;
                times += 1;
            }
            let after = work(self.runtime);
            if !is_spaced {
                row_s = begun.elapsed().as_secs_f64() / f64::from(times) / kind.rows() as f64;
            }
            let samples = samples(&before, &after);
            if let Some(decode) = samples[Activity::Decode as usize].filter(|decode| decode.rows < 1.5) {
                token_s = token_s.min(decode.us / 1e6);
            }
            round.push(kind.comes, samples);
        }
        Ok(round)
    }

    /// Until all of them ended. `row_s`: what a row of a prompt takes, about.
    fn answer(&mut self, kind: &Kind, row_s: f64) -> Result<()> {
        let vocabulary = self.runtime.model.vocab.min(self.runtime.tokenizer.vocab_size()).max(1) as u64;
        let leads = kind.comes == Comes::Together && kind.sequences.len() > 1;
        let lead = leads.then_some((Duration::ZERO, (LEAD.min(self.runtime.max_model_len() / 2), 1)));
        let arrival = |(at, (prompt, output)): (Duration, (u32, u32))| {
            let prompt: Arc<[u32]> =
                (0..prompt.max(1)).map(|_| self.random.below(vocabulary) as u32).collect();
            Arrival { at, prompt, output }
        };
        let sequences = kind.times(row_s).into_iter().zip(kind.sequences.iter().copied());
        let arrivals: Vec<Arrival> = lead.into_iter().chain(sequences).map(arrival).collect();
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
        Kind::together((0..batch).map(|at| (prompt, output(at))).collect())
    };
    let mut kinds = Vec::new();
    // Prompts alone: one step each. Kernels may compute rows in groups: a power of two is then the best case, one more the worst, and a line
    // between such places what any number of rows takes in the mean.
    let prompts = powers(2, first.min(room)).filter(|rows| *rows >= 16).flat_map(|rows| [rows, rows + 1]);
    let prompts = prompts.filter(|rows| *rows <= first.min(room));
    kinds.extend(prompts.map(|prompt| Kind::together(vec![(prompt, 1)])));
    // Decodes alone; while the prompts of many are computed, both.
    kinds.extend(powers(2, sizes.max_num_seqs).map(|batch| decoding(batch, SHORT)));
    let deep = powers(8, sizes.max_num_seqs.min(DEEP_BATCH));
    kinds.extend(deep.flat_map(|batch| DEEP.map(|prompt| decoding(batch, prompt))));
    kinds.push(decoding(sizes.max_num_seqs, DEEP[0]));
    // A long prompt beside one sequence.
    let beside = (first + BESIDE * later).min(room);
    kinds.push(Kind::together(vec![(SHORT.min(room), DECODE), (beside, 1)]));
    // Spaced prompts, alone and beside one sequence.
    for prompt in SPACED.into_iter().filter(|prompt| *prompt <= first.min(room)) {
        kinds.push(Kind::spaced(vec![(prompt, DECODE)]));
        let others = std::iter::repeat_n((prompt, 1), ONE_BY_ONE);
        let beside = std::iter::once((SHORT.min(room), DECODE)).chain(others);
        kinds.extend((sizes.max_num_seqs > 1).then(|| Kind::spaced(beside.collect())));
    }
    let positions = u64::from(runtime.report.kv_blocks) * runtime.model.kv_layout.block_tokens() as u64;
    // Half a pool of them.
    kinds.retain(|kind| kind.sequences.len() == 1 || 2 * kind.rows() < positions);
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

/// Of each kind of step the round whose rows took the middle time: of requests that come together, and of spaced ones.
pub fn medians(rounds: &[Round]) -> (Vec<StepSample>, Spaced) {
    let together = middle(rounds.iter().map(|round| &round.together[..]).collect());
    let spaced = middle(rounds.iter().map(|round| &round.spaced[..]).collect());
    let of_activity = |activity: usize| -> Vec<StepSample> {
        spaced.iter().filter_map(|samples| samples[activity]).collect()
    };
    (together.into_iter().flatten().flatten().collect(), std::array::from_fn(of_activity))
}

/// By kind, of what rounds have of each.
fn middle(rounds: Vec<&[Samples]>) -> Vec<Samples> {
    let of_kind = |kind: usize, activity: usize| {
        let found = rounds.iter().filter_map(|round| round.get(kind)?[activity]);
        let mut samples: Vec<StepSample> = found.collect();
        samples.sort_by(|one, other| (one.us / one.rows).total_cmp(&(other.us / other.rows)));
        samples.get(samples.len() / 2).copied()
    };
    let kinds = rounds.iter().map(|round| round.len()).max().unwrap_or(0);
    (0..kinds).map(|kind| std::array::from_fn(|activity| of_kind(kind, activity))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spaced_prompts_come_behind_pauses_and_one_by_one_while_another_decodes() {
        let at = |kind: &Kind| kind.times(1e-4).iter().map(Duration::as_micros).collect::<Vec<_>>();
        assert_eq!(at(&Kind::together(vec![(8, 4); 3])), [0, 0, 0]);
        assert_eq!(at(&Kind::spaced(vec![(64, 1)])), [5000]);
        let beside = Kind::spaced(vec![(32, 24), (50, 1), (50, 1)]);
        // 50 rows take 5 ms: as long again is left to what decodes, and a pause.
        assert_eq!(at(&beside), [5000, 20_000, 35_000]);
        let output = |token_s, most| beside.clone().lasting(1e-4, token_s, most).sequences[0];
        assert_eq!(output(1e-4, 1000), (32, 350), "until the last comes");
        assert_eq!((output(1e-4, 100), output(f64::INFINITY, 1000)), ((32, 100), (32, 24)));
        for same in [Kind::spaced(vec![(64, 24)]), Kind::together(vec![(64, 24); 2])] {
            assert_eq!(same.clone().lasting(1e-4, 1e-4, 1000), same, "nobody else comes");
        }
    }

    #[test]
    fn medians_of_spaced_requests_are_beside_those_of_others() {
        let took = |us: f64| {
            let (rows, sequences, logit_rows, kv_positions, attention) = (2.0, 1.0, 1.0, 2.0, 3.0);
            [Some(StepSample { rows, sequences, logit_rows, kv_positions, attention, us }), None, None]
        };
        let round = |together: &[f64], spaced: f64| Round {
            together: together.iter().map(|us| took(*us)).collect(),
            spaced: vec![took(spaced), Samples::default()],
        };
        // The time of the second was up before its last kind.
        let rounds = [round(&[1.0, 10.0], 7.0), round(&[3.0], 9.0), round(&[2.0, 30.0], 8.0)];
        let us = |samples: &[StepSample]| samples.iter().map(|sample| sample.us).collect::<Vec<_>>();
        let (together, spaced) = medians(&rounds);
        assert_eq!(us(&together), [2.0, 30.0]);
        assert_eq!(spaced.each_ref().map(|samples| us(samples)), [vec![8.0], vec![], vec![]]);
    }
}
