//! Names of models, and requests about models: show, pull.
//!
//! Ollama's names end with a tag, and one without is `:latest`.

use crate::context::{Context, Model};
use crate::error::ApiError;
use crate::fields::Fields;
use crate::refused;

const LATEST: &str = ":latest";

/// A name as Ollama lists it: with its tag.
pub fn tagged(name: &str) -> String {
    let last = name.rsplit('/').next().unwrap_or(name);
    if last.contains(':') { name.to_owned() } else { format!("{name}{LATEST}") }
}

/// Whether a request for a model of this name is for the served one.
pub fn is_named(model: &Model, asked: &str) -> bool {
    model.answers_to(asked) || asked.strip_suffix(LATEST).is_some_and(|name| model.answers_to(name))
}

/// Takes `model`: as [`Context::adapter`], by Ollama's names.
pub fn adapter(fields: &mut Fields, context: &Context) -> Result<Option<String>, ApiError> {
    match fields.take::<String>("model")? {
        Some(name) if context.model.has_adapters && !name.is_empty() && !is_named(&context.model, &name) => {
            Ok(Some(name.strip_suffix(LATEST).map(str::to_owned).unwrap_or(name)))
        }
        Some(name) => check(&name, context).map(|()| None),
        None => Ok(None),
    }
}

fn check(name: &str, context: &Context) -> Result<(), ApiError> {
    let Context { model, .. } = context;
    if name.is_empty() || is_named(model, name) {
        return Ok(());
    }
    Err(ApiError::model_not_found(name, model.name()))
}

/// Takes `model`, or what older clients call it.
fn named(fields: &mut Fields) -> Result<Option<String>, ApiError> {
    let (new, old) = (fields.take::<String>("model")?, fields.take::<String>("name")?);
    Ok(new.filter(|name| !name.is_empty()).or(old))
}

/// Reads a request to show a model. What `verbose` asks for beyond is not there.
pub fn shown(body: &[u8], context: &Context) -> Result<(), ApiError> {
    let mut fields = Fields::of_body(body)?;
    let name = named(&mut fields)?;
    fields.take::<bool>("verbose")?;
    fields.finish(refused::OLLAMA_SHOW)?;
    name.map_or(Ok(()), |name| check(&name, context))
}

/// Reads a request to download a model: whether the answer is streamed. Only what is served is here already.
pub fn pulled(body: &[u8], context: &Context) -> Result<bool, ApiError> {
    let mut fields = Fields::of_body(body)?;
    let name = named(&mut fields)?;
    // Nothing is fetched, by whatever way.
    fields.take::<bool>("insecure")?;
    let stream = fields.take("stream")?.unwrap_or(true);
    fields.finish(&[])?;
    let Some(name) = name else { return Ok(stream) };
    check(&name, context).map(|()| stream).map_err(|error| {
        let message = format!(
            "{} A running server downloads nothing: run `folio pull` and `folio serve` on its machine, with the model's name on the hub.",
            error.message
        );
        ApiError { message, ..error }
    })
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    #[test]
    fn a_name_without_a_tag_is_the_latest() {
        let model = Model {
            names: vec!["org/m".into(), "q:4b".into(), "gpt-*".into()],
            vocab_size: 1,
            eos_token_ids: Arc::new([]),
            hidden: 1,
            defaults: Default::default(),
            has_adapters: false,
        };
        for (name, listed) in
            [("m", "m:latest"), ("q:4b", "q:4b"), ("h:80/m", "h:80/m:latest"), ("o/m:Q4", "o/m:Q4")]
        {
            assert_eq!(tagged(name), listed);
        }
        for name in ["org/m", "org/m:latest", "q:4b", "gpt-5", "gpt-5:latest"] {
            assert!(is_named(&model, name), "{name}");
        }
        for name in ["org/m:4b", "m", "q", "q:latest", "org/m:latest:latest"] {
            assert!(!is_named(&model, name), "{name}");
        }
    }
}
