//! ModelOpt, as NVIDIA publishes checkpoints: the tensors of a module say how it is quantized. NVFP4 where `weight` is U8 (see
//! [`nvfp4`]), FP8 where it is e4m3 (see [`fp8`](super::fp8)), with a scale for the matrix, each row or each block, which the shape of
//! the scales tells. Older checkpoints say so in hf_quant_config.json alone.
//!
//! AWQ's smoothing of inputs is a part of the weights before them (`fuse_prequant_layernorm`, `fuse_prequant_to_linear` of
//! `modelopt/torch/export`); where it is not, a module has a `pre_quant_scale`, which no block format holds.

use super::Quantization;
use super::fp8::Fp8;
use super::matrix::Matrix;
use super::nvfp4::{self, Form};
use super::options::Options;
use super::piece::{Element, Pieces};
use crate::checkpoint::json::{self, Fields};
use crate::error::Result;

const SUPPORTED: &str = "supported of ModelOpt: NVFP4, W4A16_NVFP4, NVFP4_AWQ, FP8, FP8_PER_CHANNEL_PER_TOKEN, FP8_PB_WO and MIXED_PRECISION \
    of these";

/// What may stand in the configuration. The tensors say what the rest would.
const KNOWN: &[&str] = &[
    "quant_method",
    "quant_algo",
    "config_groups",
    "group_size",
    "ignore",
    "exclude_modules",
    "quantized_layers",
    // Of a KV cache whose scales are read past.
    "kv_cache_scheme",
    "kv_cache_quant_algo",
    "producer",
    // Of AWQ. The tensors say where it is left.
    "pre_quant_scale",
];

pub fn parse(options: Options<'_>) -> Result<Quantization> {
    options.only(KNOWN, SUPPORTED)?;
    let Some(algorithm) = options.0.text("quant_algo")? else {
        return Err(options.0.problem("quant_algo", "is missing: it names how the weights are quantized"));
    };
    // Some are written in lower case.
    let upper = algorithm.to_ascii_uppercase();
    if upper != "NVFP4_AWQ" {
        options.none("pre_quant_scale", "a scale of inputs", SUPPORTED)?;
    }
    match upper.as_str() {
        "FP8" => Ok(Quantization::Fp8(Fp8::OF_MATRICES)),
        "FP8_PER_CHANNEL_PER_TOKEN" => Ok(Quantization::Fp8(Fp8::OF_ROWS)),
        "FP8_PB_WO" => Ok(Quantization::Fp8(Fp8::OF_BLOCKS)),
        "NVFP4" | "W4A16_NVFP4" | "NVFP4_AWQ" | "MIXED_PRECISION" => Ok(Quantization::ModelOpt),
        _ => {
            let shown: String = algorithm.chars().take(60).collect();
            Err(options.unsupported("quant_algo", &format!("ModelOpt with `{shown}`"), SUPPORTED))
        }
    }
}

/// Reads a hf_quant_config.json. `None`: only the KV cache is quantized.
pub fn parse_hf_quant_config(file: &str, bytes: &[u8]) -> Result<Option<Quantization>> {
    let map = json::parse_object(file, bytes)?;
    let fields = Fields::new(file, &map);
    let Some(inner) = fields.object("quantization", "quantization.")? else {
        return Err(fields.problem("quantization", "is missing"));
    };
    match inner.value("quant_algo") {
        Some(_) => parse(Options(inner)).map(Some),
        None => Ok(None),
    }
}

pub fn plan(module: &str, shape: [usize; 2], pieces: &Pieces<'_>) -> Result<Option<Matrix>> {
    match pieces.element(&format!("{module}.weight")) {
        Some(Ok(Element::U8)) => nvfp4::plan(Form::ModelOpt, module, shape, pieces).map(Some),
        _ => fp8(module, shape, pieces).plan(module, shape, pieces),
    }
}

/// What has a scale in a module of FP8.
fn fp8(module: &str, [rows, _]: [usize; 2], pieces: &Pieces<'_>) -> Fp8 {
    match pieces.shape(&format!("{module}.weight_scale")) {
        None if pieces.has(&format!("{module}.weight_scale_inv")) => Fp8::OF_BLOCKS,
        Some([_, 1, _, 1]) => Fp8::OF_BLOCKS,
        Some([count] | [count, 1]) if *count == rows && rows > 1 => Fp8::OF_ROWS,
        _ => Fp8::OF_MATRICES,
    }
}
