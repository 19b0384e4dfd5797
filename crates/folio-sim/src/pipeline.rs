//! An executor with several steps under way, whatever its device can do: a pipeline of stages, modelled.
//!
//! Owns: what was begun and not finished. A step is computed when somebody waits for it and not before, and reads then the tokens
//! that it names: so whatever of it is given to somebody else too early, shows. Must never: choose a token.

use std::collections::VecDeque;

use folio_engine::plan::{ExecutorError, PLACEHOLDER, Sampled, StepOutput, StepPlan};
use folio_engine::{EmbeddingInput, Executor};

/// Up to `depth` steps of `inner` under way, whose choices may be named by steps from the `lag`-th behind them on.
pub struct Pipeline<E> {
    inner: E,
    depth: usize,
    lag: usize,
    /// With the drafts that they name.
    begun: VecDeque<(StepPlan, Vec<u32>)>,
    /// Of the last `depth` steps that were finished: what each sample chose.
    chosen: VecDeque<(u64, Vec<u32>)>,
}

impl<E: Executor> Pipeline<E> {
    pub fn new(inner: E, depth: usize, lag: usize) -> Self {
        Self { inner, depth, lag, begun: VecDeque::new(), chosen: VecDeque::new() }
    }

    fn named(&self, step: u64, sample: usize) -> Option<u32> {
        let chosen = self.chosen.iter().find(|(of, _)| *of == step)?;
        chosen.1.get(sample).copied()
    }
}

impl<E: Executor> Executor for Pipeline<E> {
    fn depth(&self) -> usize {
        self.depth
    }

    fn lag(&self) -> usize {
        self.lag
    }

    fn embedding_input(&self) -> Option<EmbeddingInput> {
        self.inner.embedding_input()
    }

    fn begin(&mut self, plan: &StepPlan) -> Result<(), ExecutorError> {
        self.begin_with_drafts(plan, &[])
    }

    fn begin_with_drafts(&mut self, plan: &StepPlan, drafts: &[u32]) -> Result<(), ExecutorError> {
        let failed = |reason: String| Err(ExecutorError { step: plan.step, reason });
        if self.begun.len() == self.depth {
            return failed(format!("{} steps are under way", self.depth));
        }
        for sequence in &plan.sequences {
            let names = sequence.tokens.iter().any(|token| token & PLACEHOLDER != 0);
            let drafted = sequence.drafter.drafts > 0 && !drafts.is_empty();
            let known = |step: u64| self.begun.iter().any(|(begun, _)| begun.step == step);
            match sequence.follows {
                Some(step) if !names || !known(step) || step + self.lag as u64 > plan.step => {
                    return failed(format!("{sequence:?} cannot follow step {step}"));
                }
                None if names && !drafted => return failed(format!("{sequence:?} names a token of no step")),
                _ => {}
            }
        }
        self.begun.push_back((plan.clone(), drafts.to_vec()));
        Ok(())
    }

    fn finish(&mut self) -> Result<&StepOutput, ExecutorError> {
        let Some((mut plan, drafts)) = self.begun.pop_front() else {
            return Err(ExecutorError { step: 0, reason: "no step was begun".into() });
        };
        for sequence in &mut plan.sequences {
            let Some(step) = sequence.follows.take() else { continue };
            // Where none was chosen its sequence has ended.
            let token = self.named(step, (sequence.tokens[0] & !PLACEHOLDER) as usize);
            sequence.tokens[0] = token.unwrap_or(0);
        }
        self.inner.begin_with_drafts(&plan, &drafts)?;
        let output = self.inner.finish()?;
        let chosen = output.samples.iter().map(|sample| match sample {
            Sampled::Token { id, .. } => *id,
            _ => 0,
        });
        self.chosen.push_back((plan.step, chosen.collect()));
        if self.chosen.len() > self.depth {
            self.chosen.pop_front();
        }
        Ok(output)
    }
}
