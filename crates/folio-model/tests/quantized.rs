//! Quantized safetensors checkpoints: the values, what they compute, and the digest.

mod common;

use std::fs;

use common::tensors::{File, Stored};
use common::{copy, copy_of, set_config};
use folio_model::backend::{DType, TensorView};
use folio_model::quant::{BlockFormat, Encoding};
use folio_model::reference::ReferenceBackend;
use folio_model::testing::{QUANTIZED, Runner, check_fixture, quantized};
use folio_model::weights::{TensorSpec, weight_specs};
use folio_model::{Checkpoint, LoadOptions, Model};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

#[test]
fn every_way_of_quantizing_matches_transformers() {
    for name in QUANTIZED {
        let parity = check_fixture(&quantized(name), ReferenceBackend::new);
        println!("{name}: logits within {:.1e}, {} greedy tokens equal", parity.worst, parity.greedy_tokens);
    }
}

#[test]
fn no_fixture_is_forgotten() {
    let entries = fs::read_dir(quantized("")).unwrap();
    let mut on_disk: Vec<String> =
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    on_disk.sort();
    let mut listed: Vec<&str> = QUANTIZED.to_vec();
    listed.sort_unstable();
    assert_eq!(on_disk, listed);
}

/// The values of a matrix in the model's order of columns.
fn values(view: TensorView<'_>) -> Vec<f32> {
    let Encoding::Block(format) = view.encoding else { panic!("not in blocks") };
    let [rows, cols] = *view.shape else { panic!("not a matrix") };
    let mut stored = vec![0.0; rows * cols];
    format.decode(view.bytes, &mut stored);
    let Some(order) = view.order else { return stored };
    let mut values = vec![0.0; rows * cols];
    for (from, to) in stored.chunks(cols).zip(values.chunks_mut(cols)) {
        for (value, column) in from.iter().zip(order) {
            to[*column as usize] = *value;
        }
    }
    values
}

/// Each tensor once, whatever is made of it.
fn specs(checkpoint: &Checkpoint) -> Vec<TensorSpec> {
    let specs = weight_specs(checkpoint.config());
    let mut parts: Vec<TensorSpec> = specs.iter().flat_map(|weight| weight.parts.clone()).collect();
    let mut seen = std::collections::BTreeSet::new();
    parts.retain(|part| seen.insert(part.name.clone()));
    parts
}

#[test]
fn decoded_weights_are_the_dequantized_ones_bit_for_bit() {
    for name in QUANTIZED {
        let text = fs::read(quantized(name).join("expected.json")).unwrap();
        let expected: Value = serde_json::from_slice(&text).unwrap();
        let digests = expected["weights"].as_object().unwrap();
        let checkpoint = Checkpoint::open(quantized(name)).unwrap();
        let mut checked = 0;
        for spec in specs(&checkpoint) {
            let tensor = checkpoint.tensor(&spec).unwrap();
            let Some(digest) = digests.get(&spec.name) else {
                assert!(tensor.encoding.plain().is_some(), "{name}: {}", spec.name);
                continue;
            };
            let read = tensor.read().unwrap();
            let mut hash = Sha256::new();
            for value in values(tensor.view(&read)) {
                // Either sign of zero is the same weight.
                hash.update((value + 0.0).to_le_bytes());
            }
            let found: String = hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect();
            assert_eq!(digest, &found, "{name}: {}", spec.name);
            checked += 1;
        }
        assert_eq!(checked, digests.len(), "{name}");
    }
}

/// The format follows from the scheme, the group and the columns; the order from act-order alone.
#[test]
fn formats_follow_the_scheme() {
    use BlockFormat::*;
    for (name, module, format, ordered) in [
        ("awq", "self_attn.q_proj", Uint4x128, false),
        ("awq_neighbours", "self_attn.k_proj", Uint4x32, false),
        ("gptq_act_order", "mlp.down_proj", Uint4x32, true),
        ("gptq_v2", "mlp.down_proj", Int4x128, false),
        ("gptq_8bit", "self_attn.q_proj", Int8x32, true),
        ("ct_w4a16", "self_attn.q_proj", Int4x128, false),
        ("ct_w4a16", "mlp.down_proj", Int8x128, false),
        ("ct_w4a16_order", "self_attn.qkv_proj", Uint4x32, true),
        ("ct_w8a8", "mlp.up_proj", Int8x128, false),
        ("ct_fp8", "self_attn.o_proj", Fp8x128, false),
        ("ct_fp8", "mlp.down_proj", Fp8x32, false),
        ("ct_mxfp4", "mlp.down_proj", MXFP4, false),
        ("ct_nvfp4", "mlp.down_proj", Fp4x16, false),
        ("modelopt_nvfp4", "self_attn.k_proj", Fp4x16, false),
        ("fp8_block", "mlp.gate_proj", Fp8x128, false),
        ("fp8_block", "mlp.down_proj", Fp8x32, false),
        ("fp8_tensor", "self_attn.o_proj", Fp8x32, false),
        ("fp8_latent", "self_attn.kv_b_proj", Fp8x32, false),
        ("fp8_delta", "linear_attn.in_proj_qkv", Fp8x32, false),
        ("fp8_delta", "mlp.experts.3.down_proj", Fp8x32, false),
    ] {
        let checkpoint = Checkpoint::open(quantized(name)).unwrap();
        let stored = format!("model.layers.0.{module}.weight");
        let spec = specs(&checkpoint).into_iter().find(|spec| spec.name == stored).unwrap();
        let tensor = checkpoint.tensor(&spec).unwrap();
        assert_eq!(tensor.encoding, Encoding::Block(format), "{name}: {module}");
        let read = tensor.read().unwrap();
        assert_eq!(read.order.is_some(), ordered, "{name}: {module}");
        let view = tensor.view(&read);
        assert!(view.order_fits(), "{name}: {module}");
        assert_eq!(view.encoding.bytes(spec.shape[1]).map(|row| row * spec.shape[0]), Some(view.bytes.len()));
    }
}

#[test]
fn the_parts_of_a_matrix_are_one_tensor_to_everybody_else() {
    let checkpoint = Checkpoint::open(quantized("gptq_8bit")).unwrap();
    let names: Vec<&str> = checkpoint.tensor_names().collect();
    assert!(names.contains(&"lm_head.weight") && names.contains(&"model.layers.0.mlp.up_proj.weight"));
    let parts = ["qweight", "qzeros", "scales", "g_idx"];
    assert!(!names.iter().any(|name| parts.iter().any(|part| name.ends_with(part))), "{names:?}");
    let (file, stored) = checkpoint.stored_as("lm_head.weight").unwrap();
    assert!(file.ends_with("model.safetensors") && stored == "lm_head.qweight");
    let model = Runner::load(&checkpoint, ReferenceBackend::new(), None).model;
    assert_eq!(model.weight_encoding, Encoding::Block(BlockFormat::Int8x32));
    // Biases of zeros that AutoGPTQ wrote for every layer are no part of a model without biases.
    let checkpoint = Checkpoint::open(quantized("gptq_v2")).unwrap();
    assert!(!checkpoint.tensor_names().any(|name| name.ends_with("bias")));
}

/// As transformers keeps them: each expert's gates and what they gate, and all experts, in one tensor with its scales.
#[test]
fn experts_in_fp8_may_be_one_tensor() {
    const TALL: usize = 32;
    let folder = copy(&quantized("fp8_delta"));
    set_config(folder.path(), |config| {
        config["quantization_config"]["weight_block_size"] = json!([TALL, 128]);
    });
    let mut file = File::read(&folder.path().join("model.safetensors"));
    // Blocks of 128 rows are four of these.
    let rows_of: std::collections::BTreeMap<String, usize> = file
        .tensors
        .iter()
        .map(|(name, stored)| (name.clone(), stored.shape.first().copied().unwrap_or(0)))
        .collect();
    for (name, scales) in &mut file.tensors {
        let Some(weight) = name.strip_suffix("_scale_inv") else { continue };
        let (down, across) = (rows_of[weight].div_ceil(TALL), scales.shape[1]);
        let row = |block: usize| scales.bytes[block * TALL / 128 * 4 * across..][..4 * across].to_vec();
        (scales.bytes, scales.shape) = ((0..down).flat_map(row).collect(), vec![down, across]);
    }
    let part =
        |layer: usize, expert: usize, of: &str| format!("model.layers.{layer}.mlp.experts.{expert}.{of}");
    let layers = (0..).take_while(|layer| rows_of.contains_key(&part(*layer, 0, "down_proj.weight"))).count();
    let experts =
        (0..).take_while(|expert| rows_of.contains_key(&part(0, *expert, "down_proj.weight"))).count();
    assert!(layers > 0 && experts > 1);
    for layer in 0..layers {
        for (stored, of) in
            [("gate_up_proj", &["gate_proj", "up_proj"][..]), ("down_proj", &["down_proj"][..])]
        {
            for (suffix, of_suffix) in [("", ".weight"), ("_scale_inv", ".weight_scale_inv")] {
                let mut all = Stored { dtype: String::new(), shape: vec![experts, 0, 0], bytes: Vec::new() };
                for (expert, name) in
                    (0..experts).flat_map(|expert| of.iter().map(move |name| (expert, name)))
                {
                    let name = part(layer, expert, &format!("{name}{of_suffix}"));
                    let one = file.tensors.remove(&name).unwrap();
                    all.shape = vec![experts, of.len() * one.shape[0], one.shape[1]];
                    (all.dtype, all.bytes) = (one.dtype, [all.bytes, one.bytes].concat());
                }
                file.tensors.insert(format!("model.layers.{layer}.mlp.experts.{stored}{suffix}"), all);
            }
        }
    }
    file.write();
    assert_eq!(common::logits(folder.path()), common::logits(&quantized("fp8_delta")));
    let lost = "model.layers.0.mlp.experts.gate_up_proj_scale_inv";
    file.tensors.remove(lost);
    file.write();
    let error = Checkpoint::open(folder.path()).err().expect("refused").to_string();
    assert!(error.contains(lost) && error.contains("missing"), "{error}");
}

/// Llama 4 as Meta publishes it in FP8: experts are turned, and rows have scales.
#[test]
fn turned_experts_have_a_scale_for_each_row() {
    let folder = copy_of("llama4_text");
    // Rows of whole blocks.
    set_config(folder.path(), |config| {
        (config["hidden_size"], config["intermediate_size"]) = (64.into(), 32.into());
    });
    let mut file = File::read(&folder.path().join("model.safetensors"));
    let mut random = common::Random(5);
    for stored in file.tensors.values_mut() {
        for size in &mut stored.shape {
            *size = match *size {
                40 => 64,
                20 => 32,
                size => size,
            };
        }
        let value =
            |random: &mut common::Random| half::bf16::from_f32(random.below(2001) as f32 / 5000.0 - 0.2);
        let count: usize = stored.shape.iter().product();
        stored.bytes = (0..count).flat_map(|_| value(&mut random).to_le_bytes()).collect();
    }
    let whole: Vec<String> = file.tensors.keys().cloned().collect();
    let mut plain = Vec::new();
    for name in whole {
        let experts = name.ends_with(".experts.gate_up_proj") || name.ends_with(".experts.down_proj");
        if !experts && !name.contains(".shared_expert.") {
            continue;
        }
        let stored = file.get(&name);
        let shape = stored.shape.clone();
        // Of experts the last is the row, of other matrices the first.
        let (matrices, rows) = if experts { (shape[0], shape[2]) } else { (1, shape[0]) };
        let of_matrix = shape.iter().product::<usize>() / matrices;
        let scales: Vec<f32> = (0..matrices * rows).map(|_| (1 + random.below(97)) as f32 / 3e4).collect();
        let codes: Vec<u8> = (0..matrices * of_matrix)
            .map(|_| random.below(0x7f) as u8 | (random.below(2) as u8) << 7)
            .collect();
        let values = codes.iter().enumerate().flat_map(|(at, code)| {
            let (matrix, within) = (at / of_matrix, at % of_matrix);
            let row = if experts { within % rows } else { within / (of_matrix / rows) };
            let value = folio_model::quant::e4m3_in_256ths(*code).to_f32() * 256.0;
            (scales[matrix * rows + row] * value).to_le_bytes()
        });
        plain.push((
            name.clone(),
            Stored { dtype: "F32".to_owned(), shape: shape.clone(), bytes: values.collect() },
        ));
        (stored.dtype, stored.bytes) = ("F8_E4M3".to_owned(), codes);
        let shape = match (experts, name.ends_with("gate_up_proj")) {
            (true, true) => vec![matrices, 1, rows],
            (true, false) => vec![matrices, rows, 1],
            (false, _) => vec![rows, 1],
        };
        let bytes = scales.iter().flat_map(|scale| scale.to_le_bytes()).collect();
        file.tensors.insert(format!("{name}_scale"), Stored { dtype: "F32".to_owned(), shape, bytes });
    }
    file.write();
    set_config(folder.path(), |config| {
        config["quantization_config"] = json!({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": ["lm_head"]});
    });
    let found = common::logits(folder.path());
    // `fp8` has no scales of rows.
    set_config(folder.path(), |config| config["quantization_config"] = json!({"quant_method": "fp8"}));
    let error = Checkpoint::open(folder.path()).err().expect("refused").to_string();
    assert!(error.contains("experts") && error.contains("fbgemm_fp8"), "{error}");
    set_config(folder.path(), |config| config["quantization_config"] = Value::Null);
    for (name, stored) in plain {
        file.tensors.remove(&format!("{name}_scale"));
        file.tensors.insert(name, stored);
    }
    file.write();
    assert_eq!(found, common::logits(folder.path()));
}

/// Older checkpoints of ModelOpt say in a file of their own how they are quantized; the tensors say which module is how.
#[test]
fn modelopt_says_it_in_either_file() {
    let say = |folder: &std::path::Path, quantization: Value| {
        let text = json!({"producer": {"name": "modelopt"}, "quantization": quantization}).to_string();
        fs::write(folder.join("hf_quant_config.json"), text).unwrap();
    };
    for (name, algorithm) in [
        ("modelopt_nvfp4", "NVFP4"),
        ("modelopt_nvfp4", "MIXED_PRECISION"),
        ("fp8_tensor", "FP8"),
        ("fp8_tensor", "MIXED_PRECISION"),
    ] {
        let folder = copy(&quantized(name));
        let path = folder.path().join("config.json");
        let mut config: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
        config["quantization_config"] = Value::Null;
        fs::write(&path, config.to_string()).unwrap();
        say(
            folder.path(),
            json!({"quant_algo": algorithm, "group_size": 16, "exclude_modules": ["lm_head"]}),
        );
        check_fixture(folder.path(), ReferenceBackend::new);
    }
    // Only the KV cache is quantized, whose scales are read past.
    let folder = copy_of("llama3");
    let mut file = File::read(&folder.path().join("model.safetensors"));
    let scale = Stored { dtype: "F32".to_owned(), shape: Vec::new(), bytes: 0.5f32.to_le_bytes().to_vec() };
    file.tensors.insert("model.layers.0.self_attn.k_proj.k_scale".to_owned(), scale);
    file.write();
    say(folder.path(), json!({"quant_algo": null, "kv_cache_quant_algo": "FP8"}));
    check_fixture(folder.path(), ReferenceBackend::new);
}

#[test]
fn the_digest_sees_every_part() {
    let digest = |folder: &std::path::Path| {
        let checkpoint = Checkpoint::open(folder).unwrap();
        let options = LoadOptions {
            max_rows: 8,
            max_logit_rows: 1,
            max_model_len: Some(64),
            kv_formats: DType::F32.into(),
            block_tokens: 16,
            keeps_all: false,
            taps: None,
            progress: None,
        };
        let model = Model::load(&checkpoint, &mut ReferenceBackend::new(), options).unwrap();
        assert_eq!(model.digest, checkpoint.digest(64).unwrap());
        model.digest
    };
    let original = digest(&quantized("gptq_act_order"));
    // One bit of the first value, which is in the first block of a row. Groups are exchanged: 0 for 1 and 1 for 0.
    for part in ["qweight", "qzeros", "scales", "g_idx"] {
        let folder = copy(&quantized("gptq_act_order"));
        let mut file = File::read(&folder.path().join("model.safetensors"));
        let bytes = &mut file.get(&format!("model.layers.0.mlp.down_proj.{part}")).bytes;
        match part {
            "g_idx" => bytes.chunks_mut(4).filter(|group| group[0] < 2).for_each(|group| group[0] ^= 1),
            _ => bytes[0] ^= 1,
        }
        file.write();
        assert_ne!(digest(folder.path()), original, "{part}");
    }
}

#[test]
fn progress_covers_every_byte_once() {
    let checkpoint = Checkpoint::open(quantized("awq")).unwrap();
    let mut last = None;
    let mut record = |p: folio_model::Progress<'_>| last = Some((p.done_bytes, p.total_bytes));
    let options = LoadOptions { progress: Some(&mut record), ..common::options(None) };
    Model::load(&checkpoint, &mut ReferenceBackend::new(), options).unwrap();
    let (done, total) = last.unwrap();
    assert!(done == total && total > 0, "{done} of {total}");
}
