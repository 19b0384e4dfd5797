//! Adapters of any model, made of a seed: each kind of layer has one.

use std::path::Path;

use half::{bf16, f16};
use serde_json::{Map, json};

use crate::adapter::AdapterTargets;

/// The largest rank of those that are made here.
pub const RANK_MAX: usize = 20;

/// Writes the PEFT folder of an adapter: of four in five of the modules that may have one, ranks from 1 to [`RANK_MAX`], with odd seeds some with
/// a bias, values of a type by the seed, and so large that other tokens are said.
///
/// # Panics
/// If the folder cannot be written.
pub fn write_adapter(folder: &Path, targets: &AdapterTargets, seed: u64) {
    let mut random = Random(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1);
    let (mut header, mut data, mut ranks) = (Map::new(), Vec::new(), Map::new());
    let dtype = ["F32", "F16", "BF16"][seed as usize % 3];
    for (name, [rows, cols]) in targets.products() {
        let Some(module) = name.strip_suffix(".weight") else { continue };
        let (skipped, rank, has_bias) =
            (random.below(5) == 0, 1 + random.below(RANK_MAX), random.below(4) == 0 && seed % 2 == 1);
        if skipped {
            continue;
        }
        ranks.insert(module.to_owned(), json!(rank));
        let tensors = [
            ("lora_A.weight", vec![rank, cols]),
            ("lora_B.weight", vec![rows, rank]),
            ("lora_B.bias", vec![rows]),
        ];
        for (suffix, shape) in tensors.into_iter().take(if has_bias { 3 } else { 2 }) {
            let from = data.len();
            for _ in 0..shape.iter().product::<usize>() {
                let value = random.below(1 << 16) as f32 / f32::from(1u16 << 15) * 0.3 - 0.3;
                match dtype {
                    "F32" => data.extend(value.to_le_bytes()),
                    "F16" => data.extend(f16::from_f32(value).to_le_bytes()),
                    _ => data.extend(bf16::from_f32(value).to_le_bytes()),
                }
            }
            let entry = json!({"dtype": dtype, "shape": shape, "data_offsets": [from, data.len()]});
            header.insert(format!("base_model.model.{module}.{suffix}"), entry);
        }
    }
    let header = json!(header).to_string();
    let bytes = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &data].concat();
    let config = json!({"peft_type": "LORA", "lora_alpha": 4, "rank_pattern": ranks, "lora_bias": true});
    std::fs::write(folder.join("adapter_model.safetensors"), bytes).expect("a folder to write to");
    std::fs::write(folder.join("adapter_config.json"), config.to_string()).expect("a folder to write to");
}

/// Xorshift.
struct Random(u64);

impl Random {
    fn below(&mut self, end: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 33) as usize % end
    }
}
