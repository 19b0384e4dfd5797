//! AWQ, version gemm: `qweight` `[columns, rows / 8]`, `qzeros` `[groups, rows / 8]`, `scales` `[groups, rows]`;
//! `x = scale * (q - zero)` (AutoAWQ, `awq/utils/packing_utils.py`, `dequantize_gemm`).

use super::matrix::{Codes, Matrix, Packing, Scales, Zeros};
use super::options::Options;
use super::piece::{Element, Pieces};
use super::rules::Settings;
use super::{Kind, auto_round, gptq};
use crate::checkpoint::experts::Every;
use crate::error::Result;

/// What may stand in the configuration; those that are not read change how a GPU computes, or tell how the file was made.
const KNOWN: &[&str] = &[
    "quant_method",
    "method",
    "bits",
    "w_bit",
    "group_size",
    "q_group_size",
    "zero_point",
    "version",
    "format",
    "checkpoint_format",
    "backend",
    // The tensors say which modules are quantized.
    "modules_to_not_convert",
    "do_fuse",
    "fuse_max_seq_len",
    "modules_to_fuse",
    "exllama_config",
    "desc_act",
    "sym",
    "lm_head",
    "damp_percent",
    "damp_auto_increment",
    "true_sequential",
    "act_group_aware",
    "static_groups",
    "dataset",
    "tokenizer",
    "model_seqlen",
    "batch_size",
    "pad_token_id",
    "cache_block_outputs",
    "pack_dtype",
    "pack_impl",
    "dynamic",
    "meta",
];

/// Columns of a group; `None`: one group a row.
pub fn parse(options: Options<'_>) -> Result<Settings<Option<usize>>> {
    const SUPPORTED: &str = "supported: AWQ with 4 bits, zero points, version gemm";
    auto_round::check(options, KNOWN, SUPPORTED)?;
    let fields = options.0;
    let bits = if fields.value("bits").is_some() { "bits" } else { "w_bit" };
    options.bits(bits, &[4], "AWQ")?;
    // AutoRound writes zero points in any case.
    let has_zeros = fields.text("provider")? == Some("auto-round");
    if fields.flag("zero_point")? == Some(false) && !has_zeros {
        return Err(options.unsupported("zero_point", "AWQ without zero points", SUPPORTED));
    }
    for name in ["version", "format", "checkpoint_format"] {
        if let Some(version) = fields.text(name)?.filter(|version| !version.eq_ignore_ascii_case("gemm")) {
            return Err(options.unsupported(name, &format!("AWQ of version `{version}`"), SUPPORTED));
        }
    }
    if fields.text("backend")? == Some("llm-awq") {
        return Err(options.unsupported("backend", "AWQ as llm-awq packs it", SUPPORTED));
    }
    gptq::refuse_words(options, SUPPORTED)?;
    gptq::refuse_overrides(options)?;
    let group = if fields.value("group_size").is_some() { "group_size" } else { "q_group_size" };
    options.group(group).map(Settings::of_all)
}

pub fn plan(
    settings: &Settings<Option<usize>>,
    module: &str,
    shape: [usize; 2],
    pieces: &Pieces<'_>,
) -> Result<Option<Matrix>> {
    let [rows, cols] = shape;
    let name = |part: &str| format!("{module}.{part}");
    if !gptq::has_codes(module, pieces)? {
        return Ok(None);
    }
    let codes = name("qweight");
    let group = settings.of(&codes, pieces)?.unwrap_or(cols);
    let format = gptq::format(Kind::Uint4, group, shape, &codes, pieces)?;
    if !cols.is_multiple_of(group) {
        return Err(
            pieces.problem(&codes, format!("has {cols} columns, which are no whole groups of {group}"))
        );
    }
    let count = cols / group;
    let words = rows / 8;
    let piece = pieces.need(&codes, &[Element::I32], &[&[cols, words]])?;
    let zeros = pieces.need(&name("qzeros"), &[Element::I32], &[&[count, words]])?;
    let scales = pieces.need(&name("scales"), Element::FLOATS, &[&[count, rows]])?;
    Ok(Some(Matrix {
        shape,
        format,
        codes: Codes { piece, packing: Packing::Awq },
        scales: Scales { piece: scales, row_div: 1, row_stride: 1, group_stride: rows },
        whole: None,
        zeros: Zeros::Awq(zeros),
        group,
        groups: None,
        every: Every::ALL,
        unused: Vec::new(),
    }))
}
