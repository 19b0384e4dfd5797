//! The parameters that both generation endpoints share, from JSON to validated values.
//!
//! Invariant: every parameter is honoured, refused by name, or a hint; [`REFUSED`] is the list of those that exist elsewhere but
//! not here, each with what to do instead. Cost: linear in the request's own size, every list bounded by [`Limits`].

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use folio_engine::{Pooling, SamplingParams};
use folio_kv::TenantId;
use serde::Deserialize;
use serde_json::value::RawValue;

use crate::api::error::ApiError;
use crate::api::fields::{Fields, within};
use crate::api::openai::chat::Conversation;
use crate::api::retain::CacheWish;
use crate::api::structured::Wish;
use crate::app::{ModelFacts, State};
use crate::config::Limits;
use crate::generation::bounds::{Bounds, all_of};
use crate::generation::guides::{Begin, Form};
use crate::generation::reading::Reading;

/// Parameters of OpenAI's, vLLM's and SGLang's APIs that this server refuses, with the reason a client reads.
pub const REFUSED: &[(&str, &str)] = &[
    ("audio", "the model generates text only"),
    ("cache_salt", "cached prefixes are already separate for every API key"),
    ("chat_template", "templates come from the model; pass chat_template_kwargs to the model's own"),
    ("documents", "put documents into the messages"),
    ("ebnf", "use structured_outputs with grammar"),
    ("extra_key", "cached prefixes are already separate for every API key"),
    ("function_call", "use tools and tool_choice"),
    ("functions", "use tools and tool_choice"),
    ("guided_choice", "use structured_outputs"),
    ("guided_grammar", "use structured_outputs"),
    ("guided_json", "use structured_outputs"),
    ("guided_regex", "use structured_outputs"),
    ("json_schema", "use response_format or structured_outputs"),
    ("kv_transfer_params", "this server runs on one machine"),
    ("length_penalty", "it belongs to beam search, which is not available"),
    ("logit_processors", "code in requests is never run"),
    ("logits_processors", "code in requests is never run"),
    ("logprob_token_ids", "use logprobs with top_logprobs"),
    ("lora_path", "adapters are not available yet"),
    ("media_io_kwargs", "the model takes text only"),
    ("mm_processor_kwargs", "the model takes text only"),
    ("moderation", "this server does not moderate"),
    ("prediction", "predicted outputs are not available"),
    ("prompt_cache_options", "prefixes are cached automatically; use cache"),
    ("prompt_embeds", "send text or token ids"),
    ("regex", "use structured_outputs"),
    ("return_prompt_text", "use return_token_ids, or echo with completions"),
    ("return_tokens_as_token_ids", "use return_token_ids"),
    ("session_id", "prefixes are found by content; no session is needed"),
    ("truncation_side", "truncate_prompt_tokens keeps the end of the prompt"),
    ("vllm_xargs", "no extra arguments are known"),
    ("web_search_options", "this server has no access to the web"),
];

/// Parameters that choose tokens elsewhere. An operator's flags never let them pass.
pub const OTHER_SAMPLERS: &[(&str, &str)] = &[
    ("adaptive_p", SAMPLER),
    ("do_sample", "use temperature; 0 always takes the most likely token"),
    ("dry_allowed_length", SAMPLER),
    ("dry_base", SAMPLER),
    ("dry_multiplier", SAMPLER),
    ("dry_sequence_breakers", SAMPLER),
    ("dynatemp_exponent", SAMPLER),
    ("dynatemp_range", SAMPLER),
    ("early_stopping", "it belongs to beam search, which is not available"),
    ("epsilon_cutoff", SAMPLER),
    ("eta_cutoff", SAMPLER),
    ("grammar", "use structured_outputs with grammar"),
    ("guidance_scale", SAMPLER),
    ("max_new_tokens", "use max_tokens"),
    ("min_new_tokens", "use min_tokens"),
    ("mirostat", SAMPLER),
    ("mirostat_eta", SAMPLER),
    ("mirostat_tau", SAMPLER),
    ("n_predict", "use max_tokens"),
    ("no_repeat_ngram_size", SAMPLER),
    ("num_beams", "beam search is not available"),
    ("penalty_alpha", SAMPLER),
    ("repeat_penalty", "use repetition_penalty"),
    ("samplers", SAMPLER),
    ("sampling_params", "give its fields beside the prompt"),
    ("smoothing_factor", SAMPLER),
    ("tfs_z", SAMPLER),
    ("top_a", SAMPLER),
    ("top_n_sigma", SAMPLER),
    ("typical_p", SAMPLER),
    ("xtc_probability", SAMPLER),
    ("xtc_threshold", SAMPLER),
];
const SAMPLER: &str = "this sampler is not available; use temperature, top_p, top_k or min_p";

/// How to generate; the prompt is the endpoint's business.
#[derive(Clone, Debug)]
pub struct Generation {
    /// `max_tokens` is 0 here until the prompt's length is known; see [`Generation::fit`].
    pub sampling: SamplingParams,
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
    /// How reasoning and tool calls are told from text; the chat endpoint's business.
    pub reading: Option<Reading>,
    /// What the answer must be; [`SamplingParams::rules`] follow from it once it is known where the answer begins.
    pub structure: Option<Wish>,
    /// What else must not be in it.
    pub bounds: Bounds,
    /// A vector is wanted instead of an answer.
    pub pooling: Option<Pooling>,
    /// How long the prompt should stay cached.
    pub cache: CacheWish,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StreamOptions {
    pub include_usage: bool,
    pub continuous_usage: bool,
}

/// What the model's own `generation_config.json` says; OpenAI's defaults stand where it is silent.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SamplingDefaults {
    pub temperature: Option<f32>,
    pub top_k: Option<u32>,
    pub top_p: Option<f32>,
    pub min_p: Option<f32>,
    pub repetition_penalty: Option<f32>,
    /// `max_new_tokens`: the default of max_tokens.
    pub max_tokens: Option<u32>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum OneOrMany {
    One(String),
    Many(Vec<String>),
}

impl Generation {
    /// Reads and checks everything but `logprobs`, whose type differs between endpoints, and `max_tokens`.
    pub fn read(fields: &mut Fields, facts: &ModelFacts, limits: &Limits) -> Result<Self, ApiError> {
        metadata_only(fields)?;
        let sampling = sampling(fields, facts, limits)?;
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
        let structure = Wish::read(fields, limits)?;
        if structure.is_some() && sampling.eos_token_ids.is_empty() && !facts.eos_token_ids.is_empty() {
            let message = "'ignore_eos' contradicts a structured answer, which ends where its grammar ends.";
            return Err(ApiError::invalid("ignore_eos", message));
        }
        Ok(Self {
            sampling,
            n,
            max_tokens: None,
            structure,
            bounds: Bounds::read(fields, facts.vocab_size, limits)?,
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
            reading: None,
            pooling: None,
            cache: CacheWish::read(fields)?,
        })
    }

    /// For an API that knows temperature, top_p, top_k, stop strings (as `stop`) and `stream`, and no more.
    pub fn read_plain(
        fields: &mut Fields,
        facts: &ModelFacts,
        limits: &Limits,
        stop: &str,
    ) -> Result<Self, ApiError> {
        Ok(Self {
            sampling: truncation(fields, facts)?,
            structure: None,
            bounds: Bounds::default(),
            n: 1,
            max_tokens: None,
            stop: stop_strings(fields, stop, limits)?,
            include_stop: false,
            stop_everywhere: false,
            skip_special_tokens: true,
            truncate_prompt: None,
            prompt_logprobs: None,
            priority: 0,
            behind: 0,
            stream: fields.take("stream")?.unwrap_or(false).then(StreamOptions::default),
            request_id: None,
            return_token_ids: false,
            echo: false,
            add_special_tokens: None,
            reading: None,
            pooling: None,
            cache: CacheWish::default(),
        })
    }

    /// For vectors instead of answers.
    pub fn pooled(fields: &mut Fields, pooling: Pooling) -> Result<Self, ApiError> {
        Ok(Self {
            sampling: SamplingParams::greedy(0),
            structure: None,
            bounds: Bounds::default(),
            n: 1,
            max_tokens: None,
            stop: Vec::new(),
            include_stop: false,
            stop_everywhere: false,
            skip_special_tokens: true,
            truncate_prompt: truncate_prompt(fields)?,
            prompt_logprobs: None,
            priority: fields.take("priority")?.unwrap_or(0),
            behind: 0,
            stream: None,
            request_id: request_id(fields)?,
            return_token_ids: false,
            echo: false,
            add_special_tokens: fields.take("add_special_tokens")?,
            reading: None,
            pooling: Some(pooling),
            cache: CacheWish::read(fields)?,
        })
    }

    /// Makes rules of what the answer must be; its beginning depends on how the answer to a `conversation` is read.
    pub(crate) fn follow(
        &mut self,
        state: &State,
        tenant: TenantId,
        conversation: Option<&Conversation>,
    ) -> Result<(), ApiError> {
        let (compiler, tokenizer) = (state.structures.of(tenant), &state.app.tokenizer);
        let form = match (&self.structure, conversation) {
            (Some(wish), Some(conversation)) if !conversation.tools.must() => {
                let tools = &conversation.tools;
                let either = match tools.shown().is_some_and(|tools| !tools.is_empty()) {
                    true => Some(state.readers.answer_or_calls(wish, tools, tokenizer)?),
                    false => None,
                };
                let wish = either.as_ref().unwrap_or(wish);
                let begin = state.readers.begin(wish.param(), conversation, self.reading.as_ref())?;
                Some((Form::Answer(compiler.compile(wish)?), begin))
            }
            (Some(wish), None) => Some((Form::Answer(compiler.compile(wish)?), Begin::default())),
            // Where a call must be made there is no other answer that could have a form.
            (_, Some(conversation)) => {
                state.readers.calls(&conversation.tools, self.reading.as_ref(), tokenizer, compiler)?
            }
            (None, None) => None,
        };
        let reasoning = self.reading.as_ref().and_then(Reading::reasoning);
        let mut rules = self.bounds.rules(tokenizer, reasoning)?;
        if let Some((form, begin)) = form {
            let wish = self.structure.as_ref().filter(|_| matches!(form, Form::Answer(_)));
            rules.push(state.structures.rules(form, begin, wish.map_or("tools", Wish::param))?);
        }
        self.sampling.rules = all_of(rules);
        Ok(())
    }

    /// Cuts the prompt as asked, then checks it and max_tokens against the context. `param` names the prompt's field.
    pub fn fit(
        &self,
        prompt: &mut Vec<u32>,
        facts: &ModelFacts,
        param: &str,
    ) -> Result<SamplingParams, ApiError> {
        let context = facts.context_length as usize;
        let floor = self.max_tokens.unwrap_or(1).max(1) as usize;
        if let Some(keep) = self.truncate_prompt {
            let keep = usize::try_from(keep).unwrap_or(context.saturating_sub(floor));
            prompt.drain(..prompt.len().saturating_sub(keep));
        }
        if prompt.is_empty() {
            return Err(ApiError::invalid(
                param,
                format!("'{param}' has no tokens; the model needs at least one."),
            ));
        }
        if prompt.len() + floor > context {
            let error = ApiError::context_length(facts.context_length, prompt.len(), floor as u32);
            // Which of the two is more than the context holds by itself?
            let param = if floor >= context { "max_tokens" } else { param };
            return Err(ApiError { param: Some(param.to_owned()), ..error });
        }
        let room = (context - prompt.len()) as u32;
        let max_tokens = self.max_tokens.unwrap_or(facts.defaults.max_tokens.unwrap_or(room).clamp(1, room));
        if self.sampling.min_tokens > max_tokens {
            let message = format!(
                "Invalid 'min_tokens': {} is more than max_tokens, which is {max_tokens}.",
                self.sampling.min_tokens
            );
            return Err(ApiError::invalid("min_tokens", message));
        }
        Ok(SamplingParams { max_tokens, ..self.sampling.clone() })
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
    for name in ["user", "safety_identifier"] {
        fields
            .take::<&RawValue>(name)?
            .map(|raw| crate::api::fields::parse::<String>(raw, name))
            .transpose()?;
    }
    fields.take::<HashMap<String, String>>("metadata")?;
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

fn only(fields: &mut Fields, name: &str, accepted: &[bool], why: &str) -> Result<(), ApiError> {
    match fields.take::<bool>(name)? {
        Some(value) if !accepted.contains(&value) => Err(ApiError::unsupported(name, why)),
        _ => Ok(()),
    }
}

/// temperature, top_p and top_k, over the model's own defaults.
fn truncation(fields: &mut Fields, facts: &ModelFacts) -> Result<SamplingParams, ApiError> {
    let defaults = &facts.defaults;
    let temperature = number(fields, "temperature", (0.0, 2.0))?.or(defaults.temperature).unwrap_or(1.0);
    let mut top_p = number(fields, "top_p", (0.0, 1.0))?.or(defaults.top_p).unwrap_or(1.0);
    let top_k = fields.take("top_k")?;
    let top_k = within(fields, "top_k", top_k, (-1, i64::from(u32::MAX)))?;
    let mut top_k = top_k.map(|k| k.max(0) as u32).or(defaults.top_k).unwrap_or(0);
    if top_p == 0.0 {
        // The smallest nucleus is the best token alone.
        (top_k, top_p) = (1, 1.0);
    }
    Ok(SamplingParams {
        temperature,
        top_k,
        top_p,
        min_p: defaults.min_p.unwrap_or(0.0),
        repetition_penalty: defaults.repetition_penalty.unwrap_or(1.0),
        seed: fresh_seed(),
        eos_token_ids: facts.eos_token_ids.clone(),
        ..SamplingParams::greedy(0)
    })
}

fn number(fields: &mut Fields, name: &str, bounds: (f32, f32)) -> Result<Option<f32>, ApiError> {
    let value = fields.take(name)?;
    within(fields, name, value, bounds)
}

fn sampling(fields: &mut Fields, facts: &ModelFacts, limits: &Limits) -> Result<SamplingParams, ApiError> {
    let mut sampling = truncation(fields, facts)?;
    sampling.min_p = number(fields, "min_p", (0.0, 1.0))?.unwrap_or(sampling.min_p);
    sampling.presence_penalty = number(fields, "presence_penalty", (-2.0, 2.0))?.unwrap_or(0.0);
    sampling.frequency_penalty = number(fields, "frequency_penalty", (-2.0, 2.0))?.unwrap_or(0.0);
    sampling.repetition_penalty =
        number(fields, "repetition_penalty", (0.01, 10.0))?.unwrap_or(sampling.repetition_penalty);
    if fields.take("ignore_eos")?.unwrap_or(false) {
        sampling.eos_token_ids = Arc::new([]);
    }
    sampling.logit_bias = logit_bias(fields, facts, limits)?;
    sampling.seed = fields.take::<i64>("seed")?.map_or(sampling.seed, |seed| seed as u64);
    sampling.min_tokens = fields.take("min_tokens")?.unwrap_or(0);
    sampling.stop_token_ids = stop_token_ids(fields, facts, limits)?;
    Ok(sampling)
}

fn logit_bias(
    fields: &mut Fields,
    facts: &ModelFacts,
    limits: &Limits,
) -> Result<Arc<[(u32, f32)]>, ApiError> {
    let Some(map) = fields.take::<HashMap<String, f32>>("logit_bias")? else { return Ok(Arc::new([])) };
    if map.len() > limits.logit_bias {
        let message = format!("'logit_bias' has {} entries; the limit is {}.", map.len(), limits.logit_bias);
        return Err(ApiError::invalid("logit_bias", message));
    }
    let mut pairs = Vec::with_capacity(map.len());
    for (key, bias) in map {
        let id = key.parse::<u32>().ok().filter(|id| *id < facts.vocab_size).ok_or_else(|| {
            let message = format!(
                "Invalid 'logit_bias': '{key}' is not a token id of this model (0 to {}).",
                facts.vocab_size - 1
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

fn stop_token_ids(fields: &mut Fields, facts: &ModelFacts, limits: &Limits) -> Result<Arc<[u32]>, ApiError> {
    let ids = fields.take::<Vec<u32>>("stop_token_ids")?.unwrap_or_default();
    if ids.len() > limits.stop_token_ids {
        let message =
            format!("'stop_token_ids' has {} entries; the limit is {}.", ids.len(), limits.stop_token_ids);
        return Err(ApiError::invalid("stop_token_ids", message));
    }
    check_token_ids(&ids, facts, "stop_token_ids")?;
    Ok(ids.into())
}

/// Refuses ids the model does not have.
pub fn check_token_ids(ids: &[u32], facts: &ModelFacts, param: &str) -> Result<(), ApiError> {
    let Some(id) = ids.iter().find(|id| **id >= facts.vocab_size) else { return Ok(()) };
    let last = facts.vocab_size - 1;
    Err(ApiError::invalid(
        param,
        format!("Invalid '{param}': {id} is not a token id of this model (0 to {last})."),
    ))
}

fn stop_strings(fields: &mut Fields, name: &str, limits: &Limits) -> Result<Vec<String>, ApiError> {
    let Some(raw) = fields.raw(name) else { return Ok(Vec::new()) };
    let stops = match serde_json::from_str(raw.get()) {
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
