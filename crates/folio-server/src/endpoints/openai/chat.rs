//! `POST /v1/chat/completions`.

use folio_api::ApiError;
use folio_api::openai::chat;
use folio_api::openai::writer::{CompletionWriter, Kind};

use crate::app::State;
use crate::arrival::Arrival;
use crate::generation::job::{Job, PromptJob};
use crate::generation::prompt::prompt;
use crate::generation::retention::ranges;
use crate::generation::sampling::{fit, rules};
use crate::generation::screening::{asker, screen_conversation};
use crate::generation::tokenizing::{encode_prompt, speculation};

pub(crate) fn prepare(state: &State, arrival: &Arrival) -> Result<Job, ApiError> {
    let mut request = {
        let _span = step!("read");
        chat::read(&arrival.body, &state.context)?
    };
    let screened = screen_conversation(state, arrival, &mut request.conversation)?;
    let rendered = prompt(state, &mut request.conversation, request.include_reasoning)?;
    let generation = request.generation;
    let reading = rendered.reading;
    let rules =
        rules(state, arrival.tenant.id, &generation, Some((&request.conversation, reading.as_ref())))?;
    let special = generation.add_special_tokens.unwrap_or(false);
    let truncated = generation.truncate_prompt.is_some();
    let mut tokens =
        encode_prompt(state, Some(arrival.tenant.id), &rendered.prompt, special, truncated, "messages")?;
    let params = fit(&generation, rules, &mut tokens, &state.app.model, "messages")?;
    let echo = generation.echo.then_some(rendered.final_text).flatten();
    let retention = ranges(&generation.cache, tokens.len() as u32)?;
    let speculation = speculation(state, arrival.tenant.id, &generation, &tokens)?;
    let prompt = PromptJob {
        tokens: tokens.into(),
        params,
        echo,
        echo_logprobs: false,
        retention,
        screened,
        speculation,
    };
    let (name, tokenizer) = (state.context.model.name(), state.app.tokenizer.clone());
    let shape = CompletionWriter::new(Kind::Chat, &arrival.id, name, tokenizer, &generation);
    let asker = asker(state, arrival, "chat.completions");
    let (prompts, arrived, notes) = (vec![prompt], arrival.at, request.notes);
    Ok(Job { writer: Box::new(shape), generation, reading, pooling: None, prompts, arrived, asker, notes })
}
