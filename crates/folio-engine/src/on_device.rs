//! What a backend that samples by itself is asked for, and what its answers are here.
//!
//! Owns: the translation, and who chooses. Must never: choose a token. Behind a step that a device computes the next one may run, so what a
//! device cannot choose holds up nobody: of such a row (its answer follows a guide or counts drafts in a penalty, or several tokens are drawn of
//! it, the first of a request with `n` > 1) the logits come with the step's answers, and its tokens are chosen when it is over. So a mask is
//! asked for then.

use folio_model::sampling::{Choice, Draw, Logprobs, Outcome, SampleRow};
use smallvec::SmallVec;

use crate::executor::Served;
use crate::plan::{SamplePlan, SampleSpec, Sampled, StepPlan, Want};
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
    asked.iter().flat_map(|row| row.wants(plan)).all(|sample| match &sample.want {
        // A later step may name it where the device chooses.
        Want::Token(spec) => spec.params.logprobs.is_none_or(|top| top <= most),
        Want::Score { top, .. } => *top <= most,
        Want::Hidden | Want::HiddenSum { .. } => false,
    })
}

/// What is asked of the rows that [`ask`] found, in order.
pub(crate) fn rows<'a>(
    plan: &'a StepPlan,
    asked: &'a [Served],
) -> impl ExactSizeIterator<Item = SampleRow<'a>> {
    asked.iter().map(|row| match &row.wants(plan)[0].want {
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
    let samples = rows.flat_map(|(at, row)| row.wants(plan).iter().map(move |sample| (at, row, sample)));
    samples.filter_map(move |(row, of, sample)| {
        let Want::Token(spec) = &sample.want else { return None };
        let drafts = drafts(plan.sequences[of.sequence as usize].drafts_before(sample));
        Some(ChosenHere { row, drafts: drafts.into(), spec: spec.clone() })
    })
}

fn is_chosen_here(plan: &StepPlan, row: &Served) -> bool {
    let wants = row.wants(plan);
    let behind_drafts =
        |sample: &SamplePlan| !plan.sequences[row.sequence as usize].drafts_before(sample).is_empty();
    wants.iter().any(|sample| match &sample.want {
        Want::Token(spec) => {
            wants.len() > 1 || spec.guide.is_some() || (spec.history.is_some() && behind_drafts(sample))
        }
        _ => false,
    })
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
