//! Sampling on this host's threads, each of which takes the next sequence that nobody has.
//!
//! Owns: the order of a sequence's rows, so that none behind a wrong draft is sampled. Must never: choose a token by itself
//! ([`Sampler`] does), or let one sequence's answer depend on another's.

use std::borrow::Cow;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use folio_model::backend::PLACEHOLDER;

use crate::executor::Served;
use crate::plan::{SamplePlan, SampleSpec, Sampled, SequencePlan, StepPlan, Want};
use crate::sampler::Sampler;

/// A model that says some of the tokens.
pub(crate) struct SomeTokens {
    /// Of each value in a row of logits.
    pub ids: Arc<[u32]>,
    /// Of all tokens.
    pub vocab: usize,
}

/// A sequence that is sampled here: its rows in order, beside those of other sequences.
#[derive(Default)]
pub(crate) struct SampledHere {
    /// Its part of what is served, and the first of its rows of logits.
    served: Range<usize>,
    first_row: usize,
    /// To all that is wanted.
    answers: Mutex<Vec<Sampled>>,
}

impl SampledHere {
    /// When no thread samples any more.
    pub fn answers(&mut self) -> &mut Vec<Sampled> {
        self.answers.get_mut().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Divides what is served into sequences, the first of `sampled`. Returns how many there are.
pub(crate) fn by_sequence(served: &[Served], sampled: &mut Vec<SampledHere>) -> usize {
    let (mut sequences, mut first, mut first_row) = (0, 0, 0);
    for served in served.chunk_by(|a, b| a.sequence == b.sequence) {
        if sequences == sampled.len() {
            sampled.push(SampledHere::default());
        }
        let sampled = &mut sampled[sequences];
        (sampled.served, sampled.first_row) = (first..first + served.len(), first_row);
        sequences += 1;
        first += served.len();
        first_row += served.iter().filter(|served| served.hidden == 0).count();
    }
    sequences
}

/// What sampling here looks at, from any thread.
pub(crate) struct Here<'a> {
    pub plan: &'a StepPlan,
    pub served: &'a [Served],
    pub vocab: usize,
    pub some_tokens: Option<&'a SomeTokens>,
    pub drafts: &'a [u32],
}

impl Here<'_> {
    /// Answers all that is wanted of a sequence from the batch's `logits`. `before` is its answer in the pass before, if it began there.
    pub fn sample(&self, sampled: &SampledHere, before: Option<&Sampled>, logits: &[f32]) {
        let mut answers = sampled.answers.lock().unwrap_or_else(PoisonError::into_inner);
        answers.clear();
        let mut rows = logits.chunks_exact(self.vocab).skip(sampled.first_row);
        let some_tokens = self.some_tokens.map(|some| (&*some.ids, some.vocab));
        for served in &self.served[sampled.served.clone()] {
            let samples = served.wants(self.plan);
            if served.hidden > 0 {
                // Its place; the backend is asked when nobody reads logits any more.
                answers.extend(samples.iter().map(|_| Sampled::Hidden(Vec::new())));
                continue;
            }
            let row = rows.next().unwrap_or_default();
            let sequence = &self.plan.sequences[served.sequence as usize];
            Sampler::of_thread(|sampler| {
                sampler.with_row(row, some_tokens, |sampler, row| {
                    for sample in samples {
                        let answer = self.answer(sampler, sequence, sample, answers.last().or(before), row);
                        answers.push(answer);
                    }
                });
            });
        }
    }

    /// One answer from a row; `before` is the one before it.
    fn answer(
        &self,
        sampler: &mut Sampler,
        sequence: &SequencePlan,
        sample: &SamplePlan,
        before: Option<&Sampled>,
        row: &[f32],
    ) -> Sampled {
        match &sample.want {
            Want::Token(spec) => {
                let drafts = named(sequence.drafts_before(sample), self.drafts);
                sample_reached(sampler, before, drafts, row, spec)
            }
            Want::Score { next, top } => sampler.score(row, *next, *top),
            Want::Hidden | Want::HiddenSum { .. } => Sampled::Failed(Cow::Borrowed("no row was asked for")),
        }
    }
}

/// What is chosen behind `drafts`, of which the last was to be the answer `before`. Where it is not, nobody reads the row, and nothing is chosen.
pub(crate) fn sample_reached(
    sampler: &mut Sampler,
    before: Option<&Sampled>,
    drafts: &[u32],
    logits: &[f32],
    spec: &SampleSpec,
) -> Sampled {
    match (drafts.last(), before) {
        (Some(draft), Some(Sampled::Token { id, .. })) if draft == id => {}
        (Some(_), Some(_)) => return Sampled::Failed(Cow::Borrowed("a draft before it is wrong")),
        // The answer before it may be one of an earlier pass.
        _ => {}
    }
    sampler.sample_behind(drafts, logits, spec)
}

/// The drafts themselves, where they are named by their places.
pub(crate) fn named<'a>(drafts: &'a [u32], by_place: &'a [u32]) -> &'a [u32] {
    match drafts.first() {
        Some(first) if first & PLACEHOLDER != 0 => {
            let first = (first & !PLACEHOLDER) as usize;
            by_place.get(first..first + drafts.len()).unwrap_or_default()
        }
        _ => drafts,
    }
}
