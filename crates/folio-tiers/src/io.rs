//! Files, as little of them as the store needs: a small trait, so that tests can let a disk fail, and the real directory.
//!
//! Everything is read and written in whole pages at multiples of a page, from memory that lies at one, so that the page cache can be
//! passed by where the file system allows it (`O_DIRECT`, tried once at the start).

use std::fs;
use std::io::{self, ErrorKind};
use std::ops::{Deref, DerefMut};
use std::os::unix::fs::{DirBuilderExt, FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, SystemTime};

use rustix::fs::{FallocateFlags, OFlags, fallocate};

/// What offsets, lengths and addresses are multiples of.
pub const PAGE: usize = 4096;

/// A file of a folder.
#[derive(Clone, Debug)]
pub struct Listed {
    pub name: String,
    pub bytes: u64,
    /// Since it was last written.
    pub age: Duration,
}

/// One writer's files.
pub trait Folder: Send + Sync {
    fn list(&self) -> io::Result<Vec<Listed>>;
    fn open(&self, name: &str) -> io::Result<Box<dyn File>>;
    /// A new file of that length, with room for it on disk where the file system can set it aside.
    fn create(&self, name: &str, bytes: u64) -> io::Result<Box<dyn File>>;
    fn remove(&self, name: &str) -> io::Result<()>;
    /// Makes a file of the same file system one of these.
    fn adopt(&self, _from: &Path, _name: &str) -> io::Result<()> {
        Err(ErrorKind::Unsupported.into())
    }
    /// Whether the page cache is passed by.
    fn is_direct(&self) -> bool;
}

pub trait File: Send + Sync {
    fn bytes(&self) -> io::Result<u64>;
    /// Less than was asked for at the end of the file.
    fn read(&self, into: &mut [u8], at: u64) -> io::Result<usize>;
    fn write(&self, bytes: &[u8], at: u64) -> io::Result<usize>;
    fn cut(&self, bytes: u64) -> io::Result<()>;
}

/// Reads up to the end of the file. How many bytes came.
pub(crate) fn read_full(file: &dyn File, into: &mut [u8], at: u64) -> io::Result<usize> {
    let mut done = 0;
    while done < into.len() {
        match file.read(&mut into[done..], at + done as u64) {
            Ok(0) => break,
            Ok(read) => done += read,
            Err(error) if error.kind() == ErrorKind::Interrupted => continue,
            Err(error) => return Err(error),
        }
        // Only the end of a file is not at a page, and a direct read cannot begin there.
        if !done.is_multiple_of(PAGE) {
            break;
        }
    }
    Ok(done)
}

/// A write that wrote less has failed: disks that are full or broken begin like this.
pub(crate) fn write_full(file: &dyn File, bytes: &[u8], at: u64) -> io::Result<()> {
    let written = file.write(bytes, at)?;
    if written == bytes.len() {
        return Ok(());
    }
    Err(io::Error::new(ErrorKind::WriteZero, format!("{written} of {} bytes were written", bytes.len())))
}

/// Whole pages of memory that begin at a multiple of one.
pub struct Pages {
    memory: Vec<u8>,
    start: usize,
    len: usize,
}

impl Pages {
    /// Of zeros.
    pub fn new(bytes: usize) -> Self {
        let len = bytes.next_multiple_of(PAGE);
        let memory = vec![0; len + PAGE - 1];
        let start = memory.as_ptr().align_offset(PAGE);
        Self { memory, start, len }
    }
}

impl Deref for Pages {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.memory[self.start..][..self.len]
    }
}

impl DerefMut for Pages {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.memory[self.start..][..self.len]
    }
}

/// Pages that were used and will be used again: memory that is new costs a fault per page.
#[derive(Default)]
pub(crate) struct Buffers(Mutex<Vec<Pages>>);

impl Buffers {
    const MOST: usize = 16;

    /// What is in them is left of their last use.
    pub fn take(&self, bytes: usize) -> Pages {
        let len = bytes.next_multiple_of(PAGE);
        let mut free = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        match free.iter().position(|pages| pages.memory.len() >= len + PAGE - 1) {
            Some(at) => {
                let mut pages = free.swap_remove(at);
                pages.len = len;
                pages
            }
            None => {
                drop(free);
                Pages::new(bytes)
            }
        }
    }

    pub fn give_back(&self, pages: Pages) {
        let mut free = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if free.len() == Self::MOST {
            free.remove(0);
        }
        free.push(pages);
    }
}

/// A directory of a real file system, which this process alone writes to.
pub struct Directory {
    path: PathBuf,
    direct: bool,
    _lock: fs::File,
}

impl Directory {
    /// `None`: another process has it.
    pub fn open(path: &Path) -> io::Result<Option<Self>> {
        fs::DirBuilder::new().recursive(true).mode(0o700).create(path)?;
        let Some(lock) = lock_directory(path)? else { return Ok(None) };
        let mut directory = Self { path: path.to_owned(), direct: true, _lock: lock };
        directory.direct = directory.probe();
        Ok(Some(directory))
    }

    /// Whether one page goes out and comes back past the page cache. tmpfs, overlays and network file systems often refuse.
    fn probe(&self) -> bool {
        let written = Pages::new(PAGE);
        let mut read = Pages::new(PAGE);
        read.fill(1);
        let _ = self.remove("probe");
        let works = self.create("probe", PAGE as u64).and_then(|file| {
            write_full(&*file, &written, 0)?;
            file.read(&mut read, 0)
        });
        let _ = self.remove("probe");
        works.is_ok_and(|bytes| bytes == PAGE) && written[..] == read[..]
    }

    fn options(&self) -> fs::OpenOptions {
        let mut options = options();
        if self.direct {
            options.custom_flags(OFlags::DIRECT.bits() as i32);
        }
        options
    }
}

/// The lock of a directory that is there, held while the file is open. `None`: another process has it.
pub(crate) fn lock_directory(path: &Path) -> io::Result<Option<fs::File>> {
    let lock = options().create(true).truncate(false).open(path.join("lock"))?;
    match lock.try_lock() {
        Ok(()) => Ok(Some(lock)),
        Err(fs::TryLockError::WouldBlock) => Ok(None),
        Err(fs::TryLockError::Error(error)) => Err(error),
    }
}

/// A file of a directory that is another's. `direct`: past the page cache.
pub(crate) fn open_to_read(path: &Path, direct: bool) -> io::Result<Box<dyn File>> {
    let mut options = fs::OpenOptions::new();
    options.read(true);
    if direct {
        options.custom_flags(OFlags::DIRECT.bits() as i32);
    }
    Ok(Box::new(options.open(path)?))
}

/// The files of a directory.
pub(crate) fn list(path: &Path) -> io::Result<Vec<Listed>> {
    let now = SystemTime::now();
    let mut files = Vec::new();
    for entry in fs::read_dir(path)? {
        let entry = entry?;
        let Ok(name) = entry.file_name().into_string() else { continue };
        // It may have gone meanwhile.
        let about = match entry.metadata() {
            Err(error) if error.kind() == ErrorKind::NotFound => continue,
            about => about?,
        };
        if about.is_file() {
            let age = now.duration_since(about.modified()?).unwrap_or_default();
            files.push(Listed { name, bytes: about.len(), age });
        }
    }
    Ok(files)
}

fn options() -> fs::OpenOptions {
    let mut options = fs::OpenOptions::new();
    options.read(true).write(true).mode(0o600);
    options
}

impl Folder for Directory {
    fn list(&self) -> io::Result<Vec<Listed>> {
        list(&self.path)
    }

    fn open(&self, name: &str) -> io::Result<Box<dyn File>> {
        Ok(Box::new(self.options().open(self.path.join(name))?))
    }

    fn create(&self, name: &str, bytes: u64) -> io::Result<Box<dyn File>> {
        let file = self.options().create_new(true).open(self.path.join(name))?;
        match fallocate(&file, FallocateFlags::empty(), 0, bytes) {
            Ok(()) => {}
            Err(rustix::io::Errno::OPNOTSUPP | rustix::io::Errno::INVAL | rustix::io::Errno::NOSYS) => {
                file.set_len(bytes)?;
            }
            Err(error) => return Err(error.into()),
        }
        Ok(Box::new(file))
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        fs::remove_file(self.path.join(name))
    }

    fn adopt(&self, from: &Path, name: &str) -> io::Result<()> {
        fs::rename(from, self.path.join(name))
    }

    fn is_direct(&self) -> bool {
        self.direct
    }
}

impl File for fs::File {
    fn bytes(&self) -> io::Result<u64> {
        Ok(self.metadata()?.len())
    }

    fn read(&self, into: &mut [u8], at: u64) -> io::Result<usize> {
        self.read_at(into, at)
    }

    fn write(&self, bytes: &[u8], at: u64) -> io::Result<usize> {
        self.write_at(bytes, at)
    }

    fn cut(&self, bytes: u64) -> io::Result<()> {
        self.set_len(bytes)
    }
}
