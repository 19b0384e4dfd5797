//! The request's own fields: what becomes the prompt, and what says how to think about it.
//!
//! Invariants: as everywhere, a field is honoured, refused, or a hint; [`refused`](crate::refused::MESSAGES) has what exists at Anthropic's and not here.

use serde_json::Map;

use super::blocks::Turns;
use super::breakpoints::{After, Breakpoints};
use super::tools::apply;
use crate::constraint::Constraint;
use crate::context::Context;
use crate::conversation::{self, Conversation};
use crate::effort::Thinking;
use crate::error::ApiError;
use crate::fields::Fields;
use crate::hints::{Api, Hints};
use crate::openapi::tables::{COUNT, MESSAGE};
use crate::params::Generation;
use crate::tools::{self, Dialect};

/// The smallest budget that Anthropic's API takes.
const BUDGET_MIN: u32 = 1024;

const STOP: &str = "stop_sequences";

/// A request for an answer.
pub struct MessagesRequest {
    pub request: conversation::ConversationRequest,
    pub breakpoints: Breakpoints,
    /// What `max_tokens` says; the context may hold less.
    pub max_tokens: u32,
}

impl MessagesRequest {
    pub fn read(body: &[u8], context: &Context) -> Result<Self, ApiError> {
        let mut fields = Fields::of_body(body)?;
        let mut hints = Hints::new(&context.hints, Api::Messages);
        let adapter = context.adapter(&mut fields)?;
        let mut generation = Generation { adapter, ..Generation::read_plain(&mut fields, context, STOP)? };
        let max_tokens: u32 = fields.require("max_tokens")?;
        metadata_only(&mut fields, &mut hints)?;
        let asked = PromptFields::read(&mut fields, context, Some(max_tokens), &mut hints)?;
        let PromptFields { mut conversation, breakpoints, include_reasoning, .. } = asked;
        let mut notes = hints.close(fields, &MESSAGE)?;
        notes.left_out = std::mem::take(&mut conversation.tools.left_out);
        (generation.constraint, generation.bounds.thinking) = (asked.constraint, asked.budget);
        let request =
            conversation::ConversationRequest { generation, conversation, include_reasoning, notes };
        Ok(Self { request, breakpoints, max_tokens })
    }
}

/// Reads a request that wants its tokens counted.
pub fn counted(body: &[u8], context: &Context) -> Result<Conversation, ApiError> {
    let mut fields = Fields::of_body(body)?;
    let mut hints = Hints::new(&context.hints, Api::Messages);
    // With every adapter there are as many.
    context.adapter(&mut fields)?;
    one_speed(&mut fields)?;
    let asked = PromptFields::read(&mut fields, context, None, &mut hints)?;
    hints.close(fields, &COUNT)?;
    Ok(asked.conversation)
}

/// What a prompt is made of.
struct PromptFields {
    conversation: Conversation,
    breakpoints: Breakpoints,
    include_reasoning: bool,
    /// What the answer must be.
    constraint: Option<Constraint>,
    /// Tokens of reasoning, and the field that says so.
    budget: Option<(u32, &'static str)>,
}

impl PromptFields {
    /// `max_tokens`: where there is an answer to come.
    fn read(
        fields: &mut Fields,
        context: &Context,
        max_tokens: Option<u32>,
        hints: &mut Hints,
    ) -> Result<Self, ApiError> {
        let mut breakpoints = Breakpoints::default();
        let mut tools = tools::read(fields, Dialect::Messages, &context.limits, &mut |tool, shown| {
            breakpoints.read(tool, || After::Tools(shown))
        })?;
        let mut turns = Turns::new(context, &mut breakpoints, hints);
        if let Some(system) = fields.raw("system") {
            turns.system(system)?;
        }
        turns.messages(fields)?;
        apply(turns.changes(), &mut tools, &context.limits)?;
        tools.check(&context.capabilities)?;
        let (messages, continue_final) = turns.finish()?;
        if let Some(raw) = fields.raw("cache_control") {
            breakpoints.read_automatic(raw)?;
        }
        if continue_final && tools.must() {
            let message = "'tool_choice' asks for a call, but 'messages' end with text of the assistant, which the model \
                           would go on with. End with a user message, or use {\"type\": \"auto\"}.";
            return Err(ApiError::invalid("tool_choice", message));
        }
        let mut kwargs = Map::new();
        let (include_reasoning, thinking) = thinking(fields, context, max_tokens)?;
        let (effort, constraint) = output_config(fields, context, hints)?;
        let budget = context.capabilities.efforts.apply(
            "output_config.effort",
            effort.as_deref(),
            thinking,
            &mut kwargs,
        )?;
        let conversation =
            Conversation { messages, tools, kwargs, add_generation_prompt: !continue_final, continue_final };
        Ok(Self { conversation, breakpoints, include_reasoning, constraint, budget })
    }
}

/// Fields that ask for nothing this server could do differently. They are checked.
fn metadata_only(fields: &mut Fields, hints: &mut Hints) -> Result<(), ApiError> {
    if let Some(raw) = fields.raw("metadata") {
        let mut metadata = Fields::of_value(raw, "metadata".into())?;
        metadata.take::<String>("user_id")?;
        hints.finish(metadata, &["user_id"], &[])?;
    }
    fields.only("service_tier", &["auto", "standard_only"], "there is one tier")?;
    one_speed(fields)
}

fn one_speed(fields: &mut Fields) -> Result<(), ApiError> {
    fields.only("speed", &["standard"], "there is one speed; leave it out or send \"standard\"")
}

/// Whether what was thought is shown, and how much of it there may be.
fn thinking(
    fields: &mut Fields,
    context: &Context,
    max_tokens: Option<u32>,
) -> Result<(bool, Thinking), ApiError> {
    let Some(raw) = fields.raw("thinking") else { return Ok((true, Thinking::default())) };
    let mut thinking = Fields::of_value(raw, "thinking".into())?;
    let kind: String = thinking.require("type")?;
    let path = thinking.path("type");
    let reasons = context.capabilities.reasons();
    let mut limit = None;
    let on = match kind.as_str() {
        // A model that never thinks has decided.
        "enabled" => {
            limit = budget(&mut thinking, max_tokens)?;
            true
        }
        "adaptive" => true,
        "disabled" => false,
        "between_tools" => {
            return Err(ApiError::unsupported(path, "only enabled, adaptive and disabled"));
        }
        other => {
            let message =
                format!("Invalid value for '{path}': '{other}' is not one of enabled, adaptive, disabled.");
            return Err(ApiError::invalid(path, message));
        }
    };
    let shown = match on.then(|| thinking.take::<String>("display")).transpose()?.flatten().as_deref() {
        None | Some("summarized") => true,
        Some("omitted") => false,
        Some(other) => {
            let path = thinking.path("display");
            let message = format!("Invalid value for '{path}': '{other}' is not one of summarized, omitted.");
            return Err(ApiError::invalid(path, message));
        }
    };
    thinking.finish(&[])?;
    let budget = limit.filter(|_| reasons).map(|limit| (limit, "thinking.budget_tokens"));
    // Without a known mark there is nothing to leave out.
    Ok((shown || !reasons, Thinking { on: Some(on), budget }))
}

/// Tokens of reasoning; `None`: as many as the answer may have anyway.
fn budget(thinking: &mut Fields, max_tokens: Option<u32>) -> Result<Option<u32>, ApiError> {
    let budget: u32 = thinking.require("budget_tokens")?;
    let path = thinking.path("budget_tokens");
    if budget < BUDGET_MIN {
        let message = format!("Invalid '{path}': {budget} is less than {BUDGET_MIN}.");
        return Err(ApiError::invalid(path, message));
    }
    if let Some(max_tokens) = max_tokens.filter(|max_tokens| budget >= *max_tokens) {
        let message =
            format!("Invalid '{path}': {budget} is not less than max_tokens, which is {max_tokens}.");
        return Err(ApiError::invalid(path, message));
    }
    Ok(max_tokens.is_none_or(|max_tokens| budget < max_tokens - 1).then_some(budget))
}

/// How much to think, and what the answer must be.
fn output_config(
    fields: &mut Fields,
    context: &Context,
    hints: &mut Hints,
) -> Result<(Option<String>, Option<Constraint>), ApiError> {
    let Some(raw) = fields.raw("output_config") else { return Ok((None, None)) };
    let mut config = Fields::of_value(raw, "output_config".into())?;
    let effort = config.take::<String>("effort")?;
    let mut constraint = None;
    if let Some(raw) = config.raw("format") {
        let mut format = Fields::of_value(raw, config.path("format"))?;
        if format.require::<String>("type")? != "json_schema" {
            return Err(ApiError::unsupported(format.path("type"), "only json_schema"));
        }
        let path = format.path("schema");
        constraint = Some(Constraint::of_schema(format.require_raw("schema")?, path, &context.limits)?);
        format.finish(&[])?;
    }
    hints.finish(config, &["effort", "format"], &[])?;
    Ok((effort, constraint))
}
