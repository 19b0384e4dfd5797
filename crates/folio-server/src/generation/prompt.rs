//! From a conversation or a text to the prompt's tokens: the chat template, what is begun of the answer, tokenizing.

use folio_api::ApiError;
use folio_api::conversation::Conversation;
use folio_api::openai::for_template;
use folio_api::unix_s;
use folio_text::{AnswerFormats, ChatInput, Prompt, TextError};

use crate::app::State;
use crate::decoding::reading::{Asked, Reading};

/// A conversation as the model reads it, and how its answer is read.
pub struct Rendered {
    pub prompt: Prompt,
    pub reading: Option<Reading>,
    /// Text of the last message where it is the assistant's.
    pub final_text: Option<String>,
}

/// The prompt with whatever of the answer is decided already.
pub fn prompt(
    state: &State,
    conversation: &mut Conversation,
    include_reasoning: bool,
) -> Result<Rendered, ApiError> {
    let mut prompt = render(state, conversation)?;
    let final_text = conversation.final_text().map(str::to_owned);
    let (reading, begun) = state.readers.plan(&Asked {
        tools: &conversation.tools,
        prompt: prompt.text(),
        continued: final_text.as_deref().filter(|_| conversation.continue_final),
        generation_prompt: conversation.add_generation_prompt,
        include_reasoning,
    })?;
    prompt.push_str(&begun);
    Ok(Rendered { prompt, reading, final_text })
}

/// The prompt, by the model's template.
pub fn render(state: &State, conversation: &mut Conversation) -> Result<Prompt, ApiError> {
    let template = state.app.template.as_ref().ok_or_else(|| text_error(TextError::NoTemplate))?;
    conversation.tools.check(&state.context.capabilities)?;
    if let Some(template) = &state.context.capabilities.template {
        for_template(&mut conversation.messages, template)?;
    }
    let mut prompt = template
        .render(&ChatInput {
            messages: &conversation.messages,
            tools: conversation.tools.shown(),
            documents: None,
            add_generation_prompt: conversation.add_generation_prompt,
            kwargs: &conversation.kwargs,
            now_unix_s: unix_s() as i64,
            formats: AnswerFormats { tools: state.app.parsers.tools, reasoning: state.app.parsers.reasoning },
        })
        .map_err(text_error)?;
    if conversation.continue_final {
        // Everything after the last message's own text closes the turn; the model is to go on inside it.
        let last = conversation.final_text().unwrap_or_default();
        let last = last.trim();
        let at = prompt.text().rfind(last).ok_or_else(|| {
            let message = "The model's chat template changes the last message, so it cannot be continued.";
            ApiError::invalid("continue_final_message", message)
        })?;
        prompt.truncate(at + last.len());
    }
    Ok(prompt)
}

/// Bytes per token that no tokenizer reaches over a whole prompt.
const BYTES_PER_TOKEN_MAX: usize = 64;

/// Tokenizes a text, in which markers count wherever they are. What cannot fit into the context is refused before the work,
/// unless it is to be truncated.
pub fn encode(
    state: &State,
    text: &str,
    special: bool,
    truncated: bool,
    param: &str,
) -> Result<Vec<u32>, ApiError> {
    let most = bytes_max(state, truncated);
    state.app.tokenizer.encode(text, special, most).map_err(|error| encode_error(state, error, param))
}

/// The same of a rendered conversation, in which no marker counts that a client wrote.
pub fn encode_prompt(
    state: &State,
    prompt: &Prompt,
    special: bool,
    truncated: bool,
    param: &str,
) -> Result<Vec<u32>, ApiError> {
    let most = bytes_max(state, truncated);
    state
        .app
        .tokenizer
        .encode_prompt(prompt, special, most)
        .map_err(|error| encode_error(state, error, param))
}

fn bytes_max(state: &State, truncated: bool) -> usize {
    let context = state.app.model.context_length as usize;
    match truncated {
        true => state.config.limits.body_bytes,
        false => state.config.limits.body_bytes.min(context * BYTES_PER_TOKEN_MAX),
    }
}

fn encode_error(state: &State, error: TextError, param: &str) -> ApiError {
    let context = state.app.model.context_length;
    match error {
        TextError::TooLong { bytes, limit } => {
            let message = format!(
                "This model's maximum context length is {context} tokens, but the prompt has {bytes} bytes of text, more \
                 than {limit}. Shorten the prompt."
            );
            let error = ApiError::invalid(param, message);
            ApiError { code: Some("context_length_exceeded"), ..error }
        }
        other => text_error(other),
    }
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
