//! Where a model comes from: the built-in one, a folder, a GGUF file, or the hub.
//!
//! Owns: telling them apart by how they are written, and what clients call the model. Must never: load a weight.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use folio_model::Checkpoint;

use crate::demo;

/// Where a model comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    BuiltIn,
    /// A folder: Hugging Face's files, or one GGUF model.
    Folder(PathBuf),
    Gguf(PathBuf),
    Hub(String),
}

impl Source {
    /// `None` and `demo` are the built-in model; an existing folder wins over a hub name.
    pub fn parse(model: Option<&str>) -> Result<Self> {
        let Some(model) = model else { return Ok(Source::BuiltIn) };
        let path = Path::new(model);
        if path.is_dir() {
            return Ok(Source::Folder(path.to_owned()));
        }
        let is_gguf = path.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("gguf"));
        if path.is_file() && is_gguf {
            return Ok(Source::Gguf(path.to_owned()));
        }
        if path.is_file() {
            bail!(
                "{model} is a file; give a .gguf file, or the folder that holds config.json, *.safetensors and tokenizer.json"
            );
        }
        if model == demo::NAME || model == "demo" {
            return Ok(Source::BuiltIn);
        }
        let looks_like_path =
            is_gguf || model.starts_with(['.', '/', '~']) || model.matches('/').count() != 1;
        if looks_like_path {
            bail!(
                "there is no folder {model} and no such .gguf file, and it is no hub name either (org/model or org/model@revision)"
            );
        }
        Ok(Source::Hub(model.to_owned()))
    }

    /// What clients call it by default.
    pub fn name(&self) -> String {
        match self {
            Source::BuiltIn => demo::NAME.to_owned(),
            Source::Folder(path) => {
                let path = path.canonicalize().unwrap_or_else(|_| path.clone());
                path.file_name()
                    .map_or_else(|| "model".to_owned(), |name| name.to_string_lossy().into_owned())
            }
            Source::Gguf(path) => {
                let stem = path.file_stem().map_or_else(|| "model".into(), |stem| stem.to_string_lossy());
                // One name for all files of a split model: NAME-00001-of-00003.
                match stem.rsplit_once("-00001-of-") {
                    Some((name, _)) => name.to_owned(),
                    None => stem.into_owned(),
                }
            }
            Source::Hub(name) => name.split('@').next().unwrap_or(name).to_owned(),
        }
    }

    /// Opens a folder for its configuration alone.
    pub fn open_without_weights(&self) -> Result<Checkpoint> {
        match self {
            Source::Folder(path) => Ok(Checkpoint::open_without_weights(path)?),
            other => bail!("--load-format dummy needs a folder with a config.json, {} is none", other.name()),
        }
    }

    /// Opens the checkpoint, downloading it first if need be.
    pub fn open(&self) -> Result<Checkpoint> {
        match self {
            Source::BuiltIn => Checkpoint::from_bytes(demo::FILES).context("the built-in model"),
            Source::Folder(path) | Source::Gguf(path) => Ok(Checkpoint::open(path)?),
            Source::Hub(name) => Ok(Checkpoint::open(crate::pull::download(name)?)?),
        }
    }
}
