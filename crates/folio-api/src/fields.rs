//! Reading a JSON object field by field, so that every refusal names its field.
//!
//! The body is read once, into [`Json`], which refuses what nests too deep or has too many names and values while it is built. Its parts
//! are then moved to who asks for them. Invariant: [`Fields::finish`] fails while a field is left unread, therefore nothing is ever
//! accepted and ignored.
//!
//! Cost: linear in the body. A field is found by going along its object's names, of which there are a bounded number.

use std::borrow::Cow;
use std::collections::HashSet;
use std::fmt;

use folio_text::work;
use serde::de::Deserialize;

use crate::error::ApiError;
pub use json::Json;
use json::mistyped;

mod json;

/// The fields of one JSON object, in order, not yet read.
pub struct Fields<'a> {
    fields: Vec<(Cow<'a, str>, Json<'a>)>,
    /// Where this object sits in the request; empty for the request itself.
    path: String,
}

impl<'a> Fields<'a> {
    /// The fields of a request body. Errors carry line and column.
    pub fn of_body(body: &'a [u8]) -> Result<Self, ApiError> {
        if body.is_empty() {
            return Err(ApiError::bad_request("The request has no body; send one JSON object."));
        }
        let unreadable = |error: serde_json::Error| {
            ApiError::bad_request(format!(
                "We could not parse the JSON body of your request: {error}. The body must be one JSON object."
            ))
        };
        match Json::read(body)?.map_err(unreadable)? {
            Json::Object(fields) => Self::checked(fields, String::new()),
            other => Err(unreadable(mistyped(&other, "a JSON object"))),
        }
    }

    /// The fields of a nested object at `path`.
    pub fn of_value(value: Json<'a>, path: String) -> Result<Self, ApiError> {
        match value {
            Json::Object(fields) => Self::checked(fields, path),
            other => Err(invalid(&mistyped(&other, "an object"), &path)),
        }
    }

    fn checked(fields: Vec<(Cow<'a, str>, Json<'a>)>, path: String) -> Result<Self, ApiError> {
        work::add(fields.len());
        let mut names = HashSet::with_capacity(fields.len());
        if let Some((name, _)) = fields.iter().find(|(name, _)| !names.insert(&**name)) {
            let name = join(&path, name);
            return Err(ApiError::invalid(name.clone(), format!("'{name}' is given twice.")));
        }
        Ok(Self { fields, path })
    }

    /// The full name of a field of this object.
    pub fn path(&self, name: &str) -> String {
        join(&self.path, name)
    }

    /// Names of the fields that nobody read yet.
    pub fn unread(&self) -> impl Iterator<Item = &str> {
        self.fields.iter().map(|(name, _)| &**name)
    }

    /// A field that stays to be taken; `null` counts as absent.
    pub fn peek(&self, name: &str) -> Option<&Json<'a>> {
        let (_, value) = self.fields.iter().find(|(field, _)| field == name)?;
        (!matches!(value, Json::Null)).then_some(value)
    }

    /// Takes a field as it is; `null` counts as absent.
    pub fn raw(&mut self, name: &str) -> Option<Json<'a>> {
        let index = self.fields.iter().position(|(field, _)| field == name);
        work::add(index.unwrap_or(self.fields.len()));
        let (_, value) = self.fields.remove(index?);
        (!matches!(value, Json::Null)).then_some(value)
    }

    /// The same for a field that must be there.
    pub fn require_raw(&mut self, name: &str) -> Result<Json<'a>, ApiError> {
        self.raw(name).ok_or_else(|| self.missing(name))
    }

    /// Takes a list whose elements are read one by one.
    pub fn list(&mut self, name: &str) -> Result<Option<Vec<Json<'a>>>, ApiError> {
        let Some(value) = self.raw(name) else { return Ok(None) };
        list(value, &self.path(name)).map(Some)
    }

    /// The same for a list that must be there.
    pub fn require_list(&mut self, name: &str) -> Result<Vec<Json<'a>>, ApiError> {
        self.list(name)?.ok_or_else(|| self.missing(name))
    }

    /// Takes a field as `T`; `null` counts as absent, a wrong type is a 400 that names the field.
    pub fn take<T: Deserialize<'a>>(&mut self, name: &str) -> Result<Option<T>, ApiError> {
        let Some(value) = self.raw(name) else { return Ok(None) };
        parse(value, &self.path(name)).map(Some)
    }

    /// Takes a field that must be there.
    pub fn require<T: Deserialize<'a>>(&mut self, name: &str) -> Result<T, ApiError> {
        self.take(name)?.ok_or_else(|| self.missing(name))
    }

    /// Takes a text that may only be one of `accepted`: nothing else could be done differently.
    pub fn only(&mut self, name: &str, accepted: &[&str], why: &str) -> Result<(), ApiError> {
        match self.take::<String>(name)? {
            Some(value) if !accepted.contains(&value.as_str()) => {
                Err(ApiError::unsupported(self.path(name), why))
            }
            _ => Ok(()),
        }
    }

    pub fn missing(&self, name: &str) -> ApiError {
        let path = self.path(name);
        let message = format!("Missing required parameter: '{path}'.");
        ApiError { code: Some("missing_required_parameter"), ..ApiError::invalid(path, message) }
    }

    /// Refuses whatever nobody read: known names with their reason, others as unrecognized.
    pub fn finish(self, known: &[(&str, &str)]) -> Result<(), ApiError> {
        // Empty values ask for nothing: SDKs send them for parameters that are not used.
        let Some((name, _)) = self.fields.iter().find(|(_, value)| !value.is_empty()) else {
            // Only null or empty values are left; for a known name that is "not used", for others still a mistake.
            return match self.fields.iter().find(|(name, _)| !known.iter().any(|(k, _)| k == name)) {
                Some((name, _)) => Err(unrecognized(&self.path(name))),
                None => Ok(()),
            };
        };
        let path = self.path(name);
        match known.iter().find(|(k, _)| k == name) {
            Some((_, why)) => Err(ApiError::unsupported(path, why)),
            None => Err(unrecognized(&path)),
        }
    }
}

fn unrecognized(path: &str) -> ApiError {
    let message = format!("Unrecognized request argument supplied: {path}");
    ApiError { code: Some("unrecognized_parameter"), ..ApiError::invalid(path, message) }
}

fn join(path: &str, name: &str) -> String {
    if path.is_empty() { name.to_owned() } else { format!("{path}.{name}") }
}

/// Reads one value as `T`; errors name `path`.
pub fn parse<'a, T: Deserialize<'a>>(value: Json<'a>, path: &str) -> Result<T, ApiError> {
    T::deserialize(value).map_err(|error| invalid(&error, path))
}

/// The elements of a list at `path`, to be read one by one.
pub fn list<'a>(value: Json<'a>, path: &str) -> Result<Vec<Json<'a>>, ApiError> {
    match value {
        Json::List(list) => Ok(list),
        // Lists that are read so have no numbers, and of ids there may be too many to make values of them.
        Json::Ids(ids) => {
            let first = ids.first().map_or(Json::Null, |id| Json::Number((*id).into()));
            Err(invalid(&mistyped(&first, "an object"), &format!("{path}[0]")))
        }
        other => Err(invalid(&mistyped(&other, "a sequence"), path)),
    }
}

fn invalid(error: &serde_json::Error, path: &str) -> ApiError {
    let reason = in_json_words(&error.to_string());
    let message = format!("Invalid value for '{path}': {reason}.");
    ApiError { code: Some("invalid_type"), ..ApiError::invalid(path, message) }
}

/// serde's reason in the words of JSON, for people who never saw Rust.
fn in_json_words(reason: &str) -> String {
    let parts = reason.strip_prefix("invalid type: ").or_else(|| reason.strip_prefix("invalid value: "));
    let Some((got, expected)) = parts.and_then(|parts| parts.rsplit_once(", expected ")) else {
        return reason.to_owned();
    };
    let expected = match expected {
        "u8" | "u16" | "u32" | "u64" | "usize" => "a non-negative integer",
        "i8" | "i16" | "i32" | "i64" => "an integer",
        "f32" | "f64" => "a number",
        "a sequence" => "an array",
        "a map" | "a JSON object" => "an object",
        other => other,
    };
    let got = match got {
        "sequence" => "an array".to_owned(),
        "map" => "an object".to_owned(),
        other => other.replace("floating point", "number").replace("Option value", "null"),
    };
    format!("expected {expected}, got {got}")
}

/// An optional value within bounds.
pub fn within<T: PartialOrd + fmt::Display + Copy>(
    fields: &Fields,
    name: &str,
    value: Option<T>,
    (low, high): (T, T),
) -> Result<Option<T>, ApiError> {
    match value {
        // Written so that a NaN is refused too.
        Some(v) if !(v >= low && v <= high) => {
            let path = fields.path(name);
            let message = format!("Invalid '{path}': {v} is not between {low} and {high}.");
            Err(ApiError::invalid(path, message))
        }
        other => Ok(other),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_syntax_error_has_line_and_column() {
        let error = Fields::of_body(b"{\n  \"a\": nope\n}").err().unwrap();
        assert!(error.message.contains("line 2 column"), "{}", error.message);
        let error = Fields::of_body(b"[1]").err().unwrap();
        assert!(error.message.contains("object"), "{}", error.message);
        assert!(Fields::of_body(b"{} x").is_err());
    }

    #[test]
    fn wrong_types_are_told_in_the_words_of_json() {
        let said = |body: &str, read: fn(&mut Fields) -> Option<ApiError>| {
            read(&mut Fields::of_body(body.as_bytes()).ok().unwrap()).unwrap().message
        };
        let integer = |fields: &mut Fields| fields.take::<u32>("a").err();
        let list = |fields: &mut Fields| fields.take::<Vec<u32>>("a").err();
        let number = |fields: &mut Fields| fields.take::<f32>("a").err();
        for (said, expected) in [
            (said(r#"{"a": -5}"#, integer), "expected a non-negative integer, got integer `-5`"),
            (said(r#"{"a": 1.5}"#, integer), "expected a non-negative integer, got number `1.5`"),
            (said(r#"{"a": {}}"#, list), "expected an array, got an object"),
            (said(r#"{"a": [1]}"#, number), "expected a number, got an array"),
            (said(r#"{"a": true}"#, number), "expected a number, got boolean `true`"),
        ] {
            assert_eq!(said, format!("Invalid value for 'a': {expected}."));
        }
        assert!(Fields::of_body(b"").err().unwrap().message.contains("no body"));
    }

    #[test]
    fn unread_fields_are_refused_by_name() {
        let mut fields = Fields::of_body(br#"{"a": 1, "b\u0062": 2, "tools": [1]}"#).ok().unwrap();
        assert_eq!(fields.take::<u32>("a").unwrap(), Some(1));
        assert_eq!(fields.take::<u32>("bb").unwrap(), Some(2));
        let error = fields.finish(&[("tools", "not yet")]).unwrap_err();
        assert_eq!(error.param.as_deref(), Some("tools"));
        assert_eq!(error.code, Some("unsupported_parameter"));
        let error = Fields::of_body(br#"{"typo": null}"#).ok().unwrap().finish(&[]).unwrap_err();
        assert_eq!(error.param.as_deref(), Some("typo"));
        Fields::of_body(br#"{"tools": [ ], "x": null}"#)
            .ok()
            .unwrap()
            .finish(&[("tools", ""), ("x", "")])
            .unwrap();
    }

    #[test]
    fn wrong_types_and_duplicates_name_the_field() {
        let mut fields = Fields::of_body(br#"{"n": "two"}"#).ok().unwrap();
        let error = fields.take::<u32>("n").unwrap_err();
        assert_eq!(error.param.as_deref(), Some("n"));
        assert_eq!(
            error.message,
            "Invalid value for 'n': expected a non-negative integer, got string \"two\"."
        );
        assert_eq!(Fields::of_body(br#"{"n": 1, "n": 2}"#).err().unwrap().param.as_deref(), Some("n"));
    }
}
