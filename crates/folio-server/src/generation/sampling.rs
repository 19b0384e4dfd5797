//! How the engine is to choose tokens, for a prompt of known length.

use folio_api::ApiError;
use folio_api::constraint::Constraint;
use folio_api::conversation::Conversation;
use folio_api::params::Generation;
use folio_engine::{RulesRef, SamplingParams};
use folio_kv::TenantId;

use crate::decoding::bounds;
use crate::decoding::follower::{Begin, Form};
use crate::decoding::reading::Reading;
use crate::engine::ModelFacts;
use crate::generation::input::InputProcessor;

/// Rules of what the answer must be; their beginning depends on how the answer to a conversation is read.
pub fn rules(
    inputs: &InputProcessor,
    tenant: TenantId,
    generation: &Generation,
    conversation: Option<(&Conversation, Option<&Reading>)>,
) -> Result<Option<RulesRef>, ApiError> {
    let (compiler, tokenizer) = (inputs.structures.of(tenant), &inputs.served.tokenizer);
    let form = match (&generation.constraint, conversation) {
        (Some(constraint), Some((conversation, reading))) if !conversation.tools.must() => {
            let tools = &conversation.tools;
            let either = match tools.shown().is_some_and(|tools| !tools.is_empty()) {
                true => Some(inputs.readers.answer_or_calls(constraint, tools, tokenizer)?),
                false => None,
            };
            let constraint = either.as_ref().unwrap_or(constraint);
            let begin = inputs.readers.begin(constraint.param(), conversation, reading)?;
            Some((Form::Answer(compiler.compile(constraint)?), begin))
        }
        (Some(constraint), None) => Some((Form::Answer(compiler.compile(constraint)?), Begin::default())),
        // Where a call must be made there is no other answer that could have a form.
        (_, Some((conversation, reading))) => {
            inputs.readers.calls(&conversation.tools, reading, tokenizer, compiler)?
        }
        (None, None) => None,
    };
    let reasoning = conversation.and_then(|(_, reading)| reading).and_then(Reading::reasoning);
    let mut rules = bounds::rules(&generation.bounds, tokenizer, reasoning)?;
    if let Some((form, begin)) = form {
        let constraint = generation.constraint.as_ref().filter(|_| matches!(form, Form::Answer(_)));
        rules.push(inputs.structures.rules(form, begin, constraint.map_or("tools", Constraint::param))?);
    }
    Ok(bounds::all_of(rules))
}

/// Cuts the prompt as asked, then checks it and max_tokens against the context. `param` names the prompt's field.
pub fn fit(
    generation: &Generation,
    rules: Option<RulesRef>,
    prompt: &mut Vec<u32>,
    facts: &ModelFacts,
    param: &str,
) -> Result<SamplingParams, ApiError> {
    let context = facts.context_length as usize;
    let floor = generation.max_tokens.unwrap_or(1).max(1) as usize;
    if let Some(keep) = generation.truncate_prompt {
        let keep = usize::try_from(keep).unwrap_or(context.saturating_sub(floor));
        prompt.drain(..prompt.len().saturating_sub(keep));
    }
    if prompt.is_empty() {
        return Err(ApiError::invalid(
            param,
            format!("'{param}' has no tokens; the model needs at least one."),
        ));
    }
    if prompt.len() + floor > context {
        let error = ApiError::context_length(facts.context_length, prompt.len(), floor as u32);
        // Which of the two is more than the context holds by itself?
        let param = if floor >= context { "max_tokens" } else { param };
        return Err(ApiError { param: Some(param.to_owned()), ..error });
    }
    let room = (context - prompt.len()) as u32;
    let max_tokens =
        generation.max_tokens.unwrap_or(facts.defaults.max_tokens.unwrap_or(room).clamp(1, room));
    if generation.sampling.min_tokens > max_tokens {
        let message = format!(
            "Invalid 'min_tokens': {} is more than max_tokens, which is {max_tokens}.",
            generation.sampling.min_tokens
        );
        return Err(ApiError::invalid("min_tokens", message));
    }
    let sampling = generation.sampling.clone();
    Ok(SamplingParams {
        temperature: sampling.temperature,
        top_k: sampling.top_k,
        top_p: sampling.top_p,
        min_p: sampling.min_p,
        presence_penalty: sampling.presence_penalty,
        frequency_penalty: sampling.frequency_penalty,
        repetition_penalty: sampling.repetition_penalty,
        logit_bias: sampling.logit_bias,
        seed: sampling.seed,
        // The engine always chooses a token; with 0 nobody sees it.
        max_tokens: max_tokens.max(1),
        min_tokens: sampling.min_tokens,
        eos_token_ids: sampling.eos_token_ids,
        stop_token_ids: sampling.stop_token_ids,
        logprobs: sampling.logprobs,
        rules,
    })
}
