//! FP8 as DeepSeek and Qwen publish it: `weight` in e4m3 `[rows, columns]` and `weight_scale_inv`, one scale for each block of
//! `weight_block_size`, or a single one (`weight_scale_inv` or `weight_scale`) where there are no blocks. `x = scale * code`:
//! despite its name the scale is multiplied (transformers, `integrations/finegrained_fp8.py`).

use super::Kind;
use super::gptq::blocks;
use super::matrix::{Codes, Matrix, Packing, Scales, Zeros};
use super::options::Options;
use super::piece::{Element, Pieces};
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

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fp8 {
    /// Rows and columns of a block; `None`: one scale for a matrix.
    block: Option<[usize; 2]>,
}

impl Fp8 {
    /// One scale for each matrix.
    pub const OF_MATRICES: Self = Self { block: None };

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
        Ok(Self { block: options.block("weight_block_size")? })
    }

    pub fn plan(&self, module: &str, shape: [usize; 2], pieces: &Pieces<'_>) -> Result<Option<Matrix>> {
        let name = |part: &str| format!("{module}.{part}");
        let codes = name("weight");
        match pieces.element(&codes) {
            Some(Ok(Element::Plain(_))) | None => return Ok(None),
            _ => {}
        }
        let [rows, cols] = shape;
        let piece = pieces.need(&codes, &[Element::E4M3], &[&[rows, cols]])?;
        let (scales, group) = match self.block {
            Some([tall, wide]) => {
                let (down, across) = (rows.div_ceil(tall), cols.div_ceil(wide));
                let piece = pieces.need(&name("weight_scale_inv"), Element::SCALES, &[&[down, across]])?;
                (Scales { piece, row_div: tall, row_stride: across, group_stride: 1 }, wide)
            }
            None => {
                let inverse = name("weight_scale_inv");
                let scale = if pieces.has(&inverse) { inverse } else { name("weight_scale") };
                let piece = pieces.need(&scale, Element::SCALES, &[&[], &[1], &[1, 1]])?;
                (Scales { piece, row_div: 1, row_stride: 0, group_stride: 0 }, cols)
            }
        };
        // A block wider than the matrix is as wide as the matrix.
        let format = blocks(Kind::Fp8, group.min(cols), cols, &codes, pieces)?;
        Ok(Some(Matrix {
            shape,
            format,
            codes: Codes { piece, packing: Packing::Bytes(cols) },
            scales,
            whole: None,
            zeros: Zeros::Implied,
            group,
            groups: None,
            every: Every::ALL,
            unused: ["input_scale", "activation_scale"]
                .iter()
                .filter_map(|part| pieces.unused(&name(part)))
                .collect(),
        }))
    }
}
