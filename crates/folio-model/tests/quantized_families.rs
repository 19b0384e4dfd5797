//! Families in the formats that their checkpoints are published in, by the names that these use: they load, and compute what their values
//! compute unquantized. Weights are drawn, in fixtures that are made wide enough for whole blocks.

mod common;

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use common::gguf::{on_disk, path_in};
use common::tensors::{File, Stored};
use common::{Random, logits, set_config, with_config};
use folio_model::Checkpoint;
use folio_model::quant::{BlockFormat, MXFP4_VALUES, e4m3_in_256ths};
use folio_model::testing::gguf::{Writer, gguf_of};
use half::{bf16, f16};
use serde_json::{Value, json};
use tempfile::TempDir;

/// A fixture of other sizes.
struct Wide {
    fixture: &'static str,
    /// Fields of config.json.
    fields: &'static [(&'static str, usize)],
    /// Sizes of its tensors, as they are and as they become.
    sizes: &'static [(usize, usize)],
}

const NEMOTRON: Wide = Wide {
    fixture: "nemotron_h",
    fields: &[
        ("hidden_size", 256),
        ("head_dim", 16),
        ("intermediate_size", 64),
        ("mamba_head_dim", 32),
        ("moe_intermediate_size", 32),
        ("moe_shared_expert_intermediate_size", 32),
    ],
    sizes: &[(40, 256), (48, 64), (24, 32), (56, 64), (20, 32), (28, 32), (120, 192), (192, 264), (318, 462)],
};
const NEMOTRON_DENSE: Wide = Wide {
    fixture: "nemotron_h_dense",
    fields: &[("hidden_size", 256), ("head_dim", 16), ("intermediate_size", 64), ("mamba_head_dim", 32)],
    sizes: &[(40, 256), (48, 64), (24, 32), (56, 64), (90, 160), (114, 184), (209, 349)],
};
const MINIMAX: Wide = Wide {
    fixture: "minimax_m2",
    fields: &[("hidden_size", 256), ("head_dim", 16), ("intermediate_size", 32)],
    sizes: &[(32, 256), (48, 64), (24, 32), (20, 32)],
};
const GLM: Wide = Wide {
    fixture: "glm4_moe_air",
    fields: &[("hidden_size", 256), ("intermediate_size", 64), ("moe_intermediate_size", 32)],
    sizes: &[(32, 256), (56, 64), (20, 32)],
};
const GRANITE: Wide =
    Wide { fixture: "granite", fields: &[("hidden_size", 256)], sizes: &[(40, 256), (20, 128)] };
const GRANITE_EXPERTS: Wide = Wide {
    fixture: "granitemoe",
    fields: &[("hidden_size", 256), ("intermediate_size", 32)],
    sizes: &[(32, 256), (16, 128), (20, 32), (40, 64)],
};
const GRANITE_HYBRID: Wide = Wide {
    fixture: "granite4_h",
    fields: &[
        ("hidden_size", 256),
        ("intermediate_size", 128),
        ("shared_intermediate_size", 32),
        ("mamba_d_head", 32),
    ],
    sizes: &[(40, 256), (20, 128), (28, 32), (56, 64), (80, 128), (128, 176), (212, 308)],
};
const MIXTRAL: Wide = Wide {
    fixture: "mixtral",
    fields: &[("hidden_size", 256), ("intermediate_size", 128)],
    sizes: &[(32, 256), (16, 128), (24, 128)],
};
const OLMO: Wide = Wide { fixture: "olmo2", fields: &[("hidden_size", 256)], sizes: &[(40, 256), (20, 128)] };
const COHERE: Wide = Wide {
    fixture: "cohere2",
    fields: &[("hidden_size", 256), ("head_dim", 64)],
    sizes: &[(48, 256), (24, 128)],
};
const EXAONE: Wide = Wide {
    fixture: "exaone4",
    fields: &[("hidden_size", 256), ("head_dim", 16)],
    sizes: &[(40, 256), (48, 64), (24, 32), (12, 16)],
};
const ERNIE: Wide = Wide {
    fixture: "ernie4_5_moe",
    fields: &[("hidden_size", 256), ("intermediate_size", 64), ("moe_intermediate_size", 32)],
    sizes: &[(32, 256), (16, 128), (56, 64), (20, 32), (40, 64)],
};
const SEED: Wide = Wide { fixture: "seed_oss", fields: &[("hidden_size", 256)], sizes: &[(40, 256)] };

impl Wide {
    fn folder(&self) -> TempDir {
        let folder = with_config(self.fixture, |config| {
            for (field, size) in self.fields {
                config[*field] = json!(size);
            }
        });
        let mut file = File::read(&folder.path().join("model.safetensors"));
        let mut random = Random(11);
        for stored in file.tensors.values_mut() {
            for size in &mut stored.shape {
                let other = self.sizes.iter().find(|(is, _)| *is == *size);
                *size = other.map_or(*size, |(_, becomes)| *becomes);
            }
            let count: usize = stored.shape.iter().product();
            let value = |random: &mut Random| bf16::from_f32(random.below(2001) as f32 / 5000.0 - 0.2);
            stored.dtype = "BF16".to_owned();
            stored.bytes = (0..count).flat_map(|_| value(&mut random).to_le_bytes()).collect();
        }
        file.write();
        folder
    }
}

/// How matrices are stored.
#[derive(Clone, Copy)]
enum Scheme {
    /// FP8 with a scale for each 128 rows and columns (as DeepSeek and as ModelOpt writes it), each row, or each matrix (ModelOpt).
    Fp8Blocks,
    Fp8BlocksOfModelOpt,
    Fp8Rows,
    Fp8Matrices,
    /// As ModelOpt writes it.
    Nvfp4,
    /// pack-quantized of compressed-tensors, 4 bits in groups of 32.
    Packed,
    /// In groups of so many columns.
    Awq(usize),
    /// Bits, whether symmetric, and columns of a group. Zero points are stored minus one where it is, else as they are.
    Gptq(usize, bool, usize),
}

fn e4m3(code: u8) -> f32 {
    e4m3_in_256ths(code).to_f32() * 256.0
}

/// Scales of a type, and their bytes.
fn scales(dtype: &str, count: usize, random: &mut Random) -> (Vec<f32>, Vec<u8>) {
    let (mut values, mut bytes) = (Vec::new(), Vec::new());
    for _ in 0..count {
        let scale = (1 + random.below(97)) as f32 / 3e4;
        match dtype {
            "F32" => {
                values.push(scale);
                bytes.extend(scale.to_le_bytes());
            }
            "BF16" => {
                values.push(bf16::from_f32(scale).to_f32());
                bytes.extend(bf16::from_f32(scale).to_le_bytes());
            }
            "F16" => {
                values.push(f16::from_f32(scale).to_f32());
                bytes.extend(f16::from_f32(scale).to_le_bytes());
            }
            other => panic!("{other}"),
        }
    }
    (values, bytes)
}

/// Words of eight nibbles, of which this is the order.
fn words(nibbles: &[u8], order: [usize; 8]) -> Vec<u8> {
    let word = |eight: &[u8]| (0..8).fold(0u32, |bits, i| bits | u32::from(eight[order[i]]) << (4 * i));
    nibbles.chunks_exact(8).flat_map(|eight| word(eight).to_le_bytes()).collect()
}

/// Where the bits of the code `at` are among words, the lowest first: in which, and what of it they are.
fn in_words(code: u8, bits: usize, at: usize) -> impl Iterator<Item = (usize, u32)> {
    (0..bits).map(move |bit| {
        let place = at * bits + bit;
        (place / 32, u32::from(code >> bit & 1) << (place % 32))
    })
}

const IN_TURN: [usize; 8] = [0, 1, 2, 3, 4, 5, 6, 7];
const EVEN_FIRST: [usize; 8] = [0, 2, 4, 6, 1, 3, 5, 7];

impl Scheme {
    /// Puts codes and scales in the place of a matrix, and says what the values are.
    fn put(self, name: &str, file: &mut File, random: &mut Random) -> Stored {
        const SIDE: usize = 128;
        let shape = file.tensors.remove(name).unwrap().shape;
        let (of_rows, cols) = (&shape[..shape.len() - 1], shape[shape.len() - 1]);
        let rows: usize = of_rows.iter().product();
        let module = name.strip_suffix("weight").unwrap();
        let mut part = |of: &str, dtype: &str, shape: &[usize], bytes: Vec<u8>| {
            let stored = Stored { dtype: dtype.to_owned(), shape: shape.to_vec(), bytes };
            file.tensors.insert(format!("{module}{of}"), stored);
        };
        let nibbles = |count: usize, random: &mut Random| -> Vec<u8> {
            (0..count).map(|_| random.below(16) as u8).collect()
        };
        let each = |value: &dyn Fn(usize, usize) -> f32| -> Vec<f32> {
            (0..rows * cols).map(|at| value(at / cols, at % cols)).collect()
        };
        let number = |value: f32| value.to_le_bytes().to_vec();
        let values = match self {
            Scheme::Fp8Blocks | Scheme::Fp8BlocksOfModelOpt | Scheme::Fp8Rows | Scheme::Fp8Matrices => {
                let code = |random: &mut Random| random.below(0x68) as u8 | (random.below(2) as u8) << 7;
                let codes: Vec<u8> = (0..rows * cols).map(|_| code(random)).collect();
                let (down, across) = (rows.div_ceil(SIDE), cols.div_ceil(SIDE));
                let (name, dtype, scaled) = match self {
                    Scheme::Fp8Blocks => ("weight_scale_inv", "F32", vec![down, across]),
                    Scheme::Fp8BlocksOfModelOpt => ("weight_scale", "F32", vec![down, 1, across, 1]),
                    Scheme::Fp8Rows => ("weight_scale", "BF16", [of_rows, &[1]].concat()),
                    _ => ("weight_scale", "F32", Vec::new()),
                };
                let (scale, bytes) = scales(dtype, scaled.iter().product(), random);
                let values = each(&|row, col| {
                    let at = match self {
                        Scheme::Fp8Blocks | Scheme::Fp8BlocksOfModelOpt => row / SIDE * across + col / SIDE,
                        Scheme::Fp8Rows => row,
                        _ => 0,
                    };
                    scale[at] * e4m3(codes[row * cols + col])
                });
                part("weight", "F8_E4M3", &shape, codes);
                part(name, dtype, &scaled, bytes);
                if let Scheme::Fp8Matrices = self {
                    part("input_scale", "F32", &[], number(0.5));
                }
                values
            }
            Scheme::Nvfp4 => {
                let (codes, whole) = (nibbles(rows * cols, random), 0.02f32);
                let of_groups: Vec<u8> =
                    (0..rows * cols / 16).map(|_| 0x28 + random.below(24) as u8).collect();
                let values = each(&|row, col| {
                    let at = row * cols + col;
                    e4m3(of_groups[at / 16]) * whole * 0.5 * f32::from(MXFP4_VALUES[codes[at] as usize])
                });
                part("weight", "U8", &[rows, cols / 2], words(&codes, IN_TURN));
                part("weight_scale", "F8_E4M3", &[rows, cols / 16], of_groups);
                part("weight_scale_2", "F32", &[], number(whole));
                part("input_scale", "F32", &[], number(0.5));
                values
            }
            Scheme::Packed => {
                let codes = nibbles(rows * cols, random);
                let (scale, bytes) = scales("BF16", rows * cols / 32, random);
                let values = each(&|row, col| {
                    let at = row * cols + col;
                    scale[at / 32] * (f32::from(codes[at]) - 8.0)
                });
                part("weight_packed", "I32", &[rows, cols / 8], words(&codes, IN_TURN));
                part("weight_scale", "BF16", &[rows, cols / 32], bytes);
                let sizes = [rows, cols].iter().flat_map(|size| (*size as i64).to_le_bytes()).collect();
                part("weight_shape", "I64", &[2], sizes);
                values
            }
            // Codes are here `[columns, rows]`, zero points and scales `[groups, rows]`.
            Scheme::Awq(group) => {
                let (codes, count) = (nibbles(rows * cols, random), cols / group);
                let zeros = nibbles(count * rows, random);
                let (scale, bytes) = scales("F16", count * rows, random);
                let values = each(&|row, col| {
                    let at = col / group * rows + row;
                    scale[at] * f32::from(codes[col * rows + row]) - scale[at] * f32::from(zeros[at])
                });
                part("qweight", "I32", &[cols, rows / 8], words(&codes, EVEN_FIRST));
                part("qzeros", "I32", &[count, rows / 8], words(&zeros, EVEN_FIRST));
                part("scales", "F16", &[count, rows], bytes);
                values
            }
            Scheme::Gptq(bits, symmetric, group) => {
                let (count, middle) = (cols / group, 1u8 << (bits - 1));
                let mut code = || random.below(1 << bits) as u8;
                let codes: Vec<u8> = (0..rows * cols).map(|_| code()).collect();
                let zeros: Vec<u8> =
                    (0..count * rows).map(|_| if symmetric { middle } else { code() }).collect();
                let (scale, bytes) = scales("F16", count * rows, random);
                let values = each(&|row, col| {
                    let at = col / group * rows + row;
                    scale[at] * (f32::from(codes[col * rows + row]) - f32::from(zeros[at]))
                });
                let mut down = vec![0u32; cols * bits / 32 * rows];
                for (at, code) in codes.iter().enumerate() {
                    for (word, set) in in_words(*code, bits, at / rows) {
                        down[word * rows + at % rows] |= set;
                    }
                }
                let mut along = vec![0u32; count * rows * bits / 32];
                for (at, zero) in zeros.iter().enumerate() {
                    for (word, set) in in_words(zero - u8::from(symmetric), bits, at) {
                        along[word] |= set;
                    }
                }
                let stored =
                    |words: Vec<u32>| -> Vec<u8> { words.into_iter().flat_map(u32::to_le_bytes).collect() };
                part("qweight", "I32", &[cols * bits / 32, rows], stored(down));
                part("qzeros", "I32", &[count, rows * bits / 32], stored(along));
                part("scales", "F16", &[count, rows], bytes);
                let groups = (0..cols).flat_map(|col| ((col / group) as i32).to_le_bytes()).collect();
                part("g_idx", "I32", &[cols], groups);
                values
            }
        };
        let bytes = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        Stored { dtype: "F32".to_owned(), shape, bytes }
    }
}

/// Where it stands how a checkpoint is quantized.
enum Says {
    Config(Value),
    HfQuantConfig(Value),
}

/// A checkpoint as somebody publishes it.
struct Published {
    name: &'static str,
    model: &'static Wide,
    scheme: Scheme,
    says: Says,
    /// Parts of the names of matrices that are not quantized, beside those that never are.
    plain: &'static [&'static str],
    /// Numbers that change nothing.
    beside: &'static [&'static str],
    /// Experts of one tensor are linear layers of their own.
    apart: bool,
}

/// In no scheme quantized.
const NEVER: &[&str] = &["embed", "lm_head", ".gate.weight", ".router.", "conv1d"];

/// A checkpoint with codes, and its tensors without.
struct Made {
    folder: TempDir,
    file: File,
    names: BTreeSet<String>,
    unquantized: Vec<(String, Stored)>,
}

/// Quantizes every matrix, unless it never is or has one of these parts in its name, and gives their values.
fn quantize(
    file: &mut File,
    plain: &'static [&'static str],
    scheme: &dyn Fn(&str) -> Scheme,
) -> Vec<(String, Stored)> {
    let is_linear = |(name, stored): &(&String, &Stored)| {
        let stays = NEVER.iter().chain(plain).any(|part| name.contains(part));
        name.ends_with(".weight") && stored.shape.len() > 1 && !stays
    };
    let linear: Vec<String> = file.tensors.iter().filter(is_linear).map(|(name, _)| name.clone()).collect();
    let mut random = Random(7);
    let mut unquantized = Vec::new();
    for name in linear {
        let values = scheme(&name).put(&name, file, &mut random);
        unquantized.push((name, values));
    }
    assert!(!unquantized.is_empty());
    unquantized
}

impl Published {
    fn new(name: &'static str, model: &'static Wide, scheme: Scheme, says: Says) -> Self {
        Self { name, model, scheme, says, plain: &[], beside: &[], apart: false }
    }

    fn make(&self) -> Made {
        println!("{}", self.name);
        let folder = self.model.folder();
        let mut file = File::read(&folder.path().join("model.safetensors"));
        if self.apart {
            take_apart(&mut file);
        }
        let names: BTreeSet<String> = file.tensors.keys().cloned().collect();
        let unquantized = quantize(&mut file, self.plain, &|_| self.scheme);
        for name in self.beside {
            let bytes = 0.5f32.to_le_bytes().to_vec();
            let number = Stored { dtype: "F32".to_owned(), shape: Vec::new(), bytes };
            file.tensors.insert((*name).to_owned(), number);
        }
        file.write();
        match &self.says {
            Says::Config(says) => set_quantization(folder.path(), says),
            Says::HfQuantConfig(says) => {
                fs::write(folder.path().join("hf_quant_config.json"), says.to_string()).unwrap();
            }
        }
        Made { folder, file, names, unquantized }
    }
}

fn set_quantization(folder: &Path, says: &Value) {
    set_config(folder, |config| config["quantization_config"] = says.clone());
}

/// Granite's experts as llm-compressor writes them.
fn take_apart(file: &mut File) {
    let together =
        |(name, stored): &(&String, &Stored)| name.contains(".block_sparse_moe.") && stored.shape.len() == 3;
    let names: Vec<String> = file.tensors.iter().filter(together).map(|(name, _)| name.clone()).collect();
    for name in names {
        let stored = file.tensors.remove(&name).unwrap();
        let (layer, _) = name.split_once("block_sparse_moe.").unwrap();
        let parts: &[&str] =
            if name.contains(".input_linear.") { &["gate_proj", "up_proj"] } else { &["down_proj"] };
        let [_, rows, cols] = stored.shape[..] else { panic!("{name}") };
        let rows = rows / parts.len();
        for (at, bytes) in stored.bytes.chunks_exact(2 * rows * cols).enumerate() {
            let (expert, part) = (at / parts.len(), parts[at % parts.len()]);
            let one = Stored { dtype: "BF16".to_owned(), shape: vec![rows, cols], bytes: bytes.to_vec() };
            file.tensors.insert(format!("{layer}block_sparse_moe.experts.{expert}.{part}.weight"), one);
        }
    }
}

fn compressed(format: &str, weights: Value, targets: &[&str], ignore: &[&str]) -> Value {
    json!({
        "quant_method": "compressed-tensors",
        "format": format,
        "quantization_status": "compressed",
        "global_compression_ratio": null,
        "kv_cache_scheme": null,
        "sparsity_config": {},
        "transform_config": {},
        "config_groups": {"group_0": {
            "targets": targets, "weights": weights, "input_activations": null, "output_activations": null,
        }},
        "ignore": ignore,
    })
}

/// FP8_DYNAMIC of llm-compressor.
fn fp8_dynamic(targets: &[&str], ignore: &[&str]) -> Value {
    let weights = json!({
        "num_bits": 8, "type": "float", "strategy": "channel", "symmetric": true, "dynamic": false, "group_size": null,
        "block_structure": null, "actorder": null, "observer": "minmax", "observer_kwargs": {},
    });
    compressed("float-quantized", weights, targets, ignore)
}

fn w4a16(targets: &[&str], ignore: &[&str]) -> Value {
    let weights = json!({
        "num_bits": 4, "type": "int", "strategy": "group", "symmetric": true, "dynamic": false, "group_size": 32,
        "block_structure": null, "actorder": null, "observer": "mse", "observer_kwargs": {},
    });
    compressed("pack-quantized", weights, targets, ignore)
}

fn awq(group: usize, left: &[&str]) -> Value {
    json!({
        "quant_method": "awq", "bits": 4, "group_size": group, "version": "gemm", "zero_point": true,
        "modules_to_not_convert": left,
    })
}

fn gptq(group: usize) -> Value {
    json!({
        "quant_method": "gptq", "bits": 4, "group_size": group, "damp_percent": 0.1, "desc_act": true, "static_groups": false,
        "sym": true, "true_sequential": true, "model_name_or_path": null, "model_file_base_name": "model",
        "modules_in_block_to_quantize": [["self_attn.k_proj", "self_attn.v_proj", "self_attn.q_proj"], ["self_attn.o_proj"]],
    })
}

/// As AutoRound writes it, beside settings of modules.
fn auto_round(packing: &str, symmetric: bool, own: &Value) -> Value {
    json!({
        "quant_method": "auto-round", "packing_format": packing, "bits": 4, "group_size": 128, "sym": symmetric, "data_type": "int",
        "autoround_version": "0.5.1", "amp": true, "batch_size": 8, "block_name_to_quantize": "model.layers", "iters": 1000,
        "enable_quanted_input": true, "gradient_accumulate_steps": 1, "lr": 0.001, "minmax_lr": 0.001, "nsamples": 512,
        "scale_dtype": "torch.float16", "seqlen": 2048, "to_quant_block_names": null, "extra_config": own,
    })
}

fn modelopt(algorithm: &str, exclude: &[&str]) -> Value {
    json!({
        "producer": {"name": "modelopt", "version": "0.29.0"},
        "quantization": {
            "quant_algo": algorithm, "kv_cache_quant_algo": "FP8", "group_size": 16, "exclude_modules": exclude,
        },
    })
}

const ALL: &[&str] = &["Linear"];
/// In Nemotron 3 Nano neither attention nor the Mamba-2 layer before it is quantized.
const AROUND_ATTENTION: &[&str] = &[".layers.2.", ".layers.3."];
const OF_KV_CACHE: &[&str] =
    &["backbone.layers.3.mixer.k_proj.k_scale", "backbone.layers.3.mixer.v_proj.v_scale"];

fn published() -> Vec<Published> {
    use Scheme::*;
    let config = Says::Config;
    let new = Published::new;
    vec![
        Published {
            plain: AROUND_ATTENTION,
            beside: OF_KV_CACHE,
            ..new(
                "Nemotron 3 Nano in FP8, by NVIDIA",
                &NEMOTRON,
                Fp8Matrices,
                config(json!({
                    "quant_method": "modelopt",
                    "quant_algo": "FP8",
                    "producer": {"name": "modelopt", "version": "0.39.0"},
                    "config_groups": {"group_0": {
                        "targets": ["Linear"],
                        "weights": {"dynamic": false, "num_bits": 8, "type": "float"},
                        "input_activations": {"dynamic": false, "num_bits": 8, "type": "float"},
                    }},
                    "kv_cache_scheme": {"dynamic": false, "num_bits": 8, "type": "float"},
                    "ignore": ["backbone.layers.0.mixer.conv1d", "backbone.layers.3.mixer.q_proj", "lm_head"],
                })),
            )
        },
        Published {
            plain: AROUND_ATTENTION,
            beside: OF_KV_CACHE,
            ..new(
                "Nemotron 3 Nano in NVFP4, by NVIDIA",
                &NEMOTRON,
                Nvfp4,
                Says::HfQuantConfig(modelopt("NVFP4", &["*.mixer.conv1d", "backbone.layers.3*", "lm_head"])),
            )
        },
        new(
            "Nemotron Nano 2 in FP8",
            &NEMOTRON_DENSE,
            Fp8Rows,
            config(fp8_dynamic(ALL, &["lm_head", "re:.*mixer.conv1d"])),
        ),
        new(
            "MiniMax-M2, by MiniMax",
            &MINIMAX,
            Fp8Blocks,
            config(json!({
                "quant_method": "fp8", "fmt": "float8_e4m3fn", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
                "modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"],
            })),
        ),
        new("MiniMax-M2 in AWQ", &MINIMAX, Awq(32), config(awq(32, &["gate", "lm_head"]))),
        // Its experts are called w1, w2 and w3: none of these is a gate.
        Published {
            plain: &["self_attn"],
            ..new(
                "MiniMax-M2 in 4 bits by llm-compressor",
                &MINIMAX,
                Packed,
                config(w4a16(ALL, &["lm_head", "re:.*gate", "re:.*self_attn"])),
            )
        },
        Published {
            plain: &["self_attn"],
            ..new(
                "MiniMax-M2 in NVFP4",
                &MINIMAX,
                Nvfp4,
                Says::HfQuantConfig(modelopt(
                    "NVFP4",
                    &["lm_head", "*self_attn*", "*block_sparse_moe.gate*"],
                )),
            )
        },
        new(
            "GLM-4.5-Air in FP8, by Z.ai",
            &GLM,
            Fp8Rows,
            config(fp8_dynamic(ALL, &["lm_head", "model.layers.1.mlp.gate", "model.layers.2.eh_proj"])),
        ),
        Published {
            plain: &["self_attn"],
            ..new(
                "GLM-4.5-Air in 4 bits",
                &GLM,
                Packed,
                config(w4a16(ALL, &["lm_head", "re:.*mlp.gate$", "re:.*self_attn"])),
            )
        },
        new("Granite 3 in FP8", &GRANITE, Fp8Rows, config(fp8_dynamic(ALL, &["lm_head"]))),
        new("Granite 3 in 4 bits", &GRANITE, Packed, config(w4a16(ALL, &["lm_head"]))),
        new(
            "Granite with experts, these in one tensor in FP8",
            &GRANITE_EXPERTS,
            Fp8Rows,
            config(fp8_dynamic(ALL, &["lm_head", "re:.*block_sparse_moe.router"])),
        ),
        Published {
            apart: true,
            plain: &["self_attn"],
            ..new(
                "Granite with experts, these apart in FP8",
                &GRANITE_EXPERTS,
                Fp8Rows,
                config(fp8_dynamic(&["re:.*block_sparse_moe.experts.*"], &["lm_head", "re:.*router"])),
            )
        },
        new(
            "Granite 4.0 H Small in FP8, by IBM",
            &GRANITE_HYBRID,
            Fp8Rows,
            config(fp8_dynamic(ALL, &["lm_head", "re:.*block_sparse_moe.router", "re:.*conv1d"])),
        ),
        Published {
            apart: true,
            ..new(
                "Granite 4.0 H in 4 bits",
                &GRANITE_HYBRID,
                Packed,
                config(w4a16(ALL, &["lm_head", "re:.*block_sparse_moe.router"])),
            )
        },
        new("Mixtral in AWQ", &MIXTRAL, Awq(128), config(awq(128, &["gate"]))),
        new("Mixtral in GPTQ", &MIXTRAL, Gptq(4, true, 128), config(gptq(128))),
        new(
            "Mixtral in FP8, by NVIDIA",
            &MIXTRAL,
            Fp8Matrices,
            Says::HfQuantConfig(modelopt("FP8", &["lm_head", "model.layers.0.block_sparse_moe.gate"])),
        ),
        new(
            "Granite 3 in FP8 in blocks, by ModelOpt",
            &GRANITE,
            Fp8BlocksOfModelOpt,
            Says::HfQuantConfig(modelopt("fp8_pb_wo", &["lm_head"])),
        ),
        new(
            "Granite 3 in FP8 with a scale a row, by ModelOpt",
            &GRANITE,
            Fp8Rows,
            Says::HfQuantConfig(modelopt("FP8_PER_CHANNEL_PER_TOKEN", &["lm_head"])),
        ),
        new("OLMo 2 in FP8", &OLMO, Fp8Rows, config(fp8_dynamic(ALL, &["lm_head"]))),
        new("Command A in 4 bits", &COHERE, Packed, config(w4a16(ALL, &["lm_head"]))),
        new("EXAONE 4.0 in AWQ, by LG", &EXAONE, Awq(64), config(awq(64, &[]))),
        new("EXAONE 4.0 in GPTQ, by LG", &EXAONE, Gptq(4, true, 64), config(gptq(64))),
        new(
            "ERNIE 4.5 with experts in FP8",
            &ERNIE,
            Fp8Rows,
            config(fp8_dynamic(ALL, &["lm_head", "re:.*mlp.gate$"])),
        ),
        new("Seed-OSS in AWQ", &SEED, Awq(64), config(awq(64, &["lm_head"]))),
    ]
}

#[test]
fn families_are_loaded_as_they_are_published() {
    for published in published() {
        let Made { folder, mut file, names, unquantized } = published.make();
        let found = logits(folder.path());
        assert!(found.iter().all(|logit| logit.is_finite()), "{}", published.name);
        file.tensors.retain(|name, _| names.contains(name));
        file.tensors.extend(unquantized);
        file.write();
        match published.says {
            Says::Config(_) => set_quantization(folder.path(), &Value::Null),
            Says::HfQuantConfig(_) => fs::remove_file(folder.path().join("hf_quant_config.json")).unwrap(),
        }
        assert!(found == logits(folder.path()), "{}: other logits than unquantized", published.name);
    }
}

/// The scheme of the first part that a matrix has in its name.
fn by_part(schemes: &[(&str, Scheme)]) -> impl Fn(&str) -> Scheme {
    move |name: &str| schemes.iter().find(|(part, _)| name.contains(part)).unwrap().1
}

/// A Mixtral whose modules are quantized in several ways, and what may be said of it.
fn check_several(scheme: impl Fn(&str) -> Scheme, says: &[Value]) {
    let folder = MIXTRAL.folder();
    let mut file = File::read(&folder.path().join("model.safetensors"));
    let names: BTreeSet<String> = file.tensors.keys().cloned().collect();
    let unquantized = quantize(&mut file, &[], &scheme);
    file.write();
    let found: Vec<Vec<f32>> = says
        .iter()
        .map(|says| {
            set_quantization(folder.path(), says);
            logits(folder.path())
        })
        .collect();
    file.tensors.retain(|name, _| names.contains(name));
    file.tensors.extend(unquantized);
    file.write();
    set_quantization(folder.path(), &Value::Null);
    let expected = logits(folder.path());
    assert!(expected.iter().all(|logit| logit.is_finite()));
    for (found, says) in found.iter().zip(says) {
        assert!(*found == expected, "other logits than unquantized: {says}");
    }
}

#[test]
fn modules_have_settings_of_their_own() {
    // Of several patterns that match, the first holds; a name comes before them.
    let own = json!({
        "lm_head": {"bits": 16, "data_type": "float"},
        "model.layers.0.block_sparse_moe.gate": {"bits": 16, "act_bits": 16},
        ".*self_attn.*": {"bits": 16},
        "model.layers.0.self_attn.o_proj": {"group_size": 64, "act_bits": 16},
        "model.layers.1.self_attn.o_proj": {"group_size": 64},
        r".*\.w2.*": {"bits": 8},
        r"layers\.0\.block_sparse_moe\.experts\.": {"bits": 3, "group_size": 32},
        ".*experts.*": {"bits": 2, "group_size": 64},
    });
    let mut own = own.as_object().unwrap().clone();
    for (layer, part) in (0..2).flat_map(|layer| ["q_proj", "k_proj", "v_proj"].map(|part| (layer, part))) {
        own.insert(format!("model.layers.{layer}.self_attn.{part}"), json!({"bits": 4}));
    }
    let mut dynamic = gptq(128);
    dynamic["provider"] = json!("auto-round");
    dynamic["iters"] = json!(200);
    dynamic["data_type"] = json!("int");
    dynamic["dynamic"] = json!({
        "-:.*lm_head": {},
        "+:.*o_proj": {"group_size": 64},
        r".*\.w2": {"bits": 8, "sym": true},
        r"+:model\.layers\.0\.block": {"bits": 3, "group_size": 32},
        "+:.*block": {"bits": 2, "group_size": 64, "damp_percent": 0.05},
    });
    check_several(
        by_part(&[
            ("o_proj", Scheme::Gptq(4, true, 64)),
            ("self_attn", Scheme::Gptq(4, true, 128)),
            (".w2.", Scheme::Gptq(8, true, 128)),
            ("layers.0.", Scheme::Gptq(3, true, 32)),
            ("", Scheme::Gptq(2, true, 64)),
        ]),
        &[auto_round("auto_round:auto_gptq", true, &Value::Object(own)), dynamic],
    );
}

#[test]
fn zero_points_may_be_stored_as_they_are() {
    let own = json!({".*w2.*": {"bits": 3}, ".*w[13].*": {"bits": 2, "group_size": 64}});
    let mut v2 = gptq(128);
    v2["sym"] = json!(false);
    v2["checkpoint_format"] = json!("gptq_v2");
    v2["dynamic"] = own.clone();
    check_several(
        by_part(&[
            (".w2.", Scheme::Gptq(3, false, 128)),
            ("self_attn", Scheme::Gptq(4, false, 128)),
            ("", Scheme::Gptq(2, false, 64)),
        ]),
        &[auto_round("auto_round", false, &own), auto_round("auto_round:gptqmodel", false, &own), v2],
    );
    let own = json!({".*o_proj": {"group_size": 64}, "lm_head": {"bits": 16}});
    check_several(
        by_part(&[("o_proj", Scheme::Awq(64)), ("", Scheme::Awq(128))]),
        &[auto_round("auto_round:auto_awq", false, &own)],
    );
}

#[test]
fn modelopt_mixes_what_it_writes() {
    check_several(
        by_part(&[
            ("o_proj", Scheme::Fp8Blocks),
            ("self_attn", Scheme::Fp8BlocksOfModelOpt),
            (".w2.", Scheme::Nvfp4),
            ("", Scheme::Fp8Rows),
        ]),
        &[json!({
            "quant_method": "modelopt",
            "quant_algo": "MIXED_PRECISION",
            "quantized_layers": {"model.layers.0.self_attn.q_proj": {"quant_algo": "FP8_PB_WO", "group_size": 128}},
        })],
    );
}

#[test]
fn experts_that_are_apart_are_the_same_model() {
    for model in [&GRANITE_EXPERTS, &GRANITE_HYBRID] {
        let folder = model.folder();
        let together = logits(folder.path());
        let mut file = File::read(&folder.path().join("model.safetensors"));
        take_apart(&mut file);
        file.write();
        assert!(together == logits(folder.path()), "{}", model.fixture);
    }
}

#[test]
fn settings_that_are_not_for_experts_are_named() {
    let refused = |apart: bool, change: &dyn Fn(&mut Value)| {
        let mut says = fp8_dynamic(ALL, &["lm_head"]);
        change(&mut says);
        let published = Published::new("refused", &GRANITE_EXPERTS, Scheme::Fp8Rows, Says::Config(says));
        let made = Published { apart, plain: &["self_attn"], ..published }.make();
        Checkpoint::open(made.folder.path()).err().expect("refused").to_string()
    };
    let weights = |says: &mut Value, strategy: &str| {
        says["config_groups"]["group_0"]["weights"]["strategy"] = json!(strategy);
    };
    // By what the file calls modules.
    let ignored = |says: &mut Value| says["ignore"] = json!(["re:.*block_sparse_moe.experts"]);
    let not_experts =
        |says: &mut Value| says["config_groups"]["group_0"]["targets"] = json!(["re:.*self_attn"]);
    for (sentence, parts) in [
        (refused(false, &|says| weights(says, "tensor")), ["gate_up_proj`", "a scale for each row"]),
        (refused(false, &not_experts), ["gate_up_proj`", "no group"]),
        (refused(true, &ignored), ["gate_proj.weight`", "`ignore`"]),
        (refused(true, &not_experts), ["gate_proj.weight`", "no group"]),
    ] {
        assert!(parts.iter().all(|part| sentence.contains(part)), "{sentence}");
    }
}

/// What Q4_K_M of llama.cpp makes of a tensor: formats of blocks of 32 where rows are not whole blocks of 256.
fn k_quant(name: &str, sizes: &[u64]) -> Option<BlockFormat> {
    let never = ["_norm.weight", "ffn_gate_inp", "ssm_conv1d"].iter().any(|part| name.contains(part));
    if never || sizes.len() < 2 || !name.ends_with(".weight") {
        return None;
    }
    let finer = name == "output.weight"
        || ["token_embd", "attn_v", "ffn_down"].iter().any(|part| name.contains(part));
    match (sizes[0] % 256, finer) {
        (0, true) => Some(BlockFormat::Q6_K),
        (0, false) => Some(BlockFormat::Q4_K),
        (_, true) => Some(BlockFormat::Q8_0),
        (_, false) => Some(BlockFormat::Q5_0),
    }
}

/// A block of any codes, with scales (where they are, and how large) that make weights of a common size.
fn block(format: BlockFormat, random: &mut Random) -> Vec<u8> {
    let scales: &[(usize, f32)] = match format {
        BlockFormat::Q4_K => &[(0, 3e-4), (2, 2e-3)],
        BlockFormat::Q6_K => &[(208, 5e-5)],
        BlockFormat::Q8_0 => &[(0, 1.5e-3)],
        BlockFormat::Q5_0 => &[(0, 1e-2)],
        other => panic!("{other:?}"),
    };
    let mut bytes: Vec<u8> = (0..format.bytes()).map(|_| random.next() as u8).collect();
    for (at, scale) in scales {
        bytes[*at..*at + 2].copy_from_slice(&f16::from_f32(*scale).to_le_bytes());
    }
    bytes
}

#[test]
fn families_are_loaded_in_k_quants() {
    for model in [
        &NEMOTRON,
        &NEMOTRON_DENSE,
        &MINIMAX,
        &GLM,
        &GRANITE,
        &GRANITE_EXPERTS,
        &GRANITE_HYBRID,
        &MIXTRAL,
        &OLMO,
        &COHERE,
        &EXAONE,
        &ERNIE,
        &SEED,
    ] {
        println!("{}", model.fixture);
        let folder = model.folder();
        let mut quantized = gguf_of(&Checkpoint::open(folder.path()).unwrap());
        let mut unquantized = quantized.clone();
        let mut random = Random(13);
        for (tensor, plain) in quantized.tensors.iter_mut().zip(&mut unquantized.tensors) {
            let Some(format) = k_quant(&tensor.0, &tensor.1) else { continue };
            let count = tensor.1.iter().product::<u64>() as usize;
            let blocks: Vec<u8> =
                (0..count / format.values()).flat_map(|_| block(format, &mut random)).collect();
            let mut values = vec![0.0; count];
            format.decode(&blocks, &mut values);
            (tensor.2, tensor.3) = (format.ggml_type().unwrap(), blocks);
            (plain.2, plain.3) = (0, values.iter().flat_map(|value: &f32| value.to_le_bytes()).collect());
        }
        let of = |writer: Writer| {
            let disk = on_disk(&writer.finish());
            logits(&path_in(&disk))
        };
        let found = of(quantized);
        assert!(found.iter().all(|logit| logit.is_finite()), "{}", model.fixture);
        assert!(found == of(unquantized), "{}: other logits than unquantized", model.fixture);
    }
}
