//! Removing a model from the cache.
//!
//! Owns: what of it nothing else references. Must never: touch a file outside of the model's own folders, take a blob that another
//! revision or file links to, or one that somebody holds ([`Held`](super::Held)) or downloads; all of that is found out before the
//! first file goes. Order: names before what they name, so that an interruption leaves nothing that looks complete and is not.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File, TryLockError};
use std::path::{Path, PathBuf};

use super::error::{HubError, Result, at};
use super::layout::{RepoFolder, files_of, is_commit};
use super::{Hub, ModelName, variant};

/// What went.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Removed {
    pub files: usize,
    pub bytes: u64,
}

impl Hub {
    /// Removes a model: without revision and variant all that is here of it; with a revision, that one; with a variant, that GGUF
    /// model, of the revision or of all.
    pub fn remove(&self, name: &ModelName) -> Result<Removed> {
        let layout = RepoFolder::new(&self.cache, name);
        let absent =
            || HubError::NotCached { model: name.to_string(), cache: self.cache.display().to_string() };
        if !layout.root().is_dir() {
            return Err(absent());
        }
        no_download(&layout, name)?;
        let commits = match name.names_revision() {
            true => vec![layout.commit().ok_or_else(absent)?],
            false => commits(&layout),
        };
        let whole = name.variant().is_none() && !name.names_revision();
        let going: BTreeSet<PathBuf> =
            commits.iter().flat_map(|commit| links(&layout.snapshot(commit), name.variant())).collect();
        if going.is_empty() && !whole {
            return Err(absent());
        }
        let doomed = match whole {
            true => files_in(&layout.root().join("blobs")),
            false => unreferenced(&layout, &going),
        };
        // Exclusive locks, kept until the end: nobody begins to use what is going.
        let _locks = doomed.keys().map(|blob| claim(blob, name)).collect::<Result<Vec<_>>>()?;
        let removed = Removed { files: doomed.len(), bytes: doomed.values().sum() };
        if whole {
            remove_refs(&layout, |_| true)?;
            fs::remove_dir_all(layout.root()).map_err(at(layout.root()))?;
            // Others may hold them already, waiting.
            let _ = fs::remove_dir_all(layout.locks());
            return Ok(removed);
        }
        if name.variant().is_none() {
            remove_refs(&layout, |commit| commits.iter().any(|gone| gone == commit))?;
        }
        for link in &going {
            fs::remove_file(link).map_err(at(link))?;
            remove_empty(link.parent(), &layout.root().join("snapshots"));
        }
        for blob in doomed.keys().filter(|blob| !going.contains(*blob)) {
            fs::remove_file(blob).map_err(at(blob))?;
        }
        Ok(removed)
    }
}

/// A lock that is held is a download's.
fn no_download(layout: &RepoFolder, name: &ModelName) -> Result<()> {
    for file in files_of(layout.locks()) {
        let Ok(file) = File::open(layout.locks().join(file)) else { continue };
        if matches!(file.try_lock(), Err(TryLockError::WouldBlock)) {
            return Err(HubError::Downloading { model: name.to_string() });
        }
    }
    Ok(())
}

fn claim(blob: &Path, name: &ModelName) -> Result<File> {
    let file = File::open(blob).map_err(at(blob))?;
    match file.try_lock() {
        Err(TryLockError::WouldBlock) => {
            Err(HubError::InUse { model: name.to_string(), file: blob.display().to_string() })
        }
        // A file system without locks tells of nobody.
        _ => Ok(file),
    }
}

fn commits(layout: &RepoFolder) -> Vec<String> {
    let entries = fs::read_dir(layout.root().join("snapshots")).into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().into_string().ok()).filter(|name| is_commit(name)).collect()
}

/// A snapshot's files, or those of the GGUF model that is meant.
fn links(snapshot: &Path, variant: Option<&str>) -> Vec<PathBuf> {
    let files = files_of(snapshot);
    let chosen = match variant {
        None => files,
        Some(_) => {
            let files: Vec<&str> = files.iter().map(String::as_str).collect();
            variant::choose(&files, variant).map(|model| model.parts).unwrap_or_default()
        }
    };
    chosen.iter().map(|file| snapshot.join(file)).collect()
}

/// Bytes of the files of a folder, by their paths.
fn files_in(folder: &Path) -> BTreeMap<PathBuf, u64> {
    let length = |path: &PathBuf| fs::symlink_metadata(path).map_or(0, |metadata| metadata.len());
    let paths = files_of(folder).into_iter().map(|file| folder.join(file));
    paths.map(|path| (path.clone(), length(&path))).collect()
}

/// What holds the bytes of `going` and of no other link.
fn unreferenced(layout: &RepoFolder, going: &BTreeSet<PathBuf>) -> BTreeMap<PathBuf, u64> {
    let all: Vec<PathBuf> =
        commits(layout).iter().flat_map(|commit| links(&layout.snapshot(commit), None)).collect();
    let kept: BTreeSet<PathBuf> =
        all.iter().filter(|link| !going.contains(*link)).filter_map(|link| bytes_of(layout, link)).collect();
    let own = going.iter().filter_map(|link| bytes_of(layout, link)).filter(|blob| !kept.contains(blob));
    own.map(|blob| (blob.clone(), fs::metadata(&blob).map_or(0, |metadata| metadata.len()))).collect()
}

/// The blob behind a link; the file itself where it is none; `None` for a link that leads elsewhere, which is not ours.
fn bytes_of(layout: &RepoFolder, link: &Path) -> Option<PathBuf> {
    let Ok(target) = fs::read_link(link) else { return Some(link.to_owned()) };
    let blob = layout.root().join("blobs").join(target.file_name()?);
    let same = |path: &Path| path.canonicalize().ok();
    (same(&blob)? == same(link)?).then_some(blob)
}

fn remove_refs(layout: &RepoFolder, goes: impl Fn(&str) -> bool) -> Result<()> {
    let refs = layout.root().join("refs");
    for path in files_of(&refs).into_iter().map(|name| refs.join(name)) {
        if fs::read_to_string(&path).is_ok_and(|commit| goes(commit.trim())) {
            fs::remove_file(&path).map_err(at(&path))?;
        }
    }
    Ok(())
}

/// Folders that a file leaves empty, up to `end`.
fn remove_empty(mut folder: Option<&Path>, end: &Path) {
    while let Some(path) = folder.filter(|path| *path != end) {
        if fs::remove_dir(path).is_err() {
            return;
        }
        folder = path.parent();
    }
}
