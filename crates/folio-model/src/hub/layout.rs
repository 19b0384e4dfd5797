//! The hub's cache on disk, shared with huggingface_hub and everything that uses it.
//!
//! ```text
//! models--org--name/
//!   blobs/<etag>                       the bytes; sha256 for large files, git's sha1 for small ones
//!   blobs/<etag>.incomplete            a download that can be resumed
//!   refs/<revision>                    the commit a branch stood at when it was last asked for
//!   snapshots/<commit>/<file>          symlinks to ../../blobs/<etag>
//! .locks/models--org--name/<etag>.lock held while a blob is written
//! ```
//!
//! Owns: paths and the order of writing. Invariant: a name in `blobs`, `snapshots` or `refs` appears only when what it
//! names is complete: files are renamed into place, links are made after blobs, the ref after the links.

use std::fs;
use std::path::{Path, PathBuf};

use super::error::{Result, at};
use super::listing::RemoteFile;
use super::name::ModelName;
use super::variant;
use crate::checkpoint::gguf::is_gguf;
use crate::checkpoint::parse_index;
use crate::eagle::is_head;

/// One model's part of the cache.
pub struct RepoFolder {
    root: PathBuf,
    locks: PathBuf,
    revision: String,
}

impl RepoFolder {
    pub fn new(cache: &Path, name: &ModelName) -> Self {
        Self {
            root: cache.join(name.folder()),
            locks: cache.join(".locks").join(name.folder()),
            revision: name.revision().to_owned(),
        }
    }

    pub fn blob(&self, etag: &str) -> PathBuf {
        self.root.join("blobs").join(etag)
    }

    pub fn incomplete(&self, etag: &str) -> PathBuf {
        self.root.join("blobs").join(format!("{etag}.incomplete"))
    }

    pub fn lock(&self, etag: &str) -> PathBuf {
        self.locks.join(format!("{etag}.lock"))
    }

    pub fn snapshot(&self, commit: &str) -> PathBuf {
        self.root.join("snapshots").join(commit)
    }

    pub fn create_folders(&self) -> Result<()> {
        for folder in
            [self.root.join("blobs"), self.root.join("refs"), self.root.join("snapshots"), self.locks.clone()]
        {
            fs::create_dir_all(&folder).map_err(at(&folder))?;
        }
        Ok(())
    }

    /// The model's folder in the cache.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Where its locks are.
    pub fn locks(&self) -> &Path {
        &self.locks
    }

    /// The commit that this revision stood at when it was last asked for.
    pub fn commit(&self) -> Option<String> {
        let commit = if is_commit(&self.revision) {
            self.revision.clone()
        } else {
            fs::read_to_string(self.root.join("refs").join(&self.revision)).ok()?.trim().to_owned()
        };
        is_commit(&commit).then_some(commit)
    }

    /// What there is to open of this revision, if everything needed to serve it is there: the snapshot's folder, or the (first) GGUF
    /// file in it that `variant` means.
    pub fn cached(&self, variant: Option<&str>) -> Option<PathBuf> {
        let snapshot = self.snapshot(&self.commit()?);
        if variant.is_none() && is_complete(&snapshot) {
            return Some(snapshot);
        }
        // Models of which a part is missing do not hide others that are whole.
        let files = gguf_files(&snapshot);
        let whole = variant::all(&files.iter().map(String::as_str).collect::<Vec<_>>());
        let parts: Vec<&str> = whole.iter().flat_map(|model| &model.parts).map(String::as_str).collect();
        let model = variant::choose(&parts, variant).ok()?;
        Some(snapshot.join(&model.parts[0]))
    }

    /// Makes the files of a commit visible. Their blobs must be in place.
    pub fn publish(&self, commit: &str, files: &[RemoteFile]) -> Result<PathBuf> {
        let snapshot = self.snapshot(commit);
        fs::create_dir_all(&snapshot).map_err(at(&snapshot))?;
        for file in files {
            let link = snapshot.join(&file.name);
            let folder = link.parent().unwrap_or(&snapshot);
            fs::create_dir_all(folder).map_err(at(folder))?;
            let up = "../".repeat(1 + Path::new(&file.name).components().count());
            let target = Path::new(&up).join("blobs").join(file.etag.hex());
            if fs::read_link(&link).is_ok_and(|current| current == target) {
                continue;
            }
            let name = link.file_name().unwrap_or_default().to_string_lossy();
            let fresh = link.with_file_name(format!(".{name}.{}.new", std::process::id()));
            link_or_copy(&target, &self.blob(file.etag.hex()), &fresh).map_err(at(&fresh))?;
            fs::rename(&fresh, &link).map_err(at(&link))?;
        }
        if !is_commit(&self.revision) {
            let reference = self.root.join("refs").join(&self.revision);
            let folder = reference.parent().unwrap_or(&self.root);
            fs::create_dir_all(folder).map_err(at(folder))?;
            let fresh = reference.with_file_name(format!(".ref.{}.new", std::process::id()));
            fs::write(&fresh, commit).map_err(at(&fresh))?;
            fs::rename(&fresh, &reference).map_err(at(&reference))?;
        }
        Ok(snapshot)
    }
}

#[cfg(unix)]
fn link_or_copy(target: &Path, _blob: &Path, link: &Path) -> std::io::Result<()> {
    let _ = fs::remove_file(link);
    std::os::unix::fs::symlink(target, link)
}

/// Symlinks need a privilege elsewhere; the hub copies there too.
#[cfg(not(unix))]
fn link_or_copy(_target: &Path, blob: &Path, link: &Path) -> std::io::Result<()> {
    fs::copy(blob, link).map(|_| ())
}

/// 40 hexadecimal digits.
pub fn is_commit(text: &str) -> bool {
    text.len() == 40 && text.bytes().all(|byte| byte.is_ascii_hexdigit())
}

/// Other programs fill the same cache file by file, so a snapshot may be partial: it counts as complete when it has a
/// configuration, all weights, and a tokenizer, but a drafter's head, which has none.
pub fn is_complete(snapshot: &Path) -> bool {
    let has = |file: &str| snapshot.join(file).is_file();
    let weights = || {
        let Ok(index) = fs::read(snapshot.join("model.safetensors.index.json")) else { return false };
        parse_index("model.safetensors.index.json", &index)
            .is_ok_and(|map| map.values().all(|file| has(file)))
    };
    let tokenizers = ["tokenizer.json", "tekken.json", "tokenizer.model", "tiktoken.model", "vocab.json"];
    let tokenizer = tokenizers.iter().any(|file| has(file));
    let is_head = || fs::read(snapshot.join("config.json")).is_ok_and(|config| is_head(&config));
    has("config.json") && (tokenizer || is_head()) && (has("model.safetensors") || weights())
}

/// Depth of folders, and files, that are looked at in a snapshot.
const DEPTH_MAX: usize = 4;
const FILES_MAX: usize = 100_000;

/// The files of a snapshot, links included, as paths in it with `/`.
pub fn files_of(snapshot: &Path) -> Vec<String> {
    let mut files = Vec::new();
    let mut folders = vec![(String::new(), 0)];
    while let Some((folder, depth)) = folders.pop() {
        let Ok(entries) = fs::read_dir(snapshot.join(&folder)) else { continue };
        for entry in entries.flatten() {
            let Ok(name) = entry.file_name().into_string() else { continue };
            let path = if folder.is_empty() { name } else { format!("{folder}/{name}") };
            match entry.file_type() {
                Ok(kind) if kind.is_dir() && depth < DEPTH_MAX => folders.push((path, depth + 1)),
                Ok(kind) if !kind.is_dir() && files.len() < FILES_MAX => files.push(path),
                _ => {}
            }
        }
    }
    files.sort_unstable();
    files
}

/// Those of GGUF that are there, not only linked.
pub fn gguf_files(snapshot: &Path) -> Vec<String> {
    let is_there = |path: &String| is_gguf(Path::new(path)) && snapshot.join(path).is_file();
    files_of(snapshot).into_iter().filter(is_there).collect()
}
