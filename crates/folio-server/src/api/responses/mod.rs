//! `/v1/responses`: OpenAI's newer API, on the same conversation and the same job as a chat.
//!
//! Owns: its names, shapes and events, and a bounded store of responses, for `previous_response_id`, retrieval and background. Must
//! never: generate or read an answer itself. A tenant reaches its own responses; another's id is answered like one that never existed.

mod answer;
mod items;
mod log;
mod request;
mod sealed;
pub mod store;
mod tools;
mod truncation;

use std::sync::Arc;

use axum::Extension;
use axum::body::Body;
use axum::extract::{Path, State as Shared};
use axum::http::{Response, StatusCode, Uri};
use serde_json::json;

use crate::api::error::ApiError;
use crate::app::{Flight, State};
use crate::generation::generate::{self, Job, json_response};
use crate::generation::safety;
use crate::http::stream::Reader;
use crate::http::{Arrival, JsonRequest};
use crate::tenancy::tenants::Tenant;
use log::Log;
pub use request::REFUSED;
use request::{Background, Prepared};
use store::Record;

type Answer = Result<Response<Body>, ApiError>;

/// `POST /v1/responses`
pub async fn create(Shared(state): Shared<Arc<State>>, request: JsonRequest) -> Answer {
    let flight = Flight::new(state.in_flight.enter(), &request.id, request.entry.clone());
    let arrival = Arrival::new(request);
    let tenant = arrival.tenant.clone();
    let Prepared { job, background } = safety::prepared(&state, arrival, request::prepare).await?;
    let Some(Background { id, response, messages, input }) = background else {
        return generate::run(&state, &tenant, job, flight).await;
    };
    let streams = job.generation.stream.is_some();
    let notes = job.notes.clone();
    if streams {
        let (abort, events) = generate::start_streaming(&state, &tenant, job, flight)?;
        let record = Record { response, messages: messages.into(), input };
        state.responses.put(tenant.id, &id, record.clone(), Some(abort));
        let log = Arc::new(Log::default());
        state.responses.attach(tenant.id, &id, log.clone());
        let mut answer = log::follow(log.clone(), None, state.config.limits.keep_alive);
        notes.tell(answer.headers_mut());
        tokio::spawn(write_log(state, tenant, id, record, events, log));
        return Ok(answer);
    }
    let (abort, answer) = generate::start(&state, &tenant, job, flight)?;
    let record = Record { response: response.clone(), messages: messages.into(), input };
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
            record.response["error"] = answer::failure(&failed);
            state.responses.put(tenant.id, &id, record, None);
        }
    });
    let mut answer = json_response(response.to_string());
    notes.tell(answer.headers_mut());
    Ok(answer)
}

/// Writes down what a response in the background says, whether anybody reads it or not. One that is dropped from the store goes on being
/// generated and is not written down any more.
async fn write_log(
    state: Arc<State>,
    tenant: Tenant,
    id: String,
    record: Record,
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
        record.response["error"] =
            answer::failure(&ApiError::internal("The response failed; its events say why."));
        state.responses.put(tenant.id, &id, record, None);
    }
    log.close();
}

/// The job of a request whose answer is waited for, whole.
pub fn prepare_whole(state: &State, arrival: &Arrival) -> Result<Job, ApiError> {
    let Prepared { job, background } = request::prepare(state, arrival)?;
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
) -> Answer {
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
    for pair in query.split('&').filter(|pair| !pair.is_empty()) {
        match pair.split_once('=').unwrap_or((pair, "")) {
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
) -> Answer {
    let record = state.responses.get(tenant.id, &id).ok_or_else(|| not_found("response_id", &id))?;
    let page = items::page(&record.input, uri.query().unwrap_or_default())?;
    Ok(json_response(page.to_string()))
}

/// `DELETE /v1/responses/{id}`
pub async fn delete(
    Shared(state): Shared<Arc<State>>,
    Extension(tenant): Extension<Tenant>,
    Path(id): Path<String>,
) -> Answer {
    if !state.responses.delete(tenant.id, &id) {
        return Err(not_found("response_id", &id));
    }
    Ok(json_response(json!({"id": id, "object": "response", "deleted": true}).to_string()))
}

/// `POST /v1/responses/{id}/cancel`: ends one that runs in the background; one that is over stays as it is.
pub async fn cancel(
    Shared(state): Shared<Arc<State>>,
    Extension(tenant): Extension<Tenant>,
    Path(id): Path<String>,
) -> Answer {
    let running = state.responses.stop(tenant.id, &id).ok_or_else(|| not_found("response_id", &id))?;
    let mut record = state.responses.get(tenant.id, &id).ok_or_else(|| not_found("response_id", &id))?;
    if record.response["background"] != true {
        let message = "Only a response that was created with 'background' can be cancelled; close the connection of another.";
        return Err(ApiError::invalid("response_id", message));
    }
    if let Some(abort) = running {
        abort.cancel();
        record.response["status"] = "cancelled".into();
        state.responses.put(tenant.id, &id, record.clone(), None);
    }
    Ok(json_response(record.response.to_string()))
}

/// The same for an id that never was, that is forgotten, and that is another's.
fn not_found(param: &str, id: &str) -> ApiError {
    let id: String = id.chars().take(128).collect();
    ApiError {
        param: Some(param.into()),
        code: Some("response_not_found"),
        ..ApiError::new(
            StatusCode::NOT_FOUND,
            "invalid_request_error",
            format!("Response with id '{id}' not found."),
        )
    }
}
