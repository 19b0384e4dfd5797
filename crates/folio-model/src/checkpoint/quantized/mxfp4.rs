//! MXFP4 as OpenAI publishes gpt-oss: only experts are quantized, all of a layer in `X_blocks` and `X_scales` (U8). A block is 16
//! bytes, neighbouring columns from the lowest nibble up, and has one exponent. Every other tensor is plain.

use super::matrix::{Codes, Matrix, Packing, Scales, Zeros};
use super::options::Options;
use super::piece::{Element, Pieces};
use crate::checkpoint::experts::Every;
use crate::checkpoint::shards::{Index, Shard};
use crate::error::Result;
use crate::quant::BlockFormat;

/// The tensors say which modules are quantized.
const KNOWN: &[&str] = &["quant_method", "modules_to_not_convert", "dequantize"];

pub fn parse(options: Options<'_>) -> Result<()> {
    options.only(KNOWN, "supported: MXFP4 experts as gpt-oss has them")
}

/// Some of the rows of all experts: `[experts * rows / step, cols]` out of tensors `[experts, rows, ...]`.
pub fn rows(
    (shards, index, location): (&[Shard], &Index, &str),
    (blocks, scales): (&str, &str),
    [experts, rows, cols]: [usize; 3],
    every: Every,
) -> Result<Matrix> {
    const WIDTH: usize = BlockFormat::MXFP4.values();
    let pieces = Pieces { shards, index, location };
    if !cols.is_multiple_of(WIDTH) {
        return Err(pieces.problem(blocks, format!("has rows of {cols} columns, no multiple of {WIDTH}")));
    }
    let count = cols / WIDTH;
    let codes = pieces.need(blocks, &[Element::U8], &[&[experts, rows, count, WIDTH / 2]])?;
    let scales = pieces.need(scales, &[Element::U8], &[&[experts, rows, count]])?;
    Ok(Matrix {
        shape: [experts * rows / every.step, cols],
        format: BlockFormat::MXFP4,
        codes: Codes { piece: codes, packing: Packing::Nibbles(cols / 2) },
        scales: Scales { piece: scales, row_div: 1, row_stride: count, group_stride: 1 },
        whole: None,
        zeros: Zeros::Implied,
        group: WIDTH,
        groups: None,
        every,
        unused: Vec::new(),
    })
}
