//! FP8 in e4m3, of which every value is `scale * code`.
//!
//! | published by | codes | scales |
//! |---|---|---|
//! | DeepSeek, Qwen (`fp8`) | `weight` `[rows, columns]` | `weight_scale_inv`, one for each block of `weight_block_size`, or a single one (also `weight_scale`) |
//! | transformers (`fp8`), all experts in one tensor | `X` `[experts, rows, columns]` | `X_scale_inv`, likewise `[experts, ...]`; a single one for an expert's gates and for what they gate |
//! | Meta (`fbgemm_fp8`), NVIDIA (ModelOpt's FP8_PER_CHANNEL_PER_TOKEN) | `weight` `[rows, columns]` | `weight_scale`, one for each row |
//! | NVIDIA (ModelOpt's FP8_PB_WO) | `weight` `[rows, columns]` | `weight_scale` `[rows / 128, 1, columns / 128, 1]`, or as DeepSeek |
//! | transformers (`fbgemm_fp8`), all experts of Llama 4 in one tensor | `X` `[experts, columns, rows]` | `X_scale`, likewise |
//! | llm-compressor (compressed-tensors), all experts of Granite in one tensor | `X` `[experts, rows, columns]` | `X_scale` `[experts, rows, 1]` |
//!
//! Despite its name `scale_inv` is multiplied (transformers, `integrations/finegrained_fp8.py`).

use super::Kind;
use super::gptq::blocks;
use super::matrix::{Codes, Matrix, Packing, Scales, Zeros};
use super::options::Options;
use super::piece::{Element, Piece, Pieces};
use crate::checkpoint::experts::Every;
use crate::error::Result;

const KNOWN: &[&str] = &[
    "quant_method",
    "activation_scheme",
    "fmt",
    "weight_block_size",
    "scale_fmt",
    // The tensors say which modules are quantized.
    "modules_to_not_convert",
    "ignored_layers",
    "dequantize",
    "expert_dtype",
];
/// Of `fbgemm_fp8`. The bound is of activations, which Folio does not round so.
const KNOWN_OF_ROWS: &[&str] = &["quant_method", "modules_to_not_convert", "activation_scale_ub"];

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fp8 {
    scaled: Scaled,
}

/// What has a scale.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Scaled {
    Matrix,
    Row,
    /// So many rows and columns.
    Block([usize; 2]),
}

impl Fp8 {
    /// One scale for each matrix.
    pub const OF_MATRICES: Self = Self { scaled: Scaled::Matrix };
    /// One scale for each row.
    pub const OF_ROWS: Self = Self { scaled: Scaled::Row };
    /// One scale for each 128 rows and columns.
    pub const OF_BLOCKS: Self = Self { scaled: Scaled::Block([128, 128]) };

    pub fn parse(options: Options<'_>) -> Result<Self> {
        const SUPPORTED: &str = "supported: FP8 weights in e4m3, with one scale or in blocks";
        options.only(KNOWN, SUPPORTED)?;
        let fields = options.0;
        let names = [
            ("fmt", &["e4m3", "float8_e4m3fn"][..]),
            ("activation_scheme", &["dynamic", "static"]),
            ("scale_fmt", &["float", "ue8m0"]),
        ];
        for (name, served) in names {
            if let Some(other) = fields.text(name)?.filter(|value| !served.contains(value)) {
                return Err(options.unsupported(name, &format!("FP8 with `{other}`"), SUPPORTED));
            }
        }
        let block = options.block("weight_block_size")?;
        Ok(Self { scaled: block.map_or(Scaled::Matrix, Scaled::Block) })
    }

    /// Of `fbgemm_fp8`: one scale for each row.
    pub fn parse_of_rows(options: Options<'_>) -> Result<Self> {
        options.only(KNOWN_OF_ROWS, "supported: FP8 weights in e4m3 with a scale for each row")?;
        Ok(Self::OF_ROWS)
    }

    /// The matrix of a module, unless it is stored plain.
    pub fn plan(&self, module: &str, shape: [usize; 2], pieces: &Pieces<'_>) -> Result<Option<Matrix>> {
        let name = |part: &str| format!("{module}.{part}");
        let codes = name("weight");
        match pieces.element(&codes) {
            Some(Ok(Element::Plain(_))) | None => return Ok(None),
            _ => {}
        }
        let [rows, cols] = shape;
        let piece = pieces.need(&codes, &[Element::E4M3], &[&[rows, cols]])?;
        let (scales, group) = match self.scaled {
            Scaled::Block([tall, wide]) => {
                let (down, across) = (rows.div_ceil(tall), cols.div_ceil(wide));
                let (inverse, scale) = (name("weight_scale_inv"), name("weight_scale"));
                let scale = if pieces.has(&scale) && !pieces.has(&inverse) { scale } else { inverse };
                let shapes: [&[usize]; 2] = [&[down, across], &[down, 1, across, 1]];
                let piece = pieces.need(&scale, Element::SCALES, &shapes)?;
                (Scales { piece, row_div: tall, row_stride: across, group_stride: 1 }, wide)
            }
            Scaled::Row => {
                let piece = pieces.need(&name("weight_scale"), Element::FLOATS, &[&[rows, 1], &[rows]])?;
                (Scales { piece, row_div: 1, row_stride: 1, group_stride: 0 }, cols)
            }
            Scaled::Matrix => {
                let inverse = name("weight_scale_inv");
                let scale = if pieces.has(&inverse) { inverse } else { name("weight_scale") };
                let piece = pieces.need(&scale, Element::SCALES, &[&[], &[1], &[1, 1]])?;
                (Scales { piece, row_div: 1, row_stride: 0, group_stride: 0 }, cols)
            }
        };
        let unused = ["input_scale", "activation_scale", "input_scale_ub"];
        let unused = unused.into_iter().filter_map(|part| pieces.unused(&name(part))).collect();
        let codes = Codes { piece, packing: Packing::Bytes(cols) };
        matrix(shape, codes, (scales, group), unused, pieces).map(Some)
    }

    /// All experts, `[experts * rows, cols]` out of one tensor `[experts, rows, cols]`, unless it is stored plain.
    pub fn plan_experts(
        &self,
        stored: &str,
        [experts, rows, cols]: [usize; 3],
        pieces: &Pieces<'_>,
    ) -> Result<Option<Matrix>> {
        let Some(Ok(Element::E4M3)) = pieces.element(stored) else { return Ok(None) };
        let piece = pieces.need(stored, &[Element::E4M3], &[&[experts, rows, cols]])?;
        let name = format!("{stored}_scale_inv");
        let (scales, group) = match self.scaled {
            Scaled::Block([tall, wide]) if rows.is_multiple_of(tall) => {
                let (down, across) = (rows / tall, cols.div_ceil(wide));
                let piece = pieces.need(&name, Element::SCALES, &[&[experts, down, across]])?;
                (Scales { piece, row_div: tall, row_stride: across, group_stride: 1 }, wide)
            }
            Scaled::Block([tall, _]) => {
                let problem = format!("has {rows} rows an expert, no whole blocks of {tall}");
                return Err(pieces.problem(stored, problem));
            }
            Scaled::Matrix => {
                let shapes: [&[usize]; 3] = [&[experts], &[experts, 1, 1], &[experts, 2, 1]];
                let piece = pieces.need(&name, Element::SCALES, &shapes)?;
                let of_an_expert = piece.shape.get(1).copied().unwrap_or(1);
                if !rows.is_multiple_of(of_an_expert) {
                    return Err(pieces.problem(&name, format!("has two scales for {rows} rows")));
                }
                (Scales { piece, row_div: rows / of_an_expert, row_stride: 1, group_stride: 0 }, cols)
            }
            Scaled::Row => {
                let name = format!("{stored}_scale");
                let piece = pieces.need(&name, Element::FLOATS, &[&[experts, rows, 1]])?;
                (Scales { piece, row_div: 1, row_stride: 1, group_stride: 0 }, cols)
            }
        };
        let unused = pieces.unused(&format!("{stored}_activation_scale")).into_iter().collect();
        let codes = Codes { piece, packing: Packing::Bytes(cols) };
        matrix([experts * rows, cols], codes, (scales, group), unused, pieces).map(Some)
    }

    /// Of all experts some rows, `[experts * rows / step, cols]` out of one tensor `[experts, cols, rows]`, unless it is stored plain.
    pub fn plan_turned(
        &self,
        stored: &str,
        [experts, rows, cols]: [usize; 3],
        every: Every,
        pieces: &Pieces<'_>,
    ) -> Result<Option<Matrix>> {
        let Some(Ok(Element::E4M3)) = pieces.element(stored) else { return Ok(None) };
        if self.scaled != Scaled::Row || (every.in_turn && every.step > 1) {
            let problem = "is in FP8 and turned; that is supported as Llama 4 has it, with a scale for each row (fbgemm_fp8)";
            return Err(pieces.problem(stored, problem));
        }
        let piece = pieces.need(stored, &[Element::E4M3], &[&[experts, cols, rows]])?;
        let shapes: [&[usize]; 2] = [&[experts, 1, rows], &[experts, rows, 1]];
        let scales = pieces.need(&format!("{stored}_scale"), Element::FLOATS, &shapes)?;
        let scales = Scales { piece: scales, row_div: 1, row_stride: 1, group_stride: 0 };
        let codes = Codes { piece, packing: Packing::Turned { experts } };
        let shape = [experts * rows / every.step, cols];
        let matrix = matrix(shape, codes, (scales, cols), Vec::new(), pieces)?;
        Ok(Some(Matrix { every, ..matrix }))
    }
}

/// What all of them have in common. With the scales: the columns that share one.
fn matrix(
    shape: [usize; 2],
    codes: Codes,
    (scales, group): (Scales, usize),
    unused: Vec<Piece>,
    pieces: &Pieces<'_>,
) -> Result<Matrix> {
    let cols = shape[1];
    // A block wider than the matrix is as wide as the matrix.
    let format = blocks(Kind::Fp8, group.min(cols), cols, &codes.piece.name, pieces)?;
    Ok(Matrix {
        shape,
        format,
        codes,
        scales,
        whole: None,
        zeros: Zeros::Implied,
        group,
        groups: None,
        every: Every::ALL,
        unused,
    })
}
