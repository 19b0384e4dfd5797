//! Ollama's API: `/api/chat`, `/api/generate` and what goes with them.
//!
//! Owns: Ollama's names, shapes and rules. A request becomes the same conversation as a chat of OpenAI's (`request`, `messages`, `options`),
//! and an answer is written as Ollama's lines of JSON (`writer`). `error` says refusals Ollama's way; `models` reads requests about models.
//!
//! Invariant: every field, those of `options` included, is honoured, refused by its path, or a hint.

pub mod embed;
pub mod error;
mod messages;
mod models;
mod options;
mod request;
mod writer;

pub use models::{adapter, is_named, pulled, shown, tagged};
pub use request::{OllamaRequest, PromptSource, chat, generate};
pub use writer::LineWriter;

/// The version of Ollama whose API this is: its clients ask before they use what older ones did not have.
pub const VERSION: &str = "0.13.5";
