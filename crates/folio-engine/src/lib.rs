//! Requests, sequences, the scheduler, the sampler and the step loop.
#![forbid(unsafe_code)]

pub mod plan;
pub mod request;

pub use plan::{Executor, StepOutput, StepPlan};
pub use request::{CancelFlag, Event, EventSink, FinishReason, Micros, Request, RequestId, SamplingParams};
