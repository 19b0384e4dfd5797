//! `/v1/responses`: OpenAI's newer API, on the same conversation and the same job as a chat.
//!
//! Owns: a bounded store of responses, for `previous_response_id`, retrieval and background. Must
//! never: generate or read an answer itself. A tenant reaches its own responses; another's id is answered like one that never existed.

mod sealed;
mod truncation;

use std::sync::Arc;

use axum::Extension;
use axum::extract::{Path, State as Shared};
use axum::http::Uri;
use folio_api::ApiError;
use folio_api::responses::{self, History, ResponseWriter, failure, named, not_found, page};
use serde_json::{Value, json};

use crate::app::{Flight, State};
use crate::arrival::{Arrival, JsonRequest};
use crate::generation::job::{Job, PromptJob};
use crate::generation::prompt::prompt;
use crate::generation::retention::ranges;
use crate::generation::run;
use crate::generation::sampling::{fit, rules};
use crate::generation::screening::{asker, prepared, screen_conversation};
use crate::generation::tokenizing::{encode_prompt, speculation};
use crate::http::fresh_id;
use crate::http::reply::json_response;
use crate::http::reply::{Reply, tell};
use crate::http::stream::Reader;
use crate::response_store::StoredResponse;
use crate::response_store::log::{self, Log};
use crate::tenancy::tenants::Tenant;
use sealed::Sealer;

/// A request ready to run.
struct Prepared {
    job: Job,
    /// It runs without a client that waits: the response as it is meanwhile, and its conversation.
    background: Option<Background>,
}

struct Background {
    id: String,
    response: Value,
    messages: Vec<Value>,
    input: Arc<[Value]>,
}

impl AsMut<Job> for Prepared {
    fn as_mut(&mut self) -> &mut Job {
        &mut self.job
    }
}

/// What a tenant's requests reach of responses that were answered before.
struct Own<'a> {
    state: &'a State,
    tenant: &'a Tenant,
    sealer: &'a Sealer,
}

impl History for Own<'_> {
    fn messages(&self, response: &str) -> Option<Arc<[Value]>> {
        self.state.responses.get(self.tenant.id, response).map(|record| record.messages)
    }

    fn item(&self, response: &str, id: &str) -> Option<Value> {
        self.state.responses.get(self.tenant.id, response)?.item(id).cloned()
    }

    fn unseal(&self, sealed: &str, path: &str) -> Result<String, ApiError> {
        self.sealer.open(sealed, path)
    }
}

fn prepare(state: &State, arrival: &Arrival) -> Result<Prepared, ApiError> {
    let tenant = arrival.tenant.id;
    let sealer = Sealer::new(state, &arrival.tenant)?;
    let own = Own { state, tenant: &arrival.tenant, sealer: &sealer };
    // Not the request's id, which clients may choose and repeat.
    let id = format!("resp_{}", fresh_id());
    let read = responses::Request::read(&arrival.body, &state.context, &own, &id)?;
    let mut request = read.request;
    let screened = screen_conversation(state, arrival, &mut request.conversation)?;
    let (rendered, mut tokens) = match read.truncates {
        true => truncation::prompt(state, tenant, &mut request.conversation, request.generation.max_tokens)?,
        false => {
            let rendered = prompt(state, &mut request.conversation, true)?;
            let tokens = encode_prompt(state, Some(tenant), &rendered.prompt, false, false, "input")?;
            (rendered, tokens)
        }
    };
    let (generation, reading) = (request.generation, rendered.reading);
    let rules = rules(state, tenant, &generation, Some((&request.conversation, reading.as_ref())))?;
    let params = fit(&generation, rules, &mut tokens, &state.app.model, "input")?;
    let retention = ranges(&generation.cache, tokens.len() as u32)?;
    let input = named(read.items, &id);
    let keep = read.store.then(|| {
        let (store, id) = (state.responses.clone(), id.clone());
        let (mut messages, input) = (read.messages.clone(), input.clone());
        Box::new(move |response: &Value, said: Vec<Value>| {
            messages.extend(said);
            let record = StoredResponse { response: response.clone(), messages: messages.into(), input };
            store.put(tenant, &id, record, None);
        }) as responses::Keep
    });
    let seal = read.seals.then(|| Box::new(move |text: &str| sealer.seal(text).ok()) as responses::Seal);
    let namespaces = request.conversation.tools.namespaces;
    let answer = ResponseWriter::new(id.clone(), read.repeated, keep, namespaces, seal);
    let background = read.background.then(|| Background {
        id,
        response: answer.unfinished("in_progress"),
        messages: read.messages,
        input,
    });
    let speculation = speculation(state, arrival.tenant.id, &generation, &tokens)?;
    let prompt = PromptJob {
        tokens: tokens.into(),
        params,
        echo: None,
        echo_logprobs: false,
        retention,
        screened,
        speculation,
    };
    let asker = asker(state, arrival, "responses");
    let (writer, prompts, arrived, notes) = (Box::new(answer), vec![prompt], arrival.at, request.notes);
    let job = Job { writer, generation, reading, pooling: None, prompts, arrived, asker, notes };
    Ok(Prepared { job, background })
}

/// `POST /v1/responses`
pub async fn create(Shared(state): Shared<Arc<State>>, request: JsonRequest) -> Reply {
    let flight = Flight::new(state.in_flight.enter(), &request.id, request.entry.clone());
    let arrival = Arrival::new(request);
    let tenant = arrival.tenant.clone();
    let Prepared { job, background } = prepared(&state, arrival, prepare).await?;
    let Some(Background { id, response, messages, input }) = background else {
        return Ok(run::run(&state, &tenant, job, flight).await?);
    };
    let streams = job.generation.stream.is_some();
    let notes = job.notes.clone();
    if streams {
        let (abort, events) = run::start_streaming(&state, &tenant, job, flight).await?;
        let record = StoredResponse { response, messages: messages.into(), input };
        state.responses.put(tenant.id, &id, record.clone(), Some(abort));
        let log = Arc::new(Log::default());
        state.responses.attach(tenant.id, &id, log.clone());
        let mut answer = log::follow(log.clone(), None, state.config.limits.keep_alive);
        tell(&notes, answer.headers_mut());
        tokio::spawn(write_log(state, tenant, id, record, events, log));
        return Ok(answer);
    }
    let (abort, answer) = run::start(&state, &tenant, job, flight).await?;
    let record = StoredResponse { response: response.clone(), messages: messages.into(), input };
    state.responses.put(tenant.id, &id, record.clone(), Some(abort));
    tokio::spawn(async move {
        // An answer stores itself; a failure is told here, unless somebody cancelled it before.
        let failed = match answer.await {
            Ok(Ok(_)) => return,
            Ok(Err(error)) => error,
            Err(_) => ApiError::internal("the request was lost"),
        };
        if state.responses.stop(tenant.id, &id).flatten().is_some() {
            let mut record = record;
            record.response["status"] = "failed".into();
            record.response["error"] = failure(&failed);
            state.responses.put(tenant.id, &id, record, None);
        }
    });
    let mut answer = json_response(response.to_string());
    tell(&notes, answer.headers_mut());
    Ok(answer)
}

/// Writes down what a response in the background says, whether anybody reads it or not. One that is dropped from the store goes on being
/// generated and is not written down any more.
async fn write_log(
    state: Arc<State>,
    tenant: Tenant,
    id: String,
    record: StoredResponse,
    events: Reader,
    log: Arc<Log>,
) {
    let mut kept = true;
    while let Some(piece) = events.next().await {
        kept = kept && state.responses.grow(tenant.id, &id, piece.len());
        if kept {
            log.push(piece);
        }
    }
    // An answer stores itself; a failure is told here, unless somebody cancelled it before.
    if state.responses.stop(tenant.id, &id).flatten().is_some() {
        let mut record = record;
        record.response["status"] = "failed".into();
        record.response["error"] = failure(&ApiError::internal("The response failed; its events say why."));
        state.responses.put(tenant.id, &id, record, None);
    }
    log.close();
}

/// The job of a request whose answer is waited for, whole.
pub fn prepare_whole(state: &State, arrival: &Arrival) -> Result<Job, ApiError> {
    let Prepared { job, background } = prepare(state, arrival)?;
    match background {
        Some(_) => Err(ApiError::unsupported("background", "a line of a batch is in the background anyway")),
        None => Ok(job),
    }
}

/// `GET /v1/responses/{id}`
pub async fn show(
    Shared(state): Shared<Arc<State>>,
    Extension(tenant): Extension<Tenant>,
    Path(id): Path<String>,
    uri: Uri,
) -> Reply {
    let record = state.responses.get(tenant.id, &id).ok_or_else(|| not_found("response_id", &id))?;
    let (streams, after) = resumed(uri.query().unwrap_or_default())?;
    if !streams {
        return Ok(json_response(record.response.to_string()));
    }
    let log = state.responses.log(tenant.id, &id).ok_or_else(|| {
        let message = "Only a response that was created with 'background' and 'stream' can be streamed again; leave 'stream' out.";
        ApiError::invalid("stream", message)
    })?;
    Ok(log::follow(log, after, state.config.limits.keep_alive))
}

/// Whether a response is asked for as events, and behind which.
fn resumed(query: &str) -> Result<(bool, Option<u64>), ApiError> {
    let (mut streams, mut after) = (false, None);
    for (name, value) in form_urlencoded::parse(query.as_bytes()) {
        match (&*name, &*value) {
            ("stream", "true") => streams = true,
            ("stream", "false") => streams = false,
            ("stream", _) => return Err(ApiError::invalid("stream", "Invalid 'stream': use true or false.")),
            ("starting_after", number) => {
                after = Some(number.parse().map_err(|_| {
                    ApiError::invalid(
                        "starting_after",
                        "Invalid 'starting_after': use an event's sequence_number.",
                    )
                })?);
            }
            (other, _) => return Err(ApiError::unsupported(other, "only stream and starting_after")),
        }
    }
    if after.is_some() && !streams {
        return Err(ApiError::invalid("starting_after", "'starting_after' needs 'stream=true'."));
    }
    Ok((streams, after))
}

/// `GET /v1/responses/{id}/input_items`
pub async fn input_items(
    Shared(state): Shared<Arc<State>>,
    Extension(tenant): Extension<Tenant>,
    Path(id): Path<String>,
    uri: Uri,
) -> Reply {
    let record = state.responses.get(tenant.id, &id).ok_or_else(|| not_found("response_id", &id))?;
    let page = page(&record.input, uri.query().unwrap_or_default())?;
    Ok(json_response(page.to_string()))
}

/// `DELETE /v1/responses/{id}`
pub async fn delete(
    Shared(state): Shared<Arc<State>>,
    Extension(tenant): Extension<Tenant>,
    Path(id): Path<String>,
) -> Reply {
    if !state.responses.delete(tenant.id, &id) {
        return Err(not_found("response_id", &id).into());
    }
    Ok(json_response(json!({"id": id, "object": "response", "deleted": true}).to_string()))
}

/// `POST /v1/responses/{id}/cancel`: ends one that runs in the background; one that is over stays as it is.
pub async fn cancel(
    Shared(state): Shared<Arc<State>>,
    Extension(tenant): Extension<Tenant>,
    Path(id): Path<String>,
) -> Reply {
    let running = state.responses.stop(tenant.id, &id).ok_or_else(|| not_found("response_id", &id))?;
    let mut record = state.responses.get(tenant.id, &id).ok_or_else(|| not_found("response_id", &id))?;
    if record.response["background"] != true {
        let message = "Only a response that was created with 'background' can be cancelled; close the connection of another.";
        return Err(ApiError::invalid("response_id", message).into());
    }
    if let Some(abort) = running {
        abort.cancel();
        record.response["status"] = "cancelled".into();
        state.responses.put(tenant.id, &id, record.clone(), None);
    }
    Ok(json_response(record.response.to_string()))
}
