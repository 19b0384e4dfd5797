//! Tool calls that are held to their functions' schemas: a format's calls as a grammar.
//!
//! Owns: the grammar's text. Must never: look at what a model writes; where a call begins is found by its trigger, and from there
//! on nothing but a call can be chosen.
//!
//! A call is then written the one way in which a call is begun for a model that must make one ([`super::format::Force`]); the other
//! spellings that the parser knows are not offered. Formats whose arguments are not JSON have no such grammar.

use std::fmt::Write;

use serde_json::{Map, Value, json};

use super::format::ToolFormat;
use crate::grammar::{Syntax, Whitespace};
use crate::tokenizer::Tokenizer;

/// A function that may be called.
#[derive(Clone, Debug, PartialEq)]
pub struct CallableFunction {
    pub name: String,
    /// What its arguments must be; `None`: any JSON object.
    pub schema: Option<Value>,
}

/// Where calls begin and end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CallPlace {
    /// Behind this nothing but a call may come.
    pub trigger: &'static str,
    /// That counts only where an answer begins.
    pub at_start: bool,
    /// Text and further calls may follow; else nothing does.
    pub again: bool,
}

/// How much of the first call the prompt already holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ForcedPrefix {
    Nothing,
    /// The trigger.
    Trigger,
    /// Everything up to the name.
    Name,
    /// Everything up to the arguments of the only function there is.
    Arguments,
}

impl ToolFormat {
    /// `None`: calls of this format cannot be held to a schema.
    pub fn place(&self) -> Option<CallPlace> {
        let closed = !self.force.close?.is_empty();
        if self.harmony {
            return Some(CallPlace { trigger: "to=functions.", at_start: false, again: false });
        }
        let opens = |open: &&'static str| self.force.before_name.starts_with(*open);
        self.shapes.iter().find_map(|shape| {
            let trigger = *shape.open.iter().find(|open| opens(open))?;
            Some(CallPlace { trigger, at_start: shape.bare, again: closed && !shape.bare })
        })
    }

    /// What may follow where a call is `begun`. `several`: further calls in the same section.
    pub fn calls(
        &self,
        callees: &[CallableFunction],
        begun: ForcedPrefix,
        several: bool,
        tokenizer: &Tokenizer,
    ) -> Option<Syntax> {
        let (CallPlace { trigger, .. }, close) = (self.place()?, self.force.close?);
        let before = match self.harmony {
            true => "",
            false => self.force.before_name.strip_prefix(trigger)?,
        };
        let text = |text: &str| literal(text, tokenizer);
        let mut lark = String::from("start: ");
        let first = match begun {
            ForcedPrefix::Nothing => format!("{} call", text(self.force.before_name)),
            ForcedPrefix::Trigger => format!("{} call", text(before)),
            ForcedPrefix::Name => "call".to_owned(),
            ForcedPrefix::Arguments => "arguments0".to_owned(),
        };
        let more = match self.force.next {
            "" => String::new(),
            next => format!("({} call)*", text(next)),
        };
        let more = if several && begun != ForcedPrefix::Arguments { more } else { String::new() };
        writeln!(lark, "{first} {more} {}", text(close)).ok()?;
        if begun != ForcedPrefix::Arguments {
            let names = (0..callees.len()).map(|index| format!("call{index}")).collect::<Vec<_>>();
            writeln!(lark, "call: {}", names.join(" | ")).ok()?;
            for (index, callee) in callees.iter().enumerate() {
                let (name, after) = (text(&callee.name), text(self.force.after_name));
                // Kimi numbers its calls.
                let after = match self.force.after_name.strip_prefix(":0") {
                    Some(rest) => format!("\":\" /[0-9]{{1,2}}/ {}", text(rest)),
                    None => after,
                };
                writeln!(lark, "call{index}: {name} {after} arguments{index}").ok()?;
            }
        }
        for (index, callee) in callees.iter().enumerate() {
            let mut schema = match &callee.schema {
                Some(Value::Object(schema)) => schema.clone(),
                _ => Map::from_iter([("type".to_owned(), "object".into())]),
            };
            // Arguments are an object, whatever a schema leaves open.
            schema.entry("type").or_insert_with(|| json!("object"));
            let schema = Whitespace::default().apply(Value::Object(schema)).ok()?;
            writeln!(lark, "arguments{index}: /[ \\n]?/ schema{index}\nschema{index}: %json {schema}")
                .ok()?;
        }
        Some(Syntax::Grammar(lark))
    }
}

impl ToolFormat {
    /// An answer that is either JSON as `answer` allows, or calls. `None`: calls of this format cannot be told apart so.
    pub fn calls_or_json(
        &self,
        callees: &[CallableFunction],
        answer: &Value,
        several: bool,
        tokenizer: &Tokenizer,
    ) -> Option<Syntax> {
        if self.harmony {
            // Both are messages there, each with a header of its own.
            return None;
        }
        let Syntax::Grammar(calls) = self.calls(callees, ForcedPrefix::Nothing, several, tokenizer)? else {
            return None;
        };
        let calls = calls.strip_prefix("start: ")?;
        Some(Syntax::Grammar(format!("start: calls | answer\nanswer: %json {answer}\ncalls: {calls}")))
    }
}

impl ToolFormat {
    /// An answer that is calls and nothing else, behind a line or two that may be empty; gpt-oss's is a message that follows another. `None`:
    /// as of [`ToolFormat::calls`].
    pub fn only_calls(
        &self,
        callees: &[CallableFunction],
        several: bool,
        tokenizer: &Tokenizer,
    ) -> Option<Syntax> {
        let Syntax::Grammar(calls) = self.calls(callees, ForcedPrefix::Nothing, several, tokenizer)? else {
            return None;
        };
        let calls = calls.strip_prefix("start: ")?;
        let before = self.before_answer(tokenizer);
        Some(Syntax::Grammar(format!("start: {before} calls\ncalls: {calls}")))
    }

    /// The beginning of an answer that is a call, up to the arguments. For every format, also where the arguments have no grammar.
    pub fn begun_call(&self, callees: &[CallableFunction], tokenizer: &Tokenizer) -> Syntax {
        let force = &self.force;
        let text = |text: &str| literal(text, tokenizer);
        let names = callees.iter().map(|callee| text(&callee.name)).collect::<Vec<_>>();
        let (before, opening, after) =
            (self.before_answer(tokenizer), text(force.before_name), text(force.after_name));
        Syntax::Grammar(format!("start: {before} {opening} name {after}\nname: {}\n", names.join(" | ")))
    }

    /// What comes between reasoning and an answer.
    fn before_answer(&self, tokenizer: &Tokenizer) -> String {
        match self.harmony {
            true => literal(&format!("{}assistant", super::harmony::START), tokenizer),
            false => "/[ \\n]{0,2}/".to_owned(),
        }
    }
}

/// A text for Lark: control tokens are named by their ids, as no spelling stands for them.
fn literal(text: &str, tokenizer: &Tokenizer) -> String {
    let mut parts = Vec::new();
    let mut rest = text;
    let quoted = |text: &str| Value::from(text).to_string();
    while !rest.is_empty() {
        let found = tokenizer
            .special_ids()
            .filter_map(|id| {
                let token =
                    std::str::from_utf8(tokenizer.token_bytes(id)).ok().filter(|token| !token.is_empty())?;
                Some((rest.find(token)?, std::cmp::Reverse(token.len()), id))
            })
            .min();
        let Some((at, std::cmp::Reverse(len), id)) = found else {
            parts.push(quoted(rest));
            break;
        };
        if at > 0 {
            parts.push(quoted(&rest[..at]));
        }
        parts.push(format!("<[{id}]>"));
        rest = &rest[at + len..];
    }
    parts.join(" ")
}
