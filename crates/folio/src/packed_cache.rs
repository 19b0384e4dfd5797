//! Packed weights kept between starts: the second start of a model maps a file instead of packing again.
//!
//! Owns: which file belongs to which model, when it is written, and how much disk they take together. Must never: fail a
//! start. A cache that cannot be read or written is a line in the log; a damaged file is removed and made again.
//!
//! A file is called by the digest of what decides its bytes: the configuration, device, inode, length and times of every
//! weight file, the quantization asked for, and the layout of the kernels. The digest of the model itself, which is part of
//! every KV block's identity, is in the file and is that of the original weights. A file in use is locked by whoever mapped
//! it; one being written ends in `.tmp`, is locked by its writer, and gets its name when it is complete and on the disk.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Instant, SystemTime};

use anyhow::{Context, Result, bail};
use folio_cpu::CpuError;
use folio_cpu::packed_file::{self, PackedFile, PackedWeights};
use folio_model::{Checkpoint, PackedAbout};
use sha2::{Digest, Sha256};

use crate::cli::{PackedCacheArgs, Quantize};
use crate::units;

const EXTENSION: &str = "folio";
/// Free disk space that is never taken.
const LEFT_FREE_BYTES: u64 = 1 << 30;

/// A packed file and what it says about its model.
pub struct Packed {
    pub file: PackedFile,
    pub about: PackedAbout,
    pub path: PathBuf,
}

impl Packed {
    pub fn open(path: &Path) -> Result<Self, PackedError> {
        let file = PackedFile::open(path)?;
        let about = PackedAbout::parse(&path.display().to_string(), file.about())?;
        Ok(Self { file, about, path: path.to_owned() })
    }
}

#[derive(Debug, thiserror::Error)]
pub enum PackedError {
    #[error(transparent)]
    File(#[from] CpuError),
    #[error(transparent)]
    About(#[from] folio_model::ModelError),
}

impl PackedError {
    fn is_absent(&self) -> bool {
        let PackedError::File(CpuError::Io { source, .. }) = self else { return false };
        source.kind() == std::io::ErrorKind::NotFound
    }
}

/// The folder and its limits.
#[derive(Clone, Debug)]
pub struct PackedCache {
    folder: PathBuf,
    limit_bytes: u64,
    least_bytes: u64,
}

/// A model's place in the cache.
#[derive(Clone, Debug)]
pub struct PackedPlace {
    cache: PackedCache,
    key: String,
}

/// The user's folder for what can be made again.
pub fn user_cache() -> Option<PathBuf> {
    let set = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty());
    let cache = set("XDG_CACHE_HOME").map(PathBuf::from);
    cache.or_else(|| Some(PathBuf::from(set("HOME")?).join(".cache")))
}

impl PackedCache {
    /// As the flags say; `None` when it is off, or there is no folder for it.
    pub fn new(args: &PackedCacheArgs) -> Option<Self> {
        let folder = match &args.packed_cache {
            Some(folder) if folder.as_os_str() == "off" => return None,
            Some(folder) => folder.clone(),
            None => user_cache()?.join("folio/packed"),
        };
        Some(Self { folder, limit_bytes: args.packed_cache_size, least_bytes: args.packed_cache_min })
    }

    /// Where the packed form of this checkpoint is, or would be. `None` for the built-in model, and for files that changed
    /// since they were opened.
    pub fn place(&self, checkpoint: &Checkpoint, quantize: Option<Quantize>) -> Option<PackedPlace> {
        let mut hash = Sha256::new();
        hash.update(b"folio packed weights");
        packed_file::layout().iter().for_each(|number| hash.update(number.to_le_bytes()));
        hash.update(format!("{quantize:?}"));
        hash.update(checkpoint.files_digest()?);
        let key = hash.finalize().iter().take(16).map(|byte| format!("{byte:02x}")).collect();
        Some(PackedPlace { cache: self.clone(), key })
    }

    /// Removes what was left behind by writers that are gone, then files not used for longest, until `needed` bytes more fit
    /// the limit. Files in use stay.
    fn make_room(&self, needed: u64) -> Result<()> {
        let mut kept = Vec::new();
        for entry in fs::read_dir(&self.folder)? {
            let path = entry?.path();
            let extension = path.extension().and_then(|extension| extension.to_str());
            match extension {
                Some("tmp") if unused(&path) => fs::remove_file(&path)?,
                Some(EXTENSION) => {
                    let file = path.metadata()?;
                    kept.push((file.modified()?, file.len(), path));
                }
                _ => {}
            }
        }
        kept.sort();
        let mut total: u64 = kept.iter().map(|(_, bytes, _)| bytes).sum();
        for (_, bytes, path) in kept {
            if total + needed <= self.limit_bytes {
                break;
            }
            if unused(&path) {
                fs::remove_file(&path)?;
                tracing::info!(file = %path.display(), "removed packed weights that were not used for longest");
                total -= bytes;
            }
        }
        if total + needed > self.limit_bytes {
            bail!(
                "they would take {} of --packed-cache-size {}, and the rest is in use",
                units::bytes(needed),
                units::bytes(self.limit_bytes)
            );
        }
        let disk = rustix::fs::statvfs(&self.folder)?;
        let free = disk.f_bavail.saturating_mul(disk.f_frsize);
        if free < needed.saturating_add(LEFT_FREE_BYTES) {
            bail!("{} are needed and {} are free on that disk", units::bytes(needed), units::bytes(free));
        }
        Ok(())
    }
}

/// Whether nobody holds a lock on the file.
fn unused(path: &Path) -> bool {
    File::open(path).is_ok_and(|file| file.try_lock().is_ok())
}

impl PackedPlace {
    pub fn path(&self) -> PathBuf {
        self.cache.folder.join(&self.key).with_extension(EXTENSION)
    }

    /// The packed form, if it is there and its header is sound.
    pub fn find(&self) -> Option<Packed> {
        let path = self.path();
        match Packed::open(&path) {
            Ok(packed) if packed.about.made_from == self.key => {
                // For the order of removal; a folder that cannot be written keeps the order it has.
                let _ = File::open(&path).and_then(|file| file.set_modified(SystemTime::now()));
                Some(packed)
            }
            Ok(_) => {
                self.discard("it is of another model");
                None
            }
            Err(error) if error.is_absent() => None,
            Err(error) => {
                self.discard(&error.to_string());
                None
            }
        }
    }

    /// Reports a file that is of no use, and removes it.
    pub fn discard(&self, why: &str) {
        let removed = fs::remove_file(self.path());
        tracing::warn!(file = %self.path().display(), removed = removed.is_ok(),
            "packed weights are refused and will be made again: {why}");
    }

    /// What a file at this place says about its model.
    pub fn key(&self) -> &str {
        &self.key
    }

    fn write(&self, unsaved: &Unsaved, stop: &AtomicBool) -> Result<()> {
        let folder = &self.cache.folder;
        fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))?;
        self.cache.make_room(unsaved.weights.file_bytes())?;
        let mut go_on = |_, _| !stop.load(Ordering::Relaxed);
        Ok(unsaved.weights.write(&self.path(), &unsaved.about, &mut go_on)?)
    }
}

/// Weights that were packed at this start and are worth keeping.
pub struct Unsaved {
    place: PackedPlace,
    weights: PackedWeights,
    about: Vec<u8>,
}

impl Unsaved {
    /// `None` for weights too small to be worth it, or whose files changed while they were read.
    pub fn new(
        place: Option<PackedPlace>,
        now: Option<PackedPlace>,
        weights: PackedWeights,
        about: &PackedAbout,
    ) -> Option<Self> {
        let place = place.filter(|place| now.is_some_and(|now| now.key == place.key))?;
        let enough = weights.file_bytes() >= place.cache.least_bytes;
        enough.then(|| Self { place, weights, about: about.to_bytes() })
    }

    pub fn path(&self) -> PathBuf {
        self.place.path()
    }

    /// Writes the file; says so in the log, also when it cannot.
    pub fn save(&self, stop: &AtomicBool) {
        let started = Instant::now();
        let path = self.place.path();
        match self.place.write(self, stop) {
            Ok(()) => tracing::info!(file = %path.display(), bytes = self.weights.file_bytes(),
                seconds = started.elapsed().as_secs_f32(), "packed weights kept for the next start"),
            Err(_) if stop.load(Ordering::Relaxed) => {}
            Err(error) => tracing::warn!(folder = %self.place.cache.folder.display(),
                "packed weights are not kept for the next start: {error:#}"),
        }
    }

    /// Writes the file on a thread that gives way to everybody else.
    pub fn save_behind(self) -> Saving {
        let stop = Arc::new(AtomicBool::new(false));
        let flag = stop.clone();
        let thread = std::thread::Builder::new().name("folio-keep".into()).spawn(move || {
            // Of this thread alone, on Linux.
            let _ = rustix::process::setpriority_process(None, 15);
            self.save(&flag);
        });
        Saving { stop, thread: thread.ok() }
    }
}

/// A file being written. Dropping it gives up; nothing is left behind.
pub struct Saving {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Saving {
    /// Waits until the file is written.
    pub fn finish(mut self) {
        self.join();
    }

    fn join(&mut self) {
        // A panic there was printed there, and costs nobody but the next start.
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

impl Drop for Saving {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        self.join();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cache(folder: &Path, limit_bytes: u64) -> PackedCache {
        PackedCache { folder: folder.to_owned(), limit_bytes, least_bytes: 0 }
    }

    fn file(folder: &Path, name: &str, bytes: u64, age_s: u64) -> PathBuf {
        let path = folder.join(name);
        let file = File::create(&path).expect("file");
        file.set_len(bytes).expect("length");
        file.set_modified(SystemTime::now() - std::time::Duration::from_secs(age_s)).expect("time");
        path
    }

    #[test]
    fn the_least_recently_used_go_first_and_those_in_use_stay() {
        let folder = tempfile::tempdir().expect("folder");
        let at = |name, bytes, age| file(folder.path(), name, bytes, age);
        let (oldest, old, new) = (at("a.folio", 100, 300), at("b.folio", 100, 200), at("c.folio", 100, 100));
        let (left, other) = (at("d.folio.7.tmp", 100, 1), at("notes.txt", 1000, 900));
        let in_use = File::open(&oldest).expect("opens");
        in_use.lock_shared().expect("locked");
        cache(folder.path(), 400).make_room(100).expect("room without removing");
        assert!(oldest.exists() && old.exists() && new.exists() && other.exists());
        assert!(!left.exists(), "nobody writes it any more");
        cache(folder.path(), 300).make_room(100).expect("room");
        assert!(oldest.exists() && !old.exists() && new.exists());
        let full = cache(folder.path(), 150).make_room(100).expect_err("one in use").to_string();
        assert!(full.contains("--packed-cache-size") && oldest.exists(), "{full}");
        drop(in_use);
        cache(folder.path(), 150).make_room(100).expect("room");
        assert!(!oldest.exists() && other.exists());
        let disk = cache(folder.path(), u64::MAX).make_room(1 << 60).expect_err("no such disk").to_string();
        assert!(disk.contains("free on that disk"), "{disk}");
    }

    #[test]
    fn a_writer_at_work_keeps_its_file() {
        let folder = tempfile::tempdir().expect("folder");
        let path = file(folder.path(), "a.folio.7.tmp", 10, 1);
        let writer = File::options().write(true).open(&path).expect("opens");
        writer.try_lock().expect("locked");
        cache(folder.path(), 100).make_room(1).expect("room");
        assert!(path.exists());
    }

    #[test]
    fn the_folder_is_as_asked_or_the_users() {
        let args = |folder: Option<&str>| PackedCacheArgs {
            packed_cache: folder.map(PathBuf::from),
            packed_cache_size: 7,
            packed_cache_min: 3,
        };
        assert!(PackedCache::new(&args(Some("off"))).is_none());
        let given = PackedCache::new(&args(Some("/x"))).expect("on");
        assert_eq!((given.folder.as_path(), given.limit_bytes, given.least_bytes), (Path::new("/x"), 7, 3));
        if let Some(default) = PackedCache::new(&args(None)) {
            assert!(default.folder.ends_with("folio/packed"));
        }
    }
}
