//! Typed reading of a JSON object, with errors that name the file and the field.
//!
//! Owns: the wording of "field X is missing" and "field X is Y, expected Z". `null` and absent mean the same unless a
//! caller asks.

use std::borrow::Cow;

use serde_json::{Map, Value};

use crate::error::{ModelError, Result};

/// An object inside a file; `path` is the prefix of its fields ("" or "rope_scaling.").
#[derive(Clone, Copy)]
pub struct Fields<'a> {
    file: &'a str,
    path: &'a str,
    map: &'a Map<String, Value>,
    /// (path and name here, what the file itself calls it)
    names: &'a [(&'static str, String)],
}

/// Parses `bytes` as an object.
pub fn parse_object(file: &str, bytes: &[u8]) -> Result<Map<String, Value>> {
    let value: Value = serde_json::from_slice(&with_infinities(bytes))
        .map_err(|error| ModelError::Json { file: file.to_owned(), reason: error.to_string() })?;
    match value {
        Value::Object(map) => Ok(map),
        other => Err(ModelError::Json {
            file: file.to_owned(),
            reason: format!("it holds {}, not an object", kind(&other)),
        }),
    }
}

/// Python's own writer has `Infinity`, which is no JSON: it becomes what transformers writes since version 5.
fn with_infinities(bytes: &[u8]) -> Cow<'_, [u8]> {
    const BARE: &[u8] = b"Infinity";
    if !bytes.windows(BARE.len()).any(|part| part == BARE) {
        return Cow::Borrowed(bytes);
    }
    let (mut out, mut at, mut in_string) = (Vec::with_capacity(bytes.len()), 0, false);
    while let Some(&byte) = bytes.get(at) {
        let taken = match byte {
            b'\\' if in_string => 2,
            _ if !in_string && bytes[at..].starts_with(BARE) => {
                out.extend_from_slice(br#"{"__float__": "Infinity"}"#);
                at += BARE.len();
                continue;
            }
            _ => 1,
        };
        in_string ^= byte == b'"';
        out.extend_from_slice(&bytes[at..bytes.len().min(at + taken)]);
        at += taken;
    }
    Cow::Owned(out)
}

impl<'a> Fields<'a> {
    pub fn new(file: &'a str, map: &'a Map<String, Value>) -> Self {
        Self { file, path: "", map, names: &[] }
    }

    /// Fields made from a file that calls them otherwise: errors use its names.
    pub fn with_names(self, names: &'a [(&'static str, String)]) -> Self {
        Self { names, ..self }
    }

    pub fn file(&self) -> &'a str {
        self.file
    }

    /// Prefix of the fields' names.
    pub fn path(&self) -> &'a str {
        self.path
    }

    /// All fields, null ones too.
    pub fn entries(&self) -> impl Iterator<Item = (&'a str, &'a Value)> {
        self.map.iter().map(|(name, value)| (name.as_str(), value))
    }

    /// The value, unless absent or null.
    pub fn value(&self, name: &str) -> Option<&'a Value> {
        self.map.get(name).filter(|value| !value.is_null())
    }

    /// Present, and null: for the few fields where that differs from absent.
    pub fn is_null(&self, name: &str) -> bool {
        self.map.get(name).is_some_and(Value::is_null)
    }

    pub fn problem(&self, name: &str, problem: impl Into<String>) -> ModelError {
        let field = format!("{}{name}", self.path);
        let own = self.names.iter().find(|(here, _)| *here == field).map(|(_, own)| own.clone());
        ModelError::Field { file: self.file.to_owned(), field: own.unwrap_or(field), problem: problem.into() }
    }

    fn wrong(&self, name: &str, value: &Value, expected: &str) -> ModelError {
        self.problem(name, format!("is {}, expected {expected}", show(value)))
    }

    fn required<T>(&self, name: &str, value: Option<T>) -> Result<T> {
        value.ok_or_else(|| self.problem(name, "is missing"))
    }

    /// An integer in `0..=max`.
    pub fn integer_opt(&self, name: &str, max: usize) -> Result<Option<usize>> {
        match self.value(name) {
            Some(Value::Number(number)) if number.as_u64() == Some(0) => Ok(Some(0)),
            _ => self.size_opt(name, max),
        }
    }

    /// An integer in `1..=max`.
    pub fn size_opt(&self, name: &str, max: usize) -> Result<Option<usize>> {
        let Some(value) = self.value(name) else { return Ok(None) };
        match value.as_u64() {
            Some(size) if size >= 1 && size <= max as u64 => Ok(Some(size as usize)),
            _ => Err(self.wrong(name, value, &format!("an integer from 1 to {max}"))),
        }
    }

    pub fn size(&self, name: &str, max: usize) -> Result<usize> {
        self.required(name, self.size_opt(name, max)?)
    }

    /// A finite number.
    pub fn number_opt(&self, name: &str) -> Result<Option<f64>> {
        let Some(value) = self.value(name) else { return Ok(None) };
        match value.as_f64() {
            Some(number) if number.is_finite() => Ok(Some(number)),
            _ => Err(self.wrong(name, value, "a number")),
        }
    }

    /// A finite number above zero.
    pub fn positive_opt(&self, name: &str) -> Result<Option<f64>> {
        match self.number_opt(name)? {
            Some(number) if number <= 0.0 => {
                Err(self.problem(name, format!("is {number}, expected a number above 0")))
            }
            number => Ok(number),
        }
    }

    pub fn positive(&self, name: &str) -> Result<f64> {
        self.required(name, self.positive_opt(name)?)
    }

    pub fn flag(&self, name: &str) -> Result<Option<bool>> {
        let Some(value) = self.value(name) else { return Ok(None) };
        value.as_bool().map(Some).ok_or_else(|| self.wrong(name, value, "true or false"))
    }

    pub fn text(&self, name: &str) -> Result<Option<&'a str>> {
        let Some(value) = self.value(name) else { return Ok(None) };
        value.as_str().map(Some).ok_or_else(|| self.wrong(name, value, "a string"))
    }

    pub fn list(&self, name: &str) -> Result<Option<&'a [Value]>> {
        let Some(value) = self.value(name) else { return Ok(None) };
        value.as_array().map(|list| Some(list.as_slice())).ok_or_else(|| self.wrong(name, value, "a list"))
    }

    /// A list of finite numbers above zero.
    pub fn positive_list(&self, name: &str) -> Result<Option<Vec<f64>>> {
        let Some(list) = self.list(name)? else { return Ok(None) };
        let number = |value: &Value| value.as_f64().filter(|number| number.is_finite() && *number > 0.0);
        let numbers: Option<Vec<f64>> = list.iter().map(number).collect();
        numbers.map(Some).ok_or_else(|| self.problem(name, "must hold only numbers above 0"))
    }

    /// One token id or a list of them.
    pub fn token_ids(&self, name: &str) -> Result<Option<Vec<u32>>> {
        let Some(value) = self.value(name) else { return Ok(None) };
        let id = |value: &Value| value.as_u64().and_then(|id| u32::try_from(id).ok());
        let ids: Option<Vec<u32>> = match value {
            Value::Array(list) => list.iter().map(id).collect(),
            single => id(single).map(|id| vec![id]),
        };
        ids.map(Some).ok_or_else(|| self.wrong(name, value, "a token id or a list of them"))
    }

    /// Name of the first field that is itself an object.
    pub fn first_object(&self) -> Option<&'a str> {
        self.map.iter().find(|(_, value)| value.is_object()).map(|(name, _)| name.as_str())
    }

    /// A nested object; `path` is its name with a dot, for errors.
    pub fn object(&self, name: &str, path: &'a str) -> Result<Option<Fields<'a>>> {
        let Some(value) = self.value(name) else { return Ok(None) };
        match value {
            Value::Object(map) => Ok(Some(Fields { path, map, ..*self })),
            other => Err(self.wrong(name, other, "an object")),
        }
    }
}

fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}

/// The value itself when it is short, else its kind.
fn show(value: &Value) -> String {
    match value {
        Value::Array(_) | Value::Object(_) => kind(value).to_owned(),
        Value::String(text) if text.chars().count() > 60 => "a long string".to_owned(),
        scalar => scalar.to_string(),
    }
}
