//! From a conversation or a text to the prompt's tokens: the chat template, what is begun of the answer, tokenizing.

use folio_api::ApiError;
use folio_api::conversation::Conversation;
use folio_api::openai::for_template;
use folio_api::unix_s;
use folio_text::{AnswerFormats, ChatInput, Prompt, TextError};

use crate::decoding::reading::{Reading, ReadingInput};
use crate::generation::input::InputProcessor;
use crate::observability::step;

/// A conversation as the model reads it, and how its answer is read.
pub struct RenderedPrompt {
    pub prompt: Prompt,
    pub reading: Option<Reading>,
    /// Text of the last message where it is the assistant's.
    pub final_text: Option<String>,
}

/// The prompt with whatever of the answer is decided already.
pub fn prompt(
    inputs: &InputProcessor,
    conversation: &mut Conversation,
    include_reasoning: bool,
) -> Result<RenderedPrompt, ApiError> {
    let mut prompt = render(inputs, conversation)?;
    let final_text = conversation.final_text().map(str::to_owned);
    let (reading, begun) = inputs.readers.plan(&ReadingInput {
        tools: &conversation.tools,
        prompt: prompt.text(),
        continued: final_text.as_deref().filter(|_| conversation.continue_final),
        generation_prompt: conversation.add_generation_prompt,
        include_reasoning,
    })?;
    prompt.push_str(&begun);
    Ok(RenderedPrompt { prompt, reading, final_text })
}

/// The prompt, by the model's template.
pub fn render(inputs: &InputProcessor, conversation: &mut Conversation) -> Result<Prompt, ApiError> {
    conversation.tools.check(&inputs.served.context.capabilities)?;
    if let Some(template) = &inputs.served.context.capabilities.template {
        for_template(&mut conversation.messages, template)?;
    }
    let mut prompt = through_template(inputs, conversation, conversation.add_generation_prompt)?;
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

/// The messages as they are, which [`render`] put the template's way.
pub fn through_template(
    inputs: &InputProcessor,
    conversation: &Conversation,
    add_generation_prompt: bool,
) -> Result<Prompt, ApiError> {
    let _span = step!("render");
    let template = inputs.served.template.as_ref().ok_or_else(|| text_error(TextError::NoTemplate))?;
    let input = ChatInput {
        messages: &conversation.messages,
        tools: conversation.tools.shown(),
        documents: None,
        add_generation_prompt,
        kwargs: &conversation.kwargs,
        now_unix_s: unix_s() as i64,
        formats: AnswerFormats {
            tools: inputs.served.parsers.tools,
            reasoning: inputs.served.parsers.reasoning,
        },
    };
    template.render(&input).map_err(text_error)
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
