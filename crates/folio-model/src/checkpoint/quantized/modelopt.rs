//! ModelOpt, as NVIDIA publishes checkpoints: the tensors of a module say how it is quantized. NVFP4 where `weight` is U8 (see
//! [`nvfp4`]), FP8 with one scale where it is e4m3. Older checkpoints say so in hf_quant_config.json alone.

use super::Quantization;
use super::fp8::Fp8;
use super::matrix::Matrix;
use super::nvfp4::{self, Form};
use super::options::Options;
use super::piece::{Element, Pieces};
use crate::checkpoint::json::{self, Fields};
use crate::error::Result;

const SUPPORTED: &str = "supported of ModelOpt: NVFP4, FP8 and MIXED_PRECISION of the two";

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
];

pub fn parse(options: Options<'_>) -> Result<Quantization> {
    options.only(KNOWN, SUPPORTED)?;
    match options.0.text("quant_algo")? {
        Some("FP8") => Ok(Quantization::Fp8(Fp8::OF_MATRICES)),
        Some("NVFP4" | "MIXED_PRECISION") => Ok(Quantization::ModelOpt),
        Some(other) => {
            let shown: String = other.chars().take(60).collect();
            Err(options.unsupported("quant_algo", &format!("ModelOpt with `{shown}`"), SUPPORTED))
        }
        None => Err(options.0.problem("quant_algo", "is missing: it names how the weights are quantized")),
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
        _ => Fp8::OF_MATRICES.plan(module, shape, pieces),
    }
}
