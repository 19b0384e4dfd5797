//! Whose process a request is passed on to: the one of the model that its body or its query names, or whichever knows an id.

use std::convert::Infallible;
use std::path::PathBuf;
use std::time::Duration;

use axum::body::Bytes;
use axum::extract::{FromRequestParts, Request, State};
use axum::http::request::Parts;
use axum::http::{HeaderMap, HeaderValue, Method, StatusCode, Uri};
use folio_api::{ApiError, unix_s};
use folio_text::rfc_3339;
use serde_json::json;

use crate::adapters::AllowedAdapters;
use crate::arrival::{JsonRequest, RequestName};
use crate::http::reply::{Reply, json_response};
use crate::http::{Peer, read_body};
use crate::serve::admin_socket;
use crate::tenancy::tenant::Tenant;

use super::asked::Asked;
use super::engines::Held;
use super::proxy::{Passing, gone};
use super::state::RouterState;

/// A body that is read where it arrives; a longer one is read by the text threads.
const READ_AT_ONCE: usize = 64 << 10;
const REQUEST_ID: &str = "x-request-id";

/// A request's head, as far as it is passed on.
pub(super) struct Head {
    method: Method,
    pub uri: Uri,
    headers: HeaderMap,
    peer: Option<HeaderValue>,
}

impl<S: Sync> FromRequestParts<S> for Head {
    type Rejection = Infallible;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Self::Rejection> {
        let mut headers = parts.headers.clone();
        let id = parts.extensions.get::<RequestName>().map(|name| HeaderValue::from_str(&name.0));
        if let Some(Ok(id)) = id {
            headers.insert(REQUEST_ID, id);
        }
        let peer = parts.extensions.get::<Peer>().map(|peer| HeaderValue::from_str(&peer.0.to_string()));
        Ok(Self {
            method: parts.method.clone(),
            uri: parts.uri.clone(),
            headers,
            peer: peer.and_then(Result::ok),
        })
    }
}

impl Head {
    pub fn passing(self, body: Bytes) -> Passing {
        Passing::new(self.method, &self.uri, self.headers, self.peer, body)
    }

    /// A look at another page of a process, on behalf of the same.
    pub fn page(&self, path: &'static str) -> Passing {
        let headers = self.headers.clone();
        Passing::new(Method::GET, &Uri::from_static(path), headers, self.peer.clone(), Bytes::new())
    }
}

/// What the body asks for. A long one is read off the event loop.
pub(super) async fn asked(state: &RouterState, path: &str, request: &JsonRequest) -> Result<Asked, ApiError> {
    let JsonRequest { tenant, body, .. } = request;
    if body.len() <= READ_AT_ONCE {
        return Asked::read(path, body);
    }
    let (path, body) = (path.to_owned(), body.clone());
    state.load.off_thread(tenant.id, body.len(), move || Asked::read(&path, &body)).await
}

pub(super) async fn by_body(State(state): State<RouterState>, head: Head, request: JsonRequest) -> Reply {
    let counted = state.load.in_flight.enter();
    let path = head.uri.path().to_owned();
    let asked = asked(&state, &path, &request).await?;
    let JsonRequest { tenant, body, held: counted_bytes, .. } = request;
    let model = state.catalog.find(&asked.model, path.starts_with("/api/"), &tenant.adapters)?;
    let keep_alive = asked.keep_alive.filter(|_| state.keep_alive);
    if asked.nothing && keep_alive == Some(Some(Duration::ZERO)) {
        state.engines.unload(model);
        return unloaded(&path, &asked.model);
    }
    let mut process = state.engines.enter(model, tenant.id).await?;
    process.stays(keep_alive);
    let socket = process.socket();
    let answer = head.passing(body).to(socket, (process, counted)).await;
    drop(counted_bytes);
    answer.map_err(|error| lost(&state, model, &error).into())
}

/// Asked of each process that is ready, until one knows the id.
pub(super) async fn by_id(
    State(state): State<RouterState>,
    tenant: Tenant,
    head: Head,
    request: Request,
) -> Reply {
    let (parts, body) = request.into_parts();
    let mut held = state.load.unread.hold(&tenant.gate);
    let limits = &state.load.limits;
    let read = read_body(&parts.headers, body, limits.body_bytes, &mut held);
    let body = tokio::time::timeout(limits.body_timeout, read).await.map_err(|_| {
        ApiError::new(408, "invalid_request_error", "The request body did not arrive in time.")
    })??;
    first_known(&state, head.passing(body)).await
}

/// The answer of the first process that has what is asked for.
pub(super) async fn first_known(state: &RouterState, passing: Passing) -> Reply {
    for process in state.engines.look_at_all() {
        let (model, socket) = (process.model(), process.socket());
        match passing.clone().to(socket, process).await {
            Ok(answer) if answer.status() == StatusCode::NOT_FOUND => {}
            Ok(answer) => return Ok(answer),
            Err(error) => drop(lost(state, model, &error)),
        }
    }
    let message =
        "No model that is loaded has anything of this id. What a model keeps is gone when it is unloaded.";
    Err(ApiError::not_found(message).into())
}

/// The process that a query names, if it is ready, and the request without that parameter.
fn named_in_query(
    state: &RouterState,
    allowed: &AllowedAdapters,
    mut head: Head,
) -> Result<(Held, Head), ApiError> {
    let query = head.uri.query().unwrap_or_default();
    let (mut model, mut rest) = (None, form_urlencoded::Serializer::new(String::new()));
    for (name, value) in form_urlencoded::parse(query.as_bytes()) {
        match &*name {
            "model" => model = Some(value.into_owned()),
            _ => drop(rest.append_pair(&name, &value)),
        }
    }
    let Some(model) = model else {
        let message =
            "Every model has its own of these: say which with '?model=NAME'; GET /v1/models lists them.";
        return Err(ApiError::invalid("model", message));
    };
    let model = state.catalog.find(&model, false, allowed)?;
    let rest = rest.finish();
    let path = head.uri.path();
    let target = if rest.is_empty() { path.to_owned() } else { format!("{path}?{rest}") };
    head.uri = target.parse().map_err(|_| ApiError::bad_request("The query cannot be read."))?;
    let process = state.engines.look(model).ok_or_else(|| {
        let message =
            format!("The model '{}' is not loaded, and only its process knows.", state.catalog.name(model));
        ApiError { code: Some("model_not_loaded"), ..ApiError::not_found(message) }
    });
    Ok((process?, head))
}

pub(super) async fn by_query(State(state): State<RouterState>, tenant: Tenant, head: Head) -> Reply {
    let (process, head) = named_in_query(&state, &tenant.adapters, head)?;
    let (model, socket) = (process.model(), process.socket());
    let answer = head.passing(Bytes::new()).to(socket, process).await;
    answer.map_err(|error| lost(&state, model, &error).into())
}

/// An answer that takes long, ends with its process, and does not keep it: else a page that is left open would keep its model loaded.
pub(super) async fn watched_by_query(State(state): State<RouterState>, tenant: Tenant, head: Head) -> Reply {
    let (process, head) = named_in_query(&state, &tenant.adapters, head)?;
    watch(&state, process.model(), process.socket(), head).await
}

pub(super) async fn admin_watched_by_query(State(state): State<RouterState>, head: Head) -> Reply {
    let (process, head) = named_in_query(&state, &AllowedAdapters::All, head)?;
    watch(&state, process.model(), admin_socket(&process.socket()), head).await
}

async fn watch(state: &RouterState, model: usize, socket: PathBuf, head: Head) -> Reply {
    head.passing(Bytes::new()).to(socket, ()).await.map_err(|error| lost(state, model, &error).into())
}

pub(super) async fn admin_by_query(State(state): State<RouterState>, head: Head) -> Reply {
    let (process, head) = named_in_query(&state, &AllowedAdapters::All, head)?;
    let (model, socket) = (process.model(), admin_socket(&process.socket()));
    let answer = head.passing(Bytes::new()).to(socket, process).await;
    answer.map_err(|error| lost(&state, model, &error).into())
}

fn lost(state: &RouterState, model: usize, error: &str) -> ApiError {
    let name = state.catalog.name(model);
    tracing::warn!(model = %name, %error, "its process did not answer");
    gone(name)
}

/// What Ollama answers to a request that unloads a model.
fn unloaded(path: &str, model: &str) -> Reply {
    let mut answer = json!({
        "model": model, "created_at": rfc_3339(unix_s() as i64), "done": true, "done_reason": "unload",
    });
    match path {
        "/api/chat" => answer["message"] = json!({"role": "assistant", "content": ""}),
        _ => answer["response"] = "".into(),
    }
    Ok(json_response(answer.to_string()))
}
