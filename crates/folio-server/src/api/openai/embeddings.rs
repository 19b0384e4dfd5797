//! `POST /v1/embeddings`: prompts in, one vector each out.
//!
//! Owns: reading the request, and what becomes of the engine's vectors (cut to `dimensions`, normalized, written). Must never:
//! be a second way to the engine: inputs are prompts of jobs like any other, a bounded number of them at a time, so that a
//! long list neither fills the queue nor is refused because it would.

use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::body::{Body, Bytes};
use axum::extract::State as Shared;
use axum::http::{Response, StatusCode};
use folio_engine::SamplingParams;
use serde_json::json;
use serde_json::value::RawValue;

use crate::api::error::ApiError;
use crate::api::fields::{Fields, within};
use crate::api::openai::chat::check_model;
use crate::api::openai::completions::{Prompt, Prompts};
use crate::api::params::{Generation, REFUSED, check_token_ids};
use crate::app::{Flight, State};
use crate::generation::choice::{Delta, Finish};
use crate::generation::generate::{Job, PromptJob, json_response, start};
use crate::generation::safety::{Screened, screen_input};
use crate::generation::tokenizing::encode;
use crate::generation::wire::{Finished, PromptReport, Usage, Wire};
use crate::http::JsonRequest;
use crate::http::stream::Events;
use crate::tenancy::gate::Entry;
use crate::tenancy::tenants::Tenant;

/// Inputs that are with the engine at once.
const AT_ONCE: usize = 256;
/// Longest pause before the rest of a list, which was told to come again, does.
const AGAIN_S_MAX: u32 = 30;
const INPUT: &str = "input";

/// Names that other servers know here, with the reason a client reads.
pub const NOT_HERE: &[(&str, &str)] = &[
    ("embed_dtype", "values are 32-bit floats"),
    ("endianness", "values are little-endian"),
    ("messages", "send texts or token ids as input"),
    ("normalize", "vectors are always normalized"),
    ("use_activation", "vectors are always normalized"),
];

/// A request that was read.
struct Prepared {
    generation: Generation,
    inputs: Vec<Vec<u32>>,
    form: Form,
}

/// How a vector is written.
#[derive(Clone, Copy)]
struct Form {
    base64: bool,
    dimensions: Option<usize>,
}

pub(crate) async fn create(
    Shared(state): Shared<Arc<State>>,
    request: JsonRequest,
) -> Result<Response<Body>, ApiError> {
    let JsonRequest { tenant, id, body, held: _held, entry } = request;
    let _counted = state.in_flight.enter();
    Ok(json_response(answer(&state, &tenant, (&id, body, entry), |_| ()).await?))
}

/// The response to the request of this id and body, which the caller has counted in flight. `adjust` may change how it runs.
pub(crate) async fn answer(
    state: &Arc<State>,
    tenant: &Tenant,
    (id, body, entry): (&str, Bytes, Arc<Entry>),
    adjust: impl FnOnce(&mut Generation),
) -> Result<String, ApiError> {
    let mut arrived = Instant::now();
    let shared = state.clone();
    let bytes = body.len();
    let mut prepared = state.off_thread(tenant.id, bytes, move || prepare(&shared, &body)).await?;
    tenant.check_priority(prepared.generation.priority)?;
    adjust(&mut prepared.generation);
    let Prepared { generation, inputs, form } = prepared;
    let name = format!("embd-{}", generation.request_id.as_deref().unwrap_or(id));
    let tokens: usize = inputs.iter().map(Vec::len).sum();
    let mut data = Vec::with_capacity(inputs.len().div_ceil(AT_ONCE));
    for (number, part) in inputs.chunks(AT_ONCE).enumerate() {
        let wire = || Box::new(Vectors { form, first: number * AT_ONCE });
        let (abort, vectors) = loop {
            let prompts: Result<Vec<PromptJob>, ApiError> =
                part.iter().map(|tokens| prompt_job(tokens, &generation)).collect();
            let job = Job {
                wire: wire(),
                generation: generation.clone(),
                prompts: prompts?,
                arrived,
                asker: Default::default(),
                notes: Default::default(),
            };
            match start(state, tenant, job, Flight::within(id, entry.clone())) {
                // What was computed so far is not thrown away because the rest has to wait.
                Err(busy) if number > 0 && busy.status == StatusCode::TOO_MANY_REQUESTS => {
                    let seconds = busy.retry_after_s.unwrap_or(1).clamp(1, AGAIN_S_MAX);
                    tokio::time::sleep(Duration::from_secs(seconds.into())).await;
                }
                started => break started?,
            }
        };
        let guard = abort.guard();
        data.push(vectors.await.unwrap_or_else(|_| Err(ApiError::internal("the request was lost")))?);
        drop(guard);
        // What comes next was not waiting for the engine until now.
        arrived = Instant::now();
    }
    let (data, model) = (data.join(","), json!(state.app.model.name()));
    let usage = json!({"prompt_tokens": tokens, "total_tokens": tokens});
    Ok(format!(r#"{{"id":"{name}","object":"list","data":[{data}],"model":{model},"usage":{usage}}}"#))
}

fn prompt_job(tokens: &[u32], generation: &Generation) -> Result<PromptJob, ApiError> {
    Ok(PromptJob {
        tokens: tokens.into(),
        params: SamplingParams::greedy(0),
        echo: None,
        echo_logprobs: false,
        retention: generation.cache.ranges(tokens.len() as u32)?,
        screened: Screened::default(),
    })
}

fn prepare(state: &State, body: &[u8]) -> Result<Prepared, ApiError> {
    let (facts, limits) = (&state.app.model, &state.config.limits);
    let mut fields = Fields::of_body(body)?;
    check_model(&mut fields, state)?;
    let pooling = facts.pooling.as_ref().map_err(|why| ApiError {
        code: Some("no_embeddings"),
        ..ApiError::bad_request(format!("This model makes no embeddings: {why}."))
    })?;
    let generation = Generation::pooled(&mut fields, *pooling)?;
    fields
        .take::<&RawValue>("user")?
        .map(|raw| crate::api::fields::parse::<String>(raw, "user"))
        .transpose()?;
    let base64 = match fields.take::<String>("encoding_format")?.as_deref() {
        None | Some("float") => false,
        Some("base64") => true,
        Some(other) => {
            let message = format!("Invalid 'encoding_format': '{other}' is neither 'float' nor 'base64'.");
            return Err(ApiError::invalid("encoding_format", message));
        }
    };
    let dimensions = fields.take("dimensions")?;
    let dimensions = within(&fields, "dimensions", dimensions, (1, facts.hidden as usize))?;
    let inputs: Prompts = fields.require(INPUT)?;
    fields.finish(&[NOT_HERE, REFUSED].concat())?;
    let inputs = inputs.into_list(limits.embedding_inputs, INPUT)?;
    let inputs: Result<Vec<_>, ApiError> =
        inputs.into_iter().map(|input| tokens(state, input, &generation)).collect();
    Ok(Prepared { generation, inputs: inputs?, form: Form { base64, dimensions } })
}

/// One input as the model reads it, cut as asked.
fn tokens(state: &State, input: Prompt, generation: &Generation) -> Result<Vec<u32>, ApiError> {
    let facts = &state.app.model;
    if let Prompt::Tokens(tokens) = &input {
        check_token_ids(tokens, facts, INPUT)?;
    }
    let replaced = screen_input(state, INPUT, || match &input {
        Prompt::Text(text) => text.clone(),
        Prompt::Tokens(tokens) => state.app.tokenizer.decode(tokens, false),
    })?;
    let mut tokens = match replaced.map_or(input, Prompt::Text) {
        // What a tokenizer adds to it is no text.
        Prompt::Text(text) if text.is_empty() => Vec::new(),
        Prompt::Text(text) => {
            let special = generation.add_special_tokens.unwrap_or(true);
            encode(state, None, &text, special, generation.truncate_prompt.is_some(), INPUT)?
        }
        Prompt::Tokens(tokens) => tokens,
    };
    if tokens.is_empty() {
        return Err(ApiError::invalid(
            INPUT,
            "'input' has an empty text or no tokens; each needs at least one.",
        ));
    }
    let context = facts.context_length as usize;
    if let Some(keep) = generation.truncate_prompt {
        let keep = usize::try_from(keep).unwrap_or(context);
        tokens.drain(..tokens.len().saturating_sub(keep));
    }
    if tokens.len() > context {
        let message = format!(
            "This model's maximum context length is {context} tokens, but an input has {}. Shorten it, or send \
             truncate_prompt_tokens.",
            tokens.len()
        );
        return Err(ApiError { code: Some("context_length_exceeded"), ..ApiError::invalid(INPUT, message) });
    }
    Ok(tokens)
}

/// Writes the vectors of some inputs as the members of a JSON array.
struct Vectors {
    form: Form,
    /// Index of the first of them in the request.
    first: usize,
}

impl Vectors {
    fn member(&self, choice: &Finished) -> String {
        let index = self.first + choice.index as usize;
        let vector = normalized(&choice.delta.vector, self.form.dimensions);
        let embedding = match self.form.base64 {
            true => format!("\"{}\"", base64(&vector)),
            false => json!(vector).to_string(),
        };
        format!(r#"{{"object":"embedding","index":{index},"embedding":{embedding}}}"#)
    }
}

impl Wire for Vectors {
    // Nothing is streamed.
    fn opening(&mut self, _: u32, _: &PromptReport, _: Usage, _: &Events) {}
    fn delta(&mut self, _: u32, _: &Delta, _: Option<&Finish>, _: Usage, _: &Events) {}
    fn closing(&mut self, _: Usage, _: &Events) {}
    fn failed(&mut self, _: &ApiError, _: &Events) {}

    fn whole(&mut self, choices: &[Finished], _: Usage) -> String {
        choices.iter().map(|choice| self.member(choice)).collect::<Vec<_>>().join(",")
    }
}

/// The first `dimensions` values, of length one. A function of the values alone.
fn normalized(vector: &[f32], dimensions: Option<usize>) -> Vec<f32> {
    let kept = &vector[..dimensions.unwrap_or(vector.len()).min(vector.len())];
    let length = kept.iter().map(|value| f64::from(*value) * f64::from(*value)).sum::<f64>().sqrt();
    let scale = if length > 0.0 { length } else { 1.0 };
    kept.iter().map(|value| (f64::from(*value) / scale) as f32).collect()
}

/// The values' little-endian bytes in base64, padded.
fn base64(values: &[f32]) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
    let mut text = String::with_capacity(bytes.len().div_ceil(3) * 4);
    for group in bytes.chunks(3) {
        let byte = |at: usize| u32::from(group.get(at).copied().unwrap_or(0));
        let bits = byte(0) << 16 | byte(1) << 8 | byte(2);
        for digit in 0..4 {
            let value = bits >> (18 - 6 * digit) & 63;
            text.push(if digit <= group.len() { DIGITS[value as usize] as char } else { '=' });
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn base64_is_that_of_the_standard() {
        // Made with Python's base64 and struct.
        assert_eq!(base64(&[]), "");
        assert_eq!(base64(&[1.0]), "AACAPw==");
        assert_eq!(base64(&[1.0, -2.5]), "AACAPwAAIMA=");
        assert_eq!(base64(&[0.1, 1e-30, f32::MAX]), "zczMPWBCog3//39/");
    }

    #[test]
    fn vectors_are_cut_before_they_are_normalized() {
        assert_eq!(normalized(&[3.0, 4.0, 12.0], Some(2)), [0.6, 0.8]);
        assert_eq!(
            normalized(&[3.0, 4.0, 12.0], None),
            [(3.0 / 13.0) as f32, (4.0 / 13.0) as f32, (12.0 / 13.0) as f32]
        );
        assert_eq!(normalized(&[0.0, 0.0], None), [0.0, 0.0]);
        let large = normalized(&[1e30, 1e30], None);
        assert!(large.iter().all(|value| (value - 0.5f32.sqrt()).abs() < 1e-7), "{large:?}");
    }
}
