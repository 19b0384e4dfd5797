//! What can go wrong between a model's name and a folder of files.

/// Why a model could not be downloaded. Every sentence says what to do, where something can be done.
#[derive(Debug, thiserror::Error)]
pub enum HubError {
    #[error(
        "`{0}` is not a model name; expected `organisation/model`, if need be with `@revision` and, for a GGUF file, with `:Q4_K_M` behind it"
    )]
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
    #[error("{model}: there is no such GGUF file; there are {found}")]
    NoVariant { model: String, found: String },
    #[error("{model}: the repository has {file}, but not {missing}, which belongs to it")]
    Incomplete { model: String, file: String, missing: String },
    #[error("{model} is not in the cache at {cache}")]
    NotCached { model: String, cache: String },
    #[error("{model} is in use: {file} is held by a process that serves it; stop that first")]
    InUse { model: String, file: String },
    #[error("{model} is being downloaded; wait for that, or stop it first")]
    Downloading { model: String },
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
