//! HTTP in, HTTP out: the APIs of `folio-api` over the engine.
//!
//! Owns: HTTP, server-sent events, API keys and tenants, limits, batches, `/metrics`. Must never: know a field of an API, know about blocks or
//! tensors, or wait for the engine. A request is parsed and tokenized off the async thread (a short one on it), put into the engine's bounded
//! mailbox, and then only listened to; the answer is written by one task per request at the engine's pace.
//!
//! Invariants: imports go down (`tests/layers.rs`); tenancy comes from the
//! API key and nothing else; a client that vanishes cancels its request; every error has the shape of the API that was
//! spoken; counters equal the sums over responses.
//!
//! Cost per request: one scan of the body, one tokenization; per token one copy of its bytes and, when streamed, one JSON
//! chunk. Memory per request is bounded by its body and by bytes that its client has not accepted (`unread`).
#![forbid(unsafe_code)]

mod adapters;
mod admin;
mod app;
mod arrival;
mod batch;
mod config;
mod decoding;
mod endpoints;
mod engine;
mod error;
mod generation;
mod http;
mod listening;
mod load;
mod observability;
mod response_store;
mod router;
mod routes;
mod safety;
mod serve;
mod tenancy;
mod threads;
mod trace_context;

pub use adapters::{AdapterProblem, Adapters, AllowedAdapters, KeepAdapter, LoadAdapter};
pub use batch::config::{BatchConfig, BatchLimits};
pub use config::{AdminConfig, Limits, ServerConfig};
pub use engine::{App, Engine, ModelFacts, WeightFacts};
pub use error::ServerError;
pub use folio_api::SamplingDefaults;
pub use folio_api::hints::HintPolicy;
pub use folio_api::{ApiError, hints, is_pattern, openapi, refused};
pub use folio_api::{Parsers, RequestLimits, unix_s};
pub use http::Peer;
pub use http::tls::TlsFiles;
pub use observability::{metrics, tenant_metrics, why};
pub use router::{
    ModelProcess, RouterConfig, documented as router_metrics, parse_keep_alive, router_of, run_router,
};
pub use safety::Safety;
pub use serve::{Addresses, Listeners, Server, check, run, run_behind, serve};
pub use tenancy::declared::{Declared, DeclaredGroup, DeclaredTenant, PriorityRange, Share};
pub use tenancy::gate::TenantLimits;
pub use tenancy::keyring::Keyring;
pub use tenancy::keys;
pub use tenancy::secret::Secret;
pub use tenancy::tenant::owner_digest;
pub use tenancy::wrapping::WrappingKey;
