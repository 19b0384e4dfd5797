//! What the bookkeeping of a step costs, without any model: `cargo run --release -p folio-engine --example scheduler_cost`.
//!
//! 256 sequences decode at a context of 2,048 tokens, then 1,024 and 4,096 of them; the executor answers at once. Prints the time of
//! plan and commit. With a number of sequences, and perhaps a repetition penalty, as
//! arguments: of those alone.

use std::time::{Duration, Instant};

use folio_engine::plan::{ExecutorError, Sampled, StepOutput, StepPlan};
use folio_engine::{Executor, Micros, Scheduler, SchedulerConfig};
use folio_kv::{CacheConfig, KvCache, default_policy};
use folio_sim::scenario::request;

/// The allocator of `folio`.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Answers every sample with some token.
#[derive(Default)]
struct Instantly(StepOutput);

impl Executor for Instantly {
    fn begin(&mut self, plan: &StepPlan) -> Result<(), ExecutorError> {
        self.0.step = plan.step;
        self.0.samples.clear();
        let wanted: usize = plan.sequences.iter().map(|sequence| sequence.samples.len()).sum();
        self.0.samples.resize(wanted, Sampled::Token { id: plan.step as u32 % 1000, logprobs: None });
        Ok(())
    }

    fn finish(&mut self) -> Result<&StepOutput, ExecutorError> {
        Ok(&self.0)
    }
}

const CONTEXT: u32 = 2048;
const STEPS: usize = 1000;
/// More than the steps, and those in which all prompts are computed.
fn output(sequences: u32) -> u32 {
    STEPS as u32 + 100 + sequences / 2
}

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if let [sequences, rest @ ..] = &arguments[..] {
        let penalty = rest.first().map_or(1.0, |penalty| penalty.parse().expect("a repetition penalty"));
        return measure("alone", sequences.parse().expect("a number of sequences"), penalty, 0);
    }
    for (name, sequences, penalty, waiting) in [
        ("plain", 256, 1.0, 0),
        ("repetition penalty", 256, 1.1, 0),
        ("512 waiting", 256, 1.0, 512),
        ("plain", 1024, 1.0, 0),
        ("plain", 4096, 1.0, 0),
    ] {
        measure(name, sequences, penalty, waiting);
    }
}

fn measure(name: &str, sequences: u32, repetition_penalty: f32, waiting: u64) {
    let config = SchedulerConfig {
        max_num_seqs: sequences,
        max_num_batched_tokens: 8192,
        max_prefill_tokens_while_decoding: 8192,
        max_model_len: 1 << 20,
        ..SchedulerConfig::default()
    };
    // Room for what runs and a little more, so that whoever waits cannot be admitted.
    let blocks = sequences * (CONTEXT + output(sequences) + 100).div_ceil(16) + 64;
    let mut cache =
        KvCache::new(CacheConfig { blocks, block_tokens: 16, bytes_per_block: 1 }, default_policy(0.0));
    let mut scheduler = Scheduler::new(config).expect("valid limits");
    let mut executor = Instantly::default();
    let submit = |scheduler: &mut Scheduler, id: u64| {
        let prompt: Vec<u32> = (0..CONTEXT)
            .map(|i| i.wrapping_mul(2_654_435_761).wrapping_add(id as u32 * 7919) % 32_000)
            .collect();
        let mut request = request(id, &prompt, output(sequences));
        request.sampling.repetition_penalty = repetition_penalty;
        scheduler.admit([request.hashed(16)], [], Micros(0));
    };
    (0..u64::from(sequences)).for_each(|id| submit(&mut scheduler, id));
    let (mut plan_time, mut commit_time) = (Vec::new(), Vec::new());
    let mut now = 0;
    while plan_time.len() < STEPS {
        now += 1000;
        let began = Instant::now();
        let plan = scheduler.plan(&mut cache, Micros(now));
        let planned = began.elapsed();
        let decoding = plan.sequences.len() == sequences as usize
            && plan.sequences.iter().all(|sequence| sequence.tokens.len() == 1);
        let output = executor.execute(plan);
        let began = Instant::now();
        scheduler.commit(&mut cache, output, Micros(now)).clear();
        if decoding {
            if plan_time.is_empty() {
                (0..waiting).for_each(|id| submit(&mut scheduler, 10_000 + id));
            }
            plan_time.push(planned);
            commit_time.push(began.elapsed());
        }
    }
    let both: Vec<Duration> =
        plan_time.iter().zip(&commit_time).map(|(plan, commit)| *plan + *commit).collect();
    let show = |mut times: Vec<Duration>| {
        times.sort_unstable();
        let us = |at: usize| times[at].as_nanos() as f64 / 1000.0;
        format!("median {:6.1} us, p99 {:6.1} us", us(STEPS / 2), us(STEPS * 99 / 100))
    };
    println!("{sequences} sequences decoding at {CONTEXT} tokens, {name}:");
    println!("  plan   {}", show(plan_time));
    println!("  commit {}", show(commit_time));
    println!("  both   {}", show(both));
}
