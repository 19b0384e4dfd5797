//! What a backend that samples by itself is asked for, and what its answers are here.
//!
//! Owns: the translation, and which steps a device can answer. Must never: choose a token. A step whose answers must follow a guide, or
//! that wants several tokens of one row (the first of a request with `n` > 1), is sampled on the host, from logits.

use folio_model::sampling::{Choice, Draw, Logprobs, Outcome, SampleRow};

use crate::executor::Served;
use crate::plan::{SampleSpec, Sampled, StepPlan, Want};
use crate::request::TokenLogprobs;

/// The wants of a batch's rows of logits.
pub(crate) struct OnDevice<'a> {
    wants: Vec<&'a Want>,
    /// `(token, times generated)` of the histories of all rows, one after the other.
    seen: Vec<(u32, u32)>,
}

impl<'a> OnDevice<'a> {
    /// `None`: a row wants what a device that gives log probabilities of `most` alternatives cannot answer.
    pub(crate) fn of(plan: &'a StepPlan, served: &[Served], most: u32) -> Option<Self> {
        let mut this = Self { wants: Vec::with_capacity(served.len()), seen: Vec::new() };
        for served in served.iter().filter(|served| served.hidden == 0) {
            let samples = &plan.sequences[served.sequence as usize].samples;
            let want = &samples.get(served.first_sample as usize)?.want;
            let answered = match want {
                Want::Token(spec) => {
                    spec.guide.is_none() && spec.params.logprobs.is_none_or(|top| top <= most)
                }
                Want::Score { top, .. } => *top <= most,
                Want::Hidden | Want::HiddenSum { .. } => false,
            };
            if served.samples != 1 || !answered {
                return None;
            }
            if let Want::Token(SampleSpec { history: Some(history), .. }) = want {
                this.seen.extend(history.entries().iter().map(|entry| (entry.token, entry.generated)));
            }
            this.wants.push(want);
        }
        Some(this)
    }

    /// In the order of the rows of logits.
    pub(crate) fn rows(&self) -> Vec<SampleRow<'_>> {
        let mut seen = &self.seen[..];
        let row = |want: &&'a Want| match want {
            Want::Token(spec) => {
                let length = spec.history.as_ref().map_or(0, |history| history.entries().len());
                let (own, rest) = seen.split_at(length);
                seen = rest;
                SampleRow { choice: Choice::Draw(draw(spec, own)), logprobs: spec.params.logprobs }
            }
            Want::Score { next, top } => SampleRow { choice: Choice::Known(*next), logprobs: Some(*top) },
            Want::Hidden | Want::HiddenSum { .. } => unreachable!("no row of logits"),
        };
        self.wants.iter().map(row).collect()
    }
}

fn draw<'a>(spec: &'a SampleSpec, seen: &'a [(u32, u32)]) -> Draw<'a> {
    let params = &*spec.params;
    let forbidden: [&[u32]; 2] = match spec.forbid_stop {
        true => [&params.eos_token_ids, &params.stop_token_ids],
        false => [&[], &[]],
    };
    Draw {
        seed: spec.seed,
        position: spec.position,
        temperature: params.temperature,
        top_k: params.top_k,
        top_p: params.top_p,
        min_p: params.min_p,
        repetition_penalty: params.repetition_penalty,
        frequency_penalty: params.frequency_penalty,
        presence_penalty: params.presence_penalty,
        seen,
        bias: &params.logit_bias,
        forbidden,
    }
}

pub(crate) fn sampled(outcome: Outcome) -> Sampled {
    let logprobs = |Logprobs { logprob, rank, top }| TokenLogprobs { logprob, rank, top };
    match outcome {
        Outcome::Token { id, logprobs: own } => Sampled::Token { id, logprobs: own.map(logprobs) },
        Outcome::Score(own) => Sampled::Score(logprobs(own)),
        Outcome::Failed(reason) => Sampled::Failed(reason.into()),
    }
}
