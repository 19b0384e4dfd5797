//! Chat templates: a conversation to the text a model was trained on.
//!
//! Owns: finding a checkpoint's templates, compiling them, and rendering them as transformers' Jinja does. Must never:
//! read a clock (the date is an input), touch the network or the disk while rendering, or run without a bound (templates
//! come from strangers: instructions, recursion, bytes made and work inside instructions are limited; see `machine`).
//!
//! Cost: compiled once; rendering is linear in the conversation, and what a template makes of it is counted as work. As quick work
//! ([`crate::work::quick`]) a rendering has a small part of every bound, and gives up beyond it.

mod breaking;
mod functions;
mod guards;
mod json;
mod machine;
mod meter;
mod strftime;
mod tools;
mod wrapped;

pub use strftime::rfc_3339;
pub use tools::TemplateTools;

use std::collections::BTreeMap;
use std::path::Path;

use folio_model::checkpoint::gguf::Metadata;
use minijinja::{Environment, ErrorKind, Value};
use serde_json::Value as Json;

use crate::error::TextError;
use crate::prompt::Prompt;
use crate::reasoning::ReasoningFormat;
use crate::tokenizer::{Object, SpecialTokens, parse_object, read_optional};
use crate::tools::ToolFormat;
use crate::work;
use breaking::{Breaking, Markers, TakenCharacters};
use machine::Machine;

/// Where templates were found: name -> (source, origin for messages).
#[derive(Clone, Debug, Default)]
pub struct TemplateSources {
    templates: BTreeMap<String, (String, String)>,
}

/// One conversation to render.
#[derive(Clone, Copy, Debug)]
pub struct ChatInput<'a> {
    /// OpenAI's messages, already validated.
    pub messages: &'a [Json],
    pub tools: Option<&'a [Json]>,
    pub documents: Option<&'a [Json]>,
    /// End with the header of the assistant's turn.
    pub add_generation_prompt: bool,
    /// `chat_template_kwargs`: further variables.
    pub kwargs: &'a Object,
    /// Seconds since 1970 UTC, for templates that print the date.
    pub now_unix_s: i64,
    /// How the model marks reasoning and calls: where an earlier answer has them in its content, the marks stay marks.
    pub formats: AnswerFormats,
}

/// How answers are told apart into text, reasoning and calls.
#[derive(Clone, Copy, Debug, Default)]
pub struct AnswerFormats {
    pub tools: Option<&'static ToolFormat>,
    pub reasoning: Option<&'static ReasoningFormat>,
}

pub struct ChatTemplate {
    environment: Environment<'static>,
    /// For quick work.
    quick: Environment<'static>,
    templates: BTreeMap<String, Machine>,
    origins: BTreeMap<String, String>,
    special: BTreeMap<String, String>,
    markers: Option<Markers>,
    /// What the templates have of [`breaking::SEAMS`].
    taken: TakenCharacters,
}

impl std::fmt::Debug for ChatTemplate {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ChatTemplate").field("origins", &self.origins).finish()
    }
}

/// Instructions a template may execute; the longest real conversation needs a small part of it.
const FUEL: u64 = 50_000_000;
/// Of quick work: some hundred microseconds. A few short messages take a tenth of it.
const QUICK_FUEL: u64 = 10_000;
/// Longest text of quick work, bytes: it is tokenized next.
const QUICK_TEXT: usize = 16 << 10;
const DEFAULT: &str = "default";
const TOOL_USE: &str = "tool_use";
const RESERVED: [&str; 4] = ["messages", "tools", "documents", "add_generation_prompt"];

impl TemplateSources {
    /// `chat_template.jinja` and `additional_chat_templates/*.jinja`, else what tokenizer_config.json holds.
    pub fn from_folder(folder: &Path) -> Result<Self, TextError> {
        let config = read_optional(&folder.join("tokenizer_config.json"))?;
        let mut sources = Self::from_config(config.as_deref())?;
        if let Some(source) = read_optional(&folder.join("chat_template.jinja"))? {
            // A template file replaces what the configuration says, as in transformers.
            sources.templates.clear();
            sources.add(DEFAULT, &String::from_utf8_lossy(&source), "chat_template.jinja");
        }
        let additional = folder.join("additional_chat_templates");
        let entries = match std::fs::read_dir(&additional) {
            Ok(entries) => entries,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(sources),
            Err(source) => return Err(TextError::Io { path: additional, source }),
        };
        for entry in entries {
            let path = entry.map_err(|source| TextError::Io { path: additional.clone(), source })?.path();
            let Some(name) = path.file_name().and_then(|n| n.to_str()).and_then(|n| n.strip_suffix(".jinja"))
            else {
                continue;
            };
            if let Some(source) = read_optional(&path)? {
                let origin = format!("additional_chat_templates/{name}.jinja");
                sources.add(name, &String::from_utf8_lossy(&source), &origin);
            }
        }
        Ok(sources)
    }

    /// `chat_template` of tokenizer_config.json: a string, or a list of `{"name", "template"}`.
    pub fn from_config(tokenizer_config_json: Option<&[u8]>) -> Result<Self, TextError> {
        let config = parse_object("tokenizer_config.json", tokenizer_config_json)?;
        let mut sources = Self::default();
        let bad = |reason: &str| TextError::BadConfig {
            file: "tokenizer_config.json".into(),
            reason: format!("chat_template: {reason}"),
        };
        match config.get("chat_template") {
            None | Some(Json::Null) => {}
            Some(Json::String(source)) => sources.add(DEFAULT, source, "tokenizer_config.json"),
            Some(Json::Array(list)) => {
                for item in list {
                    let text = |key| item.get(key).and_then(Json::as_str);
                    let name = text("name").ok_or_else(|| bad("an entry has no name"))?;
                    let source = text("template").ok_or_else(|| bad("an entry has no template"))?;
                    sources.add(name, source, &format!("tokenizer_config.json ({name})"));
                }
            }
            Some(_) => return Err(bad("neither a string nor a list of named templates")),
        }
        Ok(sources)
    }

    /// `tokenizer.chat_template` of a GGUF file and its named variants.
    pub fn from_gguf(metadata: Metadata<'_>) -> Result<Self, TextError> {
        const KEY: &str = "tokenizer.chat_template";
        let bad = |error: folio_model::ModelError| TextError::BadTemplate {
            origin: metadata.file().to_owned(),
            reason: error.to_string(),
        };
        let mut sources = Self::default();
        for key in metadata.keys() {
            let name = match key.strip_prefix(KEY) {
                Some("") => DEFAULT,
                Some(rest) => match rest.strip_prefix('.') {
                    Some(name) => name,
                    None => continue,
                },
                None => continue,
            };
            if let Some(source) = metadata.text(key).map_err(bad)? {
                sources.add(name, source, &format!("{key} of {}", metadata.file()));
            }
        }
        Ok(sources)
    }

    /// Adds or replaces a template. `default` is used unless another name is asked for.
    pub fn add(&mut self, name: &str, source: &str, origin: &str) {
        self.templates.insert(name.into(), (source.into(), origin.into()));
    }

    pub fn is_empty(&self) -> bool {
        self.templates.is_empty()
    }
}

impl ChatTemplate {
    /// `None` when the checkpoint has no template: chat is then refused with [`TextError::NoTemplate`].
    pub fn from_folder(folder: &Path, special: &SpecialTokens) -> Result<Option<Self>, TextError> {
        Self::compile(TemplateSources::from_folder(folder)?, special)
    }

    /// Compiles all templates; `None` when there are none.
    pub fn compile(sources: TemplateSources, special: &SpecialTokens) -> Result<Option<Self>, TextError> {
        if sources.is_empty() {
            return Ok(None);
        }
        let mut environment = functions::environment();
        environment.set_fuel(Some(FUEL));
        let mut quick = functions::environment();
        quick.set_fuel(Some(QUICK_FUEL));
        let (mut origins, mut templates) = (BTreeMap::new(), BTreeMap::new());
        let mut taken = TakenCharacters::default();
        let texts: Vec<&str> = sources.templates.values().map(|(source, _)| source.as_str()).collect();
        texts.iter().for_each(|source| taken.see_text(source));
        let markers = Markers::new(&special.added, &texts);
        for (name, (source, origin)) in sources.templates {
            let source = functions::strip_generation_tags(&source);
            let machine = Machine::compile(&name, source, functions::syntax())
                .map_err(|e| TextError::BadTemplate { origin: origin.clone(), reason: describe(&e) })?;
            templates.insert(name.clone(), machine);
            origins.insert(name, origin);
        }
        let special =
            special.named.iter().map(|(name, text)| (format!("{name}_token"), text.clone())).collect();
        Ok(Some(Self { environment, quick, templates, origins, special, markers, taken }))
    }

    /// Where the default template came from, for the line printed at start.
    pub fn origin(&self) -> &str {
        self.origins.get(DEFAULT).or_else(|| self.origins.values().next()).map_or("", String::as_str)
    }

    /// Renders with `tool_use` when tools are given and such a template exists, else with `default`. Markers in the
    /// conversation are broken; see [`Prompt`].
    pub fn render(&self, input: &ChatInput<'_>) -> Result<Prompt, TextError> {
        let name = match input.tools {
            Some(_) if self.origins.contains_key(TOOL_USE) => TOOL_USE,
            _ => DEFAULT,
        };
        let known = || self.origins.keys().cloned().collect::<Vec<_>>().join(", ");
        let (origin, template) = self
            .origins
            .get(name)
            .zip(self.templates.get(name))
            .ok_or_else(|| TextError::UnknownTemplate { name: name.into(), known: known() })?;
        if let Some(name) = RESERVED.iter().find(|name| input.kwargs.contains_key(**name)) {
            return Err(TextError::ReservedKwarg(name.to_string()));
        }
        let fail = |error: minijinja::Error| match functions::refusal(&error) {
            Some(message) => TextError::Refused(message),
            None => {
                if work::is_quick() {
                    // By how much it may do, or in earnest: that is found out where there is time.
                    work::add(QUICK_FUEL as usize + meter::QUICK_STEPS);
                    work::give_up();
                }
                TextError::Render { origin: origin.clone(), reason: describe(&error) }
            }
        };
        let breaking = Breaking::new(self.markers.as_ref(), &self.taken, input)?;
        let environment = if work::is_quick() { &self.quick } else { &self.environment };
        let rendered = template.render(environment, self.variables(input, &breaking)).map_err(fail)?;
        work::add(rendered.text.len());
        if work::is_quick() && rendered.text.len() > QUICK_TEXT {
            work::give_up();
            return Err(TextError::TooLong { bytes: rendered.text.len(), limit: QUICK_TEXT });
        }
        Ok(Prompt::new(rendered.text, rendered.before_answer, breaking.seam))
    }

    fn variables(&self, input: &ChatInput<'_>, breaking: &Breaking<'_>) -> Value {
        let text = |text: &str| Value::from(breaking.text(text, &[]));
        let mut variables: Vec<(String, Value)> = Vec::new();
        for (name, text) in &self.special {
            variables.push((name.clone(), Value::from(text.clone())));
        }
        for (name, value) in input.kwargs {
            variables.push((name.clone(), json::to_value(value, &text)));
        }
        let optional = |items: Option<&[Json]>| {
            let list =
                |items: &[Json]| items.iter().map(|item| json::to_value(item, &text)).collect::<Vec<_>>();
            items.map_or(Value::from(()), |items| Value::from(list(items)))
        };
        let messages = input.messages.iter().map(|message| message_value(message, input, breaking));
        variables.push(("messages".into(), Value::from(messages.collect::<Vec<_>>())));
        variables.push(("tools".into(), optional(input.tools)));
        variables.push((meter::INPUT_BYTES.into(), Value::from(input_bytes(input))));
        variables.push((meter::QUICK.into(), Value::from(work::is_quick())));
        variables.push(("documents".into(), optional(input.documents)));
        variables.push(("add_generation_prompt".into(), Value::from(input.add_generation_prompt)));
        variables.push(("strftime_now".into(), functions::strftime_now(input.now_unix_s)));
        Value::from_pairs(variables)
    }
}

/// Roughly what the conversation takes.
fn input_bytes(input: &ChatInput<'_>) -> usize {
    fn of(value: &Json) -> usize {
        16 + match value {
            Json::String(text) => text.len(),
            Json::Array(items) => items.iter().map(of).sum(),
            Json::Object(map) => map.iter().map(|(key, value)| key.len() + of(value)).sum(),
            _ => 0,
        }
    }
    let lists = [Some(input.messages), input.tools, input.documents];
    let kwargs = input.kwargs.values().map(of).sum::<usize>();
    lists.into_iter().flatten().flatten().map(of).sum::<usize>() + kwargs
}

fn message_value(message: &Json, input: &ChatInput<'_>, breaking: &Breaking<'_>) -> Value {
    let text = |text: &str| Value::from(breaking.text(text, &[]));
    let Some(fields) = message.as_object().filter(|_| message["role"] == "assistant") else {
        return json::to_value(message, &text);
    };
    Value::from_pairs(fields.iter().map(|(key, value)| match value {
        Json::String(content) if key == "content" => {
            let own = breaking::own_markers(input, content);
            (text(key), Value::from(breaking.text(content, &own)))
        }
        value => (text(key), json::to_value(value, &text)),
    }))
}

/// The whole chain of causes on one line.
fn describe(error: &minijinja::Error) -> String {
    let mut text = match error.kind() {
        ErrorKind::OutOfFuel => "it ran for too long".to_owned(),
        _ => error.to_string(),
    };
    let mut source = std::error::Error::source(error);
    while let Some(cause) = source {
        text.push_str(": ");
        text.push_str(&cause.to_string());
        source = cause.source();
    }
    text
}
