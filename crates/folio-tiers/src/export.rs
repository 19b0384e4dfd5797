//! Blocks of a directory as one file, and back: to move them to another machine, or to keep them.
//!
//! The file is a segment (`segment`) with a footer, whatever its size. Records are copied as they lie, sealed or not: no key is needed
//! here, and none helps. A record counts only if its checksum is right; whether it is what a tenant stored is told by its tag, where it is
//! read. So whoever makes up a file makes misses.
//!
//! Nobody else may use the directory meanwhile: the same lock as a server's is taken.

use std::fs;
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use rustc_hash::FxHashSet;

use crate::inspect;
use crate::io::{Directory, File, Folder, PAGE, Pages, read_full, write_full};
use crate::record::{self, Parsed};
use crate::seal::OwnerKey;
use crate::segment::{self, Contents, Entry, Found};
use crate::store::DiskStore;
use crate::types::{BlockKey, DataKey, DiskConfig, OpenError, PutError, Stored};

/// What was copied.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Moved {
    pub blocks: u64,
    /// Of them, without headers.
    pub bytes: u64,
    /// That were there before.
    pub known: u64,
    /// That were not exported: they are not what was written.
    pub damaged: u64,
}

/// A segment and what it holds.
type Readable = (Box<dyn File>, Contents);

#[derive(Debug, thiserror::Error)]
pub enum MoveError {
    #[error(transparent)]
    Folder(#[from] OpenError),
    #[error("{}: {error}", path.display())]
    File { path: PathBuf, error: io::Error },
    #[error("{} is no export of KV blocks", path.display())]
    NotAnExport { path: PathBuf },
    #[error("{} was written by another version of Folio", path.display())]
    Version { path: PathBuf },
    #[error("{} is cut short, or its list of blocks is damaged: export it again", path.display())]
    Damaged { path: PathBuf },
    #[error("{} has no blocks of the layout {layout:?}: `folio cache ls` lists layouts", dir.display())]
    Layout { dir: PathBuf, layout: String },
    #[error("block {block} of {} is damaged: export it again", path.display())]
    Block { path: PathBuf, block: u64 },
    #[error("its blocks take {needed} bytes, and the folder may take {bytes}: give a larger --disk-kv-size")]
    Room { needed: u64, bytes: u64 },
    #[error("not all blocks could be stored, so none of them was: {0}")]
    Put(#[from] PutError),
}

/// Copies the blocks of one layout into a new file: of that whose digest begins with the hexadecimal digits `layout`, or else of that which
/// was written last. `tenant`: of who has this key alone. Cost: a read of each block, and 80 bytes of memory for it.
pub fn export(
    dir: &Path,
    layout: Option<&str>,
    tenant: Option<&DataKey>,
    path: &Path,
) -> Result<Moved, MoveError> {
    let folder = inspect::open(dir)?;
    let segments = newest_first(dir, &folder)?;
    let is_wanted = |contents: &Contents| {
        let hex: String = contents.layout.iter().map(|byte| format!("{byte:02x}")).collect();
        !contents.entries.is_empty() && layout.is_none_or(|layout| hex.starts_with(layout))
    };
    let Some(layout) = segments.iter().map(|(_, of)| of).find(|of| is_wanted(of)).map(|of| of.layout) else {
        return Err(MoveError::Layout { dir: dir.to_owned(), layout: layout.unwrap_or("any").to_owned() });
    };
    let of_file = |error| MoveError::File { path: path.to_owned(), error };
    let file = fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(path).map_err(of_file)?;
    let wanted = segments.iter().filter(|(_, contents)| contents.layout == layout);
    write_all(wanted, &file, layout, tenant.map(OwnerKey::from).as_ref()).map_err(|error| {
        // Half a file is of no use.
        let _ = fs::remove_file(path);
        of_file(error)
    })
}

/// What can be read of a directory's segments. Those of other versions stay where they are.
fn newest_first(dir: &Path, folder: &Directory) -> Result<Vec<Readable>, OpenError> {
    let listed = folder.list().map_err(|error| OpenError::Io { dir: dir.to_owned(), error })?;
    let mut names: Vec<String> = listed.into_iter().map(|file| file.name).collect();
    names.retain(|name| segment::number(name).is_some());
    names.sort_unstable_by(|a, b| b.cmp(a));
    let read = |name: String| {
        let file = folder.open(&name).ok()?;
        match segment::read(&*file, false).ok()? {
            Found::Footer(contents) | Found::Scanned(contents) => Some((file, contents)),
            Found::Foreign => None,
        }
    };
    Ok(names.into_iter().filter_map(read).collect())
}

fn write_all<'a>(
    segments: impl Iterator<Item = &'a Readable>,
    into: &fs::File,
    layout: [u8; 32],
    owner: Option<&OwnerKey>,
) -> io::Result<Moved> {
    let mut moved = Moved::default();
    let mut seen: FxHashSet<BlockKey> = FxHashSet::default();
    let mut contents = Contents { layout, end: 1, ..Contents::default() };
    write_full(into, &segment::first_page(contents.class), 0)?;
    for (file, from) in segments {
        // Of two records of one block the later counts.
        for entry in from.entries.iter().rev() {
            if seen.contains(&entry.key) {
                continue;
            }
            let Some(record) = whole(&**file, entry, &layout)? else {
                moved.damaged += 1;
                continue;
            };
            if owner.is_some_and(|owner| !record::is_of(&record, owner)) {
                continue;
            }
            let page = contents.end;
            let pages = (record.len() / PAGE) as u32;
            contents.end =
                page.checked_add(pages).ok_or_else(|| io::Error::other("it is larger than 16 TiB"))?;
            write_full(into, &record, u64::from(page) * PAGE as u64)?;
            contents.entries.push(Entry { page, ..*entry });
            seen.insert(entry.key);
            moved.blocks += 1;
            moved.bytes += u64::from(entry.length);
        }
    }
    write_full(into, &segment::footer(&contents), u64::from(contents.end) * PAGE as u64)?;
    into.sync_all()?;
    Ok(moved)
}

/// A record with zeros behind it, if it is what was written.
pub(crate) fn whole(file: &dyn File, entry: &Entry, layout: &[u8; 32]) -> io::Result<Option<Pages>> {
    let length = record::HEADER + entry.body();
    let mut record = Pages::new(length);
    if read_full(file, &mut record, u64::from(entry.page) * PAGE as u64)? < length {
        return Ok(None);
    }
    record[length..].fill(0);
    Ok(match record::parse(&record) {
        Parsed::Header(header) => {
            let is_it = header.key == entry.key
                && (header.length, header.lineage) == (entry.length, entry.lineage)
                && header.layout == *layout;
            (is_it && header.is_whole(&record[..length])).then_some(record)
        }
        Parsed::Foreign | Parsed::Nothing => None,
    })
}

/// Stores what an exported file has and the directory lacks, at most `bytes` in all: as a server with that limit would, what is worth the
/// least goes for it. The directory is made where there is none. The file is read twice: nothing of one that is damaged is stored,
/// and where writing fails what was written goes. (A process that is killed leaves whole blocks; importing again brings the rest.)
pub fn import(dir: &Path, bytes: u64, path: &Path) -> Result<Moved, MoveError> {
    let of_file = |error| MoveError::File { path: path.to_owned(), error };
    let file = fs::File::open(path).map_err(of_file)?;
    let mut first = Pages::new(PAGE);
    let read = read_full(&file, &mut first, 0).map_err(of_file)?;
    if !segment::is_first_page(&first[..read]) {
        return Err(MoveError::NotAnExport { path: path.to_owned() });
    }
    let contents = match segment::read(&file, false).map_err(of_file)? {
        Found::Footer(contents) => contents,
        Found::Scanned(_) => return Err(MoveError::Damaged { path: path.to_owned() }),
        Found::Foreign => return Err(MoveError::Version { path: path.to_owned() }),
    };
    // All of it is right, or nothing is stored.
    let mut needed = 0;
    for (entry, block) in contents.entries.iter().zip(1..) {
        if whole(&file, entry, &contents.layout).map_err(of_file)?.is_none() {
            return Err(MoveError::Block { path: path.to_owned(), block });
        }
        needed += (record::pages(entry.body()) * PAGE) as u64;
    }
    if needed > bytes {
        return Err(MoveError::Room { needed, bytes });
    }
    let store = DiskStore::open(DiskConfig::new(dir, bytes, contents.layout))?;
    store.wait_indexed();
    let first = store.next_segment();
    let stored = store_all(&file, path, &contents, &store);
    store.close();
    drop(store);
    if stored.is_err() {
        take_back(dir, first)?;
    }
    stored
}

fn store_all(
    file: &fs::File,
    path: &Path,
    contents: &Contents,
    store: &DiskStore,
) -> Result<Moved, MoveError> {
    let mut moved = Moved::default();
    for (entry, block) in contents.entries.iter().zip(1..) {
        let record = whole(file, entry, &contents.layout);
        let record = record.map_err(|error| MoveError::File { path: path.to_owned(), error })?;
        // It was right before: somebody writes to the file.
        let record = record.ok_or_else(|| MoveError::Block { path: path.to_owned(), block })?;
        match store.put_record(entry, &record)? {
            Stored::New => {
                moved.blocks += 1;
                moved.bytes += u64::from(entry.length);
            }
            Stored::There => moved.known += 1,
        }
    }
    Ok(moved)
}

/// Deletes the segments from number `first` on.
fn take_back(dir: &Path, first: u32) -> Result<(), OpenError> {
    let folder = inspect::open(dir)?;
    let of_folder = |error| OpenError::Io { dir: dir.to_owned(), error };
    for file in folder.list().map_err(of_folder)? {
        if segment::number(&file.name).is_some_and(|number| number >= first) {
            folder.remove(&file.name).map_err(of_folder)?;
        }
    }
    Ok(())
}
