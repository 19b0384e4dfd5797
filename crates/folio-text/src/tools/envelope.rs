//! `{"name": "f", "arguments": {...}}`, read as it is written.
//!
//! Owns: which key is which, in any order. Must never: accept an object that is no call: an unknown key, a name that is
//! none, or arguments that are no object make it text again, as early as that is known. Cost: constant per byte; only
//! arguments that come before the name are kept.

use super::format::NAME_MAX;
use super::json::{Feed, JsonScanner, unquoted};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum EnvelopeField {
    Name,
    Arguments,
    Id,
    /// `"type": "function"`
    Type,
    /// `"index": 0`
    Index,
}

#[derive(Clone, Debug)]
enum EnvelopeState {
    Open,
    FirstKey,
    Key,
    Colon(EnvelopeField),
    Value(EnvelopeField),
    /// A string that is a key, or a value that is not streamed, from this byte on.
    Skip {
        start: usize,
        scanner: JsonScanner,
        field: Option<EnvelopeField>,
    },
    After,
}

/// What the text so far means.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Progress {
    More,
    /// It is no call.
    Fail,
    /// The name is known and the arguments begin at the current byte.
    Stream,
    /// The object is over. These are its arguments, unless they were streamed.
    Done(Option<String>),
}

#[derive(Clone, Debug)]
pub struct Envelope {
    state: EnvelopeState,
    pub name: Option<String>,
    pub id: Option<String>,
    /// Arguments that are complete already.
    arguments: Option<String>,
    streamed: bool,
    /// A call without arguments is no call.
    strict: bool,
}

impl Envelope {
    pub fn new(strict: bool) -> Self {
        Self { state: EnvelopeState::Open, name: None, id: None, arguments: None, streamed: false, strict }
    }

    /// Reads on at `at`. The text from the object's start on must be there until the arguments are streamed.
    pub fn step(&mut self, text: &str, at: &mut usize) -> Progress {
        let bytes = text.as_bytes();
        while let Some(&byte) = bytes.get(*at) {
            if let EnvelopeState::Skip { start, scanner, field } = &mut self.state {
                let (start, field) = (*start, *field);
                match scanner.feed(byte) {
                    Feed::Part | Feed::Control => *at += 1,
                    Feed::Bad => return Progress::Fail,
                    fed => {
                        *at += usize::from(fed == Feed::Last);
                        let Some(next) = self.skipped(&text[start..*at], field) else {
                            return Progress::Fail;
                        };
                        self.state = next;
                    }
                }
                continue;
            }
            if byte.is_ascii_whitespace() {
                *at += 1;
                continue;
            }
            let skip = |field| EnvelopeState::Skip { start: *at, scanner: JsonScanner::default(), field };
            self.state = match (&self.state, byte) {
                (EnvelopeState::Open, b'{') => EnvelopeState::FirstKey,
                (EnvelopeState::FirstKey | EnvelopeState::Key, b'"') => {
                    self.state = skip(None);
                    continue;
                }
                (EnvelopeState::Colon(field), b':') => EnvelopeState::Value(*field),
                (EnvelopeState::Value(EnvelopeField::Arguments), b'{')
                    if self.name.is_some() && self.arguments.is_none() && !self.streamed =>
                {
                    self.streamed = true;
                    self.state = EnvelopeState::After;
                    return Progress::Stream;
                }
                (EnvelopeState::Value(field), _) => {
                    let fits = match field {
                        EnvelopeField::Name => byte == b'"',
                        EnvelopeField::Arguments => matches!(byte, b'{' | b'"' | b'n') && !self.streamed,
                        EnvelopeField::Id => true,
                        EnvelopeField::Type => byte == b'"',
                        EnvelopeField::Index => byte.is_ascii_digit(),
                    };
                    if !fits {
                        return Progress::Fail;
                    }
                    self.state = skip(Some(*field));
                    continue;
                }
                (EnvelopeState::After, b',') => EnvelopeState::Key,
                (EnvelopeState::After | EnvelopeState::FirstKey, b'}') => {
                    *at += 1;
                    return self.done();
                }
                _ => return Progress::Fail,
            };
            *at += 1;
        }
        Progress::More
    }

    fn done(&mut self) -> Progress {
        match (self.streamed, &self.name, self.arguments.take()) {
            (true, ..) => Progress::Done(None),
            (false, Some(_), Some(arguments)) => Progress::Done(Some(arguments)),
            (false, Some(_), None) if !self.strict => Progress::Done(Some("{}".into())),
            _ => Progress::Fail,
        }
    }

    /// A key or value is complete; what comes next.
    fn skipped(&mut self, text: &str, field: Option<EnvelopeField>) -> Option<EnvelopeState> {
        let Some(field) = field else {
            return Some(EnvelopeState::Colon(match unquoted(text)?.as_str() {
                "name" | "tool_name" | "function" => EnvelopeField::Name,
                "arguments" | "parameters" | "args" => EnvelopeField::Arguments,
                "id" | "tool_call_id" => EnvelopeField::Id,
                "type" => EnvelopeField::Type,
                "index" => EnvelopeField::Index,
                _ => return None,
            }));
        };
        match field {
            EnvelopeField::Name if self.name.is_none() => {
                let name = unquoted(text)?;
                if name.is_empty() || name.len() > NAME_MAX || name.chars().any(char::is_control) {
                    return None;
                }
                self.name = Some(name);
            }
            EnvelopeField::Arguments if self.arguments.is_none() => self.arguments = Some(arguments(text)?),
            // Twice.
            EnvelopeField::Name | EnvelopeField::Arguments => return None,
            EnvelopeField::Id => {
                self.id = self.id.take().or_else(|| unquoted(text).filter(|id| !id.is_empty()))
            }
            EnvelopeField::Type if text != "\"function\"" => return None,
            EnvelopeField::Type | EnvelopeField::Index => {}
        }
        Some(EnvelopeState::After)
    }
}

/// Arguments as the object they are; some models write them as a string, or `null` for none.
fn arguments(text: &str) -> Option<String> {
    match text.as_bytes().first()? {
        b'{' => Some(super::json::without_controls(text)),
        b'"' => {
            let inner = unquoted(text)?;
            let is_object =
                serde_json::from_str::<serde_json::Map<String, serde_json::Value>>(&inner).is_ok();
            match inner.trim().is_empty() {
                true => Some("{}".into()),
                false => is_object.then_some(inner),
            }
        }
        _ => Some("{}".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str, strict: bool) -> (Progress, Option<String>) {
        let mut envelope = Envelope::new(strict);
        let progress = envelope.step(text, &mut 0);
        (progress, envelope.name)
    }

    #[test]
    fn keys_come_in_any_order() {
        let done = |arguments: &str| (Progress::Done(Some(arguments.into())), Some("f".to_owned()));
        assert_eq!(read(r#"{"name": "f", "arguments": {"#, false), (Progress::Stream, Some("f".into())));
        assert_eq!(read(r#"{"arguments": {"a": "}"}, "name": "f"}"#, false), done(r#"{"a": "}"}"#));
        assert_eq!(read(r#"{"type": "function", "name": "f"}"#, false), done("{}"));
        assert_eq!(read(r#"{"name": "f", "parameters": "{\"a\": 1}"}"#, false), done(r#"{"a": 1}"#));
        assert_eq!(read(r#"{"name": "f", "args": null, "index": 3}"#, true), done("{}"));
    }

    #[test]
    fn what_is_no_call_fails_early() {
        for text in [
            r#"{"answer""#,
            "{}",
            "[",
            r#"{"name": 5"#,
            r#"{"name": "f", "arguments": ["#,
            r#"{"name": "f", "arguments": "no json"}"#,
            r#"{"name": ""}"#,
            r#"{"name": "f" "arguments"#,
            r#"{"name": "f", "name": "g""#,
            r#"{'name'"#,
        ] {
            assert_eq!(read(text, false).0, Progress::Fail, "{text}");
        }
        assert_eq!(read(r#"{"name": "f"}"#, true).0, Progress::Fail);
        assert_eq!(read(r#"{"name": "f", "#, false).0, Progress::More);
    }
}
