//! What requests are read with: from a body to prompts, rules and jobs. The functions of `prompt`, `tokenizing`, `sampling` and
//! `screening` work on it, and so does every endpoint's `prepare`.
//!
//! Must never: reach the engine's mailbox, or wait.

use std::collections::HashSet;
use std::sync::Arc;

use folio_engine::Drafter;
use folio_kv::TenantId;
use serde_json::{Map, Value};

use crate::arrival::Arrival;
use crate::config::ServerConfig;
use crate::decoding::reading::Readers;
use crate::decoding::structured::Structures;
use crate::engine::Served;
use crate::observability::Observability;
use crate::safety::Safety;
use crate::tenancy::kept::{KeptTexts, TEXTS_BYTES_MAX};

/// See the module documentation.
pub(crate) struct InputProcessor {
    pub served: Arc<Served>,
    pub safety: Safety,
    pub readers: Readers,
    pub structures: Structures,
    pub texts: KeptTexts,
    /// Bytes of the longest text that is tokenized.
    pub text_bytes: usize,
    /// Where drafts come from for a request that says nothing of it.
    pub speculate: Option<Drafter>,
    pub observability: Arc<Observability>,
}

impl InputProcessor {
    pub fn new(config: &ServerConfig, served: Arc<Served>, observability: Arc<Observability>) -> Self {
        let ends = served.model.eos_token_ids.clone();
        Self {
            safety: config.safety.clone(),
            readers: Readers::new(served.parsers, &served.tokenizer),
            structures: Structures::new(served.tokenizer.clone(), ends, observability.metrics.masks.clone()),
            texts: KeptTexts::new(TEXTS_BYTES_MAX),
            text_bytes: config.limits.body_bytes,
            speculate: config.speculate,
            served,
            observability,
        }
    }

    /// Lets go of what is kept for tenants that are no more.
    pub fn forget(&self, gone: &HashSet<TenantId>) {
        self.structures.forget(gone);
        self.texts.forget(gone);
    }

    /// Who asks for what, for the safety callout.
    pub fn asker(&self, arrival: &Arrival, api: &'static str) -> Map<String, Value> {
        Map::from_iter([
            ("request_id".to_owned(), arrival.id.as_str().into()),
            ("tenant".to_owned(), (&*arrival.tenant.name).into()),
            ("model".to_owned(), self.served.name().into()),
            ("api".to_owned(), api.into()),
        ])
    }
}
