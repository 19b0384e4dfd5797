//! `POST /v1/completions`.

use std::fmt;

use folio_kv::TenantId;
use serde::de::{Deserialize, Deserializer, Error, SeqAccess, Visitor};

use crate::api::error::ApiError;
use crate::api::fields::{Fields, within};
use crate::api::hints::{Api, Hints};
use crate::api::openai::chat::check_model;
use crate::api::openai::shape::{Kind, Shape};
use crate::api::openapi::tables::COMPLETION;
use crate::api::params::{Generation, check_token_ids};
use crate::app::State;
use crate::generation::generate::{Job, PromptJob};
use crate::generation::safety::{Screened, asker, screen_prompt};
use crate::generation::tokenizing::encode;
use crate::http::Arrival;

const CHAT_ONLY: &str = "it belongs to chat completions";

/// What this endpoint refuses beside [`params::REFUSED`](crate::api::params::REFUSED).
pub const REFUSED: &[(&str, &str)] = &[
    ("include_reasoning", CHAT_ONLY),
    ("parallel_tool_calls", CHAT_ONLY),
    ("reasoning_effort", CHAT_ONLY),
    ("suffix", "the model only continues text"),
    ("tool_choice", CHAT_ONLY),
    ("tools", CHAT_ONLY),
];

/// OpenAI's default.
const MAX_TOKENS: u32 = 16;

pub(crate) fn prepare(state: &State, arrival: &Arrival) -> Result<Job, ApiError> {
    let facts = &state.app.model;
    let limits = &state.config.limits;
    let mut fields = Fields::of_body(&arrival.body)?;
    let hints = Hints::new(&state.config.hints, Api::Completions);
    check_model(&mut fields, state)?;
    let mut generation = Generation::read(&mut fields, facts, limits)?;
    let logprobs = fields.take("logprobs")?;
    generation.sampling.logprobs = within(&fields, "logprobs", logprobs, (0, limits.logprobs))?;
    generation.max_tokens = Some(fields.take("max_tokens")?.unwrap_or(MAX_TOKENS));
    best_of(&mut fields, generation.n)?;
    if fields.take::<&str>("suffix").map_or(true, |suffix| suffix.is_some_and(|suffix| !suffix.is_empty())) {
        return Err(ApiError::unsupported("suffix", "the model only continues text"));
    }
    let prompts: Prompts = fields.require("prompt")?;
    let notes = hints.close(fields, &COMPLETION)?;
    generation.follow(state, arrival.tenant.id, None)?;

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
    let job = |(index, prompt)| {
        let (screened, prompt) = screen(state, arrival, index, prompt)?;
        Ok(PromptJob {
            screened,
            ..prompt_job(state, arrival.tenant.id, prompt, &generation, echo_logprobs)?
        })
    };
    let prompts: Result<Vec<PromptJob>, ApiError> = prompts.into_iter().enumerate().map(job).collect();
    let shape = Shape::new(state, Kind::Completion, &arrival.id, &generation);
    let asker = asker(state, arrival, "completions");
    Ok(Job { wire: Box::new(shape), generation, prompts: prompts?, arrived: arrival.at, asker, notes })
}

/// Judges a prompt; token ids are judged, and replaced, as the text they are.
fn screen(
    state: &State,
    arrival: &Arrival,
    index: usize,
    prompt: Prompt,
) -> Result<(Screened, Prompt), ApiError> {
    if let Prompt::Tokens(tokens) = &prompt {
        check_token_ids(tokens, &state.app.model, "prompt")?;
    }
    let (screened, replaced) = screen_prompt(state, arrival, index, || match &prompt {
        Prompt::Text(text) => text.clone(),
        Prompt::Tokens(tokens) => state.app.tokenizer.decode(tokens, false),
    })?;
    Ok((screened, replaced.map_or(prompt, Prompt::Text)))
}

fn prompt_job(
    state: &State,
    tenant: TenantId,
    prompt: Prompt,
    generation: &Generation,
    echo_logprobs: bool,
) -> Result<PromptJob, ApiError> {
    let facts = &state.app.model;
    let tokenizer = &state.app.tokenizer;
    let (mut tokens, text) = match prompt {
        Prompt::Text(text) => {
            let special = generation.add_special_tokens.unwrap_or(true);
            let truncated = generation.truncate_prompt.is_some();
            (encode(state, Some(tenant), &text, special, truncated, "prompt")?, Some(text))
        }
        Prompt::Tokens(tokens) => (tokens, None),
    };
    let before = tokens.len();
    let mut params = generation.fit(&mut tokens, facts, "prompt")?;
    // The engine always chooses a token; with 0 nobody sees it.
    params.max_tokens = params.max_tokens.max(1);
    let text = text.filter(|_| tokens.len() == before);
    let echo = generation
        .echo
        .then(|| text.unwrap_or_else(|| tokenizer.decode(&tokens, generation.skip_special_tokens)));
    let retention = generation.cache.ranges(tokens.len() as u32)?;
    let screened = Screened::default();
    Ok(PromptJob { tokens: tokens.into(), params, echo, echo_logprobs, retention, screened })
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
pub(crate) enum Prompt {
    Text(String),
    Tokens(Vec<u32>),
}

/// The `prompt` field: text, token ids, or a list of either. Read without an intermediate tree.
pub(crate) enum Prompts {
    One(Prompt),
    Texts(Vec<String>),
    TokenLists(Vec<Vec<u32>>),
}

impl Prompts {
    /// At most `limit` of them; `param` names the field.
    pub fn into_list(self, limit: usize, param: &str) -> Result<Vec<Prompt>, ApiError> {
        let list: Vec<Prompt> = match self {
            Self::One(prompt) => vec![prompt],
            Self::Texts(list) => list.into_iter().map(Prompt::Text).collect(),
            Self::TokenLists(list) => list.into_iter().map(Prompt::Tokens).collect(),
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

impl<'de> Deserialize<'de> for Prompts {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct PromptsVisitor;
        impl<'de> Visitor<'de> for PromptsVisitor {
            type Value = Prompts;
            fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
                f.write_str(EXPECTED)
            }
            fn visit_str<E: Error>(self, text: &str) -> Result<Prompts, E> {
                Ok(Prompts::One(Prompt::Text(text.to_owned())))
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Prompts, A::Error> {
                let mixed = || A::Error::custom("the prompts are of different kinds");
                match seq.next_element()? {
                    None => Err(A::Error::custom("the array of prompts is empty")),
                    Some(Element::Token(first)) => {
                        let mut tokens = vec![first];
                        while let Some(element) = seq.next_element()? {
                            let Element::Token(id) = element else { return Err(mixed()) };
                            tokens.push(id);
                        }
                        Ok(Prompts::One(Prompt::Tokens(tokens)))
                    }
                    Some(Element::Text(first)) => {
                        let mut texts = vec![first];
                        while let Some(element) = seq.next_element()? {
                            let Element::Text(text) = element else { return Err(mixed()) };
                            texts.push(text);
                        }
                        Ok(Prompts::Texts(texts))
                    }
                    Some(Element::Tokens(first)) => {
                        let mut lists = vec![first];
                        while let Some(element) = seq.next_element()? {
                            let Element::Tokens(tokens) = element else { return Err(mixed()) };
                            lists.push(tokens);
                        }
                        Ok(Prompts::TokenLists(lists))
                    }
                }
            }
        }
        deserializer.deserialize_any(PromptsVisitor)
    }
}
