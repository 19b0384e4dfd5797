//! `/v1/responses`: OpenAI's newer API, on the same conversation and the same job as a chat.
//!
//! Owns: a bounded store of responses, for `previous_response_id`, retrieval and background. Must
//! never: generate or read an answer itself. A tenant reaches its own responses; another's id is answered like one that never existed.

mod sealed;

use std::sync::Arc;

use axum::extract::State;
use axum::http::Uri;
use folio_api::ApiError;
use folio_api::responses::{self, History, ResponseWriter, named, not_found, page};
use folio_text::work::{self, giving_way};
use serde_json::{Value, json};

use crate::arrival::{Arrival, Flight, Id, JsonRequest};
use crate::generation::Generator;
use crate::generation::input::InputProcessor;
use crate::generation::job::{Job, PromptJob};
use crate::generation::prompt::prompt;
use crate::generation::run::Started;
use crate::generation::sampling::rules;
use crate::generation::screening::{prepared, screen_conversation};
use crate::generation::tokenizing::encode_prompt;
use crate::generation::truncation::truncated;
use crate::http::Shared;
use crate::http::fresh_id;
use crate::http::reply::{Reply, json_bytes, json_response, tell};
use crate::http::stream::FrameReader;
use crate::load::Load;
use crate::response_store::log::{self, Log};
use crate::response_store::{ResponseStore, StoredResponse, size};
use crate::tenancy::tenant::Tenant;
use crate::threads::WorkLost;
use sealed::Sealer;

/// A request ready to run.
struct Prepared {
    job: Job,
    /// It runs without a client that waits: the response as it is meanwhile, and its conversation.
    background: Option<Background>,
}

struct Background {
    id: String,
    record: StoredResponse,
}

impl AsMut<Job> for Prepared {
    fn as_mut(&mut self) -> &mut Job {
        &mut self.job
    }
}

/// What a tenant's requests reach of responses that were answered before.
struct TenantHistory<'a> {
    store: &'a ResponseStore,
    asker: &'a Arrival,
    sealer: &'a Sealer,
    keeps: bool,
}

impl History for TenantHistory<'_> {
    fn messages(&self, response: &str) -> Result<Option<Arc<[Value]>>, ApiError> {
        let Some(record) = self.store.get(self.asker.tenant.id, response) else { return Ok(None) };
        self.asker.named.read(record.bytes)?;
        Ok(Some(record.messages))
    }

    fn item(&self, response: &str, id: &str) -> Result<Option<Value>, ApiError> {
        let Some(record) = self.store.get(self.asker.tenant.id, response) else { return Ok(None) };
        // It is looked for among all of them.
        self.asker.named.read(record.items())?;
        let Some(item) = record.item(id) else { return Ok(None) };
        self.asker.named.read(size(item))?;
        Ok(Some(item.clone()))
    }

    fn keeps(&self) -> bool {
        self.keeps
    }

    fn unseal(&self, sealed: &str, path: &str) -> Result<String, ApiError> {
        self.sealer.open(sealed, path)
    }
}

/// `keeps`: what says nothing of being stored is.
fn prepare(
    inputs: &InputProcessor,
    store: &Arc<ResponseStore>,
    arrival: &Arrival,
    keeps: bool,
) -> Result<Prepared, ApiError> {
    let tenant = arrival.tenant.id;
    let sealer = Sealer::new(&inputs.served.model.model_digest, &arrival.tenant)?;
    let own = TenantHistory { store, asker: arrival, sealer: &sealer, keeps };
    // Not the request's id, which clients may choose and repeat.
    let id = format!("resp_{}", fresh_id());
    let read = responses::ResponsesRequest::read(&arrival.body, &inputs.served.context, &own, &id)?;
    let mut request = read.request;
    let screened = screen_conversation(inputs, arrival, &mut request.conversation)?;
    let (rendered, tokens) = match read.truncates {
        true => {
            let wanted = (request.generation.max_tokens, true);
            truncated(inputs, tenant, &mut request.conversation, wanted, "input")?
        }
        false => {
            let rendered = prompt(inputs, &mut request.conversation, true)?;
            let tokens = encode_prompt(inputs, Some(tenant), &rendered.prompt, false, false, "input")?;
            (rendered, tokens)
        }
    };
    let (generation, reading) = (request.generation, rendered.reading);
    let rules = rules(inputs, tenant, &generation, Some((&request.conversation, reading.as_ref())))?;
    let prompt = PromptJob::wanted(inputs, tenant, &generation, rules, tokens, "input")?;
    let prompt = PromptJob { screened, ..prompt };
    let input = named(read.items, &id);
    let keep = read.store.then(|| {
        let (store, id) = (store.clone(), id.clone());
        let (mut messages, input, background) = (read.messages.clone(), input.clone(), read.background);
        Box::new(move |response: Arc<str>, output: Vec<Value>, said: Vec<Value>| {
            messages.extend(said);
            let record = StoredResponse::new(response, output, messages, input, background);
            store.put(tenant, &id, record, None);
        }) as responses::Keep
    });
    let seal = read.seals.then(|| Box::new(move |text: &str| sealer.seal(text).ok()) as responses::Seal);
    let namespaces = request.conversation.tools.namespaces;
    let answer = ResponseWriter::new(id.clone(), read.repeated, keep, namespaces, seal);
    let background = read.background.then(|| {
        let response = answer.unfinished("in_progress").into();
        Background { id, record: StoredResponse::new(response, Vec::new(), read.messages, input, true) }
    });
    let (arrived, asker, writer) = (arrival.at, inputs.asker(arrival, "responses"), Box::new(answer));
    let notes = request.notes;
    let job = Job { reading, arrived, asker, notes, ..Job::new(writer, generation, vec![prompt]) };
    Ok(Prepared { job, background })
}

/// `POST /v1/responses`
pub async fn create(
    State(generator): Shared<Generator>,
    State(store): Shared<ResponseStore>,
    request: JsonRequest,
) -> Reply {
    let flight = Flight::new(&generator.load, &request.id, request.entry.clone());
    let arrival = Arrival::new(request);
    let tenant = arrival.tenant.clone();
    let shared = store.clone();
    let prepare = move |inputs: &InputProcessor, arrival: &Arrival| prepare(inputs, &shared, arrival, true);
    let Prepared { job, background } = prepared(&generator, arrival, prepare).await?;
    let Some(Background { id, record }) = background else {
        return Ok(generator.run(&tenant, job, flight).await?);
    };
    let notes = job.notes.clone();
    let load = generator.load.clone();
    let mut answer = if job.generation.stream.is_some() {
        let (abort, events) = generator.start_streaming(&tenant, job, flight).await?;
        store.put(tenant.id, &id, record.clone(), Some(abort));
        let log = Arc::new(Log::default());
        store.attach(tenant.id, &id, log.clone());
        let answer = log::follow(log.clone(), None, load.limits.keep_alive)?;
        tokio::spawn(write_log((load, store), tenant, id, record, events, log));
        answer
    } else {
        let Started { abort, answer } = generator.start(&tenant, job, flight).await?;
        let told = json_bytes(record.json());
        store.put(tenant.id, &id, record.clone(), Some(abort));
        tokio::spawn(async move {
            // An answer stores itself.
            let failed = match answer.await {
                Ok(Ok(_)) => return,
                Ok(Err(error)) => error,
                Err(_) => ApiError::internal("the request was lost"),
            };
            put_failed((&load, &store), &tenant, &id, record, failed).await;
        });
        told
    };
    tell(&notes, answer.headers_mut());
    Ok(answer)
}

/// Keeps that a response in the background failed, unless it is over or somebody cancelled it before.
async fn put_failed(
    (load, store): (&Load, &ResponseStore),
    tenant: &Tenant,
    id: &str,
    record: StoredResponse,
    failed: ApiError,
) {
    if store.stop(tenant.id, id).flatten().is_some() {
        match ended(load, tenant, record, "failed", Some(failed)).await {
            Ok(record) => store.put(tenant.id, id, record, None),
            Err(WorkLost) => tracing::warn!(response = id, "that it failed is not kept"),
        }
    }
}

/// A response in the background that ended before its answer did.
async fn ended(
    load: &Load,
    tenant: &Tenant,
    record: StoredResponse,
    status: &'static str,
    error: Option<ApiError>,
) -> Result<StoredResponse, WorkLost> {
    let bytes = record.response.len();
    let write = move || {
        let response = responses::ended(&record.response, status, error.as_ref());
        record.with(response.into())
    };
    load.text.finish(tenant.id, bytes, || giving_way(write)).await
}

/// Writes down what a response in the background says, whether anybody reads it or not. One that is dropped from the store goes on being
/// generated and is not written down any more.
async fn write_log(
    (load, store): (Arc<Load>, Arc<ResponseStore>),
    tenant: Tenant,
    id: String,
    record: StoredResponse,
    events: FrameReader,
    log: Arc<Log>,
) {
    let mut kept = true;
    while let Some(piece) = events.next().await {
        kept = kept && store.grow(tenant.id, &id, piece.len());
        if kept {
            log.push(piece);
        }
    }
    // An answer stores itself.
    let failed = ApiError::internal("The response failed; its events say why.");
    put_failed((&load, &store), &tenant, &id, record, failed).await;
    log.close();
}

/// The job of a request whose answer is waited for, whole. It is stored only where it says so: a batch would drive out those that clients go
/// on from.
pub fn prepare_whole(
    inputs: &InputProcessor,
    store: &Arc<ResponseStore>,
    arrival: &Arrival,
) -> Result<Job, ApiError> {
    let Prepared { job, background } = prepare(inputs, store, arrival, false)?;
    match background {
        Some(_) => Err(ApiError::unsupported("background", "a line of a batch is in the background anyway")),
        None => Ok(job),
    }
}

/// `GET /v1/responses/{id}`
pub async fn show(
    State(store): Shared<ResponseStore>,
    State(load): Shared<Load>,
    tenant: Tenant,
    Id(id): Id,
    uri: Uri,
) -> Reply {
    let record = store.get(tenant.id, &id).ok_or_else(|| not_found("response_id", &id))?;
    let (streams, after) = resumed(uri.query().unwrap_or_default())?;
    if !streams {
        return Ok(json_bytes(record.json()));
    }
    let log = store.log(tenant.id, &id).ok_or_else(|| {
        let message = "Only a response that was created with 'background' and 'stream' can be streamed again; leave 'stream' out.";
        ApiError::invalid("stream", message)
    })?;
    Ok(log::follow(log, after, load.limits.keep_alive)?)
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
    State(store): Shared<ResponseStore>,
    State(load): Shared<Load>,
    tenant: Tenant,
    Id(id): Id,
    uri: Uri,
) -> Reply {
    let record = store.get(tenant.id, &id).ok_or_else(|| not_found("response_id", &id))?;
    let bytes = record.bytes;
    let write = move || {
        let page = page(&record.input, uri.query().unwrap_or_default())?.to_string();
        work::add(2 * page.len());
        Ok(page)
    };
    Ok(json_response(load.off_thread(tenant.id, bytes, write).await?))
}

/// `DELETE /v1/responses/{id}`
pub async fn delete(State(store): Shared<ResponseStore>, tenant: Tenant, Id(id): Id) -> Reply {
    if !store.delete(tenant.id, &id) {
        return Err(not_found("response_id", &id).into());
    }
    Ok(json_response(json!({"id": id, "object": "response", "deleted": true}).to_string()))
}

/// `POST /v1/responses/{id}/cancel`: ends one that runs in the background; one that is over stays as it is.
pub async fn cancel(
    State(store): Shared<ResponseStore>,
    State(load): Shared<Load>,
    tenant: Tenant,
    Id(id): Id,
) -> Reply {
    let running = store.stop(tenant.id, &id).ok_or_else(|| not_found("response_id", &id))?;
    let mut record = store.get(tenant.id, &id).ok_or_else(|| not_found("response_id", &id))?;
    if !record.background {
        let message = "Only a response that was created with 'background' can be cancelled; close the connection of another.";
        return Err(ApiError::invalid("response_id", message).into());
    }
    if let Some(abort) = running {
        abort.cancel();
        let cancelled = ended(&load, &tenant, record, "cancelled", None).await;
        record = cancelled.map_err(|WorkLost| ApiError::internal("the response was not written"))?;
        store.put(tenant.id, &id, record.clone(), None);
    }
    Ok(json_bytes(record.json()))
}
