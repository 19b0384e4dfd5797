//! Reading a JSON object field by field, so that every refusal names its field.
//!
//! The body is scanned once and nothing is copied: values stay as slices of the body until their reader asks for a
//! type, so a large array costs its final form and no tree of JSON values. Before that, [`measure`] refuses what nests too deep
//! or has too many names and values for what is made of them. Invariant: [`Fields::finish`] fails while a field is left unread,
//! therefore nothing is ever accepted and ignored.
//!
//! Cost: linear in the body. A field is found by going along its object's names, of which there are a bounded number.

use std::borrow::Cow;
use std::collections::HashSet;
use std::fmt;

use serde::de::{Deserialize, MapAccess, Visitor};
use serde_json::value::RawValue;

use folio_text::work;

use crate::error::ApiError;
pub use measure::measure;

mod measure;

/// The fields of one JSON object, in order, not yet read.
pub struct Fields<'a> {
    fields: Vec<(Cow<'a, str>, &'a RawValue)>,
    /// Where this object sits in the request; empty for the request itself.
    path: String,
}

struct Object<'a>(Vec<(Cow<'a, str>, &'a RawValue)>);

impl<'de> Deserialize<'de> for Object<'de> {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct ObjectVisitor;
        impl<'de> Visitor<'de> for ObjectVisitor {
            type Value = Object<'de>;
            fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
                f.write_str("a JSON object")
            }
            fn visit_map<M: MapAccess<'de>>(self, mut map: M) -> Result<Object<'de>, M::Error> {
                let mut fields = Vec::new();
                while let Some(Key(key)) = map.next_key()? {
                    fields.push((key, map.next_value()?));
                }
                Ok(Object(fields))
            }
        }
        deserializer.deserialize_map(ObjectVisitor)
    }
}

/// A key, borrowed where it has no escapes.
struct Key<'a>(Cow<'a, str>);

impl<'de> Deserialize<'de> for Key<'de> {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct KeyVisitor;
        impl<'de> Visitor<'de> for KeyVisitor {
            type Value = Key<'de>;
            fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
                f.write_str("a field name")
            }
            fn visit_borrowed_str<E>(self, key: &'de str) -> Result<Key<'de>, E> {
                Ok(Key(Cow::Borrowed(key)))
            }
            fn visit_str<E>(self, key: &str) -> Result<Key<'de>, E> {
                Ok(Key(Cow::Owned(key.to_owned())))
            }
        }
        deserializer.deserialize_str(KeyVisitor)
    }
}

impl<'a> Fields<'a> {
    /// The fields of a request body. Errors carry line and column.
    pub fn of_body(body: &'a [u8]) -> Result<Self, ApiError> {
        if body.is_empty() {
            return Err(ApiError::bad_request("The request has no body; send one JSON object."));
        }
        measure(body)?;
        let object: Object = serde_json::from_slice(body).map_err(|error| {
            ApiError::bad_request(format!(
                "We could not parse the JSON body of your request: {error}. The body must be one JSON object."
            ))
        })?;
        Self::checked(object, String::new())
    }

    /// The fields of a nested object at `path`.
    pub fn of_value(value: &'a RawValue, path: String) -> Result<Self, ApiError> {
        let object: Object = parse(value, &path)?;
        Self::checked(object, path)
    }

    fn checked(object: Object<'a>, path: String) -> Result<Self, ApiError> {
        let fields = object.0;
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
    pub fn peek(&self, name: &str) -> Option<&'a RawValue> {
        let (_, value) = self.fields.iter().find(|(field, _)| field == name)?;
        (value.get() != "null").then_some(*value)
    }

    /// Takes a field as raw JSON; `null` counts as absent.
    pub fn raw(&mut self, name: &str) -> Option<&'a RawValue> {
        let index = self.fields.iter().position(|(field, _)| field == name);
        work::add(index.unwrap_or(self.fields.len()));
        let index = index?;
        let (_, value) = self.fields.remove(index);
        (value.get() != "null").then_some(value)
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
        let Some((name, _)) = self.fields.iter().find(|(_, value)| !is_empty(value)) else {
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

/// `null`, `[]` and `{}` ask for nothing: SDKs send them for parameters that are not used.
fn is_empty(value: &RawValue) -> bool {
    let mut text = value.get().bytes().filter(|byte| !byte.is_ascii_whitespace());
    match (text.next(), text.next(), text.next()) {
        (Some(b'['), Some(b']'), None) | (Some(b'{'), Some(b'}'), None) => true,
        _ => value.get() == "null",
    }
}

fn unrecognized(path: &str) -> ApiError {
    let message = format!("Unrecognized request argument supplied: {path}");
    ApiError { code: Some("unrecognized_parameter"), ..ApiError::invalid(path, message) }
}

fn join(path: &str, name: &str) -> String {
    if path.is_empty() { name.to_owned() } else { format!("{path}.{name}") }
}

/// Reads one raw value as `T`; errors name `path`.
pub fn parse<'a, T: Deserialize<'a>>(value: &'a RawValue, path: &str) -> Result<T, ApiError> {
    work::add(value.get().len());
    serde_json::from_str(value.get()).map_err(|error| {
        let text = error.to_string();
        let reason = in_json_words(text.split(" at line ").next().unwrap_or(&text));
        let message = format!("Invalid value for '{path}': {reason}.");
        ApiError { code: Some("invalid_type"), ..ApiError::invalid(path, message) }
    })
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
