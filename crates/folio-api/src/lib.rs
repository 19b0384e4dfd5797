//! The APIs as data: what requests of OpenAI's, Anthropic's and Ollama's say, in one neutral form, and how answers are written for each.
//!
//! Owns: JSON, its limits, the names and shapes of fields, and every refusal's words. Must never: know of HTTP, of the engine, or of who
//! asks. A reader gets the body and a [`Context`]; a writer gets [`events`] and an [`StreamSink`](events::StreamSink). So everything here is
//! tested without a socket.
//!
//! Invariant: every parameter is honoured, refused by a 400 that names it ([`refused`]), or a listed hint ([`hints`]).
//! [`Fields::finish`](fields::Fields::finish) fails while a field is unread, and [`Hints::close`](hints::Hints::close) ends every request.
#![forbid(unsafe_code)]

pub mod anthropic;
pub mod blocks;
pub mod bounds;
pub mod cache;
pub mod constraint;
pub mod context;
pub mod conversation;
pub mod effort;
pub mod error;
pub mod events;
pub mod fields;
pub mod hints;
pub mod labels;
pub mod ollama;
pub mod openai;
pub mod openapi;
pub mod params;
pub mod refused;
pub mod responses;
pub mod speculation;
pub mod tools;

pub use context::{
    Capabilities, Context, Model, Parsers, RequestLimits, SamplingDefaults, is_pattern,
    matches as name_matches,
};
pub use error::ApiError;

/// Unix time, seconds.
pub fn unix_s() -> u64 {
    std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default().as_secs()
}
