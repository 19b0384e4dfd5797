//! Micro-measurements: what steps of a model take on this machine, one kind at a time.
//!
//! Owns: which steps are measured, ascending by what they cost, until a budget of time is spent. A step's time is the engine's own count of
//! it ([`folio_engine::Work`]), the scheduler's part included; nothing of a mix of requests is measured here, so that what a plan says of
//! one was not fitted to it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Result;
use folio_engine::{Activity, Work};

use super::curve::StepSample;
use crate::bench::arrivals::{Arrival, answer};
use crate::bench::stats::Random;
use crate::cli::Sizes;
use crate::profile::MeasuredModel;
use crate::progress::Bar;
use crate::runtime::Runtime;

/// Tokens that each sequence decodes.
const DECODE: u32 = 24;
/// Prompts of sequences that decode, short and long.
const DEPTHS: [u32; 2] = [32, 1024];
/// Most sequences with long prompts.
const DEEP_BATCH: u32 = 8;
const REPEAT: usize = 3;
/// For all of it; what is not begun by then is left out.
const BUDGET: Duration = Duration::from_secs(90);
/// For the engine to say what the last step was.
const SETTLING: Duration = Duration::from_secs(1);

/// Of a model that runs and has nothing else to do. `sizes`: its limits.
pub fn measure(runtime: &Runtime, sizes: &Sizes) -> Result<MeasuredModel> {
    let mut steps = Steps { runtime, sizes, random: Random::new(1) };
    let end = Instant::now() + BUDGET;
    let kinds = steps.kinds();
    let bar = Bar::items("measuring steps", kinds.len() as u64);
    // What there is to warm up.
    steps.run(2, DEPTHS[0], DECODE)?;
    let mut samples = Vec::new();
    for (batch, prompt, output) in kinds {
        bar.advance(&format!("{batch} sequences, prompts of {prompt}, outputs of {output}"));
        let mut runs = Vec::new();
        while runs.len() < REPEAT && (Instant::now() < end || samples.is_empty()) {
            runs.push(steps.run(batch, prompt, output)?);
        }
        samples.extend(medians(runs));
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
        samples,
    })
}

struct Steps<'a> {
    runtime: &'a Runtime,
    sizes: &'a Sizes,
    random: Random,
}

impl Steps<'_> {
    /// (sequences, tokens of each prompt, tokens of each output), ascending by work.
    fn kinds(&self) -> Vec<(u32, u32, u32)> {
        let powers = |step: u32, most: u32| {
            std::iter::successors(Some(1u32), move |n| n.checked_mul(step)).take_while(move |n| *n <= most)
        };
        let room = self.runtime.max_model_len().saturating_sub(DECODE);
        let depth = |depth: u32| depth.min(room / 2).max(1);
        let blocks =
            u64::from(self.runtime.report.kv_blocks) * self.runtime.model.kv_layout.block_tokens() as u64;
        let fits = |batch: u32, prompt: u32| u64::from(batch) * u64::from(prompt + 2 * DECODE) < blocks;
        let mut kinds = Vec::new();
        // Prompts alone: one step each.
        let most = self.sizes.max_num_batched_tokens.min(room);
        kinds.extend(powers(2, most).filter(|rows| *rows >= 16).map(|rows| (1, rows, 1)));
        // Decodes alone; while the prompts of many are computed, both.
        kinds.extend(powers(2, self.sizes.max_num_seqs).map(|batch| (batch, depth(DEPTHS[0]), DECODE)));
        kinds.extend(
            powers(8, self.sizes.max_num_seqs.min(DEEP_BATCH)).map(|batch| (batch, depth(DEPTHS[1]), DECODE)),
        );
        kinds.retain(|(batch, prompt, _)| fits(*batch, *prompt));
        kinds.sort_by_key(|(batch, prompt, output)| u64::from(*batch) * u64::from(prompt + output));
        kinds
    }

    /// What the steps took while so many sequences were computed together, by kind of step.
    fn run(&mut self, batch: u32, prompt: u32, output: u32) -> Result<[Option<StepSample>; Activity::STEPS]> {
        let vocabulary = self.runtime.model.vocab.min(self.runtime.tokenizer.vocab_size()).max(1) as u64;
        let mut tokens =
            || -> Arc<[u32]> { (0..prompt).map(|_| self.random.below(vocabulary) as u32).collect() };
        let arrivals: Vec<Arrival> =
            (0..batch).map(|_| Arrival { at: Duration::ZERO, prompt: tokens(), output }).collect();
        let before = self.work();
        answer(self.runtime, &arrivals)?;
        let after = self.work();
        let sample = |activity: Activity| {
            let index = activity as usize;
            let work = after.steps[index].since(&before.steps[index]);
            let us = after.us(activity) - before.us(activity);
            (work.steps > 0 && us > 0).then(|| StepSample::mean(&work, us as f64))
        };
        Ok([Activity::Prefill, Activity::Decode, Activity::Mixed].map(sample))
    }

    /// When nothing is computed any more.
    fn work(&self) -> Work {
        let end = Instant::now() + SETTLING;
        loop {
            let stats = self.runtime.engine.stats();
            if !stats.busy || Instant::now() >= end {
                return stats.work;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

/// Of each kind of step the run whose steps took the middle time.
fn medians(runs: Vec<[Option<StepSample>; Activity::STEPS]>) -> Vec<StepSample> {
    let of_kind = |kind: usize| {
        let mut samples: Vec<StepSample> = runs.iter().filter_map(|run| run[kind]).collect();
        samples.sort_by(|one, other| (one.us / one.rows).total_cmp(&(other.us / other.rows)));
        samples.get(samples.len() / 2).copied()
    };
    (0..Activity::STEPS).filter_map(of_kind).collect()
}
