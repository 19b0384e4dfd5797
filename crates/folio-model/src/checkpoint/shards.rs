//! The weight files of a checkpoint, whatever their format: tensors by the decoder's names.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use super::experts::Stacked;
use super::gguf::{RowOrder, Scaled};
use super::quantized::Matrix;
use super::safetensors::{TensorEntry, read_header};
use super::source::Source;
use super::storage::Storage;
use super::{INDEX, SINGLE, json};
use crate::config::Config;
use crate::error::{ModelError, Result};
use crate::family::Pairs;
use crate::quant::Encoding;

/// One open file.
pub struct Shard {
    /// For messages.
    pub file: String,
    pub storage: Storage,
    /// By the decoder's name.
    pub entries: BTreeMap<String, Entry>,
}

/// One tensor of a file. Invariant: `range` lies inside the file and, if the form is rows, has the bytes of `shape` in `encoding`.
#[derive(Clone, Debug)]
pub struct Entry {
    /// What the file calls it.
    pub stored_name: String,
    /// `Err` holds the name of an encoding that cannot be served; it is an error only for a tensor that is used.
    pub encoding: std::result::Result<Encoding, String>,
    pub shape: Vec<usize>,
    pub range: Range<usize>,
    pub form: Form,
}

/// How a tensor is read.
#[derive(Clone, Debug)]
pub enum Form {
    /// From its own bytes.
    Rows(RowOrder),
    /// From its own bytes, as one of the tensors that are stored together.
    Experts(Stacked),
    /// Made of several tensors, its rows then in this order; `encoding` and `shape` are those of the whole, `range` is that of
    /// the codes.
    Quantized(Box<Matrix>, RowOrder),
    /// From its own bytes, with numbers that were tensors beside it.
    Scaled(Scaled),
}

/// Tensor name to index of its shard.
pub type Index = BTreeMap<String, usize>;

/// The decoder's name of a tensor of a checkpoint that has other parts too: today's style and that of transformers 4.
fn inner_name(stored: &str) -> String {
    let inner = stored.strip_prefix("model.language_model.").map(|rest| format!("model.{rest}"));
    inner.unwrap_or_else(|| stored.strip_prefix("language_model.").unwrap_or(stored).to_owned())
}

/// A checkpoint published for embeddings is the decoder without its output matrix, and without a name for the rest.
const BARE_EMBEDDING: &str = "embed_tokens.weight";

/// Whether the names of these shards are such a decoder's, and tensor `head` is in none.
pub fn is_bare(shards: &[Shard], head: &str) -> bool {
    let stored = |name: &str| {
        shards.iter().flat_map(|shard| shard.entries.values()).any(|entry| entry.stored_name == name)
    };
    stored(BARE_EMBEDDING) && !stored(head)
}

/// How stored names become the decoder's.
#[derive(Clone, Copy, PartialEq)]
enum Naming {
    Same,
    /// The decoder is one of several parts.
    Nested,
    /// The decoder is all there is, and its names say so.
    Bare,
}

impl Naming {
    fn of<'a>(holds: Holds, mut names: impl Iterator<Item = &'a String>) -> Self {
        match holds {
            Holds::Parts => Self::Nested,
            Holds::Decoder if names.any(|name| name == BARE_EMBEDDING) => Self::Bare,
            Holds::Decoder | Holds::Else => Self::Same,
        }
    }

    fn name(self, stored: &str) -> String {
        match self {
            Self::Same => stored.to_owned(),
            Self::Nested => inner_name(stored),
            Self::Bare if stored == super::HEAD => stored.to_owned(),
            Self::Bare => format!("model.{stored}"),
        }
    }
}

/// What the tensors of a folder are.
#[derive(Clone, Copy, PartialEq)]
pub enum Holds {
    Decoder,
    /// A decoder, and other parts.
    Parts,
    /// No decoder: they are called what they are stored as.
    Else,
}

/// Opens the safetensors files of a folder.
pub fn open_shards(source: &Source, holds: Holds) -> Result<(Vec<Shard>, Index)> {
    if let Some(storage) = source.storage(SINGLE)? {
        let shard = open_shard(source, SINGLE, storage, |names| Naming::of(holds, names))?;
        let tensors = shard.entries.keys().map(|name| (name.clone(), 0)).collect();
        return Ok((vec![shard], tensors));
    }
    let Some(index) = source.read(INDEX)? else { return Err(source.no_weights()) };
    let weight_map = parse_index(&source.display(INDEX), &index)?;
    let naming = Naming::of(holds, weight_map.keys());
    let files: BTreeSet<&String> = weight_map.values().collect();
    let mut shards = Vec::with_capacity(files.len());
    for file in &files {
        let Some(storage) = source.storage(file)? else {
            return Err(source.not_a_model(format!("{INDEX} names {file}, which is not there")));
        };
        shards.push(open_shard(source, file, storage, |_| naming)?);
    }
    let numbers: BTreeMap<&String, usize> =
        files.iter().enumerate().map(|(number, file)| (*file, number)).collect();
    let mut tensors = BTreeMap::new();
    for (tensor, file) in &weight_map {
        let number = numbers[file];
        let name = naming.name(tensor);
        if !shards[number].entries.contains_key(&name) {
            return Err(ModelError::Damaged {
                file: source.display(file),
                problem: format!("{INDEX} says that it holds tensor `{tensor}`, but it does not"),
            });
        }
        tensors.insert(name, number);
    }
    Ok((shards, tensors))
}

fn open_shard(
    source: &Source,
    file: &str,
    storage: Storage,
    naming: impl Fn(std::collections::btree_map::Keys<'_, String, TensorEntry>) -> Naming,
) -> Result<Shard> {
    let header = read_header(storage.bytes())
        .map_err(|problem| ModelError::Damaged { file: source.display(file), problem })?;
    let naming = naming(header.keys());
    let entries = header
        .into_iter()
        .map(|(name, entry)| {
            let entry = Entry {
                stored_name: name.clone(),
                encoding: entry.dtype.map(Encoding::Plain),
                shape: entry.shape,
                range: entry.range,
                form: Form::Rows(RowOrder::AsStored),
            };
            (naming.name(&name), entry)
        })
        .collect();
    Ok(Shard { file: source.display(file), storage, entries })
}

/// Calls tensors what the decoder calls them, and sees to it that rows of q and k are read in its order, as the family's row says.
pub fn apply_names(config: &Config, shards: &mut [Shard], index: &mut Index) {
    let family = &config.family;
    let decoder_name = |stored: &String| {
        let renamed = |name: String, (stored, ours): &(&str, &str)| name.replace(stored, ours);
        family.renamed.iter().fold(stored.clone(), renamed)
    };
    if !family.renamed.is_empty() {
        *index =
            std::mem::take(index).into_iter().map(|(name, shard)| (decoder_name(&name), shard)).collect();
        for shard in &mut *shards {
            let entries = std::mem::take(&mut shard.entries);
            shard.entries = entries.into_iter().map(|(name, entry)| (decoder_name(&name), entry)).collect();
        }
    }
    if family.pairs == Pairs::Halves {
        return;
    }
    for (name, entry) in shards.iter_mut().flat_map(|shard| &mut shard.entries) {
        let heads = match name {
            name if name.contains(".self_attn.q_proj.") => config.heads,
            name if name.contains(".self_attn.k_proj.") => config.kv_heads,
            _ => continue,
        };
        entry.form = Form::Rows(RowOrder::Interleaved { heads });
    }
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
