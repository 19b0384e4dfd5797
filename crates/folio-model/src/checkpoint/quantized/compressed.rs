//! compressed-tensors, as llm-compressor writes it (`compressors/*/base.py`, `quantization/quant_args.py`).
//!
//! | `format` | tensors of a module |
//! |---|---|
//! | pack-quantized | `weight_packed` I32 `[rows, columns * bits / 32]`, neighbouring columns from the lowest bits up, raised by half the range; `weight_shape`; `weight_zero_point` I32 `[rows / 8, groups]`, packed down the rows and raised likewise; `weight_g_idx` |
//! | int-quantized | `weight` I8 |
//! | float-quantized | `weight` e4m3 |
//! | mxfp4-pack-quantized | `weight_packed` U8 `[rows, columns / 2]`, `weight_scale` U8 (exponents) `[rows, columns / 32]` |
//! | nvfp4-pack-quantized | see [`nvfp4`] |
//!
//! and `weight_scale`: one, one a row, one a row and group, or one a block. naive-quantized is int- or float-quantized by type.

use super::Kind;
use super::fp8::Fp8;
use super::gptq::{blocks, format};
use super::matrix::{Codes, Matrix, Packing, Scales, Zeros};
use super::nvfp4;
use super::options::Options;
use super::piece::{Element, Piece, Pieces};
use super::rules::Target;
use crate::checkpoint::experts::Every;
use crate::error::Result;
use crate::quant::BlockFormat;

const SUPPORTED: &str = "supported of compressed-tensors: weights in pack-quantized (4 bits, symmetric 8 bits), int-quantized, \
    float-quantized (8 bits), mxfp4-pack-quantized and nvfp4-pack-quantized, activations of at least 8 bits or of FP4";

/// Modules of one setting.
#[derive(Clone, Debug, PartialEq)]
struct Group {
    targets: Vec<Target>,
    weights: Option<Weights>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Weights {
    storage: Storage,
    strategy: Strategy,
    symmetric: bool,
    /// `weight_g_idx` must be there.
    ordered: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Storage {
    Packed(u32),
    Int,
    Float,
    Mxfp4,
    Nvfp4,
}

/// What shares a scale.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Strategy {
    Tensor,
    Channel,
    Group(usize),
    /// A group, and another scale for the whole matrix.
    TensorGroup(usize),
    Block([usize; 2]),
}

#[derive(Clone, Debug, PartialEq)]
pub struct Compressed {
    groups: Vec<Group>,
    ignore: Vec<Target>,
}

impl Compressed {
    pub fn parse(options: Options<'_>) -> Result<Self> {
        let fields = options.0;
        options.none("transform_config", "a transform of the weights", SUPPORTED)?;
        options.none("moe_sparsity_config", "sparsity", SUPPORTED)?;
        refuse_sparsity(options)?;
        // `quantization_status` tells how the file was made; the tensors say what is in it.
        let known = [
            "quant_method",
            "format",
            "config_groups",
            "ignore",
            "quantization_status",
            "global_compression_ratio",
            "sparsity_config",
            "version",
            // Scales of a KV cache are read past.
            "kv_cache_scheme",
        ];
        options.only(&known, SUPPORTED)?;
        let path = format!("{}config_groups.", fields.path());
        let Some(groups) = fields.object("config_groups", &path)? else {
            return Err(fields.problem("config_groups", "is missing"));
        };
        let mut parsed = Vec::new();
        for (name, _) in groups.entries() {
            let path = format!("{path}{name}.");
            if let Some(group) = groups.object(name, &path)? {
                parsed.push(Group::parse(Options(group), fields.text("format")?)?);
            }
        }
        Ok(Self { groups: parsed, ignore: targets(options, "ignore")? })
    }

    pub fn plan(&self, module: &str, shape: [usize; 2], pieces: &Pieces<'_>) -> Result<Option<Matrix>> {
        let (packed, plain) = (format!("{module}.weight_packed"), format!("{module}.weight"));
        let codes = match (pieces.has(&packed), pieces.element(&plain)) {
            (true, Some(_)) => {
                let problem = format!("stands beside `{plain}`: which of them is meant is not clear");
                return Err(pieces.problem(&packed, problem));
            }
            (true, None) => packed,
            (false, None | Some(Ok(Element::Plain(_)))) => return Ok(None),
            (false, Some(_)) => plain,
        };
        self.weights(&codes, pieces)?.plan(module, shape, pieces).map(Some)
    }

    /// All experts of a layer out of one tensor, unless it is stored plain.
    pub fn plan_experts(
        &self,
        stored: &str,
        shape: [usize; 3],
        pieces: &Pieces<'_>,
    ) -> Result<Option<Matrix>> {
        let Some(Ok(Element::E4M3)) = pieces.element(stored) else { return Ok(None) };
        match self.weights(stored, pieces)? {
            Weights { storage: Storage::Float, strategy: Strategy::Channel, .. } => {
                Fp8::OF_ROWS.plan_experts(stored, shape, pieces)
            }
            _ => {
                let problem = "holds all experts in FP8; of compressed-tensors that is supported with a scale for each row";
                Err(pieces.problem(stored, problem))
            }
        }
    }

    /// The closest setting for the module with these codes; several equally close ones must be the same. Settings call it what the
    /// file calls it.
    fn weights(&self, codes: &str, pieces: &Pieces<'_>) -> Result<Weights> {
        let stored = pieces.stored_name(codes);
        let suffixes = [".weight_packed", ".weight"];
        let module = suffixes.iter().find_map(|suffix| stored.strip_suffix(*suffix)).unwrap_or(stored);
        if self.ignore.iter().any(|target| target.matches(module).is_some()) {
            let problem = "is quantized, but `ignore` of the quantization_config names its module";
            return Err(pieces.problem(codes, problem));
        }
        let mut best = None;
        for group in &self.groups {
            let Some(closeness) = group.targets.iter().filter_map(|target| target.matches(module)).max()
            else {
                continue;
            };
            match best {
                Some((other, weights)) if other == closeness && weights != group.weights => {
                    let problem = "is named by two groups of the quantization_config that differ";
                    return Err(pieces.problem(codes, problem));
                }
                Some((other, _)) if other >= closeness => {}
                _ => best = Some((closeness, group.weights)),
            }
        }
        best.and_then(|(_, weights)| weights).ok_or_else(|| {
            let problem = "is quantized, but no group of the quantization_config is for its module";
            pieces.problem(codes, problem)
        })
    }
}

/// `sparsity_config` of a dense checkpoint says so in words.
fn refuse_sparsity(options: Options<'_>) -> Result<()> {
    let path = format!("{}sparsity_config.", options.0.path());
    let Some(sparsity) = options.0.object("sparsity_config", &path)? else { return Ok(()) };
    match sparsity.text("format")? {
        None | Some("dense") => Ok(()),
        Some(other) => Err(Options(sparsity).unsupported(
            "format",
            &format!("sparsity in the format `{other}`"),
            SUPPORTED,
        )),
    }
}

fn targets(options: Options<'_>, name: &str) -> Result<Vec<Target>> {
    let parse = |text: &str| {
        Target::parse(text)
            .map_err(|what| options.unsupported(name, &what, "supported: patterns without look-around"))
    };
    options.texts(name)?.into_iter().map(parse).collect()
}

impl Group {
    fn parse(options: Options<'_>, format: Option<&str>) -> Result<Self> {
        options
            .only(&["targets", "weights", "input_activations", "output_activations", "format"], SUPPORTED)?;
        options.none("output_activations", "quantization of outputs", SUPPORTED)?;
        let fields = options.0;
        let path = format!("{}input_activations.", fields.path());
        if let Some(inputs) = fields.object("input_activations", &path)? {
            let bits = inputs.size_opt("num_bits", 64)?.unwrap_or(8);
            let float = inputs.text("type")? == Some("float");
            if bits < 8 && !(float && bits == 4) {
                return Err(Options(inputs).unsupported(
                    "num_bits",
                    &format!("activations of {bits} bits"),
                    SUPPORTED,
                ));
            }
        }
        let path = format!("{}weights.", fields.path());
        let weights = fields.object("weights", &path)?.map(Options);
        let own = fields.text("format")?;
        let weights = match (weights, own.or(format)) {
            (None, _) | (_, Some("dense")) => None,
            (Some(weights), Some(format)) => {
                let unsupported = || {
                    let shown: String = format.chars().take(60).collect();
                    options.unsupported(
                        "format",
                        &format!("compressed-tensors in the format `{shown}`"),
                        SUPPORTED,
                    )
                };
                Some(Weights::parse(weights, format, unsupported)?)
            }
            (Some(_), None) => return Err(fields.problem("format", "is missing")),
        };
        Ok(Self { targets: targets(options, "targets")?, weights })
    }
}

impl Weights {
    fn parse(
        options: Options<'_>,
        format: &str,
        unsupported: impl Fn() -> crate::error::ModelError,
    ) -> Result<Self> {
        let known = [
            "num_bits",
            "type",
            "symmetric",
            "strategy",
            "group_size",
            "block_structure",
            "dynamic",
            "actorder",
            // How the scales were found, and in which type they are kept.
            "observer",
            "observer_kwargs",
            "scale_dtype",
            "zp_dtype",
        ];
        options.only(&known, SUPPORTED)?;
        options.none("dynamic", "quantizing weights while running", SUPPORTED)?;
        let fields = options.0;
        let float = match fields.text("type")?.unwrap_or("int") {
            "int" => false,
            "float" => true,
            other => {
                return Err(options.unsupported("type", &format!("weights of type `{other}`"), SUPPORTED));
            }
        };
        let (storage, served): (_, &[u64]) = match (format, float) {
            ("pack-quantized", false) => (Storage::Packed(0), &[4, 8]),
            ("int-quantized" | "naive-quantized", false) => (Storage::Int, &[4, 8]),
            ("float-quantized" | "naive-quantized", true) => (Storage::Float, &[8]),
            ("mxfp4-pack-quantized", true) => (Storage::Mxfp4, &[4]),
            ("nvfp4-pack-quantized", true) => (Storage::Nvfp4, &[4]),
            _ => return Err(unsupported()),
        };
        let bits = match fields.value("num_bits") {
            Some(_) => options.bits("num_bits", served, format)?,
            None => 8,
        };
        let storage = if let Storage::Packed(_) = storage { Storage::Packed(bits) } else { storage };
        let symmetric = fields.flag("symmetric")?.unwrap_or(true);
        if !symmetric && storage != Storage::Packed(4) {
            let what = format!("{format} with {bits} bits and zero points");
            return Err(options.unsupported("symmetric", &what, SUPPORTED));
        }
        let ordered = match fields.value("actorder").and_then(serde_json::Value::as_str) {
            Some(order) => ["group", "dynamic"].contains(&order),
            None => fields.flag("actorder")?.unwrap_or(false),
        };
        let strategy = Strategy::parse(options)?;
        match (storage, strategy) {
            (Storage::Mxfp4, Strategy::Group(32)) => {}
            (Storage::Nvfp4, Strategy::TensorGroup(nvfp4::GROUP)) => {}
            (Storage::Mxfp4, _) => {
                return Err(options.unsupported("group_size", "MXFP4 in other groups than 32", SUPPORTED));
            }
            (Storage::Nvfp4, _) => {
                let what = "NVFP4 without a scale of the matrix, or in other groups than 16";
                return Err(options.unsupported("strategy", what, SUPPORTED));
            }
            (_, Strategy::TensorGroup(_)) => {
                return Err(options.unsupported("strategy", "the strategy `tensor_group`", SUPPORTED));
            }
            (Storage::Packed(_) | Storage::Int, Strategy::Block(_)) => {
                return Err(options.unsupported("strategy", "integers in blocks", SUPPORTED));
            }
            (Storage::Packed(_), Strategy::Tensor) if !symmetric => {
                return Err(options.unsupported("strategy", "one zero point for a matrix", SUPPORTED));
            }
            _ => {}
        }
        Ok(Self { storage, strategy, symmetric, ordered })
    }

    fn plan(self, module: &str, shape: [usize; 2], pieces: &Pieces<'_>) -> Result<Matrix> {
        let [rows, cols] = shape;
        let name = |part: &str| format!("{module}.{part}");
        let group = self.strategy.group(cols);
        let count = cols.div_ceil(group);
        let (packed, plain) = (name("weight_packed"), name("weight"));
        let need = |name: &str, element, width| pieces.need(name, &[element], &[&[rows, width]]);
        let (kind, piece, packing) = match self.storage {
            Storage::Packed(bits) => {
                let words = (cols * bits as usize).div_ceil(32);
                let (kind, packing) = match (bits, self.symmetric) {
                    (4, true) => (Kind::Int4, Packing::Nibbles(4 * words)),
                    (4, false) => (Kind::Uint4, Packing::Nibbles(4 * words)),
                    _ => (Kind::Int8, Packing::Raised(4 * words)),
                };
                (kind, need(&packed, Element::I32, words)?, packing)
            }
            Storage::Int => (Kind::Int8, need(&plain, Element::I8, cols)?, Packing::Bytes(cols)),
            Storage::Float => (Kind::Fp8, need(&plain, Element::E4M3, cols)?, Packing::Bytes(cols)),
            Storage::Mxfp4 => {
                let row = cols.div_ceil(2);
                (Kind::Fp8, need(&packed, Element::U8, row)?, Packing::Nibbles(row))
            }
            Storage::Nvfp4 => {
                return nvfp4::plan(nvfp4::Form::CompressedTensors, module, shape, pieces);
            }
        };
        let mut unused: Vec<Piece> = ["input_scale", "input_zero_point"]
            .iter()
            .filter_map(|part| pieces.unused(&name(part)))
            .collect();
        if let Storage::Packed(_) = self.storage {
            unused.push(shape_piece(&name("weight_shape"), shape, pieces)?);
        }
        let mut format = match self.storage {
            Storage::Packed(_) if !self.symmetric => format(kind, group, shape, &piece.name, pieces)?,
            _ => blocks(kind, group.min(cols), cols, &piece.name, pieces)?,
        };
        let mut elements = Element::FLOATS;
        if self.storage == Storage::Mxfp4 {
            (format, elements) = (BlockFormat::MXFP4, &[Element::U8]);
        }
        let zero = name("weight_zero_point");
        let zeros = match self.symmetric {
            true => {
                unused.extend(zero_piece(&zero, pieces)?);
                Zeros::Implied
            }
            false => Zeros::Down(pieces.need(&zero, &[Element::I32], &[&[rows / 8, count]])?),
        };
        let g_idx = name("weight_g_idx");
        let groups = match self.ordered || pieces.has(&g_idx) {
            true => Some(pieces.need(&g_idx, &[Element::I32], &[&[cols]])?),
            false => None,
        };
        let scales = self.strategy.scales(&name("weight_scale"), elements, shape, pieces)?;
        Ok(Matrix {
            shape,
            format,
            codes: Codes { piece, packing },
            scales,
            whole: None,
            zeros,
            group,
            groups,
            every: Every::ALL,
            unused,
        })
    }
}

impl Strategy {
    fn parse(options: Options<'_>) -> Result<Self> {
        let fields = options.0;
        let group = options.group("group_size")?;
        match (fields.text("strategy")?, group) {
            (Some("tensor"), _) => Ok(Self::Tensor),
            (Some("channel"), _) => Ok(Self::Channel),
            (Some("group"), Some(group)) | (None, Some(group)) => Ok(Self::Group(group)),
            (Some("tensor_group"), Some(group)) => Ok(Self::TensorGroup(group)),
            (Some("group" | "tensor_group"), None) => Err(fields.problem("group_size", "is missing")),
            (Some("block"), _) => match options.block("block_structure")? {
                Some(block) => Ok(Self::Block(block)),
                None => Err(fields.problem("block_structure", "is missing")),
            },
            // As compressed-tensors infers it: -1 is one a row, and nothing one for all.
            (None, None) if fields.value("group_size").is_some() => Ok(Self::Channel),
            (None, None) => Ok(Self::Tensor),
            (Some(other), _) => {
                let shown: String = other.chars().take(60).collect();
                Err(options.unsupported("strategy", &format!("the strategy `{shown}`"), SUPPORTED))
            }
        }
    }

    /// Columns that share a scale.
    fn group(self, cols: usize) -> usize {
        match self {
            Self::Tensor | Self::Channel => cols,
            Self::Group(group) | Self::TensorGroup(group) | Self::Block([_, group]) => group,
        }
    }

    fn scales(
        self,
        name: &str,
        elements: &[Element],
        shape: [usize; 2],
        pieces: &Pieces<'_>,
    ) -> Result<Scales> {
        let [rows, cols] = shape;
        let count = cols.div_ceil(self.group(cols));
        let need = |shapes: &[&[usize]]| pieces.need(name, elements, shapes);
        Ok(match self {
            Self::Tensor => {
                Scales { piece: need(&[&[], &[1], &[1, 1]])?, row_div: 1, row_stride: 0, group_stride: 0 }
            }
            Self::Channel => {
                Scales { piece: need(&[&[rows, 1], &[rows]])?, row_div: 1, row_stride: 1, group_stride: 0 }
            }
            Self::Group(_) | Self::TensorGroup(_) => {
                Scales { piece: need(&[&[rows, count]])?, row_div: 1, row_stride: count, group_stride: 1 }
            }
            Self::Block([tall, _]) => {
                let piece = need(&[&[rows.div_ceil(tall), count]])?;
                Scales { piece, row_div: tall, row_stride: count, group_stride: 1 }
            }
        })
    }
}

/// `weight_shape` must say what config.json says.
fn shape_piece(name: &str, shape: [usize; 2], pieces: &Pieces<'_>) -> Result<Piece> {
    let piece = pieces.need(name, &[Element::I64, Element::I32], &[&[2]])?;
    let bytes = piece.bytes(pieces.shards)?;
    let sizes: Vec<i64> = match piece.element {
        Element::I32 => {
            bytes.as_chunks::<4>().0.iter().map(|size| i64::from(i32::from_le_bytes(*size))).collect()
        }
        _ => bytes.as_chunks::<8>().0.iter().map(|size| i64::from_le_bytes(*size)).collect(),
    };
    if sizes != shape.map(|size| size as i64) {
        return Err(pieces.problem(name, format!("says {sizes:?}, expected {shape:?} from config.json")));
    }
    Ok(piece)
}

/// Zero points of a symmetric quantization, which older versions wrote: all zero.
fn zero_piece(name: &str, pieces: &Pieces<'_>) -> Result<Option<Piece>> {
    let Some(piece) = pieces.unused(name) else { return Ok(None) };
    match piece.bytes(pieces.shards)?.iter().all(|byte| *byte == 0) {
        true => Ok(Some(piece)),
        false => Err(pieces.problem(name, "holds zero points, but the quantization_config says symmetric")),
    }
}
