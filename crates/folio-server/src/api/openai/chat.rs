//! `POST /v1/chat/completions`.

use folio_text::{AnswerFormats, ChatInput, Prompt, TextError};
use serde_json::{Map, Value};

use crate::api::effort::{self, EFFORT, Thinking};
use crate::api::error::ApiError;
use crate::api::fields::{Fields, within};
use crate::api::hints::{Api, Hints};
use crate::api::openai::messages;
use crate::api::openai::shape::{Kind, Shape};
use crate::api::openapi::tables::CHAT;
use crate::api::params::Generation;
use crate::api::tools::ToolUse;
use crate::app::State;
use crate::generation::generate::{Job, PromptJob, unix_s};
use crate::generation::reading::{Asked, Reading};
use crate::generation::safety::{asker, screen_conversation};
use crate::generation::tokenizing::encode_prompt;
use crate::http::Arrival;

/// What is particular to chat: how the conversation becomes a prompt.
#[derive(Clone, Debug)]
pub struct Conversation {
    pub messages: Vec<Value>,
    pub tools: ToolUse,
    /// Further variables of the template.
    pub kwargs: Map<String, Value>,
    /// Tokens of reasoning that the request's effort stands for, and the field that says so.
    pub budget: Option<(u32, &'static str)>,
    pub add_generation_prompt: bool,
    /// The model goes on inside the last message.
    pub continue_final: bool,
}

/// A conversation as the model reads it, and how its answer is read.
pub struct Rendered {
    pub prompt: Prompt,
    pub reading: Option<Reading>,
    /// Text of the last message where it is the assistant's.
    pub final_text: Option<String>,
}

pub(crate) fn prepare(state: &State, arrival: &Arrival) -> Result<Job, ApiError> {
    let reading = step!("read");
    let facts = &state.app.model;
    let limits = &state.config.limits;
    let mut fields = Fields::of_body(&arrival.body)?;
    let mut hints = Hints::new(&state.config.hints, Api::Chat);
    check_model(&mut fields, state)?;
    let mut generation = Generation::read(&mut fields, facts, limits)?;
    generation.sampling.logprobs = logprobs(&mut fields, limits.logprobs)?;
    generation.max_tokens = max_tokens(&mut fields)?;
    generation.stop_everywhere = fields.take("stop_everywhere")?.unwrap_or(false);
    let include_reasoning = fields.take("include_reasoning")?.unwrap_or(true);
    let mut conversation = Conversation::read(&mut fields, state, &mut hints)?;
    generation.bounds.thinking = generation.bounds.thinking.or(conversation.budget);
    let mut notes = hints.close(fields, &CHAT)?;
    notes.left_out = std::mem::take(&mut conversation.tools.left_out);
    drop(reading);

    let screened = screen_conversation(state, arrival, &mut conversation)?;
    let rendered = conversation.prompt(state, include_reasoning)?;
    generation.reading = rendered.reading;
    generation.follow(state, arrival.tenant.id, Some(&conversation))?;
    let special = generation.add_special_tokens.unwrap_or(false);
    let truncated = generation.truncate_prompt.is_some();
    let tenant = Some(arrival.tenant.id);
    let mut tokens = encode_prompt(state, tenant, &rendered.prompt, special, truncated, "messages")?;
    let params = generation.fit(&mut tokens, facts, "messages")?;
    let echo = generation.echo.then_some(rendered.final_text).flatten();
    let retention = generation.cache.ranges(tokens.len() as u32)?;
    let prompt = PromptJob { tokens: tokens.into(), params, echo, echo_logprobs: false, retention, screened };
    let shape = Shape::new(state, Kind::Chat, &arrival.id, &generation);
    let asker = asker(state, arrival, "chat.completions");
    Ok(Job { wire: Box::new(shape), generation, prompts: vec![prompt], arrived: arrival.at, asker, notes })
}

/// The model is optional, as there is one; another name than its own is a 404.
pub fn check_model(fields: &mut Fields, state: &State) -> Result<(), ApiError> {
    match fields.take::<String>("model")? {
        Some(name) if !state.app.model.answers_to(&name) => {
            Err(ApiError::model_not_found(&name, state.app.model.name()))
        }
        _ => Ok(()),
    }
}

fn logprobs(fields: &mut Fields, limit: u32) -> Result<Option<u32>, ApiError> {
    let wanted = fields.take::<bool>("logprobs")?.unwrap_or(false);
    let top = fields.take("top_logprobs")?;
    let top = within(fields, "top_logprobs", top, (0, limit))?;
    if top.is_some_and(|top| top > 0) && !wanted {
        return Err(ApiError::invalid(
            "top_logprobs",
            "'top_logprobs' is only allowed when 'logprobs' is true.",
        ));
    }
    Ok(wanted.then_some(top.unwrap_or(0)))
}

fn max_tokens(fields: &mut Fields) -> Result<Option<u32>, ApiError> {
    let new = fields.take("max_completion_tokens")?;
    let new = within(fields, "max_completion_tokens", new, (1, u32::MAX))?;
    let old = fields.take("max_tokens")?;
    let old = within(fields, "max_tokens", old, (1, u32::MAX))?;
    match (new, old) {
        (Some(new), Some(old)) if new != old => {
            let message = format!(
                "'max_tokens' ({old}) contradicts 'max_completion_tokens' ({new}); give one of them."
            );
            Err(ApiError::invalid("max_tokens", message))
        }
        _ => Ok(new.or(old)),
    }
}

impl Conversation {
    /// Takes the fields a prompt is made of.
    pub fn read(fields: &mut Fields, state: &State, hints: &mut Hints) -> Result<Self, ApiError> {
        let limits = &state.config.limits;
        let messages = messages::read(fields, limits, hints)?;
        let tools = ToolUse::read(fields, limits)?;
        let continue_final = fields.take("continue_final_message")?.unwrap_or(false);
        let add = fields.take::<bool>("add_generation_prompt")?;
        if continue_final && add == Some(true) {
            let message = "'continue_final_message' and 'add_generation_prompt' cannot both be true.";
            return Err(ApiError::invalid("continue_final_message", message));
        }
        if continue_final && final_assistant_text(&messages).is_none() {
            let message =
                "'continue_final_message' needs a last message with the role assistant and some content.";
            return Err(ApiError::invalid("continue_final_message", message));
        }
        let mut kwargs = fields.take("chat_template_kwargs")?.unwrap_or_default();
        let effort = fields.take::<String>(EFFORT)?;
        let budget =
            effort::apply(&state.readers, EFFORT, effort.as_deref(), Thinking::default(), &mut kwargs)?;
        Ok(Self {
            messages,
            tools,
            kwargs,
            budget,
            add_generation_prompt: add.unwrap_or(!continue_final),
            continue_final,
        })
    }

    /// The prompt with whatever of the answer is decided already.
    pub fn prompt(&mut self, state: &State, include_reasoning: bool) -> Result<Rendered, ApiError> {
        let mut prompt = self.render(state)?;
        let final_text = final_assistant_text(&self.messages);
        let (reading, begun) = state.readers.plan(&Asked {
            tools: &self.tools,
            prompt: prompt.text(),
            continued: final_text.as_deref().filter(|_| self.continue_final),
            generation_prompt: self.add_generation_prompt,
            include_reasoning,
        })?;
        prompt.push_str(&begun);
        Ok(Rendered { prompt, reading, final_text })
    }

    /// The prompt, by the model's template.
    pub fn render(&mut self, state: &State) -> Result<Prompt, ApiError> {
        state.readers.check(&self.tools)?;
        if let Some(manners) = &state.readers.template {
            messages::for_template(&mut self.messages, manners)?;
        }
        let mut prompt = self.through_template(state, self.add_generation_prompt)?;
        if self.continue_final {
            // Everything after the last message's own text closes the turn; the model is to go on inside it.
            let last = final_assistant_text(&self.messages).unwrap_or_default();
            let last = last.trim();
            let at = prompt.text().rfind(last).ok_or_else(|| {
                let message =
                    "The model's chat template changes the last message, so it cannot be continued.";
                ApiError::invalid("continue_final_message", message)
            })?;
            prompt.truncate(at + last.len());
        }
        Ok(prompt)
    }

    /// The messages as they are, which [`Self::render`] put the template's way.
    pub fn through_template(&self, state: &State, add_generation_prompt: bool) -> Result<Prompt, ApiError> {
        let _span = step!("render");
        let template = state.app.template.as_ref().ok_or_else(|| text_error(TextError::NoTemplate))?;
        let input = ChatInput {
            messages: &self.messages,
            tools: self.tools.shown(),
            documents: None,
            add_generation_prompt,
            kwargs: &self.kwargs,
            now_unix_s: unix_s() as i64,
            formats: AnswerFormats { tools: state.app.parsers.tools, reasoning: state.app.parsers.reasoning },
        };
        template.render(&input).map_err(text_error)
    }
}

fn final_assistant_text(messages: &[Value]) -> Option<String> {
    let last = messages.last().filter(|last| last["role"] == "assistant")?;
    let text = last["content"].as_str().filter(|text| !text.trim().is_empty())?;
    Some(text.to_owned())
}

/// What went wrong with a text, as the client sees it.
pub fn text_error(error: TextError) -> ApiError {
    let message = error.to_string();
    match error {
        TextError::NoTemplate => {
            ApiError { code: Some("no_chat_template"), ..ApiError::bad_request(message) }
        }
        TextError::ReservedKwarg(_) => ApiError::invalid("chat_template_kwargs", message),
        TextError::Refused(_) | TextError::Render { .. } | TextError::NoSeam => {
            ApiError::invalid("messages", message)
        }
        TextError::TooLong { .. } | TextError::Encode(_) => ApiError::bad_request(message),
        _ => ApiError::internal(message),
    }
}
