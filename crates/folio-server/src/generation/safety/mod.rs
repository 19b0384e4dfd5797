//! What an operator does not let in or out: rules of the server itself, and a service that is asked (`docs/safety.md`).
//!
//! Owns: the verdict on a prompt before anything is computed, and on an answer before anybody reads it. Must never: log or
//! count by what a text says; the names of rules are the operator's.
//!
//! `rules` judge whole texts, [`gate`] answers that are being written, `callout` asks. A denied prompt is answered like an
//! answer without text that ended with `content_filter`, and the engine never hears of it; a denied answer is cut, and its
//! choice cancelled, while its siblings go on.

mod automaton;
mod callout;
mod declared;
mod escapes;
pub mod gate;
mod rules;

use std::sync::Arc;

use serde_json::{Map, Value};

pub use callout::{Answer, Callout, Mode, Texts, subject};
pub use rules::{Found, Keys, Rules};

use crate::api::error::ApiError;
use crate::api::openai::chat::Conversation;
use crate::app::State;
use crate::generation::generate::{Job, is_quick};
use crate::http::Arrival;

/// What was declared, ready to use. The default lets everything pass.
#[derive(Clone, Default)]
pub struct Safety {
    input: Option<Arc<Rules>>,
    output: Option<Arc<Rules>>,
    callout: Option<Arc<Callout>>,
}

impl std::fmt::Debug for Safety {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        write!(f, "Safety({self})")
    }
}

/// For people: how much there is of what.
impl std::fmt::Display for Safety {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        let rules = self.input.iter().chain(&self.output).map(|rules| rules.rules.len()).max().unwrap_or(0);
        match (rules, &self.callout) {
            (0, None) => f.write_str("no rules, no callout (--safety)"),
            (1, None) => f.write_str("1 rule, no callout"),
            (rules, None) => write!(f, "{rules} rules, no callout"),
            (rules, Some(callout)) => write!(f, "{rules} rules, {callout}"),
        }
    }
}

/// What is known about a prompt before it runs.
#[derive(Clone, Debug, Default)]
pub struct Screened {
    /// Nothing is generated for it.
    pub denied: bool,
    /// What the callout is to judge; `None`: it is not asked.
    pub subject: Option<Map<String, Value>>,
    /// What the answers' `safety` field says about it.
    pub notes: Option<Value>,
}

/// What the callout wants in the place of a prompt.
#[derive(Clone, Debug)]
pub enum Replacement {
    Messages(Vec<Value>),
    Prompt(String),
}

impl Safety {
    pub fn output(&self) -> Option<&Arc<Rules>> {
        self.output.as_ref()
    }

    /// The callout, where it judges answers.
    pub fn judge(&self) -> Option<&Arc<Callout>> {
        self.callout.as_ref().filter(|callout| callout.on.output)
    }

    fn asks_first(&self) -> Option<&Arc<Callout>> {
        self.callout.as_ref().filter(|callout| callout.on.input)
    }
}

/// Judges a conversation and puts into it what stands in the place of what was found.
pub fn screen_conversation(
    state: &State,
    arrival: &Arrival,
    conversation: &mut Conversation,
) -> Result<Screened, ApiError> {
    if let Some(Some(replacement)) = arrival.replaced.first() {
        let Replacement::Messages(messages) = replacement else {
            return Err(ApiError::internal("the safety callout replaced a prompt that is a conversation"));
        };
        conversation.messages = messages.clone();
    }
    let safety = &state.config.safety;
    let mut found = Found::default();
    if let Some(rules) = &safety.input {
        for message in &mut conversation.messages {
            rules.value(message, Keys::Fixed, &mut found);
        }
        for tool in conversation.tools.shown_mut() {
            rules.value(tool, Keys::Fixed, &mut found);
        }
        for (name, value) in conversation.kwargs.iter_mut() {
            let mut name = name.clone();
            rules.text(&mut name, &mut found);
            rules.value(value, Keys::All, &mut found);
        }
        count(state, rules, &found);
    }
    let denied = found.denied.is_some();
    let subject = (safety.asks_first().is_some() && !denied).then(|| {
        let tools = conversation.tools.shown().unwrap_or_default();
        Map::from_iter([
            ("messages".to_owned(), conversation.messages.clone().into()),
            ("tools".to_owned(), tools.into()),
        ])
    });
    Ok(Screened { denied, subject, notes: None })
}

/// Judges the text of prompt number `index`. Returns what stands in its place, where something does.
pub fn screen_prompt(
    state: &State,
    arrival: &Arrival,
    index: usize,
    text: impl FnOnce() -> String,
) -> Result<(Screened, Option<String>), ApiError> {
    let safety = &state.config.safety;
    let given = arrival.replaced.get(index).and_then(Option::as_ref);
    if safety.input.is_none() && safety.asks_first().is_none() && given.is_none() {
        return Ok((Screened::default(), None));
    }
    let mut text = text();
    let before = text.clone();
    match given {
        Some(Replacement::Prompt(prompt)) => text = prompt.clone(),
        Some(Replacement::Messages(_)) => {
            return Err(ApiError::internal("the safety callout replaced a prompt by a conversation"));
        }
        None => {}
    }
    let mut found = Found::default();
    if let Some(rules) = &safety.input {
        rules.text(&mut text, &mut found);
        count(state, rules, &found);
    }
    let denied = found.denied.is_some();
    let subject = (safety.asks_first().is_some() && !denied)
        .then(|| Map::from_iter([("prompt".to_owned(), text.as_str().into())]));
    Ok((Screened { denied, subject, notes: None }, (text != before).then_some(text)))
}

/// Judges a text that nothing is generated from, by the rules alone. Returns what stands in its place, where something does.
pub fn screen_input(
    state: &State,
    param: &str,
    text: impl FnOnce() -> String,
) -> Result<Option<String>, ApiError> {
    let Some(rules) = &state.config.safety.input else { return Ok(None) };
    let mut text = text();
    let before = text.clone();
    let mut found = Found::default();
    rules.text(&mut text, &mut found);
    count(state, rules, &found);
    match found.denied {
        Some(_) => {
            let message = format!("'{param}' has a text that this server does not take.");
            Err(ApiError { code: Some("content_filter"), ..ApiError::invalid(param, message) })
        }
        None => Ok((text != before).then_some(text)),
    }
}

fn count(state: &State, rules: &Rules, found: &Found) {
    for rule in &found.redacted {
        state.metrics.safety("input", rules.name(*rule), "redact");
    }
    if let Some(rule) = found.denied {
        state.metrics.safety("input", rules.name(rule), "deny");
    }
}

/// Prepares a request, asks the callout about its prompts, and prepares it again where that replaces one.
pub(crate) async fn prepared<T: AsMut<Job> + Send + 'static>(
    state: &Arc<State>,
    mut arrival: Arrival,
    prepare: fn(&State, &Arrival) -> Result<T, ApiError>,
) -> Result<T, ApiError> {
    let mut first = run(state, &arrival, prepare).await?;
    arrival.tenant.check_priority(first.as_mut().generation.priority)?;
    let Some(callout) = state.config.safety.asks_first() else { return Ok(first) };
    let mut prepared = first;
    let job = prepared.as_mut();
    let mut asked = Vec::new();
    for prompt in &mut job.prompts {
        asked.push(prompt.screened.subject.take().map(|subject| {
            let question = question(&job.asker, "input", subject);
            tokio::spawn(callout.clone().ask(question))
        }));
    }
    let mut verdicts = Vec::new();
    for asked in asked {
        verdicts.push(match asked {
            None => None,
            Some(asked) => Some(asked.await.unwrap_or(Err("it was lost"))),
        });
    }
    let mut told = Vec::new();
    for verdict in verdicts {
        let mut screened = Screened::default();
        let mut replacement = None;
        match verdict {
            None => {}
            Some(Ok(answer)) => {
                state.metrics.safety("input", "callout", answer.action());
                screened.notes = answer.notes();
                match answer.of_prompt() {
                    Ok(None) => {}
                    Ok(Some(wanted)) => replacement = Some(wanted),
                    Err(()) => screened.denied = true,
                }
            }
            Some(Err(reason)) => {
                state.metrics.safety("input", "callout", "failed");
                tracing::warn!(request = %arrival.id, reason, "the safety callout judged no prompt");
                if callout.fails_closed {
                    let message = "The prompt could not be checked, and this server answers no unchecked one; try again.";
                    return Err(ApiError::unavailable(message, 1));
                }
            }
        }
        told.push(screened);
        arrival.replaced.push(replacement);
    }
    if arrival.replaced.iter().any(Option::is_some) {
        prepared = run(state, &arrival, prepare).await?;
    }
    for (prompt, told) in prepared.as_mut().prompts.iter_mut().zip(told) {
        prompt.screened.denied |= told.denied;
        prompt.screened.notes = told.notes;
    }
    Ok(prepared)
}

async fn run<T: Send + 'static>(
    state: &Arc<State>,
    arrival: &Arrival,
    prepare: fn(&State, &Arrival) -> Result<T, ApiError>,
) -> Result<T, ApiError> {
    if is_quick(&arrival.body) && arrival.replaced.is_empty() {
        return prepare(state, arrival);
    }
    let (shared, arrival) = (state.clone(), arrival.clone());
    let (tenant, bytes) = (arrival.tenant.id, arrival.body.len());
    state.off_thread(tenant, bytes, move || prepare(&shared, &arrival)).await
}

/// A question to the callout.
pub fn question(asker: &Map<String, Value>, stage: &'static str, subject: Map<String, Value>) -> Value {
    let mut question = asker.clone();
    question.insert("stage".into(), stage.into());
    question.extend(subject);
    Value::Object(question)
}

/// Who asks for what.
pub fn asker(state: &State, arrival: &Arrival, api: &'static str) -> Map<String, Value> {
    let mut question = Map::new();
    question.insert("request_id".into(), arrival.id.as_str().into());
    question.insert("tenant".into(), (&*arrival.tenant.name).into());
    question.insert("model".into(), state.app.model.name().into());
    question.insert("api".into(), api.into());
    question
}
