//! What drafts from text would have been worth in answers that had none.
//!
//! Owns: in how many steps the engine's own lookup (`ngram`) would have had so many drafts, and in how many of those all were right. Must
//! never: keep a token.

use std::sync::Arc;

use folio_engine::request::{Event, RequestId, Token};
use folio_engine::{DRAFTS_MAX, Drafter, Drafters, Request, SamplingParams, Speculation};
use folio_kv::{Identity, Root, TenantId};

const MOST: usize = DRAFTS_MAX as usize;

/// Steps that answers would have taken, old ones counting less.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct LookupOutcomes {
    pub steps: f64,
    /// Steps with so many drafts at least, from one on, and those in which as many were right.
    offered: [f64; MOST],
    right: [f64; MOST],
}

/// Rows of a sequence's step, and tokens that it says.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct DraftedStep {
    pub rows: f64,
    pub tokens: f64,
}

impl LookupOutcomes {
    /// Of an answer. O(prompt + answer).
    pub fn of(drafters: &mut Drafters, prompt: &Arc<[u32]>, answer: &[u32]) -> Self {
        let mut outcomes = Self::default();
        let id = RequestId(0);
        let nobody = Identity {
            tenant: TenantId(0),
            tenant_secret: &[0; 32],
            model_digest: &[0; 32],
            layout_digest: &[0; 32],
            extra: &[],
        };
        let sampling = SamplingParams::greedy(answer.len() as u32);
        let speculation = Some(Speculation::new(Drafter::Ngram, DRAFTS_MAX, prompt, &[]));
        let request = Request::new(id, TenantId(0), Root::derive(&nobody), prompt.clone(), sampling);
        drafters.open(&Request { speculation, ..request });
        let mut said = 0;
        let mut next = 1;
        // The last token needs no step behind it.
        while next < answer.len() {
            for token in &answer[said..next] {
                let token = Token { id: *token, us: 0.0, logprobs: None };
                drafters.follow(&[(id, Event::Token { choice: 0, token })]);
            }
            said = next;
            let drafts = drafters.drafts(id, 0);
            let drafts = &drafts[..drafts.len().min(answer.len() - next - 1)];
            let right =
                drafts.iter().zip(&answer[next..]).take_while(|(draft, token)| draft == token).count();
            outcomes.steps += 1.0;
            outcomes.offered[..drafts.len()].iter_mut().for_each(|count| *count += 1.0);
            outcomes.right[..right].iter_mut().for_each(|count| *count += 1.0);
            next += right + 1;
        }
        drafters.clear();
        outcomes
    }

    pub fn add(&mut self, other: &Self) {
        self.steps += other.steps;
        self.offered.iter_mut().zip(other.offered).for_each(|(sum, more)| *sum += more);
        self.right.iter_mut().zip(other.right).for_each(|(sum, more)| *sum += more);
    }

    pub fn age(&mut self, factor: f64) {
        self.steps *= factor;
        self.offered.iter_mut().chain(&mut self.right).for_each(|count| *count *= factor);
    }

    /// The mean step with up to so many drafts, from one on.
    pub fn drafted(&self) -> impl Iterator<Item = DraftedStep> {
        let each = self.offered.into_iter().zip(self.right);
        let steps = self.steps.max(f64::MIN_POSITIVE);
        each.scan(DraftedStep { rows: 1.0, tokens: 1.0 }, move |step, (offered, right)| {
            step.rows += offered / steps;
            step.tokens += right / steps;
            Some(*step)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_that_repeats_its_prompt_has_drafts_and_another_has_none() {
        let prompt: Arc<[u32]> = (1..101).collect();
        let mut drafters = Drafters::default();
        let mut of = |answer: Vec<u32>| LookupOutcomes::of(&mut drafters, &prompt, &answer);
        let other = of((500..560).collect());
        assert_eq!((other.steps, other.drafted().last().map(|step| step.rows)), (59.0, Some(1.0)));
        // Three tokens until it is found where they stand; then as many as may be.
        let same = of((21..81).collect());
        let last = same.drafted().last().expect("a step");
        assert!(same.steps < 10.0 && last.tokens > 6.0 && (last.rows - last.tokens).abs() < 1e-9, "{same:?}");
        assert!(same.drafted().map(|step| step.rows).is_sorted());
        // Each step says what is told of it.
        assert!((same.steps * last.tokens - 59.0).abs() < 1e-6, "{same:?}");
        let wrong = of((21..81).map(|token| if token % 6 == 0 { 900 } else { token }).collect());
        let last = wrong.drafted().last().expect("a step");
        assert!(last.rows > last.tokens && last.tokens > 1.0, "{wrong:?}");
        let mut sum = same;
        sum.add(&wrong);
        sum.age(0.5);
        assert_eq!(sum.steps, (same.steps + wrong.steps) / 2.0);
    }
}
