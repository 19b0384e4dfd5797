//! `GET /v1/models` and `/v1/models/{name}` for clients of Anthropic's API.

use folio_text::rfc_3339;
use serde_json::{Value, json};

use crate::engine::Served;
use folio_api::ApiError;

const LIMIT: usize = 20;
const LIMIT_MAX: usize = 1000;

/// One page of the served model's names.
pub fn models(served: &Served, query: &str) -> Result<Value, ApiError> {
    let names: Vec<&str> = served.context.model.listed().map(String::as_str).collect();
    page(&names, query, |name| model(served, name))
}

/// One page of models, by the query's `limit`, `after_id` and `before_id`.
pub fn page(names: &[&str], query: &str, model: impl Fn(&str) -> Value) -> Result<Value, ApiError> {
    let (mut from, mut to, mut limit) = (0, names.len(), LIMIT);
    for (name, value) in form_urlencoded::parse(query.as_bytes()) {
        let name = &*name;
        let index = || {
            let found = names.iter().position(|model| *model == value);
            found.ok_or_else(|| {
                ApiError::invalid(name, format!("Invalid '{name}': there is no model '{value}'."))
            })
        };
        match name {
            "after_id" => from = index()? + 1,
            "before_id" => to = index()?,
            "limit" => {
                limit =
                    value.parse().ok().filter(|limit| (1..=LIMIT_MAX).contains(limit)).ok_or_else(|| {
                        ApiError::invalid(
                            name,
                            format!("Invalid 'limit': use a number from 1 to {LIMIT_MAX}."),
                        )
                    })?;
            }
            // What opens Anthropic's previews; there are none here.
            "beta" => {}
            other => return Err(ApiError::unsupported(other, "only limit, after_id and before_id")),
        }
    }
    let list = names.get(from..to).unwrap_or_default();
    let page: Vec<Value> = list.iter().take(limit).map(|name| model(name)).collect();
    let id = |model: Option<&Value>| model.map(|model| model["id"].clone());
    Ok(json!({
        "first_id": id(page.first()), "last_id": id(page.last()), "has_more": list.len() > page.len(), "data": page,
    }))
}

pub fn model(served: &Served, name: &str) -> Value {
    described(name, served.model.created_s, served.model.context_length)
}

/// A model of this context, in Anthropic's shape.
pub fn described(name: &str, created_s: u64, context_length: u32) -> Value {
    json!({
        "type": "model", "id": name, "display_name": name, "created_at": rfc_3339(created_s as i64),
        "lifecycle": "active", "max_input_tokens": context_length - 1, "max_tokens": context_length - 1,
    })
}
