//! A modelled device that chooses tokens by itself, later than it is asked to.
//!
//! Owns: what was begun and not finished. A step is computed when somebody waits for it and not before, and reads the tokens
//! that it follows then. So whatever of it is given to somebody else too early, shows. Must never: choose otherwise than
//! the engine's sampler, whose rules it borrows.

use std::collections::VecDeque;
use std::sync::Arc;

use folio_engine::plan::{SampleSpec, Sampled, TokenHistory};
use folio_engine::request::TokenLogprobs;
use folio_engine::{Sampler, SamplingParams};
use folio_model::backend::{BackendError, Batch, PLACEHOLDER};
use folio_model::sampling::{Choice, Draw, Logprobs, Outcome, SampleRow};

/// What is wanted of a row.
#[derive(Clone, Debug)]
enum Wanted {
    Score { token: u32, top: u32 },
    Token(SampleSpec),
    Logits,
}

/// See the module documentation.
#[derive(Default)]
pub(crate) struct Chooser {
    begun: VecDeque<(Batch, Vec<Wanted>)>,
    /// What the last finished step chose.
    chosen: Vec<u32>,
    sampler: Sampler,
}

impl Chooser {
    /// A step is begun and not finished.
    pub fn busy(&self) -> bool {
        !self.begun.is_empty()
    }

    /// Takes a step that is to be computed later.
    pub fn begin(
        &mut self,
        batch: &Batch,
        rows: &mut dyn ExactSizeIterator<Item = SampleRow<'_>>,
    ) -> Result<(), BackendError> {
        let before = self.begun.back().map_or(self.chosen.len(), |(_, wanted)| wanted.len());
        let unknown =
            |token: &&u32| **token & PLACEHOLDER != 0 && (**token & !PLACEHOLDER) as usize >= before;
        if let Some(token) = batch.tokens.iter().find(unknown) {
            let row = token & !PLACEHOLDER;
            return Err(BackendError::Batch(format!("row {row} of the step before, which has {before}")));
        }
        if self.begun.len() == 2 {
            return Err(BackendError::Device("two steps are under way".into()));
        }
        self.begun.push_back((batch.clone(), rows.map(wanted).collect()));
        Ok(())
    }

    /// The oldest step, with the tokens it follows in place.
    pub fn next(&mut self) -> Result<Batch, BackendError> {
        let Some((batch, _)) = self.begun.front_mut() else {
            return Err(BackendError::Device("no step was begun".into()));
        };
        for token in batch.tokens.iter_mut().filter(|token| **token & PLACEHOLDER != 0) {
            *token = self.chosen[(*token & !PLACEHOLDER) as usize];
        }
        Ok(batch.clone())
    }

    /// Chooses for the step that was [`Chooser::next`], from its logits.
    pub fn choose(&mut self, logits: &[f32], vocab: usize, outcomes: &mut Vec<Outcome>) {
        let Some((_, rows)) = self.begun.pop_front() else { return };
        self.chosen.clear();
        for (wanted, row) in rows.iter().zip(logits.chunks_exact(vocab)) {
            let outcome = match wanted {
                Wanted::Score { token, top } => outcome(self.sampler.score(row, *token, *top)),
                Wanted::Token(spec) => outcome(self.sampler.sample(row, spec)),
                Wanted::Logits => Outcome::Logits,
            };
            self.chosen.push(if let Outcome::Token { id, .. } = outcome { id } else { 0 });
            outcomes.push(outcome);
        }
    }

    /// The step that was [`Chooser::next`] cannot be computed.
    pub fn give_up(&mut self) {
        self.chosen.clear();
        self.chosen.resize(self.begun.pop_front().map_or(0, |(_, rows)| rows.len()), 0);
    }
}

fn wanted(row: SampleRow<'_>) -> Wanted {
    match row.choice {
        Choice::Known(token) => Wanted::Score { token, top: row.logprobs.unwrap_or(0) },
        Choice::Draw(draw) => Wanted::Token(spec(&draw, row.logprobs)),
        Choice::Logits => Wanted::Logits,
    }
}

fn spec(draw: &Draw<'_>, logprobs: Option<u32>) -> SampleSpec {
    let [eos, stop] = draw.forbidden;
    let params = SamplingParams {
        temperature: draw.temperature,
        top_k: draw.top_k,
        top_p: draw.top_p,
        min_p: draw.min_p,
        repetition_penalty: draw.repetition_penalty,
        frequency_penalty: draw.frequency_penalty,
        presence_penalty: draw.presence_penalty,
        logit_bias: draw.bias.into(),
        eos_token_ids: eos.into(),
        stop_token_ids: stop.into(),
        logprobs,
        ..SamplingParams::greedy(1)
    };
    let tokens: Vec<u32> = draw.seen.iter().map(|(token, _)| *token).collect();
    let history = (!draw.seen.is_empty()).then(|| {
        let mut history = TokenHistory::of_prompt(&tokens, 0);
        for (token, times) in draw.seen {
            (0..*times).for_each(|_| history.push(*token));
        }
        Arc::new(history)
    });
    let forbid_stop = draw.forbidden.iter().any(|list| !list.is_empty());
    let (params, seed, position) = (Arc::new(params), draw.seed, draw.position);
    SampleSpec { params, seed, position, history, forbid_stop, guide: None }
}

fn outcome(sampled: Sampled) -> Outcome {
    let logprobs = |TokenLogprobs { logprob, rank, top }| Logprobs { logprob, rank, top };
    match sampled {
        Sampled::Token { id, logprobs: own } => Outcome::Token { id, logprobs: own.map(logprobs) },
        Sampled::Score(own) => Outcome::Score(logprobs(own)),
        _ => Outcome::Failed("the modelled device has no answer"),
    }
}
