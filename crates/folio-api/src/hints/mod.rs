//! Fields that change nothing: those of the table, those that an operator lets pass, and the refusal of all others.
//!
//! Owns: what becomes of a field that no reader took. Three answers: a **hint** (`table`, or `--accept-hint`) is checked and dropped;
//! an unknown field is a 400 that names the flag which would let it pass; with `--unknown-fields warn` it is dropped, counted, and
//! named in the answer's header. Must never: let pass what was meant to change an answer. So nothing that is known by name, is refused
//! with a reason, or is nearly spelled like either passes; and readers of sampling, schemas and tools do not come here at all.
//!
//! Invariant: an answer's tokens and whom its cache belongs to do not depend on what is dropped here. Cost: nothing for a request
//! without such fields; else a walk over the table for each, at most [`WARNED_MAX`] of them unlisted.

mod near;
mod table;

pub use crate::openapi::tables::Api;
pub use table::{HINTS, Hint};

use crate::error::ApiError;
use crate::fields::Fields;
use crate::openapi::tables::{BODIES, Body};

/// Unlisted fields of one request that are dropped; more is a 400.
const WARNED_MAX: usize = 32;
/// Bytes of a path of the table or a flag.
const PATH_BYTES: usize = 128;

/// Parts of a request whose fields decide what is generated: a flag that opens one would have no effect, and is refused.
const CLOSED: &[&str] = &[
    "cache",
    "chat_template_kwargs",
    "logit_bias",
    "options",
    "output_config.format",
    "reasoning",
    "response_format",
    "stream_options",
    "structured_outputs",
    "text.format",
    "thinking",
    "tool_choice",
    "tools",
];

/// What an operator says about fields that nobody knows.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HintPolicy {
    accepted: Vec<String>,
    warn: bool,
}

impl HintPolicy {
    /// `accepted`: paths (`messages[].mood`) that are dropped unread. `warn`: so is every other unknown field.
    pub fn new(accepted: Vec<String>, warn: bool) -> Result<Self, PolicyError> {
        for path in &accepted {
            if let Err(why) = check_path(path) {
                return Err(PolicyError { path: path.clone(), why });
            }
        }
        Ok(Self { accepted, warn })
    }
}

/// Why a field cannot be passed over.
#[derive(Debug, thiserror::Error)]
#[error("--accept-hint {path}: {why}")]
pub struct PolicyError {
    path: String,
    why: String,
}

fn check_path(path: &str) -> Result<(), String> {
    let part = |part: &str| {
        let name = part.trim_end_matches("[]");
        !name.is_empty() && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"_-".contains(&byte))
    };
    if path.len() > PATH_BYTES || !path.split('.').all(part) {
        return Err("a path is names joined by dots, with [] behind a list, such as messages[].mood".into());
    }
    if let Some(closed) = closed(path) {
        return Err(format!("fields of '{closed}' decide what is generated, and are never passed over"));
    }
    if path.contains('.') {
        return Ok(());
    }
    for body in BODIES {
        if body.names().any(|name| name == path) {
            return Err("it is a field that this server honours".into());
        }
        if let Some((_, why)) = body.refusals().find(|(name, _)| *name == path) {
            return Err(format!("it is refused for a reason: {why}"));
        }
        if let Some(known) = body.known().find(|known| near::is_near(known, path)) {
            return Err(format!("it is nearly '{known}', and would hide that misspelling"));
        }
    }
    Ok(())
}

/// The part of a request that nothing opens, where the path is of one.
fn closed(path: &str) -> Option<&'static str> {
    let inside = |closed: &&&str| {
        path.strip_prefix(**closed).is_some_and(|rest| rest.is_empty() || rest.starts_with(['.', '[']))
    };
    CLOSED.iter().find(inside).copied()
}

/// Reads past hints in one request, and remembers what was dropped beyond the table.
pub struct Hints<'a> {
    api: Api,
    policy: &'a HintPolicy,
    ignored: Vec<String>,
}

impl<'a> Hints<'a> {
    pub fn new(policy: &'a HintPolicy, api: Api) -> Self {
        Self { api, policy, ignored: Vec::new() }
    }

    /// Ends the reading of a request.
    pub fn close(mut self, fields: Fields<'_>, body: &Body) -> Result<Notes, ApiError> {
        if fields.unread().next().is_some() {
            let refused: Vec<_> = body.refusals().collect();
            // What is a field of any request is never one that nobody knows.
            let known: Vec<_> = BODIES.iter().flat_map(|body| body.known()).collect();
            self.finish(fields, &known, &refused)?;
        }
        Ok(Notes { ignored: self.ignored, left_out: Vec::new() })
    }

    /// Ends the reading of an object within a request: drops hints, and refuses whatever else nobody read. `known`: its fields;
    /// `refused`: those that exist elsewhere, and why not here.
    pub fn finish(
        &mut self,
        mut fields: Fields<'_>,
        known: &[&str],
        refused: &[(&str, &str)],
    ) -> Result<(), ApiError> {
        let is_refused = |name: &str| refused.iter().any(|(other, _)| *other == name);
        // Each round takes one out.
        loop {
            let next = fields.unread().find(|name| !is_refused(name)).map(str::to_owned);
            let Some(name) = next else { break };
            let path = fields.path(&name);
            let general = general(&path);
            // What the request's own reader turns comes here only in a request that has no such field.
            let read = |hint: &Hint| hint.honoured && !general.contains('.');
            let listed = |hint: &&Hint| hint.api == self.api && hint.path == general && !read(hint);
            let hint = HINTS.iter().find(listed);
            if let Some(hint) = hint {
                if let Some(raw) = fields.raw(&name) {
                    hint.check(raw, &path)?;
                }
            } else if self.policy.accepted.contains(&general) {
                fields.raw(&name);
            } else {
                let others = refused.iter().map(|(name, _)| *name);
                let meant = known.iter().copied().chain(others).find(|known| near::is_near(known, &name));
                let passes = self.policy.warn && closed(&general).is_none();
                if meant.is_some() || !passes || self.ignored.len() == WARNED_MAX {
                    return Err(unknown(&path, &general, meant, self.policy.warn));
                }
                fields.raw(&name);
                self.ignored.push(path);
            }
        }
        fields.finish(refused)
    }
}

/// The path without indices.
fn general(path: &str) -> String {
    let mut out = String::with_capacity(path.len());
    let mut parts = path.split('[');
    out.extend(parts.next());
    for part in parts {
        out.push('[');
        out.push_str(part.trim_start_matches(|c: char| c.is_ascii_digit()));
    }
    out
}

fn unknown(path: &str, general: &str, meant: Option<&str>, warns: bool) -> ApiError {
    let said = match meant {
        Some(meant) if path == meant => {
            "It belongs to other requests, and does nothing in this one.".to_owned()
        }
        Some(meant) => format!("Did you mean '{meant}'?"),
        None if warns && closed(general).is_none() => {
            format!("A request may have {WARNED_MAX} unknown fields.")
        }
        None if check_path(general).is_ok() => format!(
            "Leave it out. If it asks for nothing that matters, the server can be started with '--accept-hint {general}', or with \
             '--unknown-fields warn'."
        ),
        None => "Leave it out.".to_owned(),
    };
    let message = format!("Unrecognized request argument supplied: {path}. {said}");
    ApiError { code: Some("unrecognized_parameter"), ..ApiError::invalid(path, message) }
}

/// What an answer's headers say about its request.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Notes {
    /// Paths of fields that were dropped though no table lists them.
    pub ignored: Vec<String>,
    /// Names of tools that were offered and cannot be run here.
    pub left_out: Vec<String>,
}

/// The part of `docs/api.md` that the table makes.
pub fn reference() -> String {
    let mut out = String::from(
        "| request | field | may be | why it changes nothing | sent by |\n|---|---|---|---|---|\n",
    );
    for Hint { api, path, shape, why, sent_by, .. } in HINTS {
        out += &format!("| {} | `{path}` | {shape} | {why} | {sent_by} |\n", api.name());
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::openapi::tables::CHAT;

    fn read(body: &str, policy: &HintPolicy) -> Result<Vec<String>, ApiError> {
        let fields = Fields::of_body(body.as_bytes())?;
        Hints::new(policy, Api::Chat).close(fields, &CHAT).map(|notes| notes.ignored)
    }

    fn policy(accepted: &[&str], warn: bool) -> HintPolicy {
        HintPolicy::new(accepted.iter().map(|path| path.to_string()).collect(), warn).expect("allowed paths")
    }

    #[test]
    fn unknown_fields_are_refused_with_the_flag_that_lets_them_pass() {
        let error = read(r#"{"mood": 1}"#, &policy(&[], false)).unwrap_err();
        assert_eq!((error.param.as_deref(), error.code), (Some("mood"), Some("unrecognized_parameter")));
        assert!(
            error.message.contains("--accept-hint mood") && error.message.contains("--unknown-fields warn")
        );
        assert_eq!(read(r#"{"mood": {"a": [1]}}"#, &policy(&["mood"], false)), Ok(Vec::new()));
        assert_eq!(
            read(r#"{"mood": 1, "x y": null}"#, &policy(&[], true)),
            Ok(vec!["mood".into(), "x y".into()])
        );
    }

    #[test]
    fn misspellings_and_what_is_refused_never_pass() {
        for policy in [policy(&[], false), policy(&["mood"], true)] {
            let error = read(r#"{"max_token": 1}"#, &policy).unwrap_err();
            assert!(
                error.message.contains("'max_tokens'") && !error.message.contains("--"),
                "{}",
                error.message
            );
            for name in ["temprature", "maxTokens", "Top-P", "guided_jsno"] {
                assert_eq!(
                    read(&format!(r#"{{"{name}": 1}}"#), &policy).unwrap_err().param.as_deref(),
                    Some(name)
                );
            }
            let error = read(r#"{"cache_salt": "x"}"#, &policy).unwrap_err();
            assert_eq!(error.code, Some("unsupported_parameter"));
            let error = read(r#"{"mirostat": 2}"#, &policy).unwrap_err();
            assert_eq!(error.code, Some("unsupported_parameter"), "a sampler elsewhere");
        }
    }

    #[test]
    fn how_many_pass_is_bounded() {
        let many = |count: usize| {
            let fields: Vec<String> = (0..count).map(|index| format!(r#""zq{index}zq{index}": 0"#)).collect();
            format!("{{{}}}", fields.join(","))
        };
        assert_eq!(read(&many(WARNED_MAX), &policy(&[], true)).map(|list| list.len()), Ok(WARNED_MAX));
        assert!(read(&many(WARNED_MAX + 1), &policy(&[], true)).is_err());
    }

    #[test]
    fn flags_open_nothing_that_is_known_or_decides_what_is_generated() {
        for path in [
            "tools",
            "tools[].mood",
            "options.mood",
            "reasoning.mood",
            "thinking.mood",
            "response_format.mood",
            "text.format.x",
            "temperature",
            "cache_salt",
            "temprature",
            "a b",
            "",
            "a..b",
            "top_kk",
        ] {
            assert!(HintPolicy::new(vec![path.into()], false).is_err(), "{path}");
        }
        for path in ["mood", "messages[].mood", "metadata.mood", "toolset", "input[].content[].mood"] {
            assert!(HintPolicy::new(vec![path.into()], false).is_ok(), "{path}");
        }
    }

    #[test]
    fn hints_have_the_shape_that_the_table_says() {
        let none = policy(&[], false);
        assert_eq!(read(r#"{"verbosity": "low"}"#, &none), Ok(Vec::new()));
        assert_eq!(read(r#"{"verbosity": null}"#, &none), Ok(Vec::new()));
        let error = read(r#"{"verbosity": "lots"}"#, &none).unwrap_err();
        assert!(error.message.contains("low, medium or high"), "{}", error.message);
        assert_eq!(general("messages[12].content[3].x"), "messages[].content[].x");
    }

    #[test]
    fn every_row_can_be_reached_and_none_is_honoured_too() {
        for hint in HINTS {
            let bodies = || BODIES.iter().filter(|body| body.hints == Some(hint.api));
            assert!(bodies().count() > 0, "{}", hint.path);
            let opened = check_path(hint.path).is_ok() || !hint.path.contains('.');
            // Those of `options` are read past by its own reader, and tried with it.
            assert!(opened || hint.honoured || hint.path.starts_with("options."), "{}", hint.path);
            for body in bodies().filter(|_| !hint.honoured) {
                assert!(body.known().all(|name| name != hint.path), "{}: {}", body.name, hint.path);
            }
        }
    }
}
