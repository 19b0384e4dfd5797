//! Decoding real texts with drafts and without: what drafting makes of text that repeats, at the cost of a model's steps.
//!
//! Owns: the texts, and the rules by which a model says one of them, whatever its weights are. So drafts are real, as are the steps in which
//! they are verified, and a model's shape is enough.

use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use anyhow::{Context, Result, ensure};
use folio_engine::{DRAFTS_MAX, Drafter, Guide, Restricted, Rules, RulesRef, SamplingParams, Speculation};
use folio_kv::TenantId;
use serde::Serialize;

use super::engine::{Bench, together};
use super::stats::{median, median_interval};
use super::table;

/// What was measured of one text.
#[derive(Debug, Serialize)]
pub(super) struct TextFigure {
    text: String,
    /// Whether the drafter was told the folder's `prediction`.
    predicted: bool,
    prompt_tokens: usize,
    answer_tokens: usize,
    drafts: u32,
    right: u32,
    /// Tokens behind the first, by steps in which they came.
    tokens_per_step: f64,
    off_tokens_per_s: f64,
    on_tokens_per_s: f64,
    /// On by off, of each repetition.
    ratios: Vec<f64>,
    ratio: f64,
    /// Between which it is with 95 % confidence.
    interval: (f64, f64),
}

impl Bench<'_> {
    /// The texts `prompt` and `answer` of a folder, and with its `prediction`, if it has one: without drafts and with them, in turn.
    pub(super) fn texts(&mut self, drafter: Drafter, folder: &Path) -> Result<Vec<TextFigure>> {
        let mut words = HashMap::new();
        let mut read = |part: &str| -> Result<Vec<u32>> {
            let path = folder.join(part);
            let text =
                std::fs::read_to_string(&path).with_context(|| format!("reading {}", path.display()))?;
            Ok(ids(&mut words, &text))
        };
        let (prompt, answer) = (read("prompt")?, read("answer")?);
        let prediction = folder.join("prediction").exists().then(|| read("prediction")).transpose()?;
        let (name, vocab) =
            (folder.file_name().unwrap_or_default().to_string_lossy(), self.runtime.model.vocab as u64);
        ensure!(words.len() as u64 <= vocab, "{name}: {} words, the model has {vocab} tokens", words.len());
        ensure!(answer.len() > 1, "{name}: the answer has no second word");
        let prompt: Arc<[u32]> = prompt.into();
        self.fits(1, prompt.len() as u32, answer.len() as u32)
            .map_err(|reason| anyhow::anyhow!("{name}: {reason}"))?;
        let told = [Some(&[][..]), prediction.as_deref()];
        let mut figures = Vec::new();
        for (predicted, told) in [false, true].into_iter().zip(told) {
            let Some(told) = told else { continue };
            let mut figure = TextFigure {
                text: name.to_string(),
                predicted,
                prompt_tokens: prompt.len(),
                answer_tokens: answer.len(),
                drafts: 0,
                right: 0,
                tokens_per_step: 0.0,
                off_tokens_per_s: 0.0,
                on_tokens_per_s: 0.0,
                ratios: Vec::new(),
                ratio: 0.0,
                interval: (0.0, 0.0),
            };
            let mut rates = [Vec::new(), Vec::new()];
            for _ in 0..self.args.repeat {
                self.say(&prompt, &answer, None, &mut figure, &mut rates[0])?;
                let speculation = Speculation::new(drafter, DRAFTS_MAX, &prompt, told);
                self.say(&prompt, &answer, Some(speculation), &mut figure, &mut rates[1])?;
            }
            figure.ratios = rates[1].iter().zip(&rates[0]).map(|(on, off)| on / off).collect();
            (figure.ratio, figure.interval) =
                (median(figure.ratios.clone()), median_interval(&figure.ratios));
            let behind = f64::from(self.args.repeat) * (answer.len() - 1) as f64;
            figure.tokens_per_step = behind / (behind - f64::from(figure.right));
            [figure.off_tokens_per_s, figure.on_tokens_per_s] = rates.map(median);
            figures.push(figure);
        }
        self.tenant = TenantId(0);
        Ok(figures)
    }

    /// One answer. For nobody who was answered before: what was said to him would be drafts.
    fn say(
        &mut self,
        prompt: &Arc<[u32]>,
        answer: &[u32],
        speculation: Option<Speculation>,
        figure: &mut TextFigure,
        rates: &mut Vec<f64>,
    ) -> Result<()> {
        self.tenant = TenantId(self.random.below(u64::from(u32::MAX)) as u32);
        let rules = Some(RulesRef(Arc::new(Script(answer.into()))));
        let sampling = SamplingParams { rules, ..SamplingParams::greedy(answer.len() as u32) };
        let said = self.answer(vec![(prompt.clone(), speculation)], &sampling)?.remove(0);
        ensure!(said.tokens == answer, "the answer is another: this is a defect, please report it");
        figure.drafts += said.drafts;
        figure.right += said.right;
        rates.push(together(&[said.times]).context("the answer came at once")?);
        Ok(())
    }
}

/// An answer that is said word by word.
struct Script(Arc<[u32]>);

struct Said {
    script: Arc<[u32]>,
    confirmed: AtomicUsize,
}

impl Rules for Script {
    fn guide(&self, chosen: &[u32]) -> Arc<dyn Guide> {
        Arc::new(Said { script: self.0.clone(), confirmed: AtomicUsize::new(chosen.len()) })
    }

    fn name(&self) -> &str {
        "script"
    }
}

impl Guide for Said {
    fn advance(&self, _: u32) {
        self.confirmed.fetch_add(1, Relaxed);
    }

    fn restrict(&self, drafts: &[u32], logits: &mut [f32]) -> Result<Restricted, String> {
        if let Some(next) = self.script.get(self.confirmed.load(Relaxed) + drafts.len()) {
            let keep = logits[*next as usize];
            logits.fill(f32::NEG_INFINITY);
            logits[*next as usize] = keep;
        }
        Ok(Restricted::Applied)
    }
}

/// Ids of words, of single signs, and of runs of blanks.
fn ids(words: &mut HashMap<String, u32>, text: &str) -> Vec<u32> {
    let kind = |c: char| (c.is_alphanumeric() || c == '_', c.is_whitespace());
    let (mut ids, mut from) = (Vec::new(), 0);
    for (at, c) in text.char_indices() {
        let next = text[at + c.len_utf8()..].chars().next();
        if next.is_some_and(|next| kind(next) == kind(c) && kind(c) != (false, false)) {
            continue;
        }
        let new = words.len() as u32;
        ids.push(*words.entry(text[from..at + c.len_utf8()].to_owned()).or_insert(new));
        from = at + c.len_utf8();
    }
    ids
}

pub(super) fn table(figures: &[TextFigure]) -> String {
    let row = |figure: &TextFigure| {
        let (least, most) = figure.interval;
        vec![
            format!("{}{}", figure.text, if figure.predicted { ", predicted" } else { "" }),
            format!("{}", figure.prompt_tokens),
            format!("{}", figure.answer_tokens),
            format!("{} of {}", figure.right, figure.drafts),
            format!("{:.1}", figure.tokens_per_step),
            format!("{:.1}", figure.off_tokens_per_s),
            format!("{:.1}", figure.on_tokens_per_s),
            format!("{:.2} ({least:.2}..{most:.2})", figure.ratio),
        ]
    };
    let rows: Vec<Vec<String>> = figures.iter().map(row).collect();
    let header = [
        "text",
        "prompt",
        "answer",
        "drafts right",
        "tokens/step",
        "off, tokens/s",
        "on, tokens/s",
        "on / off (95 %)",
    ];
    table::render(&header, &rows)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_signs_and_blanks_are_tokens() {
        let mut words = HashMap::new();
        assert_eq!(
            ids(&mut words, "let x_1 = (x_1 == é);\n\n"),
            [0, 1, 2, 1, 3, 1, 4, 2, 1, 3, 3, 1, 5, 6, 7, 8]
        );
        assert_eq!(ids(&mut words, "é x_1\n\n"), [5, 1, 2, 8]);
    }

    #[test]
    fn a_script_allows_its_next_word_alone() {
        let guide = Script([2, 0, 1].into()).guide(&[2]);
        let allowed = |drafts: &[u32]| {
            let mut logits = [1.0, -2.0, 3.0];
            guide.restrict(drafts, &mut logits).expect("it is known");
            (0..3).filter(|token| logits[*token as usize].is_finite()).collect::<Vec<u32>>()
        };
        assert_eq!((allowed(&[]), allowed(&[0])), (vec![0], vec![1]));
        guide.advance(0);
        assert_eq!((allowed(&[]), allowed(&[1])), (vec![1], vec![0, 1, 2]));
    }
}
