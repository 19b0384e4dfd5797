//! Text to token ids, for a tenant, of whose earlier texts the ids are kept.
//!
//! Cost: proportional to what is new in a text; to all of it for its digest.

use std::sync::Arc;

use folio_api::ApiError;
use folio_api::params::Generation;
use folio_engine::{DRAFTS_MAX, Drafter, Speculation};
use folio_kv::TenantId;
use folio_text::{Prompt, SegmentKey, TextError, TokenCache};

use crate::generation::input::InputProcessor;
use crate::generation::prompt::text_error;
use crate::observability::step;
use crate::tenancy::kept::KeptTokens;

/// About what an entry takes besides its ids.
const ENTRY_BYTES: usize = 512;

/// Bytes per token that no tokenizer reaches over a whole prompt.
const BYTES_PER_TOKEN_MAX: usize = 64;

struct TenantTokenCache<'a>(&'a KeptTokens, TenantId);

impl TokenCache for TenantTokenCache<'_> {
    fn find(&self, key: &SegmentKey) -> Option<Arc<[u32]>> {
        self.0.find(self.1, key)
    }

    fn keep(&self, key: SegmentKey, ids: &[u32]) {
        self.0.keep(self.1, key, ids.into(), size_of_val(ids) + ENTRY_BYTES);
    }
}

/// Tokenizes a text, in which markers count wherever they are. What cannot fit into the context is refused before the work,
/// unless it is to be truncated. `tenant`: whose text it is, if its ids are worth keeping.
pub fn encode(
    inputs: &InputProcessor,
    tenant: Option<TenantId>,
    text: &str,
    special: bool,
    truncated: bool,
    param: &str,
) -> Result<Vec<u32>, ApiError> {
    encode_with(inputs, tenant, (text, None), special, truncated, param)
}

/// The same of a rendered conversation, in which no marker counts that a client wrote.
pub fn encode_prompt(
    inputs: &InputProcessor,
    tenant: Option<TenantId>,
    prompt: &Prompt,
    special: bool,
    truncated: bool,
    param: &str,
) -> Result<Vec<u32>, ApiError> {
    encode_with(inputs, tenant, (prompt.text(), Some(prompt.breaks())), special, truncated, param)
}

// What a request may ask for is what the engine does.
const _: () = assert!(folio_api::speculation::DRAFTS_MAX == DRAFTS_MAX);

/// How answers to a prompt of these tokens are speculated on. A request's own word goes before the operator's; what it predicts is looked at
/// whatever the operator says, and is as long as an answer can be. O(tokens).
pub fn speculation(
    inputs: &InputProcessor,
    tenant: TenantId,
    generation: &Generation,
    tokens: &[u32],
) -> Result<Option<Speculation>, ApiError> {
    let options = &generation.speculation;
    let prediction = match &options.prediction {
        Some(text) => encode_with(inputs, Some(tenant), (text, None), false, false, "prediction")?,
        None => Vec::new(),
    };
    let context = inputs.served.model.context_length;
    if prediction.len() > context as usize {
        let tokens = prediction.len();
        let message =
            format!("'prediction' has {tokens} tokens; this model's maximum context length is {context}.");
        return Err(ApiError::invalid("prediction", message));
    }
    if let Some(most) = options.most.filter(|most| *most > context) {
        let message =
            format!("'speculative.n_max' is {most}; this model's maximum context length is {context}.");
        return Err(ApiError::invalid("speculative.n_max", message));
    }
    let asked = options.most.is_some_and(|most| most > 0) || !prediction.is_empty();
    let drafter = inputs.speculate.or_else(|| asked.then(Drafter::default));
    let most = options.most.unwrap_or(DRAFTS_MAX);
    let drafter = drafter.filter(|_| most > 0);
    Ok(drafter.map(|drafter| Speculation::new(drafter, most, tokens, &prediction)))
}

fn encode_with(
    inputs: &InputProcessor,
    tenant: Option<TenantId>,
    (text, breaks): (&str, Option<&[usize]>),
    special: bool,
    truncated: bool,
    param: &str,
) -> Result<Vec<u32>, ApiError> {
    let _span = step!("tokenize");
    let context = inputs.served.model.context_length as usize;
    let most = match truncated {
        true => inputs.text_bytes,
        false => inputs.text_bytes.min(context * BYTES_PER_TOKEN_MAX),
    };
    let cache = tenant.map(|tenant| TenantTokenCache(&inputs.tokens, tenant));
    let cache = cache.as_ref().map(|cache| cache as &dyn TokenCache);
    let ids = inputs.served.tokenizer.encode_with(text, breaks, special, most, cache);
    ids.map_err(|error| match error {
        TextError::TooLong { bytes, limit } => {
            let message = format!(
                "This model's maximum context length is {context} tokens, but the prompt has {bytes} bytes of text, more \
                 than {limit}. Shorten the prompt."
            );
            let error = ApiError::invalid(param, message);
            ApiError { code: Some("context_length_exceeded"), ..error }
        }
        other => text_error(other),
    })
}
