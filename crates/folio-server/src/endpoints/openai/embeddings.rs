//! `POST /v1/embeddings`, and Ollama's `/api/embed` and `/api/embeddings`: prompts in, one vector each out.
//!
//! Owns: reading the request, and what becomes of the engine's vectors (cut to `dimensions`, normalized, written). Must never:
//! be a second way to the engine: inputs are prompts of jobs like any other, a bounded number of them at a time, so that a
//! long list neither fills the queue nor is refused because it would.

use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::body::Bytes;
use axum::extract::State;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use folio_api::ApiError;
use folio_api::Context;
use folio_api::events::{Delta, Finish, Finished, PromptReport, StreamSink, Usage, Writer};
use folio_api::hints::Notes;
use folio_api::openai::completions::PromptInput;
use folio_api::openai::embeddings::{self, EmbeddingsRequest, VectorForm, VectorShape};
use folio_api::params::Generation;
use folio_engine::{Pooling, SamplingParams};
use folio_text::work::giving_way;
use serde_json::json;

use crate::arrival::{Flight, JsonRequest};
use crate::generation::Generator;
use crate::generation::driver::{AT_ONCE_BYTES, Whole};
use crate::generation::input::InputProcessor;
use crate::generation::job::{Job, PromptJob};
use crate::generation::retention::ranges;
use crate::generation::screening::screen_input;
use crate::generation::tokenizing::encode;
use crate::http::Shared;
use crate::http::reply::{Reply, json_counted, tell};
use crate::tenancy::gate::AdmittedRequest;
use crate::tenancy::tenant::Tenant;
use crate::threads::WorkLost;

/// Inputs that are with the engine at once.
const AT_ONCE: usize = 256;
/// Longest pause before the rest of a list, which was told to come again, does.
const AGAIN_S_MAX: u32 = 30;

/// A request that was read.
struct PreparedInputs {
    generation: Generation,
    pooling: Pooling,
    inputs: Vec<Arc<[u32]>>,
    form: VectorForm,
    notes: Notes,
}

/// Whoever waits for an answer of which a part was told to come again.
pub(crate) trait Backoff: Send {
    /// Comes back when so much time has passed and it may be asked for, or says why it is not any more.
    fn wait(&mut self, pause: Duration) -> impl Future<Output = Result<(), ApiError>> + Send;
}

/// A client.
struct Connected;

impl Backoff for Connected {
    async fn wait(&mut self, pause: Duration) -> Result<(), ApiError> {
        tokio::time::sleep(pause).await;
        Ok(())
    }
}

/// Reads a request; told why the model makes no vectors, if it makes none.
pub(crate) type ReadInputs = fn(&[u8], &Context, Result<(), &str>) -> Result<EmbeddingsRequest, ApiError>;

pub(crate) async fn create(State(generator): Shared<Generator>, request: JsonRequest) -> Reply {
    reply(generator, request, embeddings::read).await
}

/// Answers a request that is read so.
pub(crate) async fn reply(generator: Arc<Generator>, request: JsonRequest, read: ReadInputs) -> Reply {
    let JsonRequest { tenant, id, body, held: _held, entry } = request;
    let _counted = generator.load.in_flight.enter();
    let (answer, notes) = answer(&generator, &tenant, (&id, body, entry), (read, |_| ()), Connected).await?;
    let mut response = json_counted(answer);
    tell(&notes, response.headers_mut());
    Ok(response)
}

/// The response to the request of this id and body, which the caller has counted in flight. `adjust` may change how it runs.
pub(crate) async fn answer(
    generator: &Arc<Generator>,
    tenant: &Tenant,
    (id, body, entry): (&str, Bytes, Arc<AdmittedRequest>),
    (read, adjust): (ReadInputs, impl FnOnce(&mut Generation)),
    mut waiting: impl Backoff,
) -> Result<(Whole, Notes), ApiError> {
    let began = Instant::now();
    let mut arrived = began;
    let inputs = generator.inputs.clone();
    let bytes = body.len();
    let mut prepared =
        generator.load.off_thread(tenant.id, bytes, move || prepare(&inputs, &body, read)).await?;
    tenant.check_priority(prepared.generation.priority)?;
    adjust(&mut prepared.generation);
    let PreparedInputs { generation, pooling, inputs, form, notes } = prepared;
    let name = format!("embd-{}", generation.request_id.as_deref().unwrap_or(id));
    let tokens: usize = inputs.iter().map(|input| input.len()).sum();
    // All of them, also while those before them are computed.
    let mut held = generator.load.unread.hold(&tenant.gate);
    held.grow(tokens * size_of::<u32>()).inspect_err(|_| entry.give_back())?;
    let mut data = Vec::with_capacity(inputs.len().div_ceil(AT_ONCE));
    for (number, part) in inputs.chunks(AT_ONCE).enumerate() {
        let writer = || Box::new(Vectors { form, first: number * AT_ONCE });
        let vectors = loop {
            let prompts: Result<Vec<PromptJob>, ApiError> =
                part.iter().map(|tokens| prompt_job(tokens, &generation)).collect();
            let job = Job::new(writer(), generation.clone(), prompts?);
            let job = Job { pooling: Some(pooling), arrived, ..job };
            match generator.start(tenant, job, Flight::within(id, entry.clone())).await {
                // What was computed so far is not thrown away because the rest has to wait.
                Err(busy) if number > 0 && busy.status == 429 => {
                    let seconds = busy.retry_after_s.unwrap_or(1).clamp(1, AGAIN_S_MAX);
                    waiting.wait(Duration::from_secs(seconds.into())).await?;
                }
                started => break started?,
            }
        };
        data.push(vectors.answer().await?);
        // What comes next was not waiting for the engine until now.
        arrived = Instant::now();
    }
    let model = json!(generation.model(generator.served.name()));
    let bytes = data.iter().map(|part| part.json.len()).sum::<usize>();
    let join = move || {
        let (begin, end) = match form.shape {
            VectorShape::Objects { .. } => {
                let usage = json!({"prompt_tokens": tokens, "total_tokens": tokens});
                let begin = format!(r#"{{"id":"{name}","object":"list","data":["#);
                (begin, format!(r#"],"model":{model},"usage":{usage}}}"#))
            }
            VectorShape::Rows => {
                let figures = format!(
                    r#""total_duration":{},"load_duration":0,"prompt_eval_count":{tokens}"#,
                    began.elapsed().as_nanos()
                );
                (r#"{"embeddings":["#.to_owned(), format!(r#"],"model":{model},{figures}}}"#))
            }
            VectorShape::Row => (r#"{"embedding":"#.to_owned(), "}".to_owned()),
        };
        Whole::joined(&begin, data, &end)
    };
    if bytes <= AT_ONCE_BYTES {
        return Ok((join(), notes));
    }
    let joined = generator.load.text.finish(tenant.id, bytes, || giving_way(join)).await;
    let joined = joined.map_err(|WorkLost| ApiError::internal("the vectors were not written"))?;
    Ok((joined, notes))
}

fn prompt_job(tokens: &Arc<[u32]>, generation: &Generation) -> Result<PromptJob, ApiError> {
    let retention = ranges(&generation.cache, tokens.len() as u32)?;
    Ok(PromptJob { retention, ..PromptJob::new(tokens.clone(), SamplingParams::greedy(0)) })
}

fn prepare(processor: &InputProcessor, body: &[u8], read: ReadInputs) -> Result<PreparedInputs, ApiError> {
    let served = &processor.served;
    let pooling = &served.model.pooling;
    let can = pooling.as_ref().map(|_| ()).map_err(String::as_str);
    let mut request = read(body, &served.context, can)?;
    let inputs = std::mem::take(&mut request.inputs);
    let inputs: Result<Vec<_>, ApiError> =
        inputs.into_iter().map(|input| Ok(tokens(processor, input, &request)?.into())).collect();
    let EmbeddingsRequest { generation, form, notes, .. } = request;
    let pooling = pooling.clone().map_err(ApiError::internal)?;
    Ok(PreparedInputs { generation, pooling, inputs: inputs?, form, notes })
}

/// One input as the model reads it, cut as asked.
fn tokens(
    inputs: &InputProcessor,
    input: PromptInput,
    request: &EmbeddingsRequest,
) -> Result<Vec<u32>, ApiError> {
    let EmbeddingsRequest { generation, param, cut, .. } = request;
    let facts = &inputs.served.model;
    let replaced = screen_input(inputs, param, || match &input {
        PromptInput::Text(text) => text.clone(),
        PromptInput::Tokens(tokens) => inputs.served.tokenizer.decode(tokens, false),
    })?;
    let mut tokens = match replaced.map_or(input, PromptInput::Text) {
        // What a tokenizer adds to it is no text.
        PromptInput::Text(text) if text.is_empty() => Vec::new(),
        PromptInput::Text(text) => {
            let special = generation.add_special_tokens.unwrap_or(true);
            encode(inputs, None, &text, special, *cut || generation.truncate_prompt.is_some(), param)?
        }
        PromptInput::Tokens(tokens) => tokens,
    };
    if tokens.is_empty() {
        let message = format!("'{param}' has an empty text or no tokens; each needs at least one.");
        return Err(ApiError::invalid(*param, message));
    }
    let context = facts.context_length as usize;
    if let Some(keep) = generation.truncate_prompt {
        let keep = usize::try_from(keep).unwrap_or(context);
        tokens.drain(..tokens.len().saturating_sub(keep));
    }
    if *cut && tokens.len() > context {
        // What a tokenizer puts behind a text is what some models pool.
        let end = tokens.last().copied().filter(|last| inputs.served.tokenizer.is_special(*last));
        tokens.truncate(context - usize::from(end.is_some()));
        tokens.extend(end);
    }
    if tokens.len() > context {
        let message = format!(
            "This model's maximum context length is {context} tokens, but an input has {}. Shorten it, or send \
             truncate_prompt_tokens.",
            tokens.len()
        );
        return Err(ApiError { code: Some("context_length_exceeded"), ..ApiError::invalid(*param, message) });
    }
    Ok(tokens)
}

/// Writes the vectors of some inputs as the members of a JSON array.
struct Vectors {
    form: VectorForm,
    /// Index of the first of them in the request.
    first: usize,
}

impl Vectors {
    fn member(&self, choice: &Finished) -> String {
        let index = self.first + choice.index as usize;
        let vector = normalized(&choice.delta.vector, self.form.dimensions);
        let embedding = match self.form.shape {
            VectorShape::Objects { base64: true } => format!("\"{}\"", base64(&vector)),
            VectorShape::Objects { base64: false } => json!(vector).to_string(),
            VectorShape::Rows | VectorShape::Row => return json!(vector).to_string(),
        };
        format!(r#"{{"object":"embedding","index":{index},"embedding":{embedding}}}"#)
    }
}

impl Writer for Vectors {
    // Nothing is streamed.
    fn opening(&mut self, _: u32, _: &PromptReport, _: Usage, _: &dyn StreamSink) {}
    fn delta(&mut self, _: u32, _: &Delta, _: Option<&Finish>, _: Usage, _: &dyn StreamSink) {}
    fn closing(&mut self, _: Usage, _: &dyn StreamSink) {}
    fn failed(&mut self, _: &ApiError, _: &dyn StreamSink) {}

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
    let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
    STANDARD.encode(bytes)
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
