//! The requests of `/api/embed` and the older `/api/embeddings`.

use super::models::adapter;
use super::options;
use crate::context::Context;
use crate::error::ApiError;
use crate::fields::{Fields, within};
use crate::hints::{Api, Hints};
use crate::openai::completions::{PromptInput, PromptInputs};
use crate::openai::embeddings::{EmbeddingsRequest, VectorForm, VectorShape, check_makes, inputs};
use crate::openapi::ollama::{EMBED, EMBEDDINGS};
use crate::params::{Generation, Sampling};

const INPUT: &str = "input";

/// Reads a request to `/api/embed`. `can`: why the model makes no vectors, if it makes none.
pub fn embed(body: &[u8], context: &Context, can: Result<(), &str>) -> Result<EmbeddingsRequest, ApiError> {
    let mut fields = Fields::of_body(body)?;
    let (generation, hints) = begin(&mut fields, context, can)?;
    let dimensions = fields.take("dimensions")?;
    let dimensions = within(&fields, "dimensions", dimensions, (1, context.model.hidden as usize))?;
    let cut = fields.take("truncate")?.unwrap_or(true);
    let given: PromptInputs = fields.require(INPUT)?;
    let notes = hints.close(fields, &EMBED)?;
    let inputs = inputs(given, INPUT, context)?;
    let form = VectorForm { shape: VectorShape::Rows, dimensions };
    Ok(EmbeddingsRequest { generation, param: INPUT, inputs, cut, form, notes })
}

/// Reads a request to `/api/embeddings`.
pub fn embeddings(
    body: &[u8],
    context: &Context,
    can: Result<(), &str>,
) -> Result<EmbeddingsRequest, ApiError> {
    let mut fields = Fields::of_body(body)?;
    let (generation, hints) = begin(&mut fields, context, can)?;
    let param = "prompt";
    let inputs = vec![PromptInput::Text(fields.require(param)?)];
    let notes = hints.close(fields, &EMBEDDINGS)?;
    let form = VectorForm { shape: VectorShape::Row, dimensions: None };
    Ok(EmbeddingsRequest { generation, param, inputs, cut: true, form, notes })
}

/// Takes what both have in common. Nothing is sampled, so options are read for their mistakes alone.
fn begin<'a>(
    fields: &mut Fields,
    context: &'a Context,
    can: Result<(), &str>,
) -> Result<(Generation, Hints<'a>), ApiError> {
    let adapter = adapter(fields, context)?;
    check_makes(can)?;
    let mut hints = Hints::new(&context.hints, Api::Ollama);
    options::read(fields, context, &mut hints)?;
    Ok((Generation { adapter, ..Generation::new(Sampling::greedy()) }, hints))
}
