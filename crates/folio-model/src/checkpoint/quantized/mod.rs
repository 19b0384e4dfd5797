//! Quantized safetensors checkpoints: AWQ, GPTQ, AutoRound, compressed-tensors, ModelOpt, FP8.
//!
//! Such a checkpoint stores a matrix as several tensors: packed codes under `X.qweight`, `X.weight_packed` or `X.weight`, and
//! their scales, zero points and group numbers beside them. This module owns what config.json says about them
//! ([`Quantization`]), which tensors are which matrix ([`apply`]), and the bytes of such a matrix in one of Folio's block
//! formats ([`Matrix::make`]). To everybody else `X.weight` is then a tensor like any other.
//!
//! Must never: quantize, or change a value. Every code, scale and zero point is carried over as it is; what no block format
//! can hold exactly is refused by name. Which modules are quantized is decided by the tensors: a module has either codes or a
//! plain `.weight`. The block format depends on the scheme, the size of a group and the number of columns, never on values.
//!
//! Not applied: quantization of activations. The scales of static schemes (`input_scale`) tell an engine how to round its
//! activations to 8 bits for a whole tensor; Folio's own are finer (8 bits per token and 32 values for integer weights, floats
//! for FP8), so they are read past. The same holds for scales of an FP8 KV cache.
//!
//! Cost: planning looks at headers; making a matrix is one pass over it, and its bytes are the only copy.

mod auto_round;
mod awq;
mod compressed;
mod fp8;
mod gptq;
mod matrix;
mod modelopt;
mod mxfp4;
mod nvfp4;
mod options;
mod piece;
mod rules;
pub mod unpack;

use std::collections::BTreeSet;

pub use compressed::Compressed;
pub use fp8::Fp8;
pub use gptq::Gptq;
pub use matrix::Matrix;
pub use modelopt::parse_hf_quant_config;
pub(super) use mxfp4::rows as mxfp4_rows;
pub(super) use piece::Pieces;

use super::gguf::RowOrder;
use super::json::Fields;
use super::shards::{Entry, Form, Index, Shard};
use crate::config::Config;
use crate::error::{ModelError, Result};
use crate::family::{ExpertTensors, Family};
use crate::mtp;
use crate::quant::{BlockFormat, Encoding};
use crate::weights::{TensorSpec, WeightSpec, weight_specs};
use options::Options;
use rules::Settings;

/// What is loaded, for the sentences that refuse the rest.
pub const SUPPORTED: &str = "supported: AWQ (4 bits, gemm), GPTQ (4 bits, symmetric 2, 3 and 8 bits, act-order), AutoRound (integers as \
    GPTQ or AWQ packs them), compressed-tensors \
    (pack-quantized, int-quantized, float-quantized, mxfp4-pack-quantized, nvfp4-pack-quantized), ModelOpt (NVFP4, FP8), FP8 (per tensor, per \
    row or in blocks), MXFP4 (experts of gpt-oss), GGUF files, and unquantized BF16, F16 and F32";

/// The table in Markdown, as it stands in the documentation.
pub const TABLE: &str = "\
| `quant_method` | loaded | notes |
|---|---|---|
| `awq` | 4 bits with zero points, version gemm | |
| `gptq` | 4 bits, with zero points or `sym`; 2, 3 and 8 bits with `sym`; 2 and 3 bits with zero points where `gptq_v2` stores them; `gptq` and `gptq_v2` | act-order (`desc_act`); groups must fill whole runs of 32 columns; modules may have settings of their own (`dynamic`); 2 and 3 bits take 4 in memory |
| `auto-round`, `intel/auto-round` | integers as in `gptq` (`auto_round:auto_gptq`; `auto_round` and `auto_round:gptqmodel` with zero points as `gptq_v2` stores them) and as in `awq` (`auto_round:auto_awq`) | modules may have settings of their own (`extra_config`, by name and pattern), or none; what AutoRound writes as `gptq` or `awq` loads as that; no floats (`mx_fp`, `nv_fp`, `fp8`), no activations of fewer than 16 bits |
| `compressed-tensors` | pack-quantized (4 bits, with zero points or without; 8 bits), int-quantized, float-quantized, naive-quantized, mxfp4-pack-quantized, nvfp4-pack-quantized | `targets` and `ignore` by name, pattern and class; Granite's experts also as one tensor in FP8 with a scale a row (`input_linear`, `output_linear`); no sparsity and no transforms |
| `fp8` | e4m3 with one scale or one a block (`weight_block_size`) | experts also as one tensor (`*_proj`, `*_proj_scale_inv`) where the unquantized model has them so |
| `fbgemm_fp8` | e4m3 with one scale a row | Llama 4's experts as one tensor (`*_proj`, `*_proj_scale`) |
| `modelopt` | `quant_algo` NVFP4, W4A16_NVFP4, FP8, FP8_PER_CHANNEL_PER_TOKEN, FP8_PB_WO (blocks of 128 rows and columns), and MIXED_PRECISION of these; NVFP4_AWQ where the smoothing is part of other weights (a `pre_quant_scale` is refused) | also where only hf_quant_config.json says so |
| `mxfp4` | the experts of gpt-oss (`*_blocks`, `*_scales`) | |
";

/// How the weights of a checkpoint are quantized, as its config.json says.
#[derive(Clone, Debug, PartialEq)]
pub enum Quantization {
    /// Columns of a group; `None`: one group a row.
    Awq(Settings<Option<usize>>),
    Gptq(Gptq),
    Compressed(Compressed),
    Fp8(Fp8),
    /// NVFP4, perhaps beside FP8.
    ModelOpt,
    /// Of experts only (`checkpoint/experts`).
    Mxfp4,
}

impl Quantization {
    /// Reads `quantization_config` (or `compression_config`) of a config.json, if there is one.
    pub fn parse(fields: Fields<'_>, family: &Family) -> Result<Option<Self>> {
        let present: Vec<&str> = ["quantization_config", "compression_config"]
            .into_iter()
            .filter(|name| fields.value(name).is_some())
            .collect();
        let name = match present[..] {
            [] => return Ok(None),
            [name] => name,
            _ => return Err(fields.problem("compression_config", "stands beside quantization_config")),
        };
        let path = format!("{name}.");
        let Some(inner) = fields.object(name, &path)? else { return Ok(None) };
        let options = Options(inner);
        // Checkpoints of the time when there was one method only do not name it.
        let method = match inner.text("quant_method")? {
            Some(method) => method,
            None if inner.value("config_groups").is_some() => "compressed-tensors",
            None => {
                return Err(
                    inner.problem("quant_method", "is missing: it names how the weights are quantized")
                );
            }
        };
        // GPTQModel writes both.
        if let Some(other) = inner.text("method")?.filter(|other| *other != method) {
            return Err(inner.problem("method", format!("is \"{other}\", but quant_method is \"{method}\"")));
        }
        match method {
            "awq" => awq::parse(options).map(Self::Awq),
            "gptq" => Gptq::parse(options).map(Self::Gptq),
            "auto-round" | "intel/auto-round" => auto_round::parse(options),
            "compressed-tensors" => Compressed::parse(options).map(Self::Compressed),
            "fp8" => Fp8::parse(options).map(Self::Fp8),
            "fbgemm_fp8" => Fp8::parse_of_rows(options).map(Self::Fp8),
            "modelopt" => modelopt::parse(options),
            "mxfp4" if family.mixture.is_some_and(|m| m.stored == ExpertTensors::Stacked) => {
                mxfp4::parse(options).map(|()| Self::Mxfp4)
            }
            other => {
                let other: String = other.chars().take(60).collect();
                Err(options.unsupported("quant_method", &format!("quantization `{other}`"), SUPPORTED))
            }
        }
        .map(Some)
    }

    /// The matrix of a module of `[rows, columns]`, unless it is stored plain.
    fn plan(&self, module: &str, shape: [usize; 2], pieces: &Pieces<'_>) -> Result<Option<Matrix>> {
        match self {
            Self::Awq(groups) => awq::plan(groups, module, shape, pieces),
            Self::Gptq(gptq) => gptq.plan(module, shape, pieces),
            Self::Compressed(compressed) => compressed.plan(module, shape, pieces),
            Self::Fp8(fp8) => fp8.plan(module, shape, pieces),
            Self::ModelOpt => modelopt::plan(module, shape, pieces),
            Self::Mxfp4 => Ok(None),
        }
    }

    /// The matrix of all experts that are one tensor of `[experts, rows, columns]`, unless it is stored plain.
    fn plan_experts(&self, stored: &str, shape: [usize; 3], pieces: &Pieces<'_>) -> Result<Option<Matrix>> {
        match self {
            Self::Fp8(fp8) => fp8.plan_experts(stored, shape, pieces),
            Self::Compressed(compressed) => compressed.plan_experts(stored, shape, pieces),
            Self::Awq(_) | Self::Gptq(_) | Self::ModelOpt | Self::Mxfp4 => Ok(None),
        }
    }
}

/// Makes the quantized matrices of a decoder, and of the MTP head behind it, tensors of its shards: `index` then names them, and their parts
/// no longer.
pub fn apply(config: &Config, location: &str, shards: &mut [Shard], index: &mut Index) -> Result<()> {
    let Some(quantization) = &config.quantization else { return Ok(()) };
    let specs: Vec<_> = weight_specs(config).iter().cloned().collect();
    make(quantization, &specs, location, shards, index)?;
    if let Some(head) = mtp::Stored::find(config, |name| index.contains_key(name)) {
        let is_own = |spec: &WeightSpec| specs.iter().all(|of_model| of_model.parts != spec.parts);
        let own: Vec<_> = head.weights().into_iter().filter(is_own).collect();
        // The model can be served without it: whoever opens the head finds what is left of its parts.
        let _ = make(quantization, &own, location, shards, index);
    }
    Ok(())
}

fn make(
    quantization: &Quantization,
    specs: &[WeightSpec],
    location: &str,
    shards: &mut [Shard],
    index: &mut Index,
) -> Result<()> {
    let parts: Vec<_> = specs.iter().flat_map(|weight| &weight.parts).collect();
    let known: BTreeSet<&str> = parts.iter().map(|part| part.name.as_str()).collect();
    let mut seen = BTreeSet::new();
    // Of a tensor that holds several projections there are several parts.
    for part in parts.iter().filter(|part| seen.insert(part.name.as_str())) {
        if let [experts, rows, cols] = part.shape[..] {
            let pieces = Pieces { shards, index, location };
            if let Some(matrix) = quantization.plan_experts(&part.name, [experts, rows, cols], &pieces)? {
                put(part, &matrix, shards, index);
            }
        }
        let [rows, cols] = part.shape[..] else { continue };
        if is_made(&part.name, shards, index) {
            continue;
        }
        let Some(module) = part.name.strip_suffix(".weight") else { continue };
        // A table of rows to look up, in no scheme quantized as a linear layer is.
        if module.ends_with("embed_tokens") {
            continue;
        }
        let pieces = Pieces { shards, index, location };
        if let Some(matrix) = quantization.plan(module, [rows, cols], &pieces)? {
            put(part, &matrix, shards, index);
        }
        let bias = format!("{module}.bias");
        if !known.contains(bias.as_str()) && is_zero(shards, index, &bias) {
            // AutoGPTQ wrote one for every layer, whether or not the model has it.
            index.remove(&bias);
        }
        refuse_leftovers(module, &known, shards, index)?;
    }
    Ok(())
}

/// Whether it was made where experts are looked for.
fn is_made(tensor: &str, shards: &[Shard], index: &Index) -> bool {
    let entry = index.get(tensor).and_then(|number| shards.get(*number)?.entries.get(tensor));
    entry.is_some_and(|entry| matches!(entry.form, Form::Quantized(..)))
}

/// Makes a matrix the tensor that is asked for; its parts are no longer named.
fn put(part: &TensorSpec, matrix: &Matrix, shards: &mut [Shard], index: &mut Index) {
    for piece in matrix.pieces() {
        index.remove(&piece.name);
    }
    let shard = matrix.codes.piece.shard;
    let entry = Entry { shape: part.shape.clone(), ..entry(matrix, shards) };
    index.insert(part.name.clone(), shard);
    shards[shard].entries.insert(part.name.clone(), entry);
}

/// The matrix as one tensor, whose rows are in the order of those of its codes.
fn entry(matrix: &Matrix, shards: &[Shard]) -> Entry {
    let codes = &matrix.codes.piece;
    let order = match shards[codes.shard].entries.get(&codes.name).map(|entry| &entry.form) {
        Some(Form::Rows(order)) => *order,
        _ => RowOrder::AsStored,
    };
    Entry {
        stored_name: codes.name.clone(),
        encoding: Ok(Encoding::Block(matrix.format)),
        shape: matrix.shape.to_vec(),
        range: codes.range.clone(),
        form: Form::Quantized(Box::new(matrix.clone()), order),
    }
}

fn is_zero(shards: &[Shard], index: &Index, tensor: &str) -> bool {
    let bytes = index.get(tensor).and_then(|number| {
        let shard = shards.get(*number)?;
        shard.storage.bytes().get(shard.entries.get(tensor)?.range.clone())
    });
    bytes.is_some_and(|bytes| bytes.iter().all(|byte| *byte == 0))
}

/// Whether a tensor belongs to a KV cache in FP8, also of a model that is not quantized. Folio's caches have scales of their own.
pub fn scales_kv_cache(tensor: &str) -> bool {
    tensor.ends_with(".k_scale") || tensor.ends_with(".v_scale")
}

/// A part that neither a scheme took nor the decoder reads would change what the module computes.
fn refuse_leftovers(module: &str, known: &BTreeSet<&str>, shards: &[Shard], index: &Index) -> Result<()> {
    let prefix = format!("{module}.");
    let of_module = index.range(prefix.clone()..).take_while(|(name, _)| name.starts_with(&prefix));
    for (name, number) in of_module {
        let of_layer = ["weight", "bias"].contains(&&name[prefix.len()..]) || known.contains(name.as_str());
        if !of_layer && !scales_kv_cache(name) {
            return Err(ModelError::Tensor {
                file: shards[*number].file.clone(),
                tensor: name.clone(),
                problem:
                    "is not a part of a linear layer as the quantization_config in config.json describes it"
                        .to_owned(),
            });
        }
    }
    Ok(())
}

/// Kinds of codes that block formats exist for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Int4,
    Uint4,
    Int8,
    Fp8,
}

impl Kind {
    /// The format for `group` columns a scale in rows of `cols`; `None` where neither 128 nor 32 values fit.
    fn format(self, group: usize, cols: usize) -> Option<BlockFormat> {
        let fits = |values: usize| group.is_multiple_of(values) && cols.is_multiple_of(values);
        match (self, fits(128), fits(32)) {
            (Kind::Int4, true, _) => Some(BlockFormat::Int4x128),
            (Kind::Uint4, true, _) => Some(BlockFormat::Uint4x128),
            (Kind::Int8, true, _) => Some(BlockFormat::Int8x128),
            (Kind::Fp8, true, _) => Some(BlockFormat::Fp8x128),
            (Kind::Int4, false, true) => Some(BlockFormat::Int4x32),
            (Kind::Uint4, false, true) => Some(BlockFormat::Uint4x32),
            (Kind::Int8, false, true) => Some(BlockFormat::Int8x32),
            (Kind::Fp8, false, true) => Some(BlockFormat::Fp8x32),
            (_, false, false) => None,
        }
    }
}
