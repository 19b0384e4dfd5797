//! `options`: how tokens are chosen, under Ollama's names.
//!
//! Invariants: a value that is what this server does anyway is taken, another one of the same option is refused; what a model is loaded with
//! is a hint. What is silent here has the model's own defaults, not Ollama's.

use crate::context::Context;
use crate::error::ApiError;
use crate::fields::{Fields, Json, within};
use crate::hints::Hints;
use crate::params::{Generation, Sampling, number, only, stop_strings, truncation};
use crate::refused::SAMPLER;
use crate::speculation::DRAFTS_MAX;

const OPTIONS: &str = "options";
/// Options that are read.
const KNOWN: &[&str] = &[
    "draft_num_predict",
    "embedding_only",
    "frequency_penalty",
    "min_p",
    "mirostat",
    "num_predict",
    "penalize_newline",
    "presence_penalty",
    "repeat_last_n",
    "repeat_penalty",
    "seed",
    "stop",
    "temperature",
    "tfs_z",
    "top_k",
    "top_p",
    "typical_p",
    "vocab_only",
];
/// What draws a seed.
const ANY_SEED: i64 = -1;

/// Takes the field.
pub(super) fn read(
    fields: &mut Fields,
    context: &Context,
    hints: &mut Hints,
) -> Result<Generation, ApiError> {
    let raw = fields.raw(OPTIONS).unwrap_or(Json::Object(Vec::new()));
    let mut options = Fields::of_value(raw, OPTIONS.into())?;
    let mut sampling = truncation(&mut options, &context.model)?;
    sampling.min_p = number(&mut options, "min_p", (0.0, 1.0))?.unwrap_or(sampling.min_p);
    sampling.presence_penalty = number(&mut options, "presence_penalty", (-2.0, 2.0))?.unwrap_or(0.0);
    sampling.frequency_penalty = number(&mut options, "frequency_penalty", (-2.0, 2.0))?.unwrap_or(0.0);
    sampling.repetition_penalty =
        number(&mut options, "repeat_penalty", (0.01, 10.0))?.unwrap_or(sampling.repetition_penalty);
    window(&mut options, &mut sampling)?;
    if let Some(seed) = options.take::<i64>("seed")?.filter(|seed| *seed != ANY_SEED) {
        sampling.seed = seed as u64;
    }
    for (sampler, off) in [("mirostat", 0.0), ("tfs_z", 1.0), ("typical_p", 1.0)] {
        if options.take::<f64>(sampler)?.is_some_and(|value| value != off) {
            return Err(ApiError::unsupported(options.path(sampler), SAMPLER));
        }
    }
    only(&mut options, "penalize_newline", &[true], "every token is penalized alike")?;
    only(&mut options, "vocab_only", &[false], "the whole model is loaded")?;
    only(&mut options, "embedding_only", &[false], "the whole model is loaded")?;
    let drafts = options.take("draft_num_predict")?;
    let mut generation = Generation {
        max_tokens: max_tokens(&mut options)?,
        stop: stop_strings(&mut options, "stop", &context.limits)?,
        ..Generation::new(sampling)
    };
    generation.speculation.most = within(&options, "draft_num_predict", drafts, (0, DRAFTS_MAX))?;
    hints.finish(options, KNOWN, &[])?;
    Ok(generation)
}

/// Ollama's -1 and -2, and what is not positive, mean as many as the context holds.
fn max_tokens(options: &mut Fields) -> Result<Option<u32>, ApiError> {
    let wanted = options.take::<i64>("num_predict")?;
    let wanted = within(options, "num_predict", wanted, (-2, u32::MAX.into()))?;
    Ok(wanted.and_then(|wanted| u32::try_from(wanted).ok()).filter(|wanted| *wanted > 0))
}

/// How many tokens back penalties look: all of them here, or none.
fn window(options: &mut Fields, sampling: &mut Sampling) -> Result<(), ApiError> {
    let Sampling { presence_penalty, frequency_penalty, repetition_penalty, .. } = sampling;
    let penalties = (*presence_penalty, *frequency_penalty, *repetition_penalty);
    match options.take::<i64>("repeat_last_n")? {
        None | Some(-1) => Ok(()),
        Some(0) => {
            (*presence_penalty, *frequency_penalty, *repetition_penalty) = (0.0, 0.0, 1.0);
            Ok(())
        }
        Some(_) if penalties == (0.0, 0.0, 1.0) => Ok(()),
        Some(_) => {
            let why = "penalties look at all tokens; use -1, or 0 for no penalties";
            Err(ApiError::unsupported(options.path("repeat_last_n"), why))
        }
    }
}
