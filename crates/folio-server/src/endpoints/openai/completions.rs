//! `POST /v1/completions`.

use folio_api::ApiError;
use folio_api::openai::completions::{self, Prompt};
use folio_api::openai::writer::{CompletionWriter, Kind};
use folio_api::params::Generation;
use folio_engine::RulesRef;
use folio_kv::TenantId;

use crate::app::State;
use crate::arrival::Arrival;
use crate::generation::job::{Job, PromptJob};
use crate::generation::retention::ranges;
use crate::generation::sampling::{fit, rules};
use crate::generation::screening::{asker, screen_prompt};
use crate::generation::tokenizing::{encode, speculation};
use crate::safety::Screened;

pub(crate) fn prepare(state: &State, arrival: &Arrival) -> Result<Job, ApiError> {
    let request = completions::read(&arrival.body, &state.context)?;
    let (generation, echo_logprobs) = (request.generation, request.echo_logprobs);
    let rules = rules(state, arrival.tenant.id, &generation, None)?;
    let job = |(index, prompt)| {
        let (screened, prompt) = screen(state, arrival, index, prompt)?;
        Ok(PromptJob {
            screened,
            ..prompt_job(state, arrival.tenant.id, prompt, &generation, rules.clone(), echo_logprobs)?
        })
    };
    let prompts: Result<Vec<PromptJob>, ApiError> =
        request.prompts.into_iter().enumerate().map(job).collect();
    let (name, tokenizer) = (state.context.model.name(), state.app.tokenizer.clone());
    let shape = CompletionWriter::new(Kind::Completion, &arrival.id, name, tokenizer, &generation);
    let asker = asker(state, arrival, "completions");
    let (writer, prompts, arrived, notes) = (Box::new(shape), prompts?, arrival.at, request.notes);
    Ok(Job { writer, generation, reading: None, pooling: None, prompts, arrived, asker, notes })
}

/// Judges a prompt; token ids are judged, and replaced, as the text they are.
fn screen(
    state: &State,
    arrival: &Arrival,
    index: usize,
    prompt: Prompt,
) -> Result<(Screened, Prompt), ApiError> {
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
    rules: Option<RulesRef>,
    echo_logprobs: bool,
) -> Result<PromptJob, ApiError> {
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
    let mut params = fit(generation, rules, &mut tokens, &state.app.model, "prompt")?;
    // The engine always chooses a token; with 0 nobody sees it.
    params.max_tokens = params.max_tokens.max(1);
    let text = text.filter(|_| tokens.len() == before);
    let echo = generation
        .echo
        .then(|| text.unwrap_or_else(|| tokenizer.decode(&tokens, generation.skip_special_tokens)));
    let retention = ranges(&generation.cache, tokens.len() as u32)?;
    let speculation = speculation(state, tenant, generation, &tokens)?;
    let screened = Screened::default();
    Ok(PromptJob { tokens: tokens.into(), params, echo, echo_logprobs, retention, screened, speculation })
}
