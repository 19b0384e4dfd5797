//! The request's own fields: what becomes the prompt, and what says how to think about it.
//!
//! Invariants: as everywhere, a field is honoured, refused, or a hint; [`REFUSED`] has what exists at Anthropic's and not here.

use serde_json::Map;

use super::blocks::{self, Turns};
use super::cache::Marks;
use super::tools;
use crate::api::effort::{self, Thinking};
use crate::api::error::ApiError;
use crate::api::fields::Fields;
use crate::api::hints::Hints;
use crate::api::openai::chat::Conversation;
use crate::api::structured::Wish;
use crate::api::tools::ToolChoice;
use crate::app::State;

/// Fields of Anthropic's API that this server refuses, with the reason a client reads.
pub const REFUSED: &[(&str, &str)] = &[
    ("container", "this server runs no code"),
    ("inference_geo", "this server is where it is"),
    ("mcp_servers", "this server connects to nothing; use tools"),
    ("user_profile_id", "use metadata.user_id"),
    ("workspace_id", "tenants are known by their API key"),
];

/// The smallest budget that Anthropic's API takes.
const BUDGET_MIN: u32 = 1024;

/// What a prompt is made of.
pub struct Asked {
    pub conversation: Conversation,
    pub marks: Marks,
    pub include_reasoning: bool,
    /// What the answer must be.
    pub structure: Option<Wish>,
}

impl Asked {
    /// `max_tokens`: where there is an answer to come.
    pub fn read(
        fields: &mut Fields,
        state: &State,
        max_tokens: Option<u32>,
        hints: &mut Hints,
    ) -> Result<Self, ApiError> {
        let mut marks = Marks::default();
        let mut tools = tools::read(fields, &state.config.limits, &mut marks)?;
        let mut turns = Turns::new(state, &mut marks, hints);
        if let Some(system) = fields.raw("system") {
            turns.system(system)?;
        }
        turns.messages(fields)?;
        tools::apply(turns.changes(), &mut tools, &state.config.limits)?;
        state.readers.check(&tools)?;
        let (messages, continue_final) = turns.finish()?;
        if let Some(raw) = fields.raw("cache_control") {
            marks.read_automatic(raw)?;
        }
        let must = matches!(tools.choice, ToolChoice::Required | ToolChoice::Named(_));
        if continue_final && must {
            let message = "'tool_choice' asks for a call, but 'messages' end with text of the assistant, which the model \
                           would go on with. End with a user message, or use {\"type\": \"auto\"}.";
            return Err(ApiError::invalid("tool_choice", message));
        }
        let mut kwargs = Map::new();
        let (include_reasoning, thinking) = thinking(fields, state, max_tokens)?;
        let (effort, structure) = output_config(fields, state, hints)?;
        let budget =
            effort::apply(&state.readers, "output_config.effort", effort.as_deref(), thinking, &mut kwargs)?;
        let conversation = Conversation {
            messages,
            tools,
            kwargs,
            budget,
            add_generation_prompt: !continue_final,
            continue_final,
        };
        Ok(Self { conversation, marks, include_reasoning, structure })
    }
}

/// Fields that ask for nothing this server could do differently. They are checked.
pub fn metadata_only(fields: &mut Fields) -> Result<(), ApiError> {
    if let Some(raw) = fields.raw("metadata") {
        let mut metadata = Fields::of_value(raw, "metadata".into())?;
        metadata.take::<String>("user_id")?;
        metadata.finish(&[])?;
    }
    fields.only("service_tier", &["auto", "standard_only"], "there is one tier")?;
    one_speed(fields)
}

pub fn one_speed(fields: &mut Fields) -> Result<(), ApiError> {
    fields.only("speed", &["standard"], "there is one speed; leave it out or send \"standard\"")
}

/// Whether what was thought is shown, and how much of it there may be.
fn thinking(
    fields: &mut Fields,
    state: &State,
    max_tokens: Option<u32>,
) -> Result<(bool, Thinking), ApiError> {
    let Some(raw) = fields.raw("thinking") else { return Ok((true, Thinking::default())) };
    let mut thinking = Fields::of_value(raw, "thinking".into())?;
    let kind: String = thinking.require("type")?;
    let path = thinking.path("type");
    let reasons = state.readers.reasons();
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
    state: &State,
    hints: &mut Hints,
) -> Result<(Option<String>, Option<Wish>), ApiError> {
    let Some(raw) = fields.raw("output_config") else { return Ok((None, None)) };
    let mut config = Fields::of_value(raw, "output_config".into())?;
    let effort = config.take::<String>("effort")?;
    let mut wish = None;
    if let Some(raw) = config.raw("format") {
        let mut format = Fields::of_value(raw, config.path("format"))?;
        if format.require::<String>("type")? != "json_schema" {
            return Err(ApiError::unsupported(format.path("type"), "only json_schema"));
        }
        let path = format.path("schema");
        wish = Some(Wish::of_schema(format.require("schema")?, path, &state.config.limits)?);
        format.finish(&[])?;
    }
    hints.finish(config, &["effort", "format"], &[])?;
    Ok((effort, wish))
}

/// Refuses a kind of block, tool or source by name, as something the API has and this server has not.
pub fn refuse_kind(fields: &Fields, kind: &str) -> ApiError {
    let why = match blocks::OTHER_KINDS.iter().find(|(name, _)| *name == kind) {
        Some((_, why)) => why,
        None => "the model takes text, tool calls, their results and thinking only",
    };
    ApiError::unsupported(fields.path(kind), why)
}
