//! OpenAI's chat, completions and embeddings, with vLLM's additions.

pub mod chat;
pub mod completions;
pub mod embeddings;
mod messages;
pub mod writer;

pub use messages::for_template;
