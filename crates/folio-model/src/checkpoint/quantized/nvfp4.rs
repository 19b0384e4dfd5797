//! NVFP4: codes of E2M1, neighbouring columns in a byte from the lowest nibble up, a scale in e4m3 for each 16 columns, and one F32 for
//! the scales of a matrix.
//!
//! | form | codes, U8 `[rows, columns / 2]` | scales `[rows, columns / 16]` | of the matrix | value |
//! |---|---|---|---|---|
//! | compressed-tensors | `weight_packed` | `weight_scale` | `weight_global_scale` | `code * (scale / global)` |
//! | ModelOpt | `weight` | `weight_scale` | `weight_scale_2` | `code * (scale * global)` |
//!
//! Each operation is rounded to f32, as compressed-tensors (`quantization/lifecycle/forward.py`) and ModelOpt (`qtensor/nvfp4_tensor.py`)
//! do it. Quotients and products of a scale are no e4m3 times an f32 that both could share, so blocks have them as f32.

use super::matrix::{Codes, Matrix, Packing, Scales, Whole, Zeros};
use super::piece::{Element, Pieces};
use crate::backend::DType;
use crate::checkpoint::experts::Every;
use crate::error::Result;
use crate::quant::BlockFormat;

/// Columns that share a scale.
pub const GROUP: usize = 16;

/// Whose names and scales they are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    CompressedTensors,
    ModelOpt,
}

/// The matrix of a module that is stored so.
pub fn plan(form: Form, module: &str, shape: [usize; 2], pieces: &Pieces<'_>) -> Result<Matrix> {
    const WIDTH: usize = BlockFormat::Fp4x16.values();
    let [rows, cols] = shape;
    let name = |part: &str| format!("{module}.{part}");
    let (codes, whole, of_inputs) = match form {
        Form::CompressedTensors => ("weight_packed", "weight_global_scale", "input_global_scale"),
        Form::ModelOpt => ("weight", "weight_scale_2", "input_scale"),
    };
    if !cols.is_multiple_of(WIDTH) {
        return Err(
            pieces.problem(&name(codes), format!("has rows of {cols} columns, no multiple of {WIDTH}"))
        );
    }
    let count = cols / GROUP;
    let piece = pieces.need(&name(codes), &[Element::U8], &[&[rows, cols / 2]])?;
    let scales = pieces.need(&name("weight_scale"), &[Element::E4M3], &[&[rows, count]])?;
    let whole = pieces.need(&name(whole), &[Element::Plain(DType::F32)], &[&[], &[1]])?;
    Ok(Matrix {
        shape,
        format: BlockFormat::Fp4x16,
        codes: Codes { piece, packing: Packing::Nibbles(cols / 2) },
        scales: Scales { piece: scales, row_div: 1, row_stride: count, group_stride: 1 },
        whole: Some(match form {
            Form::CompressedTensors => Whole::Divides(whole),
            Form::ModelOpt => Whole::Multiplies(whole),
        }),
        zeros: Zeros::Implied,
        group: GROUP,
        groups: None,
        every: Every::ALL,
        unused: pieces.unused(&name(of_inputs)).into_iter().collect(),
    })
}
