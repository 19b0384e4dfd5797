//! Text to token ids, and where they are speculated on to an index of them, for a tenant, of whose earlier texts both are kept.
//!
//! Cost: proportional to what is new in a text; to all of it for its digests.

use std::sync::Arc;

use folio_api::ApiError;
use folio_api::params::Generation;
use folio_api::speculation::OFF;
use folio_engine::{DRAFTS_MAX, Drafter, IndexBlock, IndexCache, Speculation};
use folio_kv::TenantId;
use folio_text::{Prompt, SegmentKey, TextError, TokenCache, work};

use crate::generation::input::InputProcessor;
use crate::generation::prompt::text_error;
use crate::observability::step;
use crate::tenancy::kept::{Digest, KeptText, KeptTexts};

/// About what an entry takes besides its ids.
const ENTRY_BYTES: usize = 512;

/// Bytes per token that no tokenizer reaches over a whole prompt.
const BYTES_PER_TOKEN_MAX: usize = 64;

/// What a digest begins with that is of tokens: no segment of a text has such.
const OF_TOKENS: u8 = 2;

struct TenantTextCache<'a>(&'a KeptTexts, TenantId);

impl TokenCache for TenantTextCache<'_> {
    fn find(&self, key: &SegmentKey) -> Option<Arc<[u32]>> {
        match self.0.find(self.1, key)? {
            KeptText::Ids(ids) => Some(ids),
            KeptText::Index(_) => None,
        }
    }

    fn keep(&self, key: SegmentKey, ids: &[u32]) {
        self.0.keep(self.1, key, KeptText::Ids(ids.into()), size_of_val(ids) + ENTRY_BYTES);
    }
}

impl IndexCache for TenantTextCache<'_> {
    fn block(&self, tokens: &[u32], make: &dyn Fn() -> Arc<IndexBlock>) -> Arc<IndexBlock> {
        work::add(size_of_val(tokens));
        let key = digest(tokens);
        if let Some(KeptText::Index(block)) = self.0.find(self.1, &key) {
            return block;
        }
        work::add(size_of_val(tokens));
        let block = make();
        self.0.keep(self.1, key, KeptText::Index(block.clone()), block.bytes() + ENTRY_BYTES);
        block
    }
}

fn digest(tokens: &[u32]) -> Digest {
    let mut bytes = vec![0; size_of_val(tokens)];
    for (bytes, token) in bytes.chunks_exact_mut(size_of::<u32>()).zip(tokens) {
        bytes.copy_from_slice(&token.to_le_bytes());
    }
    blake3::Hasher::new().update(&[OF_TOKENS]).update(&bytes).finalize().into()
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
/// whatever the operator says, and is as long as an answer can be.
pub fn speculation(
    inputs: &InputProcessor,
    tenant: TenantId,
    generation: &Generation,
    tokens: &Arc<[u32]>,
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
    let drafter = match &options.drafter {
        Some(name) => Some(drafter(name, inputs.speculate)?),
        None => inputs.speculate.or_else(|| asked.then(Drafter::default)),
    };
    let most = options.most.unwrap_or(DRAFTS_MAX);
    let _span = step!("index");
    let cache = TenantTextCache(&inputs.texts, tenant);
    let speculate = |drafter| Speculation::with_cache(drafter, most, Arc::clone(tokens), &prediction, &cache);
    Ok(drafter.filter(|_| most > 0).map(speculate))
}

/// The one of this name, of those that there are: text can always be looked at, a model only where the server has it.
fn drafter(name: &str, served: Option<Drafter>) -> Result<Drafter, ApiError> {
    let there = |drafter: &Drafter| !drafter.is_model() || Some(*drafter) == served;
    let mut known = Drafter::ALL.into_iter().filter(there);
    known.clone().find(|drafter| drafter.name() == name).ok_or_else(|| {
        let names: Vec<&str> = known.by_ref().map(Drafter::name).chain(OFF).collect();
        let message = format!("'speculative.type' is '{name}'; this server has {}.", names.join(", "));
        ApiError::invalid("speculative.type", message)
    })
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
    let cache = tenant.map(|tenant| TenantTextCache(&inputs.texts, tenant));
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

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::collections::HashSet;

    use super::*;

    struct Counting<'a> {
        cache: TenantTextCache<'a>,
        made: Cell<usize>,
    }

    impl IndexCache for Counting<'_> {
        fn block(&self, tokens: &[u32], make: &dyn Fn() -> Arc<IndexBlock>) -> Arc<IndexBlock> {
            let make = || {
                self.made.set(self.made.get() + 1);
                make()
            };
            self.cache.block(tokens, &make)
        }
    }

    /// Blocks that are made for the prompt of a tenant.
    fn made(kept: &KeptTexts, tenant: u32, prompt: &[u32]) -> usize {
        let counting = Counting { cache: TenantTextCache(kept, TenantId(tenant)), made: Cell::new(0) };
        Speculation::with_cache(Drafter::Suffix, 16, prompt.into(), &[], &counting);
        counting.made.get()
    }

    #[test]
    fn of_a_conversation_only_what_is_new_is_indexed_and_for_its_tenant_alone() {
        const TURN: usize = 900;
        let kept = KeptTexts::new(64 << 20);
        let text: Vec<u32> = (0..60 * TURN as u32).map(|at| at * at % 5003).collect();
        let turns = (1..=60).map(|turn| &text[..turn * TURN]);
        let of_turns: Vec<usize> = turns.map(|prompt| made(&kept, 1, prompt)).collect();
        assert!(of_turns.iter().all(|made| *made <= 1), "no turn has two blocks: {of_turns:?}");
        let blocks: usize = of_turns.iter().sum();
        assert_eq!(made(&kept, 1, &text), 0);
        assert_eq!(made(&KeptTexts::new(64 << 20), 1, &text), blocks, "each block once");
        assert_eq!(made(&kept, 2, &text), blocks, "another tenant finds nothing");
        // What goes on from the same beginning has that in common.
        let mut other = text.clone();
        other[text.len() / 2..].iter_mut().for_each(|token| *token += 1);
        let anew = made(&kept, 1, &other);
        assert!((blocks / 2..=blocks / 2 + 1).contains(&anew), "{anew} of {blocks}");
        kept.forget(&HashSet::from([TenantId(1)]));
        assert_eq!(made(&kept, 1, &text), blocks, "the tenant's are gone");
    }

    #[test]
    fn ids_and_indices_share_what_a_tenant_may_keep() {
        let kept = KeptTexts::new(4 << 20);
        let cache = TenantTextCache(&kept, TenantId(1));
        let text: Vec<u32> = (0..30_000).collect();
        let blocks = made(&kept, 1, &text);
        assert_eq!(made(&kept, 1, &text), 0);
        (0..8).for_each(|key| cache.keep([key; 32], &text));
        assert_eq!(made(&kept, 1, &text), blocks, "the least recently used went");
        for text in 0..60 {
            made(&kept, 1, &vec![text; 30_000]);
        }
        assert!(cache.find(&[7; 32]).is_none(), "and so do ids");
    }
}
