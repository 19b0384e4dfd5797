//! A model as it lies on disk (or inside the program): configuration, weights, side files.
//!
//! Owns: finding and opening files, checking their headers, handing out tensors by name. Must never: know a family, or
//! convert a weight. Invariant: a [`Tensor`] handed out has exactly the bytes its shape says. Opening maps files and reads
//! headers only; weights are read when touched. Two formats: a Hugging Face folder (config.json, safetensors) and GGUF. What
//! differs between them, and what is made of several stored tensors ([`quantized`]), is behind [`Entry`] and [`Form`].

mod digest;
mod experts;
mod generation;
pub mod gguf;
pub mod json;
mod pooling;
pub mod quantized;
pub mod safetensors;
mod shards;
mod source;
mod storage;
mod towers;

use std::borrow::Cow;
use std::path::{Path, PathBuf};

pub use digest::Digest;
pub use generation::GenerationConfig;
use gguf::{Metadata, RowOrder, Scaled, open};
pub use pooling::{POOLING_FILES, Pooling};
use sha2::{Digest as _, Sha256};
pub use shards::parse_index;
use shards::{Entry, Form, Holds, Index, Shard, open_shards};
pub(crate) use source::Source;
use storage::Stamp;
pub use towers::Tower;

use crate::backend::{DType, TensorView};
use crate::config::Config;
use crate::error::{ModelError, Result};
use crate::quant::Encoding;
use crate::weights::{Pick, TensorSpec, weight_specs};

pub(crate) const CONFIG: &str = "config.json";
const GENERATION: &str = "generation_config.json";
/// What ModelOpt wrote beside a config.json that says nothing of quantization.
const HF_QUANT_CONFIG: &str = "hf_quant_config.json";
const HEAD: &str = "lm_head.weight";
const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";
/// Weights that a backend packed: what `folio quantize` writes.
pub const PACKED: &str = "model.folio";

/// An opened checkpoint.
pub struct Checkpoint {
    source: Source,
    config_text: Vec<u8>,
    config: Config,
    generation: GenerationConfig,
    shards: Vec<Shard>,
    tensors: Index,
    /// See [`Checkpoint::only_embeds`].
    only_embeds: bool,
    /// Of the first shard, in a GGUF model.
    header: Option<gguf::Header>,
    /// See [`Checkpoint::packed`].
    packed: Option<PathBuf>,
}

/// Where the weights of a folder are.
enum Weights {
    Tensors,
    Packed(PathBuf),
    /// Nowhere: they are made up.
    Dummy,
}

/// A tensor that has the shape that was asked for; its values are not read yet.
#[derive(Clone, Copy)]
pub struct Tensor<'a> {
    pub encoding: Encoding,
    /// `[rows]` or `[rows, cols]`.
    pub shape: &'a [usize],
    stored: &'a [u8],
    /// What is wanted of it.
    rows: Pick,
    form: &'a Form,
    shards: &'a [Shard],
}

/// A tensor as it is stored.
pub(crate) struct StoredValues<'a> {
    pub file: &'a str,
    /// As the file calls it: "I64", "BOOL".
    pub dtype: String,
    pub shape: &'a [usize],
    pub bytes: &'a [u8],
}

/// The values of a [`Tensor`], rows in the decoder's order.
pub struct Values<'a> {
    pub bytes: Cow<'a, [u8]>,
    /// As in [`TensorView::order`].
    pub order: Option<Vec<u32>>,
}

impl<'a> Tensor<'a> {
    /// Bytes of the wanted rows' codes in the file.
    pub fn size_bytes(&self) -> u64 {
        self.rows.of(self.stored.len()) as u64
    }

    /// The values of all rows: the file's own bytes, a copy with the rows rearranged, or what several stored tensors make up. Only the
    /// last can fail, by what the values are.
    pub fn read(&self) -> Result<Values<'a>> {
        match self.form {
            Form::Rows(order) => Ok(Values {
                bytes: order.arranged(self.stored, self.shape.first().copied().unwrap_or(1)),
                order: None,
            }),
            Form::Experts(stacked) => {
                let size = self.encoding.plain().map_or(4, DType::size);
                let bytes = stacked.read(self.stored, self.shape, size);
                Ok(Values { bytes: Cow::Owned(bytes), order: None })
            }
            Form::Quantized(matrix, order) => {
                let made = matrix.make(self.shards)?;
                let bytes = arranged(*order, made.bytes, matrix.shape[0]);
                Ok(Values { bytes: Cow::Owned(bytes), order: made.order })
            }
            Form::Scaled(scaled) => {
                let rows = self.shape[0];
                let bytes = arranged(scaled.order, scaled.blocks(self.stored, rows), rows);
                Ok(Values { bytes: Cow::Owned(bytes), order: None })
            }
        }
    }

    /// What a backend takes; `values` are [`Tensor::read`].
    pub fn view<'b>(&'b self, values: &'b Values<'_>) -> TensorView<'b> {
        TensorView {
            encoding: self.encoding,
            shape: self.shape,
            bytes: &values.bytes,
            order: values.order.as_deref(),
        }
    }
}

/// Rows that were made in the order in which they are stored, as the decoder expects them.
fn arranged(order: RowOrder, made: Vec<u8>, rows: usize) -> Vec<u8> {
    match order {
        RowOrder::AsStored => made,
        order => order.arranged(&made, rows).into_owned(),
    }
}

impl Checkpoint {
    /// Opens a Hugging Face folder, a GGUF file, or a folder that holds packed weights or exactly one GGUF model and no
    /// safetensors.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        if open::is_gguf(path) && !path.is_dir() {
            return Self::open_gguf(path);
        }
        let has = |file: &str| path.join(file).is_file();
        let own = Source::Folder(path.to_owned());
        if has(SINGLE) || has(INDEX) {
            return Self::from_source(own, Weights::Tensors);
        }
        if has(PACKED) {
            return Self::from_source(own, Weights::Packed(path.join(PACKED)));
        }
        match open::find_in(path)? {
            Some(file) => Self::open_gguf(&file),
            None => Self::from_source(own, Weights::Tensors),
        }
    }

    fn open_gguf(path: &Path) -> Result<Self> {
        let opened = open::open(path)?;
        Ok(Self {
            source: Source::File(path.to_owned()),
            config_text: opened.described.text,
            config: opened.described.config,
            generation: opened.described.generation,
            shards: opened.shards,
            tensors: opened.tensors,
            only_embeds: false,
            header: Some(opened.header),
            packed: None,
        })
    }

    /// Opens a checkpoint whose files are part of the program: the same names as in a folder.
    pub fn from_bytes(files: &'static [(&'static str, &'static [u8])]) -> Result<Self> {
        Self::from_source(Source::Embedded(files), Weights::Tensors)
    }

    /// Opens a folder of which only the configuration is read, for [`crate::Model::load_dummy`]. It has no tensors.
    pub fn open_without_weights(path: impl AsRef<Path>) -> Result<Self> {
        Self::from_source(Source::Folder(path.as_ref().to_owned()), Weights::Dummy)
    }

    fn from_source(source: Source, weights: Weights) -> Result<Self> {
        let Some(config_text) = source.read(CONFIG)?.map(Cow::into_owned) else {
            return Err(source.not_a_model("it has no config.json"));
        };
        let config_name = source.display(CONFIG);
        let mut config = Config::parse(&config_name, &config_text)?;
        if config.quantization.is_none()
            && let Some(text) = source.read(HF_QUANT_CONFIG)?
        {
            config.quantization = quantized::parse_hf_quant_config(&source.display(HF_QUANT_CONFIG), &text)?;
        }
        let map = json::parse_object(&config_name, &config_text)?;
        let own = source.read(GENERATION)?;
        let own_name = source.display(GENERATION);
        let own = own.as_deref().map(|bytes| (own_name.as_str(), bytes));
        let generation = GenerationConfig::parse(own, json::Fields::new(&config_name, &map))?;
        let stored = matches!(weights, Weights::Tensors);
        let (mut shards, mut tensors) = match stored {
            true if config.family.nested.is_some() => open_shards(&source, Holds::Parts)?,
            true => open_shards(&source, Holds::Decoder)?,
            false => Default::default(),
        };
        let only_embeds = !config.tied && stored && shards::is_bare(&shards, HEAD);
        // Nothing reads logits, so any matrix of that shape does.
        config.tied |= only_embeds;
        if stored {
            shards::apply_names(&config, &mut shards, &mut tensors);
            experts::find_apart(&mut config, &tensors);
            experts::apply(&config, &source.location(), &mut shards, &mut tensors)?;
            quantized::apply(&config, &source.location(), &mut shards, &mut tensors)?;
        }
        Ok(Self {
            source,
            config_text,
            config,
            generation,
            shards,
            tensors,
            only_embeds,
            header: None,
            packed: if let Weights::Packed(path) = weights { Some(path) } else { None },
        })
    }

    /// Opens the safetensors files where there is no decoder, which this configuration describes all the same. Tensors are called what they
    /// are stored as.
    pub(crate) fn of_no_decoder(source: Source, config_text: Vec<u8>, config: Config) -> Result<Self> {
        let (shards, tensors) = open_shards(&source, Holds::Else)?;
        Ok(Self {
            source,
            config_text,
            config,
            generation: GenerationConfig::default(),
            shards,
            tensors,
            only_embeds: false,
            header: None,
            packed: None,
        })
    }

    /// A tensor that is no weight, with the name of its type: numbers, say. `None`: there is none.
    pub(crate) fn values(&self, tensor: &str) -> Option<StoredValues<'_>> {
        let (shard, entry) = self.find(tensor).ok()?;
        let dtype = match &entry.encoding {
            Ok(encoding) => encoding.to_string(),
            Err(name) => name.clone(),
        };
        let bytes = shard.storage.bytes().get(entry.range.clone())?;
        Some(StoredValues { file: &shard.file, dtype, shape: &entry.shape, bytes })
    }

    /// It was published for embeddings and has no output matrix: what it would generate means nothing.
    pub fn only_embeds(&self) -> bool {
        self.only_embeds
    }

    /// The file that holds the weights, where they are packed already. Such a checkpoint has no tensors: its weights are for
    /// the backend that packed them, and [`crate::Model::load_packed`].
    pub fn packed(&self) -> Option<&Path> {
        self.packed.as_deref()
    }

    /// Identity of the files, without reading a weight: for what is kept of the work done with them. `None` for a checkpoint
    /// that is no files, or whose files are no longer those that were opened.
    pub fn files_digest(&self) -> Option<[u8; 32]> {
        let mut hash = Sha256::new();
        hash.update((self.config_text.len() as u64).to_le_bytes());
        hash.update(&self.config_text);
        for shard in &self.shards {
            let stamp = shard.storage.stamp()?;
            let now = std::fs::metadata(&shard.file).ok()?;
            if stamp != Stamp::of(&now) {
                return None;
            }
            stamp.0.iter().for_each(|number| hash.update(number.to_le_bytes()));
        }
        Some(hash.finalize().into())
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
            Source::File(_) | Source::Embedded(_) => None,
        }
    }

    /// The metadata, where the checkpoint is a GGUF file: tokenizer and chat template are in it.
    pub fn gguf(&self) -> Option<Metadata<'_>> {
        self.header.as_ref().map(|header| open::metadata(&self.shards, header))
    }

    /// What the configuration was read from, for messages.
    pub fn settings(&self) -> &'static str {
        if self.header.is_some() { "its metadata" } else { CONFIG }
    }

    /// The folder's or file's path, or "the built-in model".
    pub fn location(&self) -> String {
        self.source.location()
    }

    /// A side file (tokenizer.json, chat_template.jinja, ...), if there is one.
    pub fn read(&self, file: &str) -> Result<Option<Cow<'_, [u8]>>> {
        self.source.read(file)
    }

    /// Names of all tensors, sorted, whether or not the decoder uses them. Those that make up a quantized matrix are one.
    pub fn tensor_names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    /// Total bytes of the weight files.
    pub fn weight_file_bytes(&self) -> u64 {
        self.shards.iter().map(|shard| shard.storage.bytes().len() as u64).sum()
    }

    /// The tensor, after checking that it has the shape the configuration asks for and an encoding that is served.
    pub fn tensor(&self, spec: &TensorSpec) -> Result<Tensor<'_>> {
        let (shard, entry) = self.find(&spec.name)?;
        if entry.shape != spec.shape {
            return Err(ModelError::Shape {
                file: shard.file.clone(),
                tensor: entry.stored_name.clone(),
                found: entry.shape.clone(),
                expected: spec.shape.clone(),
                settings: self.settings(),
            });
        }
        let encoding = entry.encoding.clone().map_err(|found| ModelError::DType {
            file: shard.file.clone(),
            tensor: entry.stored_name.clone(),
            found,
        })?;
        let stored = shard.storage.bytes().get(entry.range.clone()).ok_or_else(|| ModelError::Damaged {
            file: shard.file.clone(),
            problem: format!("tensor `{}` lies outside of it", entry.stored_name),
        })?;
        // A matrix's or vector's first size is its rows; what the configuration asks for has at least one. A number is one.
        let whole = |rows: &usize| match &entry.form {
            Form::Rows(order) | Form::Quantized(_, order) | Form::Scaled(Scaled { order, .. }) => {
                order.fits(*rows)
            }
            Form::Experts(_) => true,
        };
        if !whole(entry.shape.first().unwrap_or(&1)) {
            return Err(ModelError::Damaged {
                file: shard.file.clone(),
                problem: format!(
                    "tensor `{}` of shape {:?} is not whole heads",
                    entry.stored_name, entry.shape
                ),
            });
        }
        let (shape, rows, form) = (&entry.shape[..], spec.rows, &entry.form);
        Ok(Tensor { encoding, shape, stored, rows, form, shards: &self.shards })
    }

    /// The file that holds a tensor and what it calls it, for errors.
    pub fn stored_as(&self, tensor: &str) -> Result<(&str, &str)> {
        let (shard, entry) = self.find(tensor)?;
        Ok((&shard.file, &entry.stored_name))
    }

    /// Lets the operating system take back the pages of a tensor that will not be read again.
    pub fn release(&self, tensor: &str) {
        let Ok((shard, entry)) = self.find(tensor) else { return };
        match &entry.form {
            Form::Rows(_) | Form::Experts(_) | Form::Scaled(_) => shard.storage.release(entry.range.clone()),
            Form::Quantized(matrix, _) => {
                for piece in matrix.pieces() {
                    self.shards[piece.shard].storage.release(piece.range.clone());
                }
            }
        }
    }

    /// Identity of the model for the KV cache of a server of `max_model_len`; see [`Digest`]. Touches every page of the
    /// weights: prefer [`crate::LoadedModel::digest`], which comes with loading.
    pub fn digest(&self, max_model_len: usize) -> Result<[u8; 32]> {
        let mut digest = self.start_digest(max_model_len);
        for part in weight_specs(&self.config).iter().flat_map(|weight| &weight.parts) {
            let tensor = self.tensor(part)?;
            digest.tensor(&part.name, &tensor.view(&tensor.read()?));
        }
        Ok(digest.finish())
    }

    /// A digest that has seen the configuration and no tensor yet.
    pub fn start_digest(&self, max_model_len: usize) -> Digest {
        // The rotation of layers with a window never depends on the length, so the text says all of it.
        Digest::new(&self.config_text, &self.config.rope.table(max_model_len))
    }

    fn find(&self, tensor: &str) -> Result<(&Shard, &Entry)> {
        let shard = self.tensors.get(tensor).and_then(|index| self.shards.get(*index));
        let found = shard.and_then(|shard| Some((shard, shard.entries.get(tensor)?)));
        found.ok_or_else(|| ModelError::MissingTensor {
            tensor: tensor.to_owned(),
            checkpoint: self.location(),
        })
    }
}
