//! What a chat template does with tools, found out by rendering small conversations with it.
//!
//! Templates differ in what they take: arguments of a call as an object or as text, content `null` or empty beside calls,
//! the reasoning's field name, and whether they know tools at all. Invariant: nothing is guessed from a template's name.
//! Cost: a handful of short renderings, once per model.

use serde_json::{Value as Json, json};

use super::{AnswerFormats, ChatInput, ChatTemplate};
use crate::prompt::Prompt;
use crate::tokenizer::Object;

/// How messages have to be put to a template.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TemplateTools {
    /// Tools that are given appear in the prompt.
    pub takes_tools: bool,
    /// Calls of earlier turns appear in the prompt.
    pub takes_calls: bool,
    /// Arguments of calls are an object; else JSON text, as OpenAI sends them.
    pub object_arguments: bool,
    /// Content beside calls may be `null`; else it is an empty string.
    pub null_content: bool,
    /// Reasoning of earlier turns is called `thinking` (gpt-oss); else `reasoning_content`.
    pub thinking: bool,
    /// The variable that turns reasoning on and off.
    pub thinking_switch: Option<&'static str>,
    /// A system message may stand anywhere; else only at the beginning, and once.
    pub late_system: bool,
    /// Messages of the user may follow one another.
    pub repeated_users: bool,
}

/// Variables that templates turn reasoning on and off with.
const SWITCHES: [&str; 2] = ["enable_thinking", "thinking"];

const KEY: &str = "folio_key";
const VALUE: &str = "folio_value";
const NAME: &str = "folio_probe";

impl ChatTemplate {
    /// True when any of the model's templates contains `text`.
    pub fn mentions(&self, text: &str) -> bool {
        self.sources().any(|source| source.contains(text))
    }

    /// The templates' own texts, the one for tools first.
    pub fn sources(&self) -> impl Iterator<Item = String> {
        let names = [super::TOOL_USE, super::DEFAULT].into_iter();
        names.filter_map(|name| self.templates.get(name)).map(|template| template.source().to_owned())
    }

    pub fn tools(&self) -> TemplateTools {
        let forms = [(true, true), (true, false), (false, true), (false, false)];
        let fits = forms.into_iter().find(|(object, null)| self.takes_call(*object, *null));
        let (object_arguments, null_content) = fits.unwrap_or((true, false));
        TemplateTools {
            takes_tools: self.takes_tools(),
            takes_calls: fits.is_some(),
            object_arguments,
            null_content,
            thinking: self.mentions("message.thinking"),
            thinking_switch: SWITCHES.into_iter().find(|name| self.switches_thinking(name)),
            late_system: self.shows_all(&["system", "system", "user", "assistant", "user", "system"]),
            repeated_users: self.shows_all(&["user", "user", "assistant", "user"]),
        }
    }

    /// Whether messages of these roles, in this order, all appear in the prompt.
    fn shows_all(&self, roles: &[&str]) -> bool {
        let text = |index: usize| format!("{NAME}_{index}");
        let messages: Vec<Json> = roles
            .iter()
            .enumerate()
            .map(|(index, role)| json!({"role": role, "content": text(index)}))
            .collect();
        self.probe(&messages, None)
            .is_some_and(|shown| (0..roles.len()).all(|index| shown.contains(&text(index))))
    }

    /// Whether the variable changes how the answer begins.
    fn switches_thinking(&self, name: &str) -> bool {
        let messages = [json!({"role": "user", "content": "Hi"})];
        let set = |on: bool| {
            let kwargs = Object::from_iter([(name.to_owned(), on.into())]);
            self.probe_with(&messages, None, &kwargs)
        };
        self.mentions(name) && set(true).zip(set(false)).is_some_and(|(on, off)| on != off)
    }

    fn takes_tools(&self) -> bool {
        let messages = [json!({"role": "user", "content": "Hi"})];
        let parameters = json!({"type": "object", "properties": {KEY: {"type": "string", "description": KEY}},
            "required": [KEY]});
        let function = json!({"name": NAME, "description": NAME, "parameters": parameters});
        let tools = [json!({"type": "function", "function": function})];
        self.probe(&messages, Some(&tools)).is_some_and(|text| text.contains(NAME))
    }

    fn takes_call(&self, object: bool, null: bool) -> bool {
        let arguments = if object { json!({KEY: VALUE}) } else { json!(json!({KEY: VALUE}).to_string()) };
        let call = json!({"id": "call12345", "type": "function",
            "function": {"name": NAME, "arguments": arguments}});
        let messages = [
            json!({"role": "user", "content": "Hi"}),
            json!({"role": "assistant", "content": if null { Json::Null } else { "".into() }, "tool_calls": [call]}),
            json!({"role": "tool", "tool_call_id": "call12345", "name": NAME, "content": "7"}),
        ];
        self.probe(&messages, None).is_some_and(|text| {
            // Neither Python's way of writing an object, nor JSON inside a JSON string, nor the word for nothing.
            let foreign = [format!("'{KEY}'"), format!("\\\"{KEY}"), "None".to_owned()];
            text.contains(VALUE) && text.contains(NAME) && !foreign.iter().any(|wrong| text.contains(wrong))
        })
    }

    fn probe(&self, messages: &[Json], tools: Option<&[Json]>) -> Option<String> {
        self.probe_with(messages, tools, &Object::new())
    }

    fn probe_with(&self, messages: &[Json], tools: Option<&[Json]>, kwargs: &Object) -> Option<String> {
        let input = ChatInput {
            messages,
            tools,
            documents: None,
            add_generation_prompt: true,
            kwargs,
            now_unix_s: 0,
            formats: AnswerFormats::default(),
        };
        self.render(&input).ok().map(Prompt::into_text)
    }
}
