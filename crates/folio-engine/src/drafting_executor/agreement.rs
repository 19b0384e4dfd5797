//! How often a drafter says what its model says, before anything is served.
//!
//! Owns: one step of each over a text that both are given. Must never: run beside others: it writes in the first blocks of every pool, of which
//! nothing may be in use.
//!
//! Whatever a drafter gets wrongly (features of other layers, a norm too many or too few, another model's hidden states) shows in no error,
//! only in drafts that are wrong. Here it shows as a number.

use std::sync::Arc;

use crate::plan::{
    DrafterModel, Executor, ExecutorError, Reads, SamplePlan, SampleSpec, Sampled, SequenceId, SequencePlan,
    StepPlan, Want,
};
use crate::request::SamplingParams;

/// What came of it: of so many places of a text, at how many both say the same token.
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
pub struct Pool {
    pub block_tokens: u32,
    pub blocks: u32,
}

/// The model's most probable token behind each token of the text, and the drafter's. `pools`: of the model's cache groups, and the
/// drafter's behind them. The text is cut to what they have room for, and unknown tokens are token 0 to the drafter, which has `vocab`.
/// Two steps of at most `text.len()` rows.
pub fn agreement(
    model: &mut dyn Executor,
    drafter: &mut dyn Executor,
    as_drafter: DrafterModel,
    pools: &[Pool],
    vocab: u32,
    text: &[u32],
) -> Result<Agreement, ExecutorError> {
    let room = pools.iter().map(|pool| u64::from(pool.block_tokens) * u64::from(pool.blocks)).min();
    let room = room.unwrap_or(0).min(as_drafter.positions.into()).min(text.len() as u64);
    let text = &text[..room as usize];
    let lag = as_drafter.reads.lag() as usize;
    let (of_model, of_drafter) = pools.split_at(as_drafter.group.min(pools.len()));
    if text.len() <= lag || of_drafter.is_empty() {
        return Ok(Agreement::default());
    }
    let mut plan = step(text.iter().copied(), of_model);
    plan.sequences[0].features = if as_drafter.reads == Reads::Tokens { 0 } else { text.len() as u32 };
    let output = model.execute(&plan)?;
    let said = tokens(&output.samples);
    let known = |token: &u32| if *token < vocab { *token } else { 0 };
    let mut plan = step(text[lag..].iter().map(known), &of_drafter[..1]);
    if let Reads::Features { width } = as_drafter.reads {
        plan.features = output.features.get(..(text.len() - lag) * width).unwrap_or_default().to_vec();
    }
    let drafted = tokens(&drafter.execute(&plan)?.samples);
    // The row of the text's second token is the first of a drafter that lags.
    let pairs = said[lag.min(said.len())..].iter().zip(&drafted);
    let same = pairs.clone().filter(|(said, drafted)| said.is_some() && said == drafted).count();
    Ok(Agreement { places: pairs.count() as u32, same: same as u32 })
}

/// One sequence of these tokens, in the first blocks of each pool, whose every row says something.
fn step(tokens: impl Iterator<Item = u32>, pools: &[Pool]) -> StepPlan {
    let mut sequence = SequencePlan::empty(SequenceId(u64::MAX));
    sequence.tokens.extend(tokens);
    let rows = sequence.tokens.len() as u32;
    sequence.block_tables =
        pools.iter().map(|pool| (0..rows.div_ceil(pool.block_tokens)).collect()).collect();
    let params = Arc::new(SamplingParams::greedy(1));
    let spec = |row| SampleSpec {
        params: params.clone(),
        seed: 0,
        position: row + 1,
        history: None,
        forbid_stop: false,
        guide: None,
    };
    sequence.samples.extend((0..rows).map(|row| SamplePlan { row, want: Want::Token(spec(row)) }));
    StepPlan { step: 1, sequences: vec![Box::new(sequence)], ..StepPlan::default() }
}

fn tokens(samples: &[Sampled]) -> Vec<Option<u32>> {
    let token = |sampled: &Sampled| match sampled {
        Sampled::Token { id, .. } => Some(*id),
        _ => None,
    };
    samples.iter().map(token).collect()
}
