//! The shapes that clients speak: OpenAI's and Anthropic's, and what both share.

pub(crate) mod anthropic;
pub(crate) mod blocks;
pub(crate) mod effort;
pub(crate) mod error;
pub(crate) mod fields;
pub mod hints;
pub(crate) mod openai;
pub mod openapi;
pub mod params;
pub(crate) mod responses;
pub(crate) mod retain;
pub(crate) mod structured;
pub(crate) mod tools;
