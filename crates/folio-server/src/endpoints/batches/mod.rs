//! `/v1/files` and `/v1/batches`, in OpenAI's shapes. Another owner's id is answered like one that never was.

mod run;

pub(crate) use run::Runner;

use std::borrow::Cow;
use std::collections::HashMap;
use std::io::{BufRead, Read};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::extract::{Request, State};
use axum::http::{HeaderValue, Response, Uri, header};
use futures_core::Stream;
use serde_json::{Value, json};
use tokio::sync::mpsc;

use crate::arrival::{Id, JsonRequest};
use crate::batch::lines::{BatchUsage, Endpoint};
use crate::batch::multipart::{FormField, boundary, parts};
use crate::batch::records::{Batch, BatchCounts, BatchRecord, BatchStatus, FileMeta, VERSION};
use crate::batch::store::Store;
use crate::batch::{Batches, KEPT_S, WINDOW_S};
use crate::engine::Served;
use crate::http::Shared;
use crate::http::reply::{Reply, json_response};
use crate::http::{fresh_id, read_body};
use crate::load::Load;
use crate::tenancy::keys::Scope;
use crate::tenancy::tenant::Tenant;
use crate::tenancy::unread::HeldBytes;
use folio_api::fields::{Fields, within};
use folio_api::labels;
use folio_api::refused;
use folio_api::{ApiError, unix_s};
use folio_kv::TenantId;
use folio_text::work;

/// A form around a file is little more than the file.
const FORM_BYTES: usize = 64 << 10;
const FILENAME_BYTES_MAX: usize = 512;
const SECONDS: (u64, u64) = (3600, 30 * 24 * 3600);
/// Of an upload.
const LEAST_BYTES_A_SECOND: usize = 256 << 10;
/// Of a file on its way to a reader, and how many of them it takes in memory: one that waits, one that leaves.
const PIECE_BYTES: usize = 32 << 10;
const PIECES: usize = 2;

/// Goes on with what an earlier process left.
pub(crate) fn resume(runner: &Arc<Runner>) {
    for batch in runner.batches.store.unfinished() {
        tokio::spawn(run::run(runner.clone(), batch));
    }
}

/// `POST /v1/files`
pub async fn upload(
    State(batches): Shared<Batches>,
    State(load): Shared<Load>,
    tenant: Tenant,
    request: Request,
) -> Reply {
    let (head, body) = request.into_parts();
    let kind = head.headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok());
    let boundary = kind.and_then(boundary).ok_or_else(|| {
        let message =
            "A file is uploaded as a form: send 'Content-Type: multipart/form-data' with a boundary.";
        ApiError::new(415, "invalid_request_error", message)
    })?;
    let most = batches.store.limits.file_bytes;
    let announced =
        head.headers.get(header::CONTENT_LENGTH).and_then(|v| v.to_str().ok()?.parse::<usize>().ok());
    let waits = load.limits.body_timeout;
    // Whoever sends slowly is waited for as long as the file's size explains, and no longer.
    let patience =
        waits + Duration::from_secs((announced.unwrap_or(most).min(most) / LEAST_BYTES_A_SECOND) as u64);
    let mut held = load.unread.hold(&tenant.gate);
    let read = read_body(&head.headers, body, most + FORM_BYTES, &mut held);
    let body = tokio::time::timeout(patience, read).await.map_err(|_| {
        let message = format!("The file did not arrive within {} s.", patience.as_secs());
        ApiError::new(408, "invalid_request_error", message)
    })??;
    let (owner, bytes) = (tenant.owner.clone(), body.len());
    let form = load.off_thread(tenant.id, bytes, move || {
        let parts = parts(&body, &boundary)
            .map_err(|why| ApiError::bad_request(format!("The upload is damaged: {why}.")))?;
        Upload::read(&body, &parts, most)
    });
    let form = form.await?;
    let kept = load.with_files(tenant.id, bytes, move || {
        // What the file takes in memory is counted until it is kept.
        let _held = held;
        batches.store.put(&owner, &form.filename, &form.content, Some(form.seconds))
    });
    let kept = kept.await?;
    Ok(json_response(file_json(&kept).to_string()))
}

/// An upload's fields.
struct Upload {
    filename: String,
    /// A part of the body.
    content: Bytes,
    seconds: u64,
}

impl Upload {
    /// `parts`: of the body.
    fn read(body: &Bytes, parts: &[FormField], most: usize) -> Result<Self, ApiError> {
        let mut fields: HashMap<&str, &FormField> = HashMap::new();
        for part in parts {
            if fields.insert(&part.name, part).is_some() {
                return Err(ApiError::invalid(&*part.name, format!("'{}' is given twice.", part.name)));
            }
        }
        let missing = |name: &str| ApiError {
            code: Some("missing_required_parameter"),
            ..ApiError::invalid(name, format!("Missing required parameter: '{name}'."))
        };
        let text = |part: &FormField| String::from_utf8_lossy(part.content).into_owned();
        let purpose = fields.remove("purpose").ok_or_else(|| missing("purpose"))?;
        if purpose.content != b"batch" {
            let purpose = text(purpose);
            let purpose: String = purpose.chars().take(64).collect();
            return Err(ApiError::unsupported(
                "purpose",
                &format!("files are for batches; send 'batch', not '{purpose}'"),
            ));
        }
        let file = fields.remove("file").ok_or_else(|| missing("file"))?;
        let mut seconds = KEPT_S;
        let anchor = fields.remove("expires_after[anchor]");
        let after = fields.remove("expires_after[seconds]");
        match (anchor, after) {
            (None, None) => {}
            (Some(anchor), Some(after)) if anchor.content == b"created_at" => {
                let number =
                    text(after).parse().ok().filter(|seconds| (SECONDS.0..=SECONDS.1).contains(seconds));
                seconds = number.ok_or_else(|| wrong_seconds("expires_after[seconds]"))?;
            }
            _ => return Err(wrong_anchor("expires_after")),
        }
        if let Some(name) = fields.keys().next() {
            let message = format!("Unrecognized request argument supplied: {name}");
            return Err(ApiError {
                code: Some("unrecognized_parameter"),
                ..ApiError::invalid(&**name, message)
            });
        }
        if file.content.len() > most {
            return Err(ApiError::too_large(most));
        }
        if file.content.is_empty() {
            return Err(ApiError::invalid("file", "'file' is empty."));
        }
        let filename = file.filename.clone().unwrap_or_else(|| "upload.jsonl".into());
        if filename.len() > FILENAME_BYTES_MAX || filename.chars().any(char::is_control) {
            return Err(ApiError::invalid("file", "The file's name is too long or has control characters."));
        }
        Ok(Self { filename, content: body.slice_ref(file.content), seconds })
    }
}

fn wrong_seconds(param: &str) -> ApiError {
    ApiError::invalid(
        param,
        format!("Invalid '{param}': it must be a number from {} to {}.", SECONDS.0, SECONDS.1),
    )
}

fn wrong_anchor(param: &str) -> ApiError {
    ApiError::invalid(
        param,
        format!("Invalid '{param}': it has an anchor, which is 'created_at', and seconds."),
    )
}

fn file_json(file: &FileMeta) -> Value {
    json!({
        "id": file.id, "object": "file", "bytes": file.bytes, "created_at": file.created_at, "expires_at": file.expires_at,
        "filename": file.filename, "purpose": file.purpose, "status": "processed", "status_details": null,
    })
}

/// What the store says. It reads and writes files, so it is asked off the event loop.
async fn stored<T: Send + 'static>(
    (load, batches): (&Load, &Arc<Batches>),
    tenant: &Tenant,
    ask: impl FnOnce(&Store) -> Result<T, ApiError> + Send + 'static,
) -> Result<T, ApiError> {
    let batches = batches.clone();
    load.with_files(tenant.id, 1, move || ask(&batches.store)).await
}

/// `GET /v1/files`
pub async fn list_files(
    State(batches): Shared<Batches>,
    State(load): Shared<Load>,
    tenant: Tenant,
    uri: Uri,
) -> Reply {
    let query = ListQuery::read(&uri, &["purpose", "limit", "order", "after"])?;
    let reversed = match query.get("order") {
        None | Some("desc") => true,
        Some("asc") => false,
        Some(_) => {
            return Err(ApiError::invalid("order", "Invalid 'order': it is neither 'asc' nor 'desc'.").into());
        }
    };
    let (limit, after) = (query.limit((10_000, 10_000))?, query.get("after").map(str::to_owned));
    let (owner, purpose) = (tenant.owner.clone(), query.get("purpose").map(str::to_owned));
    let list = move |store: &Store| {
        let mut files = store.files(&owner);
        if reversed {
            files.reverse();
        }
        files.retain(|file| purpose.as_ref().is_none_or(|purpose| file.purpose == *purpose));
        if let Some(after) = after {
            let at = files.iter().position(|file| file.id == after).ok_or_else(no_after)?;
            files.drain(..=at);
        }
        let more = files.len() > limit;
        files.truncate(limit);
        Ok(page(files.iter().map(|file| (file.id.clone(), file_json(file))), more))
    };
    Ok(json_response(stored((&load, &batches), &tenant, list).await?))
}

/// `GET /v1/files/{id}`
pub async fn show_file(
    State(batches): Shared<Batches>,
    State(load): Shared<Load>,
    tenant: Tenant,
    Id(id): Id,
) -> Reply {
    let (owner, name) = (tenant.owner.clone(), id.clone());
    let found = stored((&load, &batches), &tenant, move |store| Ok(store.file(&owner, &name))).await?;
    let (file, _) = found.ok_or_else(|| not_found("file", &id))?;
    Ok(json_response(file_json(&file).to_string()))
}

/// `DELETE /v1/files/{id}`
pub async fn delete_file(
    State(batches): Shared<Batches>,
    State(load): Shared<Load>,
    tenant: Tenant,
    Id(id): Id,
) -> Reply {
    let (owner, name) = (tenant.owner.clone(), id.clone());
    if !stored((&load, &batches), &tenant, move |store| store.delete(&owner, &name)).await? {
        return Err(not_found("file", &id).into());
    }
    Ok(json_response(json!({"id": id, "object": "file", "deleted": true}).to_string()))
}

/// `GET /v1/files/{id}/content`
pub async fn content(
    State(batches): Shared<Batches>,
    State(load): Shared<Load>,
    tenant: Tenant,
    Id(id): Id,
) -> Reply {
    let (owner, name) = (tenant.owner.clone(), id.clone());
    let ask = move |store: &Store| {
        let found = store.file(&owner, &name);
        let opened = found.map(|(file, content)| content.reader().map(|reader| (file, reader))).transpose();
        opened.map_err(|error| ApiError::internal(format!("the file cannot be read: {error}")))
    };
    let found = stored((&load, &batches), &tenant, ask).await?;
    let (file, reader) = found.ok_or_else(|| not_found("file", &id))?;
    let mut held = load.unread.hold(&tenant.gate);
    held.grow(PIECES * PIECE_BYTES)?;
    let (sender, pieces) = mpsc::channel(1);
    tokio::spawn(send((load, tenant.id), reader, sender, held));
    let mut response = Response::new(Body::from_stream(FileStream(pieces)));
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/octet-stream"));
    headers.insert(header::CONTENT_LENGTH, file.bytes.into());
    Ok(response)
}

/// Reads a file piece by piece. A reader that is slow holds back the next piece, and no thread; one that left ends them.
async fn send(
    (load, tenant): (Arc<Load>, TenantId),
    mut reader: Box<dyn BufRead + Send>,
    to: mpsc::Sender<std::io::Result<Bytes>>,
    _held: HeldBytes,
) {
    while let Ok(place) = to.reserve().await {
        let read = move || {
            let mut piece = Vec::with_capacity(PIECE_BYTES);
            let read = reader.by_ref().take(PIECE_BYTES as u64).read_to_end(&mut piece);
            (reader, read.map(|_| piece))
        };
        let Ok((rest, piece)) = load.files.finish(tenant, PIECE_BYTES, read).await else {
            return place.send(Err(std::io::Error::other("reading was not done to its end")));
        };
        reader = rest;
        match piece {
            Ok(piece) if piece.is_empty() => return,
            Ok(piece) => place.send(Ok(piece.into())),
            Err(error) => return place.send(Err(error)),
        }
    }
}

struct FileStream(mpsc::Receiver<std::io::Result<Bytes>>);

impl Stream for FileStream {
    type Item = std::io::Result<Bytes>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.0.poll_recv(cx)
    }
}

/// `POST /v1/batches`
pub async fn create(State(runner): Shared<Runner>, request: JsonRequest) -> Reply {
    let JsonRequest { tenant, body, held: _held, .. } = request;
    let bytes = body.len();
    let Runner { generator, batches, .. } = &*runner;
    generator.load.check_not_draining()?;
    let (shared, asking) = (batches.clone(), tenant.clone());
    let read = move || read(&shared, &asking, &body);
    let record = generator.load.off_thread(tenant.id, bytes, read).await?;
    let scope = Scope::of(record.endpoint.path());
    tenant.check_scope(scope)?;
    let store = (&*generator.load, batches);
    let batch = stored(store, &tenant, move |store| store.begin(record)).await?;
    let told = batch_json(&generator.served, &batch);
    tokio::spawn(run::run(runner, batch));
    Ok(json_response(told.to_string()))
}

fn read(batches: &Batches, tenant: &Tenant, body: &[u8]) -> Result<BatchRecord, ApiError> {
    let mut fields = Fields::of_body(body)?;
    let input_file_id: String = fields.require("input_file_id")?;
    let endpoint: String = fields.require("endpoint")?;
    let endpoint = Endpoint::named(&endpoint).ok_or_else(|| {
        let known = Endpoint::ALL.map(Endpoint::path).join(", ");
        ApiError::invalid("endpoint", format!("Invalid 'endpoint': it must be one of {known}."))
    })?;
    let window: String = fields.require("completion_window")?;
    if window != "24h" {
        return Err(ApiError::invalid(
            "completion_window",
            "Invalid 'completion_window': only '24h' is supported.",
        ));
    }
    let metadata = labels::metadata(&mut fields)?;
    let output_seconds = match fields.raw("output_expires_after") {
        None => KEPT_S,
        Some(raw) => {
            let mut after = Fields::of_value(raw, fields.path("output_expires_after"))?;
            if after.require::<String>("anchor")? != "created_at" {
                return Err(wrong_anchor("output_expires_after"));
            }
            let seconds = after.take("seconds")?;
            let seconds = within(&after, "seconds", seconds, SECONDS)?;
            after.finish(&[])?;
            seconds.ok_or_else(|| wrong_seconds("output_expires_after.seconds"))?
        }
    };
    fields.finish(refused::BATCHES)?;
    let owner = tenant.owner.clone();
    let Some((file, _)) = batches.store.file(&owner, &input_file_id) else {
        return Err(ApiError { status: 400, ..not_found("input_file_id", &input_file_id) });
    };
    if file.purpose != "batch" {
        let message = format!(
            "Invalid 'input_file_id': file '{input_file_id}' was not uploaded with the purpose 'batch'."
        );
        return Err(ApiError::invalid("input_file_id", message));
    }
    let now = unix_s();
    Ok(BatchRecord {
        version: VERSION,
        id: format!("batch_{}", fresh_id()),
        owner: owner.to_string(),
        key: tenant.key.to_string(),
        endpoint,
        input_file_id,
        output_file_id: format!("file-{}", fresh_id()),
        error_file_id: format!("file-{}", fresh_id()),
        published: (false, false),
        status: BatchStatus::Validating,
        created_at: now,
        expires_at: now + WINDOW_S,
        in_progress_at: None,
        finalizing_at: None,
        cancelling_at: None,
        ended_at: None,
        errors: Vec::new(),
        counts: BatchCounts::default(),
        usage: BatchUsage::default(),
        metadata,
        output_seconds,
    })
}

/// `GET /v1/batches`
pub async fn list_batches(
    State(batches): Shared<Batches>,
    State(load): Shared<Load>,
    State(served): Shared<Served>,
    tenant: Tenant,
    uri: Uri,
) -> Reply {
    let query = ListQuery::read(&uri, &["after", "limit"])?;
    let (limit, after) = (query.limit((20, 100))?, query.get("after").map(str::to_owned));
    let owner = tenant.owner.clone();
    let list = move |store: &Store| {
        let found = store.batches_page(&owner, after.as_deref(), limit);
        let (found, more) = found.ok_or_else(no_after)?;
        let described = found.iter().map(|batch| {
            let described = batch_json(&served, batch);
            (described["id"].as_str().unwrap_or_default().to_owned(), described)
        });
        Ok(page(described, more))
    };
    Ok(json_response(stored((&load, &batches), &tenant, list).await?))
}

/// `GET /v1/batches/{id}`
pub async fn show_batch(
    State(batches): Shared<Batches>,
    State(served): Shared<Served>,
    tenant: Tenant,
    Id(id): Id,
) -> Reply {
    let batch = find(&batches, &tenant, &id)?;
    Ok(json_response(batch_json(&served, &batch).to_string()))
}

/// `POST /v1/batches/{id}/cancel`
pub async fn cancel(
    State(batches): Shared<Batches>,
    State(load): Shared<Load>,
    State(served): Shared<Served>,
    tenant: Tenant,
    Id(id): Id,
) -> Reply {
    let batch = find(&batches, &tenant, &id)?;
    let mut refused = None;
    batch.change(|record| match record.status {
        BatchStatus::Validating | BatchStatus::InProgress => {
            record.status = BatchStatus::Cancelling;
            record.cancelling_at = Some(unix_s());
        }
        BatchStatus::Cancelling | BatchStatus::Cancelled => {}
        over => refused = Some(over),
    });
    if let Some(over) = refused {
        let status = json!(over);
        let message = format!("Cannot cancel a batch with status {status}.");
        let error = ApiError::new(409, "invalid_request_error", message);
        return Err(ApiError { code: Some("batch_not_cancellable"), ..error }.into());
    }
    // As it is now: it may be over before that is written down.
    let told = batch_json(&served, &batch).to_string();
    batch.wake.notify_waiters();
    let its = batch.clone();
    if let Err(error) = stored((&load, &batches), &tenant, move |store| Ok(store.save(&its))).await? {
        tracing::warn!(batch = id, %error, "a cancellation cannot be written down");
    }
    Ok(json_response(told))
}

fn find(batches: &Batches, tenant: &Tenant, id: &str) -> Result<Arc<Batch>, ApiError> {
    let batch = batches.store.batch(&tenant.owner.clone(), id);
    batch.ok_or_else(|| not_found("batch", id))
}

fn batch_json(served: &Served, batch: &Batch) -> Value {
    let record = batch.record();
    let when = |status: BatchStatus| record.ended_at.filter(|_| record.status == status);
    let errors = (!record.errors.is_empty()).then(|| json!({"object": "list", "data": record.errors}));
    let BatchRecord { counts, .. } = record;
    json!({
        "id": record.id, "object": "batch", "endpoint": record.endpoint, "model": served.name(), "errors": errors,
        "input_file_id": record.input_file_id, "completion_window": "24h", "status": record.status,
        "output_file_id": record.published.0.then_some(&record.output_file_id),
        "error_file_id": record.published.1.then_some(&record.error_file_id),
        "created_at": record.created_at, "in_progress_at": record.in_progress_at, "expires_at": record.expires_at,
        "finalizing_at": record.finalizing_at, "completed_at": when(BatchStatus::Completed), "failed_at": when(BatchStatus::Failed),
        "expired_at": when(BatchStatus::Expired), "cancelling_at": record.cancelling_at,
        "cancelled_at": when(BatchStatus::Cancelled),
        "request_counts": {"total": counts.total, "completed": counts.completed, "failed": counts.failed},
        "usage": record.usage.to_json(), "metadata": record.metadata,
    })
}

/// The same for an id that never was, that is gone, and that is another's.
fn not_found(what: &'static str, id: &str) -> ApiError {
    let id: String = id.chars().take(128).collect();
    let (param, code, noun) = match what {
        "batch" => ("batch_id", "batch_not_found", "batch"),
        "input_file_id" => ("input_file_id", "file_not_found", "file"),
        _ => ("file_id", "file_not_found", "file"),
    };
    ApiError {
        param: Some(param.into()),
        code: Some(code),
        ..ApiError::new(404, "invalid_request_error", format!("No such {noun}: '{id}'."))
    }
}

/// `name=value` pairs of a list's address.
struct ListQuery<'a>(Vec<(Cow<'a, str>, Cow<'a, str>)>);

impl<'a> ListQuery<'a> {
    fn read(uri: &'a Uri, known: &[&str]) -> Result<Self, ApiError> {
        let pairs: Vec<_> = form_urlencoded::parse(uri.query().unwrap_or_default().as_bytes()).collect();
        match pairs.iter().find(|(name, _)| !known.contains(&&**name)) {
            None => Ok(Self(pairs)),
            Some((name, _)) => {
                let message = format!("Unrecognized request argument supplied: {name}");
                Err(ApiError { code: Some("unrecognized_parameter"), ..ApiError::invalid(&**name, message) })
            }
        }
    }

    fn get(&self, name: &str) -> Option<&str> {
        self.0.iter().find(|(known, _)| known == name).map(|(_, value)| &**value)
    }

    /// How many of a list are asked for: as many as usual, and at most so many.
    fn limit(&self, (usual, most): (usize, usize)) -> Result<usize, ApiError> {
        let Some(text) = self.get("limit") else { return Ok(usual) };
        text.parse().ok().filter(|limit| (1..=most).contains(limit)).ok_or_else(|| {
            ApiError::invalid("limit", format!("Invalid 'limit': it must be a number from 1 to {most}."))
        })
    }
}

fn no_after() -> ApiError {
    ApiError::invalid("after", "Invalid 'after': nothing here has this id.")
}

/// A part of a list, each member with its id, as JSON.
fn page(list: impl Iterator<Item = (String, Value)>, more: bool) -> String {
    let (ids, data): (Vec<String>, Vec<Value>) = list.unzip();
    let page = json!({"object": "list", "data": data, "first_id": ids.first(), "last_id": ids.last(), "has_more": more});
    let page = page.to_string();
    work::add(2 * page.len());
    page
}
