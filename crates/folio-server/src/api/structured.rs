//! `response_format` and `structured_outputs`: from the request to rules for the sampler.
//!
//! Invariants: an answer follows what was asked for or the request is refused, with the reason and the field; a grammar is compiled
//! before the request reaches the engine, so a wrong one costs nobody a step. What is needed for it (a sorted vocabulary, threads) is
//! made with the first request that asks, and kept.

use std::collections::HashSet;
use std::sync::{Arc, OnceLock};

use folio_engine::Rules;
use folio_kv::TenantId;
use folio_text::{Grammar, GrammarError, Grammars, Syntax, Tokenizer, Whitespace};
use serde_json::value::RawValue;
use serde_json::{Value, json};

use crate::api::error::ApiError;
use crate::api::fields::{Fields, parse};
use crate::config::Limits;
use crate::generation::guides::{Begin, Form, Masks, Structured};
use crate::generation::kept_grammars;
use crate::observability::metrics::MaskFigures;
use crate::tenancy::kept::Kept;

/// What an answer must be, and which field says so.
#[derive(Clone, Debug, PartialEq)]
pub struct Wish {
    syntax: Syntax,
    param: String,
}

impl Wish {
    /// What `syntax` says, because of `param`.
    pub fn new(syntax: Syntax, param: String) -> Self {
        Self { syntax, param }
    }

    /// Takes both fields. `None`: any text will do.
    pub fn read(fields: &mut Fields, limits: &Limits) -> Result<Option<Self>, ApiError> {
        let format = response_format(fields, limits)?;
        let structured = structured_outputs(fields, limits)?;
        if format.is_some() && structured.is_some() {
            let message = "'structured_outputs' and 'response_format' both say what the answer must be; give one of them.";
            return Err(ApiError::invalid("structured_outputs", message));
        }
        Ok(format.or(structured))
    }

    /// JSON that `schema` allows, asked for at `param`.
    pub fn json(schema: Value, param: String) -> Self {
        Self { syntax: Syntax::Json { schema, whitespace: Whitespace::default() }, param }
    }

    /// The same for a schema of the request's.
    pub fn of_schema(raw: &RawValue, param: String, limits: &Limits) -> Result<Self, ApiError> {
        bounded(raw.get().len(), &param, limits)?;
        Ok(Self::json(parse(raw, &param)?, param))
    }

    /// The same for an object that gives a schema its name.
    pub fn of_named(fields: &mut Fields, limits: &Limits) -> Result<Self, ApiError> {
        let name: String = fields.require("name")?;
        crate::api::tools::check_name(&name, &fields.path("name"))?;
        fields.take::<String>("description")?;
        // A schema is kept to whether it is called strict or not.
        fields.take::<bool>("strict")?;
        let path = fields.path("schema");
        match fields.raw("schema") {
            Some(raw) => Self::of_schema(raw, path, limits),
            None => Ok(Self::json(json!({}), path)),
        }
    }

    /// The schema of the JSON it asks for, if that is what it asks for.
    pub fn schema(&self) -> Option<Value> {
        match &self.syntax {
            Syntax::Json { schema, whitespace } => whitespace.apply(schema.clone()).ok(),
            _ => None,
        }
    }

    /// The field that asks for it.
    pub fn param(&self) -> &str {
        &self.param
    }
}

fn response_format(fields: &mut Fields, limits: &Limits) -> Result<Option<Wish>, ApiError> {
    let Some(raw) = fields.raw("response_format") else { return Ok(None) };
    let mut format = Fields::of_value(raw, "response_format".into())?;
    let wish = match format.require::<String>("type")?.as_str() {
        "text" => None,
        "json_object" => Some(Wish::json(json!({"type": "object"}), "response_format".into())),
        "json_schema" => {
            let mut inner = Fields::of_value(format.require("json_schema")?, format.path("json_schema"))?;
            let wish = Wish::of_named(&mut inner, limits)?;
            inner.finish(&[])?;
            Some(wish)
        }
        "structural_tag" => {
            return Err(ApiError::unsupported(
                "response_format.type",
                "structural tags are not available; use tools with strict schemas",
            ));
        }
        other => {
            let message = format!(
                "Invalid value for 'response_format.type': '{other}' is not one of text, json_object, json_schema."
            );
            return Err(ApiError::invalid("response_format.type", message));
        }
    };
    format.finish(&[])?;
    Ok(wish)
}

/// vLLM's extension.
fn structured_outputs(fields: &mut Fields, limits: &Limits) -> Result<Option<Wish>, ApiError> {
    let Some(raw) = fields.raw("structured_outputs") else { return Ok(None) };
    bounded(raw.get().len(), "structured_outputs", limits)?;
    let mut fields = Fields::of_value(raw, "structured_outputs".into())?;
    // There is one implementation, and nothing to fall back to.
    fields.take::<bool>("disable_fallback")?;
    let compact = fields.take::<bool>("disable_any_whitespace")?.unwrap_or(false);
    let closed = fields.take::<bool>("disable_additional_properties")?.unwrap_or(false);
    let pattern = fields.take::<String>("whitespace_pattern")?;
    let whitespace = match (compact, pattern) {
        (true, Some(_)) => {
            let path = fields.path("whitespace_pattern");
            let message = format!("'{path}' contradicts 'disable_any_whitespace'; give one of them.");
            return Err(ApiError::invalid(path, message));
        }
        (true, None) => Whitespace::Compact,
        (false, Some(pattern)) => Whitespace::Pattern(pattern),
        (false, None) => Whitespace::default(),
    };
    let mut wishes = Vec::new();
    let mut wish = |name: &str, syntax: Syntax| {
        wishes.push(Wish { syntax, param: format!("structured_outputs.{name}") })
    };
    if let Some(raw) = fields.raw("json") {
        let path = fields.path("json");
        let mut schema = schema_of(raw, &path)?;
        if closed {
            close(&mut schema);
        }
        wish("json", Syntax::Json { schema, whitespace: whitespace.clone() });
    }
    if fields.take::<bool>("json_object")?.unwrap_or(false) {
        wish("json_object", Syntax::Json { schema: json!({"type": "object"}), whitespace });
    }
    if let Some(pattern) = fields.take("regex")? {
        wish("regex", Syntax::Regex(pattern));
    }
    if let Some(choices) = fields.take("choice")? {
        wish("choice", Syntax::Choice(choices));
    }
    if let Some(grammar) = fields.take("grammar")? {
        wish("grammar", Syntax::Grammar(grammar));
    }
    fields
        .finish(&[("structural_tag", "structural tags are not available; use tools with strict schemas")])?;
    if wishes.len() != 1 {
        let message =
            "'structured_outputs' needs exactly one of json, json_object, regex, choice and grammar.";
        return Err(ApiError::invalid("structured_outputs", message));
    }
    Ok(wishes.pop())
}

/// A schema as JSON or, as vLLM takes it, as JSON in a string.
fn schema_of(raw: &RawValue, path: &str) -> Result<Value, ApiError> {
    match parse(raw, path)? {
        Value::String(text) => serde_json::from_str(&text).map_err(|error| {
            ApiError::invalid(path, format!("Invalid '{path}': the string is not JSON: {error}."))
        }),
        schema => Ok(schema),
    }
}

fn bounded(bytes: usize, path: &str, limits: &Limits) -> Result<(), ApiError> {
    if bytes > limits.grammar_bytes {
        let message = format!("'{path}' has {bytes} bytes; the limit is {}.", limits.grammar_bytes);
        return Err(ApiError::invalid(path, message));
    }
    Ok(())
}

/// Forbids properties that no schema names.
fn close(schema: &mut Value) {
    match schema {
        Value::Object(map) => {
            if map.contains_key("properties") && !map.contains_key("additionalProperties") {
                map.insert("additionalProperties".into(), false.into());
            }
            map.values_mut().for_each(close);
        }
        Value::Array(items) => items.iter_mut().for_each(close),
        _ => {}
    }
}

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
    pub fn compile(&self, wish: &Wish) -> Result<Arc<Grammar>, ApiError> {
        let kept = &self.structures.kept;
        let (digest, bytes) = kept_grammars::source(&wish.syntax);
        if let Some(grammar) = kept.find(self.tenant, &digest) {
            return Ok(grammar);
        }
        let grammar = self.structures.compile(wish)?;
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

    fn compile(&self, wish: &Wish) -> Result<Arc<Grammar>, ApiError> {
        let refused = |error: &GrammarError| {
            ApiError::invalid(&*wish.param, format!("Invalid '{}': {error}.", wish.param))
        };
        let (grammars, _) = self.made().map_err(refused)?;
        let began = std::time::Instant::now();
        let grammar = grammars.compile(&wish.syntax);
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
