//! The request of `POST /v1/embeddings`.

use crate::context::Context;
use crate::error::ApiError;
use crate::fields::{Fields, within};
use crate::hints::{Api, Hints, Notes};
use crate::labels;
use crate::openai::completions::{PromptInput, PromptInputs};
use crate::openapi::tables::EMBEDDING;
use crate::params::Generation;

const INPUT: &str = "input";

/// Texts or token ids, and what their vectors are to be like.
pub struct EmbeddingsRequest {
    pub generation: Generation,
    /// The field of the inputs.
    pub param: &'static str,
    pub inputs: Vec<PromptInput>,
    /// What is longer than the context loses its end.
    pub cut: bool,
    pub form: VectorForm,
    pub notes: Notes,
}

/// How vectors are written.
#[derive(Clone, Copy)]
pub struct VectorForm {
    pub shape: VectorShape,
    pub dimensions: Option<usize>,
}

/// Whose answer it is.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum VectorShape {
    /// OpenAI's objects.
    Objects { base64: bool },
    /// A list of lists, Ollama's.
    Rows,
    /// The only list, of Ollama's older API.
    Row,
}

/// `can`: why the model makes no vectors, if it makes none.
pub fn check_makes(can: Result<(), &str>) -> Result<(), ApiError> {
    can.map_err(|why| ApiError {
        code: Some("no_embeddings"),
        ..ApiError::bad_request(format!("This model makes no embeddings: {why}."))
    })
}

/// The inputs, which the field `param` has.
pub fn inputs(given: PromptInputs, param: &str, context: &Context) -> Result<Vec<PromptInput>, ApiError> {
    let inputs = given.into_list(context.limits.embedding_inputs, param)?;
    let ids =
        inputs.iter().filter_map(|input| if let PromptInput::Tokens(ids) = input { Some(ids) } else { None });
    for ids in ids {
        context.model.check_token_ids(ids, param)?;
    }
    Ok(inputs)
}

/// Reads a request. `can`: why the model makes no vectors, if it makes none.
pub fn read(body: &[u8], context: &Context, can: Result<(), &str>) -> Result<EmbeddingsRequest, ApiError> {
    let mut fields = Fields::of_body(body)?;
    let adapter = context.adapter(&mut fields)?;
    check_makes(can)?;
    let generation = Generation { adapter, ..Generation::pooled(&mut fields)? };
    labels::name(&mut fields, "user")?;
    let base64 = match fields.take::<String>("encoding_format")?.as_deref() {
        None | Some("float") => false,
        Some("base64") => true,
        Some(other) => {
            let message = format!("Invalid 'encoding_format': '{other}' is neither 'float' nor 'base64'.");
            return Err(ApiError::invalid("encoding_format", message));
        }
    };
    let dimensions = fields.take("dimensions")?;
    let dimensions = within(&fields, "dimensions", dimensions, (1, context.model.hidden as usize))?;
    let given: PromptInputs = fields.require(INPUT)?;
    let notes = Hints::new(&context.hints, Api::Embeddings).close(fields, &EMBEDDING)?;
    let inputs = inputs(given, INPUT, context)?;
    let form = VectorForm { shape: VectorShape::Objects { base64 }, dimensions };
    Ok(EmbeddingsRequest { generation, param: INPUT, inputs, cut: false, form, notes })
}
