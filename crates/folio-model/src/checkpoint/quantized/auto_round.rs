//! AutoRound, as Intel publishes checkpoints: tensors as GPTQ or AWQ have them, and settings for single modules (`extra_config`).
//!
//! | `packing_format` | tensors | zero points |
//! |---|---|---|
//! | `auto_round:auto_gptq`, `auto_round:gptq`, `auto`, none | GPTQ's | minus one |
//! | `auto_round`, `auto_round:gptqmodel` | GPTQ's | as they are (as in "gptq_v2") |
//! | `auto_round:auto_awq`, `auto_round:awq` | AWQ's | as they are |
//!
//! (auto-round, `inference/backend.py`, `inference/convert_model.py`, and the `pack` of `auto_round_extension/torch`.)

use super::Quantization;
use super::gptq::{Gptq, Setting};
use super::options::Options;
use super::rules::{Settings, Target};
use crate::error::Result;

const SUPPORTED: &str = "supported of AutoRound: integers of 2, 3, 4 and (with sym) 8 bits packed as GPTQ or, with 4 bits, as AWQ";

/// What may stand in the configuration, beside what is in any of AutoRound's.
const KNOWN: &[&str] = &["quant_method", "packing_format", "extra_config", "backend", "vllm_backend"];

/// What may stand there, and in a setting of `extra_config`.
const SETTING: &[&str] = &["bits", "group_size", "sym"];

/// What AutoRound writes in whichever format, of all modules or of some: [`refuse_types`] looks at it.
const TYPES: &[&str] =
    &["data_type", "act_bits", "act_data_type", "act_dynamic", "act_group_size", "act_sym"];

/// What it writes in whichever format: which modules are quantized, of which the tensors are the truth, how values were found, and the scales
/// of a KV cache and of attention that are read past.
const TUNING: &[&str] = &[
    "block_name_to_quantize",
    "to_quant_block_names",
    "quant_block_list",
    "modules_in_block_to_quantize",
    "modules_to_not_convert",
    "provider",
    "autoround_version",
    "model_free",
    "amp",
    "batch_size",
    "dataset",
    "enable_minmax_tuning",
    "enable_norm_bias_tuning",
    "enable_quanted_input",
    "gradient_accumulate_steps",
    "iters",
    "low_gpu_mem_usage",
    "lr",
    "minmax_lr",
    "nsamples",
    "scale_dtype",
    "seqlen",
    "static_attention_dtype",
    "static_attention_granularity",
    "static_kv_dtype",
    "static_kv_granularity",
];

/// Modules of so many bits are not quantized.
const PLAIN_BITS: usize = 16;

pub fn parse(options: Options<'_>) -> Result<Quantization> {
    check(options, &[KNOWN, SETTING].concat(), SUPPORTED)?;
    let fields = options.0;
    let packing = fields.text("packing_format")?;
    match packing.unwrap_or("auto") {
        "auto" if packing.is_none() && fields.flag("sym")? == Some(false) => {
            Err(fields.problem("packing_format", "is missing: it says how zero points are stored"))
        }
        "auto" | "auto_round:auto_gptq" | "auto_round:gptq" => gptq(options, false),
        "auto_round" | "auto_round:gptqmodel" => gptq(options, true),
        "auto_round:auto_awq" | "auto_round:awq" => {
            let all = awq_group(options, None)?;
            own_settings(options, all, |own| awq_group(own, Some(all))).map(Quantization::Awq)
        }
        other => {
            let other: String = other.chars().take(60).collect();
            let what = format!("AutoRound packed as `{other}`");
            Err(options.unsupported("packing_format", &what, SUPPORTED))
        }
    }
}

fn gptq(options: Options<'_>, v2: bool) -> Result<Quantization> {
    let all = Setting::parse(options, None, v2)?;
    let settings = own_settings(options, all, |own| Setting::parse(own, Some(all), v2))?;
    Ok(Quantization::Gptq(Gptq { settings, v2 }))
}

/// Columns of a group, in AWQ's packing; of a module as in `otherwise` where it does not say.
fn awq_group(options: Options<'_>, otherwise: Option<Option<usize>>) -> Result<Option<usize>> {
    if options.0.value("bits").is_some() || otherwise.is_none() {
        options.bits("bits", &[4], "AutoRound packed as AWQ")?;
    }
    match otherwise {
        Some(group) if options.0.value("group_size").is_none() => Ok(group),
        _ => options.group("group_size"),
    }
}

/// `extra_config`: settings by a module's name, or by a pattern that is somewhere in it.
fn own_settings<T: Copy>(
    options: Options<'_>,
    all: T,
    parse: impl Fn(Options<'_>) -> Result<T>,
) -> Result<Settings<T>> {
    let mut settings = Settings::of_all(all);
    let path = format!("{}extra_config.", options.0.path());
    let Some(modules) = options.0.object("extra_config", &path)? else { return Ok(settings) };
    for (name, _) in modules.entries() {
        let path = format!("{path}{name}.");
        let Some(fields) = modules.object(name, &path)? else { continue };
        let own = Options(fields);
        let is_plain = fields.size_opt("bits", 64)?.is_some_and(|bits| bits >= PLAIN_BITS);
        let setting = if is_plain {
            None
        } else {
            own.only(&[SETTING, TYPES].concat(), SUPPORTED)?;
            refuse_types(own, SUPPORTED)?;
            Some(parse(own)?)
        };
        if name.contains(['*', '+', '?', '^', '$', '(', ')', '[', ']', '{', '}', '|', '\\']) {
            let pattern = Target::anywhere(name).map_err(|what| {
                options.unsupported("extra_config", &what, "supported: patterns without look-around")
            })?;
            settings.patterns.push((pattern, setting));
        } else {
            settings.names.insert(name.to_owned(), setting);
        }
    }
    Ok(settings)
}

/// Refuses what is neither `known` nor in any configuration that AutoRound writes, and the types that [`refuse_types`] does.
pub fn check(options: Options<'_>, known: &[&str], supported: &str) -> Result<()> {
    options.only(&[known, TYPES, TUNING].concat(), supported)?;
    refuse_types(options, supported)
}

/// Weights that are no integers, and activations that values were made for.
fn refuse_types(options: Options<'_>, supported: &str) -> Result<()> {
    let fields = options.0;
    if let Some(other) = fields.text("data_type")?.filter(|name| *name != "int") {
        let other: String = other.chars().take(60).collect();
        return Err(options.unsupported("data_type", &format!("weights of type `{other}`"), supported));
    }
    match fields.size_opt("act_bits", 64)? {
        Some(bits) if bits < PLAIN_BITS => {
            Err(options.unsupported("act_bits", &format!("activations of {bits} bits"), supported))
        }
        _ => Ok(()),
    }
}
