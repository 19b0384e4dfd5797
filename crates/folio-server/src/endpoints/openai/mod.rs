//! OpenAI's chat, completions and embeddings.

pub(crate) mod chat;
pub(crate) mod completions;
pub(crate) mod embeddings;
