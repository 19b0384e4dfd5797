//! `POST /v1/chat/completions`.

use folio_api::ApiError;
use folio_api::openai::chat;
use folio_api::openai::writer::{CompletionKind, CompletionWriter};

use crate::arrival::Arrival;
use crate::generation::input::InputProcessor;
use crate::generation::job::{Job, PromptJob};
use crate::generation::prompt::prompt;
use crate::generation::sampling::rules;
use crate::generation::screening::screen_conversation;
use crate::generation::tokenizing::encode_prompt;
use crate::observability::step;

pub(crate) fn prepare(inputs: &InputProcessor, arrival: &Arrival) -> Result<Job, ApiError> {
    let mut request = {
        let _span = step!("read");
        chat::read(&arrival.body, &inputs.served.context)?
    };
    let screened = screen_conversation(inputs, arrival, &mut request.conversation)?;
    let rendered = prompt(inputs, &mut request.conversation, request.include_reasoning)?;
    let generation = request.generation;
    let reading = rendered.reading;
    let rules =
        rules(inputs, arrival.tenant.id, &generation, Some((&request.conversation, reading.as_ref())))?;
    let special = generation.add_special_tokens.unwrap_or(false);
    let truncated = generation.truncate_prompt.is_some();
    let tenant = arrival.tenant.id;
    let tokens = encode_prompt(inputs, Some(tenant), &rendered.prompt, special, truncated, "messages")?;
    let echo = generation.echo.then_some(rendered.final_text).flatten();
    let prompt = PromptJob::wanted(inputs, tenant, &generation, rules, tokens, "messages")?;
    let prompt = PromptJob { echo, screened, ..prompt };
    let (name, tokenizer) = (generation.model(inputs.served.name()), inputs.served.tokenizer.clone());
    let writer =
        Box::new(CompletionWriter::new(CompletionKind::Chat, &arrival.id, name, tokenizer, &generation));
    let (arrived, asker) = (arrival.at, inputs.asker(arrival, "chat.completions"));
    let notes = request.notes;
    Ok(Job { reading, arrived, asker, notes, ..Job::new(writer, generation, vec![prompt]) })
}
