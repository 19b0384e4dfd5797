//! From a checkpoint to a backend that is ready to run.
//!
//! Owns: the order of loading (check everything, then pack everything) and the facts about the model that others need.
//! Must never: know a family, or keep a weight. Cost: one pass over the weights; resident memory is the packed weights
//! plus the tensor being packed.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};

use crate::adapter::AdapterTargets;
use crate::backend::{Backend, DType, KvLayout, TensorView};
use crate::checkpoint::quantized::scales_kv_cache;
use crate::checkpoint::{Checkpoint, Digest, GenerationConfig, Pooling, Values};
use crate::config::Config;
use crate::decoder::{CacheUse, kv_layout, program};
use crate::draft_head::DraftHead;
use crate::dummy::Dummy;
use crate::error::{ModelError, Result};
use crate::kv_format::KvFormats;
use crate::packed::Ids;
pub use crate::packed::PackedAbout;
use crate::program::{MatrixId, VectorId};
use crate::quant::Encoding;
use crate::weights::{Load, Made, Pick, WeightSpec, Weights, weight_specs};

/// What to prepare the backend for.
pub struct LoadOptions<'a> {
    /// Most rows (tokens) of a step.
    pub max_rows: usize,
    /// Most rows of a step whose logits are wanted.
    pub max_logit_rows: usize,
    /// Most tokens of a sequence, prompt and output together. `None`: as many as the model allows.
    pub max_model_len: Option<usize>,
    /// [`CacheUse::keeps_all`], for a drafter.
    pub keeps_all: bool,
    pub kv_formats: KvFormats,
    pub block_tokens: usize,
    /// A drafter for which the model is to give features of its rows ([`Backend::features`]).
    pub taps: Option<&'a dyn DraftHead>,
    /// Called before the first weight and after each.
    pub progress: Option<&'a mut dyn FnMut(Progress<'_>)>,
}

impl LoadOptions<'_> {
    fn cache_use(&self, max_model_len: usize) -> CacheUse {
        CacheUse { max_model_len, keeps_all: self.keeps_all }
    }

    /// The cache of a decoder that lies in `checkpoint`, for sequences of `positions` tokens.
    pub(crate) fn kv_layout(
        &self,
        config: &Config,
        checkpoint: &Checkpoint,
        positions: usize,
    ) -> Result<KvLayout> {
        kv_layout(config, &self.kv_formats, self.block_tokens, self.cache_use(positions))
            .map_err(|problem| ModelError::KvLayout { place: checkpoint.location(), problem })
    }

    /// Gives a backend that has the weights its program, and before that what is tapped.
    fn finish(
        &self,
        config: &Config,
        backend: &mut dyn Backend,
        weights: &Weights<MatrixId, VectorId>,
        encoding: Encoding,
        max_model_len: usize,
    ) -> Result<AdapterTargets> {
        let taps = self.taps.map(|head| head.load_taps(backend)).transpose()?;
        let program = program(config, weights, self.cache_use(max_model_len), encoding, taps.as_ref());
        let targets = AdapterTargets::of(config, &program)?;
        backend.load_program(program, self.max_rows, self.max_logit_rows, max_model_len)?;
        Ok(targets)
    }
}

/// How far loading has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress<'a> {
    /// "layers.3.qkv"
    pub weight: &'a str,
    /// Checkpoint bytes packed so far, and in all.
    pub done_bytes: u64,
    pub total_bytes: u64,
}

/// Facts about a model whose weights are in a backend.
#[derive(Clone, Debug, PartialEq)]
pub struct LoadedModel {
    pub vocab: usize,
    /// Most tokens of a sequence.
    pub max_model_len: usize,
    /// Tokens that end a generation. Sorted.
    pub eos_token_ids: Vec<u32>,
    /// Sampling defaults of the model's authors.
    pub generation: GenerationConfig,
    pub kv_layout: KvLayout,
    /// What adapters may add to.
    pub targets: AdapterTargets,
    /// Identity of the weights and configuration; part of every KV block's identity.
    pub digest: [u8; 32],
    pub config: Config,
    /// Number of weights, embedding included; a tied table counts once.
    pub parameters: u64,
    /// Encoding of most of the weights, as stored.
    pub weight_encoding: Encoding,
    /// There is no output matrix: it makes vectors and no tokens.
    pub only_embeds: bool,
    /// How vectors are made of prompts; else why they cannot be.
    pub pooling: std::result::Result<Pooling, String>,
    /// Of each tensor, from which the digest was made.
    pub tensor_digests: BTreeMap<String, [u8; 32]>,
}

/// Loads checkpoints.
pub struct Model;

impl Model {
    /// Matrices and vectors that a model of this configuration is loaded as. They come first; what is tapped comes behind them.
    pub fn weights_of(config: &Config) -> (usize, usize) {
        let mut ids = Ids::default();
        let named = weight_specs(config).try_map(&mut ids);
        debug_assert!(named.is_ok(), "names cannot be missing");
        (ids.matrices as usize, ids.vectors as usize)
    }

    /// Checks every tensor, packs them into `backend` and gives it the program. The KV cache is left to the caller
    /// ([`Backend::allocate_cache`] with [`LoadedModel::kv_layout`]).
    pub fn load(
        checkpoint: &Checkpoint,
        backend: &mut dyn Backend,
        mut options: LoadOptions<'_>,
    ) -> Result<LoadedModel> {
        let config = checkpoint.config();
        let max_model_len = model_length(config, checkpoint.settings(), options.max_model_len)?;
        let layout = options.kv_layout(config, checkpoint, max_model_len)?;
        let specs = weight_specs(config);
        let census = check(checkpoint, specs.iter())?;
        refuse_unexpected(checkpoint, specs.iter())?;

        let mut ignore = |_: Progress<'_>| {};
        let progress = options.progress.take().unwrap_or(&mut ignore);
        let digest = checkpoint.start_digest(max_model_len);
        let mut loading = Loading::new(checkpoint, &mut *backend, digest, progress);
        loading.total_bytes = census.bytes;
        loading.report("");
        let weights = specs.try_map(&mut loading)?;
        let digest = loading.digest;
        let targets = options.finish(config, backend, &weights, census.encoding, max_model_len)?;
        let about = (census.parameters, census.encoding);
        Ok(LoadedModel::new(checkpoint, max_model_len, layout, targets, digest, about))
    }

    /// As [`Model::load`] with made-up weights ([`crate::dummy`]) of the shapes that a configuration asks for.
    pub fn load_dummy(
        checkpoint: &Checkpoint,
        backend: &mut dyn Backend,
        encoding: Encoding,
        options: LoadOptions<'_>,
    ) -> Result<LoadedModel> {
        let config = checkpoint.config();
        let max_model_len = model_length(config, checkpoint.settings(), options.max_model_len)?;
        let layout = options.kv_layout(config, checkpoint, max_model_len)?;
        let specs = weight_specs(config);
        let mut dummy = Dummy::new(&mut *backend, encoding);
        let weights = specs.try_map(&mut dummy)?;
        let parameters = dummy.parameters;
        let mut digest = checkpoint.start_digest(max_model_len);
        digest.known(&BTreeMap::from([(format!("made up in {encoding}"), [0; 32])]));
        let targets = options.finish(config, backend, &weights, encoding, max_model_len)?;
        Ok(LoadedModel::new(checkpoint, max_model_len, layout, targets, digest, (parameters, encoding)))
    }

    /// As [`Model::load`] for a backend that has the weights already, in the order in which `load` gives them: `counts`
    /// matrices and vectors, of which `about` says what they were made from. The digest is that of the original.
    pub fn load_packed(
        checkpoint: &Checkpoint,
        backend: &mut dyn Backend,
        about: &PackedAbout,
        counts: (usize, usize),
        options: LoadOptions<'_>,
    ) -> Result<LoadedModel> {
        let config = checkpoint.config();
        let max_model_len = model_length(config, checkpoint.settings(), options.max_model_len)?;
        let layout = options.kv_layout(config, checkpoint, max_model_len)?;
        let specs = weight_specs(config);
        let mut ids = Ids::default();
        let weights = specs.try_map(&mut ids)?;
        let names: BTreeSet<_> = specs.iter().flat_map(|spec| &spec.parts).map(|part| &part.name).collect();
        if (ids.matrices as usize, ids.vectors as usize) != counts
            || !names.into_iter().eq(about.tensors.keys())
        {
            return Err(ModelError::PackedOtherwise {
                settings: checkpoint.settings(),
                place: checkpoint.location(),
            });
        }
        let mut digest = checkpoint.start_digest(max_model_len);
        digest.known(&about.tensors);
        let targets = options.finish(config, backend, &weights, about.weight_encoding, max_model_len)?;
        let about = (about.parameters, about.weight_encoding);
        Ok(LoadedModel::new(checkpoint, max_model_len, layout, targets, digest, about))
    }
}

impl LoadedModel {
    fn new(
        checkpoint: &Checkpoint,
        max_model_len: usize,
        kv_layout: KvLayout,
        targets: AdapterTargets,
        digest: Digest,
        (parameters, weight_encoding): (u64, Encoding),
    ) -> Self {
        let config = checkpoint.config();
        Self {
            vocab: config.vocab,
            max_model_len,
            eos_token_ids: checkpoint.generation().eos_token_ids.clone(),
            generation: checkpoint.generation().clone(),
            kv_layout,
            targets,
            only_embeds: checkpoint.only_embeds(),
            pooling: checkpoint.pooling(),
            tensor_digests: digest.tensors().clone(),
            digest: digest.finish(),
            config: config.clone(),
            parameters,
            weight_encoding,
        }
    }
}

/// The longest sequence served.
fn model_length(config: &Config, settings: &str, asked: Option<usize>) -> Result<usize> {
    let limit = config.max_position;
    match asked {
        Some(asked) if asked > limit => {
            let reason = format!("max_position_embeddings = {limit} in {settings}");
            Err(ModelError::ModelLength { asked, limit, reason })
        }
        Some(0) => Err(ModelError::NoModelLength),
        asked => Ok(asked.unwrap_or(limit)),
    }
}

pub(crate) struct Census {
    bytes: u64,
    parameters: u64,
    /// Of most of the weights.
    pub encoding: Encoding,
}

/// Looks at every tensor's header before a byte is packed, so that a wrong checkpoint is refused at once.
pub(crate) fn check<'a>(
    checkpoint: &Checkpoint,
    specs: impl Iterator<Item = &'a WeightSpec>,
) -> Result<Census> {
    let mut bytes_of: Vec<(Encoding, u64)> = Vec::new();
    let mut parameters = 0;
    for spec in specs {
        let values = spec.distinct().map(|part| part.picked_shape().iter().product::<usize>() as u64);
        parameters += values.sum::<u64>();
        let mut first: Option<(&str, Encoding)> = None;
        for part in &spec.parts {
            let view = checkpoint.tensor(part)?;
            match first {
                // Vectors are converted to f32, so they may differ.
                Some((other, other_encoding))
                    if part.shape.len() > 1 && !stackable(view.encoding, other_encoding) =>
                {
                    let (file, tensor) = checkpoint.stored_as(&part.name)?;
                    return Err(ModelError::MixedEncodings {
                        file: file.to_owned(),
                        tensor: tensor.to_owned(),
                        found: view.encoding,
                        other: checkpoint.stored_as(other)?.1.to_owned(),
                        other_encoding,
                    });
                }
                _ => first = Some((&part.name, view.encoding)),
            }
            match bytes_of.iter_mut().find(|(encoding, _)| *encoding == view.encoding) {
                Some((_, bytes)) => *bytes += view.size_bytes(),
                None => bytes_of.push((view.encoding, view.size_bytes())),
            }
        }
    }
    let bytes = bytes_of.iter().map(|(_, bytes)| bytes).sum();
    let most = bytes_of.iter().max_by_key(|(_, bytes)| *bytes);
    let encoding = most.map_or(Encoding::Plain(DType::F32), |(encoding, _)| *encoding);
    Ok(Census { bytes, parameters, encoding })
}

/// Whether matrices stored so may be stacked into one.
fn stackable(a: Encoding, b: Encoding) -> bool {
    a == b || (a.plain().is_none() && b.plain().is_none())
}

/// A tensor inside a layer that the decoder would ignore means that it would compute something else than the model
/// does: another architecture under a known name, or a wrong config.json. Layers past the last are draft heads, rotary
/// tables of old checkpoints are recomputed, and scales of a KV cache in FP8 are not for Folio's.
fn refuse_unexpected<'a>(checkpoint: &Checkpoint, specs: impl Iterator<Item = &'a WeightSpec>) -> Result<()> {
    let used: BTreeSet<&str> = specs.flat_map(|spec| &spec.parts).map(|part| part.name.as_str()).collect();
    let (config, layers) = (checkpoint.config(), checkpoint.config().layers);
    // Layers that read the K and V of others were trained with projections that nothing reads.
    let idle = |name: &str, layer: usize| {
        let parts = [".self_attn.k_proj.", ".self_attn.v_proj.", ".self_attn.k_norm.", ".self_attn.v_norm."];
        config.kv_source(layer) != layer && parts.iter().any(|part| name.contains(part))
    };
    for name in checkpoint.tensor_names() {
        let layer =
            name.strip_prefix("model.layers.").and_then(|rest| rest.split_once('.')?.0.parse::<usize>().ok());
        // A GGUF file holds the decoder and nothing else, so nothing may be left over.
        let inside = layer.map_or(checkpoint.gguf().is_some(), |layer| layer < layers && !idle(name, layer));
        let of_no_effect = name.ends_with(".rotary_emb.inv_freq") || scales_kv_cache(name);
        if inside && !used.contains(name) && !of_no_effect {
            let (file, tensor) = checkpoint.stored_as(name)?;
            return Err(ModelError::UnexpectedTensor {
                file: file.to_owned(),
                tensor: tensor.to_owned(),
                settings: checkpoint.settings(),
                family: checkpoint.config().family.model_type,
            });
        }
    }
    Ok(())
}

/// Packs the weights of a checkpoint into a backend.
pub(crate) struct Loading<'a> {
    checkpoint: &'a Checkpoint,
    backend: &'a mut dyn Backend,
    digest: Digest,
    progress: &'a mut dyn FnMut(Progress<'_>),
    done_bytes: u64,
    total_bytes: u64,
}

impl<'a> Loading<'a> {
    pub(crate) fn new(
        checkpoint: &'a Checkpoint,
        backend: &'a mut dyn Backend,
        digest: Digest,
        progress: &'a mut dyn FnMut(Progress<'_>),
    ) -> Self {
        Self { checkpoint, backend, digest, progress, done_bytes: 0, total_bytes: 0 }
    }

    fn report(&mut self, weight: &str) {
        let progress = Progress { weight, done_bytes: self.done_bytes, total_bytes: self.total_bytes };
        (self.progress)(progress);
    }

    /// The parts of a weight, their rows in the decoder's order, and in the digest.
    fn parts(&mut self, spec: &WeightSpec) -> Result<Vec<Part<'a>>> {
        let mut parts = Vec::with_capacity(spec.parts.len());
        for part in &spec.parts {
            let tensor = self.checkpoint.tensor(part)?;
            let mut values = tensor.read()?;
            self.digest.tensor(&part.name, &tensor.view(&values));
            if part.rows != Pick::ALL {
                values.bytes = Cow::Owned(part.rows.picked(&values.bytes, part.stored_rows()));
            }
            let (encoding, shape, bytes) = (tensor.encoding, part.picked_shape(), tensor.size_bytes());
            parts.push(Part { encoding, shape, values, bytes });
        }
        self.same_order(spec, &parts)?;
        Ok(parts)
    }

    /// Parts are stacked, so the activations they are multiplied with come in one order.
    fn same_order(&self, spec: &WeightSpec, parts: &[Part<'_>]) -> Result<()> {
        let mut pairs = spec.parts.iter().zip(parts);
        let Some((first, expected)) = pairs.next() else { return Ok(()) };
        match pairs.find(|(_, part)| part.values.order != expected.values.order) {
            None => Ok(()),
            Some((other, _)) => {
                let (file, tensor) = self.checkpoint.stored_as(&other.name)?;
                Err(ModelError::MixedOrders {
                    file: file.to_owned(),
                    tensor: tensor.to_owned(),
                    other: self.checkpoint.stored_as(&first.name)?.1.to_owned(),
                })
            }
        }
    }

    fn packed(&mut self, spec: &WeightSpec, parts: &[Part<'_>]) {
        for part in &spec.parts {
            self.checkpoint.release(&part.name);
        }
        self.done_bytes += parts.iter().map(|part| part.bytes).sum::<u64>();
        self.report(&spec.label);
    }
}

/// What a weight takes of a tensor.
struct Part<'a> {
    encoding: Encoding,
    shape: Vec<usize>,
    values: Values<'a>,
    /// Of its codes in the file.
    bytes: u64,
}

fn views<'b>(parts: &'b [Part<'_>]) -> Vec<TensorView<'b>> {
    let view = |part: &'b Part<'_>| TensorView {
        encoding: part.encoding,
        shape: &part.shape,
        bytes: &part.values.bytes,
        order: part.values.order.as_deref(),
    };
    parts.iter().map(view).collect()
}

/// The values of plain vectors as f32, of each what `made` says.
fn values_of(parts: &[Part<'_>], made: Made) -> Vec<f32> {
    let mut all = match made {
        Made::Ones { count } => vec![1.0; count],
        _ => Vec::new(),
    };
    for Part { encoding, shape, values, .. } in parts {
        let stored = &values.bytes;
        let values: Vec<f32> = match encoding.plain() {
            Some(DType::F32) => stored.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect(),
            Some(DType::F16) => {
                stored.as_chunks().0.iter().map(|b| half::f16::from_le_bytes(*b).to_f32()).collect()
            }
            Some(DType::BF16) => {
                stored.as_chunks().0.iter().map(|b| half::bf16::from_le_bytes(*b).to_f32()).collect()
            }
            // Only matrices are stored in blocks; shapes were checked, so the backend refuses what is too short.
            None => Vec::new(),
        };
        match made {
            Made::Linear { plus, times } => all.extend(values.iter().map(|value| (value + plus) * times)),
            Made::MinusExp => all.extend(values.iter().map(|value| -f64::from(*value).exp() as f32)),
            Made::Taps => {
                let taps = shape.last().copied().unwrap_or(1).max(1);
                all.extend((0..taps).flat_map(|tap| values.iter().skip(tap).step_by(taps)));
            }
            Made::Transposed { .. } | Made::Ones { .. } => all.extend(values),
        }
    }
    all
}

/// Of every `rows` rows the transpose. Values of blocks are decoded and stay what they are then: in bf16 where that holds them all.
fn transposed(part: &Part<'_>, rows: usize) -> (Encoding, Vec<u8>) {
    let Part { encoding, shape, values, .. } = part;
    let (cols, order) = (shape.last().copied().unwrap_or(1), values.order.as_deref());
    match *encoding {
        Encoding::Plain(DType::F32) => {
            (*encoding, turned(values.bytes.as_chunks::<4>().0, rows, cols, order).into_flattened())
        }
        Encoding::Plain(_) => {
            (*encoding, turned(values.bytes.as_chunks::<2>().0, rows, cols, order).into_flattened())
        }
        Encoding::Block(format) => {
            let mut decoded = vec![0.0f32; shape.iter().product()];
            format.decode(&values.bytes, &mut decoded);
            let decoded = turned(&decoded, rows, cols, order);
            let holds = |x: &f32| half::bf16::from_f32(*x).to_f32().to_bits() == x.to_bits();
            match decoded.iter().all(holds) {
                true => {
                    let bytes = decoded.iter().flat_map(|x| half::bf16::from_f32(*x).to_le_bytes());
                    (Encoding::Plain(DType::BF16), bytes.collect())
                }
                false => {
                    (Encoding::Plain(DType::F32), decoded.iter().flat_map(|x| x.to_le_bytes()).collect())
                }
            }
        }
    }
}

/// `[rows, cols]` to `[cols, rows]`, again and again; stored column `j` is column `order[j]`.
fn turned<T: Copy + Default>(values: &[T], rows: usize, cols: usize, order: Option<&[u32]>) -> Vec<T> {
    let mut out = vec![T::default(); values.len()];
    for (to, from) in out.chunks_exact_mut(rows * cols).zip(values.chunks_exact(rows * cols)) {
        for (row, from) in from.chunks_exact(cols).enumerate() {
            for (at, value) in from.iter().enumerate() {
                let column = order.map_or(at, |order| order[at] as usize);
                to[column * rows + row] = *value;
            }
        }
    }
    out
}

impl Load<ModelError> for Loading<'_> {
    fn matrix(&mut self, spec: &WeightSpec) -> Result<MatrixId> {
        let parts = self.parts(spec)?;
        let id = match (spec.made, &parts[..]) {
            (Made::Transposed { rows }, [part]) => {
                let (encoding, bytes) = transposed(part, rows);
                let view = TensorView { encoding, shape: &spec.matrix_shape(), bytes: &bytes, order: None };
                self.backend.load_matrix(&spec.label, &[view])?
            }
            _ => self.backend.load_matrix(&spec.label, &views(&parts))?,
        };
        self.packed(spec, &parts);
        Ok(id)
    }

    fn vector(&mut self, spec: &WeightSpec) -> Result<VectorId> {
        let parts = self.parts(spec)?;
        let id = match spec.made {
            Made::AS_STORED if parts.iter().all(|part| part.shape.len() == 1) => {
                self.backend.load_vector(&spec.label, &views(&parts))?
            }
            made => {
                let values = values_of(&parts, made);
                let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
                let (encoding, shape) = (Encoding::Plain(DType::F32), &[values.len()]);
                let view = TensorView { encoding, shape, bytes: &bytes, order: None };
                self.backend.load_vector(&spec.label, &[view])?
            }
        };
        self.packed(spec, &parts);
        Ok(id)
    }
}
