//! `POST /v1/load_lora_adapter` and `/v1/unload_lora_adapter`, as vLLM has them.

use axum::body::{Body, Bytes};
use axum::extract::State;
use axum::http::{Response, header};
use axum::response::IntoResponse;
use folio_api::ApiError;
use folio_api::fields::Fields;

use crate::adapters::AdapterProblem;
use crate::engine::Served;
use crate::http::Shared;
use crate::http::reply::Refusal;

/// Both read small bodies.
const BODY_MAX: usize = 1 << 16;

fn fields(body: &[u8]) -> Result<Fields<'_>, ApiError> {
    if body.len() > BODY_MAX {
        return Err(ApiError::bad_request(format!("The body has {} bytes, at most {BODY_MAX}.", body.len())));
    }
    Fields::of_body(body)
}

fn answer(done: Result<String, ApiError>) -> Response<Body> {
    match done {
        Ok(text) => ([(header::CONTENT_TYPE, "text/plain; charset=utf-8")], text).into_response(),
        Err(error) => Refusal(error).into_response(),
    }
}

fn problem(problem: AdapterProblem, param: &str) -> ApiError {
    match problem {
        AdapterProblem::Invalid(message) => ApiError::invalid(param, message),
        AdapterProblem::NotFound(message) => ApiError::not_found(message),
        AdapterProblem::Busy => ApiError::busy("Other adapters are being loaded.", 5),
    }
}

pub(crate) async fn load(State(served): Shared<Served>, body: Bytes) -> Response<Body> {
    let load = async || {
        let mut fields = fields(&body)?;
        let (name, path) = (fields.take::<String>("lora_name")?, fields.take::<String>("lora_path")?);
        let replace = fields.take("load_inplace")?.unwrap_or(false);
        fields.finish(&[])?;
        let (Some(name), Some(path)) = (name, path) else {
            let message = "Both 'lora_name' and 'lora_path' must be provided.";
            return Err(ApiError::bad_request(message));
        };
        let is_taken = served.context.model.answers_to(&name);
        let done = served.adapters.load(&name, &path, replace, is_taken).await;
        done.map_err(|found| problem(found, "lora_path"))?;
        Ok(format!("Success: LoRA adapter '{name}' added successfully."))
    };
    answer(load().await)
}

pub(crate) async fn unload(State(served): Shared<Served>, body: Bytes) -> Response<Body> {
    let unload = || {
        let mut fields = fields(&body)?;
        let name = fields.take::<String>("lora_name")?;
        // vLLM's number for it, which says nothing here.
        fields.take::<u64>("lora_int_id")?;
        fields.finish(&[])?;
        let Some(name) = name else {
            let message = "'lora_name' needs to be provided to unload a LoRA adapter.";
            return Err(ApiError::bad_request(message));
        };
        served.adapters.unload(&name).map_err(|found| problem(found, "lora_name"))?;
        Ok(format!("Success: LoRA adapter '{name}' removed successfully."))
    };
    answer(unload())
}
