//! What the cache holds, and who uses it.
//!
//! Owns: reading the cache as it is, whoever filled it, and the hold that a process has on the files it serves: a shared lock on each
//! (`flock`), which ends with the process. Must never: write but the time of use, or trust that what one file says of another is so.

use std::fs::{self, File, FileTimes};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use super::error::{Result, at};
use super::layout::{RepoFolder, files_of, gguf_files, is_commit, is_complete};
use super::{Hub, ModelName, variant};
use crate::checkpoint::gguf::split_name;

/// A model in the cache.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CachedModel {
    /// With its revision, where that is not "main", and the file's name or quantization, where it is a GGUF model.
    pub name: ModelName,
    pub kind: CachedKind,
    /// Of all its files. Models of one repository may share some.
    pub bytes: u64,
    /// When one of them was last read, or opened by Folio.
    pub used: Option<SystemTime>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CachedKind {
    /// A folder of safetensors.
    Folder(PathBuf),
    /// The only or first file, and how its name says it is quantized.
    Gguf { file: PathBuf, quantization: String },
    /// Nothing that can be served: files are missing, or it is of another kind.
    Partial,
}

impl Hub {
    /// Everything in the cache that has a name here, sorted by it.
    pub fn models(&self) -> Result<Vec<CachedModel>> {
        let entries = match fs::read_dir(&self.cache) {
            Ok(entries) => entries,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(error) => return Err(at(&self.cache)(error)),
        };
        let folders = entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
        let mut models = Vec::new();
        for name in folders.filter_map(|folder| ModelName::of_folder(&folder)) {
            let before = models.len();
            for (revision, commit) in revisions(&RepoFolder::new(&self.cache, &name)) {
                let snapshot = RepoFolder::new(&self.cache, &name).snapshot(&commit);
                models.extend(models_of(&name, &revision, &snapshot));
            }
            if models.len() == before {
                // An interrupted download.
                let blobs = RepoFolder::new(&self.cache, &name).root().join("blobs");
                models.push(partial(name, &blobs));
            }
        }
        models.sort_by_cached_key(|model| model.name.to_string());
        Ok(models)
    }
}

/// Revisions that have a name, and commits that have none.
fn revisions(layout: &RepoFolder) -> Vec<(String, String)> {
    let refs = layout.root().join("refs");
    let named = files_of(&refs).into_iter().filter_map(|name| {
        let commit = fs::read_to_string(refs.join(&name)).ok()?.trim().to_owned();
        is_commit(&commit).then_some((name, commit))
    });
    let mut revisions: Vec<(String, String)> = named.collect();
    for entry in fs::read_dir(layout.root().join("snapshots")).into_iter().flatten().flatten() {
        let Ok(commit) = entry.file_name().into_string() else { continue };
        if is_commit(&commit) && revisions.iter().all(|(_, known)| *known != commit) {
            revisions.push((commit.clone(), commit));
        }
    }
    revisions
}

fn models_of(name: &ModelName, revision: &str, snapshot: &Path) -> Vec<CachedModel> {
    let model = |variant: Option<&str>, kind: CachedKind, files: &[String]| {
        let mut found = CachedModel { name: name.with(revision, variant), kind, bytes: 0, used: None };
        for metadata in files.iter().filter_map(|file| fs::metadata(snapshot.join(file)).ok()) {
            found.bytes += metadata.len();
            found.used = found.used.max(metadata.accessed().ok());
        }
        found
    };
    let there = gguf_files(snapshot);
    let there: Vec<&str> = there.iter().map(String::as_str).collect();
    let mut models: Vec<CachedModel> = variant::all(&there)
        .iter()
        .map(|gguf| {
            // A quantization that means another file than this one would not name it.
            let quantization = gguf.label();
            let means = variant::choose(&there, Some(quantization));
            let name = if means.as_ref() == Ok(gguf) { quantization } else { &gguf.parts[0] };
            let file = snapshot.join(&gguf.parts[0]);
            model(Some(name), CachedKind::Gguf { file, quantization: quantization.to_owned() }, &gguf.parts)
        })
        .collect();
    let files = files_of(snapshot);
    let others: Vec<String> = files.into_iter().filter(|file| !there.contains(&file.as_str())).collect();
    if is_complete(snapshot) {
        models.push(model(None, CachedKind::Folder(snapshot.to_owned()), &others));
    } else if models.is_empty() && !others.is_empty() {
        models.push(model(None, CachedKind::Partial, &others));
    }
    models
}

fn partial(name: ModelName, blobs: &Path) -> CachedModel {
    let files = files_of(blobs).into_iter().filter_map(|file| fs::metadata(blobs.join(file)).ok());
    let (mut bytes, mut used) = (0, None);
    for metadata in files {
        bytes += metadata.len();
        used = used.max(metadata.accessed().ok());
    }
    CachedModel { name, kind: CachedKind::Partial, bytes, used }
}

/// Files of the cache that this process uses. While it lives, [`Hub::remove`] refuses to take them away.
#[derive(Debug, Default)]
pub struct Held(#[expect(dead_code, reason = "the locks end with the files")] Vec<File>);

impl Held {
    /// Of a folder's files, or a GGUF model's by its first. Notes the time. Where a file system has no locks, nothing is held.
    pub fn of(path: &Path) -> Self {
        let paths: Vec<PathBuf> = match split_name(path) {
            Some(split) => split.paths().collect(),
            None if path.is_dir() => files_of(path).iter().map(|file| path.join(file)).collect(),
            None => vec![path.to_owned()],
        };
        let now = FileTimes::new().set_accessed(SystemTime::now());
        let hold = |path: PathBuf| {
            let file = File::open(path).ok()?;
            // Somebody else's file keeps its time.
            let _ = file.set_times(now);
            file.try_lock_shared().ok().map(|()| file)
        };
        Self(paths.into_iter().filter_map(hold).collect())
    }
}
