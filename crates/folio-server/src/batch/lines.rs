//! The lines of a batch's files: requests in, results out.
//!
//! Owns: their shape, what makes an input file one that cannot be run, and what results add up to. Must never: run one.

use std::collections::HashSet;
use std::io::BufRead;

use folio_text::work;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use serde_json::{Value, json};

use crate::http::fresh_id;
use folio_api::ApiError;

/// Mistakes of one file that are told.
const ERRORS_MAX: usize = 100;
const CUSTOM_ID_BYTES_MAX: usize = 512;

/// What a batch may ask for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Endpoint {
    #[serde(rename = "/v1/chat/completions")]
    Chat,
    #[serde(rename = "/v1/completions")]
    Completions,
    #[serde(rename = "/v1/embeddings")]
    Embeddings,
    #[serde(rename = "/v1/responses")]
    Responses,
}

impl Endpoint {
    pub const ALL: [Self; 4] = [Self::Chat, Self::Completions, Self::Embeddings, Self::Responses];

    pub fn path(self) -> &'static str {
        match self {
            Self::Chat => "/v1/chat/completions",
            Self::Completions => "/v1/completions",
            Self::Embeddings => "/v1/embeddings",
            Self::Responses => "/v1/responses",
        }
    }

    pub fn named(path: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|endpoint| endpoint.path() == path)
    }
}

/// One request of an input file.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub struct InputLine {
    pub custom_id: String,
    method: String,
    url: String,
    pub body: Box<RawValue>,
}

/// A mistake in an input file.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LineError {
    pub code: String,
    pub message: String,
    pub param: Option<String>,
    /// From 1.
    pub line: Option<u64>,
}

impl LineError {
    pub fn of_file(code: &str, message: impl Into<String>) -> Self {
        Self { code: code.into(), message: message.into(), param: None, line: None }
    }
}

/// Where a request lies in its file.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LineSpan {
    pub start: u64,
    pub bytes: u32,
}

/// Checks every line; `most` of them, and bytes of one. Gives where the requests are, or what is wrong with the file.
pub fn check(
    mut file: impl BufRead,
    endpoint: Endpoint,
    (lines_max, bytes_max): (usize, usize),
) -> Result<Vec<LineSpan>, Vec<LineError>> {
    let (mut places, mut errors, mut ids) = (Vec::new(), Vec::new(), HashSet::new());
    let (mut start, mut number, mut line) = (0u64, 0u64, Vec::new());
    loop {
        line.clear();
        let bytes = match file.read_until(b'\n', &mut line) {
            Ok(0) => break,
            Ok(bytes) => bytes,
            Err(error) => {
                return Err(vec![LineError::of_file(
                    "storage",
                    format!("The file cannot be read: {error}."),
                )]);
            }
        };
        number += 1;
        work::add(bytes);
        let place = LineSpan { start, bytes: bytes as u32 };
        start += bytes as u64;
        if line.trim_ascii().is_empty() {
            continue;
        }
        let checked = match line.len() > bytes_max {
            true => Err((
                "too_large",
                format!("This line is longer than a request may be, {bytes_max} bytes."),
                None,
            )),
            false => check_line(&line, endpoint, &mut ids),
        };
        match checked {
            Ok(()) => places.push(place),
            Err((code, message, param)) => errors.push(LineError {
                code: code.into(),
                message,
                param: param.map(str::to_owned),
                line: Some(number),
            }),
        }
        if errors.len() == ERRORS_MAX {
            break;
        }
        if places.len() > lines_max {
            let message = format!("The file has more than {lines_max} requests; split it.");
            return Err(vec![LineError::of_file("too_many_lines", message)]);
        }
    }
    match (errors.is_empty(), places.is_empty()) {
        (false, _) => Err(errors),
        (true, true) => Err(vec![LineError::of_file("empty_file", "The file has no requests.")]),
        (true, false) => Ok(places),
    }
}

type Mistake = (&'static str, String, Option<&'static str>);

fn check_line(line: &[u8], endpoint: Endpoint, ids: &mut HashSet<String>) -> Result<(), Mistake> {
    let line =
        parse(line).map_err(|why| ("invalid_json_line", format!("This line is no request: {why}."), None))?;
    let wrong = |param, message: String| Err(("invalid_value", message, Some(param)));
    if line.custom_id.is_empty() || line.custom_id.len() > CUSTOM_ID_BYTES_MAX {
        return wrong("custom_id", format!("The custom_id must have 1 to {CUSTOM_ID_BYTES_MAX} bytes."));
    }
    if line.method != "POST" {
        return wrong("method", "The method must be POST.".into());
    }
    if line.url != endpoint.path() {
        return wrong("url", format!("The url must be the batch's endpoint, {}.", endpoint.path()));
    }
    if !line.body.get().starts_with('{') {
        return wrong("body", "The body must be an object.".into());
    }
    if !ids.insert(line.custom_id) {
        return Err((
            "duplicate_custom_id",
            "An earlier line has the same custom_id.".into(),
            Some("custom_id"),
        ));
    }
    Ok(())
}

/// A line that was checked, or why it is none.
pub fn parse(line: &[u8]) -> Result<InputLine, String> {
    serde_json::from_slice(line).map_err(|error| {
        let text = error.to_string();
        text.split(" at line ").next().unwrap_or(&text).to_owned()
    })
}

/// What became of a request, as a line of the output or error file; with its line's end.
pub fn result(custom_id: &str, request_id: &str, result: Result<&str, &ApiError>) -> String {
    let (status, body) = match result {
        Ok(body) => (200, body.to_owned()),
        Err(error) => (error.status, error.to_json()),
    };
    let (id, custom_id) = (format!("batch_req_{}", fresh_id()), json!(custom_id));
    // The body is JSON that was written on one line.
    format!(
        "{{\"id\":\"{id}\",\"custom_id\":{custom_id},\"response\":{{\"status_code\":{status},\"request_id\":\"{request_id}\",\
         \"body\":{body}}},\"error\":null}}\n"
    )
}

/// A request that was not run, as a line of the error file.
pub fn not_run(custom_id: &str, code: &str, message: &str) -> String {
    let id = format!("batch_req_{}", fresh_id());
    let error = json!({"code": code, "message": message});
    let line = json!({"id": id, "custom_id": custom_id, "response": null, "error": error});
    format!("{line}\n")
}

/// Which request a line of results is of.
pub fn custom_id(line: &[u8]) -> Option<String> {
    #[derive(Deserialize)]
    struct Of {
        custom_id: String,
    }
    serde_json::from_slice::<Of>(line).ok().map(|line| line.custom_id)
}

/// Tokens of a batch's answers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct BatchUsage {
    pub input_tokens: u64,
    pub cached_tokens: u64,
    pub output_tokens: u64,
    pub reasoning_tokens: u64,
}

impl BatchUsage {
    /// Adds what an answer's body says, in the words of any endpoint.
    pub fn add(&mut self, body: &str) {
        #[derive(Deserialize)]
        struct Body {
            usage: Option<Value>,
        }
        let Ok(Body { usage: Some(usage) }) = serde_json::from_str::<Body>(body) else { return };
        let number = |names: [&str; 2]| {
            names.iter().find_map(|name| usage.pointer(name)).and_then(Value::as_u64).unwrap_or(0)
        };
        self.input_tokens += number(["/prompt_tokens", "/input_tokens"]);
        self.cached_tokens +=
            number(["/prompt_tokens_details/cached_tokens", "/input_tokens_details/cached_tokens"]);
        self.output_tokens += number(["/completion_tokens", "/output_tokens"]);
        self.reasoning_tokens += number([
            "/completion_tokens_details/reasoning_tokens",
            "/output_tokens_details/reasoning_tokens",
        ]);
    }

    pub fn to_json(self) -> Value {
        json!({
            "input_tokens": self.input_tokens, "input_tokens_details": {"cached_tokens": self.cached_tokens},
            "output_tokens": self.output_tokens,
            "output_tokens_details": {"reasoning_tokens": self.reasoning_tokens},
            "total_tokens": self.input_tokens + self.output_tokens,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(id: &str) -> String {
        format!(r#"{{"custom_id":"{id}","method":"POST","url":"/v1/embeddings","body":{{"input":"x"}}}}"#)
    }

    fn checked(text: &str) -> Result<Vec<LineSpan>, Vec<LineError>> {
        check(text.as_bytes(), Endpoint::Embeddings, (3, 1000))
    }

    #[test]
    fn requests_are_found_where_they_lie() {
        let text = format!("{}\n\n  \n{}\r\n{}", line("a"), line("b"), line("ä"));
        let places = checked(&text).unwrap();
        let found: Vec<String> = places
            .iter()
            .map(|place| &text.as_bytes()[place.start as usize..][..place.bytes as usize])
            .map(|line| parse(line).unwrap().custom_id)
            .collect();
        assert_eq!(found, ["a", "b", "ä"]);
    }

    #[test]
    fn mistakes_are_told_with_their_lines() {
        let text = format!(
            "{}\nnot json\n{}\n{}\n{}\n[1]\n",
            line("a"),
            line("a"),
            line("c").replace("POST", "GET"),
            line("d").replace("embeddings", "completions"),
        );
        let errors = checked(&text).unwrap_err();
        let told: Vec<_> =
            errors.iter().map(|e| (e.line.unwrap(), e.code.as_str(), e.param.as_deref())).collect();
        assert_eq!(
            told,
            [
                (2, "invalid_json_line", None),
                (3, "duplicate_custom_id", Some("custom_id")),
                (4, "invalid_value", Some("method")),
                (5, "invalid_value", Some("url")),
                (6, "invalid_json_line", None),
            ]
        );
        assert_eq!(checked(" \n").unwrap_err()[0].code, "empty_file");
        let many: String = (0..5).map(|i| line(&i.to_string()) + "\n").collect();
        assert_eq!(checked(&many).unwrap_err()[0].code, "too_many_lines");
        assert_eq!(check(&b"\xff\n"[..], Endpoint::Chat, (3, 9)).unwrap_err()[0].line, Some(1));
        let long = line("a").replace('x', &"x".repeat(1000));
        assert_eq!(checked(&long).unwrap_err()[0].code, "too_large");
        let extra = line("a").replace("\"method\"", "\"extra\":1,\"method\"");
        assert!(checked(&extra).unwrap_err()[0].message.contains("extra"));
    }

    #[test]
    fn results_are_json_lines_that_can_be_found_again() {
        let done = result("a\"b", "r", Ok(r#"{"usage":{"prompt_tokens":3}}"#));
        assert!(done.ends_with('\n') && done.matches('\n').count() == 1);
        let value: Value = serde_json::from_str(&done).unwrap();
        assert_eq!(value["response"]["body"]["usage"]["prompt_tokens"], 3);
        assert_eq!(custom_id(done.as_bytes()).as_deref(), Some("a\"b"));
        let failed: Value =
            serde_json::from_str(&result("x", "r", Err(&ApiError::invalid("n", "too many")))).unwrap();
        assert_eq!((&failed["response"]["status_code"], &failed["error"]), (&json!(400), &Value::Null));
        assert_eq!(failed["response"]["body"]["error"]["param"], "n");
        let missed: Value = serde_json::from_str(&not_run("x", "batch_expired", "late")).unwrap();
        assert_eq!((&missed["response"], &missed["error"]["code"]), (&Value::Null, &json!("batch_expired")));
    }

    #[test]
    fn usage_is_read_in_the_words_of_every_endpoint() {
        let mut usage = BatchUsage::default();
        usage.add(r#"{"usage":{"prompt_tokens":5,"completion_tokens":2,"prompt_tokens_details":{"cached_tokens":1}}}"#);
        usage.add(r#"{"usage":{"input_tokens":7,"output_tokens":3,"output_tokens_details":{"reasoning_tokens":2}}}"#);
        usage.add("{}");
        let expected =
            BatchUsage { input_tokens: 12, cached_tokens: 1, output_tokens: 5, reasoning_tokens: 2 };
        assert_eq!(usage, expected);
        assert_eq!(usage.to_json()["total_tokens"], 17);
    }
}
