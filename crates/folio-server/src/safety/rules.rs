//! Rules: what must not be in a text, and what is done where it is.
//!
//! Owns: a whole text's verdict, and that of a conversation. The verdict of an answer that is being written is the [`gate`]'s.
//! Invariant: every text a model reads of a conversation is looked at: contents, reasoning, arguments, names, ids, tools and
//! the template's variables, each by itself. Where nothing can stand in the place of a match (a name, an id, a key), a rule
//! that replaces denies.
//!
//! [`gate`]: super::gate

use std::collections::BTreeSet;

use folio_api::ApiError;
use folio_api::events::TokenLogprobs;
use folio_api::fields::Json;
use folio_text::Tokenizer;
use serde_json::Value;

use super::automaton::{Automaton, Hit, hits_in};

/// The rules of one side: of prompts, or of answers.
#[derive(Default)]
pub struct SafetyRules {
    pub automata: Vec<Automaton>,
    /// By a rule's index; both sides have the same.
    pub rules: Vec<Rule>,
}

pub struct Rule {
    pub name: String,
    /// What stands in the place of a match; `None`: a match denies.
    pub replacement: Option<String>,
}

/// What was found in a prompt.
#[derive(Default)]
pub struct Found {
    /// Rules that replaced something.
    pub redacted: BTreeSet<usize>,
    /// The rule that denied it.
    pub denied: Option<usize>,
    /// How often something was replaced.
    replaced: usize,
    /// It is not to be read whole.
    pub refused: Option<ApiError>,
}

/// Names and ids; what they are is decided by whoever sent them, and something else depends on them.
const NAMES: &[&str] = &["name", "id", "tool_call_id"];
/// One of a few words that the server checked.
const WORDS: &[&str] = &["role", "type"];

/// Whose choice the keys of an object are.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Keys {
    /// An API's.
    Fixed,
    /// The client's; below it they are an API's again.
    Here,
    /// The client's, all the way down.
    All,
}

impl SafetyRules {
    pub fn denies(&self, rule: usize) -> bool {
        self.rules[rule].replacement.is_none()
    }

    pub fn replacement(&self, rule: usize) -> &str {
        self.rules[rule].replacement.as_deref().unwrap_or_default()
    }

    pub fn name(&self, rule: usize) -> &str {
        &self.rules[rule].name
    }

    /// The first rule that matches anything in a text.
    pub fn first_in(&self, text: &str) -> Option<usize> {
        hits_in(&self.automata, text).into_iter().map(|hit| hit.rule).min()
    }

    /// Leaves out alternatives to a token that are matches themselves.
    pub fn prune(&self, logprobs: &mut TokenLogprobs, tokenizer: &Tokenizer) {
        let clean = |id: u32| self.first_in(&String::from_utf8_lossy(tokenizer.token_bytes(id))).is_none();
        logprobs.top.retain(|(id, _)| clean(*id));
    }

    /// Looks through a text and replaces in it what is to be replaced.
    pub fn text(&self, text: &mut String, found: &mut Found) {
        let mut replaced = Vec::new();
        for hit in hits_in(&self.automata, text) {
            match self.denies(hit.rule) {
                true => found.denied = found.denied.or(Some(hit.rule)),
                false => merge(&mut replaced, hit),
            }
        }
        found.replaced += replaced.len();
        for hit in replaced.iter().rev() {
            found.redacted.insert(hit.rule);
            let range = hit.range.start as usize..hit.range.end as usize;
            text.replace_range(range, self.replacement(hit.rule));
        }
    }

    /// Looks through a value of a conversation: messages, tools, variables.
    pub fn value(&self, value: &mut Value, keys: Keys, found: &mut Found) {
        match value {
            Value::String(text) => self.text(text, found),
            Value::Array(items) => items.iter_mut().for_each(|item| self.value(item, keys, found)),
            Value::Object(fields) => {
                for (key, value) in fields.iter_mut() {
                    if keys != Keys::Fixed {
                        self.fixed(key, found);
                    }
                    let below = match keys {
                        Keys::All => Keys::All,
                        _ if key == "properties" => Keys::Here,
                        _ => Keys::Fixed,
                    };
                    match value {
                        Value::String(text) if keys == Keys::Fixed && NAMES.contains(&key.as_str()) => {
                            self.fixed(text, found);
                        }
                        Value::String(_) if keys == Keys::Fixed && WORDS.contains(&key.as_str()) => {}
                        Value::String(text) if key == "arguments" => self.arguments(text, found),
                        value => self.value(value, below, found),
                    }
                }
            }
            Value::Number(_) | Value::Bool(_) | Value::Null => {}
        }
    }

    /// A text in which nothing can be replaced.
    fn fixed(&self, text: &str, found: &mut Found) {
        found.denied = found.denied.or_else(|| self.first_in(text));
    }

    /// JSON as text, within the limits of a request's: its strings are read as what they stand for, and it stays as it is where nothing is
    /// replaced.
    fn arguments(&self, text: &mut String, found: &mut Found) {
        match Json::within::<Value>(text.as_bytes()) {
            Err(refused) => found.refused = Some(refused),
            Ok(Err(_)) => {}
            Ok(Ok(mut value)) => {
                let before = found.replaced;
                self.value(&mut value, Keys::All, found);
                if found.replaced > before {
                    *text = value.to_string();
                }
            }
        }
        // What the strings are not: numbers, and whatever reaches from one value into the next.
        self.text(text, found);
    }
}

/// Adds a range to disjoint, ascending ones; overlapping ones become one, with the rule of the first.
pub fn merge(replaced: &mut Vec<Hit>, mut hit: Hit) {
    let range = hit.range.clone();
    let overlaps = |other: &Hit| other.range.start < range.end && range.start < other.range.end;
    let from = replaced.partition_point(|other| !overlaps(other) && other.range.start < range.start);
    let to = from + replaced[from..].iter().take_while(|other| overlaps(other)).count();
    for other in replaced.drain(from..to) {
        if (other.range.start, other.rule) < (hit.range.start, hit.rule) {
            hit.rule = other.rule;
        }
        hit.range = hit.range.start.min(other.range.start)..hit.range.end.max(other.range.end);
    }
    replaced.insert(from, hit);
}
