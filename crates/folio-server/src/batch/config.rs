//! How batches are kept and run, as an operator says it.

use std::path::PathBuf;

/// How batches are kept and run.
#[derive(Clone, Debug, Default)]
pub struct BatchConfig {
    /// Where files and batches are kept. `None`: in memory, and gone with the process.
    pub dir: Option<PathBuf>,
    /// Bytes of all files; one tenant may have half of them. `None`: 16 GiB in a folder, 256 MiB in memory.
    pub storage_bytes: Option<u64>,
    pub limits: BatchLimits,
}

impl BatchConfig {
    pub(super) fn bytes_max(&self) -> u64 {
        let usual = if self.dir.is_some() { 16 << 30 } else { 256 << 20 };
        self.storage_bytes.unwrap_or(usual)
    }
}

#[derive(Clone, Debug)]
pub struct BatchLimits {
    /// Of one uploaded file.
    pub file_bytes: usize,
    /// Requests in one file.
    pub lines: usize,
    /// Files of one tenant, those that batches wrote not counted against a batch.
    pub files: usize,
    /// Batches of one tenant that are not finished.
    pub running: usize,
    /// Batches of one tenant that are over and still told of.
    pub kept: usize,
    /// Lines that run at once, of all batches together.
    pub in_flight: usize,
}

impl Default for BatchLimits {
    fn default() -> Self {
        Self { file_bytes: 100 << 20, lines: 50_000, files: 1000, running: 32, kept: 500, in_flight: 8 }
    }
}
