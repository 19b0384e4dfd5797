//! More requests at once, where all places are taken in every step while memory is not.
//!
//! A step of `n` sequences takes what such steps were measured to take, and one of more sequences for each of their rows what a row of a prompt
//! was measured to take, with the positions that it sees. That is more than it takes wherever a row of a few costs no more than one of many:
//! weights are read once for all of them.

use serde_json::json;

use super::Advice;
use super::change_cost::ChangeCost;
use super::evidence::{DecodeStep, Evidence};
use super::gain::Gain;

/// Share of the places that is taken in the mean.
const TAKEN: f64 = 0.9;
/// Share of the blocks that so many sequences may hold in the mean: some are longer, and come together.
const HELD: f64 = 0.7;
/// More than so many times as many sequences is too far from what was measured.
const TIMES: f64 = 2.0;

pub(super) fn more_at_once(evidence: &Evidence) -> Option<Advice> {
    let steps = &evidence.steps;
    let is_cause = steps.waiting_for_turn >= 1.0 && steps.waiting_for_blocks < steps.waiting_for_turn;
    if !is_cause || evidence.has_windows {
        return None;
    }
    let DecodeStep { sequences, rows, positions, step_us, row_us } = steps.decode()?;
    let (places, sequence_us) = (f64::from(steps.sequences_max), rows * row_us);
    if sequences < TAKEN * places {
        return None;
    }
    // One block more than it fills in the mean.
    let blocks = positions / f64::from(evidence.block_tokens.max(1)) + 1.0;
    let fit = HELD * f64::from(evidence.blocks) / blocks;
    let most = (TIMES * places).min(places + steps.waiting_for_turn);
    let wanted = most.min(fit).min(f64::from(steps.tokens_max) / rows).floor();
    if wanted <= places {
        return None;
    }
    let times = wanted / places;
    let slower_us = step_us + sequences * (times - 1.0) * sequence_us;
    let tokens = (steps.decodes.sequences + steps.beside_prompts) as f64;
    // What each sequence has of a step.
    let spared_us = (step_us - slower_us / times) / sequences;
    let (now_s, then_s) = (step_us / 1e6, slower_us / 1e6);
    Some(Advice {
        kind: "max_num_seqs",
        what: format!("Let {wanted:.0} requests run at once: --max-num-seqs {wanted:.0}"),
        because: format!(
            "{sequences:.1} of {places:.0} places are taken in a step, {:.1} requests wait for one, and {:.0} % of the KV memory would hold {wanted:.0}; a step takes {:.1} ms, and each sequence more at most {:.2} ms",
            steps.waiting_for_turn,
            100.0 * wanted * blocks / f64::from(evidence.blocks.max(1)),
            step_us / 1e3,
            sequence_us / 1e3
        ),
        gain: Gain::Steps { seconds: tokens * spared_us / 1e6 },
        cost: ChangeCost::SlowerSteps { now_s, then_s },
        evidence: json!({
            "sequences": sequences,
            "sequences_max": steps.sequences_max,
            "waiting": steps.waiting_for_turn,
            "sequence_s": sequence_us / 1e6,
        }),
    })
}

#[cfg(test)]
mod tests {
    use folio_engine::SchedulerConfig;
    use folio_sim::replay::Replay;
    use folio_sim::trace::TraceRequest;

    use super::super::StepEvidence;
    use super::super::testing::{
        all, config, kept_s, kinds, numbers, replay, request, run_with, step_evidence, text,
    };
    use super::*;

    const BLOCKS: u32 = 2000;

    fn with(requests: &[TraceRequest], max_num_seqs: u32) -> Replay {
        run_with(requests, BLOCKS, None, SchedulerConfig { max_num_seqs, ..config() })
    }

    fn requests() -> Vec<TraceRequest> {
        let mut next = numbers(3);
        let mut from = move |least: u64, range: u64| least + next() % range;
        (0..120).map(|at| request(0, text(at, from(32, 64) as usize), from(30, 40) as u32)).collect()
    }

    fn evidence(became: &Replay, sequences_max: u32) -> Evidence {
        let (_, evidence) = replay(BLOCKS, &[]);
        let steps = step_evidence(became, sequences_max, 40.0);
        Evidence { steps, ..evidence }
    }

    #[test]
    fn more_requests_at_once_gain_what_was_promised() {
        let (requests, (found, _)) = (requests(), replay(BLOCKS, &[]));
        for places in [4, 8] {
            let before = with(&requests, places);
            let evidence = evidence(&before, places);
            let advice = all(&found, &evidence);
            assert_eq!(advice.len(), 1, "{advice:?}");
            let (advice, wanted) = (&advice[0], 2 * places);
            assert_eq!(advice.what, format!("Let {wanted} requests run at once: --max-num-seqs {wanted}"));
            let after = with(&requests, wanted);
            assert_eq!(after.report.generated_tokens, before.report.generated_tokens);
            kept_s(advice.gain.seconds(&evidence), before.report.seconds - after.report.seconds);
            let told = advice.json(&evidence);
            let [now, then] =
                ["step_s_now", "step_s_then"].map(|name| told["costs"][name].as_f64().expect("a number"));
            assert!(then > now && then < 2.0 * now && !advice.is_a_clients(), "{told}");
            assert!(told["gain"]["step_share"].is_number(), "{told}");
        }
    }

    #[test]
    fn where_places_are_not_what_is_lacking_nothing_is_said_of_them() {
        let (found, _) = replay(BLOCKS, &[]);
        let evidence = evidence(&with(&requests(), 8), 8);
        assert_eq!(kinds(&found, &evidence), ["max_num_seqs"]);
        let steps = evidence.steps;
        for (why, steps) in [
            ("nobody waits", StepEvidence { waiting_for_turn: 0.0, ..steps }),
            ("they wait for blocks", StepEvidence { waiting_for_blocks: 40.0, ..steps }),
            ("places are free", StepEvidence { sequences_max: 64, ..steps }),
            ("steps have no more tokens", StepEvidence { tokens_max: 8, ..steps }),
            ("a row is not measured", StepEvidence { row_us: (0.0, 0.0), ..steps }),
            ("a row takes as long as a step", StepEvidence { row_us: (60_000.0, 0.0), ..steps }),
        ] {
            assert!(kinds(&found, &Evidence { steps, ..evidence }).is_empty(), "{why}");
        }
        assert!(
            kinds(&found, &Evidence { has_windows: true, ..evidence }).is_empty(),
            "more take other blocks, too"
        );
        // Eight have some 22 each.
        assert!(kinds(&found, &Evidence { blocks: 250, ..evidence }).is_empty(), "memory is full");
    }
}
