//! What readers of requests know of the server: its model's names and numbers, its limits, and what its chat template can do.

use std::sync::Arc;

use folio_text::{ChatTemplate, ReasoningFormat, TemplateTools, ToolFormat};

use crate::effort::Efforts;
use crate::error::ApiError;
use crate::fields::Fields;
use crate::hints::HintPolicy;

/// See the module documentation.
#[derive(Clone, Debug)]
pub struct Context {
    pub model: Model,
    pub limits: RequestLimits,
    /// Fields that may be passed over.
    pub hints: HintPolicy,
    pub capabilities: Capabilities,
}

impl Context {
    /// Takes `model`, which is optional, as there is one; another name than its own is an adapter's, or a 404 where there are none.
    pub fn adapter(&self, fields: &mut Fields) -> Result<Option<String>, ApiError> {
        let other = fields.take::<String>("model")?.filter(|name| !self.model.answers_to(name));
        match other {
            Some(name) if !self.model.has_adapters => {
                Err(ApiError::model_not_found(&name, self.model.name()))
            }
            other => Ok(other),
        }
    }
}

/// The served model.
#[derive(Clone, Debug)]
pub struct Model {
    /// Names it answers to, and patterns of such names. The first that is no pattern is the one in responses.
    pub names: Vec<String>,
    /// Token ids at or above this are refused.
    pub vocab_size: u32,
    pub eos_token_ids: Arc<[u32]>,
    /// Values of a vector.
    pub hidden: u32,
    /// From `generation_config.json`.
    pub defaults: SamplingDefaults,
    /// Other names may be those of its adapters, which come and go; whoever serves them knows.
    pub has_adapters: bool,
}

impl Model {
    pub fn name(&self) -> &str {
        self.listed().next().map_or("", String::as_str)
    }

    /// Names that are no patterns.
    pub fn listed(&self) -> impl Iterator<Item = &String> {
        self.names.iter().filter(|name| !is_pattern(name))
    }

    /// Whether a request for a model of this name is for this one. Linear in the name.
    pub fn answers_to(&self, asked: &str) -> bool {
        self.names.iter().any(|name| matches(name, asked))
    }

    /// Refuses ids the model does not have.
    pub fn check_token_ids(&self, ids: &[u32], param: &str) -> Result<(), ApiError> {
        let Some(id) = ids.iter().find(|id| **id >= self.vocab_size) else { return Ok(()) };
        let last = self.vocab_size - 1;
        let message = format!("Invalid '{param}': {id} is not a token id of this model (0 to {last}).");
        Err(ApiError::invalid(param, message))
    }
}

/// What the model's own `generation_config.json` says; OpenAI's defaults stand where it is silent.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SamplingDefaults {
    pub temperature: Option<f32>,
    pub top_k: Option<u32>,
    pub top_p: Option<f32>,
    pub min_p: Option<f32>,
    pub repetition_penalty: Option<f32>,
    /// `max_new_tokens`: the default of max_tokens.
    pub max_tokens: Option<u32>,
}

/// Whether a name stands for many: `*` in it is any text.
pub fn is_pattern(name: &str) -> bool {
    name.contains('*')
}

/// Whether `name` is `pattern`, or one of the names that it stands for. Linear in the name.
pub fn matches(pattern: &str, name: &str) -> bool {
    let mut parts = pattern.split('*');
    let first = parts.next().unwrap_or_default();
    let Some(mut rest) = name.strip_prefix(first) else { return false };
    let Some(last) = parts.next_back() else { return rest.is_empty() };
    for part in parts {
        // The earliest place leaves the most for what follows.
        let Some(at) = rest.find(part) else { return false };
        rest = &rest[at + part.len()..];
    }
    rest.ends_with(last)
}

/// What one request may hold.
#[derive(Clone, Debug)]
pub struct RequestLimits {
    /// Choices per prompt (`n`).
    pub choices: u32,
    /// Prompts in one completions request.
    pub prompts: usize,
    /// Inputs in one embeddings request; OpenAI's limit.
    pub embedding_inputs: usize,
    /// Prompts times choices in one request.
    pub total_choices: usize,
    pub messages: usize,
    /// Functions a request may offer.
    pub tools: usize,
    pub stop_strings: usize,
    pub stop_string_bytes: usize,
    pub stop_token_ids: usize,
    pub logit_bias: usize,
    pub bad_words: usize,
    /// Bytes of a schema, regular expression or grammar.
    pub grammar_bytes: usize,
    /// Alternatives per token, for `logprobs`, `top_logprobs` and `prompt_logprobs`.
    pub logprobs: u32,
}

impl Default for RequestLimits {
    fn default() -> Self {
        Self {
            choices: 128,
            prompts: 256,
            embedding_inputs: 2048,
            total_choices: 512,
            messages: 4096,
            tools: 512,
            stop_strings: 16,
            stop_string_bytes: 1024,
            stop_token_ids: 256,
            logit_bias: 1024,
            bad_words: 256,
            grammar_bytes: 256 << 10,
            logprobs: 20,
        }
    }
}

/// The formats of the served model.
#[derive(Clone, Copy, Debug, Default)]
pub struct Parsers {
    /// `None`: tools are refused.
    pub tools: Option<&'static ToolFormat>,
    /// `None`: reasoning is part of the content.
    pub reasoning: Option<&'static ReasoningFormat>,
}

impl Parsers {
    /// What the model's own chat template means.
    pub fn of_template(template: &ChatTemplate) -> Self {
        // The first of the templates (the one for tools) that tells.
        let sources: Vec<String> = template.sources().collect();
        Self {
            tools: sources.iter().find_map(|source| ToolFormat::of_template(source)),
            reasoning: sources.iter().find_map(|source| ReasoningFormat::of_template(source)),
        }
    }
}

/// What the model's chat template and formats can do.
#[derive(Clone, Debug, Default)]
pub struct Capabilities {
    pub parsers: Parsers,
    pub template: Option<TemplateTools>,
    /// What it can be told about how much to think.
    pub efforts: Efforts,
}

impl Capabilities {
    pub fn new(parsers: Parsers, template: Option<&ChatTemplate>) -> Self {
        let known = template.map(ChatTemplate::tools);
        Self {
            parsers,
            efforts: Efforts::of(template, known.as_ref(), parsers.reasoning.is_some()),
            template: known,
        }
    }

    /// Whether the model is known to mark its reasoning.
    pub fn reasons(&self) -> bool {
        self.parsers.reasoning.is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::matches;

    #[test]
    fn a_star_is_any_text() {
        for (pattern, name, fits) in [
            ("claude-*", "claude-opus-5-5", true),
            ("claude-*", "claude-", true),
            ("claude-*", "claude", false),
            ("*", "", true),
            ("*haiku*", "claude-haiku-4-5", true),
            ("gpt-*-mini", "gpt-5-mini", true),
            ("gpt-*-mini", "gpt-mini", false),
            ("a*b*c", "a-b-b-c", true),
            ("a*b*c", "a-c-b", false),
            ("a*a", "a", false),
        ] {
            assert_eq!(matches(pattern, name), fits, "{pattern} {name}");
        }
    }
}
