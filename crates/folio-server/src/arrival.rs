//! How requests arrive: their ids, who asks, whether they are let in, their bodies, and how they are counted.

use std::future::poll_fn;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use axum::body::{Body, Bytes};
use axum::extract::{FromRef, FromRequest, FromRequestParts, MatchedPath, Path, Request, State};
use axum::http::request::Parts;
use axum::http::{HeaderValue, Method, Response, header};
use axum::middleware::Next;
use axum::response::IntoResponse;
use folio_api::ApiError;
use folio_api::openapi::tables::OPEN;
use folio_api::params::valid_request_id;
use folio_text::work;
use futures_core::Stream;
use http_body::Body as _;
use serde_json::json;

use crate::config::Limits;
use crate::http::Shared;
use crate::http::connections::{Busy, HoldingBody};
use crate::http::reply::{AlreadyCounted, Refusal};
use crate::http::{Peer, anthropic, caught, check_content_type, fresh_id, ollama, read_body};
use crate::load::{Counted, Load};
use crate::observability::Observability;
use crate::observability::audit::Audit;
use crate::safety::Replacement;
use crate::tenancy::Tenancy;
use crate::tenancy::answering::Answered;
use crate::tenancy::gate::{AdmittedRequest, Gate, Payload};
use crate::tenancy::keys::Scope;
use crate::tenancy::tenant::Tenant;
use crate::tenancy::tenants::Tenants;
use crate::tenancy::unread::HeldBytes;
use crate::trace_context::TraceContext;

const REQUEST_ID: &str = "x-request-id";
/// Refused while draining.
const GENERATING: &[&str] = &[
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/embeddings",
    "/v1/responses",
    "/v1/messages",
    "/v1/cache/prefixes",
    "/api/chat",
    "/api/generate",
    "/api/embed",
    "/api/embeddings",
];

/// The request's id: the client's where it is usable, else a fresh one.
#[derive(Clone)]
pub struct RequestName(pub String);

/// Where a request came in.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Listener {
    Serving,
    Admin,
}

/// Around every route of the serving port.
pub async fn around(
    State(tenancy): Shared<Tenancy>,
    State(load): Shared<Load>,
    State(observability): Shared<Observability>,
    request: Request,
    next: Next,
) -> Response<Body> {
    let_in(&tenancy.tenants, &load, &*observability, request, next).await
}

/// Where requests are counted and written down.
pub(crate) trait RequestLog: Sync {
    fn count(&self, method: &str, handler: &str, status: u16);
    /// One was not answered to its end.
    fn panicked(&self);
    fn audit(&self) -> Option<&Audit>;
}

impl RequestLog for Observability {
    fn count(&self, method: &str, handler: &str, status: u16) {
        self.metrics.http(method, handler, status);
    }

    fn panicked(&self) {
        self.metrics.panicked();
    }

    fn audit(&self) -> Option<&Audit> {
        self.audit.as_ref()
    }
}

/// Of an answer: another process gave it, which has written it down, told its tenant's limits, and made who is refused again and again wait.
#[derive(Clone, Copy)]
pub(crate) struct PassedOn;

/// Answers a request of the serving port, or says why not, in the shape of the API that was spoken.
pub(crate) async fn let_in(
    tenants: &Arc<Tenants>,
    load: &Load,
    log: &impl RequestLog,
    mut request: Request,
    next: Next,
) -> Response<Body> {
    let (anthropic, ollama) = (anthropic::is_meant(&request), ollama::is_meant(request.uri().path()));
    let tenant = admit(tenants, load, &mut request).await;
    if tenant.as_ref().is_err_and(|refused| refused.retry_after_s.is_some()) {
        discard(&mut request, &load.limits).await;
        let gate = request.extensions().get::<Arc<Gate>>();
        if let Some(delay) = gate.and_then(|gate| gate.refusal_delay(Instant::now())) {
            tokio::time::sleep(delay).await;
        }
    }
    let entry = request.extensions().get::<Arc<AdmittedRequest>>().cloned();
    let answered_for = request.extensions().get::<Arc<Answered>>().cloned();
    let gate = request.extensions().get::<Arc<Gate>>().cloned();
    let generating = GENERATING.contains(&request.uri().path());
    let answer = async |request| {
        let response = next.run(request).await;
        counted(load, gate.as_ref().unwrap_or(&load.strangers), response)
    };
    let mut response = answered(load, log, Listener::Serving, request, tenant, answer).await;
    let passed_on = response.extensions().get::<PassedOn>().is_some();
    if let Some(gate) = gate.filter(|_| generating && !passed_on) {
        gate.tell(response.headers_mut(), Instant::now());
    }
    if anthropic {
        let id =
            response.headers().get(REQUEST_ID).and_then(|id| id.to_str().ok()).unwrap_or_default().to_owned();
        anthropic::restate(&mut response, &id);
    }
    if ollama {
        ollama::restate(&mut response);
    }
    match entry {
        // It runs until its answer was accepted or its client left.
        Some(entry) => response.map(|body| Body::new(HoldingBody::new(body, (entry, answered_for)))),
        None => response,
    }
}

/// An answer that is there as a whole counts among what is held for its tenant until it was written or its reader left; where there is no
/// room for it, it is none.
fn counted(load: &Load, gate: &Arc<Gate>, response: Response<Body>) -> Response<Body> {
    let known = response.extensions();
    if known.get::<AlreadyCounted>().is_some() || known.get::<PassedOn>().is_some() {
        return response;
    }
    let mut held = load.unread.hold(gate);
    match response.body().size_hint().exact().map_or(Ok(()), |bytes| held.grow(bytes as usize)) {
        Ok(()) => response.map(|body| Body::new(HoldingBody::counted(body, held))),
        Err(full) => Refusal(full).into_response(),
    }
}

/// Names the request, answers it or says why not, and counts. The connection of somebody known makes no room for others until the answer was
/// taken.
pub async fn answered(
    load: &Load,
    log: &impl RequestLog,
    listener: Listener,
    mut request: Request,
    asking: Result<Option<Tenant>, ApiError>,
    answer: impl AsyncFnOnce(Request) -> Response<Body>,
) -> Response<Body> {
    let arrived = Instant::now();
    let id = request
        .headers()
        .get(REQUEST_ID)
        .and_then(|id| id.to_str().ok())
        .filter(|id| valid_request_id(id))
        .map_or_else(fresh_id, str::to_owned);
    let method = match request.method().as_str() {
        known @ ("GET" | "POST" | "HEAD" | "PUT" | "DELETE" | "OPTIONS" | "PATCH") => known,
        _ => "OTHER",
    }
    .to_owned();
    let handler = request.extensions().get::<MatchedPath>().map_or("none", MatchedPath::as_str).to_owned();
    let peer = request.extensions().get::<Peer>().copied();
    let who = asking.as_ref().ok().and_then(|tenant| tenant.as_ref());
    let busy = request.extensions_mut().remove::<Arc<Busy>>();
    let known = who.is_some() || request.extensions().get::<Arc<Gate>>().is_some();
    let busy = busy.filter(|_| known);
    let who = who.map(|tenant| (tenant.name.clone(), tenant.key.clone()));
    let mut response = match asking {
        Ok(tenant) => {
            if let Some(tenant) = tenant {
                request.extensions_mut().insert(tenant);
            }
            request.extensions_mut().insert(RequestName(id.clone()));
            match caught(answer(request)).await {
                Some(response) => response,
                None => {
                    log.panicked();
                    Refusal(ApiError::internal("the server failed while it handled this request"))
                        .into_response()
                }
            }
        }
        Err(refused) => Refusal(refused).into_response(),
    };
    if let Ok(value) = HeaderValue::from_str(&id) {
        response.headers_mut().insert(REQUEST_ID, value);
    }
    let status = response.status().as_u16();
    let passed_on = response.extensions().get::<PassedOn>().is_some();
    log.count(&method, &handler, status);
    tracing::debug!(request = %id, %method, %handler, status, "answered");
    if let Some(audit) = log.audit().filter(|_| !passed_on) {
        let error = response.extensions().get::<ApiError>();
        audit.write(
            "request",
            json!({
                "request_id": id,
                "listener": if listener == Listener::Admin { "admin" } else { "serving" },
                "client": peer.map(|peer| peer.0.to_string()),
                "method": method,
                "route": handler,
                "tenant": who.as_ref().map(|(tenant, _)| &**tenant),
                "key": who.as_ref().map(|(_, key)| &**key),
                "status": status,
                "error": error.map(|error| error.code.unwrap_or(error.kind)),
                "ms": arrived.elapsed().as_millis() as u64,
            }),
        );
    }
    // A 429 has waited among its tenant's.
    if let Some(Peer(peer)) = peer.filter(|_| (400..500).contains(&status) && status != 429 && !passed_on)
        && let Some(delay) = load.refused.delay(peer.ip(), Instant::now())
    {
        tokio::time::sleep(delay).await;
    }
    match busy {
        Some(busy) => response.map(|body| Body::new(HoldingBody::new(body, busy))),
        None => response,
    }
}

/// Who asks, if the route wants to know; or why not. Every request of a tenant is let in here, before a byte of its body is read.
async fn admit(
    tenants: &Arc<Tenants>,
    load: &Load,
    request: &mut Request,
) -> Result<Option<Tenant>, ApiError> {
    let path = request.uri().path();
    if OPEN.contains(&path) {
        return Ok(None);
    }
    let tenant = tenants.authenticate(request.headers()).await?;
    let scope = Scope::of(path);
    tenant.check_scope(scope)?;
    anthropic::check_version(request.headers())?;
    let generating = GENERATING.contains(&path);
    if generating {
        load.check_not_draining()?;
    }
    request.extensions_mut().insert(tenant.gate.clone());
    let brings = match (generating, request.method()) {
        (true, &Method::POST) => Payload::Prompts,
        (false, &Method::POST) => Payload::Body,
        _ => Payload::Nothing,
    };
    let entry = tenant.gate.enter(brings, Instant::now())?;
    if let Some(trace) = TraceContext::of(request.headers()) {
        let _ = entry.trace.set(Box::new(trace));
    }
    let answered = load.answering.begin(&tenant.gate).inspect_err(|_| entry.give_back())?;
    request.extensions_mut().insert(entry);
    request.extensions_mut().insert(Arc::new(answered));
    Ok(Some(tenant))
}

/// How long a body that nobody wants is let pass, so that its client gets to read the answer.
const DISCARDING: Duration = Duration::from_secs(5);

/// Lets a body pass whose request was told to come again. Nothing of it is kept.
async fn discard(request: &mut Request, limits: &Limits) {
    if request.headers().contains_key(header::EXPECT) {
        // Its client sends no body before it is asked to.
        return;
    }
    let body = std::mem::take(request.body_mut());
    let mut left = limits.body_bytes;
    let mut stream = pin!(body.into_data_stream());
    let passing = async {
        while let Some(Ok(chunk)) = poll_fn(|cx| stream.as_mut().poll_next(cx)).await {
            left = left.saturating_sub(chunk.len());
            if left == 0 {
                return;
            }
        }
    };
    let _ = tokio::time::timeout(DISCARDING, passing).await;
}

/// A generation, from its request's arrival until the engine is done with it.
pub(crate) struct Flight {
    _counted: Option<Counted>,
    /// Id of the HTTP request.
    pub request: String,
    /// Among its tenant's.
    pub entry: Arc<AdmittedRequest>,
}

impl Flight {
    pub fn new(load: &Load, request: &str, entry: Arc<AdmittedRequest>) -> Self {
        Self { _counted: Some(load.in_flight.enter()), ..Self::within(request, entry) }
    }

    /// Of a generation that is part of what somebody else counts.
    pub fn within(request: &str, entry: Arc<AdmittedRequest>) -> Self {
        Self { _counted: None, request: request.to_owned(), entry }
    }
}

/// A request on its way to becoming a job.
#[derive(Clone)]
pub struct Arrival {
    pub tenant: Tenant,
    pub id: String,
    pub body: Bytes,
    /// Of a request that came by itself.
    entry: Option<Arc<AdmittedRequest>>,
    /// What its body takes.
    _held: Option<Arc<HeldBytes>>,
    pub at: Instant,
    /// What the safety callout put in the place of its prompts.
    pub replaced: Vec<Option<Replacement>>,
    /// Bytes of what it names of what is kept here.
    pub named: Arc<KeptReads>,
}

/// What a request's preparation reads of what is kept here, in bytes: as much as its turn is for, and what it wants beyond.
#[derive(Debug, Default)]
pub(crate) struct KeptReads {
    may: usize,
    most: usize,
    reads: AtomicUsize,
    short: AtomicBool,
}

impl KeptReads {
    /// `most`: of any request.
    pub fn new(may: usize, most: usize) -> Self {
        Self { may, most, ..Self::default() }
    }

    /// So many bytes are about to be read. The error of what its turn is not for is told to nobody.
    pub fn read(&self, bytes: usize) -> Result<(), ApiError> {
        let reads = self.reads.fetch_add(bytes, Ordering::Relaxed).saturating_add(bytes);
        if work::is_quick() {
            work::give_up();
        } else if reads > self.may && self.may < self.most {
            self.short.store(true, Ordering::Relaxed);
        } else if reads <= self.may {
            return Ok(());
        }
        let message = format!(
            "What this request goes on from or refers to has more than {} bytes, which is all that one may.",
            self.most
        );
        Err(ApiError { code: Some("context_length_exceeded"), ..ApiError::bad_request(message) })
    }

    /// How much is wanted by what was not read for want of a longer turn.
    pub fn wants(&self) -> Option<usize> {
        self.short.load(Ordering::Relaxed).then(|| self.reads.load(Ordering::Relaxed))
    }
}

impl Arrival {
    pub fn new(request: JsonRequest) -> Self {
        let (held, entry) = (Some(Arc::new(request.held)), Some(request.entry));
        Self { _held: held, entry, ..Self::of_line(request.tenant, request.id, request.body) }
    }

    /// It was told to come again.
    pub fn give_back(&self) {
        self.entry.iter().for_each(|entry| entry.give_back());
    }

    /// A request that did not come by itself: a line of a batch.
    pub fn of_line(tenant: Tenant, id: String, body: Bytes) -> Self {
        Self {
            tenant,
            id,
            body,
            _held: None,
            at: Instant::now(),
            replaced: Vec::new(),
            named: Arc::default(),
            entry: None,
        }
    }
}

/// An authenticated request with a JSON body, read within the limits.
pub struct JsonRequest {
    pub tenant: Tenant,
    pub id: String,
    pub body: Bytes,
    pub(crate) held: HeldBytes,
    pub(crate) entry: Arc<AdmittedRequest>,
}

/// Who asks, where [`around`] found that out.
impl<S: Sync> FromRequestParts<S> for Tenant {
    type Rejection = Refusal;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Refusal> {
        let tenant = parts.extensions.get::<Tenant>().cloned();
        Ok(tenant.ok_or_else(|| ApiError::internal("the request was not authenticated"))?)
    }
}

/// What an address names.
pub struct Id(pub String);

impl<S: Send + Sync> FromRequestParts<S> for Id {
    type Rejection = Refusal;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Refusal> {
        let Path(id) = Path::<String>::from_request_parts(parts, state).await.map_err(|_| {
            ApiError::invalid("id", "Invalid 'id': what the address names is no text in UTF-8.")
        })?;
        Ok(Self(id))
    }
}

impl<S: Send + Sync> FromRequest<S> for JsonRequest
where
    Arc<Load>: FromRef<S>,
{
    type Rejection = Refusal;

    async fn from_request(request: Request, state: &S) -> Result<Self, Refusal> {
        let load = Arc::<Load>::from_ref(state);
        let (mut parts, body) = request.into_parts();
        let tenant = Tenant::from_request_parts(&mut parts, state).await?;
        let entry = parts.extensions.get::<Arc<AdmittedRequest>>().cloned();
        let entry = entry.ok_or_else(|| ApiError::internal("the request was not let in"))?;
        let id = parts.extensions.get::<RequestName>().map(|name| name.0.clone()).unwrap_or_default();
        check_content_type(&parts.headers, ollama::takes_forms(parts.uri.path(), &parts.headers))?;
        let limits = &load.limits;
        let mut held = load.unread.hold(&tenant.gate);
        let read = read_body(&parts.headers, body, limits.body_bytes, &mut held);
        let body = tokio::time::timeout(limits.body_timeout, read).await.map_err(|_| {
            let message =
                format!("The request body did not arrive within {} s.", limits.body_timeout.as_secs());
            ApiError::new(408, "invalid_request_error", message)
        })??;
        Ok(Self { tenant, id, body, held, entry })
    }
}
