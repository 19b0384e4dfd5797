//! What an answer must be: `response_format` and `structured_outputs`, and what other APIs call the same.
//!
//! Owns: reading a schema, regular expression, choice or grammar, within its limit of bytes. Must never: compile one.

use folio_text::{Syntax, Whitespace};
use serde_json::{Value, json};

use crate::context::RequestLimits;
use crate::error::ApiError;
use crate::fields::{Fields, Json, parse};

/// What an answer must be, and which field says so.
#[derive(Clone, Debug, PartialEq)]
pub struct Constraint {
    pub syntax: Syntax,
    param: String,
}

impl Constraint {
    /// What `syntax` says, because of `param`.
    pub fn new(syntax: Syntax, param: String) -> Self {
        Self { syntax, param }
    }

    /// Takes both fields. `None`: any text will do.
    pub fn read(fields: &mut Fields, limits: &RequestLimits) -> Result<Option<Self>, ApiError> {
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
    pub fn of_schema(raw: Json, param: String, limits: &RequestLimits) -> Result<Self, ApiError> {
        bounded(raw.bytes(), &param, limits)?;
        Ok(Self::json(parse(raw, &param)?, param))
    }

    /// The same for an object that gives a schema its name.
    pub fn of_named(fields: &mut Fields, limits: &RequestLimits) -> Result<Self, ApiError> {
        let name: String = fields.require("name")?;
        crate::tools::check_name(&name, &fields.path("name"))?;
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

fn response_format(fields: &mut Fields, limits: &RequestLimits) -> Result<Option<Constraint>, ApiError> {
    let Some(raw) = fields.raw("response_format") else { return Ok(None) };
    let mut format = Fields::of_value(raw, "response_format".into())?;
    let constraint = match format.require::<String>("type")?.as_str() {
        "text" => None,
        "json_object" => Some(Constraint::json(json!({"type": "object"}), "response_format".into())),
        "json_schema" => {
            let mut inner = Fields::of_value(format.require_raw("json_schema")?, format.path("json_schema"))?;
            let constraint = Constraint::of_named(&mut inner, limits)?;
            inner.finish(&[])?;
            Some(constraint)
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
    Ok(constraint)
}

/// vLLM's extension.
fn structured_outputs(fields: &mut Fields, limits: &RequestLimits) -> Result<Option<Constraint>, ApiError> {
    let Some(raw) = fields.raw("structured_outputs") else { return Ok(None) };
    bounded(raw.bytes(), "structured_outputs", limits)?;
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
    let mut constraints = Vec::new();
    let mut constraint = |name: &str, syntax: Syntax| {
        constraints.push(Constraint { syntax, param: format!("structured_outputs.{name}") })
    };
    if let Some(raw) = fields.raw("json") {
        let path = fields.path("json");
        let mut schema = schema_of(raw, &path)?;
        if closed {
            close(&mut schema);
        }
        constraint("json", Syntax::Json { schema, whitespace: whitespace.clone() });
    }
    if fields.take::<bool>("json_object")?.unwrap_or(false) {
        constraint("json_object", Syntax::Json { schema: json!({"type": "object"}), whitespace });
    }
    if let Some(pattern) = fields.take("regex")? {
        constraint("regex", Syntax::Regex(pattern));
    }
    if let Some(choices) = fields.take("choice")? {
        constraint("choice", Syntax::Choice(choices));
    }
    if let Some(grammar) = fields.take("grammar")? {
        constraint("grammar", Syntax::Grammar(grammar));
    }
    fields
        .finish(&[("structural_tag", "structural tags are not available; use tools with strict schemas")])?;
    if constraints.len() != 1 {
        let message =
            "'structured_outputs' needs exactly one of json, json_object, regex, choice and grammar.";
        return Err(ApiError::invalid("structured_outputs", message));
    }
    Ok(constraints.pop())
}

/// A schema as JSON or, as vLLM takes it, as JSON in a string.
fn schema_of(raw: Json, path: &str) -> Result<Value, ApiError> {
    match parse(raw, path)? {
        Value::String(text) => serde_json::from_str(&text).map_err(|error| {
            ApiError::invalid(path, format!("Invalid '{path}': the string is not JSON: {error}."))
        }),
        schema => Ok(schema),
    }
}

fn bounded(bytes: usize, path: &str, limits: &RequestLimits) -> Result<(), ApiError> {
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
