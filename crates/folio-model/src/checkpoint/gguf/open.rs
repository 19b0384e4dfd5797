//! From a path to the open files of a GGUF model: one file, or a set split by llama.cpp's `gguf-split`.

use std::collections::BTreeMap;
use std::fs::File;
use std::path::{Path, PathBuf};

use super::config::{Described, describe};
use super::{Header, HeaderError, Metadata, Names, TensorInfo, names, read_header, scaled};
use crate::checkpoint::shards::{Entry, Form, Index, Shard};
use crate::checkpoint::storage::Storage;
use crate::error::{ModelError, Result};

const SPLIT_NUMBER: &str = "split.no";
const SPLIT_COUNT: &str = "split.count";
const SPLIT_TENSORS: &str = "split.tensors.count";
const FILES_MAX: u64 = 10_000;

/// An opened model.
pub struct Opened {
    pub described: Described,
    pub shards: Vec<Shard>,
    pub tensors: Index,
    /// Of the first shard, which holds the metadata.
    pub header: Header,
}

/// Whether a path names a GGUF file.
pub fn is_gguf(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("gguf"))
}

/// The one GGUF model in a folder, if there is one. Later parts of a split model are not models.
pub fn find_in(folder: &Path) -> Result<Option<PathBuf>> {
    let Ok(entries) = std::fs::read_dir(folder) else { return Ok(None) };
    let mut found: Vec<PathBuf> = entries
        .filter_map(|entry| Some(entry.ok()?.path()))
        .filter(|path| is_gguf(path) && split_name(path).is_none_or(|split| split.number == 1))
        .collect();
    found.sort();
    match found.len() {
        0 => Ok(None),
        1 => Ok(found.pop()),
        _ => {
            let names: Vec<_> =
                found.iter().filter_map(|path| path.file_name()).map(|name| name.to_string_lossy()).collect();
            Err(ModelError::Folder {
                folder: folder.display().to_string(),
                missing: format!("it holds several GGUF files; give one of them: {}", names.join(", ")),
            })
        }
    }
}

struct OpenFile {
    shown: String,
    storage: Storage,
    header: Header,
}

impl OpenFile {
    fn open(path: &Path) -> Result<Self> {
        let shown = path.display().to_string();
        let io = |source| ModelError::Io { file: shown.clone(), source };
        let storage = Storage::map(&File::open(path).map_err(io)?).map_err(io)?;
        let header = read_header(storage.bytes()).map_err(|error| match error {
            HeaderError::Damaged(problem) => ModelError::Damaged { file: shown.clone(), problem },
            HeaderError::Unsupported(what, supported) => {
                ModelError::Unsupported { file: shown.clone(), what, supported }
            }
        })?;
        Ok(Self { shown, storage, header })
    }

    fn metadata(&self) -> Metadata<'_> {
        Metadata::new(&self.shown, self.storage.bytes(), &self.header)
    }

    fn find(&self, tensor: &str) -> Option<(&TensorInfo, &[u8])> {
        let info = self.header.tensors.get(tensor)?;
        Some((info, self.storage.bytes().get(info.range.clone())?))
    }
}

/// Opens a model by its only or first file.
pub fn open(path: &Path) -> Result<Opened> {
    let first = OpenFile::open(path)?;
    let mut files = vec![first];
    let count = files[0].metadata().integer(SPLIT_COUNT)?.unwrap_or(1);
    if count > 1 {
        open_rest(path, count, &mut files)?;
    }
    let described = {
        let find = |tensor: &str| files.iter().find_map(|file| file.find(tensor));
        describe(files[0].metadata(), &find)?
    };
    let header = files[0].header.clone();
    let mut tensors = Index::new();
    let mut shards = Vec::with_capacity(files.len());
    for (number, file) in files.into_iter().enumerate() {
        let entries = entries(&file, &described.names)?;
        for name in entries.keys() {
            if tensors.insert(name.clone(), number).is_some() {
                let problem = format!("tensor `{name}` is also in another of its files");
                return Err(ModelError::Damaged { file: file.shown, problem });
            }
        }
        shards.push(Shard { file: file.shown, storage: file.storage, entries });
    }
    scaled::apply(&described.config, &mut shards, &mut tensors)?;
    Ok(Opened { described, shards, tensors, header })
}

/// Opens files 2 to `count` of a split model.
fn open_rest(path: &Path, count: u64, files: &mut Vec<OpenFile>) -> Result<()> {
    let metadata = files[0].metadata();
    if count > FILES_MAX {
        return Err(metadata.problem(SPLIT_COUNT, format!("is {count}, more than the limit of {FILES_MAX}")));
    }
    let Some(name) = split_name(path).filter(|name| name.count == count) else {
        let problem = format!(
            "is {count}, but the file is not called NAME-00001-of-{count:05}.gguf: the other files cannot be found"
        );
        return Err(metadata.problem(SPLIT_COUNT, problem));
    };
    if metadata.integer(SPLIT_NUMBER)? != Some(0) || name.number != 1 {
        let first = name.path(1);
        let problem = format!("is not 0: give the first file of the model, {}", first.display());
        return Err(metadata.problem(SPLIT_NUMBER, problem));
    }
    for number in 2..=count {
        let file = OpenFile::open(&name.path(number))?;
        let metadata = file.metadata();
        for (key, expected) in [(SPLIT_NUMBER, number - 1), (SPLIT_COUNT, count)] {
            if metadata.integer(key)? != Some(expected) {
                return Err(
                    metadata.problem(key, format!("is not {expected}: files of two models are mixed"))
                );
            }
        }
        files.push(file);
    }
    let found: usize = files.iter().map(|file| file.header.tensors.len()).sum();
    let metadata = files[0].metadata();
    match metadata.integer(SPLIT_TENSORS)? {
        Some(stated) if stated != found as u64 => {
            Err(metadata.problem(SPLIT_TENSORS, format!("is {stated}, but the files hold {found}")))
        }
        _ => Ok(()),
    }
}

/// `model-00001-of-00003.gguf`
pub(crate) struct SplitName {
    folder: PathBuf,
    pub prefix: String,
    /// From 1.
    pub number: u64,
    pub count: u64,
}

impl SplitName {
    /// Of the part with that number.
    pub fn path(&self, number: u64) -> PathBuf {
        self.folder.join(format!("{}-{number:05}-of-{:05}.gguf", self.prefix, self.count))
    }

    /// Of all parts, in order; at most as many as a model may have.
    pub fn paths(&self) -> impl Iterator<Item = PathBuf> {
        (1..=self.count.min(FILES_MAX)).map(|number| self.path(number))
    }
}

/// What a file's name says of the parts of a model, if it is one's name.
pub(crate) fn split_name(path: &Path) -> Option<SplitName> {
    let (rest, count) = path.file_stem()?.to_str()?.rsplit_once("-of-")?;
    let (prefix, number) = rest.rsplit_once('-')?;
    Some(SplitName {
        folder: path.parent()?.to_owned(),
        prefix: prefix.to_owned(),
        number: number.parse().ok()?,
        count: count.parse().ok()?,
    })
}

/// A file's tensors by the decoder's names.
fn entries(file: &OpenFile, names: &Names) -> Result<BTreeMap<String, Entry>> {
    let mut entries = BTreeMap::new();
    for (stored, info) in &file.header.tensors {
        if names::is_rotary(stored) {
            continue;
        }
        let name = names.decoder_name(stored);
        let shape = names.shape(&name, &info.shape);
        let block = matches!(info.encoding, Ok(encoding) if encoding.plain().is_none());
        if shape.len() != 2 && block {
            return Err(ModelError::Unsupported {
                file: file.shown.clone(),
                what: format!("tensor `{stored}` of shape {:?} in blocks", info.shape),
                supported: "only matrices are stored so".to_owned(),
            });
        }
        let entry = Entry {
            stored_name: stored.clone(),
            encoding: info.encoding.clone(),
            shape,
            range: info.range.clone(),
            form: Form::Rows(names.order(&name)),
        };
        if let Some(other) = entries.insert(name, entry) {
            let problem =
                format!("tensors `{}` and `{stored}` are the same part of a model", other.stored_name);
            return Err(ModelError::Damaged { file: file.shown.clone(), problem });
        }
    }
    Ok(entries)
}

/// The metadata of an opened model.
pub fn metadata<'a>(shards: &'a [Shard], header: &'a Header) -> Metadata<'a> {
    Metadata::new(&shards[0].file, shards[0].storage.bytes(), header)
}
