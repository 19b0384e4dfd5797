//! The request of `POST /v1/chat/completions`.

use crate::context::Context;
use crate::conversation::{Conversation, ConversationRequest};
use crate::effort::{EFFORT, Thinking};
use crate::error::ApiError;
use crate::fields::{Fields, within};
use crate::hints::{Api, Hints};
use crate::openai::messages;
use crate::openapi::tables::CHAT;
use crate::params::Generation;
use crate::tools::{self, Dialect};

/// Reads a request.
pub fn read(body: &[u8], context: &Context) -> Result<ConversationRequest, ApiError> {
    let mut fields = Fields::of_body(body)?;
    let mut hints = Hints::new(&context.hints, Api::Chat);
    let adapter = context.adapter(&mut fields)?;
    let mut generation = Generation { adapter, ..Generation::read(&mut fields, context)? };
    generation.sampling.logprobs = logprobs(&mut fields, context.limits.logprobs)?;
    generation.max_tokens = max_tokens(&mut fields)?;
    generation.stop_everywhere = fields.take("stop_everywhere")?.unwrap_or(false);
    let include_reasoning = fields.take("include_reasoning")?.unwrap_or(true);
    let (mut conversation, budget) = conversation(&mut fields, context, &mut hints)?;
    generation.bounds.thinking = generation.bounds.thinking.or(budget);
    let mut notes = hints.close(fields, &CHAT)?;
    notes.left_out = std::mem::take(&mut conversation.tools.left_out);
    Ok(ConversationRequest { generation, conversation, include_reasoning, notes })
}

/// Tokens of reasoning that an effort stands for, and the field that says so.
pub type ReasoningBudget = Option<(u32, &'static str)>;

/// Takes the fields that a prompt is made of.
pub fn conversation(
    fields: &mut Fields,
    context: &Context,
    hints: &mut Hints,
) -> Result<(Conversation, ReasoningBudget), ApiError> {
    let messages = messages::read(fields, &context.limits, hints)?;
    let tools = tools::read(fields, Dialect::Chat, &context.limits, &mut |_, _| Ok(()))?;
    let continue_final = fields.take("continue_final_message")?.unwrap_or(false);
    let add = fields.take::<bool>("add_generation_prompt")?;
    if continue_final && add == Some(true) {
        let message = "'continue_final_message' and 'add_generation_prompt' cannot both be true.";
        return Err(ApiError::invalid("continue_final_message", message));
    }
    let mut kwargs = fields.take("chat_template_kwargs")?.unwrap_or_default();
    let effort = fields.take::<String>(EFFORT)?;
    let thinking = Thinking::default();
    let budget = context.capabilities.efforts.apply(EFFORT, effort.as_deref(), thinking, &mut kwargs)?;
    let add_generation_prompt = add.unwrap_or(!continue_final);
    let conversation = Conversation { messages, tools, kwargs, add_generation_prompt, continue_final };
    if continue_final && conversation.final_text().is_none() {
        let message =
            "'continue_final_message' needs a last message with the role assistant and some content.";
        return Err(ApiError::invalid("continue_final_message", message));
    }
    Ok((conversation, budget))
}

/// Takes `logprobs` and `top_logprobs`.
pub(crate) fn logprobs(fields: &mut Fields, limit: u32) -> Result<Option<u32>, ApiError> {
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
