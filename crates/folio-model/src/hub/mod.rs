//! Models by name, from a Hugging Face hub.
//!
//! Owns: turning `organisation/model` into a local folder or GGUF file, in the hub's own cache layout, so that models are shared with
//! every other program that uses it; what that cache holds, and removing from it. Must never: download what cannot be served (the
//! configuration, or the beginning of a GGUF file, comes first and is checked before gigabytes follow), send the token anywhere but
//! to the hub, ask the network for a model that is already here unless told to, or remove what somebody uses.

mod cached;
mod download;
mod error;
mod http;
mod layout;
mod listing;
mod name;
mod remove;
mod variant;

use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

pub use cached::{CachedKind, CachedModel, Held};
use download::{Transfer, backoff};
pub use error::HubError;
use error::Result;
use http::{Failure, Http, Refusal, Reply};
use layout::RepoFolder;
pub use listing::CARD;
use listing::{Listing, RemoteFile};
pub use name::ModelName;
pub use remove::Removed;
use variant::NoChoice;

use crate::checkpoint::{gguf, parse_index};
use crate::config::Config;

const ENDPOINT: &str = "https://huggingface.co";
/// Files downloaded at the same time.
const PARALLEL_FILES: usize = 4;
const LISTING_BYTES_MAX: u64 = 32 << 20;
const CONFIG_BYTES_MAX: u64 = 1 << 20;
const LISTING_ATTEMPTS_MAX: u32 = 5;
/// Of a GGUF file that are looked at before the rest is downloaded.
const PEEK_BYTES: u64 = 64 << 10;

/// Where models come from and where they are kept.
#[derive(Clone)]
pub struct Hub {
    endpoint: String,
    cache: PathBuf,
    token: Option<String>,
    offline: bool,
    backoff: Duration,
}

/// How far a download has come, over all its files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DownloadProgress<'a> {
    /// The file that just moved.
    pub file: &'a str,
    pub done_bytes: u64,
    pub total_bytes: u64,
}

impl Hub {
    /// As the environment says: `HF_ENDPOINT`, `HF_HUB_CACHE`, `HF_HOME`, `HF_TOKEN`, `HF_TOKEN_PATH`, `HF_HUB_OFFLINE`.
    pub fn from_env() -> Result<Self> {
        Self::from_vars(|name| std::env::var(name).ok())
    }

    /// The same, from any source of variables.
    pub fn from_vars(var: impl Fn(&str) -> Option<String>) -> Result<Self> {
        let var = |name: &str| var(name).filter(|value| !value.trim().is_empty());
        let home = match (var("HF_HOME"), var("XDG_CACHE_HOME"), var("HOME")) {
            (Some(home), ..) => Some(PathBuf::from(home)),
            (None, Some(cache), _) => Some(Path::new(&cache).join("huggingface")),
            (None, None, Some(home)) => Some(Path::new(&home).join(".cache/huggingface")),
            (None, None, None) => None,
        };
        let cache = match (var("HF_HUB_CACHE").or(var("HUGGINGFACE_HUB_CACHE")), &home) {
            (Some(cache), _) => PathBuf::from(cache),
            (None, Some(home)) => home.join("hub"),
            (None, None) => return Err(HubError::NoCacheFolder),
        };
        let token_file = var("HF_TOKEN_PATH").map(PathBuf::from).or(home.map(|home| home.join("token")));
        let stored = || token_file.and_then(|file| std::fs::read_to_string(file).ok());
        let token = var("HF_TOKEN").or(var("HUGGING_FACE_HUB_TOKEN")).or_else(stored);
        let offline = var("HF_HUB_OFFLINE")
            .is_some_and(|value| matches!(value.to_ascii_lowercase().as_str(), "1" | "true" | "yes" | "on"));
        Ok(Self {
            token: token.map(|token| token.trim().to_owned()).filter(|token| !token.is_empty()),
            offline,
            ..Self::new(var("HF_ENDPOINT").as_deref().unwrap_or(ENDPOINT), cache)
        })
    }

    /// A hub at `endpoint`, keeping models under `cache`; no token.
    pub fn new(endpoint: &str, cache: impl Into<PathBuf>) -> Self {
        Self {
            endpoint: endpoint.trim_end_matches('/').to_owned(),
            cache: cache.into(),
            token: None,
            offline: false,
            backoff: Duration::from_millis(500),
        }
    }

    pub fn with_token(mut self, token: &str) -> Self {
        self.token = Some(token.to_owned());
        self
    }

    pub fn with_offline(mut self, offline: bool) -> Self {
        self.offline = offline;
        self
    }

    /// The first pause after a failed attempt; it doubles from there.
    pub fn with_backoff(mut self, backoff: Duration) -> Self {
        self.backoff = backoff;
        self
    }

    pub fn cache(&self) -> &Path {
        &self.cache
    }

    /// What there is to open of a model that is completely here: a folder, or the first file of a GGUF model. Without a variant any
    /// GGUF model that is here will do. No network.
    pub fn cached(&self, name: &ModelName) -> Option<PathBuf> {
        RepoFolder::new(&self.cache, name).cached(name.variant())
    }

    /// The folder or GGUF file of a model: from the cache when it is there, else downloaded.
    pub fn get(&self, name: &ModelName, progress: &(dyn Fn(DownloadProgress<'_>) + Sync)) -> Result<PathBuf> {
        match self.cached(name) {
            Some(folder) => Ok(folder),
            None => self.pull(name, progress),
        }
    }

    /// Asks the hub what the revision is now and brings in what is missing.
    pub fn pull(
        &self,
        name: &ModelName,
        progress: &(dyn Fn(DownloadProgress<'_>) + Sync),
    ) -> Result<PathBuf> {
        if self.offline {
            let (model, cache) = (name.to_string(), self.cache.display().to_string());
            return Err(HubError::Offline { model, cache });
        }
        let http = Http::new(self.token.clone());
        let listing = self.listing(&http, name)?;
        let layout = RepoFolder::new(&self.cache, name);
        layout.create_folders()?;

        let refused = |url: &str, refusal: &Refusal| self.refused(name, url, refusal);
        let mut transfer = Transfer {
            http: &http,
            layout: &layout,
            address: format!("{}/{}/resolve/{}", self.endpoint, name.id(), listing.commit),
            refused: &refused,
            backoff: self.backoff,
            progress,
            done_bytes: AtomicU64::new(0),
            total_bytes: 0,
            stop: AtomicBool::new(false),
        };
        let bytes = |files: &[RemoteFile]| files.iter().map(|file| file.bytes).sum::<u64>();
        let gguf = self.choose_gguf(name, &listing)?;
        let (side, weights) = match &gguf {
            Some(parts) => {
                self.check_architecture(&transfer, name, &parts[0])?;
                let card = listing.side.iter().filter(|file| file.name == CARD);
                (card.cloned().collect(), parts.clone())
            }
            None => {
                transfer.total_bytes = bytes(&listing.side);
                fetch_all(&transfer, &listing.side)?;
                (listing.side.clone(), self.choose_weights(&layout, name, &listing)?)
            }
        };
        let files = [side, weights].concat();
        // What is here already counts as done once more.
        transfer.done_bytes = AtomicU64::new(0);
        transfer.total_bytes = bytes(&files);
        fetch_all(&transfer, &files)?;
        let snapshot = layout.publish(&listing.commit, &files)?;
        Ok(gguf.map_or(snapshot.clone(), |parts| snapshot.join(&parts[0].name)))
    }

    /// The files of the GGUF model that is meant; `None`: the repository's safetensors are.
    fn choose_gguf(&self, name: &ModelName, listing: &Listing) -> Result<Option<Vec<RemoteFile>>> {
        let has_config = listing.side.iter().any(|file| file.name == "config.json");
        let folder = has_config && !listing.weights.is_empty();
        if name.variant().is_none() && folder {
            return Ok(None);
        }
        let names: Vec<&str> = listing.gguf.iter().map(|file| file.name.as_str()).collect();
        let model = name.to_string();
        let chosen = match variant::choose(&names, name.variant()) {
            Ok(chosen) => chosen,
            Err(NoChoice::Empty) if name.variant().is_none() => return Ok(None),
            Err(NoChoice::Empty) => {
                return Err(HubError::NoVariant { model, found: "none at all".to_owned() });
            }
            Err(NoChoice::Unknown { found }) => return Err(HubError::NoVariant { model, found }),
            Err(NoChoice::Incomplete { file, missing }) => {
                return Err(HubError::Incomplete { model, file, missing });
            }
        };
        let file = |part: &String| listing.gguf.iter().find(|file| file.name == *part).cloned();
        Ok(Some(chosen.parts.iter().filter_map(file).collect()))
    }

    /// Looks at the beginning of a GGUF file that would be downloaded. What goes wrong on the way is the download's to tell.
    fn check_architecture(&self, transfer: &Transfer<'_>, name: &ModelName, file: &RemoteFile) -> Result<()> {
        let layout = transfer.layout;
        if layout.blob(file.etag.hex()).exists() || layout.incomplete(file.etag.hex()).exists() {
            return Ok(());
        }
        let Ok(Reply::Body(response)) = transfer.http.get(&transfer.url(&file.name), 0) else {
            return Ok(());
        };
        let mut beginning = Vec::new();
        let read = response.into_body().into_reader().take(PEEK_BYTES).read_to_end(&mut beginning);
        match gguf::architecture_in(&beginning) {
            Some(found) if read.is_ok() && !gguf::knows_architecture(found) => {
                let reason = format!(
                    "{} is of architecture `{found}`; supported: {}",
                    file.name,
                    gguf::architecture_names()
                );
                Err(HubError::NotServable { model: name.to_string(), reason })
            }
            _ => Ok(()),
        }
    }

    fn listing(&self, http: &Http, name: &ModelName) -> Result<Listing> {
        let revision = name.revision().replace('/', "%2F");
        let url = format!("{}/api/models/{}/revision/{revision}?blobs=true", self.endpoint, name.id());
        Listing::parse(&url, &self.read(http, name, &url, LISTING_BYTES_MAX)?)
    }

    /// The text of a repository's config.json as it is now, without anything else; nothing is kept.
    pub fn config(&self, name: &ModelName) -> Result<Vec<u8>> {
        if self.offline {
            let (model, cache) = (name.to_string(), self.cache.display().to_string());
            return Err(HubError::Offline { model, cache });
        }
        let revision = name.revision().replace('/', "%2F");
        let url = format!("{}/{}/resolve/{revision}/config.json", self.endpoint, name.id());
        self.read(&Http::new(self.token.clone()), name, &url, CONFIG_BYTES_MAX)
    }

    /// What is at `url`, after some attempts.
    fn read(&self, http: &Http, name: &ModelName, url: &str, bytes_max: u64) -> Result<Vec<u8>> {
        let mut attempts = 0;
        loop {
            let (reason, retry_after) = match self.read_once(http, name, url, bytes_max) {
                Ok(body) => return Ok(body),
                Err(Failure::Fatal(error)) => return Err(error),
                Err(Failure::Transient { reason, retry_after }) => (reason, retry_after),
            };
            attempts += 1;
            if attempts >= LISTING_ATTEMPTS_MAX {
                return Err(HubError::Network { url: url.to_owned(), reason, attempts });
            }
            std::thread::sleep(backoff(self.backoff, attempts, retry_after));
        }
    }

    fn read_once(
        &self,
        http: &Http,
        name: &ModelName,
        url: &str,
        bytes_max: u64,
    ) -> std::result::Result<Vec<u8>, Failure> {
        let response = match http.get(url, 0)? {
            Reply::Body(response) => response,
            Reply::Refused(refusal) => return Err(self.refused(name, url, &refusal).into()),
        };
        let body = response.into_body().into_with_config().limit(bytes_max).read_to_vec();
        body.map_err(|error| Failure::Transient { reason: error.to_string(), retry_after: None })
    }

    /// The hub hides private models behind 401, so the advice depends on whether a token was sent.
    fn refused(&self, name: &ModelName, url: &str, refusal: &Refusal) -> HubError {
        let (model, endpoint) = (name.to_string(), self.endpoint.clone());
        let page = format!("{endpoint}/{}", name.id());
        match (refusal.status, refusal.code.as_str()) {
            (_, "RevisionNotFound") => {
                HubError::Revision { model, revision: name.revision().to_owned(), endpoint }
            }
            (404, _) => HubError::NotFound { model, endpoint },
            (status @ (401 | 403), code) => {
                let advice = match (&self.token, code) {
                    (None, "GatedRepo") => {
                        format!("accept its terms at {page}, then set HF_TOKEN to a token of that account")
                    }
                    (Some(_), "GatedRepo") => {
                        format!("accept its terms at {page} with the account that HF_TOKEN belongs to")
                    }
                    (None, _) => "it does not exist, or it is private or gated: set HF_TOKEN".to_owned(),
                    (Some(_), _) => {
                        format!("the token in use (HF_TOKEN) is invalid or may not read it; see {page}")
                    }
                };
                HubError::Refused { model, endpoint, status, advice }
            }
            (status, _) => HubError::Status { url: url.to_owned(), status },
        }
    }

    /// Which weight files to download, after making sure that the model can be served at all.
    fn choose_weights(
        &self,
        layout: &RepoFolder,
        name: &ModelName,
        listing: &Listing,
    ) -> Result<Vec<RemoteFile>> {
        let not_servable = |reason: String| HubError::NotServable { model: name.to_string(), reason };
        let read = |file: &str| -> Result<Option<Vec<u8>>> {
            let Some(remote) = listing.side.iter().find(|remote| remote.name == file) else {
                return Ok(None);
            };
            let blob = layout.blob(remote.etag.hex());
            std::fs::read(&blob).map(Some).map_err(error::at(&blob))
        };
        let config = read("config.json")?.ok_or_else(|| not_servable("it has no config.json".to_owned()))?;
        Config::parse("config.json", &config).map_err(|error| not_servable(error.to_string()))?;

        // As transformers does: the single file wins over the sharded ones.
        if let Some(single) = listing.weights.iter().find(|file| file.name == "model.safetensors") {
            return Ok(vec![single.clone()]);
        }
        let index = read("model.safetensors.index.json")?
            .ok_or_else(|| not_servable("it has no safetensors weights".to_owned()))?;
        let map = parse_index("model.safetensors.index.json", &index)
            .map_err(|error| not_servable(error.to_string()))?;
        let mut names: Vec<&String> = map.values().collect();
        names.sort_unstable();
        names.dedup();
        let find = |name: &String| {
            let file = listing.weights.iter().find(|file| file.name == *name).cloned();
            file.ok_or_else(|| not_servable(format!("its index names {name}, which it does not have")))
        };
        names.into_iter().map(find).collect()
    }
}

/// Downloads files side by side; the first failure stops the others and is returned.
fn fetch_all(transfer: &Transfer<'_>, files: &[RemoteFile]) -> Result<()> {
    let next = AtomicUsize::new(0);
    let failure = Mutex::new(None);
    let work = || {
        while let Some(file) = files.get(next.fetch_add(1, Ordering::Relaxed)) {
            match transfer.fetch(file) {
                Ok(true) => {}
                Ok(false) => return,
                Err(error) => {
                    transfer.stop.store(true, Ordering::Relaxed);
                    failure.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
                    return;
                }
            }
        }
    };
    std::thread::scope(|scope| {
        for _ in 0..PARALLEL_FILES.min(files.len()) {
            scope.spawn(work);
        }
    });
    match failure.into_inner().unwrap_or_else(PoisonError::into_inner) {
        Some(error) => Err(error),
        None => Ok(()),
    }
}
