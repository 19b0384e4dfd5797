//! What drafts from text gain on real texts: `cargo run --release -p folio-engine --example drafting_texts -- --us 1:26000,2:27000,... FOLDER...`.
//!
//! A folder has the texts `prompt` and `answer`, and may have a `prediction` (`tools/bench/drafting_texts.py` makes some). They are cut into words, single signs and runs of blanks. The engine, with its scheduler, drafters
//! and cache, asks a model that says just that answer and whose steps take, by their rows, what is given in microseconds (a line between two
//! numbers of rows): so what is drafted, how much of it is verified and how much is right is real, and time is that of the steps that were measured.
//! Printed for each text: tokens, drafts and those that were right, tokens a step, and the rate over that without drafts, from text alone and with the prediction.

use std::collections::HashMap;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, mpsc};

use folio_engine::engine::EngineParts;
use folio_engine::plan::{ExecutorError, Sampled, StepOutput, StepPlan, Want};
use folio_engine::{
    Clock, DRAFTS_MAX, Drafter, Event, Executor, Micros, Request, SamplingParams, SchedulerConfig,
    Speculation, start,
};
use folio_kv::{CacheConfig, KvCache, TenantId, default_policy};
use folio_sim::scenario::root;

/// Microseconds so far.
#[derive(Default)]
struct Time(AtomicU64);

impl Clock for Time {
    fn now(&self) -> Micros {
        Micros(self.0.load(Relaxed))
    }
}

struct Said {
    /// What stands at each position, the prompt and its answer.
    tokens: Arc<[u32]>,
    /// Rows and microseconds.
    curve: Arc<[(f64, f64)]>,
    time: Arc<Time>,
    output: StepOutput,
    steps: Arc<AtomicU64>,
}

impl Said {
    fn us(&self, rows: f64) -> f64 {
        let behind = self.curve.partition_point(|(at, _)| *at < rows).clamp(1, self.curve.len() - 1);
        let ((x0, y0), (x1, y1)) = (self.curve[behind - 1], self.curve[behind]);
        y0 + (rows.max(self.curve[0].0) - x0) * (y1 - y0) / (x1 - x0)
    }
}

impl Executor for Said {
    fn begin(&mut self, plan: &StepPlan) -> Result<(), ExecutorError> {
        let rows: usize = plan.sequences.iter().map(|sequence| sequence.tokens.len()).sum();
        let chosen = plan.sequences.iter().flat_map(|sequence| &sequence.samples).map(|sample| {
            let Want::Token(spec) = &sample.want else { panic!("tokens alone are asked for") };
            Sampled::Token { id: self.tokens[spec.position as usize], logprobs: None }
        });
        self.output = StepOutput { step: plan.step, samples: chosen.collect(), ..StepOutput::default() };
        self.time.0.fetch_add(self.us(rows as f64) as u64, Relaxed);
        self.steps.fetch_add(u64::from(!self.output.samples.is_empty()), Relaxed);
        Ok(())
    }

    fn finish(&mut self) -> Result<&StepOutput, ExecutorError> {
        Ok(&self.output)
    }
}

/// Ids of words, of single signs, and of runs of blanks.
fn ids(words: &mut HashMap<String, u32>, text: &str) -> Vec<u32> {
    let kind = |c: char| (c.is_alphanumeric() || c == '_', c.is_whitespace());
    let (mut ids, mut from) = (Vec::new(), 0);
    for (at, c) in text.char_indices() {
        let next = text[at + c.len_utf8()..].chars().next();
        if next.is_some_and(|next| kind(next) == kind(c) && kind(c) != (false, false)) {
            continue;
        }
        let new = words.len() as u32;
        ids.push(*words.entry(text[from..at + c.len_utf8()].to_owned()).or_insert(new));
        from = at + c.len_utf8();
    }
    ids
}

/// Of an answer: microseconds from its first token on, steps, drafts, and those that were right.
struct Measured {
    us: u64,
    steps: u64,
    drafts: u32,
    right: u32,
}

fn measure(
    prompt: &[u32],
    answer: &[u32],
    speculation: Option<Speculation>,
    curve: &Arc<[(f64, f64)]>,
) -> Measured {
    let (time, steps) = (Arc::<Time>::default(), Arc::<AtomicU64>::default());
    let tokens: Arc<[u32]> = prompt.iter().chain(answer).copied().collect();
    let vocab = tokens.iter().max().map_or(1, |most| most + 1);
    let blocks = tokens.len() as u32 / 16 + 64;
    let executor = Said {
        tokens,
        curve: curve.clone(),
        time: time.clone(),
        output: StepOutput::default(),
        steps: steps.clone(),
    };
    let cache =
        KvCache::new(CacheConfig { blocks, block_tokens: 16, bytes_per_block: 1 }, default_policy(0.01));
    let config = SchedulerConfig { max_model_len: blocks * 16, ..SchedulerConfig::default() };
    let (executor, clock) = (Box::new(executor), time);
    let parts = EngineParts { config, cache, executor, clock, vocab, tiers: Vec::new(), events: None };
    let engine = start(parts).expect("an engine");
    let (tenant, sampling) = (TenantId(1), SamplingParams::greedy(answer.len() as u32));
    let request = Request::new(engine.next_request_id(), tenant, root(tenant), prompt.into(), sampling);
    let (sender, events) = mpsc::channel();
    let sink = move |event: Event| sender.send(event).is_ok();
    engine.submit(Request { speculation, ..request }, Box::new(sink)).expect("it is taken");
    let (mut said, mut us) = (Vec::new(), 0.0);
    for event in events {
        match event {
            Event::Token { token, .. } => {
                us += if said.is_empty() { 0.0 } else { f64::from(token.us) };
                said.push(token.id);
            }
            Event::Finished { timing, error, .. } => {
                assert_eq!((error, said.as_slice()), (None, answer), "another answer");
                let (drafts, right) = (timing.draft_tokens, timing.accepted_draft_tokens);
                let steps = steps.load(Relaxed) - 1;
                return Measured { us: us as u64, steps, drafts, right };
            }
            _ => {}
        }
    }
    panic!("it never finished")
}

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [_, curve, folders @ ..] = args.as_slice() else { panic!("--us ROWS:US,ROWS:US,... FOLDER...") };
    let number = |text: &str| text.parse::<f64>().expect("a number");
    let point =
        |pair: &str| pair.split_once(':').map(|(rows, us)| (number(rows), number(us))).expect("ROWS:US");
    let curve: Arc<[(f64, f64)]> = curve.split(',').map(point).collect();
    assert!(curve.len() > 1, "two numbers of rows at least");
    println!(
        "{:<28} {:>7} {:>7}  {:>13} {:>12} {:>9}",
        "text", "prompt", "answer", "right/drafts", "tokens/step", "on / off"
    );
    for folder in folders {
        let folder = Path::new(folder);
        let name = folder.file_name().unwrap_or_default().to_string_lossy();
        let mut words = HashMap::new();
        let [prompt, answer, prediction] = ["prompt", "answer", "prediction"]
            .map(|part| ids(&mut words, &std::fs::read_to_string(folder.join(part)).unwrap_or_default()));
        let plain = measure(&prompt, &answer, None, &curve);
        for (what, expected) in [("", &[][..]), (", predicted", &prediction)] {
            if what.is_empty() || !expected.is_empty() {
                let speculation = Speculation::new(Drafter::Suffix, DRAFTS_MAX, &prompt, expected);
                let with = measure(&prompt, &answer, Some(speculation), &curve);
                println!(
                    "{:<28} {:>7} {:>7}  {:>13} {:>12.2} {:>9.2}",
                    format!("{name}{what}"),
                    prompt.len(),
                    answer.len(),
                    format!("{}/{}", with.right, with.drafts),
                    (answer.len() - 1) as f64 / with.steps as f64,
                    plain.us as f64 / with.us as f64,
                );
            }
        }
    }
}
