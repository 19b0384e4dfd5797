//! Where the files of a checkpoint come from.
//!
//! Owns: finding and opening files by name, and the sentences about a place that holds no model. Must never: look inside a
//! file.

use std::borrow::Cow;
use std::fs::File;
use std::io::Read;
use std::path::PathBuf;

use super::storage::Storage;
use super::{INDEX, SINGLE};
use crate::error::{ModelError, Result};

/// tokenizer.json of the largest vocabularies is under 40 MB.
const SIDE_FILE_BYTES_MAX: u64 = 256 << 20;

pub enum Source {
    Folder(PathBuf),
    /// A GGUF file, which has no side files.
    File(PathBuf),
    /// `(name, bytes)`, built into the program.
    Embedded(&'static [(&'static str, &'static [u8])]),
}

impl Source {
    pub fn location(&self) -> String {
        match self {
            Source::Folder(path) | Source::File(path) => path.display().to_string(),
            Source::Embedded(_) => "the built-in model".to_owned(),
        }
    }

    pub fn display(&self, file: &str) -> String {
        match self {
            Source::Folder(folder) => folder.join(file).display().to_string(),
            Source::File(path) => path.display().to_string(),
            Source::Embedded(_) => format!("{file} of the built-in model"),
        }
    }

    pub fn not_a_model(&self, missing: impl Into<String>) -> ModelError {
        ModelError::Folder { folder: self.location(), missing: missing.into() }
    }

    fn io(&self, file: &str) -> impl FnOnce(std::io::Error) -> ModelError {
        let file = self.display(file);
        move |source| ModelError::Io { file, source }
    }

    fn open(&self, file: &str) -> Result<Option<File>> {
        let Source::Folder(folder) = self else { return Ok(None) };
        match File::open(folder.join(file)) {
            Ok(opened) => Ok(Some(opened)),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(self.io(file)(error)),
        }
    }

    pub fn read(&self, file: &str) -> Result<Option<Cow<'_, [u8]>>> {
        if let Source::Embedded(files) = self {
            let found = files.iter().find(|(name, _)| *name == file);
            return Ok(found.map(|(_, bytes)| Cow::Borrowed(*bytes)));
        }
        let Some(opened) = self.open(file)? else { return Ok(None) };
        let mut bytes = Vec::new();
        opened.take(SIDE_FILE_BYTES_MAX + 1).read_to_end(&mut bytes).map_err(self.io(file))?;
        if bytes.len() as u64 > SIDE_FILE_BYTES_MAX {
            return Err(ModelError::FileTooLarge {
                file: self.display(file),
                bytes: bytes.len() as u64,
                limit: SIDE_FILE_BYTES_MAX,
            });
        }
        Ok(Some(Cow::Owned(bytes)))
    }

    pub fn storage(&self, file: &str) -> Result<Option<Storage>> {
        match self {
            Source::Embedded(files) => {
                Ok(files.iter().find(|(name, _)| *name == file).map(|(_, bytes)| Storage::Static(bytes)))
            }
            Source::Folder(_) | Source::File(_) => {
                let Some(opened) = self.open(file)? else { return Ok(None) };
                Ok(Some(Storage::map(&opened).map_err(self.io(file))?))
            }
        }
    }

    /// Says why there are no weights.
    pub fn no_weights(&self) -> ModelError {
        let pickled = ["pytorch_model.bin", "pytorch_model.bin.index.json", "consolidated.00.pth"];
        let has = |file: &str| matches!(self.open(file), Ok(Some(_)));
        match pickled.iter().find(|file| has(file)) {
            Some(file) => self.not_a_model(format!("its weights are in {file}; only safetensors are read")),
            None => self.not_a_model(format!("it has neither {SINGLE} nor {INDEX}")),
        }
    }
}
