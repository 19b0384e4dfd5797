//! The tensors that a quantized matrix is made of.

use std::ops::Range;

use half::{bf16, f16};

use crate::backend::DType;
use crate::checkpoint::shards::{Entry, Index, Shard};
use crate::error::{ModelError, Result};
use crate::quant::e4m3_in_256ths;

/// Element type of a stored tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Element {
    I64,
    I32,
    I8,
    U8,
    E4M3,
    E8M0,
    Plain(DType),
}

impl Element {
    pub const FLOATS: &[Element] =
        &[Element::Plain(DType::F16), Element::Plain(DType::BF16), Element::Plain(DType::F32)];
    pub const SCALES: &[Element] =
        &[Element::Plain(DType::F16), Element::Plain(DType::BF16), Element::Plain(DType::F32), Element::E8M0];

    fn of(
        encoding: &std::result::Result<crate::quant::Encoding, String>,
    ) -> std::result::Result<Self, String> {
        match encoding {
            Ok(encoding) => encoding.plain().map(Element::Plain).ok_or_else(|| encoding.to_string()),
            Err(name) => match name.as_str() {
                "I64" => Ok(Element::I64),
                "I32" => Ok(Element::I32),
                "I8" => Ok(Element::I8),
                "U8" => Ok(Element::U8),
                "F8_E4M3" => Ok(Element::E4M3),
                "F8_E8M0" => Ok(Element::E8M0),
                other => Err(other.to_owned()),
            },
        }
    }

    fn name(self) -> String {
        match self {
            Element::E4M3 => "F8_E4M3".to_owned(),
            Element::E8M0 => "F8_E8M0".to_owned(),
            Element::Plain(dtype) => format!("{dtype:?}"),
            other => format!("{other:?}"),
        }
    }
}

/// One stored tensor. Invariant: its element and shape were asked for, and fit its bytes.
#[derive(Clone, Debug, PartialEq)]
pub struct Piece {
    pub name: String,
    pub shard: usize,
    pub element: Element,
    pub shape: Vec<usize>,
    pub range: Range<usize>,
}

impl Piece {
    pub fn bytes<'a>(&self, shards: &'a [Shard]) -> Result<&'a [u8]> {
        let bytes = shards.get(self.shard).and_then(|shard| shard.storage.bytes().get(self.range.clone()));
        bytes.ok_or_else(|| self.problem(shards, "lies outside of its file"))
    }

    pub fn problem(&self, shards: &[Shard], problem: impl Into<String>) -> ModelError {
        let file = shards.get(self.shard).map(|shard| shard.file.clone()).unwrap_or_default();
        ModelError::Tensor { file, tensor: self.name.clone(), problem: problem.into() }
    }

    /// The values of a tensor of floats, in f32.
    pub fn floats(&self, shards: &[Shard]) -> Result<Vec<f32>> {
        let bytes = self.bytes(shards)?;
        let pairs = || bytes.as_chunks::<2>().0.iter();
        Ok(match self.element {
            Element::Plain(DType::F16) => pairs().map(|pair| f16::from_le_bytes(*pair).to_f32()).collect(),
            Element::Plain(DType::BF16) => pairs().map(|pair| bf16::from_le_bytes(*pair).to_f32()).collect(),
            Element::Plain(DType::F32) => {
                bytes.as_chunks::<4>().0.iter().map(|four| f32::from_le_bytes(*four)).collect()
            }
            // 2^(e - 127): the smallest is subnormal, 255 is not a number.
            Element::E8M0 => bytes
                .iter()
                .map(|e| match *e {
                    0 => f32::from_bits(0x0040_0000),
                    255 => f32::NAN,
                    e => f32::from_bits(u32::from(e) << 23),
                })
                .collect(),
            Element::E4M3 => bytes
                .iter()
                .map(|code| match code & 0x7f {
                    0x7f => f32::NAN,
                    _ => e4m3_in_256ths(*code).to_f32() * 256.0,
                })
                .collect(),
            other => return Err(self.problem(shards, format!("has dtype {}, expected floats", other.name()))),
        })
    }

    /// The values of a tensor of I32.
    pub fn integers<'a>(&self, shards: &'a [Shard]) -> Result<impl Iterator<Item = i32> + use<'a>> {
        Ok(self.bytes(shards)?.as_chunks::<4>().0.iter().map(|four| i32::from_le_bytes(*four)))
    }
}

/// The tensors of the files, by name.
#[derive(Clone, Copy)]
pub struct Pieces<'a> {
    pub shards: &'a [Shard],
    pub index: &'a Index,
    /// The checkpoint, for messages.
    pub location: &'a str,
}

impl Pieces<'_> {
    pub fn has(&self, name: &str) -> bool {
        self.index.contains_key(name)
    }

    /// The number of the shard that has `name`, and its entry there.
    fn find(&self, name: &str) -> Option<(usize, &Entry)> {
        let number = *self.index.get(name)?;
        Some((number, self.shards.get(number)?.entries.get(name)?))
    }

    /// What `name` is stored as, if it is there.
    pub fn element(&self, name: &str) -> Option<std::result::Result<Element, String>> {
        self.find(name).map(|(_, entry)| Element::of(&entry.encoding))
    }

    /// The shape of `name`, if it is there.
    pub fn shape(&self, name: &str) -> Option<&[usize]> {
        self.find(name).map(|(_, entry)| entry.shape.as_slice())
    }

    /// What the file calls `name`; itself if it is not there.
    pub fn stored_name<'a>(&'a self, name: &'a str) -> &'a str {
        self.find(name).map_or(name, |(_, entry)| entry.stored_name.as_str())
    }

    pub fn problem(&self, name: &str, problem: impl Into<String>) -> ModelError {
        let shard = self.index.get(name).and_then(|number| self.shards.get(*number));
        let file = shard.map_or_else(|| self.location.to_owned(), |shard| shard.file.clone());
        ModelError::Tensor { file, tensor: name.to_owned(), problem: problem.into() }
    }

    /// The tensor, which must be there, be of one of `elements` and have one of `shapes`.
    pub fn need(&self, name: &str, elements: &[Element], shapes: &[&[usize]]) -> Result<Piece> {
        let Some((shard, entry)) = self.find(name) else {
            return Err(ModelError::MissingTensor {
                tensor: name.to_owned(),
                checkpoint: self.location.to_owned(),
            });
        };
        let expected = || elements.iter().map(|element| element.name()).collect::<Vec<_>>().join(" or ");
        let element = match Element::of(&entry.encoding) {
            Ok(element) if elements.contains(&element) => element,
            Ok(other) => {
                return Err(
                    self.problem(name, format!("has dtype {}, expected {}", other.name(), expected()))
                );
            }
            Err(other) => {
                return Err(self.problem(name, format!("has dtype {other}, expected {}", expected())));
            }
        };
        if !shapes.contains(&entry.shape.as_slice()) {
            let expected = shapes.iter().map(|shape| format!("{shape:?}")).collect::<Vec<_>>().join(" or ");
            let problem = format!(
                "has shape {:?}, expected {expected} from config.json and the way it is quantized",
                entry.shape
            );
            return Err(self.problem(name, problem));
        }
        Ok(Piece {
            name: name.to_owned(),
            shard,
            element,
            shape: entry.shape.clone(),
            range: entry.range.clone(),
        })
    }

    /// A tensor that is taken if it is there, and has no effect: whatever it is.
    pub fn unused(&self, name: &str) -> Option<Piece> {
        let shard = *self.index.get(name)?;
        let entry = self.shards.get(shard)?.entries.get(name)?;
        let element = Element::U8;
        Some(Piece {
            name: name.to_owned(),
            shard,
            element,
            shape: entry.shape.clone(),
            range: entry.range.clone(),
        })
    }
}
