//! A JSON value of a request, read in one pass over its text and never beyond its limits.
//!
//! Owns: the limits on nesting, on the names of one object, and on values, which are counted while the value is built. Strings without
//! escapes stay slices of the text, and a value is moved into what a reader asks for. A value may take a hundred bytes in memory where the
//! text has two; token ids take four and are not counted, where a request has a list of them. Cost: one pass over the bytes.

use std::borrow::Cow;
use std::fmt;

use folio_text::work;
use serde::Deserialize;
use serde::de::value::{MapDeserializer, SeqDeserializer};
use serde::de::{
    DeserializeSeed, Deserializer, Error as _, IntoDeserializer, MapAccess, SeqAccess, Unexpected, Visitor,
};
use serde::forward_to_deserialize_any;
use serde_json::{Error, Number};

use crate::error::ApiError;

/// Objects and lists inside each other.
pub const NESTING_MAX: usize = 100;
/// Names in one object.
pub const NAMES_MAX: usize = 4096;
/// Names and values of a text together, token ids not counted.
pub const VALUES_MAX: usize = 1 << 18;

/// Fields of a request that are lists of token ids.
const TOKEN_LISTS: [&str; 4] = ["prompt", "input", "tokens", "token_ids"];

/// A value, with an object's fields in order. Names may be given twice.
#[derive(Clone, Debug)]
pub enum Json<'a> {
    Null,
    Bool(bool),
    Number(Number),
    String(Cow<'a, str>),
    List(Vec<Json<'a>>),
    /// A list of numbers in a field that may have token ids.
    Ids(Vec<u32>),
    Object(Vec<(Cow<'a, str>, Json<'a>)>),
}

impl<'a> Json<'a> {
    /// Reads a text. The outer error: it holds more than the limits; the inner one: it is no JSON.
    pub fn read(text: &'a [u8]) -> Result<Result<Self, Error>, ApiError> {
        Self::of_text(text, true)
    }

    /// The same for a text that stands in a request, as a value. Nothing in it is a list of token ids.
    pub fn within<T: Deserialize<'a>>(text: &'a [u8]) -> Result<Result<T, Error>, ApiError> {
        Ok(Self::of_text(text, false)?.and_then(T::deserialize))
    }

    fn of_text(text: &'a [u8], ids: bool) -> Result<Result<Self, Error>, ApiError> {
        work::add(text.len());
        let mut deserializer = serde_json::Deserializer::from_slice(text);
        Self::within_limits(&mut deserializer, ids).map(|read| {
            let json = read?;
            deserializer.end()?;
            Ok(json)
        })
    }

    /// The same for a value that is in memory.
    pub fn of_value(value: &'a serde_json::Value) -> Result<Self, ApiError> {
        Self::within_limits(value, true)?.map_err(|error| ApiError::internal(error.to_string()))
    }

    fn within_limits<D: Deserializer<'a, Error = Error>>(
        from: D,
        ids: bool,
    ) -> Result<Result<Self, Error>, ApiError> {
        let mut reader = ValueReader { depth: 0, values: 0, ids, tokens: false, exceeded: None };
        let json = reader.deserialize(from);
        match reader.exceeded {
            None => Ok(json),
            Some(limit) => {
                let message =
                    format!("The JSON of this request has {limit}, which is more than this server reads.");
                Err(ApiError { code: Some("too_complex"), ..ApiError::bad_request(message) })
            }
        }
    }

    pub fn is_list(&self) -> bool {
        matches!(self, Self::List(_) | Self::Ids(_))
    }

    /// `null`, `[]` and `{}`.
    pub fn is_empty(&self) -> bool {
        match self {
            Self::Null => true,
            Self::List(list) => list.is_empty(),
            Self::Ids(ids) => ids.is_empty(),
            Self::Object(fields) => fields.is_empty(),
            _ => false,
        }
    }

    /// Bytes as JSON without spaces, escapes not counted.
    pub fn bytes(&self) -> usize {
        match self {
            Self::Null | Self::Bool(_) => 4,
            Self::Number(number) => number.to_string().len(),
            Self::String(text) => text.len() + 2,
            Self::List(list) => 1 + list.iter().map(|value| value.bytes() + 1).sum::<usize>(),
            Self::Ids(ids) => {
                1 + ids.iter().map(|id| id.checked_ilog10().unwrap_or(0) as usize + 2).sum::<usize>()
            }
            Self::Object(fields) => {
                1 + fields.iter().map(|(name, value)| name.len() + 4 + value.bytes()).sum::<usize>()
            }
        }
    }

    /// What it is, for a reader that wanted something else.
    pub fn unexpected(&self) -> Unexpected<'_> {
        match self {
            Self::Null => Unexpected::Unit,
            Self::Bool(value) => Unexpected::Bool(*value),
            Self::Number(number) => match (number.as_u64(), number.as_i64()) {
                (Some(number), _) => Unexpected::Unsigned(number),
                (None, Some(number)) => Unexpected::Signed(number),
                (None, None) => Unexpected::Float(number.as_f64().unwrap_or_default()),
            },
            Self::String(text) => Unexpected::Str(text),
            Self::List(_) | Self::Ids(_) => Unexpected::Seq,
            Self::Object(_) => Unexpected::Map,
        }
    }
}

/// Builds a value and counts what it holds. What is moved is work.
struct ValueReader {
    depth: usize,
    values: usize,
    /// There may be lists of token ids.
    ids: bool,
    /// Inside a field that may be a list of token ids, and of nothing but lists.
    tokens: bool,
    /// The limit that was met.
    exceeded: Option<String>,
}

impl ValueReader {
    fn count<E: serde::de::Error>(&mut self, values: usize) -> Result<(), E> {
        self.values += values;
        work::add(size_of::<Json>());
        match self.values > VALUES_MAX {
            true => Err(self.exceed(format!("more than {VALUES_MAX} names and values"))),
            false => Ok(()),
        }
    }

    fn open<E: serde::de::Error>(&mut self) -> Result<(), E> {
        self.count(1)?;
        if self.depth == NESTING_MAX {
            return Err(self.exceed(format!("more than {NESTING_MAX} objects and lists inside each other")));
        }
        self.depth += 1;
        Ok(())
    }

    fn exceed<E: serde::de::Error>(&mut self, limit: String) -> E {
        self.exceeded = Some(limit);
        E::custom("too much")
    }

    /// A list of ids, or a list of such lists.
    fn in_token_list(&self) -> bool {
        self.tokens && (2..=3).contains(&self.depth)
    }
}

impl<'de> DeserializeSeed<'de> for &mut ValueReader {
    type Value = Json<'de>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Json<'de>, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for &mut ValueReader {
    type Value = Json<'de>;

    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("a JSON value")
    }

    fn visit_unit<E: serde::de::Error>(self) -> Result<Json<'de>, E> {
        self.count(1)?;
        Ok(Json::Null)
    }

    fn visit_bool<E: serde::de::Error>(self, value: bool) -> Result<Json<'de>, E> {
        self.count(1)?;
        Ok(Json::Bool(value))
    }

    fn visit_u64<E: serde::de::Error>(self, number: u64) -> Result<Json<'de>, E> {
        let id = self.in_token_list() && u32::try_from(number).is_ok();
        self.count(usize::from(!id))?;
        Ok(Json::Number(number.into()))
    }

    fn visit_i64<E: serde::de::Error>(self, number: i64) -> Result<Json<'de>, E> {
        self.count(1)?;
        Ok(Json::Number(number.into()))
    }

    fn visit_f64<E: serde::de::Error>(self, number: f64) -> Result<Json<'de>, E> {
        self.count(1)?;
        Number::from_f64(number).map(Json::Number).ok_or_else(|| E::custom("number out of range"))
    }

    fn visit_borrowed_str<E: serde::de::Error>(self, text: &'de str) -> Result<Json<'de>, E> {
        self.count(1)?;
        Ok(Json::String(Cow::Borrowed(text)))
    }

    fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<Json<'de>, E> {
        self.count(1)?;
        Ok(Json::String(Cow::Owned(text.to_owned())))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Json<'de>, A::Error> {
        self.open()?;
        let (mut ids, mut list) = (Vec::new(), Vec::new());
        while let Some(json) = seq.next_element_seed(&mut *self)? {
            let id = match &json {
                Json::Number(number) if list.is_empty() && self.in_token_list() => number.as_u64(),
                _ => None,
            };
            if let Some(id) = id.and_then(|id| u32::try_from(id).ok()) {
                ids.push(id);
                continue;
            }
            // They take as much as other values from here on, those that follow too.
            self.count(ids.len())?;
            self.tokens &= ids.is_empty() && json.is_list();
            list.extend(std::mem::take(&mut ids).into_iter().map(|id| Json::Number(id.into())));
            list.push(json);
        }
        self.depth -= 1;
        Ok(if list.is_empty() && !ids.is_empty() { Json::Ids(ids) } else { Json::List(list) })
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Json<'de>, A::Error> {
        self.open()?;
        let outside = std::mem::replace(&mut self.tokens, false);
        let mut fields = Vec::new();
        while let Some(name) = map.next_key_seed(Name)? {
            if fields.len() == NAMES_MAX {
                return Err(self.exceed(format!("an object with more than {NAMES_MAX} names")));
            }
            self.count(1)?;
            self.tokens = self.ids && self.depth == 1 && TOKEN_LISTS.contains(&&*name);
            fields.push((name, map.next_value_seed(&mut *self)?));
        }
        self.tokens = outside;
        self.depth -= 1;
        Ok(Json::Object(fields))
    }
}

/// A field's name, borrowed where it has no escapes.
struct Name;

impl<'de> DeserializeSeed<'de> for Name {
    type Value = Cow<'de, str>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Cow<'de, str>, D::Error> {
        deserializer.deserialize_str(self)
    }
}

impl<'de> Visitor<'de> for Name {
    type Value = Cow<'de, str>;

    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("a field name")
    }

    fn visit_borrowed_str<E>(self, name: &'de str) -> Result<Cow<'de, str>, E> {
        Ok(Cow::Borrowed(name))
    }

    fn visit_str<E>(self, name: &str) -> Result<Cow<'de, str>, E> {
        Ok(Cow::Owned(name.to_owned()))
    }
}

impl<'de> Deserializer<'de> for Json<'de> {
    type Error = Error;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        fn list<'de, I: IntoDeserializer<'de, Error>, V: Visitor<'de>>(
            list: Vec<I>,
            visitor: V,
        ) -> Result<V::Value, Error> {
            let mut list = SeqDeserializer::new(list.into_iter());
            let value = visitor.visit_seq(&mut list)?;
            list.end()?;
            Ok(value)
        }
        work::add(size_of::<Self>());
        match self {
            Self::Null => visitor.visit_unit(),
            Self::Bool(value) => visitor.visit_bool(value),
            Self::Number(number) => number.deserialize_any(visitor),
            Self::String(Cow::Borrowed(text)) => visitor.visit_borrowed_str(text),
            Self::String(Cow::Owned(text)) => visitor.visit_string(text),
            Self::List(values) => list(values, visitor),
            Self::Ids(ids) => list(ids, visitor),
            Self::Object(fields) => {
                let mut fields = MapDeserializer::new(fields.into_iter());
                let value = visitor.visit_map(&mut fields)?;
                fields.end()?;
                Ok(value)
            }
        }
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        match self {
            Self::Null => visitor.visit_none(),
            some => visitor.visit_some(some),
        }
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(
        self,
        _: &'static str,
        visitor: V,
    ) -> Result<V::Value, Error> {
        visitor.visit_newtype_struct(self)
    }

    forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf unit unit_struct seq tuple
        tuple_struct map struct enum identifier ignored_any
    }
}

impl<'de> IntoDeserializer<'de, Error> for Json<'de> {
    type Deserializer = Self;

    fn into_deserializer(self) -> Self {
        self
    }
}

/// That a value is something else than what was wanted.
pub(super) fn mistyped(json: &Json, expected: &str) -> Error {
    Error::invalid_type(json.unexpected(), &expected)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(text: &str) -> Option<String> {
        Json::read(text.as_bytes()).err().map(|error| error.message)
    }

    #[test]
    fn what_is_within_every_limit_passes_and_one_more_does_not() {
        let nested = |depth: usize| format!("{}{}", "[".repeat(depth), "]".repeat(depth));
        assert_eq!(refused(&nested(NESTING_MAX)), None);
        assert!(refused(&nested(NESTING_MAX + 1)).unwrap().contains("inside each other"));
        let named = |names: usize| {
            let fields: Vec<String> = (0..names).map(|at| format!("\"k{at}\":0")).collect();
            format!("{{\"a\":{{{}}},\"b\":{{}}}}", fields.join(","))
        };
        assert_eq!(refused(&named(NAMES_MAX)), None);
        assert!(refused(&named(NAMES_MAX + 1)).unwrap().contains("names"));
        let list = |values: usize| format!("{{\"a\":[{}]}}", vec!["1"; values].join(","));
        // The object, the name and the list are three of them.
        assert_eq!(refused(&list(VALUES_MAX - 3)), None);
        assert!(refused(&list(VALUES_MAX - 2)).unwrap().contains("values"));
    }

    #[test]
    fn token_ids_are_not_counted_and_nothing_else_passes_for_them() {
        let ids = vec!["17"; 2 * VALUES_MAX].join(", ");
        for body in [format!("{{\"prompt\": [{ids}]}}"), format!("{{\"input\": [[1], [{ids}]], \"n\": 1}}")] {
            assert_eq!(refused(&body), None);
        }
        for body in [
            format!("{{\"x\": {{\"prompt\": [{ids}]}}}}"),
            format!("{{\"prompt\": 1, \"x\": [{ids}]}}"),
            format!("{{\"x\": [\"prompt\", {ids}]}}"),
            format!("{{\"input\": [{{\"summary\": [{ids}]}}]}}"),
            format!("{{\"input\": [[[{ids}]]]}}"),
            format!("{{\"prompt\": [{}]}}", vec!["\"a\""; 2 * VALUES_MAX].join(",")),
            format!("{{\"prompt\": [{}]}}", vec!["[]"; 2 * VALUES_MAX].join(",")),
            format!("[{ids}]"),
        ] {
            assert!(refused(&body).is_some(), "{}", &body[..40]);
        }
    }

    #[test]
    fn nothing_inside_of_a_text_of_a_request_is_a_token_id() {
        let of = |count: usize| format!("{{\"tokens\":[{}]}}", vec!["1"; count].join(","));
        let within = |text: &str| Json::within::<serde_json::Value>(text.as_bytes()).map(Result::unwrap);
        assert_eq!(within(&of(3)).unwrap(), serde_json::json!({"tokens": [1, 1, 1]}));
        assert_eq!(within(&of(VALUES_MAX)).unwrap_err().code, Some("too_complex"));
    }

    #[test]
    fn a_text_that_is_no_json_is_an_error_of_its_own() {
        for text in [
            "",
            "\"",
            "\"\\",
            "}}}]",
            ":::",
            "{\"a",
            "nul",
            "\u{1}\u{1}",
            "{\"a\\\"\":1",
            "{} x",
            "\"\u{1}\"",
        ] {
            assert!(Json::read(text.as_bytes()).unwrap().is_err(), "{text}");
        }
    }

    #[test]
    fn nothing_is_read_beyond_a_limit() {
        // What follows would be an error of syntax.
        let text = format!("{{\"a\":{}}}{{", "[".repeat(2 * NESTING_MAX));
        assert!(refused(&text).unwrap().contains("inside each other"));
        let text = format!("{{\"a\":[{}nul", "1,".repeat(VALUES_MAX));
        assert!(refused(&text).unwrap().contains("values"));
    }

    #[test]
    fn a_long_list_of_ids_with_something_else_in_it_counts_in_whole() {
        let ids = vec!["1"; VALUES_MAX].join(",");
        assert_eq!(refused(&format!("{{\"prompt\":[{ids}]}}")), None);
        for odd in ["\"a\"", "-1", "1.5", "4294967296", "[]", "null"] {
            assert!(refused(&format!("{{\"prompt\":[{ids},{odd}]}}")).is_some(), "{odd}");
            assert!(refused(&format!("{{\"prompt\":[{odd},{ids}]}}")).is_some(), "{odd}");
        }
    }

    #[test]
    fn a_value_is_read_as_serde_json_reads_it() {
        let text = r#"{"a\n": [1, -2, 0.5, 1e3, "x", "\u00e9\n", null, true, {}, []], "prompt": [1, 2], "input": [1, "b"], "tokens": [[3], []]}"#;
        let json = Json::read(text.as_bytes()).unwrap().unwrap();
        let read: serde_json::Value = serde::Deserialize::deserialize(json.clone()).unwrap();
        assert_eq!(read, serde_json::from_str::<serde_json::Value>(text).unwrap());
        let Json::Object(fields) = json else { panic!("an object") };
        assert!(matches!(&fields[1].1, Json::Ids(ids) if *ids == [1, 2]));
        for text in ["[0,9,10,4294967295]", "[]", r#"{"a":[1.5,null]}"#] {
            let body = format!(r#"{{"prompt":{text}}}"#);
            let Json::Object(fields) = Json::read(body.as_bytes()).unwrap().unwrap() else { panic!() };
            let bytes = fields[0].1.bytes();
            // An empty list or object counts one less.
            assert!((text.len() - 1..=text.len()).contains(&bytes), "{text}: {bytes}");
        }
    }
}
