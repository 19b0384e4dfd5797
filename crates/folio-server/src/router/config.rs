//! What an operator says of several models.

use std::ffi::OsString;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

/// A model that is served on demand.
#[derive(Clone, Debug)]
pub struct ModelProcess {
    /// What answers call it, first, other names, and patterns of such.
    pub names: Vec<String>,
    /// Names of its adapters.
    pub adapters: Vec<String>,
    /// Bytes that it needs from its start to its end: weights, KV cache, KV beside it.
    pub need_bytes: u64,
    /// Bytes of its weights.
    pub weight_bytes: u64,
    /// A GPU's.
    pub on_gpu: bool,
    /// Name of the family, such as "qwen3".
    pub family: String,
    pub parameters: u64,
    /// What its weights are stored as.
    pub format: String,
    /// Prompt and generated tokens of one sequence.
    pub context_length: u32,
    /// Identity of its files, in hexadecimal.
    pub digest: String,
    /// How long it stays after its last request. `None`: until others need its memory.
    pub keep_alive: Option<Duration>,
    /// Arguments of the program, to which the socket's path is added.
    pub arguments: Vec<OsString>,
}

/// What is served, and how.
#[derive(Clone, Debug)]
pub struct RouterConfig {
    /// At least one.
    pub models: Vec<ModelProcess>,
    /// What is run.
    pub program: PathBuf,
    /// What a process reads first from its standard input.
    pub configuration: Arc<str>,
    /// Bytes that all processes may need together.
    pub memory_bytes: u64,
    /// How long a start may take.
    pub start_timeout: Duration,
    /// How long a request waits for others to leave it room.
    pub wait_timeout: Duration,
    /// Requests that wait for a start or for room; 503 beyond.
    pub waiting: usize,
    pub version: &'static str,
}
