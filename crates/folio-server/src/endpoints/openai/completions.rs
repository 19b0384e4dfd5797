//! `POST /v1/completions`.

use folio_api::ApiError;
use folio_api::openai::completions::{self, PromptInput};
use folio_api::openai::writer::{CompletionKind, CompletionWriter};
use folio_api::params::Generation;
use folio_engine::RulesRef;
use folio_kv::TenantId;

use crate::arrival::Arrival;
use crate::generation::input::InputProcessor;
use crate::generation::job::{Job, PromptJob};
use crate::generation::sampling::rules;
use crate::generation::screening::screen_prompt;
use crate::generation::tokenizing::encode;
use crate::observability::why::RequestKind;
use crate::safety::Screened;

pub(crate) fn prepare(inputs: &InputProcessor, arrival: &Arrival) -> Result<Job, ApiError> {
    let request = completions::read(&arrival.body, &inputs.served.context)?;
    let (generation, echo_logprobs) = (request.generation, request.echo_logprobs);
    let rules = rules(inputs, arrival.tenant.id, &generation, None)?;
    let job = |(index, prompt)| {
        let (screened, prompt) = screen(inputs, arrival, index, prompt)?;
        Ok(PromptJob {
            screened,
            ..prompt_job(inputs, arrival.tenant.id, prompt, &generation, rules.clone(), echo_logprobs)?
        })
    };
    let prompts: Result<Vec<PromptJob>, ApiError> =
        request.prompts.into_iter().enumerate().map(job).collect();
    let (name, tokenizer) = (generation.model(inputs.served.name()), inputs.served.tokenizer.clone());
    let writer = Box::new(CompletionWriter::new(
        CompletionKind::Completion,
        &arrival.id,
        name,
        tokenizer,
        &generation,
    ));
    let (arrived, asker) = (arrival.at, inputs.asker(arrival, "completions"));
    let asked = RequestKind::Completion;
    Ok(Job { asked, arrived, asker, notes: request.notes, ..Job::new(writer, generation, prompts?) })
}

/// Judges a prompt; token ids are judged, and replaced, as the text they are.
fn screen(
    inputs: &InputProcessor,
    arrival: &Arrival,
    index: usize,
    prompt: PromptInput,
) -> Result<(Screened, PromptInput), ApiError> {
    let (screened, replaced) = screen_prompt(inputs, arrival, index, || match &prompt {
        PromptInput::Text(text) => text.clone(),
        PromptInput::Tokens(tokens) => inputs.served.tokenizer.decode(tokens, false),
    })?;
    Ok((screened, replaced.map_or(prompt, PromptInput::Text)))
}

fn prompt_job(
    inputs: &InputProcessor,
    tenant: TenantId,
    prompt: PromptInput,
    generation: &Generation,
    rules: Option<RulesRef>,
    echo_logprobs: bool,
) -> Result<PromptJob, ApiError> {
    let tokenizer = &inputs.served.tokenizer;
    let (tokens, text) = match prompt {
        PromptInput::Text(text) => {
            let special = generation.add_special_tokens.unwrap_or(true);
            let truncated = generation.truncate_prompt.is_some();
            (encode(inputs, Some(tenant), &text, special, truncated, "prompt")?, Some(text))
        }
        PromptInput::Tokens(tokens) => (tokens, None),
    };
    let before = tokens.len();
    let mut job = PromptJob::wanted(inputs, tenant, generation, rules, tokens, "prompt")?;
    let text = text.filter(|_| job.tokens.len() == before);
    job.echo = generation
        .echo
        .then(|| text.unwrap_or_else(|| tokenizer.decode(&job.tokens, generation.skip_special_tokens)));
    job.echo_logprobs = echo_logprobs;
    Ok(job)
}
