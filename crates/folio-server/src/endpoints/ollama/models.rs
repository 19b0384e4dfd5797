//! What Ollama's clients ask about models: `/api/tags`, `/api/ps`, `/api/show`, `/api/version`, and `/api/pull` and `/api/delete`, which change
//! nothing here.

use axum::body::Body;
use axum::extract::State;
use axum::http::{HeaderValue, Response, header};
use folio_api::{ApiError, SamplingDefaults, ollama};
use folio_text::rfc_3339;
use serde_json::{Map, Value, json};

use crate::arrival::JsonRequest;
use crate::engine::{Served, WeightFacts};
use crate::http::Shared;
use crate::http::reply::{Refusal, Reply, json_response};
use crate::load::Load;

/// When the served model is unloaded: with the process.
const NEVER: &str = "9999-12-31T23:59:59Z";

/// `GET /api/tags`.
pub async fn tags(State(served): Shared<Served>) -> Response<Body> {
    let modified_at = rfc_3339(served.model.created_s as i64);
    listed(&served, |model| drop(model.insert("modified_at".into(), modified_at.as_str().into())))
}

/// `GET /api/ps`.
pub async fn ps(State(served): Shared<Served>) -> Response<Body> {
    let WeightFacts { bytes, on_gpu, .. } = served.model.weights;
    listed(&served, |model| {
        model.insert("expires_at".into(), NEVER.into());
        model.insert("size_vram".into(), if on_gpu { bytes } else { 0 }.into());
        model.insert("context_length".into(), served.model.context_length.into());
    })
}

fn listed(served: &Served, more: impl Fn(&mut Map<String, Value>)) -> Response<Body> {
    let digest = hex::encode(served.model.model_digest);
    let describe = |name: &String| {
        let name = ollama::tagged(name);
        let mut model = Map::from_iter([
            ("name".to_owned(), name.as_str().into()),
            ("model".to_owned(), name.into()),
            ("size".to_owned(), served.model.weights.bytes.into()),
            ("digest".to_owned(), digest.as_str().into()),
            ("details".to_owned(), details_of(served)),
        ]);
        more(&mut model);
        Value::Object(model)
    };
    let models: Vec<Value> = served.context.model.listed().map(describe).collect();
    json_response(json!({"models": models}).to_string())
}

fn details_of(served: &Served) -> Value {
    let WeightFacts { family, parameters, format, .. } = &served.model.weights;
    details(family, *parameters, format)
}

/// `format`: what the weights are stored as.
pub(crate) fn details(family: &str, parameters: u64, format: &str) -> Value {
    json!({
        "parent_model": "", "format": "", "family": family, "families": [family],
        "parameter_size": count(parameters), "quantization_level": format,
    })
}

/// As Ollama writes it: "1.5B".
fn count(parameters: u64) -> String {
    let parameters = parameters as f64;
    match parameters {
        1e9.. => format!("{:.1}B", parameters / 1e9),
        1e6.. => format!("{:.2}M", parameters / 1e6),
        _ => format!("{:.2}K", parameters / 1e3),
    }
}

/// `POST /api/show`.
pub async fn show(State(served): Shared<Served>, State(load): Shared<Load>, request: JsonRequest) -> Reply {
    let JsonRequest { tenant, body, held: _held, .. } = request;
    let bytes = body.len();
    let read = move || {
        ollama::shown(&body, &served.context)?;
        Ok(shown(&served).to_string())
    };
    Ok(json_response(load.off_thread(tenant.id, bytes, read).await?))
}

fn shown(served: &Served) -> Value {
    let facts = &served.model;
    let WeightFacts { family, parameters, .. } = &facts.weights;
    let template = served.template.as_deref().and_then(|template| template.sources().next());
    json!({
        "modelfile": format!("# Served by Folio.\nFROM {}\n", served.name()),
        "parameters": parameters_text(&facts.defaults),
        "template": template.unwrap_or_default(),
        "details": details_of(served),
        "model_info": {
            "general.architecture": family,
            "general.basename": served.name(),
            "general.parameter_count": parameters,
            (format!("{family}.context_length")): facts.context_length,
            (format!("{family}.embedding_length")): facts.hidden,
            (format!("{family}.vocab_size")): facts.vocab_size,
        },
        "capabilities": capabilities(served),
        "modified_at": rfc_3339(facts.created_s as i64),
    })
}

/// The model's own defaults, as lines of a model file.
fn parameters_text(defaults: &SamplingDefaults) -> String {
    let SamplingDefaults { temperature, top_k, top_p, min_p, repetition_penalty, max_tokens } = defaults;
    let text = |value: &Option<f32>| value.map(|value| value.to_string());
    let count = |value: &Option<u32>| value.map(|value| value.to_string());
    let named = [
        ("temperature", text(temperature)),
        ("top_k", count(top_k)),
        ("top_p", text(top_p)),
        ("min_p", text(min_p)),
        ("repeat_penalty", text(repetition_penalty)),
        ("num_predict", count(max_tokens)),
    ];
    let lines = named.into_iter().filter_map(|(name, value)| Some(format!("{name:<30} {}", value?)));
    lines.collect::<Vec<_>>().join("\n")
}

/// In Ollama's words.
fn capabilities(served: &Served) -> Vec<&'static str> {
    let can = &served.context.capabilities;
    let tools = can.parsers.tools.is_some() && can.template.is_some_and(|template| template.takes_tools);
    [
        ("completion", !served.model.only_embeds),
        ("tools", tools),
        ("thinking", can.reasons()),
        ("embedding", served.model.pooling.is_ok()),
    ]
    .into_iter()
    .filter_map(|(name, has)| has.then_some(name))
    .collect()
}

/// `GET /api/version`.
pub async fn version() -> Response<Body> {
    json_response(json!({"version": ollama::VERSION}).to_string())
}

/// `POST /api/pull`: what is served is here.
pub async fn pull(State(served): Shared<Served>, State(load): Shared<Load>, request: JsonRequest) -> Reply {
    let JsonRequest { tenant, body, held: _held, .. } = request;
    let bytes = body.len();
    let read = move || ollama::pulled(&body, &served.context);
    let success = json!({"status": "success"});
    if !load.off_thread(tenant.id, bytes, read).await? {
        return Ok(json_response(success.to_string()));
    }
    let mut response =
        Response::new(Body::from(format!("{}\n{success}\n", json!({"status": "pulling manifest"}))));
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/x-ndjson"));
    Ok(response)
}

/// `DELETE /api/delete`: not while the model is served, and not by way of the network.
pub async fn delete() -> Refusal {
    let message = "A running server deletes no model: run `folio rm` on its machine, with the model's name.";
    Refusal(ApiError { code: Some("unsupported_operation"), ..ApiError::bad_request(message) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameters_are_counted_as_ollama_does() {
        for (parameters, told) in [(7_615_616_512, "7.6B"), (494_032_768, "494.03M"), (12_300, "12.30K")] {
            assert_eq!(count(parameters), told);
        }
    }
}
