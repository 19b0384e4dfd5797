//! Requests, sequences, the scheduler, the sampler and the step loop.
#![forbid(unsafe_code)]

pub mod clock;
pub mod config;
pub mod engine;
pub mod handle;
pub mod mailbox;
pub mod plan;
pub mod request;
pub mod stats;

pub use clock::{Clock, SystemClock};
pub use config::{ConfigError, SchedulerConfig};
pub use engine::{EngineParts, start};
pub use handle::{EngineHandle, Health, Rejected};
pub use plan::{Executor, StepOutput, StepPlan};
pub use request::{CancelFlag, Event, EventSink, FinishReason, Micros, Request, RequestId, SamplingParams};
pub use stats::{EngineStats, WaitingFor};
