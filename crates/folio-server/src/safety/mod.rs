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

pub use callout::{Callout, CalloutAnswer, Mode, Replacement, Texts, subject};
pub use rules::{Found, Keys, SafetyRules};

/// What was declared, ready to use. The default lets everything pass.
#[derive(Clone, Default)]
pub struct Safety {
    input: Option<Arc<SafetyRules>>,
    output: Option<Arc<SafetyRules>>,
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

impl Safety {
    pub fn input(&self) -> Option<&Arc<SafetyRules>> {
        self.input.as_ref()
    }

    pub fn output(&self) -> Option<&Arc<SafetyRules>> {
        self.output.as_ref()
    }

    /// The callout, where it judges answers.
    pub fn judge(&self) -> Option<&Arc<Callout>> {
        self.callout.as_ref().filter(|callout| callout.on.output)
    }

    /// Calls to the callout at once, each on a thread, while nobody calls.
    pub fn calls_at_once(&self) -> usize {
        self.callout.as_ref().map_or(0, |callout| callout.places.available_permits())
    }

    pub fn asks_first(&self) -> Option<&Arc<Callout>> {
        self.callout.as_ref().filter(|callout| callout.on.input)
    }
}

/// A question to the callout.
pub fn question(asker: &Map<String, Value>, stage: &'static str, subject: Map<String, Value>) -> Value {
    let mut question = asker.clone();
    question.insert("stage".into(), stage.into());
    question.extend(subject);
    Value::Object(question)
}
