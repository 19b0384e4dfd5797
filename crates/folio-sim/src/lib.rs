//! The real scheduler and the real cache, driven without a model: a modelled backend, a seeded simulator, trace replay.
//!
//! Owns: everything that plays the outside world (clients, clock, device, faults) and the oracle. Must never:
//! re-implement the scheduler or the cache; what is simulated here is only what surrounds them.
//!
//! One seed decides everything. A failing seed is reproduced by `FOLIO_SIM_SEED=123 cargo test -p folio-sim one_seed`.
#![forbid(unsafe_code)]

pub mod backend;
pub mod cost;
mod drafter_checks;
pub mod head;
pub mod keeping;
pub mod machine;
pub mod memory;
mod mirror;
pub mod oracle;
pub mod pipeline;
mod plan_checks;
pub mod recorded;
pub mod replay;
mod replay_tier;
pub mod report;
pub mod retention;
pub mod rng;
pub mod rules;
mod sampling;
pub mod scenario;
pub mod simulator;
mod stream;
pub mod trace;
mod transfers;
mod world;

pub use backend::{FEATURES, SimBackend};
pub use cost::{CostModel, StepTime};
pub use head::HeadBackend;
pub use machine::Machine;
pub use pipeline::Pipeline;
pub use report::RunReport;
pub use scenario::Scenario;
pub use simulator::run_seed;
