//! A model as it lies on disk (or inside the program): configuration, weights, side files.
//!
//! Owns: finding and opening files, checking their headers, handing out tensors by name. Must never: know a family, or
//! convert a weight. Invariant: a [`TensorView`] handed out has exactly the bytes its shape says. Opening maps files and
//! reads headers only; weights are read when touched.

mod digest;
mod generation;
pub mod json;
pub mod safetensors;
mod storage;

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

pub use digest::Digest;
pub use generation::GenerationConfig;
use safetensors::{TensorEntry, read_header};
use storage::Storage;

use crate::backend::TensorView;
use crate::config::Config;
use crate::decoder::{TensorSpec, weight_specs};
use crate::error::{ModelError, Result};
use crate::quant::Encoding;

const CONFIG: &str = "config.json";
const GENERATION: &str = "generation_config.json";
const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";
/// tokenizer.json of the largest vocabularies is under 40 MB.
const SIDE_FILE_BYTES_MAX: u64 = 256 << 20;

/// An opened checkpoint.
pub struct Checkpoint {
    source: Source,
    config_text: Vec<u8>,
    config: Config,
    generation: GenerationConfig,
    shards: Vec<Shard>,
    /// Tensor name to index into `shards`.
    tensors: BTreeMap<String, usize>,
}

/// Where files come from.
enum Source {
    Folder(PathBuf),
    /// `(name, bytes)`, built into the program.
    Embedded(&'static [(&'static str, &'static [u8])]),
}

struct Shard {
    file: String,
    storage: Storage,
    entries: BTreeMap<String, TensorEntry>,
}

impl Checkpoint {
    /// Opens a Hugging Face folder.
    pub fn open(folder: impl AsRef<Path>) -> Result<Self> {
        Self::from_source(Source::Folder(folder.as_ref().to_owned()))
    }

    /// Opens a checkpoint whose files are part of the program: the same names as in a folder.
    pub fn from_bytes(files: &'static [(&'static str, &'static [u8])]) -> Result<Self> {
        Self::from_source(Source::Embedded(files))
    }

    fn from_source(source: Source) -> Result<Self> {
        let Some(config_text) = source.read(CONFIG)?.map(Cow::into_owned) else {
            return Err(source.not_a_model("it has no config.json"));
        };
        let config_name = source.display(CONFIG);
        let config = Config::parse(&config_name, &config_text)?;
        let map = json::parse_object(&config_name, &config_text)?;
        let own = source.read(GENERATION)?;
        let own_name = source.display(GENERATION);
        let own = own.as_deref().map(|bytes| (own_name.as_str(), bytes));
        let generation = GenerationConfig::parse(own, json::Fields::new(&config_name, &map))?;
        let (shards, tensors) = open_shards(&source)?;
        Ok(Self { source, config_text, config, generation, shards, tensors })
    }

    pub fn config(&self) -> &Config {
        &self.config
    }

    pub fn generation(&self) -> &GenerationConfig {
        &self.generation
    }

    /// The folder, unless the checkpoint is embedded.
    pub fn folder(&self) -> Option<&Path> {
        match &self.source {
            Source::Folder(folder) => Some(folder),
            Source::Embedded(_) => None,
        }
    }

    /// The folder's path, or "the built-in model".
    pub fn location(&self) -> String {
        self.source.location()
    }

    /// A side file (tokenizer.json, chat_template.jinja, ...), if there is one.
    pub fn read(&self, file: &str) -> Result<Option<Cow<'_, [u8]>>> {
        self.source.read(file)
    }

    /// Names of all tensors, sorted, whether or not the decoder uses them.
    pub fn tensor_names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    /// Total bytes of the weight files.
    pub fn weight_file_bytes(&self) -> u64 {
        self.shards.iter().map(|shard| shard.storage.bytes().len() as u64).sum()
    }

    /// The tensor, after checking that it has the shape the configuration asks for and a dtype that is served.
    pub fn tensor(&self, spec: &TensorSpec) -> Result<TensorView<'_>> {
        let (shard, entry) = self.find(&spec.name)?;
        if entry.shape != spec.shape {
            return Err(ModelError::Shape {
                file: shard.file.clone(),
                tensor: spec.name.clone(),
                found: entry.shape.clone(),
                expected: spec.shape.clone(),
            });
        }
        let dtype = entry.dtype.clone().map_err(|found| ModelError::DType {
            file: shard.file.clone(),
            tensor: spec.name.clone(),
            found,
        })?;
        let bytes = shard.storage.bytes().get(entry.range.clone()).ok_or_else(|| ModelError::Damaged {
            file: shard.file.clone(),
            problem: format!("tensor `{}` lies outside of it", spec.name),
        })?;
        Ok(TensorView { encoding: Encoding::Plain(dtype), shape: &entry.shape, bytes })
    }

    /// Name of the file that holds a tensor, for errors.
    pub fn file_of(&self, tensor: &str) -> Result<&str> {
        Ok(&self.find(tensor)?.0.file)
    }

    /// Lets the operating system take back the pages of a tensor that will not be read again.
    pub fn release(&self, tensor: &str) {
        if let Ok((shard, entry)) = self.find(tensor) {
            shard.storage.release(entry.range.clone());
        }
    }

    /// Identity of the model for the KV cache of a server of `max_model_len`; see [`Digest`]. Touches every page of the
    /// weights: prefer [`crate::LoadedModel::digest`], which comes with loading.
    pub fn digest(&self, max_model_len: usize) -> Result<[u8; 32]> {
        let mut digest = self.start_digest(max_model_len);
        for part in weight_specs(&self.config).iter().flat_map(|weight| &weight.parts) {
            digest.tensor(&part.name, &self.tensor(part)?);
        }
        Ok(digest.finish())
    }

    /// A digest that has seen the configuration and no tensor yet.
    pub fn start_digest(&self, max_model_len: usize) -> Digest {
        Digest::new(&self.config_text, &self.config.rope.table(max_model_len))
    }

    fn find(&self, tensor: &str) -> Result<(&Shard, &TensorEntry)> {
        let shard = self.tensors.get(tensor).and_then(|index| self.shards.get(*index));
        let found = shard.and_then(|shard| Some((shard, shard.entries.get(tensor)?)));
        found.ok_or_else(|| ModelError::MissingTensor {
            tensor: tensor.to_owned(),
            checkpoint: self.location(),
        })
    }
}

impl Source {
    fn location(&self) -> String {
        match self {
            Source::Folder(folder) => folder.display().to_string(),
            Source::Embedded(_) => "the built-in model".to_owned(),
        }
    }

    fn display(&self, file: &str) -> String {
        match self {
            Source::Folder(folder) => folder.join(file).display().to_string(),
            Source::Embedded(_) => format!("{file} of the built-in model"),
        }
    }

    fn not_a_model(&self, missing: impl Into<String>) -> ModelError {
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

    fn read(&self, file: &str) -> Result<Option<Cow<'_, [u8]>>> {
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

    fn storage(&self, file: &str) -> Result<Option<Storage>> {
        match self {
            Source::Embedded(files) => {
                Ok(files.iter().find(|(name, _)| *name == file).map(|(_, bytes)| Storage::Static(bytes)))
            }
            Source::Folder(_) => {
                let Some(opened) = self.open(file)? else { return Ok(None) };
                Ok(Some(Storage::map(&opened).map_err(self.io(file))?))
            }
        }
    }

    /// Says why there are no weights.
    fn no_weights(&self) -> ModelError {
        let pickled = ["pytorch_model.bin", "pytorch_model.bin.index.json", "consolidated.00.pth"];
        let has = |file: &str| matches!(self.open(file), Ok(Some(_)));
        match pickled.iter().find(|file| has(file)) {
            Some(file) => self.not_a_model(format!("its weights are in {file}; only safetensors are read")),
            None => self.not_a_model(format!("it has neither {SINGLE} nor {INDEX}")),
        }
    }
}

type Shards = (Vec<Shard>, BTreeMap<String, usize>);

fn open_shards(source: &Source) -> Result<Shards> {
    if let Some(storage) = source.storage(SINGLE)? {
        let shard = open_shard(source, SINGLE, storage)?;
        let tensors = shard.entries.keys().map(|name| (name.clone(), 0)).collect();
        return Ok((vec![shard], tensors));
    }
    let Some(index) = source.read(INDEX)? else { return Err(source.no_weights()) };
    let weight_map = parse_index(&source.display(INDEX), &index)?;
    let files: BTreeSet<&String> = weight_map.values().collect();
    let mut shards = Vec::with_capacity(files.len());
    for file in &files {
        let Some(storage) = source.storage(file)? else {
            return Err(source.not_a_model(format!("{INDEX} names {file}, which is not there")));
        };
        shards.push(open_shard(source, file, storage)?);
    }
    let numbers: BTreeMap<&String, usize> =
        files.iter().enumerate().map(|(number, file)| (*file, number)).collect();
    let mut tensors = BTreeMap::new();
    for (tensor, file) in &weight_map {
        let number = numbers[file];
        if !shards[number].entries.contains_key(tensor) {
            return Err(ModelError::Damaged {
                file: source.display(file),
                problem: format!("{INDEX} says that it holds tensor `{tensor}`, but it does not"),
            });
        }
        tensors.insert(tensor.clone(), number);
    }
    Ok((shards, tensors))
}

fn open_shard(source: &Source, file: &str, storage: Storage) -> Result<Shard> {
    let entries = read_header(storage.bytes())
        .map_err(|problem| ModelError::Damaged { file: source.display(file), problem })?;
    Ok(Shard { file: source.display(file), storage, entries })
}

/// `weight_map` of a sharded checkpoint: tensor name to file name in the same folder.
pub fn parse_index(file: &str, bytes: &[u8]) -> Result<BTreeMap<String, String>> {
    let map = json::parse_object(file, bytes)?;
    let fields = json::Fields::new(file, &map);
    let Some(weight_map) = fields.value("weight_map").and_then(serde_json::Value::as_object) else {
        return Err(fields.problem("weight_map", "is missing or not an object"));
    };
    let mut parsed = BTreeMap::new();
    for (tensor, shard) in weight_map {
        // A plain name: an index must not reach out of its folder.
        let plain = |name: &&str| {
            name.ends_with(".safetensors") && !name.contains(['/', '\\', '\0']) && !name.starts_with('.')
        };
        let Some(shard) = shard.as_str().filter(plain) else {
            return Err(fields
                .problem("weight_map", format!("gives tensor `{tensor}` no plain .safetensors file name")));
        };
        parsed.insert(tensor.clone(), shard.to_owned());
    }
    Ok(parsed)
}
