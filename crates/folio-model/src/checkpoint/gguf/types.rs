//! ggml's numbers for tensor types, and GGUF's for metadata values.

use crate::backend::DType;
use crate::quant::{BlockFormat, Encoding};

/// How a tensor of ggml type `number` is stored; else the type's name, for the sentence that refuses it.
pub fn encoding(number: u32) -> Result<Encoding, String> {
    match number {
        0 => return Ok(Encoding::Plain(DType::F32)),
        1 => return Ok(Encoding::Plain(DType::F16)),
        30 => return Ok(Encoding::Plain(DType::BF16)),
        _ => {}
    }
    if let Some(format) = BlockFormat::of_ggml().find(|format| format.ggml_type() == Some(number)) {
        return Ok(Encoding::Block(format));
    }
    let name = match number {
        4 => "Q4_2",
        5 => "Q4_3",
        9 => "Q8_1",
        15 => "Q8_K",
        24 => "I8",
        25 => "I16",
        26 => "I32",
        27 => "I64",
        28 => "F64",
        31 => "Q4_0_4_4",
        32 => "Q4_0_4_8",
        33 => "Q4_0_8_8",
        36 => "IQ4_NL_4_4",
        37 => "IQ4_NL_4_8",
        38 => "IQ4_NL_8_8",
        41 => "Q1_0",
        _ => return Err(format!("number {number}, which this version does not know")),
    };
    Err(name.to_owned())
}

/// Type of a metadata value or of an array's elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    U8,
    I8,
    U16,
    I16,
    U32,
    I32,
    F32,
    Bool,
    Text,
    Array,
    U64,
    I64,
    F64,
}

impl Kind {
    pub fn from_number(number: u32) -> Option<Self> {
        const ALL: [Kind; 13] = [
            Kind::U8,
            Kind::I8,
            Kind::U16,
            Kind::I16,
            Kind::U32,
            Kind::I32,
            Kind::F32,
            Kind::Bool,
            Kind::Text,
            Kind::Array,
            Kind::U64,
            Kind::I64,
            Kind::F64,
        ];
        ALL.get(number as usize).copied()
    }

    /// Bytes of a value, where every value has the same number.
    pub const fn size(self) -> Option<usize> {
        match self {
            Kind::U8 | Kind::I8 | Kind::Bool => Some(1),
            Kind::U16 | Kind::I16 => Some(2),
            Kind::U32 | Kind::I32 | Kind::F32 => Some(4),
            Kind::U64 | Kind::I64 | Kind::F64 => Some(8),
            Kind::Text | Kind::Array => None,
        }
    }

    /// As it reads in "is a string, expected ...".
    pub const fn name(self) -> &'static str {
        match self {
            Kind::F32 | Kind::F64 => "a number",
            Kind::Bool => "a boolean",
            Kind::Text => "a string",
            Kind::Array => "an array",
            _ => "an integer",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_ggmls() {
        assert_eq!(encoding(30), Ok(Encoding::Plain(DType::BF16)));
        assert_eq!(encoding(14), Ok(Encoding::Block(BlockFormat::Q6_K)));
        assert_eq!(encoding(16), Ok(Encoding::Block(BlockFormat::IQ2_XXS)));
        assert_eq!(encoding(40), Ok(Encoding::Block(BlockFormat::NVFP4)));
        assert_eq!(encoding(15), Err("Q8_K".into()));
        assert!(encoding(99).unwrap_err().contains("99"));
        // Every number is one thing only.
        let known = (0..64).filter(|number| encoding(*number).is_ok()).count();
        assert_eq!(known, 3 + BlockFormat::of_ggml().count());
        assert_eq!(Kind::from_number(9), Some(Kind::Array));
        assert_eq!(Kind::from_number(12), Some(Kind::F64));
        assert_eq!(Kind::from_number(13), None);
    }
}
