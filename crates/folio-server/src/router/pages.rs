//! What is told of all models at once: which there are, which are loaded, how they do.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::PathBuf;

use axum::body::{Body, Bytes};
use axum::extract::{Request, State};
use axum::http::{HeaderValue, Response, header};
use axum::response::IntoResponse;
use folio_api::openapi::tables::ROUTES;
use folio_api::{ApiError, ollama, unix_s};
use folio_text::rfc_3339;
use serde_json::value::RawValue;
use serde_json::{Value, json};
use tokio::task::JoinSet;

use crate::adapters::AllowedAdapters;
use crate::arrival::{Id, JsonRequest};
use crate::endpoints::anthropic;
use crate::http::anthropic::is_meant;
use crate::http::reply::{Reply, json_response};
use crate::serve::admin_socket;
use crate::tenancy::tenant::Tenant;

use super::asking::{Head, asked, by_query, first_known};
use super::engines::Held;
use super::figures::{merged, own};
use super::processes::ProcessState;
use super::proxy::Passing;
use super::state::RouterState;

/// When a model goes that time does not unload.
const NEVER: &str = "9999-12-31T23:59:59Z";

/// OpenAI's list or, for clients that say a version of Anthropic's API, Anthropic's. Whether a model is loaded makes no difference.
pub(super) async fn models(State(state): State<RouterState>, tenant: Tenant, request: Request) -> Reply {
    if is_meant(&request) {
        let names: Vec<&str> =
            state.catalog.listed().filter(|(.., adapter)| !adapter).map(|(name, ..)| name).collect();
        let context = |name: &str| {
            let model = state.catalog.find(name, false, &AllowedAdapters::All);
            model.map_or(1, |model| state.catalog.models[model].context_length)
        };
        let described = |name: &str| anthropic::described(name, state.created_s, context(name));
        let page = anthropic::page(&names, request.uri().query().unwrap_or_default(), described)?;
        return Ok(json_response(page.to_string()));
    }
    let list: Vec<Value> = state
        .catalog
        .listed()
        .filter(|(name, _, adapter)| !adapter || tenant.adapters.has(name))
        .map(|(name, model, adapter)| described(&state, name, model, adapter))
        .collect();
    Ok(json_response(json!({"object": "list", "data": list}).to_string()))
}

pub(super) async fn model(
    State(state): State<RouterState>,
    tenant: Tenant,
    Id(name): Id,
    request: Request,
) -> Reply {
    let model = state.catalog.find(&name, false, &tenant.adapters)?;
    let adapter = state.catalog.is_adapter(model, &name);
    let text = match is_meant(&request) {
        true => anthropic::described(&name, state.created_s, state.catalog.models[model].context_length),
        false => described(&state, &name, model, adapter),
    };
    Ok(json_response(text.to_string()))
}

fn described(state: &RouterState, name: &str, model: usize, adapter: bool) -> Value {
    let root = state.catalog.name(model);
    json!({
        "id": name, "object": "model", "created": state.created_s, "owned_by": "folio",
        "root": if adapter { name } else { root }, "parent": adapter.then_some(root),
        "max_model_len": state.catalog.models[model].context_length,
    })
}

/// `GET /api/tags`: all models.
pub(super) async fn tags(State(state): State<RouterState>) -> Response<Body> {
    let modified_at = rfc_3339(state.created_s as i64);
    let models = state.catalog.listed().filter(|(.., adapter)| !adapter).map(|(name, model, _)| {
        let mut listed = listed(&state, name, model);
        listed["modified_at"] = modified_at.as_str().into();
        listed
    });
    json_response(json!({"models": models.collect::<Vec<_>>()}).to_string())
}

/// `GET /api/ps`: those that are loaded, by the name that answers have.
pub(super) async fn ps(State(state): State<RouterState>) -> Response<Body> {
    let (now, now_s) = (state.engines.now(), unix_s());
    let models = (0..state.catalog.models.len()).filter_map(|model| {
        let (told, _) = state.engines.told(model);
        if told.state != ProcessState::Ready {
            return None;
        }
        // Of one that is asked something, its time begins when that is over.
        let expires = match (told.busy, told.expires) {
            (0, expires) => expires,
            (_, _) => state.catalog.models[model].keep_alive.map(|time| now.saturating_add(time)),
        };
        let expires = expires.map(|at| rfc_3339((now_s + at.saturating_sub(now).as_secs()) as i64));
        let mut listed = listed(&state, state.catalog.name(model), model);
        let facts = &state.catalog.models[model];
        listed["size"] = facts.need_bytes.into();
        listed["expires_at"] = expires.as_deref().unwrap_or(NEVER).into();
        listed["size_vram"] = if facts.on_gpu { facts.need_bytes } else { 0 }.into();
        listed["context_length"] = facts.context_length.into();
        Some(listed)
    });
    json_response(json!({"models": models.collect::<Vec<_>>()}).to_string())
}

fn listed(state: &RouterState, name: &str, model: usize) -> Value {
    let facts = &state.catalog.models[model];
    let name = ollama::tagged(name);
    json!({
        "name": name, "model": name, "size": facts.weight_bytes, "digest": facts.digest,
        "details": crate::endpoints::ollama::details(&facts.family, facts.parameters, &facts.format),
    })
}

/// `POST /api/pull`: what there is is here.
pub(super) async fn pull(State(state): State<RouterState>, head: Head, request: JsonRequest) -> Reply {
    let asked = asked(&state, head.uri.path(), &request).await?;
    state.catalog.find(&asked.model, true, &request.tenant.adapters)?;
    let success = json!({"status": "success"});
    if asked.whole {
        return Ok(json_response(success.to_string()));
    }
    let mut response =
        Response::new(Body::from(format!("{}\n{success}\n", json!({"status": "pulling manifest"}))));
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/x-ndjson"));
    Ok(response)
}

/// Whether requests should be sent here: not while it drains, nor where a process that is ready does not get on.
pub(super) async fn health(State(state): State<RouterState>, head: Head) -> Reply {
    if state.load.is_draining() {
        return Err(ApiError::unavailable("This server is shutting down.", 5).into());
    }
    let pages = of_each(&state, |process| (head.page("/health"), process.socket())).await;
    let sick = pages.iter().find(|(_, page)| page.as_ref().is_none_or(|(status, _)| *status != 200));
    if let Some((model, page)) = sick {
        let said = page.as_ref().and_then(|(_, body)| serde_json::from_slice::<Value>(body).ok());
        let said = said.as_ref().and_then(|body| body["error"]["message"].as_str());
        let said = said.unwrap_or("its process does not answer");
        return Err(ApiError::unavailable(format!("{}: {said}", state.catalog.name(*model)), 30).into());
    }
    let models: serde_json::Map<String, Value> = (0..state.catalog.models.len())
        .map(|model| {
            let state_of = match state.engines.told(model).0.state {
                ProcessState::Stopped => "stopped",
                ProcessState::Starting => "starting",
                ProcessState::Ready => "ready",
                ProcessState::Stopping => "stopping",
            };
            (state.catalog.name(model).to_owned(), state_of.into())
        })
        .collect();
    Ok(json_response(json!({"status": "ok", "models": models}).to_string()))
}

/// On the serving port: what each process tells who asks there.
pub(super) async fn metrics(State(state): State<RouterState>, head: Head) -> Response<Body> {
    figures(&state, |process| (head.page("/metrics").plain(), process.socket())).await
}

/// On the second listener: with the names of tenants, where that was asked for.
pub(super) async fn all_metrics(State(state): State<RouterState>, head: Head) -> Response<Body> {
    figures(&state, |process| (head.page("/metrics").plain(), admin_socket(&process.socket()))).await
}

async fn figures(state: &RouterState, ask: impl Fn(&Held) -> (Passing, PathBuf)) -> Response<Body> {
    let pages = of_each(state, ask).await;
    let pages = pages.iter().filter_map(|(_, page)| page.as_ref().filter(|(status, _)| *status == 200));
    let (own, front) = (own(&state.engines), state.figures.render().unwrap_or_default());
    let pages = pages.filter_map(|(_, page)| std::str::from_utf8(page).ok());
    let text = merged(pages.chain([&*own, &*front]));
    ([(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], text).into_response()
}

/// `GET /v1/why`: of each model that is loaded, by its name; of one with `?model=NAME`; or of one request, whoever answered it.
pub(super) async fn why(State(state): State<RouterState>, tenant: Tenant, head: Head) -> Reply {
    let query = head.uri.query().unwrap_or_default().to_owned();
    let asks = |what: &str| form_urlencoded::parse(query.as_bytes()).any(|(name, _)| name == what);
    if asks("model") {
        return by_query(State(state), tenant, head).await;
    }
    if asks("request") {
        return first_known(&state, head.passing(Bytes::new())).await;
    }
    if !query.is_empty() {
        return Err(ApiError::invalid("request", "The parameters are 'model' and 'request'.").into());
    }
    let pages = of_each(&state, |process| (head.page("/v1/why"), process.socket())).await;
    let reports: BTreeMap<&str, &RawValue> = pages
        .iter()
        .filter_map(|(model, page)| {
            let (_, body) = page.as_ref().filter(|(status, _)| *status == 200)?;
            Some((state.catalog.name(*model), serde_json::from_slice(body).ok()?))
        })
        .collect();
    let report = serde_json::to_string(&BTreeMap::from([("models", reports)]));
    Ok(json_response(report.map_err(|error| ApiError::internal(error.to_string()))?))
}

/// A page of every process that is ready, all at once.
async fn of_each(
    state: &RouterState,
    ask: impl Fn(&Held) -> (Passing, PathBuf),
) -> Vec<(usize, Option<(u16, Bytes)>)> {
    let mut asked = JoinSet::new();
    for process in state.engines.look_at_all() {
        let (model, (passing, socket)) = (process.model(), ask(&process));
        asked.spawn(async move { (model, passing.page(process, socket).await) });
    }
    let mut pages = asked.join_all().await;
    pages.sort_by_key(|(model, _)| *model);
    pages
}

pub(super) async fn version(State(state): State<RouterState>) -> Response<Body> {
    json_response(json!({"version": state.version}).to_string())
}

/// What this is and how to use it, for a person with a browser or a terminal.
pub(super) async fn index(State(state): State<RouterState>) -> Response<Body> {
    let mut text = format!(
        "Folio {} serves these models over OpenAI's, Anthropic's and Ollama's APIs, each loaded when it is asked for:\n\n",
        state.version
    );
    // Nobody is asked for a key here.
    let restricted = state.tenants.restricts_adapters();
    for (name, model, _) in state.catalog.listed().filter(|(.., adapter)| !(*adapter && restricted)) {
        let context = state.catalog.models[model].context_length;
        let _ = writeln!(text, "  {name} (context {context} tokens)");
    }
    let routes = ROUTES.iter().map(|route| format!("{} {}", route.method.to_uppercase(), route.path));
    let _ = writeln!(text, "\nRoutes: {}", routes.collect::<Vec<_>>().join(", "));
    text.into_response()
}
