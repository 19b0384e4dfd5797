//! A conversation to be answered, whichever API it came by.

use serde_json::{Map, Value};

use crate::hints::Notes;
use crate::params::Generation;
use crate::tools::ToolUse;

/// How the prompt is made. Messages and tools have the shape of chat completions.
#[derive(Clone, Debug)]
pub struct Conversation {
    pub messages: Vec<Value>,
    pub tools: ToolUse,
    /// Further variables of the template.
    pub kwargs: Map<String, Value>,
    pub add_generation_prompt: bool,
    /// The model goes on inside the last message.
    pub continue_final: bool,
}

impl Conversation {
    /// Text of the last message where it is the assistant's.
    pub fn final_text(&self) -> Option<&str> {
        let last = self.messages.last().filter(|last| last["role"] == "assistant")?;
        last["content"].as_str().filter(|text| !text.trim().is_empty())
    }
}

/// A request for an answer to a conversation.
#[derive(Clone, Debug)]
pub struct ConversationRequest {
    pub generation: Generation,
    pub conversation: Conversation,
    /// What was thought is part of the answer.
    pub include_reasoning: bool,
    pub notes: Notes,
}
