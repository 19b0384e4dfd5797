//! What an operator says of several models.

use std::ffi::OsString;
use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

/// A model that is served on demand.
#[derive(Clone)]
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

/// Without the arguments, among which there may be keys.
impl fmt::Debug for ModelProcess {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ModelProcess").field("names", &self.names).finish_non_exhaustive()
    }
}

/// What is served, and how.
#[derive(Clone)]
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

/// Without the configuration, in which there may be keys.
impl fmt::Debug for RouterConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RouterConfig").field("models", &self.models).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::super::catalog::tests::model;
    use super::*;

    #[test]
    fn keys_are_in_nothing_that_is_printed() {
        let router = RouterConfig {
            models: vec![ModelProcess {
                arguments: vec!["--api-key".into(), "fk-hidden".into()],
                ..model(&["a"], &[])
            }],
            program: "folio".into(),
            configuration: "api-key = \"fk-hidden\"".into(),
            memory_bytes: 1,
            start_timeout: Duration::ZERO,
            wait_timeout: Duration::ZERO,
            waiting: 1,
            version: "1",
        };
        let printed = format!("{router:?} {:?}", router.models);
        assert!(printed.contains("[\"a\"]") && !printed.contains("hidden"), "{printed}");
    }
}
