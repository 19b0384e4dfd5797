//! From what an answer must be to rules for the sampler.
//!
//! Invariants: an answer follows what was asked for or the request is refused, with the reason and the field; a grammar is compiled
//! before the request reaches the engine, so a wrong one costs nobody a step. What is needed for it (a sorted vocabulary, threads) is
//! made with the first request that asks, and kept.

use std::collections::HashSet;
use std::sync::{Arc, OnceLock};

use folio_api::ApiError;
use folio_api::constraint::Constraint;
use folio_engine::Rules;
use folio_kv::TenantId;
use folio_text::{Grammar, GrammarError, Grammars, Tokenizer};

use crate::decoding::follower::{Begin, Form};
use crate::decoding::guides::{Masks, Structured};
use crate::decoding::kept_grammars;
use crate::observability::metrics::MaskFigures;
use crate::tenancy::kept::Kept;

/// What following grammars takes; made when first needed.
pub struct Structures {
    tokenizer: Arc<Tokenizer>,
    ends: Arc<[u32]>,
    figures: Arc<MaskFigures>,
    made: OnceLock<Result<(Grammars, Arc<Masks>), GrammarError>>,
    kept: Kept<Arc<Grammar>>,
}

/// Compiles for one tenant.
#[derive(Clone, Copy)]
pub struct Compiler<'a> {
    structures: &'a Structures,
    tenant: TenantId,
}

impl Compiler<'_> {
    /// Compiles what was asked for, or finds it compiled. Blocks; the first call for longer.
    pub fn compile(&self, constraint: &Constraint) -> Result<Arc<Grammar>, ApiError> {
        let kept = &self.structures.kept;
        let (digest, bytes) = kept_grammars::source(&constraint.syntax);
        if let Some(grammar) = kept.find(self.tenant, &digest) {
            return Ok(grammar);
        }
        let grammar = self.structures.compile(constraint)?;
        kept.keep(self.tenant, digest, grammar.clone(), bytes);
        Ok(grammar)
    }
}

impl Structures {
    pub fn new(tokenizer: Arc<Tokenizer>, ends: Arc<[u32]>, figures: Arc<MaskFigures>) -> Self {
        let kept = Kept::new(kept_grammars::BYTES_MAX);
        Self { tokenizer, ends, figures, made: OnceLock::new(), kept }
    }

    /// Lets go of what was compiled for these.
    pub fn forget(&self, gone: &HashSet<TenantId>) {
        self.kept.forget(gone);
    }

    pub fn of(&self, tenant: TenantId) -> Compiler<'_> {
        Compiler { structures: self, tenant }
    }

    fn compile(&self, constraint: &Constraint) -> Result<Arc<Grammar>, ApiError> {
        let refused = |error: &GrammarError| {
            ApiError::invalid(constraint.param(), format!("Invalid '{}': {error}.", constraint.param()))
        };
        let (grammars, _) = self.made().map_err(refused)?;
        let began = std::time::Instant::now();
        let grammar = grammars.compile(&constraint.syntax);
        self.figures.compiled(began.elapsed());
        grammar.map(Arc::new).map_err(|error| refused(&error))
    }

    fn made(&self) -> Result<&(Grammars, Arc<Masks>), &GrammarError> {
        self.made.get_or_init(|| self.make()).as_ref()
    }

    /// Rules by what was compiled, because of `param`.
    pub fn rules(&self, form: Form, begin: Begin, param: &str) -> Result<Arc<dyn Rules>, ApiError> {
        let (_, masks) = self.made().map_err(|error| ApiError::internal(error.to_string()))?;
        Ok(Arc::new(Structured {
            form,
            begin,
            tokenizer: self.tokenizer.clone(),
            ends: self.ends.clone(),
            masks: masks.clone(),
            param: param.into(),
        }))
    }

    fn make(&self) -> Result<(Grammars, Arc<Masks>), GrammarError> {
        let grammars = Grammars::new(&self.tokenizer, &self.ends)?;
        let processors = std::thread::available_parallelism().map_or(1, usize::from);
        let masks = Masks::start(processors.div_ceil(4).min(8), self.figures.clone());
        let masks = masks.map_err(|error| GrammarError(format!("no thread for it: {error}")))?;
        Ok((grammars, Arc::new(masks)))
    }
}
