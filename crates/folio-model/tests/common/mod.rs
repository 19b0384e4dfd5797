//! Loading fixtures, whole and damaged.
#![allow(dead_code, reason = "each test binary uses its part of this module")]

pub mod gguf;
pub mod tensors;

use std::fs;
use std::path::Path;

use folio_model::backend::DType;
use folio_model::reference::ReferenceBackend;
use folio_model::testing::{Runner, fixture};
use folio_model::{Checkpoint, LoadOptions, LoadedModel, Model, ModelError};
use half::{bf16, f16};
use serde_json::Value;

pub fn options(max_model_len: Option<usize>) -> LoadOptions<'static> {
    LoadOptions {
        max_rows: 64,
        max_logit_rows: 8,
        max_model_len,
        kv_formats: DType::BF16.into(),
        block_tokens: 16,
        keeps_all: false,
        taps: None,
        progress: None,
    }
}

pub fn load(folder: &Path, max_model_len: Option<usize>) -> Result<LoadedModel, ModelError> {
    Model::load(&Checkpoint::open(folder)?, &mut ReferenceBackend::new(), options(max_model_len))
}

/// xorshift64*: enough to choose damage.
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    pub fn below(&mut self, limit: usize) -> usize {
        (self.next() % limit as u64) as usize
    }
}

const HOSTILE: &[&str] = &[
    "0",
    "-1",
    "1e308",
    "18446744073709551615",
    "18446744073709551608",
    "9223372036854775808",
    "4294967296",
    "null",
    "true",
    "\"\"",
    "[]",
    "{}",
    "[[[[",
    "\\u0000",
    "\"F32\"",
    "\"BF16\"",
    "__metadata__",
    "[0,0]",
    "[4294967296,4294967296]",
    "1.5",
];

/// Damage of a few bytes, or of a value.
pub fn mutate(random: &mut Random, bytes: &[u8]) -> Vec<u8> {
    let mut mutated = bytes.to_vec();
    for _ in 0..=random.below(3) {
        if mutated.is_empty() {
            break;
        }
        let at = random.below(mutated.len());
        match random.below(6) {
            0 => mutated[at] ^= 1 << random.below(8),
            1 => mutated.truncate(at),
            2 => {
                mutated.remove(at);
            }
            3 => mutated.insert(at, random.next() as u8),
            // A number or string replaced by something hostile.
            4 => {
                let start = mutated[..at].iter().rposition(|byte| b":,[".contains(byte)).map_or(0, |i| i + 1);
                let length = mutated[start..].iter().position(|byte| b",]}".contains(byte)).unwrap_or(0);
                let text = HOSTILE[random.below(HOSTILE.len())];
                mutated.splice(start..start + length, text.bytes());
            }
            _ => {
                let end = (at + random.below(40)).min(mutated.len());
                let copy = mutated[at..end].to_vec();
                mutated.splice(at..at, copy);
            }
        }
    }
    mutated
}

/// A copy of a fixture that may be damaged.
pub fn copy_of(name: &str) -> tempfile::TempDir {
    copy(&fixture(name))
}

pub fn copy(folder: &Path) -> tempfile::TempDir {
    let copy = tempfile::tempdir().unwrap();
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        fs::copy(&path, copy.path().join(path.file_name().unwrap())).unwrap();
    }
    copy
}

/// Logits of a text.
pub fn logits(folder: &Path) -> Vec<f32> {
    let checkpoint = Checkpoint::open(folder).unwrap_or_else(|error| panic!("{error}"));
    let modulus = (checkpoint.config().vocab as u32).min(197);
    let tokens: Vec<u32> = (0..40).map(|i| (i * 37 + 5) % modulus).collect();
    let mut runner = Runner::load(&checkpoint, ReferenceBackend::new(), None);
    let rows: Vec<u32> = (0..40).collect();
    runner.forward(&tokens, &rows).to_vec()
}

/// Other values of about the same size.
pub fn perturbed(dtype: &str, bytes: &[u8]) -> Vec<u8> {
    let other = |x: f32, i: usize| x * 1.25 + if i.is_multiple_of(2) { 0.06 } else { -0.03 };
    let pairs = bytes.as_chunks::<2>().0.iter().enumerate();
    match dtype {
        "F32" => {
            let values = bytes.as_chunks::<4>().0.iter().enumerate();
            values.flat_map(|(i, b)| other(f32::from_le_bytes(*b), i).to_le_bytes()).collect()
        }
        "BF16" => pairs
            .flat_map(|(i, b)| bf16::from_f32(other(bf16::from_le_bytes(*b).to_f32(), i)).to_le_bytes())
            .collect(),
        "F16" => pairs
            .flat_map(|(i, b)| f16::from_f32(other(f16::from_le_bytes(*b).to_f32(), i)).to_le_bytes())
            .collect(),
        other => panic!("{other}"),
    }
}

/// A copy of a fixture with another configuration.
pub fn with_config(name: &str, edit: impl FnOnce(&mut Value)) -> tempfile::TempDir {
    let copy = copy_of(name);
    set_config(copy.path(), edit);
    copy
}

/// Changes the config.json of a folder.
pub fn set_config(folder: &Path, edit: impl FnOnce(&mut Value)) {
    let path = folder.join("config.json");
    let mut config: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    edit(&mut config);
    fs::write(path, config.to_string()).unwrap();
}
