//! What can go wrong between a model's name and a folder of files.

/// Why a model could not be downloaded. Every sentence says what to do, where something can be done.
#[derive(Debug, thiserror::Error)]
pub enum HubError {
    #[error("`{0}` is not a model name; expected `organisation/model` or `organisation/model@revision`")]
    Name(String),
    #[error(
        "cannot tell where models are cached: none of HF_HUB_CACHE, HF_HOME, XDG_CACHE_HOME and HOME is set; set HF_HOME to a folder"
    )]
    NoCacheFolder,
    #[error("{model} is not (completely) in the cache at {cache} and HF_HUB_OFFLINE forbids downloading it")]
    Offline { model: String, cache: String },
    #[error("{model} was not found on {endpoint}; is the name right? A private model also needs HF_TOKEN")]
    NotFound { model: String, endpoint: String },
    #[error("{model} has no revision `{revision}` on {endpoint}")]
    Revision { model: String, revision: String, endpoint: String },
    #[error("{endpoint} refuses access to {model} (HTTP {status}): {advice}")]
    Refused { model: String, endpoint: String, status: u16, advice: String },
    #[error("{model} cannot be served: {reason}")]
    NotServable { model: String, reason: String },
    #[error("{url}: HTTP {status}")]
    Status { url: String, status: u16 },
    #[error("{url}: {reason}")]
    Protocol { url: String, reason: String },
    #[error(
        "{url}: {reason} ({attempts} attempts without progress); what was downloaded is kept, run again to resume"
    )]
    Network { url: String, reason: String, attempts: u32 },
    #[error(
        "{file}: checksum mismatch: the hub says {expected}, the download has {found}; the bad file was deleted, run again"
    )]
    Checksum { file: String, expected: String, found: String },
    #[error(
        "disk full: {file} needs {needed_bytes} more bytes in {folder}; free some space or set HF_HOME to another disk"
    )]
    DiskFull { file: String, needed_bytes: u64, folder: String },
    #[error("cannot write {path}: {source}")]
    Io { path: String, source: std::io::Error },
}

pub type Result<T> = std::result::Result<T, HubError>;

/// `map_err(at(path))`
pub(super) fn at(path: &std::path::Path) -> impl FnOnce(std::io::Error) -> HubError {
    let path = path.display().to_string();
    move |source| HubError::Io { path, source }
}
