//! Drafts from text, where nothing is drafted and they would pay.
//!
//! How many would be right is counted in answers that had none (`lookups`). A step takes what it was measured to take, and each draft what a row
//! of a prompt was measured to take, with the positions that it sees: more than it takes wherever a row of a few costs no more than one of many.

use serde_json::json;

use super::super::lookups::{DraftedStep, LookupOutcomes};
use super::Advice;
use super::change_cost::ChangeCost;
use super::evidence::Evidence;
use super::gain::Gain;

/// Steps of answers that must have been looked at.
const LOOKED_AT: f64 = 256.0;

pub(super) fn look_back(found: &LookupOutcomes, evidence: &Evidence) -> Option<Advice> {
    let steps = &evidence.steps;
    if steps.draft_tokens > 0 || steps.ahead > 0 || found.steps < LOOKED_AT {
        return None;
    }
    let decode = steps.decode()?;
    // Microseconds of a step for each token of a sequence.
    let token_us = |step: &DraftedStep| {
        (decode.step_us + decode.sequences * (step.rows - 1.0) * decode.row_us) / step.tokens
    };
    let (drafts, best) = (1..)
        .zip(found.drafted())
        .min_by(|(_, one), (_, other)| token_us(one).total_cmp(&token_us(other)))?;
    let us = token_us(&best);
    Some(Advice {
        kind: "speculation",
        what: "Verify what was said before as drafts: --speculate ngram".to_owned(),
        because: format!(
            "nothing is drafted, and with up to {drafts} drafts a step from their own text answers would have said {:.1} tokens a step for {:.1} rows; a step takes {:.1} ms, and each row more at most {:.2} ms",
            best.tokens,
            best.rows,
            decode.step_us / 1e3,
            decode.row_us / 1e3
        ),
        gain: Gain::Steps { seconds: steps.decodes.steps as f64 * (decode.step_us - us) / 1e6 },
        cost: ChangeCost::Nothing,
        evidence: json!({"drafts": drafts, "tokens_per_step": best.tokens, "rows_per_step": best.rows, "row_s": decode.row_us / 1e6}),
    })
}

#[cfg(test)]
mod tests {
    use folio_engine::{Drafter, Drafters};
    use folio_sim::replay::Replay;
    use folio_sim::trace::TraceRequest;

    use super::super::StepEvidence;
    use super::super::testing::{
        all, config, kept_s, kinds, numbers, replay, request, run_drafting, step_evidence,
    };
    use super::*;
    use crate::observability::why::prompts::PromptFindings;

    const BLOCKS: u32 = 2000;

    /// Texts that are given back with every thirtieth token another; or others.
    fn requests(at_once: u64, are_alike: bool) -> Vec<TraceRequest> {
        let of = |seed: u64| {
            let mut next = numbers(seed);
            move || 1 + (next() % 40_000) as u32
        };
        let ask = |at: u64| {
            let prompt: Vec<u32> = std::iter::repeat_with(of(at)).take(140).collect();
            let mut other = of(at + 10_000);
            let change = |(place, token): (usize, &u32)| {
                if place % 30 == 0 || !are_alike { other() } else { *token }
            };
            let answer: Vec<u32> = prompt[20..].iter().enumerate().map(change).collect();
            let arrives = at / at_once * 600_000_000;
            TraceRequest { answer: answer.into(), ..request(arrives, prompt, 110) }
        };
        (0..40).map(ask).collect()
    }

    fn with(requests: &[TraceRequest], drafter: Option<Drafter>) -> Replay {
        run_drafting(requests, BLOCKS, drafter)
    }

    fn looked_at(requests: &[TraceRequest], became: &Replay) -> (PromptFindings, Evidence) {
        let (mut found, evidence) = replay(BLOCKS, &[]);
        let mut drafters = Drafters::default();
        for request in requests {
            let answer = &request.answer[..request.output as usize];
            found.lookups.add(&LookupOutcomes::of(&mut drafters, &request.prompt, answer));
        }
        (found, Evidence { steps: step_evidence(became, config().max_num_seqs, 0.0), ..evidence })
    }

    /// Seconds in which something is computed.
    fn busy_s(replay: &Replay) -> f64 {
        step_evidence(replay, 1, 0.0).seconds
    }

    #[test]
    fn drafts_from_text_gain_what_was_promised() {
        for at_once in [1, 4] {
            let requests = requests(at_once, true);
            let before = with(&requests, None);
            let (found, evidence) = looked_at(&requests, &before);
            let advice = all(&found, &evidence);
            assert_eq!(advice.len(), 1, "{advice:?}");
            let advice = &advice[0];
            assert!(advice.what.ends_with("--speculate ngram") && !advice.is_a_clients(), "{advice:?}");
            let after = with(&requests, Some(Drafter::Ngram));
            assert_eq!(after.report.generated_tokens, before.report.generated_tokens);
            kept_s(advice.gain.seconds(&evidence), busy_s(&before) - busy_s(&after));
        }
    }

    #[test]
    fn where_drafts_are_on_or_would_not_pay_nothing_is_said_of_them() {
        let alike = requests(1, true);
        let (found, evidence) = looked_at(&alike, &with(&alike, None));
        assert_eq!(kinds(&found, &evidence), ["speculation"]);
        let steps = evidence.steps;
        for (why, steps) in [
            ("there are some", StepEvidence { draft_tokens: 1, ..steps }),
            ("steps overlap, and with drafts they would not", StepEvidence { ahead: 1, ..steps }),
            ("a row takes as long as a step", StepEvidence { row_us: (100_000.0, 0.0), ..steps }),
            ("a row is not measured", StepEvidence { row_us: (0.0, 0.0), ..steps }),
        ] {
            assert!(kinds(&found, &Evidence { steps, ..evidence }).is_empty(), "{why}");
        }
        let others = requests(1, false);
        let (found, evidence) = looked_at(&others, &with(&others, None));
        assert!(
            found.lookups.steps >= LOOKED_AT && kinds(&found, &evidence).is_empty(),
            "nothing is said again"
        );
    }
}
