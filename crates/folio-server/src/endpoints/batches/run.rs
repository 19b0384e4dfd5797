//! One batch, from validating to its end.
//!
//! States: *validating* -> *in_progress* -> *finalizing* -> *completed*; a file that cannot be run, or a full disk, leads to *failed*,
//! the window's end to *expired*, a client's wish to *cancelling* and *cancelled*. Whatever was answered until then is in the output
//! file. While the server drains no line is begun; those that run are waited for, and the batch stays as it is for the next process.
//!
//! Invariants: a line has at most one result, which is written before the turn it ran in is given back; one that is told to come
//! again gives its turn back until it does. A line runs with the rights that the batch's key has then: where the key is not valid
//! any more, the batch ends. Files are read and written off the event loop.

use std::collections::HashSet;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::body::Bytes;
use parking_lot::Mutex;
use prometheus_client::metrics::gauge::Gauge;
use serde_json::value::RawValue;
use tokio::task::JoinSet;

use crate::arrival::{Arrival, Flight};
use crate::batch::lines::{self, Endpoint, InputLine, LineError, LineSpan};
use crate::batch::records::{Batch, BatchCounts, BatchRecord, BatchStatus, FileContent};
use crate::batch::results::Results;
use crate::batch::store::Store;
use crate::batch::{Batches, CLASS, PRIORITY, PRIORITY_SPAN};
use crate::endpoints::openai::chat;
use crate::endpoints::openai::completions;
use crate::endpoints::openai::embeddings::{self, Backoff};
use crate::endpoints::responses;
use crate::generation::Generator;
use crate::generation::input::InputProcessor;
use crate::generation::screening::prepared;
use crate::http::fresh_id;
use crate::load::{Counted, Load};
use crate::response_store::ResponseStore;
use crate::tenancy::gate::Payload;
use crate::tenancy::keys::Scope;
use crate::tenancy::tenant::Tenant;
use crate::threads::fair_queue::Turn;
use crate::threads::{NOBODY, WorkLost};
use folio_api::params::Generation;
use folio_api::{ApiError, unix_s};
use folio_kv::TenantId;

/// Longest pause before a line that was told to come again does.
const AGAIN_S_MAX: u32 = 30;

/// What running batches takes.
pub(crate) struct Runner {
    pub generator: Arc<Generator>,
    pub batches: Arc<Batches>,
    /// Those that lines go on from.
    pub responses: Arc<ResponseStore>,
}

/// Why a batch takes no more lines.
#[derive(Clone, Copy, PartialEq)]
enum BatchEnd {
    Done,
    Cancelled,
    Expired,
    /// The server ends; the batch does not.
    Draining,
}

/// What became of a line.
struct LineResult {
    place: usize,
    custom_id: String,
    request_id: String,
    /// `None`: nothing, the server is ending.
    result: Option<Result<String, ApiError>>,
    /// Given back when the result is written down: the next line's turn, and what a drain waits for.
    _held: Option<LineTurn>,
}

/// A line's turn, while it has one.
struct LineTurn {
    _turn: Turn<Arc<str>>,
    _counted: Counted,
    _running: Running,
}

/// Runs a batch as far as this process can.
pub async fn run(runner: Arc<Runner>, batch: Arc<Batch>) {
    if let Err(errors) = go(&runner, &batch).await {
        batch.change(|record| {
            record.status = BatchStatus::Failed;
            record.ended_at = Some(unix_s());
            record.errors = errors;
        });
        let (load, owner) = (runner.generator.load.clone(), batch.record().owner);
        let whose = runner.generator.tenancy.tenants.of_owner(&owner).map_or(NOBODY, |tenant| tenant.id);
        let saved = off_loop(&load, (whose, 1), move || {
            let saved = runner.batches.store.save(&batch);
            saved.inspect_err(|error| {
                tracing::error!(batch = batch.record().id, %error, "a failed batch cannot be written down");
            })
            .map_err(storage)
        });
        let _ = saved.await;
    }
}

fn storage(error: io::Error) -> Vec<LineError> {
    vec![LineError::of_file("storage", format!("The batch's files cannot be read or written: {error}."))]
}

/// The error is what makes the batch fail.
async fn go(runner: &Arc<Runner>, batch: &Arc<Batch>) -> Result<(), Vec<LineError>> {
    let Runner { generator, batches, .. } = &**runner;
    let record = batch.record();
    let gone = |what: &str| vec![LineError::of_file("not_found", what.to_owned())];
    let tenant = generator.tenancy.tenants.of_owner(&record.owner);
    let tenant = tenant.ok_or_else(|| gone("Whoever made this batch has no key here any more."))?;
    let tenant = Tenant { key: record.key.as_str().into(), ..tenant };
    // All of a file is read and written.
    let (load, whose) = (&generator.load, (tenant.id, batches.store.limits.file_bytes));
    let endpoint = record.endpoint;
    let (shared, its, owner) = (batches.clone(), batch.clone(), record.owner.clone());
    let most = (batches.store.limits.lines, load.limits.body_bytes);
    let (content, places, done, results) = off_loop(load, whose, move || {
        let store = &shared.store;
        let input = store.file(&owner, &record.input_file_id);
        let (_, content) = input.ok_or_else(|| gone("The batch's input file does not exist any more."))?;
        let places = lines::check(content.reader().map_err(storage)?, endpoint, most)?;
        let results = store.results(&its).map_err(storage)?;
        let done = recall(&its, &results, places.len()).map_err(storage)?;
        its.change(|record| {
            if record.status == BatchStatus::Validating {
                record.status = BatchStatus::InProgress;
                record.in_progress_at = Some(unix_s());
            }
        });
        store.save(&its).map_err(storage)?;
        Ok((content, places, done, results))
    })
    .await?;

    let owner = batch.record().owner.as_str().into();
    let job = Arc::new(BatchRun { runner: runner.clone(), tenant, owner, endpoint, content, places });
    let lines = job.clone();
    let open = off_loop(load, whose, move || {
        let mut open: Vec<usize> = (0..lines.places.len()).collect();
        if !done.is_empty() {
            open.retain(|place| lines.line(*place).is_ok_and(|line| !done.contains(&line.custom_id)));
        }
        Ok(open)
    })
    .await?;
    let results = Arc::new(Mutex::new(results));
    let ended = all(&job, batch, &open, &results).await;
    let results = Arc::into_inner(results).map(Mutex::into_inner);
    let results = results.ok_or_else(|| gone("The batch's results are lost."))?;
    let (shared, its) = (batches.clone(), batch.clone());
    off_loop(load, whose, move || match ended {
        Ok(BatchEnd::Draining) => Ok(()),
        Ok(end) => finish(&shared.store, &its, end, results).map_err(storage),
        Err(errors) => {
            // What was answered is not lost with the rest.
            if let Err(error) = shared.store.publish(results) {
                tracing::error!(batch = its.record().id, %error, "results of a failed batch cannot be kept");
            }
            Err(errors)
        }
    })
    .await
}

/// Does what reads or writes files of a batch that was begun, about so many bytes of them.
async fn off_loop<T: Send + 'static>(
    load: &Load,
    (tenant, bytes): (TenantId, usize),
    work: impl FnOnce() -> Result<T, Vec<LineError>> + Send + 'static,
) -> Result<T, Vec<LineError>> {
    let lost = || vec![LineError::of_file("internal_error", "The batch's files could not be worked on.")];
    load.files.finish(tenant, bytes, work).await.unwrap_or_else(|_| Err(lost()))
}

/// What an earlier process did: whose results are there, and what they add up to.
fn recall(batch: &Batch, results: &Results, total: usize) -> io::Result<HashSet<String>> {
    let mut done = HashSet::new();
    let mut counts = BatchCounts { total: total as u64, ..BatchCounts::default() };
    let mut usage = lines::BatchUsage::default();
    results.each(|answered, line| {
        if let Some(id) = lines::custom_id(line) {
            done.insert(id);
        }
        match answered {
            true => counts.completed += 1,
            false => counts.failed += 1,
        }
        #[derive(serde::Deserialize)]
        struct ResultLine<'a> {
            #[serde(borrow)]
            response: Option<Response<'a>>,
        }
        #[derive(serde::Deserialize)]
        struct Response<'a> {
            #[serde(borrow)]
            body: &'a RawValue,
        }
        if let Ok(ResultLine { response: Some(response) }) = serde_json::from_slice(line) {
            usage.add(response.body.get());
        }
    })?;
    batch.change(|record| (record.counts, record.usage) = (counts, usage));
    Ok(done)
}

/// Begins lines while there is a turn for them, and writes down what comes of them. What never ran gets its result too, unless the
/// server drains. `open`: lines without a result.
async fn all(
    job: &Arc<BatchRun>,
    batch: &Arc<Batch>,
    open: &[usize],
    results: &Arc<Mutex<Results>>,
) -> Result<BatchEnd, Vec<LineError>> {
    let Runner { generator, batches, .. } = &*job.runner;
    let turns = batches.store.limits.in_flight.max(1);
    let left = Duration::from_secs(batch.record().expires_at.saturating_sub(unix_s()));
    let mut expiry = std::pin::pin!(tokio::time::sleep(left));
    let mut running: JoinSet<LineResult> = JoinSet::new();
    let mut next = 0;
    let mut unfinished: HashSet<usize> = open.iter().copied().collect();
    let end = loop {
        // Registered before looking, so that nothing is missed.
        let (wake, stopping) = (batch.wake.notified(), batches.stopping.notified());
        if batch.status() == BatchStatus::Cancelling {
            break BatchEnd::Cancelled;
        }
        if generator.load.is_draining() {
            break BatchEnd::Draining;
        }
        if job.holder().await.is_none() {
            let message = "The API key that this batch was made with is not valid any more.";
            return Err(vec![LineError::of_file("invalid_api_key", message)]);
        }
        // No more than there are turns: batches take theirs one after the other.
        while running.len() < turns && next < open.len() {
            running.spawn(job.clone().run(open[next]));
            next += 1;
        }
        if running.is_empty() {
            break BatchEnd::Done;
        }
        tokio::select! {
            biased;
            () = wake => {}
            () = stopping => {}
            () = &mut expiry => break BatchEnd::Expired,
            Some(ran) = running.join_next() => {
                record(job, batch, results, &mut unfinished, ran).await?;
            }
        }
    };
    if end == BatchEnd::Draining {
        while let Some(ran) = running.join_next().await {
            record(job, batch, results, &mut unfinished, ran).await?;
        }
        return Ok(end);
    }
    while let Some(ran) = running.try_join_next() {
        record(job, batch, results, &mut unfinished, ran).await?;
    }
    // Dropping a line's task cancels what it asked for.
    running.shutdown().await;
    let (code, message) = match end {
        BatchEnd::Expired => {
            ("batch_expired", "This request could not be executed before the completion window expired.")
        }
        BatchEnd::Done => ("internal_error", "The server failed while it executed this request."),
        _ => ("batch_cancelled", "This request was not executed, because the batch was cancelled."),
    };
    let mut missed: Vec<usize> = unfinished.into_iter().collect();
    missed.sort_unstable();
    let (its, results) = (job.clone(), results.clone());
    off_loop(&generator.load, (job.tenant.id, batches.store.limits.file_bytes), move || {
        for place in missed {
            let Ok(line) = its.line(place) else { continue };
            let line = lines::not_run(&line.custom_id, code, message);
            results.lock().append(false, &line).map_err(storage)?;
        }
        Ok(end)
    })
    .await
}

/// Writes down a line's result.
async fn record(
    job: &BatchRun,
    batch: &Arc<Batch>,
    results: &Arc<Mutex<Results>>,
    unfinished: &mut HashSet<usize>,
    ran: Result<LineResult, tokio::task::JoinError>,
) -> Result<(), Vec<LineError>> {
    let LineResult { place, custom_id, request_id, result, _held } = match ran {
        Ok(ran) => ran,
        // It panicked, and which one it was is not known: its line gets its result at the end.
        Err(_) => return Ok(()),
    };
    let Some(result) = result else { return Ok(()) };
    let completed = result.is_ok();
    let (shared, owner) = (job.runner.batches.clone(), job.owner.clone());
    let (its, results) = (batch.clone(), results.clone());
    off_loop(&job.runner.generator.load, (job.tenant.id, 1), move || {
        let line = lines::result(&custom_id, &request_id, result.as_deref());
        if !shared.store.has_room(&owner, line.len() as u64) {
            let message = "The results of this batch do not fit beside your other files; delete some and send the rest again.";
            return Err(vec![LineError::of_file("storage_full", message)]);
        }
        results.lock().append(completed, &line).map_err(storage)?;
        its.change(|record| match &result {
            Ok(body) => {
                record.counts.completed += 1;
                record.usage.add(body);
            }
            Err(_) => record.counts.failed += 1,
        });
        Ok(())
    })
    .await?;
    unfinished.remove(&place);
    job.runner.generator.observability.metrics.batch_line(completed);
    Ok(())
}

/// Makes files of the results.
fn finish(store: &Store, batch: &Batch, end: BatchEnd, results: Results) -> io::Result<()> {
    if end == BatchEnd::Done {
        batch.change(|record| {
            record.status = BatchStatus::Finalizing;
            record.finalizing_at = Some(unix_s());
        });
        store.save(batch)?;
    }
    store.publish(results)?;
    batch.change(|record| {
        record.ended_at = Some(unix_s());
        record.status = match end {
            BatchEnd::Expired => BatchStatus::Expired,
            BatchEnd::Cancelled => BatchStatus::Cancelled,
            BatchEnd::Done | BatchEnd::Draining => BatchStatus::Completed,
        };
    });
    store.save(batch)?;
    let BatchRecord { id, status, counts, .. } = batch.record();
    tracing::info!(
        batch = id,
        ?status,
        completed = counts.completed,
        failed = counts.failed,
        "a batch ended"
    );
    Ok(())
}

/// Counts as one while it lives.
struct Running(Gauge);

impl Running {
    fn one(gauge: Gauge) -> Self {
        gauge.inc();
        Self(gauge)
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.0.dec();
    }
}

/// What the lines of a batch have in common.
struct BatchRun {
    runner: Arc<Runner>,
    tenant: Tenant,
    owner: Arc<str>,
    endpoint: Endpoint,
    content: FileContent,
    places: Vec<LineSpan>,
}

impl BatchRun {
    fn line(&self, place: usize) -> Result<InputLine, String> {
        let line = self.content.line(self.places[place]).map_err(|error| error.to_string())?;
        lines::parse(&line)
    }

    /// Who asks, with the rights of now.
    async fn holder(&self) -> Option<Tenant> {
        self.runner.generator.tenancy.tenants.of_key(&self.owner, &self.tenant.key).await
    }

    /// A turn for a line, or nothing where the server ends.
    async fn turn(&self) -> Option<LineTurn> {
        let Runner { generator, batches, .. } = &*self.runner;
        let turn = batches.turns.turn(&self.owner, 1).await.ok()?;
        let held = LineTurn {
            _turn: turn,
            _counted: generator.load.in_flight.enter(),
            _running: Running::one(generator.observability.metrics.batch_running.clone()),
        };
        (!generator.load.is_draining()).then_some(held)
    }

    /// Gives a line's turn back for so long, and has the next; others have theirs meanwhile. False: the server ends.
    async fn again(&self, held: &mut Option<LineTurn>, pause: Duration) -> bool {
        let Runner { generator, batches, .. } = &*self.runner;
        *held = None;
        let stopping = batches.stopping.notified();
        if generator.load.is_draining() {
            return false;
        }
        tokio::select! {
            () = tokio::time::sleep(pause) => {}
            () = stopping => return false,
        }
        *held = self.turn().await;
        held.is_some()
    }

    /// One line, when it is its turn; again, and in another turn, as often as it is told to come again.
    async fn run(self: Arc<Self>, place: usize) -> LineResult {
        let Runner { generator, .. } = &*self.runner;
        let request_id = fresh_id();
        let mut ran = LineResult { place, custom_id: String::new(), request_id, result: None, _held: None };
        let mut held = self.turn().await;
        while held.is_some() {
            let job = self.clone();
            let line = generator.load.files.finish(self.tenant.id, 1, move || job.line(place)).await;
            let line = line.unwrap_or_else(|WorkLost| Err("reading was not done to its end".into()));
            let answer = match line {
                Err(error) => Err(ApiError::internal(format!("the line cannot be read: {error}"))),
                Ok(line) => {
                    ran.custom_id = line.custom_id;
                    self.answer(&ran.request_id, line.body, &mut held).await
                }
            };
            match answer {
                Err(error) if generator.load.is_draining() && error.status >= 500 => return ran,
                Err(error) if again(&error).is_some() => {
                    self.again(&mut held, again(&error).unwrap_or_default()).await;
                }
                answer => {
                    ran.result = Some(answer);
                    ran._held = held;
                    return ran;
                }
            }
        }
        ran
    }

    /// The response that the line's route would give.
    async fn answer(
        &self,
        request_id: &str,
        body: Box<RawValue>,
        held: &mut Option<LineTurn>,
    ) -> Result<String, ApiError> {
        let Runner { generator, responses: store, .. } = &*self.runner;
        let over =
            || ApiError::unauthorized("The API key that this batch was made with is not valid any more.");
        let tenant = &self.holder().await.ok_or_else(over)?;
        let scope = Scope::of(self.endpoint.path());
        tenant.check_scope(scope)?;
        let entry = tenant.gate.enter(Payload::Prompts, Instant::now())?;
        let behind = |generation: &mut Generation| {
            generation.behind = CLASS;
            generation.priority = PRIORITY + generation.priority.clamp(-PRIORITY_SPAN, PRIORITY_SPAN);
        };
        let body = Bytes::from(Box::<str>::from(body).into_string());
        if self.endpoint == Endpoint::Embeddings {
            let line = RunningLine { job: self, held };
            let read = folio_api::openai::embeddings::read;
            let (answer, _) =
                embeddings::answer(generator, tenant, (request_id, body, entry), (read, behind), line)
                    .await?;
            return Ok(answer.json);
        }
        let arrival = Arrival::of_line(tenant.clone(), request_id.to_owned(), body);
        let (endpoint, store) = (self.endpoint, store.clone());
        let prepare = move |inputs: &InputProcessor, arrival: &Arrival| match endpoint {
            Endpoint::Completions => completions::prepare(inputs, arrival),
            Endpoint::Responses => responses::prepare_whole(inputs, &store, arrival),
            Endpoint::Chat | Endpoint::Embeddings => chat::prepare(inputs, arrival),
        };
        let mut job = prepared(generator, arrival, prepare).await?;
        if job.generation.stream.is_some() {
            return Err(ApiError::unsupported("stream", "a batch has nobody to stream to; leave it out"));
        }
        behind(&mut job.generation);
        let started = generator.start(tenant, job, Flight::within(request_id, entry)).await?;
        Ok(started.answer().await?.json)
    }
}

/// A line that is under way: a part of it that is told to come again gives its turn back, as the whole does.
struct RunningLine<'a> {
    job: &'a BatchRun,
    held: &'a mut Option<LineTurn>,
}

impl Backoff for RunningLine<'_> {
    async fn wait(&mut self, pause: Duration) -> Result<(), ApiError> {
        match self.job.again(self.held, pause).await {
            true => Ok(()),
            false => Err(ApiError::unavailable("the server is shutting down", 5)),
        }
    }
}

/// When a refusal that is no word about the request itself lets it come again: the queue is full, a limit is reached, the engine
/// cannot go on until it is restarted.
fn again(error: &ApiError) -> Option<Duration> {
    let passes = [429, 503].contains(&error.status);
    passes.then(|| Duration::from_secs(error.retry_after_s.unwrap_or(1).clamp(1, AGAIN_S_MAX).into()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_passes_is_tried_again() {
        assert_eq!(again(&ApiError::busy("full", 7)), Some(Duration::from_secs(7)));
        assert_eq!(again(&ApiError::unavailable("broken", 300)), Some(Duration::from_secs(30)));
        for last in [ApiError::invalid("n", "too many"), ApiError::internal("lost"), ApiError::deadline()] {
            assert_eq!(again(&last), None);
        }
    }
}
