//! What a backend that samples by itself is asked for, and what its answers are here.
//!
//! Owns: the translation, and which steps a device can answer. Must never: choose a token. A step whose answers must follow a guide or
//! count drafts in a penalty, or that wants several tokens of one row (the first of a request with `n` > 1), is sampled on the host, from logits.

use folio_model::sampling::{Choice, Draw, Logprobs, Outcome, SampleRow};

use crate::executor::Served;
use crate::plan::{SampleSpec, Sampled, StepPlan, Want};
use crate::request::TokenLogprobs;

/// Finds what is wanted of each of a batch's rows of logits: sequence and sample of the plan. Whether a device that gives log
/// probabilities of `most` alternatives can answer all of it.
pub(crate) fn ask(plan: &StepPlan, served: &[Served], most: u32, asked: &mut Vec<[u32; 2]>) -> bool {
    asked.clear();
    asked.extend(served.iter().filter(|row| row.hidden == 0).map(|row| [row.sequence, row.first_sample]));
    let alone = served.iter().all(|row| row.hidden > 0 || row.samples == 1);
    alone
        && asked.iter().all(|place| match want(plan, place) {
            Want::Token(spec) if spec.history.is_some() && behind_drafts(plan, place) => false,
            Want::Token(spec) => spec.guide.is_none() && spec.params.logprobs.is_none_or(|top| top <= most),
            Want::Score { top, .. } => *top <= most,
            Want::Hidden | Want::HiddenSum { .. } => false,
        })
}

/// What [`ask`] found, in the order of the rows of logits.
pub(crate) fn rows<'a>(
    plan: &'a StepPlan,
    asked: &'a [[u32; 2]],
) -> impl ExactSizeIterator<Item = SampleRow<'a>> {
    asked.iter().map(|place| match want(plan, place) {
        Want::Token(spec) => SampleRow { choice: Choice::Draw(draw(spec)), logprobs: spec.params.logprobs },
        Want::Score { next, top } => SampleRow { choice: Choice::Known(*next), logprobs: Some(*top) },
        Want::Hidden | Want::HiddenSum { .. } => unreachable!("no row of logits"),
    })
}

fn want<'a>(plan: &'a StepPlan, [sequence, sample]: &[u32; 2]) -> &'a Want {
    &plan.sequences[*sequence as usize].samples[*sample as usize].want
}

fn behind_drafts(plan: &StepPlan, [sequence, sample]: &[u32; 2]) -> bool {
    let sequence = &plan.sequences[*sequence as usize];
    !sequence.drafts_before(&sequence.samples[*sample as usize]).is_empty()
}

fn draw(spec: &SampleSpec) -> Draw<'_> {
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
        seen: spec.history.as_ref().map_or(&[], |history| history.entries()),
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
