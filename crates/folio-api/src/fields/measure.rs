//! How much JSON a text holds, before anything is made of it.
//!
//! Owns: the limits on nesting, on the names of one object, and on values. Must never: allocate, or judge whether the text is
//! JSON (its reader does). A value may take a hundred bytes in memory where the text has two; token ids take four and are not
//! counted, where a request has a list of them. Cost: one pass over the bytes.

use folio_text::work;

use crate::error::ApiError;

/// Objects and lists inside each other.
pub const NESTING_MAX: usize = 100;
/// Names in one object.
pub const NAMES_MAX: usize = 4096;
/// Names and values of a text together, token ids not counted.
pub const VALUES_MAX: usize = 1 << 18;

/// Fields of a request that are lists of token ids.
const TOKEN_LISTS: [&[u8]; 4] = [b"prompt", b"input", b"tokens", b"token_ids"];

/// Refuses a text that holds more than the limits.
pub fn measure(text: &[u8]) -> Result<(), ApiError> {
    work::add(text.len());
    let mut measure = Measure { open: [Open::List; NESTING_MAX + 1], depth: 0, values: 0, tokens: false };
    // The last string of the outermost object, which is a name if a colon follows.
    let mut last: &[u8] = &[];
    let mut at = 0;
    while let Some(&byte) = text.get(at) {
        let end = match byte {
            b'"' => {
                let end = string_end(text, at + 1);
                last = &text[at + 1..end.saturating_sub(1).max(at + 1)];
                measure.value()?;
                end
            }
            b'{' | b'[' => {
                measure.open(byte == b'[')?;
                at + 1
            }
            b'}' | b']' => {
                measure.depth = measure.depth.saturating_sub(1);
                at + 1
            }
            b':' => {
                measure.named(last)?;
                at + 1
            }
            byte if is_between(byte) => at + 1,
            _ => {
                let word = text[at..].iter().take_while(|byte| !is_between(**byte) && !is_mark(**byte));
                if !(byte.is_ascii_digit() && measure.in_token_list()) {
                    measure.value()?;
                }
                at + word.count()
            }
        };
        at = end;
    }
    Ok(())
}

fn is_between(byte: u8) -> bool {
    matches!(byte, b',' | b' ' | b'\t' | b'\n' | b'\r')
}

fn is_mark(byte: u8) -> bool {
    matches!(byte, b'{' | b'}' | b'[' | b']' | b':' | b'"')
}

/// Behind the closing quote of a string whose first byte is at `at`.
fn string_end(text: &[u8], mut at: usize) -> usize {
    while let Some(found) = text.get(at..).and_then(|rest| memchr::memchr2(b'"', b'\\', rest)) {
        at += found + 1;
        if text[at - 1] == b'"' {
            return at;
        }
        at += 1;
    }
    text.len()
}

/// What is open.
#[derive(Clone, Copy)]
enum Open {
    List,
    /// With so many names.
    Object(usize),
}

struct Measure {
    /// By depth, from 1 on.
    open: [Open; NESTING_MAX + 1],
    depth: usize,
    values: usize,
    /// Inside a field that may be a list of token ids.
    tokens: bool,
}

impl Measure {
    fn value(&mut self) -> Result<(), ApiError> {
        self.values += 1;
        match self.values > VALUES_MAX {
            true => Err(too_much(format!("more than {VALUES_MAX} names and values"))),
            false => Ok(()),
        }
    }

    fn open(&mut self, list: bool) -> Result<(), ApiError> {
        self.value()?;
        if self.depth == NESTING_MAX {
            return Err(too_much(format!("more than {NESTING_MAX} objects and lists inside each other")));
        }
        self.depth += 1;
        self.open[self.depth] = if list { Open::List } else { Open::Object(0) };
        Ok(())
    }

    fn named(&mut self, name: &[u8]) -> Result<(), ApiError> {
        if self.depth == 1 {
            self.tokens = TOKEN_LISTS.contains(&name);
        }
        let Open::Object(names) = &mut self.open[self.depth] else { return Ok(()) };
        *names += 1;
        match *names > NAMES_MAX {
            true => Err(too_much(format!("an object with more than {NAMES_MAX} names"))),
            false => Ok(()),
        }
    }

    /// A list of ids, or a list of such lists.
    fn in_token_list(&self) -> bool {
        let lists = |from: usize| self.open[from..=self.depth].iter().all(|open| matches!(open, Open::List));
        self.tokens && (2..=3).contains(&self.depth) && lists(2)
    }
}

fn too_much(what: String) -> ApiError {
    let message = format!("The JSON of this request has {what}, which is more than this server reads.");
    ApiError { code: Some("too_complex"), ..ApiError::bad_request(message) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(text: &str) -> Option<String> {
        measure(text.as_bytes()).err().map(|error| error.message)
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
    fn texts_that_are_no_json_are_measured_to_their_end() {
        for text in ["", "\"", "\"\\", "}}}]", ":::", "{\"a", "nul", "\u{1}\u{1}", "{\"a\\\"\":1"] {
            assert_eq!(refused(text), None, "{text}");
        }
    }
}
