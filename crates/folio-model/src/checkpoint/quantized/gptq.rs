//! GPTQ as AutoGPTQ and GPTQModel write it: `qweight` `[columns * bits / 32, rows]`, `qzeros` `[groups, rows * bits / 32]`,
//! `scales` `[groups, rows]`, `g_idx` `[columns]`; `x = scale * (q - zero)`.
//!
//! Zero points of checkpoint_format "gptq" are stored minus one; one is added and the sum masked to the bits, as AutoGPTQ's
//! own layers do ("casting here after the `zeros = zeros + 1` is important"). Those of "gptq_v2" are stored as they are.
//! With `sym` the zero point is the middle by definition; quantizers that write it in the way of v2 and call it "gptq" exist
//! (vllm-project/vllm#38966), so both ways of writing the middle are taken for it.

use super::Kind;
use super::matrix::{Codes, Matrix, Packing, Scales, Zeros};
use super::options::Options;
use super::piece::{Element, Pieces};
use crate::checkpoint::experts::Every;
use crate::error::Result;
use crate::quant::BlockFormat;

const SUPPORTED: &str = "supported: GPTQ with 4 bits, or 8 bits and sym, of checkpoint_format gptq or gptq_v2, also with desc_act";

/// What may stand in the configuration; those that are not read change how a GPU computes, or tell how the file was made.
const KNOWN: &[&str] = &[
    "quant_method",
    "method",
    "bits",
    "group_size",
    "desc_act",
    "sym",
    "checkpoint_format",
    "format",
    "is_marlin_format",
    "pack_dtype",
    "pack_impl",
    "dynamic",
    // The tensors say which modules are quantized, the head among them.
    "lm_head",
    "modules_in_block_to_quantize",
    "block_name_to_quantize",
    "module_name_preceding_first_block",
    // g_idx says which column is in which group.
    "static_groups",
    "act_group_aware",
    "true_sequential",
    "damp_percent",
    "damp_auto_increment",
    "mse",
    "model_name_or_path",
    "model_file_base_name",
    "meta",
    "quantizer",
    "dataset",
    "tokenizer",
    "batch_size",
    "pad_token_id",
    "cache_block_outputs",
    "model_seqlen",
    "max_input_length",
    "use_cuda_fp16",
    "use_exllama",
    "disable_exllama",
    "exllama_config",
    "backend",
];

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Gptq {
    bits: u32,
    /// Columns of a group; `None`: one group a row.
    group: Option<usize>,
    symmetric: bool,
    /// `g_idx` must be there.
    ordered: bool,
    /// Zero points are stored as they are, not minus one.
    v2: bool,
}

impl Gptq {
    pub fn parse(options: Options<'_>) -> Result<Self> {
        options.only(KNOWN, SUPPORTED)?;
        let fields = options.0;
        let bits = options.bits("bits", &[4, 8], "GPTQ")?;
        let mut v2 = false;
        for name in ["checkpoint_format", "format"] {
            match fields.text(name)? {
                None | Some("gptq") => {}
                Some("gptq_v2") => v2 = true,
                Some(other) => {
                    return Err(options.unsupported(
                        name,
                        &format!("GPTQ in the format `{other}`"),
                        SUPPORTED,
                    ));
                }
            }
        }
        if fields.flag("is_marlin_format")? == Some(true) {
            return Err(options.unsupported("is_marlin_format", "GPTQ in the format `marlin`", SUPPORTED));
        }
        refuse_words(options, SUPPORTED)?;
        refuse_overrides(options)?;
        let symmetric = fields.flag("sym")?.unwrap_or(true);
        if bits == 8 && !symmetric {
            return Err(options.unsupported("sym", "GPTQ with 8 bits and zero points", SUPPORTED));
        }
        Ok(Self {
            bits,
            group: options.group("group_size")?,
            symmetric,
            ordered: fields.flag("desc_act")?.unwrap_or(false),
            v2,
        })
    }

    pub fn plan(&self, module: &str, shape: [usize; 2], pieces: &Pieces<'_>) -> Result<Option<Matrix>> {
        let [rows, cols] = shape;
        let name = |part: &str| format!("{module}.{part}");
        if !has_codes(module, pieces)? {
            return Ok(None);
        }
        let group = self.group.unwrap_or(cols);
        let codes = name("qweight");
        let kind = match (self.bits, self.symmetric) {
            (8, _) => Kind::Int8,
            (_, true) => Kind::Int4,
            (_, false) => Kind::Uint4,
        };
        let format = format(kind, group, shape, &codes, pieces)?;
        let count = cols.div_ceil(group);
        let bits = self.bits as usize;
        let piece = pieces.need(&codes, &[Element::I32], &[&[cols * bits / 32, rows]])?;
        let zeros = pieces.need(&name("qzeros"), &[Element::I32], &[&[count, rows * bits / 32]])?;
        let scales = pieces.need(&name("scales"), Element::FLOATS, &[&[count, rows]])?;
        let g_idx = name("g_idx");
        let groups = match self.ordered || pieces.has(&g_idx) {
            true => Some(pieces.need(&g_idx, &[Element::I32], &[&[cols]])?),
            false => None,
        };
        let zeros = match (kind, self.v2) {
            (Kind::Uint4, v2) => Zeros::Along { piece: zeros, more: u8::from(!v2) },
            (Kind::Int8, true) => Zeros::Middle { piece: zeros, bits: 8, allowed: &[128] },
            (Kind::Int8, false) => Zeros::Middle { piece: zeros, bits: 8, allowed: &[127, 128] },
            (_, true) => Zeros::Middle { piece: zeros, bits: 4, allowed: &[8] },
            (_, false) => Zeros::Middle { piece: zeros, bits: 4, allowed: &[7, 8] },
        };
        Ok(Some(Matrix {
            shape,
            format,
            codes: Codes { piece, packing: Packing::Down(self.bits) },
            scales: Scales { piece: scales, row_div: 1, row_stride: 1, group_stride: rows },
            whole: None,
            zeros,
            group,
            groups,
            every: Every::ALL,
            unused: Vec::new(),
        }))
    }
}

/// GPTQModel's rules for single modules: those that only say which are not quantized are in the tensors, others are not served.
pub fn refuse_overrides(options: Options<'_>) -> Result<()> {
    let Some(rules) = options.0.object("dynamic", "quantization_config.dynamic.")? else { return Ok(()) };
    match rules.entries().find(|(name, _)| !name.starts_with("-:")) {
        Some((name, _)) => {
            let what =
                format!("an own setting for the modules `{}`", name.chars().take(60).collect::<String>());
            Err(options.unsupported(
                "dynamic",
                &what,
                "supported: rules that begin with `-:`, and one setting for all others",
            ))
        }
        None => Ok(()),
    }
}

/// Codes are packed into words of 32 bits.
pub fn refuse_words(options: Options<'_>, supported: &str) -> Result<()> {
    match options.0.text("pack_dtype")? {
        None | Some("int32") => Ok(()),
        Some(other) => Err(options.unsupported("pack_dtype", &format!("packing into `{other}`"), supported)),
    }
}

/// Whether a module of AWQ or GPTQ is quantized; it must not be both quantized and plain.
pub fn has_codes(module: &str, pieces: &Pieces<'_>) -> Result<bool> {
    let (codes, plain) = (format!("{module}.qweight"), format!("{module}.weight"));
    match (pieces.has(&codes), pieces.has(&plain)) {
        (true, true) => {
            Err(pieces
                .problem(&codes, format!("stands beside `{plain}`: which of them is meant is not clear")))
        }
        (quantized, _) => Ok(quantized),
    }
}

/// The block format, for rows that are whole words.
pub fn format(
    kind: Kind,
    group: usize,
    shape: [usize; 2],
    codes: &str,
    pieces: &Pieces<'_>,
) -> Result<BlockFormat> {
    let [rows, cols] = shape;
    if !rows.is_multiple_of(8) {
        return Err(pieces.problem(codes, format!("is of {rows} rows, which are no whole words of eight")));
    }
    blocks(kind, group, cols, codes, pieces)
}

/// The block format, or why there is none.
pub fn blocks(
    kind: Kind,
    group: usize,
    cols: usize,
    codes: &str,
    pieces: &Pieces<'_>,
) -> Result<BlockFormat> {
    kind.format(group, cols).ok_or_else(|| {
        let problem = format!(
            "has {cols} columns in groups of {group}; both must be multiples of 32 for a quantized matrix to be loaded"
        );
        pieces.problem(codes, problem)
    })
}
