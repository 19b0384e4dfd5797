//! The declaration of `safety`, as JSON: a file of its own (`--safety`), or a section of the configuration file.
//!
//! Owns: the format, and every way in which one can be wrong. Must never: read a file or the environment itself, or show the
//! secret. Every mistake is named by its path.

use std::collections::HashSet;
use std::fmt::Display;
use std::sync::Arc;
use std::time::Duration;

use serde::Deserialize;
use tokio::sync::Semaphore;

use super::Safety;
use super::automaton::{Automaton, LONGEST_MAX};
use super::callout::{Callout, Mode, Sides};
use super::rules::{Rule, SafetyRules};
use crate::error::ServerError;

const RULES_MAX: usize = 256;
const PATTERNS_MAX: usize = 10_000;
const STRING_BYTES_MAX: usize = 1024;
const REPLACEMENT: &str = "[redacted]";
const TIMEOUT_MS: u64 = 2_000;
const TIMEOUT_MS_MAX: u64 = 120_000;
const CONCURRENCY: usize = 16;
const CONCURRENCY_MAX: usize = 256;
const WINDOW_MAX: usize = 1 << 20;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RulesFile {
    #[serde(default)]
    rules: Vec<RuleEntry>,
    callout: Option<CalloutEntry>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RuleEntry {
    name: String,
    #[serde(default)]
    strings: Vec<String>,
    #[serde(default)]
    ignore_case: bool,
    #[serde(default)]
    regexes: Vec<String>,
    max_bytes: Option<usize>,
    #[serde(default)]
    on: On,
    action: ActionEntry,
    replacement: Option<String>,
}

#[derive(Clone, Copy, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
enum ActionEntry {
    Deny,
    Redact,
}

#[derive(Clone, Copy, Default, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
enum On {
    Input,
    Output,
    #[default]
    Both,
}

impl On {
    fn sides(self) -> Sides {
        Sides { input: self != Self::Output, output: self != Self::Input }
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct CalloutEntry {
    url: String,
    #[serde(default)]
    on: On,
    timeout_ms: Option<u64>,
    on_failure: OnFailure,
    concurrency: Option<usize>,
    secret_env: Option<String>,
    secret_header: Option<String>,
    #[serde(default)]
    stream: StreamEntry,
    window: Option<usize>,
    overlap: Option<usize>,
}

/// There is no default: what is worse, an unchecked text or none, is the operator's to say.
#[derive(Clone, Copy, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
enum OnFailure {
    Open,
    Closed,
}

#[derive(Clone, Copy, Default, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
enum StreamEntry {
    #[default]
    Hold,
    Window,
}

fn wrong(path: impl Display, reason: impl Display) -> ServerError {
    ServerError::Config(format!("safety: {path}: {reason}"))
}

impl Safety {
    /// `environment` looks up the variable that `secret_env` names.
    pub fn parse(text: &str, environment: &dyn Fn(&str) -> Option<String>) -> Result<Self, ServerError> {
        let file: RulesFile =
            serde_json::from_str(text).map_err(|error| ServerError::Config(format!("safety: {error}")))?;
        if file.rules.is_empty() && file.callout.is_none() {
            return Err(wrong("rules", "there are none, and no callout: leave safety out"));
        }
        if file.rules.len() > RULES_MAX {
            return Err(wrong("rules", format!("there are {}; the limit is {RULES_MAX}", file.rules.len())));
        }
        let mut names = HashSet::new();
        let (mut input, mut output) = (SafetyRules::default(), SafetyRules::default());
        for (index, entry) in file.rules.iter().enumerate() {
            if !names.insert(entry.name.as_str()) {
                return Err(wrong(
                    format!("rules[{index}].name"),
                    format!("{:?} is given twice", entry.name),
                ));
            }
            entry.check(index)?;
            for (rules, wanted) in
                [(&mut input, entry.on.sides().input), (&mut output, entry.on.sides().output)]
            {
                rules.rules.push(entry.rule());
                if wanted {
                    rules.automata.append(&mut entry.automata(index)?);
                }
            }
        }
        let side = |rules: SafetyRules| (!rules.automata.is_empty()).then(|| Arc::new(rules));
        let callout = file.callout.map(|entry| entry.read(environment)).transpose()?.map(Arc::new);
        Ok(Self { input: side(input), output: side(output), callout })
    }
}

impl RuleEntry {
    fn check(&self, index: usize) -> Result<(), ServerError> {
        let path = |field: &str| format!("rules[{index}].{field}");
        let named = !self.name.is_empty() && self.name.len() <= 64;
        let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
        if !named || !self.name.bytes().all(plain) || self.name == "callout" {
            return Err(wrong(
                path("name"),
                "1 to 64 letters, digits, '-', '_' or '.', and not 'callout': it is a label of the metrics",
            ));
        }
        let patterns = self.strings.len() + self.regexes.len();
        if patterns == 0 || patterns > PATTERNS_MAX {
            return Err(wrong(path("strings"), format!("give 1 to {PATTERNS_MAX} strings or regexes")));
        }
        for (at, string) in self.strings.iter().enumerate() {
            if string.is_empty() || string.len() > STRING_BYTES_MAX {
                return Err(wrong(
                    path(&format!("strings[{at}]")),
                    format!("give 1 to {STRING_BYTES_MAX} bytes"),
                ));
            }
        }
        if self.max_bytes.is_some_and(|most| most == 0 || most > LONGEST_MAX) {
            return Err(wrong(path("max_bytes"), format!("give 1 to {LONGEST_MAX}")));
        }
        if self.max_bytes.is_some() && self.regexes.is_empty() {
            return Err(wrong(path("max_bytes"), "it bounds matches of regexes, and there are none"));
        }
        if self.ignore_case && self.strings.is_empty() {
            return Err(wrong(path("ignore_case"), "it is about strings; begin a regex with (?i)"));
        }
        if self.replacement.is_some() && self.action == ActionEntry::Deny {
            return Err(wrong(path("replacement"), "it goes with the action redact"));
        }
        Ok(())
    }

    fn rule(&self) -> Rule {
        let given = self.replacement.as_deref().unwrap_or(REPLACEMENT);
        let replacement = (self.action == ActionEntry::Redact).then(|| given.to_owned());
        Rule { name: self.name.clone(), replacement }
    }

    fn automata(&self, index: usize) -> Result<Vec<Automaton>, ServerError> {
        let mut automata = Vec::new();
        if !self.strings.is_empty() {
            let strings = Automaton::of_strings(index, &self.strings, self.ignore_case);
            automata.push(strings.map_err(|reason| wrong(format!("rules[{index}].strings"), reason))?);
        }
        for (at, regex) in self.regexes.iter().enumerate() {
            let automaton = Automaton::of_regex(index, regex, self.max_bytes);
            automata
                .push(automaton.map_err(|reason| wrong(format!("rules[{index}].regexes[{at}]"), reason))?);
        }
        Ok(automata)
    }
}

impl CalloutEntry {
    fn read(self, environment: &dyn Fn(&str) -> Option<String>) -> Result<Callout, ServerError> {
        let path = |field: &str| format!("callout.{field}");
        let address: Result<ureq::http::Uri, _> = self.url.parse();
        let usable = |uri: &ureq::http::Uri| {
            matches!(uri.scheme_str(), Some("http" | "https"))
                && uri.host().is_some_and(|host| !host.is_empty())
        };
        if !address.as_ref().is_ok_and(usable) {
            return Err(wrong(path("url"), "give an http:// or https:// address"));
        }
        if address.is_ok_and(|uri| uri.authority().is_some_and(|name| name.as_str().contains('@'))) {
            return Err(wrong(path("url"), "put the secret into a variable and name it in secret_env"));
        }
        let timeout_ms = self.timeout_ms.unwrap_or(TIMEOUT_MS);
        if !(1..=TIMEOUT_MS_MAX).contains(&timeout_ms) {
            return Err(wrong(path("timeout_ms"), format!("give 1 to {TIMEOUT_MS_MAX}")));
        }
        let concurrency = self.concurrency.unwrap_or(CONCURRENCY);
        if !(1..=CONCURRENCY_MAX).contains(&concurrency) {
            return Err(wrong(path("concurrency"), format!("give 1 to {CONCURRENCY_MAX}")));
        }
        let secret = match (&self.secret_env, &self.secret_header) {
            (None, Some(_)) => return Err(wrong(path("secret_header"), "it goes with secret_env")),
            (None, None) => None,
            (Some(variable), header) => {
                let value = environment(variable).filter(|value| !value.is_empty());
                let value = value.ok_or_else(|| {
                    wrong(path("secret_env"), format!("the variable {variable} is not set"))
                })?;
                let header = header.as_deref().unwrap_or("authorization");
                if ureq::http::HeaderName::try_from(header).is_err() {
                    return Err(wrong(path("secret_header"), format!("{header:?} is no header's name")));
                }
                if ureq::http::HeaderValue::try_from(&value).is_err() {
                    let reason = format!("the value of {variable} cannot stand in a header");
                    return Err(wrong(path("secret_env"), reason));
                }
                Some((header.to_owned(), value))
            }
        };
        let mode = match (self.stream, self.window, self.overlap) {
            (StreamEntry::Hold, None, None) => Mode::Hold,
            (StreamEntry::Hold, ..) => {
                return Err(wrong(path("window"), "window and overlap go with \"stream\": \"window\""));
            }
            (StreamEntry::Window, window, overlap) => {
                let characters = window.unwrap_or(512);
                let overlap = overlap.unwrap_or(characters / 4);
                if !(1..=WINDOW_MAX).contains(&characters) || overlap > WINDOW_MAX {
                    return Err(wrong(path("window"), format!("give 1 to {WINDOW_MAX} characters")));
                }
                Mode::Window { characters, overlap }
            }
        };
        let timeout = Duration::from_millis(timeout_ms);
        let agent = ureq::Agent::config_builder()
            .timeout_global(Some(timeout))
            .http_status_as_error(false)
            .max_redirects(0)
            .max_redirects_will_error(false)
            .proxy(None)
            .user_agent("folio")
            .build();
        Ok(Callout {
            url: self.url,
            on: self.on.sides(),
            timeout,
            fails_closed: self.on_failure == OnFailure::Closed,
            mode,
            secret,
            agent: agent.into(),
            places: Arc::new(Semaphore::new(concurrency)),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Safety, ServerError> {
        Safety::parse(text, &|name| (name == "SET").then(|| "Bearer s".to_owned()))
    }

    #[test]
    fn what_is_declared_is_there() {
        let safety = parse(
            r#"{"rules": [{"name": "a", "strings": ["x"], "on": "input", "action": "deny"},
                          {"name": "b", "regexes": ["y+"], "max_bytes": 9, "action": "redact"}],
                "callout": {"url": "http://127.0.0.1:9/x", "on": "output", "on_failure": "closed", "secret_env": "SET"}}"#,
        );
        let safety = safety.unwrap();
        assert_eq!(safety.input.as_ref().unwrap().automata.len(), 2);
        let output = safety.output().unwrap();
        assert_eq!((output.automata.len(), output.replacement(1)), (1, REPLACEMENT));
        let callout = safety.judge().unwrap();
        assert!(callout.fails_closed && callout.mode == Mode::Hold && safety.asks_first().is_none());
        assert!(!format!("{safety:?}").contains("Bearer"));
    }

    #[test]
    fn every_mistake_is_named() {
        let rule = |fields: &str| format!(r#"{{"rules": [{{"name": "r", "action": "deny", {fields}}}]}}"#);
        let callout = |fields: &str| format!(r#"{{"callout": {{"on_failure": "open", {fields}}}}}"#);
        for (text, said) in [
            ("{}".to_owned(), "rules: there are none"),
            (r#"{"rule": []}"#.to_owned(), "unknown field `rule`"),
            (rule(r#""strings": []"#), "rules[0].strings: give 1"),
            (rule(r#""strings": ["a", ""]"#), "rules[0].strings[1]"),
            (rule(r#""regexes": ["a", "b+"]"#), "rules[0].regexes[1]: a match of it may be of any length"),
            (rule(r#""regexes": ["("]"#), "rules[0].regexes[0]: regex parse error"),
            (rule(r#""regexes": ["a"], "max_bytes": 99999"#), "rules[0].max_bytes"),
            (rule(r#""strings": ["a"], "max_bytes": 9"#), "rules[0].max_bytes: it bounds"),
            (rule(r#""regexes": ["a"], "ignore_case": true"#), "rules[0].ignore_case"),
            (rule(r#""strings": ["a"], "replacement": "b""#), "rules[0].replacement"),
            (rule(r#""strings": ["a"], "on": "prompt""#), "unknown variant `prompt`"),
            (
                r#"{"rules": [{"name": "a b", "action": "deny", "strings": ["x"]}]}"#.to_owned(),
                "rules[0].name",
            ),
            (callout(r#""url": "ftp://x""#), "callout.url"),
            (callout(r#""url": "http://u:p@x/""#), "callout.url: put the secret"),
            (
                callout(r#""url": "http://x", "secret_env": "UNSET""#),
                "callout.secret_env: the variable UNSET",
            ),
            (callout(r#""url": "http://x", "secret_header": "x-a""#), "callout.secret_header"),
            (callout(r#""url": "http://x", "timeout_ms": 0"#), "callout.timeout_ms"),
            (callout(r#""url": "http://x", "window": 9"#), "callout.window"),
            (r#"{"callout": {"url": "http://x"}}"#.to_owned(), "missing field `on_failure`"),
        ] {
            let error = parse(&text).err().unwrap_or_else(|| panic!("{text} was taken")).to_string();
            assert!(error.contains("safety: ") && error.contains(said), "{text}: {error}");
        }
    }
}
