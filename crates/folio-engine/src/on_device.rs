//! What a backend that samples by itself is asked for, and what its answers are here.
//!
//! Owns: the translation, and who chooses. Must never: choose a token. Behind a step that a device computes the next one may run, so what a
//! device cannot choose holds up nobody: of such a row (its answer follows a guide, or counts drafts in a penalty) the logits come with the
//! step's answers, and its token is chosen when it is over. So a mask is asked for then. A step that wants several tokens of one row (the first
//! of a request with `n` > 1) is sampled on the host as a whole: a token is named by its row.

use folio_model::sampling::{Choice, Draw, Logprobs, Outcome, SampleRow};
use smallvec::SmallVec;

use crate::executor::Served;
use crate::plan::{SampleSpec, Sampled, StepPlan, Want};
use crate::request::TokenLogprobs;

/// A token that is chosen from the logits of row `row` when they are there.
pub(crate) struct ChosenHere {
    pub row: u32,
    pub drafts: SmallVec<[u32; 16]>,
    pub spec: SampleSpec,
}

/// Finds which of a batch's rows are rows of logits. Whether a device that gives log probabilities of `most` alternatives can answer
/// all of it.
pub(crate) fn ask(plan: &StepPlan, served: &[Served], most: u32, asked: &mut Vec<Served>) -> bool {
    asked.clear();
    asked.extend(served.iter().filter(|row| row.hidden == 0));
    asked.iter().all(|row| {
        row.samples == 1
            && match row.want(plan) {
                // A later step may name it where the device chooses.
                Want::Token(spec) => spec.params.logprobs.is_none_or(|top| top <= most),
                Want::Score { top, .. } => *top <= most,
                Want::Hidden | Want::HiddenSum { .. } => false,
            }
    })
}

/// What is asked of the rows that [`ask`] found, in order.
pub(crate) fn rows<'a>(
    plan: &'a StepPlan,
    asked: &'a [Served],
) -> impl ExactSizeIterator<Item = SampleRow<'a>> {
    asked.iter().map(|row| match row.want(plan) {
        Want::Token(_) if is_chosen_here(plan, row) => SampleRow { choice: Choice::Logits, logprobs: None },
        Want::Token(spec) => SampleRow { choice: Choice::Draw(draw(spec)), logprobs: spec.params.logprobs },
        Want::Score { next, top } => SampleRow { choice: Choice::Known(*next), logprobs: Some(*top) },
        Want::Hidden | Want::HiddenSum { .. } => unreachable!("no row of logits"),
    })
}

/// The tokens that are chosen here of the rows that [`ask`] found; `drafts`: the drafts before a sample.
pub(crate) fn chosen_here<'a>(
    plan: &'a StepPlan,
    asked: &'a [Served],
    drafts: impl Fn(&'a [u32]) -> &'a [u32],
) -> impl Iterator<Item = ChosenHere> {
    let rows = (0..).zip(asked).filter(|(_, row)| is_chosen_here(plan, row));
    rows.filter_map(move |(at, row)| match row.want(plan) {
        Want::Token(spec) => {
            Some(ChosenHere { row: at, drafts: drafts(drafts_before(plan, row)).into(), spec: spec.clone() })
        }
        _ => None,
    })
}

fn is_chosen_here(plan: &StepPlan, row: &Served) -> bool {
    let behind_drafts = || !drafts_before(plan, row).is_empty();
    matches!(row.want(plan), Want::Token(spec) if spec.guide.is_some() || (spec.history.is_some() && behind_drafts()))
}

fn drafts_before<'a>(plan: &'a StepPlan, row: &Served) -> &'a [u32] {
    plan.sequences[row.sequence as usize].drafts_before(&row.wants(plan)[0])
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
        Outcome::Logits => Sampled::Failed("its logits were not asked for".into()),
        Outcome::Failed(reason) => Sampled::Failed(reason.into()),
    }
}
