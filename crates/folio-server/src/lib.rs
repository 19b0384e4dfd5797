//! HTTP in, HTTP out: OpenAI's and Anthropic's APIs over the engine.
//!
//! Owns: JSON, server-sent events, API keys and tenants, limits, `/metrics`. Must never: know about blocks or tensors, or
//! wait for the engine. A request is parsed and tokenized off the async thread (a short one on it), put into the engine's bounded mailbox, and
//! then only listened to; the answer is written by one task per request at the engine's pace.
//!
//! Invariants: every parameter is honoured, refused by a 400 that names it ([`params::REFUSED`]), or a listed hint ([`hints`]); tenancy comes from the
//! API key and nothing else; a client that vanishes cancels its request; every error has the shape of the API that was
//! spoken; counters equal the sums over responses.
//!
//! Cost per request: one scan of the body, one tokenization; per token one copy of its bytes and, when streamed, one JSON
//! chunk. Memory per request is bounded by its body and by bytes that its client has not accepted (`unread`).
#![forbid(unsafe_code)]

mod admin;
mod anthropic;
mod app;
mod audit;
mod batch;
mod blocks;
mod bounds;
mod cache_keys;
mod chat;
mod choice;
mod completions;
mod config;
mod connections;
mod declared;
mod effort;
mod embeddings;
mod error;
mod fair_queue;
mod fields;
mod gate;
mod generate;
mod guides;
pub mod hints;
mod http;
mod kept_grammars;
pub mod keys;
mod messages;
pub mod metrics;
pub mod openapi;
mod pages;
pub mod params;
mod pieces;
mod prefixes;
mod reading;
mod records;
mod responses;
mod retain;
mod routing;
mod safety;
mod secret;
mod serve;
mod shape;
mod shared_prefixes;
mod stream;
mod structured;
pub mod tenant_metrics;
mod tenants;
mod tls;
mod tokenize;
mod tools;
mod unread;
mod usage;
mod wire;

pub use app::{App, Engine, ModelFacts, is_pattern};
pub use batch::{BatchConfig, BatchLimits};
pub use config::{AdminConfig, Limits, ServerConfig, TlsFiles};
pub use declared::{Declared, DeclaredGroup, DeclaredTenant, PriorityRange, Share};
pub use error::{ApiError, ServerError};
pub use gate::TenantLimits;
pub use generate::unix_s;
pub use hints::HintPolicy;
pub use params::SamplingDefaults;
pub use reading::Parsers;
pub use safety::Safety;
pub use secret::Secret;
pub use serve::{Addresses, Listeners, Server, check, run, serve};

/// Goes on after a panic elsewhere: nothing under these locks panics between two statements that belong together.
fn lock<T>(mutex: &std::sync::Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}
