//! Decoding with drafts against decoding without, and against what drafts could gain at most.
//!
//! Text is drawn at temperature 1, so that it repeats only as far as the model does, and what the drafter is told to expect is that text with
//! a part of its tokens changed.

use std::collections::BTreeMap;
use std::sync::Arc;

use anyhow::{Context, Result, bail};
use folio_engine::{DRAFTS_MAX, Drafter, SamplingParams, Speculation};
use folio_kv::TenantId;
use serde::Serialize;

use super::engine::{Answer, Bench, together};
use super::stats::{median, median_interval};
use super::table;

/// Tokens of a prompt, and of an answer at least.
const PROMPT: u32 = 32;
const ANSWER: u32 = 128;
/// Of 100 tokens that the drafter is told to expect, those that come.
const EXPECTED: [u64; 5] = [0, 50, 80, 95, 100];
/// Drafts of every sequence in a step for which the bound is computed.
const BOUND: [u32; 7] = [1, 2, 3, 5, 7, 11, DRAFTS_MAX];
/// Rows of a step that are measured for it, and tokens of each.
const ROWS_MAX: u32 = 192;
const TOKENS: u32 = 12;

/// What was measured of one batch.
#[derive(Debug, Serialize)]
pub(super) struct Drafted {
    batch: u32,
    /// Of 100 tokens that the drafter was told to expect, those that came; `None`: a model drafts, which is told nothing.
    expected: Option<u64>,
    drafts: u32,
    right: u32,
    off_tokens_per_s: f64,
    on_tokens_per_s: f64,
    /// On by off, of each repetition.
    ratios: Vec<f64>,
    ratio: f64,
    /// Between which it is with 95 % confidence.
    interval: (f64, f64),
    /// What the ratio could be, if every sequence had the best number of drafts in every step, they were right as often as these,
    /// and finding them took no time; by the times of steps with so many sequences. `None`: there were no drafts.
    bound: Option<f64>,
}

/// Tokens per second without drafts and with them.
struct Round {
    off: f64,
    on: f64,
    drafts: u32,
    right: u32,
}

impl Bench<'_> {
    /// With drafts and without, in turn; both must say the same. The inner error says why there is nothing to measure.
    pub(super) fn speculation(
        &mut self,
        drafter: Drafter,
        batch: u32,
    ) -> Result<std::result::Result<Vec<Drafted>, String>> {
        let decode = self.args.decode.max(ANSWER);
        if let Err(reason) = self.fits(batch, PROMPT, decode) {
            return Ok(Err(reason));
        }
        let prompts: Vec<Arc<[u32]>> = (0..batch).map(|_| self.prompt(PROMPT)).collect();
        let by_model = drafter.is_model();
        let times = self.times_of_rows(batch, decode / 2)?;
        let levels = if by_model { &EXPECTED[..1] } else { &EXPECTED[..] };
        // Steps of sizes that there were none of yet: what they allocate and compile is not what drafts cost.
        self.compare(drafter, &prompts, levels[levels.len() - 1])?;
        let mut figures = Vec::new();
        for &expected in levels {
            // Whoever predicts so well has a record of its own, which begins in a round that is not measured.
            self.tenant = TenantId(1 + expected as u32);
            self.compare(drafter, &prompts, expected)?;
            let rounds: Vec<Round> = (0..self.args.repeat)
                .map(|_| self.compare(drafter, &prompts, expected))
                .collect::<Result<_>>()?;
            let sum = |count: fn(&Round) -> u32| rounds.iter().map(count).sum::<u32>();
            let (drafts, right) = (sum(|round| round.drafts), sum(|round| round.right));
            let ratios: Vec<f64> = rounds.iter().map(|round| round.on / round.off).collect();
            let share = f64::from(right) / f64::from(drafts.max(1));
            figures.push(Drafted {
                batch,
                expected: (!by_model).then_some(expected),
                drafts,
                right,
                off_tokens_per_s: median(rounds.iter().map(|round| round.off).collect()),
                on_tokens_per_s: median(rounds.iter().map(|round| round.on).collect()),
                ratio: median(ratios.clone()),
                interval: median_interval(&ratios),
                ratios,
                bound: (drafts > 0).then(|| bound(&times, batch, share)),
            });
        }
        self.tenant = TenantId(0);
        Ok(Ok(figures))
    }

    /// Other answers each time, since those that were said before are drafts: without drafts, and with drafts of which so many are right.
    fn compare(&mut self, drafter: Drafter, prompts: &[Arc<[u32]>], expected: u64) -> Result<Round> {
        let seed = self.random.below(u64::MAX);
        let tokens = self.args.decode.max(ANSWER);
        let sampling = SamplingParams { temperature: 1.0, seed, ..SamplingParams::greedy(tokens) };
        let plain = prompts.iter().map(|prompt| (prompt.clone(), None)).collect();
        let known = self.answer(plain, &sampling)?;
        let mut told = Vec::new();
        for (prompt, answer) in prompts.iter().zip(&known) {
            let mut guess = if drafter.is_model() { Vec::new() } else { answer.tokens.clone() };
            let wrong = guess.iter_mut().filter(|_| self.random.below(100) >= expected);
            wrong.for_each(|token| *token = token.checked_sub(1).unwrap_or(1));
            told.push((prompt.clone(), Some(Speculation::new(drafter, DRAFTS_MAX, prompt, &guess))));
        }
        let answers = self.answer(told, &sampling)?;
        if answers.iter().zip(&known).any(|(answer, known)| answer.tokens != known.tokens) {
            bail!("with drafts the answer is another: this is a defect, please report it");
        }
        Ok(Round {
            off: rate_of(&known)?,
            on: rate_of(&answers)?,
            drafts: answers.iter().map(|answer| answer.drafts).sum(),
            right: answers.iter().map(|answer| answer.right).sum(),
        })
    }

    /// Seconds of a step with as many sequences as a batch has rows with some drafts each; all have the same `context` tokens before their own,
    /// as the rows of one sequence have.
    fn times_of_rows(&mut self, batch: u32, context: u32) -> Result<BTreeMap<u32, f64>> {
        let rows = [0].iter().chain(&BOUND).map(|drafts| batch * (1 + drafts));
        let rows: Vec<u32> = rows.filter(|rows| *rows == batch || *rows <= ROWS_MAX).collect();
        let mut times = BTreeMap::new();
        for rows in rows {
            if self.fits(rows, context + PROMPT, TOKENS).is_err() {
                break;
            }
            let sampling = SamplingParams { temperature: 1.0, ..SamplingParams::greedy(TOKENS) };
            let mut rates = Vec::new();
            for _ in 0..self.args.repeat {
                let shared = self.prompt(context);
                self.answer(vec![(shared.clone(), None)], &SamplingParams::greedy(1))?;
                let prompts: Vec<Arc<[u32]>> =
                    (0..rows).map(|_| [&shared[..], &self.prompt(PROMPT)].concat().into()).collect();
                // Their KV is computed first, so that all of them then begin in the same step.
                let alone = prompts.iter().map(|prompt| (prompt.clone(), None)).collect();
                self.answer(alone, &SamplingParams::greedy(1))?;
                let answers = self.answer(prompts.into_iter().map(|p| (p, None)).collect(), &sampling)?;
                let arrived: Vec<_> = answers.into_iter().map(|answer| answer.times).collect();
                rates.extend(together(&arrived));
            }
            if !rates.is_empty() {
                times.insert(rows, f64::from(rows) / median(rates));
            }
        }
        Ok(times)
    }
}

/// The most that drafts of which `share` are right can make of a rate.
fn bound(times: &BTreeMap<u32, f64>, batch: u32, share: f64) -> f64 {
    let tokens = |drafts: u32| (0..=drafts).map(|draft| share.powi(draft as i32)).sum::<f64>();
    let Some(alone) = times.get(&batch) else { return 1.0 };
    let gain = |drafts: &u32| Some(tokens(*drafts) * alone / times.get(&(batch * (1 + drafts)))?);
    BOUND.iter().filter_map(gain).fold(1.0, f64::max)
}

/// Tokens per second while all sequences decode: with drafts they end at different times, and what is left then is another batch.
fn rate_of(answers: &[Answer]) -> Result<f64> {
    let arrived: Vec<_> = answers.iter().map(|answer| answer.times.clone()).collect();
    together(&arrived).context("the sequences never decoded together")
}

pub(super) fn table(measured: &[Drafted]) -> String {
    let row = |drafted: &Drafted| {
        let (least, most) = drafted.interval;
        vec![
            match drafted.expected {
                Some(share) => format!("batch {}, predictions right: {share} %", drafted.batch),
                None => format!("batch {}", drafted.batch),
            },
            format!("{} of {}", drafted.right, drafted.drafts),
            format!("{:.1}", drafted.off_tokens_per_s),
            format!("{:.1}", drafted.on_tokens_per_s),
            format!("{:.2} ({least:.2}..{most:.2})", drafted.ratio),
            drafted.bound.map_or(String::new(), |bound| format!("{bound:.2}")),
        ]
    };
    let rows: Vec<Vec<String>> = measured.iter().map(row).collect();
    let header = ["speculation", "drafts right", "off, tokens/s", "on, tokens/s", "on / off (95 %)", "bound"];
    table::render(&header, &rows)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bound_is_that_of_the_best_number_of_drafts() {
        // A row more takes a tenth of the first.
        let times: BTreeMap<u32, f64> = (1..=17).map(|rows| (rows, 0.9 + 0.1 * f64::from(rows))).collect();
        assert!((bound(&times, 1, 1.0) - 17.0 / 2.6).abs() < 1e-9, "all are right");
        assert!((bound(&times, 1, 0.5) - 1.75 / 1.2).abs() < 1e-9, "two are best");
        assert_eq!(bound(&times, 1, 0.0), 1.0);
        assert_eq!(bound(&times, 40, 1.0), 1.0, "nothing is known of so many rows");
    }
}
