//! What the cache holds, told to routers: vLLM's KV events over ZMQ.
//!
//! Owns: the wire (`wire`: msgpack, `zmtp`: frames), the order of messages and what is kept of them (`sequencer`, `log`), the sockets (`sockets`). Must
//! never: keep the engine waiting, tell of a tenant that the operator did not name, or hold more for a peer than the log that all share.
//!
//! ```text
//! engine ──► EventFeed ──► sequencer (a thread) ──► log ──► a task per subscriber (PUB), and per asker of replays (ROUTER)
//! tiers ───────┘             └ tree: what was told          └ one thread with an event loop of its own
//! ```
//!
//! A subscriber is a place in the log. Whoever reads slowly falls behind it, loses what the log gave up, and is counted; nothing waits for it and
//! nothing is kept for it. That is why the sockets are our own: the `zeromq` crate has a queue per subscriber and drops from it without a
//! count.
#![forbid(unsafe_code)]

mod config;
mod counts;
mod log;
mod publisher;
mod sequencer;
mod sockets;
mod tree;
mod wire;
mod zmtp;

pub use config::{EventFormat, KvEventsConfig, KvEventsConfigError};
pub use counts::{KvEventsStats, SubscriberStats};
pub use publisher::{CacheNames, EventSource, KvEvents, KvEventsError, Owners};
pub use wire::{int_hash, medium_name};
