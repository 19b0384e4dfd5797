//! What can go wrong before the first step: the machine is not what was asked for.

/// Errors of this crate that are not about a matrix or a batch.
#[derive(Debug, thiserror::Error)]
pub enum CpuError {
    #[error(
        "FOLIO_ISA={0:?} is not an instruction set: use scalar, avx2, avx512 or avx512vnni, or leave it unset"
    )]
    UnknownIsa(String),
    #[error("this processor does not run {0}: choose another FOLIO_ISA, or leave it unset")]
    IsaUnavailable(&'static str),
    #[error("{0} threads asked for; use 1 to {max}", max = crate::pool::MAX_THREADS)]
    Threads(usize),
    #[error("a worker thread could not be started: {0}")]
    Spawn(std::io::Error),
    #[error("worker {worker} panicked: {message}")]
    Panicked { worker: usize, message: String },
    #[error("{needed_bytes} bytes of memory could not be mapped: {reason}")]
    Map { needed_bytes: usize, reason: std::io::Error },
    #[error("{file}: {source}")]
    Io { file: String, source: std::io::Error },
    #[error("{file} is not a file of packed weights")]
    NotPacked { file: String },
    #[error("{file} was packed by another version of Folio: make it again from the original weights")]
    OtherLayout { file: String },
    #[error("{file} is damaged: {problem}")]
    Damaged { file: String, problem: String },
}
