//! The service that is asked: one `POST` for each prompt and each answer.
//!
//! Owns: the question's way there and the answer's way back, their time limit, and how many are on their way at once. Must
//! never: hold an async thread, log what is asked or the secret, follow a redirect.
//!
//! Invariant: [`Callout::ask`] returns within the time limit, waiting in line included, whatever the service does. A call that is
//! given up keeps its place among those at once until its own limit ends it, so a service that hangs is not flooded.

use std::sync::Arc;
use std::time::Duration;

use folio_text::OutputEvent;
use serde::Deserialize;
use serde_json::{Map, Value, json};
use tokio::sync::Semaphore;

/// Bytes of an answer beyond four times those of the question.
const ANSWER_BYTES: u64 = 1 << 20;

/// Which side something judges.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sides {
    pub input: bool,
    pub output: bool,
}

/// How an answer that is streamed is judged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// It is held back until it is complete.
    Hold,
    /// It is judged whenever this many more characters were written, with so many before them.
    Window { characters: usize, overlap: usize },
}

/// See the module documentation.
pub struct Callout {
    pub url: String,
    pub on: Sides,
    pub timeout: Duration,
    pub fails_closed: bool,
    pub mode: Mode,
    /// A header's name and value.
    pub secret: Option<(String, String)>,
    pub agent: ureq::Agent,
    pub places: Arc<Semaphore>,
}

/// What the service answered.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CalloutAnswer {
    action: CalloutAction,
    messages: Option<Vec<Value>>,
    prompt: Option<String>,
    text: Option<String>,
    reasoning: Option<String>,
    arguments: Option<Vec<String>>,
    annotations: Option<Map<String, Value>>,
    reason: Option<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
enum CalloutAction {
    Allow,
    Deny,
    Redact,
    Annotate,
}

/// What is wanted in the place of a prompt.
#[derive(Clone, Debug)]
pub enum Replacement {
    Messages(Vec<Value>),
    Prompt(String),
}

/// What stands in the place of an answer's texts; `None`: the text stays.
#[derive(Debug, Default, PartialEq)]
pub struct Texts {
    pub text: Option<String>,
    pub reasoning: Option<String>,
    /// One for each call.
    pub arguments: Option<Vec<String>>,
}

impl CalloutAnswer {
    fn parse(bytes: &[u8], stage: &str) -> Result<Self, &'static str> {
        let answer: Self = serde_json::from_slice(bytes).map_err(|_| "its answer was no verdict")?;
        let of_input = answer.messages.is_some() || answer.prompt.is_some();
        let of_output = answer.text.is_some() || answer.reasoning.is_some() || answer.arguments.is_some();
        let fits = match (answer.action, stage) {
            (CalloutAction::Redact, "input") => of_input && !of_output,
            (CalloutAction::Redact, _) => of_output && !of_input,
            _ => !of_input && !of_output,
        };
        if fits { Ok(answer) } else { Err("its answer's texts do not go with the action and stage") }
    }

    /// For the figures.
    pub fn action(&self) -> &'static str {
        match self.action {
            CalloutAction::Allow => "allow",
            CalloutAction::Deny => "deny",
            CalloutAction::Redact => "redact",
            CalloutAction::Annotate => "annotate",
        }
    }

    /// What the client is told about it.
    pub fn notes(&self) -> Option<Value> {
        let mut notes = Map::new();
        notes.extend(self.annotations.clone().map(|map| ("annotations".to_owned(), Value::Object(map))));
        notes.extend(self.reason.clone().map(|reason| ("reason".to_owned(), reason.into())));
        if notes.is_empty() {
            return None;
        }
        let mut all = Map::from_iter([("action".to_owned(), Value::from(self.action()))]);
        all.append(&mut notes);
        Some(Value::Object(all))
    }

    /// What stands in a prompt's place; an error: it is denied.
    pub fn of_prompt(self) -> Result<Option<Replacement>, ()> {
        match (self.action, self.messages, self.prompt) {
            (CalloutAction::Deny, ..) => Err(()),
            (_, Some(messages), _) => Ok(Some(Replacement::Messages(messages))),
            (_, _, Some(prompt)) => Ok(Some(Replacement::Prompt(prompt))),
            _ => Ok(None),
        }
    }

    /// What stands in an answer's place; an error: it is denied.
    pub fn of_answer(self) -> Result<Texts, ()> {
        match self.action {
            CalloutAction::Deny => Err(()),
            _ => Ok(Texts { text: self.text, reasoning: self.reasoning, arguments: self.arguments }),
        }
    }
}

/// For people.
impl std::fmt::Display for Callout {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        let way = if self.fails_closed { "closed" } else { "open" };
        write!(f, "a callout to {} that fails {way}", self.url)
    }
}

impl Callout {
    /// The verdict, or why there is none: words without any text of the request.
    pub async fn ask(self: Arc<Self>, question: Value) -> Result<CalloutAnswer, &'static str> {
        let limit = self.timeout;
        let asked = async move {
            let place = self.places.clone().acquire_owned().await.map_err(|_| "the server is ending")?;
            let called = tokio::task::spawn_blocking(move || {
                let _place = place;
                self.call(&question)
            });
            called.await.unwrap_or(Err("the call broke"))
        };
        tokio::time::timeout(limit, asked).await.unwrap_or(Err("it took longer than timeout_ms"))
    }

    fn call(&self, question: &Value) -> Result<CalloutAnswer, &'static str> {
        let body = question.to_string();
        let mut request = self.agent.post(&self.url).header("content-type", "application/json");
        if let Some((name, value)) = &self.secret {
            request = request.header(name, value);
        }
        let limit = ANSWER_BYTES + 4 * body.len() as u64;
        let mut response = request.send(body.as_bytes()).map_err(|error| match error {
            ureq::Error::Timeout(_) => "it took longer than timeout_ms",
            ureq::Error::HostNotFound => "its host is not known",
            ureq::Error::ConnectionFailed => "it cannot be reached",
            ureq::Error::Io(_) => "the connection to it broke",
            ureq::Error::Tls(_) => "the TLS handshake with it failed",
            _ => "it could not be asked",
        })?;
        if response.status().as_u16() != 200 {
            return Err("it answered with another status than 200");
        }
        let answer = response.body_mut().with_config().limit(limit).read_to_vec();
        let answer = answer.map_err(|_| "its answer was cut off, late or too long")?;
        CalloutAnswer::parse(&answer, question["stage"].as_str().unwrap_or_default())
    }
}

/// An answer's texts, for the question; `finish_reason`: where it is complete.
pub fn subject(choice: u32, pieces: &[OutputEvent], finish_reason: Option<&str>) -> Map<String, Value> {
    #[derive(Default)]
    struct Call<'a> {
        begun: Option<(&'a str, &'a str)>,
        arguments: String,
    }
    let (mut text, mut reasoning) = (String::new(), String::new());
    let mut calls: Vec<(u32, Call)> = Vec::new();
    for piece in pieces {
        let (at, begun, arguments) = match piece {
            OutputEvent::Content(more) => {
                text.push_str(more);
                continue;
            }
            OutputEvent::Reasoning(more) => {
                reasoning.push_str(more);
                continue;
            }
            OutputEvent::CallStarted { index, id, name } => (*index, Some((id.as_str(), name.as_str())), ""),
            OutputEvent::Arguments { index, text } => (*index, None, text.as_str()),
            OutputEvent::CallEnded { .. } => continue,
        };
        let known = calls.iter().position(|(index, _)| *index == at);
        let place = known.unwrap_or_else(|| {
            calls.push((at, Call::default()));
            calls.len() - 1
        });
        let call = &mut calls[place].1;
        call.begun = call.begun.or(begun);
        call.arguments.push_str(arguments);
    }
    let calls = calls.into_iter().map(|(_, call)| {
        let (id, name) = call.begun.unzip();
        json!({"id": id, "name": name, "arguments": call.arguments})
    });
    let calls: Vec<Value> = calls.collect();
    Map::from_iter([
        ("choice".to_owned(), choice.into()),
        ("text".to_owned(), text.into()),
        ("reasoning".to_owned(), reasoning.into()),
        ("tool_calls".to_owned(), calls.into()),
        ("finish_reason".to_owned(), finish_reason.into()),
    ])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn verdicts_are_strict() {
        let parse = |text: &str, stage| CalloutAnswer::parse(text.as_bytes(), stage);
        assert_eq!(parse(r#"{"action": "allow"}"#, "input").unwrap().notes(), None);
        let told =
            parse(r#"{"action": "annotate", "annotations": {"risk": 1}, "reason": "r"}"#, "output").unwrap();
        assert_eq!(
            told.notes().unwrap(),
            json!({"action": "annotate", "annotations": {"risk": 1}, "reason": "r"})
        );
        assert!(parse(r#"{"action": "redact", "text": "x"}"#, "output").is_ok());
        assert!(parse(r#"{"action": "redact", "prompt": "x"}"#, "input").is_ok());
        for (text, stage) in [
            (r#"{"action": "redact"}"#, "output"),
            (r#"{"action": "redact", "text": "x"}"#, "input"),
            (r#"{"action": "redact", "messages": []}"#, "output"),
            (r#"{"action": "allow", "text": "x"}"#, "output"),
            (r#"{"action": "permit"}"#, "output"),
            (r#"{"action": "allow", "anotations": {}}"#, "output"),
            ("nonsense", "output"),
            ("", "output"),
        ] {
            assert!(parse(text, stage).is_err(), "{text} at {stage}");
        }
    }
}
