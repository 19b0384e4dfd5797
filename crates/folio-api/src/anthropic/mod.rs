//! Anthropic's API: `/v1/messages` and what goes with it.
//!
//! Owns: Anthropic's names, shapes and rules. A request becomes the same conversation as a chat of OpenAI's (`request`, `blocks`, `tools`),
//! and an answer is written in Anthropic's events (`writer`). `breakpoints` reads `cache_control`, `error` says refusals Anthropic's way.
//!
//! Invariants: every field is honoured, refused by its path, or a hint; `input_tokens` + `cache_creation_input_tokens` +
//! `cache_read_input_tokens` are the tokens of the prompt.

mod blocks;
pub mod breakpoints;
pub mod error;
mod request;
mod tools;
mod writer;

pub use request::{MessagesRequest, counted};
pub use writer::MessageWriter;
