//! The step loop.

use std::sync::Arc;

use folio_kv::KvCache;

use crate::clock::Clock;
use crate::config::{ConfigError, SchedulerConfig};
use crate::handle::EngineHandle;
use crate::plan::Executor;

/// What an engine is made of.
pub struct EngineParts {
    pub config: SchedulerConfig,
    pub cache: KvCache,
    pub executor: Box<dyn Executor>,
    pub clock: Arc<dyn Clock>,
    /// Size of the vocabulary: token ids at or above it are refused.
    pub vocab: u32,
}

/// Starts the engine on its own thread.
pub fn start(parts: EngineParts) -> Result<EngineHandle, ConfigError> {
    parts.config.validate()?;
    todo!()
}
