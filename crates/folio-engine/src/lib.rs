//! Requests, sequences, the scheduler, the sampler and the step loop.
//!
//! Owns: everything between a validated [`Request`] and its [`Event`]s. Must never: see JSON, see a kernel, or read a
//! clock by itself ([`Clock`] is given to it).
//!
//! Start reading at `engine.rs`: its `run` is the whole engine. [`start`] puts it on a thread, [`EngineHandle`] talks to
//! it, [`Scheduler`] decides, an [`Executor`] computes ([`ModelExecutor`] with a real backend), [`Sampler`] chooses.
#![forbid(unsafe_code)]

mod acceptance;
pub mod adapters;
pub mod clock;
pub mod commands;
pub mod config;
pub mod drafting;
pub mod drafting_executor;
pub mod embeddings;
pub mod engine;
pub mod executor;
mod feed;
pub mod guide;
pub mod handle;
mod mailbox;
mod on_device;
mod on_host;
mod outbox;
pub mod plan;
pub mod progress;
mod publish;
pub mod request;
pub mod sampler;
pub mod scheduler;
mod sequence;
pub mod stats;
pub mod tier;
pub mod turn;
mod work;

pub use adapters::{
    Adapter, AdapterId, AdapterOrder, AdapterReport, AdapterSource, RequestAdapter, ResidentAdapter,
};
pub use clock::{Clock, SystemClock};
pub use commands::{CacheCommand, CacheReply, CacheResponse};
pub use config::{AdmissionPolicy, ConfigError, SchedulerConfig};
pub use drafting::{DRAFTS_MAX, Drafter, Drafters, Speculation};
pub use drafting_executor::DraftingExecutor;
pub use embeddings::{AxisPositions, EmbeddingRange};
pub use engine::{EngineParts, StartError, start};
pub use executor::ModelExecutor;
pub use feed::{EventFeed, Medium, Owner, Resident, Taken, TierBatch, TierEvent, short_name};
pub use folio_drafts::{IndexBlock, IndexCache};
pub use folio_model::program::EmbeddingInput;
pub use guide::{Guide, GuideRef, Restricted, Rules, RulesRef};
pub use handle::{EngineHandle, Health, Rejected};
pub use mailbox::CancelRequest;
pub use plan::{DrafterModel, Executor, Reads, StepOutput, StepPlan};
pub use request::{
    CancelFlag, Event, EventSink, FinishReason, Micros, Pooling, Request, RequestId, SamplingParams,
};
pub use sampler::Sampler;
pub use scheduler::Scheduler;
pub use sequence::choice_seed;
pub use stats::{DraftCounts, EngineStats, LoadCost, PREFILL_TOKENS, PerReason, PrefetchCounts, WaitingFor};
pub use tier::{
    CHUNK_BLOCKS_MAX, LoadOrder, Report, ReportSink, StoreOrder, TIERS_MAX, Tier, TierStats, TransferOrder,
    find as find_in_tiers,
};
pub use turn::{StepDriver, turn};
pub use work::{Activity, StepWork, Work};
