//! What a file of packed weights says about the model in it.
//!
//! Owns: the words of that description, to and from JSON, and the ids of weights that were loaded before. Must never: know
//! how weights are packed.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use crate::backend::DType;
use crate::checkpoint::json::{Fields, parse_object};
use crate::error::{ModelError, Result};
use crate::program::{MatrixId, VectorId};
use crate::quant::Encoding;
use crate::weights::{Load, WeightSpec};

/// Facts that loading learned from the original tensors.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PackedAbout {
    /// What exactly it was made from; compared, and otherwise without meaning.
    pub made_from: String,
    /// How the weights were quantized while loading ("q8", "q4"), if they were.
    pub quantized: Option<String>,
    pub parameters: u64,
    /// Encoding of most of the weights, as stored in the original.
    pub weight_encoding: Encoding,
    /// The KV cache's element type, unless another is asked for.
    pub kv_dtype: DType,
    /// Digests of the original tensors, by name.
    pub tensors: BTreeMap<String, [u8; 32]>,
}

impl PackedAbout {
    pub fn to_bytes(&self) -> Vec<u8> {
        let hex = |digest: &[u8; 32]| digest.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
        let tensors: serde_json::Map<String, Value> =
            self.tensors.iter().map(|(name, digest)| (name.clone(), hex(digest).into())).collect();
        let about = json!({
            "made_from": self.made_from,
            "quantized": self.quantized,
            "parameters": self.parameters,
            "weight_encoding": self.weight_encoding.to_string(),
            "kv_dtype": Encoding::Plain(self.kv_dtype).to_string(),
            "tensors": tensors,
        });
        about.to_string().into_bytes()
    }

    /// `file` is for messages.
    pub fn parse(file: &str, bytes: &[u8]) -> Result<Self> {
        let map = parse_object(file, bytes)?;
        let fields = Fields::new(file, &map);
        let text = |name: &str| fields.text(name)?.ok_or_else(|| fields.problem(name, "is missing"));
        let encoding = |name: &str| {
            let value = text(name)?;
            Encoding::named(value).ok_or_else(|| fields.problem(name, format!("is {value}, no encoding")))
        };
        let kv_dtype = encoding("kv_dtype")?;
        let tensors = fields.object("tensors", "tensors.")?;
        let names =
            map.get("tensors").and_then(Value::as_object).into_iter().flat_map(|tensors| tensors.keys());
        let mut digests = BTreeMap::new();
        for name in names {
            let text = tensors.and_then(|tensors| tensors.text(name).ok()?);
            let digest = text.and_then(unhex).ok_or_else(|| damaged(file, name))?;
            digests.insert(name.clone(), digest);
        }
        Ok(Self {
            made_from: text("made_from")?.to_owned(),
            quantized: fields.text("quantized")?.map(str::to_owned),
            parameters: fields.size("parameters", usize::MAX)? as u64,
            weight_encoding: encoding("weight_encoding")?,
            kv_dtype: kv_dtype.plain().ok_or_else(|| fields.problem("kv_dtype", "is no plain type"))?,
            tensors: digests,
        })
    }
}

fn damaged(file: &str, tensor: &str) -> ModelError {
    let problem = format!("tensor `{tensor}` has no digest");
    ModelError::Damaged { file: file.to_owned(), problem }
}

fn unhex(text: &str) -> Option<[u8; 32]> {
    let mut digest = [0; 32];
    let digits = text.as_bytes();
    if digits.len() != 64 || !digits.iter().all(u8::is_ascii_hexdigit) {
        return None;
    }
    for (byte, pair) in digest.iter_mut().zip(0..32) {
        *byte = u8::from_str_radix(text.get(2 * pair..2 * pair + 2)?, 16).ok()?;
    }
    Some(digest)
}

/// Gives ids in the order of loading, for weights that are loaded already.
#[derive(Default)]
pub(crate) struct Ids {
    pub(crate) matrices: u32,
    pub(crate) vectors: u32,
}

impl Load<ModelError> for Ids {
    fn matrix(&mut self, _: &WeightSpec) -> Result<MatrixId> {
        self.matrices += 1;
        Ok(MatrixId(self.matrices - 1))
    }

    fn vector(&mut self, _: &WeightSpec) -> Result<VectorId> {
        self.vectors += 1;
        Ok(VectorId(self.vectors - 1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::quant::BlockFormat;

    fn about() -> PackedAbout {
        PackedAbout {
            made_from: "key".into(),
            quantized: Some("q4".into()),
            parameters: 12,
            weight_encoding: Encoding::Block(BlockFormat::Q4_K),
            kv_dtype: DType::BF16,
            tensors: [("a".to_owned(), [7; 32]), ("b".to_owned(), [255; 32])].into(),
        }
    }

    #[test]
    fn what_is_written_is_read_again() {
        for about in [about(), PackedAbout { quantized: None, tensors: BTreeMap::new(), ..about() }] {
            assert_eq!(PackedAbout::parse("f", &about.to_bytes()).expect("parses"), about);
        }
    }

    #[test]
    fn other_words_are_refused_by_name() {
        let text = String::from_utf8(about().to_bytes()).expect("text");
        for (from, to, named) in [
            ("Q4_K", "Q4_X", "weight_encoding"),
            ("BF16", "Q8_0", "kv_dtype"),
            ("made_from", "made", "made_from"),
            ("0707", "07", "`a`"),
            ("ffff", "fffg", "`b`"),
            ("{", "[", "f "),
        ] {
            assert!(text.contains(from), "{text}");
            let error = PackedAbout::parse("f", text.replacen(from, to, 1).as_bytes()).expect_err(to);
            assert!(error.to_string().contains(named), "{error}");
        }
    }

    #[test]
    fn encodings_are_found_by_their_names() {
        for format in BlockFormat::ALL {
            assert_eq!(Encoding::named(&format!("{format:?}")), Some(Encoding::Block(format)));
        }
        assert_eq!(Encoding::named("F16"), Some(Encoding::Plain(DType::F16)));
        assert_eq!(Encoding::named("f16"), None);
    }
}
