//! `folio bench`: the engine against the machine, and any server against the clock.

pub(crate) mod arrivals;
pub mod cache;
mod cache_plot;
pub mod claims;
pub mod client;
pub mod drafts;
pub mod engine;
pub mod kl;
pub mod kv;
pub mod limits;
pub mod load;
pub mod others;
mod speculation;
pub mod stats;
pub mod table;
mod texts;
pub mod workload;
