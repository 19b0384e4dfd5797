//! Arguments between markers (`<parameter=city>Paris</parameter>`), to JSON as they are written.
//!
//! Owns: the JSON's brackets, commas and quotes. Text values are streamed; others are kept until they are complete, since
//! what they are is only known then. Invariant: the JSON depends on the text alone, not on how it was cut.

use super::format::{ArgumentForm, Markup, NAME_MAX};
use super::functions::{Functions, ParameterType, to_json};
use super::json::{escape_into, quoted};
use super::{BLANK_MAX, HELD_MAX, partial_suffix};
use crate::work;

#[derive(Clone, Debug)]
enum MarkupState {
    Between,
    /// Inside a value of unknown length; `inside`: some of its text is out.
    Text {
        inside: bool,
    },
    /// Inside a value that is kept; this many bytes of it were searched.
    Kept {
        kind: ParameterType,
        searched: usize,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MarkupProgress {
    More,
    /// The arguments are complete, either by their marker or because what follows is no argument.
    Done,
}

#[derive(Clone, Debug)]
pub struct MarkupReader {
    state: MarkupState,
    first: bool,
}

impl MarkupReader {
    pub fn new() -> Self {
        Self { state: MarkupState::Between, first: true }
    }

    /// Takes what it can from `text`: the number of bytes in `used`, their JSON in `out`.
    pub fn step(
        &mut self,
        markup: &Markup,
        text: &str,
        types: (&Functions, &str),
        used: &mut usize,
        out: &mut String,
    ) -> MarkupProgress {
        loop {
            let rest = &text[*used..];
            match self.state.clone() {
                MarkupState::Between => match self.between(markup, rest, types, out) {
                    (Some(taken), None) => *used += taken,
                    (taken, Some(progress)) => {
                        *used += taken.unwrap_or(0);
                        return progress;
                    }
                    (None, None) => return MarkupProgress::More,
                },
                MarkupState::Text { inside } => {
                    let (taken, ended) = text_value(markup, rest, inside, out);
                    *used += taken;
                    self.state = match ended {
                        true => MarkupState::Between,
                        false if taken == 0 => return MarkupProgress::More,
                        false => MarkupState::Text { inside: true },
                    };
                }
                MarkupState::Kept { kind, searched } => {
                    let from = rest.floor_char_boundary(searched.saturating_sub(markup.close.len()));
                    work::add(rest.len() - from);
                    match rest[from..].find(markup.close).map(|at| from + at) {
                        Some(at) if at <= HELD_MAX => {
                            out.push_str(&to_json(trimmed(&rest[..at], markup), kind));
                            *used += at + markup.close.len();
                            self.state = MarkupState::Between;
                        }
                        None if rest.len() <= HELD_MAX + markup.close.len() => {
                            self.state = MarkupState::Kept { kind, searched: rest.len() };
                            return MarkupProgress::More;
                        }
                        // Too long to keep: text.
                        _ => {
                            out.push('"');
                            self.state = MarkupState::Text { inside: false };
                        }
                    }
                }
            }
        }
    }

    /// The stream ends in the middle: what of `rest` belongs to a value is appended, unfinished as it is.
    pub fn cut_off(&mut self, markup: &Markup, rest: &str, out: &mut String) -> usize {
        match self.state {
            MarkupState::Between => return 0,
            MarkupState::Text { .. } => escape_into(rest, out),
            MarkupState::Kept { .. } => {
                let own = if markup.newlines { rest.strip_prefix('\n') } else { None };
                out.push('"');
                escape_into(own.unwrap_or(rest), out);
            }
        }
        rest.len()
    }

    fn between(
        &mut self,
        markup: &Markup,
        rest: &str,
        (functions, function): (&Functions, &str),
        out: &mut String,
    ) -> (Option<usize>, Option<MarkupProgress>) {
        let item = rest.trim_start();
        let blank = rest.len() - item.len();
        if blank > BLANK_MAX {
            self.close(out);
            return (None, Some(MarkupProgress::Done));
        }
        if item.starts_with(markup.end) {
            self.close(out);
            return (Some(blank + markup.end.len()), Some(MarkupProgress::Done));
        }
        if let Some(key_on) = item.strip_prefix(markup.open) {
            let found = markup.value.iter().filter_map(|(mark, value)| {
                let at = key_on.find(mark);
                work::add(at.unwrap_or(key_on.len()));
                Some((at?, *mark, *value))
            });
            match found.min_by_key(|(at, ..)| *at) {
                Some((at, mark, value)) if at <= NAME_MAX => {
                    let key = key_on[..at].trim().trim_matches('"');
                    let kind = match value {
                        ArgumentForm::BySchema => functions.parameter(function, key),
                        ArgumentForm::Text => ParameterType::Text,
                        ArgumentForm::Json => ParameterType::Json,
                    };
                    out.push_str(if std::mem::replace(&mut self.first, false) { "{" } else { ", " });
                    out.push_str(&quoted(key));
                    out.push_str(": ");
                    self.state = match kind {
                        ParameterType::Text => {
                            out.push('"');
                            MarkupState::Text { inside: false }
                        }
                        kind => MarkupState::Kept { kind, searched: 0 },
                    };
                    return (Some(blank + markup.open.len() + at + mark.len()), None);
                }
                None if key_on.len() <= NAME_MAX + 64 => return (None, None),
                _ => {}
            }
        } else if markup.end.starts_with(item) || markup.open.starts_with(item) {
            return (None, None);
        }
        // No argument and no end: what was read is the call, the rest is not part of it.
        self.close(out);
        (None, Some(MarkupProgress::Done))
    }

    fn close(&mut self, out: &mut String) {
        out.push_str(if self.first { "{}" } else { "}" });
    }
}

/// Without the newlines that belong to the markup.
fn trimmed<'a>(text: &'a str, markup: &Markup) -> &'a str {
    if !markup.newlines {
        return text;
    }
    let text = text.strip_prefix('\n').unwrap_or(text);
    text.strip_suffix('\n').unwrap_or(text)
}

/// Part of a text value: bytes taken, and whether it is over.
fn text_value(markup: &Markup, rest: &str, inside: bool, out: &mut String) -> (usize, bool) {
    if markup.newlines && !inside && rest.starts_with('\n') {
        let (taken, ended) = text_value(markup, &rest[1..], true, out);
        return (taken + 1, ended);
    }
    let close = rest.find(markup.close);
    work::add(close.unwrap_or(rest.len()));
    if let Some(at) = close {
        let value = &rest[..at];
        let value = if markup.newlines { value.strip_suffix('\n').unwrap_or(value) } else { value };
        escape_into(value, out);
        out.push('"');
        return (at + markup.close.len(), true);
    }
    let mut keep = partial_suffix(rest, markup.close);
    if markup.newlines && rest[..rest.len() - keep].ends_with('\n') {
        keep += 1;
    }
    let taken = rest.len() - keep;
    escape_into(&rest[..taken], out);
    (taken, false)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MARKUP: Markup = Markup {
        open: "<p=",
        value: &[(">", ArgumentForm::BySchema)],
        close: "</p>",
        end: "</f>",
        newlines: true,
    };

    fn read(text: &str, size: usize) -> (String, String) {
        let tools = serde_json::json!([{"function": {"name": "f", "parameters": {"properties": {
            "s": {"type": "string"}, "n": {"type": "integer"}}}}}]);
        let functions = Functions::of_tools(tools.as_array().expect("list"));
        let (mut reader, mut held, mut out) = (MarkupReader::new(), String::new(), String::new());
        let chars: Vec<char> = text.chars().collect();
        let mut pieces = chars.chunks(size);
        while let Some(piece) = pieces.next() {
            held.extend(piece);
            let mut used = 0;
            let progress = reader.step(&MARKUP, &held, (&functions, "f"), &mut used, &mut out);
            held.drain(..used);
            if progress == MarkupProgress::Done {
                held.extend(pieces.flatten());
                return (out, held);
            }
        }
        let used = reader.cut_off(&MARKUP, &held, &mut out);
        (out, held[used..].to_owned())
    }

    #[test]
    fn values_by_type_at_every_size_of_piece() {
        for (text, json, rest) in [
            ("\n<p=s>\na\n\"b\"\n</p>\n<p=n>\n5\n</p>\n</f>!", r#"{"s": "a\n\"b\"", "n": 5}"#, "!"),
            ("</f>", "{}", ""),
            ("<p=s></p></f>", r#"{"s": ""}"#, ""),
            ("<p=s>\n</p></f>", r#"{"s": ""}"#, ""),
            ("<p=s>\n\n\n</p></f>", r#"{"s": "\n"}"#, ""),
            ("<p=s></x></p><p=x>[1]</p> </f>", r#"{"s": "</x>", "x": [1]}"#, ""),
            ("<p=s>a</p> text", r#"{"s": "a"}"#, " text"),
            ("<p=s>a\n</", "{\"s\": \"a\\n</", ""),
            ("<p=n>1", "{\"n\": \"1", ""),
        ] {
            for size in 1..=text.chars().count() {
                assert_eq!(read(text, size), (json.into(), rest.into()), "{text:?} by {size}");
            }
        }
    }
}
