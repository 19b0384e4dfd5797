//! The parameters that both generation endpoints share, from JSON to validated values.
//!
//! Invariant: every parameter is honoured, refused by name ([`refused`](crate::refused)), or a hint. Cost: linear in the request's own size, every list bounded by [`RequestLimits`].

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use serde::Deserialize;

use crate::bounds::Bounds;
use crate::cache::CacheOptions;
use crate::constraint::Constraint;
use crate::context::{Context, Model, RequestLimits};
use crate::error::ApiError;
use crate::fields::{Fields, within};
use crate::labels;
use crate::speculation::SpeculationOptions;

/// How to generate; the prompt is the endpoint's business.
#[derive(Clone, Debug)]
pub struct Generation {
    /// What is asked for instead of the model by itself.
    pub adapter: Option<String>,
    pub sampling: Sampling,
    pub n: u32,
    /// `None`: as many as the context holds.
    pub max_tokens: Option<u32>,
    pub stop: Vec<String>,
    pub include_stop: bool,
    /// Stop strings count in reasoning and tool calls, too.
    pub stop_everywhere: bool,
    pub skip_special_tokens: bool,
    /// Keep only this many tokens at the prompt's end; -1: as many as fit.
    pub truncate_prompt: Option<i64>,
    pub prompt_logprobs: Option<u32>,
    pub priority: i32,
    /// Added to its tenant's class: a batch's lines run behind what somebody waits for.
    pub behind: i32,
    pub stream: Option<StreamOptions>,
    pub request_id: Option<String>,
    pub return_token_ids: bool,
    pub echo: bool,
    /// `None`: the endpoint's own default.
    pub add_special_tokens: Option<bool>,
    /// What the answer must be.
    pub constraint: Option<Constraint>,
    /// What else must not be in it.
    pub bounds: Bounds,
    /// How long the prompt should stay cached.
    pub cache: CacheOptions,
    pub speculation: SpeculationOptions,
}

/// How tokens are chosen, and which of them end an answer.
#[derive(Clone, Debug, PartialEq)]
pub struct Sampling {
    /// 0 is greedy.
    pub temperature: f32,
    /// 0 is off.
    pub top_k: u32,
    pub top_p: f32,
    pub min_p: f32,
    pub presence_penalty: f32,
    pub frequency_penalty: f32,
    pub repetition_penalty: f32,
    /// Sorted by token id, each id once.
    pub logit_bias: Arc<[(u32, f32)]>,
    pub seed: u64,
    /// Nothing ends an answer before this many.
    pub min_tokens: u32,
    /// Of the model; empty with `ignore_eos`.
    pub eos_token_ids: Arc<[u32]>,
    pub stop_token_ids: Arc<[u32]>,
    /// Alternatives to report with each token; `None`: no log probabilities.
    pub logprobs: Option<u32>,
}

impl Sampling {
    /// The most likely token each time, and nothing else asked for.
    pub fn greedy() -> Self {
        Self {
            temperature: 0.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            repetition_penalty: 1.0,
            logit_bias: Arc::new([]),
            seed: 0,
            min_tokens: 0,
            eos_token_ids: Arc::new([]),
            stop_token_ids: Arc::new([]),
            logprobs: None,
        }
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StreamOptions {
    pub include_usage: bool,
    pub continuous_usage: bool,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum OneOrMany {
    One(String),
    Many(Vec<String>),
}

impl Generation {
    /// The name that its answer has, of a model that is called so.
    pub fn model<'a>(&'a self, model: &'a str) -> &'a str {
        self.adapter.as_deref().unwrap_or(model)
    }

    /// Reads and checks everything but `logprobs`, whose type differs between endpoints, and `max_tokens`.
    pub fn read(fields: &mut Fields, context: &Context) -> Result<Self, ApiError> {
        let Context { model, limits, .. } = context;
        metadata_only(fields)?;
        let sampling = sampling(fields, model, limits)?;
        let n = fields.take("n")?;
        let n = within(fields, "n", n, (1, limits.choices))?.unwrap_or(1);
        let prompt_logprobs = fields.take("prompt_logprobs")?;
        let prompt_logprobs = within(fields, "prompt_logprobs", prompt_logprobs, (0, limits.logprobs))?;
        let truncate_prompt = truncate_prompt(fields)?;
        let stream = stream_options(fields)?;
        if prompt_logprobs.is_some() && stream.is_some() {
            return Err(ApiError::invalid(
                "prompt_logprobs",
                "'prompt_logprobs' cannot be streamed; set stream to false.",
            ));
        }
        let constraint = Constraint::read(fields, limits)?;
        if constraint.is_some() && sampling.eos_token_ids.is_empty() && !model.eos_token_ids.is_empty() {
            let message = "'ignore_eos' contradicts a structured answer, which ends where its grammar ends.";
            return Err(ApiError::invalid("ignore_eos", message));
        }
        Ok(Self {
            adapter: None,
            sampling,
            n,
            max_tokens: None,
            constraint,
            bounds: Bounds::read(fields, model, limits)?,
            stop: stop_strings(fields, "stop", limits)?,
            include_stop: fields.take("include_stop_str_in_output")?.unwrap_or(false),
            stop_everywhere: false,
            skip_special_tokens: fields.take("skip_special_tokens")?.unwrap_or(true),
            truncate_prompt,
            prompt_logprobs,
            priority: fields.take("priority")?.unwrap_or(0),
            behind: 0,
            stream,
            request_id: request_id(fields)?,
            return_token_ids: fields.take("return_token_ids")?.unwrap_or(false),
            echo: fields.take("echo")?.unwrap_or(false),
            add_special_tokens: fields.take("add_special_tokens")?,
            cache: CacheOptions::read(fields)?,
            speculation: SpeculationOptions::read(fields)?,
        })
    }

    /// One answer of which nothing is said but how its tokens are chosen.
    pub fn new(sampling: Sampling) -> Self {
        Self {
            adapter: None,
            sampling,
            constraint: None,
            bounds: Bounds::default(),
            n: 1,
            max_tokens: None,
            stop: Vec::new(),
            include_stop: false,
            stop_everywhere: false,
            skip_special_tokens: true,
            truncate_prompt: None,
            prompt_logprobs: None,
            priority: 0,
            behind: 0,
            stream: None,
            request_id: None,
            return_token_ids: false,
            echo: false,
            add_special_tokens: None,
            cache: CacheOptions::default(),
            speculation: SpeculationOptions::default(),
        }
    }

    /// For an API that knows temperature, top_p, top_k, stop strings (as `stop`) and `stream`, and beside Folio's own words no more.
    pub fn read_plain(fields: &mut Fields, context: &Context, stop: &str) -> Result<Self, ApiError> {
        let sampling = truncation(fields, &context.model)?;
        Ok(Self {
            stop: stop_strings(fields, stop, &context.limits)?,
            stream: fields.take("stream")?.unwrap_or(false).then(StreamOptions::default),
            speculation: SpeculationOptions::read(fields)?,
            ..Self::new(sampling)
        })
    }

    /// For vectors instead of answers.
    pub fn pooled(fields: &mut Fields) -> Result<Self, ApiError> {
        Ok(Self {
            truncate_prompt: truncate_prompt(fields)?,
            priority: fields.take("priority")?.unwrap_or(0),
            request_id: request_id(fields)?,
            add_special_tokens: fields.take("add_special_tokens")?,
            cache: CacheOptions::read(fields)?,
            ..Self::new(Sampling::greedy())
        })
    }
}

fn truncate_prompt(fields: &mut Fields) -> Result<Option<i64>, ApiError> {
    let keep = fields.take("truncate_prompt_tokens")?;
    if keep.is_some_and(|keep: i64| keep < -1 || keep == 0) {
        let message = "Invalid 'truncate_prompt_tokens': use a positive number, or -1 for as many as fit.";
        return Err(ApiError::invalid("truncate_prompt_tokens", message));
    }
    Ok(keep)
}

/// Parameters that ask for nothing this server could do differently. They are checked, and documented as metadata.
fn metadata_only(fields: &mut Fields) -> Result<(), ApiError> {
    for name in labels::NAMES {
        labels::name(fields, name)?;
    }
    labels::metadata(fields)?;
    only(fields, "store", &[false], "responses are never stored; leave it out or send false")?;
    only(fields, "use_beam_search", &[false], "beam search is not available")?;
    only(fields, "spaces_between_special_tokens", &[true], "only true, the default")?;
    fields.only("service_tier", &["auto", "default"], "there is one tier")?;
    if let Some(modalities) = fields.take::<Vec<String>>("modalities")?
        && modalities.iter().any(|modality| modality != "text")
    {
        return Err(ApiError::unsupported("modalities", "the model generates text only"));
    }
    Ok(())
}

/// Takes a switch that may only be one of `accepted`.
pub(crate) fn only(fields: &mut Fields, name: &str, accepted: &[bool], why: &str) -> Result<(), ApiError> {
    match fields.take::<bool>(name)? {
        Some(value) if !accepted.contains(&value) => Err(ApiError::unsupported(fields.path(name), why)),
        _ => Ok(()),
    }
}

/// temperature, top_p and top_k, over the model's own defaults.
pub(crate) fn truncation(fields: &mut Fields, model: &Model) -> Result<Sampling, ApiError> {
    let defaults = &model.defaults;
    let temperature = number(fields, "temperature", (0.0, 2.0))?.or(defaults.temperature).unwrap_or(1.0);
    let mut top_p = number(fields, "top_p", (0.0, 1.0))?.or(defaults.top_p).unwrap_or(1.0);
    let top_k = fields.take("top_k")?;
    let top_k = within(fields, "top_k", top_k, (-1, i64::from(u32::MAX)))?;
    let mut top_k = top_k.map(|k| k.max(0) as u32).or(defaults.top_k).unwrap_or(0);
    if top_p == 0.0 {
        // The smallest nucleus is the best token alone.
        (top_k, top_p) = (1, 1.0);
    }
    Ok(Sampling {
        temperature,
        top_k,
        top_p,
        min_p: defaults.min_p.unwrap_or(0.0),
        repetition_penalty: defaults.repetition_penalty.unwrap_or(1.0),
        seed: fresh_seed(),
        eos_token_ids: model.eos_token_ids.clone(),
        ..Sampling::greedy()
    })
}

/// Takes a number within bounds.
pub(crate) fn number(fields: &mut Fields, name: &str, bounds: (f32, f32)) -> Result<Option<f32>, ApiError> {
    let value = fields.take(name)?;
    within(fields, name, value, bounds)
}

fn sampling(fields: &mut Fields, model: &Model, limits: &RequestLimits) -> Result<Sampling, ApiError> {
    let mut sampling = truncation(fields, model)?;
    sampling.min_p = number(fields, "min_p", (0.0, 1.0))?.unwrap_or(sampling.min_p);
    sampling.presence_penalty = number(fields, "presence_penalty", (-2.0, 2.0))?.unwrap_or(0.0);
    sampling.frequency_penalty = number(fields, "frequency_penalty", (-2.0, 2.0))?.unwrap_or(0.0);
    sampling.repetition_penalty =
        number(fields, "repetition_penalty", (0.01, 10.0))?.unwrap_or(sampling.repetition_penalty);
    if fields.take("ignore_eos")?.unwrap_or(false) {
        sampling.eos_token_ids = Arc::new([]);
    }
    sampling.logit_bias = logit_bias(fields, model, limits)?;
    sampling.seed = fields.take::<i64>("seed")?.map_or(sampling.seed, |seed| seed as u64);
    sampling.min_tokens = fields.take("min_tokens")?.unwrap_or(0);
    sampling.stop_token_ids = stop_token_ids(fields, model, limits)?;
    Ok(sampling)
}

fn logit_bias(
    fields: &mut Fields,
    model: &Model,
    limits: &RequestLimits,
) -> Result<Arc<[(u32, f32)]>, ApiError> {
    let Some(map) = fields.take::<HashMap<String, f32>>("logit_bias")? else { return Ok(Arc::new([])) };
    if map.len() > limits.logit_bias {
        let message = format!("'logit_bias' has {} entries; the limit is {}.", map.len(), limits.logit_bias);
        return Err(ApiError::invalid("logit_bias", message));
    }
    let mut pairs = Vec::with_capacity(map.len());
    for (key, bias) in map {
        let id = key.parse::<u32>().ok().filter(|id| *id < model.vocab_size).ok_or_else(|| {
            let message = format!(
                "Invalid 'logit_bias': '{key}' is not a token id of this model (0 to {}).",
                model.vocab_size - 1
            );
            ApiError::invalid("logit_bias", message)
        })?;
        if !(-100.0..=100.0).contains(&bias) {
            let message = format!("Invalid 'logit_bias': {bias} for token {id} is not between -100 and 100.");
            return Err(ApiError::invalid("logit_bias", message));
        }
        pairs.push((id, bias));
    }
    pairs.sort_by_key(|(id, _)| *id);
    if let Some(pair) = pairs.windows(2).find(|pair| pair[0].0 == pair[1].0) {
        return Err(ApiError::invalid(
            "logit_bias",
            format!("'logit_bias' names token {} twice.", pair[0].0),
        ));
    }
    Ok(pairs.into())
}

fn stop_token_ids(
    fields: &mut Fields,
    model: &Model,
    limits: &RequestLimits,
) -> Result<Arc<[u32]>, ApiError> {
    let ids = fields.take::<Vec<u32>>("stop_token_ids")?.unwrap_or_default();
    if ids.len() > limits.stop_token_ids {
        let message =
            format!("'stop_token_ids' has {} entries; the limit is {}.", ids.len(), limits.stop_token_ids);
        return Err(ApiError::invalid("stop_token_ids", message));
    }
    model.check_token_ids(&ids, "stop_token_ids")?;
    Ok(ids.into())
}

pub(crate) fn stop_strings(
    fields: &mut Fields,
    name: &str,
    limits: &RequestLimits,
) -> Result<Vec<String>, ApiError> {
    let Some(raw) = fields.raw(name) else { return Ok(Vec::new()) };
    let name = fields.path(name);
    let stops = match OneOrMany::deserialize(raw) {
        Ok(OneOrMany::One(stop)) => vec![stop],
        Ok(OneOrMany::Many(stops)) => stops,
        Err(_) => {
            let message = format!("Invalid '{name}': give a string or an array of strings.");
            return Err(ApiError::invalid(name, message));
        }
    };
    if stops.len() > limits.stop_strings {
        let message = format!("'{name}' has {} strings; the limit is {}.", stops.len(), limits.stop_strings);
        return Err(ApiError::invalid(name, message));
    }
    if let Some(stop) = stops.iter().find(|stop| stop.is_empty() || stop.len() > limits.stop_string_bytes) {
        let limit = limits.stop_string_bytes;
        let message =
            format!("Invalid '{name}': a string has {} bytes; it must have 1 to {limit}.", stop.len());
        return Err(ApiError::invalid(name, message));
    }
    Ok(stops)
}

fn stream_options(fields: &mut Fields) -> Result<Option<StreamOptions>, ApiError> {
    let stream = fields.take("stream")?.unwrap_or(false);
    let Some(raw) = fields.raw("stream_options") else { return Ok(stream.then(StreamOptions::default)) };
    if !stream {
        let message = "'stream_options' is only allowed when 'stream' is true.";
        return Err(ApiError::invalid("stream_options", message));
    }
    let mut options = Fields::of_value(raw, "stream_options".into())?;
    if options.take("include_obfuscation")?.unwrap_or(false) {
        let why = "chunks are not padded; leave it out or send false";
        return Err(ApiError::unsupported("stream_options.include_obfuscation", why));
    }
    let continuous_usage = options.take("continuous_usage_stats")?.unwrap_or(false);
    let include_usage = options.take("include_usage")?.unwrap_or(false);
    options.finish(&[])?;
    if continuous_usage && !include_usage {
        let message = "'stream_options.continuous_usage_stats' needs 'stream_options.include_usage'.";
        return Err(ApiError::invalid("stream_options.continuous_usage_stats", message));
    }
    Ok(Some(StreamOptions { include_usage, continuous_usage }))
}

fn request_id(fields: &mut Fields) -> Result<Option<String>, ApiError> {
    let id = fields.take::<String>("request_id")?;
    match id {
        Some(id) if !valid_request_id(&id) => {
            let message = "Invalid 'request_id': use 1 to 128 visible ASCII characters.";
            Err(ApiError::invalid("request_id", message))
        }
        id => Ok(id),
    }
}

/// Safe to echo in a header, a log line and a response.
pub fn valid_request_id(id: &str) -> bool {
    (1..=128).contains(&id.len()) && id.bytes().all(|byte| byte.is_ascii_graphic())
}

/// A seed for a request that gives none: unpredictable, never the same twice in a process.
pub fn fresh_seed() -> u64 {
    static COUNTER: AtomicU64 = AtomicU64::new(0);
    use std::hash::{BuildHasher, Hasher};
    let mut hasher = std::hash::RandomState::new().build_hasher();
    hasher.write_u64(COUNTER.fetch_add(1, Ordering::Relaxed));
    hasher.finish()
}
