//! The request of `POST /v1/completions`, and the prompts of one.

use std::fmt;

use serde::de::{Deserialize, Deserializer, Error, SeqAccess, Visitor};

use crate::context::Context;
use crate::error::ApiError;
use crate::fields::{Fields, within};
use crate::hints::{Api, Hints, Notes};
use crate::openapi::tables::COMPLETION;
use crate::params::Generation;

/// OpenAI's default.
const MAX_TOKENS: u32 = 16;

/// What to go on with, and how.
pub struct CompletionsRequest {
    pub generation: Generation,
    pub prompts: Vec<PromptInput>,
    /// The prompt's own log probabilities are part of the answer's.
    pub echo_logprobs: bool,
    pub notes: Notes,
}

/// Reads a request.
pub fn read(body: &[u8], context: &Context) -> Result<CompletionsRequest, ApiError> {
    let limits = &context.limits;
    let mut fields = Fields::of_body(body)?;
    let hints = Hints::new(&context.hints, Api::Completions);
    let adapter = context.adapter(&mut fields)?;
    let mut generation = Generation { adapter, ..Generation::read(&mut fields, context)? };
    let logprobs = fields.take("logprobs")?;
    generation.sampling.logprobs = within(&fields, "logprobs", logprobs, (0, limits.logprobs))?;
    generation.max_tokens = Some(fields.take("max_tokens")?.unwrap_or(MAX_TOKENS));
    best_of(&mut fields, generation.n)?;
    if fields.take::<&str>("suffix").map_or(true, |suffix| suffix.is_some_and(|suffix| !suffix.is_empty())) {
        return Err(ApiError::unsupported("suffix", "the model only continues text"));
    }
    let prompts: PromptInputs = fields.require("prompt")?;
    let notes = hints.close(fields, &COMPLETION)?;
    let echo_logprobs = generation.echo && generation.sampling.logprobs.is_some();
    if echo_logprobs {
        // The prompt's part of the answer's logprobs.
        generation.prompt_logprobs = generation.prompt_logprobs.max(generation.sampling.logprobs);
    }
    let prompts = prompts.into_list(limits.prompts, "prompt")?;
    if prompts.len() * generation.n as usize > limits.total_choices {
        let (prompts, n, limit) = (prompts.len(), generation.n, limits.total_choices);
        let message =
            format!("'n' is {n} for {prompts} prompts; the limit is {limit} choices in one request.");
        return Err(ApiError::invalid("n", message));
    }
    let ids = prompts
        .iter()
        .filter_map(|prompt| if let PromptInput::Tokens(ids) = prompt { Some(ids) } else { None });
    for ids in ids {
        context.model.check_token_ids(ids, "prompt")?;
    }
    Ok(CompletionsRequest { generation, prompts, echo_logprobs, notes })
}

fn best_of(fields: &mut Fields, n: u32) -> Result<(), ApiError> {
    match fields.take::<u32>("best_of")? {
        Some(best_of) if best_of != n => {
            Err(ApiError::unsupported("best_of", "only the value of n; choices are not ranked"))
        }
        _ => Ok(()),
    }
}

/// One prompt.
pub enum PromptInput {
    Text(String),
    Tokens(Vec<u32>),
}

/// The `prompt` field: text, token ids, or a list of either. Read without an intermediate tree.
pub enum PromptInputs {
    One(PromptInput),
    Texts(Vec<String>),
    TokenLists(Vec<Vec<u32>>),
}

impl PromptInputs {
    /// At most `limit` of them; `param` names the field.
    pub fn into_list(self, limit: usize, param: &str) -> Result<Vec<PromptInput>, ApiError> {
        let list: Vec<PromptInput> = match self {
            Self::One(prompt) => vec![prompt],
            Self::Texts(list) => list.into_iter().map(PromptInput::Text).collect(),
            Self::TokenLists(list) => list.into_iter().map(PromptInput::Tokens).collect(),
        };
        if list.len() > limit {
            let message = format!("'{param}' has {} prompts; the limit is {limit}.", list.len());
            return Err(ApiError::invalid(param, message));
        }
        Ok(list)
    }
}

enum Element {
    Text(String),
    Token(u32),
    Tokens(Vec<u32>),
}

const EXPECTED: &str =
    "a string, an array of strings, an array of token ids, or an array of arrays of token ids";

impl<'de> Deserialize<'de> for Element {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct ElementVisitor;
        impl<'de> Visitor<'de> for ElementVisitor {
            type Value = Element;
            fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
                f.write_str(EXPECTED)
            }
            fn visit_str<E: Error>(self, text: &str) -> Result<Element, E> {
                Ok(Element::Text(text.to_owned()))
            }
            fn visit_u64<E: Error>(self, id: u64) -> Result<Element, E> {
                u32::try_from(id)
                    .map(Element::Token)
                    .map_err(|_| E::custom(format!("{id} is not a token id")))
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Element, A::Error> {
                let mut tokens = Vec::new();
                while let Some(id) = seq.next_element()? {
                    tokens.push(id);
                }
                Ok(Element::Tokens(tokens))
            }
        }
        deserializer.deserialize_any(ElementVisitor)
    }
}

impl<'de> Deserialize<'de> for PromptInputs {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct PromptsVisitor;
        impl<'de> Visitor<'de> for PromptsVisitor {
            type Value = PromptInputs;
            fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
                f.write_str(EXPECTED)
            }
            fn visit_str<E: Error>(self, text: &str) -> Result<PromptInputs, E> {
                Ok(PromptInputs::One(PromptInput::Text(text.to_owned())))
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<PromptInputs, A::Error> {
                let mixed = || A::Error::custom("the prompts are of different kinds");
                match seq.next_element()? {
                    None => Err(A::Error::custom("the array of prompts is empty")),
                    Some(Element::Token(first)) => {
                        let mut tokens = vec![first];
                        while let Some(element) = seq.next_element()? {
                            let Element::Token(id) = element else { return Err(mixed()) };
                            tokens.push(id);
                        }
                        Ok(PromptInputs::One(PromptInput::Tokens(tokens)))
                    }
                    Some(Element::Text(first)) => {
                        let mut texts = vec![first];
                        while let Some(element) = seq.next_element()? {
                            let Element::Text(text) = element else { return Err(mixed()) };
                            texts.push(text);
                        }
                        Ok(PromptInputs::Texts(texts))
                    }
                    Some(Element::Tokens(first)) => {
                        let mut lists = vec![first];
                        while let Some(element) = seq.next_element()? {
                            let Element::Tokens(tokens) = element else { return Err(mixed()) };
                            lists.push(tokens);
                        }
                        Ok(PromptInputs::TokenLists(lists))
                    }
                }
            }
        }
        deserializer.deserialize_any(PromptsVisitor)
    }
}
