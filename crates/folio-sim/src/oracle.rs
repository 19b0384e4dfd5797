//! What a request must generate, computed alone and without a cache: no blocks, no batch, no scheduler.

use std::sync::Arc;

use folio_engine::plan::{SampleSpec, Sampled, TokenHistory};
use folio_engine::request::{Pooling, Request, TokenLogprobs};
use folio_engine::{FinishReason, GuideRef, Sampler, choice_seed};
use folio_kv::{GroupConfig, Layout};

use crate::backend::{EMPTY, extend, group_value, hidden, logits, optional_value, value};

/// One choice's whole output.
#[derive(Clone, Debug, PartialEq)]
pub struct Answer {
    pub tokens: Vec<(u32, Option<TokenLogprobs>)>,
    pub reason: FinishReason,
}

/// Everything a request must be told.
#[derive(Clone, Debug, PartialEq)]
pub struct Expectation {
    pub prompt_logprobs: Vec<TokenLogprobs>,
    pub pooled: Option<Vec<f32>>,
    pub choices: Vec<Answer>,
}

fn row(context: u64, vocab: usize) -> Vec<f32> {
    let mut row = Vec::with_capacity(vocab);
    logits(context, vocab, &mut row);
    row
}

/// Everything computed so far, with nothing ever released.
#[derive(Clone)]
struct Solo<'a> {
    context: u64,
    /// Beside group 0.
    groups: &'a [GroupConfig],
    /// Values of each group, by position; group 0 first.
    written: Vec<Vec<u64>>,
}

impl<'a> Solo<'a> {
    fn new(groups: &'a [GroupConfig]) -> Self {
        Self { context: EMPTY, groups, written: vec![Vec::new(); 1 + groups.len()] }
    }

    fn read(&mut self, token: u32, position: usize) {
        let mut seen = 0;
        for (group, (config, written)) in (1..).zip(self.groups.iter().zip(&mut self.written[1..])) {
            if config.optional {
                continue;
            }
            let (before, reach) = match config.layout {
                Layout::State => (written.last().copied().unwrap_or(0), 1),
                layout => (0, layout.reach().unwrap_or(u32::MAX)),
            };
            written.push(group_value(self.context, before, token, position as u32, group));
            let first = written.len().saturating_sub(reach as usize);
            seen = written[first..].iter().fold(seen, |seen, value| extend(seen, *value));
        }
        let value = value(self.context ^ seen, token, position as u32);
        self.written[0].push(value);
        for (group, _) in (1..).zip(self.groups).filter(|(_, config)| config.optional) {
            self.written[group].push(optional_value(value, group));
        }
        self.context = extend(self.context, value);
    }
}

/// What lies at every position of `tokens` in each cache group: `[group][position]`.
pub fn contents(tokens: &[u32], groups: &[GroupConfig]) -> Vec<Vec<u64>> {
    let mut solo = Solo::new(groups);
    tokens.iter().enumerate().for_each(|(position, token)| solo.read(*token, position));
    solo.written
}

/// Runs `request` by itself. `groups`: the cache groups beside full attention.
pub fn expect(request: &Request, vocab: usize, max_model_len: u32, groups: &[GroupConfig]) -> Expectation {
    let mut sampler = Sampler::default();
    let mut solo = Solo::new(groups);
    let mut prompt_logprobs = Vec::new();
    let mut sum = [0.0; 3];
    for (position, token) in request.prompt.iter().enumerate() {
        solo.read(*token, position);
        sum.iter_mut().zip(hidden(solo.context)).for_each(|(sum, value)| *sum += f64::from(value));
        if let (Some(top), Some(next)) = (request.prompt_logprobs, request.prompt.get(position + 1))
            && let Sampled::Score(score) = sampler.score(&row(solo.context, vocab), *next, top)
        {
            prompt_logprobs.push(score);
        }
    }
    if let Some(pooling) = request.pooling {
        let pooled = match pooling {
            Pooling::Last => hidden(solo.context),
            Pooling::Mean => sum.map(|sum| (sum / request.prompt.len() as f64) as f32),
        };
        let end = Answer { tokens: Vec::new(), reason: FinishReason::Stop };
        return Expectation { prompt_logprobs, pooled: Some(pooled.to_vec()), choices: vec![end] };
    }
    let choices = (0..request.n)
        .map(|choice| answer(request, choice, solo.clone(), vocab, max_model_len, &mut sampler));
    Expectation { choices: choices.collect(), prompt_logprobs, pooled: None }
}

fn answer(
    request: &Request,
    choice: u32,
    mut solo: Solo<'_>,
    vocab: usize,
    max_model_len: u32,
    sampler: &mut Sampler,
) -> Answer {
    let params = Arc::new(request.sampling.clone());
    let guide = params.rules.as_ref().map(|rules| GuideRef(rules.0.guide(&[])));
    let mut known = request.prompt.to_vec();
    let mut tokens: Vec<(u32, Option<TokenLogprobs>)> = Vec::new();
    loop {
        let generated = tokens.len() as u32;
        if generated == params.max_tokens || known.len() as u32 == max_model_len {
            return Answer { tokens, reason: FinishReason::Length };
        }
        let mut history = TokenHistory::of_prompt(&request.prompt, 0);
        tokens.iter().for_each(|(token, _)| history.push(*token));
        let spec = SampleSpec {
            params: params.clone(),
            seed: choice_seed(params.seed, choice),
            position: known.len() as u32,
            history: Some(Arc::new(history)),
            forbid_stop: generated < params.min_tokens,
            guide: guide.clone(),
        };
        let Sampled::Token { id, logprobs } = sampler.sample(&row(solo.context, vocab), &spec) else {
            return Answer { tokens, reason: FinishReason::Error };
        };
        tokens.push((id, logprobs));
        if params.eos_token_ids.contains(&id) || params.stop_token_ids.contains(&id) {
            return Answer { tokens, reason: FinishReason::Stop };
        }
        if let Some(guide) = &guide {
            guide.0.advance(id);
        }
        solo.read(id, known.len());
        known.push(id);
    }
}
