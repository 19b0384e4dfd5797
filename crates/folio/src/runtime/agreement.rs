//! How often a drafter says what its model says, before anything is served.
//!
//! Owns: the model's answers to a few prompts, and one step of each over them. Must never: run beside others: it writes in the first blocks of
//! every pool, of which nothing may be in use; nor read a clock.
//!
//! Whatever a drafter gets wrongly (features of other layers, a norm too many or too few, another model's hidden states) shows in no error,
//! only in drafts that are wrong. Here it shows as a number. Only places of the model's own answers count: a drafter that was made for the model
//! is nearly always right there, while at places of any other text one that fits is hardly better than one that does not.

use std::sync::Arc;

use folio_engine::plan::{
    ExecutorError, SamplePlan, SampleSpec, Sampled, SequenceId, SequencePlan, StepPlan, Want,
};
use folio_engine::{DrafterModel, Executor, Reads, SamplingParams};

#[cfg(test)]
mod tests;

/// What came of it: of so many places of the model's answers, at how many both say the same token.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Agreement {
    pub places: u32,
    pub same: u32,
}

impl Agreement {
    /// 0 to 1.
    pub fn share(self) -> f64 {
        f64::from(self.same) / f64::from(self.places.max(1))
    }

    /// Tokens of a step with so many drafts, if each is right as often as the first. Later ones are right less often.
    pub fn tokens_per_step(self, drafts: u32) -> f64 {
        (0..=drafts).map(|right| self.share().powi(right as i32)).sum()
    }
}

/// A pool of a cache group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PoolShape {
    pub block_tokens: u32,
    pub blocks: u32,
}

/// What there is for it.
#[derive(Clone, Copy, Debug)]
pub struct AgreementLimits<'a> {
    /// Of the model's cache groups, and the drafter's behind them.
    pub pools: &'a [PoolShape],
    /// Most rows of a step.
    pub rows: u32,
    /// Tokens that the drafter knows.
    pub vocab: u32,
}

/// What the model is asked, in tokens.
#[derive(Clone, Debug, Default)]
pub struct Questions {
    pub prompts: Vec<Vec<u32>>,
    /// Most tokens of an answer.
    pub answer_tokens: u32,
    /// An answer ends before one of these.
    pub ends: Vec<u32>,
}

/// The model's most probable token at each place of its answers, and the drafter's. Prompts that there is no room for are left out, an answer
/// ends where the room does or `goes_on` says no, and unknown tokens are token 0 to the drafter. For each prompt a step for each token of the
/// answer, and then one of the model and one of the drafter over both.
pub fn agreement(
    model: &mut dyn Executor,
    drafter: &mut dyn Executor,
    as_drafter: DrafterModel,
    room: AgreementLimits<'_>,
    questions: &Questions,
    goes_on: &mut dyn FnMut() -> bool,
) -> Result<Agreement, ExecutorError> {
    let AgreementLimits { pools, rows, vocab } = room;
    let (of_model, of_drafter) = pools.split_at(as_drafter.group.min(pools.len()));
    let room = pools.iter().map(|pool| u64::from(pool.block_tokens) * u64::from(pool.blocks)).min();
    let room = room.unwrap_or(0).min(as_drafter.positions.into()).min(rows.into()) as usize;
    let lag = as_drafter.reads.lag() as usize;
    let (mut found, mut steps) = (Agreement::default(), Steps(0));
    for prompt in &questions.prompts {
        if of_drafter.is_empty() || prompt.len() <= lag || prompt.len() >= room {
            continue;
        }
        let most = room.min(prompt.len() + questions.answer_tokens as usize);
        let text = answered((&mut *model, of_model), &mut steps, prompt, most, &questions.ends, goes_on)?;
        let mut plan = steps.next(0, &text, of_model);
        plan.sequences[0].features = if as_drafter.reads == Reads::Tokens { 0 } else { text.len() as u32 };
        let output = model.execute(&plan)?;
        let said = tokens(&output.samples);
        let known: Vec<u32> =
            text[lag..].iter().map(|token| if *token < vocab { *token } else { 0 }).collect();
        let mut plan = steps.next(0, &known, of_drafter);
        if let Reads::Features { width } = as_drafter.reads {
            plan.features = output.features.get(..known.len() * width).unwrap_or_default().to_vec();
        }
        let drafted = tokens(&drafter.execute(&plan)?.samples);
        // The row of a prompt's last token says the answer's first; that of the text's second token is the first of a drafter that lags.
        let first = prompt.len() - 1;
        let pairs = said.iter().skip(first).zip(drafted.iter().skip(first - lag));
        found.same +=
            pairs.clone().filter(|(said, drafted)| said.is_some() && said == drafted).count() as u32;
        found.places += pairs.count() as u32;
    }
    Ok(found)
}

/// A prompt and what the model says behind it, at most so many tokens together.
fn answered(
    (model, pools): (&mut dyn Executor, &[PoolShape]),
    steps: &mut Steps,
    prompt: &[u32],
    most: usize,
    ends: &[u32],
    goes_on: &mut dyn FnMut() -> bool,
) -> Result<Vec<u32>, ExecutorError> {
    let (mut text, mut computed) = (prompt.to_vec(), 0);
    while text.len() < most {
        let mut plan = steps.next(computed, &text[computed..], pools);
        let samples = &mut plan.sequences[0].samples;
        samples.drain(..samples.len() - 1);
        computed = text.len();
        match tokens(&model.execute(&plan)?.samples)[..] {
            [Some(token)] if !ends.contains(&token) => text.push(token),
            _ => break,
        }
        if !goes_on() {
            break;
        }
    }
    Ok(text)
}

/// Whoever computes steps tells them apart by number: this is that of the last.
struct Steps(u64);

impl Steps {
    /// A step of one sequence whose tokens from position `first` on are these, in the first blocks of each pool, whose every row says something.
    fn next(&mut self, first: usize, tokens: &[u32], pools: &[PoolShape]) -> StepPlan {
        self.0 += 1;
        let mut sequence = SequencePlan::empty(SequenceId(u64::MAX));
        sequence.first_position = first as u32;
        sequence.tokens.extend(tokens.iter().copied());
        let end = sequence.end();
        let table = |pool: &PoolShape| (0..end.div_ceil(pool.block_tokens)).collect();
        sequence.block_tables = pools.iter().map(table).collect();
        let params = Arc::new(SamplingParams::greedy(1));
        let spec = |row| SampleSpec {
            params: params.clone(),
            seed: 0,
            position: first as u32 + row + 1,
            history: None,
            forbid_stop: false,
            guide: None,
        };
        let rows = 0..tokens.len() as u32;
        sequence.samples.extend(rows.map(|row| SamplePlan { row, want: Want::Token(spec(row)) }));
        StepPlan { step: self.0, sequences: vec![Box::new(sequence)], ..StepPlan::default() }
    }
}

fn tokens(samples: &[Sampled]) -> Vec<Option<u32>> {
    let token = |sampled: &Sampled| match sampled {
        Sampled::Token { id, .. } => Some(*id),
        _ => None,
    };
    samples.iter().map(token).collect()
}
