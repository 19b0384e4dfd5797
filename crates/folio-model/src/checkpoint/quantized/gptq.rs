//! GPTQ as AutoGPTQ and GPTQModel write it: `qweight` `[columns * bits / 32, rows]`, `qzeros` `[groups, rows * bits / 32]`,
//! `scales` `[groups, rows]`, `g_idx` `[columns]`; `x = scale * (q - zero)`.
//!
//! Zero points of checkpoint_format "gptq" are stored minus one; one is added and the sum masked to the bits, as AutoGPTQ's
//! own layers do ("casting here after the `zeros = zeros + 1` is important"). Those of "gptq_v2" are stored as they are.
//! With `sym` the zero point is the middle by definition; quantizers that write it in the way of v2 and call it "gptq" exist
//! (vllm-project/vllm#38966), so both ways of writing the middle are taken for it.
//!
//! Codes of 2 and 3 bits are held in 4, with the same values. Readers differ in what the largest zero point plus one is; AutoGPTQ
//! wraps 4 bits, and of 2 and 3 bits zero points minus one are refused.

use super::matrix::{Codes, Matrix, Packing, Scales, Zeros};
use super::options::Options;
use super::piece::{Element, Pieces};
use super::rules::{Settings, Target};
use super::{Kind, auto_round};
use crate::checkpoint::experts::Every;
use crate::error::Result;
use crate::quant::BlockFormat;

const SUPPORTED: &str = "supported: GPTQ with 4 bits, with sym also 2, 3 and 8 bits, with gptq_v2 also 2 and 3 bits with zero points, of \
    checkpoint_format gptq or gptq_v2, also with desc_act";

/// What may stand in the configuration, beside [`SETTING`]; those that are not read change how a GPU computes, or tell how the file was made.
const KNOWN: &[&str] = &[
    "quant_method",
    "method",
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

/// What may stand there, and in an own setting of modules.
const SETTING: &[&str] = &[
    "bits",
    "group_size",
    "sym",
    "desc_act",
    // g_idx says which column is in which group.
    "static_groups",
    "act_group_aware",
    "true_sequential",
    "damp_percent",
    "damp_auto_increment",
    "mse",
];

#[derive(Clone, Debug, PartialEq)]
pub struct Gptq {
    pub(super) settings: Settings<Setting>,
    /// Zero points are stored as they are, not minus one.
    pub(super) v2: bool,
}

/// How modules are quantized.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Setting {
    bits: u32,
    /// Columns of a group; `None`: one group a row.
    group: Option<usize>,
    symmetric: bool,
    /// `g_idx` must be there.
    ordered: bool,
}

impl Setting {
    /// What an own setting does not say is as in `otherwise`.
    pub fn parse(options: Options<'_>, otherwise: Option<Self>, v2: bool) -> Result<Self> {
        let fields = options.0;
        let setting = Self {
            bits: match otherwise {
                Some(other) if fields.value("bits").is_none() => other.bits,
                _ => options.bits("bits", &[2, 3, 4, 8], "GPTQ")?,
            },
            group: match otherwise {
                Some(other) if fields.value("group_size").is_none() => other.group,
                _ => options.group("group_size")?,
            },
            symmetric: fields.flag("sym")?.unwrap_or(otherwise.is_none_or(|other| other.symmetric)),
            ordered: fields.flag("desc_act")?.unwrap_or(otherwise.is_some_and(|other| other.ordered)),
        };
        match (setting.bits, setting.symmetric) {
            (8, false) => Err(options.unsupported("sym", "GPTQ with 8 bits and zero points", SUPPORTED)),
            (bits @ (2 | 3), false) if !v2 => {
                let what = format!("GPTQ with {bits} bits and zero points that are stored minus one");
                Err(options.unsupported("sym", &what, SUPPORTED))
            }
            _ => Ok(setting),
        }
    }
}

impl Gptq {
    pub fn parse(options: Options<'_>) -> Result<Self> {
        auto_round::check(options, &[KNOWN, SETTING].concat(), SUPPORTED)?;
        let fields = options.0;
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
        let mut settings = Settings::of_all(Setting::parse(options, None, v2)?);
        settings.patterns = own_settings(options, settings.all, v2)?;
        Ok(Self { settings, v2 })
    }

    pub fn plan(&self, module: &str, shape: [usize; 2], pieces: &Pieces<'_>) -> Result<Option<Matrix>> {
        let [rows, cols] = shape;
        let name = |part: &str| format!("{module}.{part}");
        if !has_codes(module, pieces)? {
            return Ok(None);
        }
        let codes = name("qweight");
        let setting = self.settings.of(&codes, pieces)?;
        let group = setting.group.unwrap_or(cols);
        let kind = match (setting.bits, setting.symmetric) {
            (8, _) => Kind::Int8,
            (_, true) => Kind::Int4,
            (_, false) => Kind::Uint4,
        };
        let format = format(kind, group, shape, &codes, pieces)?;
        let count = cols.div_ceil(group);
        let bits = setting.bits as usize;
        if !(rows * bits).is_multiple_of(32) {
            let problem =
                format!("is of {rows} rows, whose zero points are no whole words of {bits} bits each");
            return Err(pieces.problem(&codes, problem));
        }
        let piece = pieces.need(&codes, &[Element::I32], &[&[cols * bits / 32, rows]])?;
        let zeros = pieces.need(&name("qzeros"), &[Element::I32], &[&[count, rows * bits / 32]])?;
        let scales = pieces.need(&name("scales"), Element::FLOATS, &[&[count, rows]])?;
        let g_idx = name("g_idx");
        let groups = match setting.ordered || pieces.has(&g_idx) {
            true => Some(pieces.need(&g_idx, &[Element::I32], &[&[cols]])?),
            false => None,
        };
        let zeros = match kind {
            Kind::Uint4 => Zeros::Along { piece: zeros, bits: setting.bits, more: u8::from(!self.v2) },
            _ => Zeros::Middle { piece: zeros, bits: setting.bits, allowed: middle(setting.bits, self.v2) },
        };
        let packing = match setting.bits {
            // The middle of a format of 4 bits is 8.
            bits @ (2 | 3) if setting.symmetric => Packing::DownFew { bits, more: 8 - (1 << (bits - 1)) },
            bits @ (2 | 3) => Packing::DownFew { bits, more: 0 },
            bits => Packing::Down(bits),
        };
        Ok(Some(Matrix {
            shape,
            format,
            codes: Codes { piece, packing },
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

/// How zero points that are the middle may be written.
fn middle(bits: u32, v2: bool) -> &'static [u8] {
    let either: &'static [u8] = match bits {
        2 => &[1, 2],
        3 => &[3, 4],
        4 => &[7, 8],
        _ => &[127, 128],
    };
    if v2 { &either[1..] } else { either }
}

/// GPTQModel's rules for single modules, of which the first that matches holds. Those that begin with `-:` only say which are not
/// quantized, as the tensors do.
fn own_settings(options: Options<'_>, all: Setting, v2: bool) -> Result<Vec<(Target, Option<Setting>)>> {
    let path = format!("{}dynamic.", options.0.path());
    let Some(rules) = options.0.object("dynamic", &path)? else { return Ok(Vec::new()) };
    let mut settings = Vec::new();
    for (name, _) in rules.entries().filter(|(name, _)| !name.starts_with("-:")) {
        let path = format!("{path}{name}.");
        let Some(fields) = rules.object(name, &path)? else { continue };
        let own = Options(fields);
        own.only(SETTING, SUPPORTED)?;
        let pattern = Target::at_start(name.strip_prefix("+:").unwrap_or(name)).map_err(|what| {
            options.unsupported("dynamic", &what, "supported: patterns without look-around")
        })?;
        settings.push((pattern, Some(Setting::parse(own, Some(all), v2)?)));
    }
    Ok(settings)
}

/// Such rules where all modules must have one setting (AWQ).
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
