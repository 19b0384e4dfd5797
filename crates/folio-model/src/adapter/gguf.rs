//! llama.cpp's adapters: one GGUF file with `general.type` `adapter` (`convert_lora_to_gguf.py`, `llama-adapter.cpp`).
//!
//! Owns: its keys and tensor names. Rows of B lie as rows of the tensor do that it adds to, so they are read in the same order.

use std::path::Path;

use super::read::{AdapterReading, AdapterTensor, ROLES, Role, read_file};
use super::{Adapter, AdapterLimits, AdapterTargets};
use crate::checkpoint::gguf::{HeaderError, Metadata, Names, RowOrder, architecture_of, read_header};
use crate::error::{ModelError, Result};

const ALPHA: &str = "adapter.lora.alpha";
/// Keys of adapters that are read, or that change nothing here.
const KEYS: [&str; 3] = ["adapter.type", ALPHA, "adapter.lora.task_name"];

/// See [`Adapter::read`].
pub(super) fn read(path: &Path, targets: &AdapterTargets, limits: AdapterLimits) -> Result<Adapter> {
    let file = path.display().to_string();
    let missing =
        || ModelError::AdapterFolder { folder: file.clone(), problem: "there is no such file".to_owned() };
    let bytes = read_file(path, limits.bytes)?.ok_or_else(missing)?;
    let header = read_header(&bytes).map_err(|error| match error {
        HeaderError::Damaged(problem) => ModelError::Damaged { file: file.clone(), problem },
        HeaderError::Unsupported(what, supported) => {
            ModelError::Unsupported { file: file.clone(), what, supported }
        }
    })?;
    let metadata = Metadata::new(&file, &bytes, &header);
    for (key, expected) in [("general.type", "adapter"), ("adapter.type", "lora")] {
        match metadata.text(key)? {
            Some(found) if found == expected => {}
            found => {
                let found = found.map_or("missing".to_owned(), |found| format!("{found:?}"));
                return Err(metadata.problem(key, format!("is {found}, expected {expected:?}")));
            }
        }
    }
    if let Some(key) = metadata.keys().find(|key| key.starts_with("adapter.") && !KEYS.contains(key)) {
        return Err(metadata.problem(key, "is set: what it changes is not served"));
    }
    let name = metadata.text("general.architecture")?.unwrap_or_default();
    let Some(architecture) = architecture_of(name, targets.model_type) else {
        let problem = format!("is {name:?}, which the model, of the family {}, is not", targets.model_type);
        return Err(metadata.problem("general.architecture", problem));
    };
    let alpha = metadata.number(ALPHA)?.unwrap_or(0.0);
    if alpha < 0.0 {
        return Err(metadata.problem(ALPHA, format!("is {alpha}, expected no number below 0")));
    }
    let names = Names { interleaved: architecture.interleaved, ..targets.names };
    let mut reading = AdapterReading::new(&file, targets, limits, architecture.tiled);
    for (stored, info) in &header.tensors {
        let found =
            [Role::A, Role::B].into_iter().find_map(|role| Some((stored.strip_suffix(suffix(role))?, role)));
        let Some((base, role)) = found else {
            let problem = "is no part of a LoRA adapter: expected `....lora_a` and `....lora_b`";
            return Err(reading.problem(stored, problem));
        };
        let name = names.decoder_name(base);
        let Some(module) = name.strip_suffix(".weight") else {
            return Err(reading.problem(stored, "adapts what is no matrix"));
        };
        let tensor = AdapterTensor {
            shape: info.shape.clone(),
            encoding: info.encoding.clone(),
            bytes: bytes.get(info.range.clone()).unwrap_or_default(),
            order: match role {
                Role::B => names.order(&name),
                _ => RowOrder::AsStored,
            },
        };
        let of = ROLES.map(|role| format!("{base}{}", suffix(role)));
        reading
            .put(module.to_owned(), role, of, tensor)
            .map_err(|problem| reading.problem(stored, problem))?;
    }
    // As llama.cpp reads it: without alpha, nothing is scaled.
    reading.adapter(|_, rank| Ok(if alpha == 0.0 { 1.0 } else { alpha / rank as f64 }))
}

fn suffix(role: Role) -> &'static str {
    match role {
        Role::A => ".lora_a",
        Role::B => ".lora_b",
        // There are none.
        Role::Bias => ".lora_b.bias",
    }
}
